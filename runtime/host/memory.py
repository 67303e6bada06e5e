"""Arenas: a plan's memory, allocated once as slabs of exactly the bytes that the plan says; tensors are views of a slot."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod

import torch

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Slot

from . import slabs
from .slabs import available_host_bytes as available_host_bytes

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int16": torch.int16, "int8": torch.uint8}
FRONTS = "fronts"  # the slab of what is apart from the rest of its slot


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

        `fronts`: of slots of the host, the bytes at their beginning that lie apart, where no view reaches across, in one slab.
        """
        fronts = fronts or {}
        self.slabs: dict[str, torch.Tensor] = {}  # bytes, by name: its arena's, with a number from the second on
        self._arena_of: dict[str, Arena] = {}  # by slab
        self._pieces: dict[Slot, list[torch.Tensor]] = {}  # bytes of each slot, in order: one, or two where its front is apart
        for arena in arenas:
            on_host = arena.place is Place.HOST or device.type == "cpu"
            make = slabs.host_slab if on_host else partial(torch.zeros, dtype=torch.uint8, device=device)
            for number, indices in enumerate(_slots_of_slabs(arena)):
                slots = {Slot(arena.name, i): arena.slot_bytes[i] - fronts.get(Slot(arena.name, i), 0) for i in indices}
                self._allocate(arena, f"{arena.name}.{number}" if number else arena.name, slots, make)
            if apart := {slot: n_bytes for slot, n_bytes in fronts.items() if slot.arena == arena.name}:
                self._allocate(arena, FRONTS, apart, fronts_slab)

    def _allocate(self, arena: Arena, name: str, slots: Mapping[Slot, int], make: Callable[[int], torch.Tensor]) -> None:
        """A new slab of some bytes of each slot, one after another, which come before those that the slot has."""
        try:
            slab = make(sum(slots.values()))
        except (RuntimeError, MemoryError) as error:  # the allocator's own out-of-memory error, or the system's
            reason = (str(error).splitlines() or ["no memory"])[0][:120]
            raise PlanError(f"arena {arena.name} of {arena.n_bytes} bytes cannot be allocated ({reason})") from None
        self.slabs[name], self._arena_of[name] = slab, arena
        for slot, piece in zip(slots, slab.split(list(slots.values())), strict=True):
            self._pieces.setdefault(slot, []).insert(0, piece)

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

    def view(self, slot: Slot, dtype: str, shape: tuple[int, ...] | None = None, offset_elements: int = 0) -> torch.Tensor:
        """A tensor over part of a slot: `shape` from `offset_elements` on, or flat over all of the slot.

        Each call's tensor has a version counter of its own: writing one view never invalidates what autograd saved of another.
        """
        (piece, *rest), item = self._pieces[slot], DTYPE[dtype].itemsize
        if rest and offset_elements * item >= piece.numel():
            offset_elements -= piece.numel() // item
            (piece,) = rest
        if shape is None:
            shape = (piece.numel() // item - offset_elements,)
        at, end = offset_elements * item, (offset_elements + prod(shape)) * item
        assert end <= piece.numel(), f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        return piece.data[at:end].view(DTYPE[dtype]).view(shape)

    def pieces(self, slot: Slot) -> list[torch.Tensor]:
        """The bytes of a slot: in one piece, or in two where its front is apart."""
        return [piece.data for piece in self._pieces[slot]]

    def raw(self, slot: Slot) -> torch.Tensor:
        """The bytes of a slot that is in one piece."""
        (whole,) = self.pieces(slot)
        return whole

    def offset_in(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Byte offset of the tensor's first element in the slot, which is in one piece, or None if it lives elsewhere."""
        (whole,) = self._pieces[slot]
        if tensor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return None
        at = int(tensor.storage_offset()) * tensor.element_size() - int(whole.storage_offset())
        return at if 0 <= at < whole.numel() else None

    def exchange(self, a: Slot, b: Slot) -> None:
        """From now on each of the two is where the other was. Nothing is copied."""
        of_a, of_b = self._pieces[a], self._pieces[b]
        assert [*map(len, of_a)] == [*map(len, of_b)], f"{a} and {b} are of different sizes"
        self._pieces[a], self._pieces[b] = of_b, of_a

    def front_in(self, slab: torch.Tensor, slot: Slot, dtype: str, n_elements: int) -> torch.Tensor:
        """The first elements of what another process's slab of fronts has where this one's has the slot's."""
        (front, _), n_bytes = self._pieces[slot], n_elements * DTYPE[dtype].itemsize
        assert n_bytes <= front.numel()
        return slab[front.storage_offset() :][:n_bytes].view(DTYPE[dtype])


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
