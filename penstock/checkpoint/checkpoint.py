"""What is in a checkpoint?

A checkpoint is a folder `checkpoint-N` that transformers loads as a model, with the optimizer's tensors beside it:

    config.json, model*.safetensors (+ index)   weights under the names that Hugging Face publishes for the model type
    tokenizer files                             copied from the model's folder
    optimizer-*.safetensors                     whatever the trainer keeps per parameter
    trainer_state.json                          step, what the trainer adds, and size and SHA-256 of every other file

A folder of that name is whole: it was written under another one (`saving.py`). Nothing is ever unpickled.
"""

import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError

from .tensor_files import Shards

MAX_JSON_BYTES = 256 * 2**20
FORMAT_VERSION = 2
STATE_FILE = "trainer_state.json"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)

_UNREAD = "scales are not read; convert the model to bf16 first, or give the one that was published in bf16"
_OF_QUANTISED = re.compile(r"scale|qweight|qzeros|g_idx|_blocks$")

# How experts are stored. In the modules an expert weight is one tensor for all experts; in published files of these
# types each expert has its own: {type: (folder of the experts, gate, up, down)}.
_EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def publish(model_type: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A module's weight under the names, and in the pieces, in which its type is published. The pieces are views."""
    layer, dot, last = name.rpartition(".mlp.")
    if not dot or model_type not in _EXPERTS:
        yield name, tensor
        return
    folder, gate, up, down = _EXPERTS[model_type]
    match last:
        case "experts.gate_up_proj":
            for e, gate_up in enumerate(tensor):
                first, second = gate_up.chunk(2)
                yield f"{layer}.{folder}.experts.{e}.{gate}.weight", first
                yield f"{layer}.{folder}.experts.{e}.{up}.weight", second
        case "experts.down_proj":
            for e, piece in enumerate(tensor):
                yield f"{layer}.{folder}.experts.{e}.{down}.weight", piece
        case _:
            yield f"{layer}.{folder}.{last}", tensor


def writable_folder(folder: Path) -> Path:
    """The folder, made if missing and tried; CheckpointError now rather than at the first checkpoint."""
    probe = folder / ".penstock-writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.unlink(missing_ok=True)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}); choose another --out") from None
    return folder


def whole(folder: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints in a folder, by their names, with their steps, which ascend."""
    try:
        steps = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(r"checkpoint-([0-9]{1,18})", path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); choose another --out") from None
    return sorted(entry for entry in steps if (entry[1] / STATE_FILE).is_file())


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder; None where there is none."""
    found = whole(folder)
    return found[-1][1] if found else None


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint that was found whole. `fields` is the `state` that was saved; `optimizer` reads tensors when asked."""

    path: Path
    step: int
    fields: dict[str, Any]
    optimizer: Shards


def load_state(checkpoint: Path) -> State:
    """The training state in a checkpoint folder, every file checked against its size and SHA-256; else CheckpointError."""
    path = checkpoint / STATE_FILE
    if not path.exists() and has_weights(checkpoint):
        raise CheckpointError(f"{checkpoint}: a model, not the state of a run (no {STATE_FILE}); train from it with --model")
    fields = _read_json(path)
    step, state, files = fields.get("step"), fields.get("state"), fields.get("files")
    if "format_version" not in fields:  # Hugging Face's trainer writes a file of this name too
        raise CheckpointError(f"{path}: of another program's run; train from its weights with --model")
    if fields["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version is not {FORMAT_VERSION}; resume with the version that wrote it")
    if fields.get("sha256") != sum_of(fields):
        raise CheckpointError(f"{path}: its content is not what was saved (SHA-256); resume from another checkpoint")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"{path}: `step` is no count; resume from another checkpoint")
    if (named := re.fullmatch(r"checkpoint-([0-9]{1,18})", checkpoint.name)) and int(named[1]) != step:
        raise CheckpointError(f"{path}: the state of step {step}, in a folder of another's name; resume from another checkpoint")
    if not isinstance(state, dict) or not isinstance(files, dict):
        raise CheckpointError(f"{path}: `state` or `files` is no object; resume from another checkpoint")
    if state.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint}: the model's weights alone (--weights-only), with nothing to resume a run from: train from them with "
            f"--model {checkpoint} and another --out; resume from another checkpoint"
        )
    for name, expected in files.items():
        _check_file(path, name, expected)
    names = sorted(name for name in files if name.startswith("optimizer-"))
    return State(checkpoint, step, state, Shards(checkpoint / name for name in names))


def sum_of(fields: Mapping[str, Any]) -> str:
    """SHA-256 of what a state file says, but for the sum itself."""
    rest = {key: value for key, value in fields.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def load_weights(
    folder: Path, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each named weight of a model folder, one at a time, in the dtype it is stored in.

    Names are those of the module's `named_parameters()`; experts stored one by one are put together. CheckpointError
    names the tensor that is missing, or not of the shape that `shapes` gives it.
    """
    stored = Shards(weight_files(folder))
    for name in names:
        tensor = _assemble(folder, stored, name)
        if shapes is not None and tuple(tensor.shape) != tuple(shapes[name]):
            found, expected = tuple(tensor.shape), tuple(shapes[name])
            raise CheckpointError(f"{folder}: {name} is {found}, the configuration says {expected}; give this model's weights")
        yield name, tensor


def refuse_quantised(folder: Path, config: Mapping[str, Any], names: Container[str]) -> None:
    """CheckpointError for weights that mean nothing without scales; none is read. `names` are those that the modules have."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method", "") if isinstance(config[key], dict) else ""
            raise CheckpointError(f"{folder}: its config.json has a {key} ({str(method)[:40]}); {_UNREAD}")
    for name, dtype in Shards(weight_files(folder)).dtypes():
        if re.fullmatch(r"[FIU][468](_.*)?", dtype) or (name not in names and _OF_QUANTISED.search(name)):
            raise CheckpointError(f"{folder}: {name[:200]} ({dtype}) belongs to quantised weights; {_UNREAD}")


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights in any format, readable or not."""
    return any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).exists() or any(folder.glob("*.bin"))


