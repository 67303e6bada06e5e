"""Mutation testing of the checker: plans with one change, generated from the op table.

The checker must reject a mutant ("kill" it), or the oracle of `tests/oracle.py` must find it harmless.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise, permutations
from typing import Any

from penstock.runtime.plan import OPS, Op, Place, Plan, Slot, Update, Wait, saves
from penstock.runtime.plan.ops import Operand
from penstock.runtime.plan.train import Lora, Train
from tests.edits import passes, reordered, rewaited, set_op, small, under
from tests.oracle import same_training


@dataclass(frozen=True, slots=True)
class Mutant:
    """Change of a plan: description, affected rows of the op table as `kind` or `kind.operand`, and a function that applies it."""

    what: str
    rows: tuple[str, ...]
    make: Callable[[], Plan]


Mutants = Iterator[Mutant]


def _edits(i: int, op: Op, plan: Plan, change: str, new: Op, operand: str | None = None) -> Mutant:
    row = str(op.kind) if operand is None else f"{op.kind}.{operand}"
    return Mutant(f"op {i} {change}: {op}", (row,), partial(set_op, plan, i, new))


# -- ops: dropped, repeated, moved, exchanged, or with the operands of another op ----------------------------------------------


def _drop(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        yield Mutant(f"without op {i}: {op}", (op.kind,), partial(reordered, plan, [j for j in range(len(plan.ops)) if j != i]))


def _twice(plan: Plan) -> Mutants:
    """Repeat an op at the end of its lane, without waits."""
    for i, op in enumerate(plan.ops):
        ops = (*plan.ops, replace(op, waits=()))
        yield Mutant(f"op {i} twice: {op}", (op.kind,), lambda ops=ops: replace(plan, ops=ops))


def _lanes(plan: Plan) -> list[list[int]]:
    lanes: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(plan.ops):
        lanes[op.lane].append(i)
    return list(lanes.values())


def _swap(plan: Plan) -> Mutants:
    """Swap two ops of a lane; waits are renumbered."""
    for lane in _lanes(plan):
        for i, j in combinations(lane, 2):
            order = [{i: j, j: i}.get(k, k) for k in range(len(plan.ops))]
            rows = plan.ops[i].kind, plan.ops[j].kind
            yield Mutant(f"op {i} and op {j} swapped: {plan.ops[i]} and {plan.ops[j]}", rows, partial(reordered, plan, order))


def _moved(plan: Plan, i: int, j: int) -> list[int]:
    """Return the order of ops with op i moved to index j."""
    order = [k for k in range(len(plan.ops)) if k != i]
    order.insert(j, i)
    return order


def _move(plan: Plan) -> Mutants:
    """Move an op within its lane; waits are renumbered."""
    for lane in _lanes(plan):
        for i, j in permutations(lane, 2):
            text = f"op {i} moved to {j}: {plan.ops[i]}"
            yield Mutant(text, (plan.ops[i].kind,), partial(reordered, plan, _moved(plan, i, j)))


def _move_in_time(plan: Plan) -> Mutants:
    """Move an op to the index of an op with a common slot, and derive all waits anew: no race, but other values."""
    slots = [{slot for _, slot in op.operands} for op in plan.ops]
    for i, j in permutations(range(len(plan.ops)), 2):
        if plan.repeat is None and slots[i] & slots[j]:
            text = f"op {i} performed at {j}: {plan.ops[i]}"
            order = _moved(plan, i, j)
            yield Mutant(text, (plan.ops[i].kind,), lambda order=order: rewaited(reordered(plan, order)))


def _work_of_another(plan: Plan) -> Mutants:
    """Replace an op by another op of its kind; waits are kept."""
    for i, op in enumerate(plan.ops):
        for replacement in {replace(o, waits=op.waits) for o in plan.ops if o.kind is op.kind} - {op}:
            yield _edits(i, op, plan, f"as {replacement.name}", replacement)


def _another_block(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for block in {*range(len(plan.workload.blocks))} - {op.block}:
            yield _edits(i, op, plan, f"for block {block}", replace(op, block=block))


def _another_micro_batch(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for m in {None, *range(plan.semantics.n_micro_batches)} - {op.micro_batch}:
            yield _edits(i, op, plan, f"for micro-batch {m}", replace(op, micro_batch=m))


# -- waits ---------------------------------------------------------------------------------------------------------------------


def _waits(plan: Plan, replacements: Callable[[Wait], Iterable[Wait | None]]) -> Mutants:
    """Replace a wait of an op by another one or none."""
    for i, op in enumerate(plan.ops):
        for n, wait in enumerate(op.waits):
            for replacement in replacements(wait):
                waits = (*op.waits[:n], *([] if replacement is None else [replacement]), *op.waits[n + 1 :])
                yield _edits(i, op, plan, f"waits for {replacement}, not {wait}", replace(op, waits=waits))


def _wait_for_an_earlier_op(plan: Plan) -> Mutants:
    def earlier(wait: Wait) -> Iterable[Wait]:
        return (wait._replace(op=j) for j in range(wait.op) if plan.ops[j].lane is plan.ops[wait.op].lane)

    return _waits(plan, earlier)


# -- operands ------------------------------------------------------------------------------------------------------------------


def _with_operands(op: Op, n: int, *operands: Operand) -> Op:
    """Return the op with operand n replaced by these operands."""
    return replace(op, operands=(*op.operands[:n], *operands, *op.operands[n + 1 :]))


def _operands(plan: Plan, replacements: Callable[[str, Slot], Iterable[tuple[Operand, ...]]]) -> Mutants:
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands):
            for instead in replacements(name, slot):
                text = " ".join(f"{new_name}={new_slot}" for new_name, new_slot in instead) or "nothing"
                yield _edits(i, op, plan, f"uses {text}, not {name}={slot}", _with_operands(op, n, *instead), name)


def _another_slot(plan: Plan) -> Mutants:
    def replacements(name: str, slot: Slot) -> Iterable[tuple[Operand, ...]]:
        return (((name, new_slot),) for new_slot in _arena(plan, slot) if new_slot != slot)

    return _operands(plan, replacements)


def _another_arena(plan: Plan) -> Mutants:
    def replacements(name: str, slot: Slot) -> Iterable[tuple[Operand, ...]]:
        for arena in plan.arenas:
            if arena.name != slot.arena and arena.slot_bytes:
                yield ((name, Slot(arena.name, min(slot.index, len(arena.slot_bytes) - 1))),)

    return _operands(plan, replacements)


def _another_name(plan: Plan) -> Mutants:
    """Rename an operand to another operand name of its kind."""
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands):
            for new_name in {*OPS[op.kind].names} - {name}:
                yield _edits(i, op, plan, f"has {name} as {new_name}", _with_operands(op, n, (new_name, slot)), name)


def _operands_exchanged(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for (n, (name, slot)), (k, (second, second_slot)) in combinations(enumerate(op.operands), 2):
            exchanged = _with_operands(_with_operands(op, n, (name, second_slot)), k, (second, slot))
            if exchanged != op:
                yield _edits(i, op, plan, f"has {name} for {second}", exchanged, name)


def _arena(plan: Plan, slot: Slot) -> list[Slot]:
    """Return all slots of the slot's arena."""
    arena = plan.arena(slot.arena)
    assert arena is not None
    return [Slot(slot.arena, i) for i in range(len(arena.slot_bytes))]


