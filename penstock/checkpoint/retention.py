"""Retention of a run's checkpoints, and a check of the disk space for them.

A checkpoint is renamed before it is deleted, so that a killed run leaves no incomplete folder with the name of a checkpoint.
"""

import re
import shutil
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

from penstock.runtime.errors import CheckpointError
from penstock.runtime.units import show_bytes
from penstock.settings import CheckpointSettings

from .checkpoint import NAME, complete_checkpoints
from .disk import writing

_LEFT_OVER = re.compile(rf"{NAME.pattern}\.(partial|removed)")


def keep_last(folder: Path, n: int, step: int, protected: Container[int] = ()) -> None:
    """Delete all but the last `n` checkpoints up to `step` and the `protected` steps. Checkpoints of later steps belong to the
    user."""
    saved = [(saved_step, path) for saved_step, path in complete_checkpoints(folder) if saved_step <= step]
    remove(path for saved_step, path in saved[:-n] if saved_step not in protected)


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Missing ones are ignored."""
    for path in paths:
        removed = path.with_name(path.name + ".removed")
        _delete(removed)
        with writing(path, "removed"), suppress(FileNotFoundError):
            path.rename(removed)
        _delete(removed)


def clean(folder: Path) -> None:
    """Delete folders that killed runs left half written or half deleted."""
    for path in sorted(folder.glob("checkpoint-*")):
        if _LEFT_OVER.fullmatch(path.name):
            _delete(path)


def refuse_later(folder: Path, step: int) -> None:
    """Raise CheckpointError for a checkpoint of a later step, because a run resumed from it would have a gap in its log."""
    if later := [path.name for path in folder.glob("checkpoint-*") if (m := NAME.fullmatch(path.name)) and int(m[1]) > step]:
        problem = f"{', '.join(sorted(later))[:200]}, of a later step than the one to begin with"
        raise CheckpointError(f"{folder}: holds {problem}; move it elsewhere, or choose another --out")


def _delete(path: Path) -> None:
    with writing(path, "removed"), suppress(FileNotFoundError):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def refuse_without_room(
    folder: Path, settings: CheckpointSettings, n_bytes: int, first_step: int, n_steps: int, run_s: float, best_every: int | None
) -> None:
    """Raise CheckpointError if the checkpoints of a run (`run_s` seconds, `n_bytes` each) exceed the free disk space. `best_every`:
    steps between evaluations, if the best checkpoint is kept."""
    every, free = settings.every or n_steps, shutil.disk_usage(folder).free
    n_scheduled = (n_steps - 1) // every - first_step // every + 1
    n_by_time = int(run_s // (settings.minutes * 60)) if settings.minutes else 0
    if settings.keep is None:
        n = n_scheduled + min(n_by_time, 1)
    else:  # in addition to existing ones; one more exists while it is written
        n_existing = sum(saved_step <= n_steps for saved_step, _ in complete_checkpoints(folder))
        n = min(n_scheduled + n_by_time, settings.keep + 1 - min(n_existing, settings.keep))
    if best_every is not None:  # the best, and the next best while it is written
        n += min((n_steps - 1) // best_every - first_step // best_every, 2)
    if first_step >= n_steps or n * n_bytes <= free:
        return
    size = f"of {show_bytes(n_bytes)}"
    problem = f"{n} checkpoints {size} each, {show_bytes(n * n_bytes)} in all," if n > 1 else f"a checkpoint {size}"
    fewer = ", keep fewer with --keep" if n > 1 and settings.keep != 1 else ""
    smaller = "" if settings.weights_only else ", save --weights-only"
    raise CheckpointError(
        f"{folder}: {problem} will be written, and {show_bytes(free)} are free; make room{fewer}{smaller}, or choose another --out"
    )
