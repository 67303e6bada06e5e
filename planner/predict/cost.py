"""Cost model: overhead, uncontended seconds and resource usage of each op, from its sizes and a profile.

Compute time is in `compute_time.py`. Host memory traffic counts reads and writes. On a machine of kind `cpu` device memory is host
memory, so compute ops use its bandwidth, too.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import assert_never

import numpy as np

from penstock.hwprofiles.components import Collective, Direction
from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.arenas import SQUARE_BYTES
from penstock.planner.lower.op_table import OpTable
from penstock.planner.lower.waits import NONE
from penstock.runtime.errors import ProfileError
from penstock.runtime.plan import LANE_OF, Kind, Lane, Op, Plan, Semantics, Setup
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.packed import UNPACK_BYTES_PER_ELEMENT, UNPACK_CHUNK_ELEMENTS, UNPACK_KERNELS, at_once_bytes
from penstock.runtime.plan.workload import ITEM_BYTES, Block, BlockKind, Workload

from .compute_time import BACKWARD_POINTWISE, FP32_BYTES, ComputeTime
from .region import Demand, Region, Resource, Uses

# Update time on one core relative to torch's AdamW on split masters (docs/optimizers.md), by optimizer or by its rule
UPDATE_RATIO = {"adamw": 0.65, "lion": 0.55, "adamw:moments=int8": 1.5, "lion:moments=int8": 0.9}
JOINED_BYTES = 3 * FP32_BYTES  # per element when one fp32 sum is added to another: two reads, one write


def costs(plan: Plan, profile: Profile) -> list[Demand]:
    return CostModel(profile).demands(plan)


def region_of(profile: Profile) -> Region:
    """Return the capacities of shared resources; for a link direction, the rate of the best copy size."""
    link, host = profile.link, profile.host
    h2d, d2h = (max(point.rate.value for point in curve.bytes_per_s) for curve in (link.h2d, link.d2h))
    shared = ((Resource.H2D, h2d), (Resource.D2H, d2h), (Resource.DUPLEX, link.duplex_bytes_per_s.value))
    return Region((*shared, (Resource.DRAM, host.dram_bytes_per_s.value), (Resource.CORES, float(host.n_cores))))


def update_bytes_per_param(plan: Setup, block: int) -> float:
    """Host memory traffic of the optimizer update, per parameter."""
    return plan.semantics.optimizer.update_bytes(plan.semantics.master_dtype, plan.host_gradient_dtype(block))


def update_params_per_s(profile: Profile, semantics: Semantics) -> float:
    """Parameters that all host cores update per second. Only AdamW is measured. Other optimizers scale it by their single-core
    (compute-bound) ratio, and are limited by the memory traffic per second that AdamW reaches on all cores."""
    n, measured = profile.host.n_cores, profile.optimizer_params_per_s
    if not semantics.is_lean:
        return measured(n)
    usual = Optimizer.ADAMW.update_bytes("fp32", semantics.gradient_dtype)
    actual = semantics.optimizer.update_bytes(semantics.master_dtype, semantics.gradient_dtype)
    ratio = UPDATE_RATIO.get(semantics.optimizer, UPDATE_RATIO[semantics.optimizer.rule])
    return min(n * measured(1) / ratio, measured(n) * usual / actual)


def loaded_bytes(plan: Setup, block: int) -> int:
    """Bytes that a load of the block copies over the link; parameters trained on the device are not copied."""
    return sum(n_bytes for *_, n_bytes in plan.loaded(block))


def micro_batch_groups(semantics: Semantics, micro_batches: range) -> list[tuple[int, int]]:
    """Group micro-batches with equal costs: (representative, count). First and last move gradients otherwise than the rest."""
    if semantics.sum_groups > 1:
        return _groups_with_sums(semantics, micro_batches)
    last = semantics.n_micro_batches - 1
    n_first, n_last = int(0 in micro_batches), int(last in micro_batches and last > 0)
    counts = ((0, n_first), (1, len(micro_batches) - n_first - n_last), (last, n_last))
    return [(m, count) for m, count in counts if count]


@lru_cache(maxsize=256)
def _groups_with_sums(semantics: Semantics, micro_batches: range) -> list[tuple[int, int]]:
    """Group micro-batches also by the sums that they begin and join."""
    last, sorts = semantics.n_micro_batches - 1, dict[tuple[object, ...], list[int]]()
    for m in micro_batches:
        sorts.setdefault((m in (0, last), semantics.is_smaller(m), semantics.begins_sum(m), semantics.n_joined(m)), []).append(m)
    return [(group[0], len(group)) for group in sorts.values()]


_MicroBatchKey = tuple[bool, int, bool]


def _micro_batch_key(plan: Setup, m: int | None) -> _MicroBatchKey:
    """Key for equal costs: (begins a sum, sums joined, is the last micro-batch)."""
    semantics = plan.semantics
    return (False, 0, False) if m is None else (semantics.begins_sum(m), semantics.n_joined(m), m == semantics.n_micro_batches - 1)


@dataclass(slots=True)
class CostModel(ComputeTime):
    """Cost of ops on the machine of a profile.

    `clipped`: the gradient norm exceeds the limit, so that speculative updates are recomputed.
    """

    clipped: bool = False
    capacity: dict[Resource, float] = field(init=False)
    _ratios: dict[tuple[Kind, int], float] = field(init=False)
    _known: dict[tuple[object, ...], Demand] = field(default_factory=dict)
    _known_for: tuple[Workload, Semantics] | None = None

    def __post_init__(self) -> None:
        self.capacity = dict(region_of(self.profile).capacity)
        try:
            self._ratios = {(Kind(entry.kind), entry.block): entry.ratio for entry in self.profile.op_ratios}
        except ValueError as error:
            raise ProfileError(f"{self.profile.name}: op_ratios: no kind of op ({error}); plan again without --measured") from None

    def least_ratio(self, *lanes: Lane) -> float:
        """Return the smallest measured ratio of ops on these lanes, at most 1: the work of each is at least this share."""
        return min([1.0, *(ratio for (kind, _), ratio in self._ratios.items() if LANE_OF[kind] in lanes)])

    def demands(self, plan: Plan) -> list[Demand]:
        return self.demands_of(plan, OpTable.from_plan(plan))

    def demands_of(self, plan: Setup, ops: OpTable) -> list[Demand]:
        """Return the demands of an op table; equal ops share one `Demand` object."""
        blocks, micro_batches = plan.workload.blocks, dict[_MicroBatchKey, int]()  # key -> its number
        block = np.empty(len(blocks), np.int64)
        for b, equal_blocks in plan.blocks_alike.items():
            block[equal_blocks] = b
        numbers, op_index = np.unique(ops.micro_batches, return_inverse=True)
        distinct = [None if m == NONE else m for m in numbers.tolist()]
        micro_batch = [micro_batches.setdefault(_micro_batch_key(plan, m), len(micro_batches)) for m in distinct]
        sorts = (ops.kinds * len(blocks) + block[ops.blocks]) * len(numbers) + np.array(micro_batch)[op_index]
        _, first, op_index = np.unique(sorts, return_index=True, return_inverse=True)
        known = [self.demand(plan, ops.op(i)) for i in first.tolist()]
        return [known[i] for i in op_index.tolist()]

    def demand(self, plan: Setup, op: Op) -> Demand:
        """Return the demand of one op, cached: for one workload and semantics, the key determines it."""
        known_for = self._known_for
        if known_for is None or known_for[0] is not plan.workload or known_for[1] is not plan.semantics:
            self._known_for = (plan.workload, plan.semantics)
            self._known = {}
        plan_key = plan.reduced, plan.policy.square_on_device
        key = op.kind, plan.treatments[op.block], _micro_batch_key(plan, op.micro_batch), plan_key
        demand = self._known.get(key)
        if demand is None:
            demand = self._demand_of(plan, op)
            # The draws stay: under the contention of the measured run, the op then takes `ratio` times the predicted time
            if (ratio := self._ratios.get((op.kind, plan.workload.first_alike[op.block]))) is not None:
                demand = replace(demand, alone_s=demand.alone_s * ratio)
            self._known[key] = demand
        return demand

    def _demand_of(self, plan: Setup, op: Op) -> Demand:
        block = plan.blocks_of(op.micro_batch)[op.block]
        item, semantics = ITEM_BYTES[plan.semantics.compute_dtype], plan.semantics
        match op.kind:
            case Kind.READ | Kind.LOAD | Kind.DEQUANTISE if plan.stays_loaded(op.block):
                return self._demand(0.0, 0.0, {})
            case Kind.READ:
                rate = self.profile.read_bytes_per_s
                return self._demand(0.0, plan.read_bytes(op.block) / rate, {Resource.DRAM: rate})
            case Kind.LOAD:
                return self._load(plan, op.block)
            case Kind.DEQUANTISE:
                n_bytes, n_kernels = self._unpacked(plan, op.block)
                return self._compute(self.moving_s(n_bytes, n_kernels, self.profile.device.unpack_bytes_per_s), n_bytes)
            case Kind.GATHER:
                return self._all_gather(semantics.ranks, plan.gradient_elements(op.block) * item)
            case Kind.EXCHANGE:
                return self._exchange(plan, op.block)
            case Kind.CLIP:
                return self._clip(plan)
            case Kind.OFFLOAD_SQUARES:
                return self._copy("d2h", SQUARE_BYTES * len(block.trained))
            case Kind.UPDATE_ON_DEVICE:
                n_more = block.n_trained * (ITEM_BYTES[plan.gradient_dtype(op.block)] - ITEM_BYTES[semantics.gradient_dtype])
                seconds = self.update_on_device_s(plan, block) + n_more / self._memory_bytes_per_s
                return self._compute(seconds, self._updated_bytes(plan, block) + n_more)
            case Kind.OFFLOAD_GRADIENT:
                n_bytes = plan.sent_elements(op.block) * ITEM_BYTES[plan.gradient_dtype(op.block)]
                return self._copy("d2h", n_bytes, n_copies=2 if plan.squares(op.block) else 1)
            case Kind.OFFLOAD_ACTIVATION | Kind.FETCH_ACTIVATION:
                return self._copy("d2h" if op.lane is Lane.D2H else "h2d", block.boundary_bytes)
            case Kind.OFFLOAD_SAVED | Kind.FETCH_SAVED:
                return self._copy("d2h" if op.lane is Lane.D2H else "h2d", plan.recompute(op.block, op.micro_batch).slot_bytes)
            case Kind.FORWARD | Kind.RECOMPUTE:
                return self._forward(plan, op, block)
            case Kind.LOSS | Kind.BACKWARD:
                return self._backward(plan, op, block)
            case Kind.ACCUMULATE:
                # Read the staged gradient and the sum, write the sum
                staged, joined = ITEM_BYTES[plan.gradient_dtype(op.block)], semantics.n_joined(op.micro_batch or 0)
                return self._reduce(block.trained_elements * (staged + 2 * FP32_BYTES + joined * JOINED_BYTES))
            case Kind.SQUARE:
                n_bytes = block.trained_elements * ITEM_BYTES[plan.gradient_dtype(op.block)]
                return self._compute(self.square_s(block, n_bytes), n_bytes)
            case Kind.NORM:
                # A tied weight has two gradients, from embedding and head
                n_gradients = 2 if op.block == 0 and plan.workload.tied and not plan.joins_tied else 1
                n_elements = plan.part_elements(op.block)
                return self._reduce(n_gradients * n_elements * ITEM_BYTES[plan.host_gradient_dtype(op.block)])
            case Kind.SETTLE if not self.clipped:
                return self._demand(0.0, 0.0, {})  # swaps shadow and state
            case Kind.UPDATE | Kind.SPECULATE | Kind.SETTLE:
                rate = update_params_per_s(self.profile, semantics)
                uses = {Resource.DRAM: self._update_draw(rate * update_bytes_per_param(plan, op.block))}
                return self._demand(0.0, -(-block.n_trained // semantics.ranks) / rate, uses | self._all_cores)
            case _:
                assert_never(op.kind)

    def _load(self, plan: Setup, block: int) -> Demand:
        """Demand of a load: copies over the link, or within the device from state there."""
        stays = plan.policy.device_blocks
        on_device = {name: b in stays and not plan.is_apart(b) for name, b in (("state", block), ("tied", 0))}
        runs = plan.loaded(block)
        within_s = sum(2 * n_bytes for name, _, _, n_bytes in runs if on_device.get(name)) / self._memory_bytes_per_s
        if all(on_device.get(name) for name, *_ in runs):
            return self._compute(within_s, 0)
        copies = self._copy("h2d", sum(n_bytes for name, _, _, n_bytes in runs if not on_device.get(name)))
        return replace(copies, overhead_s=copies.overhead_s + within_s) if within_s else copies

    def _update_draw(self, counted_bytes_per_s: float) -> float:
        """Host DRAM rate of an update at full speed, calibrated to the slowdown that was measured under concurrent uploads.

        Ops that share a resource slow by one factor, capacity / (update's draw + upload's draw). The draw that yields the measured
        fraction is clamped: at least the counted bytes, because lower bounds use them, and at most the capacity, so that an update
        alone has its measured rate. For an optimizer with less traffic than AdamW the draw scales with its bytes.
        """
        profile, n_cores = self.profile, self.profile.host.n_cores
        fraction, capacity = profile.update_fraction_under_uploads(n_cores), self.capacity[Resource.DRAM]
        if fraction is None:
            return counted_bytes_per_s
        uploads = profile.copy_bytes_per_s("h2d", math.inf) * profile.link.dram_bytes_per_byte
        measured = profile.optimizer_params_per_s(n_cores) * Optimizer.ADAMW.update_bytes("fp32", "bf16")
        ratio = (capacity / fraction - uploads) / measured
        return max(counted_bytes_per_s, min(capacity, counted_bytes_per_s * ratio))

    def _clip(self, plan: Setup) -> Demand:
        """Demand of the global norm: the host reads all partial norms; several ranks exchange theirs."""
        ranks = plan.semantics.ranks
        if ranks == 1:
            return self._reduce(sum(map(plan.norm_numbers, range(len(plan.workload.blocks)))) * SQUARE_BYTES)
        rate = min(self.profile.host.reduce_bytes_per_s.value, self._network_rate(self._local_ranks(ranks)))
        return self._demand(self._meeting_s + self._hops_s, plan.shared_numbers() * ranks * SQUARE_BYTES / rate, {})

    def _forward(self, plan: Setup, op: Op, block: Block) -> Demand:
        """Demand of a forward op, including copies of offloaded tensors that a call cannot write in place."""
        leaving = op.block in plan.policy.offload_blocks
        copied_bytes = 2 * plan.recompute(op.block, op.micro_batch).copied_bytes if leaving else 0
        seconds = self.forward_s(block, plan.semantics) + copied_bytes / self._memory_bytes_per_s
        return self._compute(seconds, block.pointwise_bytes + copied_bytes)

    def _backward(self, plan: Setup, op: Op, block: Block) -> Demand:
        """Demand of a backward or loss op, including recompute and gradient accumulation."""
        semantics, summed_bytes = plan.semantics, self._gradient_bytes(plan, op)
        summed_s = summed_bytes / self._memory_bytes_per_s
        if op.kind is Kind.LOSS:  # forward and backward of norm and softmax, weight gradient, sums
            n_times = BACKWARD_POINTWISE + (2 if semantics.objective.has_first_pass else 1)
            n_bytes = n_times * block.pointwise_bytes + self._tile_sum_bytes(block, semantics) + summed_bytes
            return self._compute(self.loss_s(block, semantics) + summed_s, n_bytes)
        seconds, n_bytes = self.backward_s(block, semantics) + summed_s, BACKWARD_POINTWISE * block.pointwise_bytes + summed_bytes
        if op.block != 0:
            again = block.recompute(plan.policy.saved(op.block))
            assert again is not None, "lower rejects unsupported tiers"
            seconds, n_bytes = seconds + self.recompute_s(block, again, semantics), n_bytes + again.pointwise_bytes
        return self._compute(seconds, n_bytes)

    def _gradient_bytes(self, plan: Setup, op: Op) -> int:
        """Device memory traffic of accumulating one micro-batch's gradient into its slot."""
        m, semantics, block = op.micro_batch or 0, plan.semantics, plan.workload.blocks[op.block]
        elements = plan.gradient_elements(op.block)
        item, out = ITEM_BYTES[semantics.compute_dtype], ITEM_BYTES[plan.gradient_dtype(op.block)]
        first, last = semantics.begins_sum(m), m == semantics.n_micro_batches - 1
        dense = item if block.kind is BlockKind.EMBEDDING else 0  # zero fill of a dense gradient
        is_own, in_place = op.block in plan.policy.sum_blocks, plan.sums_in_place(op.block)
        is_single = semantics.n_micro_batches == 1 and semantics.ranks == 1 and not (is_own or in_place)
        if not plan.sums_on_device(op.block) or is_single:
            return elements * (dense + item + out)
        read_sum, write_out = (0 if first else FP32_BYTES), (out if last and semantics.ranks == 1 else 0)
        if in_place:  # rounded in place
            write_out = 2 * FP32_BYTES * (last and semantics.gradient_dtype != "fp32")
        if last and plan.joins_tied and op.block == 0:
            write_out += JOINED_BYTES
        write_sum = ITEM_BYTES[plan.sum_dtype(op.block)]
        return elements * (dense + item + read_sum + write_sum + semantics.n_joined(m) * JOINED_BYTES + write_out)

    def _unpacked(self, plan: Setup, block: int) -> tuple[int, int]:
        """Return memory traffic and kernel count of dequantising a block's weights."""
        base, item, n_bytes, n_kernels = plan.semantics.base, ITEM_BYTES[plan.semantics.compute_dtype], 0, 0
        for p in plan.workload.blocks[block].parameters:
            if plan.is_packed(p) and self.profile.device.kind != "cpu":
                n_bytes, n_kernels = n_bytes + at_once_bytes(p.shape, base, item), n_kernels + 1
            elif plan.is_packed(p):
                n_bytes += round(p.n_elements * UNPACK_BYTES_PER_ELEMENT[base])
                n_kernels += UNPACK_KERNELS[base] * -(-p.n_elements // UNPACK_CHUNK_ELEMENTS)
            elif p.frozen or not plan.is_apart(block):
                n_bytes += 2 * p.n_elements * item
                n_kernels += 1
        return n_bytes, n_kernels

    def _compute(self, seconds: float, n_bytes: int) -> Demand:
        uses = {Resource.DRAM: n_bytes / seconds} if self.profile.device.kind == "cpu" and seconds > 0 else {}
        return self._demand(0.0, seconds, uses)

    def _copy(self, direction: Direction, n_bytes: int, n_copies: int = 1) -> Demand:
        """Demand of `n_copies` copies: one large, the others so small that only their latency counts."""
        link = self.profile.link
        curve = link.h2d if direction == "h2d" else link.d2h
        rate = self.profile.copy_bytes_per_s(direction, n_bytes)
        uses = {Resource.H2D if direction == "h2d" else Resource.D2H: rate} | self._copying(rate)
        return self._demand(n_copies * curve.latency_s.value, n_bytes / rate, uses)

    def _copying(self, rate: float) -> dict[Resource, float]:
        """Resources of a copy in either direction."""
        link = self.profile.link
        cores = {Resource.CORES: link.host_cores_per_copy.value}
        return {Resource.DUPLEX: rate, Resource.DRAM: rate * link.dram_bytes_per_byte} | cores

    def _all_gather(self, ranks: int, n_bytes: int) -> Demand:
        """Demand of an all-gather. Without peer access each device copies all shards from host memory."""
        if not self.profile.meets_on_host:
            return self.collective(ranks, n_bytes, "all_gather")
        copies = self._copy("h2d", n_bytes * (ranks - 1) // ranks, ranks - 1)
        return replace(copies, overhead_s=copies.overhead_s + self._meeting_s)

    def collective(self, ranks: int, n_bytes: int, kind: Collective) -> Demand:
        """Demand of an all-gather or reduce-scatter of the library: a ring, as fast as its slowest link. Each rank receives
        (ranks - 1) / ranks of the bytes; each host forwards them once for all of its devices."""
        least_s = n_bytes * (ranks - 1) // ranks / self._network_rate(1)
        return self._moved(kind, ranks, n_bytes, 1, self._local_ranks(ranks), least_s=least_s)

    def _exchange(self, plan: Setup, block: int) -> Demand:
        """Demand of a gradient exchange: all-to-all of shards and local sum within a host, then an exchange of the fp32 sums
        between hosts, and copies within device memory."""
        ranks, n_elements = plan.semantics.ranks, plan.gradient_elements(block)
        sum_bytes = n_elements * ITEM_BYTES[plan.sum_dtype(block)]
        # Gather the shards of a rank (twice), add them, write the result
        moved_bytes = 2 * sum_bytes + n_elements * FP32_BYTES + n_elements // ranks * ITEM_BYTES[plan.gradient_dtype(block)]
        n_times = -(-n_elements // ranks // plan.exchanged_elements())
        if self.profile.meets_on_host:
            return self._exchanged_in_memory(ranks, sum_bytes, moved_bytes, n_times)
        local_ranks, n_hosts = self._local_ranks(ranks), self.profile.n_hosts
        sent = n_elements // local_ranks * FP32_BYTES  # by each device to other hosts
        between_s = sent * (n_hosts - 1) / n_hosts / self._network_rate(local_ranks) if n_hosts > 1 else 0.0
        moved_s = (moved_bytes + (sent if n_hosts > 1 else 0)) / self._memory_bytes_per_s
        return self._moved("alltoall", local_ranks, sum_bytes, n_times, local_ranks, moved_s + between_s)

    def _exchanged_in_memory(self, ranks: int, sum_bytes: int, moved_bytes: int, n_times: int) -> Demand:
        """Demand of an exchange through host memory: each device downloads its gradients, then uploads its shard of the others'."""
        link, up_bytes = self.profile.link, sum_bytes * (ranks - 1) // ranks
        down_per_s = self.profile.copy_bytes_per_s("d2h", sum_bytes // n_times)
        up_per_s = self.profile.copy_bytes_per_s("h2d", up_bytes // n_times)
        copying_s = sum_bytes / down_per_s + up_bytes / up_per_s
        uses = {Resource.H2D: up_bytes / copying_s, Resource.D2H: sum_bytes / copying_s}
        each_s = 2 * self._meeting_s + link.d2h.latency_s.value + (ranks - 1) * link.h2d.latency_s.value
        overhead_s = n_times * each_s + moved_bytes / self._memory_bytes_per_s
        return self._demand(overhead_s, copying_s, uses | self._copying((sum_bytes + up_bytes) / copying_s))

    def _moved(
        self, kind: Collective, ranks: int, n_bytes: int, n_times: int, n_local: int, overhead_s: float = 0.0, least_s: float = 0.0
    ) -> Demand:
        """Demand of a collective in `n_times` pieces, with `n_local` on each host. Through the host, received bytes cross two
        links and host memory twice."""
        peers, link = self.profile.peers, self.profile.link
        n_crossing = n_bytes * (ranks - 1) // ranks
        overhead_s += n_times * self._hops_s
        law = None if peers is None or ranks == 1 else peers.collectives.get(kind)
        if law is None:
            rate = min(self.profile.copy_bytes_per_s(direction, n_crossing) for direction in ("h2d", "d2h"))
            overhead_s, alone_s = overhead_s + n_times * self._meeting_s, n_crossing / rate
        else:
            overhead_s += n_times * law.latency_of(n_local)
            alone_s = n_times * law.moving_s(n_local, n_bytes / n_times, ranks)
        alone_s = max(alone_s, least_s)
        if (peers is not None and not peers.through_host) or alone_s == 0.0:
            return self._demand(overhead_s, alone_s, {})
        per_s = 2 * n_crossing / alone_s
        return self._demand(overhead_s, alone_s, {Resource.DUPLEX: per_s, Resource.DRAM: per_s * link.dram_bytes_per_byte})

    def _network_rate(self, local_ranks: int) -> float:
        """Network rate per device of a host; infinite for a single host."""
        network = self.profile.network
        return math.inf if network is None or network.n_hosts == 1 else network.bytes_per_s.value / local_ranks

    def _local_ranks(self, ranks: int) -> int:
        return max(1, ranks // self.profile.n_hosts)

    @property
    def _hops_s(self) -> float:
        """Latency of one pass over all hosts."""
        network = self.profile.network
        return 0.0 if network is None else (network.n_hosts - 1) * network.latency_s.value

    @property
    def _meeting_s(self) -> float:
        """Latency of a barrier between ranks; if unmeasured, that of a copy in both directions."""
        if (peers := self.profile.peers) is not None:
            return peers.latency_s.value
        return self.profile.link.h2d.latency_s.value + self.profile.link.d2h.latency_s.value

    def _reduce(self, n_bytes: int) -> Demand:
        rate = self.profile.host.reduce_bytes_per_s.value
        return self._demand(0.0, n_bytes / rate, {Resource.DRAM: rate} | self._all_cores)

    @property
    def _all_cores(self) -> dict[Resource, float]:
        return {Resource.CORES: float(self.profile.host.n_cores)}

    def update_on_device_s(self, plan: Setup, block: Block) -> float:
        return self.moving_s(self._updated_bytes(plan, block), len(block.trained))

    def _updated_bytes(self, plan: Setup, block: Block) -> int:
        """Memory traffic of an update on the device."""
        semantics = plan.semantics
        return round(block.n_trained * semantics.optimizer.update_bytes(semantics.master_dtype, semantics.gradient_dtype))

    def _demand(self, overhead_s: float, alone_s: float, uses: dict[Resource, float]) -> Demand:
        """Build a demand; stretch an op that would exceed a capacity. DUPLEX is exempt: it was measured with both directions busy,
        and may be below the rate of one direction alone."""
        over = max((per_s / self.capacity[r] for r, per_s in uses.items() if r is not Resource.DUPLEX), default=0.0)
        slower = max(1.0, over)
        slowed: Uses = tuple((r, per_s / slower) for r, per_s in uses.items() if per_s > 0)
        return Demand(self.profile.device.op_overhead_s.value + overhead_s, alone_s * slower, slowed)
