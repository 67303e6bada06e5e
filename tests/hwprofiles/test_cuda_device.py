"""Does torch do what a probe asks of a GPU?

Held against torch itself where there is a GPU, and against a torch that only remembers where there is none.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwprofiles.probe import measure
from hwprofiles.probe.cuda import CudaDevice, open_cuda, translated
from hwprofiles.probe.device import Device, DeviceError, DeviceOutOfMemory, PciLink, Stream
from hwprofiles.probe.gpu import QUICK_GPU, probe_gpu
from hwprofiles.probe.pci import pci_folder, pci_link
from hwprofiles.schema import Profile
from penstock.cli.probe import text_of
from runtime.errors import ProfileError
from runtime.machines.streams import has_cuda


class RememberingCuda:
    """Stands in for torch.cuda: does the work on the CPU at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address
        self.most_pinned_bytes = 0
        self.current: list[object] = []
        self.asked: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.pinned[address] = n_bytes
        self.most_pinned_bytes = max(self.most_pinned_bytes, sum(self.pinned.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


class RememberedEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing
        assert blocking, "a thread that polls takes a core from the optimizer"
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None

    def elapsed_time(self, other: "RememberedEvent") -> float:
        assert other.stream is not None
        return 250.0


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, RememberingCuda]:
    stub = RememberingCuda()
    for name, value in {
        "Stream": lambda device: SimpleNamespace(device=device, wait_event=lambda event: stub.asked.append(("wait", event))),
        "Event": RememberedEvent,
        "stream": stub.stream,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (100, 200),
        "memory_reserved": lambda device: 50,
        "memory_allocated": lambda device: 20,
        "cudart": lambda: stub,
        "get_device_properties": lambda device: SimpleNamespace(name="Stub", major=9, minor=0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in stub.pinned)
    device = CudaDevice()
    device._device = torch.device("cpu")
    return device, stub


def test_host_memory_is_pinned_where_it_lies_in_its_exact_size_and_let_go(remembered: tuple[CudaDevice, RememberingCuda]) -> None:
    device, stub = remembered
    with device.allocate("pinned", 1_000_003, sorted(measure.os.sched_getaffinity(0))) as pinned:
        assert list(stub.pinned.values()) == [pinned.n_bytes] == [1_000_003]
        with device.allocate("pageable", 4096) as pageable, device.allocate("device", 4096) as on_device:
            assert len(stub.pinned) == 1
            device.copies("h2d", on_device, pageable, 1000)(1)
            assert on_device.bytes.tolist() == [1] * 1000 + [0] * 3096  # type: ignore[attr-defined]
    assert stub.pinned == {}
    with pytest.raises(ProfileError), device.allocate("pinned", 64):
        raise ProfileError("any")
    assert stub.pinned == {}


@pytest.mark.parametrize("n_bytes", [64, 4096, 10_000, 65_536, 300_000])
def test_copies_step_through_their_buffers_and_stay_inside(remembered: tuple[CudaDevice, RememberingCuda], n_bytes: int) -> None:
    device, _ = remembered
    with device.allocate("pageable", 300_000) as source, device.allocate("device", 300_000) as to:
        places = []
        issue = device.copies("h2d", to, source, n_bytes)
        for _ in range(200):
            to.bytes.zero_()  # type: ignore[attr-defined]
            issue(1)
            places.append(int(to.bytes.argmax()))  # type: ignore[attr-defined]
            assert int(to.bytes.sum()) == n_bytes  # type: ignore[attr-defined]
        assert len({*places}) == (1 if n_bytes == 300_000 else min(64, (300_000 - n_bytes) // max(n_bytes, 4096) + 1))
        assert all(at % 64 == 0 for at in places)


def test_memory_that_cannot_be_pinned_is_an_error_and_no_rate(
    remembered: tuple[CudaDevice, RememberingCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, stub = remembered
    monkeypatch.setattr(stub, "cudaHostRegister", lambda *_: 0)
    with pytest.raises(DeviceError, match="64 bytes of host memory cannot be pinned"), device.allocate("pinned", 64):
        pass


def test_copies_without_end_run_both_ways_until_the_context_ends(remembered: tuple[CudaDevice, RememberingCuda]) -> None:
    device, stub = remembered
    seen: list[str] = []
    record = device.record
    device.record = lambda stream: (seen.append(stream), record(stream))[1]  # type: ignore[method-assign]
    with device.copying(4096):
        for _ in range(20_000):
            if len({*seen}) == 2:
                break
            time.sleep(0.001)
    assert {*seen} == {Stream.H2D, Stream.D2H}
    assert stub.most_pinned_bytes == 2 * 4096
    n_copies = len(seen)
    assert stub.pinned == {}
    time.sleep(0.01)
    assert len(seen) == n_copies, "copies went on"


def test_an_error_in_copies_without_end_is_raised_where_they_end(remembered: tuple[CudaDevice, RememberingCuda]) -> None:
    device, _ = remembered

    def fail(*_: object) -> None:
        raise DeviceError("gone")

    device.copies = lambda *_: fail  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="gone"), device.copying(4096):
        pass


def test_every_kind_of_work_can_be_issued_and_timed(remembered: tuple[CudaDevice, RememberingCuda]) -> None:
    device, stub = remembered
    streams = device._streams
    issues = [device.smallest(), device.pointwise(600), device.product("bf16", 4, 8, 16), device.product("fp32", 4, 8, 16)]
    issues += [*device.attention("bf16", 1, 2, 8, 16, "flash"), *device.attention("fp32", 1, 2, 8, 16, "flash")]
    for issue in issues:
        first = device.record(Stream.COMPUTE)
        issue(2)
        last = device.record(Stream.COMPUTE)
        assert last.stream is streams[Stream.COMPUTE]  # type: ignore[attr-defined]
        device.wait(last)
        assert device.elapsed_s(first, last) == 0.25
    device.order(Stream.H2D, last)
    assert stub.asked == [("wait", last)]
    assert device.memory() == (130, 200)
    assert device.facts().capability == (9, 0)
    assert device.pci_link() is None
    device.reserve(100)
    device.release()
    assert stub.current == []


def enabled() -> dict[str, bool]:
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return {kind: bool(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()) for kind in kinds}


@pytest.mark.parametrize("preferred", [False, True])
def test_attention_is_by_the_kernel_that_is_asked_for_whichever_torch_would_take(
    remembered: tuple[CudaDevice, RememberingCuda], monkeypatch: pytest.MonkeyPatch, preferred: bool
) -> None:
    """And a kernel that refuses a dtype is none that the device has."""
    device, _ = remembered
    seen: list[dict[str, bool]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        assert is_causal
        seen.append(enabled())
        if seen[-1]["cudnn"] and q.dtype is torch.float32:
            raise RuntimeError("No available kernel. Aborting execution.")
        return q + k + v

    monkeypatch.setattr("hwprofiles.probe.works.F.scaled_dot_product_attention", attend)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(preferred)
    try:
        own, by_cudnn = enabled(), dict.fromkeys(("flash", "mem_efficient", "math"), False) | {"cudnn": True}
        for kernel, expected in (("flash", {kind: not on for kind, on in by_cudnn.items()}), ("cudnn", by_cudnn)):
            forward, backward = device.attention("bf16", 1, 2, 8, 16, kernel)  # type: ignore[arg-type]
            forward(2)
            backward(1)
            assert [*map(sorted, (each.items() for each in seen))] == [sorted(expected.items())] * 3
            assert enabled() == own, "what the process had is put back"
            seen.clear()
        assert [device.attention_kernels(dtype) for dtype in ("bf16", "fp32")] == [("flash", "cudnn"), ("flash",)]  # type: ignore[arg-type]
        n_tries = len(seen)
        device.attention_kernels("fp32")
        assert len(seen) == n_tries
        assert enabled() == own
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@REAL
def test_a_real_gpu_is_probed() -> None:
    profile = probe_gpu(open_cuda(0), measure.host_beside_gpu(quick=True), QUICK_GPU, lambda what, fraction: None)
    assert Profile.from_json(json.loads(text_of(profile))) == profile
    assert profile.device.context_bytes.value < profile.device.memory_bytes.value <= torch.cuda.mem_get_info(0)[1]
    for curve in (profile.link.h2d, profile.link.d2h):
        assert curve.bytes_per_s[-1].rate.value > 1e9
    assert profile.link.duplex_bytes_per_s.value > 1e9


@pytest.mark.gpu
@REAL
def test_a_real_gpu_copies_waits_and_runs_out_of_memory_as_the_protocol_says() -> None:
    device = open_cuda(0)
    with device.allocate("pinned", 4096) as on_host, device.allocate("device", 4096) as on_device:
        device.copies("h2d", on_device, on_host, 1000)(1)
        device.wait(device.record(Stream.H2D))
        assert int(on_device.bytes.sum()) == 1000  # type: ignore[attr-defined]
        assert on_host.bytes.is_pinned()  # type: ignore[attr-defined]
    with pytest.raises(DeviceOutOfMemory):
        device.reserve(2 * device.memory().total_bytes)
    issue = device.product("bf16", 4096, 4096, 4096)
    first = device.record(Stream.COMPUTE)
    issue(3)
    last = device.record(Stream.COMPUTE)
    device.wait(last)
    assert device.elapsed_s(first, last) > 0
    with device.copying(2**20):
        device.synchronise()
    found: Device = device
    assert found.facts().driver.startswith("driver ")


def test_torch_is_asked_whether_there_is_a_gpu() -> None:
    assert has_cuda() == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
            DeviceOutOfMemory,
            "2.00 GiB.",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), DeviceOutOfMemory, "CUDA error: out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), DeviceOutOfMemory, "CUBLAS"),
        (RuntimeError("CUDA error: an illegal memory access\nmore"), DeviceError, "CUDA error: an illegal memory access"),
        (AssertionError("Torch not compiled with CUDA enabled"), DeviceError, "not compiled"),
        (RuntimeError(""), DeviceError, "RuntimeError"),
    ],
)
def test_what_torch_raises_becomes_one_line(raised: Exception, kind: type[DeviceError], said: str) -> None:
    with pytest.raises(DeviceError) as caught, translated():
        raise raised
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_error_that_is_already_told_passes_as_it_is() -> None:
    with pytest.raises(DeviceOutOfMemory, match="as it is"), translated():
        raise DeviceOutOfMemory("as it is")


def test_a_gpu_that_is_not_there_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ProfileError, match="no CUDA device 2; torch sees 2"):
        open_cuda(2)


# -- how a device is attached -----------------------------------------------------------------------------------------


def link_files(folder: Path, **texts: str) -> Path:
    defaults = {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "8"}
    for name, text in (defaults | {"max_link_width": "16"} | texts).items():
        (folder / name).write_text(text + "\n")
    return folder


def test_the_link_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    assert pci_link(link_files(tmp_path)) == PciLink(4, 8, 5, 16)
    assert pci_folder(0, 0x1A, 0, tmp_path) == tmp_path / "0000:1a:00.0"


@pytest.mark.parametrize(
    "texts",
    [
        {"current_link_speed": "Unknown"},
        {"current_link_speed": "17.0 GT/s PCIe"},
        {"max_link_speed": ""},
        {"current_link_width": "0"},
        {"current_link_width": "x8"},
        {"max_link_width": "255"},
    ],
)
def test_a_link_that_the_kernel_does_not_know_is_none(tmp_path: Path, texts: dict[str, str]) -> None:
    assert pci_link(link_files(tmp_path, **texts)) is None
    assert pci_link(tmp_path / "nowhere") is None
