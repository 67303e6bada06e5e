"""Collectives of the ranks of a plan: weights come together, partial sums of gradients go to the ranks that update them."""

import torch

from penstock.runtime.host.memory import Arenas
from penstock.runtime.host.slabs import CommonMemory
from penstock.runtime.plan import Kind, Op, Plan
from penstock.runtime.ranks import Ranks, folded


class Collectives:
    """The ops of the net lane. Every rank performs the same ones, in the same order."""

    def __init__(self, plan: Plan, arenas: Arenas, ranks: Ranks, memory: CommonMemory | None) -> None:
        """`memory`: that ranks read of each other, if they do."""
        self._plan, self._arenas, self._ranks, self._memory = plan, arenas, ranks, memory

    def perform(self, op: Op) -> None:
        """Gather a block's weights, or exchange its partial sums (all-gather, reduce-scatter)."""
        regions = self._plan.regions(op.block)
        if op.kind is Kind.EXCHANGE:
            for first, n in regions:
                self._exchange(op, first, n)
            return
        if self._memory is not None:
            self._ranks.meet()  # all have updated their parts
        dtype = self._plan.semantics.compute_dtype
        for source, (first, n) in zip((op["state"], op.get("tied")), regions, strict=False):
            whole = self._arenas.view(op["weights"], dtype, (n,), first)
            if self._memory is None:
                self._ranks.gather(whole)
                continue
            assert source is not None
            # The others update none of what is read here before all have exchanged the gradient that is made with it
            for rank, (part, slab) in enumerate(zip(whole.view(self._ranks.n, -1), self._memory.uploaded, strict=True)):
                if rank != self._ranks.rank:
                    part.copy_(self._arenas.front_in(slab, source, dtype, part.numel()), non_blocking=True)

    def _exchange(self, op: Op, first: int, n: int) -> None:
        """Reduce-scatter in chunks, summed in fp32; within a chunk, slices are ordered by destination rank. Each host sums its own
        ranks' parts before hosts exchange: slices for a rank and its counterparts elsewhere are adjacent. A host's ranks are a
        subtree of the sum, which stays the same."""
        plan, n_ranks, sent_as = self._plan, self._ranks.n, self._plan.sum_dtype(op.block)
        here, n_hosts = self._ranks.n_here, n_ranks // self._ranks.n_here
        most, n_mine = plan.exchanged_elements(), n // n_ranks
        parts = self._arenas.view(op["sum"], sent_as, (n_ranks, n_mine), first)
        # The slot has two halves of `most` fp32 numbers for each rank: of narrower ones two sorts fit into the second.
        half = n_ranks * most
        places = (0, half) if sent_as == "fp32" else (2 * half, 3 * half)
        for begin in range(0, n_mine, most):
            n_now = min(most, n_mine - begin)
            received, sent = (self._arenas.view(op["received"], sent_as, (n_ranks * n_now,), at) for at in places)
            if n_now == n_mine and n_hosts == 1:
                sent = parts.view(-1)
            else:
                by_host = parts.view(n_hosts, here, n_mine)[:, :, begin : begin + n_now]
                sent.view(here, n_hosts, n_now).copy_(by_host.transpose(0, 1))
            if self._memory is None:
                self._ranks.exchange(sent, received)
            else:
                self._exchange_in(self._memory, sent.view(n_ranks, -1), received.view(n_ranks, -1))
            if sent_as != "fp32":
                received = self._arenas.view(op["received"], "fp32", (n_ranks * n_now,)).copy_(received)
            total = folded(received, here)
            if n_hosts > 1:
                of_hosts = self._arenas.view(op["received"], "fp32", (n_hosts * n_now,), half)
                self._ranks.exchange(total, of_hosts, scope="hosts")
                total = folded(of_hosts, n_hosts)
            mine = self._arenas.view(op["gradient"], plan.gradient_dtype(op.block), (n_now,), first // n_ranks + begin)
            mine.copy_(total)

    def _exchange_in(self, memory: CommonMemory, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Rows that go to each rank, and come from each: put where others read them, once these have read what was there."""
        me, n_bytes = self._ranks.rank, sent.numel() * sent.element_size()
        self._ranks.meet()
        memory.exchanged[me][:n_bytes].view(sent.dtype).copy_(sent.view(-1), non_blocking=True)
        _settle(sent)
        self._ranks.meet()
        for rank, (row, slab) in enumerate(zip(received, memory.exchanged, strict=True)):
            there = slab[:n_bytes].view(sent.dtype).view(sent.shape)
            row.copy_(sent[me] if rank == me else there[me], non_blocking=True)
        _settle(received)


def _settle(tensor: torch.Tensor) -> None:
    """Return when what this thread has asked of the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