def _renamed(op: Op, new: dict[Slot, Slot]) -> Op:
    return replace(op, operands=tuple((name, new.get(slot, slot)) for name, slot in op.operands))


def _slots_exchanged(plan: Plan) -> Mutants:
    """Exchange two slots of an arena in all ops, or in the ops of one block."""
    used = {slot for op in plan.ops for _, slot in op.operands}
    for a, b in combinations(sorted(used), 2):
        if a.arena == b.arena:
            users = [op for op in plan.ops if {a, b} & {slot for _, slot in op.operands}]
            for block in (None, *sorted({op.block for op in users})):
                ops = tuple(_renamed(op, {a: b, b: a}) if block in (None, op.block) else op for op in plan.ops)
                rows = tuple({op.kind for op in users if block in (None, op.block)})
                text = f"{a} and {b} exchanged in {'all' if block is None else f'the ops of block {block}'}"
                yield Mutant(text, rows, lambda ops=ops: replace(plan, ops=ops))


def _value_elsewhere(plan: Plan) -> Mutants:
    """Move a value to another slot of its arena, consistently from the op that writes it to its last use."""
    for slot in sorted({slot for op in plan.ops for _, slot in op.operands}):
        uses = [i for i, op in enumerate(plan.ops) if slot in op.reads or slot in op.writes]
        begins = [n for n, i in enumerate(uses) if slot not in plan.ops[i].reads]
        for first, end in pairwise([*begins, len(uses)]):
            life = {*uses[first:end]}
            for target in _arena(plan, slot):
                if target != slot:
                    ops = tuple(_renamed(op, {slot: target}) if i in life else op for i, op in enumerate(plan.ops))
                    text = f"{slot} of {len(life)} ops in {target}: {plan.ops[uses[first]]}"
                    yield Mutant(text, (plan.ops[uses[first]].kind,), lambda ops=ops: replace(plan, ops=ops))


