"""Copies between host and device: loads of weights, offloads of gradients, offload and prefetch of activations."""

from penstock.runtime.plan import Kind, Op, Plan

from .memory import Arenas


class Copies:
    """Ops of the two lanes of the link."""

    def __init__(self, plan: Plan, arenas: Arenas, rank: int = 0) -> None:
        self.plan, self.arenas = plan, arenas
        self._loaded = [plan.loaded(b, rank) for b in range(len(plan.workload.blocks))]

    def load(self, op: Op) -> None:
        """Copy a block's weights from its state, from a separate slot of frozen weights, and from the state of a tied block."""
        for name, source_offset, target_offset, n_bytes in self._loaded[op.block]:
            source = self.arenas.view(op[name], "int8", (n_bytes,), source_offset)
            self.arenas.view(op["weights"], "int8", (n_bytes,), target_offset).copy_(source, non_blocking=True)

    def offload_gradient(self, op: Op) -> None:
        """Copy a gradient, and its sums of squares if the op includes them."""
        dtype, n = self.plan.gradient_dtype(op.block), self.plan.sent_elements(op.block)
        self.arenas.view(op["arrived"], dtype, (n,)).copy_(self.arenas.view(op["gradient"], dtype, (n,)), non_blocking=True)
        if op.get("squares") is not None:
            self.offload_squares(op)

    def offload_squares(self, op: Op) -> None:
        """Copy the sums of squares of a gradient that remains on the device."""
        self.arenas.raw(op["norm"]).copy_(self.arenas.raw(op["squares"]), non_blocking=True)

    def move(self, op: Op) -> None:
        """Copy a layer's output, or its other saved activations, to the host or back (activation offload, prefetch)."""
        if op.kind in (Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED):
            host, device, n_bytes = "offloaded", "saved", self.plan.recompute(op.block, op.micro_batch).slot_bytes
        else:
            host, device, n_bytes = "spilled", "y", self.plan.blocks_of(op.micro_batch)[op.block].boundary_bytes
        source, target = (host, device) if op.kind in (Kind.FETCH_SAVED, Kind.FETCH_ACTIVATION) else (device, host)
        self.arenas.raw(op[target])[:n_bytes].copy_(self.arenas.raw(op[source])[:n_bytes], non_blocking=True)
