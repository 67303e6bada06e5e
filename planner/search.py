"""Which plan should we run?

Branch and bound over a space small enough to list: policies that do not fit fall out by arithmetic, the others are visited by
rising lower bound and simulated exactly, until no bound left is below the best. What was not simulated keeps its bound, so
the certificate is a proof whether or not the budget sufficed.
"""

from dataclasses import asdict, dataclass
from typing import Any

from hwprofiles.schema import Profile
from runtime.plan import Plan, Policy, Semantics
from runtime.region import Resource
from runtime.workload import Model, Workload

from .bounds import FACET, LANE_NAME, Bound, machine_bound, policy_bound
from .cost import CostModel, region_of
from .lower import lower, refuse_illegal
from .memory import Footprint, footprint, frame, short_of
from .remedy import Request, does_not_fit
from .simulate import Prediction, simulate
from .space import BASELINES, baseline, policies
from .uncertainty import interval

BUSY_FRACTION = 0.9  # a lane or resource in use for this share of the step is what binds it
CLOSE_FRACTION = 0.001  # a plan this near to every bound left is not searched further
MAX_SEARCHED_OPS = 16_000  # ops of all plans simulated by one search: about three seconds on one core
MAX_STEPS = 24


@dataclass(frozen=True, slots=True)
class Certificate:
    """How far from optimal the plan can be: no policy of the space below one bound, no schedule below the other."""

    policy_bound_s: float
    machine_bound_s: float
    gap_fraction: float
    binding: str
    n_policies: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The plan chosen, and all that is known of it."""

    plan: Plan
    prediction: Prediction
    p10_step_s: float
    p90_step_s: float
    needs: Footprint
    certificate: Certificate
    baselines: dict[str, dict[str, Any]]
    outside: tuple[str, ...]  # what the profile never measured and the costs rest on

    def claim(self) -> dict[str, Any]:
        """What a plan file says of its plan."""
        return {"prediction": self.prediction_json(), "certificate": asdict(self.certificate)}

    def prediction_json(self) -> dict[str, Any]:
        step_s, semantics = self.prediction.step_s, self.plan.semantics
        return {
            "step_s": step_s,
            "p10_step_s": self.p10_step_s,
            "p90_step_s": self.p90_step_s,
            "tokens_per_s": semantics.tokens_per_step / step_s,
            "model_flop_per_s": model_flop(self.plan) / step_s,
            "device_peak_bytes": self.needs.device_peak_bytes,
            "host_peak_bytes": self.needs.host_peak_bytes,
            "busy_s": {str(lane): seconds for lane, seconds in self.prediction.busy_s(self.plan).items()},
        }


def model_flop(plan: Plan) -> int:
    """FLOP of one step as models are compared: forward and twice that backward, no recompute, causal half of attention."""
    return 3 * plan.semantics.n_micro_batches * sum(b.forward_flop for b in plan.workload.blocks)


def search(
    model: Model,
    workload: Workload,
    semantics: Semantics,
    profile: Profile,
    fixed: Policy | None = None,
    free_micro_batch: bool = False,
) -> Answer:
    """The fastest plan found, with its certificate; with a `fixed` policy, that one.

    DoesNotFitError when no policy fits; `free_micro_batch` says that the micro-batch was chosen, not given, so that a change
    of something else may choose it again. PlanError for semantics or a policy that no plan can have.
    """
    refuse_illegal(workload, semantics, fixed or Policy())
    trial = _Trial(model, workload, semantics, profile)
    if fixed is None:
        space = list(policies(model, workload, semantics, profile))
    else:
        plan = frame(model, workload, semantics, fixed)
        space = [(plan, footprint(plan, profile))]
    fitting = [plan for plan, needs in space if needs.fits]
    if not fitting:
        raise does_not_fit(Request(model, semantics, profile, fixed, free_micro_batch), [needs for _, needs in space])
    bounds = {plan.policy: policy_bound(plan, trial.cost) for plan in fitting}

    known = trial.baselines()
    if fixed is None:
        # The static candidates come first, so the answer is never worse than any of them.
        for policy in (baseline(name, semantics) for name, said in known.items() if "step_s" in said):
            if policy not in bounds:
                bounds[policy] = policy_bound(frame(model, workload, semantics, policy), trial.cost)
    best = _branch_and_bound(trial, bounds)
    plan, prediction = trial.tried[best]

    not_tried = [bound.seconds for policy, bound in bounds.items() if policy not in trial.tried]
    machine = machine_bound(plan, trial.cost)
    policy_bound_s = max(min([prediction.step_s, *not_tried]), machine.seconds)
    binding = binding_of(plan, prediction, trial.cost) or bounds[best].binding
    certificate = Certificate(policy_bound_s, machine.seconds, prediction.step_s / policy_bound_s - 1, binding, len(bounds))
    drawn = interval(plan, profile)
    p10_step_s, p90_step_s = min(drawn.p10_step_s, prediction.step_s), max(drawn.p90_step_s, prediction.step_s)
    needs, outside = footprint(plan, profile), tuple(sorted(trial.cost.outside))
    return Answer(plan, prediction, p10_step_s, p90_step_s, needs, certificate, known, outside)


def binding_of(plan: Plan, prediction: Prediction, cost: CostModel) -> str | None:
    """What the step is full of: the resource, or else the lane, in use for most of it. None: no one of them binds, but their order.

    A shared resource comes before the lanes: one that is used up slows every lane that draws on it, and makes them look busy.
    """
    drawn: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
    for demand in cost.demands(plan):
        for resource, per_s in demand.uses:
            drawn[resource] += per_s * demand.alone_s
    resources = {FACET[r]: n / cost.capacity[r] / prediction.step_s for r, n in drawn.items()}
    lanes = {LANE_NAME[lane]: busy_s / prediction.step_s for lane, busy_s in prediction.busy_s(plan).items()}
    for shares in (resources, lanes):
        name = max(shares, key=lambda name: shares[name])
        if shares[name] >= BUSY_FRACTION:
            return name
    return None


class _Trial:
    """Lowers and simulates policies of one workload, each once."""

    def __init__(self, model: Model, workload: Workload, semantics: Semantics, profile: Profile) -> None:
        self.model, self.workload, self.semantics, self.profile = model, workload, semantics, profile
        self.profile_json = profile.to_json()
        self.cost, self.region = CostModel(profile), region_of(profile)
        self.tried: dict[Policy, tuple[Plan, Prediction]] = {}
        self.n_ops = 0

    def step_s(self, policy: Policy) -> float:
        if policy not in self.tried:
            plan = lower(self.model, self.workload, self.semantics, policy, self.profile_json)
            self.n_ops += len(plan.ops)
            self.tried[policy] = (plan, simulate(plan, self.cost.demands(plan), self.region, MAX_STEPS))
        return self.tried[policy][1].step_s

    def baselines(self) -> dict[str, dict[str, Any]]:
        """What each static candidate would take, or why it cannot run here."""
        result: dict[str, dict[str, Any]] = {}
        for name in BASELINES:
            policy = baseline(name, self.semantics)
            needs = footprint(frame(self.model, self.workload, self.semantics, policy), self.profile)
            result[name] = {"step_s": self.step_s(policy)} if needs.fits else {"does_not_fit": short_of(needs)}
        return result


def _branch_and_bound(trial: _Trial, bounds: dict[Policy, Bound]) -> Policy:
    """The policy with the shortest simulated step. Equal bounds are visited in the order of the space: deep buffers first."""
    position = {policy: i for i, policy in enumerate(bounds)}
    tried = [policy for policy in bounds if policy in trial.tried]
    best = min(tried, key=lambda policy: (trial.step_s(policy), position[policy]), default=None)
    trial.n_ops = 0  # the baselines are not counted
    for policy in sorted(bounds, key=lambda policy: (bounds[policy].seconds, position[policy])):
        if best is not None:
            close = trial.step_s(best) <= bounds[policy].seconds * (1 + CLOSE_FRACTION)
            if close or trial.n_ops >= MAX_SEARCHED_OPS:
                break
        step_s = trial.step_s(policy)
        if best is None or step_s < trial.step_s(best):
            best = policy
    assert best is not None, "the space holds at least one policy"
    return best
