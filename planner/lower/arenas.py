"""Arenas of a policy: which slots, how large, on which memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from penstock.runtime.plan import Arena, Place, Policy, Setup, Update
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import ITEM_BYTES, SLOT_ALIGN_BYTES, BlockKind

N_STAGING_SLOTS = 2  # host slots for unreduced gradients: one is filled while the other is added
N_EAGER_SLOTS = 2  # host slots for gradients of layers when updates are eager: one is filled while the other is used
N_READ_SLOTS = 2  # host slots for what a disk has: one is filled while the other is loaded from
SQUARE_BYTES = 8  # the sum of a tensor's squares, fp64


def staying(plan: Setup) -> list[int]:
    """The blocks, the head apart, whose output has slots of its own on the device."""
    stride, last = plan.policy.boundary_stride, plan.workload.n_layers
    spilled = set(plan.policy.spill_blocks)
    return [b for b in range(last + 1) if b not in spilled and (b % stride == 0 or b == last)]


def spill_ring_slots(group: int) -> int:
    """Boundaries of a spilling model on the device at a time: those computed from, those computed, and one that leaves or comes."""
    return 2 * group + 1


def vocab_slot_is_sum(plan: Setup) -> bool:
    """Whether the vocabulary blocks' slot for gradients holds the running sum itself: where it is fp32, as the host adds up, and is
    not a rank's part."""
    return (plan.workload.tied and plan.semantics.ranks == 1) or not plan.reduced


def sums_layers(plan: Setup) -> bool:
    """Whether the device adds up layers' gradients."""
    return plan.reduced and (plan.semantics.n_micro_batches > 1 or plan.semantics.ranks > 1)


def n_whole_sums(plan: Setup) -> int:
    """Of layers' sums, those that one is in turn that ends whole: while one is exchanged, the next is begun."""
    return 2 if plan.semantics.ranks > 1 else 1


def eager_ring(plan: Setup) -> bool:
    """Whether the layers' gradients on the host share a few slots."""
    return plan.policy.update is Update.EAGER and plan.reduced


def leaving_alike(policy: Policy) -> list[list[int]]:
    """The layers whose saved activations leave, by what that is: each kind has slots of its own."""
    alike = ([b for b in policy.offload_blocks if policy.saved(b) is saved] for saved in LEAVE)
    return [blocks for blocks in alike if blocks]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def arenas_of(plan: Setup) -> Iterator[Arena]:
    """Every arena of the plan, with exact slot sizes."""
    yield from _device_arenas(plan)
    yield from _host_arenas(plan)


def _device_arenas(plan: Setup) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    item, slots = ITEM_BYTES[plan.semantics.compute_dtype], _of_blocks(plan, plan.slot_elements)
    layer_elements, vocab_elements = _largest(slots)
    resident = [slots[b] * item for b in policy.resident_blocks]
    yield Arena("weights", Place.DEVICE, (*(layer_elements * item,) * plan.n_streaming, vocab_elements * item, *resident))
    if plan.packed_slots:
        largest_bytes = max(plan.uploaded(b)[1] for b in range(1, len(blocks) - 1))
        yield Arena("packed", Place.DEVICE, (largest_bytes,) * plan.packed_slots)
    group, activation_bytes = policy.accumulation_group, _activation_bytes(plan)
    activations = [activation_bytes[b] for b in staying(plan) for _ in range(group)]
    if policy.spill_blocks:
        activations += [max(activation_bytes[b] for b in policy.spill_blocks)] * spill_ring_slots(group)
    activations += [max(activation_bytes)] * (policy.boundary_stride - 1) * group
    yield Arena("activations", Place.DEVICE, tuple(activations))
    rings = [max(plan.of_tiers(blocks, "slot_bytes")) for blocks in leaving_alike(policy)]
    if rings:
        yield Arena("saved", Place.DEVICE, tuple(_aligned(n_bytes) for n_bytes in rings for _ in range(policy.saved_slots)))
    leaving, on_device = _of_blocks(plan, partial(leaving_bytes, plan)), {*policy.device_blocks}
    ranks = plan.semantics.ranks
    layer_bytes, vocab_bytes = _largest([n_bytes * (b not in on_device) for b, n_bytes in enumerate(leaving)])
    kept = [blocks[b].trained_elements * ITEM_BYTES[plan.gradient_dtype(b)] for b in policy.device_blocks]
    yield Arena("gradients", Place.DEVICE, (*[layer_bytes] * policy.gradient_slots, vocab_bytes, *kept))
    if policy.device_blocks:
        there = [sum(plan.state_bytes(blocks[b].state_elements).values()) for b in policy.device_blocks]
        yield Arena("device_state", Place.DEVICE, tuple(there))
    n_sums = plan.semantics.n_sums
    layer_elements, vocab_elements = _largest_gradients(plan, without=list(filter(plan.is_apart, policy.device_blocks)))
    sums = [layer_elements * ITEM_BYTES[plan.sum_dtype(1)]] * ((n_sums - 1 + n_whole_sums(plan)) * sums_layers(plan))
    n_apart = (n_sums if plan.reduced else 1) - vocab_slot_is_sum(plan)  # of the vocabulary's, those in slots of their own
    sums += [vocab_elements * ITEM_BYTES["fp32"]] * n_apart
    if sums:
        yield Arena("sums", Place.DEVICE, tuple(sums))
    if ranks > 1:
        yield Arena("received", Place.DEVICE, (2 * ranks * plan.exchanged_elements() * ITEM_BYTES["fp32"],))
    if squared := plan.squared:
        yield Arena("squares", Place.DEVICE, tuple(_aligned(SQUARE_BYTES * len(blocks[b].trained)) for b in squared))


