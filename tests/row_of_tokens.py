"""Training data from an array of tokens."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.data.sampling import order_of
from penstock.runtime.batch import UNSUPERVISED, Batch


@dataclass(frozen=True)
class RowOfTokens:
    """Tokens cut into sequences with next-token targets; reference implementation of joined text."""

    ids: np.ndarray = field(repr=False)
    seq_len: int
    batch_size: int
    pad_id: int
    shuffle_seed: int | None = None

    @property
    def n_sequences(self) -> int:
        n, rest = divmod(len(self.ids), self.seq_len)
        return n + (rest > 1)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.ids.tobytes() + f"{self.seq_len} {self.batch_size} {self.shuffle_seed}".encode()).hexdigest()

    def position(self, step: int) -> dict[str, Any]:
        epoch, sequence = divmod(step * self.batch_size, self.n_sequences)
        return {"epoch": epoch, "sequence": sequence}

    def resume(self, step: int, position: dict[str, Any]) -> bool:
        return position == self.position(step)

    def batch(self, step: int) -> Batch:
        ids_BT = np.full((self.batch_size, self.seq_len), self.pad_id, dtype=np.int64)
        targets_BT = np.full((self.batch_size, self.seq_len), UNSUPERVISED, dtype=np.int64)
        for b in range(self.batch_size):
            epoch, place = divmod(step * self.batch_size + b, self.n_sequences)
            if self.shuffle_seed is not None:
                place = int(order_of(self.n_sequences, self.shuffle_seed, epoch)[place])
            ids_T = self.ids[place * self.seq_len : (place + 1) * self.seq_len]
            ids_BT[b, : len(ids_T)] = ids_T
            targets_BT[b, : len(ids_T) - 1] = ids_T[1:]
        return Batch(torch.from_numpy(ids_BT), torch.from_numpy(targets_BT))
