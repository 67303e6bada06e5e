"""Choice of micro-batch and tile sizes: the fastest sizes that fit."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.bounds.bounds import busy_s
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, supported_attention
from penstock.planner.predict.cost import region_of
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.predict.simulate import simulate
from penstock.planner.search import tuning
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.greedy import Greedy
from penstock.planner.search.micro_batch import SIZES, candidates, sizes_of
from penstock.planner.search.remedy import Request
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search
from penstock.planner.search.tree import Tree
from penstock.planner.search.tuning import LEAST_LOSS_TILE, MORE_PARTS, MOST_MICRO_BATCHES, N_PARTS, NEAR_FRACTION
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model, Saved
from tests.lanes import mostly_slow
from tests.tiny import tiny_config

GB, GIB = 10**9, 2**30
LONG = 512 * 1024
LOSS_TILE = tuning.LOSS_TILE["eager"]
SMALL = Model(tiny_config("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=4096))
# Model, machine, device memory, sequence length, sequences: limited by compute, memory, link or optimizer
CELLS = [(SMALL, "rtx4090-desktop", 24 * GB, 1024, 6), (SMALL, "rtx4090-desktop", 2 * GB, 1024, 8)]
CELLS += [(SMALL, "h200-pcie5", 3 * GB, 4096, 7), (SMALL, "gh200", 3 * GB, 256, 4)]
CELLS += [(read_model("qwen2.5-0.5b"), "rtx4090-desktop", 8 * GB, 1024, 5)]
SEARCHED_CELLS = (0, 4)  # cells with a search of every size
MANY = 12  # number of sizes above which the test searches every third size


def machine_with(machine: str, device_bytes: int) -> Profile:
    return read_profile(machine).with_memory(device_bytes, None)


def start(model: Model, profile: Profile, seq_len: int, batch: int, **fields) -> Semantics:
    attention = supported_attention(model)[0]
    return with_kernels(model, Semantics(seq_len, batch, 1, attention=attention, **fields), profile)  # type: ignore[arg-type]


def chosen(model: Model, profile: Profile, semantics: Semantics, free: frozenset[str] = SIZES) -> Semantics:
    return Request(model, semantics, profile, None, free).resized().semantics


def fastest(model: Model, profile: Profile, semantics: Semantics) -> SearchResult:
    return search(model, sizes_of(model, semantics, profile), profile, None, SIZES)


@lru_cache(maxsize=64)
def alone(cell: int, semantics: Semantics) -> SearchResult | None:
    """Return the memoised search result for this size alone, or None if no plan fits."""
    model, machine, device_bytes, _, _ = CELLS[cell]
    try:
        return search(model, [(semantics, build_workload(model, semantics))], machine_with(machine, device_bytes))
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("cell", SEARCHED_CELLS)
def test_no_other_micro_batch_is_faster_by_half_a_percent(cell: int) -> None:
    model, machine, device_bytes, seq_len, batch = CELLS[cell]
    profile = machine_with(machine, device_bytes)
    semantics, free = start(model, profile, seq_len, batch), SIZES - {"micro_batch"}
    answer = fastest(model, profile, semantics)
    all_sizes = (size for n in range(1, batch + 1) for size, _ in sizes_of(model, replace(semantics, micro_batch=n), profile, free))
    best_s = min(result.step_s for size in all_sizes if (result := alone(cell, size)) is not None)
    assert answer.certificate.policy_bound_s <= best_s * (1 + 1e-9), "no micro-batch is below"
    assert answer.step_s <= best_s * 1.005


@mostly_slow("cell", SEARCHED_CELLS)
def test_the_certificate_is_about_every_size_that_was_free(monkeypatch: pytest.MonkeyPatch, cell: int) -> None:
    """The certified bound is the minimum over all sizes, including sizes without a search."""
    model, machine, device_bytes, seq_len, batch = CELLS[cell]
    profile = machine_with(machine, device_bytes)
    sizes = sizes_of(model, start(model, profile, seq_len, batch), profile)
    monkeypatch.setattr(tuning, "MOST_SEARCHED", 1)
    answer = search(model, sizes, profile, None, SIZES)
    proof = answer.certificate
    assert (proof.n_sizes, proof.free) == (len(sizes), tuple(sorted(SIZES)))
    assert proof.policy_bound_s <= proof.size_bound_s <= answer.step_s * (1 + 1e-9)
    for size in sizes if len(sizes) < MANY else [*sizes[::3], *(size for size in sizes if size[0] == answer.plan.semantics)]:
        result = alone(cell, size[0])
        assert result is not None
        assert proof.policy_bound_s <= result.step_s * (1 + 1e-9)
        if size[0] == answer.plan.semantics:
            assert result.certificate.policy_bound_s <= proof.size_bound_s * (1 + 1e-9)


def test_a_size_is_searched_where_faster_ones_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxation may admit sizes without a fitting policy."""
    profile = machine_with("rtx4090-desktop", 24 * GB)
    sizes = sizes_of(SMALL, start(SMALL, profile, 1024, 64), profile)
    explore, last = Tree.explore, sizes[-1][0]
    monkeypatch.setattr(Tree, "try_first", lambda *_: float("inf"))
    monkeypatch.setattr(Tree, "explore", lambda tree, known_s: explore(tree, known_s) if tree.evaluator.semantics == last else None)
    assert search(SMALL, sizes, profile).plan.semantics == last


