"""Packing: documents as segments of sequences, and sequences as rows of a batch.

`joined`: all documents in one row, which is cut into sequences. `documents`: whole documents, as many as fit (first fit). `one`: a
sequence each; `pairs`: so, too, a chosen answer and then the rejected one; `answers`: so, too, each answer of a group, and then its
prompt with the answer before it in the group. A segment is (document, first token, one past the last).

Targets follow the convention of Hugging Face: position t is supervised with token t + 1 of its own sequence, so a sequence's last
position is not, nor is padding. Where documents are packed whole, neither is the last position of each.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import UNSUPERVISED, Batch
from runtime.errors import DataError
from runtime.plan.objective import LAST

from .documents import Array, Documents

# B sequences of a batch, T positions of a sequence
OPEN_SEQUENCES = 64  # among which a document looks for room; beyond, the fullest is closed
Packing = Literal["joined", "documents", "one", "pairs", "answers"]
Segment = tuple[int, int, int]
Row = tuple[Array, Array, tuple[int, ...]]  # ids_T, targets_T, and the tokens of each document that attends to itself alone
Counts = Counter[Literal["documents", "unsupervised", "skipped", "cut", "split"]]  # `documents`: all of them


@dataclass(frozen=True, slots=True)
class Shape:
    """The sequences of a data set, and what is done with documents that do not suit them."""

    packing: Packing
    seq_len: int
    pad_id: int
    too_long: Literal["cut", "split", "skip", "refuse"]
    unsupervised: Literal["refuse", "skip"]
    group: int = 1  # answers

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what becomes of documents."""
        return {name: value for name, value in asdict(self).items() if name != "group" or self.packing == "answers"}

    @property
    def rows_each(self) -> int:
        """Of a batch, that a sample takes."""
        return {"pairs": 2, "answers": 2 * self.group}.get(self.packing, 1)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Segments in order, (n, 3); those of sequence i are `first[i]` .. `first[i + 1] - 1`. A pair's two are a row each, a group's
    answers two rows each."""

    segments: Array
    first: Array

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> list[list[int]]:
        segments: list[list[int]] = self.segments[self.first[i] : self.first[i + 1]].tolist()
        return segments


def pack(documents: Documents, order: Array, shape: Shape) -> tuple[Sequences, Counts]:
    """Documents but bad rows, in this order, as sequences that each have something to learn; DataError for one that is refused."""
    order = order[~np.isin(order, [*documents.problems])]
    learns = (documents.n_learned if shape.packing == "joined" else documents.n_targets)[order] > 0
    counts = Counts({"documents": len(order), "unsupervised": int((~learns).sum())})
    if shape.unsupervised == "refuse" and counts["unsupervised"]:
        where = documents.where(int(order[~learns].min()))
        raise DataError(f"{where}: nothing in it to learn from; leave it out, or set unsupervised to skip")
    if shape.packing == "pairs":
        return _pairs(documents, np.sort(order), shape, counts)
    order = order[learns]
    if shape.packing == "joined":
        return _joined(documents, order, shape.seq_len), counts
    pieces = list(_pieces(documents, order, shape, counts))
    if shape.packing == "answers":
        n = len(pieces) // shape.group
        counts["skipped"] += len(pieces) - n * shape.group  # no whole group
        return Sequences(np.array(pieces[: n * shape.group], dtype=np.int64).reshape(-1, 3), np.arange(n + 1) * shape.group), counts
    packed = [[piece] for piece in pieces] if shape.packing == "one" else _first_fit(pieces, shape.seq_len)
    segments = np.array([segment for sequence in packed for segment in sequence], dtype=np.int64).reshape(-1, 3)
    return Sequences(segments, np.cumsum([0, *map(len, packed)], dtype=np.int64)), counts


def _pairs(documents: Documents, halves: Array, shape: Shape, counts: Counts) -> tuple[Sequences, Counts]:
    """Pairs in the order of the files: the two documents of a row, unless one of them has nothing to learn within a sequence."""
    kept = list[Segment]()
    for both in halves.reshape(-1, 2):
        found = list(_pieces(documents, both, shape, counts)) if documents.n_targets[both].all() else []
        kept += found if len(found) == shape.rows_each else []
    segments = np.array(kept, dtype=np.int64).reshape(-1, 3)
    return Sequences(segments, np.arange(0, len(kept) + 1, shape.rows_each)), counts


def _pieces(documents: Documents, order: Array, shape: Shape, counts: Counts) -> Iterator[Segment]:
    """Each document, or what of it fits a sequence."""
    seq_len = shape.seq_len
    for d, length in zip(order.tolist(), documents.lengths[order].tolist(), strict=True):
        if length <= seq_len:
            yield d, 0, length
            continue
        match shape.too_long:
            case "refuse":
                advice = "shorten it, or set too_long to cut, split or skip"
                raise DataError(f"{documents.where(d)}: {length:,} tokens, and a sequence holds {seq_len:,}; {advice}")
            case "skip":
                counts["skipped"] += 1
                continue
            case "cut":
                counts["cut"] += 1
                found = [(d, 0, seq_len)]
            case "split":
                counts["split"] += 1
                # Pieces share a token: the last of one comes before the first target of the next.
                found = [(d, at, min(at + seq_len, length)) for at in range(0, length - 1, seq_len - 1)]
        kept = [piece for piece in found if n_targets_of(documents.runs(d), piece[1] + 1, piece[2])]
        counts["unsupervised"] += not kept
        yield from kept


def n_targets_of(runs: Array, first: int, stop: int) -> int:
    """How many of the tokens first .. stop - 1 are learned."""
    return int((np.minimum(runs[:, 1], stop) - np.maximum(runs[:, 0], first)).clip(min=0).sum())


def _first_fit(pieces: list[Segment], seq_len: int) -> list[list[Segment]]:
    """Each piece in the first open sequence that has room for it, sequences in the order of their opening."""
    sequences: list[list[Segment]] = []
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


def _joined(documents: Documents, order: Array, seq_len: int) -> Sequences:
    """One row of all tokens, cut. A sequence in which nothing is learned is left out, as is a last one of a single token."""
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
    return Sequences(np.stack([order[place], start, start + end - begin], axis=1)[kept], first)


def row_of(documents: Documents, segments: Iterable[Sequence[int]], shape: Shape) -> Row:
    """Segments one after another, and the target of each position that has one."""
    ids_T, targets_T = np.full(shape.seq_len, shape.pad_id), np.full(shape.seq_len, UNSUPERVISED)
    at, lengths, is_joined = 0, list[int](), shape.packing in ("joined", "answers")
    for document, start, stop in segments:
        n = stop - start
        ids_T[at : at + n] = documents.ids(document)[start:stop]
        for first, last in documents.runs(document).clip(start, stop).tolist():
            begin, end = at + max(first - start, int(not is_joined or at == 0)), at + last - start
            if begin < end:
                targets_T[begin - 1 : end - 1] = ids_T[begin:end]
        at += n
        lengths.append(n)
    lengths += [shape.seq_len - at] * (at < shape.seq_len)
    return ids_T, targets_T, (shape.seq_len,) if is_joined else tuple(lengths)


def rows_of(documents: Documents, segments: Sequence[Sequence[int]], shape: Shape) -> list[Row]:
    """The rows of a sample: one of all its segments, or of a pair one of each half, of a group two of each answer."""
    match shape.packing:
        case "pairs":
            of_rows: list[list[Sequence[int]]] = [[one] for one in segments]
        case "answers":
            of_rows = [of for i, one in enumerate(segments) for of in ([one], _mismatched(documents, one, segments[i - 1], shape))]
        case _:
            of_rows = [[*segments]]
    return [row_of(documents, of, shape) for of in of_rows]


def _mismatched(documents: Documents, own: Sequence[int], other: Sequence[int], shape: Shape) -> list[Sequence[int]]:
    """The prompt of a document with the answer of another, as much of it as there is room for."""
    end, (d, begin, stop) = int(documents.runs(own[0])[0, 0]), (other[0], int(documents.runs(other[0])[0, 0]), other[2])
    return [(own[0], 0, end), (d, begin, min(stop, begin + shape.seq_len - end))]


def batch_of(rows: Iterable[Row], by_document: bool) -> Batch:
    """The rows of a step; `by_document`: documents attend to themselves alone."""
    ids_BT, targets_BT, lengths = zip(*rows, strict=True)
    return Batch(torch.from_numpy(np.stack(ids_BT)), torch.from_numpy(np.stack(targets_BT)), lengths if by_document else None)


def extras_of(
    brings: Sequence[str], brought: Sequence[npt.NDArray[np.float64]], batch: Batch, pad_id: int
) -> dict[str, torch.Tensor]:
    """What documents bring to a batch for its loss, by name: of an answer to each of its two rows. The last token is the last that
    is not padding, as transformers takes it: not one that ends a text, which sequences are filled up with."""
    found = dict[str, torch.Tensor]()
    if LAST in brings:
        at_T = torch.arange(batch.input_ids.shape[1])
        found[LAST] = (at_T * (batch.input_ids != pad_id)).amax(dim=1)
    if not brings or brings == (LAST,):
        return found
    firsts = torch.tensor([of[0] for of in brought], dtype=torch.float32)
    if "label" in brings:
        return found | {"label": firsts.repeat_interleave(len(batch.targets) // len(brought))}
    old_BT = torch.zeros(batch.targets.shape)
    for old_T, targets_T, of in zip(old_BT, batch.targets, brought, strict=True):
        is_learned = targets_T != UNSUPERVISED
        old_T[is_learned] = torch.tensor(of[1 : 1 + int(is_learned.sum())], dtype=torch.float32)
    return {"advantage": firsts, "old": old_BT}


def in_words(counts: Counts) -> str:
    """What became of documents, for the user."""
    return ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)
