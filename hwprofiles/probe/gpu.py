"""What can a GPU and its host do?

Which points are measured, in which order, and the profile that they make. Everything goes through the protocols of `device.py`, so
this file knows neither torch nor a clock. Copies and the optimizer are measured alone and beside each other; what both cost the
computing widens its spread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

from hwprofiles.quantity import Dtype
from hwprofiles.schema import FORMAT_VERSION, AttentionKernel, Profile
from runtime.errors import ProfileError
from runtime.units import GiB, KiB, MiB, show_bytes, show_seconds

from .cliffs import Seen, gpu_cliffs, listed_cliffs, named_cliffs
from .device import Device, DeviceError, DeviceFacts, DeviceOutOfMemory, Host, HostFacts, Issue, Memory, PciLink, Stream
from .gpu_link import PIECE_BYTES, LinkProbe
from .stopwatch import Stopwatch
from .timings import AttentionTimes, Reading, Timing, Told, product_points, products_flop, quantity, thread_counts

Progress = Callable[[str, float], None]

ITEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
BEYOND_TORCH_BYTES = 300_000_000  # transformers, templates, tokenizer and data in the runtime's process
BEYOND_PROBE_BYTES = 512 * MiB  # of the device: kernels that only a run has, and workspaces of cuBLAS (32 MiB a stream)
KERNEL_BYTES = 768 * MiB  # that a pointwise kernel reads and writes: far above a device's cache
WORKING_BYTES = 512 * MiB  # of operands that products use in turn, at most, where one product's are smaller
NORM = (8192, 4096)  # tokens and width of the norm, and of the layer whose eager modules are timed
EAGER_INNER = 14336
REFERENCE = 8192  # m = k = n of the product that tells how the clocks are
N_HEADS = 16
MOST_MEMORY_FRACTION = 0.6  # of the free device memory that one work may take
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)  # of the free memory that an allocator may not get in one piece
N_HANDOVERS = 50


@dataclass(frozen=True, slots=True)
class GpuEffort:
    """Which points to measure, and how long to look at each."""

    tokens: dict[Dtype, tuple[int, ...]]
    widths: dict[Dtype, tuple[int, ...]]
    odd_shapes: tuple[tuple[int, int, int], ...]  # m, k, n; of bf16 products
    seq_lens: dict[Dtype, tuple[int, ...]]
    head_dims: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    warm_up_s: float
    soak_s: float  # of one product, before its rate counts
    batch_s: float
    longest_s: float
    least_repeats: int
    most_repeats: int
    point_s: float


# Tokens and widths of models from 1 to 400 billion parameters: their MLPs and their vocabularies are the odd ones.
THOROUGH_GPU = GpuEffort(
    tokens={"bf16": (512, 1024, 2048, 4096, 8192, 16384), "fp32": (512, 2048, 8192)},
    widths={"bf16": (1024, 2048, 4096, 8192, 16384), "fp32": (1024, 4096, 8192)},
    odd_shapes=((4096, 4096, 14336), (4096, 14336, 4096), (8192, 8192, 29568), (2048, 4096, 131072)),
    seq_lens={"bf16": (1024, 2048, 4096, 8192, 16384, 32768), "fp32": (1024, 4096, 16384)},
    head_dims=(64, 128),
    copy_bytes=(64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, 1 * GiB),
    warm_up_s=8.0,
    soak_s=2.5,  # another team's worst error of a step fell from 10 to 4 % with it
    batch_s=0.04,
    longest_s=1.5,
    least_repeats=5,
    most_repeats=11,
    point_s=0.5,
)
QUICK_GPU = GpuEffort(
    tokens={"bf16": (512, 2048, 8192), "fp32": (512, 4096)},
    widths={"bf16": (1024, 4096, 8192), "fp32": (1024, 4096)},
    odd_shapes=((4096, 4096, 14336),),
    seq_lens={"bf16": (1024, 4096, 16384), "fp32": (1024, 4096)},
    head_dims=(64, 128),
    copy_bytes=(64 * KiB, 1 * MiB, 16 * MiB, 256 * MiB),
    warm_up_s=3.0,
    soak_s=0.5,
    batch_s=0.01,
    longest_s=1.0,
    least_repeats=3,
    most_repeats=5,
    point_s=0.05,
)


def probe_gpu(device: Device, host: Host, effort: GpuEffort, progress: Progress, name: str = "this-machine") -> Profile:
    """Measure a GPU, its link and its host. ProfileError in one line where the device fails or its memory runs out."""
    probe = _Probe(device, host, effort, progress)
    try:
        return probe.profile(name)
    except DeviceOutOfMemory as error:
        raise ProfileError(f"out of memory while measuring {probe.now}: {error}; end other programs and probe again") from None
    except DeviceError as error:
        raise ProfileError(f"the device failed while measuring {probe.now}: {error}; see that it works, and probe again") from None
    except ProfileError as error:
        raise ProfileError(f"the measurements contradict each other ({error}); end other programs and probe again") from None


class _Probe:
    """One probing, from the first look at the memory to the profile's fields."""

    def __init__(self, device: Device, host: Host, effort: GpuEffort, progress: Progress) -> None:
        self.device, self.host, self.effort, self.progress = device, host, effort, progress
        self.watch = Stopwatch(device, effort.batch_s, effort.longest_s, effort.least_repeats, effort.most_repeats, effort.point_s)
        self.now = "the device"
        self.slowdown: dict[str, float] = {}  # time while copies and the optimizer run over time alone
        self.left_out = ""  # what could not be measured though the device has it, and why

    def step(self, what: str, fraction: float) -> None:
        self.now = what
        self.progress(what, fraction)

    def profile(self, name: str) -> Profile:
        """All of it, measured in an order that leaves the device warm for what is sensitive to it."""
        self.step("device memory", 0.0)
        facts, began_s = self.device.facts(), self.host.now_s()
        host_facts = self.host.facts()
        before, usable_bytes, context_bytes = self._memory()
        runtime_bytes = self.host.process_bytes() + BEYOND_TORCH_BYTES
        link, host, pci, nodes = self._link_and_host(host_facts)
        device, sustained = self._device()
        workspace_bytes = self._taken_since(context_bytes) + BEYOND_PROBE_BYTES
        fields: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "name": name,
            "summary": f"{facts.name}, {show_bytes(usable_bytes)} usable; {host_facts.name}, {host_facts.n_cores} cores for copies "
            f"and optimizer, {show_bytes(host_facts.memory_bytes)} of free memory",
            "sources": _sources(facts, host_facts, self._detail(began_s, sustained)),
            "device": {
                "name": facts.name,
                "kind": "cuda",
                "memory_bytes": quantity(usable_bytes, 0.0, "memory"),
                "context_bytes": quantity(context_bytes, 0.0, "memory"),
                "workspace_bytes": quantity(workspace_bytes, 0.5, "workspace"),
                "compute_threads": None,
                **device,
            },
            "link": {**link, "host_cores_per_copy": quantity(0, 0.0, "nature"), "dram_bytes_per_byte": 1.0},
            "host": {
                "memory_bytes": quantity(host_facts.memory_bytes, 0.0, "memory"),
                "runtime_bytes": quantity(runtime_bytes, 0.3, "process"),
                "n_cores": host_facts.n_cores,
                **host,
            },
            "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
        }
        seen = Seen(facts, pci, sustained, before.total_bytes - before.free_bytes, nodes)
        return _with_cliffs(fields, seen)

    def _detail(self, began_s: float, sustained: float) -> str:
        slow = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in sorted(self.slowdown.items()))
        least, most = self.effort.least_repeats, self.effort.most_repeats
        return (
            f"penstock probe --device cuda: medians of {least} to {most} timings between events, on random data, after timings had "
            f"settled, {show_seconds(self.host.now_s() - began_s)} in all; the same product at {sustained:.2f} of its first rate "
            f"in the end; copies and optimizer beside each other, and what both cost computing (taken into its spread): {slow}"
            f"{self.left_out}"
        )

    def _taken_since(self, context_bytes: int) -> int:
        """What kernels and libraries have come to hold of the device beside its context."""
        self.device.synchronise()
        self.device.release()
        now = self.device.memory()
        return max(0, now.total_bytes - now.free_bytes - context_bytes)

    def _memory(self) -> tuple[Memory, int, int]:
        """Memory before the first kernel; usable bytes, context and all; and the bytes of the context with its kernels loaded."""
        before = self.device.memory()
        for issue in self._kernels():
            issue(1)
        self.device.synchronise()
        self.device.release()
        after = self.device.memory()
        context_bytes = after.total_bytes - after.free_bytes
        for margin in MARGINS:
            n_bytes = int(after.free_bytes * (1 - margin)) // (2 * MiB) * (2 * MiB)
            try:
                self.device.reserve(n_bytes)
            except DeviceOutOfMemory:
                continue
            return before, context_bytes + n_bytes, context_bytes
        raise DeviceOutOfMemory(
            f"of {show_bytes(after.free_bytes)} of free device memory {MARGINS[-1]:.0%} less cannot be had in one piece"
        )

    def _kernels(self) -> list[Issue]:
        """One of each kind."""
        kernels = [self.device.smallest(), self.device.pointwise(MiB), *self.device.norm(16, 64), self.device.eager(16, 64, 64)[0]]
        for dtype in ITEM_BYTES:
            kernels.append(self.device.product(dtype, 512, 512, 512))
            for kernel in self.device.attention_kernels(dtype):
                kernels += self.device.attention(dtype, 1, 2, 512, 64, kernel)
        return kernels

    def _link_and_host(
        self, facts: HostFacts
    ) -> tuple[dict[str, Any], dict[str, Any], PciLink | None, tuple[tuple[int, float], ...]]:
        self.step("copies", 0.02)
        # A buffer each way, here and there.
        sizes = tuple(n for n in self.effort.copy_bytes if self._fits(2 * n) and 4 * n < facts.memory_bytes)
        if not sizes:
            raise DeviceOutOfMemory(f"not even two pieces of {show_bytes(self.effort.copy_bytes[0])} fit device and host")
        links = LinkProbe(self.device, self.host, self.watch, sizes)
        link, slowdown = links.measure(facts.n_cores)
        self.slowdown |= slowdown
        nodes = links.nodes()
        self.step("optimizer", 0.2)
        host, pci = self._host(facts.n_cores, links.piece_bytes)
        return link, host, pci, nodes

    def _host(self, n_cores: int, copy_bytes: int) -> tuple[dict[str, Any], PciLink | None]:
        """The host of a profile; and the device's link as it is while copies run."""
        counts = thread_counts(n_cores)
        alone = [self.host.optimizer(n) for n in counts]
        with self.device.copying(copy_bytes):
            loaded = [self.host.optimizer(n) for n in counts]
            pci = self.device.pci_link()
        self.step("host memory", 0.35)
        host = {
            "dram_bytes_per_s": self.host.dram().as_quantity("probe"),
            "optimizer": [
                {"threads": n, "params_per_s": one.as_quantity("probe"), "params_per_s_under_copies": busy.as_quantity("probe")}
                for n, one, busy in zip(counts, alone, loaded, strict=True)
            ],
            "reduce_bytes_per_s": self.host.reduce().as_quantity("probe"),
            "page_fault_bytes_per_s": self.host.page_faults().as_quantity("probe"),
        }
        return host, pci

    def _device(self) -> tuple[dict[str, Any], float]:
        """The device of a profile, all but its memory; and the rate of the reference product at the end over that before."""
        self.step("warming up", 0.4)
        dtype, width = self._reference()
        reference = self.device.product(dtype, width, width, width)
        self.watch.warm_up(reference, self.effort.warm_up_s)
        first = self.watch.timing(reference)
        self._slow_by(f"{dtype} products", reference)
        grid = {dtype: self._products(dtype, 0.45, 0.75) for dtype in ITEM_BYTES}
        attention = {"flash": {dtype: self._attention(dtype, "flash", 0.75, 0.85) for dtype in ITEM_BYTES}}
        if by_cudnn := self._cudnn_attention(0.85, 0.95):
            attention["cudnn"] = by_cudnn
        self.step("calls and memory traffic", 0.95)
        pointwise = self.device.pointwise(KERNEL_BYTES)
        self._slow_by("memory traffic", pointwise)
        traffic = self.watch.timing(pointwise).per_second(KERNEL_BYTES).widened(self.slowdown["memory traffic"])
        call = self.watch.timing(self.device.smallest())
        norms, eager = self._norms(), self._eager(call.seconds)
        sustained = first.seconds / self.watch.timing(reference).seconds
        drift = max(1.0, 1 / sustained)
        for point in [p for points in grid.values() for p in points]:
            _widen(point["flop_per_s"], drift)
        for point in [p for grid in attention.values() for points in grid.values() for p in points]:
            _widen(point["forward_flop_per_s"], drift)
            _widen(point["backward_flop_per_s"], drift)
        device = {
            "memory_bytes_per_s": traffic.as_quantity("probe"),
            "eager_bytes_per_s": eager,
            "kernel_overhead_s": Reading(*call).as_quantity("probe"),
            "op_overhead_s": self._handover().as_quantity("probe"),
            "matmul": grid,
            "attention": attention,
            "norms": {"torch-fused": norms},
        }
        self.step("done", 1.0)
        return device, sustained

    def _norms(self) -> dict[str, Any]:
        """Rates of a norm in one kernel: its input and output, and twice as many bytes backward."""
        (tokens, width), rates = NORM, {}
        n_bytes = 2 * tokens * width * ITEM_BYTES["bf16"]
        for way, issue, factor in zip(("forward", "backward"), self.device.norm(tokens, width), (1, 2), strict=True):
            timing = self.watch.timing(issue).per_second(factor * n_bytes)
            rates[f"{way}_bytes_per_s"] = timing.widened(self.slowdown["memory traffic"]).as_quantity("probe")
        return rates

    def _eager(self, call_s: float) -> dict[str, Any]:
        """What a layer's unfused modules reach, once what their calls cost is taken off."""
        issue, n_bytes, n_calls = self.device.eager(*NORM, EAGER_INNER)
        timing = self.watch.timing(issue)
        moving = timing._replace(seconds=max(timing.seconds - n_calls * call_s, timing.seconds / 2))
        return moving.per_second(n_bytes).widened(self.slowdown["memory traffic"]).as_quantity("probe")

    def _reference(self) -> tuple[Dtype, int]:
        """A product that loads the device and fits it."""
        width = REFERENCE
        while not self._fits(2 * ITEM_BYTES["bf16"] * 3 * width**2):
            width //= 2
        return "bf16", width

    def _fits(self, n_bytes: int) -> bool:
        return n_bytes < MOST_MEMORY_FRACTION * self.device.memory().free_bytes

    def _slow_by(self, kind: str, issue: Issue) -> None:
        """Remember what copies both ways and the optimizer cost a work."""
        alone = self.watch.timing(issue)
        with self.host.updating(self.host.facts().n_cores), self.device.copying(min(PIECE_BYTES, self.effort.copy_bytes[-1])):
            loaded = self.watch.timing(issue)
        self.slowdown[kind] = max(1.0, loaded.seconds / alone.seconds)

    def _products(self, dtype: Dtype, begin: float, end: float) -> list[dict[str, Any]]:
        """Points of the grid that fit and are not too long."""
        shapes = {(m, w, w) for m in self.effort.tokens[dtype] for w in self.effort.widths[dtype]}
        if dtype == "bf16":
            shapes |= {*self.effort.odd_shapes}
        times: dict[tuple[int, int, int], Timing] = {}
        loads: dict[tuple[int, int, int], Told] = {}
        best_flop_per_s = 0.0
        for i, (m, k, n) in enumerate(sorted(shapes)):
            self.step(f"{dtype} product ({m}, {k}) @ ({k}, {n})", _between(begin, end, dtype, i / len(shapes)))
            n_flop = products_flop(m, k, n)
            too_long = bool(times) and n_flop / best_flop_per_s > self.effort.longest_s
            if too_long or not self._fits(max(WORKING_BYTES, 2 * ITEM_BYTES[dtype] * (m * k + k * n + m * n))):
                continue
            product = self.device.product(dtype, m, k, n)
            times[m, k, n] = self.watch.timing(product, soak_s=self.effort.soak_s)
            loads[m, k, n] = self.watch.load(product, times[m, k, n].seconds)._asdict()
            best_flop_per_s = max(best_flop_per_s, n_flop / times[m, k, n].seconds)
        self.device.release()
        return product_points(times, self.slowdown["bf16 products"], loads)

    def _cudnn_attention(self, begin: float, end: float) -> dict[Dtype, list[dict[str, Any]]]:
        """Where the device has it. A shape that it refuses leaves it out, for a run can do without."""
        dtypes: list[Dtype] = [dtype for dtype in ITEM_BYTES if "cudnn" in self.device.attention_kernels(dtype)]
        try:
            return {dtype: self._attention(dtype, "cudnn", begin, end) for dtype in dtypes}
        except DeviceError as error:
            self.left_out = f"; left out: {self.now} ({error})"
            self.device.release()
            return {}

    def _attention(self, dtype: Dtype, kernel: AttentionKernel, begin: float, end: float) -> list[dict[str, Any]]:
        # Query, key, value, output, their gradients, and what a backward keeps in fp32.
        token_bytes = 12 * ITEM_BYTES[dtype] * N_HEADS * max(self.effort.head_dims)
        lengths = [n for n in self.effort.seq_lens[dtype] if self._fits(token_bytes * n)]
        if not lengths:
            raise DeviceOutOfMemory(f"not even {self.effort.seq_lens[dtype][0]} tokens fit the free device memory")
        n_tokens, name = lengths[-1], f"{dtype} attention" + (" by cuDNN" if kernel == "cudnn" else "")
        points = AttentionTimes(N_HEADS, self.slowdown["bf16 products"])
        for i, head_dim in enumerate(self.effort.head_dims):
            times: list[tuple[int, Timing, Timing]] = []
            loads: dict[int, Told] = {}
            for j, seq_len in enumerate(lengths):
                done = (i + j / len(lengths)) / len(self.effort.head_dims)
                self.step(f"{name} over {seq_len} tokens", _between(begin, end, dtype, done))
                n_sequences = n_tokens // seq_len
                issues = self.device.attention(dtype, n_sequences, N_HEADS, seq_len, head_dim, kernel)
                forward, backward = (self.watch.timing(issue) for issue in issues)
                loads[seq_len] = self.watch.load(issues[1], backward.seconds)._asdict()
                times.append((seq_len, _one_of(forward, n_sequences), _one_of(backward, n_sequences)))
            points.add(head_dim, times, loads)
            self.device.release()
        return points.points

    def _handover(self) -> Reading:
        """An op's fixed cost: a lane's thread is told, its stream waits for an event, and the thread blocks until it is reached."""
        seconds = []
        for _ in range(N_HANDOVERS):
            start_s = self.host.now_s()
            done = self.device.record(Stream.COMPUTE)
            self.device.order(Stream.H2D, done)
            self.device.wait(self.device.record(Stream.H2D))
            seconds.append(self.host.now_s() - start_s)
        told, passed = self.host.handover(), Timing.of(seconds)
        return Reading(told.seconds + passed.seconds, max(told.spread_fraction, passed.spread_fraction))


