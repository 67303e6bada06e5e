"""Threads of lanes: a new one for each run, or one for all runs.

A lane whose work leaves something behind that is kept per thread and for ever, as cuDNN keeps its plans, has one thread for all
runs.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from runtime.plan import Lane

ENDING_S = 10.0  # that the work of a run which has failed may take to end, before its thread is given up


class LaneRun(Protocol):
    """A lane's work in one run: begun, waited for and asked like a thread."""

    name: str

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""

    def join(self, timeout: float | None = None) -> None: ...


def on_its_own_thread(lane: Lane, work: Callable[[], None]) -> LaneRun:
    """On a thread that ends with the work."""
    return threading.Thread(target=work, name=f"lane-{lane}", daemon=True)


class LaneThread:
    """One thread for all that a lane is ever given. It ends with the last reference to this object, and keeps no process alive."""

    def __init__(self, lane: Lane) -> None:
        self.name = f"lane-{lane}"
        self._asked: SimpleQueue[_Run | None] = SimpleQueue()
        self._last: _Run | None = None
        threading.Thread(target=_serve, args=(self._asked,), name=self.name, daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def run(self, work: Callable[[], None]) -> LaneRun:
        """The work, not begun yet. It must not raise."""
        return _Run(self, work)

    def begin(self, run: "_Run") -> None:
        """RuntimeError where the thread is still at an earlier one, which hangs: behind it this one would never begin."""
        if self._last is not None and not self._last.has_ended.wait(ENDING_S):
            raise RuntimeError(f"{self.name} is still at an op of a run that has failed; start a new process")
        self._asked.put(run)
        self._last = run


class _Run:
    """A lane's work in one run, on the thread that has all of them."""

    def __init__(self, thread: LaneThread, work: Callable[[], None]) -> None:
        self.name, self.has_ended = thread.name, threading.Event()
        self._thread: LaneThread | None = thread
        self._work: Callable[[], None] | None = work
        self._is_begun = False

    def start(self) -> None:
        assert self._thread is not None, "started already"
        thread, self._thread = self._thread, None
        thread.begin(self)
        self._is_begun = True  # last: what an interrupt keeps from being queued is never waited for

    def is_alive(self) -> bool:
        return self._is_begun and not self.has_ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.has_ended.wait(timeout)

    def perform(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        finally:
            del work  # a caller that waits may count on it that nothing of the run is held here
            self.has_ended.set()


def _serve(asked: "SimpleQueue[_Run | None]") -> None:
    while (run := asked.get()) is not None:
        run.perform()
        del run
