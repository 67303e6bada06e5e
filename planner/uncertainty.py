"""How sure is the prediction, and what would make it surer?

Each draw is a machine as the profile's spreads allow it: what one measurement settles moves together, every quantity by its
own spread. The plan is costed and simulated on each. Draws are stratified (every group takes each of its levels once, in an
order that the seed shuffles), so that a few dozen give steady percentiles; and a group that is measured anew leaves the
draws of the others as they were, so that intervals before and after can be compared.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist

from hwprofiles.schema import Profile, Quantity
from runtime.plan import Plan
from runtime.units import show_seconds

from .cost import costs, region_of
from .faster import Group, group_of, sped_up, with_quantities
from .simulate import simulate

MOST_DRAWS, LEAST_DRAWS = 32, 8
DRAWN_OPS = 40_000  # ops of all draws of one interval: about a second and a half on one core
MAX_STEPS = 8  # of a draw: most plans repeat after two
P10_P90_DEVIATIONS = NormalDist().inv_cdf(0.9)  # a spread covers 80 %: so many standard deviations to each side
MEASURED_SPREAD_FRACTION = 0.02  # what is left after measuring: copies and products on servers repeat within that
LEAST_SHRINK_FRACTION = 0.005  # below that a measurement is not worth a line
FAR_DEVIATIONS = 2.0  # a group that moves the step by nothing so far out, to neither side, is not sampled


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
    return max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_OPS // max(1, len(plan.ops))))


def interval(plan: Plan, profile: Profile, n_draws: int | None = None, seed: int = 0) -> Interval:
    """P10, P50 and P90 of the plan's step over machines drawn from the profile's spreads; None: as many as are affordable."""
    n_draws = affordable_draws(plan) if n_draws is None else n_draws
    assert n_draws > 0, "an interval needs a draw"
    steps_s = sorted(_step_s(plan, _drawn(profile, deviations)) for deviations in _deviations(n_draws, seed))
    p10_step_s, p50_step_s, p90_step_s = (_percentile(steps_s, p) for p in (0.1, 0.5, 0.9))
    return Interval(p10_step_s, p50_step_s, p90_step_s, n_draws, seed)


def measurements_worth_making(plan: Plan, profile: Profile, n_draws: int | None = None, seed: int = 0) -> list[Measurement]:
    """The groups whose measurement would shrink the interval, the most first; half the draws that an interval affords."""
    n_draws = max(LEAST_DRAWS, affordable_draws(plan) // 2) if n_draws is None else n_draws
    before = interval(plan, profile, n_draws, seed)
    step_s = _step_s(plan, profile)
    found = []
    for group in Group:
        if before.width_s <= 0 or _most_spread(profile, group) <= MEASURED_SPREAD_FRACTION:
            continue
        far = (dict.fromkeys(Group, 0.0) | {group: sign * FAR_DEVIATIONS} for sign in (-1, 1))
        if all(abs(_step_s(plan, _drawn(profile, d)) - step_s) < LEAST_SHRINK_FRACTION * before.width_s for d in far):
            continue
        after = interval(plan, measured(profile, group), n_draws, seed)
        shrink_fraction = 1 - after.width_s / before.width_s
        if shrink_fraction >= LEAST_SHRINK_FRACTION:
            found.append(Measurement(group, _sources(profile, group), after.p10_step_s, after.p90_step_s, shrink_fraction))
    return sorted(found, key=lambda m: -m.shrink_fraction)  # equal ones stay in the order of the groups


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
    """A machine that is off by so many deviations: a quantity is as likely so many times better as so many times worse."""

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
