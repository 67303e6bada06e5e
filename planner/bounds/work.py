"""Work: demand of a step on lanes and shared resources, counted block by block from the policy, without ops.

A quantity is a number of seconds for one policy. For a policy family it is an affine function of how many blocks get each
treatment. Both are arrays: the last axis holds the constant and, for a family, one coefficient per variable. Every inequality can
thus be written once (`reasons.py`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from penstock.planner.lower.arenas import N_READ_SLOTS, N_STAGING_SLOTS, n_streaming, n_whole_sums, spill_ring_slots
from penstock.planner.lower.op_table import n_ops
from penstock.planner.predict.cost import CostModel, micro_batch_groups
from penstock.planner.predict.region import Demand, Uses
from penstock.runtime.plan import OPS, Kind, Lane, Op, Setup
from penstock.runtime.plan.ops import Often, Phase
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import BlockKind, Saved

from .facets import Array, Facets, uses_of

# Vectors: seconds on every facet
VECTORS = (
    "total",
    "updates",  # on the host, once the norm is known
    "on_device",  # on the device
    "first_loads",  # one per block
    "first_forwards",  # of the step's first group, and the offloads after them
    "first_leaving",  # only those offloads
    "arriving",  # all work on gradients after the head's first one has left
    "up",  # (layers, here and below) forward of all groups
    "down",  # backward of all groups
    "loads_up",  # streamed layers, one load each: one sweep of one group
    "loads_down",
    "reads_up",  # disk reads, counted like loads
    "reads_down",
    "leaving",  # gradient offloads and additions on the host
    "last_leaving",  # the same for layers of the last group, if the host adds more of them than of other groups
    "head_leaving",  # the head's last gradient of one group
    Kind.OFFLOAD_ACTIVATION,  # (this and the next three) all groups
    Kind.OFFLOAD_SAVED,
    Kind.FETCH_ACTIVATION,
    Kind.FETCH_SAVED,
)
LEAVING, COMING = (Kind.OFFLOAD_ACTIVATION, Kind.OFFLOAD_SAVED), (Kind.FETCH_ACTIVATION, Kind.FETCH_SAVED)


def ring(kind: Kind, saved: Saved) -> str:
    """Name of the ring of slots for one tier of saved activations, for ops of this kind."""
    return f"{kind} {saved}"


# Rings of slots that each kind of activation offload or fetch uses
RINGS = {kind: (kind,) for kind in (LEAVING[0], COMING[0])} | {
    kind: tuple(ring(kind, saved) for saved in LEAVE) for kind in (LEAVING[1], COMING[1])
}
# Largest ops: maximum of one op on every facet
EARLY = ("early_fetch_activation", "early_fetch_saved")
LARGEST = ("read", "load", "gather", "unpacking", "leaving", "staged", *chain.from_iterable(RINGS.values()), *EARLY)
# Scalars: seconds of ops in sequence
SCALARS = (
    "forwards",  # of the first group
    "update",
    "update_of_embedding",
    "load_of_embedding",
    "load_of_head",
    "guess_of_embedding",  # its speculative update
    "update_on_device",
    "home",  # critical path from the last gradient, or its squares, to the norm
    "backwards_in_turn",  # (layers) backwards that complete gradients, in sequence with their offloads
    "loss",  # of all groups, each from its first loss to the end of its last
    "embedding",  # from the embedding's first backward to the end of its last
    "embedding_alone",  # from the moment when all layer gradients have left to the end of the embedding's last backward
    "embedding_home",  # and until the embedding's last gradient has left
    "first_gradient",  # from the first loss until the head's first gradient is on the host
)
_SUMMING = (Kind.LOSS, Kind.BACKWARD, Kind.ACCUMULATE)  # ops that take longer for a micro-batch that ends a sum
_UPDATES = {Phase.UPDATE: ("updates", "update"), Phase.DEVICE_UPDATE: ("on_device", "update_on_device")}  # vector, scalar
_LEFT_AND_ADDED = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE)
_ARRIVING = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE, Kind.NORM, Kind.SPECULATE)


class Work:
    """Work of a set of blocks: sums and multiples add up linearly, except the largest ops."""

    def __init__(self, n_facets: int, width: int = 1) -> None:
        self.all = np.zeros((len(VECTORS), n_facets, width)), np.zeros((len(SCALARS), width)), np.zeros((len(LARGEST), n_facets))
        vectors, scalars, largest = self.all
        self.vectors: dict[str, Array] = dict(zip(VECTORS, vectors, strict=True))
        self.scalars: dict[str, Array] = dict(zip(SCALARS, scalars, strict=True))
        self.largest: dict[str, Array] = dict(zip(LARGEST, largest, strict=True))

    def add(self, addend: "Work", times: float, column: int = 0) -> None:
        """Add the work of a policy `times` times to one column, constant or coefficient; take the maximum of the largest ops."""
        for target, source in zip(self.all[:2], addend.all[:2], strict=True):
            target[..., column] += times * source[..., 0]
        np.maximum(self.all[2], addend.all[2], out=self.all[2])

    def count(self, name: str, load: Array, times: float = 1) -> None:
        """Add equal ops to the constant of a vector."""
        self.vectors[name][:, 0] += times * load

    def hold(self, name: str, load: Array) -> None:
        """Include an op among the largest ones."""
        np.maximum(self.largest[name], load, out=self.largest[name])

    def __getitem__(self, name: str) -> Array:
        return self.vectors[name]


@dataclass(frozen=True, slots=True)
class Groups:
    """Accumulation groups of a step: statistics that hold for all group sizes with this number of groups."""

    n: int
    largest: int
    smallest_first: int  # lower bound on the micro-batches of the first group
    equal: bool  # all groups have the same size and work
    n_alone: int  # micro-batches of the smallest group, as separate gradients of a vocabulary block

    @staticmethod
    def from_plan(plan: Setup, sizes: range, may_sum: bool = False) -> "Groups":
        """`may_sum`: gradient sums may be on the device over all groups."""
        n = plan.semantics.n_micro_batches
        largest, n_groups, n_whole = sizes[-1], -(-n // sizes[-1]), n - bool(plan.semantics.n_left)
        # The last group has more additions with sum groups on the host, and more gradients to offload with sums on the device.
        same_sums = plan.semantics.sum_groups == 1 and not (may_sum or plan.policy.sum_blocks)
        equal = n_groups * largest == n_whole and (plan.reduced or same_sums)
        smallest = min(n % size or size for size in sizes)
        return Groups(n_groups, largest, sizes[0], equal, smallest)


def ops_of(plan: Setup, cost: CostModel, block: int) -> Iterator[tuple[Kind, Demand, int]]:
    """Yield (kind, demand, count) for the ops of a block. Loads that reuse weights still in a slot are not subtracted."""
    n = plan.semantics.n_micro_batches
    for kind, row in OPS.items():
        if (count_of_kind := n_ops(plan, kind, block)) == 0:
            continue
        if row.often is Often.MICRO_BATCH and kind in _SUMMING:
            added = Counter[Demand]()  # most micro-batches have equal demands; the first has the least
            for m, count in micro_batch_groups(plan.semantics, range(n)):
                added[cost.demand(plan, Op(kind, block, m))] += count
            yield from ((kind, demand, count) for demand, count in added.items())
        elif row.often is Often.MICRO_BATCH:  # one of each size
            n_smaller = int(plan.semantics.is_smaller(n - 1))
            sizes = ((m, count) for m, count in ((0, n - n_smaller), (n - 1, n_smaller)) if count)
            yield from ((kind, cost.demand(plan, Op(kind, block, m)), count) for m, count in sizes)
        else:
            one_of_many = 0 if row.often is Often.GRADIENT and not plan.sums_on_device(block) else None
            yield kind, cost.demand(plan, Op(kind, block, one_of_many)), count_of_kind


class WorkCache:
    """Memoised work of single blocks, shared by all policies of a workload that treat a block equally. Plans need no arenas."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[object, Work] = {}
        self._uses: dict[object, frozenset[tuple[Kind, Uses]]] = {}
        self._facets: dict[object, Facets] = {}
        self._loads: dict[object, list[tuple[Kind, Demand, int, Array]]] = {}

    def facets(self, plans: Sequence[Setup]) -> Facets:
        """Facets of the first plan that are valid for all of these plans of one workload and semantics. Plans need no ops."""
        uses = frozenset().union(*(self._uses_of(plan, b) for plan in plans for b in plan.blocks_alike))
        lanes = tuple(lane for lane in Lane if any(lane in plan.lanes for plan in plans))  # a disk that is read once uses nothing
        if (uses, lanes) not in self._facets:
            self._facets[uses, lanes] = Facets(uses, lanes, self.cost)
        return self._facets[uses, lanes]

    def _uses_of(self, plan: Setup, block: int) -> frozenset[tuple[Kind, Uses]]:
        key = _treated(plan, block)
        if key not in self._uses:
            self._uses[key] = frozenset(uses_of(plan, self.cost, block))
        return self._uses[key]

    def of_block(self, plan: Setup, facets: Facets, block: int, groups: Groups) -> Work:
        key = facets, groups, _treated(plan, block)
        if key not in self._known:
            self._known[key] = work_of(plan, self, facets, block, groups)
        return self._known[key]

    def loads(self, plan: Setup, facets: Facets, block: int) -> Iterator[tuple[Kind, Demand, int, Array]]:
        """Yield (kind, demand, count, cost on each facet) for a block. Memoised for any group size, except the counts of loads."""
        key = facets, plan.reduced, plan.policy.square_on_device, plan.treatments[block]
        if key not in self._loads:
            ops = ops_of(plan, self.cost, block)
            self._loads[key] = [(kind, demand, count, facets.op_cost(kind, demand)) for kind, demand, count in ops]
        for kind, demand, count, load in self._loads[key]:
            yield kind, demand, n_ops(plan, kind, block) if OPS[kind].often is Often.USE else count, load


