"""Branch and bound over policies, best bound first.

Branch and bound, best bound first. A node is a family, then a family with its buffers, then one policy. Families and buffers are
bounded by an integer program that covers every choice block by block (`relax.py`), policies by their own lanes and ring
(`planner/bounds`), and what is left is lowered and simulated exactly. What is not opened keeps its bound, so the certificate is a
proof whether or not the budget sufficed. Equal bounds are opened in the order in which they were found: the search is
deterministic.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from hwprofiles.schema import Profile
from planner.bounds.bounds import busy_s, policy_bound
from planner.lower.lower import lower, plan_ops
from planner.predict.cost import CostModel, region_of
from planner.predict.memory import footprint, frame, short_of
from planner.predict.simulate import Prediction, n_simulated, simulate
from runtime.errors import PlanError
from runtime.plan import Lane, Plan, Policy, Semantics, Setup
from runtime.plan.workload import Model, Saved, Workload

from .climb import neighbours
from .estimate import Shorter
from .remedy import most_ops, shorter, too_long
from .space import (
    BASELINES,
    GRADIENT_SLOTS,
    PREFETCH_DEPTHS,
    Family,
    baseline,
    families,
    family_of,
    filled,
    leanest,
)

CLOSE_FRACTION = 0.001  # a plan this near to every bound left is not searched further
MAX_SEARCHED_OPS = 48_000  # ops of all plans simulated by one search: about four seconds on one core
MOST_RELAXED = 120  # parts whose bound is asked for, once the budget for simulations is spent
MAX_STEPS = 24
LONGEST_SEARCHED_OPS = MAX_SEARCHED_OPS  # of a plan; of a longer one only the bound is known
LONGEST_UNSCOUTED_OPS = 20_000  # plans that may be longer are so long that the budget pays for few of them
SCOUTED_FAMILIES = 3
SCOUTED_BUFFERS = ((1, 2), (2, 2), (1, 1))  # prefetch depth, gradient slots
MOST_CLIMBED_OPS = 2 * MAX_SEARCHED_OPS  # of all plans, when the search for early updates ends wherever it is
CLIMBED_FRACTION = 0.002  # of a step that may be gained at most where no climb is tried
LEAST_GAIN_FRACTION = 1e-5  # of a step that climbs
REFILLED_STEPS = (1, 3, -1)  # slots more or fewer, where a climb fills memory anew


class Trial:
    """Lowers and simulates policies of one workload, each once."""

    def __init__(
        self, model: Model, workload: Workload, semantics: Semantics, profile: Profile, clipped_fraction: float | None
    ) -> None:
        self.model, self.workload, self.semantics, self.profile = model, workload, semantics, profile
        self.clipped_fraction = clipped_fraction  # of the steps; None: unknown, so no block is updated before the norm
        self.profile_json = profile.to_json()
        self.cost, self.clipped_cost, self.region = CostModel(profile), CostModel(profile, clipped=True), region_of(profile)
        self.tried: dict[Policy, tuple[Plan, Prediction]] = {}
        self.clipped: dict[Policy, float] = {}
        self.n_ops = 0  # that were simulated

    def step_s(self, policy: Policy) -> float:
        """Seconds of a step, in the mean over those that are clipped and those that are not."""
        if policy not in self.tried:
            self.adopt(lower(self.model, self.workload, self.semantics, policy, self.profile_json))
        step_s, often = self.tried[policy][1].step_s, self.clipped_fraction
        if not policy.speculate_blocks or not often:
            return step_s
        return (1 - often) * step_s + often * self.clipped_step_s(policy)

    def adopt(self, plan: Plan) -> None:
        """Simulate a given plan as the one of its policy."""
        self.n_ops += n_simulated(plan)
        self.tried[plan.policy] = (plan, simulate(plan, self.cost.demands(plan), self.region, MAX_STEPS))

    def clipped_step_s(self, policy: Policy) -> float:
        """Seconds of a step in which what was updated on speculation is updated again."""
        if policy not in self.clipped:
            plan = self.tried[policy][0]
            self.clipped[policy] = simulate(plan, self.clipped_cost.demands(plan), self.region, MAX_STEPS).step_s
        return self.clipped[policy]

    def is_too_long(self, policy: Policy) -> bool:
        """Whether its plan has too many ops to be simulated in a search: groups too large to repeat often."""
        return plan_ops(self.workload, self.semantics, policy) > LONGEST_SEARCHED_OPS

    def frame(self, policy: Policy) -> Setup:
        return frame(self.model, self.workload, self.semantics, policy)

    def fits(self, policy: Policy) -> bool:
        """Whether the memory there is is enough, and one rank's share of the step may go through the layers so."""
        if policy.accumulation_group < self.semantics.least_group:
            return False
        return footprint(self.frame(policy), self.profile).fits

    def baselines(self) -> dict[str, dict[str, Any]]:
        """What each static candidate would take, or why it cannot run here."""
        result: dict[str, dict[str, Any]] = {}
        for name in BASELINES:
            policy = baseline(name, self.semantics, self.workload)
            needs = footprint(self.frame(policy), self.profile)
            result[name] = {"step_s": self.step_s(policy)} if needs.fits else {"does_not_fit": short_of(needs)}
        return result

    def next_best(self, best: Policy) -> tuple[Policy, float] | None:
        """The fastest policy tried that differs from the best in more than buffers."""
        others = [policy for policy in self.tried if _essence(policy) != _essence(best)]
        found = min(others, key=self.step_s, default=None)
        return None if found is None else (found, self.step_s(found))


