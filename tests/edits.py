"""How is a plan made wrong on purpose, and what is said of it?"""

from dataclasses import replace
from typing import Any

import pytest

from planner.check.check import check
from planner.lower.lower import lower
from runtime.errors import PlanError
from runtime.plan import Plan, Policy, Semantics, Slot, Update
from tests.strategies import MODEL, PROFILE, small_workload


def small(n_layers: int = 3, n_micro_batches: int = 1, tied: bool = False, **policy: Any) -> Plan:
    """A plan of a policy; `ranks`, `train`, `base` and `gradient_dtype` are of its semantics."""
    eager = policy.get("update") is Update.EAGER
    meant = {name: policy.pop(name) for name in ("ranks", "train", "base", "gradient_dtype") if name in policy}
    semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1, clip_norm=None if eager else 1.0, **meant)
    workload = small_workload(n_layers, tied, saving="offload_blocks" in policy, train=semantics.train)
    return lower(MODEL, workload, semantics, Policy(**{"update": Update.DEFERRED} | policy), PROFILE)


def index(plan: Plan, name: str) -> int:
    """The place of the first op of that name."""
    return next(i for i, op in enumerate(plan.ops) if op.name == name)


def with_op(plan: Plan, name: str, **changes: Any) -> Plan:
    i = index(plan, name)
    return replace(plan, ops=(*plan.ops[:i], replace(plan.ops[i], **changes), *plan.ops[i + 1 :]))


def with_slots(plan: Plan, name: str, **slots: Slot | None) -> Plan:
    """The plan in which the op of that name has these slots for its operands; None: it lacks them."""
    op = plan.ops[index(plan, name)]
    operands = ((operand, slots.get(operand, slot)) for operand, slot in op.operands)
    return with_op(plan, name, operands=tuple((operand, slot) for operand, slot in operands if slot is not None))


def with_profile(plan: Plan, path: str, value: object) -> Plan:
    """The plan with one value of its profile replaced."""
    first, *rest = path.split(".")
    return replace(plan, profile=with_value(plan.profile, [first, *rest], value))


def with_value(tree: Any, path: list[str], value: object) -> Any:
    return value if not path else {**tree, path[0]: with_value(tree[path[0]], path[1:], value)}


def error_of(plan: Plan, claim: dict[str, Any] | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        check(plan, claim)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
