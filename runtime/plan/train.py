"""Trained weights: all, adapters (LoRA), by name, or by layer; other weights are frozen."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from penstock.runtime.errors import PlanError
from penstock.runtime.units import on_one_line

from .objective import SCORE
from .packed import Base
from .workload import FILE, OF_LAYER, Dtype, Natural


def _compiled(target: str) -> str:
    try:
        re.compile(target)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return target


# End of a linear layer's name, or an expression in slashes for whole names, as in PEFT
Target = Annotated[str, Field(max_length=1000, pattern=r"^(?:[\w.-]+|/.+/)$"), AfterValidator(_compiled)]
ALL_LINEAR = "all-linear"  # every linear layer of the decoder
EXPERTS = "experts"  # both stacks of a layer's experts, which are no linear layers
# Names that PEFT reads as a layer's experts, in a model that has experts, wherever they are
IN_EXPERTS = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of most models, in the order of layers
# Stacked weights of a layer's experts
STACK = re.compile(r"(?:^|\.)((?:mlp|feed_forward|block_sparse_moe)\.experts)\.(?:gate_up_proj|down_proj)$")
ADAPTERS = ("lora_A", "lora_B")  # the two factors, as named in adapter files
IN_PROJECTOR = re.compile(r"(?:^|\.)(?:multi_modal_projector|connector|visual\.merger)\.")  # of vision-language models
Name = Annotated[str, Field(max_length=200, pattern=r"^[^\s]+$")]


@dataclass(frozen=True, slots=True)
class Lora:
    """y = x W^T + alpha/rank (dropout(x) A^T) B^T for each target, with A (rank, in) and B (out, rank). For a stack of E
    experts: A (E rank, in) with experts outermost, B (out, rank E) with experts innermost."""

    rank: Annotated[int, Field(gt=0, le=2**16)] = 16
    alpha: Annotated[float, Field(gt=0, lt=2**20)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = (ALL_LINEAR,)
    rslora: bool = False  # scale alpha / sqrt(rank) instead (rank-stabilised LoRA)
    __pydantic_config__ = FILE

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, module: str) -> bool:
        """True if the linear layer with this name in the model is a target."""
        return any(is_selected(module, target) for target in self.targets)


_LORA = TypeAdapter(Lora)


@dataclass(frozen=True, slots=True)
class Train:
    lora: Lora | None = None
    names: tuple[Name, ...] = ()  # of parameters, with `*` as a wildcard
    layers: tuple[Natural, Natural] | None = None  # first and last, from 0 as in names
    projector: bool = False  # of a vision-language model, too (with lora by adapters); without the other fields it alone

    def __post_init__(self) -> None:
        if (self.lora is not None) + bool(self.names) + (self.layers is not None) > 1:
            raise PlanError("train takes one of lora, names and layers")

    @property
    def all(self) -> bool:
        return self == Train() or self.names == _EVERY

    def trains(self, name: str) -> bool:
        if self.lora is not None:
            return is_adapter(name) or name == SCORE
        if IN_PROJECTOR.search(name):
            return self.projector
        if self.names:
            return any(fnmatchcase(name, pattern) for pattern in self.names)
        if self.layers is not None:
            layer = OF_LAYER.match(name)
            return layer is not None and self.layers[0] <= int(layer[1]) <= self.layers[1]
        return not self.projector

    def __str__(self) -> str:
        """Return text for `parse_train`."""
        if self.projector:
            decoder = "all" if self.names == _EVERY else str(replace(self, projector=False))
            return PROJECTOR if self == Train(projector=True) else f"{decoder},{PROJECTOR}"
        if (lora := self.lora) is not None:
            options = [f"r={lora.rank}", f"alpha={lora.alpha:g}"]
            options += [f"dropout={lora.dropout:g}"] if lora.dropout else []
            options += ["rslora"] if lora.rslora else []
            options += [f"targets={'+'.join(lora.targets)}"] if lora.targets not in ((ALL_LINEAR,), TARGETS) else []
            return f"lora:{','.join(options)}"
        if self.layers is not None:
            return f"layers:{self.layers[0]}-{self.layers[1]}"
        return f"names:{','.join(self.names)}" if self.names else "all"


ALL = Train()
PROJECTOR, _EVERY = "projector", ("*",)


def is_selected(module: str, target: str) -> bool:
    """True if a target selects the linear layer `module`: by the end of its name, or by an expression for all of it."""
    if _is_expression(target):
        return re.fullmatch(target[1:-1], module) is not None
    return target == ALL_LINEAR or f".{module}".endswith(f".{target}")


def last_part(module: str) -> str:
    """Last part of a module's name, and the part before a number: `q_proj`, or `ffn.0`."""
    return re.search(r"[^.]+(?:\.[0-9]+)*$", module)[0]  # type: ignore[index]


