"""Scaled profiles: only the rates of the scaled group differ."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.planner.predict.scaled_profile import SPEEDS, Group, faster, group_of
from tests.strategies import MADE_UP, cases, predicted


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_speed_of_a_profile_and_nothing_else_has_a_group(name):
    for place, _ in read_profile(name).quantities():
        key = next(part for part in reversed(place.split(".")) if not part.isdigit())
        is_size = key in {f"{part}_bytes" for part in ("memory", "context", "workspace", "runtime", "pool", "most")}
        is_speed = not is_size and not place.startswith(("price.", "link.host_cores_per_copy"))
        assert (group_of(place) is not None) == is_speed, place
        assert sum(place.startswith(begins) for _, begins in SPEEDS.values()) == is_speed, "no quantity is of two speeds"


@pytest.mark.parametrize("group", list(Group))
def test_only_the_group_moves_rates_up_and_times_down(group):
    original = dict(MADE_UP.quantities())
    scaled = dict(faster(MADE_UP, {group: 4.0}).quantities())
    assert list(original) == list(scaled)
    for place, quantity in original.items():
        is_time = place.endswith("latency_s") or place.endswith("overhead_s")
        factor = 1.0 if group_of(place) is not group else 0.25 if is_time else 4.0
        assert scaled[place].value == quantity.value * factor
        assert (scaled[place].spread_fraction, scaled[place].source) == (quantity.spread_fraction, quantity.source)


def test_a_machine_that_is_no_faster_is_the_same():
    assert faster(MADE_UP, {}) == MADE_UP
    assert faster(faster(MADE_UP, {Group.DRAM: 2.0}), {Group.DRAM: 0.5}) == MADE_UP


@given(cases(), st.sampled_from([0.5, 2.0, 8.0]))
@settings(deadline=None)
def test_a_machine_twice_as_fast_takes_half_as_long(case, factor):
    """This includes contention: a common factor only changes the unit of time."""
    uniformly = faster(MADE_UP, dict.fromkeys(Group, factor))
    assert predicted(case.plan, uniformly).step_s == pytest.approx(predicted(case.plan).step_s / factor, rel=1e-9)
