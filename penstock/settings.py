"""Settings of a training run, apart from its plan, with their defaults and flags.

`run_config.py` reads them from a YAML or TOML file and from flags; `cli/options.py` generates the flags and their help from them.
"""
# ruff: noqa: RUF009 (`flagged` returns a field, like `field`)

import tomllib
from collections.abc import Iterator
from dataclasses import Field as DataclassField
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from penstock.runtime.plan.optimizer import Above0, AdamW, AtLeast0, Beta, RateGroup, Text
from penstock.runtime.plan.workload import Count, Natural

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag of a setting, with the parts of `--help` that do not follow from the setting's type and default."""

    name: str
    help: str
    default: str | None = None
    metavar: str | None = None
    repeats: bool = False


def flagged(default: Value, *arguments: Any, **options: Any) -> Value:
    """Declare a setting with this default, and a `Flag` with these arguments."""
    return field(default=default, metadata={"flag": Flag(*arguments, **options)})


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return tomllib.loads(resources.files("penstock").joinpath(name).read_text("utf-8"))


# Not strict: numbers may be text, from a flag or from YAML 1.1, which reads `1e-5` as text.
LENIENT = ConfigDict(extra="forbid", allow_inf_nan=False)

ADAPTERS_LR = 1e-4  # LoRA; QLoRA (arXiv 2305.14314) uses it for 33B and 65B, and 2e-4 for 7B and 13B
Fraction = Annotated[float, Field(ge=0, le=1)]
_Rows = Literal["preference", "unpaired-preference", "rollouts", "labelled"]  # formats required by losses
Metric = Literal["loss", "perplexity", "divergence", "accuracy"]  # of evaluations
Format = Literal["auto", "tokens", "text", "messages", "alpaca", "sharegpt", "prompt-completion", "question-answer", _Rows]


