"""Does what is said to be missing make it fit?"""

import re
from dataclasses import replace

import pytest

from hwprofiles.schema import read_profile
from planner.memory import footprint, frame
from planner.remedy import MAX_PLAN_OPS, Request, does_not_fit, most_ops
from planner.search import search
from planner.space import policies
from planner.workload import build_workload, read_model
from runtime.errors import DoesNotFitError
from runtime.plan import Policy, Semantics
from runtime.units import GB, MB, parse_bytes

MODEL = read_model("qwen2.5-0.5b")
SEMANTICS = Semantics(seq_len=1024, batch_size=8, micro_batch=1)
DESKTOP = read_profile("rtx4090-desktop")
# What policies need lies between 4.56 GB on the device with 15.1 GB on the host, and 13.7 GB on the host with more on the device.
SIZES = [(n_device * 10 * MB, n_host * 10 * MB) for n_device in (100, 458, 600) for n_host in (600, 1400, 1510, 10000)]


def refusal(profile, semantics=SEMANTICS, fixed=None):
    """What a search would be told; None where a policy fits."""
    found = needs_of(profile, semantics, fixed)
    return None if any(n.fits for n in found) else does_not_fit(Request(MODEL, semantics, profile, fixed, False), found)


def needs_of(profile, semantics=SEMANTICS, fixed=None):
    workload = build_workload(MODEL, semantics)
    if fixed is not None:
        return [footprint(frame(MODEL, workload, semantics, fixed), profile)]
    return [needs for _, needs in policies(MODEL, workload, semantics, profile)]


def sizes_in(change):
    """The memory sizes that a change names, by place."""
    return {place: parse_bytes(size) for place, size in re.findall(r"--(device|host)-memory (\w+)", change)}


@pytest.mark.parametrize(("device", "host"), SIZES)
@pytest.mark.parametrize("fixed", [None, Policy(spill_blocks=tuple(range(23)))])
def test_the_missing_bytes_and_the_change_of_memory_are_those_of_the_nearest_policy(device, host, fixed):
    profile = DESKTOP.with_memory(device, host)
    error = refusal(profile, fixed=fixed)
    if error is None:
        return
    short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
    named = sizes_in(error.smallest_change)
    assert {place for place, n_bytes in short.items() if n_bytes} == set(named), str(error)
    # A device is what it is: it is called too small only where no policy fits it.
    assert bool(error.short_device_bytes) == all(needs.short_device_bytes for needs in needs_of(profile, fixed=fixed))
    has = {"device": device, "host": host}
    for place, n_bytes in named.items():
        assert has[place] + short[place] <= n_bytes < has[place] + short[place] + 10 * GB
    assert refusal(DESKTOP.with_memory(device + short["device"], host + short["host"]), fixed=fixed) is None
    assert refusal(DESKTOP.with_memory(named.get("device", device), named.get("host", host)), fixed=fixed) is None


def test_a_host_that_is_a_little_short_is_not_called_a_device_that_is_much_too_small():
    """Boundaries of long sequences do not fit the device; spilled, they miss the host by 14.5 GB: that is what can be bought."""
    model, semantics = read_model("qwen3-8b"), Semantics(seq_len=4096, batch_size=16, micro_batch=2)
    with pytest.raises(DoesNotFitError) as caught:
        search(model, build_workload(model, semantics), semantics, DESKTOP)
    assert caught.value.short_device_bytes == 0
    assert "qwen3-8b does not fit rtx4090-desktop: host memory is 14.5 GB short" in str(caught.value)
    assert "--host-memory 140GB" in caught.value.smallest_change
    assert "--device-memory" not in caught.value.smallest_change


def test_the_change_of_memory_is_named_however_many_others_fit():
    semantics = replace(SEMANTICS, gradient_dtype="fp32", clip_norm=1.0, on_nonfinite="stop")
    enough = min(needs.host_peak_bytes for needs in needs_of(DESKTOP, semantics))
    error = refusal(DESKTOP.with_memory(None, enough - 1), semantics)
    assert error is not None
    assert error.short_host_bytes == 1
    assert error.smallest_change.count(", or ") == 2
    assert sizes_in(error.smallest_change)["host"] >= enough


def test_no_change_is_proposed_that_makes_a_plan_too_long_to_write():
    semantics = replace(SEMANTICS, batch_size=2**14)
    workload = build_workload(MODEL, semantics)
    assert most_ops(workload, semantics) > MAX_PLAN_OPS
    profile = DESKTOP.with_memory(None, GB)
    found = [footprint(frame(MODEL, workload, semantics, Policy()), profile)]
    error = does_not_fit(Request(MODEL, semantics, profile, Policy(), False), found)
    assert "none of those tried" in error.smallest_change
