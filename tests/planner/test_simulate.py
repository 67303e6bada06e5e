"""Simulated timelines against the rules of the plan language, longest paths and manual examples."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.predict.region import Demand, Region, Resource, shares
from penstock.planner.predict.simulate import simulate
from penstock.runtime.compiled import IS_COMPILED
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Lane, Op, Plan, Policy, Semantics, Wait
from penstock.runtime.plan.workload import Model, Workload
from tests.edits import small
from tests.oracle import unrolled

ROUNDING = 1e-9
KINDS = [Kind.LOAD, Kind.FORWARD, Kind.OFFLOAD_GRADIENT, Kind.UPDATE]  # one per lane
REGION = Region(((Resource.H2D, 1.0), (Resource.DUPLEX, 1.5), (Resource.DRAM, 2.0), (Resource.CORES, 1.0)))

durations = st.floats(0.001, 10.0)


def plan_of(ops):
    semantics = Semantics(seq_len=1, batch_size=1, micro_batch=1)
    return Plan(semantics, Policy(), Model({}), Workload(()), {}, (), tuple(ops))


@st.composite
def plans(draw):
    """Generate ops on arbitrary lanes. Waits name earlier ops of the step or any op of the previous step: no deadlock."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
    ops = []
    for i, kind in enumerate(kinds):
        targets = [j for j, k in enumerate(kinds) if k is not kind]
        waits = draw(st.lists(st.sampled_from(targets), max_size=3, unique=True)) if targets else []
        ops.append(Op(kind, 0, i, waits=tuple(Wait(j, 0 if j < i and draw(st.booleans()) else 1) for j in waits)))
    return plan_of(ops)


@st.composite
def demanded(draw):
    """Generate a plan and demands of its ops. No single demand exceeds the capacity."""
    plan = draw(plans())
    demands = []
    for _ in plan.ops:
        uses = [(r, draw(st.floats(0.1, 1.0)) * c) for r, c in REGION.capacity if draw(st.booleans())]
        demands.append(Demand(draw(st.sampled_from([0.0, 0.5])), draw(durations), tuple(uses)))
    return plan, demands


def ends_of(plan, demands, n_steps):
    """Return the end of every op and step: its longest path of lane order and waits."""
    graph, end_s = unrolled(plan, n_steps), {}
    for node in nx.topological_sort(graph):
        end_s[node] = max((end_s[p] for p in graph.predecessors(node)), default=0.0) + demands[node[0]].uncontended_s
    return end_s


@given(demanded())
def test_without_contention_every_op_ends_at_its_longest_path(case):
    """Extrapolation of a steady state agrees with longest paths, too."""
    plan, demands = case
    prediction = simulate(plan, demands, None)
    n_steps = len(prediction.timeline.step_ends_s)
    n_more = prediction.n_cycle_steps * 3 if prediction.periodic else 0
    end_s = ends_of(plan, demands, n_steps + n_more)
    for span in prediction.timeline.spans:
        assert span.end_s == pytest.approx(end_s[span.op, span.step], rel=ROUNDING)
    assert len(prediction.timeline.spans) == n_steps * len(plan.ops)
    if prediction.periodic:
        last_s = max(t for (_, step), t in end_s.items() if step == n_steps + n_more - 1)
        assert last_s - prediction.timeline.step_ends_s[-1] == pytest.approx(prediction.step_s * n_more, rel=1e-7)


@given(demanded())
def test_contention_ends_no_op_sooner_and_keeps_lanes_and_waits(case):
    """Lane time per step is at most the step time."""
    plan, demands = case
    prediction = simulate(plan, demands, REGION)
    assert simulate(plan, demands, REGION) == prediction
    timeline = prediction.timeline
    sooner = {(s.op, s.step): s.end_s for s in simulate(plan, demands, None).timeline.spans}
    busy = Counter()
    for span in timeline.spans:
        assert span.end_s >= sooner.get((span.op, span.step), 0.0) * (1 - ROUNDING)
    for op, demand in zip(plan.ops, demands, strict=True):
        busy[op.lane] += demand.uncontended_s
    busiest_s = max(busy.values()) * (1 - ROUNDING)
    assert timeline.total_s >= busiest_s * len(timeline.step_ends_s)
    assert prediction.step_s >= busiest_s or not prediction.periodic
    spans = {(s.op, s.step): s for s in timeline.spans}
    for lane in Lane:
        row = [s for s in timeline.spans if plan.ops[s.op].lane is lane]
        for a, b in pairwise(sorted(row, key=lambda s: (s.step, s.op))):
            assert a.end_s <= b.start_s
    for (op, step), span in spans.items():
        for wait in plan.ops[op].waits:
            if step >= wait.distance:
                assert spans[wait.op, step - wait.distance].end_s <= span.start_s


