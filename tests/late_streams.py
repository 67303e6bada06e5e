"""Simulated CUDA streams on the CPU that run work as late as events allow, or earlier at random.

Work issued to a stream is queued, and performed in order by the first thread that waits for it, so that a missing wait gives wrong
values. The memory model of a device is not simulated.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.planner.check.check import check
from penstock.runtime.machines.lanes import CudaDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan

from .training import Remembers, machine_for, plan_of, poison, released_slots


class LateStream:
    def __init__(self, streams: "LateStreams") -> None:
        self.owner, self.names = streams, list[str]()
        self.todo: deque[Callable[[], None]] = deque()

    def wait_event(self, event: "LateEvent") -> None:
        mark = event.mark
        assert mark is not None, "the event was never recorded"
        self.owner.append(self, lambda: self.owner.run_until(mark))


class Mark:
    """One recording of an event in a stream."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.reached_s = stream, None


class LateEvent:
    def __init__(self, streams: "LateStreams") -> None:
        self.owner = streams
        self.mark: Mark | None = None

    def record(self, stream: LateStream) -> None:
        mark = self.mark = Mark(stream)

        def reach() -> None:
            mark.reached_s = time.perf_counter()

        self.owner.append(stream, reach)

    def synchronize(self) -> None:
        self.owner.n_waits += 1
        with self.owner.one_at_a_time:
            if self.mark is not None:
                self.owner.run_until(self.mark)

    def elapsed_time(self, last: "LateEvent") -> float:
        assert self.mark is not None
        assert last.mark is not None
        assert last.mark.reached_s >= self.mark.reached_s, "elapsed time is negative"
        return (last.mark.reached_s - self.mark.reached_s) * 1e3


class LateStreams:
    """Fake of `runtime.machines.streams.CudaStreams` on the CPU.

    `haste`: probability that a call runs work of a random stream; at 0 work runs only when a thread waits for it. One stream,
    selected by the seed, never runs early.
    """

    device = torch.device("cpu")
    name = None

    def __init__(self, seed: int = 0, haste: float = 0.0) -> None:
        self.rng, self.haste, self.sleepy = random.Random(seed), haste, seed % 4
        self.streams: list[LateStream] = []
        self.n_waits = 0
        self.broken: BaseException | None = None
        self.one_at_a_time = threading.RLock()
        self._current = threading.local()

    def stream(self) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def event(self, is_timed: bool = False) -> LateEvent:
        return LateEvent(self)

    @contextmanager
    def current(self, stream: LateStream) -> Iterator[None]:
        self._current.stream = stream
        yield
        del self._current.stream

    def issue(self, stream: LateStream, name: str, work: Callable[[], None]) -> None:
        assert self._current.stream is stream, "the current stream of the thread is another one"
        stream.names.append(name)

        def quietly() -> None:
            with torch.no_grad():
                work()

        self.append(stream, quietly)

    def finish(self, stream: LateStream) -> None:
        with self.one_at_a_time:
            while stream.todo:
                self._run_next(stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def lock(self, arenas: Any, peers: Any = ()) -> None:
        pass

    def peak_bytes(self) -> None:
        return None

    def append(self, stream: LateStream, work: Callable[[], None]) -> None:
        with self.one_at_a_time:
            stream.todo.append(work)
            while self.rng.random() < self.haste:
                hasty = self.rng.randrange(len(self.streams))
                if hasty != self.sleepy and self.streams[hasty].todo:
                    self._run_next(self.streams[hasty])

    def run_until(self, mark: Mark) -> None:
        while mark.reached_s is None:
            self._run_next(mark.stream)

    def _run_next(self, stream: LateStream) -> None:
        if self.broken is not None:
            raise RuntimeError(f"CUDA error: {self.broken}")
        work = stream.todo.popleft()
        try:
            work()
        except BaseException as error:
            self.broken = self.broken or error
            raise


class OnGpu(TorchMachine):
    """Machine on a GPU, by default on the first CUDA device."""

    def __init__(self, plan: Plan, *args, streams: Any = None, **kwargs) -> None:
        super().__init__(plan, *args, device=CudaDevice(streams), **kwargs)


class Poisoned(Remembers, OnGpu):
    """Fill a slot with NaN on release, in the stream that used it last."""

    def __init__(self, plan: Plan, *args, **kwargs) -> None:
        super().__init__(plan, *args, **kwargs)
        self.released = released_slots(plan)

    def work(self, index, op, step):
        self.around(super().work, self.released, index, op, step)

    def around(self, work, released, index, op, step):
        work(index, op, step)
        for slot in released[index]:
            poison(self.arenas, slot)


def machine_of(config, semantics, policy, seed=0, haste=0.0, machine_type=Poisoned):
    plan = plan_of(config, semantics, policy)
    check(plan)
    return machine_for(plan, machine_type, streams=LateStreams(seed, haste))
