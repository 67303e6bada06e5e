"""Contention for links, DRAM and cores, from profiles alone, against published measurements."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.published.system_costs import Software, SystemCosts
from hwprofiles.schema import read_profile, shipped_profiles
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.predict.cost import CostModel, region_of
from planner.predict.faster import Group, faster
from planner.predict.simulate import simulate
from runtime.plan import Kind, Lane, Op, Policy, Semantics, Update
from runtime.plan.region import Demand, Resource, rates
from tests.planner.test_simulate import REGION, demanded

LINK = (Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX)
LARGE, SMALL = 0, 1  # blocks of a 72B model: the embedding is larger than a layer


# -- the link ---------------------------------------------------------------------------------------------------------


def copy_rates(name: str) -> dict[Kind, tuple[float, float]]:
    """Bytes per second of a layer's upload and download: alone, and while the other direction moves more."""
    model, semantics = read_model("qwen2.5-72b"), Semantics(seq_len=1024, batch_size=1, micro_batch=1)
    profile = read_profile(name)
    whole = lower(model, build_workload(model, semantics), semantics, Policy(), {})
    cost = CostModel(profile)
    found = {}
    for kind, other in ((Kind.LOAD, Kind.OFFLOAD_GRADIENT), (Kind.OFFLOAD_GRADIENT, Kind.LOAD)):
        n_bytes = whole.workload.blocks[SMALL].slot_elements * 2  # bf16
        per_s = []
        for ops in ((Op(kind, SMALL),), (Op(kind, SMALL), Op(other, LARGE))):
            plan = replace(whole, ops=ops)
            demands = [cost.demand(plan, op) for op in ops]
            span = next(s for s in simulate(plan, demands, region_of(profile), max_steps=1).timeline.spans if s.op == 0)
            per_s.append(n_bytes / (span.end_s - span.start_s - demands[0].overhead_s))
        found[kind] = (per_s[0], per_s[1])
    return found


def test_a_gb300_halves_each_direction_when_both_are_busy():
    """Measured on a DGX Station: 359.1 and 377.2 GB/s alone, 175.4 and 171.8 together."""
    measured = {Kind.LOAD: (359.1e9, 175.4e9), Kind.OFFLOAD_GRADIENT: (377.2e9, 171.8e9)}
    for kind, (alone, together) in copy_rates("gb300").items():
        assert alone == pytest.approx(measured[kind][0], rel=0.01)
        assert together == pytest.approx(measured[kind][1], rel=0.04)
        assert 0.44 < together / alone < 0.51


@pytest.mark.parametrize("name", ["b200", "h200-pcie5"])
def test_a_machine_on_pcie_5_keeps_most_of_each_direction(name):
    for alone, together in copy_rates(name).values():
        assert 0.75 < together / alone < 0.92


@pytest.mark.parametrize("name", shipped_profiles())
def test_two_directions_together_move_no_more_than_was_measured(name):
    profile = read_profile(name)
    together = sum(rate for _, rate in copy_rates(name).values())
    assert together <= profile.link.duplex_bytes_per_s.value * 1.01


# -- the smallest batch that hides everything -------------------------------------------------------------------------

MODEL = read_model("qwen2.5-7b")
MOST_SEQUENCES = 64
HIDDEN_FRACTION = 0.95  # of the step is computing


def smallest_hiding_batch(profile, model=MODEL, seq_len=1024):
    """Sequences of the smallest step that computes nearly all the time, under a policy that hides what can be hidden."""

    def computing_fraction(n):
        semantics = Semantics(seq_len=seq_len, batch_size=n, micro_batch=1)
        workload = build_workload(model, semantics)
        policy = Policy(prefetch_depth=3, gradient_slots=3, accumulation_group=n, update=Update.DEFERRED)
        plan = lower(model, workload, semantics, policy, {})
        demands = CostModel(profile).demands(plan)
        compute_s = sum(d.uncontended_s for d, op in zip(demands, plan.ops, strict=True) if op.lane is Lane.GPU)
        return compute_s / simulate(plan, demands, region_of(profile), max_steps=16).step_s

    low, high = 0, MOST_SEQUENCES  # too few; enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computing_fraction(middle) >= HIDDEN_FRACTION else (middle, high)
    return high


