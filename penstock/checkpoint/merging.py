"""Merge a LoRA adapter into its base model, shard by shard.

Each target becomes W + alpha/rank B A, computed in fp32 and rounded once to the stored dtype of W. Other tensors are copied. One
tensor of the model is in memory at a time.
"""

import filecmp
import json
import shutil
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.packed import published_as
from penstock.runtime.plan.train import STACK, Lora
from penstock.runtime.plan.workload import has_towers
from penstock.runtime.units import show_bytes

from .adapter_files import CONFIG_FILE, FLOATS, MAX_CONFIG_BYTES, PREFIX, STACKS, TENSOR_FILE, head_of, read_adapter, stack_factors
from .checkpoint import CheckpointWriter, refuse_another_base
from .conversion import conversion_of, scoring_config
from .dequantised import BLOCKS, Dequantised
from .disk import new_folder
from .model_files import (
    INDEX_FILE,
    SINGLE_FILE,
    digest_of,
    kept_files,
    publish,
    read_json,
    refuse_quantised,
    weight_files,
    weights_digest,
    with_ends,
)
from .tensor_files import Shards, write_new, write_tensors

PIECE_BYTES = 4 * 2**20  # fp32 bytes of a weight that are computed at a time; faster if they fit the CPU's caches


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    on_tensor: Callable[[str, int, int], None] = lambda *_: None,
    pad_id: Callable[[], int | None] = lambda: None,
    ends: Sequence[int] = (),
) -> str:
    """Write the model in `base`, merged with the adapter, to `out`, atomically. Return a summary.

    Files, tensors, dtypes, configuration and tokenizer equal those of `base`, unless the adapter has a tokenizer. `ends`: tokens at
    which generation shall stop, too. `on_tensor(name, bytes written, total bytes)` is called after each tensor. A head that scores
    sequences replaces the model's head; then `pad_id()` returns its padding token."""
    if base.resolve() in (out.resolve(), *out.resolve().parents):
        raise CheckpointError(f"{out}: is in the model's own folder {base}; choose another --out")
    m, kept_paths = _Merge.read(base, adapter, pad_id), kept_files(base, adapter)
    n_bytes, n_done_bytes = sum(outline.nbytes for shard in m.shards.values() for outline in shard.values()), 0

    def merged(source: Path) -> Iterator[Tensor]:
        nonlocal n_done_bytes
        for name, outline in m.shards[source].items():
            yield from m.tensor(name, outline)
            n_done_bytes += outline.nbytes
            on_tensor(name, n_done_bytes, n_bytes)

    with new_folder(out) as folder:
        _refuse_full_disk(folder, out, n_bytes)
        for source, shard in m.shards.items():
            write_tensors(folder / source.name, shard, merged(source))
        CheckpointWriter(folder).copy_files(kept_paths, m.config, ends)
        # config.json last: without it nothing loads an incomplete folder. The index may be of files that were not read
        for name in (*([] if SINGLE_FILE in [source.name for source in m.shards] else [INDEX_FILE]), "config.json"):
            if (path := base / name).is_file():
                changes = m.changes_files
                content = _changed(path, m.shards, n_bytes, m.head_config, m.keeps_packed) if changes else path.read_bytes()
                write_new(folder / name, [content])
    suffix = ", and a head that scores sequences" if m.heads else ""
    changed = [
        name for name in kept_paths if not ((base / name).is_file() and filecmp.cmp(base / name, kept_paths[name], shallow=False))
    ]
    suffix += f"; not the base's: {', '.join(changed)}" if changed else ""
    stops, was = (
        with_ends(files, m.config, end_ids)[1]["eos_token_id"] for files, end_ids in ((kept_paths, ends), (kept_files(base), ()))
    )
    suffix += f"; eos_token_id of generation is {stops}, the base's {was}" if stops != was else ""
    n_adapted, n_tensors = (len(m.factors) - len(m.heads)) // 2, sum(map(len, m.shards.values()))
    return f"{n_tensors} tensors, {show_bytes(n_bytes)}, {n_adapted} of them with an adapter of rank {m.lora.rank}{suffix}"


