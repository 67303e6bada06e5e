"""Do the parts of a step add up, and do they mean what they say?"""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.schema import Profile, read_profile
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.predict.cost import CostModel, costs, region_of
from planner.predict.faster import COMPUTE, DRAM, LINK, OPTIMIZER, Group, faster
from planner.predict.simulate import simulate
from planner.show.waterfall import FREE, MAX_STEPS, RESOURCES, _edges, _growth, binding, sensitivities, waterfall
from runtime.plan import Kind, Policy, Semantics, Update, saves
from runtime.plan.workload import Saved
from tests.strategies import MODEL, PROFILE, cases, small_workload

MADE_UP = Profile.from_json(PROFILE)
LAUNCH = (Group.LAUNCH,)
NEGLIGIBLE = 1e-8  # of a step
SHARED = (Group.DUPLEX, Group.DRAM)  # without these, the ops of a plan slow nobody


def without(profile, *burdens):
    return faster(profile, {group: FREE for groups in burdens for group in groups})


def step_s(plan, profile):
    return simulate(plan, costs(plan, profile), region_of(profile), MAX_STEPS).step_s


@st.composite
def machines(draw):
    """The made-up machine, each thing up to a thousand times as slow or as fast."""
    return faster(MADE_UP, {group: 10.0 ** draw(st.integers(-3, 3)) for group in Group})


@given(cases(), machines())
@settings(deadline=None, max_examples=40)
def test_the_parts_are_the_predicted_step_and_none_is_negative(case, machine):
    parts = waterfall(case.plan, machine)
    assert parts.step_s == pytest.approx(step_s(case.plan, machine), rel=1e-12)
    assert sum(parts.to_json().values()) == pytest.approx(parts.step_s, rel=1e-12)
    assert all(part_s >= 0 for part_s in parts.to_json().values())


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_levels_in_any_order_grow_to_the_step_and_never_shrink(levels_s, step_s):
    grown_s = _growth(levels_s, step_s)
    assert len(grown_s) == len(levels_s) + 1
    assert min(grown_s) >= 0
    assert sum(grown_s) == pytest.approx(step_s)
    assert sum(grown_s[:-1]) == pytest.approx(min(max(levels_s), step_s), abs=1e-8 * step_s)


@pytest.mark.drawn
@given(cases().filter(lambda case: case.semantics.ranks == 1), machines())
@settings(deadline=None, max_examples=40)
def test_what_is_free_has_no_part_in_the_step(case, machine):
    plan = case.plan
    for burdens, key in (
        ((LINK,), "link_s"),
        ((DRAM,), "host_dram_s"),
        ((OPTIMIZER, DRAM), "optimizer_s"),
        ((LAUNCH, LINK, DRAM), "fill_drain_and_launch_s"),
    ):
        parts = waterfall(plan, without(machine, *burdens))
        assert parts.to_json()[key] <= NEGLIGIBLE * parts.step_s, key


def copying_s(plan, machine):
    """Seconds of copies on the device for what layers save and the link takes away."""
    leaving, rate = plan.policy.offload_blocks, machine.device.memory_bytes_per_s.value
    micro_batches = range(plan.semantics.n_micro_batches)
    return sum(2 * plan.recompute(b, m).copied_bytes / rate for b, m in product(leaving, micro_batches))


