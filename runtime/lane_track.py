"""Lane tracks: how far each lane of a run is, and how one lane waits for another.

A lane counts the ops it has done. A lane that waits for another registers there and sleeps until its bell is rung; a lane that no
other waits for rings none. So an op costs a few microseconds, or a thread's wake-up (`benchmarks/executor.py`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue

from penstock.runtime.plan import Lane, Op, Plan, Repeat, Wait
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT

LOOK_S = 0.5  # how often a thread that sleeps looks for itself, should a bell not be heard


class Bell:
    """Wakes the one thread that sleeps by it."""

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._rung.put(None)

    def sleep(self) -> bool:
        """Sleep until it is rung, or `LOOK_S`; True if it was."""
        try:
            self._rung.get(timeout=LOOK_S)
        except Empty:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Entry:
    """An op in its lane: its number in the plan, and what it waits for."""

    index: int
    op: Op
    waits: tuple["Awaited", ...]
    begins: bool  # a step of its lane, or what repeats of it


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """An op's wait for the op at a position of another lane, `distance` steps ago; or, if both repeat, `back` repetitions ago."""

    track: "Track"
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
class Track:
    """What the others may know of a lane. Positions count its ops over all steps, those that repeat each time."""

    lane: Lane
    repeat: Repeat | None
    entries: list[Entry] = field(default_factory=list)
    repeated: range = range(0)  # which entries repeat
    n_in_step: int = 0
    n_done: int = 0
    tokens: dict[int, object] = field(default_factory=dict)  # by position, where the machine left one
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # in its ops of each step not yet reported
    is_stopped: bool = False  # some lane has failed, and this one is to end
    _bell: Bell = field(default_factory=Bell)  # wakes this lane
    _asked: dict["Track", int] = field(default_factory=dict)  # lanes that sleep until the op at a position is done
    _wants: tuple["Track", int] | None = None  # what this lane sleeps for

    @property
    def times(self) -> int:
        """How many times a step performs what repeats."""
        return 1 if self.repeat is None else self.repeat.times

    @property
    def n_spans(self) -> int:
        return len(self.entries) + (min(self.times, FIRST_KEPT + LAST_KEPT) - 1) * len(self.repeated)

    def walk(self) -> Iterator[tuple[Entry, int]]:
        """The entries of a step as they are performed, each with its repetition."""
        yield from ((entry, 0) for entry in self.entries[: self.repeated.start])
        for repetition in range(self.times if self.repeated else 0):
            yield from ((self.entries[i], repetition) for i in self.repeated)
        yield from ((entry, 0) for entry in self.entries[self.repeated.stop :])

    def op(self, entry: Entry, repetition: int) -> Op:
        return entry.op if self.repeat is None else self.repeat.op(entry.op, repetition)

    def _name_at(self, position: int) -> str:
        return self.op(*next(islice(self.walk(), position % self.n_in_step, None))).name

    def n_repeated(self, position: int) -> int:
        """Repetitions that are over, counted over all steps, when the ops before this position are done."""
        turn, at = divmod(position, self.n_in_step)
        return turn * self.times + min(max(at - self.repeated.start, 0) // max(len(self.repeated), 1), self.times)

    def advance(self, token: object) -> None:
        """An op is done; `token` is what the machine left, if anything. Wake the lanes that slept for it."""
        if token is not None:
            self.tokens[self.n_done] = token
        self.n_done += 1
        for other in list(self._asked):  # no pairs: while a collection that these may begin runs, lanes ask and leave
            if self.n_done > self._asked.get(other, self.n_done) and self._asked.pop(other, None) is not None:
                other._bell.ring()

    def wait(self, entry: Entry, turn: int, repetition: int) -> Iterator[object]:
        """Wait for all that the op waits for, or until this lane is stopped; yield the machine's tokens."""
        for awaited in entry.waits:
            if (position := awaited.position(turn, repetition)) >= 0:
                other = awaited.track
                if other.n_done <= position:
                    self._sleep_until(other, position)
                if (token := other.tokens.get(position)) is not None:
                    yield token

    def _sleep_until(self, other: "Track", position: int) -> None:
        self._wants = (other, position)
        while True:
            other._asked[self] = position  # first ask, then look: else what comes between the two would ring no bell
            if other.n_done > position or self.is_stopped:
                break
            self._bell.sleep()  # perhaps rung for what came before this lane slept: then look and sleep again
        other._asked.pop(self, None)
        self._wants = None

    def stop(self) -> None:
        self.is_stopped = True
        self._bell.ring()

    def forget_tokens(self, n_steps: int, n_repetitions: int) -> None:
        """Drop tokens that no lane needs after these steps and repetitions: a lane in step n needs steps n and n - 1, one in
        repetition k needs k and k - 1, and the last of a step."""
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
        other, position = wants
        return f"{self.lane}: {name} waits for {other._name_at(position)}"


def tracks_of(plan: Plan) -> list[Track]:
    """The lanes that have ops, with waits by position in the other lane."""
    repeat = plan.repeat
    numbers: dict[Lane, list[int]] = defaultdict(list)  # of each lane's ops
    for index, op in enumerate(plan.ops):
        numbers[op.lane].append(index)
    tracks = {lane: Track(lane, repeat) for lane in numbers}
    for lane, track in tracks.items():
        if repeat is not None:
            track.repeated = range(bisect_left(numbers[lane], repeat.start), bisect_left(numbers[lane], repeat.end))
        track.n_in_step = len(numbers[lane]) + (track.times - 1) * len(track.repeated)

    def awaited(index: int, wait: Wait) -> Awaited:
        lane = plan.ops[wait.op].lane
        track, at = tracks[lane], bisect_left(numbers[lane], wait.op)
        if repeat is not None and index in repeat and wait.op in repeat and not wait.distance:
            return Awaited(track, at, 0, wait.back)
        more = (track.times - 1) * len(track.repeated) if at >= track.repeated.start else 0  # the last repetition, or what follows
        return Awaited(track, at + more, wait.distance, None)

    for index, op in enumerate(plan.ops):
        track = tracks[op.lane]
        begins = len(track.entries) in (0, track.repeated.start)
        track.entries.append(Entry(index, op, tuple(awaited(index, wait) for wait in op.waits), begins))
    return list(tracks.values())
