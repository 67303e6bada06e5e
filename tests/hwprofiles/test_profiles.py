"""Profiles: content of the shipped ones, interpolation, and errors of invalid ones."""

import json
import math
from copy import deepcopy
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.outputs import json_text
from penstock.hwprofiles.components import AttentionCall
from penstock.hwprofiles.instructions import ADVICE, instruction_set, plan_advice, run_advice
from penstock.hwprofiles.quantity import SOURCE_KINDS
from penstock.hwprofiles.schema import FOLDER, Profile, read_profile, shipped_profiles
from penstock.runtime.errors import ProfileError

NAMES = shipped_profiles()
PROBED = "cpu-2core"
ON_REAL_MACHINES = (PROBED, "h100-16core", "h200-16core")
ANY_PROFILE = pytest.mark.parametrize("name", NAMES)
profiles = st.sampled_from([read_profile(name) for name in NAMES])
dtypes = st.sampled_from(["bf16", "fp32"])
sizes = st.integers(min_value=1, max_value=10**7)
widths = st.integers(min_value=1, max_value=300_000)
directions = st.sampled_from(["h2d", "d2h"])


def fields_of(name: str = "h200-pcie5") -> dict[str, Any]:
    return deepcopy(read_profile(name).to_json())


def quantity(value: float) -> dict[str, Any]:
    return {"value": value, "spread_fraction": 0.1, "source": "team"}


def attention(profile: Profile, dtype: Any, seq_len: int, head_dim: int, backward: bool = False, kernel: Any = "flash") -> Any:
    return profile.attention_rate(AttentionCall(dtype, seq_len, head_dim, grouped=False), backward, kernel)


