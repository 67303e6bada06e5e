"""Loops over the chunks of a flat parameter: each chunk is done with while it is in a core's cache (cache blocking).

TorchScript runs them on the host: a loop then holds no interpreter lock, and no other thread waits for it. Where torch has none the
interpreter runs the same functions, with the same results, slower. Signatures have no classes, as TorchScript compiles none.

A byte outside of the scratch memory is read once and, if it changes, written once: `Optimizer.update_bytes` counts them.
"""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

CHUNK_ELEMENTS = 65_536  # of the norm's definition: a power of two
UPDATE_ELEMENTS = 2 * CHUNK_ELEMENTS  # the optimizer's unit. Smaller, the calls would cost more; larger, its scratch leaves a cache

SQUARES_ELEMENTS = 8 * CHUNK_ELEMENTS  # squared at a time: 2 MB, so that a call is much longer than what it takes to make it
TASK_CHUNKS = 16  # that a thread takes at a time: about a millisecond, far above a hand-over, and short enough to share evenly

_F = TypeVar("_F", bound=Callable[..., object])


class Scratch:
    """Memory of one thread for a chunk of an update, or some of a gradient: an allocation per chunk would be page faults."""

    def __init__(self, n_elements: int = UPDATE_ELEMENTS, n_squares: int = SQUARES_ELEMENTS) -> None:
        """Of zeros, so that its pages are there."""
        self.wide, self.bits = torch.zeros(n_elements), torch.zeros(n_elements, dtype=torch.int32)  # a master
        self.gradient, self.rounded = torch.zeros(n_squares), torch.zeros(n_squares, dtype=torch.bfloat16)


def scripted(function: _F) -> _F:
    """The function as TorchScript, or as it is where torch has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is")  # deprecated; torch has nothing else without a compiler
        try:
            return torch.jit.script(function)  # type: ignore[no-any-return]
        except (AttributeError, NotImplementedError, RuntimeError):
            return function


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


def nan_of(wide: torch.Tensor) -> torch.Tensor | None:
    """Where there are NaN; None if there are none, which a finite sum proves."""
    total = float(wide.sum())
    return wide != wide if total - total != 0.0 else None


def round_up_half(wide_bits: torch.Tensor, nan: torch.Tensor | None, out_bits: torch.Tensor) -> None:
    """Round the bits of fp32, in place, to those of bf16, ties away from zero.

    NaN stays NaN (its payload could otherwise carry into the sign).
    """
    wide_bits.add_(0x8000).bitwise_right_shift_(16)
    if nan is not None:
        wide_bits.masked_fill_(nan, 0x7FC0)
    out_bits.copy_(wide_bits)


def join(weight: torch.Tensor, remainder: torch.Tensor, wide: torch.Tensor, wide_bits: torch.Tensor, bits: torch.Tensor) -> None:
    """A split master as fp32: the weight's bits are the upper half, and the remainder is added. `wide_bits` are those of `wide`."""
    wide.copy_(weight)
    bits.copy_(remainder)
    wide_bits.add_(bits)


def cut(wide: torch.Tensor, wide_bits: torch.Tensor, weight_bits: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split an fp32 master, which is lost: `wide_bits` are its bits.

    What a weight that was rounded half up lacks is the lower half of the master's bits, read with a sign.
    """
    nan = nan_of(wide)
    remainder.copy_(wide_bits)  # keeps the lower half of each; added to the bits of a NaN, any of them leaves one
    round_up_half(wide_bits, nan, weight_bits)


def update_chunks(
    start: int, end: int, chunk: int, to: list[torch.Tensor], weight_bits: torch.Tensor, is_split: bool, before: list[torch.Tensor],
    parts: list[torch.Tensor], rounded: torch.Tensor | None, factor: float, numbers: list[float], n_updates: float,
    scratch: list[torch.Tensor], operands: list[list[torch.Tensor]],
) -> None:  # fmt: skip
    """AdamW by torch's fused kernel, elements start .. end - 1, `start` being a chunk's.

    `to`: the state, of the master, fp32 or bf16, or the bf16 half of a split one and its remainder; then moments. `weight_bits` are
    those of the first as integers. `before`: a state to start from, which stays; or empty. The gradient is the sum of `parts`,
    rounded to the dtype of `rounded`, times `factor`. `operands`: a list for each of the kernel's, made by the caller: of lists
    made in a loop TorchScript would say that nothing reads what the kernel does to them, and leave it out."""
    wide_scratch, wide_bits_scratch, bits_scratch, gradient_scratch = scratch
    step = torch.full([], n_updates, dtype=torch.float32)
    scale = torch.full([], factor, dtype=torch.float32) if factor != 1.0 else None
    in_place = to[0].dtype == torch.float32  # the kernel then works on the master itself
    source, first_moment = before if len(before) > 0 else to, 2 if is_split else 1
    lr, beta1, beta2, weight_decay, eps = numbers
    for at in range(start, end, chunk):
        n = min(chunk, end - at)
        gradient = widened(parts, at, n, gradient_scratch, rounded, scale)
        wide = to[0].narrow(0, at, n) if in_place else wide_scratch.narrow(0, 0, n)
        wide_bits = weight_bits.narrow(0, at, n) if in_place else wide_bits_scratch.narrow(0, 0, n)
        if is_split:
            join(source[0].narrow(0, at, n), source[1].narrow(0, at, n), wide, wide_bits, bits_scratch.narrow(0, 0, n))
        elif not in_place or len(before) > 0:
            wide.copy_(source[0].narrow(0, at, n))
        operands[0][0], operands[1][0] = wide, gradient
        for i in range(first_moment, len(to)):
            moment = to[i].narrow(0, at, n)
            if len(before) > 0:
                moment.copy_(source[i].narrow(0, at, n))
            operands[i - first_moment + 2][0] = moment
        torch._fused_adamw_(
            operands[0], operands[1], operands[2], operands[3], [], [step],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        if is_split:
            cut(wide, wide_bits, weight_bits.narrow(0, at, n), to[1].narrow(0, at, n))
        elif not in_place:
            round_up_half(wide_bits, nan_of(wide), weight_bits.narrow(0, at, n))


def squares_of_chunks(
    start: int, end: int, chunk: int, parts: list[torch.Tensor], rounded: torch.Tensor | None, scratch: torch.Tensor
) -> list[float]:
    """fp32 sum of squares of each chunk of elements start .. end - 1, in an order that any processor can keep: the second half of
    the places in a chunk is added to the first, and so on, until one is left. A chunk is a power of two of them, the last one
    filled up with zeros. As many chunks at a time as `scratch` holds."""
    sums: list[float] = []
    for at in range(start, end, scratch.numel()):
        n = min(scratch.numel(), end - at)
        squares = scratch.narrow(0, 0, -(-n // chunk) * chunk)
        widened(parts, at, n, squares, rounded, None)
        squares.narrow(0, n, squares.numel() - n).zero_()
        rows, half = squares.mul_(squares).view(-1, chunk), chunk // 2
        while half > 0:
            rows.narrow(1, 0, half).add_(rows.narrow(1, half, half))
            half = half // 2
        found: list[float] = rows.select(1, 0).tolist()
        sums += found
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


run_update, run_squares, run_add = scripted(update_chunks), scripted(squares_of_chunks), scripted(add_chunks)
