"""Is what nvbandwidth measured put where it belongs, and a file that is not its output refused in one line?"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.probe import cuda, gpu, measure
from hwprofiles.probe.nvbandwidth import BUFFER_BYTES, MAX_FILE_BYTES, merged, parse_nvbandwidth, read_nvbandwidth
from hwprofiles.schema import Profile, read_profile
from penstock.cli.probe import probe, text_of
from runtime.errors import PenstockError, ProfileError
from runtime.units import MiB

BASE = read_profile("h200-pcie5")
UP, DOWN = "host_to_device_memcpy_ce", "device_to_host_memcpy_ce"
UP_BOTH, DOWN_BOTH = "host_to_device_bidirectional_memcpy_ce", "device_to_host_bidirectional_memcpy_ce"
ARROW = {UP: "->", DOWN: "<-", UP_BOTH: "->", DOWN_BOTH: "<-"}


def case(name: str, *cells: str, status: str = "Passed", **more: Any) -> dict[str, Any]:
    direction = ARROW.get(name, "->")
    described = {
        "bandwidth_description": f"memcpy CE CPU(row) {direction} GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [[*cells]],
    }
    return {"name": name, "status": status} | (described if cells else {}) | more


def output(*cases: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As the tool of version 0.8 writes it."""
    about = {
        "version": "v0.8",
        "git_version": "v0.8",
        "CUDA Runtime Version": 12080,
        "Driver Version": "570.86.16",
        "GPU Device list": [
            "0: NVIDIA GeForce RTX 5090 (00000000:0c:00): (rig)",
            "1: NVIDIA GeForce RTX 5090 (00000000:0d:00): (rig)",
        ],
    }
    return {"nvbandwidth": {**about, "testcases": [*cases], **more}}


def whole(**more: Any) -> dict[str, Any]:
    return output(
        case(UP, "56.3829", "55.1", sum=111.48),
        case(DOWN, "57.0101", "56.2", sum=113.21),
        case(UP_BOTH, "40.6", "41.5"),
        case(DOWN_BOTH, "44.2", "43.1"),
        **more,
    )


def parsed(fields: object, device: int = 0) -> Any:
    return parse_nvbandwidth(json.dumps(fields), "link.json", device)


def refusal(fields: object, device: int = 0) -> str:
    with pytest.raises(ProfileError) as caught:
        parsed(fields, device)
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith("link.json: ")
    assert len(text) < 500
    return text


def complaint(fields: object) -> str:
    """What is said of it, if anything."""
    try:
        parsed(fields)
    except ProfileError as error:
        return str(error)
    return ""


# -- reading ----------------------------------------------------------------------------------------------------------


def test_rates_are_read_in_bytes_per_second_with_who_measured_them_on_what() -> None:
    found = parsed(whole())
    assert found.alone == {"h2d": pytest.approx(56.3829e9), "d2h": pytest.approx(57.0101e9)}
    assert found.duplex == {"h2d": pytest.approx(40.6e9), "d2h": pytest.approx(44.2e9)}
    assert (found.version, found.driver, found.device) == ("v0.8", "570.86.16", "NVIDIA GeForce RTX 5090")
    assert found.unmeasured == ()


def test_each_device_has_its_column_and_others_are_refused() -> None:
    assert parsed(whole(), device=1).alone["h2d"] == pytest.approx(55.1e9)
    assert "no device 2" in refusal(whole(), device=2)
    assert "no device -1" in refusal(whole(), device=-1)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: root.pop("GPU Device list"),  # older
        lambda root: root.update({"CUDA Driver API Version": 13000, "warning": "none"}),  # newer
        lambda root: [c.update(bandwidth_description=c["bandwidth_description"] + "  ") for c in root["testcases"]],  # older
        lambda root: [c.update(min=1.0, max=2.0, average=1.5) for c in root["testcases"]],  # with -v
        lambda root: root["testcases"].append(case("host_device_latency_sm", "620.1") | {"bandwidth_description": "latency (ns)"}),
        lambda root: root["testcases"].append(case("device_to_device_memcpy_read_ce", status="Waived")),
        lambda root: root["testcases"].append(
            {"name": "device_local_copy", "status": "Passed", "bandwidth_matrix": [["N/A", "1"], ["1", "N/A"]]}
        ),
        lambda root: root.pop("Driver Version"),
        lambda root: root.pop("version"),
    ],
)
def test_outputs_of_other_versions_and_options_are_read_alike(change: Any) -> None:
    fields = whole()
    change(fields["nvbandwidth"])
    assert parsed(fields).alone == parsed(whole()).alone
    assert parsed(fields).duplex == parsed(whole()).duplex


