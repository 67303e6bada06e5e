"""Timing: warm-up, repetition, median and spread of a benchmark.

Wall times count after warm-up, once two successive times agree, because clocks depend on temperature. Single-threaded repeats that
other programs interrupt are discarded if enough others remain. Host benchmarks run without pause, and the median of pieces counts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from .device import Device, Load, Ready, Run
from .measurements import Effort

LEAST_SPREAD = 0.01
MOST_SPREAD = 10.0  # limit of the schema
ONE_RUN_SPREAD = 0.1  # of a benchmark that is run once because it is long
SETTLED_FRACTION = 0.02  # maximum relative difference of two successive times
MOST_SETTLING = 12  # maximum number of discarded times per benchmark
MOST_PER_BATCH = 500  # repetitions per batch, because the queue of a stream is finite
CALM_FRACTION = 0.95  # minimum fraction of a repeat during which the thread had its core
LEAST_PIECES = 3  # of a sustained benchmark


class Use(NamedTuple):
    """Core usage of a sustained benchmark."""

    cores: float  # processor time of this process over wall time
    steal_fraction: float  # steal time over wall time
    last_third: float  # rate in the last third over the rate in the first: below 1 under a CPU quota


class Timing(NamedTuple):
    """Measured time or rate, and half the width of its 80 % interval as a fraction of the value."""

    value: float
    spread_fraction: float
    use: Use | None = None

    @staticmethod
    def from_repeats(repeats: Sequence[float]) -> "Timing":
        """Return the median and 1.9 median absolute deviations, which cover 80 % of a normal distribution."""
        middle = statistics.median(repeats)
        deviation = statistics.median(abs(value - middle) for value in repeats)
        return Timing(middle, max(LEAST_SPREAD, 1.9 * deviation / middle))

    def quantity(self, source: str = "probe") -> dict[str, Any]:
        """Return the JSON values of a `Quantity`, with six significant digits; integers (sizes in bytes) keep all digits."""
        value = float(self.value) if isinstance(self.value, int) else float(f"{self.value:.6g}")
        return {"value": value, "spread_fraction": float(f"{min(self.spread_fraction, MOST_SPREAD):.6g}"), "source": source}


def lifted(times: Mapping[int, tuple[tuple[float, float], Timing]]) -> dict[int, Timing]:
    """Make times monotonic in the size of the work: raise a time below that of less work just above it, and widen its spread."""
    previous: list[tuple[float, float, float]] = []
    result = {}
    for i, ((x, y), timing) in sorted(times.items(), key=lambda item: item[1][0]):
        least_s = 1.001 * max((s for x0, y0, s in previous if x0 <= x and y0 <= y and (x0, y0) != (x, y)), default=0.0)
        spread_fraction = timing.spread_fraction + least_s / timing.value - 1
        result[i] = timing if timing.value > least_s else Timing(least_s, spread_fraction)
        previous.append((x, y, result[i].value))
    return result


@dataclass(slots=True)
class Stopwatch:
    """Times benchmarks on a device and accumulates the busy time."""

    device: Device
    effort: Effort
    busy_s: float = 0.0

    def timing(self, ready: Ready, soak_s: float = 0.0, is_accompanied: bool = False) -> Timing:
        """Return the seconds of one repetition: the median of repeats after `soak_s` of warm-up."""
        first = self._run(ready, 1)  # loads kernels and fills allocators
        if ready.work.tasks is not None:
            return self._sustained(ready)
        if first.seconds > self.effort.longest_s:
            first = self._run(ready, 1)  # the first run may compile a kernel for the shape (cuDNN)
        if first.seconds > self.effort.longest_s:
            return Timing(first.seconds, ONE_RUN_SPREAD)
        n = self._n_per_batch(self._run(ready, 1).seconds, is_accompanied)
        soaked_s = self.busy_s + soak_s
        while self.busy_s < soaked_s:
            self._run(ready, n)
        if self.effort.soak_s > 0:
            times = (self._run(ready, n).seconds for _ in range(MOST_SETTLING + 1))
            any(abs(now_s / before_s - 1) < SETTLED_FRACTION for before_s, now_s in pairwise(times))  # runs until two times agree
        batch = Timing.from_repeats(self._repeats(ready, n))
        return batch._replace(value=batch.value / n)

    def load(self, ready: Ready, work_s: float) -> Load:
        """Return the state of the device during a benchmark of `work_s` seconds."""
        return self.device.load(ready, self._n_per_batch(work_s, takes_turns=False))

    def _run(self, ready: Ready, n: int) -> Run:
        run = self.device.run(ready, n)
        self.busy_s += run.seconds
        return run

    def _sustained(self, ready: Ready) -> Timing:
        """Return the median of pieces of a benchmark that runs without pause, with its core usage."""
        n, pieces = max(1, round(self.effort.piece_s / self._run(ready, 1).seconds)), list[Run]()
        while len(pieces) < LEAST_PIECES or sum(piece.seconds for piece in pieces) < self.effort.sustained_s:
            pieces.append(self._run(ready, n))
        seconds, third = [piece.seconds for piece in pieces], len(pieces) // 3
        wall_s = sum(seconds)
        first_s, last_s = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
        cpu_s, steal_s = (sum(getattr(piece, name) for piece in pieces) for name in ("cpu_s", "steal_s"))
        middle = Timing.from_repeats(seconds)
        return middle._replace(value=middle.value / n, use=Use(cpu_s / wall_s, steal_s / wall_s, first_s / last_s))

    def _n_per_batch(self, call_s: float, takes_turns: bool) -> int:
        batch_s = self.effort.window_s if takes_turns else self.effort.batch_s
        return max(1, min(math.ceil(batch_s / call_s), MOST_PER_BATCH))

    def _repeats(self, ready: Ready, n: int) -> list[float]:
        """Return the seconds of each batch; only the uninterrupted ones if there are enough."""
        (least, limit), every, calm, spent_s = self.effort.repeats, list[float](), list[float](), 0.0
        while len(every) < least or (len(every) < limit and spent_s < self.effort.point_s):
            run = self._run(ready, n)
            spent_s += run.seconds
            every.append(run.seconds)
            if run.queued_s < (1 - CALM_FRACTION) * run.seconds:
                calm.append(run.seconds)
        return calm if len(calm) >= least else every
