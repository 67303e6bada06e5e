"""List of stages: order, time limits, sizes.

All of it is data here. A stage is a plain function `(asked, note)` in a module of this folder, performed in a process of its own;
it calls `note(what, **values)` with each thing it has learned, as soon as it has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
CALL_S = 540.0  # of a command that may last ten minutes: what all stages of one call may take together


class SkippedError(Exception):
    """There is nothing to be measured here, and that is no failure: the message says why."""


class Note(Protocol):
    def __call__(self, what: str, /, **values: object) -> None:
        """Write a line to the stream of results, at once."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One process. `perform` names a module of this folder and a function in it."""

    name: str
    call: int  # of which call of ten minutes it is a part
    limit_s: float
    perform: str
    needs: tuple[str, ...] = ()  # packages, beyond those that every stage needs
    in_tiny: bool = True  # a run with small sizes performs it too
    is_given: str | None = None  # the option that names a folder without which there is nothing to perform


STAGES = (
    Stage("facts", 1, 20, "facts:facts"),
    Stage("host", 1, 80, "host:host"),
    Stage("kernels", 1, 120, "kernels:kernels"),
    Stage("probe", 1, 100, "commands:probe"),
    Stage("batch-64", 1, 180, "training:planned"),
    Stage("lora", 2, 80, "training:planned"),
    Stage("whole-14b", 2, 150, "training:planned", in_tiny=False),
    Stage("lora-72b", 2, 160, "training:planned", in_tiny=False),
    Stage("tests-of-kernels", 2, 130, "commands:tests_of_kernels", ("pytest", "hypothesis")),
    Stage("smoke-llama", 3, 100, "smoke:smoke"),
    Stage("tests", 3, 300, "commands:tests", ("pytest", "hypothesis")),
    Stage("batch-16", 4, 150, "training:planned"),
    Stage("eight-layers", 4, 110, "training:planned"),
    Stage("fsdp2", 4, 120, "others:fsdp2"),
    Stage("megatrain", 4, 120, "others:megatrain", is_given="megatrain"),
    Stage("batch-4", 5, 110, "training:planned"),
    Stage("zero3", 5, 120, "others:zero3", ("deepspeed",)),
    Stage("peft", 5, 80, "others:peft", ("peft",)),
    Stage("smoke-qwen2", 6, 80, "smoke:smoke", in_tiny=False),
    Stage("smoke-qwen3_moe", 6, 80, "smoke:smoke", in_tiny=False),
    Stage("resumed", 6, 110, "commands:resumed", ("datasets",)),
    Stage("resumed-lion", 6, 110, "commands:resumed", ("datasets",), in_tiny=False),
    Stage("resumed-pairs", 6, 160, "commands:resumed", ("datasets",), in_tiny=False),
)
PAGE = Stage("page", 0, 10, "page:page")  # after the others of any call, every time
CALLS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6}

# What every stage needs, by the name under which it is imported; what pydantic needs too, as its wheels are carried one by one.
NEEDED = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "scipy", "numba", "llvmlite", "click", "rich",
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A run of our own: `batch_size` sequences a step of a model, or of its first `n_layers`."""

    batch_size: int
    n_steps: int
    n_layers: int | None = None
    is_probed: bool = False  # planned with the profile that was measured here, where there is one
    is_profiled: bool = False  # after its steps, one update alone in its arenas and one step under torch's profiler
    model: str | None = None  # another than that of most
    plan_words: tuple[str, ...] = ()  # for `penstock plan`


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained, and in what steps the others look for the batch that suits them."""

    model: str
    seq_len: int
    cases: dict[str, Case]
    their_layers: int  # the others have the first layers of the model, as the host holds less of it under some of them
    micro_batches: tuple[int, ...]  # of the others, each tried until one does not fit
    largest_batch: int  # which the others try too, in several of the micro-batches that suit them best
    loss_chunk_tokens: int  # of the others
    plan_words: tuple[str, ...] = ()  # for `penstock plan`


LORA = ("--train", "lora:r=16")  # beside every linear layer, as PEFT's `target_modules="all-linear"`
# MegaTrain's own configuration for this model takes 158 sequences of 1024 tokens a step: about as many tokens as 64 of 2048.
FULL = Sizes(
    "qwen2.5-7b",
    2048,
    {
        "eight-layers": Case(64, 5, n_layers=8, is_probed=True),
        "batch-4": Case(4, 8, is_probed=True),
        "batch-16": Case(16, 6, is_probed=True),
        "batch-64": Case(64, 4, is_probed=True, is_profiled=True),
        "lora": Case(16, 6, is_probed=True, plan_words=LORA),
        "lora-72b": Case(4, 5, is_probed=True, model="qwen2.5-72b", plan_words=(*LORA, "--base", "int8")),
        "whole-14b": Case(16, 5, is_probed=True, model="qwen2.5-14b"),  # whose state is more than either memory
    },
    8,
    (16, 64),
    64,
    4096,
)
TINY = Sizes(
    "tiny.json",
    32,
    {
        "eight-layers": Case(4, 3, n_layers=1, is_probed=True),
        "batch-4": Case(2, 3, is_probed=True),
        "batch-16": Case(4, 3, is_probed=True),
        "batch-64": Case(8, 3, is_profiled=True),
        "lora": Case(4, 3, is_probed=True, plan_words=LORA),
    },
    2,
    (1, 2),
    4,
    24,
    ("--micro-batch", "2", "--loss-tile-tokens", "16"),
)
TINY_PATIENCE = 6.0  # times a stage's limit: a tiny run shares its two cores, which may have no instructions for bf16
TINY_MACHINE = "cpu-2core"  # whose plans a tiny run takes where no other machine is named
TINY_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line said."""

    home: Path
    results: Path
    device: str = "cuda"
    tiny: bool = False
    machine: str | None = None  # for which plans are made where none was carried and none is probed
    device_memory: str | None = None
    host_memory: str | None = None
    megatrain: Path | None = None
    stage: str = ""  # the one that is performed
    stage_limit_s: float = CALL_S

    @property
    def sizes(self) -> Sizes:
        return TINY if self.tiny else FULL

    @property
    def case(self) -> Case:
        return self.sizes.cases[self.stage]

    @property
    def plans(self) -> Path:
        return self.home / "plans"

    @property
    def profile(self) -> Path:
        """Of this machine, once it has been probed."""
        return self.results / "profile.json"
