"""Forward-only plans: correct values under any timing, in the arenas of training."""

from dataclasses import replace

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.lower.forward import forward_plan
from penstock.runtime.plan import Kind, Lane, Op, Plan, Slot
from tests.lanes import examples
from tests.oracle import race, unrolled
from tests.strategies import plans

LAW = settings(max_examples=examples(30), deadline=None)
COUNTS = st.integers(1, 9)


def wrong_value(plan: Plan, order) -> str | None:
    """Return a description of the first op that reads a wrong slot value in this op order, or None."""
    # Block with complete weights in the slot. State on the device is where some blocks' weights are
    weights: dict[Slot, int | None] = {plan.state_slot(b): b for b in plan.policy.device_blocks if plan.computes_in_place(b)}
    parts: dict[Slot, int] = {}  # block with at least this rank's shard in the slot, packed or unpacked
    held: dict[Slot, tuple] = {}
    read: dict[Slot, int] = {}
    for index, step in order:
        op = plan.ops[index]
        place = f"step {step}, {op.name}"
        match op.kind:
            case Kind.READ:
                read[op["frozen"]] = op.block
            case Kind.LOAD | Kind.DEQUANTISE:
                if op.get("frozen") is not None and read.get(op["frozen"]) != op.block:
                    return f"{place}: {op['frozen']} holds block {read.get(op['frozen'])}"
                if op.kind is Kind.DEQUANTISE and parts.get(op["packed"]) != op.block:
                    return f"{place}: {op['packed']} holds block {parts.get(op['packed'])}"
                is_part = plan.semantics.ranks > 1 and plan.workload.blocks[op.block].trained
                parts[op["weights"]] = op.block
                weights[op["weights"]] = None if is_part else op.block
            case Kind.GATHER:
                weights[op["weights"]] = parts.pop(op["weights"], None)
            case _:
                if weights.get(op["weights"]) != op.block:
                    return f"{place}: {op['weights']} holds block {weights.get(op['weights'])}"
                if op.block and held.get(op["x"]) != (op.block - 1, op.micro_batch, step):
                    return f"{place}: {op['x']} holds {held.get(op['x'])}"
                held |= dict.fromkeys(op.every("y"), (op.block, op.micro_batch, step))
    return None


@given(plan=plans(), n=COUNTS)
@LAW
def test_every_forward_finds_its_values_in_the_arenas_of_training(plan, n):
    """Whatever the timing; a forward plan has no arena of its own."""
    forward = forward_plan(plan, n)
    graph = unrolled(forward, 3)
    assert nx.is_directed_acyclic_graph(graph)
    assert race(forward, graph) is None
    assert wrong_value(forward, nx.lexicographical_topological_sort(graph)) is None
    computed = [(op.block, op.micro_batch) for op in forward.ops if op.kind is Kind.FORWARD]
    assert sorted(computed) == [(b, m) for b in range(len(plan.workload.blocks)) for m in range(n)]
    assert forward.arenas == plan.arenas
    sizes = {Slot(a.name, i): n_bytes for a in plan.arenas for i, n_bytes in enumerate(a.slot_bytes)}
    trained: dict[Slot, set[int]] = {}  # blocks that training loads into the slot
    for op in plan.ops:
        if op.kind is Kind.LOAD:
            trained.setdefault(op["weights"], set()).add(op.block)
    layers = {*range(1, plan.workload.n_layers + 1)}
    streamed = layers - {*plan.policy.resident_blocks}
    for op in forward.ops:
        assert all(slot in sizes for _, slot in op.operands)
        if op.kind is Kind.LOAD:
            blocks = trained[op["weights"]]
            through = layers if op["weights"].arena == "packed" else streamed  # resident layers are unpacked first
            assert op.block in blocks or (op.block in through and blocks <= through)
        else:
            assert all(sizes[slot] >= plan.workload.blocks[0].boundary_bytes for name, slot in op.operands if name in ("x", "y"))
    if n % forward.semantics.sum_groups == 0:  # ranks shard weights by sum groups
        assert Plan.parse(str(forward)) == forward


@given(plan=plans(), data=st.data())
@LAW
def test_no_wait_can_be_left_out(plan, data):
    forward = forward_plan(plan, data.draw(COUNTS))
    i = data.draw(st.sampled_from([i for i, op in enumerate(forward.ops) if op.waits]))
    ops = [replace(op, waits=()) if j == i else op for j, op in enumerate(forward.ops)]
    unsafe = replace(forward, ops=tuple(ops))
    assert race(unsafe, unrolled(unsafe)) is not None


@given(plan=plans(), n=COUNTS)
@LAW
def test_weights_come_once_a_group_of_as_many_as_fit(plan, n):
    forward = forward_plan(plan, n)
    group = min(n, len(plan.arena("activations").slot_bytes) // 2)
    n_groups = -(-n // group)

    def loaded(op: Op) -> tuple[int, tuple[Slot, ...]]:  # ignores the staging slot of disk reads
        return op.block, tuple(slot for slot in op.reads if slot.arena != "frozen")

    trained = {loaded(op) for op in plan.ops if op.kind is Kind.LOAD}
    loads = [loaded(op) for op in forward.ops if op.kind is Kind.LOAD]
    assert set(loads) == trained
    for key in trained:
        assert 1 <= loads.count(key) <= (1 if key[0] in plan.policy.resident_blocks else n_groups)
    places = [op.micro_batch // group * len(plan.workload.blocks) + op.block for op in forward.ops if op.kind is Kind.FORWARD]
    assert places == sorted(places), "layer by layer, group by group"
    optional_lanes = {Lane.NET: plan.semantics.ranks > 1, Lane.DISK: bool(plan.policy.disk_blocks)}
    assert {op.lane for op in forward.ops} == {Lane.H2D, Lane.GPU} | {lane for lane, has in optional_lanes.items() if has}
