"""Packing: documents -> segments of sequences -> rows of a batch. A segment is (document, first token, one past the last).

`joined`: concatenate all documents and cut into sequences. `documents`: whole documents, first fit. `one`: one document per row.
`pairs`: two rows per sample, the chosen and the rejected answer. `answers` (KTO): for each answer of a group two rows, the answer
itself and its prompt with the previous answer of the group. If pairs or groups share sequences (`shares`), a sample has the same
number of rows and holds several pairs or groups, first fit.
Example, 6 tokens, documents aaa, bb, cccc. joined: aaabbc ccc___; documents: aaabb_ cccc__; one: aaa___ bb____ cccc__.

Targets follow Hugging Face: position t is supervised with token t + 1 of its sequence. The last position of a sequence and padding
have no target. With whole documents, the last position of each document has none either.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import ADVANTAGE, ANSWER, LABEL, LAST, OLD, LossInput

from .documents import Array, Documents

# B sequences of a batch, T positions of a sequence, K answers of a row, S (start, stop)
OPEN_SEQUENCES = 64  # candidates of first fit; beyond this number the fullest is closed
Packing = Literal["joined", "documents", "one", "pairs", "answers"]
Segment = tuple[int, int, int]
Span = tuple[int, int, int]  # document number in its sample; first position and one past the last in a row
Row = tuple[Array, Array, list[Span]]  # ids_T, targets_T, and the documents in the row
Numbered = tuple[int, list[Sequence[int]]]  # number of a document in its sample, and its segments
Numbers = Sequence[Sequence[npt.NDArray[np.float64]]]  # sample -> loss numbers of each source row
Counts = Counter[Literal["documents", "unsupervised", "skipped", "cut", "split"]]  # `documents`: total


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequence layout of a data set, and the treatment of documents that do not fit."""

    packing: Packing
    seq_len: int
    pad_id: int
    too_long: Literal["cut", "split", "skip", "refuse"]
    unsupervised: Literal["refuse", "skip"]
    group: int = 1  # answers per group
    shares: bool = False  # True if several pairs or groups of answers share sequences

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that affect the packed sequences."""
        idle = [("group", self.packing != "answers"), ("shares", not self.shares)]
        return {name: value for name, value in asdict(self).items() if (name, True) not in idle}

    @property
    def segments_each(self) -> int:
        """Segments per sample that must remain together."""
        return {"pairs": 2, "answers": self.group}.get(self.packing, 1)

    @property
    def is_isolated(self) -> bool:
        """True if documents in one sequence are isolated in attention."""
        return self.shares or self.packing == "documents"

    @property
    def rows_each(self) -> int:
        """Batch rows per sample."""
        return self.segments_each * self.rows_per_segment

    @property
    def rows_per_segment(self) -> int:
        """2 for an answer and its prompt with another answer of the group, else 1."""
        return 1 + (self.packing == "answers")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Segments (n, 3) in order. Sequence i has segments `first[i]` .. `first[i + 1] - 1`. An answer of a group is two rows."""

    segments: Array
    first: Array

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> list[list[int]]:
        segments: list[list[int]] = self.segments[self.first[i] : self.first[i + 1]].tolist()
        return segments


def pack(documents: Documents, order: Array, shape: Shape) -> tuple[Sequences, Counts]:
    """Pack documents, without bad rows, in this order. Every sequence has a target. DataError for a rejected document."""
    order = order[~np.isin(order, [*documents.problems])]
    learns = (documents.n_learned if shape.packing == "joined" else documents.n_targets)[order] > 0
    counts = Counts({"documents": len(order), "unsupervised": int((~learns).sum())})
    if shape.unsupervised == "refuse" and counts["unsupervised"]:
        where = documents.where(int(order[~learns].min()))
        raise DataError(f"{where}: nothing in it to learn from; leave it out, or set unsupervised to skip")
    if shape.packing == "joined":
        if documents.has_images:
            raise DataError("packing joined: it cuts documents anywhere, also within images; choose documents or one")
        return _joined(documents, order[learns], shape.seq_len), counts
    if shape.packing == "pairs":
        groups = _pairs(documents, order, shape, counts)
    else:
        pieces, n = list(_pieces(documents, order[learns], shape, counts)), shape.segments_each
        counts["skipped"] += len(pieces) % n  # incomplete group
        groups = [pieces[i : i + n] for i in range(0, len(pieces) - n + 1, n)]
    packed = _first_fit(documents, groups, shape) if shape.is_isolated else groups
    segments = np.array([segment for sample in packed for segment in sample], dtype=np.int64).reshape(-1, 3)
    return Sequences(segments, np.cumsum([0, *map(len, packed)], dtype=np.int64)), counts


