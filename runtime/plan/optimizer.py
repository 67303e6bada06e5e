"""Optimizers as data: what each keeps of a parameter, the bytes that an update moves, and its hyperparameters.

Arenas, costs, the checker and checkpoints ask here; `runtime/host` has a file with the arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.runtime.errors import PlanError

from .workload import FILE, ITEM_BYTES, Dtype

Above0 = Annotated[float, Field(gt=0, le=1e6)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]  # no name of a file holds a NUL
# Of an element of state: the remainder of a split master is int16, or a byte with a sign; 32 int8 codes have a scale of two bytes
STORED_BYTES: dict[str, float] = ITEM_BYTES | {"int16": 2, "byte": 1, "split24": 3, "int8": 34 / 32}
MasterDtype = Literal[Dtype, "split24"]  # the latter: a bf16 weight and eight bits more


class Optimizer(StrEnum):
    """An optimizer, and what it keeps of each trained parameter besides its master. Moments in bf16, and scales of those in int8,
    are rounded stochastically: to the nearest, a second moment that decays by 0.1 % a step would never fall."""

    __hash__ = str.__hash__
    ADAMW = "adamw"
    ADAMW_BF16 = "adamw:moments=bf16"
    ADAMW_INT8 = "adamw:moments=int8"
    LION = "lion"
    LION_BF16 = "lion:moments=bf16"
    LION_INT8 = "lion:moments=int8"

    @property
    def rule(self) -> str:
        """The name of its arithmetic."""
        return self.partition(":")[0]

    @property
    def moments(self) -> dict[str, str]:
        """Dtypes of moments, by the names that checkpoints give them."""
        names = ("exp_avg", "exp_avg_sq") if self.rule == "adamw" else ("exp_avg",)
        return dict.fromkeys(names, self.partition("=")[2] or "fp32")

    @property
    def moment_bytes(self) -> float:
        return sum(STORED_BYTES[dtype] for dtype in self.moments.values())

    def state_bytes(self, master: MasterDtype) -> float:
        """Bytes per parameter of master and moments."""
        return STORED_BYTES[master] + self.moment_bytes

    def update_bytes(self, master: MasterDtype, gradient: Dtype) -> float:
        """Bytes that an update moves per parameter: master and moments are read and written, the gradient is read. AdamW with an
        fp32 master and bf16 gradients: 2 x (4 + 8) + 2 = 26."""
        return 2 * self.state_bytes(master) + ITEM_BYTES[gradient]


_HOW = "write adamw or lion, and what less is kept: adamw:moments=bf16 or int8, lion:moments=bf16,master=bf16 or split24"
MASTERS = ("fp32", "split24", "bf16")


def optimizing(text: str | None, master_dtype: str | None) -> dict[str, Any]:
    """Fields of `Semantics` for an optimizer's text, such as `adamw:master=bf16`, and a `master_dtype` from elsewhere. A master of
    less than fp32 that the text names is rounded stochastically. PlanError for anything else."""
    if text is None:
        return {}
    rule, _, rest = str(text).strip().partition(":")
    pairs = [part.partition("=")[::2] for part in rest.split(",") if part]
    said = dict(pairs)
    moments, master = said.pop("moments", "fp32"), said.pop("master", None)
    name = rule if moments == "fp32" else f"{rule}:moments={moments}"
    if said or len(pairs) > len({key for key, _ in pairs}) or name not in [*Optimizer] or master not in (None, *MASTERS):
        raise PlanError(f"--optimizer {str(text)[:80]!r} is not understood; {_HOW}")
    if None not in (master, master_dtype) and master != master_dtype:
        raise PlanError(f"--optimizer {text} with --master {master_dtype}: a master is one of both; leave out --master")
    rounding = None if master in (None, "fp32") else "stochastic"
    fields = {"optimizer": Optimizer(name), "master_dtype": master, "weight_rounding": rounding}
    return {field: value for field, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of AdamW, or of Lion, which has no `eps`: of a step, or of a run before its rate is scheduled. Biases, norms
    and other vectors never decay; `no_decay` names more, by parts of their names."""

    lr: Above0 = 1e-5
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: AtLeast0 = 0.0
    no_decay: tuple[Text, ...] = ()
    __pydantic_config__ = FILE

    @property
    def numbers(self) -> list[float]:
        """Of one parameter, in the order in which kernels take them."""
        return [self.lr, self.beta1, self.beta2, self.weight_decay, self.eps]

    def of(self, name: str, shape: tuple[int, ...]) -> "AdamW":
        """The hyperparameters for one parameter: without decay where none applies."""
        spared = not decays(name, shape) or any(part in name for part in self.no_decay)
        return replace(self, weight_decay=0.0) if spared else self


Hyperparameters = AdamW  # of any optimizer
Schedule = Callable[[int], Hyperparameters]  # those of each step


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to biases, norms and 1-D parameters, by name (biases of experts are 2-D)."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