def merged_digest(base: Path, adapter: Path) -> str:
    """Return the `weights_digest` of the model that `merge` would write."""
    m = _Merge.read(base, adapter, lambda: None)
    outlines = {name: outline for shard in m.shards.values() for name, outline in shard.items()}
    return digest_of((name, outlines[name], m.tensor(name, outlines[name])) for name in sorted(outlines))


@dataclass(frozen=True, slots=True)
class _Merge:
    """A base model and an adapter, read and compared. `shards`: tensors of each output file, on the meta device."""

    config: Mapping[str, Any]
    adapter: Path
    stored: Shards | Dequantised
    shards: dict[Path, dict[str, Tensor]]
    heads: dict[str, tuple[int, ...]]
    head_config: dict[str, Any]
    lora: Lora
    factors: dict[str, Tensor]
    pieces: "dict[str, _Piece]"
    module_names: dict[str, str]  # by names in files
    transposed: Collection[str]
    keeps_packed: bool  # True: experts are copied packed
    changes_files: bool

    @staticmethod
    def read(base: Path, adapter: Path, pad_id: Callable[[], int | None]) -> "_Merge":
        config = read_json(base / "config.json")
        if not (is_mxfp4 := published_as(config) == "mxfp4"):  # packs experts only
            refuse_quantised(base, config, ())
        stacks = _stacks(config, adapter)
        keeps_packed = is_mxfp4 and not stacks  # True: experts are copied packed; experts with an adapter become bf16
        files = Shards(
            weight_files(base)
        )  # one mapping of every file, because codes and scales of a weight may be in different files
        stored = files if keeps_packed else Dequantised(base, files)
        shards = _outlines(base, stored, (*FLOATS, torch.uint8) if keeps_packed else FLOATS)
        if heads := head_of(adapter):
            _put_head(shards, config, heads)
        outlines = {name: outline for shard in shards.values() for name, outline in shard.items()}
        head_config = scoring_config(config, heads[SCORE][0], pad_id()) if heads else {}
        module_names = _module_names(config, outlines, adapter)
        shapes = {name: tuple(outlines[file_name].shape) for file_name, name in module_names.items()}
        lora, factors = read_adapter(adapter, shapes | stacks | heads)
        refuse_another_base(adapter, lambda: weights_digest(base))
        if missing := sorted((pieces := _pieces(config, stacks)).keys() - outlines.keys()):
            raise CheckpointError(
                f"{base}: no tensor {missing[0][:200]}, which the adapter changes; give the weights of this model"
            )
        conversion = conversion_of(config)
        _refuse_swapped_sides(adapter, factors, stacks, conversion.is_transposed)
        changes_files = (is_mxfp4 and not keeps_packed) or bool(heads)
        read = (config, adapter, stored, shards, heads, head_config, lora, factors, pieces, module_names)
        return _Merge(*read, conversion.transposed, keeps_packed, changes_files)

    def tensor(self, name: str, outline: Tensor) -> Iterator[Tensor]:
        """Yield a tensor of the merged model, some rows at a time."""
        module = self.module_names.get(name, "").removesuffix(".weight")
        if name in self.heads:
            yield _finite(self.adapter, name, self.factors[name].to(outline.dtype))
        elif name in self.pieces:
            yield from _merged_experts(self.adapter, self.stored, self.factors, name, self.lora, self.pieces[name])
        elif f"{module}.lora_A.weight" in self.factors:
            yield from self._merged(name, module)
        else:
            yield self.stored[name]

    # o rows of a weight, i columns, r rank of its adapter

    def _merged(self, name: str, module: str) -> Iterator[Tensor]:
        weight_oi, scale = self.stored[name], self.lora.scale
        a_ri, b_or = (self.factors[f"{module}.lora_{side}.weight"] for side in "AB")
        if f"{module}.weight" in self.transposed:  # its outputs are columns
            yield _finite(self.adapter, name, (b_or @ a_ri).mul_(scale).t().add(weight_oi).to(weight_oi.dtype))
            return
        n_rows = max(1, PIECE_BYTES // (weight_oi.shape[1] * torch.float32.itemsize))
        for rows_oi, rows_or in zip(weight_oi.split(n_rows), b_or.split(n_rows), strict=True):
            merged_oi = (rows_or @ a_ri).mul_(scale).add_(rows_oi).to(weight_oi.dtype)
            yield _finite(self.adapter, name, merged_oi)


def _refuse_full_disk(folder: Path, out: Path, n_bytes: int) -> None:
    if n_bytes > (n_free_bytes := shutil.disk_usage(folder).free):
        sizes = f"takes {show_bytes(n_bytes)}, and {show_bytes(n_free_bytes)} are free"
        raise CheckpointError(f"{out}: {sizes}; make room, or choose another --out")


def _refuse_swapped_sides(
    adapter: Path, factors: Mapping[str, Tensor], stacks: Mapping[str, tuple[int, ...]], is_transposed: bool
) -> None:
    for stack, (_, *sides) in stacks.items():
        if len(factors[f"{stack_factors(stack)}.lora_B.weight"]) != sides[is_transposed]:
            problem = f"treats the outputs of {stack} as inputs, like older versions of PEFT"
            raise CheckpointError(f"{adapter}: {problem}; merge it with such a version")


def _put_head(shards: dict[Path, dict[str, Tensor]], config: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]]) -> None:
    """Replace the tensors of a model's head by those of the adapter's head, in the last file (in place)."""
    dropped = conversion_of(config).head_names([name for shard in shards.values() for name in shard])
    for file, shard in shards.items():
        shards[file] = {name: outline for name, outline in shard.items() if name not in dropped}
    last = next(reversed(shards))
    dtype = next(outline.dtype for shard in shards.values() for outline in shard.values())
    head = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in heads.items()}
    shards[last] = dict(sorted({**shards[last], **head}.items(), key=lambda item: -item[1].dtype.itemsize))


