"""Fastest kernels that a machine supports."""

from dataclasses import replace
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import AttentionKernel, Kernel, Semantics
from penstock.runtime.plan.workload import Model

from .config import library_kernels
from .workload import attentions, fusible

CUDNN_HEAD_DIM = 128  # its backward takes heads up to this width, in multiples of eight
# Fields of Semantics that choose a kernel, with the value that is not `eager`
FUSED = {"norm": "fused", "loss": "online", "pointwise": "fused"}


def with_kernels(
    model: Model, semantics: Semantics, profile: Profile, kernels: Kernel | None = None, deterministic: bool = False
) -> Semantics:
    """The semantics with every kernel named: `kernels`, or the fastest set.

    Fused kernels pay on a GPU; a CPU spells them out. `deterministic`: no kernel adds in the order in which its threads come.
    """
    kernels = kernels or ("fused" if profile.device.kind == "cuda" else "eager")
    fused = fusible(model) if kernels == "fused" else frozenset()
    fused -= {"loss"} if semantics.objective.takes_eager else set()
    chosen: dict[str, Any] = {part: kernel if part in fused else "eager" for part, kernel in FUSED.items()}
    # In bf16, as fla's are; the convolution's adds its weight's gradient as its threads come
    takes_any = kernels == "fused" and profile.device.kind == "cuda" and semantics.compute_dtype == "bf16"
    chosen["library_kernels"] = library_kernels(model) if takes_any and not deterministic else ()
    return replace(semantics, **chosen, attention_kernel=_attention_kernel(model, semantics, profile, kernels, deterministic))


def _attention_kernel(
    model: Model, semantics: Semantics, profile: Profile, kernels: Kernel, deterministic: bool
) -> AttentionKernel:
    if deterministic:
        return "deterministic"
    has_rates = semantics.compute_dtype in profile.device.attention.get("cudnn", {})
    takes_model = kernels == "fused" and semantics.attention == "sdpa" and _takes(model, semantics.seq_len)
    return "cudnn" if has_rates and takes_model else "flash"


def _takes(model: Model, seq_len: int) -> bool:
    """Whether cuDNN attends as the model does: heads that it takes, and no window, whose mask would be as large as its square."""
    found = attentions(model, seq_len)
    return all(a.window is None and a.head_dim <= CUDNN_HEAD_DIM and a.head_dim % 8 == 0 for a in found)
