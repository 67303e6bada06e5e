"""What does a user see during a run?"""

import resource
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import click

from runtime.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from runtime.train.trainer import Metrics

REMEMBERED_STEPS = 20  # whose times say how long the rest will take


class Progress:
    """A bar and two lines below it on a terminal, a line per step elsewhere; both on stderr.

    `speed_up`: tokens/s shown over those of the run; `scale`: how many times slower than the machine that is shown.
    """

    def __init__(
        self,
        first_step: int,
        n_steps: int,
        speed_up: float,
        scale: float = 1.0,
        device_peak_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        from rich import progress
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self.n_done, self.n_steps, self.speed_up, self.scale = first_step, n_steps, speed_up, scale
        self.device_peak_bytes = device_peak_bytes
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
        self.live = Live(self._picture(""), console=console, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if not self.plain:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.plain:
            self.live.stop()

    def step(self, metrics: "Metrics") -> None:
        self.n_done = metrics.step
        self.times_s.append(metrics.step_s)
        words = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s * self.speed_up:,.0f} tokens/s"
        words += "  skipped: not finite" if metrics.skipped else ""
        more = f"lr {metrics.lr:.3g}  left {self._left()}  memory {show_bytes(self._peak_bytes())}"
        lanes = self._lanes(metrics)
        if self.plain:
            click.echo(f"step {metrics.step}/{self.n_steps}  {words}  {more}  {lanes}".rstrip(), err=True)
            return
        self.bar.update(self.task, completed=metrics.step, description=words)
        self.live.update(self._picture(f"{more}\n{lanes}"))

    def _picture(self, lines: str) -> "Group":
        from rich.console import Group
        from rich.text import Text

        return Group(self.bar, Text(lines, no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        """How long the rest takes at the pace of the last steps."""
        left_s = median(self.times_s) * (self.n_steps - self.n_done)
        if left_s < 100:
            return f"{left_s:.0f} s"
        hours, minutes = divmod(round(left_s / 60), 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"

    def _peak_bytes(self) -> int:
        """Of the device, or of the process where the device's memory is the process's own."""
        found = self.device_peak_bytes()
        return found if found is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    def _lanes(self, metrics: "Metrics") -> str:
        """How busy each lane was, and how far the step was from what was predicted."""
        words = "  ".join(f"{lane} {share:.0%}" for lane, share in metrics.busy_fractions().items())
        if metrics.predicted_step_s is None:
            return words
        error = f"{metrics.step_s / metrics.predicted_step_s - 1:+.1%}"
        return f"{words}  {error} against {show_seconds(metrics.predicted_step_s / self.scale)} predicted"
