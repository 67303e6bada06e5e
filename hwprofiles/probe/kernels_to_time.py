"""Benchmarks of training kernels: the amount of work, and the torch calls that perform it.

Benchmarks call the functions of a run: transformers' calls and the runtime's kernels. Operands are normal random numbers, because
zeros draw less power, and rotate through more memory than a cache holds, because in training operands are not cached.
"""

# Shapes: T tokens, H hidden width, I intermediate width of the MLP, V vocabulary

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.hwprofiles.components import BACKWARD_ATTENTION, ITEM_BYTES, AttentionKernel, Direction
from penstock.hwprofiles.quantity import Dtype
from penstock.runtime.compute.cross_entropy import row_losses
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.layers.packed_weights import pack, unpack_into
from penstock.runtime.layers.pointwise import fastest
from penstock.runtime.plan import Lane
from penstock.runtime.plan.packed import Base, at_once_bytes
from penstock.runtime.scaled_products import by_columns, quantise
from penstock.runtime.scaled_products import product as scaled
from penstock.runtime.units import KiB, MiB

Call = Callable[[], object]  # one repetition, asynchronous on a stream
Make = Callable[[torch.device, int], Call]  # arguments: device, bytes through which operands rotate
Operands = Callable[[torch.device], list[Tensor]]
Walk = Callable[[Tensor, Callable[..., None]], list[Any]]  # fills a slab with the given executor; returns tasks that cover it
Place = Literal["pinned", "pageable"]

