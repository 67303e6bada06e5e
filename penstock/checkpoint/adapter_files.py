"""LoRA adapters in PEFT's files, `adapter_config.json` and `adapter_model.safetensors`.

Tensors have our names after the prefix `base_model.model.`. A linear layer has the fp32 factors A (rank, in) and B (out, rank). A
layer with E experts has those of two stacks, A (E rank, in) and B (out, rank E). A trained head that scores sequences is stored
like PEFT's `modules_to_save`. An adapter is read if it has the factors of all its targets, one rank and one alpha; other options
of PEFT are rejected by name.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError, PlanError
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.train import EXPERTS, IN_EXPERTS, IN_PROJECTOR, STACK, Lora, checked_lora, is_selected, last_part
from penstock.runtime.units import on_one_line

from .model_files import read_json
from .tensor_files import Shapes, Shards

if TYPE_CHECKING:
    from peft import LoraConfig  # 57 MB, imported only for an adapter

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 16 * 2**20
PREFIX = "base_model.model."
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of stored factors and models

# A matrix in a layer, except of experts stored separately
_WEIGHT = re.compile(r"(?:[a-z_]+\.)*[a-z]+\.[0-9]+\.(?!.*\bexperts\.[0-9]).*\.weight")

STACKS = ("gate_up_proj", "down_proj")  # weights of a layer's experts in `target_parameters`
_HEAD, _HEADS = SCORE.removesuffix(".weight"), ("classifier", SCORE.removesuffix(".weight"))  # PEFT names both
_READ = ("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters", "use_rslora")
_REQUIRED = ("r", "lora_alpha", "target_modules")  # required, because PEFT's defaults would be another adapter
# Options that do not change the computation. Every other option of PEFT must be off, or have its default.
_IDLE = ("base_model_name_or_path", "inference_mode", "auto_mapping", "eva_config", "loftq_config", "peft_version", "revision")
_OFF: tuple[Any, ...] = (None, False, "", [], {})
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "SEQ_CLS"),
    # Initializations that do not change the base weights, unlike pissa, olora, corda, loftq and lora_ga.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
}
_INSTEAD = "train one without it, or merge it into its model with PEFT's merge_and_unload"


def config_bytes(
    lora: Lora, factors: Iterable[str], base: str | None, other_weights: Collection[str] = (), has_towers: bool = False
) -> bytes:
    """Return `adapter_config.json` for an adapter of the model `base` with factors of these names.

    `other_weights`: names of the model's other weights. Targets are the modules with factors: by their last part, or by whole names
    if other modules share that, as in towers. PEFT lists experts, and modules that it treats as experts, in `target_parameters`.
    """
    from peft import LoraConfig

    has_head = SCORE in factors
    adapted = {name.rpartition(".lora_")[0].removesuffix(".base_layer") for name in factors if name != SCORE}
    experts = next((".".join(m.split(".")[-2:]) for m in adapted if last_part(m) == EXPERTS), None)  # and their path in a layer
    modules = {module for module in adapted if last_part(module) != EXPERTS}
    has_experts = experts is not None or any(map(STACK.search, other_weights))
    as_parameters = {module for module in modules if has_experts and last_part(module) in IN_EXPERTS}
    targets = _names(
        modules - as_parameters, {name.removesuffix(".weight") for name in other_weights} - modules | as_parameters, has_towers
    )
    parameters = [f"{experts}.{stack}" for stack in STACKS] if experts is not None else []
    parameters += [f"{module}.weight" for module in sorted(as_parameters)]
    config = LoraConfig(
        task_type="SEQ_CLS" if has_head else "CAUSAL_LM",
        modules_to_save=[_HEAD] if has_head else None,
        base_model_name_or_path=base,
        inference_mode=True,
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=targets,
        target_parameters=parameters or None,
    )
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in dataclasses.asdict(config).items()}
    del fields["runtime_config"]  # describes a process, not an adapter
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def read_adapter(folder: Path, parameters: Shapes) -> tuple[Lora, dict[str, Tensor]]:
    """Read the adapter in a folder, and its fp32 factors by our names. CheckpointError if it is damaged, has unsupported options,
    or does not adapt the same projections in every layer of the model with these `parameters`."""
    from peft.tuners.tuners_utils import check_target_module_exists

    path = folder / TENSOR_FILE
    if not path.is_file():
        pickled = f"its tensors are pickled ({PICKLED_FILE}) and could run code; save it as {TENSOR_FILE}"
        raise CheckpointError(f"{folder}: {pickled if (folder / PICKLED_FILE).exists() else f'no {TENSOR_FILE}; copy it again'}")
    stored = Shards([path])
    stacks = {name: shape for name, shape in parameters.items() if STACK.search(name)}
    matrices = {name: shape for name, shape in parameters.items() if len(shape) == 2 and name.endswith(".weight")}
    weights = {n.removesuffix(".weight"): s for n, s in matrices.items() if _WEIGHT.fullmatch(n) or IN_PROJECTOR.search(n)}
    try:
        config = _read_config(folder)
        as_parameters = _adapted_parameters(folder, config, {*stacks, *(f"{module}.weight" for module in weights)})
        has_experts = any(name in stacks for name in as_parameters)
        adapted = {m for m in weights if check_target_module_exists(config, m) or f"{m}.weight" in as_parameters}
        targets = _names(adapted, weights.keys() - adapted) + ([EXPERTS] if has_experts else [])
        sizes = {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout, "rslora": config.use_rslora}
        lora = checked_lora(**sizes, targets=targets)
    except (PlanError, TypeError, re.error) as error:  # the last two: target_modules is neither names nor a pattern
        raise CheckpointError(f"{folder / CONFIG_FILE}: {on_one_line(str(error), 160)}; copy it again") from None
    if adapts_projector(folder) and not any(map(IN_PROJECTOR.search, weights)):
        raise CheckpointError(f"{folder}: adapts the projector, too; plan with `,projector` at the end of --train")
    expected = dict[str, tuple[int, ...]]()
    if PREFIX + SCORE in stored:
        if SCORE not in parameters:
            raise CheckpointError(f"{folder}: has a head that scores sequences, which is not supported here; {_INSTEAD}")
        expected[PREFIX + SCORE] = parameters[SCORE]
    for module in adapted:
        n_out, n_in = weights[module]
        factor = f"{PREFIX}{module}.lora_"
        if (a := f"{factor}A.weight") in stored and stored.outline(a).shape[1:] == (n_out,):  # a transposed weight, as of GPT-2
            n_out, n_in = n_in, n_out
        expected |= {f"{factor}A.weight": (lora.rank, n_in), f"{factor}B.weight": (n_out, lora.rank)}
    for name, (n_experts, *sides) in stacks.items() if has_experts else ():
        factor = f"{PREFIX}{stack_factors(name)}.lora_"
        n_in = next(reversed(stored[f"{factor}A.weight"].shape), 0)  # a stack may have inputs before outputs, or after
        n_out = sides[sides[0] == n_in]
        expected |= {f"{factor}A.weight": (n_experts * lora.rank, sum(sides) - n_out)}
        expected |= {f"{factor}B.weight": (n_out, lora.rank * n_experts)}
    for name in sorted(expected.keys() ^ stored.keys()):
        problem = f"no tensor {name}" if name in expected else f"{on_one_line(name, 160)} is no factor of its target_modules"
        wanted = "both factors of every matrix that its targets name"
        raise CheckpointError(f"{path}: {problem}; an adapter of this model has {wanted}")
    for name, tensor in stored.items():
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}; save it in fp32, bf16 or fp16")
        if tuple(tensor.shape) != expected[name]:
            why = f"{expected[name]} by the r in {CONFIG_FILE} and this model's projection"
            raise CheckpointError(f"{path}: {name} is {tuple(tensor.shape)}, and {why}; give the adapter of this model")
    return lora, {name.removeprefix(PREFIX): tensor.float() for name, tensor in stored.items()}


def adapts_projector(folder: Path) -> bool:
    """True if the adapter in a folder has factors of a vision-language model's projector."""
    return (path := folder / TENSOR_FILE).is_file() and any(map(IN_PROJECTOR.search, Shards([path])))


