"""Models in Hugging Face form: `config.json` and safetensors shards with the published tensor names of the model type.

Nothing is unpickled, and no file name in an index points outside its folder.
"""

import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import read_whole
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.packed import DEQUANTISED, published_as

from .conversion import conversion_of
from .dequantised import Dequantised
from .tensor_files import Shapes, Shards

MAX_JSON_BYTES = 256 * 2**20
END_BYTES = 4096  # bytes of each end of a tensor in a digest: one page of the file
FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}$"  # a file in the same folder
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)

_UNREAD = "scales are not read; convert the model to bf16 first, or give the one that was published in bf16"
_OF_QUANTISED = re.compile(r"scale|qweight|qzeros|g_idx|_blocks$")

# transformers' modules stack the weights of all experts; published files of these types hold one tensor per expert:
# {type: (path of the experts, gate, up, down)}. Other types use transformers' table (`conversion.py`).
_EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}

_AS_MODULES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "ernie4_5", "smollm3", "internlm3", "gpt_oss")


def publish(config: Mapping[str, Any], name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's weight under its published names, as views if experts are stored separately."""
    model_type = str(config.get("model_type"))
    layer, dot, last = name.rpartition(".mlp.")
    if name == SCORE or model_type in _AS_MODULES or (model_type in _EXPERTS and not dot):
        yield name, tensor
        return
    if model_type not in _EXPERTS:
        yield from conversion_of(config).published(name, tensor)
        return
    folder, *projections = _EXPERTS[model_type]
    held = {"experts.gate_up_proj": projections[:2], "experts.down_proj": projections[2:]}.get(last)
    if held is None:
        yield f"{layer}.{folder}.{last}", tensor
        return
    for e, expert in enumerate(tensor):
        for projection, piece in zip(held, expert.chunk(len(held)), strict=True):
            yield f"{layer}.{folder}.experts.{e}.{projection}.weight", piece


def has_tensor(folder: Path, name: str) -> bool:
    return name in Shards(weight_files(folder))


def load_weights(folder: Path, config: Mapping[str, Any], names: Iterable[str], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each named weight of a model folder, in its stored dtype, or in bf16 for FP8 and MXFP4.

    Names are those of the module's `named_parameters()`; experts stored separately are stacked. CheckpointError names a tensor
    that is missing, has another shape, or has another dtype than other experts.
    """
    stored = Dequantised(folder, Shards(weight_files(folder)))

    def shaped(name: str, tensor: Tensor, shape: Iterable[int]) -> Tensor:
        if tuple(tensor.shape) != tuple(shape):
            problem = f"{name} is {tuple(tensor.shape)}, the configuration requires {tuple(shape)}"
            raise CheckpointError(f"{folder}: {problem}; give this model's weights")
        return tensor

    known = str(config.get("model_type")) in (*_AS_MODULES, *_EXPERTS)
    sources = {} if known else conversion_of(config).sources(stored)
    for name in names:
        if not known and sources.get(name, [(name, None)]) != [(name, None)]:
            try:
                weight = conversion_of(config).read(name, sources[name], stored.__getitem__)
            except CheckpointError as error:
                pieces = publish(config, name, torch.empty(shapes[name], device="meta"))
                missing = next((piece for piece, _ in pieces if piece not in stored), None)
                raise CheckpointError(f"{folder}: {error if missing is None else f'no tensor {missing}; copy it again'}") from None
            yield name, shaped(name, weight, shapes[name])
        elif name in stored or not known:
            yield name, shaped(name, stored[name], shapes[name])
        else:  # renamed in files, or separate experts: copy each piece to its place
            pieces = publish(config, name, torch.empty(shapes[name], device="meta"))
            weight = torch.empty(shapes[name], dtype=stored[next(pieces)[0]].dtype)
            for piece, place in publish(config, name, weight):
                if (tensor := shaped(piece, stored[piece], place.shape)).dtype != weight.dtype:
                    raise CheckpointError(f"{folder}: {piece} has another dtype than expert 0's; copy the model again")
                place.copy_(tensor)
            yield name, weight


def towers(folder: Path, config: Mapping[str, Any]) -> tuple[Shards, list[str]]:
    """Return the tensors of a vision-language model's folder, and the names of those outside its text decoder."""
    stored, conversion = Shards(weight_files(folder)), conversion_of(config)
    outside = (sources for target, sources in conversion.sources(stored).items() if target not in conversion.weights)
    return stored, sorted(name for sources in outside for name, _ in sources)


def towers_bytes(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the stored bytes of the tensors outside the text decoder."""
    stored, names = towers(folder, config)
    return sum(stored[name].nbytes for name in names)


def refuse_quantised(folder: Path, config: Mapping[str, Any], names: Container[str], dequantises: bool = False) -> None:
    """Raise CheckpointError for weights that need scales, without reading them. `names`: parameters of the module;
    `dequantises`: accept FP8 and MXFP4, because they are dequantised."""
    shards = Shards(weight_files(folder))
    stored = Dequantised(folder, shards) if dequantises else shards
    for key in ("quantization_config", "compression_config"):
        if config.get(key) and not (dequantises and published_as(config) in DEQUANTISED):
            method = config[key].get("quant_method", "") if isinstance(config[key], dict) else ""
            raise CheckpointError(f"{folder}: its config.json has a {key} ({str(method)[:40]}); {_UNREAD}")
    for name, dtype in stored.dtypes():
        if re.fullmatch(r"[FIU][468](_.*)?", dtype) or (name not in names and _OF_QUANTISED.search(name)):
            raise CheckpointError(f"{folder}: {name[:200]} ({dtype}) belongs to quantised weights; {_UNREAD}")


def has_weights(folder: Path) -> bool:
    """True if a model folder holds weights in any format, readable or not."""
    return any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).exists() or any(folder.glob("*.bin"))


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of every tensor's name, dtype, shape, first and last bytes. It distinguishes separately trained models."""
    stored = Shards(weight_files(folder))
    return digest_of((name, stored.outline(name), [stored[name]]) for name in sorted(stored))


def digest_of(tensors: Iterable[tuple[str, Tensor, Iterable[Tensor]]]) -> str:
    """Return `weights_digest` of (name, outline, pieces of the content) of each tensor, sorted by name."""
    digest = hashlib.sha256()
    for name, outline, pieces in tensors:
        digest.update(f"{name} {outline.dtype} {tuple(outline.shape)}\n".encode())
        first = last = b""
        for piece in pieces:
            content = piece.reshape(-1).view(torch.uint8)
            first += content[: END_BYTES - len(first)].numpy().tobytes()
            last = (last + content[-END_BYTES:].numpy().tobytes())[-END_BYTES:]
        digest.update(first + last)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, from its index if it has one."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no `weight_map`; copy the model again")
        for name in weight_map.values():
            if not isinstance(name, str) or not re.fullmatch(FILE_NAME, name):
                raise CheckpointError(f"{index}: {str(name)[:80]!r} is no file name; copy the model again")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder}: its weights are pickled (*.bin) and could run code; convert them to safetensors")
    raise CheckpointError(f"{folder}: no model.safetensors; give a folder with a model's weights")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. CheckpointError for anything else."""
    try:
        fields = json.loads(read_whole(path, max_bytes))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a folder that holds it") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({str(error)[:80]}); copy it again") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy it again")
    return fields
