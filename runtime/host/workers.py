"""How do several cores share one op of the host?

The lane's own thread and a few helpers that live as long as the lane take an op's tasks, one after another, in order. Which of
them performs a task is chance, so a task's result must not depend on it. Threads wait for each other once per op.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Workers(Generic[S]):
    """Some threads, each with a thing of its own (its scratch memory), made once. Without helpers the caller does all."""

    def __init__(self, n_threads: int, own: Callable[[], S]) -> None:
        """`n_threads` counts the caller's."""
        assert n_threads > 0
        self._own = [own() for _ in range(n_threads)]
        self._asked: queue.SimpleQueue[_Job[S, object] | None] = queue.SimpleQueue()
        self._n_helpers = 0

    @property
    def n_threads(self) -> int:
        return len(self._own)

    @contextmanager
    def helped(self, settled: Callable[[], AbstractContextManager[object]] = nullcontext) -> Iterator[None]:
        """Until the context ends there are helpers. Each is `settled` before this returns, as long as it lives."""
        assert self._n_helpers == 0, "the workers are at work already"
        beginning: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        helpers: list[threading.Thread] = []
        try:
            for own in self._own[1:]:
                args = (own, settled, beginning)
                helpers.append(threading.Thread(target=self._help, args=args, name=f"worker-{len(helpers) + 1}", daemon=True))
                helpers[-1].start()
                if (error := beginning.get()) is not None:
                    raise error
                self._n_helpers += 1
            yield
        finally:
            for _ in range(self._n_helpers):
                self._asked.put(None)
            self._n_helpers = 0
            for helper in helpers:
                if helper.is_alive():
                    helper.join()

    def _help(
        self,
        own: S,
        settled: Callable[[], AbstractContextManager[object]],
        beginning: "queue.SimpleQueue[BaseException | None]",
    ) -> None:
        try:
            with settled():
                beginning.put(None)
                while (job := self._asked.get()) is not None:
                    job.work(own)
                    del job  # what it works on is not this thread's to keep
        except BaseException as error:  # of `settled`; those of tasks are the job's
            beginning.put(error)

    def run(self, tasks: Sequence[Callable[[S], T]]) -> list[T]:
        """The tasks' results, in their order. Of the tasks that fail the first one's error is raised, when none runs any more."""
        job = _Job[S, T](tasks)
        for _ in range(min(self._n_helpers, len(tasks) - 1)):
            self._asked.put(job)  # type: ignore[arg-type]  # a helper never looks at the results
        job.work(self._own[0])
        return job.finished()


class _Job(Generic[S, T]):
    """Tasks that are taken in order, and their results."""

    def __init__(self, tasks: Sequence[Callable[[S], T]]) -> None:
        self._tasks = tasks
        self._n_taken = self._n_running = 0
        self._results: dict[int, T] = {}
        self._failures: dict[int, BaseException] = {}
        self._changed = threading.Condition()

    def work(self, own: S) -> None:
        """Take tasks until there is none left, or one failed."""
        while True:
            with self._changed:
                if self._failures or self._n_taken == len(self._tasks):
                    return
                number = self._n_taken
                self._n_taken += 1
                self._n_running += 1
            try:
                self._results[number] = self._tasks[number](own)
            except BaseException as error:
                self._failures[number] = error
            finally:
                with self._changed:
                    self._n_running -= 1
                    self._changed.notify_all()

    def finished(self) -> list[T]:
        with self._changed:
            while self._n_running:
                self._changed.wait()
        if self._failures:
            raise self._failures[min(self._failures)]
        return [self._results[number] for number in range(len(self._tasks))]
