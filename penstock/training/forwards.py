"""Streamed forwards over samples: as many passes as their micro-batches take in the arenas of a training plan."""

# B sequences, T positions of a sequence
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.runtime.batch import UNSUPERVISED, Batch, Batches
from penstock.runtime.compute.compute import LastHidden
from penstock.runtime.executor import Stop
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan


def log_probabilities(
    machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """`each_pass` of all samples, and the extras that these bring."""
    found = [torch.cat(of) for of in zip(*each_pass(machine, sample, n_samples, stop), strict=True)]
    brought = [sample(i).extras for i in range(n_samples)]
    return found[0], found[1], {name: torch.cat([extra[name] for extra in brought]) for name in brought[0]}


def each_pass(
    machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each sample's sequences the log-probability of its targets, summed, and how many tokens these are, (samples of the pass,
    sequences of each) fp64 and int64, of the weights as they are, without dropout. For a loss of tokens with a reference those of
    each position, fp32, in place of the sum; for one with a teacher its row of each position.

    `sample(i)`: a batch of one. All lanes of the machine must be idle. Abandoned after `stop.request()`.
    """
    plan, n_passes, batch = passes(machine.plan, sample, n_samples)
    rows_each = len(sample(0).input_ids)
    of_pass, found = plan.semantics.batch_size // rows_each, list[tuple[torch.Tensor, ...]]()

    def note(last: LastHidden) -> None:
        of_sequences = last.templates.head.log_probabilities(last.weights, last.hidden_BTD, last.targets_BT, last.extras)
        found.append(tuple(of.cpu() for of in of_sequences))

    for number in range(n_passes):
        found.clear()
        machine.forward(plan, lambda _, number=number: batch(number), note, 1, stop)  # type: ignore[misc]
        n = min(of_pass, n_samples - number * of_pass)
        values, n_tokens = (torch.cat(of)[: n * rows_each] for of in zip(*found, strict=True))
        yield (values.view(n, rows_each, *values.shape[1:]), n_tokens.view(n, rows_each, *n_tokens.shape[1:]))


def passes(plan: Plan, sample: Callable[[int], Batch], n_samples: int) -> tuple[Plan, int, Batches]:
    """A forward plan, how often it is performed so that all samples have been, and the batch of each time."""
    rows_each = len(sample(0).input_ids)
    n_micro_batches = -(-n_samples * rows_each // plan.semantics.micro_batch)
    n_passes = -(-n_micro_batches // most_micro_batches(plan))
    forward = forward_plan(plan, -(-n_micro_batches // n_passes))
    n = forward.semantics.batch_size // rows_each

    def batch(number: int) -> Batch:
        return _padded(sample, range(number * n, min((number + 1) * n, n_samples)), forward.semantics.batch_size)

    return forward, n_passes, batch


def _padded(sequence: Callable[[int], Batch], numbers: range, n: int) -> Batch:
    """A batch of `n` sequences: those of these samples, and padding without a supervised token."""
    rows = [sequence(number) for number in numbers]
    ids_BT, targets_BT = torch.cat([row.input_ids for row in rows]), torch.cat([row.targets for row in rows])
    n_padding, documents = n - len(ids_BT), None
    if rows[0].document_tokens is not None:
        documents = tuple(of for row in rows for of in row.document_tokens or ()) + ((ids_BT.shape[1],),) * n_padding
    below = (0, 0, 0, n_padding)
    whole = {name: torch.cat([row.extras[name] for row in rows]) for name in rows[0].extras}
    extras = {name: torch.cat([of, of.new_zeros(n_padding, *of.shape[1:])]) for name, of in whole.items()}
    return Batch(F.pad(ids_BT, below), F.pad(targets_BT, below, value=UNSUPERVISED), documents, extras=extras)
