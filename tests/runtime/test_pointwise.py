"""Pointwise kernels, compiled as C++: the functions' bits at any size, alignment and cut; their check at run time."""

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.runtime.cuda.nvrtc import MOST_ELEMENTS
from penstock.runtime.layers import pointwise
from penstock.runtime.layers.pointwise import (
    CALL_BY_CALL,
    GATES,
    ROTATE,
    TIMES_THE_BYTES,
    OneKernel,
    compiled,
    kernel_of,
    probes,
    several,
)
from tests.cuda_in_cpp import NEEDS_A_COMPILER, by_two_threads, in_cpp
from tests.lanes import diagonal
from tests.real_layers import Traffic
from tests.training import same_bits

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
GATED = [name for gate in GATES for name in (gate, f"{gate}_gradients")]
# Largest share of bf16 results with different bits, because exp, tanh and erf of torch's CPU build are not those of C
OTHER_SHARE = 4e-3


def function_of(name: str) -> pointwise.Function:
    return {function.__name__: function for pair in CALL_BY_CALL.values() for function in pair}[name]


def one_kernel(name: str, dtype: torch.dtype, folder: Path, limit: int = MOST_ELEMENTS) -> OneKernel:
    return OneKernel(function_of(name), by_two_threads(kernel_of(name, dtype, partial(in_cpp, folder))), limit)


def unchecked(one: OneKernel, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    results = tuple(result.fill_(torch.nan) for result in one._results(inputs[0]))
    for operands in one._launches(inputs + results):
        one._launch(operands)
    return results


@NEEDS_A_COMPILER
@pytest.mark.parametrize("name", ["rotate", "rotate_back"])
@diagonal(("limit", [MOST_ELEMENTS, 3000]), ("dtype", DTYPES), ids=str)
def test_a_rotary_embedding_has_torchs_bits(name: str, dtype: torch.dtype, limit: int, tmp_path: Path) -> None:
    one, function = one_kernel(name, dtype, tmp_path, limit), function_of(name)
    for inputs in probes(function, CPU, dtype):
        assert (len(list(one._launches((*inputs, inputs[0])))) > 1) == (limit == 3000)
        actual, expected = unchecked(one, inputs)[0], function(*inputs)
        assert actual.stride() == expected.stride()
        assert same_bits(actual, expected)
        shifted = [torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x) for x in inputs]  # unaligned
        assert same_bits(unchecked(one, tuple(shifted))[0], function(*shifted))


@NEEDS_A_COMPILER
@diagonal(("name", GATED), ("dtype", DTYPES), ids=str)
def test_gated_activations_have_torchs_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16: equal bits for all but a few results, and those within an ulp; fp32: within 1e-4. C's exp and erf are not torch's.

    GELU of a gate below -2 is a difference of numbers near 1: one ulp of these, times the other operands, is accepted. Bits of NaN,
    of numbers near the subnormal ones and for gates whose square overflows are not compared.
    """
    one, function = one_kernel(name, dtype, tmp_path, limit=2**18), function_of(name)
    for n, inputs in enumerate(probes(function, CPU, dtype)):
        assert (len(list(one._launches(inputs))) > 1) == (n == 0)
        for actual, expected in zip(unchecked(one, inputs), several(function(*inputs)), strict=True):
            assert actual.stride() == expected.stride()
            assert bool(_are_close(actual, expected, inputs, name.startswith("geglu")).all())
            if dtype is torch.bfloat16:
                is_compared = ~(actual.isnan() & expected.isnan()) & (inputs[-2].double().abs() <= 2.0**60)
                for x in (inputs[-2], actual, expected):
                    is_compared &= (x == 0) | (x.double().abs() >= 2.0**-120)
                differs = actual.view(torch.int16) != expected.view(torch.int16)
                assert int((differs & is_compared).sum()) <= OTHER_SHARE * actual.numel()


def _are_close(actual: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...], is_gelu: bool) -> torch.Tensor:
    a, b = actual.double(), expected.double()
    slack, overflows = torch.full_like(a, 1e-37), torch.zeros_like(a, dtype=torch.bool)
    if is_gelu:
        gate, operands = inputs[-2].double(), [x.double().abs() for x in (*inputs[:-2], inputs[-1])]
        overflows = gate.abs() > 2.0**60  # its square or cube is infinite, and times 0 one of the two results is NaN
        slack += 2**-20 * (1 + gate.abs().clamp(max=16)) ** 3 * torch.stack([1 + x for x in operands]).prod(0)
    relative = 2**-7 if actual.dtype is torch.bfloat16 else 1e-4
    return overflows | (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= relative * b.abs() + slack)


def test_a_kernel_is_compared_with_its_function_on_the_first_call_of_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check both ends and the cuts between launches; a kernel with one wrong number there is never used again."""
    monkeypatch.setitem(TIMES_THE_BYTES, "doubled", 1.0)
    sizes: list[int] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return 2 * x

    def launches_of(wrong: dict[int, int]) -> OneKernel:
        def kernel(grid: tuple[int, ...], block: tuple[int, ...], args: list) -> None:
            x, out, n = args
            out.copy_(2 * x)
            if n in wrong:
                out[wrong[n]] += 1

        return OneKernel(doubled, kernel, limit=10_000)

    x = torch.arange(25_000.0)
    right = launches_of({})
    for _ in range(2):
        assert same_bits(right(x), 2 * x)
    assert sizes == [4096] * 6, "two windows of each launch, once"
    assert same_bits(right(x[1:]), 2 * x[1:])
    assert len(sizes) == 12, "another shape"
    for position in (0, 9_999, -1):
        wrong = launches_of({10_000: position})
        message = r"^doubled .* call by call on cpu in torch.float32, .*: \d of its .* differ at shape \(25000,\)$"
        with pytest.warns(RuntimeWarning, match=message):
            assert same_bits(wrong(x), 2 * x)
        assert not wrong.is_in_use
        n_asked = len(sizes)
        assert same_bits(wrong(x), 2 * x)
        assert sizes[n_asked:] == [25_000]


