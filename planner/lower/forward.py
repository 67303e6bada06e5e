"""Forward-only plans: the ops of a forward pass in the arenas of a training plan.

Weights are streamed into the same slots as in training, and each block computes all micro-batches of a group before the next block.
Without a backward, a micro-batch needs two `activations` slots (input and output of the current block), so a group has half as
many micro-batches as the arena has slots. The forward of the head has no output.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np

from penstock.runtime.plan import Kind, Op, Plan, Slot

from .arenas import N_READ_SLOTS, n_streaming, source_slot, weights_slot
from .op_table import NAMES, OpTable, n_ops, number_of


def most_micro_batches(plan: Plan) -> int:
    """Return the largest group of micro-batches of a forward pass in these arenas."""
    arena = plan.arena("activations")
    assert arena is not None
    return len(arena.slot_bytes) // 2


def forward_plan(plan: Plan, n_micro_batches: int, seq_len: int | None = None) -> Plan:
    """Return a plan for the forward pass of `n_micro_batches`, optionally with sequences shorter than in training."""
    semantics = plan.semantics
    seq_len = seq_len or semantics.seq_len
    assert 0 < seq_len <= semantics.seq_len
    group = min(n_micro_batches, most_micro_batches(plan))
    groups = 1 if semantics.ranks == 1 else semantics.sum_groups  # decides how weights are sharded
    semantics = replace(semantics, batch_size=n_micro_batches * semantics.micro_batch, seq_len=seq_len, sum_groups=groups)
    policy, workload = replace(plan.policy, accumulation_group=group), replace(plan.workload, smaller=())  # no smaller last one
    ops = tuple(_program(plan, n_micro_batches, group))
    forward = replace(plan, semantics=semantics, workload=workload, policy=policy, ops=ops, repeat=None)
    operands = [(i, NAMES.index(name), number_of(slot)) for i, op in enumerate(ops) for name, slot in op.operands]
    return replace(forward, ops=replace(OpTable.from_plan(forward), operands=np.array(operands).T).ordered({}).ops())


def _program(plan: Plan, n_micro_batches: int, group: int) -> Iterator[Op]:
    """Yield all ops of the pass in a valid sequential order."""
    blocks, resident = range(len(plan.workload.blocks)), plan.policy.resident_blocks
    head, streaming = blocks[-1], {b for b in blocks[1:-1] if b not in resident}
    in_turn = cycle([Slot("weights", i) for i in range(min(n_streaming(plan), len(streaming)))])
    packed_in_turn = cycle([Slot("packed", i) for i in range(min(plan.packed_slots, sum(map(plan.unpacks, blocks))))])
    read_in_turn = cycle([Slot("frozen", i) for i in range(N_READ_SLOTS)])
    held: dict[Slot, int] = {}  # weight slot -> its current block
    for first in range(0, n_micro_batches, group):
        for b in blocks:
            slot = next(in_turn) if b in streaming else weights_slot(plan, b)
            if held.get(slot) != b and not plan.computes_in_place(b):
                held[slot] = b
                tied = [("tied", source_slot(plan, 0))] if b and plan.workload.blocks[b].tied else []
                state, target = [("state", source_slot(plan, b)), *tied], next(packed_in_turn) if plan.unpacks(b) else slot
                read = [("frozen", next(read_in_turn))] if b in plan.policy.disk_blocks else []
                yield from (Op(Kind.READ, b, None, (operand,)) for operand in read)
                yield Op(Kind.LOAD, b, None, (state[0], *read, *state[1:], ("weights", target)))
                if plan.unpacks(b):
                    yield Op(Kind.DEQUANTISE, b, None, (("packed", target), ("weights", slot)))
                if n_ops(plan, Kind.GATHER, b):
                    yield Op(Kind.GATHER, b, None, (*state, ("weights", slot)))
            for m in range(first, min(first + group, n_micro_batches)):
                x, y = (Slot("activations", 2 * (m - first) + parity % 2) for parity in (b - 1, b))
                reads = [("weights", slot), *([("trained", plan.state_slot(b))] if plan.is_apart(b) else [])]
                reads += [("x", x)] if b else []
                yield Op(Kind.FORWARD, b, m, (*reads, *([("y", y)] if b != head else [])))
