"""How are tensors put into a file, and read back one by one?

In the safetensors format. Neither way holds a second copy of more than one of them.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
REOPEN_BYTES = 64 * 2**20
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}


class Shards(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each read when it is asked for.

    A tensor is a part of its mapped file, and what has been read of a mapping stays in the process's memory: after some bytes the
    files are opened anew, and an old mapping goes with the last tensor of it. Else loading a model would hold it twice.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {path: _open(path) for path in files}
        self._read_from: set[Path] = set()
        self._n_read_bytes = 0
        self._at = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118 not a dict

    def __getitem__(self, name: str) -> Tensor:
        path = self._at[name]
        try:
            if self._n_read_bytes > REOPEN_BYTES:
                self._files |= {read: _open(read) for read in self._read_from}
                self._read_from, self._n_read_bytes = set(), 0
            tensor: Tensor = self._files[path].get_tensor(name)
            self._read_from.add(path)
            self._n_read_bytes += tensor.nbytes
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name}: cannot be read ({_first_line(error)}); copy it again") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({_first_line(error)}); copy it again") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that exists only piece by piece, while it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]  # one after another, flat

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Made]) -> dict[str, Any]:
    """Write a safetensors file. By hand, not by the library: it would hold all bytes in memory a second time."""
    assert sys.byteorder == "little", "the format is little-endian"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = (piece for name in order for piece in _pieces(tensors[name]))
    return write_new(path, [len(text).to_bytes(8, "little"), text], pieces)


def _pieces(tensor: Tensor | Made) -> Iterable[Tensor]:
    return tensor.pieces() if isinstance(tensor, Made) else (tensor,)


def write_new(path: Path, head: Iterable[bytes], tensors: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Write some bytes and then tensors to a new file, down to the disk; its size and SHA-256."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in head:
            file.write(piece)
            digest.update(piece)
        for tensor in tensors:
            content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(content), CHUNK_BYTES):
                file.write(content[at : at + CHUNK_BYTES])
                digest.update(content[at : at + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
        return {"n_bytes": file.tell(), "sha256": digest.hexdigest()}
