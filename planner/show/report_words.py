"""What would one say of a plan, or of a run, to somebody who must decide?"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from hwprofiles.schema import Profile
from planner.predict.cost import CostModel
from planner.predict.memory import Footprint
from planner.predict.resident import advice, resident
from planner.predict.rests_on import lines as rests_on_lines
from planner.predict.simulate import Prediction
from planner.search.search import model_flop
from runtime.errors import PlanError
from runtime.plan import Lane, Plan
from runtime.units import on_one_line, show_bytes, show_count, show_rate, show_seconds

from .explain import CONVENTION, clauses, counted, micro_batches_in_words, trained_in_words
from .price import hourly, in_words, show_days
from .report_run import LoggedRun, number

# What a page's terms mean, for who meets them first
WORDS = {
    "h2d, d2h": "copies from host memory to the device, and back (on a CPU, between two parts of its memory)",
    "boundaries, layer inputs": "what each layer was given, saved for backward: activation checkpoints",
    "recomputed": "a layer's forward done again in backward (gradient checkpointing)",
    "activations out and back": "activation offload to host memory, and its prefetch",
    "sums": "gradients accumulated over micro-batches",
    "squares and norms": "the global gradient norm, by which gradients are clipped",
    "state, masters, moments": "fp32 weights and the optimizer states of AdamW",
    "low bars": "ops of the step before or after, which overlap this one",
    "P10 to P90": "between which eight of ten machines lie that are off from the profile by as much as it says they may be",
    "a measured step": "the median of the steps after warm-up; the one that is drawn is a single step, near it",
}
SAME_FRACTION = 1e-3  # a claimed step that differs by less from the simulated one is that step
FAR = 3.0  # times the prediction: from here on not told in percent


@dataclass(frozen=True, slots=True)
class Claim:
    """What the planner said of its plan when it wrote the file."""

    step_s: float
    p10_step_s: float
    p90_step_s: float
    policy_bound_s: float
    machine_bound_s: float
    was_searched: bool  # the bound is that of every policy, not of this one alone
    binding: str


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known of a plan, and of a run of it."""

    plan: Plan
    profile: Profile
    prediction: Prediction
    needs: Footprint
    claim: Claim | None  # None: the file makes none
    outside: tuple[str, ...]  # what the profile never measured and the costs rest on
    run: LoggedRun | None
    measured_s: list[float]  # the settled steps of the run, ascending

    @property
    def step_s(self) -> float:
        """The predicted step: as simulated, but for plans whose steps differ by whether a gradient is clipped."""
        return self.claim.step_s if self.claim is not None and self.holds else self.prediction.step_s

    @property
    def holds(self) -> bool:
        """Whether simulating the plan gives what the file claims. A clipped step takes longer than the one that is simulated."""
        if self.claim is None:
            return False
        off = self.claim.step_s / self.prediction.step_s - 1 if self.prediction.step_s > 0 else 0.0
        return off >= -SAME_FRACTION and (off <= SAME_FRACTION or bool(self.plan.policy.speculate_blocks))


def claim_of(fields: dict[str, Any] | None, where: str) -> Claim | None:
    """The claim in a plan file; PlanError where it is not what `penstock plan` writes."""
    if fields is None:
        return None

    def found(part: str, name: str) -> float:
        inner = fields.get(part)
        value = number(inner.get(name)) if isinstance(inner, dict) else None
        if value is None or not 0 < value < 1e15:
            raise PlanError(f"{where}: claim.{part}.{name} is no number above zero; make it again with `penstock plan`")
        return value

    certificate = fields.get("certificate")
    proof = certificate if isinstance(certificate, dict) else {}
    return Claim(
        step_s=found("prediction", "step_s"),
        p10_step_s=found("prediction", "p10_step_s"),
        p90_step_s=found("prediction", "p90_step_s"),
        policy_bound_s=found("certificate", "policy_bound_s"),
        machine_bound_s=found("certificate", "machine_bound_s"),
        was_searched=proof.get("n_families") not in (0, None),
        binding=on_one_line(str(proof.get("binding", "")), 60),
    )


def heading(known: Known) -> str:
    """`qwen2.5-32b (32.76 G parameters) on rtx4090-desktop (NVIDIA GeForce RTX 4090)`."""
    model, profile, n_params = known.plan.model, known.profile, show_count(known.plan.workload.n_params)
    return (
        f"{model.name or model.path or 'a model without a name'} ({n_params} parameters) on {profile.name} ({profile.device.name})"
    )


def words(known: Known) -> Iterator[tuple[str, str]]:
    """The terms of a page and what they mean; without those of what is not on it."""
    missing = {"P10 to P90": known.claim is None, "a measured step": known.run is None}
    yield from ((term, meaning) for term, meaning in WORDS.items() if not missing.get(term))


