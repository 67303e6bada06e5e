"""How well does the model predict what it is not trained on?"""

# B sequences, T positions of a sequence
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.batch import UNSUPERVISED, Batch
from runtime.compute.inference import LastHidden
from runtime.errors import DataError
from runtime.executor import Stop
from runtime.forward_plan import forward_plan, most_micro_batches
from runtime.machines.torch_machine import TorchMachine


class HeldOut(Protocol):
    """Sequences that are not trained on. All batches, but for the last, have as many."""

    def batch(self, step: int) -> Batch:
        """Batch number `step`, counted from 0."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of one evaluation."""

    loss: float  # mean over all supervised tokens
    perplexity: float
    n_tokens: int  # supervised
    seconds: float


class Evaluator:
    """The loss on held-out sequences, by the same machine that trains and in its arenas, between two steps.

    The loss is computed as in training, a tile of logits at a time, but for dropout: there is none.
    """

    def __init__(self, machine: TorchMachine, data: HeldOut, n_sequences: int, stop: Stop | None = None) -> None:
        """`data` has at least `n_sequences`, of as many tokens as the plan's; the first ones are taken.

        `stop.request()` ends an evaluation after the pass in progress.
        """
        self.machine, self.data, self.n_sequences, self.stop = machine, data, n_sequences, stop

    def run(self) -> Evaluated:
        """Evaluate the weights as they are; DataError where no token is supervised, Abandoned when asked to stop.

        All lanes of the machine must be idle.
        """
        began_s = time.perf_counter()
        n = self.machine.plan.semantics.micro_batch
        n_micro_batches = -(-self.n_sequences // n)
        most = most_micro_batches(self.machine.plan)
        n_passes, n_left = divmod(n_micro_batches, most)
        score = _Score()
        self._perform(0, n_passes, most, score)
        self._perform(n_passes * most * n, min(n_left, 1), n_left, score)
        if not score.n_tokens:
            raise DataError("the evaluation data has no token to be predicted; choose other data")
        loss = score.loss_sum() / score.n_tokens
        return Evaluated(loss, perplexity(loss), score.n_tokens, time.perf_counter() - began_s)

    def _perform(self, first: int, n_passes: int, n_micro_batches: int, score: "_Score") -> None:
        """Score `n_passes` over `n_micro_batches`, from sequence `first` on."""
        if not n_passes:
            return
        plan = forward_plan(self.machine.plan, n_micro_batches)
        n = plan.semantics.batch_size

        def batches(step: int) -> Batch:
            batch = self._sequences(first + step * n, n)
            score.n_tokens += batch.n_supervised
            return batch

        self.machine.forward(plan, batches, score, n_passes, self.stop)

    def _sequences(self, first: int, n: int) -> Batch:
        """So many sequences; those beyond the last are padding, of which no token is supervised."""
        seq_len = self.machine.plan.semantics.seq_len
        last = min(first + n, self.n_sequences)
        parts = list(self._parts(first, last))
        n_padding = n - (last - first)
        if n_padding:
            empty = torch.zeros((n_padding, seq_len), dtype=torch.int64)
            whole = ((seq_len,),) * n_padding if parts[0].document_tokens is not None else None
            parts.append(Batch(empty, torch.full_like(empty, UNSUPERVISED), whole))
        documents = [part.document_tokens for part in parts if part.document_tokens is not None]
        return Batch(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.targets for part in parts]),
            tuple(of_sequence for part in documents for of_sequence in part) if documents else None,
        )

    def _parts(self, first: int, last: int) -> Iterator[Batch]:
        """The sequences first .. last - 1, batch by batch as the data has them."""
        n = len(self.data.batch(0).input_ids)
        for number in range(first // n, -(-last // n)):
            batch, rows = self.data.batch(number), slice(max(first - number * n, 0), last - number * n)
            documents = batch.document_tokens[rows] if batch.document_tokens is not None else None
            yield Batch(batch.input_ids[rows], batch.targets[rows], documents)


@dataclass(slots=True)
class _Score:
    """Adds up the losses of micro-batches, on the device."""

    n_tokens: int = 0
    total: torch.Tensor | None = field(default=None)  # fp64

    def __call__(self, last: LastHidden) -> None:
        if self.total is None:
            self.total = torch.zeros((), dtype=torch.float64, device=last.hidden_BTD.device)
        self.total += last.templates.scores(last.weights, last.hidden_BTD, last.targets_BT)

    def loss_sum(self) -> float:
        return self.total.item() if self.total is not None else 0.0


def perplexity(loss: float) -> float:
    """e to the loss; infinite where no float is as large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