def _treated(plan: Setup, block: int) -> tuple[object, ...]:
    """Key of the policy fields that determine a block's work."""
    policy = plan.policy
    return policy.update, policy.accumulation_group, policy.square_on_device, plan.treatments[block]


def work_of(plan: Setup, works: WorkCache, facets: Facets, block: int, groups: Groups) -> Work:
    work, kind_of_block = Work(len(facets.keys)), plan.workload.blocks[block].kind
    n_left = dict.fromkeys((Kind.FORWARD, *LEAVING), groups.largest)  # ops of the first group, not yet counted
    of_kind: dict[Kind, list[tuple[float, int]]] = {}  # (seconds of one op, count) by kind
    for kind, demand, count, load in works.loads(plan, facets, block):
        seconds, phase = demand.uncontended_s, OPS[kind].phase
        of_kind.setdefault(kind, []).append((seconds, count))
        work.count("total", load, count)
        if kind in _ARRIVING:
            work.count("arriving", load, count - ((kind, kind_of_block) == (Kind.OFFLOAD_GRADIENT, BlockKind.HEAD)))
        if kind in n_left:  # larger micro-batches have the lower indices
            n_first = min(count, n_left[kind])
            n_left[kind] -= n_first
            work.count("first_forwards", load, n_first)
            work.count("first_leaving", load, n_first * (kind in LEAVING))
            work.scalars["forwards"] += n_first * seconds * (kind is Kind.FORWARD)
        if phase in _UPDATES:
            vector, scalar = _UPDATES[phase]
            work.count(vector, load, count)
            work.scalars[scalar] += count * seconds
        elif (kind_of_block, phase) == (BlockKind.HEAD, Phase.GRADIENTS):
            is_each = plan.reduced or not plan.sums_on_device(block)  # in each group
            if kind is not Kind.EXCHANGE and len(of_kind[kind]) == 1 and is_each:  # the smallest
                work.count("head_leaving", load)
        else:
            _count_phase(work, plan, groups, block, kind, load, count)
    if kind_of_block is not BlockKind.LAYER:
        _add_vocabulary(work, plan, facets, block, groups, of_kind)
        return work
    joins = () if plan.sums_on_device(block) or plan.semantics.sum_groups == 1 else _LEFT_AND_ADDED
    n = plan.semantics.n_micro_batches
    for kind, (m, count) in product(joins, micro_batch_groups(plan.semantics, range(n - groups.n_alone, n)) if joins else ()):
        work.count("last_leaving", facets.op_cost(kind, works.cost.demand(plan, Op(kind, block, m))), count)
    of_block = {kind: sum(seconds * count for seconds, count in costs) for kind, costs in of_kind.items()}
    work.scalars["backwards_in_turn"] += _in_turn_s(plan, works.cost, block, of_block)
    return work


