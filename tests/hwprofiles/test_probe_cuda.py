"""Does the probe of a GPU find what the GPU can do, and say what it cannot?

The machine of `fake_gpu.py` has known rates, cold clocks, noise and hiccups.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.probe import cuda, measure
from hwprofiles.probe.device import DeviceError, PciLink, Stream
from hwprofiles.probe.gpu import QUICK_GPU, THOROUGH_GPU, probe_gpu
from hwprofiles.probe.gpu_link import rates_in_common
from hwprofiles.probe.stopwatch import Stopwatch
from hwprofiles.probe.timings import products_flop
from hwprofiles.schema import AttentionCall, Profile
from penstock.cli.probe import headline, probe, remarks, text_of
from runtime.errors import PenstockError, ProfileError
from runtime.machines import streams
from runtime.machines.cores import split_beside_gpu
from tests.fake_gpu import GB, FakeMachine, GiB, Truth

SEEDS = pytest.mark.parametrize("seed", range(3))
MOST_OFF = 0.03  # of a rate that the probe may be off, with noise of 1 % and a hiccup every second


def probed_of(truth: Truth, seed: int = 0, effort: Any = QUICK_GPU, name: str = "mine") -> Profile:
    machine = FakeMachine(truth, seed)
    return probe_gpu(machine.device, machine.host, effort, lambda what, fraction: None, name)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def thorough() -> tuple[Profile, FakeMachine, list[tuple[str, float]]]:
    machine, steps = FakeMachine(Truth(), seed=7), []
    profile = probe_gpu(machine.device, machine.host, THOROUGH_GPU, lambda what, fraction: steps.append((what, fraction)), "mine")  # type: ignore[arg-type]
    return profile, machine, steps


def assert_close(found: float, true: float, most_off: float = MOST_OFF) -> None:
    assert abs(found / true - 1) <= most_off, f"{found:.4g} where {true:.4g} is true"


def assert_found(profile: Profile, truth: Truth) -> None:
    """Every number of the profile is the machine's."""
    device, link, host = profile.device, profile.link, profile.host
    for dtype, points in device.matmul.items():
        for p in points:
            n_flop = products_flop(p.m, p.k, p.n)
            assert_close(p.flop_per_s.value, truth.flop_per_s[dtype] * n_flop / (n_flop + truth.work_lost_flop))
            assert (p.clock_hz, p.watts) == truth.load
    true = {"flash": truth.attention_flop_per_s, **({"cudnn": truth.cudnn_flop_per_s} if truth.cudnn_flop_per_s else {})}
    assert {kernel: of.keys() for kernel, of in device.attention.items()} == {kernel: of.keys() for kernel, of in true.items()}
    for kernel, of in device.attention.items():
        for dtype, points in of.items():
            assert [(a.seq_len, a.head_dim) for a in points] == [(a.seq_len, a.head_dim) for a in device.attention["flash"][dtype]]
            for a in points:
                assert_close(a.forward_flop_per_s.value, true[kernel][dtype])
                assert_close(a.backward_flop_per_s.value, 0.8 * true[kernel][dtype])
                assert (a.clock_hz, a.watts) == truth.load
    assert_close(device.memory_bytes_per_s.value, truth.memory_bytes_per_s)
    norms = device.norms["torch-fused"]
    for rate, fraction in zip((norms.forward_bytes_per_s, norms.backward_bytes_per_s), truth.norm_fractions, strict=True):
        assert_close(rate.value, fraction * truth.memory_bytes_per_s)
    assert device.eager_bytes_per_s is not None
    assert_close(device.eager_bytes_per_s.value, truth.eager_fraction * truth.memory_bytes_per_s)
    assert device.sustained_fraction is None, "what was soaked is a step's rate"
    assert_close(device.kernel_overhead_s.value, truth.kernel_s)
    assert truth.handover_s < device.op_overhead_s.value < 1.5 * truth.handover_s
    for direction, curve in (("h2d", link.h2d), ("d2h", link.d2h)):
        assert_close(curve.latency_s.value, truth.copy_latency_s + 4096 / truth.pinned[direction])
        for n_bytes in (2**20, 10**7, 2**28):
            assert_close(profile.copy_s(direction, n_bytes), truth.copy_latency_s + n_bytes / truth.pinned[direction])
        assert_close(curve.pageable_bytes_per_s.value, truth.pageable[direction])
        assert curve.under_optimizer_bytes_per_s is not None
        assert curve.duplex_bytes_per_s is not None
        assert_close(curve.under_optimizer_bytes_per_s.value, truth.under_optimizer_fraction * truth.pinned[direction])
        share = min(1.0, truth.duplex_bytes_per_s / sum(truth.pinned.values()))
        assert_close(curve.duplex_bytes_per_s.value, share * truth.pinned[direction])
    assert_close(link.duplex_bytes_per_s.value, min(truth.duplex_bytes_per_s, sum(truth.pinned.values())))
    for point in host.optimizer:
        rate = min(point.threads * truth.params_per_s_of_thread, truth.most_params_per_s)
        assert_close(point.params_per_s.value, rate)
        assert_close(point.params_per_s_under_copies.value, truth.under_copies_fraction * rate)
    assert_close(host.dram_bytes_per_s.value, truth.dram_bytes_per_s)
    assert_close(host.reduce_bytes_per_s.value, truth.reduce_bytes_per_s)
    assert_close(host.page_fault_bytes_per_s.value, truth.page_fault_bytes_per_s)