@pytest.mark.drawn
@given(cases(), machines())
@settings(deadline=None, max_examples=40)
def test_recompute_is_what_is_computed_a_second_time(case, machine):
    """Held against what each layer that is not kept computes again, and the forwards that a boundary's absence asks for, where a
    backward comes. Copies on the device of what leaves count with it: they are what is paid instead."""
    cost, again_s = CostModel(without(machine, LAUNCH)), 0.0
    first, stride, n_layers = case.workload.first_trained, case.policy.boundary_stride, case.workload.n_layers
    for m, b in product(range(case.semantics.n_micro_batches), range(1, n_layers + 1)):
        blocks = case.plan.blocks_of(m)
        if case.policy.saved(b) is not Saved.ALL and b >= first:
            again = blocks[b].recompute(case.plan.saved(b))
            again_s += cost.recompute_s(blocks[b], again, case.plan.semantics)
        next_kept = min(-(-b // stride) * stride, n_layers)
        if b != next_kept and next_kept >= first:
            again_s += cost.forward_s(blocks[b], case.plan.semantics)
    again_s += copying_s(case.plan, machine)
    parts = waterfall(case.plan, machine)
    assert parts.recompute_s == pytest.approx(again_s, rel=1e-6, abs=NEGLIGIBLE * parts.step_s)


@pytest.mark.drawn
@given(cases().filter(lambda case: case.semantics.ranks == 1), machines())
@settings(deadline=None, max_examples=40)
def test_on_a_machine_where_only_computing_takes_time_the_step_is_computing(case, machine):
    machine = without(machine, LINK, DRAM, OPTIMIZER, LAUNCH)
    parts = waterfall(case.plan, machine)
    assert parts.ideal_compute_s + parts.recompute_s == pytest.approx(step_s(case.plan, machine), rel=NEGLIGIBLE)
    cost, least_s, first = CostModel(machine), 0.0, case.workload.first_trained
    for m in range(case.semantics.n_micro_batches):
        *body, head = case.plan.blocks_of(m)
        least_s += sum(cost.forward_s(b, case.semantics) for b in body)
        least_s += sum(cost.backward_s(b, case.semantics) for b in body[first:])
        least_s += cost.loss_s(head, case.semantics)
    assert parts.ideal_compute_s >= least_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("slow", "key", "resource"),
    [
        (COMPUTE, "ideal_compute_s", "device compute"),
        (LINK, "link_s", "link"),
        (OPTIMIZER, "optimizer_s", "optimizer"),
        (LAUNCH, "fill_drain_and_launch_s", "launch and latency"),
    ],
)
def test_what_is_slow_has_the_largest_part_and_binds(slow, key, resource):
    plan = plan_of(Policy(save=saves(all=tuple(range(1, 7))), update=Update.DEFERRED))
    machine = faster(MADE_UP, dict.fromkeys(slow, 1e-6))
    parts, found = waterfall(plan, machine).to_json(), sensitivities(plan, machine)
    assert max(parts, key=parts.__getitem__) == key
    assert binding(found) == found[0].resource == resource
    # The step is that resource alone, so 10 % more of it leaves ten elevenths.
    assert found[0].saved_fraction == pytest.approx(1 - 1 / 1.1, abs=0.02)


def test_what_shares_too_little_host_memory_rate_waits_for_it():
    """Updates draw 8.4 GB/s while loads of the next forward draw about 2, from memory that gives 8.5."""
    plan = plan_of(Policy(save=saves(all=tuple(range(1, 7))), update=Update.DEFERRED, prefetch_depth=3))
    factors = {Group.DRAM: 0.085, Group.UPLOAD: 100.0, Group.DOWNLOAD: 100.0, Group.OPTIMIZER: 0.3, Group.REDUCE: 0.8}
    machine = without(faster(MADE_UP, factors), COMPUTE, LAUNCH)
    short, plenty = waterfall(plan, machine), waterfall(plan, without(machine, DRAM))
    saved = {s.resource: s.saved_s for s in sensitivities(plan, machine)}
    assert short.host_dram_s > 0.01 * short.step_s
    assert plenty.host_dram_s == 0
    assert saved["host DRAM"] > 0.001 * short.step_s
    assert short.optimizer_s == pytest.approx(plenty.optimizer_s)
    assert short.link_s == pytest.approx(plenty.link_s)


def plan_of(policy, n_layers=6, n_micro_batches=2):
    semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1)
    return lower(MODEL, small_workload(n_layers, tied=False), semantics, policy, PROFILE)


@pytest.mark.parametrize("group", [1, 2])
def test_the_edges_are_the_way_to_the_first_layer_and_the_way_home_from_it(group):
    plan = plan_of(Policy(accumulation_group=group))
    assert [(plan.ops[i].kind, plan.ops[i].block) for i in _edges(plan)] == [
        (Kind.LOAD, 0),
        (Kind.LOAD, 1),
        (Kind.OFFLOAD_GRADIENT, 1),
        (Kind.OFFLOAD_GRADIENT, 0),
    ]


