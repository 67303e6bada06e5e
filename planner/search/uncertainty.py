"""How sure is the prediction, and what would make it surer?

Each draw is a machine as the profile's spreads allow it: what one measurement settles moves together, every quantity by its
own spread. The plan is costed and simulated on each. Draws are stratified (every group takes each of its levels once, in an
order that the seed shuffles), so that a few dozen give steady percentiles; and a group that is measured again leaves the
draws of the others as they were, so that intervals before and after can be compared.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist

from hwprofiles.schema import Profile, Quantity
from planner.predict.cost import costs, region_of
from planner.predict.faster import Group, group_of, sped_up, with_quantities
from planner.predict.simulate import n_simulated, simulate
from runtime.plan import Plan
from runtime.units import show_seconds

MOST_DRAWS, LEAST_DRAWS = 32, 8
DRAWN_OPS = 40_000  # ops of all draws of one interval: about a second and a half on one core
MAX_STEPS = 8  # of a draw: most plans repeat after two
P10_P90_DEVIATIONS = NormalDist().inv_cdf(0.9)  # a spread covers 80 %, which is this many standard deviations to each side
MEASURED_SPREAD_FRACTION = 0.02  # what is left after measuring: copies and products on servers repeat within that
LEAST_SHRINK_FRACTION = 0.005  # below that a measurement is not worth a line
LEAST_MOVE_FRACTION = 1e-4  # of the step: what all ops and resources together cannot exceed moves nothing
SCREENED_OPS, LEAST_SCREENED = 50_000, 4  # ops of all simulations of a screening, and groups that even huge plans are tried with


@dataclass(frozen=True, slots=True)
class Interval:
    """Step times that one machine in ten beats, every other one, and nine in ten, if the profile is off as its spreads say."""

    p10_step_s: float
    p50_step_s: float
    p90_step_s: float
    n_draws: int
    seed: int

    @property
    def width_s(self) -> float:
        return self.p90_step_s - self.p10_step_s

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        return [
            (name, show_seconds(step_s))
            for name, step_s in (("P10", self.p10_step_s), ("P50", self.p50_step_s), ("P90", self.p90_step_s))
        ]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What measuring one group of quantities would make of the interval."""

    group: Group
    sources: tuple[str, ...]  # kinds of source that the group rests on today
    p10_step_s: float  # afterwards
    p90_step_s: float
    shrink_fraction: float  # of the width of the interval

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def row(self) -> tuple[str, str, str, str]:
        """What to measure, what it rests on, the share of the interval that goes away, the interval that is left."""
        left = f"{show_seconds(self.p10_step_s)} to {show_seconds(self.p90_step_s)}"
        return str(self.group), ", ".join(self.sources), f"{self.shrink_fraction:.0%}", left


def affordable_draws(plan: Plan) -> int:
    """How many draws an interval takes when nobody says: fewer for plans of many ops."""
    return max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_OPS // max(1, n_simulated(plan))))


def interval(plan: Plan, profile: Profile, n_draws: int | None = None, seed: int = 0) -> Interval:
    """P10, P50 and P90 of the plan's step over machines drawn from the profile's spreads; None: as many as are affordable."""
    n_draws = affordable_draws(plan) if n_draws is None else n_draws
    assert n_draws > 0, "an interval needs a draw"
    steps_s = sorted(_step_s(plan, _drawn(profile, deviations)) for deviations in _deviations(n_draws, seed))
    p10_step_s, p50_step_s, p90_step_s = (_percentile(steps_s, p) for p in (0.1, 0.5, 0.9))
    return Interval(p10_step_s, p50_step_s, p90_step_s, n_draws, seed)


