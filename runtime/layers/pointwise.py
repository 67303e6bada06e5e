"""Pointwise functions of a layer, and CUDA kernels that compute each in one pass over its operands.

The functions are the reference implementation, and run on a CPU. On a GPU a kernel of `runtime/cuda/pointwise.cu` replaces a
function if its results have equal bits and strides: first on every finite bf16 number and on random numbers, then in windows of the
first call with each new shape, at both ends of each launch. Otherwise the function runs, with equal bits and saved tensors.
"""

# N elements; B sequences, H heads, T tokens, E width of a head
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from penstock.runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, VECTOR_BYTES, Kernel, checked, compiled_kernel
from penstock.runtime.errors import SlowKernelWarning

Function = Callable[..., Any]  # tensors to a tensor or a tuple
Pair = tuple[Function, Function]  # forward and backward
Operands = tuple[torch.Tensor, ...]

TEST_REPEATS = 16  # occurrences of each bf16 number, with different second operands
TEST_TOKENS = 192
WINDOW = {1: (4096,), 4: (2, 2, 64, MOST_ELEMENTS)}  # size of compared windows, by number of dimensions


def _gated(name: str, activation: Function, backward: Function) -> Pair:
    """activation(gate) * up, each call rounded; and gradients of gate and up, by autograd's calls."""

    def gated(gate_N: torch.Tensor, up_N: torch.Tensor) -> torch.Tensor:
        return activation(gate_N) * up_N  # type: ignore[no-any-return]

    def gradients(gradient_N: torch.Tensor, gate_N: torch.Tensor, up_N: torch.Tensor) -> Operands:
        d_up_N = gradient_N * activation(gate_N)
        return backward(gradient_N * up_N, gate_N), d_up_N

    gated.__name__, gradients.__name__ = name, f"{name}_gradients"
    return gated, gradients


