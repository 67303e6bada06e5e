"""Which checkpoints are kept, and which one is resumed?

A folder named `checkpoint-N` is whole. What is about to be deleted loses that name first, so that a run that is killed meanwhile
leaves nothing that looks whole and is not.
"""

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from runtime.errors import CheckpointError

from .checkpoint import load_state, whole

_LEFT_OVER = re.compile(r"(checkpoint-[0-9]+(?:\.left)?)\.(partial|replaced|removed)")


def kept(folder: Path, step: int) -> list[Path]:
    """What counts as kept: checkpoints that a run set aside when it resumed from an earlier one, then those up to this step."""
    aside = [path for path in folder.glob("checkpoint-*.left") if re.fullmatch(r"checkpoint-[0-9]{1,18}\.left", path.name)]
    return [*sorted(aside, key=lambda path: _step(path.with_suffix(""))), *(path for at, path in whole(folder) if at <= step)]


def keep_last(folder: Path, n: int, step: int) -> None:
    """Of the checkpoints up to this step, and those set aside, only the last `n` stay. Those of later steps are the user's."""
    so_far = kept(folder, step)
    remove(so_far[: max(0, len(so_far) - n)])


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints that are there, none of which passes for whole meanwhile."""
    for path in paths:
        removed = path.with_name(path.name + ".removed")
        try:
            _remove(removed)
            path.rename(removed)
            _remove(removed)
        except FileNotFoundError:
            continue  # somebody made room already
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed ({error.strerror}); remove it, or keep more checkpoints") from None


def clean(folder: Path) -> None:
    """Put away what runs that were killed have left. Of a checkpoint that was being replaced one of the two is whole, and stays."""
    try:
        left = [(m, path) for path in folder.iterdir() if (m := _LEFT_OVER.fullmatch(path.name))]
        for m, path in left:
            final = path.with_name(m[1])
            if m[2] == "replaced" and not final.exists():
                path.rename(final)
            else:
                _remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be removed ({error.strerror}); choose another --out") from None


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def offers(folder: Path, damaged: Path) -> Path | None:
    """The newest checkpoint before a damaged one that can be resumed; every file of it is read. None where there is none."""
    for path in reversed([path for _, path in whole(folder)]):
        if _step(path) < _step(damaged):
            with suppress(CheckpointError):
                return load_state(path).path
    return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))
