"""Which tokens does a micro-batch have?"""

# B sequences, T tokens
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.batch import Batch, UploadedBatch
from runtime.layers.documents import PackedDocuments, positions_of
from runtime.plan import Semantics


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch's tokens on the device."""

    input_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    documents: PackedDocuments | None


class StepTokens:
    """The tokens of the step at work, which are asked for once."""

    def __init__(self, semantics: Semantics, batches: Callable[[int], Batch]) -> None:
        """`batches` gives a step's tokens on the device."""
        self._micro_batch, self._batches = semantics.micro_batch, batches
        self._batch: tuple[int, Batch] | None = None

    def forget(self) -> None:
        self._batch = None

    def begin(self, step: int) -> Batch | None:
        """The batch of a step that begins now; None if it has begun."""
        if self._batch is not None and self._batch[0] == step:
            return None
        self._batch = (step, self._batches(step))
        return self._batch[1]

    def of(self, m: int) -> MicroBatch:
        """The tokens of a micro-batch of the step that has begun."""
        assert self._batch is not None
        batch = self._batch[1]
        rows = slice(m * self._micro_batch, (m + 1) * self._micro_batch)
        return MicroBatch(batch.input_ids[rows], batch.targets[rows], _documents(batch, rows))


def _documents(batch: Batch, rows: slice) -> PackedDocuments | None:
    if batch.document_tokens is None:
        return None
    n_tokens = batch.document_tokens[rows]
    positions_BT = batch.positions[rows] if isinstance(batch, UploadedBatch) else positions_of(n_tokens)
    return PackedDocuments(n_tokens, positions_BT)
