"""The step and the memory series of the HTML page against plan and timeline."""

import math
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.memory import footprint
from penstock.planner.search.policies import baseline
from penstock.planner.show import memory
from penstock.planner.show.memory import occupancy
from penstock.planner.show.step import measured_stretch, predicted_stretch
from penstock.runtime.plan import Lane, Semantics, Slot
from penstock.runtime.plan.timeline import Span, Timeline
from tests.lanes import examples
from tests.strategies import MADE_UP, plans, predicted

fractions = st.lists(st.floats(0, 0.999), min_size=5, max_size=5)


@cache
def lowered():
    model, s = read_model("qwen2.5-0.5b"), Semantics(seq_len=128, batch_size=2, micro_batch=1)
    workload = build_workload(model, s)
    return lower(model, workload, s, baseline("megatrain-plus", s, workload), read_profile("rtx4090-server").to_json())


@settings(max_examples=examples(60))
@given(plans())
def test_the_drawn_step_holds_every_op_once(plan):
    """In a steady state the stretch has exactly the work of one step, even if lanes run ahead."""
    prediction = predicted(plan, MADE_UP)
    if not prediction.periodic or prediction.n_cycle_steps > 1:
        return
    stretch = predicted_stretch(plan, prediction)
    assert stretch.length_s == pytest.approx(prediction.step_s)
    drawn_s = Counter()
    for piece in stretch.within():
        assert 0 <= piece.start_s <= piece.end_s <= stretch.length_s * (1 + 1e-9)
        drawn_s[piece.op] += piece.end_s - piece.start_s
    for span in prediction.timeline.from_step(len(prediction.timeline.step_ends_s) - 1).spans:
        assert drawn_s[span.op] == pytest.approx(span.end_s - span.start_s, abs=1e-9 * prediction.step_s + 1e-12)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12))
def test_the_measured_step_is_a_settled_one_of_median_length(lengths):
    plan, starts = lowered(), [sum(lengths[:n]) for n in range(len(lengths))]
    first = next(i for i, op in enumerate(plan.ops) if op.lane is Lane.GPU)
    stretch = measured_stretch(plan, Timeline(tuple(Span(first, n, s, s + 0.1) for n, s in enumerate(starts))))
    settled = sorted(b - a for a, b in pairwise(starts[2:]))
    assert stretch.length_s == pytest.approx(settled[(len(settled) - 1) // 2])
    assert stretch.step >= 2


def obviously_held(plan, spans, at_s):
    """Reference implementation: live bytes of each arena just after `at_s`, from the next use of every slot."""
    uses, live_bytes = defaultdict(list), Counter()
    for span in sorted(spans, key=lambda s: (s.step, s.op)):
        op = plan.ops[span.op]
        for slot in {*op.reads, *op.writes}:
            uses[slot].append((span, op))
    for arena in plan.arenas:
        for i, n_bytes in enumerate(arena.slot_bytes):
            slot = Slot(arena.name, i)
            following = [(span, op) for span, op in uses[slot] if span.end_s > at_s]
            if arena.name in ("state", "norm"):
                live_bytes[arena.name] += n_bytes
            elif following:
                span, op = following[0]
                group_size = plan.semantics.n_micro_batches // plan.semantics.sum_groups
                is_first = op.micro_batch is not None and op.micro_batch % group_size == 0
                begins_a_sum = is_first and slot in (op.get("arrived"), op.get("sum"))
                if (slot in op.reads and not begins_a_sum) or span.start_s <= at_s:
                    live_bytes[arena.name] += n_bytes
    frozen_bytes = 0 if plan.workload.trains_all else sum(plan.frozen_bytes(block) for block in range(len(plan.workload.blocks)))
    live_bytes["state"] -= frozen_bytes - math.ceil(frozen_bytes / plan.semantics.ranks)  # frozen parameters are sharded over ranks
    return live_bytes


@settings(max_examples=examples(60))
@given(plans(max_layers=4, max_micro_batches=3), fractions)
def test_memory_holds_what_the_next_use_of_every_slot_says(plan, fractions):
    stretch = predicted_stretch(plan, predicted(plan, MADE_UP))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "SMALL_FRACTION", 0.0)  # keep small series separate
        both = occupancy(plan, MADE_UP, stretch)
    for at_s in (fraction * stretch.length_s for fraction in fractions):
        expected = obviously_held(plan, stretch.spans, stretch.start_s + at_s)
        for one in both:
            index = max(i for i, t in enumerate(one.times_s) if t <= at_s)
            for arena in plan.arenas:
                if arena.place is one.place:
                    assert one.series[arena.name][index] == expected[arena.name], (arena.name, at_s)


@settings(max_examples=examples(100))
@given(plans())
def test_no_more_is_held_than_is_reserved(plan):
    stretch, needs = predicted_stretch(plan, predicted(plan, MADE_UP)), footprint(plan, MADE_UP)
    for one, peak_bytes in zip(occupancy(plan, MADE_UP, stretch), (needs.device_peak_bytes, needs.host_peak_bytes), strict=True):
        assert sum(one.reserved.values()) == peak_bytes >= one.peak_bytes
        for name, values in one.series.items():
            assert 0 <= min(values) <= max(values) <= one.reserved.get(name, peak_bytes)
