"""Lowering: from a policy to a plan.

First the ops are written down in an order that would be right if they ran one after the other (`passes.py`). Then the waits
that keep every conflicting pair of that order apart are derived from the slots alone, and those implied by others are left out
(`waits.py`). Overlap is what remains. Of a long step only a few groups of micro-batches are written down, one of which stands for
all in the middle (`fold.py`).
"""

from dataclasses import replace
from typing import Any

from runtime.plan import MAX_REPETITIONS, OPS, Kind, Plan, Policy, Semantics, Setup, Wait
from runtime.plan.legality import refuse_illegal
from runtime.plan.ops import Often
from runtime.plan.workload import Model, Workload

from .arenas import arenas_of
from .fold import N_SHOWN, fold
from .passes import drafts
from .waits import waits_of

FEWEST_FOLDED_GROUPS = 8  # of micro-batches; a step of fewer is not much longer than what does not repeat of it
FEWEST_FOLDED = 1000  # micro-batches times blocks, each of which is four ops or more: about what simulates in a tenth of a second
MOST_ALIKE_GROUPS = 4  # after at most this many, weights must be in the slots in which they were
FOLDED_GROUPS = 3  # that a folded plan has as a rule: the first, one that repeats, the last


def lower(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan that performs `policy`: pure and deterministic. PlanError for a policy that is not legal here.

    What repeats in a long step is said once; a short one is written out.
    """
    if is_long(workload, semantics, policy):
        found = lower_folded(model, workload, semantics, policy, profile)
        if found is not None:
            return found
    return lower_written_out(model, workload, semantics, policy, profile)


def is_long(workload: Workload, semantics: Semantics, policy: Policy) -> bool:
    """Whether a step has enough groups to be folded."""
    n = semantics.n_micro_batches
    if semantics.sum_groups > 1:  # no two groups do the same
        return False
    is_worth_it = n >= FEWEST_FOLDED_GROUPS * policy.accumulation_group and n * len(workload.blocks) >= FEWEST_FOLDED
    return is_worth_it and n <= MAX_REPETITIONS


def plan_ops(workload: Workload, semantics: Semantics, policy: Policy, n_shown: int = FOLDED_GROUPS) -> int:
    """Upper bound on the plan's ops, counted without making it; of a long step, with `n_shown` groups of micro-batches."""
    if is_long(workload, semantics, policy):
        n = min(semantics.n_micro_batches, n_shown * policy.accumulation_group)
        semantics = replace(semantics, batch_size=n * semantics.micro_batch)
    setup = Setup(semantics, policy, Model({}), workload, ())
    found = 0
    for b, blocks in setup.blocks_alike.items():
        again = setup.uses(b) if setup.n_ops(Kind.RECOMPUTE, b) else 0  # what is recomputed may bring its weights once more
        of_kind = (setup.n_ops(kind, b) + again * (row.often is Often.USE) for kind, row in OPS.items() if row.where(setup, b))
        found += len(blocks) * sum(of_kind)
    return found


def lower_written_out(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan with every op once a step."""
    return _written(_frame(model, workload, semantics, policy, profile), rings_go_on=True)


def lower_folded(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan | None:
    """The plan in which groups of micro-batches that do the same are said once; None when there are too few.

    Where no backward comes to the lowest layers, weights are used in circles, and what Belady's algorithm leaves there for the next
    group may take many groups to recur: then each group begins with none.
    """
    frame = _frame(model, workload, semantics, policy, profile)
    return _folded(frame, weights_go_on=True) or _folded(frame, weights_go_on=False)


def _folded(frame: Plan, weights_go_on: bool) -> Plan | None:
    semantics, group = frame.semantics, frame.policy.accumulation_group
    n_micro_batches = semantics.n_micro_batches
    for n_alike in range(1, MOST_ALIKE_GROUPS + 1):
        times, n_before = divmod(-(-n_micro_batches // group) - 1, n_alike)
        if n_before == 0:  # the first group finds every slot empty
            times, n_before = times - 1, n_alike
        if times < N_SHOWN:
            return None
        n_fewer = (times - N_SHOWN) * n_alike * group
        fewer = replace(semantics, batch_size=semantics.batch_size - n_fewer * semantics.micro_batch)
        short = _written(replace(frame, semantics=fewer), rings_go_on=False, weights_go_on=weights_go_on)
        starts = _group_starts(short)
        start, end = starts[n_before], starts[n_before + n_alike]
        found = fold(short, start, end - start, times, n_alike * group)
        if found is not None:
            return replace(frame, ops=found[0], repeat=found[1])
    return None


def _frame(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan without its ops."""
    refuse_illegal(workload, semantics, policy)
    frame = Plan(semantics, policy, model, workload, (), profile, ())
    return replace(frame, arenas=tuple(arenas_of(frame)))


def _written(plan: Plan, rings_go_on: bool, weights_go_on: bool = True) -> Plan:
    """The plan with its ops, in an order that is right one after the other, and the waits that keep it right."""
    found = drafts(plan, rings_go_on, weights_go_on)
    number = {id(draft): i for i, draft in enumerate(found)}
    after = {i: Wait(number[id(d.after[0])], d.after[1]) for i, d in enumerate(found) if d.after is not None}
    return replace(plan, ops=tuple([draft.op(waits) for draft, waits in zip(found, waits_of(found, after), strict=True)]))


def _group_starts(plan: Plan) -> list[int]:
    """Which op each group of micro-batches begins with: its first forward, or the load of what that needs."""
    firsts = [
        i
        for i, op in enumerate(plan.ops)
        if op.kind is Kind.FORWARD and op.block == 0 and (op.micro_batch or 0) % plan.policy.accumulation_group == 0
    ]
    return [i - (i > 0 and plan.ops[i - 1].kind is Kind.LOAD) for i in firsts]
