"""Copy-on-write snapshots: training goes on while the state between two steps is written, block by block.

A snapshot begins when the last change by a step is done. Before an update changes a block it asks here: a block that is written may
change; another is copied first, as far as there is memory for copies, or the update waits until it is written.
torch.distributed.checkpoint's asynchronous save would first stage a second copy of all state, which host memory has no room for.

Blocks that are not copied are written before those that are, as an update may be waiting for one. Where there is memory for copies
they are written in the reverse order of updates, so that updates and writing meet only once.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.host_state import Copy, HostState
from penstock.runtime.host.updates import CHANGES
from penstock.runtime.host.workers import Workers
from penstock.runtime.plan import Plan


class GivenUp(Exception):
    """The snapshot is not wanted any more."""


class Snapshot:
    """The state after `step` steps, until it is written."""

    def __init__(self, step: int, n_updates: int, order: tuple[int, ...]) -> None:
        self.step, self.n_updates = step, n_updates
        self.unwritten = set(order)
        self.in_state = list(order)  # of these: neither being written nor copied yet
        self.copies: dict[int, Copy] = {}


class Snapshots:
    """One snapshot at a time, between the host's lane, which changes the state, and the thread that writes it.

    A `runtime.host.host_state.Gate`: the methods of that name are called on the lane.
    """

    def __init__(self, state: HostState, is_due: Callable[[int], bool], copy_bytes: int, say: Callable[[str], None]) -> None:
        """`is_due(step)`: whether the state after that step is written in the background; `copy_bytes`: memory for copies."""
        self._state, self._is_due, self._say = state, is_due, say
        self._free_bytes = copy_bytes
        self._order = order_of_updates(state.plan)
        self._now: Snapshot | None = None
        self._next: int | None = None  # the step of a snapshot that waits for the one before to be written
        self._last: int | None = None  # the step that was asked for last
        self.is_over = False  # no more snapshots, and no need to go on writing
        self.changed = threading.Condition()  # of all of this, and of what its saver shares with the trainer's thread
        self.n_begun_late = self.n_copied = self.n_waited_for = 0  # snapshots; blocks; blocks

    # -- on the host's lane -----------------------------------------------------------------------------------------

    def step_is_done(self, step: int) -> None:
        """As `Gate.step_is_done`."""
        if self._is_due(step + 1):
            self.ask_for(step + 1)

    def before_change(self, block: int, workers: Workers[Scratch]) -> None:
        """As `Gate.before_change`."""
        with self.changed:
            self._wait_for_next()
            if self._now is None or block not in self._now.unwritten or block in self._now.copies:
                return
            snapshot, n_bytes = self._now, self._state.n_bytes(block)
            if block not in snapshot.in_state or n_bytes > self._free_bytes:
                self._wait_until_written(snapshot, block)
                return
            snapshot.in_state.remove(block)
            self._free_bytes -= n_bytes
        copy = None
        try:
            with suppress(MemoryError):  # less is free than when the run began: from now on updates wait
                copy = self._state.copied(block, workers)
        finally:
            with self.changed:
                if copy is None:
                    snapshot.in_state.insert(0, block)
                    self._free_bytes = 0
                else:
                    snapshot.copies[block] = copy
                    self.n_copied += 1
                self.changed.notify_all()
        if copy is None:
            with self.changed:
                self._wait_until_written(snapshot, block)

    def _wait_for_next(self) -> None:
        if self._next is not None:
            self.n_begun_late += 1
            if self.n_begun_late == 1 and self._now is not None:
                self._say(
                    f"training waits: the state after step {self._next} is to be saved while that after step {self._now.step} is "
                    "still being written; save less often, or to a faster disk"
                )
            self.changed.wait_for(lambda: self._next is None)

    def _wait_until_written(self, snapshot: Snapshot, block: int) -> None:
        self.n_waited_for += 1
        self.changed.wait_for(lambda: self._now is not snapshot or block not in snapshot.unwritten)

    # -- on the thread that writes ----------------------------------------------------------------------------------

    def ask_for(self, step: int) -> None:
        """A snapshot of the state as it is now: at once, or when the one before is written. Nothing changes until then."""
        with self.changed:
            if self.is_over or step == self._last:
                return
            self._last = step
            if self._now is None:
                self._begin(step)
            else:
                self._next = step

    def _begin(self, step: int) -> None:
        self._now = Snapshot(step, self._state.n_updates, self._order)
        self.changed.notify_all()

    def begun(self) -> Snapshot | None:
        """Wait for the next snapshot; None when there will be no more."""
        with self.changed:
            self.changed.wait_for(lambda: self._now is not None or self.is_over)
            return self._now

    def next_block(self, snapshot: Snapshot) -> tuple[int, Copy | None] | None:
        """The block to write now, and its copy where it has changed since; None when all are written, and the next may begin."""
        with self.changed:
            while True:
                self.look()
                if in_state := snapshot.in_state:
                    return in_state.pop(0 if self._state.n_bytes(in_state[0]) > self._free_bytes else -1), None
                for block, copy in snapshot.copies.items():
                    return block, copy
                if not snapshot.unwritten:
                    self._now = None
                    if self._next is not None:
                        self._begin(self._next)
                        self._next = None
                    self.changed.notify_all()
                    return None
                self.changed.wait()

    def look(self) -> None:
        """GivenUp if there is no need to go on writing."""
        if self.is_over:
            raise GivenUp

    def is_written(self, snapshot: Snapshot, block: int) -> None:
        """From now on the block may change."""
        with self.changed:
            snapshot.unwritten.remove(block)
            if snapshot.copies.pop(block, None) is not None:
                self._free_bytes += self._state.n_bytes(block)
            self.changed.notify_all()

    def end(self) -> None:
        """No more snapshots; whatever waits for one goes on."""
        with self.changed:
            self.is_over, self._now, self._next = True, None, None
            self.changed.notify_all()


def order_of_updates(plan: Plan) -> tuple[int, ...]:
    """All blocks, in the order in which a step of the plan changes them, and then those that it does not change."""
    changed = dict.fromkeys(op.block for op in plan.ops if op.kind in CHANGES)
    return tuple(changed | dict.fromkeys(range(len(plan.workload.blocks))))