# -- policy, semantics, workload and arenas ------------------------------------------------------------------------------------


def _another_policy(plan: Plan) -> Mutants:
    """Keep the ops and change the policy, the semantics, or the frozen parameters of the model."""
    policy, semantics, blocks = plan.policy, plan.semantics, plan.workload.blocks
    changes: list[dict[str, Any]] = [{"gradient_slots": policy.gradient_slots + 1}] if blocks[-1].trained else []
    changes += [{name: getattr(policy, name) + n} for name in ("boundary_stride", "accumulation_group") for n in (-1, 1)]
    changes = [change for change in changes if 0 not in change.values()]
    if under(plan, square_on_device=not policy.square_on_device).squared != plan.squared:
        changes.append({"square_on_device": not policy.square_on_device})
    if policy.update is Update.DEFERRED:
        changes.append({"update": Update.BARRIER})
    for name in ("resident_blocks", "spill_blocks", "offload_blocks", "speculate_blocks", "device_blocks"):
        changes += [{name: tuple(sorted({*getattr(policy, name)} ^ {b}))} for b in range(len(blocks))]
    for change in changes:
        yield Mutant(f"policy {change}", ("policy",), partial(under, plan, **change))
    meant: dict[str, Any] = {"base": "bf16" if plan.packed_slots else "nf4", "ranks": 2 if semantics.ranks == 1 else 1}
    for name, value in meant.items():
        yield Mutant(f"{name} {value}", ("semantics",), partial(replace, plan, semantics=replace(semantics, **{name: value})))
    for b, block in enumerate(blocks):
        for n, p in enumerate(block.parameters):
            parameters = (*block.parameters[:n], replace(p, frozen=not p.frozen), *block.parameters[n + 1 :])
            changed = (*blocks[:b], replace(block, parameters=parameters), *blocks[b + 1 :])
            workload = replace(plan.workload, blocks=changed)
            yield Mutant(f"frozen {not p.frozen}: {p.name}", ("workload",), partial(replace, plan, workload=workload))


def _another_arena_list(plan: Plan) -> Mutants:
    """Remove an arena, move it to the other memory, shorten it, or reduce a slot by one byte or one alignment unit."""
    for n, arena in enumerate(plan.arenas):
        sizes, other_place = arena.slot_bytes, Place.HOST if arena.place is Place.DEVICE else Place.DEVICE
        instead: list[tuple[str, Any]] = [("missing", None), ("moved", replace(arena, place=other_place))]
        instead += [("shorter", replace(arena, slot_bytes=sizes[:-1]))]
        for i, size in enumerate(sizes):
            for n_bytes in (1, 256):
                smaller = (*sizes[:i], max(size - n_bytes, 0), *sizes[i + 1 :])
                if size:
                    instead.append((f"with {n_bytes} bytes less in slot {i}", replace(arena, slot_bytes=smaller)))
        for change, changed in instead:
            arenas = (*plan.arenas[:n], *([] if changed is None else [changed]), *plan.arenas[n + 1 :])
            yield Mutant(f"arena {arena.name} {change}", ("arena",), partial(replace, plan, arenas=arenas))


