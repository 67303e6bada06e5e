"""Check that this machine has the kernels that a plan names, because they decide bits and time."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import torch

from penstock.runtime.errors import PlanError
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.plan import Plan, Semantics
from penstock.runtime.plan.footprint import CUDA_HEAD_ELEMENTS
from penstock.runtime.plan.policy import AttentionKernel

WORDS: Mapping[AttentionKernel, str] = {
    "flash": "FlashAttention",
    "deterministic": "FlashAttention with sums in a fixed order",
    "cudnn": "cuDNN's attention",
}
_DISTRIBUTIONS = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


def refuse_missing_libraries(semantics: Semantics, device: str) -> None:
    """PlanError if the plan names a library kernel and the device is no GPU or the package cannot be imported."""
    for name in semantics.library_kernels:
        package = name.partition(".")[0]
        if device != "cuda":
            raise PlanError(f"the plan computes with {name}, which needs a GPU; plan again with --kernels eager")
        if find_spec(package) is None:
            remedy = f"pip install {_DISTRIBUTIONS[package]}, or plan again with --kernels eager"
            raise PlanError(f"the plan computes with {name}, which is not installed here: {remedy}")
        try:
            import_module(package)
        except Exception as error:  # any failure of a build for another PyTorch or GPU
            why = " ".join(str(error).split())[:120]
            raise PlanError(f"the plan computes with {name}, which cannot be imported ({why}); install it again") from None


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
    kernel, dtype = plan.semantics.attention_kernel, plan.semantics.compute_dtype
    attentions = [b.attention for b in plan.workload.blocks if b.attention is not None]
    has_sinks = any(a.sinks for a in attentions)
    if not attentions or plan.semantics.attention != "sdpa" or (kernel == "flash" and not has_sinks):  # PyTorch falls back from it
        return
    n_heads, width = attentions[0].n_heads, attentions[0].head_dim
    if (has_sinks and width % CUDA_HEAD_ELEMENTS) or not _can_use(kernel, n_heads, width, DTYPE[dtype]):
        how = "--kernels eager" if kernel != "deterministic" else "--kernels eager, and run without --deterministic"
        lacks = f"which this GPU or this version of PyTorch does not support for {n_heads} heads of {width} in {dtype}"
        raise PlanError(f"the plan uses {WORDS[kernel]}, {lacks}; plan again with {how}")


def _can_use(kernel: AttentionKernel, n_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    q = torch.zeros(1, n_heads, 128, head_dim, dtype=dtype, device="cuda", requires_grad=True)
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    if kernel == "cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(params)
    return torch.backends.cuda.can_use_flash_attention(params)
