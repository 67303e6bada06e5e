"""Views of slots: weights, gradients, activations, and what a layer saves."""

# B sequences, T tokens, D width
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
NO_ROOM = "no room"  # in place of the spot of a result that is one too many
MATRICES = {"mm": 0, "addmm": 1}  # calls that can be told where to put their result, and the argument that is their first matrix


class Views:
    """Views of a plan's slots on the device, made by each call."""

    def __init__(self, plan: Plan, arenas: Arenas, width: int) -> None:
        """`width`: D, of what layers return."""
        self._semantics, self._arenas = plan.semantics, arenas
        self._blocks = plan.workload.blocks
        self._owned = [block.offsets(owned_only=True)[0] for block in self._blocks]
        self._plan = plan
        if (of := plan.semantics).base != "bf16":  # the first weight to be unpacked shall not wait for it
            device, dtype = arenas.raw(Slot("weights", 0)).device, DTYPE[of.compute_dtype]
            if unpack_kernel(device, of.base, dtype) is None and of.base in ("nf4", "mxfp4"):
                prepare(device, of.base, dtype)
        self._width = width

    def weights(self, block: int, slot: Slot, trained: Slot | None = None) -> Weights:
        """All weights that the block uses, by name; trained ones from the slot `trained`, if there is one."""
        weights, dtype = Weights(), self._semantics.compute_dtype
        for p in self._blocks[block].parameters:
            of, at = (slot, self._plan.offsets) if trained is None or p.frozen else (trained, self._owned)
            weights[p.name] = self._arenas.view(of, dtype, p.shape, at[block][p.name])
        return weights

    def leaves(self, block: int, slot: Slot, trained: Slot | None = None) -> Weights:
        """The same; trained weights require gradients."""
        weights = self.weights(block, slot, trained)
        for p in self._blocks[block].trained:
            weights[p.name].requires_grad_()
        return weights

    def gradients(self, block: int, slot: Slot, dtype: str) -> Weights:
        """Gradients of the block's trained weights, by name."""
        at = self._plan.offsets[block]
        return {p.name: self._arenas.view(slot, dtype, p.shape, at[p.name]) for p in self._blocks[block].trained}

    def unpack(self, op: Op) -> None:
        """Unpack a block's packed weights, and copy its others."""
        packed, base = self._arenas.raw(op["packed"]), self._semantics.base
        places = self._plan.uploaded(op.block)[0]
        for p in self._blocks[op.block].parameters:
            if not p.frozen and self._plan.is_apart(op.block):
                continue
            out = self._arenas.view(op["weights"], self._semantics.compute_dtype, p.shape, self._plan.offsets[op.block][p.name])
            if self._plan.is_packed(p):
                unpack_into(packed[places[p.name] :][: layout(p.shape, base).n_bytes], out, base)
            else:
                out.view(-1).copy_(packed[places[p.name] :][: out.nbytes].view(out.dtype))

    def activation(self, slot: Slot, m: int) -> torch.Tensor:
        """A block's output, or its gradient, (B, T, D) of micro-batch number m."""
        s = self._semantics
        return self._arenas.view(slot, s.compute_dtype, (s.n_sequences(m), s.seq_len, self._width))


@dataclass(frozen=True, slots=True)
class Spot:
    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """The tensor there, given the slot's bytes, with a version counter of its own."""
        return slot.data[self.offset_bytes :].view(self.dtype).as_strided(self.shape, self.stride)


class Shelf:
    """A slot for saved results that go to the host: products are computed into it, other results copied, in order, each at an
    aligned place. Backward finds them in the slot that they have come back to."""

    def __init__(self, slot: torch.Tensor) -> None:
        """`slot`: its bytes; assign it again when they have moved."""
        self.slot, self.n_bytes = slot, 0

    def computed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's result, and the same with spots in place of tensors on the shelf."""
        packet = func.overloadpacket
        if packet.__name__ in MATRICES and func is packet.default:
            a, b = args[MATRICES[packet.__name__] :][:2]
            shape = torch.Size((a.shape[0], b.shape[1]))
            if (spot := self._room(a.dtype, shape, (shape[1], 1))) is not None:
                return packet.out(*args, **kwargs, out=spot.view(self.slot)), spot
        made, form = tree_flatten(func(*args, **kwargs))
        noted = list(map(self._put, made))
        found = [spot.view(self.slot) if isinstance(spot, Spot) else thing for thing, spot in zip(made, noted, strict=True)]
        return tree_unflatten(found, form), tree_unflatten(noted, form)

    def found(self, noted: Any) -> Any:
        """A recorded result, with the tensor in place of its spot."""
        assert noted is not NO_ROOM, "what is saved finds no room in its slot"
        return noted.view(self.slot) if isinstance(noted, Spot) else noted

    def _put(self, thing: Any) -> Any:
        """Where a result lies now. States of random numbers, which are a few integers, stay where they are."""
        if not isinstance(thing, torch.Tensor):
            return thing
        if not thing.dtype.is_floating_point or not thing.numel():
            return thing.detach()  # from the graph that the original gets as soon as autograd sees it
        n_spanned = 1 + sum((n - 1) * stride for n, stride in zip(thing.shape, thing.stride(), strict=True))
        assert n_spanned == thing.numel(), f"a result of shape {(*thing.shape,)} has gaps: its strides are {thing.stride()}"
        if (spot := self._room(thing.dtype, thing.shape, thing.stride())) is None:
            return NO_ROOM
        spot.view(self.slot).copy_(thing)
        return spot

    def _room(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Spot | None:
        n_bytes = -(-shape.numel() * dtype.itemsize // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        if self.n_bytes + n_bytes > self.slot.numel():
            return None
        self.n_bytes += n_bytes
        return Spot(self.n_bytes - n_bytes, dtype, shape, stride)
