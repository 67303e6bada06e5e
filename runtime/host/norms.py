"""How large are the gradients of a block, while they are on the device?

The norm asks of every tensor for a sum of squares: fp32 over fixed chunks, the sums of chunks added in fp64. A CPU in a
GPU's place sums as the host does, to the last bit. A GPU adds up the elements of a chunk in an order of its own, always the same:
its sums differ from the host's by a few roundings of fp32, and not from plan to plan.
"""

from collections.abc import Sequence

import torch

from runtime.plan import Op, Plan

from .memory import Arenas
from .optimizer import CHUNK_ELEMENTS, sum_of_squares


class Squares:
    """The squares of gradients in the device's slots. Only the gpu lane's thread may use it."""

    def __init__(self, plan: Plan, arenas: Arenas) -> None:
        self.plan, self.arenas = plan, arenas
        self._offsets = [b.offsets()[0] for b in plan.workload.blocks]
        self._n_pieces = plan.semantics.n_pieces

    def square(self, op: Op) -> None:
        """Put one sum per trained parameter of the block into its slot of `squares`."""
        dtype, parameters = self.plan.gradient_dtype(op.block), self.plan.workload.blocks[op.block].trained
        at = self._offsets[op.block]
        gradients = [self.arenas.view(op["gradient"], dtype, (p.n_elements,), at[p.name]) for p in parameters]
        out = self.arenas.view(op["squares"], "fp64", (len(parameters),))
        cuts = self.plan.workload.blocks[op.block].cuts(self._n_pieces)  # none of these blocks has a weight that is another's
        if out.device.type == "cpu":
            for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                out[i] = sum_of_squares(gradient, cuts=cuts[p.name])
        else:
            named = zip(parameters, gradients, strict=True)
            squares_at_once([[gradient[cut.start : cut.stop] for cut in cuts[p.name]] for p, gradient in named], out)


def squares_at_once(gradients: Sequence[Sequence[torch.Tensor]], out: torch.Tensor) -> None:
    """The same for a device of many cores, which is never asked for a number: a kernel or two per piece of a tensor, and four for
    all.

    Scratch memory is a dozen bytes per chunk of elements. The norm of a chunk, squared, is its sum of squares, as near as fp32
    has it; a tensor is read, widened and added up in one pass.
    """
    n_chunks = [sum(-(-piece.numel() // CHUNK_ELEMENTS) for piece in pieces) for pieces in gradients]
    of_chunks = torch.zeros(len(gradients), max(n_chunks, default=0), dtype=torch.float32, device=out.device)
    for i, pieces in enumerate(gradients):
        at = 0
        for piece in pieces:
            n_full, n_rest = divmod(piece.numel(), CHUNK_ELEMENTS)
            whole, rest = piece.split([piece.numel() - n_rest, n_rest])
            if n_full:
                chunks = whole.view(n_full, CHUNK_ELEMENTS)
                torch.linalg.vector_norm(chunks, dim=1, dtype=torch.float32, out=of_chunks[i, at : at + n_full])
            if n_rest:
                torch.linalg.vector_norm(rest, dtype=torch.float32, out=of_chunks[i, at + n_full])
            at += n_full + (n_rest > 0)
    torch.sum(of_chunks.square_(), dim=1, dtype=torch.float64, out=out)
