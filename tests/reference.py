"""Plain training loop: reference implementation of a plan's semantics with a transformers model in memory, on one thread.

Shares no code with the runtime's computation.
"""

import hashlib
import math
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from itertools import accumulate
from unittest import mock

import torch
import torch.nn.functional as F
from torch.func import functional_call
from transformers import AttentionInterface, AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock.runtime.layers.meta_models import model_of
from penstock.runtime.plan import Semantics

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def half_up(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, ties away from zero: add half a unit to the bits, drop the low half."""
    return ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@cache
def mixed_16() -> torch.Tensor:
    """Return a permutation of all 16-bit numbers."""
    mixed = torch.arange(2**16)
    mixed = ((mixed ^ mixed >> 8) * 0x88B5) % 2**16
    mixed = ((mixed ^ mixed >> 7) * 0xDB2D) % 2**16
    return mixed ^ mixed >> 9


def random_16(key: int, n: int) -> torch.Tensor:
    """Return the random 16-bit number of each element of a parameter with n elements, as defined in docs/optimizers.md."""
    begins = []
    for turn in range(-(-n // 2**16)):
        x = (key + turn) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x2C1B3C6D % 2**32
        begins.append((x ^ x >> 16) % 2**16)
    i = torch.arange(n)
    return mixed_16()[(torch.tensor(begins)[i // 2**16] + i) % 2**16].to(torch.int32)


def in_int8(x: torch.Tensor, key: int, is_root: bool) -> torch.Tensor:
    """Quantise fp32 numbers to int8 codes with a scale per group of 32, and dequantise them."""
    groups, numbers = F.pad(x.flatten(), (0, -x.numel() % 32)).view(-1, 32), random_16(key, x.numel())[::32, None]
    groups = groups.double().sqrt().float() if is_root else groups
    largest = groups.abs().amax(dim=1, keepdim=True)
    n_codes = torch.full_like(largest, 255.0)  # a tensor, because torch multiplies by the reciprocal of a Python number
    scale = (((largest / n_codes if is_root else largest).view(torch.int32) + numbers) & ~0xFFFF).view(torch.float32)
    if is_root:
        root = scale * torch.round(groups * (n_codes / largest))
        result = root * root
    else:
        code = torch.round(254 * groups / (largest + groups.abs())).char().float()  # via char: no negative zero
        result = scale * code / (254 - code.abs())
    return torch.where(scale <= 2.0**-58, 0.0, result).flatten()[: x.numel()].view(x.shape)


def at_random(x: torch.Tensor, key: int, is_root: bool = False) -> torch.Tensor:
    """Round fp32 to bf16 stochastically, with the random numbers of its elements."""
    bits = (x.flatten().view(torch.int32) + random_16(key, x.numel())) >> 16
    return bits.to(torch.int16).view(torch.bfloat16).view(x.shape)


def lean_step(semantics: Semantics, name: str, master: torch.Tensor, moments, g: torch.Tensor, s: dict, n_updates: int):
    """Return the master weight, as fp32, and its moments after an update by a low-bit optimizer."""
    (beta1, beta2), lr, wide = s["betas"], s["lr"], [moment.float() for moment in moments]
    fp32 = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    decayed = master * fp32(1 - lr * s["weight_decay"])
    if semantics.optimizer.startswith("lion"):
        d = g - wide[0]
        new = [wide[0] + fp32(1 - beta2) * d]
        master = decayed - fp32(lr) * torch.sign(wide[0] + fp32(1 - beta1) * d)
    else:
        m, v = wide  # roots in double, because torch's fp32 roots depend on a library
        new = [m + fp32(1 - beta1) * (g - m), v * fp32(beta2) + (fp32(1 - beta2) * g) * g]
        divisor = new[1].double().sqrt().float() * fp32(1 / math.sqrt(1 - beta2**n_updates)) + fp32(s["eps"])
        master = decayed + (fp32(-lr / (1 - beta1**n_updates)) * new[0]) / divisor
    digest = hashlib.blake2b(f"0 {n_updates} {name}".encode(), digest_size=12).digest()  # seed 0
    keys = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8)]
    if semantics.master_dtype == "split24":
        bits = master.flatten().view(torch.int32).long() + (random_16(keys[0], master.numel()) >> 8)
        master = (bits - bits % 256).to(torch.int32).view(torch.float32).view(master.shape)
    if semantics.master_dtype == "bf16":
        master = (at_random(master, keys[0]) if semantics.weight_rounding == "stochastic" else half_up(master)).float()
    if (kept_as := {"bf16": at_random, "int8": in_int8}.get(semantics.optimizer.partition("=")[2])) is not None:
        new = [kept_as(x, key, is_root) for x, key, is_root in zip(new, keys[1:], (False, True), strict=False)]
    return master, new


@dataclass
class Reference:
    """Master weights and moments by parameter name, loss and norm of every step, and frozen weights."""

    masters: dict[str, torch.Tensor]
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)


def build(config: dict, semantics: Semantics, dtype: torch.dtype) -> torch.nn.Module:
    fields = {k: v for k, v in config.items() if k != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    model = model_of(hf_config, semantics, dtype).train()
    if semantics.norm == "fused":
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                as_one_function(module)
    if semantics.train.lora is not None:
        assert semantics.train.lora.dropout == 0, "dropout of adapters is random by op"
        put_adapters(model, semantics.train.lora)
    return model


def put_adapters(model: torch.nn.Module, lora) -> None:
    """Add an adapter to each target, in the order of a layer's modules, and to experts if `targets` contains "experts"."""
    scale = lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear) and lora.adapts(name):
                    setattr(part, name, Adapted(child, lora.rank, scale))
            for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):  # modules with the same input
                together = [child for name, child in part.named_children() if name in names and isinstance(child, Adapted)]
                for child in together:
                    child.together = together
        if "experts" in lora.targets and "experts" in dict(layer.mlp.named_children()):
            adapt_experts(layer.mlp.experts, lora.rank, scale)


