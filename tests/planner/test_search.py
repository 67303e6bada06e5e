"""Plan search: plans against brute force, bounds against simulated steps, and the certificate."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.any_memory import with_any_memory
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.bounds.bounds import places_to_stay, policy_bound, policy_bounds
from penstock.planner.bounds.machine import machine_bound
from penstock.planner.bounds.work import WorkCache, ops_of, spared_ops
from penstock.planner.lower.lower import lower
from penstock.planner.model.config import shipped_model
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.predict.scaled_profile import Group, faster, sped_up, with_quantities
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.claim import CUT
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.greedy import Greedy
from penstock.planner.search.micro_batch import SIZES, shared_step, sizes_of
from penstock.planner.search.policies import BASELINES, Family, Slots, Way, baseline, families, smallest_plans, staying, with_ways
from penstock.planner.search.relax import Relaxation
from penstock.planner.search.search import search, search_machine
from penstock.planner.search.tree import Tree
from penstock.planner.search.tuning import GRADIENT_SLOTS, NEAR_FRACTION
from penstock.runtime.errors import DoesNotFitError, PlanError
from penstock.runtime.plan import Kind, Lane, Policy, Semantics, Update
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.train import parse_train
from penstock.runtime.plan.workload import Model, Saved
from penstock.runtime.units import GB
from tests.adversary import cell, sample_policy, sample_workload
from tests.lanes import examples, mostly_slow
from tests.running import penstock, succeeded
from tests.strategies import MODEL as NOBODY
from tests.tiny import tiny_config

STAYING = Way(Saved.INPUT), Way(Saved.PRODUCTS), Way(Saved.ALL)
LEAVING = Way(Saved.PRODUCTS, away=True)
DESKTOP = read_profile("rtx4090-desktop")


def slower(machine, *places):
    """Return the machine profile with these rates divided by 200, so that they limit the step."""
    return with_quantities(read_profile(machine), lambda place, q: sped_up(place, q, 1 / 200) if place.startswith(places) else q)


MACHINES = {
    name: with_any_memory(profile, 10**15, 10**16)
    for name, profile in {
        **{name: read_profile(name) for name in ("h200-pcie5", "rtx4090-desktop", "cpu-2core", "gb10")},
        "slow up": slower("h200-pcie5", "link.h2d.bytes_per_s"),
        "slow down": slower("h200-pcie5", "link.d2h.bytes_per_s"),
        "slow both ways": slower("h200-pcie5", "link.h2d.bytes_per_s", "link.d2h.bytes_per_s", "link.duplex_bytes_per_s"),
        "slow memory": slower("h200-pcie5", "host.dram_bytes_per_s"),
        "slow reduction": slower("h200-pcie5", "host.reduce_bytes_per_s"),
    }.items()
}

# Machines on which saved products gain much time.
SLOW_TO_COMPUTE = [MACHINES["cpu-2core"], MACHINES["gb10"], faster(MACHINES["h200-pcie5"], {Group.MATMUL: 0.02})]


@st.composite
def workloads(draw, semantics, most_layers=5, least_layers=1):
    """Generate blocks of arbitrary proportions with the sampler of the adversary."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    return sample_workload(rng, semantics, draw(st.integers(least_layers, most_layers)))


@st.composite
def semantics(draw):
    micro_batch, n = draw(st.sampled_from([1, 8])), draw(st.integers(1, 4))
    return Semantics(
        seq_len=draw(st.sampled_from([16, 512])),
        batch_size=micro_batch * n - (draw(st.sampled_from([0, 0, 3, 7])) if n > 1 < micro_batch else 0),
        micro_batch=micro_batch,
        compute_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        gradient_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        clip_norm=draw(st.sampled_from([None, 1.0])),
    )


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(50))
def test_bounds_count_no_more_ops_than_the_plan_has(number):
    case = cell(number)
    hold_counts(case.model, case.workload, case.semantics, sample_policy(random.Random(number), case), case.profile)


@pytest.mark.slow
def test_bounds_count_no_more_ops_of_layers_packed_unlike():
    """The layers with most weights are not the slowest to unpack in a model with full and linear attention."""
    model, s = shipped_model("qwen3.5-35b-a3b"), Semantics(4096, 16, 8, train=parse_train("lora"), base="nf4")
    policy = Policy(update=Update.DEFERRED, accumulation_group=2, prefetch_depth=2)
    hold_counts(model, build_workload(model, s), s, policy, DESKTOP)


