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


class Workers(Generic[S]):
    """Some threads, each with a thing of its own (its scratch memory), made once. Without helpers the caller does all."""

    def __init__(self, n_threads: int, own: Callable[[], S]) -> None:
        """`n_threads` counts the caller's."""
        assert n_threads > 0
        self._own = [own() for _ in range(n_threads)]
        self._asked: SimpleQueue[tuple[Callable[[S], None], SimpleQueue[None]] | None] = SimpleQueue()  # what to do; told when done
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
                while (asked := self._asked.get()) is not None:
                    work, left = asked
                    work(own)
                    del asked, work  # what it works on is not this thread's to keep
                    left.put(None)
        except BaseException as error:  # of `settled`; those of tasks are the job's
            begun.put(error)

    def run(self, tasks: Sequence[Callable[[S], T]]) -> list[T]:
        """The tasks' results, in their order. Of the tasks that fail the first one's error is raised, when none runs any more."""
        numbers, results, failures, left = count(), dict[int, T](), dict[int, BaseException](), SimpleQueue[None]()

        def work(own: S) -> None:
            """Take tasks until there is none left, or one failed."""
            while not failures and (number := next(numbers)) < len(tasks):
                try:
                    results[number] = tasks[number](own)
                except BaseException as error:
                    failures[number] = error

        n_asked = min(self._n_helpers, max(len(tasks) - 1, 0))
        for _ in range(n_asked):
            self._asked.put((work, left))
        work(self._own[0])
        for _ in range(n_asked):
            left.get()
        if failures:
            raise failures[min(failures)]
        return [results[number] for number in range(len(tasks))]


def together(
    tasks: Sequence[Callable[[None], object]], n_threads: int, settled: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """Do tasks once, with as many threads, of which this is one; each is `settled` for it."""
    workers = Workers[None](max(1, min(n_threads, len(tasks))), lambda: None)
    with settled(), workers.helped(settled):
        workers.run(tasks)