def head_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the head that scores sequences, or {} if the adapter has none."""
    stored = Shards([path] if (path := folder / TENSOR_FILE).is_file() else [])
    return {SCORE: tuple(stored.outline(PREFIX + SCORE).shape)} if PREFIX + SCORE in stored else {}


def stack_factors(stack: str) -> str:
    """Return the name prefix of the factors of a stack of experts. PEFT nests the two stacks of a layer."""
    module, _, last = stack.rpartition(".")
    return module if last == "down_proj" else f"{module}.base_layer"


def _adapted_parameters(folder: Path, config: "LoraConfig", names: Iterable[str]) -> set[str]:
    """Return the weights and stacks of `names` in `target_parameters`. CheckpointError if it has others, or one of two stacks."""
    parameters = config.target_parameters or []
    matches = {name: [t for t in parameters if f".{name}".endswith(f".{t}")] for name in names}
    adapted = {name for name, of_name in matches.items() if of_name}
    is_partial = any(STACK.search(n) for n in adapted) and not all(n in adapted for n in matches if STACK.search(n))
    if {t for of_name in matches.values() for t in of_name} != {*parameters} or is_partial:
        subject = f"not supported: only {' and '.join(STACKS)} of experts, and weights of linear layers"
        raise CheckpointError(f"{folder / CONFIG_FILE}: target_parameters is {json.dumps(parameters)[:120]}, {subject}; {_INSTEAD}")
    return adapted


def _names(modules: Set[str], other_modules: Set[str], has_towers: bool = False) -> list[str]:
    """Return names that PEFT and `Lora.targets` use to select these modules and none of `other_modules`."""
    ends = {last_part(module) for module in modules}
    is_exact = not has_towers and not any(is_selected(module, end) for module in other_modules for end in ends)
    return sorted(ends if is_exact else modules)


def _read_config(folder: Path) -> "LoraConfig":
    """Read the configuration. CheckpointError for unsupported options."""
    from peft import LoraConfig

    path = folder / CONFIG_FILE
    fields = read_json(path, MAX_CONFIG_BYTES)
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    if isinstance(heads := fields.get("modules_to_save"), list) and all(head in _HEADS for head in heads):
        del fields["modules_to_save"]
    for key, value in {"peft_type": None, **fields}.items():
        if key not in (*_READ, *_IDLE) and value not in _ALLOWED.get(key, (*_OFF, defaults.get(key))):
            raise CheckpointError(f"{path}: {on_one_line(key, 80)} is {json.dumps(value)[:60]}, not supported; {_INSTEAD}")
    required = [key for key in _REQUIRED if key != "target_modules" or not fields.get("target_parameters")]
    if lacking := [key for key in required if fields.get(key) is None]:
        raise CheckpointError(f"{path}: {lacking[0]}: missing; copy it again")
    return LoraConfig(**{key: fields[key] for key in _READ if key in fields})
