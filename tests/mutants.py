"""Which wrong plans does the checker let through?

A mutant is a plan with one thing changed. The checker should refuse it (kill it), or the change should be harmless. What
survives is put before the oracle of `tests/oracle.py`.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from planner.check.check import check
from planner.lower.lower import lower
from runtime.errors import PlanError
from runtime.plan import CONTRACT, Kind, Op, Plan, Policy, Semantics, Slot, Update, Wait, saves
from runtime.plan.ops import Operand
from runtime.plan.train import Lora, Train
from tests.oracle import same_training
from tests.strategies import MODEL, PROFILE, small_workload

Mutants = Iterator[tuple[str, Plan]]  # what was changed, and the plan


def _with_op(plan: Plan, i: int, op: Op) -> Plan:
    return replace(plan, ops=(*plan.ops[:i], op, *plan.ops[i + 1 :]))


def _without(plan: Plan, i: int) -> Plan:
    """The plan without op i; waits on it go too, the others follow their ops."""
    ops = []
    for j, op in enumerate(plan.ops):
        if j != i:
            kept = [w for w in op.waits if w.op != i]
            ops.append(replace(op, waits=tuple(replace(w, op=w.op - (w.op > i)) for w in kept)))
    return replace(plan, ops=tuple(ops))


def _following(op: Op, at: dict[int, int]) -> Op:
    """The op, its waits on ops that went elsewhere; `at`: where those went."""
    if not any(w.op in at for w in op.waits):
        return op
    return replace(op, waits=tuple(Wait(at.get(w.op, w.op), w.distance) for w in op.waits))


def _swapped(plan: Plan, i: int, j: int) -> Plan:
    """Ops i and j trade places; waits follow their ops."""
    at = {i: j, j: i}
    ops = [_following(op, at) for op in plan.ops]
    ops[i], ops[j] = ops[j], ops[i]
    return replace(plan, ops=tuple(ops))


def _drops(kinds: set[Kind]) -> Callable[[Plan], Mutants]:
    def drop(plan: Plan) -> Mutants:
        for i, op in enumerate(plan.ops):
            if op.kind in kinds:
                yield f"without op {i}: {op}", _without(plan, i)

    return drop


def _drop_wait(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for wait in op.waits:
            left = tuple(w for w in op.waits if w != wait)
            yield f"op {i} without wait {wait}: {op}", _with_op(plan, i, replace(op, waits=left))


def _weaken_wait(plan: Plan) -> Mutants:
    """A wait for an earlier op of the same lane."""
    for i, op in enumerate(plan.ops):
        for wait in op.waits:
            lane = plan.ops[wait.op].lane
            for j in range(wait.op):
                if plan.ops[j].lane is lane:
                    waits = tuple(Wait(j, w.distance) if w == wait else w for w in op.waits)
                    yield f"op {i} waits for {j}, not {wait}: {op}", _with_op(plan, i, replace(op, waits=waits))


def _delay_wait(plan: Plan) -> Mutants:
    """A wait for the same op, of the step before."""
    for i, op in enumerate(plan.ops):
        for wait in op.waits:
            if wait.distance == 0:
                waits = tuple(Wait(w.op, 1) if w == wait else w for w in op.waits)
                yield f"op {i} waits for {wait}@1: {op}", _with_op(plan, i, replace(op, waits=waits))


def _lanes(plan: Plan) -> list[list[int]]:
    lanes: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(plan.ops):
        lanes[op.lane].append(i)
    return list(lanes.values())


def _swap_neighbours(plan: Plan) -> Mutants:
    for lane in _lanes(plan):
        for i, j in pairwise(lane):
            yield f"swapped {i}: {plan.ops[i]} with {j}: {plan.ops[j]}", _swapped(plan, i, j)


def _swap_anywhere(plan: Plan) -> Mutants:
    for lane in _lanes(plan):
        for n, i in enumerate(lane):
            for j in lane[n + 2 :]:
                yield f"swapped {i}: {plan.ops[i]} with {j}: {plan.ops[j]}", _swapped(plan, i, j)


def _move_op(plan: Plan) -> Mutants:
    """One op to another place in its lane, two or more places on."""
    for lane in _lanes(plan):
        for n in range(len(lane)):
            for k in (*range(n - 1), *range(n + 2, len(lane))):
                order = [i for i in lane if i != lane[n]]
                order.insert(k, lane[n])
                source = dict(zip(lane, order, strict=True))  # place: the op that comes there
                at = {i: place for place, i in source.items()}
                ops = [plan.ops[source.get(place, place)] for place in range(len(plan.ops))]
                moved = [_following(op, at) for op in ops]
                yield f"moved {lane[n]}: {plan.ops[lane[n]]} to {lane[k]}", replace(plan, ops=tuple(moved))


def _rename_slot(plan: Plan) -> Mutants:
    """One block uses another slot of an arena, in all its ops: every op still says what the contract asks."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    slots = sorted({(op.block, s) for op in plan.ops for _, s in op.operands})
    for block, slot in slots:
        for index in range(sizes[slot.arena]):
            if index != slot.index:
                new = {slot: Slot(slot.arena, index)}
                ops = tuple(_renamed(op, new) if op.block == block else op for op in plan.ops)
                yield f"{slot} -> [{index}] in all ops of block {block}", replace(plan, ops=ops)


