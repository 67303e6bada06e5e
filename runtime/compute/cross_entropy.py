"""Cross entropy by online softmax (`loss: online`): reference implementation, GPU kernel, and accumulation of weight gradients.

For each row z, in fp32: top = max z, total = sum of exp(z - top), loss = log(total) + top - z[target]. The gradient of `each`
times the loss is exp(z - top) * (each / total), minus `each` at the target, rounded once. Both are 0 for rows without a target.
"""

# N rows, V vocabulary, L lanes, D width
import warnings
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.runtime.cuda.nvrtc import ELEMENT, Kernel, checked, compiled_kernel
from penstock.runtime.errors import SlowKernelWarning
from penstock.runtime.plan.workload import LOSS_SCRATCH_ELEMENTS, loss_lanes
from penstock.runtime.units import on_one_line

FEW_DIGITS = 5e-7  # relative tolerance for exp and log of two libraries
LOWEST = torch.finfo(torch.float32).min  # initial maximum: finite, so that differences of maxima are defined


def row_losses(logits_NV: Tensor, targets_N: Tensor, each_N: Tensor | None = None) -> Tensor:
    """Cross entropy of each row (N,), fp32; 0 for negative targets. `each_N` (fp32): overwrite logits by gradients times this."""
    kernel = loss_kernel(logits_NV.device, logits_NV.dtype, logits_NV.shape[1])
    return reference_losses(logits_NV, targets_N, each_N) if kernel is None else launched(kernel, logits_NV, targets_N, each_N)


