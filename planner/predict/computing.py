"""Seconds of the device's computing: products, attention, and what reads and writes its memory.

`Computing` asks a profile for the rates. Matrix products and attention have rates by their sizes, everything else the rate of the
memory that it moves bytes of, by eager modules, fused kernels and fused norms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.hwprofiles.quantity import Quantity
from penstock.hwprofiles.schema import BACKWARD_ATTENTION, AttentionCall, Profile
from penstock.runtime.plan import AttentionKernel, Semantics
from penstock.runtime.plan.workload import ITEM_BYTES, Attention, Block, BlockKind, Dtype, Matmul, Tier
from penstock.runtime.units import MiB, show_bytes

FP32_BYTES = 4
BACKWARD_MATMULS = 2  # per forward product: one for the gradient of its input, one for that of its weight
SQUARE_KERNELS = 2  # of `runtime/host/norms.py`, besides each tensor's: zeros, adding up
# A CPU's allocator gives what is larger back to the system at once (`runtime/host/slabs.py`): each tensor's pages are faulted in
# anew. Of a logit: bf16 and fp32, its log-softmax, and the gradients of the three. No probe measures it: on a virtual machine of
# two AMD EPYC cores a byte so took 0.44 ns, as long as ten that are moved (docs/log.md).
FAULTED_BYTES, BYTES_OF_LOGIT, FAULTED_AS_MOVED, FAULTS_OFF_BY = 8 * MiB, 20, 10, 2.5
# A probe times library calls one after the other. A step's come from Python's modules and autograd, which no probe measures: on the
# lane of computing of two models, 64 and 256 wide, all that was not predicted is calls that take 9 times as long (docs/log.md).
CALLS, CALLS_OFF_BY, CALLS_MATTER_FRACTION = "Python's time from call to call, much of a model so small", 9.0, 0.1
# Where no probe timed them: a third of the memory's rate on an H200 (docs/benchmarks/gpu_2026-11-27.md)
ACTIVATIONS, ACTIVATIONS_OFF_BY = "compiled activations, at the memory's rate", 3.0
NARROW = 256  # k or n of products, as adapters have, that take no less than what they read and write does
ONLINE_TIMES_OF_A_CPU = 3  # of the traffic of `loss: online` in one kernel: there its definition runs call by call
BACKWARD_POINTWISE = 2  # reads what the forward wrote and the gradient, writes the other gradient


def moved_bytes(m: Matmul, item_bytes: int) -> int:
    """Bytes that a product reads and writes. An adapter's narrow products write their result once: the large product that is
    accumulated onto it reads it while the memory is idle."""
    return m.count * item_bytes * (m.m * m.k + m.k * m.n + m.m * m.n)


def backward_matmuls(m: Matmul) -> int:
    """How many products a backward makes of one of the forward."""
    return BACKWARD_MATMULS - m.frozen


def attention_call(of: Attention, dtype: Dtype) -> AttentionCall:
    """A layer's attention as a profile is asked for it."""
    return AttentionCall(dtype, of.seq_len, of.head_dim, (of.n_kv_heads or of.n_heads) < of.n_heads)


