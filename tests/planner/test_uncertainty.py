"""Prediction intervals: widths from the spreads of a profile."""

import random
from dataclasses import replace
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.components import OpRatio
from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.compute_time import ACTIVATIONS, ACTIVATIONS_OFF_BY, CALLS, FAULTED_BYTES, FAULTS_OFF_BY
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.scaled_profile import Group, group_of, sped_up, with_quantities
from penstock.planner.predict.uncertainty import UNPROBED_P90, interval, off_by
from penstock.planner.show.waterfall import RESOURCES
from penstock.runtime.host import slabs
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from tests.lanes import examples
from tests.planner.test_waterfall import without
from tests.strategies import MADE_UP, cases, predicted
from tests.tiny import tiny_config


def probed(profile):
    """Return the profile as if a probe had measured its rates, so that the interval is that of its spreads."""
    fields = {"kind": "measured", "device": "made up", "scaled": False}
    return profile.model_copy(update={"sources": {name: s.model_copy(update=fields) for name, s in profile.sources.items()}})


MANY = 5  # samples: first and last are exactly the 10th and 90th percentile of one group


def spread(profile, fraction, *groups):
    """Return a probed profile with this spread for the quantities of the groups (default: all groups) and zero elsewhere."""
    inside = groups or tuple(Group)
    spread = lambda place: {"spread_fraction": fraction if group_of(place) in inside else 0.0}  # noqa: E731
    return with_quantities(probed(profile), lambda place, q: q.model_copy(update=spread(place)))


def width_s(prediction):
    return prediction.p90_step_s - prediction.p10_step_s


def small_plan(pointwise="eager"):
    model, semantics = read_model("qwen2.5-0.5b"), Semantics(seq_len=512, batch_size=8, micro_batch=8, pointwise=pointwise)
    profile = read_profile("h200-pcie5")
    return lower(model, build_workload(model, semantics), semantics, Policy(update="deferred"), profile.to_json()), profile


@given(cases(), st.integers(1, 8), st.integers(0, 100))
@settings(deadline=None, max_examples=examples(40))
def test_percentiles_are_in_order_and_a_seed_gives_them_again(case, n_draws, seed):
    result = interval(case.plan, MADE_UP, n_draws, seed)
    assert result.p10_step_s <= result.p50_step_s <= result.p90_step_s
    assert result == interval(case.plan, MADE_UP, n_draws, seed)
    assert (result.n_draws, result.seed) == (n_draws, seed)


@given(cases())
@settings(deadline=None, max_examples=examples(40))
def test_without_spreads_the_interval_is_the_prediction(case):
    result = interval(case.plan, spread(MADE_UP, 0.0), MANY)
    assert width_s(result) == 0
    assert result.p50_step_s == pytest.approx(predicted(case.plan).step_s, rel=1e-9)


@given(cases())
@settings(deadline=None, max_examples=examples(20))
def test_wider_spreads_make_a_wider_interval(case):
    widths_s = [width_s(interval(case.plan, spread(MADE_UP, f), 12)) for f in (0.01, 0.05, 0.25, 1.0)]
    assert widths_s == sorted(set(widths_s))


@given(cases(), st.sampled_from([0.02, 0.1, 0.5]), st.sampled_from([3, MANY, 15]))
@settings(deadline=None, max_examples=examples(40))
def test_of_speeds_that_move_together_the_interval_is_the_spread(case, fraction, n_draws):
    """Only compute takes time and all rates scale together: p10 and p90 differ from p50 by the spread."""
    free_groups = (RESOURCES[name] for name in ("link", "disk", "host DRAM", "optimizer"))
    bare = without(MADE_UP, *free_groups, (Group.LAUNCH, Group.ATTENTION, Group.DEVICE_MEMORY))
    alone_s = predicted(case.plan, bare).step_s
    result = interval(case.plan, spread(bare, fraction, *RESOURCES["device compute"]), n_draws)
    assert result.p50_step_s == pytest.approx(alone_s, rel=1e-6)
    if n_draws == MANY:
        assert result.p10_step_s == pytest.approx(alone_s / (1 + fraction), rel=1e-6)
        assert result.p90_step_s == pytest.approx(alone_s * (1 + fraction), rel=1e-6)