def test_what_was_waived_or_not_available_is_absent_and_told() -> None:
    fields = output(
        case(UP, "N/A", "56.0"), case(DOWN, "50"), case(UP_BOTH, status="Waived"), case(DOWN_BOTH, status="Error", error="bad\nday")
    )
    found = parsed(fields)
    assert found.alone == {"d2h": 50e9}
    assert found.duplex == {}
    assert [line.partition(": ")[2] for line in found.unmeasured] == ["N/A", "waived", "error bad\\nday"]
    assert "not in the file" in parsed(output(case(UP, "50"))).unmeasured[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([], "not the output of nvbandwidth"),
        ({"nvbandwidth": []}, "not the output of nvbandwidth"),
        ({"testcases": []}, "not the output of nvbandwidth"),
        (output(), "no copy-engine case is in it"),
        (output(error="CUDA_ERROR_NO_DEVICE:\x1b[31m none"), "CUDA_ERROR_NO_DEVICE"),
        (output(case(UP, status="Waived"), case(DOWN, status="Not Found")), f"{UP} waived"),
        (output(case("x" * 9000, "1")), "no copy-engine case"),
        ({"nvbandwidth": {"testcases": {}}}, "not a list"),
        (output(*[case(f"c{i}", "1") for i in range(1001)]), "not a list of up to 1000"),
        (output({"name": UP}), "no status"),
        (output({"name": 3, "status": "Passed"}), "has no name"),
        (output(case(UP, "50", status="Fine")), "no status"),
        (output(case(UP, "50"), case(UP, "60")), "twice"),
        (output(case(UP, "50", bandwidth_description="memcpy CE CPU(row) -> GPU(column) latency (ns)")), "unit is unknown"),
        (output(case(UP, "50", bandwidth_description="bandwidth (GiB/s)")), "unit is unknown"),
        (output(case(UP, "50", bandwidth_description=None)), "unit is unknown"),
        (output(case(UP, "50", bandwidth_matrix=[["50"], ["51"]])), "one row"),
        (output(case(UP, "50", bandwidth_matrix=[])), "one row"),
        (output(case(UP, "50", bandwidth_matrix=[[]])), "one row"),
        (output(case(UP, "50", bandwidth_matrix="50")), "one row"),
        (output(case(UP, "50", bandwidth_matrix=[["1"] * 5000])), "one row"),
        (whole(**{"Driver Version": 570}), "Driver Version is not a text"),
        (whole(**{"GPU Device list": "RTX"}), "not a list of names"),
        (whole(**{"GPU Device list": []}), "list of 0"),
    ],
)
def test_a_file_that_is_no_output_of_the_tool_is_refused_in_one_line(fields: object, said: str) -> None:
    assert said in refusal(fields)


