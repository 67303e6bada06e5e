"""Batches: the tokens that a step trains on."""

# B sequences of a batch, T positions of a sequence
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

UNSUPERVISED = -100  # the target that Hugging Face and torch's cross_entropy leave out


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, both (B, T) int64: `targets[b, t]` is the token after `input_ids[b, t]`, or -100.
    `document_tokens`, where given, are the lengths of the documents of which each sequence is packed, padding included: T in all. A
    token then attends to its own document alone, and positions begin at 0 in each."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_tokens: tuple[tuple[int, ...], ...] | None = None
    n_counted: int | None = None  # supervised tokens, where they were counted before: of a step, whose part this is; of a device
    n_answers: int | None = None  # of the whole step, where several share a sequence
    positions_BT: torch.Tensor | None = None  # of tokens in their documents, where they are known: on a device
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what a loss asks for, (B,) or (B, T), by name

    @property
    def n_supervised(self) -> int:
        """Tokens of the step that are to be predicted."""
        return int((self.targets != UNSUPERVISED).sum()) if self.n_counted is None else self.n_counted

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The same with `move` applied to each tensor."""
        positions_BT = None if self.positions_BT is None else move(self.positions_BT)
        extras = {name: move(of) for name, of in self.extras.items()}
        return replace(self, input_ids=move(self.input_ids), targets=move(self.targets), positions_BT=positions_BT, extras=extras)

    def part(self, rows: slice) -> "Batch":
        lengths = self.document_tokens
        return replace(self.moved(lambda tokens: tokens[rows]), document_tokens=None if lengths is None else lengths[rows])


Batches = Callable[[int], Batch]  # of each step


class PreparedBatches:
    """Batches made ahead of their use: `prepare(step)` on one thread, the call with the same step on another. Batches are made one
    at a time, each once, by `prepare` or by a call before it. The call raises errors. A batch that an interrupted run did not use
    stays for the next run: a source that counts its own calls loses nothing."""

    def __init__(self, make: Batches, move: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """`make` builds a batch in host memory, `move` copies it to the device on the thread that uses it."""
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
            except Exception as error:  # the step before is still in progress and shall end
                self._ready[step] = error

    def __call__(self, step: int) -> Batch:
        self._last_used = step  # before the batch is taken: `prepare` would make it again
        outcome = self._ready.pop(step, None)  # without the lock: a later batch may be in the making
        if outcome is None:
            with self._making:
                self._make_once(step)
            outcome = self._ready.pop(step)
        if isinstance(outcome, Exception):
            raise outcome
        return self._move(outcome)


def positions_of(document_tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Where in its document each token stands: (B, T), from 0 in every document."""
    return torch.stack([torch.cat([torch.arange(n) for n in of_sequence]) for of_sequence in document_tokens])
