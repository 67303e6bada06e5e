"""Machines that perform a plan's ops with torch: for training on a CPU or GPU, and for forward plans in the arenas of a training.

A machine performs ops on lanes. `host/copies.py` loads weights and offloads results, `compute/compute.py` computes blocks,
`host/updates.py` updates weights, and `collectives.py` connects ranks.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import assert_never

import torch
from torch.cuda import Event

from penstock.runtime.batch import Batch, Batches, PreparedBatches, positions_of
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.compute.compute import Compute, Head
from penstock.runtime.compute.losses import LossFunction
from penstock.runtime.executor import AgreedStop, Record, StepResult, Stop, execute
from penstock.runtime.host.base_file import N_READERS, BaseFile
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.copies import Copies
from penstock.runtime.host.host_state import HostState
from penstock.runtime.host.memory import BASE, FRONTS, Arenas, Make
from penstock.runtime.host.norms import SharedNumbers
from penstock.runtime.host.slabs import CommonMemory, give_back_freed, host_slab, shared_slab, touch
from penstock.runtime.host.updates import Updates
from penstock.runtime.host.workers import Workers
from penstock.runtime.layers.packed_weights import pack
from penstock.runtime.plan import Kind, Lane, Op, Plan, Slot
from penstock.runtime.plan.optimizer import Schedule
from penstock.runtime.plan.timeline import Span
from penstock.runtime.plan.workload import ITEM_BYTES
from penstock.runtime.ranks import Ranks, Shared, of_rank

from .collectives import Collectives
from .lanes import CpuDevice, CudaDevice, Lanes, Timers

CPU = CpuDevice()


class Abandoned(Exception):
    """A stop was requested during a forward plan, which has no result."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory and threads of a training, which its forward plans share."""

    arenas: Arenas
    lanes: Lanes
    workers: Workers[Scratch]  # threads of the cpu lane
    updates: Updates
    ranks: Ranks | None
    memory: CommonMemory | None  # shared host memory of ranks
    base: BaseFile | None  # frozen weights on disk


