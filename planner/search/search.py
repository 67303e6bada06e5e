"""Search over sizes and policies: the fastest plan found, and a lower bound on all others.

Every free size (micro-batch and tiles) is bounded, first for any schedule (`planner/bounds/machine.py`), then by the relaxations of
its families. A few policies are simulated for sizes that can still win. The most promising sizes are searched (`tree.py`); the
others keep their bounds.
"""

import heapq
from collections.abc import Mapping, Sequence
from math import inf

from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.machine import machine_bound
from penstock.runtime.errors import DoesNotFitError, PlanError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.workload import Model

from . import tuning
from .claim import CUT
from .evaluation import Evaluator, without_collection
from .greedy import Greedy
from .micro_batch import Size, cuts, sizes_of, uncut
from .policies import BASELINES, baseline, eager_is_legal, family_of, policy_of, smallest_plans
from .remedy import MAX_PLAN_OPS, Request, TooLongError, does_not_fit, most_ops
from .result import ROUNDING, Bounds, SearchResult, result_of
from .tree import Tree


def search_machine(
    model: Model,
    semantics: Semantics,
    profile: Profile,
    fixed: Policy | str | None,
    free: frozenset[str],
    clipped_fraction: float | None = None,
) -> tuple[SearchResult, Profile]:
    """Search all free sizes and, if free, all splits of a single memory. Return the result and the machine with the chosen split.
    If nothing fits any split, the error refers to the unsplit machine."""
    machines = [*cuts(model, semantics, profile, free)] if fixed is None else []
    machines = machines or [profile]
    free = free if machines != [profile] else free - {CUT}
    results = [(search(model, sizes_of(model, semantics, m, free), m, fixed, free, clipped_fraction), m) for m in machines]
    return min(results, key=lambda result: result[0].step_s)


@without_collection()
def search(
    model: Model,
    sizes: Sequence[Size],
    profile: Profile,
    fixed: Policy | str | None = None,
    free: frozenset[str] = frozenset(),
    clipped_fraction: float | None = None,
) -> SearchResult:
    """Return the fastest plan found with any of these sizes (from `sizes_of`, larger micro-batches first), and its certificate.
    `fixed`: a policy, or the schedule of another system by name; only sizes are then compared.

    `free`: sizes that were chosen automatically and may be changed in suggestions. `clipped_fraction`: share of steps with clipped
    gradients; None if unknown, which disables speculative updates unless the semantics never clip. Raises DoesNotFitError if
    nothing fits, PlanError for illegal semantics or policy, and TooLongError if every plan has too many ops.
    """
    n_ops = [most_ops(workload, sized, policy_of(fixed, sized, workload)) for sized, workload in sizes]
    if min(n_ops) > MAX_PLAN_OPS:
        raise TooLongError(sizes[n_ops.index(min(n_ops))][0], min(n_ops))
    evaluators = [Evaluator(model, workload, sized, profile, _clipped(sized, clipped_fraction)) for sized, workload in sizes]
    if fixed is not None:
        return _fixed_policy(evaluators, fixed, free)
    for evaluator in evaluators:
        refuse_illegal(evaluator.workload, evaluator.semantics, Policy(accumulation_group=evaluator.semantics.least_group))
    state = _Sizes(evaluators)
    state.bound()
    state.explore()
    if not state.searched_s:
        raise _nothing_found(state, free)
    state.tighten()
    chosen, bounds_s = _chosen(state.searched_s), state.bounds_s
    tree, others_s = state.trees[chosen], min([bound_s for i, bound_s in bounds_s.items() if i != chosen], default=inf)
    assert tree.best is not None, "a searched size has a plan"
    _assert_bounded(tree, tree.best)
    if CUT in free:
        others_s = min(others_s, _of_any_cut_s(evaluators[chosen], free))
    proven = Bounds(bounds_s[chosen], others_s, len(tree.families), tuple(sorted(free)), len(sizes))
    return result_of(evaluators[chosen], evaluators[chosen].plan(tree.best), proven, evaluators[chosen].baselines())