def _other_slots(plan: Plan, kinds: set[Kind], names: frozenset[str] | None = None) -> Mutants:
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands if op.kind in kinds else ()):
            for index in range(sizes[slot.arena]):
                if index != slot.index and (names is None or name in names):
                    changed = _with_operand(op, n, (name, Slot(slot.arena, index)))
                    yield f"{name}={slot} -> [{index}] in op {i}: {op}", _with_op(plan, i, changed)


def _with_operand(op: Op, n: int, *operands: Operand) -> Op:
    """The op with other operands in the place of number n."""
    return replace(op, operands=(*op.operands[:n], *operands, *op.operands[n + 1 :]))


LEFT_BEFORE = {Kind.FETCH_ACTIVATION: Kind.OFFLOAD_ACTIVATION, Kind.FETCH_SAVED: Kind.OFFLOAD_SAVED}


def _fetch_early(plan: Plan) -> Mutants:
    """A fetch as the first op of its lane, waiting for nothing; or before what it returns has left, which waits for it."""
    for i, op in enumerate(plan.ops):
        if op.kind in LEFT_BEFORE:
            first = next(j for j, other in enumerate(plan.ops) if other.lane is op.lane)
            bare = _with_op(plan, i, replace(op, waits=()))
            yield f"first in its lane: op {i}: {op}", _moved(bare, i, first)
            key = LEFT_BEFORE[op.kind], op.block, op.micro_batch
            for spill, other in enumerate(plan.ops):
                if (other.kind, other.block, other.micro_batch) == key:
                    later = replace(other, waits=(*other.waits, Wait(i)))
                    yield f"before op {spill}: op {i}: {op}", _with_op(bare, spill, later)


def _moved(plan: Plan, i: int, j: int) -> Plan:
    """Op i goes to place j <= i, and those from j on one place further; waits follow their ops."""
    order = [*range(j), i, *(k for k in range(j, len(plan.ops)) if k != i)]
    at = {k: place for place, k in enumerate(order)}
    ops = [plan.ops[k] for k in order]
    return replace(plan, ops=tuple(_following(op, at) for op in ops))


def _other_stay(plan: Plan) -> Mutants:
    """An output passes through another slot of the ring on its way out, or on its way back: every op says so."""
    ring = plan.policy.accumulation_group * (plan.workload.n_layers + 1 - len(plan.policy.spill_blocks))
    n_slots = next(len(a.slot_bytes) for a in plan.arenas if a.name == "activations")
    for op in plan.ops:
        if op.kind not in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION):
            continue
        b, m, out = op.block, op.micro_batch, op.kind is Kind.OFFLOAD_ACTIVATION
        users = {(Kind.FORWARD, b, m), (Kind.OFFLOAD_ACTIVATION, b, m), (Kind.FORWARD, b + 1, m)}
        if not out:
            users = {(Kind.FETCH_ACTIVATION, b, m), (Kind.BACKWARD, b + 1, m), (Kind.BACKWARD, b, m)}
        slot = op["y"]
        for index in range(ring, n_slots):
            new = {slot: Slot("activations", index)}
            if index != slot.index:
                ops = tuple(_renamed(o, new) if (o.kind, o.block, o.micro_batch) in users else o for o in plan.ops)
                yield f"stay in [{index}], not {slot}: {op}", replace(plan, ops=ops)


