"""May a plan have this model and this policy?"""

from runtime.errors import PlanError
from runtime.plan import Plan, Policy, Update

from .shape import AGAIN, Shape

MAX_DIMS = 8  # of a weight; a bound on the size of numbers of elements


def check_workload(plan: Plan) -> None:
    """Weights have names of their own, few dimensions, and only the head shares weights with block 0; a smaller last micro-batch
    goes through the same blocks, and fits their slots."""
    blocks = plan.workload.blocks
    last = plan.blocks_of(plan.semantics.n_micro_batches - 1)
    if len(last) != len(blocks):
        raise PlanError(f"the last micro-batch is smaller, and the workload does not say what it takes; {AGAIN}")
    for i, (block, less) in enumerate(zip(blocks, last, strict=True)):
        if (less.kind, less.parameters) != (block.kind, block.parameters) or less.boundary_bytes > block.boundary_bytes:
            raise PlanError(f"block {i}: the smaller last micro-batch has other weights, or a larger output; {AGAIN}")
    owned = {p.name: p.shape for p in blocks[0].parameters}
    for i, block in enumerate(blocks):
        ties = [p.tied_to for p in block.parameters if p.tied_to is not None]
        if len({p.name for p in block.parameters}) != len(block.parameters) or len(set(ties)) != len(ties):
            raise PlanError(f"block {i}: two weights have one name, or are tied to one weight; {AGAIN}")
        for p in block.parameters:
            if len(p.shape) > MAX_DIMS:
                raise PlanError(f"block {i}: weight {p.name!r} has {len(p.shape)} dimensions; {AGAIN}")
            if p.tied_to is not None and (i != len(blocks) - 1 or owned.get(p.tied_to) != p.shape):
                raise PlanError(
                    f"block {i}: weight {p.name!r} is tied, but only the head may share a weight of block 0, in its shape; {AGAIN}"
                )


def check_policy(plan: Plan, shape: Shape) -> None:
    """The policy is legal under the semantics; else PlanError with what to change."""
    policy, semantics = plan.policy, plan.semantics
    if shape.eager and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError(
            "policy: eager updates use a gradient before the norm of all is known; use barrier or deferred, "
            "or --clip-norm none with on_nonfinite stop"
        )
    if policy.group_micro_batches > shape.n_micro_batches:
        raise PlanError(
            f"policy: groups of {policy.group_micro_batches} micro-batches, but a step has {shape.n_micro_batches}; {AGAIN}"
        )
    for name in ("keep_blocks", "attention_blocks", "product_blocks"):
        if not _ascend(getattr(policy, name), range(1, shape.head)):
            raise PlanError(f"policy: {name} must name layers (1 to {shape.head - 1}), in order, each once; {AGAIN}")
    resident, spill = policy.resident_blocks, policy.spill_blocks
    if len(set(resident)) != len(resident) or any(not 0 <= b <= shape.head for b in resident):
        raise PlanError(f"policy: resident_blocks must name blocks (0 to {shape.head}), each once; {AGAIN}")
    if len(set(spill)) != len(spill) or any(not 0 <= b < shape.head - 1 for b in spill):
        raise PlanError(f"policy: spill_blocks must name blocks below the last layer (0 to {shape.head - 2}), each once; {AGAIN}")
    if odd := [b for b in policy.keep_blocks if b - 1 in shape.spilled]:
        raise PlanError(f"policy: block {odd[0]} keeps its activations, but its input spills; {AGAIN}")
    if semantics.compute_dtype == "fp32" and semantics.master_dtype == "bf16":
        raise PlanError("semantics: fp32 compute needs an fp32 master; change compute_dtype or master_dtype")
    _check_saving(plan, shape)
    _check_stride(policy, shape)
    _check_speculation(policy, shape)
    on_host = {0, shape.head} if shape.tied else set()  # where the gradients of a weight's two uses meet
    if not _ascend(policy.square_blocks, range(shape.n_blocks)) or on_host & {*policy.square_blocks}:
        raise PlanError(f"policy: square_blocks must name blocks whose gradients are whole on the device, in order, once; {AGAIN}")
    if policy.square_blocks and not shape.reduced:
        raise PlanError(f"policy: with square_blocks all micro-batches must be in one group, for the device to have sums; {AGAIN}")


def _ascend(blocks: tuple[int, ...], allowed: range) -> bool:
    """Whether they are allowed, in order, and each named once."""
    return list(blocks) == sorted(set(blocks)) and all(b in allowed for b in blocks)


def _check_saving(plan: Plan, shape: Shape) -> None:
    """A layer saves its activations in one way, and in one that the model has."""
    policy = plan.policy
    of_tiers = (*policy.attention_blocks, *policy.product_blocks)
    if twice := sorted({b for b in (*policy.keep_blocks, *of_tiers) if (*policy.keep_blocks, *of_tiers).count(b) > 1}):
        raise PlanError(
            f"policy: layer {twice[0]} is in two of keep_blocks, attention_blocks and product_blocks; name it in one; {AGAIN}"
        )
    for b in sorted(set(range(1, shape.head)) - set(policy.keep_blocks)):
        saved = plan.saved(b)
        if plan.workload.blocks[b].recompute(saved) is None:
            raise PlanError(f"policy: layer {b} cannot recompute from its {saved}; {AGAIN}")


def _check_stride(policy: Policy, shape: Shape) -> None:
    """A stride is no longer than the model, and where outputs are computed again nothing else is saved or spilled."""
    stride = policy.boundary_stride
    if stride == 1:
        return
    if stride > shape.head - 1:
        raise PlanError(f"policy: boundary_stride is {stride}, but there are {shape.head - 1} layers; {AGAIN}")
    for name in ("keep_blocks", "attention_blocks", "product_blocks", "spill_blocks"):
        if getattr(policy, name):
            raise PlanError(f"policy: with a boundary_stride of {stride} there can be no {name}; {AGAIN}")


def _check_speculation(policy: Policy, shape: Shape) -> None:
    """Only updates that wait for the norm of all can be made ahead of it."""
    if policy.speculate_blocks and policy.update is not Update.DEFERRED:
        raise PlanError(f"policy: speculate_blocks need deferred updates, not {policy.update}; {AGAIN}")
    if not _ascend(policy.speculate_blocks, range(shape.n_blocks)):
        raise PlanError(f"policy: speculate_blocks must name blocks (0 to {shape.head}), in order, each once; {AGAIN}")
