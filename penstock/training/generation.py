"""What does the model generate?

For every new token the whole of each sequence is computed again: there is no cache of keys and values. Where weights are streamed,
a forward takes as long as they take to come, which is as long for one token as for hundreds, and a cache would need device memory
that the plan has not set aside. So a token costs one upload of the model, for all prompts together. That is for looking at a few
samples while the model trains, not for serving it.
"""

# B sequences of a micro-batch, T tokens, D width, S sequences in all, V vocabulary
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from runtime.batch import UNSUPERVISED, Batch
from runtime.compute.blocks import op_seed
from runtime.compute.inference import LastHidden
from runtime.errors import DataError, PenstockError
from runtime.executor import Stop
from runtime.forward_plan import forward_plan
from runtime.machines.torch_machine import TorchMachine

STEP_TOKENS = 64  # sequences are computed up to a multiple of that: shapes then change seldom, and suit kernels


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model was asked, and what it said."""

    prompt: str
    text: str


def samples(
    machine: TorchMachine,
    prompts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end_ids: Collection[int] = (),
    stop: Stop | None = None,
) -> list[Sample]:
    """How the model continues each prompt; `encode` gives the tokens after which it begins. See `generate`."""
    ids = [[int(i) for i in encode(prompt)] for prompt in prompts]
    answers = generate(machine, ids, max_new_tokens, temperature, top_p, seed, end_ids, stop)
    return [Sample(prompt, decode(new)) for prompt, new in zip(prompts, answers, strict=True)]


def check_prompts(prompts: Sequence[Sequence[int]], seq_len: int) -> None:
    """DataError for a prompt of no tokens, or of as many as a sequence holds, which leaves no room for another."""
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
    """The tokens that follow each prompt, up to `max_new_tokens`, or to the first of `end_ids`, which is the last one then, or to
    the length of the plan's sequences. All lanes of the machine must be idle.

    At temperature 0 the likeliest token is taken. Else tokens are drawn as transformers draws them, with random numbers that depend
    on the seed, the prompt's place and the token's alone. DataError for a prompt that is empty or too long. After `stop.request()`
    no token more is looked for: Abandoned.
    """
    semantics = machine.plan.semantics
    check_prompts(prompts, semantics.seq_len)
    choose = _Choice(temperature, top_p, seed)
    talks = [_Talk(number, list(prompt), len(prompt)) for number, prompt in enumerate(prompts)]

    def unfinished() -> list[_Talk]:
        return [t for t in talks if not t.is_over and t.n_new < max_new_tokens and len(t.tokens) < semantics.seq_len]

    while todo := unfinished():
        for some in _of_at_most(semantics.loss_tile_tokens, todo):  # as many rows of logits as there are in a tile
            for talk, logits_V in zip(some, _next_logits(machine, [t.tokens for t in some], stop), strict=True):
                talk.tokens.append(choose(talk, logits_V))
                talk.is_over = talk.tokens[-1] in end_ids
    return [talk.tokens[talk.n_prompt :] for talk in talks]


@dataclass(slots=True)
class _Talk:
    """A prompt and what followed."""

    number: int
    tokens: list[int]
    n_prompt: int
    is_over: bool = False

    @property
    def n_new(self) -> int:
        return len(self.tokens) - self.n_prompt


def _of_at_most(n: int, talks: list[_Talk]) -> Iterator[list[_Talk]]:
    for first in range(0, len(talks), n):
        yield talks[first : first + n]


class _Choice:
    """Which token comes next."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self.seed, self.is_greedy = seed, temperature == 0
        self.warp: Any = LogitsProcessorList()
        if not self.is_greedy:
            self.warp.append(TemperatureLogitsWarper(temperature))
        if top_p < 1:
            self.warp.append(TopPLogitsWarper(top_p))

    def __call__(self, talk: _Talk, logits_V: torch.Tensor) -> int:
        if not bool(logits_V.isfinite().all()):
            raise PenstockError("the model's logits are not finite; its weights are spoilt, so resume from an earlier checkpoint")
        if self.is_greedy:
            return int(logits_V.argmax())
        generator = torch.Generator().manual_seed(op_seed(self.seed, talk.n_new, talk.number, 0))
        warped_V = self.warp(torch.tensor([talk.tokens]), logits_V[None])[0]
        return int(torch.multinomial(warped_V.softmax(dim=-1), 1, generator=generator))


def _next_logits(machine: TorchMachine, sequences: list[list[int]], stop: Stop | None) -> torch.Tensor:
    """Of the token after each sequence: (S, V) fp32 on the host."""
    semantics = machine.plan.semantics
    longest = max(map(len, sequences))
    seq_len = min(semantics.seq_len, -(-longest // STEP_TOKENS) * STEP_TOKENS)
    plan = forward_plan(machine.plan, -(-len(sequences) // semantics.micro_batch), seq_len)
    tokens = torch.zeros((plan.semantics.batch_size, seq_len), dtype=torch.int64)  # padded on the right, where nobody looks
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    batch = Batch(tokens, torch.full_like(tokens, UNSUPERVISED))
    last = _LastLogits([len(sequence) - 1 for sequence in sequences], semantics.micro_batch)
    machine.forward(plan, lambda step: batch, last, 1, stop)
    return torch.cat([found.cpu() for found in last.found])


@dataclass(slots=True)
class _LastLogits:
    """Notes the logits of the last token of each sequence; those beyond the last sequence are padding."""

    places: list[int]
    micro_batch: int
    found: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, last: LastHidden) -> None:
        places = self.places[last.micro_batch * self.micro_batch : (last.micro_batch + 1) * self.micro_batch]
        rows = torch.stack([last.hidden_BTD[b, place] for b, place in enumerate(places)])
        self.found.append(last.templates.logits(last.weights, rows))
