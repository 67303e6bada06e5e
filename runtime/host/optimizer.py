"""How does a gradient change the weights?

All work is on flat fp32 or bf16 views of one parameter, in chunks whose bits do not depend on where the chunk lies: the kernels
see the same elements in the same places as if they were given the parameter whole. Tasks are what workers share: a task is some
chunks of one parameter, and needs nothing but a thread's own scratch memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.plan.optimizer import AdamW as AdamW

from .chunks import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from .chunks import UPDATE_ELEMENTS, cut, halves, nan_of, round_up_half, run_adamw, run_add, run_squares
from .chunks import Scratch as Scratch

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
TASK_ELEMENTS = 16 * CHUNK_ELEMENTS  # about a millisecond: far above a hand-over, and short enough to share evenly

Task = Callable[[Scratch], None]


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """A parameter's gradient as it lies on the host: flat parts to be added, and the dtype to which their sum is rounded.

    It is made chunk by chunk where it is used: whole, the gradient of a large vocabulary would be gigabytes that no plan counts.
    """

    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        return self.parts[0].numel()


def _ranges(n_elements: int, first: int = 0) -> list[tuple[int, int]]:
    """The elements of each task, from the first one on."""
    return [(at, min(at + TASK_ELEMENTS, n_elements)) for at in range(first, n_elements, TASK_ELEMENTS)]


def _rounded(gradient: SummedGradient, scratch: Scratch) -> torch.Tensor | None:
    """Scratch of the dtype to which the gradient's sum is rounded; None where that changes nothing."""
    assert gradient.dtype in (torch.bfloat16, torch.float32)
    found = gradient.parts[0].dtype
    assert len(gradient.parts) == 1 or found is torch.float32, "sums of bf16 parts would be rounded at every addition"
    return scratch.rounded if gradient.dtype is torch.bfloat16 and found is not torch.bfloat16 else None


def squares_tasks(gradient: SummedGradient, cuts: Sequence[range] | None = None) -> list[Callable[[Scratch], list[float]]]:
    """For the sum of squares of a flat gradient: the fp32 sums of its chunks, to be added in fp64, in order. In each of the ranges
    `cuts` chunks begin anew."""

    def task(start: int, end: int) -> Callable[[Scratch], list[float]]:
        return lambda own: run_squares(start, end, CHUNK_ELEMENTS, list(gradient.parts), _rounded(gradient, own), own.gradient)

    ranges = [range(gradient.numel())] if cuts is None else cuts
    return [task(start, end) for cut in ranges for start, end in _ranges(cut.stop, cut.start)]


def added(sums: Iterable[float]) -> float:
    """The sums of a tensor's chunks, or of a model's tensors, in order; not `sum`, which compensates from Python 3.12 on."""
    total = 0.0
    for square in sums:
        total += square
    return total


def sum_of_squares(
    gradient: torch.Tensor | SummedGradient, scratch: Scratch | None = None, cuts: Sequence[range] | None = None
) -> float:
    """Sum of squares of a flat gradient: fp32 sums over fixed chunks, the chunk sums added in fp64. All on this thread."""
    own = scratch or Scratch()
    return added(square for task in squares_tasks(_summed(gradient), cuts) for square in task(own))


