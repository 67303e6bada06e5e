"""Files in the folder of a run: its timeline and its log."""

import os
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from penstock.planner.show.run_log import LoggedRun, read_log
from penstock.run_config import PLAN_FILE
from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import read_whole
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.timeline import Timeline

MAX_FILE_BYTES = 2**30  # limit for a timeline or a log, because it is read into memory
ADVICE = "give the --out folder of a run"


def read_logged_run(folder: Path, plan: Plan) -> LoggedRun:
    """Read the timeline and the log of a run of the plan. CheckpointError if both are missing or one is invalid."""
    timeline_file, log_file = folder / "timeline.json", folder / "metrics.jsonl"
    if not (os.path.lexists(timeline_file) or os.path.lexists(log_file)):
        problem = "holds no timeline.json and no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {problem}; {ADVICE}")
    timeline = read_timeline(timeline_file, plan) if os.path.lexists(timeline_file) else None
    lines = _read(log_file).splitlines(keepends=True) if os.path.lexists(log_file) else []  # rejects a pipe or a device
    return LoggedRun(timeline, read_log(lines))


def refuse_another_plan(folder: Path, plan: Plan) -> None:
    """Raise CheckpointError if the folder holds a run of another plan. Profile, model path and model name may differ."""
    plan_file = folder / PLAN_FILE
    if os.path.lexists(plan_file):
        performed = PlanFile.read(plan_file).plan
        if replace(performed, profile=plan.profile, model=replace(plan.model, config=performed.model.config)) != plan:
            raise CheckpointError(f"{folder}: a run of another plan; give the plan that it performed, {plan_file}")


def read_timeline(path: Path, plan: Plan) -> Timeline:
    """Read the timeline of a run of the plan. CheckpointError if it is damaged or has ops outside the plan."""
    try:
        timeline = TypeAdapter(Timeline).validate_json(_read(path))
    except ValidationError:
        raise CheckpointError(f"{path}: not the timeline of a run; {ADVICE}") from None
    if any(span.step < 0 or not 0 <= span.start_s <= span.end_s < 1e12 for span in timeline.spans):
        raise CheckpointError(f"{path}: holds an impossible time or step; {ADVICE}")
    if any(not 0 <= span.op < len(plan.ops) for span in timeline.spans):
        raise CheckpointError(f"{path}: the timeline of another plan; give the plan that the run performed")
    return timeline


def _read(path: Path) -> bytes:
    try:
        return read_whole(path, MAX_FILE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {ADVICE}") from None