def hold_counts(model, workload, semantics, policy, profile):
    """Assert that bounds count the op time of the plan exactly, or less for loads."""
    plan, cost = lower(model, workload, semantics, policy, {}), CostModel(profile)
    left_s: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
    for i, (op, demand) in enumerate(zip(plan.ops, cost.demands(plan), strict=True)):
        left_s[op.kind] += plan.often(i) * demand.uncontended_s
    total_s, setup = sum(left_s.values()), frame(model, workload, semantics, policy)
    for kind, demand, count in (counted for b in range(len(workload.blocks)) for counted in ops_of(setup, cost, b)):
        left_s[kind] -= count * demand.uncontended_s
    for kind, (spared_s,) in spared_ops(setup, cost, lambda _, demand: np.array([demand.uncontended_s])):
        left_s[kind] += spared_s
    for kind, s in left_s.items():
        assert s >= -1e-9 * total_s
        assert s <= 1e-9 * total_s or kind in (Kind.READ, Kind.LOAD, Kind.GATHER, Kind.DEQUANTISE)


@given(semantics(), st.data())
@settings(deadline=None, max_examples=examples(8))
def test_the_search_finds_what_brute_force_finds(s, data):
    workload = data.draw(workloads(s, most_layers=2))
    profile = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    s = replace(s, batch_size=s.micro_batch * min(2, s.n_micro_batches))
    hold_against_brute_force(workload, s, profile, every_policy(s, workload, profile, STAYING))


@pytest.mark.slow
@given(semantics(), st.data())
@settings(deadline=None, max_examples=3)
def test_brute_force_finds_nothing_better_where_bytes_leave(s, data):
    """Device memory barely fits full offload of saved tensors; the tolerance is three percent."""
    s = replace(s, seq_len=512, micro_batch=8, batch_size=16, clip_norm=1.0)
    sampled = data.draw(workloads(s, most_layers=2, least_layers=2))  # with one, gradient slots are as large as all saved bytes
    workload = replace(sampled, blocks=tuple(replace(block, kept_bytes=8 * block.kept_bytes) for block in sampled.blocks))
    smallest = Family(Update.DEFERRED, 2, 2, 1).policy()
    leaving = with_ways(smallest, dict.fromkeys(range(1, workload.n_layers + 1), LEAVING))
    profile = data.draw(st.sampled_from(SLOW_TO_COMPUTE))
    needed = footprint(frame(NOBODY, workload, s, leaving), profile)
    profile = profile.with_memory(int(needed.device_peak_bytes * data.draw(st.sampled_from([1.0, 1.02, 1.2]))), None)
    policies = every_policy(s, workload, profile, (*STAYING, LEAVING))
    fitting = (policy for policy in policies if footprint(frame(NOBODY, workload, s, policy), profile).fits)
    hold_against_brute_force(workload, s, profile, fitting, within=1.03)


def hold_against_brute_force(workload, s, profile, policies, within=1.01):
    """Compare a search with brute force, pruned by the bound of each policy."""
    with pytest.MonkeyPatch.context() as patched:  # the synthetic model cannot be built with another micro-batch
        patched.setattr("penstock.planner.search.result.resident_baseline", lambda evaluator, may_split: None)
        answer = search(NOBODY, [(s, workload)], profile)
    cost, region, shortest_s = CostModel(profile), region_of(profile), inf
    bounds_s = {policy: policy_bound(frame(NOBODY, workload, s, policy), cost).seconds for policy in policies}
    for policy in sorted(bounds_s, key=lambda policy: bounds_s[policy]):
        if bounds_s[policy] < shortest_s:
            plan = lower(NOBODY, workload, s, policy, {})
            shortest_s = min(shortest_s, simulate(plan, cost.demands(plan), region, 24).step_s)
    assert answer.prediction.step_s <= shortest_s * within
    assert answer.certificate.policy_bound_s <= shortest_s * (1 + 1e-9)


def every_policy(s, workload, profile, ways_of_layers):
    """Enumerate the policies of a small model, except those that are only useful with scarce memory."""
    layers = range(1, workload.n_layers + 1)
    for family, depth, n_slots in product(families(s, workload), (1, 2, 3, 4), (1, 2, 3)):
        one_group = family.accumulation_group == s.n_micro_batches
        smallest = replace(family.policy(), prefetch_depth=depth, gradient_slots=n_slots)
        on_device = {()}
        plan = frame(NOBODY, workload, s, smallest)
        if family.update is Update.DEFERRED and (may_stay := tuple(places_to_stay(plan, profile))):
            on_device |= {may_stay, tuple(b for b in may_stay if b in layers), may_stay[:1]}
        ways = product(ways_of_layers if family.boundary_stride == 1 else [Way(Saved.INPUT)], repeat=len(layers))
        for saving, resident in product(ways, (False, True)):
            policy = with_ways(smallest, dict(enumerate(saving, start=1)))
            policy = replace(policy, resident_blocks=tuple(layers) if resident else ())
            yield from (staying(plan, policy, blocks) for blocks in on_device if not (resident and blocks))
            if family.summed is not None and not one_group and s.ranks == 1:
                yield replace(policy, sum_blocks=tuple(sorted({*policy.sum_blocks, *layers})))


