"""Contention for links, DRAM and cores: predictions from profiles against published measurements."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.published.system_costs import Software, SystemCosts
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.region import Resource, shares
from penstock.planner.predict.simulate import simulate
from penstock.runtime.plan import Kind, Op, Plan, Policy, Semantics
from tests.planner.test_simulate import REGION, demanded

LARGE, SMALL = 0, 1  # blocks of a 72B model: the embedding is larger than a layer


@cache
def full_plan() -> Plan:
    model, semantics = read_model("qwen2.5-72b"), Semantics(seq_len=1024, batch_size=1, micro_batch=1)
    return lower(model, build_workload(model, semantics), semantics, Policy(), {})


def copy_rates(name: str) -> dict[Kind, tuple[float, float]]:
    """Return bytes/s of a layer's upload and download: (alone, during a larger copy in the other direction)."""
    profile, full, rates = read_profile(name), full_plan(), {}
    cost = CostModel(profile)
    for kind, reverse in ((Kind.LOAD, Kind.OFFLOAD_GRADIENT), (Kind.OFFLOAD_GRADIENT, Kind.LOAD)):
        n_bytes = full.workload.blocks[SMALL].slot_elements * 2  # bf16
        per_s = []
        for ops in ((Op(kind, SMALL),), (Op(kind, SMALL), Op(reverse, LARGE))):
            plan = replace(full, ops=ops)
            demands = [cost.demand(plan, op) for op in ops]
            span = next(s for s in simulate(plan, demands, region_of(profile), max_steps=1).timeline.spans if s.op == 0)
            per_s.append(n_bytes / (span.end_s - span.start_s - demands[0].overhead_s))
        rates[kind] = (per_s[0], per_s[1])
    return rates


def test_a_gb300_halves_each_direction_when_both_are_busy():
    """Measured on a DGX Station: 359.1 and 377.2 GB/s alone, 175.4 and 171.8 together."""
    measured = {Kind.LOAD: (359.1e9, 175.4e9), Kind.OFFLOAD_GRADIENT: (377.2e9, 171.8e9)}
    for kind, (alone, together) in copy_rates("gb300").items():
        assert alone == pytest.approx(measured[kind][0], rel=0.01)
        assert together == pytest.approx(measured[kind][1], rel=0.04)
        assert 0.44 < together / alone < 0.51


@pytest.mark.parametrize("name", shipped_profiles())
def test_two_directions_together_move_no_more_than_was_measured(name):
    profile = read_profile(name)
    assert sum(rate for _, rate in copy_rates(name).values()) <= profile.link.duplex_bytes_per_s.value * 1.01


MODEL = read_model("qwen2.5-7b")


def system_costs(name):
    semantics = Semantics(1024, 4, 4)
    return SystemCosts(read_profile(name), Software(), build_workload(MODEL, semantics), semantics)


@pytest.mark.parametrize("name", ["h100-sxm", "gb300"])
def test_gradients_are_added_faster_to_pages_in_place(name):
    """Published: 3.7 GB/s with page faults and 23 GB/s without; both read DRAM twice and write it once."""
    costs, n_bytes = system_costs(name), 10**9
    for first_touch, bytes_per_s in ((True, 3.7e9), (False, 23e9)):
        demand = costs.add(n_bytes, first_touch=first_touch)
        assert n_bytes / demand.uncontended_s == pytest.approx(bytes_per_s)
        assert dict(demand.uses)[Resource.DRAM] * demand.alone_s == pytest.approx(3 * n_bytes)


def test_an_h100_copies_unpinned_memory_at_16_gb_per_s_not_55():
    seconds = system_costs("h100-sxm").pageable_s("d2h", 10**9), read_profile("h100-sxm").copy_s("d2h", 10**9)
    assert 10**9 / seconds[0] == pytest.approx(16.1e9)
    assert seconds[0] / seconds[1] == pytest.approx(55 / 16.1, rel=0.02)


def replay(timeline, demands, region):
    """Integrate a timeline: return the work done by each op under contention, and the maximum use of each resource."""
    spans = [(s, s.start_s + demands[s.op].overhead_s) for s in timeline.spans]
    moments = sorted({moment for s, work_s in spans for moment in (s.start_s, min(work_s, s.end_s), s.end_s)})
    done_s = defaultdict(float)
    peaks = defaultdict(float)
    for begin_s, end_s in pairwise(moments):
        middle_s = (begin_s + end_s) / 2
        at_work = [s for s, work_s in spans if work_s <= middle_s < s.end_s]
        speeds = shares(tuple(demands[s.op].uses for s in at_work), region)
        used = defaultdict(float)
        for s, speed in zip(at_work, speeds, strict=True):
            done_s[s.op, s.step] += speed * (end_s - begin_s)
            for resource, per_s in demands[s.op].uses:
                used[resource] += speed * per_s
        for resource, per_s in used.items():
            peaks[resource] = max(peaks[resource], per_s)
    return done_s, peaks


@given(demanded())
def test_work_is_conserved_at_every_moment(case):
    """An op has done exactly its work when it ends, and use of a resource never exceeds its capacity."""
    plan, demands = case
    timeline = simulate(plan, demands, REGION).timeline
    # A timeline ends with a complete step. Before the end of every lane's last op, no op beyond the timeline uses a resource.
    last_s = {plan.ops[s.op].lane: s.end_s for s in timeline.spans}
    known_s = min(last_s.values())
    done_s, peaks = replay(timeline, demands, REGION)
    for resource, capacity in REGION.capacity:
        assert peaks[resource] <= capacity * (1 + 1e-9)
    known = [s for s in timeline.spans if s.end_s <= known_s]
    assert known
    for s in known:
        assert done_s[s.op, s.step] == pytest.approx(demands[s.op].alone_s, rel=1e-6)
