"""How fast could it be at best?

Three kinds of lower bounds on the time of a step. *Facets*: work that cannot be avoided over what the machine offers.
*Lanes*: the ops of a policy, one after the other on their lane. The *ring* that closes a step: from updates over the loads that
they allow and all computing to the norm that the next updates wait for. Contention only adds to all three.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from hwprofiles.schema import Profile
from planner.lower.arenas import N_SAVED_SLOTS, spill_ring_slots
from planner.predict.cost import CostModel
from planner.predict.resident import shares_memory
from runtime.plan import Kind, Lane, Op, Setup, Update
from runtime.plan.legality import can_stay
from runtime.plan.region import Demand, Resource
from runtime.plan.workload import BlockKind

from .facets import KEYS, MEETINGS, UPDATES, Facets, Key, add, nothing
from .phases import Phases, add_to_phases, buffers_of, least_slots, phases_of

FACET = {
    Resource.H2D: "link to the device",
    Resource.D2H: "link to the host",
    Resource.DUPLEX: "link in both directions",
    Resource.DRAM: "host DRAM",
    Resource.CORES: "host cores",
}
ARRIVING = (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE, Kind.NORM, Kind.SPECULATE)  # what is done with gradients that are there
MEETING_NAME = "copies and host work that slow each other"
LANE_NAME = {Lane.GPU: "device compute", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "optimizer", Lane.NET: "exchange"}
SLACK = 2e-6  # what the solver's tolerances may move a bound or a limit by, twice


@dataclass(frozen=True, slots=True)
class Bound:
    """No step can be shorter than `seconds`, because of what `binding` names; docs/bounds.md argues it under `name`."""

    seconds: float
    binding: str
    name: str


def places_to_stay(plan: Setup, profile: Profile) -> list[int]:
    """The blocks whose state the device may hold: none where host and device are one memory, or the host sums gradients, or a
    family says which (`space.py`)."""
    is_free = plan.reduced and plan.workload.trains_all
    return can_stay(plan.workload, plan.semantics) if is_free and not shares_memory(profile) else []


@dataclass(slots=True)
class Work:
    """What a step of a policy asks of lanes and shared resources: seconds of each, were there nothing else."""

    phases: Phases
    total: dict[Key, float] = field(default_factory=nothing)
    updates: dict[Key, float] = field(default_factory=nothing)  # the host's
    on_device: dict[Key, float] = field(default_factory=nothing)  # the device's own
    first_loads: dict[Key, float] = field(default_factory=nothing)
    first_forwards: dict[Key, float] = field(default_factory=nothing)  # and their spills
    early_fetches: dict[Key, float] = field(default_factory=nothing)  # that may be done before the first loss
    arriving: dict[Key, float] = field(default_factory=nothing)  # all that comes after the first gradient, the head's, has left
    first_forward_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # of each block, alone
    seconds: dict[tuple[Kind, int], float] = field(default_factory=dict)  # of one op; of updates in chunks all, of loads the last
    last_backwards_s: float = 0.0  # of every layer with the micro-batch that completes its gradient, and that gradient's way home


def work_of(plan: Setup, cost: CostModel) -> Work:
    """Counted, not read off ops: the plan needs arenas only."""
    n_first = plan.policy.accumulation_group
    work = Work(phases_of(plan, range(n_first, n_first + 1)))
    facets = Facets((plan,), cost)
    early: dict[Kind, dict[Key, float]] = {Kind.FETCH_ACTIVATION: {}, Kind.FETCH_SAVED: {}}  # the largest fetch of its kind
    n_left: dict[tuple[Kind, int], int] = defaultdict(lambda: n_first)  # micro-batches of the first group yet to be counted
    for kind, block, demand, count in ops_at_least(plan, cost):
        load = facets.of(kind, demand)
        add(work.total, load, count)
        add_to_phases(work.phases, plan, kind, block, load, count)
        if kind in UPDATES:
            add(work.updates, load, count)
        elif kind is Kind.UPDATE_ON_DEVICE:
            add(work.on_device, load, count)
        elif kind in (Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER):
            add(work.first_loads, load, 1)
        elif kind in (Kind.FORWARD, Kind.OFFLOAD_ACTIVATION, Kind.OFFLOAD_SAVED):
            n_in_first = min(count, n_left[kind, block])  # the larger micro-batches come first
            n_left[kind, block] -= n_in_first
            add(work.first_forwards, load, n_in_first)
            if kind is Kind.FORWARD:
                work.first_forward_s[block] += n_in_first * demand.uncontended_s
        elif kind in early:
            early[kind] = {key: max(s, early[kind].get(key, 0.0)) for key, s in load.items()}
        if kind in ARRIVING:
            add(work.arriving, load, count - is_first_gradient(plan, kind, block))
        earlier_s = work.seconds.get((kind, block), 0.0) if kind in UPDATES else 0.0
        work.seconds[kind, block] = earlier_s + demand.uncontended_s
        leaves = kind in (Kind.SQUARE, Kind.OFFLOAD_GRADIENT) or (kind is Kind.BACKWARD and not plan.reduced)
        if leaves and _leaves(plan, block) and plan.workload.blocks[block].kind is BlockKind.LAYER:
            work.last_backwards_s += count * demand.uncontended_s
    for lane, idle_s in idle_in_turns(plan, work.phases).items():
        work.total[lane] += idle_s
        work.arriving[lane] += idle_s
    n_early = {
        Kind.FETCH_ACTIVATION: early_fetches(n_first, len(plan.policy.spill_blocks)),
        Kind.FETCH_SAVED: min(N_SAVED_SLOTS, n_first * len(plan.policy.offload_blocks)),
    }
    for kind, fetch in early.items():
        add(work.early_fetches, fetch, n_early[kind])
    if plan.reduced:
        last = plan.semantics.n_micro_batches - 1
        layers = [b for b in range(1, plan.workload.n_layers + 1) if _leaves(plan, b)]
        work.last_backwards_s += sum(_demand(plan, cost, Kind.BACKWARD, b, last).uncontended_s for b in layers)
    return work


def _leaves(plan: Setup, block: int) -> bool:
    """Whether the block's gradient goes to the host."""
    return block not in plan.policy.device_blocks and bool(plan.workload.blocks[block].trained)


