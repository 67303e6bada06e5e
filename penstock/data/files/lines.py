"""Which rows does a file of text hold: lines of JSON, a list of it, a table with commas, or one document?

They are parsed here, so that what is wrong is named by file and line. A file may be compressed.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow

from runtime.errors import DataError

from .columns import EXAMPLE

MAX_DOCUMENT_BYTES = 2**30  # a document is tokenised in memory, at a hundred times its size
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
JSONL, JSON, CSV = (".jsonl", ".ndjson"), (".json",), (".csv", ".tsv")
_LOOK_BYTES = 2**16
_BLANKS = re.compile(r"[ \t\r\n]*")
Row = tuple[int, Any]


def kind(file: Path) -> str:
    """The suffix that says what a file holds, whether it is compressed or not."""
    return Path(file.stem).suffix.lower() if file.suffix in COMPRESSED else file.suffix.lower()


def opened(file: Path) -> IO[bytes]:
    """The content of a file, decompressed; OSError for a damaged one, then or on reading."""
    if file.suffix in COMPRESSED:
        return io.BufferedReader(pyarrow.input_stream(str(file), compression=COMPRESSED[file.suffix]))
    return file.open("rb")


def rows_of(file: Path) -> Iterator[Row]:
    """(row, value) of each row, counted from 1; a document is row 0 and all its "text", or None if it is no text after all."""
    if kind(file) in JSONL:
        return _lines(file)
    if kind(file) in CSV:
        return _commas(file)
    match _json(file) if kind(file) in JSON else "document":
        case "list":
            return _list(file)
        case "lines":
            return _lines(file)
    return iter([(0, _document(file))])


def has_rows(file: Path) -> bool:
    """Whether a file of text is rows, and no document."""
    return kind(file) in JSONL + CSV or (kind(file) in JSON and _json(file) != "document")


def _json(file: Path) -> str:
    """What a .json is by its beginning: a `list`, several objects, one a line (`lines`), or a `document`, as a single one is."""
    with opened(file) as stream:
        begins = stream.read(_LOOK_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    if begins.startswith("["):
        return "list"
    first, _, more = begins.partition("\n")
    if not more and len(begins) > _LOOK_BYTES // 2:  # a line beyond what was looked at
        return "lines" if first.startswith("{") else "document"
    return "lines" if first.rstrip().endswith("}") and more.lstrip().startswith("{") else "document"


def _whole(file: Path) -> bytes:
    with opened(file) as stream:
        content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{file}: a document above {MAX_DOCUMENT_BYTES} bytes; split it, or make it a JSONL")
    return content


def _document(file: Path) -> dict[str, str] | None:
    try:
        return {"text": _whole(file).decode("utf-8-sig")}
    except UnicodeDecodeError:
        return None


def _lines(file: Path) -> Iterator[Row]:
    """Each line of a JSONL file that is not empty."""
    with opened(file) as stream:
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


def _list(file: Path) -> Iterator[Row]:
    """Each object of a list, one at a time: no more than one is held besides the text."""
    n, decoder, content = 0, json.JSONDecoder(), _whole(file)
    try:
        text = content.decode("utf-8-sig")
        at = _after_blanks(text, text.index("[") + 1)
        is_more = text[at : at + 1] != "]"
        while is_more:
            value, at = decoder.raw_decode(text, at)
            n += 1
            yield n, value
            at = _after_blanks(text, at)
            is_more = text[at : at + 1] == ","
            at = _after_blanks(text, at + 1) if is_more else at
        if text[at : at + 1] != "]" or _after_blanks(text, at + 1) < len(text):
            raise ValueError("the list does not end where it should")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: after row {n}: {str(error)[:80]}; it is to be a list of {EXAMPLE} or of chats, in UTF-8"
        ) from None


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _commas(file: Path) -> Iterator[Row]:
    """Each row below the line of names; values are text."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    n = 0
    try:
        with io.TextIOWrapper(opened(file), "utf-8-sig", newline="") as text:
            lines = iter(lambda: text.readline(MAX_DOCUMENT_BYTES), "")
            found = csv.reader(lines, delimiter="\t" if kind(file) == ".tsv" else ",", strict=True)
            names = next(found, [])
            if len(set(names)) != len(names):
                raise ValueError("two columns have one name")
            for row in found:
                if row and len(row) != len(names):  # not an empty line
                    raise ValueError(f"{len(row)} values, and there are {len(names)} columns")
                n += 1
                if row:
                    yield n, dict(zip(names, row, strict=True))
    except (csv.Error, ValueError) as error:
        raise DataError(f"{file}: after row {n}: {str(error)[:80]}; write it again as CSV, in UTF-8") from None
