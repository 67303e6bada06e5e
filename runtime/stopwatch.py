"""When did the streams really perform each op?

The host only sees when it issued an op. Two timers, one before it in its stream and one after, see when it ran.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from .executor import KEEP_STEPS
from .plan import Lane, Plan
from .streams import Event, Stream, Streams
from .timeline import Span

MOST_TIMERS = 2**16  # a timer costs about a microsecond to make and some hundred bytes; made once, used again
N_LOOKS = 5  # at both clocks at once; the quickest look knows best


class Stopwatch:
    """Timers for the ops of the last few steps of a plan's streams."""

    def __init__(self, plan: Plan, streams: Streams, of_lane: Mapping[Lane, Stream]) -> None:
        self._streams, self._of_lane = streams, of_lane
        self._lane = {index: op.lane for index, op in enumerate(plan.ops) if op.lane in of_lane}
        self._place = {index: place for place, index in enumerate(self._lane)}
        self._first = {lane: index for index, lane in reversed(self._lane.items())}  # op of each lane
        n_ops = max(len(self._place), 1)
        self.n_steps = max(2, min(KEEP_STEPS, MOST_TIMERS // (2 * n_ops)))
        self._timers = [(streams.timer(), streams.timer()) for _ in range(self.n_steps * n_ops)]
        self._seen: tuple[int, int, float] | None = None  # the last op that compute was given: step, number, host clock

    def around(self, index: int, step: int) -> tuple[Event, Event]:
        """The timers to record before and after an op in its stream. Called on its lane's thread when it is about to be issued."""
        if self._lane[index] is Lane.GPU:
            self._seen = (step, index, time.perf_counter())
        return self._of(index, step)

    def _of(self, index: int, step: int) -> tuple[Event, Event]:
        return self._timers[step % self.n_steps * len(self._place) + self._place[index]]

    def read(self, spans: Sequence[Span]) -> list[Span]:
        """The spans of the steps that the timers remember, with streams' ops at the times when they really ran.

        Called when all streams have ended.
        """
        if self._seen is None or not spans:
            return list(spans)
        last = max(span.step for span in spans)
        kept = [span for span in spans if span.step > last - self.n_steps]
        zero_s = next(self._seen[2] - span.start_s for span in kept if (span.step, span.op) == self._seen[:2])
        steps = {span.step for span in kept}
        began_s = {(lane, step): at_s for lane in self._first for step, at_s in self._beginnings(lane, steps, zero_s)}
        return [self._timed(span, began_s[self._lane[span.op], span.step]) if span.op in self._lane else span for span in kept]

    def _timed(self, span: Span, began_s: float) -> Span:
        """The span of an op whose lane began the step then."""
        begin, end = self._of(span.op, span.step)
        first, _ = self._of(self._first[self._lane[span.op]], span.step)
        start_s = began_s + self._streams.elapsed_s(first, begin)
        return Span(span.op, span.step, start_s, start_s + self._streams.elapsed_s(begin, end))

    def _beginnings(self, lane: Lane, steps: Iterable[int], zero_s: float) -> Iterable[tuple[int, float]]:
        """When the lane began each step, on the spans' clock, the last one first.

        Each is told from the step after it: a device gives elapsed time in single precision, exact to a microsecond over
        seconds, not over hours.
        """
        later, at_s = self._now(self._of_lane[lane])
        at_s -= zero_s
        for step in sorted(steps, reverse=True):
            first, _ = self._of(self._first[lane], step)
            at_s -= self._streams.elapsed_s(first, later)
            later = first
            yield step, at_s

    def _now(self, stream: Stream) -> tuple[Event, float]:
        """A timer that has been reached, and the host's clock at that time."""
        looks = []
        for _ in range(N_LOOKS):
            timer, before_s = self._streams.timer(), time.perf_counter()
            self._streams.record(timer, stream)
            self._streams.wait(timer)
            looks.append((time.perf_counter() - before_s, before_s, timer))
        took_s, before_s, timer = min(looks, key=lambda look: look[0])
        return timer, before_s + took_s / 2
