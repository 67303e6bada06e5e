"""What does a folder of training data hold, file by file and row by row?

A file of text is one document. Lines of JSONL are parsed here, so that what is wrong is named by file and line; tables come
through pyarrow, a few rows at a time. A few bytes of Parquet can stand for many: what a part of a table says that it holds is
looked at before it is read, a text that is said often is held once, and a row is measured before Python gets it.

Nothing outside the folder is read, and nothing from a network.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from runtime.errors import DataError

MAX_DOCUMENT_BYTES = 2**30  # a document is tokenised in memory, at a hundred times its size
MAX_GROUP_BYTES = 4 * MAX_DOCUMENT_BYTES  # of a table, decompressed; what may have to be in memory at once
ROWS_AT_ONCE = 2048  # of a table, at most; texts that many rows share are looked up again for each batch of them
BATCH_BYTES = 2**24  # of the rows that are read at a time, if they are of the usual size
VALUE_BYTES = 64  # that Python takes for a value besides its text
STREAM_BYTES = 2**20  # of a column that are read at a time
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
EXAMPLE = '{"text": "..."}'
COLUMNS = ("text", "messages", "conversations", "instruction", "input", "output", "system", "history", "tools")
_WANTED = f"give a folder of text files, a JSONL of {EXAMPLE} or of chats, or .parquet"
_EDGE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class DataSource:
    """The files of a data set, in the order of their paths."""

    path: Path
    files: tuple[Path, ...]
    n_outside: int = 0  # links that lead elsewhere
    set_aside: Path | None = None  # the folder of the run itself, where it lies among the data

    def rows(self, number: int) -> Iterator[tuple[int, Any]]:
        """(row, value) of file `number`: rows count from 1; a text file is row 0 and all its "text". None: no text after all."""
        file = self.files[number]
        try:
            if file.suffix in JSONL:
                yield from _lines(file)
            elif file.suffix in PARQUET:
                yield from _table(file)
            elif file.stat().st_size > MAX_DOCUMENT_BYTES:
                raise DataError(f"{file}: a document above {MAX_DOCUMENT_BYTES} bytes; split it, or make it a JSONL")
            else:
                yield 0, _text(file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error}); make it readable") from None

    def where(self, number: int, row: int) -> str:
        """How a person finds a row: `data.jsonl:3`."""
        file = self.files[number]
        return str(file) if not row else f"{file}: row {row}" if file.suffix in PARQUET else f"{file}:{row}"

    def content_hash(self) -> str:
        """SHA-256 of every file's name and content."""
        return self._hash(whole=True)

    def edges_hash(self) -> str:
        """The same of sizes, heads and tails alone: for sets too large to be read twice."""
        return self._hash(whole=False)

    def _hash(self, whole: bool) -> str:
        total = hashlib.sha256()
        for file in self.files:
            name = str(file.relative_to(self.path)) if file != self.path else file.suffix
            content = hashlib.sha256()
            try:
                with file.open("rb") as stream:
                    size = os.fstat(stream.fileno()).st_size
                    if whole:
                        while piece := stream.read(2**20):
                            content.update(piece)
                    else:
                        content.update(stream.read(_EDGE_BYTES))
                        stream.seek(max(0, size - _EDGE_BYTES))
                        content.update(stream.read(_EDGE_BYTES))
            except OSError as error:
                raise DataError(f"{file}: cannot be read ({error.strerror}); make it readable") from None
            total.update(json.dumps([name, size, content.hexdigest()]).encode())
        return total.hexdigest()


def find_files(path: Path, cache: Path) -> DataSource:
    """The files to read. Hidden ones are left out, and links out of the folder are not followed. `cache` is a folder of the run,
    and what the run writes beside it is no data either."""
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        raise DataError(f"{path}: not found; {_WANTED}") from None
    if root.is_file():
        if root.suffix == ".json":
            raise DataError(f"{path}: one object a line is needed; name it .jsonl if it is that")
        return DataSource(path, (path,))
    if not root.is_dir():
        raise DataError(f"{path}: neither a file nor a folder; {_WANTED}")
    found: list[Path] = []
    n_outside, set_aside = 0, None
    run = Path(os.path.realpath(cache)).parent
    if run == root:
        raise DataError(f"{path}: the run is to be written there too, and would be read as data; choose another --out")
    for folder, folders, names in os.walk(path, onerror=_unreadable):
        if Path(os.path.realpath(folder)) == run:
            set_aside = Path(folder)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            target = Path(os.path.realpath(file))  # a circle of links is no file and no error
            if not target.is_relative_to(root):
                n_outside += 1
            elif target.is_file():  # no sockets, pipes or broken links
                found.append(file)
    return DataSource(path, tuple(sorted(found, key=lambda file: file.relative_to(path).parts)), n_outside, set_aside)


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable")


