"""How far from the truth are the predictions, and would they be without having seen it?

    python benchmarks/ledger.py RUNS.json [-o docs/accuracy.md]

Predicts every run, fits the constants of `hwprofiles.fit` again, once with all its runs and once without each run, and writes
the ledger. Minutes on one core. Without -o the page goes to the terminal.
"""

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from hwprofiles.fit import SOFTWARE, STAGES, Stage, fit, value_of, with_constants
from hwprofiles.schema import Profile, read_profile
from planner.system_costs import Software
from planner.validate import MEMORY, Ledger, PublishedRun, Row, quantile, read_runs, validate, with_intervals

MISS_FRACTION = 0.1  # errors beyond this are explained
RUNS_FOR_LEAVING_OUT = 3  # of one machine

# Why a prediction misses, by run and quantity: "run key" or, for a whole machine or quantity, part of either.
EXPLANATIONS: dict[str, str] = {
    "mi355x-megatrain-qwen2.5-14b-b16 optimizer_s": (
        "the optimizer took 1.23, 0.99 and 0.73 s in three runs of the same parameters; one rate of the host gives one time, "
        "near their mean"
    ),
    "mi355x-megatrain-qwen2.5-14b-b192 optimizer_s": "the same three times, of which this is the shortest",
    "mi355x-megatrain-qwen2.5-14b-b64 gradient_join_s": (
        "the thread adds to one large tensor faster than to the many of a layer, which one page-fault rate does not tell apart"
    ),
    "mi355x-megatrain-qwen2.5-14b-b192 gradient_join_s": "the same",
    "gh200-megatrain-qwen2.5-7b-s262144 device_peak_gib": (
        "by its own account the system keeps all logits alive, which would not have fitted this device at 262144 tokens: the run "
        "must have used other loss code than the one described"
    ),
    "gh200-megatrain-qwen2.5-14b-b96-full device_peak_gib": (
        "1.4 times what the same model took per token on the MI355X, whose logs are public; the paper does not say whether "
        "it counts what is allocated or what is reserved"
    ),
    "rtx4090-slideformer-qwen3-8b-b64 device_peak_gib": (
        "what its fused kernels keep is counted from shapes alone; workspaces and the caching allocator's fragments are not in it"
    ),
}

# Sentences on misses of the step below MISS_FRACTION but above the target's median.
NOTES: dict[str, str] = {
    "mi355x-megatrain-qwen2.5-14b-b16": (
        "bound by the thread that adds gradients; the join alone says 5 GB/s, backward as a whole 4.4: the thread is slower while "
        "the main thread copies weights, which is not modelled"
    ),
    "gh200-megatrain-qwen2.5-7b-s1024": (
        "its step and its TFLOP/s differ by 1.4 % in the source's own accounting, and per unit of work it was 6 % slower than the "
        "14B run on the same machine, which nothing in the schedule explains"
    ),
    "gb10-megatrain-smollm2-1.7b-b2": (
        "no run of this model was fitted from; narrow layers are where the shape of the matmul grid is least sure"
    ),
    "gb10-megatrain-plus-smollm2-1.7b-b2": "the same",
}


@dataclass(slots=True)
class Fitter:
    """Fits the stages, with or without a run. A stage whose runs and earlier constants are the same is fitted once."""

    runs: Mapping[str, PublishedRun]
    _known: dict[tuple[str, tuple[str, ...], tuple[tuple[str, float], ...]], dict[str, float]] = field(default_factory=dict)

    def values(self, without: str | None = None) -> dict[str, float]:
        """Every constant by name."""
        values: dict[str, float] = {}
        for name, stage in STAGES.items():
            used = tuple(r for r in stage.runs if r != without) or tuple(r for r in stage.instead if r != without)
            key = (name, used, tuple(sorted(values.items())))
            if key not in self._known:
                self._known[key] = self._fit(stage, used, values)
            values |= self._known[key]
        return values

    def _fit(self, stage: Stage, used: tuple[str, ...], before: dict[str, float]) -> dict[str, float]:
        runs = [self.runs[name] for name in used]
        return fit(stage.constants, lambda values: list(_residuals(self.rows(runs, before | values), stage.measured)))

    def rows(self, runs: list[PublishedRun], values: Mapping[str, float]) -> tuple[Row, ...]:
        """The runs predicted with these constants instead of the shipped ones."""
        return validate(runs, software_with(values), profiles_with(values)).rows


def _residuals(rows: tuple[Row, ...], measured: tuple[str, ...]) -> Iterator[float]:
    for row in rows:
        for key in measured:
            error = row.error_fraction if key == "step_s" else row.error_of(key)
            if error is not None:
                yield math.log1p(error)


