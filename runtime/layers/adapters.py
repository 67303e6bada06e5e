"""LoRA adapters: a frozen linear layer, or all experts of a layer, with trained low-rank products.

y = x W^T + b + s (dropout(x) A^T) B^T with a frozen weight W, never merged. First h = dropout(x) A^T and y = s h B^T + b, each
rounded once; then the frozen product is accumulated onto y and rounded once. This reads y in the epilogue of a large product, when
memory is idle. The gradient of x is computed in the same order: dh A, then g W accumulated onto it.

Projections that get the same input (q, k, v; gate, up) are one autograd node without dropout: one product with their stacked A, one
for the gradient of the stack, and one sum for the gradient of x. Example with three projections of rank 16: A is (48, I).
The node is one library call, so that activation checkpointing stores both of its results, y and h.

FP8 products (docs/fp8.md) have no accumulating form: y is first the frozen product with the bias, rounded once, and s h B^T is
accumulated onto it. The input is quantised once for all projections. For its gradient the frozen products are rounded, and added
in order; then dh A is accumulated. Weights are then flat bytes in fp8-rows (`Views.weights`). Without adapters they are bf16, and
quantised at each use. In stacks of experts the order is that of bf16.
"""

# N rows, I inputs, O outputs, R rank, S = R times the number of projections with one input, E experts
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.train import ADAPTERS, EXPERTS, Lora
from penstock.runtime.scaled_products import grouped_product, input_gradient, product, quantise

from .kernels import LIBRARY
from .packed_weights import parts
from .transformers_patches import IS_TRANSPOSED, Conv1D, replace_grouped_products


def adapt(module: nn.Module, prefix: str, names: Iterable[str], lora: Lora, shared_inputs: Iterable[Sequence[str]] = ()) -> None:
    """Insert adapters into a module. `names`: of their factors, with the prefix. WorkloadError for a submodule without support.
    `shared_inputs`: names of submodules with the same input, e.g. [("mlp.gate_proj", "mlp.up_proj")] (layer_chain.py)."""
    for name in dict.fromkeys(name.rsplit(".", 2)[0].removesuffix(".base_layer") for name in names):
        parent, _, child = name.removeprefix(prefix).rpartition(".")
        part: Any = getattr(module.get_submodule(parent), child, None)
        if isinstance(part, nn.Linear | Conv1D):
            setattr(module.get_submodule(parent), child, AdaptedLinear(part, lora))
        elif child == EXPERTS and getattr(part, IS_TRANSPOSED, None) is not None:
            AdaptedExperts(part, lora)
        else:
            raise WorkloadError(f"{name}: adapters do not support this module; make the plan again")
    for submodules in shared_inputs:
        parts = tuple(part for part in map(module.get_submodule, submodules) if isinstance(part, AdaptedLinear))
        for part in parts:
            part.partners = parts


def initial_factors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Initial fp32 factors as in PEFT: B zero, A Kaiming-uniform. Deterministic for a seed."""
    generator = torch.Generator().manual_seed(seed)
    factors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, factor in factors.items():
        if name.endswith(f"{ADAPTERS[0]}.weight"):
            nn.init.kaiming_uniform_(factor, a=5**0.5, generator=generator)
    return factors


class Factor(nn.Module):
    """Matrix of an adapter, named as in files. Not an `nn.Linear`, because transformers would initialise that."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


class AdaptedLinear(nn.Linear):
    """A linear layer, or one with a transposed weight (I, O), with an adapter."""

    def __init__(self, linear: nn.Linear | Conv1D, lora: Lora) -> None:
        nn.Module.__init__(self)  # keeps the layer's weight and bias
        self.weight, self.bias = linear.weight, linear.bias
        self.plain_forward: Any = type(linear).forward
        self.is_transposed = isinstance(linear, Conv1D)
        self.out_features, self.in_features = self.oriented_weight.shape
        self.nf = self.out_features  # of Conv1D's forward
        self.lora_A = Factor((lora.rank, self.in_features), linear.weight)
        self.lora_B = Factor((self.out_features, lora.rank), linear.weight)
        self.scale, self.dropout, self.is_disabled = lora.scale, lora.dropout, False
        self.partners: tuple[AdaptedLinear, ...] = (self,)  # projections with the same input, computed together
        self.ready: tuple[Tensor, Tensor] | None = None  # the input and output that a partner's call has computed

    @property
    def oriented_weight(self) -> Tensor:
        return self.weight.t() if self.is_transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.is_disabled:
            plain: Tensor = self.plain_forward(self, x)
            return plain
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        drops = self.training and self.dropout > 0
        parts = (self,) if drops else self.partners
        dropped = torch.native_dropout(x, self.dropout, True)[0] if drops else x
        operands = [t for part in parts for t in (part.oriented_weight, part.bias, part.lora_A.weight, part.lora_B.weight)]
        outputs = dict(zip(parts, _Adapted.apply(x, dropped, self.scale, *operands), strict=True))  # type: ignore[no-untyped-call]
        y: Tensor = outputs.pop(self)
        for part, output in outputs.items():
            part.ready = (x, output)
        return y


