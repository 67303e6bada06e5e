"""What does a user see while a command is at work?"""

import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

import click

from runtime.units import on_one_line, show_bytes, show_duration, show_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from penstock.training.trainer import Metrics

REMEMBERED_STEPS = 20  # whose times say how long the rest will take
LONG_S = 30.0  # what is done before the first step is a line on a pipe only if it takes so long
LANES = {"h2d": "copies in", "gpu": "compute", "d2h": "copies out", "cpu": "optimizer"}  # where no GPU computes


class Preparing:
    """What is done before the first step, and for how long: a line on a terminal while it is done, else one for what takes long.

    Called with what is done now, as `loading weights: 3 of 34 blocks`.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self.plain = not console.is_terminal
        self.words, self.since_s, self.is_over = "starting", time.monotonic(), threading.Event()
        self.live = Live(get_renderable=self._picture, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Preparing":
        if self.plain:
            threading.Thread(target=self._tell_what_is_long, name="preparing", daemon=True).start()
        else:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """All is prepared."""
        self.is_over.set()
        if not self.plain:
            self.live.stop()

    def __call__(self, words: str) -> None:
        if words.partition(":")[0] != self.words.partition(":")[0]:
            self.since_s = time.monotonic()
        self.words = words

    def _picture(self) -> "Text":
        from rich.text import Text

        return Text(f"{self.words}  {time.monotonic() - self.since_s:.0f} s", no_wrap=True, overflow="ellipsis")

    def _tell_what_is_long(self) -> None:
        told = ""
        while not self.is_over.wait(1.0):
            what = self.words.partition(":")[0]
            if what != told and time.monotonic() - self.since_s > LONG_S:
                click.echo(str(self._picture()), err=True)
                told = what


def show_overview(rows: Mapping[str, str], warning: str | None) -> None:
    """The first table of a run, on stderr: on a terminal in two columns, elsewhere a line `name: value` each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(stderr=True), Table.grid(padding=(0, 2))
    plain = {name: on_one_line(value) for name, value in rows.items()} | ({} if warning is None else {"warning": warning})
    for name, value in plain.items():
        if console.is_terminal:
            table.add_row(Text(name, style="yellow" if name == "warning" else "bold"), Text(value))
        else:
            click.echo(f"{name}: {value}", err=True)
    console.print(table) if console.is_terminal else None


class Progress:
    """A bar and some lines below it on a terminal, a line per step elsewhere; both on stderr.

    `speed_up`: tokens/s shown over those of the run; `scale`: how many times slower than the machine that is shown; `lanes`: what
    a terminal calls the lanes.
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
        from rich import progress
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self.n_done, self.n_steps, self.speed_up, self.scale = first_step, n_steps, speed_up, scale
        self.first_step, self.is_first = first_step, True  # which fills the pipeline: nobody predicted that
        self.device_peak_bytes, self.lanes = device_peak_bytes, lanes if lanes and console.is_terminal else {}
        self.plain = not console.is_terminal
        self.times_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        columns = (
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
        )
        self.bar = progress.Progress(*columns, console=console, auto_refresh=False, disable=self.plain)
        self.task = self.bar.add_task("", total=n_steps, completed=first_step)
        self.lines, self.told, self.told_s = "", "", 0.0
        self.live = Live(get_renderable=self._picture, console=console, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if not self.plain:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.plain:
            self.live.stop()

    def step(self, metrics: "Metrics") -> None:
        self.is_first, self.n_done = self.n_done == self.first_step, metrics.step
        self.times_s.append(metrics.step_s)
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        more = f"lr {metrics.lr:.3g}  left {self._left()}  memory {show_bytes(self._peak_bytes())}"
        lanes = self._lanes(metrics)
        if self.plain:
            click.echo(f"step {metrics.step}/{self.n_steps}  {words}  {more}  {lanes}".rstrip(), err=True)
            return
        self.bar.update(self.task, completed=metrics.step, description=words)
        self.lines = f"{more}\n{lanes}\n"

    def tell(self, words: str) -> None:
        """Something that stays in sight. A signal handler tells it too, which may have come into whatever is being printed: on a
        terminal it is shown when the bar is drawn next."""
        if self.plain:
            with suppress(OSError):
                os.write(2, f"\n{words}\n".encode())
        else:
            self.told, self.told_s = words, time.monotonic()

    def _picture(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        told = f"{self.told} ({time.monotonic() - self.told_s:.0f} s)" if self.told else ""
        return Group(self.bar, Text(self.lines + told, no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        """How long the rest takes at the pace of the last steps."""
        return show_duration(median(self.times_s) * (self.n_steps - self.n_done))

    def _peak_bytes(self) -> int:
        """Of the device, or of the process where the device's memory is the process's own."""
        found = self.device_peak_bytes()
        return found if found is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    def _lanes(self, metrics: "Metrics") -> str:
        """How busy each lane was, and how far the step was from what was predicted."""
        words = "  ".join(f"{self.lanes.get(lane, lane)} {share:.0%}" for lane, share in metrics.busy_fractions().items())
        if metrics.predicted_step_s is None or self.is_first:
            return words
        error = f"{metrics.step_s / metrics.predicted_step_s - 1:+.1%}"
        return f"{words}  {error} against {show_seconds(metrics.predicted_step_s / self.scale)} predicted"
