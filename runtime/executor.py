"""The executor: performs a plan on a machine, with a thread for each lane.

Each lane performs its ops in plan order, step after step: wait, perform, signal. No barrier separates steps; lanes synchronise only
by the plan's waits (`lane_track.py`). The caller's thread wakes up once a step.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from penstock.runtime.plan import Lane, Op, Plan
from penstock.runtime.plan.timeline import Span, Timeline, is_kept

from .errors import PenstockError, StepError
from .lane_track import LOOK_S, Bell, Entry, Track, tracks_of

QUIET_S = 600.0  # without the end of an op: noted on stderr, and again after twice the time; a long op is no error
KEEP_STEPS = 64  # steps with spans in memory; it must not grow with a run
MOST_SPANS = 2**15  # limit of these spans; each also has two device timers, some hundred bytes each


@dataclass(frozen=True)
class StepResult:
    n_supervised: int  # tokens with a target
    grad_norm: float  # before clipping
    skipped: bool  # the norm was not finite
    loss_sum: Callable[[], float]  # waits until the device has added up the losses
    n_losses: int  # terms of `loss_sum`: supervised tokens, sequences or pairs

    @cached_property
    def loss(self) -> float:
        return self.loss_sum() / self.n_losses


Record = tuple[Span, Any]


class Machine(Protocol):
    """Performs ops: a `TorchMachine`, or an `EmulatedMachine`, where ops take another machine's time."""

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        """Run `work`, which enters `lane`, on the lane's thread: the calling one, or one shared by all runs."""

    def lane(self, lane: Lane) -> AbstractContextManager[None]:
        """Prepare the calling thread for this lane, until the context ends."""

    def prepare(self, step: int) -> None:
        """Make the step's batch. Called on the caller's thread during the previous step."""

    def perform(self, index: int, op: Op, step: int) -> Any:
        """Perform op number `index` of the plan, on its lane's thread. Return its timer for `measured`, or None."""

    def mark(self, op: Op) -> Any:
        """Return a token for lanes that wait for the op. Called on the lane's thread after `perform`."""

    def follow(self, lane: Lane, token: Any) -> None:
        """Wait for another lane's token. Called on the thread of the waiting lane."""

    def result(self, step: int) -> StepResult | None:
        """Return and forget the result of a step that all lanes have completed; None if it was no training."""

    def measured(self, records: Sequence[Record]) -> Sequence[Span]:
        """Return measured spans of ops, from host times and results of `perform`. Called after all lanes have ended."""


class StallError(RuntimeError):
    """Deadlock: all lanes wait for each other. The message lists their waits."""


class OpError(RuntimeError):
    """Failed op, named in the message; the cause is chained."""


class Stop:
    """Request to end a run after the current step. `request` never blocks: a signal handler may call it."""

    def __init__(self, parent: "Stop | None" = None) -> None:
        """A request to `parent` is a request to this one, too."""
        self._is_requested, self._parent = False, parent

    @property
    def is_requested(self) -> bool:
        return self._is_requested or (self._parent is not None and self._parent.is_requested)

    def request(self) -> None:
        self._is_requested = True

    def last_step(self, begun: int) -> int:
        """Return the run's last step after a request; `begun`: the latest step begun by a lane."""
        return begun


class AgreedStop(Stop):
    """Stop of several ranks: all learn of a request to one of them during a step, and end after the next step. No lane can be
    further, because ops after the next step wait for all ranks to meet in it."""

    def __init__(self, local: Stop) -> None:
        """`local`: requests to this rank."""
        super().__init__()
        self.local, self._last_step = local, 0

    def hear(self, step: int, is_requested: bool) -> None:
        if is_requested and not self.is_requested:
            self._last_step = step + 1
            self.request()

    def last_step(self, begun: int) -> int:
        return self._last_step


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    seconds: float  # since the end of the previous step, or the start
    busy_s: Mapping[Lane, float]  # time of each lane's thread in the step's ops
    result: StepResult | None