def adapt_experts(experts: torch.nn.Module, rank: int, scale: float) -> None:
    """Add adapters to experts, with PEFT's names; computed expert by expert, gradients by autograd."""
    first, dtype = torch.nn.Module(), experts.down_proj.dtype
    for holder, weight in ((first, experts.gate_up_proj), (experts, experts.down_proj)):
        n_experts, n_in, n_out = weight.shape if experts.is_transposed else weight.transpose(1, 2).shape
        holder.lora_A = torch.nn.Linear(n_in, rank * n_experts, bias=False, dtype=dtype)
        holder.lora_B = torch.nn.Linear(rank * n_experts, n_out, bias=False, dtype=dtype)
    experts.base_layer = first

    def product(x, weight, offs, bias=None, is_transposed=False):
        holder_of = experts if weight is experts.down_proj else first
        a, b = holder_of.lora_A.weight.view(len(offs), rank, -1), holder_of.lora_B.weight.view(-1, rank, len(offs))
        outputs = []
        for e, rows in enumerate(x.tensor_split(offs[:-1].tolist())):
            low_rank = (rows @ a[e].t()) @ b[:, :, e].contiguous().t()
            outputs.append(torch.add(expert(experts, weight, e, rows, is_transposed), low_rank, alpha=scale))
        return torch.cat(outputs) if bias is None else torch.cat(outputs) + bias

    replace_products(experts, product)


def replace_products(experts: torch.nn.Module, product) -> None:
    forward_of_experts = experts.forward

    def forward(*args, **kwargs):
        with mock.patch("transformers.integrations.moe._grouped_linear", product):
            return forward_of_experts(*args, **kwargs)

    experts.forward = forward


def expert(experts, weight, e, rows, is_transposed):
    """Product of the rows of expert e, in FP8 if the experts have codes of the weight (`multiply_in_fp8`), or train it in FP8."""
    stack = "down_proj" if weight is experts.down_proj else "gate_up_proj"
    if len(rows) and stack in getattr(experts, "scaled", {}):
        codes, scales = experts.scaled[stack]
        return (Turned if is_transposed else Scaled).apply(rows, None, codes[e], scales[e])
    if len(rows) and stack in getattr(experts, "trained_in_fp8", ()):
        return TurnedTrained.apply(rows, weight[e]) if is_transposed else ScaledTrained.apply(rows, weight[e], None)[0]
    return rows @ (weight[e] if is_transposed else weight[e].t())


def expert_by_expert(experts: torch.nn.Module) -> None:
    """Compute the products of experts without adapters by `expert`."""

    def product(x, weight, offs, bias=None, is_transposed=False):
        parts = x.tensor_split(offs[:-1].tolist())
        y = torch.cat([expert(experts, weight, e, rows, is_transposed) for e, rows in enumerate(parts)])
        return y if bias is None else y + bias

    if getattr(experts, "base_layer", None) is None:
        replace_products(experts, product)