@dataclass(slots=True)
class Computing:
    """A profile, asked for seconds of a block's work. `outside` collects what lies outside its measured points."""

    profile: Profile
    longer_outside: Mapping[str, float] = field(default_factory=dict)  # factors of the seconds of what lies outside, by its name
    outside: dict[str, tuple[float, float] | float | None] = field(default_factory=dict)  # of products, m and width; or a factor
    _matmul_s: dict[tuple[Dtype, Matmul], float] = field(default_factory=dict)
    _attention_s: dict[tuple[Dtype, Attention, AttentionKernel, bool], float] = field(default_factory=dict)

    def forward_s(self, block: Block, of: Semantics) -> float:
        """Seconds of one forward of a block on one micro-batch."""
        return self._once_s(block, block, block.matmuls, block.attention, of)

    def recompute_s(self, block: Block, again: Tier, of: Semantics) -> float:
        """Seconds of what one backward of a block computes again."""
        return self._once_s(block, again, block.matmuls[: again.n_matmuls], block.attention if again.attention else None, of)

    def _once_s(
        self, block: Block, work: Block | Tier, matmuls: Sequence[Matmul], attention: Attention | None, of: Semantics
    ) -> float:
        return (
            sum(self._matmul(of.compute_dtype, m) for m in matmuls)
            + self._attention(of, attention, backward=False)
            + self._pointwise_s(work, of)
            + self._calls_s(work.n_kernels, block, of)
        )

    def backward_s(self, block: Block, of: Semantics) -> float:
        """Seconds of one backward of a block on one micro-batch, without recompute and without summing gradients."""
        return (
            sum(backward_matmuls(m) * self._matmul(of.compute_dtype, m) for m in block.matmuls)
            + self._attention(of, block.attention, backward=True)
            + self._pointwise_s(block, of, backward=True)
            + block.tile_sum_bytes / self._memory_bytes_per_s
            + self._calls_s(BACKWARD_MATMULS * block.n_kernels, block, of)
        )

    def _calls_s(self, n_calls: int, block: Block, of: Semantics) -> float:
        """Seconds of calls of a library. Beside a block's products they may be too little to speak of."""
        calls_s = n_calls * self.profile.device.kernel_overhead_s.value
        if self.profile.device.kind != "cpu":
            return calls_s
        products_s = sum(self._matmul(of.compute_dtype, m) for m in block.matmuls)
        return (
            self._off(CALLS, CALLS_OFF_BY, calls_s) if 0 < CALLS_MATTER_FRACTION * products_s < CALLS_OFF_BY * calls_s else calls_s
        )

    def square_s(self, block: Block, n_bytes: int) -> float:
        """Seconds of summing the squares of a block's gradient on the device."""
        if self.profile.device.kind == "cpu":
            return n_bytes / self.square_bytes_per_s
        return self.moving_s(n_bytes, SQUARE_KERNELS + len(block.trained))

    def moving_s(self, n_bytes: int, n_kernels: int, rate: Quantity | None = None) -> float:
        """Seconds of kernels that do little but read and write that many bytes of the device's memory, at its rate or their own."""
        bytes_per_s = (rate or self.profile.device.memory_bytes_per_s).value
        return n_bytes / bytes_per_s + n_kernels * self.profile.device.kernel_overhead_s.value

    @property
    def square_bytes_per_s(self) -> float:
        """Bytes of gradients that the device squares, kernels' overhead apart. A CPU in its place does what the host does."""
        is_cpu = self.profile.device.kind == "cpu"
        return self.profile.host.reduce_bytes_per_s.value if is_cpu else self._memory_bytes_per_s

    def loss_s(self, head: Block, of: Semantics) -> float:
        """Seconds of the head on one micro-batch, forward and backward, without summing its gradient over micro-batches. A first
        pass for sums over sequences is another forward, in which a norm too many is counted."""
        first_s = self.forward_s(head, of) if of.objective.has_first_pass else 0.0
        return (
            first_s
            + sum((1 + backward_matmuls(m)) * self._matmul(of.compute_dtype, m) for m in head.matmuls)
            + self._pointwise_s(head, of)
            + self._pointwise_s(head, of, backward=True)
            + self._tile_sum_bytes(head, of) / self._memory_bytes_per_s
            + self._faults_s(head, of)
            + self._calls_s((1 + BACKWARD_MATMULS) * head.n_kernels, head, of)
        )

    def _faults_s(self, head: Block, of: Semantics) -> float:
        """Seconds in which a CPU's pages for large logits come from the system."""
        logits = max(head.matmuls, key=lambda m: m.n)
        tile_bytes = logits.m * logits.n * FP32_BYTES
        if self.profile.device.kind != "cpu" or tile_bytes < FAULTED_BYTES:
            return 0.0
        as_moved_bytes = logits.count * logits.m * logits.n * BYTES_OF_LOGIT * FAULTED_AS_MOVED
        name = f"new pages for logits of {show_bytes(tile_bytes)}"
        return self._off(name, FAULTS_OFF_BY, as_moved_bytes / self._memory_bytes_per_s)

    def _off(self, name: str, by: tuple[float, float] | float | None, seconds: float) -> float:
        """Seconds that rest on nothing measured; with the factor that they are to be longer by."""
        self.outside[name] = by
        return seconds * self.longer_outside.get(name, 1.0)

    def _tile_sum_bytes(self, head: Block, of: Semantics) -> int:
        """Each tile of tokens is one product with the head; its weight gradient is read and added to an fp32 sum. Online the
        product itself reads and writes the sum, in the place of a narrow gradient."""
        item = ITEM_BYTES[of.compute_dtype]
        bytes_each = 2 * FP32_BYTES + (-item if of.loss == "online" else item)
        return sum(m.count * m.k * m.n for m in head.matmuls if not m.frozen) * bytes_each

    def _pointwise_s(self, work: Block | Tier, of: Semantics, backward: bool = False) -> float:
        """Seconds of what is neither a product nor attention, forward or backward: eager modules, fused kernels, fused norms."""
        device = self.profile.device
        eager, norms = device.eager_bytes_per_s or device.memory_bytes_per_s, device.norms.get("torch-fused")
        norm = device.memory_bytes_per_s if norms is None else norms.backward_bytes_per_s if backward else norms.forward_bytes_per_s
        is_head = isinstance(work, Block) and work.kind is BlockKind.HEAD
        is_compiled = of.pointwise == "fused" and not is_head
        own = device.fused_bytes_per_s if is_compiled else device.loss_bytes_per_s if is_head and of.loss == "online" else None
        fused_s = (work.fused_bytes - work.norm_bytes) / (own or device.memory_bytes_per_s).value
        fused_s *= ONLINE_TIMES_OF_A_CPU if is_head and of.loss == "online" and device.kind == "cpu" else 1
        if fused_s and is_compiled and own is None and device.kind != "cpu":
            fused_s = self._off(ACTIVATIONS, ACTIVATIONS_OFF_BY, fused_s)
        once_s = (work.pointwise_bytes - work.fused_bytes) / eager.value + fused_s + work.norm_bytes / norm.value
        return BACKWARD_POINTWISE * once_s if backward else once_s

    @property
    def _memory_bytes_per_s(self) -> float:
        return self.profile.device.memory_bytes_per_s.value

    def _matmul(self, dtype: Dtype, m: Matmul) -> float:
        if (found := self._matmul_s.get((dtype, m))) is None:
            rate, sustained = self.profile.matmul_rate(dtype, m.m, m.k, m.n), self.profile.device.sustained_fraction
            found = m.flop / (rate.value * (1.0 if sustained is None else sustained.value))
            if not rate.inside_measured:
                found = self._off(f"{dtype} matmul ({m.m}, {m.k}) @ ({m.k}, {m.n})", (m.m, math.sqrt(m.k * m.n)), found)
            if min(m.k, m.n) < NARROW:
                narrow = self.profile.device.narrow_bytes_per_s or self.profile.device.memory_bytes_per_s
                found = max(found, moved_bytes(m, ITEM_BYTES[dtype]) / narrow.value)
            self._matmul_s[dtype, m] = found
        return found

    def _attention(self, of: Semantics, attention: Attention | None, backward: bool) -> float:
        if attention is None:
            return 0.0
        kernel, dtype = of.attention_kernel, of.compute_dtype
        key = (dtype, attention, kernel, backward)
        if (found := self._attention_s.get(key)) is None:
            measured: Literal["flash", "cudnn"] = "cudnn" if kernel == "cudnn" else "flash"
            rate = self.profile.attention_rate(attention_call(attention, dtype), backward, measured)
            ordered = kernel == "deterministic" and backward
            fraction = self.profile.deterministic_fraction(measured, dtype) if ordered else 1.0
            found = attention.flop * (BACKWARD_ATTENTION if backward else 1.0) / (rate.value * fraction)
            if not rate.inside_measured:
                name = f"{dtype} attention over {attention.seq_len} tokens, head width {attention.head_dim}"
                found = self._off(name, None, found)
            self._attention_s[key] = found
        return found
