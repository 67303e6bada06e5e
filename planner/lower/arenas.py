"""Which policies are legal, and which memory do they need?"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Plan, Policy, Semantics, Update
from runtime.plan.workload import ITEM_BYTES, Saved, Workload

N_STAGING_SLOTS = 2  # host slots for unreduced gradients: one is filled while the other is added
N_EAGER_SLOTS = 2  # host slots for gradients of layers when updates are eager: one is filled while the other is used
SLOT_ALIGN_BYTES = 256
SQUARE_BYTES = 8  # the sum of a tensor's squares, fp64
REMAINDER_BYTES = 2  # what a bf16 weight lacks of its fp32 master
MOMENT_BYTES = 8  # AdamW's two, fp32


def refuse_illegal(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    """PlanError, in a line, for a policy that is not legal with this workload and semantics."""
    if semantics.compute_dtype == "fp32" and semantics.master_dtype == "bf16":
        raise PlanError("fp32 compute from a bf16 master gains nothing; use --compute bf16 or --master fp32")
    if policy.update is Update.EAGER and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError("eager updates need --clip-norm none and --on-nonfinite stop: the norm is known only after backward")
    if policy.storage == "split" and not can_split(semantics):
        raise PlanError(
            "split storage cuts an fp32 master into a bf16 weight and the rest; it needs bf16 compute and an fp32 master"
        )
    if policy.speculate_blocks and policy.update is not Update.DEFERRED:
        raise PlanError("speculate_blocks are settled when the norm is known; they need update deferred")
    _refuse_gradients(semantics, policy)
    _refuse_blocks(workload, policy)


def can_split(semantics: Semantics) -> bool:
    """Whether a master can be stored as the compute weight and the rest of it."""
    return (semantics.compute_dtype, semantics.master_dtype) == ("bf16", "fp32")


def can_square(workload: Workload) -> range:
    """The blocks whose gradients are whole on the device: where a weight is tied, the host adds up what its two uses give."""
    return range(1, workload.n_layers + 1) if workload.tied else range(workload.n_layers + 2)


def _refuse_gradients(semantics: Semantics, policy: Policy) -> None:
    """How gradients move must suit the groups of micro-batches."""
    if policy.group_micro_batches > semantics.n_micro_batches:
        raise PlanError(f"a group of {policy.group_micro_batches} micro-batches, but a step has {semantics.n_micro_batches}")
    if policy.gradient_slots <= policy.offload_late_blocks:
        raise PlanError(
            f"gradients leave {policy.offload_late_blocks} blocks late, so {policy.gradient_slots} gradient slots are too few"
        )
    if policy.group_micro_batches < semantics.n_micro_batches:
        if policy.offload_late_blocks:
            raise PlanError("gradients that are summed on the host leave at once; late ones need all micro-batches in one group")
        if policy.transfer_chunk_bytes is not None:
            raise PlanError("gradients that are summed on the host leave whole; chunks need all micro-batches in one group")
        if policy.square_blocks:
            raise PlanError("gradients that are summed on the host are only whole there; square_blocks need them in one group")


def _refuse_blocks(workload: Workload, policy: Policy) -> None:
    """What the policy says of single blocks."""
    n_layers = workload.n_layers
    layers = range(1, n_layers + 1)
    saving = {
        "keep_blocks": policy.keep_blocks,
        "attention_blocks": policy.attention_blocks,
        "product_blocks": policy.product_blocks,
    }
    for name, blocks, legal in (
        *((name, blocks, layers) for name, blocks in saving.items()),
        ("resident_blocks", policy.resident_blocks, range(n_layers + 2)),
        ("speculate_blocks", policy.speculate_blocks, range(n_layers + 2)),
        ("spill_blocks", policy.spill_blocks, range(n_layers)),
        ("square_blocks", policy.square_blocks, can_square(workload)),
    ):
        if any(b not in legal for b in blocks) or list(blocks) != sorted(set(blocks)):
            raise PlanError(f"{name} must be blocks {legal.start}..{legal.stop - 1} in ascending order, each once")
    if any(b - 1 in policy.spill_blocks for b in policy.keep_blocks):
        raise PlanError("a block that keeps its activations keeps its input too: the block before it cannot spill")
    if len({b for blocks in saving.values() for b in blocks}) < sum(map(len, saving.values())):
        raise PlanError("a layer saves its activations in one way: keep_blocks, attention_blocks and product_blocks must not meet")
    for saved, blocks in ((Saved.ATTENTION, policy.attention_blocks), (Saved.PRODUCTS, policy.product_blocks)):
        if any(workload.blocks[b].recompute(saved, policy.early_stop) is None for b in blocks):
            raise PlanError(f"this model's layers cannot save only {saved}; leave {saved.removesuffix('s')}_blocks empty")
    if policy.boundary_stride > 1 and (policy.spill_blocks or any(saving.values())):
        raise PlanError("with boundary_stride above 1 layers keep nothing and no boundary spills")
    if policy.boundary_stride > n_layers:
        raise PlanError(f"boundary_stride is {policy.boundary_stride}, but there are {n_layers} layers")


def staying(plan: Plan) -> list[int]:
    """The blocks, the head apart, whose output has slots of its own on the device."""
    stride, last = plan.policy.boundary_stride, plan.workload.n_layers
    spilled = set(plan.policy.spill_blocks)
    return [b for b in range(last + 1) if b not in spilled and (b % stride == 0 or b == last)]


def host_slots(plan: Plan) -> list[range]:
    """For each block, the numbers of its chunks' slots in host arenas that have one for every block."""
    ends = accumulate((len(plan.chunks(b)) for b in range(len(plan.workload.blocks))), initial=0)
    return [range(first, end) for first, end in pairwise(ends)]


