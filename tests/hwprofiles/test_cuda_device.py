"""CudaDevice of the probe: on a GPU if available, else on a fake of torch.cuda that runs work on the CPU and records calls."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.cli.outputs import json_text
from penstock.hwprofiles.probe import host_kernels
from penstock.hwprofiles.probe import kernels_to_time as kernels
from penstock.hwprofiles.probe.cuda import CudaDevice, pci_link, translated
from penstock.hwprofiles.probe.device import DeviceError, DeviceOutOfMemory, Load, PciLink
from penstock.hwprofiles.probe.measurements import GPU
from penstock.hwprofiles.probe.probe import probed
from penstock.hwprofiles.schema import Profile
from penstock.runtime.errors import ProfileError
from penstock.runtime.machines.streams import has_cuda
from tests.fake_cuda import FakeCuda


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, FakeCuda]:
    calls: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 2, "synchronize": lambda device: None,
        "empty_cache": lambda: None, "mem_get_info": lambda device: (100, 200), "memory_reserved": lambda device: 50,
        "memory_allocated": lambda device: 20, "clock_rate": lambda device: 1700, "power_draw": lambda device: 650_000,
        "get_device_properties": lambda device: SimpleNamespace(name="Fake", major=9, minor=0),
    }  # fmt: skip
    cuda, device = FakeCuda(monkeypatch, **calls), CudaDevice(1)
    device._device = torch.device("cpu")
    monkeypatch.setattr("penstock.hwprofiles.probe.cuda.WORKING_BYTES", 0)
    return device, cuda


@pytest.mark.parametrize("work", [kernels.copy("h2d", 1000), kernels.copy("d2h", 2**20), kernels.copy("h2d", 4096, node=0)])
def test_host_memory_is_pinned_where_it_is_and_let_go(remembered: tuple[CudaDevice, FakeCuda], work: Any) -> None:
    device, cuda = remembered
    with device.prepared(work) as ready:
        assert list(cuda.registered.values()) == [kernels.COLD_BYTES]
        assert device.run(ready, 3).seconds > 0
        assert device.load(ready, 2) == Load(1.7e9, 650.0, None)
    assert cuda.registered == {}
    with device.prepared(kernels.copy("h2d", 1000, "pageable")) as ready:
        assert cuda.registered == {}
        device.run(ready, 1)
    with pytest.raises(ProfileError), device.prepared(work):
        raise ProfileError("any")
    assert cuda.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error(remembered, monkeypatch):
    monkeypatch.setattr(remembered[1], "cudaHostRegister", lambda *_: 2)
    with pytest.raises(DeviceError, match="cannot be locked in memory"), remembered[0].prepared(kernels.copy("h2d", 64)):
        pass


def test_company_runs_both_ways_until_the_context_ends(remembered: tuple[CudaDevice, FakeCuda]) -> None:
    device, cuda = remembered
    both, n_calls = [kernels.copy("h2d", 2**20), kernels.copy("d2h", 2**20)], [0]
    with device.prepared(both[0]) as up, device.prepared(both[1]) as down, device.background([up, down]):
        assert cuda.most_slabs == 2
        with device.prepared(host_kernels.updates(1, 50_000_000)) as ready:
            assert device.run(ready, 1).seconds > 0
            assert [n for n in cuda.registered.values() if n != kernels.COLD_BYTES] == [50_000_000], (
                "the memory of the host's threads"
            )
    device.release()
    assert (cuda.registered, cuda.current) == ({}, [])

    def fail() -> None:
        n_calls[0] += 1
        raise RuntimeError("CUDA error: gone")

    with pytest.raises(DeviceError, match="CUDA error: gone"), device.background([up._replace(call=fail)]):
        pass
    assert n_calls == [1]


def test_every_kind_of_work_is_made_and_timed_on_its_stream(remembered: tuple[CudaDevice, FakeCuda]) -> None:
    device, cuda = remembered
    kinds = [kernels.library_calls(is_cpu=False), kernels.pointwise(600), kernels.eager(4, 8, 16), *kernels.norm(4, 8).values()]
    kinds += [kernels.loss(4, 16), kernels.activation(4, 8), kernels.unpacking("int8", [(4, 8)]), kernels.narrow(4, 8, 16, 2)]
    kinds += [kernels.behind(kernels.product("bf16", 4, 8, 16), work) for work in kinds[-4:]]
    for dtype in ("bf16", "fp32"):
        kinds += [kernels.product(dtype, 4, 8, 16), *kernels.attention(dtype, 1, 2, 8, 16).values()]
    for work in kinds:
        with device.prepared(work) as ready:
            assert device.run(ready, 2).seconds > 0
    assert len(cuda.timed) >= len(kinds)
    assert all(first is last for first, last in cuda.timed)
    assert {*cuda.flags} == {(True, True)}, "events must block, because polling takes a core from the optimizer"
    with device.prepared(kernels.HANDOVER) as ready:
        assert device.run(ready, 1).seconds < 10
    assert len(cuda.waits) == 2, "another stream waits for the first, in both directions"
    assert device.memory() == (130, 200)
    facts = device.facts()
    assert (facts.name, facts.capability, facts.host_bytes) == ("Fake", (9, 0), device.host.free_bytes)
    device.reserve(100)
    assert cuda.current == []


def enabled() -> set[str]:
    return {kind for kind in ("flash", "mem_efficient", "math", "cudnn") if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()}


@pytest.mark.parametrize("preferred", [False, True])
def test_attention_is_by_the_kernel_that_is_asked_for(remembered, monkeypatch, preferred):
    """Independent of torch's preference; an unsupported kernel is an error."""
    device, kernels_used = remembered[0], list[set[str]]()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        assert is_causal
        kernels_used.append(enabled())
        if q.dtype is torch.float32:
            raise RuntimeError("No available kernel. Aborting execution.")
        return q + k + v

    monkeypatch.setattr("penstock.hwprofiles.probe.kernels_to_time.F.scaled_dot_product_attention", attend)
    preference = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(preferred)
    try:
        default = enabled()
        for kernel, expected in (("flash", {"flash", "mem_efficient", "math"}), ("cudnn", {"cudnn"})):
            for work in kernels.attention("bf16", 1, 2, 8, 16, kernel).values():  # type: ignore[arg-type]
                with device.prepared(work) as ready:
                    device.run(ready, 2)
            assert kernels_used == [expected] * 3, "two forwards, and one before the backward"
            assert enabled() == default, "the settings of the process are restored"
            kernels_used.clear()
        refused = device.prepared(kernels.attention("fp32", 1, 2, 8, 16, "cudnn")["forward"])
        with pytest.raises(DeviceError, match="No available kernel"), refused as ready:
            device.run(ready, 1)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(preference)


