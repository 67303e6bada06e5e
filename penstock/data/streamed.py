"""Streamed data: documents read as they are needed, shuffled within a buffer, and resumed at any step.

`datasets` hands the documents of a shuffle buffer to a map function, which puts them in an order given by the seed, the epoch and
the buffer's place, and packs them. Nothing is carried from one buffer to the next, so the state that the library keeps (where a
buffer begins, how many of its sequences were used) resumes exactly; its own `shuffle` loses what a buffer holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from datasets import Dataset

from runtime.batch import Batch
from runtime.errors import DataError

from .documents import Array, Columns, Documents, Reader
from .map_style import order_of
from .packing import Row, Shape, batch_of, pack, row_of

BEGIN = {"epoch": 0, "stream": None}


@dataclass(frozen=True, slots=True)
class Stream:
    """Batches one after another, of a length that shows only at its end."""

    reader: Reader
    shape: Shape
    batch_size: int
    buffer_documents: int
    seed: int | None  # None: in the order of the files, epoch after epoch
    about: str  # the data set and how it is read, for the user
    fingerprint: str
    n_steps: None = None

    def batches(self, first_step: int, stride: int, position: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Each batch from a position on, and the position after it."""
        rows = self._rows(position["epoch"], position["stream"])
        while True:
            of_batch = [next(rows) for _ in range(self.batch_size)]
            yield batch_of((row for row, _ in of_batch), self.shape.packing == "documents"), of_batch[-1][1]

    def _rows(self, first_epoch: int, state: dict[str, Any] | None) -> Iterator[tuple[Row, dict[str, Any]]]:
        for epoch in count(first_epoch):
            documents = self.reader.stream(self._order(len(self.reader.files.files), epoch))
            options = {"batched": True, "batch_size": self.buffer_documents, "with_indices": True}
            stream = documents.map(partial(self._packed, epoch), remove_columns=list(self.reader.features), **options)
            found = state is not None
            if state is not None:
                stream.load_state_dict(state)
            for example in stream:
                found = True
                yield example["row"], {"epoch": epoch, "stream": stream.state_dict()}
            if not found:
                raise DataError(f"{self.reader.files.path}: no document in it has anything to learn; give other data")
            state = None

    def _packed(self, epoch: int, buffer: Columns, indices: list[int]) -> Columns:
        """The sequences of a shuffle buffer's documents, in an order of their own."""
        documents = Documents(Dataset.from_dict(buffer, self.reader.features), self.reader.files)
        sequences, _ = pack(documents, self._order(len(indices), epoch, indices[0], 0), self.shape)
        order = self._order(len(sequences), epoch, indices[0], 1)
        return {"row": [row_of(documents, sequences[i], self.shape) for i in order.tolist()]}

    def _order(self, n: int, *place: int) -> Array:
        return np.arange(n) if self.seed is None else order_of(n, self.seed, *place)

    def position(self, step: int) -> dict[str, Any] | None:
        """Of the first step; any other's is known once the stream was there."""
        return BEGIN if step == 0 else None

    def words(self) -> dict[str, str]:
        rows = f"read as they are needed, in shuffle buffers of {self.buffer_documents:,} documents"
        return {"data": self.about, "rows": rows, "sequences": f"of {self.shape.seq_len:,} tokens, packing {self.shape.packing}"}
