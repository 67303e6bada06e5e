"""Calls of each block's forward pass.

Norms, rotary embedding, attention, MLP and experts as transformers writes them, played on a `Tape`.
"""

# T tokens of a micro-batch, H hidden width, R rows sent to experts (T x experts per token), I width inside the MLP

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from runtime.plan import AttentionKernel, Kernel
from runtime.plan.workload import Matmul

from .tape import FP32, INT64, Call, Tape, Tensor, Weights

# Of a fused norm's backward on a CPU, which has NORM_ROWS in fp32 at a time: input, three results in between, two gradients
NORM_ROWS, NORM_SCRATCH = 1024, 6 * FP32
MOST_PROCESSORS = 192  # of one GPU, which profiles do not state: H100 and H200 have 132, B200 148, GB300 160, RTX 5090 170


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one micro-batch: `masked` where the window really cuts, so that a mask is built."""

    n_sequences: int
    seq_len: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    masked: bool
    kernel: AttentionKernel = "flash"

    @property
    def n_tokens(self) -> int:
        return self.n_sequences * self.seq_len

    @property
    def q_elements(self) -> int:
        return self.n_tokens * self.n_heads * self.head_dim

    @property
    def square(self) -> int:
        """Elements of one score matrix for all sequences, per head."""
        return self.n_sequences * self.seq_len**2


def rms_norm(tape: Tape, x: Tensor, width: int, style: str, kernel: Kernel = "eager", trains: bool = True) -> Tensor:
    """Root-mean-square norm over rows of `width`. `plain` rounds before the weight, `late` after it, `centred` uses 1 + weight.

    The fused kernel reads and writes once, and keeps its input and a scale for each row. A CPU has none, and spells the norm out
    for some rows at a time.
    """
    n, rows = x.n_elements, x.n_elements // width
    if kernel == "fused":
        scratch_bytes = x.n_bytes + NORM_SCRATCH * min(n, NORM_ROWS * width) + FP32 * width  # the first: its gradient, in order
        return tape.step(
            [x], n, saves=[x], beside=[Tensor(rows, FP32)], weight_elements=width, scratch_bytes=scratch_bytes, fused=True,
            trained=trains, norm=True,
        )  # fmt: skip
    x32 = tape.cast(x, FP32)
    squares = tape.step([x32], n, item_bytes=FP32, saves=[x32])
    mean = tape.step([squares], rows, item_bytes=FP32)
    shifted = tape.step([mean], rows, item_bytes=FP32)
    scale = tape.step([shifted], rows, item_bytes=FP32, saves_out=True)
    y = tape.step([x32, scale], n, item_bytes=FP32, saves=[x32, scale])
    if style == "plain":
        y = tape.cast(y, tape.item_bytes)
        return tape.step([y], n, saves=[y] if trains else [], weight_elements=width, trained=trains)
    if style == "late":
        y = tape.step([y], n, item_bytes=FP32, saves=[y] if trains else [], weight_elements=width, trained=trains)
    else:
        weight = Tensor(width, tape.item_bytes, ours=False)
        weight = tape.step([tape.cast(weight, FP32)], width, item_bytes=FP32)
        y = tape.step([y, weight], n, item_bytes=FP32, saves=[y, weight][not trains :], weight_elements=width, trained=trains)
    return tape.cast(y, tape.item_bytes)


def rotate(tape: Tape, x: Tensor, table: Tensor, style: str, kernel: Kernel = "eager") -> Tensor:
    """Rotary embedding of queries or keys; cosines and sines (each a `table`) are shared by all layers."""
    if kernel == "fused":
        return tape.step([x, table, table], x.n_elements, scratch_bytes=2 * x.n_bytes, fused=True)
    n, half = x.n_elements, x.n_elements // 2
    half_bytes = half * x.item_bytes
    if style == "halves":
        parts = [tape.step([x], half, moved_bytes=2 * half_bytes + table.n_bytes) for _ in range(4)]
        sums = [tape.step(parts[:2], half), tape.step(parts[2:], half)]
        return tape.step(sums, n)
    straight = tape.step([x, table], n)
    negated = tape.step([x], half, moved_bytes=2 * half_bytes)
    turned = tape.step([negated, x], n, moved_bytes=4 * half_bytes)
    return tape.step([straight, tape.step([turned, table], n)], n)


def rotate_interleaved(tape: Tape, heads: Sequence[Tensor], table: Tensor) -> list[Tensor]:
    """The same of neighbours instead of halves, in fp32: each layer lays cosines and sines out anew, and keeps them."""
    cos, sin = (tape.step([table], table.n_elements, item_bytes=FP32, differentiable=False) for _ in range(2))
    sums = []
    for x in heads:
        n, half_bytes = x.n_elements, x.n_bytes // 2
        straight = tape.step([tape.cast(x, FP32), cos], n, item_bytes=FP32, saves=[cos])
        negated = tape.step([x], n // 2, moved_bytes=2 * half_bytes)
        turned = tape.cast(tape.step([negated, x], n, moved_bytes=4 * half_bytes), FP32)
        sums.append(tape.step([straight, tape.step([turned, sin], n, item_bytes=FP32, saves=[sin])], n, item_bytes=FP32))
    return [tape.cast(total, tape.item_bytes) for total in sums]


def fused_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Scaled dot-product attention. A mask makes transformers repeat keys and values and widen the mask to a bias."""
    extra: list[Tensor] = []
    if shape.masked:
        if shape.n_heads > shape.n_kv_heads:
            k, v = tape.step([k], shape.q_elements), tape.step([v], shape.q_elements)
        mask = Tensor(shape.square, 1, ours=False, differentiable=False)
        extra = [tape.step([mask], shape.square, n_calls=3, differentiable=False)]
    sums = Tensor(shape.n_tokens * shape.n_heads, FP32)
    # The CUDA kernels sum the gradient of q in fp32 and make those of k and v for every query head before adding them up. Without
    # atomics every processor of a head has a sum of its own (FlashAttention-2: processors / (sequences x heads), rounded up).
    n_sums = -(-MOST_PROCESSORS // (shape.n_sequences * shape.n_heads)) if shape.kernel == "deterministic" else 1
    scratch_bytes = shape.q_elements * (n_sums * FP32 + 2 * tape.item_bytes)
    return tape.step(
        [q, k, v], shape.q_elements, saves=[q, k, v, *extra], saves_out=True, beside=[sums], moved_bytes=0,
        scratch_bytes=scratch_bytes, call=Call.ATTENTION,
    )  # fmt: skip


def eager_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, softcap: bool, sinks: bool) -> Tensor:
    """Attention spelled out: every head's full score matrix lies in memory, several times over."""
    n, wide = shape.square * shape.n_heads, shape.n_heads * (shape.square + shape.n_tokens)
    grouped, several = shape.n_heads > shape.n_kv_heads, shape.n_sequences > 1
    if grouped or several:
        k, v = tape.step([k], shape.q_elements), tape.step([v], shape.q_elements)
    if several and not sinks:  # with sinks, the rotary embedding leaves q contiguous
        q = tape.step([q], shape.q_elements)
    scores = tape.step([q, k], n, saves=[q, k], moved_bytes=0, call=Call.ATTENTION)
    scores = tape.step([scores], n)
    if softcap:
        capped = tape.step([tape.step([scores], n)], n, saves_out=True)
        scores = tape.step([capped], n)
    mask = Tensor(shape.square, tape.item_bytes, ours=False, differentiable=False)
    scores = tape.step([scores, mask], n)
    if sinks:
        scores = tape.step([scores], wide, weight_elements=shape.n_heads)
        rows = shape.n_tokens * shape.n_heads
        top = tape.step([scores], rows, moved_bytes=scores.n_bytes + rows * (tape.item_bytes + INT64))
        scores = tape.step([scores, top], wide, saves=[Tensor(rows, INT64)])
        weights = tape.step([scores], wide, saves_out=True)
    else:
        scores = tape.cast(scores, FP32)
        weights = tape.cast(tape.step([scores], n, item_bytes=FP32, saves_out=True), tape.item_bytes)
    mixed = tape.step([weights, v], shape.q_elements, saves=[weights, v], moved_bytes=0, call=Call.ATTENTION)
    return tape.step([mixed], shape.q_elements)


