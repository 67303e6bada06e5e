"""Trained weights: all, adapters (LoRA), by name, or by layer; the rest is frozen.

All of them; adapters beside them (LoRA); those of some names; or those of some layers. What is not trained is frozen: it is read,
and nothing else is ever done to it.
"""

import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field

from runtime.errors import PlanError

from .packed import Base
from .workload import FILE, Count, Dtype, Natural

# Of a layer, the projections that adapters may stand beside, in the order in which layers have them.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = ("lora_A", "lora_B")  # the two factors, as their files call them
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
Name = Annotated[str, Field(max_length=200, pattern=r"^[^\s]+$")]


@dataclass(frozen=True, slots=True)
class Lora:
    """y = x W^T + alpha/rank (dropout(x) A^T) B^T beside each of the targets: A is (rank, in), B (out, rank)."""

    rank: Count = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[Name, ...] = TARGETS
    __pydantic_config__ = FILE

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Train:
    """What is trained: everything, or what one of these says."""

    lora: Lora | None = None
    names: tuple[Name, ...] = ()  # of parameters, `*` standing for anything
    layers: tuple[Natural, Natural] | None = None  # the first and the last, counted from 0 as their names are
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        if (self.lora is not None) + bool(self.names) + (self.layers is not None) > 1:
            raise PlanError("train says one thing: lora, names, or layers")

    @property
    def all(self) -> bool:
        """Whether nothing is frozen."""
        return self == Train()

    def trains(self, name: str) -> bool:
        """Whether the parameter of that name is trained."""
        if self.lora is not None:
            return is_adapter(name)
        if self.names:
            return any(fnmatchcase(name, pattern) for pattern in self.names)
        if self.layers is not None:
            layer = _LAYER.match(name)
            return layer is not None and self.layers[0] <= int(layer[1]) <= self.layers[1]
        return True

    def rank(self, target: str) -> int:
        """Of the adapter beside a projection, by the last part of its name; 0: it has none."""
        return self.lora.rank if self.lora is not None and target in self.lora.targets else 0

    def __str__(self) -> str:
        """As `parse_train` reads it."""
        if (lora := self.lora) is not None:
            said = [f"r={lora.rank}", f"alpha={lora.alpha:g}"]
            said += [f"dropout={lora.dropout:g}"] if lora.dropout else []
            said += [f"targets={'+'.join(lora.targets)}"] if lora.targets != TARGETS else []
            return f"lora:{','.join(said)}"
        if self.layers is not None:
            return f"layers:{self.layers[0]}-{self.layers[1]}"
        return f"names:{','.join(self.names)}" if self.names else "all"


ALL = Train()


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is a factor of an adapter."""
    return any(f".{factor}." in name for factor in ADAPTERS)


def training(train: "str | Train | None", base: Base | None, gradient_dtype: Dtype | None = None) -> dict[str, Any]:
    """The fields of `Semantics` that say what is trained, as a file has them; nothing of what nobody named. Gradients of adapters
    are fp32 if nobody says otherwise, as adapters are."""
    found = parse_train(train) if isinstance(train, str) else train or Train()
    dtype = gradient_dtype or ("fp32" if found.lora is not None else None)
    fields = {"train": None if train is None else asdict(found), "base": base, "gradient_dtype": dtype}
    return {name: value for name, value in fields.items() if value is not None}


_HOW = "write all, lora, lora:r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj, names:*.norm.weight or layers:20-31"


def parse_train(text: str) -> Train:
    """What a user says of it, in a word or with details; PlanError for anything else."""
    word, _, rest = text.strip().partition(":")
    match word:
        case "all" if not rest:
            return Train()
        case "lora":
            return Train(lora=_parse_lora(rest))
        case "names" if rest:
            return Train(names=tuple(dict.fromkeys(name.strip() for name in rest.split(",") if name.strip())))
        case "layers" if found := re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", rest):
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                raise PlanError(f"--train {text[:80]}: layer {last} comes before layer {first}")
            return Train(layers=(first, last))
    raise PlanError(f"--train {text[:80]!r} is not understood; {_HOW}")


def _parse_lora(text: str) -> Lora:
    values = dict[str, str]()
    for part in filter(None, text.split(",")):
        key, is_given, value = part.partition("=")
        if not is_given or key not in ("r", "alpha", "dropout", "targets") or key in values:
            raise PlanError(f"--train lora: {part[:40]!r} is not understood; {_HOW}")
        values[key] = value
    try:
        rank = int(values.get("r", "16"))
        alpha, dropout = float(values.get("alpha", 2 * rank)), float(values.get("dropout", "0"))
    except ValueError:
        raise PlanError(f"--train lora:{text[:80]}: r is a whole number, alpha and dropout are numbers; {_HOW}") from None
    targets = tuple(dict.fromkeys(values["targets"].split("+"))) if "targets" in values else TARGETS
    return checked_lora(rank, alpha, dropout, targets)


def checked_lora(rank: int, alpha: float, dropout: float, targets: tuple[str, ...]) -> Lora:
    """An adapter of these sizes, its targets in the order of layers; PlanError where there can be none."""
    if not 0 < rank <= 2**16:
        raise PlanError(f"an adapter's rank is {rank}; it must be a whole number above zero")
    if not 0 < alpha < 2**20:
        raise PlanError(f"an adapter's alpha is {alpha:g}; it must be above zero")
    if not 0 <= dropout < 1:
        raise PlanError(f"an adapter's dropout is {dropout:g}; it must be 0 or more, and less than 1")
    if odd := [target for target in targets if target not in TARGETS]:
        raise PlanError(f"no projection of a layer is called {odd[0][:60]!r}; targets are {', '.join(TARGETS)}")
    if not targets:
        raise PlanError(f"an adapter has no targets; name some of {', '.join(TARGETS)}")
    return Lora(rank, alpha, dropout, tuple(target for target in TARGETS if target in targets))
