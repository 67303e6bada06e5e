"""How does a CPU perform an op in a GPU's place?

With a "device" arena of its own, real copies and real mathematics.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from runtime.batch import Batch
from runtime.host.chunks import Scratch
from runtime.host.optimizer import AdamW
from runtime.host.slabs import give_back_freed, settle_allocator
from runtime.host.workers import Workers
from runtime.plan import Lane, Op, Plan
from runtime.plan.timeline import Span

from .cores import split_cores
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
    ) -> None:
        """Allocate every arena and build the templates; the host state is zero until weights are set.

        `n_workers` threads share an op of the optimizer's lane; as many as that lane has cores, if nothing is said. `cores` are
        those of compute, and those of copies and the optimizer; if nothing is said, half of the process's cores each.
        """
        settle_allocator()
        super().__init__(plan, batches, settings, torch.device("cpu"), seed)
        self.pin_threads = pin_threads
        self._cores = cores or split_cores(sorted(os.sched_getaffinity(0)))
        self._updates.workers = Workers(n_workers or len(self._cores[1]), Scratch)
        self.host.n_threads = n_workers or len({*self._cores[0], *self._cores[1]})
        self.arenas.touch(self._updates.workers.n_threads)

    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        give_back_freed()

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        self.forget(lane)
        compute_cores, host_cores = self._cores
        with ExitStack() as until_the_lane_ends:
            if lane is Lane.GPU:
                give_back_freed()  # what evaluations, saves and the lane's last thread had: holes that what follows does not fit
                until_the_lane_ends.enter_context(self._settled(compute_cores, len(compute_cores) if self.pin_threads else 1))
            else:
                until_the_lane_ends.enter_context(self._settled(host_cores, 1))
            if lane is Lane.CPU:
                until_the_lane_ends.enter_context(self._updates.workers.helped(lambda: self._settled(host_cores, 1)))
            yield

    @contextmanager
    def _settled(self, cores: list[int], n_kernel_threads: int) -> Iterator[None]:
        """The calling thread, which ends with the lane: its cores, its threads inside a kernel, and no autograd."""
        if self.pin_threads:
            os.sched_setaffinity(0, cores)  # 0: the calling thread
        torch.set_num_threads(n_kernel_threads)
        with torch.no_grad():
            yield

    def mark(self, op: Op) -> object:
        return None  # when `perform` returns, the work is done

    def follow(self, lane: Lane, token: object) -> None:
        pass

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans
