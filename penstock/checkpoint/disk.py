"""Folders on disk: written whole or not at all, and refused before a run that has no room for them."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.settings import CheckpointSettings
from runtime.errors import CheckpointError
from runtime.files import sync
from runtime.units import show_bytes

from .retention import kept

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refusal(path: Path, error: OSError) -> CheckpointError:
    """One line for a disk that refuses to be written."""
    way_out = "make room, then start again (a run with --resume)" if error.errno in FULL else "choose another --out"
    return CheckpointError(f"{path}: cannot be written ({error.strerror}); {way_out}")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write a folder's files: `folder.partial`, synced and renamed at the end.

    CheckpointError where `folder` holds something already, or where the disk refuses; after an error of any kind nothing is left.
    """
    target = Path(os.path.realpath(folder))
    partial = target.with_name(target.name + ".partial")
    try:
        if target.exists() and any(target.iterdir()):
            raise CheckpointError(f"{folder}: is not empty; choose another --out")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while writing
        partial.mkdir(parents=True)
        yield partial
        sync(partial)  # the names; each file was synced when it was closed
        partial.rename(target)
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise refusal(folder, error) from None
        raise


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written there, as far as the file system says."""
    return shutil.disk_usage(folder).free


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
