"""Steps of fused kernels: what takes the place of a module's own calls."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from penstock.runtime.plan import AttentionKernel, LibraryKernel

from .tape import FP32, Call, Tape, Tensor

# Of a fused norm's backward on a CPU, which has NORM_ROWS in fp32 at a time: input, three results in between, two gradients
NORM_ROWS, NORM_SCRATCH = 1024, 6 * FP32
CHUNK = 64  # tokens that fla's delta rule computes at once
MOST_PROCESSORS = 192  # of one GPU, which profiles do not state: H100 and H200 have 132, B200 148, GB300 160, RTX 5090 170


def norm(tape: Tape, x: Tensor, width: int, trains: bool) -> Tensor:
    """Root-mean-square norm over rows of `width`: it reads and writes once, and keeps its input and a scale for each row.

    A CPU has no such kernel, and spells the norm out for some rows at a time.
    """
    n, rows = x.n_elements, x.n_elements // width
    scratch_bytes = x.n_bytes + NORM_SCRATCH * min(n, NORM_ROWS * width) + FP32 * width  # the first: its gradient, in order
    return tape.step(
        [x], n, call=Call.NORM, saves=[x], beside=[Tensor(rows, FP32)], n_weights=width, n_trained=width * trains,
        scratch=scratch_bytes,
    )  # fmt: skip


def rotation(tape: Tape, x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of queries or keys, by cosines and sines (each a `table`)."""
    return tape.step([x, table, table], x.n_elements, call=Call.FUSED, scratch=2 * x.n_bytes)


def gate(tape: Tape, opening: Tensor, up: Tensor) -> Tensor:
    """act(opening) * up, act SiLU or GELU: the activation is not kept, and computed again from its operands."""
    return tape.step([opening, up], up.n_elements, call=Call.FUSED, saves=[opening, up], scratch=2 * up.n_bytes)


def attention(tape: Tape, reads: Sequence[Tensor], shape: Sequence[int], kernel: AttentionKernel) -> Tensor:
    """Scaled dot-product attention of queries, keys and values, and of a bias where there is a mask; `shape`: of the queries,
    sequences, heads, tokens and width.

    The CUDA kernels sum the gradient of q in fp32 and make those of k and v for every query head before adding them up. Without
    atomics every processor of a head has a sum of its own (FlashAttention-2: processors / (sequences x heads), rounded up).
    """
    n_sequences, n_heads, seq_len, _ = shape
    n_sums = -(-MOST_PROCESSORS // (n_sequences * n_heads)) if kernel == "deterministic" else 1
    return tape.step(
        reads, prod(shape), call=Call.ATTENTION, saves=reads, saves_out=True, moved=0,
        beside=[Tensor(n_sequences * n_heads * seq_len, FP32)],
        scratch=prod(shape) * (n_sums * FP32 + 2 * tape.item_bytes),
    )  # fmt: skip


# What other packages' kernels do was read from their sources, not measured: causal-conv1d at 0d2252d, fla at bc3b101. Memory binds
# them (30 FLOP a byte), so that what each kernel reads and writes, once, is all that they cost.
Formula = Callable[[Tape, Sequence[Tensor], Sequence[Sequence[int]], int, int], Tensor]


def convolution(tape: Tape, reads: Sequence[Tensor], shapes: Sequence[Sequence[int]], n_weights: int, trained: int) -> Tensor:
    """Convolution of each channel over its last few tokens, and an activation, as one kernel: it keeps its input."""
    x = reads[0]
    return tape.step(
        [x], x.n_elements, call=Call.FUSED, saves=[x], n_weights=n_weights, n_trained=trained, scratch=FP32 * n_weights
    )


def delta_rule(tape: Tape, reads: Sequence[Tensor], shapes: Sequence[Sequence[int]], n_weights: int, trained: int) -> Tensor:
    """Gated delta rule, in chunks: it keeps queries and keys as it has normed them with their scales, a copy of values, the sums of
    decays, and of each chunk the solved triangle; states and what is written to them are made again.

    Elements: `qk` of queries as of keys, `k` and `v` of keys and values of all heads of values, `a` of triangles, `h` of states.
    """
    (n, n_tokens, heads, width), (*_, v_heads, v_width) = shapes[0], shapes[2]
    rows, item = n * n_tokens * v_heads, tape.item_bytes
    qk, k, v, a = n * n_tokens * heads * width, rows * width, rows * v_width, rows * CHUNK
    h = n * v_heads * -(-n_tokens // CHUNK) * width * v_width
    # copies and norms; triangles; what is written; states; output
    moved = (2 * (2 * qk + v) + 4 * qk) + (k + 2 * a) + (a + 2 * v + 2 * k) + (2 * k + 2 * v + h) + (2 * k + 2 * v + h)
    kept = [(qk, item), (qk // width, FP32), (qk, item), (qk // width, FP32), (v, item), (rows, FP32), (a, item)]
    return tape.step(
        reads, prod(shapes[2]), call=Call.FUSED, saves=[reads[-1]], beside=[Tensor(*each, differentiable=False) for each in kept],
        moved=moved * item + 2 * rows * FP32, scratch=(5 * k + 4 * v + 2 * h) * item, n_calls=11,
    )  # fmt: skip


LIBRARY: Mapping[str, Formula] = dict[LibraryKernel, Formula]({  # type: ignore[assignment]
    "causal_conv1d.causal_conv1d_fn": convolution, "fla.chunk_gated_delta_rule": delta_rule
})  # fmt: skip
