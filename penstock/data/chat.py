"""Chat templates: which characters of a conversation are learned.

Learned are the assistant's answers, each with the token that ends it. A template with {% generation %} blocks marks them itself.
With any other, the conversation is rendered up to each answer and through it, and what the answer added is learned. Some templates
write earlier turns differently once later ones follow (reasoning is left out of them): the whole would then teach what is never
seen at inference. So each answer becomes a document of its own, after the prompt that the model would be given.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, tzinfo
from typing import Any, cast

from transformers.utils import chat_template_utils

from penstock.runtime.errors import DataError

from .formats import Chat, Message
from .tokenizer import ModelTokenizer, reason_of

Span = tuple[int, int]  # (first, one past the last) character
Rendered = tuple[str, list[Span]]  # a document as text, and the spans of it that are learned
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _FixedDay(datetime):
    """The clock of templates that write the date: a run resumed tomorrow gives the tokens of today."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_FixedDay":
        return cls(2024, 7, 26, tzinfo=tz)


vars(chat_template_utils)["datetime"] = _FixedDay  # what `strftime_now` asks


class ChatTemplate:
    """Conversations as the tokenizer's own template renders them, in the sandbox of transformers."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer, library = tokenizer, cast(Any, tokenizer.library)
        self._ends = tuple(token for i in tokenizer.answer_ends if (token := library.convert_ids_to_tokens(i)))
        self._special = tuple(str(token) for token in library.added_tokens_decoder.values() if token.special)

    def render(self, chat: Chat, where: str) -> list[Rendered]:
        """A conversation as one document, or as one for each answer; DataError says where one is that the template refuses."""
        if not chat.messages:
            return [("", [])]
        answers = {i for i, message in enumerate(chat.messages) if message["role"] == "assistant"}
        learned = sorted(answers - chat.unlearned)
        text, marked = self._text(chat.messages, chat.tools, where)
        if marked is None:
            spans = [self._span(chat, i, text, where) for i in learned]
            whole = [self._without_line_feed(text, span) for span in spans if span is not None]
        else:  # nothing is left to find but the answers that are not learned
            spans = [self._span(chat, i, text, where, prompt=False) for i in sorted(answers & chat.unlearned)]
            left_out = [span for span in spans if span is not None]
            whole = [self._with_end(text, s) for s in marked if not any(first <= s[0] < stop for first, stop in left_out)]
        if None in spans:  # a turn is written differently once others follow
            return [self._answer(chat, i, where) for i in learned]
        return [(text, whole)]

    def dropped(self, chat: Chat, rendered: Sequence[Rendered]) -> list[str]:
        """Roles of messages, not the assistant's, without which the text is the same: the template does not know them."""
        found = set[str]()
        for i, message in enumerate(chat.messages):
            words = message["content"].strip()
            if message["role"] not in (*found, "assistant") and not any(words in text for text, _ in rendered):
                with suppress(DataError):  # a template may insist on it
                    without = self._text(chat.messages[:i] + chat.messages[i + 1 :], chat.tools, "")
                    found |= {message["role"]} if without == self._text(chat.messages, chat.tools, "") else set()
        return sorted(found)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the assistant's answer begins."""
        text, _ = self._text(messages, None, "the prompt", prompt=True)
        return list(self.tokenizer.backend.encode(text, add_special_tokens=False).ids)

    def _answer(self, chat: Chat, i: int, where: str) -> Rendered:
        """The answer of message `i` after what the model is prompted with when it is to give it."""
        text, _ = self._text(chat.messages[: i + 1], chat.tools, where)
        if (span := self._span(chat, i, text, where)) is None:
            problem = f"the model's chat template writes message {i} differently from how it prompts for it"
            raise DataError(f"{where}: {problem}; mark what is learned with {{% generation %}} in it")
        return text, [self._without_line_feed(text, span)]

    def _span(self, chat: Chat, i: int, text: str, where: str, prompt: bool = True) -> Span | None:
        """What message `i` adds to those before it, and to the prompt for it; None where `text` does not begin with either."""
        before, _ = self._text(chat.messages[:i], chat.tools, where, prompt)
        through, _ = self._text(chat.messages[: i + 1], chat.tools, where)
        is_prefix = text.startswith(before) and text.startswith(through) and len(before) <= len(through)
        return (len(before), len(through)) if is_prefix else None

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str, prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Messages as text, and the spans that a template marks as generated; None of one that marks nothing."""
        library: Any = self.tokenizer.library
        schemas = None if tools is None else list(tools)
        try:
            template = library.get_chat_template(tools=schemas)
            marks = _GENERATION.search(template) is not None
            # What `apply_chat_template` calls, which keeps the spans of characters to itself.
            rendered: Any = chat_template_utils.render_jinja_template(
                [list(messages)],
                schemas,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **library.special_tokens_map,
            )
        except Exception as error:  # a template is a program
            raise DataError(f"{where}: the model's chat template does not take it ({reason_of(error)})") from None
        (text,), spans = rendered
        return text, spans[0] if marks else None

    def _with_end(self, text: str, span: Span) -> Span:
        """With the end token, where a template leaves it outside its mark."""
        first, stop = span
        if first == stop or text.endswith(self._ends, first, stop):
            return span
        return first, stop + next((len(end) for end in self._ends if text.startswith(end, stop)), 0)

    def _without_line_feed(self, text: str, span: Span) -> Span:
        """Without the line feed that a template puts after the end token, where generation has ended."""
        first, stop = span
        end = first + len(text[first:stop].rstrip())
        return (first, end) if text.endswith(self._special, first, end) else span
