"""How fast could it be at best?

Three kinds of lower bounds on the time of a step. *Facets*: work that cannot be avoided over what the machine offers.
*Lanes*: the ops of a policy, one after the other on their lane. The *ring* that closes a step: from updates over the loads that
they allow and all computing to the norm that the next updates wait for. Contention only adds to all three.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

from runtime.plan import LANE_OF, Kind, Lane, Op, Plan, Policy, Update
from runtime.region import Demand, Resource
from runtime.workload import ITEM_BYTES, BlockKind

from .arenas import N_STAGING_SLOTS, can_split, can_square
from .cost import CostModel, update_bytes_per_param
from .facets import KEYS, MEETINGS, UPDATES, Facets, Key, add, nothing

FACET = {
    Resource.H2D: "link to the device",
    Resource.D2H: "link to the host",
    Resource.DUPLEX: "link in both directions",
    Resource.DRAM: "host DRAM",
    Resource.CORES: "host cores",
}
MEETING_NAME = "copies and host work that slow each other"
LANE_NAME = {Lane.GPU: "device compute", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "optimizer"}


@dataclass(frozen=True, slots=True)
class Bound:
    """No step can be shorter than `seconds`, because of what `binding` names."""

    seconds: float
    binding: str


def machine_bound(plan: Plan, cost: CostModel) -> Bound:
    """Valid for every policy under the plan's semantics; only its blocks, semantics and micro-batch are looked at.

    Any share of the gradients may be squared on the device, and what a facet needs is linear in that share. So the largest facet is
    least with none, with all, or where two facets are equal.
    """
    host, device = (dict(_machine_facets(plan, cost, squared)) for squared in ((), can_square(plan.workload)))
    shares = {0.0, 1.0}
    for a, b in combinations(host, 2):
        apart_s, closing_s = host[a] - host[b], (host[a] - host[b]) - (device[a] - device[b])
        if 0 < apart_s / (closing_s or inf) < 1:
            shares.add(apart_s / closing_s)
    facets = [{name: (1 - share) * host[name] + share * device[name] for name in host} for share in sorted(shares)]
    least = min(facets, key=lambda of: max(of.values()))
    binding = max(least, key=lambda name: least[name])
    return Bound(least[binding], binding)


def _machine_facets(plan: Plan, cost: CostModel, squared: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Seconds that each facet needs for the work that no schedule avoids, if the device squares these blocks' gradients."""
    profile, blocks, semantics = cost.profile, plan.workload.blocks, plan.semantics
    dtype = semantics.compute_dtype
    capacity = cost.capacity

    # Every block forward and backward, no recompute; the head does both in one.
    compute_s = 0.0
    for m, count in plan.alike(range(semantics.n_micro_batches)):
        *body, head = plan.blocks_of(m)
        compute_s += count * sum(cost.forward_s(b, semantics) + cost.backward_s(b, semantics) for b in body)
        compute_s += count * cost.loss_s(head, semantics)
    gradient = ITEM_BYTES[semantics.gradient_dtype]
    squares_s = sum(blocks[b].n_params for b in squared) * gradient / cost.square_bytes_per_s
    yield "device compute", compute_s + squares_s

    # The host updates every weight in every step, so each goes up at least once. What a layer's backward needs and
    # does not fit beside the rest goes up again.
    item = ITEM_BYTES[dtype]
    layer_bytes = sum(b.n_params for b in blocks[1:-1]) * item
    up_bytes = plan.workload.n_params * item + max(0.0, layer_bytes - profile.device.memory_bytes.value)
    down_bytes = plan.workload.n_params * gradient
    link = profile.link
    drawn: dict[Resource, float] = defaultdict(float)
    for resource, n_bytes in ((Resource.H2D, up_bytes), (Resource.D2H, down_bytes)):
        copy_s = n_bytes / capacity[resource]
        # An op never draws more than there is (cost.py), so neither may the bound.
        drawn[resource] += n_bytes
        per_s = {Resource.DUPLEX: capacity[resource], Resource.DRAM: capacity[resource] * link.dram_bytes_per_byte}
        for shared, rate in per_s.items():
            drawn[shared] += copy_s * min(rate, capacity[shared])
        drawn[Resource.CORES] += copy_s * min(link.host_cores_per_copy.value, capacity[Resource.CORES])

    # Update of every parameter, on all host cores, and the norm of what the device does not sum.
    norm_bytes = sum(b.n_params for i, b in enumerate(blocks) if i not in squared) * gradient
    update_s = plan.workload.n_params / profile.optimizer_params_per_s(profile.host.n_cores)
    norm_s = norm_bytes / profile.host.reduce_bytes_per_s.value
    leanest = replace(plan, policy=Policy(storage="split" if can_split(semantics) else "mirrored"))
    per_param = update_bytes_per_param(leanest, 1) - ITEM_BYTES[leanest.host_gradient_dtype(1)] + gradient
    update_bytes = plan.workload.n_params * per_param
    drawn[Resource.DRAM] += min(update_bytes, update_s * capacity[Resource.DRAM])
    drawn[Resource.DRAM] += min(norm_bytes, norm_s * capacity[Resource.DRAM])
    drawn[Resource.CORES] += (update_s + norm_s) * capacity[Resource.CORES]
    for resource in Resource:
        yield FACET[resource], drawn[resource] / capacity[resource]


