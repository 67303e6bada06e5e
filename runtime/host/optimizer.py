"""Optimizer step on a flat parameter: tasks for the threads of the host, or a kernel on the device.

A task updates some chunks of one parameter and needs only the scratch memory of its thread. Results do not depend on the split,
because a kernel sees each element at its position in the whole parameter.
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import torch

from penstock.runtime.compiled import IS_COMPILED
from penstock.runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, Kernel, compiled_kernel
from penstock.runtime.errors import PlanError, SlowKernelWarning
from penstock.runtime.plan.optimizer import RULES, AdamW
from penstock.runtime.units import on_one_line

from . import chunks
from .chunks import Scratch
from .param_state import Master as Master
from .param_state import ParamState as ParamState
from .param_state import SummedGradient as SummedGradient
from .param_state import UpdateArguments
from .rounding import TURN, StochasticRounding, group_bytes, packed, signed

if IS_COMPILED:
    from . import compiled_loops

TASK_ELEMENTS = chunks.TASK_CHUNKS * chunks.CHUNK_ELEMENTS
PROBE_ELEMENTS = 2**16 + 24  # numbers for the comparison of a device kernel with the host
WIDTH = 4  # elements per thread of `adamw.cu`
VECTOR_ELEMENTS = 16  # a multiple of the vector width of torch's AdamW, which computes remaining elements by other operations
CPU = torch.device("cpu")
MOST_BLOCKS = 2**14  # of a launch; threads loop over more elements

T = TypeVar("T")
Task = Callable[[Scratch], None]
Work = Callable[[int, int, Scratch], None]  # on elements start .. end - 1


def summed(gradient: torch.Tensor | SummedGradient) -> SummedGradient:
    """Wrap a single tensor as a sum."""
    return gradient if isinstance(gradient, SummedGradient) else SummedGradient((gradient,), gradient.dtype)


def tasks_of(work: Callable[[int, int, Scratch], T], end: int, start: int = 0) -> list[Callable[[Scratch], T]]:
    """Split elements start .. end - 1 of a parameter into tasks that call `work(first, last + 1, scratch)`."""
    return [partial(work, first, min(first + TASK_ELEMENTS, end)) for first in range(start, end, TASK_ELEMENTS)]


def add_tasks(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> list[Task]:
    """Tasks that add a flat gradient of any dtype to an fp32 sum; the first gradient is added to zero."""
    add = add_kernel(part.dtype)
    return tasks_of(lambda start, end, scratch: add(total, part, is_first, start, end), total.numel())


class Step(UpdateArguments):
    """Step of an optimizer on one flat parameter, as host tasks or by a device kernel."""

    def tasks(self) -> list[Task]:
        return update_kernel(self.layout)(self)

    @property
    def layout(self) -> "KernelLayout":
        master, is_split = self.target.master, self.target.master.remainder is not None
        layout = KernelLayout(master.weight.dtype, is_split, self.gradient.parts[0].dtype)
        if self.rounding is None:
            return layout
        return KernelLayout(*layout[:3], self.target.moments[0].dtype, self.rule, self.rounding.is_master_stochastic)

    def on_device(self, kernel: Kernel | None) -> None:
        """Update the whole parameter by a device kernel, or without one by the host tasks on this thread."""
        (gradient,), master, scalars, keys = self.gradient.parts, self.target.master, chunks.scalars_of(self), list[int]()
        if kernel is None:
            scratch = Scratch()
            for task in self.tasks():
                task(scratch)
            return
        if self.rounding is not None:
            assert self.rounding.first == 0, "turns of a kernel begin with the parameter"
            keys = [signed(key) for key in self.rounding.keys]
        moments = self.target.moments[0], self.target.moments[-1]
        tensors = [master.weight, master.weight if master.remainder is None else master.remainder, *moments, gradient]
        sizes = [group_bytes(MOST_ELEMENTS) if tensor.dtype is torch.uint8 else MOST_ELEMENTS for tensor in tensors]
        for number, parts in enumerate(zip(*map(torch.Tensor.split, tensors, sizes), strict=True)):
            n, turn = parts[0].numel(), [number * (MOST_ELEMENTS // TURN)] if keys else []
            n_blocks = min(MOST_BLOCKS, -(-n // (THREADS * (1 if keys else WIDTH))))
            kernel((n_blocks, 1, 1), (THREADS, 1, 1), [*parts, n, *turn, *keys, self.factor, *scalars])


class KernelLayout(NamedTuple):
    """Layout and rule of a compiled host or device kernel. `moments`: their dtype (uint8: int8 groups), or None for
    torch's AdamW with fp32 moments."""

    weight: torch.dtype
    is_split: bool
    gradient: torch.dtype
    moments: torch.dtype | None = None
    rule: str = "adamw"
    is_stochastic: bool = False  # a bf16 or 24-bit master is rounded stochastically

    def compiled(self, compile_kernel: Callable[..., Kernel]) -> Kernel:
        """Compile the CUDA kernel for this layout by `compile_kernel(file, name, **defines)`."""
        elements = {"WEIGHT": ELEMENT[self.weight], "GRADIENT": ELEMENT[self.gradient]}
        defined: dict[str, str | int] = {**elements, "IS_SPLIT": int(self.is_split)}
        if self.moments is None:
            return compile_kernel("adamw.cu", "update", **defined)
        defined |= {"REMAINDER": "signed char" if self.is_split and self.is_stochastic else "short"}
        defined |= {"MOMENT": ELEMENT[self.moments], "IS_STOCHASTIC": int(self.is_stochastic)}
        defined |= {f"IS_{rule.upper()}": int(rule == self.rule) for rule in RULES}
        return compile_kernel("low_bit_optim.cu", "update_low_bit", **defined)