@pytest.mark.soak
def test_on_a_gh200_the_optimizer_sets_the_smallest_hiding_batch():
    gh200 = read_profile("gh200")
    batch = smallest_hiding_batch(gh200)
    assert 8 < batch < 32  # thousands of tokens: one step of them takes as long as updating every parameter
    assert smallest_hiding_batch(faster(gh200, dict.fromkeys(LINK, 4.0))) >= batch - 1
    assert smallest_hiding_batch(faster(gh200, {Group.DRAM: 4.0})) >= batch - 1
    # As fast as its DRAM allows at 26 bytes a parameter; then with faster DRAM as well.
    spare = gh200.host.dram_bytes_per_s.value / (26 * gh200.optimizer_params_per_s(gh200.host.n_cores))
    assert spare > 1.2
    assert smallest_hiding_batch(faster(gh200, {Group.OPTIMIZER: spare})) <= batch / spare * 1.15
    assert smallest_hiding_batch(faster(gh200, {Group.OPTIMIZER: 4.0, Group.DRAM: 4.0})) <= batch / 2
    assert smallest_hiding_batch(faster(gh200, {Group.OPTIMIZER: 4.0})) > batch / 2  # from there on DRAM binds


# -- memory that is not pinned, or not there yet ----------------------------------------------------------------------


def system_costs(name):
    semantics = Semantics(1024, 4, 4)
    return SystemCosts(read_profile(name), Software(), build_workload(MODEL, semantics), semantics)


@pytest.mark.parametrize("name", ["h100-sxm", "gb300"])
def test_gradients_are_added_faster_to_pages_in_place(name):
    """Published: 3.7 GB/s where pages are touched first, 23 GB/s where they are there; two reads and a write of DRAM either way."""
    costs, n_bytes = system_costs(name), 10**9
    for first_touch, bytes_per_s in ((True, 3.7e9), (False, 23e9)):
        found = costs.add(n_bytes, first_touch=first_touch)
        assert n_bytes / found.uncontended_s == pytest.approx(bytes_per_s)
        assert dict(found.uses)[Resource.DRAM] * found.alone_s == pytest.approx(3 * n_bytes)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm", "gb300", "rtx4090-desktop"])
def test_staging_moves_bytes_twice_and_rounding_eight_each(name):
    costs = system_costs(name)
    layer = costs.layers[0]
    staged = costs.flatten(layer)
    assert dict(staged.uses)[Resource.DRAM] * staged.alone_s == pytest.approx(2 * 2 * layer.n_params)
    rounded = costs.convert_and_copy(layer.n_params)
    dram = costs.profile.host.dram_bytes_per_s.value
    # fp32 read, bf16 written, then read by the copy engine; where DRAM binds, the copy waits for it.
    assert dict(rounded.uses)[Resource.DRAM] * rounded.alone_s == pytest.approx(min(8 * layer.n_params, dram * rounded.alone_s))
    assert rounded.alone_s >= 6 * layer.n_params / dram * (1 - 1e-9)


@pytest.mark.parametrize("name", [name for name in shipped_profiles() if read_profile(name).device.kind != "cpu"])
def test_copies_of_unpinned_memory_take_longer(name):
    """Read, written to a pinned buffer, read again: over PCIe, where the driver stages it, all three passes fit into DRAM."""
    profile, n_bytes = read_profile(name), 10**9
    for direction in ("h2d", "d2h"):
        pageable_s = system_costs(name).pageable_s(direction, n_bytes)
        assert pageable_s >= profile.copy_s(direction, n_bytes)
        if profile.copy_bytes_per_s(direction, n_bytes) < 60e9:
            assert 3 * n_bytes / pageable_s <= profile.host.dram_bytes_per_s.value


def test_an_h100_copies_unpinned_memory_at_16_gb_per_s_not_55():
    seconds = system_costs("h100-sxm").pageable_s("d2h", 10**9), read_profile("h100-sxm").copy_s("d2h", 10**9)
    assert 10**9 / seconds[0] == pytest.approx(16.1e9)
    assert seconds[0] / seconds[1] == pytest.approx(55 / 16.1, rel=0.02)


