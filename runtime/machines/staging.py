"""Staging of tokens for a device that is still at work on the step before: they wait in pinned memory."""

from collections.abc import Callable
from dataclasses import replace

from runtime.batch import Batch, positions_of

from .streams import CudaStreams


class Staging:
    """The tokens of the steps that are on their way."""

    def __init__(self, batches: Callable[[int], Batch], streams: CudaStreams) -> None:
        self._batches, self._streams = batches, streams
        self._last_filled: int | None = None  # step
        self._pinned: dict[int, Batch] = {}  # by step, until it is uploaded

    def forget(self) -> None:
        """Drop what a run that failed in the middle of a step has left."""
        self._last_filled, self._pinned = None, {}

    def fill(self, step: int) -> None:
        """Put a step's tokens into pinned memory, before any of its compute is issued."""
        if step == self._last_filled:
            return
        batch = self._batches(step)
        positions_BT = None if batch.document_tokens is None else positions_of(batch.document_tokens)
        batch = replace(batch, n_counted=batch.n_supervised, positions_BT=positions_BT)
        self._last_filled, self._pinned[step] = step, batch.moved(self._streams.pinned)

    def upload(self, step: int) -> Batch:
        """The step's tokens on the device, once the stream has come so far. Part of the work of one of the step's ops."""
        return self._pinned.pop(step).moved(lambda tokens: tokens.to(self._streams.device, non_blocking=True))
