"""What performs an op?

`Machine` is what the executor asks for: `CpuMachine` does the real work with the CPU in the GPU's place, `EmulatedMachine` keeps
another machine's time, `NullMachine` only remembers. `CudaMachine` takes the same place: its `mark` records an event on the
lane's stream and its `follow` makes the other lane's stream, or host thread, wait for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from runtime.plan import Lane, Op
from runtime.plan.timeline import Span

from .lane_thread import LaneRun, on_its_own_thread


class Machine(Protocol):
    """What an executor needs. `mark` and `follow` carry what one lane must know of another's work beyond that it was issued."""

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> LaneRun:
        """All the work of a lane in one run, its `lane` too, on the thread where it belongs; not begun yet."""

    def lane(self, lane: Lane) -> AbstractContextManager[None]:
        """Prepare the calling thread to be this lane, until the context ends."""

    def perform(self, index: int, op: Op, step: int) -> None:
        """Do op number `index` of the plan for this step. Called on its lane's thread."""

    def mark(self, op: Op) -> object:
        """Called on the lane's thread after `perform`: a token for lanes that wait for the op."""

    def follow(self, lane: Lane, token: object) -> None:
        """Called on the thread of a lane that waits, with the token of what it waits for."""

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        """When ops really ran, given when the lanes' threads were in `perform`. Called once all lanes have ended."""


class NullMachine:
    """Only remembers what it was asked to do, in the order in which it was asked."""

    def __init__(self) -> None:
        self.performed: list[tuple[int, int]] = []  # (step, op)

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> LaneRun:
        return on_its_own_thread(lane, work)

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        yield

    def perform(self, index: int, op: Op, step: int) -> None:
        self.performed.append((step, index))

    def mark(self, op: Op) -> object:
        return None

    def follow(self, lane: Lane, token: object) -> None:
        pass

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans
