"""Worker threads that share the tasks of one host op.

The lane's thread and helpers with the lane's lifetime take tasks from one counter, in order. Results of a task must not depend on
its thread. Threads synchronize once per op.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

Context = Callable[[], AbstractContextManager[object]]
S = TypeVar("S")
T = TypeVar("T")


class Workers(Generic[S]):
    """Pool of threads with one scratch object per thread. Without helpers the caller performs all tasks."""

    def __init__(self, n_threads: int, make_scratch: Callable[[], S]) -> None:
        """`n_threads` includes the caller. `make_scratch` creates a scratch object."""
        assert n_threads > 0
        self._scratch = [make_scratch() for _ in range(n_threads)]
        self._jobs: SimpleQueue[tuple[Callable[[S], None], SimpleQueue[None]] | None] = SimpleQueue()  # job, done
        self._n_helpers = 0

    @contextmanager
    def helped(self, settled: Context = nullcontext) -> Iterator[None]:
        """Run helper threads until the context ends, each in a context of `settled`, entered before this returns."""
        assert self._n_helpers == 0, "the workers are running already"
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        helpers = [
            threading.Thread(target=self._help, args=(scratch, settled, begun), name=f"worker-{i}", daemon=True)
            for i, scratch in enumerate(self._scratch[1:], start=1)
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
                self._jobs.put(None)
            self._n_helpers = 0
            for helper in helpers:
                if helper.is_alive():
                    helper.join()

    def _help(self, scratch: S, settled: Context, begun: "SimpleQueue[BaseException | None]") -> None:
        try:
            with settled():
                begun.put(None)
                while (job := self._jobs.get()) is not None:
                    work, done = job
                    work(scratch)
                    del job, work  # release the job's tensors
                    done.put(None)
        except BaseException as error:  # of `settled`; `run` collects errors of tasks
            begun.put(error)

    def run(self, tasks: Sequence[Callable[[S], T]]) -> list[T]:
        """Perform tasks and return their results in order. After all threads stop, raise the error of the first failed task."""
        numbers, results, failures, done = count(), dict[int, T](), dict[int, BaseException](), SimpleQueue[None]()

        def work(scratch: S) -> None:
            """Take tasks until none remains or one fails."""
            while not failures and (number := next(numbers)) < len(tasks):
                try:
                    results[number] = tasks[number](scratch)
                except BaseException as error:
                    failures[number] = error

        n_jobs = min(self._n_helpers, max(len(tasks) - 1, 0))
        for _ in range(n_jobs):
            self._jobs.put((work, done))
        work(self._scratch[0])
        for _ in range(n_jobs):
            done.get()
        if failures:
            raise failures[min(failures)]
        return [results[number] for number in range(len(tasks))]


def together(tasks: Sequence[Callable[[None], object]], n_threads: int, settled: Context = nullcontext) -> None:
    """Perform tasks once with `n_threads` threads including this one, each in a context of `settled`."""
    workers = Workers[None](max(1, min(n_threads, len(tasks))), lambda: None)
    with settled(), workers.helped(settled):
        workers.run(tasks)
