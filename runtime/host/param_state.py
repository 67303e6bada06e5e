"""State of one flat parameter, its summed gradient, and the arguments of its update."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.runtime.plan.optimizer import Hyperparameters

from .rounding import HALF, StochasticRounding

CHUNK_ELEMENTS = 65_536  # of a chunk of the norm: a power of two
UPDATE_ELEMENTS = 2 * CHUNK_ELEMENTS  # of one pass of the reference implementation


def bf16_bits(wide: torch.Tensor, carried: torch.Tensor | int) -> torch.Tensor:
    """bf16 bits of fp32 numbers: add a 16-bit number and truncate. NaN remains NaN."""
    return torch.where(wide.isnan(), 0x7FC0, wide.view(torch.int32) + carried >> 16).short()


@dataclass(frozen=True, slots=True)
class Master:
    """Flat master weight: fp32 or bf16; or, with a `remainder`, fp32 split into the bf16 compute weight and the difference in bits
    as int16. The difference always fits because weights are rounded half up. A 24-bit master is fp32 with eight low bits of zero,
    so its remainder is int8."""

    weight: torch.Tensor
    remainder: torch.Tensor | None = None

    def values(self, part: slice = slice(None)) -> torch.Tensor:
        """Elements in the master's dtype, read-only because they may be a copy."""
        if self.remainder is None:
            return self.weight[part]
        weight, remainder = self.weight[part], self.remainder[part]
        wide, shift = torch.empty_like(weight, dtype=torch.float32), 8 * (remainder.itemsize == 1)
        for start in range(0, wide.numel(), CHUNK_ELEMENTS):  # temporaries of a chunk only
            chunk = slice(start, start + CHUNK_ELEMENTS)
            bits = wide[chunk].view(torch.int32)
            bits.copy_(weight[chunk].view(torch.int16)).bitwise_left_shift_(16).add_(remainder[chunk].int() << shift)
        return wide

    def pieces(self) -> Iterator[torch.Tensor]:
        """Elements in pieces, so that a split master is never joined in memory at once."""
        starts = range(0, self.weight.numel(), UPDATE_ELEMENTS)
        return (self.values(slice(start, start + UPDATE_ELEMENTS)) for start in starts)

    def put(self, part: slice, values: torch.Tensor, carried: torch.Tensor | int = HALF) -> None:
        """Store numbers of any dtype. bf16 and 24-bit masters are rounded half up: ties away from zero, NaN remains NaN. Half up
        keeps a split into bf16 weight and 16-bit remainder exact; rounding to even does not. `carried`: 16-bit random numbers, to
        round a master stochastically."""
        if self.weight.dtype is torch.float32:
            self.weight[part] = values
            return
        weight, remainder = self.weight[part], None if self.remainder is None else self.remainder[part]
        for start in range(0, values.numel(), UPDATE_ELEMENTS):  # temporaries of a piece only
            piece = slice(start, start + UPDATE_ELEMENTS)
            random = carried[piece] if isinstance(carried, torch.Tensor) and carried.numel() > 1 else carried
            wide = values[piece].to(torch.float32)
            if remainder is not None:
                bits, is_short = wide.view(torch.int32), remainder.dtype is torch.int8
                if is_short:
                    bits = torch.where(wide.isnan(), 0x7FC00000, bits + (random >> 8) & ~0xFF)
                remainder[piece] = (bits >> 8 * is_short).to(remainder.dtype)
                wide, random = bits.view(torch.float32), HALF
            weight[piece].view(torch.int16).copy_(bf16_bits(wide, random))


@dataclass(frozen=True, slots=True)
class ParamState:
    """Training state of one parameter, flat."""

    master: Master
    moments: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors in the order of a slot of `state`."""
        of_master = [self.master.weight] if self.master.remainder is None else [self.master.weight, self.master.remainder]
        return [*of_master, *self.moments]


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """Gradient of a parameter: flat parts to add, and the dtype to which the sum is rounded. Chunks are summed where they are used,
    because the whole sum of a large vocabulary would take gigabytes that no plan counts."""

    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.dtype in (torch.bfloat16, torch.float32)
        assert len(self.parts) == 1 or self.parts[0].dtype is torch.float32, "sums of bf16 parts would be rounded at every addition"

    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def is_rounded(self) -> bool:
        """True if rounding may change the sum."""
        return self.dtype is torch.bfloat16 and self.parts[0].dtype is not torch.bfloat16


@dataclass(frozen=True, slots=True)
class UpdateArguments:
    """Arguments of an optimizer step on one flat parameter, in place or from the state `source`, which does not change. The
    gradient is multiplied by `factor` in scratch memory. `n_updates` counts from 1 (bias correction). `rounding`: random keys of a
    low-bit optimizer state with this `rule`; None: AdamW, bitwise identical to torch's."""

    target: ParamState
    gradient: SummedGradient
    factor: float
    n_updates: int
    settings: Hyperparameters
    source: ParamState | None = None
    rule: str = "adamw"
    rounding: StochasticRounding | None = None
