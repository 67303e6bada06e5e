"""Sampling: the batch of each step, from packed data (map-style) or from a stream.

Map-style: a batch is a function of the step, the seed, the settings and the data. Documents are packed once, in a seeded order.
Each epoch of a set has a different order. Several sets are mixed in rounds: each set has a share of a round's samples, spread
evenly. Without weights, a round holds every sequence of every set once. With weights, an exhausted set restarts in another order.

Streamed: documents are read lazily, shuffled within a buffer, and resumable at any step. `datasets` passes the documents of a
shuffle buffer to a map function, which orders them by seed, epoch and buffer position, and packs them. No state is carried between
buffers, so the state of `datasets` (start of a buffer, number of its sequences used) resumes exactly. The library's own `shuffle`
would lose the contents of a buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset

from penstock.runtime.batch import UNSUPERVISED, Batch, joined_images
from penstock.runtime.errors import CheckpointError, DataError
from penstock.runtime.plan.objective import ANSWER, LossInput

from .documents import Array, Columns, Documents, Reader
from .packing import Counts, Row, Sequences, Shape, batch_of, counts_text, documents_by_row, pack, rows_of

# Adds stored outputs of a vision tower to a batch. For each row: its data set's documents, and the segments of each of its own
AddImages = Callable[[Batch, Sequence[tuple[Documents, Sequence[Sequence[Sequence[int]]]]]], Batch]
Position = dict[str, Any]  # start of a step, as JSON
SHARES = 1000  # samples of a round with weights
TOLERANCE = 0.002  # of the sum of weights: 3 x 0.333 is accepted
BEGIN: Position = {"epoch": 0, "stream": None}  # start of a stream
REMEMBERED_STEPS = 1024  # start positions of a stream's steps, for a save while later batches are prepared
MANY = 1 / 3  # share of cut documents above which a longer sequence is advised


@dataclass(frozen=True, slots=True)
class PackedSet:
    """A data set packed into sequences."""

    documents: Documents
    sequences: Sequences
    shape: Shape
    counts: Counts
    about: str  # the data set and how it is read, for the user
    fingerprint: str
    inputs: tuple[LossInput, ...] = ()  # loss inputs from its documents
    read: Mapping[str, str] = field(default_factory=dict)  # digests of everything that affects its tokens, by name

    @property
    def n_slots(self) -> int | None:
        """Maximum answers per row; None unless documents of answers are isolated in sequences."""
        return int(np.diff(self.sequences.first).max()) // self.shape.segments_each if ANSWER in self.inputs else None


@dataclass(slots=True, eq=False)
class MapStyleData:
    """One data set, or several. `shares[k]`: samples of set k in a round."""

    parts: tuple[PackedSet, ...]
    shares: tuple[int, ...]
    batch_size: int
    seed: int | None  # None: file order, epoch after epoch
    fingerprint: str
    n_sequences: int = field(init=False)
    n_steps: int = field(init=False)  # per epoch; the last step may continue into the next epoch
    # Per set, (n_sequences, rows per sample, ...): loss inputs from a reference model or teacher
    references: Mapping[LossInput, Sequence[torch.Tensor]] = field(default_factory=dict)
    add_images: AddImages | None = None  # for data with images, once the outputs of the vision tower are stored
    by_epoch: bool = False  # the order of transformers' Trainer: no batch continues into the next epoch
    _turns: Array = field(init=False, repr=False)  # (set, number of its samples before) for each sample of a round

    def __post_init__(self) -> None:
        self.n_sequences = sum(len(part.sequences) for part in self.parts)
        self.n_steps = -(-self.n_sequences // self.samples_per_step)
        numbers = np.concatenate([np.arange(share) for share in self.shares])
        sets = np.repeat(np.arange(len(self.shares)), self.shares)
        order = np.argsort((numbers + 0.5) / np.array(self.shares)[sets], kind="stable")
        self._turns = np.stack([sets, numbers], axis=1)[order]

    @property
    def rows_each(self) -> int:
        """Batch rows per sample."""
        return self.parts[0].shape.rows_each

    @property
    def samples_per_step(self) -> int:
        return max(1, self.batch_size // self.rows_each)  # `penstock data` has batches of one row

    def sample(self, n: int) -> tuple[int, int]:
        """Return (set, sequence in it) of sample `n`, counted from 0 across all epochs."""
        n_round, turn = divmod(n, len(self._turns))
        k, offset = self._turns[turn].tolist()
        size = len(self.parts[k].sequences)
        epoch, place = divmod(n_round * self.shares[k] + offset, size)
        return k, place if self.seed is None else int(order_of(size, self.seed, epoch)[place])

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, counted from 0."""
        n = self.samples_per_step
        if not self.by_epoch:
            return self.batch_of_samples([self.sample(step * n + b) for b in range(n)])
        epoch, place = divmod(step, self.n_steps)
        order = range(self.n_sequences) if self.seed is None else trainer_order(self.n_sequences, self.seed, epoch)
        batch = self.batch_of_samples([(0, i) for i in order[place * n : place * n + n]])
        if (n_rows := len(batch.input_ids)) == self.batch_size:
            return batch
        return replace(joined([batch], self.batch_size), n_answers=n_rows if batch.n_answers is None else batch.n_answers)

    def batch_of_samples(self, samples: Sequence[tuple[int, int]]) -> Batch:
        """Return a batch of samples, each (set, sequence in it)."""
        chosen = [(self.parts[k], self.parts[k].sequences[i]) for k, i in samples]
        rows = [row for part, segments in chosen for row in rows_of(part.documents, segments, part.shape)]
        n_slots = max((part.n_slots for part in self.parts if part.n_slots is not None), default=None)
        extras = dict[str, torch.Tensor]()
        for row, sets in self.references.items():
            values = [sets[k][i] for k, i in samples]
            if n_slots is not None and "K" in row.shape:  # the sets have different numbers of slots
                values = [F.pad(x := value.reshape(len(value), -1), (0, n_slots - x.shape[1])) for value in values]
            extras[row.name] = torch.cat(values)
        inputs = max((part.inputs for part in self.parts), key=len)
        numbers = [[part.documents.loss_numbers(d) for d, _, _ in segments] for part, segments in chosen]
        batch = batch_of(rows, max((part.shape for part in self.parts), key=lambda s: s.is_isolated), inputs, numbers, n_slots)
        batch = replace(batch, extras={**extras, **batch.extras})
        if self.add_images is None:
            return batch
        placed = [(p.documents, row) for p, segments in chosen for row in documents_by_row(p.documents, segments, p.shape)]
        return self.add_images(batch, [(documents, [part for _, part in row]) for documents, row in placed])

    def position(self, step: int) -> Position:
        """Return the first sample of a step."""
        return {"sample": step * self.samples_per_step}

    def resume(self, step: int, position: Position) -> bool:
        """Resume at a step. Return True if this data has that position."""
        return position == self.position(step)

    def words(self) -> dict[str, str]:
        """Return report lines: per set its files, counts and share; a `warning` if documents are cut or data is short."""
        lines, cut = dict[str, str](), list[str]()
        for number, (part, share) in enumerate(zip(self.parts, self.shares, strict=True), start=1):
            suffix, n, seq_len = f" {number}" * (len(self.parts) > 1), len(part.sequences), part.shape.seq_len
            segments, packing = part.sequences.segments, part.shape.packing
            full = np.diff(segments[:, 1:]).sum() * part.shape.rows_per_segment / (n * self.rows_each * seq_len)
            kinds = {"pairs": "pairs", "answers": f"groups of {part.shape.group} answers"}
            description = f"{kinds[packing]}, sequences of" if packing in kinds else "of"
            if part.shape.shares:
                n_groups = len(segments) // part.shape.segments_each
                description = f"times {self.rows_each} sequences, of {n_groups:,} {kinds[packing]} that share them, of"
            lines |= {f"data{suffix}": part.about, f"rows{suffix}": counts_text(part.counts)}
            lines[f"sequences{suffix}"] = f"{n:,} {description} {seq_len:,} tokens, {full:.0%} full, packing {packing}"
            if suffix:
                fraction = share / len(self._turns)
                lines[f"share{suffix}"] = f"{fraction:.1%} of samples, {self.n_sequences * fraction / n:.2f} times an epoch"
            if n_own := part.documents.n_own:
                n = int(part.documents.lengths.sum())
                again = ", or earlier turns again, as it writes them differently later; --chat-template NAME or FILE avoids that"
                note = again if len(part.documents.lengths) > part.documents.n_rows else ", not the messages'"
                lines[f"template{suffix}"] = f"{(extra := max(n - n_own, 0)):,} of {n:,} tokens ({extra / n:.0%}) are its own{note}"
            lines |= {f"tokens{suffix}": part.documents.location} if part.documents.location else {}
            if part.documents.problems:
                first = "; ".join(problem.partition("; ")[0] for problem in part.documents.problem_lines[:3])
                lines[f"bad rows{suffix}"] = f"{len(part.documents.problems):,} of {part.documents.n_rows:,}, left out: {first}"
            lines |= {f"{name}{suffix}": words for name, words in _dropped_words(part.documents.dropped)}
            cut += [f"data{suffix}"] if part.counts["cut"] > MANY * part.counts["documents"] else []
        if (n_rows := self.n_sequences * self.rows_each) < self.batch_size:
            few = f"a step of {self.batch_size:,} sequences trains on some of these {n_rows:,} more than once"
            lines["warning, few"] = f"{few}; give more data, or plan with a smaller --batch-size"
        problem, advice = "many documents are cut, and the rest of them is not learned", "plan with a longer --seq-len"
        advice += "" if any(part.documents.has_images for part in self.parts) else ", or set data.too_long to split"
        return lines | ({"warning": f"{', '.join(cut)}: {problem}; {advice}"} if cut else {})


