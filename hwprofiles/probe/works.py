"""Which pieces of work stand for training?

Each function makes a piece of work: a function of no arguments, over tensors of its own, that does the same amount of it at
every call. What is computed is what the runtime computes: transformers' calls, the runtime's copies and its own optimizer. Data
are random, because zeros run faster on some machines.
"""

# T tokens, H width, I width inside the MLP, D width of a head

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F

from hwprofiles.quantity import Dtype
from runtime.host.memory import DTYPE
from runtime.host.optimizer import CHUNK_ELEMENTS, AdamW, ParamState, Scratch, SplitMaster, adamw_, sum_of_squares
from runtime.host.slabs import host_slab
from runtime.units import KiB

Work = Callable[[], object]

SETTINGS = AdamW(lr=1e-5, weight_decay=0.1)
CLIP_FACTOR = 0.5  # any but 1, which would skip the multiplication
UPDATE_PARAMS = 16 * CHUNK_ELEMENTS  # of one call of the optimizer, where nothing else is asked for
COPY_ALIGN_BYTES = 64  # of a tensor in an arena


CPU = torch.device("cpu")


def in_turn(tensors: Sequence[torch.Tensor], working_bytes: int) -> list[list[torch.Tensor]]:
    """The tensors and copies of them, together about `working_bytes`, to be used in turn: in training no call finds the tensors of
    the call before, which a cache may still hold."""
    n_copies = max(1, working_bytes // sum(tensor.nbytes for tensor in tensors))
    copies = ([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors] for _ in range(n_copies - 1))
    return [list(tensors), *copies]


def products(dtype: Dtype, m: int, k: int, n: int, device: torch.device = CPU, working_bytes: int = 0) -> Work:
    """A linear layer, (m, k) @ (k, n), and its backward: three products of equal work. On as many sets of
    tensors as `working_bytes` hold, used in turn; 0: on one."""
    x, w, dy = (torch.randn(*shape, dtype=DTYPE[dtype], device=device) for shape in ((m, k), (n, k), (m, n)))
    turns = cycle(in_turn([x, w, dy, torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)], working_bytes))

    def work() -> None:
        x, w, dy, y, dx, dw = next(turns)
        torch.mm(x, w.t(), out=y)
        torch.mm(dy, w, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return work


def attention(
    dtype: Dtype, n_sequences: int, n_heads: int, seq_len: int, head_dim: int, device: torch.device = CPU
) -> tuple[Work, Work]:
    """Causal attention's forward, and its backward; heads lie next to each other in memory, as projections leave them."""
    shape = (n_sequences, seq_len, n_heads, head_dim)
    q, k, v, do = (torch.randn(shape, dtype=DTYPE[dtype], device=device).transpose(1, 2) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)


def norm(n_tokens: int, width: int, device: torch.device = CPU, working_bytes: int = 0) -> tuple[Work, Work]:
    """An RMS norm in one kernel, in bf16: forward, and backward. On as many sets of tensors as `working_bytes` hold, in turn."""
    x, dy = (torch.randn(n_tokens, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    w = torch.randn(width, dtype=torch.bfloat16, device=device)
    sets = in_turn([x.requires_grad_(), w.requires_grad_(), dy], working_bytes)

    def forward_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return F.rms_norm(x, (width,), w, 1e-6)

    turns, done = cycle(sets), cycle([(forward_of(x, w), (x, w), dy) for x, w, dy in sets])

    def backward() -> None:
        y, leaves, dy = next(done)
        torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return lambda: forward_of(*next(turns)[:2]), backward


def pointwise(n_tokens: int, width: int, inner: int, working_bytes: int = 0, device: torch.device = CPU) -> tuple[Work, int, int]:
    """What a decoder layer does in bf16 besides products, forward and backward; its traffic in bytes and its library calls.

    The backward counts twice the forward, as in the planner's cost model. On as many sets of inputs as `working_bytes` hold, used
    in turn; 0: on one.
    """
    bf16 = torch.bfloat16
    trained = [torch.randn(n_tokens, w, device=device).to(bf16).requires_grad_() for w in (width, inner, inner)]
    others = [torch.randn(n_tokens, w, device=device).to(bf16) for w in (width, width, width, inner)]
    weight_H = torch.randn(width, device=device).to(bf16).requires_grad_()
    copies = in_turn([*trained, *others], working_bytes)
    turns, results = cycle(copies), deque[tuple[torch.Tensor, ...]](maxlen=len(copies))

    def work() -> None:
        hidden_TH, gate_TI, up_TI, cos_TH, sin_TH, d_TH, d_TI = next(turns)
        with torch.enable_grad():
            wide_TH = hidden_TH.float()
            scale_T1 = torch.rsqrt(wide_TH.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed_TH = weight_H * (wide_TH * scale_T1).to(bf16)
            turned_TH = torch.cat((-normed_TH[:, width // 2 :], normed_TH[:, : width // 2]), -1)
            sum_TH = normed_TH * cos_TH + turned_TH * sin_TH + hidden_TH
            act_TI = F.silu(gate_TI) * up_TI
        results.append(torch.autograd.grad((sum_TH, act_TI), (hidden_TH, weight_H, gate_TI, up_TI), (d_TH, d_TI)))

    for _ in range(2 * len(copies)):  # until new results find the memory of old ones
        work()

    # Bytes per element of what each call reads and writes, in the order of the calls above.
    item, wide = 2, 4
    norm = (item + wide) + 2 * wide + wide + 2 * wide + (wide + item) + 2 * item
    rotate_and_add = 2 * item + item + 2 * item + 2 * item + 3 * item + 3 * item
    n_bytes = n_tokens * (width * (norm + rotate_and_add) + inner * 5 * item)
    n_calls = 8 + 6 + 2  # norm, rotation and sum, activation
    return work, 3 * n_bytes, 3 * n_calls


def product_stream() -> Work:
    """An fp32 product that fits a core's cache, to load compute cores with."""
    x = torch.randn(512, 512)
    return lambda: x @ x


def filled(n_bytes: int) -> torch.Tensor:
    """Memory that was written to, so that every page of it is there."""
    return torch.empty(n_bytes, dtype=torch.uint8).fill_(1)


def slab(n_bytes: int) -> torch.Tensor:
    """Memory as the runtime takes it, with pages of its own, all of them there."""
    return host_slab(n_bytes).fill_(1)


def walking_copy(to: torch.Tensor, source: torch.Tensor, n_bytes: int, n_copies: int = 1) -> Work:
    """Copies of `n_bytes` that step through both memories (flat bytes), so that the source is never in a cache."""
    n_bytes = min(n_bytes, to.numel(), source.numel())
    at = [0]
    stride = max(n_bytes, 64 * KiB)

    def work() -> None:
        for _ in range(n_copies):
            i, j = at[0] % (to.numel() - n_bytes + 1), at[0] % (source.numel() - n_bytes + 1)
            i, j = i - i % COPY_ALIGN_BYTES, j - j % COPY_ALIGN_BYTES
            to[i : i + n_bytes].copy_(source[j : j + n_bytes])
            at[0] += stride

    return work


def walking_updates(n_params: int, piece: int, n_lanes: int) -> list[Work]:
    """For each lane: the runtime's optimizer on `piece` parameters after another, of a state of its own, too large for a cache.

    Masters are split, as they are for bf16 compute.

    A lane is what one of the runtime's workers is: a thread with scratch memory of its own, on one task at a time. That these
    wait for each other at an op's end is part of the overhead of an op.
    """
    n_params -= n_params % piece
    assert n_params >= piece
    master = SplitMaster(torch.empty(n_params, dtype=torch.bfloat16), torch.empty(n_params, dtype=torch.int16))
    master.cut(slice(None), torch.randn(n_params))
    exp_avg, exp_avg_sq = torch.randn(n_params) * 1e-3, torch.rand(n_params) * 1e-6
    state = (master.weight, master.remainder, exp_avg, exp_avg_sq, torch.randn(n_params).bfloat16())
    copies = [tuple(part.clone() for part in state) for _ in range(n_lanes - 1)]  # drawing numbers for all would take long
    return [_walking_update(own, piece) for own in (state, *copies)]


def _walking_update(state: Sequence[torch.Tensor], piece: int) -> Work:
    n_params, at, own = state[0].numel(), [0], Scratch()

    def work() -> None:
        weight, remainder, exp_avg, exp_avg_sq, gradient = (tensor[at[0] : at[0] + piece] for tensor in state)
        to = ParamState(SplitMaster(weight, remainder), exp_avg, exp_avg_sq)
        adamw_(to, gradient, CLIP_FACTOR, 10, SETTINGS, None, own)
        at[0] = (at[0] + piece) % n_params

    return work


def reductions(n_params: int, n_lanes: int) -> tuple[list[Work], int]:
    """For each lane the runtime's norm over a bf16 gradient of its own, of `n_params`; and the bytes that each reads."""
    first = torch.randn(n_params).bfloat16()
    gradients = [first, *(first.clone() for _ in range(n_lanes - 1))]
    return [_reduction(gradient) for gradient in gradients], first.nbytes


def _reduction(gradient: torch.Tensor) -> Work:
    own = Scratch()
    return lambda: sum_of_squares(gradient, own)
