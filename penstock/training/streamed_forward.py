"""Streamed forward passes over samples, in the arenas of a training plan."""

# B sequences, T positions of a sequence
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.runtime.batch import UNSUPERVISED, Batch, Batches, joined_images
from penstock.runtime.compute.compute import LastHidden
from penstock.runtime.executor import Stop
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan


def log_probabilities(
    machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Concatenate the results of `forward_passes` for all samples, and the extras of their batches."""
    results = [torch.cat(column) for column in zip(*forward_passes(machine, sample, n_samples, stop), strict=True)]
    extras = [sample(i).extras for i in range(n_samples)]
    return results[0], results[1], {name: torch.cat([extra[name] for extra in extras]) for name in extras[0]}


def forward_passes(
    machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield per pass the summed log-probability and number of target tokens, fp64 and int64, (samples of the pass, sequences per
    sample). Current weights, no dropout. A loss of tokens with a reference gets fp32 per position instead of the sum; a loss with a
    teacher gets a teacher row per position.

    `sample(i)`: a batch with one sample. All lanes of the machine must be idle. Abandoned after `stop.request()`.
    """
    plan, n_passes, batch = passes(machine.plan, sample, n_samples)
    rows_each = len(sample(0).input_ids)
    of_pass, outputs = plan.semantics.batch_size // rows_each, list[tuple[torch.Tensor, ...]]()

    def note(last: LastHidden) -> None:
        of_sequences = last.templates.head.log_probabilities(last.weights, last.hidden_BTD, last.targets_BT, last.extras)
        outputs.append(tuple(tensor.cpu() for tensor in of_sequences))

    for number in range(n_passes):
        outputs.clear()
        machine.forward(plan, lambda _, number=number: batch(number), note, 1, stop)  # type: ignore[misc]
        n = min(of_pass, n_samples - number * of_pass)
        values, n_tokens = (torch.cat(part)[: n * rows_each] for part in zip(*outputs, strict=True))
        yield (values.view(n, rows_each, *values.shape[1:]), n_tokens.view(n, rows_each, *n_tokens.shape[1:]))


def passes(plan: Plan, sample: Callable[[int], Batch], n_samples: int) -> tuple[Plan, int, Batches]:
    """Return a forward plan, the number of passes for all samples, and the batch of each pass."""
    rows_each = len(sample(0).input_ids)
    n_micro_batches = -(-n_samples * rows_each // plan.semantics.micro_batch)
    n_passes = -(-n_micro_batches // most_micro_batches(plan))
    forward = forward_plan(plan, -(-n_micro_batches // n_passes))
    n = forward.semantics.batch_size // rows_each

    def batch(number: int) -> Batch:
        return _padded(sample, range(number * n, min((number + 1) * n, n_samples)), forward.semantics.batch_size)

    return forward, n_passes, batch


def _padded(sequence: Callable[[int], Batch], numbers: range, n: int) -> Batch:
    """Return a batch of `n` sequences: these samples, and padding without supervised tokens."""
    rows = [sequence(number) for number in numbers]
    ids_BT, targets_BT = torch.cat([row.input_ids for row in rows]), torch.cat([row.targets for row in rows])
    n_padding, documents = n - len(ids_BT), None
    if rows[0].document_tokens is not None:
        documents = tuple(tokens for row in rows for tokens in row.document_tokens or ()) + ((ids_BT.shape[1],),) * n_padding
    lengths = [n_tokens for row in rows for n_tokens in row.n_tokens or (ids_BT.shape[1],) * len(row.input_ids)]
    n_tokens, padding = (*lengths, *(ids_BT.shape[1],) * n_padding), (0, 0, 0, n_padding)
    joined = {name: torch.cat([row.extras[name] for row in rows]) for name in rows[0].extras}
    extras = {name: torch.cat([tensor, tensor.new_zeros(n_padding, *tensor.shape[1:])]) for name, tensor in joined.items()}
    images = joined_images([row.images for row in rows], n_padding)
    ids_BT, targets_BT = F.pad(ids_BT, padding), F.pad(targets_BT, padding, value=UNSUPERVISED)
    return Batch(ids_BT, targets_BT, documents, extras=extras, n_tokens=n_tokens, images=images)
