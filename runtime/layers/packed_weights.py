"""Pack and unpack frozen weights (nf4, int8, fp8, mxfp4), and pack those that are multiplied as they are (fp8-rows).

Results are bitwise identical to bitsandbytes (nf4, int8) and transformers (fp8, mxfp4), on GPU and CPU: conversion and lookup of
codes are exact, every other call is one fp32 product, rounded once, and without additions no compiler can contract a product into
an FMA. On a GPU one kernel (`runtime/cuda/unpack.cu`) unpacks a matrix; its bits are compared with PyTorch's before its first use.
"""

# N elements of a flat weight; R rows, C columns; G, H rows and columns of blocks
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.runtime.cuda.nvrtc import ELEMENT, MOST_ELEMENTS, THREADS, Kernel, checked, compiled_kernel
from penstock.runtime.plan import packed as packing
from penstock.runtime.plan.packed import FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, UNPACK_CHUNK_ELEMENTS, Base, layout
from penstock.runtime.scaled_products import quantise

from .pointwise import bits

# Quantiles of a normal distribution in [-1, 1] with an exact 0, as published with QLoRA
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
_NF4_EDGES = (NF4[:-1] + NF4[1:]) / 2
_SMALLEST = 1e-38  # divisor of an nf4 block
_INT8_LARGEST, _FP8_LARGEST = 127.0, 448.0
_INT8_STEP = 7.874015718698502e-3  # 1 / 127 as in bitsandbytes
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # codes 0 to 7; their negatives follow
_E2M1_EDGES = (_E2M1[:-1] + _E2M1[1:]) / 2
_E2M1_EDGES[1::2] = _E2M1_EDGES[1::2].nextafter(torch.zeros(()))  # round half to even codes
_E8M0_BIAS = 127
UNPACK_WIDTH = 8  # elements per thread
# Shapes for comparing kernels with PyTorch calls, including rows that fill no vector and partial blocks
PROBE_SHAPES: dict[Base, tuple[tuple[int, ...], ...]] = {
    "nf4": ((96, 256),),
    "int8": ((257, 160), (3, 33, 37)),
    "fp8": ((3, 130, 264), (257, 131)),
    "mxfp4": ((3, 64, 264), (2, 96, 38)),
}


def parts(packed: Tensor, shape: tuple[int, ...], base: Base) -> tuple[Tensor, Tensor]:
    """Return views (codes, scales) of a packed weight of this shape. Codes are flat if two share a byte, else of this shape."""
    sizes = layout(shape, base)
    assert packed.shape == (sizes.n_bytes,), (packed.shape, shape, base)
    codes, rest = packed[: sizes.code_bytes], packed[sizes.scales_at :].view(torch.uint8 if base == "mxfp4" else torch.float32)
    scales = rest[: torch.Size(sizes.scales).numel()].view(sizes.scales)
    if base in ("nf4", "mxfp4"):
        return codes, scales
    return codes.view(torch.int8 if base == "int8" else torch.float8_e4m3fn).view(shape), scales


@torch.no_grad()
def unpack_into(packed: Tensor, out: Tensor, base: Base) -> None:
    """Unpack a weight into `out`: contiguous, bf16 or fp32. The host synchronises once per device (`prepare`, `unpack_kernel`)."""
    assert out.is_contiguous()
    assert out.dtype in (torch.bfloat16, torch.float32)
    if (kernel := unpack_kernel(out.device, base, out.dtype)) is not None:
        unpack_by_kernel(packed, out, base, kernel)
    else:
        unpack_by_calls(packed, out, base)


def unpack_by_calls(packed: Tensor, out: Tensor, base: Base) -> None:
    """Reference implementation of `unpack_into`, by PyTorch calls."""
    for matrices in _matrices(*parts(packed, tuple(out.shape), base), out, base):
        _UNPACK[base](*matrices)


_CODE: dict[Base, int] = {"nf4": 0, "int8": 1, "fp8": 2, "mxfp4": 3}  # BASE in unpack.cu


@lru_cache(maxsize=8)
def unpack_kernel(device: torch.device, base: Base, dtype: torch.dtype) -> Kernel | None:
    """Kernel for weights of this base. None on a CPU; None with a warning if it does not compile or its bits differ."""
    if device.type == "cpu":
        return None
    times = packing.UNPACK_BYTES_PER_ELEMENT[base] / packing.at_once_bytes((2**13, 2**13), base, 2) * 2**26
    how = f"{packing.UNPACK_KERNELS[base]} calls a chunk on {device.type}, and moves {times:.1f} times the bytes"
    return checked(
        partial(kernel_of, base, dtype, partial(compiled_kernel, device=device)),
        partial(unpacking_fault, device=device, base=base, dtype=dtype),
        f"unpacking {base} runs by {how}",
    )


