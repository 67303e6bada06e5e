"""Passes of lowering, one per concern: compute, weights, activations, gradients, squares, updates.

A step begins as what is computed (`computed`), in an order that would be right if ops ran one after the other. Each pass then adds
what one concern needs: ops of its own and operands of those that are there. Overlap comes last, from the slots alone (`waits.py`).
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from runtime.plan import OPS, Kind, Op, Semantics, Setup, Slot, Update, Wait
from runtime.plan.ops import Operand
from runtime.plan.workload import BlockKind

from .arenas import (
    N_SAVED_SLOTS,
    N_STAGING_SLOTS,
    eager_ring,
    n_whole_sums,
    spill_ring_slots,
    staying,
    sums_layers,
    vocab_slot_is_sum,
)


@dataclass(slots=True)
class Draft:
    """An op that is being written."""

    kind: Kind
    block: int
    micro_batch: int | None = None
    operands: list[Operand] = field(default_factory=list)
    after: "tuple[Draft, int] | None" = None  # an op that it follows besides those its slots ask for, and how many steps before

    def uses(self, **operands: Slot | None) -> "Draft":
        """Add operands, those that are there."""
        self.operands += [(name, slot) for name, slot in operands.items() if slot is not None]
        return self

    def uses_all(self, name: str, slots: Iterable[Slot]) -> "Draft":
        """Add operands of one name."""
        self.operands += [(name, slot) for slot in slots]
        return self

    def slot(self, name: str) -> Slot:
        return next(slot for known, slot in self.operands if known == name)

    def op(self, waits: tuple[Wait, ...] = ()) -> Op:
        """Operands in the contract's order."""
        order = OPS[self.kind].names
        operands = sorted(self.operands, key=lambda operand: order.index(operand[0])) if self.operands[1:] else self.operands
        return Op(self.kind, self.block, self.micro_batch, tuple(operands), waits)


def drafts(plan: Setup, rings_go_on: bool = True, weights_go_on: bool = True) -> list[Draft]:
    """All ops of one step. Rings of slots, and what weights are there, go on from one group of micro-batches to the next, or each
    group begins anew, so that all take the same slots."""
    ops: Iterable[Draft] = computed(plan)
    ops = with_weights(plan, ops, weights_go_on)
    ops = with_activations(plan, ops, rings_go_on)
    ops = with_saved(plan, ops, rings_go_on)
    ops = with_gradients(plan, ops, rings_go_on)
    for one_pass in (with_squares, with_updates, with_barrier):
        ops = one_pass(plan, ops)
    return list(ops)


def computed(plan: Setup) -> Iterator[Draft]:
    """Forward, loss and backward: group by group of micro-batches, layer by layer within a group."""
    n, group, head = plan.semantics.n_micro_batches, plan.policy.accumulation_group, plan.workload.n_layers + 1
    back = [*_backward_walk(plan), (Kind.BACKWARD, 0)]
    walk = [*((Kind.FORWARD, b) for b in range(head)), (Kind.LOSS, head), *back]
    walk = [(kind, b) for kind, b in walk if kind is not Kind.BACKWARD or b >= plan.workload.first_trained]
    for first in range(0, n, group):
        for kind, block in walk:
            yield from (Draft(kind, block, m) for m in range(first, min(first + group, n)))


