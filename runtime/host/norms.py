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

    def square(self, op: Op) -> None:
        """Put one sum per parameter of the block into its slot of `squares`."""
        dtype, parameters = self.plan.gradient_dtype(op.block), self.plan.workload.blocks[op.block].parameters
        at = self._offsets[op.block]
        gradients = [self.arenas.view(op["gradient"], dtype, (p.n_elements,), at[p.name]) for p in parameters]
        out = self.arenas.view(op["squares"], "fp64", (len(parameters),))
        if out.device.type == "cpu":
            for i, gradient in enumerate(gradients):
                out[i] = sum_of_squares(gradient)
        else:
            squares_at_once(gradients, out)


def squares_at_once(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The same for a device of many cores, which is never asked for a number: a kernel or two per tensor, and four for all.

    Scratch memory is a dozen bytes per chunk of elements. The norm of a chunk, squared, is its sum of squares, as near as fp32
    has it; a tensor is read, widened and added up in one pass.
    """
    n_chunks = [-(-g.numel() // CHUNK_ELEMENTS) for g in gradients]
    of_chunks = torch.zeros(len(gradients), max(n_chunks, default=0), dtype=torch.float32, device=out.device)
    for i, gradient in enumerate(gradients):
        n_full, n_rest = divmod(gradient.numel(), CHUNK_ELEMENTS)
        whole, rest = gradient.split([gradient.numel() - n_rest, n_rest])
        if n_full:
            chunks = whole.view(n_full, CHUNK_ELEMENTS)
            torch.linalg.vector_norm(chunks, dim=1, dtype=torch.float32, out=of_chunks[i, :n_full])
        if n_rest:
            torch.linalg.vector_norm(rest, dtype=torch.float32, out=of_chunks[i, n_full])
    torch.sum(of_chunks.square_(), dim=1, dtype=torch.float64, out=out)
