"""Kernel selection: the fastest kernels that a machine supports."""

from dataclasses import replace
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import AttentionKernel, Kernel, Semantics
from penstock.runtime.plan.footprint import CUDA_HEAD_ELEMENTS
from penstock.runtime.plan.workload import Model

from .config import library_kernels
from .workload import attentions, fusible

CUDNN_HEAD_DIM = 128  # largest head width of cuDNN's backward, in multiples of eight
# Fields of Semantics that select a kernel, with the alternative to `eager`
FUSED = {"norm": "fused", "loss": "online", "pointwise": "fused"}


def with_kernels(
    model: Model, semantics: Semantics, profile: Profile, kernels: Kernel | None = None, deterministic: bool = False
) -> Semantics:
    """Return the semantics with every kernel chosen: `kernels`, or by default fused on a GPU and eager on a CPU.

    `deterministic` excludes kernels with atomic additions. Attention with sinks is eager if `kernels` is, or if FlashAttention
    does not take it: in fp32 on a GPU, or with other head widths.
    """
    if semantics.products == "fp8":
        _ = profile.fp8_rate_fraction  # raises if the machine has none
    is_eager, kernels = kernels == "eager", kernels or ("fused" if profile.device.kind == "cuda" else "eager")
    fused = fusible(model) if kernels == "fused" else frozenset()
    fused -= {"loss"} if semantics.objective.takes_eager else set()
    chosen: dict[str, Any] = {part: kernel if part in fused else "eager" for part, kernel in FUSED.items()}
    # fla's kernels are for bf16; the convolution accumulates its weight gradient with atomics
    takes_any = kernels == "fused" and profile.device.kind == "cuda" and semantics.compute_dtype == "bf16"
    layers = attentions(model, semantics.seq_len)
    takes_heads = semantics.compute_dtype != "fp32" and not any(a.head_dim % CUDA_HEAD_ELEMENTS for a in layers)
    is_fused = not is_eager and (takes_heads or profile.device.kind != "cuda")
    if any(a.sinks for a in layers) and not is_fused:
        semantics = replace(semantics, attention="eager")
    chosen["library_kernels"] = library_kernels(model) if takes_any and not deterministic else ()
    attention: AttentionKernel = "deterministic" if deterministic else _attention_kernel(model, semantics, profile, kernels)
    return replace(semantics, **chosen, attention_kernel=attention)


def _attention_kernel(model: Model, semantics: Semantics, profile: Profile, kernels: Kernel) -> AttentionKernel:
    """cuDNN's where it is measured and supports the head widths, and no layer has sinks or a sliding window (a dense mask)."""
    has_rates = semantics.compute_dtype in profile.device.attention.get("cudnn", {})
    if not has_rates or kernels != "fused" or semantics.attention != "sdpa":
        return "flash"
    layers = attentions(model, semantics.seq_len)
    takes_heads = all(a.head_dim <= CUDNN_HEAD_DIM and a.head_dim % 8 == 0 for a in layers)
    return "cudnn" if takes_heads and not any(a.sinks or a.window is not None for a in layers) else "flash"
