"""Compute time of blocks on the device, from the rates of a profile.

Matrix products and attention have rates by size. All other kernels are memory-bound: their bytes, by eager modules, fused kernels
and fused norms, are divided by the rate measured for that sort.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.hwprofiles.components import BACKWARD_ATTENTION, AttentionCall
from penstock.hwprofiles.quantity import Quantity
from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import AttentionKernel, Semantics
from penstock.runtime.plan.packed import FACTORED_BYTES_BY_CALLS, QUANTISED_BYTES, QUANTISED_BYTES_BY_CALLS
from penstock.runtime.plan.workload import ITEM_BYTES, Attention, Block, BlockKind, Dtype, Matmul, Tier
from penstock.runtime.units import MiB, show_bytes

FP32_BYTES = 4
BACKWARD_MATMULS = 2  # per forward product: one for the gradient of its input, one for that of its weight
SQUARE_KERNELS = 2  # kernels of `runtime/host/norms.py` in addition to one per tensor: zero fill, sum
# A CPU allocator returns larger tensors to the system at once (`runtime/host/slabs.py`), so that every allocation faults its pages
# in again. Bytes of a logit: bf16 and fp32, log-softmax, and the gradients of the three. No probe measures page faults: on a
# virtual machine of two AMD EPYC cores such a byte took 0.44 ns, the time of ten bytes of memory traffic (docs/log.md).
FAULTED_BYTES, BYTES_OF_LOGIT, FAULTED_AS_MOVED, FAULTS_OFF_BY = 8 * MiB, 20, 10, 2.5
# A probe times consecutive library calls. In a step, Python modules and autograd add overhead that no probe measures: for two
# models of width 64 and 256, calls that take 9 times the measured overhead explain the unpredicted compute time (docs/log.md).
CALLS, CALLS_OFF_BY, CALLS_MATTER_FRACTION = "Python's overhead per call, large for so small a model", 9.0, 0.1
# Without a probed rate; on an H200 it was a third of the memory's (docs/benchmarks/gpu_2026-11-27.md)
ACTIVATIONS, ACTIVATIONS_OFF_BY = "compiled activations, at the memory's rate", 3.0
# torch has a kernel for grouped products on compute capability 9 and 10 alone. Relative to single products by their law, unbalanced
# groups of 1,024 and 2,048 rows take 1.18 to 1.25 times there (H200, pytorch #163425; repeats taken as 1,000), layers of small
# experts at most 1.8 times (H100, ByteDance-Seed/VeOmni #460). On other GPUs a loop issues a product per expert (pytorch #161407),
# and issuing a kernel takes 3 to 10 us. In FP8, capability 9 alone has one (`runtime/scaled_products.py`), priced the same.
GROUPED_GPUS, GROUPED, GROUPED_TIMES, GROUPED_OFF_BY = ("H100", "H200", "B200", "B300"), "grouped products of experts", 1.25, 1.4
GROUPED_IN_FP8 = GROUPED_GPUS[:2]
EXPERT_CALLS, EXPERT_CALL_S, EXPERT_CALL_OFF_BY = "a kernel per expert, issued one after another", 8e-6, 2.0
NARROW = 256  # products with smaller k or n (LoRA) take at least the time of their memory traffic
ONLINE_TIMES_OF_A_CPU = 3  # memory traffic of `loss: online` on a CPU, which has no fused kernel, relative to the kernel's
BACKWARD_POINTWISE = 2  # backward traffic relative to forward: reads output and gradient, writes the input's gradient


def moved_bytes(m: Matmul, item_bytes: int) -> int:
    """Memory traffic of a matrix product. The result of LoRA's narrow product counts one write, because the frozen product that
    accumulates onto it is compute-bound."""
    return m.count * item_bytes * (m.m * m.k + m.k * m.n + m.m * m.n)


def backward_matmuls(m: Matmul) -> int:
    """Number of backward products per forward product: no weight gradient if the weight is frozen."""
    return BACKWARD_MATMULS - m.frozen


def attention_call(attention: Attention, dtype: Dtype) -> AttentionCall:
    """Convert a layer's attention to the key of a profile's attention rates."""
    n_kv_heads = attention.n_kv_heads or attention.n_heads
    return AttentionCall(dtype, attention.seq_len, attention.head_dim, n_kv_heads < attention.n_heads)


@dataclass(slots=True)
class ComputeTime:
    """Compute-time model. `outside` collects the extrapolations: work outside the measured points of the profile."""

    profile: Profile
    longer_outside: Mapping[str, float] = field(default_factory=dict)  # name of an extrapolation -> factor on its seconds
    outside: dict[str, tuple[float, float] | float | None] = field(default_factory=dict)  # (m, width) of a product, or a factor
    _matmul_s: dict[tuple[Dtype, Matmul], float] = field(default_factory=dict)
    _attention_s: dict[tuple[Dtype, Attention, AttentionKernel, bool], float] = field(default_factory=dict)

    def forward_s(self, block: Block, semantics: Semantics) -> float:
        """Seconds of a block's forward on one micro-batch."""
        return self._once_s(block, block, block.matmuls, block.attention, semantics)

    def recompute_s(self, block: Block, again: Tier, semantics: Semantics) -> float:
        """Seconds of recompute in one backward of a block."""
        return self._once_s(block, again, block.matmuls[: again.n_matmuls], block.attention if again.attention else None, semantics)

    def _once_s(
        self, block: Block, work: Block | Tier, matmuls: Sequence[Matmul], attention: Attention | None, semantics: Semantics
    ) -> float:
        return (
            sum(self._matmul(semantics.compute_dtype, m) for m in matmuls)
            + self._attention(semantics, attention, backward=False)
            + self._quantising_s(matmuls, semantics, backward=False)
            + self._pointwise_s(work, semantics)
            + self._calls_s(work.n_kernels, block, semantics)
        )

    def backward_s(self, block: Block, semantics: Semantics) -> float:
        """Seconds of a block's backward on one micro-batch, without recompute and gradient accumulation."""
        return (
            sum(self._backward_matmul(semantics.compute_dtype, m) for m in block.matmuls)
            + self._attention(semantics, block.attention, backward=True)
            + self._quantising_s(block.matmuls, semantics, backward=True)
            + self._pointwise_s(block, semantics, backward=True)
            + block.tile_sum_bytes / self._memory_bytes_per_s
            + self._calls_s(BACKWARD_MATMULS * block.n_kernels, block, semantics)
        )

    def _backward_matmul(self, dtype: Dtype, m: Matmul) -> float:
        """Seconds of the gradients of a product's input and, unless it is frozen, weight, which is never computed in FP8."""
        return self._matmul(dtype, m) + (0.0 if m.frozen else self._matmul(dtype, replace(m, scaled="no")))

    def _quantising_s(self, matmuls: Sequence[Matmul], semantics: Semantics, backward: bool) -> float:
        """Seconds of quantising operands of FP8 products; weights too, unless they are stored so. In backward (of stacks with a row
        per input, in forward) also of transposing the weights, on a GPU, and of adding the input gradients of products with one
        input."""
        item, is_cpu, n_bytes = ITEM_BYTES["bf16"], self.profile.device.kind == "cpu", 0
        per_element, factored = (QUANTISED_BYTES_BY_CALLS, FACTORED_BYTES_BY_CALLS) if is_cpu else (QUANTISED_BYTES, 0)
        for m in (m for m in matmuls if m.scaled != "no"):
            each_bytes = per_element * m.k * m.n * (semantics.base == "bf16")
            transposed, transposing_bytes = m.scaled == "transposed", 0 if is_cpu else 2 * m.k * m.n
            if backward:
                each_bytes += (per_element + factored * (not transposed)) * m.m * m.n + transposing_bytes * (not transposed)
                each_bytes += 3 * item * m.m * m.k * (m.scaled == "shared")
            elif m.scaled != "shared":
                each_bytes += (per_element + factored * transposed) * m.m * m.k + transposing_bytes * transposed
            n_bytes += m.count * each_bytes
        return n_bytes / self._memory_bytes_per_s

    def _calls_s(self, n_calls: int, block: Block, semantics: Semantics) -> float:
        """Seconds of kernel launches. A CPU's are reported as uncertain if they matter compared with the block's products."""
        calls_s = n_calls * self.profile.device.kernel_overhead_s.value
        if self.profile.device.kind != "cpu":
            return calls_s
        products_s = sum(self._matmul(semantics.compute_dtype, m) for m in block.matmuls)
        matters = 0 < CALLS_MATTER_FRACTION * products_s < CALLS_OFF_BY * calls_s
        return self._extrapolated(CALLS, CALLS_OFF_BY, calls_s) if matters else calls_s

    def product_s(self, dtype: Dtype, m: Matmul) -> float:
        """Seconds of matrix products."""
        return self._matmul(dtype, m)

    def square_s(self, block: Block, n_bytes: int) -> float:
        """Seconds of the squared gradient norm of a block on the device."""
        if self.profile.device.kind == "cpu":
            return n_bytes / self.square_bytes_per_s
        return self.moving_s(n_bytes, SQUARE_KERNELS + len(block.trained))

    def moving_s(self, n_bytes: int, n_kernels: int, rate: Quantity | None = None) -> float:
        """Seconds of memory-bound kernels, at their own rate or that of the device memory."""
        bytes_per_s = (rate or self.profile.device.memory_bytes_per_s).value
        return n_bytes / bytes_per_s + n_kernels * self.profile.device.kernel_overhead_s.value

    @property
    def square_bytes_per_s(self) -> float:
        """Rate of squared norms without launch overhead. A CPU device uses the kernels of the host."""
        is_cpu = self.profile.device.kind == "cpu"
        return self.profile.host.reduce_bytes_per_s.value if is_cpu else self._memory_bytes_per_s

    def loss_s(self, head: Block, semantics: Semantics) -> float:
        """Seconds of the head on one micro-batch, forward and backward, without gradient accumulation. A first pass for sums over
        sequences counts as another forward, which overestimates it by one norm."""
        first_s = self.forward_s(head, semantics) if semantics.objective.has_first_pass else 0.0
        return (
            first_s
            + sum((1 + backward_matmuls(m)) * self._matmul(semantics.compute_dtype, m) for m in head.matmuls)
            + self._pointwise_s(head, semantics)
            + self._pointwise_s(head, semantics, backward=True)
            + self._tile_sum_bytes(head, semantics) / self._memory_bytes_per_s
            + self._faults_s(head, semantics)
            + self._calls_s((1 + BACKWARD_MATMULS) * head.n_kernels, head, semantics)
        )

    def _faults_s(self, head: Block, semantics: Semantics) -> float:
        """Seconds of page faults for large logits on a CPU."""
        logits = max(head.matmuls, key=lambda m: m.n)
        tile_bytes = logits.m * logits.n * FP32_BYTES
        if self.profile.device.kind != "cpu" or tile_bytes < FAULTED_BYTES:
            return 0.0
        as_moved_bytes = logits.count * logits.m * logits.n * BYTES_OF_LOGIT * FAULTED_AS_MOVED
        name = f"page faults of {show_bytes(tile_bytes)} logits"
        return self._extrapolated(name, FAULTS_OFF_BY, as_moved_bytes / self._memory_bytes_per_s)

    def _extrapolated(self, name: str, factor: tuple[float, float] | float | None, seconds: float) -> float:
        """Register an extrapolation, off by a `factor` (or m and width of a product); return the seconds times `longer_outside`."""
        self.outside[name] = factor
        return seconds * self.longer_outside.get(name, 1.0)

    def _tile_sum_bytes(self, head: Block, semantics: Semantics) -> int:
        """Memory traffic of accumulating the head's weight gradient over tiles: each tile's gradient is read and added to an fp32
        sum. In `loss: online` the product itself accumulates into the sum and writes no bf16 gradient."""
        item = ITEM_BYTES[semantics.compute_dtype]
        bytes_each = 2 * FP32_BYTES + (-item if semantics.loss == "online" else item)
        return sum(m.count * m.k * m.n for m in head.matmuls if not m.frozen) * bytes_each

    def _pointwise_s(self, work: Block | Tier, semantics: Semantics, backward: bool = False) -> float:
        """Seconds of pointwise work in forward or backward: eager modules, fused kernels, fused norms."""
        device = self.profile.device
        eager, norms = device.eager_bytes_per_s or device.memory_bytes_per_s, device.norms.get("torch-fused")
        norm = device.memory_bytes_per_s if norms is None else norms.backward_bytes_per_s if backward else norms.forward_bytes_per_s
        is_head = isinstance(work, Block) and work.kind is BlockKind.HEAD
        is_compiled, is_online = semantics.pointwise == "fused" and not is_head, is_head and semantics.loss == "online"
        kernel_rate = device.fused_bytes_per_s if is_compiled else device.loss_bytes_per_s if is_online else None
        fused_s = (work.fused_bytes - work.norm_bytes) / (kernel_rate or device.memory_bytes_per_s).value
        fused_s *= ONLINE_TIMES_OF_A_CPU if is_online and device.kind == "cpu" else 1
        if fused_s and is_compiled and kernel_rate is None and device.kind != "cpu":
            fused_s = self._extrapolated(ACTIVATIONS, ACTIVATIONS_OFF_BY, fused_s)
        once_s = (work.pointwise_bytes - work.fused_bytes) / eager.value + fused_s + work.norm_bytes / norm.value
        return BACKWARD_POINTWISE * once_s if backward else once_s

    @property
    def _memory_bytes_per_s(self) -> float:
        return self.profile.device.memory_bytes_per_s.value

    def _matmul(self, dtype: Dtype, m: Matmul) -> float:
        if (seconds := self._matmul_s.get((dtype, m))) is None:
            rate, sustained = self.profile.matmul_rate(dtype, m.m, m.k, m.n), self.profile.device.sustained_fraction
            fraction = 1.0 if m.scaled == "no" else self.profile.fp8_rate_fraction
            seconds = m.flop / (rate.value * fraction * (1.0 if sustained is None else sustained.value))
            if not rate.inside_measured:
                name = f"{dtype} matmul ({m.m}, {m.k}) @ ({m.k}, {m.n})"
                seconds = self._extrapolated(name, (m.m, math.sqrt(m.k * m.n)), seconds)
            if min(m.k, m.n) < NARROW:
                narrow = self.profile.device.narrow_bytes_per_s or self.profile.device.memory_bytes_per_s
                seconds = max(seconds, moved_bytes(m, ITEM_BYTES[dtype]) / narrow.value)
            if m.grouped and self.profile.device.kind != "cpu":
                seconds = self._grouped_s(m, seconds)
            self._matmul_s[dtype, m] = seconds
        return seconds

    def _grouped_s(self, m: Matmul, seconds: float) -> float:
        """Seconds of the experts' products in one call. `seconds`: of the same products alone, one after another."""
        if any(name in self.profile.device.name for name in (GROUPED_GPUS if m.scaled == "no" else GROUPED_IN_FP8)):
            return self._extrapolated(GROUPED, GROUPED_OFF_BY, GROUPED_TIMES * seconds)
        issued_s = m.count * EXPERT_CALL_S
        if issued_s * EXPERT_CALL_OFF_BY <= seconds:
            return seconds
        return max(seconds, self._extrapolated(EXPERT_CALLS, EXPERT_CALL_OFF_BY, issued_s))

    def _attention(self, semantics: Semantics, attention: Attention | None, backward: bool) -> float:
        if attention is None:
            return 0.0
        kernel, dtype = semantics.attention_kernel, semantics.compute_dtype
        key = (dtype, attention, kernel, backward)
        if (seconds := self._attention_s.get(key)) is None:
            measured: Literal["flash", "cudnn"] = "cudnn" if kernel == "cudnn" else "flash"
            rate = self.profile.attention_rate(attention_call(attention, dtype), backward, measured)
            ordered = kernel == "deterministic" and backward
            fraction = self.profile.deterministic_fraction(measured, dtype) if ordered else 1.0
            seconds = attention.flop * (BACKWARD_ATTENTION if backward else 1.0) / (rate.value * fraction)
            if not rate.inside_measured:
                name = f"{dtype} attention over {attention.seq_len} tokens, head width {attention.head_dim}"
                seconds = self._extrapolated(name, None, seconds)
            self._attention_s[key] = seconds
        return seconds
