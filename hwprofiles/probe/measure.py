"""What can the CPU at hand do in a device's place?

Which points are measured, in which order, and the profile that they make. `works.py` holds what is timed, `instruments.py` the
clock, `host.py` what the host lanes do. Every rate is measured alone, and its spread is widened by what the other lanes' work does
to it.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from hwprofiles.quantity import Dtype
from hwprofiles.schema import FORMAT_VERSION, Profile
from runtime.errors import ProfileError
from runtime.host.slabs import settle_allocator
from runtime.machines.cores import split_beside_gpu, split_cores
from runtime.units import KiB, MiB, show_bytes

from . import host as hosts
from .cliffs import Cliff, listed_cliffs, named_cliffs, optimizer_cliffs
from .host import COPY_BYTES, Processor
from .instruments import Bench, Patience
from .timings import (
    AttentionTimes,
    Reading,
    Timing,
    copy_curve,
    product_points,
    products_flop,
    quantity,
    thread_counts,
    together_per_second,
)
from .works import Work, attention, pointwise, product_stream, products, slab, walking_copy

Progress = Callable[[str, float], None]  # what is measured now, and the fraction done

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
COLD_BYTES = 256 * MiB  # far above a cache: host memory that a copy reads or an optimizer updates is never in one
SLOTS_BYTES = 64 * MiB  # a few device slots, used in turn
WORKING_BYTES = 64 * MiB  # what a layer's calls read, and write, before one of them finds its own tensors again
DEVICE_SHARE = 0.25  # of the usable memory, for the arena that stands in for a device
BEYOND_TORCH_BYTES = (
    300_000_000  # transformers, templates, tokenizer and data (180 MB), kernels' memory, holes in the allocator's heap
)
HEAD_DIMS = (64, 128)
N_HEADS = 2


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
    patient_s: float  # on a busy machine it waits no longer for calm from then on

    def needed_bytes(self, n_cores: int, n_host_cores: int) -> int:
        """Memory that measuring takes: copies and products, and the host lanes' work."""
        return 4 * self.cold_bytes + Processor.needed_bytes(self.cold_bytes, n_cores, n_host_cores)


THOROUGH = Effort(
    Patience(least_repeats=5, most_repeats=15, point_s=0.12, window_s=0.2, longest_s=1.2),
    tokens=(64, 128, 256, 512, 1024, 2048, 4096),
    widths=(128, 256, 384, 512, 768, 1024, 1536),
    odd_shapes=((1024, 512, 2048), (1024, 2048, 512), (1024, 512, 8192), (4096, 512, 2048), (4096, 2048, 512)),
    seq_lens=(128, 256, 512, 1024, 2048, 4096),
    copy_bytes=tuple(64 * KiB * 4**i for i in range(6)),
    cold_bytes=COLD_BYTES,
    patient_s=100.0,
)
QUICK = Effort(
    Patience(least_repeats=3, most_repeats=9, point_s=0.06, window_s=0.12, longest_s=1.2),
    tokens=(64, 256, 1024, 4096),
    widths=(128, 256, 512, 1024),
    odd_shapes=((1024, 512, 2048), (1024, 2048, 512), (1024, 512, 8192)),
    seq_lens=(128, 256, 512, 1024, 2048),
    copy_bytes=(64 * KiB, 1 * MiB, 8 * MiB, 64 * MiB),
    cold_bytes=COLD_BYTES,
    patient_s=25.0,
)


