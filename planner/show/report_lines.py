"""Named lines and tables about a plan, for the text report and the page."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import NamedTuple

from penstock.hwprofiles.quantity import BASES
from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.model.workload import attention_kernels
from penstock.planner.predict.compute_time import BACKWARD_POINTWISE
from penstock.planner.predict.provenance import Provenance
from penstock.planner.predict.uncertainty import UNPROBED_P90
from penstock.planner.search.claim import CUT, Claim, Predicted
from penstock.planner.search.remedy import IN_FP8_WORDS
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Lane
from penstock.runtime.plan.workload import Saved
from penstock.runtime.units import show_bytes, show_count, show_rate, show_seconds

from .facts import Facts, Measured
from .memory import SMALL_FRACTION, Occupancy
from .price import job_in_words, moved_bytes, prices_in_words
from .schedule import batch_in_words, clauses, counted, kernels_in_words, scaled_in_words, trained_in_words

Line = tuple[str, str]  # name, text
LANE_TITLE = {Lane.GPU: "computing", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "host optimizer"}
LANE_TITLE |= {Lane.NET: "exchange", Lane.DISK: "reads from the disk"}
GLOSS = {  # parts of memory
    "state": "master weights and optimizer states; frozen weights",
    "frozen": "frozen weights, read from the disk",
    "packed": "quantized weights before unpacking",
    "device state": "optimizer states kept on the device",
    "kept activations": "saved for backward",
    "saved": "on its way to the host, or back",
    "activations": "layer inputs",
    "spilled": "layer inputs, offloaded",
    "offloaded": "activations, offloaded",
    "sums": "accumulated gradients",
    "squares": "squared gradients, for the norm",
    "received": "other ranks' sums, to be added",
    "host gradients": "gradients until their update",
    "staging": "gradients being accumulated",
    "resident weights": "weights kept on the device",
    "runtime": "Python, torch and its libraries",
    "compiler": "numba, and the updates that it compiles",
    "context": "the driver's",
}
PARTS = {
    "ideal_compute_s": "ideal compute",
    "recompute_s": "recompute",
    "link_s": "link",
    "host_dram_s": "host DRAM",
    "optimizer_s": "optimizer",
    "fill_drain_and_launch_s": "fill, drain and launch",
}
ENOUGH_FRACTION = 0.75  # share of the device's seconds from its own measurements; below it the report recommends a probe
LEAST_FASTER = 1.05  # times the speed, to advise other semantics
N_GAINS, LEAST_GAIN_FRACTION = 2, 1e-3  # number of bottlenecks shown, minimum gain
MOST_LETTERS = 200  # maximum length of the schedule in the short report: two lines
FAR = 3.0  # times the prediction; from here on not shown in percent
ALONE = "the link between GPUs is not in the profile: exchange through host memory is assumed"
OF_HOST = ("link", "DRAM", "optimizer", "updat", "upload", "download", "host")  # in the names of bottlenecks
CONVENTION = "forward, twice that for backward, causal half of attention, no recompute"


class Bar(NamedTuple):
    """Bar next to a row of a table on the page. `low_s` and `high_s`: ends of a range marker."""

    kind: str
    start_s: float
    end_s: float
    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `bars`, one per row, are only drawn on the page."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...] = ()

    @property
    def longest_s(self) -> float:
        """Scale of the bars."""
        return max((max(bar.end_s, bar.high_s or 0.0) for bar in self.bars), default=0.0) or 1.0


def verdict_lines(f: Facts) -> Iterator[Line]:
    """Short verdict: step, certificate, memory, bottleneck and price."""
    claim = f.claim
    spread = "" if claim is None else f" ({p10_to_p90(claim.prediction)})"
    yield "step", f"{exact(f.step_s)}{spread}, {f.tokens_per_s:,.0f} tokens/s"
    if f.measured is not None:
        yield "measured", _measured(f, f.measured)
    if claim is not None:
        yield "optimal?", _certified(claim)[0]
    held = [f"{place} {show_bytes(sum(parts.values()))} of {show_bytes(has)}" for place, parts, has in _memories(f)]
    yield "memory", f"{'it fits' if f.needs.fits else 'it does not fit'}: {', '.join(held)}"
    shown = [gain for gain in f.gains[:N_GAINS] if gain.saved_fraction >= LEAST_GAIN_FRACTION]
    bound_by = [gain.resource for gain in shown[:1]] if claim is None else [claim.certificate.binding]
    saves = ", ".join(f"{gain.resource} saves {gain.saved_fraction:.1%}" for gain in shown)
    if bound_by := [*bound_by, *([f"10 % more {saves}"] if saves else [])]:
        yield "bound by", "; ".join(bound_by)
    if any(word in " ".join([*bound_by[:1], *(gain.resource for gain in shown[:1])]) for word in OF_HOST):
        yield "assumes", _host_in_words(f)
    if (forward := f.forward) is not None:
        rate, pace = forward.n_sequences * f.plan.semantics.seq_len / forward.seconds, exact(forward.seconds)
        bound = f"no schedule below {exact(forward.bound_s)} (gap {forward.seconds / forward.bound_s - 1:.1%})"
        text = f"a pass that writes log-probabilities: {forward.n_sequences:,} sequences in {pace}, {rate:,.0f} tokens/s"
        yield "forward", f"{text}; {bound}"
    if f.n_tokens is not None:
        yield f"{show_count(f.n_tokens)} tokens", job_in_words(f.hourly.job(f.n_tokens, f.tokens_per_s, moved_bytes(f.plan)))
    if prices := prices_in_words(f.hourly, f.tokens_per_s, f.today):
        yield "price", "; ".join(prices)
    if (advised := resident_hint(f.resident_s, f.step_s)) is not None:
        yield "resident", advised
    if (rate := f.tokens_per_s_in_fp8 or 0.0) > LEAST_FASTER * f.tokens_per_s:
        has_adapters = f.plan.semantics.train.lora is not None
        flags, weights = (IN_FP8_WORDS, "base") if has_adapters else ("--compute fp8", "weights")
        gain = f"{flags}: about {rate:,.0f} tokens/s, {rate / f.tokens_per_s:.2f} times as many"
        cost = "" if has_adapters else ", and losses of trials were up to 0.14 higher"
        yield "advice", f"{gain}; it changes results: {weights}, activations and their gradients in 8 bits{cost} (docs/fp8.md)"
    if f.answer is not None and f.answer.clipped_step_s is not None:
        extra = f.answer.clipped_step_s / f.prediction.step_s - 1
        yield "clipping", f"a step takes {exact(f.prediction.step_s)}, and {extra:.1%} more if its gradient is clipped"
    if f.unconfirmed_step_s is not None:
        claims = f"the plan file claims a step of {exact(f.unconfirmed_step_s)}, simulating it gives {exact(f.prediction.step_s)}"
        yield "note", f"{claims}: the file was changed, or written by another version; its interval and bounds are left out"
    if ratios := [entry.ratio for entry in f.profile.op_ratios if entry.n_samples]:
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} times the profile's seconds"
        yield "measured on", f"op times are those of a run of this model: {len(ratios)} kinds of op and block, {spread}"
    if not f.prediction.periodic:
        yield "note", "the steps reach no steady state: the prediction is the mean of the last simulated ones"
    if (exchange := exchange_in_words(f.profile, f.plan.semantics.ranks // f.profile.n_hosts)) is not None:
        yield "GPUs", exchange


def _host_in_words(f: Facts) -> str:
    """Host cores, rates of the optimizer and of host memory, and the link, and the options that change them."""
    host, link, suffix = f.profile.host, f.profile.link, " for each GPU" if f.plan.semantics.ranks > 1 else ""
    up, down = (show_rate(max(point.rate.value for point in curve.bytes_per_s), "B") for curve in (link.h2d, link.d2h))
    updates = show_rate(f.profile.optimizer_params_per_s(host.n_cores), "")
    cores = f"{counted(host.n_cores, 'core')} for copies and optimizer{suffix}, {updates.replace('/s', ' updates/s')}"
    rates = f"host memory at {show_rate(host.dram_bytes_per_s.value, 'B')}, link {up} up and {down} down"
    return f"{cores}; {rates}; change them with --host-cores, --host-bandwidth, --link"


def exchange_in_words(profile: Profile, n: int) -> str | None:
    """Assumed exchange between n GPUs, if the profile is of one GPU, and the shipped machine with n; None if it is known."""
    peers = profile.peers
    if n == 1 or (peers is not None and peers.n_devices is not None):
        return None
    text = ALONE
    if peers is not None:
        rate = show_rate(peers.collectives["all_gather"].bytes_per_s.value, "B")
        how = "through host memory" if peers.through_host else f"at {rate}, as NCCL was measured with this GPU or its like"
        text = f"the profile is of one GPU: {n} are assumed to share its host, and to exchange {how}"
    machines = [read_profile(name) for name in shipped_profiles() if name[0].isdigit()]
    able = [machine for machine in machines if machine.device.name == profile.device.name and machine.n_devices >= n]
    least = min(able, key=lambda machine: machine.n_devices, default=None)
    return text if least is None else f"{text}; {least.name} is a machine of {least.n_devices}"


def short_report(f: Facts) -> Iterator[Line]:
    """Short report: verdict, schedule in two lines, and a reference to further output."""
    yield from verdict_lines(f)
    yield "batch", batch_in_words(f.plan.semantics)
    if f.plan.semantics.is_lean:
        is_other = f.plan.semantics.optimizer.rule != "adamw"
        difference = "another optimizer than AdamW" if is_other else "other rounding than torch's AdamW"
        yield "optimizer", f"{f.plan.semantics.optimizer_in_words}: {difference} (docs/optimizers.md)"
    yield from _attention(f, is_cost=True)
    yield "schedule", shorten("; ".join(clauses(f.plan.policy, f.plan).values()), MOST_LETTERS, placeholder=" ...")
    yield "more", "reasons, provenance, time and memory in parts, other systems' schedules: plan -v, or penstock report"


def request_lines(f: Facts) -> Iterator[Line]:
    """Model, machine and semantics."""
    plan, s = f.plan, f.plan.semantics
    name = plan.model.name or plan.model.path
    yield "model", f"{name}: {show_count(plan.workload.n_params)} parameters, {plan.workload.n_layers} layers"
    if not plan.workload.trains_all:
        yield "trained", trained_in_words(plan)
    yield "machine", f"{f.profile.name}: {f.profile.summary}"
    yield "batch", f"{batch_in_words(s)}: {s.all_ranks.tokens_per_step:,} tokens a step"
    clip = "no clipping" if s.clip_norm is None else f"gradients clipped at {s.clip_norm:g}"
    is_sparse = "num_experts" in plan.model.config or "num_local_experts" in plan.model.config
    experts = f", {s.experts} experts" if is_sparse else ""
    if s.products == "fp8":
        yield "products", scaled_in_words(plan)
    yield "precision", f"{s.compute_dtype} compute, {s.master_dtype} master weights, {clip}{experts}"
    if s.is_lean:
        yield "optimizer", s.optimizer_in_words
    if not s.objective.is_default:
        yield "loss", str(s.objective) if s.objective.sha256 is None else f"{s.objective} (a function of your own)"
    if s.router_loss:
        yield "routers", f"{s.router_loss:g} times their load-balancing loss, of each micro-batch"
    yield "kernels", kernels_in_words(s)
    yield from _attention(f)


def _attention(f: Facts, is_cost: bool = False) -> Iterator[Line]:
    """Attention kernels, if some are not the fused one; `is_cost`: only if they have memory traffic that it does not have."""
    with suppress(WorkloadError):  # a model that this version of transformers does not have
        kernels = attention_kernels(f.plan.model, f.plan.semantics)
        if any(n_bytes if is_cost else kernel != "fused" for kernel, (_, n_bytes) in kernels.items()):
            yield "attention", "; ".join(_attention_costs(f, kernels))


def _attention_costs(f: Facts, kernels: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Attention kernels by number of layers, and the time that fused attention would save."""
    plan, device = f.plan, f.profile.device
    n_all, bytes_per_s = len(plan.policy.saving(Saved.ALL)), (device.eager_bytes_per_s or device.memory_bytes_per_s).value
    n_passes = 1 + BACKWARD_POINTWISE + 1 - n_all / plan.workload.n_layers  # forward, backward, recompute
    for kernel, (n_layers, n_bytes) in kernels.items():
        text = f"{kernel} in {counted(n_layers, 'layer')}"
        if n_bytes:
            seconds = plan.semantics.n_micro_batches * n_passes * n_bytes / bytes_per_s
            text += f": {exact(seconds)} a step ({seconds / f.step_s:.0%}) of memory traffic that fused attention does not have"
        yield text + ", predicted at FlashAttention's rate, which a GPU may not reach" * ("mask" in kernel)


