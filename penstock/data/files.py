"""Files of a data set: discovery in a folder, splits, content hash, and rows.

Files outside the folder are never read. Splits follow the layout of the Hugging Face Hub: the name of a split starts the name of a
shard (`train_sft-00000-of-00003.parquet`), or is a word in the name of a file or folder (`data/test/a.jsonl`). A text file belongs
to a split only if the split is its whole name (`train.txt`), because a corpus may hold a text about tests.

A folder of `Dataset.save_to_disk` has the Arrow files that its `state.json` lists, and a `DatasetDict` the splits of its
`dataset_dict.json`. Their JSON, and that of the Hub, describes the data and is never read as data.

Rows are parsed here instead of by the builders of `datasets`, which infer column types: they turn the answer "2020-01-01" into a
date, "4" into a number, and a CSV's "NA" into null. Errors name the file and line.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from penstock.runtime.errors import DataError, user_code
from penstock.runtime.files import read_whole

from .formats import COLUMNS, EXAMPLE, not_understood, shown

TRAIN = ("train",)
HELD_OUT = ("val", "dev", "eval", "test")  # "val" matches "validation" too
WANTED = 'give a folder of text files, a JSONL of {"text": "..."} or of chats, a .json list, .csv, .parquet or .arrow'
_SHARD = re.compile(r"(\w[\w.]*)-\d{5}-of-\d{5}\b")
_WORD = re.compile(r"(?:^|[-._ 0-9])((?:train|test|validation|valid|val|dev|eval)(?:_[a-z]+)*)(?:[-._ 0-9]|$)")
_EDGE_BYTES = 2**16
Kind = Literal["lines", "list", "object", "csv", "parquet", "arrow", "text", "program"]
MAX_ROW_BYTES = 2**30  # documents are tokenised in memory, at 100 times their size
ROWS_AT_ONCE = 64  # of Parquet and Arrow
MAX_EXPANSION = 1000  # decoded bytes of a table by those of its file; natural text compresses 2 to 10 times
STATE, SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk`
METADATA = {STATE, SPLITS, "dataset_info.json", "dataset_infos.json"}
NOT_TEXT = {b"%PDF": "a PDF", b"{\\rtf": "RTF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_KINDS: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".csv": "csv", ".tsv": "csv"}
_KINDS |= {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_LOOK_BYTES = 2**20
_OBJECT_A_LINE = re.compile(rb"\{[^\n]*\}[ \t\r]*\n\s*\{")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a row: seconds and bytes of its rendering by a chat template, bytes of its columns in a table."""

    row_s: float = 10.0
    row_bytes: int = 64 * 10**6