# -- table of host kernels: compiled if bitwise identical to the reference on this machine, otherwise the reference ------------


@cache
def update_kernel(layout: KernelLayout) -> Callable[[Step], list[Task]]:
    """Function from a step on this layout to its tasks."""
    is_used = _is_used(f"{layout.rule} on {layout}", lambda: host_differences(layout))
    return _compiled_tasks if is_used else _reference_tasks


def host_differences(layout: KernelLayout, n: int = 4096 + 5 * VECTOR_ELEMENTS) -> list[str]:
    return _differences(layout, n, lambda step: compiled_loops.update_of(step)(0, n, Scratch()), first=TURN - 128)


def _compiled_tasks(step: Step) -> list[Task]:
    n = step.gradient.numel()
    n_compiled = n if step.rounding is not None else n - n % VECTOR_ELEMENTS
    compiled = tasks_of(compiled_loops.update_of(step), n_compiled) if n_compiled else []
    return compiled + _reference_tasks(step, n_compiled)


def _reference_tasks(step: Step, first: int = 0) -> list[Task]:
    return tasks_of(lambda start, end, scratch: chunks.update(step, start, end), step.gradient.numel(), first)


@cache
def squares_kernel(dtype: torch.dtype) -> Callable[[SummedGradient, int, int, Scratch], list[float]]:
    def differences() -> list[str]:
        x, scratch = probe_numbers(3 * chunks.CHUNK_ELEMENTS // 2 + 77, 8, 0).to(dtype), Scratch()
        gradients = [SummedGradient((x[:n],), torch.bfloat16) for n in (len(x), 77, 300)]
        sums = [[kernel(g, 0, g.numel(), scratch) for g in gradients] for kernel in (compiled_loops.squares_of, chunks.squares)]
        return [] if sums[0] == sums[1] else ["a sum"]

    return compiled_loops.squares_of if _is_used(f"sum of squares of {dtype}", differences) else chunks.squares


@cache
def add_kernel(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor, bool, int, int], None]:
    def differences() -> list[str]:
        x, (a, b) = probe_numbers(1000, 8, 0), torch.zeros(2, 1000)
        for is_first in (True, False):
            compiled_loops.add_part(a, x.to(dtype), is_first, 0, 1000)
            chunks.add(b, x.to(dtype), is_first, 0, 1000)
        return [] if torch.equal(a, b) else ["a sum"]

    return compiled_loops.add_part if _is_used(f"sum of {dtype}", differences) else chunks.add


