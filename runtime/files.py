"""Files that are read, or written, whole or not at all."""

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
    """The bytes of a plain file. OSError for anything else: a pipe or a device may never end, and opening one may wait."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        is_folder = stat.S_ISDIR(found.st_mode)
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, f"a {'folder' if is_folder else 'pipe or device'}, not a file")
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes")
    return path.read_bytes()


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Within, no other process is within, with a lock of that name in the folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or none of it. OSError where that is impossible, or where something other than a file lies there."""
    target, partial = _places(path)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def try_to_write(path: Path) -> None:
    """OSError now rather than after long work, if `write_whole` would fail."""
    _, partial = _places(path)
    partial.open("x").close()
    partial.unlink()


def fields_of(line: bytes | str) -> dict[str, Any] | None:
    """What a line of a log says; None where it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def sync(path: Path) -> None:
    """Bring a file down to the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _places(path: Path) -> tuple[Path, Path]:
    """Where the file itself lies, and a free place next to it. A link stays a link; a pipe or a device stays what it is."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
        raise OSError(errno.EINVAL, "a folder" if target.is_dir() else "a pipe, device or circle of links, not a file")
    partial = target.with_name(target.name + ".partial")
    if os.path.lexists(partial):
        partial.unlink()  # of a command that was killed, or laid there to lead elsewhere
    return target, partial
