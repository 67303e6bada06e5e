"""Combinations of model, semantics and policy that are rejected."""

from penstock.runtime.errors import PlanError

from .objective import SCORE
from .policy import LEAVE, Policy, Semantics, Update
from .workload import Saved, Workload


def refuse_illegal(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    """Raise a one-line PlanError for a policy that is illegal with this workload and semantics."""
    if semantics.compute_dtype == "fp32" and semantics.master_dtype in ("bf16", "split24"):
        raise PlanError(f"fp32 compute from a {semantics.master_dtype} master gains nothing; use --compute bf16 or --master fp32")
    if semantics.weight_rounding == "stochastic" and semantics.master_dtype not in ("bf16", "split24"):
        raise PlanError("only a master of less than fp32 is rounded stochastically; use --optimizer adamw:master=bf16")
    if semantics.weight_rounding == "half_up" and semantics.master_dtype == "split24":
        raise PlanError("a split24 master is rounded stochastically; use --optimizer adamw:master=split24")
    refuse_products(semantics)
    refuse_sum_groups(semantics)
    refuse_half_pairs(semantics)
    _refuse_ranks(workload, semantics, policy)
    if policy.update is Update.EAGER and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError("eager updates need --clip-norm none and --on-nonfinite stop: the norm is known only after backward")
    if policy.speculate_blocks and policy.update is not Update.DEFERRED:
        raise PlanError("speculate_blocks are settled when the norm is known; they need update deferred")
    _refuse_frozen(workload, semantics, policy)
    _refuse_gradients(workload, semantics, policy)
    _refuse_blocks(workload, semantics, policy)


def refuse_products(semantics: Semantics) -> None:
    """Raise PlanError unless FP8 products have bf16 weights, or under adapters weights in their format, and no others do."""
    base, works = semantics.base, "--train lora --base fp8-rows --compute fp8"
    if base == "fp8-rows" and semantics.train.lora is None:
        raise PlanError(f"--base fp8-rows is for adapters: leave it out, or use {works}")
    if semantics.products == "compute":
        if base == "fp8-rows":
            raise PlanError("--base fp8-rows is multiplied as it is stored: add --compute fp8; to compute in bf16 use fp8 or int8")
        return
    if semantics.compute_dtype != "bf16":
        raise PlanError(f"--compute fp8 computes all else in bf16, not {semantics.compute_dtype}; leave out compute_dtype")
    if semantics.train.lora is None and base != "bf16":
        raise PlanError(f"--compute fp8 without adapters quantises bf16 weights: leave out --base {base}, or use {works}")
    if semantics.train.lora is not None and base != "fp8-rows":
        why = "no kernel here multiplies its blocks of 128 x 128" if base == "fp8" else "it multiplies E4M3 with a scale per row"
        raise PlanError(f"--compute fp8 with --base {base}: {why}; use --base fp8-rows --compute fp8")


def refuse_sum_groups(semantics: Semantics) -> None:
    """Raise PlanError unless micro-batches form `sum_groups` equal groups for a balanced binary tree."""
    n, n_groups = semantics.n_micro_batches, semantics.sum_groups
    if n % n_groups or n_groups.bit_count() > 1:
        raise PlanError(f"a step of {n} micro-batches has no {n_groups} sum groups; choose a power of two that divides them")


def refuse_half_pairs(semantics: Semantics) -> None:
    """Raise PlanError if a micro-batch splits a unit of the loss, or no kernel computes the loss as planned."""
    objective = semantics.objective
    if semantics.micro_batch % objective.rows_each or semantics.batch_size % objective.rows_each:
        how = "must share a micro-batch; choose multiples for --batch-size and --micro-batch"
        raise PlanError(f"--loss {objective.name}: each {objective.rows_each} sequences {how}")
    if objective.n_labels is not None and not semantics.train.trains(SCORE):
        raise PlanError(f"--loss {objective.name}: nothing would train its new head; use --train all, lora, or names:{SCORE},...")
    if objective.takes_eager and semantics.loss != "eager":
        raise PlanError(f"--loss {objective.name}: no fused kernel computes it; plan it with loss: eager")


def _refuse_frozen(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    """Raise PlanError for settings that require all weights to be trained."""
    if workload.trains_all:
        if semantics.base != "bf16":
            raise PlanError(f"--base {semantics.base}: trained weights cannot be packed, and all are trained; add --train lora")
        return
    if workload.first_trained == len(workload.blocks):
        raise PlanError(f"--train {semantics.train}: selects no weight of this model")
    if policy.update is Update.EAGER or policy.speculate_blocks:
        raise PlanError("frozen weights require updates after the global norm: use update barrier or deferred")
    if policy.device_blocks not in ((), workload.mixed) or policy.square_on_device:
        how = "device_blocks must be all partly trained blocks, or none; leave out square_on_device"
        raise PlanError(f"with frozen weights, {how}")
    if policy.device_blocks and semantics.gradient_dtype != "fp32":
        raise PlanError("the device sums gradients of partly trained blocks in fp32: use --gradient-dtype fp32")
    first = workload.first_trained
    if any(b < first - 1 for b in policy.spill_blocks) or any(policy.saved(b) is not Saved.INPUT for b in range(1, first)):
        raise PlanError(f"backward ends at block {first}; spill and save no activations of blocks below it")


def _refuse_ranks(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    """Raise PlanError for settings that several ranks do not support."""
    if semantics.ranks == 1:
        return
    if semantics.all_ranks.shared_by(semantics.ranks) != semantics:
        raise PlanError(f"{semantics.ranks} ranks do not share the step equally; plan again")
    if workload.tied and len(workload.blocks[0].trained) > 1:
        raise PlanError("several ranks need a tied weight to be the only trained weight of its block; use one GPU")
    all_summed = policy.sum_blocks == tuple(b for b, block in enumerate(workload.blocks) if block.trained)
    if policy.accumulation_group < semantics.n_micro_batches and not all_summed:
        how = "all micro-batches of a rank must be in one accumulation_group, or all trained blocks in sum_blocks"
        raise PlanError(f"several ranks exchange whole sums: {how}")
    if policy.square_on_device or policy.device_blocks:
        raise PlanError("with several ranks no device holds a whole gradient; leave out square_on_device and device_blocks")


def can_read(workload: Workload, semantics: Semantics) -> list[int]:
    """Layers with frozen weights that may be on a disk."""
    layers = range(1, workload.n_layers + 1) if semantics.ranks == 1 and not workload.trains_all else ()
    return [b for b in layers if any(p.frozen and p.tied_to is None for p in workload.blocks[b].parameters)]


def can_square(workload: Workload, semantics: Semantics) -> range:
    """Blocks that may have whole gradients on the device. Ranks have parts."""
    return range(0 if semantics.ranks > 1 else workload.n_layers + 2)


def joins_tied(workload: Workload, semantics: Semantics, policy: Policy) -> bool:
    """True if the device adds both gradients of a tied weight; otherwise the host does."""
    return workload.tied and semantics.ranks == 1 and len(workload.blocks) - 1 in policy.sum_blocks


def vocabulary(workload: Workload) -> list[int]:
    """Embedding and head, if trained. They share a gradient slot, so their gradients are summed in the same place."""
    return [b for b in (0, len(workload.blocks) - 1) if workload.blocks[b].trained]


def can_stay(workload: Workload, semantics: Semantics) -> list[int]:
    """Blocks with state that a device may hold: whole gradients there, and updates bitwise identical to the host's."""
    blocks, multiple = workload.blocks, semantics.device_multiple
    added = vocabulary(workload) if workload.tied and not workload.trains_all else ()  # by the host
    return [b for b in can_square(workload, semantics) if blocks[b].trained_divisor % multiple == 0 and b not in added]


def _refuse_gradients(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    if policy.accumulation_group > semantics.n_micro_batches:
        raise PlanError(f"a group of {policy.accumulation_group} micro-batches, but a step has {semantics.n_micro_batches}")
    is_one_group = policy.accumulation_group == semantics.n_micro_batches
    mixed, one_group = {*policy.device_blocks}.intersection(workload.mixed), "all micro-batches in one group"
    _refuse_sums(workload, semantics, policy, is_one_group, mixed)
    if not is_one_group and {*policy.device_blocks} - mixed - {*policy.sum_blocks}:
        raise PlanError(f"device_blocks need {one_group}, or the blocks in sum_blocks: else the host sums gradients")
    if not is_one_group and policy.square_on_device and not policy.sum_blocks:
        raise PlanError(f"square_on_device needs {one_group}, or sum_blocks: else the host sums gradients")
    host_adds = workload.tied and not joins_tied(workload, semantics, policy)
    on_device = {*policy.device_blocks}.intersection(vocabulary(workload))
    if workload.tied and on_device and (host_adds or len(on_device) == 1):
        how = "both in device_blocks and in sum_blocks: else the host adds their gradients"
        raise PlanError(f"embedding and head share a weight, so its state is on the device only with {how}")
    if policy.device_blocks and workload.trains_all and policy.update is not Update.DEFERRED:
        raise PlanError("device_blocks are updated on the device as soon as the norm is known; they need update deferred")
    if not {*policy.device_blocks}.isdisjoint(policy.speculate_blocks):
        raise PlanError("device_blocks have no gradient on the host: leave them out of speculate_blocks")


def _refuse_sums(workload: Workload, semantics: Semantics, policy: Policy, is_one_group: bool, mixed: set[int]) -> None:
    """Raise PlanError for illegal `sum_blocks`. `mixed`: partly trained blocks, which the device sums with or without the list."""
    if not policy.sum_blocks:
        return
    summed, both = {*policy.sum_blocks}, vocabulary(workload)
    allowed = {b for b, block in enumerate(workload.blocks) if block.trained} - mixed
    if refused := [b for b in policy.sum_blocks if b not in allowed]:
        raise PlanError(f"sum_blocks: block {refused[0]} is not trained, or its sum is on the device as it is in device_blocks")
    if not summed | mixed >= {*both}:
        raise PlanError("sum_blocks need embedding and head, if trained: both share a gradient slot")
    if is_one_group and (policy.sum_blocks != tuple(both) or not joins_tied(workload, semantics, policy)):
        how = "may list embedding and head of a tied weight, or nothing"
        raise PlanError(f"with all micro-batches in one group, the device sums every gradient: sum_blocks {how}")
    if policy.boundary_stride > 1:
        raise PlanError("boundary_stride above 1 saves device memory and excludes sum_blocks; leave one out")


def _refuse_blocks(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    n_layers = workload.n_layers
    for name, blocks, legal in (
        ("resident_blocks", policy.resident_blocks, range(n_layers + 2)),
        ("speculate_blocks", policy.speculate_blocks, range(n_layers + 2)),
        ("spill_blocks", policy.spill_blocks, range(n_layers)),
        ("device_blocks", policy.device_blocks, can_square(workload, semantics)),
        ("sum_blocks", policy.sum_blocks, range(n_layers + 2)),
    ):
        if any(b not in legal for b in blocks) or list(blocks) != sorted(set(blocks)):
            raise PlanError(f"{name} must be blocks {legal.start}..{legal.stop - 1} in ascending order, each once")
    of_disk = {*policy.disk_blocks}
    if not of_disk <= {*can_read(workload, semantics)} or list(policy.disk_blocks) != sorted(of_disk):
        raise PlanError("disk_blocks must be layers with frozen weights, of one GPU's plan, in ascending order, each once")
    if any(workload.blocks[b].trained and b not in policy.device_blocks for b in of_disk.intersection(policy.resident_blocks)):
        how = "cannot be trained on the host, because it is read once"
        raise PlanError(f"a block in disk_blocks and in resident_blocks {how}")
    if uneven := {*policy.device_blocks}.difference(can_stay(workload, semantics)):
        how = f"a number of elements that is no multiple of {semantics.device_multiple}; leave it to the host"
        raise PlanError(f"device_blocks: block {min(uneven)} has parameters of {how}")
    if len(policy.save) > n_layers:
        raise PlanError(f"save names layer {len(policy.save)}, but the model has {n_layers} layers")
    if policy.save[-1:] == (Saved.INPUT,):
        raise PlanError("save ends with a layer that saves its input, which is the default; leave it out")
    if any(policy.saved(b + 1) is Saved.ALL for b in policy.spill_blocks):
        raise PlanError("a layer that saves all needs its input on the device: leave the block before it out of spill_blocks")
    for b, saved in dict.fromkeys(zip(workload.first_alike[1:], policy.save, strict=False)):
        if any(blocks[b].recompute(saved) is None for blocks in (workload.blocks, workload.smaller) if blocks):
            raise PlanError(f"this model's layers cannot save only {saved}; leave `{saved}` out of save")
    offloaded = policy.offload_blocks
    if any(policy.saved(b) not in LEAVE for b in offloaded) or list(offloaded) != sorted({*offloaded}):
        raise PlanError("offload_blocks must be layers that save attention or products, in ascending order, each once")
    if policy.boundary_stride > 1 and (policy.spill_blocks or any(saved is not Saved.INPUT for saved in policy.save)):
        raise PlanError("boundary_stride above 1 excludes save and spill_blocks; leave them out")
    if policy.boundary_stride > n_layers:
        raise PlanError(f"boundary_stride is {policy.boundary_stride}, but the model has {n_layers} layers")
