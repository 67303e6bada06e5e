"""What do all machines have in common that compute with torch?

Arenas, the host's state, and what `runtime/plan/plan.py` says an op reads and writes. Where it computes, and how one lane learns of
another's work, is each machine's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import assert_never

import torch

from runtime.batch import Batch
from runtime.compute.compute import Compute
from runtime.compute.inference import Head, Inference
from runtime.host.copies import Copies
from runtime.host.host_state import HostState
from runtime.host.memory import Arenas
from runtime.host.norms import Squares
from runtime.host.optimizer import AdamW
from runtime.host.updates import StepResult, Updates
from runtime.lane_thread import LaneRun, on_its_own_thread
from runtime.plan import Kind, Lane, Op, Plan
from runtime.plan.timeline import Span


class TorchMachine(ABC):
    """Performs a plan's ops on one device: a `Machine`, of which lanes and what they know of each other are left open."""

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
        self._inference: Inference | None = None  # while it takes the place of compute
        self._squares = Squares(plan, self.arenas)
        self._copies = Copies(plan, self.arenas)
        self._updates = Updates(plan, self.arenas, self.host, settings, self.results)

    def initialise(self, seed: int) -> None:
        """Random weights, the same for the same seed."""
        for block in range(len(self.plan.workload.blocks)):  # one at a time is in memory twice
            self.host.set_weights(block, self.compute.templates.initial_weights(block, seed))

    @contextmanager
    def forwards(self, plan: Plan, batches: Callable[[int], Batch], head: Head) -> Iterator[None]:
        """Until the context ends the machine performs this forward plan instead of its own. No lane may be at work.

        It changes nothing that training sees: what the host has learned is only read, and what lies on the device between two runs
        of the executor nobody reads.
        """
        templates = self.compute.templates
        self._inference = Inference(plan, self.arenas, templates, batches, head)
        try:
            with templates.evaluating():
                yield
        finally:
            self._inference = None

    def device_peak_bytes(self) -> int | None:
        """The most that the process has had of the device's memory; None where that is the host's."""
        return None

    def device_name(self) -> str | None:
        """As its maker calls it; None for a CPU."""
        return None

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> LaneRun:
        """As a machine's."""
        return on_its_own_thread(lane, work)

    @abstractmethod
    def lane(self, lane: Lane) -> AbstractContextManager[None]:
        """As a machine's."""

    @abstractmethod
    def mark(self, op: Op) -> object:
        """As a machine's."""

    @abstractmethod
    def follow(self, lane: Lane, token: object) -> None:
        """As a machine's."""

    @abstractmethod
    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        """As a machine's."""

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
                (self._inference or self.compute).forward(op, step)
            case Kind.LOSS:
                self.compute.loss(op, step)
            case Kind.BACKWARD:
                self.compute.backward(op, step)
            case Kind.SQUARE:
                self._squares.square(op)
            case Kind.OFFLOAD:
                self._copies.offload(op)
            case Kind.SPILL | Kind.FETCH:
                self._copies.move_activation(op)
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
