"""Inputs of a run: model, initial weights, training data, held-out data and prompts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from penstock.caches import cache_folder
from penstock.checkpoint.adapter_files import read_adapter
from penstock.checkpoint.checkpoint import State, put_back
from penstock.checkpoint.model_files import has_tensor, has_weights, load_weights, refuse_quantised
from penstock.checkpoint.packed_base import packed_base
from penstock.data.data import DataRequest, Report, RunData, no_report, read_data, reader_of
from penstock.data.files import HELD_OUT, TRAIN
from penstock.data.tokenizer import ModelTokenizer, read_tokenizer
from penstock.model_checks.document_isolation import supports_documents
from penstock.planner.model.config import download
from penstock.planner.model.workload import read_model
from penstock.run_config import RunConfigError
from penstock.runtime.errors import CheckpointError, DataError, PlanError
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.layers.meta_models import difference
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.train import Train, is_adapter
from penstock.runtime.plan.workload import has_towers
from penstock.settings import RunSettings

TOKENS_FOLDER = "tokens"  # tokenised data, reused by later runs
BASE_FORMAT = 1  # version of the file of frozen weights on disk
PACKED_FOLDER = "base"  # in the run's folder: packed weights, reused by later runs


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for samples, as text and as tokens."""

    texts: tuple[str, ...]
    ids: list[list[int]]
    tokenizer: ModelTokenizer


def plan_of_folder(plan: Plan, path: str | None) -> tuple[Plan, Path | None]:
    """Return the plan with the configuration in the model's folder, and that folder. None if neither plan nor settings name a
    folder."""
    folder = Path(path) if path is not None else Path(plan.model.path) if plan.model.path is not None else None
    if folder is None:
        return plan, None
    if not folder.is_dir():
        raise PlanError(f"{folder}: the model's folder is not there; name it with --model")
    model = read_model(str(folder))
    if (mismatch := difference(model.config, plan.model.config)) is not None:
        raise PlanError(f"{folder}: another model than the plan's: {mismatch}; plan again with this model")
    return replace(plan, model=replace(model, name=plan.model.name)), folder


def weights_of(settings: RunSettings, plan: Plan, folder: Path | None, state: State | None) -> Path | None:
    """Return the folder of the weights to load; None for random weights, or if the resumed checkpoint holds all weights. PlanError
    if weights are missing, CheckpointError if they cannot be read."""
    sees = has_towers(plan.model.config)
    if settings.from_scratch and sees:
        raise PlanError("--from-scratch: this model's vision tower has no random weights here; leave it out, and give its folder")
    if settings.from_scratch or (state is not None and are_saved_whole(plan)):
        return None
    if folder is None or not has_weights(folder):
        where = f"{folder}: holds no weights" if folder is not None else "the plan names no folder of weights"
        raise PlanError(f"{where}; train random weights with --from-scratch, or name one with --model{download(plan.model)}")
    if plan.semantics.base == "bf16":  # other bases are read by `packed_base.py`
        names = {p.name for block in plan.workload.blocks for p in block.parameters}
        refuse_quantised(folder, plan.model.config, names, dequantises=not sees)
    return folder


def are_saved_whole(plan: Plan) -> bool:
    """True if checkpoints hold all weights needed to resume. Vision towers are loaded from the model's folder."""
    return plan.workload.trains_all and not has_towers(plan.model.config)


def fill(
    store: TorchMachine, settings: RunSettings, data: RunData, weights: Path | None, state: State | None, report: Report = no_report
) -> None:
    """Load the initial state: weights from the folder `weights` (random for None), and the state of a checkpoint, which holds all
    trained weights."""
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
        put_back(state, store.host, data)
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
    shapes = {name: tuple(buffer.shape) for name, buffer in templates.constants().items()}
    if shapes and folder is not None:
        for name, value in load_weights(folder, store.plan.model.config, shapes, shapes):
            templates.set_constant(name, value)
    store.host.constants = templates.constants()


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


