"""Which linear prices of ops, dual prices of the machine's capacity, bound a step under contention?

A *facet* prices the work of ops: whatever runs at the same time, the prices of the ops that run, each times its speed, never add
up to more than one per second. So no stretch of time is shorter than the priced work of the ops that lie in it. Each lane is a
facet (its ops cost their seconds), each shared resource (ops cost the share of it that they draw), and so are lanes that slow
each other down: an op of the first costs its seconds, one of another what it takes away from the first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, product

from planner.predict.cost import CostModel
from runtime.plan import LANE_OF, Kind, Lane, Op, Setup
from runtime.plan.region import Demand, Region, Resource, Uses, shares
from runtime.plan.workload import BlockKind

UPDATES = (Kind.UPDATE, Kind.SETTLE)
LEAST_PRICE = 0.01  # what takes less away is no facet of its own


@dataclass(frozen=True, slots=True)
class Meeting:
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
_WITH_MICRO_BATCH = (
    Kind.FORWARD,
    Kind.LOSS,
    Kind.BACKWARD,
    Kind.RECOMPUTE,
    Kind.OFFLOAD_ACTIVATION,
    Kind.FETCH_ACTIVATION,
    Kind.OFFLOAD_SAVED,
    Kind.FETCH_SAVED,
    Kind.ACCUMULATE,
)
_OF_THE_DEVICE = (Kind.OFFLOAD_SQUARES, Kind.UPDATE_ON_DEVICE)  # which has the state
_OF_THE_HOST = (Kind.OFFLOAD_GRADIENT, Kind.UPDATE)
_OF_GRADIENTS = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE, Kind.NORM, Kind.UPDATE)
_NOT_OF = {
    BlockKind.EMBEDDING: (Kind.LOSS, Kind.RECOMPUTE),
    BlockKind.LAYER: (Kind.LOSS,),
    BlockKind.HEAD: (Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE, Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION),
}
KEYS: tuple[Key, ...] = (*Lane, *Resource, *MEETINGS)


def nothing() -> dict[Key, float]:
    """Zero seconds of every facet."""
    return dict.fromkeys(KEYS, 0.0)


def add(total: dict[Key, float], load: Mapping[Key, float], count: float) -> None:
    """Add the load so many times."""
    for key, seconds in load.items():
        total[key] += count * seconds


@dataclass(slots=True)
class Facets:
    """The facets of the first plan, valid for all of them: plans of one workload and semantics, ops not needed."""

    plans: Sequence[Setup]
    cost: CostModel
    prices: dict[Kind, list[tuple[Meeting, float]]] = field(init=False)  # of a second of an op

    def __post_init__(self) -> None:
        region = Region(tuple(self.cost.capacity.items()))
        uses = {kind: frozenset(d.uses for plan in self.plans for d in _demands(plan, self.cost, kind)) for kind in Kind}
        self.prices = {kind: [] for kind in Kind}
        for meeting, prices in _priced(tuple(uses.items()), region):
            for kind, price in prices:
                self.prices[kind].append((meeting, price))
        self.prices[Kind.SPECULATE] = self.prices[Kind.SETTLE] = self.prices[Kind.UPDATE]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The facets that cost anything here: lanes, resources, and meetings in which ops slow each other."""
        met = {meeting for prices in self.prices.values() for meeting, _ in prices}
        return (*self.plans[0].lanes, *Resource, *(meeting for meeting in MEETINGS if meeting in met))

    def of(self, kind: Kind, demand: Demand) -> dict[Key, float]:
        """What one op costs on each facet."""
        load: dict[Key, float] = {LANE_OF[kind]: demand.uncontended_s}
        for resource, per_s in demand.uses:
            # Alone, an op may draw more than several get together: then it has the whole.
            load[resource] = min(1.0, per_s / self.cost.capacity[resource]) * demand.alone_s
        for meeting, price in self.prices[kind] if demand.uses else ():  # a copy within the device slows nobody
            load[meeting] = price * demand.alone_s
        return load


def _demands(plan: Setup, cost: CostModel, kind: Kind) -> Iterator[Demand]:
    """One demand of each sort that ops of a kind have in the plan: speculation asks for what updates ask for."""
    reduced, last = plan.reduced, plan.semantics.n_micro_batches - 1
    if kind in (Kind.SPECULATE, Kind.SETTLE) or (kind is Kind.ACCUMULATE and reduced):
        return
    if kind in (Kind.GATHER, Kind.EXCHANGE, Kind.SHARE_NORM) and plan.semantics.ranks == 1:
        return
    squared, away = set(plan.policy.square_blocks), set(plan.policy.offload_blocks)
    several = kind in _WITH_MICRO_BATCH or (kind is Kind.OFFLOAD_GRADIENT and not reduced)
    micro_batches = [m for m, _ in plan.alike(range(last + 1))] if several else [None]
    for b, block in enumerate(plan.workload.blocks):
        without = (Kind.SQUARE,) if b not in squared else (Kind.NORM,) if b else ()
        moved = () if b in away else (Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED)
        elsewhere = _OF_THE_HOST if b in plan.policy.device_blocks else _OF_THE_DEVICE
        packed = () if plan.unpacks(b) else (Kind.DEQUANTISE,)
        frozen = () if block.trained else _OF_GRADIENTS
        if kind not in (*_NOT_OF[block.kind], *without, *moved, *elsewhere, *packed, *frozen):
            for micro_batch in micro_batches:
                demand = cost.demand(plan, Op(kind, b, micro_batch))
                if demand.uses:
                    yield demand


@lru_cache(maxsize=256)
def _priced(uses: tuple[tuple[Kind, frozenset[Uses]], ...], region: Region) -> list[tuple[Meeting, list[tuple[Kind, float]]]]:
    """The price of a second of each kind, for every meeting of ops that the plans have."""
    # What each lane may be doing, or None: any of these at once with any of the others'.
    doing: dict[Lane, list[tuple[Kind, Uses] | None]] = {lane: [None] for lane in Lane}
    for kind, found in uses:
        doing[LANE_OF[kind]] += [(kind, use) for use in sorted(found)]
    moments: list[dict[Kind, float]] = []  # the speed of each that works
    for together in product(*doing.values()):
        working = [op for op in together if op is not None]
        speeds = shares(tuple(use for _, use in working), region)
        moments.append({kind: speed for (kind, _), speed in zip(working, speeds, strict=True)})
    of_kind, result = dict(uses), []
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
