"""How long does work on a device take, once its clocks have settled?

Time is what passes between two events on the stream that does the work. A device that slept is slow at first and one that is hot
slow in the end, so work is repeated until one timing is like the one before, and only then counted.
"""

import math
from dataclasses import dataclass, field

from .device import Device, Issue, Load, Stream
from .timings import ONE_RUN_SPREAD, Timing

SETTLED_FRACTION = 0.02  # that two timings in a row may differ by
WARM_BATCH_S = 0.25  # of one timing while warming up: clocks rise and fall over tenths of a second
WARM_FRACTION = 0.01  # that timings may differ by
WARM_IN_A_ROW = 3  # timings that agree before a device counts as warm
MOST_SETTLING = 12  # timings that may be thrown away for one work
MOST_PER_BATCH = 500  # works issued at once: the queue of a stream is finite


@dataclass(slots=True)
class Stopwatch:
    """Times works on a device. A timing lasts about `batch_s`; one work longer than `longest_s` is run once."""

    device: Device
    batch_s: float
    longest_s: float
    least_repeats: int
    most_repeats: int
    point_s: float  # a work is repeated until that is used up
    busy_s: float = field(default=0.0)  # that the device has worked so far

    def batch(self, issue: Issue, n: int, stream: Stream = Stream.COMPUTE) -> float:
        """Seconds per work of n in a row."""
        first = self.device.record(stream)
        issue(n)
        last = self.device.record(stream)
        self.device.wait(last)
        seconds = self.device.elapsed_s(first, last)
        self.busy_s += seconds
        return max(seconds, 1e-9) / n

    def timing(self, issue: Issue, stream: Stream = Stream.COMPUTE, soak_s: float = 0.0) -> Timing:
        """Median of repeats, after so many seconds of the same work, and after timings have settled."""
        first_s = self.batch(issue, 1, stream)  # loads the kernel and fills the allocator
        if first_s > self.longest_s:
            return Timing(first_s, ONE_RUN_SPREAD)
        n = self._n_per_batch(self.batch(issue, 1, stream))
        soaked_s = self.busy_s + soak_s
        while self.busy_s < soaked_s:
            self.batch(issue, n, stream)
        before_s = self.batch(issue, n, stream)
        timings = [self.batch(issue, n, stream)]
        for _ in range(MOST_SETTLING):
            if abs(timings[0] / before_s - 1) < SETTLED_FRACTION:
                break
            before_s, timings = timings[0], [self.batch(issue, n, stream)]
        while len(timings) < self.least_repeats or (len(timings) < self.most_repeats and sum(timings) * n < self.point_s):
            timings.append(self.batch(issue, n, stream))
        return Timing.of(timings)

    def load(self, issue: Issue, one_s: float) -> Load:
        """What the device says of itself while it does a work that takes `one_s`."""
        issue(self._n_per_batch(one_s))
        load = self.device.load()
        self.device.synchronise()
        return load

    def warm_up(self, issue: Issue, most_s: float) -> None:
        """Work until several timings in a row agree, but not for longer than `most_s`: then the clocks are what training gets."""
        began_s = self.busy_s
        n = max(1, math.ceil(WARM_BATCH_S / self.batch(issue, 1)))
        row: list[float] = []
        while self.busy_s - began_s < most_s:
            row.append(self.batch(issue, min(n, MOST_PER_BATCH)))
            last = row[-WARM_IN_A_ROW:]
            if len(last) == WARM_IN_A_ROW and max(last) / min(last) - 1 < WARM_FRACTION:
                return

    def _n_per_batch(self, one_s: float) -> int:
        return max(1, min(math.ceil(self.batch_s / one_s), MOST_PER_BATCH))
