"""What can the machine at hand do?

Which points are measured, in which order, and the profile that they make. `works.py` holds what is timed, `instruments.py` the
clock. Every rate is measured alone, and its spread is widened by what the other lanes' work does to it.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from runtime.cores import split_cores
from runtime.errors import ProfileError
from runtime.optimizer import CHUNK_ELEMENTS
from runtime.units import KiB, MiB, show_bytes

from .instruments import Bench, Patience, Sample, raise_products, raise_times
from .schema import Dtype, Profile
from .works import Work, attention, filled, pointwise, product_stream, products, reduction, walking_copy, walking_update

Progress = Callable[[str, float], None]  # what is measured now, and the fraction done

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
COLD_BYTES = 256 * MiB  # far above a cache: host memory that a copy reads or an optimizer updates is never in one
SLOTS_BYTES = 64 * MiB  # a few device slots, used in turn
COPY_BYTES = 8 * MiB  # of one copy, where copies only load the machine
UPDATE_PARAMS = 16 * CHUNK_ELEMENTS  # of one call of the optimizer
STATE_BYTES_PER_PARAM = 4 + 8 + 2 + 2  # what that call reads: master, moments, gradient, weight
DEVICE_SHARE = 0.25  # of the usable memory, for the arena that stands in for a device
BEYOND_TORCH_BYTES = 300_000_000  # transformers, templates, tokenizer and data in the runtime's process
MOST_SPREAD = 10.0  # that a profile can hold


@dataclass(frozen=True, slots=True)
class Effort:
    """Which points to measure, and how long to look at each."""

    patience: Patience
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    odd_shapes: tuple[tuple[int, int, int], ...]  # m, k, n
    seq_lens: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    cold_bytes: int

    def params_per_thread(self, n_threads: int) -> int:
        """Optimizer state of each thread: together far above a cache, and each a few calls' worth, however many threads."""
        return max(self.cold_bytes // 32 // n_threads, 4 * UPDATE_PARAMS)

    def needed_bytes(self, n_cores: int, n_host_cores: int) -> int:
        """Memory that measuring takes: copies and products, a stream of copies per core, optimizer state per host core."""
        state_bytes = n_host_cores * self.params_per_thread(n_host_cores) * STATE_BYTES_PER_PARAM
        return 4 * self.cold_bytes + n_cores * self.cold_bytes // 2 + state_bytes


THOROUGH = Effort(
    Patience(least_repeats=3, most_repeats=9, point_s=0.06, window_s=0.12, longest_s=1.2),
    tokens=(64, 256, 1024, 4096),
    widths=(128, 256, 512, 1024),
    odd_shapes=((1024, 512, 2048), (1024, 2048, 512), (1024, 512, 8192)),
    seq_lens=(128, 256, 512, 1024, 2048),
    copy_bytes=(64 * KiB, 1 * MiB, 8 * MiB, 64 * MiB),
    cold_bytes=COLD_BYTES,
)
QUICK = Effort(
    Patience(least_repeats=3, most_repeats=5, point_s=0.01, window_s=0.03, longest_s=0.3),
    tokens=(64, 512),
    widths=(128, 512),
    odd_shapes=((512, 128, 2048),),
    seq_lens=(128, 512),
    copy_bytes=(1 * MiB, 16 * MiB),
    cold_bytes=96 * MiB,
)


def probe_cpu(effort: Effort, progress: Progress, name: str = "this-machine") -> Profile:
    """Measure this machine's CPU as a device and as a host.

    ProfileError where too little memory is free, or where the machine is too busy to be measured.
    """
    cores = sorted(os.sched_getaffinity(0))
    bench = Bench(effort.patience, *split_cores(cores))
    usable_bytes, needed_bytes = available_bytes(), effort.needed_bytes(len(cores), len(bench.host_cores))
    if usable_bytes < needed_bytes:
        free, needed = show_bytes(usable_bytes), show_bytes(needed_bytes)
        raise ProfileError(f"{free} of memory are free, and the probe needs {needed}; end other programs")
    resident_bytes = _resident_bytes()  # before the measuring takes memory of its own
    link, host, device = _measured(bench, effort, progress)
    device_bytes = int(usable_bytes * DEVICE_SHARE)
    cpu = f"{_cpu_name()}, {len(cores)} cores"
    fields = {
        "format_version": 1,
        "name": name,
        "summary": f"{cpu}, {show_bytes(usable_bytes)} of free memory; core{_listed(bench.compute_cores)} for compute, "
        f"core{_listed(bench.host_cores)} for copies and optimizer",
        "sources": _sources(bench, cpu, resident_bytes),
        "device": {
            "name": f"{len(bench.compute_cores)} of {cpu}",
            "kind": "cpu",
            "memory_bytes": _quantity(device_bytes, 0.0, "memory"),
            "context_bytes": _quantity(0, 0.0, "nature"),
            "compute_threads": len(bench.compute_cores),
            **device,
        },
        "link": {**link, "host_cores_per_copy": _quantity(1, 0.0, "nature"), "dram_bytes_per_byte": 2.0},
        "host": {
            "memory_bytes": _quantity(usable_bytes - device_bytes, 0.0, "memory"),
            "runtime_bytes": _quantity(resident_bytes + BEYOND_TORCH_BYTES, 0.3, "process"),
            "n_cores": len(bench.host_cores),
            **host,
        },
        "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
    }
    try:
        return Profile.from_json(fields, "probe")
    except ProfileError as error:
        raise ProfileError(f"the measurements contradict each other ({error}); end other programs and probe again") from None


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def probe_cuda() -> Profile:
    """Measure a CUDA device. ProfileError: there is none, or this version cannot yet."""
    if not has_cuda():
        raise ProfileError("no CUDA device is visible to torch; use --device cpu, or a shipped profile with --machine")
    raise ProfileError("probing a CUDA device is not built yet; use --device cpu, or a shipped profile with --machine")


def _measured(bench: Bench, effort: Effort, progress: Progress) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Link, host and device of a profile. The link and the host come first: their work loads the machine for the others."""
    progress("copies", 0.0)
    link, copies = _link(bench, effort)
    progress("optimizer", 0.15)
    host, update = _host(bench, effort, copies[0])
    busy = [copies[0], update]
    progress("calls and memory traffic", 0.3)
    device = _overheads(bench, busy)
    device["matmul"] = _matmuls(bench, effort, busy, lambda what, fraction: progress(what, 0.4 + 0.45 * fraction))
    progress("attention", 0.85)
    device["attention"] = _attentions(bench, effort, busy)
    progress("done", 1.0)
    return link, host, device


def _sources(bench: Bench, cpu: str, resident_bytes: int) -> dict[str, Any]:
    """Where the numbers of a probed profile come from."""
    today, torch_version = date.today().isoformat(), f"torch {torch.__version__}, {platform.system()} {platform.release()}"

    def source(kind: str, detail: str) -> dict[str, Any]:
        return {"kind": kind, "detail": detail, "date": today, "device": cpu, "driver": torch_version}

    least, most = bench.patience.least_repeats, bench.patience.most_repeats
    disturbed = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in sorted(bench.slowdown.items()))
    return {
        "probe": source(
            "measured",
            f"penstock probe --device cpu: medians of {least} to {most} repeats on random data, alone, other programs having "
            f"taken {bench.stolen_s / bench.measured_s:.0%} of the time; spread widened by the slowdown while the other lanes "
            f"work: {disturbed}",
        ),
        "memory": source("measured", "memory available when probed, cut by us into a quarter for the device arena and the rest"),
        "process": source(
            "assumed",
            f"resident memory of this process with torch ({show_bytes(resident_bytes)}, measured) and "
            f"{show_bytes(BEYOND_TORCH_BYTES)} for transformers, templates and data",
        ),
        "nature": source(
            "assumed", "a CPU has no device context, and copies memory with a core: by its nature, nothing to measure"
        ),
    }


def _link(bench: Bench, effort: Effort) -> tuple[dict[str, Any], list[Work]]:
    """Copies over sizes and both ways at once; and one endless copy each way, to load the machine with."""
    host_memory, slots = filled(effort.cold_bytes), filled(SLOTS_BYTES)
    ways = {"h2d": (slots, host_memory), "d2h": (host_memory, slots)}
    link: dict[str, Any] = {}
    for direction, (to, source) in ways.items():
        tiny = bench.host(walking_copy(to, source, 64, n_copies=64))
        latency_s = tiny.seconds / 64
        points: list[tuple[float, Sample]] = []
        for n_bytes in effort.copy_bytes:
            n_copies = max(1, 4 * MiB // n_bytes)
            sample = bench.host(walking_copy(to, source, n_bytes, n_copies))
            transfer_s = max(sample.seconds / n_copies - latency_s, sample.seconds / n_copies / 2)
            points.append((n_bytes, Sample(transfer_s, sample.spread_fraction)))
        raise_times(points)
        curve = [
            {"n_bytes": int(n_bytes), "rate": _quantity(n_bytes / s.seconds, s.spread_fraction, "probe")} for n_bytes, s in points
        ]
        link[direction] = {
            "latency_s": _quantity(latency_s, tiny.spread_fraction, "probe"),
            "bytes_per_s": curve,
            "pageable_bytes_per_s": curve[-1]["rate"],  # a CPU's copies know no pinned memory
        }
    works = [walking_copy(to, source, COPY_BYTES) for to, source in ways.values()]
    both = bench.together([(bench.host_cores, work) for work in works])
    link["duplex_bytes_per_s"] = _rate(COPY_BYTES, both)
    return link, works


def _host(bench: Bench, effort: Effort, copy: Work) -> tuple[dict[str, Any], Work]:
    """What host lanes do besides copying; and one optimizer loop, to load the machine with."""
    cores, every_core = bench.host_cores, bench.all_cores
    n_params, big_bytes = effort.params_per_thread(len(cores)), effort.cold_bytes // 2
    updates = [walking_update(n_params, UPDATE_PARAMS) for _ in cores]
    optimizer: list[dict[str, Any]] = []
    for n_threads in sorted({1, len(cores)}):
        lanes = [(cores, update) for update in updates[:n_threads]]
        alone = bench.together(lanes)
        loaded = bench.together([*lanes, (cores, copy)])[:n_threads]
        rates = {"params_per_s": _rate(UPDATE_PARAMS, alone), "params_per_s_under_copies": _rate(UPDATE_PARAMS, loaded)}
        optimizer.append({"threads": n_threads, **rates})
    halves = [filled(big_bytes).chunk(2) for _ in every_core]
    streams = [walking_copy(to, source, COPY_BYTES) for to, source in halves]
    everyone = bench.together([([core], stream) for core, stream in zip(every_core, streams, strict=True)])
    reductions = [reduction(n_params) for _ in cores]
    sums = bench.together([(cores, work) for work, _ in reductions])
    fault = bench.host(lambda: filled(big_bytes))
    # What compute does to the optimizer: a stream of products beside it.
    alone = bench.together([(cores, updates[0])])
    beside = bench.together([(cores, updates[0]), (bench.compute_cores, product_stream())])
    bench.slowdown["optimizer"] = max(1.0, beside[0].seconds / alone[0].seconds)
    for point in optimizer:
        _widen(point["params_per_s"], bench.slowdown["optimizer"])
    host = {
        "dram_bytes_per_s": _rate(2 * COPY_BYTES, everyone),  # each byte is read and written
        "optimizer": optimizer,
        "reduce_bytes_per_s": _rate(reductions[0][1], sums),
        "page_fault_bytes_per_s": _quantity(big_bytes / fault.seconds, fault.spread_fraction, "probe"),
    }
    return host, updates[0]


def _overheads(bench: Bench, busy: Sequence[Work]) -> dict[str, Any]:
    """Cost of a library call, of an op's hand-over between two lanes, and the rate of memory-bound kernels."""
    tiny, _, n_calls = pointwise(1, 32, 64)
    call = bench.compute(tiny)
    call_s = call.seconds / n_calls
    bench.slow_by("calls", [tiny], busy)
    sizes = [pointwise(tokens, 512, 1536) for tokens in (256, 1024)]
    rates, spreads = [], []
    for work, n_bytes, n_calls in sizes:
        sample = bench.compute(work)
        rates.append(n_bytes / max(sample.seconds - n_calls * call_s, sample.seconds / 4))
        spreads.append(sample.spread_fraction)
    bench.slow_by("memory traffic", [work for work, _, _ in sizes], busy)
    mean = statistics.geometric_mean(rates)
    traffic = _quantity(mean, max(*spreads, max(rates) / mean - 1), "probe")
    handover = bench.handover()
    return {
        "memory_bytes_per_s": _widen(traffic, bench.slowdown["memory traffic"]),
        "kernel_overhead_s": _widen(_quantity(call_s, call.spread_fraction, "probe"), bench.slowdown["calls"]),
        "op_overhead_s": _quantity(handover.seconds, handover.spread_fraction, "probe"),
    }


def _matmuls(bench: Bench, effort: Effort, busy: Sequence[Work], progress: Progress) -> dict[str, Any]:
    """Rates of a product together with the two of its backward, over tokens and widths."""
    shapes = sorted({*((m, w, w) for m in effort.tokens for w in effort.widths), *effort.odd_shapes})
    grid: dict[str, Any] = {}
    middle = (effort.tokens[-2], effort.widths[-2], effort.widths[-1])
    for dtype in DTYPES:
        bench.slow_by(f"{dtype} products", [products(dtype, *middle)], busy)
    for i, dtype in enumerate(DTYPES):
        times: dict[tuple[int, int, int], Sample] = {}
        best_flop_per_s = 0.0
        for j, (m, k, n) in enumerate(shapes):
            progress(f"matrix products in {dtype}", (i + j / len(shapes)) / len(DTYPES))
            n_flop = _products_flop(m, k, n)
            if times and n_flop / best_flop_per_s > effort.patience.longest_s:
                continue
            times[m, k, n] = bench.compute(products(dtype, m, k, n))
            best_flop_per_s = max(best_flop_per_s, n_flop / times[m, k, n].seconds)
        raise_products(times)
        grid[dtype] = [
            {"m": m, "k": k, "n": n, "flop_per_s": _loaded(bench, f"{dtype} products", _products_flop(m, k, n), sample)}
            for (m, k, n), sample in times.items()
        ]
    return grid


def _products_flop(m: int, k: int, n: int) -> int:
    """FLOP of a product and the two of its backward: one multiply and one add per inner step of each."""
    return 3 * 2 * m * k * n


def _attentions(bench: Bench, effort: Effort, busy: Sequence[Work]) -> dict[str, Any]:
    """Rates of causal attention as transformers calls it, forward and backward apart, over lengths and head widths."""
    grid: dict[str, Any] = {}
    n_tokens, n_heads = max(effort.seq_lens), 2
    for dtype in DTYPES:
        kind = f"{dtype} attention"
        bench.slow_by(kind, attention(dtype, 2, n_heads, effort.seq_lens[-2], 64), busy)
        points = []
        narrower: list[list[float]] = [[0.0] * len(effort.seq_lens)] * 2  # times of the head width before, forward and backward
        for head_dim in (64, 128):
            both: list[list[tuple[float, Sample]]] = [[], []]
            for seq_len in effort.seq_lens:
                works = attention(dtype, n_tokens // seq_len, n_heads, seq_len, head_dim)
                for times, work in zip(both, works, strict=True):
                    sample = bench.compute(work)
                    times.append((seq_len, Sample(sample.seconds * seq_len / n_tokens, sample.spread_fraction)))
            for times, least_s in zip(both, narrower, strict=True):
                raise_times(times, least_s)
            narrower = [[sample.seconds for _, sample in times] for times in both]
            for seq_len, (_, forward), (_, backward) in zip(effort.seq_lens, *both, strict=True):
                n_flop = 4 * n_heads * head_dim * (seq_len * (seq_len + 1) // 2)  # two products over the causal half
                points.append(
                    {
                        "seq_len": seq_len,
                        "head_dim": head_dim,
                        "forward_flop_per_s": _loaded(bench, kind, n_flop, forward),
                        "backward_flop_per_s": _loaded(bench, kind, 2.5 * n_flop, backward),  # five products, not two
                    }
                )
        grid[dtype] = points
    return grid


def _loaded(bench: Bench, kind: str, n_flop: float, sample: Sample) -> dict[str, Any]:
    """FLOP/s of a work measured alone, with what this kind of work loses under load in the spread."""
    return _widen(_quantity(n_flop / sample.seconds, sample.spread_fraction, "probe"), bench.slowdown[kind])


def _rate(per_run: float, lanes: Sequence[Sample]) -> dict[str, Any]:
    """What lanes that run together do per second."""
    return _quantity(sum(per_run / s.seconds for s in lanes), max(s.spread_fraction for s in lanes), "probe")


def _widen(quantity: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Take what the other lanes' work cost into the spread."""
    quantity["spread_fraction"] = _rounded(max(quantity["spread_fraction"], slowdown - 1))
    return quantity


def _quantity(value: float, spread_fraction: float, source: str) -> dict[str, Any]:
    """A quantity of the profile's schema, as JSON values."""
    return {"value": _rounded(value), "spread_fraction": _rounded(min(spread_fraction, MOST_SPREAD)), "source": source}


def _rounded(value: float) -> float:
    """Six significant digits of a rate or time; sizes in bytes stay whole."""
    return float(value) if isinstance(value, int) else float(f"{value:.6g}")


def available_bytes() -> int:
    """Memory that new allocations can have: what the system says is available, or what its control group still allows."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(fields["MemAvailable"].split()[0]) * KiB
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        group = Path("/sys/fs/cgroup")
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # no such control group, or `max`: no limit
            continue
        free_bytes = min(free_bytes, max(left, 0))
    return free_bytes


def _resident_bytes() -> int:
    """Memory of this process that lies in physical pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_name() -> str:
    """What the processor calls itself, or its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() or platform.machine()
    return platform.machine()


def _listed(cores: Sequence[int]) -> str:
    return ("s " if len(cores) > 1 else " ") + ", ".join(map(str, cores))
