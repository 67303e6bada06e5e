"""Where are tokens kept from one run to the next?

In an Arrow file that `datasets` writes and maps into memory: a row per document. Its folder is named after all that its content
depends on, appears whole or not at all, and is made again when a byte of it has changed. Runs that begin at the same time wait for
the one that writes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
from datasets import Dataset, Features, LargeList, Value
from datasets.arrow_writer import ArrowWriter

from penstock.data.files.sources import DataSource
from runtime.errors import DataError
from runtime.files import alone, sync

from .chat import Encoded
from .packing import Array

FORMAT = 2  # of the files; one of another format is made again
BATCH_TOKENS = 2**20  # that wait to be written
_TOKENS, _ABOUT = "tokens.arrow", "about.json"


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a cache before its tokens are looked at."""

    arrow_sha256: str
    tokens_sha256: str  # of the tokens themselves, however a file holds them
    n_left_out: int  # files that are no text


@dataclass(slots=True, eq=False)
class TokenCache:
    """Documents in a cache. Only what tells them apart is in memory; tokens stay in the file until they are asked for."""

    folder: Path
    source: DataSource = field(repr=False)
    about: About
    lengths: Array = field(init=False, repr=False)
    n_learned: Array = field(init=False, repr=False)
    n_targets: Array = field(init=False, repr=False)
    n_apart: int = field(init=False, repr=False)
    _table: Any = field(init=False, repr=False)
    _chunks: list[tuple[npt.NDArray[Any], ...]] = field(init=False, repr=False)
    _first: Array = field(init=False, repr=False)  # document of each chunk

    def __post_init__(self) -> None:
        self._table = Dataset.from_file(str(self.folder / _TOKENS)).data.table
        self._chunks = [_views(batch) for batch in self._table.to_batches()]
        sizes = [len(chunk[0]) - 1 for chunk in self._chunks]
        self._first = np.cumsum([0, *sizes], dtype=np.int64)
        self.lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(chunk[0]) for chunk in self._chunks)])
        learned = [_learned(chunk[2], chunk[3]) for chunk in self._chunks]
        self.n_learned = np.concatenate([np.empty(0, np.int64), *(n for n, _ in learned)])
        self.n_targets = self.n_learned - np.concatenate([np.empty(0, np.int64), *(first for _, first in learned)])
        self.n_apart = _n_apart([(chunk[4], chunk[5]) for chunk in self._chunks])

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache, (self.folder, self.source, self.about)

    def _place(self, document: int) -> tuple[tuple[npt.NDArray[Any], ...], int]:
        chunk = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._chunks[chunk], document - int(self._first[chunk])

    def ids(self, document: int) -> npt.NDArray[np.unsignedinteger]:
        (offsets, ids, *_), i = self._place(document)
        return ids[offsets[i] : offsets[i + 1]]

    def runs(self, document: int) -> Array:
        (_, _, offsets, runs, *_), i = self._place(document)
        return runs[offsets[i] : offsets[i + 1]].astype(np.int64).reshape(-1, 2)

    def where(self, document: int) -> str:
        (*_, files, rows), i = self._place(document)
        return self.source.where(int(files[i]), int(rows[i]))


def _views(batch: pyarrow.RecordBatch) -> tuple[npt.NDArray[Any], ...]:
    """Offsets and values of ids and of runs, file, row: arrays that look into the mapped file."""
    ids, runs = batch.column("ids"), batch.column("runs")
    return (
        ids.offsets.to_numpy(),
        ids.values.to_numpy(),
        runs.offsets.to_numpy(),
        runs.values.to_numpy(),
        batch.column("file").to_numpy(),
        batch.column("row").to_numpy(),
    )


