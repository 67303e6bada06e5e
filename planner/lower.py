"""Which ops does a policy mean?

First the ops are written down in an order that would be right if they ran one after the other (`_program`). Then the waits
that keep every conflicting pair of that order apart are derived from the slots alone, and those implied by others are left out
(`_with_waits`). Overlap is what remains.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.errors import PlanError
from runtime.plan import LANE_OF, Arena, Kind, Lane, Op, Place, Plan, Policy, Semantics, Slot, Update, Wait
from runtime.workload import ITEM_BYTES, BlockKind, Model, Workload

N_STAGING_SLOTS = 2  # host slots for unreduced gradients: one is filled while the other is added
N_EAGER_SLOTS = 2  # host slots for gradients of layers when updates are eager: one is filled while the other is used
SPILL_RING_GROUPS = 3  # boundaries of a spilling model on the device at a time: one computed, one leaving or coming, one in use
BOUNDARY_ALIGN_BYTES = 256
REMAINDER_BYTES = 2  # what a bf16 weight lacks of its fp32 master


def lower(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan that performs `policy`: pure and deterministic. PlanError for a policy that is not legal here."""
    refuse_illegal(workload, semantics, policy)
    frame = Plan(semantics, policy, model, workload, profile, (), ())
    frame = replace(frame, arenas=tuple(arenas_of(frame)))
    program = _program(frame)
    return replace(frame, ops=_with_waits(program))


def refuse_illegal(workload: Workload, semantics: Semantics, policy: Policy) -> None:
    if semantics.compute_dtype == "fp32" and semantics.master_dtype == "bf16":
        raise PlanError("fp32 compute from a bf16 master gains nothing; use --compute bf16 or --master fp32")
    if policy.update is Update.EAGER and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError("eager updates need --clip-norm none and --on-nonfinite stop: the norm is known only after backward")
    if policy.group_micro_batches > semantics.n_micro_batches:
        raise PlanError(f"a group of {policy.group_micro_batches} micro-batches, but a step has {semantics.n_micro_batches}")
    if policy.gradient_slots <= policy.offload_late_blocks:
        raise PlanError(
            f"gradients leave {policy.offload_late_blocks} blocks late, so {policy.gradient_slots} gradient slots are too few"
        )
    if policy.offload_late_blocks and policy.group_micro_batches < semantics.n_micro_batches:
        raise PlanError("gradients that are summed on the host leave at once; late ones need all micro-batches in one group")
    n_layers = workload.n_layers
    for name, blocks, legal in (
        ("keep_blocks", policy.keep_blocks, range(1, n_layers + 1)),
        ("resident_blocks", policy.resident_blocks, range(n_layers + 2)),
        ("spill_blocks", policy.spill_blocks, range(n_layers)),
    ):
        if any(b not in legal for b in blocks) or list(blocks) != sorted(set(blocks)):
            raise PlanError(f"{name} must be blocks {legal.start}..{legal.stop - 1} in ascending order, each once")
    if any(b - 1 in policy.spill_blocks for b in policy.keep_blocks):
        raise PlanError("a block that keeps its activations keeps its input too: the block before it cannot spill")
    if policy.storage == "split" and (semantics.compute_dtype, semantics.master_dtype) != ("bf16", "fp32"):
        raise PlanError(
            "split storage cuts an fp32 master into a bf16 weight and the rest; it needs bf16 compute and an fp32 master"
        )


