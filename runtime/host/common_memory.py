"""How do the processes of a host read each other's memory?

Each has a slab that the others map too. It is no file that could outlive its processes, and is limited by memory alone, not by
what is mounted for shared memory: the others find it by the process that has it. Only by the name that it bears do they know it:
where processes are on several hosts, or count them apart, another process may have the same number, and even be the one that asks.
"""

import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shared:
    """Where another process finds a slab."""

    process: int
    descriptor: int
    n_bytes: int
    name: str  # which no other slab has, on any host


@dataclass(frozen=True, slots=True)
class CommonMemory:
    """What the ranks of a host read of each other, one slab of each."""

    uploaded: list[torch.Tensor]  # what each uploads of its state
    exchanged: list[torch.Tensor]  # what each has for the others of a sum that they exchange

    def of_others(self, rank: int) -> list[torch.Tensor]:
        """From which this one copies; and its own, to which it copies what is exchanged."""
        return [slab for i, slab in enumerate(self.uploaded) if i != rank] + self.exchanged


def shared_slab(n_bytes: int) -> tuple[Shared, torch.Tensor]:
    """So many bytes, zero, that others may map until it is `closed`; MemoryError where the system refuses so many, OSError where it
    has no such slabs."""
    name = f"penstock-{secrets.token_hex(16)}"
    try:
        descriptor = os.memfd_create(name)
    except AttributeError:
        raise OSError("no such slabs on this system") from None
    shared = Shared(os.getpid(), descriptor, n_bytes, name)
    try:
        os.ftruncate(descriptor, n_bytes)
        return shared, _mapped(descriptor, n_bytes)
    except (OSError, OverflowError, ValueError) as error:
        closed(shared)
        raise MemoryError(getattr(error, "strerror", None) or str(error)) from None


def closed(mine: Shared) -> None:
    """All that are to map this process's slab have: it goes with the last of its mappings."""
    with suppress(OSError):  # it is nobody's, and was never open
        os.close(mine.descriptor)


def nobodys(n_bytes: int) -> Shared:
    """What is said of a slab that others cannot map."""
    return Shared(os.getpid(), -1, n_bytes, "nobody's")


def slab_of(other: Shared) -> torch.Tensor:
    """Another process's slab, to be read; OSError where it cannot be had."""
    descriptor = os.open(f"/proc/{other.process}/fd/{other.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if other.name not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError("another process's")
        return _mapped(descriptor, other.n_bytes)
    finally:
        os.close(descriptor)  # the mapping keeps it


def _mapped(descriptor: int, n_bytes: int) -> torch.Tensor:
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    if os.fstat(descriptor).st_size < n_bytes:
        raise OSError(f"holds fewer than {n_bytes} bytes")  # reading beyond its end would end the process
    pages = mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without it
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8, count=n_bytes)