def policy_bound(plan: Setup, cost: CostModel) -> Bound:
    """Valid for the plan's own policy: the largest of `policy_bounds`."""
    return max(policy_bounds(plan, cost), key=lambda bound: bound.seconds)


def policy_bounds(plan: Setup, cost: CostModel) -> Iterator[Bound]:
    """Bounds of the plan's own policy: its lanes, the shared resources it draws on, its ring.

    The plan needs arenas, no ops: the ops are counted here, not read.
    """
    work = work_of(plan, cost)
    yield from (Bound(work.total[lane], LANE_NAME[lane], f"lane {lane}") for lane in plan.lanes)
    yield from (Bound(work.total[resource], FACET[resource], f"resource {resource}") for resource in Resource)
    yield from (Bound(work.total[meeting], MEETING_NAME, f"meeting of {', '.join(meeting.kinds)}") for meeting in MEETINGS)
    yield from _ring(plan, work)


def home_s(plan: Setup, seconds: Mapping[tuple[Kind, int], float]) -> float:
    """The way of the last gradient, or of its squares, to the host's norm."""
    leaving = Kind.OFFLOAD_SQUARES if 0 in plan.policy.device_blocks else Kind.OFFLOAD_GRADIENT
    way = (Kind.EXCHANGE, leaving, Kind.NORM, Kind.SHARE_NORM) if plan.semantics.ranks > 1 else (leaving, Kind.NORM)
    return sum(seconds[kind, 0] for kind in way)