def test_a_thorough_probe_finds_what_the_machine_can_do(thorough: tuple[Profile, FakeMachine, object]) -> None:
    assert_found(thorough[0], thorough[1].truth)


@SEEDS
def test_a_quick_probe_finds_the_same_whatever_the_noise(seed: int) -> None:
    truth = Truth(noise_fraction=0.015)
    assert_found(probed_of(truth, seed), truth)


def test_a_machine_of_another_kind_is_found_too() -> None:
    truth = Truth(
        flop_per_s={"bf16": 160e12, "fp32": 40e12},
        attention_flop_per_s={"bf16": 120e12, "fp32": 9e12},
        cudnn_flop_per_s={},
        memory_bytes_per_s=0.9e12,
        pinned={"h2d": 25e9, "d2h": 26e9},
        pageable={"h2d": 18e9, "d2h": 17e9},
        duplex_bytes_per_s=40e9,
        copy_latency_s=15e-6,
        total_bytes=24 * GiB,
        n_host_cores=11,
        capability=(8, 9),
        link=PciLink(4, 16, 4, 16),
        under_optimizer_fraction=0.7,
    )
    profile = probed_of(truth)
    assert_found(profile, truth)
    assert "cliff" not in profile.summary
    assert [p.threads for p in profile.host.optimizer] == [1, 2, 4, 8, 11]


def test_the_probe_covers_the_shapes_and_sizes_of_real_models(thorough: tuple[Profile, FakeMachine, object]) -> None:
    device, link = thorough[0].device, thorough[0].link
    for m, k, n in ((512, 1024, 1024), (16384, 16384, 16384), (8192, 4096, 14336)):
        assert thorough[0].matmul_rate("bf16", m, k, n).inside_measured
    assert any(p.k != p.n for p in device.matmul["bf16"])
    assert {(a.seq_len, a.head_dim) for a in device.attention["flash"]["bf16"]} >= {
        (1024, 64),
        (1024, 128),
        (32768, 64),
        (32768, 128),
    }
    for curve in (link.h2d, link.d2h):
        sizes = [p.n_bytes for p in curve.bytes_per_s]
        assert (sizes[0], sizes[-1]) == (64 * 2**10, GiB)
    assert len({p.threads for p in thorough[0].host.optimizer}) >= 4


def test_memory_is_what_can_be_had_and_the_context_what_the_kernels_left(thorough: tuple[Profile, FakeMachine, object]) -> None:
    profile, machine, _ = thorough
    truth = machine.truth
    context = truth.bare_context_bytes + truth.kernels_bytes
    assert profile.device.context_bytes.value == context
    free = truth.total_bytes - context
    assert 0.979 * free < profile.device.memory_bytes.value - context <= truth.largest_fraction * free
    assert profile.host.memory_bytes.value == 1500 * GB
    assert machine.used_bytes == context, "the probe kept device memory"


