"""Rows of data files: lines of JSON, lists of JSON, CSV, Parquet, and text files, which are one row each.

They are parsed here and not by the builders of `datasets`, which infer a type for each column: those make a date of the answer
"2020-01-01" and a number of "4", and read a CSV's "NA" as nothing. What is wrong is named with its file and line.
"""

import csv
import io
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
import pyarrow.parquet

from runtime.errors import DataError

from .formats import COLUMNS, EXAMPLE, format_of_columns, not_understood

Kind = Literal["lines", "list", "csv", "parquet", "text"]
MAX_ROW_BYTES = 2**30  # a document is tokenised in memory, at a hundred times its size
ROWS_AT_ONCE = 64  # of a Parquet file
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_KINDS: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_LOOK_BYTES = 2**20
_OBJECT_A_LINE = re.compile(rb"\{[^\n]*\}[ \t\r]*\n\s*\{")


def kind_of(file: Path) -> Kind:
    """How a file's rows are read: by its suffix, and by the beginning of a .json, where a single object is a text."""
    if _suffix(file) != ".json":
        return _KINDS.get(_suffix(file), "text")
    try:
        with _opened(file) as stream:
            begins = stream.read(_LOOK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise unreadable(file, error) from None
    return "list" if begins.startswith(b"[") else "lines" if _OBJECT_A_LINE.match(begins) else "text"


def rows_of(file: Path, kind: Kind, mapped: Collection[str] = ()) -> Iterator[tuple[int, Any]]:
    """(number, value): a dict, or the bytes of a line of JSON, which a stream that resumes skips unparsed.

    The number is the line's, elsewhere the row's, counted from 1; 0 for a text file, which is empty if it is not UTF-8. Of Parquet
    only the columns that some format knows are read, and those of `mapped`. DataError names the file, and the line or row.
    """
    readers = {"lines": _lines, "list": _list, "csv": _csv, "text": _text}
    try:
        yield from _parquet(file, mapped) if kind == "parquet" else readers[kind](file)
    except OSError as error:
        raise unreadable(file, error) from None


def parsed(line: bytes, where: str) -> Any:
    """A line of JSON as Python has it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also of numbers without end
        raise DataError(f"{where}: {str(error)[:80]}; each line is {EXAMPLE} or a chat, in UTF-8") from None


def unreadable(file: Path, error: OSError) -> DataError:
    """The refusal of a file that the system or a decompressor cannot read."""
    advice = "copy it again" if file.suffix in COMPRESSED and not error.strerror else "make it readable"
    return DataError(f"{file}: cannot be read ({error.strerror or str(error)[:80]}); {advice}")


def _suffix(file: Path) -> str:
    return (Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix).lower()


def _opened(file: Path) -> IO[bytes]:
    if file.suffix in COMPRESSED:
        return io.BufferedReader(pyarrow.input_stream(str(file), compression=COMPRESSED[file.suffix]))
    return file.open("rb")


def _whole(file: Path) -> bytes:
    with _opened(file) as stream:
        content = stream.read(MAX_ROW_BYTES + 1)
    if len(content) > MAX_ROW_BYTES:
        raise DataError(f"{file}: a document above {MAX_ROW_BYTES} bytes; split it, or make it a JSONL")
    return content


def _text(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        yield 0, {"text": _whole(file).decode("utf-8-sig")}
    except UnicodeDecodeError:
        yield 0, {"text": ""}


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with _opened(file) as stream:
        for n, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if len(line) > MAX_ROW_BYTES:
                raise DataError(f"{file}:{n}: a line above {MAX_ROW_BYTES} bytes; split the document")
            if line.strip():
                yield n, line


def _list(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(json.loads(_whole(file).decode("utf-8-sig")), start=1)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {str(error)[:80]}; write it as a list of {EXAMPLE} or of chats, in UTF-8") from None


def _csv(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows below the line of names, each by the number of the line that it ends on; values are strings."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with io.TextIOWrapper(_opened(file), "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if _suffix(file) == ".tsv" else ",", strict=True)
        try:
            names = next(reader, [])
            for values in filter(None, reader):  # no empty lines
                if len(values) != len(names) or len(set(names)) != len(names):
                    raise ValueError(f"{len(values)} values for {len(names)} columns, {len(set(names))} of different names")
                yield reader.line_num, dict(zip(names, values, strict=True))
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise DataError(f"{file}:{reader.line_num}: {str(error)[:80]}; write it again as CSV, in UTF-8") from None


def _parquet(file: Path, mapped: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if format_of_columns(names) is None and not set(names) & set(mapped):
                raise not_understood(str(file), names)
            known = [name for name in names if name in COLUMNS or name in mapped]
            batches = table.iter_batches(ROWS_AT_ONCE, columns=known)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise DataError(f"{file}: not a Parquet file that can be read ({reason}); make it again") from None
