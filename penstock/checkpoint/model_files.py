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
from penstock.runtime.plan.train import IN_PROJECTOR
from penstock.runtime.plan.workload import OF_LAYER, text_of

from .conversion import conversion_of
from .dequantised import Dequantised
from .tensor_files import Shapes, Shards

MAX_JSON_BYTES = 256 * 2**20
END_BYTES = 4096  # bytes of each end of a tensor in a digest: one page of the file
FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}$"  # a file in the same folder
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ZERO_ROWS = 8  # rows of zeros at the end of a matrix, as in a file that was allocated and not written completely
GENERATION_FILE = "generation_config.json"
# Further files that transformers reads: of the tokenizer, chat templates, and others
_TOKENIZER = re.compile(
    r"tokenizer(_config|[0-9.]*)\.json|special_tokens_map\.json|added_tokens\.json|tekken\.json|(vocab|merges|dict)\.txt|bpe\.codes"
    r"|(\w*vocab|vocab-\w+|normalizer|emoji|byte_maps|word_\w+)\.json|prophetnet\.tokenizer|(source|target)\.spm|[\w.]+\.model(\.v[0-9m]+)?"
)
_TEMPLATES = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[\w-][\w.-]*\.jinja")
_KEPT_FILES = re.compile(rf"{GENERATION_FILE}|((video_)?pre|audio_)?process(or|ing)_config\.json|audio_tokenizer_config\.json")

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


def kept_files(folder: Path, adapter: Path | None = None) -> dict[str, Path]:
    """Return the files for checkpoints, by name: tokenizer, chat templates, processors and generation settings of a model's folder.
    A tokenizer in an adapter's folder replaces the model's, with its templates; a template replaces the templates."""

    def matching(where: Path, *kinds: re.Pattern[str]) -> dict[str, Path]:
        paths = {
            path.relative_to(where).as_posix(): path for part in ("*", "additional_chat_templates/*") for path in where.glob(part)
        }
        return {name: paths[name] for name in sorted(paths) if any(k.fullmatch(name) for k in kinds) and paths[name].is_file()}

    if adapter is None or not (of_adapter := matching(adapter, _TOKENIZER, _TEMPLATES)):
        return matching(folder, _TOKENIZER, _TEMPLATES, _KEPT_FILES) | ({} if adapter is None else matching(adapter, _KEPT_FILES))
    kinds = (_KEPT_FILES,) if "tokenizer.json" in of_adapter else (_TOKENIZER, _KEPT_FILES)
    return matching(folder, *kinds) | of_adapter | matching(adapter, _KEPT_FILES)


def with_ends(files: Mapping[str, Path], config: Mapping[str, Any], ends: Iterable[int]) -> tuple[list[int], dict[str, Any]]:
    """Return those of the end tokens at which generation does not stop yet, and fields of a generation_config.json with them."""
    if GENERATION_FILE in files:
        fields = read_json(files[GENERATION_FILE])
    else:  # transformers takes these of the model's configuration
        fields = {
            key: i for key in ("bos_token_id", "eos_token_id", "pad_token_id") if (i := text_of(dict(config)).get(key)) is not None
        }
    eos = fields.get("eos_token_id")
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    new = [end for end in ends if end not in known]
    return new, fields | {"eos_token_id": [*known, *new]}


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


def towers(folder: Path, config: Mapping[str, Any], with_projector: bool) -> tuple[Shards, list[str]]:
    """Return the tensors of a vision-language model's folder, and the names of those outside its text decoder, `with_projector` or
    without."""
    stored, conversion = Shards(weight_files(folder)), conversion_of(config)
    inside = {name for name in conversion.weights if not (with_projector and IN_PROJECTOR.search(name))}
    outside = (sources for target, sources in conversion.sources(stored).items() if target not in inside)
    return stored, sorted(name for sources in outside for name, _ in sources)


def towers_bytes(folder: Path, config: Mapping[str, Any], with_projector: bool) -> int:
    """Return the stored bytes of the tensors of `towers`."""
    stored, names = towers(folder, config, with_projector)
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
        is_of_quantised = name not in names and _OF_QUANTISED.search(name) and not _is_weight(config, name)
        if re.fullmatch(r"[FIU][468](_.*)?", dtype) or is_of_quantised:
            raise CheckpointError(f"{folder}: {name[:200]} ({dtype}) belongs to quantised weights; {_UNREAD}")


def _is_weight(config: Mapping[str, Any], name: str) -> bool:
    """True if a file's tensor is a weight or buffer of the model's modules."""
    conversion = conversion_of(config) if "model_type" in config else None
    return conversion is not None and any(target in conversion.weights for target in conversion.sources([name]))


def note_on_zeros(folder: Path) -> str | None:
    """Return a warning if matrices of layers end in rows of zeros, or are all zeros; else None. Reads only these rows."""
    names = [name for name, rows in Shards(weight_files(folder)).last_rows(OF_LAYER, ZERO_ROWS) if not rows.float().any()]
    if not names:
        return None
    first = f"{', '.join(names[:3])}{f' and {len(names) - 3:,} more' if len(names) > 3 else ''}"
    return f"warning: {folder}: rows of zeros at the end of {first}, as an interrupted copy has; compare the file with its source"


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
    """Return the safetensors files that transformers reads from a folder: a single file, even next to shards, or an index's."""
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no `weight_map`; copy the model again")
        for name in weight_map.values():
            if not isinstance(name, str) or not re.fullmatch(FILE_NAME, name):
                raise CheckpointError(f"{index}: {str(name)[:80]!r} is no file name; copy the model again")
        return [folder / name for name in sorted(set(weight_map.values()))]
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
