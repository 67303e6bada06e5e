"""Recalibrate a profile from a measured run.

Fit one speed factor per resource such that simulated op times match the run. Simulation includes contention, so that a contended
op is not mistaken for a slow machine. Factors that the ops of this plan do not determine are left unchanged and reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from penstock.hwprofiles.quantity import Quantity, Source
from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import Kind, Plan
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.units import show_seconds

from .cost import CostModel, region_of
from .regression import Floats, fit_factors
from .scaled_profile import scaled, sped_up, with_quantities
from .simulate import Prediction, simulate
from .steady_state import SteadyState, predicted_of, steady_state
from .uncertainty import P10_P90_DEVIATIONS

MAX_STEPS = 8  # simulated steps per evaluation; most plans are periodic after two
LEAST_CHANGE = 0.01  # smallest log factor; smaller ones are within the spread of any measurement
CONFIRMED_SPREAD = 0.15  # largest spread at which an unchanged resource counts as confirmed
LEAST_S = 1e-9  # shortest op: a tick of the clock
LEAST_SPREAD = 0.01
LANE_ROWS = 5.0  # independent observations per lane: a lane has about five kinds of op
SHORTENED = (1.0, 0.5, 0.25, 0.0)  # damping of the log factors, tried in this order until the step is not predicted worse
KEY = "recalibrated"

# Resource -> path prefixes of the quantities that its factor scales. {dtype} is the plan's compute dtype, {attention} the grid of
# its attention kernel.
RESOURCES: dict[str, tuple[str, ...]] = {
    "matrix products, {dtype}": ("device.matmul.{dtype}.",),
    "attention, {dtype}": ("device.attention.{attention}.{dtype}.",),
    "device memory": ("device.memory_bytes_per_s", "device.eager_bytes_per_s", "device.norms."),
    "fused activations": ("device.fused_bytes_per_s",),
    "the fused loss": ("device.loss_bytes_per_s",),
    "unpacking": ("device.unpack_bytes_per_s",),
    "narrow products": ("device.narrow_bytes_per_s",),
    "kernels' overhead": ("device.kernel_overhead_s",),
    "ops' overhead": ("device.op_overhead_s",),
    "rate of uploads": ("link.h2d.bytes_per_s.",),
    "latency of uploads": ("link.h2d.latency_s",),
    "rate of downloads": ("link.d2h.bytes_per_s.",),
    "latency of downloads": ("link.d2h.latency_s",),
    "both directions at once": ("link.duplex_bytes_per_s",),
    "host DRAM": ("host.dram_bytes_per_s",),
    "optimizer": ("host.optimizer.",),
    "sums and norms on the host": ("host.reduce_bytes_per_s",),
}


@dataclass(frozen=True, slots=True)
class Change:
    """Correction of a resource's speed."""

    resource: str
    factor: float  # speed relative to the profile
    spread_fraction: float  # of the factor, as in a profile

    def __str__(self) -> str:
        words = f"{self.factor:.3g} times as fast" if self.factor >= 1 else f"{1 / self.factor:.3g} times as slow"
        return f"{self.resource}: {words} as in the profile, +- {self.spread_fraction:.0%}"


@dataclass(frozen=True, slots=True)
class Recalibration:
    """Corrected profile, and predictions before and after."""

    profile: Profile
    changes: tuple[Change, ...]
    confirmed: tuple[str, ...]  # resources with unchanged speed
    undetermined: tuple[str, ...]  # resources that this run does not determine
    step_before_s: float
    step_after_s: float
    measured_step_s: float

    def words(self) -> list[str]:
        """Format the result as lines for a terminal."""
        errors = [f"{s / self.measured_step_s - 1:+.1%}" for s in (self.step_before_s, self.step_after_s)]
        lines = [
            f"measured step: {show_seconds(self.measured_step_s)}; predicted: {show_seconds(self.step_before_s)} ({errors[0]}), "
            f"with the corrected profile: {show_seconds(self.step_after_s)} ({errors[1]})",
            *(map(str, self.changes) if self.changes else ["no changes"]),
        ]
        if self.confirmed:
            lines.append(f"confirmed: {', '.join(self.confirmed)}")
        if self.undetermined:
            lines.append(f"not determined by this run: {', '.join(self.undetermined)}")
        return lines


