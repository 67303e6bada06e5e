"""Lowering: ops, slots and waits of a policy, without superfluous ones."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.planner.check.shape import _own_bytes
from penstock.planner.lower import passes
from penstock.planner.lower.lower import barrier
from penstock.planner.lower.op_table import KINDS, NAMES, n_ops
from penstock.runtime.plan import Kind, Plan, Policy, Update, Wait
from penstock.runtime.plan.footprint import host_needs
from penstock.runtime.plan.legality import can_stay
from penstock.runtime.plan.optimizer import STORED_BYTES
from penstock.runtime.plan.packed import layout
from penstock.runtime.plan.train import Train
from tests.edits import rewaited, sizes_of, small, waits_of
from tests.mutants import ADAPTED
from tests.strategies import Case, cases
from tests.tiny import tiny_config
from tests.training import LEAN, plan_of, semantics_of

law = settings(deadline=None)
PACKED = ADAPTED | {"base": "int8", "device_blocks": (1, 2, 3)}


@law
@given(cases())
def test_waits_of_the_second_step_are_those_of_every_later_one(case: Case) -> None:
    plan = case.plan
    extra_waits = {}
    if plan.policy.update is Update.BARRIER:
        extra_waits[next(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)] = Wait(len(plan.ops) - 1, 1)
    second, third = (waits_of(plan.ops, extra_waits, n_steps) for n_steps in (2, 3))
    assert second == third
    assert rewaited(plan) == plan


PASSES = [  # pass, kinds of ops that it adds, operands that it adds to existing ops
    (passes.with_weights, {Kind.READ, Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER}, {"weights", "trained"}),
    (passes.with_activations, {Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION}, {"x", "y"}),
    (passes.with_saved, {Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED}, {"saved"}),
    (passes.with_gradients, {Kind.EXCHANGE, Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE}, {"sum", "into", "tied", "gradient"}),
    (passes.with_squares, {Kind.SQUARE, Kind.OFFLOAD_SQUARES}, {"squares", "norm"}),
    (passes.with_updates, {Kind.NORM, Kind.CLIP, Kind.UPDATE, Kind.UPDATE_ON_DEVICE, Kind.SPECULATE, Kind.SETTLE}, set()),
]


@law
@given(cases())
def test_a_pass_adds_its_own_ops_and_leaves_the_others(case: Case) -> None:
    step = passes.computed(case.plan)
    builder, grouped = step.builder, None
    for one_pass, kinds, names in PASSES:
        n_ops, n_parts, n_uses = builder.n_ops, len(builder.ops), len(builder.operands)
        grouped = one_pass(step, *([grouped] if grouped else [])) or grouped
        assert {KINDS[kind] for part in builder.ops[n_parts:] for kind in part[1]} <= kinds
        assert {NAMES[name] for op, name, _ in np.concatenate(builder.operands[n_uses:], axis=1).T if op < n_ops} <= names
    assert builder.build(extra_waits=partial(barrier, case.plan)).ops() == case.plan.ops


@law
@given(cases())
def test_a_plan_has_as_many_ops_as_the_table_says(case: Case) -> None:
    """Exact counts, except loads: weights still in their slot are not loaded again, recomputation may need one more per group."""
    plan = case.plan
    counts = Counter((op.kind, op.block) for op in plan.ops)
    n_groups = -(-plan.semantics.n_micro_batches // plan.policy.accumulation_group)
    for kind in Kind:
        for b in range(len(plan.workload.blocks)):
            n = n_ops(plan, kind, b)
            if kind in (Kind.READ, Kind.LOAD, Kind.GATHER, Kind.DEQUANTISE):
                assert min(n, 1) <= counts[kind, b] <= n + n_groups * (n_ops(plan, Kind.RECOMPUTE, b) > 0)
            else:
                assert counts[kind, b] == n


@law
@given(cases())
def test_dtypes_decide_sizes_of_slots_and_never_the_ops(case: Case) -> None:
    for dtypes in (("bf16", "bf16", "bf16"), ("bf16", "fp32", "fp32"), ("fp32", "fp32", "fp32")):
        compute, gradient, master = dtypes
        if compute == "fp32" and case.semantics.products == "fp8":
            continue  # only beside bf16
        if case.policy.device_blocks and not case.workload.trains_all:
            gradient = "fp32"  # summed on the device, legal only in fp32
        dtypes_of = {"compute_dtype": compute, "gradient_dtype": gradient, "master_dtype": master, "weight_rounding": "half_up"}
        changed = replace(case.semantics, **dtypes_of)
        if {*case.policy.device_blocks} <= {*can_stay(case.workload, changed)}:  # AdamW needs whole vector registers there
            assert replace(case, semantics=changed).plan.ops == case.plan.ops


def walk(plan: Plan, *kinds: Kind) -> list[tuple[str, int]]:
    return [(str(op.kind), op.block) for op in plan.ops if op.kind in kinds]


def test_an_output_is_computed_again_just_before_it_is_needed() -> None:
    assert walk(small(n_layers=5, boundary_stride=2), Kind.RECOMPUTE, Kind.BACKWARD) == [
        ("backward", 5),
        ("recompute", 3), ("backward", 4), ("backward", 3),
        ("recompute", 1), ("backward", 2), ("backward", 1), ("backward", 0),
    ]  # fmt: skip


def test_no_backward_and_no_update_go_below_what_is_trained() -> None:
    """Boundary stride 2: the second layer of (1, 2) is trained, and both layers of (3, 4)."""
    for first, again in ((1, {1, 3}), (2, {3})):
        plan = small(n_layers=5, train=Train(layers=(first, 4)), boundary_stride=2)
        assert {b for _, b in walk(plan, Kind.RECOMPUTE)} == again
        for kind in (Kind.BACKWARD, Kind.OFFLOAD_GRADIENT, Kind.NORM, Kind.UPDATE):
            assert {b for _, b in walk(plan, kind)} == {*range(first + 1, 6)}


def test_a_layer_that_comes_packed_is_unpacked_where_it_is_used() -> None:
    plan = small(**PACKED, prefetch_depth=2)
    assert (len(sizes_of(plan, "packed")), len(sizes_of(plan, "weights"))) == (3, 2)  # one for layers, one for the vocabulary
    assert walk(plan, Kind.DEQUANTISE, Kind.FORWARD, Kind.BACKWARD) == [
        ("forward", 0),
        ("dequantise", 1), ("forward", 1), ("dequantise", 2), ("forward", 2), ("dequantise", 3), ("forward", 3),
        ("backward", 3), ("dequantise", 2), ("backward", 2), ("dequantise", 1), ("backward", 1),
    ]  # fmt: skip


def test_a_disk_is_read_before_each_load_unless_the_host_has_it() -> None:
    plan = small(**PACKED | {"base": "bf16"}, disk_blocks=(1, 3))
    assert sizes_of(plan, "frozen") == (4096,) * 2
    assert [sizes_of(plan, "state")[b] for b in (1, 3)] == [0, 0]
    assert walk(plan, Kind.READ, Kind.LOAD) == [
        ("load", 0),
        ("read", 1), ("load", 1), ("load", 2), ("read", 3), ("load", 3), ("load", 4), ("load", 1),
    ]  # fmt: skip
    assert walk(small(**PACKED, disk_blocks=(1, 2, 3), resident_blocks=(2,)), Kind.READ) == [("read", b) for b in (1, 2, 3)]


def test_outputs_between_two_that_stay_share_slots() -> None:
    """Five layers, stride 3, groups of two: two slots each for blocks 0, 3 and 5, two shared by 1 and 4, the last for 2."""
    plan = small(n_layers=5, n_micro_batches=2, accumulation_group=2, boundary_stride=3)
    slots = {op.name: op["y"].index for op in plan.ops if op.kind is Kind.FORWARD}
    assert [slots[f"forward gpu b{b} m1"] for b in range(6)] == [1, 7, 9, 3, 7, 5]


def test_slots_have_the_size_of_what_is_trained_or_uploaded() -> None:
    """LoRA of rank 8 on 8 x 100 (150, 200) weights: A is 8 x 100, B is 8 x 8, padded to multiples of 128; the norm has 8."""
    trained = [896 + 128, 1280 + 128, 1664 + 128]  # A with 800, 1200, 1600 elements, B with 64
    packed = [layout((8, n), "int8").n_bytes for n in (100, 150, 200)]
    assert packed == [1024 + 256, 1280 + 256, 1792 + 256]
    frozen = [n + 256 for n in packed]
    vocabulary = (40 * 8 + 64) * 2, (128 + 40 * 8 + 64) * 2  # embedding; norm and head: frozen
    plan = small(**PACKED)
    assert sizes_of(plan, "device_state") == tuple(12 * n for n in trained)
    assert sizes_of(plan, "state") == (vocabulary[0], *frozen, vocabulary[1])
    assert sizes_of(plan, "packed") == (2 * trained[2] + frozen[2],) * 2
    assert sizes_of(plan, "gradients") == (0, 0, *(4 * n for n in trained))
    assert sizes_of(plan, "host_gradients") == (0,) * 5
    assert {op.kind for op in plan.ops}.isdisjoint({Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE, Kind.UPDATE}), "no work of the host"
    on_host = small(train=plan.semantics.train, base="int8")
    state = [12 * n + f for n, f in zip(trained, frozen, strict=True)]
    assert sizes_of(on_host, "state") == (vocabulary[0], *state, vocabulary[1])
    assert sizes_of(on_host, "host_gradients") == (0, *(2 * n for n in trained), 0)


@law
@given(cases().filter(lambda case: not case.workload.trains_all and case.semantics.train.lora is None))
def test_freezing_asks_for_no_more_memory_and_no_more_ops(case: Case) -> None:
    """Compare host memory, gradient offloads and backward ops with full training of the same model."""
    if case.policy.device_blocks:
        return

    def thawed(blocks: Any) -> Any:
        return tuple(replace(b, parameters=tuple(replace(p, frozen=False) for p in b.parameters)) for b in blocks)

    group = max(case.policy.accumulation_group, case.semantics.least_group)
    case = replace(case, policy=replace(case.policy, disk_blocks=(), sum_blocks=(), accumulation_group=group))
    workload = replace(case.workload, blocks=thawed(case.workload.blocks), smaller=thawed(case.workload.smaller))
    plan, full = case.plan, replace(case, workload=workload, semantics=replace(case.semantics, train=Train(), base="bf16")).plan
    assert sum(host_needs(plan, plan.semantics.ranks).values()) <= sum(host_needs(full).values())
    for kind in (Kind.OFFLOAD_GRADIENT, Kind.BACKWARD):
        assert len(walk(plan, kind)) <= len(walk(full, kind))


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": "fp32"}, {"master_dtype": "bf16"}, *LEAN.values()])
def test_no_two_arrays_of_a_slot_lie_a_multiple_of_256_mib_apart(fields: dict[str, Any]) -> None:
    """Arrays at this distance share cache sets and updates are 3 times slower. The checker counts the same padding."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama", **fields), Policy(accumulation_group=4))
    for n in (128, 2**24, 2**25, 2**26, 2**27, 3 * 2**27, 2**28, 2**26 + 128):
        arrays = plan.state_bytes(n)
        begins = [*accumulate(arrays.values(), initial=0)][:-1]
        assert all((b - a) % 2**28 for a, b in combinations(begins, 2))
        bare = [int(STORED_BYTES[dtype] * n) for dtype in plan.stored().values()]
        assert _own_bytes(bare) == sum(arrays.values())
        padded = [a != b for a, b in zip([*arrays.values()][:-1], bare[:-1], strict=True)]
        assert any(padded) == any((sum(bare[i:j])) % 2**28 == 0 for i, j in combinations(range(len(bare)), 2))
