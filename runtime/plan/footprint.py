"""Memory of a plan on device and host, by use, for planner, checker and executor. The memory of CUDA and Python is excluded."""

from collections import Counter

from .plan import Plan
from .setup import Place, Setup
from .workload import ITEM_BYTES, Attention, Saved, text_of

# Padded lengths are whole query blocks of torch's CPU attention (32 below 192 tokens, 64 below 768, then 256), but multiples of 64
# below 192 tokens, for fewer distinct lengths. Key blocks have 512 tokens.
SHORT_BLOCK, LONG_BLOCK, LONG_TOKENS = 64, 256, 768
USUAL_WORKSPACE_BYTES = 2**30  # assumed for a GPU without a profile
INT64 = 8  # bytes per position
COMPILER_BYTES = 125_000_000  # numba and the host optimizer's kernels in a process
WIDENED = "FP8 products in fp32"
CUDA_HEAD_ELEMENTS = 8  # torch pads other head widths to a multiple before it calls the kernel


def device_needs(plan: Setup, on_cuda: bool, workspace_bytes: float | None) -> dict[str, int]:
    """Return peak device bytes by use. `workspace_bytes`: of kernels and libraries; None (old profile): excluded, as documents."""
    needs = {a.name: a.n_bytes for a in plan.arenas if a.place is Place.DEVICE}
    needs |= {"kept activations": plan.kept_bytes, "block being computed": plan.transient_bytes}
    if not on_cuda and (mask_bytes := _window_mask_bytes(plan)):
        needs["window mask"] = mask_bytes
    if plan.semantics.products == "fp8" and not on_cuda:
        needs[WIDENED] = widened_bytes(plan)
    if workspace_bytes is not None:
        needs |= {"documents": document_bytes(plan, on_cuda), "kernels and workspaces": round(workspace_bytes)}
    return needs


def planned_device_needs(plan: Plan, on_cuda: bool | None = None) -> dict[str, int]:
    """Return peak device memory by use for the plan's profile, or for the other kind of device, without a profile."""
    device = plan.profile["device"]
    of_cuda, workspace = device["kind"] == "cuda", device.get("workspace_bytes")
    if on_cuda is not None and on_cuda != of_cuda:
        return device_needs(plan, on_cuda, USUAL_WORKSPACE_BYTES if on_cuda else 0.0)
    return device_needs(plan, of_cuda, None if workspace is None else workspace["value"])


def host_needs(plan: Setup, n_here: int = 1) -> dict[str, int]:
    """Return host memory by arena, and of the compiler, for one of `n_here` ranks, which share frozen weights."""
    needs = {a.name: a.n_bytes for a in plan.arenas if a.place is Place.HOST}
    needs["compiler"] = COMPILER_BYTES
    if n_here > 1 and not plan.workload.trains_all:
        frozen_bytes = sum(len(blocks) * plan.frozen_bytes(blocks[0]) for blocks in plan.workload.classes)
        needs["state"] -= frozen_bytes - -(-frozen_bytes // n_here)
    return needs


def _window_mask_bytes(plan: Setup) -> int:
    """Mask (T, T) that attention with sinks makes of a sliding window on a CPU (`runtime/layers/kernels.py`)."""
    semantics, layers = plan.semantics, [block.attention for block in plan.workload.blocks if block.attention is not None]
    makes_mask = any(a.sinks and a.window is not None and a.window < semantics.seq_len for a in layers)
    return makes_mask * (semantics.attention == "sdpa") * semantics.seq_len**2 * ITEM_BYTES[semantics.compute_dtype]


def widened_bytes(plan: Setup) -> int:
    """Peak of torch's CPU kernel in an FP8 product (m, k) @ (k, n) or the gradient of its input: both operands in fp32, a second
    operand by rows, and then another fp32 copy of it, or the result in fp32 and bf16; or two fp32 copies of the first operand. An
    expert may get all rows."""

    def peak_bytes(m: int, k: int, n: int) -> int:
        return max(8 * m * k, 4 * m * k + 5 * k * n + max(4 * k * n, 6 * m * n))

    n_most = 0
    for blocks in plan.workload.classes:
        rows = Counter[tuple[int, int]]()  # of all experts, by k and n
        for m in (m for m in plan.workload.blocks[blocks[0]].matmuls if m.scaled != "no"):
            rows[m.k, m.n] += m.m * m.count * m.grouped
            n_rows = rows[m.k, m.n] if m.grouped else m.m
            n_most = max(n_most, peak_bytes(n_rows, m.k, m.n), peak_bytes(n_rows, m.n, m.k))
    return n_most


def document_bytes(plan: Setup, on_cuda: bool) -> int:
    """Upper bound of additional device memory for packed documents: positions, cosines and sines of each micro-batch of a group;
    fp32 tables of each layer that saves all, beyond those of one sequence; attention tensors of one document, padded on a CPU.
    Without fused attention (no mask), autograd saves attention outputs twice: per document, and concatenated."""
    semantics = plan.semantics
    item_bytes, kept_bytes, turn_bytes = ITEM_BYTES[semantics.compute_dtype], 0, 0
    pads = not on_cuda and semantics.compute_dtype == "bf16"
    n_computed, keeping = padded_tokens(semantics.seq_len) if pads else semantics.seq_len, {*plan.policy.saving(Saved.ALL)}
    for blocks in plan.workload.classes:
        if (attention := plan.workload.blocks[blocks[0]].attention) is None:
            continue
        n_keeping = len(keeping.intersection(blocks))
        n_heads, width = attention.n_heads, attention.head_dim
        n_kv_heads = attention.n_kv_heads or n_heads
        n, table_bytes, wide_bytes = attention.n_sequences, 2 * width * item_bytes, 2 * width * ITEM_BYTES["fp32"]
        joined_bytes = 0 if _calls_fused(plan, attention, on_cuda) else n * n_heads * width * item_bytes
        tables_bytes = n * (table_bytes + INT64) + n_keeping * max(n * table_bytes, (n - 1) * wide_bytes)
        kept_bytes += semantics.seq_len * (tables_bytes + n_keeping * joined_bytes)
        # Peak in backward: gradients of q, k, v and a copy of the sums; if padded, also q, k, v, the output and its gradient.
        n_made, n_padded = n_heads + 2 * n_kv_heads, 3 * n_heads + 2 * n_kv_heads
        token_bytes = (n_made + pads * n_padded) * width * item_bytes + n_heads * ITEM_BYTES["fp32"]
        turn_bytes = max(turn_bytes, n_computed * token_bytes + semantics.seq_len * joined_bytes)
    return plan.policy.accumulation_group * kept_bytes + turn_bytes


def _calls_fused(plan: Setup, attention: Attention, on_cuda: bool) -> bool:
    """True if attention within a document uses a fused kernel without a mask."""
    config = text_of(plan.model.config)
    if plan.semantics.attention != "sdpa" or config.get("attention_dropout"):
        return False
    if attention.window is not None and not attention.sinks:
        return False
    if "v_head_dim" in config:  # values and keys have different widths
        return False
    return not on_cuda or (plan.semantics.compute_dtype != "fp32" and attention.head_dim % CUDA_HEAD_ELEMENTS == 0)


def padded_tokens(n_tokens: int) -> int:
    block = SHORT_BLOCK if n_tokens < LONG_TOKENS else LONG_BLOCK
    return -(-n_tokens // block) * block
