"""Progress of a command on stderr: what is prepared, the overview of a run, and its steps."""

import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from runtime.units import on_one_line, show_bytes, show_duration, show_seconds

if TYPE_CHECKING:
    from penstock.training.trainer import Metrics

REMEMBERED_STEPS = 20  # whose median time predicts how long the rest takes
LONG_S = 30.0  # on a pipe, preparation is worth a line if it takes as long
LANES = {"h2d": "copies in", "gpu": "compute", "d2h": "copies out", "cpu": "optimizer"}  # where no GPU computes


class Preparing:
    """The preparation in progress, such as `loading weights: 3 of 34 blocks`, and for how long.

    On a terminal a line that is drawn again, elsewhere a line for whatever takes long, or for `each` thing as it begins. Called
    with the words of what begins.
    """

    def __init__(self, each: bool = False) -> None:
        console = Console(stderr=True)
        self.bar = Bar("{task.description}", TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
        self.each, self.words, self.timer = each, "starting", threading.Timer(LONG_S, self._print)
        self.bar.add_task(self.words, total=None)

    def __enter__(self) -> "Preparing":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.timer.cancel()
        self.bar.stop()

    def __call__(self, words: str) -> None:
        (task,) = self.bar.task_ids
        stage = words.partition(":")[0]
        if stage != self.words.partition(":")[0]:
            if self.each and self.bar.disable:
                click.echo(stage, err=True)
            self.bar.reset(task)
            self.timer.cancel()
            self.timer = threading.Timer(LONG_S, self._print)
            self.timer.daemon = True
            self.timer.start()
        self.words = words
        self.bar.update(task, description=words)

    def _print(self) -> None:
        if self.bar.disable:
            click.echo(f"{self.words}  {LONG_S:.0f} s", err=True)


def show_overview(rows: Mapping[str, str], warning: str | None) -> None:
    """Print the overview of a run, a line `name: value` each."""
    for name, value in rows.items():
        click.echo(f"{click.style(f'{name}:', bold=True)} {on_one_line(value)}", err=True)
    if warning is not None:
        click.echo(f"{click.style('warning:', fg='yellow')} {on_one_line(warning)}", err=True)


class Progress(Bar):
    """Steps of a run: a bar and some lines below it on a terminal, elsewhere a line per step.

    `speed_up`: tokens/s shown over the run's own; `scale`: slowdown of an emulated machine; `lanes`: their names on a terminal.
    """

    def __init__(
        self,
        first_step: int,
        n_steps: int,
        speed_up: float,
        scale: float = 1.0,
        device_peak_bytes: Callable[[], int | None] = lambda: None,
        lanes: Mapping[str, str] | None = None,
    ) -> None:
        console = Console(stderr=True)
        columns = ("step", MofNCompleteColumn(), BarColumn(), "{task.description}")
        self.lines, self.told, self.told_s = "", "", 0.0
        super().__init__(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
        self.first_step, self.n_done, self.n_steps, self.speed_up, self.scale = first_step, first_step, n_steps, speed_up, scale
        self.device_peak_bytes, self.lanes = device_peak_bytes, {} if self.disable else lanes or {}
        self.times_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.add_task("", total=n_steps, completed=first_step)

    def step(self, metrics: "Metrics") -> None:
        """Show a step that is done."""
        is_first, self.n_done = self.n_done == self.first_step, metrics.step
        self.times_s.append(metrics.step_s)
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        left = show_duration(median(self.times_s) * (self.n_steps - self.n_done))
        more = f"lr {metrics.lr:.3g}  left {left}  memory {show_bytes(self._peak_bytes())}"
        lanes = self._lanes(metrics)
        if metrics.predicted_step_s is not None and not is_first:  # the first step fills the pipeline, which is not predicted
            error = f"{metrics.step_s / metrics.predicted_step_s - 1:+.1%}"
            lanes += f"  {error} against {show_seconds(metrics.predicted_step_s / self.scale)} predicted"
        if self.disable:
            click.echo(f"step {metrics.step}/{self.n_steps}  {words}  {more}  {lanes}".rstrip(), err=True)
        else:
            self.update(self.task_ids[0], completed=metrics.step, description=words)
            self.lines = f"{more}\n{lanes}\n"

    def tell(self, words: str) -> None:
        """Show words until the end. Safe in a signal handler, which may interrupt any print: on a terminal the next redraw shows
        them."""
        if self.disable:
            with suppress(OSError):
                os.write(2, f"\n{words}\n".encode())
        else:
            self.told, self.told_s = words, time.monotonic()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        told = f"{self.told} ({time.monotonic() - self.told_s:.0f} s)" if self.told else ""
        yield Text(self.lines + told, no_wrap=True, overflow="ellipsis")

    def _lanes(self, metrics: "Metrics") -> str:
        return "  ".join(f"{self.lanes.get(lane, lane)} {share:.0%}" for lane, share in metrics.busy_fractions().items())

    def _peak_bytes(self) -> int:
        """Peak memory of the device, or of the process where the device's memory is the process's own."""
        found = self.device_peak_bytes()
        return found if found is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
