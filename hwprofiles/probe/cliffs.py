"""Where is this machine far slower than its parts promise?

A cliff is a number that looks like any other in a profile and makes plans many times slower, because of something that can be
mended or must be known: a link at half its width, memory that is not pinned, clocks that fall. Each is a line that says what was
found, against what, and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hwprofiles.schema import Profile
from runtime.units import GB, show_bytes, show_rate

from .device import DeviceFacts, PciLink

# What pinned copies reach on PCIe x16, by generation, each way. Published nvbandwidth results: a T4's 12.35 and 13.14; 23.9-27.1 on
# A100 and RTX 4090; 55.9 +- 0.6 and 56.5 +- 1.1 on six Gen5 hosts. Gen6 is twice Gen5, which nobody measured.
X16_BYTES_PER_S = {3: 12.5 * GB, 4: 25.5 * GB, 5: 56 * GB, 6: 112 * GB}
NARROW_FRACTION = 0.7  # of what the link's best gives: half its lanes, or a generation less, lie at 0.5
WARP_DRIVE = (9, 0)  # the first compute capability whose devices can encrypt their link
ENCRYPTED_BYTES_PER_S = 10 * GB  # published with confidential computing on an H100: 4.4 to 9.9 GB/s each way
PAGEABLE_FRACTION = 0.6  # of pinned: 16.1 of 55 GB/s published for an H100
DUPLEX_FRACTION = 0.7  # of the sum of both directions alone: 0.76-0.89 on PCIe hosts, 0.47 on a GB300 station
REMOTE_FRACTION = 0.9  # of the best memory node: 32.2 of 37.9 GB/s published across sockets
THROTTLE_FRACTION = 0.95  # of the rate with which the sustained work began
SCALING_FRACTION = 0.6  # of what that number of threads, or the memory, would let the optimizer do
UPDATE_BYTES_PER_PARAM = 26  # read master 4, moments 8, gradient 2; write master 4, moments 8
MARK = ". Cliff: "  # before each line in a source's detail
MOST_CHARACTERS = 1400  # of lines in a detail, which holds 2000
FOREIGN_BYTES = 2 * GB  # of device memory in use before the first kernel: a bare context is far below


@dataclass(frozen=True, slots=True)
class Cliff:
    """A short name for the summary, and the line."""

    name: str
    line: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a probe saw of a GPU that its profile has no place for."""

    facts: DeviceFacts
    link: PciLink | None  # while copies ran
    sustained_fraction: float  # rate of one product after all the work, over that before it
    in_use_bytes: int  # device memory in use before our first kernel
    node_bytes_per_s: tuple[tuple[int, float], ...]  # pinned copies to the device, by the memory node they come from


def gpu_cliffs(profile: Profile, seen: Seen) -> list[Cliff]:
    """Every cliff of a probed GPU and its host."""
    host = profile.to_json()["host"]
    return [
        *link_cliffs(profile, seen.facts.capability, seen.link),
        *_pageable_cliffs(profile),
        *_duplex_cliffs(profile),
        *_node_cliffs(seen),
        *_clock_cliffs(seen),
        *_foreign_cliffs(seen),
        *optimizer_cliffs(host["optimizer"], host["dram_bytes_per_s"]["value"]),
    ]


def listed_cliffs(cliffs: Sequence[Cliff]) -> str:
    """For the end of a source's detail: the lines; nothing where there are none."""
    return "".join(f"{MARK}{cliff.line}" for cliff in cliffs)[:MOST_CHARACTERS]


def named_cliffs(cliffs: Sequence[Cliff]) -> str:
    """For the end of a summary: the names; nothing where there are none."""
    return f"; cliffs: {', '.join(cliff.name for cliff in cliffs)}" if cliffs else ""


def cliff_lines(detail: str) -> list[str]:
    """The lines in a source's detail."""
    return detail.split(MARK)[1:]


def without_cliffs(detail: str) -> str:
    """The rest of it."""
    return detail.split(MARK)[0]


def _best(profile: Profile) -> tuple[float, float]:
    """Rates of pinned copies each way, at their best size."""
    up, down = (max(p.rate.value for p in curve.bytes_per_s) for curve in (profile.link.h2d, profile.link.d2h))
    return up, down


def generation_of(capability: tuple[int, int]) -> int:
    """The PCIe generation that devices of a compute capability have."""
    return 3 if capability < (8, 0) else 4 if capability < WARP_DRIVE else 5