def test_a_probed_gpu_is_a_profile_that_reads_back_and_says_what_it_rests_on(thorough: tuple[Profile, object, object]) -> None:
    profile = thorough[0]
    assert Profile.from_json(json.loads(text_of(profile))) == profile
    assert (profile.name, profile.device.kind, profile.device.compute_threads) == ("mine", "cuda", None)
    not_measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind != "measured"}
    assert not_measured == {"device.workspace_bytes", "link.host_cores_per_copy", "host.runtime_bytes"}
    for source in profile.sources.values():
        assert (source.date, source.device, source.driver) == (source.date, "Fake GPU; Fake CPU", "driver 1.2")
        assert source.date
    assert {q.source for _, q in profile.quantities()} == set(profile.sources)
    assert headline(profile).row_count > 25
    assert any(" by cuDNN over " in str(what) for what in headline(profile).columns[0].cells)


def test_progress_rises_to_one_and_names_what_is_measured(thorough: tuple[object, object, list[tuple[str, float]]]) -> None:
    steps = thorough[2]
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert any("attention over 32768 tokens" in what for what, _ in steps)


@pytest.mark.soak
def test_what_does_not_fit_the_device_or_takes_too_long_is_left_out() -> None:
    small = probed_of(Truth(total_bytes=3 * GiB, flop_per_s={"bf16": 60e12, "fp32": 1e12}), effort=THOROUGH_GPU)
    shapes = {(p.m, p.k, p.n) for p in small.device.matmul["bf16"]}
    assert (2048, 8192, 8192) in shapes
    assert (16384, 16384, 16384) not in shapes
    longest = max(products_flop(p.m, p.k, p.n) / p.flop_per_s.value for p in small.device.matmul["fp32"])
    assert longest <= THOROUGH_GPU.longest_s
    assert len(small.device.matmul["fp32"]) < len(probed_of(Truth(), effort=THOROUGH_GPU).device.matmul["fp32"])
    assert max(a.seq_len for a in small.device.attention["flash"]["bf16"]) == 16384
    assert max(p.n_bytes for p in small.link.h2d.bytes_per_s) == 256 * 2**20


def test_copies_are_no_larger_than_the_host_has_memory_for() -> None:
    sizes = [p.n_bytes for p in probed_of(Truth(host_bytes=2 * GB), effort=THOROUGH_GPU).link.d2h.bytes_per_s]
    assert sizes[-1] == 256 * 2**20


# -- clocks -----------------------------------------------------------------------------------------------------------


def watch_of(truth: Truth) -> tuple[Stopwatch, FakeMachine]:
    machine = FakeMachine(truth)
    return Stopwatch(machine.device, 0.02, 1.5, 5, 11, 0.25), machine  # type: ignore[arg-type]


def test_warming_up_ends_when_the_clocks_have_settled_and_not_before() -> None:
    watch, machine = watch_of(Truth(cold_fraction=0.3, warm_s=2.0, hiccups_per_s=0))
    product = machine.device.product("bf16", 8192, 8192, 8192)
    watch.warm_up(product, most_s=10.0)
    assert 2.0 <= machine.worked_s < 4.0
    assert_close(products_flop(8192, 8192, 8192) / watch.timing(product).seconds, 700e12, 0.02)


def test_clocks_that_never_settle_do_not_hold_up_the_probe() -> None:
    watch, machine = watch_of(Truth(cold_fraction=0.01, warm_s=1000.0, hiccups_per_s=0))
    watch.warm_up(machine.device.product("bf16", 2048, 2048, 2048), most_s=3.0)
    assert 3.0 <= machine.worked_s < 5.0


def test_a_hiccup_moves_neither_a_time_nor_its_spread() -> None:
    watch, machine = watch_of(Truth(noise_fraction=0.0, hiccups_per_s=3.0, hiccup_s=0.5, cold_fraction=1.0))
    timing = watch.timing(machine.device.product("bf16", 8192, 8192, 8192))
    assert_close(timing.seconds, (products_flop(8192, 8192, 8192) + 3e9) / 700e12, 0.001)
    assert timing.spread_fraction <= 0.02