def _text(file: Path) -> dict[str, str] | None:
    try:
        return {"text": file.read_bytes().decode("utf-8-sig")}
    except UnicodeDecodeError:
        return None


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Each line of a JSONL file that is not empty."""
    with file.open("rb") as stream:
        n = 0
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            n += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{file}:{n}: a line above {MAX_DOCUMENT_BYTES} bytes; split the document")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # also numbers without end
                raise DataError(f"{file}:{n}: {str(error)[:80]}; each line is {EXAMPLE} or a chat, in UTF-8") from None
            yield n, value


def _table(file: Path) -> Iterator[tuple[int, Any]]:
    """Each row of a Parquet file, with the columns that some format knows."""
    try:
        about = pyarrow.parquet.read_metadata(file)
        columns = [about.schema.column(i) for i in range(len(about.schema))]
        wanted = [i for i, column in enumerate(columns) if _name(column.path) in COLUMNS]
        if not wanted:
            found = ", ".join(dict.fromkeys(_name(column.path) for column in columns))[:80]
            raise DataError(f"{file}: its columns are {found}; text, messages, conversations or instruction is needed")
        # A text that many rows share is held once: a file may say it a million times in a few bytes.
        texts = [columns[i].path for i in wanted if columns[i].physical_type == "BYTE_ARRAY"]
        options = {"read_dictionary": texts, "buffer_size": STREAM_BYTES}
        n = 0
        with pyarrow.parquet.ParquetFile(file, metadata=about, **options) as table:
            names = [name for name in table.schema_arrow.names if name in COLUMNS]
            for group in range(about.num_row_groups):
                n_rows = _rows_at_once(file, about.row_group(group), group)
                for batch in table.iter_batches(n_rows, [group], names, use_threads=False):
                    for row in _rows_of(file, batch, n):
                        n += 1
                        yield n, row
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, IndexError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise DataError(f"{file}: not a Parquet file that can be read ({reason}); make it again") from None


def _name(path: str) -> str:
    """The column of a table to which a part belongs: `messages` of `messages.list.element.role`."""
    return path.split(".")[0]


def _rows_at_once(file: Path, about: Any, group: int) -> int:
    """How many rows of a group to read together; DataError where even one may hold more than there is memory for."""
    # Not the sizes of columns: pyarrow ends the process where a damaged file says what they cannot be.
    n_bytes, n_rows = int(about.total_byte_size), int(about.num_rows)
    if n_bytes > MAX_GROUP_BYTES:
        raise DataError(
            f"{file}: row group {group + 1} holds {n_bytes:,} bytes, and {MAX_GROUP_BYTES:,} are the most; "
            "write it with smaller row groups"
        )
    if n_bytes > MAX_DOCUMENT_BYTES:
        return 1
    return min(ROWS_AT_ONCE, max(1, BATCH_BYTES * n_rows // max(1, n_bytes)))


def _rows_of(file: Path, batch: Any, n_before: int) -> Iterator[Any]:
    """The rows of a batch as Python has them, one at a time; DataError for one that is too large for that."""
    is_small = _size(batch) <= MAX_DOCUMENT_BYTES
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        if not is_small and _size(row) > MAX_DOCUMENT_BYTES:
            raise DataError(f"{file}: row {n_before + i + 1}: a row above {MAX_DOCUMENT_BYTES} bytes; split the document")
        yield from row.to_pylist()


def _size(batch: Any) -> int:
    """Bytes that rows would take in Python, in which nothing is shared."""
    n, arrays = 0, list(batch.columns)
    while arrays:
        array = arrays.pop()
        n += VALUE_BYTES * len(array)
        if isinstance(array, pyarrow.DictionaryArray):
            lengths = pyarrow.compute.binary_length(array.dictionary).cast("int64")
            n += pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0
        elif isinstance(array, pyarrow.StructArray):
            arrays += array.flatten()
        elif isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
            arrays.append(array.flatten())
        else:
            n += array.nbytes
    return n
