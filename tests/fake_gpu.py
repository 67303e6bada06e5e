"""How does a GPU behave whose every rate is known?

A machine in simulated time, for the probe: streams that do work in order and beside each other, copies that share what both
directions can carry, clocks that are cold at first and may fall later, noise, and timings that are far off now and then. Nothing
here knows how the probe measures.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hwprofiles.probe.device import (
    DeviceError,
    DeviceFacts,
    DeviceOutOfMemory,
    HostFacts,
    Issue,
    Load,
    Memory,
    PciLink,
    Place,
    Stream,
)
from hwprofiles.probe.timings import Reading, Timing
from hwprofiles.quantity import Dtype
from hwprofiles.schema import AttentionKernel, Direction

GB, GiB = 10**9, 2**30
ITEM = {"bf16": 2, "fp32": 4}
ISSUE_S = 1e-6  # that putting something on a stream takes


@dataclass
class Truth:
    """What the machine can do. Rates in base units."""

    flop_per_s: dict[Dtype, float] = field(default_factory=lambda: {"bf16": 700e12, "fp32": 50e12})
    work_lost_flop: float = 3e9  # small products reach less: as if each had so much more to do
    attention_flop_per_s: dict[Dtype, float] = field(default_factory=lambda: {"bf16": 350e12, "fp32": 12e12})
    cudnn_flop_per_s: dict[Dtype, float] = field(default_factory=lambda: {"bf16": 560e12})  # of attention, where it has it
    memory_bytes_per_s: float = 4e12
    norm_fractions: tuple[float, float] = (0.8, 0.4)  # of that, forward and backward
    eager_fraction: float = 0.6
    load: tuple[float | None, float | None] = (1.7e9, 650.0)  # clock and watts while it works; idle, its clocks are low
    kernel_s: float = 4e-6
    copy_latency_s: float = 8e-6
    pinned: dict[Direction, float] = field(default_factory=lambda: {"h2d": 55e9, "d2h": 57e9})
    pageable: dict[Direction, float] = field(default_factory=lambda: {"h2d": 45e9, "d2h": 40e9})
    duplex_bytes_per_s: float = 98e9
    remote_fraction: float = 1.0  # of the pinned rate, from the second memory node
    under_optimizer_fraction: float = 0.9  # of a copy's rate
    params_per_s_of_thread: float = 0.8e9
    most_params_per_s: float = 9e9
    under_copies_fraction: float = 0.8  # of the optimizer's rate
    dram_bytes_per_s: float = 400e9
    reduce_bytes_per_s: float = 80e9
    page_fault_bytes_per_s: float = 4e9
    handover_s: float = 20e-6
    total_bytes: int = 140 * GiB
    bare_context_bytes: int = 400_000_000
    kernels_bytes: int = 250_000_000  # of context, once kernels are loaded
    largest_fraction: float = 0.985  # of the free memory that can be had in one piece
    n_host_cores: int = 15
    host_bytes: int = 1500 * GB
    nodes: tuple[tuple[int, ...], ...] = (tuple(range(16)),)
    capability: tuple[int, int] = (9, 0)
    link: PciLink | None = None
    cold_fraction: float = 0.4  # of the clocks, before the device has worked for `warm_s`
    warm_s: float = 1.5
    hot_s: float = 1e9  # of work, after which clocks fall
    hot_fraction: float = 1.0
    noise_fraction: float = 0.01
    hiccups_per_s: float = 1.0  # of work, at each of which something else takes the device
    hiccup_s: float = 0.03
    fails_at: str = ""  # kind of work at which the device is gone
    no_memory_at: str = ""  # kind of work for which memory runs out


@dataclass
class FakeBuffer:
    place: Place
    n_bytes: int
    node: int = 0


@dataclass
class FakeEvent:
    at_s: float | None = None


@dataclass
class Item:
    """Something on a stream: work with seconds or bytes left, or an event to reach or to wait for."""

    issued_s: float
    seconds: float = 0.0  # of latency or computing left
    n_bytes: float = 0.0  # to copy after that
    rate: float = 1.0  # bytes per second if nothing else copies
    event: FakeEvent | None = None
    is_wait: bool = False
    computes: bool = False


class FakeMachine:
    """The device and its host, on one clock. `device` and `host` perform the probe's protocols."""

    def __init__(self, truth: Truth, seed: int = 0) -> None:
        self.truth, self.random = truth, random.Random(seed)
        self.now_s = 0.0  # of the host
        self.streams_at_s = 0.0  # how far the streams have got
        self.worked_s = 0.0
        self.used_bytes = truth.bare_context_bytes
        self.woken = False
        self.updating = 0
        self.copying = 0
        self.queues: dict[Stream, list[Item]] = {stream: [] for stream in Stream}
        self.device, self.host = FakeDevice(self), FakeHost(self)

    def jitter(self) -> float:
        """A factor on a time."""
        return max(0.5, 1 + self.random.gauss(0, self.truth.noise_fraction))

    def hiccup(self, seconds: float) -> float:
        """What a work of so many seconds loses to others: mostly nothing, now and then much."""
        return self.truth.hiccup_s if self.random.random() < self.truth.hiccups_per_s * seconds else 0.0

    def clock_fraction(self) -> float:
        t = self.truth
        warm = min(1.0, t.cold_fraction + (1 - t.cold_fraction) * self.worked_s / t.warm_s)
        return warm * (t.hot_fraction if self.worked_s > t.hot_s else 1.0)

    def issue(self, stream: Stream, item: Item) -> None:
        self.now_s += ISSUE_S
        if not any(self.queues.values()):
            self.streams_at_s = max(self.streams_at_s, self.now_s)  # they idled
        item.issued_s = self.now_s
        self.queues[stream].append(item)

    def run_until(self, event: FakeEvent | None) -> None:
        """Let streams work until the event is reached, or all is done; then it is that late at least."""
        while True:
            self._reach_marks()
            if (event is not None and event.at_s is not None) or not any(self.queues.values()):
                break
            self._advance()
        self.now_s = max(self.now_s, self.streams_at_s)

    def _reach_marks(self) -> None:
        """Take what is done, and events that are reached, off the streams."""
        moved = True
        while moved:  # an event of one stream may let another go on
            moved = False
            for queue in self.queues.values():
                while queue and queue[0].issued_s <= self.streams_at_s and self._passes(queue[0]):
                    queue.pop(0)
                    moved = True

    def _advance(self) -> None:
        """On to the next moment at which something ends or was issued."""
        heads = {s: q[0] for s, q in self.queues.items() if q and q[0].issued_s <= self.streams_at_s and not q[0].is_wait}
        speeds = self._speeds(heads)
        waits = [item.seconds if item.seconds > 0 else item.n_bytes / speeds[stream] for stream, item in heads.items()]
        waits += [q[0].issued_s - self.streams_at_s for q in self.queues.values() if q and q[0].issued_s > self.streams_at_s]
        step_s = min(waits)
        for stream, item in heads.items():
            if item.computes:
                self.worked_s += min(step_s, item.seconds)
            if item.seconds > 0:
                item.seconds = 0.0 if item.seconds <= step_s * (1 + 1e-9) else item.seconds - step_s
            else:
                left = item.n_bytes - speeds[stream] * step_s
                item.n_bytes = left if left > 1e-3 else 0.0
        self.streams_at_s += step_s

    def _passes(self, item: Item) -> bool:
        if item.event is not None and not item.is_wait:
            item.event.at_s = self.streams_at_s
            return True
        if item.event is not None:
            return item.event.at_s is not None
        return item.seconds <= 0 and item.n_bytes <= 0

    def _speeds(self, heads: dict[Stream, Item]) -> dict[Stream, float]:
        """Bytes per second of the copies at work: their own rates, scaled down together to what both can carry."""
        copies = {s: i.rate for s, i in heads.items() if i.seconds <= 0 and i.n_bytes > 0}
        total = sum(copies.values())
        scale = min(1.0, self.truth.duplex_bytes_per_s / total) if len(copies) > 1 else 1.0
        return {s: rate * scale * (self.truth.under_optimizer_fraction if self.updating else 1.0) for s, rate in copies.items()}


