"""Timelines: predicted or measured times of ops."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from .ops import Lane
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Span:
    """Execution of one op in one step, in seconds since the timeline began."""

    op: int
    step: int
    start_s: float
    end_s: float
    repetition: int = 0  # of a repeated op


FIRST_KEPT, LAST_KEPT = 2, 2  # repetitions of a repeated op in a timeline, at its start and end


def often(plan: Plan, span: Span) -> float:
    """Return the ops per step that a span represents: more than 1 if repetitions are omitted."""
    return plan.often(span.op) / min(plan.often(span.op), FIRST_KEPT + LAST_KEPT)


def is_kept(repetition: int, times: int) -> bool:
    return repetition < FIRST_KEPT or repetition >= times - LAST_KEPT


@dataclass(frozen=True, slots=True)
class Timeline:
    spans: tuple[Span, ...]

    @property
    def step_ends_s(self) -> list[float]:
        """End of each step's last op, in step order."""
        ends: dict[int, float] = {}
        for span in self.spans:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end_s)
        return [end_s for _, end_s in sorted(ends.items())]

    @property
    def step_times_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.step_ends_s)]

    @property
    def total_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, plan: Plan) -> dict[Lane, float]:
        """Return the median time per step of each lane in ops."""
        per_step: dict[Lane, Counter[int]] = {lane: Counter() for lane in plan.lanes}
        for span in self.spans:
            per_step[plan.ops[span.op].lane][span.step] += often(plan, span) * (span.end_s - span.start_s)  # type: ignore[assignment]
        return {lane: median(steps.values()) if steps else 0.0 for lane, steps in per_step.items()}

    def from_step(self, first: int) -> "Timeline":
        return Timeline(tuple(span for span in self.spans if span.step >= first))


def chrome_trace(plan: Plan, tracks: dict[str, Timeline]) -> str:
    """Return JSON for Perfetto and chrome://tracing: a process per timeline (`predicted`, `measured`), a thread per lane."""
    lanes = list(plan.lanes)
    events: list[dict[str, object]] = []
    for pid, (name, timeline) in enumerate(tracks.items(), start=1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, lane in enumerate(lanes, start=1):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": str(lane)}})
        for span in timeline.spans:
            op = plan.ops[span.op] if plan.repeat is None else plan.repeat.op(plan.ops[span.op], span.repetition)
            event = {"ph": "X", "pid": pid, "tid": lanes.index(op.lane) + 1, "name": op.name, "cat": str(op.kind)}
            times_us = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
            repetition = {"repetition": span.repetition} if span.repetition else {}
            events.append({**event, **times_us, "args": {"step": span.step, "op": str(op), **repetition}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
