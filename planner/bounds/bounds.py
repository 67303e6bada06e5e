"""Lower bounds on the step of a policy: the largest of all reasons why it cannot be shorter."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hwprofiles.schema import Profile
from planner.lower.arenas import N_SAVED_SLOTS
from planner.predict.cost import CostModel
from planner.predict.resident import shares_memory
from runtime.plan import LANE_OF, Kind, Lane, Op, Setup
from runtime.plan.legality import can_stay
from runtime.plan.workload import BlockKind

from .facets import Array, Facets
from .reasons import Numbers, Subject, reasons
from .work import Buffers, Groups, Work, Works, early_fetches, least_slots, ops_of, spared_ops

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
    buffers = Buffers.of(plan, policy.gradient_slots, group)
    alike = plan.blocks_alike
    of_block = {b: works.of(plan, facets, b, groups) for b in alike}
    whole = Work(len(facets.keys))
    for b, blocks in alike.items():
        whole.add(of_block[b], len(blocks))
    for kind, demand, count in spared_ops(plan, cost):
        whole["total"][:, 0] -= count * facets.of(kind, demand)
    n_leaving = sum(plan.n_ops(Kind.OFFLOAD_GRADIENT, b) > 0 for b in _layers(plan)) * (1 if plan.reduced else groups.n_alone)
    of_block |= {b: of_block[first] for first, blocks in alike.items() for b in blocks}
    return Subject(
        policy.update,
        plan.workload.trains_all,
        groups,
        buffers,
        np.array([float(policy.prefetch_depth + least_slots(plan))]),
        policy.gradient_slots == 1 and plan.semantics.ranks == 1 and plan.workload.trains_all,
        (np.array([(n_leaving > buffers.n_slots + buffers.n_staged) - 1.0]), np.array([(n_leaving > buffers.n_staged) - 1.0])),
        bool(policy.device_blocks),
        whole,
        _early(plan, whole),
        [_one_block(plan, cost, of_block)],
    )


def busy_s(plan: Setup, cost: CostModel) -> dict[Lane, float]:
    """Seconds of the ops of each lane, one after the other, with the loads that turns spare left out."""
    found = dict.fromkeys(plan.lanes, 0.0)
    for b, blocks in plan.blocks_alike.items():
        for kind, demand, count in ops_of(plan, cost, b):
            found[LANE_OF[kind]] += len(blocks) * count * demand.uncontended_s
    for kind, demand, count in spared_ops(plan, cost):
        found[LANE_OF[kind]] -= count * demand.uncontended_s
    return found


def _layers(plan: Setup) -> list[int]:
    return [b for b, block in enumerate(plan.workload.blocks) if block.kind is BlockKind.LAYER]


def _early(plan: Setup, work: Work) -> Array:
    """Activations that may be back before the first loss."""
    group = plan.policy.accumulation_group
    n_boundaries = early_fetches(group, len(plan.policy.spill_blocks))
    n_saved = min(N_SAVED_SLOTS, group * len(plan.policy.offload_blocks))
    of = n_boundaries * work.largest["early_fetch_activation"] + n_saved * work.largest["early_fetch_saved"]
    return of[:, None]


def _one_block(plan: Setup, cost: CostModel, of_block: dict[int, Work]) -> Array:
    """Updates up to a block and its load, less first forwards of earlier blocks: of the block for which that is most."""
    loads = [(blocks, cost.demand(plan, Op(Kind.LOAD, b)).uncontended_s) for b, blocks in plan.blocks_alike.items()]
    load_s = {b: seconds for blocks, seconds in loads for b in blocks}
    found_s, updates_s, forwards_s = list[float](), 0.0, 0.0
    for b in range(len(plan.workload.blocks)):
        updates_s += float(of_block[b].scalars["update"][0])
        found_s.append(updates_s + load_s[b] - forwards_s)
        forwards_s += float(of_block[b].scalars["forwards"][0])
    return np.array([max(found_s)])
