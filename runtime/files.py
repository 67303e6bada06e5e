"""Atomic reads and writes of files."""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raise OSError for other types: a pipe or device may never end, and opening one may block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, f"a {'folder' if is_folder else 'pipe or device'}, not a file")
    if status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes")
    return path.read_bytes()


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock on file `name` of the folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically. Raise OSError on failure, or if the path is a folder, pipe or device."""
    target, partial = _places(path)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def try_to_write(path: Path) -> None:
    """Raise OSError before long work if `write_whole` would fail."""
    _, partial = _places(path)
    partial.open("x").close()
    partial.unlink()


def fields_of(line: bytes | str) -> dict[str, Any] | None:
    """Parse a log line as a JSON object; None if it is malformed."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _places(path: Path) -> tuple[Path, Path]:
    """Return the resolved path, and a free path next to it. Links are followed, pipes and devices rejected."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
        raise OSError(errno.EINVAL, "a folder" if target.is_dir() else "a pipe, device or circle of links, not a file")
    partial = target.with_name(target.name + ".partial")
    if os.path.lexists(partial):
        partial.unlink()  # left by a killed command, or a link planted there
    return target, partial
