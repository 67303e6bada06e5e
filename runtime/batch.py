"""Batches: training tokens of a step."""

# B: sequences, T: positions
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from .errors import DataError, StepError, user_code

UNSUPERVISED = -100  # the target that Hugging Face and torch's cross_entropy leave out


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step, both (B, T) int64: `targets[b, t]` is the token after `input_ids[b, t]`, or -100. `document_tokens`:
    lengths of packed documents, padding included: T in all. Attention and positions restart with each document. `n_tokens`: of each
    sequence without padding (None: T), for positions that depend on the length."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_tokens: tuple[tuple[int, ...], ...] | None = None
    n_counted: int | None = None  # supervised tokens if counted before: of the whole step for a part; on the host for a device
    n_answers: int | None = None  # of the whole step, if several share a sequence
    positions_BT: torch.Tensor | None = None  # of tokens in their documents, if computed: on a device
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # other inputs of the loss, (B,) or (B, T), by name
    n_tokens: tuple[int, ...] | None = None

    @property
    def n_supervised(self) -> int:
        """Tokens of the step with a target."""
        return int((self.targets != UNSUPERVISED).sum()) if self.n_counted is None else self.n_counted

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        positions_BT = None if self.positions_BT is None else move(self.positions_BT)
        extras = {name: move(tensor) for name, tensor in self.extras.items()}
        return replace(self, input_ids=move(self.input_ids), targets=move(self.targets), positions_BT=positions_BT, extras=extras)

    def part(self, rows: slice) -> "Batch":
        lengths, n_tokens = self.document_tokens, self.n_tokens
        lengths, n_tokens = None if lengths is None else lengths[rows], None if n_tokens is None else n_tokens[rows]
        return replace(self.moved(lambda tokens: tokens[rows]), document_tokens=lengths, n_tokens=n_tokens)

    @property
    def padded_documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Lengths of each sequence and of its padding, e.g. ((5, 11), (16,)); None without `n_tokens`."""
        seq_len = self.input_ids.shape[1]
        return None if self.n_tokens is None else tuple((n, seq_len - n) if 0 < n < seq_len else (seq_len,) for n in self.n_tokens)


Batches = Callable[[int], Batch]  # step -> batch


class PreparedBatches:
    """Batches made before their use: one thread calls `prepare(step)`, another the object with the same step, which raises errors.
    Each is made once, one at a time. Batches unused by an interrupted run remain: a source that counts its calls loses none."""

    def __init__(self, make: Batches, move: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """`make` builds a batch in host memory, `move` copies it to the device on the calling thread."""
        self._make, self._move, self._making = make, move, threading.Lock()
        self._ready: dict[int, Batch | Exception] = {}
        self._last_used = -1  # step

    def prepare(self, step: int) -> None:
        with self._making:
            if step > self._last_used:  # else a lane was faster
                self._make_once(step)

    def _make_once(self, step: int) -> None:
        if step not in self._ready:
            try:
                self._ready[step] = self._make(step)
            except Exception as error:  # the previous step is in progress and shall end
                self._ready[step] = error

    def __call__(self, step: int) -> Batch:
        self._last_used = step  # before the pop, or `prepare` would make the batch again
        outcome = self._ready.pop(step, None)  # without the lock: a later batch may be in progress
        if outcome is None:
            with self._making:
                self._make_once(step)
            outcome = self._ready.pop(step)
        if isinstance(outcome, Exception):
            with user_code(f"the batch of step {step + 1}"):
                raise outcome if type(outcome) is not DataError else StepError(str(outcome))
        return self._move(outcome)


def positions_of(document_tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the position of each token in its document, (B, T), from 0."""
    return torch.stack([torch.cat([torch.arange(n) for n in of_sequence]) for of_sequence in document_tokens])
