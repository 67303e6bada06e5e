"""Result of a search: a plan, its prediction and its certificate."""

from dataclasses import dataclass
from typing import Any

from penstock.planner.bounds.bounds import policy_bound
from penstock.planner.bounds.machine import machine_bound
from penstock.planner.bounds.reasons import FACET, LANE_NAME
from penstock.planner.predict.cost import CostModel, micro_batch_groups
from penstock.planner.predict.memory import Footprint, footprint
from penstock.planner.predict.region import Resource
from penstock.planner.predict.resident import Resident
from penstock.planner.predict.simulate import Prediction, simulate
from penstock.planner.predict.uncertainty import interval
from penstock.runtime.plan import Plan, Policy
from penstock.runtime.plan.workload import Block

from . import tuning
from .claim import Certificate, Claim, Predicted, arithmetic
from .evaluation import Evaluator
from .greedy import resident_baseline

ROUNDING = 1 - 1e-9  # tolerance for sums of floats
BUSY_FRACTION = 0.9  # a lane or resource that is busy for this share of the step is the bottleneck


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The chosen plan with its prediction, claim, memory and alternatives."""

    plan: Plan
    prediction: Prediction  # of a step without clipping
    claim: Claim
    needs: Footprint
    baselines: dict[str, dict[str, Any]]
    outside: tuple[str, ...]  # inputs outside the measured range that costs depend on
    next_best: tuple[Policy, float] | None  # the fastest policy with a different structure, and its step time
    clipped_step_s: float | None  # step time if speculative updates are repeated; None without such updates
    resident: Resident | None  # step of a resident trainer; None if device and host share one memory

    @property
    def step_s(self) -> float:
        """Mean step time over clipped and unclipped steps."""
        return self.claim.prediction.step_s

    @property
    def certificate(self) -> Certificate:
        return self.claim.certificate

    def all_baselines(self) -> dict[str, dict[str, Any]]:
        """Step time of the schedules of other systems and of `resident`, or the reason why they do not fit. `resident` is omitted
        where device and host share one memory."""
        return self.baselines | ({} if self.resident is None else {"resident": self.resident.to_json()})


def forward_flop(block: Block) -> int:
    return sum(m.flop for m in block.matmuls) + (block.attention.flop if block.attention else 0)


def model_flop(plan: Plan) -> int:
    """Model FLOP of one step, the convention for MFU: forward plus twice that for backward, without recompute, with the causal half
    of attention. Frozen weights have no gradient."""
    counts = micro_batch_groups(plan.semantics, range(plan.semantics.n_micro_batches))
    first = plan.workload.first_trained

    def block_flop(block: Block, is_trained: bool) -> int:
        forward = forward_flop(block)
        return forward + is_trained * (2 * forward - sum(m.flop for m in block.matmuls if m.frozen))

    return sum(count * sum(block_flop(block, b >= first) for b, block in enumerate(plan.blocks_of(m))) for m, count in counts)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the policies of a search."""

    size_s: float  # over all policies with the plan's micro-batch and tiles
    others_s: float  # over all policies with other free sizes
    n_families: int  # number of families that `size_s` covers; 0: a single policy
    free: tuple[str, ...] = ()
    n_sizes: int = 1


def result_of(evaluator: Evaluator, plan: Plan, proven: Bounds, known: dict[str, dict[str, Any]]) -> SearchResult:
    """Build prediction and certificate of a simulated policy. `known`: results of other systems' schedules."""
    best, step_s, profile = plan.policy, evaluator.step_s(plan.policy), evaluator.profile
    prediction = simulate(plan, evaluator.cost.demands(plan), evaluator.region, tuning.MAX_STEPS)
    machine, plan_bound = machine_bound(plan, evaluator.cost), policy_bound(plan, evaluator.cost)
    # Steps without a period are the mean of the last ones, which may start at any phase.
    assert not prediction.periodic or prediction.step_s >= plan_bound.seconds * ROUNDING, f"{best} is below its bound, {plan_bound}"
    size_bound_s = max(min(step_s, proven.size_s), machine.seconds)
    policy_bound_s = min(size_bound_s, proven.others_s)
    binding = binding_of(plan, prediction, evaluator.cost) or plan_bound.binding
    spread, needs = interval(plan, profile), footprint(plan, profile)
    predicted = Predicted(
        step_s=step_s,
        p10_step_s=min(spread.p10_step_s, step_s),
        p90_step_s=max(spread.p90_step_s, step_s),
        tokens_per_s=plan.semantics.tokens_per_step / step_s,
        model_flop_per_s=model_flop(plan) / step_s,
        device_peak_bytes=needs.device_peak_bytes,
        host_peak_bytes=needs.host_peak_bytes,
        busy_s=prediction.busy_s(plan),
    )
    certificate = Certificate(
        policy_bound_s, machine.seconds, step_s / policy_bound_s - 1, binding, proven.n_families, len(evaluator.tried),
        evaluator.clipped_fraction, spread.n_draws, spread.seed, arithmetic(), proven.free, proven.n_sizes, size_bound_s,
    )  # fmt: skip
    outside, resident = tuple(sorted(evaluator.cost.outside)), resident_baseline(evaluator, "micro_batch" in proven.free)
    clipped_s = evaluator.clipped_step_s(best) if plan.policy.speculate_blocks else None
    claim, next_best = Claim(predicted, certificate), evaluator.next_best(best)
    return SearchResult(plan, prediction, claim, needs, known, outside, next_best, clipped_s, resident)


def binding_of(plan: Plan, prediction: Prediction, cost: CostModel) -> str | None:
    """Name of the bottleneck: a resource, or else a lane, that is busy for at least `BUSY_FRACTION` of the step. None if
    dependencies limit the step.

    Resources are checked before lanes: an exhausted resource slows every lane that uses it, so these lanes appear busy.
    """
    usage: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
    for i, demand in enumerate(cost.demands(plan)):
        for resource, per_s in demand.uses:
            usage[resource] += plan.often(i) * min(per_s, cost.capacity[resource]) * demand.alone_s
    resources = {FACET[r]: n / cost.capacity[r] / prediction.step_s for r, n in usage.items()}
    lanes = {LANE_NAME[lane]: busy_s / prediction.step_s for lane, busy_s in prediction.busy_s(plan).items()}
    for shares in (resources, lanes):
        name = max(shares, key=lambda name: shares[name])
        if shares[name] >= BUSY_FRACTION:
            return name
    return None