def _outlines(base: Path, stored: Shards | Dequantised, dtypes: Container[torch.dtype]) -> dict[Path, dict[str, Tensor]]:
    """Return the tensors of each output file on the meta device, wide dtypes first. A dequantised tensor is in its codes' file."""
    outlines: dict[Path, dict[str, Tensor]] = {}
    for file in weight_files(base):
        names = (name if name in stored else name.removesuffix(BLOCKS) for name in Shards([file]))
        tensors = {name: stored.outline(name) for name in names if name in stored}
        for name, outline in tensors.items():
            if outline.dtype not in dtypes:
                raise CheckpointError(f"{file}: {name[:200]!r} is {outline.dtype}; give a model in fp32, bf16 or fp16")
            if any(name in shard for shard in outlines.values()):
                raise CheckpointError(f"{file}: {name[:200]!r} is in another file too; copy the model again")
        outlines[file] = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    return outlines


def _module_names(config: dict[str, Any], stored: Collection[str], adapter: Path) -> dict[str, str]:
    """Map file tensors that are unconverted weights, of a vision-language model those of its text decoder, to names in modules."""
    factors = Shards([file]) if (file := adapter / TENSOR_FILE).is_file() else ()
    weights = {f"{name.removeprefix(PREFIX).rpartition('.lora_')[0]}.weight" for name in factors if ".experts." not in name}
    if not has_towers(config) and weights - {".weight"} <= {*stored}:
        return {name: name for name in stored}
    conversion = conversion_of(config)
    sources = {name: s for name, s in conversion.sources(stored).items() if name in conversion.weights}
    return {s[0][0]: name for name, s in sources.items() if len(s) == 1 and s[0][1] is None}


