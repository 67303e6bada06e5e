"""Replay steps of fused kernels, which replace the recorded calls of a module."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from penstock.runtime.plan import AttentionKernel, LibraryKernel

from .memory_replay import FP32, Call, Tape, Tensor

# Backward of the fused norm on a CPU holds NORM_ROWS rows in fp32: input, three intermediates, two gradients
NORM_ROWS, NORM_SCRATCH = 1024, 6 * FP32
CHUNK = 64  # tokens per chunk of fla's delta rule
MOST_PROCESSORS = 192  # bound on SMs, which profiles do not state: H100 and H200 have 132, B200 148, GB300 160, RTX 5090 170


def norm(tape: Tape, x: Tensor, width: int, trains: bool) -> Tensor:
    """RMS norm over rows of `width`: reads and writes once; saves its input and one fp32 scale per row.

    A CPU has no such kernel and computes the norm in chunks of rows.
    """
    n, rows = x.n_elements, x.n_elements // width
    scratch_bytes = x.n_bytes + NORM_SCRATCH * min(n, NORM_ROWS * width) + FP32 * width  # first: contiguous copy of a gradient
    return tape.step(
        [x], n, call=Call.NORM, saves=[x], extra_outputs=[Tensor(rows, FP32)], n_weights=width, n_trained=width * trains,
        scratch=scratch_bytes,
    )  # fmt: skip


def rotation(tape: Tape, x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of queries or keys; cosines and sines have the size of `table`."""
    return tape.step([x, table, table], x.n_elements, call=Call.FUSED, scratch=2 * x.n_bytes)


def gate(tape: Tape, opening: Tensor, up: Tensor) -> Tensor:
    """act(opening) * up, act SiLU or GELU; saves its operands and recomputes the activation in backward."""
    return tape.step([opening, up], up.n_elements, call=Call.FUSED, saves=[opening, up], scratch=2 * up.n_bytes)


def attention(
    tape: Tape,
    reads: Sequence[Tensor],
    shape: Sequence[int],
    kernel: AttentionKernel,
    sinks: bool = False,
    n_trained: int = 0,
) -> Tensor:
    """Scaled dot-product attention; `reads`: q, k, v and an optional bias (mask), `shape`: (sequences, heads, tokens, width) of q.

    CUDA kernels accumulate dq in fp32 and compute dk and dv per query head before the reduction over heads. The deterministic
    kernel uses no atomics and has several dq buffers (FlashAttention-2: SMs / (sequences x heads), rounded up). With sinks, the
    output is scaled in place, and four calls compute the scale; the mask that a CPU makes of a window is in `device_needs`.
    """
    n_sequences, n_heads, seq_len, _ = shape
    n_sums = -(-MOST_PROCESSORS // (n_sequences * n_heads)) if kernel == "deterministic" else 1
    sums = Tensor(n_sequences * n_heads * seq_len, FP32)
    return tape.step(
        reads, prod(shape), call=Call.ATTENTION, saves=reads, saves_out=True, extra_outputs=[sums], n_trained=n_trained,
        moved=sinks * (2 * prod(shape) * tape.item_bytes + 7 * sums.n_bytes), n_calls=6 if sinks else 1,
        scratch=prod(shape) * (n_sums * FP32 + 2 * tape.item_bytes),
    )  # fmt: skip


# Costs of other packages' kernels follow from their sources (causal-conv1d at 0d2252d, fla at bc3b101), not from measurements. The
# kernels are memory-bound (30 FLOP a byte), so the bytes that each kernel reads and writes once are its cost.
Formula = Callable[[Tape, Sequence[Tensor], Sequence[Sequence[int]], int, int], Tensor]


def convolution(tape: Tape, reads: Sequence[Tensor], shapes: Sequence[Sequence[int]], n_weights: int, trained: int) -> Tensor:
    """Causal depthwise convolution with an activation in one kernel; saves its input."""
    x = reads[0]
    return tape.step(
        [x], x.n_elements, call=Call.FUSED, saves=[x], n_weights=n_weights, n_trained=trained, scratch=FP32 * n_weights
    )


def delta_rule(tape: Tape, reads: Sequence[Tensor], shapes: Sequence[Sequence[int]], n_weights: int, trained: int) -> Tensor:
    """Chunked gated delta rule. Saves normalised queries and keys with their scales, a copy of the values, cumulative decays and
    the solved triangular matrix of each chunk; states and their updates are recomputed in backward.

    Element counts: `qk` queries (= keys), `k` and `v` keys and values over all value heads, `a` triangular matrices, `h` states.
    """
    (n, n_tokens, heads, width), (*_, v_heads, v_width) = shapes[0], shapes[2]
    rows, item = n * n_tokens * v_heads, tape.item_bytes
    qk, k, v, a = n * n_tokens * heads * width, rows * width, rows * v_width, rows * CHUNK
    h = n * v_heads * -(-n_tokens // CHUNK) * width * v_width
    # Copies and norms; triangular matrices; state updates; states; output
    moved = (2 * (2 * qk + v) + 4 * qk) + (k + 2 * a) + (a + 2 * v + 2 * k) + (2 * k + 2 * v + h) + (2 * k + 2 * v + h)
    saved = [(qk, item), (qk // width, FP32), (qk, item), (qk // width, FP32), (v, item), (rows, FP32), (a, item)]
    return tape.step(
        reads, prod(shapes[2]), call=Call.FUSED, saves=[reads[-1]], moved=moved * item + 2 * rows * FP32, n_calls=11,
        extra_outputs=[Tensor(*size, differentiable=False) for size in saved], scratch=(5 * k + 4 * v + 2 * h) * item,
    )  # fmt: skip


LIBRARY: Mapping[str, Formula] = dict[LibraryKernel, Formula]({  # type: ignore[assignment]
    "causal_conv1d.causal_conv1d_fn": convolution, "fla.chunk_gated_delta_rule": delta_rule
})  # fmt: skip
