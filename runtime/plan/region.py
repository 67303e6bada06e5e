"""Contention: max-min fair speeds of ops that share link, host memory and cores.

A fluid model. An op is a fixed overhead, during which it uses nothing, then work. At full speed the work lasts `alone_s`
and draws on resources at constant rates. Ops that work at the same time run at speeds in (0, 1] that are max-min fair:
all speeds rise together, and when a resource is used up, the ops that draw on it stay at the speed they have reached.
A capacity is what several ops get together; an op that draws on a resource alone runs as it was measured alone, even where
the two directions of a link are slower together than one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Resource(StrEnum):
    """Something that ops share."""

    __hash__ = str.__hash__  # a tenth of the time of an enumeration's own

    H2D = "h2d"  # bytes per second over the link, host to device
    D2H = "d2h"  # bytes per second over the link, device to host
    DUPLEX = "duplex"  # bytes per second over the link, both directions together
    DRAM = "dram"  # bytes per second of host memory, reads and writes
    CORES = "cores"  # host cores left to copies and the optimizer


Uses = tuple[tuple[Resource, float], ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one op asks of the machine: seconds of overhead, seconds of work at full speed, units per second it then draws."""

    overhead_s: float
    alone_s: float
    uses: Uses = ()

    @property
    def uncontended_s(self) -> float:
        """How long the op takes when nothing slows it."""
        return self.overhead_s + self.alone_s


@dataclass(frozen=True, slots=True)
class Region:
    """What the machine offers: units per second of each resource. A resource not named here is never short."""

    capacity: Uses


def rates(active: Sequence[Demand], region: Region) -> list[float]:
    """Speed of each op that is at work, as a fraction of full speed, in the order given."""
    return list(shares(tuple(demand.uses for demand in active), region))


@lru_cache(maxsize=65536)
def shares(uses: tuple[Uses, ...], region: Region) -> tuple[float, ...]:
    """Max-min fair speeds of ops that draw `uses` at full speed, by progressive filling."""
    draws = [dict(use) for use in uses]
    speed = [0.0] * len(uses)
    left = dict(region.capacity)
    for r, capacity in region.capacity:
        drawers = [draw for draw in draws if draw.get(r, 0.0) > 0]
        if len(drawers) == 1:
            drawers[0][r] = min(drawers[0][r], capacity)
    rising = set(range(len(uses)))
    level = 0.0  # the common speed of all that still rise
    while rising:
        load = {r: sum(draws[i].get(r, 0.0) for i in sorted(rising)) for r in left}
        short = [r for r in left if load[r] > 0]
        rise = min([1.0 - level, *(left[r] / load[r] for r in short)])
        level += rise
        # The resource that set this rise counts as full whatever rounding left of it.
        full = {r for r in short if left[r] / load[r] <= rise * (1 + 1e-12)}
        for r in short:
            left[r] = max(0.0, left[r] - rise * load[r])
        for i in rising:
            speed[i] = level
        rising = set() if level >= 1.0 - 1e-12 else {i for i in rising if not any(draws[i].get(r, 0.0) > 0 for r in full)}
    return tuple(speed)
