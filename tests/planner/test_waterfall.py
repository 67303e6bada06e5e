"""Waterfall of a step: sum and meaning of its parts."""

from dataclasses import asdict
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.lower import lower
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.search.tuning import MAX_STEPS
from penstock.planner.show.waterfall import FREE, RESOURCES, gains, waterfall
from penstock.runtime.plan import Policy, Semantics, Update, saves
from penstock.runtime.plan.train import Train
from penstock.runtime.plan.workload import Saved
from tests.lanes import examples
from tests.strategies import MADE_UP, MODEL, PROFILE, cases, predicted, small_workload

COMPUTE, LINK, DISK, DRAM, OPTIMIZER, LAUNCH = RESOURCES.values()
NEGLIGIBLE = 1e-8  # fraction of a step
SHARED = (Group.DUPLEX, Group.DRAM)  # sources of contention between ops
KEEPING = Policy(save=saves(all=tuple(range(1, 7))), update=Update.DEFERRED)
examples = settings(deadline=None, max_examples=examples(40))


def without(profile, *burdens):
    return faster(profile, {group: FREE for groups in burdens for group in groups})


def step_s(plan, profile):
    return predicted(plan, profile, MAX_STEPS).step_s


def plan_of(policy, n_layers=6, n_micro_batches=2):
    semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1)
    return lower(MODEL, small_workload(n_layers, tied=False), semantics, policy, PROFILE)


@st.composite
def machines(draw):
    """Generate the made-up machine with rates scaled by 1/1000 to 1000."""
    return faster(MADE_UP, {group: 10.0 ** draw(st.integers(-3, 3)) for group in Group})


@examples
@given(cases(), machines())
def test_the_parts_are_the_predicted_step_and_none_is_negative(case, machine):
    parts = waterfall(case.plan, machine)
    assert sum(asdict(parts).values()) == pytest.approx(step_s(case.plan, machine), rel=1e-12)
    assert all(part_s >= 0 for part_s in asdict(parts).values())


@examples
@given(cases().filter(lambda case: case.semantics.ranks == 1), machines())
def test_what_is_free_has_no_part_in_the_step(case, machine):
    assume(not case.policy.device_blocks)  # known gap: the GPU's idle time around its updates counts as fill and drain
    burdens_of = {"link_s": (LINK, DISK), "host_dram_s": (DRAM,), "optimizer_s": (OPTIMIZER, DRAM)}
    for key, burdens in (burdens_of | {"fill_drain_and_launch_s": (LAUNCH, LINK, DISK, DRAM)}).items():
        parts = waterfall(case.plan, without(machine, *burdens))
        assert asdict(parts)[key] <= NEGLIGIBLE * parts.step_s, key
    alone = without(machine, LINK, DISK, DRAM, OPTIMIZER, LAUNCH)
    parts = waterfall(case.plan, alone)
    assert parts.ideal_compute_s + parts.recompute_s == pytest.approx(step_s(case.plan, alone), rel=NEGLIGIBLE)


@examples
@given(cases(), machines())
def test_recompute_is_what_is_computed_a_second_time(case, machine):
    """Sum layer recomputation, forwards from the previous boundary, and device copies of offloaded activations."""
    plan, policy, semantics = case.plan, case.policy, case.semantics
    cost, again_s = CostModel(without(machine, LAUNCH)), 0.0
    first, stride, n_layers = case.workload.first_trained, policy.boundary_stride, case.workload.n_layers
    for m, b in product(range(semantics.n_micro_batches), range(1, n_layers + 1)):
        block = plan.blocks_of(m)[b]
        if policy.saved(b) is not Saved.ALL and b >= first:
            again_s += cost.recompute_s(block, block.recompute(plan.policy.saved(b)), plan.semantics)
        next_kept = min(-(-b // stride) * stride, n_layers)
        if b != next_kept and next_kept >= first:
            again_s += cost.forward_s(block, plan.semantics)
        if b in policy.offload_blocks:
            again_s += 2 * plan.recompute(b, m).copied_bytes / machine.device.memory_bytes_per_s.value
    parts = waterfall(plan, machine)
    assert parts.recompute_s == pytest.approx(again_s, rel=1e-6, abs=NEGLIGIBLE * parts.step_s)


@pytest.mark.parametrize(
    ("slow", "key", "resource"),
    [
        (COMPUTE, "ideal_compute_s", "device compute"),
        (LINK, "link_s", "link"),
        (OPTIMIZER, "optimizer_s", "optimizer"),
        (LAUNCH, "fill_drain_and_launch_s", "launch and latency"),
        (DISK, "link_s", "disk"),
    ],
)
def test_what_is_slow_has_the_largest_part_and_the_largest_gain(slow, key, resource):
    plan, machine = plan_of(KEEPING), faster(MADE_UP, dict.fromkeys(slow, 1e-6))
    if slow is DISK:
        s = Semantics(4, 2, 1, train=Train(layers=(5, 5)))
        plan = lower(MODEL, small_workload(6, tied=False, train=s.train), s, Policy(disk_blocks=(1, 2, 3, 4)), PROFILE)
    parts, ranked = asdict(waterfall(plan, machine)), gains(plan, machine)
    assert max(parts, key=parts.__getitem__) == key
    assert ranked[0].resource == resource
    assert ranked[0].saved_fraction == pytest.approx(1 - 1 / 1.1, abs=0.02)  # the step uses only this resource


def test_a_shortage_of_host_memory_rate_is_a_part_of_its_own():
    """Updates use 8.4 GB/s and loads of the next forward about 2, of 8.5 GB/s of host DRAM."""
    plan = plan_of(Policy(save=KEEPING.save, update=Update.DEFERRED, prefetch_depth=3))
    factors = {Group.DRAM: 0.085, Group.UPLOAD: 100.0, Group.DOWNLOAD: 100.0, Group.OPTIMIZER: 0.3, Group.REDUCE: 0.8}
    machine = without(faster(MADE_UP, factors), COMPUTE, LAUNCH)
    short, plenty = waterfall(plan, machine), waterfall(plan, without(machine, DRAM))
    assert short.host_dram_s > 0.01 * short.step_s > plenty.host_dram_s == 0
    assert {gain.resource: gain.saved_s for gain in gains(plan, machine)}["host DRAM"] > 0.001 * short.step_s
    assert short.optimizer_s == pytest.approx(plenty.optimizer_s)
    assert short.link_s == pytest.approx(plenty.link_s)


@examples
@given(cases(), machines())
def test_a_gain_is_the_plan_simulated_again_with_a_tenth_more(case, machine):
    """Compare with a profile changed in JSON; without contention gains are between zero and 1 - 1/1.1."""
    fields = machine.to_json()
    for curve in (fields["link"]["h2d"], fields["link"]["d2h"]):
        for point in curve["bytes_per_s"]:
            point["rate"]["value"] *= 1.1
    fields["link"]["duplex_bytes_per_s"]["value"] *= 1.1
    link = next(gain for gain in gains(case.plan, machine) if gain.resource == "link")
    assert link.step_s == pytest.approx(step_s(case.plan, Profile.from_json(fields)), rel=1e-9)
    ranked = gains(case.plan, without(machine, SHARED))
    assert [gain.saved_s for gain in ranked] == sorted((gain.saved_s for gain in ranked), reverse=True)
    assert {gain.resource for gain in ranked} == {name for name in RESOURCES if name != "disk" or case.policy.disk_blocks}
    assert all(-NEGLIGIBLE <= gain.saved_fraction <= 1 - 1 / 1.1 + NEGLIGIBLE for gain in ranked)
