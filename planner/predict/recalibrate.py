"""Recalibration of a profile by a run.

The plan is simulated on machines that are faster or slower than the profile says, each resource by a factor of its own, until ops
take as long as they took in the run. An op is compared as it was slowed by the others, so that contention is not taken for a slow
machine. Factors that the ops of this plan do not show stay as they were, and are named.
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
from .faster import scaled, sped_up, with_quantities
from .regression import Floats, fit_factors
from .settled import Settled, predicted_of, settled
from .simulate import Prediction, simulate
from .uncertainty import P10_P90_DEVIATIONS

MAX_STEPS = 8  # of a simulation in the search: most plans repeat after two
LEAST_CHANGE = 0.01  # of a logarithm: a smaller factor is within the spread of any measurement
TOLD_SPREAD = 0.15  # a factor with a larger spread is not confirmed
LEAST_S = 1e-9  # of an op: a clock's tick
LEAST_SPREAD = 0.01
LANE_ROWS = 5.0  # independent observations that a lane's ops count for: there are about five sorts of op in one
SHORTENED = (1.0, 0.5, 0.25, 0.0)  # of the factors' logarithms, tried in this order should all of them make the step worse
KEY = "recalibrated"

# What one factor makes faster or slower: how the places of its quantities begin. {dtype} is the plan's, {attention} the grid of its
# attention kernel.
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
    """A resource that is not as the profile says."""

    resource: str
    factor: float  # times as fast as the profile says
    spread_fraction: float  # of the factor, as a profile means it

    def __str__(self) -> str:
        words = f"{self.factor:.3g} times as fast" if self.factor >= 1 else f"{1 / self.factor:.3g} times as slow"
        return f"{self.resource}: {words} as the profile says, give or take {self.spread_fraction:.0%}"


@dataclass(frozen=True, slots=True)
class Recalibration:
    """The profile as a run shows it, and the prediction before and after."""

    profile: Profile
    changes: tuple[Change, ...]
    confirmed: tuple[str, ...]  # resources that are as the profile says
    untold: tuple[str, ...]  # resources that this run does not show
    step_before_s: float
    step_after_s: float
    measured_step_s: float

    def words(self) -> list[str]:
        """The outcome for a terminal, a line each."""
        errors = [f"{s / self.measured_step_s - 1:+.1%}" for s in (self.step_before_s, self.step_after_s)]
        lines = [
            f"a step took {show_seconds(self.measured_step_s)}; predicted were {show_seconds(self.step_before_s)} ({errors[0]}), "
            f"and with the corrected profile {show_seconds(self.step_after_s)} ({errors[1]})",
            *(map(str, self.changes) if self.changes else ["nothing is changed"]),
        ]
        if self.confirmed:
            lines.append(f"as the profile says: {', '.join(self.confirmed)}")
        if self.untold:
            lines.append(f"not to be told from this run: {', '.join(self.untold)}")
        return lines


def recalibrate(plan: Plan, timeline: Timeline, run: str, day: str, device: str | None = None) -> Recalibration:
    """The plan's profile, corrected by a run of it in its machine's seconds.

    `run` and `day` (YYYY-MM-DD) say in the profile where numbers come from, `device` on what they were seen. PlanError when the
    timeline is too short; ProfileError when the plan holds no profile. The prediction of the step with the new
    profile is never further from the run than with the old one.
    """
    profile = Profile.from_json(plan.profile, "the plan's profile")
    measured = settled(plan, timeline)
    machine = _Machine(plan, profile, measured)
    found_logs, deviations = fit_factors(*_rows(plan, measured), len(machine.resources), lambda x: np.log(machine.times_s(x)))
    logs, before_s, after_s = machine.no_worse([float(x) if abs(x) > LEAST_CHANGE else 0.0 for x in found_logs])
    spreads = [max(LEAST_SPREAD, math.expm1(P10_P90_DEVIATIONS * deviation)) for deviation in deviations]
    found = list(zip(machine.resources, logs, spreads, strict=True))
    changes = tuple(Change(name, math.exp(log), spread) for name, log, spread in found if log)
    steps = f"medians of {measured.n_steps} settled steps" if measured.n_steps > 1 else "one settled step"
    detail = f"penstock run --recalibrate: {steps} of {run}, each quantity times a factor fitted to what the plan's ops took"
    source = Source(kind="fitted", detail=detail[:2000], date=day, device=device, driver=None)
    return Recalibration(
        _corrected(profile, machine.resources, changes, source) if changes else profile,
        changes,
        tuple(name for name, log, spread in found if not log and spread < TOLD_SPREAD),
        tuple(name for name, log, spread in found if not log and spread >= TOLD_SPREAD),
        before_s,
        after_s,
        measured.step_s,
    )


class _Machine:
    """The plan on the profile's machine with each resource faster by its factor."""

    def __init__(self, plan: Plan, profile: Profile, measured: Settled) -> None:
        of, self.plan, self.profile, self.measured = plan.semantics, plan, profile, measured
        # Whether the gradients of settled steps were clipped, so that speculative updates were made again
        settles = [i for i, op in enumerate(plan.ops) if op.kind is Kind.SETTLE]
        asked = (CostModel(profile, clipped=clips).demands(plan) for clips in (False, True))
        free_s, clipped_s = (sum(demands[i].uncontended_s for i in settles) for demands in asked)
        self.clips = sum(measured.ops_s[i] for i in settles) > math.sqrt(free_s * clipped_s)
        attention = "cudnn" if of.attention_kernel == "cudnn" and "cudnn" in profile.device.attention else "flash"
        names, everywhere = {"dtype": of.compute_dtype, "attention": attention}, [place for place, _ in profile.quantities()]
        self.resources: dict[str, list[str]] = {}  # the places of each one's quantities
        for name, begins in RESOURCES.items():
            with_names = tuple(begin.format(**names) for begin in begins)
            self.resources[name.format(**names)] = [place for place in everywhere if place.startswith(with_names)]

    def times_s(self, logs: Sequence[float]) -> list[float]:
        """Seconds of each op, and last of the step."""
        found = predicted_of(self.plan, self.simulated(logs, MAX_STEPS))
        return [*found.ops_s, found.step_s]

    def simulated(self, logs: Sequence[float], max_steps: int = 32) -> Prediction:
        factors = {p: math.exp(log) for log, places in zip(logs, self.resources.values(), strict=True) for p in places if log}
        profile = scaled(self.profile, factors)
        demands = CostModel(profile, clipped=self.clips).demands(self.plan)
        return simulate(self.plan, demands, region_of(profile), max_steps)

    def no_worse(self, logs: Sequence[float]) -> tuple[list[float], float, float]:
        """As much of a change as does not make the prediction of the step worse; and that prediction before and after."""
        before_s = self.simulated([0.0] * len(logs)).step_s
        for share in SHORTENED:
            tried = [log * share for log in logs]
            after_s = self.simulated(tried).step_s
            if abs(math.log(after_s / self.measured.step_s)) <= abs(math.log(before_s / self.measured.step_s)):
                break
        return tried, before_s, after_s


