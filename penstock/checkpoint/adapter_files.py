"""How is an adapter written so that PEFT reads it, and read as PEFT wrote it?

A folder of two files, `adapter_config.json` and `adapter_model.safetensors`. Tensors have our names behind `base_model.model.`: the
two factors of each projection, A (rank, in) and B (out, rank), in fp32. Read are adapters that stand beside the same projections in
every layer, with one rank and one alpha; what else PEFT can do is refused by its name. Nothing is ever unpickled.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError, PlanError
from runtime.files import read_whole, sync
from runtime.plan.train import TARGETS, Lora, checked_lora

from .room import refusal
from .tensor_files import LazyTensor, Shards, TensorFile, write_new

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 16 * 2**20
PREFIX = "base_model.model."
STORED = (torch.float32, torch.bfloat16, torch.float16)

_MODULE = rf"model\.layers\.(0|[1-9][0-9]{{0,4}})\.(?:self_attn|mlp)\.({'|'.join(TARGETS)})"
_PLACE = re.compile(_MODULE)
_WEIGHT = re.compile(rf"({_MODULE})\.weight")
_FACTOR = re.compile(rf"{_MODULE}\.lora_[AB]\.weight")

# What PEFT says besides rank, alpha, dropout and targets: what may be said, and what is of no interest once an adapter is trained.
# Other ways to begin (pissa, olora, corda, loftq, lora_ga) change the weights beside which an adapter is trained.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
}
_IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "loftq_config"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "task_type"),
    *("r", "lora_alpha", "lora_dropout", "target_modules"),
}
_OFF: tuple[Any, ...] = (None, False, "", [], {})
_INSTEAD = "train one without it, or merge it into its model with PEFT's merge_and_unload"


# -- writing ----------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, lora: Lora, tensors: Mapping[str, Tensor | LazyTensor], base: str | None) -> None:
    """Write the folder, whole or not at all, from fp32 factors by our names, each asked for when it is written. `base` is where the
    model lies, if that is known. CheckpointError, with nothing left behind, where the disk refuses or something lies there."""
    with new_folder(folder) as partial:
        file = TensorFile(partial / TENSOR_FILE, {peft_name(name): _outline(tensor) for name, tensor in tensors.items()})
        try:
            for name in file.in_order:
                file.put(name, tensors[name.removeprefix(PREFIX)])
            file.close()
        finally:
            file.give_up()
        write_new(partial / CONFIG_FILE, (json.dumps(peft_config(lora, tensors, base), indent=2) + "\n").encode())


def peft_name(name: str) -> str:
    """What PEFT's files call one of our factors."""
    assert _FACTOR.fullmatch(name), name
    return PREFIX + name


