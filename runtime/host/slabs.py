"""How is host memory taken, so that it stays where it is?

Straight from the system, of exactly the size asked for (rounded up to pages): an allocator would round up further, and give memory
back to the system and fault it in again as it sees fit. Huge pages, the memory node and the like are asked for, and done without
where the system does not give them.
"""

import ctypes
import mmap
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.errors import PlanError
from runtime.units import GiB, KiB, MiB, show_bytes

from .workers import Workers

HUGE_PAGE_BYTES = 2 * MiB  # below it a slab has no huge pages to gain
TOUCH_BYTES = 64 * MiB  # what one thread faults in at a time
# Drivers since 580 refuse 2**39 bytes at once (their table of pages, 16 B for each of 4 KiB, would be 2**31 B). A refused call
# leaves an error behind that the thread's next kernel reports as its own: so none is tried that would be. No smaller than need
# be: a copy from two pieces may be refused too.
REGISTER_BYTES = 2**39 - 2**30
# What slots lie together in: small enough that several threads, each at a slab of its own, lock an arena at once.
SLAB_BYTES = 4 * GiB
MOST_LOCKING_THREADS = 8  # beyond them a driver's own locks bind
NODES = Path("/sys/devices/system/node")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of the C library's `mallopt`
LARGE_BYTES = 8 * MiB  # what is freed from here on goes back to the system at once
RETAINED_BYTES = 2**30  # of freed memory at the heap's end, which would be faulted in again by the next op
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFER, _INTERLEAVE = 1, 3  # memory policies
_NO_RESERVE = {"x86_64": 0x4000, "aarch64": 0x4000}  # MAP_NORESERVE, which Python does not name
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_slab(n_bytes: int) -> torch.Tensor:
    """So many bytes, zero; MemoryError where the system refuses. Pages come when they are touched, or with `touch`.

    Nothing is reserved: by its heuristic a system refuses a mapping that is larger than its memory and swap are now, and the memory
    of a virtual machine may grow as it is touched. Whether there is so much, who asks for it has to know (`available_host_bytes`).

    A process that forks leaves its slabs to itself: a child's copy would make the parent's next write a page fault, and move pages
    that a device reads. No page is shared, with other slabs or with anything else: a driver locks whole pages, and none twice.
    """
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _no_reserve())
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without it
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8, count=n_bytes)  # keeps the pages until the tensor goes


def _no_reserve() -> int:
    return _NO_RESERVE.get(platform.machine(), 0) if sys.platform == "linux" else 0


def settle_allocator() -> None:
    """Have the C library's allocator hold little more than what is in use. For the process; without effect in other libraries.

    On a processor that computes in a device's place the activations come from it. By itself it gives every thread a heap of its
    own and learns to keep ever larger blocks in it, until the holes are as large as what is in use.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, RETAINED_BYTES), (_ARENA_MAX, 1)):
            library.mallopt(option, value)


def give_back_freed() -> None:
    """Return what was freed to the system: after work that is done once, such as drawing random weights."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def touch(slabs: Iterable[torch.Tensor], n_threads: int) -> None:
    """Fault every page of fresh slabs in, with several threads.

    PlanError where they are more than the process's control group may ever have: the system would kill it on the way.
    """
    slabs, page_bytes = list(slabs), mmap.PAGESIZE
    n_bytes, most_bytes = sum(slab.numel() for slab in slabs), group_limit_bytes()
    if most_bytes is not None and n_bytes > most_bytes:
        raise PlanError(
            f"{show_bytes(n_bytes)} of host memory cannot be had: this process's control group allows {show_bytes(most_bytes)}; "
            "allow it more, or plan for less with --host-memory"
        )
    parts = [slab[at : at + TOUCH_BYTES] for slab in slabs for at in range(0, slab.numel(), TOUCH_BYTES)]
    if not parts:
        return

    def task(part: torch.Tensor) -> Callable[[None], object]:
        return lambda _: part[::page_bytes].zero_()

    workers = Workers[None](n_threads, lambda: None)
    with workers.helped():
        workers.run([task(part) for part in parts])