def _moved_to(plan: Plan, i: int, j: int) -> Plan:
    """Op i goes to place j > i, and those between one place back; waits follow their ops."""
    order = [*(k for k in range(j + 1) if k != i), i, *range(j + 1, len(plan.ops))]
    at = {k: place for place, k in enumerate(order)}
    ops = [plan.ops[k] for k in order]
    return replace(plan, ops=tuple(_following(op, at) for op in ops))


def _speculate_out_of_turn(plan: Plan) -> Mutants:
    """A speculate ahead of the norm of its gradient, or after its settle."""
    at = {(op.kind, op.block): i for i, op in enumerate(plan.ops) if op.micro_batch is None}
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.SPECULATE:
            norm, settle = at.get((Kind.NORM, op.block), i), at.get((Kind.SETTLE, op.block), i)
            if norm < i:
                with_waits = _with_op(plan, i, replace(op, waits=plan.ops[norm].waits))
                yield f"before the norm, op {i}: {op}", _moved(with_waits, i, norm)
            if settle > i:
                yield f"after the settle, op {i}: {op}", _moved_to(plan, i, settle)


def _square_out_of_turn(plan: Plan) -> Mutants:
    """A square ahead of the op that completes its gradient, or after the next one that writes the gradient's slot."""
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.SQUARE:
            before = [j for j in range(i) if op["gradient"] in plan.ops[j].writes]
            after = [j for j in range(i + 1, len(plan.ops)) if op["gradient"] in plan.ops[j].writes]
            if before:
                yield f"before its gradient, op {i}: {op}", _moved(plan, i, before[-1])
            for j in after[:1]:
                yield f"after the next gradient, op {i}: {op}", _moved_to(plan, i, j)


def _squares_left_behind(plan: Plan) -> Mutants:
    """Sums that do not go along with their gradient; a norm, or an update, that lacks some."""
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands if op.kind is not Kind.SQUARE else ()):
            if slot.arena == "squares" or (slot.arena == "norm" and slot.index):
                yield f"without {name}={slot} in op {i}: {op}", _with_op(plan, i, _with_operand(op, n))


def _other_squares(plan: Plan) -> Mutants:
    """The sums of two blocks change places: on the device, on the host, or only where one of their ops reads or writes them."""
    for arena in ("squares", "norm"):
        slots = sorted({s for op in plan.ops for s in op.writes if s.arena == arena and (arena == "squares" or s.index)})
        for n, a in enumerate(slots):
            for b in slots[n + 1 :]:
                exchange = {a: b, b: a}
                users = [i for i, op in enumerate(plan.ops) if {a, b} & {slot for _, slot in op.operands}]
                ops = tuple(_renamed(op, exchange) for op in plan.ops)
                yield f"{a} <-> {b} everywhere", replace(plan, ops=ops)
                for i in users:
                    yield f"{a} <-> {b} in op {i}: {plan.ops[i]}", _with_op(plan, i, _renamed(plan.ops[i], exchange))


def _settle_early(plan: Plan) -> Mutants:
    """A settle before the last norm: just so, or as early as its speculate allows."""
    last = max((i for i, op in enumerate(plan.ops) if op.kind is Kind.NORM), default=0)
    at = {op.block: i for i, op in enumerate(plan.ops) if op.kind is Kind.SPECULATE}
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.SETTLE and last < i:
            yield f"before the last norm, op {i}: {op}", _moved(plan, i, last)
            if at.get(op.block, last) < last:
                yield f"after its speculate, op {i}: {op}", _moved(plan, i, at[op.block] + 1)


def _update_on_device_early(plan: Plan) -> Mutants:
    """An update on the device before all norms are known, or before its gradient is whole."""
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.UPDATE_ON_DEVICE:
            norms = [j for j in range(i) if plan.ops[j].kind is Kind.NORM]
            whole = [j for j in range(i) if op["gradient"] in plan.ops[j].writes]
            without = replace(op, waits=tuple(w for w in op.waits if w.distance or w.op not in norms))
            if without != op:  # the first of them waits for all
                yield f"not waiting for the norm, op {i}: {op}", _with_op(plan, i, without)
            for j in {norms[-1], whole[-1]}:
                yield f"before op {j}, op {i}: {op}", _moved(_with_op(plan, i, without), i, j)


