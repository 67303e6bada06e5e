"""How does a gradient change the weights?

All work is on flat fp32 or bf16 views of one parameter, in chunks whose bits do not depend on where the chunk lies: the kernels
see the same elements in the same places as if they were given the parameter whole.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch

CHUNK_ELEMENTS = 65_536  # of the norm's definition; also the optimizer's unit: 1 MiB of fp32 state, which stays in a core's cache
NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of one step. `lr` is already scheduled."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def of(self, name: str, shape: tuple[int, ...]) -> "AdamW":
        """The settings for one parameter: without decay where none applies."""
        return self if decays(name, shape) else replace(self, weight_decay=0.0)


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """A parameter's gradient as it lies on the host: flat parts to be added, and the dtype to which their sum is rounded.

    It is made chunk by chunk where it is used: whole, the gradient of a large vocabulary would be gigabytes that no plan counts.
    """

    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        return self.parts[0].numel()

    def __getitem__(self, part: slice) -> torch.Tensor:
        return functools.reduce(torch.add, [whole[part] for whole in self.parts]).to(self.dtype)


def sum_of_squares(gradient: torch.Tensor | SummedGradient) -> float:
    """Sum of squares of a flat gradient: fp32 sums over fixed chunks, the chunk sums added in fp64."""
    total = 0.0
    for start in range(0, gradient.numel(), CHUNK_ELEMENTS):
        wide = gradient[start : start + CHUNK_ELEMENTS].float()
        total += float((wide * wide).sum())
    return total


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """`min(1, clip_norm / (norm + 1e-6))` in fp32; 1 where nothing is clipped."""
    if clip_norm is None:
        return 1.0
    ratio = torch.tensor(clip_norm, dtype=torch.float32) / (torch.tensor(norm, dtype=torch.float32) + NORM_EPS)
    return min(1.0, float(ratio))


def round_half_up(wide: torch.Tensor, out: torch.Tensor) -> bool:
    """Round fp32 to bf16, ties away from zero, into `out`; NaN stays NaN (its payload could otherwise carry into the sign).

    Returns whether there may be a NaN.

    Half-up keeps a split into a bf16 weight and a 16-bit remainder exact, which rounding to even does not.
    """
    bits = torch.add(wide.view(torch.int32), 0x8000).bitwise_right_shift_(16)
    may_have_nan = not math.isfinite(wide.sum().item())  # rare, and a finite sum proves that there is none
    if may_have_nan:
        bits = torch.where(wide == wide, bits, 0x7FC0)
    out.view(torch.int16).copy_(bits)
    return may_have_nan


@dataclass(frozen=True, slots=True)
class SplitMaster:
    """A flat fp32 master in two halves: the bf16 compute weight as it is uploaded, and what it lacks, as int16.

    With weights rounded half up the difference of the bits always fits: the halves are the master, to the last bit.
    """

    weight: torch.Tensor
    remainder: torch.Tensor

    def numel(self) -> int:
        return self.weight.numel()

    def joined(self, part: slice) -> torch.Tensor:
        """The master, fp32, as a copy."""
        bits = self.weight[part].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(self.remainder[part]).view(torch.float32)

    def cut(self, part: slice, wide: torch.Tensor) -> None:
        """Store an fp32 master."""
        weight, remainder = self.weight[part], self.remainder[part]
        may_have_nan = round_half_up(wide, weight)
        remainder.copy_(wide.view(torch.int32) - weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16))
        if may_have_nan:
            remainder[wide != wide] = 0  # the weight is NaN there, and so must the whole be


@dataclass(frozen=True, slots=True)
class Learned:
    """What training has made of one parameter, flat: its master, its moments (fp32), and the compute weight if that lies apart."""

    master: torch.Tensor | SplitMaster
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight: torch.Tensor | None = None


def adamw_(
    master: torch.Tensor | SplitMaster,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor | SummedGradient,
    weight: torch.Tensor | None,
    factor: float,
    n_updates: int,
    settings: AdamW,
    start_from: Learned | None = None,
) -> None:
    """One AdamW step on one flat parameter, chunk by chunk: in place, or `start_from` what lies elsewhere and stays as it is.

    `gradient` (any dtype) is widened and multiplied by `factor` in scratch memory. `master` is fp32, or bf16 and then
    rounded half up, or split. `weight`, if given, receives the compute weight. `n_updates` counts from 1 (bias correction).
    """
    step = torch.tensor(float(n_updates))
    before = start_from or Learned(master, exp_avg, exp_avg_sq)
    for start in range(0, master.numel(), CHUNK_ELEMENTS):
        part = slice(start, min(start + CHUNK_ELEMENTS, master.numel()))
        wide_gradient = gradient[part].to(torch.float32, copy=True)
        if factor != 1.0:
            wide_gradient *= factor
        if start_from is not None:
            exp_avg[part].copy_(before.exp_avg[part])
            exp_avg_sq[part].copy_(before.exp_avg_sq[part])
        match before.master:
            case SplitMaster():
                wide_master = before.master.joined(part)
            case _ if isinstance(master, torch.Tensor) and master.dtype is torch.float32:
                wide_master = master[part]  # the kernel works in place
                if start_from is not None:
                    wide_master.copy_(before.master[part])
            case _:
                wide_master = before.master[part].float()
        torch._fused_adamw_(
            [wide_master],
            [wide_gradient],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [step],
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )
        match master:
            case SplitMaster():
                master.cut(part, wide_master)
            case _ if master.dtype is not torch.float32:
                round_half_up(wide_master, master[part])
        if weight is not None:
            round_half_up(wide_master, weight[part])


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to biases, norms and 1-D parameters, by name (biases of experts are 2-D)."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