def policy_lines(f: Facts) -> Iterator[Line]:
    """The schedule, one line per topic, and the next best plan: its relative speed and its differences."""
    mine = clauses(f.plan.policy, f.plan)
    for i, clause in enumerate(mine.values()):
        yield "" if i else "policy", clause
    if f.answer is not None and f.answer.next_best is not None:
        policy, step_s = f.answer.next_best
        alternative = clauses(policy, f.plan)
        differences = [text for topic, text in alternative.items() if text != mine.get(topic)]
        differences += [f"not: {text}" for topic, text in mine.items() if topic not in alternative]
        name = "next best" if step_s >= f.step_s else "faster"
        yield name, f"{exact(step_s)} ({step_s / f.step_s - 1:+.1%}), with {'; '.join(differences) or 'other blocks'}"


def provenance_lines(f: Facts) -> Iterator[Line]:
    """Further bounds, the provenance of the prediction, and the definitions of model work and checkpoint size."""
    if f.claim is not None:
        yield "proven", _certified(f.claim)[1]
    device, other_lanes = f.rests_on
    yield "rests on", _rests_on(device, "the device's")
    if device.fraction(BASES[0]) < ENOUGH_FRACTION:
        yield "", "measure the machine with `penstock probe` and plan again: the prediction is only as good as its sources"
    if f.claim is not None and not f.profile.is_probed:
        why = "steps took longer than profiles without a probe predict (docs/accuracy.md)"
        yield "", f"P90 is {UNPROBED_P90} times that of the spreads: {why}"
    if other_lanes is not None:
        yield "", _rests_on(other_lanes, "the other lanes'")
    if by_formula := f.plan.semantics.library_kernels:
        yield "", f"the memory traffic of {' and '.join(by_formula)} was counted in their sources, not timed"
    if f.outside:
        yield "outside", f"the measured range, costs of its nearest point are used (P10 to P90 are wider): {'; '.join(f.outside)}"
    yield "work", f"{show_rate(f.model_flop_per_s, 'FLOP')} of model work: {CONVENTION}"
    holds = "adapters" if f.plan.semantics.train.lora else "weights"
    suffix = "" if f.plan.workload.trains_all else " of trained parameters"
    yield "checkpoint", f"{show_bytes(f.plan.checkpoint_bytes())} each: {holds}, masters and moments{suffix}"


