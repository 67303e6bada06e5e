"""Oracle: decides if two plans compute the same training for every timing.

Slow, simple and independent of the checker: races by reachability in a networkx graph of four steps; values as symbolic terms over
their inputs; and the bytes of each operand as the runtime counts them (`Setup`).
"""

from collections import defaultdict
from itertools import accumulate
from typing import Any

import networkx as nx

from penstock.planner.lower.arenas import slot_elements, source_slot
from penstock.runtime.plan import Kind, Op, Plan, Slot, Update
from penstock.runtime.plan.workload import ITEM_BYTES

N_STEPS = 4
FP32, FP64, ALIGN_BYTES = 4, 8, 256
Node = tuple[int, int]  # op, step


def unrolled(plan: Plan, n_steps: int = N_STEPS) -> "nx.DiGraph[Node]":
    """Return the graph of `n_steps` steps, with an edge from each op to the next one of its lane and to ops that wait for it."""
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
    """Return two unordered uses of a slot, at least one of them a write, as text; None without races."""
    bit = {node: 1 << n for n, node in enumerate(graph)}
    reachable: dict[Node, int] = {}  # bit set of reachable nodes
    for node in reversed(list(nx.topological_sort(graph))):
        reachable[node] = 0
        for follower in graph.successors(node):
            reachable[node] |= bit[follower] | reachable[follower]
    uses: dict[Slot, list[tuple[Node, bool]]] = defaultdict(list)
    for node in graph:
        op = plan.ops[node[0]]
        for slot in {*op.reads, *op.writes}:
            uses[slot].append((node, slot in op.writes))
    for slot, users in uses.items():
        for n, (a, a_writes) in enumerate(users):
            for b, b_writes in users[n + 1 :]:
                if (a_writes or b_writes) and not (reachable[a] & bit[b] or reachable[b] & bit[a]):
                    return f"{slot}: {a} and {b}"
    return None


Term = tuple[Any, ...]


