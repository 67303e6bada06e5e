"""What does a user see of a run?"""

import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .units import on_one_line, show_bytes, show_seconds

if TYPE_CHECKING:
    from planner.simulate import Prediction

    from .emulated import EmulatedMachine
    from .plan import Plan
    from .region import Demand, Region
    from .trainer import Metrics, Training


class Progress:
    """A bar on a terminal, a line per step elsewhere; both on stderr. `speed_up`: tokens/s shown over those of the run."""

    def __init__(self, first_step: int, n_steps: int, speed_up: float) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        self.n_steps, self.speed_up, self.plain = n_steps, speed_up, not console.is_terminal
        columns = (
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
        )
        self.bar = progress.Progress(*columns, console=console, disable=self.plain)
        self.task = self.bar.add_task("", total=n_steps, completed=first_step)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, metrics: "Metrics") -> None:
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        if self.plain:
            click.echo(f"step {metrics.step}/{self.n_steps}  {words}", err=True)
        self.bar.update(self.task, completed=metrics.step, description=words)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    predicted: float
    measured: float
    show: Callable[[float], str]

    def cells(self) -> tuple[str, str, str, str]:
        error = f"{self.measured / self.predicted - 1:+.1%}" if self.predicted > 0 else ""
        return self.name, self.show(self.predicted), self.show(self.measured), error


def demands_of(plan: "Plan") -> "tuple[list[Demand], Region]":
    """What the plan asks of the machine in its profile, op by op."""
    from hwprofiles.schema import Profile
    from planner.cost import costs, region_of

    profile = Profile.from_json(plan.profile, "the plan's profile")
    return costs(plan, profile), region_of(profile)


def show_outcome(
    plan_file: Path, plan: "Plan", training: "Training", device: str, scale: float, timeline: Any, times_s: list[float]
) -> None:
    """The final table on stdout: predicted, measured, error; and where things lie."""
    from planner.simulate import simulate

    from .trainer import scaled, write_timeline

    prediction = simulate(plan, *demands_of(plan))
    if scale != 1.0:
        timeline, times_s = scaled(timeline, scale), [t / scale for t in times_s]
        write_timeline(training.folder / "timeline.json", timeline)
    _table(_rows(plan, prediction, timeline, times_s, training, device))
    if times_s:
        ordered = sorted(times_s)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        click.echo(f"step: median of {len(times_s)} after warm-up, P10 to P90 {show_seconds(low)} to {show_seconds(high)}")
    _notes(plan_file, plan, training, device, scale)


def _rows(
    plan: "Plan", prediction: "Prediction", timeline: Any, times_s: list[float], training: "Training", device: str
) -> list[_Row]:
    step_s = statistics.median(times_s) if times_s else timeline.total_s
    rows = [_Row("step", prediction.step_s, step_s, show_seconds)]
    settled = timeline.from_step(min((s.step for s in timeline.spans), default=0) + 1) if times_s else timeline
    predicted_busy_s, measured_busy_s = prediction.busy_s(plan), settled.busy_s(plan)
    rows += [_Row(f"busy, {lane}", predicted_busy_s[lane], measured_busy_s[lane], show_seconds) for lane in predicted_busy_s]
    n_tokens = plan.semantics.tokens_per_step
    rows.append(_Row("tokens/s", n_tokens / prediction.step_s, n_tokens / step_s, lambda v: f"{v:.4g}"))
    return rows if device == "emulated" else [*rows, *_memory_rows(plan, training)]


def _memory_rows(plan: "Plan", training: "Training") -> list[_Row]:
    by_arena = training.store.arenas.n_bytes
    in_arenas = sum(by_arena[a.name] for a in plan.arenas if a.place == "device")
    rows = [
        _Row("device arenas", plan.device_arena_bytes, in_arenas, show_bytes),
        _Row("host arenas", plan.host_arena_bytes, sum(by_arena.values()) - in_arenas, show_bytes),
    ]
    on_device = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes
    on_host = plan.host_arena_bytes + float(plan.profile["host"]["runtime_bytes"]["value"])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    device_peak_bytes = training.store.device_peak_bytes()
    if device_peak_bytes is None:  # the device's memory is the process's own
        return [*rows, _Row("process, peak", on_device + on_host, peak_bytes, show_bytes)]
    return [
        *rows,
        _Row("device, peak", on_device, device_peak_bytes, show_bytes),
        _Row("process, peak", on_host, peak_bytes, show_bytes),
    ]


def _table(rows: list[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not sys.stdout.isatty():
        click.echo("\t".join(("", "predicted", "measured", "error")))
        for row in rows:
            click.echo("\t".join(row.cells()))
        return
    table = Table("", "predicted", "measured", "error")
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)


def _notes(plan_file: Path, plan: "Plan", training: "Training", device: str, scale: float) -> None:
    from .checkpoint import latest

    if device == "emulated":
        machine: EmulatedMachine | Any = training.machine
        bound = machine.n_real_work_binds / max(machine.n_performed, 1)
        click.echo(
            f"emulated {plan.profile['name']}, {scale:.3g} times slower: times and tokens/s above are that machine's; "
            f"{bound:.1%} of the ops took this computer longer than that"
        )
    elif plan.profile["device"]["kind"] != device:
        here = "CPU" if device == "cpu" else "GPU"
        click.echo(f"the plan was made for {plan.profile['name']}: its prediction is not comparable with this {here}")
    elif (name := training.store.device_name()) is not None and name != plan.profile["device"]["name"]:
        click.echo(f"the plan was made for {plan.profile['name']} ({plan.profile['device']['name']}); this is {name}")
    if device != "emulated":
        click.echo(f"host memory: {training.store.arenas.host_words()}")
    if training.saves:
        click.echo(f"checkpoint: {on_one_line(str(latest(training.folder)))}")
    folder = on_one_line(str(training.folder))
    click.echo(f"log: {folder}/metrics.jsonl   trace: penstock report {on_one_line(str(plan_file))} {folder} -o trace.json")
