"""What does a hardware profile hold?

A profile is JSON. Every number is a quantity: a value in the unit that its key names, a spread (half the width, as a
fraction of the value, that covers about 80 % of what one would see), and the key of the source it rests on. Rates over
size are curves of measured points; between points they are interpolated in log space, so that more work takes longer.
Outside the points the nearest one holds, and the answer says that it was outside.
"""

import difflib
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.errors import ProfileError
from runtime.units import MiB, show_bytes

FOLDER = Path(__file__).parent / "profiles"
MAX_PROFILE_FILE_BYTES = 8 * MiB
SOURCE_KINDS = ("measured", "fitted", "published", "datasheet", "assumed", "user")

Dtype = Literal["bf16", "fp32"]
Direction = Literal["h2d", "d2h"]
Text = Annotated[str, Field(min_length=1, max_length=2000)]
Size = Annotated[int, Field(gt=0, lt=2**53)]


def _iso_date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("not a date; write YYYY-MM-DD") from None


Day = Annotated[str, AfterValidator(_iso_date)]


class Part(BaseModel):
    """Frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Quantity(Part):
    """A number above zero in the unit of its key, how far it may be off, and where it comes from."""

    value: Annotated[float, Field(ge=1e-15, le=1e30)]
    spread_fraction: Annotated[float, Field(ge=0, le=10)]
    source: Text


class Share(Part):
    """A quantity that may be zero."""

    value: Annotated[float, Field(ge=0, le=1e30)]
    spread_fraction: Annotated[float, Field(ge=0, le=10)]
    source: Text


class Source(Part):
    """Where numbers come from. Only what `penstock probe` measured is `measured`."""

    kind: Literal["measured", "fitted", "published", "datasheet", "assumed", "user"]
    detail: Text
    date: Day | None
    device: Text | None
    driver: Text | None


class MatmulPoint(Part):
    """Rate of (m, k) @ (k, n), one multiply and one add per inner step."""

    m: Size
    k: Size
    n: Size
    flop_per_s: Quantity


class AttentionPoint(Part):
    """Rate of causal attention; FLOP count the causal half, the backward pass 2.5 times the forward's."""

    seq_len: Size
    head_dim: Size
    forward_flop_per_s: Quantity
    backward_flop_per_s: Quantity


class Device(Part):
    """What computes: a GPU, or the cores of a CPU that the gpu lane uses, with its own arena."""

    name: Text
    kind: Literal["cuda", "cpu"]
    memory_bytes: Quantity
    context_bytes: Share
    memory_bytes_per_s: Quantity
    kernel_overhead_s: Quantity
    op_overhead_s: Quantity
    compute_threads: Size | None
    matmul: dict[Dtype, tuple[MatmulPoint, ...]]
    attention: dict[Dtype, tuple[AttentionPoint, ...]]


class CopyPoint(Part):
    """Rate of one copy of n_bytes, the latency not counted."""

    n_bytes: Size
    rate: Quantity


class CopyCurve(Part):
    """One direction of the link: seconds = latency_s + n_bytes / rate."""

    latency_s: Quantity
    bytes_per_s: tuple[CopyPoint, ...]
    pageable_bytes_per_s: Quantity


class Link(Part):
    """What moves bytes between host and device memory."""

    h2d: CopyCurve
    d2h: CopyCurve
    duplex_bytes_per_s: Quantity
    host_cores_per_copy: Share
    dram_bytes_per_byte: Annotated[float, Field(ge=0, le=100)]


class OptimizerPoint(Part):
    """AdamW over fp32 masters, gradients widened, compute weights written out; alone and while both links are busy."""

    threads: Size
    params_per_s: Quantity
    params_per_s_under_copies: Quantity


class Host(Part):
    """What holds the training state and updates it."""

    memory_bytes: Quantity
    runtime_bytes: Quantity
    n_cores: Size
    dram_bytes_per_s: Quantity
    optimizer: tuple[OptimizerPoint, ...]
    reduce_bytes_per_s: Quantity
    page_fault_bytes_per_s: Quantity


