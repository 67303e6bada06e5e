"""Staging of tokens for a device that is still at work on the step before.

There are two buffers of pinned memory: the host fills one while the device may still copy from the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.batch import Batch, positions_of
from runtime.plan import Semantics

from .streams import Event, Stream, Streams


@dataclass(slots=True)
class _Buffer:
    """Pinned memory for one step's tokens."""

    tokens: torch.Tensor  # input_ids, targets and positions: (3, B, T)
    read: Event  # reached when the device has read it
    step: int | None = None  # whose tokens it holds
    n_supervised: int = 0
    document_tokens: tuple[tuple[int, ...], ...] | None = None


class Staging:
    """The tokens of the steps that are on their way."""

    def __init__(self, semantics: Semantics, batches: Callable[[int], Batch], streams: Streams, stream: Stream) -> None:
        """`stream` is the one that computes: it copies a step's tokens before it needs them, so they wait for nothing."""
        shape = (3, semantics.batch_size, semantics.seq_len)
        self._batches, self._streams, self._stream = batches, streams, stream
        self._buffers = [_Buffer(streams.pinned(shape, torch.int64), streams.event()) for _ in range(2)]
        self._on_device = torch.zeros(shape, dtype=torch.int64, device=streams.device)

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
        input_ids, targets, positions = buffer.tokens
        input_ids.copy_(batch.input_ids)
        targets.copy_(batch.targets)
        if batch.document_tokens is not None:
            positions.copy_(positions_of(batch.document_tokens))
        buffer.step, buffer.n_supervised, buffer.document_tokens = step, batch.n_supervised, batch.document_tokens

    def upload(self, step: int) -> Batch:
        """The step's tokens on the device, once the stream has come so far. Part of the work of one of the step's ops."""
        buffer = self._buffers[step % 2]
        assert buffer.step == step, f"the tokens of step {step} are not there"
        self._on_device.copy_(buffer.tokens, non_blocking=True)
        input_ids, targets, positions = self._on_device
        packed = buffer.document_tokens is not None
        return Batch(input_ids, targets, buffer.document_tokens, buffer.n_supervised, positions if packed else None)

    def issued(self, step: int) -> None:
        """An op that may have uploaded the step's tokens has been issued."""
        self._streams.record(self._buffers[step % 2].read, self._stream)
