"""Which files of a folder are to be trained on, where some are for testing?

As data sets of the Hub are laid out: the name of a split begins the name of a shard (`train_sft-00000-of-00003.parquet`), or it is
a word of a file's or a folder's name (`data/test/a.jsonl`, `gsm8k_train.json`). Files of text are told apart only where they are
called nothing else (`train.txt`): a corpus may hold a text about tests.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import DataError

TRAIN = ("train",)
HELD_OUT = ("val", "dev", "eval", "test")  # "val" begins "validation" too
_SHARD = re.compile(r"(\w[\w.]*)-\d{5}-of-\d{5}\b")
_WORD = re.compile(r"(?:^|[-._ 0-9])((?:train|test|validation|valid|val|dev|eval)(?:_[a-z]+)*)(?:[-._ 0-9]|$)")
_FEW = 8  # names in a line


def chosen_split(
    folder: str, names: Sequence[Path], are_rows: Sequence[bool], asked: str | None, preferred: tuple[str, ...]
) -> tuple[list[Path], str]:
    """The files to read of those in a folder, and in words what was left out; DataError where nobody can tell which.

    `test` asks for `test` and for `test_sft`. Where there is but one split, and none is asked for, nothing is left out.
    """
    splits = {name: _split(name, is_row) for name, is_row in zip(names, are_rows, strict=True)}
    there = sorted({split for split in splits.values() if split is not None})
    listed = ", ".join(there[:_FEW]) + (" and more" if len(there) > _FEW else "")
    has_others = any(is_row and splits[name] is None for name, is_row in zip(names, are_rows, strict=True))
    if asked is None and there == ["train"] and preferred == HELD_OUT:
        raise DataError(f"{folder}: all of it is called train; say evaluation.split: train to evaluate on that")
    if asked is None and (len(there) <= 1 - has_others or there == ["train"]):
        return list(names), ""
    for prefix in (asked,) if asked is not None else preferred:
        if chosen := [split for split in there if split.startswith(prefix)]:
            others = [split for split in there if split not in chosen]
            n_none = sum(split is None for split in splits.values())
            others += [f"{n_none:,} files of no split"] * (n_none > 0)
            return [name for name in names if splits[name] in chosen], _words(chosen, others)
    if asked is not None:
        raise DataError(f"{folder}: no split {asked[:40]!r} in it; there are: {listed or 'none, by the names of its files'}")
    besides = "" if len(there) > 1 else ", and files of no split"
    how = "with --split" if preferred == TRAIN else "in evaluation.split"
    raise DataError(f"{folder}: its splits are {listed}{besides}, none of them {preferred[0]}; choose one {how}, or name the files")


def _words(chosen: list[str], others: list[str]) -> str:
    return f"of {', '.join(chosen)}" + (f", leaving out {', '.join(others)}" if others else "")


def _split(name: Path, is_row: bool) -> str | None:
    """The split that a file belongs to, by its name or else by that of the innermost folder that has one."""
    if not is_row:
        return name.stem if name.suffix == ".txt" and _WORD.fullmatch(name.stem) else None
    shard = _SHARD.match(name.name)
    for part in (shard[1] if shard else name.name, *reversed(name.parent.parts)):
        if found := _WORD.search(part.lower()):
            return found[1]
    return shard[1] if shard else None