@dataclass(frozen=True, slots=True)
class DataPart:
    """One of several data sets. None: the value of `data`."""

    path: Text
    weight: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the samples; None for all sets: each sample once an epoch
    format: Format | None = None
    split: Text | None = None
    columns: dict[Text, Text] | None = None
    images: Text | None = None
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Training data, and its packing into sequences."""

    path: Text | None = flagged(
        None,
        "--data",
        "A folder of files, or one file: text, JSONL, JSON, CSV or Parquet; for several, give the share of each.",
        metavar="PATH[:WEIGHT]",
        repeats=True,
    )  # None: `mix` names the data
    format: Format = flagged("auto", "--format", "Format of a row.", "by its columns")
    mix: tuple[DataPart, ...] = ()  # several sets, read and packed separately
    split: Text | None = flagged(None, "--split", "Splits of a folder with names that begin so.", "train, if it has splits")
    columns: dict[Text, Text] | None = flagged(
        None, "--columns", "Name of a column in the file, as prompt=question.", metavar="NAME=COLUMN", repeats=True
    )
    # joined: documents are concatenated and cut, and attention crosses them; documents: packed whole, isolated in attention;
    # one: one padded document per sequence; auto: joined for text, documents for chats if the model supports isolation
    bad_rows: Fraction = flagged(0.0, "--bad-rows", "Share of invalid rows, as 1%, that are left out.", "0: stop", "SHARE")
    packing: Literal["auto", "joined", "documents", "one"] = flagged(
        "auto", "--packing", "Packing of documents: joined and cut, whole and isolated, or one per sequence."
    )
    too_long: Literal["cut", "split", "skip", "refuse"] = "cut"  # a document longer than a sequence; `joined` always splits
    unsupervised: Literal["refuse", "skip"] = "skip"  # a sample without a supervised token; skipped ones are counted
    shuffle: bool = True  # random order of sequences, different in each epoch
    seed: Natural | None = None  # of the order; None: the run's
    # transformers: the order of its Trainer for a set of one document per sequence; the last batch of an epoch may be smaller
    sampler: Literal["penstock", "transformers"] = "penstock"
    chat_template: Text | None = flagged(
        None, "--chat-template", "File of a chat template, or one of Penstock's: qwen3.", "the model's own", "FILE|NAME"
    )
    images: Text | None = flagged(None, "--images", "Folder of the images that rows name.", "the data's folder", "FOLDER")
    max_row_seconds: Above0 = flagged(10.0, "--max-row-seconds", "Longest time of a chat template for a row.")
    max_row_mb: Count = flagged(64, "--max-row-mb", "Largest row of a table, or text of a chat template, in megabytes.")
    streaming: bool = flagged(False, "--streaming", "Read data as it is needed; give --steps.")
    shuffle_buffer: Count = 10_000  # samples, when streaming
    __pydantic_config__ = LENIENT

    @property
    def parts(self) -> tuple["DataSettings", ...]:
        """Settings of each data set."""
        overrides = [{k: v for k, v in asdict(part).items() if k != "weight" and v is not None} for part in self.mix]
        return tuple(replace(self, mix=(), **fields) for fields in overrides) or (self,)


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Learning-rate schedule, in optimizer steps."""

    kind: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = flagged(
        "constant", "--schedule", "Learning rate after the warm-up."
    )
    warmup_steps: Natural = flagged(0, "--warmup-steps", "Steps of linear warm-up.")
    decay_steps: Natural | None = None  # for warmup-stable-decay; None: a tenth of the run
    min_lr_fraction: Fraction = 0.0  # final rate of cosine and warmup-stable-decay, as a fraction of `lr`
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class OptimizerSettings(AdamW):
    """Hyperparameters and schedule of the plan's optimizer."""

    lr: Above0 | None = flagged(None, "--lr", "Learning rate.", "1e-05; adapters: 0.0001; Lion: 0.3 of it")  # type: ignore[assignment]
    beta2: Beta | None = None  # type: ignore[assignment]  # None: 0.999; Lion: 0.99
    weight_decay: AtLeast0 = flagged(0.0, "--weight-decay", "Weight decay of matrices.")
    groups: tuple[RateGroup, ...] = flagged(
        (), "--lr-group", "Learning rate by name: '*norm*=1e-5', or '*norm*=0.1x,decay=0'.", metavar="PATTERN=RATE", repeats=True
    )
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Times and retention of checkpoints."""

    every: Count | None = flagged(None, "--save-every", "Steps between checkpoints.", "by time, and at the end")
    keep: Count | None = flagged(None, "--keep", "Keep only the last N checkpoints.", "all", "N")
    background: bool = True  # write during training
    copy_bytes: Natural | None = None  # host memory for copy-on-write of blocks; None: half of the memory that the plan leaves free
    minutes: AtLeast0 = flagged(60.0, "--save-minutes", "Longest time between checkpoints; 0: no limit.")
    weights_only: bool = flagged(
        False, "--weights-only", "Save the model alone, 2 bytes a parameter, without the state to resume from."
    )
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Held-out loss and generated samples during training."""

    data: Text | None = flagged(None, "--eval-data", "Held-out data, for its loss and perplexity.", metavar="PATH")
    every: Count | None = flagged(None, "--eval-every", "Steps between evaluations.", "only at the end")
    split: Text | None = None  # split of a folder; None: those that begin with val, dev, eval or test
    max_sequences: Count = 256
    prompts: tuple[Text, ...] = flagged((), "--prompt", "Generate from this prompt at each evaluation.", repeats=True)
    max_new_tokens: Count = 64
    first: bool = True  # evaluate before the first step too
    base: bool = flagged(False, "--eval-base", "Evaluate the base model without its adapter, too.")
    best: Metric | None = flagged(None, "--best", "Also keep the checkpoint with the best evaluation by this metric.")
    patience: Count | None = flagged(
        None, "--patience", "End the run after N evaluations without a gain in --best (or in the loss).", "never", "N"
    )
    min_gain: AtLeast0 = flagged(0.0, "--min-gain", "Smaller gains do not count for --patience.")
    __pydantic_config__ = LENIENT

    @property
    def metric(self) -> Metric | None:
        """Metric of the best checkpoint; None: none is kept."""
        return self.best or ("loss" if self.patience is not None else None)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a training run, apart from its plan."""

    data: DataSettings
    plan: Text | None = None
    model: Text | None = flagged(None, "--model", "Folder with weights and tokenizer.", "the plan's model", "FOLDER")
    from_scratch: bool = flagged(False, "--from-scratch", "Start from random weights instead of a checkpoint.")
    adapter: Text | None = flagged(
        None, "--adapter", "Folder of a LoRA adapter in PEFT's format to continue from.", "a new one", "FOLDER"
    )
    tower: Text | None = flagged(None, "--tower", "Folder of image features, shared by runs.", "in the cache", "FOLDER")
    packed: Text | None = flagged(
        None, "--packed", "Cache folder for quantized base weights, shared by runs.", "in --out", "FOLDER"
    )
    disk: Text | None = flagged(
        None,
        "--disk",
        "Folder for the file of frozen weights that a plan reads from a disk; kept for other runs.",
        metavar="FOLDER",
    )
    reference: Text | None = flagged(
        None,
        "--reference",
        "Reference of a loss: the run's first model, with --adapter; the model alone; or a file of `penstock forward`.",
        "start",
        "start|base|FILE",
    )
    loss: Text | None = flagged(None, "--loss", "The function of a plan with your own loss.", metavar="FILE.py:FUNCTION")
    tokenizer: Literal["model", "bytes"] = flagged("model", "--tokenizer", "The model's own, or UTF-8 bytes.")
    out: Text = flagged("penstock-run", "--out", "Folder of checkpoints and logs.", metavar="FOLDER")
    steps: Count | None = flagged(None, "--steps", "Total steps, including those before a resume.", "once through the data")
    epochs: Above0 | None = flagged(None, "--epochs", "Instead of --steps: passes through the data.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = flagged(0, "--seed", "Seed of random weights, dropout and the order of the data.")
    device: Literal["auto", "cuda", "cpu", "emulated"] = flagged(
        "auto",
        "--device",
        "Device for the plan: a GPU if available, else this CPU (auto), or the plan's machine, emulated on a tiny model.",
    )
    deterministic: bool = flagged(
        False,
        "--deterministic",
        "With a GPU, and a plan made with --deterministic: results that do not depend on the plan. Some kernels are slower.",
    )
    replan: Count | None = flagged(
        None,
        "--replan",
        "After N settled steps, 8 for example, search again with their measured times, during the run. A plan that promises 2 % "
        "replaces the run's at the next checkpoint, with the same results.",
        "never",
        "N",
    )
    stop_if_lost: bool = flagged(False, "--stop-if-lost", "Exit code 4: loss not finite or ten times the first, or gradients of 0.")
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    monitors: tuple[Literal["tensorboard", "wandb", "mlflow", "all", "none"], ...] = flagged(
        (), "--monitor", "Log there too; all: to those installed here.", repeats=True
    )
    __pydantic_config__ = LENIENT


def settings_of(kind: Any = RunSettings, section: str = "") -> Iterator[tuple[str, DataclassField[Any]]]:
    """Yield each setting with its dotted name (`optimizer.lr`), section by section. The metadata holds its flag, if any."""
    for setting in fields(kind):
        if is_dataclass(setting.type):
            yield from settings_of(setting.type, f"{section}{setting.name}.")
        else:
            yield section + setting.name, setting
