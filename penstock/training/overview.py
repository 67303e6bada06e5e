"""What will a run train, on what, for how long?"""

import os
import shutil
from typing import TYPE_CHECKING

from runtime.units import show_bytes, show_count, show_duration, show_seconds

if TYPE_CHECKING:
    from .assembly import Session


def overview(run: "Session", first_step: int) -> dict[str, str]:
    """What a user may want to stop before step 1, by name; a run that resumes has `first_step` steps behind it."""

    of = run.training.plan.semantics
    said = run.training.data.words()
    said.pop("warning", None)
    steps = f"{first_step + 1} to {run.n_steps}" if first_step < run.n_steps else "all are done, evaluating"
    rows = {
        "model": f"{run.plan.model.name or 'without a name'}, {show_count(run.plan.workload.n_params)} parameters",
        "weights": run.weights,
        "tokenizer": run.tokenizer,
        "device": _device(run),
        **said,
        "steps": f"{steps}, each of {of.whole.batch_size:,} sequences, {of.tokens_per_step:,} tokens",
        "predicted": _predicted(run, run.n_steps - first_step),
    }
    if run.held_out is not None:
        looks = run.settings.evaluation
        n, of_all = min(looks.max_sequences, run.held_out.n_steps or looks.max_sequences), run.held_out.words()
        rows["held out"] = f"{of_all['data']}, {n:,} sequences evaluated" + (f" every {looks.every:,} steps" if looks.every else "")
    if run.training.saves:
        free_bytes = shutil.disk_usage(run.training.folder).free
        each_bytes = run.plan.checkpoint_bytes(run.settings.checkpoint.weights_only)
        rows["checkpoints"] = f"{show_bytes(each_bytes)} each, {show_bytes(free_bytes)} free in {run.settings.out}"
    return rows


def _device(run: "Session") -> str:
    if run.device == "emulated":
        return f"{run.plan.profile['name']}, emulated {run.scale:.3g} times slower on this CPU"
    name = run.training.store.device_name() or f"CPU, {len(os.sched_getaffinity(0))} cores"
    return name if run.is_comparable else f"{name}, in the place of the GPU of {run.plan.profile['name']}"


def _predicted(run: "Session", n_steps: int) -> str:
    """Of the machine that the plan is for; how long this one takes is not known where it is of another kind."""
    machine, step_s = run.plan.profile["name"], run.prediction.step_s
    if run.device == "emulated":
        return f"{show_duration(n_steps * step_s * run.scale)} here, for {show_duration(n_steps * step_s)} on {machine}"
    here = "" if run.is_comparable else "; this machine is of another kind, and how long it takes shows after some steps"
    return f"{show_duration(n_steps * step_s)} on {machine}, {show_seconds(step_s)} a step{here}"
