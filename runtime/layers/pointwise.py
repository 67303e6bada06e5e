"""Pointwise functions of a layer, compiled to one kernel each where that gives the bits of many.

Small pure functions, each compiled with the compiler's emulation of eager's roundings, and used only where its bits are eager's on
every number that a weight format has and on random ones. Elsewhere the function itself runs, call by call: the bits are the same
either way, and what is kept for the backward too.
"""

# N elements; B sequences, H heads, T tokens, E width of a head
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]  # of tensors, to a tensor or several

COMPILED = {
    "emulate_precision_casts": True,  # every result is rounded where eager rounds it
    "eager_numerics.division_rounding": True,  # a division is one, not the product with an approximate reciprocal
    "compile_threads": 1,  # no pool of processes beside threads that hold locked memory
    "max_autotune": False,  # which would let timing choose
}
TEST_REPEATS = 16  # of all numbers, each with other partners
TEST_TOKENS = 192


def swiglu(gate_N: torch.Tensor, up_N: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, each rounded to their dtype."""
    return F.silu(gate_N) * up_N


def swiglu_gradients(gradient_N: torch.Tensor, gate_N: torch.Tensor, up_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up, as autograd makes them call by call."""
    towards_up_N = gradient_N * F.silu(gate_N)
    return torch.ops.aten.silu_backward(gradient_N * up_N, gate_N), towards_up_N


def rotate(x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (the halves of each head exchanged, the second negated) * sin, each result rounded."""
    first, second = x_BHTE.chunk(2, -1)
    return x_BHTE * cos + torch.cat((-second, first), -1) * sin


def rotate_back(gradient_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of what was turned, as autograd makes it call by call: head after head, whatever the gradient's order in memory.

    A norm before the rotation adds up in the order of memory.
    """
    first, second = (gradient_BHTE * sin).chunk(2, -1)
    # Autograd adds a half's gradient to zeros in the place of the other half: -0.0 becomes +0.0.
    return (gradient_BHTE * cos + torch.cat((second, -first), -1) + 0.0).contiguous()


@dataclass(frozen=True, slots=True)
class Pointwise:
    """What computes each of them."""

    swiglu: Function = swiglu
    swiglu_gradients: Function = swiglu_gradients
    rotate: Function = rotate
    rotate_back: Function = rotate_back


@lru_cache(maxsize=8)
def fastest(device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Compiled on a GPU where the bits stay eager's; a warning names what does not run in one kernel there, and why.

    A CPU computes call by call: its compiler takes longer than most runs gain.
    """
    return Pointwise() if device.type == "cpu" else compiled(device, dtype)


def compiled(device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Each function compiled for the device, or itself where that cannot be or changes a bit."""
    from torch._inductor import config

    known = COMPILED.keys() & config.get_config_copy().keys()  # some are newer than our oldest torch
    chosen: dict[str, Function] = {}
    for field in fields(Pointwise):
        function = getattr(Pointwise(), field.name)
        one_kernel = _OneKernel(function, {key: COMPILED[key] for key in known})
        if (fault := _fault(function, one_kernel, device, dtype)) is None:
            chosen[field.name] = one_kernel
        else:
            warnings.warn(f"{field.name} runs call by call on {device.type} in {dtype}: {fault}", RuntimeWarning, stacklevel=2)
    return Pointwise(**chosen)


class _OneKernel:
    """A function, compiled. Torch compiles for a few orders in memory only: for others it is called as it is, to the same bits."""

    def __init__(self, function: Function, options: dict[str, Any]) -> None:
        self._as_it_is, self._refused = function, set[tuple[Any, ...]]()
        self._compiled = torch.compile(function, dynamic=True, fullgraph=True, options=options)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """A view's base is none of the compiler's business, but would make it compile anew: it sees tensors that are no views."""
        key = tuple((x.shape, x.stride()) for x in inputs)
        if key not in self._refused:
            try:
                return self._compiled(*(x.new_empty(0).set_(x) for x in inputs))  # type: ignore[call-overload]
            except Exception as error:
                if type(error).__name__ != "FailOnRecompileLimitHit":  # to import its class takes a second
                    raise
                self._refused.add(key)
        return self._as_it_is(*inputs)


def _fault(function: Function, other: Function, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the other does not stand for the function; None if it does."""
    for inputs in probes(function, device, dtype):
        expected = function(*inputs)
        try:
            found = other(*inputs)
        except Exception as error:  # whatever a compiler makes of its machine
            return f"it cannot be compiled ({' '.join(str(error).split())[:120] or type(error).__name__})"
        pairs = list(zip(several(expected), several(found), strict=True))
        if any(a.stride() != b.stride() for a, b in pairs):
            return "compiled, it leaves its result in another order in memory"
        n_other = sum(int((_bits(a) != _bits(b)).sum()) for a, b in pairs)
        if n_other:
            return f"compiled, {n_other} of {sum(t.numel() for t in several(expected))} numbers are others"
    return None


def probes(function: Function, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """What a compiled function is held to the original on: random numbers; for the activation each bf16 number there is, too."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator)
        numbers[torch.rand(*shape, generator=generator) < 0.02] = -0.0
        return numbers.to(device, dtype)

    if function in (rotate, rotate_back):
        for n_sequences, n_heads, width in ((2, 3, 64), (1, 4, 128)):
            cos, sin = (random(n_sequences, 1, TEST_TOKENS, width) for _ in range(2))
            rows = random(n_sequences, TEST_TOKENS, n_heads, width)
            yield rows.transpose(1, 2), cos, sin
            yield rows.transpose(1, 2).contiguous(), cos, sin
        return
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = every[torch.isfinite(every)].repeat(TEST_REPEATS).to(device, dtype)
    others = [random(len(gate)) for _ in range(2)]
    yield (gate, others[0]) if function is swiglu else (others[0], gate, others[1])


def several(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function returns, as several."""
    return result if isinstance(result, tuple) else (result,)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A number's bits; every NaN has the same."""
    return torch.where(x.isnan(), 0x7FC0, x.view({2: torch.int16, 4: torch.int32}[x.element_size()]))
