"""Retention: which of a run's checkpoints stay, and whether the disk has room for them.

A checkpoint that is deleted is renamed first: a run that is killed meanwhile leaves nothing that looks whole and is not.
"""

import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from penstock.settings import CheckpointSettings
from runtime.errors import CheckpointError
from runtime.files import sync
from runtime.units import show_bytes

from .checkpoint import NAME, load_state, whole
from .disk import free_bytes, writing

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
        _delete(removed)
        with writing(path, "removed"), suppress(FileNotFoundError):
            path.rename(removed)
        _delete(removed)


def clean(folder: Path) -> None:
    """Delete what killed runs have left half written or half deleted."""
    for path in sorted(folder.glob("checkpoint-*")):
        if _LEFT_OVER.fullmatch(path.name):
            _delete(path)


def set_aside(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps to `checkpoint-N.left`: a run that resumed from one would find a hole in its log."""
    with writing(folder, "set in order"):
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
    with writing(path, "removed"), suppress(FileNotFoundError):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def refuse_without_room(
    folder: Path, settings: CheckpointSettings, n_bytes: int, first_step: int, n_steps: int, run_s: float
) -> None:
    """CheckpointError if the checkpoints of a run of `run_s` seconds, `n_bytes` each, do not fit on its disk."""
    n, free = _n_more_at_once(folder, settings, first_step, n_steps, run_s), free_bytes(folder)
    if n * n_bytes <= free:
        return
    each = f"of {show_bytes(n_bytes)}"
    what = f"{n} checkpoints {each} each, {show_bytes(n * n_bytes)} in all," if n > 1 else f"a checkpoint {each}"
    fewer = ", keep fewer with --keep" if n > 1 and settings.keep != 1 else ""
    smaller = "" if settings.weights_only else ", save --weights-only"
    raise CheckpointError(
        f"{folder}: {what} will be written, and {show_bytes(free)} are free; make room{fewer}{smaller}, or choose another --out"
    )


def _n_more_at_once(folder: Path, settings: CheckpointSettings, first_step: int, n_steps: int, run_s: float) -> int:
    """The most checkpoints that the folder holds at once beyond those that it holds now, the one being written included."""
    if first_step >= n_steps:
        return 0
    every = settings.every or n_steps
    n_scheduled = (n_steps - 1) // every - first_step // every + 1
    n_by_time = int(run_s // (settings.minutes * 60)) if settings.minutes else 0
    if settings.keep is None:
        return n_scheduled + min(n_by_time, 1)
    return min(n_scheduled + n_by_time, settings.keep + 1 - min(len(kept(folder, n_steps)), settings.keep))
