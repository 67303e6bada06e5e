"""Conversation with a model: turns of a user, and generated answers."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from penstock.data.chat import ChatTemplate
from penstock.data.messages import Message
from penstock.data.tokenizer import ModelTokenizer
from penstock.runtime.errors import DataError
from penstock.runtime.executor import Stop
from penstock.runtime.machines.torch_machine import Abandoned, TorchMachine
from penstock.training.validation import generate

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of tokens: the likeliest, or with a `temperature` a random one of the likeliest with `top_p` of the probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def chooser(self) -> Callable[[torch.Tensor], int]:
        """Return a function from fp32 logits (V) of the next token to the token."""
        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits_V: torch.Tensor) -> int:
            if not self.temperature:
                return int(logits_V.argmax())
            shares, ids = (logits_V.double() / self.temperature).softmax(0).sort(descending=True, stable=True)
            shares[shares.cumsum(0) - shares >= self.top_p] = 0  # never the likeliest
            return int(ids[torch.multinomial(shares, 1, generator=generator)])

        return choose


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    n_tokens: int
    seconds: float
    cut: str | None  # reason, if the model did not end it

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds if self.seconds > 0 else math.inf


class Conversation:
    """Messages of a conversation, kept over its turns."""

    def __init__(self, machine: TorchMachine, tokenizer: ModelTokenizer, system: str | None, sampling: Sampling) -> None:
        self._machine, self._tokenizer, self._template = machine, tokenizer, ChatTemplate(tokenizer)
        self._choose = sampling.chooser()
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str, max_new_tokens: int, show: Callable[[str], None], stop: Stop) -> Answer:
        """Answer a user's turn. `show` is called with each new piece of text. `stop.request()` ends the answer after a token.

        DataError if the conversation fills the context, or the template rejects it; the turn is then dropped.
        """
        if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError("a turn is not UTF-8; convert it")
        messages, semantics = [*self.messages, {"role": "user", "content": text}], self._machine.plan.semantics
        prompt, ids, shown, begun_s = self._template.prompt(messages), list[int](), "", time.perf_counter()
        if len(prompt) >= semantics.seq_len:
            size = f"the conversation has {len(prompt):,} tokens, and the context holds {semantics.seq_len:,}"
            raise DataError(f"{size}; begin a new one, or give a larger --context")

        def add(token: int) -> None:
            nonlocal shown
            ids.append(token)
            new = self._tokenizer.decode(ids)
            if not new.endswith(INCOMPLETE) and new.startswith(shown):
                show(new.removeprefix(shown))
                shown = new

        with suppress(Abandoned):
            generate(self._machine, [prompt], max_new_tokens, self._tokenizer.answer_ends, stop, self._choose, add)
        answer = self._tokenizer.decode(ids)
        show(answer.removeprefix(shown) if answer.startswith(shown) else "")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        is_ended, is_full = bool(ids) and ids[-1] in self._tokenizer.answer_ends, len(prompt) + len(ids) >= semantics.seq_len
        limit = f"--context {semantics.seq_len}" if is_full else f"--max-new-tokens {max_new_tokens}"
        cut = None if is_ended else "interrupted" if stop.is_requested else f"cut by {limit}"
        return Answer(answer, len(ids), time.perf_counter() - begun_s, cut)
