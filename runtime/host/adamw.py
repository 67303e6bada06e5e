"""AdamW's arithmetic: torch's fused kernel on the host, and what a GPU's (`adamw.cu`) is given to do the same, to the host's bits.

A processor computes the last few elements of a parameter, those that fill no register, in another sequence: blocks with such
parameters stay on the host (`Semantics.device_multiple`).
"""

import math

import torch


def fused(operands: list[list[torch.Tensor]], numbers: list[float], n_updates: torch.Tensor) -> None:
    """On the host: flat fp32 chunks of one parameter."""
    torch._fused_adamw_(
        operands[0], operands[1], operands[2], operands[3], [], [n_updates],
        lr=numbers[0], beta1=numbers[1], beta2=numbers[2], weight_decay=numbers[3], eps=numbers[4],
        amsgrad=False, maximize=False,
    )  # fmt: skip


def factors(numbers: list[float], n_updates: int) -> list[float]:
    """What one update multiplies by, divides by and adds, in the order of the kernel's arguments: doubles, each rounded to fp32
    where it is used. `n_updates` counts from 1, as the fused kernel's step does."""
    lr, beta1, beta2, weight_decay, eps = numbers
    # decay; towards, of the first moment; beta2; of the square; correction, of the second moment's root; eps; rate
    corrections = 1 - beta1**n_updates, math.sqrt(1 - beta2**n_updates)
    return [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, corrections[1], eps, -lr / corrections[0]]