@pytest.mark.parametrize(
    "cell",
    [
        50.0,
        50,
        None,
        True,
        "",
        "0",
        "0.0",
        "-1",
        "nan",
        "inf",
        "1e9",
        "1e400",
        "50 GB/s",
        "\uff150",
        "0x10",
        " 50",
        "9" * 400,
        ["50"],
    ],
)
def test_a_cell_that_is_no_rate_is_refused(cell: object) -> None:
    assert "no rate in GB/s" in refusal(output(case(UP, "50", bandwidth_matrix=[[cell]])))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_json_brings_anything_but_an_error_of_one_line(junk: object) -> None:
    bad_case = {"name": UP, "status": "Passed", "bandwidth_description": "(GB/s)", "bandwidth_matrix": junk}
    for fields in (junk, {"nvbandwidth": junk}, output(bad_case), output({"name": junk, "status": "Passed"})):
        assert complaint(fields).isprintable()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"Running host_to_device_memcpy_ce.\n", "not JSON"),
        (b'{"nvbandwidth": {', "not JSON"),
        (b"\xff\xfe{}", "not text"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (MAX_FILE_BYTES + 1), "larger than any output"),
        (None, "cannot be read"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "li\nnk.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=said) as caught:
        read_nvbandwidth(path)
    assert str(caught.value).isprintable()
    with pytest.raises(ProfileError, match="cannot be read"):
        read_nvbandwidth(tmp_path)


# -- merging ----------------------------------------------------------------------------------------------------------


def onto(base: Profile = BASE, fields: Any = None, buffer_bytes: int = BUFFER_BYTES) -> tuple[Profile, list[str]]:
    return merged(base, parsed(fields or whole()), buffer_bytes, "mine")


def test_the_measured_size_has_the_measured_rate_and_the_rest_of_the_curve_its_shape() -> None:
    profile, _ = onto()
    for direction, rate in (("h2d", 56.3829e9), ("d2h", 57.0101e9)):
        assert profile.copy_bytes_per_s(direction, BUFFER_BYTES) == pytest.approx(rate)  # type: ignore[arg-type]
        scale = rate / BASE.copy_bytes_per_s(direction, BUFFER_BYTES)  # type: ignore[arg-type]
        for n_bytes in (2**16, 10**6, 10**7, 2**31):
            ratio = profile.copy_bytes_per_s(direction, n_bytes) / BASE.copy_bytes_per_s(direction, n_bytes)  # type: ignore[arg-type]
            assert ratio == pytest.approx(scale, rel=1e-4)


def test_both_bidirectional_results_make_the_duplex_point() -> None:
    link = onto()[0].link
    assert link.duplex_bytes_per_s.value == pytest.approx(84.8e9)
    assert link.h2d.duplex_bytes_per_s is not None
    assert link.d2h.duplex_bytes_per_s is not None
    assert (link.h2d.duplex_bytes_per_s.value, link.d2h.duplex_bytes_per_s.value) == pytest.approx((40.6e9, 44.2e9))
    half, lines = onto(fields=output(case(UP, "56"), case(DOWN, "57"), case(UP_BOTH, "40"), case(DOWN_BOTH, status="Waived")))
    assert half.link.duplex_bytes_per_s == BASE.link.duplex_bytes_per_s
    assert any(DOWN_BOTH in line and "waived" in line and BASE.name in line for line in lines)


def test_what_the_file_does_not_hold_stays_and_is_told() -> None:
    profile, lines = onto()
    assert profile.device == BASE.device
    assert profile.host == BASE.host
    assert profile.price == BASE.price
    for direction in ("h2d", "d2h"):
        assert getattr(profile.link, direction).latency_s == getattr(BASE.link, direction).latency_s
        assert getattr(profile.link, direction).pageable_bytes_per_s == getattr(BASE.link, direction).pageable_bytes_per_s
    assert "pageable" in lines[-1]
    assert "optimizer" in lines[-1]
    assert BASE.name in lines[-1]


def test_only_the_measured_point_is_called_measured_and_says_by_what_and_where() -> None:
    profile, _ = onto(buffer_bytes=64 * MiB)
    measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind == "measured"}
    sizes = [p.n_bytes for p in profile.link.h2d.bytes_per_s]
    at = sizes.index(64 * MiB)
    duplex = {"link.duplex_bytes_per_s", "link.h2d.duplex_bytes_per_s", "link.d2h.duplex_bytes_per_s"}
    assert measured == {f"link.{d}.bytes_per_s.{at}.rate" for d in ("h2d", "d2h")} | duplex
    source = profile.sources["nvbandwidth"]
    assert (source.driver, source.device, source.date) == ("570.86.16", "NVIDIA GeForce RTX 5090", None)
    assert "v0.8" in source.detail
    assert "67.1 MB" in source.detail
    assert {q.source for _, q in profile.quantities()} == set(profile.sources)


