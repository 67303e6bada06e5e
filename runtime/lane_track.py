"""Lane tracks: progress of each lane of a run, and waits between lanes.

A waiting lane registers with the other one and sleeps until its bell rings; a lane without waiters rings none. An op takes a few
microseconds, or the time to wake a thread (`benchmarks/executor.py`).
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue

from penstock.runtime.plan import Lane, Op, Plan, Repeat, Wait
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT

LOOK_S = 0.5  # polling interval of a sleeping thread, in case of a missed bell


class Bell:
    """Wakes a single sleeping thread."""

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._rung.put(None)

    def sleep(self) -> bool:
        """Sleep until it rings, at most `LOOK_S`; True if it rang."""
        try:
            self._rung.get(timeout=LOOK_S)
        except Empty:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Entry:
    """An op in its lane, with its number in the plan and its waits."""

    index: int
    op: Op
    waits: tuple["Awaited", ...]
    begins: bool  # True for the first op of a step or of a repetition


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """Wait for the op at a position of another lane, `distance` steps ago, or `back` repetitions ago if both ops repeat."""

    track: "Track"
    index: int
    distance: int
    back: int | None  # None: the same for all repetitions

    def position(self, turn: int, repetition: int) -> int:
        """Return the position over all steps; negative if no wait is needed."""
        track = self.track
        if self.back is None:
            return (turn - self.distance) * track.n_in_step + self.index
        step, repetition = divmod(turn * track.times + repetition - self.back, track.times)
        return step * track.n_in_step + self.index + repetition * len(track.repeated)


@dataclass(slots=True, eq=False)
class Track:
    """Progress of a lane, visible to other lanes. Positions count its ops over all steps and repetitions."""

    lane: Lane
    repeat: Repeat | None
    entries: list[Entry] = field(default_factory=list)
    repeated: range = range(0)  # entries that repeat
    n_in_step: int = 0
    n_done: int = 0
    tokens: dict[int, object] = field(default_factory=dict)  # tokens of `Machine.mark`, by position
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # time in ops of each unreported step
    stops_at: float = math.inf  # position at which this lane ends, because a lane has failed
    _bell: Bell = field(default_factory=Bell)  # wakes this lane
    _waiters: dict["Track", int] = field(default_factory=dict)  # waiting lanes and the positions that they wait for
    _wants: tuple["Track", int] | None = None  # awaited lane and position

    @property
    def times(self) -> int:
        return 1 if self.repeat is None else self.repeat.times

    @property
    def n_spans(self) -> int:
        return len(self.entries) + (min(self.times, FIRST_KEPT + LAST_KEPT) - 1) * len(self.repeated)

    def walk(self) -> Iterator[tuple[Entry, int]]:
        """Yield the entries of a step in execution order, with their repetitions."""
        yield from ((entry, 0) for entry in self.entries[: self.repeated.start])
        for repetition in range(self.times if self.repeated else 0):
            yield from ((self.entries[i], repetition) for i in self.repeated)
        yield from ((entry, 0) for entry in self.entries[self.repeated.stop :])

    def op(self, entry: Entry, repetition: int) -> Op:
        return entry.op if self.repeat is None else self.repeat.op(entry.op, repetition)

    def _name_at(self, position: int) -> str:
        return self.op(*next(islice(self.walk(), position % self.n_in_step, None))).name

    def n_repeated(self, position: int) -> int:
        """Return the repetitions, over all steps, that are complete when the ops before this position are done."""
        turn, position_in_step = divmod(position, self.n_in_step)
        return turn * self.times + min(max(position_in_step - self.repeated.start, 0) // max(len(self.repeated), 1), self.times)

    def advance(self, token: object) -> None:
        """Record a completed op and its token, if any; wake the lanes that wait for it."""
        if token is not None:
            self.tokens[self.n_done] = token
        self.n_done += 1
        for waiter in list(self._waiters):  # no pairs: allocating them may run a garbage collection, during which lanes register
            if self.n_done > self._waiters.get(waiter, self.n_done) and self._waiters.pop(waiter, None) is not None:
                waiter._bell.ring()

    def wait(self, entry: Entry, turn: int, repetition: int) -> Iterator[object]:
        """Wait for all dependencies of the op, or until this lane is stopped; yield the machine's tokens."""
        for awaited in entry.waits:
            if (position := awaited.position(turn, repetition)) >= 0:
                track = awaited.track
                if track.n_done <= position:
                    self._sleep_until(track, position)
                if (token := track.tokens.get(position)) is not None:
                    yield token

    def _sleep_until(self, track: "Track", position: int) -> None:
        self._wants = (track, position)
        while True:
            track._waiters[self] = position  # register before checking: an op completed in between would ring no bell
            if track.n_done > position or self.is_stopped:
                break
            self._bell.sleep()  # may return for an earlier ring: check and sleep again
        track._waiters.pop(self, None)
        self._wants = None

    @property
    def is_stopped(self) -> bool:
        return self.n_done >= self.stops_at

    def stop(self, position: int = 0) -> None:
        """End the lane before the op at a position: at once by default."""
        self.stops_at = min(self.stops_at, position)
        self._bell.ring()

    def forget_tokens(self, n_steps: int, n_repetitions: int) -> None:
        """Drop tokens that no lane needs: a lane in step n needs steps n and n - 1; in repetition k: k, k - 1, a step's last."""
        for position in list(self.tokens):
            repeats = 0 <= position % self.n_in_step - self.repeated.start < self.times * len(self.repeated)
            is_over = repeats and self.n_repeated(position) + 1 < n_repetitions
            is_last = (self.n_repeated(position) + 1) % self.times == 0
            if position < (n_steps - 1) * self.n_in_step or (is_over and not is_last):
                del self.tokens[position]

    @property
    def is_stuck(self) -> bool:
        wants = self._wants
        return wants is not None and wants[0].n_done <= wants[1]

    def __str__(self) -> str:
        name, wants = self._name_at(self.n_done), self._wants
        if wants is None:
            return f"{self.lane}: is at {name}"
        track, position = wants
        return f"{self.lane}: {name} waits for {track._name_at(position)}"


def tracks_of(plan: Plan) -> list[Track]:
    """Return a track for each lane with ops; waits hold positions in other lanes."""
    repeat = plan.repeat
    numbers: dict[Lane, list[int]] = defaultdict(list)  # op numbers of each lane
    for index, op in enumerate(plan.ops):
        numbers[op.lane].append(index)
    tracks = {lane: Track(lane, repeat) for lane in numbers}
    for lane, track in tracks.items():
        if repeat is not None:
            track.repeated = range(bisect_left(numbers[lane], repeat.start), bisect_left(numbers[lane], repeat.end))
        track.n_in_step = len(numbers[lane]) + (track.times - 1) * len(track.repeated)

    def awaited(index: int, wait: Wait) -> Awaited:
        lane = plan.ops[wait.op].lane
        track, position = tracks[lane], bisect_left(numbers[lane], wait.op)
        if repeat is not None and index in repeat and wait.op in repeat and not wait.distance:
            return Awaited(track, position, 0, wait.back)
        n_repeated = (track.times - 1) * len(track.repeated) if position >= track.repeated.start else 0  # last repetition or later
        return Awaited(track, position + n_repeated, wait.distance, None)

    for index, op in enumerate(plan.ops):
        track = tracks[op.lane]
        begins = len(track.entries) in (0, track.repeated.start)
        track.entries.append(Entry(index, op, tuple(awaited(index, wait) for wait in op.waits), begins))
    return list(tracks.values())
