"""Machine for executor tests: performs nothing and records the ops."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.runtime.executor import Record, StepResult
from penstock.runtime.plan import Lane, Op
from penstock.runtime.plan.timeline import Span


class NullMachine:
    def __init__(self) -> None:
        self.performed: list[tuple[int, int]] = []  # (step, op), in order

    def on_thread(self, lane: Lane, work: Callable[[], None]) -> None:
        work()

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        yield

    def prepare(self, step: int) -> None:
        pass

    def perform(self, index: int, op: Op, step: int) -> None:
        self.performed.append((step, index))

    def mark(self, op: Op) -> object:
        return None

    def follow(self, lane: Lane, token: object) -> None:
        pass

    def result(self, step: int) -> StepResult | None:
        return None

    def measured(self, records: Sequence[Record]) -> Sequence[Span]:
        return [span for span, _ in records]
