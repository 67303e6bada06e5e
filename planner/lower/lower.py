"""Lowering: compile a policy into a plan.

First emit all ops in a valid sequential order (`passes.py`). Then derive from read and written slots the waits that preserve this
order for every conflicting pair, and drop the waits that others imply (`waits.py`); everything else may overlap. In a long step,
emit only a few groups of micro-batches, and let one of them represent all groups in the middle (`fold.py`).
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
from .op_table import NUMBER, OpTable, n_ops, n_uses
from .passes import run_passes

FEWEST_FOLDED_GROUPS = 8  # groups of micro-batches; a shorter step is hardly longer than its folded form
FEWEST_FOLDED = 1000  # micro-batches x blocks, at least four ops each; a plan of this size simulates in about 0.1 s
MOST_ALIKE_GROUPS = 4  # largest period, in groups, after which the weight slots must have the same contents again
FOLDED_GROUPS = 3  # groups in a typical folded plan: the first, one that repeats, the last


def lower(model: Model, workload: Workload, semantics: Semantics, policy: Policy, profile: dict[str, Any]) -> Plan:
    """Compile `policy` into a plan; pure and deterministic. Raise PlanError if the policy is illegal for this workload.

    A long step is folded (`Plan.repeat`); a short one is written out.
    """
    setup = Setup(semantics, policy, model, workload, ())
    return build_plan(setup, lower_ops(setup), profile)


def build_plan(setup: Setup, ops: OpTable, profile: dict[str, Any]) -> Plan:
    fields = setup.semantics, setup.policy, setup.model, setup.workload, tuple(arenas_of(setup))
    return Plan(*fields, profile, ops.ops(), repeat=ops.repeat)


def lower_ops(setup: Setup) -> OpTable:
    """Return the ops that perform the policy, folded if the step is long. Raise PlanError if the policy is illegal."""
    refuse_illegal(setup.workload, setup.semantics, setup.policy)
    folded = folded_ops(setup) if is_long(setup.workload, setup.semantics, setup.policy) else None
    return folded or unfolded_ops(setup)


def is_long(workload: Workload, semantics: Semantics, policy: Policy) -> bool:
    """True if the step has enough groups of micro-batches for folding; with several sum groups no two groups are equal."""
    n = semantics.n_micro_batches
    is_worth_it = n >= FEWEST_FOLDED_GROUPS * policy.accumulation_group and n * len(workload.blocks) >= FEWEST_FOLDED
    return semantics.sum_groups == 1 and is_worth_it and n <= MAX_REPETITIONS


def plan_ops(workload: Workload, semantics: Semantics, policy: Policy, n_shown: int = FOLDED_GROUPS) -> int:
    """Return an upper bound on the number of ops without lowering; a long step counts `n_shown` groups of micro-batches."""
    if is_long(workload, semantics, policy):
        n = min(semantics.n_micro_batches, n_shown * policy.accumulation_group)
        semantics = replace(semantics, batch_size=n * semantics.micro_batch)
    setup = Setup(semantics, policy, Model({}), workload, ())
    total = 0
    for b, blocks in setup.blocks_alike.items():
        again = n_uses(setup, b) if n_ops(setup, Kind.RECOMPUTE, b) else 0  # recompute may load the weights again
        counts = (n_ops(setup, kind, b) + again * (row.often is Often.USE) for kind, row in OPS.items() if row.where(setup, b))
        total += len(blocks) * sum(counts)
    return total


def unfolded_ops(setup: Setup, carry_rings: bool = True, carry_weights: bool = True) -> OpTable:
    """Return all ops of a step in a valid sequential order, with the waits that preserve it."""
    return run_passes(setup, carry_rings, carry_weights).build(extra_waits=partial(barrier, setup))


def folded_ops(setup: Setup) -> OpTable | None:
    """Return the ops with equal groups of micro-batches folded; None if the step has too few groups.

    If the lowest layers have no backward, weights are used cyclically, and the slot contents that Belady's algorithm leaves for the
    next group may have a long period. As a fallback, each group starts with no loaded weights.
    """
    semantics, group = setup.semantics, setup.policy.accumulation_group
    for carry_weights, n_alike in product((True, False), range(1, MOST_ALIKE_GROUPS + 1)):
        times, n_before = divmod(-(-semantics.n_micro_batches // group) - 1, n_alike)
        if n_before == 0:  # the first group differs, because all slots are empty
            times, n_before = times - 1, n_alike
        if times < N_SHOWN:
            continue
        n_fewer = (times - N_SHOWN) * n_alike * group
        fewer = replace(semantics, batch_size=semantics.batch_size - n_fewer * semantics.micro_batch)
        short = unfolded_ops(replace(setup, semantics=fewer), carry_rings=False, carry_weights=carry_weights)
        (starts,) = ((short.kinds == NUMBER[Kind.FORWARD]) & (short.blocks == 0) & (short.micro_batches % group == 0)).nonzero()
        starts = starts - ((starts > 0) & (short.kinds[starts - 1] == NUMBER[Kind.LOAD]))  # include the load before it
        start, end = int(starts[n_before]), int(starts[n_before + n_alike])
        if (folded := fold(short, start, end - start, times, n_alike * group)) is not None:
            return folded
    return None


def barrier(setup: Setup, ops: OpTable) -> dict[int, Wait]:
    """Extra waits of `update: barrier`: first load for the previous step's last update, last update for the last on the device."""
    if setup.policy.update is not Update.BARRIER:
        return {}
    last, (on_device,) = len(ops.kinds) - 1, (ops.kinds == NUMBER[Kind.UPDATE_ON_DEVICE]).nonzero()
    waits = {int(np.argmax(ops.kinds == NUMBER[Kind.LOAD])): Wait(last, 1)}
    if len(on_device) and on_device[-1] != last:
        waits[last] = Wait(int(on_device[-1]))
    return waits
