"""What is done to a parameter while a chunk of it is in a core's cache (cache blocking)?

Loops over the chunks of one parameter, flat. TorchScript runs them: a loop then needs no interpreter and none of its lock, so that
several threads, and the lane that computes, are not in each other's way. Where torch has no TorchScript any more the interpreter
runs the same functions, with the same results, slower.

Bytes per parameter that a loop moves between memory and cache, chunks being small enough to stay there: each byte of its
arguments outside of the scratch is read once and, if it changes, written once. For `adamw`

    split master    read  weight 2, remainder 2, moments 4 + 4, gradient 2; write weight 2, remainder 2, moments 4 + 4     26 B
    fp32 master     read  master 4, moments 4 + 4, gradient 4; write master 4, moments 4 + 4                               28 B
    bf16 master     read  master 2, moments 4 + 4, gradient 2; write master 2, moments 4 + 4                               22 B

with bf16 gradients, but fp32 ones where fp32 is computed. Every loop has a signature that TorchScript can compile: no classes.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

CHUNK_ELEMENTS = 65_536  # of the norm's definition
UPDATE_ELEMENTS = 2 * CHUNK_ELEMENTS  # the optimizer's unit. Smaller, the calls would cost more; larger, its scratch leaves a cache

_F = TypeVar("_F", bound=Callable[..., object])


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(UPDATE_ELEMENTS, dtype=dtype).zero_()  # so that its pages are there


@dataclass(slots=True)
class Scratch:
    """Memory of one thread for one chunk, allocated once: an allocation per chunk would be page faults."""

    wide: torch.Tensor = field(default_factory=lambda: _empty(torch.float32))  # a master
    bits: torch.Tensor = field(default_factory=lambda: _empty(torch.int32))
    gradient: torch.Tensor = field(default_factory=lambda: _empty(torch.float32))
    rounded: torch.Tensor = field(default_factory=lambda: _empty(torch.bfloat16))  # a gradient
    wide_bits: torch.Tensor = field(init=False)  # the master's, in the same memory

    def __post_init__(self) -> None:
        self.wide_bits = self.wide.view(torch.int32)


def scripted(loop: _F) -> _F:
    """The loop as TorchScript, or as it is where torch has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole; torch has nothing else without a compiler
        try:
            return torch.jit.script(loop)  # type: ignore[no-any-return]
        except (AttributeError, NotImplementedError, RuntimeError):
            return loop


def scale_of(factor: float) -> torch.Tensor | None:
    """A factor as an fp32 tensor; None if it is one."""
    return torch.full([], factor, dtype=torch.float32) if factor != 1.0 else None


