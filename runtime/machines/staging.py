"""How do a step's tokens reach a device that is still at work on the step before?

Through two buffers of pinned memory in turn: the host fills one while the device may still copy from the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.batch import Batch, UploadedBatch
from runtime.layers.documents import positions_of
from runtime.plan import Semantics

from .streams import Event, Stream, Streams


@dataclass(slots=True)
class _Buffer:
    """Pinned memory for one step's tokens."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    read: Event  # reached when the device has read it
    step: int | None = None  # whose tokens it holds
    n_supervised: int = 0
    document_tokens: tuple[tuple[int, ...], ...] | None = None


class Staging:
    """The tokens of the steps that are on their way."""

    def __init__(self, semantics: Semantics, batches: Callable[[int], Batch], streams: Streams, stream: Stream) -> None:
        """`stream` is the one that computes: it copies a step's tokens before it needs them, so they wait for nothing."""
        shape, device = (semantics.batch_size, semantics.seq_len), streams.device
        self._batches, self._streams, self._stream = batches, streams, stream

        def pinned() -> torch.Tensor:
            return streams.pinned(shape, torch.int64)

        self._buffers = [_Buffer(pinned(), pinned(), pinned(), streams.event()) for _ in range(2)]
        self._input_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._targets = torch.zeros(shape, dtype=torch.int64, device=device)
        self._positions = torch.zeros(shape, dtype=torch.int64, device=device)

    def fill(self, step: int) -> None:
        """Put a step's tokens into pinned memory, before any of its compute is issued.

        Waits for what the device read two steps ago, and as a rule has read long since.
        """
        buffer = self._buffers[step % 2]
        if buffer.step == step:
            return
        if buffer.step is not None:
            self._streams.wait(buffer.read)
        batch = self._batches(step)
        buffer.input_ids.copy_(batch.input_ids)
        buffer.targets.copy_(batch.targets)
        if batch.document_tokens is not None:
            buffer.positions.copy_(positions_of(batch.document_tokens))
        buffer.step, buffer.n_supervised, buffer.document_tokens = step, batch.n_supervised, batch.document_tokens

    def upload(self, step: int) -> Batch:
        """The step's tokens on the device, once the stream has come so far. Part of the work of one of the step's ops."""
        buffer = self._buffers[step % 2]
        assert buffer.step == step, f"the tokens of step {step} are not there"
        self._input_ids.copy_(buffer.input_ids, non_blocking=True)
        self._targets.copy_(buffer.targets, non_blocking=True)
        if buffer.document_tokens is not None:
            self._positions.copy_(buffer.positions, non_blocking=True)
        return UploadedBatch(
            self._input_ids, self._targets, buffer.document_tokens, n_counted=buffer.n_supervised, positions=self._positions
        )

    def issued(self, step: int) -> None:
        """An op that may have uploaded the step's tokens has been issued."""
        self._streams.record(self._buffers[step % 2].read, self._stream)
