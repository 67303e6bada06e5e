"""Lanes of a device: a lane does its work itself, or gives it to a stream, which does it later.

On a CPU every lane does its own work; beside a GPU only the host's lanes do. A stream's lane only issues; events order streams:
`mark` records one, `follow` makes another stream, or a lane that works itself, wait for it. An executor's "done" then means issued;
the host's own lane's waits bound how far the host runs ahead.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from queue import SimpleQueue

import torch
from torch.cuda import Event, Stream

from penstock.runtime.plan import Lane
from penstock.runtime.plan.timeline import Span

from .streams import CudaStreams

ENDING_S = 10.0  # that the work of a run which has failed may take to end, before its thread is given up
MANY_CORES = 8  # from which on two of them feed a GPU
HOST_LANES = (Lane.CPU, Lane.DISK)  # that work themselves beside a GPU, too
N_LOOKS = 5  # at a device's clock and the host's at once; the quickest look knows best
Timers = tuple[Event, Event]  # before an op in its stream, and after


class LaneThread:
    """One thread for all runs of a lane, as cuDNN keeps its plans per thread for ever. It ends with the last reference to this
    object, and keeps no process alive."""

    def __init__(self, lane: Lane) -> None:
        self._name, self._is_free = f"lane-{lane}", threading.Lock()
        self._asked: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def perform(self, work: Callable[[], None]) -> None:
        """Do the work there; return or raise when it has ended. RuntimeError if an earlier one hangs there."""
        if not self._is_free.acquire(timeout=ENDING_S):
            raise RuntimeError(f"{self._name} is still at an op of a run that has failed; start a new process")
        done: Future[None] = Future()
        try:
            self._asked.put((work, done))
            done.result()
        finally:
            self._is_free.release()
            del done  # an error would hold it, and it the error


def _serve(asked: "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (given := asked.get()) is not None:
        work, done = given
        del given
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        del work  # a caller that has the result may count on it that nothing of the run is held here
        done.set_result(None) if error is None else done.set_exception(error)
        del done, error


class Lanes:
    """The lanes of a device, with the threads and cores that they work on. All machines on the device share them."""

    def __init__(self, cores: Mapping[Lane, list[int]], pins: bool, streams: CudaStreams | None) -> None:
        """`cores` of each lane that there is, to which its thread keeps if it `pins`. `streams` of the device; None: the CPU."""
        self.cores, self.streams, self._pins = cores, streams, pins
        self.device = streams.device if streams is not None else torch.device("cpu")
        self._compute = LaneThread(Lane.GPU) if streams is not None else None
        self.streams_of: dict[Lane, Stream] = {}  # those of the lanes that issue
        if streams is not None:
            self.streams_of = {lane: streams.stream() for lane in cores if lane not in HOST_LANES}

    def current(self, lane: Lane) -> AbstractContextManager[None]:
        """Issue the calling thread's work to the lane's stream, if it has one."""
        stream = self.streams_of.get(lane)
        return nullcontext() if self.streams is None or stream is None else self.streams.current(stream)

    def finish(self, lane: Lane) -> None:
        """Return once all that the lane was given is done; raise what went wrong there."""
        if self.streams is not None and lane in self.streams_of:
            self.streams.finish(self.streams_of[lane])

    def issue(self, lane: Lane, name: str, work: Callable[[], None]) -> Timers | None:
        """Do the work; or have the lane's stream do it, between two timers."""
        if self.streams is None or lane not in self.streams_of:
            work()
            return None
        stream, (begin, end) = self.streams_of[lane], (self.streams.event(is_timed=True), self.streams.event(is_timed=True))
        begin.record(stream)
        self.streams.issue(stream, name, work)
        end.record(stream)
        return begin, end

    def timed(self, records: Sequence[tuple[Span, Timers | None]]) -> list[Span]:
        """The spans of ops, those of streams at the times when they really ran: the host only sees when it issued an op. Called
        when all streams have ended. A device tells elapsed time in single precision: to some millionths of a kept step."""
        if self.streams is None or not self.streams_of:
            return [span for span, _ in records]
        later, at_s = self._now(self.streams, next(iter(self.streams_of.values())))

        def real(span: Span, timers: Timers | None) -> Span:
            if timers is None:
                return span
            start_s = at_s - timers[0].elapsed_time(later) / 1e3  # torch counts in milliseconds
            return replace(span, start_s=start_s, end_s=start_s + timers[0].elapsed_time(timers[1]) / 1e3)

        return [real(*record) for record in records]

    def _now(self, streams: CudaStreams, stream: Stream) -> tuple[Event, float]:
        """A timer that has been reached, and the host's clock then: one for all streams, so that these agree among themselves."""
        looks = []
        for _ in range(N_LOOKS):
            timer, before_s = streams.event(is_timed=True), time.perf_counter()
            timer.record(stream)
            timer.synchronize()
            looks.append((time.perf_counter() - before_s, before_s, timer))
        took_s, before_s, timer = min(looks, key=lambda look: look[0])
        return timer, before_s + took_s / 2

    def mark(self, lane: Lane) -> Event | None:
        """Reached when the lane's stream has done all that it was given so far; None where what is given is done."""
        if self.streams is None or lane not in self.streams_of:
            return None
        event = self.streams.event()
        event.record(self.streams_of[lane])
        return event

    def follow(self, lane: Lane, event: Event) -> None:
        """What the lane is given from now on is done after the event: its stream waits, or the calling thread."""
        if lane in self.streams_of:
            self.streams_of[lane].wait_event(event)
        else:
            event.synchronize()

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        self._compute.perform(work) if self._compute is not None and lane is Lane.GPU else work()

    @contextmanager
    def settled(self, lane: Lane) -> Iterator[None]:
        """The calling thread, which is the lane's alone: its cores, its threads inside a CPU's kernel, and no autograd."""
        if self._pins:
            os.sched_setaffinity(0, self.cores[lane])  # 0: the calling thread
        computes_here = self._pins and self.streams is None and lane is Lane.GPU
        torch.set_num_threads(len(self.cores[lane]) if computes_here else 1)
        with torch.no_grad():
            yield


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the gpu lane, cores of the copies and the optimizer) on a CPU machine. Half each, so that neither slows the other;
    an odd one to the host's lanes, of which there are three. A single one for both."""
    half = len(cores) // 2
    return cores[:half] or cores, cores[half:]


def split_beside_gpu(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the lanes that issue to a GPU, cores of the optimizer). One issuing lane at a time has the interpreter. With many
    cores they have two, so that a driver's thread or an interrupt does not delay them; the optimizer is memory-bound and hardly
    misses one. A single core serves all."""
    n_issuing = 2 if len(cores) >= MANY_CORES else 1
    return cores[:n_issuing], cores[n_issuing:] or cores