def _learned(offsets: Array, runs: npt.NDArray[Any]) -> tuple[Array, Array]:
    """Tokens to be learned in each document, and 1 where its first is one of them."""
    ends = runs.astype(np.int64).reshape(-1, 2)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends[:, 1] - ends[:, 0])])
    n_learned = total[offsets[1:] // 2] - total[offsets[:-1] // 2]
    has_any = offsets[1:] > offsets[:-1]
    first = np.zeros(len(n_learned), dtype=np.int64)
    first[has_any] = runs[offsets[:-1][has_any]] == 0
    return n_learned, first


def _n_apart(places: list[tuple[Array, Array]]) -> int:
    """Rows that became several documents, which follow one another: places are (file, row) of each document."""
    n, last, again = 0, (np.array([-1]), np.array([-1])), np.array([False])
    for files, rows in places:
        before = [np.append(old[-1], new[:-1]) for old, new in zip(last, (files, rows), strict=True)]
        same = np.append(again[-1], (files == before[0]) & (rows == before[1]))
        n += int((same[1:] & ~same[:-1]).sum())
        last, again = (files, rows), same
    return n


Row = tuple[int, int, Encoded]  # file, row, and a document of it


def cached_tokens(cache: Path, key: str, source: DataSource, wide: bool, make: Callable[[list[int]], Iterable[Row]]) -> TokenCache:
    """The documents that `key` stands for: from the cache, or made now. `make` appends to its list what it left out."""
    folder = cache / f"tokens-{hashlib.sha256(f'{FORMAT} {wide} {key}'.encode()).hexdigest()[:24]}"
    try:
        with alone(cache, "lock"):  # one run at a time looks there, and makes what is missing
            about = _whole(folder)
            if about is None:
                about = _make(folder, wide, make)
        return TokenCache(folder, source, about)
    except OSError as error:
        raise DataError(f"{cache}: tokens cannot be kept there ({error.strerror or error}); make room, or choose another") from None
    except pyarrow.ArrowException as error:
        raise DataError(f"{cache}: tokens cannot be kept there ({str(error)[:80]}); choose another folder") from None


def _whole(folder: Path) -> About | None:
    """What a cache says of itself, if all of it is there as it was written."""
    try:
        fields = json.loads((folder / _ABOUT).read_bytes())
        about = About(str(fields["arrow_sha256"]), str(fields["tokens_sha256"]), int(fields["n_left_out"]))
        is_whole = fields["sha256"] == _sum_of(about) and _sha256(folder / _TOKENS) == about.arrow_sha256
        return about if is_whole else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _sum_of(about: About) -> str:
    """SHA-256 of what a cache says of itself."""
    return hashlib.sha256(json.dumps(asdict(about), sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _make(folder: Path, wide: bool, make: Callable[[list[int]], Iterable[Row]]) -> About:
    """Write the tokens beside their place and move them there. Who comes here has the lock: what lies there is stale."""
    partial = folder.with_name(f"{folder.name}.partial")
    for stale in (partial, folder):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)
    partial.mkdir()
    try:
        left_out = list[int]()
        tokens_sha256 = _write(partial / _TOKENS, wide, make(left_out))
        about = About(_sha256(partial / _TOKENS), tokens_sha256, len(left_out))
        (partial / _ABOUT).write_text(json.dumps(asdict(about) | {"sha256": _sum_of(about)}))
        for name in (_TOKENS, _ABOUT, ""):
            sync(partial / name)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return about


def _write(file: Path, wide: bool, rows: Iterable[Row]) -> str:
    """Write documents as they come; the SHA-256 of their tokens."""
    value = Value("uint32" if wide else "uint16")
    features = Features(
        {"ids": LargeList(value), "runs": LargeList(Value("uint32")), "file": Value("int64"), "row": Value("int64")}
    )
    sha256 = hashlib.sha256()
    waiting: list[Row] = []
    n_waiting = 0
    with ArrowWriter(path=str(file), features=features) as writer:
        for row in rows:
            document = row[2]
            sha256.update(np.array([len(document.ids), len(document.runs)], dtype="<i8").tobytes())
            sha256.update(document.ids.astype("<u4").tobytes() + document.runs.astype("<u4").tobytes())
            waiting.append(row)
            n_waiting += len(document.ids)
            if n_waiting > BATCH_TOKENS or len(waiting) == writer.writer_batch_size:
                writer.write_table(_table(waiting, features))
                waiting, n_waiting = [], 0
        writer.write_table(_table(waiting, features))
        writer.finalize()
    return sha256.hexdigest()


def _table(rows: list[Row], features: Features) -> pyarrow.Table:
    def lists(arrays: list[npt.NDArray[Any]], kind: pyarrow.DataType) -> pyarrow.Array:
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        flat = np.concatenate([np.empty(0, np.int64), *arrays])
        return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat, type=kind))

    schema = features.arrow_schema
    columns = [
        lists([document.ids for _, _, document in rows], schema.field("ids").type.value_type),
        lists([document.runs.reshape(-1) for _, _, document in rows], schema.field("runs").type.value_type),
        pyarrow.array([file for file, _, _ in rows], type=pyarrow.int64()),
        pyarrow.array([row for _, row, _ in rows], type=pyarrow.int64()),
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)