class _Adapted(torch.autograd.Function):
    """Projections with one input. `operands`: weight, bias, A and B of each. Saves the input, h and the matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: float, *operands: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases, a, b = (operands[i::4] for i in range(4))
        outputs, h_NS = torch.ops.penstock.adapted_linear(x, dropped, weights, biases, a, b, scale)
        ctx.drops, ctx.scale = dropped is not x, scale
        ctx.save_for_backward(dropped, h_NS, *weights, *a, *b)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dropped, h_NS, *matrices = ctx.saved_tensors
        n, scale, gradients_NO = len(gradients), ctx.scale, [rows(g) for g in gradients]
        weights, a, b = matrices[:n], matrices[n : 2 * n], matrices[2 * n :]
        needed_x, _, _, *needed = ctx.needs_input_grad
        dh_NS = torch.empty_like(h_NS)
        projections = list(zip(gradients_NO, b, h_NS.split(len(a[0]), 1), dh_NS.split(len(a[0]), 1), strict=True))
        for g_NO, b_OR, _, dh_NR in projections:
            dh_NR.addmm_(g_NO, b_OR, beta=0, alpha=scale)
        da: Sequence[Tensor | None] = (dh_NS.t() @ rows(dropped)).split(len(a[0])) if any(needed[2::4]) else [None] * n
        db = [
            torch.empty_like(b_OR).addmm_(g_NO.t(), h_NR, beta=0, alpha=scale) if needed_b else None
            for (g_NO, b_OR, h_NR, _), needed_b in zip(projections, needed[3::4], strict=True)
        ]
        dx = d_dropped = None
        if needed_x:
            width = dropped.shape[-1]
            if ctx.drops:
                d_dropped, dx = (dh_NS @ _stacked(a)).view_as(dropped), _products_gradient(gradients_NO, weights, width)
            elif any(map(_is_scaled, weights)):
                dx = _products_gradient(gradients_NO, weights, width).addmm_(dh_NS, _stacked(a))
            else:
                dx = dh_NS @ _stacked(a)
                for g_NO, weight_OI in zip(gradients_NO, weights, strict=True):
                    dx.addmm_(g_NO, weight_OI)
            dx = dx.view_as(dropped)
        return dx, d_dropped, None, *(t for pair in zip(da, db, strict=True) for t in (None, None, *pair))


class AdaptedExperts(nn.Module):
    """Adapters of experts' `gate_up_proj`. Those of `down_proj` are in the module of experts, as in PEFT."""

    def __init__(self, experts: Any, lora: Lora) -> None:
        """Insert both into the module of experts, and replace its grouped products."""
        super().__init__()
        experts.base_layer = self
        for part, weight in ((experts, experts.down_proj), (self, experts.gate_up_proj)):  # names as in PEFT
            n_experts, n_in, n_out = (weight if experts.is_transposed else weight.transpose(1, 2)).shape
            part.lora_A = Factor((n_experts * lora.rank, n_in), weight)
            part.lora_B = Factor((n_out, lora.rank * n_experts), weight)
        self.scale, self.is_disabled, self.scaled = lora.scale, False, dict[str, list[int]]()
        replace_grouped_products(experts, partial(self._product, experts))

    def _product(
        self, experts: Any, x_NI: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, is_transposed: bool = False
    ) -> Tensor:
        """Grouped product of all experts with adapters, in place of transformers'."""
        if self.is_disabled:
            return stack_product(experts, self.scaled, x_NI, weight, offs, bias, is_transposed)
        part: Any = experts if weight is experts.down_proj else self
        operands = weight, _scaled_shape(experts, self.scaled, weight), is_transposed, part.lora_A.weight, part.lora_B.weight
        y_NO: Tensor = _AdaptedStack.apply(x_NI, offs, *operands, self.scale)  # type: ignore[no-untyped-call]
        return y_NO if bias is None else y_NO.add_(bias)


