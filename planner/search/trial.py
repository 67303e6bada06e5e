"""Trials: policies of one workload, lowered and simulated, each once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.lower import lower, lower_ops, plan_ops
from penstock.planner.lower.op_table import OpTable
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.memory import short_of
from penstock.planner.predict.simulate import Prediction, Simulator
from penstock.runtime.plan import Plan, Policy, Semantics
from penstock.runtime.plan.policy import RICHER
from penstock.runtime.plan.workload import Model, Workload

from .frames import Frames
from .space import BASELINES, baseline

MAX_STEPS = 24
MOST_KEPT_OPS = 24_000  # of the plans that others may have the ops of
MOST_BLOCK_OPS = 32  # of a block, for each micro-batch: more than there are
LONGEST_SEARCHED_OPS = 48_000  # of a plan; of a longer one only the bound is known


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for cycles of garbage, which takes a quarter of a search and finds none: plans are trees."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Trial:
    """Lowers and simulates policies of one workload."""

    def __init__(
        self, model: Model, workload: Workload, semantics: Semantics, profile: Profile, clipped_fraction: float | None
    ) -> None:
        self.model, self.workload, self.semantics, self.profile = model, workload, semantics, profile
        self.clipped_fraction = clipped_fraction  # of the steps; None: unknown, so no block is updated before the norm
        self.cost, self.clipped_cost, self.region = CostModel(profile), CostModel(profile, clipped=True), region_of(profile)
        self.frames = Frames(model, workload, semantics, self.cost)
        self.tried: dict[Policy, Prediction] = {}  # without timelines
        # Seconds of a step in which what was updated on speculation is updated again
        self.clipped_step_s = cache(lambda policy: self._simulated(policy, self.clipped_cost).step_s)
        self.n_ops = 0  # that were simulated
        self._laid_out: dict[Policy, Simulator] = {}  # by all of a policy that decides on ops

    def step_s(self, policy: Policy) -> float:
        """Seconds of a step, in the mean over those that are clipped and those that are not."""
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
        """Take a plan as the one of its policy."""
        self._laid_out[_ordered(plan.policy)] = Simulator(OpTable.from_plan(plan))

    def _simulated(self, policy: Policy, cost: CostModel) -> Prediction:
        """Policies that differ in what layers save on the device have the same ops."""
        key = _ordered(policy)
        if key not in self._laid_out:
            ops = lower_ops(self.frames.of(policy))
            while len(self._laid_out) > MOST_KEPT_OPS // len(ops.kinds):
                del self._laid_out[next(iter(self._laid_out))]
            self._laid_out[key] = Simulator(ops)
        simulator = self._laid_out[key]
        return simulator.run(cost.demands_of(self.frames.of(policy), simulator.ops), self.region, MAX_STEPS)

    def forget(self) -> None:
        """Plans, and what is known of blocks: of this size no policy is asked for soon."""
        self._laid_out.clear()
        self.frames.forget()

    def is_too_long(self, policy: Policy) -> bool:
        """Whether its plan has too many ops to be simulated in a search: groups too large to repeat often."""
        most = len(self.workload.blocks) * self.semantics.n_micro_batches * MOST_BLOCK_OPS
        return most > LONGEST_SEARCHED_OPS and plan_ops(self.workload, self.semantics, policy) > LONGEST_SEARCHED_OPS

    def fits(self, policy: Policy) -> bool:
        """Whether the memory there is is enough, and one rank's share of the step may go through the layers so."""
        return policy.accumulation_group >= self.semantics.least_group and self.frames.needs(policy).fits

    def beats(self, policy: Policy, other: Policy, by_fraction: float = 0.0) -> bool:
        """Whether its step is shorter than that of another, by more than that share. Its bound is asked first: lowering takes
        7 to 20 times as long, the more the longer the step."""
        limit_s = self.step_s(other) * (1 - by_fraction)
        return (policy in self.tried or self.frames.bound_s(policy) < limit_s) and self.step_s(policy) < limit_s

    def baselines(self) -> dict[str, dict[str, Any]]:
        """What each static candidate would take, or why it cannot run here."""
        result: dict[str, dict[str, Any]] = {}
        for name in BASELINES:
            policy = baseline(name, self.semantics, self.workload)
            needs = self.frames.needs(policy)
            result[name] = {"step_s": self.step_s(policy)} if needs.fits else {"does_not_fit": short_of(needs)}
        return result

    def next_best(self, best: Policy) -> tuple[Policy, float] | None:
        """The fastest policy tried that differs from the best in more than buffers."""
        others = [policy for policy in self.tried if _essence(policy) != _essence(best)]
        found = min(others, key=self.step_s, default=None)
        return None if found is None else (found, self.step_s(found))


def _ordered(policy: Policy) -> Policy:
    """The policy without what layers save that stays: which ops there are, and in which order, does not depend on it."""
    return replace(policy, save=tuple([policy.saved(b) for b in policy.offload_blocks]))


def _essence(policy: Policy) -> tuple[object, ...]:
    """The policy without where norms are made and the sizes of buffers, and with counts of blocks in place of their names."""
    counts = [
        len(of)
        for of in (policy.resident_blocks, policy.spill_blocks, policy.offload_blocks, policy.device_blocks, policy.disk_blocks)
    ]
    counts += [policy.save.count(saved) for saved in RICHER] + [bool(policy.speculate_blocks)]
    return policy.update, policy.accumulation_group, policy.boundary_stride, *counts
