"""What does a folder of training data hold, file by file and row by row?

Nothing outside the folder is read, and nothing from a network.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.errors import DataError

from .columns import EXAMPLE
from .lines import COMPRESSED, JSONL, kind, rows_of
from .lines import has_rows as has_lines
from .splits import TRAIN, chosen_split
from .tables import table

PARQUET = (".parquet",)
WANTED = f"give a folder of text files, a JSONL of {EXAMPLE} or of chats, a .json list, .csv or .parquet"
_EDGE_BYTES = 2**16


def has_rows(file: Path) -> bool:
    """Whether a file is rows, and no document; DataError where it cannot be read."""
    try:
        return file.suffix in PARQUET or has_lines(file)
    except OSError as error:
        raise _unreadable(file, error) from None


@dataclass(frozen=True, slots=True)
class DataSource:
    """The files of a data set, in the order of their paths."""

    path: Path
    files: tuple[Path, ...]
    n_outside: int = 0  # links that lead elsewhere
    set_aside: Path | None = None  # the folder of the run itself, where it lies among the data
    split: str = ""  # what was chosen of a folder of several splits, and what was not, in words
    columns: Mapping[str, str] = field(default_factory=dict)  # the file's name of a column that has another here

    def rows(self, number: int) -> Iterator[tuple[int, Any]]:
        """(row, value) of file `number`: rows count from 1; a text file is row 0 and all its "text". None: no text after all."""
        file = self.files[number]
        try:
            for row, value in table(file, self.columns.values()) if file.suffix in PARQUET else rows_of(file):
                yield row, self._renamed(value) if row and self.columns and isinstance(value, dict) else value
        except OSError as error:
            raise _unreadable(file, error) from None

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with columns named as they are known here; one of a name that another has now is no more."""
        kept = {name: value for name, value in row.items() if name not in self.columns}
        return kept | {name: row[theirs] for name, theirs in self.columns.items() if theirs in row}

    def where(self, number: int, row: int) -> str:
        """How a person finds a row: `data.jsonl:3`."""
        file = self.files[number]
        return str(file) if not row else f"{file}:{row}" if kind(file) in JSONL else f"{file}: row {row}"

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
                raise _unreadable(file, error) from None
            total.update(json.dumps([name, size, content.hexdigest()]).encode())
        return total.hexdigest()


def find_files(path: Path, cache: Path, split: str | None = None, preferred: tuple[str, ...] = TRAIN) -> DataSource:
    """The files to read. Hidden ones are left out, and links out of the folder are not followed. `cache` is a folder of the run,
    and what the run writes beside it is no data either. Of several splits: `split`, or else the first of `preferred` there is."""
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        raise DataError(f"{path}: not found; {WANTED}") from None
    if root.is_file():
        if kind(root) == ".json" and not has_rows(root):
            raise DataError(f"{path}: neither a list of objects nor objects, one a line; write it as one of them")
        if split is not None:
            raise DataError(f"{path}: a file, and a split is chosen of a folder's files; leave out the split {split[:40]!r}")
        return DataSource(path, (path,))
    if not root.is_dir():
        raise DataError(f"{path}: neither a file nor a folder; {WANTED}")
    found = _found(path, root, Path(os.path.realpath(cache)).parent)
    names = [file.relative_to(path) for file in found.files]
    kept, words = chosen_split(str(path), names, [has_rows(file) for file in found.files], split, preferred)
    return replace(found, files=tuple(path / name for name in kept), split=words)


def _found(path: Path, root: Path, run: Path) -> DataSource:
    """Every file of a folder."""
    found: list[Path] = []
    n_outside, set_aside = 0, None
    if run == root:
        raise DataError(f"{path}: the run is to be written there too, and would be read as data; choose another --out")
    for folder, folders, names in os.walk(path, onerror=_raise_unreadable):
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


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error)


def _unreadable(file: Path, error: OSError) -> DataError:
    advice = "copy it again" if file.suffix in COMPRESSED and not error.strerror else "make it readable"
    return DataError(f"{file}: cannot be read ({error.strerror or str(error)[:80]}); {advice}")
