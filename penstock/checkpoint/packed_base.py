"""Packed base weights (QLoRA): read from a model published in packed form, or packed once and cached.

The cache is a safetensors file. The name of its folder is a hash of the inputs of packing. The folder is written atomically, and
rebuilt if it is incomplete. Concurrent runs wait for the one that writes.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import alone
from penstock.runtime.layers.packed_weights import NF4, pack, parts
from penstock.runtime.plan.packed import FP8_BLOCK, NF4_BLOCK, Base, is_readable, layout, published_as

from .dequantised import BLOCKS, ROW_SCALES, fp8_parts, fp8_row_parts, mxfp4_parts
from .disk import new_folder, writing
from .model_files import load_weights, publish, weight_files, weights_digest
from .tensor_files import Shapes, Shards, write_tensors

FORMAT = 1  # version of the cache and of the packing
Read = Callable[[str], Tensor]  # reads the packed bytes of a parameter
_IN_BF16 = "give the model as it was published in bf16"
# Fields of a quantisation config that name its method
_METHOD = ("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "weight_block_size")
# Suffixes of the tensors that belong to a packed weight
_SUFFIX = re.compile(r"(\.(nested_)?(absmax|quant_map)|\.quant_state\..+|_scale_inv|_blocks|_scales)$")
_PACKED = "packed.safetensors"


def packed_base(folder: Path, config: Mapping[str, Any], shapes: Shapes, base: Base, cache: Path) -> Read:
    """Return a function that reads packed weights by name, as flat bytes. bf16 weights are packed into `cache` first; for fp8-rows,
    also bf16 values of weights published in FP8 by blocks, or in MXFP4."""
    published = published_base(folder, config)
    if published == base:
        return _Published(folder, config, shapes, base).read
    if not is_readable(published, base):
        also = " --compute fp8" if published == "fp8-rows" else ""
        raise CheckpointError(f"{folder}: its weights are packed in {published}, not in {base}; plan with --base {published}{also}")
    key = json.dumps([FORMAT, weights_digest(folder), sorted(shapes.items())])
    place = cache / f"base-{base}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    with writing(cache), alone(cache, "base.lock"):
        try:
            return Shards([place / _PACKED]).__getitem__
        except CheckpointError:  # missing or damaged
            shutil.rmtree(place, ignore_errors=True)
            _pack(place, folder, config, shapes, base)
            return Shards([place / _PACKED]).__getitem__


# -- packing into the cache -------------------------------------------------------------------------------------------


def _pack(place: Path, folder: Path, config: Mapping[str, Any], shapes: Shapes, base: Base) -> None:
    """Pack the weights into the cache, one after another. The caller holds its lock."""
    outlines = {name: torch.empty(layout(shape, base).n_bytes, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}

    def packed_weights() -> Iterator[Tensor]:
        for name, weight in load_weights(folder, config, shapes, shapes):
            try:
                yield pack(weight, base)
            except ValueError as error:
                raise CheckpointError(f"{folder}: {name}: {error}; give a model with finite weights") from None

    with new_folder(place) as partial_folder:
        write_tensors(partial_folder / _PACKED, outlines, packed_weights())


# -- published packed -------------------------------------------------------------------------------------------------


def published_base(folder: Path, config: Mapping[str, Any]) -> Base:
    """Return the format of a model's weights, from its configuration. CheckpointError for an unsupported quantisation method."""
    base = published_as(config)
    if base is None:
        fields = config.get("quantization_config") or config.get("compression_config")
        method = {key: fields[key] for key in _METHOD if key in fields} if isinstance(fields, dict) else fields
        raise CheckpointError(f"{folder}: its weights are packed by {json.dumps(method)[:120]}, which is not read; {_IN_BF16}")
    return base


_READ = {"mxfp4": mxfp4_parts, "fp8-rows": fp8_row_parts}