@given(demanded(), st.data())
def test_slowing_any_ops_never_finishes_sooner(case, data):
    """Scale ops by random factors. Without contention only: a slower op can free a shared resource."""
    plan, demands = case
    factors = [data.draw(st.floats(1.0, 5.0)) for _ in demands]
    slow = [replace(d, alone_s=d.alone_s * k, overhead_s=d.overhead_s * k) for d, k in zip(demands, factors, strict=True)]
    timelines = [simulate(plan, ds, None, max_steps=4).timeline for ds in (demands, slow)]
    normal_ends, slow_ends = ({(s.op, s.step): s.end_s for s in timeline.spans} for timeline in timelines)
    for key in normal_ends.keys() & slow_ends.keys():
        assert slow_ends[key] >= normal_ends[key] * (1 - ROUNDING)


def test_steps_that_alternate_are_averaged_over_their_cycle():
    """Manual example: a cycle of three 2 s ops over two steps; steps end at 4, 6, 10, 12, 16 s."""
    waits = {Kind.FORWARD: Wait(2, 1), Kind.UPDATE: Wait(0, 1), Kind.OFFLOAD_GRADIENT: Wait(1)}
    ops = [Op(kind, 0, waits=(wait,)) for kind, wait in waits.items()]
    prediction = simulate(plan_of(ops), [Demand(0.0, 2.0)] * 3, None)
    assert (prediction.periodic, prediction.n_cycle_steps) == (True, 2)
    assert prediction.step_s == pytest.approx(3.0)
    assert set(prediction.timeline.step_times_s) == {2.0, 4.0}


def test_lanes_that_drift_apart_are_no_rhythm():
    """The optimizer lane gains 0.01 s per step, so no state repeats: the result is an average and not periodic."""
    ops = [Op(Kind.FORWARD, 0), Op(Kind.UPDATE, 0)]
    prediction = simulate(plan_of(ops), [Demand(0.0, 1.0), Demand(0.0, 0.99)], None)
    assert not prediction.periodic
    assert prediction.step_s == pytest.approx(1.0)


def test_a_plan_that_waits_in_a_ring_is_refused():
    ops = [Op(Kind.FORWARD, 1, waits=(Wait(1),)), Op(Kind.LOAD, 1, waits=(Wait(0),))]
    with pytest.raises(PlanError, match="never finishes: its ops wait for one another"):
        simulate(plan_of(ops), [Demand(0.0, 1.0)] * 2, None)


def test_compiled_and_interpreted_code_give_the_same_bits() -> None:
    """Compare the timelines of short and folded plans with those of a process with NUMBA_DISABLE_JIT=1."""
    assert IS_COMPILED, "numba is one of the libraries that are tested with"
    code = "from tests.planner.test_simulate import steps; print(steps())"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert process.stdout.strip() == steps()


def steps() -> str:
    """Return a hash of all predicted start and end times of several plans."""
    policies = ({}, {"prefetch_depth": 3, "spill_blocks": (0, 1), "gradient_slots": 2}, {"accumulation_group": 3})
    plans = [small(n_micro_batches=n, **policy) for n in (3, 6, 300) for policy in policies]
    assert plans[-1].repeat is not None
    times = []
    for plan in plans:
        uses = [((Resource.DRAM, 30.0 + op.block), (Resource.DUPLEX, 7.0)) if op.lane is not Lane.GPU else () for op in plan.ops]
        demands = [Demand(1e-6, (1 + i % 7) / 3, op_uses) for i, op_uses in enumerate(uses)]
        prediction = simulate(plan, demands, REGION)
        times.append([prediction.step_s.hex(), *(f"{s.start_s.hex()} {s.end_s.hex()}" for s in prediction.timeline.spans)])
    return hashlib.sha256(repr([times, [str(op) for plan in plans for op in plan.ops]]).encode()).hexdigest()


one_use = st.tuples(st.sampled_from(list(Resource)), st.floats(0.01, 3.0))
uses_lists = st.lists(st.lists(one_use, max_size=3, unique_by=lambda u: u[0]), max_size=4)


@given(uses_lists)
@settings(max_examples=300)
def test_speeds_are_max_min_fair(uses):
    """A slowed op uses a saturated resource on which no other op is faster."""
    demands = [Demand(0.0, 1.0, tuple(u)) for u in uses]
    speeds = shares(tuple(demand.uses for demand in demands), REGION)
    capacity = dict(REGION.capacity)
    used, n_drawing = Counter(), Counter(r for demand in demands for r, _ in demand.uses)
    for demand, speed in zip(demands, speeds, strict=True):
        assert 0 < speed <= 1
        for resource, per_s in demand.uses:
            alone = n_drawing[resource] == 1 and resource in capacity  # a single user is not limited by the capacity
            used[resource] += (min(per_s, capacity[resource]) if alone else per_s) * speed
    assert all(used[r] <= c * (1 + ROUNDING) for r, c in capacity.items())
    for demand, speed in zip(demands, speeds, strict=True):
        if speed < 1 - ROUNDING:
            full = [r for r, _ in demand.uses if r in capacity and used[r] >= capacity[r] * (1 - 1e-6)]
            users = {r: [s for d, s in zip(demands, speeds, strict=True) if r in dict(d.uses)] for r in full}
            assert any(speed >= max(users[r]) * (1 - 1e-6) for r in full)