def resident_hint(resident_s: float | None, step_s: float) -> str | None:
    """Hint if keeping all state on the device is faster than streaming; None if it is not or does not fit."""
    if resident_s is None or resident_s >= step_s:
        return None
    text = f"the device has room for all training state: kept there, a step takes about {show_seconds(resident_s)}"
    return f"{text}, {step_s / resident_s:.2f} times as fast"


def _certified(claim: Claim) -> tuple[str, str]:
    """Text of the bound on the search space, and of the narrower and wider bounds."""
    proof = claim.certificate
    gap_fraction = max(claim.prediction.step_s / proof.policy_bound_s - 1, 0.0)
    subject = "no schedule we can express is" if proof.n_families else "no order of the ops of this fixed schedule is"
    wider = f"no schedule at all with this micro-batch is below {exact(proof.machine_bound_s)}"
    if proof.n_sizes > 1 and proof.n_families > 0:
        if proof.size_bound_s > proof.policy_bound_s:
            wider = f"with this plan's sizes {subject} below {exact(proof.size_bound_s)}; {wider}"
        cut = " and any cut of the one memory" if CUT in proof.free else ""
        subject = f"with any of {proof.n_sizes} sizes (micro-batch, tiles){cut} {subject}"
    return f"{subject} below {exact(proof.policy_bound_s)} (gap {gap_fraction:.1%})", wider