def gated_mlp(
    tape: Tape, x: Tensor, n_tokens: int, width: int, inner: int, of: Callable[[str], Weights], kernel: Kernel = "eager"
) -> Tensor:
    """down(act(gate(x)) * up(x)). Fused, the activation is not kept: the backward makes it again, from what is."""
    gate = tape.linear(x, n_tokens, width, inner, of("mlp.gate_proj"))
    if kernel == "fused":
        up = tape.linear(x, n_tokens, width, inner, of("mlp.up_proj"))
        product = tape.step([gate, up], gate.n_elements, saves=[gate, up], scratch_bytes=2 * gate.n_bytes, fused=True)
        return tape.linear(product, n_tokens, inner, width, of("mlp.down_proj"))
    act = tape.step([gate], gate.n_elements, saves=[gate])
    up = tape.linear(x, n_tokens, width, inner, of("mlp.up_proj"))
    product = tape.step([act, up], act.n_elements, saves=[act, up])
    return tape.linear(product, n_tokens, inner, width, of("mlp.down_proj"))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Experts of one layer. `router`: `fp32` and `cast` take the softmax over all experts, `chosen` over the chosen ones."""

    n_tokens: int
    width: int
    inner: int
    n_experts: int
    top_k: int
    router: str
    bias: bool
    normalised: bool
    grouped: bool
    router_weights: Weights
    trained: frozenset[str]  # of the experts' weights, by their names within the module

    @property
    def n_rows(self) -> int:
        return self.n_tokens * self.top_k

    def products(self, k: int, n: int) -> list[Matmul]:
        """Rows spread over experts as evenly as whole rows allow; an expert without rows computes nothing."""
        rows, left = divmod(self.n_rows, self.n_experts)
        spread = [(rows, self.n_experts - left), (rows + 1, left)]
        return [Matmul(m, k, n, count) for m, count in spread if m and count]

    def trains(self, name: str) -> bool:
        return name in self.trained


def route(tape: Tape, x: Tensor, s: ExpertsShape) -> Tensor:
    """The router: the weight of each row, from logits over all experts."""
    logits = tape.linear(x, s.n_tokens, s.width, s.n_experts, s.router_weights)
    index = Tensor(s.n_rows, INT64)
    if s.router == "chosen":
        top = tape.step([logits], s.n_rows, moved_bytes=logits.n_bytes + s.n_rows * (tape.item_bytes + INT64), saves=[index])
        return tape.step([top], s.n_rows, saves_out=True)
    probabilities = tape.step([tape.cast(logits, FP32)], logits.n_elements, item_bytes=FP32, saves_out=True)
    moved_bytes = probabilities.n_bytes + s.n_rows * (FP32 + INT64)
    top = tape.step([probabilities], s.n_rows, item_bytes=FP32, moved_bytes=moved_bytes, saves=[index])
    if s.normalised:
        total = tape.step([top], s.n_tokens, item_bytes=FP32)
        top = tape.step([top, total], s.n_rows, item_bytes=FP32, saves=[top, total], n_calls=2)
    return tape.cast(top, tape.item_bytes) if s.router == "cast" else top


def experts(tape: Tape, x: Tensor, s: ExpertsShape) -> Tensor:
    """The experts' MLPs on the rows routed to them, and their weighted sum."""
    scores = route(tape, x, s)
    n, each = s.n_rows * s.width, 1 if s.grouped else s.n_experts
    index = Tensor(s.n_rows, INT64 if s.grouped else 2 * INT64)
    # Which rows belong to another device's expert: none, but transformers 5.17 asks. What it masks takes the place of what it was
    mask = Tensor(s.n_rows, 1 if s.grouped else 0)
    # Bookkeeping on row numbers: sorting or one-hot masks; beside the rows themselves its traffic is small
    n_calls = each + (8 if s.grouped else 7 + 6 * s.n_experts)
    rows = tape.step([x], n, saves=[index, mask], moved_bytes=2 * n * x.item_bytes + index.n_bytes, n_calls=n_calls)
    order = Tensor(s.n_rows, INT64 if s.grouped else 0)
    row_weights = tape.step([scores], s.n_rows, item_bytes=scores.item_bytes, saves=[order], n_calls=each)
    # By their names in the module: what the router said, and the expert of each row, once more in 4 bytes to count rows
    chosen, counted = (Tensor(s.n_rows, item_bytes if s.grouped else 0) for item_bytes in (INT64, 4))
    names = (scores, chosen, counted) if s.grouped else ()
    tape.held = names

    def product(x: Tensor, k: int, n: int, name: str) -> Tensor:
        elements, out, trains = s.n_experts * k * n, s.n_rows * n, s.trains(name)
        # Picking one expert's weight in a loop makes a gradient of the whole tensor's size for each expert, then adds it
        scratch_bytes = 2 * elements * tape.item_bytes * (trains and not s.grouped)
        matmuls = s.products(k, n) if trains else [replace(m, frozen=True) for m in s.products(k, n)]
        y = tape.step(
            [x], out, saves=[x] if trains else [], weight_elements=elements, moved_bytes=0, scratch_bytes=scratch_bytes,
            n_calls=each, call=(Call.OVERWRITTEN if s.bias else Call.GROUPED) if s.grouped else Call.PRODUCT, matmuls=matmuls,
            trained=trains,
        )  # fmt: skip
        if s.bias:  # the bias of each row's expert, then the sum
            bias, trains = Tensor(out if s.grouped else 0, tape.item_bytes, differentiable=False), s.trains(f"{name}_bias")
            y = tape.step(
                [y, bias], out, saves=[chosen] if trains else [], weight_elements=s.n_experts * n,
                scratch_bytes=0 if s.grouped else None, n_calls=2 if s.grouped else each, trained=trains,
            )  # fmt: skip
            tape.held = (*names, bias)
        return y

    mixed = _gated(tape, product(rows, s.width, 2 * s.inner, "gate_up_proj"), s)
    y = product(mixed, s.inner, s.width, "down_proj")
    weighted_bytes = max(y.item_bytes, row_weights.item_bytes)
    # Where precisions are mixed, one of the factors is also made in the wider one
    scratch_bytes = n * weighted_bytes * (2 if s.grouped and y.item_bytes < weighted_bytes else 1)
    y = tape.step(
        [y, row_weights], n, item_bytes=weighted_bytes, saves=[y, row_weights], scratch_bytes=scratch_bytes, n_calls=each
    )  # fmt: skip
    if s.grouped:  # back into token order, then summed over each token's experts
        y = tape.step([y], n, item_bytes=weighted_bytes, saves=[Tensor(s.n_rows, INT64)])
        y = tape.cast(tape.step([y], s.n_tokens * s.width, item_bytes=weighted_bytes), tape.item_bytes)
    else:
        y = tape.cast(y, tape.item_bytes)
        y = tape.step([y], s.n_tokens * s.width, saves=[y], moved_bytes=3 * y.n_bytes, n_calls=each, looped=True)
    tape.held = ()
    return y