class FakeDevice:
    def __init__(self, machine: FakeMachine) -> None:
        self.m = machine

    def facts(self) -> DeviceFacts:
        return DeviceFacts("Fake GPU", "driver 1.2", self.m.truth.capability)

    def pci_link(self) -> PciLink | None:
        return self.m.truth.link if self.m.copying else None  # it sleeps while idle

    def memory(self) -> Memory:
        return Memory(self.m.truth.total_bytes - self.m.used_bytes, self.m.truth.total_bytes)

    def release(self) -> None:
        self.synchronise()

    @contextmanager
    def allocate(self, place: Place, n_bytes: int, cores: Sequence[int] | None = None) -> Iterator[FakeBuffer]:
        self._may_fail(place, n_bytes if place == "device" else 0)
        nodes = self.m.truth.nodes
        node = next((i for i, own in enumerate(nodes) if cores is not None and own and set(cores) <= set(own)), 0)
        held = n_bytes if place == "device" else 0
        self.m.used_bytes += held
        try:
            yield FakeBuffer(place, n_bytes, node)
        finally:
            self.m.used_bytes -= held

    def reserve(self, n_bytes: int) -> None:
        if n_bytes > self.m.truth.largest_fraction * (self.m.truth.total_bytes - self.m.used_bytes):
            raise DeviceOutOfMemory("too much")

    def copies(self, direction: Direction, to: FakeBuffer, source: FakeBuffer, n_bytes: int) -> Issue:
        assert n_bytes <= min(to.n_bytes, source.n_bytes)
        ends = (source.place, to.place) if direction == "h2d" else (to.place, source.place)
        assert ends[1] == "device"
        rates = self.m.truth.pinned if ends[0] == "pinned" else self.m.truth.pageable
        host = source if direction == "h2d" else to
        rate = rates[direction] * (self.m.truth.remote_fraction if host.node else 1.0)

        def issue(n: int) -> None:
            self._may_fail("copy")
            for _ in range(n):
                late_s = self.m.truth.copy_latency_s * self.m.jitter() + self.m.hiccup(n_bytes / rate)
                self.m.issue(Stream(direction), Item(0.0, late_s, n_bytes * self.m.jitter(), rate))

        return issue

    @contextmanager
    def copying(self, n_bytes: int) -> Iterator[None]:
        self.m.copying += 1
        yield
        self.m.copying -= 1

    def product(self, dtype: Dtype, m: int, k: int, n: int) -> Issue:
        self._may_fail(f"{dtype} product", 2 * ITEM[dtype] * (m * k + k * n + m * n))
        seconds = (6 * m * k * n + self.m.truth.work_lost_flop) / self.m.truth.flop_per_s[dtype]
        return self._kernel(f"{dtype} product", seconds)

    def attention_kernels(self, dtype: Dtype) -> tuple[AttentionKernel, ...]:
        return ("flash", "cudnn") if dtype in self.m.truth.cudnn_flop_per_s else ("flash",)

    def attention(
        self, dtype: Dtype, n_sequences: int, n_heads: int, seq_len: int, head_dim: int, kernel: AttentionKernel
    ) -> tuple[Issue, Issue]:
        self._may_fail(
            f"{dtype} attention" if kernel == "flash" else f"cuDNN over {seq_len}",
            10 * ITEM[dtype] * n_sequences * n_heads * seq_len * head_dim,
        )
        n_flop = n_sequences * n_heads * 4 * head_dim * seq_len * (seq_len + 1) / 2
        rates = {"flash": self.m.truth.attention_flop_per_s, "cudnn": self.m.truth.cudnn_flop_per_s}
        seconds = n_flop / rates[kernel][dtype]
        return self._kernel("attention", seconds), self._kernel("attention", 2.5 * seconds / 0.8)

    def load(self) -> Load:
        return Load(*self.m.truth.load) if any(self.m.queues.values()) else Load(3e8, 70.0)

    def norm(self, n_tokens: int, width: int) -> tuple[Issue, Issue]:
        seconds = 4 * n_tokens * width / self.m.truth.memory_bytes_per_s
        forward, backward = (n * seconds / of for n, of in zip((1, 2), self.m.truth.norm_fractions, strict=True))
        return self._kernel("norm", forward, clocked=False), self._kernel("norm", backward, clocked=False)

    def eager(self, n_tokens: int, width: int, inner: int) -> tuple[Issue, int, int]:
        n_bytes, n_calls = 3 * n_tokens * (74 * width + 10 * inner), 48
        t = self.m.truth
        seconds = n_bytes / t.memory_bytes_per_s / t.eager_fraction + n_calls * t.kernel_s
        return self._kernel("eager", seconds, clocked=False), n_bytes, n_calls

    def pointwise(self, n_bytes: int) -> Issue:
        return self._kernel("pointwise", n_bytes / self.m.truth.memory_bytes_per_s, clocked=False)

    def smallest(self) -> Issue:
        return self._kernel("smallest", 0.0, clocked=False)

    def _kernel(self, kind: str, seconds: float, clocked: bool = True) -> Issue:
        def issue(n: int) -> None:
            self._may_fail(kind)
            self._wake()
            clock = self.m.clock_fraction() if clocked else 1.0
            for _ in range(n):
                total_s = (seconds / clock + (self.m.truth.kernel_s if seconds == 0 else 0.0)) * self.m.jitter()
                total_s += self.m.hiccup(total_s)
                self.m.issue(Stream.COMPUTE, Item(0.0, total_s, computes=True))

        return issue

    def _wake(self) -> None:
        if not self.m.woken:
            self.m.woken = True
            self.m.used_bytes += self.m.truth.kernels_bytes

    def _may_fail(self, kind: str, n_bytes: int = 0) -> None:
        if self.m.truth.fails_at and self.m.truth.fails_at == kind:
            raise DeviceError("CUDA error: unspecified launch failure")
        if n_bytes > self.m.truth.total_bytes - self.m.used_bytes or (kind == self.m.truth.no_memory_at and n_bytes > GiB):
            raise DeviceOutOfMemory(f"tried to allocate {n_bytes} bytes")

    def record(self, stream: Stream) -> FakeEvent:
        event = FakeEvent()
        self.m.issue(stream, Item(0.0, event=event))
        return event

    def order(self, stream: Stream, event: FakeEvent) -> None:
        self.m.issue(stream, Item(0.0, event=event, is_wait=True))

    def wait(self, event: FakeEvent) -> None:
        self.m.run_until(event)

    def elapsed_s(self, first: FakeEvent, last: FakeEvent) -> float:
        assert first.at_s is not None, "asked for the time of an event that was not waited for"
        assert last.at_s is not None, "asked for the time of an event that was not waited for"
        return last.at_s - first.at_s

    def synchronise(self) -> None:
        self.m.run_until(None)