def _dropped_words(dropped: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield report lines on dropped or converted parts of conversations."""
    for kind, advice in (("roles", "call them system or user"), ("parts", "choose another with --chat-template")):
        names = [f"{note.partition(' ')[2]} (in {n:,} rows)" for note, n in sorted(dropped.items()) if note.startswith(kind)]
        parts = "messages of " * (kind == "roles") + ", ".join(names)
        if names:
            yield f"warning, {kind}", f"the model's chat template drops {parts}; {advice}"
    if n := dropped.get("arguments"):
        yield "tool calls", f"arguments of {n:,} rows are given to the chat template as it reads them, as objects or as JSON text"


@dataclass(slots=True, eq=False)
class Stream:
    """Batches in sequence, of unknown total length."""

    reader: Reader
    shape: Shape
    batch_size: int
    buffer_documents: int
    seed: int | None  # None: file order, epoch after epoch
    fingerprint: str
    inputs: tuple[LossInput, ...] = ()  # loss inputs that follow from a batch's tokens
    n_steps: None = None
    _positions: dict[int, Position] = field(default_factory=dict, repr=False)
    _iterator: Iterator[tuple[Batch, Position]] | None = field(default=None, repr=False)
    _next: int = 0  # step of the next batch from `_made`

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`. Restart reading if this is not the next step."""
        if self._iterator is None or step != self._next:
            self._iterator, self._next = self._batches(self.position(step)), step
        try:
            batch, position = next(self._iterator)
        except BaseException:
            self._iterator = None  # a retry must raise the same error, not StopIteration
            raise
        self._next += 1
        self._positions[self._next] = position
        self._positions.pop(self._next - REMEMBERED_STEPS, None)
        return batch

    def _batches(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield each batch from a position on, with the position after it."""
        rows = self._rows(position["epoch"], position["stream"])
        while True:
            of_batch = [next(rows) for _ in range(self.batch_size)]
            batch_rows = [row for row, _ in of_batch]
            largest = max((number for *_, spans in batch_rows for number, _, _ in spans), default=0)
            n_slots = 1 + largest // self.shape.rows_each if ANSWER in self.inputs else None
            yield batch_of(batch_rows, self.shape, self.inputs, (), n_slots), of_batch[-1][1]

    def _rows(self, first_epoch: int, state: dict[str, Any] | None) -> Iterator[tuple[Row, Position]]:
        for epoch in count(first_epoch):
            documents = self.reader.stream(self._order(len(self.reader.files.files), epoch))
            options = {"batched": True, "batch_size": self.buffer_documents, "with_indices": True}
            stream = documents.map(partial(self._packed, epoch), remove_columns=list(self.reader.features), **options)
            has_rows = state is not None
            if state is not None:
                stream.load_state_dict(state)
            for example in stream:
                has_rows = True
                yield example["row"], {"epoch": epoch, "stream": stream.state_dict()}
            if not has_rows:
                raise DataError(f"{self.reader.files.path}: no document in it has anything to learn; give other data")
            state = None

    def _packed(self, epoch: int, buffer: Columns, indices: list[int]) -> Columns:
        """Pack the documents of a shuffle buffer, and return the rows in a seeded order."""
        documents = Documents(Dataset.from_dict(buffer, self.reader.features), self.reader.files)
        documents.refuse_bad(0)
        sequences, _ = pack(documents, self._order(len(indices), epoch, indices[0], 0), self.shape)
        order = self._order(len(sequences), epoch, indices[0], 1)
        return {"row": [row for i in order.tolist() for row in rows_of(documents, sequences[i], self.shape)]}

    def _order(self, n: int, *place: int) -> Array:
        return np.arange(n) if self.seed is None else order_of(n, self.seed, *place)

    def position(self, step: int) -> Position:
        """Return the start of a step. CheckpointError if the stream did not reach it."""
        if step == 0:
            return BEGIN
        if step not in self._positions:
            raise CheckpointError(f"where step {step} of a stream begins shows once the step before it is done; resume at that one")
        return self._positions[step]

    def resume(self, step: int, position: Position) -> bool:
        self._iterator, self._positions = None, {step: position}
        return position.keys() == BEGIN.keys() and (step > 0 or position == BEGIN)

    def words(self) -> dict[str, str]:
        rows = f"read as they are needed, in shuffle buffers of {self.buffer_documents:,} documents"
        sequences = f"of {self.shape.seq_len:,} tokens, packing {self.shape.packing}"
        return {"data": self.reader.about, "rows": rows, "sequences": sequences}


def shares_of(weights: Sequence[float | None], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return samples per round of each set. DataError if the weights do not sum to 1."""
    known = [weight for weight in weights if weight is not None]
    if not known:
        return tuple(sizes) if len(sizes) > 1 else (1,)
    if len(known) < len(weights):
        raise DataError(f"{len(known)} of {len(weights)} data sets have a weight; give one to each, or to none")
    if abs(sum(known) - 1) > TOLERANCE:
        raise DataError(f"the weights of the data sets add up to {sum(known):.4g}, not to 1; they are shares of the samples")
    ends = np.rint(np.cumsum(known) / sum(known) * SHARES).astype(np.int64)
    shares = tuple(np.diff(ends, prepend=0).tolist())
    if min(shares) < 1:
        raise DataError(f"a data set's weight is {min(known):.3g}, and {1 / SHARES:g} is the least; leave that set out")
    return shares


def joined(batches: Sequence[Batch], n: int) -> Batch:
    """Return a batch of `n` sequences: those of the batches, and padding without anything to learn."""
    first, ids_BT = batches[0], torch.cat([batch.input_ids for batch in batches])
    n_tokens, n_padding = ids_BT.shape[1], n - len(ids_BT)

    def padded(tensors: Iterable[torch.Tensor], value: int = 0) -> torch.Tensor:
        tensor = torch.cat([*tensors])
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, n_padding), value=value)

    documents = [lengths for batch in batches for lengths in batch.document_tokens or ()] + [(n_tokens,)] * n_padding
    lengths = [length for batch in batches for length in batch.n_tokens or (n_tokens,) * len(batch.input_ids)]
    return Batch(
        padded([ids_BT]),
        padded((batch.targets for batch in batches), UNSUPERVISED),
        None if first.document_tokens is None else tuple(documents),
        extras={name: padded(batch.extras[name] for batch in batches) for name in first.extras},
        n_tokens=(*lengths, *(n_tokens,) * n_padding),
        images=joined_images([batch.images for batch in batches], n_padding),
    )


@lru_cache(maxsize=2)
def trainer_order(n: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch by transformers' Trainer: accelerate's SeedableRandomSampler draws it from seed + epoch."""
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return order


@lru_cache(maxsize=64)  # a batch may span two epochs of each set
def order_of(n: int, seed: int, *place: int) -> Array:
    """Return a seeded permutation of n. Different for each `place`: an epoch, or a shuffle buffer of an epoch."""
    # RandomState's stream is frozen across NumPy versions, default_rng's is not. Resuming needs a reproducible order.
    order: Array = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, *place]).permutation(n)
    return order
