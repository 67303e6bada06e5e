"""Prediction interval of the step time, P10 to P90, by stratified Monte Carlo over machines.

A sampled machine scales each quantity by its spread, with one deviation per group; extrapolated products and attention deviate by
`off_by` in addition. The plan is simulated on each machine. Sampling is stratified (Latin hypercube: each group takes each level
once, in an order shuffled by the seed), so that a few dozen samples yield stable percentiles.

Spreads describe rates of single ops. On machines without a probe, P90 is multiplied by the conformal factor of the steps that this
project measured (conformalized quantile regression for the upper tail: their largest ratio of measured step to sampled P90).
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from penstock.hwprofiles.curves import along, interpolated, rows_of
from penstock.hwprofiles.op_laws import ProductLaw
from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.op_table import OpTable
from penstock.runtime.plan import Plan
from penstock.runtime.plan.workload import Dtype

from .cost import CostModel, region_of
from .scaled_profile import Group, group_of, scaled
from .simulate import Simulator

MOST_DRAWS, LEAST_DRAWS = 32, 8
DRAWN_OPS = 40_000  # simulated ops per interval over all samples: about 1.5 s on one core
MAX_STEPS = 8  # simulated steps per sample; most plans are periodic after two
DERIVED = 2  # factor on the spread of the optimizer's rate for low-bit optimizers, which are scaled from measured AdamW
UNPROBED_P90 = 1.12  # fitted to benchmarks/own_steps.json; docs/accuracy.md has the ratios of all steps, and is tested against this
P10_P90_DEVIATIONS = NormalDist().inv_cdf(0.9)  # standard deviations from the median to P90: a spread covers 80 %


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of the step time, in seconds, over machines within the profile's spreads; without a probe, P90 is
    `UNPROBED_P90` times as late."""

    p10_step_s: float
    p50_step_s: float
    p90_step_s: float
    n_draws: int
    seed: int


def interval(plan: Plan, profile: Profile, n_draws: int | None = None, seed: int = 0) -> Interval:
    """Return P10, P50 and P90 of the step time over `n_draws` sampled machines (None: 8 to 32, fewer for large plans), with a
    later P90 if the profile is not probed."""
    ops = OpTable.from_plan(plan)
    if n_draws is None:
        n_draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_OPS // max(1, ops.n_simulated)))  # fewer for large plans
    assert n_draws > 0, "an interval needs a draw"
    nearest = CostModel(profile)
    nearest.demands_of(plan, ops)
    dtype = plan.semantics.compute_dtype
    off = {name: x if isinstance(x, float) else off_by(profile, dtype, x) for name, x in nearest.outside.items()}
    simulator, steps_s = Simulator(ops), list[float]()
    wider = {Group.OPTIMIZER: DERIVED} if plan.semantics.is_lean else {}
    grouped = [(place, quantity.spread_fraction, group_of(place)) for place, quantity in profile.quantities()]
    spreads = [(place, 1 + x * wider.get(group, 1), group) for place, x, group in grouped if group is not None]
    # Standard normal deviations by group (None: extrapolations) and sample: midpoints of equally likely strata
    rng, levels = random.Random(seed), [NormalDist().inv_cdf((i + 0.5) / n_draws) for i in range(n_draws)]
    groups = sorted((*Group, None), key=lambda group: group is Group.DISK)  # newest last: the other samples do not change
    of_groups = {group: rng.sample(levels, n_draws) for group in groups}
    for i in range(n_draws):
        deviations = {group: of_draws[i] for group, of_draws in of_groups.items()}
        # Log-normal: a factor and its inverse are equally likely
        machine = scaled(profile, {place: f ** (deviations[group] / P10_P90_DEVIATIONS) for place, f, group in spreads})
        longer = {name: factor ** (deviations[None] / P10_P90_DEVIATIONS) for name, factor in off.items()}
        demands = CostModel(machine, longer_outside=longer).demands_of(plan, ops)
        steps_s.append(simulator.run(demands, region_of(machine), MAX_STEPS).step_s)
    # A sample is the midpoint of its stratum
    p10_step_s, p50_step_s, p90_step_s = np.quantile(steps_s, (0.1, 0.5, 0.9), method="hazen").tolist()
    later = 1.0 if profile.is_probed else UNPROBED_P90
    return Interval(p10_step_s, p50_step_s, p90_step_s * later, n_draws, seed)


def off_by(profile: Profile, dtype: Dtype, outside: tuple[float, float] | None) -> float:
    """Estimate the largest factor by which extrapolated rates of products are off, by leave-one-out at the edges.

    For a grid, predict each edge without it and compare; for a law, compare the rates at an end of its fitted range and at half or
    twice that size. `outside` is (m, width) of the product: only the edges that it exceeds count, at the nearest point. None, or a
    gap within the grid: all points of all edges."""
    products, off = profile.device.matmul[dtype], [0.0]
    if isinstance(products, ProductLaw):
        ms, widths = ({low, 2 * low, high // 2, high} for low, high in (products.m, products.width))
        points = [(float(m), float(w), profile.matmul_rate(dtype, m, w, w).value) for m in ms for w in widths]
    else:
        points = [(float(p.m), math.sqrt(p.k * p.n), p.flop_per_s.value) for p in products]
    for axis, rows in enumerate((rows_of(points), rows_of((width, m, rate) for m, width, rate in points))):
        for sign, rest, (x, edge) in ((-1, rows[1:], rows[0]), (1, rows[:-1], rows[-1])):
            if rest and (outside is None or sign * outside[axis] > sign * x):
                ys = [y for y, _ in edge] if outside is None else [outside[1 - axis]]
                off += [abs(math.log(interpolated(rest, x, y).value / along(edge, y))) for y in ys]
    return math.exp(max(off)) if outside is None or len(off) > 1 else off_by(profile, dtype, None)
