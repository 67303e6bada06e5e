"""Timers of ops in streams: when each really ran.

The host only sees when it issued an op. Two timers, one before it in its stream and one after, see when it ran. An op that repeats
has two for each repetition that a timeline keeps.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.cuda import Event, Stream

from runtime.executor import KEEP_STEPS
from runtime.plan import Lane, Plan
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, is_kept

from .streams import CudaStreams

MOST_TIMERS = 2**16  # that are kept: some hundred bytes each
N_LOOKS = 5  # at both clocks at once; the quickest look knows best


class Stopwatch:
    """Timers for the ops of the last few steps of a plan's streams."""

    def __init__(self, plan: Plan, streams: CudaStreams, of_lane: Mapping[Lane, Stream]) -> None:
        self._streams, self._of_lane = streams, of_lane
        self._lane = {index: op.lane for index, op in enumerate(plan.ops) if op.lane in of_lane}
        self._times = {index: plan.often(index) for index in self._lane}
        n_timed = sum(min(times, FIRST_KEPT + LAST_KEPT) for times in self._times.values())
        self.n_steps = max(2, min(KEEP_STEPS, MOST_TIMERS // (2 * max(n_timed, 1))))
        self._performed = dict.fromkeys(self._lane, (0, -1))  # the step, and the last repetition in it
        self._timers: dict[int, dict[tuple[int, int], tuple[Event, Event]]] = {index: {} for index in self._lane}  # likewise

    def around(self, index: int, step: int) -> Sequence[Event]:
        """The timers to record before and after an op in its stream; none where the timeline does not keep the repetition. Called
        on its lane's thread when it is about to be issued."""
        times, (before, last) = self._times[index], self._performed[index]
        repetition = (last + 1) % times if step == before else 0
        self._performed[index] = step, repetition
        if not is_kept(repetition, times):
            return ()
        timers = self._timers[index]
        timers.pop((step - self.n_steps, repetition), None)
        timers[step, repetition] = self._streams.timer(), self._streams.timer()
        return timers[step, repetition]

    def read(self, spans: Sequence[Span]) -> list[Span]:
        """The spans of the steps that the timers remember, with streams' ops at the times when they really ran.

        Called when all streams have ended. A device tells elapsed time in single precision: to some millionths of a step, of these
        few.
        """
        now = {lane: self._now(stream) for lane, stream in self._of_lane.items()}
        last = max((span.step for span in spans), default=0)

        def timed(span: Span) -> Span:
            (begin, end), (later, at_s) = self._timers[span.op][span.step, span.repetition], now[self._lane[span.op]]
            start_s = at_s - self._streams.elapsed_s(begin, later)
            return replace(span, start_s=start_s, end_s=start_s + self._streams.elapsed_s(begin, end))

        return [timed(span) if span.op in self._lane else span for span in spans if span.step > last - self.n_steps]

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
