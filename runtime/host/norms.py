"""Global gradient norm: sums of squares of gradients on host and device, and the clip factor.

The squares of each chunk of a tensor are added in fp32 by halving the chunk until one number remains; sums of chunks are added in
fp64. A GPU adds in the same order, so host and device are bitwise identical.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from penstock.runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, Kernel, compiled_kernel
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Plan
from penstock.runtime.plan.workload import NORM_TILE_ELEMENTS, Parameter
from penstock.runtime.ranks import Ranks
from penstock.runtime.units import on_one_line

from .chunks import CHUNK_ELEMENTS, Scratch
from .optimizer import SummedGradient, squares_kernel, summed, tasks_of

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def squares_tasks(gradient: SummedGradient, cuts: Sequence[range] | None = None) -> list[Callable[[Scratch], list[float]]]:
    """Tasks that return fp32 sums of squares of a flat gradient's chunks, to be `added` in order. Chunks restart at each cut."""
    squares = squares_kernel(gradient.parts[0].dtype)
    cuts = [range(gradient.numel())] if cuts is None else cuts
    return [task for cut in cuts for task in tasks_of(partial(squares, gradient), cut.stop, cut.start)]


def added(sums: Iterable[float]) -> float:
    """fp64 sum of the sums of chunks or tensors, in order; not `sum`, which compensates since Python 3.12."""
    total = 0.0
    for square in sums:
        total += square
    return total


def sum_of_squares(
    gradient: torch.Tensor | SummedGradient, scratch: Scratch | None = None, cuts: Sequence[range] | None = None
) -> float:
    """Sum of squares of a flat gradient, computed on this thread."""
    buffer = scratch or Scratch()
    return added(square for task in squares_tasks(summed(gradient), cuts) for square in task(buffer))


@lru_cache(maxsize=8)
def squares_kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    """CUDA kernels of the gradient norm: the sum of squares per chunk, and the sum over chunks. PlanError if a GPU's bits differ
    from the host's."""
    defined: dict[str, Any] = {"ELEMENT": ELEMENT[dtype], "CHUNK": CHUNK_ELEMENTS, "THREADS": THREADS}
    sample = torch.randn(2 * CHUNK_ELEMENTS + 777, generator=torch.Generator().manual_seed(0)).to(dtype)
    result: object = None
    try:
        squares, sums = (compiled_kernel("squares.cu", name, device=device, **defined) for name in ("squares", "sums"))
        out = torch.zeros(1, dtype=torch.float64, device=device)
        squares_at_once([[sample.to(device)]], out, squares, sums)
        result = out.item()
    except (AttributeError, OSError, RuntimeError) as error:  # of torch's compiler, NVRTC or the driver
        result = on_one_line(str(error), 120)
    if result != sum_of_squares(sample):
        raise PlanError(
            f"{device.type} does not sum squares to the host's bits here ({result}); plan with --policy FILE, a policy without "
            "square_on_device and with empty device_blocks"
        )
    return squares, sums


def squares_on_device(gradients: Sequence[torch.Tensor], cuts: Sequence[Sequence[range]], out: torch.Tensor) -> None:
    """Write one fp64 sum per flat gradient to `out`, on the device that holds both and without a synchronization."""
    if out.device.type == "cpu":
        scratch = Scratch()
        sums = [sum_of_squares(g, scratch, ranges) for g, ranges in zip(gradients, cuts, strict=True)]
        out.copy_(torch.tensor(sums, dtype=torch.float64))
    elif gradients:
        pieces = [[g[cut.start : cut.stop] for cut in ranges] for g, ranges in zip(gradients, cuts, strict=True)]
        squares_at_once(pieces, out, *squares_kernels(out.device, gradients[0].dtype))


