"""How does a CPU perform an op in a GPU's place?

With a "device" arena of its own, real copies and real mathematics.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .cores import split_cores
from .data import Batch
from .optimizer import AdamW
from .plan import Lane, Op, Plan
from .timeline import Span
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
    ) -> None:
        """Allocate every arena and build the templates; the host state is zero until weights are set."""
        super().__init__(plan, batches, settings, torch.device("cpu"), seed)
        self.pin_threads = pin_threads
        self._cores = split_cores(sorted(os.sched_getaffinity(0)))

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        self.forget(lane)
        compute_cores, host_cores = self._cores
        cores = compute_cores if lane is Lane.GPU else host_cores
        if self.pin_threads:
            os.sched_setaffinity(0, cores)  # 0: the calling thread, which ends with the lane
        torch.set_num_threads(len(cores) if lane is Lane.GPU and self.pin_threads else 1)
        with torch.no_grad():
            yield

    def mark(self, op: Op) -> object:
        return None  # when `perform` returns, the work is done

    def follow(self, lane: Lane, token: object) -> None:
        pass

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans
