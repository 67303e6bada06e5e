"""Products in FP8: rows of both operands quantised to E4M3 with a scale each, and multiplied by `torch._scaled_mm`.

docs/fp8.md defines the arithmetic. A scale is the smallest power of two that divides the row's largest magnitude to at most 448, so
that only the conversion to E4M3 rounds. Weights have a scale per output. The gradient of the input is a sum over outputs, so
the output gradient is multiplied by these scales before its rows are quantised.
"""

# N rows (tokens), I inputs, O outputs
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.runtime.cuda.nvrtc import ELEMENT, THREADS, Kernel, checked, compiled_kernel
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.packed import QUANTISED_CHUNK_ELEMENTS
from penstock.runtime.units import on_one_line

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
MOST_BLOCKS = 2**16  # per launch; a block of threads quantises several rows, or transposes several tiles
PROBE_SHAPE = 37, 144  # of the test of a device's products and kernels
LEAST_CAPABILITY = 8, 9  # Ada; earlier GPUs have no FP8 products
TOLERANCE = 2.0**-7  # of a product in bf16, relative to the sum of magnitudes: its rounding, and the order of the fp32 sum


@torch.no_grad()
def quantise(x_NI: Tensor, factors_I: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (N, I) and fp32 scales (N, 1) of the rows of a bf16 or fp32 matrix, multiplied by fp32 factors of its
    columns. A row of zeros has the smallest scale, 2^-126. A row with NaN or infinity has the scale and codes NaN."""
    x_NI = x_NI.contiguous()
    codes_NI, scales_N1 = torch.empty_like(x_NI, dtype=E4M3), x_NI.new_empty(len(x_NI), 1, dtype=torch.float32)
    if (kernel := quantising_kernel(x_NI.device, x_NI.dtype, factors_I is not None)) is not None:
        quantise_by_kernel(kernel, x_NI, codes_NI, scales_N1, factors_I)
    else:
        quantise_by_calls(x_NI, codes_NI, scales_N1, factors_I)
    return codes_NI, scales_N1


def quantise_by_calls(x_NI: Tensor, codes_NI: Tensor, scales_N1: Tensor, factors_I: Tensor | None = None) -> None:
    """Reference implementation of `quantise`, by PyTorch calls on chunks of rows."""
    n = max(1, QUANTISED_CHUNK_ELEMENTS // x_NI.shape[1])
    for part_NI, part_codes_NI, part_scales_N1 in zip(x_NI.split(n), codes_NI.split(n), scales_N1.split(n), strict=True):
        wide_NI = part_NI.to(torch.float32, copy=True)
        if factors_I is not None:
            wide_NI.mul_(factors_I)
        low_N1, high_N1 = torch.aminmax(wide_NI, dim=1, keepdim=True)
        part_scales_N1.copy_(scales_of(torch.maximum(-low_N1, high_N1)))
        part_codes_NI.copy_(wide_NI.div_(part_scales_N1))


def scales_of(largest: Tensor) -> Tensor:
    """Smallest powers of two, from 2^-126 on, that divide fp32 magnitudes to at most 448; NaN if not finite."""
    exponents = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2^8
    return torch.where(largest.isfinite(), (exponents.clamp_(min=1) << 23).view(torch.float32), float("nan"))


def product(
    codes_NI: Tensor,
    scales_N1: Tensor,
    weight_OI: Tensor,
    scales_O: Tensor,
    bias_O: Tensor | None = None,
    out_NO: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias in bf16, (N, O): an fp32 sum of exact products, multiplied by both scales, rounded once."""
    out_NO = scales_N1.new_empty(len(codes_NI), len(weight_OI), dtype=torch.bfloat16) if out_NO is None else out_NO
    operands = codes_NI, weight_OI.t(), scales_N1, scales_O.view(1, -1), bias_O
    return torch._scaled_mm(*operands, out_dtype=torch.bfloat16, out=out_NO)


def input_gradient(gradient_NO: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """Return the gradient of a product's input in bf16, (N, I)."""
    codes_NO, scales_N1 = quantise(gradient_NO, scales_O)
    ones_1I = scales_N1.new_ones(1, weight_OI.shape[1])
    return torch._scaled_mm(codes_NO, by_columns(weight_OI), scales_N1, ones_1I, out_dtype=torch.bfloat16)


def by_columns(weight_OI: Tensor) -> Tensor:
    """Return a second operand in the layout of the device's kernels: on a GPU a copy in column-major order."""
    if weight_OI.device.type == "cpu":
        return weight_OI
    if (kernel := transposing_kernel(weight_OI.device)) is None:
        return weight_OI.view(torch.uint8).t().contiguous().view(E4M3).t()
    out_IO = torch.empty_like(weight_OI).view(weight_OI.shape[::-1])
    transpose_by_kernel(kernel, weight_OI, out_IO)
    return out_IO.t()


def quantise_by_kernel(kernel: Kernel, x_NI: Tensor, codes_NI: Tensor, scales_N1: Tensor, factors_I: Tensor | None = None) -> None:
    n_rows, n_columns = x_NI.shape
    arguments = [x_NI, scales_N1 if factors_I is None else factors_I, codes_NI.view(torch.uint8), scales_N1, n_rows, n_columns]
    if n_rows:
        kernel((min(n_rows, MOST_BLOCKS), 1, 1), (THREADS, 1, 1), arguments)


def transpose_by_kernel(kernel: Kernel, weight_OI: Tensor, out_IO: Tensor) -> None:
    n_blocks = min(-(-weight_OI.numel() // 1024), MOST_BLOCKS)  # 1024 elements of a tile
    kernel((n_blocks, 1, 1), (THREADS, 1, 1), [weight_OI.view(torch.uint8), out_IO.view(torch.uint8), *weight_OI.shape])


@lru_cache(maxsize=8)
def quantising_kernel(device: torch.device, dtype: torch.dtype, has_factors: bool) -> Kernel | None:
    """Kernel for rows of this dtype. None on a CPU; None with a warning if it does not compile or its bits differ."""
    if device.type == "cpu":
        return None
    return checked(
        partial(compiled_kernel, "quantise.cu", "quantise", device=device, ELEMENT=ELEMENT[dtype], FACTORS=int(has_factors)),
        partial(quantising_fault, device=device, dtype=dtype, has_factors=has_factors),
        f"quantising runs by PyTorch's calls on {device.type}, which move several times the bytes",
    )


@lru_cache(maxsize=8)
def transposing_kernel(device: torch.device) -> Kernel | None:
    """Kernel that transposes codes. None with a warning if it does not compile or its bits differ."""
    return checked(
        partial(compiled_kernel, "quantise.cu", "transpose", device=device, ELEMENT="float", FACTORS=0),
        partial(transposing_fault, device=device),
        f"weights are transposed by PyTorch's calls on {device.type}, which are slow",
    )


def quantising_fault(kernel: Kernel, device: torch.device, dtype: torch.dtype, has_factors: bool) -> str:
    """Compare a kernel with PyTorch calls on rows of all magnitudes, of zeros and not finite. Empty if bitwise identical."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_SHAPE, generator=generator) * torch.logspace(-44, 37, PROBE_SHAPE[0])[:, None]
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, float("nan"), -float("inf"), torch.arange(PROBE_SHAPE[1]) * 2.0**-10
    x[4], x[5, 0] = torch.arange(PROBE_SHAPE[1]) / 16 + 1, 448.0  # ties between codes; the largest code
    x_NI, factors_I = x.to(device, dtype), torch.randn(PROBE_SHAPE[1], generator=generator).to(device) if has_factors else None
    results = [(torch.empty_like(x_NI, dtype=E4M3), x_NI.new_empty(len(x), 1, dtype=torch.float32)) for _ in range(2)]
    quantise_by_kernel(kernel, x_NI, *results[0], factors_I)
    quantise_by_calls(x_NI, *results[1], factors_I)
    for (a, b), bits in zip(zip(*results, strict=True), (torch.uint8, torch.int32), strict=True):
        is_number = ~b.float().isnan()
        if n := int(((a.view(bits) != b.view(bits)) & is_number).sum() + (a.float().isnan() == is_number).sum()):
            return f"{n} of its kernel's {a.numel()} numbers differ"
    return ""


def transposing_fault(kernel: Kernel, device: torch.device) -> str:
    """Compare a kernel with PyTorch's transposition. Empty if identical."""
    x = torch.arange(48 * 80, dtype=torch.int32, device=device).view(48, 80).to(torch.uint8).view(E4M3)
    out = torch.empty_like(x).view(80, 48)
    transpose_by_kernel(kernel, x, out)
    return "" if torch.equal(out.view(torch.uint8), x.view(torch.uint8).t()) else "its kernel moves some codes elsewhere"


def refuse_device(device: torch.device) -> None:
    """Raise a one-line WorkloadError if a device or its torch has no row-wise FP8 products, or computes them wrongly."""
    instead = "plan without --compute fp8, and with --base fp8 or int8 instead of fp8-rows"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise WorkloadError(f"--compute fp8: {torch.cuda.get_device_name(device)} has no FP8 products; {instead}")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, PROBE_SHAPE[1], generator=generator).to(device) for n in (PROBE_SHAPE[0], 48))
    (codes, scales), (weight_codes, weight_scales) = quantise(x), quantise(weight)
    wide, wide_weight = codes.float() * scales, weight_codes.float() * weight_scales
    try:
        y = product(codes, scales, weight_codes, weight_scales[:, 0])
        towards = input_gradient(y, weight_codes, weight_scales[:, 0])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        how = f"torch {torch.__version__} has no row-wise FP8 products on {device.type} ({on_one_line(str(error), 100)})"
        raise WorkloadError(f"--compute fp8: {how}; {instead}") from None
    back_codes, back_scales = quantise(y, weight_scales[:, 0])
    back = back_codes.float() * back_scales
    for result, a, b in ((y, wide, wide_weight.t()), (towards, back, weight_codes.float())):
        if bool(((result.float() - a @ b).abs() > TOLERANCE * (a.abs() @ b.abs())).any()):
            raise WorkloadError(f"--compute fp8: {device.type} computes row-wise FP8 products wrongly; {instead}")
