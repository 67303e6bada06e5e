"""Fused kernels in transformers' layers: attention, RMS norm, gated activation and rotary embedding.

`forward` of modules is replaced in place. The fused norm is PyTorch's. Fused activation and rotary embedding are one autograd node
each, save few tensors, and are bitwise identical to eager. Kernels of other packages (linear attention, convolutions) run only if
the semantics name them. A sink of attention is a learned logit per head that takes part in the softmax and has no value.
"""

# N rows, D width; B sequences, H heads, T tokens, E width of a head
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.footprint import padded_tokens
from penstock.runtime.plan.policy import Semantics

from . import transformers_patches as hf
from .pointwise import CALL_BY_CALL, GATES, ROTATE, Function, Pair, several
from .recompute import unrecorded

Tensors = Sequence[torch.Tensor]
NORM_ROWS = 1024  # rows of an fp32 chunk in a CPU's norm
CHUNK_TOKENS = 512  # tokens of an fp32 chunk in the gradient of sinks


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


@cache
def adds_sinks(eager: Callable[..., Any]) -> bool:
    """True if an eager attention of transformers computes the softmax with its module's sinks, like `with_sinks`."""
    with torch.device("cpu"), torch.no_grad():
        q, k, v, sinks = _random((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), (4,))
        module, hidden = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False), _visible(5, 3).logical_not()
        result = _result(partial(eager, scaling=0.3), module, q, k, v, torch.zeros(1, 1, 5, 5).masked_fill(hidden, -1e30))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        logits = (0.3 * q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        shares = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
        return result is not None and torch.allclose(result[0], (shares @ v).transpose(1, 2), rtol=1e-4, atol=1e-5)


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


def with_sinks(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    n_tokens: Sequence[int] = (),
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function with the parameters of transformers' registry; (B, H, T, E) to (B, T, H, E). `s_aux`: sinks (H,). Ours:
    `n_tokens`, document lengths. A mask must be the sliding window's. WorkloadError for a call that no fused kernel computes."""
    window = None if attention_mask is None else sliding_window
    has_shapes = query_BHTE.shape[2:] == key_BHTE.shape[2:] == value_BHTE.shape[2:]
    if s_aux is None or not (has_shapes and is_plain(dropout, options)) or (attention_mask is not None and window is None):
        raise WorkloadError(f"no scaled_dot_product_attention computes {type(module).__name__}; use eager attention")
    operands = query_BHTE, key_BHTE, value_BHTE
    return FusedAttention.apply(*operands, [*n_tokens], scaling, s_aux, window, attention_mask), None  # type: ignore[no-untyped-call]


hf.register_attention(hf.WITH_SINKS, with_sinks)


def is_plain(dropout: float, options: Mapping[str, Any]) -> bool:
    """True for causal attention without dropout, bias and cap of logits. `options`: further arguments of transformers."""
    return dropout == 0.0 and options.get("is_causal", True) and all(options.get(k) is None for k in ("position_bias", "softcap"))


class FusedAttention(torch.autograd.Function):
    """Fused attention per document in one autograd node, which saves the same tensors as attention of whole sequences.

    With sinks, the kernel's output is multiplied by the softmax's share without the sink, sigmoid(log-sum-exp - sink), and the sink
    joins the log-sum-exp. From these two, the kernel's backward computes the gradients of queries, keys and values: it reads the
    probabilities from the log-sum-exp, and rowsum(gradient * output) is the sum over all logits, because the sink has no value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTE: torch.Tensor,
        key_BHTE: torch.Tensor,
        value_BHTE: torch.Tensor,
        n_tokens: list[int],
        scale: float | None,
        sinks_H: torch.Tensor | None = None,
        window: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        operands = query_BHTE, key_BHTE, value_BHTE
        out_BTHE, sums_BTH = torch.ops.penstock.attention_by_document(*operands, n_tokens, scale, sinks_H, window, mask)
        ctx.n_tokens, ctx.scale, ctx.window = n_tokens, scale, window
        ctx.save_for_backward(*operands, out_BTHE, sums_BTH, *([] if sinks_H is None else [sinks_H]))
        return out_BTHE  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out_BTHE, sums_BTH, *sinks = ctx.saved_tensors
        operands, d_sinks_H = (query, key, value), None
        if sinks and ctx.needs_input_grad[5]:
            d_sinks_H = _sinks_gradient(gradients[0], out_BTHE, sums_BTH, sinks[0])
        inputs = (gradients[0].transpose(1, 2), *operands, out_BTHE.transpose(1, 2), sums_BTH.transpose(1, 2))
        if not ctx.n_tokens:
            return (*_attend_backward(inputs, ctx.scale, ctx.window), None, None, d_sinks_H, None, None)
        results = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in operands]
        _each_document(lambda padded: _attend_backward(padded, ctx.scale, ctx.window), inputs, results, ctx.n_tokens)
        return (*results, None, None, d_sinks_H, None, None)


def _sinks_gradient(
    d_out_BTHE: torch.Tensor, out_BTHE: torch.Tensor, sums_BTH: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """-sum of p * rowsum(gradient * output), with the sink's probability p, in fp32; tokens in chunks, to bound temporaries."""
    chunks = zip(*(x.split(CHUNK_TOKENS, 1) for x in (d_out_BTHE, out_BTHE)), strict=True)
    along_BTH = torch.cat([(d_out.to(sums_BTH.dtype) * out.to(sums_BTH.dtype)).sum(-1) for d_out, out in chunks], 1)
    shares_BTH = torch.exp(sinks_H.to(sums_BTH.dtype) - sums_BTH) * along_BTH
    return -shares_BTH.contiguous().sum((0, 1)).to(sinks_H.dtype)  # one order of additions for any memory layout


def _attention_by_document(
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    n_tokens: list[int],
    scale: float | None,
    sinks_H: torch.Tensor | None = None,
    window: int | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, T, H, E) and log-sum-exps (B, T, H). A single library call, so that checkpointing stores both results whole.
    `mask`: of whole sequences (B, 1, T, T); on a CPU it is compared with the window's."""
    inputs, (n_sequences, n_heads, seq_len, width) = (query_BHTE, key_BHTE, value_BHTE), query_BHTE.shape
    if mask is not None and mask.device.type == "cpu" and not bool((mask == _visible(seq_len, window)).all()):
        raise WorkloadError("its attention computes other masks")
    if not n_tokens:
        out_BHTE, sums_BHT = _attend(inputs, scale, sinks_H, window)
        return out_BHTE.transpose(1, 2), sums_BHT.transpose(1, 2)
    out_BTHE = query_BHTE.new_empty(n_sequences, seq_len, n_heads, width)
    sums_BTH = query_BHTE.new_empty(n_sequences, seq_len, n_heads, dtype=torch.promote_types(query_BHTE.dtype, torch.float32))
    results = out_BTHE.transpose(1, 2), sums_BTH.transpose(1, 2)
    _each_document(lambda padded: _attend(padded, scale, sinks_H, window), inputs, results, n_tokens)
    return out_BTHE, sums_BTH


def _each_document(attend: Callable[[Tensors], Tensors], inputs: Tensors, results: Tensors, n_tokens: list[int]) -> None:
    """Call `attend` on each document of `inputs` and copy to `results`, all (B, H, T, ...). In bf16 on a CPU, a document shorter
    than its sequence is padded to a length class, because PyTorch compiles and caches code for each shape."""
    seq_len, offset = inputs[0].shape[2], 0
    compiles = inputs[0].device.type == "cpu" and inputs[0].dtype is not torch.float32
    for n in n_tokens:
        row, first = divmod(offset, seq_len)
        place = slice(row, row + 1), slice(None), slice(first, first + n)
        n_computed = padded_tokens(n) if compiles and n < seq_len else n
        _copy_results([x[place] for x in results], attend([_padded(x[place], n_computed) for x in inputs]))
        offset += n


def _copy_results(outputs: Tensors, results: Tensors) -> None:
    """Copy the results of a padded document without its padding. A function, so that none is alive during the next document."""
    for out, x in zip(outputs, results, strict=True):
        out.copy_(x[:, :, : out.shape[2]])


def _visible(n_tokens: int, window: int | None) -> torch.Tensor:
    """Boolean mask (T, T) of causal attention to the last `window` tokens, on the CPU."""
    ones = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril_()
    return ones if window is None else ones.triu_(1 - window)


def _window_options(query_BHTE: torch.Tensor, window: int | None) -> dict[str, Any]:
    """Mask of tokens before the window, for the CPU's kernel; {} if it hides none."""
    n_tokens = query_BHTE.shape[2]
    if window is None or n_tokens <= window:
        return {}
    return {"attn_mask": query_BHTE.new_full((n_tokens, n_tokens), -torch.inf).tril_(-window)}


def _attend(inputs: Tensors, scale: float | None, sinks_H: torch.Tensor | None = None, window: int | None = None) -> Tensors:
    """Fused causal attention of whole sequences or one document: outputs (B, H, T, E) and log-sum-exps (B, H, T)."""
    aten: Any = torch.ops.aten
    if inputs[0].is_cuda and window is not None:
        n, tensors = inputs[0].shape[2], [x.transpose(1, 2) for x in inputs]
        window_sizes = {"window_size_left": window - 1, "window_size_right": 0}
        out, sums_BHT, *_ = aten._flash_attention_forward(*tensors, None, None, n, n, 0.0, True, False, scale=scale, **window_sizes)
        out_BHTE = out.transpose(1, 2)
    elif inputs[0].is_cuda:
        out_BHTE, sums_BHT = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=scale)[:2]
    else:
        options = _window_options(inputs[0], window)
        out_BHTE, sums_BHT = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale, **options)
    if sinks_H is None:
        return out_BHTE, sums_BHT
    sinks_H1 = sinks_H.to(sums_BHT.dtype).unsqueeze(1)
    return out_BHTE.mul_(torch.sigmoid(sums_BHT - sinks_H1).unsqueeze(-1)), torch.logaddexp(sums_BHT, sinks_H1)