def outline_of(folder: Path) -> str:
    """What tells a model's weights from another's, though next to nothing is read."""
    return Shards(weight_files(folder)).outline()


def _assemble(folder: Path, stored: Shards, name: str) -> Tensor:
    """A module's weight from what is stored: itself, renamed, or stacked from its experts."""
    if name in stored:
        return stored[name]
    layer, dot, last = name.rpartition(".mlp.")
    for published, gate, up, down in _EXPERTS.values() if dot else ():
        if last == "gate.weight" and f"{layer}.{published}.{last}" in stored:
            return stored[f"{layer}.{published}.{last}"]
        parts = {"experts.gate_up_proj": (gate, up), "experts.down_proj": (down,)}.get(last, ())
        rows: list[list[str]] = []
        while parts and f"{layer}.{published}.experts.{len(rows)}.{parts[0]}.weight" in stored:
            rows.append([f"{layer}.{published}.experts.{len(rows)}.{part}.weight" for part in parts])
        if rows:
            return _stack(folder, stored, rows)
    raise CheckpointError(f"{folder}: no tensor {name} in its safetensors files; give the weights of this model")


def _stack(folder: Path, stored: Shards, rows: list[list[str]]) -> Tensor:
    """(experts, rows of all parts, columns) from one matrix per expert and part; read once, without a second copy."""
    whole: Tensor | None = None
    for e, row in enumerate(rows):
        at = 0
        for name in row:
            if name not in stored:
                raise CheckpointError(f"{folder}: no tensor {name} in its safetensors files; copy the model again")
            piece = stored[name]
            if whole is None:
                n_rows, n_columns = piece.shape if piece.dim() == 2 else (0, 0)
                whole = torch.empty((len(rows), n_rows * len(row), n_columns), dtype=piece.dtype)
            if piece.shape != (whole.shape[1] // len(row), whole.shape[2]) or piece.dtype != whole.dtype:
                raise CheckpointError(f"{folder}: {name} has another shape or type than expert 0's; copy the model again")
            whole[e, at : at + piece.shape[0]] = piece
            at += piece.shape[0]
    assert whole is not None
    return whole


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index where it has one."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no `weight_map`; copy the model again")
        for name in weight_map.values():
            _plain(index, name)
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder}: its weights are pickled (*.bin) and could run code; convert them to safetensors")
    raise CheckpointError(f"{folder}: no model.safetensors; give a folder with a model's weights")


def _plain(index: Path, name: object) -> str:
    """A name that is a file of the same folder: no path in a file may lead elsewhere."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", name):
        raise CheckpointError(f"{index}: {str(name)[:80]!r} is no file name; copy it again from where it came")
    return name


def _check_file(state_file: Path, name: object, expected: object) -> None:
    path = state_file.with_name(_plain(state_file, name))
    match expected:
        case {"n_bytes": int(n_bytes), "sha256": str(sha256)}:
            pass
        case _:
            raise CheckpointError(f"{state_file}: {name} has no size and SHA-256; resume from another checkpoint")
    try:
        if path.is_symlink() or path.stat().st_size != n_bytes:
            raise CheckpointError(f"{path}: not {n_bytes} bytes long as when it was saved; resume from another checkpoint")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); resume from another checkpoint") from None
    if found != sha256:
        raise CheckpointError(f"{path}: its content is not what was saved (SHA-256); resume from another checkpoint")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than any such file; copy it again")
        fields = json.loads(path.read_bytes())
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a folder that holds it") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({str(error)[:80]}); copy it again") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy it again")
    return fields