def _measured(f: Facts, measured: Measured) -> str:
    """Compare the measured step with the prediction, if that is for the kind of machine that ran."""
    ratio, claim = measured.step_s / f.step_s, f.claim
    against = f"{ratio:.3g} times the prediction" if ratio >= FAR else f"{ratio - 1:+.1%} against the prediction"
    if not f.is_comparable:
        against = f"not comparable with the prediction, which is for {f.profile.name}"
    elif claim is not None:
        is_inside = claim.prediction.p10_step_s <= measured.step_s <= claim.prediction.p90_step_s
        against += f", {'within' if is_inside else 'outside'} the interval"
    step = exact(measured.step_s) if f.ran_on is None else f"{exact(measured.step_s)} on {f.ran_on}"
    if not measured.n_steps:
        return f"{step}, a single step; {against}"
    return f"{step}, the median of {counted(measured.n_steps, 'step')} after warm-up ({p10_to_p90(measured)}); {against}"


def _rests_on(provenance: Provenance, owner: str) -> str:
    this, another, assumed = (f"{provenance.fraction(basis):.0%}" for basis in BASES)
    least = ", ".join(f"{part.what} {part.fraction:.1%}" for part in provenance.worst)
    text = f"{this} of {owner} seconds rest on measurements of this device"
    return f"{text}, {another} on those of another, {assumed} on assumptions" + (f" (most of all: {least})" if least else "")


