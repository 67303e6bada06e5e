"""Lower bounds on the step of a policy: the largest of all reasons why it cannot be shorter."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.arenas import offload_groups
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.resident import shares_memory
from penstock.runtime.plan import LANE_OF, Kind, Lane, Setup
from penstock.runtime.plan.legality import can_stay
from penstock.runtime.plan.policy import LEAVE

from .facets import Facets
from .reasons import Numbers, Subject, reasons
from .work import Buffers, Groups, Work, Works, early_fetches, least_slots, n_passing, ops_of, spared_ops, until_each_block_s

SLACK = 2e-6  # what the solver's tolerances may move a bound or a limit by, twice


@dataclass(frozen=True, slots=True)
class Bound:
    """No step can be shorter than `seconds`, because of what `binding` names; docs/bounds.md argues it under `name`."""

    seconds: float
    binding: str
    name: str


def places_to_stay(plan: Setup, profile: Profile) -> list[int]:
    """The blocks whose state the device may hold: none where host and device are one memory, or the host sums gradients, or a
    family says which (`space.py`)."""
    is_free = plan.reduced and plan.workload.trains_all
    return can_stay(plan.workload, plan.semantics) if is_free and not shares_memory(profile) else []


def policy_bound(plan: Setup, cost: CostModel) -> Bound:
    """Valid for the plan's own policy: the largest of `policy_bounds`."""
    return max(policy_bounds(plan, Works(cost)), key=lambda bound: bound.seconds)


def policy_bounds(plan: Setup, works: Works) -> Iterator[Bound]:
    """Every reason for the plan's own policy. The plan needs neither arenas nor ops: these are counted, not read."""
    facets = works.facets((plan,))
    for name, binding, quantity in reasons(subject_of(plan, works, facets), facets, Numbers()):
        yield Bound(float(quantity[0]), binding, name)


def subject_of(plan: Setup, works: Works, facets: Facets) -> Subject:
    """A policy, as reasons are asked about it."""
    policy, group, cost = plan.policy, plan.policy.accumulation_group, works.cost
    groups = Groups.of(plan, range(group, group + 1))
    buffers = Buffers.of(plan, policy.gradient_slots)
    alike = plan.blocks_alike
    of_block = {b: works.of(plan, facets, b, groups) for b in alike}
    whole = Work(len(facets.keys))
    for b, blocks in alike.items():
        whole.add(of_block[b], len(blocks))
    for _, spared in spared_ops(plan, cost, facets.of):
        whole["total"][:, 0] -= spared
    of_block |= {b: of_block[first] for first, blocks in alike.items() for b in blocks}
    n_early = {
        Kind.FETCH_ACTIVATION: np.array([early_fetches(group, len(policy.spill_blocks))]),
        Kind.FETCH_SAVED: np.array(
            [sum(min(policy.saved_slots, group * len(blocks)) for blocks in offload_groups(policy))], dtype=np.float64
        ),
    }
    n_loads = np.array([float(policy.prefetch_depth + least_slots(plan))])
    one_block = np.array([max(until_each_block_s(plan, cost, of_block))])
    passing = n_passing(group, dict.fromkeys(LEAVE, np.array([float(policy.saved_slots)])))
    return Subject(plan, groups, buffers, n_loads, np.zeros(1), n_early, passing, whole, [one_block])


def busy_s(plan: Setup, cost: CostModel) -> dict[Lane, float]:
    """Seconds of the ops of each lane, one after the other, with the loads that turns spare left out."""
    found = dict.fromkeys(plan.lanes, 0.0)
    for b, blocks in plan.blocks_alike.items():
        for kind, demand, count in ops_of(plan, cost, b):
            found[LANE_OF[kind]] += len(blocks) * count * demand.uncontended_s
    for kind, (spared_s,) in spared_ops(plan, cost, lambda _, demand: np.array([demand.uncontended_s])):
        found[LANE_OF[kind]] -= float(spared_s)
    return found