def test_a_work_longer_than_anyone_would_wait_for_is_run_once() -> None:
    watch, machine = watch_of(Truth(flop_per_s={"bf16": 1e12, "fp32": 1e12}, cold_fraction=1.0))
    before_s = machine.worked_s
    assert watch.timing(machine.device.product("bf16", 16384, 8192, 8192)).seconds > 1.5
    assert machine.worked_s - before_s < 10


# -- cliffs -----------------------------------------------------------------------------------------------------------

TWO_NODES = (tuple(range(8)), tuple(range(8, 16)))
GEN4 = {"pinned": {"h2d": 26e9, "d2h": 26.5e9}, "pageable": {"h2d": 20e9, "d2h": 20e9}, "duplex_bytes_per_s": 45e9}


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"pageable": {"h2d": 16e9, "d2h": 16e9}}, "slow pageable memory", "to the device 16 GB/s instead of 55"),
        ({"pageable": {"h2d": 45e9, "d2h": 9e9}}, "slow pageable memory", "are slow: to the host"),
        (GEN4 | {"link": PciLink(5, 8, 5, 16)}, "narrow link", "runs at Gen5 x8 and the device can do Gen5 x16"),
        (GEN4 | {"link": PciLink(4, 16, 5, 16)}, "narrow link", "runs at Gen4 x16"),
        (GEN4, "narrow link", "that PCIe Gen5 x16 gives"),
        (
            {"pinned": {"h2d": 4.4e9, "d2h": 4.6e9}, "pageable": {"h2d": 4e9, "d2h": 4e9}, "duplex_bytes_per_s": 8e9},
            "confidential computing",
            "single digits both ways",
        ),
        ({"nodes": TWO_NODES, "remote_fraction": 0.8}, "remote memory", "from node 1"),
        ({"hot_s": 3.0, "hot_fraction": 0.8}, "throttling clocks", "0.79 of its rate"),
        ({"duplex_bytes_per_s": 60e9}, "shared directions", "0.5"),
        ({"most_params_per_s": 1.5e9}, "optimizer does not scale", "1.5 Gparam/s on 15 threads"),
        ({"bare_context_bytes": 5 * GB}, "shared device", "5 GB of device memory"),
    ],
)
def test_a_cliff_is_named_in_the_summary_and_told_in_a_line_and_no_other_is(changes: dict[str, Any], name: str, said: str) -> None:
    profile = probed_of(replace(Truth(), **changes))
    assert profile.summary.partition("; cliffs: ")[2] == name
    (line,) = [line for line in remarks(profile) if line.startswith("cliff: ")]
    assert said in line
    assert "\n" not in line


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": TWO_NODES, "remote_fraction": 0.97},
        GEN4 | {"capability": (8, 9)},
        GEN4 | {"capability": (9, 0), "link": PciLink(4, 16, 4, 16)},
        {"link": PciLink(5, 16, 5, 16)},
        {"pinned": {"h2d": 400e9, "d2h": 300e9}, "pageable": {"h2d": 300e9, "d2h": 250e9}, "duplex_bytes_per_s": 650e9}
        | {"link": PciLink(1, 1, 5, 16)},  # copies do not go over this link
        {"most_params_per_s": 3e9, "dram_bytes_per_s": 100e9},  # the memory binds
        {"pinned": {"h2d": 6e9, "d2h": 6e9}, "pageable": {"h2d": 5e9, "d2h": 5e9}, "duplex_bytes_per_s": 11e9}
        | {"capability": (7, 5), "link": PciLink(3, 8, 3, 8)},
    ],
)
def test_a_machine_as_its_parts_promise_has_no_cliffs(changes: dict[str, Any]) -> None:
    profile = probed_of(replace(Truth(), **changes))
    assert "cliff" not in profile.summary
    assert not [line for line in remarks(profile) if line.startswith("cliff")]


def test_an_encrypted_link_is_not_blamed_on_devices_that_cannot_encrypt() -> None:
    slow = {"pinned": {"h2d": 5e9, "d2h": 5e9}, "pageable": {"h2d": 5e9, "d2h": 5e9}, "duplex_bytes_per_s": 9e9}
    assert "cliffs: narrow link" in probed_of(replace(Truth(), **slow, capability=(8, 6))).summary


