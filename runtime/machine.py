"""The `Machine` that an executor asks to perform ops.

`CpuMachine` does the real work with the CPU in the GPU's place, `CudaMachine` gives it to a GPU's streams, `EmulatedMachine` keeps
another machine's time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from runtime.plan import Lane, Op
from runtime.plan.timeline import Span


@dataclass(frozen=True)
class StepResult:
    """What came of a step of training."""

    n_supervised: int  # tokens that were to be predicted
    grad_norm: float  # before clipping
    skipped: bool  # as the norm was not finite
    loss_sum: Callable[[], float]  # over these tokens; returns once the device has added it up

    @cached_property
    def loss(self) -> float:
        """Mean over the supervised tokens."""
        return self.loss_sum() / self.n_supervised


class Machine(Protocol):
    """What an executor needs. `mark` and `follow` carry what one lane must know of another's work beyond that it was issued."""

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        """Perform all the work of a lane in one run, its `lane` too, on the thread where it belongs: the calling one, or one that
        outlives runs."""

    def lane(self, lane: Lane) -> AbstractContextManager[None]:
        """Prepare the calling thread to be this lane, until the context ends."""

    def perform(self, index: int, op: Op, step: int) -> None:
        """Do op number `index` of the plan for this step. Called on its lane's thread."""

    def mark(self, op: Op) -> Any:
        """Called on the lane's thread after `perform`: a token for lanes that wait for the op."""

    def follow(self, lane: Lane, token: Any) -> None:
        """Called on the thread of a lane that waits, with the token of what it waits for."""

    def result(self, step: int) -> StepResult | None:
        """What came of a step that all lanes have done, handed over: the machine forgets it. None: it was no training."""

    def measured(self, spans: Sequence[Span], zero_s: float) -> Sequence[Span]:
        """When ops really ran, given when the lanes' threads were in `perform`, from `zero_s` of the clock on. Called once all
        lanes have ended."""
