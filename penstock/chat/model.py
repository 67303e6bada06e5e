"""Model of a chat on this machine: its forward plan, loaded with weights and adapter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.api import semantics_of
from penstock.caches import cache_folder
from penstock.checkpoint.adapter_files import CONFIG_FILE, adapts_projector, read_adapter
from penstock.checkpoint.checkpoint import refuse_another_base
from penstock.checkpoint.model_files import has_weights, read_json, weights_digest
from penstock.data.data import Report
from penstock.data.tokenizer import ModelTokenizer, read_tokenizer
from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.run_config import RunConfigError
from penstock.runtime.batch import Batch
from penstock.runtime.machines.lanes import CpuDevice, CudaDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, Policy
from penstock.runtime.plan.objective import CROSS_ENTROPY
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.train import Train
from penstock.runtime.plan.workload import Model, text_of
from penstock.runtime.units import on_one_line
from penstock.settings import RunSettings
from penstock.training.build import PACKED_FOLDER, load_adapter, load_constants, load_model
from penstock.training.device import device_of, refuse_what_does_not_fit, select_kernels
from penstock.training.inputs import tokenizer_folder, weights_of

DEVICES = {"cpu": "cpu-2core", "cuda": "h100-sxm"}  # profile that selects the kernels; memory is that of this machine
CONTEXT = 4096  # tokens, unless the model takes fewer
LOGITS = 16  # positions with logits at a time; an answer needs one


def located_model(settings: RunSettings) -> RunSettings:
    """Return settings with the folders of a model and, if any, of an adapter. RunConfigError if a folder is missing."""
    folder = Path(settings.model or "")
    if not folder.is_dir():
        raise RunConfigError(f"{folder}: no such folder; give a model's folder, a checkpoint, or a model and --adapter FOLDER")
    if (folder / "config.json").is_file() or not (folder / CONFIG_FILE).is_file():
        return settings
    base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
    if settings.adapter is not None or not isinstance(base, str) or not Path(base).is_dir():
        problem = f"an adapter without its base ({on_one_line(str(base), 120)} is no folder)"
        raise RunConfigError(f"{folder}: {problem}; give BASE --adapter {folder}")
    return replace(settings, model=base, adapter=str(folder))


def load(
    settings: RunSettings, context: int | None, compute: str, base: Base, report: Report
) -> tuple[TorchMachine, ModelTokenizer]:
    """Return a machine with the model and adapter of `located_model`, and the tokenizer. The machine's plan has one sequence of
    `context` tokens. PenstockError for invalid files, or if memory does not suffice, before anything is allocated."""
    device, folder = device_of(settings.device), Path(settings.model or "")
    if not has_weights(folder):
        raise RunConfigError(f"{folder}: holds no weights; give a folder with a model's weights, or a checkpoint of a run")
    tokenizer = read_tokenizer(tokenizer_folder(settings, folder), settings.data.chat_template)
    report("planning")
    plan = _plan(read_model(str(folder)), settings, device, context, compute, base)
    weights = weights_of(settings, plan, folder, None)
    assert weights is not None, "the settings name a model"
    if settings.adapter is not None:
        refuse_another_base(Path(settings.adapter), lambda: weights_digest(weights))
    refuse_what_does_not_fit(plan, device, settings.device)
    select_kernels(plan, device, settings.deterministic)
    machine = TorchMachine(plan, _no_batch, lambda step: AdamW(), device=CudaDevice() if device == "cuda" else CpuDevice())
    load_model(machine, weights, _packed_folder(settings), report)
    machine.initialise_adapters(settings.seed)  # their products are zero
    load_constants(machine, weights)
    if settings.adapter is not None:
        load_adapter(machine, Path(settings.adapter))
    return machine, tokenizer


def _plan(model: Model, settings: RunSettings, device: str, context: int | None, compute: str, base: Base) -> Plan:
    """Return a plan with the least memory: one parameter is trained, or adapters, which no step updates here."""
    longest = text_of(model.config).get("max_position_embeddings")
    limit = longest if isinstance(longest, int) and longest > 0 else CONTEXT
    if context is not None and context > limit:
        raise RunConfigError(f"--context {context}: the model has {limit:,} positions; give at most that")
    profile = read_profile(DEVICES[device])
    in_projector = settings.adapter is not None and adapts_projector(Path(settings.adapter))
    fields: dict[str, Any] = {"seq_len": context or min(limit, CONTEXT), "batch_size": 1, "clip_norm": None}
    fields |= {"loss_tile_tokens": LOGITS, "objective": CROSS_ENTROPY, "train": "all,projector" if in_projector else "all"}
    untrained = build_workload(model, semantics_of(fields, model, profile, "eager", False))  # its shapes do not depend on `compute`
    parameters = {p.name: p.shape for block in untrained.blocks for p in block.parameters if p.tied_to is None}
    if settings.adapter is not None:
        trained = str(Train(lora=read_adapter(Path(settings.adapter), parameters)[0], projector=in_projector))
    elif base != "bf16":
        trained = "lora:r=8"  # only layers with adapters have packed weights
    else:
        last = [p for p in untrained.blocks[-1].parameters if p.tied_to is None]
        trained = f"names:{min(last, key=lambda p: p.n_elements).name}"
    fields |= {"train": trained, "base": base, "compute_dtype": compute}
    semantics = semantics_of(fields, model, profile, "eager", False)
    return lower(model, build_workload(model, semantics), semantics, Policy(), profile.to_json())


def _packed_folder(settings: RunSettings) -> Path:
    """Return the cache of packed weights: the setting, that of the adapter's run, or the user's."""
    of_run = Path(settings.adapter or "").resolve().parent / PACKED_FOLDER
    return Path(settings.packed) if settings.packed else of_run if settings.adapter and of_run.is_dir() else cache_folder() / "base"


def _no_batch(step: int) -> Batch:
    raise AssertionError("a chat trains no step")