def test_clocks_that_fell_widen_the_spread_of_what_was_measured_before() -> None:
    fallen, steady = (probed_of(Truth(hot_s=hot_s, hot_fraction=0.8)) for hot_s in (3.0, 1e9))
    assert min(p.flop_per_s.spread_fraction for p in fallen.device.matmul["bf16"]) >= 0.2
    assert max(p.flop_per_s.spread_fraction for p in steady.device.matmul["bf16"]) < 0.1


def test_several_cliffs_are_all_told() -> None:
    profile = probed_of(Truth(pageable={"h2d": 9e9, "d2h": 9e9}, duplex_bytes_per_s=58e9, most_params_per_s=1e9))
    assert len([line for line in remarks(profile) if line.startswith("cliff")]) == 3


def test_where_the_driver_tells_no_clock_the_remarks_say_what_to_install() -> None:
    for load, is_said in (((1.7e9, 650.0), False), ((None, None), True)):
        said = " ".join(remarks(probed_of(Truth(load=load))))
        assert ("pip install nvidia-ml-py" in said) is is_said


def test_cudnns_attention_is_left_out_and_the_profile_says_why_where_a_shape_is_refused() -> None:
    profile = probed_of(Truth(fails_at="cuDNN over 4096"))
    assert profile.device.attention.keys() == {"flash"}
    said = "left out: bf16 attention by cuDNN over 4096 tokens (CUDA error: unspecified launch failure)"
    assert said in " ".join(remarks(profile))
    whole = probed_of(Truth())
    assert "left out" not in " ".join(remarks(whole))
    for seq_len, backward in ((4096, False), (16384, True)):
        call = AttentionCall("bf16", seq_len, 128, grouped=False)
        flash, cudnn = (whole.attention_rate(call, backward, kernel) for kernel in ("flash", "cudnn"))
        assert_close(cudnn.value / flash.value, 1.6, 0.04)
        assert cudnn.inside_measured


# -- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fails_at": "copy"}, "the device failed while measuring copies"),
        ({"fails_at": "bf16 product"}, "the device failed while measuring"),
        ({"fails_at": "fp32 attention"}, "the device failed while measuring"),
        ({"fails_at": "pointwise"}, "the device failed while measuring"),
        ({"fails_at": "pinned"}, "the device failed while measuring copies"),
        ({"no_memory_at": "fp32 product"}, r"out of memory while measuring fp32 product \(8192, "),
        ({"largest_fraction": 0.1}, "out of memory while measuring device memory"),
    ],
)
def test_a_device_that_fails_ends_the_probe_in_one_line_that_says_where(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=said) as caught:
        probed_of(replace(Truth(), **changes), effort=THOROUGH_GPU if "no_memory_at" in changes else QUICK_GPU)
    assert str(caught.value).isprintable()
    assert "probe again" in str(caught.value)


