"""Which plan should we run?

Branch and bound over a space small enough to list: policies that do not fit fall out by arithmetic, the others are visited by
rising lower bound and simulated exactly, until no bound left is below the best. What was not simulated keeps its bound, so
the certificate is a proof whether or not the budget sufficed.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from hwprofiles.schema import Profile
from runtime.plan import LANE_OF, Lane, Plan, Policy, Semantics
from runtime.region import Demand, Region, Resource
from runtime.workload import Model, Workload

from .bounds import FACET, LANE_NAME, Bound, machine_bound, policy_bound
from .cost import CostModel, region_of
from .lower import lower, refuse_illegal
from .memory import Footprint, footprint, frame, short_of
from .remedy import Request, does_not_fit
from .simulate import Prediction, simulate
from .space import BASELINES, baseline, policies

BUSY_FRACTION = 0.9  # a lane or resource in use for this share of the step is what binds it
CLOSE_FRACTION = 0.001  # a plan this near to every bound left is not searched further
MAX_SEARCHED_OPS = 16_000  # ops of all plans simulated by one search: about three seconds on one core
MAX_STEPS = 24
N_DRAWS, N_DRAWS_OF_LARGE = 8, 4  # pairs of draws, each and its mirror image
LARGE_OPS = 3_000  # of a plan
P10_P90_DEVIATIONS = 1.2816  # a normal quantity lies within so many standard deviations for 80 % of the time


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
    p10_step_s, p90_step_s = _spread(plan, trial, prediction)
    return Answer(
        plan, prediction, p10_step_s, p90_step_s, footprint(plan, profile), certificate, known, tuple(sorted(trial.cost.outside))
    )


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


def _spread(plan: Plan, trial: _Trial, prediction: Prediction) -> tuple[float, float]:
    """Step times that one in ten machines beats, and that one in ten misses, if the profile is off as its spreads say."""
    demands = trial.cost.demands(plan)
    steps_s = [
        simulate(plan, scaled, region, max_steps=6).step_s
        for factors in _draws(trial.profile, plan)
        for scaled, region in [_scaled(plan, demands, trial.region, factors)]
    ]
    tenths = quantiles(steps_s, n=10, method="inclusive")
    return min(tenths[0], prediction.step_s), max(tenths[-1], prediction.step_s)


@dataclass(frozen=True, slots=True)
class _Factors:
    """How much faster than the profile says each group of quantities is."""

    compute: float
    link: float
    dram: float
    optimizer: float


def _draws(profile: Profile, plan: Plan) -> Iterator[_Factors]:
    """Seeded draws, one common factor for each group of quantities that are measured together."""
    dtype, link = plan.semantics.compute_dtype, profile.link
    spreads = (
        median(p.flop_per_s.spread_fraction for p in profile.device.matmul[dtype]),
        median(p.rate.spread_fraction for curve in (link.h2d, link.d2h) for p in curve.bytes_per_s),
        profile.host.dram_bytes_per_s.spread_fraction,
        median(p.params_per_s.spread_fraction for p in profile.host.optimizer),
    )
    rng = random.Random(0)
    for _ in range(N_DRAWS if len(plan.ops) < LARGE_OPS else N_DRAWS_OF_LARGE):
        deviations = [rng.gauss(0, 1) / P10_P90_DEVIATIONS for _ in spreads]
        for sign in (1, -1):
            yield _Factors(*((1 + spread) ** (sign * z) for spread, z in zip(spreads, deviations, strict=True)))


def _scaled(plan: Plan, demands: list[Demand], region: Region, factors: _Factors) -> tuple[list[Demand], Region]:
    """The same work on a machine that is off by these factors."""
    by_resource = dict.fromkeys((Resource.H2D, Resource.D2H, Resource.DUPLEX), factors.link) | {Resource.DRAM: factors.dram}
    capacity = {r: c * by_resource.get(r, 1.0) for r, c in region.capacity}
    by_lane = {Lane.GPU: factors.compute, Lane.H2D: factors.link, Lane.D2H: factors.link, Lane.CPU: factors.optimizer}
    known: dict[tuple[Lane, int], Demand] = {}
    scaled = []
    for op, demand in zip(plan.ops, demands, strict=True):
        lane = LANE_OF[op.kind]
        if (lane, id(demand)) not in known:
            faster = by_lane[lane]
            # The same bytes in other time; cores are taken, not consumed.
            uses = tuple((r, min(per_s if r is Resource.CORES else per_s * faster, capacity[r])) for r, per_s in demand.uses)
            known[lane, id(demand)] = Demand(demand.overhead_s, demand.alone_s / faster, uses)
        scaled.append(known[lane, id(demand)])
    return scaled, Region(tuple(capacity.items()))
