"""What does a hardware profile hold?

A profile is JSON. Every number is a quantity: a value in the unit that its key names, a spread (half the width, as a
fraction of the value, that covers about 80 % of what one would see), and the key of the source it rests on. Rates over
size are measured points, of which `curves.py` says what holds between them, or one of the laws of `laws.py`.
"""

import difflib
import errno
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from runtime.errors import ProfileError
from runtime.files import read_whole
from runtime.units import MiB, show_bytes

from .curves import Rate, Row, along, check_rising, interpolated, rows_of
from .laws import AttentionLaw, CollectiveLaw, ProductLaw
from .quantity import SOURCE_KINDS, Day, Dtype, Part, Quantity, Share, Size, Source, Text, quantities
from .refusal import LAW, POINTS, explain, plain

FOLDER = Path(__file__).parent / "profiles"
MAX_PROFILE_FILE_BYTES = 8 * MiB

Direction = Literal["h2d", "d2h"]
AttentionKernel = Literal["flash", "cudnn", "fa3", "aiter"]
NormKernel = Literal["torch-fused", "torch-compile"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
FORMAT_VERSION = 2
ITEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
BACKWARD_ATTENTION = 2.5  # the convention of all rates here: five products of the backward against two of the forward
# Of the rate of FlashAttention-2's backward when its sums have a fixed order: 166 TFLOP/s (Dao-AILab/flash-attention#1893, H100,
# head width 128, 8k tokens, causal) of 290; where nobody measured a device's own.
DETERMINISTIC_FRACTION = 0.57


class MatmulPoint(Part):
    """Rate of (m, k) @ (k, n), one multiply and one add per inner step."""

    m: Size
    k: Size
    n: Size
    flop_per_s: Quantity
    clock_hz: float | None = None  # of the multiprocessors meanwhile, and what the device drew; None: no driver told
    watts: float | None = None


class AttentionPoint(Part):
    """Rate of causal attention; FLOP count the causal half, the backward pass 2.5 times the forward's."""

    seq_len: Size
    head_dim: Size
    forward_flop_per_s: Quantity
    backward_flop_per_s: Quantity
    clock_hz: float | None = None
    watts: float | None = None


class AttentionCall(NamedTuple):
    """Attention as a kernel is asked for it; `grouped`: several heads share keys and values."""

    dtype: Dtype
    seq_len: int
    head_dim: int
    grouped: bool
    causal: bool = True


class NormRates(Part):
    """An RMS norm in one kernel: bytes of its input and output a second, each read or written once; the backward counts twice as
    many, and takes longer for each: it also sums the gradient of the weight."""

    forward_bytes_per_s: Quantity
    backward_bytes_per_s: Quantity


def _points_or_law(value: object) -> str:
    return POINTS if isinstance(value, list | tuple) else LAW


Products = Annotated[
    Annotated[tuple[MatmulPoint, ...], Tag(POINTS)] | Annotated[ProductLaw, Tag(LAW)], Discriminator(_points_or_law)
]
AttentionRates = Annotated[
    Annotated[tuple[AttentionPoint, ...], Tag(POINTS)] | Annotated[AttentionLaw, Tag(LAW)], Discriminator(_points_or_law)
]


class Device(Part):
    """What computes: a GPU, or the cores of a CPU that the gpu lane uses, with its own arena.

    `attention` by kernel: `flash` is torch's own (FlashAttention-2 in bf16, the memory-efficient one in fp32).
    """

    name: Text
    kind: Literal["cuda", "cpu"]
    memory_bytes: Quantity
    context_bytes: Share
    memory_bytes_per_s: Quantity
    eager_bytes_per_s: Quantity | None = None  # of unfused pointwise modules, each call's bytes counted; None: the memory's
    sustained_fraction: Quantity | None = None  # of a burst's rate that products keep in a step; None: rates are a step's
    kernel_overhead_s: Quantity
    op_overhead_s: Quantity
    compute_threads: Size | None
    workspace_bytes: Share | None = None  # what kernels and libraries take beside the context once they have been used
    matmul: dict[Dtype, Products]
    attention: dict[AttentionKernel, dict[Dtype, AttentionRates]]
    norms: dict[NormKernel, NormRates] = {}
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

    `latency_s`: until devices that have come to an op know it. `through_host`: what is exchanged goes by way of host memory, as
    where devices do not reach each other's: at what rate is a property of the host's topology, not of the devices.
    """

    n_devices: Size | None = None  # of the host; None: nobody said, and any number may be asked for
    latency_s: Quantity
    collectives: dict[Collective, CollectiveLaw]
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

    format_version: Literal[2]
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
            for grid, has in (("matmul", self.device.matmul), ("attention.flash", self.device.attention.get("flash", {}))):
                if not has.get(dtype):
                    raise ValueError(f"device.{grid}.{dtype}: no point; give at least one")
            if not isinstance(products := self.device.matmul[dtype], ProductLaw):
                check_rising(_matmul_rows(products), 2, f"device.matmul.{dtype}")
        for kernel, of in self.device.attention.items():
            for dtype, rates in of.items():
                if not isinstance(rates, AttentionLaw):
                    _check_attention(rates, f"device.attention.{kernel}.{dtype}")
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
        return 1 if self.peers is None else self.peers.n_devices or 1

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
            return Profile.model_validate_json(json.dumps(_upgraded(fields)))
        except ValidationError as error:
            raise ProfileError(f"{plain(where)}: {explain(error, Profile)}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ProfileError(f"{plain(where)}: not JSON ({plain(str(error))}); make it again with `penstock probe`") from None

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values, without what is as it is where nothing is said."""
        return self.model_dump(mode="json", exclude_defaults=True)

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
        return quantities("", self)

    def count_sources(self) -> dict[str, int]:
        """How many quantities rest on each kind of source; every kind is named, also at zero."""
        counts: Counter[str] = Counter(self.sources[q.source].kind for _, q in self.quantities())
        return {kind: counts[kind] for kind in SOURCE_KINDS}

    def matmul_rate(self, dtype: Dtype, m: int, k: int, n: int) -> Rate:
        """FLOP/s of (m, k) @ (k, n) alone. Points are interpolated over (m, sqrt(k n)): those of equal m and k n cost the same."""
        products = self.device.matmul[dtype]
        if not isinstance(products, ProductLaw):
            return interpolated(_matmul_rows(products), m, math.sqrt(k * n))
        seconds = products.seconds(m, k, n, ITEM_BYTES[dtype], self.device.memory_bytes_per_s.value)
        return Rate(2 * m * k * n / seconds, products.covers(m, k, n))

    def attention_rate(self, call: AttentionCall, backward: bool, kernel: AttentionKernel = "flash") -> Rate:
        """FLOP/s of attention, of the backward pass if asked; FLOP as in `AttentionPoint`.

        Where that kernel was not measured in that dtype `flash` stands in, and the answer says that it is outside.
        """
        own = self.device.attention.get(kernel, {}).get(call.dtype)
        rates = own or self.device.attention["flash"][call.dtype]
        if not isinstance(rates, AttentionLaw):
            rate = interpolated(_attention_rows(rates, backward), call.head_dim, call.seq_len)
        else:
            found = rates.pass_of(backward).rate(call.seq_len, call.head_dim, call.grouped, call.causal)
            rate = Rate(found, rates.covers(call.seq_len))
        return rate if own else Rate(rate.value, inside_measured=False)

    def deterministic_fraction(self, kernel: AttentionKernel, dtype: Dtype) -> float:
        """Of the backward's rate that is left when its sums have a fixed order; 1 where the kernel has no other."""
        rates = self.device.attention.get(kernel, {}).get(dtype)
        found = rates.deterministic_fraction if isinstance(rates, AttentionLaw) else None
        if found is None:
            return 1.0 if self.device.kind == "cpu" else DETERMINISTIC_FRACTION
        return found.value

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


def _upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a profile of version 1 as version 2 has them: attention by kernel, an exchange by collective."""
    if fields.get("format_version") != 1 or not isinstance(device := fields.get("device"), dict):
        return fields
    attention = {"flash": device.get("attention"), "cudnn": device.get("cudnn_attention")}
    kept = {key: value for key, value in device.items() if key != "cudnn_attention"}
    device = kept | {"attention": {kernel: of for kernel, of in attention.items() if of}}
    peers = fields.get("peers")
    if isinstance(peers, dict) and "bytes_per_s" in peers:
        plain_law = {"growth": 0.0, "fill_s": 0.0, "fill_bytes": 1.0, "fill_growth": 0.0, "crowding": 0.0, "here": 0.0}
        law = {"latency_s": peers.get("latency_s"), "bytes_per_s": peers["bytes_per_s"], **plain_law}
        peers = {key: value for key, value in peers.items() if key != "bytes_per_s"}
        peers["collectives"] = dict.fromkeys(get_args(Collective), law)
    return fields | {"format_version": FORMAT_VERSION, "device": device, "peers": peers}


def _matmul_rows(points: Sequence[MatmulPoint]) -> list[Row]:
    return rows_of((p.m, math.sqrt(p.k * p.n), p.flop_per_s.value) for p in points)


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
