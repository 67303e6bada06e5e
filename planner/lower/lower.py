"""Which ops does a policy mean?

First the ops are written down in an order that would be right if they ran one after the other (`_program`). Then the waits
that keep every conflicting pair of that order apart are derived from the slots alone, and those implied by others are left out
(`waits.py`). Overlap is what remains. Of a long step only a few groups of micro-batches are written down, one of which stands for
all in the middle (`fold.py`).
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from runtime.plan import LANE_OF, MAX_REPETITIONS, Kind, Op, Plan, Policy, Semantics, Slot, Update, Wait
from runtime.plan.workload import BlockKind, Model, Workload

from .arenas import N_STAGING_SLOTS, arenas_of, eager_ring, host_slots, refuse_illegal, spill_ring_slots, staying, vocab_slot_is_sum
from .fold import N_SHOWN, fold
from .waits import with_waits

FEWEST_FOLDED_GROUPS = 8  # of micro-batches; a step of fewer is not much longer than what does not repeat of it
FEWEST_FOLDED = 2000  # micro-batches times blocks, each of which is four ops or more: about the plan that simulates in a second
MOST_ALIKE_GROUPS = 4  # after so many at most, weights are to lie where they lay
FOLDED_GROUPS = 3  # that a folded plan has as a rule: the first, one that repeats, the last


def lower(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan that performs `policy`: pure and deterministic. PlanError for a policy that is not legal here.

    What repeats in a long step is said once; a short one is written out.
    """
    if is_long(workload, semantics, policy):
        found = lower_folded(model, workload, semantics, policy, profile)
        if found is not None:
            return found
    return lower_written_out(model, workload, semantics, policy, profile)


def is_long(workload: Workload, semantics: Semantics, policy: Policy) -> bool:
    """Whether a step has so many groups that what repeats is to be said once."""
    n = semantics.n_micro_batches
    is_worth_it = n >= FEWEST_FOLDED_GROUPS * policy.group_micro_batches and n * len(workload.blocks) >= FEWEST_FOLDED
    return is_worth_it and n <= MAX_REPETITIONS