class Price(Part):
    """What the machine costs, on a day."""

    usd_per_hour: Quantity | None
    ram_usd_per_gb: Quantity | None
    date: Day | None


class Rate(NamedTuple):
    """A rate between measured points, or clamped to the nearest one outside of them."""

    value: float
    inside_measured: bool


class Profile(Part):
    """A machine: what it can do, and how we know."""

    format_version: Literal[1]
    name: Text
    summary: Text
    sources: dict[str, Source]
    device: Device
    link: Link
    host: Host
    price: Price

    @model_validator(mode="after")
    def _is_whole(self) -> "Profile":
        for key, quantity in self.quantities():
            if quantity.source not in self.sources:
                raise ValueError(f"{key}: source {quantity.source!r} is not in `sources`; add it there")
        for dtype in get_args(Dtype):
            for grid in ("matmul", "attention"):
                if not getattr(self.device, grid).get(dtype):
                    raise ValueError(f"device.{grid}.{dtype}: no point; give at least one")
            _check_rising(_matmul_rows(self, dtype), 2, f"device.matmul.{dtype}")
            for backward in (False, True):
                _check_rising(_attention_rows(self, dtype, backward), 2, f"device.attention.{dtype}")
        for direction, curve in (("h2d", self.link.h2d), ("d2h", self.link.d2h)):
            _check_curve(curve.bytes_per_s, f"link.{direction}.bytes_per_s")
        threads = [p.threads for p in self.host.optimizer]
        if not threads or threads != sorted(set(threads)):
            raise ValueError("host.optimizer: give at least one point, with `threads` rising")
        return self

    @staticmethod
    def from_json(fields: dict[str, Any], where: str = "profile") -> "Profile":
        """The profile that `to_json` wrote; ProfileError names the first thing wrong with it in one line."""
        try:
            return Profile.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            raise ProfileError(f"{_plain(where)}: {_explain(error)}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ProfileError(f"{_plain(where)}: not JSON ({_plain(str(error))}); make it again with `penstock probe`") from None

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values."""
        return self.model_dump(mode="json")

    def with_memory(self, device_memory_bytes: int | None, host_memory_bytes: int | None) -> "Profile":
        """The same machine with other memory sizes, as its user gave them; None leaves one as it is."""
        fields = self.to_json()
        for place, n_bytes in (("device", device_memory_bytes), ("host", host_memory_bytes)):
            if n_bytes is None:
                continue
            if n_bytes <= 0:
                raise ProfileError(f"{place} memory of {n_bytes} bytes is not a size above zero; write for example 24GiB")
            key = f"user_{place}_memory"
            fields[place]["memory_bytes"] = {"value": float(n_bytes), "spread_fraction": 0.0, "source": key}
            detail = f"{place} memory of {show_bytes(n_bytes)} as given by the user"
            fields["sources"][key] = {"kind": "user", "detail": detail, "date": None, "device": None, "driver": None}
        return Profile.from_json(fields, self.name)

    def quantities(self) -> Iterator[tuple[str, Quantity | Share]]:
        """Every quantity with its place, for example `link.h2d.latency_s`."""
        return _quantities("", self)

    def count_sources(self) -> dict[str, int]:
        """How many quantities rest on each kind of source; every kind is named, also at zero."""
        counts: Counter[str] = Counter(self.sources[q.source].kind for _, q in self.quantities())
        return {kind: counts[kind] for kind in SOURCE_KINDS}

    def matmul_flop_per_s(self, dtype: Dtype, m: int, k: int, n: int) -> Rate:
        """Rate of (m, k) @ (k, n), interpolated over (m, sqrt(k n)): products of equal m and k n cost the same."""
        return _interpolated(_matmul_rows(self, dtype), m, math.sqrt(k * n))

    def attention_flop_per_s(self, dtype: Dtype, seq_len: int, head_dim: int, backward: bool) -> Rate:
        """Rate of causal attention, of the backward pass if asked."""
        return _interpolated(_attention_rows(self, dtype, backward), head_dim, seq_len)

    def copy_s(self, direction: Direction, n_bytes: float) -> float:
        """Seconds of one pinned copy with nothing else on the link."""
        curve = self.link.h2d if direction == "h2d" else self.link.d2h
        return curve.latency_s.value + n_bytes / self.copy_bytes_per_s(direction, n_bytes)

    def copy_bytes_per_s(self, direction: Direction, n_bytes: float) -> float:
        """Rate of one pinned copy of this size, the latency not counted."""
        curve = self.link.h2d if direction == "h2d" else self.link.d2h
        return _along([(p.n_bytes, p.rate.value) for p in curve.bytes_per_s], max(n_bytes, 1.0))

    def optimizer_params_per_s(self, threads: float, under_copies: bool = False) -> float:
        """Parameters updated per second by so many threads; fewer than measured: in proportion; more: no faster."""
        curve = [
            (float(p.threads), (p.params_per_s_under_copies if under_copies else p.params_per_s).value) for p in self.host.optimizer
        ]
        return _along(curve, threads) * min(1.0, threads / curve[0][0])


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with penstock."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the one in that file; ProfileError says in one line what is wrong."""
    shipped = shipped_profiles()
    path = FOLDER / f"{name_or_path}.json" if name_or_path in shipped else Path(name_or_path)
    where = _plain(name_or_path)
    try:
        if not path.exists():
            near = difflib.get_close_matches(name_or_path, shipped, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ProfileError(f"no machine {where!r}: {meant}shipped are {', '.join(shipped)}; or give a file of `penstock probe`")
        if path.stat().st_size > MAX_PROFILE_FILE_BYTES:
            raise ProfileError(f"{where}: larger than any profile; give a file written by `penstock probe -o`")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{where}: cannot be read ({error.strerror}); make one with `penstock probe -o FILE`") from None
    except ProfileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where}: not JSON ({_plain(str(error))}); make it again with `penstock probe -o FILE`") from None
    if not isinstance(fields, dict):
        raise ProfileError(f"{where}: not a profile but a JSON {type(fields).__name__}; make one with `penstock probe -o FILE`")
    return Profile.from_json(fields, name_or_path)


Row = tuple[float, list[tuple[float, float]]]  # at this x, the (y, rate) points by rising y


def _matmul_rows(profile: Profile, dtype: Dtype) -> list[Row]:
    return _rows((p.m, math.sqrt(p.k * p.n), p.flop_per_s.value) for p in profile.device.matmul[dtype])


def _attention_rows(profile: Profile, dtype: Dtype, backward: bool) -> list[Row]:
    points = profile.device.attention[dtype]
    return _rows((p.head_dim, p.seq_len, (p.backward_flop_per_s if backward else p.forward_flop_per_s).value) for p in points)


def _rows(points: Iterator[tuple[float, float, float]]) -> list[Row]:
    """Points grouped by x; several at the same (x, y), as tall and wide products of one width, become their geometric mean."""
    rows: dict[float, dict[float, list[float]]] = {}
    for x, y, rate in points:
        rows.setdefault(x, {}).setdefault(y, []).append(math.log(rate))
    return [(x, [(y, math.exp(sum(logs) / len(logs))) for y, logs in sorted(row.items())]) for x, row in sorted(rows.items())]


def _interpolated(rows: list[Row], x: float, y: float) -> Rate:
    """Log-linear along y in the rows around x, then between the two rows; the nearest point outside."""
    value = _along([(row_x, _along(row, y)) for row_x, row in rows], x)
    near = [row for row_x, row in rows if row_x in _around([r[0] for r in rows], x)]
    inside = rows[0][0] <= x <= rows[-1][0] and all(row[0][0] <= y <= row[-1][0] for row in near)
    return Rate(value, inside)


def _around(xs: Sequence[float], x: float) -> tuple[float, float]:
    """The two neighbours that x lies between; twice the same one where x is one of them or outside."""
    if x in xs:
        return x, x
    i = bisect_right(xs, x)
    return xs[max(i - 1, 0)], xs[min(i, len(xs) - 1)]


def _along(points: Sequence[tuple[float, float]], x: float) -> float:
    """Log-linear interpolation of (x, value) points by rising x; the end value outside."""
    i = bisect_right([p[0] for p in points], x)
    if i == 0 or i == len(points):
        return points[max(i - 1, 0)][1]
    (x0, v0), (x1, v1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(v0) + share * math.log(v1))


def _check_rising(rows: list[Row], y_power: int, where: str) -> None:
    """More work takes longer, along every row and from row to row: log-linear interpolation keeps what its corners hold."""
    for x, row in rows:
        for (y0, rate0), (y1, rate1) in pairwise(row):
            if y1**y_power / rate1 <= y0**y_power / rate0:
                raise ValueError(f"{where}: more work takes less time between {y0:.6g} and {y1:.6g} at {x:.6g}; measure again")
    ys = sorted({y for _, row in rows for y, _ in row})
    for (x0, row0), (x1, row1) in pairwise(rows):
        for y in ys:
            if x1 / _along(row1, y) <= x0 / _along(row0, y):
                raise ValueError(f"{where}: more work takes less time between {x0:.6g} and {x1:.6g} at {y:.6g}; measure again")


def _check_curve(points: tuple[CopyPoint, ...], where: str) -> None:
    if not points:
        raise ValueError(f"{where}: no point; give at least one")
    for p0, p1 in pairwise(points):
        if p1.n_bytes <= p0.n_bytes:
            raise ValueError(f"{where}: {p1.n_bytes} bytes after {p0.n_bytes}; sort the points by n_bytes")
        if p1.n_bytes / p1.rate.value <= p0.n_bytes / p0.rate.value:
            raise ValueError(f"{where}: {p1.n_bytes} bytes take less time than {p0.n_bytes}; measure again")


def _quantities(place: str, part: object) -> Iterator[tuple[str, Quantity | Share]]:
    match part:
        case Quantity() | Share():
            yield place.lstrip("."), part
        case BaseModel():
            for key in type(part).model_fields:
                yield from _quantities(f"{place}.{key}", getattr(part, key))
        case dict():
            for key, item in part.items():
                yield from _quantities(f"{place}.{key}", item)
        case tuple():
            for i, item in enumerate(part):
                yield from _quantities(f"{place}.{i}", item)
        case _:
            pass


def _explain(error: ValidationError) -> str:
    """One line: the key, what is wrong with it, and what to do. A misspelled key is worth more than the one it leaves missing."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    *parents, key = first["loc"] or ("",)
    place = _plain(".".join(map(str, first["loc"])))
    match first["type"]:
        case "extra_forbidden":
            fields = _fields_at(parents)
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.4)
            return f"{place}: unknown key; write {(near or [' or '.join(fields)])[0]}"
        case "missing":
            return f"{place}: missing; add it, with its unit as named, or make the profile again with `penstock probe`"
        case "value_error":
            return _plain(first["msg"].removeprefix("Value error, ")) if not first["loc"] else f"{place}: {_plain(first['msg'])}"
        case _:
            return f"{place}: {_plain(first['msg'])}; correct it, in the unit of its name"


def _fields_at(place: Sequence[int | str]) -> list[str]:
    """Names of the keys that belong at a place in a profile."""
    here: Any = Profile
    for key in place:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[str(key)].annotation
        else:
            here = get_args(here)[0] if get_origin(here) is tuple else get_args(here)[-1]
        if get_origin(here) is UnionType:
            here = get_args(here)[0]
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _plain(text: str) -> str:
    """Text that fits on a line of a terminal, whatever a file holds."""
    return "".join(c if c.isprintable() else " " for c in text)[:200]