class Adapted(torch.nn.Module):
    """Linear layer with its adapter. The first module of several with the same input computes all outputs."""

    def __init__(self, linear: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        options = {"bias": False, "dtype": linear.weight.dtype}
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_A = torch.nn.Linear(linear.in_features, rank, **options)
        self.lora_B = torch.nn.Linear(rank, linear.out_features, **options)
        self.together = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.together[0]
        if self is first:
            parts = [(part.weight, part.bias, part.lora_A.weight, part.lora_B.weight) for part in self.together]
            of_each = [getattr(part, "scaled", None) for part in self.together]
            self.outputs = list(LowRank.apply(x, self.scale, of_each, *(tensor for part in parts for tensor in part)))
        position = self.together.index(self)
        y, first.outputs[position] = first.outputs[position], None
        return y


class LowRank(torch.autograd.Function):
    """Linear layers with adapters and explicit gradients. Products include the scale and are rounded once; the product with the
    frozen weight is accumulated onto the adapter's."""

    @staticmethod
    def forward(ctx, x, scale, scaled, *parts):
        weights, biases, a, b = (parts[i::4] for i in range(4))
        h = x.flatten(0, -2) @ torch.cat(a).t()
        outputs = []
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            if scaled[i] is not None:  # the adapter is accumulated onto the frozen product
                y = scaled_product(x.flatten(0, -2), bias, *scaled[i])
                y = torch.addmm(y, h[:, i * len(a[0]) :][:, : len(a[0])], b[i].t(), alpha=scale)
                outputs.append(y.view(*x.shape[:-1], -1))
                continue
            y = h.new_zeros(len(h), len(weight)) if bias is None else bias.expand(len(h), -1)
            y = torch.addmm(y, h[:, i * len(a[0]) :][:, : len(a[0])], b[i].t(), alpha=scale)
            outputs.append(torch.addmm(y, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1))
        ctx.save_for_backward(x, h, *parts)
        ctx.scale, ctx.scaled = scale, scaled
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        x, h, *parts = ctx.saved_tensors
        weights, _, a, b = (parts[i::4] for i in range(4))
        rows, results, rank = [g.flatten(0, -2) for g in gradients], [None] * len(parts), len(a[0])
        of_h = torch.cat([torch.addmm(h.new_zeros(len(h), rank), g, b[i], alpha=ctx.scale) for i, g in enumerate(rows)], 1)
        of_a, towards = of_h.t() @ x.flatten(0, -2), None if any(ctx.scaled) else of_h @ torch.cat(a)
        for i, (g, weight) in enumerate(zip(rows, weights, strict=True)):
            cols = slice(i * rank, (i + 1) * rank)
            results[4 * i + 2] = of_a[cols]
            results[4 * i + 3] = torch.addmm(torch.zeros_like(b[i]), g.t(), h[:, cols], alpha=ctx.scale)
            if any(ctx.scaled):  # frozen products are rounded and added in order, then the adapters'
                term = g @ weight if ctx.scaled[i] is None else scaled_gradient(g, *ctx.scaled[i])
                towards = term if towards is None else towards + term
            else:
                towards = torch.addmm(towards, g, weight)
        towards = torch.addmm(towards, of_h, torch.cat(a)) if any(ctx.scaled) else towards
        return towards.view_as(x), None, None, *results


def e4m3_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of E4M3 codes (N, I) and the scales (N, 1) of fp32 rows, as docs/fp8.md defines them: one row at a time,
    one power of two after another, and the nearest of all codes, ties to the even one."""
    codes = [2.0**-9 * n for n in range(8)] + [2.0**e * (1 + n / 8) for e in range(-6, 9) for n in range(8)][:-1]  # 0 to 448
    values, scales = torch.zeros_like(x), torch.ones(len(x), 1)
    table = torch.tensor(codes, dtype=torch.float64)
    for row, (numbers, result) in enumerate(zip(x.double(), values, strict=True)):
        scale, largest = 2.0**-126, float(numbers.abs().max())
        while largest / scale > 448:
            scale *= 2
        distances = (numbers.abs()[:, None] / scale - table).abs()
        near = distances == distances.min(dim=1, keepdim=True).values  # one code, or two
        even = near & (torch.arange(127) % 2 == 0)
        nearest = torch.where(even.any(1), even.int().argmax(1), near.int().argmax(1))
        result.copy_(table[nearest].copysign(numbers))
        scales[row] = scale
    return values, scales


def multiply_in_fp8(model: torch.nn.Module, name: str, packed: torch.Tensor) -> None:
    """Replace the frozen product of a linear layer or of experts, with or without adapters, by the FP8 product of a weight in
    fp8-rows."""
    shape, path, last = model.get_parameter(name).shape, *name.rsplit(".", 1)
    module, n, n_rows = model.get_submodule(path), shape.numel(), shape[:-1].numel()
    codes = packed[:n].view(torch.float8_e4m3fn).view(shape).float()
    weight = codes, packed[-(-n // 256) * 256 :].view(torch.float32)[:n_rows].view(shape[:-1])
    if last != "weight":
        module.scaled = getattr(module, "scaled", {}) | {last: weight}
        expert_by_expert(module)
        return
    module.scaled = weight
    if isinstance(module, torch.nn.Linear):
        module.forward = lambda x: Scaled.apply(x, module.bias, *module.scaled)


class Scaled(torch.autograd.Function):
    """Product with a weight of E4M3 values and a scale per output, in fp32 on quantised values, rounded once."""

    @staticmethod
    def forward(ctx, x, bias, codes, scales):
        ctx.weight = codes, scales
        return scaled_product(x.flatten(0, -2), bias, codes, scales).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        return scaled_gradient(gradient.flatten(0, -2), *ctx.weight).view(*gradient.shape[:-1], -1), None, None, None


class Turned(Scaled):
    """The same for a stack with a row and a scale per input: forward and input gradient change places."""

    @staticmethod
    def forward(ctx, x, bias, codes, scales):
        ctx.weight = codes, scales
        return scaled_gradient(x, codes, scales)

    @staticmethod
    def backward(ctx, gradient):
        return scaled_product(gradient, None, *ctx.weight), None, None, None


class TurnedTrained(torch.autograd.Function):
    """The same for a trained bf16 weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        values, scales = e4m3_rows(weight.float())
        return scaled_gradient(x, values, scales[:, 0])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        values, scales = e4m3_rows(weight.float())
        return scaled_product(gradient, None, values, scales[:, 0]), x.t() @ gradient


def multiply_trained_in_fp8(model: torch.nn.Module) -> None:
    """Replace linear layers named ..._proj and stacks of experts, with sides that are multiples of 16, by FP8 products of bf16
    weights: the weight is quantised at each use. The first of several linear layers with one input computes all outputs."""
    for part in (part for layer in model.model.layers for part in layer.modules()):
        stacks = [n for n, p in part.named_parameters(recurse=False) if p.dim() == 3 and not any(size % 16 for size in p.shape[1:])]
        if stacks:
            part.trained_in_fp8 = stacks
            expert_by_expert(part)
        linear = {n: child for n, child in part.named_children() if n.endswith("_proj") and isinstance(child, torch.nn.Linear)}
        linear = {n: child for n, child in linear.items() if not any(size % 16 for size in child.weight.shape)}
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), *((n,) for n in [*linear])):
            together([linear.pop(n) for n in names if n in linear])