def plan_ops(workload: Workload, semantics: Semantics, policy: Policy) -> int:
    """About how many ops the plan has that computing asks for, counted before it is made. Of a long step the first groups, one
    repetition and the last count."""
    n, group = semantics.n_micro_batches, policy.group_micro_batches
    n_written = min(n, FOLDED_GROUPS * group) if is_long(workload, semantics, policy) else n
    per_micro_batch = 2 if group >= n else 4  # forward, backward, and where the host adds up gradients, offload and accumulate
    per_micro_batch += 1 if policy.boundary_stride > 1 else 0
    n_computed = n_written * (per_micro_batch * len(workload.blocks) + 2 * len(policy.spill_blocks))
    return n_computed + 2 * -(-n_written // group) * len(workload.blocks)


def lower_written_out(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan with every op once a step."""
    frame = _frame(model, workload, semantics, policy, profile)
    program = _program(frame, rings_go_on=True)
    return replace(frame, ops=with_waits(program.ops, program.after))


def lower_folded(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan | None:
    """The plan in which groups of micro-batches that do the same are said once; None when there are too few."""
    frame = _frame(model, workload, semantics, policy, profile)
    group, n_micro_batches = policy.group_micro_batches, semantics.n_micro_batches
    for n_alike in range(1, MOST_ALIKE_GROUPS + 1):
        times, n_before = divmod(-(-n_micro_batches // group) - 1, n_alike)
        if n_before == 0:  # the first group finds every slot empty
            times, n_before = times - 1, n_alike
        if times < N_SHOWN:
            return None
        n_fewer = (times - N_SHOWN) * n_alike * group
        fewer = replace(semantics, batch_size=semantics.batch_size - n_fewer * semantics.micro_batch)
        short = replace(frame, semantics=fewer)
        program = _program(short, rings_go_on=False)
        start, end = program.groups[n_before], program.groups[n_before + n_alike]
        short = replace(short, ops=with_waits(program.ops, program.after))
        found = fold(short, start, end - start, times, n_alike * group)
        if found is not None:
            return replace(frame, ops=found[0], repeat=found[1])
    return None


def _frame(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan without its ops."""
    refuse_illegal(workload, semantics, policy)
    frame = Plan(semantics, policy, model, workload, profile, (), ())
    return replace(frame, arenas=tuple(arenas_of(frame)))


@dataclass(slots=True)
class _Program:
    """Ops in an order that is right when run one after the other, and what they must follow besides slot conflicts."""

    ops: list[Op] = field(default_factory=list)
    after: dict[int, Wait] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)  # where each group of micro-batches begins

    def add(
        self,
        kind: Kind,
        block: int,
        micro_batch: int | None,
        reads: Sequence[Slot],
        writes: Sequence[Slot],
        after: Wait | None = None,
        chunk: int | None = None,
    ) -> None:
        if after is not None:
            self.after[len(self.ops)] = after
        self.ops.append(Op(kind, LANE_OF[kind], block, micro_batch, tuple(reads), tuple(writes), (), chunk))


class _WeightSlots:
    """Which block each weight slot holds, and which slot the next load takes: the one needed last, by Belady's MIN."""

    def __init__(self, n_slots: int, uses: list[int]) -> None:
        self.held: list[int | None] = [None] * n_slots
        self.last_use = [-1] * n_slots
        self.uses = uses
        self.at = 0
        self.positions: dict[int, list[int]] = {}
        for position, block in enumerate(uses):
            self.positions.setdefault(block, []).append(position)

    def use(self, block: int) -> tuple[int, bool]:
        """The slot for the next use, which is of `block`, and whether it must be loaded first."""
        assert self.uses[self.at] == block
        fresh = block not in self.held
        index = self._victim() if fresh else self.held.index(block)
        self.held[index] = block
        self.last_use[index] = self.at
        self.at += 1
        return index, fresh

    def _victim(self) -> int:
        def needed_again(index: int) -> int:
            block = self.held[index]
            if block is None:
                return len(self.uses)
            positions = self.positions[block]
            later = bisect.bisect_left(positions, self.at)
            return positions[later] if later < len(positions) else len(self.uses)

        return max(range(len(self.held)), key=lambda i: (needed_again(i), -self.last_use[i], -i))


def _program(plan: Plan, rings_go_on: bool) -> _Program:
    """All ops of one step, in an order that is right one after the other. Rings of slots go on from one group of micro-batches to
    the next, or each group begins anew, so that all take the same slots."""
    n_layers, head = plan.workload.n_layers, plan.workload.n_layers + 1
    n_micro_batches, group = plan.semantics.n_micro_batches, plan.policy.group_micro_batches
    groups = [range(m, min(m + group, n_micro_batches)) for m in range(0, n_micro_batches, group)]
    program = _Program()
    weights, boundaries, gradients = _Weights(plan, program, len(groups)), _Boundaries(plan, program), _Gradients(plan, program)

    def forward(kind: Kind, b: int, micro_batches: range) -> None:
        held = weights.of(b)
        for m in micro_batches:
            below = [boundaries.at(b - 1, m)] if b else []
            program.add(kind, b, m, [held, *below], [boundaries.write(b, m)])
            boundaries.computed(b, m)

    for micro_batches in groups:
        program.groups.append(len(program.ops))
        if not rings_go_on:
            boundaries.n_in_ring = gradients.n_layer_slots = gradients.n_staged = 0
        for b in range(n_layers + 1):
            forward(Kind.FORWARD, b, micro_batches)
        held = weights.of(head)
        for m in micro_batches:
            reads, writes = gradients.of(head, m)
            last = boundaries.at(n_layers, m)
            program.add(Kind.LOSS, head, m, [held, last, *reads], [last, *writes])
            gradients.computed(head, m)
        for kind, b in _backward_walk(plan):
            if kind is Kind.RECOMPUTE:
                forward(kind, b, micro_batches)
                continue
            held = weights.of(b)
            for m in micro_batches:
                boundaries.fetch(b - 1, m)
            for m in micro_batches:
                reads, writes = gradients.of(b, m)
                into = boundaries.at(b - 1, m)
                program.add(Kind.BACKWARD, b, m, [held, boundaries.at(b, m), into, *reads], [into, *writes])
                gradients.computed(b, m)
        for m in micro_batches:
            reads, writes = gradients.of(0, m)
            program.add(Kind.BACKWARD, 0, m, [boundaries.at(0, m), *reads], writes)
            gradients.computed(0, m)
    gradients.finish()
    return program


def _backward_walk(plan: Plan) -> Iterator[tuple[Kind, int]]:
    """Layers from the last to the first, each backward; before a run of layers whose inputs did not stay, their recompute."""
    stride, n_layers = plan.policy.boundary_stride, plan.workload.n_layers
    for below in range((n_layers - 1) // stride * stride, -1, -stride):
        top = min(below + stride, n_layers)
        yield from ((Kind.RECOMPUTE, b) for b in range(below + 1, top))
        yield from ((Kind.BACKWARD, b) for b in range(top, below, -1))


class _Weights:
    """Where each block's weights are on the device, and the loads that bring them there."""

    def __init__(self, plan: Plan, program: _Program, n_groups: int) -> None:
        self.plan, self.program = plan, program
        self.numbers = host_slots(plan)
        self.resident_loaded: set[int] = set()
        walk = [*range(1, plan.workload.n_layers + 1), *(b for _, b in _backward_walk(plan))]
        streamed = [b for b in walk if b not in set(plan.policy.resident_blocks)]
        self.slots = _WeightSlots(plan.policy.prefetch_depth + 1, streamed * n_groups)

    def of(self, block: int) -> Slot:
        """The slot that holds the block's weights, loaded before if need be."""
        resident = self.plan.policy.resident_blocks
        if block in resident:
            slot, fresh = Slot("resident_weights", resident.index(block)), block not in self.resident_loaded
            self.resident_loaded.add(block)
        elif self.plan.workload.blocks[block].kind is not BlockKind.LAYER:
            slot, fresh = Slot("vocab_weights", 0), True
        else:
            index, fresh = self.slots.use(block)
            slot = Slot("weights", index)
        if fresh:
            self._load(block, slot)
        return slot

    def _load(self, block: int, to: Slot) -> None:
        arena, numbers = self.plan.weights_arena, self.numbers[block]
        tied = [Slot(arena, 0)] if block and self.plan.workload.blocks[block].tied else []
        for chunk, number in enumerate(numbers):
            self.program.add(Kind.LOAD, block, None, [Slot(arena, number), *tied], [to], chunk=_named(chunk, numbers))


def _named(chunk: int, chunks: Sequence[object]) -> int | None:
    """The chunk's number, unless it is the only one."""
    return chunk if len(chunks) > 1 else None


class _Boundaries:
    """Where each block's output lies: in a slot of its own; in one it shares until it is computed again; or, when it spills, in a
    ring, until it leaves and when it is back."""

    def __init__(self, plan: Plan, program: _Program) -> None:
        self.program = program
        self.group, self.stride = plan.policy.group_micro_batches, plan.policy.boundary_stride
        self.spilled = {b: i for i, b in enumerate(plan.policy.spill_blocks)}
        self.place = {b: i for i, b in enumerate(staying(plan))}
        self.n_in_ring = 0
        self.in_ring: dict[tuple[int, int], Slot] = {}

    def at(self, block: int, m: int) -> Slot:
        """Where it lies now."""
        if block in self.spilled:
            return self.in_ring[block, m]
        place = self.place.get(block)
        if place is None:
            place = len(self.place) + block % self.stride - 1
        return Slot("boundaries", place * self.group + m % self.group)

    def write(self, block: int, m: int) -> Slot:
        """Where it is to be put next: the ring moves on."""
        if block in self.spilled:
            index = self.n_in_ring % spill_ring_slots(self.group)
            self.in_ring[block, m] = Slot("boundaries", len(self.place) * self.group + index)
            self.n_in_ring += 1
        return self.at(block, m)

    def computed(self, block: int, m: int) -> None:
        """The forward of (block, m) is the program's last op: let its output leave."""
        if block in self.spilled:
            self.program.add(Kind.SPILL, block, m, [self.at(block, m)], [self._spilled(block, m)])

    def fetch(self, block: int, m: int) -> None:
        """Bring it back, if it left."""
        if block in self.spilled:
            self.program.add(Kind.FETCH, block, m, [self._spilled(block, m)], [self.write(block, m)])

    def _spilled(self, block: int, m: int) -> Slot:
        return Slot("spilled", self.spilled[block] * self.group + m % self.group)


class _Gradients:
    """The way of a gradient: where each micro-batch's backward puts it, when it leaves, and the host's work on it."""

    def __init__(self, plan: Plan, program: _Program) -> None:
        self.plan, self.program = plan, program
        self.head = len(plan.workload.blocks) - 1
        self.numbers = host_slots(plan)
        self.shadows = _shadow_slots(plan, self.numbers)
        self.squares = {b: Slot("squares", i) for i, b in enumerate(plan.policy.square_blocks)}
        self.n_layer_slots = 0  # gradient slots handed out to layers so far
        self.n_staged = 0
        host = next(a for a in plan.arenas if a.name == "host_gradients")
        self.last = Slot("host_gradients", len(host.slot_bytes) - 1)
        self.ring = cycle([Slot("host_gradients", i) for i in range(1, self.last.index)])
        self.device_slot: dict[int, Slot] = {}  # of the block whose gradient was computed last
        self.waiting: list[int] = []  # layers whose gradient is complete but leaves late
        self.arrived: dict[int, list[Slot]] = {}  # host slots of complete gradients, one per chunk

    def of(self, block: int, m: int) -> tuple[list[Slot], list[Slot]]:
        """Gradient slots that the backward of (block, m) reads and writes."""
        plan = self.plan
        first, last = m == 0, m == plan.semantics.n_micro_batches - 1
        is_layer = plan.workload.blocks[block].kind is BlockKind.LAYER
        if is_layer:
            if not plan.reduced or first:
                self.device_slot[block] = Slot("gradients", self.n_layer_slots % plan.policy.gradient_slots)
                self.n_layer_slots += 1
        else:
            self.device_slot[block] = Slot("vocab_gradients", 0)
        out = self.device_slot[block]
        if not plan.reduced:
            return [], [out]
        if not is_layer and vocab_slot_is_sum(plan):
            return ([] if first else [out]), [out]
        if first and last and block != self.head:
            return [], [out]
        total = Slot("sums" if is_layer else "vocab_sums", 0)
        return ([] if first else [total]), ([total, out] if last else [total])

    def computed(self, block: int, m: int) -> None:
        """The backward of (block, m) is the program's last op: let gradients leave as the policy says."""
        plan = self.plan
        last = m == plan.semantics.n_micro_batches - 1
        if not plan.reduced:
            self._offload_unreduced(block, m, last)
        elif last and plan.workload.blocks[block].kind is BlockKind.LAYER:
            backward = Wait(len(self.program.ops) - 1)
            self._square(block)
            self.waiting.append(block)
            while self.waiting and self.waiting[0] - plan.policy.offload_late_blocks >= block:
                self._offload(self.waiting.pop(0), backward)
        elif last:
            self._square(block)
            while self.waiting:  # the first layers have no further layer to wait for
                self._offload(self.waiting.pop(0))
            self._offload(block)

    def _square(self, block: int) -> None:
        if block in self.squares:
            self.program.add(Kind.SQUARE, block, None, [self.device_slot[block]], [self.squares[block]])

    def _offload(self, block: int, after: Wait | None = None) -> None:
        slots = [Slot("host_gradients", number) for number in self.numbers[block]]
        if eager_ring(self.plan) and block:
            slots = [self.last] if block == self.head else [next(self.ring) for _ in slots]
        late = after if self.plan.policy.offload_late_blocks else None
        self.arrived[block] = slots
        for chunk, to in enumerate(slots):
            name = _named(chunk, slots)
            first = chunk == 0
            reads = [self.device_slot[block], *([self.squares[block]] if first and block in self.squares else [])]
            writes = [to, *(self._sums_of(block) if first else [])]
            self.program.add(Kind.OFFLOAD, block, None, reads, writes, late if first else None, name)
            self._complete(block, chunk)

    def _offload_unreduced(self, block: int, m: int, last: bool) -> None:
        if self.plan.workload.blocks[block].kind is BlockKind.LAYER:
            staging = Slot("staging", self.n_staged % N_STAGING_SLOTS)
            self.n_staged += 1
        else:
            staging = Slot("staging", N_STAGING_SLOTS)
        to = Slot("host_gradients", block)
        self.program.add(Kind.OFFLOAD, block, m, [self.device_slot[block]], [staging])
        self.program.add(Kind.ACCUMULATE, block, m, [staging, to], [to])
        if last:
            self.arrived[block] = [to]
            self._complete(block, 0)

    def _whole(self, block: int, chunk: int) -> list[Slot]:
        """The gradient's slots; a tied weight's gradient is whole when the embedding's part has come too."""
        tied = self.arrived[self.head] if block == 0 and self.plan.workload.tied else []
        return [self.arrived[block][chunk], *tied]

    def _complete(self, block: int, chunk: int) -> None:
        """The chunk's gradient is whole on the host."""
        norm, name = Slot("norm", 0), _named(chunk, self.numbers[block])
        if block == 0 or block not in self.squares:
            own = [] if block in self.squares else self._whole(block, chunk)
            sums = [slot for b in self.squares for slot in self._sums_of(b)] if block == 0 else []
            self.program.add(Kind.NORM, block, None, [*own, *sums, norm], [norm], chunk=name)
        if self.plan.policy.update is Update.EAGER:
            self._update(block, chunk)
        elif block in self.shadows:
            shadow = self.shadows[block][chunk]
            state = self._state(self.numbers[block][chunk])
            self.program.add(Kind.SPECULATE, block, None, [*self._whole(block, chunk), *state], [shadow], chunk=name)

    def _sums_of(self, block: int) -> list[Slot]:
        """Where on the host the sums of the block's squares arrive, if the device makes them."""
        return [Slot("host_squares", self.squares[block].index)] if block in self.squares else []

    def _state(self, number: int) -> list[Slot]:
        """What the host has learned: master (as it is stored) and moments."""
        master = ("host_weights", "remainders") if self.plan.policy.storage == "split" else ("masters",)
        return [Slot(arena, number) for arena in (*master, "moments")]

    def _update(self, block: int, chunk: int) -> None:
        plan, number = self.plan, self.numbers[block][chunk]
        state = self._state(number)
        norm = self._sums_of(block) if plan.policy.update is Update.EAGER else [Slot("norm", 0)]
        copied = plan.weights_arena == "host_weights" and plan.policy.storage == "mirrored"
        copy = [Slot("host_weights", number)] if copied else []
        shadow = [self.shadows[block][chunk]] if block in self.shadows else []
        kind = Kind.SETTLE if shadow else Kind.UPDATE
        reads, writes = [*self._whole(block, chunk), *norm, *state, *shadow], [*state, *copy, *shadow]
        self.program.add(kind, block, None, reads, writes, chunk=_named(chunk, self.numbers[block]))

    def finish(self) -> None:
        """After backward: the updates that wait for the global norm, in the order in which the next forward needs them."""
        if self.plan.policy.update is Update.EAGER:
            return
        for block in range(self.head + 1):
            for chunk in range(len(self.numbers[block])):
                self._update(block, chunk)
        if self.plan.policy.update is Update.BARRIER:
            first_load = next(i for i, op in enumerate(self.program.ops) if op.kind is Kind.LOAD)
            self.program.after[first_load] = Wait(len(self.program.ops) - 1, distance=1)


def _shadow_slots(plan: Plan, numbers: list[range]) -> dict[int, list[Slot]]:
    """The shadow of each chunk of each block that is updated before the norm is known."""
    slots: dict[int, list[Slot]] = {}
    first = 0
    for block in plan.policy.speculate_blocks:
        slots[block] = [Slot("shadows", first + i) for i in range(len(numbers[block]))]
        first += len(numbers[block])
    return slots
