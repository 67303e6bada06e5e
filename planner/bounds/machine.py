"""Lower bound on the step time of every schedule on a machine, for any policy."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from penstock.planner.predict.cost import CostModel, micro_batch_groups, update_bytes_per_param, update_params_per_s
from penstock.planner.predict.region import Resource
from penstock.planner.predict.resident import shares_memory
from penstock.runtime.plan import Lane, Policy, Setup
from penstock.runtime.plan.legality import can_square, can_stay
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind

from .bounds import SLACK, Bound
from .integer import Program
from .reasons import FACET, LANE_NAME


def machine_bound(plan: Setup, cost: CostModel) -> Bound:
    """Lower bound for every policy under the plan's semantics. Reads only the plan's blocks, semantics and micro-batch.

    Any share of the gradients may be squared on the device, and any share of the state that fits may be kept there. The cost of
    each facet is linear in both shares, so the minimum over shares of the largest facet is a linear program.
    """
    one_group = replace(plan, policy=Policy(accumulation_group=plan.semantics.n_micro_batches))
    may_stay, may_square = can_stay(plan.workload, plan.semantics), [*can_square(plan.workload, plan.semantics)]
    if not plan.workload.trains_all:
        may_stay = may_square = [*plan.workload.mixed]
    elif shares_memory(cost.profile):
        may_stay = []
    host = dict(machine_facets(plan, cost, (), ()))
    squared = dict(machine_facets(plan, cost, may_square, ()))
    staying = dict(machine_facets(plan, cost, (), may_stay))
    stay_bytes = sum(staying_bytes(one_group, b) for b in may_stay)
    program, scale_s = Program(), max(host.values())
    largest, squared_share = program.variable(0, inf, integer=False, cost=1.0), program.variable(0, 1, integer=False)
    largest_share = min(1.0, cost.profile.device.memory_bytes.value / stay_bytes) if may_stay else 0.0
    state_share = program.variable(0, largest_share, integer=False)
    for name in host:
        slopes = {squared_share: squared[name] - host[name], state_share: staying[name] - host[name]}
        program.at_most({largest: -1.0, **{n: s / scale_s for n, s in slopes.items()}}, -host[name] / scale_s)
    solution = program.solve()
    assert solution is not None, "shares of 0 are feasible"
    bound, x = solution
    a, b = x[squared_share], x[state_share]
    facets = {name: s + a * (squared[name] - s) + b * (staying[name] - s) for name, s in host.items()}
    return Bound(bound * scale_s * (1 - SLACK), max(facets, key=lambda name: facets[name]), "machine")


def staying_bytes(plan: Setup, block: int) -> int:
    """Device bytes of a block's state and gradient if the device updates it."""
    b = plan.workload.blocks[block]
    return sum(plan.state_bytes(b.state_elements).values()) + b.trained_elements * ITEM_BYTES[plan.gradient_dtype(block)]


def machine_facets(plan: Setup, cost: CostModel, squared: Sequence[int], staying: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Yield (facet, seconds) for work that no schedule avoids, if the device squares the gradients of the blocks `squared` and
    holds the state of the blocks `staying`."""
    profile, blocks, semantics = cost.profile, plan.workload.blocks, plan.semantics
    dtype = semantics.compute_dtype
    capacity = cost.capacity
    leaving = [block for b, block in enumerate(blocks) if b not in staying]

    # Forward of every block, and backward down to the first trained block, without recompute. The head does both in one op.
    compute_s, first = 0.0, plan.workload.first_trained
    counts = micro_batch_groups(semantics, range(semantics.n_micro_batches))
    for (m, count), (b, *equal_blocks) in product(counts, plan.workload.classes):
        block, n = plan.blocks_of(m)[b], count * (1 + len(equal_blocks))
        is_head = block.kind is BlockKind.HEAD
        compute_s += n * (cost.loss_s if is_head else cost.forward_s)(block, semantics)
        compute_s += n * (0.0 if is_head or b < first else cost.backward_s(block, semantics))
    gradient = ITEM_BYTES[semantics.gradient_dtype]
    squares_s = sum(blocks[b].n_trained for b in squared) * gradient / cost.square_bytes_per_s
    compute_s += squares_s + sum(cost.update_on_device_s(plan, blocks[b]) for b in staying)
    yield "device compute", compute_s * cost.least_ratio(Lane.GPU)

    # Uploads: weights that the host updates, at least once per step; frozen weights that do not fit the device; and layer weights
    # that backward needs again and that do not fit. With several ranks, each moves and updates its shard, and device memory holds
    # every shard once.
    ranks, memory_bytes = semantics.ranks, profile.device.memory_bytes.value
    item, n_params = ITEM_BYTES[dtype], sum(b.n_trained for b in leaving) / ranks
    frozen = [0 if plan.workload.trains_all else plan.frozen_bytes(b) for b in range(len(blocks))]
    layer_bytes = sum(b.n_trained for b in leaving if b.kind is BlockKind.LAYER) * item / ranks + sum(frozen[max(1, first) : -1])
    up_bytes = n_params * item + max(0.0, sum(frozen) - memory_bytes) + max(0.0, layer_bytes - memory_bytes)
    if profile.disk is not None:  # frozen weights that fit neither memory, and for backward again those of layers
        both_bytes = memory_bytes + profile.host.memory_bytes.value
        read_bytes = max(0.0, sum(frozen) - both_bytes) + max(0.0, sum(frozen[max(1, first) : -1]) - both_bytes)
        yield LANE_NAME[Lane.DISK], read_bytes / profile.read_bytes_per_s * cost.least_ratio(Lane.DISK)
    down_bytes = n_params * gradient
    link = profile.link
    usage: dict[Resource, float] = defaultdict(float)
    for resource, n_bytes in ((Resource.H2D, up_bytes), (Resource.D2H, down_bytes)):
        copy_s = n_bytes / capacity[resource]
        # The cost model caps draws at the capacity (cost.py), so the bound does, too.
        usage[resource] += n_bytes
        per_s = {Resource.DUPLEX: capacity[resource], Resource.DRAM: capacity[resource] * link.dram_bytes_per_byte}
        for shared, rate in per_s.items():
            usage[shared] += copy_s * min(rate, capacity[shared])
        usage[Resource.CORES] += copy_s * min(link.host_cores_per_copy.value, capacity[Resource.CORES])

    # The update of these parameters on all host cores, and the norm of gradients that the device does not square.
    norm_bytes = sum(b.n_trained for i, b in enumerate(blocks) if i not in squared) * gradient / ranks
    update_s = n_params / update_params_per_s(profile, semantics)
    norm_s = norm_bytes / profile.host.reduce_bytes_per_s.value
    leanest = replace(plan, policy=Policy())
    per_param = update_bytes_per_param(leanest, 1) - ITEM_BYTES[leanest.host_gradient_dtype(1)] + gradient
    update_bytes = n_params * per_param
    usage[Resource.DRAM] += min(update_bytes, update_s * capacity[Resource.DRAM])
    usage[Resource.DRAM] += min(norm_bytes, norm_s * capacity[Resource.DRAM])
    usage[Resource.CORES] += (update_s + norm_s) * capacity[Resource.CORES]
    lanes = {Resource.H2D: (Lane.H2D,), Resource.D2H: (Lane.D2H,), Resource.DUPLEX: (Lane.H2D, Lane.D2H)}
    for resource in Resource:
        least = cost.least_ratio(*lanes.get(resource, (Lane.H2D, Lane.D2H, Lane.CPU)))
        yield FACET[resource], usage[resource] / capacity[resource] * least
