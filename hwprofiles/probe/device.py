"""What must a device let us do to it, to be measured?

One small protocol that everything about a GPU goes through: `cuda.py` performs it with torch, tests with a machine whose rates
are known. Work is put on streams and takes its time there; events are marks on streams. The host beside it has one of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from hwprofiles.quantity import Dtype
from hwprofiles.schema import AttentionKernel, Direction

from .timings import Reading, Timing

Place = Literal["device", "pinned", "pageable"]
Issue = Callable[[int], object]  # puts a piece of work on its stream, n times in a row, and returns at once


class DeviceError(Exception):
    """The device did not do what it was asked; the message is part of a line."""


class DeviceOutOfMemory(DeviceError):
    """There is not so much memory in that place."""


class Stream(StrEnum):
    """Work on one stream is done in order; streams run beside each other."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"


@dataclass(frozen=True, slots=True)
class PciLink:
    """A PCIe link: as it runs now, and the most that device and slot could do together."""

    generation: int
    width: int
    most_generation: int
    most_width: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself."""

    name: str
    driver: str  # driver and runtime versions
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the host says of itself."""

    name: str
    n_cores: int  # left to copies and the optimizer
    memory_bytes: int  # that new allocations can have
    nodes: tuple[tuple[int, ...], ...]  # cores of each memory node


class Memory(NamedTuple):
    """Bytes of device memory, of all programs together."""

    free_bytes: int
    total_bytes: int


class Load(NamedTuple):
    """What a device says of itself while it works: its multiprocessors' clock, and what it draws; None: its driver is silent."""

    clock_hz: float | None
    watts: float | None


class Buffer(Protocol):
    """Memory in one place, written to once, so that all of it is there."""

    @property
    def n_bytes(self) -> int: ...


class Event(Protocol):
    """A mark on a stream; it is reached when all before it is done."""


class Device(Protocol):
    """A device with streams. Whatever fails raises DeviceError."""

    def facts(self) -> DeviceFacts: ...

    def pci_link(self) -> PciLink | None:
        """Its link now, which may sleep while idle; None where there is none, or the system does not say."""

    def memory(self) -> Memory: ...

    def load(self) -> Load: ...

    def release(self) -> None:
        """Give memory back that nothing uses."""

    def allocate(self, place: Place, n_bytes: int, cores: Sequence[int] | None = None) -> AbstractContextManager[Buffer]:
        """Memory of exactly `n_bytes`. Given cores, host memory is first touched by them, which places it beside them."""

    def reserve(self, n_bytes: int) -> None:
        """Allocate `n_bytes` of device memory and give it back at once, to see whether it can be had."""

    def copies(self, direction: Direction, to: Buffer, source: Buffer, n_bytes: int) -> Issue:
        """Copies of that size on the direction's stream, which step through both buffers."""

    def copying(self, n_bytes: int) -> AbstractContextManager[None]:
        """Pinned copies of that size, both ways without end, until the context does."""

    def product(self, dtype: Dtype, m: int, k: int, n: int) -> Issue:
        """(m, k) @ (k, n) and the two products of its backward, on random data that no cache holds from one call to the next."""

    def attention_kernels(self, dtype: Dtype) -> Sequence[AttentionKernel]:
        """Those that it has for this dtype, `flash` always."""

    def attention(
        self, dtype: Dtype, n_sequences: int, n_heads: int, seq_len: int, head_dim: int, kernel: AttentionKernel
    ) -> tuple[Issue, Issue]:
        """Causal attention as transformers calls it, by this kernel and no other: forward, and backward."""

    def norm(self, n_tokens: int, width: int) -> tuple[Issue, Issue]:
        """An RMS norm in one kernel, in bf16, on data that no cache holds: forward, and backward."""

    def eager(self, n_tokens: int, width: int, inner: int) -> tuple[Issue, int, int]:
        """What a layer's unfused modules do besides products, both ways; the bytes that it moves, and its calls."""

    def pointwise(self, n_bytes: int) -> Issue:
        """One kernel that reads and writes `n_bytes` in sum."""

    def smallest(self) -> Issue:
        """A library call on almost no data."""

    def record(self, stream: Stream) -> Event: ...

    def order(self, stream: Stream, event: Event) -> None:
        """What is put on the stream from now on waits for the event."""

    def wait(self, event: Event) -> None:
        """Block this thread until the event is reached."""

    def elapsed_s(self, first: Event, last: Event) -> float:
        """Between two events that were reached."""

    def synchronise(self) -> None:
        """Block this thread until all work is done."""


class Host(Protocol):
    """The processor and memory beside a device."""

    def facts(self) -> HostFacts: ...

    def process_bytes(self) -> int:
        """Memory of this process now."""

    def now_s(self) -> float:
        """A clock that only moves forward."""

    def handover(self) -> Timing:
        """From one lane's signal to another lane's thread."""

    def optimizer(self, n_threads: int) -> Reading:
        """Parameters per second of AdamW on `n_threads`."""

    def updating(self, n_threads: int) -> AbstractContextManager[None]:
        """The optimizer without end, on `n_threads`, until the context does."""

    def dram(self) -> Reading:
        """Bytes per second read and written, all cores together."""

    def reduce(self) -> Reading:
        """Bytes per second of gradients that a norm reads, all host cores together."""

    def page_faults(self) -> Reading:
        """Bytes per second of fresh memory, touched first."""
