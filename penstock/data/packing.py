"""How do documents share a sequence?

Three ways. `joined`: all documents in one row, which is cut into sequences. `documents`: whole documents, as many as fit.
`one`: a sequence each. What a sequence is made of is a list of segments (document, first token, one past the last), and nothing
here reads a token but to see whether anything is to be learned.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import DataError

OPEN_SEQUENCES = 64  # among which a document looks for room; beyond, the fullest is closed
Array = npt.NDArray[np.int64]
Packing = Literal["joined", "documents", "one"]
TooLong = Literal["cut", "split", "skip", "refuse"]


class Documents(Protocol):
    """Documents as tokens."""

    @property
    def lengths(self) -> Array:
        """Tokens of each."""
        ...

    @property
    def n_learned(self) -> Array:
        """Tokens of each that are to be learned."""
        ...

    @property
    def n_targets(self) -> Array:
        """The same without a first token: nothing of the document comes before that."""
        ...

    @property
    def n_apart(self) -> int:
        """Conversations of which each answer is a document."""
        ...

    def ids(self, document: int) -> npt.NDArray[np.unsignedinteger]: ...

    def runs(self, document: int) -> Array:
        """(first, one past the last) of each run of tokens to be learned."""
        ...

    def where(self, document: int) -> str: ...


@dataclass(slots=True)
class Counts:
    """What became of documents and sequences on the way."""

    n_documents: int = 0
    n_apart: int = 0  # conversations of which each answer is a document
    n_unsupervised: int = 0  # left out: nothing to learn
    n_cut: int = 0
    n_split: int = 0
    n_skipped: int = 0  # left out: longer than a sequence

    def __iadd__(self, other: "Counts") -> "Counts":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


@dataclass(frozen=True, slots=True)
class Sequences:
    """Segments in order, of which `first[i]` .. `first[i + 1] - 1` are sequence i's."""

    document: Array
    start: Array
    stop: Array
    first: Array

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> list[tuple[int, int, int]]:
        part = slice(int(self.first[i]), int(self.first[i + 1]))
        return list(zip(self.document[part].tolist(), self.start[part].tolist(), self.stop[part].tolist(), strict=True))

    def taken(self, order: Array) -> "Sequences":
        """The same sequences in another order."""
        return _sequences([self[int(i)] for i in order])


def pack(
    documents: Documents, order: Array, packing: Packing, too_long: TooLong, refuse_unsupervised: bool, seq_len: int
) -> tuple[Sequences, Counts]:
    """All documents, in the order `order`, as sequences of up to seq_len tokens, each with something to learn."""
    counts = Counts(n_documents=len(order), n_apart=documents.n_apart)
    learns = (documents.n_learned if packing == "joined" else documents.n_targets)[order] > 0
    counts.n_unsupervised = int((~learns).sum())
    if refuse_unsupervised and counts.n_unsupervised:
        where = documents.where(int(order[~learns].min()))
        raise DataError(f"{where}: nothing in it to learn from; leave it out, or set unsupervised to skip")
    order = order[learns]
    if packing == "joined":
        return _joined(documents, order, seq_len), counts
    pieces = list(_pieces(documents, order, too_long, seq_len, counts))
    return _sequences([[piece] for piece in pieces] if packing == "one" else _first_fit(pieces, seq_len)), counts


def _pieces(documents: Documents, order: Array, too_long: TooLong, seq_len: int, counts: Counts) -> Iterator[tuple[int, int, int]]:
    """Each document, or what of it fits a sequence."""
    for d, length in zip(order.tolist(), documents.lengths[order].tolist(), strict=True):
        if length <= seq_len:
            yield d, 0, length
            continue
        match too_long:
            case "refuse":
                raise DataError(
                    f"{documents.where(d)}: {length:,} tokens, and a sequence holds {seq_len:,}; "
                    "shorten it, or set too_long to cut, split or skip"
                )
            case "skip":
                counts.n_skipped += 1
                continue
            case "cut":
                counts.n_cut += 1
                found = [(d, 0, seq_len)]
            case "split":
                counts.n_split += 1
                # Pieces share a token: the last of one comes before the first target of the next.
                found = [(d, at, min(at + seq_len, length)) for at in range(0, length - 1, seq_len - 1)]
        kept = [piece for piece in found if n_targets_of(documents.runs(d), piece[1] + 1, piece[2])]
        counts.n_unsupervised += not kept
        yield from kept


def n_targets_of(runs: Array, first: int, stop: int) -> int:
    """How many of the tokens first .. stop - 1 are to be learned."""
    return int((np.minimum(runs[:, 1], stop) - np.maximum(runs[:, 0], first)).clip(min=0).sum())


def _first_fit(pieces: list[tuple[int, int, int]], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Each piece in the first open sequence that has room for it, sequences in the order of their opening."""
    sequences: list[list[tuple[int, int, int]]] = []
    open_ones: list[tuple[int, int]] = []  # (room, number), as opened
    for piece in pieces:
        n = piece[2] - piece[1]
        for i, (room, number) in enumerate(open_ones):
            if n <= room:
                sequences[number].append(piece)
                open_ones[i] = room - n, number
                break
        else:
            open_ones.append((seq_len - n, len(sequences)))
            sequences.append([piece])
            if len(open_ones) > OPEN_SEQUENCES:
                open_ones.remove(min(open_ones))
    return sequences


def _sequences(sequences: list[list[tuple[int, int, int]]]) -> Sequences:
    segments = np.array([segment for sequence in sequences for segment in sequence], dtype=np.int64).reshape(-1, 3)
    first = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    document, start, stop = np.ascontiguousarray(segments.T)
    return Sequences(document, start, stop, first)


def _joined(documents: Documents, order: Array, seq_len: int) -> Sequences:
    """One row of all tokens, cut. A sequence in which nothing is to be learned is left out, as is a last one of a single token."""
    lengths = documents.lengths[order]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.arange(0, total + 1, seq_len))
    begin, end = cuts[:-1], cuts[1:]
    place = np.searchsorted(ends, begin, side="right")  # of the document in the order
    start = begin - (ends - lengths)[place]
    sequence = begin // seq_len
    learned = np.zeros(-(-total // seq_len), dtype=np.int64)
    whole = (documents.n_learned[order] == lengths)[place]  # text: no need to look at its runs
    shift = (begin % seq_len == 0).astype(np.int64)  # nothing of the sequence comes before its first token
    np.add.at(learned, sequence, np.where(whole, end - begin - shift, 0))
    for i in np.flatnonzero(~whole):
        runs = documents.runs(int(order[place[i]]))
        learned[sequence[i]] += n_targets_of(runs, int(start[i] + shift[i]), int(start[i] + end[i] - begin[i]))
    kept = learned[sequence] > 0
    numbers = sequence[kept]
    first = np.append(np.flatnonzero(np.diff(numbers, prepend=-1)), len(numbers))
    return Sequences(order[place][kept], start[kept], (start + end - begin)[kept], first)