def facts(known: Known) -> Iterator[tuple[str, str]]:
    """What is trained, how, and on what."""
    plan, semantics = known.plan, known.plan.semantics
    experts = (
        f", {semantics.experts} experts" if "num_experts" in plan.model.config or "num_local_experts" in plan.model.config else ""
    )
    yield "model", f"{show_count(plan.workload.n_params)} parameters, {counted(plan.workload.n_layers, 'layer')}"
    if not plan.workload.trains_all:
        yield "trained", trained_in_words(plan)
    yield "machine", known.profile.summary
    sequences = f"{counted(semantics.whole.batch_size, 'sequence')} of {semantics.seq_len:,} tokens"
    yield "step", f"{sequences}, in {micro_batches_in_words(semantics)}"
    clip = "no clipping" if semantics.clip_norm is None else f"gradients clipped at {semantics.clip_norm:g}"
    yield "precision", f"{semantics.compute_dtype} compute, {semantics.master_dtype} master weights, {clip}{experts}"
    yield "policy", "; ".join(clauses(plan.policy, plan).values())


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the numbers at the head of the page."""

    title: str
    value: str
    measured: str | None
    notes: tuple[str, ...]


def figures(known: Known) -> Iterator[Figure]:
    """Step, speed, and the two memories."""
    plan, needs, n_tokens = known.plan, known.needs, known.plan.semantics.tokens_per_step
    times_s, claim = known.measured_s, known.claim
    spread = f"P10 to P90: {exact(claim.p10_step_s)} to {exact(claim.p90_step_s)}" if claim is not None and known.holds else ""
    step = f"measured {exact(median(times_s))} ({_off(median(times_s) / known.step_s)})" if times_s else None
    yield Figure("predicted step", exact(known.step_s), step, tuple(filter(None, (spread,))))
    speed = f"measured {n_tokens / median(times_s):,.0f}" if times_s else None
    notes = [f"a billion tokens take {show_days(1e9 / n_tokens * known.step_s)}"]
    notes += in_words(hourly(known.profile), n_tokens / known.step_s)
    notes.append(f"{show_rate(model_flop(plan) / known.step_s, 'FLOP')} of model work")
    yield Figure("predicted tokens per second", f"{n_tokens / known.step_s:,.0f}", speed, tuple(notes))
    for title, peak_bytes, has_bytes in (
        ("device memory", needs.device_peak_bytes, needs.device_memory_bytes),
        ("host memory", needs.host_peak_bytes, needs.host_memory_bytes),
    ):
        over = peak_bytes - has_bytes
        free = 1 - peak_bytes / has_bytes if has_bytes else 0.0
        left = f"{show_bytes(over)} too little" if over > 0 else f"{free:.0%} free" if free >= 0.01 else "nearly all of it"
        yield Figure(title, show_bytes(peak_bytes), None, (f"of {show_bytes(has_bytes)}: {left}",))


def verdict(known: Known) -> Iterator[str]:
    """The prediction, the interval, the certificate, whether to stream, and the measurement, each in a sentence or two."""
    claim, plan = known.claim, known.plan
    predicted = f"A step is predicted to take {exact(known.step_s)}."
    if claim is not None and known.holds:
        predicted += (
            f" Of machines that are off from the profile by as much as it says they may be, one in ten is faster than "
            f"{exact(claim.p10_step_s)} and one in ten slower than {exact(claim.p90_step_s)}."
        )
        yield predicted
        yield certified(claim)
    else:
        yield predicted
    if claim is not None and not known.holds:
        yield (
            f"The plan file claims a step of {exact(claim.step_s)}, but simulating it gives {exact(known.prediction.step_s)}. "
            "The file was changed, or written by another version; its claims are left out here."
        )
    kept = resident(plan, CostModel(known.profile))
    if (advised := advice(None if kept is None else kept.step_s, known.step_s)) is not None:
        yield f"{advised[:1].upper()}{advised[1:]}."
    if not known.prediction.periodic:
        yield "The steps settle into no steady rhythm: the prediction is the mean of the last ones that were simulated."
    times_s = known.measured_s
    if times_s:
        yield measured(known, times_s)


def certified(claim: Claim) -> str:
    """How near to the best the plan is known to be."""
    gap_fraction = max(claim.step_s / claim.policy_bound_s - 1, 0.0)
    within = "this plan is the best there is" if gap_fraction < 5e-4 else f"this plan is within {gap_fraction:.1%} of the best"
    if claim.was_searched:
        first = f"No policy in the space takes less than {exact(claim.policy_bound_s)} a step: {within}."
    else:
        first = f"This policy was asked for, not searched for; with it no step takes less than {exact(claim.policy_bound_s)}."
    binds = f" What binds is {claim.binding}." if claim.binding else ""
    host = f"No schedule with this micro-batch takes less than {exact(claim.machine_bound_s)}."
    return f"{first} {host}{binds}"


def measured(known: Known, times_s: list[float]) -> str:
    """What the clock says of the prediction."""
    middle_s, claim = median(times_s), known.claim
    low_s, high_s = times_s[len(times_s) // 10], times_s[-1 - len(times_s) // 10]
    spread = f" (P10 to P90: {exact(low_s)} to {exact(high_s)})" if len(times_s) > 2 else ""
    against = _compared(middle_s / known.step_s)
    if claim is not None and known.holds:
        inside = claim.p10_step_s <= middle_s <= claim.p90_step_s
        against += ", within the interval" if inside else ", outside the interval"
    what = f"the median of {counted(len(times_s), 'step')} after warm-up" if len(times_s) > 1 else "one step"
    return f"Measured: {exact(middle_s)}, {what}{spread}, {against}."


def sureness(known: Known) -> Iterator[str]:
    """What the prediction rests on, and what is missing in the run's files."""
    yield from (f"{line}." for line in rests_on_lines(known.plan, known.profile))
    if known.outside:
        yield f"Outside what was measured, taken at the nearest point: {'; '.join(known.outside)}."
    yield f"Model work counts {CONVENTION}."
    if known.plan.policy.speculate_blocks:
        yield "The step that is drawn is one whose gradient is not clipped; the predicted one is the mean over both kinds."
    if known.run is not None:
        yield from _of_run(known, known.run)


