"""Ops of a step in columnar form: `OpTableBuilder` collects them in any order, `OpTable` is sorted, with operands and waits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.runtime.plan import LANE_OF, OPS, Kind, Lane, Op, Plan, Repeat, Setup, Slot, Wait
from penstock.runtime.plan.ops import Often, Operand
from penstock.runtime.plan.workload import BlockKind

from .waits import NONE, Column, waits_of

KINDS, LANES = tuple(Kind), tuple(Lane)
NUMBER = {kind: i for i, kind in enumerate(KINDS)}
LANE_NUMBERS = np.array([LANES.index(LANE_OF[kind]) for kind in KINDS])
ARENAS = (
    "weights", "packed", "activations", "saved", "gradients", "device_state", "sums", "received", "squares",
    "state", "frozen", "host_gradients", "staging", "offloaded", "spilled", "norm",
)  # fmt: skip
MOST_SLOTS = 1 << 40  # slots of an arena; slot number = arena index * MOST_SLOTS + slot index
NAMES = tuple(dict.fromkeys(name for row in OPS.values() for name in row.names))
# By op kind and operand name: position in the op's text line, is read, is written
PLACES, READS, WRITES = np.array(
    [[[name in r.names and r.names.index(name), name in r.reads, name in r.writes] for name in NAMES] for r in map(OPS.get, KINDS)]  # type: ignore[union-attr]
).transpose(2, 0, 1)
MOST_TURNS = 64  # ops around one compute op
USUAL_REPETITIONS = 8  # repetitions that are simulated until steady state, with those that timelines record


def n_ops(plan: Setup, kind: Kind, block: int) -> int:
    """Ops of `kind` per step for a block. Loads are `n_uses`: weights still in a slot save one, recomputation adds one."""
    row, n = OPS[kind], plan.semantics.n_micro_batches
    if not row.where(plan, block):
        return 0
    if row.often is Often.USE:
        return 1 if block in plan.policy.resident_blocks else n_uses(plan, block)
    return n if row.often is Often.MICRO_BATCH or (row.often is Often.GRADIENT and not plan.sums_on_device(block)) else 1


def n_uses(plan: Setup, block: int) -> int:
    """Number of passes that use a block's weights: each group's forward, and a layer's backward."""
    is_layer = plan.workload.blocks[block].kind is BlockKind.LAYER
    n_groups = -(-plan.semantics.n_micro_batches // plan.policy.accumulation_group)
    return n_groups * (1 + (is_layer and block >= plan.workload.first_trained))


def slots(arena: str, index: Any) -> Any:
    """Return slot numbers of an arena; NONE where the index is NONE."""
    return np.where(np.equal(index, NONE), NONE, ARENAS.index(arena) * MOST_SLOTS + np.asarray(index))


def number_of(slot: Slot) -> int:
    return ARENAS.index(slot.arena) * MOST_SLOTS + slot.index


class OpTableBuilder:
    """Builder for the ops of a step, in any order: sort keys are the index of the compute op they belong to, and a turn."""

    def __init__(self) -> None:
        self.n_ops = 0
        self.ops: list[Column] = []  # place, kind, block, micro-batch
        self.operands: list[Column] = []  # op, name, slot

    def add(
        self, kind: Any, place: Column, turn: Any, block: Any, micro_batch: Any = NONE, where: Any = True, **operands: Any
    ) -> Column:
        """Add ops of this kind (or kind numbers) where the mask is True; return op numbers, else NONE. `operands` are slots."""
        rows, exists = np.empty((4, len(place)), np.int64), np.broadcast_to(where, len(place))
        rows[0], rows[1] = place * MOST_TURNS + turn, NUMBER[kind] if isinstance(kind, Kind) else kind
        rows[2], rows[3] = block, micro_batch
        self.ops.append(rows[:, exists])
        ops = np.full(len(place), NONE)
        ops[exists] = np.arange(self.n_ops, self.n_ops + np.count_nonzero(exists))
        self.n_ops = int(ops.max(initial=self.n_ops - 1)) + 1
        self.use(ops, **operands)
        return ops

    def use(self, ops: Column, **operands: Any) -> None:
        """Add operands (slot numbers by name) to ops; entries with op or slot NONE are skipped."""
        for name, slot_numbers in operands.items():
            rows = np.empty((3, len(ops)), np.int64)
            rows[0], rows[1], rows[2] = ops, NAMES.index(name), slot_numbers
            self.operands.append(rows[:, (rows[0] != NONE) & (rows[2] != NONE)])

    def build(self, n_steps: int = 2, extra_waits: Callable[["OpTable"], Mapping[int, Wait]] = lambda ops: {}) -> "OpTable":
        """Sort the ops and derive their waits. `extra_waits` returns further waits by op number."""
        place, *ops = np.concatenate(self.ops, axis=1)
        order = np.argsort(place, kind="stable")
        kinds, blocks, micro_batches = (column[order] for column in ops)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        op, names, used = np.concatenate(self.operands, axis=1)
        op = number[op]
        operands = np.stack([op, names, used])[:, np.argsort(op * len(NAMES) + PLACES[kinds[op], names], kind="stable")]
        table = OpTable(kinds, blocks, micro_batches, operands, NOTHING)
        return table.ordered(extra_waits(table), n_steps)


@dataclass(frozen=True, slots=True)
class OpTable:
    """Op table: the ops of a plan as columns."""

    kinds: Column
    blocks: Column
    micro_batches: Column  # NONE: not of a micro-batch
    operands: Column  # rows: op, name, slot
    waits: Column  # rows: waiting op, distance, back, op waited for; sorted
    repeat: Repeat | None = None

    @staticmethod
    def from_plan(plan: Plan) -> "OpTable":
        """Convert a plan for timing: operands are omitted."""
        numbers = [(NUMBER[op.kind], op.block, NONE if op.micro_batch is None else op.micro_batch) for op in plan.ops]
        kinds, blocks, micro_batches = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
        waits = [(i, wait.distance, wait.back, wait.op) for i, op in enumerate(plan.ops) for wait in op.waits]
        return OpTable(kinds, blocks, micro_batches, NOTHING, np.array(waits, dtype=np.int64).reshape(-1, 4).T, plan.repeat)

    def ordered(self, extra_waits: Mapping[int, Wait], n_steps: int = 2) -> "OpTable":
        """Return a copy with the minimal waits that preserve program order. `extra_waits` holds further waits by op number."""
        return replace(self, waits=waits_of(LANE_NUMBERS[self.kinds], *self.uses(), extra_waits, n_steps))

    def op(self, i: int) -> Op:
        """Return op number i without operands and waits."""
        return _op(int(self.kinds[i]), int(self.blocks[i]), int(self.micro_batches[i]))

    def first(self, table: Column) -> Column:
        """Offsets of each op's entries in the operand or wait table (CSR row pointers)."""
        return np.searchsorted(table[0], np.arange(len(self.kinds) + 1))

    def uses(self) -> tuple[Column, Column]:
        """Return dense slot numbers, and offsets: entry 2 * i begins the slots that op i reads, 2 * i + 1 those it writes."""
        op, names, used = self.operands
        slot, kinds = np.unique(used, return_inverse=True)[1], self.kinds[op]
        reads, writes = (table[kinds, names].nonzero()[0] for table in (READS, WRITES))
        keys = np.concatenate([2 * op[reads], 2 * op[writes] + 1])
        order = np.argsort(keys, kind="stable")
        return slot[np.concatenate([reads, writes])[order]], np.searchsorted(keys[order], np.arange(2 * len(self.kinds) + 1))

    def ops(self) -> tuple[Op, ...]:
        used, index = np.unique(self.operands[2], return_inverse=True)
        known = [Slot(ARENAS[number // MOST_SLOTS], number % MOST_SLOTS) for number in used.tolist()]
        operands = [(NAMES[name], known[i]) for name, i in zip(self.operands[1].tolist(), index.tolist(), strict=True)]
        waits = [Wait(op, distance, back) for distance, back, op in self.waits[1:].T.tolist()]
        tables = ((operands, self.operands), (waits, self.waits))
        of_ops = ([tuple(entries[i:j]) for i, j in pairwise(self.first(table).tolist())] for entries, table in tables)
        return tuple(map(_op, self.kinds.tolist(), self.blocks.tolist(), self.micro_batches.tolist(), *of_ops))

    @property
    def n_simulated(self) -> int:
        """Estimate of the ops that the simulator performs per step before it extrapolates."""
        return len(self.kinds) + (0 if self.repeat is None else min(self.repeat.times - 1, USUAL_REPETITIONS) * self.repeat.n_ops)


NOTHING = np.empty((4, 0), np.int64)


def _op(kind: int, block: int, micro_batch: int, operands: tuple[Operand, ...] = (), waits: tuple[Wait, ...] = ()) -> Op:
    return Op(KINDS[kind], block, None if micro_batch == NONE else micro_batch, operands, waits)
