"""The weights that a run begins with: random, a model's, with an adapter's or without, or a checkpoint's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.adapter_files import read_adapter
from penstock.checkpoint.checkpoint import State
from penstock.checkpoint.model_files import load_weights
from penstock.checkpoint.packed_base import packed_base
from penstock.checkpoint.resuming import put_back
from penstock.data.data import Data
from penstock.settings import RunSettings
from runtime.errors import CheckpointError
from runtime.host.slabs import give_back_freed
from runtime.machines.torch_machine import TorchMachine
from runtime.plan.train import Train, is_adapter

PACKED_FOLDER = "base"  # in the run's folder: packed weights, for the next start


def fill(
    store: TorchMachine,
    settings: RunSettings,
    data: Data,
    weights: Path | None,
    state: State | None,
    report: Callable[[str], None] = lambda words: None,
) -> None:
    """Put into the store what the run begins with: the model's weights in `weights`, random ones where that is None, and the state
    of a checkpoint, which has all weights that are trained."""
    if state is None or not store.plan.workload.trains_all:
        if weights is None:
            report("making random weights")
            store.initialise(settings.seed)
        else:
            packed = Path(settings.out) / PACKED_FOLDER if settings.packed is None else Path(settings.packed)
            load_model(store, weights, packed, report)
            store.initialise_adapters(settings.seed)
    if state is not None:
        report("putting back the state")
        put_back(state, store.host, data)
    elif settings.adapter is not None:
        load_adapter(store, Path(settings.adapter))


def load_model(store: TorchMachine, folder: Path, cache: Path, report: Callable[[str], None] = lambda words: None) -> None:
    """Put a Hugging Face model's weights into the store, one tensor at a time; those that are stored packed are packed once, into
    `cache`. Adapters stay as they are."""
    plan, host = store.plan, store.host
    packed_shapes = {p.name: p.shape for p in host.all_owned() if plan.is_packed(p)}
    if packed_shapes:
        report(f"packing weights in {plan.semantics.base}, if they are not yet")
        read_packed = packed_base(folder, plan.model.config, packed_shapes, plan.semantics.base, cache)
    for number, block in enumerate(plan.workload.blocks):
        report(f"loading weights: {number} of {len(plan.workload.blocks)} blocks")
        owned = {p.name: p for p in block.parameters if p.tied_to is None and not is_adapter(p.name)}
        for name in owned.keys() & packed_shapes.keys():
            host.set_weight(owned.pop(name), read_packed(name))
        shapes = {name: p.shape for name, p in owned.items()}
        for name, weight in load_weights(folder, str(plan.model.config.get("model_type")), owned, shapes):
            host.set_weight(owned[name], weight)
    give_back_freed()


def load_adapter(store: TorchMachine, folder: Path) -> None:
    """Put an adapter, as PEFT saves it, into the store; CheckpointError where it is not the plan's, or of another base."""
    planned = store.plan.semantics.train.lora
    owned = {p.name: p for p in store.host.all_owned()}
    lora, factors = read_adapter(folder, {name: p.shape for name, p in owned.items() if not is_adapter(name)})
    if planned is None:
        raise CheckpointError(f"{folder}: an adapter, but the plan trains none; plan with --train {Train(lora=lora)}")
    alike = replace(lora, dropout=planned.dropout) == replace(planned, targets=lora.targets)
    if not alike or factors.keys() != {name for name in owned if is_adapter(name)}:
        raise CheckpointError(f"{folder}: another adapter than the plan's; plan with --train {Train(lora=lora)}")
    for name, factor in factors.items():
        store.host.set_weight(owned[name], factor)
    for block in range(len(store.plan.workload.blocks)):
        store.host.settle(block)
