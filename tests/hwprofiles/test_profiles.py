"""Does a profile hold what it must, and refuse the rest in one line?"""

import itertools
import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.quantity import SOURCE_KINDS
from hwprofiles.schema import AttentionCall, Profile, read_profile, shipped_profiles
from penstock.cli.probe import text_of, write_profile
from runtime.errors import ProfileError

NAMES = [
    "8xh100",
    "8xrtx4090",
    "a100-pcie",
    "a100-sxm",
    "b200",
    "cpu-2core",
    "gb10",
    "gb200",
    "gb300",
    "gh200",
    "h100-nvl",
    "h100-pcie",
    "h100-sxm",
    "h200-pcie5",
    "l40s-server",
    "mi300x",
    "mi355x",
    "rtx3090-desktop",
    "rtx3090-epyc",
    "rtx3090-threadripper",
    "rtx4090-desktop",
    "rtx4090-server",
    "rtx4090-threadripper",
    "rtx5090-desktop",
    "rtx5090-server",
    "rtx5090-threadripper",
    "rtxa6000-threadripper",
    "rtxpro6000-workstation",
]
ANY_PROFILE = pytest.mark.parametrize("name", NAMES)
profiles = st.sampled_from([read_profile(name) for name in NAMES])
dtypes = st.sampled_from(["bf16", "fp32"])
sizes = st.integers(min_value=1, max_value=10**7)
widths = st.integers(min_value=1, max_value=300_000)
directions = st.sampled_from(["h2d", "d2h"])


def fields_of(name: str = "h200-pcie5") -> dict[str, Any]:
    return deepcopy(read_profile(name).to_json())


PROBED = "cpu-2core"  # the profile whose rates are measured points


def attention(
    profile: Profile, dtype: Any, seq_len: int, head_dim: int, backward: bool = False, kernel: Any = "flash"
) -> tuple[float, bool]:
    return profile.attention_rate(AttentionCall(dtype, seq_len, head_dim, grouped=False), backward, kernel)


