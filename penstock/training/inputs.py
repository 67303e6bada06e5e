"""Inputs of a run, read and validated before anything is allocated: model, weights, data and prompts."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from penstock.caches import cache_folder
from penstock.checkpoint.checkpoint import State, identity, refuse_another_base
from penstock.checkpoint.conversion import scoring_config
from penstock.checkpoint.model_files import (
    GENERATION_FILE,
    has_weights,
    kept_files,
    refuse_quantised,
    towers_bytes,
    weights_digest,
    with_ends,
)
from penstock.data.chat import MARKS
from penstock.data.data import DataRequest, Report, RunData, learned_ends, read_data, reader_of
from penstock.data.files import HELD_OUT, TRAIN
from penstock.data.sampling import MapStyleData, order_of
from penstock.data.tokenizer import ModelTokenizer, read_template, read_tokenizer
from penstock.model_checks.document_isolation import supports_documents
from penstock.planner.model.config import download, without_dropout
from penstock.planner.model.workload import read_model
from penstock.run_config import RunConfigError, RunRequest
from penstock.runtime.compute.losses import LossFunction
from penstock.runtime.errors import DataError, PlanError
from penstock.runtime.layers.meta_models import difference
from penstock.runtime.plan import Plan
from penstock.runtime.plan.optimizer import RULES, AdamW, RateGroup
from penstock.runtime.plan.workload import has_towers
from penstock.runtime.units import on_one_line
from penstock.settings import ADAPTERS_LR, RunSettings
from penstock.vision.stored_outputs import attach_images

from .device import refuse_what_does_not_fit

TOWERS_FOLDER = "towers"  # features of images, reused by later runs
TOKENS_FOLDER = "tokens"  # tokenised data, reused by later runs
BASE_FORMAT = 1  # version of the file of frozen weights on disk


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for samples, as text and as tokens."""

    texts: tuple[str, ...]
    ids: list[list[int]]
    tokenizer: ModelTokenizer


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Validated inputs of a run, with nothing allocated."""

    request: RunRequest  # with the defaults of the plan's optimizer
    plan: Plan  # with the configuration in the model's folder
    device: str  # cuda or cpu
    data: RunData
    folder: Path | None = None  # of the model
    weights: Path | None = None  # folder of the weights to load; None: random, or all in the checkpoint
    weights_digest: str = ""
    loss: LossFunction | None = None  # of a user
    state: State | None = None  # checkpoint to resume
    disk: Path | None = None  # file of the weights on disk
    held_out: RunData | None = None  # one sequence per batch
    prompts: Prompts | None = None
    ends: tuple[int, ...] = ()  # learned end tokens at which generation by the model's settings would not stop
    reference_sets: tuple[MapStyleData, ...] = ()  # data sets with log-probabilities in a file
    reference: Mapping[str, Any] | None = None  # of a loss, as checkpoints record it (references.py)

    @property
    def settings(self) -> RunSettings:
        return self.request.settings

    @property
    def n_steps(self) -> int:
        return steps_of(self.settings, self.data)

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Numbers of the held-out samples to evaluate: all, or a seeded sample of `evaluation.max_sequences`, in file order."""
        n, limit = 0 if self.held_out is None else self.held_out.n_steps or 0, self.settings.evaluation.max_sequences
        return tuple(range(n) if n <= limit else sorted(order_of(n, self.settings.seed)[:limit].tolist()))

    @property
    def held_out_digest(self) -> str | None:
        """Digest of the held-out samples to evaluate; None without. Evaluations on the same ones are compared."""
        if self.held_out is None:
            return None
        return hashlib.sha256(json.dumps([str(self.held_out.fingerprint), self.evaluated]).encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that a resumed run must match. A constant learning rate does not depend on the number of steps."""
        optimizer, frozen = self.settings.optimizer, None if are_saved_whole(self.plan) else self.weights_digest
        horizon = self.n_steps if optimizer.schedule.kind != "constant" else None
        fields = asdict(optimizer) | {"no_decay": list(optimizer.no_decay), "n_steps": horizon}
        fields |= {"groups": list(groups)} if (groups := fields.pop("groups")) else {}
        return identity(self.plan, self.data, self.settings.seed, fields, frozen)

    @property
    def folder_config(self) -> dict[str, Any]:
        """Configuration in the model's folder. It differs from the plan's by dropout that the plan leaves off."""
        return self.plan.model.config if self.folder is None else read_model(str(self.folder)).config

    @property
    def saved_config(self) -> dict[str, Any]:
        """Configuration for checkpoints, with the fields of a task head."""
        config, n = self.folder_config, self.plan.semantics.objective.n_labels
        pad_id = self.data.parts[0].shape.pad_id if isinstance(self.data, MapStyleData) else config.get("pad_token_id")
        return config | ({} if n is None else scoring_config(config, n, pad_id))

    @property
    def tokenizer_from(self) -> Path | None:
        """Folder of the tokenizer. None: bytes."""
        return tokenizer_folder(self.settings, self.folder)

    @property
    def kept_files(self) -> dict[str, Path]:
        """Files to copy into checkpoints, by name."""
        if self.tokenizer_from is None or self.folder is None:
            return {}
        return kept_files(self.folder, None if self.tokenizer_from == self.folder else self.tokenizer_from)

    @property
    def chat_template(self) -> str | None:
        """The user's template, to write into checkpoints, without marks of learned answers, which only transformers reads."""
        name = self.settings.data.chat_template
        text, is_file = ("", False) if name is None else read_template(name)
        return MARKS.sub(r"{#\1\2#}", text) if is_file else None

    @property
    def towers_from(self) -> Path | None:
        """Folder of a vision-language model, with the towers to copy into checkpoints."""
        return self.weights if has_towers(self.plan.model.config) and self.plan.semantics.train.lora is None else None

    @property
    def checkpoint_bytes(self) -> int:
        n_bytes = self.plan.checkpoint_bytes(self.settings.checkpoint.weights_only)
        with_projector = not self.plan.semantics.train.projector
        return n_bytes + (0 if self.towers_from is None else towers_bytes(self.towers_from, self.plan.model.config, with_projector))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the inputs that every rank reads, by name."""
        return {"data": str(self.data.fingerprint)} | ({} if self.weights is None else {"weights": self.weights_digest})


def read_inputs(
    request: RunRequest, device: str, loss: LossFunction | None, state: State | None = None, n_here: int = 1, leads: bool = True
) -> RunInputs:
    """Read and validate the inputs of a run, cheap checks first. `n_here`: ranks of this host. `leads`: False on the other ranks,
    which read no held-out data and leave checks of their own to rank 0."""
    request = with_defaults(request)
    settings, report = request.settings, request.report
    if settings.tower is not None and Path(settings.tower).is_file():
        raise PlanError(f"{settings.tower}: is a file; name a folder for the features of images")
    plan, folder = plan_of_folder(request.file.plan, settings.model)
    weights = weights_of(settings, plan, folder, state)
    digest = f"random, by seed {settings.seed}" if weights is None else weights_digest(weights)
    if leads:
        if state is None and settings.adapter is not None:
            refuse_another_base(Path(settings.adapter), lambda: digest)
        refuse_what_does_not_fit(plan, device, settings.device, n_here)
    disk = file_on_disk(settings, plan, digest)
    report("reading the data")
    data = request.batches or read_data(data_request(settings, plan, folder, rows=request.rows), report)
    held_out = request.held_out or held_out_of(settings, plan, folder, report) if leads else None
    return RunInputs(request, plan, device, data, folder, weights, digest, loss, state, disk, held_out)


def with_defaults(request: RunRequest) -> RunRequest:
    """Return the request with learning rate and beta2. Defaults depend on the optimizer, and on adapters or full training."""
    optimizer, plan = request.settings.optimizer, request.file.plan
    rule = RULES[plan.semantics.optimizer.rule]
    if not rule.has_eps and optimizer.eps != AdamW().eps:
        raise RunConfigError(f"optimizer.eps: the plan's optimizer is {rule.name}, which has none; leave it out")
    usual = (AdamW().lr if plan.semantics.train.lora is None else ADAPTERS_LR) * rule.lr_fraction
    beta2 = optimizer.beta2 if optimizer.beta2 is not None else rule.beta2
    names = [p.name for block in plan.workload.blocks for p in block.parameters]
    for part in optimizer.no_decay:
        if not any(part in name for name in names):
            raise RunConfigError(f"optimizer.no_decay: no parameter's name holds {part[:60]!r}; names are for example {names[1]}")
    lr = optimizer.lr or usual
    optimizer = replace(optimizer, lr=lr, beta2=beta2, groups=_rate_groups(optimizer.groups, lr, plan))
    return replace(request, settings=replace(request.settings, optimizer=optimizer))


def _rate_groups(groups: Iterable[RateGroup], lr: float, plan: Plan) -> tuple[RateGroup, ...]:
    """Return the groups with rates in place of factors. RunConfigError for a group without a trained parameter."""
    names = [p.name for block in plan.workload.blocks for p in block.trained if p.tied_to is None]
    remaining, resolved = names, list[RateGroup]()
    for group in groups:
        place = f"optimizer.groups: {group.pattern[:60]!r}"
        if (group.lr is not None and group.lr_factor is not None) or group == RateGroup(group.pattern):
            raise RunConfigError(f"{place}: give lr or lr_factor, weight_decay, or both")
        n_before, remaining = len(remaining), [name for name in remaining if not fnmatchcase(name, group.pattern)]
        if len(remaining) == n_before:
            if any(fnmatchcase(name, group.pattern) for name in names):
                raise RunConfigError(f"{place}: earlier patterns match all its parameters, and the first applies; put it first")
            problem = "matches no trained parameter's name (a tied weight has that of the embedding)"
            raise RunConfigError(f"{place}: {problem}; write for example '*norm*': names are for example {names[len(names) // 2]}")
        resolved.append(replace(group, lr=group.lr if group.lr_factor is None else lr * group.lr_factor, lr_factor=None))
    return tuple(resolved)


def steps_of(settings: RunSettings, data: RunData) -> int:
    """Return the number of steps of the whole run."""
    if settings.steps is not None:
        return settings.steps
    if not isinstance(data, MapStyleData):
        raise RunConfigError("the length of streamed data is unknown: give --steps")
    passes = Fraction(str(settings.epochs or 1))  # exact: 0.1 of 30 is 3
    n_steps = passes * (data.n_steps if data.by_epoch else Fraction(data.n_sequences, data.samples_per_step))
    return max(1, math.ceil(n_steps))


def repeated_samples(settings: RunSettings, data: RunData) -> int:
    """Return the samples of the last step beyond the whole passes that the settings name."""
    if settings.steps is not None or not isinstance(data, MapStyleData):
        return 0
    n_samples = math.ceil(settings.epochs or 1) * data.n_sequences
    return max(0, steps_of(settings, data) * data.samples_per_step - n_samples)


def plan_of_folder(plan: Plan, path: str | None) -> tuple[Plan, Path | None]:
    """Return the plan with the configuration in the model's folder, and that folder; None if plan and settings name none."""
    folder = Path(path) if path is not None else Path(plan.model.path) if plan.model.path is not None else None
    if folder is None:
        return plan, None
    if not folder.is_dir():
        raise PlanError(f"{folder}: the model's folder is not there; name it with --model")
    model = read_model(str(folder))
    if (mismatch := difference(model.config, plan.model.config)) is not None:
        model = without_dropout(model)  # planned with --no-dropout
    if mismatch is not None and difference(model.config, plan.model.config) is not None:
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


def file_on_disk(settings: RunSettings, plan: Plan, weights: str) -> Path | None:
    """Return the file for weights that the plan reads from disk, named by a hash of `weights` and the layout; None without."""
    if not (blocks := plan.policy.disk_blocks):
        return None
    if settings.disk is None:
        raise RunConfigError("the plan reads frozen weights from a disk: name a folder there with --disk")
    semantics, item = plan.semantics, [(b, sorted(plan.frozen_on_host(b)[0].items())) for b in blocks]
    key = json.dumps([BASE_FORMAT, weights, plan.model.config, semantics.base, semantics.compute_dtype, item])
    return Path(settings.disk) / f"frozen-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def tokenizer_folder(settings: RunSettings, folder: Path | None) -> Path | None:
    """Return the folder of the tokenizer: the adapter's, if it has one, or the model's. None: bytes."""
    if settings.tokenizer == "bytes":
        return None
    return Path(settings.adapter) if settings.adapter and (Path(settings.adapter) / "tokenizer.json").is_file() else folder


def with_ends_of_answers(inputs: RunInputs) -> tuple[RunInputs, str | None]:
    """Return the inputs with the learned end tokens that generation lacks, and a line on them."""
    if inputs.tokenizer_from is None or inputs.plan.semantics.objective.n_labels is not None:
        return inputs, None
    tokenizer = read_tokenizer(inputs.tokenizer_from)
    ends, _ = with_ends(inputs.kept_files, inputs.plan.model.config, learned_ends(inputs.data, tokenizer))
    if not ends:
        return inputs, None
    words = " and ".join(on_one_line(repr(tokenizer.library.convert_ids_to_tokens(end)), 40) for end in ends)
    added = f"{words} ends learned answers, and is added to eos_token_id in the checkpoints' {GENERATION_FILE}"
    return replace(inputs, ends=tuple(ends)), f"{added}: the model's own would not stop there"


def data_request(
    settings: RunSettings, plan: Plan, folder: Path | None, held_out: bool = False, rows: Iterable[Any] | None = None
) -> DataRequest:
    """Return a request for training data, or for sequences to evaluate. `rows`: of a program, instead of files."""
    semantics, rows_each = plan.semantics, plan.semantics.objective.rows_each
    if settings.tokenizer == "model" and folder is None:
        raise RunConfigError("no tokenizer: name the model's folder with --model, or train on bytes with --tokenizer bytes")
    return DataRequest(
        settings.data,
        tokenizer_folder(settings, folder),
        plan.workload.blocks[0].parameters[0].shape[0],
        semantics.seq_len,
        rows_each if held_out else semantics.all_ranks.batch_size,
        settings.seed,
        tokens_folder(Path(settings.out)),
        by_document=supports_documents(plan.model.config, semantics) is None,
        preferred=HELD_OUT if held_out else TRAIN,
        run=Path(settings.out),
        objective=semantics.objective,
        rows=rows,
        vision=None if settings.tokenizer == "bytes" else folder,
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


def attach_stored(inputs: RunInputs) -> int:
    """Attach the features of images to training and held-out data, after computing those that are not stored. Return the number of
    images. PlanError if nothing trains a projector, or if the settings name a folder of features and there are no images."""
    settings, request, data = inputs.settings, inputs.request, inputs.data
    has_images = isinstance(data, MapStyleData) and any(part.documents.has_images for part in data.parts)
    if inputs.plan.semantics.train.projector and settings.data.streaming:
        raise PlanError("--streaming: images, which a trained projector needs, are not streamed; leave it out")
    if inputs.plan.semantics.train.projector and not has_images:
        raise PlanError(f"--train {inputs.plan.semantics.train}: the data has no images to train a projector; plan without it")
    sets = [data for data in (inputs.data, inputs.held_out) if isinstance(data, MapStyleData)]
    where = settings.tower, tokens_folder(Path(settings.out)).with_name(TOWERS_FOLDER)
    n_images = attach_images(sets, inputs.plan, inputs.folder, where, inputs.device, request.report, request.stop)
    if settings.tower is not None and not n_images:
        raise PlanError("--tower: the data has no images; leave it out")
    return n_images


def held_out_of(settings: RunSettings, plan: Plan, folder: Path | None, report: Report) -> RunData | None:
    """Return the evaluation data in file order, read with the settings of the first training set."""
    path, split = settings.evaluation.data, settings.evaluation.split
    if path is None:
        return None
    held_out_settings = replace(settings.data.parts[0], path=path, split=split, shuffle=False, streaming=False)
    report("reading the held-out data")
    return read_data(data_request(replace(settings, data=held_out_settings), plan, folder, held_out=True), report)


def prompts_of(settings: RunSettings, plan: Plan, folder: Path | None, request: RunRequest | None = None) -> Prompts | None:
    """Return the prompts in the settings: user turns if the model is trained on conversations, otherwise text to continue."""
    texts = settings.evaluation.prompts
    if not texts:
        return None
    rows, has_batches = (None, False) if request is None else (request.rows, request.batches is not None)
    data = data_request(settings, plan, folder, rows=rows)
    tokenizer = read_tokenizer(data.model_folder, settings.data.chat_template)
    readers = [] if has_batches else [reader_of(data, part, tokenizer) for part in settings.data.parts]
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
