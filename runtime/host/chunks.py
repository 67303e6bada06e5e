"""Reference implementation of the host optimizer in plain torch and NumPy, chunk by chunk.

`compiled_loops.py` is bitwise identical. The reference runs where numba is missing and in tests, and updates the last elements of a
parameter, which fill no vector register of torch's kernel.
"""

import math

import numpy as np
import torch

from .param_state import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from .param_state import UPDATE_ELEMENTS as UPDATE_ELEMENTS
from .param_state import SummedGradient, UpdateArguments, bf16_bits
from .rounding import GROUP, HALF, group_bytes, numbers, packed, unpacked

TASK_CHUNKS = 32  # of one task: 2 ms, far longer than a hand-over between threads, and short enough to balance them
SCRATCH_ELEMENTS = 2**13


class Scratch:
    """Scratch memory of one thread: it remains in the core's caches, and no call allocates."""

    def __init__(self) -> None:
        self.block = torch.zeros(SCRATCH_ELEMENTS)


def gradient_of(gradient: SummedGradient, start: int, end: int) -> torch.Tensor:
    """Elements start .. end - 1 of the sum in fp32, rounded to the gradient's dtype."""
    total = gradient.parts[0][start:end].float()
    for part in gradient.parts[1:]:
        total = total + part[start:end]
    return total.bfloat16().float() if gradient.is_rounded else total


def scalars_of(step: UpdateArguments) -> list[float]:
    """Scalar factors and terms of the update in the order of the kernels' arguments; each is rounded to fp32 once."""
    lr, beta1, beta2, weight_decay, eps = step.settings.numbers
    decay = 1 - lr * weight_decay
    if step.rule == "lion":
        return [decay, 1 - beta1, 1 - beta2, lr, 0, 0, 0]
    root = math.sqrt(1 - beta2**step.n_updates)
    correction = root if step.rounding is None else 1 / root  # torch's kernel divides, the others multiply
    return [decay, 1 - beta1, beta2, 1 - beta2, correction, eps, -lr / (1 - beta1**step.n_updates)]


def update(step: UpdateArguments, start: int, end: int) -> None:
    for begin in range(start, end, UPDATE_ELEMENTS):
        chunk = slice(begin, min(begin + UPDATE_ELEMENTS, end))
        source, g = step.source or step.target, gradient_of(step.gradient, chunk.start, chunk.stop)
        g = g * torch.tensor(step.factor, dtype=torch.float32)
        wide = source.master.values(chunk).to(torch.float32, copy=True)
        if step.rounding is not None:
            _update_low_bit(step, chunk, wide, g)
            continue
        moments = [moment[chunk].clone() for moment in source.moments]
        (first, second), (lr, beta1, beta2, weight_decay, eps) = moments, step.settings.numbers
        torch._fused_adamw_(
            [wide], [g], [first], [second], [], [torch.tensor(float(step.n_updates))], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        step.target.master.put(chunk, wide)
        for target, moment in zip(step.target.moments, moments, strict=True):
            target[chunk] = moment


def _update_low_bit(step: UpdateArguments, chunk: slice, wide: torch.Tensor, gradient: torch.Tensor) -> None:
    """Update by the arithmetic and rounding of docs/optimizers.md."""
    assert step.rounding is not None
    (keys, is_master_stochastic, first), n = step.rounding, len(wide)
    w, g, scalars = wide.numpy(), gradient.numpy(), np.array(scalars_of(step), np.float32)
    groups = slice(group_bytes(chunk.start), group_bytes(chunk.stop))
    source = (step.source or step.target).moments
    m, *rest = [
        unpacked(x[groups].numpy(), n, i == 1) if x.dtype is torch.uint8 else x[chunk].float().numpy() for i, x in enumerate(source)
    ]
    with np.errstate(all="ignore"):
        if step.rule == "lion":
            u = m + scalars[1] * (g - m)
            w = w * scalars[0] - np.where(u > 0, scalars[3], np.where(u < 0, -scalars[3], u))
            results = [m + scalars[2] * (g - m)]
        else:
            m, v = m + scalars[1] * (g - m), rest[0] * scalars[2] + (scalars[3] * g) * g
            w = w * scalars[0] + (scalars[6] * m) / (np.sqrt(v) * scalars[4] + scalars[5])
            results = [m, v]
        for i, (target, x) in enumerate(zip(step.target.moments, results, strict=True)):
            random = numbers(keys[i + 1], first + chunk.start, n)
            if target.dtype is torch.uint8:
                target[groups] = torch.from_numpy(packed(x, i == 1, random[::GROUP]))
            elif target.dtype is torch.bfloat16:
                target[chunk].view(torch.int16).copy_(bf16_bits(torch.from_numpy(x), torch.from_numpy(random)))
            else:
                target[chunk] = torch.from_numpy(x)
    carried = torch.from_numpy(numbers(keys[0], first + chunk.start, n)) if is_master_stochastic else torch.tensor(HALF)
    step.target.master.put(chunk, torch.from_numpy(w), carried)


def squares(gradient: SummedGradient, start: int, end: int, scratch: Scratch) -> list[float]:
    """fp32 sum of squares of each chunk of elements start .. end - 1, as a tree that any processor can reproduce: the second half
    of a chunk is added to the first half until one number remains. The last chunk is padded with zeros."""
    sums = list[float]()
    for first in range(start, end, CHUNK_ELEMENTS):
        x = gradient_of(gradient, first, min(first + CHUNK_ELEMENTS, end))
        x = torch.nn.functional.pad(x * x, (0, CHUNK_ELEMENTS - len(x)))
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        sums.append(float(x))
    return sums


def add(total: torch.Tensor, part: torch.Tensor, is_first: bool, start: int, end: int) -> None:
    """Add elements of any dtype to an fp32 sum; the first part is added to zero."""
    for first in range(start, end, UPDATE_ELEMENTS):
        chunk = slice(first, min(first + UPDATE_ELEMENTS, end))
        total[chunk] = (torch.zeros(()) if is_first else total[chunk]) + part[chunk].float()
