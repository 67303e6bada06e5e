"""The interval of a prediction, P10 to P90.

Each draw is a machine as the profile's spreads allow it: what one measurement settles moves together, every quantity by its
own spread; products and attention outside of what was measured, by `off_by` besides. The plan is simulated on each. Draws
are stratified (every group takes each of its levels once, in an order that the seed shuffles): a few dozen give steady percentiles.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from penstock.hwprofiles.curves import along, interpolated, rows_of
from penstock.hwprofiles.op_laws import ProductLaw
from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.sheet import Outline
from penstock.runtime.plan import Plan
from penstock.runtime.plan.workload import Dtype

from .cost import CostModel, region_of
from .faster import Group, group_of, scaled
from .simulate import Simulator

MOST_DRAWS, LEAST_DRAWS = 32, 8
DRAWN_OPS = 40_000  # ops of all draws of one interval: about a second and a half on one core
MAX_STEPS = 8  # of a draw: most plans repeat after two
DERIVED = 2  # times the spread of the host's rate, by an optimizer that keeps less: AdamW's is measured, its ratio to that is not
P10_P90_DEVIATIONS = NormalDist().inv_cdf(0.9)  # a spread covers 80 %, which is this many standard deviations to each side


@dataclass(frozen=True, slots=True)
class Interval:
    """Step times that one machine in ten beats, every other one, and nine in ten, if the profile is off as its spreads say."""

    p10_step_s: float
    p50_step_s: float
    p90_step_s: float
    n_draws: int
    seed: int


def interval(plan: Plan, profile: Profile, n_draws: int | None = None, seed: int = 0) -> Interval:
    """P10, P50 and P90 of the plan's step over machines drawn from the profile's spreads; None: as many as are affordable."""
    ops = Outline.of(plan)
    if n_draws is None:
        n_draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_OPS // max(1, ops.n_simulated)))  # fewer for plans of many ops
    assert n_draws > 0, "an interval needs a draw"
    nearest = CostModel(profile)
    nearest.demands_of(plan, ops)
    dtype = plan.semantics.compute_dtype
    off = {name: of if isinstance(of, float) else off_by(profile, dtype, of) for name, of in nearest.outside.items()}
    simulator, steps_s = Simulator(ops), list[float]()
    wider = {Group.OPTIMIZER: DERIVED} if plan.semantics.is_lean else {}
    spreads = [
        (place, 1 + of.spread_fraction * wider.get(group, 1), group)
        for place, of in profile.quantities()
        if (group := group_of(place)) is not None
    ]
    # Standard normal deviations, one per group (None: of what lies outside) and draw: the middles of equally likely strata
    rng, levels = random.Random(seed), [NormalDist().inv_cdf((i + 0.5) / n_draws) for i in range(n_draws)]
    groups = sorted((*Group, None), key=lambda group: group is Group.DISK)  # the newest last: all others are drawn as before
    of_groups = {group: rng.sample(levels, n_draws) for group in groups}
    for i in range(n_draws):
        deviations = {group: of_draws[i] for group, of_draws in of_groups.items()}
        # A quantity is as likely better by a factor as worse by it.
        drawn = scaled(profile, {place: f ** (deviations[group] / P10_P90_DEVIATIONS) for place, f, group in spreads})
        longer = {name: factor ** (deviations[None] / P10_P90_DEVIATIONS) for name, factor in off.items()}
        demands = CostModel(drawn, longer_outside=longer).demands_of(plan, ops)
        steps_s.append(simulator.run(demands, region_of(drawn), MAX_STEPS).step_s)
    # Each draw stands for the middle of its stratum.
    p10_step_s, p50_step_s, p90_step_s = np.quantile(steps_s, (0.1, 0.5, 0.9), method="hazen").tolist()
    return Interval(p10_step_s, p50_step_s, p90_step_s, n_draws, seed)


def off_by(profile: Profile, dtype: Dtype, outside: tuple[float, float] | None) -> float:
    """The largest factor by which nearest points of products are off: at an edge of the grid, if the grid ended before it, or of a
    law, between an end of what it was fitted to and half or twice that. `outside`: m and width of the product asked for, which
    looks at the edges that it is beyond, where it is nearest. None, or beyond none (in a gap of the grid): all of all edges."""
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
