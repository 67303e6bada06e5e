"""How is a plan performed?

Each lane is a thread that walks its ops in plan order, step after step: wait, perform, signal. The machine says which thread, as
some of them outlive a run. Nothing joins the lanes between steps; the plan's waits are all there is. Ops that repeat are performed
from where they stand: a step of a million micro-batches takes no more room than one of a few.

A lane counts the ops it has done. One that needs another to be further leaves word there and sleeps until its bell is rung; a lane
that nobody waits for rings no bell, and the caller's thread is woken once a step. So an op costs a few microseconds where no lane
has to be woken, and where one has, what waking a thread costs (`benchmarks/executor.py`).
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from runtime.plan import Lane, Op, Plan, Repeat, Wait
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline, is_kept

from .errors import PenstockError
from .lane_thread import LaneRun
from .machine import Machine, StepResult

QUIET_S = 600.0  # said on stderr when no op has ended for so long, and again after twice the time; a long op is no error
KEEP_STEPS = 64  # steps whose spans are remembered; a long run must not grow
_LOOK_S = 0.5  # how often a waiting lane looks whether another has failed, should a bell not be heard


class StallError(RuntimeError):
    """Every lane waits: the message says who waits for whom."""


class OpError(RuntimeError):
    """An op failed: the message names it; the cause is chained."""


class _Stopped(Exception):
    """Another lane failed; this one ends quietly."""


class Stop:
    """Asks a run to end after the step in progress. A signal handler may ask: nothing is waited for."""

    def __init__(self) -> None:
        self.is_requested = False

    def request(self) -> None:
        self.is_requested = True


@dataclass(frozen=True, slots=True)
class _Entry:
    """An op in its lane: its number in the plan, and what it waits for."""

    index: int
    op: Op
    waits: tuple["_Awaited", ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """What an op waits for: the position, in a step of its lane, of an op so many steps ago; where both repeat, in so many
    repetitions ago, each of which moves the position on."""

    track: "_Track"
    at: int
    distance: int
    back: int | None  # None: whatever the repetition

    def position(self, turn: int, repetition: int) -> int:
        """Counted over all steps; negative when there is nothing to wait for."""
        track = self.track
        if self.back is None:
            return (turn - self.distance) * track.n_in_step + self.at
        step, repetition = divmod(turn * track.times + repetition - self.back, track.times)
        return step * track.n_in_step + self.at + repetition * len(track.repeated)


@dataclass(slots=True, eq=False)
class _Track:
    """What the others may know of a lane. Positions count its ops over all steps, those that repeat each time."""

    lane: Lane
    bell: SimpleQueue[None]  # wakes this lane
    repeat: Repeat | None
    entries: list[_Entry] = field(default_factory=list)
    repeated: range = range(0)  # which entries repeat
    n_in_step: int = 0
    n_done: int = 0
    n_in_all: int = 0
    tokens: dict[int, object] = field(default_factory=dict)  # by position, where the machine left one
    asked: dict["_Track", int] = field(default_factory=dict)  # who sleeps until the op at which position is done
    wants: tuple["_Track", int] | None = None  # what this lane sleeps for
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # in its ops of each step not yet reported

    def ring(self) -> None:
        """Wake those whose wish has come true."""
        for other, position in list(self.asked.items()):
            if self.n_done > position and self.asked.pop(other, None) is not None:
                other.bell.put(None)

    @property
    def times(self) -> int:
        """How many times a step performs what repeats."""
        return 1 if self.repeat is None else self.repeat.times

    def walk(self) -> Iterator[tuple[_Entry, int]]:
        """The entries of a step as they are performed, and in which repetition."""
        yield from ((entry, 0) for entry in self.entries[: self.repeated.start])
        for repetition in range(self.times if self.repeated else 0):
            yield from ((self.entries[i], repetition) for i in self.repeated)
        yield from ((entry, 0) for entry in self.entries[self.repeated.stop :])

    def op(self, entry: _Entry, repetition: int) -> Op:
        return entry.op if self.repeat is None or not repetition else self.repeat.op(entry.op, repetition)

    def name_at(self, position: int) -> str:
        """Of the op at this position."""
        at, repetition = position % self.n_in_step, 0
        if self.repeats_at(position):
            repetition, more = divmod(at - self.repeated.start, len(self.repeated))
            at = self.repeated.start + more
        elif at >= self.repeated.stop:
            at -= (self.times - 1) * len(self.repeated)
        return self.op(self.entries[at], repetition).name

    def repeats_at(self, position: int) -> bool:
        """Whether the op at this position is one that repeats."""
        return 0 <= position % self.n_in_step - self.repeated.start < self.times * len(self.repeated)

    def n_repeated(self, position: int) -> int:
        """Repetitions that are over, counted over all steps, when the ops before this position are done."""
        turn, at = divmod(position, self.n_in_step)
        return turn * self.times + min(max(at - self.repeated.start, 0) // max(len(self.repeated), 1), self.times)

    @property
    def is_stuck(self) -> bool:
        """Whether it sleeps, and what it sleeps for has not come."""
        wants = self.wants
        return wants is not None and wants[0].n_done <= wants[1]

    def __str__(self) -> str:
        name, wants = self.name_at(self.n_done), self.wants
        if wants is None:
            return f"{self.lane}: is at {name}"
        other, position = wants
        return f"{self.lane}: {name} waits for {other.name_at(position)}"


@dataclass(slots=True)
class _Board:
    """All lanes, what the caller's thread sleeps for, the first failure, and which step is the last."""

    tracks: list[_Track]
    n_steps: int
    stop: Stop
    news: SimpleQueue[None] = field(default_factory=SimpleQueue)  # a step's end in some lane, or a failure
    failure: BaseException | None = None
    n_reported: int = 0
    _n_begun: int = 0  # steps that some lane has begun
    _is_ending: bool = False
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_done(self) -> int:
        """Steps that every lane has done."""
        return min(track.n_done // track.n_in_step for track in self.tracks)

    def begins(self, turn: int) -> bool:
        """Whether there is such a step for a lane that wants to begin it.

        The first lane that finds the run asked to stop settles which step is the last: the furthest that any lane has begun. The
        others can all end it, as no op waits for one of a later step.
        """
        with self._one_at_a_time:
            if self.stop.is_requested and not self._is_ending:
                self._is_ending, self.n_steps = True, min(self.n_steps, self._n_begun)
                for track in self.tracks:
                    track.n_in_all = self.n_steps * track.n_in_step
                self.news.put(None)
            if turn >= self.n_steps:
                return False
            self._n_begun = max(self._n_begun, turn + 1)
            return True

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for track in self.tracks:
            track.bell.put(None)
        self.news.put(None)

    def who(self) -> str:
        """What each lane that has not ended does or waits for."""
        return "; ".join(str(track) for track in self.tracks if track.n_done < track.n_in_all)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that all lanes have done."""

    number: int
    seconds: float  # since the step before was done, or since the start
    busy_s: Mapping[Lane, float]  # in which each lane's thread was at the step's ops
    result: StepResult | None  # the machine's


class Execution:
    """A plan that is performed while one iterates: each step when its last op is done, and then a timeline.

    The first failure, of a lane or within the context, stops all lanes and is raised once each has ended the op that it was in:
    errors of the user as they are, others as OpError naming the op. StallError when all lanes wait for each other. An op that hangs
    cannot be told from a long one: after `quiet_s` without the end of any op, stderr says what each lane is at. After
    `stop.request()` all lanes end after the same step, the earliest that none of them has gone beyond. `on_interrupt()` is called
    before lanes are waited for that somebody at the keyboard wants to end: one may be waiting elsewhere.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        n_steps: int,
        first_step: int = 0,
        quiet_s: float = QUIET_S,
        keep_steps: int = KEEP_STEPS,
        stop: Stop | None = None,
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeline = Timeline(())  # in the end: when each op of the last `keep_steps` ran, in seconds since the start
        self._machine, self._quiet_s, self._keep_steps, self._on_interrupt = machine, quiet_s, keep_steps, on_interrupt
        self._board = _Board(_tracks(plan, n_steps), n_steps, stop or Stop())
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

        workers: list[_Worker] = []
        threads: list[LaneRun] = []
        try:
            # Compute last: its thread settings are to stay.
            for track in sorted(board.tracks, key=lambda track: track.lane is Lane.GPU):
                workers.append(_Worker(track, machine, board, numbers, self._keep_steps))
                threads.append(machine.on_thread(track.lane, workers[-1].run))
                threads[-1].start()
                workers[-1].ready.wait()
            yield from _watch(board, done, self._quiet_s)
        except BaseException as error:
            board.fail(error)
            if not isinstance(error, Exception):
                self._on_interrupt()
            raise
        finally:
            _join(threads, board, self._quiet_s)
            for track in board.tracks:
                track.tokens.clear()  # tracks refer to each other: without this, what a machine left would live until a collection
        if board.failure is not None:
            try:
                yield from done()  # by then
            finally:
                raise board.failure
        spans = [
            Span(op, step, began_s - start_s, ended_s - start_s, k) for w in workers for step, op, began_s, ended_s, k in w.records
        ]
        self.timeline = Timeline(tuple(machine.measured(sorted(spans, key=lambda s: (s.step, s.op, s.repetition)))))


def execute(
    plan: Plan,
    machine: Machine,
    n_steps: int,
    first_step: int = 0,
    quiet_s: float = QUIET_S,
    keep_steps: int = KEEP_STEPS,
    stop: Stop | None = None,
) -> Timeline:
    """An execution, where nobody asks what came of each step."""
    with Execution(plan, machine, n_steps, first_step, quiet_s, keep_steps, stop) as steps:
        for _ in steps:
            pass
    return steps.timeline


def _tracks(plan: Plan, n_steps: int) -> list[_Track]:
    """The lanes that have ops, with waits by position in the other lane."""
    repeat = plan.repeat
    tracks = {op.lane: _Track(op.lane, SimpleQueue(), repeat) for op in plan.ops}
    counts = dict.fromkeys(tracks, 0)
    positions: list[int] = []
    for op in plan.ops:
        positions.append(counts[op.lane])
        counts[op.lane] += 1
    if repeat is not None:
        for lane, track in tracks.items():
            first, end = (sum(op.lane is lane for op in plan.ops[:part]) for part in (repeat.start, repeat.end))
            track.repeated = range(first, end)

    def awaited(index: int, wait: Wait) -> _Awaited:
        track, at = tracks[plan.ops[wait.op].lane], positions[wait.op]
        if repeat is not None and index in repeat and wait.op in repeat and not wait.distance:
            return _Awaited(track, at, 0, wait.back)
        more = (track.times - 1) * len(track.repeated) if at >= track.repeated.start else 0  # the last repetition, or what follows
        return _Awaited(track, at + more, wait.distance, None)

    for index, op in enumerate(plan.ops):
        tracks[op.lane].entries.append(_Entry(index, op, tuple(awaited(index, wait) for wait in op.waits)))
    for track in tracks.values():
        track.n_in_step = len(track.entries) + (track.times - 1) * len(track.repeated)
        track.n_in_all = n_steps * track.n_in_step
    return list(tracks.values())


@dataclass(slots=True)
class _Worker:
    """What one lane's thread does."""

    track: _Track
    machine: Machine
    board: _Board
    steps: range
    keep_steps: int
    records: deque[tuple[int, int, float, float, int]] = field(init=False)  # step, op, when it began and ended, repetition
    ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        track = self.track
        n_kept = min(track.times, FIRST_KEPT + LAST_KEPT)  # of an op that repeats
        self.records = deque(maxlen=self.keep_steps * (len(track.entries) + (n_kept - 1) * len(track.repeated)))

    def run(self) -> None:
        at = "its set-up"
        step = self.steps.start
        try:
            with self.machine.lane(self.track.lane):
                self.ready.set()
                for turn, step in enumerate(self.steps):
                    if not self.board.begins(turn):
                        break
                    self._forget_tokens()
                    begun = 0
                    for entry, repetition in self.track.walk():
                        if repetition > begun:
                            begun = repetition
                            self._forget_tokens()
                        op = self.track.op(entry, repetition)
                        at = op.name
                        self._do(entry, op, turn, step, repetition)
                    self.board.news.put(None)
                at = "its end"
        except _Stopped:
            pass
        except PenstockError as error:
            self.board.fail(error)
        except BaseException as error:
            failure = OpError(f"step {step + 1}, lane {self.track.lane}: {at} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.board.fail(failure)
        finally:
            self.ready.set()

    def _do(self, entry: _Entry, op: Op, turn: int, step: int, repetition: int) -> None:
        track, board = self.track, self.board
        for awaited in entry.waits:
            if (position := awaited.position(turn, repetition)) >= 0:
                other = awaited.track
                if other.n_done <= position:
                    self._sleep_until(other, position)
                if (token := other.tokens.get(position)) is not None:
                    self.machine.follow(track.lane, token)
        if board.failure is not None:
            raise _Stopped
        began_s = time.perf_counter()
        self.machine.perform(entry.index, op, step)
        ended_s = time.perf_counter()
        if is_kept(repetition, track.times):
            self.records.append((step, entry.index, began_s, ended_s, repetition))
        track.busy_s[turn] += ended_s - began_s
        token = self.machine.mark(op)
        if token is not None:
            track.tokens[track.n_done] = token
        track.n_done += 1
        if track.asked:
            track.ring()

    def _sleep_until(self, other: _Track, position: int) -> None:
        """Until the op at this position of the other lane is done."""
        track, board = self.track, self.board
        track.wants = (other, position)
        while True:
            other.asked[track] = position  # first ask, then look: else what comes between the two would ring no bell
            if other.n_done > position or board.failure is not None:
                break
            with suppress(Empty):
                track.bell.get(
                    timeout=_LOOK_S
                )  # perhaps for a wish that was granted before this lane slept: then look and sleep again
        other.asked.pop(track, None)
        track.wants = None

    def _forget_tokens(self) -> None:
        """Drop those that no lane can ask for any more: a lane in step n asks for steps n and n - 1, one in repetition k for
        repetitions k and k - 1, and for the last of a step."""
        track, tokens = self.track, self.track.tokens
        of_past_steps = (self.board.n_done - 1) * track.n_in_step
        over = min((other.n_repeated(other.n_done) for other in self.board.tracks if other.repeated), default=0)
        for position in list(tokens):
            is_over = track.repeats_at(position) and track.n_repeated(position) + 1 < over
            is_last = (track.n_repeated(position) + 1) % track.times == 0
            if position < of_past_steps or (is_over and not is_last):
                del tokens[position]


def _watch(board: _Board, done: Callable[[], Iterator[Step]], quiet_s: float) -> Iterator[Step]:
    """Report steps; see a stall, in which every lane waits for what is not done; say so when nothing moves for long."""
    last_done, n_quiet_looks, n_stuck_looks, say_at_s = -1, 0, 0, quiet_s
    while True:
        yield from done()
        if board.n_reported == board.n_steps or board.failure is not None:
            return
        with suppress(Empty):
            board.news.get(timeout=_LOOK_S)
            continue
        n_done = sum(track.n_done for track in board.tracks)
        if n_done != last_done:
            last_done, n_quiet_looks, n_stuck_looks, say_at_s = n_done, 0, 0, quiet_s
            continue
        n_quiet_looks += 1  # counted in looks: a process that was suspended for an hour has not been quiet for one
        is_stuck = all(track.is_stuck for track in board.tracks if track.n_done < track.n_in_all)
        n_stuck_looks = n_stuck_looks + 1 if is_stuck else 0
        if n_stuck_looks >= 2:
            raise StallError(f"no lane moves any more: {board.who()}")
        if n_quiet_looks * _LOOK_S > say_at_s:
            say(f"no op has ended for {n_quiet_looks * _LOOK_S:.0f} s, and the run goes on: {board.who()}")
            say_at_s *= 2


def _join(threads: Sequence[LaneRun], board: _Board, quiet_s: float) -> None:
    """Wait until every lane has ended. After a failure, for `quiet_s` at most: an op that hangs never ends."""
    deadline_s = time.perf_counter() + quiet_s
    for thread in threads:
        while thread.is_alive():  # not so the one whose start a signal interrupted: it sees the failure and ends by itself
            thread.join(timeout=max(0.0, deadline_s - time.perf_counter()))
            if not thread.is_alive():
                break
            if board.failure is not None:
                say(f"the run has failed, and waits no longer for {thread.name}: {board.who()}")
                return
            say(f"every op is done, but {thread.name} does not end; the run waits for it")
            deadline_s = time.perf_counter() + quiet_s


def say(words: str) -> None:
    """Something a person should know at once, while nothing is known to be wrong."""
    print(words, file=sys.stderr, flush=True)
