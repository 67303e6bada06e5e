"""Safetensors files, written and read one tensor at a time.

The safetensors library's writer serialises all tensors of a file in memory, which would be a second copy of the state.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.runtime.errors import CheckpointError
from penstock.runtime.units import on_one_line

Shapes = Mapping[str, tuple[int, ...]]  # shape of weights by name
REOPEN_BYTES = 64 * 2**20  # bytes read until files are mapped again
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
_FLOATS = ("F32", "BF16", "F16", "F8_E4M3")
_DTYPE_NAMES |= {torch.float64: "F64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16"}  # buffers of a merged model


class Shards(Mapping[str, Tensor]):
    """Tensors of several safetensors files by name, read on access.

    A tensor is a view of its memory-mapped file, and pages that were read remain in the process. After REOPEN_BYTES the files are
    mapped again, and an old mapping is freed with its last tensor. Otherwise loading a model would hold it twice.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {path: _open(path) for path in files}
        self._read_from: set[Path] = set()
        self._n_read_bytes = 0
        self._file_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118 not a dict

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            folder, advice = next(iter(self._files)).parent, "give the weights of this model, or copy it again"
            raise CheckpointError(f"{folder}: no tensor {name} in its safetensors files; {advice}")
        path = self._file_of[name]
        try:
            if self._n_read_bytes > REOPEN_BYTES:
                self._files |= {read: _open(read) for read in self._read_from}
                self._read_from, self._n_read_bytes = set(), 0
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name}: cannot be read ({on_one_line(str(error), 120)}); copy it again") from None
        self._read_from.add(path)
        self._n_read_bytes += tensor.nbytes
        return tensor

    def outline(self, name: str) -> Tensor:
        """Return the tensor on the meta device."""
        return torch.empty_like(self[name], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def last_rows(self, names: re.Pattern[str], n: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the last `n` rows of each floating-point matrix, or stack of them, with such a name and at least that many rows."""
        for name, path in self._file_of.items():
            part = self._files[path].get_slice(name)
            if names.match(name) and [*(shape := part.get_shape())[-2:-1]] >= [n] and part.get_dtype() in _FLOATS:
                yield name, part[(*(slice(size - 1, size) for size in shape[:-2]), slice(shape[-2] - n, shape[-2]))]

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """Yield (name, safetensors dtype, for example `BF16`) of each tensor without reading it."""
        return ((name, str(self._files[path].get_slice(name).get_dtype())) for name, path in self._file_of.items())


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({on_one_line(str(error), 120)}); copy it again") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file. CheckpointError if it is no safetensors file."""
    with _open(path) as file:
        return file.metadata() or {}


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and all tensors of a file. CheckpointError if it cannot be read completely."""
    try:
        with _open(path) as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({on_one_line(str(error), 120)}); copy it again") from None


def write_tensors(
    path: Path, outlines: Mapping[str, Tensor], contents: Iterable[Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Write a new safetensors file and sync it. Return its size and SHA-256.

    `outlines`: dtypes and shapes of the tensors, which may be on the meta device; wider dtypes first, for alignment. `contents`:
    their values in the same order, each whole or in pieces; `metadata`: strings in the header.
    """
    assert sys.byteorder == "little", "the format is little-endian"
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in outlines.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = write_new(path, chain([len(text).to_bytes(8, "little") + text], map(_bytes_of, contents)))
    assert written["n_bytes"] == 8 + len(text) + end, "contents are those of the outlines"
    return written


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file piece by piece and sync it. Return its size and SHA-256."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            del piece  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
        return {"n_bytes": file.tell(), "sha256": digest.hexdigest()}
