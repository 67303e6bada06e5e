"""Seconds of each op once the steps of a timeline repeat.

An op occupies its lane from the moment when nothing holds it up any more (the op before it in its lane, and those that it waits
for, have ended) until it ends. In the simulator an op begins at that moment; on a machine it first has to be handed over.
"""

from dataclasses import dataclass
from statistics import median

from runtime.errors import PlanError
from runtime.plan import Plan
from runtime.plan.plan import unrolled
from runtime.plan.timeline import Span, Timeline

from .abridged import abridged, short_plan
from .simulate import Prediction

WARM_UP_STEPS = 2  # fill caches and the pipeline
LEAST_STEPS = 2  # of a timeline: between their ends is a settled one, if need be


@dataclass(frozen=True, slots=True)
class Settled:
    """The steps of a timeline after the warm-up: seconds of each op, in plan order, and of the step."""

    ops_s: tuple[float, ...]
    step_s: float
    n_steps: int


def predicted_of(plan: Plan, prediction: Prediction) -> Settled:
    """The settled step of a simulation."""
    steps = sorted({span.step for span in prediction.timeline.spans})[-prediction.n_cycle_steps :]
    taken: list[list[float]] = [[] for _ in plan.ops]
    for span in prediction.timeline.spans:
        if span.step >= steps[0]:
            taken[span.op].append(span.end_s - span.start_s)
    return Settled(tuple(median(of_op) for of_op in taken), prediction.step_s, len(steps))


def settled(plan: Plan, timeline: Timeline) -> Settled:
    """Medians over the settled steps of a run of the plan; PlanError where it has none.

    Of an op that repeats the median is over the repetitions that a timeline keeps, too.
    """
    if plan.repeat is not None:
        of = short_plan(plan)
        short = settled(unrolled(of), abridged(plan, timeline))
        ops_s = tuple(median(short.ops_s[of.number(i, k)] for k in range(of.often(i))) for i in range(len(plan.ops)))
        return Settled(ops_s, median(timeline.step_times_s[-short.n_steps :]), short.n_steps)
    by_step: dict[int, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.op):
        by_step.setdefault(span.step, []).append(span)
    if len(by_step) < LEAST_STEPS:
        raise PlanError(f"a timeline of a single step shows no settled one; run {LEAST_STEPS} or more at a stretch")
    first, *later = sorted(by_step)
    warm = [step for step in later if step >= first + WARM_UP_STEPS] or later
    taken = [_occupied_s(plan, by_step, step) for step in warm]
    ends_s = {step: max(span.end_s for span in spans) for step, spans in by_step.items()}
    step_s = median(ends_s[step] - ends_s[step - 1] for step in warm)
    return Settled(tuple(median(of_op) for of_op in zip(*taken, strict=True)), step_s, len(warm))


def _occupied_s(plan: Plan, by_step: dict[int, list[Span]], step: int) -> list[float]:
    """Seconds that each op of a step occupies its lane."""
    lane_ended_s = {op.lane: span.end_s for op, span in zip(plan.ops, by_step[step - 1], strict=True)}
    occupied_s = []
    for op, span in zip(plan.ops, by_step[step], strict=True):
        waited_s = [by_step[step - wait.distance][wait.op].end_s for wait in op.waits]
        occupied_s.append(span.end_s - min(span.start_s, max([lane_ended_s[op.lane], *waited_s])))
        lane_ended_s[op.lane] = span.end_s
    return occupied_s
