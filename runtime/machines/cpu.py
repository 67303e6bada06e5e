"""The CPU machine: a CPU in a GPU's place, with a "device" arena of its own, real copies and real mathematics."""

import os
from collections.abc import Callable

from runtime.batch import Batch
from runtime.host.slabs import settle_allocator
from runtime.plan import Lane, Plan
from runtime.plan.optimizer import Hyperparameters
from runtime.ranks import Ranks

from .lanes import Lanes, split_cores
from .torch_machine import TorchMachine


class CpuMachine(TorchMachine):
    """Performs a plan on the CPU. Compute has cores of its own; copies and the optimizer share the rest."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], Hyperparameters],
        seed: int = 0,
        pin_threads: bool = False,
        n_workers: int | None = None,
        cores: tuple[list[int], list[int]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`cores`: those of compute, and those of copies and the optimizer; half of the process's each, without it."""
        settle_allocator()
        for_compute, for_host = cores or split_cores(sorted(os.sched_getaffinity(0)))
        lanes = Lanes(dict.fromkeys(plan.lanes, for_host) | {Lane.GPU: for_compute}, pin_threads, streams=None)
        super().__init__(plan, batches, settings, lanes, seed, n_workers, ranks)
