"""The facts of a plan, and of a run of it: numbers in base units, computed once for the text and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hwprofiles.schema import Profile
from planner.predict.cost import CostModel, region_of
from planner.predict.memory import Footprint, footprint
from planner.predict.resident import resident_in_parts
from planner.predict.rests_on import RestsOn, rests_on
from planner.predict.simulate import Prediction, simulate
from planner.search.answer import Answer, model_flop
from planner.search.claim import Claim, claimed
from runtime.plan import Plan, PlanFile, Policy
from runtime.plan.timeline import Timeline

from .price import Hourly, Job, hourly, job
from .run_log import LoggedRun
from .waterfall import Gain, Waterfall, gains, waterfall

MOST_ANALYSED_OPS = 60_000  # of a plan: beyond that the ten further simulations would take most of a minute
SAME_FRACTION = 1e-3  # a claimed step that differs by less from the simulated one is that step


@dataclass(frozen=True, slots=True)
class Measured:
    """A step by the clock, after the warm-up where there were steps enough."""

    step_s: float  # the median
    p10_step_s: float
    p90_step_s: float
    n_steps: int  # after the warm-up; 0: the only step
    settled: Timeline  # of the last steps; without spans where a run left no timeline

    @property
    def traced_step_s(self) -> float:
        """The step of `settled`, of which its lanes are busy for a share."""
        return median([t for t in self.settled.step_times_s if t > 0] or [self.step_s])


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan on the machine of its profile."""

    plan: Plan
    profile: Profile
    prediction: Prediction  # of a step whose gradient is not clipped
    step_s: float  # predicted: the mean over steps that are clipped and steps that are not
    claim: Claim | None  # the plan file's interval and bounds; None: it has none, or those of another step
    unconfirmed_step_s: float | None  # a claimed step that the simulation does not confirm
    needs: Footprint
    resident_s: float | None  # of a step with all state on the device; None: it does not fit, or device and host are one memory
    rests_on: tuple[RestsOn, RestsOn | None]  # the device's seconds, and those of the other lanes
    outside: tuple[str, ...]  # what costs rest on outside of the measured grid
    waterfall: Waterfall | None  # None: the plan has too many ops
    gains: tuple[Gain, ...]
    hourly: Hourly
    job: Job | None = None
    run: LoggedRun | None = None
    measured: Measured | None = None
    # Known to the search alone
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    next_best: tuple[Policy, float] | None = None
    clipped_step_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.plan.semantics.tokens_per_step / self.step_s

    @property
    def model_flop_per_s(self) -> float:
        return model_flop(self.plan) / self.step_s


def facts(
    file: PlanFile, where: str, run: LoggedRun | None = None, answer: Answer | None = None, n_tokens: int | None = None
) -> Facts:
    """The facts of a plan file; of a run of it, and of the search that found it, where they are at hand. `n_tokens`: of a job.

    PlanError for a plan, or a claim, that cannot be right.
    """
    plan, profile = file.plan, Profile.from_json(file.plan.profile, where)
    cost = CostModel(profile)
    prediction = answer.prediction if answer is not None else simulate(plan, cost.demands(plan), region_of(profile))
    claim, unconfirmed_step_s = None if file.claim is None else claimed(file.claim, where), None
    if claim is not None and not _is_step(claim.prediction.step_s, prediction.step_s, bool(plan.policy.speculate_blocks)):
        unconfirmed_step_s, claim = claim.prediction.step_s, None
    step_s = prediction.step_s if claim is None else claim.prediction.step_s
    kept, hour = resident_in_parts(plan, cost), hourly(profile)
    is_analysed = len(plan.ops) <= MOST_ANALYSED_OPS
    return Facts(
        plan,
        profile,
        prediction,
        step_s,
        claim,
        unconfirmed_step_s,
        footprint(plan, profile),
        None if kept is None else kept.step_s,
        rests_on(plan, profile),
        tuple(sorted(cost.outside)) if answer is None else answer.outside,
        waterfall(plan, profile) if is_analysed else None,
        gains(plan, profile) if is_analysed else (),
        hour,
        None if n_tokens is None else job(n_tokens, plan.semantics.tokens_per_step / step_s, hour),
        run,
        None if run is None else measured(run.timeline, run.step_times_s(plan.semantics.tokens_per_step)),
        *(() if answer is None else (answer.all_baselines(), answer.next_best, answer.clipped_step_s)),
    )


def _is_step(claimed_s: float, simulated_s: float, may_be_clipped: bool) -> bool:
    """Whether a claimed step is the simulated one; the mean over clipped steps is longer than one that is not clipped."""
    off = claimed_s / simulated_s - 1 if simulated_s > 0 else 0.0
    return off >= -SAME_FRACTION and (off <= SAME_FRACTION or may_be_clipped)


def measured(timeline: Timeline | None, times_s: Sequence[float]) -> Measured | None:
    """The settled step of a run with these step times; without any, the only step of its timeline. None: no step at all."""
    whole = timeline or Timeline(())
    first = min((span.step for span in whole.spans), default=0)
    later = whole.from_step(first + 1)
    settled = later if times_s and later.spans else whole
    ordered = sorted(times_s) or [settled.total_s]
    if not ordered[0] > 0:
        return None
    return Measured(median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(times_s), settled)