def kernel_of(base: Base, dtype: torch.dtype, compiler: Callable[..., Kernel]) -> Kernel:
    """Compile the kernel for weights of this base with a function of file, kernel name and macros."""
    return compiler("unpack.cu", "unpack", OUT=ELEMENT[dtype], BASE=_CODE[base])


def unpacking_fault(kernel: Kernel, device: torch.device, base: Base, dtype: torch.dtype) -> str:
    """Compare a kernel with PyTorch calls on random codes and scales of all magnitudes. Empty if bitwise identical."""
    generator = torch.Generator().manual_seed(0)
    for shape in PROBE_SHAPES[base]:
        packed = torch.zeros(layout(shape, base).n_bytes, dtype=torch.uint8)
        codes, scales = parts(packed, shape, base)
        codes.view(torch.uint8).random_(256, generator=generator)
        if base == "mxfp4":
            scales.random_(256, generator=generator)
        else:
            exponents = torch.randint(-44, 38, scales.shape, generator=generator)
            scales.copy_(torch.randn(scales.shape, generator=generator) * 10.0**exponents)
        on_device = packed.to(device)
        results, expected = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        unpack_by_kernel(on_device, results, base, kernel)
        unpack_by_calls(on_device, expected, base)
        if n_wrong := int((bits(results) != bits(expected)).sum()):
            return f"{n_wrong} of its kernel's {results.numel()} numbers differ"
    return ""


