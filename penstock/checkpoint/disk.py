"""Folders on disk, written whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import sync

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path, what: str = "written") -> Iterator[None]:
    """CheckpointError where the disk refuses."""
    try:
        yield
    except OSError as error:
        way_out = "make room, then start again (a run with --resume)" if error.errno in _FULL else "choose another --out"
        raise CheckpointError(f"{path}: cannot be {what} ({error.strerror}); {way_out}") from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write a folder's files: `folder.partial`, synced and renamed at the end.

    CheckpointError where `folder` holds something already, or where the disk refuses; after an error of any kind nothing is left.
    """
    target = Path(os.path.realpath(folder))
    partial = target.with_name(target.name + ".partial")
    with writing(folder):
        try:
            if target.exists() and any(target.iterdir()):
                raise CheckpointError(f"{folder}: is not empty; choose another --out")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while writing
            partial.mkdir(parents=True)
            yield partial
            sync(partial)  # the names; each file was synced when it was closed
            partial.rename(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
