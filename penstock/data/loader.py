"""Loading: batches by the number of the step, each made when it is asked for.

Where the last steps begin is remembered, so that a run can save a step that it has finished while later ones are made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.batch import Batch
from runtime.errors import CheckpointError

from .given import Given
from .sampling import MapStyleData, Stream

Position = dict[str, Any]
Made = Iterator[tuple[Batch, Position]]  # batches, each with the position after it
REMEMBERED_STEPS = 1024


@dataclass(slots=True, eq=False)
class Loader:
    """The batches of a run."""

    source: MapStyleData | Stream | Given
    _positions: dict[int, Position] = field(default_factory=dict, repr=False)
    _made: Made | None = field(default=None, repr=False)
    _next: int = 0  # the step that `_made` is about to give

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def n_steps(self) -> int | None:
        return self.source.n_steps

    def batch(self, step: int) -> Batch:
        """What step number `step`, counted from 0, trains on. Loading begins again where that is not the next one."""
        if self._made is None or step != self._next:
            self._made, self._next = self.source.batches(step, self.position(step)), step
        try:
            batch, position = next(self._made)
        except BaseException:
            self._made = None  # whoever asks again gets the same answer, not the end of what was made
            raise
        self._next += 1
        self._positions[self._next] = position
        self._positions.pop(self._next - REMEMBERED_STEPS, None)
        return batch

    def position(self, step: int) -> Position:
        """Where that step begins, as JSON can hold it; CheckpointError for a step of a stream that was not reached."""
        known = self._positions.get(step, self.source.position(step))
        if known is None:
            raise CheckpointError(f"where step {step} of a stream begins shows once the step before it is done; resume at that one")
        return known

    def resume(self, step: int, position: Position) -> None:
        """Go on at that step; CheckpointError for a position that this data does not have."""
        if self.source.position(step) not in (None, position) or position.keys() != (self.source.position(0) or {}).keys():
            problem = f"its data position {str(position)[:80]} is not one of step {step}"
            raise CheckpointError(f"{problem}; resume with the data it began with")
        self._made, self._positions = None, {step: position}

    def words(self) -> dict[str, str]:
        """What was read and how sequences are made of it, by name, a line each; perhaps a `warning`."""
        return self.source.words()
