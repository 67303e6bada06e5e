"""Files of a run's folder: its timeline, its log and its samples."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import CheckpointError

if TYPE_CHECKING:
    from planner.show.run_log import LoggedRun
    from runtime.plan import Plan
    from runtime.plan.timeline import Timeline

MAX_TIMELINE_FILE_BYTES = 2**30
MAX_LOG_BYTES = 2**26  # about 300,000 steps; of a longer log the end is read
CLOCK_S = 1e-3  # precision of a device's clock, and of the spans that it ends
GIVE = "give the --out folder of a run"


def read_logged_run(folder: Path, plan: "Plan") -> "LoggedRun":
    """All that can be drawn of a run of the plan. CheckpointError where there is nothing, or something else."""
    from planner.show.run_log import LoggedRun, read_log, read_samples

    timeline_file, log_file = folder / "timeline.json", folder / "metrics.jsonl"
    if not (os.path.lexists(timeline_file) or os.path.lexists(log_file)):
        problem = "holds no timeline.json and no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {problem}; {GIVE}")
    timeline = read_timeline(timeline_file, plan) if os.path.lexists(timeline_file) else None
    return LoggedRun(timeline, read_log(*_end_of(log_file)), read_samples(_end_of(folder / "samples.jsonl")[0]))


def read_timeline(path: Path, plan: "Plan") -> "Timeline":
    """The timeline of a run of the plan. CheckpointError for one that is damaged, or has ops in another order."""
    from pydantic import TypeAdapter, ValidationError

    from runtime.files import read_whole
    from runtime.plan.timeline import Timeline

    try:
        timeline = TypeAdapter(Timeline).validate_json(read_whole(path, MAX_TIMELINE_FILE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {GIVE}") from None
    except ValidationError:
        raise CheckpointError(f"{path}: not the timeline of a run; {GIVE}") from None
    if any(span.step < 0 or not 0 <= span.start_s <= span.end_s < 1e12 for span in timeline.spans):
        raise CheckpointError(f"{path}: holds an impossible time or step; {GIVE}")
    of_another = CheckpointError(f"{path}: the timeline of another plan; give the plan that the run performed")
    if any(not 0 <= span.op < len(plan.ops) for span in timeline.spans):
        raise of_another
    before: dict[tuple[int, str], tuple[int, float]] = {}  # of a step and a lane: the last op, and its end
    numbered = ((span.step, plan.number(span.op, span.repetition), span) for span in timeline.spans)
    for step, number, span in sorted(numbered, key=lambda of: of[:2]):
        at = step, str(plan.ops[span.op].lane)
        op, end_s = before.get(at, (-1, 0.0))
        if number == op or span.start_s < end_s - CLOCK_S:
            raise of_another
        before[at] = number, span.end_s
    return timeline


def _end_of(path: Path) -> tuple[list[bytes], bool]:
    """The last lines of a log, and whether they are all; none where there is no such file. A pipe or a device is refused."""
    if not os.path.lexists(path):
        return [], True
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path}: a pipe, device or folder, not a file; {GIVE}")
            is_whole = found.st_size <= MAX_LOG_BYTES
            file.seek(0 if is_whole else found.st_size - MAX_LOG_BYTES)
            lines = file.read(MAX_LOG_BYTES).splitlines(keepends=True)
            return lines if is_whole else lines[1:], is_whole  # the first may be the rest of a line
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {GIVE}") from None
