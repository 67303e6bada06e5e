"""Branch and bound over the policies of one size (micro-batch and tiles), best-first, followed by local search.

A node is a family, a family with fixed buffers, or one policy. The bound of the first two is an integer program over all choices
per block (`relax.py`), the bound of a policy is the largest constraint in `planner/bounds`. Remaining policies are lowered and
simulated exactly. Unopened nodes keep their bound, so the certificate is a proof for any budget. Nodes with equal bounds are opened
in order of creation: the search is deterministic.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain, islice
from math import inf

from penstock.runtime.plan import Policy, Setup

from . import tuning
from .evaluation import Evaluator
from .neighbours import MOVES, OMISSIONS, Omission, early_updates, fewer_offloads, neighbours, single_blocks
from .policies import Family, Slots, families, family_of, filled, slots_of, smallest_plans
from .remedy import too_long


class _Kind(IntEnum):
    """Kind of a node's bound, in order of increasing tightness."""

    ANY_CHOICE = 0  # work that every member of the family has
    LINEAR = 1  # linear program
    INTEGER = 2  # integer program, or the policy's own bound


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """Part of the search space with a lower bound. Ordered by bound, then by creation."""

    bound_s: float
    number: int
    family: Family = field(compare=False)
    n_slots: int | None = field(compare=False, default=None)  # gradient slots
    policy: Policy | None = field(compare=False, default=None)
    kind: _Kind = field(compare=False, default=_Kind.INTEGER)

    @property
    def can_be_simulated(self) -> bool:
        """True if the node is one policy, or if its next expansion yields policies."""
        return self.policy is not None or self.n_slots is not None

    @property
    def is_last(self) -> bool:
        """True if no program can tighten the bound."""
        return self.policy is not None or (self.n_slots is not None and self.kind is _Kind.INTEGER)