def _changed(
    path: Path, shards: Mapping[Path, Mapping[str, Tensor]], n_bytes: int, head_config: Mapping[str, Any], keeps_packed: bool
) -> bytes:
    """Return the content of a metadata file of a model with dequantised experts or with a new head."""
    if path.name == INDEX_FILE:
        weight_map = {name: file.name for file, shard in shards.items() for name in shard}
        return json.dumps({"metadata": {"total_size": n_bytes}, "weight_map": weight_map}, indent=2).encode()
    if path.name != "config.json":
        return path.read_bytes()
    config = {key: value for key, value in read_json(path).items() if keeps_packed or key != "quantization_config"}
    return json.dumps(config | dict(head_config), indent=2).encode()


def _stacks(config: Mapping[str, Any], adapter: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the stacks of experts in a model's modules, or {} for an adapter without experts."""
    fields = read_json(adapter / CONFIG_FILE, MAX_CONFIG_BYTES) if (adapter / CONFIG_FILE).is_file() else {}
    if not any(str(name).endswith(STACKS) for name in fields.get("target_parameters") or ()):
        return {}
    return {name: tuple(weight.shape) for name, weight in conversion_of(config).weights.items() if STACK.search(name)}


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a stack of experts that a stored tensor holds."""

    stack: str
    swaps: bool  # True: its matrices are (inputs, outputs)
    outputs: Tensor  # output numbers of each matrix, counted through all experts


def _pieces(config: Mapping[str, Any], stacks: Mapping[str, tuple[int, ...]]) -> dict[str, _Piece]:
    """Return, by name, the stored tensors that hold parts of stacks of experts."""
    pieces = {}
    for stack, (n_experts, *sides) in stacks.items():
        n_out = sides[swaps := conversion_of(config).is_transposed]
        numbers = torch.arange(n_experts * n_out, dtype=torch.int32).view(n_experts, -1)
        # Two inputs suffice, and a conversion may copy
        for name, piece in publish(config, stack, torch.stack((numbers, numbers), 1 if swaps else 2)):
            matrices = piece if piece.dim() > 2 else piece[None]
            for is_turned, ids in ((False, matrices[..., 0]), (True, matrices[..., 0, :])):
                if bool((ids // n_out == ids[:, :1] // n_out).all() and (ids.diff() > 0).all()):
                    pieces[name] = _Piece(stack, is_turned, ids.long())
            if name not in pieces:
                raise CheckpointError(f"{name}: experts in this layout are not supported; merge with PEFT's merge_and_unload")
    return pieces


# o rows of a weight, i columns, r rank of its adapter, e expert


def _merged_experts(
    adapter: Path, stored: Mapping[str, Tensor], factors: Mapping[str, Tensor], name: str, lora: Lora, piece: _Piece
) -> Iterator[Tensor]:
    """Yield a tensor of experts, merged with their adapters, one expert at a time."""
    weight, prefix = stored[name], stack_factors(piece.stack)
    a, b = factors[f"{prefix}.lora_A.weight"], factors[f"{prefix}.lora_B.weight"]
    n_out, n_experts = b.shape[0], b.shape[1] // lora.rank
    a_eri, b_ore = a.view(n_experts, lora.rank, -1), b.view(n_out, lora.rank, n_experts)
    for matrix, rows in zip(weight.view(-1, *weight.shape[-2:]), piece.outputs, strict=True):
        e = int(rows[0]) // n_out
        delta_oi = (b_ore[rows % n_out, :, e] @ a_eri[e]).mul_(lora.scale)
        swaps = piece.swaps and delta_oi.t().shape == matrix.shape  # transformers swaps some stacks only if shapes differ
        yield _finite(adapter, name, (delta_oi.t() if swaps else delta_oi).add(matrix).to(weight.dtype))


def _finite(adapter: Path, name: str, merged: Tensor) -> Tensor:
    if not all(end.isfinite() for end in merged.aminmax()):
        raise CheckpointError(f"{adapter}: merged with it, {name} is not finite in {merged.dtype}; train the adapter again")
    return merged