def _memories(f: Facts) -> tuple[tuple[str, dict[str, int], int], ...]:
    """(title, parts, capacity) of each memory; with several ranks, for one of them."""
    suffix, needs = f" of each of {n} GPUs" if (n := f.plan.semantics.ranks) > 1 else "", f.needs
    return (f"device{suffix}", needs.device, needs.device_memory_bytes), (f"host{suffix}", needs.host, needs.host_memory_bytes)


def lane_table(f: Facts) -> Table:
    """Busy seconds of each lane per step."""
    columns = [(f.prediction.busy_s(f.plan), f.step_s)]
    titles = ["lane", "busy", "share of the step"]
    if f.measured is not None and (steady := f.measured.steady).spans:
        columns.append((steady.busy_s(f.plan), f.measured.traced_step_s))
        titles += ["measured busy", "share"]
    rows = []
    for lane in f.plan.lanes:
        cells = [cell for busy_s, step_s in columns for cell in (show_seconds(busy_s[lane]), f"{busy_s[lane] / step_s:.0%}")]
        rows.append((f"{lane}: {LANE_TITLE[lane]}", *cells))
    return Table(tuple(titles), tuple(rows))


def waterfall_table(f: Facts) -> Table | None:
    """The waterfall: parts of the step, and the total."""
    if f.waterfall is None:
        return None
    rows, bars, reached_s, step_s = [], [], 0.0, f.waterfall.step_s
    for key, part_s in asdict(f.waterfall).items():
        rows.append((PARTS[key], show_seconds(part_s), f"{part_s / step_s:.1%}"))
        bars.append(Bar(key.removesuffix("_s"), reached_s, reached_s + part_s))
        reached_s += part_s
    spread = () if f.claim is None else (f.claim.prediction.p10_step_s, f.claim.prediction.p90_step_s)
    rows.append(("the predicted step", exact(step_s), "100%"))
    bars.append(Bar("predicted", 0.0, step_s, *spread))
    if f.measured is not None and f.is_comparable:
        rows.append(("a measured step", exact(f.measured.step_s), f"{f.measured.step_s / step_s:.0%}"))
        bars.append(Bar("measured", 0.0, f.measured.step_s))
    return Table(("the step is", "takes", "share"), tuple(rows), tuple(bars))


