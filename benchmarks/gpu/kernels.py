"""Stage that times the kernels of one layer, eager and fused.

Each kernel is called through torch, independent of the runtime's choice, to compare the alternatives.
"""

# T tokens, H width, I width inside the MLP, D width of a head, V vocabulary

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.planner.model.workload import read_model
from penstock.runtime.compute.cross_entropy import add_product, row_losses
from penstock.runtime.errors import SlowKernelWarning
from penstock.runtime.host.optimizer import KernelLayout, Master, ParamState, Step, device_kernel, summed
from penstock.runtime.host.rounding import StochasticRounding, group_bytes
from penstock.runtime.layers.adapters import use_scaled_products
from penstock.runtime.layers.kernels import use_kernels
from penstock.runtime.layers.packed_weights import pack, unpack_by_calls, unpack_into
from penstock.runtime.layers.pointwise import CALL_BY_CALL, GATES, bits, fastest, several
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.packed import Base, is_packed
from penstock.runtime.scaled_products import by_columns, input_gradient, product, quantise, quantise_by_calls

from .stages import Note, Request

Work = Callable[[], object]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WARM_UP_RUNS, LEAST_RUNS = 2, 5
PRODUCT = (8200, 8200, 8200)  # not a power of two
RUNS_BEHIND, PRODUCTS_BEFORE = 7, 3
LOSS_BYTES = 6  # per bf16 logit: read twice, written once


@dataclass(frozen=True, slots=True)
class Shapes:
    n_tokens: int
    contexts: tuple[tuple[int, int], ...]  # (sequences, tokens per sequence)
    measured_s: float  # for one kernel
    loss_tokens: int
    updated_elements: int
    wide_tokens: int  # of an activation: in 7B more than 2^30 elements, so that a call takes several launches
    compared_elements: int
    loss_tiles: tuple[int, ...]


FULL = Shapes(16384, ((8, 2048), (1, 16384), (1, 65536)), 0.3, 4096, 2**28 - 2**12, 65536, 2**26, (1024, 4096, 8192))
TINY = Shapes(64, ((2, 32), (1, 64)), 0.01, 32, 2**17, 64, 2**12, (8,))
BF16 = torch.bfloat16
STATE_LAYOUTS = (
    KernelLayout(BF16, True, BF16),
    KernelLayout(BF16, True, BF16, BF16),
    KernelLayout(BF16, False, BF16, BF16, "adamw", True),
    KernelLayout(BF16, False, BF16, torch.uint8, "adamw", True),
    KernelLayout(BF16, False, BF16, BF16, "lion", True),
)
DTYPE_NAMES = {torch.float32: "fp32", BF16: "bf16", torch.uint8: "int8"}


@dataclass(frozen=True, slots=True)
class Timer:
    """Times kernels on a device at these sizes. `note` writes a result."""

    shapes: Shapes
    device: torch.device
    note: Note

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=BF16, device=self.device)

    def seconds(self, work: Work) -> float:
        """Return the median time of a kernel; on a GPU, of single runs between events."""
        for _ in range(WARM_UP_RUNS):
            work()
        times, is_cpu = list[float](), self.device.type == "cpu"
        if not is_cpu:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        while len(times) < LEAST_RUNS or time.perf_counter() - began_s < self.shapes.measured_s:
            if is_cpu:
                run_s = time.perf_counter()
                work()
                times.append(time.perf_counter() - run_s)
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(LEAST_RUNS + 1)]
            events[0].record()
            for event in events[1:]:
                work()
                event.record()
            events[-1].synchronize()
            times += [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]  # from milliseconds
        return median(times)

    def seconds_behind(self, work: Work) -> float:
        """Return the median time of a kernel right after large products, at a step's clock and power; on a CPU, of the kernel
        alone."""
        if self.device.type == "cpu":
            return self.seconds(work)
        x, w = self.random(*PRODUCT[:2]), self.random(*PRODUCT[1:])
        out, times = x @ w, list[float]()
        work()
        for _ in range(RUNS_BEHIND):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(PRODUCTS_BEFORE):
                torch.mm(x, w, out=out)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)  # from milliseconds
        return median(times)


