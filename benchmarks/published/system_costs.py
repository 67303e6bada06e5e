"""Costs of a published system's ops.

A machine's profile has the speed of kernels, copies and the host alone. The effect of a system's software is assumed to be equal on
every machine, and is stored in `Software`: no number in it belongs to a run or to a model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from penstock.hwprofiles.components import BACKWARD_ATTENTION, Direction
from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.compute_time import BACKWARD_MATMULS, BACKWARD_POINTWISE, attention_call
from penstock.planner.predict.cost import region_of
from penstock.planner.predict.region import Demand, Region, Resource
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import ITEM_BYTES, Block, Matmul, Workload

BF16 = ITEM_BYTES["bf16"]
FP32 = ITEM_BYTES["fp32"]
LOSS_CHUNK_POSITIONS = 128  # positions per sequence with logits in memory at a time
LOGIT_TRAFFIC_BYTES = 10  # per bf16 logit, both directions: written, read and written by the softmax, its gradient read twice
WEIGHT_SUM_TRAFFIC = 4  # times the head's bytes per chunk: gradient written, read, added to the sum, written back
FLATTEN_TRAFFIC = 2  # bytes of host memory per byte: read and written
PAGEABLE_TRAFFIC = 3  # of a staged copy: read, written to the driver's pinned buffer, read by the copy engine
ADD_TRAFFIC = 3  # of accumulation: two reads and a write
SERIAL_ELEMENTS = 32768  # PyTorch's grain: smaller tensors run on one core, at negligible cost
# Fused share of the eager modules' memory traffic for a width H and an inner width I = 3 H: norms and rotation read and write once,
# residual sums take three passes, the activation three of I, against fp32 copies of everything.
FUSED_POINTWISE_FRACTION = 0.26
CACHE_BYTES = 24 * 10**6  # of the smallest device here: smaller rows of the hidden width remain cached between kernels
WIDE_TRAFFIC = 5  # times the MLP's inner activations, forward: read, written; both branches read, their product written
PROFILE_UPDATE_BYTES = 28  # per parameter, of the updates in shipped profiles: bf16 weight separate from its master


@dataclass(frozen=True, slots=True)
class Software:
    """Effect of the systems' code on a machine. Fitted constants are from `benchmarks/run_fit.py`, which names the runs."""

    tensor_s: float = 0.6e-3  # fitted: wake-up of all host cores for one tensor
    issue_s: float = 16.9e-6  # fitted: main thread's time to issue one library call from Python
    clip_bytes_per_s: float = 14.8e9  # fitted: gradient bytes through PyTorch's norm and scaling on the CPU
    release_per_fault: float = 2.32  # fitted: rate of zeroing and freeing pages over the page-fault rate
    add_bytes_per_s: float = 23e9  # published: gradient bytes that one thread accumulates in place


# Deviation on other machines, like the spreads of a profile: half the width that covers 80 %.
SOFTWARE_SPREAD_FRACTION = {
    "tensor_s": 0.15,
    "issue_s": 0.3,
    "clip_bytes_per_s": 0.35,
    "release_per_fault": 0.2,
    "add_bytes_per_s": 0.5,
}


