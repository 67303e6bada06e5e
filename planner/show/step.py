"""Stretch of a timeline that is plotted as one step.

It starts with the first device op of a step and ends with that of the next. In steady state, every op occurs in it exactly once,
and the idle time of the device between steps is one gap at the right end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.planner.predict.simulate import Prediction
from penstock.runtime.plan import Lane, Plan
from penstock.runtime.plan.timeline import Span, Timeline

READ_ON_STEPS = 2  # the last read of a slot is at most one step after its write


@dataclass(frozen=True, slots=True)
class Stretch:
    """Spans around one step and the step's boundaries. Spans may extend beyond both."""

    step: int
    start_s: float
    end_s: float
    spans: tuple[Span, ...]  # at least all that overlap the stretch

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def within(self) -> list[Span]:
        """Clip spans to the stretch. Times start at its beginning, steps are relative to its step."""
        return [
            Span(s.op, s.step - self.step, max(s.start_s, self.start_s) - self.start_s, min(s.end_s, self.end_s) - self.start_s)
            for s in self.spans
            if s.start_s < self.end_s and s.end_s > self.start_s
        ]


def predicted_stretch(plan: Plan, prediction: Prediction) -> Stretch:
    """The last simulated step, or a typical one of its cycle. If steps repeat, later ops that overlap it are extrapolated."""
    if not prediction.periodic or prediction.step_s <= 0:
        return measured_stretch(plan, prediction.timeline)
    spans, n_cycle = list(prediction.timeline.spans), prediction.n_cycle_steps
    n_steps, period_s = len(prediction.timeline.step_ends_s), n_cycle * prediction.step_s
    cycle = [s for s in spans if s.step >= n_steps - n_cycle]
    known_s = min(s.start_s for s in cycle) + period_s  # later ops are not simulated
    needed_s = max(s.end_s for s in cycle) + READ_ON_STEPS * prediction.step_s
    for n in range(1, math.ceil((needed_s - known_s) / period_s) + 1):
        spans += [Span(s.op, s.step + n * n_cycle, s.start_s + n * period_s, s.end_s + n * period_s) for s in cycle]
    return _typical(_stretches(plan, spans)[n_steps - n_cycle : n_steps])


def measured_stretch(plan: Plan, timeline: Timeline) -> Stretch:
    """A steady-state step of median length; in a short run, the last complete step."""
    stretches = _stretches(plan, timeline.spans)
    if stretches:
        return _typical(stretches[WARM_UP_STEPS:] or stretches[-1:])
    last = max((s.step for s in timeline.spans), default=0)
    times_s = [at_s for s in timeline.spans if s.step == last for at_s in (s.start_s, s.end_s)] or [0.0]
    return Stretch(last, min(times_s), max(times_s), timeline.spans)


def _stretches(plan: Plan, spans: Sequence[Span]) -> list[Stretch]:
    """Steps with a known successor, in order, each with all spans."""
    first = next((i for i, op in enumerate(plan.ops) if op.lane is Lane.GPU), 0)
    starts_s = sorted((s.step, s.start_s) for s in spans if s.op == first)
    everything = tuple(spans)
    return [
        Stretch(a, start_s, end_s, everything) for (a, start_s), (b, end_s) in pairwise(starts_s) if b == a + 1 and end_s > start_s
    ]


def _typical(stretches: Sequence[Stretch]) -> Stretch:
    """The stretch of median length: the shorter of two in the middle, the first of equal ones."""
    return sorted(stretches, key=lambda s: s.length_s)[(len(stretches) - 1) // 2]