def spill_ring_slots(group: int) -> int:
    """Boundaries of a spilling model on the device at a time: those computed from, those computed, and one that leaves or comes."""
    return 2 * group + 1


def vocab_slot_is_sum(plan: Plan) -> bool:
    """Whether the vocabulary gradient slot is fp32 and holds the running sum itself."""
    return plan.workload.tied or not plan.reduced


def eager_ring(plan: Plan) -> bool:
    """Whether the layers' gradients on the host share a few slots."""
    return plan.policy.update is Update.EAGER and plan.reduced


def state_bytes_per_param(plan: Plan) -> int:
    """Bytes of weight, master and moments on the host."""
    return sum(_state_bytes(plan).values())


def _state_bytes(plan: Plan) -> dict[str, int]:
    """Bytes per parameter of each host arena that holds what a block has learned."""
    master = ITEM_BYTES[plan.semantics.master_dtype]
    state = {"remainders": REMAINDER_BYTES} if plan.policy.storage == "split" else {"masters": master}
    state["moments"] = MOMENT_BYTES
    if plan.weights_arena == "host_weights":
        state["host_weights"] = ITEM_BYTES[plan.semantics.compute_dtype]
    return state


def _squares_bytes(plan: Plan) -> tuple[int, ...]:
    """Of the slots for sums of squares, one fp64 per parameter of the block."""
    blocks = plan.workload.blocks
    return tuple(_aligned(SQUARE_BYTES * len(blocks[b].parameters)) for b in plan.policy.square_blocks)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def arenas_of(plan: Plan) -> Iterator[Arena]:
    """Every arena of the plan, with exact slot sizes."""
    yield from _device_arenas(plan)
    yield from _host_arenas(plan)


def _device_arenas(plan: Plan) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    item = ITEM_BYTES[plan.semantics.compute_dtype]
    layer_elements = max(b.slot_elements for b in blocks[1:-1])
    vocab_elements = max(blocks[0].slot_elements, blocks[-1].slot_elements)
    group = policy.group_micro_batches
    aligned = _boundary_bytes(plan)
    boundaries = [aligned[b] for b in staying(plan) for _ in range(group)]
    if policy.spill_blocks:
        boundaries += [max(aligned[b] for b in policy.spill_blocks)] * spill_ring_slots(group)
    boundaries += [max(aligned)] * (policy.boundary_stride - 1) * group
    yield Arena("weights", Place.DEVICE, (layer_elements * item,) * (policy.prefetch_depth + 1))
    yield Arena("vocab_weights", Place.DEVICE, (vocab_elements * item,))
    if policy.resident_blocks:
        yield Arena("resident_weights", Place.DEVICE, tuple(blocks[b].slot_elements * item for b in policy.resident_blocks))
    yield Arena("boundaries", Place.DEVICE, tuple(boundaries))
    yield Arena("gradients", Place.DEVICE, (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * policy.gradient_slots)
    yield Arena("vocab_gradients", Place.DEVICE, (vocab_elements * ITEM_BYTES[plan.gradient_dtype(0)],))
    if plan.reduced and plan.semantics.n_micro_batches > 1:
        yield Arena("sums", Place.DEVICE, (layer_elements * 4,))
    if not vocab_slot_is_sum(plan):
        yield Arena("vocab_sums", Place.DEVICE, (vocab_elements * 4,))
    if squares := _squares_bytes(plan):
        yield Arena("squares", Place.DEVICE, squares)


def _boundary_bytes(plan: Plan) -> list[int]:
    return [_aligned(b.boundary_bytes) for b in plan.workload.blocks[:-1]]


def _host_arenas(plan: Plan) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    cut = policy.transfer_chunk_bytes is not None
    # Elements of each chunk of each block: what the block owns, and what its gradient has
    chunks = [[len(c) for c in plan.chunks(i)] if cut else [b.slot_elements] for i, b in enumerate(blocks)]
    owned = [chunks[i] if len(chunks[i]) > 1 else [b.host_elements] for i, b in enumerate(blocks)]
    for name, n_bytes in _state_bytes(plan).items():
        yield Arena(name, Place.HOST, tuple(n * n_bytes for block in owned for n in block))
    if policy.speculate_blocks:
        per_param = state_bytes_per_param(plan)
        yield Arena("shadows", Place.HOST, tuple(n * per_param for b in policy.speculate_blocks for n in owned[b]))
    gradient_bytes = [[n * ITEM_BYTES[plan.host_gradient_dtype(i)] for n in block] for i, block in enumerate(chunks)]
    if eager_ring(plan):
        layers = gradient_bytes[1:-1]
        n_slots = min(N_EAGER_SLOTS * max(map(len, layers)), sum(map(len, layers)))
        gradient_bytes = [gradient_bytes[0], [max(map(max, layers))] * n_slots, gradient_bytes[-1]]
    yield Arena("host_gradients", Place.HOST, tuple(n_bytes for block in gradient_bytes for n_bytes in block))
    if not plan.reduced:
        layer_elements = max(b.slot_elements for b in blocks[1:-1])
        staging = (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * N_STAGING_SLOTS
        yield Arena("staging", Place.HOST, (*staging, max(blocks[0].slot_elements, blocks[-1].slot_elements) * 4))
    if policy.spill_blocks:
        aligned = _boundary_bytes(plan)
        spilled = tuple(aligned[b] for b in policy.spill_blocks for _ in range(policy.group_micro_batches))
        yield Arena("spilled", Place.HOST, spilled)
    if squares := _squares_bytes(plan):
        yield Arena("host_squares", Place.HOST, squares)
    yield Arena("norm", Place.HOST, (SQUARE_BYTES * sum(len(b.parameters) for b in blocks),))  # one fp64 sum of squares per tensor