@NEEDS_A_COMPILER
def test_operands_that_a_kernel_cannot_read_are_the_functions(tmp_path: Path) -> None:
    def unused(*_: object) -> None:
        raise AssertionError("no launch is right for these")

    x, y = torch.randn(6, 8), torch.randn(6, 8)
    gate = OneKernel(function_of("swiglu"), unused)
    for inputs in ((x.t(), y.t()), (x, y.bfloat16()), (x[:0], y[:0]), (x, y[:1])):
        assert same_bits(gate(*inputs), function_of("swiglu")(*inputs))
    q, turn, odd = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 3, 5, 8)
    rotation = OneKernel(pointwise.rotate, unused)
    for inputs in ((q.transpose(2, 3), turn.transpose(2, 3), turn.transpose(2, 3)), (q, odd, odd), (q, turn.half(), turn)):
        assert same_bits(rotation(*inputs), pointwise.rotate(*inputs))


@pytest.mark.parametrize("limit", [1, 7, 40, 10**6])
def test_cuts_are_all_of_a_tensor_and_short(limit: int) -> None:
    x = torch.arange(2 * 3 * 5 * 4).view(2, 5, 3, 4).transpose(1, 2)
    turn = torch.arange(2 * 5 * 4).view(2, 1, 5, 4).expand(x.shape)
    parts = list(pointwise.cuts([x, turn], limit))
    assert sorted(torch.cat([part.flatten() for part, _ in parts]).tolist()) == list(range(x.numel()))
    assert all(torch.equal(turned, turn[index_of(part, x)]) for part, turned in parts)
    spans = [sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True)) for part, _ in parts]
    assert max(spans) < max(limit, x.shape[-1])


def index_of(part: torch.Tensor, tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the offset of a part of `arange`."""
    position = (tensor == part[0, 0, 0, 0]).nonzero()[0].tolist()
    return tuple(slice(first, first + n) for first, n in zip(position, part.shape, strict=True))


def test_without_a_compiler_functions_run_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **defined: object) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(pointwise, "compiled_kernel", broken)
    message = r"^rotate runs call by call .* moves 5.0 times the bytes: .* used \(no compiler\\nhere\)$"
    with pytest.warns(RuntimeWarning, match=message):
        assert compiled(CPU, torch.float32, tuple(GATES)) == CALL_BY_CALL


@NEEDS_A_COMPILER
def test_a_kernel_whose_bits_differ_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken_kernel(file: str, name: str, *, device: torch.device, **defined: str | int):
        kernel = by_two_threads(in_cpp(tmp_path, file, name, **defined))
        wrong = int(name == "rotate_back")
        return lambda grid, block, args: kernel(grid, block, [*args[:4], args[4] - wrong, *args[5:]])

    monkeypatch.setattr(pointwise, "compiled_kernel", broken_kernel)
    with pytest.warns(RuntimeWarning, match=r"^rotate_back runs call by call .*differ at shape "):
        kernels = compiled(CPU, torch.bfloat16, ())
    assert kernels[ROTATE][1] is pointwise.rotate_back
    assert isinstance(kernels[ROTATE][0], OneKernel)


@pytest.mark.parametrize("name", TIMES_THE_BYTES)
def test_what_a_warning_says_of_traffic_is_counted(name: str) -> None:
    """Use cosines and sines shared by many heads, and attention's layout of queries."""
    n_heads = 4096
    x, turn = torch.randn(1, 2, n_heads, 4).transpose(1, 2), torch.randn(1, 1, 2, 4)
    inputs = (x, turn, turn) if name.startswith("rotate") else (x.flatten(),) * (3 if name.endswith("_gradients") else 2)
    with Traffic() as traffic:
        results = several(function_of(name)(*inputs))
    by_kernel = sum(t.numel() for t in (*inputs, *results))
    assert traffic.n_bytes / (4 * by_kernel) == pytest.approx(TIMES_THE_BYTES[name], rel=0.01)