@given(
    st.sampled_from(["gh200", "h100-sxm", "rtx4090-desktop", "gb10"]),
    st.floats(min_value=0.01, max_value=1000),
    st.integers(min_value=1, max_value=2**40),
)
def test_any_rate_at_any_size_makes_a_profile_that_reads_back(name: str, rate: float, buffer_bytes: int) -> None:
    profile, _ = onto(read_profile(name), output(case(UP, f"{rate:.6g}"), case(DOWN, "50")), buffer_bytes)
    assert Profile.from_json(json.loads(text_of(profile))) == profile
    assert profile.copy_bytes_per_s("h2d", buffer_bytes) == pytest.approx(rate * 1e9, rel=1e-5)


def test_merging_twice_is_merging_once() -> None:
    once = onto()[0]
    twice = onto(once)[0]
    assert twice.link.h2d.bytes_per_s[-1].rate.value == pytest.approx(once.link.h2d.bytes_per_s[-1].rate.value)
    assert set(twice.sources) == set(once.sources)


# -- the command ------------------------------------------------------------------------------------------------------


def invoke(*words: str) -> Any:
    return CliRunner().invoke(probe, [*words], catch_exceptions=False)


def test_the_command_merges_onto_a_profile_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "probe_cpu", lambda *_: pytest.fail("measured"))
    link, out = tmp_path / "link.json", tmp_path / "rig.json"
    link.write_text(json.dumps(whole()))
    result = invoke("--nvbandwidth", str(link), "--onto", "h200-pcie5", "--gpu", "1", "--buffer-size", "64MiB", "-o", str(out))
    assert result.exit_code == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    assert profile.name == "rig"
    assert profile.copy_bytes_per_s("h2d", 64 * MiB) == pytest.approx(55.1e9)
    assert "as in h200-pcie5" in result.stderr
    assert result.stdout == ""


def test_without_a_profile_to_merge_onto_the_gpu_is_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "open_cuda", lambda index: None)
    monkeypatch.setattr(measure, "host_beside_gpu", lambda quick: None)
    monkeypatch.setattr(gpu, "probe_gpu", lambda *_: BASE)
    monkeypatch.setattr(measure, "probe_cpu", lambda *_: pytest.fail("measured the CPU"))
    link = tmp_path / "link.json"
    link.write_text(json.dumps(whole()))
    result = invoke("--nvbandwidth", str(link))
    assert Profile.from_json(json.loads(result.stdout)).copy_bytes_per_s("h2d", BUFFER_BYTES) == pytest.approx(56.3829e9)


def test_a_profile_without_a_gpu_has_no_link_to_replace() -> None:
    with pytest.raises(ProfileError, match="cpu-2core computes on a CPU"):
        onto(read_profile("cpu-2core"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--onto", "gh200"], "--nvbandwidth FILE"),
        (["--nvbandwidth", "nowhere.json", "--onto", "gh200"], "cannot be read"),
        (["--nvbandwidth", "LINK", "--onto", "gh2000"], "did you mean gh200"),
        (["--nvbandwidth", "LINK", "--onto", "gh200", "--buffer-size", "0"], "not a size"),
        (["--nvbandwidth", "LINK", "--onto", "gh200", "--gpu", "7"], "no device 7"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(measure, "probe_cpu", lambda *_: pytest.fail("measured"))
    (tmp_path / "link.json").write_text(json.dumps(whole()))
    with pytest.raises(PenstockError, match=said) as caught:
        invoke(*[str(tmp_path / "link.json") if word == "LINK" else word for word in words])
    assert str(caught.value).isprintable()


def test_a_profile_without_the_newer_fields_still_reads() -> None:
    fields = deepcopy(BASE.to_json())
    for direction in ("h2d", "d2h"):
        del fields["link"][direction]["duplex_bytes_per_s"]
        del fields["link"][direction]["under_optimizer_bytes_per_s"]
    assert Profile.from_json(fields) == BASE