def unpack_by_kernel(packed: Tensor, out: Tensor, base: Base, kernel: Kernel, limit: int = MOST_ELEMENTS) -> None:
    """Unpack by one launch of a kernel, or one per `limit` elements, because it counts in 32 bits."""
    codes, scales = parts(packed, tuple(out.shape), base)
    n_rows, n_columns = (out.numel() // NF4_BLOCK, NF4_BLOCK) if base == "nf4" else out.shape[-2:]
    if base == "int8":
        n_rows = out.numel() // n_columns
    block = {"fp8": FP8_BLOCK, "mxfp4": MXFP4_BLOCK}.get(base, 1)  # rows per scale
    out_MRC = out.view(-1, n_rows, n_columns)
    codes_MRC = codes.view(torch.uint8).view(len(out_MRC), n_rows, -1)
    scales_MG = scales.view(len(out_MRC), -(-n_rows // block), -1)
    matrices, rows = max(limit // (n_rows * n_columns), 1), max(limit // (n_columns * block), 1) * block
    for m in range(0, len(out_MRC), matrices):
        for r in range(0, n_rows, rows):
            part = out_MRC[m : m + matrices, r : r + rows]
            part_codes, part_scales = codes_MRC[m : m + matrices, r : r + rows], scales_MG[m : m + matrices, r // block :]
            n_blocks, sizes = -(-part.numel() // (UNPACK_WIDTH * THREADS)), [part.numel(), part.shape[1], n_columns]
            arguments = [part_codes, part_scales, part, _quantiles(out.device), *sizes, _INT8_STEP]
            kernel((n_blocks, 1, 1), (THREADS, 1, 1), arguments)


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> Tensor:
    return NF4.to(device)


@lru_cache
def prepare(device: torch.device, base: Base, dtype: torch.dtype) -> list[Tensor]:
    """Lookup tables: the two values of each nf4 or mxfp4 byte in one integer, which halves the lookups; and for mxfp4 each scale,
    2^-127 (subnormal) to 2^127. Entry 255 (NaN) is never read."""
    codes, wide = NF4 if base == "nf4" else torch.cat((_E2M1, -_E2M1)), torch.float32 if base == "nf4" else dtype
    pair = codes.repeat_interleave(16), codes.repeat(16)
    pairs = torch.stack(pair if base == "nf4" else pair[::-1], -1).to(wide)
    powers = [] if base == "nf4" else [torch.exp2(torch.arange(256.0, dtype=torch.float64) - _E8M0_BIAS).to(dtype).to(device)]
    return [pairs.view(torch.int64 if wide is torch.float32 else torch.int32).flatten().to(device), *powers]


def _unpack_nf4(codes_RC: Tensor, scales_R: Tensor, out_RC: Tensor) -> None:
    (pairs,) = prepare(out_RC.device, "nf4", torch.float32)
    wide = torch.empty(min(out_RC.numel(), UNPACK_CHUNK_ELEMENTS), dtype=torch.float32, device=out_RC.device)
    for rows in _chunks_of_rows(out_RC, 1):
        part = out_RC[rows]
        values = wide[: part.numel()].view_as(part)
        indices = part.view(torch.int32).view(-1)[: part.numel() // 2]  # in the output's memory
        indices.copy_(codes_RC[rows].view(-1))
        torch.index_select(pairs, 0, indices, out=values.view(-1).view(torch.int64))
        torch.mul(values, scales_R[rows, None], out=part)


def _unpack_int8(codes_RC: Tensor, scales_R: Tensor, out_RC: Tensor) -> None:
    wide = torch.empty(min(out_RC.numel(), UNPACK_CHUNK_ELEMENTS), dtype=torch.float32, device=out_RC.device)
    for rows in _chunks_of_rows(out_RC, 1):
        part = out_RC[rows]
        product = wide[: part.numel()].view_as(part)
        torch.mul(codes_RC[rows], scales_R[rows, None], out=product)
        torch.mul(product, _INT8_STEP, out=part)


def _unpack_fp8(codes_RC: Tensor, scales_GH: Tensor, out_RC: Tensor) -> None:
    for rows in _chunks_of_rows(out_RC, FP8_BLOCK):
        part = out_RC[rows]
        part.copy_(codes_RC[rows])  # exact in bf16 too
        for blocks, scale in _blocks(part, scales_GH[rows.start // FP8_BLOCK :]):
            blocks.mul_(scale)


def _unpack_mxfp4(codes: Tensor, scales_GC: Tensor, out_RC: Tensor) -> None:
    (pairs, powers), n_columns, scratch = prepare(out_RC.device, "mxfp4", out_RC.dtype), out_RC.shape[1], None
    for rows in _chunks_of_rows(out_RC, MXFP4_BLOCK):
        part, scale = out_RC[rows], scales_GC[rows.start // MXFP4_BLOCK : rows.stop // MXFP4_BLOCK].reshape(-1)
        n, start = part.numel() // 2, rows.start * n_columns // 2
        if scratch is None:  # the first chunk is the largest
            scratch = torch.empty(n + 2 * len(scale), dtype=torch.int32, device=part.device)
        indices, wide, power = scratch[:n], scratch[n:][: len(scale)], scratch[n + len(scale) :].view(part.dtype)[: len(scale)]
        indices.copy_(codes[start : start + n])
        torch.index_select(pairs, 0, indices, out=part.view(-1).view(pairs.dtype))
        wide.copy_(scale)
        torch.index_select(powers, 0, wide, out=power)
        part.view(-1, MXFP4_BLOCK, n_columns).mul_(power.view(-1, 1, n_columns))


@torch.no_grad()
def pack(weight: Tensor, base: Base) -> Tensor:
    """Pack a weight by chunks. ValueError if not finite. In int8 and fp8, rows or blocks too small for a reciprocal become zero."""
    shape = tuple(weight.shape)
    packed = torch.zeros(layout(shape, base).n_bytes, dtype=torch.uint8, device=weight.device)
    codes, scales = parts(packed, shape, base)
    for matrices in _matrices(codes, scales, weight, base):
        _PACK[base](*matrices)
    if not bool(scales.isfinite().all()) or (base == "mxfp4" and not bool(weight.isfinite().all())):
        n = weight.numel() - int(weight.isfinite().sum())
        raise ValueError(f"{n} of its {weight.numel()} numbers are not finite and cannot be packed as {base}")
    return packed


def _pack_nf4(codes_RC: Tensor, scales_R: Tensor, weight_RC: Tensor) -> None:
    edges = _NF4_EDGES.to(weight_RC.device)
    for rows in _chunks_of_rows(weight_RC, 1):
        wide = weight_RC[rows].float()
        scales_R[rows] = wide.abs().amax(1)
        scaled = wide * (1.0 / scales_R[rows].clamp(min=_SMALLEST))[:, None]
        code = torch.bucketize(scaled, edges, out_int32=True).to(torch.uint8)
        codes_RC[rows] = code[:, ::2] << 4 | code[:, 1::2]


def _pack_int8(codes_RC: Tensor, scales_R: Tensor, weight_RC: Tensor) -> None:
    for rows in _chunks_of_rows(weight_RC, 1):
        wide = weight_RC[rows].float()
        scales_R[rows] = wide.abs().amax(1)
        factor = _INT8_LARGEST / scales_R[rows, None]
        codes_RC[rows] = (wide * factor.masked_fill(factor.isinf(), 0.0)).round_()


def _pack_mxfp4(codes: Tensor, scales_GC: Tensor, weight_RC: Tensor) -> None:
    """OCP specification: a scale is the power of two in the largest element, divided by that in the largest code."""
    n_columns, edges = weight_RC.shape[1], _E2M1_EDGES.to(weight_RC.device)
    _, powers = prepare(weight_RC.device, "mxfp4", torch.float32)
    for rows in _chunks_of_rows(weight_RC, MXFP4_BLOCK):
        wide, start = weight_RC[rows].float().unflatten(0, (-1, MXFP4_BLOCK)), rows.start // MXFP4_BLOCK
        scale = (wide.abs().amax(1).frexp().exponent + (_E8M0_BIAS - 3)).clamp_(0, 254)  # 6 is 3/4 of 2^3
        code = torch.bucketize(wide.abs() / powers[scale][:, None], edges, out_int32=True).to(torch.uint8)
        code = (code | wide.signbit() << 3).view(-1, 2)
        codes[rows.start * n_columns // 2 :][: len(code)] = code[:, 0] | code[:, 1] << 4
        scales_GC[start : start + len(scale)] = scale


def _pack_fp8(codes_RC: Tensor, scales_GH: Tensor, weight_RC: Tensor) -> None:
    for rows in _chunks_of_rows(weight_RC, FP8_BLOCK):
        wide = weight_RC[rows].to(torch.float32, copy=True)
        for blocks, scale in _blocks(wide, scales_GH[rows.start // FP8_BLOCK :]):
            factor = _FP8_LARGEST / blocks.abs().amax((1, 3), keepdim=True)
            factor.masked_fill_(factor.isinf(), 1.0)
            scale.copy_(1.0 / factor)
            blocks.mul_(factor)
        codes_RC[rows] = wide


def _pack_fp8_rows(codes_RC: Tensor, scales_R: Tensor, weight_RC: Tensor) -> None:
    for rows in _chunks_of_rows(weight_RC, 1):
        codes, scales = quantise(weight_RC[rows])
        codes_RC[rows], scales_R[rows] = codes, scales[:, 0]


def _chunks_of_rows(matrix_RC: Tensor, step: int) -> Iterator[slice]:
    """Slices of a multiple of `step` rows: at most UNPACK_CHUNK_ELEMENTS elements, or `step` rows."""
    n_rows, n_columns = matrix_RC.shape
    n = max(UNPACK_CHUNK_ELEMENTS // (n_columns * step), 1) * step
    yield from (slice(start, min(start + n, n_rows)) for start in range(0, n_rows, n))


_UNPACK = {"nf4": _unpack_nf4, "int8": _unpack_int8, "fp8": _unpack_fp8, "mxfp4": _unpack_mxfp4}
_PACK = {"nf4": _pack_nf4, "int8": _pack_int8, "fp8": _pack_fp8, "mxfp4": _pack_mxfp4, "fp8-rows": _pack_fp8_rows}


def _matrices(codes: Tensor, scales: Tensor, weight: Tensor, base: Base) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Codes, scales and weight as matrices: blocks as rows in nf4; an fp8 stack is joined if its matrices end with whole blocks."""
    if base == "nf4":
        yield codes.view(-1, NF4_BLOCK // 2), scales, weight.reshape(-1, NF4_BLOCK)
    elif base == "fp8" and weight.dim() > 2 and weight.shape[-2] % FP8_BLOCK:
        yield from zip(codes, scales, weight, strict=True)
    else:
        rows = codes if base == "mxfp4" else codes.flatten(0, -2)
        yield rows, scales if base in ("int8", "fp8-rows") else scales.flatten(0, -2), weight.flatten(0, -2)


def _blocks(matrix_RC: Tensor, scales_GH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views (G, rows of a block, H, columns of a block) with the scales of each block: whole blocks, then partial ones."""
    n_rows, n_columns = matrix_RC.shape
    for rows, height in _spans(n_rows):
        for columns, width in _spans(n_columns):
            blocks = matrix_RC[rows, columns].unflatten(1, (-1, width)).unflatten(0, (-1, height))
            g, h = rows.start // FP8_BLOCK, columns.start // FP8_BLOCK
            yield blocks, scales_GH[g : g + len(blocks), None, h : h + blocks.shape[2], None]


def _spans(n: int) -> Iterator[tuple[slice, int]]:
    """(slice, block size) of the whole blocks in n rows or columns, and of the remainder."""
    n_whole = n // FP8_BLOCK * FP8_BLOCK
    if n_whole:
        yield slice(0, n_whole), FP8_BLOCK
    if n > n_whole:
        yield slice(n_whole, n), n - n_whole
