"""Stage that measures the host's optimizer by size and number of threads, and the link."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch

from penstock.hwprofiles.probe.host_kernels import Task, square_tasks, update_tasks
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.optimizer import TASK_ELEMENTS
from penstock.runtime.host.slabs import host_slab, register_for_dma, touch, unregister
from penstock.runtime.host.workers import Workers, together
from penstock.runtime.units import MiB

from .commands import host_bytes
from .facts import siblings
from .stages import Note, Request

SLAB_BYTES, TINY_SLAB_BYTES = 8 * 10**9, 32 * MiB
COPY_BYTES = (64 * MiB, 512 * MiB)
COPY_S = 0.5
SIZES = (0.2, 0.8, 3.0, 12.0, 41.0)  # GB of state and gradients
SWEPT_GB = 12.0  # size for tests of threads, copies and squares
TINY_SIZES = (0.03, 0.06)
HOST_SHARE = 0.6  # of the host's memory, for the largest size
ISSUING_CORES = 2  # reserved by a run for the lanes that issue to a GPU
UPDATE_S, TINY_UPDATE_S = 1.5, 0.1
PIECE_S = 0.1  # duration of one sample


def host(request: Request, note: Note) -> None:
    cores = sorted(os.sched_getaffinity(0))
    n_bytes = TINY_SLAB_BYTES if request.tiny else SLAB_BYTES
    slab, touched_s = _touched(n_bytes, len(cores))
    note("touch", n_bytes=n_bytes, seconds=touched_s, bytes_per_s=n_bytes / touched_s, n_threads=len(cores))
    if request.device != "cuda":
        return _sweep(request, note, cores, None)
    began_s = time.perf_counter()
    pieces = register_for_dma({"benchmark": slab})
    seconds = time.perf_counter() - began_s
    note("lock", n_bytes=n_bytes, seconds=seconds, bytes_per_s=n_bytes / seconds)
    try:
        _link(slab, note)
        return _sweep(request, note, cores, slab)
    finally:
        unregister(pieces)


def _touched(n_bytes: int, n_threads: int) -> tuple[torch.Tensor, float]:
    slab, began_s = host_slab(n_bytes), time.perf_counter()
    touch([slab], n_threads)
    return slab, time.perf_counter() - began_s


def _link(slab: torch.Tensor, note: Note) -> None:
    for n_bytes in COPY_BYTES:
        up, down = (_copy(slab, n_bytes, is_up) for is_up in (True, False))
        note("copies", n_bytes=n_bytes, h2d_bytes_per_s=_copied([up])[0], d2h_bytes_per_s=_copied([down])[0])
        both = _copied([up, down])
        note("copies both ways", n_bytes=n_bytes, h2d_bytes_per_s=both[0], d2h_bytes_per_s=both[1])


def _copy(slab: torch.Tensor, n_bytes: int, is_up: bool) -> tuple[torch.cuda.Stream, Callable[[], int]]:
    """Return a stream, and a function that issues one copy on it. The directions use separate halves of the slab."""
    stream, device_buffer = torch.cuda.Stream(), torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    half = slab[: slab.numel() // 2] if is_up else slab[slab.numel() // 2 :]
    n_places, turn = half.numel() // n_bytes, [0]
    torch.cuda.synchronize()  # `there` was filled on another stream

    def issue() -> int:
        turn[0] += 1
        host_part = half[turn[0] % n_places * n_bytes :][:n_bytes]
        with torch.cuda.stream(stream):
            if is_up:
                device_buffer.copy_(host_part, non_blocking=True)
            else:
                host_part.copy_(device_buffer, non_blocking=True)
        return n_bytes

    return stream, issue


def _copied(lanes: Sequence[tuple[torch.cuda.Stream, Callable[[], int]]]) -> list[float]:
    """Return bytes per second of each lane while all copy."""

    def lane(stream: torch.cuda.Stream, issue: Callable[[], int]) -> float:
        issue()
        stream.synchronize()
        began_s, n_bytes = time.perf_counter(), 0
        while time.perf_counter() - began_s < COPY_S:
            n_bytes += issue() + issue()
            stream.synchronize()
        return n_bytes / (time.perf_counter() - began_s)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(lambda arguments: lane(*arguments), lanes))


def _sweep(request: Request, note: Note, cores: list[int], slab: torch.Tensor | None) -> None:
    """Measure updates by state size; at one size also by threads, during copies, and for sums of squares."""
    lane = cores[ISSUING_CORES:] or cores
    firsts = {int(names.replace("-", ",").partition(",")[0]) for names in siblings()}
    sizes, swept = (TINY_SIZES, TINY_SIZES[-1]) if request.tiny else (SIZES, SWEPT_GB)
    for size_gb in sizes:
        if size_gb * 1e9 > HOST_SHARE * host_bytes(request) and not request.tiny:
            note("left out", name=f"update of {size_gb:g} GB", said="more than the host's memory allows")
            continue
        state, in_parallel = _slab(int(size_gb * 1e9), len(cores)), partial(together, n_threads=len(cores))
        updates = update_tasks(state, in_parallel)
        name, measure = f"update of {size_gb:g} GB", partial(_sustained, request, note)
        measure(name, updates, lane, "params_per_s")
        if size_gb == swept:
            measure(f"{name}, a thread a core", updates, [core for core in lane if core in firsts] or lane, "params_per_s")
            measure(f"{name}, half the threads", updates, lane[: -(-len(lane) // 2)], "params_per_s")
            if slab is not None:
                measure(f"{name} beside uploads", updates, lane, "params_per_s", _copying(slab, (True,)))
                measure(f"{name} beside copies", updates, lane, "params_per_s", _copying(slab, (True, False)))
            measure(f"squares of {size_gb:g} GB", square_tasks(state, in_parallel), lane, "host_bytes_per_s")


def _slab(n_bytes: int, n_threads: int) -> torch.Tensor:
    slab = host_slab(n_bytes)
    touch([slab], n_threads)
    return slab


def _sustained(
    request: Request,
    note: Note,
    name: str,
    tasks: list[Task],
    cores: list[int],
    unit: str,
    load: AbstractContextManager[None] | None = None,
) -> None:
    """Measure the throughput of tasks in a repeated sweep, with cores used and stolen time."""
    n_parts = 1
    while n_parts * len(tasks) < 2 * len(cores):  # otherwise two threads could run the same task
        n_parts *= 2
    workers, turns, rates = Workers(len(cores), Scratch), cycle(_cut(tasks, n_parts)), list[float]()
    amount = TASK_ELEMENTS // n_parts * (2 if unit == "host_bytes_per_s" else 1)  # per task: bytes of bf16 gradients, or parameters
    n_in_piece = len(cores)

    def settled() -> AbstractContextManager[None]:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        return nullcontext()

    def measure() -> None:
        nonlocal n_in_piece
        settled()
        with workers.helped(settled), load or nullcontext():
            workers.run(list(islice(turns, n_in_piece)))
            began_s, used_s, stolen_s = time.perf_counter(), time.process_time(), _steal_s()
            while (now_s := time.perf_counter()) - began_s < (TINY_UPDATE_S if request.tiny else UPDATE_S):
                workers.run(list(islice(turns, n_in_piece)))
                rates.append(n_in_piece * amount / (took_s := time.perf_counter() - now_s))
                n_in_piece = max(len(cores), round(n_in_piece * PIECE_S / took_s))
            wall_s = time.perf_counter() - began_s
            used = (time.process_time() - used_s) / wall_s
            n, third = len(cores), max(1, len(rates) // 3)
            note(
                "sustained", name=name, n_threads=n, cores_used=used, steal_s=_steal_s() - stolen_s, wall_s=wall_s,
                first_third=median(rates[:third]), last_third=median(rates[-third:]), **{unit: median(rates)},
            )  # fmt: skip

    with ThreadPoolExecutor(1) as thread:
        thread.submit(measure).result()


def _cut(tasks: list[Task], n: int) -> list[Task]:
    """Split each task, a partial call that ends with the arguments start and end, into n equal parts."""
    size = TASK_ELEMENTS // n
    starts = [(partial(task.func, *task.args[:-2]), task.args[-2] + i * size) for task in tasks for i in range(n)]
    return [partial(function, start, start + size) for function, start in starts]


def _steal_s() -> float:
    """Return seconds that a hypervisor took from all cores since boot; 0 if the kernel does not count them."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


@contextmanager
def _copying(slab: torch.Tensor, ways: Sequence[bool]) -> Iterator[None]:
    """Copy from the slab to the device (True) and back (False) until the context ends."""
    stop = threading.Event()

    def loop(stream: torch.cuda.Stream, issue: Callable[[], int]) -> None:
        while not stop.is_set():
            issue()
            stream.synchronize()

    with ThreadPoolExecutor(len(ways)) as pool:
        lanes = [pool.submit(loop, *_copy(slab, COPY_BYTES[0], is_up)) for is_up in ways]
        try:
            yield
        finally:
            stop.set()
        for lane in lanes:
            lane.result()