def peft_config(lora: Lora, names: Iterable[str], base: str | None) -> dict[str, Any]:
    """What `adapter_config.json` says of an adapter that has factors of these names.

    Its targets are those that have factors: of a model with experts PEFT takes the others' names for those of experts.
    """
    found = {_target(name.rpartition(".lora_")[0]) for name in names}
    assert found <= {*lora.targets}, "an adapter has factors beside its targets alone"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [target for target in TARGETS if target in found],
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write what is to be a folder: it gets its name when all of it is on disk. CheckpointError where something lies
    there already; or, with nothing left behind, where the disk refuses."""
    target = Path(os.path.realpath(folder))
    partial = target.with_name(target.name + ".partial")
    try:
        if target.exists() and any(target.iterdir()):
            raise CheckpointError(f"{folder}: is not empty; choose another --out")
        shutil.rmtree(partial, ignore_errors=True)  # of a command that was killed while writing
        partial.mkdir(parents=True)
    except OSError as error:
        raise refusal(folder, error) from None
    try:
        yield partial
        sync(partial)  # the names, as the files are
        partial.rename(target)
        sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise refusal(folder, error) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _outline(tensor: Tensor | LazyTensor) -> Tensor:
    assert tensor.dtype == torch.float32, "factors are fp32, as PEFT has them"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# -- reading ----------------------------------------------------------------------------------------------------------


class Factors(Mapping[str, Tensor]):
    """An adapter's factors by our names, in fp32, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self._stored = path, Shards([path])
        self.names = frozenset(self)  # asking a mapping whether it has a tensor would read it

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[PREFIX + name].float()

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(PREFIX) for key in self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By our names; what a tensor holds is not read. CheckpointError for one that is no factor."""
        shapes = {}
        for key, tensor in self._stored.items():
            name = key.removeprefix(PREFIX)
            if not key.startswith(PREFIX) or not _FACTOR.fullmatch(name):
                expected = f"{PREFIX}model.layers.N.<{', '.join(TARGETS)}>.lora_A or lora_B.weight"
                raise CheckpointError(
                    f"{self.path}: {_named(key)} is no factor beside a layer's projection ({expected}); {_INSTEAD}"
                )
            if tensor.dtype not in STORED:
                raise CheckpointError(f"{self.path}: {_named(key)} is {tensor.dtype}; save it in fp32, bf16 or fp16")
            shapes[name] = tuple(tensor.shape)
        if not shapes:
            raise CheckpointError(f"{self.path}: holds no tensors; save the adapter again")
        return shapes


def read_adapter(folder: Path, parameters: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Lora, Factors]:
    """The adapter in a folder, as PEFT saves it. CheckpointError where it is damaged, is not computed here, or does not stand
    beside every layer of the model that has these parameters (shapes by name)."""
    config = _read_config(folder)
    factors = Factors(_tensor_file(folder))
    shapes = factors.shapes()
    modules = sorted({name.rpartition(".lora_")[0] for name in shapes}, key=_place)
    lora = _lora(folder / CONFIG_FILE, config, {_target(module) for module in modules})
    _refuse_other_ranks(factors.path, shapes, modules, lora.rank)
    _refuse_other_targets(folder, config, modules)
    if parameters is not None:
        _refuse_another_base(factors.path, config, shapes, modules, parameters)
    return lora, factors


def _read_config(folder: Path) -> dict[str, Any]:
    """What the configuration says, where all of it is computed here."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(read_whole(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a folder with an adapter that PEFT saved") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({_shown(str(error))}); copy it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy it again")
    if (peft_type := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{path}: peft_type is {_shown(peft_type)}; give an adapter of the type LORA")
    if (task_type := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{path}: task_type is {_shown(task_type)}; give an adapter of a language model, CAUSAL_LM")
    for key, value in config.items():
        if key not in _IGNORED and value not in _COMPUTED.get(key, _OFF):
            raise CheckpointError(f"{path}: {_named(key)} is {_shown(value)}, which is not computed here; {_INSTEAD}")
    return config


def _lora(path: Path, config: Mapping[str, Any], targets: Collection[str]) -> Lora:
    rank = _number(path, "r", config.get("r"), int, "whole number")
    alpha = _number(path, "lora_alpha", config.get("lora_alpha"), int | float, "number")
    dropout = _number(path, "lora_dropout", config.get("lora_dropout", 0.0), int | float, "number")
    try:
        return checked_lora(rank, float(alpha), float(dropout), tuple(targets))
    except PlanError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _number(path: Path, key: str, value: Any, kinds: Any, what: str) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool) or not abs(value) < 2**31:
        raise CheckpointError(f"{path}: {key} is {_shown(value)}, and must be a {what}; copy it again")
    return value


def _tensor_file(folder: Path) -> Path:
    path = folder / TENSOR_FILE
    if path.is_file():
        return path
    if (folder / PICKLED_FILE).exists():
        raise CheckpointError(f"{folder}: its tensors are pickled ({PICKLED_FILE}) and could run code; save it as {TENSOR_FILE}")
    raise CheckpointError(f"{path}: is no file; copy the adapter again")


def _refuse_other_ranks(path: Path, shapes: Mapping[str, tuple[int, ...]], modules: Iterable[str], rank: int) -> None:
    """Each projection has both factors, of the rank that the configuration says."""
    for module in modules:
        for letter, axis in (("A", 0), ("B", 1)):
            name = f"{module}.lora_{letter}.weight"
            if name not in shapes:
                raise CheckpointError(f"{path}: no tensor {PREFIX}{name}, though there is the other factor; copy it again")
            if len(shapes[name]) != 2 or shapes[name][axis] != rank:
                order = f"({rank}, in)" if letter == "A" else f"(out, {rank})"
                raise CheckpointError(
                    f"{path}: {PREFIX}{name} is {shapes[name]}, and {order} of the r in {CONFIG_FILE}; copy both files again"
                )


def _refuse_other_targets(folder: Path, config: Mapping[str, Any], modules: Iterable[str]) -> None:
    """PEFT would leave out what its list of targets does not name. A pattern is somebody's program: it is not run."""
    targets = config.get("target_modules")
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{folder / CONFIG_FILE}: target_modules is {_shown(targets)}, no list of names; copy it again")
    for module in modules:
        if not _is_named(module, targets):
            raise CheckpointError(
                f"{folder / TENSOR_FILE}: {PREFIX}{module}.lora_A.weight stands beside no target_modules of {CONFIG_FILE}; "
                "copy both files again"
            )


def _refuse_another_base(
    path: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    modules: Collection[str],
    parameters: Mapping[str, tuple[int, ...]],
) -> None:
    """Every layer of the model has the same targets, and each factor has its projection's size. The first difference is named."""
    targets = {_target(module) for module in modules}
    said = config.get("target_modules")
    if isinstance(said, list) and not config.get("exclude_modules"):
        targets |= {_target(target) for target in said}
    weights = {
        match[1]: shape
        for name, shape in parameters.items()
        if len(shape) == 2 and all(shape) and (match := _WEIGHT.fullmatch(name))
    }
    expected = {module for module in weights if _target(module) in targets}
    for module in sorted({*expected, *modules}, key=_place):
        if module not in weights:
            raise CheckpointError(f"{path}: stands beside {module}, which this model has not; give the adapter of this model")
        if module not in modules:
            raise CheckpointError(
                f"{path}: no tensor {PREFIX}{module}.lora_A.weight; an adapter stands beside every layer's {_target(module)}, "
                "or none's: give one that does, of this model"
            )
        n_out, n_in = weights[module]
        for name, axis, n in ((f"{module}.lora_A.weight", 1, n_in), (f"{module}.lora_B.weight", 0, n_out)):
            if shapes[name][axis] != n:
                raise CheckpointError(
                    f"{path}: {PREFIX}{name} is {shapes[name]}, and this model's {module} is ({n_out}, {n_in}): of another model; "
                    "give the adapter of this one"
                )


def _is_named(module: str, targets: Iterable[str]) -> bool:
    """As PEFT decides it."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _place(module: str) -> tuple[int, int]:
    """For the order of layers, and of projections in one."""
    match = _PLACE.fullmatch(module)
    assert match is not None
    return int(match[1]), TARGETS.index(match[2])


def _target(module: str) -> str:
    return module.rpartition(".")[2]


def _shown(value: object) -> str:
    """A value from a file, on one line."""
    return json.dumps(value)[:60]


def _named(key: str) -> str:
    """A name from a file, on one line."""
    return key if re.fullmatch(r"[\w.-]{1,160}", key) else repr(key[:160])
