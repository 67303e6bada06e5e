"""Small plans, and edits that make them incorrect."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from penstock.planner.check.check import check
from penstock.planner.lower.lower import build_plan, lower
from penstock.planner.lower.op_table import OpTableBuilder, number_of
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Op, Plan, Policy, Semantics, Setup, Slot, Update, Wait
from penstock.runtime.plan.workload import Model, Workload
from tests.strategies import MODEL, PROFILE, small_workload

OF_POLICY = {field.name for field in fields(Policy)}


def small(n_layers: int = 3, n_micro_batches: int = 1, tied: bool = False, **choices: Any) -> Plan:
    """Return a plan of `small_workload`; `choices` are fields of its policy (update: deferred by default) and its semantics."""
    policy = Policy(**{"update": Update.DEFERRED} | {name: value for name, value in choices.items() if name in OF_POLICY})
    meant: dict[str, Any] = {"clip_norm": None if policy.update is Update.EAGER else 1.0}
    meant |= {name: value for name, value in choices.items() if name not in OF_POLICY}
    semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1, **meant)
    workload = small_workload(n_layers, tied, saving=bool(policy.offload_blocks), train=semantics.train)
    return lower(MODEL, workload, semantics, policy, PROFILE)


def plan_by(how: Any, model: Model, workload: Workload, semantics: Semantics, policy: Policy) -> Any:
    """Return the plan with ops made by the lowering function `how`; None if it returns None."""
    ops = how(setup := Setup(semantics, policy, model, workload, ()))
    return None if ops is None else build_plan(setup, ops, PROFILE)


def index(plan: Plan, name: str) -> int:
    """Return the index of the first op of this name."""
    return next(i for i, op in enumerate(plan.ops) if op.name == name)


def set_op(plan: Plan, i: int, op: Op) -> Plan:
    return replace(plan, ops=(*plan.ops[:i], op, *plan.ops[i + 1 :]))


def with_op(plan: Plan, name: str, **changes: Any) -> Plan:
    i = index(plan, name)
    return set_op(plan, i, replace(plan.ops[i], **changes))


def with_slots(plan: Plan, name: str, **slots: Slot | None) -> Plan:
    """Return the plan with operands of the named op replaced; None removes an operand."""
    op = plan.ops[index(plan, name)]
    operands = ((operand, slots.get(operand, slot)) for operand, slot in op.operands)
    return with_op(plan, name, operands=tuple((operand, slot) for operand, slot in operands if slot is not None))


def under(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with a changed policy and the same ops."""
    return replace(plan, policy=replace(plan.policy, **changes))


def with_sizes(plan: Plan, name: str, sizes: Sequence[int]) -> Plan:
    return replace(plan, arenas=tuple(replace(a, slot_bytes=tuple(sizes)) if a.name == name else a for a in plan.arenas))


def sizes_of(plan: Plan, name: str) -> tuple[int, ...]:
    arena = plan.arena(name)
    return () if arena is None else arena.slot_bytes


def with_profile(plan: Plan, path: str, value: object) -> Plan:
    """Return the plan with one value of its profile replaced."""
    return replace(plan, profile=with_value(plan.profile, path.split("."), value))


def with_value(tree: Any, path: list[str], value: object) -> Any:
    return value if not path else {**tree, path[0]: with_value(tree[path[0]], path[1:], value)}


def reordered(plan: Plan, order: Sequence[int]) -> Plan:
    """Return the plan with its ops reordered or omitted. Wait targets are renumbered; waits for omitted ops are dropped."""
    places = {i: place for place, i in enumerate(order)}
    waits = [tuple(w._replace(op=places[w.op]) for w in plan.ops[i].waits if w.op in places) for i in order]
    return replace(plan, ops=tuple(replace(plan.ops[i], waits=op_waits) for i, op_waits in zip(order, waits, strict=True)))


def with_waits(ops: Sequence[Op], barrier: dict[int, Wait]) -> tuple[Op, ...]:
    """Return the ops with the waits that lowering derives."""
    return tuple(replace(op, waits=waits) for op, waits in zip(ops, waits_of(ops, barrier), strict=True))


def waits_of(ops: Sequence[Op], barrier: dict[int, Wait], n_steps: int = 2) -> list[tuple[Wait, ...]]:
    """Return the waits that lowering derives for these ops."""
    builder = OpTableBuilder()
    for i, op in enumerate(ops):
        number = builder.add(op.kind, np.array([i]), 0, op.block)
        for name, slot in op.operands:
            builder.use(number, **{name: number_of(slot)})
    return [op.waits for op in builder.build(n_steps, lambda ops: barrier).ops()]


def rewaited(plan: Plan) -> Plan:
    """Return the plan with waits derived from the order of its ops: free of races, but values may be wrong."""
    ops, barrier = [replace(op, waits=()) for op in plan.ops], dict[int, Wait]()
    if plan.policy.update is Update.BARRIER:
        last = {op.kind: i for i, op in enumerate(ops) if op.kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE)}
        *on_device, final = sorted(last.values(), key=lambda i: ops[i].kind is Kind.UPDATE)
        barrier = {next(i for i, op in enumerate(ops) if op.kind is Kind.LOAD): Wait(final, 1)}
        if on_device:
            barrier[final] = Wait(on_device[0])
    return replace(plan, ops=with_waits(ops, barrier))


def error_of(plan: Plan) -> str:
    """Return the checker's error, which must be one line."""
    with pytest.raises(PlanError) as caught:
        check(plan)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def passes(plan: Plan) -> bool:
    """True if the checker accepts the plan, False on PlanError; other exceptions pass through."""
    try:
        check(plan)
    except PlanError:
        return False
    return True