class FakeHost:
    def __init__(self, machine: FakeMachine) -> None:
        self.m = machine

    def facts(self) -> HostFacts:
        return HostFacts("Fake CPU", self.m.truth.n_host_cores, self.m.truth.host_bytes, self.m.truth.nodes)

    def process_bytes(self) -> int:
        return 3 * GB

    def now_s(self) -> float:
        return self.m.now_s

    def handover(self) -> Timing:
        return Timing(self.m.truth.handover_s * self._jitter(), 0.02)

    def optimizer(self, n_threads: int) -> Reading:
        rate = min(n_threads * self.m.truth.params_per_s_of_thread, self.m.truth.most_params_per_s)
        return self._reading(rate * (self.m.truth.under_copies_fraction if self.m.copying else 1.0))

    @contextmanager
    def updating(self, n_threads: int) -> Iterator[None]:
        assert n_threads >= 1
        self.m.updating += 1
        yield
        self.m.updating -= 1

    def dram(self) -> Reading:
        return self._reading(self.m.truth.dram_bytes_per_s)

    def reduce(self) -> Reading:
        return self._reading(self.m.truth.reduce_bytes_per_s)

    def page_faults(self) -> Reading:
        return self._reading(self.m.truth.page_fault_bytes_per_s)

    def _jitter(self) -> float:
        return 1 + self.m.random.gauss(0, self.m.truth.noise_fraction / 2)

    def _reading(self, value: float) -> Reading:
        return Reading(value * self._jitter(), 0.02)
