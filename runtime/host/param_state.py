"""State of one flat parameter, its summed gradient, and the arguments of a step that updates it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.runtime.plan.optimizer import Hyperparameters

from .rounding import HALF, Drawn

CHUNK_ELEMENTS = 65_536  # of the norm's definition: a power of two
UPDATE_ELEMENTS = 2 * CHUNK_ELEMENTS  # of an update by the definition


def bf16_bits(wide: torch.Tensor, carried: torch.Tensor | int) -> torch.Tensor:
    """fp32 rounded to bf16, up where the bits cut off and a 16-bit number carry. NaN stays NaN."""
    return torch.where(wide.isnan(), 0x7FC0, wide.view(torch.int32) + carried >> 16).short()


@dataclass(frozen=True, slots=True)
class Master:
    """A flat master: fp32 or bf16; or, with a `remainder`, an fp32 one in two halves: the bf16 compute weight as it is uploaded,
    and what this lacks, as int16. With weights rounded half up the difference of the bits always fits. One of 24 bits is an fp32
    number whose last eight are zero: of its remainder int8 holds the first eight."""

    weight: torch.Tensor
    remainder: torch.Tensor | None = None

    def whole(self, part: slice = slice(None)) -> torch.Tensor:
        """In its dtype, to be read only: it may be a copy."""
        if self.remainder is None:
            return self.weight[part]
        weight, remainder = self.weight[part], self.remainder[part]
        wide, shift = torch.empty_like(weight, dtype=torch.float32), 8 * (remainder.itemsize == 1)
        for at in range(0, wide.numel(), CHUNK_ELEMENTS):  # or the bits would be a second copy
            one = slice(at, at + CHUNK_ELEMENTS)
            bits = wide[one].view(torch.int32)
            bits.copy_(weight[one].view(torch.int16)).bitwise_left_shift_(16).add_(remainder[one].int() << shift)
        return wide

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same, one piece after another: put together whole, a split master would be a second one."""
        return (self.whole(slice(at, at + UPDATE_ELEMENTS)) for at in range(0, self.weight.numel(), UPDATE_ELEMENTS))

    def put(self, part: slice, given: torch.Tensor, carried: torch.Tensor | int = HALF) -> None:
        """Store numbers of any dtype. bf16 is rounded half up: ties away from zero, NaN stays NaN. That keeps a split into a bf16
        weight and a 16-bit remainder exact, which rounding to even does not. Masters of 24 bits are rounded so, too. `carried`:
        16-bit numbers, to round a master stochastically."""
        if self.weight.dtype is torch.float32:
            self.weight[part] = given
            return
        weight, remainder = self.weight[part], None if self.remainder is None else self.remainder[part]
        for at in range(0, given.numel(), UPDATE_ELEMENTS):  # temporary tensors of the whole parameter would be copies of it
            here = slice(at, at + UPDATE_ELEMENTS)
            random = carried[here] if isinstance(carried, torch.Tensor) and carried.numel() > 1 else carried
            wide = given[here].to(torch.float32)
            if remainder is not None:
                bits, is_short = wide.view(torch.int32), remainder.dtype is torch.int8
                if is_short:
                    bits = torch.where(wide.isnan(), 0x7FC00000, bits + (random >> 8) & ~0xFF)
                remainder[here] = (bits >> 8 * is_short).to(remainder.dtype)
                wide, random = bits.view(torch.float32), HALF
            weight[here].view(torch.int16).copy_(bf16_bits(wide, random))


@dataclass(frozen=True, slots=True)
class ParamState:
    """The training state of one parameter, flat."""

    master: Master
    moments: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept, in the order of a slot of `state`."""
        of_master = [self.master.weight] if self.master.remainder is None else [self.master.weight, self.master.remainder]
        return [*of_master, *self.moments]


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """A parameter's gradient: flat parts to be added, and the dtype to which their sum is rounded.

    It is made chunk by chunk where it is used: whole, the gradient of a large vocabulary would be gigabytes that no plan counts.
    """

    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.dtype in (torch.bfloat16, torch.float32)
        assert len(self.parts) == 1 or self.parts[0].dtype is torch.float32, "sums of bf16 parts would be rounded at every addition"

    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def is_rounded(self) -> bool:
        """Whether rounding the sum may change it."""
        return self.dtype is torch.bfloat16 and self.parts[0].dtype is not torch.bfloat16


@dataclass(frozen=True, slots=True)
class UpdateArguments:
    """Arguments of an optimizer step on one flat parameter: in place, or from a state elsewhere, which stays as it is.

    The gradient is multiplied by `factor` in scratch memory. `n_updates` counts from 1 (bias correction). `drawn`: what rounds the
    state of an optimizer that keeps less, by the `rule` of its arithmetic; None: AdamW to the bits of torch's.
    """

    to: ParamState
    gradient: SummedGradient
    factor: float
    n_updates: int
    settings: Hyperparameters
    start_from: ParamState | None = None
    rule: str = "adamw"
    drawn: Drawn | None = None

    @property
    def scalars(self) -> list[float]:
        """What the update multiplies by, divides by and adds, in the order in which kernels take it; each is rounded to fp32
        once."""
        numbers, n_updates = self.settings.numbers, self.n_updates
        if self.drawn is None:
            return factors(numbers, n_updates)
        lr, beta1, beta2, weight_decay, eps = numbers
        decay, rate, correction = 1 - lr * weight_decay, lr / (1 - beta1**n_updates), 1 / math.sqrt(1 - beta2**n_updates)
        of_lion, of_adamw = [decay, 1 - beta1, 1 - beta2, lr, 0, 0, 0], [decay, 1 - beta1, beta2, 1 - beta2, correction, eps, -rate]
        return of_lion if self.rule == "lion" else of_adamw


def factors(numbers: list[float], n_updates: int) -> list[float]:
    """What a device's AdamW (`adamw.cu`) multiplies by, divides by and adds in one update, in the order of its arguments: doubles,
    each rounded to fp32 where it is used. `n_updates` counts from 1, as the fused kernel's step does."""
    lr, beta1, beta2, weight_decay, eps = numbers
    # decay; towards, of the first moment; beta2; of the square; correction, of the second moment's root; eps; rate
    corrections = 1 - beta1**n_updates, math.sqrt(1 - beta2**n_updates)
    return [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, corrections[1], eps, -lr / corrections[0]]
