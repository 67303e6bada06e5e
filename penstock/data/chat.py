"""Which tokens of a conversation is a model to learn?

What the assistant says, with the token that ends it, and nothing else. A template with {% generation %} blocks marks that itself.
With any other, the conversation is written up to each answer and through it, and what the answer added is learned. Some templates
write earlier turns differently once later ones follow (reasoning is left out of them): the whole would then teach what is never
seen. So each answer becomes a document of its own, with what comes before it as the model would see it.

A model without a chat template gets a plain one: `<|role|>`, a line feed, the message, and the end token, message by message.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import DataError
from runtime.files import read_whole

from .encoders import Encoder, Ids, read_config, token_text
from .formats import Chat, Message
from .templates import ChatTemplate, ChatTemplateError

MAX_TEMPLATE_BYTES = 2**20
MAX_APART_CHARACTERS = 2**26  # of a conversation with all that comes before each of its answers: grows as the square of them


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a document, and (first, one past the last) of each run of tokens that are to be learned, in order."""

    ids: Ids
    runs: npt.NDArray[np.int64]  # (n, 2)


class ChatFormat(Protocol):
    """How a model reads and continues a conversation."""

    @property
    def identity(self) -> str:
        """Differs where the tokens of some conversation may differ."""
        ...

    def encode(self, chat: Chat, where: str) -> list[Encoded]:
        """A conversation as one document, or as one for each answer; DataError says where one is that cannot be written."""
        ...

    def prompt(self, messages: list[Message]) -> Ids:
        """The tokens after which the assistant's answer begins."""
        ...

    def words(self) -> str:
        """How conversations are written, for the user."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Conversations for a model that brings no template."""

    encoder: Encoder

    @property
    def identity(self) -> str:
        return "plain"

    def encode(self, chat: Chat, where: str) -> list[Encoded]:
        ids, runs = [self.encoder.encode("")], list[tuple[int, int]]()
        n = len(ids[0])
        learned = _answers(chat)
        for i, message in enumerate(chat.messages):
            if chat.tools or message.keys() - {"role", "content"}:
                raise DataError(f"{where}: tools and their calls need a chat template, and the model has none; leave them out")
            turn = [self._begin(message["role"]), self.encoder.spans(message["content"])[0], np.array([self.encoder.end_id])]
            if i in learned:
                runs.append((n + len(turn[0]), n + sum(map(len, turn))))
            n += sum(map(len, turn))
            ids += turn
        return [Encoded(np.concatenate(ids), _runs(runs))]

    def prompt(self, messages: list[Message]) -> Ids:
        (before,) = self.encode(Chat(tuple(messages)), "the prompt")
        return np.concatenate([before.ids, self._begin("assistant")])

    def _begin(self, role: str) -> Ids:
        return self.encoder.spans(f"<|{role}|>\n")[0]

    def words(self) -> str:
        return "conversations as <|role|> and text, for the model has no chat template"

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Templated:
    """Conversations as the model's own template writes them."""

    encoder: Encoder
    template: ChatTemplate
    place: Path  # where the template lies

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps([self.template.source, self.template.special_tokens]).encode()).hexdigest()

    def encode(self, chat: Chat, where: str) -> list[Encoded]:
        if not chat.messages:
            return [Encoded(np.empty(0, np.int64), _runs([]))]
        try:
            whole = self._whole(chat)
            return [whole] if whole is not None else self._answer_by_answer(chat, where)
        except ChatTemplateError as error:
            raise DataError(f"{where}: the chat template of {self.place} does not take it ({error})") from None

    def _whole(self, chat: Chat) -> Encoded | None:
        """All of it at once; None where the template writes a turn differently once others follow."""
        marks = self.template.marks_answers
        # Where each answer begins and ends; of a template that marks them, those that it marks and nobody is to learn.
        asked = sorted(_said(chat) & chat.unlearned) if marks else _answers(chat)
        cuts = [(i + more, not more and not marks) for i in asked for more in (0, 1)]
        written = self.template.write(list(chat.messages), _tools(chat), cuts=cuts)
        spans = []
        for before, after in zip(written.cuts[::2], written.cuts[1::2], strict=True):
            if before is None or after is None or after < before:
                return None
            spans.append((before, after))
        ids, ends = self.encoder.spans(written.text)
        if marks:
            kept = [(a, b) for a, b in written.generated if not any(first <= a < stop for first, stop in spans)]
            return Encoded(ids, _runs([self._through_end(ids, _tokens(ends, *span)) for span in kept]))
        return Encoded(ids, _runs([self._up_to_end(ids, ends, written.text, _tokens(ends, *span)) for span in spans]))

    def _answer_by_answer(self, chat: Chat, where: str) -> list[Encoded]:
        """Each answer after what the model is prompted with when it is to give it."""
        found, n_characters = list[Encoded](), 0
        for i in _answers(chat):
            written = self.template.write(list(chat.messages[: i + 1]), _tools(chat), cuts=[(i, True)])
            (before,) = written.cuts
            if before is None:
                raise DataError(
                    f"{where}: the chat template of {self.place} writes message {i} differently from how it prompts for it; "
                    "mark what is learned with {% generation %} in it"
                )
            n_characters += len(written.text)
            if n_characters > MAX_APART_CHARACTERS:
                raise DataError(
                    f"{where}: each answer with what comes before it, as the chat template of {self.place} asks, makes more than "
                    f"{MAX_APART_CHARACTERS:,} characters; split the conversation"
                )
            ids, ends = self.encoder.spans(written.text)
            run = self._up_to_end(ids, ends, written.text, _tokens(ends, before, len(written.text)))
            found.append(Encoded(ids, _runs([run])))
        return found

    def _through_end(self, ids: Ids, run: tuple[int, int]) -> tuple[int, int]:
        """With the end token, where a template leaves it outside its mark."""
        first, stop = run
        stops_there = first < stop < len(ids) and int(ids[stop]) in self.encoder.answer_ends
        return (first, stop + 1) if stops_there and int(ids[stop - 1]) not in self.encoder.answer_ends else run

    def _up_to_end(self, ids: Ids, ends: npt.NDArray[np.int64], text: str, run: tuple[int, int]) -> tuple[int, int]:
        """Without the line feed that a template puts after the end token: nobody waits for it."""
        first, stop = run
        special = [t for t in range(first, stop) if int(ids[t]) in self.encoder.special_ids]
        if special and not text[ends[special[-1], 1] : ends[stop - 1, 1]].strip():
            return first, special[-1] + 1
        return run

    def prompt(self, messages: list[Message]) -> Ids:
        try:
            written = self.template.write(messages, prompt=True)
        except ChatTemplateError as error:
            raise DataError(f"the chat template of {self.place} does not take the prompt ({error})") from None
        return self.encoder.spans(written.text)[0]

    def words(self) -> str:
        return "conversations by the model's chat template"

    def close(self) -> None:
        self.template.close()


