"""Stage that measures the host's optimizer by size and number of threads, and the link, with the benchmarks of the probe."""

import os
import time
from contextlib import ExitStack
from dataclasses import replace

import torch

from penstock.hwprofiles.components import Direction
from penstock.hwprofiles.probe import host_kernels
from penstock.hwprofiles.probe import kernels_to_time as kernels
from penstock.hwprofiles.probe.cpu import CpuDevice
from penstock.hwprofiles.probe.cuda import CudaDevice
from penstock.hwprofiles.probe.kernels_to_time import Benchmark
from penstock.hwprofiles.probe.measurements import DIRECTIONS, GPU, Effort
from penstock.hwprofiles.probe.timings import Stopwatch
from penstock.runtime.host.slabs import host_slab, register_for_dma, touch, unregister
from penstock.runtime.machines.lanes import split_beside_gpu
from penstock.runtime.units import MiB

from .commands import host_bytes
from .facts import siblings
from .stages import Note, Request

SLAB_BYTES, TINY_SLAB_BYTES = 8 * 10**9, 32 * MiB
COPY_BYTES = (64 * MiB, 512 * MiB)
SIZES = (0.2, 0.8, 3.0, 12.0, 41.0)  # GB of state and gradients
SWEPT_GB = 12.0  # size for tests of threads, copies and squares
TINY_SIZES = (0.03, 0.06)
HOST_SHARE = 0.6  # of the host's memory, for the largest size
TINY_S = 0.1  # duration of a benchmark in a tiny run


def host(request: Request, note: Note) -> None:
    _touch_and_lock(request, note)
    effort = replace(GPU, sustained_s=TINY_S, piece_s=TINY_S / 5) if request.tiny else GPU
    device = CudaDevice(0) if request.device == "cuda" else None
    if device is not None:
        for n_bytes in COPY_BYTES:
            _copies(device, effort, note, n_bytes)
    _sweep(request, effort, note, device)


def _touch_and_lock(request: Request, note: Note) -> None:
    """Measure the first write to memory, and its registration for DMA."""
    n_bytes, n_threads = TINY_SLAB_BYTES if request.tiny else SLAB_BYTES, len(os.sched_getaffinity(0))
    slab, began_s = host_slab(n_bytes), time.perf_counter()
    touch([slab], n_threads)
    seconds = time.perf_counter() - began_s
    name = f"{n_bytes / 1e9:.3g} GB"
    note("touch", name=name, seconds=seconds, host_bytes_per_s=n_bytes / seconds, n_threads=n_threads)
    if request.device == "cuda":
        torch.cuda.init()
        began_s = time.perf_counter()
        pieces = register_for_dma({"benchmark": slab})
        seconds = time.perf_counter() - began_s
        note("lock", name=name, seconds=seconds, host_bytes_per_s=n_bytes / seconds)
        unregister(pieces)


def _copies(device: CudaDevice, effort: Effort, note: Note, n_bytes: int) -> None:
    """Measure pinned copies in each direction, alone and next to the other direction."""

    def rate(way: Direction, *background: Direction) -> float:
        with ExitStack() as stack:
            ready, *company = (stack.enter_context(device.prepared(kernels.copy(w, n_bytes))) for w in (way, *background))
            stack.enter_context(device.background(company))
            return n_bytes / Stopwatch(device, effort).timing(ready, is_accompanied=bool(company)).value

    up, down = DIRECTIONS
    name = f"{n_bytes / 1e6:.3g} MB"
    note("copies", name=name, h2d_bytes_per_s=rate(up), d2h_bytes_per_s=rate(down))
    note("copies both ways", name=name, h2d_bytes_per_s=rate(up, down), d2h_bytes_per_s=rate(down, up))


def _sweep(request: Request, effort: Effort, note: Note, gpu: CudaDevice | None) -> None:
    """Measure updates by state size; at one size also by threads, during copies, and for sums of squares."""
    device = CpuDevice(split_beside_gpu)
    n_threads = len(device.host_cores)
    firsts = {int(names.replace("-", ",").partition(",")[0]) for names in siblings()}

    def measure(name: str, work: Benchmark, unit: str, *ways: Direction) -> None:
        with ExitStack() as stack:
            ready = stack.enter_context(device.prepared(work))
            if gpu is not None and ways:
                company = [stack.enter_context(gpu.prepared(kernels.copy(way, COPY_BYTES[0]))) for way in ways]
                stack.enter_context(gpu.background(company))
            timing = Stopwatch(device, effort).timing(ready)
        assert timing.use is not None
        rate, (cores_used, steal_fraction, last_third) = work.amount / timing.value, timing.use
        note(
            "sustained", name=name, n_threads=work.n_threads, cores_used=cores_used, steal_fraction=steal_fraction,
            last_third=last_third, **{unit: rate},
        )  # fmt: skip

    for size_gb in TINY_SIZES if request.tiny else SIZES:
        name, n_bytes = f"update of {size_gb:g} GB", int(size_gb * 1e9)
        if n_bytes > HOST_SHARE * host_bytes(request) and not request.tiny:
            note("left out", name=name, said="more than the host's memory allows")
            continue
        work = host_kernels.updates(n_threads, n_bytes)
        measure(name, work, "params_per_s")
        if size_gb in (SWEPT_GB, TINY_SIZES[-1]):
            n_cores = len(firsts.intersection(device.host_cores)) or n_threads
            measure(f"{name}, a thread a core", host_kernels.updates(n_cores, n_bytes), "params_per_s")
            measure(f"{name}, half the threads", host_kernels.updates(-(-n_threads // 2), n_bytes), "params_per_s")
            if gpu is not None:
                measure(f"{name} beside uploads", work, "params_per_s", *DIRECTIONS[:1])
                measure(f"{name} beside copies", work, "params_per_s", *DIRECTIONS)
            measure(f"squares of {size_gb:g} GB", host_kernels.squares(n_threads, n_bytes), "host_bytes_per_s")
    device.release()
