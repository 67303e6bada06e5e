"""The protocol of a device that a probe measures: CPU cores or a GPU, with its host; in tests a machine of known rates."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from .works import Call, Work


class DeviceError(Exception):
    """The device did not do what it was asked; the message is part of a line."""


class DeviceOutOfMemory(DeviceError):
    """There is not enough memory in that place."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the device and its host say of themselves."""

    kind: Literal["cpu", "cuda"]
    name: str
    driver: str  # versions of driver and libraries
    compute_threads: int | None
    capability: tuple[int, int]  # CUDA's compute capability
    host: str
    n_cores: int
    n_host_cores: int  # of them, left to copies and the optimizer
    host_bytes: int  # that new allocations can have
    nodes: Sequence[Sequence[int]]  # cores of each memory node

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


class PciLink(NamedTuple):
    """A PCIe link: as it runs now, and the most that device and slot could do together."""

    generation: int
    width: int
    most_generation: int
    most_width: int


class Load(NamedTuple):
    """What a device says of itself while it works: its multiprocessors' clock, its power draw, its link; None: it does not."""

    clock_hz: float | None = None
    watts: float | None = None
    link: PciLink | None = None


class Ready(NamedTuple):
    """A work with its operands in memory."""

    work: Work
    call: Call


class Run(NamedTuple):
    """Times of works in a row."""

    seconds: float  # wall time
    queued_s: float = 0.0  # for which other programs kept the one thread of the work from its core
    cpu_s: float = 0.0  # processor time of this process
    steal_s: float = 0.0  # that a hypervisor took from each core of the work, in the mean


class Device(Protocol):
    """A device and its host. Whatever fails raises DeviceError."""

    def facts(self) -> Facts: ...

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and of all, whoever has them; on a CPU, of the part that stands in for a device."""

    def reserve(self, n_bytes: int) -> None:
        """Allocate `n_bytes` of device memory and give it back at once, to see whether it can be had."""
        return

    def prepared(self, work: Work) -> AbstractContextManager[Ready]:
        """The work with its operands, as long as the context lasts."""

    def run(self, ready: Ready, n: int) -> Run:
        """Do the work n times; returns when it is done."""

    def beside(self, company: Sequence[Ready]) -> AbstractContextManager[None]:
        """Repeat these without end, each on its own lane, until the context ends; they have begun when it does."""

    def release(self) -> None:
        """Give back the host memory that works share."""
        return

    def load(self, ready: Ready, n: int) -> Load:
        """What the device says of itself while it does the work n times: a link, for one, may sleep while idle."""
        return Load()
