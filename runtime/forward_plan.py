"""Forward plans: the ops of a forward without a backward, over the arenas of a training plan.

Weights come as in training, into the same slots, and each block computes all micro-batches of a group before the next: no gradient
is made, so of each micro-batch only the input and the output of the block at work need a slot of `activations`, and a group is as
large as half of these slots. The head's forward has no output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from runtime.plan.ops import Kind, Lane, Op, Slot, Wait
from runtime.plan.plan import Plan


def most_micro_batches(plan: Plan) -> int:
    """How many micro-batches a group of a forward plan can have over the arenas of a training plan."""
    arena = plan.arena("activations")
    assert arena is not None
    return len(arena.slot_bytes) // 2


def forward_plan(plan: Plan, n_micro_batches: int, seq_len: int | None = None) -> Plan:
    """The forward of some micro-batches over the arenas of a training plan; of shorter sequences, if `seq_len` says so."""
    semantics = plan.semantics
    seq_len = seq_len or semantics.seq_len
    assert 0 < seq_len <= semantics.seq_len
    group = min(n_micro_batches, most_micro_batches(plan))
    groups = 1 if semantics.ranks == 1 else semantics.sum_groups  # by which the ranks' parts of weights are cut
    semantics = replace(semantics, batch_size=n_micro_batches * semantics.micro_batch, seq_len=seq_len, sum_groups=groups)
    program = list(_program(plan, n_micro_batches, group))
    ops = tuple(replace(op, waits=waits) for op, waits in zip(program, _waits(program), strict=True))
    workload = replace(plan.workload, smaller=())  # all micro-batches are whole
    return replace(
        plan, semantics=semantics, workload=workload, policy=replace(plan.policy, accumulation_group=group), ops=ops, repeat=None
    )


def _program(plan: Plan, n_micro_batches: int, group: int) -> Iterator[Op]:
    """All ops of one step, in an order that is right one after the other."""
    blocks, resident = range(len(plan.workload.blocks)), plan.policy.resident_blocks
    head, streaming = blocks[-1], {b for b in blocks[1:-1] if b not in resident}
    in_turn = cycle([Slot("weights", i) for i in range(min(plan.n_streaming, len(streaming)))])
    packed_in_turn = cycle([Slot("packed", i) for i in range(min(plan.packed_slots, sum(map(plan.unpacks, blocks))))])
    held: dict[Slot, int] = {}  # what the weight slots hold
    for first in range(0, n_micro_batches, group):
        for b in blocks:
            slot = next(in_turn) if b in streaming else plan.weights_slot(b)
            if held.get(slot) != b:
                held[slot] = b
                tied = [("tied", Slot("state", 0))] if b and plan.workload.blocks[b].tied else []
                state, to = [("state", plan.source_slot(b)), *tied], next(packed_in_turn) if plan.unpacks(b) else slot
                yield Op(Kind.LOAD, b, None, (*state, ("weights", to)))
                if plan.semantics.ranks > 1:
                    yield Op(Kind.GATHER, b, None, (*state, ("weights", slot)))
                if plan.unpacks(b):
                    yield Op(Kind.DEQUANTISE, b, None, (("packed", to), ("weights", slot)))
            for m in range(first, min(first + group, n_micro_batches)):
                x, y = (Slot("activations", 2 * (m - first) + parity % 2) for parity in (b - 1, b))
                reads = [("weights", slot), *([("trained", plan.state_slot(b))] if plan.is_apart(b) else [])]
                reads += [("x", x)] if b else []
                yield Op(Kind.FORWARD, b, m, (*reads, *([("y", y)] if b != head else [])))


def _waits(ops: Sequence[Op]) -> Iterator[tuple[Wait, ...]]:
    """For each op the last one of each other lane that uses one of its slots, one of the two writing it, before it.

    That is enough: what it does not wait for comes before that op, or is on its own lane. What an earlier op of its lane waited for
    is left out. The second of two steps stands for all that follow the first.
    """
    n, lanes = len(ops), sorted({op.lane for op in ops})
    used: dict[tuple[Slot, Lane, bool], int] = {}  # the last op that did: slot, lane, whether it wrote
    known_after: list[dict[Lane, int]] = []  # once that op is done, the last op of each lane that is known to be done
    last_of: dict[Lane, int] = {}
    for at in range(2 * n):
        op, kept = ops[at % n], list[int]()
        known = dict(known_after[last_of[op.lane]]) if op.lane in last_of else dict.fromkeys(lanes, -1)
        needed = [max(used.get((slot, other, True), -1) for _, slot in op.operands) for other in lanes if other is not op.lane]
        needed += [used.get((slot, other, False), -1) for other in lanes if other is not op.lane for slot in op.writes]
        for target in sorted({*needed} - {-1}, reverse=True):  # a later op may imply an earlier one
            if known[ops[target % n].lane] < target:
                kept.append(target)
                known = {lane: max(known[lane], known_after[target][lane]) for lane in lanes}
        known[op.lane] = last_of[op.lane] = at
        known_after.append(known)
        used |= {(slot, op.lane, slot in op.writes): at for _, slot in op.operands}
        if at >= n:
            waits = (Wait(target % n, 1 - target // n) for target in kept)
            yield tuple(sorted(waits, key=lambda wait: (wait.distance, wait.op)))
