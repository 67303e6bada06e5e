"""Recalibration: corrected wrong rates, unchanged correct rates, and reported undetermined rates."""

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.emulated import EmulatedMachine
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, costs, region_of
from penstock.planner.predict.recalibrate import RESOURCES, recalibrate
from penstock.planner.predict.regression import BELIEF, LEAST_GAIN, fit_factors
from penstock.planner.predict.scaled_profile import sped_up, with_quantities
from penstock.planner.predict.simulate import simulate
from penstock.runtime.errors import PlanError, ProfileError
from penstock.runtime.executor import execute
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Policy, Semantics, Update
from penstock.runtime.plan.region import Demand
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.plan.workload import Model
from tests.strategies import MADE_UP, cases
from tests.tiny import tiny_config
from tests.training import machine_for, plan_of, semantics_of

NEAR = 0.03  # relative tolerance of a factor: repeatability of the probe
N_LAYERS = 6
RUN, DAY = "demo/out", "2026-11-20"


def real_plan(machine="h200-pcie5", policy=None, seq_len=1024):
    model = Model(read_model("qwen2.5-0.5b").config | {"num_hidden_layers": N_LAYERS})
    semantics = Semantics(seq_len=seq_len, batch_size=16, micro_batch=8)
    profile = read_profile(machine)
    policy = policy or Policy(accumulation_group=2, update=Update.DEFERRED)
    return lower(model, build_workload(model, semantics), semantics, policy, profile.to_json()), profile


def as_if(profile, factors):
    """Scale the rates of each named resource by its factor. All plans here use flash attention."""
    by_place = {place.format(dtype="bf16", attention="flash"): f for name, f in factors.items() for place in RESOURCES[name]}

    def change(place, quantity):
        factor = next((f for begins, f in by_place.items() if place.startswith(begins)), None)
        return quantity if factor is None else sped_up(place, quantity, factor)

    return with_quantities(profile, change)


def performed(plan, profile, jitter=lambda op: 1.0, clipped=False, n_steps=12):
    """Simulate the plan on this profile, with the duration of each op scaled by `jitter(op)`."""
    demands = CostModel(profile, clipped=clipped).demands(plan)
    slower = [Demand(d.overhead_s, d.alone_s * jitter(op), d.uses) for op, d in zip(plan.ops, demands, strict=True)]
    return simulate(plan, slower, region_of(profile), n_steps)


PRODUCTS, REDUCE = "matrix products, {dtype}", "sums and norms on the host"
UP, DOWN = "rate of uploads", "rate of downloads"
WRONG = [("h200-pcie5", {PRODUCTS: 0.7}), ("h200-pcie5", {UP: 0.5, "optimizer": 1.3}), ("gh200", {"host DRAM": 0.6})]
WRONG += [("cpu-2core", {DOWN: 0.6, REDUCE: 1.5}), ("cpu-2core", {UP: 2.0, PRODUCTS: 0.5, "optimizer": 0.4})]


@pytest.mark.fast("some")
@pytest.mark.parametrize(("machine", "factors"), WRONG, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_factors_of_a_machine_unlike_its_profile_are_found(machine, factors):
    """Recalibration finds exactly the wrong factors and the step time; contention is not mistaken for a slow machine."""
    plan, profile = real_plan(machine)
    prediction = performed(plan, as_if(profile, factors))
    result = recalibrate(plan, prediction.timeline, RUN, DAY)
    changes = {change.resource: change.factor for change in result.changes}
    assert changes == {name.format(dtype="bf16"): pytest.approx(factor, rel=NEAR) for name, factor in factors.items()}
    assert result.measured_step_s == pytest.approx(prediction.step_s)
    assert result.step_after_s == pytest.approx(prediction.step_s, rel=0.02)
    assert simulate(plan, costs(plan, result.profile), region_of(result.profile)).step_s == pytest.approx(result.step_after_s)


@pytest.mark.fast("some")
@pytest.mark.parametrize(("resource", "factor"), [*product(RESOURCES, [0.6]), *product((UP, "optimizer", PRODUCTS), [1.8])])
def test_whatever_is_wrong_the_step_is_right_afterwards(resource, factor):
    """This holds for indistinguishable causes, too; the spreads are wide then."""
    plan, profile = real_plan(seq_len=2048)
    prediction = performed(plan, as_if(profile, {resource: factor}))
    result = recalibrate(plan, prediction.timeline, RUN, DAY)
    assert result.step_after_s == pytest.approx(prediction.step_s, rel=0.02)
    name = resource.format(dtype="bf16")
    for change in result.changes:
        wide = 2.5 * math.log1p(change.spread_fraction) + NEAR
        off = math.log(change.factor / (factor if change.resource == name else 1.0))
        assert off < wide
        assert off > -wide or factor > 1  # speedups are invisible if another resource limits the ops
    assert name not in result.confirmed


@pytest.mark.fast("some")
@pytest.mark.parametrize("machine", ["h200-pcie5", "gh200", "cpu-2core"])
def test_a_run_that_went_as_predicted_changes_nothing(machine):
    plan, profile = real_plan(machine)
    result = recalibrate(plan, performed(plan, profile).timeline, RUN, DAY)
    assert result.profile == profile
    assert result.changes == ()
    assert result.step_after_s == result.step_before_s == pytest.approx(result.measured_step_s)
    assert any("no changes" in line for line in result.words())
    assert {*result.confirmed, *result.undetermined} == {name.format(dtype="bf16") for name in RESOURCES}
    assert f"matrix products, {plan.semantics.compute_dtype}" in result.confirmed


@pytest.mark.soak
def test_updates_repeated_by_clipping_are_no_slow_machine():
    policy = Policy(accumulation_group=2, update=Update.DEFERRED, speculate_blocks=tuple(range(1, N_LAYERS + 1)))
    plan, profile = real_plan(policy=policy)
    result = recalibrate(plan, performed(plan, profile, clipped=True).timeline, RUN, DAY)
    assert result.changes == ()
    slow = performed(plan, as_if(profile, {"optimizer": 0.2}), clipped=True)
    result = recalibrate(plan, slow.timeline, RUN, DAY)
    assert {change.resource: change.factor for change in result.changes} == {"optimizer": pytest.approx(0.2, rel=NEAR)}
    assert result.step_after_s == pytest.approx(slow.step_s, rel=0.001)
    assert performed(plan, as_if(profile, {"optimizer": 0.2})).step_s < 0.9 * slow.step_s, "it matters"


@pytest.mark.drawn
@given(cases(max_layers=3, max_micro_batches=2), st.integers(0, 2**32))
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate])
def test_the_corrected_profile_never_predicts_the_step_worse(case, seed):
    """Op durations have independent random factors."""
    rng, profile = random.Random(seed), MADE_UP
    timeline = performed(case.plan, profile, lambda op: math.exp(rng.gauss(0.3, 0.7))).timeline
    result = recalibrate(case.plan, timeline, RUN, DAY)
    errors = [abs(math.log(s / result.measured_step_s)) for s in (result.step_before_s, result.step_after_s)]
    assert errors[1] <= errors[0]
    assert Profile.from_json(result.profile.to_json()) == result.profile
    corrected_s = simulate(case.plan, costs(case.plan, result.profile), region_of(result.profile)).step_s
    assert corrected_s == pytest.approx(result.step_after_s)


