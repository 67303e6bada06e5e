"""Checkpoints: a folder `checkpoint-N` that transformers loads as a model, with the optimizer's tensors.

    config.json, model*.safetensors (+ index)   the model in Hugging Face form; or an adapter in PEFT's (`adapter_*`)
    tokenizer files                             copied from the model's folder
    optimizer-*.safetensors                     masters and moments
    trainer_state.json                          step, identity of the run, size and SHA-256 of every other file

Weights and state have one file per block. Files are written to a temporary folder, which is renamed when it is complete.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from penstock.data.data import RunData
from penstock.runtime.errors import CheckpointError
from penstock.runtime.files import sync
from penstock.runtime.host.host_state import HostState
from penstock.runtime.host.rounding import Int8Moment, group_bytes
from penstock.runtime.plan import Plan, Semantics
from penstock.runtime.plan.optimizer import RULES, Optimizer
from penstock.runtime.plan.train import Lora
from penstock.runtime.plan.workload import Model, Parameter, has_towers
from penstock.runtime.units import in_shell

from .adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, config_bytes
from .disk import writing
from .model_files import FILE_NAME, GENERATION_FILE, INDEX_FILE, has_weights, publish, read_json, towers, with_ends
from .tensor_files import Shards, write_new, write_tensors

FORMAT_VERSION = 2
STATE_FILE = "trainer_state.json"
NAME = re.compile(r"checkpoint-([0-9]{1,18})")


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the complete checkpoints in a folder, sorted by step."""
    try:
        steps = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); choose another --out") from None
    return sorted(entry for entry in steps if (entry[1] / STATE_FILE).is_file())


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in a folder, or None."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint with verified files. `fields` is the saved `state`."""

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
    """Validated fields of a state file."""

    step: Annotated[int, Field(strict=True, ge=0)]
    state: dict[str, Any]
    files: dict[Annotated[str, Field(pattern=rf"^(additional_chat_templates/)?{FILE_NAME[1:]}")], _File]


_MANIFEST = TypeAdapter(_Manifest)


def load_state(checkpoint: Path) -> State:
    """Read the training state of a checkpoint, and verify size and SHA-256 of every file. CheckpointError names a damaged file."""
    path = checkpoint / STATE_FILE
    if not path.exists() and has_weights(checkpoint):
        raise CheckpointError(f"{checkpoint}: a model, not the state of a run (no {STATE_FILE}); train from it with --model")
    manifest = _manifest(path, read_json(path))
    if (named := NAME.fullmatch(checkpoint.name)) and int(named[1]) != manifest.step:
        raise _damaged(path, f"the state of step {manifest.step}, in a folder named for another step")
    if manifest.state.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint}: the model's weights alone (--weights-only), with nothing to resume a run from: train from them with "
            f"--model {in_shell(checkpoint)} and another --out; resume from another checkpoint"
        )
    _refuse_changed(checkpoint, manifest.files)
    names = sorted(name for name in manifest.files if name.startswith("optimizer-"))
    return State(checkpoint, manifest.step, manifest.state, Shards(checkpoint / name for name in names))


def refuse_another_base(adapter: Path, digest: Callable[[], str]) -> None:
    """Raise CheckpointError if an adapter that a run saved is damaged, or was trained on weights with another digest. An adapter
    made elsewhere is not checked."""
    path = adapter / STATE_FILE
    if not path.exists() or "format_version" not in (fields := read_json(path)):
        return
    manifest, adapter_files = _manifest(path, fields), (CONFIG_FILE, TENSOR_FILE)
    _refuse_changed(adapter, {name: saved for name, saved in manifest.files.items() if name in adapter_files})
    if "frozen" in manifest.state and manifest.state["frozen"] != digest():
        advice = f"give that one, or a folder of {' and '.join(adapter_files)} alone, for any base"
        raise CheckpointError(f"{adapter}: trained on another base model: its weights differ from these; {advice}")


def _manifest(path: Path, fields: Mapping[str, Any]) -> _Manifest:
    """Validate the fields of a state file, and its own SHA-256."""
    if "format_version" not in fields:  # Hugging Face's trainer writes a file of this name too
        raise CheckpointError(f"{path}: written by another program; train from its weights with --model")
    if fields["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version is not {FORMAT_VERSION}; resume with the version that wrote it")
    if fields.get("sha256") != sum_of(fields):
        raise _damaged(path, "its content has changed (SHA-256)")
    try:
        return _MANIFEST.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(path, f"{'.'.join(map(str, first['loc']))[:80]!r}: {first['msg'][:80]}") from None


