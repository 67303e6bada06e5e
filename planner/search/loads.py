"""What does each choice of a policy ask of lanes and shared resources?

In seconds of every facet. A relaxation counts blocks of a class that are treated alike, so what one of them asks for is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planner.bounds.bounds import ARRIVING, is_first_gradient, of_each_size, ops_at_least, places_to_stay
from planner.bounds.facets import Facets, Key, add, nothing
from planner.bounds.phases import PASSING, Passing
from planner.predict.cost import CostModel
from planner.predict.memory import frame
from runtime.plan import Kind, Lane, Op, Policy, Semantics, Setup, Update
from runtime.plan.legality import can_square
from runtime.plan.region import Demand
from runtime.plan.workload import BlockKind, Model, Workload

from .space import Way, ways_of, with_ways


class Frames:
    """Policies of one workload, with their arenas and without ops, and the facets that price what they ask for."""

    def __init__(self, model: Model, workload: Workload, semantics: Semantics, cost: CostModel) -> None:
        self.model, self.workload, self.semantics, self.cost = model, workload, semantics, cost
        self._known: dict[Policy, Setup] = {}
        self._facets: dict[bool, Facets] = {}  # by whether gradients are summed on the device

    def of(self, policy: Policy) -> Setup:
        if policy not in self._known:
            self._known[policy] = frame(self.model, self.workload, self.semantics, policy)
        return self._known[policy]

    def facets_of(self, plan: Setup) -> Facets:
        """Facets that hold for every policy which sums gradients where this lean one does."""
        if plan.reduced not in self._facets:
            self._facets[plan.reduced] = Facets((plan, *self._others(plan)), self.cost)
        return self._facets[plan.reduced]

    def _others(self, plan: Setup) -> Iterator[Setup]:
        """The same policy where ops draw otherwise on what is shared: squares on the device; and, where computing draws on the
        host's memory, other activations saved; and copies of what is saved."""
        lean = plan.policy
        if plan.reduced and plan.workload.trains_all:
            squared = replace(lean, square_blocks=tuple(can_square(self.workload, self.semantics)))
            yield self.of(squared)
            if lean.update is Update.DEFERRED and (stay := places_to_stay(plan, self.cost.profile)):
                yield self.of(replace(squared, device_blocks=tuple(stay)))
        of_cpu = self.cost.profile.device.kind == "cpu"
        for b, *_ in self.workload.classes:
            if self.workload.blocks[b].kind is BlockKind.LAYER:
                for way in ways_of(self.workload.blocks[b], 1):
                    if way.away or of_cpu:
                        yield self.of(with_ways(replace(lean, boundary_stride=1), {b: way}))


@dataclass(frozen=True, slots=True)
class Squaring:
    """What it means that a block's gradient is squared on the device."""

    square: dict[Key, float] = field(default_factory=nothing)  # itself
    more: dict[Key, float] = field(default_factory=nothing)  # to do with it than without, or less
    home_s: float = 0.0  # how much longer the gradient's way home is then


