"""Are the waits of a plan those that are needed, and no more?"""

import pytest
from hypothesis import given, settings

from planner.lower.arenas import host_slots
from planner.lower.lower import lower
from planner.lower.waits import waits_of
from runtime.errors import PlanError
from runtime.plan import Kind, Lane, Op, Policy, Semantics, Slot, Update, Wait
from tests.strategies import MODEL, PROFILE, cases, small_workload


@given(cases())
@settings(deadline=None)
def test_the_waits_of_the_second_step_are_those_of_every_later_one(case):
    plan = case.plan
    after = {}
    if plan.policy.update is Update.BARRIER:
        after[next(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)] = Wait(len(plan.ops) - 1, 1)
    second, third = (waits_of(plan.ops, after, n_steps) for n_steps in (2, 3))
    assert second == third


def test_an_op_waits_for_the_last_writer_and_a_writer_for_all_readers_once_each():
    a, b = Slot("a", 0), Slot("b", 0)
    ops = [
        Op(Kind.LOAD, Lane.H2D, 0, None, (), (a,)),
        Op(Kind.FORWARD, Lane.GPU, 0, 0, (a,), (b,)),
        Op(Kind.SPILL, Lane.D2H, 0, 0, (b,), ()),
        Op(Kind.LOAD, Lane.H2D, 0, None, (), (a,)),
        Op(Kind.FORWARD, Lane.GPU, 0, 0, (a,), (b,)),
    ]
    assert waits_of(ops, {}, 2) == [
        (Wait(4, 1),),  # the reader of `a` in the step before
        (Wait(0),),
        (Wait(1),),
        (Wait(1),),
        (Wait(2), Wait(3)),  # who reads `b`, and who wrote `a`
    ]


@pytest.mark.parametrize("name", ["boundary_stride", "transfer_chunk_bytes", "speculate_blocks", "product_blocks"])
def test_what_does_not_go_together_is_refused_in_one_line(name):
    workload, semantics = small_workload(4, tied=False), Semantics(seq_len=4, batch_size=2, micro_batch=1)
    wrong = {
        "boundary_stride": Policy(boundary_stride=2, keep_blocks=(1,)),
        "transfer_chunk_bytes": Policy(transfer_chunk_bytes=100),  # micro-batches one after another
        "speculate_blocks": Policy(speculate_blocks=(1,)),  # barrier
        "product_blocks": Policy(product_blocks=(1,), keep_blocks=(1,)),
    }[name]
    with pytest.raises(PlanError) as raised:
        lower(MODEL, workload, semantics, wrong, PROFILE)
    assert name in str(raised.value) or name == "transfer_chunk_bytes"
    assert "\n" not in str(raised.value)


def test_every_chunk_has_a_slot_of_its_own():
    workload, semantics = small_workload(4, tied=False), Semantics(seq_len=4, batch_size=1, micro_batch=1)
    plan = lower(MODEL, workload, semantics, Policy(transfer_chunk_bytes=1), PROFILE)
    numbers = [n for slots in host_slots(plan) for n in slots]
    moments = plan.arena("moments")
    assert moments is not None
    assert numbers == list(range(len(moments.slot_bytes)))
    assert len(numbers) > len(workload.blocks)


def test_a_layer_whose_input_did_not_stay_is_computed_again_just_before_it_is_needed():
    workload, semantics = small_workload(5, tied=False), Semantics(seq_len=4, batch_size=1, micro_batch=1)
    plan = lower(MODEL, workload, semantics, Policy(boundary_stride=2), PROFILE)
    walk = [(str(op.kind), op.block) for op in plan.ops if op.kind in (Kind.RECOMPUTE, Kind.BACKWARD)]
    assert walk == [
        ("backward", 5),
        ("recompute", 3), ("backward", 4), ("backward", 3),
        ("recompute", 1), ("backward", 2), ("backward", 1), ("backward", 0),
    ]  # fmt: skip
