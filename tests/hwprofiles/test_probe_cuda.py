"""Probe of a fake GPU with known rates: measured rates, cliffs, and errors of a failing device."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.outputs import json_text
from penstock.cli.probe import headline, probe, remarks
from penstock.hwprofiles.components import AttentionCall
from penstock.hwprofiles.probe import cuda, host_kernels
from penstock.hwprofiles.probe import kernels_to_time as kernels
from penstock.hwprofiles.probe.device import DeviceError, PciLink
from penstock.hwprofiles.probe.measurements import GPU, Effort
from penstock.hwprofiles.probe.probe import probed
from penstock.hwprofiles.probe.timings import Stopwatch
from penstock.hwprofiles.schema import Profile
from penstock.runtime.errors import ProfileError
from penstock.runtime.machines import streams
from tests.fake_gpu import GB, FakeGpu, GiB, Truth

MOST_OFF = 0.03  # maximum relative error of a rate, with noise of 1 % and an interruption every three seconds
QUICK, QUIET = GPU.quick(), Truth(noise_fraction=0.0, hiccups_per_s=0.0)


def probed_of(truth: Truth, seed: int = 0, effort: Effort = QUICK, name: str = "mine") -> Profile:
    return probed(FakeGpu(truth, seed), effort, lambda kind, fraction: None, name)


@pytest.fixture(scope="module")
def thorough() -> tuple[Profile, FakeGpu, list[tuple[str, float]]]:
    device, steps = FakeGpu(Truth(), seed=7), list[tuple[str, float]]()
    return probed(device, GPU, lambda kind, fraction: steps.append((kind, fraction)), "mine"), device, steps


def assert_close(value: float, true: float, most_off: float = MOST_OFF) -> None:
    assert abs(value / true - 1) <= most_off, f"{value:.4g} where {true:.4g} is true"


def assert_found(profile: Profile, truth: Truth) -> None:
    """Compare every number of the profile with the truth."""
    device, link, host = profile.device, profile.link, profile.host
    for dtype, points in device.matmul.items():
        for p in points:
            n_flop = kernels.product(dtype, p.m, p.k, p.n).amount
            assert_close(p.flop_per_s.value, truth.flop_per_s[dtype] * n_flop / (n_flop + truth.work_lost_flop))
            assert (p.clock_hz, p.watts) == truth.load
    true = {"flash": truth.attention_flop_per_s, **({"cudnn": truth.cudnn_flop_per_s} if truth.cudnn_flop_per_s else {})}
    assert {kernel: {*grid} for kernel, grid in device.attention.items()} == {kernel: {*grid} for kernel, grid in true.items()}
    for kernel, rates in device.attention.items():
        for dtype, points in rates.items():
            assert [(a.seq_len, a.head_dim) for a in points] == [(a.seq_len, a.head_dim) for a in device.attention["flash"][dtype]]
            for a in points:
                assert_close(a.forward_flop_per_s.value, true[kernel][dtype])
                assert_close(a.backward_flop_per_s.value, 0.8 * true[kernel][dtype])
                assert (a.clock_hz, a.watts) == truth.load
    norms, eager = device.norms["torch-fused"], device.eager_bytes_per_s
    assert eager is not None
    for name in ("fused", "loss", "unpack", "narrow"):
        true_value = getattr(truth, f"{name}_fraction") * truth.memory_bytes_per_s
        assert_close(getattr(device, f"{name}_bytes_per_s").value, true_value, 2 * MOST_OFF)  # difference of two times
    assert (device.fp8_rate_fraction is None) == (truth.fp8_fraction is None)
    if device.fp8_rate_fraction is not None:  # the reference loses some work, FP8 products none here
        assert_close(device.fp8_rate_fraction.value, truth.fp8_fraction, 2 * MOST_OFF)
    assert device.sustained_fraction is None, "rates after warm-up are rates of a step"
    values = {
        device.memory_bytes_per_s.value: truth.memory_bytes_per_s,
        norms.forward_bytes_per_s.value: truth.norm_fractions[0] * truth.memory_bytes_per_s,
        norms.backward_bytes_per_s.value: truth.norm_fractions[1] * truth.memory_bytes_per_s,
        eager.value: truth.eager_fraction * truth.memory_bytes_per_s,
        device.kernel_overhead_s.value: truth.kernel_s,
        device.op_overhead_s.value: truth.handover_s,
        link.duplex_bytes_per_s.value: min(truth.duplex_bytes_per_s, sum(truth.pinned.values())),
        host.dram_bytes_per_s.value: truth.dram_bytes_per_s,
        host.reduce_bytes_per_s.value: truth.reduce_bytes_per_s,
        host.page_fault_bytes_per_s.value: truth.page_fault_bytes_per_s,
    }
    share = min(1.0, truth.duplex_bytes_per_s / sum(truth.pinned.values()))
    for direction, curve in (("h2d", link.h2d), ("d2h", link.d2h)):
        pinned = truth.pinned[direction]
        assert curve.under_optimizer_bytes_per_s is not None
        assert curve.duplex_bytes_per_s is not None
        values[curve.latency_s.value] = truth.copy_latency_s + 4096 / pinned
        values[curve.pageable_bytes_per_s.value] = truth.pageable[direction]
        values[curve.under_optimizer_bytes_per_s.value] = truth.under_optimizer_fraction * pinned
        values[curve.duplex_bytes_per_s.value] = share * pinned
        for n_bytes in (2**20, 10**7, 2**28):
            values[profile.copy_s(direction, n_bytes)] = truth.copy_latency_s + n_bytes / pinned  # type: ignore[arg-type]
    for point in host.optimizer:
        rate = min(point.threads * truth.params_per_s_of_thread, truth.most_params_per_s)
        values |= {point.params_per_s.value: rate, point.params_per_s_under_copies.value: truth.under_copies_fraction * rate}
        assert point.params_per_s_under_uploads is not None
        values[point.params_per_s_under_uploads.value] = truth.under_uploads_fraction * rate
    for value, true_value in values.items():
        assert_close(value, true_value)


def test_a_thorough_probe_finds_what_the_machine_can_do(thorough: tuple[Profile, FakeGpu, object]) -> None:
    assert_found(thorough[0], thorough[1].truth)


def test_a_quick_probe_finds_the_same_whatever_the_noise() -> None:
    assert_found(probed_of(Truth(noise_fraction=0.015), seed=1), Truth())


def test_a_machine_of_another_kind_is_found_too() -> None:
    truth = Truth(
        flop_per_s={"bf16": 160e12, "fp32": 40e12}, attention_flop_per_s={"bf16": 120e12, "fp32": 9e12},
        cudnn_flop_per_s={}, memory_bytes_per_s=0.9e12, pinned={"h2d": 25e9, "d2h": 26e9},
        pageable={"h2d": 18e9, "d2h": 17e9}, duplex_bytes_per_s=40e9, copy_latency_s=15e-6, total_bytes=24 * GiB,
        n_host_cores=11, capability=(8, 9), fp8_fraction=None, link=PciLink(4, 16, 4, 16), under_optimizer_fraction=0.7,
    )  # fmt: skip
    profile = probed_of(truth)
    assert_found(profile, truth)
    assert "cliff" not in profile.summary
    assert "left out" not in " ".join(remarks(profile)), "an unsupported kernel must not be reported"
    assert [p.threads for p in profile.host.optimizer] == [1, 4, 11]


def test_memory_is_what_can_be_had_after_the_kernels(thorough: tuple[Profile, FakeGpu, object]) -> None:
    profile, device, _ = thorough
    context = device.truth.bare_context_bytes + device.truth.kernels_bytes
    assert profile.device.context_bytes.value == context
    free = device.truth.total_bytes - context
    assert 0.979 * free < profile.device.memory_bytes.value - context <= device.truth.largest_fraction * free
    assert profile.host.memory_bytes.value == 1500 * GB
    assert device.used_bytes == context, "the probe kept device memory"


def test_a_probed_gpu_reads_back_and_says_what_it_rests_on(thorough: tuple[Profile, object, object]) -> None:
    profile = thorough[0]
    assert Profile.from_json(json.loads(json_text(profile.to_json()))) == profile
    assert (profile.name, profile.device.kind, profile.device.compute_threads) == ("mine", "cuda", None)
    not_measured = {place for place, q in profile.quantities() if profile.sources[q.source].kind != "measured"}
    assert not_measured == {"device.workspace_bytes", "link.host_cores_per_copy", "host.runtime_bytes"}
    for source in profile.sources.values():
        assert source.date
        assert (source.device, source.driver) == ("Fake GPU; Fake CPU", "driver 1.2")
    assert {q.source for _, q in profile.quantities()} == set(profile.sources)
    assert headline(profile).row_count > 25
    assert any(".cudnn." in str(cell) for cell in headline(profile).columns[0].cells)


def test_what_does_not_fit_or_takes_too_long_is_left_out() -> None:
    small = probed_of(Truth(total_bytes=3 * GiB, flop_per_s={"bf16": 60e12, "fp32": 0.5e12}), effort=GPU)
    shapes = {(p.m, p.k, p.n) for p in small.device.matmul["bf16"]}
    assert (2048, 8192, 8192) in shapes
    assert (16384, 16384, 16384) not in shapes
    fp32 = small.device.matmul["fp32"]
    assert max(kernels.product("fp32", p.m, p.k, p.n).amount / p.flop_per_s.value for p in fp32) <= GPU.longest_s
    assert max(a.seq_len for a in small.device.attention["flash"]["bf16"]) == 16384
    assert max(p.n_bytes for p in small.link.h2d.bytes_per_s) == 256 * 2**20
    slow = probed_of(Truth(attention_flop_per_s={"bf16": 8e12, "fp32": 8e12}, cudnn_flop_per_s={}), effort=GPU)
    lengths = {(a.head_dim, a.seq_len) for a in slow.device.attention["flash"]["bf16"]}
    assert {(64, 32768), (128, 16384)} <= lengths
    assert (128, 32768) not in lengths, "its backward would take too long, and no point has one way alone"
    little_host = probed_of(Truth(host_bytes=2 * GB), effort=GPU)
    assert max(p.n_bytes for p in little_host.link.d2h.bytes_per_s) == 256 * 2**20


# -- the stopwatch ----------------------------------------------------------------------------------------------------


def watched(truth: Truth, width: int, soak_s: float = 0.0) -> tuple[float, float, FakeGpu]:
    """Return rate and spread of a product, and the device."""
    device, work = FakeGpu(truth), kernels.product("bf16", width, width, width)
    with device.prepared(work) as ready:
        timing = Stopwatch(device, GPU).timing(ready, soak_s)
    return work.amount / timing.value, timing.spread_fraction, device


def test_a_rate_counts_once_clocks_have_warmed_up() -> None:
    cold = replace(QUIET, cold_fraction=0.3, warm_s=2.0, work_lost_flop=0.0)
    assert_close(watched(cold, 8192, soak_s=2.5)[0], 700e12, 0.001)
    settled, _, device = watched(cold, 8192)
    assert settled < 690e12, "without a soak clocks that rise slowly look settled"
    assert device.worked_s < 2.0


def test_a_hiccup_moves_neither_a_time_nor_its_spread() -> None:
    rate, spread, _ = watched(replace(QUIET, hiccups_per_s=3.0, hiccup_s=0.5, cold_fraction=1.0, work_lost_flop=0.0), 8192)
    assert_close(rate, 700e12, 0.001)
    assert spread <= 0.02


def test_a_quota_shows_beside_the_rates_and_wall_time_counts() -> None:
    """Cores throttled after some time: no time is subtracted, and the rate of the last third over the first is reported."""
    device, work = FakeGpu(replace(QUIET, quota_s=0.9, throttled_fraction=0.5)), host_kernels.updates(15)
    with device.prepared(work) as ready:
        timing = Stopwatch(device, GPU).timing(ready)
    assert timing.use is not None
    assert_close(timing.use.last_third, 0.5)
    assert_close(device.host_s, sum((GPU.sustained_s, 2 * work.amount / 9e9)), 0.2)
    profile = probed_of(replace(QUIET, cores_fraction=0.8))
    host = profile.sources[profile.host.optimizer[-1].params_per_s.source].detail
    assert "optimizer on 15 threads 12.00 cores, steal 0%, 1.00" in host
    assert "during h2d during d2h" in host
    assert profile.host.optimizer[-1].params_per_s.value == pytest.approx(9e9, rel=0.001)


# -- cliffs -----------------------------------------------------------------------------------------------------------

TWO_NODES = (tuple(range(8)), tuple(range(8, 16)))
GEN4 = {"pinned": {"h2d": 26e9, "d2h": 26.5e9}, "pageable": {"h2d": 20e9, "d2h": 20e9}, "duplex_bytes_per_s": 45e9}


def slow(pinned: float, duplex: float) -> dict[str, Any]:
    """Return fields of a link with equal rates of pageable and pinned memory."""
    return {key: {"h2d": pinned, "d2h": pinned} for key in ("pinned", "pageable")} | {"duplex_bytes_per_s": duplex}


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"pageable": {"h2d": 16e9, "d2h": 16e9}}, "slow pageable memory", "to the device 16 GB/s instead of 55"),
        (GEN4 | {"link": PciLink(5, 8, 5, 16)}, "narrow link", "runs at Gen5 x8 and the device can do Gen5 x16"),
        (GEN4, "narrow link", "that PCIe Gen5 x16 gives"),
        (slow(4.5e9, 8e9), "confidential computing", "single digits both ways"),
        ({"nodes": TWO_NODES, "remote_fraction": 0.8}, "remote memory", "from node 1"),
        ({"hot_s": 7.0, "hot_fraction": 0.8}, "throttling clocks", "0.80 of its rate"),
        ({"duplex_bytes_per_s": 60e9}, "shared directions", "0.5"),
        ({"cores_fraction": 0.6}, "cores taken", "host copies on 16 threads had 9.6 cores' time"),
        ({"most_params_per_s": 1.5e9}, "optimizer does not scale", "1.5 Gparam/s on 15 threads"),
        ({"bare_context_bytes": 5 * GB}, "shared device", "5 GB of device memory"),
        ({"slow_at": "activation"}, "slow kernels", "activation runs call by call; the profile has the rates without"),
    ],
)
def test_a_cliff_is_named_and_told_and_no_other_is(changes: dict[str, Any], name: str, text: str) -> None:
    profile = probed_of(replace(QUIET, **changes))
    assert profile.summary.partition("; cliffs: ")[2] == name
    (line,) = [line for line in remarks(profile) if line.startswith("cliff: ")]
    assert text in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": TWO_NODES, "remote_fraction": 0.97},
        GEN4 | {"capability": (9, 0), "link": PciLink(4, 16, 4, 16)},
        slow(300e9, 550e9) | {"link": PciLink(1, 1, 5, 16)},  # copies use another link
        {"most_params_per_s": 3e9, "dram_bytes_per_s": 100e9},  # the memory is the bottleneck
    ],
)
def test_a_machine_as_its_parts_promise_has_no_cliffs(changes: dict[str, Any]) -> None:
    profile = probed_of(replace(QUIET, **changes))
    assert "cliff" not in profile.summary
    assert not [line for line in remarks(profile) if line.startswith("cliff")]


def test_cudnns_attention_is_left_out_where_it_refuses_a_shape() -> None:
    profile = probed_of(Truth(fails_at="cudnn over 4096"))
    assert profile.device.attention.keys() == {"flash"}
    text = "left out: bf16 attention by cudnn over 4096 tokens, forward (CUDA error: unspecified launch failure)"
    assert text in " ".join(remarks(profile))
    complete = probed_of(Truth())
    call = AttentionCall("bf16", 4096, 128, grouped=False)
    flash, cudnn = (complete.attention_rate(call, False, kernel) for kernel in ("flash", "cudnn"))
    assert_close(cudnn.value / flash.value, 1.6, 0.04)
    assert cudnn.inside_measured


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fails_at": "pageable"}, "the device failed while measuring pageable h2d copies"),
        ({"no_memory_at": "fp32 product (8192"}, r"out of memory while measuring fp32 product \(8192, "),
        ({"largest_fraction": 0.1}, "out of memory while measuring device memory"),
        ({"total_bytes": 720_000_000}, "not even 1024 tokens fit the free device memory"),
    ],
)
def test_a_device_that_fails_ends_the_probe_in_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ProfileError, match=text) as caught:
        probed_of(replace(Truth(), **changes))
    assert str(caught.value).isprintable()
    assert "probe again" in str(caught.value)


@pytest.mark.parametrize("n_runs", [0, 400])
def test_a_device_that_vanishes_at_any_time_is_one_line(n_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeGpu(Truth())
    run = device.run

    def vanish(*args: Any) -> Any:
        if device.n_runs >= n_runs:
            raise DeviceError("the GPU has fallen off the bus")
        return run(*args)

    monkeypatch.setattr(device, "run", vanish)
    with pytest.raises(ProfileError, match="the GPU has fallen off the bus") as caught:
        probed(device, QUICK, lambda kind, fraction: None)
    assert str(caught.value).isprintable()


# -- the command ------------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(streams, "has_cuda", lambda: True)
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: FakeGpu(Truth(pageable={"h2d": 9e9, "d2h": 9e9})))
    out = tmp_path / "rig.json"
    result = CliRunner().invoke(probe, ["--quick", "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    assert (profile.name, profile.device.kind) == ("rig", "cuda")
    assert "cliff: copies of pageable memory are slow" in result.stderr
    assert "of pageable memory" in result.stderr


def test_host_memory_that_the_user_gives_is_said_to_be_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured, out = probed_of(Truth(host_bytes=12 * GB), name="rig"), tmp_path / "rig.json"
    monkeypatch.setattr("penstock.api.probe", lambda *_, **__: measured)
    assert CliRunner().invoke(probe, ["-o", str(out), "--host-memory", "118GB"], catch_exceptions=False).exit_code == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    booked = profile.host.memory_bytes
    assert booked.value == 118 * GB
    assert profile.sources[booked.source].kind == "user"
    assert profile.device == measured.device
    assert CliRunner().invoke(probe, ["-o", str(out)], catch_exceptions=False).exit_code == 0
    assert Profile.from_json(json.loads(out.read_text())) == measured


@pytest.mark.parametrize("effort", [QUICK, GPU])
def test_small_products_may_be_as_slow_as_they_are(effort):
    """On an H100 products with m = 512 and width 1024 reach an eighth of the rate of large ones."""
    truth = Truth(work_lost_flop=1e11)
    assert_found(probed_of(truth, effort=effort), truth)
