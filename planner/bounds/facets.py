"""Facets: linear prices of ops, dual prices of the machine's capacity, that bound a step under contention.

A *facet* prices the work of ops: whatever runs at the same time, the prices of the ops that run, each times its speed, never add
up to more than one per second. So no stretch of time is shorter than the priced work of the ops that lie in it. Each lane is a
facet (its ops cost their seconds), each shared resource (ops cost the share of it that they draw), and so are lanes that slow
each other down: an op of the first costs its seconds, one of another what it takes away from the first.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from penstock.planner.predict.cost import CostModel
from penstock.runtime.plan import LANE_OF, OPS, Kind, Lane, Op, Setup
from penstock.runtime.plan.ops import Often
from penstock.runtime.plan.region import Demand, Region, Resource, Uses, shares

Array = np.ndarray[Any, np.dtype[np.float64]]
LEAST_PRICE = 0.01  # what takes less away is no facet of its own


class Meeting(NamedTuple):
    """Ops of several lanes that slow each other; the first, and those of its lane, are priced in full. `any_of`: those of them that
    a plan has, not only where it has all."""

    kinds: tuple[Kind, ...]
    any_of: bool = False


Key = Lane | Resource | Meeting
_OF_LANE = {Lane.H2D: (Kind.LOAD,), Lane.D2H: (Kind.OFFLOAD_GRADIENT,), Lane.CPU: (Kind.UPDATE, Kind.ACCUMULATE)}
_COPIED_UP = (Kind.LOAD, Kind.FETCH_SAVED, Kind.FETCH_ACTIVATION)
_COPIED_DOWN = (Kind.OFFLOAD_GRADIENT, Kind.OFFLOAD_SAVED, Kind.OFFLOAD_ACTIVATION)
_ON_HOST = (Kind.UPDATE, Kind.ACCUMULATE, Kind.NORM)


def _meetings() -> Iterator[Meeting]:
    for first, kinds in _OF_LANE.items():
        for kind in kinds:
            others = [[None, *_OF_LANE[lane]] for lane in _OF_LANE if lane is not first]
            for met in product(*others):
                if any(met):
                    yield Meeting((kind, *(other for other in met if other is not None)))
    yield Meeting((Kind.ACCUMULATE, Kind.UPDATE, Kind.NORM, Kind.LOAD, Kind.OFFLOAD_GRADIENT))
    up, down, host = _COPIED_UP, _COPIED_DOWN, _ON_HOST
    for of_lanes in ((up, down), (down, up), (up, down, host), (down, up, host), (host, up, down)):
        yield Meeting(tuple(chain.from_iterable(of_lanes)), any_of=True)


MEETINGS = tuple(_meetings())


class Facets:
    """The facets of plans on these lanes whose ops use no more than this; those of the same uses are the same."""

    def __init__(self, uses: frozenset[tuple[Kind, Uses]], lanes: Sequence[Lane], cost: CostModel) -> None:
        self.uses, priced = uses, _priced(uses, Region(tuple(cost.capacity.items())))
        self.keys: tuple[Key, ...] = (*lanes, *Resource, *(meeting for meeting, _ in priced))
        # A lane and a direction of the link may have one name
        self._of_lane = {lane: i for i, lane in enumerate(lanes)}
        self._of_resource = {resource: len(self._of_lane) + i for i, resource in enumerate(Resource)}
        self._capacity = cost.capacity
        self._prices: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in Kind}  # of a second of an op
        for i, (_, prices) in enumerate(priced, start=len(self._of_lane) + len(Resource)):
            for kind, price in prices:
                self._prices[kind].append((i, price))
        self._prices[Kind.SPECULATE] = self._prices[Kind.SETTLE] = self._prices[Kind.UPDATE]

    def number(self, lane: Lane) -> int:
        """The place of a lane in what `of` returns."""
        return self._of_lane[lane]

    def of(self, kind: Kind, demand: Demand) -> Array:
        """What one op costs on each facet, in the order of `keys`."""
        load = np.zeros(len(self.keys))
        load[self._of_lane[LANE_OF[kind]]] = demand.uncontended_s
        for resource, per_s in demand.uses:
            # Alone, an op may draw more than several get together: then it has the whole.
            load[self._of_resource[resource]] = min(1.0, per_s / self._capacity[resource]) * demand.alone_s
        for i, price in self._prices[kind] if demand.uses else ():  # a copy within the device contends for nothing
            load[i] = price * demand.alone_s
        return load


def uses_of(plan: Setup, cost: CostModel, block: int) -> Iterator[tuple[Kind, Uses]]:
    """What a block's ops use, kind by kind: speculation asks for what updates ask for."""
    alike = [m for m, _ in plan.micro_batch_groups(range(plan.semantics.n_micro_batches))]
    for kind, row in OPS.items():
        is_there = row.where(plan, block) or (kind is Kind.UPDATE and OPS[Kind.SPECULATE].where(plan, block))
        if is_there and kind not in (Kind.SPECULATE, Kind.SETTLE):
            has_several = row.often is Often.MICRO_BATCH or (row.often is Often.GRADIENT and not plan.reduced)
            demands = (cost.demand(plan, Op(kind, block, m)) for m in (alike if has_several else [None]))
            yield from ((kind, demand.uses) for demand in demands if demand.uses)


@lru_cache(maxsize=256)
def _priced(uses: frozenset[tuple[Kind, Uses]], region: Region) -> list[tuple[Meeting, list[tuple[Kind, float]]]]:
    """The price of a second of each kind, for every meeting of ops that the plans have."""
    of_kind = {kind: [use for of, use in sorted(uses) if of is kind] for kind in Kind}
    # What each lane may be doing, or None: any of these at once with any of the others'.
    doing: dict[Lane, list[tuple[Kind, Uses] | None]] = {lane: [None] for lane in Lane}
    for kind, found in of_kind.items():
        doing[LANE_OF[kind]] += [(kind, use) for use in found]
    moments: list[dict[Kind, float]] = []  # the speed of each that works
    for together in product(*doing.values()):
        working = [op for op in together if op is not None]
        speeds = shares(tuple(use for _, use in working), region)
        moments.append({kind: speed for (kind, _), speed in zip(working, speeds, strict=True)})
    result = []
    for meeting in MEETINGS:
        there = [kind for kind in meeting.kinds if of_kind[kind]]
        if not (meeting.any_of or len(there) == len(meeting.kinds)) or not there:
            continue
        first, *others = there
        price = {kind: 1.0 for kind in there if LANE_OF[kind] is LANE_OF[first]}
        others = [kind for kind in others if kind not in price]
        for other in others:
            a, b = shares((min(of_kind[first]), min(of_kind[other])), region)
            price[other] = min(1.0, (1.0 - a) / b)
        if all(price[other] < LEAST_PRICE for other in others):
            continue
        most = max(sum(price.get(kind, 0.0) * speed for kind, speed in moment.items()) for moment in moments)
        result.append((meeting, [(kind, price[kind] / most) for kind in there]))
    return result
