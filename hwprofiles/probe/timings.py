"""What do repeats of a measurement say?

Repeats become a median with a spread that single outliers do not move, and these become the quantities of a profile. Where noise
made more work seem to take less time, the times are lifted and their spread says so.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Told = Mapping[str, float | None]  # clock_hz and watts of a point

LEAST_SPREAD = 0.01
ONE_RUN_SPREAD = 0.1  # of a work so long that it was run once
MOST_SPREAD = 10.0  # that a profile can hold


class Timing(NamedTuple):
    """Seconds, and half the width of what four of five repeats lie in, as a fraction."""

    seconds: float
    spread_fraction: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        """Median, and 1.9 median absolute deviations: in a normal distribution that holds four of five."""
        middle = statistics.median(seconds)
        deviation = statistics.median(abs(s - middle) for s in seconds)
        return Timing(middle, max(LEAST_SPREAD, 1.9 * deviation / middle))

    def above(self, less_s: float) -> "Timing":
        """The timing; or, where it is not above the time of less work, a time just above that, with as much more spread."""
        least_s = 1.001 * less_s
        if self.seconds > least_s:
            return self
        return Timing(least_s, self.spread_fraction + least_s / self.seconds - 1)

    def per_second(self, amount: float) -> "Reading":
        """The rate at which so much is done in that time."""
        return Reading(amount / self.seconds, self.spread_fraction)


class Reading(NamedTuple):
    """A measured number, in the unit of where it stands, and its spread as a fraction."""

    value: float
    spread_fraction: float

    @staticmethod
    def of(values: Sequence[float]) -> "Reading":
        """Median and spread of repeats, as for seconds."""
        return Reading(*Timing.of(values))

    def widened(self, slowdown: float) -> "Reading":
        """The same with what other work costs it taken into the spread: its time beside that over its time alone."""
        return Reading(self.value, max(self.spread_fraction, slowdown - 1))

    def as_quantity(self, source: str) -> dict[str, Any]:
        """A quantity of the profile's schema, as JSON values."""
        return quantity(self.value, self.spread_fraction, source)


def together_per_second(amount: float, lanes: Sequence[Timing]) -> Reading:
    """What lanes that run together, each doing so much in its time, do per second."""
    return Reading(sum(amount / s.seconds for s in lanes), max(s.spread_fraction for s in lanes))


def quantity(value: float, spread_fraction: float, source: str) -> dict[str, Any]:
    """A quantity of the profile's schema, as JSON values."""
    return {"value": _rounded(value), "spread_fraction": _rounded(min(spread_fraction, MOST_SPREAD)), "source": source}


def _rounded(value: float) -> float:
    """Six significant digits of a rate or time; sizes in bytes stay whole."""
    return float(value) if isinstance(value, int) else float(f"{value:.6g}")


def raise_times(points: list[tuple[float, Timing]], least_s: Sequence[float] | None = None) -> None:
    """Lift each time, in place, above that of less work: the point before, and `least_s`. Only noise brings such a time about."""
    for i, (size, timing) in enumerate(points):
        before_s = points[i - 1][1].seconds if i else 0.0
        points[i] = size, timing.above(max(before_s, least_s[i] if least_s else 0.0))


def raise_products(times: dict[tuple[int, int, int], Timing]) -> None:
    """The same for products by (m, k, n), in m and in width, the root of k n."""
    done: list[tuple[int, float, float]] = []
    for (m, k, n), timing in sorted(times.items(), key=lambda item: (item[0][0], item[0][1] * item[0][2])):
        width = math.sqrt(k * n)
        below = [s for m0, w0, s in done if m0 <= m and w0 <= width and (m0, w0) != (m, width)]
        times[m, k, n] = timing.above(max(below, default=0.0))
        done.append((m, width, times[m, k, n].seconds))


def products_flop(m: int, k: int, n: int) -> int:
    """FLOP of a product and the two of its backward: one multiply and one add per inner step of each."""
    return 3 * 2 * m * k * n


def copy_curve(points: Sequence[tuple[int, Timing]], latency_s: float, source: str) -> list[dict[str, Any]]:
    """Rates by size of times that hold the latency too: it is taken off, but never more than half of a time."""
    rest = [(float(n), Timing(max(s.seconds - latency_s, s.seconds / 2), s.spread_fraction)) for n, s in points]
    raise_times(rest)
    return [{"n_bytes": int(n), "rate": s.per_second(n).as_quantity(source)} for n, s in rest]


class AttentionTimes:
    """Times of causal attention over lengths, one head width after another, narrower first; and the points they make."""

    def __init__(self, n_heads: int, slowdown: float) -> None:
        """Points are widened by the slowdown under load."""
        self.points: list[dict[str, Any]] = []
        self._n_heads, self._slowdown = n_heads, slowdown
        self._narrower: tuple[dict[int, float], dict[int, float]] = ({}, {})  # seconds by length, forward and backward

    def add(self, head_dim: int, times: Sequence[tuple[int, Timing, Timing]], loads: Mapping[int, Told] = {}) -> None:
        """Seconds of one sequence by rising length: forward, and backward; and what the device said of itself, by length."""
        lifted = []
        for way in (0, 1):
            points = [(float(n), (forward, backward)[way]) for n, forward, backward in times]
            raise_times(points, [self._narrower[way].get(int(n), 0.0) for n, _ in points])
            self._narrower[way].update({int(n): timing.seconds for n, timing in points})
            lifted.append([timing for _, timing in points])
        for (seq_len, _, _), forward, backward in zip(times, *lifted, strict=True):
            n_flop = 4 * self._n_heads * head_dim * (seq_len * (seq_len + 1) // 2)  # two products over the causal half
            rates = (forward.per_second(n_flop), backward.per_second(2.5 * n_flop))  # the backward has five products, not two
            forward_rate, backward_rate = (rate.widened(self._slowdown).as_quantity("probe") for rate in rates)
            self.points.append(
                {
                    "seq_len": seq_len,
                    "head_dim": head_dim,
                    "forward_flop_per_s": forward_rate,
                    "backward_flop_per_s": backward_rate,
                    **loads.get(seq_len, {}),
                }
            )


def product_points(
    times: dict[tuple[int, int, int], Timing], slowdown: float, loads: Mapping[tuple[int, int, int], Told] = {}
) -> list[dict[str, Any]]:
    """Points of a matmul grid from times of a product with its backward, lifted in place and widened by the slowdown; beside each
    what the device said of itself."""
    raise_products(times)
    return [
        {
            "m": m,
            "k": k,
            "n": n,
            "flop_per_s": timing.per_second(products_flop(m, k, n)).widened(slowdown).as_quantity("probe"),
            **loads.get((m, k, n), {}),
        }
        for (m, k, n), timing in times.items()
    ]


def thread_counts(n_cores: int) -> list[int]:
    """Powers of two up to the number of cores, and that number."""
    counts = [1]
    while counts[-1] * 2 < n_cores:
        counts.append(counts[-1] * 2)
    return sorted({*counts, n_cores})
