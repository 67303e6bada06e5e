"""Build a run from its inputs: allocate its machine, and load the initial state."""

from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.adapter_files import read_adapter
from penstock.checkpoint.checkpoint import fixed_lr_of, put_back
from penstock.checkpoint.model_files import has_tensor, load_weights
from penstock.checkpoint.packed_base import packed_base
from penstock.data.data import Report, no_report
from penstock.runtime.errors import CheckpointError
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.machines.lanes import CpuDevice, CudaDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan.footprint import host_needs
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.train import Train, is_adapter
from penstock.runtime.ranks import Ranks
from penstock.runtime.units import show_bytes

from .inputs import RunInputs
from .schedules import run_rates

PACKED_FOLDER = "base"  # in the run's folder: packed weights, reused by later runs


def build(inputs: RunInputs, ranks: Ranks | None = None) -> TorchMachine:
    """Allocate the machine of a run on this rank, and load the initial state."""
    plan, settings = inputs.plan, inputs.settings
    host_bytes = sum(host_needs(plan, 1 if ranks is None else ranks.n_here).values())
    inputs.request.report(f"taking memory: {show_bytes(host_bytes + plan.device_arena_bytes)}")
    device = CudaDevice() if inputs.device == "cuda" else CpuDevice(pin_threads=True)
    fixed_lr = None if inputs.state is None else fixed_lr_of(inputs.state)
    rates = run_rates(settings.optimizer, inputs.n_steps, fixed_lr)
    batches, seed = inputs.data.batch, settings.seed
    store = TorchMachine(plan, batches, rates, seed, ranks=ranks, loss=inputs.loss, disk=inputs.disk, device=device)
    _load(inputs, store)
    return store


def _load(inputs: RunInputs, store: TorchMachine) -> None:
    """Load weights, random ones without a folder, and the state of a checkpoint, which holds all trained weights."""
    settings, weights, state, report = inputs.settings, inputs.weights, inputs.state, inputs.request.report
    if state is None or not store.plan.workload.trains_all:
        if weights is None:
            report("making random weights")
            store.initialise(settings.seed)
        else:
            packed = Path(settings.out) / PACKED_FOLDER if settings.packed is None else Path(settings.packed)
            load_model(store, weights, packed, report, settings.seed)
            store.initialise_adapters(settings.seed)
    load_constants(store, weights if weights is not None or state is None else state.path)
    if state is not None:
        report("putting back the state")
        put_back(state, store.host, inputs.data)
    elif settings.adapter is not None:
        load_adapter(store, Path(settings.adapter))


def load_model(store: TorchMachine, folder: Path, cache: Path, report: Report = no_report, seed: int = 0) -> None:
    """Load a Hugging Face model into the store, one tensor at a time. Packed weights are packed once, into `cache`. Adapters do not
    change. A task head that the folder lacks is initialised with `seed`."""
    plan, host = store.plan, store.host
    packed_shapes = {p.name: p.shape for p in host.all_owned() if plan.is_packed(p) and not host.is_there(p)}
    if packed_shapes:
        report(f"packing weights in {plan.semantics.base}, if they are not yet")
        read_packed = packed_base(folder, plan.model.config, packed_shapes, plan.semantics.base, cache)
    for number, block in enumerate(plan.workload.blocks):
        report(f"loading weights: {number} of {len(plan.workload.blocks)} blocks")
        owned = {p.name: p for p in block.parameters if p.tied_to is None and not is_adapter(p.name)}
        owned = {name: p for name, p in owned.items() if not host.is_there(p)}
        for name in owned.keys() & packed_shapes.keys():
            host.set_weight(owned.pop(name), read_packed(name))
        if SCORE in owned and not has_tensor(folder, SCORE):
            host.set_weight(owned.pop(SCORE), store.compute.templates.initial_weights(number, seed)[SCORE])
        shapes = {name: p.shape for name, p in owned.items()}
        for name, weight in load_weights(folder, plan.model.config, owned, shapes):
            host.set_weight(owned[name], weight)
    give_back_freed()


def load_constants(store: TorchMachine, folder: Path | None) -> None:
    """Load the buffers (non-weights) of layers from a model's folder. None: keep the initial values."""
    templates = store.compute.templates
    store.host.constants = templates.constants()
    shapes = {name: tuple(buffer.shape) for name, buffer in store.host.constants.items()}
    if shapes and folder is not None:
        for name, value in load_weights(folder, store.plan.model.config, shapes, shapes):
            templates.set_constant(name, value)
            store.host.constants[name] = value.clone()  # saved with its own precision


def load_adapter(store: TorchMachine, folder: Path) -> None:
    """Load a PEFT adapter into the store. CheckpointError if it does not fit the plan or its base model."""
    planned = store.plan.semantics.train.lora
    owned = {p.name: p for p in store.host.all_owned()}
    lora, factors = read_adapter(folder, {name: p.shape for name, p in owned.items() if not is_adapter(name)})
    if planned is None:
        raise CheckpointError(f"{folder}: an adapter, but the plan trains none; plan with --train {Train(lora=lora)}")
    is_same = replace(lora, dropout=planned.dropout) == replace(planned, targets=lora.targets)
    if not is_same or factors.keys() - {SCORE} != {name for name in owned if is_adapter(name)}:
        raise CheckpointError(f"{folder}: another adapter than the plan's; plan with --train {Train(lora=lora)}")
    for name, factor in factors.items():
        if factor.shape != owned[name].shape:
            raise CheckpointError(f"{folder}: {name} is {tuple(factor.shape)}, not {owned[name].shape}; give this model's adapter")
        store.host.set_weight(owned[name], factor)
    for block in range(len(store.plan.workload.blocks)):
        store.host.settle(block)
