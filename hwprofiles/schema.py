"""What does a hardware profile hold?

A profile is JSON. Every number is a quantity: a value in the unit that its key names, a spread (half the width, as a
fraction of the value, that covers about 80 % of what one would see), and the key of the source it rests on. Rates over
size are measured points; `curves.py` says what holds between them.
"""

import difflib
import errno
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.errors import ProfileError
from runtime.files import read_whole
from runtime.units import MiB, show_bytes

from .curves import Rate, Row, along, check_rising, interpolated, rows_of
from .refusal import explain, plain

FOLDER = Path(__file__).parent / "profiles"
MAX_PROFILE_FILE_BYTES = 8 * MiB

SourceKind = Literal["measured", "fitted", "published", "datasheet", "assumed", "user"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
Dtype = Literal["bf16", "fp32"]
Direction = Literal["h2d", "d2h"]
AttentionKernel = Literal["flash", "cudnn"]
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
    """Where numbers come from. Only what `penstock probe` measured, or read from nvbandwidth, is `measured`."""

    kind: SourceKind
    detail: Text
    date: Day | None
    device: Text | None
    driver: Text | None

    @model_validator(mode="after")
    def _names_what_was_measured(self) -> "Source":
        if self.kind == "measured" and self.device is None:
            raise ValueError("measured, but on no device; name it, or say that it is assumed")
        return self


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
    """What computes: a GPU, or the cores of a CPU that the gpu lane uses, with its own arena.

    `attention` is of torch's own kernels (FlashAttention in bf16, the memory-efficient one in fp32); `cudnn_attention` of cuDNN's,
    in the dtypes that it has them for. None: not measured.
    """

    name: Text
    kind: Literal["cuda", "cpu"]
    memory_bytes: Quantity
    context_bytes: Share
    memory_bytes_per_s: Quantity
    kernel_overhead_s: Quantity
    op_overhead_s: Quantity
    compute_threads: Size | None
    workspace_bytes: Share | None = None  # what kernels and libraries take beside the context once they have been used
    matmul: dict[Dtype, tuple[MatmulPoint, ...]]
    attention: dict[Dtype, tuple[AttentionPoint, ...]]
    cudnn_attention: dict[Dtype, tuple[AttentionPoint, ...]] | None = None
    pool_bytes: Quantity | None = None  # soldered memory of which the device's and the host's are parts; None: each has its own


class CopyPoint(Part):
    """Rate of one copy of n_bytes, the latency not counted."""

    n_bytes: Size
    rate: Quantity


class CopyCurve(Part):
    """One direction of the link: seconds = latency_s + n_bytes / rate.

    Beside these, where they were measured: what it carries while the other direction is busy, and while the optimizer works.
    """

    latency_s: Quantity
    bytes_per_s: tuple[CopyPoint, ...]
    pageable_bytes_per_s: Quantity
    duplex_bytes_per_s: Quantity | None = None
    under_optimizer_bytes_per_s: Quantity | None = None


class Link(Part):
    """What moves bytes between host and device memory."""

    h2d: CopyCurve
    d2h: CopyCurve
    duplex_bytes_per_s: Quantity
    host_cores_per_copy: Share
    dram_bytes_per_byte: Annotated[float, Field(ge=0, le=100)]


class OptimizerPoint(Part):
    """AdamW over fp32 masters, gradients widened, weights rounded; alone and while both links are busy."""

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
    soldered_bytes: Quantity | None = None  # all that a run can have, where no module can be added


class Peers(Part):
    """The other devices of the host, each at work on its part of a step.

    `bytes_per_s`: what each sends, and receives at the same time, when all exchange something. `through_host`: by way of host
    memory, as where devices do not reach each other's.
    """

    n_devices: Size
    bytes_per_s: Quantity
    latency_s: Quantity
    through_host: bool = False


class Network(Part):
    """Between hosts. `bytes_per_s`: what each host sends, and receives at the same time, for all its devices when all exchange
    something; `latency_s`: from one host to the next. `n_hosts`: that share a step."""

    bytes_per_s: Quantity
    latency_s: Quantity
    n_hosts: Size = 1


class Price(Part):
    """What the machine costs, on a day: to rent, and to buy and feed. Host memory is bought beside it where it has a price."""

    usd_per_hour: Quantity | None
    usd: Quantity | None = None
    ram_usd_per_gb: Quantity | None
    watts: Quantity | None = None  # of the whole machine at work
    usd_per_kwh: Quantity | None = None  # None: an assumed one
    date: Day | None


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
    peers: Peers | None = None  # None: nobody said
    network: Network | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Profile":
        for key, quantity in self.quantities():
            if quantity.source not in self.sources:
                raise ValueError(f"{key}: source {quantity.source!r} is not in `sources`; add it there")
        for dtype in get_args(Dtype):
            for grid in ("matmul", "attention"):
                if not getattr(self.device, grid).get(dtype):
                    raise ValueError(f"device.{grid}.{dtype}: no point; give at least one")
            check_rising(_matmul_rows(self, dtype), 2, f"device.matmul.{dtype}")
            _check_attention(self.device.attention[dtype], f"device.attention.{dtype}")
        for dtype, points in (self.device.cudnn_attention or {}).items():
            _check_attention(points, f"device.cudnn_attention.{dtype}")
        for direction, curve in (("h2d", self.link.h2d), ("d2h", self.link.d2h)):
            _check_curve(curve.bytes_per_s, f"link.{direction}.bytes_per_s")
        self._holds_its_memory()
        threads = [p.threads for p in self.host.optimizer]
        if not threads or threads != sorted(set(threads)):
            raise ValueError("host.optimizer: give at least one point, with `threads` rising")
        return self

    def _holds_its_memory(self) -> None:
        """ValueError where more memory is given out than there is soldered."""
        device_bytes, host_bytes = self.device.memory_bytes.value, self.host.memory_bytes.value
        most = self.most_host_bytes
        if most is None or host_bytes <= most:
            return
        if (pool := self.device.pool_bytes) is not None:
            raise ValueError(
                f"{show_bytes(device_bytes)} for the device and {show_bytes(host_bytes)} for the host are more than the one pool "
                f"of {show_bytes(pool.value)} that they share; give --device-memory and --host-memory of no more in all"
            )
        said = f"host memory of {show_bytes(host_bytes)}, but {show_bytes(most)} are soldered and none can be added"
        raise ValueError(f"{said}; give --host-memory up to that")

    @property
    def most_host_bytes(self) -> int | None:
        """What the host's memory can be at most, beside that of the device; None: more can be bought."""
        if (pool := self.device.pool_bytes) is not None:
            return int(pool.value - self.device.memory_bytes.value)
        return None if self.host.soldered_bytes is None else int(self.host.soldered_bytes.value)

    @property
    def n_devices(self) -> int:
        """That the profile speaks of; there may be more where it says nothing of others."""
        return 1 if self.peers is None else self.peers.n_devices

    @property
    def n_hosts(self) -> int:
        """That share a step; each is as the profile says."""
        return 1 if self.network is None else self.network.n_hosts

    @property
    def meets_on_host(self) -> bool:
        """Whether devices that share a step reach each other by way of their one host alone, as far as anybody says."""
        return self.n_hosts == 1 and (self.peers is None or self.peers.through_host)

    @staticmethod
    def from_json(fields: dict[str, Any], where: str = "profile") -> "Profile":
        """The profile that `to_json` wrote; ProfileError names the first thing wrong with it in one line."""
        try:
            return Profile.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            raise ProfileError(f"{plain(where)}: {explain(error, Profile)}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ProfileError(f"{plain(where)}: not JSON ({plain(str(error))}); make it again with `penstock probe`") from None

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values."""
        return self.model_dump(mode="json")

    def with_memory(self, device_memory_bytes: int | None, host_memory_bytes: int | None) -> "Profile":
        """The same machine with memory sizes that its user gave; None leaves one as it is. ProfileError for zero or less, and for
        more than is soldered."""
        for place, n_bytes in (("device", device_memory_bytes), ("host", host_memory_bytes)):
            if n_bytes is not None and n_bytes <= 0:
                raise ProfileError(f"{place} memory of {n_bytes} bytes is not a size above zero; write for example 24GiB")
        return self._given(
            (place, "memory_bytes", n_bytes, f"{place} memory of {show_bytes(n_bytes)}")
            for place, n_bytes in (("device", device_memory_bytes), ("host", host_memory_bytes))
            if n_bytes is not None
        )

    def with_prices(self, **prices: float | None) -> "Profile":
        """The same machine at prices that its user gave, by the keys of `price`; None leaves one as it is. `usd`: of the whole."""
        given = {key: value for key, value in prices.items() if value is not None}
        return self._given(("price", key, value, f"{key} of {value:g}") for key, value in given.items())

    def _given(self, changes: Iterable[tuple[str, str, float, str]]) -> "Profile":
        """(part, key, value, what it is in words) of each quantity that the user gave."""
        fields = self.to_json()
        for part, key, value, words in changes:
            source = f"user_{part}_{key.removesuffix('_bytes')}"
            fields[part][key] = {"value": float(value), "spread_fraction": 0.0, "source": source}
            detail = f"{words} as given by the user"
            fields["sources"][source] = {"kind": "user", "detail": detail, "date": None, "device": None, "driver": None}
        return Profile.from_json(fields, self.name)

    def quantities(self) -> Iterator[tuple[str, Quantity | Share]]:
        """Every quantity with its place, for example `link.h2d.latency_s`."""
        return _quantities("", self)

    def count_sources(self) -> dict[str, int]:
        """How many quantities rest on each kind of source; every kind is named, also at zero."""
        counts: Counter[str] = Counter(self.sources[q.source].kind for _, q in self.quantities())
        return {kind: counts[kind] for kind in SOURCE_KINDS}

    def matmul_flop_per_s(self, dtype: Dtype, m: int, k: int, n: int) -> Rate:
        """FLOP/s of (m, k) @ (k, n), interpolated over (m, sqrt(k n)): products of equal m and k n cost the same."""
        return interpolated(_matmul_rows(self, dtype), m, math.sqrt(k * n))

    def attention_flop_per_s(
        self, dtype: Dtype, seq_len: int, head_dim: int, backward: bool, kernel: AttentionKernel = "flash"
    ) -> Rate:
        """FLOP/s of causal attention, of the backward pass if asked; FLOP as in `AttentionPoint`.

        Where that kernel was not measured in that dtype the other one's rate holds, and the answer says that it is outside.
        """
        cudnn = (self.device.cudnn_attention or {}).get(dtype) if kernel == "cudnn" else None
        rate = interpolated(_attention_rows(cudnn or self.device.attention[dtype], backward), head_dim, seq_len)
        return rate if cudnn or kernel == "flash" else Rate(rate.value, inside_measured=False)

    def copy_s(self, direction: Direction, n_bytes: float) -> float:
        """Seconds of one pinned copy with nothing else on the link."""
        return self._copies(direction).latency_s.value + n_bytes / self.copy_bytes_per_s(direction, n_bytes)

    def copy_bytes_per_s(self, direction: Direction, n_bytes: float) -> float:
        """Rate of one pinned copy of this size, the latency not counted."""
        return along([(p.n_bytes, p.rate.value) for p in self._copies(direction).bytes_per_s], max(n_bytes, 1.0))

    def _copies(self, direction: Direction) -> CopyCurve:
        return self.link.h2d if direction == "h2d" else self.link.d2h

    def optimizer_params_per_s(self, threads: float, under_copies: bool = False) -> float:
        """Parameters updated per second by `threads` of them; fewer than measured: in proportion; more: no faster."""
        curve = [
            (float(p.threads), (p.params_per_s_under_copies if under_copies else p.params_per_s).value) for p in self.host.optimizer
        ]
        return along(curve, threads) * min(1.0, threads / curve[0][0])


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with penstock."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the one in that file; ProfileError says in one line what is wrong."""
    shipped = shipped_profiles()
    path = FOLDER / f"{name_or_path}.json" if name_or_path in shipped else Path(name_or_path)
    where = plain(name_or_path)
    try:
        if not path.exists():
            asked = name_or_path.lower()
            of_one_first = sorted(shipped, key=lambda name: name[0].isdigit())
            near = [name for name in of_one_first if asked and asked in name][:3] or difflib.get_close_matches(asked, shipped, n=1)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ProfileError(f"no machine {where!r}: {meant}shipped are {', '.join(shipped)}; or give a file of `penstock probe`")
        fields = json.loads(read_whole(path, MAX_PROFILE_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ProfileError(f"{where}: larger than any profile; give a file written by `penstock probe -o`") from None
        raise ProfileError(f"{where}: cannot be read ({error.strerror}); make one with `penstock probe -o FILE`") from None
    except ProfileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where}: not JSON ({plain(str(error))}); make it again with `penstock probe -o FILE`") from None
    if not isinstance(fields, dict):
        raise ProfileError(f"{where}: not a profile but a JSON {type(fields).__name__}; make one with `penstock probe -o FILE`")
    return Profile.from_json(fields, name_or_path)


def _matmul_rows(profile: Profile, dtype: Dtype) -> list[Row]:
    return rows_of((p.m, math.sqrt(p.k * p.n), p.flop_per_s.value) for p in profile.device.matmul[dtype])


def _attention_rows(points: Sequence[AttentionPoint], backward: bool) -> list[Row]:
    return rows_of((p.head_dim, p.seq_len, (p.backward_flop_per_s if backward else p.forward_flop_per_s).value) for p in points)


def _check_attention(points: Sequence[AttentionPoint], where: str) -> None:
    if not points:
        raise ValueError(f"{where}: no point; give at least one")
    for backward in (False, True):
        check_rising(_attention_rows(points, backward), 2, where)


def _check_curve(points: tuple[CopyPoint, ...], where: str) -> None:
    """Points by rising size, and more bytes take longer; ValueError names the first two that do not."""
    if not points:
        raise ValueError(f"{where}: no point; give at least one")
    for p0, p1 in pairwise(points):
        if p1.n_bytes <= p0.n_bytes:
            raise ValueError(f"{where}: {p1.n_bytes} bytes after {p0.n_bytes}; sort the points by n_bytes")
        if p1.n_bytes / p1.rate.value <= p0.n_bytes / p0.rate.value:
            raise ValueError(f"{where}: {p1.n_bytes} bytes take less time than {p0.n_bytes}; measure again")


def _quantities(place: str, part: object) -> Iterator[tuple[str, Quantity | Share]]:
    """The quantities below a part of a profile, each with its place."""
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
