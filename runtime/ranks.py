"""Ranks: what the processes that share a step do together.

Each rank has a device and a part of the host's state, and performs the same plan. Three ops are collectives, each in the order of
its lane: `gather` of weights, `exchange` of partial sums of gradients, and `clip`, which shares numbers. No library sums: the order
of sums is decided here, so that the bits do not depend on the number of ranks.
"""

from dataclasses import replace
from typing import Literal, Protocol

import torch

from .batch import Batch, Batches
from .host.slabs import Shared

Among = Literal["here", "hosts"]  # the ranks of this host; or those, one of every host, that have this one's place there


class Ranks(Protocol):
    """All ranks, as one of them sees them. What each of them calls returns when the last has called it."""

    rank: int  # those of a host one after another
    n: int
    n_here: int  # on each host
    by_memory: bool  # all are on one host, and a rank's device reads from other ranks' host memory

    def common(self, mine: Shared) -> list[torch.Tensor] | None:
        """A slab of each rank that the others may read, this one's too; None where one of them cannot be read."""

    def of_host(self, n_bytes: int) -> torch.Tensor:
        """A slab of zeros that all ranks of this one's host have."""

    def meet(self) -> None:
        """Return when all ranks have come here (barrier)."""

    def gather(self, whole: torch.Tensor) -> None:
        """Fill a flat tensor of n equal parts, of which this rank's is in its place, with those of the others (all-gather)."""

    def exchange(self, parts: torch.Tensor, received: torch.Tensor, among: Among = "here") -> None:
        """All-to-all of flat tensors with an equal part for each of these ranks, in order."""

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """Each rank's flat fp64 row of host memory into (n, row) `rows`, those of the others too. Of a lane of its own."""


def folded(parts: torch.Tensor, n: int) -> torch.Tensor:
    """The sum of n equal parts of a flat tensor by a balanced binary tree, left part and right part; it takes the parts' place."""
    parts = parts.view(n, -1)
    while len(parts) > 1:
        parts[0::2].add_(parts[1::2])
        parts = parts[0::2]
    return parts[0]


def of_rank(batches: Batches, rank: int, batch_size: int) -> Batches:
    """One rank's sequences of each step, with the number of supervised tokens of all ranks, for the mean."""

    def batch_of(step: int) -> Batch:
        batch = batches(step)
        return replace(batch.part(slice(rank * batch_size, (rank + 1) * batch_size)), n_counted=batch.n_supervised)

    return batch_of