LIMITS = Limits()
FIRST_ROWS = 8  # rows that identify a program's stream


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file, its name within the data set, and its row format."""

    path: Path
    name: str
    kind: Kind
    split: str | None = None  # in a `DatasetDict`
    rows: Iterable[Any] = ()  # of a program, if the kind is `program`

    def numbered_rows(self, mapped: Collection[str] | None, most_bytes: int) -> Iterator[tuple[int, Any]]:
        """Yield the rows as `rows_of` does, those of a program without nulls in structs."""
        if self.kind != "program":
            yield from rows_of(self.path, self.kind, mapped, most_bytes)
        with user_code(str(self.path)):
            yield from ((n, without_nulls(row)) for n, row in enumerate(self.rows, start=1))


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files of a data set, sorted by path."""

    path: Path
    files: tuple[DataFile, ...]
    n_left_out: int = 0  # metadata, and text files in a set of rows
    about: str = ""  # for the user: the chosen split and the omitted ones
    limits: Limits = LIMITS

    def where(self, number: int, row: int) -> str:
        """Return the place of a row of file `number`, for the user. Example: `data.jsonl:3`."""
        file = self.files[number]
        return str(file.path) if not row else f"{file.path}:{row}" if file.kind in ("lines", "csv") else f"{file.path}: row {row}"

    def rows_only(self) -> "DataFiles":
        """Return these files without text files: in a folder of chats, those are documentation."""
        row_files = tuple(file for file in self.files if file.kind != "text")
        return replace(self, files=row_files, n_left_out=self.n_left_out + len(self.files) - len(row_files))

    def first_rows(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, first readable row with all columns) of each file of rows. DataError for a file without one."""
        for number, file in enumerate(self.files):
            value, where = None, ""
            for n, value in file.numbered_rows(None, self.limits.row_bytes) if file.kind != "text" else ():
                where = self.where(number, n)
                with suppress(DataError):  # skip a bad row
                    yield where, parse_line(value, where)
                    break
            else:
                parse_line(value, where)

    def content_hash(self, full: bool) -> str:
        """SHA-256 of names and contents of all files. If not `full`: of names, sizes, heads and tails."""
        total = hashlib.sha256()
        for file in self.files:
            if file.kind == "program":  # its first rows
                rows = [row for _, row in islice(file.numbered_rows(None, self.limits.row_bytes), FIRST_ROWS)]
                return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
            try:
                with file.path.open("rb") as stream:
                    n_bytes = os.fstat(stream.fileno()).st_size
                    if full:
                        digest = hashlib.file_digest(stream, "sha256")
                    else:
                        head, _ = stream.read(_EDGE_BYTES), stream.seek(max(0, n_bytes - _EDGE_BYTES))
                        digest = hashlib.sha256(head + stream.read(_EDGE_BYTES))
            except OSError as error:
                raise read_error(file.path, error) from None
            total.update(json.dumps([file.name, n_bytes, digest.hexdigest()]).encode())
        return total.hexdigest()


def find_files(path: Path, run: Path, split: str | None = None, preferred: tuple[str, ...] = TRAIN) -> DataFiles:
    """Return the files to read, without hidden files, pipes, and the run's output folder `run`.

    In a folder with several splits: the splits that begin with `split`, or with the first match of `preferred`. DataError for a
    missing file or split, an ambiguous choice, or a link out of the folder.
    """
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: circular links
        raise DataError(f"{path}: not found; {WANTED}") from None
    if root.is_dir():
        return _of_split(_in_folder(path, root, Path(os.path.realpath(run))), split, preferred)
    if not root.is_file():
        raise DataError(f"{path}: neither a file nor a folder; {WANTED}")
    if split is not None:
        raise DataError(f"{path}: a file, and a split is chosen among a folder's files; leave out the split {split[:40]!r}")
    return DataFiles(path, (DataFile(path, path.suffix, kind_of(path)),))


def _in_folder(path: Path, root: Path, run: Path) -> DataFiles:
    if run == root:
        raise DataError(f"{path}: the run writes to this folder too, and would read that as data; choose another --out")

    def refuse(error: OSError) -> None:
        raise read_error(Path(error.filename), error)

    files, splits, n_metadata = list[DataFile](), dict[Path, str](), 0
    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(os.path.realpath(Path(folder, name))) != run]
        if SPLITS in names:
            names.remove(SPLITS)
            splits |= {Path(folder, split): split for split in _listed(Path(folder, SPLITS), "splits", folders)}
        if STATE in names and "dataset_info.json" in names:  # without cached tables next to the saved ones
            names = _listed(Path(folder, STATE), "_data_files", names)
        n_metadata, names = n_metadata + len(METADATA.intersection(names)), [name for name in names if name not in METADATA]
        for file in (Path(folder, name) for name in (*folders, *names) if not name.startswith(".")):
            target = Path(os.path.realpath(file))
            if not target.is_relative_to(root):
                advice = "copy its target, or give the target a --data of its own"
                raise DataError(f"{file}: a link out of the folder, which is not followed; {advice}")
            if target.is_file():  # no sockets, pipes, broken or circular links
                files.append(DataFile(file, str(file.relative_to(path)), kind_of(file), splits.get(file.parent)))
    return DataFiles(path, tuple(sorted(files, key=lambda file: Path(file.name).parts)), n_metadata)


def _listed(file: Path, key: str, names: Collection[str]) -> list[str]:
    """Return the names that a metadata file of `datasets` lists under a key. DataError if one of them is missing in its folder."""
    try:
        listed = json.loads(read_whole(file, MAX_ROW_BYTES))[key]
        listed = [str(entry if isinstance(entry, str) else entry["filename"]) for entry in listed]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        raise DataError(f"{file}: does not list the files of a data set; save it again with save_to_disk") from None
    if missing := [name for name in listed if name not in names]:
        raise DataError(f"{file}: lists {missing[0][:80]!r}, which is not in its folder; copy the folder again")
    return listed


def _of_split(data: DataFiles, name: str | None, preferred: tuple[str, ...]) -> DataFiles:
    """Return the files of the requested splits. `test` includes `test_sft`. By default, a folder with one split is used whole."""
    split_of = {file: file.split or _split(file) for file in data.files}
    splits = sorted({split for split in split_of.values() if split is not None})
    is_one = len(splits) == 1 and all(split is not None or file.kind == "text" for file, split in split_of.items())
    if name is None and splits == ["train"] and preferred == HELD_OUT:
        raise DataError(f"{data.path}: all of it is called train; say evaluation.split: train to evaluate on that")
    if name is None and (not splits or is_one or splits == ["train"]):
        return data
    chosen = next(filter(None, ([s for s in splits if s.startswith(p)] for p in (preferred if name is None else (name,)))), None)
    if chosen is None:
        listed = f"there are {', '.join(splits) or 'none'}, and {list(split_of.values()).count(None)} files of no split"
        how = "with --split" if preferred == TRAIN else "in evaluation.split"
        raise DataError(f"{data.path}: no split {name or preferred[0]!r} in it; {listed}; choose one {how}, or name the files")
    files = tuple(file for file, split in split_of.items() if split in chosen)
    omitted = [split for split in splits if split not in chosen]
    omitted += [f"{n:,} file{'s' * (n != 1)} of no split"] if (n := list(split_of.values()).count(None)) else []
    return replace(data, files=files, about=f"of {', '.join(chosen)}" + (f", leaving out {', '.join(omitted)}" if omitted else ""))


def _split(file: DataFile) -> str | None:
    """Return the split of a file: from its name, or from the innermost folder with a split name."""
    path = Path(file.name)
    if file.kind == "text":
        return path.stem if path.suffix == ".txt" and _WORD.fullmatch(path.stem) else None
    shard = _SHARD.match(path.name)
    for part in (shard[1] if shard else path.name, *reversed(path.parent.parts)):
        if match := _WORD.search(part.lower()):
            return match[1]
    return shard[1] if shard else None


# -- rows ------------------------------------------------------------------------------------------------------------------


def kind_of(file: Path) -> Kind:
    """Return the row format of a file: by suffix, and for .json by its beginning."""
    if _suffix(file) != ".json":
        return _KINDS.get(_suffix(file), "text")
    try:
        with _opened(file) as stream:
            begins = stream.read(_LOOK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise read_error(file, error) from None
    return "list" if begins.startswith(b"[") else "lines" if _OBJECT_A_LINE.match(begins) else "object"


def rows_of(
    file: Path, kind: Kind, mapped: Collection[str] | None = (), most_bytes: int = LIMITS.row_bytes
) -> Iterator[tuple[int, Any]]:
    """Yield (number, value). The value is a dict, an unparsed line of JSON (a resumed stream skips lines without parsing), or the
    DataError of a text file that is not UTF-8.

    The number is a line number or row number, starting at 1; 0 for a whole file. Tables: only columns of known formats and of
    `mapped` are read, or all if it is None. DataError names the file, and the line or row.
    """
    readers = {"lines": _lines, "list": _list, "object": _object, "csv": _csv, "text": _text}
    try:
        yield from readers[kind](file) if kind in readers else _table(file, kind, mapped, most_bytes)
    except OSError as error:
        raise read_error(file, error) from None


def parse_line(line: Any, where: str) -> Any:
    """Parse a line of JSON. Other values of `rows_of` are returned, or raised if they are errors."""
    if isinstance(line, DataError):
        raise line
    if not isinstance(line, bytes):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError includes endless numbers
        raise DataError(f"{where}: {str(error)[:80]}; each line is {EXAMPLE} or a chat, in UTF-8") from None


def read_error(file: Path, error: OSError) -> DataError:
    """Return the error for a file that the system or a decompressor cannot read."""
    advice = "copy it again" if file.suffix in COMPRESSED and not error.strerror else "make it readable"
    return DataError(f"{file}: cannot be read ({error.strerror or str(error)[:80]}); {advice}")


def _suffix(file: Path) -> str:
    return (Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix).lower()


def _opened(file: Path) -> IO[bytes]:
    if file.suffix in COMPRESSED:
        return io.BufferedReader(pyarrow.input_stream(str(file), compression=COMPRESSED[file.suffix]))
    return file.open("rb")


def _read_all(file: Path) -> bytes:
    with _opened(file) as stream:
        content = stream.read(MAX_ROW_BYTES + 1)
    if len(content) > MAX_ROW_BYTES:
        raise DataError(f"{file}: a document above {MAX_ROW_BYTES} bytes; split it, or make it a JSONL")
    return content


def _text(file: Path) -> Iterator[tuple[int, Any]]:
    content = _read_all(file).removeprefix(b"\xef\xbb\xbf")
    format = next((name for magic, name in NOT_TEXT.items() if content.startswith(magic)), None)
    try:
        if format or b"\0" in content:  # UTF-16 may be UTF-8 with NULs
            raise ValueError
        yield 0, {"text": content.decode()}
    except ValueError:
        advice = "convert it, move it away, or skip such files with --bad-rows SHARE"
        yield 0, DataError(f"{file}: no UTF-8 text, but {format or 'another encoding or no text'}; {advice}")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with _opened(file) as stream:
        for n, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if len(line) > MAX_ROW_BYTES:
                raise DataError(f"{file}:{n}: a line above {MAX_ROW_BYTES} bytes; split the document")
            if line.strip():
                yield n, line


def _json(file: Path, advice: str) -> Any:
    try:
        return json.loads(_read_all(file).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {str(error)[:80]}; write {advice}, in UTF-8") from None


def _list(file: Path) -> Iterator[tuple[int, Any]]:
    yield from enumerate(_json(file, f"it as a list of {EXAMPLE} or of chats"), start=1)


def _csv(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield rows below the header, numbered by their last line. Values are strings."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with io.TextIOWrapper(_opened(file), "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if _suffix(file) == ".tsv" else ",", strict=True)
        try:
            names = next(reader, [])
            for values in filter(None, reader):  # skip empty lines
                if len(values) != len(names) or len(set(names)) != len(names):
                    raise ValueError(f"{len(values)} values for {len(names)} columns, {len(set(names))} of different names")
                yield reader.line_num, dict(zip(names, values, strict=True))
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            raise DataError(f"{file}:{reader.line_num}: {str(error)[:80]}; write it again as CSV, in UTF-8") from None


def _object(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the row of a file that is one JSON object. DataError if the object is no row."""
    row = _json(file, "its rows as a list, or one a line")
    if not isinstance(row, dict) or not any(name in COLUMNS for name in row):
        keys = f"an object with the keys {shown(row)}" if isinstance(row, dict) else "no object"
        raise DataError(f"{file}: no rows found, it is {keys}; write its rows as a list, or one a line")
    yield 0, row


