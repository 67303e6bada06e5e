"""Adapters (LoRA): a frozen linear layer plus a trained low-rank product; or all experts of a layer, each plus its own.

y = x W^T + b + s (dropout(x) A^T) B^T, of a frozen weight W, and never merged with it: rounded after the frozen product, after the
narrow one, and once more for the sum. It is one node of autograd, which keeps what the adapter's gradients need, and one call of a
library, so that what is remembered of a layer's forward holds both results.
"""

# N rows, I numbers of each that go in, O that come out, R rank, E experts
from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from runtime.errors import WorkloadError
from runtime.plan.train import ADAPTERS, EXPERTS, Lora

from .documents import LIBRARY


def adapt(module: nn.Module, prefix: str, names: Iterable[str], lora: Lora) -> None:
    """Put adapters into a module, given the names of their factors, which begin with the prefix. WorkloadError where none fits."""
    for name in dict.fromkeys(name.rsplit(".", 2)[0].removesuffix(".base_layer") for name in names):
        parent, _, child = name.removeprefix(prefix).rpartition(".")
        part: Any = getattr(module.get_submodule(parent), child, None)
        if isinstance(part, nn.Linear):
            setattr(module.get_submodule(parent), child, AdaptedLinear(part, lora))
        elif child == EXPERTS and getattr(part, "is_transposed", None) is not None:
            AdaptedExperts(part, lora)
        else:
            raise WorkloadError(f"{name}: no adapter fits beside it; make the plan again")


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

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
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


class AdaptedExperts(nn.Module):
    """Adapters of a layer's experts; what is not beside their last stack is in here, under the name of `base_layer`."""

    def __init__(self, experts: Any, lora: Lora) -> None:
        """Put them into the module of experts, whose products they join. Its weights stay what they are."""
        super().__init__()
        experts.base_layer = self
        for part, weight in ((experts, experts.down_proj), (self, experts.gate_up_proj)):  # nested as PEFT nests them
            n_experts, n_in, n_out = (weight if experts.is_transposed else weight.transpose(1, 2)).shape
            part.lora_A = Factor((n_experts * lora.rank, n_in), weight)
            part.lora_B = Factor((n_out, lora.rank * n_experts), weight)
        self.scale, self.is_aside = lora.scale, False
        own: Any = grouped_mm_experts_forward
        if "_grouped_linear" not in own.__code__.co_names:  # adapters would be left out without a word
            raise WorkloadError("this transformers computes experts by other products, which no adapter joins; train without them")
        joined = FunctionType(own.__code__, own.__globals__ | {"_grouped_linear": partial(self._product, experts)}, own.__name__)
        experts.forward = MethodType(joined, experts)

    def _product(
        self, experts: Any, x_NI: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, is_transposed: bool = False
    ) -> Tensor:
        """One of the two products of all experts, in place of transformers' own."""
        weight_EIO = weight if is_transposed else weight.transpose(-2, -1)
        of: Any = experts if weight is experts.down_proj else self
        factors = of.lora_A.weight, of.lora_B.weight
        if self.is_aside:
            y_NO = F.grouped_mm(x_NI, weight_EIO, offs=offs)
        else:
            y_NO = _AdaptedStack.apply(x_NI, weight_EIO, offs, *factors, self.scale)  # type: ignore[no-untyped-call]
        return y_NO if bias is None else y_NO.add_(bias)


class _AdaptedStack(torch.autograd.Function):
    """The same for the products of all experts at once, of rows that are sorted by expert: `offs` says where each one's end."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EIO: Tensor, offs: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        y_NO, h_NR = torch.ops.penstock.adapted_stack(x_NI, weight_EIO, offs, a, b, scale)
        ctx.scale = scale
        ctx.save_for_backward(x_NI, weight_EIO, offs, a, b, h_NR)
        return y_NO  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_EIO, offs, a, b, h_NR = ctx.saved_tensors
        gradient_NO, grouped = gradients[0], partial(F.grouped_mm, offs=offs)
        a_ERI, b_EOR = factors_of_stack(a, b, len(offs))
        dh_NR = grouped(gradient_NO, b_EOR).mul_(ctx.scale)
        db_EOR = grouped(gradient_NO.t(), h_NR).mul_(ctx.scale)
        towards_NI = None
        if ctx.needs_input_grad[0]:
            towards_NI = grouped(gradient_NO, weight_EIO.transpose(1, 2)).add_(grouped(dh_NR, a_ERI))
        da, db = grouped(dh_NR.t(), x_NI).view_as(a), db_EOR.permute(1, 2, 0).reshape(b.shape)
        return towards_NI, None, None, da, db, None


def factors_of_stack(a: Tensor, b: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """(E, R, I) and (E, O, R) of the factors of a stack: a view, and a copy, for in B experts are innermost."""
    return a.view(n_experts, -1, a.shape[1]), b.view(b.shape[0], -1, n_experts).permute(2, 0, 1).contiguous()


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _adapted_linear(
    x: Tensor, dropped: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The product, and what the adapter makes on the way, of the rank's width."""
    y, h = F.linear(x, weight_OI, bias_O), F.linear(dropped, a_RI)
    rows(y).addmm_(rows(h), b_OR.t(), alpha=scale)
    return y, h


def _adapted_stack(x_NI: Tensor, weight_EIO: Tensor, offs: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    a_ERI, b_EOR = factors_of_stack(a, b, len(offs))
    y_NO, h_NR = F.grouped_mm(x_NI, weight_EIO, offs=offs), F.grouped_mm(x_NI, a_ERI.transpose(1, 2), offs=offs)
    return y_NO.add_(F.grouped_mm(h_NR, b_EOR.transpose(1, 2), offs=offs), alpha=scale), h_NR


LIBRARY.define("adapted_stack(Tensor x, Tensor weight, Tensor offs, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)")
LIBRARY.impl("adapted_stack", _adapted_stack, "CompositeExplicitAutograd")
LIBRARY.define(
    "adapted_linear(Tensor x, Tensor dropped, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)"
)
LIBRARY.impl("adapted_linear", _adapted_linear, "CompositeExplicitAutograd")
