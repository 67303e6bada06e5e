"""Worker processes for searches on many machines."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from runtime.errors import PenstockError

Found = TypeVar("Found")
MOST_WORKERS = 8  # each of which holds a planner, some 150 MB


def shared(work: Callable[..., Found], tasks: Sequence[tuple[Any, ...]], what: str) -> list[Found]:
    """`work` of each task, in their order, on as many cores as there are; how far it is shows on a terminal."""
    n_workers = min(len(os.sched_getaffinity(0)), len(tasks), MOST_WORKERS)
    with _progress(what, len(tasks)) as advance:
        if n_workers <= 1:
            return [_done(work(*task), advance) for task in tasks]
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n_workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
        try:
            futures = [pool.submit(work, *task) for task in tasks]
            for future in as_completed(futures):
                _done(future.result(), advance)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise PenstockError("a process that searched was ended, perhaps for want of memory; ask for fewer machines") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():  # after an interruption some are still at work
                child.terminate()


def _done(found: Found, advance: Callable[[], None]) -> Found:
    advance()
    return found


@contextmanager
def _progress(what: str, n: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=n)
        yield lambda: bar.advance(task)
