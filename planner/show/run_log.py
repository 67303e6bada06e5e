"""Log and timeline in a run's folder.

The run may be in progress, killed in the middle of a line, or resumed: of steps that were logged twice, the later lines count.
Damaged lines are skipped and counted.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.runtime.files import fields_of
from penstock.runtime.plan.timeline import Timeline

LONGEST_STEP_S = 1e9  # larger values in a file are ignored
LONGEST_NAME = 120  # characters of a device
LOSSES = frozenset({"loss", "eval_loss"})  # every line of a log has one of them
COLUMNS = ("loss", "lr", "step_s", "tokens_per_s", "tokens")


@dataclass(slots=True)
class Log:
    """Lines of metrics.jsonl: one per training step, and one per evaluation."""

    steps: list[int] = field(default_factory=list)  # ascending
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in COLUMNS})  # None: not finite
    evaluated: list[tuple[int, float | None]] = field(default_factory=list)  # (step, loss)
    n_damaged: int = 0  # lines
    device: str | None = None  # of the last step; None: not logged
    is_comparable: bool = True  # False: the last step ran on another kind of machine than the plan's

    def add(self, fields: dict[str, Any]) -> bool:
        """Add the fields of a line. Return False if it is not a line of a log."""
        step = fields.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53 or LOSSES.isdisjoint(fields):
            return False
        is_evaluation = "eval_loss" in fields
        if is_evaluation or (self.steps and step <= self.steps[-1]):
            while self.evaluated and self.evaluated[-1][0] >= step:
                self.evaluated.pop()
        if is_evaluation:
            self.evaluated.append((step, number(fields["eval_loss"])))
            return True
        device = fields.get("device")
        self.device = device[:LONGEST_NAME] if isinstance(device, str) and device else None
        self.is_comparable = fields.get("predicted_step_s", 0.0) is not None
        index = bisect_left(self.steps, step)
        self.steps[index:] = [step]
        for name, values in self.columns.items():
            values[index:] = [number(fields.get(name))]
        return True

    def has_step_size(self, tokens_per_step: int) -> bool:
        """True if logged steps have this number of tokens. Emulated runs train a stand-in model on fewer."""
        n_tokens = [n for n in self.columns["tokens"] if n is not None]
        return not n_tokens or median(n_tokens) > tokens_per_step / 2


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Files of a run's folder. A missing file is None or an empty log."""

    timeline: Timeline | None
    log: Log
    best: str | None = None  # checkpoint by a metric

    def step_times_s(self, tokens_per_step: int) -> list[float]:
        """Sorted durations of steady-state steps, from the log or else from the timeline."""
        logged = self.log.columns["step_s"] if self.log.has_step_size(tokens_per_step) else []
        traced = [] if self.timeline is None else self.timeline.step_times_s
        # The timeline's first time is that of the second step.
        for times_s in (logged[WARM_UP_STEPS:], logged, traced[WARM_UP_STEPS - 1 :], traced):
            if settled := sorted(t for t in times_s if t is not None and 0 < t < LONGEST_STEP_S):
                return settled
        return []


def read_log(lines: Iterable[bytes]) -> Log:
    log = Log()
    for line in lines:
        fields = fields_of(line)
        if fields is None or not log.add(fields):
            log.n_damaged += bool(line.strip())
    return log


def number(value: object) -> float | None:
    """Convert to a finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)