def test_the_machine_bound_names_what_is_slow():
    s = Semantics(512, 2, 1)
    model = read_model("qwen2.5-0.5b")
    plan = frame(model, build_workload(model, s), s, Policy())
    slow = {name: profile.with_memory(10**9, 10**16) for name, profile in MACHINES.items() if "slow" in name}  # for little state
    named = {name: machine_bound(plan, CostModel(profile)).binding for name, profile in slow.items()}
    links = {"slow up": "link to the device", "slow down": "link to the host", "slow both ways": "link in both directions"}
    assert named == links | {"slow memory": "host DRAM", "slow reduction": "host cores"}


@mostly_slow("opens", [False, True])
def test_a_search_that_simulates_nothing_has_a_true_gap(monkeypatch, opens):
    """The result is the best baseline; the certificate has the lowest family bound, recomputed here."""
    monkeypatch.setattr(Tree, "_suggested", lambda *_: iter(()))
    if not opens:
        monkeypatch.setattr("penstock.planner.search.tuning.MAX_SEARCHED_OPS", 0)
        monkeypatch.setattr("penstock.planner.search.tuning.MOST_RELAXED", 0)
    for name in ("_climb_all", "_prefetch_less"):
        monkeypatch.setattr(Tree, name, lambda self: None)
    monkeypatch.setattr(Greedy, "policies", lambda self: [])
    model, profile = read_model("qwen2.5-7b"), read_profile("rtx4090-server")
    s = Semantics(2048, 8, 4)
    workload = build_workload(model, s)
    answer = search(model, [(s, workload)], profile)
    baselines_s = [result["step_s"] for result in answer.baselines.values() if "step_s" in result]
    assert answer.step_s == min(baselines_s)
    assert answer.certificate.n_simulated == len(baselines_s)

    relaxation = Relaxation(Evaluator(model, workload, s, profile))
    below_s = {f: relaxed.bound_s for f in families(s, workload) if (relaxed := relaxation.solve(f)) is not None}
    lowest_s = min(below_s.values())
    if opens:  # branch on group sizes and slot counts
        lowest_s = inf
        for family, family_s in below_s.items():
            for size, n_slots in product(family.groups, GRADIENT_SLOTS):
                sized = replace(family, accumulation_group=size, largest_group=size)
                relaxed = relaxation.solve(sized, Slots(gradient_slots=n_slots))
                lowest_s = min(lowest_s, max(family_s, relaxed.bound_s) if relaxed else inf)
    assert answer.certificate.policy_bound_s == max(machine_bound(answer.plan, CostModel(profile)).seconds, lowest_s)
    assert answer.certificate.gap_fraction == pytest.approx(answer.step_s / answer.certificate.policy_bound_s - 1)
    assert answer.certificate.gap_fraction > 0.05, "this machine gains from what no baseline does"


@pytest.mark.slow
def test_the_cut_of_one_memory_is_searched():
    """Other splits of the memory pool gain at most half a percent and respect the certified bound."""
    fields, model, semantics = read_profile("gb10").to_json(), read_model("qwen2.5-0.5b"), Semantics(512, 8, 1)
    for part, name, n in (("device", "pool_bytes", 20 * GB), ("device", "memory_bytes", 4 * GB), ("host", "memory_bytes", 16 * GB)):
        fields[part][name]["value"] = float(n)
    machine = Profile.from_json(fields)
    answer, cut = search_machine(model, semantics, machine, None, SIZES | {CUT})
    assert cut.device.memory_bytes.value + cut.host.memory_bytes.value == 20 * GB
    assert CUT in answer.certificate.free
    steps = {}
    for device_gb in range(2, 14, 2):
        variant = machine.with_memory(device_gb * GB, (20 - device_gb) * GB)
        with suppress(DoesNotFitError):
            steps[device_gb] = search(model, sizes_of(model, semantics, variant), variant, free=SIZES).step_s
    assert max(steps.values()) > 1.01 * answer.step_s, "a cut matters here"
    assert answer.certificate.policy_bound_s <= min(steps.values())
    assert answer.step_s <= 1.005 * min(steps.values())


