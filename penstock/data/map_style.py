"""How does a map-style data set become batches?

Sequences are made once, from documents in an order that the seed gives, and each epoch has an order of its own. Which sequences
a step sees is a function of its number alone, so resuming needs nothing but that number.

Targets follow the convention of Hugging Face: position t is supervised with token t + 1 of its own sequence, so a
sequence's last position, like padding, is not supervised. Where documents are packed whole, neither is the last of each.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from runtime.batch import UNSUPERVISED, Batch
from runtime.errors import CheckpointError

from .packing import Array, Counts, Documents, Packing, Sequences
from .token_cache import TokenCache

# B sequences of a batch, T positions of a sequence
Segments = list[tuple[int, int, int]]
MANY = 1 / 3  # of the documents: where more are cut, a longer sequence is worth a thought
_PACKED = {
    "joined": "joined and cut, attention sees across",
    "documents": "packed whole, each attends to itself alone",
    "one": "one document each, padded",
}


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What sequences and batches look like."""

    packing: Packing
    seq_len: int
    batch_size: int
    pad_id: int

    def words(self) -> str:
        """What a sequence is."""
        return f"of {self.seq_len:,} tokens, {_PACKED[self.packing]}"


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch before torch sees it: it travels between processes."""

    ids_BT: Array
    targets_BT: Array
    document_tokens: tuple[tuple[int, ...], ...] | None

    def batch(self) -> Batch:
        return Batch(torch.from_numpy(self.ids_BT), torch.from_numpy(self.targets_BT), self.document_tokens)


def empty_rows(shape: BatchShape) -> tuple[Array, Array]:
    size = (shape.batch_size, shape.seq_len)
    return np.full(size, shape.pad_id, dtype=np.int64), np.full(size, UNSUPERVISED, dtype=np.int64)


def fill(ids_T: Array, targets_T: Array, documents: Documents, segments: Segments, joined: bool) -> tuple[int, ...]:
    """Write the segments one after another, with the target of each position but those that have none. Their lengths, and
    that of the padding."""
    at, lengths = 0, list[int]()
    for document, start, stop in segments:
        n = stop - start
        ids_T[at : at + n] = documents.ids(document)[start:stop]
        for first, last in documents.runs(document).clip(start, stop).tolist():
            begin, end = at + max(first - start, int(not joined or at == 0)), at + last - start
            if begin < end:
                targets_T[begin - 1 : end - 1] = ids_T[begin:end]
        at += n
        lengths.append(n)
    return (*lengths, len(ids_T) - at) if at < len(ids_T) else tuple(lengths)


def fingerprint_of(tokens_sha256: str, sequences: Sequences, shape: BatchShape, seed: int | None) -> str:
    """SHA-256 of the tokens and of what is made of them."""
    made = hashlib.sha256()
    for numbers in (sequences.document, sequences.start, sequences.stop, sequences.first):
        made.update(numbers.astype("<i8").tobytes())
    return hashlib.sha256(json.dumps([tokens_sha256, made.hexdigest(), asdict(shape), seed]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class MapStyleData:
    """Sequences of documents in a cache."""

    documents: TokenCache
    sequences: Sequences
    shape: BatchShape
    seed: int | None  # None: in the order of the files, epoch after epoch
    counts: Counts
    about: str  # the data set, in words
    fingerprint: str

    @property
    def n_sequences(self) -> int:
        return len(self.sequences)

    @property
    def n_steps(self) -> int:
        return -(-self.n_sequences // self.shape.batch_size)

    def position(self, step: int) -> dict[str, Any]:
        """The epoch, and the sequence within it, at which step number `step`, counted from 0, begins."""
        epoch, sequence = divmod(step * self.shape.batch_size, self.n_sequences)
        return {"epoch": epoch, "sequence": sequence}

    def resume(self, step: int, position: dict[str, Any]) -> None:
        if position != self.position(step):
            raise CheckpointError(
                f"its data position {str(position)[:80]} is not that of step {step}; resume with the data it began with"
            )

    def rows(self, step: int) -> Rows:
        ids_BT, targets_BT = empty_rows(self.shape)
        lengths = []
        for b in range(self.shape.batch_size):
            epoch, place = divmod(step * self.shape.batch_size + b, self.n_sequences)
            if self.seed is not None:
                place = int(order_of(self.n_sequences, self.seed, epoch)[place])
            lengths.append(self.write(place, ids_BT[b], targets_BT[b]))
        return Rows(ids_BT, targets_BT, tuple(lengths) if self.shape.packing == "documents" else None)

    def write(self, sequence: int, ids_T: Array, targets_T: Array) -> tuple[int, ...]:
        """One sequence, by its number in the set; the tokens of each of its documents, and of the padding."""
        return fill(ids_T, targets_T, self.documents, self.sequences[sequence], self.shape.packing == "joined")

    def batch(self, step: int) -> Batch:
        return self.rows(step).batch()

    def words(self) -> dict[str, str]:
        share = (self.sequences.stop - self.sequences.start).sum() / (self.n_sequences * self.shape.seq_len)
        sequences = f"{self.n_sequences:,} {self.shape.words()}, {share:.0%} full"
        said = {"data": self.about, "rows": in_words(self.counts), "sequences": sequences}
        cut = self.counts.n_cut / self.counts.n_documents
        if cut > MANY:
            end = f"{cut:.0%} of the documents are cut to {self.shape.seq_len:,} tokens, and what follows is not learned"
            said["warning"] = f"{end}; plan with a longer --seq-len, or set data.too_long to split"
        return said

    def close(self) -> None:
        """A mapped file closes with the last view of it."""


@lru_cache(maxsize=2)  # a batch may span two epochs
def order_of(n: int, seed: int, *place: int) -> Array:
    """A seeded order of n things, another for each place: an epoch, or a shuffle buffer of one."""
    # RandomState's stream is frozen across versions of numpy, default_rng's is not; resuming needs the same order.
    order: Array = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, *place]).permutation(n)
    return order


def in_words(counts: Counts) -> str:
    """What became of documents, for the user."""
    became = {
        "conversations taken apart answer by answer": counts.n_apart,
        "with nothing to learn left out": counts.n_unsupervised,
        "too long and left out": counts.n_skipped,
        "cut to a sequence's length": counts.n_cut,
        "split": counts.n_split,
    }
    parts = [f"{n:,} {what}" for what, n in became.items() if n]
    return f"{counts.n_documents:,} documents{''.join(f', {part}' for part in parts)}"
