"""Lanes of a device: a lane does its work itself, or gives it to a stream, which does it later.

On a CPU every lane does its own work; beside a GPU only the host's does. A stream's lane only issues: that one op is done before
another is left to events. `mark` records one on the stream, `follow` makes the other stream, or the lane that works itself, wait
for it. So an executor's "done" means issued, and how far the host runs ahead is bounded by what its own lane, which does real work,
waits for.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

import torch
from torch.cuda import Event, Stream

from runtime.plan import Lane

from .streams import CudaStreams

ENDING_S = 10.0  # that the work of a run which has failed may take to end, before its thread is given up
MANY_CORES = 8  # from which on two of them feed a GPU


class Immediate:
    """A lane that does its work itself: what is issued is done."""

    def __init__(self, streams: CudaStreams | None) -> None:
        """`streams`: of the lanes beside it; None: none of them issues anything."""
        self._streams = streams

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def issue(self, name: str, work: Callable[[], None], timers: Sequence[Event] = ()) -> None:
        work()

    def mark(self) -> Event | None:
        return None

    def follow(self, event: Event) -> None:
        if self._streams is not None:
            self._streams.wait(event)


class Issuing:
    """A lane whose work a stream does later, in order."""

    def __init__(self, streams: CudaStreams) -> None:
        self.stream, self._streams = streams.stream(), streams

    def current(self) -> AbstractContextManager[None]:
        """What the calling thread computes goes to the stream."""
        return self._streams.current(self.stream)

    def finish(self) -> None:
        """Return once all that was issued is done; raise what went wrong there."""
        self._streams.finish(self.stream)

    def issue(self, name: str, work: Callable[[], None], timers: Sequence[Event] = ()) -> None:
        """Have it done, between the two timers if there are any."""
        for begin in timers[:1]:
            self._streams.record(begin, self.stream)
        self._streams.issue(self.stream, name, work)
        for end in timers[1:]:
            self._streams.record(end, self.stream)

    def mark(self) -> Event | None:
        """Reached when the stream has done all that it was given so far."""
        event = self._streams.event()
        self._streams.record(event, self.stream)
        return event

    def follow(self, event: Event) -> None:
        self._streams.order(self.stream, event)


class LaneThread:
    """One thread for all runs of a lane whose work leaves something behind that is kept per thread and for ever, as cuDNN keeps its
    plans. It ends with the last reference to this object, and keeps no process alive."""

    def __init__(self, lane: Lane) -> None:
        self._name, self._is_free = f"lane-{lane}", threading.Lock()
        self._asked: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def perform(self, work: Callable[[], None]) -> None:
        """Have the work done there; return, or raise, when it has ended. RuntimeError where the thread is still at an earlier one,
        which hangs."""
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
        """`cores` of each lane that there is, to which its thread keeps if it `pins`. `streams` are the device's; None: it is the
        CPU."""
        self.cores, self.streams, self._pins = cores, streams, pins
        self.device = streams.device if streams is not None else torch.device("cpu")
        self._compute = LaneThread(Lane.GPU) if streams is not None else None
        self.of: dict[Lane, Immediate | Issuing] = {
            lane: Immediate(streams) if streams is None or lane is Lane.CPU else Issuing(streams) for lane in cores
        }

    @property
    def streams_of(self) -> dict[Lane, Stream]:
        """The lanes that issue, with their streams."""
        return {lane: of.stream for lane, of in self.of.items() if isinstance(of, Issuing)}

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        """As a machine's."""
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


# -- cores -------------------------------------------------------------------------------------------------------------


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the gpu lane, cores of the copies and the optimizer) on a CPU machine.

    Half each, so that neither slows the other; an odd one goes to the host lanes, of which there are three. A single core
    serves both.
    """
    ordered = _ordered(cores)
    half = len(ordered) // 2
    return ordered[:half] or ordered, ordered[half:]


def split_beside_gpu(cores: list[int]) -> tuple[list[int], list[int]]:
    """(cores of the lanes that issue to a GPU, cores of the optimizer).

    Of the three lanes that issue one at a time has the interpreter. Where there are many cores they have two, so that a thread of
    the driver or an interrupt does not hold them up; the optimizer, which memory binds, hardly misses it. A single core serves all.
    """
    ordered = _ordered(cores)
    n_issuing = 2 if len(ordered) >= MANY_CORES else 1
    return ordered[:n_issuing], ordered[n_issuing:] or ordered


def _ordered(cores: list[int]) -> list[int]:
    if not cores:
        raise ValueError("no cores to split")
    return sorted(set(cores))
