"""Lower bounds on the step time of a policy: the largest of all constraints in `reasons.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.arenas import offload_groups
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.resident import shares_memory
from penstock.runtime.plan import LANE_OF, Kind, Lane, Setup
from penstock.runtime.plan.legality import can_stay, vocabulary
from penstock.runtime.plan.policy import LEAVE

from .facets import Facets
from .reasons import Numbers, Subject, reasons
from .work import Buffers, Groups, Work, WorkCache, early_fetches, least_slots, n_passing, ops_of, spared_ops, until_each_block_s

SLACK = 2e-6  # relative slack for the solver's tolerances, at least twice their effect on a bound or a limit


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the step time. `binding` names the limiting resource for users; `name` is the argument in docs/bounds.md."""

    seconds: float
    binding: str
    name: str


def places_to_stay(plan: Setup, profile: Profile) -> list[int]:
    """Blocks that may keep their state on the device. Empty if device and host share one memory, if the host sums all gradients, or
    if weights are frozen: the policy family then fixes the choice (`policies.py`)."""
    is_free = (plan.reduced or bool(plan.policy.sum_blocks)) and plan.workload.trains_all
    added = vocabulary(plan.workload) if plan.workload.tied and not plan.joins_tied else ()  # by the host
    return [b for b in can_stay(plan.workload, plan.semantics) if b not in added] if is_free and not shares_memory(profile) else []


def policy_bound(plan: Setup, cost: CostModel) -> Bound:
    """Return the largest bound on the plan's own policy."""
    return max(policy_bounds(plan, WorkCache(cost)), key=lambda bound: bound.seconds)


def policy_bounds(plan: Setup, works: WorkCache) -> Iterator[Bound]:
    """Yield every bound on the plan's own policy. Ops are counted from the policy, so the plan needs neither arenas nor ops."""
    facets = works.facets((plan,))
    for name, binding, quantity in reasons(subject_of(plan, works, facets), facets, Numbers()):
        yield Bound(float(quantity[0]), binding, name)


def subject_of(plan: Setup, works: WorkCache, facets: Facets) -> Subject:
    """Count the work and buffers of a single policy."""
    policy, group, cost = plan.policy, plan.policy.accumulation_group, works.cost
    groups = Groups.from_plan(plan, range(group, group + 1))
    buffers = Buffers.from_plan(plan, policy.gradient_slots)
    equal_blocks = plan.blocks_alike
    of_block = {b: works.of_block(plan, facets, b, groups) for b in equal_blocks}
    work = Work(len(facets.keys))
    for b, blocks in equal_blocks.items():
        work.add(of_block[b], len(blocks))
    for _, spared in spared_ops(plan, cost, facets.op_cost):
        work["total"][:, 0] -= spared
    of_block |= {b: of_block[first] for first, blocks in equal_blocks.items() for b in blocks}
    n_saved = sum(min(policy.saved_slots, group * len(blocks)) for blocks in offload_groups(policy))
    n_fetched = {Kind.FETCH_ACTIVATION: early_fetches(group, len(policy.spill_blocks)), Kind.FETCH_SAVED: float(n_saved)}
    n_early = {kind: np.array([n]) for kind, n in n_fetched.items()}
    n_loads = np.array([float(policy.prefetch_depth + least_slots(plan))])
    one_block = np.array([max(until_each_block_s(plan, cost, of_block))])
    passing = n_passing(group, dict.fromkeys(LEAVE, np.array([float(policy.saved_slots)])))
    return Subject(plan, groups, buffers, n_loads, np.zeros(1), n_early, passing, work, [one_block])


def busy_s(plan: Setup, cost: CostModel) -> dict[Lane, float]:
    """Busy seconds of each lane in a step: the sum of its ops, without loads that reuse weights still in a slot."""
    seconds = dict.fromkeys(plan.lanes, 0.0)
    for b, blocks in plan.blocks_alike.items():
        for kind, demand, count in ops_of(plan, cost, b):
            seconds[LANE_OF[kind]] += len(blocks) * count * demand.uncontended_s
    for kind, (spared_s,) in spared_ops(plan, cost, lambda _, demand: np.array([demand.uncontended_s])):
        seconds[LANE_OF[kind]] -= float(spared_s)
    return seconds
