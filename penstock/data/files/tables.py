"""What does a Parquet file hold, row by row?

A few bytes of Parquet can stand for many: what a part of a table says that it holds is looked at before it is read, a text that is
said often is held once, and a row is measured before Python gets it.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from runtime.errors import DataError

from .columns import COLUMNS, format_by, not_understood
from .lines import MAX_DOCUMENT_BYTES

MAX_GROUP_BYTES = 4 * MAX_DOCUMENT_BYTES  # of a table, decompressed; what may have to be in memory at once
ROWS_AT_ONCE = 2048  # of a table, at most; texts that many rows share are looked up again for each batch of them
BATCH_BYTES = 2**24  # of the rows that are read at a time, if they are of the usual size
VALUE_BYTES = 64  # that Python takes for a value besides its text
STREAM_BYTES = 2**20  # of a column that are read at a time


def table(file: Path, also: Collection[str] = ()) -> Iterator[tuple[int, Any]]:
    """Each row of a Parquet file, with the columns that some format knows, and those of `also`."""
    try:
        about = pyarrow.parquet.read_metadata(file)
        columns = [about.schema.column(i) for i in range(len(about.schema))]
        found = dict.fromkeys(_name(column.path) for column in columns)
        known = {name for name in found if name in COLUMNS or name in also}
        if not any(name in also for name in found) and format_by(found) is None:
            raise not_understood(str(file), found)
        wanted = [i for i, column in enumerate(columns) if _name(column.path) in known]
        # A text that many rows share is held once: a file may say it a million times in a few bytes.
        texts = [columns[i].path for i in wanted if columns[i].physical_type == "BYTE_ARRAY"]
        options = {"read_dictionary": texts, "buffer_size": STREAM_BYTES}
        n = 0
        with pyarrow.parquet.ParquetFile(file, metadata=about, **options) as rows:
            names = [name for name in rows.schema_arrow.names if name in known]
            for group in range(about.num_row_groups):
                n_rows = _rows_at_once(file, about.row_group(group), group)
                for batch in rows.iter_batches(n_rows, [group], names, use_threads=False):
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
