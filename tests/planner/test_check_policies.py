"""Illegal policies, workloads and semantics: one-line error messages."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Policy, Semantics, Update, saves
from penstock.runtime.plan.train import Train
from penstock.runtime.plan.workload import Saved, Tier
from tests.edits import error_of, small, under
from tests.mutants import ADAPTED
from tests.strategies import MODEL, PROFILE, small_workload

SEPARATE = ADAPTED | {"device_blocks": (1, 2, 3)}
IN_ORDER = "blocks must be blocks 0..4 in ascending order, each once"

ILLEGAL: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (  # choices of a legal plan, changes to its policy, message
    ({"update": Update.EAGER}, {"speculate_blocks": (1,)}, "they need update deferred"),
    ({}, {"update": Update.EAGER}, "eager updates need --clip-norm none"),
    ({}, {"speculate_blocks": (3, 1, 0)}, f"speculate_{IN_ORDER}"),
    ({}, {"resident_blocks": (2, 2)}, f"resident_{IN_ORDER}"),
    ({}, {"spill_blocks": (3,)}, "spill_blocks must be blocks 0..2 in ascending order"),
    ({"tied": True}, {"device_blocks": (0,)}, "device_blocks must be blocks 1..3"),
    ({"device_blocks": (1,)}, {"resident_blocks": (1,)}, "block 1 is in device_blocks and in resident_blocks"),
    ({"device_blocks": (1,)}, {"speculate_blocks": (1,)}, "leave them out of speculate_blocks"),
    ({"n_micro_batches": 2}, {"square_on_device": True}, "need all micro-batches in one group"),
    ({"n_micro_batches": 2}, {"accumulation_group": 3}, "a group of 3 micro-batches, but a step has 2"),
    ({}, {"boundary_stride": 4}, "boundary_stride is 4, but the model has 3 layers"),
    ({"boundary_stride": 2}, {"save": saves(all=(1,))}, "excludes save and spill_blocks"),
    ({"save": saves(all=(1,))}, {"offload_blocks": (1,)}, "offload_blocks must be layers that save attention or products"),
    ({}, {"save": (Saved.ALL, Saved.INPUT)}, "save ends with a layer that saves its input"),
    ({}, {"save": saves(all=(4,))}, "save names layer 4, but the model has 3"),
    ({}, {"save": saves(products=(2,))}, "this model's layers cannot save only products"),
    ({"spill_blocks": (0, 2)}, {"save": saves(all=(1,))}, "leave the block before it out of spill_blocks"),
    ({"n_micro_batches": 2, "accumulation_group": 2, "ranks": 2}, {"accumulation_group": 1}, "several ranks exchange whole sums"),
    ({"ranks": 2}, {"device_blocks": (1,)}, "leave out square_on_device and device_blocks"),
    # Where weights are frozen
    (SEPARATE, {"speculate_blocks": (1,)}, "update barrier or deferred"),
    (SEPARATE, {"device_blocks": (1, 2)}, "must be all partly trained blocks, or none"),
    ({"train": Train(layers=(2, 2))}, {"spill_blocks": (1,)}, "backward ends at block 3"),
)


@pytest.mark.parametrize(("choices", "changes", "complaint"), ILLEGAL)
def test_an_illegal_policy_is_refused(choices: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    """The checker (of a plan with this policy) and lowering raise the same message."""
    plan = small(**choices)
    check(plan)
    message = error_of(under(plan, **changes))
    assert complaint in message
    with pytest.raises(PlanError) as caught:
        lower(MODEL, plan.workload, plan.semantics, replace(plan.policy, **changes), PROFILE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("choices", "changes", "message"),
    [
        ({"update": Update.EAGER}, {"clip_norm": 1.0}, "eager updates need"),
        ({}, {"compute_dtype": "fp32", "master_dtype": "bf16"}, "fp32 compute from a bf16 master"),
        ({}, {"sum_groups": 2}, "a step of 1 micro-batches has no 2 sum groups"),
        ({}, {"base": "nf4"}, "trained weights cannot be packed"),
        (SEPARATE | {"n_micro_batches": 2}, {"sum_groups": 2}, "partly trained blocks in order, not in sum groups"),
        (SEPARATE, {"gradient_dtype": "bf16"}, "use --gradient-dtype fp32"),
    ],
)
def test_semantics_that_a_policy_does_not_suit_are_refused(choices: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    plan = small(**choices)
    assert message in error_of(replace(plan, semantics=replace(plan.semantics, **changes)))


def test_ways_to_recompute_are_asked_of_layers_that_need_them() -> None:
    """This includes the smaller last micro-batch; layers that save everything or only their input need no tier."""
    workload, tier = small_workload(3, tied=False), Tier(Saved.ATTENTION, 1000, 500, 0, False, 0, 0)
    blocks = tuple(replace(b, tiers=(tier,) if i == 2 else ()) for i, b in enumerate(workload.blocks))
    workload, policy = replace(workload, blocks=blocks, smaller=blocks), Policy(save=saves(all=(1, 3), attention=(2,)))
    plan = lower(MODEL, workload, Semantics(4, 3, 2), policy, PROFILE)
    check(plan)
    assert "cannot save only attention" in error_of(under(plan, save=saves(all=(1,), attention=(2, 3))))
    assert "cannot save only products" in error_of(under(plan, save=saves(products=(2,))))
    poor = tuple(replace(b, tiers=()) for b in blocks)
    assert "cannot save only attention" in error_of(replace(plan, workload=replace(workload, smaller=poor)))