def probe_cpu(effort: Effort, progress: Progress, name: str = "this-machine") -> Profile:
    """Measure this machine's CPU as a device and as a host.

    ProfileError where too little memory is free, or where the machine is too busy to be measured.
    """
    cores = sorted(os.sched_getaffinity(0))
    bench = Bench(effort.patience, *split_cores(cores))
    bench.hurry_after_s = bench.clock() + effort.patient_s
    usable_bytes, needed_bytes = hosts.available_bytes(), effort.needed_bytes(len(cores), len(bench.host_cores))
    _check_memory(usable_bytes, needed_bytes)
    settle_allocator()  # as where a CPU trains
    resident_bytes = hosts.resident_bytes()  # before the measuring takes memory of its own
    link, host, device = _measured(bench, effort, progress)
    cliffs = optimizer_cliffs(host["optimizer"], host["dram_bytes_per_s"]["value"])
    device_bytes = int(usable_bytes * DEVICE_SHARE)
    cpu = f"{hosts.cpu_name()}, {len(cores)} cores"
    fields = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "summary": f"{cpu}, {show_bytes(usable_bytes)} of free memory; core{_listed(bench.compute_cores)} for compute, "
        f"core{_listed(bench.host_cores)} for copies and optimizer{named_cliffs(cliffs)}",
        "sources": _sources(bench, cpu, resident_bytes, cliffs),
        "device": {
            "name": f"{len(bench.compute_cores)} of {cpu}",
            "kind": "cpu",
            "memory_bytes": quantity(device_bytes, 0.0, "memory"),
            "context_bytes": quantity(0, 0.0, "nature"),
            "workspace_bytes": quantity(0, 0.0, "nature"),
            "compute_threads": len(bench.compute_cores),
            **device,
        },
        "link": {**link, "host_cores_per_copy": quantity(1, 0.0, "nature"), "dram_bytes_per_byte": 2.0},
        "host": {
            "memory_bytes": quantity(usable_bytes - device_bytes, 0.0, "memory"),
            "runtime_bytes": quantity(resident_bytes + BEYOND_TORCH_BYTES, 0.3, "process"),
            "n_cores": len(bench.host_cores),
            **host,
        },
        "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
    }
    try:
        return Profile.from_json(fields, "probe")
    except ProfileError as error:
        raise ProfileError(f"the measurements contradict each other ({error}); end other programs and probe again") from None


def host_beside_gpu(quick: bool) -> Processor:
    """The host of a GPU: a core or two for the lanes that feed it, the others for the optimizer."""
    effort = QUICK if quick else THOROUGH
    cores = sorted(os.sched_getaffinity(0))
    bench = Bench(effort.patience, *split_beside_gpu(cores))
    bench.hurry_after_s = bench.clock() + effort.patient_s
    free_bytes, needed_bytes = hosts.available_bytes(), effort.needed_bytes(len(cores), len(bench.host_cores))
    _check_memory(free_bytes, needed_bytes)
    return Processor(bench, effort.cold_bytes)


def _check_memory(free_bytes: int, needed_bytes: int) -> None:
    if free_bytes < needed_bytes:
        free, needed = show_bytes(free_bytes), show_bytes(needed_bytes)
        raise ProfileError(f"{free} of memory are free, and the probe needs {needed}; end other programs")


