"""What can the processor and its memory do?

The optimizer against threads, sums, memory traffic and first touch, with the runtime's own code on the cores it would use: for a
CPU that computes with its other cores, and for one beside a GPU.
"""

import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from runtime.units import KiB, MiB

from .device import HostFacts
from .instruments import Bench, repeating
from .timings import Reading, Timing, together_per_second
from .works import UPDATE_PARAMS, Work, filled, reductions, walking_copy, walking_updates

Lane = tuple[Sequence[int], Work]  # cores, and what is repeated on one of them

COPY_BYTES = 8 * MiB  # of one copy, where copies only load the machine
STATE_BYTES_PER_PARAM = 2 + 2 + 8 + 2  # what that call reads: the master in two halves, moments, gradient


class Processor:
    """Host lanes' work, timed on a bench. Performs `device.Host`."""

    def __init__(self, bench: Bench, cold_bytes: int) -> None:
        """`cold_bytes`: of memory so far above a cache that nothing is in one. Optimizer state is made when first asked for."""
        self.bench, self.cold_bytes = bench, cold_bytes
        self._updates: list[Work] = []

    @staticmethod
    def params_per_thread(cold_bytes: int, n_threads: int) -> int:
        """Optimizer state of each thread: together far above a cache, and each a few calls' worth, however many threads."""
        return max(cold_bytes // 32 // n_threads, 4 * UPDATE_PARAMS)

    @staticmethod
    def stream_bytes(cold_bytes: int, n_cores: int) -> int:
        """What each core's stream of copies walks through: together far above a cache."""
        return max(min(cold_bytes // 2, 8 * cold_bytes // n_cores), 4 * COPY_BYTES)

    @staticmethod
    def needed_bytes(cold_bytes: int, n_cores: int, n_host_cores: int) -> int:
        """Memory that measuring takes: a stream of copies per core, optimizer state per host core."""
        state_bytes = n_host_cores * Processor.params_per_thread(cold_bytes, n_host_cores) * STATE_BYTES_PER_PARAM
        return n_cores * Processor.stream_bytes(cold_bytes, n_cores) + state_bytes

    def facts(self) -> HostFacts:
        n_cores = len(self.bench.host_cores)
        return HostFacts(cpu_name(), n_cores, available_bytes(), memory_nodes(self.bench.all_cores))

    def process_bytes(self) -> int:
        return resident_bytes()

    def now_s(self) -> float:
        return self.bench.clock()

    def handover(self) -> Timing:
        return self.bench.handover()

    def update(self, thread: int) -> Work:
        """One call of the optimizer after another, on a thread's own state."""
        if not self._updates:
            n_lanes = len(self.bench.host_cores)
            self._updates += walking_updates(self.params_per_thread(self.cold_bytes, n_lanes), UPDATE_PARAMS, n_lanes)
        return self._updates[thread]

    def optimizer(self, n_threads: int, beside: Sequence[Lane] = ()) -> Reading:
        lanes = [(self.bench.host_cores, self.update(i)) for i in range(n_threads)]
        return together_per_second(UPDATE_PARAMS, self.bench.together([*lanes, *beside])[:n_threads])

    def updating(self, n_threads: int) -> AbstractContextManager[None]:
        return repeating(self.bench.host_cores, [self.update(i) for i in range(n_threads)])

    def dram(self) -> Reading:
        streams, cores = [], self.bench.all_cores
        for core in cores:
            to, source = filled(self.stream_bytes(self.cold_bytes, len(cores))).chunk(2)
            streams.append(([core], walking_copy(to, source, COPY_BYTES)))
        return together_per_second(2 * COPY_BYTES, self.bench.together(streams))  # each byte is read and written

    def reduce(self) -> Reading:
        cores = self.bench.host_cores
        sums, n_bytes = reductions(self.params_per_thread(self.cold_bytes, len(cores)), len(cores))
        return together_per_second(n_bytes, self.bench.together([(cores, work) for work in sums]))

    def page_faults(self) -> Reading:
        n_bytes = self.cold_bytes // 2
        return self.bench.host(lambda: filled(n_bytes)).per_second(n_bytes)


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


def resident_bytes() -> int:
    """Memory of this process that lies in physical pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_name() -> str:
    """What the processor calls itself, or its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() or platform.machine()
    return platform.machine()


def memory_nodes(allowed: Sequence[int], folder: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """Cores of each memory node that we may run on, by the node's number; a node without such cores is empty."""
    nodes: dict[int, tuple[int, ...]] = {}
    for place in folder.glob("node[0-9]*"):
        try:
            cores = _listed_cores((place / "cpulist").read_text())
            nodes[int(place.name.removeprefix("node"))] = tuple(c for c in cores if c in set(allowed))
        except (OSError, ValueError):
            continue
    return tuple(nodes.get(i, ()) for i in range(max(nodes, default=-1) + 1)) or (tuple(allowed),)


def _listed_cores(text: str) -> list[int]:
    """`0-3,8` as numbers."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