class Execution:
    """A run of a plan, performed by iteration over its completed steps; `timeline` is set at the end.

    The first failure of a lane or in the context stops all lanes after their current op and is raised: user errors unchanged,
    others as OpError naming the op; StallError if all lanes wait for each other. After a StepError the other lanes first complete
    the steps before (`is_whole`). An op that hangs looks like a long one: after
    `quiet_s` without the end of any op, stderr lists each lane's op. After `stop.request()` all lanes end after the same step, the
    earliest possible. `on_interrupt()` runs on Ctrl-C before the lanes are joined, because one may be blocked in a collective.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        n_steps: int,
        first_step: int = 0,
        quiet_s: float = QUIET_S,
        stop: Stop | None = None,
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeline = Timeline(())  # set at the end: ops of the last KEEP_STEPS, in seconds since the start
        self.machine, self.tracks, self.numbers = machine, tracks_of(plan), range(first_step, first_step + n_steps)
        self.news = Bell()  # rung at the end of a step in a lane or at a failure, wakes the caller's thread
        self._quiet_s, self._stop, self._on_interrupt = quiet_s, stop or Stop(), on_interrupt
        self._failure: BaseException | None = None  # the first
        self._n_intact: int | None = None  # steps before a StepError
        self._n_begun = self._n_reported = 0  # steps begun by a lane; steps reported to the caller
        self._n_prepared = 0  # steps with a batch
        self._one_at_a_time = threading.Lock()
        self._steps = self._perform()

    def __enter__(self) -> "Execution":
        return self

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._steps.throw(error)
        self._steps.close()

    @property
    def n_done(self) -> int:
        return min(track.n_done // track.n_in_step for track in self.tracks)

    @property
    def n_repeated(self) -> int:
        """Repetitions, over all steps, completed by all lanes with repeated ops."""
        return min((track.n_repeated(track.n_done) for track in self.tracks if track.repeated), default=0)

    @property
    def _busy(self) -> list[Track]:
        return [track for track in self.tracks if track.n_done < len(self.numbers) * track.n_in_step]

    def __str__(self) -> str:
        """Return the op or wait of each lane that has not ended."""
        return "; ".join(map(str, self._busy))

    def begins(self, turn: int) -> bool:
        """True if a lane may begin this step. After a request to stop, the last step is the latest begun by a lane: the others can
        complete it, because no op waits for a later step."""
        with self._one_at_a_time:
            if self._stop.is_requested:
                last = self._stop.last_step(self.numbers.start + self._n_begun - 1)
                self.numbers = range(self.numbers.start, min(self.numbers.stop, last + 1))
                self.news.ring()
            if turn >= len(self.numbers):
                return False
            if turn == self._n_begun:
                self._n_begun += 1
                self.news.ring()
            return True

    def fail(self, error: BaseException, turn: int | None = None) -> None:
        """Stop all lanes: after their current op, or before this step if the error has left the state intact."""
        self._n_intact = turn if self._failure is None else None
        self._failure = self._failure or error
        for track in self.tracks:
            track.stop(0 if turn is None else turn * track.n_in_step)
        self.news.ring()

    @property
    def is_whole(self) -> bool:
        """True after a run whose state is that of the last completed step: it ended without an error, or with a StepError."""
        return self._failure is None or self._n_intact == self.n_done

    def _perform(self) -> Generator[Step]:
        start_s = self._reported_s = time.perf_counter()
        n_kept = max(2, min(KEEP_STEPS, MOST_SPANS // sum(track.n_spans for track in self.tracks)))
        workers: list[_Worker] = []
        try:
            # Start the GPU lane last: its thread settings persist.
            for track in sorted(self.tracks, key=lambda track: track.lane is Lane.GPU):
                workers.append(_Worker(track, self, n_kept))
                workers[-1].start()
                workers[-1].ready.wait()
            yield from self._watch()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                self._on_interrupt()
            raise
        finally:
            self._join(workers)
            for track in self.tracks:
                track.tokens.clear()  # tracks are cyclic: tokens would otherwise live until a garbage collection
        if self._failure is not None:
            try:
                yield from self._completed_steps()
            finally:
                raise self._failure
        spans = self.machine.measured([record for worker in workers for record in worker.records])
        spans = [replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s) for span in spans]
        self.timeline = Timeline(tuple(sorted(spans, key=lambda span: (span.step, span.op, span.repetition))))

    def _completed_steps(self) -> Iterator[Step]:
        while self._n_reported < self.n_done:
            turn, before_s, self._reported_s = self._n_reported, self._reported_s, time.perf_counter()
            self._n_reported += 1
            busy_s = {track.lane: track.busy_s.pop(turn) for track in self.tracks}
            number = self.numbers[turn]
            yield Step(number, self._reported_s - before_s, busy_s, self.machine.result(number))

    def _watch(self) -> Iterator[Step]:
        """Yield steps; raise on a stall, in which all lanes wait; print a note if no op ends for long."""
        last_done, n_quiet_looks, n_stuck_looks, say_at_s = -1, 0, 0, self._quiet_s
        while True:
            while self._failure is None and self._n_prepared < min(self._n_begun + 1, len(numbers := self.numbers)):
                # a stop may shorten `numbers`
                self.machine.prepare(numbers[self._n_prepared])
                self._n_prepared += 1
            yield from self._completed_steps()
            if self._n_reported == len(self.numbers) or self._failure is not None:
                return
            if self.news.sleep():
                continue
            n_done = sum(track.n_done for track in self.tracks)
            if n_done != last_done:
                last_done, n_quiet_looks, n_stuck_looks, say_at_s = n_done, 0, 0, self._quiet_s
                continue
            n_quiet_looks += 1  # looks instead of time: a suspended process is not quiet
            n_stuck_looks = n_stuck_looks + 1 if all(track.is_stuck for track in self._busy) else 0
            if n_stuck_looks >= 2:
                raise StallError(f"deadlock, no lane advances: {self}")
            if n_quiet_looks * LOOK_S > say_at_s:
                say(f"no op has ended for {n_quiet_looks * LOOK_S:.0f} s, and the run goes on: {self}")
                say_at_s *= 2

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until all lanes have ended; after a failure at most `quiet_s` for each, because an op may hang."""
        for thread in threads:
            while thread.is_alive():  # false if a signal interrupted its start: it sees the failure and ends
                thread.join(timeout=self._quiet_s)
                if thread.is_alive() and self._failure is not None:
                    say(f"the run has failed, and waits no longer for {thread.name}: {self}")
                    return
                if thread.is_alive():
                    say(f"every op is done, but {thread.name} does not end; the run waits for it")