def _of_blocks(plan: Setup, of: Callable[[int], int]) -> list[int]:
    """A number of each block, asked of one of each sort."""
    known = {blocks[0]: of(blocks[0]) for blocks in plan.workload.classes}
    return [known[first] for first in plan.workload.first_alike]


def _largest(of_blocks: Sequence[int]) -> tuple[int, int]:
    """The largest of the layers' numbers, and of the embedding's and the head's."""
    return max(of_blocks[1:-1]), max(of_blocks[0], of_blocks[-1])


def leaving_bytes(plan: Setup, block: int) -> int:
    """Of the device's slot through which a block's gradient leaves, or a rank's part of it."""
    like = 1 if plan.workload.blocks[block].kind is BlockKind.LAYER else 0
    return plan.gradient_elements(block) // plan.semantics.ranks * ITEM_BYTES[plan.gradient_dtype(like)]


def _largest_gradients(plan: Setup, without: Sequence[int] = ()) -> tuple[int, int]:
    """Of a layer's gradient, and of the embedding's or the head's, those of some blocks apart."""
    return _largest([0 if b in without else n for b, n in enumerate(_of_blocks(plan, plan.gradient_elements))])


def _activation_bytes(plan: Setup) -> list[int]:
    return _of_blocks(plan, lambda b: _aligned(plan.workload.blocks[b].boundary_bytes))[:-1]


def _host_arenas(plan: Setup) -> Iterator[Arena]:
    policy = plan.policy
    on_device = {*policy.device_blocks}  # which have nothing here
    parts = _of_blocks(plan, lambda b: sum(plan.state_bytes(plan.part_elements(b)).values()))
    in_state = [n_bytes * (b not in on_device) for b, n_bytes in enumerate(parts)]
    if not plan.workload.trains_all:
        in_state = [n_bytes + plan.frozen_bytes(b) * (b not in policy.disk_blocks) for b, n_bytes in enumerate(in_state)]
    in_state += [parts[b] for b in policy.speculate_blocks]
    yield Arena("state", Place.HOST, tuple(in_state))
    if policy.disk_blocks:
        yield Arena("frozen", Place.HOST, (max(map(plan.read_bytes, policy.disk_blocks)),) * N_READ_SLOTS)
    sent = _of_blocks(plan, lambda b: plan.gradient_elements(b) // plan.semantics.ranks * ITEM_BYTES[plan.host_gradient_dtype(b)])
    gradients = [n_bytes * (b not in on_device) for b, n_bytes in enumerate(sent)]
    if eager_ring(plan):
        layers = gradients[1:-1]
        gradients[1:-1] = [max(layers)] * min(N_EAGER_SLOTS, len(layers))
    yield Arena("host_gradients", Place.HOST, tuple(gradients) * (1 if plan.reduced else plan.semantics.n_sums))
    if not plan.reduced:
        layer_elements, vocab_elements = _largest_gradients(plan, without=policy.device_blocks)
        staging = (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * N_STAGING_SLOTS
        yield Arena("staging", Place.HOST, (*staging, vocab_elements * ITEM_BYTES["fp32"]))
    if policy.offload_blocks:
        saved = map(_aligned, plan.of_tiers(policy.offload_blocks, "slot_bytes"))
        yield Arena("offloaded", Place.HOST, tuple([n_bytes for n_bytes in saved for _ in range(policy.accumulation_group)]))
    if policy.spill_blocks:
        sizes = _activation_bytes(plan)
        yield Arena("spilled", Place.HOST, tuple([sizes[b] for b in policy.spill_blocks for _ in range(policy.accumulation_group)]))
    squares = _of_blocks(plan, lambda b: _aligned(SQUARE_BYTES * plan.norm_numbers(b)))
    n_clip = 1 if plan.semantics.ranks == 1 else plan.semantics.ranks * plan.shared_numbers()
    yield Arena("norm", Place.HOST, (*squares, _aligned(SQUARE_BYTES * n_clip)))