def together(modules: list[torch.nn.Module]) -> None:
    outputs = {}

    def forward(module, x):
        if module is modules[0]:
            operands = [tensor for each in modules for tensor in (each.weight, each.bias)]
            outputs.update(zip(modules, ScaledTrained.apply(x, *operands), strict=True))
        return outputs.pop(module)

    for module in modules:
        module.forward = partial(forward, module)


class ScaledTrained(torch.autograd.Function):
    """FP8 products of one input with bf16 weights. Gradients of weights and biases are bf16 products and sums."""

    @staticmethod
    def forward(ctx, x, *operands):
        ctx.save_for_backward(x, *operands[::2])
        ctx.has_bias = [bias is not None for bias in operands[1::2]]
        flat, results = x.flatten(0, -2), []
        for weight, bias in zip(operands[::2], operands[1::2], strict=True):
            values, scales = e4m3_rows(weight.float())
            results.append(scaled_product(flat, bias, values, scales[:, 0]).view(*x.shape[:-1], -1))
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        towards, results = None, []
        for gradient, weight, has_bias in zip(gradients, weights, ctx.has_bias, strict=True):
            g, (values, scales) = gradient.flatten(0, -2), e4m3_rows(weight.float())
            term = scaled_gradient(g, values, scales[:, 0])
            towards = term if towards is None else towards + term
            results += [g.t() @ x.flatten(0, -2), g.sum(0) if has_bias else None]
        return towards.view_as(x), *results


def scaled_product(x, bias, codes, scales):
    values, of_rows = e4m3_rows(x.float())
    y = values @ codes.t() * of_rows * scales
    return (y if bias is None else y + bias.float()).bfloat16()


def scaled_gradient(gradient, codes, scales):
    """Return the input's gradient; the weight's scales multiply the output's gradient, because the sum is over outputs."""
    values, of_rows = e4m3_rows(gradient.float() * scales)
    return (values @ codes * of_rows).bfloat16()


def is_trained(name: str, train) -> bool:
    if train.lora is not None:
        return ".lora_" in name
    if train.names:
        return any(fnmatch(name, pattern) for pattern in train.names)
    if train.layers is not None:
        first, last = train.layers
        return any(name.startswith(f"model.layers.{i}.") for i in range(first, last + 1))
    return True


def as_one_function(norm: torch.nn.Module) -> None:
    """Replace a norm by one autograd node, so that its input gradient is one tensor before the residual's is added."""
    norm.forward = lambda x: RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