def software_with(values: Mapping[str, float]) -> Software:
    own = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == SOFTWARE}
    return replace(Software(), **own)


def profiles_with(values: Mapping[str, float]) -> Callable[[str], Profile]:
    return lambda name: with_constants(_profile(name), values)


_profile = cache(read_profile)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run predicted by constants fitted without it."""

    name: str
    error_fraction: float
    extrapolated: bool  # too few runs of the machine: the rest of the fit comes from other machines


def leave_one_out(runs: list[PublishedRun], fitter: Fitter) -> list[LeftOut]:
    n_of = Counter(published.run.machine for published in runs)
    found = []
    for published in runs:
        (row,) = fitter.rows([published], fitter.values(without=published.name))
        if row.error_fraction is not None:
            found.append(LeftOut(published.name, row.error_fraction, n_of[published.run.machine] < RUNS_FOR_LEAVING_OUT))
    return found


def shipped(name: str) -> float:
    """The value that a constant of the fit has in the shipped profile, or in `Software`."""
    owner, _, key = name.partition(".")
    if owner == SOFTWARE:
        return float(getattr(Software(), key))
    return value_of(_profile(owner), key)


def page(ledger: Ledger, left_out: list[LeftOut], refitted: Mapping[str, float]) -> str:
    """docs/accuracy.md."""
    return (
        "\n".join(
            [*_head(), *_summary(ledger, left_out), *_runs(ledger, left_out), *_misses(ledger), *_constants(refitted), *_tail()]
        )
        + "\n"
    )


def _head() -> Iterator[str]:
    yield """# How far from the truth are the predictions?

The ledger: published runs of other systems, each predicted from a profile, the system as published and the model's
configuration. `python benchmarks/ledger.py benchmarks/published_runs.json -o docs/accuracy.md` writes it, never a hand, so
that no row can be left out; `penstock validate RUNS.json` prints the same predictions.
"""


def _summary(ledger: Ledger, left_out: list[LeftOut]) -> Iterator[str]:
    inside = sorted(abs(x.error_fraction) for x in left_out if not x.extrapolated)
    used = {run for stage in STAGES.values() for run in stage.runs}
    fitted = sorted(abs(x.error_fraction) for x in left_out if not x.extrapolated and x.name in used)
    outside = sorted(abs(x.error_fraction) for x in left_out if x.extrapolated)
    yield "| what | runs | median error | 90th percentile | worst | wanted |"
    yield "|---|---|---|---|---|---|"
    errors = ledger.errors()
    yield _summary_row("step time", errors, "median 3 %, 90th percentile 10 %")
    yield _summary_row("step time, each run left out of the fit", inside, "median 6 %")
    yield _summary_row("the same, only runs that the fit uses", fitted, "-")
    yield _summary_row("the same, fewer than three runs of the machine: extrapolated", outside, "-")
    for key, name in MEMORY.items():
        yield _summary_row(name, ledger.errors(key), "median 5 %")
    yield ""
    if ledger.coverage_fraction is not None:
        yield f"P10 to P90 of the spreads of profiles and constants hold {ledger.coverage_fraction:.0%} of the measured steps."
    yield """Two things no leaving out can undo: the spreads, and how each system is taken to work (below), were written down when
