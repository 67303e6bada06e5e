"""Facets: linear prices of ops, dual prices of the machine's capacity, that bound a step under contention.

A *facet* assigns each kind of op a price per second of work. For any set of ops that run concurrently, the sum of price times speed
is at most 1. Therefore no interval is shorter than the priced work of the ops inside it. Three sorts of facets exist: each lane (an
op costs its seconds), each shared resource (an op costs the share that it draws), and lanes that slow each other (an op of the
first lane costs its seconds, an op of another the seconds that it takes away from the first).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from penstock.planner.predict.cost import CostModel, micro_batch_groups
from penstock.planner.predict.region import Demand, Region, Resource, Uses, shares
from penstock.runtime.plan import LANE_OF, OPS, Kind, Lane, Op, Setup
from penstock.runtime.plan.ops import Often

Array = np.ndarray[Any, np.dtype[np.float64]]
LEAST_PRICE = 0.01  # smaller prices give no useful facet


class Meeting(NamedTuple):
    """Ops of several lanes that slow each other. The first op and others of its lane have full price. `any_of`: use the kinds that
    a plan has; without it, the plan must have every kind."""

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
            choices = [[None, *_OF_LANE[lane]] for lane in _OF_LANE if lane is not first]
            for partners in product(*choices):
                if any(partners):
                    yield Meeting((kind, *(partner for partner in partners if partner is not None)))
    yield Meeting((Kind.ACCUMULATE, Kind.UPDATE, Kind.NORM, Kind.LOAD, Kind.OFFLOAD_GRADIENT))
    up, down, host = _COPIED_UP, _COPIED_DOWN, _ON_HOST
    for of_lanes in ((up, down), (down, up), (up, down, host), (down, up, host), (host, up, down)):
        yield Meeting(tuple(chain.from_iterable(of_lanes)), any_of=True)


MEETINGS = tuple(_meetings())


class Facets:
    """Facets valid for every plan on these lanes with resource uses in `uses`."""

    def __init__(self, uses: frozenset[tuple[Kind, Uses]], lanes: Sequence[Lane], cost: CostModel) -> None:
        priced = _priced(uses, Region(tuple(cost.capacity.items())))
        self.keys: tuple[Key, ...] = (*lanes, *Resource, *(meeting for meeting, _ in priced))
        # Two dicts, because a lane and a direction of the link may have equal names
        self._of_lane = {lane: i for i, lane in enumerate(lanes)}
        self._of_resource = {resource: len(self._of_lane) + i for i, resource in enumerate(Resource)}
        self._capacity = cost.capacity
        self._prices: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in Kind}  # (facet, price of a second) by kind of op
        for i, (_, prices) in enumerate(priced, start=len(self._of_lane) + len(Resource)):
            for kind, price in prices:
                self._prices[kind].append((i, price))
        self._prices[Kind.SPECULATE] = self._prices[Kind.SETTLE] = self._prices[Kind.UPDATE]

    def number(self, lane: Lane) -> int:
        """Index of a lane's facet in the result of `op_cost`."""
        return self._of_lane[lane]

    def op_cost(self, kind: Kind, demand: Demand) -> Array:
        """Cost of one op on each facet, in the order of `keys`."""
        load = np.zeros(len(self.keys))
        load[self._of_lane[LANE_OF[kind]]] = demand.uncontended_s
        for resource, per_s in demand.uses:
            # An op that runs alone may draw more than the shared capacity: its share is then 1.
            load[self._of_resource[resource]] = min(1.0, per_s / self._capacity[resource]) * demand.alone_s
        for i, price in self._prices[kind] if demand.uses else ():  # copies within the device have no uses and do not contend
            load[i] = price * demand.alone_s
        return load


def uses_of(plan: Setup, cost: CostModel, block: int) -> Iterator[tuple[Kind, Uses]]:
    """Yield (kind, resource uses) of a block's ops. Speculative updates use the same resources as updates."""
    distinct = [m for m, _ in micro_batch_groups(plan.semantics, range(plan.semantics.n_micro_batches))]
    for kind, row in OPS.items():
        is_there = row.where(plan, block) or (kind is Kind.UPDATE and OPS[Kind.SPECULATE].where(plan, block))
        if is_there and kind not in (Kind.SPECULATE, Kind.SETTLE):
            has_several = row.often is Often.MICRO_BATCH or (row.often is Often.GRADIENT and not plan.sums_on_device(block))
            demands = (cost.demand(plan, Op(kind, block, m)) for m in (distinct if has_several else [None]))
            yield from ((kind, demand.uses) for demand in demands if demand.uses)


@lru_cache(maxsize=256)
def _priced(uses: frozenset[tuple[Kind, Uses]], region: Region) -> list[tuple[Meeting, list[tuple[Kind, float]]]]:
    """For each meeting that these uses allow: the price of a second of each kind of op."""
    of_kind = {kind: [use for used_by, use in sorted(uses) if used_by is kind] for kind in Kind}
    # Possible states of each lane, None if idle. Lanes are independent, so any combination may occur.
    doing: dict[Lane, list[tuple[Kind, Uses] | None]] = {lane: [None] for lane in Lane}
    for kind, kind_uses in of_kind.items():
        doing[LANE_OF[kind]] += [(kind, use) for use in kind_uses]
    moments: list[dict[Kind, float]] = []  # speed of each running op, one dict per combination
    for together in product(*doing.values()):
        working = [op for op in together if op is not None]
        speeds = shares(tuple(use for _, use in working), region)
        moments.append({kind: speed for (kind, _), speed in zip(working, speeds, strict=True)})
    result = []
    for meeting in MEETINGS:
        present = [kind for kind in meeting.kinds if of_kind[kind]]
        if not (meeting.any_of or len(present) == len(meeting.kinds)) or not present:
            continue
        first, *rest = present
        price = {kind: 1.0 for kind in present if LANE_OF[kind] is LANE_OF[first]}
        rest = [kind for kind in rest if kind not in price]
        for second in rest:
            a, b = shares((min(of_kind[first]), min(of_kind[second])), region)
            price[second] = min(1.0, (1.0 - a) / b)
        if all(price[second] < LEAST_PRICE for second in rest):
            continue
        peak = max(sum(price.get(kind, 0.0) * speed for kind, speed in moment.items()) for moment in moments)
        result.append((meeting, [(kind, price[kind] / peak) for kind in present]))
    return result
