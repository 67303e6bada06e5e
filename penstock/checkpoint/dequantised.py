"""Weights that are published in few bits, read in bf16 for training whole: FP8 with a scale for each block, and MXFP4.

They have transformers' own values, and are made one weight at a time, MXFP4 one expert at a time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.layers.packed_weights import parts, unpack_into
from runtime.plan.packed import layout

from .tensor_files import Shards

_BLOCKS, _SCALES, _OF_FP8 = "_blocks", "_scales", "_scale_inv"
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dequantised(Mapping[str, Tensor]):
    """The tensors of a model's files by name, each read when it is asked for; those in FP8 or MXFP4 as what they stand for."""

    def __init__(self, folder: Path, stored: Shards) -> None:
        self._folder, self._stored = folder, stored
        self._fp8 = {name for name in stored if f"{name}{_OF_FP8}" in stored}
        stems = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        self._mxfp4 = {stem for stem in stems if f"{stem}{_SCALES}" in stored}
        beside = {f"{name}{_OF_FP8}" for name in self._fp8}
        beside |= {stem + end for stem in self._mxfp4 for end in (_BLOCKS, _SCALES)}
        self._names = {name: None for name in stored if name not in beside} | dict.fromkeys(sorted(self._mxfp4))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._mxfp4:
            return self._of_mxfp4(name)
        return self._of_fp8(name) if name in self._fp8 else self._stored[name]

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """(name, dtype in the format's words) of each tensor, without reading any."""
        made = self._fp8 | self._mxfp4
        yield from ((name, "BF16") for name in sorted(made))
        yield from ((name, dtype) for name, dtype in self._stored.dtypes() if name in self._names and name not in made)

    def _of_fp8(self, name: str) -> Tensor:
        shape = tuple(self._stored[name].shape)
        codes, scales = fp8_parts(self._folder, self._stored, name, shape)
        packed, out = torch.zeros(layout(shape, "fp8").n_bytes, dtype=torch.uint8), torch.empty(shape, dtype=torch.bfloat16)
        for part, given in zip(parts(packed, shape, "fp8"), (codes, scales), strict=True):
            part.copy_(given)
        unpack_into(packed, out, "fp8")
        return out

    def _of_mxfp4(self, name: str) -> Tensor:
        """(experts, inputs, outputs), of codes in blocks along the inputs, with a scale each."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = self._stored[name + _BLOCKS], self._stored[name + _SCALES]
        is_mxfp4 = blocks.dtype is scales.dtype is torch.uint8 and blocks.dim() == 4 and blocks.shape[-1] == 16
        if not is_mxfp4 or blocks.shape[:-1] != scales.shape:
            raise _odd(self._folder, name, "MXFP4 in blocks of 32")
        n_experts, n_rows, n_blocks, _ = blocks.shape
        out = torch.empty(n_experts, n_blocks * 32, n_rows, dtype=torch.bfloat16)
        for e in range(n_experts):
            out[e] = convert_moe_packed_tensors(blocks[e : e + 1], scales[e : e + 1])[0]
        return out


def fp8_parts(folder: Path, stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes of this shape, and the scale of each block in fp32 or a dtype that is exact in it."""
    codes, scales = stored[name], stored[f"{name}{_OF_FP8}"]
    is_fp8 = codes.dtype is torch.float8_e4m3fn and scales.dtype in _SCALE_DTYPES and codes.dim() >= 2
    if not is_fp8 or tuple(codes.shape) != shape or tuple(scales.shape) != layout(shape, "fp8").scales:
        raise _odd(folder, name, "FP8 with a scale for each block of 128 x 128")
    return codes, scales


def _odd(folder: Path, name: str, form: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {name[:200]} is not in {form}; copy the model again, or give it in bf16")
