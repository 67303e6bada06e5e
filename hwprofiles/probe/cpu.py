"""CPU device of the probe: some cores compute, the others copy, update and sum.

Times are wall times on the threads and cores of a run. Processor, steal and queue time are reported, not subtracted.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, cached_property, lru_cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from penstock.hwprofiles.instructions import instruction_set
from penstock.runtime.errors import ProfileError
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.memory import available_host_bytes
from penstock.runtime.host.slabs import host_slab, settle_allocator, touch
from penstock.runtime.host.workers import Workers, together
from penstock.runtime.machines.lanes import split_cores
from penstock.runtime.plan import Lane
from penstock.runtime.units import MiB, show_bytes

from .device import Device, Facts, Ready, Run
from .host_kernels import LEAST_BYTES
from .kernels_to_time import COLD_BYTES, HANDOVER, Benchmark, Call, Walk, copying

Split = Callable[[list[int]], tuple[list[int], list[int]]]
Registered = Callable[[torch.Tensor], AbstractContextManager[object]]
CPU = torch.device("cpu")
DEVICE_SHARE = 0.25  # fraction of free memory for the arena that serves as device memory
SLOTS_BYTES = 68 * MiB  # a few device slots, used in rotation
WORKING_BYTES = 64 * MiB  # operands, used in rotation
MOST_THREADS = 1024  # per set of cores
STAT = Path("/proc/stat")
STEAL_FIELD = 8  # index in a line; field 0 is the name of the core


class CpuDevice(Device):
    """Cores of this machine; also the host part of a `CudaDevice`."""

    def __init__(self, split: Split = split_cores, registered: Registered = nullcontext) -> None:
        """`split`: divides cores into those for compute, or for feeding a GPU, and the others. `registered`: context in which a
        slab is registered for DMA. Raise ProfileError if too little memory is free."""
        settle_allocator()  # same malloc settings as a run on a CPU
        self.all_cores = tuple(sorted(os.sched_getaffinity(0)))
        self.compute_cores, self.host_cores = map(tuple, split([*self.all_cores]))
        self.free_bytes = available_host_bytes() or 0
        self.pool = cache(self._new_pool)
        self._background: list[Benchmark] = []  # repeated in the background
        self._registered, self._slab_owner = registered, ExitStack()
        self._slab, self._walk = lru_cache(maxsize=1)(self._new_slab), lru_cache(maxsize=1)(self._new_walk)
        needed_bytes = len(self.all_cores) * COLD_BYTES + 4 * LEAST_BYTES  # copies on every core, and optimizer state
        if self.free_bytes < needed_bytes:
            free, needed = show_bytes(self.free_bytes), show_bytes(needed_bytes)
            raise ProfileError(f"{free} of memory are free, but the probe needs {needed}; end other programs")

    def facts(self) -> Facts:
        processor = f"{cpu_name()}, {len(self.all_cores)} cores"
        return Facts(
            kind="cpu", name=f"{len(self.compute_cores)} of {processor}", host=processor, nodes=memory_nodes(self.all_cores),
            driver=f"torch {torch.__version__}, {platform.system()} {platform.release()}", capability=(0, 0),
            compute_threads=len(self.compute_cores), n_cores=len(self.all_cores), n_host_cores=len(self.host_cores),
            host_bytes=self.free_bytes - self.memory()[1], instructions=(instruction_set() or (None,))[0],
        )  # fmt: skip

    def memory(self) -> tuple[int, int]:
        n_bytes = int(self.free_bytes * DEVICE_SHARE)
        return n_bytes, n_bytes

    @contextmanager
    def prepared(self, work: Benchmark) -> Iterator[Ready]:
        if work.make is not None:
            yield Ready(work, work.make(CPU, WORKING_BYTES))
        elif work.tasks is not None:
            workers, walk = Workers(work.n_threads, Scratch), self._walk(work.tasks, work.slab_bytes)
            with workers.helped(partial(settle, self._cores_of(work), 1)):
                yield Ready(work, lambda: workers.run([*islice(walk, work.n_tasks)]))
        elif work.place is not None:
            target, source = self._slabs if work.lane is Lane.H2D else self._slabs[::-1]
            yield Ready(work, copying(target, source, int(work.amount)))
        else:
            yield Ready(work, lambda: self.pool(self.host_cores).submit(int).result())

    def _new_slab(self, n_bytes: int) -> torch.Tensor:
        """Allocate host memory like a run: huge pages, touched by all host threads, registered for DMA with a GPU."""
        self._slab_owner.close()
        slab = host_slab(n_bytes)
        self.pool(self.host_cores).submit(touch, [slab], len(self.host_cores)).result()
        self._slab_owner.enter_context(self._registered(slab))
        return slab

    def _new_walk(self, tasks: Walk, n_bytes: int) -> Iterator[Any]:
        """Cycle through the tasks of the slab. The next benchmark with these tasks continues at the last position."""
        cores = self.host_cores
        by_all = partial(together, n_threads=len(cores), settled=partial(settle, cores, 1))
        return cycle(self.pool(cores).submit(tasks, self._slab(n_bytes), by_all).result())

    def release(self) -> None:
        self._walk.cache_clear()
        self._slab.cache_clear()
        self._slab_owner.close()

    @cached_property
    def _slabs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Device slots and host memory with all pages allocated."""
        return host_slab(SLOTS_BYTES).fill_(1), host_slab(COLD_BYTES).fill_(1)

    def run(self, ready: Ready, n: int) -> Run:
        work, cores = ready.work, self._cores_of(ready.work)
        is_alone = not any({*self._cores_of(concurrent)} & {*cores} for concurrent in self._background)

        def lane() -> Run:
            counters = counters_s(cores) if work.tasks is not None else (0.0, 0.0)
            queued_before_s, began_s = queued_s(), time.perf_counter()
            for _ in range(n):
                ready.call()
            seconds, waited_s = time.perf_counter() - began_s, queued_s() - queued_before_s
            end = counters_s(cores) if work.tasks is not None else (0.0, 0.0)
            is_one_thread = is_alone and work.n_threads == 1 and work is not HANDOVER  # otherwise threads also wait for each other
            return Run(seconds, waited_s if is_one_thread else 0.0, end[0] - counters[0], end[1] - counters[1])

        return self.pool(cores).submit(lane).result()

    @contextmanager
    def background(self, company: Sequence[Ready]) -> Iterator[None]:
        self._background = [ready.work for ready in company]
        try:
            with repeating([(self.pool(self._cores_of(ready.work)), ready.call) for ready in company]):
                yield
        finally:
            self._background = []

    def _cores_of(self, work: Benchmark) -> tuple[int, ...]:
        if work.is_on_all_cores:
            return self.all_cores
        return self.compute_cores if work.lane is Lane.GPU or work is HANDOVER else self.host_cores

    def _new_pool(self, cores: tuple[int, ...]) -> Executor:
        """Create a pool bound to these cores. It is cached, because a new thread would start new threads of its math library."""
        n_threads = len(cores) if cores == self.compute_cores else 1
        return ThreadPoolExecutor(MOST_THREADS, initializer=settle, initargs=(cores, n_threads))


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def queued_s() -> float:
    """Return the seconds that this thread has waited in the run queue; 0 if the kernel does not report them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def counters_s(cores: Sequence[int]) -> tuple[float, float]:
    """Return the processor time of this process, and the mean steal time of these cores."""
    names, stolen = {f"cpu{core}" for core in cores}, 0
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in STAT.read_text().splitlines()]
        stolen = sum(int(fields[STEAL_FIELD]) for fields in lines if fields[0] in names)
    return time.process_time(), stolen / os.sysconf("SC_CLK_TCK") / len(cores)


def cpu_name() -> str:
    """Return the model name of the processor, or its architecture."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:10] == "model name"]
    return next(filter(None, names), platform.machine())


