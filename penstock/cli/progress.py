"""Progress of a run on stderr: preparation, overview and steps. Outcome of a run on stdout."""

import math
import os
import resource
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from penstock.hwprofiles.instructions import run_advice
from penstock.runtime.plan.footprint import host_needs, planned_device_needs
from penstock.runtime.units import in_shell, on_one_line, show_bytes, show_count, show_duration, show_seconds

from .outputs import beyond_positions, show_table

if TYPE_CHECKING:
    from penstock.planner.show.facts import Measured
    from penstock.runtime.plan.timeline import Timeline
    from penstock.training.session import Session
    from penstock.training.trainer import Metrics

Figure = tuple[str, float, float, Callable[[float], str]]  # name, predicted, measured, formatter
REPLAN_ERROR = 0.1  # relative error of the step time above which another plan may be faster
MEDIAN_STEPS = 20  # last steps; their median time predicts the remaining time
LONG_S = 30.0  # without a terminal, time between lines of a stage of the preparation


class Preparing(Bar):
    """Display of the preparation of a run: its stage, such as `loading weights: 3 of 34 blocks`, and its duration.

    A terminal shows one line that is redrawn. Elsewhere, a stage gets a line every LONG_S, or at once with `every_stage`. Call it
    with the text of the current stage.
    """

    def __init__(self, every_stage: bool = False) -> None:
        console = Console(stderr=True)
        columns = ("{task.description}", TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.stage, self.patience_s, self.until_s = "starting", 0.0 if every_stage else LONG_S, math.inf
        self.add_task(self.stage, total=None)

    def __call__(self, words: str) -> None:
        (task,) = self.task_ids
        if (stage := words.partition(":")[0]) != self.stage:
            self.reset(task)
            self.stage, self.until_s = stage, time.monotonic() + self.patience_s
        self.update(task, description=words)
        if self.disable and time.monotonic() >= self.until_s:
            click.echo(words if self.patience_s else stage, err=True)
            self.until_s = time.monotonic() + (self.patience_s or math.inf)


def show_overview(rows: Mapping[str, str]) -> None:
    """Print the overview of a run or of data, one line `name: value` per entry."""
    for name, value in rows.items():
        style = {"fg": "yellow"} if name.startswith("warning") else {"bold": True}
        click.echo(f"{click.style(f'{name}:', **style)} {on_one_line(value)}", err=True)


def overview(session: "Session") -> dict[str, str]:
    """Return the facts of a run that a user may want to check before step 1, by name."""
    from penstock.training.inputs import repeated_samples

    performed, first_step, n_steps = session.store.plan.semantics, session.first_step, session.n_steps
    rule, semantics, rate = session.settings.optimizer, session.plan.semantics, session.fixed_lr
    n_again = repeated_samples(session.settings, session.inputs.data)
    repeats = f"; the last is filled up with {n_again:,} samples of the next pass" if n_again else ""
    steps = f"{first_step + 1} to {n_steps}" if first_step < n_steps else "finished, evaluating"
    rows = {
        "model": f"{session.plan.model.name or 'without a name'}, {show_count(session.plan.workload.n_params)} parameters",
        "weights": _weights(session),
        "tokenizer": str(session.inputs.tokenizer_from or "bytes"),
        "device": _device(session),
        **session.inputs.data.words(),
        "steps": f"{steps}, each of {performed.all_ranks.batch_size:,} sequences, {performed.tokens_per_step:,} tokens{repeats}",
        **({"optimizer": f"{semantics.optimizer_in_words}, betas {rule.beta1:g}, {rule.beta2:g}"} if semantics.is_lean else {}),
        "learning rate": f"{rule.lr:g}, {rule.schedule.kind}" if rate is None else f"{rate:g}, set by the loop of this run before",
        "predicted": _predicted(session, n_steps - first_step),
    }
    if session.device == "cpu" and semantics.compute_dtype == "bf16" and (advice := run_advice()) is not None:
        rows["warning, bf16"] = advice
    if (beyond := beyond_positions(session.plan)) is not None:
        rows["warning, length"] = beyond
    if session.inputs.held_out is not None:
        evaluation, words = session.settings.evaluation, session.inputs.held_out.words()
        n, n_all = len(session.inputs.evaluated), session.inputs.held_out.n_steps
        amount = f"{n:,} sequences"
        if n != n_all:
            amount = f"{n:,} of {n_all:,} sequences (a sample by --seed; evaluation.max_sequences)"
        description = ", bad rows ".join(words[name] for name in ("data", "bad rows") if name in words)
        every = f" every {evaluation.every:,} steps" if evaluation.every else ""
        rows["held out"] = f"{description}, {amount} evaluated{every}"
    if session.saves:
        size, free = map(show_bytes, (session.inputs.checkpoint_bytes, shutil.disk_usage(session.folder).free))
        rows["checkpoints"] = f"{size} each, {free} free in {session.settings.out}"
    return rows


def _weights(session: "Session") -> str:
    settings, state, weights = session.settings, session.inputs.state, session.inputs.weights
    if session.device == "emulated":
        return "random, of a tiny stand-in"
    if state is not None:
        return f"{state.path}, after step {state.step}"
    text = f"RANDOM, from scratch, by seed {settings.seed}" if weights is None else str(weights)
    return text if settings.adapter is None else f"{text}, with the adapter {settings.adapter}"


def _device(session: "Session") -> str:
    name = session.plan.profile["name"]
    if session.device == "emulated":
        return f"{name}, emulated {session.scale:.3g} times slower on this CPU; nothing is saved"
    device = session.device_name
    return device if session.is_comparable else f"{device}, instead of the GPU of {name}"


def _predicted(session: "Session", n_steps: int) -> str:
    """Describe the predicted duration on the plan's machine. No duration is known for a machine of another kind."""
    machine, step_s = session.plan.profile["name"], session.prediction.step_s
    if session.device == "emulated":
        return f"{show_duration(n_steps * step_s * session.scale)} here, for {show_duration(n_steps * step_s)} on {machine}"
    note = "" if session.is_comparable else "; this machine is of another kind, and its speed is unknown before some steps"
    return f"{show_duration(n_steps * step_s)} on {machine}, {show_seconds(step_s)} a step{note}"


class Progress(Bar):
    """Display of the steps of a run: a bar and some lines on a terminal, elsewhere one line per step."""

    def __init__(self, session: "Session") -> None:
        console = Console(stderr=True)
        columns = ("step", MofNCompleteColumn(), BarColumn(), "{task.description}")
        self.lines, self.message, self.message_s = "", "", 0.0
        super().__init__(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
        self.session, self.n_done = session, session.first_step
        # An emulated run has the tokens of a stand-in model, and longer seconds
        self.speed_up = session.scale * session.plan.semantics.tokens_per_step / session.store.plan.semantics.tokens_per_step
        self.times_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self.add_task("", total=session.n_steps, completed=session.first_step)

    def step(self, metrics: "Metrics") -> None:
        n_steps, is_first, self.n_done = self.session.n_steps, self.n_done == self.session.first_step, metrics.step
        self.times_s.append(metrics.step_s)
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        remaining = show_duration(median(self.times_s) * (n_steps - self.n_done))
        details = f"lr {metrics.lr:.3g}  left {remaining}  memory {show_bytes(self._peak_bytes())}"
        lanes = "  ".join(f"{lane} {share:.0%}" for lane, share in metrics.busy_fractions().items())
        if metrics.predicted_step_s is not None and not is_first:  # the first step fills the pipeline, which is not predicted
            error = f"{metrics.step_s / metrics.predicted_step_s - 1:+.1%}"
            lanes += f"  {error} against {show_seconds(metrics.predicted_step_s / self.session.scale)} predicted"
        if self.disable:
            click.echo(f"step {metrics.step}/{n_steps}  {words}  {details}  {lanes}".rstrip(), err=True)
        else:
            self.update(self.task_ids[0], completed=metrics.step, description=words)
            self.lines = f"{details}\n{lanes}\n"

    def tell(self, words: str) -> None:
        """Show a message until the end. Safe in a signal handler, which may interrupt a print: a terminal is redrawn later."""
        if self.disable:
            with suppress(OSError):
                os.write(2, f"\n{words}\n".encode())
        else:
            self.message, self.message_s = words, time.monotonic()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        message = f"{self.message} ({time.monotonic() - self.message_s:.0f} s)" if self.message else ""
        yield Text(self.lines + message, no_wrap=True, overflow="ellipsis")

    def _peak_bytes(self) -> int:
        """Return the peak memory of the device, or of the process if the device is the CPU."""
        if (peak_bytes := self.session.store.device_peak_bytes()) is not None:
            return peak_bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


# -- outcome ---------------------------------------------------------------------------------------------------------


def show_outcome(run: "Session", timeline: "Timeline", times_s: list[float]) -> None:
    """Print the final table (predicted, measured, error) and notes. A prediction for another kind of machine is left out."""
    from penstock.planner.show.facts import measured

    measurement = measured(timeline, times_s)
    assert measurement is not None, "a step was performed"
    figures = _figures(run, measurement)
    if run.is_comparable:
        rows = [
            (name, show(predicted), show(value), f"{value / predicted - 1:+.1%}" if predicted > 0 else "")
            for name, predicted, value, show in figures
        ]
        show_table(("", "predicted", "measured", "error"), rows)
    else:
        show_table(("", f"measured on {run.device_name}"), [(name, show(value)) for name, _, value, show in figures])
    spread = f"{show_seconds(measurement.p10_step_s)} to {show_seconds(measurement.p90_step_s)}"
    step = f"median of {measurement.n_steps} after warm-up, P10 to P90 {spread}" if measurement.n_steps else "a single one"
    click.echo(f"step: {step}; measured on {run.device_name}")
    error = measurement.step_s / run.prediction.step_s - 1 if run.is_comparable and measurement.n_steps else 0.0
    for line in _notes(run, error):
        click.echo(line)


def _figures(run: "Session", measurement: "Measured") -> Iterator[Figure]:
    """Yield speeds, and the peak memory of process and device. An emulated run has no memory figures."""
    plan, predicted_s, n_tokens, store = run.plan, run.prediction.step_s, run.plan.semantics.tokens_per_step, run.store
    yield "step", predicted_s, measurement.step_s, show_seconds
    measured_busy_s = measurement.steady.busy_s(plan)
    for lane, busy_s in run.prediction.busy_s(plan).items():
        yield f"busy, {lane}", busy_s, measured_busy_s[lane], show_seconds
    yield "tokens/s", n_tokens / predicted_s, n_tokens / measurement.step_s, lambda n: f"{n:,.0f}" if n >= 100 else f"{n:.3g}"
    if run.device == "emulated":
        return
    on_device, device_peak_bytes = sum(planned_device_needs(plan).values()), store.device_peak_bytes()
    on_host = sum(host_needs(plan).values()) + float(plan.profile["host"]["runtime_bytes"]["value"])
    if device_peak_bytes is not None:
        yield "device, peak", on_device, device_peak_bytes, show_bytes
    else:  # the device is the CPU
        on_host += on_device
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - store.others_bytes()  # Linux counts in KiB
    yield "process, peak", on_host, peak_bytes, show_bytes


def _notes(run: "Session", error: float) -> Iterator[str]:
    """Yield notes on the error of the prediction, on a plan for another machine, and on the files."""
    from penstock.checkpoint.best import read_best
    from penstock.checkpoint.checkpoint import latest

    profile, plan, folder = run.plan.profile, in_shell(run.settings.plan), in_shell(run.folder)
    if abs(error) > REPLAN_ERROR:
        yield f"a step took {abs(error):.0%} {'longer' if error > 0 else 'shorter'} than predicted; a report shows each op"
        if run.device != "emulated":
            yield "to plan for the machine as it is: penstock probe -o profile.json, then penstock plan ... --machine profile.json"
    if run.device == "emulated":
        yield (
            f"emulated {profile['name']}, {run.scale:.3g} times slower: times and tokens/s above are that machine's; "
            f"{run.late_fraction:.1%} of the ops took this computer longer than that"
        )
    elif not run.is_comparable:
        processor = "CPU" if run.device == "cpu" else "GPU"
        yield f"the plan was made for {profile['name']}: its prediction is not comparable with this {processor}"
    elif (name := run.store.device_name()) is not None and name != profile["device"]["name"]:
        yield f"the plan was made for {profile['name']} ({profile['device']['name']}); this is {name}"
    if run.saves:
        yield f"checkpoint: {on_one_line(str(latest(run.folder)))}"
        if run.settings.evaluation.metric is not None and (best := read_best(run.folder)) is not None:
            yield f"best: {best}: {on_one_line(str(run.folder))}/checkpoint-{best.step}"
    yield f"log: {on_one_line(str(run.folder))}/metrics.jsonl   report: penstock report {plan} {folder} -o report.html"
