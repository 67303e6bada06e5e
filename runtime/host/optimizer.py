"""An optimizer step on flat parameters: masters and moments, the host's gradient, and tasks that workers share.

A chunk's bits do not depend on where it lies: a kernel sees the same elements in the same places as if it were given the parameter
whole. A task is some chunks of one parameter, and needs nothing but a thread's own scratch memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, Kernel, compiled_kernel
from runtime.errors import PlanError
from runtime.plan.optimizer import AdamW, Hyperparameters

from . import chunks
from .chunks import Scratch
from .rounding import TURN, Drawn, group_bytes, packed, signed

if TYPE_CHECKING:
    from . import lean

TASK_ELEMENTS = chunks.TASK_CHUNKS * chunks.CHUNK_ELEMENTS
PROBE_ELEMENTS = 2**16 + 27  # that a device's kernel is held to the host's bits on
WIDTH = 4  # elements of a thread of `adamw.cu`
MOST_BLOCKS = 2**14  # of a kernel, whose threads go on to more elements

T = TypeVar("T")
Task = Callable[[Scratch], None]


@dataclass(frozen=True, slots=True)
class Master:
    """A flat master: fp32 or bf16; or, with a `remainder`, an fp32 one in two halves: the bf16 compute weight as it is uploaded,
    and what this lacks, as int16. With weights rounded half up the difference of the bits always fits. One of 24 bits is an fp32
    number whose last eight are zero: of its remainder int8 holds the first eight."""

    weight: torch.Tensor
    remainder: torch.Tensor | None = None

    def whole(self, part: slice = slice(None)) -> torch.Tensor:
        """In its dtype, to be read only: it may be a copy."""
        if self.remainder is None:
            return self.weight[part]
        weight, remainder = self.weight[part], self.remainder[part]
        wide = torch.empty_like(weight, dtype=torch.float32)
        shift = 8 * (remainder.itemsize == 1)
        for at in range(0, wide.numel(), chunks.CHUNK_ELEMENTS):  # or the bits would be a second copy
            one = slice(at, at + chunks.CHUNK_ELEMENTS)
            bits = torch.empty_like(wide[one], dtype=torch.int32)
            chunks.join(weight[one], remainder[one].short() << shift, wide[one], wide.view(torch.int32)[one], bits)
        return wide

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same, one piece after another: put together whole, a split master would be a second one."""
        return (self.whole(slice(at, at + chunks.UPDATE_ELEMENTS)) for at in range(0, self.weight.numel(), chunks.UPDATE_ELEMENTS))

    def put(self, part: slice, given: torch.Tensor) -> None:
        """Store numbers of any dtype. bf16 is rounded half up: ties away from zero, NaN stays NaN. That keeps a split into a bf16
        weight and a 16-bit remainder exact, which rounding to even does not. Masters of 24 bits are rounded so, too."""
        if self.weight.dtype is torch.float32:
            self.weight[part] = given
            return
        wide = given.to(torch.float32, copy=True)
        wide_bits, weight_bits = wide.view(torch.int32), self.weight[part].view(torch.int16)
        if self.remainder is not None and self.remainder.dtype is torch.int8:
            wide_bits.copy_(torch.where(wide.isnan(), wide_bits, wide_bits + 0x80 & ~0xFF))
            lacks = torch.empty_like(weight_bits)
            chunks.cut(wide, wide_bits, weight_bits, lacks)
            self.remainder[part] = lacks >> 8
        elif self.remainder is not None:
            chunks.cut(wide, wide_bits, weight_bits, self.remainder[part])
        else:
            chunks.round_up_half(wide_bits, chunks.nan_of(wide), weight_bits)