def _ring(plan: Setup, work: Work) -> Iterator[Bound]:
    """The ring of a step: updates, the loads they allow, all that computing asks for, the last gradient's way home. Where weights
    are frozen no load of them waits for an update, and of the ring only the phases are claimed."""
    phases = _phases(plan, work)
    if not plan.workload.trains_all:
        yield Bound(phases[0], "groups of micro-batches that take turns", "phases")
        return
    seconds, last_s = work.seconds, home_s(plan, work.seconds)
    match plan.policy.update:
        case Update.BARRIER:
            # Between the last update and the next first one lies everything else.
            updates_s = sum(_updates_s(plan, seconds))
            rest = {
                "computing": seconds[Kind.LOAD, 0] + work.total[Lane.GPU] + last_s,
                "phases": phases[0],
                "shared": max(work.total[key] - work.updates[key] for key in KEYS),
            }
            for name, rest_s in rest.items():
                yield Bound(updates_s + rest_s, "computing, then updating: the barrier between them", f"barrier, {name}")
        case Update.EAGER:
            ring_s = seconds[Kind.LOAD, 0] + work.total[Lane.GPU] + last_s + seconds[Kind.UPDATE, 0]
            yield Bound(ring_s, "the way home of the last gradient", "eager")
            yield Bound(phases[0], "groups of micro-batches that take turns", "phases")
        case Update.DEFERRED:
            yield from _deferred_ring(plan, work, phases, last_s)


def _deferred_ring(plan: Setup, work: Work, phases: tuple[float, float], last_s: float) -> Iterator[Bound]:
    """Updates that the next forward waits for. Block k is computed after the updates up to k, and only forwards of earlier blocks
    can come before."""
    blocks, seconds, binding = range(len(plan.workload.blocks)), work.seconds, "updates that the next forward waits for"
    # The device's own updates come between the norm and the next forward, beside the host's.
    on_device_s = work.on_device[Lane.GPU]
    compute_s = work.total[Lane.GPU] - on_device_s
    yield Bound(on_device_s + compute_s + last_s, binding, "deferred, on the device")
    updated_s = before_s = longest_s = 0.0
    for k, update_s in enumerate(_updates_s(plan, seconds)):
        updated_s += update_s
        longest_s = max(longest_s, updated_s + seconds[Kind.LOAD, k] + compute_s - before_s + last_s)
        before_s += work.first_forward_s[k]
    yield Bound(longest_s, binding, "deferred, one block")
    # The head is updated last. Until it is loaded, and its first input computed, all updates and first loads share what there is;
    # after that comes all that is neither these nor a first forward, nor a boundary that is back early.
    way_up_s = max(before_s, work.phases.first_up_s(buffers_of(plan)))
    until = {
        "way up": _updates_s(plan, seconds)[0] + seconds[Kind.LOAD, 0] + way_up_s,
        "updates": updated_s + seconds[Kind.LOAD, blocks[-1]],
        "shared": max(work.updates[key] + work.first_loads[key] for key in KEYS),
    }
    before = (work.updates, work.on_device, work.first_loads, work.first_forwards, work.early_fetches)
    after = {
        "computing": compute_s - before_s + last_s,
        "phases": phases[1],
        "gradients": first_gradient_s(plan, work.phases) + max(work.arriving.values()),
        "shared": max(work.total[key] - sum(of[key] for of in before) for key in KEYS),
    }
    for (first, until_s), (then, after_s) in product(until.items(), after.items()):
        yield Bound(until_s + after_s, binding, f"deferred, {first}, then {then}")
    if plan.policy.device_blocks:  # which do not wait for the last speculation, as the host's first update does
        last_guess_s = seconds.get((Kind.SPECULATE, 0), 0.0)
        for then, after_s in after.items():
            guessed_s = last_guess_s if then in ("gradients", "shared") else 0.0
            yield Bound(on_device_s + way_up_s + after_s - guessed_s, binding, f"deferred, on the device, then {then}")


def _updates_s(plan: Setup, seconds: Mapping[tuple[Kind, int], float]) -> list[float]:
    """Of every block, what is left for the host to do once the norm is known."""
    early, on_device = set(plan.policy.speculate_blocks), set(plan.policy.device_blocks)
    of_host = {b: Kind.SETTLE if b in early else Kind.UPDATE for b in range(len(plan.workload.blocks)) if b not in on_device}
    return [seconds[of_host[b], b] if b in of_host else 0.0 for b in range(len(plan.workload.blocks))]


