"""Quantities of a profile: a number with its spread and its source."""

from collections.abc import Iterator
from datetime import date
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SourceKind = Literal["measured", "fitted", "published", "datasheet", "assumed", "user"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
Basis = Literal["this device", "another device", "assumptions"]
BASES: tuple[Basis, ...] = get_args(Basis)
Dtype = Literal["bf16", "fp32"]
Text = Annotated[str, Field(min_length=1, max_length=2000)]
Size = Annotated[int, Field(gt=0, lt=2**53)]
Positive = Annotated[float, Field(ge=1e-15, le=1e30)]
Day = Annotated[str, AfterValidator(lambda text: date.fromisoformat(text).isoformat())]


class Part(BaseModel):
    """Base of the profile's models: frozen, strict, rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Share(Part):
    """A number at or above zero in the unit of its key, its relative uncertainty, and the name of its source."""

    value: Annotated[float, Field(ge=0, le=1e30)]
    spread_fraction: Annotated[float, Field(ge=0, le=10)]
    source: Text


class Quantity(Share):
    """A `Share` above zero."""

    value: Positive


class Money(Quantity):
    """A price, and the lowest and highest published one; None: one figure, or not known."""

    low: Positive | None = None
    high: Positive | None = None

    @model_validator(mode="after")
    def _is_in_its_range(self) -> "Money":
        if not self.ends[0] <= self.value <= self.ends[1]:
            raise ValueError(f"{self.value:g} is not between low and high, {self.ends[0]:g} and {self.ends[1]:g}")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """The published range; otherwise the value with its spread in both directions."""
        least, largest = self.value * max(0.0, 1 - self.spread_fraction), self.value * (1 + self.spread_fraction)
        return (least if self.low is None else self.low), (largest if self.high is None else self.high)


class Source(Part):
    """Provenance of numbers. Only results of `penstock probe` have the kind `measured`."""

    kind: SourceKind
    detail: Text
    date: Day | None
    device: Text | None  # measured device; None: no device, or many
    driver: Text | None
    scaled: bool = False  # measured on another device than the profile's, scaled by a ratio from datasheets or measurements

    @model_validator(mode="after")
    def _names_what_was_measured(self) -> "Source":
        if self.kind == "measured" and self.device is None:
            raise ValueError("measured, but without a device; add `device`, or set `kind` to assumed")
        return self

    @property
    def basis(self) -> Basis:
        """Basis of the numbers of this source."""
        if self.kind in ("assumed", "datasheet"):
            return "assumptions"
        return "this device" if self.kind == "user" or (self.device is not None and not self.scaled) else "another device"


def quantities(place: str, part: object) -> Iterator[tuple[str, Share]]:
    """Yield the quantities in this part of a profile with their keys, for example `link.h2d.latency_s`."""
    match part:
        case Share():
            yield place, part
        case BaseModel():
            for key in type(part).model_fields:
                yield from quantities(f"{place}.{key}".lstrip("."), getattr(part, key))
        case dict() | tuple():
            for i, item in part.items() if isinstance(part, dict) else enumerate(part):
                yield from quantities(f"{place}.{i}", item)
