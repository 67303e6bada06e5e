"""Scaled profiles: a machine with some groups of rates faster by a factor, for hypothetical machines and intervals.

Quantities from one measurement form a group and scale together: on a machine twice as fast a rate doubles and a time halves. Prices
and sizes do not scale. A scaled profile is costed and simulated like any other.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from penstock.hwprofiles.quantity import Part, Quantity
from penstock.hwprofiles.schema import Profile


class Group(StrEnum):
    """Speeds of a machine that depend on one measurement."""

    MATMUL = "matrix products"
    SUSTAINED = "products under load"
    ATTENTION = "attention"
    DEVICE_MEMORY = "device memory"
    LAUNCH = "overheads and latency"
    UPLOAD = "uploads"
    DOWNLOAD = "downloads"
    DUPLEX = "both directions at once"
    DRAM = "host DRAM"
    OPTIMIZER = "optimizer"
    REDUCE = "sums and norms on the host"
    PAGE_FAULTS = "page faults"
    PEERS = "exchange between devices"
    NETWORK = "exchange between hosts"
    DISK = "reads from a disk"


# Name of each speed of a profile -> its group, and path prefixes of its quantities
SPEEDS: dict[str, tuple[Group, tuple[str, ...]]] = {
    "matrix products": (Group.MATMUL, ("device.matmul.",)),
    "products under load": (Group.SUSTAINED, ("device.sustained_fraction",)),
    "FP8 products": (Group.MATMUL, ("device.fp8_rate_fraction",)),
    "attention": (Group.ATTENTION, ("device.attention.",)),
    "fused norms": (Group.DEVICE_MEMORY, ("device.norms.",)),
    "eager modules": (Group.DEVICE_MEMORY, ("device.eager_bytes_per_s",)),
    "fused activations": (Group.DEVICE_MEMORY, ("device.fused_bytes_per_s",)),
    "the fused loss": (Group.DEVICE_MEMORY, ("device.loss_bytes_per_s",)),
    "unpacking": (Group.DEVICE_MEMORY, ("device.unpack_bytes_per_s",)),
    "narrow products": (Group.DEVICE_MEMORY, ("device.narrow_bytes_per_s",)),
    "device memory": (Group.DEVICE_MEMORY, ("device.memory_bytes_per_s",)),
    "kernels' overhead": (Group.LAUNCH, ("device.kernel_overhead_s",)),
    "ops' overhead": (Group.LAUNCH, ("device.op_overhead_s",)),
    "rate of uploads": (Group.UPLOAD, tuple(f"link.h2d.{mode}bytes_per_s" for mode in ("", "pageable_", "under_optimizer_"))),
    "latency of uploads": (Group.LAUNCH, ("link.h2d.latency_s",)),
    "rate of downloads": (Group.DOWNLOAD, tuple(f"link.d2h.{mode}bytes_per_s" for mode in ("", "pageable_", "under_optimizer_"))),
    "latency of downloads": (Group.LAUNCH, ("link.d2h.latency_s",)),
    "both directions at once": (Group.DUPLEX, tuple(f"link.{way}duplex_bytes_per_s" for way in ("", "h2d.", "d2h."))),
    "host DRAM": (Group.DRAM, ("host.dram_bytes_per_s",)),
    "optimizer": (Group.OPTIMIZER, ("host.optimizer.",)),
    "sums and norms on the host": (Group.REDUCE, ("host.reduce_bytes_per_s",)),
    "page faults": (Group.PAGE_FAULTS, ("host.page_fault_bytes_per_s",)),
    "exchange between devices": (Group.PEERS, ("peers.collectives.",)),
    "latency between devices": (Group.LAUNCH, ("peers.latency_s",)),
    "exchange between hosts": (Group.NETWORK, ("network.bytes_per_s",)),
    "latency between hosts": (Group.LAUNCH, ("network.latency_s",)),
    "reads from a disk": (Group.DISK, tuple(f"disk.{mode}_bytes_per_s" for mode in ("read", "under_copies"))),
}


def speed_of(place: str) -> str | None:
    """Return the name in `SPEEDS` of the quantity at a path in a profile; None for sizes and prices."""
    return next((name for name, (_, begins) in SPEEDS.items() if place.startswith(begins)), None)


def group_of(place: str) -> Group | None:
    """Return the group of the quantity at a path (`link.h2d.latency_s`: `Group.LAUNCH`); None for sizes and prices."""
    name = speed_of(place)
    return None if name is None else SPEEDS[name][0]


def faster(profile: Profile, factors: Mapping[Group, float]) -> Profile:
    """Return the profile of a machine with these groups faster by their factors."""
    groups = ((place, group_of(place)) for place, _ in profile.quantities())
    return scaled(profile, {place: factors[group] for place, group in groups if group is not None and group in factors})


def scaled(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """Return the profile of a machine with the speeds at these paths faster by their factors."""
    return with_quantities(profile, lambda place, q: sped_up(place, q, factors[place]) if place in factors else q)


def sped_up(place: str, quantity: Quantity, factor: float) -> Quantity:
    """Divide a time, or multiply a rate, by `factor`."""
    is_time = place.endswith("_s") and not place.endswith("_per_s")
    return quantity.model_copy(update={"value": quantity.value / factor if is_time else quantity.value * factor})


def with_quantities(profile: Profile, change: Callable[[str, Quantity], Quantity]) -> Profile:
    """Map `change(place, quantity)` over all quantities. The result is not validated: scaled curves may be non-monotonic."""

    def changed(place: str, part: Any) -> Any:
        match part:
            case Quantity():
                return change(place.removeprefix("."), part)
            case Part():
                fields = type(part).model_fields
                return part.model_copy(update={key: changed(f"{place}.{key}", getattr(part, key)) for key in fields})
            case dict():
                return {key: changed(f"{place}.{key}", item) for key, item in part.items()}
            case tuple():
                return tuple(changed(f"{place}.{i}", item) for i, item in enumerate(part))
        return part

    result: Profile = changed("", profile)
    return result