COLD_BYTES = 260 * MiB  # host memory for copies: far above a core's caches, and not a power of two
STRIDE_BYTES = 64 * KiB  # minimum distance of successive copies
ROUNDS = 4  # repetitions of short kernels after a product, so that the product, which is subtracted, does not dominate the time
# By default torch selects cuDNN's attention where it expects it to be faster. A run selects the kernel explicitly.
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS: dict[AttentionKernel, list[SDPBackend]] = {"flash": FLASH, "cudnn": [SDPBackend.CUDNN_ATTENTION]}


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Benchmark to time. The slowdown of one benchmark under load widens the spreads of its kind."""

    kind: str
    name: str
    make: Make | None = None  # None: host tasks, a copy or a hand-over
    lane: Lane = Lane.GPU
    amount: float = 1.0  # FLOP, bytes, parameters or calls, in the unit of the profile field
    point: Mapping[str, int] = field(default_factory=dict)  # coordinates in a grid of the profile, e.g. {"threads": 4}
    size: tuple[float, float] = (0.0, 0.0)  # partial order: time rises with either component
    n_bytes: int = 0  # device memory of one set of operands and saved tensors
    n_calls: int = 1  # library calls, copies or hand-overs with a launch overhead each
    place: Place | None = None  # kind of host memory of a copy
    node: int | None = None  # NUMA node of that memory; None: any
    tasks: Walk | None = None  # of a host benchmark
    n_tasks: int = 0  # per call
    slab_bytes: int = 0
    n_threads: int = 1
    is_on_all_cores: bool = False  # on all cores instead of the cores of the lane


Passes = dict[str, Benchmark]  # keys: forward, backward
HANDOVER = Benchmark("hand-over", "hand-over between lanes", lane=Lane.CPU, n_calls=2)  # to another lane and back


def copy(direction: Direction, n_bytes: int, place: Place = "pinned", node: int | None = None) -> Benchmark:
    """Time a copy of `n_bytes` at advancing offsets, in more memory than a cache holds."""
    name, lane, point = f"{place} {direction} copies of {n_bytes} bytes", Lane(direction), {"n_bytes": n_bytes}
    return Benchmark("copies", name, lane=lane, amount=n_bytes, point=point, size=(n_bytes, 0.0), place=place, node=node)


def product(dtype: Dtype, m: int, k: int, n: int) -> Benchmark:
    """Time a linear layer, (m, k) @ (k, n), and its backward: three products of equal FLOP."""

    def make(device: torch.device, working_bytes: int) -> Call:
        x, w, dy = (torch.randn(*shape, dtype=DTYPE[dtype], device=device) for shape in ((m, k), (n, k), (m, n)))
        return rotating([x, w, dy, torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)], working_bytes, _products)

    name, point, size = f"{dtype} product ({m}, {k}) @ ({k}, {n})", {"m": m, "k": k, "n": n}, (m, math.sqrt(k * n))
    n_bytes = 2 * ITEM_BYTES[dtype] * (m * k + k * n + m * n)
    return Benchmark(f"{dtype} products", name, make, amount=3 * 2 * m * k * n, point=point, size=size, n_bytes=n_bytes)


def scaled_product(m: int, k: int, n: int) -> Benchmark:
    """Time the FP8 products of a frozen linear layer, (m, k) @ (k, n), and of its input gradient, on quantised operands."""

    def make(device: torch.device, working_bytes: int) -> Call:
        operands = [t for shape in ((m, k), (n, k), (m, n)) for t in quantise(_random(device, *shape))]
        ones, back = torch.ones(k, device=device), by_columns(operands[2]).t()
        return rotating([*operands, back, ones], working_bytes, _scaled_products)

    name, n_bytes = f"FP8 product ({m}, {k}) @ ({k}, {n})", 2 * (m * k + 2 * k * n + m * n)
    return Benchmark("FP8 products", name, make, amount=2 * 2 * m * k * n, n_bytes=n_bytes)


def _scaled_products(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dy: Tensor, sdy: Tensor, back: Tensor, ones: Tensor) -> None:
    scaled(x, sx, w, sw)
    scaled(dy, sdy, back, ones)


def _products(x: Tensor, w: Tensor, dy: Tensor, y: Tensor, dx: Tensor, dw: Tensor) -> None:
    torch.mm(x, w.t(), out=y)
    torch.mm(dy, w, out=dx)
    torch.mm(dy.t(), x, out=dw)


def attention(dtype: Dtype, n: int, n_heads: int, seq_len: int, head_dim: int, kernel: AttentionKernel = "flash") -> Passes:
    """Time causal attention over n sequences with one kernel, on the (B, T, H, D) memory layout of projections."""
    shape = (n, seq_len, n_heads, head_dim)

    def operands(device: torch.device) -> list[Tensor]:
        return [torch.randn(shape, dtype=DTYPE[dtype], device=device).transpose(1, 2) for _ in range(4)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    name = f"{dtype} attention{'' if kernel == 'flash' else f' by {kernel}'} over {seq_len} tokens"
    n_flop = 4 * n * n_heads * head_dim * (seq_len * (seq_len + 1) // 2)  # two products over the causal half
    n_bytes = 12 * ITEM_BYTES[dtype] * math.prod(shape)  # query, key, value, output, gradients, and fp32 buffers of the backward
    point, size = {"seq_len": seq_len, "head_dim": head_dim}, (head_dim, seq_len)
    work = Benchmark(f"{dtype} attention", name, amount=n_flop, point=point, size=size, n_bytes=n_bytes)
    return _passes(work, operands, call, BACKWARD_ATTENTION)


def norm(n_tokens: int, width: int) -> Passes:
    """Time a fused bf16 RMS norm, forward and backward. Bytes are those of input and output, twice that for the backward."""

    def operands(device: torch.device) -> list[Tensor]:
        return [_random(device, *shape) for shape in ((n_tokens, width), (width,), (n_tokens, width))]

    def call(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), w, 1e-6)

    return _passes(Benchmark("memory traffic", "fused norm", amount=2 * n_tokens * width * ITEM_BYTES["bf16"]), operands, call, 2.0)


def behind(first: Benchmark, work: Benchmark) -> Benchmark:
    """Time `work` right after a product, at the clock of a step: alone its kernels would run at a higher clock."""

    def make(device: torch.device, working_bytes: int) -> Call:
        assert first.make is not None
        assert work.make is not None
        product, kernels = first.make(device, working_bytes), work.make(device, working_bytes)
        return lambda: (product(), kernels())

    return replace(work, name=f"{work.name}, behind a product", make=make, n_bytes=first.n_bytes + work.n_bytes)


def activation(n_tokens: int, inner: int) -> Benchmark:
    """Time a gated MLP activation in bf16, forward and backward; backward bytes count twice, as in the planner's cost model."""

    def make(device: torch.device, working_bytes: int) -> Call:
        swiglu, gradients = fastest(device, torch.bfloat16)["swiglu"]
        operands = [_random(device, n_tokens, inner) for _ in range(3)]

        def both(gate_TI: Tensor, up_TI: Tensor, d_TI: Tensor) -> None:
            swiglu(gate_TI, up_TI)
            gradients(d_TI, gate_TI, up_TI)

        return rotating(operands, working_bytes, both)

    n_bytes = 3 * n_tokens * inner * ITEM_BYTES["bf16"]
    return Benchmark("memory traffic", f"fused activation of {n_tokens} tokens", make, amount=3 * n_bytes, n_bytes=2 * n_bytes)


