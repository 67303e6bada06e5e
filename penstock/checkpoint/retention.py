"""Retention: which of a run's checkpoints stay.

A checkpoint that is deleted is renamed first: a run that is killed meanwhile leaves nothing that looks whole and is not.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import CheckpointError
from runtime.files import sync

from .checkpoint import NAME, load_state, whole

_LEFT_OVER = re.compile(rf"{NAME.pattern}(\.left)?\.(partial|removed)")
_SET_ASIDE = re.compile(rf"{NAME.pattern}\.left")


def kept(folder: Path, step: int) -> list[Path]:
    """The checkpoints that `--keep` counts after `step`, oldest first: those that were set aside, then those up to the step."""
    aside = sorted((int(m[1]), path) for path in folder.glob("checkpoint-*.left") if (m := _SET_ASIDE.fullmatch(path.name)))
    return [path for _, path in aside] + [path for at, path in whole(folder) if at <= step]


def keep_last(folder: Path, n: int, step: int) -> None:
    """Delete all but the last `n` kept checkpoints. Checkpoints of later steps are the user's."""
    remove(kept(folder, step)[:-n])


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints, as far as they are there."""
    for path in paths:
        removed = path.with_name(path.name + ".removed")
        with _one_line("removed"), suppress(FileNotFoundError):
            _delete(removed)
            path.rename(removed)
            _delete(removed)


def clean(folder: Path) -> None:
    """Delete what killed runs have left half written or half deleted."""
    with _one_line("removed"), suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if _LEFT_OVER.fullmatch(path.name)]:
            _delete(path)


def set_aside(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps to `checkpoint-N.left`: a run that resumed from one would find a hole in its log."""
    with _one_line("set aside"):
        later = [path for path in folder.iterdir() if (m := NAME.fullmatch(path.name)) and int(m[1]) > step]
        for path in sorted(later):
            left = path.with_name(path.name + ".left")
            _delete(left)
            path.rename(left)
            say(f"{path.name} is of a later step than the one resumed from: kept aside as {left.name}, and counted by --keep")
        if later:
            sync(folder)  # before the log is cut


def whole_before(folder: Path, damaged: Path) -> Path | None:
    """The newest checkpoint of earlier steps than a damaged one whose every file is as it was saved; None where there is none."""
    named = NAME.fullmatch(damaged.name)
    for step, path in reversed(whole(folder)):
        if named is not None and step < int(named[1]):
            with suppress(CheckpointError):
                return load_state(path).path
    return None


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """CheckpointError for what the file system refuses, but for a file that is gone."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be {what} ({error.strerror}); choose another --out") from None
