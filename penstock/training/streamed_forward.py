"""Streamed forward passes over samples, in the arenas of a training plan."""

# B sequences, T positions of a sequence
from collections.abc import Callable, Iterator

import torch

from penstock.data.sampling import joined
from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.runtime.batch import Batch, Batches
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
        numbers = range(number * n, min((number + 1) * n, n_samples))
        return joined([sample(i) for i in numbers], forward.semantics.batch_size)

    return forward, n_passes, batch