def _refuse_changed(checkpoint: Path, files: Mapping[str, _File]) -> None:
    for name, expected in files.items():
        path = checkpoint / name
        try:
            if path.is_symlink() or path.stat().st_size != expected.n_bytes:
                raise _damaged(path, f"not {expected.n_bytes} bytes long as when it was saved")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise _damaged(path, "its content has changed (SHA-256)")
        except OSError as error:
            raise _damaged(path, f"cannot be read ({error.strerror})") from None


def sum_of(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the fields of a state file, except `sha256`."""
    rest = {key: value for key, value in fields.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, problem: str) -> CheckpointError:
    advice = "move its folder elsewhere, and take the checkpoint before it, as a run with --resume does"
    return CheckpointError(f"{path}: {problem}; {advice}")


# -- writing ------------------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writer of the files of a checkpoint. Blocks may arrive in any order; the bytes do not depend on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}  # by file: size and SHA-256
        self._file_of: dict[str, str] = {}  # file, by published name of a weight
        self._n_bytes = 0  # total size of weights
        self.adapter: dict[str, Tensor] = {}  # factors by our names, collected for `write_adapter`; much smaller than the state

    def write_tensors(self, file: str, outlines: Mapping[str, Tensor], contents: Iterable[Tensor]) -> None:
        """Write a file with `tensor_files.write_tensors` and record its size and SHA-256."""
        self._files[file] = write_tensors(self._folder / file, outlines, contents)

    def write_weights(
        self, file: str, config: Mapping[str, Any], outlines: Mapping[str, Tensor], weight_of: Callable[[str], Tensor]
    ) -> None:
        """Write weights of one dtype under published names. One weight is in memory at a time, with its copy as single experts."""
        published = dict(pair for name, outline in outlines.items() for pair in publish(config, name, outline))
        pairs = (map(itemgetter(1), publish(config, name, weight_of(name))) for name in outlines)
        self._write_model_file(file, published, chain.from_iterable(pairs))

    def copy_towers(self, folder: Path, config: Mapping[str, Any], with_projector: bool) -> None:
        """Copy the tensors of a vision-language model's `towers`, unchanged, one at a time."""
        stored, names = towers(folder, config, with_projector)
        outlines = {name: torch.empty_like(stored[name], device="meta") for name in names}
        outlines = dict(sorted(outlines.items(), key=lambda item: -item[1].itemsize))
        self._write_model_file("model-towers.safetensors", outlines, map(stored.__getitem__, outlines))

    def _write_model_file(self, file: str, outlines: Mapping[str, Tensor], contents: Iterable[Tensor]) -> None:
        """Write a file of weights, which the index lists."""
        self.write_tensors(file, outlines, contents)
        self._file_of |= dict.fromkeys(outlines, file)
        self._n_bytes += sum(outline.nbytes for outline in outlines.values())

    def write_config(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Write the configuration of a model with weights in `dtype`, and the index of the weight files."""
        index = {"metadata": {"total_size": self._n_bytes}, "weight_map": dict(sorted(self._file_of.items()))}
        self._write(INDEX_FILE, _json_bytes(index))
        unquantised = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
        self._write("config.json", _json_bytes(unquantised | {"dtype": str(dtype).removeprefix("torch.")}))

    def write_adapter(self, lora: Lora, model: Model, other_weights: Collection[str]) -> None:
        """Write the factors in `adapter` as PEFT's files. `other_weights`: names of the model's weights without factors."""
        factors = dict(sorted(self.adapter.items()))
        self.write_tensors(TENSOR_FILE, {PREFIX + name: factor for name, factor in factors.items()}, factors.values())
        self._write(CONFIG_FILE, config_bytes(lora, factors, model.path or model.name, other_weights, has_towers(model.config)))

    def copy_files(
        self, files: Mapping[str, Path], config: Mapping[str, Any], ends: Iterable[int] = (), chat_template: str | None = None
    ) -> None:
        """Copy the files of `kept_files`, with another chat template if one is given. Add the end tokens to those of generation."""
        new, generation = with_ends(files, config, ends)
        contents = {name: path.read_bytes() for name, path in files.items()}
        if new:
            contents[GENERATION_FILE] = _json_bytes(generation)
        if chat_template is not None:
            contents["chat_template.jinja"] = chat_template.encode()  # has priority over the one in tokenizer_config.json
        for name, content in contents.items():
            self._write(name, content)

    def finish(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the manifest. `state`: further fields for resuming."""
        fields = {"format_version": FORMAT_VERSION, "step": step, "state": state, "files": dict(sorted(self._files.items()))}
        self._write(STATE_FILE, _json_bytes(fields | {"sha256": sum_of(fields)}))

    def _write(self, file: str, content: bytes) -> None:
        (self._folder / file).parent.mkdir(exist_ok=True)
        self._files[file] = write_new(self._folder / file, [content])


def rewrite_fields(checkpoint: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of `state` in the manifest of a checkpoint, in one replacement of its file."""
    path, partial = checkpoint / STATE_FILE, checkpoint / f"{STATE_FILE}.partial"
    fields = dict(read_json(path))
    fields["state"] |= changes
    with writing(path):
        partial.unlink(missing_ok=True)
        write_new(partial, [_json_bytes(fields | {"sha256": sum_of(fields)})])
        partial.replace(path)
        sync(checkpoint)


def _json_bytes(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode()


# -- resuming: compare a state with the run that continues from it, and restore it ------------------------------------------

_FIELD_NAMES = {
    "data_fingerprint": "set of data, or order of it",
    "model_fingerprint": "model (its config.json differs)",
    "frozen": "model: the weights that are not trained",
    "semantics": "meaning of a step (batch, length, precision or clipping)",
    "optimizer": "optimizer or schedule",
}

# Fields that are absent from older states have their defaults.
_DEFAULTS = json.loads(json.dumps(asdict(Semantics(1, 1, 1))))
_STATE_FIELDS = ("optimizer", "master_dtype", "weight_rounding")  # fields of the semantics: format of the state, and its rounding
_RULE_FIELDS = ("lr", "beta1", "beta2", "eps")  # fields of the optimizer's settings that are specific to its rule
_PARTS = {"master": "master", "exp_avg": "first moment", "exp_avg_sq": "second moment"}


def identity(plan: Plan, data: RunData, seed: int, optimizer: Mapping[str, Any], frozen: str | None = None) -> dict[str, Any]:
    """Return, as JSON, the fields that must be equal in a state and in a run that resumes from it. The plan may differ.

    `optimizer`: its settings; `frozen`: digest of the frozen weights, which are not in the state.
    """
    fields: dict[str, Any] = {} if frozen is None else {"frozen": frozen}
    fields |= {"seed": seed, "data_fingerprint": data.fingerprint, "model_fingerprint": plan.model.fingerprint}
    fields |= {"semantics": asdict(plan.semantics.all_ranks), "optimizer": optimizer}
    result: dict[str, Any] = json.loads(json.dumps(fields))  # a tuple becomes a list, as in a state
    return result


def _state_in_words(semantics: Mapping[str, Any]) -> str:
    dtype = semantics["master_dtype"]
    rounding = f" rounded {'half up' if semantics['weight_rounding'] == 'half_up' else 'stochastically'}"
    return f"{semantics['optimizer']} with {dtype} masters{rounding if dtype in ('bf16', 'split24') else ''}"


def _converted_in_words(*states: Mapping[str, Any]) -> str:
    """Describe the conversion of each part of the first optimizer state to the second."""
    was, now = ({"master": state["master_dtype"], **Optimizer(state["optimizer"]).moments} for state in states)

    def become(part: str) -> str:
        if part not in now:
            return "dropped"
        is_exact = now[part] in (was[part], "fp32") or (was[part], now[part]) == ("bf16", "split24")
        return "kept" if is_exact else f"rounded to {now[part]}"

    return ", ".join(f"its {_PARTS[part]} is {become(part)}" for part in was)


def _in_current_names(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the semantics of a state in today's names, and True if the plan's arithmetic differs from that of the state.

    Plans before format 4 had no `lora_products`: an adapter's product was added to the frozen one after both were rounded. Their
    loss `fused`, now `online`, computed softmax in fp32 and rounded the gradient of the output matrix for each tile.
    """
    current, is_older = {**_DEFAULTS, **saved}, "lora_products" not in saved
    train = current["train"]
    has_adapters = isinstance(train, dict) and isinstance(train.get("lora"), dict)
    if isinstance(train, dict):
        current["train"] = train = _DEFAULTS["train"] | train
    if has_adapters:
        current["train"] = train | {"lora": {"rslora": False} | train["lora"]}
    is_renamed = is_older and (current["loss"], planned.get("loss")) == ("fused", "online")
    return current | ({"loss": "online"} if is_renamed else {}), is_older and (has_adapters or is_renamed)


def refuse_another(state: State, expected: Mapping[str, Any], converts: bool = False) -> str | None:
    """Raise CheckpointError with the first difference between a state and this run. Return a line on permitted differences, or
    None. `converts`: permit another optimizer. Its state is rounded to this run's dtypes, and another rule has other
    hyperparameters."""
    notes, is_another_rule = list[str](), False
    flag = "--adapter" if (state.path / CONFIG_FILE).is_file() else "--model"
    afresh = f"or start a new run from its weights, with {flag} {in_shell(state.path)} and another --out"
    for key, value in expected.items():
        saved = state.fields.get(key)
        if key == "semantics" and isinstance(saved, dict):
            saved, has_other_bits = _in_current_names(saved, value)
            if has_other_bits:
                notes.append("written with an earlier arithmetic of loss or adapters: results are no longer bitwise identical")
            was, now = ({name: values.get(name) for name in _STATE_FIELDS} for values in (saved, value))
            if was != now and (saved | now) == value and was["optimizer"] in [*Optimizer]:
                old, new = map(_state_in_words, (was, now))
                rules = [RULES[Optimizer(str(values["optimizer"])).rule] for values in (was, now)]
                lacking = [_PARTS[part] for part in rules[1].moments if part not in rules[0].moments]
                if not converts or lacking:
                    how = f"convert it, with --resume-from {in_shell(state.path.name)}"
                    advice = f"{rules[0].name} keeps no {lacking[0]}" if converts else how
                    raise CheckpointError(f"{state.path}: the state of {old}, not of {new}; {advice}, {afresh}")
                notes.append(f"the state of {old} becomes that of {new}: {_converted_in_words(was, now)}")
                saved, is_another_rule = value, rules[0] != rules[1]
        if key == "optimizer" and is_another_rule and isinstance(saved, dict):
            saved, value = ({k: v for k, v in values.items() if k not in _RULE_FIELDS} for values in (saved, value))
        if saved != value:
            difference = f"{_FIELD_NAMES.get(key, key)}{_difference(saved, value)}"
            raise CheckpointError(f"{state.path}: of another {difference}; resume as it began, {afresh}")
    return f"{state.path}: {'; '.join(notes)}" if notes else None


def fixed_lr_of(state: State) -> float | None:
    """Return the learning rate that a loop had set instead of the schedule, or None. CheckpointError if it is malformed."""
    rate = state.fields.get("fixed_lr")
    if rate is not None and (type(rate) is not float or not 0 <= rate < math.inf):
        raise _damaged(state.path, "its fixed_lr is invalid")
    return rate


def put_back(state: State, host: HostState, data: RunData) -> None:
    """Restore masters, moments and the position in the data. CheckpointError if one is missing or malformed."""
    n_updates, position = state.fields.get("n_updates"), state.fields.get("data_position")
    if type(n_updates) is not int or not 0 <= n_updates <= state.step or not isinstance(position, dict):
        raise _damaged(state.path, "its n_updates or data_position is invalid")
    if not data.resume(state.step, position):
        problem = f"its data position {str(position)[:80]} is not one of step {state.step}"
        raise CheckpointError(f"{state.path}: {problem}; resume with the data it began with")
    for number in range(len(host.plan.workload.blocks)):
        for p in host.owned[number]:
            host.set_weight(p, _stored(state, "master", p))
            for name in host.plan.semantics.optimizer.moments:
                host.moment(p, name).copy_(_stored(state, name, p).reshape(-1)[host.part(p)])
        host.settle(number)
    host.n_updates = n_updates


def _stored(state: State, kind: str, p: Parameter) -> Tensor:
    name = f"{kind}.{p.name}"
    tensor = state.optimizer.get(name, torch.empty(0))
    if tensor.dtype is torch.uint8 and tensor.shape == (group_bytes(p.n_elements),):
        tensor = Int8Moment(tensor, p.n_elements, kind == "exp_avg_sq").values().view(p.shape)
    if name not in state.optimizer or tuple(tensor.shape) != p.shape:
        raise _damaged(state.path, f"{name} is missing or of another shape")
    return tensor


def _difference(was: Any, now: Any, path: str = "") -> str:
    """Describe the first value that differs; empty for values that are not dicts."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}, key=lambda key: (key == "n_steps", key)):  # n_steps last: it depends on the schedule
            if was.get(key) != now.get(key):
                return _difference(was.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    return f": {path} was {json.dumps(was)[:80]}, is {json.dumps(now)[:80]}" if path else ""
