"""What does the log of a run say?

A log is read as it was left: by a run that is at work, was killed in the middle of a line, or was resumed and wrote some steps
again, of which the later lines count. What is no line of a log is left out and counted.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from planner.predict.settled import WARM_UP_STEPS
from runtime.files import fields_of
from runtime.plan.timeline import Timeline

MOST_POINTS = 1500  # of a curve: about what a wide screen has columns
MOST_SAMPLES, MOST_SAMPLE_CHARACTERS = 8, 2000
LONGEST_STEP_S = 1e9  # a file may say more
COLUMNS = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens")
Points = tuple[list[int], list[float | None]]  # steps and values; None: not finite


@dataclass(slots=True)
class Log:
    """The lines of metrics.jsonl: one per step of training, and one per evaluation."""

    steps: list[int] = field(default_factory=list)  # rising
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    evaluated: list[tuple[int, float | None]] = field(default_factory=list)  # after which step, and the loss
    n_damaged: int = 0  # lines that are none
    is_whole: bool = True  # False: only the end of a very long file was read

    def add(self, fields: dict[str, Any]) -> bool:
        """Take a line's fields; False if they are no line of a log."""
        step = fields.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            return False
        if "eval_loss" in fields:
            self._forget_evaluations_from(step)
            self.evaluated.append((step, number(fields["eval_loss"])))
            return True
        if "loss" not in fields:
            return False
        if self.steps and step <= self.steps[-1]:
            at = bisect_left(self.steps, step)
            del self.steps[at:]
            for values in self.columns.values():
                del values[at:]
            self._forget_evaluations_from(step)
        self.steps.append(step)
        for name, values in self.columns.items():
            values.append(number(fields.get(name)))
        return True

    def _forget_evaluations_from(self, step: int) -> None:
        while self.evaluated and self.evaluated[-1][0] >= step:
            self.evaluated.pop()

    def curve(self, name: str) -> Points:
        """A column, thinned out to what can be drawn."""
        return thinned(self.steps, self.columns[name])

    def settled(self, name: str) -> list[float]:
        """The finite values of a column after the warm-up; all of them if there are no others."""
        values = self.columns[name][WARM_UP_STEPS:] or self.columns[name]
        return [v for v in values if v is not None]

    @property
    def n_not_finite(self) -> int:
        """Steps whose loss was no number."""
        return sum(loss is None for loss in self.columns["loss"])

    def is_of(self, tokens_per_step: int) -> bool:
        """Whether steps were as large as these; those of a stand-in for a model are smaller, and its speed is its own."""
        n_tokens = [n for n in self.columns["tokens"] if n is not None]
        return not n_tokens or median(n_tokens) > tokens_per_step / 2


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """What the model said."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """What a run left in its folder; None, or nothing, where it left none."""

    timeline: Timeline | None
    log: Log
    samples: tuple[LoggedSample, ...] = ()

    def step_times_s(self, tokens_per_step: int) -> list[float]:
        """Seconds of the settled steps: of all that were logged, else of those whose ops are known."""
        logged = _that_can_be(self.log.settled("step_s")) if self.log.is_of(tokens_per_step) else []
        if logged:
            return logged
        times_s = [] if self.timeline is None else _that_can_be(self.timeline.step_times_s)
        return times_s[WARM_UP_STEPS - 1 :] or times_s  # the first is the second step's


def _that_can_be(times_s: Iterable[float]) -> list[float]:
    return [t for t in times_s if 0 < t < LONGEST_STEP_S]


def read_log(lines: Iterable[bytes], is_whole: bool = True) -> Log:
    """The log in the lines of metrics.jsonl."""
    log = Log(is_whole=is_whole)
    for line in lines:
        fields = fields_of(line)
        if fields is None or not log.add(fields):
            log.n_damaged += bool(line.strip())
    return log


def read_samples(lines: Iterable[bytes]) -> tuple[LoggedSample, ...]:
    """The last samples in the lines of samples.jsonl: those of the highest step."""
    last: list[LoggedSample] = []
    for line in lines:
        fields = fields_of(line) or {}
        step, text = fields.get("step"), fields.get("text")
        if not isinstance(step, int) or not isinstance(text, str):
            continue
        if last and step != last[-1].step:
            last = []
        prompt = fields.get("prompt", fields.get("name"))
        if len(last) < MOST_SAMPLES:
            last.append(LoggedSample(step, _cut(prompt) if isinstance(prompt, str) else "", _cut(text)))
    return tuple(last)


def number(value: object) -> float | None:
    """A finite number, or None for anything else that a line may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def thinned(steps: Sequence[int], values: Sequence[float | None]) -> Points:
    """Few enough points to draw: of each of a number of equal runs of steps the lowest, the highest, and one that is no number."""
    if len(steps) <= MOST_POINTS:
        return list(steps), list(values)
    chosen: set[int] = {0, len(steps) - 1}
    n_runs = MOST_POINTS // 3
    for i in range(n_runs):
        run = range(i * len(steps) // n_runs, (i + 1) * len(steps) // n_runs)
        finite = [(v, at) for at in run if (v := values[at]) is not None]
        chosen |= {min(finite)[1], max(finite)[1]} if finite else set()
        if len(finite) < len(run):
            chosen.add(next(at for at in run if values[at] is None))
    ordered = sorted(chosen)
    return [steps[at] for at in ordered], [values[at] for at in ordered]


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SAMPLE_CHARACTERS else text[:MOST_SAMPLE_CHARACTERS] + " ..."
