"""Memory of published systems."""

from math import ceil

from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.workload import Block

from .system_costs import BF16, FP32, SystemCosts, inner_elements, last_products

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")  # of the outputs of the first two products
N_SLABS = 12  # pinned buffers of a layer's gradients
HEAD_GRADIENT_COPIES = 3  # alive during accumulation of a chunk: the sum, the chunk's gradient, and the embedding's
LOSS_ROW_TRAFFIC = 16  # times the width, bytes per token of the loss phase: normed rows, their gradients and copies
FUSED_WIDTHS = 4  # activations of the hidden width saved per fused layer: two inputs, two normed
FUSED_LOSS_TOKENS = 2048  # rows of logits in a fused loss at a time
LOGIT_COPIES_BYTES = 16  # per logit without chunks: bf16, its fp32 copy, log-probabilities, their gradient, and its bf16 copy
CROWDING_TOKENS, CROWDED_FRACTION = 8192, 0.5  # eight short sequences, and the tolerated share of their logits on the device
ZERO3_LIVE_ELEMENTS = 10**9  # default limit of ZeRO-3 for parameters on the device
ZERO3_HOST_BYTES = 2 + FP32 + Optimizer.ADAMW.moment_bytes + FP32 + FP32  # weights, master, moments, gradients, fp32 gradients


def power_of_two(n_bytes: int) -> int:
    """Return the size of PyTorch's pinned allocation for a request."""
    return 1 << max(0, n_bytes - 1).bit_length()


def layer_bytes(c: SystemCosts) -> int:
    return max(layer.n_params for layer in c.layers) * BF16


def table_bytes(c: SystemCosts) -> int:
    return c.workload.blocks[0].n_params * BF16


def n_tables(c: SystemCosts) -> int:
    return 1 if c.workload.tied else 2


def megatrain_device_bytes(c: SystemCosts, n_boundaries: int, n_layer_buffers: int, n_recomputed: int) -> int:
    """Return the larger of the loss phase, with all logits, and the backward of a layer."""
    weights = n_tables(c) * table_bytes(c) + n_layer_buffers * layer_bytes(c)
    held = weights + (n_boundaries + 1) * c.boundary_bytes
    loss = c.n_tokens * (c.vocab * BF16 + LOSS_ROW_TRAFFIC * c.width) + HEAD_GRADIENT_COPIES * table_bytes(c)
    backward = n_recomputed * c.boundary_bytes + max(layer.transient_bytes for layer in c.layers)
    return held + max(loss, backward)


def megatrain_host_bytes(c: SystemCosts, n_pinned_layers: int, updates: bool) -> int:
    """Return bf16 master and gradients, fp32 moments with an optimizer, and pinned buffers rounded up to powers of two."""
    per_param = 2 * BF16 + (Optimizer.ADAMW.moment_bytes if updates else 0)
    pinned = n_pinned_layers * power_of_two(layer_bytes(c)) + 2 * power_of_two(table_bytes(c))
    return per_param * c.workload.n_params + pinned + runtime_bytes(c)


def runtime_bytes(c: SystemCosts) -> int:
    return round(c.profile.host.runtime_bytes.value)


def slideformer_device_bytes(c: SystemCosts, n_upload_slots: int) -> int:
    """Return upload slots, a gradient, the head with its gradient, and one layer's activations with their gradients."""
    layer = max(c.layers, key=lambda b: b.n_params)
    held = (n_upload_slots + 1) * layer.n_params * BF16 + 2 * table_bytes(c)
    loss = FUSED_LOSS_TOKENS * c.vocab * (BF16 + FP32) + 3 * c.boundary_bytes
    return held + max(loss, fused_kept_bytes(c, layer) + _gradient_bytes(layer) + 2 * c.boundary_bytes)


def fused_kept_bytes(c: SystemCosts, layer: Block) -> int:
    """Return the saved tensors of a fused layer: inputs and outputs of products, normed queries and keys, rows of the width."""
    outputs = layer.matmuls[: -len(last_products(layer))]
    n_normed = sum(p.name.endswith(HEAD_NORMS) for p in layer.parameters)
    saved = sum(m.m * m.n * m.count for m in outputs) + inner_elements(layer) + sum(m.m * m.n for m in outputs[:n_normed])
    return (saved + FUSED_WIDTHS * c.n_tokens * c.width) * BF16


def _gradient_bytes(layer: Block) -> int:
    """Return the widest activation gradients: those of the MLP's two branches."""
    return 2 * inner_elements(layer) * BF16


def slideformer_host_bytes(c: SystemCosts) -> int:
    """Return fp32 master and moments, staged weights and gradients, and every layer's input in pinned memory."""
    state = (FP32 + Optimizer.ADAMW.moment_bytes) * c.workload.n_params
    staging = 3 * layer_bytes(c) + 2 * table_bytes(c)
    return state + staging + len(c.layers) * c.boundary_bytes + runtime_bytes(c)


def logits_crowd_the_device(c: SystemCosts) -> bool:
    """True if users of ZeRO-3 need a fused loss. They are assumed to use fused kernels, like the published runs on 24 GB."""
    return CROWDING_TOKENS * c.vocab * LOGIT_COPIES_BYTES > CROWDED_FRACTION * c.profile.device.memory_bytes.value


def zero3_keeps_activations(c: SystemCosts) -> bool:
    """True if all activations fit. Checkpointing is assumed to be off then, like in the published runs."""
    return _zero3_kept_bytes(c) <= c.profile.device.memory_bytes.value


def _zero3_kept_bytes(c: SystemCosts) -> int:
    logits = c.n_tokens * c.vocab * LOGIT_COPIES_BYTES
    held = sum(fused_kept_bytes(c, b) if c.fused else b.kept_bytes for b in c.layers)
    return (
        min(ZERO3_LIVE_ELEMENTS, c.workload.n_params) * BF16 + 2 * table_bytes(c) + held + len(c.layers) * c.boundary_bytes + logits
    )


def zero3_device_bytes(c: SystemCosts) -> int:
    if zero3_keeps_activations(c):
        return _zero3_kept_bytes(c)
    layer = max(c.layers, key=lambda b: b.n_params)
    saved = fused_kept_bytes(c, layer) + _gradient_bytes(layer) if c.fused else layer.transient_bytes
    logits = FUSED_LOSS_TOKENS * c.vocab * (BF16 + FP32) if c.fused else c.n_tokens * c.vocab * LOGIT_COPIES_BYTES
    held = min(ZERO3_LIVE_ELEMENTS, c.workload.n_params) * BF16 + 2 * table_bytes(c) + len(c.layers) * c.boundary_bytes
    return held + max(saved, logits)


def zero3_host_bytes(c: SystemCosts) -> int:
    """Return 22 bytes per parameter, with the fp32 gradients in one pinned buffer that is rounded up."""
    flat = c.workload.n_params * FP32
    return ZERO3_HOST_BYTES * c.workload.n_params - flat + power_of_two(flat) + runtime_bytes(c)


def n_kept_boundaries(n_layers: int, interval: int) -> int:
    return ceil(n_layers / interval)