def arenas_of(plan: Plan) -> Iterator[Arena]:
    """Every arena of the plan, with exact slot sizes."""
    blocks, policy, semantics = plan.workload.blocks, plan.policy, plan.semantics
    layers, vocab = blocks[1:-1], (blocks[0], blocks[-1])
    item = ITEM_BYTES[semantics.compute_dtype]
    layer_elements = max(b.slot_elements for b in layers)
    vocab_elements = max(b.slot_elements for b in vocab)
    group = policy.group_micro_batches
    aligned = [-(-b.boundary_bytes // BOUNDARY_ALIGN_BYTES) * BOUNDARY_ALIGN_BYTES for b in blocks[:-1]]
    spilling = [aligned[b] for b in policy.spill_blocks for _ in range(group)]
    boundary_bytes = [n_bytes for b, n_bytes in enumerate(aligned) if b not in policy.spill_blocks for _ in range(group)]
    boundary_bytes += [max(spilling)] * SPILL_RING_GROUPS * group if spilling else []
    yield Arena("weights", Place.DEVICE, (layer_elements * item,) * (policy.prefetch_depth + 1))
    yield Arena("vocab_weights", Place.DEVICE, (vocab_elements * item,))
    if policy.resident_blocks:
        yield Arena("resident_weights", Place.DEVICE, tuple(blocks[b].slot_elements * item for b in policy.resident_blocks))
    yield Arena("boundaries", Place.DEVICE, tuple(boundary_bytes))
    yield Arena("gradients", Place.DEVICE, (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * policy.gradient_slots)
    yield Arena("vocab_gradients", Place.DEVICE, (vocab_elements * ITEM_BYTES[plan.gradient_dtype(0)],))
    if plan.reduced and semantics.n_micro_batches > 1:
        yield Arena("sums", Place.DEVICE, (layer_elements * 4,))
    if not _vocab_slot_is_sum(plan):
        yield Arena("vocab_sums", Place.DEVICE, (vocab_elements * 4,))

    if policy.storage == "split":
        yield Arena("remainders", Place.HOST, tuple(b.host_elements * REMAINDER_BYTES for b in blocks))
    else:
        yield Arena("masters", Place.HOST, tuple(b.host_elements * ITEM_BYTES[semantics.master_dtype] for b in blocks))
    yield Arena("moments", Place.HOST, tuple(b.host_elements * 8 for b in blocks))  # two fp32 moments
    if plan.weights_arena == "host_weights":
        yield Arena("host_weights", Place.HOST, tuple(b.host_elements * item for b in blocks))
    gradient_bytes = [b.slot_elements * ITEM_BYTES[plan.host_gradient_dtype(i)] for i, b in enumerate(blocks)]
    if _eager_ring(plan):
        ring = (max(gradient_bytes[1:-1]),) * min(N_EAGER_SLOTS, len(layers))
        yield Arena("host_gradients", Place.HOST, (gradient_bytes[0], *ring, gradient_bytes[-1]))
    else:
        yield Arena("host_gradients", Place.HOST, tuple(gradient_bytes))
    if not plan.reduced:
        staging = (layer_elements * ITEM_BYTES[plan.gradient_dtype(1)],) * N_STAGING_SLOTS
        yield Arena("staging", Place.HOST, (*staging, vocab_elements * 4))
    if spilling:
        yield Arena("spilled", Place.HOST, tuple(spilling))
    yield Arena("norm", Place.HOST, (8 * sum(len(b.parameters) for b in blocks),))  # one fp64 sum of squares per tensor


def _vocab_slot_is_sum(plan: Plan) -> bool:
    """Whether the vocabulary gradient slot is fp32 and holds the running sum itself."""
    return plan.workload.tied or not plan.reduced


def _eager_ring(plan: Plan) -> bool:
    return plan.policy.update is Update.EAGER and plan.reduced


@dataclass(slots=True)
class _Program:
    """Ops in an order that is right when run one after the other, and what they must follow besides slot conflicts."""

    ops: list[Op] = field(default_factory=list)
    after: dict[int, Wait] = field(default_factory=dict)

    def add(
        self,
        kind: Kind,
        block: int,
        micro_batch: int | None,
        reads: list[Slot],
        writes: list[Slot],
        after: Wait | None = None,
    ) -> int:
        if after is not None:
            self.after[len(self.ops)] = after
        self.ops.append(Op(kind, LANE_OF[kind], block, micro_batch, tuple(reads), tuple(writes)))
        return len(self.ops) - 1


class _WeightSlots:
    """Which block each weight slot holds, and which slot the next load takes: the one whose content is needed last."""

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


def _program(plan: Plan) -> _Program:
    """All ops of one step, in an order that is right one after the other."""
    semantics, policy = plan.semantics, plan.policy
    n_layers, head = plan.workload.n_layers, plan.workload.n_layers + 1
    group = policy.group_micro_batches
    groups = [range(m, min(m + group, semantics.n_micro_batches)) for m in range(0, semantics.n_micro_batches, group)]
    layers = range(1, n_layers + 1)
    streamed = [b for b in layers if b not in policy.resident_blocks]
    slots = _WeightSlots(policy.prefetch_depth + 1, [b for _ in groups for b in (*streamed, *reversed(streamed))])
    resident: dict[int, Slot] = {}
    program = _Program()
    gradients, boundaries = _Gradients(plan, program), _Boundaries(plan, program)

    def load(block: int, to: Slot) -> Slot:
        sources = [Slot(plan.weights_arena, b) for b in ((block, 0) if block and plan.workload.blocks[block].tied else (block,))]
        program.add(Kind.LOAD, block, None, sources, [to])
        return to

    def weights_of(block: int) -> Slot:
        """The slot that holds the block's weights, loaded before if need be."""
        if block in policy.resident_blocks:
            if block not in resident:
                resident[block] = load(block, Slot("resident_weights", policy.resident_blocks.index(block)))
            return resident[block]
        if block not in layers:
            return load(block, Slot("vocab_weights", 0))
        index, fresh = slots.use(block)
        return load(block, Slot("weights", index)) if fresh else Slot("weights", index)

    for micro_batches in groups:
        weights = weights_of(0)
        for m in micro_batches:
            program.add(Kind.FORWARD, 0, m, [weights], [boundaries.write(0, m)])
            boundaries.computed(0, m)
        for b in layers:
            weights = weights_of(b)
            for m in micro_batches:
                program.add(Kind.FORWARD, b, m, [weights, boundaries.at(b - 1, m)], [boundaries.write(b, m)])
                boundaries.computed(b, m)
        weights = weights_of(head)
        for m in micro_batches:
            reads, writes = gradients.of(head, m)
            last = boundaries.at(n_layers, m)
            program.add(Kind.LOSS, head, m, [weights, last, *reads], [last, *writes])
            gradients.computed(head, m)
        for b in reversed(layers):
            weights = weights_of(b)
            for m in micro_batches:
                boundaries.fetch(b - 1, m)
            for m in micro_batches:
                reads, writes = gradients.of(b, m)
                into = boundaries.at(b - 1, m)
                program.add(Kind.BACKWARD, b, m, [weights, boundaries.at(b, m), into, *reads], [into, *writes])
                gradients.computed(b, m)
        for m in micro_batches:
            reads, writes = gradients.of(0, m)
            program.add(Kind.BACKWARD, 0, m, [boundaries.at(0, m), *reads], writes)
            gradients.computed(0, m)
    gradients.finish()
    return program


class _Boundaries:
    """Where each block's output lies: in a slot of its own, or, when it spills, in a ring, until it leaves and when it is back."""

    def __init__(self, plan: Plan, program: _Program) -> None:
        self.program, self.spill_blocks = program, plan.policy.spill_blocks
        self.group = plan.policy.group_micro_batches
        staying = [b for b in range(plan.workload.n_layers + 1) if b not in self.spill_blocks]
        self.place = {b: i for i, b in enumerate(staying)}
        self.n_in_ring = 0
        self.in_ring: dict[tuple[int, int], Slot] = {}

    def at(self, block: int, m: int) -> Slot:
        """Where it lies now."""
        if block in self.spill_blocks:
            return self.in_ring[block, m]
        return Slot("boundaries", self.place[block] * self.group + m % self.group)

    def write(self, block: int, m: int) -> Slot:
        """Where it is to be put next: the ring moves on."""
        if block in self.spill_blocks:
            index = self.n_in_ring % (SPILL_RING_GROUPS * self.group)
            self.in_ring[block, m] = Slot("boundaries", len(self.place) * self.group + index)
            self.n_in_ring += 1
        return self.at(block, m)

    def computed(self, block: int, m: int) -> None:
        """The forward of (block, m) is the program's last op: let its output leave."""
        if block in self.spill_blocks:
            self.program.add(Kind.SPILL, block, m, [self.at(block, m)], [self._spilled(block, m)])

    def fetch(self, block: int, m: int) -> None:
        """Bring it back, if it left."""
        if block in self.spill_blocks:
            self.program.add(Kind.FETCH, block, m, [self._spilled(block, m)], [self.write(block, m)])

    def _spilled(self, block: int, m: int) -> Slot:
        return Slot("spilled", self.spill_blocks.index(block) * self.group + m % self.group)


class _Gradients:
    """The way of a gradient: where each micro-batch's backward puts it, when it leaves, and the host's work on it."""

    def __init__(self, plan: Plan, program: _Program) -> None:
        self.plan, self.program = plan, program
        self.head = len(plan.workload.blocks) - 1
        self.n_layer_slots = 0  # gradient slots handed out to layers so far
        self.n_staged = 0
        self.n_ring = 0
        self.device_slot: dict[int, Slot] = {}  # of the block whose gradient was computed last
        self.waiting: list[int] = []  # layers whose gradient is complete but leaves late
        self.arrived: dict[int, list[Slot]] = {}  # host slots of complete gradients

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
        if not is_layer and _vocab_slot_is_sum(plan):
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
            self.waiting.append(block)
            while self.waiting and self.waiting[0] - plan.policy.offload_late_blocks >= block:
                self._offload(self.waiting.pop(0), Wait(len(self.program.ops) - 1))
        elif last:
            while self.waiting:  # the first layers have no further layer to wait for
                self._offload(self.waiting.pop(0))
            self._offload(block)

    def _offload(self, block: int, after: Wait | None = None) -> None:
        to = Slot("host_gradients", block)
        if _eager_ring(self.plan):
            n_ring = len(self._host_gradients.slot_bytes) - 2
            if self.plan.workload.blocks[block].kind is BlockKind.LAYER:
                to = Slot("host_gradients", 1 + self.n_ring % n_ring)
                self.n_ring += 1
            elif block == self.head:
                to = Slot("host_gradients", n_ring + 1)
        late = after if self.plan.policy.offload_late_blocks else None
        self.program.add(Kind.OFFLOAD, block, None, [self.device_slot[block]], [to], late)
        self._complete(block, to)

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
            self._complete(block, to)

    @property
    def _host_gradients(self) -> Arena:
        arena = self.plan.arena("host_gradients")
        assert arena is not None
        return arena

    def _complete(self, block: int, where: Slot) -> None:
        """The block's own gradient is whole on the host; a tied weight's is when the embedding's has come too."""
        own = [where]
        if block == 0 and self.plan.workload.tied:
            own.append(self.arrived[self.head][0])
        self.arrived[block] = own
        norm = Slot("norm", 0)
        self.program.add(Kind.NORM, block, None, [*own, norm], [norm])
        if self.plan.policy.update is Update.EAGER:
            self._update(block)

    def _update(self, block: int) -> None:
        plan = self.plan
        split = plan.policy.storage == "split"
        master = [Slot("host_weights", block), Slot("remainders", block)] if split else [Slot("masters", block)]
        state = [*master, Slot("moments", block)]
        norm = [] if plan.policy.update is Update.EAGER else [Slot("norm", 0)]
        copy = [Slot("host_weights", block)] if plan.weights_arena == "host_weights" and not split else []
        self.program.add(Kind.UPDATE, block, None, [*self.arrived[block], *norm, *state], [*state, *copy])

    def finish(self) -> None:
        """After backward: the updates that wait for the global norm, in the order in which the next forward needs them."""
        if self.plan.policy.update is Update.EAGER:
            return
        for block in range(self.head + 1):
            self._update(block)
        if self.plan.policy.update is Update.BARRIER:
            first_load = next(i for i, op in enumerate(self.program.ops) if op.kind is Kind.LOAD)
            self.program.after[first_load] = Wait(len(self.program.ops) - 1, distance=1)


Clock = dict[Lane, int]  # per lane: the latest op, counted over all steps, that is known to be done


def _with_waits(program: _Program) -> tuple[Op, ...]:
    """The ops with the fewest waits that order every two uses of a slot, one of them a write, as the program does.

    Three steps are walked in program order; the waits of the third are those of every step (tests check that the second agrees).
    """
    ops, n = program.ops, len(program.ops)
    writer: dict[Slot, int] = {}
    readers: dict[Slot, list[int]] = {}
    done_after: dict[int, Clock] = {}  # what is known to be done once op number i (over all steps) is
    last_on_lane: dict[Lane, int] = {}
    waits: tuple[Wait, ...] = ()
    result: list[Op] = []
    for at in range(3 * n):
        step, op = at // n, ops[at % n]
        needed: set[int] = set()
        for slot in op.reads:
            needed.update((writer[slot],) if slot in writer else ())
            readers.setdefault(slot, []).append(at)
        for slot in op.writes:
            needed.update((writer[slot],) if slot in writer else ())
            needed.update(r for r in readers.get(slot, ()) if r != at)
            writer[slot], readers[slot] = at, []
        extra = program.after.get(at % n)
        if extra is not None and (step - extra.distance) >= 0:
            needed.add((step - extra.distance) * n + extra.op)
        known = dict(done_after[last_on_lane[op.lane]]) if op.lane in last_on_lane else {}
        kept: list[int] = []
        for target in sorted(needed, reverse=True):  # a later op may imply an earlier one, never the other way round
            if known.get(ops[target % n].lane, -1) >= target:
                continue
            kept.append(target)
            for lane, i in done_after[target].items():
                known[lane] = max(known.get(lane, -1), i)
        known[op.lane] = at
        done_after[at] = known
        last_on_lane[op.lane] = at
        waits = tuple(Wait(t % n, step - t // n) for t in sorted(kept, key=lambda t: (step - t // n, t % n)))
        if step == 2:
            assert all(w.distance in (0, 1) for w in waits), f"{op.name} depends on a step before the previous one"
            result.append(replace(op, waits=waits))
    return tuple(result)
