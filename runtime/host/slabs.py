"""Slabs of host memory, mapped directly from the system and locked for DMA.

A slab has the requested size, rounded up to pages. An allocator would round up further, return memory to the system and fault it in
again. Huge pages are requested but not required. A page is on the NUMA node of the thread that touches it first.
"""

import ctypes
import mmap
import os
import platform
import resource
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.runtime.errors import PlanError
from penstock.runtime.ranks import Shared
from penstock.runtime.units import GiB, KiB, MiB, show_bytes

from .workers import Context, together

TOUCH_BYTES = 64 * MiB  # of one task that faults in pages
# Slots of an arena share slabs of about this size, so that several threads lock an arena at once, and no call locks 2**39 bytes,
# which drivers since 580 reject
SLAB_BYTES = 4 * GiB
MOST_LOCKING_THREADS = 8  # more wait for locks in the driver
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of the C library's `mallopt`
LARGE_BYTES = 8 * MiB  # larger allocations return to the system when they are freed
RETAINED_BYTES = 2**30  # of freed memory at the end of the heap, which the next op would fault in again
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0  # MAP_NORESERVE
CGROUP = Path("/sys/fs/cgroup")


def host_slab(n_bytes: int) -> torch.Tensor:
    """Map a slab of zeros; MemoryError if the system rejects it. Pages are allocated on first access, or by `touch`.

    Nothing is reserved, because systems reject reservations above their present memory and swap, which may grow. Child processes do
    not inherit it: copy-on-write would make the parent's next write a page fault, and move pages that a device reads. No two slabs
    share a page, because a driver locks whole pages, each once.
    """
    try:
        return mapped(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None


def mapped(descriptor: int, n_bytes: int, flags: int) -> torch.Tensor:
    """Map a file, or anonymous memory for descriptor -1; unmapped with the tensor."""
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(descriptor, n_bytes, flags=flags)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without it
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8, count=n_bytes)


def touch(slabs: Iterable[torch.Tensor], n_threads: int) -> None:
    """Fault in every page of fresh slabs, by several threads."""
    together([partial(_touch, part) for slab in slabs if slab.numel() for part in slab.split(TOUCH_BYTES)], n_threads)


def _touch(part: torch.Tensor, _: None) -> None:
    part[:: mmap.PAGESIZE].zero_()


def available_host_bytes() -> int | None:
    """Bytes that a process can still allocate on the machine and in its container; None if the system does not report them."""
    limits: list[int | None] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * KiB for line in lines if line.startswith("MemAvailable:")))
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    limits += [limit - used] if limit is not None and used is not None else []
    return min((n_bytes for n_bytes in limits if n_bytes is not None), default=None)


def _number(path: Path) -> int | None:
    """Number in a file; None if the file is missing or contains `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# -- the C library's allocator ----------------------------------------------------------------------------------------


def settle_allocator() -> None:
    """Make glibc's allocator return freed memory, for the whole process; no effect with other C libraries.

    A CPU in place of a device takes activations from it. By default it gives every thread a heap and raises its thresholds until
    the holes are as large as the memory in use.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, RETAINED_BYTES), (_ARENA_MAX, 1)):
            library.mallopt(option, value)


def give_back_freed() -> None:
    """Return freed memory to the system, after one-time work such as sampling random weights."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


# -- registration for DMA ---------------------------------------------------------------------------------------------


def register_for_dma(
    slabs: Mapping[str, torch.Tensor], cudart: Any = None, n_threads: int = 1, settled: Context = nullcontext
) -> list[int]:
    """Lock host slabs, by name, in memory, so that copies to and from a CUDA device neither block nor use a staging buffer.

    Use several threads in the context `settled`, because one call locks a few GB per second. Return the addresses, for
    `unregister`. PlanError if memory cannot be locked; then nothing remains registered.
    """
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    addresses: list[int] = []

    def register(name: str, _: None) -> None:
        slab = slabs[name]
        if error := int(cudart.cudaHostRegister(slab.data_ptr(), slab.numel(), 0)):
            raise _locking_error(name, slabs, error)
        addresses.append(slab.data_ptr())

    try:
        tasks = [partial(register, name) for name, slab in slabs.items() if slab.numel()]
        together(tasks, min(n_threads, MOST_LOCKING_THREADS), settled)
    except BaseException:
        unregister(addresses, cudart)
        raise
    return addresses


def _locking_error(name: str, slabs: Mapping[str, torch.Tensor], error: int) -> PlanError:
    total = sum(slab.numel() for slab in slabs.values())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else show_bytes(limit)
    return PlanError(
        f"arena {name}: {show_bytes(slabs[name].numel())} of {show_bytes(total)} cannot be locked in memory for the device "
        f"(CUDA error {error}); the limit of locked memory (memlock, `ulimit -l`) is {allowed}: raise it, or free memory"
    )


def unregister(addresses: Iterable[int], cudart: Any = None) -> None:
    """Unlock registered slabs, ignoring errors."""
    cudart = cudart if cudart is not None else torch.cuda.cudart()
    for address in addresses:
        cudart.cudaHostUnregister(address)


# -- memory of several ranks -------------------------------------------------------------------------------------------
#
# Each rank of a host maps slabs of the others. A memfd is limited by memory alone and cannot outlive its processes. Ranks open it
# by its owner's process id, and compare its random name, because processes of other hosts or namespaces may have the same id.


@dataclass(frozen=True, slots=True)
class CommonMemory:
    """Slabs that the ranks of a host read of each other, one per rank."""

    uploaded: list[torch.Tensor]  # weights of each rank's shard
    exchanged: list[torch.Tensor]  # partial sums of gradients for the other ranks

    def of_others(self, rank: int) -> list[torch.Tensor]:
        """Slabs that a rank's copies access: `uploaded` of other ranks, and all of `exchanged`."""
        return [slab for i, slab in enumerate(self.uploaded) if i != rank] + self.exchanged


def shared_slab(n_bytes: int) -> tuple[Shared, torch.Tensor]:
    """Allocate a slab of zeros that others may map until it is closed; MemoryError if the system rejects it."""
    name = f"penstock-{secrets.token_hex(16)}"
    try:
        shared = Shared(os.getpid(), os.memfd_create(name), n_bytes, name)
    except OSError as error:
        raise MemoryError(f"no shared memory: {error.strerror}") from None
    try:
        os.ftruncate(shared.descriptor, n_bytes)
        return shared, mapped(shared.descriptor, n_bytes, mmap.MAP_SHARED)
    except (OSError, OverflowError, ValueError) as error:
        shared.close()
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None


def slab_of(shared: Shared) -> torch.Tensor:
    """Map another process's slab, to read it; OSError if it is not available."""
    descriptor = os.open(f"/proc/{shared.process}/fd/{shared.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if shared.name not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError("it belongs to another process")
        if os.fstat(descriptor).st_size < shared.n_bytes:
            raise OSError(f"it has fewer than {shared.n_bytes} bytes")  # reading beyond its end would end the process
        return mapped(descriptor, shared.n_bytes, mmap.MAP_SHARED)
    finally:
        with suppress(OSError):
            os.close(descriptor)  # the mapping keeps the memory
