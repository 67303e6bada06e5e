"""Reference implementation of the host optimizer in plain torch and NumPy, chunk by chunk.

`loops.py` is bitwise identical. The reference runs where numba is missing and in tests, and updates the last elements of a
parameter, which fill no vector register of torch's kernel.
"""

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


def update(step: UpdateArguments, start: int, end: int) -> None:
    """Update elements start .. end - 1."""
    for at in range(start, end, UPDATE_ELEMENTS):
        here = slice(at, min(at + UPDATE_ELEMENTS, end))
        before, g = step.start_from or step.to, gradient_of(step.gradient, here.start, here.stop)
        g = g * torch.tensor(step.factor, dtype=torch.float32)
        wide = before.master.whole(here).to(torch.float32, copy=True)
        if step.drawn is not None:
            _update_drawn(step, here, wide, g)
            continue
        moments = [moment[here].clone() for moment in before.moments]
        (first, second), (lr, beta1, beta2, weight_decay, eps) = moments, step.settings.numbers
        torch._fused_adamw_(
            [wide], [g], [first], [second], [], [torch.tensor(float(step.n_updates))], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        step.to.master.put(here, wide)
        for kept, moment in zip(step.to.moments, moments, strict=True):
            kept[here] = moment


def _update_drawn(step: UpdateArguments, here: slice, wide: torch.Tensor, gradient: torch.Tensor) -> None:
    """Update by the arithmetic and rounding of docs/optimizers.md."""
    assert step.drawn is not None
    (keys, is_master_drawn, first), n = step.drawn, len(wide)
    w, g, by = wide.numpy(), gradient.numpy(), np.array(step.scalars, np.float32)
    groups = slice(group_bytes(here.start), group_bytes(here.stop))
    before = (step.start_from or step.to).moments
    m, *rest = [
        unpacked(x[groups].numpy(), n, i == 1) if x.dtype is torch.uint8 else x[here].float().numpy() for i, x in enumerate(before)
    ]
    with np.errstate(all="ignore"):
        if step.rule == "lion":
            u = m + by[1] * (g - m)
            w = w * by[0] - np.where(u > 0, by[3], np.where(u < 0, -by[3], u))
            after = [m + by[2] * (g - m)]
        else:
            m, v = m + by[1] * (g - m), rest[0] * by[2] + (by[3] * g) * g
            w = w * by[0] + (by[6] * m) / (np.sqrt(v) * by[4] + by[5])
            after = [m, v]
        for i, (kept, x) in enumerate(zip(step.to.moments, after, strict=True)):
            random = numbers(keys[i + 1], first + here.start, n)
            if kept.dtype is torch.uint8:
                kept[groups] = torch.from_numpy(packed(x, i == 1, random[::GROUP]))
            elif kept.dtype is torch.bfloat16:
                kept[here].view(torch.int16).copy_(bf16_bits(torch.from_numpy(x), torch.from_numpy(random)))
            else:
                kept[here] = torch.from_numpy(x)
    carried = torch.from_numpy(numbers(keys[0], first + here.start, n)) if is_master_drawn else torch.tensor(HALF)
    step.to.master.put(here, torch.from_numpy(w), carried)


def squares(gradient: SummedGradient, start: int, end: int, scratch: Scratch) -> list[float]:
    """fp32 sum of squares of each chunk of elements start .. end - 1, as a tree that any processor can reproduce: the second half
    of a chunk is added to the first half until one number remains. The last chunk is padded with zeros."""
    sums = list[float]()
    for at in range(start, end, CHUNK_ELEMENTS):
        x = gradient_of(gradient, at, min(at + CHUNK_ELEMENTS, end))
        x = torch.nn.functional.pad(x * x, (0, CHUNK_ELEMENTS - len(x)))
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        sums.append(float(x))
    return sums


def add(total: torch.Tensor, part: torch.Tensor, is_first: bool, start: int, end: int) -> None:
    """Add elements of any dtype to an fp32 sum; the first part is added to zero."""
    for at in range(start, end, UPDATE_ELEMENTS):
        here = slice(at, min(at + UPDATE_ELEMENTS, end))
        total[here] = (torch.zeros(()) if is_first else total[here]) + part[here].float()