def rotate(x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, each call rounded."""
    first, second = x_BHTE.chunk(2, -1)
    return x_BHTE * cos + torch.cat((-second, first), -1) * sin


def rotate_back(gradient_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient of `rotate`'s input, by autograd's calls. Contiguous, because a preceding norm's backward sums in memory order."""
    first, second = (gradient_BHTE * sin).chunk(2, -1)
    # Autograd adds each half's gradient to zeros of the other half: -0.0 becomes +0.0.
    return (gradient_BHTE * cos + torch.cat((second, -first), -1) + 0.0).contiguous()


GATES = {"swiglu": 0, "geglu_tanh": 1, "geglu": 2}  # ACTIVATION in pointwise.cu
ROTATE = "rotate"
_TANH = partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
CALL_BY_CALL: Mapping[str, Pair] = {  # by gate, and ROTATE
    "swiglu": _gated("swiglu", F.silu, torch.ops.aten.silu_backward),
    "geglu": _gated("geglu", F.gelu, torch.ops.aten.gelu_backward),
    "geglu_tanh": _gated("geglu_tanh", *_TANH),
    ROTATE: (rotate, rotate_back),
}
# Memory traffic of a function relative to its kernel
TIMES_THE_BYTES = {
    **dict.fromkeys(GATES, 5 / 3), **{f"{name}_gradients": 11 / 5 for name in GATES}, "rotate": 5.0, "rotate_back": 7.0
}  # fmt: skip


@lru_cache(maxsize=8)
def fastest(device: torch.device, dtype: torch.dtype, gates: tuple[str, ...] = ("swiglu",)) -> Mapping[str, Pair]:
    """Kernels for the rotary embedding and these gated activations on a GPU; functions on a CPU."""
    return CALL_BY_CALL if device.type == "cpu" else compiled(device, dtype, gates)


def compiled(device: torch.device, dtype: torch.dtype, gates: tuple[str, ...] = ("swiglu",)) -> Mapping[str, Pair]:
    best = partial(_kernel_or_call, device=device, dtype=dtype)
    pairs = {name: CALL_BY_CALL[name] for name in (*gates, ROTATE)}
    return {**CALL_BY_CALL, **{name: (best(forward), best(backward)) for name, (forward, backward) in pairs.items()}}


def _kernel_or_call(function: Function, device: torch.device, dtype: torch.dtype) -> Function:
    """Kernel of a function on the device; the function itself, with a warning, if the kernel's bits differ."""
    compiler, fault_of = partial(compiled_kernel, device=device), partial(_fault, function, device=device, dtype=dtype)
    kernel = checked(
        lambda: OneKernel(function, kernel_of(function.__name__, dtype, compiler), dtype=dtype),
        fault_of,
        _call_by_call(function, device, dtype),
    )
    return function if kernel is None or not kernel.is_in_use else kernel


def kernel_of(name: str, dtype: torch.dtype, compiler: Callable[..., Kernel]) -> Kernel:
    """Compile the kernel of the function of this name with a function of file, kernel name and macros."""
    gate = name.removesuffix("_gradients")
    if gate not in GATES:
        return compiler("pointwise.cu", name, ELEMENT=ELEMENT[dtype])
    return compiler("pointwise.cu", "gated" if name == gate else "gated_gradients", ELEMENT=ELEMENT[dtype], ACTIVATION=GATES[gate])


def _call_by_call(function: Function, device: torch.device, dtype: torch.dtype) -> str:
    name = function.__name__
    return f"{name} runs call by call on {device.type} in {dtype}, and moves {TIMES_THE_BYTES[name]:.1f} times the bytes"


class OneKernel:
    """Function computed by a kernel. Falls back to the function for operands that the kernel does not support (mixed dtypes, not
    contiguous), and for all operands after a call with wrong elements."""

    def __init__(self, function: Function, kernel: Kernel, limit: int = MOST_ELEMENTS, dtype: torch.dtype | None = None) -> None:
        """`limit`: span of an operand in elements per launch, which counts in 32 bits. `dtype`: supported one; None: any."""
        self._function, self._kernel, self._limit, self._dtype = function, kernel, limit, dtype
        self._is_rotary = function in (rotate, rotate_back)
        self._n_results = 2 if function.__name__.endswith("_gradients") else 1
        self._compared = set[tuple[Any, ...]]()  # shapes, strides and alignments
        self.is_in_use = True

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if not self.is_in_use or not self._takes(inputs):
            return self._function(*inputs)
        results = self._results(inputs[0])
        launches = list(self._launches(inputs + results))
        for operands in launches:
            self._launch(operands)
        key = tuple((x.shape, x.stride(), x.data_ptr() % VECTOR_BYTES) for x in inputs)
        if key not in self._compared:
            if n_wrong := self._differences(launches, len(inputs)):
                self.is_in_use = False
                del results, launches, operands  # free memory for the function
                how = _call_by_call(self._function, inputs[0].device, inputs[0].dtype)
                fault = f"{n_wrong} of its kernel's numbers differ at shape {tuple(inputs[0].shape)}"
                warnings.warn(f"{how}: {fault}", SlowKernelWarning, stacklevel=2)
                return self._function(*inputs)
            self._compared.add(key)
        return results if len(results) > 1 else results[0]

    def _takes(self, inputs: Operands) -> bool:
        x = inputs[0]
        if x.numel() == 0 or any(y.dtype is not (self._dtype or x.dtype) for y in inputs):
            return False
        if not self._is_rotary:
            return all(y.is_contiguous() and y.shape == x.shape for y in inputs)
        if x.dim() != 4 or x.shape[-1] % 2 or any(y.stride(-1) != 1 for y in inputs):
            return False
        return all(y.shape[1:] == (1, *x.shape[2:]) and y.shape[0] in (1, x.shape[0]) for y in inputs[1:])

    def _results(self, x: torch.Tensor) -> Operands:
        """Allocate results with the strides of PyTorch's calls: those of x, but contiguous for `rotate_back`."""
        if self._function is rotate_back:
            return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)
        return tuple(torch.empty_like(x) for _ in range(self._n_results))

    def _launches(self, operands: Operands) -> Iterator[Operands]:
        if self._is_rotary:
            return cuts([x.expand(operands[0].shape) for x in operands], self._limit)
        return zip(*(x.view(-1).split(self._limit) for x in operands), strict=True)

    def _launch(self, operands: Operands) -> None:
        x = operands[0]
        vector = VECTOR_BYTES // x.element_size()
        if self._is_rotary:
            n_pairs = x.numel() // 2
            strides = [[s * (n > 1) for n, s in zip(y.shape, y.stride(), strict=True)][:3] for y in operands]
            sizes = [n_pairs, x.shape[1], x.shape[2], x.shape[3] // 2, *strides[0], *strides[1][::2], *strides[2][::2], *strides[3]]
        else:
            n_pairs, sizes = x.numel(), [x.numel()]
        n_blocks = -(-n_pairs // (vector * THREADS))
        self._kernel((n_blocks, 1, 1), (THREADS, 1, 1), [*operands, *sizes])

    def _differences(self, launches: list[Operands], n_inputs: int) -> int:
        """Count elements that differ from the function's in windows at both ends of each launch; all elements if strides differ."""
        counts = []
        for operands in launches:
            for is_last in (False, True):
                part = [_window(x, is_last) for x in operands]
                expected = several(self._function(*part[:n_inputs]))
                for a, b, like in zip(expected, part[n_inputs:], self._results(part[0]), strict=True):
                    has_strides = _strides(a) == _strides(like)
                    counts.append((bits(a) != bits(b)).sum() if has_strides else torch.tensor(a.numel(), device=a.device))
        return int(torch.stack(counts).sum())


def cuts(operands: list[torch.Tensor], limit: int) -> Iterator[Operands]:
    """Split tensors of one shape, in dimensions other than the last, into parts that span less than `limit` elements."""
    spans = [[(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)] for x in operands]
    widest = max(spans, key=sum)
    if sum(widest) < limit or max(operands[0].shape[:-1]) == 1:
        yield tuple(operands)
        return
    dim = max(range(len(widest) - 1), key=lambda d: (operands[0].shape[d] > 1, widest[d]))
    for half in zip(*(x.tensor_split(2, dim) for x in operands), strict=True):
        yield from cuts(list(half), limit)


def _window(x: torch.Tensor, is_last: bool) -> torch.Tensor:
    """First or last few elements of each dimension."""
    sizes = zip(x.shape, WINDOW[x.dim()], strict=True)
    return x[tuple(slice(max(n - few, 0), n) if is_last else slice(few) for n, few in sizes)]


def _fault(function: Function, replacement: Function, device: torch.device, dtype: torch.dtype) -> str:
    """Difference between a function and its replacement; empty if they are bitwise identical."""
    for inputs in probes(function, device, dtype):
        pairs = list(zip(several(replacement(*inputs)), several(function(*inputs)), strict=True))
        if any(_strides(a) != _strides(b) for a, b in pairs):
            return "its kernel's results have other strides"
        if n_wrong := sum(int((bits(a) != bits(b)).sum()) for a, b in pairs):
            return f"{n_wrong} of its kernel's {sum(a.numel() for a, _ in pairs)} numbers differ"
    return ""


def probes(function: Function, device: torch.device, dtype: torch.dtype) -> Iterator[Operands]:
    """Operands for comparisons: random numbers; for activations all finite bf16 numbers. Some have partial or unaligned vectors."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator)
        numbers[torch.rand(*shape, generator=generator) < 0.02] = -0.0
        return numbers.to(device, dtype)

    if function in (rotate, rotate_back):
        for n_sequences, n_heads, width in ((2, 3, 64), (1, 4, 128), (2, 2, 20)):
            cos, sin = (random(n_sequences, 1, TEST_TOKENS, width) for _ in range(2))
            rows = random(n_sequences, TEST_TOKENS, n_heads, width)
            yield rows.transpose(1, 2), cos, sin
            yield rows.transpose(1, 2).contiguous(), cos, sin
            yield rows.transpose(1, 2), cos[:1].expand_as(cos), sin[:1].expand_as(sin)
        return
    all_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = all_bf16[torch.isfinite(all_bf16)].repeat(TEST_REPEATS).to(device, dtype)
    partners = [random(len(gate)) for _ in range(2)]
    operands = (partners[0], gate, partners[1]) if function.__name__.endswith("_gradients") else (gate, partners[0])
    yield operands
    yield tuple(x[:1003] for x in operands)
    yield tuple(x[1:2000] for x in operands)


def several(result: Any) -> Operands:
    return result if isinstance(result, tuple) else (result,)


def _strides(x: torch.Tensor) -> list[int]:
    """Strides of dimensions larger than 1."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits of each number, equal for all NaN."""
    return torch.where(x.isnan(), 0x7FC0, x.view({2: torch.int16, 4: torch.int32}[x.element_size()]))
