"""Hardware profiles: rates, sizes and prices of a machine as JSON. Every number has a unit in its key, a spread and a source.

The spread is half the width of the 80 % interval, as a fraction of the value.
"""

import datetime
import errno
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from penstock.runtime.errors import ProfileError
from penstock.runtime.files import read_whole
from penstock.runtime.units import MiB, on_one_line, show_bytes

from . import components, machine_names
from .components import (
    FORMS,
    ITEM_BYTES,
    AttentionCall,
    AttentionKernel,
    Device,
    Direction,
    Disk,
    Host,
    Link,
    Network,
    OpRatio,
    Peers,
    Price,
)
from .curves import Rate, along, interpolated
from .op_laws import AttentionLaw, ProductLaw
from .quantity import SOURCE_KINDS, Dtype, Part, Quantity, Share, Source, Text, quantities

FOLDER = Path(__file__).parent / "profiles"
MAX_PROFILE_FILE_BYTES = 8 * MiB
FORMAT_VERSION = 2

_plain = partial(on_one_line, longest=200)  # makes text of a file safe for one terminal line


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
    op_ratios: tuple[OpRatio, ...] = ()  # of a run of one model, see planner/predict/measured.py

    @model_validator(mode="after")
    def _is_whole(self) -> "Profile":
        for key, quantity in self.quantities():
            if quantity.source not in self.sources:
                raise ValueError(f"{key}: source {quantity.source!r} is not in `sources`; add it there")
        if len({(entry.kind, entry.block) for entry in self.op_ratios}) < len(self.op_ratios):
            raise ValueError("op_ratios: two ratios of one kind of op and class of blocks; keep one of them")
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
    def has_fp8(self) -> bool:
        """True if the rate of FP8 products is known."""
        return self.device.fp8_rate_fraction is not None

    @property
    def fp8_rate_fraction(self) -> float:
        """Rate of FP8 products over bf16 products. Raise ProfileError if the device has none, or the profile no rate of them."""
        if (fraction := self.device.fp8_rate_fraction) is None:
            when = " (NVIDIA's GPUs have them from Ada and Hopper on)" if self.device.kind == "cuda" else ""
            remedy = "leave out --compute fp8 (and for adapters use --base int8), or measure them with `penstock probe`"
            raise ProfileError(f"{self.name}: the profile of {self.device.name} has no FP8 products{when}; {remedy}")
        return fraction.value

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

    @property
    def is_probed(self) -> bool:
        """True if a probe measured speeds of this device, or a run the times of its ops (`op_ratios`)."""
        device = (self.sources[q.source] for place, q in self.quantities() if place.startswith("device."))
        return bool(self.op_ratios) or any(source.kind == "measured" and not source.scaled for source in device)

    def matmul_rate(self, dtype: Dtype, m: int, k: int, n: int) -> Rate:
        """Return FLOP/s of (m, k) @ (k, n) alone. Points are interpolated over (m, sqrt(k n)), because time depends on k n."""
        products = self.device.matmul[dtype]
        if not isinstance(products, ProductLaw):
            return interpolated(components.matmul_rows(products), m, math.sqrt(k * n))
        seconds = products.seconds(m, k, n, ITEM_BYTES[dtype], self.device.memory_bytes_per_s.value)
        return Rate(2 * m * k * n / seconds, products.covers(m, k, n))

    def attention_rate(self, call: AttentionCall, backward: bool, kernel: AttentionKernel = "flash") -> Rate:
        """Return FLOP/s of attention; for a kernel without rates in this dtype those of `flash`, flagged as not measured."""
        measured = self.device.attention.get(kernel, {}).get(call.dtype)
        rates = measured or self.device.attention["flash"][call.dtype]
        if not isinstance(rates, AttentionLaw):
            rate = interpolated(components.attention_rows(rates, backward), call.head_dim, call.seq_len)
        else:
            value = rates.pass_of(backward).rate(call.seq_len, call.head_dim, call.grouped, call.causal)
            rate = Rate(value, rates.covers(call.seq_len))
        return rate if measured else Rate(rate.value, inside_measured=False)

    def deterministic_fraction(self, kernel: AttentionKernel, dtype: Dtype) -> float:
        """Return the rate of the deterministic backward over that of the default one; 1 on a CPU, which is deterministic."""
        rates = self.device.attention.get(kernel, {}).get(dtype)
        if isinstance(rates, AttentionLaw) and rates.deterministic_fraction is not None:
            return rates.deterministic_fraction.value
        return 1.0 if self.device.kind == "cpu" else components.DETERMINISTIC_FRACTION

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


def _price_days(profile: Profile) -> list[str]:
    """Return the days of the prices, as `2026-03-31`: those of their sources, and `price.date`."""
    sources = [profile.sources[q.source].date for place, q in profile.quantities() if place.startswith("price.")]
    return [day for day in (*sources, profile.price.date) if day is not None]


def _parsed(text: str | bytes, where: str) -> Profile:
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        raise ProfileError(f"{_plain(where)}: {_explained(error)}") from None


def shipped_profiles() -> list[str]:
    """Return the names of the profiles in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(name_or_path: str, note: Callable[[str], None] = lambda text: None) -> Profile:
    """Read a profile file, or a shipped profile by a name that means one machine; `note(text)` is called if it is not its own name.
    Raise ProfileError with the first problem in one line."""
    shipped, where = shipped_profiles(), _plain(name_or_path)
    path = FOLDER / f"{name_or_path}.json" if name_or_path in shipped else Path(name_or_path)
    try:
        text = read_whole(path, MAX_PROFILE_FILE_BYTES)
    except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: not a possible file name
        if len(means := machine_names.matching(name_or_path, shipped)) != 1:
            raise ProfileError(machine_names.unknown(name_or_path, where, shipped)) from None
        note(f"machine {where!r} is taken as {means[0]}")
        return read_profile(means[0])
    except OSError as error:
        why = "larger than any profile" if error.errno == errno.EFBIG else f"cannot be read ({error.strerror})"
        raise ProfileError(f"{where}: {why}; make one with `penstock probe -o FILE`") from None
    profile, latest = _parsed(text, where), datetime.date.today() + datetime.timedelta(days=1)  # one day: time zones
    if name_or_path not in shipped and (day := max(_price_days(profile), default="")) > latest.isoformat():
        raise ProfileError(f"{where}: price of {day}, a day in the future; write the day of the price in price.date or its source")
    return profile


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
            is_removed = place in ("disk.write_bytes_per_s", "disk.endurance_bytes")  # keys of earlier versions
            return f"{place}: unknown key; {f'write {near[0]}' if near and not is_removed else 'remove it'}"
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