@pytest.mark.slow
def test_policies_whose_plans_are_too_long_keep_their_bounds(monkeypatch):
    """If host memory fits only the gradients of one group, a long plan is returned or rejected with one line."""
    model, machine = read_model("qwen2.5-0.5b"), read_profile("rtx4090-desktop")
    s = Semantics(512, 8, 1)
    workload = build_workload(model, s)
    unlimited = search(model, [(s, workload)], machine)
    monkeypatch.setattr("penstock.planner.search.tuning.LONGEST_SEARCHED_OPS", 5 * len(workload.blocks))
    limited = search(model, [(s, workload)], machine)
    assert limited.certificate.policy_bound_s <= min(unlimited.step_s, limited.step_s) * (1 + 1e-9)
    assert limited.certificate.n_simulated < unlimited.certificate.n_simulated
    assert limited.plan.policy.accumulation_group == 1

    one_group = Policy(accumulation_group=8, spill_blocks=tuple(range(24)))
    needs = footprint(frame(model, workload, s, one_group), machine)
    tight = machine.with_memory(needs.device_peak_bytes + 10**7, needs.host_peak_bytes + 10**7)  # too little for sums on the device
    assert search(model, [(s, workload)], tight).plan.policy.accumulation_group > 1
    monkeypatch.setattr("penstock.planner.search.remedy.MAX_PLAN_OPS", 5 * len(workload.blocks))
    with pytest.raises(PlanError, match="use a larger --micro-batch"):
        search(model, [(s, workload)], tight)


def test_eager_updates_are_tried_only_where_they_are_legal():
    model, profile = read_model("qwen2.5-0.5b"), read_profile("gh200")
    for clip, nonfinite, legal in ((1.0, "stop", False), (None, "skip", False), (None, "stop", True)):
        s = Semantics(512, 2, 1, clip_norm=clip, on_nonfinite=nonfinite)
        workload = build_workload(model, s)
        space = [plan.policy for plan, _ in smallest_plans(model, workload, s, profile)]
        assert (Update.EAGER in {p.update for p in space}) == legal
        assert (baseline("slideformer", s, workload).update is Update.EAGER) == legal
        assert len(set(space)) == len(space)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machine", "device", "host", "batch"),
    [("gpt-oss-120b", "h200-pcie5", None, int(1.5e12), 16), ("qwen2.5-7b", "rtx4090-server", 3 * 10**9, None, 8)],
)
def test_every_change_that_is_named_makes_it_fit(model, machine, device, host, batch):
    options = ["plan", model, "--machine", machine, "--seq-len", 1024, "--batch-size", batch, "--json"]
    options += ["--device-memory", device] if device else ["--host-memory", host]
    rejected = penstock(*options)
    assert rejected.exit_code == 3, rejected.output
    changes = rejected.stderr.split("smallest changes that fit: ")[1].strip().split(", or ")
    assert changes
    for change in changes:
        succeeded(penstock(*options, *change.partition(" (")[0].split()))


def setup_of(model_type, train, n_layers=4, **fields):
    """Build a tiny model, its workload and semantics with this `train` specification."""
    model = Model(tiny_config(model_type, num_hidden_layers=n_layers, tie_word_embeddings=False), name=model_type)
    semantics = Semantics(**{"seq_len": 32, "batch_size": 1, "micro_batch": 1, "gradient_dtype": "fp32"} | fields)
    semantics = replace(semantics, train=parse_train(train))
    return model, build_workload(model, semantics), semantics


@pytest.mark.parametrize("update", [Update.DEFERRED, Update.BARRIER])
@pytest.mark.parametrize("train", ["layers:3", "layers:1-2", "names:*.3.*", "lora:r=4"])
def test_no_plan_with_one_gradient_slot_is_faster_than_its_bound(train, update):
    """The last gradient offload may end in the next step: its first layers are frozen and need not wait."""
    model, workload, semantics = setup_of("qwen3", train)
    policy, cost = Policy(gradient_slots=1, prefetch_depth=3, update=update), CostModel(DESKTOP)
    plan = lower(model, workload, semantics, policy, {})
    step_s = simulate(plan, cost.demands(plan), region_of(DESKTOP)).step_s
    assert policy_bound(frame(model, workload, semantics, policy), cost).seconds <= step_s * (1 + 1e-9)
    search(model, [(semantics, workload)], DESKTOP, policy)  # asserts the same