def loss(n_tokens: int, vocab: int) -> Benchmark:
    """Time the fused loss on bf16 logits, without its products; bytes as in `planner.model.workload`."""

    def make(device: torch.device, _: int) -> Call:
        logits_NV = torch.randn(n_tokens, vocab, dtype=torch.bfloat16, device=device)
        targets_N = torch.randint(vocab, (n_tokens,), device=device)
        each_N = torch.full((n_tokens,), 1.0, device=device)  # logits are replaced by gradients; 1: of similar magnitude
        return lambda: row_losses(logits_NV, targets_N, each_N)

    amount = n_tokens * vocab * 3 * ITEM_BYTES["bf16"]  # read twice, written once
    return Benchmark("memory traffic", "fused loss", make, amount=amount, n_bytes=amount // 3)


def unpacking(base: Base, shapes: Sequence[tuple[int, int]]) -> Benchmark:
    """Time the dequantisation of matrices to bf16; bytes as in `runtime/plan/packed.py`."""

    def make(device: torch.device, _: int) -> Call:
        out = [_random(device, *shape) for shape in shapes]
        packed = [pack(weight, base) for weight in out]

        def call() -> None:
            for codes, weight in ROUNDS * list(zip(packed, out, strict=True)):
                unpack_into(codes, weight, base)

        return call

    amount = ROUNDS * sum(at_once_bytes(shape, base, ITEM_BYTES["bf16"]) for shape in shapes)
    return Benchmark("memory traffic", f"unpacking of {base}", make, amount=amount, n_bytes=8 * sum(map(math.prod, shapes)))


def narrow(n_tokens: int, width: int, inner: int, rank: int) -> Benchmark:
    """Time the low-rank products of two adapters; bytes as in `planner.predict.compute_time.moved_bytes`."""

    def make(device: torch.device, working_bytes: int) -> Call:
        a, b = {n: _random(device, n, rank) for n in (width, inner)}, {n: _random(device, rank, n) for n in (width, inner)}
        turns = cycle(in_turn([_random(device, n_tokens, n) for n in (width, inner, width, inner)], working_bytes))

        def call() -> None:
            for x_TH, x_TI, y_TH, y_TI in islice(turns, ROUNDS):
                torch.mm(x_TH @ a[width], b[inner], out=y_TI)
                torch.mm(x_TI @ a[inner], b[width], out=y_TH)

        return call

    elements = (width + inner) * 2 * (n_tokens + rank) + 4 * n_tokens * rank  # sum of m k + k n + m n over the four products
    n_bytes = 2 * ITEM_BYTES["bf16"] * n_tokens * (width + inner)
    amount = ROUNDS * elements * ITEM_BYTES["bf16"]
    return Benchmark("memory traffic", f"products of rank {rank}", make, amount=amount, n_bytes=n_bytes)


def _passes(work: Benchmark, operands: Operands, call: Callable[..., Tensor], backward_factor: float) -> Passes:
    """Return forward and backward of `call` as two benchmarks like `work`. The last operand is the gradient of the result."""

    def forward(*leaves: Tensor) -> Tensor:
        with torch.enable_grad():
            return call(*leaves)

    def make(is_backward: bool, device: torch.device, working_bytes: int) -> Call:
        *leaves, gradient = operands(device)
        sets = in_turn([*(leaf.requires_grad_() for leaf in leaves), gradient], working_bytes)
        turns = cycle(sets)
        if not is_backward:
            return lambda: forward(*next(turns)[:-1])
        graphs = cycle([(forward(*leaves), leaves, gradient) for *leaves, gradient in sets])
        return lambda: torch.autograd.grad(*next(graphs), retain_graph=True)

    backward = replace(work, name=f"{work.name}, backward", make=partial(make, True), amount=work.amount * backward_factor)
    return {"forward": replace(work, name=f"{work.name}, forward", make=partial(make, False)), "backward": backward}


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def eager(n_tokens: int, width: int, inner: int, is_rotated: bool = True) -> Benchmark:
    """Time the eager pointwise calls of a bf16 decoder layer, forward and backward; backward bytes count twice."""

    def make(device: torch.device, working_bytes: int) -> Call:
        tensors = [_random(device, n_tokens, n) for n in (width, inner, inner, width, width, width, inner)]
        weight_H, *_ = [leaf.requires_grad_() for leaf in (_random(device, width), *tensors[:3])]
        sets = in_turn(tensors, working_bytes if is_rotated else 0)
        turns, results = cycle(sets), deque[tuple[Tensor, ...]](maxlen=len(sets))

        def call() -> None:
            hidden_TH, gate_TI, up_TI, cos_TH, sin_TH, d_TH, d_TI = next(turns)
            with torch.enable_grad():
                wide_TH = hidden_TH.float()
                scale_T1 = torch.rsqrt(wide_TH.pow(2).mean(-1, keepdim=True) + 1e-6)
                normed_TH = weight_H * (wide_TH * scale_T1).bfloat16()
                turned_TH = torch.cat((-normed_TH[:, width // 2 :], normed_TH[:, : width // 2]), -1)
                sum_TH = normed_TH * cos_TH + turned_TH * sin_TH + hidden_TH
                act_TI = F.silu(gate_TI) * up_TI
            results.append(torch.autograd.grad((sum_TH, act_TI), (hidden_TH, weight_H, gate_TI, up_TI), (d_TH, d_TI)))

        for _ in range(2 * len(sets)):  # until new results reuse the memory of old ones
            call()
        return call

    # Bytes per element read and written, in the order of the calls above.
    item, wide = 2, 4
    normed = (item + wide) + 2 * wide + wide + 2 * wide + (wide + item) + 2 * item
    rotated_and_added = 2 * item + item + 2 * item + 2 * item + 3 * item + 3 * item
    n_bytes = 3 * n_tokens * (width * (normed + rotated_and_added) + inner * 5 * item)
    n_calls = 3 * (8 + 6 + 2)  # norm, rotation and sum, activation
    return Benchmark("memory traffic", f"eager calls on {n_tokens} tokens", make, amount=n_bytes, n_calls=n_calls)


def pointwise(n_bytes: int) -> Benchmark:
    """Time one kernel that reads and writes `n_bytes` in total, far more than a cache holds."""

    def make(device: torch.device, _: int) -> Call:
        n_elements = max(1, n_bytes // (3 * torch.bfloat16.itemsize))  # two are read, one is written
        x, y, out = (torch.randn(n_elements, dtype=torch.bfloat16, device=device) for _ in range(3))
        return lambda: torch.add(x, y, out=out)

    return Benchmark("memory traffic", f"pointwise kernel on {n_bytes} bytes", make, amount=n_bytes)


def library_calls(is_cpu: bool) -> Benchmark:
    """Time calls on almost no data: on a CPU the calls of a layer, autograd overhead included; on a GPU one kernel."""
    return replace(eager(1, 32, 64, is_rotated=False) if is_cpu else pointwise(1), kind="calls")


def in_turn(tensors: Sequence[Tensor], working_bytes: int) -> list[list[Tensor]]:
    """Return the tensors and copies of them, `working_bytes` in total but at least one set."""
    n_copies = max(1, working_bytes // sum(tensor.nbytes for tensor in tensors)) - 1
    copies = ([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors] for _ in range(n_copies))
    return [list(tensors), *copies]


def rotating(operands: Sequence[Tensor], working_bytes: int, perform: Callable[..., object]) -> Call:
    """Return a call that performs a function on one set of operands after another."""
    turns = cycle(in_turn(operands, working_bytes))
    return lambda: perform(*next(turns))


def copying(target: Tensor, source: Tensor, n_bytes: int) -> Call:
    """Return a call that copies `n_bytes` at advancing offsets of two byte tensors, sliced beforehand because slicing is slow."""
    stride = max(n_bytes, STRIDE_BYTES)
    cut = ([memory[i : i + n_bytes] for i in range(0, len(memory) - n_bytes + 1, stride)] for memory in (target, source))
    places, sources = map(cycle, cut)
    return lambda: next(places).copy_(next(sources), non_blocking=True)
