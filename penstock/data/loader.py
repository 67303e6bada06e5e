"""Loading: batches by the number of the step, made ahead of it by the workers of a DataLoader where there are any.

Workers are spawned and never forked: the process that trains holds pinned memory and a device, which a fork would copy or lose.
Worker k of n makes every n-th batch. Where the last steps begin is remembered, so that a run can save a step that it has finished
while later ones are made.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runtime.batch import Batch
from runtime.errors import CheckpointError, DataError, PenstockError

from .sampling import MapStyleData, Stream

Position = dict[str, Any]
BATCHES_AHEAD = 2  # of each worker
REMEMBERED_STEPS = 1024


class _Batches(IterableDataset[Any]):
    """The batches of one worker from a step on, and the position after each."""

    def __init__(self, source: MapStyleData | Stream, first_step: int, position: Position) -> None:
        self.source, self.first_step, self.position = source, first_step, position

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        k, n = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for batch, position in self.source.batches(self.first_step + k, n, self.position):
            # As numpy arrays they travel through a pipe; tensors would need shared memory, which containers have little of.
            yield batch.input_ids.numpy(), batch.targets.numpy(), batch.document_tokens, position


def _leave_ctrl_c(_worker: int) -> None:
    """Ctrl-C is handled by the run, which ends its step and may need another batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(slots=True, eq=False)
class Loader:
    """The batches of a data set, made ahead by `n_workers` processes, or in this one where there are none."""

    source: MapStyleData | Stream
    n_workers: int = 0
    _cores: set[int] = field(default_factory=lambda: os.sched_getaffinity(0), repr=False)
    _positions: dict[int, Position] = field(default_factory=dict, repr=False)
    _made: Iterator[Any] | None = field(default=None, repr=False)
    _next: int = 0  # the step that `_made` is about to give

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def n_steps(self) -> int | None:
        return self.source.n_steps

    def batch(self, step: int) -> Batch:
        """What step number `step`, counted from 0, trains on. Loading begins again where that is not the next one."""
        if self._made is None or step != self._next:
            self._made, self._next = self._begun(_Batches(self.source, step, self.position(step))), step
        failure = None
        try:
            input_ids, targets, document_tokens, position = next(self._made)
        except PenstockError as error:
            # torch reports a worker's error with its stack; the message is the last line.
            failure = str(error).rstrip().splitlines()[-1].removeprefix("runtime.errors.DataError: ")
        except RuntimeError as error:
            failure = f"a process that prepares batches ended ({' '.join(str(error).split())[:120]}); resume the run"
        if failure is not None:
            self.close()
            raise DataError(failure)
        self._next += 1
        self._positions[self._next] = position
        self._positions.pop(self._next - REMEMBERED_STEPS, None)
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(targets), document_tokens)

    def _begun(self, batches: _Batches) -> Iterator[Any]:
        if not self.n_workers:
            return iter(batches)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)  # workers have the cores of the run, not those of the lane that asks first
        try:
            loader = DataLoader(
                batches,
                batch_size=None,
                collate_fn=tuple,
                num_workers=self.n_workers,
                prefetch_factor=BATCHES_AHEAD,
                worker_init_fn=_leave_ctrl_c,
                multiprocessing_context="spawn",
            )
            return iter(loader)
        finally:
            os.sched_setaffinity(0, cores)

    def position(self, step: int) -> Position:
        """Where that step begins, as JSON can hold it; CheckpointError for a step of a stream that was not reached."""
        known = self._positions.get(step, self.source.position(step))
        if known is None:
            raise CheckpointError(f"where step {step} of a stream begins shows once the step before it is done; resume at that one")
        return known

    def resume(self, step: int, position: Position) -> None:
        """Go on at that step; CheckpointError for a position that this data does not have."""
        if self.source.position(step) not in (None, position) or position.keys() != (self.source.position(0) or {}).keys():
            problem = f"its data position {str(position)[:80]} is not one of step {step}"
            raise CheckpointError(f"{problem}; resume with the data it began with")
        self._positions, self._made = {step: position}, None

    def words(self) -> dict[str, str]:
        """What was read and how sequences are made of it, by name, a line each; perhaps a `warning`."""
        return self.source.words()

    def close(self) -> None:
        self._made = None  # its workers end
