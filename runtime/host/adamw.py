"""AdamW on a chunk: torch's fused kernel on the host, and on a device the same operations, each rounded once, to the host's bits.

A GPU performs them in one kernel if that is found to give the host's bits, and else call by call, which is made to give them. A
processor computes the last few elements of a parameter, those that fill no register, in another sequence: blocks with such
parameters stay on the host (`Optimizer.device_multiple`).
"""

# All tensors are flat fp32 chunks of one parameter, unless a name says otherwise.
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.errors import PlanError
from runtime.plan.optimizer import AdamW

from .chunks import Kernel

PROBE_ELEMENTS = 2**16 + 24

MultiplyAdd = Callable[[Tensor, Tensor, Tensor], Tensor]  # a * b + c, rounded once


def fused(operands: list[list[torch.Tensor]], numbers: list[float], n_updates: torch.Tensor) -> None:
    """On the host."""
    torch._fused_adamw_(
        operands[0],
        operands[1],
        operands[2],
        operands[3],
        [],
        [n_updates],
        lr=numbers[0],
        beta1=numbers[1],
        beta2=numbers[2],
        weight_decay=numbers[3],
        eps=numbers[4],
        amsgrad=False,
        maximize=False,
    )


# -- on a device ------------------------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """What one update multiplies by, divides by and adds: doubles, each rounded to fp32 where it is used."""

    decay: float  # of the weight
    towards: float  # the gradient, of the first moment
    beta2: float
    of_square: float
    correction: float  # of the second moment's root
    eps: float
    rate: float  # of the first moment, negative


def factors(numbers: list[float], n_updates: Tensor) -> Factors:
    """`n_updates` counts from 1, as the fused kernel's step does."""
    lr, beta1, beta2, weight_decay, eps = numbers
    of_first, of_second = (1 - beta ** int(n_updates) for beta in (beta1, beta2))
    return Factors(1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(of_second), eps, -lr / of_first)


def call_by_call(multiply_add: MultiplyAdd) -> Kernel:
    """In torch's own operations. Each but the one that is given rounds once, right, on every device."""

    def kernel(operands: list[list[Tensor]], numbers: list[float], n_updates: Tensor) -> None:
        (master,), (gradient,), (exp_avg,), (exp_avg_sq,) = operands
        by = factors(numbers, n_updates)

        def scalar(value: float) -> Tensor:
            """On the device: a quotient by a number of the host's would be a product with its reciprocal."""
            return torch.full((), value, dtype=torch.float32, device=master.device)

        master.mul_(scalar(by.decay))
        towards = scalar(by.towards)
        is_near = abs(by.towards) < 0.5
        coefficient, base = (towards, exp_avg) if is_near else (towards - 1, gradient)
        exp_avg.copy_(multiply_add(coefficient.expand_as(base), gradient - exp_avg, base))
        part = scalar(by.of_square) * gradient
        exp_avg_sq.copy_(multiply_add(part, gradient, exp_avg_sq * scalar(by.beta2)))
        # The root of a double, rounded, is the root of an fp32 rounded right; not every processor's own is.
        root = exp_avg_sq.double().sqrt_().float() if master.device.type == "cpu" else exp_avg_sq.sqrt()
        denominator = root.div_(scalar(by.correction)).add_(scalar(by.eps))
        master.add_((exp_avg * scalar(by.rate)).div_(denominator))

    return kernel


def emulated(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once, in doubles: the product is exact, and a sum that is not is made odd, so that it comes out right when
    it is rounded again (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    is_even = (total.view(torch.int64) & 1) == 0
    further = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype))
    return torch.where((error != 0) & is_even & torch.isfinite(total), further, total).float()


_SOURCE = """
template <typename T>
void adamw(T master, T gradient, T exp_avg, T exp_avg_sq, T decay, T towards, T beta2, T of_square, T correction, T eps, T rate,
           T& next, T& first, T& second) {
    bool is_near = fabsf(towards) < 0.5f;
    first = __fmaf_rn(is_near ? towards : __fsub_rn(towards, 1.0f), __fsub_rn(gradient, exp_avg), is_near ? exp_avg : gradient);
    second = __fmaf_rn(__fmul_rn(of_square, gradient), gradient, __fmul_rn(exp_avg_sq, beta2));
    T denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), correction), eps);
    next = __fadd_rn(__fmul_rn(master, decay), __fdiv_rn(__fmul_rn(rate, first), denominator));
}
"""


def one_kernel() -> Kernel:
    """In one kernel of a CUDA device, whose functions say how they round."""
    compiled = torch.cuda.jiterator._create_multi_output_jit_fn(_SOURCE, num_outputs=3, **dict.fromkeys(Factors._fields, 0.0))

    def kernel(operands: list[list[Tensor]], numbers: list[float], n_updates: Tensor) -> None:
        (master,), (gradient,), (exp_avg,), (exp_avg_sq,) = operands
        found = compiled(master, gradient, exp_avg, exp_avg_sq, **factors(numbers, n_updates)._asdict())
        for place, value in zip((master, exp_avg, exp_avg_sq), found, strict=True):
            place.copy_(value)

    return kernel


@lru_cache(maxsize=8)
def on_device(device: torch.device) -> Kernel:
    """The first way to perform AdamW there that gives the host's bits. PlanError where none does."""
    fast = [one_kernel()] if device.type == "cuda" else []
    for candidate in (*fast, call_by_call(emulated)):
        if gives_the_hosts_bits(candidate, device):
            return candidate
    raise PlanError(
        f"no AdamW on {device.type} gives the host's bits here; plan with --policy FILE, a policy with empty device_blocks"
    )


def gives_the_hosts_bits(kernel: Kernel, device: torch.device) -> bool:
    """Whether it does on numbers of every size; False also where it cannot be performed."""
    generator = torch.Generator().manual_seed(0)

    def drawn(spread: int) -> Tensor:
        exponents = torch.randint(-spread, spread, (PROBE_ELEMENTS,), generator=generator)
        return torch.randn(PROBE_ELEMENTS, generator=generator) * 10.0**exponents

    for settings in (AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1), AdamW(lr=0.1, weight_decay=0.0)):
        host = [drawn(2), drawn(6), drawn(6).square()]
        found = [part.clone().to(device) for part in host]
        for step in (1, 2, 1000):
            gradient, n_updates = drawn(8), torch.tensor(float(step))
            fused([[host[0]], [gradient], [host[1]], [host[2]]], settings.numbers, n_updates)
            try:
                kernel([[found[0]], [gradient.to(device)], [found[1]], [found[2]]], settings.numbers, n_updates)
            except RuntimeError:  # whatever a compiler makes of its machine
                return False
        if not all(torch.equal(a.cpu(), b) for a, b in zip(found, host, strict=True)):
            return False
    return True