def _count_phase(work: Work, plan: Setup, groups: Groups, block: int, kind: Kind, load: Array, count: int) -> None:
    """Count equal ops of a block in the sweeps over layers, and as largest ops. Vocabulary blocks are in no sweep."""
    phase, is_layer = OPS[kind].phase, plan.workload.blocks[block].kind is BlockKind.LAYER
    streams, comes_back = block not in plan.policy.resident_blocks, block >= plan.workload.first_trained
    match phase:
        case Phase.READING if streams:
            work.count("reads_up", load)
            work.count("reads_down", load, comes_back)
            work.hold("read", load)
        case Phase.LOADING:
            work.count("first_loads", load)
            if kind is Kind.LOAD and is_layer and streams:
                work.count("loads_up", load)
                work.count("loads_down", load, comes_back)
                work.hold("load", load)
            elif is_layer and streams:
                work.hold("gather", load)
        case Phase.UNPACKING:
            work.count("first_loads", load)
            if is_layer and streams:
                work.count("up", load, groups.n)
                work.count("down", load, groups.n * comes_back)
                work.hold("unpacking", load)
        case Phase.UP | Phase.DOWN if is_layer:
            work.count("up" if phase is Phase.UP else "down", load, count)
        case Phase.LEAVING | Phase.COMING:
            work.count(kind, load, count * is_layer)
            work.hold(kind if kind in (LEAVING[0], COMING[0]) else ring(kind, plan.policy.saved(block)), load)
            if phase is Phase.COMING:
                work.hold(f"early_{kind}", load)
        case Phase.GRADIENTS if kind is not Kind.EXCHANGE and is_layer:
            work.count("leaving", load, count)
            work.largest["leaving"] += load
            work.largest["staged"] += load * (kind is Kind.ACCUMULATE)