@pytest.mark.parametrize("after", [0, 40, 400, 600, 800, 1100])
def test_a_device_that_vanishes_at_any_time_ends_the_probe_in_one_line(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(Truth())
    record, n = machine.device.record, itertools.count()

    def vanish(stream: Stream) -> object:
        if next(n) >= after:
            raise DeviceError("the GPU has fallen off the bus")
        return record(stream)

    monkeypatch.setattr(machine.device, "record", vanish)
    with pytest.raises(ProfileError, match="the GPU has fallen off the bus") as caught:
        probe_gpu(machine.device, machine.host, QUICK_GPU, lambda what, fraction: None)  # type: ignore[arg-type]
    assert str(caught.value).isprintable()


# -- both ways at once ------------------------------------------------------------------------------------------------


def test_only_the_time_in_which_both_directions_copied_counts() -> None:
    """Alone a copy takes 1 s; beside the other 2 s. One direction starts earlier, the other ends later."""
    first = [1.0, 2.0, 4.0, 6.0, 8.0]
    second = [4.0, 6.0, 8.0, 9.0, 10.0]
    assert rates_in_common([first, second], 100) == [50.0, 50.0]


def test_directions_that_never_met_are_an_error_and_no_rate() -> None:
    with pytest.raises(DeviceError, match="never ran at the same time"):
        rates_in_common([[1.0, 2.0], [3.0, 4.0]], 100)


@given(st.floats(min_value=1e-4, max_value=1), st.floats(min_value=0.7, max_value=1.4), st.integers(min_value=0, max_value=14))
def test_one_late_copy_does_not_change_the_rate(copy_s: float, ratio: float, late: int) -> None:
    durations = [[copy_s] * 16, [copy_s * ratio] * 16]
    durations[0][late] *= 5
    times = [list(itertools.accumulate(lane)) for lane in durations]
    fast, other = rates_in_common(times, 10**6)
    assert fast == pytest.approx(10**6 / copy_s) or late > 12
    assert other == pytest.approx(10**6 / copy_s / ratio)


# -- the command ------------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = FakeMachine(Truth(pageable={"h2d": 9e9, "d2h": 9e9}))
    monkeypatch.setattr(streams, "has_cuda", lambda: True)
    monkeypatch.setattr(cuda, "open_cuda", lambda index: machine.device)
    monkeypatch.setattr(measure, "host_beside_gpu", lambda quick: machine.host)
    out = tmp_path / "rig.json"
    result = CliRunner().invoke(probe, ["--quick", "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    assert (profile.name, profile.device.kind) == ("rig", "cuda")
    assert "cliff: copies of pageable memory are slow" in result.stderr
    assert "of pageable memory" in result.stderr


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_host_memory_that_the_user_gives_is_booked_and_said_to_be_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """All else is as measured."""
    machine, out = FakeMachine(Truth(host_bytes=12 * GB)), tmp_path / "rig.json"
    measured = probe_gpu(machine.device, machine.host, QUICK_GPU, lambda what, fraction: None, "rig")  # type: ignore[arg-type]
    assert measured.host.memory_bytes.value == 12 * GB
    monkeypatch.setattr("penstock.api.probe", lambda asked, *_, **__: measured if asked == device else None)
    words = ["--device", device, "-o", str(out)]
    assert CliRunner().invoke(probe, [*words, "--host-memory", "118GB"], catch_exceptions=False).exit_code == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    booked = profile.host.memory_bytes
    assert booked.value == 118 * GB
    source = profile.sources[booked.source]
    assert (source.kind, source.detail) == ("user", "host memory of 118 GB as given by the user")
    assert profile.device == measured.device
    assert profile.host.model_copy(update={"memory_bytes": None}) == measured.host.model_copy(update={"memory_bytes": None})
    assert CliRunner().invoke(probe, words, catch_exceptions=False).exit_code == 0
    assert Profile.from_json(json.loads(out.read_text())) == measured


@pytest.mark.parametrize("size", ["0", "-5GB", "plenty", "", "nan", "1e400GB", "12 parsecs"])
def test_host_memory_that_is_no_size_is_refused_in_one_line_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str
) -> None:
    monkeypatch.setattr("penstock.api.probe", None)
    with pytest.raises(PenstockError, match="write for example 80GB") as caught:
        CliRunner().invoke(probe, ["--host-memory", size, "-o", str(tmp_path / "rig.json")], catch_exceptions=False)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "rig.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_asking_for_one_is_an_error_of_one_line() -> None:
    with pytest.raises(ProfileError, match="--device cpu") as caught:
        CliRunner().invoke(probe, ["--device", "cuda"], catch_exceptions=False)
    assert str(caught.value).isprintable()


def test_the_host_beside_a_gpu_leaves_the_lanes_that_feed_it_the_cores_that_a_run_does() -> None:
    host = measure.host_beside_gpu(quick=True)
    n_cores = len(host.bench.all_cores)
    assert (host.bench.compute_cores, host.bench.host_cores) == split_beside_gpu(host.bench.all_cores)
    assert host.facts().n_cores == len(host.bench.host_cores)
    assert n_cores == 1 or not {*host.bench.compute_cores} & {*host.bench.host_cores}
    assert [core for node in host.facts().nodes for core in node]
