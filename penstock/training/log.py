"""The logs of a run: JSON lines, added one step at a time and cut back to the checkpoint that a run resumes from."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.disk import writing
from runtime.files import fields_of, write_whole


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]], to_disk: bool = False) -> None:
    """Add lines of JSON; a number that is not finite is null. `to_disk`: sync the file. CheckpointError where the disk refuses: a
    line may then be cut off, which readers leave out and the run that goes on drops."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()} for fields in lines]
    with writing(path), path.open("a", encoding="utf-8") as log:
        log.writelines(json.dumps(fields) + "\n" for fields in plain)
        log.flush()
        if to_disk:
            os.fsync(log.fileno())


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, fields) of each line of a log, without one that was cut off when a run was killed."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if (fields := fields_of(line)) is not None:
                yield line, fields


def keep_lines_up_to(path: Path, n_steps: int) -> None:
    """Drop the lines of later steps: a run that was killed logged them after the checkpoint that is resumed."""
    if path.exists():
        kept = [line + "\n" for line, fields in lines_of(path) if isinstance(fields.get("step"), int) and fields["step"] <= n_steps]
        with writing(path):
            write_whole(path, "".join(kept))