def measurements_worth_making(plan: Plan, profile: Profile, known: Interval | None = None) -> list[Measurement]:
    """The groups whose measurement would shrink the interval (`known`, if the caller has it), the most first.

    No sampling: what moves the step independently adds up in squares, and a measurement takes one square away. How far a group
    moves the step by its spread is a simulation or two; only those are simulated that costs alone do not rule out, and of
    plans of very many ops the few that could move it most. So it takes a second or two on one core, whatever the plan.
    """
    step_s = _step_s(plan, profile)
    times_s = _times_s(plan, profile)
    spread_s = {g: _spread_s(plan, profile, g, times_s) for g in Group if _most_spread(profile, g) > 0.0}
    able = [group for group in spread_s if spread_s[group] >= LEAST_MOVE_FRACTION * step_s]
    reach = sorted(able, key=lambda group: -spread_s[group])  # equal ones stay in the order of the groups
    n_simulations = max(LEAST_SCREENED, SCREENED_OPS // max(1, n_simulated(plan)))
    signs = (-1, 1) if 2 * len(reach) <= n_simulations else (-1,)
    moves = {group: _move(plan, profile, group, step_s, signs) for group in reach[: n_simulations // len(signs)]}
    variance = sum(move**2 for move in moves.values())
    if variance == 0.0:
        return []
    before = known or interval(plan, profile)
    found = []
    for group in (group for group in Group if group in moves):
        left = moves[group] * _spread_s(plan, measured(profile, group), group, times_s) / spread_s[group]
        shrink_fraction = 1 - math.sqrt(max(variance - moves[group] ** 2 + left**2, 0.0) / variance)
        if shrink_fraction >= LEAST_SHRINK_FRACTION:
            kept, p50_s = 1 - shrink_fraction, before.p50_step_s
            p10_s, p90_s = (p50_s + kept * (p_s - p50_s) for p_s in (before.p10_step_s, before.p90_step_s))
            found.append(Measurement(group, _sources(profile, group), p10_s, p90_s, shrink_fraction))
    return sorted(found, key=lambda m: -m.shrink_fraction)  # equal ones stay in the order of the groups


def measurement_rows(plan: Plan, profile: Profile, known: Interval | None = None) -> list[tuple[str, str, str, str]]:
    """A table for people, its head first: what to measure, what it rests on today, how much surer the step would be, P10 to P90."""
    found = measurements_worth_making(plan, profile, known)
    return [("measuring", "instead of", "narrows by", "to"), *(m.row() for m in found)] if found else []


def _spread_s(plan: Plan, profile: Profile, group: Group, times_s: list[float]) -> float:
    """How far the group's spread reaches: by how much more time ops take, and shared things are busy, in all."""
    after = _times_s(plan, _off(profile, group, -1))
    return sum(abs(a - b) for a, b in zip(after, times_s, strict=True))


def _times_s(plan: Plan, profile: Profile) -> list[float]:
    """Seconds that each op takes alone, and that each shared resource needs for what all ops draw on it."""
    demands = costs(plan, profile)
    capacity = dict(region_of(profile).capacity)
    busy_s = dict.fromkeys(capacity, 0.0)
    for i, demand in enumerate(demands):
        for resource, per_s in demand.uses:
            busy_s[resource] += plan.often(i) * demand.alone_s * per_s / capacity[resource]
    return [*(plan.often(i) * demand.uncontended_s for i, demand in enumerate(demands)), *busy_s.values()]


def _move(plan: Plan, profile: Profile, group: Group, step_s: float, signs: tuple[int, ...]) -> float:
    """The logarithm of the step when the group is off by its spread, as the root of the mean square over the sides."""
    moves = (math.log(_step_s(plan, _off(profile, group, sign)) / step_s) for sign in signs)
    return math.hypot(*moves) / math.sqrt(len(signs))


def _off(profile: Profile, group: Group, sign: int) -> Profile:
    return _drawn(profile, dict.fromkeys(Group, 0.0) | {group: sign * P10_P90_DEVIATIONS})


def measured(profile: Profile, group: Group) -> Profile:
    """The profile after a measurement that found the values it held."""

    def change(place: str, quantity: Quantity) -> Quantity:
        if group_of(place) is not group:
            return quantity
        return quantity.model_copy(update={"spread_fraction": min(quantity.spread_fraction, MEASURED_SPREAD_FRACTION)})

    return with_quantities(profile, change)


def _deviations(n_draws: int, seed: int) -> list[dict[Group, float]]:
    """Standard normal deviations, one per group and draw: for each group the middles of `n_draws` equally likely strata."""
    rng = random.Random(seed)
    levels = [NormalDist().inv_cdf((i + 0.5) / n_draws) for i in range(n_draws)]
    drawn = {group: rng.sample(levels, n_draws) for group in Group}
    return [{group: levels[i] for group, levels in drawn.items()} for i in range(n_draws)]


def _drawn(profile: Profile, deviations: Mapping[Group, float]) -> Profile:
    """A machine that is off by these deviations: a quantity is as likely better by a factor as worse by it."""

    def change(place: str, quantity: Quantity) -> Quantity:
        group = group_of(place)
        if group is None:
            return quantity
        return sped_up(place, quantity, (1 + quantity.spread_fraction) ** (deviations[group] / P10_P90_DEVIATIONS))

    return with_quantities(profile, change)


def _step_s(plan: Plan, profile: Profile) -> float:
    return simulate(plan, costs(plan, profile), region_of(profile), MAX_STEPS).step_s


def _percentile(ordered: list[float], p: float) -> float:
    """Between the two nearest of the ordered values, each standing for the middle of its stratum."""
    at = min(max(p * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    low = min(int(at), len(ordered) - 2) if len(ordered) > 1 else 0
    if len(ordered) == 1 or ordered[low] == ordered[low + 1]:
        return ordered[low]
    return ordered[low] + (at - low) * (ordered[low + 1] - ordered[low])


def _most_spread(profile: Profile, group: Group) -> float:
    return max((q.spread_fraction for place, q in profile.quantities() if group_of(place) is group), default=0.0)


def _sources(profile: Profile, group: Group) -> tuple[str, ...]:
    return tuple(sorted({profile.sources[q.source].kind for place, q in profile.quantities() if group_of(place) is group}))