MUTATIONS: dict[str, Callable[[Plan], Mutants]] = {
    "drop an op": _drop,
    "do an op twice": _twice,
    "swap two ops of a lane": _swap,
    "move an op in its lane": _move,
    "perform an op at another time": _move_in_time,
    "do the work of another op": _work_of_another,
    "change the block": _another_block,
    "change the micro-batch": _another_micro_batch,
    "drop a wait": lambda plan: _waits(plan, lambda wait: [None]),
    "wait for an earlier op of that lane": _wait_for_an_earlier_op,
    "wait for the step before": lambda plan: _waits(plan, lambda wait: [] if wait.distance else [Wait(wait.op, 1)]),
    "lose an operand": lambda plan: _operands(plan, lambda name, slot: [()]),
    "repeat an operand": lambda plan: _operands(plan, lambda name, slot: [((name, slot), (name, slot))]),
    "redirect an operand": _another_slot,
    "redirect an operand to another arena": _another_arena,
    "rename an operand": _another_name,
    "exchange two operands of an op": _operands_exchanged,
    "exchange two slots": _slots_exchanged,
    "keep a value in another slot": _value_elsewhere,
    "another policy or model": _another_policy,
    "other arenas": _another_arena_list,
}
# Mutations with harmless cases: a second load, another order of independent ops, another free slot, a rounded size, a policy with
# more slots than ops use.
MAY_BE_HARMLESS = {
    *("do an op twice", "swap two ops of a lane", "move an op in its lane", "perform an op at another time"),
    *("redirect an operand", "exchange two slots", "keep a value in another slot", "another policy or model", "other arenas"),
}

# -- original plans: together they have every kind of op and every operand ------------------------------------------------------

ADAPTED: dict[str, Any] = {"train": Train(lora=Lora(rank=8)), "gradient_dtype": "fp32"}
_NAMES = ("*.1.norm.weight", "*.3.up_proj.weight", "norm.weight", "lm_head.weight")
PARTIAL: dict[str, Any] = {"train": Train(names=_NAMES), "gradient_dtype": "fp32"}
NORMS: dict[str, Any] = {"train": Train(names=("*norm.weight",)), "gradient_dtype": "fp32"}
BARRIER, EAGER = {"update": Update.BARRIER}, {"update": Update.EAGER}
IN_FP32 = {"compute_dtype": "fp32"}
SAMPLES: tuple[dict[str, Any], ...] = (
    BARRIER | {"save": saves(all=(2,))},
    {"n_layers": 4, "tied": True, "save": saves(all=(2,)), "gradient_slots": 2, **IN_FP32},
    EAGER | {"n_micro_batches": 2, "accumulation_group": 2, "save": saves(all=(2,)), "gradient_slots": 2},
    BARRIER | {"n_layers": 5, "n_micro_batches": 2, "tied": True, "accumulation_group": 2, "gradient_slots": 3},
    {"n_micro_batches": 3, "accumulation_group": 2, "save": saves(all=(2,)), "gradient_slots": 2},
    EAGER | {"n_micro_batches": 2, "tied": True, **IN_FP32},
    {"resident_blocks": (0, 2, 4), "spill_blocks": (0, 2)},
    {"n_micro_batches": 3, "tied": True, "accumulation_group": 2, "resident_blocks": (0, 1, 4), "spill_blocks": (0, 2)},
    EAGER
    | {"n_layers": 4, "n_micro_batches": 2, "accumulation_group": 2, "gradient_slots": 2}
    | {"resident_blocks": (3,), "spill_blocks": (0, 2, 3)},
    {"n_layers": 5, "n_micro_batches": 2, "accumulation_group": 2, "boundary_stride": 3},
    BARRIER
    | {"n_layers": 4, "n_micro_batches": 3, "tied": True, "accumulation_group": 2, "boundary_stride": 2}
    | {"resident_blocks": (1, 4), **IN_FP32},
    {"tied": True, "speculate_blocks": (0, 2), "resident_blocks": (2,)},
    {"n_layers": 2, "n_micro_batches": 2, "speculate_blocks": (1, 2, 3), "boundary_stride": 2},
    BARRIER | {"n_micro_batches": 2, "accumulation_group": 2, "square_on_device": True, "gradient_slots": 2},
    BARRIER
    | {"n_layers": 4, "n_micro_batches": 2, "accumulation_group": 2, "spill_blocks": (0, 1)}
    | {"save": saves(all=(4,), products=(1, 2, 3)), "offload_blocks": (1, 3)},
    {"n_micro_batches": 3, "tied": True, "save": saves(products=(1, 2, 3)), "offload_blocks": (1, 2, 3)},
    EAGER | {"n_layers": 2, "square_on_device": True, "gradient_slots": 2},
    {"tied": True, "square_on_device": True, "speculate_blocks": (0, 2)},
    {"n_micro_batches": 2, "accumulation_group": 2, "device_blocks": (0, 3, 4), "speculate_blocks": (2,), "gradient_slots": 2},
    {"tied": True, "device_blocks": (1, 2, 3), "resident_blocks": (4,), **IN_FP32},
    {"n_layers": 2, "n_micro_batches": 4, "sum_groups": 4, "accumulation_group": 4, "gradient_slots": 2},
    # Sums on the device: mixed with sums on the host; with state and weights there; of a tied weight
    {"n_micro_batches": 3, "sum_blocks": (0, 2, 4), "square_on_device": True, "gradient_slots": 2, "speculate_blocks": (1,)},
    {"n_micro_batches": 4, "sum_groups": 2, "sum_blocks": (0, 1, 3, 4), "device_blocks": (0, 3), "resident_blocks": (1, 3)},
    {"n_micro_batches": 2, "tied": True, "sum_blocks": (0, 1, 4), "device_blocks": (0, 4), "resident_blocks": (0, 4), **IN_FP32},
    {"n_micro_batches": 2, "tied": True, "accumulation_group": 2, "sum_blocks": (0, 4), "square_on_device": True},
    {"n_layers": 2, "n_micro_batches": 4, "ranks": 2, "sum_groups": 2, "accumulation_group": 2, "sum_blocks": (0, 1, 2, 3)},
    {"n_layers": 2, "n_micro_batches": 4, "tied": True, "sum_groups": 2, "accumulation_group": 2},
    ADAPTED | {"n_layers": 4, "base": "int8", "device_blocks": (1, 2, 3, 4)},
    ADAPTED | BARRIER | {"n_micro_batches": 2, "tied": True, "base": "int8", "resident_blocks": (1,), "boundary_stride": 2},
    ADAPTED | {"n_micro_batches": 2, "tied": True, "device_blocks": (1, 2, 3)},
    NORMS | BARRIER | {"device_blocks": (1, 2, 3, 4), "boundary_stride": 2},
    ADAPTED | {"n_layers": 4, "n_micro_batches": 2, "base": "int8", "disk_blocks": (1, 2, 4)},
    PARTIAL | BARRIER | {"n_layers": 4, "n_micro_batches": 2, "accumulation_group": 2, "gradient_slots": 2},
    PARTIAL | {"n_layers": 4, "n_micro_batches": 2, "save": saves(all=(4,)), "spill_blocks": (2,), "device_blocks": (2, 4)},
    {"n_micro_batches": 2, "ranks": 2, "accumulation_group": 2, "resident_blocks": (2,), "speculate_blocks": (1,)},
    {"n_layers": 2, "ranks": 2, "tied": True, "prefetch_depth": 2},
    ADAPTED | {"n_layers": 2, "ranks": 2, "tied": True, "base": "int8", "resident_blocks": (1,)},
    PARTIAL | {"n_layers": 2, "n_micro_batches": 2, "ranks": 2, "accumulation_group": 2},
)


