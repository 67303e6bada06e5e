"""Views of slots: weights, gradients, activations, and a layer's saved tensors."""

# B sequences, T tokens, D width
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.runtime.host.memory import DTYPE, Arenas
from penstock.runtime.plan import Op, Plan, Slot
from penstock.runtime.plan.packed import layout
from penstock.runtime.plan.workload import SLOT_ALIGN_BYTES

from .packed_weights import prepare, unpack_into, unpack_kernel

Weights = dict[str, torch.Tensor]  # by the parameter's full name in the model
SLOT_FULL = "no room"  # replaces a `Spot` in a full slot
MATRICES = {"mm": 0, "addmm": 1}  # calls with an `out` variant, and the index of their first matrix


class Views:
    """Views of a plan's slots on the device, created by each call."""

    def __init__(self, plan: Plan, arenas: Arenas, width: int) -> None:
        """`width`: D of tensors between layers."""
        self._semantics, self._arenas = plan.semantics, arenas
        self._blocks = plan.workload.blocks
        self._owned = [block.offsets(owned_only=True)[0] for block in self._blocks]
        self._plan = plan
        if (
            semantics := plan.semantics
        ).base != "bf16" and semantics.products == "compute":  # create lookup tables before the first unpack op
            device, dtype = arenas.raw(Slot("weights", 0)).device, DTYPE[semantics.compute_dtype]
            if unpack_kernel(device, semantics.base, dtype) is None and semantics.base in ("nf4", "mxfp4"):
                prepare(device, semantics.base, dtype)
        self._width = width

    def weights(self, block: int, slot: Slot, trained: Slot | None = None) -> Weights:
        """Weights of the block by name; trained ones from the slot `trained`, if given. Packed ones are flat bytes."""
        weights, dtype = Weights(), self._semantics.compute_dtype
        for p in self._blocks[block].parameters:
            source, offsets = (slot, self._plan.offsets) if trained is None or p.frozen else (trained, self._owned)
            if self._semantics.products == "fp8" and self._plan.is_packed(p):
                n_bytes, item = layout(p.shape, self._semantics.base).n_bytes, DTYPE[dtype].itemsize
                weights[p.name] = self._arenas.view(source, "int8", (n_bytes,), offsets[block][p.name] * item)
            else:
                weights[p.name] = self._arenas.view(source, dtype, p.shape, offsets[block][p.name])
        return weights

    def leaves(self, block: int, slot: Slot, trained: Slot | None = None) -> Weights:
        """Weights of the block by name; trained weights require gradients."""
        weights = self.weights(block, slot, trained)
        for p in self._blocks[block].trained:
            weights[p.name].requires_grad_()
        return weights

    def gradients(self, block: int, slot: Slot, dtype: str, is_sent: bool = False) -> Weights:
        """Gradients of the block's trained weights, by name. `is_sent`: without a tied one that the device adds to another."""
        offsets, names = self._plan.offsets[block], {*self.sent(block)} if is_sent else None
        trained = (p for p in self._blocks[block].trained if names is None or p.name in names)
        return {p.name: self._arenas.view(slot, dtype, p.shape, offsets[p.name]) for p in trained}

    def sent(self, block: int) -> list[str]:
        """Names of the block's trained weights, without a tied one whose sum the device adds to another before it is rounded."""
        return [p.name for p in self._blocks[block].trained if p.tied_to is None or not self._plan.joins_tied]

    def tied_gradients(self, slot: Slot) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the head's summed gradient of each tied weight, with the name of the weight in the embedding."""
        gradients = self.gradients(len(self._blocks) - 1, slot, "fp32")
        yield from ((p.tied_to, gradients[p.name]) for p in self._blocks[-1].trained if p.tied_to is not None)

    def unpack(self, op: Op) -> None:
        """Unpack a block's packed weights, and copy the others."""
        packed, base = self._arenas.raw(op["packed"]), self._semantics.base
        offsets = self._plan.uploaded(op.block)[0]
        for p in self._blocks[op.block].parameters:
            if not p.frozen and self._plan.is_apart(op.block):
                continue
            out = self._arenas.view(op["weights"], self._semantics.compute_dtype, p.shape, self._plan.offsets[op.block][p.name])
            if self._plan.is_packed(p):
                unpack_into(packed[offsets[p.name] :][: layout(p.shape, base).n_bytes], out, base)
            else:
                out.view(-1).copy_(packed[offsets[p.name] :][: out.nbytes].view(out.dtype))

    def activation(self, slot: Slot, m: int) -> torch.Tensor:
        """Output of a block, or its gradient, (B, T, D) for micro-batch m."""
        s = self._semantics
        return self._arenas.view(slot, s.compute_dtype, (s.n_sequences(m), s.seq_len, self._width))


@dataclass(frozen=True, slots=True)
class Spot:
    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """View of the slot's bytes, with a separate version counter."""
        return slot.data[self.offset_bytes :].view(self.dtype).as_strided(self.shape, self.stride)


class Shelf:
    """Slot for offloaded results: products are computed into it, others copied. Backward reads them from their prefetch slot."""

    def __init__(self, slot: torch.Tensor) -> None:
        """`slot`: bytes; assigned again before backward, when they may be in another slot."""
        self.slot, self.n_bytes = slot, 0

    def compute(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Compute a call. Return its result, and a copy of it with spots in place of tensors on the shelf."""
        packet = func.overloadpacket
        if packet.__name__ == "scaled_linear":
            x, *_, widths = args
            like = [torch.empty(*x.shape[:-1], n, device="meta") for n in widths]
            spots = [self._allocate(x.dtype, y.shape, y.stride()) for y in like]
            if results := [spot.view(self.slot) for spot in spots if None not in spots and spot is not None]:
                packet.out(*args, out=results)
                return results, spots
        if packet.__name__ in MATRICES and func is packet.default:
            a, b = args[MATRICES[packet.__name__] :][:2]
            shape = torch.Size((a.shape[0], b.shape[1]))
            if (spot := self._allocate(a.dtype, shape, (shape[1], 1))) is not None:
                return packet.out(*args, **kwargs, out=spot.view(self.slot)), spot
        tensors, form = tree_flatten(func(*args, **kwargs))
        spots = list(map(self._store, tensors))
        results = [spot.view(self.slot) if isinstance(spot, Spot) else value for value, spot in zip(tensors, spots, strict=True)]
        return tree_unflatten(results, form), tree_unflatten(spots, form)

    def restored(self, spot: Any) -> Any:
        """Tensor of a spot; other values are returned unchanged."""
        assert spot is not SLOT_FULL, "saved activations do not fit into their slot"
        return spot.view(self.slot) if isinstance(spot, Spot) else spot

    def _store(self, value: Any) -> Any:
        """Copy a floating-point tensor to the shelf and return its spot. Other values (random states) are returned without copy."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.dtype.is_floating_point or not value.numel():
            return value.detach()  # autograd attaches a graph to the original next
        n_spanned = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        assert n_spanned == value.numel(), f"result of shape {(*value.shape,)} with gaps: strides {value.stride()}"
        if (spot := self._allocate(value.dtype, value.shape, value.stride())) is None:
            return SLOT_FULL
        spot.view(self.slot).copy_(value)
        return spot

    def _allocate(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Spot | None:
        n_bytes = -(-shape.numel() * dtype.itemsize // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        if self.n_bytes + n_bytes > self.slot.numel():
            return None
        self.n_bytes += n_bytes
        return Spot(self.n_bytes - n_bytes, dtype, shape, stride)
