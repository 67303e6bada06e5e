"""A lane's thread that outlives runs.

A lane whose work leaves something behind that is kept per thread and for ever, as cuDNN keeps its plans, has one thread for all
runs.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from runtime.plan import Lane

ENDING_S = 10.0  # that the work of a run which has failed may take to end, before its thread is given up


class LaneThread:
    """One thread for all that a lane is ever given. It ends with the last reference to this object, and keeps no process alive."""

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
