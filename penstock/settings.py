"""Settings of a training run, apart from its plan, with their defaults; `settings.toml` has their flags.

`run_config.py` reads them from a YAML or TOML file and from flags; `cli/options.py` generates the flags and their help from them.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import Field as DataclassField
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from penstock.runtime.plan.optimizer import Above0, AdamW, AtLeast0, Beta, RateGroup, Text
from penstock.runtime.plan.workload import Count, Natural


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag of a setting, with the parts of `--help` that do not follow from the setting's type and default."""

    name: str
    help: str
    default: str | None = None
    metavar: str | None = None
    repeats: bool = False


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return tomllib.loads(resources.files("penstock").joinpath(name).read_text("utf-8"))


FLAGS = {setting: Flag(**flag) for setting, flag in read_table("settings.toml").items()}  # by dotted name
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

    path: Text | None = None  # None: `mix` names the data
    format: Format = "auto"
    mix: tuple[DataPart, ...] = ()  # several sets, read and packed separately
    split: Text | None = None
    columns: dict[Text, Text] | None = None
    # joined: documents are concatenated and cut, and attention crosses them; documents: packed whole, isolated in attention;
    # one: one padded document per sequence; auto: joined for text, documents for chats if the model supports isolation
    bad_rows: Fraction = 0.0
    packing: Literal["auto", "joined", "documents", "one"] = "auto"
    too_long: Literal["cut", "split", "skip", "refuse"] = "cut"  # a document longer than a sequence; `joined` always splits
    unsupervised: Literal["refuse", "skip"] = "skip"  # a sample without a supervised token; skipped ones are counted
    shuffle: bool = True  # random order of sequences, different in each epoch
    seed: Natural | None = None  # of the order; None: the run's
    # transformers: the order of its Trainer for a set of one document per sequence; the last batch of an epoch may be smaller
    sampler: Literal["penstock", "transformers"] = "penstock"
    chat_template: Text | None = None
    images: Text | None = None
    max_row_seconds: Above0 = 10.0
    max_row_mb: Count = 64
    streaming: bool = False
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

    kind: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "constant"
    warmup_steps: Natural = 0
    decay_steps: Natural | None = None  # for warmup-stable-decay; None: a tenth of the run
    min_lr_fraction: Fraction = 0.0  # final rate of cosine and warmup-stable-decay, as a fraction of `lr`
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class OptimizerSettings(AdamW):
    """Hyperparameters and schedule of the plan's optimizer."""

    lr: Above0 | None = None  # type: ignore[assignment]
    beta2: Beta | None = None  # type: ignore[assignment]  # None: 0.999; Lion: 0.99
    weight_decay: AtLeast0 = 0.0
    groups: tuple[RateGroup, ...] = ()
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Times and retention of checkpoints."""

    every: Count | None = None
    keep: Count | None = None
    background: bool = True  # write during training
    copy_bytes: Natural | None = None  # host memory for copy-on-write of blocks; None: half of the memory that the plan leaves free
    minutes: AtLeast0 = 60.0
    weights_only: bool = False
    __pydantic_config__ = LENIENT


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Held-out loss and generated samples during training."""

    data: Text | None = None
    every: Count | None = None
    split: Text | None = None  # split of a folder; None: those that begin with val, dev, eval or test
    max_sequences: Count = 256
    prompts: tuple[Text, ...] = ()
    max_new_tokens: Count = 64
    first: bool = True  # evaluate before the first step too
    base: bool = False
    best: Metric | None = None
    patience: Count | None = None
    min_gain: AtLeast0 = 0.0
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
    model: Text | None = None
    from_scratch: bool = False
    adapter: Text | None = None
    tower: Text | None = None
    packed: Text | None = None
    disk: Text | None = None
    reference: Text | None = None
    loss: Text | None = None
    tokenizer: Literal["model", "bytes"] = "model"
    out: Text = "penstock-run"
    steps: Count | None = None
    epochs: Above0 | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cuda", "cpu", "emulated"] = "auto"
    deterministic: bool = False
    replan: Count | None = None
    stop_if_lost: bool = False
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    monitors: tuple[Literal["tensorboard", "wandb", "mlflow", "all", "none"], ...] = ()
    __pydantic_config__ = LENIENT


def settings_of(kind: Any = RunSettings, section: str = "") -> Iterator[tuple[str, DataclassField[Any]]]:
    """Yield each setting with its dotted name (`optimizer.lr`), section by section."""
    for setting in fields(kind):
        if is_dataclass(setting.type):
            yield from settings_of(setting.type, f"{section}{setting.name}.")
        else:
            yield section + setting.name, setting
