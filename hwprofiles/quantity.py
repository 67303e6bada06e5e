"""Quantity of a profile: a number with its spread and the source that it rests on."""

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
Day = Annotated[str, AfterValidator(lambda text: date.fromisoformat(text).isoformat())]


class Part(BaseModel):
    """Frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Share(Part):
    """A number in the unit of its key, how far it may be off, and where it comes from; it may be zero."""

    value: Annotated[float, Field(ge=0, le=1e30)]
    spread_fraction: Annotated[float, Field(ge=0, le=10)]
    source: Text


class Quantity(Share):
    """A number above zero."""

    value: Annotated[float, Field(ge=1e-15, le=1e30)]


class Source(Part):
    """Where numbers come from. Only what `penstock probe` measured is `measured`."""

    kind: SourceKind
    detail: Text
    date: Day | None
    device: Text | None  # that was measured; None: none was, or many
    driver: Text | None
    scaled: bool = False  # another device's than the profile's, by a ratio from datasheets or single measurements

    @model_validator(mode="after")
    def _names_what_was_measured(self) -> "Source":
        if self.kind == "measured" and self.device is None:
            raise ValueError("measured, but on no device; name it, or say that it is assumed")
        return self

    @property
    def basis(self) -> Basis:
        """What a number with this source rests on."""
        if self.kind in ("assumed", "datasheet"):
            return "assumptions"
        return "this device" if self.kind == "user" or (self.device is not None and not self.scaled) else "another device"


def quantities(place: str, part: object) -> Iterator[tuple[str, Share]]:
    """The quantities below a part of a profile, each with its place."""
    match part:
        case Share():
            yield place, part
        case BaseModel():
            for key in type(part).model_fields:
                yield from quantities(f"{place}.{key}".lstrip("."), getattr(part, key))
        case dict() | tuple():
            for i, item in part.items() if isinstance(part, dict) else enumerate(part):
                yield from quantities(f"{place}.{i}", item)
