"""Policies of one workload on one machine, with arenas and without ops: what they need of memory, and what bounds them."""

from dataclasses import replace

from planner.bounds.bounds import policy_bounds
from planner.bounds.work import Works
from planner.predict.cost import CostModel
from planner.predict.memory import Footprint, footprint, frame
from runtime.plan import Policy, Semantics, Setup
from runtime.plan.workload import Model, Workload


class Frames:
    """Each worked out once."""

    def __init__(self, model: Model, workload: Workload, semantics: Semantics, cost: CostModel) -> None:
        self.model, self.workload, self.semantics, self.cost = model, workload, semantics, cost
        self.profile, self.works = cost.profile, Works(cost)
        self._known: dict[Policy, Setup] = {}
        self._needs: dict[Policy, Footprint] = {}
        self._peaks: dict[Policy, tuple[int, int]] = {}
        self._bounds_s: dict[Policy, float] = {}

    def forget(self) -> None:
        """All but numbers."""
        self._known.clear()
        self.works = Works(self.cost)

    def bare(self, policy: Policy) -> Setup:
        """Without arenas."""
        return Setup(self.semantics, policy, self.model, self.workload, ())

    def of(self, policy: Policy) -> Setup:
        if policy not in self._known:
            self._known[policy] = frame(self.model, self.workload, self.semantics, policy)
        return self._known[policy]

    def needs(self, policy: Policy) -> Footprint:
        if policy not in self._needs:
            self._needs[policy] = footprint(self.of(policy), self.profile)
        return self._needs[policy]

    def bound_s(self, policy: Policy) -> float:
        """Seconds below which no step of the policy is."""
        if policy not in self._bounds_s:
            self._bounds_s[policy] = max(bound.seconds for bound in policy_bounds(self.of(policy), self.works))
        return self._bounds_s[policy]

    def peaks(self, policy: Policy) -> tuple[int, int]:
        """Bytes of device and host but for those of the block being computed, and of the slots through which gradients leave."""
        one_slot = replace(policy, gradient_slots=1)
        if one_slot not in self._peaks:
            plan, found = self.of(one_slot), self.needs(one_slot)
            gradients = plan.arena("gradients")
            assert gradients is not None
            leaving_bytes = sum(gradients.slot_bytes[:2])
            self._peaks[one_slot] = found.device_peak_bytes - plan.transient_bytes - leaving_bytes, found.host_peak_bytes
        return self._peaks[one_slot]
