"""Which policies are legal, and which memory do they need?"""

from collections.abc import Iterator

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Policy, Semantics, Setup, Update
from runtime.plan.workload import ITEM_BYTES, Saved, Workload

N_STAGING_SLOTS = 2  # host slots for unreduced gradients: one is filled while the other is added
N_EAGER_SLOTS = 2  # host slots for gradients of layers when updates are eager: one is filled while the other is used
SLOT_ALIGN_BYTES = 256
SQUARE_BYTES = 8  # the sum of a tensor's squares, fp64


def refuse_illegal(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    """PlanError, in a line, for a policy that is not legal with this workload and semantics."""
    if semantics.compute_dtype == "fp32" and semantics.master_dtype == "bf16":
        raise PlanError("fp32 compute from a bf16 master gains nothing; use --compute bf16 or --master fp32")
    if policy.update is Update.EAGER and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError("eager updates need --clip-norm none and --on-nonfinite stop: the norm is known only after backward")
    if policy.speculate_blocks and policy.update is not Update.DEFERRED:
        raise PlanError("speculate_blocks are settled when the norm is known; they need update deferred")
    _refuse_gradients(semantics, policy)
    _refuse_blocks(workload, policy)


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
        if any(workload.blocks[b].recompute(saved) is None for b in blocks):
            raise PlanError(f"this model's layers cannot save only {saved}; leave {saved.removesuffix('s')}_blocks empty")
    if policy.boundary_stride > 1 and (policy.spill_blocks or any(saving.values())):
        raise PlanError("with boundary_stride above 1 layers keep nothing and no boundary spills")
    if policy.boundary_stride > n_layers:
        raise PlanError(f"boundary_stride is {policy.boundary_stride}, but there are {n_layers} layers")


def staying(plan: Setup) -> list[int]:
    """The blocks, the head apart, whose output has slots of its own on the device."""
    stride, last = plan.policy.boundary_stride, plan.workload.n_layers
    spilled = set(plan.policy.spill_blocks)
    return [b for b in range(last + 1) if b not in spilled and (b % stride == 0 or b == last)]


def spill_ring_slots(group: int) -> int:
    """Boundaries of a spilling model on the device at a time: those computed from, those computed, and one that leaves or comes."""
    return 2 * group + 1


def vocab_slot_is_sum(plan: Setup) -> bool:
    """Whether the vocabulary blocks' slot for gradients is fp32: where it holds the running sum itself, or the host adds up."""
    return plan.workload.tied or not plan.reduced


def sums_layers(plan: Setup) -> bool:
    """Whether the device adds up layers' gradients."""
    return plan.reduced and plan.semantics.n_micro_batches > 1


def eager_ring(plan: Setup) -> bool:
    """Whether the layers' gradients on the host share a few slots."""
    return plan.policy.update is Update.EAGER and plan.reduced


def _squares_bytes(plan: Setup) -> tuple[int, ...]:
    """Of the slots for sums of squares, one fp64 per parameter of the block."""
    blocks = plan.workload.blocks
    return tuple(_aligned(SQUARE_BYTES * len(blocks[b].parameters)) for b in plan.policy.square_blocks)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def arenas_of(plan: Setup) -> Iterator[Arena]:
    """Every arena of the plan, with exact slot sizes."""
    yield from _device_arenas(plan)
    yield from _host_arenas(plan)


def _device_arenas(plan: Setup) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    item, layer_elements, vocab_elements = ITEM_BYTES[plan.semantics.compute_dtype], *_largest_elements(plan)
    resident = [blocks[b].slot_elements * item for b in policy.resident_blocks]
    yield Arena(
        "weights", Place.DEVICE, (*(layer_elements * item,) * (policy.prefetch_depth + 1), vocab_elements * item, *resident)
    )
    group, activation_bytes = policy.group_micro_batches, _activation_bytes(plan)
    activations = [activation_bytes[b] for b in staying(plan) for _ in range(group)]
    if policy.spill_blocks:
        activations += [max(activation_bytes[b] for b in policy.spill_blocks)] * spill_ring_slots(group)
    activations += [max(activation_bytes)] * (policy.boundary_stride - 1) * group
    yield Arena("activations", Place.DEVICE, tuple(activations))
    of_layers = (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * policy.gradient_slots
    yield Arena("gradients", Place.DEVICE, (*of_layers, vocab_elements * ITEM_BYTES[plan.gradient_dtype(0)]))
    sums = [layer_elements * ITEM_BYTES["fp32"]] if sums_layers(plan) else []
    sums += [] if vocab_slot_is_sum(plan) else [vocab_elements * ITEM_BYTES["fp32"]]
    if sums:
        yield Arena("sums", Place.DEVICE, tuple(sums))
    if policy.square_blocks:
        yield Arena("squares", Place.DEVICE, _squares_bytes(plan))


def _largest_elements(plan: Setup) -> tuple[int, int]:
    """Of a layer's slot, and of the embedding's or the head's."""
    blocks = plan.workload.blocks
    return max(b.slot_elements for b in blocks[1:-1]), max(blocks[0].slot_elements, blocks[-1].slot_elements)


def _activation_bytes(plan: Setup) -> list[int]:
    return [_aligned(b.boundary_bytes) for b in plan.workload.blocks[:-1]]


def _host_arenas(plan: Setup) -> Iterator[Arena]:
    blocks, policy = plan.workload.blocks, plan.policy
    per_param = sum(plan.state_bytes().values())
    in_state = [*range(len(blocks)), *policy.speculate_blocks]
    yield Arena("state", Place.HOST, tuple(blocks[b].host_elements * per_param for b in in_state))
    gradients = [b.slot_elements * ITEM_BYTES[plan.host_gradient_dtype(i)] for i, b in enumerate(blocks)]
    if eager_ring(plan):
        layers = gradients[1:-1]
        gradients[1:-1] = [max(layers)] * min(N_EAGER_SLOTS, len(layers))
    yield Arena("host_gradients", Place.HOST, tuple(gradients))
    if not plan.reduced:
        layer_elements, vocab_elements = _largest_elements(plan)
        staging = (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * N_STAGING_SLOTS
        yield Arena("staging", Place.HOST, (*staging, vocab_elements * ITEM_BYTES["fp32"]))
    if policy.spill_blocks:
        sizes = _activation_bytes(plan)
        yield Arena("spilled", Place.HOST, tuple(sizes[b] for b in policy.spill_blocks for _ in range(policy.group_micro_batches)))
    n_parameters = sum(len(b.parameters) for b in blocks)
    yield Arena("norm", Place.HOST, (_aligned(SQUARE_BYTES * n_parameters), *_squares_bytes(plan)))