def _sources(facts: DeviceFacts, host: HostFacts, detail: str) -> dict[str, Any]:
    """Where the numbers of a probed profile come from."""
    today = date.today().isoformat()

    def source(kind: str, detail: str) -> dict[str, Any]:
        return {"kind": kind, "detail": detail, "date": today, "device": f"{facts.name}; {host.name}", "driver": facts.driver}

    return {
        "probe": source("measured", detail),
        "workspace": source(
            "assumed",
            f"what the probe's kernels came to hold beyond the context that they were first used in, and "
            f"{show_bytes(BEYOND_PROBE_BYTES)} for those of a run",
        ),
        "memory": source(
            "measured",
            "device: what is in use after the first kernels, and the largest piece that could be had beyond; host: memory "
            "available when probed",
        ),
        "process": source(
            "assumed",
            f"resident memory of this process with torch and the device's libraries (measured), and "
            f"{show_bytes(BEYOND_TORCH_BYTES)} for transformers, templates and data",
        ),
        "nature": source("assumed", "pinned copies are made by the device's own engines: no core, no second byte"),
    }


def _with_cliffs(fields: dict[str, Any], seen: Seen) -> Profile:
    """The profile, and its cliffs: by name in the summary, as lines in the source."""
    profile = Profile.from_json(fields, "probe")
    cliffs = gpu_cliffs(profile, seen)
    fields["summary"] += named_cliffs(cliffs)
    fields["sources"]["probe"]["detail"] += listed_cliffs(cliffs)
    return Profile.from_json(fields, "probe")


def _widen(fields: dict[str, Any], slowdown: float) -> None:
    """Take a slowdown into the spread of a quantity, in place."""
    fields |= Reading(fields["value"], fields["spread_fraction"]).widened(slowdown).as_quantity(fields["source"])


def _between(begin: float, end: float, dtype: Dtype, done: float) -> float:
    """Progress within one dtype's share of a grid."""
    order = list(ITEM_BYTES)
    return begin + (end - begin) * (order.index(dtype) + done) / len(order)


def _one_of(timing: Timing, n: int) -> Timing:
    return Timing(timing.seconds / n, timing.spread_fraction)
