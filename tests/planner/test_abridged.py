"""Abridged plans and timelines: first and last repetitions of a long step, with unchanged op order and durations."""

import math
from dataclasses import astuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.predict.abridged import N_KEPT, abridged, abridged_plan, short_plan
from penstock.planner.predict.cost import costs
from penstock.planner.predict.simulate import simulate
from penstock.planner.predict.uncertainty import interval
from penstock.planner.show.step import measured_stretch
from penstock.planner.show.waterfall import gains, waterfall
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane, Plan, Update
from penstock.runtime.plan.plan import unrolled
from penstock.runtime.plan.timeline import Span, Timeline
from tests.lanes import mostly_slow
from tests.runtime.test_repetition import REGION, demands_of, folded, small
from tests.strategies import MADE_UP

law = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))


@law
@given(folded(), st.data())
def test_an_abridged_timeline_has_every_op_once_in_lane_order(plan: Plan, data: st.DataObject) -> None:
    prediction = simulate(plan, demands_of(data, len(plan.ops)), REGION, 4)
    short, timeline = abridged_plan(plan), abridged(plan, prediction.timeline)
    shortened = short_plan(plan)
    numbered = {shortened.number(i, k): op for i, op in enumerate(plan.ops) for k in range(shortened.often(i))}
    assert [(numbered[n].kind, numbered[n].block) for n in range(len(short.ops))] == [(op.kind, op.block) for op in short.ops]
    n_steps = len(prediction.timeline.step_ends_s)
    assert sorted((s.step, s.op) for s in timeline.spans) == [(n, i) for n in range(n_steps) for i in range(len(short.ops))]
    lengths_s = sorted(s.end_s - s.start_s for s in prediction.timeline.spans)
    assert sorted(s.end_s - s.start_s for s in timeline.spans) == pytest.approx(lengths_s, abs=1e-6)
    for lane in Lane:
        last_s = -math.inf
        for span in sorted((s for s in timeline.spans if short.ops[s.op].lane is lane), key=lambda s: (s.step, s.op)):
            assert span.start_s >= last_s - 1e-6
            last_s = span.end_s


def test_an_abridged_step_is_that_of_as_many_micro_batches() -> None:
    """A timeline of 1000 micro-batches, abridged, has the step time of a plan with `2 + N_KEPT` micro-batches."""
    plan = small(1000)
    cut = abridged(plan, simulate(plan, costs(plan, MADE_UP), None).timeline)
    short, few = abridged_plan(plan), small(2 + N_KEPT)
    step_s = simulate(short, costs(short, MADE_UP), None).step_s
    assert step_s == pytest.approx(simulate(few, costs(few, MADE_UP), None).step_s, rel=1e-6)
    assert measured_stretch(short, cut).length_s == pytest.approx(step_s, rel=1e-6)


def test_a_repetition_that_no_timeline_keeps_is_refused() -> None:
    plan = small(1000)
    assert plan.repeat is not None
    for op, repetition in ((plan.repeat.start, 500), (0, 1), (plan.repeat.start, -1), (plan.repeat.start, 10**9)):
        with pytest.raises(PlanError, match="another plan"):
            abridged(plan, Timeline((Span(op, 0, 0.0, 1.0, repetition),)))


PLANS = {
    "deferred": small(40, update=Update.DEFERRED),
    "spilling groups": small(41, accumulation_group=2, spill_blocks=(0, 1, 2), update=Update.BARRIER),
    "shared boundaries": small(40, boundary_stride=3, speculate_blocks=(1,)),
}


@mostly_slow("plan", PLANS.values(), ids=PLANS)
def test_waterfall_gains_and_interval_are_of_the_whole_step(plan: Plan) -> None:
    written = unrolled(plan)
    a, b = waterfall(plan, MADE_UP), waterfall(written, MADE_UP)
    assert astuple(a) == pytest.approx(astuple(b), rel=1e-6, abs=1e-9)
    step_s_by_resource, expected = ({s.resource: s.step_s for s in gains(one, MADE_UP)} for one in (plan, written))
    assert step_s_by_resource == pytest.approx(expected, rel=1e-9)
    intervals = [interval(one, MADE_UP, n_draws=4) for one in (plan, written)]
    assert intervals[0].p50_step_s == pytest.approx(intervals[1].p50_step_s, rel=1e-9)