@dataclass(frozen=True, slots=True)
class Staying:
    """What it means that a squared block's state, and so its gradient, stays on the device.

    Its loads, copies within the device, and the way of its squares are left out: short, and no bound may be too high."""

    more: dict[Key, float] = field(default_factory=nothing)  # to do besides, or less
    update: dict[Key, float] = field(default_factory=nothing)  # on the device
    of_host: dict[Key, float] = field(default_factory=nothing)  # the update that the host does not do
    load: dict[Key, float] = field(default_factory=nothing)  # one that the link does not carry
    gradient: dict[Key, float] = field(default_factory=nothing)  # that does not leave, with its squares
    home_s: float = 0.0  # for which it would be under way


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a layer asks for besides, if what it saves goes to the host."""

    all: dict[Key, float] = field(default_factory=nothing)  # forward, offload and fetch, of all micro-batches
    passing: dict[Kind, Passing] = field(default_factory=lambda: {kind: Passing() for kind in PASSING})
    first: dict[Key, float] = field(default_factory=nothing)  # of the first group, what may be done before its loss, fetches apart


class Loads:
    """Of a lean policy, and of what one choice makes of it; `n_first` is the most micro-batches that its first group may have."""

    def __init__(self, frames: Frames, lean: Policy, n_first: int) -> None:
        self.frames, self.cost, self.n_first = frames, frames.cost, n_first
        self.plan = frames.of(lean)
        self.facets = frames.facets_of(self.plan)
        self._one_slot = replace(lean, gradient_slots=1)  # on how many there are no op's cost depends

    def demand(self, kind: Kind, block: int, micro_batch: int | None = None) -> Demand:
        """Of one op."""
        return self.cost.demand(self.plan, Op(kind, block, micro_batch))

    def of(self, kind: Kind, block: int, micro_batch: int | None = None) -> dict[Key, float]:
        """What one op asks for; of a load, with the gather that several ranks do after it."""
        found = self.facets.of(kind, self.demand(kind, block, micro_batch))
        if kind is Kind.LOAD and self.plan.semantics.ranks > 1:
            for key, seconds in self.facets.of(Kind.GATHER, self.demand(Kind.GATHER, block)).items():
                found[key] = found.get(key, 0.0) + seconds
        return found

    def unpacking(self, block: int) -> dict[Key, float]:
        """What it asks for to unpack a block once; nothing of one that does not come packed."""
        return self.of(Kind.DEQUANTISE, block) if self.plan.unpacks(block) else {}

    def stays_loaded(self, block: int) -> bool:
        """Whether a block that stays is loaded once a run, and not once a step."""
        return replace(self.plan, policy=replace(self.plan.policy, resident_blocks=(block,))).stays_loaded(block)

    def of_each(self, kind: Kind, blocks: range, micro_batch: int | None = None) -> dict[Key, float]:
        """What one op of this kind for each of the blocks asks for."""
        found: dict[Key, float] = nothing()
        for b in blocks:
            add(found, self.of(kind, b, micro_batch), 1)
        return found

    def constant(self) -> dict[Key, float]:
        """What every member of the family does but for loads and backward of layers."""
        found: dict[Key, float] = nothing()
        for kind, b, demand, count in ops_at_least(self.plan, self.cost):
            is_layer = self.plan.workload.blocks[b].kind is BlockKind.LAYER
            if kind not in (Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER) and not (kind is Kind.BACKWARD and is_layer):
                add(found, self.facets.of(kind, demand), count)
        return found

    def arriving(self) -> dict[Key, float]:
        """What comes after the first gradient has left, if nothing is squared on the device or updated early."""
        found: dict[Key, float] = nothing()
        for kind, b, demand, count in ops_at_least(self.plan, self.cost):
            if kind in ARRIVING:
                add(found, self.facets.of(kind, demand), count - is_first_gradient(self.plan, kind, b))
        return found

    def backward(self, block: int, way: Way) -> dict[Key, float]:
        """All backwards of a layer that saves so."""
        found: dict[Key, float] = nothing()
        for kind, _, demand, count in ops_at_least(self._saving(block, way), self.cost, only=block):
            if kind is Kind.BACKWARD:
                add(found, self.facets.of(kind, demand), count)
        return found

    def last_backwards_s(self, block: int, way: Way) -> float:
        """Seconds of a layer's backwards that gradients leave after, if it saves so."""
        n, plan = self.plan.semantics.n_micro_batches, self._saving(block, way)
        last = [(n - 1, 1)] if self.plan.reduced else of_each_size(self.plan, n)
        return sum(count * self.cost.demand(plan, Op(Kind.BACKWARD, block, m)).uncontended_s for m, count in last)

    def gradient_s(self, block: int) -> float:
        """Seconds in which one gradient of a block leaves."""
        return self.demand(Kind.OFFLOAD_GRADIENT, block, self.a_gradient).uncontended_s

    def gradients_s(self) -> float:
        """Seconds in which all gradients of layers leave."""
        often = 1 if self.plan.reduced else self.plan.semantics.n_micro_batches
        layers = range(1, self.plan.workload.n_layers + 1)
        return often * self.of_each(Kind.OFFLOAD_GRADIENT, layers, self.a_gradient)[Lane.D2H]

    @property
    def a_gradient(self) -> int | None:
        """The micro-batch whose gradient stands for the others'; None where only their sum leaves."""
        return None if self.plan.reduced else 0

    def boundaries(self) -> dict[Kind, Passing]:
        """What a layer's input asks for on its way to the host, and back."""
        found = {kind: Passing() for kind in PASSING}
        for kind in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION):
            for m, count in of_each_size(self.plan, self.plan.semantics.n_micro_batches):
                found[kind].add(self.of(kind, 0, m), count)
        return found

    def squaring(self, block: int) -> Squaring:
        """What a block's square costs."""
        square, more, home_s = nothing(), nothing(), 0.0
        for plan, sign in ((self.frames.of(replace(self._one_slot, square_blocks=(block,))), 1), (self.plan, -1)):
            for kind, _, demand, count in ops_at_least(plan, self.cost, only=block):
                if kind in (Kind.SQUARE, Kind.OFFLOAD_GRADIENT, Kind.NORM):
                    add(more, self.facets.of(kind, demand), sign * count)
                    add(square, self.facets.of(kind, demand), kind is Kind.SQUARE)
                    home_s += sign * demand.uncontended_s * (kind is not Kind.SQUARE)
        return Squaring(square, more, home_s)

    def staying(self, block: int) -> Staying:
        """What it means that a block stays."""
        squared = replace(self._one_slot, square_blocks=(block,))
        home_s = self.cost.demand(self.frames.of(squared), Op(Kind.OFFLOAD_GRADIENT, block)).uncontended_s
        found = Staying(home_s=home_s)
        for policy, sign in ((replace(squared, device_blocks=(block,)), 1), (squared, -1)):
            for kind, _, demand, _ in ops_at_least(self.frames.of(policy), self.cost, only=block):
                load = self.facets.of(kind, demand)
                match kind, sign:
                    case Kind.UPDATE_ON_DEVICE, 1:
                        add(found.update, load, 1)
                        add(found.more, load, 1)
                    case Kind.UPDATE, -1:
                        add(found.of_host, load, 1)
                        add(found.more, load, -1)
                    case Kind.OFFLOAD_GRADIENT, -1:
                        add(found.gradient, load, 1)
                        add(found.more, load, -1)
                    case Kind.LOAD, -1:
                        add(found.load, load, 1)
                        is_layer = self.plan.workload.blocks[block].kind is BlockKind.LAYER
                        add(found.more, load, -2 if is_layer else -1)
                    case _:
                        pass
        return found

    def leaving(self, block: int, way: Way) -> Leaving:
        """What there is to do when what a layer saves goes to the host and comes back."""
        leaving, plan = Leaving(), self._saving(block, way)
        for total, n in ((leaving.all, self.plan.semantics.n_micro_batches), (leaving.first, self.n_first)):
            for m, count in of_each_size(plan, n):
                forward, offload, fetch = (
                    self.facets.of(kind, self.cost.demand(plan, Op(kind, block, m)))
                    for kind in (Kind.FORWARD, Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED)
                )
                add(total, forward, count)
                add(total, self.of(Kind.FORWARD, block, m), -count)
                add(total, offload, count)
                if total is leaving.all:
                    add(total, fetch, count)
                    leaving.passing[Kind.OFFLOAD_SAVED].add(offload, count)
                    leaving.passing[Kind.FETCH_SAVED].add(fetch, count)
        return leaving

    def _saving(self, block: int, way: Way) -> Setup:
        """The policy where one layer saves so."""
        return self.frames.of(with_ways(self._one_slot, {block: way}))