def _said(chat: Chat) -> set[int]:
    """Which messages are the assistant's."""
    return {i for i, message in enumerate(chat.messages) if message["role"] == "assistant"}


def _answers(chat: Chat) -> list[int]:
    """Which messages are to be learned."""
    return sorted(_said(chat) - chat.unlearned)


def _tools(chat: Chat) -> list[dict[str, Any]] | None:
    return list(chat.tools) if chat.tools else None


def _tokens(ends: npt.NDArray[np.int64], first: int, stop: int) -> tuple[int, int]:
    """The tokens that hold some of the characters first .. stop - 1."""
    held = np.flatnonzero((ends[:, 0] < stop) & (ends[:, 1] > first))
    return (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)


def _runs(runs: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Runs in order, none empty and none begun before another ends: a template may mark a place twice."""
    kept: list[tuple[int, int]] = []
    for first, stop in sorted(runs):
        first = max(first, kept[-1][1]) if kept else first
        if first < stop:
            kept.append((first, stop))
    return np.array(kept, dtype=np.int64).reshape(-1, 2)


def read_chat_format(model_folder: Path | None, encoder: Encoder) -> Plain | Templated:
    """How the model of a folder takes part in conversations; DataError for a template that cannot be read."""
    if model_folder is None or not (model_folder / "tokenizer.json").is_file():
        return Plain(encoder)
    named = read_config(model_folder / "special_tokens_map.json") | (config := read_config(model_folder / "tokenizer_config.json"))
    special = {name: text for name, token in named.items() if name.endswith("_token") and (text := token_text(token)) is not None}
    place = model_folder / "chat_template.jinja"
    try:
        source: Any = read_whole(place, MAX_TEMPLATE_BYTES).decode() if place.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: cannot be read ({str(error)[:80]}); copy it again from the model") from None
    if source is None:
        source, place = config.get("chat_template"), model_folder / "tokenizer_config.json"
    if isinstance(source, list):  # several, by name
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}.get("default")
    if source is None:
        return Plain(encoder)
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
        raise DataError(f"{place}: its chat_template is no template; copy it again from the model")
    return Templated(encoder, ChatTemplate(source, special), place)
