"""What do the processes that share a step tell each other?

Each rank has a device and a part of the host's state, and performs the same plan. Three ops are done by all of them together, every
one in the order of its lane: parts of weights come together (`gather`), partial sums go to whoever holds the part that they are of
(`exchange`), and numbers of each are learned by all (`share`). No library adds anything up: in which order is decided here, so that
the bits do not depend on how many ranks there are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from .batch import Batch
from .host.common_memory import Shared


class Ranks(Protocol):
    """All ranks, as one of them sees them. What each of them calls returns when the last has called it."""

    rank: int  # those of a host one after another
    n: int
    n_here: int  # on each host
    by_memory: bool  # all are on one host, and what a rank's device needs of others it reads from where they have it there

    def common(self, mine: Shared) -> list[torch.Tensor] | None:
        """What each rank has to be read by the others, this one's own too; None where one of them cannot be read."""

    def meet(self) -> None:
        """Return when all ranks have come here. Of the lane of what they do together."""

    def gather(self, whole: torch.Tensor) -> None:
        """Fill a flat tensor of n equal parts, of which this rank has its own in its place, with those of the others."""

    def exchange(self, parts: torch.Tensor, received: torch.Tensor) -> None:
        """Among the ranks of this host, of flat tensors of as many equal parts: give each its part, and receive what each has for
        this one, in ranks' order."""

    def exchange_between_hosts(self, parts: torch.Tensor, received: torch.Tensor) -> None:
        """The same among those ranks, one of every host, that have this one's place there."""

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """Each rank's flat fp64 row of host memory into (n, row) `rows`, those of the others too. Of a lane of its own."""


def folded(parts: torch.Tensor, n: int) -> torch.Tensor:
    """The sum of n equal parts of a flat tensor by a balanced binary tree, left part and right part; it takes the parts' place."""
    parts = parts.view(n, -1)
    while len(parts) > 1:
        parts[0::2].add_(parts[1::2])
        parts = parts[0::2]
    return parts[0]


def of_rank(batches: Callable[[int], Batch], rank: int, batch_size: int) -> Callable[[int], Batch]:
    """The sequences of each step that are one rank's, counting the supervised tokens of all: what a mean is over."""

    def batch_of(step: int) -> Batch:
        batch = batches(step)
        rows = slice(rank * batch_size, (rank + 1) * batch_size)
        documents = None if batch.document_tokens is None else batch.document_tokens[rows]
        return replace(
            batch,
            input_ids=batch.input_ids[rows],
            targets=batch.targets[rows],
            document_tokens=documents,
            n_of_all=batch.n_supervised,
        )

    return batch_of
