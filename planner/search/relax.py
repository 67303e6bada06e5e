"""Relaxation of a policy family: a lower bound on the step of every member, and suggested choices.

It is an integer program over counts of equal blocks (`choices.py`). The constraints in `planner/bounds/reasons.py` are affine in
these counts. The program ignores the order and identity of blocks, so its optimum is a lower bound for the family. Only the dual
bound is used as a proof. The solution is a suggestion, to be lowered and simulated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from penstock.planner.bounds.bounds import SLACK, busy_s, places_to_stay
from penstock.planner.bounds.facets import Array, Facets
from penstock.planner.bounds.integer import Rows
from penstock.planner.bounds.reasons import Subject, reasons
from penstock.planner.bounds.work import Buffers, Groups, Work, WorkCache, least_slots, n_passing, until_each_block_s
from penstock.runtime.plan import Kind, Lane, Policy, Setup, Update, saves

from . import tuning
from .choices import Choices
from .evaluation import Evaluator
from .neighbours import Omission
from .policies import ANY_SLOTS, Family, Fill, Slots, can_spill, disk_layers, staying, ways_of, with_ways

_Part = tuple[Family, Slots, Omission | None]

LONGEST_PER_FACET = 8  # upper limits on the variables for maxima: per facet, and in addition
MORE_LONGEST = 64


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Result of a relaxation: a lower bound for the family with these buffers, and the solution's choices."""

    bound_s: float
    prefetch_depth: int
    fill: Fill