def test_the_profile_says_where_each_corrected_number_comes_from():
    plan, profile = real_plan()
    once = recalibrate(plan, performed(plan, as_if(profile, {UP: 0.5})).timeline, RUN, DAY, "NVIDIA H200").profile
    source = once.sources["recalibrated"]
    assert (source.kind, str(source.date), source.device, source.scaled) == ("fitted", DAY, "NVIDIA H200", False)
    assert RUN in source.detail
    corrected = [place for place, quantity in once.quantities() if quantity.source == "recalibrated"]
    assert corrected == [f"link.h2d.bytes_per_s.{i}.rate" for i in range(len(profile.link.h2d.bytes_per_s))]
    again = replace(plan, profile=once.to_json())
    twice = recalibrate(again, performed(again, as_if(once, {DOWN: 0.5})).timeline, RUN, DAY).profile
    assert twice.link.h2d == once.link.h2d
    assert twice.link.d2h.bytes_per_s[0].rate.source == "recalibrated-2"
    assert twice.sources["recalibrated"] == once.sources["recalibrated"]


def test_a_timeline_of_a_single_step_is_one_line():
    plan, profile = real_plan()
    timeline = performed(plan, as_if(profile, {PRODUCTS: 0.5}), n_steps=6).timeline
    with pytest.raises(PlanError, match=r"timeline.*$") as caught:
        recalibrate(plan, Timeline(tuple(s for s in timeline.spans if s.step == 0)), RUN, DAY)
    assert "\n" not in str(caught.value)
    with pytest.raises(ProfileError):
        recalibrate(replace(plan, profile={}), timeline, RUN, DAY)


def test_the_fewest_factors_explain_and_the_others_are_unsure():
    """Two factors have identical slopes, a third is separate; compare with the least-squares solution."""
    slopes = [(-1.0, -1.0, 0.0), (-1.0, -1.0, 0.0), (0.0, 0.0, -0.5)]

    def model(logs):
        return [sum(s * x for s, x in zip(slope, logs, strict=True)) for slope in slopes]

    logs, deviations = fit_factors(np.array([0.2, 0.2, -0.15]), np.full(3, 5.0), np.array(["a", "a", "b"]), 3, model)
    assert sorted(logs[:2]) == pytest.approx([-0.2, 0.0], abs=0.01)
    assert logs[2] == pytest.approx(0.3, abs=0.01)
    assert deviations[0] == deviations[1] == pytest.approx(BELIEF / math.sqrt(2), rel=0.01)
    assert deviations[2] < 0.05
    one, kind = np.array([1.0]), np.array(["a"])
    assert fit_factors(np.array([0.0]), one, kind, 1, lambda logs: [0.0])[1] == (BELIEF,)
    fitted = fit_factors(np.array([0.01]), one, kind, 1, lambda logs: [-logs[0]])[0]
    assert fitted == (0.0,), f"a square of {LEAST_GAIN} is not reached"


def test_an_emulated_machine_with_another_link_is_recalibrated():
    """Times are in emulated seconds. Ops last at least their demands, so a fivefold slower link is visible on any computer."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(update=Update.DEFERRED))
    slow = as_if(MADE_UP, {UP: 0.2})
    loads_s = sum(d.uncontended_s for op, d in zip(plan.ops, costs(plan, MADE_UP), strict=True) if op.kind is Kind.LOAD)
    scale = 0.1 / loads_s  # half a second of loads per step at a fifth of the rate
    store = machine_for(plan, TorchMachine)
    timeline = execute(plan, EmulatedMachine(store, costs(plan, slow), region_of(slow), scale), 3)
    in_its_seconds = Timeline(tuple(replace(s, start_s=s.start_s / scale, end_s=s.end_s / scale) for s in timeline.spans))
    fit = recalibrate(plan, in_its_seconds, RUN, DAY)
    assert fit.measured_step_s > 0
    assert abs(math.log(fit.step_after_s / fit.measured_step_s)) <= abs(math.log(fit.step_before_s / fit.measured_step_s))
