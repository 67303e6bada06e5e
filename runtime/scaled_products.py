"""Products in FP8: rows of both operands quantised to E4M3 with a scale each, and multiplied by `torch._scaled_mm`.

docs/fp8.md defines the arithmetic. A scale is the smallest power of two that divides the row's largest magnitude to at most 448, so
that only the conversion to E4M3 rounds. Weights have a scale per output. The gradient of the input is a sum over outputs, so
the output gradient is multiplied by these scales before its rows are quantised. Stacks of experts are multiplied by
`torch._scaled_grouped_mm` where a kernel of it exists, else expert by expert.
"""

# N rows (tokens), I inputs, O outputs, E experts; K is summed, M is not
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import pairwise

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
# Compute capability of GPUs with a kernel for all experts: up to 1,023, with any number of rows, also none; rows of whole 16 bytes
# (pytorch, ScaledGroupMM.cu, GroupMMCommon.cuh). On newer GPUs it fails (pytorch #187095).
GROUPED_CAPABILITY = 9
TOLERANCE = 2.0**-7  # of a product in bf16, relative to the sum of magnitudes: its rounding, and the order of the fp32 sum


@torch.no_grad()
def quantise(x_NI: Tensor, factors: Tensor | None = None, experts_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (N, I) and fp32 scales (N, 1) of the rows of a bf16 or fp32 matrix, multiplied by fp32 factors (I,) of its
    columns, or by the factors (E, I) of each row's expert (`experts_N`: int32). A row of zeros has the smallest scale, 2^-126. A
    row with NaN or infinity has the scale and codes NaN."""
    x_NI = x_NI.contiguous()
    codes_NI, scales_N1 = torch.empty_like(x_NI, dtype=E4M3), x_NI.new_empty(len(x_NI), 1, dtype=torch.float32)
    kind = 0 if factors is None else factors.dim()
    if (kernel := quantising_kernel(x_NI.device, x_NI.dtype, kind)) is not None:
        quantise_by_kernel(kernel, x_NI, codes_NI, scales_N1, factors, experts_N)
    else:
        quantise_by_calls(x_NI, codes_NI, scales_N1, factors, experts_N)
    return codes_NI, scales_N1


def quantise_by_calls(
    x_NI: Tensor, codes_NI: Tensor, scales_N1: Tensor, factors: Tensor | None = None, experts_N: Tensor | None = None
) -> None:
    """Reference implementation of `quantise`, by PyTorch calls on chunks of rows."""
    n = max(1, QUANTISED_CHUNK_ELEMENTS // x_NI.shape[1])
    parts = zip(x_NI.split(n), codes_NI.split(n), scales_N1.split(n), strict=True)
    for i, (part_NI, part_codes_NI, part_scales_N1) in enumerate(parts):
        wide_NI = part_NI.to(torch.float32, copy=True)
        if factors is not None:
            wide_NI.mul_(factors if experts_N is None else factors[experts_N[i * n :][: len(part_NI)]])
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


def grouped_product(x_NK: Tensor, weight: Tensor, scales: Tensor, offs: Tensor, sums_rows: bool) -> Tensor:
    """Return the products of all experts in bf16, (N, M). Rows of x are sorted by expert; `offs`: end of each expert's rows.

    `weight`: codes (E, M, K) with scales (E, M); with `sums_rows` codes (E, K, M) with scales (E, K), which multiply x first."""
    if sums_rows:
        rows_N = torch.arange(len(x_NK), dtype=offs.dtype, device=offs.device)
        codes_NK, scales_N1 = quantise(x_NK, scales, torch.searchsorted(offs, rows_N, right=True, out_int32=True))
        weight_EKM, scales_EM = by_columns(weight), scales.new_ones(len(weight), weight.shape[2])
    else:
        (codes_NK, scales_N1), weight_EKM, scales_EM = quantise(x_NK), weight.transpose(1, 2), scales
    if has_grouped_kernel(x_NK.device):
        operands = codes_NK, weight_EKM, scales_N1[:, 0], scales_EM
        return torch._scaled_grouped_mm(*operands, offs=offs, out_dtype=torch.bfloat16)
    out_NM = torch.empty(len(x_NK), weight_EKM.shape[2], dtype=torch.bfloat16, device=x_NK.device)
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        if start < end:
            operands = codes_NK[start:end], weight_EKM[e], scales_N1[start:end].clone(), scales_EM[e : e + 1]  # aligned
            torch._scaled_mm(*operands, out_dtype=torch.bfloat16, out=out_NM[start:end])
    return out_NM


def has_grouped_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == GROUPED_CAPABILITY


def by_columns(weight: Tensor) -> Tensor:
    """Return second operands (..., O, I) in the layout of the device's kernels: on a GPU a copy in column-major order."""
    if weight.device.type == "cpu":
        return weight
    if (kernel := transposing_kernel(weight.device)) is None:
        return weight.view(torch.uint8).mT.contiguous().view(E4M3).mT
    out = torch.empty_like(weight).view(weight.mT.shape)
    transpose_by_kernel(kernel, weight, out)
    return out.mT


def quantise_by_kernel(kernel: Kernel, x_NI: Tensor, codes_NI: Tensor, scales_N1: Tensor, *options: Tensor | None) -> None:
    """Quantise by one launch of a kernel. `options`: factors and experts, as for `quantise`."""
    optional = [tensor for tensor in options if tensor is not None]
    if len(x_NI):
        unread = [scales_N1] * (2 - len(optional))
        arguments = [x_NI, *optional, *unread, codes_NI.view(torch.uint8), scales_N1, *x_NI.shape]
        kernel((min(len(x_NI), MOST_BLOCKS), 1, 1), (THREADS, 1, 1), arguments)


def transpose_by_kernel(kernel: Kernel, weight: Tensor, out: Tensor) -> None:
    n_blocks, sides = min(-(-weight.numel() // 1024), MOST_BLOCKS), weight.shape[-2:]  # 1024 elements of a tile
    arguments = [weight.view(torch.uint8), out.view(torch.uint8), weight.numel() // sides.numel(), *sides]
    kernel((n_blocks, 1, 1), (THREADS, 1, 1), arguments)


@lru_cache(maxsize=8)
def quantising_kernel(device: torch.device, dtype: torch.dtype, factors: int) -> Kernel | None:
    """Kernel for rows of this dtype. `factors`: 0 none, 1 of columns, 2 of columns by expert. None on a CPU; None with a warning if
    it does not compile or its bits differ."""
    if device.type == "cpu":
        return None
    return checked(
        partial(compiled_kernel, "quantise.cu", "quantise", device=device, ELEMENT=ELEMENT[dtype], FACTORS=factors),
        partial(quantising_fault, device=device, dtype=dtype, factors=factors),
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


def quantising_fault(kernel: Kernel, device: torch.device, dtype: torch.dtype, factors: int) -> str:
    """Compare a kernel with PyTorch calls on rows of all magnitudes, of zeros and not finite. Empty if bitwise identical."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_SHAPE, generator=generator) * torch.logspace(-44, 37, PROBE_SHAPE[0])[:, None]
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, float("nan"), -float("inf"), torch.arange(PROBE_SHAPE[1]) * 2.0**-10
    x[4], x[5, 0] = torch.arange(PROBE_SHAPE[1]) / 16 + 1, 448.0  # ties between codes; the largest code
    x_NI, options = x.to(device, dtype), list[Tensor]()
    if factors:
        options = [torch.randn((3, PROBE_SHAPE[1])[2 - factors :], generator=generator).to(device)]
        options += [(torch.arange(len(x)) % 3).int().to(device)] * (factors - 1)
    results = [(torch.empty_like(x_NI, dtype=E4M3), x_NI.new_empty(len(x), 1, dtype=torch.float32)) for _ in range(2)]
    quantise_by_kernel(kernel, x_NI, *results[0], *options)
    quantise_by_calls(x_NI, *results[1], *options)
    for (a, b), bits in zip(zip(*results, strict=True), (torch.uint8, torch.int32), strict=True):
        is_number = ~b.float().isnan()
        if n := int(((a.view(bits) != b.view(bits)) & is_number).sum() + (a.float().isnan() == is_number).sum()):
            return f"{n} of its kernel's {a.numel()} numbers differ"
    return ""


def transposing_fault(kernel: Kernel, device: torch.device) -> str:
    """Compare a kernel with PyTorch's transposition. Empty if identical."""
    x = (torch.arange(2 * 48 * 80, dtype=torch.int32, device=device) // 7).view(2, 48, 80).to(torch.uint8).view(E4M3)
    out = torch.empty_like(x).view(2, 80, 48)
    transpose_by_kernel(kernel, x, out)
    return "" if torch.equal(out.view(torch.uint8), x.view(torch.uint8).mT) else "its kernel moves some codes elsewhere"


def refuse_device(device: torch.device, has_experts: bool = False) -> None:
    """Raise a one-line WorkloadError if a device or its torch has no row-wise FP8 products, or computes them wrongly; with
    `has_experts`, also those of a stack of experts, one without rows."""
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
        by_experts = [*_products_of_experts(x, weight_codes, weight_scales, y)] if has_experts else []
    except (RuntimeError, NotImplementedError, ValueError) as error:
        how = f"torch {torch.__version__} has no row-wise FP8 products on {device.type} ({on_one_line(str(error), 100)})"
        raise WorkloadError(f"--compute fp8: {how}; {instead}") from None
    back_codes, back_scales = quantise(y, weight_scales[:, 0])
    back = back_codes.float() * back_scales
    for result, a, b in ((y, wide, wide_weight.t()), (towards, back, weight_codes.float()), *by_experts):
        if bool(((result.float() - a @ b).abs() > TOLERANCE * (a.abs() @ b.abs())).any()):
            raise WorkloadError(f"--compute fp8: {device.type} computes row-wise FP8 products wrongly; {instead}")


def _products_of_experts(
    x_NI: Tensor, weight_OI: Tensor, scales_O1: Tensor, g_NO: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield results of `grouped_product` for three experts, and the fp32 operands of each."""
    stack_EOI, scales_EO, n = weight_OI.view(3, -1, weight_OI.shape[1]), scales_O1.view(3, -1), len(x_NI)
    g_NM = g_NO[:, : scales_EO.shape[1]]
    offs = torch.tensor([n // 2, n // 2, n], dtype=torch.int32, device=x_NI.device)
    y_NM, dx_NI = grouped_product(x_NI, stack_EOI, scales_EO, offs, False), grouped_product(g_NM, stack_EOI, scales_EO, offs, True)
    for e, rows in ((0, slice(n // 2)), (2, slice(n // 2, n))):
        (codes, scales), (back, back_scales) = quantise(x_NI[rows]), quantise(g_NM[rows], scales_EO[e])
        yield y_NM[rows], codes.float() * scales, (stack_EOI[e].float() * scales_EO[e, :, None]).t()
        yield dx_NI[rows], back.float() * back_scales, stack_EOI[e].float()