class Tree:
    """Branch-and-bound search over the policies of one workload."""

    def __init__(self, evaluator: Evaluator) -> None:
        from .relax import Relaxation  # importing scipy is slow, and a fixed policy does not need it

        self.evaluator = evaluator
        self.relaxation = Relaxation(evaluator)
        self.families = families(evaluator.semantics, evaluator.workload)
        self.best: Policy | None = None
        self.known_s = inf  # step time of the incumbent with other sizes
        self.n_nodes = 0
        self.open: list[_Node] = []
        self.opened: list[_Node] = []  # expanded nodes: only some of their policies were suggested, so their bounds remain
        self.too_long: list[Policy] = []  # to simulate: the policy with the lowest bound

    def relax(self) -> float:
        """Tighten the lowest family bounds by linear, in a second call by integer programs. Return the lowest (inf if none)."""
        least = _Kind.INTEGER if self.n_nodes else _Kind.LINEAR
        for family in () if self.n_nodes else self.families:
            self._push(self.relaxation.least_s(family), family, kind=_Kind.ANY_CHOICE)
        while self.open and self.open[0].kind < least:
            self._expand(heapq.heappop(self.open))
        return self.open[0].bound_s if self.open else inf

    @property
    def lowest_s(self) -> float:
        """Lower bound on all policies that were not simulated."""
        return min([node.bound_s for nodes in (self.open, self.opened) for node in nodes[:1]], default=inf)

    def tighten(self) -> bool:
        """Tighten or split the node with the lowest bound, without simulation. Return False if its policies would be next."""
        nodes = min(filter(None, (self.open, self.opened)), key=lambda nodes: nodes[0], default=None)
        if nodes is None or nodes[0].is_last:
            return False
        node = heapq.heappop(nodes)
        if not node.can_be_simulated:
            self._expand(node)
        elif (relaxed := self.relaxation.solve(node.family, Slots(gradient_slots=node.n_slots or 0))) is not None:
            heapq.heappush(nodes, replace(node, bound_s=max(relaxed.bound_s, node.bound_s), kind=_Kind.INTEGER))
        return True

    def try_first(self, start: Iterable[Policy], known_s: float) -> float:
        """Simulate the relaxation's suggestions for the most promising family and the policies `start`. Return the step time of the
        best, infinity if none fits. Policies with a bound far above `known_s`, a step time with other sizes, are skipped."""
        first = [Slots(*tuning.FIRST_BUFFERS[1], n) for n in (tuning.SAVED_SLOTS, tuning.LEAST_SAVED_SLOTS)]
        for policy in chain(self._first_suggestions(self.open[:1], first), start):
            if self.best is None or self.evaluator.bound_s(policy) <= known_s * (1 + tuning.HOPELESS_FRACTION):
                self._take(policy)
        return inf if self.best is None else self.evaluator.step_s(self.best)

    def explore(self, known_s: float = inf) -> None:
        """Search for the best policy; `lowest_s` then bounds the others. `known_s`: step time with other sizes, limits climbing."""
        self.known_s = known_s
        for n in (tuning.LEAST_SAVED_SLOTS, tuning.SAVED_SLOTS):
            buffers = [Slots(*pair, n) for pair in tuning.FIRST_BUFFERS]
            for policy in self._first_suggestions(sorted(self.open)[: tuning.FIRST_FAMILIES], buffers):
                self._take(policy)
        self.evaluator.n_ops = 0  # first policies do not count
        while self.open:
            node = self.open[0]
            out_of_budget = self.best is not None and self.evaluator.n_ops >= tuning.MAX_SEARCHED_OPS
            may_expand = not out_of_budget or (len(self.relaxation.known) < tuning.MOST_RELAXED and not node.can_be_simulated)
            # Incumbents of other sizes do not count: climbs may improve suggestions of this size
            is_close = self.best is not None and self.evaluator.step_s(self.best) <= node.bound_s * (1 + tuning.CLOSE_FRACTION)
            if is_close or not may_expand:
                break  # no open node has a lower bound
            self._expand(heapq.heappop(self.open))
        e = self.evaluator
        smallest = (plan.policy for plan, needs in smallest_plans(e.model, e.workload, e.semantics, e.profile) if needs.fits)
        for policies in (self.too_long, smallest):  # used if no other plan fits: suggestions may exceed memory slightly
            for policy in policies if self.best is None else ():
                if not too_long(e.workload, e.semantics, policy):
                    self._take(policy)
        if self.best is not None and self.evaluator.step_s(self.best) <= known_s * (1 + tuning.HOPELESS_FRACTION):
            self._climb_all()
            self._prefetch_less()

    def _first_suggestions(self, parts: Iterable[_Node], several: Sequence[Slots]) -> Iterator[Policy]:
        """For each family, yield the first suggestion that fits, with its smallest groups and one of these buffer sizes."""
        for family in [part.family for part in parts if part.family.boundary_stride == 1]:
            one = replace(family, largest_group=family.accumulation_group)
            suggested = (policy for slots in several for policy in self._suggested(one, slots))
            for policy in islice(filter(self._may_try, suggested), 1):
                fewer = neighbours(self.evaluator.setup(policy), self.evaluator.profile, (fewer_offloads,))
                yield from (policy, *filter(self._may_try, (variant for _, variant in fewer)))

    def _relax(self, family: Family, least_s: float, n_slots: int | None = None) -> None:
        """Push a family with its linear bound, which is at least its parent's bound `least_s`."""
        bound_s = self.relaxation.linear_bound_s(family, Slots(gradient_slots=n_slots or 0))
        if bound_s < inf:
            self._push(max(bound_s, least_s), family, n_slots, kind=_Kind.LINEAR)

    def _push(
        self, bound_s: float, family: Family, n_slots: int | None = None, policy: Policy | None = None, kind: _Kind = _Kind.INTEGER
    ) -> None:
        heapq.heappush(self.open, _Node(bound_s, self.n_nodes, family, n_slots, policy, kind))
        self.n_nodes += 1

    def _expand(self, node: _Node) -> None:
        """Split a family by group size, then by gradient slots, then into policies; simulate a policy."""
        family, n_slots = node.family, node.n_slots
        if node.policy is not None and self.evaluator.is_too_long(node.policy):
            heapq.heappush(self.opened, node)
            self.too_long = self.too_long or [node.policy]
        elif node.policy is not None:
            self._take(node.policy)
        elif node.kind is _Kind.ANY_CHOICE:
            self._relax(family, node.bound_s)
        elif node.kind is _Kind.LINEAR and n_slots is None:
            if (relaxed := self.relaxation.solve(family)) is not None:
                self._push(max(relaxed.bound_s, node.bound_s), family)
        elif len(family.groups) > 1:
            for half in family.halves():
                self._relax(half, node.bound_s)
        elif n_slots is None:
            for n in tuning.GRADIENT_SLOTS:
                self._relax(family, node.bound_s, n)
        else:
            heapq.heappush(self.opened, node)
            for policy in self._at_first(family, n_slots):
                if self.evaluator.fits(policy):
                    is_lean = not (policy.spill_blocks or policy.resident_blocks or policy.save)
                    bound_s = 0.0 if is_lean else self.evaluator.bound_s(policy)
                    self._push(max(bound_s, node.bound_s), family, n_slots, policy)

    def _at_first(self, family: Family, n_slots: int) -> Iterator[Policy]:
        """Suggestions for the first usual prefetch depth that fits (climbs try others), and a policy without saved or moved
        activations, because copies take longer than the relaxation assumes."""
        saved_slots = self.best.saved_slots if self.best is not None and self.best.offload_blocks else tuning.SAVED_SLOTS
        for depth in tuning.PREFETCH_DEPTHS:
            suggested = list(self._suggested(family, Slots(depth, n_slots, saved_slots)))
            if suggested:
                yield from suggested
                yield replace(family.policy(), prefetch_depth=depth, gradient_slots=n_slots)
                return

    def _suggested(self, family: Family, slots: Slots, lacking: Omission | None = None, below_s: float = inf) -> Iterator[Policy]:
        """Policies with these buffers that use memory as in the relaxation's solution, packed and spread."""
        relaxed = self.relaxation.solve(family, slots, lacking, below_s)
        if relaxed is None:
            return
        smallest = family.policy()
        buffers = replace(smallest, **slots._replace(prefetch_depth=relaxed.prefetch_depth)._asdict())
        distinct: dict[Policy, None] = {}
        for spread in (False, True):
            suggested = filled(buffers, self.evaluator.workload, relaxed.fill, spread)
            if not suggested.offload_blocks:
                suggested = replace(suggested, saved_slots=smallest.saved_slots)
            distinct[suggested] = None
            distinct[replace(suggested, speculate_blocks=())] = None  # speculation may cost more than in the relaxation
        yield from distinct

    def _take(self, policy: Policy) -> None:
        if self.best is None:
            self.evaluator.step_s(policy)
        if self.best is None or self.evaluator.beats(policy, self.best):
            self.best = policy

    def _climb_all(self) -> None:
        """Climb from the best policy; then, for each kind of choice, from the best policy without it, in a space without it;
        finally from the best of all in the whole space, including single blocks."""
        assert self.best is not None
        self.best = self._climbed(self.best, tuning.MOST_RESTARTED_OPS)
        for omission in OMISSIONS:
            is_near = self.evaluator.step_s(self.best) <= self.lowest_s * (1 + tuning.CLIMBED_FRACTION)
            is_spent = self.evaluator.n_ops >= tuning.MAX_SEARCHED_OPS + tuning.MOST_CLIMBED_OPS
            if is_near or is_spent or self.evaluator.step_s(self.best) > self.known_s:
                return
            if omission.has(self.best):
                starts = [policy for policy in self._lacking(self.best, omission) if self._may_try(policy)]
                if starts:
                    self._take(self._climbed(min(starts, key=self.evaluator.step_s), tuning.MOST_RESTARTED_OPS, omission))
        self.best = self._climbed(self.best, tuning.MOST_CLIMBED_OPS, fine=True)

    def _lacking(self, policy: Policy, omission: Omission) -> Iterator[Policy]:
        """The policy without one kind of choice, and the relaxation's suggestions for its family and buffers."""
        yield (smallest := omission.remove(policy))
        one = family_of(smallest, self.evaluator.semantics, self.evaluator.workload)
        one = replace(one, accumulation_group=smallest.accumulation_group, largest_group=smallest.accumulation_group)
        yield from self._suggested(one, slots_of(smallest), omission)

    def _climbed(self, start: Policy, n_ops: int, lacking: Omission | None = None, fine: bool = False) -> Policy:
        """First-improvement local search: move to faster neighbours until none is faster or `n_ops` ops have been simulated."""
        best, limit = start, min(self.evaluator.n_ops + n_ops, tuning.MAX_SEARCHED_OPS + tuning.MOST_CLIMBED_OPS)
        speculates, climbing = self.evaluator.clipped_fraction is not None, True
        tried = [*[self._refilled] * (lacking is None), *[early_updates] * speculates, *MOVES, *[single_blocks] * fine]
        while climbing and self.evaluator.step_s(best) > self.lowest_s * (1 + tuning.CLIMBED_FRACTION):
            climbing = False
            for move, policy in neighbours(self.evaluator.setup(best), self.evaluator.profile, tried):
                if self.evaluator.n_ops >= limit:
                    return best
                if (lacking and lacking.has(policy)) or not self._may_try(policy):
                    continue
                if self.evaluator.beats(policy, best, tuning.LEAST_GAIN_FRACTION):
                    best, climbing = policy, True
                    tried = [move, *(m for m in tried if m is not move)]  # move to front: retry successful moves
                    break
        return best

    def _may_try(self, policy: Policy) -> bool:
        return not self.evaluator.is_too_long(policy) and self.evaluator.fits(policy)

    def _refilled(self, plan: Setup, may_stay: Sequence[int]) -> Iterator[Policy]:
        """Neighbours with other buffers or group sizes, and memory filled as in the relaxation's solution for these."""
        best, size, n = plan.policy, plan.policy.accumulation_group, plan.semantics.n_micro_batches
        family, (depth, n_slots, n_saved) = family_of(best, self.evaluator.semantics, self.evaluator.workload), slots_of(best)
        below_s = self.evaluator.step_s(best) * (1 - tuning.LEAST_GAIN_FRACTION)
        buffers = [Slots(depth, n_slots + change, n_saved) for change in tuning.REFILLED_STEPS]
        buffers += [Slots(depth + change, n_slots, n_saved) for change in tuning.REFILLED_STEPS]
        buffers += [Slots(depth, n_slots, n_saved + change) for change in (1, -1) if best.offload_blocks]
        groups = [g for g in (size - 1, size + 1, size // 2, 2 * size, n, 1) if 1 <= g <= n and g != size]
        for group, slots in [*((size, slots) for slots in buffers), *((g, slots_of(best)) for g in dict.fromkeys(groups))]:
            if min(slots[:2]) >= 1 and slots.saved_slots >= tuning.LEAST_SAVED_SLOTS:
                one = replace(family, accumulation_group=group, largest_group=group)
                yield from self._suggested(one, slots, below_s=below_s)

    def _prefetch_less(self) -> None:
        """Choose the fewest weight slots among equally fast plans."""
        assert self.best is not None
        limit_s, depth = self.evaluator.step_s(self.best) * (1 + tuning.LEAST_GAIN_FRACTION), self.best.prefetch_depth
        fewer = (replace(self.best, prefetch_depth=d) for d in sorted(tuning.PREFETCH_DEPTHS) if d < depth)
        as_fast = (policy for policy in fewer if self.evaluator.fits(policy) and self.evaluator.step_s(policy) <= limit_s)
        self.best = next(as_fast, self.best)
