"""Where do tensors live?

Arenas are allocated once, each as one slab of exactly the bytes the plan says. Tensors are made on the fly as views of a slot.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from .errors import PlanError
from .plan import Arena, Place, Slot

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int16": torch.int16}
SLAB_ALIGN_BYTES = 64  # results of matrix products depend on alignment below 16 bytes


class Arenas:
    """The slabs of some arenas, and views into their slots."""

    def __init__(self, arenas: Iterable[Arena], device: torch.device) -> None:
        """Allocate every slab, zero-filled. PlanError when the machine has not that much memory."""
        self._slabs: dict[str, torch.UntypedStorage] = {}
        self._offsets: dict[Slot, tuple[int, int]] = {}  # slot to (offset in slab, size), in bytes
        for arena in arenas:
            at = 0
            for index, n_bytes in enumerate(arena.slot_bytes):
                self._offsets[Slot(arena.name, index)] = (at, n_bytes)
                at += n_bytes
            try:
                slab = torch.zeros(at, dtype=torch.uint8, device=device if arena.place is Place.DEVICE else "cpu")
            except RuntimeError as error:  # the allocator's own out-of-memory error
                raise PlanError(
                    f"arena {arena.name} of {at} bytes cannot be allocated ({str(error).splitlines()[0][:120]})"
                ) from None
            assert at == 0 or slab.data_ptr() % SLAB_ALIGN_BYTES == 0
            self._slabs[arena.name] = slab.untyped_storage()

    @property
    def n_bytes(self) -> dict[str, int]:
        """Allocated bytes, by arena."""
        return {name: slab.nbytes() for name, slab in self._slabs.items()}

    def view(self, slot: Slot, dtype: str, shape: tuple[int, ...] | None = None, offset_elements: int = 0) -> torch.Tensor:
        """A tensor over part of a slot: `shape` from `offset_elements` on, or flat over all of the slot.

        Each call makes a tensor with a version counter of its own, so writing one view never invalidates what autograd
        saved of another.
        """
        offset_bytes, n_bytes = self._offsets[slot]
        torch_dtype = DTYPE[dtype]
        item = torch_dtype.itemsize
        if shape is None:
            shape = (n_bytes // item - offset_elements,)
        n_elements = 1
        for dim in shape:
            n_elements *= dim
        assert (offset_elements + n_elements) * item <= n_bytes, f"{shape} of {dtype} at {offset_elements} exceeds {slot}"
        slab = self._slabs[slot.arena]
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(shape[i + 1], 1)
        view = torch.empty(0, dtype=torch_dtype, device=slab.device)
        return view.set_(slab, offset_bytes // item + offset_elements, shape, strides)

    def offset_in(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Byte offset of the tensor's first element in the slot, or None if it lives elsewhere."""
        slab = self._slabs[slot.arena]
        if tensor.untyped_storage().data_ptr() != slab.data_ptr() or slab.nbytes() == 0:
            return None
        offset_bytes, n_bytes = self._offsets[slot]
        at = int(tensor.storage_offset()) * tensor.element_size() - offset_bytes
        return at if 0 <= at < n_bytes else None

    def poison(self, slot: Slot) -> None:
        """Fill the slot with 0xFF bytes, which are NaN in every float dtype: whoever reads it too late is seen."""
        self.raw(slot).fill_(0xFF)

    def raw(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes."""
        offset_bytes, n_bytes = self._offsets[slot]
        slab = self._slabs[slot.arena]
        view = torch.empty(0, dtype=torch.uint8, device=slab.device)
        return view.set_(slab, offset_bytes, (n_bytes,), (1,))


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