def numbers(value: object, place: str = "") -> list[str]:
    """Return the keys of all quantities in JSON values, found without the schema."""
    if isinstance(value, dict):
        keys = [place] if "spread_fraction" in value else []
        return keys + [p for key, item in value.items() for p in numbers(item, f"{place}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in numbers(item, f"{place}.{i}")]
    return []


def holder_of(fields: dict[str, Any], place: str) -> tuple[Any, Any]:
    """Return the container of the value with this dotted key, and its key in the container."""
    *parents, key = place.split(".")
    for parent in parents:
        fields = fields[int(parent)] if isinstance(fields, list) else fields[parent]
    return fields, key


def refusal(fields: dict[str, Any]) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(fields, "mine.json")
    text = str(caught.value)
    assert text.startswith("mine.json: ")
    assert "\n" not in text
    assert len(text) < 400
    return text


@ANY_PROFILE
def test_a_shipped_profile_is_its_file_to_the_letter(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert Profile.from_json(profile.to_json()) == profile
    assert json_text(profile.to_json()) == (FOLDER / f"{name}.json").read_text()


@ANY_PROFILE
def test_every_number_has_a_source_and_is_counted(name: str) -> None:
    profile = read_profile(name)
    assert sorted(place for place, _ in profile.quantities()) == sorted(numbers(profile.to_json()))
    counts = profile.count_sources()
    assert list(counts) == list(SOURCE_KINDS)
    assert sum(counts.values()) == len(numbers(profile.to_json()))
    assert {q.source for _, q in profile.quantities()} == set(profile.sources), "a source that nothing rests on"


@ANY_PROFILE
def test_only_the_probed_machine_calls_a_number_measured(name: str) -> None:
    profile = read_profile(name)
    assert profile.count_sources()["measured"] == 0 or name in ON_REAL_MACHINES
    for source in profile.sources.values():
        assert source.kind != "measured" or (source.date and source.device and source.driver)
        assert source.kind in ("measured", "user") or len(source.detail) > 25
    for place, q in profile.quantities():  # rates only: a chosen memory size is exact
        if profile.sources[q.source].kind == "assumed" and q.value > 0 and "_per_s" in place:
            assert q.spread_fraction >= 0.08, place


@ANY_PROFILE
def test_a_shipped_machine_is_consistent_with_itself(name: str) -> None:
    """Optimizer traffic is within the memory rate, and the duplex rate within the sum of both directions."""
    profile = read_profile(name)
    link, host = profile.link, profile.host
    assert max(p.params_per_s.value for p in host.optimizer) * 28 <= host.dram_bytes_per_s.value
    alone = sum(max(p.rate.value for p in curve.bytes_per_s) for curve in (link.h2d, link.d2h))
    assert link.duplex_bytes_per_s.value <= alone * 1.2
    assert profile.device.context_bytes.value < profile.device.memory_bytes.value
    assert (profile.device.compute_threads is None) == (profile.device.kind == "cuda")


# -- interpolation ----------------------------------------------------------------------------------------------------


@given(profiles, dtypes, sizes, widths, widths, sizes, widths)
def test_more_tokens_and_wider_products_take_longer(profile, dtype, m, k, n, more_m, more_n):
    def seconds(m, k, n):
        return 2 * m * k * n / profile.matmul_rate(dtype, m, k, n).value

    assert seconds(m + more_m, k, n) >= seconds(m, k, n) * (1 - 1e-9)
    assert seconds(m, k, n + more_n) >= seconds(m, k, n) * (1 - 1e-9)


@given(dtypes, sizes, widths, widths)
def test_a_rate_is_between_those_of_the_points(dtype, m, k, n):
    profile = read_profile(PROBED)
    rates = [p.flop_per_s.value for p in profile.device.matmul[dtype]]
    assert min(rates) * (1 - 1e-9) <= profile.matmul_rate(dtype, m, k, n).value <= max(rates) * (1 + 1e-9)


def test_at_a_point_alone_at_its_width_the_rate_is_the_point() -> None:
    profile = read_profile(PROBED)
    for dtype, points in profile.device.matmul.items():
        alone = [p for p in points if sum(q.m == p.m and q.k * q.n == p.k * p.n for q in points) == 1]
        assert len(alone) > 1
        for p in alone:
            assert profile.matmul_rate(dtype, p.m, p.k, p.n) == (pytest.approx(p.flop_per_s.value), True)
    for dtype, grid in profile.device.attention["flash"].items():
        for a in grid:
            assert attention(profile, dtype, a.seq_len, a.head_dim) == (pytest.approx(a.forward_flop_per_s.value), True)
            assert attention(profile, dtype, a.seq_len, a.head_dim, True) == (pytest.approx(a.backward_flop_per_s.value), True)


def test_halfway_in_logarithms_is_the_geometric_mean() -> None:
    fields = fields_of()
    corners = {(100, 100): 1e12, (100, 400): 2e12, (400, 100): 3e12, (400, 400): 5e12}
    points = [{"m": m, "k": w, "n": w, "flop_per_s": quantity(value)} for (m, w), value in corners.items()]
    fields["device"]["matmul"]["bf16"] = points
    profile = Profile.from_json(fields)
    assert profile.matmul_rate("bf16", 200, 100, 400) == (pytest.approx((1e12 * 2e12 * 3e12 * 5e12) ** 0.25), True)
    assert profile.matmul_rate("bf16", 200, 100, 100) == (pytest.approx((1e12 * 3e12) ** 0.5), True)


def test_outside_the_points_the_nearest_holds_and_is_flagged() -> None:
    profile = read_profile(PROBED)
    largest = profile.matmul_rate("bf16", 4096, 1024, 1024)
    assert profile.matmul_rate("bf16", 10**6, 1024, 1024) == (largest.value, False)
    assert profile.matmul_rate("bf16", 4096, 1024, 10**6) == (largest.value, False)
    assert not attention(profile, "bf16", 10**6, 128)[1]
    assert not attention(profile, "bf16", 1024, 256)[1]
    assert attention(profile, "bf16", 1500, 96, backward=True)[1]


@given(profiles, directions, st.integers(min_value=0, max_value=10**12), st.integers(min_value=1, max_value=10**12))
def test_a_copy_takes_latency_and_bytes_and_more_take_longer(profile, direction, n_bytes, extra):
    curve = profile.link.h2d if direction == "h2d" else profile.link.d2h
    rates, rate = [p.rate.value for p in curve.bytes_per_s], profile.copy_bytes_per_s(direction, n_bytes)
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)
    assert profile.copy_s(direction, n_bytes) == pytest.approx(curve.latency_s.value + n_bytes / rate)
    assert profile.copy_s(direction, n_bytes + extra) > profile.copy_s(direction, n_bytes)


def test_fewer_threads_than_measured_are_slower_in_proportion() -> None:
    """More threads than measured are not faster."""
    fields = fields_of()
    rates = [{"params_per_s": quantity(rate), "params_per_s_under_copies": quantity(rate / 2)} for rate in (2e9, 8e9)]
    fields["host"]["optimizer"] = [{"threads": n} | rate for n, rate in zip((4, 16), rates, strict=True)]
    profile = Profile.from_json(fields)
    assert [profile.optimizer_params_per_s(t) for t in (1, 4, 8, 16, 100)] == pytest.approx([0.5e9, 2e9, 4e9, 8e9, 8e9])
    assert profile.update_fraction_under_uploads(8) is None, "older profiles have no such rate"
    for point, fraction in zip(fields["host"]["optimizer"], (0.9, 0.6), strict=True):
        point["params_per_s_under_uploads"] = quantity(fraction * point["params_per_s"]["value"])
    measured = Profile.from_json(fields)
    fractions = [measured.update_fraction_under_uploads(t) for t in (1, 4, 8, 16, 100)]
    assert fractions == pytest.approx([0.9, 0.9, (0.9 * 0.6) ** 0.5, 0.6, 0.6])


def test_a_users_memory_replaces_the_profiles_and_is_the_users() -> None:
    profile = read_profile("h200-pcie5")
    mine = profile.with_memory(24 * 2**30, None)
    assert (mine.device.memory_bytes.value, mine.host) == (24 * 2**30, profile.host)
    assert (mine.count_sources()["user"], profile.count_sources()["user"]) == (1, 0)
    both = mine.with_memory(10**9, 2 * 10**12)
    assert (both.device.memory_bytes.value, both.host.memory_bytes.value) == (1e9, 2e12)
    assert profile.with_memory(None, None) == profile
    with pytest.raises(ProfileError, match="above zero"):
        profile.with_memory(0, None)


# -- invalid profiles -------------------------------------------------------------------------------------------------


def test_a_misspelled_key_is_answered_and_a_missing_one_named() -> None:
    point = "device.matmul.bf16.3.flop_per_s"
    for name, place, wrong in (("h200-pcie5", "device.memory_bytes", "memory"), (PROBED, point, "flops_per_s")):
        fields = fields_of(name)
        holder, key = holder_of(fields, place)
        holder[wrong] = holder.pop(key)
        assert f"{place.removesuffix(key)}{wrong}: unknown key; write {key}" in refusal(fields)
        del holder[wrong]
        assert f"{place}: missing" in refusal(fields)
    rate = fields_of(PROBED)["device"]["memory_bytes"]
    old = {"disk": {"read_bytes_per_s": rate, "endurance_bytes": rate}}
    assert "disk.endurance_bytes: unknown key; remove it" in refusal(fields_of(PROBED) | old)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("device.memory_bytes.value", math.nan, "device.memory_bytes.value"),
        ("device.memory_bytes.spread_fraction", -0.1, "spread_fraction"),
        ("device.memory_bytes.source", "hearsay", "source 'hearsay' is not in `sources`"),
        ("device.attention.flash", {}, "device.attention: no bf16 and no fp32"),
        ("device.kind", "tpu", "device.kind"),
        ("host.optimizer", [], "host.optimizer"),
        ("price.date", "yesterday", "Invalid isoformat string"),
        ("format_version", 1, "of format 1, which is not read any more; make it again with `penstock probe"),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_its_place(place: str, value: object, complaint: str) -> None:
    fields = fields_of()
    holder, key = holder_of(fields, place)
    assert key in holder
    holder[key] = value
    assert complaint in refusal(fields)


@pytest.mark.parametrize("place", ["price.date", "sources.rental.date"])
def test_a_price_of_the_future_is_refused_in_a_file(tmp_path: Path, place: str) -> None:
    """Up to a day is accepted, because of time zones."""
    fields, file = fields_of(), tmp_path / "mine.json"
    holder, key = holder_of(fields, place)
    for days, is_refused in ((0, False), (1, False), (3, True)):
        holder[key] = (date.today() + timedelta(days=days)).isoformat()
        file.write_text(json.dumps(fields))
        if is_refused:
            with pytest.raises(ProfileError, match=f"mine.json: price of {holder[key]}, a day in the future; write the day"):
                read_profile(str(file))
        else:
            assert read_profile(str(file)).to_json() == fields


@pytest.mark.parametrize(
    ("grid", "small", "large", "key"),
    [
        ("device.matmul.bf16", {"m": 256, "k": 128}, {"m": 1024, "k": 128}, "flop_per_s"),
        ("device.attention.flash.bf16", {"seq_len": 256}, {"seq_len": 512}, "backward_flop_per_s"),
        ("link.d2h.bytes_per_s", {"n_bytes": 65536}, {"n_bytes": 1048576}, "rate"),
    ],
)
def test_a_grid_on_which_more_work_takes_less_time_is_refused(grid, small, large, key):
    fields = fields_of(PROBED)
    holder, last = holder_of(fields, grid)
    low, high = (next(p for p in holder[last] if point.items() <= p.items()) for point in (small, large))
    high[key]["value"] = low[key]["value"] * 16.5
    assert f"{grid}: more work takes less time between" in refusal(fields)


@pytest.mark.parametrize("curve", ["link.d2h.bytes_per_s", "host.optimizer"])
def test_points_that_do_not_rise_are_refused(curve: str) -> None:
    fields = fields_of()
    holder, key = holder_of(fields, curve)
    holder[key].reverse()
    assert f"{curve}: sort the points by rising" in refusal(fields)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx avx2 avx512f avx512dq avx512_vnni avx512_bf16", ("AVX-512 with bf16", 1.0)),
        ("avx avx2 avx512f avx512dq avx512bw", ("AVX-512 without bf16", 3.0)),
        ("avx avx2 fma avx_vnni", ("no AVX-512", 17.0)),
        ("avx avx2 avx_vnni avx_ne_convert", ("AVX2 with bf16", 1.0)),
        (None, None),
    ],
)
def test_bf16_on_a_cpu_without_its_instructions_is_advised_against(
    tmp_path: Path, flags: str | None, expected: tuple[str, float] | None
) -> None:
    """None: no flags in /proc/cpuinfo, as on Arm."""
    cpuinfo, shipped = tmp_path / "cpuinfo", read_profile(PROBED)
    cpuinfo.write_text("processor: 0\n" + ("" if flags is None else f"flags\t\t: fpu {flags} sse\n" * 2))
    assert instruction_set(cpuinfo) == expected
    in_run, in_plan = run_advice(cpuinfo), plan_advice(shipped, cpuinfo)
    assert plan_advice(read_profile("gh200"), cpuinfo) is None
    if expected is None or expected[1] == 1:
        assert (in_run, in_plan) == (None, None)
        return
    assert in_run == f"this CPU has {expected[0]}: steps in fp32 are about {expected[1]:.0f} times as fast as in bf16; {ADVICE}"
    assert in_plan == f"cpu-2core was measured with AVX-512 with bf16, but {in_run}"
    fields = fields_of(PROBED)
    fields["device"]["matmul"] = dict(zip(("fp32", "bf16"), fields["device"]["matmul"].values(), strict=True))
    slower = plan_advice(Profile.from_json(fields), cpuinfo)
    assert slower == f"cpu-2core: fp32 products are 2.3 times as fast as bf16 ones; {ADVICE}"