def squares_at_once(gradients: Sequence[Sequence[torch.Tensor]], out: torch.Tensor, squares: Kernel, sums: Kernel) -> None:
    """Launch one kernel per piece of a tensor, and two for all tensors. Scratch memory is four bytes per chunk."""
    parts = [[part for piece in pieces for part in piece.split(MOST_ELEMENTS)] for pieces in gradients]
    n_chunks = [[-(-part.numel() // CHUNK_ELEMENTS) for part in row] for row in parts]
    of_chunks = torch.zeros(len(parts), max(map(sum, n_chunks)), dtype=torch.float32, device=out.device)
    for row, tensors, counts in zip(of_chunks, parts, n_chunks, strict=True):
        for part, into, n in zip(tensors, row.split([*counts, len(row) - sum(counts)]), counts, strict=False):
            if n > 0:
                squares((n, 1, 1), (THREADS, 1, 1), [part, part.numel(), into])
    sums((len(parts), 1, 1), (1, 1, 1), [of_chunks, of_chunks.shape[1], out])


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """`min(1, clip_norm / (norm + 1e-6))` in fp32; 1 without clipping."""
    if clip_norm is None:
        return 1.0
    ratio = torch.tensor(clip_norm, dtype=torch.float32) / (torch.tensor(norm, dtype=torch.float32) + NORM_EPS)
    return min(1.0, float(ratio))


class SharedNumbers:
    """Numbers that ranks share once a step. A rank's row holds the sums of squares of its tiles, by block, a stop flag, and the
    losses of its micro-batches. All ranks add them in the order of a single process."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._n_numbers, self._n_micro_batches = plan.shared_numbers(), plan.semantics.n_micro_batches
        self._tiles = [list(self._tiles_of(rank)) for rank in range(ranks.n)]  # by rank and block: the parameter of each tile
        self.tiles = self._tiles[ranks.rank]  # of this rank
        assert all(sum(map(len, tiles)) + self._n_micro_batches + 1 <= self._n_numbers for tiles in self._tiles)
        self._row = torch.zeros(self._n_numbers, dtype=torch.float64)

    def _tiles_of(self, rank: int) -> Iterator[list[Parameter]]:
        """Parameter of each tile of a rank, by block."""
        for b, block in enumerate(self._plan.workload.blocks):
            offsets, cuts = block.offsets(owned_only=True)[0], block.cuts(self._plan.semantics.n_pieces)
            n, of_block = self._plan.part_elements(b), list[Parameter]()
            for p in block.parameters:
                for cut in cuts.get(p.name, []):  # a tied weight is counted with its owner
                    if (offsets[p.name] + cut.start) // n == rank:
                        of_block += [p] * -(-len(cut) // NORM_TILE_ELEMENTS)
            yield of_block

    def share(
        self, rows: torch.Tensor, squares: Mapping[int, torch.Tensor], losses: Sequence[float], is_asked: bool
    ) -> tuple[list[tuple[Parameter, float]], list[float], bool]:
        """Share this rank's `squares` (by block), losses and stop request. Return the sum of squares of each parameter, the loss of
        each micro-batch in order, and rank 0's stop request. `rows`: fp64 memory for the rows of all ranks."""
        n = self._n_micro_batches
        parts = [squares[b][: len(tiles)] for b, tiles in enumerate(self.tiles) if tiles]
        if parts:  # other ranks may own all of the small adapters
            torch.cat(parts, out=self._row[: sum(map(len, self.tiles))])
        self._row[-n:] = torch.tensor(losses, dtype=torch.float64)
        self._row[-n - 1] = is_asked
        rows = rows[: self._ranks.n * self._n_numbers].view(self._ranks.n, self._n_numbers)
        self._ranks.share(self._row, rows)
        squares_of: dict[Parameter, list[float]] = {}
        numbers = [iter(row) for row in rows.tolist()]
        for tiles_by_rank in zip(*self._tiles, strict=True):
            for rank, tiles in enumerate(tiles_by_rank):
                for p in tiles:
                    squares_of.setdefault(p, []).append(next(numbers[rank]))
        sums = [(p, added(squares)) for p, squares in squares_of.items()]
        return sums, rows[:, -n:].flatten().tolist(), bool(rows[0, -n - 1])
