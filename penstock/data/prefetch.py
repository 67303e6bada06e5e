"""How are batches made ahead of the step that needs them?

In processes of their own, spawned and never forked: the process that trains holds pinned memory and a device, which a fork
would copy or lose. A thread takes batches from torch's DataLoader into a short queue. That it is a thread matters twice: the
loader's handler for workers that die, which raises wherever the main thread happens to be, is then not installed, and a step
waits for nothing but a batch that is not there yet.
"""

import itertools
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runtime.batch import Batch
from runtime.errors import DataError, PenstockError

from .map_style import MapStyleData, Rows
from .mixed import MixedData
from .streamed import REMEMBERED_STEPS, StreamedData

BATCHES_AHEAD = 2  # of each worker
PATIENCE_S = 0.1  # between looks at whether a batch is still to be expected


@dataclass(frozen=True, slots=True)
class _ReadyBatch:
    """A batch on its way, and where the stream stands after it."""

    step: int
    rows: Rows
    position: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Failed:
    """Why there will be no more batches; one line."""

    message: str


class _Steps(IterableDataset[Any]):
    """What a worker does: with n workers, each makes every n-th batch, and the loader takes them in turn."""

    def __init__(self, data: MapStyleData | MixedData | StreamedData, first_step: int) -> None:
        self.data, self.first_step = data, first_step

    def __iter__(self) -> Iterator[_ReadyBatch | _Failed]:
        info = get_worker_info()
        first, n = (self.first_step + info.id, info.num_workers) if info else (self.first_step, 1)
        for step in itertools.count(first, n):
            try:
                rows = self.data.rows(step)
                position = self.data.position(step + 1) if isinstance(self.data, StreamedData) else None
            except PenstockError as error:
                yield _Failed(str(error))
                return
            yield _ReadyBatch(step, rows, position)


def _as_it_is(value: Any) -> Any:
    """Without a collate function the loader would make tensors, and pass them through shared memory."""
    return value


def _leave_ctrl_c_to_the_run(_worker: int) -> None:
    """A run that is asked to stop finishes its step, and may yet need a batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Stopped(Exception):
    """The queue's reader wants no more."""


@dataclass(slots=True, eq=False)
class _Flow:
    """Batches from a step on, until it is stopped."""

    data: MapStyleData | MixedData | StreamedData
    n_workers: int
    next_step: int
    cores: set[int]  # for the workers
    arrived: queue.Queue[_ReadyBatch | _Failed] = field(init=False)
    stopped: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = queue.Queue(BATCHES_AHEAD)
        self.thread = threading.Thread(target=self._fetch, name="batches", daemon=True)
        self.thread.start()

    def _fetch(self) -> None:
        os.sched_setaffinity(0, self.cores)  # of this thread alone, and of what it starts
        try:
            batches = DataLoader(
                _Steps(self.data, self.next_step),
                batch_size=None,
                num_workers=self.n_workers,
                prefetch_factor=BATCHES_AHEAD,
                collate_fn=_as_it_is,
                worker_init_fn=_leave_ctrl_c_to_the_run,
                multiprocessing_context="spawn",
            )
            for made in batches:
                self._give(made)
        except _Stopped:
            pass
        except Exception as error:
            self._give_last(
                _Failed(f"a process that prepares batches ended ({' '.join(str(error).split())[:120]}); resume the run")
            )

    def _give(self, made: _ReadyBatch | _Failed) -> None:
        while True:
            if self.stopped.is_set():
                raise _Stopped
            try:
                return self.arrived.put(made, timeout=PATIENCE_S)
            except queue.Full:
                continue

    def _give_last(self, failed: _Failed) -> None:
        with suppress(_Stopped):
            self._give(failed)

    def take(self) -> _ReadyBatch:
        made = self.arrived.get()
        if isinstance(made, _Failed):
            self.arrived.put(made)  # whoever asks again hears it again
            raise DataError(made.message)
        assert made.step == self.next_step, "the loader keeps the order of its workers"
        self.next_step += 1
        return made

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


@dataclass(slots=True, eq=False)
class Prefetched:
    """The batches of other data, made ahead in `n_workers` processes; a stream is read by one."""

    data: MapStyleData | MixedData | StreamedData
    n_workers: int
    # A lane that asks for a batch has few cores of its own; workers are to have those that the run was started with.
    cores: set[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    _flow: _Flow | None = field(default=None, repr=False)
    _last: tuple[int, Batch] | None = field(default=None, repr=False)
    _positions: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)
    _one_at_a_time: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    @property
    def n_steps(self) -> int | None:
        return self.data.n_steps

    @property
    def n_sequences(self) -> int | None:
        return self.data.n_sequences

    def batch(self, step: int) -> Batch:
        with self._one_at_a_time:
            if self._last is not None and self._last[0] == step:
                return self._last[1]
            if self._flow is None or self._flow.next_step != step:
                self._begin(step)
            assert self._flow is not None
            made = self._flow.take()
            if made.position is not None:
                self._positions[step + 1] = made.position
                self._positions.pop(step - REMEMBERED_STEPS, None)
            self._last = step, made.rows.batch()
            return self._last[1]

    def _begin(self, step: int) -> None:
        """Start workers at a step: of a stream, at the step that was asked for last if it is not further on."""
        self._stop()
        n_workers = self.n_workers
        if isinstance(self.data, StreamedData):
            n_workers = 1
            known = self._positions.get(step)
            if known is not None:
                self.data.resume(step, known)
            self._positions[step] = self.data.position(step)
        self._flow = _Flow(self.data, n_workers, step, self.cores)

    def position(self, step: int) -> dict[str, Any]:
        with self._one_at_a_time:
            known = self._positions.get(step)
            return self.data.position(step) if known is None else known

    def resume(self, step: int, position: dict[str, Any]) -> None:
        with self._one_at_a_time:
            self._stop()
            self._positions.clear()
            self._last = None
            self.data.resume(step, position)

    def words(self) -> dict[str, str]:
        n_workers = 1 if isinstance(self.data, StreamedData) else self.n_workers
        who = f"{n_workers} other processes" if n_workers > 1 else "another process"
        return self.data.words() | {"prepared": f"ahead by {who}"}

    def _stop(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.stop()

    def close(self) -> None:
        with self._one_at_a_time:
            self._stop()
            self.data.close()
