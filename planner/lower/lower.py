"""Lowering: from a policy to a plan.

First the ops are written down in an order that would be right if they ran one after the other (`passes.py`). Then the waits
that keep every conflicting pair of that order apart are derived from the slots alone, and those implied by others are left out
(`waits.py`). Overlap is what remains. Of a long step only a few groups of micro-batches are written down, one of which stands for
all in the middle (`fold.py`).
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from penstock.runtime.plan import MAX_REPETITIONS, OPS, Kind, Plan, Policy, Semantics, Setup, Update, Wait
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.ops import Often
from penstock.runtime.plan.workload import Model, Workload

from .arenas import arenas_of
from .fold import N_SHOWN, fold
from .passes import written
from .sheet import NUMBER, Outline

FEWEST_FOLDED_GROUPS = 8  # of micro-batches; a step of fewer is not much longer than what does not repeat of it
FEWEST_FOLDED = 1000  # micro-batches times blocks, each of which is four ops or more: about what simulates in a tenth of a second
MOST_ALIKE_GROUPS = 4  # after at most this many, weights must be in the slots in which they were
FOLDED_GROUPS = 3  # that a folded plan has as a rule: the first, one that repeats, the last


def lower(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """The plan that performs `policy`: pure and deterministic. PlanError for a policy that is not legal here.

    What repeats in a long step is said once; a short one is written out.
    """
    setup = Setup(semantics, policy, model, workload, ())
    return plan_of(setup, outline(setup), profile)


def plan_of(setup: Setup, ops: Outline, profile: dict[str, Any]) -> Plan:
    """The plan that has these ops."""
    of = setup.semantics, setup.policy, setup.model, setup.workload, tuple(arenas_of(setup))
    return Plan(*of, profile, ops.ops(), repeat=ops.repeat)


def outline(setup: Setup) -> Outline:
    """The ops of the plan that performs the policy."""
    refuse_illegal(setup.workload, setup.semantics, setup.policy)
    found = outline_folded(setup) if is_long(setup.workload, setup.semantics, setup.policy) else None
    return found or outline_written_out(setup)


def is_long(workload: Workload, semantics: Semantics, policy: Policy) -> bool:
    """Whether a step has enough groups to be folded: with several sum groups no two do the same."""
    n = semantics.n_micro_batches
    is_worth_it = n >= FEWEST_FOLDED_GROUPS * policy.accumulation_group and n * len(workload.blocks) >= FEWEST_FOLDED
    return semantics.sum_groups == 1 and is_worth_it and n <= MAX_REPETITIONS


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


def outline_written_out(setup: Setup, rings_go_on: bool = True, weights_go_on: bool = True) -> Outline:
    """Every op once a step, in an order that is right one after the other, and the waits that keep it right."""
    return written(setup, rings_go_on, weights_go_on).outline(after=partial(barrier, setup))


def outline_folded(setup: Setup) -> Outline | None:
    """Groups of micro-batches that do the same said once; None when there are too few.

    Where no backward comes to the lowest layers, weights are used in circles, and what Belady's algorithm leaves there for the next
    group may take many groups to recur: then each group begins with none.
    """
    semantics, group = setup.semantics, setup.policy.accumulation_group
    for weights_go_on, n_alike in product((True, False), range(1, MOST_ALIKE_GROUPS + 1)):
        times, n_before = divmod(-(-semantics.n_micro_batches // group) - 1, n_alike)
        if n_before == 0:  # the first group finds every slot empty
            times, n_before = times - 1, n_alike
        if times < N_SHOWN:
            continue
        n_fewer = (times - N_SHOWN) * n_alike * group
        fewer = replace(semantics, batch_size=semantics.batch_size - n_fewer * semantics.micro_batch)
        short = outline_written_out(replace(setup, semantics=fewer), rings_go_on=False, weights_go_on=weights_go_on)
        (starts,) = ((short.kinds == NUMBER[Kind.FORWARD]) & (short.blocks == 0) & (short.micro_batches % group == 0)).nonzero()
        starts = starts - ((starts > 0) & (short.kinds[starts - 1] == NUMBER[Kind.LOAD]))  # or the load of what that needs
        start, end = int(starts[n_before]), int(starts[n_before + n_alike])
        if (found := fold(short, start, end - start, times, n_alike * group)) is not None:
            return found
    return None


def barrier(setup: Setup, ops: Outline) -> dict[int, Wait]:
    """Under `barrier` the next step's first load waits for this step's last update, and that for those on the device."""
    if setup.policy.update is not Update.BARRIER:
        return {}
    last, (on_device,) = len(ops.kinds) - 1, (ops.kinds == NUMBER[Kind.UPDATE_ON_DEVICE]).nonzero()
    after = {int(np.argmax(ops.kinds == NUMBER[Kind.LOAD])): Wait(last, 1)}
    if len(on_device) and on_device[-1] != last:
        after[last] = Wait(int(on_device[-1]))
    return after
