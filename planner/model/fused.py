"""Steps of fused kernels: what takes the place of a module's own calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.plan import AttentionKernel

from .tape import FP32, Call, Tape, Tensor

# Of a fused norm's backward on a CPU, which has NORM_ROWS in fp32 at a time: input, three results in between, two gradients
NORM_ROWS, NORM_SCRATCH = 1024, 6 * FP32
MOST_PROCESSORS = 192  # of one GPU, which profiles do not state: H100 and H200 have 132, B200 148, GB300 160, RTX 5090 170


def norm(tape: Tape, x: Tensor, width: int, trains: bool) -> Tensor:
    """Root-mean-square norm over rows of `width`: it reads and writes once, and keeps its input and a scale for each row.

    A CPU has no such kernel, and spells the norm out for some rows at a time.
    """
    n, rows = x.n_elements, x.n_elements // width
    scratch_bytes = x.n_bytes + NORM_SCRATCH * min(n, NORM_ROWS * width) + FP32 * width  # the first: its gradient, in order
    return tape.step(
        [x], n, saves=[x], beside=[Tensor(rows, FP32)], weight_elements=width, scratch_bytes=scratch_bytes, fused=True,
        trained=trains, norm=True,
    )  # fmt: skip


def rotation(tape: Tape, x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of queries or keys, by cosines and sines (each a `table`)."""
    return tape.step([x, table, table], x.n_elements, scratch_bytes=2 * x.n_bytes, fused=True)


def gate(tape: Tape, opening: Tensor, up: Tensor) -> Tensor:
    """silu(opening) * up: the activation is not kept, and made again from what is."""
    return tape.step([opening, up], up.n_elements, saves=[opening, up], scratch_bytes=2 * up.n_bytes, fused=True)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one micro-batch."""

    n_sequences: int
    seq_len: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kernel: AttentionKernel = "flash"


def attention(tape: Tape, reads: Sequence[Tensor], shape: AttentionShape) -> Tensor:
    """Scaled dot-product attention of queries, keys and values, and of a bias where there is a mask.

    The CUDA kernels sum the gradient of q in fp32 and make those of k and v for every query head before adding them up. Without
    atomics every processor of a head has a sum of its own (FlashAttention-2: processors / (sequences x heads), rounded up).
    """
    n_rows = shape.n_sequences * shape.n_heads
    n_elements = n_rows * shape.seq_len * shape.head_dim
    n_sums = -(-MOST_PROCESSORS // n_rows) if shape.kernel == "deterministic" else 1
    return tape.step(
        reads, n_elements, saves=reads, saves_out=True, beside=[Tensor(n_rows * shape.seq_len, FP32)], moved_bytes=0,
        scratch_bytes=n_elements * (n_sums * FP32 + 2 * tape.item_bytes), call=Call.ATTENTION,
    )  # fmt: skip