def group_limit_bytes(path: Path = GROUP_LIMIT) -> int | None:
    """The most memory that the process's control group may have; None where it has no limit, or the system does not say."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or `max`
        return None


# -- memory nodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """On which memory nodes slabs lie: near to one, or on all in turn where one is too small."""

    nodes: tuple[int, ...]
    interleaved: bool


def placement(n_bytes: int, cores: Iterable[int], folder: Path = NODES) -> Placement | None:
    """For `n_bytes` that these cores use; None where there is one node, or the system does not say."""
    free_bytes: dict[int, int] = {}
    near: dict[int, int] = {}
    for place in folder.glob("node[0-9]*"):
        node = int(place.name.removeprefix("node"))
        try:
            lines = (place / "meminfo").read_text().splitlines()
            free_bytes[node] = next(int(line.split()[-2]) * KiB for line in lines if "MemFree:" in line)
            near[node] = len(_listed(place / "cpulist") & set(cores))
        except (OSError, ValueError, StopIteration):
            continue
    if len(free_bytes) < 2:
        return None
    nearest = max(sorted(free_bytes), key=lambda node: near[node])
    if n_bytes <= free_bytes[nearest]:
        return Placement((nearest,), interleaved=False)
    return Placement(tuple(sorted(free_bytes)), interleaved=True)


def _listed(path: Path) -> set[int]:
    """`0-3,8` as numbers."""
    cores: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def place(slabs: Iterable[torch.Tensor], where: Placement, system_call: Callable[..., int] | None = None) -> bool:
    """Ask for the pages of slabs, not touched yet, on these nodes. False where the system refuses: they lie anywhere then."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    call = system_call or ctypes.CDLL(None, use_errno=True).syscall
    n_bits = 64 * (max(where.nodes) // 64 + 1)
    mask = (ctypes.c_uint64 * (n_bits // 64))()
    for node in where.nodes:
        mask[node // 64] |= 1 << node % 64
    policy = _INTERLEAVE if where.interleaved else _PREFER
    done = []
    for slab in slabs:
        if slab.numel() >= HUGE_PAGE_BYTES:
            address, n_bytes = ctypes.c_void_p(slab.data_ptr()), ctypes.c_ulong(_paged(slab))
            done.append(call(number, address, n_bytes, policy, mask, ctypes.c_ulong(n_bits + 1), 0))
    return all(result == 0 for result in done)


def _paged(slab: torch.Tensor) -> int:
    return -(-slab.numel() // mmap.PAGESIZE) * mmap.PAGESIZE


def huge_bytes(slabs: Iterable[torch.Tensor], maps: Path = Path("/proc/self/smaps")) -> int:
    """How much of the slabs lies in huge pages; 0 where the system does not say."""
    ranges = [(slab.data_ptr(), slab.data_ptr() + slab.numel()) for slab in slabs if slab.numel() >= HUGE_PAGE_BYTES]
    total, is_ours = 0, False
    try:
        with maps.open(encoding="utf-8") as lines:
            for line in lines:
                first, _, rest = line.partition(" ")
                if not first.endswith(":"):
                    start, end = (int(number, 16) for number in first.split("-"))
                    is_ours = any(start < last and begin < end for begin, last in ranges)
                elif is_ours and first == "AnonHugePages:":
                    total += int(rest.split()[0]) * KiB
    except (OSError, ValueError):
        return 0
    return total


# -- registration for DMA -------------------------------------------------------------------------------------------


def register_for_dma(
    slabs: Mapping[str, torch.Tensor],
    cudart: Any = None,
    n_threads: int = 1,
    settled: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[tuple[int, int]]:
    """Lock host slabs, by name, in memory, so that a CUDA device reads and writes them itself, and copies do not block.

    Several threads do, each a piece at a time and `settled` for it, as a call locks a few GB a second. Returns (address, bytes) of
    each registered piece, for `unregister`: a slab, or pieces of one that no driver takes whole. PlanError when memory may not be
    locked; nothing is registered then.
    """
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    pieces = [(name, at) for name, slab in slabs.items() for at in range(0, slab.numel(), REGISTER_BYTES)]
    done: list[tuple[int, int]] = []

    def task(name: str, at: int) -> Callable[[None], object]:
        address, n_bytes = slabs[name].data_ptr() + at, min(REGISTER_BYTES, slabs[name].numel() - at)

        def register(_: None) -> None:
            if error := int(cudart.cudaHostRegister(address, n_bytes, 0)):
                raise _refused(name, slabs, error)
            done.append((address, n_bytes))

        return register

    if not pieces:
        return done
    workers = Workers[None](max(1, min(n_threads, MOST_LOCKING_THREADS, len(pieces))), lambda: None)
    try:
        with settled(), workers.helped(settled):
            workers.run([task(name, at) for name, at in pieces])
    except BaseException:
        unregister(done, cudart)
        raise
    return done


def _refused(name: str, slabs: Mapping[str, torch.Tensor], error: int) -> PlanError:
    total = sum(each.numel() for each in slabs.values())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else show_bytes(limit)
    return PlanError(
        f"arena {name}: {show_bytes(slabs[name].numel())} of {show_bytes(total)} cannot be locked in memory for the device "
        f"(CUDA error {error}); the limit of locked memory (memlock, `ulimit -l`) is {allowed}: raise it, or free memory"
    )


def unregister(pieces: Iterable[tuple[int, int]], cudart: Any = None) -> None:
    """Give registered pieces back. What the driver says to it no longer matters."""
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    for address, _ in pieces:
        cudart.cudaHostUnregister(address)
