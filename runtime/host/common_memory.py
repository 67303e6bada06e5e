"""Memory that the ranks of a host read of each other: each has a slab that the others map too.

It is no file that could outlive its processes, and is limited by memory alone, not by what is mounted for shared memory: the others
find it by the process that has it, and know it by its name alone. Where processes are on several hosts, or count them apart,
another process may have the same number, and even be the one that asks.
"""

import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

import torch

from .slabs import host_slab, mapped


@dataclass(frozen=True, slots=True)
class Shared:
    """Where other processes find a slab."""

    process: int
    descriptor: int
    n_bytes: int
    name: str  # which no other slab has, on any host

    def close(self) -> None:
        """All that are to map this process's slab have: it goes with the last of its mappings."""
        if self.descriptor >= 0:
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
    """A slab of zeros that others may map until it is closed; MemoryError where the system refuses as much. Where there are none to
    share, one that the others find they cannot map."""
    name = f"penstock-{secrets.token_hex(16)}"
    try:
        descriptor = os.memfd_create(name)
    except (AttributeError, OSError):
        return Shared(os.getpid(), -1, n_bytes, name), host_slab(n_bytes)
    shared = Shared(os.getpid(), descriptor, n_bytes, name)
    try:
        os.ftruncate(descriptor, n_bytes)
        return shared, mapped(descriptor, n_bytes, mmap.MAP_SHARED)
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