def memory_nodes(allowed: Sequence[int], folder: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """Return the allowed cores of each NUMA node, by node number; empty for a node without allowed cores."""
    nodes: dict[int, tuple[int, ...]] = {}
    for place in folder.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            parts = [part.partition("-") for part in (place / "cpulist").read_text().strip().split(",") if part]  # as in 0-3,8
            cores = [core for first, _, last in parts for core in range(int(first), int(last or first) + 1)]
            nodes[int(place.name.removeprefix("node"))] = tuple(core for core in cores if core in allowed)
    return tuple(nodes.get(i, ()) for i in range(max(nodes, default=-1) + 1)) or (tuple(allowed),)


def settle(cores: Sequence[int], n_threads: int) -> AbstractContextManager[None]:
    """Bind the calling thread to the cores and set its intra-op threads to `n_threads`, permanently."""
    os.sched_setaffinity(0, cores)  # 0: the calling thread
    torch.set_num_threads(n_threads)
    torch.set_grad_enabled(False)  # thread-local
    return nullcontext()


@contextmanager
def repeating(tasks: Sequence[tuple[Executor, Call]]) -> Iterator[None]:
    """Repeat every call on a thread of its own until the context ends, then raise the first error of a call."""
    stop, begun = threading.Event(), [threading.Event() for _ in tasks]

    def loop(call: Call, has_begun: threading.Event) -> None:
        try:
            while not stop.is_set():
                call()
                has_begun.set()
        finally:
            has_begun.set()

    futures = [pool.submit(loop, call, has_begun) for (pool, call), has_begun in zip(tasks, begun, strict=True)]
    for has_begun in begun:
        has_begun.wait()
    try:
        yield
    finally:
        stop.set()
    for future in futures:
        future.result()
