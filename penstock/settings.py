"""What does a user choose for a run?

A plan says what a step computes and when; everything else about a training run is here: data, learning rate, checkpoints,
evaluation. `run_config.py` reads it from a file and from flags, and writes it beside the run.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from runtime.plan.optimizer import Above0, AdamW, AtLeast0, Text
from runtime.plan.workload import FILE, Count, Natural

Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]

Format = Literal["auto", "text", "messages", "alpaca", "sharegpt", "prompt-completion", "question-answer"]
Packing = Literal["auto", "joined", "documents", "one"]
ScheduleKind = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
Device = Literal["auto", "cuda", "cpu", "emulated"]
Service = Literal["tensorboard", "wandb", "mlflow"]
Tokenizer = Literal["model", "bytes"]


@dataclass(frozen=True, slots=True)
class DataPart:
    """One of several data sets. What is None is as `data` says."""

    path: Text
    weight: Annotated[float, Field(gt=0, le=1)] | None = (
        None  # its share of the samples; None, for all: each sample of each set once an epoch
    )
    format: Format | None = None
    split: Text | None = None
    columns: dict[Text, Text] | None = None
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What is trained on, and how sequences are made of it."""

    path: Text | None = None  # a folder, or a file: text, .jsonl, .json, .csv, .parquet; None: `mix` says
    format: Format = "auto"  # auto: by the columns of the first row
    mix: tuple[DataPart, ...] = ()  # several, each read and packed by itself
    split: Text | None = None  # of a folder: files of the splits that begin so; None: those that begin with train, where there are
    columns: dict[Text, Text] | None = None  # what files call a column that is known here by another name: {prompt: question}
    # How documents share a sequence. joined: cut from one long row of tokens, and attention sees across; documents: packed whole,
    # each attends to itself alone; one: a sequence each, padded.
    packing: Packing = "auto"  # auto: joined for text, documents for chats where possible
    too_long: Literal["cut", "split", "skip", "refuse"] = "cut"  # a document longer than a sequence; `joined` always splits
    unsupervised: Literal["refuse", "skip"] = "skip"  # a sample with nothing to learn from; skipped ones are counted
    shuffle: bool = True  # the order of sequences, another in each epoch
    streaming: bool = False  # read as it is needed, for sets larger than the disk's cache; shuffles within a buffer
    shuffle_buffer: Count = 10_000  # samples, when streaming
    workers: Natural = 0  # processes that prepare batches ahead; spawned, never forked
    __pydantic_config__ = FILE

    @property
    def parts(self) -> tuple["DataSettings", ...]:
        """Each data set with settings of its own."""
        said = [{k: v for k, v in asdict(part).items() if k != "weight" and v is not None} for part in self.mix]
        return tuple(replace(self, mix=(), **fields) for fields in said) or (self,)


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """How the learning rate changes. Steps are optimizer steps."""

    kind: ScheduleKind = "constant"
    warmup_steps: Natural = 0
    decay_steps: Natural | None = None  # of warmup-stable-decay; None: a tenth of the run
    min_lr_fraction: Fraction = 0.0  # where cosine and warmup-stable-decay end
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class OptimizerSettings(AdamW):
    """AdamW through a run."""

    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When the state is saved, and how much of the past is kept."""

    every: Count | None = None  # steps; None: only at the end
    keep: Count | None = None  # only the last N; None: all, but of those that only the clock asked for the last
    background: bool = True  # write while training goes on
    copy_bytes: Natural | None = None  # host memory for blocks that change before they are written; None: what the plan leaves free
    minutes: AtLeast0 = 60.0  # the longest time without a save; 0: any
    weights_only: bool = False  # the model as transformers loads it, and not what resuming needs
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What is looked at while training goes on."""

    data: Text | None = None  # held-out data, read with the settings of `data`
    every: Count | None = None  # steps; None: only at the end
    split: Text | None = None  # of that folder; None: those that begin with val, dev, eval or test, where there are
    max_sequences: Count = 256
    prompts: tuple[Text, ...] = ()  # what the model is asked to continue or, where it is trained on conversations, to answer
    max_new_tokens: Count = 64
    temperature: AtLeast0 = 0.0  # 0: always the likeliest token
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    first: bool = True  # the loss on held-out data before the first step, too
    base: bool = False  # of adapters: the model without them, too
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run, but for its plan."""

    data: DataSettings
    plan: Text | None = None
    model: Text | None = None  # folder with weights and tokenizer; None: the plan's
    from_scratch: bool = False  # random weights, whatever the folder holds
    adapter: Text | None = None  # folder of one, as PEFT saves it, from which adapters go on
    packed: Text | None = None  # folder that keeps packed weights; None: in the run's own
    tokenizer: Tokenizer = "model"  # the model's own, or UTF-8 bytes
    out: Text = "penstock-run"
    steps: Count | None = None
    epochs: Above0 | None = None  # None for both: once through the data
    seed: Seed = 0
    device: Device = "auto"
    deterministic: bool = False
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    monitors: tuple[Service, ...] = ()  # besides metrics.jsonl, which is always written
    __pydantic_config__ = FILE
