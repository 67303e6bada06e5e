"""Lanes of a device: a lane performs ops on its thread, or issues them to a stream.

On a CPU all lanes perform their ops; with a GPU only the lanes of the host do. Events order streams: `mark` records an event, and
`follow` makes another stream or thread wait for it. An op on a stream is done for the executor when it is issued; waits of the cpu
lane limit the run-ahead of the host.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
from torch.cuda import Event, Stream

from penstock.runtime.host.slabs import settle_allocator
from penstock.runtime.layers.attention import use_attention
from penstock.runtime.plan import Lane, Setup
from penstock.runtime.plan.timeline import Span

from .streams import CudaStreams

ENDING_S = 10.0  # timeout for the last op of a failed run, before its thread is abandoned
MANY_CORES = 8  # with so many cores or more, two of them feed a GPU
HOST_LANES = (Lane.CPU, Lane.DISK)  # perform ops on their threads even with a GPU
N_LOOKS = 5  # readings of the device's and the host's clock; the quickest is the most accurate
Timers = tuple[Event, Event]  # before an op in its stream, and after it


class LaneThread:
    """Daemon thread for all runs of a lane, because cuDNN caches plans per thread forever. It ends with the last reference to this
    object."""

    def __init__(self, lane: Lane) -> None:
        self._name, self._is_free = f"lane-{lane}", threading.Lock()
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def perform(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread and wait for it; re-raise its error. RuntimeError if earlier work hangs on the thread."""
        if not self._is_free.acquire(timeout=ENDING_S):
            raise RuntimeError(f"{self._name} still performs an op of a failed run; start a new process")
        future: Future[None] = Future()
        try:
            self._jobs.put((work, future))
            future.result()
        finally:
            self._is_free.release()
            del future  # break the reference cycle with an error


def _serve(jobs: "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (job := jobs.get()) is not None:
        work, future = job
        del job
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        del work  # release the run's tensors before the caller continues
        future.set_result(None) if error is None else future.set_exception(error)
        del future, error


class Lanes:
    """Lanes of a device with their threads and cores, shared by all machines on the device."""

    def __init__(self, cores: Mapping[Lane, list[int]], pins: bool, streams: CudaStreams | None) -> None:
        """`cores`: of each lane; its thread is pinned to them if `pins`. `streams`: of the GPU; None for a CPU."""
        self.cores, self.streams, self._pins = cores, streams, pins
        self.device = streams.device if streams is not None else torch.device("cpu")
        self._compute = LaneThread(Lane.GPU) if streams is not None else None
        self.streams_of: dict[Lane, Stream] = {}  # by lane that issues
        if streams is not None:
            self.streams_of = {lane: streams.stream() for lane in cores if lane not in HOST_LANES}

    def current(self, lane: Lane) -> AbstractContextManager[None]:
        """Issue the calling thread's work to the lane's stream, if it has one."""
        stream = self.streams_of.get(lane)
        return nullcontext() if self.streams is None or stream is None else self.streams.current(stream)

    def finish(self, lane: Lane) -> None:
        """Wait for the lane's stream, if it has one; raise its error."""
        if self.streams is not None and lane in self.streams_of:
            self.streams.finish(self.streams_of[lane])

    def issue(self, lane: Lane, name: str, work: Callable[[], None]) -> Timers | None:
        """Run `work`, or issue it to the lane's stream between two timers."""
        if self.streams is None or lane not in self.streams_of:
            work()
            return None
        stream, (begin, end) = self.streams_of[lane], (self.streams.event(is_timed=True), self.streams.event(is_timed=True))
        begin.record(stream)
        self.streams.issue(stream, name, work)
        end.record(stream)
        return begin, end

    def timed(self, records: Sequence[tuple[Span, Timers | None]]) -> list[Span]:
        """Spans of ops, with device times for ops on streams, because the host's times are those of issue. Call after all streams
        have finished. A device measures elapsed time in single precision: an error of some millionths of a step."""
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
        """Completed timer and the host's clock at its time, used for all streams, so that their spans are consistent."""
        looks = []
        for _ in range(N_LOOKS):
            timer, before_s = streams.event(is_timed=True), time.perf_counter()
            timer.record(stream)
            timer.synchronize()
            looks.append((time.perf_counter() - before_s, before_s, timer))
        took_s, before_s, timer = min(looks, key=lambda look: look[0])
        return timer, before_s + took_s / 2

    def mark(self, lane: Lane) -> Event | None:
        """Record an event after all work issued to the lane's stream so far; None for a lane without a stream."""
        if self.streams is None or lane not in self.streams_of:
            return None
        event = self.streams.event()
        event.record(self.streams_of[lane])
        return event

    def follow(self, lane: Lane, event: Event) -> None:
        """Make the lane's stream, or the calling thread, wait for the event."""
        if lane in self.streams_of:
            self.streams_of[lane].wait_event(event)
        else:
            event.synchronize()

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        self._compute.perform(work) if self._compute is not None and lane is Lane.GPU else work()

    @contextmanager
    def settled(self, lane: Lane) -> Iterator[None]:
        """Set up the calling thread for the lane: its cores, the number of torch's intra-op threads, and no autograd."""
        if self._pins:
            os.sched_setaffinity(0, self.cores[lane])  # 0: the calling thread
        computes_here = self._pins and self.streams is None and lane is Lane.GPU
        torch.set_num_threads(len(self.cores[lane]) if computes_here else 1)
        with torch.no_grad():
            yield


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A CPU with a separate "device" arena and real copies. The gpu lane has dedicated cores; the other lanes share the rest."""

    pin_threads: bool = False
    cores: tuple[list[int], list[int]] | None = None  # (of the gpu lane, of the other lanes); None: half of the process's each

    def lanes(self, plan: Setup) -> Lanes:
        settle_allocator()
        for_compute, for_host = self.cores or split_cores(sorted(os.sched_getaffinity(0)))
        return Lanes(dict.fromkeys(plan.lanes, for_host) | {Lane.GPU: for_compute}, self.pin_threads, streams=None)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU. The lanes of compute and of both copy directions have a stream each; the optimizer has most of the host's cores."""

    streams: CudaStreams | None = None  # None: of the first CUDA device

    def lanes(self, plan: Setup) -> Lanes:
        # Round a matrix product once, at its end. By default cuBLAS adds partial products in bf16 where it splits the inner
        # dimension, which for the gradient of a weight is the number of tokens.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        use_attention(plan.semantics.attention_kernel)
        to_issue, for_host = split_beside_gpu(sorted(os.sched_getaffinity(0)))
        cores = {lane: for_host if lane in HOST_LANES else to_issue for lane in plan.lanes}
        return Lanes(cores, pins=True, streams=self.streams or CudaStreams())


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the gpu lane, cores of copies and optimizer) on a CPU machine: half each, so that neither slows the other; an odd
    core to the second half, which has more lanes. A single core serves both."""
    half = len(cores) // 2
    return cores[:half] or cores, cores[half:]


def split_beside_gpu(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the lanes that issue to a GPU, cores of the optimizer). One issuing lane at a time holds the interpreter lock. With
    many cores they get two, so that a driver thread or an interrupt does not delay them; the optimizer is memory-bound and hardly
    slower without it. A single core serves all."""
    n_issuing = 2 if len(cores) >= MANY_CORES else 1
    return cores[:n_issuing], cores[n_issuing:] or cores