def add_tasks(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> list[Task]:
    """Add a flat gradient of any dtype to the running fp32 sum, which begins at zero with the first."""

    def task(start: int, end: int) -> Task:
        return lambda own: run_add(start, end, UPDATE_ELEMENTS, total, part, is_first, own.gradient)

    return [task(start, end) for start, end in _ranges(total.numel())]


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """`min(1, clip_norm / (norm + 1e-6))` in fp32; 1 where nothing is clipped."""
    if clip_norm is None:
        return 1.0
    ratio = torch.tensor(clip_norm, dtype=torch.float32) / (torch.tensor(norm, dtype=torch.float32) + NORM_EPS)
    return min(1.0, float(ratio))


def round_half_up(wide: torch.Tensor, out: torch.Tensor) -> None:
    """Round fp32 to bf16, ties away from zero, into `out`; NaN stays NaN.

    Half-up keeps a split into a bf16 weight and a 16-bit remainder exact, which rounding to even does not.
    """
    bits = torch.empty_like(wide, dtype=torch.int32)
    round_up_half(wide.view(torch.int32), bits, halves(), nan_of(wide), out.view(torch.int16))


@dataclass(frozen=True, slots=True)
class SplitMaster:
    """A flat fp32 master in two halves: the bf16 compute weight as it is uploaded, and what it lacks, as int16.

    With weights rounded half up the difference of the bits always fits: the halves are the master, to the last bit.
    """

    weight: torch.Tensor
    remainder: torch.Tensor

    def numel(self) -> int:
        return self.weight.numel()

    def joined(self, part: slice) -> torch.Tensor:
        """The master, fp32, as a copy."""
        wide = self.weight[part].float()
        bits = wide.view(torch.int32)
        for at in range(0, wide.numel(), CHUNK_ELEMENTS):  # or torch would widen all remainders at once
            bits[at : at + CHUNK_ELEMENTS] += self.remainder[part][at : at + CHUNK_ELEMENTS]
        return wide

    def cut(self, part: slice, wide: torch.Tensor) -> None:
        """Store an fp32 master."""
        bits = torch.empty_like(wide, dtype=torch.int32)
        cut(wide, wide.view(torch.int32), bits, halves(), self.weight[part].view(torch.int16), self.remainder[part])


def pieces_of(master: torch.Tensor | SplitMaster) -> Iterator[torch.Tensor]:
    """A flat master in pieces, one after another: whole, those halves would be a second master."""
    for at in range(0, master.numel(), UPDATE_ELEMENTS):
        part = slice(at, at + UPDATE_ELEMENTS)
        yield master.joined(part) if isinstance(master, SplitMaster) else master[part]


@dataclass(frozen=True, slots=True)
class ParamState:
    """The training state of one parameter, flat: its master and its moments (fp32)."""

    master: torch.Tensor | SplitMaster
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def adamw_tasks(
    to: ParamState, gradient: SummedGradient, factor: float, n_updates: int, settings: AdamW, start_from: ParamState | None = None
) -> list[Task]:
    """One AdamW step on one flat parameter: in place, or `start_from` what lies elsewhere and stays as it is.

    `gradient` (any dtype) is widened and multiplied by `factor` in scratch memory. The master is fp32, or bf16 and then
    rounded half up, or split. `n_updates` counts from 1 (bias correction).
    """
    master, remainder = _halves(to.master)
    master_bits = master.view(torch.int32 if master.dtype is torch.float32 else torch.int16)
    before: list[torch.Tensor] = []
    if start_from is not None:
        before_master, before_remainder = _halves(start_from.master)
        before = [before_master, start_from.exp_avg, start_from.exp_avg_sq]
        before += [] if before_remainder is None else [before_remainder]

    def task(start: int, end: int) -> Task:
        def work(own: Scratch) -> None:
            run_adamw(
                start, end, UPDATE_ELEMENTS, master, master_bits, remainder, to.exp_avg, to.exp_avg_sq, before,
                list(gradient.parts), _rounded(gradient, own), factor, torch.tensor(float(n_updates)),
                settings.lr, settings.beta1, settings.beta2, settings.weight_decay, settings.eps,
                own.wide, own.wide_bits, own.bits, own.gradient, [[own.wide], [own.wide], [own.wide], [own.wide]],
            )  # fmt: skip

        return work

    return [task(start, end) for start, end in _ranges(master.numel())]


def adamw_(
    to: ParamState,
    gradient: torch.Tensor | SummedGradient,
    factor: float,
    n_updates: int,
    settings: AdamW,
    start_from: ParamState | None = None,
    scratch: Scratch | None = None,
) -> None:
    """The same, all on this thread."""
    own = scratch or Scratch()
    for task in adamw_tasks(to, _summed(gradient), factor, n_updates, settings, start_from):
        task(own)


def _halves(master: torch.Tensor | SplitMaster) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (master.weight, master.remainder) if isinstance(master, SplitMaster) else (master, None)


def _summed(gradient: torch.Tensor | SummedGradient) -> SummedGradient:
    return gradient if isinstance(gradient, SummedGradient) else SummedGradient((gradient,), gradient.dtype)
