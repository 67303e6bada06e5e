"""How fast could it be at best?

Three kinds of lower bounds on the time of a step. *Facets*: work that cannot be avoided over what the machine offers.
*Lanes*: the ops of a policy, one after the other on their lane. *Chains*: the ring that closes a step, from the load of the
first weights over all computing to the update that the next load waits for. Contention only adds to all three.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.plan import LANE_OF, Kind, Lane, Op, Plan, Update
from runtime.region import Demand, Resource
from runtime.workload import ITEM_BYTES, BlockKind

from .cost import CostModel, update_bytes_per_param

FACET = {
    Resource.H2D: "link to the device",
    Resource.D2H: "link to the host",
    Resource.DUPLEX: "link in both directions",
    Resource.DRAM: "host DRAM",
    Resource.CORES: "host cores",
}
LANE_NAME = {Lane.GPU: "device compute", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "optimizer"}


@dataclass(frozen=True, slots=True)
class Bound:
    """No step can be shorter than `seconds`, because of what `binding` names."""

    seconds: float
    binding: str


def machine_bound(plan: Plan, cost: CostModel) -> Bound:
    """Valid for every policy under the plan's semantics; only its blocks, semantics and micro-batch are looked at."""
    facets = dict(_machine_facets(plan, cost))
    binding = max(facets, key=lambda name: facets[name])
    return Bound(facets[binding], binding)


def _machine_facets(plan: Plan, cost: CostModel) -> Iterator[tuple[str, float]]:
    """Seconds that each facet needs for the work that no schedule avoids."""
    profile, blocks, semantics = cost.profile, plan.workload.blocks, plan.semantics
    dtype, n_micro_batches = semantics.compute_dtype, semantics.n_micro_batches
    capacity = cost.capacity

    # Every block forward and backward, no recompute; the head does both in one.
    compute_s = sum(cost.forward_s(b, dtype) + cost.backward_s(b, dtype) for b in blocks[:-1]) + cost.loss_s(plan)
    yield "device compute", n_micro_batches * compute_s

    # The host updates every weight in every step, so each goes up at least once. What a layer's backward needs and
    # does not fit beside the rest goes up again.
    item = ITEM_BYTES[dtype]
    layer_bytes = sum(b.n_params for b in blocks[1:-1]) * item
    up_bytes = plan.workload.n_params * item + max(0.0, layer_bytes - profile.device.memory_bytes.value)
    down_bytes = plan.workload.n_params * ITEM_BYTES[semantics.gradient_dtype]
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

    # Norm and update of every parameter, on all host cores.
    norm_bytes = plan.workload.n_params * ITEM_BYTES[semantics.gradient_dtype]
    update_s = plan.workload.n_params / profile.optimizer_params_per_s(profile.host.n_cores)
    norm_s = norm_bytes / profile.host.reduce_bytes_per_s.value
    per_param = update_bytes_per_param(plan, 1) - ITEM_BYTES[plan.host_gradient_dtype(1)] + ITEM_BYTES[semantics.gradient_dtype]
    update_bytes = plan.workload.n_params * per_param
    drawn[Resource.DRAM] += min(update_bytes, update_s * capacity[Resource.DRAM])
    drawn[Resource.DRAM] += min(norm_bytes, norm_s * capacity[Resource.DRAM])
    drawn[Resource.CORES] += (update_s + norm_s) * capacity[Resource.CORES]
    for resource in Resource:
        yield FACET[resource], drawn[resource] / capacity[resource]


def policy_bound(plan: Plan, cost: CostModel) -> Bound:
    """Valid for the plan's own policy: the largest over its lanes, the shared resources it draws on, and its chain.

    The plan needs arenas, no ops: the ops are counted here, not read.
    """
    lanes_s: dict[Lane, float] = defaultdict(float)
    drawn: dict[Resource, float] = defaultdict(float)
    seconds: dict[tuple[Kind, int], float] = {}
    for kind, block, demand, count in _ops(plan, cost):
        lanes_s[LANE_OF[kind]] += count * demand.uncontended_s
        seconds[kind, block] = demand.uncontended_s
        for resource, per_s in demand.uses:
            drawn[resource] += count * per_s * demand.alone_s
    bounds = [Bound(lanes_s[lane], LANE_NAME[lane]) for lane in Lane]
    bounds += [Bound(drawn[r] / cost.capacity[r], FACET[r]) for r in Resource]
    bounds.append(_chain(plan, seconds, lanes_s[Lane.GPU]))
    return max(bounds, key=lambda bound: bound.seconds)