def _essence(policy: Policy) -> Policy:
    """The policy without where norms are made and the sizes of buffers, and with counts of blocks in place of their names."""
    named = ("resident_blocks", "spill_blocks", "offload_blocks", "device_blocks")
    counts: dict[str, Any] = {name: (len(getattr(policy, name)),) for name in named}
    counts["save"] = tuple(sorted(saved for saved in policy.save if saved is not Saved.INPUT))
    counts["speculate_blocks"] = (0,) if policy.speculate_blocks else ()
    buffers: dict[str, Any] = {"prefetch_depth": 1, "gradient_slots": 1}
    return replace(policy, **buffers, square_on_device=False, **counts)


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """A part of the space, and a bound for all of it. Ordered by bound, then by when it was found."""

    bound_s: float
    number: int
    family: Family = field(compare=False)
    n_slots: int | None = field(compare=False, default=None)  # for gradients
    policy: Policy | None = field(compare=False, default=None)
    relaxed: bool = field(compare=False, default=True)  # whether the bound is that of the relaxation

    @property
    def can_be_simulated(self) -> bool:
        """Whether it is one policy, or so small a part that its policies are next."""
        return self.policy is not None or self.n_slots is not None


class Tree:
    """The search of one workload's space."""

    def __init__(self, trial: Trial) -> None:
        from .relax import Relaxation  # scipy takes a while to load, and a policy that is asked for by name needs none

        self.trial = trial
        self.relaxation = Relaxation(trial.model, trial.workload, trial.semantics, trial.cost, trial.clipped_fraction)
        self.shorter = Shorter(trial.model, trial.workload, trial.semantics, trial.cost.profile)
        self.families = families(trial.semantics, trial.workload)
        self.best: Policy | None = None
        self.bound_s = float("inf")  # of all that was not simulated
        self.n_nodes = 0
        self.open: list[_Node] = []
        self.too_long: list[_Node] = []  # policies that were not simulated

    def explore(self, start: Iterable[Policy]) -> None:
        """Find the best policy, beginning with those given; `bound_s` says what no other goes below."""
        for policy in start:
            self._take(policy)
        self.trial.n_ops = 0  # these are not counted
        for family in self.families:
            if family.boundary_stride == 1:
                self._relax(family, 0.0)
            else:
                self._push(self._computing_s(family), family, relaxed=False)
        self._scout()
        while self.open:
            node = heapq.heappop(self.open)
            out_of_budget = self.best is not None and self.trial.n_ops >= MAX_SEARCHED_OPS
            may_expand = not out_of_budget or (self.relaxation.n_solved < MOST_RELAXED and not node.can_be_simulated)
            if self._close_to_best(node.bound_s) or not may_expand:
                self.bound_s = min(self.bound_s, node.bound_s)
                break  # nothing that is open has a lower bound
            self._expand(node)
        if self.best is None and self.too_long:
            self._take_one_too_long()
        if self.best is None:  # what was suggested needs a little more than there is
            for plan, needs in leanest(self.trial.model, self.trial.workload, self.trial.semantics, self.trial.cost.profile):
                if needs.fits:
                    self._take(plan.policy)
        self._climb()
        self._prefetch_less()

    def _relax(self, family: Family, least_s: float, n_slots: int | None = None) -> None:
        """Push a part with the bound of its relaxation, which is at least that of the part around it, `least_s`."""
        relaxed = self.relaxation.solve(family, None, n_slots)
        if relaxed is not None:
            self._push(max(relaxed.bound_s, least_s), family, n_slots)

    def _computing_s(self, family: Family) -> float:
        """Seconds of computing of a family that can choose nothing about it: layers that share boundaries save nothing else."""
        return busy_s(self.trial.frame(family.policy(self.trial.semantics)), self.trial.cost)[Lane.GPU]

    def _scout(self) -> None:
        """Where plans are so long that few can be simulated, or bounds know less, begin with one of each promising family."""
        one_group = Policy(accumulation_group=self.trial.semantics.n_micro_batches)
        is_short = most_ops(self.trial.workload, self.trial.semantics, one_group) <= LONGEST_UNSCOUTED_OPS
        several = self.trial.semantics.sum_groups > 1  # which are joined many at once: when, no bound knows
        if is_short and not several:
            return
        promising = sorted(self.open)[:SCOUTED_FAMILIES]
        for node in [node for node in self.open if node.family.boundary_stride == 1] if several else promising:
            if self.trial.n_ops >= MAX_SEARCHED_OPS:
                break
            fitting = [
                policy
                for buffers in SCOUTED_BUFFERS
                for policy in self._suggested(replace(node.family, largest_group=node.family.accumulation_group), *buffers)
                if self.trial.fits(policy) and not self.trial.is_too_long(policy)
            ]
            for policy in fitting[:1]:
                self._take(policy)
        self.trial.n_ops = 0

    def _take_one_too_long(self) -> None:
        """Nothing else fits: the first of those that were passed over, if a plan of it can be written."""
        policy = min(self.too_long).policy
        assert policy is not None
        of = self.trial.workload, self.trial.semantics, policy
        if too_long(*of):
            n_micro_batches = self.trial.semantics.n_micro_batches
            said = f"only plans of up to {most_ops(*of)} ops fit, for {n_micro_batches} micro-batches in large groups"
            raise PlanError(f"{said}; {shorter(self.trial.semantics)}")
        self._take(policy)

    def _close_to_best(self, bound_s: float) -> bool:
        return self.best is not None and self.trial.step_s(self.best) <= bound_s * (1 + CLOSE_FRACTION)

    def _push(
        self, bound_s: float, family: Family, n_slots: int | None = None, policy: Policy | None = None, relaxed: bool = True
    ) -> None:
        heapq.heappush(self.open, _Node(bound_s, self.n_nodes, family, n_slots, policy, relaxed))
        self.n_nodes += 1

    def _expand(self, node: _Node) -> None:
        """Open a family into smaller ones, one into numbers of slots, these into policies, or simulate a policy."""
        family, n_slots = node.family, node.n_slots
        if node.policy is not None and self.trial.is_too_long(node.policy):
            self.bound_s = min(self.bound_s, node.bound_s)
            self.too_long.append(node)
        elif node.policy is not None:
            self._take(node.policy)
        elif not node.relaxed:
            self._relax(family, node.bound_s)
        elif len(family.groups) > 1:
            for half in family.halves():
                self._relax(half, node.bound_s)
        elif n_slots is None:
            for n in GRADIENT_SLOTS:
                self._relax(family, node.bound_s, n)
        else:
            # The policies suggested are a few of those that the bound covers: it stays as what the others may reach.
            self.bound_s = min(self.bound_s, node.bound_s)
            for policy in self._at_first(family, n_slots):
                if self.trial.fits(policy):
                    is_lean = not (policy.spill_blocks or policy.resident_blocks or policy.save)
                    bound_s = 0.0 if is_lean else policy_bound(self.trial.frame(policy), self.trial.cost).seconds
                    self._push(max(bound_s, node.bound_s), family, n_slots, policy)

    def _at_first(self, family: Family, n_slots: int) -> Iterator[Policy]:
        """What is suggested for the first of the usual depths that fits; a climb sees to the others. And what saves and moves
        nothing, for copies take longer than a relaxation thinks."""
        for depth in PREFETCH_DEPTHS:
            suggested = list(self._suggested(family, depth, n_slots))
            if suggested:
                yield from suggested
                yield replace(family.policy(self.trial.semantics), prefetch_depth=depth, gradient_slots=n_slots)
                return

    def _suggested(self, family: Family, prefetch_depth: int, gradient_slots: int) -> Iterator[Policy]:
        """Policies of these buffers that use memory as the relaxation would, packed and spread."""
        relaxed = self.relaxation.solve(family, prefetch_depth, gradient_slots)
        if relaxed is None:
            return
        lean = family.policy(self.trial.semantics)
        buffers = replace(lean, prefetch_depth=relaxed.prefetch_depth, gradient_slots=gradient_slots)
        found: dict[Policy, None] = {}
        for spread in (False, True):
            suggested = filled(buffers, self.trial.workload, relaxed.fill, spread)
            found[suggested] = None
            found[replace(suggested, speculate_blocks=())] = None  # what speculation costs the relaxation may not see
        yield from found

    def _take(self, policy: Policy) -> None:
        step_s = self.trial.step_s(policy)
        if self.best is None or step_s < self.trial.step_s(self.best):
            self.best = policy

    def _climb(self) -> None:
        """Go from neighbour to faster neighbour, until none is faster or the budget is spent."""
        climbing = True
        while climbing and self.best is not None and self.trial.step_s(self.best) > self.bound_s * (1 + CLIMBED_FRACTION):
            climbing = False
            near = neighbours(self.trial.frame(self.best), self.trial.profile, self.trial.clipped_fraction is not None)
            for policy in chain(self._refilled(self.best), near):
                if self.trial.n_ops + self.shorter.n_ops >= MOST_CLIMBED_OPS:
                    return
                if self.trial.is_too_long(policy) or not self.trial.fits(policy) or not self._seems_faster(policy):
                    continue
                if self.trial.step_s(policy) < self.trial.step_s(self.best) * (1 - LEAST_GAIN_FRACTION):
                    self._take(policy)
                    climbing = True
                    break

    def _seems_faster(self, policy: Policy) -> bool:
        """Whether long steps told from short ones are faster than the best plan's; early updates are not told so."""
        assert self.best is not None
        if policy in self.trial.tried or self.trial.clipped_fraction is not None or len(self.shorter.sizes(policy)) == 1:
            return True
        return self.shorter.step_s(policy) < self.shorter.step_s(self.best)

    def _refilled(self, best: Policy) -> Iterator[Policy]:
        """The policy with other buffers or groups, and memory used as the relaxation would with these."""
        n, size = self.trial.semantics.n_micro_batches, best.accumulation_group
        depth, n_slots, family = best.prefetch_depth, best.gradient_slots, family_of(best, self.trial.semantics)
        buffers = [(depth, n_slots + more) for more in REFILLED_STEPS] + [(depth + more, n_slots) for more in REFILLED_STEPS]
        groups = [g for g in (size - 1, size + 1, size // 2, 2 * size, n, 1) if 1 <= g <= n and g != size]
        for of, d, slots in [(size, *b) for b in buffers] + [(g, depth, n_slots) for g in dict.fromkeys(groups)]:
            if d >= 1 and slots >= 1:
                yield from self._suggested(replace(family, accumulation_group=of, largest_group=of), d, slots)

    def _prefetch_less(self) -> None:
        """Of plans that are as fast, the one with the fewest slots for weights."""
        best = self.best
        if best is None:
            return
        for depth in sorted(d for d in PREFETCH_DEPTHS if d < best.prefetch_depth):
            fewer = replace(best, prefetch_depth=depth)
            if self.trial.fits(fewer) and self.trial.step_s(fewer) <= self.trial.step_s(best) * (1 + LEAST_GAIN_FRACTION):
                self.best = fewer
                return
