"""Does a plan have the ops and the waits that are needed, and no more?"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings

from planner.lower.lower import lower
from planner.lower.passes import (
    computed,
    with_activations,
    with_barrier,
    with_gradients,
    with_late_offloads,
    with_saved,
    with_squares,
    with_updates,
    with_weights,
)
from planner.lower.waits import waits_of
from runtime.errors import PlanError
from runtime.plan import Kind, Op, Policy, Semantics, Slot, Update, Wait, saves
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
        Op(Kind.LOAD, 0, None, (("weights", a),)),
        Op(Kind.FORWARD, 0, 0, (("weights", a), ("y", b))),
        Op(Kind.OFFLOAD_ACTIVATION, 0, 0, (("y", b),)),
        Op(Kind.LOAD, 0, None, (("weights", a),)),
        Op(Kind.FORWARD, 0, 0, (("weights", a), ("y", b))),
    ]
    assert waits_of(ops, {}, 2) == [
        (Wait(4, 1),),  # the reader of `a` in the step before
        (Wait(0),),
        (Wait(1),),
        (Wait(1),),
        (Wait(2), Wait(3)),  # who reads `b`, and who wrote `a`
    ]


@pytest.mark.parametrize("name", ["boundary_stride", "square_blocks", "speculate_blocks", "save"])
def test_what_does_not_go_together_is_refused_in_one_line(name):
    workload, semantics = small_workload(4, tied=False), Semantics(seq_len=4, batch_size=2, micro_batch=1)
    wrong = {
        "boundary_stride": Policy(boundary_stride=2, save=saves(all=(1,))),
        "square_blocks": Policy(square_blocks=(1,)),  # micro-batches one after another
        "speculate_blocks": Policy(speculate_blocks=(1,)),  # barrier
        "save": Policy(save=saves(all=(5,))),  # of four layers
    }[name]
    with pytest.raises(PlanError) as raised:
        lower(MODEL, workload, semantics, wrong, PROFILE)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_block_has_a_slot_of_its_own_for_its_state_and_after_them_every_shadow():
    workload, semantics = small_workload(4, tied=False), Semantics(seq_len=4, batch_size=1, micro_batch=1)
    plan = lower(MODEL, workload, semantics, Policy(update=Update.DEFERRED, speculate_blocks=(1, 3)), PROFILE)
    assert {op.block: op["state"] for op in plan.ops if op.get("state")} == {b: Slot("state", b) for b in range(6)}
    assert {op.block: op["shadow"] for op in plan.ops if op.get("shadow")} == {1: Slot("state", 6), 3: Slot("state", 7)}


PASSES = [  # each with the ops that it adds, or moves, and the operands that it gives to those that are there
    (with_weights, {Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER}, {"weights", "trained"}),
    (partial(with_activations, ring_goes_on=True), {Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION}, {"x", "y"}),
    (partial(with_saved, ring_goes_on=True), {Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED}, {"saved"}),
    (
        partial(with_gradients, rings_go_on=True),
        {Kind.EXCHANGE, Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE},
        {"sum", "into", "gradient"},
    ),
    (with_squares, {Kind.SQUARE, Kind.OFFLOAD_SQUARES}, {"squares", "norm"}),
    (with_late_offloads, {Kind.OFFLOAD_GRADIENT}, set()),
    (with_updates, {Kind.NORM, Kind.SHARE_NORM, Kind.UPDATE, Kind.UPDATE_ON_DEVICE, Kind.SPECULATE, Kind.SETTLE}, set()),
    (with_barrier, set(), set()),
]


@pytest.mark.drawn
@given(cases())
@settings(deadline=None)
def test_a_pass_adds_what_it_is_for_and_leaves_all_else_as_it_was(case):
    plan = case.plan

    def written(ops, without=frozenset()):
        return [(op.kind, op.block, op.micro_batch, *(o for o in op.op().operands if o[0] not in without)) for op in ops]

    ops = list(computed(plan))
    for one_pass, kinds, names in PASSES:
        before = written(ops)
        ops = list(one_pass(plan, ops))
        after = written(ops, names)
        assert [op for op in after if op[0] not in kinds] == [op for op in before if op[0] not in kinds]
        assert Counter(before) <= Counter(after)
        assert {op[0] for op in (Counter(after) - Counter(before))} <= kinds
    assert [draft.op() for draft in ops] == [replace(op, waits=()) for op in plan.ops]


@pytest.mark.drawn
@given(cases())
@settings(deadline=None)
def test_dtypes_decide_how_large_slots_are_and_never_which_ops_there_are(case):
    for dtypes in (("bf16", "bf16", "bf16"), ("bf16", "fp32", "fp32"), ("fp32", "fp32", "fp32")):
        compute, gradient, master = dtypes
        if case.policy.device_blocks and not case.workload.trains_all:
            gradient = "fp32"  # which is summed there, and legal in no other dtype
        semantics = replace(case.semantics, compute_dtype=compute, gradient_dtype=gradient, master_dtype=master)
        assert replace(case, semantics=semantics).plan.ops == case.plan.ops


def test_a_layer_whose_input_did_not_stay_is_computed_again_just_before_it_is_needed():
    workload, semantics = small_workload(5, tied=False), Semantics(seq_len=4, batch_size=1, micro_batch=1)
    plan = lower(MODEL, workload, semantics, Policy(boundary_stride=2), PROFILE)
    walk = [(str(op.kind), op.block) for op in plan.ops if op.kind in (Kind.RECOMPUTE, Kind.BACKWARD)]
    assert walk == [
        ("backward", 5),
        ("recompute", 3), ("backward", 4), ("backward", 3),
        ("recompute", 1), ("backward", 2), ("backward", 1), ("backward", 0),
    ]  # fmt: skip
