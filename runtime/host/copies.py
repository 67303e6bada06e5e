"""How do weights, gradients and offloaded activations move between host and device?"""

from runtime.plan import Op, Plan

from .host_state import HostState
from .memory import Arenas


class Copies:
    """The ops of the link's two lanes. Host memory that a link reads is never written by these."""

    def __init__(self, plan: Plan, arenas: Arenas, host: HostState) -> None:
        self.plan, self.arenas, self.host = plan, arenas, host
        self._blocks = plan.workload.blocks
        self._offsets = [b.offsets()[0] for b in self._blocks]

    def load(self, op: Op) -> None:
        dtype, block = self.plan.semantics.compute_dtype, self._blocks[op.block]
        (to,) = op.writes
        source, *tied = op.reads
        if not tied:
            part = self.arenas.view(source, dtype)
            at = self.host.chunks[op.block][op.chunk or 0].start
            self.arenas.view(to, dtype, tuple(part.shape), at).copy_(part, non_blocking=True)
            return
        owned = block.offsets(owned_only=True)[0]
        shared_with = self._offsets[0]
        for p in block.parameters:
            if p.tied_to is None:
                view = self.arenas.view(source, dtype, (p.n_elements,), owned[p.name])
            else:
                view = self.arenas.view(tied[0], dtype, (p.n_elements,), shared_with[p.tied_to])
            self.arenas.view(to, dtype, (p.n_elements,), self._offsets[op.block][p.name]).copy_(view, non_blocking=True)

    def offload(self, op: Op) -> None:
        """The elements of one chunk of a gradient, or of all of it; and the sums of its squares, if they go along."""
        dtype, part = self.plan.gradient_dtype(op.block), self.host.chunks[op.block][op.chunk or 0]
        source = self.arenas.view(op.reads[0], dtype, (len(part),), part.start)
        self.arenas.view(op.writes[0], dtype, (len(part),)).copy_(source, non_blocking=True)
        for squares, to in zip(op.reads[1:], op.writes[1:], strict=True):
            self.arenas.raw(to).copy_(self.arenas.raw(squares), non_blocking=True)

    def move_boundary(self, op: Op) -> None:
        """Spill or fetch: activation offload, and its prefetch."""
        n_bytes = self.plan.blocks_of(op.micro_batch)[op.block].boundary_bytes
        self.arenas.raw(op.writes[0])[:n_bytes].copy_(self.arenas.raw(op.reads[0])[:n_bytes], non_blocking=True)
