"""Abridged timelines of long steps.

Abridging converts a long step with repetitions to a short one without: ops before, in the recorded repetitions, and after, at
their real times minus the duration of the omitted repetitions. Consumers of timelines then need no support for repetitions.
"""

from collections import defaultdict
from dataclasses import replace

from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane, Plan, Repeat
from penstock.runtime.plan.plan import unrolled
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline, is_kept

WARM_UP_STEPS = 2  # skipped: they fill caches and the pipeline
N_KEPT = FIRST_KEPT + LAST_KEPT


def short_plan(plan: Plan) -> Plan:
    """Return the plan of the abridged step, which repeats its section only as often as timelines record."""
    return plan if plan.repeat is None else shortened(plan, min(plan.repeat.times, N_KEPT))


def abridged_plan(plan: Plan) -> Plan:
    """Return the plan of the abridged step with all ops written out."""
    return unrolled(short_plan(plan))


def abridged(plan: Plan, timeline: Timeline) -> Timeline:
    """Return the timeline of the abridged step. Raise PlanError if it has repetitions that timelines of this plan do not record."""
    repeat = plan.repeat
    if repeat is None:
        return timeline
    cuts_s, short = _cuts_s(plan, repeat, timeline), short_plan(plan)
    spans = []
    for span in timeline.spans:
        k = span.repetition
        if not is_kept(k, repeat.times) or not 0 <= k < (repeat.times if span.op in repeat else 1):
            raise PlanError(f"the timeline is of another plan: it has a repetition {k} of op {span.op}")
        index = k if k < FIRST_KEPT else k - max(repeat.times - N_KEPT, 0)
        cut_s = sum(s for step, s in cuts_s.items() if step < span.step + _is_later(span, repeat))
        spans.append(Span(short.number(span.op, index), span.step, span.start_s - cut_s, span.end_s - cut_s))
    return Timeline(tuple(spans))


def _is_later(span: Span, repeat: Repeat) -> bool:
    """True if a span follows the omitted repetitions of its step."""
    return span.op >= repeat.end or (span.op in repeat and span.repetition >= FIRST_KEPT)


def _cuts_s(plan: Plan, repeat: Repeat, timeline: Timeline) -> dict[int, float]:
    """Return the seconds cut from each step: the largest cut after which, in every lane, ops do not overlap and repetitions start
    at least one period apart."""
    began_s: dict[tuple[int, Lane, int], float] = defaultdict(lambda: float("inf"))
    ended_s: dict[tuple[int, Lane, int], float] = defaultdict(float)
    for span in timeline.spans:
        if span.op in repeat:
            key = span.step, plan.ops[span.op].lane, span.repetition
            began_s[key], ended_s[key] = min(began_s[key], span.start_s), max(ended_s[key], span.end_s)
    last_before, first_after = FIRST_KEPT - 1, repeat.times - LAST_KEPT
    cuts_s = dict.fromkeys(sorted({span.step for span in timeline.spans}), 0.0)
    for step in cuts_s if repeat.times > N_KEPT else ():
        shifts_s = []
        for lane in Lane:
            spans = [span for span in timeline.spans if plan.ops[span.op].lane is lane and span.step >= step]
            first = [span.end_s for span in spans if span.step == step and not _is_later(span, repeat)]
            later = [span.start_s for span in spans if span.step > step or _is_later(span, repeat)]
            if {(step, lane, k) for k in (last_before, first_after, first_after + 1)} <= began_s.keys():
                period_s = began_s[step, lane, first_after + 1] - began_s[step, lane, first_after]
                earliest_s = max(ended_s[step, lane, last_before], began_s[step, lane, last_before] + period_s)
                shifts_s.append(began_s[step, lane, first_after] - earliest_s)
            elif first and later:  # a disk lane may have ops in few repetitions
                shifts_s.append(min(later) - max(first))
        cuts_s[step] = max(0.0, min(shifts_s, default=0.0))
    return cuts_s


def shortened(plan: Plan, times: int) -> Plan:
    """Return the plan of a step with fewer micro-batches: repeated ops run `times` times."""
    repeat = plan.repeat
    assert repeat is not None, "a plan with a repeated section"
    assert 2 <= times <= repeat.times, "times must be from 2 to repeat.times"
    n_fewer = (repeat.times - times) * repeat.micro_batches
    semantics = replace(plan.semantics, batch_size=plan.semantics.batch_size - n_fewer * plan.semantics.micro_batch)
    later = (op if op.micro_batch is None else replace(op, micro_batch=op.micro_batch - n_fewer) for op in plan.ops[repeat.end :])
    return replace(plan, semantics=semantics, ops=(*plan.ops[: repeat.end], *later), repeat=replace(repeat, times=times))
