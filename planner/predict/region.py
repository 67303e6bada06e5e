"""Contention model: max-min fair speeds of concurrent ops that share link, host memory and cores.

An op is a fixed overhead without resource use, then work, which at full speed lasts `alone_s` and uses resources at constant rates.
Speeds in (0, 1] of simultaneous ops rise together until a resource is exhausted, which fixes the speeds of its users (progressive
filling). A single user of a resource runs as measured alone, even on a link with directions that slow each other down.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.runtime.compiled import floats, integers


class Resource(StrEnum):
    __hash__ = str.__hash__  # ten times faster than Enum.__hash__

    H2D = "h2d"  # bytes per second over the link, host to device
    D2H = "d2h"  # bytes per second over the link, device to host
    DUPLEX = "duplex"  # bytes per second over the link, both directions together
    DRAM = "dram"  # bytes per second of host memory, reads and writes
    CORES = "cores"  # host cores available to copies and the optimizer


Uses = tuple[tuple[Resource, float], ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one op: overhead, duration of its work at full speed, resource use per second during the work."""

    overhead_s: float
    alone_s: float
    uses: Uses = ()

    @property
    def uncontended_s(self) -> float:
        return self.overhead_s + self.alone_s


@dataclass(frozen=True, slots=True)
class Region:
    """Capacity of a machine in units per second of each resource. Resources that are not listed are unlimited."""

    capacity: Uses


@lru_cache(maxsize=65536)
def shares(uses: tuple[Uses, ...], region: Region) -> tuple[float, ...]:
    """Return max-min fair speeds, as fractions of full speed, of ops that use `uses` at full speed."""
    scratch = Filling.allocate(len(uses), len(region.capacity))
    scratch.draws[:] = [draw for use in uses for draw in draws(use, region)]
    fill(len(uses), scratch, floats(capacity_of(region)))
    return tuple(map(float, scratch.speeds))


def capacity_of(region: Region) -> list[float]:
    return [capacity for _, capacity in region.capacity]


def draws(uses: Uses, region: Region) -> list[float]:
    """Return an op's use per second of each resource of the region, at full speed."""
    by_resource = dict(uses)
    return [by_resource.get(resource, 0.0) for resource, _ in region.capacity]


class Filling(NamedTuple):
    """Scratch buffers of `fill`, allocated once because allocation takes longer than the computation."""

    draws: Any  # (n_ops * n_resources,): use per second at full speed
    speeds: Any
    is_rising: Any
    usage: Any
    remaining: Any
    load: Any

    @staticmethod
    def allocate(n: int, n_resources: int) -> "Filling":
        sizes = {"draws": n * n_resources, "speeds": n, "usage": n * n_resources, "remaining": n_resources, "load": n_resources}
        return Filling(**{name: floats([0.0] * size) for name, size in sizes.items()}, is_rising=integers([0] * n))


def fill(n: int, scratch: Filling, capacity: Any) -> None:
    n_resources = len(capacity)
    for r in range(n_resources):
        scratch.remaining[r] = capacity[r]
        n_drawers = 0
        for i in range(n):
            n_drawers += scratch.draws[i * n_resources + r] > 0
        for i in range(n):
            draw = scratch.draws[i * n_resources + r]
            scratch.usage[i * n_resources + r] = min(draw, capacity[r]) if n_drawers == 1 else draw
    for i in range(n):
        scratch.is_rising[i] = 1
    level = 0.0  # common speed of the ops that still rise
    n_rising = n
    while n_rising:
        rise = 1.0 - level
        for r in range(n_resources):
            scratch.load[r] = 0.0
            for i in range(n):
                if scratch.is_rising[i]:
                    scratch.load[r] += scratch.usage[i * n_resources + r]
            if scratch.load[r] > 0:
                rise = min(rise, scratch.remaining[r] / scratch.load[r])
        level += rise
        for i in range(n):
            if scratch.is_rising[i]:
                scratch.speeds[i] = level
        for r in range(n_resources):
            if scratch.load[r] > 0:
                # Treat the limiting resource as exhausted despite rounding.
                if scratch.remaining[r] / scratch.load[r] <= rise * (1 + 1e-12):
                    for i in range(n):
                        if scratch.usage[i * n_resources + r] > 0:
                            scratch.is_rising[i] = 0
                scratch.remaining[r] = max(0.0, scratch.remaining[r] - rise * scratch.load[r])
        n_rising = 0
        if level < 1.0 - 1e-12:
            for i in range(n):
                n_rising += scratch.is_rising[i]
