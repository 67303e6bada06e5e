"""Predictions of published runs, their errors, and fits to them.

The ledger: published runs, each predicted from profile, system and model. The run itself only contributes name, batch and sequence
length. Runs without a prediction are kept, with a reason.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.workload import read_model
from penstock.planner.predict.scaled_profile import Group, group_of, scaled
from penstock.runtime.errors import PenstockError
from penstock.runtime.files import read_whole
from penstock.runtime.units import GiB

from .system_costs import SOFTWARE_SPREAD_FRACTION, Software
from .systems import SYSTEMS, VARIANTS, Outcome, Run, predict

MAX_RUNS_FILE_BYTES = 16 * 2**20
TFLOP = 10**12
REQUIRED = {"id": str, "system": str, "machine": str, "model": str, "batch": int, "seq": int, "measured": dict}
OPTIONAL = ("variant", "optimizer", "note", "source")
MEMORY = {"device_peak_gib": "device memory", "host_rss_gib": "host memory"}
STEP = "step"
SOFTWARE = Software()
# Errors of jointly fitted constants cancel: a rate too high is paired with an overhead too high. On fitted machines, a step is
# therefore more certain than the sum of its spreads, by the factor of leave-one-out errors (docs/accuracy.md).
FITTED_FRACTION = 0.7
LARGEST_COUNT = 2**24  # sequences per step, or tokens per sequence: more than any run


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run and its measurements. `ignored`: keys of the file without a meaning."""

    name: str
    run: Run
    measured: dict[str, float]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the ledger. `predicted` has the keys of `measured`; None without a prediction."""

    name: str
    run: Run
    measured: dict[str, float]
    predicted: dict[str, float | None]
    ignored: tuple[str, ...] = ()
    step_s: float | None = None  # predicted
    why_not: str | None = None  # reason without a prediction
    interval_fraction: float | None = None  # P10 to P90 of the step: divided and multiplied by 1 + this

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured step time, minus 1: positive if the prediction is slower."""
        for key, inverse in (("step_s", False), ("tokens_per_s", True), ("claimed_tflop_per_s", True)):
            measured, predicted = self.measured.get(key), self.predicted.get(key)
            if measured is not None and predicted is not None:
                return (measured / predicted if inverse else predicted / measured) - 1
        return None

    @property
    def covered(self) -> bool | None:
        """True if the measured step is between P10 and P90."""
        if self.error_fraction is None or self.interval_fraction is None:
            return None
        return abs(math.log1p(self.error_fraction)) <= math.log1p(self.interval_fraction)

    def error_of(self, key: str) -> float | None:
        """Return the error of one measured quantity."""
        predicted = self.predicted.get(key)
        return None if predicted is None or key not in self.measured else predicted / self.measured[key] - 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """Published runs, predicted and measured."""

    rows: tuple[Row, ...]

    def errors(self, key: str = STEP) -> list[float]:
        """Return absolute errors of the step, or of one measured quantity, in ascending order."""
        values = [row.error_fraction if key == STEP else row.error_of(key) for row in self.rows]
        return sorted(abs(e) for e in values if e is not None)

    def median(self, key: str = STEP) -> float | None:
        errors = self.errors(key)
        return statistics.median(errors) if errors else None

    def p90(self, key: str = STEP) -> float | None:
        return quantile(self.errors(key), 0.9)

    @property
    def coverage_fraction(self) -> float | None:
        """Share of runs with the measured step between P10 and P90: about 0.8 for correct spreads."""
        known = [row.covered for row in self.rows if row.covered is not None]
        return sum(known) / len(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Return the output of `python -m benchmarks.validate --json`: runs, step errors, and median memory errors."""
        return {
            "runs": [
                {
                    "id": row.name,
                    "predicted": row.predicted,
                    "measured": row.measured,
                    "error_fraction": row.error_fraction,
                    "interval_fraction": row.interval_fraction,
                    **({"why_not": row.why_not} if row.why_not else {}),
                    **({"ignored": list(row.ignored)} if row.ignored else {}),
                }
                for row in self.rows
            ],
            "median_error_fraction": self.median(),
            "p90_error_fraction": self.p90(),
            "coverage_fraction": self.coverage_fraction,
            "memory_median_error_fraction": {key: self.median(key) for key in MEMORY},
        }

    def table(self) -> str:
        """Format a row per run and the summary for a terminal."""
        lines = [f"{'run':44} {'what':22} {'predicted':>10} {'measured':>10} {'error':>8}"]
        for row in self.rows:
            name = row.name
            if row.why_not:
                lines.append(f"{name:44} not predicted: {row.why_not}")
                continue
            for key, measured in row.measured.items():
                error = row.error_of(key)
                predicted = row.predicted.get(key)
                columns = f"{'-':>10} {measured:10.4g} {'-':>8}" if predicted is None or error is None else None
                lines.append(f"{name:44} {key:22} " + (columns or f"{predicted:10.4g} {measured:10.4g} {error:+8.1%}"))
                name = ""
            if row.interval_fraction is not None:
                low, high = 1 / (1 + row.interval_fraction) - 1, row.interval_fraction
                covered = {True: "holds it", False: "misses it", None: "nothing measured"}[row.covered]
                lines.append(f"{'':44} P10 to P90 of the step: {low:+.0%} to {high:+.0%}, {covered}")
            if row.ignored:
                lines.append(f"{'':44} not read: {', '.join(row.ignored)}")
        return "\n".join([*lines, "", *self.summary()])

    def summary(self) -> list[str]:
        """Return a line for the step and one per kind of memory."""
        lines = []
        for key, name in {STEP: "step time", **MEMORY}.items():
            errors, median, p90 = self.errors(key), self.median(key), self.p90(key)
            if median is not None and p90 is not None:
                lines.append(
                    f"{name}: median error {median:.1%}, 90th percentile {p90:.1%}, worst {errors[-1]:.1%}, {len(errors)} runs"
                )
        if self.coverage_fraction is not None:
            lines.append(
                f"P10 to P90 holds the measured step in {self.coverage_fraction:.0%} of the runs; honest spreads would hold 80%"
            )
        missing = sum(row.error_fraction is None for row in self.rows)
        return [*lines, *([f"no step time to compare: {missing} runs"] if missing else [])]


def quantile(ascending: list[float], share: float) -> float | None:
    """Interpolate linearly."""
    if not ascending:
        return None
    position = share * (len(ascending) - 1)
    low = int(position)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (position - low) * (ascending[high] - ascending[low])


def validate_file(path: str) -> Ledger:
    """Return the ledger of a file of runs, with intervals. PenstockError describes an invalid file in one line."""
    runs = read_runs(path)
    return with_intervals(validate(runs), runs)


def validate(
    runs: Iterable[PublishedRun], software: Software = SOFTWARE, profile_of: Callable[[str], Profile] = read_profile
) -> Ledger:
    """Predict every run. `profile_of`: machine name -> profile."""
    known = cache(profile_of)
    return Ledger(tuple(_row(published, software, known) for published in runs))


def with_intervals(ledger: Ledger, runs: Sequence[PublishedRun]) -> Ledger:
    """Add prediction intervals: each group of a profile's speeds, and each constant of the software, slower by its spread.

    Independent changes of the step are summed in squares. A spread covers 80 %, and so does their sum, which is reduced on fitted
    machines by FITTED_FRACTION.
    """
    variance = [0.0] * len(runs)
    for software, profile_of in _doubts():
        for i, (row, moved) in enumerate(zip(ledger.rows, validate(runs, software, profile_of).rows, strict=True)):
            base, slower = row.step_s, moved.step_s
            if base is not None and slower is not None:
                variance[i] += math.log(slower / base) ** 2
    return Ledger(
        tuple(
            row
            if row.step_s is None
            else replace(row, interval_fraction=math.expm1(_tied_fraction(row.run.machine) * math.sqrt(v)))
            for row, v in zip(ledger.rows, variance, strict=True)
        )
    )


def _tied_fraction(machine: str) -> float:
    return FITTED_FRACTION if any(key.startswith("fitted_") for key in read_profile(machine).sources) else 1.0


def _doubts() -> Iterator[tuple[Software, Callable[[str], Profile]]]:
    """Yield software and profiles with one group of speeds, or one constant, slower by its spread."""
    for group in Group:
        yield SOFTWARE, lambda name, group=group: slower(read_profile(name), group)  # type: ignore[misc]
    for key, spread_fraction in SOFTWARE_SPREAD_FRACTION.items():
        slow = getattr(SOFTWARE, key) * (
            1 + spread_fraction if key.endswith("_s") and "_per_s" not in key else 1 / (1 + spread_fraction)
        )
        yield replace(SOFTWARE, **{key: slow}), read_profile


def slower(profile: Profile, group: Group) -> Profile:
    """Return the machine with one group of speeds slower by its spread."""
    spreads = {place: q.spread_fraction for place, q in profile.quantities() if group_of(place) is group}
    return scaled(profile, {place: 1 / (1 + spread) for place, spread in spreads.items()})


def _row(published: PublishedRun, software: Software, profile_of: Callable[[str], Profile]) -> Row:
    row = Row(published.name, published.run, published.measured, {}, published.ignored)
    try:
        outcome = predict(published.run, read_model(published.run.model), profile_of(published.run.machine), software)
    except PenstockError as error:
        return replace(row, predicted=dict.fromkeys(published.measured), why_not=str(error))
    return replace(row, predicted=_as_measured(outcome, published.measured), step_s=outcome.step_s)


def _as_measured(outcome: Outcome, measured: Mapping[str, float]) -> dict[str, float | None]:
    known = {
        **outcome.phases_s,
        "step_s": outcome.step_s,
        "tokens_per_s": outcome.n_tokens / outcome.step_s,
        "claimed_tflop_per_s": outcome.claimed_flop / outcome.step_s / TFLOP,
        "device_peak_gib": outcome.device_peak_bytes / GiB,
        "host_rss_gib": outcome.host_peak_bytes / GiB,
    }
    return {key: known.get(key) for key in measured}


def read_runs(path: str) -> list[PublishedRun]:
    """Read runs from a file: {"runs": [...]}, or the list alone."""
    file = Path(path)
    try:
        fields = json.loads(read_whole(file, MAX_RUNS_FILE_BYTES))
    except OSError as error:
        raise PenstockError(f"{_plain(path)}: cannot be read ({error.strerror}); give a file of runs") from None
    except (ValueError, RecursionError) as error:  # includes invalid UTF-8 and endless numbers
        raise PenstockError(f'{_plain(path)}: not JSON ({_plain(str(error))}); write {{"runs": [...]}}') from None
    runs = fields.get("runs") if isinstance(fields, dict) else fields
    if not isinstance(runs, list) or not runs:
        raise PenstockError(f'{_plain(path)}: no runs in it; write {{"runs": [{{"id": ..., "system": ..., ...}}]}}')
    published = [_published(fields, f"{_plain(path)}: run {i}") for i, fields in enumerate(runs)]
    counts = Counter(run.name for run in published)
    twice = next((name for name, n in counts.items() if n > 1), None)
    if twice is not None:
        raise PenstockError(f"{_plain(path)}: two runs have the id {twice!r}; give each its own")
    return published


def _published(fields: Any, where: str) -> PublishedRun:
    if not isinstance(fields, dict):
        raise PenstockError(f"{where}: not a run but {type(fields).__name__}; write an object with {', '.join(REQUIRED)}")
    for key, kind in REQUIRED.items():
        if not isinstance(fields.get(key), kind) or isinstance(fields[key], bool):
            raise PenstockError(f"{where}: `{key}` is missing or not {kind.__name__}; add it")
    where = f"{where} ({_plain(fields['id'])})"
    for key in ("machine", "model"):
        if Path(fields[key]).name != fields[key]:
            raise PenstockError(f"{where}: {key} {_plain(fields[key])!r} is a path; name a shipped one, or a file in this folder")
    for key in ("batch", "seq"):
        if not 0 < fields[key] <= LARGEST_COUNT:
            raise PenstockError(f"{where}: `{key}` is {fields[key]}; give a count from 1 to {LARGEST_COUNT}")
    variant, optimizer = fields.get("variant", "full"), fields.get("optimizer")
    for key, value, legal in (("system", fields["system"], SYSTEMS), ("variant", variant, VARIANTS)):
        if value not in legal:
            raise PenstockError(f"{where}: {key} {_plain(str(value))!r} is not known; write {' or '.join(legal)}")
    if optimizer not in (None, "skipped"):
        raise PenstockError(f"{where}: optimizer {_plain(str(optimizer))!r} is not known; write skipped, or leave it out")
    measured: dict[str, float] = {}
    for key, value in fields["measured"].items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise PenstockError(f"{where}: measured {_plain(str(key))} is {_plain(str(value))!r}; give a number above zero")
        measured[str(key)] = float(value)
    run = Run(fields["system"], fields["machine"], fields["model"], fields["batch"], fields["seq"], variant, optimizer is None)
    ignored = tuple(_plain(key) for key in fields if key not in REQUIRED and key not in OPTIONAL)
    return PublishedRun(_plain(fields["id"]), run, measured, ignored)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:200]
