"""How does a streaming data set become batches?

Rows are read through `datasets` into one shuffle buffer after another. The documents of a buffer are put in an order that seed,
epoch and the buffer's number give, and packed; nothing is carried from one buffer to the next. So a position is the row at which
a buffer begins and a number of sequences, and resuming from it reads one buffer again and gives the very same batches.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable

from penstock.data.files.sources import DataSource
from penstock.settings import DataSettings
from runtime.batch import Batch
from runtime.errors import CheckpointError, DataError

from .chat import Encoded
from .map_style import BatchShape, Rows, empty_rows, fill, in_words, order_of
from .packing import Array, Counts, Sequences, TooLong, pack
from .reading import Reading

BUFFER_TOKENS = 2**25  # a buffer ends with the document that reaches it
REMEMBERED_STEPS = 1024  # positions; a run saves a step that it has just finished
_PLACES = ("epoch", "file", "row", "block", "sequence")


@dataclass(frozen=True, slots=True)
class ShuffleBuffer:
    """Documents in memory. Also what `pack` asks of documents."""

    encoded: list[Encoded]
    places: list[tuple[int, int]]
    source: DataSource
    lengths: Array
    n_learned: Array
    n_targets: Array

    @classmethod
    def of(cls, encoded: list[Encoded], places: list[tuple[int, int]], source: DataSource) -> "ShuffleBuffer":
        n_learned = np.array([int((e.runs[:, 1] - e.runs[:, 0]).sum()) for e in encoded], dtype=np.int64)
        first = np.array([len(e.runs) > 0 and e.runs[0, 0] == 0 for e in encoded], dtype=np.int64)
        lengths = np.array([len(e.ids) for e in encoded], dtype=np.int64)
        return cls(encoded, places, source, lengths, n_learned, n_learned - first)

    @property
    def n_apart(self) -> int:
        return sum(n > 1 for n in Counter(self.places).values())

    def ids(self, document: int) -> npt.NDArray[Any]:
        return self.encoded[document].ids

    def runs(self, document: int) -> Array:
        return self.encoded[document].runs

    def where(self, document: int) -> str:
        return self.source.where(*self.places[document])


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream stands: buffer `block` of an epoch begins at a row of a file, and `sequence` of its sequences were used."""

    epoch: int = 0
    file: int = 0  # in the order of the epoch
    row: int = 0  # rows of that file that were used before
    block: int = 0  # the buffer's number, under the name that checkpoints know
    sequence: int = 0