def in_order(targets: Iterable[str]) -> tuple[str, ...]:
    """Sort targets: in the order of layers, others by name, experts, an expression."""
    usual = {target: i for i, target in enumerate(TARGETS)}
    return tuple(sorted({*targets}, key=lambda t: (_is_expression(t), t == EXPERTS, usual.get(t, len(usual)), t)))


def _is_expression(target: str) -> bool:
    return len(target) > 2 and target[0] == target[-1] == "/"


def is_adapter(name: str) -> bool:
    return any(f".{factor}." in name for factor in ADAPTERS)


def training(train: "str | Train | None", base: Base | None, gradient_dtype: Dtype | None = None) -> dict[str, Any]:
    """Return the given fields of `Semantics` for trained weights, as in a file. Gradients of adapters default to fp32."""
    parsed = parse_train(train) if isinstance(train, str) else train or Train()
    dtype = gradient_dtype or ("fp32" if parsed.lora is not None else None)
    fields = {"train": None if train is None else asdict(parsed), "base": base, "gradient_dtype": dtype}
    return {name: value for name, value in fields.items() if value is not None}


_HOW = (
    "write all, lora, lora:r=16,alpha=32,dropout=0.05,rslora,targets=q_proj+v_proj, names:*.norm.weight, layers:20-31, or projector"
)


def parse_train(text: str) -> Train:
    """Parse `lora:r=16` and the like; with `,projector` at the end the projector is trained, too. PlanError for other texts."""
    decoder, comma, end = text.strip().rpartition(",")
    if comma and end.strip() == PROJECTOR:
        train = parse_train(decoder)
        return replace(train, names=_EVERY if train.all else train.names, projector=True)
    word, _, rest = text.strip().partition(":")
    match word:
        case "projector" if not rest:
            return Train(projector=True)
        case "all" if not rest:
            return Train()
        case "lora":
            return Train(lora=_parse_lora(rest))
        case "names" if rest:
            return Train(names=tuple(dict.fromkeys(name.strip() for name in rest.split(",") if name.strip())))
        case "layers" if match := re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", rest):
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise PlanError(f"--train {text[:80]}: layer {last} comes before layer {first}")
            return Train(layers=(first, last))
    raise PlanError(f"--train {text[:80]!r} is not understood; {_HOW}")


def _parse_lora(text: str) -> Lora:
    """Parse `r=16,alpha=32`; alpha defaults to twice the rank. An expression is last: `r=8,targets=/.*_proj/`."""
    text, slash, expression = text.partition("/")
    pairs = [part.partition("=")[::2] for part in text.split(",") if part]
    fields: dict[str, Any] = dict(pairs)
    is_odd = len(fields) < len(pairs) or not fields.keys() <= {"r", "alpha", "dropout", "targets", "rslora"}
    if is_odd or fields.get("rslora") or (slash and not re.search(r"\btargets=(?:[^,]*\+)?$", text)):
        raise PlanError(f"--train lora:{(text + slash + expression)[:80]} is not understood; {_HOW}")
    if "r" in fields:
        fields["rank"] = fields.pop("r")
    if "rslora" in fields:
        fields["rslora"] = True
    if "targets" in fields:
        names = fields["targets"].removesuffix("+") if slash else fields["targets"]
        fields["targets"] = [*(names.split("+") if names or not slash else []), *([slash + expression] if slash else [])]
    lora = checked_lora(**fields)
    return lora if "alpha" in fields else replace(lora, alpha=2.0 * lora.rank)


def checked_lora(**fields: object) -> Lora:
    """Validate an adapter's fields, numbers or texts, and sort its targets; raise PlanError if one is invalid."""
    try:
        lora = _LORA.validate_python(fields, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where, value = ".".join(map(str, first["loc"])), on_one_line(str(first["input"]), 60)
        raise PlanError(f"an adapter's {where} is {value}; {first['msg'].removeprefix('Value error, ').lower()}") from None
    return replace(lora, targets=in_order(lora.targets))
