"""Is it said who should not stream, and is that figure right?"""

import json
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.schema import Profile, read_profile
from penstock.cli.main import cli
from planner.model.workload import build_workload, read_model
from planner.predict.cost import CostModel
from planner.predict.memory import footprint, frame
from planner.predict.resident import Tier, advice, again_s, fill, leanest, resident
from planner.search.search import search
from planner.show.compare import Speed, compare
from planner.show.report_words import Known, verdict
from runtime.plan import Policy, Semantics, saves
from runtime.plan.workload import ITEM_BYTES, BlockKind, Saved
from tests.strategies import MODEL, PROFILE, semantics, workloads

MADE_UP = Profile.from_json(PROFILE)
RATE = PROFILE["device"]["memory_bytes_per_s"]["value"]
LAUNCH_S = PROFILE["device"]["kernel_overhead_s"]["value"]
KIB = 1024
ENOUGH_KIB = 6000  # for all that four layers of the strategy can keep, and what is computed


def on(profile, model, of):
    return resident(frame(model, build_workload(model, of), of, Policy()), CostModel(profile))


@cache
def saying(*args):
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def ways(workload, b, of, cost):
    """Each way to have what a layer's backward needs: bytes kept, bytes while it is computed, seconds a step of computing again."""
    block = workload.blocks[b]
    yield block.kept_bytes, block.transient_bytes, 0.0
    for saved in (Saved.INPUT, Saved.ATTENTION, Saved.PRODUCTS):
        again = block.recompute(saved)
        if again is not None:
            step_s = (of.batch_size // of.micro_batch) * cost.recompute_s(block, again, of)
            if of.n_left:
                less = workload.smaller[b]
                step_s += cost.recompute_s(less, less.recompute(saved), of)
            yield again.saved_bytes, again.transient_bytes, step_s


def state_bytes(of, workload):
    """The state of training, and inputs of layers, spelled out."""
    n, total = of.n_micro_batches, 0
    for block in workload.blocks:
        wide = block.kind is not BlockKind.LAYER and workload.tied
        gradient = 4 if n > 1 or wide else ITEM_BYTES[of.gradient_dtype]
        master = 0 if of.master_dtype == of.compute_dtype else ITEM_BYTES[of.master_dtype]
        total += block.host_elements * (ITEM_BYTES[of.compute_dtype] + master + 4 + 4) + block.slot_elements * gradient
    return total + sum(-(-block.boundary_bytes // 256) * 256 for block in workload.blocks[:-1])


def seconds_without_recompute(of, workload, cost):
    """Every micro-batch, one after another, then the norm and AdamW, spelled out."""
    n, item, total_s = of.n_micro_batches, ITEM_BYTES[of.compute_dtype], 0.0
    for m in range(n):
        for block in workload.smaller if of.n_left and m == n - 1 else workload.blocks:
            total_s += (
                cost.loss_s(block, of) if block.kind is BlockKind.HEAD else cost.forward_s(block, of) + cost.backward_s(block, of)
            )
            wide = block.kind is not BlockKind.LAYER and workload.tied
            moved = item * (2 if block.kind is BlockKind.EMBEDDING else 1)  # its gradient is dense: made, and read
            moved += 0 if m == 0 else 4
            moved += 4 if n > 1 else 0
            moved += (4 if wide else ITEM_BYTES[of.gradient_dtype]) if m == n - 1 else 0
            total_s += block.slot_elements * moved / RATE
    for block in workload.blocks:
        wide = block.kind is not BlockKind.LAYER and workload.tied
        gradient_bytes = block.slot_elements * (4 if n > 1 or wide else ITEM_BYTES[of.gradient_dtype])
        total_s += cost.square_s(block, gradient_bytes)
        weight = 0 if of.master_dtype == of.compute_dtype else item
        total_s += (block.n_params * (2 * (ITEM_BYTES[of.master_dtype] + 8) + weight) + gradient_bytes) / RATE
        total_s += sum(p.tied_to is None for p in block.parameters) * LAUNCH_S
    return total_s


@pytest.mark.drawn
@given(st.data())
@settings(deadline=None)
def test_a_step_is_what_one_computes_by_hand_over_every_choice_of_activations(data):
    """Brute force over all of them: a step fits exactly where one of them does, and is no slower than the best by more than what a
    single layer could still have saved."""
    of = data.draw(semantics().filter(lambda of: of.ranks == 1))
    workload = data.draw(workloads(of, max_layers=4))
    more_kib = data.draw(st.sampled_from([0, 300, 1500, ENOUGH_KIB]))
    n_bytes = state_bytes(of, workload) + more_kib * KIB
    cost = CostModel(MADE_UP.with_memory(n_bytes, None))
    room_bytes = n_bytes - state_bytes(of, workload) - 1000
    fixed_s = seconds_without_recompute(of, workload, cost)

    layers = [list(ways(workload, b, of, cost)) for b in range(1, len(workload.blocks) - 1)]
    vocab_bytes = max(workload.blocks[0].transient_bytes, workload.blocks[-1].transient_bytes)
    fitting_s = [
        sum(seconds for _, _, seconds in choice)
        for choice in product(*layers)
        if sum(kept for kept, _, _ in choice) + max(vocab_bytes, *(transient for _, transient, _ in choice)) <= room_bytes
    ]
    found = resident(frame(MODEL, workload, of, Policy()), cost)
    assert (found.step_s is not None) == bool(fitting_s)
    if not fitting_s:
        assert "does_not_fit" in found.to_json()
        return
    assert found.needs.device_peak_bytes <= n_bytes
    one_layer_s = max(seconds for choices in layers for _, _, seconds in choices)
    best_s = fixed_s + min(fitting_s)
    assert best_s * (1 - 1e-9) <= found.step_s <= (best_s + one_layer_s) * (1 + 1e-9)
    if more_kib == ENOUGH_KIB:
        assert found.step_s == pytest.approx(fixed_s)
        assert found.step_s == pytest.approx(best_s)


tiers = st.builds(Tier, st.none(), st.integers(0, 20), st.integers(0, 5), st.integers(0, 10).map(float))


@given(st.lists(st.lists(tiers, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 80))
def test_the_knapsack_loses_less_than_one_step_of_one_layer(layers, vocab_bytes, room_bytes):
    def needed(choice):
        return sum(tier.kept_bytes for tier in choice) + max(vocab_bytes, *(tier.transient_bytes for tier in choice))

    every = list(product(*layers))
    least_bytes = min(map(needed, every))
    assert needed(leanest(layers, vocab_bytes)) == least_bytes
    chosen = fill(layers, vocab_bytes, room_bytes)
    assert (chosen is not None) == (least_bytes <= room_bytes)
    if chosen is not None:
        assert needed(chosen) <= room_bytes
        best_s = min(again_s(choice) for choice in every if needed(choice) <= room_bytes)
        largest_s = max(a.again_s - b.again_s for tiers in layers for a in tiers for b in tiers)
        assert best_s <= again_s(chosen) <= best_s + largest_s
    assert again_s(fill(layers, vocab_bytes, 10**3)) == sum(min(tier.again_s for tier in tiers) for tiers in layers)


@pytest.mark.parametrize("batch", [1, 4])
def test_it_fits_at_the_byte_and_not_with_one_less(batch):
    model, profile, of = read_model("qwen2.5-0.5b"), read_profile("rtx4090-desktop"), Semantics(512, batch, 1)
    least = on(profile.with_memory(10**9, None), model, of)
    assert least.step_s is None
    assert set(least.saved) == {Saved.INPUT}
    short = on(profile.with_memory(least.needs.device_peak_bytes - 1, None), model, of)
    assert short.step_s is None
    assert short.to_json()["does_not_fit"].startswith("device memory is 1 B short")
    exact = on(profile.with_memory(least.needs.device_peak_bytes, None), model, of)
    assert exact.step_s is not None
    roomy = on(profile, model, of)
    assert set(roomy.saved) == {Saved.ALL}
    assert roomy.step_s < exact.step_s
    full = on(profile.with_memory(roomy.needs.device_peak_bytes, None), model, of)
    assert full == replace(roomy, needs=full.needs)
    almost = on(profile.with_memory(roomy.needs.device_peak_bytes - 1, None), model, of)
    assert almost.saved.count(Saved.ALL) == len(almost.saved) - 1
    assert roomy.step_s < almost.step_s < exact.step_s


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-30b-a3b"])
def test_besides_state_memory_is_that_of_a_plan_that_keeps_as_much(model):
    """One account for everybody: boundaries, activations, the block being computed, documents, workspaces, context."""
    model, profile, of = read_model(model), read_profile("h100-sxm").with_memory(10**13, None), Semantics(2048, 6, 2)
    workload = build_workload(model, of)
    found = resident(frame(model, workload, of, Policy()), CostModel(profile))
    assert set(found.saved) == {Saved.ALL}
    keeping = Policy(save=saves(all=tuple(range(1, workload.n_layers + 1))))
    planned = footprint(frame(model, workload, replace(of, batch_size=2), keeping), profile).device
    assert planned["documents"] > 0
    named = ("activations", "block being computed", "kernels and workspaces", "context", "documents", "kept activations")
    assert sum(found.needs.device[name] for name in named) == sum(planned[name] for name in named)
    state = {"weights", "masters", "moments", "gradients"}
    assert set(found.needs.device) == {*named, *state}


def test_sixteen_bytes_a_parameter_and_two_more_where_micro_batches_are_summed():
    """bf16 weight and gradient, fp32 master and two moments: the figure that everybody knows. Sums are fp32."""
    model, profile = read_model("qwen2.5-7b"), read_profile("b200")
    state = ("weights", "masters", "moments", "gradients")
    for batch, n_bytes in ((1, 16), (4, 18)):
        of = Semantics(1024, batch, 1)
        needs = on(profile, model, of).needs.device
        n_params = build_workload(model, of).n_params
        assert sum(needs[name] for name in state) == pytest.approx(n_bytes * n_params, rel=1e-4)


def test_where_streaming_is_slower_the_first_lines_say_so():
    args = ("plan", "qwen2.5-7b", "--machine", "b200", "--batch-size", "8", "--seq-len", "1024", "--policy", "megatrain-plus")
    said, words = json.loads(saying(*args, "--json")), saying(*args)
    step_s, kept_s = said["prediction"]["step_s"], said["baselines"]["resident"]["step_s"]
    assert step_s > 2 * kept_s
    first = " ".join(" ".join(words.splitlines()[:10]).split())
    assert advice(kept_s, step_s) in first
    assert f"{step_s / kept_s:.2f} times as fast; Penstock streams it" in first
    assert f"\nresident        {kept_s * 1e3:.0f} ms " in words
    assert set(said["baselines"]["resident"]) == {"step_s"}


def test_where_it_does_not_fit_or_is_no_faster_nothing_is_advised():
    args = ("plan", "qwen2.5-7b", "--machine", "rtx4090-server", "--batch-size", "4", "--seq-len", "512", "--policy", "megatrain")
    said, words = json.loads(saying(*args, "--json")), saying(*args)
    assert said["baselines"]["resident"]["does_not_fit"].startswith("device memory is ")
    assert "all training state fits" not in words
    assert "\nresident " in words
    assert advice(None, 1.0) is None
    assert advice(1.0, 1.0) is None
    assert "1.25 times as fast" in advice(0.8, 1.0)


def test_the_proof_says_what_its_bound_covers():
    """A host that updates: keeping all state on the device can be faster than that bound, as here."""
    args = ("plan", "qwen2.5-7b", "--machine", "b200", "--batch-size", "8", "--seq-len", "1024", "--policy", "megatrain-plus")
    said, words = json.loads(saying(*args, "--json")), " ".join(saying(*args).split())
    assert said["baselines"]["resident"]["step_s"] < said["certificate"]["machine_bound_s"]
    assert "no schedule with this micro-batch is below" in words


@pytest.mark.fast("some")
@pytest.mark.parametrize("machine", ["gb10", "cpu-2core"])
def test_where_host_and_device_are_one_memory_there_is_no_such_figure(machine):
    of, model, profile = Semantics(128, 2, 2), read_model("smollm2-360m"), read_profile(machine)
    assert on(profile, model, of) is None
    assert on(profile.with_memory(6 * 10**9, None), model, of) is None
    answer = search(model, build_workload(model, of), of, profile, Policy())
    assert "resident" not in answer.all_baselines()


@pytest.mark.soak
def test_compare_has_a_line_for_each_machine_that_is_better_without_streaming():
    of, machines = Semantics(1024, 4, 4), [read_profile(name) for name in ("h100-sxm", "gb10", "rtx4090-desktop")]
    small = machines[-1].with_memory(12 * 10**9, None)
    found = compare(read_model("qwen2.5-0.5b"), [*machines[:2], small], of, Policy(), frozenset({"loss_tile_tokens"}))
    speeds = {c.machine: c.outcome for c in found.candidates}
    assert all(isinstance(speed, Speed) for speed in speeds.values())
    assert [speeds[name].resident_step_s is None for name in ("h100-sxm", "gb10", "rtx4090-desktop")] == [False, True, True]
    lines = [note for note in found.notes() if "all training state fits" in note]
    wins = sorted(name for name, s in speeds.items() if s.resident_step_s is not None and s.resident_step_s < s.step_s)
    assert "h100-sxm" in wins
    assert sorted(line.partition(":")[0] for line in lines) == wins


def test_the_page_of_a_plan_says_so_too():
    model, profile, of = read_model("qwen2.5-7b"), read_profile("b200"), Semantics(1024, 8, 8)
    answer = search(model, build_workload(model, of), of, profile, Policy())
    known = Known(answer.plan, profile, answer.prediction, answer.needs, None, (), None, [])
    said = advice(answer.resident.step_s, answer.step_s)
    assert [s for s in verdict(known) if "all training state" in s.lower()] == [f"A{said[1:]}."]
    shared = replace(known, profile=read_profile("cpu-2core"))
    assert not any("training state" in s for s in verdict(shared))