class _AdaptedStack(torch.autograd.Function):
    """Grouped product of all experts with adapters. Rows are sorted by expert; `offs`: end of each expert's rows. `shape`: of a
    weight that FP8 products multiply, (E, O, I), or (E, I, O) if transposed; empty for others."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, offs: Tensor, weight: Tensor, shape: list[int], transposed: bool, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        y_NO, h_NR = torch.ops.penstock.adapted_stack(x_NI, offs, weight, shape, transposed, a, b, scale)
        ctx.scale, ctx.shape, ctx.transposed = scale, shape, transposed
        ctx.save_for_backward(x_NI, weight, offs, a, b, h_NR)
        return y_NO  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, offs, a, b, h_NR = ctx.saved_tensors
        gradient_NO, grouped = gradients[0], partial(F.grouped_mm, offs=offs)
        a_ERI, b_EOR = factors_of_stack(a, b, len(offs))
        dh_NR = grouped(gradient_NO, b_EOR).mul_(ctx.scale)
        db_EOR = grouped(gradient_NO.t(), h_NR).mul_(ctx.scale)
        dx_NI = None
        if ctx.needs_input_grad[0]:
            dx_NI = _stack_product(gradient_NO, offs, weight, ctx.shape, not ctx.transposed).add_(grouped(dh_NR, a_ERI))
        da, db = grouped(dh_NR.t(), x_NI).view_as(a), db_EOR.permute(1, 2, 0).reshape(b.shape)
        return dx_NI, None, None, None, None, da, db, None


def stack_product(
    experts: Any,
    scaled: Mapping[str, list[int]],
    x_NI: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    is_transposed: bool = False,
) -> Tensor:
    """Grouped product of all experts, in place of transformers', in FP8 for weights in `scaled` (shapes by name)."""
    if shape := _scaled_shape(experts, scaled, weight):
        y_NO: Tensor = _ScaledStack.apply(x_NI, offs, weight, shape, is_transposed)  # type: ignore[no-untyped-call]
    else:
        y_NO = _stack_product(x_NI, offs, weight, [], is_transposed)
    return y_NO if bias is None else y_NO.add_(bias)


def _scaled_shape(experts: Any, scaled: Mapping[str, list[int]], weight: Tensor) -> list[int]:
    return scaled.get("down_proj" if weight is experts.down_proj else "gate_up_proj", [])


class _ScaledStack(torch.autograd.Function):
    """FP8 products of all experts, as `_AdaptedStack` without adapters. The gradient of a trained weight is computed in bf16."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, offs: Tensor, weight: Tensor, shape: list[int], transposed: bool) -> Tensor:
        ctx.shape, ctx.transposed = shape, transposed
        ctx.save_for_backward(offs, weight, *([x_NI] if ctx.needs_input_grad[2] else []))
        return torch.ops.penstock.scaled_stack(x_NI, offs, weight, shape, transposed)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_NO,), (offs, weight, *saved), dx_NI, d_weight = gradients, ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            dx_NI = _stack_product(g_NO, offs, weight, ctx.shape, not ctx.transposed)
        for x_NI in saved:
            first, second = (x_NI, g_NO) if ctx.transposed else (g_NO, x_NI)
            d_weight = F.grouped_mm(first.t(), second, offs=offs)
        return dx_NI, None, d_weight, None, None


def _stack_product(rows: Tensor, offs: Tensor, weight: Tensor, shape: list[int], transposed: bool) -> Tensor:
    """Product of rows with a stack, summed over its last dimension, or if `transposed` the one before. `shape`: in FP8."""
    if not shape:
        return F.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=offs)
    return grouped_product(rows, *_codes(weight, shape), offs, transposed)


def factors_of_stack(a: Tensor, b: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Factors of a stack as (E, R, I), a view, and (E, O, R), a copy because experts are innermost in B."""
    return a.view(n_experts, -1, a.shape[1]), b.view(b.shape[0], -1, n_experts).permute(2, 0, 1).contiguous()


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _stacked(a: Sequence[Tensor]) -> Tensor:
    return a[0] if len(a) == 1 else torch.cat(list(a))


def _is_scaled(weight: Tensor) -> bool:
    """True for a weight in fp8-rows, as flat bytes."""
    return weight.dtype is torch.uint8