def _refill_early(plan: Plan) -> Mutants:
    """A slot of weights, or of packed ones, is filled again while what is in it is still to be used, and whatever uses it waits."""
    for i, op in enumerate(plan.ops):
        if op.kind in (Kind.LOAD, Kind.DEQUANTISE):
            users = [j for j in range(i) if op["weights"] in plan.ops[j].reads]
            for j in users[-1:]:
                bare = _with_op(plan, i, replace(op, waits=tuple(w for w in op.waits if w.distance or w.op < j)))
                waits = plan.ops[j].waits if plan.ops[j].lane is op.lane else (*plan.ops[j].waits, Wait(i))
                yield f"before op {j}: op {i}: {op}", _moved(_with_op(bare, j, replace(plan.ops[j], waits=waits)), i, j)


def _stale_trained(plan: Plan) -> Mutants:
    """What is trained apart is updated before the last that computes with it, or after the first of the next step."""
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.UPDATE_ON_DEVICE:
            users = [j for j, other in enumerate(plan.ops) if other.get("trained") == op["state"]]
            if users:
                bare = _with_op(plan, i, replace(op, waits=()))
                yield f"before the last use, op {i}: {op}", _moved(bare, i, users[-1])
                yield f"after the first use, op {i}: {op}", _moved_to(_moved(bare, i, users[0]), users[0], users[0] + 1)


def _other_shadow(plan: Plan) -> Mutants:
    """A block speculates into the shadow of another one, and settles from there."""
    slots = sorted({op["shadow"] for op in plan.ops if op.kind is Kind.SPECULATE})
    for op in plan.ops:
        if op.kind is Kind.SPECULATE:
            for other in slots:
                if other != op["shadow"]:
                    ops = tuple(_renamed(o, {op["shadow"]: other}) if o.block == op.block else o for o in plan.ops)
                    yield f"{op['shadow']} -> {other}: {op}", replace(plan, ops=ops)


def _renamed(op: Op, new: dict[Slot, Slot]) -> Op:
    return replace(op, operands=tuple((name, new.get(slot, slot)) for name, slot in op.operands))


def _other_shared_slot(plan: Plan) -> Mutants:
    """An output that is computed again lies in another slot of those that share, in forward or in backward: every op says so."""
    n_slots = next(len(a.slot_bytes) for a in plan.arenas if a.name == "activations")
    for op in plan.ops:
        if op.kind is Kind.RECOMPUTE:
            b, m = op.block, op.micro_batch
            forward = {(Kind.FORWARD, b, m), (Kind.FORWARD, b + 1, m)}
            backward = {(kind, block, m) for kind in (Kind.RECOMPUTE, Kind.BACKWARD) for block in (b, b + 1)}
            for users in (forward, backward, forward | backward):
                for index in range(n_slots):
                    new = {op["y"]: Slot("activations", index)}
                    if index != op["y"].index:
                        ops = tuple(_renamed(o, new) if (o.kind, o.block, o.micro_batch) in users else o for o in plan.ops)
                        yield f"{op['y']} -> [{index}] in {len(users)} ops: {op}", replace(plan, ops=ops)


def _recompute_other(plan: Plan) -> Mutants:
    """Each recompute does the work of another one instead, from what is there and to where it was wanted, or all of it."""
    again = [i for i, op in enumerate(plan.ops) if op.kind is Kind.RECOMPUTE]
    for i in again:
        for j in again:
            if i != j:
                op, other = plan.ops[i], plan.ops[j]
                yield f"op {i} as {other}: {op}", _with_op(plan, i, replace(other, waits=op.waits))
                for n, (mine, its) in enumerate(zip(op.operands, other.operands, strict=True)):
                    if mine != its:
                        yield f"{its[0]} of {other} in op {i}: {op}", _with_op(plan, i, _with_operand(op, n, its))


SIBLINGS = (
    {"weights", "activations", "packed"},
    {"state", "host_gradients", "device_state"},
    {"activations", "spilled"},
    {"sums", "gradients"},
    {"squares", "norm"},
    {"host_gradients", "staging"},
)


