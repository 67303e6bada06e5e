"""Merging a LoRA adapter into its base model, shard by shard.

W + alpha/rank B A in fp32 for each target, rounded once to the dtype in which W is stored; other tensors are copied. One tensor of
the model is in memory at a time.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.plan.packed import published_as
from runtime.units import show_bytes

from .adapter_files import FLOATS, read_adapter
from .checkpoint import refuse_another_base
from .disk import new_folder
from .model_files import INDEX_FILE, TOKENIZER_FILES, read_json, refuse_quantised, weight_files, weights_digest
from .tensor_files import Shards, write_new, write_tensors

PIECE_BYTES = 4 * 2**20  # of a weight in fp32, computed at a time: what fits caches is faster


def merge(base: Path, adapter: Path, out: Path, on_tensor: Callable[[str, int, int], None] = lambda *_: None) -> str:
    """Write the model in `base` with the adapter to `out`, whole or not at all: the same files of the same tensors and dtypes, the
    same configuration and tokenizer; what it holds, in words. `on_tensor(name, bytes written, bytes of all)` is called after each.
    CheckpointError."""
    if base.resolve() in (out.resolve(), *out.resolve().parents):
        raise CheckpointError(f"{out}: is in the model's own folder {base}; choose another --out")
    config = read_json(base / "config.json")
    if not (is_mxfp4 := published_as(config) == "mxfp4"):  # of which experts are packed, and stay so
        refuse_quantised(base, config, ())
    shards = _outlines(base, (*FLOATS, torch.uint8) if is_mxfp4 else FLOATS)
    outlines = {name: outline for shard in shards.values() for name, outline in shard.items()}
    lora, factors = read_adapter(adapter, {name: tuple(outline.shape) for name, outline in outlines.items()})
    refuse_another_base(adapter, lambda: weights_digest(base))
    n_bytes, n_done_bytes = sum(outline.nbytes for outline in outlines.values()), 0

    def merged(source: Path) -> Iterator[Tensor]:
        nonlocal n_done_bytes
        stored = Shards([source])
        for name, outline in shards[source].items():
            is_adapted = f"{name.removesuffix('.weight')}.lora_A.weight" in factors
            yield from _merged(adapter, stored, factors, name, lora.scale) if is_adapted else (stored[name],)
            n_done_bytes += outline.nbytes
            on_tensor(name, n_done_bytes, n_bytes)

    with new_folder(out) as folder:
        if n_bytes > (n_free_bytes := shutil.disk_usage(folder).free):
            sizes = f"takes {show_bytes(n_bytes)}, and {show_bytes(n_free_bytes)} are free"
            raise CheckpointError(f"{out}: {sizes}; make room, or choose another --out")
        for source, shard in shards.items():
            write_tensors(folder / source.name, shard, merged(source))
        # The last is that without which nothing loads a folder that is not whole
        for name in (INDEX_FILE, *TOKENIZER_FILES, "config.json"):
            if (base / name).is_file():
                write_new(folder / name, [(base / name).read_bytes()])
    n_merged = len(factors) // 2
    return f"{len(outlines)} tensors, {show_bytes(n_bytes)}, {n_merged} of them with an adapter of rank {lora.rank}"


def _outlines(base: Path, dtypes: Sequence[torch.dtype]) -> dict[Path, dict[str, Tensor]]:
    """The tensors of each file on the meta device, wide dtypes first, as they are written."""
    outlines: dict[Path, dict[str, Tensor]] = {}
    for file in weight_files(base):
        stored = Shards([file])
        found = {name: torch.empty_like(stored[name], device="meta") for name in stored}
        for name, outline in found.items():
            if outline.dtype not in dtypes:
                raise CheckpointError(f"{file}: {name[:200]!r} is {outline.dtype}; give a model in fp32, bf16 or fp16")
            if any(name in other for other in outlines.values()):
                raise CheckpointError(f"{file}: {name[:200]!r} is in another file too; copy the model again")
        outlines[file] = dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))
    return outlines


# o rows of a weight, i columns, r rank of its adapter


def _merged(adapter: Path, stored: Shards, factors: Mapping[str, Tensor], name: str, scale: float) -> Iterator[Tensor]:
    """A weight with its adapter, some rows at a time."""
    module = name.removesuffix(".weight")
    weight_oi, a_ri, b_or = stored[name], factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"]
    n_rows = max(1, PIECE_BYTES // (weight_oi.shape[1] * torch.float32.itemsize))
    for rows_oi, rows_or in zip(weight_oi.split(n_rows), b_or.split(n_rows), strict=True):
        merged_oi = (rows_or @ a_ri).mul_(scale).add_(rows_oi).to(weight_oi.dtype)
        if not all(end.isfinite() for end in merged_oi.aminmax()):
            raise CheckpointError(f"{adapter}: with it {name} is not finite in {weight_oi.dtype}; train the adapter again")
        yield merged_oi
