"""How is what a run has to say put into its files, and read back?"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.checkpoint.room import patiently, refusal
from runtime.executor import Stop
from runtime.files import fields_of, write_whole


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """CheckpointError where the disk refuses; NoRoomError where it is full."""
    try:
        yield
    except OSError as error:
        raise refusal(path, error) from None


def add_lines(
    path: Path, lines: Sequence[Mapping[str, Any]], say: Callable[[str], None], stop: Stop, to_disk: bool = False
) -> None:
    """Add lines of JSON, all at once, if need be when there is room. A number that is not finite is null, as JSON has it."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()} for fields in lines]
    content = "".join(json.dumps(fields) + "\n" for fields in plain).encode()

    def add() -> None:
        with writing(path), path.open("ab", buffering=0) as log:
            was_bytes = log.tell()
            try:
                if log.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if to_disk:
                    os.fsync(log.fileno())
            except OSError:
                log.truncate(was_bytes)  # no half line
                raise

    patiently(add, path, len(content), say, stop)


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a log, and what they say; without the one that was being written when the run was stopped."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if (fields := fields_of(line)) is not None:
                yield line, fields


def keep_lines_up_to(path: Path, n_steps: int) -> None:
    """Drop what a run that was stopped logged after the checkpoint it now resumes from."""
    if not path.exists():
        return
    kept = [line + "\n" for line, fields in lines_of(path) if isinstance(fields.get("step"), int) and fields["step"] <= n_steps]
    with writing(path):
        write_whole(path, "".join(kept))