@mostly_slow("host_bytes", [512 * GB, 2000 * GB])
def test_a_large_model_on_a_small_card_takes_the_fastest_size(host_bytes: int) -> None:
    """24 GB of device memory, limited by activations: compare greedy policies of each size with the chosen plan."""
    model, profile = read_model("qwen2.5-14b"), read_profile("rtx4090-server").with_memory(24 * GB, host_bytes)
    answer = fastest(model, profile, start(model, profile, 4096, 4))
    for semantics, workload in sizes_of(model, start(model, profile, 4096, 4), profile):
        evaluator = Evaluator(model, workload, semantics, profile)
        steps_s = [evaluator.step_s(policy) for policy in Greedy(evaluator).policies()]
        assert answer.step_s <= min(steps_s, default=float("inf")) * (1 + NEAR_FRACTION)
        assert answer.certificate.policy_bound_s <= min(steps_s, default=float("inf"))


@given(st.integers(1, 5000))
def test_candidates_are_few_and_cut_a_batch_into_equal_parts(batch: int) -> None:
    sizes = candidates(Semantics(seq_len=1, batch_size=batch, micro_batch=1))
    assert sizes[0] == batch
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) <= len(N_PARTS) + len(MORE_PARTS)
    for larger, smaller in pairwise(sizes):
        assert larger <= 2 * smaller + 1
    assert sizes[-1] == 1


@pytest.mark.slow
def test_more_memory_never_makes_a_step_slower_than_its_gap() -> None:
    model, seq_len, batch = SMALL, 2048, 24
    fastest_s = float("inf")
    for device_bytes in (size_gb * GB for size_gb in (2, 3, 6, 24)):
        profile = machine_with("h200-pcie5", device_bytes)
        answer = fastest(model, profile, start(model, profile, seq_len, batch))
        assert answer.step_s <= fastest_s * (1 + max(answer.certificate.gap_fraction, 1e-9)), device_bytes
        fastest_s = min(fastest_s, answer.step_s)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_batch_of_a_billion_sequences_makes_no_long_lists(micro_batch: int | None) -> None:
    """The step may have more than 256 micro-batches if it does not fit otherwise."""
    profile = machine_with("rtx4090-desktop", 24 * GB)
    semantics = start(read_model("qwen2.5-0.5b"), profile, 512, 10**9)
    free = SIZES if micro_batch is None else SIZES - {"micro_batch"}
    resized = chosen(read_model("qwen2.5-0.5b"), profile, semantics, free)
    assert resized.n_micro_batches == 10**9 if micro_batch else resized.n_micro_batches > MOST_MICRO_BATCHES