def _rows(plan: Plan, measured: Settled) -> tuple[Floats, Floats, NDArray[np.str_]]:
    """The logarithm of each op's time, its share of its lane as weight, and its kind; and last those of the step."""
    taken_s, lanes = np.array([max(s, LEAST_S) for s in measured.ops_s]), np.array([op.lane for op in plan.ops])
    weights = taken_s * [plan.often(i) for i in range(len(plan.ops))]
    for lane in plan.lanes:
        weights[lanes == lane] *= LANE_ROWS / weights[lanes == lane].sum()
    kinds = [*(op.kind for op in plan.ops), "step"]
    return np.log([*taken_s, measured.step_s]), np.append(weights, LANE_ROWS), np.array(kinds)


def _corrected(profile: Profile, resources: Mapping[str, Sequence[str]], changes: Sequence[Change], source: Source) -> Profile:
    """The profile with its changes, each quantity with its new spread and source, validated."""
    key = next(name for n in count(1) if (name := KEY if n == 1 else f"{KEY}-{n}") not in profile.sources)
    by_place = {place: change for change in changes for place in resources[change.resource]}

    def change_of(place: str, quantity: Quantity) -> Quantity:
        if (change := by_place.get(place)) is None:
            return quantity
        update = {"spread_fraction": min(change.spread_fraction, 10.0), "source": key}
        return sped_up(place, quantity, change.factor).model_copy(update=update)

    corrected = with_quantities(profile, change_of)
    return Profile.from_json(corrected.model_copy(update={"sources": {**profile.sources, key: source}}).to_json(), profile.name)