def test_copies_of_unpinned_memory_leave_the_optimizer_less_dram():
    """On a desktop such a copy draws three times its bytes; a pinned one as long draws them once."""
    costs, n_bytes = system_costs("rtx4090-desktop"), 10**9
    pageable, update = costs.pageable("d2h", n_bytes), costs.update(10**9, 28)
    assert dict(pageable.uses)[Resource.DRAM] * pageable.alone_s == pytest.approx(3 * n_bytes)
    pinned = Demand(0.0, pageable.alone_s, tuple((r, u / 3 if r is Resource.DRAM else u) for r, u in pageable.uses))
    speeds = [rates([update, copy], costs.region)[0] for copy in (pinned, pageable)]
    assert speeds[1] < 0.9 * speeds[0]


# -- conservation -----------------------------------------------------------------------------------------------------


def replay(timeline, demands, region):
    """Moment by moment: what each op has done at the speeds that its neighbours leave it, and the most drawn of each resource."""
    spans = [(s, s.start_s + demands[s.op].overhead_s) for s in timeline.spans]
    moments = sorted({moment for s, work_s in spans for moment in (s.start_s, min(work_s, s.end_s), s.end_s)})
    done_s = defaultdict(float)
    most = defaultdict(float)
    for begin_s, end_s in pairwise(moments):
        middle_s = (begin_s + end_s) / 2
        at_work = [s for s, work_s in spans if work_s <= middle_s < s.end_s]
        speeds = rates([demands[s.op] for s in at_work], region)
        drawn = defaultdict(float)
        for s, speed in zip(at_work, speeds, strict=True):
            done_s[s.op, s.step] += speed * (end_s - begin_s)
            for resource, per_s in demands[s.op].uses:
                drawn[resource] += speed * per_s
        for resource, per_s in drawn.items():
            most[resource] = max(most[resource], per_s)
    return done_s, most


@pytest.mark.drawn
@given(demanded())
def test_work_is_conserved_at_every_moment(case):
    """Each op has done its work exactly when it ends, and no resource ever gives more than its capacity."""
    plan, demands = case
    timeline = simulate(plan, demands, REGION).timeline
    # A timeline ends with a whole step; until each lane's last op in it, no later op has drawn anything.
    last_s = {plan.ops[s.op].lane: s.end_s for s in timeline.spans}
    known_s = min(last_s.values())
    done_s, most = replay(timeline, demands, REGION)
    for resource, capacity in REGION.capacity:
        assert most[resource] <= capacity * (1 + 1e-9)
    known = [s for s in timeline.spans if s.end_s <= known_s]
    assert known
    for s in known:
        assert done_s[s.op, s.step] == pytest.approx(demands[s.op].alone_s, rel=1e-6)


@pytest.mark.parametrize("name", ["gb300", "rtx4090-desktop"])
def test_a_step_moves_every_byte_of_its_copies(name):
    profile = read_profile(name)
    semantics = Semantics(seq_len=1024, batch_size=2, micro_batch=1)
    workload = build_workload(MODEL, semantics)
    plan = lower(MODEL, workload, semantics, Policy(prefetch_depth=3, gradient_slots=3, update=Update.DEFERRED), {})
    demands = CostModel(profile).demands(plan)
    prediction = simulate(plan, demands, region_of(profile))
    assert prediction.step_s > simulate(plan, demands, None).step_s
    moved = defaultdict(float)
    for demand in demands:
        for resource, per_s in demand.uses:
            moved[resource] += min(per_s, dict(region_of(profile).capacity)[resource]) * demand.alone_s
    n_bytes = sum(2 * workload.blocks[op.block].slot_elements for op in plan.ops if op.kind is Kind.LOAD)
    assert moved[Resource.H2D] == pytest.approx(n_bytes)
    for resource, capacity in region_of(profile).capacity:
        assert moved[resource] <= capacity * prediction.step_s * (1 + 1e-9)