def _attend_backward(inputs: Tensors, scale: float | None, window: int | None = None) -> Tensors:
    """Gradients of queries, keys and values. `inputs`: output gradient, query, key, value, output, log-sum-exps."""
    aten: Any = torch.ops.aten
    *tensors, sums_BHT = inputs
    if not sums_BHT.is_cuda:
        options = _window_options(inputs[1], window)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True, scale=scale, **options)  # type: ignore[no-any-return]
    n_tokens, no_random_numbers = sums_BHT.shape[2], sums_BHT.new_empty(0, dtype=torch.int64)
    rest = sums_BHT.contiguous(), None, None, n_tokens, n_tokens, 0.0, True, no_random_numbers, no_random_numbers
    if window is None:
        return aten._scaled_dot_product_flash_attention_backward(*tensors, *rest, scale=scale)  # type: ignore[no-any-return]
    by_token, window_sizes = [x.transpose(1, 2) for x in tensors], {"window_size_left": window - 1, "window_size_right": 0}
    return [x.transpose(1, 2) for x in aten._flash_attention_backward(*by_token, *rest, scale=scale, **window_sizes)]


def _padded(x: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Pad the tokens of (1, H, T, E) or (1, H, T) with zeros."""
    n_more = n_tokens - x.shape[2]
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, n_more)) if n_more else x


LIBRARY = torch.library.Library("penstock", "DEF")
_ARGUMENTS = "Tensor query, Tensor key, Tensor value, int[] n_tokens, float? scale, Tensor? sinks, int? window, Tensor? mask"
LIBRARY.define(f"attention_by_document({_ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.impl("attention_by_document", _attention_by_document, "CompositeExplicitAutograd")