def _other_arena(plan: Plan) -> Mutants:
    """A slot of an arena for values of the same sort."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands):
            for arena in sorted({a for s in SIBLINGS if slot.arena in s for a in s & sizes.keys()} - {slot.arena}):
                changed = _with_operand(op, n, (name, Slot(arena, min(slot.index, sizes[arena] - 1))))
                yield f"{name}={slot} -> {arena} in op {i}: {op}", _with_op(plan, i, changed)


def _other_operands(plan: Plan) -> Mutants:
    """An op that lacks an operand, has one twice, has two of them in each other's place, or one under another name."""
    for i, op in enumerate(plan.ops):
        for n, (name, slot) in enumerate(op.operands):
            yield f"no {name} in op {i}: {op}", _with_op(plan, i, _with_operand(op, n))
            yield f"{name} twice in op {i}: {op}", _with_op(plan, i, _with_operand(op, n, (name, slot), (name, slot)))
            for k, (other, its) in enumerate(op.operands[n + 1 :], start=n + 1):
                exchanged = _with_operand(_with_operand(op, n, (name, its)), k, (other, slot))
                yield f"{name} <-> {other} in op {i}: {op}", _with_op(plan, i, exchanged)
            for other in CONTRACT[op.kind].names:
                if other != name:
                    yield f"{name} as {other} in op {i}: {op}", _with_op(plan, i, _with_operand(op, n, (other, slot)))


def _other_policy(plan: Plan) -> Mutants:
    """The same ops under a policy that says otherwise of what is resident, spills, speculates or is squared; or other semantics."""
    policy = plan.policy
    for b in range(len(plan.workload.blocks)):
        resident, spill = set(policy.resident_blocks) ^ {b}, set(policy.spill_blocks) ^ {b}
        yield f"resident {sorted(resident)}", replace(plan, policy=replace(policy, resident_blocks=tuple(sorted(resident))))
        yield f"spilled {sorted(spill)}", replace(plan, policy=replace(policy, spill_blocks=tuple(sorted(spill))))
        squared = tuple(sorted(set(policy.square_blocks) ^ {b}))
        away = tuple(sorted(set(policy.offload_blocks) ^ {b}))
        yield f"offloaded {away}", replace(plan, policy=replace(policy, offload_blocks=away))
        yield f"squared {squared}", replace(plan, policy=replace(policy, square_blocks=squared))
        on_device = tuple(sorted(set(policy.device_blocks) ^ {b}))
        both = replace(policy, device_blocks=on_device, square_blocks=tuple(sorted({*policy.square_blocks, *on_device})))
        yield f"on the device {on_device}", replace(plan, policy=replace(policy, device_blocks=on_device))
        yield f"on the device and squared {on_device}", replace(plan, policy=both)
        speculating = tuple(sorted(set(policy.speculate_blocks) ^ {b}))
        yield f"speculating {speculating}", replace(plan, policy=replace(policy, speculate_blocks=speculating))
    for stride in {max(policy.boundary_stride - 1, 1), policy.boundary_stride + 1} - {policy.boundary_stride}:
        yield f"stride {stride}", replace(plan, policy=replace(policy, boundary_stride=stride))
    yield "a master in bf16", replace(plan, semantics=replace(plan.semantics, master_dtype="bf16"))
    other = "bf16" if plan.packed_slots else "nf4"
    yield f"a base in {other}", replace(plan, semantics=replace(plan.semantics, base=other))  # type: ignore[arg-type]
    blocks = plan.workload.blocks
    for b, block in enumerate(blocks):
        for n, p in enumerate(block.parameters):
            parameters = (*block.parameters[:n], replace(p, frozen=not p.frozen), *block.parameters[n + 1 :])
            changed = (*blocks[:b], replace(block, parameters=parameters), *blocks[b + 1 :])
            yield f"frozen {not p.frozen}: {p.name}", replace(plan, workload=replace(plan.workload, blocks=changed))


def _move_load(plan: Plan) -> Mutants:
    """A load into another weight slot."""
    return _other_slots(plan, {Kind.LOAD}, frozenset({"weights"}))


