"""Evaluation of the policies of one workload on one machine, memoised: memory, lower bound, lowering and simulation."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.bounds import policy_bounds
from penstock.planner.bounds.work import Work, WorkCache
from penstock.planner.lower.arenas import N_STAGING_SLOTS, n_streaming
from penstock.planner.lower.lower import lower, lower_ops, plan_ops
from penstock.planner.lower.op_table import OpTable
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.memory import footprint, frame, short_of
from penstock.planner.predict.simulate import Prediction, Simulator
from penstock.runtime.plan import Plan, Policy, Semantics, Setup
from penstock.runtime.plan.policy import RICHER
from penstock.runtime.plan.workload import Model, Workload

from . import tuning
from .policies import BASELINES, Family, baseline

Numbers = np.ndarray[Any, np.dtype[np.int64]]

MOST_BLOCK_OPS = 32  # upper bound per block and micro-batch


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector: it takes a quarter of a search and finds nothing, because plans have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Evaluator:
    """Memory, lower bound and step time of each policy of one workload. Setups are plans without ops."""

    def __init__(
        self, model: Model, workload: Workload, semantics: Semantics, profile: Profile, clipped_fraction: float | None = None
    ) -> None:
        self.model, self.workload, self.semantics, self.profile = model, workload, semantics, profile
        self.clipped_fraction = clipped_fraction  # share of steps; None: unknown, no speculative updates
        self.cost, self.clipped_cost, self.region = CostModel(profile), CostModel(profile, clipped=True), region_of(profile)
        self.works = WorkCache(self.cost)
        self.setup = cache(partial(frame, model, workload, semantics))
        self.bare_setup = cache(lambda policy: Setup(semantics, policy, model, workload, ()))  # without arenas
        self.needs = cache(lambda policy: footprint(self.setup(policy), profile))
        # Lower bound on the step time
        self.bound_s = cache(lambda policy: max(bound.seconds for bound in policy_bounds(self.setup(policy), self.works)))
        self._peaks = cache(self._peaks_of)
        self.family_work: dict[Family, list[Work]] = {}  # work of the latest family, without and with clipping
        # Coefficients of `choices.py`, by smallest policy, and True if layers may be summed on the device
        self.asked_bytes: dict[tuple[Policy, bool], list[Numbers]] = {}
        self.tried: dict[Policy, Prediction] = {}  # without timelines
        # Step time if speculative updates are repeated
        self.clipped_step_s = cache(lambda policy: self._simulated(policy, self.clipped_cost).step_s)
        self.n_ops = 0  # simulated so far
        self._laid_out: dict[Policy, Simulator] = {}  # by the policy fields that determine ops

    def step_s(self, policy: Policy) -> float:
        """Mean step time in seconds over clipped and unclipped steps."""
        if policy not in self.tried:
            self.tried[policy] = self._simulated(policy, self.cost)
            self.n_ops += self._laid_out[_ordered(policy)].ops.n_simulated
        step_s, often = self.tried[policy].step_s, self.clipped_fraction
        if not policy.speculate_blocks or not often:
            return step_s
        return (1 - often) * step_s + often * self.clipped_step_s(policy)

    def plan(self, policy: Policy) -> Plan:
        return lower(self.model, self.workload, self.semantics, policy, self.profile.to_json())

    def adopt(self, plan: Plan) -> None:
        """Use a given plan for its policy."""
        self._laid_out[_ordered(plan.policy)] = Simulator(OpTable.from_plan(plan))

    def _simulated(self, policy: Policy, cost: CostModel) -> Prediction:
        """Simulate a policy. Policies that differ only in activations saved on the device share an op table."""
        key = _ordered(policy)
        if key not in self._laid_out:
            ops = lower_ops(self.setup(policy))
            while len(self._laid_out) > tuning.MOST_KEPT_OPS // len(ops.kinds):
                del self._laid_out[next(iter(self._laid_out))]
            self._laid_out[key] = Simulator(ops)
        simulator = self._laid_out[key]
        return simulator.run(cost.demands_of(self.setup(policy), simulator.ops), self.region, tuning.MAX_STEPS)

    def forget(self) -> None:
        """Free op tables, setups and work, when the search moves on to another size; keep numbers."""
        for cached in (self._laid_out.clear, self.setup.cache_clear, self.bare_setup.cache_clear, self.family_work.clear):
            cached()
        self.works = WorkCache(self.cost)

    def peaks(self, policy: Policy) -> tuple[int, int]:
        """Peak bytes on device and host, without the block being computed and without slots of gradients, staged ones of layers
        included, and of streamed weights."""
        return self._peaks(replace(policy, gradient_slots=1, saved_slots=policy.saved_slots if policy.offload_blocks else 1))

    def _peaks_of(self, policy: Policy) -> tuple[int, int]:
        setup, needs = self.setup(policy), self.needs(policy)
        gradients = setup.arena("gradients")
        assert gradients is not None
        leaving_bytes = sum(gradients.slot_bytes[:2])
        weights, staging = setup.arena("weights"), setup.arena("staging")
        assert weights is not None
        streaming_bytes = sum(weights.slot_bytes[: n_streaming(setup) + 1])
        staged_bytes = sum(staging.slot_bytes[:N_STAGING_SLOTS]) if staging is not None else 0
        device_bytes = needs.device_peak_bytes - setup.transient_bytes - leaving_bytes - streaming_bytes
        return device_bytes, needs.host_peak_bytes - staged_bytes

    def is_too_long(self, policy: Policy) -> bool:
        """True if the plan has too many ops to simulate, because its groups are too large to be repeated."""
        limit, n_blocks = tuning.LONGEST_SEARCHED_OPS, len(self.workload.blocks)
        upper_bound = n_blocks * self.semantics.n_micro_batches * MOST_BLOCK_OPS
        return upper_bound > limit and plan_ops(self.workload, self.semantics, policy) > limit

    def fits(self, policy: Policy) -> bool:
        """True if the policy fits in memory and its group has the minimum size for several ranks."""
        is_exchanged_whole = bool(policy.sum_blocks) or policy.accumulation_group >= self.semantics.least_group
        return is_exchanged_whole and self.needs(policy).fits

    def beats(self, policy: Policy, rival: Policy, by_fraction: float = 0.0) -> bool:
        """True if the policy's step is shorter than the other's by more than `by_fraction`. Its bound is checked first, because
        lowering takes 7 to 20 times as long."""
        limit_s = self.step_s(rival) * (1 - by_fraction)
        return (policy in self.tried or self.bound_s(policy) < limit_s) and self.step_s(policy) < limit_s

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Step time of other systems' schedules, or the reason why they do not fit."""
        result: dict[str, dict[str, Any]] = {}
        for name in BASELINES:
            policy = baseline(name, self.semantics, self.workload)
            needs = self.needs(policy)
            result[name] = {"step_s": self.step_s(policy)} if needs.fits else {"does_not_fit": short_of(needs)}
        return result

    def next_best(self, best: Policy) -> tuple[Policy, float] | None:
        """Fastest simulated policy that differs from the best in more than buffers."""
        candidates = [policy for policy in self.tried if _essence(policy) != _essence(best)]
        fastest = min(candidates, key=self.step_s, default=None)
        return None if fastest is None else (fastest, self.step_s(fastest))


def _ordered(policy: Policy) -> Policy:
    """Key of the ops and their order, which do not depend on activations saved on the device."""
    return replace(policy, save=tuple([policy.saved(b) for b in policy.offload_blocks]))


def _essence(policy: Policy) -> tuple[object, ...]:
    """Key without buffer sizes and the place of norms, and with counts of blocks."""
    p = policy
    counts = [*map(len, (p.resident_blocks, p.spill_blocks, p.offload_blocks, p.device_blocks, p.disk_blocks))]
    counts += [policy.save.count(saved) for saved in RICHER] + [bool(policy.speculate_blocks)]
    return policy.update, policy.accumulation_group, policy.boundary_stride, *counts