def _measured(bench: Bench, effort: Effort, progress: Progress) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Link, host and device of a profile. The link and the host come first: their work loads the machine for the others."""
    processor = Processor(bench, effort.cold_bytes)
    progress("copies", 0.0)
    link, copies = _link(bench, effort, processor)
    progress("optimizer", 0.1)
    host = _host(bench, processor, copies[0])
    busy = [copies[0], processor.update(0)]
    progress("calls and memory traffic", 0.2)
    device = _overheads(bench, busy)
    device["matmul"] = _matmuls(bench, effort, busy, lambda what, fraction: progress(what, 0.25 + 0.55 * fraction))
    attentions = _attentions(bench, effort, busy, lambda what, fraction: progress(what, 0.8 + 0.2 * fraction))
    device["attention"] = {"flash": attentions}
    progress("done", 1.0)
    return link, host, device


def _sources(bench: Bench, cpu: str, resident_bytes: int, cliffs: Sequence[Cliff]) -> dict[str, Any]:
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
            f"work: {disturbed}{listed_cliffs(cliffs)}",
        ),
        "memory": source("measured", "memory available when probed, cut by us into a quarter for the device arena and the rest"),
        "process": source(
            "assumed",
            f"resident memory of this process with torch ({show_bytes(resident_bytes)}, measured) and "
            f"{show_bytes(BEYOND_TORCH_BYTES)} for transformers, templates, data and holes between what the allocator gave",
        ),
        "nature": source(
            "assumed", "a CPU has no device context, and copies memory with a core: by its nature, nothing to measure"
        ),
    }


def _link(bench: Bench, effort: Effort, processor: Processor) -> tuple[dict[str, Any], list[Work]]:
    """Copies over sizes, under the optimizer, and both ways at once; and one endless copy each way, to load the machine with."""
    host_memory, slots = slab(effort.cold_bytes), slab(SLOTS_BYTES)
    ways = {"h2d": (slots, host_memory), "d2h": (host_memory, slots)}
    works = [walking_copy(to, source, COPY_BYTES) for to, source in ways.values()]
    cores = bench.host_cores
    both = bench.together([(cores, work) for work in works])
    link: dict[str, Any] = {"duplex_bytes_per_s": together_per_second(COPY_BYTES, both).as_quantity("probe")}
    for (direction, (to, source)), work, beside in zip(ways.items(), works, both, strict=True):
        tiny = bench.host(walking_copy(to, source, 64, n_copies=64))
        latency_s = tiny.seconds / 64
        points: list[tuple[int, Timing]] = []
        for n_bytes in effort.copy_bytes:
            n_copies = max(1, 4 * MiB // n_bytes)
            timing = bench.host(walking_copy(to, source, n_bytes, n_copies))
            points.append((n_bytes, Timing(timing.seconds / n_copies, timing.spread_fraction)))
        curve = copy_curve(points, latency_s, "probe")
        loaded, *_ = bench.together([(cores, work), *((cores, processor.update(i)) for i in range(len(cores)))])
        link[direction] = {
            "latency_s": quantity(latency_s, tiny.spread_fraction, "probe"),
            "bytes_per_s": curve,
            "pageable_bytes_per_s": curve[-1]["rate"],  # a CPU's copies know no pinned memory
            "duplex_bytes_per_s": beside.per_second(COPY_BYTES).as_quantity("probe"),
            "under_optimizer_bytes_per_s": loaded.per_second(COPY_BYTES).as_quantity("probe"),
        }
    return link, works


def _host(bench: Bench, processor: Processor, copy: Work) -> dict[str, Any]:
    """What host lanes do besides copying."""
    cores = bench.host_cores
    readings = []
    for n_threads in thread_counts(len(cores)):
        alone, loaded = processor.optimizer(n_threads), processor.optimizer(n_threads, beside=[(cores, copy)])
        readings.append((n_threads, alone, loaded))
    dram, reduce, faults = processor.dram(), processor.reduce(), processor.page_faults()
    # What compute does to the optimizer: a stream of products beside it.
    alone = processor.optimizer(1)
    beside = processor.optimizer(1, beside=[(bench.compute_cores, product_stream())])
    slowdown = bench.slowdown["optimizer"] = max(1.0, alone.value / beside.value)
    return {
        "dram_bytes_per_s": dram.as_quantity("probe"),
        "optimizer": [
            {
                "threads": n_threads,
                "params_per_s": alone.widened(slowdown).as_quantity("probe"),
                "params_per_s_under_copies": loaded.as_quantity("probe"),
            }
            for n_threads, alone, loaded in readings
        ],
        "reduce_bytes_per_s": reduce.as_quantity("probe"),
        "page_fault_bytes_per_s": faults.as_quantity("probe"),
    }


def _overheads(bench: Bench, busy: Sequence[Work]) -> dict[str, Any]:
    """Cost of a library call, of an op's hand-over between two lanes, and the rate of memory-bound kernels."""
    tiny, _, n_calls = pointwise(1, 32, 64)
    call = bench.compute(tiny)
    call_s = call.seconds / n_calls
    bench.slow_by("calls", [tiny], busy)
    sizes = [pointwise(tokens, 512, 1536, WORKING_BYTES) for tokens in (256, 1024)]
    rates, spreads = [], []
    for work, n_bytes, n_calls in sizes:
        timing = bench.compute(work)
        rates.append(n_bytes / max(timing.seconds - n_calls * call_s, timing.seconds / 4))
        spreads.append(timing.spread_fraction)
    bench.slow_by("memory traffic", [work for work, _, _ in sizes], busy)
    mean = statistics.geometric_mean(rates)
    traffic = Reading(mean, max(*spreads, max(rates) / mean - 1))
    handover = bench.handover()
    return {
        "memory_bytes_per_s": traffic.widened(bench.slowdown["memory traffic"]).as_quantity("probe"),
        "kernel_overhead_s": Reading(call_s, call.spread_fraction).widened(bench.slowdown["calls"]).as_quantity("probe"),
        "op_overhead_s": Reading(*handover).as_quantity("probe"),
    }


