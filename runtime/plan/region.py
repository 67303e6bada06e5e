"""Contention: max-min fair speeds of ops that share link, host memory and cores.

A fluid model. An op is a fixed overhead, during which it uses nothing, then work. At full speed the work lasts `alone_s` and draws
on resources at constant rates. Simultaneous ops run at max-min fair speeds in (0, 1]: all speeds rise together, and when a resource
is used up, the ops that draw on it keep their speed. A capacity is shared by several ops; an op alone on a resource runs as
measured alone, even if the two directions of a link are slower together than one after the other.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.runtime.compiled import compiled_bare, floats, integers


class Resource(StrEnum):
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
        return self.overhead_s + self.alone_s


@dataclass(frozen=True, slots=True)
class Region:
    """What the machine offers: units per second of each resource. A resource not named here is never short."""

    capacity: Uses


@lru_cache(maxsize=65536)
def shares(uses: tuple[Uses, ...], region: Region) -> tuple[float, ...]:
    """Max-min fair speeds, as fractions of full speed, of ops that draw `uses` at full speed."""
    on = Filling.of(len(uses), len(region.capacity))
    on.draws[:] = [draw for use in uses for draw in draws(use, region)]
    fill(len(uses), on, floats(capacity_of(region)))
    return tuple(map(float, on.speeds))


def capacity_of(region: Region) -> list[float]:
    """Units per second of each resource that may be short."""
    return [capacity for _, capacity in region.capacity]


def draws(uses: Uses, region: Region) -> list[float]:
    """Units per second that an op draws on each of these at full speed."""
    of = dict(uses)
    return [of.get(resource, 0.0) for resource, _ in region.capacity]


class Filling(NamedTuple):
    """Scratch memory of `fill`, allocated once: allocation takes longer than the computation."""

    draws: Any  # of each op on each resource at full speed, op by op
    speeds: Any
    is_rising: Any
    drawn: Any
    left: Any
    load: Any

    @staticmethod
    def of(n: int, n_resources: int) -> "Filling":
        sizes = {"draws": n * n_resources, "speeds": n, "drawn": n * n_resources, "left": n_resources, "load": n_resources}
        return Filling(**{name: floats([0.0] * size) for name, size in sizes.items()}, is_rising=integers([0] * n))


@compiled_bare
def fill(n: int, on: Filling, capacity: Any) -> None:
    n_resources = len(capacity)
    for r in range(n_resources):
        on.left[r] = capacity[r]
        n_drawers = 0
        for i in range(n):
            n_drawers += on.draws[i * n_resources + r] > 0
        for i in range(n):
            draw = on.draws[i * n_resources + r]
            on.drawn[i * n_resources + r] = min(draw, capacity[r]) if n_drawers == 1 else draw
    for i in range(n):
        on.is_rising[i] = 1
    level = 0.0  # the common speed of all that still rise
    n_rising = n
    while n_rising:
        rise = 1.0 - level
        for r in range(n_resources):
            on.load[r] = 0.0
            for i in range(n):
                if on.is_rising[i]:
                    on.load[r] += on.drawn[i * n_resources + r]
            if on.load[r] > 0:
                rise = min(rise, on.left[r] / on.load[r])
        level += rise
        for i in range(n):
            if on.is_rising[i]:
                on.speeds[i] = level
        for r in range(n_resources):
            if on.load[r] > 0:
                # The resource that set this rise counts as full whatever rounding left of it.
                if on.left[r] / on.load[r] <= rise * (1 + 1e-12):
                    for i in range(n):
                        if on.drawn[i * n_resources + r] > 0:
                            on.is_rising[i] = 0
                on.left[r] = max(0.0, on.left[r] - rise * on.load[r])
        n_rising = 0
        if level < 1.0 - 1e-12:
            for i in range(n):
                n_rising += on.is_rising[i]
