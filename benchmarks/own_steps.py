"""Steps measured by this project on rented GPUs, predicted from shipped profiles: the section of docs/accuracy.md.

    python -m benchmarks.own_steps

A prediction is a search with the unprobed profile of the machine and the cores that were rented. The kernels of those days differ
from today's: `KERNELS` are their rates, each with a prior from single ops. A step is predicted with rates fitted to all other
steps. Three minutes on one core.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import penstock
from benchmarks.common import conformal_factor
from benchmarks.published.systems import Run
from benchmarks.published.validate import FITTED_FRACTION, PublishedRun, validate, with_intervals
from benchmarks.run_fit import Constant, fit
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.op_table import OpTable
from penstock.planner.model.workload import read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.simulate import Simulator
from penstock.planner.predict.uncertainty import MAX_STEPS, UNPROBED_P90

STEPS = Path(__file__).parent / "own_steps.json"
N_CORES, SEQ_LEN = 14, 2048  # 16 rented, 2 for the lanes
OLD = "old"
KERNELS = (
    Constant(OLD, "activations", 0.44, 0.45, "1.5 to 3.5 times the memory time, pytorch #176653 and #193614"),
    Constant(OLD, "loss", 0.19, 0.4, "18 bytes a logit for today's 6, at the 0.58 of single eager modules"),
    Constant(OLD, "unpack", 0.16, 0.4, "11 bytes a number for today's 3, at the same 0.58"),
    Constant(OLD, "update", 0.235e9, 0.4, "2.11 ns a parameter on one AMD core, shared by two rented threads"),
    Constant(OLD, "sums", 1.65e9, 0.4, "0.60 ns a bf16 number on one AMD core, shared by two rented threads"),
)


class Predicted(NamedTuple):
    """Seconds of a step, and P10 and P90."""

    step_s: float
    low_s: float
    high_s: float

    @property
    def cells(self) -> str:
        return f"{self.step_s:.3g} ({self.low_s:.3g} to {self.high_s:.3g})"


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A measured step. `plan`: arguments of `penstock.plan`, or of another system's schedule."""

    name: str
    fields: Mapping[str, Any]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.fields["step_s"])

    @property
    def base(self) -> str:
        """Name of the step that this one repeats, or its own."""
        return self.name.removesuffix("-again")

    def model(self, folder: Path) -> str:
        """Return a shipped name, or the path of its first layers."""
        name, n_layers = self.fields["model"], self.fields.get("layers")
        if n_layers is None:
            return str(name)
        path = folder / f"{name}-{n_layers}.json"
        path.write_text(json.dumps(read_model(name).config | {"num_hidden_layers": n_layers}))
        return str(path)


def read_steps() -> tuple[list[OwnStep], dict[str, str]]:
    """Return the steps, and the measured steps without a prediction with the reasons."""
    fields = json.loads(STEPS.read_text())
    return [OwnStep(step["id"], step) for step in fields["steps"]], fields["not_predicted"]


def rented(profile: Profile, values: Mapping[str, float] | None = None) -> Profile:
    """Return the profile with the rented share of the host and, with `values`, with the rates of the kernels of those days."""
    fields, share = profile.to_json(), N_CORES / profile.host.n_cores
    host, device, sources = fields["host"], fields["device"], fields["sources"]
    host["n_cores"] = N_CORES
    for key in ("dram_bytes_per_s", "reduce_bytes_per_s"):
        host[key]["value"] *= share
    if values is None:
        return Profile.from_json(fields, profile.name)
    spreads = {c.key: c.spread_fraction for c in KERNELS}

    def rate(key: str, unit: float = 1.0) -> dict[str, Any]:
        return {"value": values[f"{OLD}.{key}"] * unit, "spread_fraction": spreads[key], "source": OLD}

    memory = profile.device.memory_bytes_per_s.value
    device |= {
        f"{name}_bytes_per_s": rate(key, memory) for name, key in (("fused", "activations"), ("loss", "loss"), ("unpack", "unpack"))
    }
    updates = [
        {"threads": n, "params_per_s": rate("update", n), "params_per_s_under_copies": rate("update", n)} for n in (1, N_CORES)
    ]
    host |= {"optimizer": updates, "reduce_bytes_per_s": rate("sums", N_CORES)}
    sources[OLD] = {"kind": "fitted", "detail": "benchmarks/own_steps.py", "date": None, "device": None, "driver": None}
    return Profile.from_json(fields, profile.name)


