"""How long does each op take once the steps repeat?

An op occupies its lane from the moment when nothing holds it up any more (the op before it in its lane, and those that it waits
for, have ended) until it ends. In the simulator an op begins at that moment; on a machine it first has to be handed over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from runtime.errors import PlanError
from runtime.plan import Plan
from runtime.plan.timeline import Span, Timeline

from .abridged import abridged, abridged_plan, numbers_of
from .simulate import Prediction

WARM_UP_STEPS = 2  # fill caches and the pipeline
LEAST_STEPS = 2  # of a timeline: between their ends lies a settled one, if need be
EARLY_FRACTION = 0.01  # of a step: clocks of device and host agree better than this
MOST_EARLY_FRACTION = 0.1  # of the waits: those of another plan are broken at random


@dataclass(frozen=True, slots=True)
class Settled:
    """What a timeline says of the steps after the warm-up: seconds of each op, in plan order, and of the step."""

    ops_s: tuple[float, ...]
    step_s: float
    n_steps: int


def predicted_of(plan: Plan, prediction: Prediction) -> Settled:
    """What the simulator says of a settled step."""
    steps = sorted({span.step for span in prediction.timeline.spans})[-prediction.n_cycle_steps :]
    taken: list[list[float]] = [[] for _ in plan.ops]
    for span in prediction.timeline.spans:
        if span.step >= steps[0]:
            taken[span.op].append(span.end_s - span.start_s)
    return Settled(tuple(median(of_op) for of_op in taken), prediction.step_s, len(steps))


def settled(plan: Plan, timeline: Timeline) -> Settled:
    """Medians over the settled steps; PlanError, in one line, when the timeline is damaged, too short or not of this plan.

    Of an op that repeats the median is over the repetitions that a timeline keeps, too.
    """
    if plan.repeat is not None:
        short = settled(abridged_plan(plan), abridged(plan, timeline))
        ops_s = tuple(median(short.ops_s[number] for number in numbers) for numbers in numbers_of(plan))
        return Settled(ops_s, median(timeline.step_times_s[-short.n_steps :]), short.n_steps)
    by_step = _whole_steps(plan, timeline)
    first, *_ = steps = sorted(by_step)
    warm = [step for step in steps if step >= first + WARM_UP_STEPS and step - 1 in by_step] or steps[1:]
    taken = [_occupied(plan, by_step, step) for step in warm]
    _refuse_another_plan(plan, by_step, steps[1:])
    ends_s = {step: max(span.end_s for span in by_step[step]) for step in steps}
    step_s = median(ends_s[step] - ends_s.get(step - 1, math.nan) for step in warm)
    if not step_s > 0:
        raise PlanError("the timeline's steps take no time or are not consecutive; run the plan again")
    return Settled(tuple(median(of_op) for of_op in zip(*taken, strict=True)), step_s, len(warm))


def _whole_steps(plan: Plan, timeline: Timeline) -> dict[int, list[Span]]:
    """The spans of each step in plan order."""
    by_step: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if not 0 <= span.op < len(plan.ops):
            raise PlanError(f"the timeline is of another plan: it has an op {span.op}, this plan {len(plan.ops)} ops")
        if not (math.isfinite(span.start_s) and math.isfinite(span.end_s) and span.start_s <= span.end_s):
            raise PlanError(f"the timeline is damaged: op {span.op} of step {span.step} has no beginning before its end; run again")
        by_step.setdefault(span.step, []).append(span)
    for step, spans in by_step.items():
        spans.sort(key=lambda span: span.op)
        if [span.op for span in spans] != list(range(len(plan.ops))):
            raise PlanError(f"the timeline is damaged or of another plan: step {step} has not every op once; run the plan again")
    steps = sorted(by_step)
    if len(steps) < LEAST_STEPS or steps != list(range(steps[0], steps[0] + len(steps))):
        raise PlanError(
            f"a timeline of {len(steps)} consecutive steps shows no settled one; run {LEAST_STEPS} or more at a stretch"
        )
    return by_step


def _held_up_until(plan: Plan, by_step: dict[int, list[Span]], step: int) -> list[tuple[float, list[float]]]:
    """For each op of a step when the op before it in its lane ended, and when those ended that it waits for."""
    before = {op.lane: by_step[step - 1][i].end_s for i, op in enumerate(plan.ops)}  # the last of each lane
    held = []
    for span, op in zip(by_step[step], plan.ops, strict=True):
        held.append((before[op.lane], [by_step[step - wait.distance][wait.op].end_s for wait in op.waits]))
        before[op.lane] = span.end_s
    return held


def _occupied(plan: Plan, by_step: dict[int, list[Span]], step: int) -> list[float]:
    """Seconds that each op of a step occupies its lane."""
    held = _held_up_until(plan, by_step, step)
    return [
        span.end_s - min(span.start_s, max([before_s, *waited_s]))
        for span, (before_s, waited_s) in zip(by_step[step], held, strict=True)
    ]


def _refuse_another_plan(plan: Plan, by_step: dict[int, list[Span]], steps: Sequence[int]) -> None:
    """A plan with as many ops and other waits: here ops would begin before what they wait for has ended."""
    n_waits = n_early = 0
    early_s = EARLY_FRACTION * (max(s.end_s for s in by_step[steps[-1]]) - max(s.end_s for s in by_step[steps[0] - 1])) / len(steps)
    for step in steps:
        for span, (before_s, waited_s) in zip(by_step[step], _held_up_until(plan, by_step, step), strict=True):
            n_waits += 1 + len(waited_s)
            n_early += sum(end_s > span.start_s + early_s for end_s in (before_s, *waited_s))
    if n_early > MOST_EARLY_FRACTION * n_waits:
        raise PlanError(
            "the timeline is of another plan: ops begin before those that they wait for have ended; give this plan's run"
        )
