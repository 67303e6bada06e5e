"""What a run reads: its model and the weights it begins with, data, held-out data and prompts."""

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
from penstock.data.data import Report, RunData, read_data, reader_of, unheard
from penstock.data.files import HELD_OUT, TRAIN
from penstock.data.tokenizer import ModelTokenizer, read_tokenizer
from penstock.planner.model.config import download
from penstock.planner.model.workload import read_model
from penstock.run_config import RunConfigError
from penstock.runtime.errors import CheckpointError, DataError, PlanError
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.layers.apart import supports_documents
from penstock.runtime.layers.meta_models import difference
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan
from penstock.runtime.plan.objective import SCORE
from penstock.runtime.plan.train import Train, is_adapter
from penstock.runtime.plan.workload import has_towers
from penstock.settings import RunSettings

TOKENS_FOLDER = "tokens"  # data as the model reads it, for the next start
BASE_FORMAT = 1  # of the file of frozen weights on a disk
PACKED_FOLDER = "base"  # in the run's folder: packed weights, for the next start


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for samples, as text and as tokens."""

    texts: tuple[str, ...]
    ids: list[list[int]]
    tokenizer: ModelTokenizer


def own_model(plan: Plan, given: str | None) -> tuple[Plan, Path | None]:
    """The folder of weights and tokenizer, if one is known, and the plan with that folder's own configuration."""
    folder = Path(given) if given is not None else Path(plan.model.path) if plan.model.path is not None else None
    if folder is None:
        return plan, None
    if not folder.is_dir():
        raise PlanError(f"{folder}: the model's folder is not there; name it with --model")
    found = read_model(str(folder))
    if (what := difference(found.config, plan.model.config)) is not None:
        raise PlanError(f"{folder}: another model than the plan's: {what}; plan again with this model")
    return replace(plan, model=replace(found, name=plan.model.name)), folder


def weights_of(settings: RunSettings, plan: Plan, folder: Path | None, state: State | None) -> Path | None:
    """The folder of the weights that a run loads; None where they are random, or all in the checkpoint that it resumes. PlanError
    where there are none, CheckpointError for those that cannot be read."""
    sees = has_towers(plan.model.config)
    if settings.from_scratch and sees:
        raise PlanError("--from-scratch: this model's vision tower has no random weights here; leave it out, and give its folder")
    if settings.from_scratch or (state is not None and are_saved_whole(plan)):
        return None
    if folder is None or not has_weights(folder):
        where = f"{folder}: holds no weights" if folder is not None else "the plan names no folder of weights"
        raise PlanError(f"{where}; train random weights with --from-scratch, or name one with --model{download(plan.model)}")
    if plan.semantics.base == "bf16":  # else `packed_base.py` reads them
        names = {p.name for block in plan.workload.blocks for p in block.parameters}
        refuse_quantised(folder, plan.model.config, names, dequantises=not sees)
    return folder


def are_saved_whole(plan: Plan) -> bool:
    """Whether checkpoints hold all weights that a run resumes from: those of towers it takes from the model's folder."""
    return plan.workload.trains_all and not has_towers(plan.model.config)


def fill(
    store: TorchMachine, settings: RunSettings, data: RunData, weights: Path | None, state: State | None, report: Report = unheard
) -> None:
    """Put into the store what the run begins with: the model's weights in `weights`, random ones where that is None, and the state
    of a checkpoint, which has all weights that are trained."""
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


def load_model(store: TorchMachine, folder: Path, cache: Path, report: Report = unheard, seed: int = 0) -> None:
    """Put a Hugging Face model's weights into the store, one tensor at a time; those that are stored packed are packed once, into
    `cache`. Adapters stay as they are. A head of the run's own that the folder has none of is random, by `seed`."""
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
    """Put what a model's folder holds of layers though it is no weight into the store; None: what it is at first stays."""
    templates = store.compute.templates
    shapes = {name: tuple(buffer.shape) for name, buffer in templates.constants().items()}
    if shapes and folder is not None:
        for name, value in load_weights(folder, store.plan.model.config, shapes, shapes):
            templates.set_constant(name, value)
    store.host.constants = templates.constants()


