"""Copy-on-write snapshots: the state between two steps is written block by block during training.

A snapshot begins after the last change by a step. An update calls `before_change` before it changes a block. A written block may
change. An unwritten block is copied first if memory for copies is free; else the update waits until the block is written.
torch.distributed.checkpoint's asynchronous save would first stage a second copy of all state, which does not fit in host memory.

Blocks without a copy are written before copies, because an update may be waiting for one. If memory for copies is free, they are
written in the reverse order of updates, so that updates and writing meet only once.
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
    """Raised when a snapshot is no longer needed."""


class Snapshot:
    """State after `step` steps, until it is written."""

    def __init__(self, step: int, n_updates: int, order: tuple[int, ...]) -> None:
        self.step, self.n_updates = step, n_updates
        self.unwritten = set(order)
        self.in_state = list(order)  # unwritten blocks that are neither being written nor copied
        self.copies: dict[int, Copy] = {}


class Snapshots:
    """One snapshot at a time, shared by the host's lane, which changes the state, and the thread that writes it.

    Implements `runtime.host.host_state.Gate`; its methods are called on the lane.
    """

    def __init__(self, state: HostState, is_due: Callable[[int], bool], copy_bytes: int, say: Callable[[str], None]) -> None:
        """`is_due(step)`: True if the state after that step is written in the background; `copy_bytes`: memory for copies."""
        self._state, self._is_due, self._say = state, is_due, say
        self._free_bytes = copy_bytes
        self._order = order_of_updates(state.plan)
        self._now: Snapshot | None = None
        self._next: int | None = None  # step of a snapshot that waits until the current one is written
        self._last: int | None = None  # last requested step
        self.is_over = False  # no more snapshots; writing stops
        self.changed = threading.Condition()  # guards this object, and the saver's state that the trainer's thread shares
        self.n_begun_late = self.n_copied = self.n_waited_for = 0  # counts of snapshots, blocks, blocks

    # -- on the host's lane -----------------------------------------------------------------------------------------

    def step_is_done(self, step: int) -> None:
        """See `Gate.step_is_done`."""
        if self._is_due(step + 1):
            self.ask_for(step + 1)

    def before_change(self, block: int, workers: Workers[Scratch]) -> None:
        """See `Gate.before_change`."""
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
            with suppress(MemoryError):  # less memory is free than at the start: later updates wait
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

    # -- on the writer thread ---------------------------------------------------------------------------------------

    def ask_for(self, step: int) -> None:
        """Begin a snapshot of the current state, now or after the previous one is written. The state does not change before."""
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
        """Wait for the next snapshot. Return None after the last."""
        with self.changed:
            self.changed.wait_for(lambda: self._now is not None or self.is_over)
            return self._now

    def next_block(self, snapshot: Snapshot) -> tuple[int, Copy | None] | None:
        """Return the next block to write, and its copy if it has changed. After the last, begin the next snapshot; return None."""
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
        """Raise GivenUp if writing is no longer needed."""
        if self.is_over:
            raise GivenUp

    def is_written(self, snapshot: Snapshot, block: int) -> None:
        """Permit changes of a written block."""
        with self.changed:
            snapshot.unwritten.remove(block)
            if snapshot.copies.pop(block, None) is not None:
                self._free_bytes += self._state.n_bytes(block)
            self.changed.notify_all()

    def end(self) -> None:
        """End all snapshots and release all waiters."""
        with self.changed:
            self.is_over, self._now, self._next = True, None, None
            self.changed.notify_all()


def order_of_updates(plan: Plan) -> tuple[int, ...]:
    """Return the blocks in the order in which a step of the plan changes them, then the unchanged ones."""
    changed = dict.fromkeys(op.block for op in plan.ops if op.kind in CHANGES)
    return tuple(changed | dict.fromkeys(range(len(plan.workload.blocks))))
