"""AdamW on a chunk: torch's fused kernel on the host, and on a GPU one kernel of the same operations, to the host's bits.

A processor computes the last few elements of a parameter, those that fill no register, in another sequence: blocks with such
parameters stay on the host (`Optimizer.device_multiple`).
"""

# All tensors are flat fp32 chunks of one parameter, unless a name says otherwise.
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from runtime.errors import PlanError
from runtime.plan.optimizer import AdamW

from .chunks import Kernel

PROBE_ELEMENTS = 2**16 + 24


def fused(operands: list[list[torch.Tensor]], numbers: list[float], n_updates: torch.Tensor) -> None:
    """On the host."""
    torch._fused_adamw_(
        operands[0], operands[1], operands[2], operands[3], [], [n_updates],
        lr=numbers[0], beta1=numbers[1], beta2=numbers[2], weight_decay=numbers[3], eps=numbers[4],
        amsgrad=False, maximize=False,
    )  # fmt: skip


# -- on a device ------------------------------------------------------------------------------------------------------


def factors(numbers: list[float], n_updates: int) -> dict[str, float]:
    """What one update multiplies by, divides by and adds: doubles, each rounded to fp32 where it is used. `n_updates` counts from
    1, as the fused kernel's step does."""
    lr, beta1, beta2, weight_decay, eps = numbers
    return {
        "decay": 1 - lr * weight_decay,
        "towards": 1 - beta1,  # the gradient, of the first moment
        "beta2": beta2,
        "of_square": 1 - beta2,
        "correction": math.sqrt(1 - beta2**n_updates),  # of the second moment's root
        "eps": eps,
        "rate": -lr / (1 - beta1**n_updates),  # of the first moment
    }


SOURCE = """
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


def in_one_call(updated: Callable[..., Sequence[Tensor]]) -> Kernel:
    """By a function of the four tensors and the factors, which makes master and moments anew."""

    def kernel(operands: list[list[Tensor]], numbers: list[float], n_updates: Tensor) -> None:
        (master,), (gradient,), (exp_avg,), (exp_avg_sq,) = operands
        found = updated(master, gradient, exp_avg, exp_avg_sq, **factors(numbers, int(n_updates)))
        for place, value in zip((master, exp_avg, exp_avg_sq), found, strict=True):
            place.copy_(value)

    return kernel


@lru_cache(maxsize=8)
def on_device(device: torch.device) -> Kernel:
    """AdamW there: the host's own on a processor. PlanError for a GPU that does not give the host's bits."""
    if device.type == "cpu":
        return fused
    names = dict.fromkeys(factors(AdamW().numbers, 1), 0.0)  # of what the kernel takes besides tensors
    kernel = in_one_call(torch.cuda.jiterator._create_multi_output_jit_fn(SOURCE, num_outputs=3, **names))
    if not gives_the_hosts_bits(kernel, device):
        raise PlanError(
            f"AdamW on {device.type} does not give the host's bits here; plan with --policy FILE, a policy with empty device_blocks"
        )
    return kernel


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
