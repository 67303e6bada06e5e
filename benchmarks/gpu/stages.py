"""List of stages: order, time limits, sizes.

This module is data. A stage is a function `(request, note)` in a module of this folder, run in a separate process; it calls
`note(what, **values)` for each result at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
CALL_S = 540.0  # total of all stages of one call: a command of at most ten minutes


class SkippedError(Exception):
    """Nothing can be measured here, which is not a failure. The message is the reason."""


class Note(Protocol):
    def __call__(self, line: str, /, **values: object) -> None:
        """Write a line to the stream of results, at once."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One process. `perform` names a module of this folder and a function in it."""

    name: str
    call: int  # number of the ten-minute call
    limit_s: float
    perform: str
    needs: tuple[str, ...] = ()  # packages, in addition to NEEDED
    in_tiny: bool = True  # True: also part of a run with small sizes
    is_given: str | None = None  # option that names a required folder


STAGES = (
    Stage("facts", 1, 20, "facts:facts"),
    Stage("host", 1, 80, "host:host"),
    Stage("kernels", 1, 120, "kernels:kernels"),
    Stage("probe", 1, 100, "commands:probe"),
    Stage("batch-64", 1, 180, "training:planned"),
    Stage("lora", 2, 80, "training:planned"),
    Stage("whole-14b", 2, 150, "training:planned", in_tiny=False),
    Stage("lora-72b", 2, 160, "training:planned", in_tiny=False),
    Stage("lora-72b-fp8", 2, 150, "training:planned", in_tiny=False),
    Stage("tests-of-kernels", 3, 130, "commands:tests_of_kernels", ("pytest", "hypothesis")),
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
PAGE = Stage("page", 0, 10, "page:page")  # after the stages of every call
CALLS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6}

# Import names of packages for every stage; includes dependencies of pydantic, because wheels are installed one by one.
NEEDED = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "scipy", "numba", "llvmlite", "click", "rich",
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A run of Penstock: `batch_size` sequences per step, of a model or its first `n_layers`."""

    batch_size: int
    n_steps: int
    n_layers: int | None = None
    is_probed: bool = False  # planned with the profile probed here, if available
    is_profiled: bool = False  # afterwards: one update alone, and one step under torch's profiler
    model: str | None = None  # default: `Sizes.model`
    plan_words: tuple[str, ...] = ()  # for `penstock plan`


@dataclass(frozen=True, slots=True)
class Sizes:
    """Model and steps, and batch sizes to try for other systems."""

    model: str
    seq_len: int
    cases: dict[str, Case]
    their_layers: int  # other systems train the first layers, because some need more host memory
    micro_batches: tuple[int, ...]  # for other systems, tried until one does not fit
    largest_batch: int  # also tried by other systems, with their fastest micro-batch
    loss_chunk_tokens: int  # for other systems
    plan_words: tuple[str, ...] = ()  # for `penstock plan`


LORA = ("--train", "lora:r=16")  # at every linear layer, like PEFT's `target_modules="all-linear"`
# MegaTrain's configuration for this model has 158 sequences of 1024 tokens per step: about the tokens of 64 x 2048.
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
        "lora-72b-fp8": Case(
            4, 5, is_probed=True, model="qwen2.5-72b", plan_words=(*LORA, "--base", "fp8-rows", "--compute", "fp8")
        ),
        "whole-14b": Case(16, 5, is_probed=True, model="qwen2.5-14b"),  # its state exceeds both memories
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
TINY_PATIENCE = 6.0  # factor on limits: a tiny run shares two cores, possibly without bf16 instructions
TINY_MACHINE = "cpu-2core"  # default machine of a tiny run's plans
TINY_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """Parsed command line."""

    home: Path
    results: Path
    device: str = "cuda"
    tiny: bool = False
    machine: str | None = None  # for plans without a probe
    device_memory: str | None = None
    host_memory: str | None = None
    megatrain: Path | None = None
    stage: str = ""  # current stage
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
        """Profile of this machine, once it is probed."""
        return self.results / "profile.json"
