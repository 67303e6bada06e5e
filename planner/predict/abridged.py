"""The part of a long step that timelines keep, as a short step of its own.

What comes before the repetitions, those that are kept, and what comes after, each when it really ran but for the time of the
repetitions between, which is cut out. Whatever draws or reads a timeline then has a plan that repeats nothing.
"""

from collections import defaultdict

from runtime.errors import PlanError
from runtime.plan import Lane, Plan, Repeat
from runtime.plan.plan import shortened, unrolled
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline, is_kept

N_KEPT = FIRST_KEPT + LAST_KEPT


def short_plan(plan: Plan) -> Plan:
    """The plan of the short step, in which what is kept repeats; a plan that repeats nothing as it is."""
    return plan if plan.repeat is None else shortened(plan, min(plan.repeat.times, N_KEPT))


def abridged_plan(plan: Plan) -> Plan:
    """The same with all ops written out."""
    return unrolled(short_plan(plan))


def abridged(plan: Plan, timeline: Timeline) -> Timeline:
    """The timeline of the short step. PlanError where it has repetitions that no timeline of the plan keeps."""
    repeat = plan.repeat
    if repeat is None:
        return timeline
    cuts_s, short = _cuts_s(plan, repeat, timeline), short_plan(plan)
    spans = []
    for span in timeline.spans:
        k = span.repetition
        if not is_kept(k, repeat.times) or not 0 <= k < (repeat.times if span.op in repeat else 1):
            raise PlanError(f"the timeline is of another plan: it has a repetition {k} of op {span.op}")
        kept = k if k < FIRST_KEPT else k - max(repeat.times - N_KEPT, 0)
        is_later = span.op >= repeat.end or (span.op in repeat and k >= FIRST_KEPT)
        cut_s = sum(s for step, s in cuts_s.items() if step < span.step) + (cuts_s[span.step] if is_later else 0.0)
        spans.append(Span(short.number(span.op, kept), span.step, span.start_s - cut_s, span.end_s - cut_s))
    return Timeline(tuple(spans))


def _cuts_s(plan: Plan, repeat: Repeat, timeline: Timeline) -> dict[int, float]:
    """The seconds of each step that are cut out: as many as leave no lane doing two ops at a time, and none idle longer than from
    one repetition to the next."""
    began_s: dict[tuple[int, Lane, int], float] = defaultdict(lambda: float("inf"))
    ended_s: dict[tuple[int, Lane, int], float] = defaultdict(float)
    for span in timeline.spans:
        if span.op in repeat:
            key = span.step, plan.ops[span.op].lane, span.repetition
            began_s[key], ended_s[key] = min(began_s[key], span.start_s), max(ended_s[key], span.end_s)
    before, after = FIRST_KEPT - 1, repeat.times - LAST_KEPT
    cuts_s = dict.fromkeys(sorted({span.step for span in timeline.spans}), 0.0)
    for step in cuts_s if repeat.times > N_KEPT else ():
        shifts_s = []
        for lane in (lane for lane in Lane if {(step, lane, k) for k in (before, after, after + 1)} <= began_s.keys()):
            began, turn_s = began_s[step, lane, before], began_s[step, lane, after + 1] - began_s[step, lane, after]
            shifts_s.append(began_s[step, lane, after] - max(ended_s[step, lane, before], began + turn_s))
        cuts_s[step] = max(0.0, min(shifts_s, default=0.0))
    return cuts_s
