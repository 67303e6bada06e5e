"""Optimizer step on a flat parameter: tasks for the threads of the host, or a kernel on the device.

A task updates some chunks of one parameter and needs only the scratch memory of its thread. Results do not depend on the split,
because a kernel sees each element at its position in the whole parameter.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import torch

from penstock.runtime.compiled import IS_COMPILED
from penstock.runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, Kernel, compiled_kernel
from penstock.runtime.errors import PlanError
from penstock.runtime.plan.optimizer import AdamW

from . import chunks
from .chunks import Scratch
from .param_state import Master as Master
from .param_state import ParamState as ParamState
from .param_state import SummedGradient as SummedGradient
from .param_state import UpdateArguments
from .rounding import TURN, Drawn, group_bytes, packed, signed

if IS_COMPILED:
    from . import loops

TASK_ELEMENTS = chunks.TASK_CHUNKS * chunks.CHUNK_ELEMENTS
PROBE_ELEMENTS = 2**16 + 24  # on which a device kernel is compared with the host
WIDTH = 4  # elements per thread of `adamw.cu`
VECTOR_ELEMENTS = 16  # a multiple of the vector width of torch's AdamW, which computes remaining elements by other operations
MOST_BLOCKS = 2**14  # of a launch; threads loop over more elements

T = TypeVar("T")
Task = Callable[[Scratch], None]
Work = Callable[[int, int, Scratch], None]  # on elements start .. end - 1


def summed(gradient: torch.Tensor | SummedGradient) -> SummedGradient:
    """Wrap a single tensor as a sum."""
    return gradient if isinstance(gradient, SummedGradient) else SummedGradient((gradient,), gradient.dtype)


def tasks_of(work: Callable[[int, int, Scratch], T], end: int, start: int = 0) -> list[Callable[[Scratch], T]]:
    """Split elements start .. end - 1 of a parameter into tasks that call `work(first, last + 1, scratch)`."""
    return [partial(work, at, min(at + TASK_ELEMENTS, end)) for at in range(start, end, TASK_ELEMENTS)]


def add_tasks(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> list[Task]:
    """Tasks that add a flat gradient of any dtype to an fp32 sum; the first gradient is added to zero."""
    add = loops.add_part if compiled_add(part.dtype) else chunks.add
    return tasks_of(lambda start, end, own: add(total, part, is_first, start, end), total.numel())


class Step(UpdateArguments):
    """Step of an optimizer on one flat parameter, as host tasks or by a device kernel."""

    def tasks(self) -> list[Task]:
        """Tasks for the threads of the host."""
        n = self.gradient.numel()
        n_compiled = (n if self.drawn is not None else n - n % VECTOR_ELEMENTS) if compiled_update(self.kept) else 0
        compiled = tasks_of(loops.update_of(self), n_compiled) if n_compiled else []
        return compiled + tasks_of(lambda start, end, own: chunks.update(self, start, end), n, n_compiled)

    @property
    def kept(self) -> "Kept":
        """Layout and rule of its kernel."""
        of, gradient = self.to.master, self.gradient.parts[0].dtype
        kept = Kept(of.weight.dtype, of.remainder is not None, gradient)
        return kept if self.drawn is None else Kept(*kept[:3], self.to.moments[0].dtype, self.rule, self.drawn.is_master_drawn)

    def on_device(self, kernel: Kernel | None) -> None:
        """Update the whole parameter by a device kernel, or without one by the host tasks on this thread."""
        (gradient,), of, by, keys = self.gradient.parts, self.to.master, self.scalars, list[int]()
        if kernel is None:
            own = Scratch()
            for task in self.tasks():
                task(own)
            return
        if self.drawn is not None:
            assert self.drawn.first == 0, "turns of a kernel begin with the parameter"
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


class Kept(NamedTuple):
    """Layout and rule for which a host or device kernel is compiled. `moments`: their dtype (uint8: int8 groups), or None for
    torch's AdamW with fp32 moments."""

    weight: torch.dtype
    is_split: bool
    gradient: torch.dtype
    moments: torch.dtype | None = None
    rule: str = "adamw"
    is_drawn: bool = False  # a bf16 or 24-bit master is rounded stochastically

    def compiled(self, by: Callable[..., Kernel]) -> Kernel:
        """Compile the CUDA kernel for this layout with `by(file, name, **defines)`."""
        elements = {"WEIGHT": ELEMENT[self.weight], "GRADIENT": ELEMENT[self.gradient]}
        defined: dict[str, str | int] = {**elements, "IS_SPLIT": int(self.is_split)}
        if self.moments is None:
            return by("adamw.cu", "update", **defined)
        defined |= {"REMAINDER": "signed char" if self.is_split and self.is_drawn else "short"}
        defined |= {"MOMENT": ELEMENT[self.moments], "IS_LION": int(self.rule == "lion"), "IS_DRAWN": int(self.is_drawn)}
        return by("lean.cu", "update_less", **defined)


# -- kernels of the host -------------------------------------------------------------------------------------------------


@cache
def compiled_update(kept: Kept) -> bool:
    """True if the compiled host kernel for this layout is bitwise identical to the reference; else warn with the reason."""
    return _is_used(f"{kept.rule} on {kept}", lambda: list(_differences(kept)))


