"""Arenas: a plan's memory, allocated once as slabs of exactly the bytes that the plan says; tensors are views of a slot."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Slot

from . import slabs
from .slabs import available_host_bytes as available_host_bytes

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int16": torch.int16}
FRONTS = "fronts"  # the slab of what is apart from the rest of its slot


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
        fronts_slab: Callable[[int], torch.Tensor] = slabs.host_slab,
    ) -> None:
        """Allocate every slab, zero-filled. PlanError when the machine has not that much memory.

        `fronts`: of slots of the host, the bytes at their beginning that are apart, in a slab of all such that `fronts_slab` makes.
        No view reaches across.
        """
        fronts = fronts or {}
        self.slabs: dict[str, torch.Tensor] = {}  # bytes, by name: its arena's, with a number from the second on
        self._arena_of: dict[str, Arena] = {}  # by slab
        self._regions: dict[Slot, _Region] = {}
        self._fronts: dict[Slot, _Region] = {}
        for arena in arenas:
            on = device if arena.place is Place.DEVICE else torch.device("cpu")
            for number, indices in enumerate(_slots_of_slabs(arena)):
                slots = {Slot(arena.name, i): arena.slot_bytes[i] - fronts.get(Slot(arena.name, i), 0) for i in indices}
                self._regions |= self._allocated(arena, f"{arena.name}.{number}" if number else arena.name, slots, on)
            apart = {slot: n_bytes for slot, n_bytes in fronts.items() if slot.arena == arena.name}
            if apart:
                self._fronts = self._allocated(arena, FRONTS, apart, on, fronts_slab)

    def _allocated(
        self,
        arena: Arena,
        name: str,
        slots: Mapping[Slot, int],
        device: torch.device,
        make: Callable[[int], torch.Tensor] = slabs.host_slab,
    ) -> dict[Slot, _Region]:
        """A new slab of some bytes of each slot, one after another."""
        regions, at = dict[Slot, _Region](), 0
        for slot, n_bytes in slots.items():
            regions[slot] = _Region(name, at, n_bytes)
            at += n_bytes
        try:
            slab = make(at) if device.type == "cpu" else torch.zeros(at, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:  # the allocator's own out-of-memory error, or the system's
            reason = (str(error).splitlines() or ["no memory"])[0][:120]
            raise PlanError(f"arena {arena.name} of {arena.n_bytes} bytes cannot be allocated ({reason})") from None
        self.slabs[name], self._arena_of[name] = slab, arena
        return regions

    # -- slabs ----------------------------------------------------------------------------------------------------------

    def touch(self, n_threads: int) -> None:
        """Fault in all host memory, which is fresh: no step shall wait for the system to find pages."""
        slabs.touch([slab for slab in self.slabs.values() if slab.device.type == "cpu"], n_threads)

    def host_slabs(self) -> dict[str, torch.Tensor]:
        """The slabs of the host's arenas: what a device may be let to read and write by itself."""
        return {name: slab for name, slab in self.slabs.items() if self._arena_of[name].place is Place.HOST}

    @property
    def n_bytes(self) -> dict[str, int]:
        """Allocated bytes, by arena."""
        total = {arena.name: 0 for arena in self._arena_of.values()}
        for name, slab in self.slabs.items():
            total[self._arena_of[name].name] += slab.nbytes
        return total

    # -- slots ----------------------------------------------------------------------------------------------------------

    def view(self, slot: Slot, dtype: str, shape: tuple[int, ...] | None = None, offset_elements: int = 0) -> torch.Tensor:
        """A tensor over part of a slot: `shape` from `offset_elements` on, or flat over all of the slot.

        Each call makes a tensor with a version counter of its own, so writing one view never invalidates what autograd
        saved of another.
        """
        region, front, item = self._regions[slot], self._fronts.get(slot), DTYPE[dtype].itemsize
        if front is not None:
            if offset_elements * item < front.n_bytes:
                region = front
            else:
                offset_elements -= front.n_bytes // item
        if shape is None:
            shape = (region.n_bytes // item - offset_elements,)
        at, end = offset_elements * item, (offset_elements + prod(shape)) * item
        assert end <= region.n_bytes, f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        return self._bytes(region, at, end).view(DTYPE[dtype]).view(shape)

    def _bytes(self, region: _Region, at: int, end: int) -> torch.Tensor:
        return self.slabs[region.slab].data[region.offset_bytes + at : region.offset_bytes + end]

    def pieces(self, slot: Slot) -> list[torch.Tensor]:
        """The bytes of a slot: in one piece, or in two where its front is apart."""
        return [
            self._bytes(region, 0, region.n_bytes) for region in (self._fronts.get(slot), self._regions[slot]) if region is not None
        ]

    def raw(self, slot: Slot) -> torch.Tensor:
        """The bytes of a slot that is in one piece."""
        (whole,) = self.pieces(slot)
        return whole

    def offset_in(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Byte offset of the tensor's first element in the slot, or None if it lives elsewhere."""
        region = self._regions[slot]
        slab = self.slabs[region.slab]
        if tensor.untyped_storage().data_ptr() != slab.data_ptr() or slab.nbytes == 0:
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
        """The first elements of what another process's slab of fronts has where this one's has the slot's."""
        front, item = self._fronts[slot], DTYPE[dtype].itemsize
        assert n_elements * item <= front.n_bytes
        return slab[front.offset_bytes : front.offset_bytes + n_elements * item].view(DTYPE[dtype])


def _slots_of_slabs(arena: Arena) -> list[list[int]]:
    """The slots of each of an arena's slabs: one slab, or on the host as many as threads may lock at once, each of whole slots."""
    found: list[list[int]] = [[]]
    n_bytes = 0
    for index, slot_bytes in enumerate(arena.slot_bytes):
        if found[-1] and arena.place is Place.HOST and n_bytes + slot_bytes > slabs.SLAB_BYTES:
            found.append([])
            n_bytes = 0
        found[-1].append(index)
        n_bytes += slot_bytes
    return found