def _pairs(documents: Documents, order: Array, shape: Shape, counts: Counts) -> list[list[Segment]]:
    """Return (chosen, rejected) pairs with targets in both halves, in file order, or in this order if they share sequences."""
    halves, pairs = np.sort(order).reshape(-1, 2), list[list[Segment]]()
    if shape.shares:
        halves = halves[np.searchsorted(halves[:, 0], order[np.isin(order, halves[:, 0])])]
    for both in halves:
        segments = list(_pieces(documents, both, shape, counts)) if documents.n_targets[both].all() else []
        pairs += [segments] if len(segments) == len(both) else []
    return pairs


def _pieces(documents: Documents, order: Array, shape: Shape, counts: Counts) -> Iterator[Segment]:
    """Yield each document, cut or split to the sequence length."""
    seq_len = shape.seq_len
    for d, length in zip(order.tolist(), documents.lengths[order].tolist(), strict=True):
        if length <= seq_len:
            yield d, 0, length
            continue
        is_in_image = documents.has_images and documents.images_end(d) > (0 if shape.too_long == "split" else seq_len)
        match "skip" if is_in_image and shape.too_long != "refuse" else shape.too_long:
            case "refuse":
                advice = "shorten it, or set too_long to cut, split or skip"
                raise DataError(f"{documents.where(d)}: {length:,} tokens, and a sequence holds {seq_len:,}; {advice}")
            case "skip":
                counts["skipped"] += 1
                continue
            case "cut":
                counts["cut"] += 1
                pieces = [(d, 0, seq_len)]
            case "split":
                counts["split"] += 1
                # Pieces overlap by one token: the last token of a piece is the context of the next piece's first target.
                pieces = [(d, start, min(start + seq_len, length)) for start in range(0, length - 1, seq_len - 1)]
        supervised = [piece for piece in pieces if n_targets_of(documents.runs(d), piece[1] + 1, piece[2])]
        counts["unsupervised"] += not supervised
        yield from supervised


def n_targets_of(runs: Array, first: int, stop: int) -> int:
    """Return the number of learned tokens in first .. stop - 1."""
    return int((np.minimum(runs[:, 1], stop) - np.maximum(runs[:, 0], first)).clip(min=0).sum())


def _first_fit(documents: Documents, groups: list[list[Segment]], shape: Shape) -> list[list[Segment]]:
    """First fit: put each group into the first open sample with enough free positions. Samples are ordered by opening."""
    samples: list[list[Segment]] = []
    open_ones: list[tuple[int, int, list[int]]] = []  # (free positions, sample number, free positions per row), in order of opening
    for group in groups:
        lengths = [_length(document) for document in _documents_of(documents, group, shape)]
        n = sum(lengths)
        for i, (room, number, rooms) in enumerate(open_ones):
            if n <= room and _placed(rooms, lengths) is not None:
                samples[number] += group
                open_ones[i] = room - n, number, rooms
                break
        else:
            rooms = [shape.seq_len] * shape.rows_each
            _placed(rooms, lengths)
            open_ones.append((sum(rooms), len(samples), rooms))
            samples.append([*group])
            if len(open_ones) > OPEN_SEQUENCES:
                open_ones.remove(min(open_ones))
    return samples


def _placed(rooms: list[int], lengths: Sequence[int]) -> list[int] | None:
    """Place documents into rows, longest first, first fit. Return the row of each and update `rooms`; None if they do not fit."""
    free, rows = [*rooms], [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, room in enumerate(free) if lengths[i] <= room), None)
        if row is None:
            return None
        free[row], rows[i] = free[row] - lengths[i], row
    rooms[:] = free
    return rows


def _length(document: Iterable[Sequence[int]]) -> int:
    return sum(stop - start for _, start, stop in document)


