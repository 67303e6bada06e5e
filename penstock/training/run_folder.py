"""The output folder of a run: lock, replaceable files, logs, and the checkpoint to resume."""

import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.best import BEST_FILE
from penstock.checkpoint.checkpoint import State, complete_checkpoints, latest, load_state
from penstock.checkpoint.disk import writing
from penstock.checkpoint.retention import clean, refuse_later
from penstock.replanning import REPLAN_FILE
from penstock.run_config import PLAN_FILE, RUN_FILE, WRITTEN_BY_A_RUN, RunRequest, located, run_text
from penstock.run_files import MEASURED_FILE, policy_fields
from penstock.runtime.errors import CheckpointError
from penstock.runtime.executor import say
from penstock.runtime.files import fields_of, try_to_write, write_whole
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import on_one_line

from .inputs import TOKENS_FOLDER

# Files that a run writes, in addition to checkpoints
WRITTEN = ("metrics.jsonl", "samples.jsonl", "timeline.json", BEST_FILE, MEASURED_FILE, REPLAN_FILE, RUN_FILE, PLAN_FILE)


@contextmanager
def run_folder(out: Path) -> Iterator[None]:
    """Create and lock the output folder. CheckpointError if it is locked, not writable, or holds foreign files.

    A folder that was created here is deleted if an error ends the run before it wrote a file.
    """
    _refuse_foreign_files(out)
    was_there = out.is_dir()
    try:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            try_to_write(out / RUN_FILE)
        with _locked(out):
            yield
    except BaseException:
        if not was_there and not any((out / name).exists() for name in WRITTEN):
            shutil.rmtree(out / TOKENS_FOLDER, ignore_errors=True)
            with suppress(OSError):
                out.rmdir()  # fails if not empty
        raise


def _refuse_foreign_files(out: Path) -> None:
    """Raise if a file to replace was not written by an earlier run (no settings are there), or is a link, pipe or device."""
    for path in (out / f"{name}{end}" for name in WRITTEN for end in ("", ".partial")):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path}: a folder, link, pipe or device where the run writes a file; choose another --out")
    with suppress(OSError):
        if (out / RUN_FILE).read_bytes().startswith(WRITTEN_BY_A_RUN.encode()):
            return
    for path in (out / name for name in WRITTEN):
        if path.exists():
            raise CheckpointError(f"{path}: not written by a run, which writes a file of that name; give it another name or place")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the folder against a second run. The system releases the lock when the process ends."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{out}: another run is at work in it; wait until it ends, or choose another --out") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # workers of a DataLoader have copies of the descriptor
        os.close(descriptor)


def write_settings(request: RunRequest) -> None:
    """Write all settings and the plan to the output folder, so that it can be moved. CheckpointError if writing fails."""
    settings, file = request.settings, request.file
    out, model = Path(os.path.abspath(settings.out)), settings.model or file.plan.model.path
    with writing(out / RUN_FILE):
        write_whole(out / RUN_FILE, run_text(located(replace(settings, out=str(out), plan=str(out / PLAN_FILE), model=model))))
    file.write(out / PLAN_FILE)


# -- logs: lines of JSON ---------------------------------------------------------------------------------------------------


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]], to_disk: bool = False) -> None:
    """Append lines of JSON, with null for numbers that are not finite. `to_disk`: sync the file. CheckpointError if writing fails;
    a truncated line can remain, which readers skip and a resumed run drops."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()} for fields in lines]
    with writing(path), path.open("a", encoding="utf-8") as log:
        log.writelines(json.dumps(fields) + "\n" for fields in plain)
        log.flush()
        if to_disk:
            os.fsync(log.fileno())


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, fields) of a log, without a truncated line of a killed run."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if (fields := fields_of(line)) is not None:
                yield line, fields


def keep_lines_up_to(path: Path, n_steps: int) -> None:
    """Drop lines of later steps, logged by a killed run after the checkpoint to resume."""
    if path.exists():
        rows = [line + "\n" for line, fields in lines_of(path) if isinstance(fields.get("step"), int) and fields["step"] <= n_steps]
        with writing(path):
            write_whole(path, "".join(rows))


# -- resuming -----------------------------------------------------------------------------------------------------------------


def state_to_resume(request: RunRequest) -> State | None:
    """Return the checkpoint to resume, or None to start at step 0. CheckpointError if it is damaged or not the last."""
    out = Path(request.settings.out)
    if request.resumes:
        clean(out)
    path = latest(out) if request.resume_from is None else _named(out, request.resume_from)
    if path is not None and not request.resumes:
        raise CheckpointError(f"{out}: holds {path.name} of an earlier run; add --resume, or choose another --out")
    if path is None and request.resumes:
        say(f"{on_one_line(str(out))}: no checkpoint yet, starting from the beginning")
    state = None if path is None else load_state(path)
    refuse_later(out, 0 if state is None else state.step)
    return state


def with_replanned(request: RunRequest, state: State | None) -> RunRequest:
    """Return the request with the plan of the folder if the checkpoint names it as the one that replaces the given plan."""
    named = None if state is None else state.fields.get("replanned")
    path, policy = Path(request.settings.out) / PLAN_FILE, policy_fields(request.file.plan)
    if not isinstance(named, dict) or policy not in (named.get("former"), named.get("policy")):
        return request
    if policy == named.get("policy"):
        return replace(request, replanned=named)
    if not path.is_file():
        return request
    file = PlanFile.read(path)
    if policy_fields(file.plan) != named.get("policy") or file.plan.semantics != request.file.plan.semantics:
        return request
    say(f"{on_one_line(str(path))} replaced the given plan during the run: going on under it")
    return replace(request, file=file, where=str(path), replanned=named)


def _named(out: Path, name: str) -> Path:
    """Return the checkpoint with that name in the folder. Otherwise the one at that path, if the folder has no checkpoint."""
    if name and Path(name).name == name and (out / name).is_dir():
        return out / name
    elsewhere = Path(name)
    if not name or not elsewhere.is_dir():
        names = ", ".join(path.name for _, path in complete_checkpoints(out)) or "none"
        raise CheckpointError(f"{out}: no checkpoint {name!r} in it; it holds: {names}")
    if (last := latest(out)) is not None and elsewhere.resolve().parent != out.resolve():
        raise CheckpointError(f"{out}: holds {last.name} of another run than {elsewhere}; choose another --out")
    return elsewhere
