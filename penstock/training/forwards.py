"""Streamed forwards over samples: as many passes as their micro-batches take in the arenas of a training plan."""

# B sequences, T positions of a sequence
from collections.abc import Callable

import torch
import torch.nn.functional as F

from planner.lower.forward import forward_plan, most_micro_batches
from runtime.batch import UNSUPERVISED, Batch, Batches
from runtime.compute.compute import LastHidden
from runtime.executor import Stop
from runtime.machines.torch_machine import TorchMachine
from runtime.plan import Plan


def log_probabilities(
    machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Of each sample's sequences the log-probability of its targets, summed, and how many tokens these are, (n_samples, sequences
    of each) fp64 and int64, of the weights as they are, without dropout; and the extras that samples bring. For a loss of tokens
    with a reference those of each position, fp32, in place of the sum.

    `sample(i)`: a batch of one. All lanes of the machine must be idle. Abandoned after `stop.request()`.
    """
    plan, n_passes, batch = passes(machine.plan, sample, n_samples)
    sums, n_tokens = list[torch.Tensor](), list[torch.Tensor]()

    def note(last: LastHidden) -> None:
        of_sequences = last.templates.log_probabilities(last.weights, last.hidden_BTD, last.targets_BT)
        for found, new in zip((sums, n_tokens), of_sequences, strict=True):
            found.append(new.cpu())

    machine.forward(plan, batch, note, n_passes, stop)
    brought = [sample(i).extras for i in range(n_samples)]
    extras = {name: torch.cat([extra[name] for extra in brought]) for name in brought[0]}
    of_each = (n_samples, len(sample(0).input_ids))
    found = [torch.cat(of)[: of_each[0] * of_each[1]] for of in (sums, n_tokens)]
    return found[0].view(*of_each, *found[0].shape[1:]), found[1].view(of_each), extras


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
    return Batch(F.pad(ids_BT, below), F.pad(targets_BT, below, value=UNSUPERVISED), documents)