def load_adapter(store: TorchMachine, folder: Path) -> None:
    """Put an adapter, as PEFT saves it, into the store; CheckpointError where it is not the plan's, or of another base."""
    planned = store.plan.semantics.train.lora
    owned = {p.name: p for p in store.host.all_owned()}
    lora, factors = read_adapter(folder, {name: p.shape for name, p in owned.items() if not is_adapter(name)})
    if planned is None:
        raise CheckpointError(f"{folder}: an adapter, but the plan trains none; plan with --train {Train(lora=lora)}")
    alike = replace(lora, dropout=planned.dropout) == replace(planned, targets=lora.targets)
    if not alike or factors.keys() - {SCORE} != {name for name in owned if is_adapter(name)}:
        raise CheckpointError(f"{folder}: another adapter than the plan's; plan with --train {Train(lora=lora)}")
    for name, factor in factors.items():
        if factor.shape != owned[name].shape:
            raise CheckpointError(f"{folder}: {name} is {tuple(factor.shape)}, not {owned[name].shape}; give this model's adapter")
        store.host.set_weight(owned[name], factor)
    for block in range(len(store.plan.workload.blocks)):
        store.host.settle(block)


def file_on_disk(settings: RunSettings, plan: Plan, weights: str) -> Path | None:
    """The file of what the plan reads from a disk, by what it depends on: these weights, in words, and how it is laid out; None
    where all is in memory."""
    if not (blocks := plan.policy.disk_blocks):
        return None
    if settings.disk is None:
        raise RunConfigError("the plan reads frozen weights from a disk: name a folder there with --disk")
    of, item = plan.semantics, [(b, sorted(plan.frozen_on_host(b)[0].items())) for b in blocks]
    key = json.dumps([BASE_FORMAT, weights, plan.model.config, of.base, of.compute_dtype, item])
    return Path(settings.disk) / f"frozen-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def data_of(settings: RunSettings, plan: Plan, folder: Path | None, held_out: bool = False, report: Report = unheard) -> RunData:
    """The batches to train on, or of `held_out` data the sequences to evaluate on."""
    semantics, rows_each = plan.semantics, plan.semantics.objective.rows_each
    return read_data(
        settings.data,
        _tokenizer_folder(settings, folder),
        _vocab_size(plan),
        semantics.seq_len,
        rows_each if held_out else semantics.all_ranks.batch_size,
        settings.seed,
        tokens_folder(Path(settings.out)),
        by_document=supports_documents(plan.model.config, semantics) is None,
        preferred=HELD_OUT if held_out else TRAIN,
        report=report,
        run=Path(settings.out),
        objective=semantics.objective,
    )


def tokens_folder(run: Path) -> Path:
    """The folder in which all runs of a user keep tokens; that of this run where it cannot be written."""
    try:
        shared = cache_folder() / TOKENS_FOLDER
        shared.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=shared):
            return shared
    except (OSError, RuntimeError):  # of a user without a home
        return run / TOKENS_FOLDER


def held_out_of(settings: RunSettings, plan: Plan, folder: Path | None, report: Report) -> RunData | None:
    """The data to evaluate on, in its own order, read with the settings of the first training set."""
    path, split = settings.evaluation.data, settings.evaluation.split
    if path is None:
        return None
    of = replace(settings.data.parts[0], path=path, split=split, shuffle=False, streaming=False)
    report("reading the held-out data")
    return data_of(replace(settings, data=of), plan, folder, held_out=True, report=report)


def prompts_of(settings: RunSettings, plan: Plan, folder: Path | None) -> Prompts | None:
    """The prompts of the settings: turns of a user where the model is trained on conversations, text to continue where on text."""
    texts = settings.evaluation.prompts
    if not texts:
        return None
    tokenizer = read_tokenizer(_tokenizer_folder(settings, folder))
    of = tokenizer, _vocab_size(plan), Path(settings.out)
    readers = [reader_of(part, *of, objective=plan.semantics.objective) for part in settings.data.parts]
    chats = [reader for reader in readers if not reader.is_text]
    turns = [[{"role": "user", "content": text}] for text in texts]
    ids = [chats[0].template.prompt(turn) for turn in turns] if chats else [tokenizer.encode(text) for text in texts]
    check_prompts(ids, plan.semantics.seq_len)
    return Prompts(texts, ids, tokenizer)


def check_prompts(prompts: Sequence[Sequence[int]], seq_len: int) -> None:
    """DataError for a prompt without tokens, or without room for another in a sequence."""
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise DataError(f"prompt {number} is empty; give it some text")
        if len(prompt) >= seq_len:
            raise DataError(f"prompt {number} has {len(prompt):,} tokens, and a sequence of the plan holds {seq_len:,}; shorten it")


def _tokenizer_folder(settings: RunSettings, folder: Path | None) -> Path | None:
    """The folder of the tokenizer; None: bytes, as the settings say."""
    if settings.tokenizer == "bytes":
        return None
    if folder is None:
        raise RunConfigError("no tokenizer: name the model's folder with --model, or train on bytes with --tokenizer bytes")
    return folder


def _vocab_size(plan: Plan) -> int:
    return plan.workload.blocks[0].parameters[0].shape[0]
