"""Where do packed weights come from?

From the model's own files, if they were published packed. Else they are packed once, and kept in a safetensors file: its folder is
named after all that its content depends on, appears whole or not at all, and is made again where it is not whole. Runs that begin
at the same time wait for the one that writes.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.files import alone, sync
from runtime.layers.packed_weights import NF4, pack, parts
from runtime.plan.packed import FP8_BLOCK, NF4_BLOCK, Base, layout, packed_bytes, published_as

from .checkpoint import load_weights, outline_of, publish, weight_files
from .room import refusal
from .tensor_files import Shards, TensorFile, write_new

FORMAT = 1  # of the files, and of packing itself; what is kept in another one is packed again
Shapes = Mapping[str, tuple[int, ...]]  # of the parameters that are packed, by name
_IN_BF16 = "give the model as it was published in bf16"
# What the name of a packed weight is followed by, in the names of what belongs to it.
_BESIDE = re.compile(r"(\.(nested_)?(absmax|quant_map)|\.quant_state\..+|_scale_inv)$")
_PACKED, _ABOUT = "packed.safetensors", "about.json"


def packed_base(folder: Path, config: Mapping[str, Any], shapes: Shapes, base: Base, cache: Path) -> Mapping[str, Tensor]:
    """The packed weights of a model's folder by name, flat bytes that are read when they are asked for.

    `shapes` has every parameter that is packed. Those of a model that was published in bf16 are kept in `cache`.
    """
    published = published_base(folder, config)
    if published == base:
        return _Published(folder, str(config.get("model_type")), shapes, base)
    if published != "bf16":
        raise CheckpointError(
            f"{folder}: its weights are packed in {published}, not in {base}; train from it with base {published}"
        )
    return _kept(folder, shapes, base, cache)


# -- packed once ------------------------------------------------------------------------------------------------------


class _Kept(Mapping[str, Tensor]):
    """Weights in a file of this house's, each compared with its SHA-256 when it is read."""

    def __init__(self, folder: Path, sums: Mapping[str, str]) -> None:
        self._folder, self._sums = folder, sums
        self.stored = Shards([folder / _PACKED])

    def __getitem__(self, name: str) -> Tensor:
        packed = self.stored[name]
        if _sha256(packed) != self._sums[name]:
            raise CheckpointError(f"{self._folder}: {name} is not what was packed (SHA-256); delete the folder, and start again")
        return packed

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)


def _kept(folder: Path, shapes: Shapes, base: Base, cache: Path) -> _Kept:
    """What is kept of a model's weights, or is packed now."""
    key = json.dumps([FORMAT, outline_of(folder), sorted(shapes.items())])
    place = cache / f"base-{base}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    try:
        with alone(cache, "base.lock"):  # one run at a time looks there, and makes what is missing
            whole = _whole(place, shapes)
            return _make(place, folder, shapes, base) if whole is None else whole
    except OSError as error:
        raise refusal(cache, error) from None


