"""CUDA device of the probe: one stream per lane, blocking events, host memory registered in place at its exact size.

Errors of torch become a DeviceError of one line. Host work is performed by a `CpuDevice`.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.runtime.errors import PlanError, ProfileError
from penstock.runtime.host.slabs import SLAB_BYTES, host_slab, register_for_dma, unregister
from penstock.runtime.machines.lanes import split_beside_gpu
from penstock.runtime.machines.streams import CudaStreams
from penstock.runtime.plan import Lane
from penstock.runtime.units import MiB, on_one_line

from .cpu import CpuDevice, cpu_name, repeating
from .device import Device, DeviceError, DeviceOutOfMemory, Facts, Load, PciLink, Ready, Run
from .kernels_to_time import COLD_BYTES, HANDOVER, Benchmark, Call, copying

PCI_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s per lane
DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
WORKS_AHEAD = 8  # queued in a stream while a benchmark is repeated in the background: copies of 64 MiB fill 10 ms
WORKING_BYTES = 512 * MiB  # operands, used in rotation: larger than any device cache (at most 256 MiB)


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of torch to a DeviceError with a message of one line."""
    try:
        yield
    except (RuntimeError, AssertionError, PlanError) as error:
        line = on_one_line(str(error).strip().partition("\n")[0] or type(error).__name__, 160)
        no_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in line.lower() or "ALLOC_FAILED" in line
        raise (DeviceOutOfMemory if no_memory else DeviceError)(line) from None


@contextmanager
def registered(slab: torch.Tensor) -> Iterator[None]:
    """Keep a slab registered for DMA, in pieces that threads register in parallel, like the slabs of a run."""
    pieces = {str(i): piece for i, piece in enumerate(slab.split(SLAB_BYTES))}
    with translated():
        addresses = register_for_dma(pieces, n_threads=len(pieces))
    try:
        yield
    finally:
        unregister(addresses)


