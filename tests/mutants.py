"""Which wrong plans does the checker let through?

A mutant is a plan with one thing changed. The checker should refuse it (kill it), or the change should be harmless. What
survives is put before `same_training`, a slow and obvious oracle that shares nothing with the checker: reachability in a
networkx graph of four steps, and the training state of every block written out as a term over everything it came from.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import networkx as nx

from planner.check import check
from planner.lower import lower
from runtime.errors import PlanError
from runtime.plan import Kind, Op, Plan, Policy, Semantics, Slot, Update, Wait
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


def _swapped(plan: Plan, i: int, j: int) -> Plan:
    """Ops i and j trade places; waits follow their ops."""
    at = {i: j, j: i}
    ops = [replace(op, waits=tuple(replace(w, op=at.get(w.op, w.op)) for w in op.waits)) for op in plan.ops]
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
                moved = [replace(op, waits=tuple(replace(w, op=at.get(w.op, w.op)) for w in op.waits)) for op in ops]
                yield f"moved {lane[n]}: {plan.ops[lane[n]]} to {lane[k]}", replace(plan, ops=tuple(moved))


def _rename_slot(plan: Plan) -> Mutants:
    """One block uses another slot of an arena, in all its ops: every op still says what the contract asks."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    slots = sorted({(op.block, s) for op in plan.ops for s in (*op.reads, *op.writes)})
    for block, slot in slots:
        for index in range(sizes[slot.arena]):
            if index != slot.index:
                new = {slot: Slot(slot.arena, index)}
                ops = tuple(
                    op
                    if op.block != block
                    else replace(
                        op,
                        reads=tuple(new.get(s, s) for s in op.reads),
                        writes=tuple(new.get(s, s) for s in op.writes),
                    )
                    for op in plan.ops
                )
                yield f"{slot} -> [{index}] in all ops of block {block}", replace(plan, ops=ops)


def _other_slots(plan: Plan, kinds: set[Kind]) -> Mutants:
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    for i, op in enumerate(plan.ops):
        for field in ("reads", "writes") if op.kind in kinds else ():
            slots: tuple[Slot, ...] = getattr(op, field)
            for n, slot in enumerate(slots):
                for index in range(sizes[slot.arena]):
                    if index != slot.index:
                        changed = (*slots[:n], Slot(slot.arena, index), *slots[n + 1 :])
                        yield f"{field} {slot} -> [{index}] in op {i}: {op}", _with_op(plan, i, _with(op, field, changed))


def _fetch_early(plan: Plan) -> Mutants:
    """A fetch as the first op of its lane, waiting for nothing; or before the spill that it returns, which waits for it."""
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.FETCH:
            first = next(j for j, other in enumerate(plan.ops) if other.lane is op.lane)
            bare = _with_op(plan, i, replace(op, waits=()))
            yield f"first in its lane: op {i}: {op}", _moved(bare, i, first)
            key = Kind.SPILL, op.block, op.micro_batch
            spill = next(j for j, other in enumerate(plan.ops) if (other.kind, other.block, other.micro_batch) == key)
            later = replace(plan.ops[spill], waits=(*plan.ops[spill].waits, Wait(i)))
            yield f"before op {spill}: op {i}: {op}", _with_op(bare, spill, later)


def _moved(plan: Plan, i: int, j: int) -> Plan:
    """Op i goes to place j <= i, and those from j on one place further; waits follow their ops."""
    order = [*range(j), i, *(k for k in range(j, len(plan.ops)) if k != i)]
    at = {k: place for place, k in enumerate(order)}
    ops = [plan.ops[k] for k in order]
    return replace(plan, ops=tuple(replace(op, waits=tuple(replace(w, op=at[w.op]) for w in op.waits)) for op in ops))