class LaneMachine:
    """`Machine` that performs a plan's ops in arenas, on lanes."""

    def __init__(self, plan: Plan, parts: Parts, compute: Compute, only_gives: bool = False) -> None:
        """`only_gives`: this rank only provides its weights to other ranks, and computes nothing."""
        self.plan, self.compute, self._only_gives, self._parts = plan, compute, only_gives, parts
        self.arenas, self.lanes, self.ranks, ranks = parts.arenas, parts.lanes, parts.ranks, parts.ranks
        self._updates, self._workers, self._readers = parts.updates, parts.workers, Workers[None](N_READERS, lambda: None)
        self._copies = Copies(plan, self.arenas, 0 if ranks is None else ranks.rank)
        self._collectives = None if ranks is None else Collectives(plan, self.arenas, ranks, parts.memory)
        self.on_thread = self.lanes.on_thread
        self._staying = {b for b in plan.policy.resident_blocks if plan.stays_loaded(b)}
        self._loaded = set[int]()  # blocks of `_staying` with weights in their slots
        self._awaited = {wait.op for op in plan.ops for wait in op.waits}
        self._last: dict[Lane, int] = {}  # last op performed by each lane
        self._losses: dict[int, Event | None] = {}  # by step: event after the sum of its losses

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        if lane is Lane.CPU:
            self._updates.forget()
        elif lane in (Lane.H2D, Lane.DISK):  # before any use: unpacking waits for loads, loads wait for reads
            self._loaded.clear()  # a forward plan between two runs may have used their slots
        helped = {Lane.CPU: self._workers.helped, Lane.DISK: self._readers.helped}.get(lane)
        if lane is Lane.DISK:
            assert self._parts.base is not None
            self._parts.base.settle()
        with self.compute.at_work() if lane is Lane.GPU else nullcontext():
            if lane is Lane.GPU and self.lanes.streams is None:
                give_back_freed()  # of evaluations, checkpoints and the previous thread: holes too small for later allocations
            with self.lanes.settled(lane), self.lanes.current(lane):
                try:
                    with nullcontext() if helped is None else helped(lambda: self.lanes.settled(lane)):
                        yield
                finally:  # also after a failure: end copies to the host, and report errors of kernels
                    self.lanes.finish(lane)

    def prepare(self, step: int) -> None:
        if not self._only_gives:
            self.compute.inputs.prepare(step)

    def perform(self, index: int, op: Op, step: int) -> Timers | None:
        """Perform op number `index` of the plan, or issue it to the lane's stream."""
        self._last[op.lane] = index
        timers = self.lanes.issue(op.lane, op.name, partial(self.work, index, op, step))
        if op.kind is Kind.LOSS:
            self._losses[step] = self.lanes.mark(op.lane)
        return timers

    def work(self, index: int, op: Op, step: int) -> None:
        match op.kind:
            case Kind.READ | Kind.LOAD | Kind.DEQUANTISE if op.block in self._loaded:
                pass  # frozen weights already in a slot of their own
            case Kind.READ:
                assert self._parts.base is not None
                self._readers.run(self._parts.base.reads(op.block, self.arenas.raw(op["frozen"]).numpy().data))
            case Kind.LOAD:
                self._copies.load(op)
                if not self.plan.unpacks(op.block):
                    self._loaded |= {op.block} & self._staying
            case Kind.DEQUANTISE:
                self.compute.unpack(op)
                self._loaded |= {op.block} & self._staying
            case Kind.FETCH_ACTIVATION | Kind.FETCH_SAVED | Kind.OFFLOAD_ACTIVATION | Kind.OFFLOAD_SAVED:
                self._copies.move(op)
            case Kind.GATHER | Kind.EXCHANGE:
                assert self._collectives is not None
                self._collectives.perform(op)
            case Kind.FORWARD | Kind.RECOMPUTE:
                if not self._only_gives:
                    self.compute.forward(op, step)
            case Kind.LOSS:
                self.compute.loss(op, step)
            case Kind.BACKWARD:
                self.compute.backward(op, step)
            case Kind.OFFLOAD_GRADIENT:
                self._copies.offload_gradient(op)
            case Kind.OFFLOAD_SQUARES:
                self._copies.offload_squares(op)
            case Kind.ACCUMULATE:
                self._updates.accumulate(op)
            case Kind.SQUARE:
                self._updates.square(op)
            case Kind.NORM:
                self._updates.norm(op)
            case Kind.CLIP:
                self._updates.clip(op, step, lambda: [loss.item() for loss in self.compute.losses[step].by_micro_batch])
            case Kind.UPDATE:
                self._updates.update(op, step)
            case Kind.UPDATE_ON_DEVICE:
                self._updates.update_on_device(op, step)
            case Kind.SPECULATE:
                self._updates.speculate(op, step)
            case Kind.SETTLE:
                self._updates.settle(op, step)
            case _:
                assert_never(op.kind)

    def mark(self, op: Op) -> Event | None:
        return self.lanes.mark(op.lane) if self._last[op.lane] in self._awaited else None

    def follow(self, lane: Lane, token: Event) -> None:
        self.lanes.follow(lane, token)

    def result(self, step: int) -> StepResult | None:
        issued, losses, lanes = self._losses.pop(step, None), self.compute.losses.pop(step, None), self.lanes
        if losses is None:
            return None
        grad_norm, skipped, of_all = self._updates.outcome(step)

        def loss_sum() -> float:
            if of_all is not None:
                return of_all
            if issued is not None:
                lanes.follow(Lane.CPU, issued)
            return losses.total.item()

        return StepResult(losses.n_supervised, grad_norm, skipped, loss_sum, losses.n_losses)

    def gradient_norms(self) -> dict[str, float]:
        """Gradient norm of each parameter in the last step, before clipping."""
        return {p.name: math.sqrt(square) for p, square in self._updates.squares}

    def measured(self, records: Sequence[Record]) -> Sequence[Span]:
        return self.lanes.timed(records)


