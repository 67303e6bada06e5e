"""Generation: samples of what the model writes while it trains.

Every new token computes its sequence again, without a cache of keys and values: where weights are streamed a forward takes as long
for one token as for hundreds, and the plan has set no device memory aside for a cache. A token costs one upload of the model, for
all prompts together.
"""

# B sequences of a micro-batch, T tokens, D width, S sequences in all, V vocabulary
from collections.abc import Collection, Sequence

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from runtime.batch import UNSUPERVISED, Batch
from runtime.compute.blocks import op_seed
from runtime.compute.compute import LastHidden
from runtime.errors import DataError, PenstockError
from runtime.executor import Stop
from runtime.forward_plan import forward_plan
from runtime.machines.torch_machine import TorchMachine

LENGTH_STEP_TOKENS = 64  # sequences are padded to a multiple of it: shapes change seldom, and suit kernels


def check_prompts(prompts: Sequence[Sequence[int]], seq_len: int) -> None:
    """DataError for a prompt without tokens, or without room for another in a sequence."""
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise DataError(f"prompt {number} is empty; give it some text")
        if len(prompt) >= seq_len:
            raise DataError(f"prompt {number} has {len(prompt):,} tokens, and a sequence of the plan holds {seq_len:,}; shorten it")


def generate(
    machine: TorchMachine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end_ids: Collection[int] = (),
    stop: Stop | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt: up to `max_new_tokens`, to one of `end_ids`, or to the length of the plan's sequences.

    At temperature 0 the likeliest token is taken. Else tokens are drawn as transformers draws them, with random numbers that depend
    on the seed, the prompt's place and the token's alone. All lanes of the machine must be idle. DataError for a prompt that is
    empty or too long; Abandoned after `stop.request()`.
    """
    semantics = machine.plan.semantics
    check_prompts(prompts, semantics.seq_len)
    warp = LogitsProcessorList()
    if temperature:
        warp.append(TemperatureLogitsWarper(temperature))
    if top_p < 1:
        warp.append(TopPLogitsWarper(top_p))
    sequences = [list(map(int, prompt)) for prompt in prompts]

    def is_open(number: int) -> bool:
        n_new, n = len(sequences[number]) - len(prompts[number]), len(sequences[number])
        return n_new < max_new_tokens and n < semantics.seq_len and not (n_new and sequences[number][-1] in end_ids)

    while unfinished := [number for number in range(len(prompts)) if is_open(number)]:
        for first in range(0, len(unfinished), semantics.loss_tile_tokens):  # as many rows of logits as a tile of the loss has
            some = unfinished[first : first + semantics.loss_tile_tokens]
            for number, logits_V in zip(some, _next_logits(machine, [sequences[n] for n in some], stop), strict=True):
                if not bool(logits_V.isfinite().all()):
                    raise PenstockError(
                        "the model's logits are not finite: its weights are spoilt; resume from an earlier checkpoint"
                    )
                token = int(logits_V.argmax())
                if temperature:
                    n_new = len(sequences[number]) - len(prompts[number])
                    generator = torch.Generator().manual_seed(op_seed(seed, n_new, number, 0))
                    warped_V = warp(torch.tensor([sequences[number]]), logits_V[None])[0]  # type: ignore[arg-type]
                    token = int(torch.multinomial(warped_V.softmax(dim=-1), 1, generator=generator))
                sequences[number].append(token)
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def _next_logits(machine: TorchMachine, sequences: list[list[int]], stop: Stop | None) -> torch.Tensor:
    """(S, V) fp32 logits of the token after each sequence, on the host."""
    semantics = machine.plan.semantics
    longest = max(map(len, sequences))
    seq_len = min(semantics.seq_len, -(-longest // LENGTH_STEP_TOKENS) * LENGTH_STEP_TOKENS)
    plan = forward_plan(machine.plan, -(-len(sequences) // semantics.micro_batch), seq_len)
    tokens_BT = torch.zeros((plan.semantics.batch_size, seq_len), dtype=torch.int64)  # padded on the right: attention is causal
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.tensor(sequence)
    batch, found = Batch(tokens_BT, torch.full_like(tokens_BT, UNSUPERVISED)), list[torch.Tensor]()

    def note(last: LastHidden) -> None:
        first = last.micro_batch * semantics.micro_batch
        ends = [len(sequence) - 1 for sequence in sequences[first : first + semantics.micro_batch]]
        rows_SD = torch.stack([last.hidden_BTD[b, end] for b, end in enumerate(ends)])
        found.append(last.templates.logits(last.weights, rows_SD))

    machine.forward(plan, lambda step: batch, note, 1, stop)
    return torch.cat([logits.cpu() for logits in found])