def widened(
    parts: list[torch.Tensor], at: int, n: int, wide: torch.Tensor, rounded: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """A chunk of the sum of fp32 parts, or of one of any dtype, in fp32 scratch: rounded to `rounded`'s dtype, times `scale`."""
    total = wide.narrow(0, 0, n)
    total.copy_(parts[0].narrow(0, at, n))
    for part in parts[1:]:
        total.add_(part.narrow(0, at, n))
    if rounded is not None:
        narrower = rounded.narrow(0, 0, n)
        narrower.copy_(total)
        total.copy_(narrower)
    if scale is not None:
        total.mul_(scale)
    return total


def halves() -> list[torch.Tensor]:
    """Half a unit of bf16's last place in fp32's bits, and how many bits it drops: as tensors, which a call takes faster."""
    return [torch.full([], 0x8000, dtype=torch.int32), torch.full([], 16, dtype=torch.int32)]


def nan_of(wide: torch.Tensor) -> torch.Tensor | None:
    """Where there are NaN; None if there are none, which a finite sum proves."""
    total = float(wide.sum())
    return wide != wide if total - total != 0.0 else None


def round_up_half(
    wide_bits: torch.Tensor, bits: torch.Tensor, half: list[torch.Tensor], nan: torch.Tensor | None, out_bits: torch.Tensor
) -> None:
    """Round the bits of fp32 to those of bf16, ties away from zero, by way of `bits`, which may be `wide_bits` themselves.

    `half` is what `halves` makes. NaN stays NaN (its payload could otherwise carry into the sign).
    """
    torch.add(wide_bits, half[0], out=bits)
    bits.bitwise_right_shift_(half[1])
    if nan is not None:
        bits.masked_fill_(nan, 0x7FC0)
    out_bits.copy_(bits)


def join(weight: torch.Tensor, remainder: torch.Tensor, wide: torch.Tensor, wide_bits: torch.Tensor, bits: torch.Tensor) -> None:
    """A split master as fp32: the weight's bits are the upper half, and the remainder is added."""
    wide.copy_(weight)
    bits.copy_(remainder)
    wide_bits.add_(bits)


def cut(
    wide: torch.Tensor,
    wide_bits: torch.Tensor,
    bits: torch.Tensor,
    half: list[torch.Tensor],
    weight_bits: torch.Tensor,
    remainder: torch.Tensor,
) -> None:
    """Split an fp32 master by way of `bits`, which may be `wide_bits` themselves.

    What a weight that was rounded half up lacks is the lower half of the master's bits, read with a sign.
    """
    nan = nan_of(wide)
    remainder.copy_(wide_bits)  # keeps the lower half of each; added to the bits of a NaN, any of them leaves one
    round_up_half(wide_bits, bits, half, nan, weight_bits)


def adamw_chunks(
    start: int,
    end: int,
    chunk: int,
    master: torch.Tensor,
    master_bits: torch.Tensor,
    remainder: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    before: list[torch.Tensor],
    parts: list[torch.Tensor],
    rounded: torch.Tensor | None,
    factor: float,
    step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    wide_scratch: torch.Tensor,
    wide_scratch_bits: torch.Tensor,
    bits_scratch: torch.Tensor,
    gradient_scratch: torch.Tensor,
    operands: list[list[torch.Tensor]],
) -> None:
    """AdamW on elements start .. end - 1, `start` being a chunk's. `before`: master, moments and remainder to start from; or empty.

    `master` is fp32, bf16, or (with a remainder) the bf16 weight of a split one; `_bits` are the same bits as integers.
    `operands` are four lists, for the kernel's arguments. Of lists made here TorchScript would say that nobody sees what the
    kernel does to them, and leave it out.
    """
    half, scale = halves(), scale_of(factor)
    for at in range(start, end, chunk):
        n = min(chunk, end - at)
        gradient = widened(parts, at, n, gradient_scratch, rounded, scale)
        m, v, bits = exp_avg.narrow(0, at, n), exp_avg_sq.narrow(0, at, n), bits_scratch.narrow(0, 0, n)
        source, source_remainder = master, remainder
        if len(before) > 0:
            source = before[0]
            m.copy_(before[1].narrow(0, at, n))
            v.copy_(before[2].narrow(0, at, n))
            source_remainder = before[3] if len(before) > 3 else None
        in_place = master.dtype == torch.float32  # the kernel then works on the master itself
        wide = master.narrow(0, at, n) if in_place else wide_scratch.narrow(0, 0, n)
        wide_bits = master_bits.narrow(0, at, n) if in_place else wide_scratch_bits.narrow(0, 0, n)
        if source_remainder is not None:
            join(source.narrow(0, at, n), source_remainder.narrow(0, at, n), wide, wide_bits, bits)
        elif not in_place or len(before) > 0:
            wide.copy_(source.narrow(0, at, n))
        for operand, tensor in zip(operands, [wide, gradient, m, v]):  # noqa: B905 TorchScript knows no `strict`
            operand[0] = tensor
        torch._fused_adamw_(
            operands[0],
            operands[1],
            operands[2],
            operands[3],
            [],
            [step],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        if remainder is not None:
            cut(wide, wide_bits, wide_bits, half, master_bits.narrow(0, at, n), remainder.narrow(0, at, n))
        elif not in_place:
            round_up_half(wide_bits, wide_bits, half, nan_of(wide), master_bits.narrow(0, at, n))


def squares_of_chunks(
    start: int, end: int, chunk: int, parts: list[torch.Tensor], rounded: torch.Tensor | None, scratch: torch.Tensor
) -> list[float]:
    """fp32 sum of squares of each chunk of elements start .. end - 1."""
    sums: list[float] = []
    for at in range(start, end, chunk):
        gradient = widened(parts, at, min(chunk, end - at), scratch, rounded, None)
        sums.append(float(gradient.mul_(gradient).sum()))
    return sums


def add_chunks(
    start: int, end: int, chunk: int, total: torch.Tensor, part: torch.Tensor, is_first: bool, scratch: torch.Tensor
) -> None:
    """Add a part of any dtype to an fp32 sum, which begins at zero with the first."""
    for at in range(start, end, chunk):
        n = min(chunk, end - at)
        running, wide = total.narrow(0, at, n), scratch.narrow(0, 0, n)
        wide.copy_(part.narrow(0, at, n))
        if is_first:
            running.zero_()
        running.add_(wide)


run_adamw, run_squares, run_add = scripted(adamw_chunks), scripted(squares_of_chunks), scripted(add_chunks)
