"""Profile fields: rates and overheads computed from the times of measurements."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .device import Load
from .measurements import ALONE, CLOCK, CLOCKED_FRACTION, EXTRA, FP8, LOADED, NODES, REFERENCE, Measurement
from .timings import Timing, lifted

HOST = "host"  # source of the rates of host benchmarks

Result = tuple[Measurement, Timing, Load]  # with the seconds of its benchmark, and the state of the device during it


class ProfileFields:
    """Rates and times of all results, with overheads subtracted and time monotonic in work.

    `extra`: results without a profile field, by name. `slowdowns`: time under load over time alone, by kind.
    `node_bytes_per_s`: rate of pinned copies to the device, by NUMA node. `sustained_fraction`: last over first rate of the
    reference product. `sustained`: core usage of host benchmarks. `link`: PCIe state during copies."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results, self.values = results, _values(results)
        fields = [row.field for row, _, _ in results]
        self.extra = {field: rate for field, rate in zip(fields, self.values, strict=True) if field.startswith(EXTRA)}
        alone, loaded, self.node_bytes_per_s = (self._with_prefix(prefix) for prefix in (ALONE, LOADED, NODES))
        self.slowdowns = {kind: max(1.0, rate / loaded[kind]) for kind, rate in alone.items()}
        self.sustained_fraction = self.extra[REFERENCE + "last"].value / self.extra[REFERENCE + "first"].value
        self.sustained = [(row, seconds.use) for row, seconds, _ in results if seconds.use is not None]
        self.link = next((load.link for row, _, load in results if row.work.kind == "copies" and load.link), None)

    def _with_prefix(self, prefix: str) -> dict[str, float]:
        """Return the values of `extra` with this prefix, by the remainder of the name."""
        return {field.removeprefix(prefix): rate.value for field, rate in self.extra.items() if field.startswith(prefix)}

    def write(self, fields: dict[str, Any]) -> None:
        """Write the numbers into the fields of a profile. Spreads are widened by the slowdown under load and by clock drift."""
        for (row, seconds, load), value in zip(self.results, self.values, strict=True):
            if row.field not in self.extra:
                slowdown = 1.0 if row.background else self.slowdowns.get(row.work.kind, 1.0)
                follows_clock = row.key.endswith("flop_per_s")  # stored with clock and power; its spread covers clock drift
                drift = 1 / self.sustained_fraction if follows_clock else 1.0
                source = "probe" if seconds.use is None else HOST
                widened = value._replace(spread_fraction=max(value.spread_fraction, slowdown - 1, drift - 1))
                _write(fields, row, widened.quantity(source), load if follows_clock else None)
        if (fp8 := self.extra.get(FP8)) is not None:
            fraction = fp8.value / self.extra[REFERENCE + "last"].value
            fields["device"]["fp8_rate_fraction"] = fp8._replace(value=fraction).quantity()
        ways = [fields["link"][way]["duplex_bytes_per_s"] for way in ("h2d", "d2h")]
        both = Timing(sum(way["value"] for way in ways), max(way["spread_fraction"] for way in ways))
        fields["link"]["duplex_bytes_per_s"] = both.quantity()


def _values(results: Sequence[Result]) -> list[Timing]:
    """Return seconds per call, or rates, with time monotonic in work."""
    call_s = {row.field: seconds.value / row.work.n_calls for row, seconds, _ in results}
    grids: dict[tuple[str, str], dict[int, tuple[tuple[float, float], Timing]]] = defaultdict(dict)
    for i, (row, seconds, _) in enumerate(results):
        overhead_s = row.work.n_calls * call_s[row.overhead] if row.overhead else 0.0
        most_s = (CLOCKED_FRACTION if row.overhead == CLOCK else 0.5) * seconds.value  # upper limit of the overhead
        grids[row.field, row.key][i] = row.work.size, seconds._replace(value=seconds.value - min(overhead_s, most_s))
    monotonic = {i: seconds for grid in grids.values() for i, seconds in lifted(grid).items()}
    numbers = [(row.field, row.work, monotonic[i].value) for i, (row, _, _) in enumerate(results)]
    is_time = [field.endswith("_s") and not field.endswith("_per_s") for field, _, _ in numbers]
    values = [s / work.n_calls if is_s else work.amount / s for is_s, (_, work, s) in zip(is_time, numbers, strict=True)]
    return [monotonic[i]._replace(value=value) for i, value in enumerate(values)]


def _write(fields: dict[str, Any], row: Measurement, number: dict[str, Any], load: Load | None) -> None:
    *parents, last = row.field.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
    if not row.key:
        fields[last] = number
        return
    points = fields.setdefault(last, [])
    point = next((point for point in points if row.work.point.items() <= point.items()), None)
    if point is None:
        points.append(point := dict(row.work.point))
    point |= {row.key: number} | ({"clock_hz": load.clock_hz, "watts": load.watts} if load else {})
