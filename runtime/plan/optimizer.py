"""Optimizers: dtypes of their state, memory traffic of an update, hyperparameters. `runtime/host` holds the arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from penstock.runtime.errors import PlanError

from .workload import FILE, ITEM_BYTES, Dtype

Above0 = Annotated[float, Field(gt=0, le=1e6)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]  # file names hold no NUL
# Bytes per element of state. The remainder of a split master is int16 or a signed byte; 32 int8 codes share a 2-byte scale
STORED_BYTES: dict[str, float] = ITEM_BYTES | {"int16": 2, "byte": 1, "split24": 3, "int8": 34 / 32}
MasterDtype = Literal[Dtype, "split24"]  # split24: a bf16 weight and 8 more bits


class Rule(NamedTuple):
    """Name, state and default hyperparameters of an update rule."""

    name: str
    moments: tuple[str, ...]  # names in checkpoints
    lr_fraction: float  # default learning rate, relative to AdamW's
    beta2: float  # default
    has_eps: bool


RULES = {
    "adamw": Rule("AdamW", ("exp_avg", "exp_avg_sq"), 1.0, 0.999, has_eps=True),
    "lion": Rule("Lion", ("exp_avg",), 0.3, 0.99, has_eps=False),  # arXiv 2302.06675: a rate 3 to 10 times smaller than AdamW's
}


class Optimizer(StrEnum):
    """Update rule and dtype of its moments. bf16 moments and scales of int8 moments are rounded stochastically: rounded to nearest,
    a second moment that decays by 0.1 % a step never falls."""

    __hash__ = str.__hash__
    ADAMW = "adamw"
    ADAMW_BF16 = "adamw:moments=bf16"
    ADAMW_INT8 = "adamw:moments=int8"
    LION = "lion"
    LION_BF16 = "lion:moments=bf16"
    LION_INT8 = "lion:moments=int8"

    @property
    def rule(self) -> str:
        return self.partition(":")[0]

    @property
    def moments(self) -> dict[str, str]:
        """Dtypes of moments by their names in checkpoints, such as `exp_avg`."""
        return dict.fromkeys(RULES[self.rule].moments, self.partition("=")[2] or "fp32")

    @property
    def moment_bytes(self) -> float:
        return sum(STORED_BYTES[dtype] for dtype in self.moments.values())

    def state_bytes(self, master: MasterDtype) -> float:
        return STORED_BYTES[master] + self.moment_bytes

    def update_bytes(self, master: MasterDtype, gradient: Dtype) -> float:
        """Memory traffic of an update per parameter. AdamW, fp32 master, bf16 gradient: read and write 12 bytes, read 2: 26."""
        return 2 * self.state_bytes(master) + ITEM_BYTES[gradient]


_HOW = f"write {' or '.join(RULES)}, with dtypes below fp32: adamw:moments=bf16 or int8, lion:moments=bf16,master=bf16 or split24"
MASTERS = ("fp32", "split24", "bf16")


def optimizing(text: str | None, master_dtype: str | None) -> dict[str, Any]:
    """Parse an optimizer such as `adamw:master=bf16` into fields of `Semantics`. A master below fp32 that it names is rounded
    stochastically. Raise PlanError if the text is unknown, or contradicts `master_dtype`."""
    if text is None:
        return {}
    rule, _, rest = str(text).strip().partition(":")
    pairs = [part.partition("=")[::2] for part in rest.split(",") if part]
    options = dict(pairs)
    moments, master = options.pop("moments", "fp32"), options.pop("master", None)
    name = rule if moments == "fp32" else f"{rule}:moments={moments}"
    if options or len(pairs) > len({key for key, _ in pairs}) or name not in [*Optimizer] or master not in (None, *MASTERS):
        raise PlanError(f"--optimizer {str(text)[:80]!r} is not understood; {_HOW}")
    if None not in (master, master_dtype) and master != master_dtype:
        raise PlanError(f"--optimizer {text} with --master {master_dtype}: these differ; leave out --master")
    rounding = None if master in (None, "fp32") else "stochastic"
    fields = {"optimizer": Optimizer(name), "master_dtype": master, "weight_rounding": rounding}
    return {field: value for field, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RateGroup:
    """Hyperparameters of parameters with matching names (`*norm*`), in place of the optimizer's. `lr_factor`: of its rate."""

    pattern: Text
    lr: Above0 | None = None
    lr_factor: Above0 | None = None
    weight_decay: AtLeast0 | None = None  # also of vectors and `no_decay`
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of AdamW, or of Lion (without `eps`), of a step or before a schedule scales the rate. Biases, norms and other
    vectors never decay; `no_decay` excludes more parameters by substrings of their names. Of `groups`, the first match applies."""

    lr: Above0 = 1e-5
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: AtLeast0 = 0.0
    no_decay: tuple[Text, ...] = ()
    groups: tuple[RateGroup, ...] = ()
    __pydantic_config__ = FILE

    @property
    def numbers(self) -> list[float]:
        """Arguments of update kernels, in order."""
        return [self.lr, self.beta1, self.beta2, self.weight_decay, self.eps]

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> "AdamW":
        """Return the hyperparameters of one parameter, without weight decay where it does not apply."""
        spared = not decays(name, shape) or any(part in name for part in self.no_decay)
        settings = replace(self, weight_decay=0.0) if spared else self
        if (group := next((group for group in self.groups if fnmatchcase(name, group.pattern)), None)) is None:
            return settings
        weight_decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        return replace(settings, lr=self.lr if group.lr is None else group.lr, weight_decay=weight_decay)


Hyperparameters = AdamW  # of every optimizer
Schedule = Callable[[int], Hyperparameters]  # step -> hyperparameters


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """True if weight decay applies: by shape and name, not to vectors, biases (those of experts are 2-D), norms and sinks."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