def reference_losses(logits_NV: Tensor, targets_N: Tensor, each_N: Tensor | None) -> Tensor:
    """Reference implementation of `row_losses`, by chunks of rows. Sums each row in the kernel's order."""
    n = max(1, LOSS_SCRATCH_ELEMENTS // loss_lanes(logits_NV.shape[1]))
    shares = targets_N if each_N is None else each_N
    chunks = zip(logits_NV.split(n), targets_N.split(n), shares.split(n), strict=True)
    return torch.cat([_losses_of_rows(*rows, has_gradient=each_N is not None) for rows in chunks])


def _losses_of_rows(logits_NV: Tensor, targets_N: Tensor, each_N: Tensor, has_gradient: bool) -> Tensor:
    top_N1, total_N1 = _top_and_total(logits_NV)
    is_excluded_N1, targets_N1 = targets_N[:, None] < 0, targets_N[:, None].clamp(min=0)
    target_logit_N1 = logits_NV.gather(1, targets_N1).float()
    losses_N1 = (top_N1 - target_logit_N1) + total_N1.log()
    if has_gradient:
        scale_N1 = each_N[:, None] / total_N1
        for part_NL in logits_NV.split(loss_lanes(logits_NV.shape[1]), dim=1):
            part_NL.copy_((part_NL.float() - top_N1).exp_().mul_(scale_N1))
        target_gradient_N1 = (target_logit_N1 - top_N1).exp() * scale_N1 - each_N[:, None]
        logits_NV.scatter_(1, targets_N1, target_gradient_N1.to(logits_NV.dtype)).masked_fill_(is_excluded_N1, 0.0)
    return losses_N1.masked_fill(is_excluded_N1, 0.0).squeeze(1)


def _top_and_total(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum (N, 1) of each row, and sum of exponentials relative to it; first per lane, relative to its running maximum."""
    width = loss_lanes(logits_NV.shape[1])
    tops_NL = torch.full((len(logits_NV), width), LOWEST, device=logits_NV.device)
    sums_NL = torch.zeros_like(tops_NL)
    for part in logits_NV.split(width, dim=1):
        x, top, total = part.float(), tops_NL[:, : part.shape[1]], sums_NL[:, : part.shape[1]]
        e, is_new = (x - top).abs_().neg_().exp_(), x > top  # one of the two factors is 1, the other is e
        total.copy_(torch.where(is_new, total * e, total).add_(torch.where(is_new, 1.0, e)))
        torch.maximum(top, x, out=top)
    top_N1 = tops_NL.amax(dim=1, keepdim=True)
    total_N1 = _tree_sum(_tree_sum(sums_NL.mul_(tops_NL.sub_(top_N1).exp_()).unflatten(1, (-1, 8))).squeeze(-1))
    return top_N1, total_N1


def _tree_sum(x: Tensor) -> Tensor:
    """Tree-reduce the last dimension, a power of two, to size 1."""
    while (n := x.shape[-1]) > 1:
        x = x[..., : n // 2] + x[..., n // 2 :]
    return x


def launched(kernel: Kernel, logits_NV: Tensor, targets_N: Tensor, each_N: Tensor | None) -> Tensor:
    """Launch the kernel for `reference_losses`, with one thread block per row."""
    n, vocab = logits_NV.shape
    losses_N = torch.empty(n, device=logits_NV.device)
    shares_N = losses_N if each_N is None else each_N.contiguous()
    assert logits_NV.is_contiguous()
    assert shares_N.dtype is torch.float32
    arguments = [logits_NV, targets_N.contiguous(), shares_N, losses_N, vocab, int(each_N is not None)]
    kernel((n, 1, 1), (loss_lanes(vocab) // 8, 1, 1), arguments)
    return losses_N


@lru_cache(maxsize=8)
def loss_kernel(device: torch.device, dtype: torch.dtype, vocab: int) -> Kernel | None:
    """Kernel for this vocabulary size. None on a CPU; None with a warning if it does not compile or its results differ."""
    if device.type == "cpu":
        return None
    slower = "moves more than three times the bytes of each logit, up to a tenth of a step"
    defined: dict[str, str | int] = {"LOGIT": ELEMENT[dtype], "THREADS": loss_lanes(vocab) // 8}
    return checked(
        partial(compiled_kernel, "loss.cu", "cross_entropy", device=device, **defined),
        lambda kernel: "" if is_equal_to_reference(kernel, device, dtype, vocab) else "its kernel computes other numbers",
        f"the loss runs call by call on {device.type}, and {slower}",
    )


def is_equal_to_reference(kernel: Kernel, device: torch.device, dtype: torch.dtype, vocab: int) -> bool:
    """True if the kernel equals the reference within FEW_DIGITS: on small, large and infinite logits, with and without targets."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(8, vocab, generator=generator) * torch.tensor([0.1, 1, 3, 10, 100, 1e4, 3, 3])[:, None]
    logits_NV[6, 1::3] = -torch.inf
    targets_N = torch.tensor([0, vocab - 1, vocab // 2, 1, -100, vocab // 3, 0, -100])
    each_N = torch.tensor([1.0, -1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0], device=device)
    result_NV, targets_N = logits_NV.to(device, dtype), targets_N.to(device)
    expected_NV = result_NV.clone()
    result_N, expected_N = launched(kernel, result_NV, targets_N, each_N), reference_losses(expected_NV, targets_N, each_N)
    last_digit = max(torch.finfo(dtype).eps, FEW_DIGITS)
    are_close = torch.allclose(result_NV.float(), expected_NV.float(), rtol=last_digit, atol=FEW_DIGITS)
    return are_close and torch.allclose(result_N, expected_N, rtol=FEW_DIGITS, atol=FEW_DIGITS)


def add_product(sum_VD: Tensor, gradient_NV: Tensor, rows_ND: Tensor) -> None:
    """Accumulate gradient^T x rows onto an fp32 sum without rounding between tiles."""
    if sum_VD.is_cuda and gradient_NV.dtype is not torch.float32:
        try:
            torch.addmm(sum_VD, gradient_NV.t(), rows_ND, out_dtype=torch.float32, out=sum_VD)
            return
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # unsupported shape; deterministic
            how = f"the output matrix's gradient is a product of fp32 on {sum_VD.device.type} ({on_one_line(str(error), 120)})"
            slower = "up to ten times slower, a quarter of a step of a large vocabulary"
            warnings.warn(f"{how}: {slower}", SlowKernelWarning, stacklevel=2)
    n, wide_ND = max(1, LOSS_SCRATCH_ELEMENTS // len(gradient_NV)), rows_ND.float()
    for part_PD, gradient_NP in zip(sum_VD.split(n), gradient_NV.split(n, dim=1), strict=True):
        part_PD.addmm_(gradient_NP.t().float(), wide_ND)