class TorchMachine(LaneMachine):
    """Machine that trains a plan's model on a device, and owns the state."""

    def __init__(
        self,
        plan: Plan,
        batches: Batches,
        settings: Schedule,
        seed: int = 0,
        n_workers: int | None = None,
        ranks: Ranks | None = None,
        loss: LossFunction | None = None,
        disk: Path | None = None,
        device: CpuDevice | CudaDevice = CPU,
    ) -> None:
        """Allocate all arenas and build the templates; host state is zero until weights are set. `n_workers`: threads of an op of
        the cpu lane, by default one per core. `batches`: of all ranks; each takes its shard. `loss`: a user's loss function, if the
        objective needs one. `disk`: the file of `disk_blocks`."""
        lanes = device.lanes(plan)
        self.settings, self.seed, self._rank = settings, seed, 0 if ranks is None else ranks.rank
        assert plan.semantics.ranks == (1 if ranks is None else ranks.n)
        if ranks is not None:
            batches = of_rank(batches, self._rank, plan.semantics.batch_size)
        workers = Workers(n_workers or len(lanes.cores[Lane.CPU]), Scratch)
        with lanes.current(Lane.GPU):
            arenas, memory = _arenas(plan, lanes.device, ranks)
            base = BaseFile(disk, {b: plan.read_bytes(b) for b in plan.policy.disk_blocks}) if disk is not None else None
            self.host = HostState(plan, arenas, self._rank, ranks is None or self._rank % ranks.n_here == 0, base)
            templates = Templates(plan.model.config, plan.workload, plan.semantics, plan.policy, lanes.device, loss)
            compute = Compute(plan, arenas, templates, _uploaded(batches, lanes), seed, self._rank)
        lanes.finish(Lane.GPU)  # after the zeros of the arenas
        arenas.touch(n_workers or len({core for cores in lanes.cores.values() for core in cores}))
        if lanes.streams is not None:
            lanes.streams.lock(arenas, () if memory is None else memory.of_others(self._rank))
        shared = SharedNumbers(plan, ranks) if ranks is not None else None
        with lanes.current(Lane.GPU):  # kernels are tested there
            updates = Updates(self.host, settings, workers, lanes.device, shared, seed)
        self.tell_of_forward: Callable[[int, int], None] | None = None  # (micro-batches, length), for other ranks
        super().__init__(plan, Parts(arenas, lanes, workers, updates, ranks, memory, base), compute)

    def initialise(self, seed: int) -> None:
        for block in range(len(self.plan.workload.blocks)):  # one at a time takes memory twice
            weights = self.compute.templates.initial_weights(block, seed)
            packed = [p.name for p in self.host.frozen[block] if self.plan.is_packed(p) and self.host.is_first]
            weights |= {name: pack(weights[name], self.plan.semantics.base) for name in packed}
            self.host.set_weights(block, weights)
        give_back_freed()

    def initialise_adapters(self, seed: int) -> None:
        """Initialise the adapters only, with the numbers of `initialise`."""
        for block in range(len(self.plan.workload.blocks)):
            self.host.set_weights(block, self.compute.templates.initial_adapters(block, seed))

    def agree(self, stop: Stop) -> Stop:
        """A `Stop` that all ranks honour after the same step once rank 0 requests it; with one rank, `stop`."""
        if self.ranks is None:
            return stop
        self._updates.agreed = agreed = AgreedStop(stop)
        return agreed

    def forward(self, plan: Plan, batches: Batches, head: Head, n_passes: int, stop: Stop | None) -> None:
        """Perform `n_passes` of a forward plan; Abandoned if a stop is requested meanwhile. With several ranks, announce one pass
        at a time: all ranks finish it, and can save afterwards."""
        machine, tell = self.forwards(plan, batches, head), self.tell_of_forward
        at_once, heeded = (n_passes, stop) if tell is None else (1, None)
        for first in range(0, n_passes, at_once):
            if tell is not None:
                tell(plan.semantics.n_micro_batches, plan.semantics.seq_len)
            execute(plan, machine, at_once, first, stop=heeded)
            if stop is not None and stop.is_requested:
                raise Abandoned

    def forwards(self, plan: Plan, batches: Batches, head: Head | None) -> LaneMachine:
        """Machine that performs a forward plan in these arenas, on these lanes. Only one of the two machines may run at a time.
        Host state is only read, so training does not change. Without a head it only provides its weights to other ranks."""
        on_device, training = _uploaded(batches, self.lanes), self.compute
        compute = Compute(plan, self.arenas, training.templates, on_device, training.seed, self._rank, head)
        return LaneMachine(plan, self._parts, compute, only_gives=head is None)

    def device_peak_bytes(self) -> int | None:
        """Peak device memory of the process; None on a CPU."""
        return None if self.lanes.streams is None else self.lanes.streams.peak_bytes()

    def others_bytes(self) -> int:
        """Bytes of other ranks' memory that this process maps, which the system includes in its memory."""
        base_bytes, memory = 0 if self.host.is_first else self.arenas.base_bytes(), self._parts.memory
        if memory is None:
            return base_bytes
        mapped = zip(memory.uploaded, memory.exchanged, strict=True)
        return base_bytes + sum(slab.numel() for rank, slabs in enumerate(mapped) if rank != self._rank for slab in slabs)

    def device_name(self) -> str | None:
        return None if self.lanes.streams is None else self.lanes.streams.name