def _other_stay(plan: Plan) -> Mutants:
    """An output passes through another slot of the ring on its way out, or on its way back: every op says so."""
    ring = plan.policy.group_micro_batches * (plan.workload.n_layers + 1 - len(plan.policy.spill_blocks))
    n_slots = next(len(a.slot_bytes) for a in plan.arenas if a.name == "boundaries")
    for op in plan.ops:
        if op.kind not in (Kind.SPILL, Kind.FETCH):
            continue
        b, m, out = op.block, op.micro_batch, op.kind is Kind.SPILL
        users = {(Kind.FORWARD, b, m), (Kind.SPILL, b, m), (Kind.FORWARD, b + 1, m)}
        if not out:
            users = {(Kind.FETCH, b, m), (Kind.BACKWARD, b + 1, m), (Kind.BACKWARD, b, m)}
        slot = (op.reads if out else op.writes)[0]
        for index in range(ring, n_slots):
            new = {slot: Slot("boundaries", index)}
            if index != slot.index:
                ops = tuple(
                    replace(o, reads=tuple(new.get(s, s) for s in o.reads), writes=tuple(new.get(s, s) for s in o.writes))
                    if (o.kind, o.block, o.micro_batch) in users
                    else o
                    for o in plan.ops
                )
                yield f"stay in [{index}], not {slot}: {op}", replace(plan, ops=ops)


SIBLINGS = (
    {"weights", "vocab_weights", "resident_weights"},
    {"masters", "remainders", "host_weights", "moments"},
    {"boundaries", "spilled"},
    {"sums", "gradients", "vocab_sums", "vocab_gradients"},
)


