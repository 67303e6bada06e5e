"""Copies between host and device: weights come, gradients leave, activations go and come back (load, and offload)."""

from runtime.plan import Kind, Op, Plan

from .memory import Arenas


class Copies:
    """The ops of the link's two lanes. Host memory that a link reads is never written by these."""

    def __init__(self, plan: Plan, arenas: Arenas, rank: int = 0) -> None:
        self.plan, self.arenas, self._rank = plan, arenas, rank
        self._blocks = plan.workload.blocks
        self._uploaded = [plan.uploaded(b) for b in range(len(self._blocks))]  # in bytes
        self._on_host = [plan.frozen_on_host(b) for b in range(len(self._blocks))]

    def load(self, op: Op) -> None:
        """The beginning of the block's state, or what is frozen of it where only that is there; what a disk has, from where it was
        read to. Where a weight is tied, whose place is in another's state, weights go one by one."""
        dtype, tied, to = self.plan.semantics.compute_dtype, op.get("tied"), op["weights"]
        if self.plan.semantics.ranks > 1:
            self._load_part(op)
            return
        (owned, n_bytes), apart_bytes = self._uploaded[op.block], self.plan.elsewhere_bytes(op.block)
        if tied is None:
            state, weights = self.arenas.raw(op["state"]), self.arenas.raw(to)
            if (frozen := op.get("frozen")) is not None:
                first, n_bytes = n_bytes, n_bytes - self.plan.frozen_bytes(op.block)
                weights[n_bytes:first].copy_(self.arenas.raw(frozen)[: first - n_bytes], non_blocking=True)
            weights[apart_bytes:n_bytes].copy_(state[: n_bytes - apart_bytes], non_blocking=True)
            return
        for p in self._blocks[op.block].parameters:
            view = self.arenas.view(to, dtype, (p.n_elements,), self.plan.offsets[op.block][p.name])
            if p.tied_to is not None:
                view.copy_(self.arenas.view(tied, dtype, (p.n_elements,), self.plan.offsets[0][p.tied_to]), non_blocking=True)
            elif (first := owned[p.name] - apart_bytes) >= 0:
                part = self.arenas.view(op["state"], dtype, (p.n_elements,), first // view.element_size())
                view.copy_(part, non_blocking=True)

    def _load_part(self, op: Op) -> None:
        """Of what is trained this rank's part, and all that is frozen."""
        plan, tied, to, dtype = self.plan, op.get("tied"), op["weights"], self.plan.semantics.compute_dtype
        for source, (first, n_whole) in zip((op["state"], tied), plan.regions(op.block), strict=False):
            n = n_whole // plan.semantics.ranks
            assert source is not None
            view = self.arenas.view(to, dtype, (n,), first + self._rank * n)
            view.copy_(self.arenas.view(source, dtype, (n,)), non_blocking=True)
        if n_bytes := plan.frozen_bytes(op.block):
            view = self.arenas.view(to, "int8", (n_bytes,), self._uploaded[op.block][1] - n_bytes)
            view.copy_(self.arenas.view(op["state"], "int8", (n_bytes,), self._on_host[op.block][1]), non_blocking=True)
        for p in self._blocks[op.block].parameters:
            if p.frozen and p.tied_to is not None and tied is not None:
                view = self.arenas.view(to, dtype, (p.n_elements,), plan.offsets[op.block][p.name])
                first = self._on_host[0][0][p.tied_to] // view.element_size()
                view.copy_(self.arenas.view(tied, dtype, (p.n_elements,), first), non_blocking=True)

    def offload_gradient(self, op: Op) -> None:
        """A gradient; and the sums of its squares, if they go along."""
        dtype, n = self.plan.gradient_dtype(op.block), self.plan.gradient_elements(op.block) // self.plan.semantics.ranks
        self.arenas.view(op["arrived"], dtype, (n,)).copy_(self.arenas.view(op["gradient"], dtype, (n,)), non_blocking=True)
        if op.get("squares") is not None:
            self.offload_squares(op)

    def offload_squares(self, op: Op) -> None:
        """The sums of the squares of a gradient that stays."""
        self.arenas.raw(op["norm"]).copy_(self.arenas.raw(op["squares"]), non_blocking=True)

    def move(self, op: Op) -> None:
        """A layer's output, or what else its forward saves, goes to the host or comes back (activation offload, prefetch)."""
        if op.kind in (Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED):
            (there, here), n_bytes = ("offloaded", "saved"), self.plan.recompute(op.block, op.micro_batch).slot_bytes
        else:
            (there, here), n_bytes = ("spilled", "y"), self.plan.blocks_of(op.micro_batch)[op.block].boundary_bytes
        if op.kind in (Kind.FETCH_SAVED, Kind.FETCH_ACTIVATION):
            there, here = here, there
        self.arenas.raw(op[there])[:n_bytes].copy_(self.arenas.raw(op[here])[:n_bytes], non_blocking=True)