@given(cases(), st.integers(1, 8))
@settings(deadline=None, max_examples=examples(20))
def test_p90_of_a_machine_without_a_probe_is_later_by_what_own_steps_took(case, n_draws):
    """P10 and the median are those of the spreads. A datasheet's device of a probed host is not probed; a run's op times are."""
    bare, measured = interval(case.plan, MADE_UP, n_draws), interval(case.plan, probed(MADE_UP), n_draws)
    assert replace(bare, p90_step_s=bare.p90_step_s / UNPROBED_P90) == replace(
        measured, p90_step_s=pytest.approx(measured.p90_step_s)
    )
    ratios = (OpRatio(kind="forward", block=1, ratio=1.0, n_samples=4),)
    assert interval(case.plan, MADE_UP.model_copy(update={"op_ratios": ratios}), n_draws).p90_step_s < bare.p90_step_s


def test_shipped_profiles_are_probed_or_not():
    measured = {name for name in shipped_profiles() if read_profile(name).is_probed}
    assert measured == {"cpu-2core", "h100-16core", "h200-16core"}
    fields = read_profile("h100-sxm").to_json()
    fields["sources"]["host"] = fields["sources"]["ops_memory"] | {"kind": "measured"}
    assert not Profile.from_json(fields).is_probed, "measurements of its host alone"
    fields["sources"]["ops_memory"] |= {"kind": "measured", "scaled": True}
    assert not Profile.from_json(fields).is_probed, "measurements of another device"


def gridded(lowest, highest):
    """Return a profile without spreads, with grid corners as points. Products with few tokens have half the rate."""
    fields = MADE_UP.to_json()
    (product,), (attention,) = fields["device"]["matmul"]["bf16"], fields["device"]["attention"]["flash"]["bf16"]
    rates = {lowest: {"value": 1e12}, highest: {"value": 2e12}}
    corners = [(a, b) for a in rates for b in rates]
    rate = product["flop_per_s"]
    fields["device"]["matmul"]["bf16"] = [product | {"m": m, "k": k, "n": k, "flop_per_s": rate | rates[m]} for m, k in corners]
    fields["device"]["attention"]["flash"]["bf16"] = [attention | {"head_dim": h, "seq_len": n} for h, n in corners]
    fields["device"]["fused_bytes_per_s"] = fields["device"]["memory_bytes_per_s"]
    return spread(Profile.from_json(fields), 0.0)


def test_compiled_activations_that_no_probe_timed_widen():
    """The estimated activation time may be off by `ACTIVATIONS_OFF_BY`; all other quantities have no spread."""
    plan, _ = small_plan(pointwise="fused")
    timed = gridded(1, 2**20)
    fields = timed.to_json()
    del fields["device"]["fused_bytes_per_s"]
    untimed, block, semantics = Profile.from_json(fields), plan.workload.blocks[1], plan.semantics
    assert width_s(interval(plan, timed, MANY)) == 0 < width_s(interval(plan, untimed, MANY))
    slower = CostModel(untimed, longer_outside={ACTIVATIONS: ACTIVATIONS_OFF_BY})
    seconds = [cost.forward_s(block, semantics) for cost in (CostModel(timed), CostModel(untimed), slower)]
    fused_s = (block.fused_bytes - block.norm_bytes) / timed.device.memory_bytes_per_s.value
    assert fused_s > 0
    assert [s - seconds[0] for s in seconds] == pytest.approx([0, 0, (ACTIVATIONS_OFF_BY - 1) * fused_s])
    assert [*slower.outside] == [ACTIVATIONS]