class _Sizes:
    """State of a search, by index of the size."""

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self.evaluators = evaluators
        self.machine_s = [machine_bound(evaluator.setup(Policy()), evaluator.cost).seconds for evaluator in evaluators]
        self.bounds_s = dict.fromkeys(range(len(evaluators)), inf)
        self.trees: dict[int, Tree] = {}
        self.first_s: dict[int, float] = {}  # step times of the first policies
        self.searched_s: dict[int, float] = {}  # step times of searched sizes

    def bound(self) -> None:
        """Bound every size, best-first: for any schedule, then by families. Simulate a few policies of sizes that can win."""
        ready = [(bound_s, 0, i) for i, bound_s in enumerate(self.machine_s)]  # (bound in seconds, number of relaxations, size)
        heapq.heapify(ready)
        while ready:
            bound_s, n_relaxed, i = heapq.heappop(ready)
            best_s = min(self.first_s.values(), default=inf)
            if best_s <= bound_s * (1 + tuning.CLOSE_FRACTION):
                self.bounds_s[i] = bound_s
            elif n_relaxed < 2:
                if i not in self.trees:
                    self.trees[i] = Tree(self.evaluators[i])
                heapq.heappush(ready, (max(bound_s, self.trees[i].relax()), n_relaxed + 1, i))
            elif bound_s < inf:
                self.bounds_s[i], self.first_s[i] = bound_s, self.trees[i].try_first(_starts(self.evaluators[i]), best_s)
            self.evaluators[i].forget()

    def explore(self) -> None:
        """Search the sizes with the fastest first policies and the one with the lowest bound; if none fits, others."""
        fastest = sorted(self.first_s, key=lambda i: (self.first_s[i], i))
        likely = sorted(self.first_s, key=lambda i: (self.bounds_s[i], i))
        promising = dict.fromkeys([*fastest[: tuning.MOST_SEARCHED], *likely[:1]])
        for i in promising | dict.fromkeys(fastest):
            best_s = min(self.searched_s.values(), default=inf)
            if best_s <= self.bounds_s[i] * (1 + tuning.CLOSE_FRACTION) or (self.searched_s and i not in promising):
                continue  # cannot win, or not needed
            self.trees[i].explore(best_s)
            self.evaluators[i].forget()
            self.bounds_s[i] = max(self.trees[i].lowest_s, self.machine_s[i])
            if (best := self.trees[i].best) is not None:
                self.searched_s[i] = self.evaluators[i].step_s(best)

    def tighten(self) -> None:
        """Raise the lowest bound over all sizes, on which the certificate depends."""
        best_s = min(self.searched_s.values())
        for _ in range(tuning.MOST_TIGHTENED):
            i = min(self.bounds_s, key=lambda i: (self.bounds_s[i], i))
            is_done = i not in self.trees or best_s <= self.bounds_s[i] * (1 + tuning.CLOSE_FRACTION)
            if is_done or not self.trees[i].tighten():
                return
            self.bounds_s[i] = max(self.bounds_s[i], self.trees[i].lowest_s)


def _nothing_found(state: _Sizes, free: frozenset[str]) -> TooLongError | DoesNotFitError:
    """Error of a search without a plan: every plan is too long, or nothing fits."""
    for tree in state.trees.values():
        for policy in tree.too_long:
            semantics, workload = tree.evaluator.semantics, tree.evaluator.workload
            return TooLongError(semantics, most_ops(workload, semantics, policy))
    last = state.evaluators[-1]
    needs = [needs for _, needs in smallest_plans(last.model, last.workload, last.semantics, last.profile)]
    return does_not_fit(Request(last.model, last.semantics, last.profile, None, free), needs)