def _table(file: Path, kind: Kind, mapped: Collection[str] | None, most_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a Parquet or Arrow file, as JSON has them."""
    n_decoded, most_decoded = 0, max(most_bytes, MAX_EXPANSION * file.stat().st_size)
    number, advice = 0, "if that is so, allow more with --max-row-mb"
    try:
        for batch in map(_without_dictionaries, (_parquet if kind == "parquet" else _arrow)(file, mapped)):
            rows = range(batch.num_rows) if batch.nbytes > most_bytes else ()
            if (large := next((i for i in rows if batch.slice(i, 1).nbytes > most_bytes), None)) is not None:
                raise DataError(f"{file}: row {number + large + 1}: above {most_bytes / 1e6:g} MB; {advice}")
            if (n_decoded := n_decoded + batch.nbytes) > most_decoded:
                excess = f"more than {most_decoded / 1e6:,.0f} MB, {MAX_EXPANSION:,} times the size of the file or more"
                raise DataError(f"{file}: {excess}; {advice}")
            for row in table_rows(batch):
                yield (number := number + 1), row
    except (pyarrow.ArrowException, OSError) as error:
        reason, format = " ".join(str(error).split())[:80], {"parquet": "a Parquet", "arrow": "an Arrow"}[kind]
        raise DataError(f"{file}: not {format} file that can be read ({reason}); make it again") from None


def table_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow record batch, as JSON has them."""
    batch = _without_dictionaries(batch)
    for row in batch.to_pylist():
        yield {field.name: _plain(row[field.name], field.type) for field in batch.schema}


def without_nulls(value: Any, is_row: bool = True) -> Any:
    """Return a row without the nulls in its structs: `datasets` has the keys of all rows in each row."""
    if isinstance(value, dict):
        return {key: without_nulls(item, False) for key, item in value.items() if is_row or item is not None}
    return [without_nulls(item, False) for item in value] if isinstance(value, list) else value


def _parquet(file: Path, mapped: Collection[str] | None) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(file) as table:
        groups = (table.metadata.row_group(i) for i in range(table.num_row_groups))
        largest = max((group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns)), default=0)
        n = max(1, min(ROWS_AT_ONCE, MAX_ROW_BYTES // max(1, largest)))  # a value has at most the size of its chunk's dictionary
        yield from table.iter_batches(n, columns=_read_columns(file, table.schema_arrow.names, mapped))


def _arrow(file: Path, mapped: Collection[str] | None) -> Iterator[Any]:
    """Yield batches of an Arrow stream, as `datasets` writes it, or an Arrow file."""
    with pyarrow.memory_map(str(file)) as source:
        is_file, _ = source.read(6) == b"ARROW1", source.seek(0)
        reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source)
        names = _read_columns(file, reader.schema.names, mapped)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in (batch.select(names) for batch in batches):
            yield from (batch.slice(first, ROWS_AT_ONCE) for first in range(0, batch.num_rows, ROWS_AT_ONCE))


def _without_dictionaries(batch: Any) -> Any:
    """Return a batch with repeated values written out, as large as its rows."""
    columns = [column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column for column in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)


def _read_columns(file: Path, names: list[str], mapped: Collection[str] | None) -> list[str]:
    known = [name for name in names if mapped is None or name in COLUMNS or name in mapped]
    if not known:
        raise not_understood(str(file), names)
    return known


def _plain(value: Any, kind: Any) -> Any:
    """Convert a value of a table to JSON's. Nulls in structs are left out: a table has the keys of all rows in each row."""
    if value is None:
        return None
    if isinstance(kind, getattr(pyarrow, "JsonType", ())):
        return json.loads(value)
    kind = getattr(kind, "storage_type", kind)  # of an extension
    if isinstance(value, dict):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pyarrow.types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value if item is not None}
    return [_plain(item, kind.value_type) for item in value] if isinstance(value, list) else value
