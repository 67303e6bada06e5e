"""Collectives of a plan's ranks: all-gather of weights, and reduce-scatter of gradients."""

import torch

from penstock.runtime.host.memory import Arenas
from penstock.runtime.host.slabs import CommonMemory
from penstock.runtime.plan import Kind, Op, Plan
from penstock.runtime.ranks import Ranks, folded


class Collectives:
    """Ops of the net lane. All ranks perform equal ops in equal order."""

    def __init__(self, plan: Plan, arenas: Arenas, ranks: Ranks, memory: CommonMemory | None) -> None:
        """`memory`: shared host memory of the ranks, or None to use torch.distributed."""
        self._plan, self._arenas, self._ranks, self._memory = plan, arenas, ranks, memory

    def perform(self, op: Op) -> None:
        regions = self._plan.regions(op.block)
        if op.kind is Kind.EXCHANGE:
            for first, n in regions:
                self._exchange(op, first, n)
            return
        if self._memory is not None:
            self._ranks.meet()  # all ranks have updated their shards
        dtype = self._plan.semantics.compute_dtype
        for source, (first, n) in zip((op["state"], op.get("tied")), regions, strict=False):
            weights = self._arenas.view(op["weights"], dtype, (n,), first)
            if self._memory is None:
                self._ranks.gather(weights)
                continue
            assert source is not None
            # No barrier afterwards: other ranks update these weights after the exchange of the gradient computed with them
            for rank, (part, slab) in enumerate(zip(weights.view(self._ranks.n, -1), self._memory.uploaded, strict=True)):
                if rank != self._ranks.rank:
                    part.copy_(self._arenas.front_in(slab, source, dtype, part.numel()), non_blocking=True)

    def _exchange(self, op: Op, first: int, n: int) -> None:
        """Reduce-scatter in chunks, summed in fp32; within a chunk, slices are ordered by destination rank. Each host sums the
        parts of its ranks before hosts exchange, so slices for a rank and its counterparts on other hosts are adjacent. A host's
        ranks are a subtree of the tree reduction, so the bits do not depend on the number of hosts."""
        plan, n_ranks, sent_as = self._plan, self._ranks.n, self._plan.sum_dtype(op.block)
        n_here, n_hosts = self._ranks.n_here, n_ranks // self._ranks.n_here
        chunk, n_mine = plan.exchanged_elements(), n // n_ranks
        parts = self._arenas.view(op["sum"], sent_as, (n_ranks, n_mine), first)
        # The slot has two halves of `chunk` fp32 numbers per rank; the second half holds both buffers of a narrower dtype
        half = n_ranks * chunk
        places = (0, half) if sent_as == "fp32" else (2 * half, 3 * half)
        for begin in range(0, n_mine, chunk):
            n_now = min(chunk, n_mine - begin)
            received, sent = (self._arenas.view(op["received"], sent_as, (n_ranks * n_now,), offset) for offset in places)
            if n_now == n_mine and n_hosts == 1:
                sent = parts.view(-1)
            else:
                by_host = parts.view(n_hosts, n_here, n_mine)[:, :, begin : begin + n_now]
                sent.view(n_here, n_hosts, n_now).copy_(by_host.transpose(0, 1))
            if self._memory is None:
                self._ranks.exchange(sent, received)
            else:
                self._exchange_in(self._memory, sent.view(n_ranks, -1), received.view(n_ranks, -1))
            if sent_as != "fp32":
                received = self._arenas.view(op["received"], "fp32", (n_ranks * n_now,)).copy_(received)
            total = folded(received, n_here)
            if n_hosts > 1:
                of_hosts = self._arenas.view(op["received"], "fp32", (n_hosts * n_now,), half)
                self._ranks.exchange(total, of_hosts, scope="hosts")
                total = folded(of_hosts, n_hosts)
            mine = self._arenas.view(op["gradient"], plan.gradient_dtype(op.block), (n_now,), first // n_ranks + begin)
            mine.copy_(total)

    def _exchange_in(self, memory: CommonMemory, sent: torch.Tensor, received: torch.Tensor) -> None:
        """All-to-all of rows in shared memory, with barriers before old rows are overwritten and before new ones are read."""
        me, n_bytes = self._ranks.rank, sent.numel() * sent.element_size()
        self._ranks.meet()
        memory.exchanged[me][:n_bytes].view(sent.dtype).copy_(sent.view(-1), non_blocking=True)
        _settle(sent)
        self._ranks.meet()
        for rank, (row, slab) in enumerate(zip(received, memory.exchanged, strict=True)):
            rows = slab[:n_bytes].view(sent.dtype).view(sent.shape)
            row.copy_(sent[me] if rank == me else rows[me], non_blocking=True)
        _settle(received)


def _settle(tensor: torch.Tensor) -> None:
    """Synchronize the current stream of the tensor's device."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
