"""Atomic writes of folders on disk."""

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
def writing(path: Path, action: str = "written") -> Iterator[None]:
    """Convert an OSError to a CheckpointError with advice."""
    try:
        yield
    except OSError as error:
        way_out = "make room, then start again (a run with --resume)" if error.errno in _FULL else "choose another --out"
        raise CheckpointError(f"{path}: cannot be {action} ({error.strerror}); {way_out}") from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield `folder.partial`, to be filled with files. It is synced and renamed to `folder` at the end.

    CheckpointError if `folder` is not empty, or for an error of the disk. After any error, the partial folder is removed.
    """
    target = Path(os.path.realpath(folder))
    partial = target.with_name(target.name + ".partial")
    with writing(folder):
        try:
            if target.exists() and any(target.iterdir()):
                raise CheckpointError(f"{folder}: is not empty; choose another --out")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir(parents=True)
            yield partial
            sync(partial)  # file names; the content of each file is already synced
            partial.rename(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
