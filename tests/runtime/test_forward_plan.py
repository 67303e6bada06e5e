"""Does a forward plan compute the forward, whatever the timing, in the memory that training has?"""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lower.lower import lower
from planner.lower.waits import with_waits
from runtime.errors import PlanError
from runtime.plan import Kind, Lane, Plan, Policy, Semantics, Slot
from runtime.plan.forward_plan import forward_plan, most_micro_batches
from tests.oracle import race, unrolled
from tests.strategies import MODEL, PROFILE, plans, small_workload

LAW = settings(max_examples=60, deadline=None)
COUNTS = st.integers(1, 9)


def wrong_value(plan: Plan, trained: Plan, order) -> str | None:
    """The first op that finds in its slots something else than a forward needs, in one order of three steps' ops."""
    n_chunks = {
        b: len({op.chunk for op in trained.ops if (op.kind, op.block) == (Kind.LOAD, b)}) for b in range(len(plan.workload.blocks))
    }
    weights: dict[Slot, tuple[int, list]] = {}  # of which block, and which of its chunks are there
    held: dict[Slot, tuple] = {}
    for index, step in order:
        op = plan.ops[index]
        if op.kind is Kind.LOAD:
            (to,) = op.writes
            block, chunks = weights.get(to, (None, []))
            weights[to] = (op.block, [*(chunks if block == op.block and op.chunk else []), op.chunk])
            continue
        block, chunks = weights.get(op.reads[0], (None, []))
        if block != op.block or len(chunks) != n_chunks[op.block]:
            return f"step {step}, {op.name}: {op.reads[0]} holds {chunks} of block {block}"
        if op.block and held.get(op.reads[1]) != (op.block - 1, op.micro_batch, step):
            return f"step {step}, {op.name}: {op.reads[1]} holds {held.get(op.reads[1])}"
        held |= dict.fromkeys(op.writes, (op.block, op.micro_batch, step))
    return None


@given(plan=plans(), n=COUNTS)
@LAW
def test_every_block_of_every_micro_batch_is_computed_from_the_right_values_whatever_the_timing(plan, n):
    forward = forward_plan(plan, n)
    graph = unrolled(forward, 3)
    assert nx.is_directed_acyclic_graph(graph)
    assert race(forward, graph) is None
    assert wrong_value(forward, plan, nx.lexicographical_topological_sort(graph)) is None
    computed = [(op.block, op.micro_batch) for op in forward.ops if op.kind is Kind.FORWARD]
    assert sorted(computed) == [(b, m) for b in range(len(plan.workload.blocks)) for m in range(n)]


@given(plan=plans(), n=COUNTS)
@LAW
def test_the_waits_are_those_that_are_derived_for_any_number_of_lanes(plan, n):
    forward = forward_plan(plan, n)
    bare = [replace(op, waits=()) for op in forward.ops]
    assert forward.ops == with_waits(bare, {})


@given(plan=plans(), data=st.data())
@LAW
def test_no_wait_can_be_left_out(plan, data):
    forward = forward_plan(plan, data.draw(COUNTS))
    waiting = [i for i, op in enumerate(forward.ops) if op.waits]
    i = data.draw(st.sampled_from(waiting))
    ops = [replace(op, waits=()) if j == i else op for j, op in enumerate(forward.ops)]
    less = replace(forward, ops=tuple(ops))
    assert race(less, unrolled(less)) is not None


@given(plan=plans(), n=COUNTS)
@LAW
def test_weights_come_once_a_group_as_they_come_in_training_and_groups_are_as_large_as_the_boundaries_allow(plan, n):
    forward = forward_plan(plan, n)
    group = min(n, len(plan.arena("boundaries").slot_bytes) // 2)
    n_groups = -(-n // group)
    trained = {(op.block, op.chunk, op.reads) for op in plan.ops if op.kind is Kind.LOAD}
    loads = [(op.block, op.chunk, op.reads) for op in forward.ops if op.kind is Kind.LOAD]
    assert set(loads) == trained
    for key in trained:
        assert 1 <= loads.count(key) <= (1 if key[0] in plan.policy.resident_blocks else n_groups)
    places = [op.micro_batch // group * len(plan.workload.blocks) + op.block for op in forward.ops if op.kind is Kind.FORWARD]
    assert places == sorted(places), "layer by layer, group by group"
    assert {op.lane for op in forward.ops} == {Lane.H2D, Lane.GPU}


@given(plan=plans(), n=COUNTS)
@LAW
def test_everything_lies_in_the_arenas_of_training_and_fits_there(plan, n):
    forward = forward_plan(plan, n)
    assert forward.arenas == plan.arenas
    sizes = {Slot(a.name, i): n_bytes for a in plan.arenas for i, n_bytes in enumerate(a.slot_bytes)}
    trained = {(op.block, slot.arena) for op in plan.ops if op.kind is Kind.LOAD for slot in op.writes}
    for op in forward.ops:
        if op.kind is Kind.LOAD:
            assert (op.block, op.writes[0].arena) in trained
            assert op.writes[0].arena != "resident_weights" or op.writes[0] in {s for o in plan.ops for s in o.writes}
        for slot in (*op.reads[1:], *op.writes) if op.kind is Kind.FORWARD else ():
            assert sizes[slot] >= plan.workload.blocks[0].boundary_bytes
    assert Plan.parse(str(forward)) == forward


def test_the_head_only_reads():
    workload = small_workload(2, tied=True)
    plan = lower(MODEL, workload, Semantics(seq_len=4, batch_size=2, micro_batch=1), Policy(), PROFILE)
    assert most_micro_batches(plan) == 1
    assert [str(op) for op in forward_plan(plan, 1).ops] == [
        "load h2d b0 < host_weights[0] > vocab_weights[0] ^ 7@1",
        "forward gpu b0 m0 < vocab_weights[0] > boundaries[0] ^ 0",
        "load h2d b1 < host_weights[1] > weights[0]",
        "forward gpu b1 m0 < weights[0] boundaries[0] > boundaries[1] ^ 2",
        "load h2d b2 < host_weights[2] > weights[1]",
        "forward gpu b2 m0 < weights[1] boundaries[1] > boundaries[0] ^ 4",
        "load h2d b3 < host_weights[3] host_weights[0] > vocab_weights[0] ^ 1",
        "forward gpu b3 m0 < vocab_weights[0] boundaries[0] ^ 6",
    ]


def test_a_plan_that_never_loads_a_block_is_refused_in_one_line():
    plan = lower(MODEL, small_workload(2, tied=False), Semantics(seq_len=4, batch_size=2, micro_batch=1), Policy(), PROFILE)
    less = replace(plan, ops=tuple(op for op in plan.ops if op.kind is not Kind.LOAD or op.block != 1))
    with pytest.raises(PlanError, match=r"^the plan never loads block 1; make it again with `penstock plan`$"):
        forward_plan(less, 1)
