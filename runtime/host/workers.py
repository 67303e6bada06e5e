"""Worker threads that share the tasks of one op of the host.

The lane's own thread and a few helpers that live as long as the lane take tasks one after another, in order. Which of them performs
a task is chance, so a task's result must not depend on it. Threads wait for each other once per op.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class _Job(Generic[S, T]):
    """Tasks that are taken in order, and their results."""

    def __init__(self, tasks: Sequence[Callable[[S], T]]) -> None:
        self._tasks, self._numbers = tasks, count()
        self._results: dict[int, T] = {}
        self._failures: dict[int, BaseException] = {}
        self.left: SimpleQueue[None] = SimpleQueue()  # by helpers

    def work(self, own: S) -> None:
        """Take tasks until there is none left, or one failed."""
        while not self._failures and (number := next(self._numbers)) < len(self._tasks):
            try:
                self._results[number] = self._tasks[number](own)
            except BaseException as error:
                self._failures[number] = error

    def results(self) -> list[T]:
        if self._failures:
            raise self._failures[min(self._failures)]
        return [self._results[number] for number in range(len(self._tasks))]


class Workers(Generic[S]):
    """Some threads, each with a thing of its own (its scratch memory), made once. Without helpers the caller does all."""

    def __init__(self, n_threads: int, own: Callable[[], S]) -> None:
        """`n_threads` counts the caller's."""
        assert n_threads > 0
        self._own = [own() for _ in range(n_threads)]
        self._asked: SimpleQueue[_Job[S, object] | None] = SimpleQueue()
        self._n_helpers = 0

    @contextmanager
    def helped(self, settled: Callable[[], AbstractContextManager[object]] = nullcontext) -> Iterator[None]:
        """Until the context ends there are helpers. Each is `settled` before this returns, as long as it lives."""
        assert self._n_helpers == 0, "the workers are at work already"
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        helpers = [
            threading.Thread(target=self._help, args=(own, settled, begun), name=f"worker-{i}", daemon=True)
            for i, own in enumerate(self._own[1:], start=1)
        ]
        try:
            for helper in helpers:
                helper.start()
                if (error := begun.get()) is not None:
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
        self, own: S, settled: Callable[[], AbstractContextManager[object]], begun: "SimpleQueue[BaseException | None]"
    ) -> None:
        try:
            with settled():
                begun.put(None)
                while (job := self._asked.get()) is not None:
                    job.work(own)
                    job.left.put(None)
                    del job  # what it works on is not this thread's to keep
        except BaseException as error:  # of `settled`; those of tasks are the job's
            begun.put(error)

    def run(self, tasks: Sequence[Callable[[S], T]]) -> list[T]:
        """The tasks' results, in their order. Of the tasks that fail the first one's error is raised, when none runs any more."""
        job = _Job[S, T](tasks)
        n_asked = min(self._n_helpers, max(len(tasks) - 1, 0))
        for _ in range(n_asked):
            self._asked.put(job)  # type: ignore[arg-type]  # a helper never looks at the results
        job.work(self._own[0])
        for _ in range(n_asked):
            job.left.get()
        return job.results()


def together(
    tasks: Sequence[Callable[[None], object]],
    n_threads: int,
    settled: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Do tasks once, with as many threads, of which this is one; each is `settled` for it."""
    workers = Workers[None](max(1, min(n_threads, len(tasks))), lambda: None)
    with settled(), workers.helped(settled):
        workers.run(tasks)
