"""The executor: performs a plan on a machine, a thread for each lane.

Each lane walks its ops in plan order, step after step: wait, perform, signal. Nothing joins the lanes between steps; the plan's
waits are all there is. How a lane waits for another is in `lane_track.py`; the caller's thread is woken once a step.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from runtime.plan import Lane, Op, Plan
from runtime.plan.timeline import Span, Timeline, is_kept

from .errors import PenstockError
from .lane_track import LOOK_S, Bell, Entry, Track, tracks_of

QUIET_S = 600.0  # said on stderr when no op has ended for so long, and again after twice the time; a long op is no error
KEEP_STEPS = 64  # steps whose spans are remembered; a long run must not grow
MOST_SPANS = 2**15  # of these, and twice as many timers of a device, each some hundred bytes


@dataclass(frozen=True)
class StepResult:
    """What came of a step of training."""

    n_supervised: int  # tokens that were to be predicted
    grad_norm: float  # before clipping
    skipped: bool  # as the norm was not finite
    loss_sum: Callable[[], float]  # over these tokens; returns once the device has added it up

    @cached_property
    def loss(self) -> float:
        """Mean over the supervised tokens."""
        return self.loss_sum() / self.n_supervised


Record = tuple[Span, Any]


class Machine(Protocol):
    """What an executor needs: a `CpuMachine`, a `CudaMachine`, or an `EmulatedMachine`, which keeps another machine's time.

    `mark` and `follow` carry what one lane must know of another's work beyond that it was issued.
    """

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        """Perform all the work of a lane in one run, its `lane` too, on the thread where it belongs: the calling one, or one that
        outlives runs."""

    def lane(self, lane: Lane) -> AbstractContextManager[None]:
        """Prepare the calling thread to be this lane, until the context ends."""

    def perform(self, index: int, op: Op, step: int) -> Any:
        """Do op number `index` of the plan for this step. Called on its lane's thread. What tells when it really ran, or None."""

    def mark(self, op: Op) -> Any:
        """Called on the lane's thread after `perform`: a token for lanes that wait for the op."""

    def follow(self, lane: Lane, token: Any) -> None:
        """Called on the thread of a lane that waits, with the token of what it waits for."""

    def result(self, step: int) -> StepResult | None:
        """What came of a step that all lanes have done, handed over: the machine forgets it. None: it was no training."""

    def measured(self, records: Sequence[Record]) -> Sequence[Span]:
        """When ops really ran, given when the lanes' threads were in `perform`, by the host's clock, and what that returned. Called
        once all lanes have ended."""


class StallError(RuntimeError):
    """Every lane waits: the message says who waits for whom."""


class OpError(RuntimeError):
    """An op failed: the message names it; the cause is chained."""


class Stop:
    """Asks a run to end after the step in progress. A signal handler may ask: nothing is waited for."""

    def __init__(self, also: "Stop | None" = None) -> None:
        """`also`: a request to that one is one to this one too."""
        self._is_requested, self._also = False, also

    @property
    def is_requested(self) -> bool:
        return self._is_requested or (self._also is not None and self._also.is_requested)

    def request(self) -> None:
        self._is_requested = True

    def last_step(self, begun: int) -> int:
        """The step after which a run ends that is asked to, where `begun` is the furthest that any lane has begun."""
        return begun


class AgreedStop(Stop):
    """A stop of several ranks: all hear of a request to one of them while a step is at work, and end after the next one.

    No lane of any rank can be further: no op of the step after next begins before all have met in the next one.
    """

    def __init__(self, asked: Stop) -> None:
        """`asked`: the requests to this rank."""
        super().__init__()
        self.asked, self._last_step = asked, 0

    def hear(self, step: int, is_asked: bool) -> None:
        """What all ranks learn in a step."""
        if is_asked and not self.is_requested:
            self._last_step = step + 1
            self.request()

    def last_step(self, begun: int) -> int:
        return self._last_step