@dataclass(slots=True, eq=False)
class StreamedData:
    """Batches in the order of their steps."""

    reading: Reading
    shape: BatchShape
    too_long: TooLong
    refuse_unsupervised: bool
    buffer_documents: int
    seed: int | None
    about: str  # the data set, in words
    fingerprint: str
    counts: Counts = field(default_factory=Counts)  # so far
    start: tuple[int, Position] = (0, Position())
    positions: dict[int, Position] = field(default_factory=dict, repr=False)
    _stream: Iterator[tuple[ShuffleBuffer, list[tuple[int, int, int]], Position]] | None = field(default=None, repr=False)
    _next: int = 0
    _last: tuple[int, Rows] | None = field(default=None, repr=False)
    _one_at_a_time: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.reading, self.shape, self.too_long, self.refuse_unsupervised, self.buffer_documents, self.seed)
        return StreamedData, (*settings, self.about, self.fingerprint, Counts(), self.start)

    @property
    def n_steps(self) -> None:
        return None

    @property
    def n_sequences(self) -> None:
        return None

    def position(self, step: int) -> dict[str, Any]:
        with self._one_at_a_time:
            return asdict(self._position(step))

    def _position(self, step: int) -> Position:
        self._begin()
        found = self.positions.get(step)
        if found is None:
            self._go_to(step)
            found = self.positions[step]
        return found

    def resume(self, step: int, position: dict[str, Any]) -> None:
        values = [position.get(name) for name in _PLACES] if isinstance(position, dict) else []
        if len(position) != len(_PLACES) or not all(type(value) is int and 0 <= value < 2**32 for value in values):
            raise CheckpointError(f"its data position {str(position)[:80]} is none of a stream; resume with the data it began with")
        place = Position(**position)
        if place.file > len(self.reading.source.files):
            raise CheckpointError(
                f"its data position names file {place.file}, and there are fewer; resume with the data it began with"
            )
        with self._one_at_a_time:
            self.close()
            self.start = step, place

    def batch(self, step: int) -> Batch:
        return self.rows(step).batch()

    def rows(self, step: int) -> Rows:
        """The next step's, or the last one's again; for any other the stream is read again from where it was begun."""
        with self._one_at_a_time:
            self._begin()
            if self._last is None or self._last[0] != step:
                self._go_to(step)
                self._last = step, self._take()
            return self._last[1]

    def _begin(self) -> None:
        if self._stream is None:
            self._next, place = self.start
            self.counts = Counts()
            self._stream = self._sequences(place)
            self.positions[self._next] = place

    def _go_to(self, step: int) -> None:
        if step < self._next:
            self._stream, self._last = None, None
            if step < self.start[0]:
                self.start = 0, Position()
            self._begin()
        while self._next < step:
            self._take()

    def _take(self) -> Rows:
        assert self._stream is not None
        ids_BT, targets_BT = empty_rows(self.shape)
        lengths = []
        for b in range(self.shape.batch_size):
            buffer, segments, place = next(self._stream)
            lengths.append(fill(ids_BT[b], targets_BT[b], buffer, segments, self.shape.packing == "joined"))
        self._next += 1
        self.positions[self._next] = place
        self.positions.pop(self._next - REMEMBERED_STEPS, None)
        return Rows(ids_BT, targets_BT, tuple(lengths) if self.shape.packing == "documents" else None)

    def _sequences(self, place: Position) -> Iterator[tuple[ShuffleBuffer, list[tuple[int, int, int]], Position]]:
        """Each sequence from there on, epoch after epoch, and where the stream stands after it."""
        epoch, file, row, number, used = place.epoch, place.file, place.row, place.block, place.sequence
        while True:
            is_whole, found = (file, row, number) == (0, 0, 0), used > 0
            for buffer, next_place in self._buffers(epoch, file, row):
                sequences = self._packed(buffer, epoch, number)
                for i in range(used, len(sequences)):
                    found = True
                    yield buffer, sequences[i], Position(epoch, file, row, number, i + 1)
                (file, row), number, used = next_place, number + 1, 0
            if is_whole and not found:
                raise DataError(f"{self.reading.source.path}: nothing to learn in it ({in_words(self.counts)}); give other data")
            epoch, file, row, number, used = epoch + 1, 0, 0, 0, 0

    def _packed(self, buffer: ShuffleBuffer, epoch: int, number: int) -> Sequences:
        n = len(buffer.encoded)
        order = np.arange(n) if self.seed is None else order_of(n, self.seed, epoch, number, 0)
        sequences, counts = pack(buffer, order, self.shape.packing, self.too_long, self.refuse_unsupervised, self.shape.seq_len)
        self.counts += counts
        if self.seed is None:
            return sequences
        return sequences.taken(order_of(len(sequences), self.seed, epoch, number, 1))

    def _buffers(self, epoch: int, file: int, row: int) -> Iterator[tuple[ShuffleBuffer, tuple[int, int]]]:
        """The documents of an epoch from a row on, and the row that follows each buffer."""
        n_files = len(self.reading.source.files)
        files = np.arange(n_files) if self.seed is None else order_of(n_files, self.seed, epoch, 2)
        encoded, places, n_tokens = list[Encoded](), list[tuple[int, int]](), 0
        for at, n_used, number, n, value in _rows(self.reading.source, files.tolist(), file, row):
            if value is None:
                continue
            found = self.reading.encode(value, self.reading.source.where(number, n))
            encoded += found
            places += [(number, n)] * len(found)
            n_tokens += sum(len(one.ids) for one in found)
            if len(encoded) >= self.buffer_documents or n_tokens >= BUFFER_TOKENS:  # a buffer ends where a row does
                yield ShuffleBuffer.of(encoded, places, self.reading.source), (at, n_used)
                encoded, places, n_tokens = [], [], 0
        if encoded:
            yield ShuffleBuffer.of(encoded, places, self.reading.source), (n_files, 0)

    def words(self) -> dict[str, str]:
        so_far = f"; so far {in_words(self.counts)}" if self.counts.n_documents else ""
        rows = f"read as they are needed, in shuffle buffers of {self.buffer_documents:,} documents{so_far}"
        return {"data": self.about, "rows": rows, "sequences": self.shape.words()}

    def close(self) -> None:
        self._stream, self._last = None, None
        self.positions.clear()
        self.reading.close()


def streamed(settings: DataSettings, reading: Reading, shape: BatchShape, seed: int, about: str) -> StreamedData:
    """The stream of a run. Its fingerprint: sizes, heads and tails of the files, and all that decides what becomes of them."""
    shuffle_seed = seed if settings.shuffle else None
    made = [asdict(shape), settings.too_long, settings.unsupervised, settings.shuffle_buffer, shuffle_seed, BUFFER_TOKENS]
    parts = [reading.source.edges_hash(), reading.identity, made]
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    refuse = settings.unsupervised == "refuse"
    return StreamedData(reading, shape, settings.too_long, refuse, settings.shuffle_buffer, shuffle_seed, about, fingerprint)


def _rows(source: DataSource, files: list[int], file: int, row: int) -> Iterator[tuple[int, int, int, int, Any]]:
    """From row `row` of file number `file` in the order `files`: (file in that order, rows of it used so far, its number, its
    row as the source counts, the value)."""
    if file >= len(files):
        return
    places = [[at, number] for at, number in enumerate(files)][file:]
    # Not `from_generator`: that makes a cache in the user's home, which may be full or read-only.
    rows = IterableDataset(ExamplesIterable(_generate, {"places": places, "source": source}))
    for example in rows.skip(row):
        yield example["at"], example["used"], example["number"], example["row"], example["value"]


def _generate(places: list[list[int]], source: DataSource) -> Iterator[tuple[int, dict[str, Any]]]:
    for at, number in places:
        for used, (row, value) in enumerate(source.rows(number), start=1):
            yield row, {"at": at, "used": used, "number": number, "row": row, "value": value}
