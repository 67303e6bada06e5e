"""Protocol of a device that the probe measures: CPU cores, a GPU with its host, or in tests a machine of known rates."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from .kernels_to_time import Benchmark, Call


class DeviceError(Exception):
    """Failure of a device; the message becomes part of a line."""


class DeviceOutOfMemory(DeviceError):
    """Out of device or host memory."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties that the device and its host report."""

    kind: Literal["cpu", "cuda"]
    name: str
    driver: str  # versions of driver and libraries
    compute_threads: int | None
    capability: tuple[int, int]  # CUDA's compute capability
    host: str
    n_cores: int
    n_host_cores: int  # cores for copies and the optimizer
    host_bytes: int  # available to new allocations
    nodes: Sequence[Sequence[int]]  # cores of each NUMA node
    instructions: str | None = None  # of a CPU that computes

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


class PciLink(NamedTuple):
    """PCIe link: current state, and the maximum of device and slot together."""

    generation: int
    width: int
    most_generation: int
    most_width: int


class Load(NamedTuple):
    """State of a device under load: multiprocessor clock, power draw, link; None: not reported."""

    clock_hz: float | None = None
    watts: float | None = None
    link: PciLink | None = None


class Ready(NamedTuple):
    """Benchmark with its operands in memory."""

    work: Benchmark
    call: Call


class Run(NamedTuple):
    """Times of consecutive repetitions of a benchmark."""

    seconds: float  # wall time
    queued_s: float = 0.0  # run-queue time of a benchmark's single thread
    cpu_s: float = 0.0  # processor time of this process
    steal_s: float = 0.0  # mean steal time per core


class Device(Protocol):
    """Device and its host. Methods raise DeviceError on failure."""

    def facts(self) -> Facts: ...

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory; on a CPU, of the host memory that serves as device memory."""

    def reserve(self, n_bytes: int) -> None:
        """Allocate and free `n_bytes` of device memory; raise DeviceOutOfMemory if it does not fit."""
        return

    def prepared(self, work: Benchmark) -> AbstractContextManager[Ready]:
        """Allocate the operands of a benchmark until the context ends."""

    def run(self, ready: Ready, n: int) -> Run:
        """Perform the benchmark n times and wait for completion."""

    def background(self, company: Sequence[Ready]) -> AbstractContextManager[None]:
        """Repeat these benchmarks on their lanes until the context ends. All have begun when the context begins."""

    def release(self) -> None:
        """Free the host memory that benchmarks share."""
        return

    def load(self, ready: Ready, n: int) -> Load:
        """Return the state of the device while it performs the benchmark n times, because e.g. an idle link saves power."""
        return Load()
