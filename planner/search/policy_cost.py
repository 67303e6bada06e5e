"""Memory and lower bounds of policies of one workload on one machine, from plans with arenas but without ops."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from penstock.planner.bounds.bounds import policy_bounds
from penstock.planner.bounds.work import Work, WorkCache
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import footprint, frame
from penstock.runtime.plan import Policy, Semantics, Setup
from penstock.runtime.plan.workload import Model, Workload

from .space import Family

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class PolicyCost:
    """Memoised memory footprint and lower bound of each policy."""

    def __init__(self, model: Model, workload: Workload, semantics: Semantics, cost: CostModel) -> None:
        self.model, self.workload, self.semantics, self.cost = model, workload, semantics, cost
        self.profile, self.works = cost.profile, WorkCache(cost)
        self.plan = cache(partial(frame, model, workload, semantics))
        self.bare_plan = cache(lambda policy: Setup(semantics, policy, model, workload, ()))
        self.needs = cache(lambda policy: footprint(self.plan(policy), self.profile))
        # Lower bound on the step time
        self.bound_s = cache(lambda policy: max(bound.seconds for bound in policy_bounds(self.plan(policy), self.works)))
        self.family_work: dict[Family, list[Work]] = {}  # work of the latest family, without and with clipping
        self.asked_bytes: dict[Policy, list[Numbers]] = {}  # coefficients of `choices.py`, by smallest policy
        self._peaks = cache(self._peaks_of)

    def forget(self) -> None:
        """Free plans and work; keep numbers."""
        self.plan.cache_clear()
        self.bare_plan.cache_clear()
        self.works = WorkCache(self.cost)
        self.family_work.clear()

    def peaks(self, policy: Policy) -> tuple[int, int]:
        """Peak bytes on device and host, without the block being computed and the gradient slots."""
        return self._peaks(replace(policy, gradient_slots=1, saved_slots=policy.saved_slots if policy.offload_blocks else 1))

    def _peaks_of(self, policy: Policy) -> tuple[int, int]:
        plan, needs = self.plan(policy), self.needs(policy)
        gradients = plan.arena("gradients")
        assert gradients is not None
        leaving_bytes = sum(gradients.slot_bytes[:2])
        return needs.device_peak_bytes - plan.transient_bytes - leaving_bytes, needs.host_peak_bytes