@dataclass(slots=True)
class SystemCosts:
    """Costs of ops for a machine, a system's software and a workload. The whole batch is one micro-batch."""

    profile: Profile
    software: Software
    workload: Workload
    semantics: Semantics
    fused: bool = False
    _layer_demands: dict[tuple[int, bool, bool], Demand] = field(default_factory=dict, init=False)

    @property
    def region(self) -> Region:
        return region_of(self.profile)

    @property
    def one_pool(self) -> bool:
        """True if host and device share one memory: kernels and copies of either direction then alternate."""
        return self.profile.device.kind == "cuda" and self.profile.link.dram_bytes_per_byte >= 2

    # the device

    def forward(self, block: Block, but_last_product: bool = False) -> Demand:
        """Return the cost of one forward of a layer."""
        # Layers of one structure share the tuple of their products, so each structure is costed once.
        return self._once((id(block.matmuls), but_last_product, False), lambda: self._forward(block, but_last_product))

    def backward(self, block: Block) -> Demand:
        """Return the cost of one backward of a layer, without recompute."""
        return self._once((id(block.matmuls), False, True), lambda: self._backward(block))

    def _once(self, key: tuple[int, bool, bool], cost: Callable[[], Demand]) -> Demand:
        if key not in self._layer_demands:
            self._layer_demands[key] = cost()
        return self._layer_demands[key]

    def _forward(self, block: Block, but_last_product: bool) -> Demand:
        matmuls = block.matmuls[: -len(last_products(block))] if but_last_product else block.matmuls
        seconds = sum(self._matmul_s(m.m, m.k, m.n) * m.count for m in matmuls) + self._pointwise_s(block)
        return self._compute(seconds, block.n_kernels, self._attention_s(block, backward=False))

    def _backward(self, block: Block) -> Demand:
        seconds = BACKWARD_MATMULS * sum(self._matmul_s(m.m, m.k, m.n) * m.count for m in block.matmuls)
        seconds += BACKWARD_POINTWISE * self._pointwise_s(block)
        return self._compute(seconds, BACKWARD_MATMULS * block.n_kernels, self._attention_s(block, backward=True))

    def loss(self) -> Demand:
        """Return forward and backward of the head in chunks of positions, each accumulating the head's weight gradient."""
        rows = self.semantics.batch_size * min(self.semantics.seq_len, LOSS_CHUNK_POSITIONS)
        n_chunks = ceil(self.n_tokens / rows)
        products_s = n_chunks * (1 + BACKWARD_MATMULS) * self._matmul_s(rows, self.width, self.vocab)
        n_bytes = self.n_tokens * self.vocab * LOGIT_TRAFFIC_BYTES
        if not self.fused:
            n_bytes += n_chunks * WEIGHT_SUM_TRAFFIC * self.vocab * self.width * BF16
        return self._compute(products_s + n_bytes / self._pointwise_bytes_per_s, n_chunks)

    def embedding_backward(self) -> Demand:
        """Return the cost of the table's dense gradient: zeroed, then rows added."""
        table, rows = self.vocab * self.width * BF16, self.n_tokens * self.width * BF16
        return self._compute((table + ADD_TRAFFIC * rows) / self._memory_rate, 1)

    def unpack(self, n_bytes: int, n_tensors: int) -> Demand:
        """Return a copy from the flat buffer into a template's tensors, on the device."""
        return Demand(n_tensors * self.profile.device.kernel_overhead_s.value, 2 * n_bytes / self._memory_rate)

    # the link

    def copy(self, direction: Direction, n_bytes: int, n_tensors: int = 1) -> Demand:
        """Return a copy between pinned host memory and the device, tensor by tensor."""
        link = self.profile.link
        curve = link.h2d if direction == "h2d" else link.d2h
        rate = self.profile.copy_bytes_per_s(direction, n_bytes / n_tensors)
        resource = Resource.H2D if direction == "h2d" else Resource.D2H
        uses = ((resource, rate), (Resource.DUPLEX, rate), (Resource.DRAM, self._dram(rate * link.dram_bytes_per_byte)))
        return Demand(n_tensors * curve.latency_s.value, n_bytes / rate, uses)

    def pageable(self, direction: Direction, n_bytes: int) -> Demand:
        """Return a copy of pageable host memory, staged by the driver in pinned memory."""
        curve = self.profile.link.h2d if direction == "h2d" else self.profile.link.d2h
        rate = curve.pageable_bytes_per_s.value
        resource = Resource.H2D if direction == "h2d" else Resource.D2H
        uses = ((resource, rate), (Resource.DUPLEX, rate), (Resource.DRAM, self._dram(PAGEABLE_TRAFFIC * rate)))
        return Demand(0.0, n_bytes / rate, uses)

    def pageable_s(self, direction: Direction, n_bytes: int) -> float:
        """Return seconds of a blocking copy of pageable host memory without contention."""
        return self.pageable(direction, n_bytes).uncontended_s

    # the host

    def issue(self, n_calls: int) -> Demand:
        """Return the cost of issuing library calls on the main thread."""
        return Demand(n_calls * self.software.issue_s, 0.0)

    def flatten(self, layer: Block) -> Demand:
        """Return the main thread's copy of a layer's tensors into a pinned buffer."""
        n_bytes = layer.n_params * BF16
        traffic = self.profile.host.dram_bytes_per_s.value
        alone_s = FLATTEN_TRAFFIC * n_bytes / traffic
        return Demand(n_large_tensors(layer) * self.software.tensor_s, alone_s, ((Resource.DRAM, traffic),))

    def add(self, n_bytes: int, first_touch: bool) -> Demand:
        """Return the accumulation of a gradient by a thread, in place or into new pages."""
        rate = self.profile.host.page_fault_bytes_per_s.value if first_touch else self.software.add_bytes_per_s
        return Demand(0.0, n_bytes / rate, ((Resource.DRAM, self._dram(ADD_TRAFFIC * rate)),))

    def convert_and_copy(self, n_elements: int) -> Demand:
        """Return a pipelined conversion and upload: fp32 read, rounded to bf16 in a pinned buffer, and uploaded in chunks."""
        copy = self.copy("h2d", n_elements * BF16)
        convert_bytes = n_elements * (FP32 + BF16)
        alone_s = max(copy.alone_s, convert_bytes / self.profile.host.dram_bytes_per_s.value)
        rate = n_elements * BF16 / alone_s
        traffic = self._dram((convert_bytes + n_elements * BF16) / alone_s)
        uses = ((Resource.H2D, rate), (Resource.DUPLEX, rate), (Resource.DRAM, traffic))
        return Demand(copy.overhead_s, alone_s, uses)

    def update(self, n_params: int, bytes_per_param: int) -> Demand:
        """Return the cost of CPU Adam, at the bytes per second of the profile's optimizer."""
        host = self.profile.host
        rate = self.profile.optimizer_params_per_s(host.n_cores) * PROFILE_UPDATE_BYTES / bytes_per_param
        return Demand(0.0, n_params / rate, ((Resource.DRAM, self._dram(rate * bytes_per_param)),))

    def norm_s(self, n_bytes: int) -> float:
        """Return seconds of reading gradients for their norm with all cores."""
        return n_bytes / self.profile.host.reduce_bytes_per_s.value

    def release_s(self, n_bytes: int) -> float:
        """Return seconds of zeroing gradients and releasing their pages."""
        return n_bytes / (self.software.release_per_fault * self.profile.host.page_fault_bytes_per_s.value)

    def zero_s(self) -> float:
        """Return seconds of zeroing gradients in place."""
        n_tensors = sum(n_large_tensors(b) for b in self.workload.blocks)
        return n_tensors * self.software.tensor_s + self.workload.n_params * BF16 / self.profile.host.dram_bytes_per_s.value

    # sizes

    @property
    def n_tokens(self) -> int:
        return self.semantics.tokens_per_micro_batch

    @property
    def width(self) -> int:
        return self.workload.blocks[0].parameters[0].shape[1]

    @property
    def vocab(self) -> int:
        return self.workload.blocks[0].parameters[0].shape[0]

    @property
    def layers(self) -> tuple[Block, ...]:
        return self.workload.blocks[1:-1]

    @property
    def boundary_bytes(self) -> int:
        return self.n_tokens * self.width * BF16

    @property
    def _memory_rate(self) -> float:
        return self.profile.device.memory_bytes_per_s.value

    @property
    def _pointwise_bytes_per_s(self) -> float:
        """Bandwidth of fused kernels, or of eager modules."""
        eager = self.profile.device.eager_bytes_per_s
        return self._memory_rate if self.fused or eager is None else eager.value

    def _compute(self, seconds: float, n_kernels: int, attention_s: float = 0.0) -> Demand:
        """Add launch times. Attention is one kernel, at the same speed in a layer and alone."""
        launches_s = n_kernels * self.profile.device.kernel_overhead_s.value
        return Demand(launches_s, seconds + attention_s)

    def _matmul_s(self, m: int, k: int, n: int) -> float:
        sustained = self.profile.device.sustained_fraction
        rate = self.profile.matmul_rate("bf16", m, k, n).value * (1.0 if sustained is None else sustained.value)
        return Matmul(m, k, n).flop / rate

    def _attention_s(self, block: Block, backward: bool) -> float:
        a = block.attention
        if a is None:
            return 0.0
        rate = self.profile.attention_rate(attention_call(a, "bf16"), backward).value
        return (BACKWARD_ATTENTION if backward else 1.0) * a.flop / rate

    def _pointwise_s(self, block: Block) -> float:
        share = FUSED_POINTWISE_FRACTION if self.fused else 1.0
        n_bytes = block.pointwise_bytes
        if self.boundary_bytes <= CACHE_BYTES and block.matmuls:
            n_bytes = min(n_bytes, WIDE_TRAFFIC * inner_elements(block) * BF16)
        return share * n_bytes / self._pointwise_bytes_per_s

    def _dram(self, bytes_per_s: float) -> float:
        return min(bytes_per_s, self.profile.host.dram_bytes_per_s.value)


def last_products(block: Block) -> tuple[Matmul, ...]:
    """Return the MLP's output products: several for experts with unequal numbers of rows."""
    last = block.matmuls[-1]
    n = 1
    while n < len(block.matmuls) and (block.matmuls[-n - 1].k, block.matmuls[-n - 1].n) == (last.k, last.n):
        n += 1
    return block.matmuls[-n:]


def inner_elements(block: Block) -> int:
    """Return the input elements of these products: the MLP's inner activations."""
    return sum(m.m * m.k * m.count for m in last_products(block))


def n_large_tensors(block: Block) -> int:
    """Return the number of tensors that PyTorch processes on all cores."""
    return sum(p.n_elements > SERIAL_ELEMENTS for p in block.parameters if p.tied_to is None)
