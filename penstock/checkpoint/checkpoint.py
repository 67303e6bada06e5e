"""Checkpoints: a folder `checkpoint-N` that transformers loads as a model, with the optimizer's tensors.

    config.json, model*.safetensors (+ index)   the model in Hugging Face form; or an adapter in PEFT's (`adapter_*`)
    tokenizer files                             copied from the model's folder
    optimizer-*.safetensors                     masters and moments, a file for each block
    trainer_state.json                          step, what resuming compares, size and SHA-256 of every other file

It is written under another name (`saving.py`), so that a folder of this name is whole.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from runtime.errors import CheckpointError

from .model_files import FILE_NAME, has_weights, read_json
from .tensor_files import Shards

FORMAT_VERSION = 2
STATE_FILE = "trainer_state.json"
NAME = re.compile(r"checkpoint-([0-9]{1,18})")


def whole(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, in the order of their steps."""
    try:
        steps = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); choose another --out") from None
    return sorted(entry for entry in steps if (entry[1] / STATE_FILE).is_file())


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step in a folder; None where there is none."""
    found = whole(folder)
    return found[-1][1] if found else None


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint whose files were compared with its manifest. `fields` is the `state` that was saved."""

    path: Path
    step: int
    fields: dict[str, Any]
    optimizer: Shards


@dataclass(frozen=True, slots=True)
class _File:
    n_bytes: Annotated[int, Field(strict=True)]
    sha256: str


@dataclass(frozen=True, slots=True)
class _Manifest:
    """What is read of a state file."""

    step: Annotated[int, Field(strict=True, ge=0)]
    state: dict[str, Any]
    files: dict[Annotated[str, Field(pattern=FILE_NAME)], _File]


_MANIFEST = TypeAdapter(_Manifest)


def load_state(checkpoint: Path) -> State:
    """The training state in a checkpoint, every file of it compared with its size and SHA-256; CheckpointError names what
    differs."""
    path = checkpoint / STATE_FILE
    if not path.exists() and has_weights(checkpoint):
        raise CheckpointError(f"{checkpoint}: a model, not the state of a run (no {STATE_FILE}); train from it with --model")
    fields = read_json(path)
    if "format_version" not in fields:  # Hugging Face's trainer writes a file of this name too
        raise CheckpointError(f"{path}: of another program's run; train from its weights with --model")
    if fields["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version is not {FORMAT_VERSION}; resume with the version that wrote it")
    if fields.get("sha256") != sum_of(fields):
        raise _damaged(path, "its content is not what was saved (SHA-256)")
    try:
        manifest = _MANIFEST.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(path, f"{'.'.join(map(str, first['loc']))[:80]!r}: {first['msg'][:80]}") from None
    if (named := NAME.fullmatch(checkpoint.name)) and int(named[1]) != manifest.step:
        raise _damaged(path, f"the state of step {manifest.step}, in a folder of another's name")
    if manifest.state.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint}: the model's weights alone (--weights-only), with nothing to resume a run from: train from them with "
            f"--model {checkpoint} and another --out; resume from another checkpoint"
        )
    for name, expected in manifest.files.items():
        _check_file(checkpoint / name, expected)
    names = sorted(name for name in manifest.files if name.startswith("optimizer-"))
    return State(checkpoint, manifest.step, manifest.state, Shards(checkpoint / name for name in names))


def sum_of(fields: Mapping[str, Any]) -> str:
    """SHA-256 of the fields of a state file, without the field that holds it."""
    rest = {key: value for key, value in fields.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, expected: _File) -> None:
    try:
        if path.is_symlink() or path.stat().st_size != expected.n_bytes:
            raise _damaged(path, f"not {expected.n_bytes} bytes long as when it was saved")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None
    if found != expected.sha256:
        raise _damaged(path, "its content is not what was saved (SHA-256)")


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}; resume from another checkpoint")