def test_copies_that_computing_hides_are_no_part_and_those_at_the_edges_are_fill_and_drain():
    plan = plan_of(Policy(prefetch_depth=2, gradient_slots=2, accumulation_group=2))
    machine = without(faster(MADE_UP, dict.fromkeys(COMPUTE, 1e-5)), DRAM, OPTIMIZER, LAUNCH)
    parts = waterfall(plan, machine)
    by_op = {(op.kind, op.block): d.uncontended_s for op, d in zip(plan.ops, costs(plan, machine), strict=True)}
    edges_s = sum(by_op[kind, block] for kind in (Kind.LOAD, Kind.OFFLOAD_GRADIENT) for block in (0, 1))
    assert parts.link_s == 0
    # The first layer's copies overlap with the embedding's computing.
    assert 0.5 * edges_s < parts.fill_drain_and_launch_s <= edges_s * (1 + 1e-9)


@given(cases(), machines())
@settings(deadline=None, max_examples=40)
def test_more_of_what_is_never_short_saves_nothing(case, machine):
    machine = without(machine, SHARED, LAUNCH)
    saved = {s.resource: s.saved_fraction for s in sensitivities(case.plan, machine)}
    assert saved["host DRAM"] == pytest.approx(0, abs=NEGLIGIBLE)
    assert saved["launch and latency"] == pytest.approx(0, abs=NEGLIGIBLE)


@given(cases(), machines())
@settings(deadline=None, max_examples=40)
def test_where_ops_do_not_contend_no_gain_is_negative_and_none_exceeds_its_tenth(case, machine):
    found = sensitivities(case.plan, without(machine, SHARED))
    assert [s.resource for s in found] == [s.resource for s in sorted(found, key=lambda s: -s.saved_s)]
    assert {s.resource for s in found} == set(RESOURCES)
    for s in found:
        assert -NEGLIGIBLE <= s.saved_fraction <= 1 - 1 / 1.1 + NEGLIGIBLE


@pytest.mark.drawn
@given(cases(), machines())
@settings(deadline=None, max_examples=40)
def test_a_sensitivity_is_the_plan_simulated_again_with_a_tenth_more(case, machine):
    """Held against a profile written anew as JSON."""
    fields = machine.to_json()
    for curve in (fields["link"]["h2d"], fields["link"]["d2h"]):
        for point in curve["bytes_per_s"]:
            point["rate"]["value"] *= 1.1
    fields["link"]["duplex_bytes_per_s"]["value"] *= 1.1
    more = Profile.from_json(fields)
    link = next(s for s in sensitivities(case.plan, machine) if s.resource == "link")
    assert link.step_s == pytest.approx(step_s(case.plan, more), rel=1e-9)
    assert link.saved_s == pytest.approx(step_s(case.plan, machine) - step_s(case.plan, more), abs=1e-9 * link.step_s)


def test_the_waterfall_of_a_real_machine_reads_as_expected():
    """Deferring the updates hides most of what a barrier exposes, and keeping activations spares the recompute."""
    model, semantics = read_model("qwen2.5-0.5b"), Semantics(seq_len=1024, batch_size=8, micro_batch=8)
    workload, profile = build_workload(model, semantics), read_profile("h200-pcie5")

    def parts(policy):
        return waterfall(lower(model, workload, semantics, policy, profile.to_json()), profile)

    barrier = parts(Policy(update=Update.BARRIER))
    deferred = parts(Policy(update=Update.DEFERRED))
    kept = parts(Policy(save=saves(all=tuple(range(1, workload.n_layers + 1)))))
    assert barrier.optimizer_s > 1.3 * deferred.optimizer_s > 0
    assert barrier.recompute_s > 0 == kept.recompute_s
    assert barrier.ideal_compute_s == pytest.approx(kept.ideal_compute_s)


def test_rows_add_up_to_the_step():
    parts = waterfall(plan_of(Policy()), MADE_UP)
    rows = parts.rows()
    assert [row[0] for row in rows][:2] == ["ideal compute", "recompute"]
    assert len(rows) == 6
    assert all(len(row) == 4 for row in rows)
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.5)
    assert replace(parts, link_s=1e3).rows()[2][1] == "1000 s"
