"""The answer of a search: a plan, its prediction, and its certificate."""

from dataclasses import dataclass
from typing import Any

from penstock.planner.bounds.bounds import policy_bound
from penstock.planner.bounds.machine import machine_bound
from penstock.planner.bounds.reasons import FACET, LANE_NAME
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import Footprint, footprint
from penstock.planner.predict.resident import Resident, resident_in_parts
from penstock.planner.predict.simulate import Prediction, simulate
from penstock.planner.predict.uncertainty import interval
from penstock.runtime.plan import Plan, Policy
from penstock.runtime.plan.region import Resource
from penstock.runtime.plan.workload import Block

from .claim import Certificate, Claim, Predicted, arithmetic
from .trial import MAX_STEPS, Trial

ROUNDING = 1 - 1e-9  # of sums of floats
BUSY_FRACTION = 0.9  # a lane or resource in use for this share of the step is what binds it


@dataclass(frozen=True, slots=True)
class Answer:
    """The plan chosen, and all that is known of it."""

    plan: Plan
    prediction: Prediction  # of a step that is not clipped
    claim: Claim
    needs: Footprint
    baselines: dict[str, dict[str, Any]]
    outside: tuple[str, ...]  # what the profile never measured and the costs rest on
    next_best: tuple[Policy, float] | None  # the fastest of another family or with another use of memory, and its step
    clipped_step_s: float | None  # of a step whose speculative updates are done again; None: there are none
    resident: Resident | None  # what a step would take with all state on the device; None: device and host are one memory

    @property
    def step_s(self) -> float:
        """The mean over steps that are clipped and steps that are not."""
        return self.claim.prediction.step_s

    @property
    def certificate(self) -> Certificate:
        return self.claim.certificate

    def all_baselines(self) -> dict[str, dict[str, Any]]:
        """The schedules of other systems, and `resident` where that means something: what a step takes, or why it does not fit."""
        return self.baselines | ({} if self.resident is None else {"resident": self.resident.to_json()})


def model_flop(plan: Plan) -> int:
    """FLOP of one step as models are compared: forward and twice that backward, no recompute, causal half of attention; of frozen
    weights no gradient."""
    counts = plan.micro_batch_groups(range(plan.semantics.n_micro_batches))
    first = plan.workload.first_trained

    def of(block: Block, is_trained: bool) -> int:
        return block.forward_flop + is_trained * (2 * block.forward_flop - sum(m.flop for m in block.matmuls if m.frozen))

    return sum(count * sum(of(block, b >= first) for b, block in enumerate(plan.blocks_of(m))) for m, count in counts)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was proven of all policies that were not taken."""

    size_s: float  # no step is below, with the micro-batch and tiles of the plan
    others_s: float  # with any others that were free
    n_families: int  # that the first covers; 0: it is that of one policy
    free: tuple[str, ...] = ()
    n_sizes: int = 1


def answer_of(trial: Trial, plan: Plan, proven: Bounds, known: dict[str, dict[str, Any]]) -> Answer:
    """Prediction and certificate of a simulated policy. `known`: the steps of other systems' schedules."""
    best, step_s, profile = plan.policy, trial.step_s(plan.policy), trial.profile
    prediction = simulate(plan, trial.cost.demands(plan), trial.region, MAX_STEPS)
    machine, own = machine_bound(plan, trial.cost), policy_bound(plan, trial.cost)
    # Steps that find no rhythm are a mean of the last, which may be any moment's.
    assert not prediction.periodic or prediction.step_s >= own.seconds * ROUNDING, f"{best} is below its bound, {own}"
    size_bound_s = max(min(step_s, proven.size_s), machine.seconds)
    policy_bound_s = min(size_bound_s, proven.others_s)
    binding = binding_of(plan, prediction, trial.cost) or own.binding
    drawn, needs = interval(plan, profile), footprint(plan, profile)
    predicted = Predicted(
        step_s=step_s,
        p10_step_s=min(drawn.p10_step_s, step_s),
        p90_step_s=max(drawn.p90_step_s, step_s),
        tokens_per_s=plan.semantics.tokens_per_step / step_s,
        model_flop_per_s=model_flop(plan) / step_s,
        device_peak_bytes=needs.device_peak_bytes,
        host_peak_bytes=needs.host_peak_bytes,
        busy_s=prediction.busy_s(plan),
    )
    certificate = Certificate(
        policy_bound_s, machine.seconds, step_s / policy_bound_s - 1, binding, proven.n_families, len(trial.tried),
        trial.clipped_fraction, drawn.n_draws, drawn.seed, arithmetic(), proven.free, proven.n_sizes, size_bound_s,
    )  # fmt: skip
    return Answer(
        plan,
        prediction,
        Claim(predicted, certificate),
        needs,
        known,
        tuple(sorted(trial.cost.outside)),
        trial.next_best(best),
        trial.clipped_step_s(best) if plan.policy.speculate_blocks else None,
        resident_in_parts(plan, trial.cost),
    )


def binding_of(plan: Plan, prediction: Prediction, cost: CostModel) -> str | None:
    """What the step is full of: the resource, or else the lane, in use for most of it. None: no one of them binds, but their order.

    A shared resource comes before the lanes: one that is used up slows every lane that draws on it, and makes them look busy.
    """
    drawn: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
    for i, demand in enumerate(cost.demands(plan)):
        for resource, per_s in demand.uses:
            drawn[resource] += plan.often(i) * min(per_s, cost.capacity[resource]) * demand.alone_s
    resources = {FACET[r]: n / cost.capacity[r] / prediction.step_s for r, n in drawn.items()}
    lanes = {LANE_NAME[lane]: busy_s / prediction.step_s for lane, busy_s in prediction.busy_s(plan).items()}
    for shares in (resources, lanes):
        name = max(shares, key=lambda name: shares[name])
        if shares[name] >= BUSY_FRACTION:
            return name
    return None
