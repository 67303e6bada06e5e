"""Timers of ops in streams: when each really ran.

The host only sees when it issued an op. Two timers, one before it in its stream and one after, see when it ran. An op that repeats
has two for each repetition that a timeline keeps, and two for all others.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from runtime.executor import KEEP_STEPS
from runtime.plan import Lane, Plan
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, is_kept

from .streams import Event, Stream, Streams

MOST_TIMERS = 2**16  # a timer costs about a microsecond to make and some hundred bytes; made once, used again
N_LOOKS = 5  # at both clocks at once; the quickest look knows best
N_KEPT = FIRST_KEPT + LAST_KEPT  # repetitions


class Stopwatch:
    """Timers for the ops of the last few steps of a plan's streams."""

    def __init__(self, plan: Plan, streams: Streams, of_lane: Mapping[Lane, Stream]) -> None:
        self._streams, self._of_lane = streams, of_lane
        self._lane = {index: op.lane for index, op in enumerate(plan.ops) if op.lane in of_lane}
        self._times = {index: plan.often(index) for index in self._lane}
        # Of an op that repeats the last place is that of repetitions which the timeline does not keep.
        places = ((index, kept) for index, times in self._times.items() for kept in range(N_KEPT + 1 if times > 1 else 1))
        self._place = {of: place for place, of in enumerate(places)}
        self._performed: dict[int, tuple[int, int]] = {}  # of an op that repeats: the step, and how often in it
        self._first = {lane: index for index, lane in reversed(self._lane.items())}  # op of each lane
        n_ops = max(len(self._place), 1)
        self.n_steps = max(2, min(KEEP_STEPS, MOST_TIMERS // (2 * n_ops)))
        self._timers = [(streams.timer(), streams.timer()) for _ in range(self.n_steps * n_ops)]
        # The last op that compute was given: step, number, repetition, host clock
        self._seen: tuple[int, int, int, float] | None = None

    def around(self, index: int, step: int) -> tuple[Event, Event]:
        """The timers to record before and after an op in its stream. Called on its lane's thread when it is about to be issued."""
        repetition = 0
        if self._times[index] > 1:
            before, n = self._performed.get(index, (step, -1))
            repetition = (n + 1) % self._times[index] if before == step else 0
            self._performed[index] = step, repetition
        if self._lane[index] is Lane.GPU and is_kept(repetition, self._times[index]):
            self._seen = (step, index, repetition, time.perf_counter())
        return self._of(index, step, repetition)

    def _of(self, index: int, step: int, repetition: int) -> tuple[Event, Event]:
        times, kept = self._times[index], N_KEPT
        if is_kept(repetition, times):
            kept = repetition if repetition < FIRST_KEPT else repetition - max(times - N_KEPT, 0)
        return self._timers[step % self.n_steps * len(self._place) + self._place[index, kept]]

    def read(self, spans: Sequence[Span]) -> list[Span]:
        """The spans of the steps that the timers remember, with streams' ops at the times when they really ran.

        Called when all streams have ended.
        """
        if self._seen is None or not spans:
            return list(spans)
        last = max(span.step for span in spans)
        kept = [span for span in spans if span.step > last - self.n_steps]
        zero_s = next(self._seen[-1] - s.start_s for s in kept if (s.step, s.op, s.repetition) == self._seen[:-1])
        steps = {span.step for span in kept}
        began_s = {(lane, step): at_s for lane in self._first for step, at_s in self._beginnings(lane, steps, zero_s)}
        return [self._timed(span, began_s[self._lane[span.op], span.step]) if span.op in self._lane else span for span in kept]

    def _timed(self, span: Span, began_s: float) -> Span:
        """The span of an op whose lane began the step then."""
        begin, end = self._of(span.op, span.step, span.repetition)
        first, _ = self._of(self._first[self._lane[span.op]], span.step, 0)
        start_s = began_s + self._streams.elapsed_s(first, begin)
        return Span(span.op, span.step, start_s, start_s + self._streams.elapsed_s(begin, end), span.repetition)

    def _beginnings(self, lane: Lane, steps: Iterable[int], zero_s: float) -> Iterable[tuple[int, float]]:
        """When the lane began each step, on the spans' clock, the last one first.

        Each is told from the step after it: a device gives elapsed time in single precision, exact to a microsecond over
        seconds, not over hours.
        """
        later, at_s = self._now(self._of_lane[lane])
        at_s -= zero_s
        for step in sorted(steps, reverse=True):
            first, _ = self._of(self._first[lane], step, 0)
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
