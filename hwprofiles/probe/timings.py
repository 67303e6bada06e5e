"""Statistics of a probe: how often a work is repeated, and the median and spread of that.

Wall times count once a work is soaked and its times settle: a device is slow when cold or hot. Repeats of one thread that other
programs interrupt count only if too few others are left. Works of the host's threads are sustained: the median of pieces.
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
MOST_SPREAD = 10.0  # that a profile can hold
ONE_RUN_SPREAD = 0.1  # of a work so long that it was run once
SETTLED_FRACTION = 0.02  # that two times in a row may differ by
MOST_SETTLING = 12  # times that may be thrown away for one work
MOST_PER_BATCH = 500  # works issued at once: the queue of a stream is finite
CALM_FRACTION = 0.95  # of a repeat in which our thread had its core: below it another program cut in
LEAST_PIECES = 3  # of a sustained work


class Use(NamedTuple):
    """Circumstances of a sustained work."""

    cores: float  # processor time of this process over wall time
    steal_fraction: float  # of the time of its cores, taken by a hypervisor
    last_third: float  # its rate in the last third of the time over that in the first: a quota shows here


class Timing(NamedTuple):
    """A measured time or rate, and half the width of what four of five repeats are in, as a fraction."""

    value: float
    spread_fraction: float
    use: Use | None = None

    @staticmethod
    def of(repeats: Sequence[float]) -> "Timing":
        """Median, and 1.9 median absolute deviations: in a normal distribution that holds four of five."""
        middle = statistics.median(repeats)
        deviation = statistics.median(abs(value - middle) for value in repeats)
        return Timing(middle, max(LEAST_SPREAD, 1.9 * deviation / middle))

    def quantity(self, source: str = "probe") -> dict[str, Any]:
        """A quantity of the profile's schema, as JSON values of six significant digits; sizes in bytes stay whole."""
        value = float(self.value) if isinstance(self.value, int) else float(f"{self.value:.6g}")
        return {"value": value, "spread_fraction": float(f"{min(self.spread_fraction, MOST_SPREAD):.6g}"), "source": source}


def lifted(times: Mapping[int, tuple[tuple[float, float], Timing]]) -> dict[int, Timing]:
    """Times by the size of their work; one that noise made shorter than that of less work is raised just above it and widened."""
    done: list[tuple[float, float, float]] = []
    found = {}
    for i, ((x, y), timing) in sorted(times.items(), key=lambda item: item[1][0]):
        least_s = 1.001 * max((s for x0, y0, s in done if x0 <= x and y0 <= y and (x0, y0) != (x, y)), default=0.0)
        spread_fraction = timing.spread_fraction + least_s / timing.value - 1
        found[i] = timing if timing.value > least_s else Timing(least_s, spread_fraction)
        done.append((x, y, found[i].value))
    return found


@dataclass(slots=True)
class Stopwatch:
    """Times works on a device, and adds up how long it was at work."""

    device: Device
    effort: Effort
    busy_s: float = 0.0

    def timing(self, ready: Ready, soak_s: float = 0.0, is_accompanied: bool = False) -> Timing:
        """Seconds of one work: the median of repeats, after `soak_s` of the same work."""
        first = self._run(ready, 1)  # loads kernels and fills allocators
        if ready.work.tasks is not None:
            return self._sustained(ready)
        if first.seconds > self.effort.longest_s:
            first = self._run(ready, 1)  # before which cuDNN, say, had first to make a kernel of that shape
        if first.seconds > self.effort.longest_s:
            return Timing(first.seconds, ONE_RUN_SPREAD)
        n = self._n_per_batch(self._run(ready, 1).seconds, is_accompanied)
        soaked_s = self.busy_s + soak_s
        while self.busy_s < soaked_s:
            self._run(ready, n)
        if self.effort.soak_s > 0:
            times = (self._run(ready, n).seconds for _ in range(MOST_SETTLING + 1))
            any(abs(now_s / before_s - 1) < SETTLED_FRACTION for before_s, now_s in pairwise(times))  # runs until two times agree
        batch = Timing.of(self._repeats(ready, n))
        return batch._replace(value=batch.value / n)

    def load(self, ready: Ready, work_s: float) -> Load:
        """What the device says of itself while it does a work that takes `work_s`."""
        return self.device.load(ready, self._n_per_batch(work_s, takes_turns=False))

    def _run(self, ready: Ready, n: int) -> Run:
        run = self.device.run(ready, n)
        self.busy_s += run.seconds
        return run

    def _sustained(self, ready: Ready) -> Timing:
        """The median of pieces of a work that goes on without a pause, and what it had of its cores."""
        n, pieces = max(1, round(self.effort.piece_s / self._run(ready, 1).seconds)), list[Run]()
        while len(pieces) < LEAST_PIECES or sum(piece.seconds for piece in pieces) < self.effort.sustained_s:
            pieces.append(self._run(ready, n))
        seconds, third = [piece.seconds for piece in pieces], len(pieces) // 3
        wall_s = sum(seconds)
        first_s, last_s = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
        cpu_s, steal_s = (sum(getattr(piece, name) for piece in pieces) for name in ("cpu_s", "steal_s"))
        middle = Timing.of(seconds)
        return middle._replace(value=middle.value / n, use=Use(cpu_s / wall_s, steal_s / wall_s, first_s / last_s))

    def _n_per_batch(self, call_s: float, takes_turns: bool) -> int:
        batch_s = self.effort.window_s if takes_turns else self.effort.batch_s
        return max(1, min(math.ceil(batch_s / call_s), MOST_PER_BATCH))

    def _repeats(self, ready: Ready, n: int) -> list[float]:
        """Seconds of each batch, the calm ones alone where there are enough of them."""
        (least, most), every, calm, spent_s = self.effort.repeats, list[float](), list[float](), 0.0
        while len(every) < least or (len(every) < most and spent_s < self.effort.point_s):
            run = self._run(ready, n)
            spent_s += run.seconds
            every.append(run.seconds)
            if run.queued_s < (1 - CALM_FRACTION) * run.seconds:
                calm.append(run.seconds)
        return calm if len(calm) >= least else every
