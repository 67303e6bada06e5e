"""The overview of a run that `penstock run` shows before the first step."""

import os
import shutil
from typing import TYPE_CHECKING

from runtime.units import show_bytes, show_count, show_duration, show_seconds

if TYPE_CHECKING:
    from penstock.training.session import Session


def overview(session: "Session") -> dict[str, str]:
    """What a user may want to stop before step 1, by name."""
    of, first_step, n_steps = session.store.plan.semantics, session.first_step, session.n_steps
    data = session.data.words()
    data.pop("warning", None)
    steps = f"{first_step + 1} to {n_steps}" if first_step < n_steps else "all are done, evaluating"
    rows = {
        "model": f"{session.plan.model.name or 'without a name'}, {show_count(session.plan.workload.n_params)} parameters",
        "weights": session.weights,
        "tokenizer": session.tokenizer,
        "device": _device(session),
        **data,
        "steps": f"{steps}, each of {of.whole.batch_size:,} sequences, {of.tokens_per_step:,} tokens",
        "predicted": _predicted(session, n_steps - first_step),
    }
    if session.held_out is not None:
        asked, words = session.settings.evaluation, session.held_out.words()
        n = min(asked.max_sequences, session.held_out.n_steps or asked.max_sequences)
        rows["held out"] = f"{words['data']}, {n:,} sequences evaluated" + (f" every {asked.every:,} steps" if asked.every else "")
    if session.saves:
        free_bytes = shutil.disk_usage(session.folder).free
        each_bytes = session.plan.checkpoint_bytes(session.settings.checkpoint.weights_only)
        rows["checkpoints"] = f"{show_bytes(each_bytes)} each, {show_bytes(free_bytes)} free in {session.settings.out}"
    return rows


def _device(session: "Session") -> str:
    name = session.plan.profile["name"]
    if session.device == "emulated":
        return f"{name}, emulated {session.scale:.3g} times slower on this CPU"
    device = session.store.device_name() or f"CPU, {len(os.sched_getaffinity(0))} cores"
    return device if session.is_comparable else f"{device}, in the place of the GPU of {name}"


def _predicted(session: "Session", n_steps: int) -> str:
    """On the machine that the plan is for; how long one of another kind takes is not known."""
    machine, step_s = session.plan.profile["name"], session.prediction.step_s
    if session.device == "emulated":
        return f"{show_duration(n_steps * step_s * session.scale)} here, for {show_duration(n_steps * step_s)} on {machine}"
    here = "" if session.is_comparable else "; this machine is of another kind, and how long it takes shows after some steps"
    return f"{show_duration(n_steps * step_s)} on {machine}, {show_seconds(step_s)} a step{here}"
