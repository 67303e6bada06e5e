"""Where do tensors live?

Arenas are allocated once, each as one slab of exactly the bytes the plan says, or a few. Tensors are made on the fly as views of a
slot.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Slot
from runtime.units import show_bytes

from . import slabs as host_memory

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int16": torch.int16}
FRONTS = "fronts"  # the slab of what lies apart from the rest of its slot
SLAB_ALIGN_BYTES = {"cpu": 64, "cuda": 256}  # results of matrix products depend on alignment below 16 bytes


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes of a slab."""

    slab: str
    offset_bytes: int
    n_bytes: int


class Arenas:
    """The slabs of some arenas, and views into their slots."""

    def __init__(
        self,
        arenas: Iterable[Arena],
        device: torch.device,
        fronts: Mapping[Slot, int] | None = None,
        fronts_slab: Callable[[int], torch.Tensor] = host_memory.host_slab,
    ) -> None:
        """Allocate every slab, zero-filled. PlanError when the machine has not that much memory.

        `fronts`: of slots of the host, so many bytes at their beginning lie by themselves, in a slab of all that `fronts_slab`
        makes. No view reaches across.
        """
        arenas, fronts = list(arenas), fronts or {}
        self._fronts: dict[Slot, _Region] = {}
        self._slabs: dict[str, torch.UntypedStorage] = {}
        self._regions: dict[Slot, _Region] = {}
        self._in_host_memory: dict[str, torch.Tensor] = {}  # by slab: the device's too, if that is the processor
        self._places: dict[str, Place] = {}
        self._arena_of: dict[str, str] = {}  # by slab
        for arena in arenas:
            for number, slots in enumerate(_slabs_of(arena)):
                name, at = f"{arena.name}.{number}" if number else arena.name, 0
                for index in slots:
                    slot, n_bytes = Slot(arena.name, index), arena.slot_bytes[index]
                    self._regions[slot] = _Region(name, at, n_bytes - fronts.get(slot, 0))
                    at += self._regions[slot].n_bytes
                slab = self._slab(arena, name, at, device if arena.place is Place.DEVICE else torch.device("cpu"))
                assert at == 0 or slab.data_ptr() % SLAB_ALIGN_BYTES.get(slab.device.type, 64) == 0
                self._slabs[name], self._places[name], self._arena_of[name] = slab.untyped_storage(), arena.place, arena.name
        at = 0
        for slot, n_bytes in fronts.items():
            self._fronts[slot] = _Region(FRONTS, at, n_bytes)
            at += n_bytes
        if fronts:
            of = next(arena for arena in arenas if arena.name == next(iter(fronts)).arena)
            slab = self._slab(of, FRONTS, at, torch.device("cpu"), fronts_slab)
            self._slabs[FRONTS], self._places[FRONTS], self._arena_of[FRONTS] = slab.untyped_storage(), of.place, of.name
        where = host_memory.placement(sum(slab.numel() for slab in self._in_host_memory.values()), os.sched_getaffinity(0))
        self.placement = where if where is not None and host_memory.place(self._in_host_memory.values(), where) else None

    def _slab(
        self,
        arena: Arena,
        name: str,
        n_bytes: int,
        device: torch.device,
        make: Callable[[int], torch.Tensor] = host_memory.host_slab,
    ) -> torch.Tensor:
        try:
            if device.type != "cpu":
                return torch.zeros(n_bytes, dtype=torch.uint8, device=device)
            slab = self._in_host_memory[name] = make(n_bytes)
        except (RuntimeError, MemoryError) as error:  # the allocator's own out-of-memory error, or the system's
            reason = (str(error).splitlines() or ["no memory"])[0][:120]
            raise PlanError(f"arena {arena.name} of {arena.n_bytes} bytes cannot be allocated ({reason})") from None
        return slab

    def touch(self, n_threads: int) -> None:
        """Fault in all host memory, to which nobody has written yet: no step shall wait for the system to find pages."""
        host_memory.touch(self._in_host_memory.values(), n_threads)

    def host_slabs(self) -> dict[str, torch.Tensor]:
        """The slabs of the host's arenas: what a device may be let to read and write by itself."""
        return {name: slab for name, slab in self._in_host_memory.items() if self._places[name] is Place.HOST}

    @property
    def addresses(self) -> dict[str, int]:
        """Where each slab begins, by its name: its arena's, with a number from the second on."""
        return {name: slab.data_ptr() for name, slab in self._slabs.items()}

    def host_words(self) -> str:
        """What kind of host memory was had, in a few words."""
        slabs = self._in_host_memory.values()
        n_bytes = sum(slab.numel() for slab in slabs)
        huge = host_memory.huge_bytes(slabs)
        nodes = ""
        if self.placement is not None:
            named = " and ".join(map(str, self.placement.nodes))
            nodes = f", in turn on memory nodes {named}" if self.placement.interleaved else f", on memory node {named}"
        return f"{show_bytes(n_bytes)} in {len(slabs)} slabs, {huge / max(n_bytes, 1):.0%} of it in huge pages{nodes}"

    @property
    def n_bytes(self) -> dict[str, int]:
        """Allocated bytes, by arena."""
        total: dict[str, int] = dict.fromkeys(self._arena_of.values(), 0)
        for name, slab in self._slabs.items():
            total[self._arena_of[name]] += slab.nbytes()
        return total

    def view(self, slot: Slot, dtype: str, shape: tuple[int, ...] | None = None, offset_elements: int = 0) -> torch.Tensor:
        """A tensor over part of a slot: `shape` from `offset_elements` on, or flat over all of the slot.

        Each call makes a tensor with a version counter of its own, so writing one view never invalidates what autograd
        saved of another.
        """
        region, front = self._regions[slot], self._fronts.get(slot)
        torch_dtype = DTYPE[dtype]
        item = torch_dtype.itemsize
        if front is not None:
            if offset_elements * item < front.n_bytes:
                region = front
            else:
                offset_elements -= front.n_bytes // item
        if shape is None:
            shape = (region.n_bytes // item - offset_elements,)
        n_elements = 1
        for dim in shape:
            n_elements *= dim
        assert (offset_elements + n_elements) * item <= region.n_bytes, f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        slab = self._slabs[region.slab]
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(shape[i + 1], 1)
        view = torch.empty(0, dtype=torch_dtype, device=slab.device)
        return view.set_(slab, region.offset_bytes // item + offset_elements, shape, strides)

    def offset_in(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Byte offset of the tensor's first element in the slot, or None if it lives elsewhere."""
        region = self._regions[slot]
        slab = self._slabs[region.slab]
        if tensor.untyped_storage().data_ptr() != slab.data_ptr() or slab.nbytes() == 0:
            return None
        at = int(tensor.storage_offset()) * tensor.element_size() - region.offset_bytes
        return at if 0 <= at < region.n_bytes else None

    def exchange(self, a: Slot, b: Slot) -> None:
        """From now on each of the two is where the other was. Nothing is copied."""
        assert self._regions[a].n_bytes == self._regions[b].n_bytes, f"{a} and {b} are of different sizes"
        for regions in (self._regions, self._fronts):
            if a in regions:
                regions[a], regions[b] = regions[b], regions[a]

    def front_in(self, slab: torch.Tensor, slot: Slot, dtype: str, n_elements: int) -> torch.Tensor:
        """The first elements of what lies in another process's slab of fronts where this one's slot has its own."""
        front, item = self._fronts[slot], DTYPE[dtype].itemsize
        assert n_elements * item <= front.n_bytes
        return slab[front.offset_bytes : front.offset_bytes + n_elements * item].view(DTYPE[dtype])

    def poison(self, slot: Slot) -> None:
        """Fill the slot with 0xFF bytes, which are NaN in every float dtype: whoever reads it too late is seen."""
        for region in (self._regions[slot], self._fronts.get(slot)):
            if region is not None:
                self._raw(region).fill_(0xFF)

    def raw(self, slot: Slot) -> torch.Tensor:
        """The bytes of a slot that lies in one piece."""
        assert slot not in self._fronts
        return self._raw(self._regions[slot])

    def _raw(self, region: _Region) -> torch.Tensor:
        slab = self._slabs[region.slab]
        view = torch.empty(0, dtype=torch.uint8, device=slab.device)
        return view.set_(slab, region.offset_bytes, (region.n_bytes,), (1,))


def _slabs_of(arena: Arena) -> list[list[int]]:
    """The slots of each of an arena's slabs: one slab, or on the host as many as threads may lock at once, each of whole slots."""
    slabs: list[list[int]] = [[]]
    n_bytes = 0
    for index, slot_bytes in enumerate(arena.slot_bytes):
        if slabs[-1] and arena.place is Place.HOST and n_bytes + slot_bytes > host_memory.SLAB_BYTES:
            slabs.append([])
            n_bytes = 0
        slabs[-1].append(index)
        n_bytes += slot_bytes
    return slabs


def register_for_dma(
    arenas: Arenas,
    cudart: Any = None,
    n_threads: int = 1,
    settled: Callable[[], AbstractContextManager[object]] = nullcontext,
    others: Sequence[torch.Tensor] = (),
) -> list[tuple[int, int]]:
    """Lock the host's arenas in memory, so that copies to and from a CUDA device neither block nor pass through a buffer; and what
    `others` have, from which it copies, too.

    (address, bytes) of what was registered, for `slabs.unregister`; PlanError where so much may not be locked.
    """
    slabs = arenas.host_slabs() | {f"of another rank, {i}": slab for i, slab in enumerate(others)}
    return host_memory.register_for_dma(slabs, cudart, n_threads, settled)


def available_host_bytes() -> int | None:
    """What the operating system says a process can still take, container limits included; None where it does not say."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            found.append(int(limit) - used)
    except (OSError, ValueError):
        pass
    return min(found, default=None)
