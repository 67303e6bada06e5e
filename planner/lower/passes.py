"""Which ops does a policy mean, concern by concern?

A step begins as what is computed (`computed`), in an order that would be right if ops ran one after the other. Each pass then adds
what one concern needs: ops of its own and operands of those that are there. Overlap comes last, from the slots alone (`waits.py`).
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from runtime.plan import Kind, Plan, Slot, Update
from runtime.plan.workload import BlockKind

from .arenas import N_STAGING_SLOTS, eager_ring, host_slots, spill_ring_slots, staying, vocab_slot_is_sum


@dataclass(slots=True)
class Draft:
    """An op that is being written."""

    kind: Kind
    block: int
    micro_batch: int | None = None
    reads: list[Slot] = field(default_factory=list)
    writes: list[Slot] = field(default_factory=list)
    chunk: int | None = None
    after: "tuple[Draft, int] | None" = None  # what it follows besides what slots ask for, so many steps before


def drafts(plan: Plan, rings_go_on: bool = True) -> list[Draft]:
    """All ops of one step. Rings of slots go on from one group of micro-batches to the next, or each group begins anew, so that all
    take the same slots."""
    ops: Iterable[Draft] = computed(plan)
    ops = with_weights(plan, ops)
    ops = with_activations(plan, ops, rings_go_on)
    ops = with_gradients(plan, ops, rings_go_on)
    for one_pass in PASSES:
        ops = one_pass(plan, ops)
    return list(ops)


def computed(plan: Plan) -> Iterator[Draft]:
    """Forward, loss and backward: group by group of micro-batches, layer by layer within a group."""
    n, group, head = plan.semantics.n_micro_batches, plan.policy.group_micro_batches, plan.workload.n_layers + 1
    walk = [*((Kind.FORWARD, b) for b in range(head)), (Kind.LOSS, head), *_backward_walk(plan), (Kind.BACKWARD, 0)]
    for first in range(0, n, group):
        for kind, block in walk:
            yield from (Draft(kind, block, m) for m in range(first, min(first + group, n)))


def _backward_walk(plan: Plan) -> Iterator[tuple[Kind, int]]:
    """Layers from the last to the first, each backward; before a run of layers whose inputs did not stay, their recompute."""
    stride, top = plan.policy.boundary_stride, plan.workload.n_layers
    for below in range((top - 1) // stride * stride, -1, -stride):
        yield from ((Kind.RECOMPUTE, b) for b in range(below + 1, min(below + stride, top)))
        yield from ((Kind.BACKWARD, b) for b in range(min(below + stride, top), below, -1))


def with_weights(plan: Plan, ops: Iterable[Draft]) -> Iterator[Draft]:
    """A load before each use of weights that are not there."""
    blocks, resident, arena = plan.workload.blocks, plan.policy.resident_blocks, plan.weights_arena
    uses = [(key[1], list(run)) for key, run in groupby(ops, key=lambda op: (op.kind, op.block))]
    streamed = [b for b, _ in uses if blocks[b].kind is BlockKind.LAYER and b not in resident]
    slots, there = _WeightSlots(plan.policy.prefetch_depth + 1, streamed), set[int]()
    for block, run in uses:
        if block == 0 and run[0].kind is Kind.BACKWARD:
            yield from run  # a table's gradient needs no table
            continue
        if block in resident:
            slot, is_fresh = Slot("resident_weights", resident.index(block)), block not in there
            there.add(block)
        elif blocks[block].kind is BlockKind.LAYER:
            index, is_fresh = slots.use(block)
            slot = Slot("weights", index)
        else:
            slot, is_fresh = Slot("vocab_weights", 0), True
        if is_fresh:
            tied = [Slot(arena, 0)] if block and blocks[block].tied else []
            yield Draft(Kind.LOAD, block, None, [Slot(arena, block), *tied], [slot])
        for op in run:
            op.reads.append(slot)
            yield op


class _WeightSlots:
    """Which block each weight slot holds. A load takes the slot whose content is needed last (Belady's algorithm)."""

    def __init__(self, n_slots: int, uses: list[int]) -> None:
        self.held: list[int | None] = [None] * n_slots
        self.last_use = [-1] * n_slots
        self.n_uses, self.at = len(uses), 0
        self.positions: dict[int, list[int]] = {}
        for position, block in enumerate(uses):
            self.positions.setdefault(block, []).append(position)

    def use(self, block: int) -> tuple[int, bool]:
        """The slot for the next use, which is of `block`, and whether it must be loaded first."""
        is_fresh = block not in self.held
        index = self._victim() if is_fresh else self.held.index(block)
        self.held[index] = block
        self.last_use[index] = self.at
        self.at += 1
        return index, is_fresh

    def _victim(self) -> int:
        def needed_again(index: int) -> int:
            block = self.held[index]
            if block is None:
                return self.n_uses
            positions = self.positions[block]
            later = bisect.bisect_left(positions, self.at)
            return positions[later] if later < len(positions) else self.n_uses

        return max(range(len(self.held)), key=lambda i: (needed_again(i), -self.last_use[i], -i))


def with_activations(plan: Plan, ops: Iterable[Draft], ring_goes_on: bool) -> Iterator[Draft]:
    """Each output in a slot of its own; in one that it shares until it is computed again; or, where it spills, in a ring, until it
    has left and when it is back."""
    group, stride, n_layers = plan.policy.group_micro_batches, plan.policy.boundary_stride, plan.workload.n_layers
    stays, spilled = {b: i for i, b in enumerate(staying(plan))}, {b: i for i, b in enumerate(plan.policy.spill_blocks)}
    ring, passing = _Ring("boundaries", len(stays) * group, spill_ring_slots(group)), dict[tuple[int, int], Slot]()

    def at(block: int, m: int) -> Slot:
        if block in spilled:
            return passing[block, m]
        place = stays[block] if block in stays else len(stays) + block % stride - 1
        return Slot("boundaries", place * group + m % group)

    def comes(block: int, m: int) -> Slot:
        if block in spilled:
            passing[block, m] = ring.next()
        return at(block, m)

    for (kind, block), of_kind in groupby(ops, key=lambda op: (op.kind, op.block)):
        run = list(of_kind)
        if kind is Kind.BACKWARD and block - 1 in spilled:
            for op in run:
                assert op.micro_batch is not None
                there = Slot("spilled", spilled[block - 1] * group + op.micro_batch % group)
                yield Draft(Kind.FETCH, block - 1, op.micro_batch, [there], [comes(block - 1, op.micro_batch)])
        for op in run:
            m = op.micro_batch
            if m is None:
                yield op
                continue
            if kind is Kind.FORWARD and block == 0 and m % group == 0 and not ring_goes_on:
                ring.begin_anew()
            if kind in (Kind.FORWARD, Kind.RECOMPUTE):
                op.reads += [at(block - 1, m)] if block else []
                op.writes.append(comes(block, m))
            elif kind is Kind.LOSS:
                op.reads.append(at(n_layers, m))
                op.writes.append(at(n_layers, m))
            else:
                op.reads += [at(b, m) for b in (block, block - 1) if b >= 0]
                op.writes += [at(block - 1, m)] if block else []
            yield op
            if kind is Kind.FORWARD and block in spilled:
                yield Draft(Kind.SPILL, block, m, [at(block, m)], [Slot("spilled", spilled[block] * group + m % group)])


def with_gradients(plan: Plan, ops: Iterable[Draft], rings_go_on: bool) -> Iterator[Draft]:
    """Where each micro-batch's gradient goes on the device, and its way to the host."""
    blocks, head, n = plan.workload.blocks, plan.workload.n_layers + 1, plan.semantics.n_micro_batches
    on_device, staging = _Ring("gradients", 0, plan.policy.gradient_slots), _Ring("staging", 0, N_STAGING_SLOTS)
    on_host = _host_gradients(plan)
    place: dict[int, Slot] = {}
    for op in ops:
        b, m = op.block, op.micro_batch
        if op.kind not in (Kind.LOSS, Kind.BACKWARD) or m is None:
            yield op
            continue
        if op.kind is Kind.LOSS and m % plan.policy.group_micro_batches == 0 and not rings_go_on:
            on_device.begin_anew()
            staging.begin_anew()
        is_first, is_last, is_layer = m == 0, m == n - 1, blocks[b].kind is BlockKind.LAYER
        if not is_layer:
            place[b] = Slot("vocab_gradients", 0)
        elif is_first or not plan.reduced:
            place[b] = on_device.next()
        out, total = place[b], Slot("sums" if is_layer else "vocab_sums", 0)
        if not plan.reduced or (is_first and is_last and b != head and (is_layer or not vocab_slot_is_sum(plan))):
            op.writes.append(out)
        elif not is_layer and vocab_slot_is_sum(plan):
            op.reads += [] if is_first else [out]
            op.writes.append(out)
        else:
            op.reads += [] if is_first else [total]
            op.writes += [total, out] if is_last else [total]
        yield op
        if not plan.reduced:
            arriving, to = staging.next() if is_layer else Slot("staging", N_STAGING_SLOTS), Slot("host_gradients", b)
            yield Draft(Kind.OFFLOAD, b, m, [out], [arriving])
            yield Draft(Kind.ACCUMULATE, b, m, [arriving, to], [to])
        elif is_last:
            yield Draft(Kind.OFFLOAD, b, None, [out], [on_host(b)])


def _host_gradients(plan: Plan) -> Callable[[int], Slot]:
    """The slot for the next part of a gradient on the host: its own, or with eager updates one of a few that layers share."""
    if not eager_ring(plan):
        return lambda block: Slot("host_gradients", block)
    arena = plan.arena("host_gradients")
    assert arena is not None
    last = len(arena.slot_bytes) - 1
    ring, own = (
        _Ring("host_gradients", 1, last - 1),
        {0: Slot("host_gradients", 0), plan.workload.n_layers + 1: Slot("host_gradients", last)},
    )
    return lambda block: own.get(block) or ring.next()


def with_squares(plan: Plan, ops: Iterable[Draft]) -> Iterator[Draft]:
    """The device squares a gradient that is whole there; the sums leave with it."""
    place = {b: i for i, b in enumerate(plan.policy.square_blocks)}
    for op in ops:
        if op.kind is Kind.OFFLOAD and op.block in place:
            sums = Slot("squares", place[op.block])
            yield Draft(Kind.SQUARE, op.block, None, [op.reads[0]], [sums])
            op.reads.append(sums)
            op.writes.append(Slot("host_squares", place[op.block]))
        yield op


def with_late_offloads(plan: Plan, ops: Iterable[Draft]) -> Iterator[Draft]:
    """A layer's gradient leaves when the backward some layers further on is done; the first layers', who have none, with the
    embedding's."""
    late, waiting = plan.policy.offload_late_blocks, list[Draft]()
    backward: Draft | None = None
    for op in ops:
        if op.kind is Kind.BACKWARD:
            backward = op
        is_layer = plan.workload.blocks[op.block].kind is BlockKind.LAYER
        if not late or op.kind is not Kind.OFFLOAD:
            yield op
        elif is_layer and backward is not None:
            waiting.append(op)
            if waiting[0].block - late >= op.block:
                waiting[0].after = backward, 0
                yield waiting.pop(0)
        else:
            yield from waiting
            waiting = []
            yield op


def in_chunks(plan: Plan, ops: Iterable[Draft]) -> Iterator[Draft]:
    """A layer moves in several transfers, each with slots of its own on the host."""
    numbers, on_host = host_slots(plan), _host_gradients(plan)
    for op in ops:
        arena = {Kind.LOAD: plan.weights_arena, Kind.OFFLOAD: "host_gradients"}.get(op.kind)
        if plan.policy.transfer_chunk_bytes is None or arena is None:
            yield op
            continue
        n_chunks = len(numbers[op.block])
        for chunk, number in enumerate(numbers[op.block]):
            one = Draft(op.kind, op.block, None, [*op.reads], [*op.writes], chunk if n_chunks > 1 else None)
            if op.kind is Kind.LOAD:
                one.reads[0] = Slot(arena, number)
            else:
                one.writes[0] = on_host(op.block) if eager_ring(plan) else Slot(arena, number)
            if chunk == 0:
                one.after = op.after
            elif op.kind is Kind.OFFLOAD:
                del one.reads[1:], one.writes[1:]  # sums go with the first
            yield one


def with_updates(plan: Plan, ops: Iterable[Draft]) -> Iterator[Draft]:
    """The host's norm of each gradient that is whole, and its update: at once, early on a guess, or when all norms are known."""
    host, is_eager = _Host(plan), plan.policy.update is Update.EAGER
    last = plan.semantics.n_micro_batches - 1
    for op in ops:
        yield op
        if (op.kind is Kind.OFFLOAD and plan.reduced) or (op.kind is Kind.ACCUMULATE and op.micro_batch == last):
            host.arrived.setdefault(op.block, []).append(op.writes[0])
            yield from host.norm(op.block, op.chunk)
            if is_eager:
                yield host.update(op.block, op.chunk)
            elif op.block in plan.policy.speculate_blocks:
                yield host.speculate(op.block, op.chunk)
    if not is_eager:
        for block, numbers in enumerate(host.numbers):  # the order in which the next forward needs them
            for chunk in range(len(numbers)):
                yield host.update(block, chunk if len(numbers) > 1 else None)


class _Host:
    """The host's work on the gradients of a step."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.policy, self.head = plan, plan.policy, plan.workload.n_layers + 1
        self.numbers = host_slots(plan)
        self.arrived: dict[int, list[Slot]] = {}  # slots of complete gradients, one per chunk
        self.shadows: dict[int, int] = {}  # the first slot of each block that speculates
        n_shadows = 0
        for b in self.policy.speculate_blocks:
            self.shadows[b] = n_shadows
            n_shadows += len(self.numbers[b])

    def norm(self, block: int, chunk: int | None) -> Iterator[Draft]:
        """What is left to do for the norm; that of block 0, which comes last, ends the sum."""
        is_squared = block in self.policy.square_blocks
        if block == 0 or not is_squared:
            own = [] if is_squared else self._gradient(block, chunk)
            sums = [slot for b in self.policy.square_blocks for slot in self._sums(b)] if block == 0 else []
            yield Draft(Kind.NORM, block, None, [*own, *sums, Slot("norm", 0)], [Slot("norm", 0)], chunk)

    def speculate(self, block: int, chunk: int | None) -> Draft:
        reads = [*self._gradient(block, chunk), *self._state(block, chunk)]
        return Draft(Kind.SPECULATE, block, None, reads, self._shadow(block, chunk), chunk)

    def update(self, block: int, chunk: int | None) -> Draft:
        plan, state, shadow = self.plan, self._state(block, chunk), self._shadow(block, chunk)
        norm = self._sums(block) if self.policy.update is Update.EAGER else [Slot("norm", 0)]
        copied = plan.weights_arena == "host_weights" and self.policy.storage == "mirrored"
        copy = [Slot("host_weights", self._number(block, chunk))] if copied else []
        kind = Kind.SETTLE if shadow else Kind.UPDATE
        reads, writes = [*self._gradient(block, chunk), *norm, *state, *shadow], [*state, *copy, *shadow]
        return Draft(kind, block, None, reads, writes, chunk)

    def _number(self, block: int, chunk: int | None) -> int:
        return self.numbers[block][chunk or 0]

    def _gradient(self, block: int, chunk: int | None) -> list[Slot]:
        """Its slots; a tied weight's gradient is whole when the embedding's part has come too."""
        tied = self.arrived[self.head] if block == 0 and self.plan.workload.tied else []
        return [self.arrived[block][chunk or 0], *tied]

    def _state(self, block: int, chunk: int | None) -> list[Slot]:
        """What the host has learned: master (as it is stored) and moments."""
        master = ("host_weights", "remainders") if self.policy.storage == "split" else ("masters",)
        return [Slot(arena, self._number(block, chunk)) for arena in (*master, "moments")]

    def _shadow(self, block: int, chunk: int | None) -> list[Slot]:
        return [Slot("shadows", self.shadows[block] + (chunk or 0))] if block in self.shadows else []

    def _sums(self, block: int) -> list[Slot]:
        """Where on the host the sums of the block's squares arrive, if the device makes them."""
        squared = self.policy.square_blocks
        return [Slot("host_squares", squared.index(block))] if block in squared else []


def with_barrier(plan: Plan, ops: Iterable[Draft]) -> list[Draft]:
    """Under `barrier` the next step's first load waits for this step's last update."""
    found = list(ops)
    if plan.policy.update is Update.BARRIER:
        next(op for op in found if op.kind is Kind.LOAD).after = found[-1], 1
    return found


PASSES: tuple[Callable[[Plan, Iterable[Draft]], Iterable[Draft]], ...] = (
    with_squares,
    with_late_offloads,
    in_chunks,
    with_updates,
    with_barrier,
)


class _Ring:
    """Slots that are taken one after the other, and then again."""

    def __init__(self, arena: str, first: int, n_slots: int) -> None:
        self.slots = [Slot(arena, first + i) for i in range(n_slots)]
        self.n_taken = 0

    def next(self) -> Slot:
        self.n_taken += 1
        return self.slots[(self.n_taken - 1) % len(self.slots)]

    def begin_anew(self) -> None:
        self.n_taken = 0