def _phases(plan: Setup, work: Work) -> tuple[float, float]:
    """Seconds of all phases, and of those after the first way up."""
    phases, turns_s = work.phases, _backwards_s(plan, work)
    buffers = buffers_of(plan)
    all_s = phases.loss_s + phases.up_s(buffers) + phases.back_s(buffers, turns_s)
    return all_s, phases.after_first_way_up_s(buffers, turns_s)


def idle_in_turns(plan: Setup, phases: Phases) -> dict[Key, float]:
    """Seconds for which lanes do nothing, where gradients of single micro-batches leave: a vocabulary block's next one is computed
    when the last has left, leaves when that has been added, and is added when it has left. In no lane lies anything between."""
    if plan.reduced:
        return {}
    between = {
        kind: sum(_between_s(phases, kind, block) for block in (0, phases.head))
        for kind in (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE)
    }
    leaving_s, adding_s = between[Kind.OFFLOAD_GRADIENT], between[Kind.ACCUMULATE]
    return {Lane.GPU: leaving_s, Lane.D2H: adding_s, Lane.CPU: leaving_s}


def _between_s(phases: Phases, kind: Kind, block: int) -> float:
    """Seconds of a vocabulary block's op, once between every two micro-batches of a group."""
    turns = phases.vocab.get((kind, block))
    if turns is None:  # nothing of it is trained
        return 0.0
    return (turns.n - phases.n_groups) * turns.shortest_s


def is_first_gradient(plan: Setup, kind: Kind, block: int) -> bool:
    """Whether the first of these ops brings the step's first gradient home."""
    return (kind, block) == (Kind.OFFLOAD_GRADIENT, plan.workload.n_layers + 1)


def first_gradient_s(plan: Setup, phases: Phases) -> float:
    """Seconds from the first loss to the first gradient on the host, the head's: all its losses come before if the device sums."""
    losses, left = (phases.vocab.get((kind, phases.head)) for kind in (Kind.LOSS, Kind.OFFLOAD_GRADIENT))
    assert losses is not None, "every step has a loss"
    left_s = left.shortest_s if left is not None else 0.0  # else it stays on the device, and all that arrive come after the losses
    return (losses.total_s if plan.reduced else losses.shortest_s) + left_s


def early_fetches(accumulation_group: int, n_spilled: int) -> int:
    """Boundaries that may be back on the device before the first loss, at most: each has a slot of the ring from then on."""
    return min(spill_ring_slots(accumulation_group), accumulation_group * n_spilled)


def _backwards_s(plan: Setup, work: Work) -> float:
    """With a single gradient slot, a layer's backward and the way home of its gradient take turns. Where weights are frozen the
    last of these may be over in the next step: nothing is said of it."""
    takes_turns = plan.policy.gradient_slots == 1 and plan.semantics.ranks == 1 and plan.workload.trains_all
    return work.last_backwards_s if takes_turns else 0.0