def file_on_disk(settings: RunSettings, plan: Plan, weights: str) -> Path | None:
    """Return the file for weights that the plan reads from disk. Its name is a hash of `weights` and the layout. None if all
    weights are in memory."""
    if not (blocks := plan.policy.disk_blocks):
        return None
    if settings.disk is None:
        raise RunConfigError("the plan reads frozen weights from a disk: name a folder there with --disk")
    semantics, item = plan.semantics, [(b, sorted(plan.frozen_on_host(b)[0].items())) for b in blocks]
    key = json.dumps([BASE_FORMAT, weights, plan.model.config, semantics.base, semantics.compute_dtype, item])
    return Path(settings.disk) / f"frozen-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def data_of(settings: RunSettings, plan: Plan, folder: Path | None, held_out: bool = False, report: Report = no_report) -> RunData:
    """Return the training batches, or with `held_out` the sequences for evaluation."""
    return read_data(data_request(settings, plan, folder, held_out), report)


def data_request(settings: RunSettings, plan: Plan, folder: Path | None, held_out: bool = False) -> DataRequest:
    """Return a request for the training data, or with `held_out` for sequences for evaluation."""
    semantics, rows_each = plan.semantics, plan.semantics.objective.rows_each
    return DataRequest(
        settings.data,
        _tokenizer_folder(settings, folder),
        plan.workload.blocks[0].parameters[0].shape[0],
        semantics.seq_len,
        rows_each if held_out else semantics.all_ranks.batch_size,
        settings.seed,
        tokens_folder(Path(settings.out)),
        by_document=supports_documents(plan.model.config, semantics) is None,
        preferred=HELD_OUT if held_out else TRAIN,
        run=Path(settings.out),
        objective=semantics.objective,
    )


def tokens_folder(run: Path) -> Path:
    """Return the token cache of the user; of this run if it is not writable."""
    try:
        shared = cache_folder() / TOKENS_FOLDER
        shared.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=shared):
            return shared
    except (OSError, RuntimeError):  # no home folder
        return run / TOKENS_FOLDER


def held_out_of(settings: RunSettings, plan: Plan, folder: Path | None, report: Report) -> RunData | None:
    """Return the evaluation data in file order, read with the settings of the first training set."""
    path, split = settings.evaluation.data, settings.evaluation.split
    if path is None:
        return None
    held_out_settings = replace(settings.data.parts[0], path=path, split=split, shuffle=False, streaming=False)
    report("reading the held-out data")
    return data_of(replace(settings, data=held_out_settings), plan, folder, held_out=True, report=report)


def prompts_of(settings: RunSettings, plan: Plan, folder: Path | None) -> Prompts | None:
    """Return the prompts in the settings: user turns if the model is trained on conversations, otherwise text to continue."""
    texts = settings.evaluation.prompts
    if not texts:
        return None
    request = data_request(settings, plan, folder)
    tokenizer = read_tokenizer(request.model_folder)
    readers = [reader_of(request, part, tokenizer) for part in settings.data.parts]
    chats = [reader for reader in readers if not reader.is_text]
    turns = [[{"role": "user", "content": text}] for text in texts]
    ids = [chats[0].template.prompt(turn) for turn in turns] if chats else [tokenizer.encode(text) for text in texts]
    check_prompts(ids, plan.semantics.seq_len)
    return Prompts(texts, ids, tokenizer)


def check_prompts(prompts: Sequence[Sequence[int]], seq_len: int) -> None:
    """DataError for an empty prompt, or one that fills the sequence."""
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise DataError(f"prompt {number} is empty; give it some text")
        if len(prompt) >= seq_len:
            raise DataError(f"prompt {number} has {len(prompt):,} tokens, and a sequence of the plan holds {seq_len:,}; shorten it")


def _tokenizer_folder(settings: RunSettings, folder: Path | None) -> Path | None:
    """Return the folder of the tokenizer. None for the byte tokenizer."""
    if settings.tokenizer == "bytes":
        return None
    if folder is None:
        raise RunConfigError("no tokenizer: name the model's folder with --model, or train on bytes with --tokenizer bytes")
    return folder