class _Published:
    """Packed weights in a model's files, rearranged to our layout on access.

    Unpacked, they are bitwise identical to the weights of bitsandbytes or transformers.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], shapes: Shapes, base: Base) -> None:
        self._folder, self._shapes, self._base = folder, shapes, base
        self._stored = Shards(weight_files(folder))
        self._pieces = {name: self._pieces_of(config, name) for name in shapes}
        self._refuse_others({name for pieces in self._pieces.values() for name, _ in pieces})

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        packed = torch.zeros(layout(shape, self._base).n_bytes, dtype=torch.uint8)
        codes, scales = (part.view(-1) for part in parts(packed, shape, self._base))
        offset = scales_offset = 0
        for piece in self._pieces[name]:
            read = _READ.get(self._base, fp8_parts)
            piece_codes, piece_scales = self._nf4(*piece) if self._base == "nf4" else read(self._folder, self._stored, *piece)
            codes[offset : offset + piece_codes.numel()] = piece_codes.reshape(-1)
            scales[scales_offset : scales_offset + piece_scales.numel()] = piece_scales.reshape(-1)
            offset, scales_offset = offset + piece_codes.numel(), scales_offset + piece_scales.numel()
        return packed

    def _pieces_of(self, config: Mapping[str, Any], name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return (name, shape) of the stored tensors of a parameter, in order: itself, or one or more per expert."""
        shape = self._shapes[name]
        if name in self._stored or self._base == "mxfp4":
            return [(name, shape)]
        pieces = [(piece, tuple(t.shape)) for piece, t in publish(config, name, torch.empty(shape, device="meta"))]
        block = 1 if self._base == "fp8-rows" else FP8_BLOCK
        for piece, piece_shape in pieces:
            # No block may cross into the next piece. The last fp8 block may be shorter, at the end of the matrix.
            is_cut = prod(piece_shape) % NF4_BLOCK if self._base == "nf4" else piece_shape[-2] % block
            if is_cut and (self._base == "nf4" or piece_shape[-2] != shape[-2]):
                raise CheckpointError(f"{self._folder}: {piece} does not end at a block boundary; {_IN_BF16}")
        return pieces

    def _refuse_others(self, pieces: set[str]) -> None:
        """Raise CheckpointError if a piece is not packed, or if another tensor is packed."""
        mark = {"nf4": ".quant_state.bitsandbytes__nf4", "mxfp4": BLOCKS, "fp8-rows": ROW_SCALES}.get(self._base, "_scale_inv")
        for piece in pieces:
            if piece in self._stored and piece + mark not in self._stored:
                raise CheckpointError(f"{self._folder}: {piece} is not packed in {self._base}, as others are; {_IN_BF16}")
        for name, dtype in self._stored.dtypes():
            weight = _SUFFIX.sub("", name)
            if weight not in pieces and re.match("[UIF]8", dtype):
                raise CheckpointError(f"{self._folder}: {weight[:200]} is packed too, and no projection of a layer; {_IN_BF16}")

    def _nf4(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the codes, and one scale per 64 numbers. The block size of bitsandbytes may be a multiple of 64."""
        n, codes = prod(shape), self._stored[name].reshape(-1).view(torch.uint8)
        scales, quant_state = self._stored[f"{name}.absmax"], None
        with suppress(ValueError, RecursionError):  # JSON of bitsandbytes about a weight
            quant_state = json.loads(self._stored[f"{name}.quant_state.bitsandbytes__nf4"].numpy().tobytes())
        if f"{name}.nested_absmax" in self._stored:
            scales = self._expanded(name, shape, scales, quant_state)
        match quant_state:
            case {"quant_type": "nf4", "blocksize": int(block), "shape": list(sides)} if block > 0 and tuple(sides) == shape:
                sizes = codes.numel(), block % NF4_BLOCK, tuple(scales.shape), scales.dtype
                if sizes == (n // 2, 0, (-(-n // block),), torch.float32) and torch.equal(self._stored[f"{name}.quant_map"], NF4):
                    return codes, scales.repeat_interleave(block // NF4_BLOCK)[: n // NF4_BLOCK]
        raise self._wrong_format(name, shape)

    def _expanded(self, name: str, shape: tuple[int, ...], codes: Tensor, quant_state: object) -> Tensor:
        """Return scales that are quantised too (double quantisation): table[8-bit code] times the block's scale, plus an offset."""
        table, largest = self._stored[f"{name}.nested_quant_map"], self._stored[f"{name}.nested_absmax"]
        match quant_state:
            case {"nested_blocksize": int(block), "nested_offset": float(offset)} if block > 0:
                sizes = codes.dtype, tuple(table.shape), table.dtype, tuple(largest.shape), largest.dtype
                if sizes == (torch.uint8, (256,), torch.float32, (-(-len(codes) // block),), torch.float32):
                    return table[codes.long()] * largest.repeat_interleave(block)[: len(codes)] + offset
        raise self._wrong_format(name, shape)

    def _wrong_format(self, name: str, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(f"{self._folder}: {name} is no weight of {shape} packed in nf4; copy the model again")