def execute(
    plan: Plan, machine: Machine, n_steps: int, first_step: int = 0, quiet_s: float = QUIET_S, stop: Stop | None = None
) -> Timeline:
    with Execution(plan, machine, n_steps, first_step, quiet_s, stop) as steps:
        for _ in steps:
            pass
    return steps.timeline


class _Worker(threading.Thread):
    def __init__(self, track: Track, run: Execution, n_kept: int) -> None:
        super().__init__(name=f"lane-{track.lane}", daemon=True)
        self.track, self.machine, self.execution = track, run.machine, run
        self.ready = threading.Event()
        self.records: deque[Record] = deque(maxlen=n_kept * track.n_spans)
        self._step, self._at = run.numbers.start, "its set-up"

    def run(self) -> None:
        try:
            self.machine.on_thread(self.track.lane, self._perform_steps)
        except PenstockError as error:
            is_intact = isinstance(error, StepError)  # raised before any update of its step
            self.execution.fail(error, self._step - self.execution.numbers.start if is_intact else None)
        except BaseException as error:
            failure = OpError(f"step {self._step + 1}, lane {self.track.lane}: {self._at} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.execution.fail(failure)
        finally:
            self.ready.set()

    def _perform_steps(self) -> None:
        with self.machine.lane(self.track.lane):
            self.ready.set()
            for turn, step in enumerate(self.execution.numbers):
                if not self.execution.begins(turn):
                    break
                self._step = step
                for entry, repetition in self.track.walk():
                    if not self._perform(entry, repetition, turn):
                        return
                self.execution.news.ring()
            self._at = "its end"

    def _perform(self, entry: Entry, repetition: int, turn: int) -> bool:
        """Wait for the op's dependencies and perform it; return False if the lane is stopped."""
        track, machine, op = self.track, self.machine, self.track.op(entry, repetition)
        if entry.begins:
            track.forget_tokens(self.execution.n_done, self.execution.n_repeated)
        self._at = op.name
        for token in track.wait(entry, turn, repetition):
            machine.follow(track.lane, token)
        if track.is_stopped:
            return False
        began_s = time.perf_counter()
        when = machine.perform(entry.index, op, self._step)
        ended_s = time.perf_counter()
        if is_kept(repetition, track.times):
            self.records.append((Span(entry.index, self._step, began_s, ended_s, repetition), when))
        track.busy_s[turn] += ended_s - began_s
        track.advance(machine.mark(op))
        return True


phrasing: ContextVar[Callable[[str], str]] = ContextVar("phrasing", default=str)  # changes the words of messages


def say(words: str) -> None:
    print(phrasing.get()(words), file=sys.stderr, flush=True)
