"""What does an executor ask of its machine?

`NullMachine` does nothing and remembers what it was asked.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from runtime.lane_thread import LaneRun, on_its_own_thread
from runtime.machine import StepResult
from runtime.plan import Lane, Op
from runtime.plan.timeline import Span


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

    def result(self, step: int) -> StepResult | None:
        return None

    def measured(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans
