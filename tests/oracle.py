"""Do two plans train the same, whatever the timing?

Slow and obvious, and it shares nothing with the checker: reachability in a networkx graph of four steps, and the training state
of every block written out as a term over everything it came from.
"""

from collections import defaultdict
from itertools import accumulate
from typing import Any

import networkx as nx

from runtime.plan import Kind, Plan, Slot, Update

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
    bit = {node: 1 << n for n, node in enumerate(graph)}
    after: dict[Node, int] = {}  # a bit for each node that some path leads to
    for node in reversed(list(nx.topological_sort(graph))):
        after[node] = 0
        for follower in graph.successors(node):
            after[node] |= bit[follower] | after[follower]
    uses: dict[Slot, list[tuple[Node, bool]]] = defaultdict(list)
    for node in graph:
        op = plan.ops[node[0]]
        for slot in {*op.reads, *op.writes}:
            uses[slot].append((node, slot in op.writes))
    for slot, users in uses.items():
        for n, (a, a_writes) in enumerate(users):
            for b, b_writes in users[n + 1 :]:
                if (a_writes or b_writes) and not (after[a] & bit[b] or after[b] & bit[a]):
                    return f"{slot}: {a} and {b}"
    return None


Term = tuple[Any, ...]


def outcome(plan: Plan, graph: "nx.DiGraph[Node]", names: dict[Term, int]) -> list[Any]:
    """What three steps of the plan compute, as terms: state of every block after each update, and the losses.

    A term says which op made a value from which values; `names` numbers equal terms alike, across plans.
    """

    def name(*term: Any) -> int:
        return names.setdefault(term, len(names))

    last, blocks = plan.semantics.n_micro_batches - 1, plan.workload.blocks
    reduced = plan.policy.accumulation_group > last
    held: dict[Slot, Any] = {plan.source_slot(b): name("initial", b) for b in range(len(blocks))}
    held |= {plan.state_slot(b): name("initial", b, "trained") for b in range(len(blocks))}
    trained = [b for b, block in enumerate(blocks) if any(not p.frozen for p in block.parameters)]
    # Of what the device squares only the first block has a norm, which ends the sum.
    n_norms = sum(b == trained[0] or b not in plan.policy.square_blocks for b in trained)
    results: list[Any] = []
    for node in nx.lexicographical_topological_sort(graph):
        i, step = node
        op = plan.ops[i]
        b, m = op.block, op.micro_batch
        values = {n: held.get(slot, name("garbage", str(slot), step)) for n, slot in op.operands}
        new: dict[str, Any] = {}
        is_first = m is not None and m % ((last + 1) // plan.semantics.sum_groups) == 0

        def joined(part: Any, into: tuple[Slot, ...] = op.every("into")) -> Any:
            """What becomes of a sum that joins those that wait for it, one after the other."""
            for slot in into:
                part = held[slot] = name("add", held.get(slot), part)
            return part

        match op.kind:
            case Kind.LOAD:
                new["weights"] = name("weights", b, values["state"], values.get("tied"))
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
                before = name("zero") if is_first or "sum" not in values else values["sum"]
                total = new["sum"] = name("add", before, term)
                total = joined(total)
                new["gradient"] = name("rounded", total) if reduced else total
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
                so_far = values["norm"] if isinstance(values["norm"], tuple) and values["norm"][0] == step else (step, frozenset())
                squares = [held.get(slot, name("garbage", str(slot), step)) for slot in op.every("squares")]
                new["norm"] = (step, so_far[1] | {name("squares", b, values.get("arrived"), values.get("tied"), *squares)})
                if len(new["norm"][1]) == n_norms:
                    results.append(("norm", step, *sorted(new["norm"][1])))
            case Kind.SPECULATE:
                new["shadow"] = name("speculated", b, *values.items())
            case Kind.UPDATE | Kind.SETTLE | Kind.UPDATE_ON_DEVICE:
                # Of a settle the term holds what either outcome comes from: the shadow, and the state with its gradient.
                new = dict.fromkeys(("state", "shadow"), name(op.kind, b, *values.items()))
                results.append(("state", step, b, new["state"]))
                if Slot("norm", 0) not in op.reads:  # eager: its own norm comes first, for the log and to stop
                    results.append(("after norm", step, b, any(plan.ops[k].block == b for k in _norms(plan, graph, node))))
        held.update({slot: new[n] for n, slot in op.operands if n in new})
    return sorted(map(repr, results))


def _norms(plan: Plan, graph: "nx.DiGraph[Node]", node: Node) -> list[int]:
    """The norm ops of the step that are done before the node in every timing."""
    return [i for i, step in nx.ancestors(graph, node) if step == node[1] and plan.ops[i].kind is Kind.NORM]


def _misplaced(original: Plan, mutant: Plan) -> str | None:
    """A slot that is too small for what goes into it, or that starts where tensors do not."""
    blocks, group, spill = original.workload.blocks, original.policy.accumulation_group, original.policy.spill_blocks
    stride, last = original.policy.boundary_stride, len(blocks) - 2
    again = {i for i in range(last) if i % stride}
    staying = [b.boundary_bytes for i, b in enumerate(blocks[:-1]) if i not in {*spill, *again} for _ in range(group)]
    for k in range(1, stride):
        staying += [max(blocks[i].boundary_bytes for i in again if i % stride == k)] * group
    leaving = [b.boundary_bytes for i, b in enumerate(blocks[:-1]) if i in spill for _ in range(group)]
    ring = [max(leaving)] * (2 * group + 1) if leaving else []
    squared = [8 * len(blocks[b].trained) for b in original.policy.square_blocks]
    saved = [original.recompute(b).slot_bytes for b in original.policy.offload_blocks]
    left = {"offloaded": [n for n in saved for _ in range(group)], "saved": [max(saved, default=0)] * 2}
    all_squared = [8 * sum(len(b.trained) for b in blocks), *squared]
    rounded_up = {"activations": staying + ring, "spilled": leaving, "squares": squared, "norm": all_squared, **left}  # originally
    used = {slot for op in mutant.ops for _, slot in op.operands}
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
        updates = [i for i, op in enumerate(mutant.ops) if op.kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE)]
        loads = [i for i, op in enumerate(mutant.ops) if op.kind is Kind.LOAD]
        if any(not nx.has_path(graph, (u, 0), (load, 1)) for u in updates for load in loads):
            return "no barrier"
    return None
