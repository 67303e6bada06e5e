"""Selection of a GPU's attention kernel, which plans name because it decides bits and time.

Packed documents always use FlashAttention, because cuDNN compiles and caches a plan for each length.
"""

from collections.abc import Mapping

import torch

from penstock.runtime.errors import PlanError
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.plan import Plan, Semantics
from penstock.runtime.plan.policy import AttentionKernel

WORDS: Mapping[AttentionKernel, str] = {
    "flash": "FlashAttention",
    "deterministic": "FlashAttention with sums in a fixed order",
    "cudnn": "cuDNN's attention",
}


def use_attention(kernel: AttentionKernel) -> None:
    """Select the fused attention kernel of this process. Calls that it does not support (masks) use the memory-efficient one."""
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")


def refuse_any_order(semantics: Semantics) -> None:
    """PlanError if attention, or a kernel of another package, may sum in an order that depends on timing."""
    if semantics.library_kernels:
        first = semantics.library_kernels[0]
        raise PlanError(f"--deterministic: the plan uses {first}, which may sum in any order; plan again with --deterministic")
    if semantics.attention == "sdpa" and semantics.attention_kernel != "deterministic":
        how = f"{WORDS[semantics.attention_kernel]}, which sums in any order; plan again with --deterministic"
        raise PlanError(f"--deterministic: the plan uses {how}")


def refuse_missing_attention(plan: Plan) -> None:
    """PlanError if the GPU lacks the kernel, or the kernel does not support the plan's heads."""
    kernel, blocks = plan.semantics.attention_kernel, plan.workload.blocks
    attention = next((b.attention for b in blocks if b.attention is not None), None)
    if attention is None or plan.semantics.attention != "sdpa" or kernel == "flash":  # PyTorch falls back from it
        return
    if not _can_use(kernel, attention.n_heads, attention.head_dim, DTYPE[plan.semantics.compute_dtype]):
        heads = f"{attention.n_heads} heads of {attention.head_dim} in {plan.semantics.compute_dtype}"
        how = "--kernels eager" if kernel == "cudnn" else "--kernels eager, and run without --deterministic"
        lacks = f"which this GPU or this version of PyTorch does not support for {heads}"
        raise PlanError(f"the plan uses {WORDS[kernel]}, {lacks}; plan again with {how}")


def _can_use(kernel: AttentionKernel, n_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    q = torch.zeros(1, n_heads, 128, head_dim, dtype=dtype, device="cuda", requires_grad=True)
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    if kernel == "cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(params)
    return torch.backends.cuda.can_use_flash_attention(params)