def _whole(place: Path, shapes: Shapes) -> _Kept | None:
    """What is kept, if it says of itself what was said of it, and has a whole file with these weights."""
    try:
        about = json.loads((place / _ABOUT).read_bytes())
        sums = {str(name): str(sha256) for name, sha256 in about["tensors"].items()}
        kept = _Kept(place, sums)
        return kept if about["sha256"] == _sum_of(sums) and set(kept.stored) == set(kept) == set(shapes) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _sum_of(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()


def _sha256(packed: Tensor) -> str:
    return hashlib.sha256(packed.numpy().data).hexdigest()


def _make(place: Path, folder: Path, shapes: Shapes, base: Base) -> _Kept:
    """Pack one weight after another, beside their place, and move them there. Who comes here has the lock: what lies there is
    stale."""
    partial = place.with_name(f"{place.name}.partial")
    for stale in (partial, place):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)
    partial.mkdir()
    try:
        sums = dict[str, str]()
        expected = {
            name: torch.empty(packed_bytes(shape, base), dtype=torch.uint8, device="meta") for name, shape in shapes.items()
        }
        file = TensorFile(partial / _PACKED, expected)
        try:
            for name, weight in load_weights(folder, file.in_order, shapes):
                packed = _packed(folder, name, weight, base)
                sums[name] = _sha256(packed)
                file.put(name, packed)
            file.close()
        finally:
            file.give_up()
        write_new(partial / _ABOUT, json.dumps({"tensors": sums, "sha256": _sum_of(sums)}).encode())
        sync(partial)
        partial.rename(place)
        sync(place.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return _Kept(place, sums)


def _packed(folder: Path, name: str, weight: Tensor, base: Base) -> Tensor:
    try:
        return pack(weight, base)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {name}: {error}; give a model whose weights are numbers") from None


# -- published packed -------------------------------------------------------------------------------------------------


def published_base(folder: Path, config: Mapping[str, Any]) -> Base:
    """What a model's configuration says that its weights are packed in; bf16 if it says nothing. CheckpointError, with its name,
    for what is not read."""
    base = published_as(config)
    if base is None:
        how = _method(config.get("quantization_config") or config.get("compression_config"))
        raise CheckpointError(f"{folder}: its weights are packed by {how}, which is not read; {_IN_BF16}")
    return base


def _method(said: object) -> str:
    """What a configuration says, in a few words."""
    if not isinstance(said, dict):
        return "an unknown method"
    how = str(said.get("quant_method", "an unknown method"))[:40]
    match said:
        case {"load_in_4bit": True}:
            return f"bitsandbytes in 4 bits ({str(said.get('bnb_4bit_quant_type', 'fp4'))[:40]})"
        case {"load_in_8bit": True}:
            return "bitsandbytes in 8 bits"
        case {"quant_method": "fp8"}:
            return f"{how} in blocks of {str(said.get('weight_block_size'))[:40]}"
    return how


class _Published(Mapping[str, Tensor]):
    """Weights that a model's files hold packed, put in this house's order when they are asked for.

    What is unpacked is, bit for bit, what bitsandbytes or transformers would compute with.
    """

    def __init__(self, folder: Path, model_type: str, shapes: Shapes, base: Base) -> None:
        self._folder, self._shapes, self._base = folder, shapes, base
        self._stored = Shards(weight_files(folder))
        self._names = set(self._stored)
        self._pieces = {name: self._pieces_of(model_type, name) for name in shapes}
        self._refuse_others({name for pieces in self._pieces.values() for name, _ in pieces})

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        packed = torch.zeros(packed_bytes(shape, self._base), dtype=torch.uint8)
        codes, scales = (part.view(-1) for part in parts(packed, shape, self._base))
        at = scales_at = 0
        for piece, piece_shape in self._pieces[name]:
            more, more_scales = self._nf4(piece, piece_shape) if self._base == "nf4" else self._fp8(piece, piece_shape)
            codes[at : at + more.numel()] = more.reshape(-1)
            scales[scales_at : scales_at + more_scales.numel()] = more_scales.reshape(-1)
            at, scales_at = at + more.numel(), scales_at + more_scales.numel()
        return packed

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _pieces_of(self, model_type: str, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the tensors that a parameter consists of, in its order: itself, or its experts' own."""
        shape = self._shapes[name]
        if name in self._names:
            return [(name, shape)]
        whole = torch.empty(shape, device="meta")
        pieces = [(piece, tuple(tensor.shape)) for piece, tensor in publish(model_type, name, whole)]
        for piece, piece_shape in pieces:
            if not self._ends_a_block(piece_shape, shape):
                raise CheckpointError(f"{self._folder}: {piece} ends within a block, and another follows it; {_IN_BF16}")
        return pieces

    def _ends_a_block(self, piece: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Whether a piece of a parameter has blocks of its own; in fp8, whose last may be cut short only where a matrix ends."""
        if self._base == "nf4":
            return prod(piece) % NF4_BLOCK == 0
        return piece[-2] == whole[-2] or piece[-2] % FP8_BLOCK == 0

    def _refuse_others(self, pieces: set[str]) -> None:
        """CheckpointError where a piece is not packed, or something else is."""
        mark = ".quant_state.bitsandbytes__nf4" if self._base == "nf4" else "_scale_inv"
        for piece in pieces:
            if piece in self._names and piece + mark not in self._names:
                raise CheckpointError(f"{self._folder}: {piece} is not packed in {self._base}, as others are; {_IN_BF16}")
        for name, dtype in self._stored.dtypes():
            of = _BESIDE.sub("", name)
            if of not in pieces and re.match("[UIF]8", dtype):
                raise CheckpointError(f"{self._folder}: {of[:200]} is packed too, and no projection of a layer; {_IN_BF16}")

    def _tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise CheckpointError(f"{self._folder}: no tensor {name} in its safetensors files; copy the model again")
        return self._stored[name]

    def _fp8(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes and scales of a weight with an fp32 scale for each block, or one that is exact in fp32."""
        codes, scales = self._tensor(name), self._tensor(f"{name}_scale_inv")
        if codes.dtype is not torch.float8_e4m3fn or scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise self._odd(name, shape)
        if (tuple(codes.shape), tuple(scales.shape)) != (shape, layout(shape, "fp8").scales):
            raise self._odd(name, shape)
        return codes, scales

    def _nf4(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes of a weight and the scale of each 64 of its numbers, whatever multiple of that shares one in the file."""
        n, codes = prod(shape), self._tensor(name).reshape(-1).view(torch.uint8)
        scales, said = self._tensor(f"{name}.absmax"), self._said(name)
        if f"{name}.nested_absmax" in self._names:
            scales = self._expanded(name, shape, scales, said)
        match said:
            case {"quant_type": "nf4", "blocksize": int(block), "shape": list(of)} if block > 0 and tuple(of) == shape:
                sizes = codes.numel(), block % NF4_BLOCK, tuple(scales.shape), scales.dtype
                if sizes == (n // 2, 0, (-(-n // block),), torch.float32) and torch.equal(self._tensor(f"{name}.quant_map"), NF4):
                    return codes, scales.repeat_interleave(block // NF4_BLOCK)[: n // NF4_BLOCK]
        raise self._odd(name, shape)

    def _said(self, name: str) -> Any:
        """What bitsandbytes says of a weight besides its tensors."""
        try:
            return json.loads(self._tensor(f"{name}.quant_state.bitsandbytes__nf4").numpy().tobytes())
        except (ValueError, RecursionError):
            return None

    def _expanded(self, name: str, shape: tuple[int, ...], codes: Tensor, said: object) -> Tensor:
        """Scales that are packed themselves (double quantisation): 8-bit codes times a scale for each block, and an offset."""
        table, largest = self._tensor(f"{name}.nested_quant_map"), self._tensor(f"{name}.nested_absmax")
        match said:
            case {"nested_blocksize": int(block), "nested_offset": float(offset)} if block > 0:
                sizes = codes.dtype, tuple(table.shape), table.dtype, tuple(largest.shape), largest.dtype
                if sizes == (torch.uint8, (256,), torch.float32, (-(-len(codes) // block),), torch.float32):
                    return table[codes.long()] * largest.repeat_interleave(block)[: len(codes)] + offset
        raise self._odd(name, shape)

    def _odd(self, name: str, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(f"{self._folder}: {name} is no weight of {shape} packed in {self._base}; copy the model again")
