"""Text descriptions of a policy and of training semantics."""

from collections import Counter

from penstock.planner.model.workload import without_adapters
from penstock.runtime.plan import Plan, Policy, Semantics, Update
from penstock.runtime.plan.packed import is_packed
from penstock.runtime.plan.train import is_adapter
from penstock.runtime.plan.workload import Saved
from penstock.runtime.units import on_one_line, show_count

MOST_NAMES = 5  # of matrices without adapters
UPDATE_WORDS = {
    Update.EAGER: "block by block, as gradients arrive",
    Update.BARRIER: "when the norm is known, all before the next step",
    Update.DEFERRED: "when the norm is known, block by block into the next forward",
}


def clauses(policy: Policy, plan: Plan) -> dict[str, str]:
    """Describe a schedule: one clause per topic, none for defaults."""
    traits = {
        "order": _order(policy, plan.semantics.n_micro_batches),
        "weights": f"{counted(policy.prefetch_depth, 'layer')} prefetched",
        "gradients": counted(policy.gradient_slots, "gradient slot"),
        "activations": _saved(policy, plan.workload.n_layers),
    }
    for topic, blocks, words in (
        ("resident", policy.resident_blocks, "weights of {} stay on the device"),
        ("spilled", policy.spill_blocks, "layer inputs of {} wait on the host (activation offload)"),
        ("disk", policy.disk_blocks, "frozen weights of {} on the disk, read before each load"),
        ("state", policy.device_blocks, "optimizer states of {} on the device, which updates them"),
    ):
        if blocks:
            traits[topic] = words.format(counted(len(blocks), "block"))
    if policy.square_on_device:
        traits["norm"] = "gradients squared on the device, for the global norm"
    early = f"; {counted(len(policy.speculate_blocks), 'block')} before it is known" if policy.speculate_blocks else ""
    return traits | {"update": f"{policy.update} update: {UPDATE_WORDS[policy.update]}{early}"}


def _order(policy: Policy, n_micro_batches: int) -> str:
    if n_micro_batches == 1:
        return "one micro-batch: no gradient accumulation"
    if policy.accumulation_group >= n_micro_batches:
        return "gradient accumulation, layer by layer over all micro-batches"
    if policy.accumulation_group > 1:
        return f"gradient accumulation, layer by layer over groups of {policy.accumulation_group} micro-batches"
    return "gradient accumulation, one micro-batch after another"


def _saved(policy: Policy, n_layers: int) -> str:
    """Describe saved activations: `saved for backward: all of 5 layers, the inputs of 24 layers; the rest is recomputed (...)`."""
    words = {
        Saved.ALL: "all",
        Saved.PRODUCTS: "matmul outputs",
        Saved.ATTENTION: "attention's output",
        Saved.INPUT: "the inputs" if policy.boundary_stride == 1 else f"one input in {policy.boundary_stride}",
    }
    n_saving = Counter(policy.saved(b) for b in range(1, n_layers + 1))
    n_away = Counter(policy.saved(b) for b in policy.offload_blocks)
    saved = []
    for tier, text in words.items():
        n, away = n_saving[tier], n_away[tier]
        where = "" if not away else " (on the host)" if away == n else f" ({away} of them on the host)"
        saved += [f"{text} of {counted(n, 'layer')}{where}"] if n else []
    again = "" if n_saving[Saved.ALL] == n_layers else "; the rest is recomputed (activation checkpointing)"
    return f"saved for backward: {', '.join(saved)}{again}"


def kernels_in_words(semantics: Semantics) -> str:
    """Describe kernels except matrix products: `fused norm, loss and pointwise; cudnn attention; fla.chunk_gated_delta_rule`."""
    fused = [part for part in ("norm", "loss", "pointwise") if getattr(semantics, part) != "eager"]
    attention = semantics.attention_kernel if semantics.attention == "sdpa" else "eager"
    kernels = f"fused {', '.join(fused[:-1])}{' and ' if fused[:-1] else ''}{fused[-1]}" if fused else "eager"
    return "; ".join([kernels, f"{attention} attention", *semantics.library_kernels])


def trained_in_words(plan: Plan) -> str:
    """Describe trained parameters: `23 M parameters: lora:r=16,alpha=32, at 192 matrices, not mlp.experts or the head; ...`."""
    base, train = plan.semantics.base, on_one_line(str(plan.semantics.train), 160)
    if plan.semantics.train.lora is not None:
        names, n = without_adapters(plan.workload), sum(is_adapter(p.name) for b in plan.workload.blocks for p in b.trained) // 2
        names = names if len(names) < MOST_NAMES else [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} others"]
        train += f", beside {n:,} matrices, not {', '.join(names)}{' or ' if names else ''}the head"
    frozen = "the others frozen" + (f", their matrices quantized to {base}" if base != "bf16" else "")
    return f"{show_count(plan.workload.n_trained)} parameters: {train}; {frozen}"


def scaled_in_words(plan: Plan) -> str:
    """Name the products in FP8, and the layers' matrices that stay in bf16: `with q_proj, o_proj in FP8, ...; in bf16: gate`."""
    names: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for block in plan.workload.blocks[1:-1]:
        for p in (p for p in block.parameters if len(p.shape) > 1 and not (is_adapter(p.name) or p.name.endswith("_bias"))):
            names[is_packed(p.name, p.shape, "fp8-rows")][p.name.removeprefix(f"{block.name}.").removesuffix(".weight")] = None
    rest = f"; layers' matrices in bf16: {', '.join(names[False])}" if names[False] else ""
    return f"with {', '.join(names[True])} in FP8, a scale per row (docs/fp8.md){rest}"


def batch_in_words(semantics: Semantics) -> str:
    """Describe a batch: `67 sequences of 512 tokens, in 5 micro-batches of 16, the last of 3`; per rank for several ranks."""
    batch = f"{counted(semantics.all_ranks.batch_size, 'sequence')} of {semantics.seq_len:,} tokens"
    last = f", the last of {semantics.n_left}" if semantics.n_left else ""
    n_groups, ranks = semantics.all_ranks.sum_groups, semantics.ranks
    groups = f", in {n_groups} sum groups" if n_groups > 1 else ""
    gpus = f" on each of {ranks} GPUs" if ranks > 1 else ""
    return f"{batch}, in {counted(semantics.n_micro_batches, 'micro-batch', 'es')} of {semantics.micro_batch}{last}{gpus}{groups}"


def counted(n: int, noun: str, plural: str = "s") -> str:
    """Format a count: `1 layer`, `2 layers`."""
    return f"{n} {noun}{'' if n == 1 else plural}"
