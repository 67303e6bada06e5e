"""Safetensors files, written and read one tensor at a time.

The safetensors library's own writer serialises all tensors of a file in memory, a second copy of the state; here one tensor is.
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

CHUNK_BYTES = 64 * 2**20  # written at a time
REOPEN_BYTES = 64 * 2**20  # read before files are mapped anew
READ_BYTES = 2**20  # at a time, when a file is hashed
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
    """The tensors of several safetensors files by name, each read when it is asked for.

    A tensor is a view of its memory-mapped file, and pages once read stay in the process: after REOPEN_BYTES the files are mapped
    anew, and an old mapping is freed with its last tensor. Otherwise loading a model would hold it twice.
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
            raise CheckpointError(f"{path}: {name}: cannot be read ({_first_line(error)}); copy it again") from None
        self._read_from.add(path)
        self._n_read_bytes += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def dtypes(self) -> Iterator[tuple[str, str]]:
        """(name, dtype in the format's words) of each tensor, without reading any."""
        return ((name, str(self._files[path].get_slice(name).get_dtype())) for name, path in self._file_of.items())


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({_first_line(error)}); copy it again") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is computed a piece at a time while it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]  # flat, one after another

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A new safetensors file whose tensors may come in any order; its bytes do not depend on it.

    What is written in order is hashed on the way, the rest is read back. As a context it is closed when all tensors are written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """`tensors` have the dtypes and shapes of those that `put` writes; they may be on the meta device."""
        assert sys.byteorder == "little", "the format is little-endian"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.in_order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # keeps every tensor aligned
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
        self._digest, self._n_digested_bytes = hashlib.sha256(), 0
        self._file = path.open("x+b")
        self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def put(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """Write one of the tensors."""
        self.missing.remove(name)
        at = self._head_bytes + self._start[name]
        for piece in tensor.pieces() if isinstance(tensor, LazyTensor) else (tensor,):
            content = piece.detach().reshape(-1).view(torch.uint8).numpy().data
            self._write(content, at)
            at += len(content)

    def _write(self, content: memoryview, at: int) -> None:
        self._file.seek(at)
        for start in range(0, len(content), CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            if at + start == self._n_digested_bytes:
                self._digest.update(part)
                self._n_digested_bytes += len(part)
            self._file.write(part)

    def close(self) -> dict[str, Any]:
        """When every tensor is written: sync the file; its size and SHA-256."""
        assert not self.missing, self.missing
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
        """Close the file as it is."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        self.give_up()


def write_new(path: Path, content: bytes) -> dict[str, Any]:
    """Write bytes to a new file and sync it; its size and SHA-256."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
