"""Measured ratios: measured over predicted seconds of the work of ops, by kind and class of blocks, from the timeline of a run.

The work of an op is its time without its overhead. Predicted work is simulated with contention for the plan of the run. Slower ops
also change the contention of others, so ratios are refined until the simulation reproduces the measured work.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from penstock.hwprofiles.components import OpRatio
from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import Kind, Plan
from penstock.runtime.plan.timeline import Span, Timeline

from .cost import costs, region_of
from .scaled_profile import speed_of
from .simulate import simulate

MAX_STEPS = 8  # simulated
ROUNDS, SAME_LOG = 6, 0.005  # of refinement; largest correction of the last one
LEAST_SAMPLES = 4  # with fewer a group has no ratio of its own
LEAST_WORK_FRACTION = 0.5  # of an op's time; the rest is overhead, which has no ratio
LARGEST = 8.0  # ratios are clamped to this and its inverse
MEETING = {Kind.GATHER, Kind.EXCHANGE, Kind.CLIP}  # their time includes waits for other ranks
# Kinds with the same kind of work. One without measurements has the mean ratio of the others, or a search would prefer it.
SAME_WORK = (
    (Kind.FORWARD, Kind.RECOMPUTE),
    (Kind.LOAD, Kind.FETCH_ACTIVATION, Kind.FETCH_SAVED),
    (Kind.OFFLOAD_GRADIENT, Kind.OFFLOAD_ACTIVATION, Kind.OFFLOAD_SAVED),
    (Kind.UPDATE, Kind.SPECULATE, Kind.SETTLE),
    (Kind.ACCUMULATE, Kind.NORM),
)
Group = tuple[Kind, int]  # kind of op, and first block of a class


def speeds_of(profile: Profile) -> str:
    """Return a digest of the speeds of a profile, the base of measured ratios."""
    speeds = [(place, quantity.value) for place, quantity in profile.quantities() if speed_of(place) is not None]
    return hashlib.sha256(json.dumps(speeds).encode()).hexdigest()


def op_ratios(plan: Plan, settled: Timeline) -> tuple[OpRatio, ...]:
    """Return the ratios relative to the profile of the plan without its own ratios. `settled`: steps of a run without warm-up."""
    profile = Profile.from_json(plan.profile, "the plan's profile")
    overheads_s = [demand.overhead_s for demand in costs(plan, profile)]
    measured_s, n_samples = _work_s(plan, settled.spans, overheads_s)
    fitted = {(Kind(entry.kind), entry.block): entry.ratio for entry in profile.op_ratios if entry.n_samples}
    is_known = {group for group, n in n_samples.items() if n >= LEAST_SAMPLES and not _waits(plan, group)}
    for turn in range(ROUNDS):
        machine = profile.model_copy(update={"op_ratios": _with_others(plan, fitted, n_samples, measured_s)})
        prediction = simulate(plan, costs(plan, machine), region_of(machine), MAX_STEPS)
        first = max(span.step for span in prediction.timeline.spans) - prediction.n_cycle_steps + 1
        predicted_s, _ = _work_s(plan, prediction.timeline.from_step(first).spans, overheads_s)
        if turn == 0:
            idle_s = _overhead_s(plan, overheads_s)
            is_known = {g for g in is_known if LEAST_WORK_FRACTION * idle_s[g] < (1 - LEAST_WORK_FRACTION) * predicted_s[g]}
        logs = {group: math.log(max(measured_s[group], 1e-12) / predicted_s[group]) for group in is_known}
        for group, log in logs.items():
            fitted[group] = min(LARGEST, max(1 / LARGEST, fitted.get(group, 1.0) * math.exp(log)))
        if all(abs(log) < SAME_LOG for log in logs.values()):
            break
    return _with_others(plan, fitted, n_samples, measured_s)


def _work_s(plan: Plan, spans: Iterable[Span], overheads_s: list[float]) -> tuple[dict[Group, float], dict[Group, int]]:
    """Return seconds of work in a step and number of spans of each group. An op has the median of its spans."""
    times_s: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        times_s[span.op].append(span.end_s - span.start_s)
    work_s, n = defaultdict[Group, float](float), defaultdict[Group, int](int)
    for i, taken_s in times_s.items():
        group = plan.ops[i].kind, plan.workload.first_alike[plan.ops[i].block]
        work_s[group] += plan.often(i) * max(0.0, median(taken_s) - overheads_s[i])
        n[group] += len(taken_s)
    return work_s, n


def _overhead_s(plan: Plan, overheads_s: list[float]) -> dict[Group, float]:
    seconds = defaultdict[Group, float](float)
    for i, op in enumerate(plan.ops):
        seconds[op.kind, plan.workload.first_alike[op.block]] += plan.often(i) * overheads_s[i]
    return seconds


def _waits(plan: Plan, group: Group) -> bool:
    return plan.semantics.ranks > 1 and group[0] in MEETING


def _with_others(
    plan: Plan, fitted: Mapping[Group, float], n_samples: Mapping[Group, int], measured_s: Mapping[Group, float]
) -> tuple[OpRatio, ...]:
    """Return the fitted ratios, and for unmeasured groups the mean over groups with the same work, weighted by predicted work."""
    ratios, families = dict(fitted), {kind: family for family in SAME_WORK for kind in family}
    for kind in Kind:
        family = families.get(kind, (kind,))
        for kinds in ((kind,), family):
            of_kinds = [group for group in fitted if group[0] in kinds and measured_s.get(group, 0.0) > 0]
            if of_kinds:
                mean = sum(measured_s[g] for g in of_kinds) / sum(measured_s[g] / fitted[g] for g in of_kinds)
                ratios |= {(kind, blocks[0]): mean for blocks in plan.workload.classes if (kind, blocks[0]) not in ratios}
    counts = {group: n_samples.get(group, LEAST_SAMPLES) for group in fitted}
    return tuple(OpRatio(kind=str(k), block=b, ratio=x, n_samples=counts.get((k, b), 0)) for (k, b), x in sorted(ratios.items()))