def _in_turn_s(plan: Setup, cost: CostModel, block: int, of_block: dict[Kind, float]) -> float:
    """Seconds in which a layer's backwards and gradient offloads run in sequence; 0 if its gradient is not offloaded."""
    if Kind.OFFLOAD_GRADIENT not in of_block:
        return 0.0
    last = cost.demand(plan, Op(Kind.BACKWARD, block, plan.semantics.n_micro_batches - 1)).uncontended_s
    backwards_s = last if plan.sums_on_device(block) else of_block[Kind.BACKWARD]
    return backwards_s + of_block.get(Kind.SQUARE, 0.0) + of_block[Kind.OFFLOAD_GRADIENT]


def _add_vocabulary(
    work: Work, plan: Setup, facets: Facets, block: int, groups: Groups, of_kind: dict[Kind, list[tuple[float, int]]]
) -> None:
    """Add the embedding or the head. Its separate gradients share one slot: the next is computed after the last was offloaded, is
    offloaded after that one was added, and is added after its own offload."""
    scalars = work.scalars
    first_s = {kind: costs[0][0] for kind, costs in of_kind.items()}
    shortest_s = {kind: min(seconds for seconds, _ in costs) for kind, costs in of_kind.items()}
    computing = Kind.LOSS if block else Kind.BACKWARD
    n = sum(count for _, count in of_kind.get(computing, ()))  # 0 for an embedding that is not trained
    total_s, one_s = sum(seconds * count for seconds, count in of_kind.get(computing, ())), shortest_s.get(computing, 0.0)
    is_added = Kind.ACCUMULATE in of_kind
    left_s, added_s = (shortest_s[kind] if is_added else 0.0 for kind in (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE))
    takes_turns = is_added and groups.n_alone > 1
    adding_s = (n - 2 * groups.n) * added_s + 2 * groups.n * one_s if takes_turns else 0.0
    computed_s = (n - groups.n) * left_s + max(total_s, adding_s)
    if is_added:  # lanes are idle meanwhile, because no other op can run in between
        for lane, idle_s in ((Lane.GPU, left_s), (Lane.D2H, added_s), (Lane.CPU, left_s)):
            for name in ("total", "arriving"):
                work.vectors[name][facets.number(lane)] += (n - groups.n) * idle_s
    if block:
        scalars["load_of_head"] += first_s.get(Kind.LOAD, 0.0)
        scalars["loss"] += computed_s
        is_first = plan.reduced or not plan.sums_on_device(block)  # the head's gradient is the first to leave
        offload_s = shortest_s.get(Kind.OFFLOAD_GRADIENT, 0.0) if is_first else 0.0
        scalars["first_gradient"] += (total_s if plan.reduced else one_s) + offload_s
        return
    scalars["embedding"] += computed_s
    scalars["load_of_embedding"] += first_s.get(Kind.LOAD, 0.0)
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
        scalars["embedding_home"] += shortest_s.get(Kind.OFFLOAD_GRADIENT, 0.0)  # once a step