def _codes(weight: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Codes (..., O, I) and scales (..., O) of a weight: of flat bytes in fp8-rows, or of a bf16 weight, which is quantised."""
    if _is_scaled(weight):
        codes, scales = parts(weight, tuple(shape), "fp8-rows")
    else:
        codes, scales = quantise(weight.flatten(0, -2))
    return codes.view(shape), scales.view(shape[:-1])


def _products_gradient(gradients_NO: Sequence[Tensor], weights: Sequence[Tensor], width: int, in_fp8: bool = False) -> Tensor:
    """Sum of the input gradients (N, I) of products, each rounded, added in order. `in_fp8`: also of bf16 weights."""
    dx_NI: Tensor | None = None
    for g_NO, weight in zip(gradients_NO, weights, strict=True):
        if in_fp8 or _is_scaled(weight):
            term_NI = input_gradient(g_NO, *_codes(weight, (g_NO.shape[1], width)))
        else:
            term_NI = torch.mm(g_NO, weight)
        dx_NI = term_NI if dx_NI is None else dx_NI.add_(term_NI)
    assert dx_NI is not None
    return dx_NI


def scaled_forward(linear: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer with an FP8 product. Its weight is flat bytes in fp8-rows, or in bf16."""
    return _Scaled.apply(x, [linear.out_features], linear.weight, linear.bias)[0]  # type: ignore[no-any-return, no-untyped-call]


def use_scaled_products(layer: nn.Module, names: Iterable[str], shared_inputs: Iterable[Sequence[str]] = ()) -> None:
    """Compute with FP8 products in the linear layers and experts with these weights. `names`: within the layer, such as
    `mlp.up_proj.weight` or `mlp.experts.down_proj`. `shared_inputs`: as for `adapt`. WorkloadError for another module."""
    scaled, stacks = set[nn.Module](), dict[str, dict[str, list[int]]]()
    for name in names:
        path, _, last = name.rpartition(".")
        if last != "weight":
            stacks.setdefault(path, {})[last] = [*layer.get_parameter(name).shape]
            continue
        part: Any = layer.get_submodule(path)
        plain = part.plain_forward if isinstance(part, AdaptedLinear) else getattr(type(part), "forward", None)
        if plain is not nn.Linear.forward:
            raise WorkloadError(f"{name}: no plain linear layer, so --compute fp8 does not support it; make the plan again")
        part.plain_forward = scaled_forward
        if not isinstance(part, AdaptedLinear):
            part.forward = partial(scaled_forward, part)
            scaled.add(part)
    for path, shapes in stacks.items():
        experts: Any = layer.get_submodule(path)
        if getattr(experts, IS_TRANSPOSED, None) is None:
            raise WorkloadError(f"{path}: no grouped product, so --compute fp8 does not support it; make the plan again")
        if isinstance(adapted := getattr(experts, "base_layer", None), AdaptedExperts):
            adapted.scaled = shapes
        else:
            replace_grouped_products(experts, partial(stack_product, experts, shapes))
    for submodules in shared_inputs:
        _Partners([part for part in map(layer.get_submodule, submodules) if part in scaled])


class _Partners:
    """Linear layers with one input, which one call quantises once for all FP8 products."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """Replace the modules' forward."""
        self.parts, self.x = parts, None
        self.outputs: dict[nn.Module, Tensor] = {}  # by module, until its call
        for part in parts:
            part.forward = partial(self.forward, part)

    def forward(self, part: nn.Module, x: Any) -> Tensor:
        if self.x is not x or part not in self.outputs:
            operands = [t for linear in self.parts for t in (linear.weight, linear.bias)]
            outputs = _Scaled.apply(x, [linear.out_features for linear in self.parts], *operands)  # type: ignore[no-untyped-call]
            self.x, self.outputs = x, dict(zip(self.parts, outputs, strict=True))
        y = self.outputs.pop(part)
        self.x = x if self.outputs else None
        return y


class _Scaled(torch.autograd.Function):
    """Linear layers with one input and FP8 products. `operands`: weight and bias of each. Saves the weights, and the input if one
    is trained. Gradients of weights and biases are those of `nn.Linear`, in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n_outputs: list[int], *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.width, trains = x.shape[-1], any(ctx.needs_input_grad[2::2])
        ctx.save_for_backward(*operands[::2], *([x] if trains else []))
        return tuple(torch.ops.penstock.scaled_linear(x, operands[::2], operands[1::2], n_outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, n, gradients_NO = ctx.saved_tensors, len(gradients), [rows(g) for g in gradients]
        needed_x, _, *needed = ctx.needs_input_grad
        dx = _products_gradient(gradients_NO, saved[:n], ctx.width, in_fp8=True) if needed_x else None
        results = list[Tensor | None]()
        for g_NO, needed_weight, needed_bias in zip(gradients_NO, needed[::2], needed[1::2], strict=True):
            results += [g_NO.t() @ rows(saved[n]) if needed_weight else None, g_NO.sum(0) if needed_bias else None]
        return None if dx is None else dx.view(*gradients[0].shape[:-1], -1), None, *results


def _scaled_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], n_outputs: list[int]) -> list[Tensor]:
    outputs = [x.new_empty(*x.shape[:-1], n) for n in n_outputs]
    _scaled_linear_out(x, weights, biases, n_outputs, outputs)
    return outputs


def _scaled_linear_out(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], n_outputs: list[int], out: list[Tensor]
) -> None:
    scaled = quantise(rows(x))
    for weight, bias, n, y in zip(weights, biases, n_outputs, out, strict=True):
        product(*scaled, *_codes(weight, (n, x.shape[-1])), bias, out_NO=y.view(-1, n))


def _adapted_linear(
    x: Tensor, dropped: Tensor, weights: list[Tensor], biases: list[Tensor | None], a: list[Tensor], b: list[Tensor], scale: float
) -> tuple[list[Tensor], Tensor]:
    """Outputs of projections with one input, and their concatenated low-rank products (N, S)."""
    x_NI, h_NS, outputs = rows(x), rows(dropped) @ _stacked(a).t(), []
    scaled = quantise(x_NI) if any(map(_is_scaled, weights)) else None
    for weight_OI, bias_O, b_OR, h_NR in zip(weights, biases, b, h_NS.split(len(a[0]), 1), strict=True):
        outputs.append(x.new_empty(*x.shape[:-1], len(b_OR)))  # no view, because models may add to it in place
        y_NO = outputs[-1].view(-1, len(b_OR))
        if scaled is not None and _is_scaled(weight_OI):
            product(*scaled, *parts(weight_OI, (len(b_OR), x.shape[-1]), "fp8-rows"), bias_O, out_NO=y_NO)
            y_NO.addmm_(h_NR, b_OR.t(), alpha=scale)
            continue
        bias, beta = (x.new_empty(1), 0) if bias_O is None else (bias_O, 1)
        torch.addmm(bias, h_NR, b_OR.t(), beta=beta, alpha=scale, out=y_NO).addmm_(x_NI, weight_OI.t())
    return outputs, h_NS


def _adapted_stack(
    x_NI: Tensor, offs: Tensor, weight: Tensor, shape: list[int], transposed: bool, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and low-rank product (N, R). The frozen product is first, because grouped products cannot accumulate."""
    a_ERI, b_EOR = factors_of_stack(a, b, len(offs))
    y_NO, h_NR = _stack_product(x_NI, offs, weight, shape, transposed), F.grouped_mm(x_NI, a_ERI.transpose(1, 2), offs=offs)
    return y_NO.add_(F.grouped_mm(h_NR, b_EOR.transpose(1, 2), offs=offs), alpha=scale), h_NR


_LINEAR = "Tensor x, Tensor dropped, Tensor[] weights, Tensor?[] biases, Tensor[] a, Tensor[] b, float scale"
LIBRARY.define(f"adapted_linear({_LINEAR}) -> (Tensor[], Tensor)")
LIBRARY.impl("adapted_linear", _adapted_linear, "CompositeExplicitAutograd")
_SCALED = "Tensor x, Tensor[] weights, Tensor?[] biases, int[] n_outputs"
LIBRARY.define(f"scaled_linear({_SCALED}) -> Tensor[]")
LIBRARY.define(f"scaled_linear.out({_SCALED}, *, Tensor(a!)[] out) -> ()")
LIBRARY.impl("scaled_linear", _scaled_linear, "CompositeExplicitAutograd")
LIBRARY.impl("scaled_linear.out", _scaled_linear_out, "CompositeExplicitAutograd")
_STACK = "Tensor x, Tensor offs, Tensor weight, int[] shape, bool transposed"
LIBRARY.define(f"adapted_stack({_STACK}, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)")
LIBRARY.impl("adapted_stack", _adapted_stack, "CompositeExplicitAutograd")
LIBRARY.define(f"scaled_stack({_STACK}) -> Tensor")
LIBRARY.impl("scaled_stack", _stack_product, "CompositeExplicitAutograd")