def _of_run(known: Known, run: LoggedRun) -> Iterator[str]:
    log, n_tokens = run.log, known.plan.semantics.tokens_per_step
    if run.timeline is None:
        yield "The run's folder holds no timeline.json, which is written when a run ends: no measured step is drawn."
    if log.steps and not log.is_of(n_tokens):
        yield (
            f"The log counts fewer tokens a step than the plan's {n_tokens:,}, as that of a stand-in in an emulated run does. "
            "Its loss says nothing of the plan's model, and its speed is left out."
        )
    if not log.is_whole:
        yield (
            f"metrics.jsonl is very long: only its end is drawn, from step {log.steps[0]:,} on."
            if log.steps
            else "No step was read."
        )
    if log.n_damaged:
        yield f"Left out, since it could not be read: {counted(log.n_damaged, 'line')} of metrics.jsonl."
    if log.n_not_finite:
        yield f"In {counted(log.n_not_finite, 'step')} the loss was not finite: a gap in its curve."


def lane_rows(known: Known) -> list[tuple[str, ...]]:
    """Lane, what it does, busy time and share of the step: predicted and, where there is a timeline, measured."""
    plan, busy_s = known.plan, known.prediction.busy_s(known.plan)
    timeline = None if known.run is None else known.run.timeline
    step_s = known.prediction.step_s
    measured_s: dict[Lane, float] | None = None
    measured_step_s = 0.0
    if timeline is not None and timeline.spans:
        first = min(s.step for s in timeline.spans)
        settled = timeline.from_step(first + 1)
        measured_s = (settled if settled.spans else timeline).busy_s(plan)
        times_s = timeline.step_times_s
        measured_step_s = median(times_s) if times_s else timeline.total_s
    rows = []
    for lane in plan.lanes:
        row = [show_seconds(busy_s[lane]), f"{busy_s[lane] / step_s:.0%}"]
        if measured_s is not None:
            share = f"{measured_s[lane] / measured_step_s:.0%}" if measured_step_s > 0 else ""
            row += [show_seconds(measured_s[lane]), share]
        rows.append((str(lane), *row))
    return rows


def exact(s: float) -> str:
    """`31.99 s`, `412.7 ms`: four digits, so that a bound and a step that are near each other differ."""
    if s >= 1000:
        return f"{s:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if s * scale >= 1:
            return f"{s * scale:.4g} {unit}"
    return f"{s * 1e6:.4g} µs"


def _off(ratio: float) -> str:
    """`+8.4%`, or `14.9 times` where a percentage says little."""
    return f"{ratio:.3g} times" if ratio >= FAR else f"{ratio - 1:+.1%}"


def _compared(ratio: float) -> str:
    """How far a measured step is from the predicted one."""
    if ratio >= FAR:
        return f"{ratio:.3g} times what was predicted"
    off = ratio - 1
    return "as predicted" if abs(off) < 5e-4 else f"{abs(off):.1%} {'more' if off > 0 else 'less'} than predicted"