def link_cliffs(profile: Profile, capability: tuple[int, int], link: PciLink | None) -> list[Cliff]:
    """Encryption, or fewer lanes or a lower generation than there could be."""
    up, down = _best(profile)
    both = f"pinned copies reach {show_rate(up, 'B')} to the device and {show_rate(down, 'B')} to the host"
    generation, width = (generation_of(capability), 16) if link is None else (link.most_generation, link.most_width)
    expected = X16_BYTES_PER_S.get(generation, GB) * width / 16
    if max(up, down) >= NARROW_FRACTION * expected:
        return []
    if capability >= WARP_DRIVE and max(up, down) < ENCRYPTED_BYTES_PER_S:
        line = f"{both}: single digits both ways are what confidential computing leaves of a link; switch it off if you may"
        return [Cliff("confidential computing", line)]
    if link is not None and (link.generation, link.width) != (generation, width):
        line = (
            f"the link runs at Gen{link.generation} x{link.width} and the device can do Gen{generation} x{width}: {both}; look at "
            "slot, riser and firmware settings"
        )
    else:
        line = (
            f"{both}, {max(up, down) / expected:.2f} of the {show_rate(expected, 'B')} that PCIe Gen{generation} x{width} gives: "
            "as with x8 or a generation less; look at slot, riser, firmware settings and the memory node"
        )
    return [Cliff("narrow link", line)]


def _pageable_cliffs(profile: Profile) -> list[Cliff]:
    found = []
    ways = (("to the device", profile.link.h2d), ("to the host", profile.link.d2h))
    for (way, curve), pinned in zip(ways, _best(profile), strict=True):
        if curve.pageable_bytes_per_s.value < PAGEABLE_FRACTION * pinned:
            found.append(f"{way} {show_rate(curve.pageable_bytes_per_s.value, 'B')} instead of {show_rate(pinned, 'B')}")
    line = f"copies of pageable memory are slow: {', '.join(found)}; pin what is copied every step"
    return [Cliff("slow pageable memory", line)] if found else []


def _duplex_cliffs(profile: Profile) -> list[Cliff]:
    duplex, total = profile.link.duplex_bytes_per_s.value, sum(_best(profile))
    if duplex >= DUPLEX_FRACTION * total:
        return []
    line = (
        f"both directions at once carry {show_rate(duplex, 'B')}, {duplex / total:.2f} of the {show_rate(total, 'B')} that they "
        "carry one at a time; uploads and gradients slow each other"
    )
    return [Cliff("shared directions", line)]


def _node_cliffs(seen: Seen) -> list[Cliff]:
    best_node, best = max(seen.node_bytes_per_s, key=lambda item: item[1], default=(0, 0.0))
    slow = [(node, rate) for node, rate in seen.node_bytes_per_s if rate < REMOTE_FRACTION * best]
    if not slow:
        return []
    far = ", ".join(f"{show_rate(rate, 'B')} from node {node}" for node, rate in slow)
    near = f"{show_rate(best, 'B')} from node {best_node}"
    line = f"copies from remote memory are slower: {far}, {near}; bind the run to node {best_node}"
    return [Cliff("remote memory", line)]


def _clock_cliffs(seen: Seen) -> list[Cliff]:
    if seen.sustained_fraction >= THROTTLE_FRACTION:
        return []
    line = (
        f"clocks fell during the probe: the same product ran at {seen.sustained_fraction:.2f} of its rate afterwards; look at "
        "cooling and power limit, and expect long runs to be slower still"
    )
    return [Cliff("throttling clocks", line)]


def _foreign_cliffs(seen: Seen) -> list[Cliff]:
    if seen.in_use_bytes < FOREIGN_BYTES:
        return []
    line = (
        f"{show_bytes(seen.in_use_bytes)} of device memory were in use before the first kernel; end other programs and probe again"
    )
    return [Cliff("shared device", line)]


def optimizer_cliffs(points: Sequence[dict[str, Any]], dram_bytes_per_s: float) -> list[Cliff]:
    """Threads that bring too little: the memory has room, and there are threads enough."""
    first, last = points[0], points[-1]
    rate, one = (point["params_per_s"]["value"] for point in (last, first))
    linear, memory = one * last["threads"] / first["threads"], dram_bytes_per_s / UPDATE_BYTES_PER_PARAM
    if last["threads"] == first["threads"] or rate >= SCALING_FRACTION * min(linear, memory):
        return []
    line = (
        f"the optimizer does not scale: {show_rate(rate, 'param')} on {last['threads']} threads, {show_rate(one, 'param')} on "
        f"{first['threads']}, and the memory would carry {show_rate(memory, 'param')}; look at memory nodes and shared cores"
    )
    return [Cliff("optimizer does not scale", line)]