def _change_slot(plan: Plan) -> Mutants:
    return _other_slots(plan, set(Kind))


def _change_block(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for block in range(len(plan.workload.blocks)):
            if block != op.block:
                yield f"op {i} for block {block}: {op}", _with_op(plan, i, replace(op, block=block))


def _change_micro_batch(plan: Plan) -> Mutants:
    for i, op in enumerate(plan.ops):
        for m in (None, *range(plan.semantics.n_micro_batches)):
            if m != op.micro_batch:
                yield f"op {i} for micro-batch {m}: {op}", _with_op(plan, i, replace(op, micro_batch=m))


def _shrink_arena(plan: Plan) -> Mutants:
    """One byte less in one slot."""
    for n, arena in enumerate(plan.arenas):
        for i, n_bytes in enumerate(arena.slot_bytes):
            sizes = (*arena.slot_bytes[:i], n_bytes - 1, *arena.slot_bytes[i + 1 :])
            arenas = (*plan.arenas[:n], replace(arena, slot_bytes=sizes), *plan.arenas[n + 1 :])
            yield f"{arena.name}[{i}] one byte smaller", replace(plan, arenas=arenas)


MUTATIONS: dict[str, Callable[[Plan], Mutants]] = {
    "drop a wait": _drop_wait,
    "wait for an earlier op of that lane": _weaken_wait,
    "wait for the step before": _delay_wait,
    "drop load": _drops({Kind.LOAD}),
    "drop dequantise": _drops({Kind.DEQUANTISE}),
    "fill a slot again too early": _refill_early,
    "update too early what is trained apart": _stale_trained,
    "other packed or trained slots": lambda plan: _other_slots(plan, set(Kind), frozenset({"packed", "trained"})),
    "drop offload_gradient": _drops({Kind.OFFLOAD_GRADIENT}),
    "drop offload_activation": _drops({Kind.OFFLOAD_ACTIVATION}),
    "drop fetch_activation": _drops({Kind.FETCH_ACTIVATION}),
    "drop offload_saved": _drops({Kind.OFFLOAD_SAVED}),
    "drop fetch_saved": _drops({Kind.FETCH_SAVED}),
    "drop recompute": _drops({Kind.RECOMPUTE}),
    "drop a speculate or a settle": _drops({Kind.SPECULATE, Kind.SETTLE}),
    "drop any other op": _drops(
        set(Kind)
        - {
            Kind.LOAD,
            Kind.DEQUANTISE,
            Kind.OFFLOAD_GRADIENT,
            Kind.OFFLOAD_SQUARES,
            Kind.OFFLOAD_ACTIVATION,
            Kind.FETCH_ACTIVATION,
            Kind.OFFLOAD_SAVED,
            Kind.FETCH_SAVED,
            Kind.RECOMPUTE,
            Kind.SPECULATE,
            Kind.SETTLE,
        }
    ),
    "fetch before the spill": _fetch_early,
    "another slot of the ring for one stay": _other_stay,
    "another shared slot for one output": _other_shared_slot,
    "do the work of another recompute": _recompute_other,
    "speculate out of turn": _speculate_out_of_turn,
    "settle before the norm of all": _settle_early,
    "square out of turn": _square_out_of_turn,
    "update on the device before the norm": _update_on_device_early,
    "leave squares of what stays behind": _drops({Kind.OFFLOAD_SQUARES}),
    "state in another place": lambda plan: _other_slots(plan, set(Kind), frozenset({"state"})),
    "squares left behind": _squares_left_behind,
    "the squares of another block": _other_squares,
    "the shadow of another block": _other_shadow,
    "swap neighbours in a lane": _swap_neighbours,
    "swap two ops of a lane": _swap_anywhere,
    "move an op in its lane": _move_op,
    "another slot for all ops of a block": _rename_slot,
    "load into another weight slot": _move_load,
    "read or write another slot": _change_slot,
    "spill or fetch through another slot": lambda plan: _other_slots(plan, {Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION}),
    "what is saved through another slot": lambda plan: _other_slots(plan, {Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED}),
    "a slot of another arena": _other_arena,
    "another policy": _other_policy,
    "change the block": _change_block,
    "other operands": _other_operands,
    "change the micro-batch": _change_micro_batch,
    "shrink an arena": _shrink_arena,
}

# --- counting -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Count:
    """Of one kind of mutation: how many were made, killed, and let through; survivors that the oracle condemns."""

    made: int = 0
    killed: int = 0
    harmless: int = 0
    wrong: int = 0


def is_killed(mutant: Plan) -> bool:
    """Whether the checker refuses the plan."""
    try:
        check(mutant)
    except PlanError:
        return True
    return False


ADAPTED, SOME = Train(lora=Lora(rank=8)), Train(names=("*.1.norm.weight", "*.3.up_proj.weight", "norm.weight", "lm_head.weight"))
STAY = ("square_blocks", "device_blocks")
_SAMPLES: tuple[
    tuple[int, int, bool, str, dict[str, Any]], ...
] = (  # layers, micro-batches, tied, compute dtype, policy and sum groups
    (3, 1, False, "bf16", {"save": saves(all=(2,))}),
    (4, 1, True, "fp32", {"save": saves(all=(2,)), "gradient_slots": 2, "offload_late_blocks": 1, "update": Update.DEFERRED}),
    (3, 2, False, "bf16", {"save": saves(all=(2,)), "accumulation_group": 2, "gradient_slots": 2, "update": Update.EAGER}),
    (5, 2, True, "bf16", {"save": saves(all=(2,)), "accumulation_group": 2, "gradient_slots": 3, "offload_late_blocks": 2}),
    (3, 3, False, "bf16", {"save": saves(all=(2,)), "accumulation_group": 2, "gradient_slots": 2, "update": Update.DEFERRED}),
    (3, 2, True, "fp32", {"save": saves(all=(2,)), "update": Update.EAGER}),
    (3, 1, False, "bf16", {"update": Update.DEFERRED, "resident_blocks": (0, 2, 4), "spill_blocks": (0, 2)}),
    (
        3,
        3,
        True,
        "bf16",
        {"accumulation_group": 2, "update": Update.DEFERRED, "resident_blocks": (0, 1, 4), "spill_blocks": (0, 2)},
    ),
    (
        4,
        2,
        False,
        "bf16",
        {"accumulation_group": 2, "gradient_slots": 2, "offload_late_blocks": 1, "update": Update.EAGER}
        | {"resident_blocks": (3,), "spill_blocks": (0, 2, 3)},
    ),
    (3, 2, False, "fp32", {"save": saves(all=(2,)), "spill_blocks": (0,)}),
    (5, 2, False, "bf16", {"accumulation_group": 2, "update": Update.DEFERRED, "boundary_stride": 3}),
    (4, 3, True, "fp32", {"accumulation_group": 2, "boundary_stride": 2, "resident_blocks": (1, 4)}),
    (
        3,
        1,
        True,
        "bf16",
        {"update": Update.DEFERRED, "speculate_blocks": (0, 2), "resident_blocks": (2,)},
    ),
    (2, 2, False, "bf16", {"update": Update.DEFERRED, "speculate_blocks": (1, 2, 3), "boundary_stride": 2}),
    (3, 1, False, "fp32", {"update": Update.EAGER, "gradient_slots": 2, "offload_late_blocks": 1}),
    (
        3,
        2,
        False,
        "bf16",
        {"square_blocks": (0, 1, 2, 3, 4), "accumulation_group": 2, "gradient_slots": 2, "offload_late_blocks": 1},
    ),
    (
        4,
        2,
        False,
        "bf16",
        {"save": saves(all=(4,), products=(1, 2, 3)), "offload_blocks": (1, 3), "accumulation_group": 2, "spill_blocks": (0, 1)},
    ),
    (3, 3, True, "bf16", {"save": saves(products=(1, 2, 3)), "offload_blocks": (1, 2, 3), "update": Update.DEFERRED}),
    (2, 1, False, "bf16", {"square_blocks": (1, 3), "update": Update.EAGER, "gradient_slots": 2}),
    (
        3,
        1,
        True,
        "bf16",
        {
            "square_blocks": (1, 2, 3),
            "update": Update.DEFERRED,
            "speculate_blocks": (0, 2),
        },
    ),
    (
        3,
        2,
        False,
        "bf16",
        {"square_blocks": (0, 1, 3, 4), "device_blocks": (0, 3, 4), "accumulation_group": 2, "gradient_slots": 2}
        | {"offload_late_blocks": 1, "update": Update.DEFERRED, "speculate_blocks": (2,)},
    ),
    (
        3,
        1,
        True,
        "fp32",
        {"square_blocks": (1, 2, 3), "device_blocks": (1, 2, 3), "resident_blocks": (4,), "update": Update.DEFERRED},
    ),
    (2, 4, False, "bf16", {"sum_groups": 4, "accumulation_group": 4, "update": Update.DEFERRED, "gradient_slots": 2}),
    (2, 4, True, "bf16", {"sum_groups": 2, "accumulation_group": 2, "update": Update.DEFERRED}),
    (4, 1, False, "bf16", {"train": ADAPTED, "base": "int8", "update": Update.DEFERRED, **dict.fromkeys(STAY, (1, 2, 3, 4))}),
    (3, 2, True, "fp32", {"train": ADAPTED, "base": "int8", "resident_blocks": (1,), "boundary_stride": 2}),
    (3, 2, True, "bf16", {"train": ADAPTED, **dict.fromkeys(STAY, (1, 2, 3))}),
    (4, 2, False, "bf16", {"train": SOME, "accumulation_group": 2, "gradient_slots": 2, "offload_late_blocks": 1}),
    (4, 2, False, "bf16", {"train": SOME, "save": saves(all=(4,)), "spill_blocks": (2,), **dict.fromkeys(STAY, (2, 4))}),
)


def sample_plans() -> list[Plan]:
    """A few plans that differ in every knob: small enough to try all their mutants."""
    made = []
    for n_layers, n_micro_batches, tied, dtype, knobs in _SAMPLES:
        knobs = dict(knobs)
        of_semantics = {name: knobs.pop(name) for name in ("sum_groups", "train", "base") if name in knobs}
        policy = Policy(**{"prefetch_depth": 1 + knobs.get("offload_late_blocks", 0)} | knobs)
        semantics = Semantics(
            seq_len=4,
            batch_size=n_micro_batches,
            micro_batch=1,
            compute_dtype=dtype,  # type: ignore[arg-type]
            gradient_dtype="fp32" if "train" in of_semantics else "bf16",
            clip_norm=None if policy.update is Update.EAGER else 1.0,
            **of_semantics,
        )
        workload = small_workload(n_layers, tied, bool(policy.offload_blocks), semantics.train)
        made.append(lower(MODEL, workload, semantics, policy, PROFILE))
    return made


def tally(max_per_kind_and_plan: int = 10**9, seed: int = 0) -> tuple[dict[str, Count], Counter[str], list[str]]:
    """Mutants of the sample plans by kind; the survivors by what they do; and those that the oracle condemns."""
    counts = {kind: Count() for kind in MUTATIONS}
    survivors: Counter[str] = Counter()
    condemned: list[str] = []
    rng = random.Random(seed)
    for original in sample_plans():
        for kind, mutate in MUTATIONS.items():
            mutants, count = list(mutate(original)), counts[kind]
            if len(mutants) > max_per_kind_and_plan:
                mutants = rng.sample(mutants, max_per_kind_and_plan)
            for what, mutant in mutants:
                count.made += 1
                if is_killed(mutant):
                    count.killed += 1
                elif why := same_training(original, mutant):
                    count.wrong += 1
                    condemned.append(f"{kind}: {what}: {why}")
                else:
                    count.harmless += 1
                    survivors[f"{kind}: {_family(what)}"] += 1
    return counts, survivors, condemned


def _family(what: str) -> str:
    """The kinds of op that a description names: survivors of a family have one explanation."""
    words = what.replace(":", " ").split()
    return " ".join(sorted(w for w in words if w in set(Kind))) or words[0].partition("[")[0]


def table(counts: dict[str, Count]) -> str:
    """The counts as a markdown table."""
    rows = {kind: (c.made, c.killed, c.harmless, c.wrong) for kind, c in counts.items()}
    rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # type: ignore[assignment]
    lines = ["| mutation | made | killed | survived, proven harmless | survived, wrong |", "|---|---:|---:|---:|---:|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, (kind, *row))) + " |" for kind, row in rows.items())])
