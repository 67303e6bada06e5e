"""Numbers of a step that all ranks learn: the squares of their gradients, and their losses.

Each rank puts the sums of squares of its tiles into a row, in the order of blocks, and the losses of its micro-batches. Once the
rows are shared, every rank adds up the same numbers in the same order, which is that of a single process: tile by tile of each
parameter, and parameter by parameter.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runtime.plan import Plan
from runtime.plan.workload import NORM_TILE_ELEMENTS, Parameter
from runtime.ranks import Ranks

from .norms import added


class Learned(NamedTuple):
    """What every rank knows of a step in the end."""

    squares: list[tuple[Parameter, float]]  # the sum of every parameter's
    losses: list[float]  # of every micro-batch, in order
    is_asked: bool  # whether the first rank, which leads, is asked to end


class SharedNumbers:
    """The rows of all ranks."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._n_numbers, self._n_micro_batches = plan.shared_numbers(), plan.semantics.n_micro_batches
        self._tiles = [list(self._tiles_of(rank)) for rank in range(ranks.n)]  # of each rank's row, block by block
        assert all(sum(map(len, of)) + self._n_micro_batches + 1 <= self._n_numbers for of in self._tiles)
        self._row = torch.zeros(self._n_numbers, dtype=torch.float64)

    def _tiles_of(self, rank: int) -> Iterator[list[Parameter]]:
        """The parameter that each tile is of."""
        for b, block in enumerate(self._plan.workload.blocks):
            offsets, cuts = block.offsets(owned_only=True)[0], block.cuts(self._plan.semantics.n_pieces)
            n, of_block = self._plan.part_elements(b), list[Parameter]()
            for p in block.parameters:
                for cut in cuts.get(p.name, []):  # a weight that is another's is counted there
                    if (offsets[p.name] + cut.start) // n == rank:
                        of_block += [p] * -(-len(cut) // NORM_TILE_ELEMENTS)
            yield of_block

    def tiles(self, block: int) -> list[Parameter]:
        """The parameter of each tile of this rank's part of a block."""
        return self._tiles[self._ranks.rank][block]

    def learned(self, rows: torch.Tensor, squares: Sequence[torch.Tensor], losses: Sequence[float], is_asked: bool) -> Learned:
        """What all ranks learn. `rows`: memory for all rows, fp64; `squares`: of each block, this rank's tiles; `is_asked`: whether
        this one is asked to end."""
        n, mine = self._n_micro_batches, self._tiles[self._ranks.rank]
        parts = [of_block[: len(tiles)] for of_block, tiles in zip(squares, mine, strict=True)]
        torch.cat(parts, out=self._row[: sum(map(len, mine))])
        self._row[-n:] = torch.tensor(losses, dtype=torch.float64)
        self._row[-n - 1] = is_asked
        rows = rows[: self._ranks.n * self._n_numbers].view(self._ranks.n, self._n_numbers)
        self._ranks.share(self._row, rows)
        of_parameter: dict[Parameter, list[float]] = {}
        of_ranks = [iter(row) for row in rows.tolist()]
        for of_block in zip(*self._tiles, strict=True):
            for rank, tiles in enumerate(of_block):
                for p in tiles:
                    of_parameter.setdefault(p, []).append(next(of_ranks[rank]))
        sums = [(p, added(squares)) for p, squares in of_parameter.items()]
        return Learned(sums, rows[:, -n:].flatten().tolist(), bool(rows[0, -n - 1]))