@pytest.mark.gpu
def test_a_real_gpu_is_probed() -> None:
    profile = probed(CudaDevice(0), GPU.quick(), lambda kind, fraction: None)
    assert Profile.from_json(json.loads(json_text(profile.to_json()))) == profile
    assert profile.device.context_bytes.value < profile.device.memory_bytes.value <= torch.cuda.mem_get_info(0)[1]
    for curve in (profile.link.h2d, profile.link.d2h):
        assert curve.bytes_per_s[-1].rate.value > 1e9
    assert profile.link.duplex_bytes_per_s.value > 1e9


@pytest.mark.gpu
def test_a_real_gpu_copies_and_runs_out_of_memory() -> None:
    device = CudaDevice(0)
    with device.prepared(kernels.copy("h2d", 2**20)) as up, device.prepared(kernels.copy("d2h", 2**20)) as down:
        alone = device.run(up, 100)
        with device.background([down]):
            assert device.run(up, 100).seconds > 0
        assert alone.seconds > 0
    with pytest.raises(DeviceOutOfMemory):
        device.reserve(2 * device.memory()[1])
    with device.prepared(kernels.product("bf16", 4096, 4096, 4096)) as ready:
        assert device.run(ready, 3).seconds > 0
    assert device.facts().driver.startswith("driver ")


def test_torch_is_asked_whether_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_cuda() == torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ProfileError, match="no CUDA device 2; torch sees 2"):
        CudaDevice(2)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB.\nSee documentation"), DeviceOutOfMemory, "2.00 GiB."),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), DeviceOutOfMemory, "CUDA error: out of memory"),
        (RuntimeError("CUDA error: an illegal memory access\nmore"), DeviceError, "CUDA error: an illegal memory access"),
        (DeviceOutOfMemory("told already"), DeviceOutOfMemory, "told already"),
    ],
)
def test_what_torch_raises_becomes_one_line(raised: Exception, kind: type[DeviceError], text: str) -> None:
    with pytest.raises(DeviceError) as caught, translated():
        raise raised
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("texts", "link"), [({}, PciLink(4, 8, 5, 16)), ({"current_link_speed": "Unknown"}, None), ({"max_link_width": "255"}, None)]
)
def test_the_link_is_read_as_the_kernel_tells_it(tmp_path: Path, texts: dict[str, str], link: PciLink | None) -> None:
    folder = tmp_path / "0000:1a:00.0"
    folder.mkdir()
    defaults = {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "8"}
    for name, text in (defaults | {"max_link_width": "16"} | texts).items():
        (folder / name).write_text(text + "\n")
    assert pci_link(0, 0x1A, 0, tmp_path) == link
    assert pci_link(0, 0, 0, tmp_path) is None