class RMSNorm(torch.autograd.Function):
    """RMS norm with explicit gradients. The weight gradient is an fp32 sum over chunks of 1024 rows in order, rounded once."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (t.float() for t in ctx.saved_tensors)
        rows, of_rows = x.flatten(0, -2), gradient.float().contiguous().flatten(0, -2)
        scale = torch.rsqrt(rows.pow(2).mean(dim=1, keepdim=True) + ctx.eps)
        normed = rows * scale
        of_weight = torch.zeros_like(weight)
        for part in (of_rows * normed).split(1024):
            of_weight += part.sum(dim=0)
        towards = of_rows * weight
        towards = (towards - normed * (towards * normed).mean(dim=1, keepdim=True)) * scale
        return towards.view_as(x).to(gradient.dtype), of_weight.to(gradient.dtype), None


class ByTiles(torch.nn.Module):
    """Position-wise modules in sequence, applied to tiles of tokens. A tile uses a copy of the weights, so that autograd computes
    gradients by tile.
    """

    def __init__(self, parts: list[tuple[str, torch.nn.Module]], tile_tokens: int) -> None:
        super().__init__()
        self.parts, self.tile_tokens = parts, tile_tokens
        self.of_tiles: list[dict[str, torch.Tensor]] = []  # weights of one forward by tile, with names within the layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of_tiles.clear()
        return torch.cat([self.of_tile(rows) for rows in x.flatten(0, 1).split(self.tile_tokens)]).view_as(x)

    def of_tile(self, rows: torch.Tensor) -> torch.Tensor:
        weights = {f"{part}.{n}": p.detach().requires_grad_() for part, module in self.parts for n, p in module.named_parameters()}
        for part, module in self.parts:
            short = {n.removeprefix(f"{part}."): w for n, w in weights.items() if n.startswith(f"{part}.")}
            rows = functional_call(module, short, (rows,))
        self.of_tiles.append(weights)
        return rows

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return fp32 sums over the tiles in ascending order, starting from zero, rounded once to the weights' dtype."""
        sums = {name: torch.zeros(w.shape) for name, w in self.of_tiles[0].items()}
        for weights in self.of_tiles:
            for name, w in weights.items():
                sums[name] += w.grad
        return {name: total.to(self.of_tiles[0][name].dtype) for name, total in sums.items()}


def cut_into_tiles(model: torch.nn.Module, semantics: Semantics) -> None:
    """Apply MLPs by tiles if the semantics set `mlp_tile_tokens`. A norm after an MLP becomes part of the tile."""
    if semantics.mlp_tile_tokens is None:
        return
    for layer in model.model.layers:
        parts = [(n, m) for n, m in layer.named_children() if n in ("mlp", "post_feedforward_layernorm")]
        layer.mlp = ByTiles(sorted(parts), semantics.mlp_tile_tokens)
        if len(parts) == 2:
            layer.post_feedforward_layernorm = torch.nn.Identity()


def length_class(n: int) -> int:
    """Return the padded length of a document shorter than the sequence in bf16: a multiple of 64, or of 256 from 768 on."""
    return n + -n % (64 if n < 768 else 256)


def each_alone(module, query, key, value, attention_mask, lengths, sliding_window=None, **options):
    """Compute attention document by document, padded if no mask is needed. `lengths`: document lengths of each sequence."""
    eager, rows, window = module.config._attn_implementation == "eager_alone", [], sliding_window or query.shape[2]
    attend = sys.modules[type(module).__module__].eager_attention_forward if eager else sdpa_attention_forward
    bare = not eager and not options.get("dropout") and max(n for of_row in lengths for n in of_row) <= window
    for row, of_row in enumerate(lengths):
        parts, start = [], 0
        for n in of_row:
            room = (0, 0, 0, length_class(n) - n if bare and query.dtype is torch.bfloat16 and n < query.shape[2] else 0)
            part = [F.pad(x[row : row + 1, :, start : start + n], room) for x in (query, key, value)]
            mask = torch.ones(1, 1, n, n).tril().triu(1 - window) > 0
            mask = torch.where(mask, 0, torch.finfo(query.dtype).min).to(query.dtype) if eager else mask
            parts.append(attend(module, *part, mask if eager or n > window else None, **options)[0][:, :n])
            start += n
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), None


for name in ("sdpa_alone", "eager_alone"):
    AttentionInterface.register(name, each_alone)  # transformers makes no mask for these


