"""The overview of a run before its first step, and the table of predicted and measured figures after its last."""

import json
import os
import resource
import shutil
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.run_config import RunConfigError
from runtime.errors import PlanError
from runtime.files import try_to_write, write_whole
from runtime.plan.footprint import planned_device_needs
from runtime.units import on_one_line, show_bytes, show_count, show_duration, show_seconds

from .tables import show_table

if TYPE_CHECKING:
    from penstock.training.session import Session
    from runtime.machines.torch_machine import TorchMachine
    from runtime.plan import Kind, Lane, Plan
    from runtime.plan.timeline import Timeline

WORTH_A_PLAN = 0.1  # of a step: where reality is further from the profile than this, another plan may be the faster one
WORTH_NAMING = 0.02  # of a step
MOST_NAMED = 4


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


def show_tokens(per_s: float) -> str:
    """As in the line of a step, or with three digits where they are few."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    predicted: float
    measured: float
    show: Callable[[float], str]

    def cells(self) -> tuple[str, str, str, str]:
        error = f"{self.measured / self.predicted - 1:+.1%}" if self.predicted > 0 else ""
        return self.name, self.show(self.predicted), self.show(self.measured), error


def show_outcome(run: "Session", timeline: "Timeline", times_s: list[float], recalibrate: Path | None) -> None:
    """The final table on stdout: predicted, measured, error; what differs; where things lie. Perhaps a corrected profile."""
    rows = _rows(run, timeline, times_s)
    show_table(("", "predicted", "measured", "error"), [row.cells() for row in rows])
    if times_s:
        ordered = sorted(times_s)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        click.echo(f"step: median of {len(times_s)} after warm-up, P10 to P90 {show_seconds(low)} to {show_seconds(high)}")
    if run.is_comparable and times_s:
        _differences(run, _settled(timeline, times_s), rows[0], recalibrate)
    _notes(run)
    if recalibrate is not None:
        _recalibrate(run, timeline, recalibrate)


def _settled(timeline: "Timeline", times_s: list[float]) -> "Timeline":
    """Without the first step, which fills the pipeline, where there are others."""
    return timeline.from_step(min((s.step for s in timeline.spans), default=0) + 1) if times_s else timeline


def _rows(run: "Session", timeline: "Timeline", times_s: list[float]) -> list[_Row]:
    plan, prediction = run.plan, run.prediction
    step_s = statistics.median(times_s) if times_s else timeline.total_s
    rows = [_Row("step", prediction.step_s, step_s, show_seconds)]
    predicted_busy_s, measured_busy_s = prediction.busy_s(plan), _settled(timeline, times_s).busy_s(plan)
    rows += [_Row(f"busy, {lane}", predicted_busy_s[lane], measured_busy_s[lane], show_seconds) for lane in predicted_busy_s]
    n_tokens = plan.semantics.tokens_per_step
    rows.append(_Row("tokens/s", n_tokens / prediction.step_s, n_tokens / step_s, show_tokens))
    return rows if run.device == "emulated" else [*rows, *_memory_rows(plan, run.store)]


def _memory_rows(plan: "Plan", store: "TorchMachine") -> list[_Row]:
    by_arena = store.arenas.n_bytes
    in_arenas = sum(by_arena[a.name] for a in plan.arenas if a.place == "device")
    rows = [
        _Row("device arenas", plan.device_arena_bytes, in_arenas, show_bytes),
        _Row("host arenas", plan.host_arena_bytes, sum(by_arena.values()) - in_arenas, show_bytes),
    ]
    on_device = sum(planned_device_needs(plan).values())
    on_host = plan.host_arena_bytes + float(plan.profile["host"]["runtime_bytes"]["value"])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - store.others_bytes()  # Linux counts in KiB
    device_peak_bytes = store.device_peak_bytes()
    if device_peak_bytes is None:  # the device's memory is the process's own
        return [*rows, _Row("process, peak", on_device + on_host, peak_bytes, show_bytes)]
    return [
        *rows,
        _Row("device, peak", on_device, device_peak_bytes, show_bytes),
        _Row("process, peak", on_host, peak_bytes, show_bytes),
    ]


def _notes(run: "Session") -> None:
    from penstock.checkpoint.checkpoint import latest

    plan, store = run.plan, run.store
    if run.device == "emulated":
        click.echo(
            f"emulated {plan.profile['name']}, {run.scale:.3g} times slower: times and tokens/s above are that machine's; "
            f"{run.late_fraction:.1%} of the ops took this computer longer than that"
        )
    elif not run.is_comparable:
        here = "CPU" if run.device == "cpu" else "GPU"
        click.echo(f"the plan was made for {plan.profile['name']}: its prediction is not comparable with this {here}")
    elif (name := store.device_name()) is not None and name != plan.profile["device"]["name"]:
        click.echo(f"the plan was made for {plan.profile['name']} ({plan.profile['device']['name']}); this is {name}")
    if run.device != "emulated":
        click.echo(f"host memory: {store.arenas.host_words()}")
    if run.saves:
        click.echo(f"checkpoint: {on_one_line(str(latest(run.folder)))}")
    folder = on_one_line(str(run.folder))
    click.echo(f"log: {folder}/metrics.jsonl   report: penstock report {_plan_file(run)} {folder} -o report.html")


def _plan_file(run: "Session") -> str:
    return on_one_line(str(run.settings.plan))


# -- reality and the profile ----------------------------------------------------------------------------------------------


def _differences(run: "Session", settled: "Timeline", step: _Row, recalibrate: Path | None) -> None:
    """Where the time goes that was not predicted, when the step differs by more than a plan should be off."""
    error = step.measured / step.predicted - 1
    if abs(error) <= WORTH_A_PLAN:
        return
    n_steps = len(run.prediction.timeline.step_ends_s)
    predicted = _busy_by_kind(run.plan, run.prediction.timeline.from_step(n_steps - run.prediction.n_cycle_steps))
    measured = _busy_by_kind(run.plan, settled)
    changed = [(abs(measured[k] - predicted[k]), k) for k in predicted if k in measured]
    told = [
        f"{lane} {kind} {show_seconds(predicted[lane, kind])} predicted, {show_seconds(measured[lane, kind])} measured"
        for by_s, (lane, kind) in sorted(changed, reverse=True)
        if by_s > WORTH_NAMING * step.predicted and by_s > WORTH_A_PLAN * predicted[lane, kind]
    ]
    how = "longer" if error > 0 else "shorter"
    where = "; ".join(told[:MOST_NAMED]) or "no kind of op by itself: lanes waited otherwise than predicted"
    click.echo(f"a step took {abs(error):.0%} {how} than predicted: {where}")
    if recalibrate is None and run.device != "emulated":
        click.echo(
            f"to plan for the machine as it is: penstock run {_plan_file(run)} ... --recalibrate profile.json, "
            "then penstock plan ... --machine profile.json"
        )


def _busy_by_kind(plan: "Plan", timeline: "Timeline") -> "dict[tuple[Lane, Kind], float]":
    """Seconds of a step, on average, that each kind of op takes on its lane."""
    from runtime.plan.timeline import often

    total_s: Counter[tuple[Lane, Kind]] = Counter()
    for span in timeline.spans:
        op = plan.ops[span.op]
        total_s[op.lane, op.kind] += often(plan, span) * (span.end_s - span.start_s)  # type: ignore[assignment]
    n_steps = max(len({span.step for span in timeline.spans}), 1)
    return {key: s / n_steps for key, s in total_s.items()}


def refuse_to_recalibrate(path: Path, plan: "Plan", plan_file: Path, device: str) -> None:
    """Now rather than after the run: a profile that could not be written, or that this machine says nothing of."""
    if device != "emulated" and plan.profile["device"]["kind"] != device:
        name = plan.profile["name"]
        raise RunConfigError(f"--recalibrate corrects the profile of {name}, and this run is on another kind; leave it out")
    if path.exists() and path.samefile(plan_file):
        raise RunConfigError(f"--recalibrate {path}: the plan itself would be overwritten; choose another file")
    try:
        try_to_write(path)
    except OSError as error:
        raise RunConfigError(f"{path}: cannot be written ({error.strerror}); choose another --recalibrate") from None


def _recalibrate(run: "Session", timeline: "Timeline", path: Path) -> None:
    """Write the profile as the run shows it to be, and say what that changes."""
    from planner.predict.recalibrate import recalibrate

    day = datetime.now(UTC).date().isoformat()
    try:
        found = recalibrate(run.plan, timeline, f"penstock run, {run.n_steps} steps", day, run.store.device_name())
    except PlanError as error:  # the run itself is over and saved
        click.echo(f"no profile written: {on_one_line(str(error))}", err=True)
        return
    for line in found.words():
        click.echo(line)
    try:
        write_whole(path, json.dumps(found.profile.to_json(), indent=1) + "\n")
    except OSError as error:
        raise RunConfigError(f"{path}: cannot be written ({error.strerror}); make room, or choose another place") from None
    name = on_one_line(str(path))
    click.echo(f"profile: {name}   plan with it: penstock plan MODEL --machine {name}")
