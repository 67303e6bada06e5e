"""How does a CPU perform a plan in a GPU's place?

With a "device" arena of its own, real copies and real mathematics.
"""

import os
from collections.abc import Callable

from runtime.batch import Batch
from runtime.host.optimizer import AdamW
from runtime.host.slabs import settle_allocator
from runtime.plan import Lane, Plan
from runtime.ranks import Ranks

from .cores import split_cores
from .lanes import Lanes
from .torch_machine import TorchMachine


class CpuMachine(TorchMachine):
    """Performs a plan on the CPU. Compute has cores of its own; copies and the optimizer share the rest."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], AdamW],
        seed: int = 0,
        pin_threads: bool = False,
        n_workers: int | None = None,
        cores: tuple[list[int], list[int]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`cores` are those of compute, and those of copies and the optimizer; if nothing is said, half of the process's each."""
        settle_allocator()
        for_compute, for_host = cores or split_cores(sorted(os.sched_getaffinity(0)))
        lanes = Lanes(dict.fromkeys(plan.lanes, for_host) | {Lane.GPU: for_compute}, pin_threads, streams=None)
        super().__init__(plan, batches, settings, lanes, seed, n_workers, ranks)
