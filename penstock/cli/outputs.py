"""Output files of commands: refused before any work where they cannot be written, and written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import PenstockError
from runtime.files import try_to_write, write_whole


def check_output(path: Path) -> None:
    """PenstockError now rather than after long work, where `write_output` would raise it."""
    if path.is_dir():
        raise PenstockError(f"{path}: is a folder; give the name of a file in it, with -o")
    with _refused(path):
        try_to_write(path)


def write_output(path: Path, text: str) -> None:
    with _refused(path):
        write_whole(path, text)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path}: cannot be written ({error.strerror}); make room, or choose another place") from None
