"""How is what a run has to say put into its files, and read back?"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError
from runtime.files import fields_of, write_whole


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """CheckpointError where the disk refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); make room, or choose another --out") from None


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]], to_disk: bool = False) -> None:
    """Add lines of JSON, all at once; a number that is not finite is null, as JSON knows no other way to say it."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()} for fields in lines]
    with writing(path), path.open("a", encoding="utf-8") as log:
        log.write("".join(json.dumps(fields) + "\n" for fields in plain))
        if to_disk:
            log.flush()
            os.fsync(log.fileno())


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