@dataclass(slots=True)
class Phases:
    """What all groups of micro-batches ask for on their way up and down the layers, and how much of it can slip into another
    phase because slots hold it: the groups take turns, and so do their two ways."""

    n_groups: int
    up: dict[Key, float] = field(default_factory=nothing)  # computing
    down: dict[Key, float] = field(default_factory=nothing)
    loads: dict[Key, float] = field(default_factory=nothing)  # one way of one group
    leaving: dict[Key, float] = field(default_factory=nothing)  # gradients
    largest_load: dict[Key, float] = field(default_factory=dict)
    largest_leaving: dict[Key, float] = field(default_factory=dict)
    vocab: dict[tuple[Kind, int], tuple[int, float]] = field(default_factory=dict)  # how often, and seconds on its lane in all

    def vocab_s(self, head: int) -> float:
        """The head and the embedding's backward, of all groups. Gradients of single micro-batches leave one by one: a slot on the
        device and one on the host, so each is computed when the one before has left, and leaves when that has been added."""
        total_s = 0.0
        for kind, block in ((Kind.LOSS, head), (Kind.BACKWARD, 0)):
            n, computing_s = self.vocab[kind, block]
            turns_s = 0.0
            if (Kind.ACCUMULATE, block) in self.vocab and n >= 2 * self.n_groups:
                leaving_s, added_s = (self.vocab[kind, block][1] / n for kind in (Kind.OFFLOAD, Kind.ACCUMULATE))
                turns_s = (n - 2 * self.n_groups) * (leaving_s + added_s) + self.n_groups * leaving_s
            total_s += max(computing_s, turns_s)
        return total_s

    def up_s(self, n_slots: int) -> float:
        """One group's way up the layers, at least and in the mean."""
        return max(self.up[key] / self.n_groups + self._loads_s(key, n_slots) for key in self.up)

    def down_s(self, n_slots: int, n_gradients: int, turns_s: float) -> float:
        """One group's way down the layers, at least and in the mean."""
        leaving = (max(0.0, s / self.n_groups - n_gradients * self.largest_leaving.get(k, 0.0)) for k, s in self.leaving.items())
        down = (
            self.down[key] / self.n_groups + self._loads_s(key, n_slots) + left_s
            for key, left_s in zip(self.leaving, leaving, strict=True)
        )
        return max(turns_s / self.n_groups, *down)

    def _loads_s(self, key: Key, n_slots: int) -> float:
        return max(0.0, self.loads[key] - n_slots * self.largest_load.get(key, 0.0))