class WithSinks(torch.autograd.Function):
    """Attention with sinks by document. The CPU's kernel computes attention without sinks; the sink joins the log-sum-exp, and the
    output is multiplied by the probability of all other tokens."""

    @staticmethod
    def parts(lengths, window, query, *tensors):
        """Yield slices of each document, and its tensors, padded, with the kernel's options."""
        for row, of_row in enumerate(lengths):
            for n, end in zip(of_row, accumulate(of_row), strict=True):
                size = length_class(n) if query.dtype is torch.bfloat16 and n < query.shape[2] else n
                place = slice(row, row + 1), slice(None), slice(end - n, end)
                cut = [F.pad(x[place], (0, 0) * (x.dim() - 3) + (0, size - n)) for x in (query, *tensors)]
                mask = torch.zeros(size, size, dtype=query.dtype).masked_fill(torch.ones(size, size).tril(-window) > 0, -math.inf)
                yield place, n, cut, {"attn_mask": mask} if size > window else {}

    @staticmethod
    def forward(ctx, query, key, value, sinks, lengths, window, scale):
        out, sums = torch.empty_like(query), torch.empty(query.shape[:3])
        for place, n, cut, options in WithSinks.parts(lengths, window, query, key, value):
            x, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*cut, 0.0, True, scale=scale, **options)
            of_sink = sinks.float()[:, None]
            out[place] = (x.float() * torch.sigmoid(lse - of_sink).unsqueeze(-1)).to(x.dtype)[:, :, :n]
            sums[place] = torch.logaddexp(lse, of_sink)[:, :, :n]
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.options = lengths, window, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, gradient):
        (query, key, value, sinks, out, sums), (lengths, window, scale) = ctx.saved_tensors, ctx.options
        results = [torch.empty_like(x) for x in (query, key, value)]
        tensors = query, gradient.transpose(1, 2), key, value, out, sums
        for place, n, (q, d_out, *rest), options in WithSinks.parts(lengths, window, *tensors):
            call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            for x, result in zip(results, call(d_out, q, *rest, 0.0, True, scale=scale, **options), strict=True):
                x[place] = result[:, :, :n]
        along = (gradient.float() * out.transpose(1, 2).float()).sum(-1)
        of_sinks = -(torch.exp(sinks.float() - sums.transpose(1, 2)) * along).contiguous().sum((0, 1))
        return *results, of_sinks.to(sinks.dtype), None, None, None


def with_sinks(module, query, key, value, attention_mask, s_aux, sliding_window, scaling, lengths=None, **options):
    """Attention function of transformers' registry, for models with sinks."""
    lengths, window = lengths or [[query.shape[2]]] * len(query), sliding_window or query.shape[2]
    return WithSinks.apply(query, key, value, s_aux, lengths, window, scaling), None


AttentionInterface.register("sdpa_with_sinks", with_sinks)  # transformers makes no mask for it


def packed(model: torch.nn.Module, semantics: Semantics, batch, rows: torch.Tensor) -> dict:
    """Return keyword arguments of the model's forward for sequences of packed documents."""
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters()) and semantics.attention == "sdpa"
    model.config._attn_implementation = semantics.attention + ("" if batch.document_tokens is None else "_alone")
    if has_sinks:
        model.config._attn_implementation = "sdpa_with_sinks"
    if batch.document_tokens is None:
        return {}
    lengths = [batch.document_tokens[row] for row in rows.tolist()]
    return {"lengths": lengths, "position_ids": torch.tensor([[t for n in of_row for t in range(n)] for of_row in lengths])}


