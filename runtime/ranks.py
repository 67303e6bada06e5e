"""Ranks: collectives of the processes that share a step.

Each rank has a device and a shard of the host's state, and performs the same plan. Three ops are collectives, each in the order of
its lane: `gather` of weights, `exchange` of partial gradient sums, and `clip`, which shares numbers. Sums are computed here in a
fixed order, not by a library, so that the bits do not depend on the number of ranks.
"""

import os
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from .batch import Batch, Batches

ExchangeScope = Literal["here", "hosts"]  # ranks of this host; or the ranks at this one's place on all hosts


@dataclass(frozen=True, slots=True)
class Shared:
    """Address of a slab for other processes."""

    process: int
    descriptor: int
    n_bytes: int
    name: str  # unique across hosts

    def close(self) -> None:
        """Close the descriptor after all processes mapped the slab; the mappings keep the memory."""
        os.close(self.descriptor)


class Ranks(Protocol):
    """All ranks, seen from one of them. Collective calls return once every rank has made them."""

    rank: int  # consecutive on a host
    n: int
    n_here: int  # on each host
    by_memory: bool  # all ranks are on one host, and a device reads the host memory of other ranks

    def common(self, mine: Shared) -> list[torch.Tensor] | None:
        """Return a slab of each rank, readable by the others, including this one's; None if one cannot be read."""

    def of_host(self, n_bytes: int) -> torch.Tensor:
        """Return a zero slab shared by all ranks of this host."""

    def meet(self) -> None:
        """Wait for all ranks (barrier)."""

    def gather(self, tensor: torch.Tensor) -> None:
        """All-gather in place: a flat tensor of n equal parts has this rank's part at its position."""

    def exchange(self, parts: torch.Tensor, received: torch.Tensor, scope: ExchangeScope = "here") -> None:
        """All-to-all of flat tensors with an equal part for each of these ranks, in order."""

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """All-gather of each rank's flat fp64 row in host memory into (n, row) `rows`, on a separate lane."""


def folded(parts: torch.Tensor, n: int) -> torch.Tensor:
    """Sum n equal parts of a flat tensor by a balanced binary tree, left part plus right part, in place."""
    parts = parts.view(n, -1)
    while len(parts) > 1:
        parts[0::2].add_(parts[1::2])
        parts = parts[0::2]
    return parts[0]


def of_rank(batches: Batches, rank: int, batch_size: int) -> Batches:
    """Return one rank's sequences of each step, with the supervised tokens of all ranks for the mean."""

    def batch_of(step: int) -> Batch:
        batch = batches(step)
        return replace(batch.part(slice(rank * batch_size, (rank + 1) * batch_size)), n_counted=batch.n_supervised)

    return batch_of