def until_each_block_s(
    plan: Setup, cost: CostModel, of_block: Mapping[int, Work], may_stay: Collection[int] = ()
) -> Iterator[float]:
    """Yield for each block: the updates up to it, plus its load, minus first forwards of earlier blocks. The load is 0 for blocks
    that may keep their state on the device, so that the bound holds."""
    times_s = dict[int, tuple[float, ...]]()  # (update, load, forwards) in seconds
    for first, equal_blocks in plan.blocks_alike.items():
        update_s, forwards_s = (float(of_block[first].scalars[name][0]) for name in ("update", "forwards"))
        load_s = cost.demand(plan, Op(Kind.LOAD, first)).uncontended_s if n_ops(plan, Kind.LOAD, first) else 0.0
        times_s |= {b: (update_s, load_s * (b not in may_stay), forwards_s) for b in equal_blocks}
    updates_s = forwards_s = 0.0
    for b in range(len(plan.workload.blocks)):
        update_s, load_s, forward_s = times_s[b]
        updates_s += update_s
        yield updates_s - forwards_s + load_s
        forwards_s += forward_s


def spared_ops(plan: Setup, cost: CostModel, op_cost: Callable[[Kind, Demand], Array]) -> Iterator[tuple[Kind, Array]]:
    """Yield (kind, cost) of the loads saved because weights are still in a slot when one sweep ends and the next begins. Each such
    turn saves at most one load per slot. For a valid bound, the most expensive loads count as saved, separately per facet."""
    n_turns = 2 * -(-plan.semantics.n_micro_batches // plan.policy.accumulation_group) - 1
    n_slots = plan.policy.prefetch_depth + least_slots(plan)
    n_unpacked = min(n_slots, n_streaming(plan))
    n_read = n_slots + N_READ_SLOTS  # a read is saved with its load, or alone if its own slot still holds the weights
    layers = [b for b in plan.blocks_alike if 0 < b <= plan.workload.n_layers and b not in plan.policy.resident_blocks]
    for kind, n_held in ((Kind.READ, n_read), (Kind.LOAD, n_slots), (Kind.GATHER, n_unpacked), (Kind.DEQUANTISE, n_unpacked)):
        if again := {b: (n_ops(plan, kind, b) - 1) * len(plan.blocks_alike[b]) for b in layers if n_ops(plan, kind, b) > 1}:
            loads = np.array([op_cost(kind, cost.demand(plan, Op(kind, b))) for b in again])
            most_first = np.argsort(-loads, axis=0, kind="stable")
            counts = np.array([*again.values()])[most_first]
            n_spared = np.clip(n_turns * n_held - (np.cumsum(counts, axis=0) - counts), 0, counts)
            yield kind, (n_spared * np.take_along_axis(loads, most_first, axis=0)).sum(axis=0)


def least_slots(plan: Setup) -> int:
    """Weight slots in addition to the prefetched ones: for the layer being computed and, if packed, for another one."""
    return 2 if plan.packed_slots else 1


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that let work of one phase run before the phase begins or after it ends."""

    n_slots: int  # layer gradients in device slots
    n_staged: int  # layer gradients on the host, waiting to be added

    @staticmethod
    def from_plan(plan: Setup, gradient_slots: int) -> "Buffers":
        """With several ranks, layer gradients may also wait as sums for the other ranks."""
        n_slots = gradient_slots + (n_whole_sums(plan) if plan.semantics.ranks > 1 else 0)
        return Buffers(n_slots, 0 if plan.reduced else N_STAGING_SLOTS)


def n_passing(group: int, n_saved: Mapping[Saved, Array]) -> dict[str, Array]:
    """Maximum number of activations in each ring of slots. `n_saved`: the number per tier; other tiers have no ring."""
    boundaries = np.zeros_like(next(iter(n_saved.values())))
    boundaries[0] = spill_ring_slots(group)
    slots = dict.fromkeys((LEAVING[0], COMING[0]), boundaries)
    return slots | {ring(kind, saved): n for kind in (LEAVING[1], COMING[1]) for saved, n in n_saved.items()}


def early_fetches(group: int, n_spilled: float) -> float:
    """Maximum number of boundaries fetched before the first loss: each occupies a slot of the ring from then on."""
    return min(float(spill_ring_slots(group)), group * n_spilled)
