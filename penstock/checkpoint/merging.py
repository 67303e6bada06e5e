"""How does an adapter become part of its model's weights?

W + alpha/rank B A beside each target, computed in fp32 and rounded once to the type in which W is stored. Every other tensor is
copied. A tensor is read, written and forgotten before the next: no model is ever held.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.files import read_whole
from runtime.plan.train import Lora
from runtime.units import show_bytes

from .adapter_files import STORED, Factors, new_folder, read_adapter
from .checkpoint import INDEX_FILE, MAX_JSON_BYTES, TOKENIZER_FILES, _read_json, refuse_quantised, weight_files
from .room import NoRoomError, free_bytes
from .tensor_files import LazyTensor, Shards, TensorFile, write_new

PIECE_BYTES = 4 * 2**20  # of a weight in fp32, computed at a time: what lies in caches is faster, and needs no memory to speak of


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge has made."""

    path: Path
    lora: Lora
    n_tensors: int
    n_merged: int  # of these, the ones that an adapter stood beside
    n_bytes: int  # of all tensors


def merge(base: Path, adapter: Path, out: Path, on_tensor: Callable[[str, int, int], None] | None = None) -> Merged:
    """Write to `out` the model in `base` with the adapter, whole or not at all: as many files of the same tensors and types, and
    the same configuration and tokenizer. `on_tensor(name, bytes written, of all)` is called after each. CheckpointError."""
    if base.resolve() in (out.resolve(), *out.resolve().parents):
        raise CheckpointError(f"{out}: lies in the model's own folder {base}; choose another --out")
    refuse_quantised(base, _read_json(base / "config.json"), ())
    outlines = _outlines(base)
    every = {name: outline for of_file in outlines.values() for name, outline in of_file.items()}
    lora, factors = read_adapter(adapter, {name: tuple(outline.shape) for name, outline in every.items()})
    contents = _contents(base, outlines)
    n_bytes, n_done_bytes = sum(outline.nbytes for outline in every.values()), 0
    with new_folder(out) as folder:
        if n_bytes > (n_free_bytes := free_bytes(folder)):
            sizes = f"takes {show_bytes(n_bytes)}, and {show_bytes(n_free_bytes)} are free"
            raise NoRoomError(f"{out}: {sizes}; make room, or choose another --out")
        for file, of_file in outlines.items():
            for name in _write(folder / file.name, file, of_file, factors, lora.scale):
                n_done_bytes += every[name].nbytes
                if on_tensor is not None:
                    on_tensor(name, n_done_bytes, n_bytes)
        for name, content in contents.items():
            write_new(folder / name, content)
    return Merged(out, lora, len(every), len(factors) // 2, n_bytes)


def _outlines(base: Path) -> dict[Path, dict[str, Tensor]]:
    """Of each file its tensors' types and shapes; what they hold is not read."""
    outlines: dict[Path, dict[str, Tensor]] = {}
    names = set[str]()
    for file in weight_files(base):
        stored = Shards([file])
        outlines[file] = {name: torch.empty_like(stored[name], device="meta") for name in stored}
        for name, outline in outlines[file].items():
            if outline.dtype not in STORED:
                raise CheckpointError(f"{file}: {name[:200]!r} is {outline.dtype}; give a model in fp32, bf16 or fp16")
            if name in names:
                raise CheckpointError(f"{file}: {name[:200]!r} lies in another file too; copy the model again")
            names.add(name)
    return outlines


def _contents(base: Path, outlines: Mapping[Path, Mapping[str, Tensor]]) -> dict[str, bytes]:
    """The other files. The configuration is the last: without it nothing loads what is not whole."""
    contents = {}
    if (base / INDEX_FILE).is_file():
        index = _read_json(base / INDEX_FILE)
        weight_map = {name: file.name for file, of_file in outlines.items() for name in of_file}
        if missing := index["weight_map"].keys() - weight_map.keys():
            raise CheckpointError(f"{base / INDEX_FILE}: {min(missing)[:200]!r} is in none of its files; copy the model again")
        contents[INDEX_FILE] = (json.dumps(index | {"weight_map": weight_map}, indent=2) + "\n").encode()
    for name in (*TOKENIZER_FILES, "config.json"):
        if (base / name).is_file():
            try:
                contents[name] = read_whole(base / name, MAX_JSON_BYTES)
            except OSError as error:
                raise CheckpointError(f"{base / name}: cannot be read ({error.strerror}); copy the model again") from None
    return contents


def _write(path: Path, source: Path, outlines: Mapping[str, Tensor], factors: Factors, scale: float) -> Iterator[str]:
    """One file like another, with the adapter; yields the name of each tensor once it is written."""
    stored, file = Shards([source]), TensorFile(path, outlines)
    try:
        for name in file.in_order:
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in factors.names:
                pieces = partial(_merged, stored, factors, name, scale)
                file.put(name, LazyTensor(outlines[name].dtype, tuple(outlines[name].shape), pieces))
            else:
                file.put(name, stored[name])
            yield name
        file.close()
    finally:
        file.give_up()


# o rows of a weight, i columns, r rank of its adapter


def _merged(stored: Mapping[str, Tensor], factors: Factors, name: str, scale: float) -> Iterator[Tensor]:
    """A weight with its adapter, some rows at a time."""
    module = name.removesuffix(".weight")
    weight_oi, a_ri, b_or = stored[name], factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"]
    n_rows = max(1, PIECE_BYTES // (weight_oi.shape[1] * torch.float32.itemsize))
    for rows_oi, rows_or in zip(weight_oi.split(n_rows), b_or.split(n_rows), strict=True):
        merged_oi = (rows_or @ a_ri).mul_(scale).add_(rows_oi).to(weight_oi.dtype)
        if not all(end.isfinite() for end in merged_oi.aminmax()):
            raise CheckpointError(f"{factors.path}: with it {name} is not finite in {weight_oi.dtype}; train the adapter again")
        yield merged_oi