def numbers(value: object, place: str = "") -> list[str]:
    """Places of all quantities in JSON, found without the schema."""
    if isinstance(value, dict):
        here = [place] if "spread_fraction" in value else []
        return here + [p for key, item in value.items() for p in numbers(item, f"{place}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in numbers(item, f"{place}.{i}")]
    return []


def refusal(fields: dict[str, Any]) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(fields, "mine.json")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("mine.json: ")
    assert len(text) < 400
    return text


def test_the_shipped_profiles_are_the_machines_promised() -> None:
    assert shipped_profiles() == NAMES


@ANY_PROFILE
def test_a_shipped_profile_is_called_like_its_file_and_reads_back_from_its_json(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert Profile.from_json(profile.to_json()) == profile
    assert Profile.from_json(json.loads(text_of(profile))) == profile


@ANY_PROFILE
def test_every_number_of_a_shipped_profile_has_a_source_and_is_counted(name: str) -> None:
    profile = read_profile(name)
    assert sorted(place for place, _ in profile.quantities()) == sorted(numbers(profile.to_json()))
    counts = profile.count_sources()
    assert list(counts) == list(SOURCE_KINDS)
    assert sum(counts.values()) == len(numbers(profile.to_json()))
    assert {q.source for _, q in profile.quantities()} == set(profile.sources), "a source that nothing rests on"


@ANY_PROFILE
def test_only_the_probed_machine_calls_a_number_measured_and_only_with_tool_date_and_device(name: str) -> None:
    profile = read_profile(name)
    assert profile.count_sources()["measured"] == 0 or name == "cpu-2core"
    for source in profile.sources.values():
        assert source.kind != "measured" or (source.date and source.device and source.driver)
        assert source.kind not in ("datasheet", "assumed", "published", "fitted") or len(source.detail) > 25


@ANY_PROFILE
def test_what_nobody_measured_is_given_a_wide_spread(name: str) -> None:
    """Rates and times at least; a memory size that we chose is exact."""
    profile = read_profile(name)
    for place, q in profile.quantities():
        if profile.sources[q.source].kind == "assumed" and q.value > 0 and "_per_s" in place:
            assert q.spread_fraction >= 0.08, place


@ANY_PROFILE
def test_a_shipped_machine_is_consistent_with_itself(name: str) -> None:
    """The optimizer's traffic stays below what the memory delivers, both directions together below the sum of each alone."""
    profile = read_profile(name)
    link, host = profile.link, profile.host
    assert max(p.params_per_s.value for p in host.optimizer) * 28 <= host.dram_bytes_per_s.value
    alone = sum(max(p.rate.value for p in curve.bytes_per_s) for curve in (link.h2d, link.d2h))
    assert link.duplex_bytes_per_s.value <= alone * 1.2
    assert profile.device.context_bytes.value < profile.device.memory_bytes.value
    assert (profile.device.compute_threads is None) == (profile.device.kind == "cuda")


def test_the_h200_multiplies_as_it_was_measured() -> None:
    rate = read_profile("h200-pcie5").matmul_rate("bf16", 8192, 8192, 8192)
    spread = read_profile("h200-pcie5").device.matmul["bf16"].flop_per_s.spread_fraction
    assert 769e12 / (1 + spread) <= rate.value <= 798e12  # as its team measured; others measured less
    assert rate.inside_measured


# -- interpolation ----------------------------------------------------------------------------------------------------


@given(profiles, dtypes, sizes, widths, widths, sizes, widths)
def test_more_tokens_and_a_wider_product_take_longer(
    profile: Profile, dtype: Any, m: int, k: int, n: int, more_m: int, more_n: int
) -> None:
    def seconds(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / profile.matmul_rate(dtype, m, k, n).value

    assert seconds(m + more_m, k, n) >= seconds(m, k, n) * (1 - 1e-9)
    assert seconds(m, k, n + more_n) >= seconds(m, k, n) * (1 - 1e-9)


@given(dtypes, sizes, widths, widths)
def test_a_rate_between_points_lies_between_the_slowest_and_the_fastest(dtype: Any, m: int, k: int, n: int) -> None:
    profile = read_profile(PROBED)
    rates = [p.flop_per_s.value for p in profile.device.matmul[dtype]]
    value = profile.matmul_rate(dtype, m, k, n).value
    assert min(rates) * (1 - 1e-9) <= value <= max(rates) * (1 + 1e-9)


def test_at_a_point_alone_at_its_width_the_rate_is_the_point() -> None:
    profile = read_profile(PROBED)
    for dtype, points in profile.device.matmul.items():
        n_alone = 0
        for p in points:
            if sum(q.m == p.m and q.k * q.n == p.k * p.n for q in points) == 1:
                rate = profile.matmul_rate(dtype, p.m, p.k, p.n)
                assert rate.inside_measured
                assert rate.value == pytest.approx(p.flop_per_s.value)
                n_alone += 1
        assert n_alone > 1
    for dtype, grid in profile.device.attention["flash"].items():
        for a in grid:
            forward, backward = (attention(profile, dtype, a.seq_len, a.head_dim, passed) for passed in (False, True))
            assert forward == (pytest.approx(a.forward_flop_per_s.value), True)
            assert backward == (pytest.approx(a.backward_flop_per_s.value), True)


def test_halfway_in_logarithms_is_the_geometric_mean() -> None:
    fields = fields_of()
    corners = {(100, 100): 1e12, (100, 400): 2e12, (400, 100): 3e12, (400, 400): 5e12}
    fields["device"]["matmul"]["bf16"] = [
        {"m": m, "k": w, "n": w, "flop_per_s": {"value": v, "spread_fraction": 0.1, "source": "team"}}
        for (m, w), v in corners.items()
    ]
    profile = Profile.from_json(fields)
    assert profile.matmul_rate("bf16", 200, 100, 400) == (pytest.approx((1e12 * 2e12 * 3e12 * 5e12) ** 0.25), True)
    assert profile.matmul_rate("bf16", 200, 100, 100) == (pytest.approx((1e12 * 3e12) ** 0.5), True)


def test_outside_the_measured_points_the_nearest_one_holds_and_the_answer_says_so() -> None:
    profile = read_profile(PROBED)
    largest = profile.matmul_rate("bf16", 4096, 1024, 1024)
    assert profile.matmul_rate("bf16", 10**6, 1024, 1024) == (largest.value, False)
    assert profile.matmul_rate("bf16", 4096, 1024, 10**6) == (largest.value, False)
    assert not profile.matmul_rate("bf16", 1, 512, 512).inside_measured
    assert not attention(profile, "bf16", 10**6, 128)[1]
    assert not attention(profile, "bf16", 1024, 256)[1]
    assert attention(profile, "bf16", 1500, 96, backward=True)[1]


def with_cudnn_attention(times_flash: float) -> dict[str, Any]:
    """The probed machine, with a second kernel in bf16."""
    fields = fields_of(PROBED)
    points = deepcopy(fields["device"]["attention"]["flash"]["bf16"])
    for point, passed in itertools.product(points, ("forward", "backward")):
        point[f"{passed}_flop_per_s"]["value"] *= times_flash
    fields["device"]["attention"]["cudnn"] = {"bf16": points}
    return fields


@given(st.sampled_from([64, 100, 128, 256]), st.integers(min_value=100, max_value=10**6), st.booleans())
def test_each_kernel_of_attention_has_rates_of_its_own(head_dim: int, seq_len: int, backward: bool) -> None:
    profile = Profile.from_json(with_cudnn_attention(1.5))
    flash, inside = attention(profile, "bf16", seq_len, head_dim, backward)
    assert attention(profile, "bf16", seq_len, head_dim, backward, "cudnn") == (pytest.approx(1.5 * flash), inside)


def test_a_kernel_that_was_not_measured_has_the_others_rate_and_the_answer_says_so() -> None:
    flash_only, both = read_profile(PROBED), Profile.from_json(with_cudnn_attention(1.5))
    for profile, dtype in ((flash_only, "bf16"), (flash_only, "fp32"), (both, "fp32")):
        flash, inside = attention(profile, dtype, 2048, 128, True)
        assert inside
        assert attention(profile, dtype, 2048, 128, True, "cudnn") == (flash, False)


def test_a_grid_of_cudnns_attention_is_held_to_what_the_other_is() -> None:
    fields = with_cudnn_attention(1.5)
    fields["device"]["attention"]["cudnn"]["bf16"][-1]["backward_flop_per_s"]["value"] = 1e20
    assert "device.attention.cudnn.bf16: more work takes less time" in refusal(fields)
    fields["device"]["attention"]["cudnn"]["bf16"] = []
    assert "device.attention.cudnn.bf16: no point" in refusal(fields)
    fields = with_cudnn_attention(1.5)
    fields["device"]["attention"]["cudnn"]["bf16"][0]["sequence"] = 5
    assert "device.attention.cudnn.bf16.0.sequence: unknown key; write seq_len" in refusal(fields)


@given(profiles, directions, st.integers(min_value=0, max_value=10**12), st.integers(min_value=1, max_value=10**12))
def test_more_bytes_take_longer(profile: Profile, direction: Any, n_bytes: int, more: int) -> None:
    assert profile.copy_s(direction, n_bytes + more) > profile.copy_s(direction, n_bytes)


@given(profiles, directions, st.floats(min_value=1, max_value=1e12))
def test_a_copy_takes_its_latency_and_its_bytes_over_its_rate(profile: Profile, direction: Any, n_bytes: float) -> None:
    curve = profile.link.h2d if direction == "h2d" else profile.link.d2h
    rates = [p.rate.value for p in curve.bytes_per_s]
    rate = profile.copy_bytes_per_s(direction, n_bytes)
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)
    assert profile.copy_s(direction, n_bytes) == pytest.approx(curve.latency_s.value + n_bytes / rate)


def test_an_optimizer_with_fewer_threads_than_measured_is_slower_in_proportion_and_with_more_no_faster() -> None:
    fields = fields_of()
    fields["host"]["optimizer"] = [
        {
            "threads": threads,
            "params_per_s": {"value": rate, "spread_fraction": 0.1, "source": "team"},
            "params_per_s_under_copies": {"value": rate / 2, "spread_fraction": 0.1, "source": "team"},
        }
        for threads, rate in ((4, 2e9), (16, 8e9))
    ]
    profile = Profile.from_json(fields)
    rates = [profile.optimizer_params_per_s(t) for t in (1, 4, 8, 16, 100)]
    assert rates == pytest.approx([0.5e9, 2e9, 4e9, 8e9, 8e9])
    assert profile.optimizer_params_per_s(8, under_copies=True) == pytest.approx(2e9)


# -- the user's own memory --------------------------------------------------------------------------------------------


def test_a_users_memory_replaces_the_profiles_and_says_that_it_is_the_users() -> None:
    profile = read_profile("h200-pcie5")
    mine = profile.with_memory(24 * 2**30, None)
    assert mine.device.memory_bytes.value == 24 * 2**30
    assert mine.host == profile.host
    assert mine.count_sources()["user"] == 1
    assert profile.count_sources()["user"] == 0
    both = mine.with_memory(10**9, 2 * 10**12)
    assert (both.device.memory_bytes.value, both.host.memory_bytes.value) == (1e9, 2e12)
    assert both.count_sources()["user"] == 2
    assert profile.with_memory(None, None) == profile
    with pytest.raises(ProfileError, match="above zero"):
        profile.with_memory(0, None)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_key_without_its_unit_is_refused_with_the_right_one() -> None:
    fields = fields_of()
    fields["device"]["memory"] = fields["device"].pop("memory_bytes")
    assert "device.memory: unknown key; write memory_bytes" in refusal(fields)


def test_a_misspelled_key_is_refused_with_the_nearest_one() -> None:
    fields = fields_of(PROBED)
    point = fields["device"]["matmul"]["bf16"][3]
    point["flops_per_s"] = point.pop("flop_per_s")
    assert "device.matmul.bf16.3.flops_per_s: unknown key; write flop_per_s" in refusal(fields)
    fields = fields_of()
    law = fields["device"]["matmul"]["bf16"]
    law["flops_per_s"] = law.pop("flop_per_s")
    assert "device.matmul.bf16.flops_per_s: unknown key; write flop_per_s" in refusal(fields)
    fields = fields_of()
    fields["price"]["usd_per_hour"]["spread"] = fields["price"]["usd_per_hour"].pop("spread_fraction")
    assert "price.usd_per_hour.spread: unknown key; write spread_fraction" in refusal(fields)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("device.memory_bytes.value", 0, "device.memory_bytes.value"),
        ("device.memory_bytes.value", -1.0, "device.memory_bytes.value"),
        ("device.memory_bytes.value", math.nan, "device.memory_bytes.value"),
        ("device.memory_bytes.value", math.inf, "device.memory_bytes.value"),
        ("device.memory_bytes.value", "80GB", "device.memory_bytes.value"),
        ("device.memory_bytes.value", True, "device.memory_bytes.value"),
        ("device.memory_bytes.value", None, "device.memory_bytes.value"),
        ("device.memory_bytes", 80e9, "device.memory_bytes"),
        ("device.memory_bytes.spread_fraction", -0.1, "spread_fraction"),
        ("device.memory_bytes.source", "hearsay", "source 'hearsay' is not in `sources`"),
        ("link.host_cores_per_copy.source", "hearsay", "link.host_cores_per_copy: source 'hearsay'"),
        ("link.host_cores_per_copy.value", -1.0, "host_cores_per_copy.value"),
        ("device.matmul.bf16", [], "device.matmul.bf16: no point"),
        ("device.attention.flash.fp32", [], "device.attention.flash.fp32: no point"),
        ("device.attention.flash", {}, "device.attention.flash.bf16: no point"),
        ("device.matmul.bf16.overlap", 0.5, "device.matmul.bf16.overlap"),
        ("device.matmul.bf16.flop_per_s.source", "hearsay", "device.matmul.bf16.flop_per_s: source 'hearsay' is not in"),
        ("peers.collectives.all_reduce.latency_s.source", "hearsay", "source 'hearsay' is not in"),
        ("device.matmul", {}, "device.matmul.bf16: no point"),
        ("device.kind", "tpu", "device.kind"),
        ("device.compute_threads", 0, "device.compute_threads"),
        ("host.optimizer", [], "host.optimizer"),
        ("host.n_cores", 1.5, "host.n_cores"),
        ("link.h2d.bytes_per_s", [], "link.h2d.bytes_per_s: no point"),
        ("price.date", "yesterday", "YYYY-MM-DD"),
        ("sources.team.kind", "guessed", "sources.team.kind"),
        ("format_version", 3, "format_version"),
        ("name", "", "name"),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_its_place(place: str, value: object, complaint: str) -> None:
    fields = fields_of()
    *parents, key = place.split(".")
    at = fields
    for parent in parents:
        at = at[parent]
    assert key in at
    at[key] = value
    assert complaint in refusal(fields)


@pytest.mark.parametrize(
    "place", [*numbers(fields_of("gb10"))[:3], "link", "host.optimizer", "device.matmul", "sources", "price.date"]
)
def test_a_missing_key_is_refused_by_its_name(place: str) -> None:
    fields = fields_of()
    *parents, key = place.split(".")
    at = fields
    for parent in parents:
        at = at[parent]
    del at[key]
    assert f"{place}: missing" in refusal(fields)


def test_curves_on_which_more_work_takes_less_time_are_refused() -> None:
    fields = fields_of()
    curve = fields["link"]["h2d"]["bytes_per_s"]
    curve[1]["rate"]["value"] = curve[0]["rate"]["value"] * curve[1]["n_bytes"] / curve[0]["n_bytes"] * 1.01
    assert "take less time" in refusal(fields)

    fields = fields_of()
    fields["link"]["d2h"]["bytes_per_s"].reverse()
    assert "sort the points" in refusal(fields)

    fields = fields_of(PROBED)  # in tokens: a row twice as long that takes half the time
    points = fields["device"]["matmul"]["bf16"]
    low, high = (next(p for p in points if (p["m"], p["k"]) == (m, 256)) for m in (256, 1024))
    high["flop_per_s"]["value"] = low["flop_per_s"]["value"] * 4.1
    assert "device.matmul.bf16: more work takes less time between 256 and 1024" in refusal(fields)

    fields = fields_of(PROBED)  # in width
    points = fields["device"]["matmul"]["bf16"]
    low, high = (next(p for p in points if (p["m"], p["k"]) == (256, w)) for w in (256, 512))
    high["flop_per_s"]["value"] = low["flop_per_s"]["value"] * 4.1
    assert "more work takes less time between 256 and 512" in refusal(fields)

    fields = fields_of(PROBED)
    points = fields["device"]["attention"]["flash"]["bf16"]
    points[2]["backward_flop_per_s"]["value"] = points[1]["backward_flop_per_s"]["value"] * 4.1
    assert "device.attention.flash.bf16: more work takes less time" in refusal(fields)

    fields = fields_of()
    fields["host"]["optimizer"].reverse()
    assert "`threads` rising" in refusal(fields)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no machine"),
        ("", "not JSON"),
        ('{"format_version": 1, "name": "trunc', "not JSON"),
        ("[1, 2]", "not a profile but a JSON list"),
        ('{"name": "x\\ny"}', "missing"),
        ('{"\\u001b[31mkey\\n": 1}', "unknown key"),
        ("[" * 100_000, "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ProfileError) as caught:
        read_profile(str(path))
    assert complaint in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_unknown_machine_is_answered_with_the_nearest_and_all_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="did you mean h200-pcie5") as caught:
        read_profile("h200-pcie4")
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(ProfileError, match="did you mean rtx4090-desktop"):
        read_profile("4090")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(str(tmp_path))
    with pytest.raises(ProfileError):
        read_profile("x\0y")
    with pytest.raises(ProfileError):
        read_profile("")
    with pytest.raises(ProfileError):
        read_profile("x" * 5000)


def test_a_written_profile_reads_back_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    profile = read_profile("gh200")
    path = tmp_path / "mine.json"
    write_profile(profile, path)
    assert read_profile(str(path)) == profile
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]
    with pytest.raises(ProfileError, match="cannot be written"):
        write_profile(profile, tmp_path / "nowhere" / "mine.json")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_profile("gh200").device.memory_bytes.value = 1.0  # type: ignore[misc]