def _chain(plan: Plan, seconds: dict[tuple[Kind, int], float], compute_s: float) -> Bound:
    """The ring of a step: load, all computing, the last gradient's way home, the updates before the next load."""
    blocks = range(len(plan.workload.blocks))
    home_s = seconds[Kind.OFFLOAD, 0] + seconds[Kind.NORM, 0]
    match plan.policy.update:
        case Update.BARRIER:
            # The first load waits for the last update.
            ring_s = seconds[Kind.LOAD, 0] + compute_s + home_s + sum(seconds[Kind.UPDATE, b] for b in blocks)
            return Bound(ring_s, "computing, then updating: the barrier between them")
        case Update.EAGER:
            return Bound(seconds[Kind.LOAD, 0] + compute_s + home_s + seconds[Kind.UPDATE, 0], "the way home of the last gradient")
        case Update.DEFERRED:
            # Block k is computed after the updates up to k, and only forwards of earlier blocks can come before.
            n_first = min(plan.policy.group_micro_batches, plan.semantics.n_micro_batches)
            updated_s, before_s, longest_s = 0.0, 0.0, 0.0
            for k in blocks:
                updated_s += seconds[Kind.UPDATE, k]
                longest_s = max(longest_s, updated_s + seconds[Kind.LOAD, k] + compute_s - before_s)
                before_s += n_first * seconds.get((Kind.FORWARD, k), 0.0)
            return Bound(longest_s + home_s, "updates that the next forward waits for")


def _ops(plan: Plan, cost: CostModel) -> Iterator[tuple[Kind, int, Demand, int]]:
    """What a step of this policy contains at least: kind, block, demand, how often."""
    n_micro_batches, policy = plan.semantics.n_micro_batches, plan.policy
    n_groups = -(-n_micro_batches // policy.group_micro_batches)
    n_layers = plan.workload.n_layers
    # Each group walks the layers up and down; at a turn at most as many loads are spared as there are slots.
    n_turns = 2 * n_groups - 1
    spared = Counter(dict.fromkeys(_spared_layers(plan), n_turns))
    for b, block in enumerate(plan.workload.blocks):
        match block.kind:
            case BlockKind.EMBEDDING:
                yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None), 1 if b in policy.resident_blocks else n_groups
                yield Kind.FORWARD, b, _demand(plan, cost, Kind.FORWARD, b, 0), n_micro_batches
            case BlockKind.LAYER:
                n_loads = 1 if b in policy.resident_blocks else max(1, 2 * n_groups - spared[b])
                yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None), n_loads
                yield Kind.FORWARD, b, _demand(plan, cost, Kind.FORWARD, b, 0), n_micro_batches
            case BlockKind.HEAD:
                yield Kind.LOAD, b, _demand(plan, cost, Kind.LOAD, b, None), 1 if b in policy.resident_blocks else n_groups
        if b in policy.spill_blocks:
            for moved in (Kind.SPILL, Kind.FETCH):
                yield moved, b, _demand(plan, cost, moved, b, 0), n_micro_batches
        kind = Kind.LOSS if b == n_layers + 1 else Kind.BACKWARD
        # The first and the last micro-batch move their gradients differently from those between.
        last = n_micro_batches - 1
        for m, count in Counter(m if m in (0, last) else 1 for m in range(n_micro_batches)).items():
            yield kind, b, _demand(plan, cost, kind, b, m), count
        if plan.reduced:
            yield Kind.OFFLOAD, b, _demand(plan, cost, Kind.OFFLOAD, b, None), 1
        else:
            yield Kind.OFFLOAD, b, _demand(plan, cost, Kind.OFFLOAD, b, 0), n_micro_batches
            yield Kind.ACCUMULATE, b, _demand(plan, cost, Kind.ACCUMULATE, b, 0), n_micro_batches
        for kind in (Kind.NORM, Kind.UPDATE):
            yield kind, b, _demand(plan, cost, kind, b, None), 1


def _spared_layers(plan: Plan) -> list[int]:
    """The layers whose loads may be spared at a turn: as many as there are slots, the heaviest for safety."""
    n_slots = plan.policy.prefetch_depth + 1
    layers = [b for b in range(1, plan.workload.n_layers + 1) if b not in plan.policy.resident_blocks]
    return sorted(layers, key=lambda b: (-plan.workload.blocks[b].slot_elements, b))[:n_slots]


def _demand(plan: Plan, cost: CostModel, kind: Kind, block: int, micro_batch: int | None) -> Demand:
    return cost.demand(plan, Op(kind, LANE_OF[kind], block, micro_batch))
