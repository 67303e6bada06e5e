"""Fused kernels in transformers' layers: RMS norm, gated activation and rotary embedding.

`forward` of modules is replaced in place. The fused norm is PyTorch's. Fused activation and rotary embedding are one autograd node
each, save few tensors, and are bitwise identical to eager. Kernels of other packages (linear attention, convolutions) run only if
the semantics name them.
"""

# N rows, D width; B sequences, H heads, T tokens, E width of a head
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.policy import Semantics

from . import transformers_patches as hf
from .pointwise import CALL_BY_CALL, GATES, ROTATE, Function, Pair, several
from .recompute import unrecorded

NORM_ROWS = 1024  # rows of an fp32 chunk in a CPU's norm


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return random tensors from a new generator with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _result(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of transformers; None if it takes other arguments, or reads other attributes of a module."""
    try:
        return function(*arguments)
    except Exception:
        return None


@cache
def rotates(function: Callable[..., Any]) -> bool:
    """True if a function of transformers computes the rotary embedding of `rotary`."""
    q, k, cos, sin = _random((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8))
    results, expected = _result(function, q, k, cos, sin), rotary(CALL_BY_CALL[ROTATE], q, k, cos, sin)
    return results is not None and all(torch.equal(x, y) for x, y in zip(expected, results, strict=True))


def is_rotary_call(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """True if the arguments of a rotary embedding are those of `rotary`, for whole heads."""
    return len(args) == 4 and not options and args[0].shape[-1] == args[2].shape[-1]


def gate_of(part: nn.Module) -> str | None:
    """Gated activation of a module that is down(act(gate(x)) * up(x)): a name of `pointwise.GATES`; None for other modules."""
    if {name for name, _ in part.named_children()} != hf.PLAIN_MLP or not _is_gated(type(part).forward):
        return None
    act: Any = part.act_fn
    (x,) = _random((256,))
    y = _result(act, x) if type(act) in map(type, map(hf.ACT2FN.__getitem__, hf.ACTIVATIONS)) else None
    return next((name for name in GATES if y is not None and torch.equal(y, CALL_BY_CALL[name][0](x, torch.ones(256)))), None)


def gates_of(layers: Iterable[nn.Module]) -> tuple[str, ...]:
    gates = (gate_of(part) for layer in layers for part in layer.modules())
    return tuple(sorted({gate for gate in gates if gate is not None}))


@cache
def _is_gated(forward: Callable[..., Any]) -> bool:
    x, gate, up, down = _random((3, 4), (6, 4), (6, 4), (4, 6))
    products = {name: partial(F.linear, weight=w) for name, w in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))}
    result = _result(forward, SimpleNamespace(**products, act_fn=F.silu), x)
    return result is not None and torch.equal(result, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))


def is_rms_norm(part: nn.Module) -> bool:
    """True if a module computes `torch.nn.functional.rms_norm`."""
    weight, eps = getattr(part, "weight", None), getattr(part, hf.NORM_EPS, None)
    named = type(part).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and isinstance(eps, float)
    return named and _is_rms_norm(type(part).forward)


@cache
def _is_rms_norm(forward: Callable[..., Any]) -> bool:
    x, weight = _random((3, 8), (8,))
    result = _result(forward, SimpleNamespace(weight=weight, variance_epsilon=0.1, eps=0.1), x)
    has_shape = isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (x.shape, x.dtype)
    return has_shape and torch.allclose(result, F.rms_norm(x, (8,), weight, 0.1), rtol=1e-5)


def use_kernels(layer: nn.Module, semantics: Semantics, pointwise: Mapping[str, Pair] = CALL_BY_CALL) -> None:
    """Replace functions of a decoder layer by the kernels of the semantics, where these are verified to be equal."""
    for part in layer.modules():
        if semantics.norm == "fused" and is_rms_norm(part):
            use_fused_norm(part)
        if semantics.pointwise == "fused":
            if (gate := gate_of(part)) is not None:
                part.forward = partial(gated_mlp, part, pointwise[gate])
            _use_rotary(part, pointwise[ROTATE])
        if semantics.library_kernels:
            named = {n: f for n, f in hf.optional_functions(part).items() if hf.LIBRARY_KERNELS.get(n) in semantics.library_kernels}
            hf.replace_globals(part, named)


def use_fused_norm(norm: Any) -> None:
    """Replace a norm by PyTorch's. WorkloadError if the module is not verified to be an RMS norm."""
    if not is_rms_norm(norm):
        raise WorkloadError(f"no fused kernel computes a {type(norm).__name__}; plan with --kernels eager")
    norm.forward = lambda x: rms_norm(x, norm.weight, norm.variance_epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`torch.nn.functional.rms_norm`: computed in fp32 and rounded once, weight included."""
    if x.device.type == "cpu":
        return _CpuRmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x, weight.shape, weight, eps)


class _CpuRmsNorm(torch.autograd.Function):
    """RMS norm on a CPU, which saves input and weight alone, like a GPU's kernel; PyTorch's CPU norm saves fp32 intermediates.
    Chunks of rows bound fp32 memory. The weight's gradient is the fp32 sum over chunks in order, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty(x.shape, dtype=x.dtype)
        for rows_ND, out_ND in zip(_rows(x, weight), _rows(y, weight), strict=True):
            out_ND.copy_(F.rms_norm(rows_ND, weight.shape, weight, eps))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), needs_weight = ctx.saved_tensors, ctx.needs_input_grad[1]
        dx, sum_D = torch.empty(x.shape, dtype=x.dtype), torch.zeros(weight.shape)
        for rows_ND, gradient_ND, out_ND in zip(*(_rows(tensor, weight) for tensor in (x, gradients[0], dx)), strict=True):
            wide_ND, gradient_ND = rows_ND.float(), gradient_ND.float()
            scale_N1 = torch.rsqrt(wide_ND.square().mean(-1, keepdim=True) + ctx.eps)
            normed_ND = wide_ND * scale_N1
            if needs_weight:
                sum_D += (gradient_ND * normed_ND).sum(0)
            gradient_ND = gradient_ND * weight.float()
            along_N1 = (gradient_ND * normed_ND).mean(-1, keepdim=True)
            out_ND.copy_((gradient_ND - normed_ND * along_N1) * scale_N1)
        return dx, sum_D.to(weight.dtype) if needs_weight else None, None


def _rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.reshape(-1, weight.numel()).split(NORM_ROWS)  # type: ignore[no-any-return]


def gated_mlp(mlp: Any, functions: Pair, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) of an MLP of transformers. `functions`: forward and backward of its gated activation."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    activation = _OneNode.apply(*functions, gate.flatten(), up.flatten())  # type: ignore[no-untyped-call]
    return mlp.down_proj(activation.view_as(gate))  # type: ignore[no-any-return]


def _use_rotary(attention: nn.Module, functions: Pair) -> None:
    """Replace the rotary embedding in this module's forward."""
    forward: Any = type(attention).forward
    eager = getattr(forward, "__globals__", {}).get(hf.ROTARY)
    if eager is None or hf.ROTARY not in forward.__code__.co_names or not rotates(eager):
        return

    def rotary_or_eager(*args: Any, **options: Any) -> Any:
        return rotary(functions, *args) if is_rotary_call(args, options) else eager(*args, **options)

    hf.replace_globals(attention, {hf.ROTARY: rotary_or_eager})


def rotary(
    functions: Pair, q_BHTE: torch.Tensor, k_BHTE: torch.Tensor, cos_BTE: torch.Tensor, sin_BTE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of queries and keys, like `apply_rotary_pos_emb` of transformers."""
    turn = cos_BTE.unsqueeze(1), sin_BTE.unsqueeze(1)
    q, k = (_OneNode.apply(*functions, x, *turn) for x in (q_BHTE, k_BHTE))  # type: ignore[no-untyped-call]
    return q, k


class _OneNode(torch.autograd.Function):
    """Function as one autograd node, which saves its last two inputs. `backward`: function of output gradient and these inputs."""

    @staticmethod
    def forward(ctx: Any, function: Function, backward: Function, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs[-2:])
        ctx.backward_function, ctx.n_inputs = backward, len(inputs)
        with unrecorded():
            return function(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with unrecorded():
            results = several(ctx.backward_function(gradients[0], *ctx.saved_tensors))
        return None, None, *results, *[None] * (ctx.n_inputs - len(results))