def gain_table(f: Facts) -> Table:
    """Gain from 10 % more of each resource."""
    rows = [(gain.resource, show_seconds(gain.saved_s), f"{gain.saved_fraction:.1%}".replace("-0.0%", "0.0%")) for gain in f.gains]
    bars = [Bar("less" if gain.saved_s < 0 else "gain", 0.0, abs(gain.saved_s)) for gain in f.gains]
    return Table(("10 % more of", "saves", "of the step"), tuple(rows), tuple(bars))


def memory_table(f: Facts, occupancy: tuple[Occupancy, ...] = ()) -> Table:
    """Allocated bytes of device and host by part, and capacities.

    `occupancy`: occupancy of both, adds a column with the maximum of each part over the step.
    """
    rows = []
    for i, (place, parts, has) in enumerate(_memories(f)):
        peak = sum(parts.values())
        shown = {name: n for name, n in parts.items() if n >= SMALL_FRACTION * peak}
        peaks = {name: show_bytes(max(values)) for name, values in occupancy[i].series.items()} if occupancy else {}
        rows.append((place, show_bytes(peak), show_bytes(has), show_bytes(occupancy[i].peak_bytes) if occupancy else ""))
        for name, n_bytes in sorted(shown.items(), key=lambda item: (-item[1], item[0])):
            label = name.replace("_", " ")
            title = f"  {label} ({GLOSS[label]})" if label in GLOSS else f"  {label}"
            rows.append((title, show_bytes(n_bytes), "", peaks.get(name, "")))
        if rest := peak - sum(shown.values()):
            rows.append(("  other", show_bytes(rest), "", ""))
    titles = ("memory", "needs", "has", "peak use")
    n_columns = len(titles) if occupancy else len(titles) - 1
    return Table(titles[:n_columns], tuple(row[:n_columns] for row in rows))


def baseline_table(f: Facts) -> Table:
    """Schedules of other systems under the same semantics and costs, and training with all state on the device."""
    rows = []
    for name, outcome in f.answer.all_baselines().items() if f.answer else ():
        if "step_s" in outcome:
            step = exact(outcome["step_s"]) + (" (estimated)" if outcome.get("estimated") else "")
            rows.append((name, step, f"{outcome['step_s'] / f.step_s:.2f} times as fast"))
        else:
            rows.append((name, "does not fit", outcome["does_not_fit"]))
    return Table(("schedule", "step", "this plan is"), tuple(rows))


def p10_to_p90(step: Predicted | Measured) -> str:
    return f"P10 to P90: {exact(step.p10_step_s)} to {exact(step.p90_step_s)}"


def exact(s: float) -> str:
    """Format seconds with four digits, so that close values differ: `31.99 s`, `412.7 ms`."""
    if s >= 1000:
        return f"{s:,.0f} s"
    scale, unit = (1.0, "s") if s >= 1 else (1e3, "ms") if s >= 1e-3 else (1e6, "µs")
    return f"{s * scale:.4g} {unit}"
