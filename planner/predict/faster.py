"""How is one group of a profile's rates scaled?

Speeds that one measurement settles together form a group and move together: a rate of twice the speed doubles, a time halves.
Prices and sizes stay. Every "what if" is a profile made here, costed and simulated like any other.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from hwprofiles.quantity import Part, Quantity
from hwprofiles.schema import Profile


class Group(StrEnum):
    """Speeds of a machine that are measured together, by what measuring them is called."""

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


# How the places of a group's quantities begin.
PLACES: dict[Group, tuple[str, ...]] = {
    Group.MATMUL: ("device.matmul.",),
    Group.SUSTAINED: ("device.sustained_fraction",),
    Group.ATTENTION: ("device.attention.",),
    Group.DEVICE_MEMORY: ("device.memory_bytes_per_s", "device.eager_bytes_per_s", "device.norms."),
    Group.LAUNCH: (
        "device.kernel_overhead_s",
        "device.op_overhead_s",
        "link.h2d.latency_s",
        "link.d2h.latency_s",
        "peers.latency_s",
        "network.latency_s",
    ),
    Group.UPLOAD: ("link.h2d.bytes_per_s.", "link.h2d.pageable_bytes_per_s"),
    Group.DOWNLOAD: ("link.d2h.bytes_per_s.", "link.d2h.pageable_bytes_per_s"),
    Group.DUPLEX: ("link.duplex_bytes_per_s",),
    Group.DRAM: ("host.dram_bytes_per_s",),
    Group.OPTIMIZER: ("host.optimizer.",),
    Group.REDUCE: ("host.reduce_bytes_per_s",),
    Group.PAGE_FAULTS: ("host.page_fault_bytes_per_s",),
    Group.PEERS: ("peers.collectives.",),
    Group.NETWORK: ("network.bytes_per_s",),
}

COMPUTE = (Group.MATMUL, Group.ATTENTION, Group.DEVICE_MEMORY)
LINK = (Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX, Group.PEERS, Group.NETWORK)
DRAM = (Group.DRAM, Group.PAGE_FAULTS)
OPTIMIZER = (Group.OPTIMIZER, Group.REDUCE)


def group_of(place: str) -> Group | None:
    """The group of the quantity at this place of a profile; None for sizes and prices."""
    return next((group for group, places in PLACES.items() if place.startswith(places)), None)


def faster(profile: Profile, factors: Mapping[Group, float]) -> Profile:
    """The machine with each group named here faster by its factor."""

    def change(place: str, quantity: Quantity) -> Quantity:
        group = group_of(place)
        return quantity if group is None else sped_up(place, quantity, factors.get(group, 1.0))

    return with_quantities(profile, change)


def sped_up(place: str, quantity: Quantity, factor: float) -> Quantity:
    """The quantity where the machine is faster by `factor`."""
    is_time = place.endswith("_s") and not place.endswith("_per_s")
    return quantity.model_copy(update={"value": quantity.value / factor if is_time else quantity.value * factor})


def with_quantities(profile: Profile, change: Callable[[str, Quantity], Quantity]) -> Profile:
    """The profile with every quantity, given with its place, replaced. It is not validated again: a "what if" may bend curves."""
    changed: Profile = _changed("", profile, change)
    return changed


def _changed(place: str, part: Any, change: Callable[[str, Quantity], Quantity]) -> Any:
    match part:
        case Quantity():
            return change(place, part)
        case Part():
            fields = {key: getattr(part, key) for key in type(part).model_fields}
            return part.model_copy(update={key: _changed(_in(place, key), field, change) for key, field in fields.items()})
        case dict():
            return {key: _changed(_in(place, key), item, change) for key, item in part.items()}
        case tuple():
            return tuple(_changed(_in(place, i), item, change) for i, item in enumerate(part))
        case _:
            return part


def _in(place: str, key: str | int) -> str:
    return f"{place}.{key}" if place else str(key)
