"""How long does a piece of work take here?

Work is timed on the threads and cores that the runtime would give it: compute on its half of the cores, copies and optimizer on
the others, each alone and while the others run. A time is the median of repeats; its spread is robust against single outliers.
What other programs took of our cores is left out where the kernel counts it.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from .timings import ONE_RUN_SPREAD, Timing
from .works import Work

T = TypeVar("T")

CALM_FRACTION = 0.95  # of a run in which our thread had its core: below it another program cut in
MOST_STOLEN_FRACTION = 0.9  # of a run that is believed to have been others': the rest keeps a time above zero
HURRIED_REPEATS = 2  # once the time for all is used up
PATIENCE_FACTOR = 4  # on a busy machine a point may take that many times longer, while too few calm runs are found
BARRIER_TIMEOUT_S = 60  # a lane that fails must not hold up the others


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to look. A point is repeated until `point_s` is used up, but for at least and at most as many times as said here."""

    least_repeats: int
    most_repeats: int
    point_s: float
    window_s: float  # length of one look at several threads together; there are `least_repeats` of them
    longest_s: float  # a work that takes longer than this is run once


@dataclass(slots=True)
class Bench:
    """The cores of each lane, the clock, and what is known so far of how lanes disturb each other."""

    patience: Patience
    compute_cores: list[int]
    host_cores: list[int]
    clock: Callable[[], float] = time.perf_counter
    queue_clock: Callable[[], float] = field(default_factory=lambda: queued_s)  # runs while this thread wants a core and has none
    hurry_after_s: float | None = None  # on the clock: from then on a point gets its time and fewer repeats
    measured_s: float = 0.0
    stolen_s: float = 0.0  # of that, in which other programs had our core
    slowdown: dict[str, float] = field(default_factory=dict)  # time with the other lanes busy over time alone, by kind of work

    @property
    def all_cores(self) -> list[int]:
        """Cores of all lanes, each once."""
        return sorted({*self.compute_cores, *self.host_cores})

    def repeat(self, work: Work) -> Timing:
        """Median time of the work on this thread, without the runs that other programs cut into if enough others are left.

        If not, all runs count, each without the time for which it was cut. A first run that uses up the time is the result.
        """
        patience, least = self.patience, self.n_repeats()
        calm_s: list[float] = []
        all_s: list[float] = []
        first_s, _ = self._run(work)  # touches memory and fills caches of the library; counts only if it was long
        if first_s > patience.longest_s:
            return Timing(first_s, ONE_RUN_SPREAD)
        began_s = self.clock()
        while len(all_s) < patience.most_repeats:
            # Longer where calm runs are still wanted, but not without end: on a busy machine there may be none.
            wanted = len(calm_s) < least and least == patience.least_repeats
            point_s = patience.point_s * (PATIENCE_FACTOR if wanted else 1)
            if len(all_s) >= least and self.clock() - began_s > point_s:
                break
            seconds, stolen_s = self._run(work)
            self.measured_s += seconds
            self.stolen_s += stolen_s
            all_s.append(seconds - stolen_s)
            if stolen_s < (1 - CALM_FRACTION) * seconds:
                calm_s.append(seconds)
        return Timing.of(calm_s if len(calm_s) >= least else all_s)

    def n_repeats(self) -> int:
        """How often a point is looked at: as often as patience wants, or less when time is up."""
        in_time = self.hurry_after_s is None or self.clock() < self.hurry_after_s
        return self.patience.least_repeats if in_time else min(HURRIED_REPEATS, self.patience.least_repeats)

    def _run(self, work: Work) -> tuple[float, float]:
        """Seconds on the clock, and for how many of them the thread waited for a core that another program had."""
        start_s, start_queued_s = self.clock(), self.queue_clock()
        work()
        seconds = self.clock() - start_s
        return seconds, min(self.queue_clock() - start_queued_s, MOST_STOLEN_FRACTION * seconds)

    def compute(self, work: Work) -> Timing:
        """Time of the work on the gpu lane's thread and cores."""
        return on_cores(self.compute_cores, len(self.compute_cores), lambda: self.repeat(work))

    def host(self, work: Work) -> Timing:
        """Time of the work on a host lane's thread."""
        return on_cores(self.host_cores, 1, lambda: self.repeat(work))

    def slow_by(self, kind: str, works: Sequence[Work], busy: Sequence[Work]) -> None:
        """Remember what host lanes that do `busy` cost compute lanes that do `works`: the median of the ratios."""
        ratios = []
        for work in [*works] * self.n_repeats():
            alone = self.compute(work)
            with repeating(self.host_cores, busy):
                loaded = self.compute(work)
            ratios.append(loaded.seconds / alone.seconds)
        self.slowdown[kind] = max(1.0, statistics.median(ratios))

    def together(self, lanes: Sequence[tuple[Sequence[int], Work]]) -> list[Timing]:
        """Seconds per run of each lane's work while all of them run, each on its cores; without what other programs took."""
        windows = [self._window(lanes) for _ in range(self.n_repeats())]
        return [Timing.of(seconds) for seconds in zip(*windows, strict=True)]

    def _window(self, lanes: Sequence[tuple[Sequence[int], Work]]) -> list[float]:
        """Seconds per run of each lane's work, in one window of time."""
        start = threading.Barrier(len(lanes), timeout=BARRIER_TIMEOUT_S)

        def lane(work: Work) -> tuple[float, float, float, int]:
            work()
            start.wait()
            start_s, start_cpu_s, start_queued_s, n = self.clock(), time.thread_time(), self.queue_clock(), 0
            while n == 0 or self.clock() - start_s < self.patience.window_s:
                work()
                n += 1
            return self.clock() - start_s, time.thread_time() - start_cpu_s, self.queue_clock() - start_queued_s, n

        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = [pool.submit(on_cores, cores, 1, lambda w=work: lane(w)) for cores, work in lanes]
            runs = [future.result() for future in futures]
        result = []
        for (cores, _), (seconds, _, in_queue_s, n) in zip(lanes, runs, strict=True):
            sharing = [run for (other, _), run in zip(lanes, runs, strict=True) if {*other} & {*cores}]
            if len(sharing) <= len(cores):
                result.append((seconds - min(in_queue_s, MOST_STOLEN_FRACTION * seconds)) / n)
            else:  # lanes wait for each other too: what all of them together did not have of their cores, others had
                had_fraction = sum(cpu_s for _, cpu_s, _, _ in sharing) / (len(cores) * max(run[0] for run in sharing))
                result.append(seconds * min(1.0, had_fraction) / n)
        return result

    def handover(self, n_rounds: int = 200) -> Timing:
        """From one lane's signal to another's start, as the executor hands over: half of a round trip."""
        turn, conditions = [0], [threading.Condition(), threading.Condition()]

        def player(me: int) -> list[float]:
            seconds = []
            for i in range(n_rounds):
                began_s = self.clock()
                with conditions[me]:
                    conditions[me].wait_for(lambda i=i: turn[0] == 2 * i + me)  # type: ignore[misc]
                turn[0] += 1
                with conditions[1 - me]:
                    conditions[1 - me].notify_all()
                seconds.append(self.clock() - began_s)
            return seconds

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(on_cores, self.compute_cores, len(self.compute_cores), lambda: player(0))
            second = pool.submit(on_cores, self.host_cores, 1, lambda: player(1))
            rounds = [*first.result()[1:], *second.result()[1:]]  # the first of each waits for the other thread to be made
        timing = Timing.of(rounds)
        return Timing(timing.seconds / 2, timing.spread_fraction)


def on_cores(cores: Sequence[int], n_threads: int, work: Callable[[], T]) -> T:
    """Run the work on a fresh thread, bound to the cores, with `n_threads` inside a kernel."""

    def settled() -> T:
        os.sched_setaffinity(0, cores)  # 0: the calling thread
        torch.set_num_threads(n_threads)
        with torch.no_grad():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(settled).result()


@contextmanager
def repeating(cores: Sequence[int], works: Sequence[Work]) -> Iterator[None]:
    """Threads on the cores that repeat their work until the context ends; an error in one of them is raised then."""
    stop = threading.Event()
    started = [threading.Event() for _ in works]

    def loop(work: Work, running: threading.Event) -> None:
        try:
            while not stop.is_set():
                work()
                running.set()
        finally:
            running.set()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(on_cores, cores, 1, lambda w=w, r=r: loop(w, r)) for w, r in zip(works, started, strict=True)]
        for running in started:
            running.wait()
        try:
            yield
        finally:
            stop.set()
        for future in futures:
            future.result()


def queued_s() -> float:
    """Seconds for which this thread wanted a core and had none, since it began; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