def _joined(documents: Documents, order: Array, seq_len: int) -> Sequences:
    """Concatenate and cut all documents. Drop sequences without a target and a last sequence of one token."""
    lengths = documents.lengths[order]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.arange(0, total + 1, seq_len))
    begin, end = cuts[:-1], cuts[1:]
    place = np.searchsorted(ends, begin, side="right")  # of the document in the order
    start = begin - (ends - lengths)[place]
    sequence = begin // seq_len
    learned = np.zeros(-(-total // seq_len), dtype=np.int64)
    is_whole = (documents.n_learned[order] == lengths)[place]  # text: skip its runs
    shift = (begin % seq_len == 0).astype(np.int64)  # the first token of a sequence has no context
    np.add.at(learned, sequence, np.where(is_whole, end - begin - shift, 0))
    for i in np.flatnonzero(~is_whole):
        runs = documents.runs(int(order[place[i]]))
        learned[sequence[i]] += n_targets_of(runs, int(start[i] + shift[i]), int(start[i] + end[i] - begin[i]))
    has_target = learned[sequence] > 0
    numbers = sequence[has_target]
    first = np.append(np.flatnonzero(np.diff(numbers, prepend=-1)), len(numbers))
    return Sequences(np.stack([order[place], start, start + end - begin], axis=1)[has_target], first)


def row_of(documents: Documents, numbered: Iterable[tuple[int, Sequence[Sequence[int]]]], shape: Shape) -> Row:
    """Build a row: concatenate numbered documents, each a list of segments, and set the targets."""
    ids_T, targets_T = np.full(shape.seq_len, shape.pad_id), np.full(shape.seq_len, UNSUPERVISED)
    offset, spans = 0, list[Span]()
    for number, segments in numbered:
        first_offset = offset
        for document, start, stop in segments:
            n = stop - start
            ids_T[offset : offset + n] = documents.ids(document)[start:stop]
            for first, last in documents.runs(document).clip(start, stop).tolist():
                begin, end = offset + max(first - start, int(offset == first_offset)), offset + last - start
                if begin < end:
                    targets_T[begin - 1 : end - 1] = ids_T[begin:end]
            offset += n
        spans.append((number, first_offset, offset))
    return ids_T, targets_T, spans


def rows_of(documents: Documents, segments: Sequence[Sequence[int]], shape: Shape) -> list[Row]:
    """Return the rows of a sample: one; two for a pair; two per answer of a group. With `shares`, documents fill these rows."""
    return [row_of(documents, numbered, shape) for numbered in documents_by_row(documents, segments, shape)]


def documents_by_row(documents: Documents, segments: Sequence[Sequence[int]], shape: Shape) -> list[list[Numbered]]:
    """Return the documents of each row of a sample: number in the sample, and segments."""
    parts, n = _documents_of(documents, segments, shape), shape.rows_each
    rooms, rows = [shape.seq_len] * n, list[int]()
    for i in range(0, len(parts), n):
        together = [_length(part) for part in parts[i : i + n]]
        rows += (_placed(rooms, together) if shape.is_isolated else None) or range(n)
    return [[(i, part) for i, part in enumerate(parts) if rows[i] == row] for row in range(n)]


def _documents_of(documents: Documents, segments: Sequence[Sequence[int]], shape: Shape) -> list[list[Sequence[int]]]:
    """Group the segments of a sample into documents of consecutive segments."""
    if shape.packing == "joined":
        return [[*segments]]
    groups = list[list[Sequence[int]]]()
    for i, segment in enumerate(segments):
        groups.append([segment])
        if shape.packing == "answers":  # add the prompt with another answer, cut to fit
            answer, _, stop = segments[i - 1 if i % shape.group else i + shape.group - 1]
            end, begin = (int(documents.runs(d)[0, 0]) for d in (segment[0], answer))
            groups.append([(segment[0], 0, end), (answer, begin, min(stop, begin + shape.seq_len - end))])
    return groups


def batch_of(rows: Sequence[Row], shape: Shape, inputs: Sequence[LossInput], loss_numbers: Numbers, n_slots: int | None) -> Batch:
    """Build the batch of a step, with these loss inputs. `n_slots`: answers per row, if answers share sequences.

    LAST is the last token that is not padding, as in transformers. The end-of-text token is padding, too, and does not count.
    """
    ids_BT, targets_BT = (torch.from_numpy(np.stack(column)) for column in list(zip(*rows, strict=True))[:2])
    edges = ([0, *(stop for *_, stop in spans), shape.seq_len] for *_, spans in rows)
    lengths = tuple(tuple(n for n in np.diff(stops).tolist() if n) for stops in edges)
    n_filled = None if shape.is_isolated else tuple(spans[-1][-1] for *_, spans in rows)
    batch = Batch(ids_BT, targets_BT, lengths if shape.is_isolated else None, n_tokens=n_filled)
    n_tokens, n = shape.seq_len, shape.rows_each
    tensors = {row.name: torch.zeros(row.sizes(len(rows), n_tokens, n_slots), dtype=getattr(torch, row.dtype)) for row in inputs}
    for b, (ids_T, targets_T, spans) in enumerate(rows if inputs else ()):
        unit, row = divmod(b, n)
        for number, begin, stop in spans:
            index = (b,) if n_slots is None else (unit * n + number % n, number // n)
            first = begin if n_slots is None else row * n_tokens + begin  # counted from the start of the row, or of its unit
            if ANSWER in inputs:
                tensors[ANSWER.name][index] = torch.tensor([first, first + stop - begin])
            if LAST in inputs:
                tensors[LAST.name][index] = first + int(np.flatnonzero(ids_T[begin:stop] != shape.pad_id).max(initial=0))
            if LABEL in inputs:
                tensors[LABEL.name][index] = float(loss_numbers[unit][number // shape.rows_per_segment][0])
            if OLD in inputs:
                advantage, *logps = loss_numbers[unit][number].tolist()
                (learned,) = np.nonzero(targets_T[begin:stop] != UNSUPERVISED)
                tensors[OLD.name][b, begin + learned] = torch.tensor(logps[: len(learned)])
                tensors[ADVANTAGE.name][b, begin:stop] = advantage
    n_answers = None if n_slots is None or not inputs else sum(len(spans) for *_, spans in rows)
    return replace(batch, n_answers=n_answers, extras=tensors)


def counts_text(counts: Counts) -> str:
    """Format document counts for the user."""
    return ", ".join(f"{n:,} {name.removesuffix('s') if n == 1 else name}" for name, n in counts.items() if n)