these runs were known. Runs that nobody has looked at will be predicted less well than the first row says.
"""


def _summary_row(name: str, errors: list[float], wanted: str) -> str:
    if not errors:
        return f"| {name} | 0 | - | - | - | {wanted} |"
    return (
        f"| {name} | {len(errors)} | {statistics.median(errors):.1%} | {quantile(errors, 0.9):.1%} | {errors[-1]:.1%} | {wanted} |"
    )


def _runs(ledger: Ledger, left_out: list[LeftOut]) -> Iterator[str]:
    without = {x.name: x for x in left_out}
    used = {run for stage in STAGES.values() for run in stage.runs}
    yield "## Step time"
    yield ""
    yield "`fitted from`: constants rest on this run, so its error says little. The last column: what the fit without it predicts;"
    yield "a run that the fit never used is predicted as shipped."
    yield ""
    yield "| run | fitted from | predicted s | measured s | error | P10 to P90 | without it |"
    yield "|---|---|---|---|---|---|---|"
    for row in ledger.rows:
        if row.error_fraction is None or row.step_s is None:
            yield f"| {row.name} | | - | - | {row.why_not or 'no step time measured'} | | |"
            continue
        other = without.get(row.name)
        said = "-" if other is None else f"{other.error_fraction:+.1%}" + (" (extrapolated)" if other.extrapolated else "")
        span = (
            "-" if row.interval_fraction is None else f"{1 / (1 + row.interval_fraction) - 1:+.0%} to {row.interval_fraction:+.0%}"
        )
        measured_s = row.step_s / (1 + row.error_fraction)
        yes = "yes" if row.name in used else ""
        yield f"| {row.name} | {yes} | {row.step_s:.3g} | {measured_s:.3g} | {row.error_fraction:+.1%} | {span} | {said} |"
    yield ""
    yield "## Everything else that was measured"
    yield ""
    yield "| run | what | predicted | measured | error |"
    yield "|---|---|---|---|---|"
    for row in ledger.rows:
        for key, measured in row.measured.items():
            if key == "step_s":
                continue
            predicted, error = row.predicted.get(key), row.error_of(key)
            if predicted is None or error is None:
                yield f"| {row.name} | {key} | - | {measured:.4g} | not predicted |"
            else:
                yield f"| {row.name} | {key} | {predicted:.4g} | {measured:.4g} | {error:+.1%} |"
    yield ""


def misses(ledger: Ledger) -> list[tuple[str, float]]:
    """`run quantity` of every error beyond MISS_FRACTION."""
    found = []
    for row in ledger.rows:
        for key in row.measured:
            error = row.error_of(key)
            if error is not None and abs(error) > MISS_FRACTION:
                found.append((f"{row.name} {key}", error))
    return found


def _misses(ledger: Ledger) -> Iterator[str]:
    yield "## Misses"
    yield ""
    for name, error in misses(ledger):
        yield f"- {name}, {error:+.0%}: {EXPLANATIONS.get(name, 'not explained')}."
    for row in ledger.rows:
        if row.name in NOTES and row.error_fraction is not None:
            yield f"- {row.name}, step {row.error_fraction:+.1%}: {NOTES[row.name]}."
    yield ""


def _constants(refitted: Mapping[str, float]) -> Iterator[str]:
    yield "## Constants that nobody measured"
    yield ""
    yield """Fitted by least squares over logarithms with a robust loss, each held by what was believed of it before. None belongs
to a run or a model. `shipped` is the profile's value (for a grid, its 8192-cubed point or its fastest one), `fitted again` what
the fit found when this page was written.
"""
    yield "| constant | believed | shipped | fitted again | what the belief rests on | fitted from |"
    yield "|---|---|---|---|---|---|"
    for stage in STAGES.values():
        for c in stage.constants:
            runs = [r for r in stage.runs if c.owner == SOFTWARE or r.startswith(c.owner.partition("-")[0])]
            yield (
                f"| {c.name} | {c.prior:.3g} ± {c.spread_fraction:.0%} | {shipped(c.name):.3g} | {refitted[c.name]:.3g} "
                f"| {c.why} | {', '.join(runs)} |"
            )
    yield ""


def _tail() -> Iterator[str]:
    yield """## What the systems are taken to do

- `megatrain`: three uploads, and a forward more than needed (10 N T FLOP); each upload is first copied into a pinned buffer by
  the main thread, and after it from a flat buffer into a template. One thread adds gradients, in pages touched anew each step.
  Then, one after another: join, norm and clip, Adam, vocabulary weights back, zero and free. Where host and device are one pool
  (GB10), nothing overlapped but the gradient threads.
- `megatrain-plus`: a forward and an upload less, no copy into a template, three buffers, two gradient threads.
- `slideformer`: fp32 weights rounded on the way up, every boundary in host memory, each layer's Adam as its gradient arrives, the
  last product not recomputed; fused kernels, which are taken to reach what products alone do.
- `zero3-offload`: uploads, compute and gradients one after another, as the runs show; then Adam on fp32 gradients. Activations are
  kept where they fit, as in the published run on the MI355X; kernels are fused on NVIDIA devices, as in the published runs there.
- Memory follows the formulae of the sources (power-of-two rounding of pinned buffers included). Three copies of the head's gradient
  at the peak, and 22 bytes a parameter for ZeRO-3, were read off these runs.
- `claimed_tflop_per_s` is 6 N T plus attention over the whole square, as the paper counts; a run that gives nothing else is
  judged by it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs")
    parser.add_argument("-o", dest="output", type=Path)
    arguments = parser.parse_args()
    runs = read_runs(arguments.runs)
    fitter = Fitter({published.name: published for published in runs})
    print("fitting, with and without each run ...", file=sys.stderr)
    refitted = fitter.values()
    text = page(with_intervals(validate(runs), runs), leave_one_out(runs, fitter), refitted)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
