"""Weights published in FP8 (one scale per block) or MXFP4, read in bf16 for full training.

Values are those of transformers. One weight is dequantised at a time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError
from penstock.runtime.layers.packed_weights import parts, unpack_into
from penstock.runtime.plan.packed import MXFP4_BLOCK, Base, layout

from .tensor_files import Shards

BLOCKS, ROW_SCALES, _SCALES, _FP8_SCALES = "_blocks", "_scale", "_scales", "_scale_inv"
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dequantised(Mapping[str, Tensor]):
    """Tensors of a model's files by name, read on access. FP8 and MXFP4 weights are dequantised to bf16."""

    def __init__(self, folder: Path, stored: Shards) -> None:
        self._folder, self._stored = folder, stored
        self._fp8 = {name for name in stored if f"{name}{_FP8_SCALES}" in stored}
        stems = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
        self._mxfp4 = {stem for stem in stems if f"{stem}{_SCALES}" in stored}
        consumed = {f"{name}{_FP8_SCALES}" for name in self._fp8}
        consumed |= {stem + end for stem in self._mxfp4 for end in (BLOCKS, _SCALES)}
        self._names = {name: None for name in stored if name not in consumed} | dict.fromkeys(sorted(self._mxfp4))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        base: Base = "mxfp4" if name in self._mxfp4 else "fp8" if name in self._fp8 else "bf16"
        if base == "bf16":
            return self._stored[name]
        shape = tuple(self._stored[name].shape) if base == "fp8" else mxfp4_shape(self._folder, self._stored, name)
        packed, out = torch.zeros(layout(shape, base).n_bytes, dtype=torch.uint8), torch.empty(shape, dtype=torch.bfloat16)
        read = fp8_parts if base == "fp8" else mxfp4_parts
        for part, values in zip(parts(packed, shape, base), read(self._folder, self._stored, name, shape), strict=True):
            part.copy_(values)
        unpack_into(packed, out, base)
        return out

    def outline(self, name: str) -> Tensor:
        if name in self._mxfp4:
            return torch.empty(mxfp4_shape(self._folder, self._stored, name), dtype=torch.bfloat16, device="meta")
        return self._stored.outline(name)

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """Yield (name, safetensors dtype, for example `BF16`) of each tensor without reading it."""
        dequantised = self._fp8 | self._mxfp4
        yield from ((name, "BF16") for name in sorted(dequantised))
        yield from ((name, dtype) for name, dtype in self._stored.dtypes() if name in self._names and name not in dequantised)


def fp8_parts(folder: Path, stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the FP8 codes in this shape, and the scale of each block in fp32, bf16 or fp16."""
    codes, scales = stored[name], stored[f"{name}{_FP8_SCALES}"]
    is_fp8 = codes.dtype is torch.float8_e4m3fn and scales.dtype in _SCALE_DTYPES and codes.dim() >= 2
    if not is_fp8 or tuple(codes.shape) != shape or tuple(scales.shape) != layout(shape, "fp8").scales:
        raise _wrong_format(folder, name, "FP8 with a scale for each block of 128 x 128")
    return codes, scales


def fp8_row_parts(folder: Path, stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the FP8 codes in this shape, and the scale of each row, as compressed-tensors stores them."""
    codes, scales = stored[name], stored[f"{name}{ROW_SCALES}"]
    is_fp8 = codes.dtype is torch.float8_e4m3fn and scales.dtype in _SCALE_DTYPES and tuple(codes.shape) == shape
    if not is_fp8 or tuple(scales.shape) not in (shape[:-1], (*shape[:-1], 1)) or not bool(scales.isfinite().all()):
        raise _wrong_format(folder, name, "FP8 with a finite scale for each row")
    return codes, scales


def mxfp4_shape(folder: Path, stored: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return (experts, inputs, outputs) of an MXFP4 stack. Codes are in blocks along the inputs, with one scale per block."""
    blocks, scales = stored[name + BLOCKS], stored[name + _SCALES]
    is_mxfp4 = blocks.dtype is scales.dtype is torch.uint8 and blocks.dim() == 4 and blocks.shape[-1] == MXFP4_BLOCK // 2
    if not is_mxfp4 or blocks.shape[:-1] != scales.shape or blocks.shape[1] % 2:
        raise _wrong_format(folder, name, "MXFP4 in blocks of 32")
    n_experts, n_out, n_blocks, _ = blocks.shape
    return n_experts, n_blocks * MXFP4_BLOCK, n_out


def mxfp4_parts(folder: Path, stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the flat codes and the scales of a stack, in the order of `shape`. Files hold its transpose."""
    if mxfp4_shape(folder, stored, name) != shape:
        raise _wrong_format(folder, name, f"MXFP4 of {shape}")
    n_experts, n_in, n_out = shape
    scales = stored[name + _SCALES].transpose(1, 2)
    if scales.numel() and int(scales.max()) == 255:
        raise _wrong_format(folder, name, "MXFP4 numbers: a scale of 255 is none")
    codes = torch.empty(n_experts, n_in // 2, 2, n_out // 2, dtype=torch.uint8)
    for expert_codes, bytes_OI in zip(codes, stored[name + BLOCKS].flatten(2), strict=True):
        first, second = bytes_OI[0::2], bytes_OI[1::2]  # rows of two outputs; a byte holds two inputs
        expert_codes[:, 0] = (second << 4).bitwise_or_(first & 0x0F).t()
        expert_codes[:, 1] = (first >> 4).bitwise_or_(second & 0xF0).t()
    return codes.view(-1), scales


def _wrong_format(folder: Path, name: str, form: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {name[:200]} is not in {form}; copy the model again, or give it in bf16")
