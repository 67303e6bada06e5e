"""Arenas: memory of a plan, allocated once as slabs of exactly the planned size; tensors are views of slots."""

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
ON_DISK = "on_disk"  # arena of frozen weights in a file: one slot per block
FRONTS, BASE = "fronts", "base"  # separate slabs of the host: uploaded trained weights; frozen weights
Make = Callable[[int], torch.Tensor]  # allocate a slab of n bytes


class Arenas:
    """Slabs of some arenas, and views of their slots."""

    def __init__(
        self, arenas: Iterable[Arena], device: torch.device, separate: Mapping[str, tuple[Mapping[Slot, int], Make]] | None = None
    ) -> None:
        """Allocate all slabs, filled with zeros. PlanError if they do not fit into memory. `separate`: by name of another slab, the
        leading bytes of host slots that it holds and its allocator; no view crosses its border. FRONTS are one slab."""
        self.slabs: dict[str, torch.Tensor] = {}  # bytes; named after the arena, with a number from the second on
        self._arena_of: dict[str, Arena] = {}  # by slab
        self._pieces: dict[Slot, list[torch.Tensor]] = {}  # bytes of each slot, in order: several if some are in separate slabs
        for arena in arenas:
            on_host = arena.place is Place.HOST or device.type == "cpu"
            make: Make = slabs.host_slab if on_host else partial(torch.zeros, dtype=torch.uint8, device=device)
            remaining = {Slot(arena.name, i): n for i, n in enumerate(arena.slot_bytes)}
            parts = list[tuple[str, dict[Slot, int], Make]]()
            for name, (sizes, make_it) in (separate or {}).items():
                of_arena = {slot: n for slot, n in sizes.items() if slot.arena == arena.name}
                remaining |= {slot: remaining[slot] - n for slot, n in of_arena.items()}
                parts += [(name, of_arena, make_it)] if of_arena else []
            for name, sizes, make_it in ((arena.name, remaining, make), *reversed(parts)):
                in_one = arena.place is Place.DEVICE or name == FRONTS
                for number, slots in enumerate([sizes] if in_one else _slots_of_slabs(sizes)):
                    self._allocate(arena, f"{name}.{number}" if number else name, slots, make_it)

    def _allocate(self, arena: Arena, name: str, slots: Mapping[Slot, int], make: Callable[[int], torch.Tensor]) -> None:
        """Allocate a slab with n bytes of each slot, placed before the bytes that the slot already has."""
        try:
            slab = make(sum(slots.values()))
        except (RuntimeError, MemoryError) as error:  # of torch's allocator, or of the system
            reason = (str(error).splitlines() or ["no memory"])[0][:120]
            raise PlanError(f"arena {arena.name} of {arena.n_bytes} bytes cannot be allocated ({reason})") from None
        self.slabs[name], self._arena_of[name] = slab, arena
        for slot, piece in zip(slots, slab.split(list(slots.values())), strict=True):
            self._pieces.setdefault(slot, []).insert(0, piece)

    def lend(self, slot: Slot, its_bytes: torch.Tensor) -> None:
        """Let views of a slot access memory outside the arenas."""
        self._pieces[slot] = [its_bytes]

    def touch(self, n_threads: int) -> None:
        """Fault in all host memory that this process owns, so that no step waits for page faults."""
        owned = [slab for name, slab in self.slabs.items() if slab.device.type == "cpu" and name.partition(".")[0] != BASE]
        slabs.touch(owned, n_threads)

    def base_bytes(self) -> int:
        """Bytes of frozen weights that the ranks of a host share."""
        return sum(slab.numel() for name, slab in self.slabs.items() if name.partition(".")[0] == BASE)

    def host_slabs(self) -> dict[str, torch.Tensor]:
        """Slabs of the host's arenas, which a device may access by DMA."""
        return {name: slab for name, slab in self.slabs.items() if self._arena_of[name].place is Place.HOST}

    @property
    def n_bytes(self) -> dict[str, int]:
        total = {arena.name: 0 for arena in self._arena_of.values()}
        for name, slab in self.slabs.items():
            total[self._arena_of[name].name] += slab.nbytes
        return total

    def view(self, slot: Slot, dtype: str, shape: tuple[int, ...] | None = None, offset_elements: int = 0) -> torch.Tensor:
        """View part of a slot: `shape` from `offset_elements` on, or flat to the end. A view has its own version counter: writing
        it does not invalidate tensors that autograd saved from another view."""
        (piece, *rest), item = self._pieces[slot], DTYPE[dtype].itemsize
        while rest and offset_elements * item >= piece.numel():
            offset_elements -= piece.numel() // item
            piece, *rest = rest
        if shape is None:
            shape = (piece.numel() // item - offset_elements,)
        start, end = offset_elements * item, (offset_elements + prod(shape)) * item
        assert end <= piece.numel(), f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        return piece.data[start:end].view(DTYPE[dtype]).view(shape)

    def pieces(self, slot: Slot) -> list[torch.Tensor]:
        """Bytes of a slot: several tensors if some are in separate slabs."""
        return [piece.data for piece in self._pieces[slot]]

    def raw(self, slot: Slot) -> torch.Tensor:
        """Bytes of a slot that is in one piece."""
        (piece,) = self.pieces(slot)
        return piece

    def offset_in(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Byte offset of the tensor's first element in a slot of one piece, or None if it is elsewhere."""
        (piece,) = self._pieces[slot]
        if tensor.untyped_storage().data_ptr() != piece.untyped_storage().data_ptr():
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size() - int(piece.storage_offset())
        return offset if 0 <= offset < piece.numel() else None

    def exchange(self, a: Slot, b: Slot) -> None:
        """Swap the memory of two slots without a copy."""
        of_a, of_b = self._pieces[a], self._pieces[b]
        assert [*map(len, of_a)] == [*map(len, of_b)], f"{a} and {b} are of different sizes"
        self._pieces[a], self._pieces[b] = of_b, of_a

    def front_in(self, slab: torch.Tensor, slot: Slot, dtype: str, n_elements: int) -> torch.Tensor:
        """First elements of the slot in another rank's slab of FRONTS, at the offset that the slot has in this rank's."""
        front, n_bytes = self._pieces[slot][0], n_elements * DTYPE[dtype].itemsize
        assert n_bytes <= front.numel()
        return slab[front.storage_offset() :][:n_bytes].view(DTYPE[dtype])


def _slots_of_slabs(sizes: Mapping[Slot, int]) -> list[dict[Slot, int]]:
    """Split slots among slabs of about SLAB_BYTES, which threads can lock in parallel."""
    groups: list[dict[Slot, int]] = [{}]
    for slot, n_bytes in sizes.items():
        if groups[-1] and sum(groups[-1].values()) + n_bytes > slabs.SLAB_BYTES:
            groups.append({})
        groups[-1][slot] = n_bytes
    return groups
