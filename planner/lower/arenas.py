"""Memory layout of a plan: the arenas, each a list of slot sizes in bytes on the device or the host."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from penstock.runtime.plan import Arena, Place, Policy, Setup, Slot, Update
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import ITEM_BYTES, SLOT_ALIGN_BYTES

N_STAGING_SLOTS = 2  # host slots for gradients of single micro-batches: one is filled while the other is added to the sum
N_EAGER_SLOTS = 2  # host slots for layer gradients under eager updates: one is filled while the other is consumed
N_READ_SLOTS = 2  # host slots for weights read from disk: one is filled while the other is uploaded
SQUARE_BYTES = 8  # fp64 sum of squares of one tensor


def blocks_with_output_slots(plan: Setup) -> list[int]:
    """Return the blocks with dedicated device slots for their output: every `boundary_stride`-th and the last, if not offloaded."""
    stride, last = plan.policy.boundary_stride, plan.workload.n_layers
    spilled = set(plan.policy.spill_blocks)
    return [b for b in range(last + 1) if b not in spilled and (b % stride == 0 or b == last)]


def n_streaming(plan: Setup) -> int:
    """Slots of `weights` for streamed layers: a single one if layers are uploaded packed."""
    return 1 if plan.packed_slots else plan.policy.prefetch_depth + 1


def resident_apart(plan: Setup) -> list[int]:
    """Resident blocks with weights in slots of their own: others compute with the weights in their state on the device."""
    return [b for b in plan.policy.resident_blocks if not plan.computes_in_place(b)]


def weights_slot(plan: Setup, block: int) -> Slot:
    """Return the slot of the weights of a resident block, or of embedding or head."""
    if plan.computes_in_place(block):
        return plan.state_slot(block)
    resident, n = resident_apart(plan), n_streaming(plan)
    return Slot("weights", n + 1 + resident.index(block) if block in resident else n)


def source_slot(plan: Setup, block: int) -> Slot:
    """Return the slot that a load of the block reads."""
    return Slot("state", block) if plan.is_apart(block) else plan.state_slot(block)


def slot_elements(plan: Setup, block: int) -> int:
    """Elements of a device slot of the block's weights; with several ranks, padded to equal shards. Packed weights that products
    use as they are count as bytes over the bytes of an element."""
    b = plan.workload.blocks[block]
    if plan.multiplies_packed(block):
        return plan.uploaded(block)[1] // ITEM_BYTES[plan.semantics.compute_dtype]
    return plan.gradient_elements(block) + b.slot_elements - b.trained_elements


def spill_ring_slots(group: int) -> int:
    """Slots of the ring for offloaded boundary activations: inputs and outputs of a group, and one in transfer."""
    return 2 * group + 1


def vocab_slot_is_sum(plan: Setup) -> bool:
    """True if the gradient slot of embedding and head is also their fp32 accumulator, so that no separate sum is allocated."""
    return plan.reduced and plan.workload.tied and plan.semantics.ranks == 1 and not plan.joins_tied


def n_vocab_sums(plan: Setup) -> int:
    """Slots of `sums` that embedding and head share."""
    return plan.semantics.n_sums - vocab_slot_is_sum(plan) if plan.reduced and not plan.joins_tied else 0


def n_own_sums(plan: Setup, block: int) -> int:
    """Slots of `sums` of the block alone: one per level of the tree, without the one in its gradient slot."""
    is_own = block in plan.policy.sum_blocks or plan.is_apart(block)
    return (plan.semantics.n_sums - plan.sums_in_place(block)) * is_own


def sums_layers(plan: Setup) -> bool:
    """True if the device accumulates the gradients of layers."""
    return plan.reduced and (plan.semantics.n_micro_batches > 1 or plan.semantics.ranks > 1)


def n_whole_sums(plan: Setup) -> int:
    """Accumulators for complete layer gradients: with several ranks two, because one is exchanged while the next is filled."""
    return 2 if plan.semantics.ranks > 1 else 1


def eager_ring(plan: Setup) -> bool:
    """True if the gradients of all layers share a small ring of host slots."""
    return plan.policy.update is Update.EAGER and plan.reduced


def offload_groups(policy: Policy) -> list[list[int]]:
    """Group the layers with offloaded saved tensors by recompute tier; each group has its own ring buffer."""
    groups = ([b for b in policy.offload_blocks if policy.saved(b) is saved] for saved in LEAVE)
    return [blocks for blocks in groups if blocks]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def arenas_of(plan: Setup) -> Iterator[Arena]:
    yield from _device_arenas(plan)
    yield from _host_arenas(plan)


def _device_arenas(plan: Setup) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    item, slots = ITEM_BYTES[plan.semantics.compute_dtype], _per_block(plan, partial(slot_elements, plan))
    stays, head = {*policy.resident_blocks}, len(blocks) - 1
    layer_elements, vocab_elements = _largest(slots)
    layer_elements *= not stays.issuperset(range(1, head))  # slots of streamed weights, if any stream
    vocab_elements *= not stays.issuperset((0, head))
    resident = [slots[b] * item for b in resident_apart(plan)]
    yield Arena("weights", Place.DEVICE, (*(layer_elements * item,) * n_streaming(plan), vocab_elements * item, *resident))
    if plan.packed_slots:
        largest_bytes = max(plan.uploaded(b)[1] for b in range(1, len(blocks) - 1))
        yield Arena("packed", Place.DEVICE, (largest_bytes,) * plan.packed_slots)
    group, activation_bytes = policy.accumulation_group, _activation_bytes(plan)
    activations = [activation_bytes[b] for b in blocks_with_output_slots(plan) for _ in range(group)]
    if policy.spill_blocks:
        activations += [max(activation_bytes[b] for b in policy.spill_blocks)] * spill_ring_slots(group)
    activations += [max(activation_bytes)] * (policy.boundary_stride - 1) * group
    yield Arena("activations", Place.DEVICE, tuple(activations))
    rings = [max(plan.of_tiers(blocks, "slot_bytes")) for blocks in offload_groups(policy)]
    if rings:
        yield Arena("saved", Place.DEVICE, tuple(_aligned(n_bytes) for n_bytes in rings for _ in range(policy.saved_slots)))
    on_device = {*policy.device_blocks}
    layer_bytes, vocab_bytes = _largest(_per_sum(plan, lambda b: gradient_slot_bytes(plan, b) * (b not in on_device)))
    on_device_bytes = [blocks[b].trained_elements * ITEM_BYTES[plan.gradient_dtype(b)] for b in policy.device_blocks]
    yield Arena("gradients", Place.DEVICE, (*[layer_bytes] * policy.gradient_slots, vocab_bytes, *on_device_bytes))
    if policy.device_blocks:
        state_bytes = [sum(plan.state_bytes(blocks[b].state_elements).values()) for b in policy.device_blocks]
        yield Arena("device_state", Place.DEVICE, tuple(state_bytes))
    n_sums = plan.semantics.n_sums
    layer_elements, vocab_elements = _largest_gradients(plan, excluded=list(filter(plan.is_apart, policy.device_blocks)))
    sums = [layer_elements * ITEM_BYTES[plan.sum_dtype(1)]] * ((n_sums - 1 + n_whole_sums(plan)) * sums_layers(plan))
    sums += [vocab_elements * ITEM_BYTES["fp32"]] * n_vocab_sums(plan)
    of_blocks = [
        (plan.gradient_elements(b), n) for b in sorted({*policy.sum_blocks, *policy.device_blocks}) if (n := n_own_sums(plan, b))
    ]
    sums += [n_elements * ITEM_BYTES["fp32"] for n_elements, n in of_blocks for _ in range(n)]
    if sums:
        yield Arena("sums", Place.DEVICE, tuple(sums))
    if (ranks := plan.semantics.ranks) > 1:
        yield Arena("received", Place.DEVICE, (2 * ranks * plan.exchanged_elements() * ITEM_BYTES["fp32"],))
    if squared := plan.squared:
        yield Arena("squares", Place.DEVICE, tuple(_aligned(SQUARE_BYTES * len(blocks[b].trained)) for b in squared))


def _per_block(plan: Setup, function: Callable[[int], int]) -> list[int]:
    """Evaluate a function for every block, once per class of equal blocks."""
    known = {blocks[0]: function(blocks[0]) for blocks in plan.workload.classes}
    return [known[first] for first in plan.workload.first_alike]


def _per_sum(plan: Setup, function: Callable[[int], int]) -> list[int]:
    """Evaluate a function for every block, once per class of equal blocks with gradient sums and state in the same places."""
    summed, staying, known = {*plan.policy.sum_blocks}, {*plan.policy.device_blocks}, dict[tuple[int, bool, bool], int]()
    keys = [(first, b in summed, b in staying) for b, first in enumerate(plan.workload.first_alike)]
    for b, key in enumerate(keys):
        if key not in known:
            known[key] = function(b)
    return [known[key] for key in keys]


def _largest(values: Sequence[int]) -> tuple[int, int]:
    """Return the maximum over layers, and the maximum over embedding and head."""
    return max(values[1:-1]), max(values[0], values[-1])


def gradient_slot_bytes(plan: Setup, block: int) -> int:
    """Bytes of a block's gradient in its device slot before offload; with several ranks, of one rank's shard."""
    return plan.sent_elements(block) * ITEM_BYTES[plan.gradient_dtype(block)]


def _largest_gradients(plan: Setup, excluded: Collection[int] = ()) -> tuple[int, int]:
    """Elements of the largest layer gradient and of the larger of embedding's and head's, without the blocks in `excluded`."""
    return _largest([0 if b in excluded else n for b, n in enumerate(_per_block(plan, plan.gradient_elements))])


def _activation_bytes(plan: Setup) -> list[int]:
    return _per_block(plan, lambda b: _aligned(plan.workload.blocks[b].boundary_bytes))[:-1]


def _host_arenas(plan: Setup) -> Iterator[Arena]:
    policy = plan.policy
    on_device = {*policy.device_blocks}  # their optimizer state is not on the host
    parts = _per_block(plan, lambda b: sum(plan.state_bytes(plan.part_elements(b)).values()))
    in_state = [n_bytes * (b not in on_device) for b, n_bytes in enumerate(parts)]
    if not plan.workload.trains_all:
        in_state = [n_bytes + plan.frozen_bytes(b) * (b not in policy.disk_blocks) for b, n_bytes in enumerate(in_state)]
    in_state += [parts[b] for b in policy.speculate_blocks]
    yield Arena("state", Place.HOST, tuple(in_state))
    if policy.disk_blocks:
        yield Arena("frozen", Place.HOST, (max(map(plan.read_bytes, policy.disk_blocks)),) * N_READ_SLOTS)

    def sent_bytes(b: int) -> int:
        return plan.sent_elements(b) * ITEM_BYTES[plan.host_gradient_dtype(b)] * (b not in on_device)

    gradients = _per_sum(plan, sent_bytes)
    if eager_ring(plan):
        layers = gradients[1:-1]
        gradients[1:-1] = [max(layers)] * min(N_EAGER_SLOTS, len(layers))
    n_partial = 0 if plan.reduced else plan.semantics.n_sums - 1  # in the tree of sum groups
    partial_sums = _per_sum(plan, lambda b: sent_bytes(b) * (not plan.sums_on_device(b))) if n_partial else []
    yield Arena("host_gradients", Place.HOST, (*gradients, *partial_sums * n_partial))
    if not plan.reduced:
        on_device = {*on_device, *plan.policy.sum_blocks}
        layer_elements, vocab_elements = _largest_gradients(plan, excluded=on_device)
        staging = (layer_elements * ITEM_BYTES[plan.semantics.compute_dtype],) * N_STAGING_SLOTS
        yield Arena("staging", Place.HOST, (*staging, vocab_elements * ITEM_BYTES["fp32"]))
    if policy.offload_blocks:
        saved = map(_aligned, plan.of_tiers(policy.offload_blocks, "slot_bytes"))
        yield Arena("offloaded", Place.HOST, tuple([n_bytes for n_bytes in saved for _ in range(policy.accumulation_group)]))
    if policy.spill_blocks:
        sizes = _activation_bytes(plan)
        yield Arena("spilled", Place.HOST, tuple([sizes[b] for b in policy.spill_blocks for _ in range(policy.accumulation_group)]))
    squares = _per_block(plan, lambda b: _aligned(SQUARE_BYTES * plan.norm_numbers(b)))
    n_clip = 1 if plan.semantics.ranks == 1 else plan.semantics.ranks * plan.shared_numbers()
    yield Arena("norm", Place.HOST, (*squares, _aligned(SQUARE_BYTES * n_clip)))
