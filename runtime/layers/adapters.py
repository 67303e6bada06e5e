"""Adapters (LoRA): a frozen linear layer plus a trained low-rank product.

y = x W^T + b + s (dropout(x) A^T) B^T, of a frozen weight W, and never merged with it: rounded after the frozen product, after the
narrow one, and once more for the sum. It is one node of autograd, which keeps what the adapter's gradients need, and one call of a
library, so that what is remembered of a layer's forward holds both results.
"""

# N rows, I numbers of each that go in, O that come out, R rank
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.errors import WorkloadError
from runtime.plan.train import ADAPTERS, Lora

from .documents import LIBRARY


def adapt(module: nn.Module, prefix: str, shapes: dict[str, tuple[int, ...]], lora: Lora) -> None:
    """Put adapters of these shapes, by their names behind the prefix, into a module. WorkloadError where one does not fit."""
    for name in dict.fromkeys(name.rsplit(".", 2)[0] for name in shapes):
        parent, _, child = name.removeprefix(prefix).rpartition(".")
        linear = getattr(module.get_submodule(parent), child, None)
        found = [shapes.get(f"{name}.{factor}.weight") for factor in ADAPTERS]
        if not isinstance(linear, nn.Linear) or found != [(lora.rank, linear.in_features), (linear.out_features, lora.rank)]:
            raise WorkloadError(f"{name}: no adapter of the plan's sizes fits beside it; make the plan again")
        setattr(module.get_submodule(parent), child, AdaptedLinear(linear, lora))


def initial_factors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """An adapter as it begins, fp32, as PEFT makes it: B zero, so that it does nothing yet, A uniform; the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    factors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, factor in factors.items():
        if name.endswith(f"{ADAPTERS[0]}.weight"):
            nn.init.kaiming_uniform_(factor, a=5**0.5, generator=generator)
    return factors


class Factor(nn.Module):
    """A matrix of an adapter, under the name that files give it. No `nn.Linear`: transformers would initialise that."""

    def __init__(self, shape: tuple[int, int], like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        """The layer's own weights stay what they are."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = Factor((lora.rank, linear.in_features), linear.weight)
        self.lora_B = Factor((linear.out_features, lora.rank), linear.weight)
        self.scale, self.dropout, self.is_aside = lora.scale, lora.dropout, False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_aside:
            return F.linear(x, self.weight, self.bias)
        drops = self.training and self.dropout > 0
        dropped = torch.native_dropout(x, self.dropout, True)[0] if drops else x
        factors = self.lora_A.weight, self.lora_B.weight
        return _Adapted.apply(x, dropped, self.weight, self.bias, *factors, self.scale)  # type: ignore[no-any-return,no-untyped-call]


class _Adapted(torch.autograd.Function):
    """Keeps what the adapter reads and makes. The weight is frozen: of its input only the gradient passes through."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        y, h = torch.ops.penstock.adapted_linear(x, dropped, weight_OI, bias_O, a_RI, b_OR, scale)
        ctx.drops, ctx.scale = dropped is not x, scale
        ctx.save_for_backward(dropped, weight_OI, a_RI, b_OR, h)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dropped, weight_OI, a_RI, b_OR, h = ctx.saved_tensors
        of_x, of_dropped, _, _, of_a, of_b, _ = ctx.needs_input_grad
        gradient_NO, dropped_NI, h_NR = (rows(each) for each in (gradients[0], dropped, h))
        dh_NR = torch.empty_like(h_NR).addmm_(gradient_NO, b_OR, beta=0, alpha=ctx.scale)
        db_OR = torch.empty_like(b_OR).addmm_(gradient_NO.t(), h_NR, beta=0, alpha=ctx.scale) if of_b else None
        da_RI = dh_NR.t() @ dropped_NI if of_a else None
        towards_NI = gradient_NO @ weight_OI if of_x else None
        towards_dropped = None
        if ctx.drops and of_dropped:
            towards_dropped = (dh_NR @ a_RI).view_as(dropped)
        elif towards_NI is not None and not ctx.drops:
            towards_NI.addmm_(dh_NR, a_RI)
        towards = None if towards_NI is None else towards_NI.view_as(dropped)
        return towards, towards_dropped, None, None, da_RI, db_OR, None


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _adapted_linear(
    x: Tensor, dropped: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The product, and what the adapter makes on the way, of the rank's width."""
    y, h = F.linear(x, weight_OI, bias_O), F.linear(dropped, a_RI)
    rows(y).addmm_(rows(h), b_OR.t(), alpha=scale)
    return y, h


LIBRARY.define(
    "adapted_linear(Tensor x, Tensor dropped, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)"
)
LIBRARY.impl("adapted_linear", _adapted_linear, "CompositeExplicitAutograd")