def _of_any_cut_s(evaluator: Evaluator, free: frozenset[str]) -> float:
    """Lower bound in seconds over all sizes and all splits of a single memory."""
    model, semantics, clipped_fraction = evaluator.model, evaluator.semantics, evaluator.clipped_fraction
    unsplit = uncut(model, semantics, evaluator.profile, free)
    sizes = sizes_of(model, semantics, unsplit, free)
    evaluators = [Evaluator(model, workload, sized, unsplit, clipped_fraction) for sized, workload in sizes]
    trees = [Tree(evaluator) for evaluator in evaluators]
    ready = [(machine_bound(e.setup(Policy()), e.cost).seconds, 0, i) for i, e in enumerate(evaluators)]
    heapq.heapify(ready)
    while ready[0][1] < 2:
        bound_s, n_relaxed, i = ready[0]
        heapq.heapreplace(ready, (max(bound_s, trees[i].relax()), n_relaxed + 1, i))
    return ready[0][0]


def _clipped(semantics: Semantics, clipped_fraction: float | None) -> float | None:
    if not semantics.train.all:
        return None  # no speculative updates
    return 0.0 if clipped_fraction is None and eager_is_legal(semantics) else clipped_fraction  # steps are never clipped or skipped


def _starts(evaluator: Evaluator) -> list[Policy]:
    """Starting policies: schedules of other systems, and greedy ones."""
    baselines = [baseline(name, evaluator.semantics, evaluator.workload) for name in BASELINES]
    likely = [policy for policy in Greedy(evaluator).policies() if not evaluator.is_too_long(policy)]
    return [*sorted(likely, key=evaluator.bound_s)[: tuning.STARTS], *filter(evaluator.fits, baselines)]


def _assert_bounded(tree: Tree, best: Policy) -> None:
    """Check that the family's bound holds for the plan found."""
    relaxed, step_s = (
        tree.relaxation.solve(family_of(best, tree.evaluator.semantics, tree.evaluator.workload)),
        tree.evaluator.step_s(best),
    )
    is_periodic = tree.evaluator.tried[best].periodic
    assert not is_periodic or relaxed is None or step_s >= relaxed.bound_s * ROUNDING, f"{best} is below the bound of its family"


def _chosen(steps_s: Mapping[int, float]) -> int:
    """Smallest index with nearly the shortest step."""
    return min(i for i, step_s in steps_s.items() if step_s <= min(steps_s.values()) * (1 + tuning.NEAR_FRACTION))


def _fixed_policy(evaluators: Sequence[Evaluator], fixed: Policy | str, free: frozenset[str]) -> SearchResult:
    """Choose the fastest size for a fixed policy."""
    policies: dict[int, Policy] = {}
    refused: PlanError | None = None
    for i, evaluator in enumerate(evaluators):
        policy = policy_of(fixed, evaluator.semantics, evaluator.workload)
        assert policy is not None
        try:
            refuse_illegal(evaluator.workload, evaluator.semantics, policy)
        except PlanError as error:  # for example with larger groups than the step has micro-batches
            refused = refused or error
        else:
            policies[i] = policy
    if not policies:
        assert refused is not None
        raise refused
    needs = {i: evaluators[i].needs(policy) for i, policy in policies.items()}
    bounds_s = {i: evaluators[i].bound_s(policy) for i, policy in policies.items() if needs[i].fits}
    if not bounds_s:
        last = evaluators[-1]
        raise does_not_fit(Request(last.model, last.semantics, last.profile, fixed, free), [*needs.values()][-1:])
    steps_s: dict[int, float] = {}
    for i in sorted(bounds_s, key=lambda i: (bounds_s[i], i)):
        if bounds_s[i] < min(steps_s.values(), default=inf):
            steps_s[i] = evaluators[i].step_s(policies[i])
    chosen = _chosen(steps_s)
    evaluator, proven = evaluators[chosen], Bounds(bounds_s[chosen], inf, 0, tuple(sorted(free)), 1)
    return result_of(evaluator, evaluator.plan(policies[chosen]), proven, evaluator.baselines())
