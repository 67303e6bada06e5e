"""Slabs of host memory, straight from the system and locked for DMA: memory that stays where it is.

A slab is of exactly the size asked for, rounded up to pages: an allocator would round up further, and give memory back to the
system and fault it in again as it sees fit. Huge pages are asked for, and done without where the system has none. A page is on the
memory node (NUMA) of the thread that touches it first: those of a process that is kept to the cores of one node are there.
"""

import ctypes
import mmap
import os
import platform
import resource
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.runtime.errors import PlanError
from penstock.runtime.units import GiB, KiB, MiB, show_bytes

from .workers import together

TOUCH_BYTES = 64 * MiB  # what one thread faults in at a time
# Slots of an arena share slabs of about this size: small enough that several threads, each at a slab of its own, lock an arena at
# once; and no driver is asked for 2**39 bytes in one call, which those since 580 refuse
SLAB_BYTES = 4 * GiB
MOST_LOCKING_THREADS = 8  # beyond them a driver's own locks bind
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of the C library's `mallopt`
LARGE_BYTES = 8 * MiB  # what is freed from here on goes back to the system at once
RETAINED_BYTES = 2**30  # of freed memory at the heap's end, which would be faulted in again by the next op
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0  # MAP_NORESERVE
CGROUP = Path("/sys/fs/cgroup")


def host_slab(n_bytes: int) -> torch.Tensor:
    """A slab of zeros; MemoryError where the system refuses. Pages come when they are touched, or with `touch`.

    Nothing is reserved: a system refuses to reserve more than its memory and swap are now, which may grow as they are touched. A
    child process does not get it: its copy would make the parent's next write a page fault, and move pages that a device reads. No
    two slabs share a page: a driver locks whole pages, and none twice.
    """
    try:
        return mapped(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None


def mapped(descriptor: int, n_bytes: int, flags: int) -> torch.Tensor:
    """A mapping of a file, or with -1 of no file, that lives as long as the tensor."""
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(descriptor, n_bytes, flags=flags)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without it
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8, count=n_bytes)


def touch(slabs: Iterable[torch.Tensor], n_threads: int) -> None:
    """Fault every page of fresh slabs in, with several threads."""
    together([partial(_touch, part) for slab in slabs if slab.numel() for part in slab.split(TOUCH_BYTES)], n_threads)


def _touch(part: torch.Tensor, _: None) -> None:
    part[:: mmap.PAGESIZE].zero_()


def available_host_bytes() -> int | None:
    """What the operating system says a process can still take, container limits included; None where it does not say."""
    found: list[int | None] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * KiB for line in lines if line.startswith("MemAvailable:")))
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    found += [limit - used] if limit is not None and used is not None else []
    return min((n_bytes for n_bytes in found if n_bytes is not None), default=None)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or `max` in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# -- the C library's allocator ----------------------------------------------------------------------------------------


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


# -- registration for DMA ---------------------------------------------------------------------------------------------


def register_for_dma(
    slabs: Mapping[str, torch.Tensor],
    cudart: Any = None,
    n_threads: int = 1,
    settled: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[int]:
    """Lock host slabs, by name, in memory, so that copies to and from a CUDA device neither block nor pass through a buffer.

    Several threads do, each a slab at a time and `settled` for it, as a call locks a few GB a second. Returns the addresses, for
    `unregister`. PlanError when memory may not be locked; nothing is registered then.
    """
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    done: list[int] = []

    def register(name: str, _: None) -> None:
        slab = slabs[name]
        if error := int(cudart.cudaHostRegister(slab.data_ptr(), slab.numel(), 0)):
            raise _refused(name, slabs, error)
        done.append(slab.data_ptr())

    try:
        tasks = [partial(register, name) for name, slab in slabs.items() if slab.numel()]
        together(tasks, min(n_threads, MOST_LOCKING_THREADS), settled)
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


def unregister(addresses: Iterable[int], cudart: Any = None) -> None:
    """Give registered slabs back. What the driver answers no longer matters."""
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    for address in addresses:
        cudart.cudaHostUnregister(address)


# -- memory of several ranks -------------------------------------------------------------------------------------------
#
# Each rank of a host has a slab that the others map too. It is no file that could outlive its processes, and is limited by memory
# alone: the others find it by the process that has it, and know it by its name, as processes on several hosts, or counted apart,
# may have the same number.


@dataclass(frozen=True, slots=True)
class Shared:
    """Where other processes find a slab."""

    process: int
    descriptor: int
    n_bytes: int
    name: str  # which no other slab has, on any host

    def close(self) -> None:
        """All that are to map this process's slab have: it goes with the last of its mappings."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class CommonMemory:
    """What the ranks of a host read of each other, one slab of each."""

    uploaded: list[torch.Tensor]  # what each uploads of its state
    exchanged: list[torch.Tensor]  # what each has for the others of a sum that they exchange

    def of_others(self, rank: int) -> list[torch.Tensor]:
        """What this rank copies from; and its own, to which it copies what is exchanged."""
        return [slab for i, slab in enumerate(self.uploaded) if i != rank] + self.exchanged


def shared_slab(n_bytes: int) -> tuple[Shared, torch.Tensor]:
    """A slab of zeros that others may map until it is closed; MemoryError where the system refuses as much."""
    name = f"penstock-{secrets.token_hex(16)}"
    try:
        shared = Shared(os.getpid(), os.memfd_create(name), n_bytes, name)
    except OSError as error:
        raise MemoryError(f"no memory that processes share: {error.strerror}") from None
    try:
        os.ftruncate(shared.descriptor, n_bytes)
        return shared, mapped(shared.descriptor, n_bytes, mmap.MAP_SHARED)
    except (OSError, OverflowError, ValueError) as error:
        shared.close()
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None


def slab_of(other: Shared) -> torch.Tensor:
    """Another process's slab, to be read; OSError where it cannot be had."""
    descriptor = os.open(f"/proc/{other.process}/fd/{other.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if other.name not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError("another process's")
        if os.fstat(descriptor).st_size < other.n_bytes:
            raise OSError(f"holds fewer than {other.n_bytes} bytes")  # reading beyond its end would end the process
        return mapped(descriptor, other.n_bytes, mmap.MAP_SHARED)
    finally:
        with suppress(OSError):
            os.close(descriptor)  # the mapping keeps it
