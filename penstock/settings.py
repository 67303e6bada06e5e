"""Settings of a training run: everything but its plan, each with its default and, where it has one, its flag.

`run_config.py` reads them from a YAML or TOML file and from flags; `cli/options.py` makes the flags and their help of them.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field

from runtime.plan.optimizer import Above0, AdamW, AtLeast0, Text
from runtime.plan.workload import Count, Natural


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line flag of a setting, and what `--help` cannot read off the setting's type and default."""

    name: str
    help: str
    default: str | None = None
    metavar: str | None = None
    repeats: bool = False


# Lenient, so that the text of a flag, and a number as YAML 1.1 reads it (`1e-5` is text there), are taken for what they say.
LENIENT = ConfigDict(extra="forbid", allow_inf_nan=False)

Fraction = Annotated[float, Field(ge=0, le=1)]
Format = Literal["auto", "text", "messages", "alpaca", "sharegpt", "prompt-completion", "question-answer"]


@dataclass(frozen=True, slots=True)
class DataPart:
    """One of several data sets. None: as `data` has it."""

    path: Text
    weight: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the samples; None for all sets: each sample once an epoch
    format: Format | None = None
    split: Text | None = None
    columns: dict[Text, Text] | None = None
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Training data, and how sequences are made of it."""

    path: Annotated[
        Text | None,
        Flag(
            "--data",
            "A folder of files, or one file: text, JSONL, JSON, CSV or Parquet; of several, each with its share of the samples.",
            metavar="PATH[:WEIGHT]",
            repeats=True,
        ),
    ] = None  # None: `mix` names the data
    format: Annotated[Format, Flag("--format", "What a row holds.", "by its columns")] = "auto"
    mix: tuple[DataPart, ...] = ()  # several sets, each read and packed by itself
    split: Annotated[
        Text | None, Flag("--split", "Of a folder's splits, those that begin so.", "train, where there are splits")
    ] = None
    columns: Annotated[
        dict[Text, Text] | None,
        Flag("--columns", "The file's name of a column, as prompt=question.", metavar="NAME=COLUMN", repeats=True),
    ] = None
    # joined: cut from one long row of tokens, attention sees across documents; documents: packed whole, each attends to itself
    # alone; one: a sequence each, padded; auto: joined for text, documents for chats where attention can be kept apart
    packing: Annotated[
        Literal["auto", "joined", "documents", "one"],
        Flag("--packing", "How documents share a sequence: joined and cut, whole and each by itself, or one in each."),
    ] = "auto"
    too_long: Literal["cut", "split", "skip", "refuse"] = "cut"  # a document longer than a sequence; `joined` always splits
    unsupervised: Literal["refuse", "skip"] = "skip"  # a sample without a supervised token; skipped ones are counted
    shuffle: bool = True  # the order of sequences, another in each epoch
    streaming: Annotated[bool, Flag("--streaming", "Read data as it is needed; give --steps.")] = False
    shuffle_buffer: Count = 10_000  # samples, when streaming
    workers: Annotated[Natural, Flag("--workers", "Batches that a thread prepares ahead.")] = 0
    __pydantic_config__ = LENIENT

    @property
    def parts(self) -> tuple["DataSettings", ...]:
        """Each data set with settings of its own."""
        own = [{k: v for k, v in asdict(part).items() if k != "weight" and v is not None} for part in self.mix]
        return tuple(replace(self, mix=(), **fields) for fields in own) or (self,)


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Learning-rate schedule, in optimizer steps."""

    kind: Annotated[
        Literal["constant", "linear", "cosine", "warmup-stable-decay"], Flag("--schedule", "Learning rate after the warm-up.")
    ] = "constant"
    warmup_steps: Annotated[Natural, Flag("--warmup-steps", "Steps of linear warm-up.")] = 0
    decay_steps: Natural | None = None  # of warmup-stable-decay; None: a tenth of the run
    min_lr_fraction: Fraction = 0.0  # of `lr`, where cosine and warmup-stable-decay end
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class OptimizerSettings(AdamW):
    """AdamW over a run."""

    lr: Annotated[Above0, Flag("--lr", "Learning rate of AdamW.")] = 1e-5
    weight_decay: Annotated[AtLeast0, Flag("--weight-decay", "Weight decay of matrices.")] = 0.0
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When checkpoints are saved, and which of them are kept."""

    every: Annotated[Count | None, Flag("--save-every", "Steps between checkpoints.", "by time, and at the end")] = None
    keep: Annotated[Count | None, Flag("--keep", "Keep only the last N checkpoints.", "all", "N")] = None
    background: bool = True  # write while training goes on
    copy_bytes: Natural | None = None  # host memory for copy-on-write of blocks; None: what the plan leaves free
    minutes: Annotated[AtLeast0, Flag("--save-minutes", "Longest time between checkpoints; 0: no limit.")] = 60.0
    weights_only: Annotated[
        bool, Flag("--weights-only", "Save the model alone, 2 bytes a parameter, without the state to resume from.")
    ] = False
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Held-out loss and generated samples during training."""

    data: Annotated[Text | None, Flag("--eval-data", "Held-out data, for its loss and perplexity.", metavar="PATH")] = None
    every: Annotated[Count | None, Flag("--eval-every", "Steps between evaluations.", "only at the end")] = None
    split: Text | None = None  # of a folder; None: the splits that begin with val, dev, eval or test, where there are
    max_sequences: Count = 256
    prompts: Annotated[tuple[Text, ...], Flag("--prompt", "Generate from this prompt at each evaluation.", repeats=True)] = ()
    max_new_tokens: Count = 64
    temperature: AtLeast0 = 0.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    first: bool = True  # the held-out loss before the first step, too
    base: Annotated[bool, Flag("--eval-base", "Evaluate the base model without its adapter, too.")] = False
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A training run, but for its plan."""

    data: DataSettings
    plan: Text | None = None
    model: Annotated[Text | None, Flag("--model", "Folder with weights and tokenizer.", "the plan's model", metavar="FOLDER")] = (
        None
    )
    from_scratch: Annotated[bool, Flag("--from-scratch", "Start from random weights instead of a checkpoint.")] = False
    adapter: Annotated[
        Text | None, Flag("--adapter", "Folder of a LoRA adapter, as PEFT saves it, to go on from.", "a new one", "FOLDER")
    ] = None
    packed: Annotated[
        Text | None, Flag("--packed", "Folder that keeps quantized base weights, for other runs too.", "in --out", "FOLDER")
    ] = None
    tokenizer: Annotated[Literal["model", "bytes"], Flag("--tokenizer", "The model's own, or UTF-8 bytes.")] = "model"
    out: Annotated[Text, Flag("--out", "Folder of checkpoints and logs.", metavar="FOLDER")] = "penstock-run"
    steps: Annotated[Count | None, Flag("--steps", "Steps in all, resumed ones included.", "once through the data")] = None
    epochs: Annotated[Above0 | None, Flag("--epochs", "Instead of --steps: times through the data.")] = None
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag("--seed", "Seed of random weights, dropout and the order of the data.")] = 0
    device: Annotated[
        Literal["auto", "cuda", "cpu", "emulated"],
        Flag(
            "--device",
            "What performs the plan: a GPU if there is one, else this CPU (auto), or the plan's machine, emulated on a tiny model.",
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Flag(
            "--deterministic",
            "With a GPU, and a plan made with --deterministic: bits that do not depend on the plan. Some kernels are slower.",
        ),
    ] = False
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    monitors: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Flag("--monitor", "Log there too.", repeats=True)
    ] = ()
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted name (`optimizer.lr`), type, default and flag."""

    name: str
    type: Any
    default: Any
    flag: Flag | None


def settings_of(kind: Any = RunSettings, section: str = "") -> Iterator[Setting]:
    """Every setting, section by section."""
    for each in fields(kind):
        if is_dataclass(each.type):
            yield from settings_of(each.type, f"{section}{each.name}.")
        else:
            flag = next((found for found in get_args(each.type) if isinstance(found, Flag)), None)
            yield Setting(section + each.name, each.type, each.default, flag)
