"""Lowering passes, one per concern: compute, weights, activations, saved tensors, gradients, squares, updates.

`computed` emits the compute ops in a valid sequential order. Each later pass handles one concern for the whole step at once: it
inserts ops before or after the compute ops and adds operands to existing ops. Overlap follows from the slots alone (`waits.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from penstock.runtime.plan import Kind, Setup, Slot, Update

from .arenas import (
    N_EAGER_SLOTS,
    N_READ_SLOTS,
    N_STAGING_SLOTS,
    blocks_with_output_slots,
    eager_ring,
    n_own_sums,
    n_streaming,
    n_vocab_sums,
    n_whole_sums,
    offload_groups,
    source_slot,
    spill_ring_slots,
    sums_layers,
    vocab_slot_is_sum,
    weights_slot,
)
from .op_table import NUMBER, OpTableBuilder, number_of, slots
from .waits import NONE, Column

# Order of the ops around a compute op: before it, and after it
READ, LOADED, UNPACKED, GATHERED, ACTIVATION_FETCHED, SAVED_FETCHED, SHARED = range(7)
COMPUTED, SAVED_LEFT, ACTIVATION_LEFT, COMPLETE = range(20, 24)
# Order of the ops that follow a complete gradient: added to SHARED if ranks exchange it (it is another block's), else to COMPLETE
SQUARED, OFFLOADED, ADDED, NORMED, CLIPPED, UPDATED = range(6)


class ComputeOps(NamedTuple):
    """Compute ops of a step as columns, and the builder that collects all ops."""

    plan: Setup
    builder: OpTableBuilder
    kinds: Column
    blocks: Column
    micro_batches: Column
    groups: Column
    first: Column  # index of the first op of the same kind and block in the group of micro-batches
    carry_rings: bool  # True: ring buffers continue from group to group; False: each group starts at slot 0

    def is_kind(self, kind: Kind) -> Any:
        return self.kinds == NUMBER[kind]

    def turns(self, selected: Any, n_slots: int) -> Column:
        """Assign ring slots in order to the ops where `selected` is True; other entries are meaningless."""
        position = np.cumsum(selected) - 1
        if not self.carry_rings:
            n_selected = np.bincount(self.groups, weights=selected).astype(np.int64)
            position -= (np.cumsum(n_selected) - n_selected)[self.groups]
        return position % n_slots


class CompleteGradients(NamedTuple):
    """Gradients as columns, in order of completion."""

    block: Column
    place: Column  # index of the compute op after which it is complete
    turn: Column
    gradient: Column  # slot on the device
    arrived: Column  # slot on the host; NONE if the gradient remains on the device
    op: Column  # the op that offloads it

    def select(self, mask: Any) -> "CompleteGradients":
        return CompleteGradients(*(column[mask] for column in self))


def run_passes(plan: Setup, carry_rings: bool = True, carry_weights: bool = True) -> OpTableBuilder:
    """Emit all ops of one step. The flags carry ring positions, and loaded weights, from one group of micro-batches to the next;
    False: each group starts anew, so that all groups use the same slots."""
    step = computed(plan, carry_rings)
    with_weights(step, carry_weights)
    with_activations(step)
    with_saved(step)
    gradients = with_gradients(step)
    with_squares(step, gradients)
    with_updates(step, gradients)
    return step.builder


def computed(plan: Setup, carry_rings: bool = True) -> ComputeOps:
    """Emit forward, loss and backward ops: groups of micro-batches in order, layer by layer within a group."""
    n, size, head = plan.semantics.n_micro_batches, plan.policy.accumulation_group, plan.workload.n_layers + 1
    back = [*_backward_walk(plan), (Kind.BACKWARD, 0)]
    walk = [*((Kind.FORWARD, b) for b in range(head)), (Kind.LOSS, head), *back]
    numbers = [(NUMBER[kind], b) for kind, b in walk if kind is not Kind.BACKWARD or b >= plan.workload.first_trained]
    shape = -(-n // size), len(numbers), min(size, n)
    micro_batches = np.arange(shape[0])[:, None, None] * size + np.arange(shape[2])
    exists = np.broadcast_to(micro_batches < n, shape)
    kinds, blocks = (np.array(column)[None, :, None] for column in zip(*numbers, strict=True))
    groups = np.arange(shape[0])[:, None, None]
    kinds, blocks, micro_batches, groups = (np.broadcast_to(x, shape)[exists] for x in (kinds, blocks, micro_batches, groups))
    is_first = micro_batches == groups * size
    first = is_first.nonzero()[0][np.cumsum(is_first) - 1]
    builder = OpTableBuilder()
    builder.add(kinds, np.arange(len(kinds)), COMPUTED, blocks, micro_batches)
    return ComputeOps(plan, builder, kinds, blocks, micro_batches, groups, first, carry_rings)


def _backward_walk(plan: Setup) -> Iterator[tuple[Kind, int]]:
    """Yield the backward ops from the last layer to the first trained one; recompute ops precede a run of unsaved boundaries."""
    stride, top, first = plan.policy.boundary_stride, plan.workload.n_layers, plan.workload.first_trained
    for boundary in range((top - 1) // stride * stride, -1, -stride):
        if min(boundary + stride, top) < first:
            return
        yield from ((Kind.RECOMPUTE, b) for b in range(boundary + 1, min(boundary + stride, top)))
        yield from ((Kind.BACKWARD, b) for b in range(min(boundary + stride, top), boundary, -1))


def with_weights(step: ComputeOps, carry_weights: bool = True) -> None:
    """Add a load before each use of weights that are in no slot; precede it with a read if they are on disk."""
    plan, builder, blocks = step.plan, step.builder, step.plan.workload.blocks
    runs = np.unique(step.first)
    runs = runs[(step.blocks[runs] > 0) | step.is_kind(Kind.FORWARD)[runs]]  # the embedding's backward needs no weights
    block, group = step.blocks[runs], step.groups[runs]

    def ring_slots(selected: Any, n_slots: int) -> tuple[Any, Any]:
        """Return the slot of each selected run, and True where its contents must be loaded first."""
        anew = () if carry_weights else tuple(np.searchsorted(group[selected], np.arange(1, group[-1] + 1)).tolist())
        return belady(n_slots, tuple(block[selected].tolist()), anew)

    resident = _listed(plan, plan.policy.resident_blocks)
    streams = (_listed(plan, range(1, plan.workload.n_layers + 1)) & ~resident)[block]
    is_fresh = ~resident[block]
    is_fresh[np.unique(block, return_index=True)[1]] = True
    is_fresh &= ~_listed(plan, filter(plan.computes_in_place, plan.policy.device_blocks))[block]
    weights, state, source = (_numbers(plan, slot_of)[block] for slot_of in (weights_slot, Setup.state_slot, source_slot))
    index, is_fresh[streams] = ring_slots(streams, n_streaming(plan))
    weights[streams] = slots("weights", index)
    used = np.full((2, len(step.first)), NONE)
    used[:, runs] = weights, np.where(_listed(plan, filter(plan.is_apart, plan.policy.device_blocks))[block], state, NONE)
    builder.use(np.arange(len(step.first)), weights=used[0, step.first], trained=used[1, step.first])
    tied = np.where(
        _listed(plan, [b for b in range(1, len(blocks)) if blocks[b].tied])[block], number_of(source_slot(plan, 0)), NONE
    )
    unpacks = _listed(plan, filter(plan.unpacks, range(len(blocks))))[block]
    loaded, target = is_fresh & ~unpacks, weights
    if unpacks.any():
        is_uploaded, packed, is_new = is_fresh & unpacks, np.full(len(runs), NONE), np.zeros(len(runs), bool)
        index, is_new[is_uploaded] = ring_slots(is_uploaded, plan.packed_slots)
        packed[is_uploaded] = slots("packed", index)
        loaded, target = loaded | is_new, np.where(unpacks, packed, weights)
        builder.add(Kind.DEQUANTISE, runs, UNPACKED, block, where=is_uploaded, packed=packed, weights=weights)
    frozen = np.full(len(runs), NONE)
    if plan.policy.disk_blocks:
        from_disk, is_read = loaded & _listed(plan, plan.policy.disk_blocks)[block], np.zeros(len(runs), bool)
        index, is_read[from_disk] = ring_slots(from_disk, N_READ_SLOTS)
        frozen[from_disk] = slots("frozen", index)
        builder.add(Kind.READ, runs, READ, block, where=is_read, frozen=frozen)
    builder.add(Kind.LOAD, runs, LOADED, block, where=loaded, state=source, frozen=frozen, tied=tied, weights=target)
    if plan.semantics.ranks > 1:  # each rank has loaded its shard
        shared = _listed(plan, [b for b in range(len(blocks)) if blocks[b].trained])[block]
        if not plan.workload.tied:
            tied = np.full(len(runs), NONE)
        builder.add(Kind.GATHER, runs, GATHERED, block, where=is_fresh & shared, state=state, tied=tied, weights=weights)


@lru_cache(maxsize=64)
def belady(n_slots: int, uses: tuple[int, ...], anew: tuple[int, ...]) -> tuple[Column, Any]:
    """Return the slot of each use of a block, and True where the block must be loaded first.

    A load replaces the block with the most distant next use (Belady's algorithm). All slots are emptied before the uses in `anew`.
    Example: `belady(2, (1, 2, 3, 3, 2, 1), ())` assigns slots 0 1 0 0 1 0 and loads at uses 0, 1, 2 and 5.
    """
    n, next_use, later = len(uses), [0] * len(uses), dict[int, int]()
    for use in range(n - 1, -1, -1):
        next_use[use] = later.get(uses[use], n)
        later[uses[use]] = use
    chosen, is_fresh = list[int](), list[bool]()
    for use, block in enumerate(uses):
        if use == 0 or use in anew:
            held, needed, last = [NONE] * n_slots, [n] * n_slots, [NONE] * n_slots
        is_fresh.append(block not in held)
        i = max(range(n_slots), key=lambda i: (needed[i], -last[i], -i)) if is_fresh[-1] else held.index(block)
        held[i], needed[i], last[i] = block, next_use[use], use
        chosen.append(i)
    return np.array(chosen, dtype=np.int64), np.array(is_fresh, dtype=bool)


def with_activations(step: ComputeOps) -> None:
    """Assign activation slots to outputs: a dedicated one, one that is shared until recompute, or (offload) a ring buffer's."""
    plan, builder, b, m = step.plan, step.builder, step.blocks, step.micro_batches
    group, stride, n_blocks = plan.policy.accumulation_group, plan.policy.boundary_stride, len(plan.workload.blocks)
    stationary = blocks_with_output_slots(plan)
    place, spilled = len(stationary) + np.arange(n_blocks) % stride - 1, _places(plan, plan.policy.spill_blocks)
    place[stationary] = np.arange(len(stationary))
    forward, backward = step.is_kind(Kind.FORWARD), step.is_kind(Kind.BACKWARD)
    is_offloaded, is_fetched = forward & (spilled[b] != NONE), backward & (b > 0) & (spilled[b - 1] != NONE)
    ring = len(stationary) * group + step.turns(is_offloaded | is_fetched, spill_ring_slots(group))
    passing = np.full((2, n_blocks, plan.semantics.n_micro_batches), NONE)  # in forward and in backward
    passing[0, b[is_offloaded], m[is_offloaded]] = ring[is_offloaded]
    passing[1, b[is_fetched] - 1, m[is_fetched]] = ring[is_fetched]

    def activation_slot(block: Column) -> Any:
        index = np.where(spilled[block] == NONE, place[block] * group + m % group, passing[backward.astype(np.int64), block, m])
        return slots("activations", np.where(block < 0, NONE, index))

    def on_host(block: Column) -> Any:
        return slots("spilled", spilled[block] * group + m % group)

    numbers, y = np.arange(len(b)), activation_slot(b)
    builder.use(numbers, x=activation_slot(b - 1), y=np.where(step.is_kind(Kind.LOSS), NONE, y))
    builder.add(Kind.OFFLOAD_ACTIVATION, numbers, ACTIVATION_LEFT, b, m, where=is_offloaded, y=y, spilled=on_host(b))
    x = activation_slot(b - 1)
    builder.add(Kind.FETCH_ACTIVATION, step.first, ACTIVATION_FETCHED, b - 1, m, where=is_fetched, spilled=on_host(b - 1), y=x)


def with_saved(step: ComputeOps) -> None:
    """Offload the saved tensors of layers after forward and prefetch them before backward, through shared ring buffers."""
    policy, place = step.plan.policy, _places(step.plan, step.plan.policy.offload_blocks)
    b, m, numbers, forward = step.blocks, step.micro_batches, np.arange(len(step.blocks)), step.is_kind(Kind.FORWARD)
    uses = (forward | step.is_kind(Kind.BACKWARD)) & (place[b] != NONE)
    index = np.full(len(b), NONE)
    for i, blocks in enumerate(offload_groups(policy)):
        group_uses = uses & _listed(step.plan, blocks)[b]
        index[group_uses] = (i * policy.saved_slots + step.turns(group_uses, policy.saved_slots))[group_uses]
    group = policy.accumulation_group
    saved, offloaded = slots("saved", index), slots("offloaded", place[b] * group + m % group)
    step.builder.use(numbers, saved=saved)
    for kind, turn, direction in ((Kind.OFFLOAD_SAVED, SAVED_LEFT, forward), (Kind.FETCH_SAVED, SAVED_FETCHED, ~forward)):
        step.builder.add(kind, numbers, turn, b, m, where=uses & direction, saved=saved, offloaded=offloaded)


def with_gradients(step: ComputeOps) -> CompleteGradients:
    """Assign slots to the gradients of micro-batches and their sums, and offload them unless the device updates the block."""
    plan, builder, semantics = step.plan, step.builder, step.plan.semantics
    last, head, n_slots = semantics.n_micro_batches - 1, plan.workload.n_layers + 1, plan.policy.gradient_slots
    device_index = _places(plan, plan.policy.device_blocks)
    sums_there = _listed(plan, filter(plan.sums_on_device, range(head + 1)))
    is_own, in_place = _listed(plan, plan.policy.sum_blocks), _listed(plan, filter(plan.sums_in_place, plan.policy.device_blocks))
    trained = _listed(plan, [b for b, block in enumerate(plan.workload.blocks) if block.trained])
    ends = (step.is_kind(Kind.LOSS) | step.is_kind(Kind.BACKWARD)) & trained[step.blocks]
    numbers, b, m = ends.nonzero()[0], step.blocks[ends], step.micro_batches[ends]
    is_layer, is_last = (b > 0) & (b < head), m == last
    leaves = ends & (step.blocks > 0) & (step.blocks < head) & (device_index[step.blocks] == NONE)
    leaves &= (step.micro_batches == last) | ~sums_there[step.blocks]
    ring = np.full((head + 1, last + 1), NONE)
    ring[step.blocks[leaves], step.micro_batches[leaves]] = step.turns(leaves, n_slots)[leaves]
    out = np.where(is_layer, ring[b, m], n_slots)
    out = slots("gradients", np.where(device_index[b] == NONE, out, n_slots + 1 + device_index[b]))
    is_its_own = ~is_layer & vocab_slot_is_sum(plan)
    has_sum = (last > 0) | (b == head) | is_its_own | is_own[b] | in_place[b] | (semantics.ranks > 1)
    has_sum &= sums_there[b]
    makes_gradient = (~sums_there[b] | (is_last & ~is_its_own & (semantics.ranks == 1))) & ~in_place[b]
    levels, n_joined = (np.array([tell(m) for m in range(last + 1)])[m] for tell in (semantics.sum_level, semantics.n_joined))
    sums = _sums(plan)
    builder.use(numbers, sum=np.where(has_sum, sums(b, levels), NONE), gradient=np.where(makes_gradient, out, NONE))
    builder.use(numbers, tied=np.where((b == 0) & is_last & plan.joins_tied, sums(np.array(head), np.array(0)), NONE))
    for depth in range(1, max(n_joined, default=0) + 1):
        builder.use(numbers, into=np.where(has_sum & (n_joined >= depth), sums(b, levels - depth), NONE))
    arrived = np.where(device_index[b] == NONE, _on_host(plan, b, is_layer & is_last), NONE)
    grads = CompleteGradients(b, numbers, np.full(len(b), COMPLETE), out, arrived, numbers)
    if not (is_there := sums_there[b]).all():
        _with_additions(step, grads.select(~is_there), levels[~is_there], n_joined[~is_there])
    grads = grads.select(is_last)
    if semantics.ranks > 1:
        grads = _with_exchanges(step, grads, sums(b, levels - n_joined)[is_last])
    b, place, turn, gradient, arrived, _ = grads
    is_sent = (arrived != NONE) & sums_there[b]
    op = builder.add(Kind.OFFLOAD_GRADIENT, place, turn + OFFLOADED, b, where=is_sent, gradient=gradient, arrived=arrived)
    return grads._replace(op=op)


def _with_additions(step: ComputeOps, gradients: CompleteGradients, levels: Column, n_joined: Column) -> None:
    """Offload the gradient of each micro-batch and accumulate it on the host."""
    n_blocks, head = len(step.plan.workload.blocks), step.plan.workload.n_layers + 1
    b, place, turn, gradient, arrived, _ = gradients
    is_offloaded, m, is_of_layer = arrived != NONE, step.micro_batches[place], np.zeros(len(step.blocks), bool)
    is_of_layer[place] = is_offloaded & (b > 0) & (b < head)
    staged = slots("staging", np.where(is_of_layer[place], step.turns(is_of_layer, N_STAGING_SLOTS)[place], N_STAGING_SLOTS))
    step.builder.add(Kind.OFFLOAD_GRADIENT, place, turn + OFFLOADED, b, m, where=is_offloaded, gradient=gradient, arrived=staged)
    of_sum = slots("host_gradients", levels * n_blocks + b)
    added = step.builder.add(Kind.ACCUMULATE, place, turn + ADDED, b, m, where=is_offloaded, staged=staged, arrived=of_sum)
    for depth in range(1, max(n_joined, default=0) + 1):
        step.builder.use(added, into=np.where(n_joined >= depth, of_sum - depth * n_blocks, NONE))


def _with_exchanges(step: ComputeOps, grads: CompleteGradients, sums: Column) -> CompleteGradients:
    """Exchange (reduce-scatter) each gradient sum, before the backward that reuses its slot and after the gather for that op."""
    of_block = np.full(len(step.plan.workload.blocks), NONE)
    size, n = step.plan.policy.accumulation_group, step.plan.semantics.n_micro_batches
    is_first = step.is_kind(Kind.BACKWARD) & (step.micro_batches == (n - 1) // size * size)  # of the last group
    of_block[step.blocks[is_first]] = is_first.nonzero()[0]
    later, first = grads.block - n_whole_sums(step.plan), step.plan.workload.first_trained
    place = np.where(later < first, len(step.blocks) - 1 + first - later, of_block[later])
    grads = grads._replace(place=place, turn=np.full(len(place), SHARED))
    step.builder.add(Kind.EXCHANGE, place, SHARED, grads.block, sum=sums, received=slots("received", 0), gradient=grads.gradient)
    return grads


def _sums(plan: Setup) -> Callable[[Column, Column], Any]:
    """Return a function from blocks and tree levels to device slots for gradient sums. Order of the arena: grads sums of layers
    (used in turn), their partial sums, sums of embedding and head, sums of single blocks."""
    n_sums, n_whole, head = plan.semantics.n_sums, n_whole_sums(plan), plan.workload.n_layers + 1
    n_of_layers, n_slots = (n_sums - 1 + n_whole) * sums_layers(plan), plan.policy.gradient_slots
    in_its_own = vocab_slot_is_sum(plan)  # the gradient slot is the sum
    n_slots_of = [n_own_sums(plan, b) for b in range(head + 1)]
    first_own = n_of_layers + n_vocab_sums(plan) + np.cumsum([0, *n_slots_of[:-1]])
    in_place, device_index = _places(plan, []), _places(plan, plan.policy.device_blocks)
    for b in filter(plan.sums_in_place, plan.policy.device_blocks):
        in_place[b] = n_slots + 1 + device_index[b]
    has_own = np.array(n_slots_of) + (in_place != NONE) > 0

    def sums(block: Column, level: Column) -> Any:
        of_layers = np.where(level == 0, block % n_whole, n_whole - 1 + level)
        shared = np.where((block > 0) & (block < head), of_layers, n_of_layers + level - in_its_own)
        arena_slots = slots("sums", np.where(has_own[block], first_own[block] + level - (in_place[block] != NONE), shared))
        is_of_vocab = in_its_own & ((block == 0) | (block == head))
        gradient = np.where(level > 0, NONE, np.where(is_of_vocab, n_slots, in_place[block]))
        return np.where(gradient == NONE, arena_slots, slots("gradients", gradient))

    return sums


def _on_host(plan: Setup, block: Column, takes_turns: Any) -> Any:
    """Return host slots for gradients: one per block, or under eager updates a small ring for all layers."""
    if not eager_ring(plan):
        return slots("host_gradients", block)
    n = min(N_EAGER_SLOTS, plan.workload.n_layers)
    return slots("host_gradients", np.where(takes_turns, 1 + (np.cumsum(takes_turns) - 1) % n, np.where(block == 0, 0, n + 1)))


def with_squares(step: ComputeOps, grads: CompleteGradients) -> None:
    """Compute sums of squares on the device; offload them with the gradient, or alone if the gradient is not offloaded."""
    b, place, turn, gradient, arrived, op = grads
    squares, norm = slots("squares", _places(step.plan, step.plan.squared)[b]), slots("norm", b)
    is_squared, is_on_device = squares != NONE, arrived == NONE
    step.builder.add(Kind.SQUARE, place, turn + SQUARED, b, where=is_squared, gradient=gradient, squares=squares)
    step.builder.add(Kind.OFFLOAD_SQUARES, place, turn + OFFLOADED, b, where=is_squared & is_on_device, squares=squares, norm=norm)
    step.builder.use(np.where(is_on_device, NONE, op), squares=squares, norm=np.where(is_squared, norm, NONE))


def with_updates(step: ComputeOps, grads: CompleteGradients) -> None:
    """Add partial norms of gradients, the global norm (`clip`), and updates: eager, speculative, or after the norm."""
    plan, builder, n_blocks = step.plan, step.builder, len(step.plan.workload.blocks)
    early = _places(plan, plan.policy.speculate_blocks)

    def update_operands(g: CompleteGradients) -> dict[str, Any]:
        """Operands of an update; a tied weight also has the gradient from the head."""
        arrived = grads.arrived[grads.block == n_blocks - 1] if plan.workload.tied and not plan.joins_tied else NONE
        return {"arrived": g.arrived, "tied": np.where(g.block == 0, arrived, NONE), "state": slots("state", g.block)}

    b, place, turn, *_ = grads
    clip, norm, operands = slots("norm", n_blocks), slots("norm", b), update_operands(grads)
    shadow = slots("state", np.where(early == NONE, NONE, n_blocks + early))
    builder.add(Kind.NORM, place, turn + NORMED, b, where=~_listed(plan, plan.squared)[b], norm=norm, **operands | {"state": NONE})
    clips = builder.add(Kind.CLIP, place, turn + CLIPPED, 0, where=b == min(b), clip=clip)  # the last gradient
    builder.use(np.repeat(max(clips), len(b)), norm=np.sort(norm))
    if plan.policy.update is Update.EAGER:
        builder.add(Kind.UPDATE, place, turn + UPDATED, b, norm=norm, **operands)
        return
    builder.add(Kind.SPECULATE, place, turn + UPDATED, b, where=early[b] != NONE, shadow=shadow[b], **operands)
    last = grads.select(np.argsort(b))  # in forward order of the next step; `end` is after the last exchanges
    b, end, is_on_device = last.block, np.full(len(last.block), len(step.blocks) + 2), last.arrived == NONE
    state = _numbers(plan, Setup.state_slot)[b]
    builder.add(Kind.UPDATE_ON_DEVICE, end, 0, b, where=is_on_device, gradient=last.gradient, clip=clip, state=state)
    kinds = np.where(early[b] == NONE, NUMBER[Kind.UPDATE], NUMBER[Kind.SETTLE])
    builder.add(kinds, end, 1, b, where=~is_on_device, clip=clip, shadow=shadow[b], **update_operands(last))


def _listed(plan: Setup, blocks: Iterable[int]) -> Any:
    """Mask over all blocks: True for those listed."""
    return _places(plan, list(blocks)) != NONE


def _places(plan: Setup, blocks: Sequence[int]) -> Column:
    """Index of every block in the list; NONE if absent."""
    places = np.full(len(plan.workload.blocks), NONE)
    places[list(blocks)] = np.arange(len(blocks))
    return places


def _numbers(plan: Setup, slot_of: Callable[[Setup, int], Slot]) -> Column:
    """Evaluate a slot function for every block, as slot numbers."""
    return np.array([number_of(slot_of(plan, b)) for b in range(len(plan.workload.blocks))])