# -- counting ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Numbers of mutants made and killed, and changed rows, by mutation; and harmful mutants that passed."""

    made: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    rows: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    condemned: list[str] = field(default_factory=list)

    def table(self) -> str:
        lines = ["| mutation | made | killed | passed and harmless |", "|---|---:|---:|---:|"]
        for name in [*MUTATIONS, "all"]:
            made, killed = (counter.total() if name == "all" else counter[name] for counter in (self.made, self.killed))
            lines.append(f"| {name} | {made} | {killed} | {made - killed - len(self.condemned) * (name == 'all')} |")
        return "\n".join(lines)


def tally(limit: int, seed: int = 0) -> Tally:
    """Check mutants of all samples with checker and oracle, at most `limit` per mutation and plan."""
    result, rng = Tally(), random.Random(seed)
    for original in (small(**choices) for choices in SAMPLES):
        for name, mutate in MUTATIONS.items():
            mutants = list(mutate(original))
            for mutant in mutants:
                result.rows[name].update(mutant.rows)
            for mutant in rng.sample(mutants, min(limit, len(mutants))):
                plan = mutant.make()
                result.made[name] += 1
                if not passes(plan):
                    result.killed[name] += 1
                elif why := same_training(original, plan):
                    result.condemned.append(f"{name}: {mutant.what}: {why}")
                elif name not in MAY_BE_HARMLESS:
                    result.condemned.append(f"{name}: {mutant.what}: passes, but mutants of this kind must not")
    return result
