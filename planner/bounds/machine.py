"""Lower bound on every schedule of a machine, whatever the policy."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from penstock.planner.predict.cost import CostModel, update_bytes_per_param, update_params_per_s
from penstock.runtime.plan import Lane, Policy, Setup
from penstock.runtime.plan.legality import can_square
from penstock.runtime.plan.region import Resource
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind

from .bounds import SLACK, Bound, places_to_stay
from .integer import Program
from .reasons import FACET, LANE_NAME


def machine_bound(plan: Setup, cost: CostModel) -> Bound:
    """Valid for every policy under the plan's semantics; only its blocks, semantics and micro-batch are looked at.

    Any share of the gradients may be squared on the device, and of the state as much may be there as fits. What a facet needs is
    linear in both shares: the least that the largest facet can be is a linear program.
    """
    whole = replace(plan, policy=Policy(accumulation_group=plan.semantics.n_micro_batches))
    may_stay, may_square = places_to_stay(whole, cost.profile), [*can_square(plan.workload, plan.semantics)]
    if not plan.workload.trains_all:
        may_stay = may_square = [*plan.workload.mixed] if plan.semantics.all_ranks.sum_groups == 1 else []
    host = dict(machine_facets(plan, cost, (), ()))
    squared = dict(machine_facets(plan, cost, may_square, ()))
    staying = dict(machine_facets(plan, cost, (), may_stay))
    stay_bytes = sum(map(whole.staying_bytes, may_stay))
    program, scale_s = Program(), max(host.values())
    largest, of_squares = program.variable(0, inf, integer=False, cost=1.0), program.variable(0, 1, integer=False)
    most = min(1.0, cost.profile.device.memory_bytes.value / stay_bytes) if may_stay else 0.0
    of_state = program.variable(0, most, integer=False)
    for name in host:
        more = {of_squares: squared[name] - host[name], of_state: staying[name] - host[name]}
        program.at_most({largest: -1.0, **{n: s / scale_s for n, s in more.items()}}, -host[name] / scale_s)
    found = program.solve()
    assert found is not None, "with no share of either there is a solution"
    bound, x = found
    facets = {
        name: seconds + x[of_squares] * (squared[name] - seconds) + x[of_state] * (staying[name] - seconds)
        for name, seconds in host.items()
    }
    return Bound(bound * scale_s * (1 - SLACK), max(facets, key=lambda name: facets[name]), "machine")


def machine_facets(plan: Setup, cost: CostModel, squared: Sequence[int], staying: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Seconds that each facet needs for the work that no schedule avoids, if the device squares the gradients of some blocks, and
    holds the state of some."""
    profile, blocks, semantics = cost.profile, plan.workload.blocks, plan.semantics
    dtype = semantics.compute_dtype
    capacity = cost.capacity
    leaving = [block for b, block in enumerate(blocks) if b not in staying]

    # Every block forward and, as far as anything is trained, backward, no recompute; the head does both in one.
    compute_s, first = 0.0, plan.workload.first_trained
    for (m, count), (b, *others) in product(plan.micro_batch_groups(range(semantics.n_micro_batches)), plan.workload.classes):
        block, n = plan.blocks_of(m)[b], count * (1 + len(others))
        is_head = block.kind is BlockKind.HEAD
        compute_s += n * (cost.loss_s if is_head else cost.forward_s)(block, semantics)
        compute_s += n * (0.0 if is_head or b < first else cost.backward_s(block, semantics))
    gradient = ITEM_BYTES[semantics.gradient_dtype]
    squares_s = sum(blocks[b].n_trained for b in squared) * gradient / cost.square_bytes_per_s
    yield "device compute", compute_s + squares_s + sum(cost.update_on_device_s(plan, blocks[b]) for b in staying)

    # What the host updates in every step goes up at least once, and so does what is frozen and does not fit from step to step. What
    # a layer's backward needs and does not fit beside the rest goes up again.
    # Of several ranks each moves and updates its part, the devices' memory holds all parts once.
    ranks, memory_bytes = semantics.ranks, profile.device.memory_bytes.value
    item, n_params = ITEM_BYTES[dtype], sum(b.n_trained for b in leaving) / ranks
    frozen = [0 if plan.workload.trains_all else plan.frozen_bytes(b) for b in range(len(blocks))]
    layer_bytes = sum(b.n_trained for b in leaving if b.kind is BlockKind.LAYER) * item / ranks + sum(frozen[max(1, first) : -1])
    up_bytes = n_params * item + max(0.0, sum(frozen) - memory_bytes) + max(0.0, layer_bytes - memory_bytes)
    if profile.disk is not None:  # of what is frozen, and of layers once more for backward, all that fits in no memory is read
        both_bytes = memory_bytes + profile.host.memory_bytes.value
        read_bytes = max(0.0, sum(frozen) - both_bytes) + max(0.0, sum(frozen[max(1, first) : -1]) - both_bytes)
        yield LANE_NAME[Lane.DISK], read_bytes / profile.read_bytes_per_s
    down_bytes = n_params * gradient
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

    # Update of every such parameter, on all host cores, and the norm of what the device does not sum.
    norm_bytes = sum(b.n_trained for i, b in enumerate(blocks) if i not in squared) * gradient / ranks
    update_s = n_params / update_params_per_s(profile, semantics)
    norm_s = norm_bytes / profile.host.reduce_bytes_per_s.value
    leanest = replace(plan, policy=Policy())
    per_param = update_bytes_per_param(leanest, 1) - ITEM_BYTES[leanest.host_gradient_dtype(1)] + gradient
    update_bytes = n_params * per_param
    drawn[Resource.DRAM] += min(update_bytes, update_s * capacity[Resource.DRAM])
    drawn[Resource.DRAM] += min(norm_bytes, norm_s * capacity[Resource.DRAM])
    drawn[Resource.CORES] += (update_s + norm_s) * capacity[Resource.CORES]
    for resource in Resource:
        yield FACET[resource], drawn[resource] / capacity[resource]
