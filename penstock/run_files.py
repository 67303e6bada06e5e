"""Files in the folder of a run: its timeline, its log, and its measured ratios."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from penstock.checkpoint.best import read_best
from penstock.hwprofiles.components import OpRatio
from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.measured import op_ratios, speeds_of
from penstock.planner.show.run_log import LoggedRun, read_log
from penstock.run_config import PLAN_FILE
from penstock.runtime.errors import CheckpointError, PlanError
from penstock.runtime.files import read_whole, write_whole
from penstock.runtime.plan import Plan, PlanFile, Semantics
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.plan.workload import FILE, Model

MAX_FILE_BYTES = 2**30  # limit for a timeline or a log, because it is read into memory
ADVICE = "give the --out folder of a run"
MEASURED_FILE = "measured.json"
# Fields of the semantics that decide how much is computed, not the kernels. A run's ratios serve plans with others.
_SIZES = {"seq_len", "batch_size", "micro_batch", "loss_tile_tokens", "mlp_tile_tokens", "sum_groups", "clip_norm", "on_nonfinite"}


def policy_fields(plan: Plan) -> dict[str, Any]:
    """Return the policy of a plan with the JSON values that a file of it has."""
    fields: dict[str, Any] = json.loads(json.dumps(plan.policy.to_json()))
    return fields


def read_logged_run(folder: Path, plan: Plan) -> LoggedRun:
    """Read the timeline and the log of a run of the plan. CheckpointError if both are missing or one is invalid."""
    timeline_file, log_file = folder / "timeline.json", folder / "metrics.jsonl"
    if not (os.path.lexists(timeline_file) or os.path.lexists(log_file)):
        problem = "holds no timeline.json and no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {problem}; {ADVICE}")
    timeline = read_timeline(timeline_file, plan) if os.path.lexists(timeline_file) else None
    lines = _read(log_file).splitlines(keepends=True) if os.path.lexists(log_file) else []  # rejects a pipe or a device
    best = read_best(folder)
    return LoggedRun(timeline, read_log(lines), None if best is None else str(best))


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


# -- measured ratios ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Contents of MEASURED_FILE: measured over predicted seconds, and the model, kernels and speeds that they refer to."""

    format_version: Literal[1]
    model: str  # fingerprint
    kernels: dict[str, Any]  # fields of the semantics
    speeds: str  # digest of those of the profile
    n_steps: Annotated[int, Field(ge=1)]
    ratios: tuple[OpRatio, ...]
    __pydantic_config__ = FILE

    def scaled(self, profile: Profile, model: Model, semantics: Semantics, where: object) -> Profile:
        """Return the profile with these ratios. PlanError if they are of another model, of other kernels or of another machine."""
        kernel = next((key for key, value in _kernels(semantics).items() if self.kernels.get(key) != value), None)
        if model.fingerprint != self.model or kernel is not None:
            subject = f"another {kernel}" if model.fingerprint == self.model else "another model"
            raise PlanError(f"--measured {where}: a run of {subject} than this plan's; give a run of this model with these options")
        if speeds_of(profile) != self.speeds:
            problem = "its ratios refer to another profile, or to other GPUs and hosts"
            raise PlanError(f"--measured {where}: {problem}; give the --machine of that run's plan")
        return Profile.from_json({**profile.to_json(), "op_ratios": [entry.model_dump() for entry in self.ratios]}, str(where))


_MEASURED = TypeAdapter(MeasuredRun)


def _kernels(semantics: Semantics) -> dict[str, Any]:
    fields = {key: value for key, value in asdict(semantics).items() if key not in _SIZES}
    result: dict[str, Any] = json.loads(json.dumps(fields))
    return result


def write_measured(folder: Path, plan: Plan, settled: Timeline) -> MeasuredRun:
    """Write the measured ratios of a run of the plan. `settled`: its steps without warm-up. OSError if writing fails."""
    n_steps, speeds = len({span.step for span in settled.spans}), speeds_of(Profile.from_json(plan.profile))
    run = MeasuredRun(1, plan.model.fingerprint, _kernels(plan.semantics), speeds, n_steps, op_ratios(plan, settled))
    write_whole(folder / MEASURED_FILE, _MEASURED.dump_json(run, indent=1).decode() + "\n")
    return run


def read_measured(folder: Path) -> MeasuredRun:
    """Read the measured ratios of a run. CheckpointError for a missing or malformed file."""
    path = folder / MEASURED_FILE
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: no such file; {ADVICE} of some steps with a plan for this machine's kind")
    try:
        return _MEASURED.validate_json(_read(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:80]
        raise CheckpointError(f"{path}: {place}: {first['msg'][:120]}; {ADVICE}") from None