def _other_arena(plan: Plan) -> Mutants:
    """A slot of an arena for values of the same sort."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    for i, op in enumerate(plan.ops):
        for field in ("reads", "writes"):
            slots: tuple[Slot, ...] = getattr(op, field)
            for n, slot in enumerate(slots):
                for arena in next((sorted(s & sizes.keys() - {slot.arena}) for s in SIBLINGS if slot.arena in s), []):
                    changed = (*slots[:n], Slot(arena, min(slot.index, sizes[arena] - 1)), *slots[n + 1 :])
                    yield f"{field} {slot} -> {arena} in op {i}: {op}", _with_op(plan, i, _with(op, field, changed))


def _other_policy(plan: Plan) -> Mutants:
    """The same ops under a policy that says otherwise of what is resident, what spills and how state is stored."""
    policy = plan.policy
    for b in range(len(plan.workload.blocks)):
        resident, spill = set(policy.resident_blocks) ^ {b}, set(policy.spill_blocks) ^ {b}
        yield f"resident {sorted(resident)}", replace(plan, policy=replace(policy, resident_blocks=tuple(sorted(resident))))
        yield f"spilled {sorted(spill)}", replace(plan, policy=replace(policy, spill_blocks=tuple(sorted(spill))))
    storage = "mirrored" if policy.storage == "split" else "split"
    yield f"storage {storage}", replace(plan, policy=replace(policy, storage=storage))  # type: ignore[arg-type]


def _with(op: Op, field: str, value: object) -> Op:
    changes: dict[str, Any] = {field: value}
    return replace(op, **changes)


def _move_load(plan: Plan) -> Mutants:
    """A load into another weight slot."""
    return ((what, mutant) for what, mutant in _other_slots(plan, {Kind.LOAD}) if what.startswith("writes"))


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
    "drop a load": _drops({Kind.LOAD}),
    "drop an offload": _drops({Kind.OFFLOAD}),
    "drop a spill": _drops({Kind.SPILL}),
    "drop a fetch": _drops({Kind.FETCH}),
    "drop any other op": _drops(set(Kind) - {Kind.LOAD, Kind.OFFLOAD, Kind.SPILL, Kind.FETCH}),
    "fetch before the spill": _fetch_early,
    "another slot of the ring for one stay": _other_stay,
    "swap neighbours in a lane": _swap_neighbours,
    "swap two ops of a lane": _swap_anywhere,
    "move an op in its lane": _move_op,
    "another slot for all ops of a block": _rename_slot,
    "load into another weight slot": _move_load,
    "read or write another slot": _change_slot,
    "spill or fetch through another slot": lambda plan: _other_slots(plan, {Kind.SPILL, Kind.FETCH}),
    "a slot of another arena": _other_arena,
    "another policy": _other_policy,
    "change the block": _change_block,
    "change the micro-batch": _change_micro_batch,
    "shrink an arena": _shrink_arena,
}

# --- the oracle ---------------------------------------------------------------------------------------------------------

N_STEPS = 4
Node = tuple[int, int]  # op, step


def unrolled(plan: Plan, n_steps: int = N_STEPS) -> "nx.DiGraph[Node]":
    """An edge from each op of each step to those that start after it: the next of its lane, and those that wait."""
    graph: nx.DiGraph[Node] = nx.DiGraph()
    last: dict[str, Node] = {}
    for step in range(n_steps):
        for i, op in enumerate(plan.ops):
            graph.add_node((i, step))
            if op.lane in last:
                graph.add_edge(last[op.lane], (i, step))
            last[op.lane] = (i, step)
            graph.add_edges_from(((w.op, step - w.distance), (i, step)) for w in op.waits if step >= w.distance)
    return graph


def race(plan: Plan, graph: "nx.DiGraph[Node]") -> str | None:
    """Two uses of a slot, one a write, that no path of the graph orders."""
    after = {node: nx.descendants(graph, node) for node in graph}
    uses: dict[Slot, list[tuple[Node, bool]]] = defaultdict(list)
    for node in graph:
        op = plan.ops[node[0]]
        for slot in {*op.reads, *op.writes}:
            uses[slot].append((node, slot in op.writes))
    for slot, users in uses.items():
        for n, (a, a_writes) in enumerate(users):
            for b, b_writes in users[n + 1 :]:
                if (a_writes or b_writes) and b not in after[a] and a not in after[b]:
                    return f"{slot}: {a} and {b}"
    return None


Term = tuple[Any, ...]


def outcome(plan: Plan, graph: "nx.DiGraph[Node]", names: dict[Term, int]) -> list[Any]:
    """What three steps of the plan compute, as terms: state of every block after each update, and the losses.

    A term says which op made a value from which values; `names` numbers equal terms alike, across plans.
    """

    def name(*term: Any) -> int:
        return names.setdefault(term, len(names))

    tied, n_micro_batches = plan.workload.tied, plan.semantics.n_micro_batches
    held: dict[Slot, Any] = {}
    for arena in plan.arenas:
        if arena.name in ("masters", "remainders", "moments", "host_weights"):
            held.update({Slot(arena.name, b): name("initial", arena.name, b) for b in range(len(arena.slot_bytes))})
    results: list[Any] = []
    for node in nx.lexicographical_topological_sort(graph):
        i, step = node
        op = plan.ops[i]
        b, m = op.block, op.micro_batch
        values = [held.get(slot, name("garbage", str(slot), step)) for slot in op.reads]
        n_inputs = 1 + (b > 0) if op.kind is Kind.LOSS else (3 if b else 1)  # of the math; what follows is the sum
        new: list[Any] = [None] * len(op.writes)
        match op.kind:
            case Kind.LOAD:
                new = [name("weights", b, *values)]
            case Kind.FORWARD:
                new = [name("forward", b, m, step, *values)]
            case Kind.LOSS | Kind.BACKWARD:
                inputs, sums = values[:n_inputs], values[n_inputs:]
                term = name("gradients", op.kind, b, m, step, *inputs)
                if op.kind is Kind.LOSS:
                    results.append(("loss", step, m, term))
                total = name("add", *(sums or [name("zero")]), term)
                for n, slot in enumerate(op.writes):
                    is_rounded = slot.arena == "gradients" or (slot.arena == "vocab_gradients" and not tied)
                    new[n] = name("of input", term) if slot.arena == "boundaries" else total
                    if is_rounded and plan.policy.group_micro_batches == n_micro_batches:
                        new[n] = name("rounded", total)
            case Kind.OFFLOAD | Kind.SPILL | Kind.FETCH:
                new = values
            case Kind.ACCUMULATE:
                new = [name("add", name("zero") if m == 0 else values[1], values[0])]
            case Kind.NORM:
                so_far = values[-1] if isinstance(values[-1], tuple) and values[-1][0] == step else (step, frozenset())
                new = [(step, so_far[1] | {name("squares", b, *values[:-1])})]
            case Kind.UPDATE:
                new = [name("updated", slot.arena, b, *values) for slot in op.writes]
                results.append(("state", step, b, tuple(new)))
                if Slot("norm", 0) not in op.reads:  # eager: its own norm comes first, for the log and to stop
                    results.append(("after norm", step, b, any(plan.ops[i].block == b for i in _norms(plan, graph, node))))
        held.update(zip(op.writes, new, strict=True))
        if op.kind is Kind.NORM and len(new[0][1]) == len(plan.workload.blocks):
            results.append(("norm", step, *sorted(new[0][1])))
    return sorted(map(repr, results))


def _norms(plan: Plan, graph: "nx.DiGraph[Node]", node: Node) -> list[int]:
    """The norm ops of the step that are done before the node in every timing."""
    return [i for i, step in nx.ancestors(graph, node) if step == node[1] and plan.ops[i].kind is Kind.NORM]


def _misplaced(original: Plan, mutant: Plan) -> str | None:
    """A slot that is too small for what goes into it, or that starts where tensors do not."""
    blocks, group, spill = original.workload.blocks, original.policy.group_micro_batches, original.policy.spill_blocks
    staying = [b.boundary_bytes for i, b in enumerate(blocks[:-1]) if i not in spill for _ in range(group)]
    leaving = [b.boundary_bytes for i, b in enumerate(blocks[:-1]) if i in spill for _ in range(group)]
    ring = [max(leaving)] * 3 * group if leaving else []
    rounded_up = {"boundaries": staying + ring, "spilled": leaving}  # in the original
    used = {slot for op in mutant.ops for slot in (*op.reads, *op.writes)}
    for a, b in zip(original.arenas, mutant.arenas, strict=True):
        starts = [0, *accumulate(b.slot_bytes)]
        for i, (needed_bytes, n_bytes) in enumerate(zip(a.slot_bytes, b.slot_bytes, strict=True)):
            if a.name in rounded_up:
                needed_bytes = rounded_up[a.name][i]
            if Slot(a.name, i) in used and (n_bytes < needed_bytes or starts[i] % 256):
                return f"{a.name}[{i}] is too small or not aligned"
    return None


def same_training(original: Plan, mutant: Plan) -> str | None:
    """None when the mutant trains exactly as the original for every timing; else why not."""
    if mutant.arenas != original.arenas and (what := _misplaced(original, mutant)):
        return what
    graph, graph_before = unrolled(mutant), unrolled(original)
    if not nx.is_directed_acyclic_graph(graph):
        return "deadlock"
    if what := race(mutant, graph):
        return f"race: {what}"
    names: dict[Term, int] = {}
    if outcome(original, graph_before, names) != outcome(mutant, graph, names):
        return "another result"
    if original.policy.update is Update.BARRIER:
        updates = [i for i, op in enumerate(mutant.ops) if op.kind is Kind.UPDATE]
        loads = [i for i, op in enumerate(mutant.ops) if op.kind is Kind.LOAD]
        if any(not nx.has_path(graph, (u, 0), (load, 1)) for u in updates for load in loads):
            return "no barrier"
    return None


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


def sample_plans() -> list[Plan]:
    """A few plans that differ in every knob: small enough to try all their mutants."""
    made = []
    Row = tuple[int, int, bool, int, int, Update, str, str, tuple[int, ...], tuple[int, ...]]
    rows: tuple[Row, ...] = (
        (1, 1, False, 1, 0, Update.BARRIER, "bf16", "mirrored", (), ()),
        (1, 1, True, 2, 1, Update.DEFERRED, "fp32", "mirrored", (), ()),
        (2, 2, False, 2, 0, Update.EAGER, "bf16", "mirrored", (), ()),
        (2, 2, True, 3, 2, Update.BARRIER, "bf16", "mirrored", (), ()),
        (3, 2, False, 2, 0, Update.DEFERRED, "bf16", "mirrored", (), ()),
        (2, 1, True, 1, 0, Update.EAGER, "fp32", "mirrored", (), ()),
        (1, 1, False, 1, 0, Update.DEFERRED, "bf16", "split", (0, 2, 4), (0, 2)),
        (3, 2, True, 1, 0, Update.DEFERRED, "bf16", "mirrored", (0, 1, 4), (0, 2)),
        (2, 2, False, 2, 1, Update.EAGER, "bf16", "split", (3,), (0, 2, 3)),
        (2, 1, False, 1, 0, Update.BARRIER, "fp32", "mirrored", (), (0,)),
    )
    for n_micro_batches, group, tied, gradient_slots, late, update, dtype, storage, resident, spill in rows:
        semantics = Semantics(
            seq_len=4,
            batch_size=n_micro_batches,
            micro_batch=1,
            compute_dtype=dtype,  # type: ignore[arg-type]
            clip_norm=None if update is Update.EAGER else 1.0,
        )
        policy = Policy(
            prefetch_depth=1 + late,
            gradient_slots=gradient_slots,
            offload_late_blocks=late,
            group_micro_batches=group,
            keep_blocks=(2,),
            update=update,
            storage=storage,  # type: ignore[arg-type]
            resident_blocks=resident,
            spill_blocks=spill,
        )
        made.append(lower(MODEL, small_workload(3 + late, tied), semantics, policy, PROFILE))
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