def outcome(plan: Plan, graph: "nx.DiGraph[Node]", names: dict[Term, int]) -> list[Any]:
    """Return the results of the steps as terms: the state of every block after each update, norms and losses.

    A term consists of an op and the terms of its inputs, e.g. ("forward", block, micro-batch, step, weights, trained, x). `names`
    maps a term to a number and is shared by plans, so that equal terms have equal numbers.
    """

    def name(*term: Any) -> int:
        return names.setdefault(term, len(names))

    last, blocks = plan.semantics.n_micro_batches - 1, plan.workload.blocks
    held: dict[Slot, Any] = {source_slot(plan, b): name("initial", b) for b in range(len(blocks))}
    held |= {plan.state_slot(b): name("initial", b, "trained") for b in range(len(blocks))}
    results: list[Any] = []
    for node in nx.lexicographical_topological_sort(graph):
        i, step = node
        op = plan.ops[i]
        b, m = op.block, op.micro_batch
        values = {n: held.get(slot, name("garbage", str(slot), step)) for n, slot in op.operands}
        new: dict[str, Any] = {}
        is_first = m is not None and m % ((last + 1) // plan.semantics.sum_groups) == 0

        def joined(part: Any, into: tuple[Slot, ...] = op.every("into")) -> Any:
            """Add `part` to the sums in these slots, one after the other; return the total."""
            for slot in into:
                part = held[slot] = name("add", held.get(slot), part)
            return part

        match op.kind:
            case Kind.READ:
                new["frozen"] = name("initial", b, "frozen")
            case Kind.LOAD:
                frozen = values.get("frozen", name("initial", b, "frozen"))  # without a disk it is part of the state
                new["weights"] = name("weights", b, values["state"], frozen, values.get("tied"))
            case Kind.GATHER:
                new["weights"] = name("gathered", b, values["weights"], values["state"], values.get("tied"))
            case Kind.DEQUANTISE:
                new["weights"] = name("unpacked", b, values["packed"])
            case Kind.FORWARD | Kind.RECOMPUTE:
                new["y"] = name("forward", b, m, step, *(values.get(n) for n in ("weights", "trained", "x")))
                new["saved"] = name("saved", new["y"])
            case Kind.OFFLOAD_SAVED:
                new["offloaded"] = values["saved"]
            case Kind.FETCH_SAVED:
                new["saved"] = values["offloaded"]
            case Kind.LOSS | Kind.BACKWARD:
                term = name("gradients", op.kind, b, m, step, *(values.get(n) for n in ("weights", "trained", "x", "y", "saved")))
                if op.kind is Kind.LOSS:
                    results.append(("loss", step, m, term))
                new["x"] = name("of input", term)
                sum_so_far = name("zero") if is_first or "sum" not in values else values["sum"]
                total = new["sum"] = name("add", sum_so_far, term)
                total = joined(total)
                if "tied" in values:
                    total = new["sum"] = name("add tied", total, values["tied"])
                new["gradient"] = name("rounded", total) if plan.sums_on_device(b) else total
            case Kind.EXCHANGE:
                new = {"received": name("received", b), "gradient": name("of all ranks", b, values["sum"])}
            case Kind.SQUARE:
                new["squares"] = name("squared", b, values["gradient"])
            case Kind.OFFLOAD_GRADIENT:
                new = {"arrived": values["gradient"], "norm": values.get("squares")}
            case Kind.OFFLOAD_SQUARES:
                new["norm"] = values["squares"]
            case Kind.OFFLOAD_ACTIVATION:
                new["spilled"] = values["y"]
            case Kind.FETCH_ACTIVATION:
                new["y"] = values["spilled"]
            case Kind.ACCUMULATE:
                new["arrived"] = name("add", name("zero") if is_first else values["arrived"], values["staged"])
                joined(new["arrived"])
            case Kind.NORM:
                new["norm"] = name("squares", b, values["arrived"], values.get("tied"))
            case Kind.CLIP:
                squares = [held.get(slot, name("garbage", str(slot), step)) for slot in op.every("norm")]
                new["clip"] = name("norm of all", *squares)
                results.append(("norm", step, new["clip"]))
            case Kind.SPECULATE:
                new["shadow"] = name("speculated", b, *values.items())
            case Kind.UPDATE | Kind.SETTLE | Kind.UPDATE_ON_DEVICE:
                # The term of a settle contains the inputs of both outcomes: the shadow, and the state with its gradient.
                new = dict.fromkeys(("state", "shadow"), name(op.kind, b, *values.items()))
                results.append(("state", step, b, new["state"]))
        held.update({slot: new[n] for n, slot in op.operands if n in new})
    return sorted(map(repr, results))


def n_bytes(plan: Plan, op: Op, name: str, slot: Slot) -> int:
    """Return the bytes that the runtime reads or writes in this operand of the op."""
    b, blocks, item_bytes = op.block, plan.workload.blocks, ITEM_BYTES[plan.semantics.compute_dtype]
    is_load, ranks = op.kind in (Kind.LOAD, Kind.GATHER), plan.semantics.ranks

    def on_host(block: int) -> int:
        frozen_bytes = 0 if block in plan.policy.disk_blocks else plan.frozen_bytes(block)
        return frozen_bytes + (0 if block in plan.policy.device_blocks else state_bytes(block))

    def state_bytes(block: int) -> int:
        return sum(plan.state_bytes(plan.part_elements(block)).values())

    match name:
        case "weights" if not (op.kind is Kind.LOAD and plan.unpacks(b)):
            return slot_elements(plan, b) * item_bytes
        case "weights" | "packed":
            return plan.uploaded(b)[1]
        case "frozen":
            return plan.read_bytes(b)
        case "state":
            return on_host(b) if slot.arena == "state" else state_bytes(b)
        case "trained" | "shadow":
            return state_bytes(b)
        case "tied" if is_load:
            return on_host(0) if slot.arena == "state" else state_bytes(0)
        case "tied" if op.kind is Kind.BACKWARD:
            return plan.gradient_elements(len(blocks) - 1) * FP32
        case "x":
            return blocks[b - 1].boundary_bytes
        case "y" | "spilled":
            return blocks[b].boundary_bytes
        case "saved" | "offloaded":
            return plan.recompute(b).slot_bytes
        case "sum":
            return plan.gradient_elements(b) * ITEM_BYTES["fp32" if plan.sums_in_place(b) else plan.sum_dtype(b)]
        case "into":
            return plan.gradient_elements(b) * FP32
        case "received":
            return 2 * ranks * plan.exchanged_elements() * FP32
        case "gradient" | "staged":
            return plan.sent_elements(b) * ITEM_BYTES[plan.gradient_dtype(b)]
        case "arrived" if op.kind is Kind.OFFLOAD_GRADIENT:
            return plan.sent_elements(b) * ITEM_BYTES[plan.gradient_dtype(b)]
        case "arrived" | "tied":
            target = b if name == "arrived" else len(blocks) - 1
            return plan.sent_elements(target) * ITEM_BYTES[plan.host_gradient_dtype(target)]
        case "squares":
            return FP64 * len(blocks[b].trained)
        case "norm":
            return FP64 * plan.norm_numbers(slot.index)
        case "clip":
            return FP64 * (1 if ranks == 1 else ranks * plan.shared_numbers())
    raise AssertionError(f"{op}: unknown operand {name}")


def needed_bytes(plan: Plan, ops: tuple[Op, ...]) -> dict[Slot, int]:
    """Return the largest operand in bytes of each slot that these ops use."""
    needed: dict[Slot, int] = defaultdict(int)
    for op in ops:
        for name, slot in op.operands:
            needed[slot] = max(needed[slot], n_bytes(plan, op, name, slot))
    return needed


def misplaced(original: Plan, mutant: Plan) -> str | None:
    """Return the first fault of the arenas as text: a missing, small or misaligned slot, or an arena in another memory."""
    places = {a.name: a.place for a in original.arenas}
    if any(places.get(a.name, a.place) is not a.place for a in mutant.arenas):
        return "an arena in another memory"
    has_bytes = {Slot(a.name, i): n for a in mutant.arenas for i, n in enumerate(a.slot_bytes)}
    starts = {Slot(a.name, i): offset for a in mutant.arenas for i, offset in enumerate([0, *accumulate(a.slot_bytes)])}
    for slot, needed in needed_bytes(original, mutant.ops).items():
        if has_bytes.get(slot, -1) < needed or starts[slot] % ALIGN_BYTES:
            return f"{slot} is too small, or not aligned"
    return None


def same_training(original: Plan, mutant: Plan) -> str | None:
    """Return None if the mutant trains exactly like the original for every timing, else the difference as text."""
    if misplacement := misplaced(original, mutant):
        return misplacement
    graph, graph_before = unrolled(mutant), unrolled(original)
    if not nx.is_directed_acyclic_graph(graph):
        return "deadlock"
    if unordered := race(mutant, graph):
        return f"race: {unordered}"
    names: dict[Term, int] = {}
    if outcome(original, graph_before, names) != outcome(mutant, graph, names):
        return "another result"
    if original.policy.update is Update.BARRIER:
        updates = [i for i, op in enumerate(mutant.ops) if op.kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE)]
        loads = [i for i, op in enumerate(mutant.ops) if op.kind is Kind.LOAD]
        if any(not nx.has_path(graph, (u, 0), (load, 1)) for u in updates for load in loads):
            return "no barrier"
    return None
