"""What `compare` and `fits` share: options of the work, and its cells planned on all cores."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.options import CLIP_NORM, SEQ_LEN, together, with_gpus, with_training
from runtime.errors import PenstockError

if TYPE_CHECKING:
    from runtime.plan import Semantics
    from runtime.plan.packed import Base

Found = TypeVar("Found")
MOST_WORKERS = 8  # each of which holds a planner, some 150 MB


# The work that machines are asked about, but for its batch
with_work = together(
    SEQ_LEN,
    CLIP_NORM,
    click.option("--master", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Master weights."),
    with_training,
    with_gpus,
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words."),
)


def semantics_of(
    seq_len: int,
    batch_size: int,
    micro_batch: int,
    clip_norm: float | None,
    master: str,
    train: str | None,
    base: "Base | None",
    n_gpus: int,
) -> "Semantics":
    """One rank's part of the work; PlanError where it cannot be shared."""
    from planner.search.micro_batch import shared_step
    from runtime.plan import Semantics
    from runtime.plan.policy import trained

    asked = Semantics(seq_len, batch_size, micro_batch, master_dtype=master, clip_norm=clip_norm)  # type: ignore[arg-type]
    asked = trained(asked, train, base)
    return shared_step(asked, n_gpus, has_groups=False) if n_gpus > 1 else asked


def swept(work: Callable[..., Found], tasks: Sequence[tuple[Any, ...]], what: str) -> list[Found]:
    """`work` of each task, in their order, on all cores; a terminal shows the progress."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    show = partial(track, description=what, total=len(tasks), console=console, transient=True, disable=not console.is_terminal)
    n_workers = min(len(os.sched_getaffinity(0)), len(tasks), MOST_WORKERS)
    if n_workers <= 1:
        return [work(*task) for task in show(tasks)]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
    try:
        return list(show(pool.map(work, *zip(*tasks, strict=True))))
    except BrokenProcessPool:
        raise PenstockError("a process that searched was ended, perhaps for want of memory; ask for fewer machines") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # after an interruption some are still at work
            child.terminate()