def _backward_walk(plan: Setup) -> Iterator[tuple[Kind, int]]:
    """Backward through the layers, from the last to the first trained one; before a run of layers whose inputs did not stay, their
    recompute."""
    stride, top, first = plan.policy.boundary_stride, plan.workload.n_layers, plan.workload.first_trained
    for below in range((top - 1) // stride * stride, -1, -stride):
        if min(below + stride, top) < first:
            return
        yield from ((Kind.RECOMPUTE, b) for b in range(below + 1, min(below + stride, top)))
        yield from ((Kind.BACKWARD, b) for b in range(min(below + stride, top), below, -1))


def with_weights(plan: Setup, ops: Iterable[Draft], weights_go_on: bool = True) -> Iterator[Draft]:
    """A load before each use of weights that are not there."""
    blocks = plan.workload.blocks
    uses = [(key[1], list(run)) for key, run in groupby(ops, key=lambda op: (op.kind, op.block))]
    placed = list(_placed(plan, [(b, run[0].kind) for b, run in uses], weights_go_on))
    unpacked = [b for (b, _), (_, is_fresh) in zip(uses, placed, strict=True) if is_fresh and plan.unpacks(b)]
    packed_slots = _WeightSlots(plan.packed_slots, unpacked)
    for (block, run), (slot, is_fresh) in zip(uses, placed, strict=True):
        if block == 0 and run[0].kind is Kind.FORWARD and not weights_go_on:
            packed_slots.begin_anew()
        if slot is None:
            yield from run
            continue
        if is_fresh:
            tied = Slot("state", 0) if block and blocks[block].tied else None
            if plan.unpacks(block):
                packed, is_new = packed_slots.use(block)
                if is_new:
                    yield Draft(Kind.LOAD, block).uses(state=plan.source_slot(block), weights=Slot("packed", packed))
                yield Draft(Kind.DEQUANTISE, block).uses(packed=Slot("packed", packed), weights=slot)
            else:
                yield Draft(Kind.LOAD, block).uses(state=plan.source_slot(block), tied=tied, weights=slot)
            if plan.semantics.ranks > 1:  # each has loaded its part
                yield Draft(Kind.GATHER, block).uses(state=plan.state_slot(block), tied=tied, weights=slot)
        for op in run:
            yield op.uses(weights=slot, trained=plan.state_slot(block) if plan.is_apart(block) else None)


def _placed(plan: Setup, uses: Sequence[tuple[int, Kind]], weights_go_on: bool) -> Iterator[tuple[Slot | None, bool]]:
    """For each use of a block its slot of weights, if it has any, and whether they must come first."""
    resident, there = {*plan.policy.resident_blocks}, set[int]()
    streamed = {*range(1, plan.workload.n_layers + 1)} - resident
    slots = _WeightSlots(plan.n_streaming, [b for b, _ in uses if b in streamed])
    for block, kind in uses:
        if block == 0 and kind is Kind.FORWARD and not weights_go_on:
            slots.begin_anew()
        if block == 0 and kind is Kind.BACKWARD:
            yield None, False  # a table's gradient needs no table
        elif block in streamed:
            index, is_fresh = slots.use(block)
            yield Slot("weights", index), is_fresh
        else:
            yield plan.weights_slot(block), block not in there
            there |= {block} & resident


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

    def begin_anew(self) -> None:
        """Nothing that the slots hold is used again."""
        self.held, self.last_use = [None] * len(self.held), [-1] * len(self.held)

    def _victim(self) -> int:
        def needed_again(index: int) -> int:
            block = self.held[index]
            if block is None:
                return self.n_uses
            positions = self.positions[block]
            later = bisect.bisect_left(positions, self.at)
            return positions[later] if later < len(positions) else self.n_uses

        return max(range(len(self.held)), key=lambda i: (needed_again(i), -self.last_use[i], -i))


def with_activations(plan: Setup, ops: Iterable[Draft], ring_goes_on: bool) -> Iterator[Draft]:
    """Each output in a slot of its own; in one that it shares until it is computed again; or, where it spills, in a ring, until it
    has left and when it is back."""
    group, stride = plan.policy.accumulation_group, plan.policy.boundary_stride
    stays, spilled = {b: i for i, b in enumerate(staying(plan))}, {b: i for i, b in enumerate(plan.policy.spill_blocks)}
    ring, passing = _Ring("activations", len(stays) * group, spill_ring_slots(group)), dict[tuple[int, int], Slot]()

    def at(block: int, m: int) -> Slot | None:
        if block < 0:
            return None
        if block in spilled:
            return passing[block, m]
        place = stays[block] if block in stays else len(stays) + block % stride - 1
        return Slot("activations", place * group + m % group)

    def comes(block: int, m: int) -> Slot | None:
        if block in spilled:
            passing[block, m] = ring.next()
        return at(block, m)

    def on_host(block: int, m: int) -> Slot:
        return Slot("spilled", spilled[block] * group + m % group)

    for (kind, block), of_kind in groupby(ops, key=lambda op: (op.kind, op.block)):
        run = list(of_kind)
        if kind is Kind.BACKWARD and block - 1 in spilled:
            for m in [op.micro_batch or 0 for op in run]:
                yield Draft(Kind.FETCH_ACTIVATION, block - 1, m).uses(spilled=on_host(block - 1, m), y=comes(block - 1, m))
        for op in run:
            m = op.micro_batch or 0
            match kind:
                case Kind.FORWARD | Kind.RECOMPUTE:
                    if kind is Kind.FORWARD and block == 0 and m % group == 0 and not ring_goes_on:
                        ring.begin_anew()
                    yield op.uses(x=at(block - 1, m), y=comes(block, m))
                    if kind is Kind.FORWARD and block in spilled:
                        yield Draft(Kind.OFFLOAD_ACTIVATION, block, m).uses(y=at(block, m), spilled=on_host(block, m))
                case Kind.LOSS:
                    yield op.uses(x=at(block - 1, m))
                case Kind.BACKWARD:
                    yield op.uses(y=at(block, m), x=at(block - 1, m))
                case _:
                    yield op


def with_saved(plan: Setup, ops: Iterable[Draft], ring_goes_on: bool) -> Iterator[Draft]:
    """What a layer saves leaves after its forward, and is back for its backward, through slots that all such layers share."""
    group, place = plan.policy.accumulation_group, {b: i for i, b in enumerate(plan.policy.offload_blocks)}
    ring = _Ring("saved", 0, N_SAVED_SLOTS)
    for op in ops:
        b, m = op.block, op.micro_batch or 0
        if op.kind is Kind.FORWARD and b == 0 and m % group == 0 and not ring_goes_on:
            ring.begin_anew()
        if b not in place or op.kind not in (Kind.FORWARD, Kind.BACKWARD):
            yield op
            continue
        saved, offloaded = ring.next(), Slot("offloaded", place[b] * group + m % group)
        if op.kind is Kind.BACKWARD:
            yield Draft(Kind.FETCH_SAVED, b, m).uses(offloaded=offloaded, saved=saved)
        yield op.uses(saved=saved)
        if op.kind is Kind.FORWARD:
            yield Draft(Kind.OFFLOAD_SAVED, b, m).uses(saved=saved, offloaded=offloaded)


def with_gradients(plan: Setup, ops: Iterable[Draft], rings_go_on: bool) -> Iterator[Draft]:
    """Where each micro-batch's gradient goes on the device, and its way to the host, unless its block is updated on the device."""
    blocks, head, last = plan.workload.blocks, plan.workload.n_layers + 1, plan.semantics.n_micro_batches - 1
    on_device, staging = _Ring("gradients", 0, plan.policy.gradient_slots), _Ring("staging", 0, N_STAGING_SLOTS)
    of_vocabulary, on_host = Slot("gradients", plan.policy.gradient_slots), _host_gradients(plan)
    own = {b: Slot("gradients", plan.policy.gradient_slots + 1 + i) for i, b in enumerate(plan.policy.device_blocks)}
    sum_of, of, is_shared = _sums(plan, of_vocabulary), plan.semantics, plan.semantics.ranks > 1
    out: dict[int, Slot] = {}
    exchanged: list[tuple[Draft, Draft]] = []  # a sum, and its way to the host: after the gather of what is computed meanwhile
    for op in ops:
        b, m = op.block, op.micro_batch
        if op.kind not in (Kind.LOSS, Kind.BACKWARD) or m is None:
            yield op
            continue
        while exchanged and exchanged[0][0].block >= b + n_whole_sums(plan):  # whose sum is begun now
            yield from exchanged.pop(0)
        if op.kind is Kind.LOSS and m % plan.policy.accumulation_group == 0 and not rings_go_on:
            on_device.begin_anew()
            staging.begin_anew()
        if not blocks[b].trained:
            yield op
            continue
        is_layer = blocks[b].kind is BlockKind.LAYER
        if plan.is_apart(b):
            yield op.uses(sum=own[b])
            continue
        if b in own:
            out[b] = own[b]
        elif not is_layer:
            out[b] = of_vocabulary
        elif m == 0 or not plan.reduced:
            out[b] = on_device.next()
        total, *into = sums = [sum_of(b, level) for level in _levels(of, m)]
        is_its_own_sum = not is_layer and vocab_slot_is_sum(plan)
        has_sum = plan.reduced and (last > 0 or b == head or is_its_own_sum or is_shared)
        makes_gradient = not plan.reduced or (m == last and not is_its_own_sum and not is_shared)
        op.uses(sum=total if has_sum else None, gradient=out[b] if makes_gradient else None)
        yield op.uses_all("into", into if has_sum else ())
        if not plan.reduced:
            staged = staging.next() if is_layer else Slot("staging", N_STAGING_SLOTS)
            yield Draft(Kind.OFFLOAD_GRADIENT, b, m).uses(gradient=out[b], arrived=staged)
            to, *into = (Slot("host_gradients", level * len(blocks) + b) for level in _levels(of, m))
            yield Draft(Kind.ACCUMULATE, b, m).uses(staged=staged, arrived=to).uses_all("into", into)
        elif m == last and b not in own:
            offload = Draft(Kind.OFFLOAD_GRADIENT, b).uses(gradient=out[b], arrived=on_host(b))
            if is_shared:
                exchange = Draft(Kind.EXCHANGE, b).uses(sum=sums[-1], received=Slot("received", 0), gradient=out[b])
                exchanged.append((exchange, offload))
            else:
                yield offload
    yield from chain.from_iterable(exchanged)


def _levels(of: Semantics, m: int) -> range:
    """The sum that a micro-batch joins, and those that this one then joins."""
    return range(of.sum_level(m), of.sum_level(m) - of.n_joined(m) - 1, -1)


def _sums(plan: Setup, of_vocabulary: Slot) -> Callable[[int, int], Slot]:
    """The device's slot for a sum of a block's gradients: of a layer's, those that end whole in turn, then the others; after them
    the embedding's and the head's."""
    n_sums, n_whole, head = plan.semantics.n_sums, n_whole_sums(plan), plan.workload.n_layers + 1
    n_of_layers = (n_sums - 1 + n_whole) * sums_layers(plan)

    def sum_of(block: int, level: int) -> Slot:
        if 0 < block < head:
            return Slot("sums", block % n_whole if level == 0 else n_whole - 1 + level)
        if vocab_slot_is_sum(plan):
            return of_vocabulary if level == 0 else Slot("sums", n_of_layers + level - 1)
        return Slot("sums", n_of_layers + level)

    return sum_of


def _host_gradients(plan: Setup) -> Callable[[int], Slot]:
    """The slot for a block's gradient on the host: its own, or with eager updates one of a few that layers share."""
    if not eager_ring(plan):
        return lambda block: Slot("host_gradients", block)
    arena = plan.arena("host_gradients")
    assert arena is not None
    last = len(arena.slot_bytes) - 1
    ring, own = _Ring("host_gradients", 1, last - 1), {0: 0, plan.workload.n_layers + 1: last}
    return lambda block: Slot("host_gradients", own[block]) if block in own else ring.next()


def with_squares(plan: Setup, ops: Iterable[Draft]) -> Iterator[Draft]:
    """The device squares a gradient that is whole there; the sums leave with it, or alone where it stays."""
    place, last = {b: i for i, b in enumerate(plan.squared)}, plan.semantics.n_micro_batches - 1
    for op in ops:
        b = op.block
        stays = b in plan.policy.device_blocks and op.kind in (Kind.LOSS, Kind.BACKWARD) and op.micro_batch == last
        if b not in place or not (stays or op.kind is Kind.OFFLOAD_GRADIENT):
            yield op
            continue
        squares, norm = Slot("squares", place[b]), plan.norm_slot(b)
        if stays:
            yield op
        yield Draft(Kind.SQUARE, b).uses(gradient=op.slot("sum" if plan.is_apart(b) else "gradient"), squares=squares)
        if stays:
            yield Draft(Kind.OFFLOAD_SQUARES, b).uses(squares=squares, norm=norm)
        else:
            yield op.uses(squares=squares, norm=norm)


def with_updates(plan: Setup, ops: Iterable[Draft]) -> Iterator[Draft]:
    """The squares of each gradient that is whole, and the norm of all; updates at once, early on a guess, or after the norm."""
    policy, trained = plan.policy, [b for b, block in enumerate(plan.workload.blocks) if block.trained]
    is_eager, last = policy.update is Update.EAGER, plan.semantics.n_micro_batches - 1
    shadows = {b: Slot("state", len(plan.workload.blocks) + i) for i, b in enumerate(policy.speculate_blocks)}
    arrived: dict[int, Slot] = {}  # by block whose gradient goes to the host
    staying: dict[int, Slot] = {}  # by block whose gradient the device keeps

    def of(kind: Kind, block: int) -> Draft:
        """An op that needs the block's gradient: of a tied weight, the head's part too."""
        return Draft(kind, block).uses(
            arrived=arrived[block], tied=arrived[len(plan.workload.blocks) - 1] if block == 0 and plan.workload.tied else None
        )

    for op in ops:
        yield op
        b = op.block
        match op.kind:
            case Kind.SQUARE if b in policy.device_blocks:
                staying[b] = op.slot("gradient")
                continue
            case Kind.OFFLOAD_GRADIENT if plan.reduced:
                arrived[b] = op.slot("arrived")
            case Kind.ACCUMULATE if op.micro_batch == last:
                arrived[b] = Slot("host_gradients", b)
            case Kind.OFFLOAD_SQUARES:
                pass
            case _:
                continue
        if not plan.squares(b):
            yield of(Kind.NORM, b).uses(norm=plan.norm_slot(b))
        if b == trained[0]:  # whose gradient is the last to be there
            yield Draft(Kind.CLIP, 0).uses_all("norm", map(plan.norm_slot, trained)).uses(clip=plan.clip_slot)
        if is_eager:
            yield of(Kind.UPDATE, b).uses(norm=plan.norm_slot(b), state=Slot("state", b))
        elif b in shadows:
            yield of(Kind.SPECULATE, b).uses(state=Slot("state", b), shadow=shadows[b])
    for b in policy.device_blocks:
        yield Draft(Kind.UPDATE_ON_DEVICE, b).uses(gradient=staying[b], clip=plan.clip_slot, state=plan.state_slot(b))
    if not is_eager:
        for b in trained:  # the order in which the next forward needs them
            if b not in staying:
                kind = Kind.SETTLE if b in shadows else Kind.UPDATE
                yield of(kind, b).uses(clip=plan.clip_slot, state=Slot("state", b), shadow=shadows.get(b))


def with_barrier(plan: Setup, ops: Iterable[Draft]) -> Iterator[Draft]:
    """Under `barrier` the next step's first load waits for this step's last update, and that for those on the device."""
    found = list(ops)
    if plan.policy.update is Update.BARRIER:
        last = found[-1]
        on_device = [op for op in found if op.kind is Kind.UPDATE_ON_DEVICE]
        if on_device and last.kind is not Kind.UPDATE_ON_DEVICE:
            last.after = on_device[-1], 0
        next(op for op in found if op.kind is Kind.LOAD).after = last, 1
    yield from found


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