def test_outside_a_grid_a_rate_is_as_unsure_as_the_grids_edge():
    plan, _ = small_plan()
    inside, outside = gridded(1, 2**20), gridded(64, 256)
    assert off_by(inside, "bf16", None) == off_by(outside, "bf16", None) == pytest.approx(2)
    assert off_by(outside, "bf16", (32, 64)) == off_by(outside, "bf16", (512, 64)) == pytest.approx(2)
    assert off_by(outside, "bf16", (128, 512)) == 1  # rates are independent of this dimension
    assert off_by(outside, "bf16", (128, 128)) == pytest.approx(2), "in a gap: as doubtful as the worst edge"
    assert off_by(MADE_UP, "bf16", None) == 1  # no slope from a single point
    assert width_s(interval(plan, inside, MANY)) == 0
    result = interval(plan, outside, MANY)
    assert result.p50_step_s == pytest.approx(predicted(plan, outside).step_s, rel=1e-9)
    assert 1.2 < result.p90_step_s / result.p50_step_s < 2
    assert 1.2 < result.p50_step_s / result.p10_step_s < 2


def test_large_logits_on_a_cpu_take_new_pages_and_widen():
    """Vocabulary of 152,000 tokens; with 8 instead of 64 tokens the logits cause no page faults."""
    assert FAULTED_BYTES == slabs.LARGE_BYTES
    model, profile, name = read_model("qwen2.5-0.5b"), read_profile("cpu-2core"), "page faults of 38.9 MB logits"
    seconds = {}
    for seq_len, factor in ((8, 1.0), (64, 1.0), (64, FAULTS_OFF_BY), (64, 0.0)):
        semantics, cost = Semantics(seq_len=seq_len, batch_size=1, micro_batch=1), CostModel(profile, longer_outside={name: factor})
        seconds[seq_len, factor] = cost.loss_s(build_workload(model, semantics).blocks[-1], semantics)
        assert {k: by for k, by in cost.outside.items() if "faults" in k} == ({name: FAULTS_OFF_BY} if seq_len == 64 else {})
    pages_s = 64 * 151_936 * 20 * 10 / profile.device.memory_bytes_per_s.value
    assert seconds[64, 1.0] - seconds[64, 0.0] == pytest.approx(pages_s)
    assert seconds[64, FAULTS_OFF_BY] - seconds[64, 1.0] == pytest.approx((FAULTS_OFF_BY - 1) * pages_s)


@pytest.mark.parametrize(
    ("machine", "hidden_size", "is_wide"), [("cpu-2core", 64, True), ("cpu-2core", 1024, False), ("h100-sxm", 64, False)]
)
def test_of_small_models_on_a_cpu_pythons_time_widens(machine, hidden_size, is_wide):
    config = tiny_config("qwen3", vocab_size=32 * hidden_size, hidden_size=hidden_size, intermediate_size=4 * hidden_size)
    model, profile = Model(config), spread(read_profile(machine), 0.0)
    semantics, cost = Semantics(seq_len=128, batch_size=4, micro_batch=4), CostModel(profile)
    plan = lower(model, build_workload(model, semantics), semantics, Policy(), profile.to_json())
    cost.demands(plan)
    assert (CALLS in cost.outside) == is_wide
    assert not is_wide or interval(plan, profile).p90_step_s > 2 * predicted(plan, profile).step_s


@pytest.mark.parametrize("machine", ["h100-sxm", "cpu-2core"])
def test_beyond_a_shipped_grid_a_product_is_off_by_over_a_tenth(machine):
    assert 1.1 < off_by(read_profile(machine), "bf16", None) < 3


@pytest.mark.slow
def test_the_interval_is_that_of_plain_sampling():
    """Compare with independent samples of the profile."""
    plan, profile = small_plan()
    rng, steps_s = random.Random(3), []
    for _ in range(100):
        z = {group: rng.gauss(0, 1) / 1.2815515655446004 for group in Group} | {None: 0.0}
        moved = with_quantities(profile, lambda place, q: sped_up(place, q, (1 + q.spread_fraction) ** z[group_of(place)]))  # noqa: B023
        steps_s.append(predicted(plan, moved).step_s)
    tenths = quantiles(steps_s, n=10)
    result = interval(plan, probed(profile), 64)
    percentiles = result.p10_step_s, result.p50_step_s, result.p90_step_s
    assert percentiles == pytest.approx((tenths[0], tenths[4], tenths[8]), rel=0.04)
