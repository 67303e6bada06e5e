"""Keyword arguments of `plan`, `train`, `stream` and `forward`, with their types, and the settings that they name."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from penstock.results import Planned
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.optimizer import MasterDtype
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.workload import Dtype

if TYPE_CHECKING:
    from penstock.data.user_batches import Batches
    from penstock.runtime.executor import Stop
    from penstock.training.trainer import Metrics

AnyPlan: TypeAlias = Planned | PlanFile | Plan | str | Path
# Files; rows in any layout, as a list or a Dataset or IterableDataset of `datasets`; an iterable of dict batches; batches by step
Data: TypeAlias = "str | Path | Iterable[Any] | Batches"
# Arguments of `train` that are settings of a run, by dotted name
SETTINGS = {
    "lr": "optimizer.lr",
    "eval_data": "evaluation.data",
    "eval_every": "evaluation.every",
    "save_every": "checkpoint.every",
}
SETTINGS |= {name: name for name in ("steps", "epochs", "model", "reference", "adapter", "seed", "out", "device", "from_scratch")}


class StepOptions(TypedDict, total=False):
    """Further arguments of `plan`: fields of Semantics. None or absent: the fastest, or the default of Semantics."""

    micro_batch: int | None
    compute_dtype: Dtype | Literal["fp8"] | None  # fp8: of products with frozen weights
    gradient_dtype: Dtype | None
    master_dtype: MasterDtype | None
    weight_rounding: Literal["half_up", "stochastic"] | None
    on_nonfinite: Literal["skip", "stop"] | None
    loss_tile_tokens: int | None
    mlp_tile_tokens: int | None
    attention: Literal["sdpa", "eager"] | None
    experts: Literal["grouped_mm"] | None
    sum_groups: int | None
    train: str | None  # all, lora:r=16,alpha=32, layers:20-31 or names:*norm*
    lora_products: Literal["accumulated"] | None
    base: Base | None
    optimizer: str | None  # adamw, lion, adamw:moments=bf16
    router_loss: float | None


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of `train` and `stream`."""

    out: str | Path  # folder of checkpoints and logs; default: penstock-run
    steps: int | None  # in all, with those before a resume
    epochs: float | None  # instead of steps; default: 1
    lr: float | None
    model: str | Path | None  # folder with weights and tokenizer; default: the plan's
    adapter: str | Path | None  # folder of an adapter to continue from
    reference: str | Path | None  # of a loss: start, base, or a file of `forward`
    seed: int | None  # of random weights, dropout and the order of the data; default: 0
    eval_data: "Data | None"
    eval_every: int | None  # steps; default: only at the end
    save_every: int | None  # steps; default: by time, and at the end
    device: str  # auto, cuda, cpu or emulated
    resume: bool
    resume_from: str | Path | None  # a checkpoint, instead of the last
    from_scratch: bool  # random weights
    settings: Mapping[str, Any] | None  # others, by dotted name
    time_scale: float | None  # slowdown of an emulated machine
    on_step: "Callable[[Metrics], None]"
    stop: "Stop | None"
    loss: Callable[..., Any] | None  # the function of a plan with a loss of your own


def named_settings(options: TrainOptions) -> dict[str, Any]:
    """Return the settings that arguments name, by dotted name, without data. PlanError for one that is named in `settings`, too."""
    if not isinstance(options.get("settings") or {}, Mapping):
        raise PlanError(f"settings is a {type(options['settings']).__name__}; give a dict of dotted names")
    named = {setting: options.get(name) for name, setting in SETTINGS.items() if name != "eval_data"}
    named = {setting: str(value) if isinstance(value, Path) else value for setting, value in named.items() if value is not None}
    arguments = {setting: name for name, setting in SETTINGS.items()} | {"data.path": "data", "data.mix": "data"}
    single = {*named, "optimizer.lr", "steps", "out", "device", "from_scratch", "data.path", "data.mix"}
    single |= {"evaluation.data"} if options.get("eval_data") is not None else set()
    if doubled := [name for name in options.get("settings") or {} if name in single]:
        raise PlanError(f"settings: {doubled[0]} is an argument; give it as {arguments[doubled[0]]}=")
    return named | dict(options.get("settings") or {})