def predicted(step: OwnStep, profile: Profile, folder: Path) -> Predicted:
    """Predict a step by a search, or by the schedule of another system, with the sum of the shipped machine's spreads."""
    if (system := step.fields.get("system")) is None:
        answer = penstock.plan(step.model(folder), profile, seq_len=SEQ_LEN, **step.fields["plan"]).answer.claim.prediction
        return Predicted(answer.step_s, answer.p10_step_s, answer.p90_step_s / (1.0 if profile.is_probed else UNPROBED_P90))
    run = Run(system, profile.name, step.model(folder), step.fields["plan"]["batch_size"], SEQ_LEN)
    runs = [PublishedRun(step.name, run, {"step_s": step.measured_s})]
    (row,), (wide,) = validate(runs, profile_of=lambda _: profile).rows, with_intervals(validate(runs), runs).rows
    assert row.step_s is not None, row.why_not
    assert wide.interval_fraction is not None
    factor = (1 + wide.interval_fraction) ** (1 / FITTED_FRACTION)  # another host than the one that constants were fitted for
    return Predicted(row.step_s, row.step_s / factor, row.step_s * factor)


def simulator(step: OwnStep, folder: Path) -> Callable[[Mapping[str, float]], float]:
    """Return the step time as a function of the kernels' rates, for the plan that the priors give."""
    profile = read_profile(step.fields["machine"])
    plan = penstock.plan(step.model(folder), rented(profile, priors()), seq_len=SEQ_LEN, **step.fields["plan"]).plan
    ops = OpTable.from_plan(plan)
    simulated = Simulator(ops)

    def seconds(values: Mapping[str, float]) -> float:
        machine = rented(profile, values)
        return simulated.run(CostModel(machine).demands_of(plan, ops), region_of(machine), MAX_STEPS).step_s

    return seconds


def priors() -> dict[str, float]:
    return {c.name: c.prior for c in KERNELS}


class Row(NamedTuple):
    """A measured step: by rates fitted to the others, as `plan` answers today, and from the probed profile with today's kernels.
    P90 of the first two is that of the spreads, without `UNPROBED_P90`, until `judged` moves it."""

    step: OwnStep
    left_out: Predicted
    today: Predicted
    probed: Predicted

    @property
    def error_fraction(self) -> float:
        return self.left_out.step_s / self.step.measured_s - 1

    @property
    def beyond(self) -> float:
        """Measured step over today's P90."""
        return self.step.measured_s / self.today.high_s

    def holds(self, prediction: Predicted) -> bool:
        return prediction.low_s <= self.step.measured_s <= prediction.high_s


def unprobed_factor(predictions: Iterable[Row]) -> float:
    """Return the conformal factor of P90; steps of other systems are not predicted by a plan."""
    return conformal_factor(row.beyond for row in predictions if "system" not in row.step.fields)


def judged(predictions: list[Row]) -> list[Row]:
    """Multiply P90 of plans by the factor of the other steps; a repeated step is left out with the first."""

    def later(prediction: Predicted, factor: float) -> Predicted:
        return prediction._replace(high_s=prediction.high_s * factor)

    result = []
    for row in predictions:
        factor = unprobed_factor(rival for rival in predictions if rival.step.base != row.step.base)
        factor = 1.0 if "system" in row.step.fields else factor
        result.append(row._replace(left_out=later(row.left_out, factor), today=later(row.today, factor)))
    return result


def rows() -> tuple[list[Row], dict[str, float]]:
    """Predict every step with the kernels' rates that the other steps give. Return also the rates that all steps give."""
    steps, result = read_steps()[0], []
    with TemporaryDirectory() as name:
        folder = Path(name)
        simulators = {step.name: simulator(step, folder) for step in steps if "system" not in step.fields}
        for step in steps:
            machine, probed = (read_profile(step.fields[key]) for key in ("machine", "probed"))
            today = left_out = predicted(step, rented(machine), folder)
            if step.name in simulators:  # a repeated step is left out with the first
                remaining = [s for s in steps if s.name in simulators and s.base != step.base]
                left_out = predicted(step, rented(machine, fitted(remaining, simulators)), folder)
            result.append(Row(step, left_out, today, predicted(step, probed, folder)))
        return result, fitted([step for step in steps if step.name in simulators], simulators)