def _is_used(name: str, differences: Callable[[], list[str]]) -> bool:
    """True if a compiled kernel is available and has no differences; else warn with the reason."""
    if not IS_COMPILED:
        _tell_once("numba is not installed")
        return False
    if different := differences():
        _tell_once(f"the compiled {name} differs from the reference here ({different[0]})")
    return not different


@cache
def _tell_once(why: str) -> None:
    warnings.warn(f"the host optimizer runs uncompiled and takes 10 to 60 times as long: {why}", SlowKernelWarning, stacklevel=2)


def probe_numbers(n: int, spread: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, (n,), generator=generator)
    return torch.randn(n, generator=generator) * 10.0**exponents


def _probe_state(layout: KernelLayout, n: int, seed: int) -> ParamState:
    """State of the kernel's layout, with numbers of all magnitudes."""
    wide = (probe_numbers(n, 6, seed), probe_numbers(n, 6, seed + 9).square())[: len(RULES[layout.rule].moments)]
    if layout.moments is torch.uint8:
        wide = tuple(torch.from_numpy(packed(x.numpy(), is_root=i == 1)) for i, x in enumerate(wide))
    remainder = torch.zeros(n, dtype=torch.int8 if layout.is_stochastic else torch.int16) if layout.is_split else None
    master = Master(torch.zeros(n, dtype=layout.weight), remainder)
    master.put(slice(None), probe_numbers(n, 2, seed))
    return ParamState(master, tuple(x.to(layout.moments or torch.float32) for x in wide))


def _differences(
    layout: KernelLayout, n: int, update: Callable[[Step], object], device: torch.device = CPU, first: int = 0
) -> list[str]:
    """Tensors in which an update on the device and the reference differ after steps on `n` numbers of all magnitudes. `first`:
    their position in the parameter."""
    rounding = None if layout.moments is None else StochasticRounding((2**32 - 5, 6, 7), layout.is_stochastic, first)
    names, different = ("weight", *["remainder"] * layout.is_split, "first moment", "second moment"), list[str]()
    all_settings = AdamW(lr=1e-3), AdamW(lr=3e-5, beta1=0.4, beta2=0.99, weight_decay=0.1), AdamW(lr=0.1, weight_decay=0.0)
    for seed, settings in enumerate(all_settings):
        expected = _probe_state(layout, n, seed)
        weight, *tensors = (tensor.clone().to(device) for tensor in expected.tensors)
        master = Master(weight, tensors[0] if layout.is_split else None)
        state = ParamState(master, tuple(tensors[-len(expected.moments) :]))
        for n_updates, factor in ((1, 1.0), (2, 0.37), (1000, 1.0)):
            gradient = probe_numbers(n, 8, 100 * seed + n_updates).to(layout.gradient)
            arguments = factor, n_updates, settings, None, layout.rule, rounding
            update(Step(state, summed(gradient.to(device)), *arguments))
            chunks.update(Step(expected, summed(gradient), *arguments), 0, n)
        pairs = zip(names, state.tensors, expected.tensors, strict=False)
        different += [f"{name}, {settings}" for name, x, y in pairs if not torch.equal(x.cpu(), y)]
    return different


# -- kernels of a device -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def device_kernel(device: torch.device, layout: KernelLayout) -> Kernel | None:
    """Update kernel of a device; None for a CPU. PlanError if a GPU's bits differ from the host's."""
    if device.type == "cpu":
        return None
    try:
        kernel = layout.compiled(partial(compiled_kernel, device=device))
        if matches_host(kernel, device, layout):
            return kernel
        fault = "its kernel's bits differ"
    except (AttributeError, OSError, RuntimeError) as error:  # of torch's compiler, NVRTC or the driver
        fault = on_one_line(str(error), 120)
    how = "plan with --policy FILE, one with empty device_blocks"
    raise PlanError(f"{layout.rule} on {device.type} does not give the host's bits here ({fault}); {how}")


def matches_host(kernel: Kernel, device: torch.device, layout: KernelLayout) -> bool:
    """True if a device kernel is bitwise identical to the host on numbers of all magnitudes."""
    return not _differences(layout, PROBE_ELEMENTS, lambda step: step.on_device(kernel), device)