@mostly_slow("train", ["names:model.norm.weight", "names:lm_head.weight", "layers:7"])
def test_a_device_with_room_for_strided_plans_alone_gets_one(train):
    setup = setup_of("llama", train, n_layers=8, seq_len=128, batch_size=8, micro_batch=4)
    strided, spread = (footprint(frame(*setup, Policy(boundary_stride=n)), DESKTOP).device_peak_bytes for n in (4, 1))
    needs = [needs for _, needs in smallest_plans(*setup, DESKTOP)]
    assert min(n.device_peak_bytes for n in needs) <= strided < spread
    tight = with_any_memory(DESKTOP, strided, 10**12)
    model, workload, semantics = setup
    assert search(model, [(semantics, workload)], tight).needs.fits


def test_saved_bytes_leave_while_loads_come_and_bound_the_step():
    """Duplex use slows both directions of the link: uploads take longer than alone, and the bound includes it."""
    model, train = read_model("llama-3.1-8b"), parse_train("lora")
    semantics = Semantics(seq_len=1024, batch_size=4, micro_batch=4, gradient_dtype="fp32", train=train)
    workload, cost = build_workload(model, semantics), CostModel(with_any_memory(DESKTOP, 10**12, 10**12))
    layers, on_device = tuple(range(1, workload.n_layers + 1)), workload.mixed
    policy = Policy(
        save=(Saved.PRODUCTS,) * len(layers), offload_blocks=layers, spill_blocks=(0, *layers[:-1]), prefetch_depth=2,
        device_blocks=on_device, update=Update.DEFERRED,
    )  # fmt: skip
    plan = lower(model, workload, semantics, policy, {})
    simulated = simulate(plan, cost.demands(plan), region_of(cost.profile))
    bounds = {bound.name: bound.seconds for bound in policy_bounds(plan, WorkCache(cost))}
    busy_s = simulated.busy_s(plan)[Lane.H2D]
    assert busy_s > 1.1 * bounds["lane h2d"]
    assert 0.99 * busy_s <= max(bounds.values()) <= simulated.step_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("train", ["all", "lora", "layers:2"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_schedule_of_llmq_is_legal_and_keeps_weights_and_sums_on_the_device(name: str, train: str, micro_batch: int) -> None:
    model, ways = read_model(name), {"gradient_dtype": "fp32"} if train != "all" else {}
    semantics = with_kernels(model, Semantics(512, 4, micro_batch, train=parse_train(train), **ways), read_profile("h100-sxm"))
    for one in (semantics, *([shared_step(semantics, 2, False)] if micro_batch == 1 and name == "qwen2.5-7b" else [])):
        workload = build_workload(model, one)
        policy = baseline("llmq", one, workload)
        refuse_illegal(workload, one, policy)
        assert policy.resident_blocks == tuple(range(len(workload.blocks)))
        assert {*policy.save} <= {Saved.INPUT, Saved.PRODUCTS}
        if policy.accumulation_group < one.n_micro_batches:
            assert policy.sum_blocks == tuple(b for b, block in enumerate(workload.blocks) if block.trained)


@mostly_slow(
    ("name", "machine", "n_tokens", "changes"),
    [
        ("smollm2-360m", "rtx4090-desktop", 32_768, {}),
        ("llama-3.2-1b", "rtx5090-desktop", 65_536, {}),
        ("qwen2.5-0.5b", "h100-16core", 131_072, {"train": parse_train("lora"), "gradient_dtype": "fp32"}),
        ("qwen2.5-7b", "h200-16core", 65_536, {}),
        ("qwen2.5-7b", "b200", 8_192, {"clip_norm": None}),
    ],
    fast=(0, 2),
)
def test_no_plan_is_slower_than_a_baseline(name: str, machine: str, n_tokens: int, changes: dict[str, Any]) -> None:
    """On these machines a resident trainer fits, and on some it is a rival."""
    model, profile = read_model(name), read_profile(machine)
    semantics = with_kernels(model, Semantics(1024, n_tokens // 1024, 1, **changes), profile)
    answer = search(model, sizes_of(model, semantics, profile), profile, free=SIZES)
    steps_s = {rival: row["step_s"] for rival, row in answer.all_baselines().items() if "step_s" in row}
    assert "resident" in steps_s
    assert not answer.resident.is_estimate
    assert answer.step_s <= min(steps_s.values()) * (1 + NEAR_FRACTION)
    assert {*answer.baselines} == {*BASELINES}
    one_size = answer.plan.semantics, answer.plan.workload
    rival = min(steps_s.keys() - {"resident"}, key=lambda name: steps_s[name])
    fixed = search(model, [one_size], profile, rival)
    assert (fixed.plan.policy, fixed.certificate.n_families) == (baseline(rival, *one_size), 0)
    assert fixed.step_s == steps_s[rival]