@mostly_slow("cell", range(len(CELLS)))
def test_greedy_plans_are_right_and_no_step_beats_their_bounds(cell: int) -> None:
    model, machine, device_bytes, seq_len, _ = CELLS[cell]
    profile = machine_with(machine, device_bytes)
    semantics = replace(start(model, profile, seq_len, 2 * 26 + 1), micro_batch=2)  # 26 micro-batches and a smaller one
    workload = build_workload(model, semantics)
    greedy = Greedy(Evaluator(model, workload, semantics, profile))
    policies = greedy.policies()
    assert {1} < {policy.accumulation_group for policy in policies}
    for policy in policies:
        plan = lower(model, workload, semantics, policy, profile.to_json())
        check(plan)
        step_s = simulate(plan, greedy.cost.demands(plan), region_of(profile)).step_s
        lanes_s = busy_s(greedy.evaluator.setup(policy), greedy.cost).values()
        assert max(lanes_s) <= greedy.evaluator.bound_s(policy) * (1 + 1e-9) <= step_s * (1 + 2e-9)
        larger = max(policy.resident_blocks, default=-1) + 1
        if larger < len(workload.blocks) and policy.save == (Saved.ALL,) * workload.n_layers and not policy.device_blocks:
            extended = replace(policy, resident_blocks=tuple(range(larger + 1)))
            assert not footprint(frame(model, workload, semantics, extended), profile).fits, "memory is left"


@mostly_slow("seq_len", [2**17, 2**15, 4096])
def test_sizes_that_were_named_stay_and_others_are_chosen_anew(seq_len: int) -> None:
    model, profile = read_model("qwen2.5-7b"), read_profile("rtx4090-server")
    semantics = start(model, profile, seq_len, 4)
    named = replace(semantics, micro_batch=2, mlp_tile_tokens=48, loss_tile_tokens=7)
    assert sizes_of(model, named, profile) == sizes_of(model, semantics, profile)
    assert [size for size, _ in sizes_of(model, named, profile, frozenset())] == [named]
    for field in SIZES:
        for resized, workload in sizes_of(model, named, profile, SIZES - {field}):
            assert getattr(resized, field) == getattr(named, field)
            assert workload == build_workload(model, resized)


def device_bytes(model: Model, semantics: Semantics, profile: Profile, spilled: bool = False) -> int:
    workload = build_workload(model, semantics)
    policy = Policy(spill_blocks=tuple(range(workload.n_layers)) if spilled else ())
    return footprint(frame(model, workload, semantics, policy), profile).device_peak_bytes


def test_half_a_million_tokens_of_a_7b_model_fit_by_tiles_alone() -> None:
    model, profile = read_model("qwen2.5-7b"), read_profile("gh200")
    semantics = chosen(model, profile, Semantics(LONG, 1, 1))
    assert semantics.mlp_tile_tokens is not None
    assert device_bytes(model, semantics, profile, spilled=True) <= profile.device.memory_bytes.value
    assert device_bytes(model, replace(semantics, mlp_tile_tokens=None), profile, spilled=True) > profile.device.memory_bytes.value
    experts = chosen(read_model("qwen3-30b-a3b"), read_profile("rtx4090-server"), Semantics(LONG, 1, 1))
    assert (experts.micro_batch, experts.mlp_tile_tokens) == (1, None), "experts get no tiles"


def test_tiles_of_the_loss_shrink_only_where_logits_do_not_fit() -> None:
    model, profile = Model(tiny_config("llama", vocab_size=100_000)), read_profile("cpu-2core")
    tiles = []
    for memory_bytes in (GIB * 4, GIB * 2, GIB, GIB // 2, GIB // 4):
        semantics = chosen(model, profile.with_memory(memory_bytes, None), Semantics(2048, 1, 1))
        tiles.append(semantics.loss_tile_tokens)
        assert semantics.mlp_tile_tokens is None
        *layers, head = build_workload(model, semantics).blocks
        if semantics.loss_tile_tokens < LOSS_TILE:
            larger_head = build_workload(model, replace(semantics, loss_tile_tokens=2 * semantics.loss_tile_tokens)).blocks[-1]
            assert head.transient_bytes < larger_head.transient_bytes > max(b.transient_bytes for b in layers)
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] == LOSS_TILE
    assert tiles[-1] == LEAST_LOSS_TILE


def test_sizes_of_a_model_that_never_fits_need_the_least_memory() -> None:
    model, profile = read_model("qwen2.5-7b"), read_profile("cpu-2core")
    semantics = chosen(model, profile, Semantics(2**15, 1, 1))
    least = device_bytes(model, semantics, profile, spilled=True)
    assert least > profile.device.memory_bytes.value
    for tile, loss in product((None, 1024, 2048, 16384), (128, 512, 1024)):
        variant = replace(semantics, mlp_tile_tokens=tile, loss_tile_tokens=loss)
        assert device_bytes(model, variant, profile, spilled=True) >= least
