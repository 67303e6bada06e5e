"""Kernels of transformers' modules as traced steps, eager and fused, for the ledger of ops."""

from penstock.planner.model import fused
from penstock.planner.model.memory_replay import FP32, Tape, Tensor
from penstock.runtime.plan import Kernel


def rms_norm(tape: Tape, x: Tensor, width: int, kernel: Kernel) -> None:
    """Root-mean-square norm over rows of `width`, rounded before the weight."""
    if kernel == "fused":
        fused.norm(tape, x, width, True)
        return
    n, rows = x.n_elements, x.n_elements // width
    x32 = x if x.item_bytes == FP32 else tape.step([x], n, item_bytes=FP32)
    squares = tape.step([x32], n, item_bytes=FP32, saves=[x32])
    mean = tape.step([squares], rows, item_bytes=FP32)
    shifted = tape.step([mean], rows, item_bytes=FP32)
    scale = tape.step([shifted], rows, item_bytes=FP32, saves_out=True)
    y = tape.step([x32, scale], n, item_bytes=FP32, saves=[x32, scale])
    y = y if y.item_bytes == tape.item_bytes else tape.step([y], n)
    tape.step([y], n, saves=[y], n_weights=width, n_trained=width)


def rotation(tape: Tape, x: Tensor, table: Tensor, kernel: Kernel) -> None:
    """Rotary embedding of queries or keys, by halves."""
    if kernel == "fused":
        fused.rotation(tape, x, table)
        return
    n, half = x.n_elements, x.n_elements // 2
    half_bytes = half * x.item_bytes
    straight = tape.step([x, table], n)
    negated = tape.step([x], half, moved=2 * half_bytes)
    turned = tape.step([negated, x], n, moved=4 * half_bytes)
    tape.step([straight, tape.step([turned, table], n)], n)


def gated_mlp(tape: Tape, x: Tensor, n_tokens: int, width: int, inner: int, kernel: Kernel) -> None:
    """down(silu(gate(x)) * up(x))."""
    gate = tape.linear(x, n_tokens, width, inner, width * inner)
    act = gate if kernel == "fused" else tape.step([gate], gate.n_elements, saves=[gate])
    up = tape.linear(x, n_tokens, width, inner, width * inner)
    product = fused.gate(tape, act, up) if kernel == "fused" else tape.step([act, up], act.n_elements, saves=[act, up])
    tape.linear(product, n_tokens, inner, width, width * inner)