def recalibrate(plan: Plan, timeline: Timeline, run: str, day: str, device: str | None = None) -> Recalibration:
    """Correct the plan's profile from the measured timeline of a run.

    `run`, `day` (YYYY-MM-DD) and `device` are stored as the source of changed quantities. The step predicted with the new profile
    is never further from the run. Raise PlanError if the timeline is too short, ProfileError if the plan holds no profile.
    """
    profile = Profile.from_json(plan.profile, "the plan's profile")
    measured = steady_state(plan, timeline)
    machine = _Machine(plan, profile, measured)
    fitted_logs, deviations = fit_factors(*_rows(plan, measured), len(machine.resources), lambda x: np.log(machine.times_s(x)))
    logs, before_s, after_s = machine.no_worse([float(x) if abs(x) > LEAST_CHANGE else 0.0 for x in fitted_logs])
    spreads = [max(LEAST_SPREAD, math.expm1(P10_P90_DEVIATIONS * deviation)) for deviation in deviations]
    fits = list(zip(machine.resources, logs, spreads, strict=True))
    changes = tuple(Change(name, math.exp(log), spread) for name, log, spread in fits if log)
    steps = f"medians of {measured.n_steps} steady-state steps" if measured.n_steps > 1 else "one steady-state step"
    detail = f"penstock run --recalibrate: {steps} of {run}, each quantity times a factor fitted to measured op times"
    source = Source(kind="fitted", detail=detail[:2000], date=day, device=device, driver=None)
    return Recalibration(
        _corrected(profile, machine.resources, changes, source) if changes else profile,
        changes,
        tuple(name for name, log, spread in fits if not log and spread < CONFIRMED_SPREAD),
        tuple(name for name, log, spread in fits if not log and spread >= CONFIRMED_SPREAD),
        before_s,
        after_s,
        measured.step_s,
    )


class _Machine:
    """Simulates the plan on the profile's machine with each resource scaled by a factor."""

    def __init__(self, plan: Plan, profile: Profile, measured: SteadyState) -> None:
        semantics, self.plan, self.profile, self.measured = plan.semantics, plan, profile, measured
        # True if gradients of steady-state steps were clipped, so that speculative updates were recomputed
        settles = [i for i, op in enumerate(plan.ops) if op.kind is Kind.SETTLE]
        demand_lists = (CostModel(profile, clipped=clips).demands(plan) for clips in (False, True))
        free_s, clipped_s = (sum(demands[i].uncontended_s for i in settles) for demands in demand_lists)
        self.clips = sum(measured.ops_s[i] for i in settles) > math.sqrt(free_s * clipped_s)
        attention = "cudnn" if semantics.attention_kernel == "cudnn" and "cudnn" in profile.device.attention else "flash"
        names, everywhere = {"dtype": semantics.compute_dtype, "attention": attention}, [place for place, _ in profile.quantities()]
        self.resources: dict[str, list[str]] = {}  # resource -> paths of its quantities
        for name, begins in RESOURCES.items():
            with_names = tuple(begin.format(**names) for begin in begins)
            self.resources[name.format(**names)] = [place for place in everywhere if place.startswith(with_names)]

    def times_s(self, logs: Sequence[float]) -> list[float]:
        """Simulate with these log factors; return the seconds of each op, then of the step."""
        steady = predicted_of(self.plan, self.simulated(logs, MAX_STEPS))
        return [*steady.ops_s, steady.step_s]

    def simulated(self, logs: Sequence[float], max_steps: int = 32) -> Prediction:
        factors = {p: math.exp(log) for log, places in zip(logs, self.resources.values(), strict=True) for p in places if log}
        profile = scaled(self.profile, factors)
        demands = CostModel(profile, clipped=self.clips).demands(self.plan)
        return simulate(self.plan, demands, region_of(profile), max_steps)

    def no_worse(self, logs: Sequence[float]) -> tuple[list[float], float, float]:
        """Damp the log factors until the step is not predicted worse; return them with the predictions before and after."""
        before_s = self.simulated([0.0] * len(logs)).step_s
        for share in SHORTENED:
            tried = [log * share for log in logs]
            after_s = self.simulated(tried).step_s
            if abs(math.log(after_s / self.measured.step_s)) <= abs(math.log(before_s / self.measured.step_s)):
                break
        return tried, before_s, after_s


def _rows(plan: Plan, measured: SteadyState) -> tuple[Floats, Floats, NDArray[np.str_]]:
    """Return log times, weights (share of the lane) and kinds of all ops; the last row is the step."""
    taken_s, lanes = np.array([max(s, LEAST_S) for s in measured.ops_s]), np.array([op.lane for op in plan.ops])
    weights = taken_s * [plan.often(i) for i in range(len(plan.ops))]
    for lane in plan.lanes:
        weights[lanes == lane] *= LANE_ROWS / weights[lanes == lane].sum()
    kinds = [*(op.kind for op in plan.ops), "step"]
    return np.log([*taken_s, measured.step_s]), np.append(weights, LANE_ROWS), np.array(kinds)


def _corrected(profile: Profile, resources: Mapping[str, Sequence[str]], changes: Sequence[Change], source: Source) -> Profile:
    """Apply the changes to quantities with their spreads and the new source; validate the result."""
    key = next(name for n in count(1) if (name := KEY if n == 1 else f"{KEY}-{n}") not in profile.sources)
    by_place = {place: change for change in changes for place in resources[change.resource]}

    def change_of(place: str, quantity: Quantity) -> Quantity:
        if (change := by_place.get(place)) is None:
            return quantity
        update = {"spread_fraction": min(change.spread_fraction, 10.0), "source": key}
        return sped_up(place, quantity, change.factor).model_copy(update=update)

    corrected = with_quantities(profile, change_of)
    return Profile.from_json(corrected.model_copy(update={"sources": {**profile.sources, key: source}}).to_json(), profile.name)
