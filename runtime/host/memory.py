"""Arenas: a plan's memory, allocated once as slabs of exactly the bytes that the plan says; tensors are views of a slot."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod

import torch

from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Arena, Place, Slot

from . import slabs
from .slabs import available_host_bytes as available_host_bytes

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int16": torch.int16, "byte": torch.int8}
DTYPE |= {"int8": torch.uint8}  # groups of codes and scales
ON_DISK = "on_disk"  # frozen weights in a file, a slot for each block, besides the arenas
FRONTS, BASE = "fronts", "base"  # slabs of what is apart from the rest of its slot: uploaded of what is trained; frozen
Make = Callable[[int], torch.Tensor]  # a slab, given its bytes


class Arenas:
    """The slabs of some arenas, and views into their slots."""

    def __init__(
        self,
        arenas: Iterable[Arena],
        device: torch.device,
        apart: Mapping[str, tuple[Mapping[Slot, int], Make]] | None = None,
    ) -> None:
        """Allocate every slab, zero-filled. PlanError when the machine has not that much memory.

        `apart`: of slots of the host, bytes from their beginning on that lie apart, where no view reaches across, by the name of
        their slabs; the fronts in one.
        """
        self.slabs: dict[str, torch.Tensor] = {}  # bytes, by name: its arena's, with a number from the second on
        self._arena_of: dict[str, Arena] = {}  # by slab
        self._pieces: dict[Slot, list[torch.Tensor]] = {}  # bytes of each slot, in order: one, or several where some are apart
        for arena in arenas:
            on_host = arena.place is Place.HOST or device.type == "cpu"
            make: Make = slabs.host_slab if on_host else partial(torch.zeros, dtype=torch.uint8, device=device)
            left = {Slot(arena.name, i): n for i, n in enumerate(arena.slot_bytes)}
            parts = list[tuple[str, dict[Slot, int], Make]]()
            for name, (sizes, make_it) in (apart or {}).items():
                of_arena = {slot: n for slot, n in sizes.items() if slot.arena == arena.name}
                left |= {slot: left[slot] - n for slot, n in of_arena.items()}
                parts += [(name, of_arena, make_it)] if of_arena else []
            for name, sizes, make_it in ((arena.name, left, make), *reversed(parts)):
                in_one = arena.place is Place.DEVICE or name == FRONTS
                for number, slots in enumerate([sizes] if in_one else _slots_of_slabs(sizes)):
                    self._allocate(arena, f"{name}.{number}" if number else name, slots, make_it)

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

    def lend(self, slot: Slot, its_bytes: torch.Tensor) -> None:
        """Memory of no arena, as a slot: views reach it, and nothing else."""
        self._pieces[slot] = [its_bytes]

    def touch(self, n_threads: int) -> None:
        """Fault in all host memory that is fresh, and this process's own: no step shall wait for the system to find pages."""
        own = [slab for name, slab in self.slabs.items() if slab.device.type == "cpu" and name.partition(".")[0] != BASE]
        slabs.touch(own, n_threads)

    def base_bytes(self) -> int:
        """Of frozen weights that the ranks of a host share."""
        return sum(slab.numel() for name, slab in self.slabs.items() if name.partition(".")[0] == BASE)

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
        while rest and offset_elements * item >= piece.numel():
            offset_elements -= piece.numel() // item
            piece, *rest = rest
        if shape is None:
            shape = (piece.numel() // item - offset_elements,)
        at, end = offset_elements * item, (offset_elements + prod(shape)) * item
        assert end <= piece.numel(), f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        return piece.data[at:end].view(DTYPE[dtype]).view(shape)

    def pieces(self, slot: Slot) -> list[torch.Tensor]:
        """The bytes of a slot: in one piece, or in several where some are apart."""
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
        front, n_bytes = self._pieces[slot][0], n_elements * DTYPE[dtype].itemsize
        assert n_bytes <= front.numel()
        return slab[front.storage_offset() :][:n_bytes].view(DTYPE[dtype])


def _slots_of_slabs(sizes: Mapping[Slot, int]) -> list[dict[Slot, int]]:
    """The slots of each of as many slabs on the host as threads may lock at once, each of whole slots."""
    found: list[dict[Slot, int]] = [{}]
    for slot, n_bytes in sizes.items():
        if found[-1] and sum(found[-1].values()) + n_bytes > slabs.SLAB_BYTES:
            found.append({})
        found[-1][slot] = n_bytes
    return found