def _arenas(plan: Plan, device: torch.device, ranks: Ranks | None) -> tuple[Arenas, CommonMemory | None]:
    """The plan's arenas, with frozen weights shared by the ranks of a host; and the memory that ranks read of each other, or None
    if weights are gathered from the devices."""
    if ranks is None:
        return Arenas(plan.arenas, device), None
    blocks, separate = [*range(len(plan.workload.blocks)), *plan.policy.speculate_blocks], dict[str, tuple[dict[Slot, int], Make]]()
    fronts = {Slot("state", i): next(iter(plan.state_bytes(plan.part_elements(b)).values())) for i, b in enumerate(blocks)}
    if not plan.workload.trains_all:
        frozen = {Slot("state", b): plan.frozen_bytes(b) for b in blocks}
        separate = {FRONTS: (fronts, host_slab), BASE: (frozen, partial(_base, ranks))}
    if not ranks.by_memory:
        return Arenas(plan.arenas, device, separate), None
    shared: list[Shared] = []

    def slab(n_bytes: int) -> torch.Tensor:
        handle, memory = shared_slab(n_bytes)
        shared.append(handle)
        return memory

    arenas = Arenas(plan.arenas, device, separate | {FRONTS: (fronts, slab)})
    exchanged = slab(plan.exchanged_elements() * ranks.n * ITEM_BYTES["fp32"])
    touch([exchanged], 1)
    uploaded_by, exchanged_by = (ranks.common(mine) for mine in shared)
    for mine in shared:
        mine.close()
    return arenas, None if uploaded_by is None or exchanged_by is None else CommonMemory(uploaded_by, exchanged_by)


def _base(ranks: Ranks, n_bytes: int) -> torch.Tensor:
    """Slab of frozen weights; the first rank of the host faults in its pages."""
    slab = ranks.of_host(n_bytes)
    if ranks.rank % ranks.n_here == 0:
        touch([slab], len(os.sched_getaffinity(0)))
    return slab


def _uploaded(batches: Batches, lanes: Lanes) -> PreparedBatches:
    """Batches prepared ahead in pinned memory, which the gpu lane copies to the device asynchronously."""
    if (streams := lanes.streams) is None:
        return PreparedBatches(batches)

    def pinned(step: int) -> Batch:
        batch = batches(step)
        positions_BT = None if batch.document_tokens is None else positions_of(batch.document_tokens)
        batch = replace(batch, n_counted=batch.n_supervised, positions_BT=positions_BT)
        images = None if batch.images is None else batch.images.moved(streams.pinned)
        return replace(batch.moved(streams.pinned), images=images)

    return PreparedBatches(pinned, lambda batch: batch.moved(lambda tokens: tokens.to(streams.device, non_blocking=True)))