def _gated(tape: Tape, gate_up: Tensor, s: ExpertsShape) -> Tensor:
    """What the experts' gates let through of their up-projections."""
    inner, n_calls = s.n_rows * s.inner, 1 if s.grouped else s.n_experts
    half_bytes = inner * tape.item_bytes
    if s.bias:  # clamped gate and up, gate * sigmoid(a * gate), up + 1
        gate, up = (tape.step([gate_up], inner, saves=[gate_up], moved_bytes=2 * half_bytes, n_calls=n_calls) for _ in "gu")
        sigmoid = tape.step([tape.step([gate], inner, n_calls=n_calls)], inner, saves_out=True, n_calls=n_calls)
        act = tape.step([gate, sigmoid], inner, saves=[gate, sigmoid], n_calls=n_calls)
        held, tape.held = tape.held, (*tape.held, up)
        up = tape.step([up], inner, n_calls=n_calls)
        mixed = tape.step([up, act], inner, saves=[up, act], n_calls=n_calls)
        tape.held = held
    else:
        act = tape.step([gate_up], inner, saves=[gate_up], moved_bytes=2 * half_bytes, n_calls=n_calls)
        mixed = tape.step([act, gate_up], inner, saves=[act, gate_up], moved_bytes=3 * half_bytes, n_calls=n_calls)
    return mixed
