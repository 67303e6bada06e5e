"""How is a plan performed?

Each lane is a thread that walks its ops in plan order, step after step: wait, perform, signal. Nothing joins the lanes between
steps; the plan's waits are all there is.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import PenstockError
from .machine import Machine
from .plan import Lane, Op, Plan
from .timeline import Span, Timeline

STALL_S = 600.0  # an op that takes longer than this without any lane moving is taken for a hang
KEEP_STEPS = 64  # steps whose spans are remembered; a long run must not grow
_LOOK_S = 0.5  # how often a waiting lane looks whether another has failed, should a signal be lost


class StallError(RuntimeError):
    """Every lane waits: the message says who waits for whom."""


class OpError(RuntimeError):
    """An op failed: the message names it; the cause is chained."""


class _Stopped(Exception):
    """Another lane failed; this one ends quietly."""


@dataclass(slots=True)
class _Board:
    """What every lane may know of the others: how many ops each has done, and whether one has failed."""

    done: dict[Lane, int] = field(default_factory=dict)
    tokens: dict[Lane, dict[int, object]] = field(default_factory=dict)  # by position in the lane, where a lane waits for it
    waiting: dict[Lane, "_Want"] = field(default_factory=dict)
    moved: dict[Lane, threading.Condition] = field(default_factory=dict)
    failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for condition in self.moved.values():
            with condition:
                condition.notify_all()


@dataclass(frozen=True, slots=True)
class _Want:
    """What a lane waits for: a position in another lane, counted over all steps; and that in words."""

    lane: Lane
    position: int
    words: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """An op in its lane: its number in the plan, and for each wait the lane, the position there, and the step distance."""

    index: int
    op: Op
    waits: tuple[tuple[Lane, int, int], ...]


def execute(
    plan: Plan,
    machine: Machine,
    n_steps: int,
    first_step: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    stall_s: float = STALL_S,
    keep_steps: int = KEEP_STEPS,
) -> Timeline:
    """Perform `n_steps` steps and return when each op of the last `keep_steps` ran, in seconds since the start.

    `on_step(step, seconds)` is called in the caller's thread when a step's last op is done. The first failure of any lane stops
    them all and is raised here: errors of the user as they are, others as OpError naming the op. StallError when all wait.
    """
    entries = _lanes(plan)
    board = _Board(
        done=dict.fromkeys(entries, 0),
        tokens={lane: {} for lane in entries},
        moved={lane: threading.Condition() for lane in entries},
    )
    spans: dict[Lane, deque[Span]] = {lane: deque(maxlen=keep_steps * len(mine)) for lane, mine in entries.items()}
    start_s = time.perf_counter()
    threads: list[threading.Thread] = []
    try:
        for lane in sorted(entries, key=lambda lane: lane is Lane.GPU):  # compute last: its thread settings are to stay
            ready = threading.Event()
            worker = _Worker(lane, entries, machine, board, spans[lane], range(first_step, first_step + n_steps), start_s, ready)
            threads.append(threading.Thread(target=worker.run, name=f"lane-{lane}", daemon=True))
            threads[-1].start()
            ready.wait()
        _watch(entries, board, threads, first_step, n_steps, start_s, on_step, stall_s)
    except BaseException as error:
        board.fail(error)
        raise
    finally:
        for thread in threads:
            if thread.is_alive():  # not so the one whose start a signal interrupted: it sees the failure and ends by itself
                thread.join(timeout=stall_s)
    if board.failure is not None:
        raise board.failure
    ordered = sorted((span for lane in entries for span in spans[lane]), key=lambda s: (s.step, s.op))
    return Timeline(tuple(machine.measured(ordered)))


def _lanes(plan: Plan) -> dict[Lane, list[_Entry]]:
    """The ops of each lane that has any, with waits by position in the other lane."""
    position: dict[int, int] = {}
    counts: dict[Lane, int] = {}
    for index, op in enumerate(plan.ops):
        position[index] = counts.get(op.lane, 0)
        counts[op.lane] = position[index] + 1
    entries: dict[Lane, list[_Entry]] = {lane: [] for lane in counts}
    for index, op in enumerate(plan.ops):
        waits = tuple((plan.ops[w.op].lane, position[w.op], w.distance) for w in op.waits)
        entries[op.lane].append(_Entry(index, op, waits))
    return entries


@dataclass(slots=True)
class _Worker:
    """One lane's thread."""

    lane: Lane
    entries: dict[Lane, list[_Entry]]
    machine: Machine
    board: _Board
    spans: deque[Span]
    steps: range
    start_s: float
    ready: threading.Event

    def run(self) -> None:
        mine, condition = self.entries[self.lane], self.board.moved[self.lane]
        entry: _Entry | None = None
        step = self.steps.start
        try:
            with self.machine.lane(self.lane):
                self.ready.set()
                for turn, step in enumerate(self.steps):
                    self._forget_tokens()
                    for entry in mine:
                        if self.board.failure is not None:
                            raise _Stopped
                        for lane, at, distance in entry.waits:
                            if turn >= distance:
                                self._wait_for(entry, lane, (turn - distance) * len(self.entries[lane]) + at)
                        began_s = time.perf_counter()
                        self.machine.perform(entry.index, entry.op, step)
                        ended_s = time.perf_counter()
                        self.spans.append(Span(entry.index, step, began_s - self.start_s, ended_s - self.start_s))
                        token = self.machine.mark(entry.op)
                        with condition:
                            if token is not None:
                                self.board.tokens[self.lane][self.board.done[self.lane]] = token
                            self.board.done[self.lane] += 1
                            condition.notify_all()
        except _Stopped:
            pass
        except PenstockError as error:
            self.board.fail(error)
        except BaseException as error:
            name = entry.op.name if entry is not None else "its set-up"
            failure = OpError(f"step {step + 1}, lane {self.lane}: {name} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.board.fail(failure)
        finally:
            self.ready.set()

    def _forget_tokens(self) -> None:
        """Drop those that no lane can ask for any more: a lane in step n asks for steps n and n - 1."""
        tokens = self.board.tokens[self.lane]
        if tokens:
            n_steps_done = min(self.board.done[lane] // len(mine) for lane, mine in self.entries.items())
            for position in [p for p in tokens if p < (n_steps_done - 1) * len(self.entries[self.lane])]:
                del tokens[position]

    def _wait_for(self, entry: _Entry, lane: Lane, position: int) -> None:
        """Until the op at `position` of the lane, counted over all steps, is done."""
        condition = self.board.moved[lane]
        if self.board.done[lane] <= position:
            other = self.entries[lane][position % len(self.entries[lane])]
            self.board.waiting[self.lane] = _Want(lane, position, f"{entry.op.name} waits for {other.op.name}")
            with condition:
                while self.board.done[lane] <= position and self.board.failure is None:
                    condition.wait(_LOOK_S)
            self.board.waiting.pop(self.lane, None)
        if self.board.failure is not None:
            raise _Stopped
        token = self.board.tokens[lane].get(position)
        if token is not None:
            self.machine.follow(self.lane, token)


def _watch(
    entries: dict[Lane, list[_Entry]],
    board: _Board,
    threads: list[threading.Thread],
    first_step: int,
    n_steps: int,
    start_s: float,
    on_step: Callable[[int, float], None] | None,
    stall_s: float,
) -> None:
    """Report finished steps, and see a stall: every lane waits for what is not done, or nothing moves for `stall_s`."""
    reported, last_done, n_idle_looks, n_stuck_looks = 0, -1, 0, 0
    while True:
        seen = dict(board.done)
        while reported < n_steps and all(seen[lane] >= (reported + 1) * len(entries[lane]) for lane in entries):
            if on_step is not None:
                on_step(first_step + reported, time.perf_counter() - start_s)
            reported += 1
        if reported == n_steps or board.failure is not None:
            return
        slowest = min(entries, key=lambda lane: seen[lane] / len(entries[lane]))
        condition = board.moved[slowest]
        with condition:
            if board.done[slowest] == seen[slowest] and board.failure is None:  # else its signal has been already
                condition.wait(_LOOK_S if any(t.is_alive() for t in threads) else 0.001)
        total = sum(board.done.values())
        if total != last_done:
            last_done, n_idle_looks, n_stuck_looks = total, 0, 0
            continue
        n_idle_looks += 1  # counted in looks: a process that was suspended for an hour has not stalled for one
        unfinished = [lane for lane in entries if board.done[lane] < n_steps * len(entries[lane])]
        wants = [board.waiting.get(lane) for lane in unfinished]
        stuck = unfinished and all(want is not None and board.done[want.lane] <= want.position for want in wants)
        n_stuck_looks = n_stuck_looks + 1 if stuck else 0
        if n_stuck_looks >= 2 or n_idle_looks * _LOOK_S > stall_s:
            words = [want.words if want is not None else "is performing an op" for want in wants]
            who = "; ".join(f"{lane}: {word}" for lane, word in zip(unfinished, words, strict=True))
            raise StallError(f"no lane moves any more: {who}")