def kernels(request: Request, note: Note) -> None:
    """Time all kernels. A failure is noted; the stage fails if none works."""
    model = str(request.home / request.sizes.model) if request.tiny else request.sizes.model
    config, timer = dict(read_model(model).config), Timer(TINY if request.tiny else FULL, torch.device(request.device), note)
    n_failed, n_measured = 0, 0
    for name, measure in _all(timer, config):
        try:
            measure()
            n_measured += 1
        except Exception as error:  # continue with the other kernels
            n_failed += 1
            note("failed", case=name, said=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()
    if not n_measured:
        raise RuntimeError(f"all {n_failed} kernels failed")


def _all(t: Timer, config: dict) -> Iterator[tuple[str, Work]]:
    width, inner, n_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    n_kv_heads, head_dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    products = {"q, o": (width, width), "k, v": (width, n_kv_heads * head_dim), "gate, up": (width, inner), "down": (inner, width)}
    for name, (k, n) in products.items():
        yield f"product {name}", lambda name=name, k=k, n=n: _product(t, name, k, n)
        yield f"product in fp8, {name}", lambda name=name, k=k, n=n: _scaled_product(t, name, k, n)
    yield "product of the head", lambda: _product(t, "head", width, config["vocab_size"], t.shapes.loss_tokens)
    for n_rows, d in ((t.shapes.n_tokens, width), (t.shapes.n_tokens * n_heads, head_dim)):
        for name, norm in (("eager", _eager_norm), ("fused", _fused_norm)):
            yield f"norm {name}", lambda name=name, norm=norm, n_rows=n_rows, d=d: _norm(t, name, norm, n_rows, d)
    for name in BACKENDS:
        for n_sequences, seq_len in t.shapes.contexts:
            size = (n_sequences, seq_len, n_heads, n_kv_heads, head_dim)
            yield f"attention {name} at {seq_len}", lambda name=name, size=size: _attention(t, name, size)
    yield "pointwise", lambda: _pointwise(t, inner, n_heads, head_dim)
    for n_tokens in t.shapes.loss_tiles:
        yield "loss", lambda n_tokens=n_tokens: _loss(t, n_tokens, width, config["vocab_size"])
    for base in (base for base in get_args(Base)[1:] if base != "fp8-rows"):  # which is multiplied as it is
        yield f"unpack {base}", lambda base=base: _unpack(t, base, width, inner)
    for layout in STATE_LAYOUTS:
        yield f"update of {_named(layout)}", lambda layout=layout: _update(t, layout)
    for name in ("eager", "fused", "frozen"):
        yield f"layer {name}", lambda name=name: _layer(t, name, config)


def _product(t: Timer, name: str, k: int, n: int, n_tokens: int | None = None) -> None:
    m = n_tokens or t.shapes.n_tokens
    x, w, dy = t.random(m, k), t.random(n, k) * k**-0.5, t.random(m, n)
    works = {"forward": lambda: F.linear(x, w), "of_input": lambda: dy @ w, "of_weight": lambda: dy.t() @ x}
    rates = {f"{key}_flop_per_s": 2 * m * k * n / t.seconds(work) for key, work in works.items()}
    t.note("product", name=f"{name}, ({m}, {k}) @ ({k}, {n})", **rates)


def _scaled_product(t: Timer, name: str, k: int, n: int) -> None:
    """Time quantising rows, transposing codes, and FP8 products beside those in bf16. The input's gradient includes both."""
    m = t.shapes.n_tokens
    x, w, dy = t.random(m, k), t.random(n, k) * k**-0.5, t.random(m, n)
    (codes, scales), (weight, weight_scales) = quantise(x), quantise(w)
    by_calls, fine = (torch.empty_like(codes), torch.empty_like(scales)), weight_scales[:, 0]
    quantise_by_calls(x, *by_calls)
    are_equal = torch.equal(codes.view(torch.uint8), by_calls[0].view(torch.uint8)) and torch.equal(scales, by_calls[1])
    seconds, transposed_s = t.seconds_behind(lambda: quantise(x)), t.seconds_behind(lambda: by_columns(weight))
    t.note("quantise", name=f"rows of ({m}, {k})", seconds=seconds, bytes_per_s=3 * m * k / seconds, are_bits_equal=are_equal)
    t.note("transpose", name=f"codes of ({n}, {k})", seconds=transposed_s, bytes_per_s=2 * n * k / transposed_s)
    forward_s = t.seconds_behind(lambda: product(codes, scales, weight, fine))
    gradient_s = t.seconds_behind(lambda: input_gradient(dy, weight, fine))
    bf16_s, bf16_gradient_s = t.seconds_behind(lambda: F.linear(x, w)), t.seconds_behind(lambda: dy @ w)
    rates = {"forward_flop_per_s": 2 * m * k * n / forward_s, "of_input_flop_per_s": 2 * m * k * n / gradient_s}
    faster = {"speedup": bf16_s / forward_s, "of_input_speedup": bf16_gradient_s / gradient_s}
    t.note("product in fp8", name=f"fp8 {name}, ({m}, {k}) @ ({k}, {n})", **rates, **faster)


def _eager_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm like in transformers' modules."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _fused_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _norm(t: Timer, name: str, norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], n_rows: int, d: int) -> None:
    x, dy = t.random(n_rows, d).requires_grad_(), t.random(n_rows, d)
    weight = torch.ones(d, dtype=torch.bfloat16, device=t.device, requires_grad=True)
    out = norm(x, weight)
    forward_s = t.seconds(lambda: norm(x, weight))
    backward_s = t.seconds(lambda: torch.autograd.grad(out, (x, weight), dy, retain_graph=True))
    one_pass_bytes = x.nbytes  # read or written once
    t.note(
        "norm", name=f"{name}, of ({n_rows}, {d})", forward_s=forward_s, backward_s=backward_s,
        forward_bytes_per_s=2 * one_pass_bytes / forward_s, backward_bytes_per_s=3 * one_pass_bytes / backward_s,
    )  # fmt: skip


def _attention(t: Timer, name: str, size: tuple[int, ...]) -> None:
    """Time causal attention as transformers calls it: with grouped heads, or with repeated ones if the backend rejects groups."""
    n_sequences, seq_len, n_heads, n_kv_heads, head_dim = size
    q, dy = (t.random(n_sequences, seq_len, n_heads, head_dim).transpose(1, 2) for _ in range(2))
    k, v = (t.random(n_sequences, seq_len, n_kv_heads, head_dim).transpose(1, 2) for _ in range(2))
    is_shared = True
    with sdpa_kernel([BACKENDS[name]]):
        try:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except RuntimeError:
            k, v = (x.repeat_interleave(n_heads // n_kv_heads, 1) for x in (k, v))
            is_shared = False
        for x in (q, k, v):
            x.requires_grad_()

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)

        out = forward()
        forward_s = t.seconds(forward)
        backward_s = t.seconds(lambda: torch.autograd.grad(out, (q, k, v), dy, retain_graph=True))
    causal_flop = 2 * 2 * n_sequences * n_heads * seq_len**2 * head_dim // 2  # two products, half of each
    t.note(
        "attention", name=f"{name}, {n_sequences} x {seq_len}", n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        are_heads_shared=is_shared, forward_s=forward_s, backward_s=backward_s, forward_flop_per_s=causal_flop / forward_s,
        backward_flop_per_s=5 / 2 * causal_flop / backward_s,  # five products
    )  # fmt: skip


def _named(layout: KernelLayout) -> str:
    rounded = "" if layout.moments is None else f", {DTYPE_NAMES[layout.moments]} moments{', bf16 master' * layout.is_stochastic}"
    return f"{layout.rule}{rounded}"


def _update(t: Timer, layout: KernelLayout) -> None:
    """Time a parameter's update in device memory, with a bf16 gradient. Bytes: state, read and written, and gradient."""
    kernel, n = device_kernel(t.device, layout), t.shapes.updated_elements
    master = torch.randn(n, device=t.device).to(layout.weight)
    remainder = torch.zeros(n, dtype=torch.int16, device=t.device) if layout.is_split else None
    n_moments = 1 if layout.rule == "lion" else 2
    size, value = (group_bytes(n), 60) if layout.moments is torch.uint8 else (n, 1e-4)
    moments = tuple(torch.full((size,), value, dtype=layout.moments or torch.float32, device=t.device) for _ in range(n_moments))
    rounding = None if layout.moments is None else StochasticRounding((5, 6, 7), layout.is_stochastic)
    state, gradient = ParamState(Master(master, remainder), moments), summed(t.random(n))
    step = Step(state, gradient, 0.5, 7, AdamW(lr=1e-3, weight_decay=0.1), None, layout.rule, rounding)
    update_s = t.seconds_behind(lambda: step.on_device(kernel))
    moved_bytes = 2 * sum(tensor.nbytes for tensor in state.tensors) + 2 * n
    t.note("update", name=_named(layout), n_elements=n, update_s=update_s, bytes_per_s=moved_bytes / update_s)


def _pointwise(t: Timer, inner: int, n_heads: int, head_dim: int) -> None:
    """Compile the pointwise kernels. Compare bits and time each at the size of a layer."""
    began_s = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = fastest(t.device, BF16, tuple(GATES))
    faults = [str(w.message)[:300] for w in caught if issubclass(w.category, SlowKernelWarning)]
    t.note("compiled", faults=faults, seconds=time.perf_counter() - began_s)
    gate, up, gradient = (t.random(t.shapes.wide_tokens * inner) for _ in range(3))
    (n_sequences, seq_len), *_ = t.shapes.contexts
    heads, (cos, sin) = (
        t.random(n_sequences, seq_len, n_heads, head_dim).transpose(1, 2),
        (t.random(n_sequences, 1, seq_len, head_dim) for _ in range(2)),
    )
    pairs = ((kernels[key][k], CALL_BY_CALL[key][k]) for key in CALL_BY_CALL for k in (0, 1))
    for function, definition in pairs:
        name = definition.__name__
        rotates = name.startswith("rotate")
        operands = (heads, cos, sin) if rotates else (gradient, gate, up) if name.endswith("_gradients") else (gate, up)
        seconds = t.seconds_behind(lambda function=function, operands=operands: function(*operands))
        moved_bytes = sum(x.nbytes for x in operands) + (2 if name.endswith("_gradients") else 1) * operands[0].nbytes
        # The definition needs several times the memory: compare bits on a part that fits
        part = operands if rotates else tuple(x[: t.shapes.compared_elements] for x in operands)
        results = zip(several(function(*part)), several(definition(*part)), strict=True)
        equal = {"are_bits_equal": all(torch.equal(bits(a), bits(b)) for a, b in results), "is_kernel": function is not definition}
        t.note("kernel", name=name, seconds=seconds, bytes_per_s=moved_bytes / seconds, **equal)


def _loss(t: Timer, n_tokens: int, width: int, vocab: int) -> None:
    """Time the in-place loss of a tile, and the head's weight gradient with accumulation into fp32."""
    logits_NV, targets_N = t.random(n_tokens, vocab), torch.randint(vocab, (n_tokens,), device=t.device)
    each_N, x_ND = torch.full((n_tokens,), 1 / n_tokens, device=t.device), t.random(n_tokens, width)
    seconds = t.seconds_behind(lambda: row_losses(logits_NV, targets_N, each_N))
    t.note("loss", name=f"{n_tokens} rows", seconds=seconds, bytes_per_s=LOSS_BYTES * logits_NV.numel() / seconds)
    sum_VD = torch.zeros(vocab, width, device=t.device)
    alone_s = t.seconds_behind(lambda: logits_NV.t() @ x_ND)
    both_s = t.seconds_behind(lambda: add_product(sum_VD, logits_NV, x_ND))
    t.note("head's weight gradient", name=f"{n_tokens} rows of it", seconds=both_s, slowdown=both_s / alone_s)


def _unpack(t: Timer, base: Base, width: int, inner: int) -> None:
    """Time unpacking one MLP matrix, by the kernel and by torch operations."""
    shape = (1, width, inner) if base == "mxfp4" else (inner, width)
    packed = pack(t.random(*shape), base)
    out, by_calls = (torch.empty(shape, dtype=BF16, device=t.device) for _ in range(2))
    seconds = t.seconds_behind(lambda: unpack_into(packed, out, base))
    calls_s = t.seconds_behind(lambda: unpack_by_calls(packed, by_calls, base))
    rate = (packed.nbytes + out.nbytes) / seconds
    t.note("unpack", name=base, seconds=seconds, bytes_per_s=rate, are_bits_equal=torch.equal(out, by_calls), by_calls_s=calls_s)


def _layer(t: Timer, name: str, config: dict) -> None:
    """Time one decoder layer of transformers, unmodified or with the runtime's fused kernels, with all activations saved. If its
    weights are frozen, time it again with FP8 products."""
    from transformers import AutoConfig, AutoModelForCausalLM

    n_sequences, seq_len = t.shapes.contexts[0]
    fields = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype", "auto_map")}
    fields |= {"num_hidden_layers": 1, "vocab_size": 128, "attention_dropout": 0.0}
    of_layer = AutoConfig.for_model(config["model_type"], **fields)
    model = AutoModelForCausalLM.from_config(of_layer, dtype=torch.bfloat16, attn_implementation="sdpa").to(t.device).model
    layer, hidden = model.layers[0], t.random(n_sequences, seq_len, config["hidden_size"]).requires_grad_()
    if name != "eager":
        use_kernels(layer, Semantics(seq_len, 1, 1, norm="fused", pointwise="fused"), fastest(t.device, torch.bfloat16))
    rotary = model.rotary_emb(hidden, torch.arange(seq_len, device=t.device)[None])
    weights, dy = dict(layer.named_parameters()), torch.randn_like(hidden)
    trained = [] if name == "frozen" else [*weights.values()]

    def out() -> torch.Tensor:
        result = layer(hidden, attention_mask=None, position_embeddings=rotary)
        return result[0] if isinstance(result, tuple) else result

    def times() -> dict[str, float]:
        both_s = t.seconds_behind(lambda: torch.autograd.grad(out(), [hidden, *trained], dy))
        return {"forward_s": t.seconds_behind(out), "forward_and_backward_s": both_s, "flop_per_s": flop / both_s}

    layer.requires_grad_(bool(trained))
    n_params, n_tokens = sum(p.numel() for p in weights.values()), n_sequences * seq_len
    flop = (3 if trained else 2) * 2 * n_params * n_tokens + 3 * 2 * n_tokens * seq_len * config["hidden_size"]  # causal half
    t.note("layer", name=f"{name}, {n_tokens} tokens", **(in_bf16 := times()))
    if not trained:
        scaled = {key: w for key, w in weights.items() if is_packed(f"model.layers.0.{key}", tuple(w.shape), "fp8-rows")}
        use_scaled_products(layer, scaled)
        for weight in scaled.values():
            weight.data = pack(weight.data, "fp8-rows")
        faster = in_bf16["forward_and_backward_s"] / (in_fp8 := times())["forward_and_backward_s"]
        t.note("layer in fp8", name=f"{name} in fp8, {n_tokens} tokens", speedup=faster, **in_fp8)
