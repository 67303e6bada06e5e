"""Work: what a step asks of lanes and shared resources, block by block, counted and not read off ops.

A quantity is a number of seconds: for a policy one number; for a family of policies an affine function of how many blocks are
treated in each way. Both are arrays whose last axis holds the constant and, of a family, a coefficient for each variable, so that
every inequality about them is written once (`reasons.py`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from penstock.planner.lower.arenas import N_READ_SLOTS, N_STAGING_SLOTS, n_whole_sums, spill_ring_slots
from penstock.planner.predict.cost import CostModel
from penstock.runtime.plan import OPS, Kind, Lane, Op, Setup
from penstock.runtime.plan.ops import Often, Phase
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.region import Demand, Uses
from penstock.runtime.plan.workload import BlockKind, Saved

from .facets import Array, Facets, uses_of

# Of every facet, in seconds:
VECTORS = (
    "total",
    "updates",  # the host's, once the norm is known
    "on_device",  # the device's own updates
    "first_loads",  # one of each block
    "first_forwards",  # of the step's first group, and what leaves after them
    "first_leaving",  # of these, what leaves
    "arriving",  # all that is done with gradients after the first, the head's, has left
    "up",  # of layers, here and below: forward, by all groups
    "down",  # backward, by all groups
    "loads_up",  # of those that stream, once: one way of one group
    "loads_down",
    "reads_up",  # as these
    "reads_down",
    "leaving",  # gradients on their way to the host, and into the host's sums
    "last_leaving",  # those of layers of the last group, where the host adds more of them than of others
    "head_leaving",  # the head's last gradient of one group
    Kind.OFFLOAD_ACTIVATION,  # by all groups, and so the next three
    Kind.OFFLOAD_SAVED,
    Kind.FETCH_ACTIVATION,
    Kind.FETCH_SAVED,
)
LEAVING, COMING = (Kind.OFFLOAD_ACTIVATION, Kind.OFFLOAD_SAVED), (Kind.FETCH_ACTIVATION, Kind.FETCH_SAVED)


def ring(kind: Kind, saved: Saved) -> str:
    """The slots of what layers save in one way, as ops of a kind use them."""
    return f"{kind} {saved}"


# Of every kind of op by which activations leave or come back, the rings of slots that these pass through
RINGS = {kind: (kind,) for kind in (LEAVING[0], COMING[0])} | {
    kind: tuple(ring(kind, saved) for saved in LEAVE) for kind in (LEAVING[1], COMING[1])
}
# Of every facet, of the op that asks for most of it:
EARLY = ("early_fetch_activation", "early_fetch_saved")
LARGEST = ("read", "load", "gather", "unpacking", "leaving", "staged", *chain.from_iterable(RINGS.values()), *EARLY)
# In seconds on lanes, ops one after the other:
SCALARS = (
    "forwards",  # of the first group
    "update",
    "update_of_embedding",
    "load_of_embedding",
    "load_of_head",
    "guess_of_embedding",  # its update on speculation
    "update_on_device",
    "home",  # the way of the last gradient, or of its squares, to the norm
    "backwards_in_turn",  # of layers with the micro-batches that complete gradients, and these on their way home
    "loss",  # of groups: from the first loss to the end of the last
    "embedding",  # from the embedding's first backward to the end of its last
    "embedding_alone",  # from when all gradients of layers have left to the end of the embedding's last backward
    "embedding_home",  # and to when the last of its gradients has left
    "first_gradient",  # from the first loss to the head's first gradient on the host
)
_SUMMING = (Kind.LOSS, Kind.BACKWARD, Kind.ACCUMULATE)  # a micro-batch that ends a sum takes longer
_LEFT_AND_ADDED = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE)
_ARRIVING = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE, Kind.NORM, Kind.SPECULATE)


class Work:
    """What some blocks ask for; sums and multiples of such work are work, but for the largest ops."""

    def __init__(self, n_facets: int, width: int = 1) -> None:
        # By sort: vectors, scalars, largest ops
        self.all = np.zeros((len(VECTORS), n_facets, width)), np.zeros((len(SCALARS), width)), np.zeros((len(LARGEST), n_facets))
        vectors, scalars, largest = self.all
        self.vectors: dict[str, Array] = dict(zip(VECTORS, vectors, strict=True))
        self.scalars: dict[str, Array] = dict(zip(SCALARS, scalars, strict=True))
        self.largest: dict[str, Array] = dict(zip(LARGEST, largest, strict=True))

    def add(self, other: "Work", times: float, column: int = 0) -> None:
        """Add a policy's work `times` times: to the constants, or as the coefficient of a variable. The largest ops are those of
        either."""
        for of, more in zip(self.all[:2], other.all[:2], strict=True):
            of[..., column] += times * more[..., 0]
        np.maximum(self.all[2], other.all[2], out=self.all[2])

    def __getitem__(self, name: str) -> Array:
        return self.vectors[name]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of micro-batches, of any of some sizes that make equally many."""

    n: int
    largest: int
    smallest_first: int  # micro-batches of the first group, at least
    equal: bool  # all are as large
    n_alone: int  # of the smallest group: gradients of a vocabulary block that leave one after another

    @staticmethod
    def of(plan: Setup, sizes: range) -> "Groups":
        n = plan.semantics.n_micro_batches
        largest, n_groups, n_whole = sizes[-1], -(-n // sizes[-1]), n - bool(plan.semantics.n_left)
        # The last group joins more sums of the host's than those before it.
        equal = n_groups * largest == n_whole and (plan.reduced or plan.semantics.sum_groups == 1)
        smallest = min(n % size or size for size in sizes)
        return Groups(n_groups, largest, sizes[0], equal, smallest)


def ops_of(plan: Setup, cost: CostModel, block: int) -> Iterator[tuple[Kind, Demand, int]]:
    """What a block has of ops: kind, demand, how often. Of what brings weights, before any load is spared."""
    n = plan.semantics.n_micro_batches
    for kind, row in OPS.items():
        if (n_ops := plan.n_ops(kind, block)) == 0:
            continue
        if row.often is Often.MICRO_BATCH and kind in _SUMMING:
            added = Counter[Demand]()  # most micro-batches add alike, the first of them least
            for m, count in plan.micro_batch_groups(range(n)):
                added[cost.demand(plan, Op(kind, block, m))] += count
            yield from ((kind, demand, count) for demand, count in added.items())
        elif row.often is Often.MICRO_BATCH:
            yield from ((kind, cost.demand(plan, Op(kind, block, m)), count) for m, count in of_each_size(plan, n))
        else:
            one_of_many = 0 if row.often is Often.GRADIENT and not plan.reduced else None
            yield kind, cost.demand(plan, Op(kind, block, one_of_many)), n_ops


def of_each_size(plan: Setup, n: int) -> list[tuple[int, int]]:
    """One of each size among the first n micro-batches, and how many of them have it."""
    n_smaller = int(plan.semantics.is_smaller(n - 1))
    return [(m, count) for m, count in ((0, n - n_smaller), (n - 1, n_smaller)) if count]


class Works:
    """Work of single blocks, worked out once for all policies of a workload that treat a block alike. Plans need no arenas."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[object, Work] = {}
        self._uses: dict[object, frozenset[tuple[Kind, Uses]]] = {}
        self._facets: dict[object, Facets] = {}
        self._loads: dict[object, list[tuple[Kind, Demand, int, Array]]] = {}

    def facets(self, plans: Sequence[Setup]) -> Facets:
        """The facets of the first plan, valid for all of them: plans of one workload and semantics, ops not needed."""
        uses = frozenset().union(*(self._uses_of(plan, b) for plan in plans for b in plan.blocks_alike))
        if uses not in self._facets:
            lanes = [lane for lane in Lane if any(lane in plan.lanes for plan in plans)]
            self._facets[uses] = Facets(uses, lanes, self.cost)
        return self._facets[uses]

    def _uses_of(self, plan: Setup, block: int) -> frozenset[tuple[Kind, Uses]]:
        key = _treated(plan, block)
        if key not in self._uses:
            self._uses[key] = frozenset(uses_of(plan, self.cost, block))
        return self._uses[key]

    def of(self, plan: Setup, facets: Facets, block: int, groups: Groups) -> Work:
        key = facets.uses, groups, _treated(plan, block)
        if key not in self._known:
            self._known[key] = work_of(plan, self, facets, block, groups)
        return self._known[key]

    def loads(self, plan: Setup, facets: Facets, block: int) -> Iterator[tuple[Kind, Demand, int, Array]]:
        """What a block has of ops, with what one costs on each facet: the same for groups of any size, but for how often weights
        are brought."""
        key = facets.uses, plan.reduced, plan.policy.square_on_device, plan.treatments[block]
        if key not in self._loads:
            ops = ops_of(plan, self.cost, block)
            self._loads[key] = [(kind, demand, count, facets.of(kind, demand)) for kind, demand, count in ops]
        for kind, demand, count, load in self._loads[key]:
            yield kind, demand, plan.n_ops(kind, block) if OPS[kind].often is Often.USE else count, load


def _treated(plan: Setup, block: int) -> tuple[object, ...]:
    """All of the policy that a block's work depends on."""
    policy = plan.policy
    return policy.update, policy.accumulation_group, policy.square_on_device, plan.treatments[block]


def work_of(plan: Setup, works: Works, facets: Facets, block: int, groups: Groups) -> Work:
    """Of one block."""
    cost, work, of = works.cost, Work(len(facets.keys)), plan.workload.blocks[block]
    is_layer, is_resident = of.kind is BlockKind.LAYER, block in plan.policy.resident_blocks
    comes_back = block >= plan.workload.first_trained
    n_left = dict.fromkeys((Kind.FORWARD, *LEAVING), groups.largest)  # of the first group, not yet counted
    of_kind: dict[Kind, list[tuple[float, int]]] = {}  # seconds of one op, how many

    def add(name: str, load: Array, times: float = 1) -> None:
        work.vectors[name][:, 0] += times * load

    def take(name: str, load: Array) -> None:
        np.maximum(work.largest[name], load, out=work.largest[name])

    for kind, demand, count, load in works.loads(plan, facets, block):
        seconds = demand.uncontended_s
        of_kind.setdefault(kind, []).append((seconds, count))
        add("total", load, count)
        if kind in _ARRIVING:
            add("arriving", load, count - ((kind, of.kind) == (Kind.OFFLOAD_GRADIENT, BlockKind.HEAD)))
        if kind in n_left:  # the larger micro-batches come first
            n_first = min(count, n_left[kind])
            n_left[kind] -= n_first
            add("first_forwards", load, n_first)
            add("first_leaving", load, n_first * (kind in LEAVING))
            work.scalars["forwards"] += n_first * seconds * (kind is Kind.FORWARD)
        match OPS[kind].phase:
            case Phase.READING if not is_resident:
                add("reads_up", load)
                add("reads_down", load, comes_back)
                take("read", load)
            case Phase.LOADING:
                add("first_loads", load)
                if kind is Kind.LOAD and is_layer and not is_resident:
                    add("loads_up", load)
                    add("loads_down", load, comes_back)
                    take("load", load)
                elif is_layer and not is_resident:
                    take("gather", load)
            case Phase.UNPACKING:
                add("first_loads", load)
                if is_layer and not is_resident:
                    add("up", load, groups.n)
                    add("down", load, groups.n * comes_back)
                    take("unpacking", load)
            case Phase.UP if is_layer:
                add("up", load, count)
            case Phase.DOWN if is_layer:
                add("down", load, count)
            case Phase.LEAVING | Phase.COMING:
                add(kind, load, count * is_layer)
                take(kind if kind in (LEAVING[0], COMING[0]) else ring(kind, plan.policy.saved(block)), load)
                if OPS[kind].phase is Phase.COMING:
                    take(f"early_{kind}", load)
            case Phase.GRADIENTS if kind is not Kind.EXCHANGE and is_layer:
                add("leaving", load, count)
                work.largest["leaving"] += load
                work.largest["staged"] += load * (kind is Kind.ACCUMULATE)
            case Phase.GRADIENTS if kind is not Kind.EXCHANGE and block and len(of_kind[kind]) == 1:  # the head's least
                add("head_leaving", load)
            case Phase.UPDATE:
                add("updates", load, count)
                work.scalars["update"] += count * seconds
            case Phase.DEVICE_UPDATE:
                add("on_device", load, count)
                work.scalars["update_on_device"] += count * seconds
            case _:
                pass
    of_block = {kind: sum(seconds * count for seconds, count in found) for kind, found in of_kind.items()}
    if is_layer:
        joins = () if plan.reduced or plan.semantics.sum_groups == 1 else _LEFT_AND_ADDED
        n = plan.semantics.n_micro_batches
        for kind, (m, count) in product(joins, plan.micro_batch_groups(range(n - groups.n_alone, n)) if joins else ()):
            add("last_leaving", facets.of(kind, cost.demand(plan, Op(kind, block, m))), count)
        work.scalars["backwards_in_turn"] += _in_turn_s(plan, cost, block, of_block)
        return work
    _add_vocabulary(work, plan, facets, block, groups, of_kind)
    return work


def _in_turn_s(plan: Setup, cost: CostModel, block: int, of_block: dict[Kind, float]) -> float:
    """Of a layer whose gradient goes to the host: the backwards that complete gradients, and these on their way."""
    if Kind.OFFLOAD_GRADIENT not in of_block:
        return 0.0
    last = cost.demand(plan, Op(Kind.BACKWARD, block, plan.semantics.n_micro_batches - 1)).uncontended_s
    backwards_s = last if plan.reduced else of_block[Kind.BACKWARD]
    return backwards_s + of_block.get(Kind.SQUARE, 0.0) + of_block[Kind.OFFLOAD_GRADIENT]


def _add_vocabulary(
    work: Work, plan: Setup, facets: Facets, block: int, groups: Groups, of_kind: dict[Kind, list[tuple[float, int]]]
) -> None:
    """What the embedding or the head adds to the ring, and how long its gradients take turns: the next is computed when the last
    has left, leaves when that has been added, and is added when it has left."""
    scalars = work.scalars
    first_s = {kind: found[0][0] for kind, found in of_kind.items()}
    shortest_s = {kind: min(seconds for seconds, _ in found) for kind, found in of_kind.items()}
    computing = Kind.LOSS if block else Kind.BACKWARD
    n = sum(count for _, count in of_kind.get(computing, ()))  # none, of an embedding that is not trained
    total_s, one_s = sum(seconds * count for seconds, count in of_kind.get(computing, ())), shortest_s.get(computing, 0.0)
    is_added = Kind.ACCUMULATE in of_kind
    left_s, added_s = (shortest_s[kind] if is_added else 0.0 for kind in (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE))
    takes_turns = is_added and groups.n_alone > 1
    adding_s = (n - 2 * groups.n) * added_s + 2 * groups.n * one_s if takes_turns else 0.0
    computed_s = (n - groups.n) * left_s + max(total_s, adding_s)
    if is_added:  # lanes idle meanwhile: none has an op in between
        for lane, idle_s in ((Lane.GPU, left_s), (Lane.D2H, added_s), (Lane.CPU, left_s)):
            for name in ("total", "arriving"):
                work.vectors[name][facets.number(lane)] += (n - groups.n) * idle_s
    if block:
        scalars["load_of_head"] += first_s[Kind.LOAD]
        scalars["loss"] += computed_s
        scalars["first_gradient"] += (total_s if plan.reduced else one_s) + shortest_s.get(Kind.OFFLOAD_GRADIENT, 0.0)
        return
    scalars["embedding"] += computed_s
    scalars["load_of_embedding"] += first_s[Kind.LOAD]
    scalars["update_of_embedding"] += sum(first_s.get(kind, 0.0) for kind in (Kind.UPDATE, Kind.SETTLE))
    scalars["guess_of_embedding"] += first_s.get(Kind.SPECULATE, 0.0)
    way = (Kind.EXCHANGE, Kind.OFFLOAD_GRADIENT, Kind.OFFLOAD_SQUARES, Kind.NORM, Kind.CLIP)
    scalars["home"] += sum(of_kind[kind][-1][0] for kind in way if kind in of_kind)
    if takes_turns:
        between_s = (n - 2 * groups.n) * max(one_s, added_s)
        scalars["embedding_alone"] += (n - groups.n) * left_s + between_s + groups.n * one_s
    if is_added:
        scalars["embedding_home"] += n * left_s + (n - groups.n) * max(one_s, added_s)
    else:
        scalars["embedding_home"] += groups.n * shortest_s.get(Kind.OFFLOAD_GRADIENT, 0.0)


def until_each_block_s(
    plan: Setup, cost: CostModel, of_block: Mapping[int, Work], may_stay: Collection[int] = ()
) -> Iterator[float]:
    """Of each block updates up to it and its load, less first forwards of earlier blocks. The load of one whose state may be on the
    device is nothing, for safety."""
    of = dict[int, tuple[float, ...]]()  # update, load, forwards
    for first, alike in plan.blocks_alike.items():
        update_s, forwards_s = (float(of_block[first].scalars[name][0]) for name in ("update", "forwards"))
        load_s = cost.demand(plan, Op(Kind.LOAD, first)).uncontended_s
        of |= {b: (update_s, load_s * (b not in may_stay), forwards_s) for b in alike}
    updates_s = forwards_s = 0.0
    for b in range(len(plan.workload.blocks)):
        update_s, load_s, forward_s = of[b]
        updates_s += update_s
        yield updates_s - forwards_s + load_s
        forwards_s += forward_s


def spared_ops(plan: Setup, cost: CostModel, of: Callable[[Kind, Demand], Array]) -> Iterator[tuple[Kind, Array]]:
    """What is spared of loads at turns of the walk over the layers, up and down for each group: at each turn at most as many as
    there are slots, and of each quantity in `of` those that ask most of it, for safety."""
    n_turns = 2 * -(-plan.semantics.n_micro_batches // plan.policy.accumulation_group) - 1
    n_slots = plan.policy.prefetch_depth + least_slots(plan)
    n_unpacked = min(n_slots, plan.n_streaming)
    n_read = n_slots + N_READ_SLOTS  # of which no load is spared, or a read alone
    layers = [b for b in plan.blocks_alike if 0 < b <= plan.workload.n_layers and b not in plan.policy.resident_blocks]
    for kind, n_held in ((Kind.READ, n_read), (Kind.LOAD, n_slots), (Kind.GATHER, n_unpacked), (Kind.DEQUANTISE, n_unpacked)):
        if again := {b: (plan.n_ops(kind, b) - 1) * len(plan.blocks_alike[b]) for b in layers if plan.n_ops(kind, b) > 1}:
            loads = np.array([of(kind, cost.demand(plan, Op(kind, b))) for b in again])
            most_first = np.argsort(-loads, axis=0, kind="stable")
            counts = np.array([*again.values()])[most_first]
            n_spared = np.clip(n_turns * n_held - (np.cumsum(counts, axis=0) - counts), 0, counts)
            yield kind, (n_spared * np.take_along_axis(loads, most_first, axis=0)).sum(axis=0)


def least_slots(plan: Setup) -> int:
    """Layers whose weights may be on the device besides those that are prefetched: the one that is computed; and where it is
    unpacked, another that is packed."""
    return 2 if plan.packed_slots else 1


@dataclass(frozen=True, slots=True)
class Buffers:
    """How much of one phase's work may be done before it begins or after it ends."""

    n_slots: int  # gradients of layers in device slots
    n_staged: int  # and on the host, waiting to be added

    @staticmethod
    def of(plan: Setup, gradient_slots: int) -> "Buffers":
        """Of several ranks, gradients of layers may also wait for the others', as sums."""
        n_slots = gradient_slots + (n_whole_sums(plan) if plan.semantics.ranks > 1 else 0)
        return Buffers(n_slots, 0 if plan.reduced else N_STAGING_SLOTS)


def n_passing(group: int, n_saved: Mapping[Saved, Array]) -> dict[str, Array]:
    """Activations in each ring of slots, at most. `n_saved`: of what is saved in one way; others are not there."""
    boundaries = np.zeros_like(next(iter(n_saved.values())))
    boundaries[0] = spill_ring_slots(group)
    found = dict.fromkeys((LEAVING[0], COMING[0]), boundaries)
    return found | {ring(kind, saved): n for kind in (LEAVING[1], COMING[1]) for saved, n in n_saved.items()}


def early_fetches(group: int, n_spilled: float) -> float:
    """Boundaries that may be back on the device before the first loss, at most: each has a slot of the ring from then on."""
    return min(float(spill_ring_slots(group)), group * n_spilled)
