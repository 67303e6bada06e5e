"""How are tensors put into a file, and read back one by one?

In the safetensors format. Neither way holds a second copy of more than one of them.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
REOPEN_BYTES = 64 * 2**20
READ_BYTES = 2**20  # at a time, when a file is read back
END_BYTES = 4096  # of a tensor, by which it is told from another: a page of the file
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
    files are opened again, and an old mapping goes with the last tensor of it. Else loading a model would hold it twice.
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

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """(name, dtype as the format calls it) of each tensor; none is read."""
        return ((name, str(self._files[path].get_slice(name).get_dtype())) for name, path in self._at.items())

    def outline(self) -> str:
        """SHA-256 of every tensor's name, type, shape and ends: of two models that were trained apart, those of some differ."""
        digest = hashlib.sha256()
        for name in sorted(self):
            tensor = self[name]
            content = tensor.reshape(-1).view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            for end in (content[:END_BYTES], content[-END_BYTES:]):
                digest.update(end.numpy().tobytes())
        return digest.hexdigest()

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
class LazyTensor:
    """A tensor that exists only piece by piece, while it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]  # one after another, flat

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize


class NewFile:
    """A file that did not exist, with its SHA-256. What is written in order is added up on the way; the rest is read back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x+b")
        self._digest, self._n_digested_bytes = hashlib.sha256(), 0

    def write(self, content: bytes | memoryview, at: int | None = None) -> None:
        """Write some bytes: at the place where the last ones ended, or elsewhere."""
        file = self._file
        if at is not None and at != file.tell():
            file.seek(at)
        for start in range(0, len(content), CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            if file.tell() == self._n_digested_bytes:
                self._digest.update(part)
                self._n_digested_bytes += len(part)
            file.write(part)

    def close(self) -> dict[str, Any]:
        """Bring it down to the disk; its size and SHA-256."""
        file = self._file
        try:
            file.flush()
            os.fsync(file.fileno())
            file.seek(self._n_digested_bytes)
            while part := file.read(READ_BYTES):
                self._digest.update(part)
            return {"n_bytes": file.tell(), "sha256": self._digest.hexdigest()}
        finally:
            file.close()

    def give_up(self) -> None:
        """Close it as it is."""
        with suppress(OSError):
            self._file.close()


class TensorFile:
    """A safetensors file whose tensors come in any order. By hand, not by the library: it would hold all bytes a second time."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """A new file for tensors of these dtypes and shapes; their content is asked for by `put` alone."""
        assert sys.byteorder == "little", "the format is little-endian"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.in_order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # keeps every tensor aligned
        self.missing = set(tensors)
        self._start: dict[str, int] = {}
        at = 0
        for name in self.in_order:
            tensor = tensors[name]
            self._start[name], end = at, at + tensor.nbytes
            header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head_bytes = 8 + len(text)
        self._file = NewFile(path)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """Write one of the tensors."""
        self.missing.remove(name)
        at = self._head_bytes + self._start[name]
        for piece in _pieces(tensor):
            content = piece.detach().reshape(-1).view(torch.uint8).numpy().data
            self._file.write(content, at)
            at += len(content)

    def close(self) -> dict[str, Any]:
        """When all tensors are written: bring the file down to the disk; its size and SHA-256."""
        assert not self.missing, self.missing
        return self._file.close()

    def give_up(self) -> None:
        self._file.give_up()


def write_new(path: Path, content: bytes) -> dict[str, Any]:
    """Write some bytes to a new file, down to the disk; its size and SHA-256."""
    file = NewFile(path)
    try:
        file.write(content)
        return file.close()
    finally:
        file.give_up()


def _pieces(tensor: Tensor | LazyTensor) -> Iterable[Tensor]:
    return tensor.pieces() if isinstance(tensor, LazyTensor) else (tensor,)
