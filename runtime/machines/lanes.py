"""Lanes of a device: a lane does its work itself, or gives it to a stream, which does it later.

On a CPU every lane does its own work; beside a GPU only the host's does. A stream's lane only issues: that one op is done before
another is left to events. `mark` records one on the stream, `follow` makes the other stream, or the lane that works itself, wait
for it. So an executor's "done" means issued, and how far the host runs ahead is bounded by what its own lane, which does real work,
waits for.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from runtime.lane_thread import LaneRun, LaneThread, on_its_own_thread
from runtime.plan import Lane

from .streams import Event, Stream, Streams


class Token:
    """An event that others may wait for. It goes back to the pool with the last reference to the token."""

    __slots__ = ("_pool", "_streams", "event")

    def __init__(self, event: Event, streams: Streams, pool: list[Event]) -> None:
        self.event, self._streams, self._pool = event, streams, pool

    def wait(self) -> None:
        """Return once the event has been reached."""
        self._streams.wait(self.event)

    def __del__(self) -> None:
        self._pool.append(self.event)


class Immediate:
    """A lane that does its work itself: what is issued is done, and there is nothing more to wait for."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def issue(self, name: str, work: Callable[[], None], timers: Sequence[Event] = ()) -> None:
        work()

    def mark(self) -> Token | None:
        return None

    def follow(self, token: Token) -> None:
        token.wait()


class Issuing:
    """A lane whose work a stream does later, in order."""

    def __init__(self, streams: Streams, pool: list[Event]) -> None:
        """`pool`: events that no token holds."""
        self.stream: Stream = streams.stream()
        self._streams, self._pool = streams, pool

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

    def mark(self) -> Token | None:
        """Reached when the stream has done all that it was given so far."""
        try:
            event = self._pool.pop()
        except IndexError:  # asked of the list itself, as several lanes take from it
            event = self._streams.event()
        self._streams.record(event, self.stream)
        return Token(event, self._streams, self._pool)

    def follow(self, token: Token) -> None:
        self._streams.order(self.stream, token.event)


class Lanes:
    """The lanes of a device, with the threads and cores that they work on. All machines on the device share them."""

    def __init__(self, cores: Mapping[Lane, list[int]], pins: bool, streams: Streams | None) -> None:
        """`cores` of each lane that there is, to which its thread keeps if it `pins`. `streams` are the device's; None: it is the
        CPU."""
        self.cores, self.streams, self._pins = cores, streams, pins
        self.device = streams.device if streams is not None else torch.device("cpu")
        # One thread for all runs: what cuDNN keeps per thread is then kept once.
        self._compute = LaneThread(Lane.GPU) if streams is not None else None
        pool: list[Event] = []
        self.of: dict[Lane, Immediate | Issuing] = {
            lane: Immediate() if streams is None or lane is Lane.CPU else Issuing(streams, pool) for lane in cores
        }

    @property
    def streams_of(self) -> dict[Lane, Stream]:
        """The lanes that issue, with their streams."""
        return {lane: of.stream for lane, of in self.of.items() if isinstance(of, Issuing)}

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> LaneRun:
        return self._compute.run(work) if self._compute is not None and lane is Lane.GPU else on_its_own_thread(lane, work)

    @contextmanager
    def settled(self, lane: Lane) -> Iterator[None]:
        """The calling thread, which is the lane's alone: its cores, its threads inside a CPU's kernel, and no autograd."""
        if self._pins:
            os.sched_setaffinity(0, self.cores[lane])  # 0: the calling thread
        computes_here = self._pins and self.streams is None and lane is Lane.GPU
        torch.set_num_threads(len(self.cores[lane]) if computes_here else 1)
        with torch.no_grad():
            yield