@dataclass(frozen=True, slots=True)
class ParamState:
    """The training state of one parameter, flat."""

    master: Master
    moments: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept, in the order of a slot of `state`."""
        of_master = [self.master.weight] if self.master.remainder is None else [self.master.weight, self.master.remainder]
        return [*of_master, *self.moments]


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """A parameter's gradient: flat parts to be added, and the dtype to which their sum is rounded.

    It is made chunk by chunk where it is used: whole, the gradient of a large vocabulary would be gigabytes that no plan counts.
    """

    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.dtype in (torch.bfloat16, torch.float32)
        assert len(self.parts) == 1 or self.parts[0].dtype is torch.float32, "sums of bf16 parts would be rounded at every addition"

    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def is_rounded(self) -> bool:
        """Whether rounding the sum may change it."""
        return self.dtype is torch.bfloat16 and self.parts[0].dtype is not torch.bfloat16

    def rounded(self, scratch: Scratch) -> torch.Tensor | None:
        """Scratch of the dtype to which the sum is rounded; None where that changes nothing."""
        return scratch.rounded if self.is_rounded else None


def summed(gradient: torch.Tensor | SummedGradient) -> SummedGradient:
    """A gradient that is one tensor, as a sum."""
    return gradient if isinstance(gradient, SummedGradient) else SummedGradient((gradient,), gradient.dtype)


def tasks_of(work: Callable[[int, int, Scratch], T], end: int, start: int = 0) -> list[Callable[[Scratch], T]]:
    """Tasks that share the elements start .. end - 1 of a parameter; `work` is given those of one task."""
    return [partial(work, at, min(at + TASK_ELEMENTS, end)) for at in range(start, end, TASK_ELEMENTS)]


def add_tasks(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> list[Task]:
    """Add a flat gradient of any dtype to the running fp32 sum, which begins at zero with the first."""

    def work(start: int, end: int, own: Scratch) -> None:
        chunks.run_add(start, end, chunks.UPDATE_ELEMENTS, total, part, is_first, own.gradient)

    return tasks_of(work, total.numel())


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an optimizer on one flat parameter: in place, or `start_from` what is elsewhere and stays as it is.

    The gradient is multiplied by `factor` in scratch memory. `n_updates` counts from 1 (bias correction). `drawn`: what rounds the
    state of an optimizer that keeps less, by the `rule` of its arithmetic (`lean.py`); None: AdamW to the bits of torch's.
    """

    to: ParamState
    gradient: SummedGradient
    factor: float
    n_updates: int
    settings: Hyperparameters
    start_from: ParamState | None = None
    rule: str = "adamw"
    drawn: Drawn | None = None

    def run(self, start: int, end: int, chunk: int, own: Scratch) -> None:
        """Elements start .. end - 1, `chunk` at a time."""
        before, weight = [] if self.start_from is None else self.start_from.tensors, self.to.master.weight
        weight_bits = weight.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)
        chunks.run_update(
            start, end, chunk, self.to.tensors, weight_bits, self.to.master.remainder is not None, before,
            list(self.gradient.parts), self.gradient.rounded(own), self.factor, self.settings.numbers, float(self.n_updates),
            [own.wide, own.wide.view(torch.int32), own.bits, own.gradient], [[own.wide] for _ in (0, 1, *self.to.moments)],
        )  # fmt: skip

    def tasks(self) -> list[Task]:
        """The host's, to be shared."""
        if (less := self._less()) is not None:
            return tasks_of(lambda start, end, own: less.run(start, end), self.gradient.numel())
        return tasks_of(lambda start, end, own: self.run(start, end, chunks.UPDATE_ELEMENTS, own), self.gradient.numel())

    def _less(self) -> "lean.Update | None":
        """The same for an optimizer that keeps less."""
        if self.drawn is None:
            return None
        from . import lean  # and with it numba, which no other run needs

        parts = tuple(map(lean.bits_of, self.gradient.parts))
        states = (self.to, self.start_from or self.to)
        to, before = (lean.state_of(of.master.weight, of.master.remainder, of.moments) for of in states)
        by = lean.scalars(self.rule, self.settings.numbers, self.n_updates)
        return lean.Update(self.rule, self.drawn, by, to, before, parts, self.gradient.is_rounded, self.factor)

    def on_device(self, kernel: Kernel | None) -> None:
        """All of it by a device's kernel; without one by a processor in its place, on this thread."""
        (gradient,), of, n_elements = self.gradient.parts, self.to.master, self.gradient.numel()
        if kernel is None and (less := self._less()) is not None:
            return less.run(0, n_elements)
        if kernel is None:
            chunk = min(chunks.UPDATE_ELEMENTS, n_elements)
            return self.run(0, n_elements, chunk, Scratch(chunk, chunk))
        by, keys = factors(self.settings.numbers, self.n_updates), list[int]()
        if self.drawn is not None:
            from . import lean

            assert self.drawn.first == 0, "turns of a kernel begin with the parameter"
            by = lean.scalars(self.rule, self.settings.numbers, self.n_updates).tolist()
            keys = [signed(key) for key in self.drawn.keys]
        moments = self.to.moments[0], self.to.moments[-1]
        tensors = [of.weight, of.weight if of.remainder is None else of.remainder, *moments, gradient]
        most = [group_bytes(MOST_ELEMENTS) if tensor.dtype is torch.uint8 else MOST_ELEMENTS for tensor in tensors]
        for number, parts in enumerate(zip(*map(torch.Tensor.split, tensors, most), strict=True)):
            n, turn = parts[0].numel(), [number * (MOST_ELEMENTS // TURN)] if keys else []
            per_thread = 1 if keys else WIDTH
            kernel(
                (min(MOST_BLOCKS, -(-n // (THREADS * per_thread))), 1, 1),
                (THREADS, 1, 1),
                [*parts, n, *turn, *keys, self.factor, *by],
            )
        return None


def factors(numbers: list[float], n_updates: int) -> list[float]:
    """What a device's AdamW (`adamw.cu`) multiplies by, divides by and adds in one update, in the order of its arguments: doubles,
    each rounded to fp32 where it is used. `n_updates` counts from 1, as the fused kernel's step does."""
    lr, beta1, beta2, weight_decay, eps = numbers
    # decay; towards, of the first moment; beta2; of the square; correction, of the second moment's root; eps; rate
    corrections = 1 - beta1**n_updates, math.sqrt(1 - beta2**n_updates)
    return [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, corrections[1], eps, -lr / corrections[0]]


class Kept(NamedTuple):
    """What a kernel of a device is made for. `moments`: of `lean.py`, their dtype, uint8 of groups; None: torch's AdamW."""

    weight: torch.dtype
    is_split: bool
    gradient: torch.dtype
    moments: torch.dtype | None = None
    rule: str = "adamw"
    is_drawn: bool = False  # a bf16 master is rounded stochastically, or a split one to 24 bits

    def compiled(self, by: Callable[..., Kernel]) -> Kernel:
        """The kernel, by what compiles one of a file, a name and definitions."""
        elements = {"WEIGHT": ELEMENT[self.weight], "GRADIENT": ELEMENT[self.gradient]}
        defined: dict[str, str | int] = {**elements, "IS_SPLIT": int(self.is_split)}
        if self.moments is None:
            return by("adamw.cu", "update", **defined)
        defined |= {"REMAINDER": "signed char" if self.is_split and self.is_drawn else "short"}
        defined |= {"MOMENT": ELEMENT[self.moments], "IS_LION": int(self.rule == "lion"), "IS_DRAWN": int(self.is_drawn)}
        return by("lean.cu", "update_less", **defined)


@lru_cache(maxsize=8)
def device_kernel(device: torch.device, kept: Kept) -> Kernel | None:
    """What updates there; None: a processor does it. PlanError for a GPU that does not give the host's bits."""
    if device.type == "cpu":
        return None
    try:
        kernel = kept.compiled(partial(compiled_kernel, device=device))
        if gives_the_hosts_bits(kernel, device, kept):
            return kernel
        cause = None
    except (AttributeError, OSError, RuntimeError) as error:  # whatever a compiler makes of its machine
        cause = error
    raise PlanError(
        f"{kept.rule} on {device.type} does not give the host's bits here; plan with --policy FILE, one with empty device_blocks"
    ) from cause


def gives_the_hosts_bits(kernel: Kernel, device: torch.device, kept: Kept) -> bool:
    """Whether a device's kernel does, on numbers of every size."""
    weight, is_split, gradient, moments, rule, is_drawn = kept
    keys = None if moments is None else Drawn((2**32 - 5, 6, 7), is_drawn)
    generator = torch.Generator().manual_seed(0)

    def drawn(spread: int) -> torch.Tensor:
        exponents = torch.randint(-spread, spread, (PROBE_ELEMENTS,), generator=generator)
        return torch.randn(PROBE_ELEMENTS, generator=generator) * 10.0**exponents

    for settings in (AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1), AdamW(lr=0.1, weight_decay=0.0)):
        of_remainder = torch.int8 if is_drawn else torch.int16
        remainder = torch.zeros(PROBE_ELEMENTS, dtype=of_remainder) if is_split else None
        of_moments = (drawn(6), drawn(6).square())[: 2 - (rule == "lion")]
        if moments is torch.uint8:
            of_moments = tuple(torch.from_numpy(packed(x.numpy(), is_root=i == 1)) for i, x in enumerate(of_moments))
        of_moments = tuple(x.to(moments or torch.float32) for x in of_moments)
        host = ParamState(Master(torch.zeros(PROBE_ELEMENTS, dtype=weight), remainder), of_moments)
        host.master.put(slice(None), drawn(2))
        of_weight, *of_others = (tensor.clone().to(device) for tensor in host.tensors)
        there = ParamState(Master(of_weight, of_others[0] if is_split else None), tuple(of_others[-len(of_moments) :]))
        for n_updates, factor in ((1, 1.0), (2, 0.37), (1000, 1.0)):
            given = drawn(8).to(gradient)
            of_step = factor, n_updates, settings, None, rule, keys
            Step(host, summed(given), *of_step).on_device(None)
            Step(there, summed(given.to(device)), *of_step).on_device(kernel)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(there.tensors, host.tensors, strict=True)):
            return False
    return True
