"""Cliffs: rates far below the machine's specification, with a cause that the user may be able to remove."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.units import GB, show_bytes, show_rate

if TYPE_CHECKING:
    from .device import Facts
    from .profile_fields import ProfileFields

# Rate of pinned copies on PCIe x16 in one direction, by generation. Published nvbandwidth results: 12.35 and 13.14 on a T4;
# 23.9-27.1 on A100 and RTX 4090; 55.9 +- 0.6 and 56.5 +- 1.1 on six Gen5 hosts. Gen6 is twice Gen5, not measured.
X16_BYTES_PER_S = {3: 12.5 * GB, 4: 25.5 * GB, 5: 56 * GB, 6: 112 * GB}
NARROW_FRACTION = 0.7  # measured over expected rate: half the lanes, or a generation less, reach 0.5
WARP_DRIVE = (9, 0)  # first compute capability with encryption of the link
ENCRYPTED_BYTES_PER_S = 10 * GB  # published with confidential computing on an H100: 4.4 to 9.9 GB/s each way
PAGEABLE_FRACTION = 0.6  # pageable over pinned: 16.1 of 55 GB/s published for an H100
DUPLEX_FRACTION = 0.7  # duplex over the sum of both directions alone: 0.76-0.89 on PCIe hosts, 0.47 on a GB300 station
REMOTE_FRACTION = 0.9  # a memory node over the best one: 32.2 of 37.9 GB/s published across sockets
THROTTLE_FRACTION = 0.95  # last over first rate of the reference product
CORES_FRACTION = 0.9  # cores used over threads
SCALING_FRACTION = 0.6  # optimizer rate over the limit by threads or by memory
UPDATE_BYTES_PER_PARAM = Optimizer.ADAMW.update_bytes("fp32", "bf16")
MARK = ". Cliff: "  # before each line in a source's detail
MOST_CHARACTERS = 1400  # for cliffs in a detail, which holds 2000
FOREIGN_BYTES = 2 * GB  # device memory in use before the first kernel: a bare context takes far less

Cliff = tuple[str, str]  # a short name for the summary, and the line


def cliffs(profile: Profile, facts: "Facts", numbers: "ProfileFields", in_use_bytes: int) -> Iterator[Cliff]:
    """Yield the cliffs of a probed machine. `in_use_bytes`: device memory in use before the probe's first kernel."""
    if not facts.is_cpu:
        yield from _of_gpu(profile, facts, numbers, in_use_bytes)
    alone = [(row, use) for row, use in numbers.sustained if not row.background]
    if robbed := [(row, use) for row, use in alone if use.cores < CORES_FRACTION * row.work.n_threads]:
        row, use = max(robbed, key=lambda one: one[0].work.n_threads)
        measured = f"{row.work.name} had {use.cores:.1f} cores' time, and a hypervisor took {use.steal_fraction:.0%}"
        remedy = "a quota, virtual machines or other programs use the rest, also during a run; end them and probe again"
        yield "cores taken", f"cores were in use by others: {measured}; {remedy}"
    first, last = profile.host.optimizer[0], profile.host.optimizer[-1]
    one, rate = first.params_per_s.value, last.params_per_s.value
    linear, memory = one * last.threads / first.threads, profile.host.dram_bytes_per_s.value / UPDATE_BYTES_PER_PARAM
    if last.threads > first.threads and rate < SCALING_FRACTION * min(linear, memory):
        rates = f"{show_rate(rate, 'param')} on {last.threads} threads, {show_rate(one, 'param')} on {first.threads}"
        room = f"and the memory rate allows {show_rate(memory, 'param')}; check NUMA nodes and shared cores"
        yield "optimizer does not scale", f"the optimizer does not scale: {rates}, {room}"


def without_cliffs(detail: str) -> tuple[str, list[str]]:
    """Split a source's detail into its text and the lines of the cliffs at its end."""
    rest, *lines = detail.split(MARK)
    return rest, lines


def _of_gpu(profile: Profile, facts: "Facts", numbers: "ProfileFields", in_use_bytes: int) -> Iterator[Cliff]:
    """Yield cliffs of a GPU: narrow or encrypted link, pageable memory, duplex copies, remote memory, clocks, other programs."""
    curves = {"to the device": profile.link.h2d, "to the host": profile.link.d2h}
    up, down = best = [max(point.rate.value for point in curve.bytes_per_s) for curve in curves.values()]
    both = f"pinned copies reach {show_rate(up, 'B')} to the device and {show_rate(down, 'B')} to the host"
    usual, link = (3 if facts.capability < (8, 0) else 4 if facts.capability < WARP_DRIVE else 5), numbers.link
    generation, width = (usual, 16) if link is None else (link.most_generation, link.most_width)
    expected = X16_BYTES_PER_S.get(generation, GB) * width / 16
    is_narrow = max(best) < NARROW_FRACTION * expected
    if is_narrow and facts.capability >= WARP_DRIVE and max(best) < ENCRYPTED_BYTES_PER_S:
        cause = "single digits both ways are typical of confidential computing; switch it off if possible"
        yield "confidential computing", f"{both}: {cause}"
    elif is_narrow and link is not None and (link.generation, link.width) != (generation, width):
        runs = f"the link runs at Gen{link.generation} x{link.width} and the device can do Gen{generation} x{width}"
        yield "narrow link", f"{runs}: {both}; check slot, riser and firmware settings"
    elif is_narrow:
        share = f"{max(best) / expected:.2f} of the {show_rate(expected, 'B')} that PCIe Gen{generation} x{width} gives"
        remedy = "typical of x8 or an older generation; check slot, riser, firmware settings and the NUMA node"
        yield "narrow link", f"{both}, {share}: {remedy}"
    ways = [(way, curve.pageable_bytes_per_s.value, pinned) for (way, curve), pinned in zip(curves.items(), best, strict=True)]
    if slow := [way for way in ways if way[1] < PAGEABLE_FRACTION * way[2]]:
        details = ", ".join(f"{way} {show_rate(rate, 'B')} instead of {show_rate(pinned, 'B')}" for way, rate, pinned in slow)
        yield "slow pageable memory", f"copies of pageable memory are slow: {details}; pin what is copied every step"
    if (dual := profile.link.duplex_bytes_per_s.value) < DUPLEX_FRACTION * sum(best):
        rate = f"{show_rate(dual, 'B')}, {dual / sum(best):.2f} of the {show_rate(sum(best), 'B')} of one direction at a time"
        yield "shared directions", f"both directions at once carry {rate}; uploads and gradients slow each other"
    rates = numbers.node_bytes_per_s
    near = max(rates, key=lambda node: rates[node], default="")
    if far := [f"{show_rate(rate, 'B')} from node {node}" for node, rate in rates.items() if rate < REMOTE_FRACTION * rates[near]]:
        remedy = f"{', '.join(far)}, {show_rate(rates[near], 'B')} from node {near}; bind the run to node {near}"
        yield "remote memory", f"copies from remote memory are slower: {remedy}"
    if numbers.sustained_fraction < THROTTLE_FRACTION:
        ran = f"the same product ran at {numbers.sustained_fraction:.2f} of its rate afterwards"
        remedy = "check cooling and power limit, and expect long runs to be even slower"
        yield "throttling clocks", f"clocks fell during the probe: {ran}; {remedy}"
    if in_use_bytes >= FOREIGN_BYTES:
        memory = f"{show_bytes(in_use_bytes)} of device memory were in use before the first kernel"
        yield "shared device", f"{memory}; end other programs and probe again"
