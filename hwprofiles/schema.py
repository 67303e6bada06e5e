"""Hardware profiles: rates, sizes and prices of a machine as JSON. Every number has a unit in its key, a spread and a source.

The spread is half the width of the 80 % interval, as a fraction of the value. Rates that depend on size are measured points, which
`curves.py` interpolates, or a law of `op_laws.py`.
"""

import errno
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, AliasChoices, Discriminator, Field, Tag, ValidationError, model_validator

from penstock.runtime.errors import ProfileError
from penstock.runtime.files import read_whole
from penstock.runtime.units import MiB, on_one_line, show_bytes

from .curves import Rate, Row, along, check_rising, interpolated, rows_of
from .op_laws import AttentionLaw, CollectiveLaw, ProductLaw
from .quantity import SOURCE_KINDS, Day, Dtype, Part, Quantity, Share, Size, Source, Text, quantities

FOLDER = Path(__file__).parent / "profiles"
MAX_PROFILE_FILE_BYTES = 8 * MiB

Direction = Literal["h2d", "d2h"]
AttentionKernel = Literal["flash", "cudnn", "fa3", "aiter"]  # `flash`: torch's FlashAttention-2; fp32: its memory-efficient kernel
NormKernel = Literal["torch-fused", "torch-compile"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
FORMAT_VERSION = 2
ITEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
FORMS = ("points", "law")  # pydantic tags of a rate over size; they are not keys in a file
BACKWARD_ATTENTION = 2.5  # FLOP of attention's backward over those of its forward in all rates: five products against two
# Relative rate of FlashAttention-2's deterministic backward: 166 of 290 TFLOP/s (Dao-AILab/flash-attention#1893, H100, head width
# 128, 8k tokens, causal); the default for devices without a measurement.
DETERMINISTIC_FRACTION = 0.57

_plain = partial(on_one_line, longest=200)  # makes text of a file safe for one terminal line


class MatmulPoint(Part):
    """Rate of (m, k) @ (k, n), which counts 2 m k n FLOP."""

    m: Size
    k: Size
    n: Size
    flop_per_s: Quantity
    clock_hz: float | None = None  # multiprocessor clock and power draw during the measurement; None: not reported by the driver
    watts: float | None = None


class AttentionPoint(Part):
    """Rate of causal attention. FLOP count the causal half; backward FLOP are 2.5 times the forward's."""

    seq_len: Size
    head_dim: Size
    forward_flop_per_s: Quantity
    backward_flop_per_s: Quantity
    clock_hz: float | None = None
    watts: float | None = None


class CopyPoint(Part):
    """Rate of one copy of n_bytes, latency subtracted."""

    n_bytes: Size
    rate: Quantity


class OptimizerPoint(Part):
    """Rate of AdamW on fp32 master weights: alone, during uploads at the full rate, and during copies in both directions."""

    threads: Size
    params_per_s: Quantity
    params_per_s_under_copies: Quantity
    params_per_s_under_uploads: Quantity | None = None  # None: not measured; the update shares host DRAM by counted bytes


def _matmul_rows(points: Sequence[MatmulPoint]) -> list[Row]:
    return rows_of((p.m, math.sqrt(p.k * p.n), p.flop_per_s.value) for p in points)


def _attention_rows(points: Sequence[AttentionPoint], backward: bool) -> list[Row]:
    return rows_of((p.head_dim, p.seq_len, (p.backward_flop_per_s if backward else p.forward_flop_per_s).value) for p in points)


def _rising(points: tuple[Any, ...]) -> tuple[Any, ...]:
    is_matmul = isinstance(points[0], MatmulPoint)
    for rows in [_matmul_rows(points)] if is_matmul else [_attention_rows(points, backward) for backward in (False, True)]:
        check_rising(rows, y_power=2)
    return points


def _sorted_by(key: str, points: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(getattr(following, key) <= getattr(point, key) for point, following in pairwise(points)):
        raise ValueError(f"sort the points by rising {key}")
    return points


def _rising_copies(points: tuple[CopyPoint, ...]) -> tuple[CopyPoint, ...]:
    check_rising([(1.0, [(p.n_bytes, p.rate.value) for p in _sorted_by("n_bytes", points)])], y_power=1)
    return points


def _in_both_dtypes(rates: dict[Any, Any]) -> dict[Any, Any]:
    """Check that rates by dtype, or by kernel and dtype, have every dtype (of the kernel `flash`)."""
    if missing := [dtype for dtype in get_args(Dtype) if dtype not in rates.get("flash", rates)]:
        raise ValueError(f"no {' and no '.join(missing)}; give points or a law for each")
    return rates


AtLeastOne = Field(min_length=1)
RISING, POINTS, LAW = AfterValidator(_rising), Tag(FORMS[0]), Tag(FORMS[1])
EITHER = Discriminator(lambda value: FORMS[not isinstance(value, list | tuple)])
Matmuls = Annotated[Annotated[tuple[MatmulPoint, ...], AtLeastOne, RISING, POINTS] | Annotated[ProductLaw, LAW], EITHER]
Attentions = Annotated[Annotated[tuple[AttentionPoint, ...], AtLeastOne, RISING, POINTS] | Annotated[AttentionLaw, LAW], EITHER]


class AttentionCall(NamedTuple):
    """Shape of an attention call; `grouped`: grouped-query attention."""

    dtype: Dtype
    seq_len: int
    head_dim: int
    grouped: bool
    causal: bool = True


class NormRates(Part):
    """Rates of a fused RMS norm: bytes of input and output per second. The backward counts twice the bytes of the forward."""

    forward_bytes_per_s: Quantity
    backward_bytes_per_s: Quantity


class Device(Part):
    """Compute device: a GPU, or the CPU cores of the gpu lane with a memory arena."""

    name: Text
    kind: Literal["cuda", "cpu"]
    memory_bytes: Quantity
    context_bytes: Share
    memory_bytes_per_s: Quantity
    eager_bytes_per_s: Quantity | None = None  # unfused pointwise modules, bytes of every call; None: `memory_bytes_per_s`
    fused_bytes_per_s: Quantity | None = None  # fused activation and rotary kernels; None: `memory_bytes_per_s`
    loss_bytes_per_s: Quantity | None = None  # passes of the fused loss over logits; None: `memory_bytes_per_s`
    unpack_bytes_per_s: Quantity | None = None  # dequantisation, bytes as in `plan/packed.py`; None: `memory_bytes_per_s`
    narrow_bytes_per_s: Quantity | None = None  # products with an adapter's rank as k or n; None: `memory_bytes_per_s`
    sustained_fraction: Quantity | None = None  # rate of products in a step over their burst rate; None: rates are a step's
    kernel_overhead_s: Quantity
    op_overhead_s: Quantity
    compute_threads: Size | None
    workspace_bytes: Share | None = None  # workspaces of kernels and libraries, without the context
    matmul: Annotated[dict[Dtype, Matmuls], AfterValidator(_in_both_dtypes)]
    attention: Annotated[dict[AttentionKernel, dict[Dtype, Attentions]], AfterValidator(_in_both_dtypes)]
    norms: dict[NormKernel, NormRates] = {}
    pool_bytes: Quantity | None = None  # unified memory that device and host share; None: separate memories


class CopyCurve(Part):
    """One direction of the link: seconds = latency_s + n_bytes / rate. Also rates under load, if measured."""

    latency_s: Quantity
    bytes_per_s: Annotated[tuple[CopyPoint, ...], AtLeastOne, AfterValidator(_rising_copies)]
    pageable_bytes_per_s: Quantity
    duplex_bytes_per_s: Quantity | None = None
    under_optimizer_bytes_per_s: Quantity | None = None


class Link(Part):
    """Link between host and device memory."""

    h2d: CopyCurve
    d2h: CopyCurve
    duplex_bytes_per_s: Quantity
    host_cores_per_copy: Share
    dram_bytes_per_byte: Annotated[float, Field(ge=0, le=100)]


class Host(Part):
    """Host: stores and updates the training state."""

    memory_bytes: Quantity
    runtime_bytes: Quantity
    n_cores: Size
    dram_bytes_per_s: Quantity
    optimizer: Annotated[tuple[OptimizerPoint, ...], AtLeastOne, AfterValidator(partial(_sorted_by, "threads"))]
    reduce_bytes_per_s: Quantity
    page_fault_bytes_per_s: Quantity
    # Maximum memory: all slots of the board filled, or soldered memory (`soldered_bytes` in older files)
    most_bytes: Annotated[Quantity | None, Field(validation_alias=AliasChoices("most_bytes", "soldered_bytes"))] = None


class Peers(Part):
    """Devices of the host that share a step, and their interconnect."""

    n_devices: Size | None = None  # of the host; None: no limit
    latency_s: Quantity  # synchronisation of devices that reached an op
    collectives: dict[Collective, CollectiveLaw]
    through_host: bool = False  # no peer access: exchanges pass through host memory


class Network(Part):
    """Network between hosts."""

    bytes_per_s: Quantity  # full duplex, per host, shared by its devices
    latency_s: Quantity  # from one host to the next
    n_hosts: Size = 1  # hosts that share a step


class Disk(Part):
    """Disk, or striped disks, from which frozen weights are read by large direct reads."""

    read_bytes_per_s: Quantity  # alone
    under_copies_bytes_per_s: Quantity | None = None  # while host memory and link are busy; None: as alone


class Price(Part):
    """Prices on a day: rent, purchase and power. Host memory with a price per GB is bought in addition to `usd`."""

    usd_per_hour: Quantity | None
    usd: Quantity | None = None
    ram_usd_per_gb: Quantity | None
    watts: Quantity | None = None  # whole machine under load
    usd_per_kwh: Quantity | None = None  # None: an assumed price
    date: Day | None


class Profile(Part):
    """Hardware profile of a machine, with the sources of its numbers."""

    format_version: Literal[2]
    name: Text
    summary: Text
    sources: dict[str, Source]
    device: Device
    link: Link
    host: Host
    price: Price
    peers: Peers | None = None  # None: not known
    network: Network | None = None
    disk: Disk | None = None  # None: frozen weights are in memory

    @model_validator(mode="after")
    def _is_whole(self) -> "Profile":
        for key, quantity in self.quantities():
            if quantity.source not in self.sources:
                raise ValueError(f"{key}: source {quantity.source!r} is not in `sources`; add it there")
        device_bytes, host_bytes, limit = self.device.memory_bytes.value, self.host.memory_bytes.value, self.most_host_bytes
        if limit is None or host_bytes <= limit:
            return self
        why = "are the most that this machine takes"
        if (pool := self.device.pool_bytes) is not None:
            why = f"remain of the unified memory of {show_bytes(pool.value)} after {show_bytes(device_bytes)} for the device"
        raise ValueError(f"host memory of {show_bytes(host_bytes)}, but {show_bytes(limit)} {why}; give --host-memory up to that")

    @property
    def most_host_bytes(self) -> int | None:
        """Maximum host memory, device memory excluded; None: unknown or without practical limit."""
        if (pool := self.device.pool_bytes) is not None:
            return int(pool.value - self.device.memory_bytes.value)
        return None if self.host.most_bytes is None else int(self.host.most_bytes.value)

    def takes(self, host_memory_bytes: float) -> bool:
        """True if the host can have this much memory."""
        return self.most_host_bytes is None or host_memory_bytes <= self.most_host_bytes

    @property
    def is_soldered(self) -> bool:
        """True if the memory of the host cannot be extended."""
        return self.most_host_bytes is not None and self.most_host_bytes <= self.host.memory_bytes.value

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of the disk during a step, in which other lanes copy. Raise ProfileError if the profile has no disk."""
        if self.disk is None:
            remedy = "say how fast its disk is read with --disk-read, or measure it with `penstock probe --disk FOLDER`"
            raise ProfileError(f"{self.name}: its profile has no disk; {remedy}")
        return (self.disk.under_copies_bytes_per_s or self.disk.read_bytes_per_s).value

    @property
    def n_devices(self) -> int:
        """Number of devices in the profile; 1 if unknown."""
        return 1 if self.peers is None else self.peers.n_devices or 1

    @property
    def n_hosts(self) -> int:
        """Number of equal hosts that share a step."""
        return 1 if self.network is None else self.network.n_hosts

    @property
    def meets_on_host(self) -> bool:
        """True if devices exchange through host memory: one host, and no peer access or no data on it."""
        return self.n_hosts == 1 and (self.peers is None or self.peers.through_host)

    @staticmethod
    def from_json(fields: object, where: str = "profile") -> "Profile":
        """Return the profile from the JSON values of `to_json`. Raise ProfileError with the first problem in one line."""
        return _parsed(json.dumps(fields), where)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values, without fields that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def with_memory(self, device_memory_bytes: int | None, host_memory_bytes: int | None, author: str = "the user") -> "Profile":
        """Return the profile with these memory sizes; None: unchanged. Raise ProfileError if one is <= 0 or above the maximum."""
        sizes = {"device": device_memory_bytes, "host": host_memory_bytes}
        stated = {place: n_bytes for place, n_bytes in sizes.items() if n_bytes is not None}
        for place, n_bytes in stated.items():
            if n_bytes <= 0:
                raise ProfileError(f"{place} memory of {n_bytes} bytes is not a size above zero; write for example 24GiB")
        return self._stated(
            ((place, "memory_bytes", n, f"{place} memory of {show_bytes(n)}") for place, n in stated.items()), author
        )

    def with_disk(self, read_bytes_per_s: float) -> "Profile":
        """Return the profile with a disk of this read rate in place of its own."""
        key, diskless = "read_bytes_per_s", self.model_copy(update={"disk": None})
        return diskless._stated([("disk", key, read_bytes_per_s, f"a disk's {key}: {show_bytes(read_bytes_per_s)}")])

    def with_prices(self, **prices: float | None) -> "Profile":
        """Return the profile with these prices, by the keys of `Price`; None: unchanged. `usd` is the price of the machine."""
        stated = {key: value for key, value in prices.items() if value is not None}
        return self._stated(("price", key, value, f"{key} of {value:g}") for key, value in stated.items())

    def _stated(self, changes: Iterable[tuple[str, str, float, str]], author: str = "the user") -> "Profile":
        """Return the profile with these quantities (part, key, value, description), with sources of kind `user`."""
        fields = self.to_json()
        for part, key, value, words in changes:
            source = f"user_{part}_{key.removesuffix('_bytes')}"
            fields.setdefault(part, {})[key] = {"value": float(value), "spread_fraction": 0.0, "source": source}
            kind = {"kind": "user", "detail": f"{words} as given by {author}", "date": None, "device": None, "driver": None}
            fields["sources"][source] = kind
        return Profile.from_json(fields, self.name)

    def quantities(self) -> Iterator[tuple[str, Quantity | Share]]:
        """Yield every quantity with its key, for example `link.h2d.latency_s`."""
        return quantities("", self)

    def count_sources(self) -> dict[str, int]:
        """Return the number of quantities of each kind of source, including kinds with none."""
        counts: Counter[str] = Counter(self.sources[q.source].kind for _, q in self.quantities())
        return {kind: counts[kind] for kind in SOURCE_KINDS}

    def matmul_rate(self, dtype: Dtype, m: int, k: int, n: int) -> Rate:
        """Return FLOP/s of (m, k) @ (k, n) alone. Points are interpolated over (m, sqrt(k n)), because time depends on k n."""
        products = self.device.matmul[dtype]
        if not isinstance(products, ProductLaw):
            return interpolated(_matmul_rows(products), m, math.sqrt(k * n))
        seconds = products.seconds(m, k, n, ITEM_BYTES[dtype], self.device.memory_bytes_per_s.value)
        return Rate(2 * m * k * n / seconds, products.covers(m, k, n))

    def attention_rate(self, call: AttentionCall, backward: bool, kernel: AttentionKernel = "flash") -> Rate:
        """Return FLOP/s of attention; for a kernel without rates in this dtype those of `flash`, flagged as not measured."""
        measured = self.device.attention.get(kernel, {}).get(call.dtype)
        rates = measured or self.device.attention["flash"][call.dtype]
        if not isinstance(rates, AttentionLaw):
            rate = interpolated(_attention_rows(rates, backward), call.head_dim, call.seq_len)
        else:
            value = rates.pass_of(backward).rate(call.seq_len, call.head_dim, call.grouped, call.causal)
            rate = Rate(value, rates.covers(call.seq_len))
        return rate if measured else Rate(rate.value, inside_measured=False)

    def deterministic_fraction(self, kernel: AttentionKernel, dtype: Dtype) -> float:
        """Return the rate of the deterministic backward over that of the default one; 1 on a CPU, which is deterministic."""
        rates = self.device.attention.get(kernel, {}).get(dtype)
        if isinstance(rates, AttentionLaw) and rates.deterministic_fraction is not None:
            return rates.deterministic_fraction.value
        return 1.0 if self.device.kind == "cpu" else DETERMINISTIC_FRACTION

    def copy_s(self, direction: Direction, n_bytes: float) -> float:
        """Return the seconds of one pinned copy on an idle link."""
        curve = self.link.h2d if direction == "h2d" else self.link.d2h
        return curve.latency_s.value + n_bytes / self.copy_bytes_per_s(direction, n_bytes)

    def copy_bytes_per_s(self, direction: Direction, n_bytes: float) -> float:
        """Return the rate of one pinned copy of this size, latency subtracted."""
        curve = self.link.h2d if direction == "h2d" else self.link.d2h
        return along([(p.n_bytes, p.rate.value) for p in curve.bytes_per_s], max(n_bytes, 1.0))

    def optimizer_params_per_s(self, threads: float) -> float:
        """Return parameters updated per second on `threads` threads: proportional below the measured range, constant above it."""
        curve = [(float(p.threads), p.params_per_s.value) for p in self.host.optimizer]
        return along(curve, threads) * min(1.0, threads / curve[0][0])

    def update_fraction_under_uploads(self, threads: float) -> float | None:
        """Return the update rate during uploads over the rate alone, at most 1; None if a point has no rate during uploads."""
        points = [(float(p.threads), p.params_per_s_under_uploads, p.params_per_s.value) for p in self.host.optimizer]
        curve = [(n, under.value / alone) for n, under, alone in points if under is not None]
        return min(1.0, along(curve, threads)) if len(curve) == len(points) else None


def _parsed(text: str | bytes, where: str) -> Profile:
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        raise ProfileError(f"{_plain(where)}: {_explained(error)}") from None


def shipped_profiles() -> list[str]:
    """Return the names of the profiles in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(name_or_path: str) -> Profile:
    """Read a shipped profile by name or a profile file. Raise ProfileError with the first problem in one line."""
    shipped, where = shipped_profiles(), _plain(name_or_path)
    path = FOLDER / f"{name_or_path}.json" if name_or_path in shipped else Path(name_or_path)
    try:
        text = read_whole(path, MAX_PROFILE_FILE_BYTES)
    except (FileNotFoundError, ValueError):  # ValueError: not a possible file name
        wanted = name_or_path.lower()
        single_first = sorted(shipped, key=lambda name: name[0].isdigit())
        near = [name for name in single_first if wanted and wanted in name][:3] or get_close_matches(wanted, shipped, n=1)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        message = f"no machine {where!r}: {meant}shipped are {', '.join(shipped)}; or give a file of `penstock probe`"
        raise ProfileError(message) from None
    except OSError as error:
        why = "larger than any profile" if error.errno == errno.EFBIG else f"cannot be read ({error.strerror})"
        raise ProfileError(f"{where}: {why}; make one with `penstock probe -o FILE`") from None
    return _parsed(text, where)


def _explained(error: ValidationError) -> str:
    """Return one line: key, problem, remedy. An unknown key precedes a missing one, because it may be a misspelling of it."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    place = _plain(".".join(str(key) for key in first["loc"] if key not in FORMS))
    match first["type"]:
        case "extra_forbidden":
            *parents, key = first["loc"]
            missing = [str(e["loc"][-1]) for e in errors if e["type"] == "missing" and e["loc"][:-1] == tuple(parents)]
            known = {name for part in Part.__subclasses__() for name in part.model_fields} - {key}
            near = get_close_matches(str(key), missing, 1, 0.4) or get_close_matches(str(key), known)
            return f"{place}: unknown key; {f'write {near[0]}' if near else 'remove it'}"
        case "missing":
            return f"{place}: missing; add it, with its unit as named, or make the profile again with `penstock probe`"
        case "literal_error" if place == "format_version":
            return f"of format {first['input']!r:.20}, which is not read any more; make it again with `penstock probe -o FILE`"
        case "json_invalid":
            return f"not JSON ({_plain(first['msg'])}); make it again with `penstock probe -o FILE`"
        case "value_error":
            problem = _plain(first["msg"].removeprefix("Value error, "))
            return f"{place}: {problem}" if place else problem
        case _ if not place:
            return "not a profile, which is a JSON object; make one with `penstock probe -o FILE`"
        case _:
            return f"{place}: {_plain(first['msg'])}; correct it, in the unit of its name"