class CudaDevice(Device):
    """One CUDA device of this process, and its host."""

    def __init__(self, index: int) -> None:
        """Raise ProfileError if the device does not exist or torch cannot use it."""
        if not torch.cuda.is_available():
            raise ProfileError("no CUDA device is visible to torch; use --device cpu, or a shipped profile with --machine")
        if index >= (n_devices := torch.cuda.device_count()):
            raise ProfileError(f"there is no CUDA device {index}; torch sees {n_devices}, counted from 0")
        self.host, self._device = CpuDevice(split_beside_gpu, registered), torch.device("cuda", index)
        try:
            with translated():
                self._streams = {lane: torch.cuda.Stream(self._device) for lane in (Lane.GPU, Lane.H2D, Lane.D2H)}
        except DeviceError as error:
            raise ProfileError(f"CUDA device {index} cannot be used: {error}; check it, or use --device cpu") from None

    def facts(self) -> Facts:
        with translated():
            properties = torch.cuda.get_device_properties(self._device)
        driver = next((file.read_text().strip() for file in DRIVER_FILES if file.exists()), "unknown")
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        return replace(
            self.host.facts(), kind="cuda", name=properties.name, driver=f"driver {driver}, {runtime}, torch {torch.__version__}",
            compute_threads=None, capability=(properties.major, properties.minor), host=cpu_name(),
            host_bytes=self.host.free_bytes,  # no part serves as device memory
        )  # fmt: skip

    def memory(self) -> tuple[int, int]:
        with translated():
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            unused_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free_bytes + unused_bytes, total_bytes

    def reserve(self, n_bytes: int) -> None:
        with translated():
            memory = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
            del memory
            torch.cuda.empty_cache()

    def release(self) -> None:
        self.host.release()

    def load(self, ready: Ready, n: int) -> Load:
        if ready.work.lane is Lane.CPU:
            return Load()
        with self._issuing(ready.work.lane):
            for _ in range(n):
                ready.call()
            properties = torch.cuda.get_device_properties(self._device)
            address: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
            try:
                clock_mhz, draw = torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)
            except Exception:  # vendor library missing or not permitted; error types differ
                clock_mhz, draw = 0, 0
            link = None if None in address else pci_link(*address)
            torch.cuda.synchronize(self._device)
        return Load(clock_mhz * 1e6 or None, draw / (1 if torch.version.hip else 1000) or None, link)  # W on AMD, mW elsewhere

    @contextmanager
    def prepared(self, work: Benchmark) -> Iterator[Ready]:
        if work.make is not None:
            with self._issuing(Lane.GPU):
                call = work.make(self._device, WORKING_BYTES)
            yield Ready(work, call)
        elif work.place is not None:
            with self._copies(work) as call:
                yield Ready(work, call)
        else:
            with self.host.prepared(work) as ready:
                yield ready._replace(call=partial(self._hand_over, ready.call)) if work is HANDOVER else ready

    @contextmanager
    def _copies(self, work: Benchmark) -> Iterator[Call]:
        n_bytes = max(int(work.amount), COLD_BYTES)
        with translated(), ExitStack() as stack:
            cores = self.host.all_cores if work.node is None else self.host.facts().nodes[work.node]
            on_host = self.host.pool(cores).submit(lambda: host_slab(n_bytes).fill_(1)).result()  # first touch sets the NUMA node
            if work.place == "pinned":  # in place: torch's pinned allocator rounds sizes up to a power of two
                stack.callback(unregister, register_for_dma({"copies": on_host}))
            with self._issuing(Lane.GPU):
                on_device = torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
                torch.cuda.synchronize(self._device)
            stack.callback(torch.cuda.synchronize, self._device)  # before the memory is freed
            target, source = (on_device, on_host) if work.lane is Lane.H2D else (on_host, on_device)
            yield copying(target, source, int(work.amount))

    def _hand_over(self, between_threads: Call) -> None:
        """Hand over to another lane and back: wake a thread, record an event, wait for it on another stream and from a thread."""
        between_threads()
        for _ in range(2):
            with translated():
                recorded, passed = CudaStreams.event(is_timed=True), CudaStreams.event(is_timed=True)
                recorded.record(self._streams[Lane.GPU])
                self._streams[Lane.H2D].wait_event(recorded)
                passed.record(self._streams[Lane.H2D])
                passed.synchronize()

    def run(self, ready: Ready, n: int) -> Run:
        lane = ready.work.lane
        if lane is Lane.CPU:
            return self.host.run(ready, n)
        first, last = CudaStreams.event(is_timed=True), CudaStreams.event(is_timed=True)
        with self._issuing(lane):
            first.record(self._streams[lane])
            for _ in range(n):
                ready.call()
            last.record(self._streams[lane])
            last.synchronize()
            return Run(max(first.elapsed_time(last) / 1e3, 1e-9))

    @contextmanager
    def background(self, company: Sequence[Ready]) -> Iterator[None]:
        calls = [partial(self.run, ready, WORKS_AHEAD) for ready in company if ready.work.lane is not Lane.CPU]
        on_host = self.host.background([ready for ready in company if ready.work.lane is Lane.CPU])
        with on_host, ThreadPoolExecutor(len(Lane)) as pool, repeating([(pool, call) for call in calls]):
            yield

    @contextmanager
    def _issuing(self, lane: Lane) -> Iterator[None]:
        with translated(), torch.cuda.stream(self._streams[lane]), torch.no_grad():
            yield


def pci_link(domain: int, bus: int, device: int, devices: Path = Path("/sys/bus/pci/devices")) -> PciLink | None:
    """Return the PCIe link of the device at this address; None if the kernel does not report it. An idle link may report less."""
    folder = devices / f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        speeds = [(folder / f"{state}_link_speed").read_text() for state in ("current", "max")]  # "32.0 GT/s PCIe"
        generation, most_generation = (PCI_GENERATION[float(speed.split()[0])] for speed in speeds)
        width, most_width = (int((folder / f"{state}_link_width").read_text()) for state in ("current", "max"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return PciLink(generation, width, most_generation, most_width) if 0 < width <= most_width <= 32 else None