def train(
    config: dict, semantics: Semantics, masters: dict[str, torch.Tensor], batches: list, settings: list[dict], groups=()
) -> Reference:
    """Train one step per batch from these master weights. `settings`: keyword arguments of torch.optim.AdamW, by step.

    A bf16 master weight is stored as fp32 here. `groups`: (part of names, rates by step, weight decay), with settings of their own.
    """
    compute, gradient_dtype = DTYPE[semantics.compute_dtype], DTYPE[semantics.gradient_dtype]
    model = build(config, semantics, compute)
    parameters = dict(model.named_parameters())
    if semantics.products == "fp8" and semantics.train.lora is None:
        multiply_trained_in_fp8(model)
    cut_into_tiles(model, semantics)
    frozen, stored = {name: p for name, p in parameters.items() if not is_trained(name, semantics.train)}, {}
    for name, p in frozen.items():
        p.requires_grad_(False)
        if masters[name].dtype is torch.uint8:  # FP8 products use the packed bytes
            stored[name] = masters[name]
            multiply_in_fp8(model, name, masters[name])
        else:
            stored[name] = p.data.copy_(masters[name])
    parameters = {name: p for name, p in parameters.items() if name not in frozen}
    masters = {name: torch.nn.Parameter(masters[name].float().clone()) for name in parameters}
    first = dict(settings[0])
    decay = first.pop("weight_decay", 0.0)
    in_groups = {n for part, *_ in groups for n in masters if part in n}
    no_decay = [n for n in masters if masters[n].dim() == 1 or "norm" in n or n.endswith("bias")]
    decaying = {"params": [masters[n] for n in masters if n not in [*no_decay, *in_groups]], "weight_decay": decay}
    not_decaying = {"params": [masters[n] for n in no_decay if n not in in_groups], "weight_decay": 0.0}
    apart = [{"params": [masters[n] for n in masters if part in n], "weight_decay": of_part} for part, _, of_part in groups]
    optimizer = torch.optim.AdamW([decaying, not_decaying, *apart], fused=True, **first)
    result, n_updates = Reference({}, {}, {}, [], [], stored), 0
    of_lean = {name: [torch.zeros_like(p.data) for _ in semantics.optimizer.moments] for name, p in masters.items()}
    for batch, of_step in zip(batches, settings, strict=True):
        rates = [of_step["lr"]] * 2 + [rates[len(result.losses)] for _, rates, _ in groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(half_up(masters[name].data) if compute is torch.bfloat16 else masters[name])
        sums, loss = micro_batch_sums(model, parameters, semantics, batch)
        gradients = {name: sums[name].to(gradient_dtype).float() for name in parameters}
        norm, ends = 0.0, ends_of_pieces(parameters, semantics.sum_groups)
        for name, g in gradients.items():
            of_tensor, begin = 0.0, 0
            for end in [*ends[name], g.numel()]:
                for chunk in g.flatten()[begin:end].split(65536):
                    of_tensor += float(halved(chunk.square()))
                begin = end
            norm += of_tensor
        norm = math.sqrt(norm)
        factor = 1.0
        if semantics.clip_norm is not None:
            factor = min(1.0, float(torch.tensor(semantics.clip_norm) / (torch.tensor(norm) + 1e-6)))
        for name in parameters:
            masters[name].grad = gradients[name] * factor
        result.losses.append(loss)
        result.norms.append(norm)
        if semantics.on_nonfinite == "skip" and not math.isfinite(norm):
            continue
        n_updates += 1
        if semantics.is_lean:
            for name, p in masters.items():
                spared = {"weight_decay": 0.0} if name in no_decay else {}
                arguments = name, p.data, of_lean[name], p.grad, {"weight_decay": 0.0} | of_step | spared, n_updates
                p.data, of_lean[name] = lean_step(semantics, *arguments)
            continue
        optimizer.step()
        if semantics.master_dtype == "bf16":
            for master in masters.values():
                master.data = half_up(master.data).float()
    for name, master in masters.items():
        result.masters[name] = master.data.to(DTYPE[semantics.saved_state["master"]])
        if semantics.is_lean:
            result.exp_avg[name] = of_lean[name][0]
            result.exp_avg_sq |= {name: of_lean[name][1]} if len(of_lean[name]) > 1 else {}
            continue
        result.exp_avg[name] = optimizer.state[master]["exp_avg"]
        result.exp_avg_sq[name] = optimizer.state[master]["exp_avg_sq"]
    return result


def halved(chunk: torch.Tensor) -> torch.Tensor:
    """Return the sum of a chunk: pad to a power of two with zeros, then add the second half to the first repeatedly."""
    chunk = F.pad(chunk, (0, 2 ** (chunk.numel() - 1).bit_length() - chunk.numel()))
    while chunk.numel() > 1:
        first, second = chunk.chunk(2)
        chunk = first + second
    return chunk


def ends_of_pieces(parameters: dict[str, torch.Tensor], n_pieces: int) -> dict[str, list[int]]:
    """Return the offsets within each parameter at which the norm's chunks restart. The parameters of a block are concatenated, each
    aligned to 128 elements, and cut into equal pieces of a multiple of 128."""
    blocks: dict[str, list[str]] = {}
    for name in parameters:
        in_layer = name.startswith("model.layers.")
        blocks.setdefault(name.split(".")[2] if in_layer else "before" if "embed" in name else "after", []).append(name)
    ends: dict[str, list[int]] = {}
    for names in blocks.values():
        places, offset = {}, 0
        for name in names:
            places[name], offset = offset, offset + parameters[name].numel() + -parameters[name].numel() % 128
        piece = -(-offset // (128 * n_pieces)) * 128
        for name in names:
            cuts = (piece * i - places[name] for i in range(1, n_pieces))
            ends[name] = [cut for cut in cuts if 0 < cut < parameters[name].numel()]
    return ends


def at_once(logits: torch.Tensor, targets: torch.Tensor, n_supervised: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a tile, and the gradient of the mean over the step, by the SIMD lanes of `loss: online`."""
    n_threads, z = 32, logits.float()
    while n_threads < 512 and 8 * n_threads < z.shape[1]:
        n_threads *= 2
    tops = torch.full((len(z), 8 * n_threads), torch.finfo(torch.float32).min)
    sums = torch.zeros_like(tops)
    for x in F.pad(z, (0, -z.shape[1] % (8 * n_threads)), value=-torch.inf).split(8 * n_threads, dim=1):
        larger = torch.maximum(tops, x)
        sums, tops = sums * torch.exp(tops - larger) + torch.exp(x - larger), larger
    top = tops.max(dim=1, keepdim=True).values
    total = by_halves(by_halves((sums * torch.exp(tops - top)).view(len(z), n_threads, 8)))[:, None]
    supervised = targets != -100
    targets, share = torch.where(supervised, targets, 0), (supervised.float() / n_supervised)[:, None]
    target_logits = torch.stack([row[target] for row, target in zip(z, targets, strict=True)])
    losses = torch.where(supervised, (top[:, 0] - target_logits) + torch.log(total[:, 0]), 0.0)
    gradient = torch.exp(z - top) * (share / total) - F.one_hot(targets, z.shape[1]) * share
    return losses.sum(), gradient.to(logits.dtype)


def by_halves(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1] // 2
    return by_halves(x[..., :n] + x[..., n:]) if n else x[..., 0]


def micro_batch_sums(model: torch.nn.Module, parameters, semantics: Semantics, batch) -> tuple[dict[str, torch.Tensor], float]:
    """Return fp32 sums of micro-batch gradients by name, and the mean loss. Both sums of a tied weight are added at the end."""
    micro_batches = torch.arange(semantics.batch_size).split(semantics.micro_batch)
    of_a_group = len(micro_batches) // semantics.sum_groups
    n_supervised, losses = int((batch.targets != -100).sum()), []
    cut = [micro_batches[first : first + of_a_group] for first in range(0, len(micro_batches), of_a_group)]
    groups = [group_sums(model, parameters, semantics, batch, group, n_supervised, losses) for group in cut]
    sums = tree_sum(groups)
    of_head = sums.pop("head")
    for name in (name for name, p in parameters.items() if p is model.lm_head.weight):
        sums[name] = of_head + sums[name]
    return sums, sum(losses) / n_supervised


def tree_sum(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if len(parts) == 1:
        return parts[0]
    first, second = tree_sum(parts[: len(parts) // 2]), tree_sum(parts[len(parts) // 2 :])
    return {name: first[name] + second[name] for name in first}


def group_sums(model, parameters, semantics: Semantics, batch, micro_batches, n_supervised: int, losses) -> dict[str, torch.Tensor]:
    """Return gradient sums of micro-batches in order, starting from zero; the head weight's gradient by the loss is `head`."""
    body, head = model.model, model.lm_head.weight
    cap = getattr(model.config, "final_logit_softcapping", None)
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    head_sum = torch.zeros(head.shape)
    for rows in micro_batches:
        hidden = body(input_ids=batch.input_ids[rows], use_cache=False, **packed(model, semantics, batch, rows)).last_hidden_state
        flat, targets = hidden.detach().flatten(0, 1), batch.targets[rows].flatten()
        d_hidden, d_head = [], torch.zeros(head.shape)
        for x, y in zip(flat.split(semantics.loss_tile_tokens), targets.split(semantics.loss_tile_tokens), strict=True):
            x, w = x.detach().requires_grad_(), head.detach().requires_grad_(head.requires_grad)
            inputs = [x, w] if head.requires_grad else [x]
            logits = F.linear(x, w)
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
            if semantics.loss == "online":
                loss, d_logits = at_once(logits.detach(), y, n_supervised)
                dx, *dw = torch.autograd.grad(logits, inputs, d_logits)
                if dw:  # accumulated within the product
                    d_head, dw = torch.addmm(d_head, d_logits.float().t(), x.detach().float()), []
            else:
                loss = F.cross_entropy(logits.float(), y, ignore_index=-100, reduction="sum")
                dx, *dw = torch.autograd.grad(loss / n_supervised, inputs)
            d_hidden.append(dx)
            if dw:
                d_head += dw[0]
            losses.append(loss.item())
        if hidden.requires_grad:
            hidden.backward(torch.cat(d_hidden).view_as(hidden))
        head_sum += d_head
        for i, layer in enumerate(body.layers):
            if isinstance(layer.mlp, ByTiles):
                for name, gradient in layer.mlp.gradients().items():
                    parameters[f"model.layers.{i}.{name}"].grad = gradient
        for name, p in parameters.items():
            if p.grad is not None:
                sums[name] += p.grad
                p.grad = None
    return sums | {"head": head_sum}