@dataclass(slots=True)
class Work:
    """What a step of a policy asks of lanes and shared resources: seconds of each, were there nothing else."""

    phases: Phases
    total: dict[Key, float] = field(default_factory=nothing)
    updates: dict[Key, float] = field(default_factory=nothing)
    first_loads: dict[Key, float] = field(default_factory=nothing)
    first_forwards: dict[Key, float] = field(default_factory=nothing)  # and their spills
    first_forward_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # of each block, alone
    seconds: dict[tuple[Kind, int], float] = field(default_factory=dict)  # of one op; of updates in chunks all, of loads the last
    last_backwards_s: float = 0.0  # of every layer with the micro-batch that completes its gradient, and that gradient's way home


def work_of(plan: Plan, cost: CostModel) -> Work:
    """Counted, not read off ops: the plan needs arenas only."""
    n_first = plan.policy.group_micro_batches
    work = Work(Phases(-(-plan.semantics.n_micro_batches // n_first)))
    facets = Facets((plan,), cost)
    n_left: dict[tuple[Kind, int], int] = defaultdict(lambda: n_first)  # micro-batches of the first group yet to be counted
    for kind, block, demand, count in ops_at_least(plan, cost):
        load = facets.of(kind, demand)
        add(work.total, load, count)
        add_to_phases(work.phases, plan, kind, block, load, count)
        if kind in UPDATES:
            add(work.updates, load, count)
        elif kind is Kind.LOAD:
            add(work.first_loads, load, 1)
        elif kind in (Kind.FORWARD, Kind.SPILL):
            n_in_first = min(count, n_left[kind, block])  # the larger micro-batches come first
            n_left[kind, block] -= n_in_first
            add(work.first_forwards, load, n_in_first)
            if kind is Kind.FORWARD:
                work.first_forward_s[block] += n_in_first * demand.uncontended_s
        earlier_s = work.seconds.get((kind, block), 0.0) if kind in UPDATES else 0.0
        work.seconds[kind, block] = earlier_s + demand.uncontended_s
        leaves = kind in (Kind.SQUARE, Kind.OFFLOAD) or (kind is Kind.BACKWARD and not plan.reduced)
        if leaves and plan.workload.blocks[block].kind is BlockKind.LAYER:
            work.last_backwards_s += count * demand.uncontended_s
    if plan.reduced:
        last = plan.semantics.n_micro_batches - 1
        layers = range(1, plan.workload.n_layers + 1)
        work.last_backwards_s += sum(_demand(plan, cost, Kind.BACKWARD, b, last).uncontended_s for b in layers)
    return work


def add_to_phases(phases: Phases, plan: Plan, kind: Kind, block: int, load: Mapping[Key, float], count: int) -> None:
    """Count an op so many times where it belongs."""
    if plan.workload.blocks[block].kind is not BlockKind.LAYER:
        n, total_s = phases.vocab.get((kind, block), (0, 0.0))
        phases.vocab[kind, block] = (n + count, total_s + count * load[LANE_OF[kind]])
        if block and kind in (Kind.OFFLOAD, Kind.ACCUMULATE):
            add(phases.leaving, load, count)  # the head's gradient leaves before those of the layers
        return
    match kind:
        case Kind.FORWARD:
            add(phases.up, load, count)
        case Kind.BACKWARD | Kind.RECOMPUTE | Kind.SQUARE:
            add(phases.down, load, count)
        case Kind.LOAD if block not in plan.policy.resident_blocks:
            add(phases.loads, load, 1)
            phases.largest_load = {key: max(s, phases.largest_load.get(key, 0.0)) for key, s in load.items()}
        case Kind.OFFLOAD | Kind.ACCUMULATE:
            add(phases.leaving, load, count)
            phases.largest_leaving |= {key: max(s, phases.largest_leaving.get(key, 0.0)) for key, s in load.items()}
        case _:
            pass


def policy_bound(plan: Plan, cost: CostModel) -> Bound:
    """Valid for the plan's own policy: the largest over its lanes, the shared resources it draws on, and its ring.

    The plan needs arenas, no ops: the ops are counted here, not read.
    """
    work = work_of(plan, cost)
    bounds = [Bound(work.total[lane], LANE_NAME[lane]) for lane in Lane]
    bounds += [Bound(work.total[resource], FACET[resource]) for resource in Resource]
    bounds += [Bound(work.total[meeting], MEETING_NAME) for meeting in MEETINGS]
    bounds.append(_ring(plan, work))
    return max(bounds, key=lambda bound: bound.seconds)


def home_s(plan: Plan, seconds: Mapping[tuple[Kind, int], float]) -> float:
    """The way of the last gradient to the host's norm."""
    return seconds[Kind.OFFLOAD, 0] + seconds[Kind.NORM, 0]


def _ring(plan: Plan, work: Work) -> Bound:
    """The ring of a step: updates, the loads they allow, all that computing asks for, the last gradient's way home."""
    blocks, seconds = range(len(plan.workload.blocks)), work.seconds
    update_s = [seconds[Kind.SETTLE if b in plan.policy.speculate_blocks else Kind.UPDATE, b] for b in blocks]
    last_s, compute_s = home_s(plan, seconds), work.total[Lane.GPU]
    phases = work.phases
    n_slots, turns_s = plan.policy.prefetch_depth + 1, _backwards_s(plan, work)
    n_chunks = 1 if plan.policy.transfer_chunk_bytes is None else max(len(plan.chunks(b)) for b in blocks[1:-1])
    up_s = phases.up_s(n_slots * n_chunks)
    # Gradients that may still be on their way when the next phase begins: those in slots, and in staging on the host.
    n_leaving = (plan.policy.gradient_slots + N_STAGING_SLOTS) * n_chunks
    late_s = phases.largest_leaving.get(Lane.D2H, 0.0) * n_chunks * phases.n_groups
    down_s = phases.down_s(n_slots * n_chunks, n_leaving, turns_s - late_s)
    phases_s = phases.n_groups * (up_s + down_s) + phases.vocab_s(blocks[-1])
    equal = plan.semantics.batch_size % (plan.policy.group_micro_batches * plan.semantics.micro_batch) == 0
    first_up_s = up_s if equal else phases.n_groups * up_s  # of unequal groups the first may have most of the way up
    match plan.policy.update:
        case Update.BARRIER:
            # Between the last update and the next first one lies everything else.
            rest_s = max(
                seconds[Kind.LOAD, 0] + compute_s + last_s, turns_s, phases_s,
                *(work.total[key] - work.updates[key] for key in work.total),
            )  # fmt: skip
            return Bound(sum(update_s) + rest_s, "computing, then updating: the barrier between them")
        case Update.EAGER:
            ring_s = seconds[Kind.LOAD, 0] + compute_s + last_s + update_s[0]
            return Bound(max(ring_s, phases_s), "the way home of the last gradient")
        case Update.DEFERRED:
            # Block k is computed after the updates up to k, and only forwards of earlier blocks can come before.
            updated_s, before_s, longest_s = 0.0, 0.0, 0.0
            for k in blocks:
                updated_s += update_s[k]
                longest_s = max(longest_s, updated_s + seconds[Kind.LOAD, k] + compute_s - before_s + last_s)
                before_s += work.first_forward_s[k]
            # The head is updated last. Until it is loaded, and its first input computed, all updates and first loads share what
            # there is; after that comes all that is neither these nor a first forward.
            first_s = update_s[0] + seconds[Kind.LOAD, 0] + before_s
            until_s = max(
                first_s, updated_s + seconds[Kind.LOAD, blocks[-1]], *(work.updates[k] + work.first_loads[k] for k in KEYS)
            )
            after_s = max(
                compute_s - before_s + last_s, turns_s, phases_s - first_up_s,
                *(work.total[key] - work.updates[key] - work.first_loads[key] - work.first_forwards[key] for key in work.total),
            )  # fmt: skip
            return Bound(max(longest_s, until_s + after_s), "updates that the next forward waits for")


def _backwards_s(plan: Plan, work: Work) -> float:
    """With a single gradient slot, a layer's backward and the way home of its gradient take turns."""
    return work.last_backwards_s if plan.policy.gradient_slots == 1 else 0.0


def ops_at_least(plan: Plan, cost: CostModel, only: int | None = None) -> Iterator[tuple[Kind, int, Demand, int]]:
    """What a step of this policy contains at least: kind, block, demand, how often; of one block `only`, if given."""
    n_micro_batches, policy = plan.semantics.n_micro_batches, plan.policy
    n_groups = -(-n_micro_batches // policy.group_micro_batches)
    n_layers, squared, sizes = plan.workload.n_layers, set(policy.square_blocks), of_each_size(plan, n_micro_batches)
    # Each group walks the layers up and down; at a turn at most as many loads are spared as there are slots.
    n_turns = 2 * n_groups - 1
    spared = Counter(dict.fromkeys(_spared_layers(plan), n_turns))

    def chunks(b: int) -> Sequence[int | None]:
        n = 1 if policy.transfer_chunk_bytes is None else len(plan.chunks(b))
        return range(n) if n > 1 else (None,)

    def each(kind: Kind, b: int) -> Iterator[tuple[Kind, int, Demand, int]]:
        for m, count in sizes:
            yield kind, b, _demand(plan, cost, kind, b, m), count

    for b, block in enumerate(plan.workload.blocks):
        if only not in (None, b):
            continue
        match block.kind:
            case BlockKind.EMBEDDING:
                yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None), 1 if b in policy.resident_blocks else n_groups
                yield from each(Kind.FORWARD, b)
            case BlockKind.LAYER:
                n_loads = 1 if b in policy.resident_blocks else max(1, 2 * n_groups - spared[b])
                for chunk in chunks(b):
                    yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None, chunk), n_loads
                yield from each(Kind.FORWARD, b)
                if b % policy.boundary_stride and b != n_layers:
                    yield from each(Kind.RECOMPUTE, b)
            case BlockKind.HEAD:
                yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None), 1 if b in policy.resident_blocks else n_groups
        if b in policy.spill_blocks:
            for moved in (Kind.SPILL, Kind.FETCH):
                yield from each(moved, b)
        kind = Kind.LOSS if b == n_layers + 1 else Kind.BACKWARD
        for m, count in plan.alike(range(n_micro_batches)):
            yield kind, b, _demand(plan, cost, kind, b, m), count
        if not plan.reduced:
            yield Kind.OFFLOAD, b, _demand(plan, cost, Kind.OFFLOAD, b, 0), n_micro_batches
            yield Kind.ACCUMULATE, b, _demand(plan, cost, Kind.ACCUMULATE, b, 0), n_micro_batches
        updates = (Kind.SPECULATE, Kind.SETTLE) if b in policy.speculate_blocks else (Kind.UPDATE,)
        if b in squared:
            yield Kind.SQUARE, b, _demand(plan, cost, Kind.SQUARE, b, None), 1
        norm = () if b in squared and b else (Kind.NORM,)
        for kind in (*((Kind.OFFLOAD,) if plan.reduced else ()), *norm, *updates):
            for chunk in chunks(b):
                yield kind, b, _demand(plan, cost, kind, b, None, chunk), 1


def of_each_size(plan: Plan, n: int) -> list[tuple[int, int]]:
    """One of each size among the first n micro-batches, and how many of them have it."""
    n_smaller = int(plan.semantics.is_smaller(n - 1))
    return [(m, count) for m, count in ((0, n - n_smaller), (n - 1, n_smaller)) if count]


def _spared_layers(plan: Plan) -> list[int]:
    """The layers whose loads may be spared at a turn: as many as there are slots, the heaviest for safety."""
    n_slots = plan.policy.prefetch_depth + 1
    layers = [b for b in range(1, plan.workload.n_layers + 1) if b not in plan.policy.resident_blocks]
    return sorted(layers, key=lambda b: (-plan.workload.blocks[b].slot_elements, b))[:n_slots]


def _demand(plan: Plan, cost: CostModel, kind: Kind, block: int, micro_batch: int | None, chunk: int | None = None) -> Demand:
    return cost.demand(plan, Op(kind, LANE_OF[kind], block, micro_batch, chunk=chunk))
