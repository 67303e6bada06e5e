"""Files of a data set: those of a folder, the split they belong to, and a hash of their content.

Nothing outside the folder is read. Splits are told apart as data sets of the Hub are laid out: the name of a split begins the name
of a shard (`train_sft-00000-of-00003.parquet`), or is a word in the name of a file or folder (`data/test/a.jsonl`). Text files are
of a split only where they have no other name (`train.txt`): a corpus may hold a text about tests.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import DataError

from .rows import Kind, kind_of, unreadable

TRAIN = ("train",)
HELD_OUT = ("val", "dev", "eval", "test")  # "val" begins "validation" too
WANTED = 'give a folder of text files, a JSONL of {"text": "..."} or of chats, a .json list, .csv or .parquet'
_SHARD = re.compile(r"(\w[\w.]*)-\d{5}-of-\d{5}\b")
_WORD = re.compile(r"(?:^|[-._ 0-9])((?:train|test|validation|valid|val|dev|eval)(?:_[a-z]+)*)(?:[-._ 0-9]|$)")
_EDGE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file, its name within the data set, and how its rows are read."""

    path: Path
    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a data set, in the order of their paths."""

    path: Path
    files: tuple[DataFile, ...]
    n_left_out: int = 0  # links out of the folder, and text files in a set of rows
    about: str = ""  # for the user: which split was chosen, and what was left out for that

    def where(self, number: int, row: int) -> str:
        """How a person finds a row of file `number`: `data.jsonl:3`."""
        file = self.files[number]
        return str(file.path) if not row else f"{file.path}:{row}" if file.kind in ("lines", "csv") else f"{file.path}: row {row}"

    def rows_only(self) -> "DataFiles":
        """Without text files, which in a folder of chats are its documentation."""
        kept = tuple(file for file in self.files if file.kind != "text")
        return replace(self, files=kept, n_left_out=self.n_left_out + len(self.files) - len(kept))

    def content_hash(self, whole: bool) -> str:
        """SHA-256 of the names and contents of all files; of their sizes, heads and tails alone if not `whole`."""
        total = hashlib.sha256()
        for file in self.files:
            try:
                with file.path.open("rb") as stream:
                    n_bytes = os.fstat(stream.fileno()).st_size
                    if whole:
                        digest = hashlib.file_digest(stream, "sha256")
                    else:
                        head, _ = stream.read(_EDGE_BYTES), stream.seek(max(0, n_bytes - _EDGE_BYTES))
                        digest = hashlib.sha256(head + stream.read(_EDGE_BYTES))
            except OSError as error:
                raise unreadable(file.path, error) from None
            total.update(json.dumps([file.name, n_bytes, digest.hexdigest()]).encode())
        return total.hexdigest()


def find_files(path: Path, run: Path, split: str | None = None, preferred: tuple[str, ...] = TRAIN) -> DataFiles:
    """The files to read: without hidden ones, links out of the folder, pipes, and what is in `run`, the folder of the run itself.

    Of a folder of several splits: those that begin with `split`, else with the first of `preferred` there is. DataError where
    there is no such file or split, or where the choice is not clear.
    """
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        raise DataError(f"{path}: not found; {WANTED}") from None
    if root.is_dir():
        return _of_split(_in_folder(path, root, Path(os.path.realpath(run))), split, preferred)
    if not root.is_file():
        raise DataError(f"{path}: neither a file nor a folder; {WANTED}")
    if split is not None:
        raise DataError(f"{path}: a file, and a split is chosen among a folder's files; leave out the split {split[:40]!r}")
    file = DataFile(path, path.suffix, kind_of(path))
    if file.kind == "text" and ".json" in path.suffixes:
        raise DataError(f"{path}: neither a list of objects nor objects, one a line; write it as one of them")
    return DataFiles(path, (file,))


def _in_folder(path: Path, root: Path, run: Path) -> DataFiles:
    if run == root:
        raise DataError(f"{path}: the run writes to this folder too, and would read that as data; choose another --out")

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found: list[DataFile] = []
    n_outside = 0
    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(os.path.realpath(Path(folder, name))) != run]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            target = Path(os.path.realpath(file))
            if not target.is_relative_to(root):
                n_outside += 1
            elif target.is_file():  # no sockets, pipes, broken or circular links
                found.append(DataFile(file, str(file.relative_to(path)), kind_of(file)))
    return DataFiles(path, tuple(sorted(found, key=lambda file: Path(file.name).parts)), n_outside)


def _of_split(found: DataFiles, asked: str | None, preferred: tuple[str, ...]) -> DataFiles:
    """The files of the splits that are asked for: `test` asks for `test` and for `test_sft`. Where there is but one split, and none
    is asked for, nothing is left out."""
    split_of = {file: _split(file) for file in found.files}
    there = sorted({split for split in split_of.values() if split is not None})
    is_one = len(there) == 1 and all(split is not None or file.kind == "text" for file, split in split_of.items())
    if asked is None and there == ["train"] and preferred == HELD_OUT:
        raise DataError(f"{found.path}: all of it is called train; say evaluation.split: train to evaluate on that")
    if asked is None and (not there or is_one or there == ["train"]):
        return found
    chosen = next(filter(None, ([s for s in there if s.startswith(p)] for p in (preferred if asked is None else (asked,)))), None)
    if chosen is None:
        listed = f"there are {', '.join(there) or 'none'}, and {list(split_of.values()).count(None)} files of no split"
        how = "with --split" if preferred == TRAIN else "in evaluation.split"
        raise DataError(f"{found.path}: no split {asked or preferred[0]!r} in it; {listed}; choose one {how}, or name the files")
    kept = tuple(file for file, split in split_of.items() if split in chosen)
    others = [split for split in there if split not in chosen]
    others += [f"{n:,} files of no split"] if (n := list(split_of.values()).count(None)) else []
    return replace(found, files=kept, about=f"of {', '.join(chosen)}" + (f", leaving out {', '.join(others)}" if others else ""))


def _split(file: DataFile) -> str | None:
    """The split that a file belongs to, by its own name or else by that of the innermost folder that names one."""
    path = Path(file.name)
    if file.kind == "text":
        return path.stem if path.suffix == ".txt" and _WORD.fullmatch(path.stem) else None
    shard = _SHARD.match(path.name)
    for part in (shard[1] if shard else path.name, *reversed(path.parent.parts)):
        if found := _WORD.search(part.lower()):
            return found[1]
    return shard[1] if shard else None