class Relaxation:
    """Integer programs of one workload on one machine, memoised per family and buffer sizes.

    The largest usual prefetch depth and number of gradient slots also represent all larger values.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, self._clipped_works = evaluator, WorkCache(evaluator.clipped_cost)
        self._facets: dict[tuple[bool, tuple[int, ...], tuple[int, ...], bool], Facets] = {}
        self.known: dict[_Part, Relaxed | None] = {}
        self._programs: dict[_Part, tuple[Choices, float]] = {}  # programs with only a linear bound so far

    def solve(
        self, family: Family, slots: Slots = ANY_SLOTS, lacking: Omission | None = None, below_s: float = inf
    ) -> Relaxed | None:
        """Solve the integer program with these buffers; None if infeasible. For suggestions: `lacking`, a disabled kind of choice;
        `below_s`, a step time that the result must beat."""
        key = (family, slots, lacking)
        if key not in self.known:
            choices, scale_s = self._programs.pop(key) if key in self._programs else self._program(*key)
            if below_s < inf and ((least := choices.program.solve(integers=False)) is None or least[0] * scale_s >= below_s):
                return None
            solution = choices.program.solve()
            self.known[key] = None
            if solution is not None:
                bound, x = solution
                self.known[key] = Relaxed(bound * scale_s * (1 - SLACK), round(x[choices.depth]), choices.fill(x))
        return self.known[key]

    def least_s(self, family: Family) -> float:
        """Lower bound from work that every member has, cheaper and weaker than a program. If layers share boundaries, they save
        nothing else, so compute is equal except for unpacking, of which resident layers have the least. If the host sums
        micro-batches, no choice reduces the work on gradients."""
        smallest = family.policy()
        plan, facets = self._evaluator.bare_setup(smallest), self._facets_of(smallest, family.summed is not None)
        leanest = replace(smallest, resident_blocks=tuple(range(len(plan.workload.blocks))))
        if family.boundary_stride == 1:
            leanest = replace(leanest, save=saves(all=range(max(1, plan.workload.first_trained), plan.workload.n_layers + 1)))
        computing_s = busy_s(self._evaluator.bare_setup(leanest), self._evaluator.cost)[Lane.GPU]
        if plan.reduced or family.summed is not None:
            return computing_s
        groups, equal_blocks = Groups.from_plan(plan, family.groups), plan.blocks_alike.items()
        arriving = [len(blocks) * self._of_block(smallest, b, groups, facets, False)["arriving"] for b, blocks in equal_blocks]
        return max(computing_s, float(np.sum(arriving, axis=0).max()))

    def linear_bound_s(self, family: Family, slots: Slots = ANY_SLOTS) -> float:
        """Bound of the linear program: lower than that of `solve`, in a fraction of the time. Infinity if infeasible."""
        key = (family, slots, None)
        self._programs[key] = choices, scale_s = self._program(*key)
        solution = choices.program.solve(integers=False)
        return inf if solution is None else solution[0] * scale_s * (1 - SLACK)

    def _program(self, family: Family, slots: Slots, lacking: Omission | None) -> tuple[Choices, float]:
        """Build the program. Return its choices and the seconds of its time unit."""
        _, gradient_slots, saved_slots = slots
        smallest = replace(family.policy(), gradient_slots=gradient_slots or 1, saved_slots=saved_slots or tuning.LEAST_SAVED_SLOTS)
        choices = Choices(self._evaluator, smallest, family, slots)
        may_sum = family.summed is not None
        facets, groups = self._facets_of(smallest, may_sum), Groups.from_plan(choices.plan, family.groups, may_sum)
        steps = [step for step in (choices.step, choices.clipped_step) if choices.program.cost[step]]
        n_longest = len(steps) * (MORE_LONGEST + LONGEST_PER_FACET * len(facets.keys))
        width = 1 + len(choices.program.cost) + n_longest
        of_family = self._evaluator.family_work
        if family not in of_family:  # consecutive calls usually differ in buffers only
            of_family.clear()
            of_family[family] = [
                self._work(smallest, choices, groups, facets, width, step == choices.clipped_step) for step in steps
            ]
        works = of_family[family]
        rows = Rows(choices.program, width, max(float(works[0]["total"][:, 0].sum()), 1e-12))
        for step, work in zip(steps, works, strict=True):
            subject = self._subject(choices, family, gradient_slots, groups, work, rows)
            rows.at_least(step, np.array([quantity for _, _, quantity in reasons(subject, facets, rows)]))
        choices.together(lacking)
        choices.within_memory()
        return choices, rows.scale

    def _facets_of(self, smallest: Policy, may_sum: bool) -> Facets:
        """Facets valid for every policy that sums gradients on the same side and trains the same blocks on the device."""
        plan = self._evaluator.bare_setup(smallest)
        key = (plan.reduced, smallest.device_blocks, smallest.sum_blocks, may_sum)
        if key not in self._facets:
            self._facets[key] = self._evaluator.works.facets((plan, *self._variants(plan, may_sum)))
        return self._facets[key]

    def _variants(self, plan: Setup, may_sum: bool) -> Iterator[Setup]:
        """Yield policies with ops that `plan` lacks, or with other demands on shared resources."""
        plan_of, smallest = self._evaluator.bare_setup, replace(plan.policy, boundary_stride=1)
        if plan.workload.n_layers > 1:
            yield plan_of(replace(smallest, spill_blocks=can_spill(plan.workload)))
            yield plan_of(replace(smallest, boundary_stride=2))
        if may_sum and not plan.reduced:
            trained = (b for b, block in enumerate(plan.workload.blocks) if block.trained and b not in smallest.device_blocks)
            plan = plan_of(replace(smallest, sum_blocks=tuple(trained)))
            yield plan
        if (plan.reduced or may_sum) and plan.workload.trains_all:
            yield plan_of(replace(plan.policy, boundary_stride=1, square_on_device=True))
            yield plan_of(staying(plan, replace(plan.policy, boundary_stride=1), places_to_stay(plan, self._evaluator.profile)))
        if blocks := disk_layers(plan.semantics, plan.workload, self._evaluator.profile):
            yield plan_of(replace(smallest, disk_blocks=blocks))
        of_cpu = self._evaluator.profile.device.kind == "cpu"
        for b, *_ in plan.workload.classes:
            for way in ways_of(plan.workload.blocks[b], 1) if 0 < b <= plan.workload.n_layers else ():
                if way.away or of_cpu:
                    yield plan_of(with_ways(smallest, {b: way}))

    def _work(self, smallest: Policy, choices: Choices, groups: Groups, facets: Facets, width: int, clipped: bool) -> Work:
        """Work of the family: that of the smallest policy, plus the difference of each choice as a coefficient of its count."""
        total = Work(len(facets.keys), width)
        for first, blocks in choices.plan.blocks_alike.items():
            total.add(self._of_block(smallest, first, groups, facets, clipped), len(blocks))
        for choice in choices.all():
            treated, instead = (way(smallest, choice.blocks[:1]) for way in (choice.treated, choice.instead))
            for b in (choice.blocks[0], *choice.also):
                total.add(self._of_block(treated, b, groups, facets, clipped), 1, 1 + choice.count)
                total.add(self._of_block(instead, b, groups, facets, clipped), -1, 1 + choice.count)
        # Saved loads, and the layer that is still unpacked, count at the largest cost, so that the bound holds.
        total["total"][:, 1 + choices.spared] -= total.largest["load"] + total.largest["gather"]
        total["total"][:, 1 + choices.spared_reads] -= total.largest["read"]
        total["total"][:, 0] -= (2 * groups.n - 1) * total.largest["unpacking"]
        return total

    def _of_block(self, policy: Policy, block: int, groups: Groups, facets: Facets, clipped: bool) -> Work:
        works = self._clipped_works if clipped else self._evaluator.works
        return works.of_block(self._evaluator.bare_setup(policy), facets, block, groups)

    def _subject(self, choices: Choices, family: Family, gradient_slots: int, groups: Groups, work: Work, rows: Rows) -> Subject:
        plan, smallest = choices.plan, choices.smallest
        n_slots = plan.workload.n_layers * self._evaluator.semantics.n_micro_batches  # one slot per gradient
        if 0 < gradient_slots < max(tuning.GRADIENT_SLOTS):
            n_slots = gradient_slots
        n_loads, n_staying = rows.variable(choices.depth), np.zeros(rows.width)
        n_loads[0] = least_slots(plan)
        for i in choices.layers:
            if i in choices.staying:
                n_staying[1 + choices.staying[i].count] = 1.0
        n_early = {Kind.FETCH_ACTIVATION: rows.variable(choices.early), Kind.FETCH_SAVED: rows.variable(choices.early_saved)}
        n_saved = {saved: rows.variable(number) for saved, number in choices.more_slots.items()}
        for n in n_saved.values():
            n[0] = smallest.saved_slots
        # Early updates, and updates on the device, count as if all preceded the block
        sooner = work.scalars["update"] - work.scalars["forwards"]
        facets, one_block = self._facets_of(smallest, family.summed is not None), list[Array]()
        of_class = [(blocks, self._of_block(smallest, blocks[0], groups, facets, False)) for blocks in choices.classes]
        of_block = {b: work for blocks, work in of_class for b in blocks}
        if family.update is Update.DEFERRED:
            for seconds in until_each_block_s(plan, self._evaluator.cost, of_block, choices.may_stay):
                one_block.append(sooner.copy())
                one_block[-1][0] = seconds
        passing = n_passing(family.groups[-1], n_saved)
        return Subject(plan, groups, Buffers.from_plan(plan, n_slots), n_loads, n_staying, n_early, passing, work, one_block)
