"""Fake device for the probe: a GPU and a host of known rates.

Both copy directions share a duplex rate, clocks rise while cold and may fall later, times have noise, and interruptions occur at
random. Independent of the measuring method of the probe.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.hwprofiles.probe import kernels_to_time as kernels
from penstock.hwprofiles.probe.device import Device, DeviceError, DeviceOutOfMemory, Facts, Load, PciLink, Ready, Run
from penstock.hwprofiles.probe.kernels_to_time import Benchmark
from penstock.hwprofiles.probe.measurements import CLOCKED
from penstock.runtime.errors import SlowKernelWarning
from penstock.runtime.plan import Lane

GB, GiB = 10**9, 2**30


@dataclass
class Truth:
    """True properties of the machine, in base units."""

    flop_per_s: dict[str, float] = field(default_factory=lambda: {"bf16": 700e12, "fp32": 50e12})
    fp8_fraction: float | None = 1.6  # rate of FP8 products over bf16's; None: no such products
    work_lost_flop: float = 3e9  # overhead of a product, in FLOP
    attention_flop_per_s: dict[str, float] = field(default_factory=lambda: {"bf16": 350e12, "fp32": 12e12})
    cudnn_flop_per_s: dict[str, float] = field(default_factory=lambda: {"bf16": 560e12})  # missing dtype: not supported
    memory_bytes_per_s: float = 4e12
    norm_fractions: tuple[float, float] = (0.8, 0.4)  # fraction of the memory rate: forward, backward
    eager_fraction: float = 0.6
    loss_fraction: float = 0.5
    fused_fraction: float = 0.4
    unpack_fraction: float = 0.7
    narrow_fraction: float = 0.3
    load: tuple[float | None, float | None] = (1.7e9, 650.0)  # clock in Hz and power in W under load
    made_s: float = 1.2  # extra time of the first cuDNN run of a shape
    kernel_s: float = 4e-6
    copy_latency_s: float = 8e-6
    pinned: dict[str, float] = field(default_factory=lambda: {"h2d": 55e9, "d2h": 57e9})
    pageable: dict[str, float] = field(default_factory=lambda: {"h2d": 45e9, "d2h": 40e9})
    duplex_bytes_per_s: float = 98e9
    remote_fraction: float = 1.0  # rate from the second NUMA node over the pinned rate
    under_optimizer_fraction: float = 0.9  # of a copy
    params_per_s_of_thread: float = 0.8e9
    most_params_per_s: float = 9e9
    under_copies_fraction: float = 0.8  # rate of the optimizer during copies
    under_uploads_fraction: float = 0.9
    cores_fraction: float = 1.0  # cores in use per host thread
    quota_s: float = 1e9  # host seconds after which a CPU quota throttles cores
    throttled_fraction: float = 1.0
    dram_bytes_per_s: float = 400e9
    reduce_bytes_per_s: float = 80e9
    page_fault_bytes_per_s: float = 4e9
    handover_s: float = 20e-6
    total_bytes: int = 140 * GiB
    bare_context_bytes: int = 400_000_000
    kernels_bytes: int = 250_000_000  # growth of the context when kernels are loaded
    largest_fraction: float = 0.985  # largest allocation, of free memory
    n_host_cores: int = 15
    host_bytes: int = 1500 * GB
    nodes: tuple[tuple[int, ...], ...] = (tuple(range(16)),)
    capability: tuple[int, int] = (9, 0)
    link: PciLink | None = None
    cold_fraction: float = 0.4  # clock of a cold device; rises until `warm_s` of work
    warm_s: float = 1.5
    hot_s: float = 1e9  # seconds of work after which clocks fall
    hot_fraction: float = 1.0
    noise_fraction: float = 0.01
    hiccups_per_s: float = 0.3  # rate of interruptions
    hiccup_s: float = 0.03
    fails_at: str = ""  # part of a benchmark's name at which the device fails
    no_memory_at: str = ""  # part of a benchmark's name at which memory runs out
    slow_at: str = ""  # part of the name of a benchmark whose kernel cannot be used


class FakeGpu(Device):
    """Device that returns simulated times without performing anything."""

    def __init__(self, truth: Truth, seed: int = 0) -> None:
        self.truth, self.random = truth, random.Random(seed)
        self.worked_s, self.host_s, self.n_runs = 0.0, 0.0, 0
        self.used_bytes = truth.bare_context_bytes
        self.is_loaded = False
        self.company: list[Benchmark] = []
        self.made = set[str]()

    def facts(self) -> Facts:
        t = self.truth
        facts = ("cuda", "Fake GPU", "driver 1.2", None, t.capability, "Fake CPU", t.n_host_cores + 1, t.n_host_cores)
        return Facts(*facts, t.host_bytes, t.nodes)  # type: ignore[arg-type]

    def memory(self) -> tuple[int, int]:
        return self.truth.total_bytes - self.used_bytes, self.truth.total_bytes

    def reserve(self, n_bytes: int) -> None:
        if n_bytes > self.truth.largest_fraction * self.memory()[0]:
            raise DeviceOutOfMemory("too much")

    @contextmanager
    def prepared(self, work: Benchmark) -> Iterator[Ready]:
        n_bytes = int(work.amount) if work.place else work.n_bytes
        if n_bytes > self.memory()[0] or (self.truth.no_memory_at and self.truth.no_memory_at in work.name):
            raise DeviceOutOfMemory(f"tried to allocate {n_bytes} bytes")
        self.used_bytes += n_bytes
        try:
            yield Ready(work, lambda: None)
        finally:
            self.used_bytes -= n_bytes

    @contextmanager
    def background(self, company: Sequence[Ready]) -> Iterator[None]:
        self.company = [ready.work for ready in company]
        try:
            yield
        finally:
            self.company = []

    def load(self, ready: Ready, n: int) -> Load:
        return Load(*self.truth.load, self.truth.link)

    def run(self, ready: Ready, n: int) -> Run:
        self.n_runs += 1
        if self.truth.fails_at and self.truth.fails_at in ready.work.name:
            raise DeviceError("CUDA error: unspecified launch failure")
        if self.truth.slow_at and self.truth.slow_at in ready.work.name:
            warnings.warn(f"{self.truth.slow_at} runs call by call", SlowKernelWarning, stacklevel=1)
        if ready.work.lane is Lane.GPU and not self.is_loaded:
            self.is_loaded = True
            self.used_bytes += self.truth.kernels_bytes
        made_s = self.truth.made_s * ("cudnn" in ready.work.name and ready.work.name not in self.made)
        self.made.add(ready.work.name)
        seconds = made_s + n * self.seconds(ready.work) * max(0.5, 1 + self.random.gauss(0, self.truth.noise_fraction))
        if ready.work.lane is Lane.CPU:
            seconds /= self.truth.throttled_fraction if self.host_s > self.truth.quota_s else 1.0
            self.host_s += seconds
            return Run(seconds, cpu_s=seconds * self.truth.cores_fraction * ready.work.n_threads)
        self.worked_s += seconds * (ready.work.lane is Lane.GPU)
        return Run(seconds + self.truth.hiccup_s * (self.random.random() < self.truth.hiccups_per_s * seconds))

    def seconds(self, work: Benchmark) -> float:
        """Return the seconds of a benchmark under the current background load."""
        t, dtype, way = self.truth, work.name[:4], int("backward" in work.name)
        kinds = {benchmark.kind for benchmark in self.company}
        clock = min(1.0, t.cold_fraction + (1 - t.cold_fraction) * self.worked_s / t.warm_s)
        clock *= t.hot_fraction if self.worked_s > t.hot_s else 1.0
        match work.kind:
            case "copies":
                rates = t.pinned if work.place == "pinned" else t.pageable
                is_shared = any(benchmark.lane not in (work.lane, Lane.CPU) for benchmark in self.company)
                rate = rates[work.lane] * (min(1.0, t.duplex_bytes_per_s / sum(rates.values())) if is_shared else 1.0)
                rate *= (t.remote_fraction if work.node else 1.0) * (t.under_optimizer_fraction if "optimizer" in kinds else 1.0)
                return t.copy_latency_s * (not self.company) + work.amount / rate
            case "bf16 products" | "fp32 products":
                return (work.amount + t.work_lost_flop) / t.flop_per_s[dtype] / clock
            case "FP8 products":
                if t.fp8_fraction is None:
                    raise DeviceError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 8.9")
                return work.amount / t.flop_per_s["bf16"] / t.fp8_fraction / clock
            case "bf16 attention" | "fp32 attention":
                rates = t.cudnn_flop_per_s if "cudnn" in work.name else t.attention_flop_per_s
                if dtype not in rates:
                    raise DeviceError("No available kernel. Aborting execution.")
                return work.amount / rates[dtype] / (0.8 if way else 1.0) / clock
            case "memory traffic":
                fractions = {"norm": t.norm_fractions[way], "eager": t.eager_fraction, "loss": t.loss_fraction}
                fractions |= {"activation": t.fused_fraction, "unpacking": t.unpack_fraction, "rank": t.narrow_fraction}
                fraction = next((value for name, value in fractions.items() if name in work.name), 1.0)
                before_s = self.seconds(kernels.product("bf16", *CLOCKED)) if "behind" in work.name else 0.0
                return before_s + work.amount / t.memory_bytes_per_s / fraction + t.kernel_s * work.n_calls * ("eager" in work.name)
            case "calls":
                return t.kernel_s
            case "hand-over":
                return 2 * t.handover_s
            case "optimizer":
                rate = min(work.n_threads * t.params_per_s_of_thread, t.most_params_per_s)
                directions = {benchmark.lane for benchmark in self.company if benchmark.kind == "copies"}
                return work.amount / rate / (1.0, t.under_uploads_fraction, t.under_copies_fraction)[len(directions)]
            case _:
                rates = {"host": t.dram_bytes_per_s, "sum ": t.reduce_bytes_per_s, "firs": t.page_fault_bytes_per_s}
                return work.amount / rates[dtype]