@cache
def compiled_squares(dtype: torch.dtype) -> bool:
    def differences() -> list[str]:
        x, own = numbers_of_every_size(3 * chunks.CHUNK_ELEMENTS // 2 + 77, 8, 0).to(dtype), Scratch()
        asked = [SummedGradient((x[:n],), torch.bfloat16) for n in (len(x), 77, 300)]
        sums = [[kernel(of, 0, of.numel(), own) for of in asked] for kernel in (loops.squares_of, chunks.squares)]
        return [] if sums[0] == sums[1] else ["a sum"]

    return _is_used(f"sum of squares of {dtype}", differences)


@cache
def compiled_add(dtype: torch.dtype) -> bool:
    def differences() -> list[str]:
        x, (a, b) = numbers_of_every_size(1000, 8, 0), torch.zeros(2, 1000)
        for is_first in (True, False):
            loops.add_part(a, x.to(dtype), is_first, 0, 1000)
            chunks.add(b, x.to(dtype), is_first, 0, 1000)
        return [] if torch.equal(a, b) else ["a sum"]

    return _is_used(f"sum of {dtype}", differences)


def _is_used(name: str, differences: Callable[[], list[str]]) -> bool:
    if not IS_COMPILED:
        _tell_once("numba is not installed")
        return False
    if found := differences():
        _tell_once(f"the compiled {name} differs from its definition here ({found[0]})")
    return not found


@cache
def _tell_once(why: str) -> None:
    warnings.warn(f"the host's optimizer runs uncompiled, several times slower: {why}", RuntimeWarning, stacklevel=2)


def numbers_of_every_size(n: int, spread: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, (n,), generator=generator)
    return torch.randn(n, generator=generator) * 10.0**exponents


def _probe_state(kept: Kept, n: int, seed: int) -> ParamState:
    """State of the kernel's layout, with numbers of all magnitudes."""
    wide = (numbers_of_every_size(n, 6, seed), numbers_of_every_size(n, 6, seed + 9).square())[: 2 - (kept.rule == "lion")]
    if kept.moments is torch.uint8:
        wide = tuple(torch.from_numpy(packed(x.numpy(), is_root=i == 1)) for i, x in enumerate(wide))
    remainder = torch.zeros(n, dtype=torch.int8 if kept.is_drawn else torch.int16) if kept.is_split else None
    master = Master(torch.zeros(n, dtype=kept.weight), remainder)
    master.put(slice(None), numbers_of_every_size(n, 2, seed))
    return ParamState(master, tuple(x.to(kept.moments or torch.float32) for x in wide))


def _differences(kept: Kept, n: int = 4096 + 5 * VECTOR_ELEMENTS) -> Iterator[str]:
    """Tensors in which the compiled kernel and the reference differ after steps on numbers of all magnitudes."""
    drawn = None if kept.moments is None else Drawn((2**32 - 5, 6, 7), kept.is_drawn, TURN - 128)
    for seed, settings in enumerate((AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1))):
        states = [_probe_state(kept, n, seed) for _ in range(2)]
        for n_updates, factor in ((1, 1.0), (1000, 0.37)):
            gradient = summed(numbers_of_every_size(n, 8, n_updates).to(kept.gradient))
            one, other = (Step(state, gradient, factor, n_updates, settings, None, kept.rule, drawn) for state in states)
            loops.update_of(one)(0, n, Scratch())
            chunks.update(other, 0, n)
        names = ("weight", *["remainder"] * kept.is_split, "first moment", "second moment")
        for name, a, b in zip(names, states[0].tensors, states[1].tensors, strict=False):
            if not torch.equal(a, b):
                yield f"{name}, {settings}"


# -- kernels of a device -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def device_kernel(device: torch.device, kept: Kept) -> Kernel | None:
    """Update kernel of a device; None for a CPU. PlanError if a GPU's bits differ from the host's."""
    if device.type == "cpu":
        return None
    try:
        kernel = kept.compiled(partial(compiled_kernel, device=device))
        if gives_the_hosts_bits(kernel, device, kept):
            return kernel
        cause = None
    except (AttributeError, OSError, RuntimeError) as error:  # of torch's compiler, NVRTC or the driver
        cause = error
    raise PlanError(
        f"{kept.rule} on {device.type} does not give the host's bits here; plan with --policy FILE, one with empty device_blocks"
    ) from cause


def gives_the_hosts_bits(kernel: Kernel, device: torch.device, kept: Kept) -> bool:
    """True if a device kernel is bitwise identical to the host on numbers of all magnitudes."""
    keys = None if kept.moments is None else Drawn((2**32 - 5, 6, 7), kept.is_drawn)
    of_settings = AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1), AdamW(lr=0.1, weight_decay=0.0)
    for seed, settings in enumerate(of_settings):
        host = _probe_state(kept, PROBE_ELEMENTS, seed)
        of_weight, *of_others = (tensor.clone().to(device) for tensor in host.tensors)
        master = Master(of_weight, of_others[0] if kept.is_split else None)
        there = ParamState(master, tuple(of_others[-len(host.moments) :]))
        for n_updates, factor in ((1, 1.0), (2, 0.37), (1000, 1.0)):
            given = numbers_of_every_size(PROBE_ELEMENTS, 8, 100 * seed + n_updates).to(kept.gradient)
            of_step = factor, n_updates, settings, None, kept.rule, keys
            Step(host, summed(given), *of_step).on_device(None)
            Step(there, summed(given.to(device)), *of_step).on_device(kernel)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(there.tensors, host.tensors, strict=True)):
            return False
    return True
