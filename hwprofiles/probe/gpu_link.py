"""How fast do bytes move between a host and its GPU?

Pinned copies over sizes each way, both ways at once, from every memory node, beside a busy optimizer; and pageable ones.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from hwprofiles.schema import Direction
from runtime.units import KiB, MiB

from .device import Buffer, Device, DeviceError, Event, Host, Issue, Place, Stream
from .stopwatch import Stopwatch
from .timings import Reading, Timing, copy_curve, quantity

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
TINY_BYTES = 4 * KiB  # of a copy that is all latency
PIECE_BYTES = 64 * MiB  # of one copy where not the size but the company is measured
DUPLEX_COPIES = 16  # each way, at once
PAGEABLE_BYTES = 256 * MiB  # that pageable copies walk through, above every cache


@dataclass(frozen=True, slots=True)
class Way:
    """One direction, and its buffers."""

    direction: Direction
    device: Device
    on_device: Buffer
    on_host: Buffer

    @property
    def stream(self) -> Stream:
        return Stream(self.direction)

    def copies(self, n_bytes: int) -> Issue:
        to, source = (self.on_device, self.on_host) if self.direction == "h2d" else (self.on_host, self.on_device)
        return self.device.copies(self.direction, to, source, n_bytes)


class LinkProbe:
    """Measures one link. Buffers live as long as the context."""

    def __init__(self, device: Device, host: Host, watch: Stopwatch, sizes: tuple[int, ...]) -> None:
        """`sizes`: of pinned copies, rising."""
        self.device, self.host, self.watch, self.sizes = device, host, watch, sizes
        self.piece_bytes = min(PIECE_BYTES, sizes[-1])

    def measure(self, n_threads: int) -> tuple[dict[str, Any], dict[str, float]]:
        """The link of a profile, all but what is so by nature; and by how much the optimizer on `n_threads` slows copies."""
        with ExitStack() as stack:
            ways = [self._way(stack, direction, "pinned", self.sizes[-1]) for direction in DIRECTIONS]
            link: dict[str, Any] = {way.direction: self._curve(way) for way in ways}
            alone = [self._piece(way) for way in ways]
            both = self._both(ways)
            with self.host.updating(n_threads):
                loaded = [self._piece(way) for way in ways]
                both_loaded = self._both(ways)
        slowdown = {}
        for way, one, busy, beside in zip(ways, alone, loaded, both, strict=True):
            link[way.direction]["under_optimizer_bytes_per_s"] = busy.as_quantity("probe")
            link[way.direction]["duplex_bytes_per_s"] = beside.as_quantity("probe")
            slowdown[f"{way.direction} copies"] = max(1.0, one.value / busy.value)
        duplex, duplex_loaded = (
            Reading(sum(r.value for r in pair), max(r.spread_fraction for r in pair)) for pair in (both, both_loaded)
        )
        link["duplex_bytes_per_s"] = duplex.as_quantity("probe")
        slowdown["copies both ways"] = max(1.0, duplex.value / duplex_loaded.value)
        for direction in DIRECTIONS:
            link[direction]["pageable_bytes_per_s"] = self._pageable(direction).as_quantity("probe")
        return link, slowdown

    def nodes(self) -> tuple[tuple[int, float], ...]:
        """Rates of pinned copies to the device by the memory node they come from; empty where there is but one."""
        nodes = [(node, cores) for node, cores in enumerate(self.host.facts().nodes) if cores]
        rates = []
        for node, cores in nodes if len(nodes) > 1 else []:
            with ExitStack() as stack:
                rates.append((node, self._piece(self._way(stack, "h2d", "pinned", 4 * self.piece_bytes, cores)).value))
        return tuple(rates)

    def _way(self, stack: ExitStack, direction: Direction, place: Place, n_bytes: int, cores: tuple[int, ...] | None = None) -> Way:
        on_device = stack.enter_context(self.device.allocate("device", n_bytes))
        return Way(direction, self.device, on_device, stack.enter_context(self.device.allocate(place, n_bytes, cores)))

    def _timing(self, way: Way, n_bytes: int) -> Timing:
        return self.watch.timing(way.copies(n_bytes), way.stream)

    def _piece(self, way: Way) -> Reading:
        """Rate of copies so large that latency is nothing."""
        return self._timing(way, self.piece_bytes).per_second(self.piece_bytes)

    def _curve(self, way: Way) -> dict[str, Any]:
        tiny = self._timing(way, TINY_BYTES)
        points = [(n_bytes, self._timing(way, n_bytes)) for n_bytes in self.sizes]
        return {
            "latency_s": quantity(tiny.seconds, tiny.spread_fraction, "probe"),
            "bytes_per_s": copy_curve(points, tiny.seconds, "probe"),
        }

    def _pageable(self, direction: Direction) -> Reading:
        with ExitStack() as stack:
            return self._piece(self._way(stack, direction, "pageable", min(PAGEABLE_BYTES, 4 * self.piece_bytes)))

    def _both(self, ways: list[Way]) -> list[Reading]:
        """Rate of each direction while both are busy."""
        self._window(ways)  # the first finds cold links
        windows = [self._window(ways) for _ in range(self.watch.least_repeats)]
        return [Reading.of(rates) for rates in zip(*windows, strict=True)]

    def _window(self, ways: list[Way], n_tries: int = 3) -> list[float]:
        """Bytes per second of each direction, in the time in which all of them were copying.

        All ending times are on one clock; what ran before the other stream began, or after it was done, does not count.
        """
        issues = [way.copies(self.piece_bytes) for way in ways]
        start = self.device.record(ways[0].stream)
        ends: list[list[Event]] = [[] for _ in ways]
        for _ in range(DUPLEX_COPIES):
            for way, issue, marks in zip(ways, issues, ends, strict=True):
                issue(1)
                marks.append(self.device.record(way.stream))
        self.device.synchronise()
        times = [[self.device.elapsed_s(start, mark) for mark in marks] for marks in ends]
        try:
            return rates_in_common(times, self.piece_bytes)
        except DeviceError:  # something else had the device until one of them was done
            if n_tries == 1:
                raise
        return self._window(ways, n_tries - 1)


def rates_in_common(times: list[list[float]], n_bytes: int) -> list[float]:
    """Bytes per second of each stream while all were at work, from the times at which its copies of n_bytes ended.

    Of the copies that began and ended then the median counts, so that a hiccup does not. DeviceError where there were none.
    """
    from_s, to_s = max(ends[0] for ends in times), min(ends[-1] for ends in times)
    rates = []
    for ends in times:
        durations = [after - before for before, after in pairwise(ends) if from_s <= before and after <= to_s and after > before]
        if not durations:
            raise DeviceError("copies in both directions never ran at the same time")
        rates.append(n_bytes / statistics.median(durations))
    return rates
