"""How does training go on while its state is saved, copy-on-write?

A copy-on-write snapshot is the state between two steps. It begins when the last change by the first of them is done, and is
written block by block while training goes on. An update first asks here: a block that is written may change; another is copied
aside, as far as memory for that goes, or the update waits until it is written. So no second copy of the state is needed, and what
is written is the state between two steps to the last bit.

A block that nobody copied is written before one that was: an update may be waiting for it, or will be soon. Where there is memory
for copies, blocks are written from the other end of the order, so that updates and writing meet only once.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from runtime.host.chunks import Scratch
from runtime.host.host_state import Copy, HostState
from runtime.host.updates import CHANGES
from runtime.host.workers import Workers
from runtime.plan import Plan


class _Place(Enum):
    THERE = auto()  # only in the arenas
    IN_HAND = auto()  # being written from there
    COPYING = auto()
    COPIED = auto()
    WRITTEN = auto()


class GivenUp(Exception):
    """The snapshot is wanted no more."""


class Snapshot:
    """The state after `step` steps, for as long as it takes to write it."""

    def __init__(self, step: int, n_updates: int, order: tuple[int, ...]) -> None:
        self.step, self.n_updates = step, n_updates
        self.places = dict.fromkeys(order, _Place.THERE)
        self.copies: dict[int, Copy] = {}


class Snapshots:
    """Between the host's lane, which changes the state, and whoever writes it: one snapshot at a time."""

    def __init__(
        self,
        state: HostState,
        is_due: Callable[[int], bool],
        copy_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        """`is_due(step)` says whether the state after that step is written while training goes on."""
        self._state, self._is_due, self._say = state, is_due, say
        self._room_bytes = copy_bytes
        self._order = order_of_updates(state.plan)
        self._now: Snapshot | None = None
        self._next: int | None = None  # the step of a snapshot that could not begin, as the one before is still being written
        self._last: int | None = None  # the step of the last that was asked for
        self._is_over = False
        self._changed = threading.Condition()
        self.n_begun_late = self.n_copied = self.n_waited_for = 0  # snapshots; blocks; blocks

    # -- the host's lane --------------------------------------------------------------------------------------------

    def step_is_done(self, step: int) -> None:
        """The last change by a step, counted from 0, has been made."""
        if self._is_due(step + 1):
            self.ask_for(step + 1)

    def before_change(self, block: int, workers: Workers[Scratch]) -> None:
        """Return when the block's state may change; until then `workers` may copy it."""
        with self._changed:
            self._let_the_next_begin()
            if self._now is None or self._now.places[block] in (_Place.COPIED, _Place.WRITTEN):
                return
            snapshot, n_bytes = self._now, self._state.n_bytes(block)
            if snapshot.places[block] is not _Place.THERE or n_bytes > self._room_bytes:
                self._wait_until_written(snapshot, block)
                return
            snapshot.places[block] = _Place.COPYING
            self._room_bytes -= n_bytes
        copy = None
        try:
            with suppress(MemoryError):  # there is less than there was when the run began: from now on, updates wait
                copy = self._state.copied(block, workers)
        finally:
            with self._changed:
                if copy is None:
                    snapshot.places[block], self._room_bytes = _Place.THERE, 0
                else:
                    snapshot.places[block], snapshot.copies[block] = _Place.COPIED, copy
                    self.n_copied += 1
                    if self._now is not snapshot:
                        self._drop_copies(snapshot)
                self._changed.notify_all()
        if copy is None:
            with self._changed:
                self._wait_until_written(snapshot, block)

    def _let_the_next_begin(self) -> None:
        if self._next is not None:
            self.n_begun_late += 1
            if self.n_begun_late == 1 and self._now is not None:
                self._say(
                    f"training waits: the state after step {self._next} is to be saved while that after step {self._now.step} is "
                    "still being written; save less often, or to a faster disk"
                )
            while self._next is not None:
                self._changed.wait()

    def _wait_until_written(self, snapshot: Snapshot, block: int) -> None:
        self.n_waited_for += 1
        while self._now is snapshot and snapshot.places[block] is not _Place.WRITTEN:
            self._changed.wait()

    # -- whoever writes ---------------------------------------------------------------------------------------------

    def ask_for(self, step: int) -> None:
        """A snapshot of the state as it is now: at once, or when the one before is written. Nothing changes until then."""
        with self._changed:
            if self._is_over or step == self._last:
                return
            self._last = step
            if self._now is None:
                self._begin(step)
            else:
                self._next = step

    def _begin(self, step: int) -> None:
        self._now = Snapshot(step, self._state.n_updates, self._order)
        self._changed.notify_all()

    def begun(self) -> Snapshot | None:
        """Return the next snapshot when it has begun; None when there will be no more."""
        with self._changed:
            while self._now is None and not self._is_over:
                self._changed.wait()
            return self._now

    def next_block(self, snapshot: Snapshot) -> tuple[int, Copy | None] | None:
        """Which block to write now, and its copy where it has changed since; None when all are written."""
        with self._changed:
            while True:
                if self._is_over:
                    raise GivenUp
                there = [block for block, place in snapshot.places.items() if place is _Place.THERE]
                if there:
                    block = self._next_of(there)
                    snapshot.places[block] = _Place.IN_HAND
                    return block, None
                for block, copy in snapshot.copies.items():
                    return block, copy
                if all(place is _Place.WRITTEN for place in snapshot.places.values()):
                    self._let_go(snapshot)
                    return None
                self._changed.wait()

    def _next_of(self, there: list[int]) -> int:
        """The one that is changed first, if it cannot be copied; else the one that is changed last."""
        return there[0] if self._state.n_bytes(there[0]) > self._room_bytes else there[-1]

    def look(self) -> None:
        """GivenUp if there is no need to go on writing."""
        if self._is_over:
            raise GivenUp

    def is_written(self, snapshot: Snapshot, block: int) -> None:
        """From now on the block may change."""
        with self._changed:
            snapshot.places[block] = _Place.WRITTEN
            if snapshot.copies.pop(block, None) is not None:
                self._room_bytes += self._state.n_bytes(block)
            self._changed.notify_all()

    def drop(self, snapshot: Snapshot) -> None:
        """It is written no further. The state after its step may be asked for again."""
        with self._changed:
            self._drop_copies(snapshot)
            if self._last == snapshot.step:
                self._last = None
            self._let_go(snapshot)

    def _drop_copies(self, snapshot: Snapshot) -> None:
        self._room_bytes += sum(self._state.n_bytes(block) for block in snapshot.copies)
        snapshot.copies.clear()

    def _let_go(self, snapshot: Snapshot) -> None:
        """What is left to do for the snapshot needs the state no more: the next may begin."""
        if self._now is snapshot:
            self._now = None
            if self._next is not None:
                self._begin(self._next)
                self._next = None
            self._changed.notify_all()

    def end(self) -> None:
        """No more snapshots; whatever waits for one goes on."""
        with self._changed:
            self._is_over, self._now, self._next = True, None, None
            self._changed.notify_all()


def order_of_updates(plan: Plan) -> tuple[int, ...]:
    """All blocks, in the order in which a step of the plan changes them."""
    return tuple(op.block for op in plan.ops if op.kind in CHANGES)
