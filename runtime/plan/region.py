"""Contention: max-min fair speeds of ops that share link, host memory and cores.

A fluid model. An op is a fixed overhead, during which it uses nothing, then work. At full speed the work lasts `alone_s`
and draws on resources at constant rates. Ops that work at the same time run at speeds in (0, 1] that are max-min fair:
all speeds rise together, and when a resource is used up, the ops that draw on it stay at the speed they have reached.
A capacity is what several ops get together; an op that draws on a resource alone runs as it was measured alone, even where
the two directions of a link are slower together than one after the other.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from runtime.compiled import compiled, floats


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


@lru_cache(maxsize=65536)
def shares(uses: tuple[Uses, ...], region: Region) -> tuple[float, ...]:
    """Max-min fair speeds, as fractions of full speed, of ops that draw `uses` at full speed."""
    drawn = [draw for use in uses for draw in draws(use, region)]
    return tuple(fill(len(uses), floats(drawn), floats(capacity_of(region))))


def capacity_of(region: Region) -> list[float]:
    """Units per second of each resource that may be short."""
    return [capacity for _, capacity in region.capacity]


def draws(uses: Uses, region: Region) -> list[float]:
    """Units per second that an op draws on each of these at full speed."""
    of = dict(uses)
    return [of.get(resource, 0.0) for resource, _ in region.capacity]


@compiled
def fill(n: int, draws: Any, capacity: Any) -> list[float]:
    """Max-min fair speeds of n ops by progressive filling. `draws`: of each op on each resource, op by op."""
    n_resources = len(capacity)
    speeds, is_rising, left = [0.0] * n, [True] * n, [0.0] * n_resources
    load, drawn = [0.0] * n_resources, [0.0] * (n * n_resources)
    for r in range(n_resources):
        left[r] = capacity[r]
        n_drawers = 0
        for i in range(n):
            n_drawers += draws[i * n_resources + r] > 0
        for i in range(n):
            draw = draws[i * n_resources + r]
            drawn[i * n_resources + r] = min(draw, capacity[r]) if n_drawers == 1 else draw
    level = 0.0  # the common speed of all that still rise
    n_rising = n
    while n_rising:
        rise = 1.0 - level
        for r in range(n_resources):
            load[r] = 0.0
            for i in range(n):
                if is_rising[i]:
                    load[r] += drawn[i * n_resources + r]
            if load[r] > 0:
                rise = min(rise, left[r] / load[r])
        level += rise
        for i in range(n):
            if is_rising[i]:
                speeds[i] = level
        for r in range(n_resources):
            if load[r] > 0:
                # The resource that set this rise counts as full whatever rounding left of it.
                if left[r] / load[r] <= rise * (1 + 1e-12):
                    for i in range(n):
                        is_rising[i] = is_rising[i] and drawn[i * n_resources + r] <= 0
                left[r] = max(0.0, left[r] - rise * load[r])
        n_rising = 0
        if level < 1.0 - 1e-12:
            for i in range(n):
                n_rising += is_rising[i]
    return speeds