def ops_at_least(plan: Setup, cost: CostModel, only: int | None = None) -> Iterator[tuple[Kind, int, Demand, int]]:
    """What a step of this policy contains at least: kind, block, demand, how often; of one block `only`, if given."""
    n_micro_batches, policy = plan.semantics.n_micro_batches, plan.policy
    n_groups = -(-n_micro_batches // policy.accumulation_group)
    n_layers, squared, sizes = plan.workload.n_layers, set(policy.square_blocks), of_each_size(plan, n_micro_batches)
    # Each group walks the layers up and down; at a turn at most as many loads are spared as there are slots.
    n_turns, first = 2 * n_groups - 1, plan.workload.first_trained
    spared = Counter(dict.fromkeys(_spared_layers(plan), n_turns))
    spared_weights = Counter(dict.fromkeys(_spared_layers(plan)[: plan.n_streaming], n_turns))

    def each(kind: Kind, b: int) -> Iterator[tuple[Kind, int, Demand, int]]:
        for m, count in sizes:
            yield kind, b, _demand(plan, cost, kind, b, m), count

    loading = (Kind.LOAD, Kind.GATHER) if plan.semantics.ranks > 1 else (Kind.LOAD,)
    exchanging = (Kind.EXCHANGE,) if plan.semantics.ranks > 1 else ()
    for b, block in enumerate(plan.workload.blocks):
        if only not in (None, b):
            continue
        is_layer = block.kind is BlockKind.LAYER
        n_uses = n_groups * (1 + (is_layer and b >= first))
        for kind in loading:
            yield kind, b, _demand(plan, cost, kind, b, None), 1 if b in policy.resident_blocks else max(1, n_uses - spared[b])
        if plan.unpacks(b):
            n_times = 1 if b in policy.resident_blocks else max(1, n_uses - spared_weights[b])
            yield Kind.DEQUANTISE, b, _demand(plan, cost, Kind.DEQUANTISE, b, None), n_times
        if block.kind is not BlockKind.HEAD:
            yield from each(Kind.FORWARD, b)
        stride = policy.boundary_stride
        if is_layer and b % stride and b != n_layers and min(b - b % stride + stride, n_layers) >= first:
            yield from each(Kind.RECOMPUTE, b)
        if b in policy.spill_blocks:
            for moved in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION):
                yield from each(moved, b)
        if b in policy.offload_blocks:
            for moved in (Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED):
                yield from each(moved, b)
        kind = Kind.LOSS if b == n_layers + 1 else Kind.BACKWARD
        for m, count in plan.alike(range(n_micro_batches)) if b >= first else ():
            yield kind, b, _demand(plan, cost, kind, b, m), count
        if not block.trained:
            continue
        if not plan.reduced and not plan.is_apart(b):
            yield Kind.OFFLOAD_GRADIENT, b, _demand(plan, cost, Kind.OFFLOAD_GRADIENT, b, 0), n_micro_batches
            added = Counter[Demand]()  # by what it asks: most micro-batches add alike, the first of them least
            for m, count in plan.alike(range(n_micro_batches)):
                added[_demand(plan, cost, Kind.ACCUMULATE, b, m)] += count
            yield from ((Kind.ACCUMULATE, b, demand, count) for demand, count in added.items())
        if b in squared:
            yield Kind.SQUARE, b, _demand(plan, cost, Kind.SQUARE, b, None), 1
        leaves: tuple[Kind, ...] = (Kind.OFFLOAD_GRADIENT,) if plan.reduced else ()
        updates = (Kind.SPECULATE, Kind.SETTLE) if b in policy.speculate_blocks else (Kind.UPDATE,)
        if b in policy.device_blocks:
            leaves, updates = (Kind.OFFLOAD_SQUARES,), (Kind.UPDATE_ON_DEVICE,)
        norm = () if b in squared and b != first else (Kind.NORM,) if b or not exchanging else (Kind.NORM, Kind.SHARE_NORM)
        for kind in (*exchanging, *leaves, *norm, *updates):
            yield kind, b, _demand(plan, cost, kind, b, None), 1


def of_each_size(plan: Setup, n: int) -> list[tuple[int, int]]:
    """One of each size among the first n micro-batches, and how many of them have it."""
    n_smaller = int(plan.semantics.is_smaller(n - 1))
    return [(m, count) for m, count in ((0, n - n_smaller), (n - 1, n_smaller)) if count]


def _spared_layers(plan: Setup) -> list[int]:
    """The layers whose loads may be spared at a turn: as many as there are slots, the heaviest for safety, which copies within the
    device are not."""
    n_slots = plan.policy.prefetch_depth + least_slots(plan)
    on_device = {b for b in plan.policy.device_blocks if not plan.is_apart(b)}
    layers = [b for b in range(1, plan.workload.n_layers + 1) if b not in plan.policy.resident_blocks]
    return sorted(layers, key=lambda b: (b in on_device, -plan.workload.blocks[b].slot_elements, b))[:n_slots]


def _demand(plan: Setup, cost: CostModel, kind: Kind, block: int, micro_batch: int | None) -> Demand:
    return cost.demand(plan, Op(kind, block, micro_batch))