def fitted(steps: list[OwnStep], simulators: Mapping[str, Callable[[Mapping[str, float]], float]]) -> dict[str, float]:
    return fit(KERNELS, lambda values: [math.log(simulators[step.name](values) / step.measured_s) for step in steps])


def section() -> Iterator[str]:
    """Yield the section of docs/accuracy.md. ValueError if the planner's factor is not that of these steps."""
    raw, values = rows()
    if (factor := math.ceil(100 * unprobed_factor(raw)) / 100) != UNPROBED_P90:
        raise ValueError(f"UNPROBED_P90 of planner/predict/uncertainty.py is {UNPROBED_P90}, these steps give {factor}; change it")
    errors, predictions = [abs(row.error_fraction) for row in raw], judged(raw)
    (n_raw, n_raw_today), (n_held, n_held_today) = (
        (sum(row.holds(row.left_out) for row in part), sum(row.holds(row.today) for row in part)) for part in (raw, predictions)
    )
    yield f"""
## GPU steps that we measured

Every step that this project measured on a rented GPU ([the page](benchmarks/gpu_2026-11-27.md), `benchmarks/own_steps.json`):
torch 2.11.0, CUDA 13.0, cuDNN 9.19, driver 580.159.04. Later kernels replaced those of that day before a GPU ran them. The
machines were 16 cores of a larger host, so profiles are used with {N_CORES} cores and that share of the rates of the host's
memory. `today`: the promise of `plan`, a search with the shipped profile, which no probe of the machine changed. `without it`:
the same with rates of the old kernels that all *other* steps give (below). `probed`: today's kernels with the probed profile;
some of its rates were set by these steps. No constant of the runs of MegaTrain's code was fitted here.

The median error is {statistics.median(errors):.1%} with the kernels of those days (wanted: 8 %), the worst {max(errors):.1%}.

**P90 of a machine without a probe is multiplied by {UNPROBED_P90}**, in `plan`, `compare`, plan files and their checks. The
factor is the largest ratio of a measured step to the P90 of the spreads (`over P90`), a conformal quantile, rounded up. Steps
take longer than single ops: kernels that were replaced, updates next to copies, power. P10 is not changed: steps took longer, not
shorter. A probed profile, and one with the measured times of a run, keeps the interval of its spreads. In the table each P90 has
the factor of the other steps alone. With it P10 to P90 of `today` hold {n_held_today} of {len(raw)} (wanted: 75 to 90 %), of
`without it` {n_held}; spreads alone hold {n_raw_today} and {n_raw}. With the old kernels' own rates the factor would be \
{max(row.step.measured_s / row.left_out.high_s for row in raw):.2f}: most of it
is for kernels that no GPU has run yet.

Priors, and this way of widening, were chosen when these errors were known; new steps will be predicted less well. Tried before:
host loops of cores that no threads share and 0.27 for unpacking (median 7.6 %), 0.27 for unpacking alone (8.4 %), host rates of
probes on these machines (about 9 %).

| step | measured s | without it (P10 to P90) | error | held | today (P10 to P90) | over P90 | held | probed |
|---|---:|---:|---:|---|---:|---:|---|---:|"""
    for row, spreads in zip(predictions, raw, strict=True):
        error = f"{row.error_fraction:+.1%} | {'yes' if row.holds(row.left_out) else 'no'}"
        is_held, measured = "yes" if row.holds(row.today) else "no", f"{row.step.name} | {row.step.measured_s:.4g}"
        promised = f"{row.today.cells} | {spreads.beyond:.3f} | {is_held}"
        yield f"| {measured} | {row.left_out.cells} | {error} | {promised} | {row.probed.cells} |"
    yield "\n| rate of the old kernels | prior | all steps give | source of the prior |\n|---|---|---:|---|"
    units = {"update": "parameters/s a core", "sums": "bytes/s a core"}
    for c in KERNELS:
        unit = units.get(c.key, "share of the memory's rate, counting the bytes of today's kernel")
        yield f"| {c.key}, {unit} | {c.prior:.3g} ± {c.spread_fraction:.0%} | {values[c.name]:.3g} | {c.why} |"
    yield "\nMeasured, but not predicted:\n"
    yield from (f"- {name}: {why}." for name, why in read_steps()[1].items())


if __name__ == "__main__":
    print("\n".join(section()))
