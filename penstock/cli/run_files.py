"""The files of a run's folder, read for a report."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from runtime.units import on_one_line

if TYPE_CHECKING:
    from planner.show.report_run import LoggedRun
    from runtime.plan import Plan
    from runtime.plan.timeline import Timeline

MAX_TIMELINE_FILE_BYTES = 2**30
MAX_LOG_BYTES = 2**28  # about a million steps; of a longer log the end is read
MAX_LINE_BYTES = 2**20
CLOCK_S = 1e-3  # the ends that a device's clock gives, and the starts that follow, are read within that


def read_logged_run(folder: Path, n_ops: int) -> "LoggedRun":
    """All that can be drawn of a run of a plan with `n_ops`. UsageError where there is nothing, or something else."""
    from planner.show.report_run import LoggedRun, read_log, read_samples

    timeline_file, log_file, samples_file = (folder / name for name in ("timeline.json", "metrics.jsonl", "samples.jsonl"))
    if not (os.path.lexists(timeline_file) or os.path.lexists(log_file)):
        problem = "holds no timeline.json and no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise click.UsageError(f"{folder}: {problem}; give the --out folder of a run")
    timeline = read_timeline(timeline_file, n_ops) if os.path.lexists(timeline_file) else None
    with _end_of(log_file) as (lines, is_whole):
        log = read_log(lines, is_whole)
    with _end_of(samples_file) as (lines, _):
        return LoggedRun(timeline, log, read_samples(lines))


def read_timeline(path: Path, n_ops: int) -> "Timeline":
    """The timeline that a run wrote, of a plan with `n_ops`."""
    from pydantic import TypeAdapter, ValidationError

    from runtime.files import read_whole
    from runtime.plan.timeline import Timeline

    try:
        timeline = TypeAdapter(Timeline).validate_json(read_whole(path, MAX_TIMELINE_FILE_BYTES))
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be read ({error.strerror}); give the --out folder of a run") from None
    except ValidationError:
        raise click.UsageError(f"{path}: not the timeline of a run; give the --out folder of a run") from None
    if any(not 0 <= span.op < n_ops for span in timeline.spans):
        raise click.UsageError(f"{path}: the timeline of another plan; give the plan that the run performed")
    if any(span.step < 0 or not 0 <= span.start_s <= span.end_s < 1e12 for span in timeline.spans):
        raise click.UsageError(f"{path}: holds a time or a step that cannot be; give the --out folder of a run")
    return timeline


def refuse_disorder(timeline: "Timeline", plan: "Plan", path: Path) -> None:
    """UsageError where a step has an op twice, or a lane performs ops out of the plan's order: it was another plan's run."""
    before: dict[tuple[int, str], tuple[int, float]] = {}  # of a step and a lane: the last op, and its end
    numbered = ((plan.number(span.op, span.repetition), span) for span in timeline.spans)
    for number, span in sorted(numbered, key=lambda of: (of[1].step, of[0])):
        at = (span.step, str(plan.ops[span.op].lane))
        op, end_s = before.get(at, (-1, 0.0))
        if number == op or span.start_s < end_s - CLOCK_S:
            raise click.UsageError(f"{path}: the timeline of another plan; give the plan that the run performed")
        before[at] = (number, span.end_s)


@contextmanager
def _end_of(path: Path) -> Iterator[tuple[Iterator[bytes], bool]]:
    """The lines of a log, and whether they are all; none where there is no such file. A pipe or a device is refused."""
    if not os.path.lexists(path):
        yield iter(()), True
        return
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise click.UsageError(f"{path}: a pipe, device or folder, not a file; give the --out folder of a run")
            is_whole = found.st_size <= MAX_LOG_BYTES
            if not is_whole:
                file.seek(found.st_size - MAX_LOG_BYTES)
                file.readline()  # the rest of a line
            yield _lines(file), is_whole
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror}); give the --out folder of a run"
        raise click.UsageError(on_one_line(problem)) from None


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines, one at a time; one that is longer than any that a run writes comes in pieces, which are no lines of a log.

    No more than the limit is read, though a run may be writing.
    """
    left = MAX_LOG_BYTES
    while left > 0 and (line := file.readline(min(MAX_LINE_BYTES, left))):
        left -= len(line)
        yield line