@dataclass(slots=True)
class _Board:
    """What the threads of a run share: the lanes, the first failure, and which step is the last."""

    tracks: list[Track]
    first_step: int
    n_steps: int
    stop: Stop
    news: Bell = field(default_factory=Bell)  # a step's end in some lane, or a failure: wakes the caller's thread
    failure: BaseException | None = None
    n_reported: int = 0
    _n_begun: int = 0  # steps that some lane has begun
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_done(self) -> int:
        """Steps that every lane has done."""
        return min(track.n_done // track.n_in_step for track in self.tracks)

    @property
    def n_repeated(self) -> int:
        """Repetitions, counted over all steps, that every lane has done which repeats anything."""
        return min((track.n_repeated(track.n_done) for track in self.tracks if track.repeated), default=0)

    @property
    def busy(self) -> list[Track]:
        """The lanes that have not ended."""
        return [track for track in self.tracks if track.n_done < self.n_steps * track.n_in_step]

    def begins(self, turn: int) -> bool:
        """Whether there is such a step for a lane that wants to begin it. Once the run is asked to stop, the last one is the
        furthest that any lane has begun: the others can all end it, as no op waits for one of a later step."""
        with self._one_at_a_time:
            if self.stop.is_requested:
                last = self.stop.last_step(self.first_step + self._n_begun - 1)
                self.n_steps = min(self.n_steps, last + 1 - self.first_step)
                self.news.ring()
            if turn >= self.n_steps:
                return False
            self._n_begun = max(self._n_begun, turn + 1)
            return True

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for track in self.tracks:
            track.stop()
        self.news.ring()

    def __str__(self) -> str:
        """What each lane that has not ended does or waits for."""
        return "; ".join(map(str, self.busy))


@dataclass(frozen=True, slots=True)
class Step:
    """A step that all lanes have done."""

    number: int
    seconds: float  # since the step before was done, or since the start
    busy_s: Mapping[Lane, float]  # in which each lane's thread was at the step's ops
    result: StepResult | None  # the machine's


class Execution:
    """A run of a plan, performed while one iterates: it gives each step when its last op is done, and has a timeline at the end.

    The first failure, of a lane or within the context, stops all lanes and is raised once each has ended the op that it was in:
    errors of the user as they are, others as OpError naming the op. StallError when all lanes wait for each other. An op that hangs
    cannot be told from a long one: after `quiet_s` without the end of any op, stderr says what each lane is at. After
    `stop.request()` all lanes end after the same step, the earliest that none of them has gone beyond. `on_interrupt()` runs on
    Ctrl-C before the lanes are joined, one of which may be blocked in a collective.
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
        self.timeline = Timeline(())  # in the end: when each op of the last KEEP_STEPS ran, in seconds since the start
        self._machine, self._quiet_s, self._on_interrupt = machine, quiet_s, on_interrupt
        self._board = _Board(tracks_of(plan), first_step, n_steps, stop or Stop())
        self._steps = self._perform(range(first_step, first_step + n_steps))

    def __enter__(self) -> "Execution":
        return self

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._steps.throw(error)
        self._steps.close()

    def _perform(self, numbers: range) -> Generator[Step]:
        board, machine, start_s = self._board, self._machine, time.perf_counter()
        before_s = start_s

        def done() -> Iterator[Step]:
            """The steps that are done and not reported."""
            nonlocal before_s
            while board.n_reported < board.n_done:
                turn, now_s = board.n_reported, time.perf_counter()
                board.n_reported += 1
                busy_s = {track.lane: track.busy_s.pop(turn) for track in board.tracks}
                seconds, before_s = now_s - before_s, now_s
                yield Step(numbers[turn], seconds, busy_s, machine.result(numbers[turn]))

        n_kept = max(2, min(KEEP_STEPS, MOST_SPANS // sum(track.n_spans for track in board.tracks)))
        workers: list[_Worker] = []
        try:
            # Compute last: its thread settings are to stay.
            for track in sorted(board.tracks, key=lambda track: track.lane is Lane.GPU):
                workers.append(_Worker(track, machine, board, numbers, n_kept))
                workers[-1].start()
                workers[-1].ready.wait()
            yield from _watch(board, done, self._quiet_s)
        except BaseException as error:
            board.fail(error)
            if not isinstance(error, Exception):
                self._on_interrupt()
            raise
        finally:
            _join(workers, board, self._quiet_s)
            for track in board.tracks:
                track.tokens.clear()  # tracks refer to each other: without this, what a machine left would live until a collection
        if board.failure is not None:
            try:
                yield from done()  # by then
            finally:
                raise board.failure
        spans = machine.measured([record for worker in workers for record in worker.records])
        spans = [replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s) for span in spans]
        self.timeline = Timeline(tuple(sorted(spans, key=lambda span: (span.step, span.op, span.repetition))))


def execute(
    plan: Plan, machine: Machine, n_steps: int, first_step: int = 0, quiet_s: float = QUIET_S, stop: Stop | None = None
) -> Timeline:
    """Run n steps and return the timeline."""
    with Execution(plan, machine, n_steps, first_step, quiet_s, stop) as steps:
        for _ in steps:
            pass
    return steps.timeline


class _Worker(threading.Thread):
    """One lane's thread."""

    def __init__(self, track: Track, machine: Machine, board: _Board, steps: range, n_kept: int) -> None:
        super().__init__(name=f"lane-{track.lane}", daemon=True)
        self.track, self.machine, self.board, self.steps = track, machine, board, steps
        self.ready = threading.Event()
        self.records: deque[Record] = deque(maxlen=n_kept * track.n_spans)
        self._step, self._at = steps.start, "its set-up"

    def run(self) -> None:
        try:
            self.machine.on_thread(self.track.lane, self._perform_steps)
        except PenstockError as error:
            self.board.fail(error)
        except BaseException as error:
            failure = OpError(f"step {self._step + 1}, lane {self.track.lane}: {self._at} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.board.fail(failure)
        finally:
            self.ready.set()

    def _perform_steps(self) -> None:
        with self.machine.lane(self.track.lane):
            self.ready.set()
            for turn, step in enumerate(self.steps):
                if not self.board.begins(turn):
                    break
                self._step = step
                for entry, repetition in self.track.walk():
                    if not self._perform(entry, repetition, turn, step):
                        return
                self.board.news.ring()
            self._at = "its end"

    def _perform(self, entry: Entry, repetition: int, turn: int, step: int) -> bool:
        """Wait for what the op waits for, and do it; False where the lane is stopped."""
        track, machine, op = self.track, self.machine, self.track.op(entry, repetition)
        if entry.begins:
            track.forget_tokens(self.board.n_done, self.board.n_repeated)
        self._at = op.name
        for token in track.wait(entry, turn, repetition):
            machine.follow(track.lane, token)
        if track.is_stopped:
            return False
        began_s = time.perf_counter()
        when = machine.perform(entry.index, op, step)
        ended_s = time.perf_counter()
        if is_kept(repetition, track.times):
            self.records.append((Span(entry.index, step, began_s, ended_s, repetition), when))
        track.busy_s[turn] += ended_s - began_s
        track.advance(machine.mark(op))
        return True


def _watch(board: _Board, done: Callable[[], Iterator[Step]], quiet_s: float) -> Iterator[Step]:
    """Report steps; see a stall, in which every lane waits for what is not done; say so when nothing moves for long."""
    last_done, n_quiet_looks, n_stuck_looks, say_at_s = -1, 0, 0, quiet_s
    while True:
        yield from done()
        if board.n_reported == board.n_steps or board.failure is not None:
            return
        if board.news.sleep():
            continue
        n_done = sum(track.n_done for track in board.tracks)
        if n_done != last_done:
            last_done, n_quiet_looks, n_stuck_looks, say_at_s = n_done, 0, 0, quiet_s
            continue
        n_quiet_looks += 1  # counted in looks: a process that was suspended for an hour has not been quiet for one
        n_stuck_looks = n_stuck_looks + 1 if all(track.is_stuck for track in board.busy) else 0
        if n_stuck_looks >= 2:
            raise StallError(f"no lane moves any more: {board}")
        if n_quiet_looks * LOOK_S > say_at_s:
            say(f"no op has ended for {n_quiet_looks * LOOK_S:.0f} s, and the run goes on: {board}")
            say_at_s *= 2


def _join(threads: Sequence[threading.Thread], board: _Board, quiet_s: float) -> None:
    """Wait until every lane has ended. After a failure, for `quiet_s` at most: an op that hangs never ends."""
    deadline_s = time.perf_counter() + quiet_s
    for thread in threads:
        while thread.is_alive():  # not so the one whose start a signal interrupted: it sees the failure and ends by itself
            thread.join(timeout=max(0.0, deadline_s - time.perf_counter()))
            if not thread.is_alive():
                break
            if board.failure is not None:
                say(f"the run has failed, and waits no longer for {thread.name}: {board}")
                return
            say(f"every op is done, but {thread.name} does not end; the run waits for it")
            deadline_s = time.perf_counter() + quiet_s


def say(words: str) -> None:
    """Something a person should know at once, while nothing is known to be wrong."""
    print(words, file=sys.stderr, flush=True)
