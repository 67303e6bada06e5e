"""Facts about a plan and a run of it: numbers in base units, computed once for the text report and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from statistics import median

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.forward_pass import ForwardPass, forward_pass
from penstock.planner.predict.memory import footprint
from penstock.planner.predict.provenance import Provenance, provenance_of
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.claim import claimed
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.greedy import resident_baseline
from penstock.planner.search.remedy import tokens_per_s_in_fp8
from penstock.planner.search.result import SearchResult, model_flop
from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.timeline import Timeline

from .price import hourly
from .run_log import LoggedRun
from .waterfall import Gain, Waterfall, gains, waterfall

MOST_ANALYSED_OPS = 60_000  # of a plan; with more, ten further simulations take most of a minute
SAME_FRACTION = 1e-3  # tolerance between a claimed and a simulated step


@dataclass(frozen=True, slots=True)
class Measured:
    """Step time of a run, without warm-up steps if it had enough steps."""

    step_s: float  # median
    p10_step_s: float
    p90_step_s: float
    n_steps: int  # without warm-up; 0: a single step
    steady: Timeline  # steady-state steps; without spans if the run has no timeline

    @property
    def traced_step_s(self) -> float:
        """Median step of the `steady` timeline, the denominator for its busy times."""
        return median([t for t in self.steady.step_times_s if t > 0] or [self.step_s])


class Facts:
    """Facts about a plan file on the machine of its profile and, if given, about a run and about the search that found it.

    PlanError for an invalid plan or claim. Facts that need simulations are computed on first access.
    """

    def __init__(
        self,
        file: PlanFile,
        where: str,
        run: LoggedRun | None = None,
        answer: SearchResult | None = None,
        n_tokens: int | None = None,
        today: date | None = None,
    ) -> None:
        plan = file.plan
        self.plan, self.run, self.answer, self.n_tokens = plan, run, answer, n_tokens  # `n_tokens`: of a training job
        self.today = today  # to judge the age of prices; None: they are not judged
        self.profile = Profile.from_json(plan.profile, where)
        self.cost = CostModel(self.profile)
        self.prediction = answer.prediction if answer else simulate(plan, self.cost.demands(plan), region_of(self.profile))
        self.outside = answer.outside if answer else tuple(sorted(self.cost.outside))  # inputs outside the measured range
        self.claim = None if file.claim is None else claimed(file.claim, where)  # None if absent or unconfirmed
        self.unconfirmed_step_s: float | None = None  # a claimed step that differs from the simulation
        if self.claim is not None:
            # The claim is the mean over clipped steps, which may take longer than the simulated step.
            off = self.claim.prediction.step_s / self.prediction.step_s - 1 if self.prediction.step_s > 0 else 0.0
            if off < -SAME_FRACTION or (off > SAME_FRACTION and not plan.policy.speculate_blocks):
                self.unconfirmed_step_s, self.claim = self.claim.prediction.step_s, None
        # Predicted: mean over clipped and unclipped steps
        self.step_s = self.prediction.step_s if self.claim is None else self.claim.prediction.step_s
        self.tokens_per_s = plan.semantics.tokens_per_step / self.step_s
        self.model_flop_per_s = model_flop(plan) / self.step_s
        self.needs, self.hourly = footprint(plan, self.profile), hourly(self.profile)
        self.measured = None if run is None else measured(run.timeline, run.step_times_s(plan.semantics.tokens_per_step))
        self.is_comparable = run is None or run.log.is_comparable
        self.ran_on = None if run is None else run.log.device or (None if self.is_comparable else "another kind of machine")

    @cached_property
    def forward(self) -> ForwardPass | None:
        """Forward pass for a reference or teacher; None if the loss needs neither."""
        is_asked = self.plan.semantics.ranks == 1 and self.plan.semantics.objective.has_file
        return forward_pass(self.plan, self.cost, region_of(self.profile)) if is_asked else None

    @property
    def is_analysed(self) -> bool:
        return len(self.plan.ops) <= MOST_ANALYSED_OPS

    @cached_property
    def waterfall(self) -> Waterfall | None:
        """Parts of the step by cause; None if the plan has too many ops."""
        return waterfall(self.plan, self.profile) if self.is_analysed else None

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        return gains(self.plan, self.profile) if self.is_analysed else ()

    @cached_property
    def rests_on(self) -> tuple[Provenance, Provenance | None]:
        """Provenance of the device's seconds, and of the seconds of other lanes."""
        return provenance_of(self.plan, self.profile)

    @cached_property
    def tokens_per_s_in_fp8(self) -> float | None:
        """Estimated speed with FP8 products; None without a search, or if the plan cannot have them."""
        return None if self.answer is None else tokens_per_s_in_fp8(self.answer, self.profile)

    @cached_property
    def resident_s(self) -> float | None:
        """Step of a resident trainer; None if it does not fit, or if device and host share one memory."""
        plan = self.plan
        if self.answer is not None:
            resident = self.answer.resident
        else:
            evaluator = Evaluator(plan.model, plan.workload, plan.semantics, self.profile)
            resident = resident_baseline(evaluator, may_split=True)
        return None if resident is None else resident.step_s


def measured(timeline: Timeline | None, times_s: Sequence[float]) -> Measured | None:
    """Steady-state step of a run; if `times_s` is empty, the only step of its timeline. None without any step."""
    full = timeline or Timeline(())
    first = min((span.step for span in full.spans), default=0)
    later = full.from_step(first + 1)
    steady = later if times_s and later.spans else full
    ordered = sorted(times_s) or [steady.total_s]
    if not ordered[0] > 0:
        return None
    return Measured(median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(times_s), steady)
