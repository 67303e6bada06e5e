"""What do all machines have in common that compute with torch?

Arenas, the host's state, and what `runtime/plan.py` says an op reads and writes. Where it computes, and how one lane learns of
another's work, is each machine's own.
"""

from collections.abc import Callable
from typing import assert_never

import torch

from .batch import Batch
from .compute import Compute
from .copies import Copies
from .host_state import HostState
from .memory import Arenas
from .norms import Squares
from .optimizer import AdamW
from .plan import Kind, Lane, Op, Plan
from .updates import StepResult, Updates


class TorchMachine:
    """Performs a plan's ops on one device."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], AdamW],
        device: torch.device,
        seed: int = 0,
        losses_are_there: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Allocate every arena and build the templates; the host state is zero until weights are set.

        `losses_are_there(step)` returns once the device has added up the losses of a step whose ops have all been issued.
        """
        self.plan, self.settings, self.seed, self.device = plan, settings, seed, device
        self.results: dict[int, StepResult] = {}
        self.arenas = Arenas(plan.arenas, device)
        self.host = HostState(plan, self.arenas)
        self.compute = Compute(plan, self.arenas, batches, self.results, seed, _generator(device), losses_are_there)
        self._squares = Squares(plan, self.arenas)
        self._copies = Copies(plan, self.arenas, self.host)
        self._updates = Updates(plan, self.arenas, self.host, settings, self.results)

    def initialise(self, seed: int) -> None:
        """Random weights, the same for the same seed."""
        for block in range(len(self.plan.workload.blocks)):  # one at a time is in memory twice
            self.host.set_weights(block, self.compute.templates.initial_weights(block, seed))

    def device_peak_bytes(self) -> int | None:
        """The most that the process has had of the device's memory; None where that is the host's."""
        return None

    def device_name(self) -> str | None:
        """As its maker calls it; None for a CPU."""
        return None

    def forget(self, lane: Lane) -> None:
        """Drop what a run that failed in the middle of a step has left in the lane's hands."""
        if lane is Lane.GPU:
            self.compute.forget()
        elif lane is Lane.CPU:
            self._updates.forget()

    def perform(self, index: int, op: Op, step: int) -> None:
        """Do op number `index` of the plan, or issue it to the lane's stream."""
        match op.kind:
            case Kind.LOAD:
                self._copies.load(op)
            case Kind.FORWARD | Kind.RECOMPUTE:
                self.compute.forward(op, step)
            case Kind.LOSS:
                self.compute.loss(op, step)
            case Kind.BACKWARD:
                self.compute.backward(op, step)
            case Kind.SQUARE:
                self._squares.square(op)
            case Kind.OFFLOAD:
                self._copies.offload(op)
            case Kind.SPILL | Kind.FETCH:
                self._copies.move_boundary(op)
            case Kind.ACCUMULATE:
                self._updates.accumulate(op)
            case Kind.NORM:
                self._updates.norm(index, op, step)
            case Kind.UPDATE:
                self._updates.update(op, step)
            case Kind.SPECULATE:
                self._updates.speculate(op, step)
            case Kind.SETTLE:
                self._updates.settle(op, step)
            case _:
                assert_never(op.kind)


def _generator(device: torch.device) -> torch.Generator:
    """What dropout on the device draws from. Seeding it is the host's own affair: no device is waited for."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