def _matmuls(bench: Bench, effort: Effort, busy: Sequence[Work], progress: Progress) -> dict[str, Any]:
    """Rates of a product together with the two of its backward, over tokens and widths."""
    shapes = sorted({*((m, w, w) for m in effort.tokens for w in effort.widths), *effort.odd_shapes})
    grid: dict[str, Any] = {}
    middle = (effort.tokens[len(effort.tokens) // 2], effort.widths[len(effort.widths) // 2], effort.widths[-1])
    for dtype in DTYPES:
        bench.slow_by(f"{dtype} products", [products(dtype, *middle, working_bytes=WORKING_BYTES)], busy)
    for i, dtype in enumerate(DTYPES):
        times: dict[tuple[int, int, int], Timing] = {}
        best_flop_per_s = 0.0
        for j, (m, k, n) in enumerate(shapes):
            progress(f"matrix products in {dtype}", (i + j / len(shapes)) / len(DTYPES))
            n_flop = products_flop(m, k, n)
            if times and n_flop / best_flop_per_s > effort.patience.longest_s:
                continue
            times[m, k, n] = bench.compute(products(dtype, m, k, n, working_bytes=WORKING_BYTES))
            best_flop_per_s = max(best_flop_per_s, n_flop / times[m, k, n].seconds)
        grid[dtype] = product_points(times, bench.slowdown[f"{dtype} products"])
    return grid


def _attentions(bench: Bench, effort: Effort, busy: Sequence[Work], progress: Progress) -> dict[str, Any]:
    """Rates of causal attention as transformers calls it, forward and backward apart, over lengths and head widths."""
    grid: dict[str, Any] = {}
    n_tokens = max(effort.seq_lens)
    for i, dtype in enumerate(DTYPES):
        kind = f"{dtype} attention"
        bench.slow_by(kind, attention(dtype, 2, N_HEADS, effort.seq_lens[-2], 64), busy)
        points = AttentionTimes(N_HEADS, bench.slowdown[kind])
        for j, head_dim in enumerate(HEAD_DIMS):
            progress(kind, (i + j / len(HEAD_DIMS)) / len(DTYPES))
            times = []
            for seq_len in effort.seq_lens:
                forward, backward = (
                    bench.compute(work) for work in attention(dtype, n_tokens // seq_len, N_HEADS, seq_len, head_dim)
                )
                share = seq_len / n_tokens
                times.append(
                    (
                        seq_len,
                        forward._replace(seconds=forward.seconds * share),
                        backward._replace(seconds=backward.seconds * share),
                    )
                )
            points.add(head_dim, times)
        grid[dtype] = points.points
    return grid


def _listed(cores: Sequence[int]) -> str:
    return ("s " if len(cores) > 1 else " ") + ", ".join(map(str, cores))
