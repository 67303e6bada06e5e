"""Chat templates: render conversations and find the character spans of the tokens to learn.

The assistant's answers are learned, including the token that ends each answer. A template with {% generation %} blocks marks the
answers itself. With any other template, the conversation is rendered up to each answer and through it; the difference is learned.
Some templates change earlier turns once later ones follow (they remove reasoning). Training on the whole conversation would then
teach text that never occurs at inference. In this case each answer becomes a separate document, after the prompt for that answer.
"""

import ctypes
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, tzinfo
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread, get_ident
from typing import Any, cast

from transformers.utils import chat_template_utils

from penstock.runtime.errors import DataError, PenstockError

from .files import LIMITS, Limits
from .images import text_in
from .messages import Chat, Message
from .tokenizer import ModelTokenizer, reason_of

Span = tuple[int, int]  # (first, one past the last) character
Rendered = tuple[str, list[Span]]  # a document: text, and its spans to learn
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one text; transformers copies it to the others
_PARTS = (_REASONING, ("tool_calls",), ("function_call",))  # of an assistant's message
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MARKS = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


class _FixedDay(datetime):
    """A fixed clock for templates that write the date, so that a run resumed on another day produces the same tokens."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_FixedDay":
        return cls(2024, 7, 26, tzinfo=tz)


vars(chat_template_utils)["datetime"] = _FixedDay  # the clock of `strftime_now`

# -- limits of a rendering: seconds and bytes ------------------------------------------------------------------------------
#
# The sandbox of jinja2 restricts the access of a template, not its time and memory. A rendering that takes too long, or makes the
# process grow, is interrupted between two bytecodes. Single operations with enormous results are refused before they run.

LIMIT = 10**7  # digits of a number, width, characters of a repetition
INTERVAL_S = 0.05
GROWTH = 16  # of the process, by the most bytes of a row: for copies of its text
_PAGE_BYTES = 4096
_WIDTH = re.compile(r"\d{8,}")
_Sandbox: Any = vars(chat_template_utils)["ImmutableSandboxedEnvironment"]
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TooLargeError(PenstockError):
    """A template exceeds a limit. Reading ends, because other rows would exceed it, too."""

    def __init__(self, where: str = "") -> None:
        problem = "the chat template takes too long, or writes too much; allow more with --max-row-seconds or --max-row-mb"
        super().__init__(f"{where}: {problem}")


def _refuse_widths(numbers: Iterable[Any], format: str = "") -> None:
    if _WIDTH.search(format) or any(isinstance(number, int) and abs(number) > LIMIT for number in numbers):
        raise TooLargeError


def _filtered(function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_widths((*args, *kwargs.values()))
    return function(value, *args, **kwargs)


class LimitedSandbox(_Sandbox):  # type: ignore[misc]
    """The sandbox of chat templates, without operations that have enormous results."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters |= {name: partial(_filtered, self.filters[name]) for name in ("center", "indent")}

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        """Perform an operation. TooLargeError if its result would be enormous."""
        if operator == "**" and isinstance(first, int) and isinstance(second, int):
            _refuse_widths([first.bit_length() * second])
        elif operator == "%" and isinstance(first, str):
            _refuse_widths(second if isinstance(second, tuple) and "*" in first else (), first)
        elif operator == "*":
            _refuse_widths(
                len(a) * b
                for a, b in ((first, second), (second, first))
                if isinstance(a, str | list | tuple) and isinstance(b, int)
            )
        return super().call_binop(context, operator, first, second)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function. TooLargeError for a method of strings with an enormous width."""
        if isinstance(getattr(function, "__self__", None), str):
            _refuse_widths((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandboxed `format` of a string. TooLargeError for an enormous width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_widths((), value.__self__)
        return wrapped


vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = LimitedSandbox


class Watch:
    """Raises TooLargeError in a thread that renders beyond a limit."""

    def __init__(self, most_s: float, most_bytes: int) -> None:
        self.most_s, self.most_bytes, self._lock = most_s, most_bytes, Lock()
        self._thread, self._until_s, self._n_bytes = 0, 0.0, 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Watch the renderings in the context, from a thread."""
        over = Event()
        thread = Thread(target=self._look, args=(over,), daemon=True, name="limits of chat templates")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Limit the time and memory of the context."""
        with self._lock:
            self._thread, self._until_s, self._n_bytes = get_ident(), time.monotonic() + self.most_s, 0
        try:
            yield
        finally:
            with self._lock:
                _set_exception(ctypes.c_ulong(self._thread), None)  # none arrives later
                self._thread = 0

    def _look(self, over: Event) -> None:
        while not over.wait(INTERVAL_S):
            n_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
            with self._lock:
                self._n_bytes = self._n_bytes or n_bytes
                is_over = time.monotonic() > self._until_s or n_bytes - self._n_bytes > GROWTH * self.most_bytes
                if self._thread and is_over:
                    _set_exception(ctypes.c_ulong(self._thread), ctypes.py_object(TooLargeError))


# -- conversations ---------------------------------------------------------------------------------------------------------


class ChatTemplate:
    """Conversations rendered with the tokenizer's template, in the sandbox of transformers."""

    def __init__(self, tokenizer: ModelTokenizer, limits: Limits = LIMITS) -> None:
        self.tokenizer, library = tokenizer, cast(Any, tokenizer.library)
        self.watch = Watch(limits.row_s, limits.row_bytes)
        self._ends = tuple(token for i in tokenizer.answer_ends if (token := library.convert_ids_to_tokens(i)))
        self._special = tuple(str(token) for token in library.added_tokens_decoder.values() if token.special)

    def with_arguments(self, chat: Chat, where: str) -> Chat:
        """Return the conversation with arguments of tool calls as objects instead of JSON in strings, or the reverse, if the
        template rejects them, encodes strings once more, or writes objects in Python's notation."""
        text = None
        for variant in (chat, _with_arguments(chat, False), _with_arguments(chat, True)) if [*_arguments(chat)] else ():
            with suppress(DataError):
                text, earlier = self._text(variant.messages, variant.tools, where)[0], text
                if text != earlier and all(_is_kept(value, text) for value in _arguments(variant)):
                    return variant
        return chat

    def render(self, chat: Chat, where: str) -> list[Rendered]:
        """Return a conversation as one document, or one document per answer. DataError if the template rejects it."""
        if not chat.messages:
            return [("", [])]
        answers = {i for i, message in enumerate(chat.messages) if message["role"] == "assistant"}
        learned = sorted(answers - chat.unlearned)
        text, marked = self._text(chat.messages, chat.tools, where)
        if marked is None:
            spans = [self._span(chat, i, text, where) for i in learned]
            learned_spans = [self._without_line_feed(text, span) for span in spans if span is not None]
        else:  # only the answers excluded from learning have to be found
            spans = [self._span(chat, i, text, where, prompt=False) for i in sorted(answers & chat.unlearned)]
            left_out = [span for span in spans if span is not None]
            learned_spans = [self._with_end(text, s) for s in marked if not any(first <= s[0] < stop for first, stop in left_out)]
        if None in spans:  # the template changes this turn once others follow
            return [self._answer(chat, i, where) for i in learned]
        return [(text, learned_spans)]

    def dropped_roles(self, chat: Chat, rendered: Sequence[Rendered]) -> list[str]:
        """Return roles, except the assistant's, that the template ignores: the text is equal without their messages."""
        ignored = set[str]()
        for i, message in enumerate(chat.messages):
            words = text_in(message["content"]).strip()
            if message["role"] not in (*ignored, "assistant") and not any(words in text for text, _ in rendered):
                with suppress(DataError):  # a template may require the role
                    shortened = self._text(chat.messages[:i] + chat.messages[i + 1 :], chat.tools, "")
                    ignored |= {message["role"]} if shortened == self._text(chat.messages, chat.tools, "") else set()
        return sorted(ignored)

    def dropped_parts(self, chat: Chat, rendered: Sequence[Rendered]) -> list[str]:
        """Return parts of the assistant's messages, and "tools", that the template ignores: the text is equal without them."""
        ignored = {"tools"} if chat.tools and self._is_same(chat, replace(chat, tools=None)) else set[str]()
        for i, message in enumerate(chat.messages):
            for name, words, changed in _without_parts(message) if message["role"] == "assistant" else ():
                if name not in ignored and not (words and any(words in text for text, _ in rendered)):
                    n = len(chat.messages) if len(rendered) == 1 else i + 1  # else each answer is a document
                    shortened = (*chat.messages[:i], changed, *chat.messages[i + 1 : n])
                    same = self._is_same(replace(chat, messages=chat.messages[:n]), replace(chat, messages=shortened))
                    ignored |= {name} if same else set()
        return sorted(ignored)

    def _is_same(self, chat: Chat, shortened: Chat) -> bool:
        """True if the template writes the same text for both. False if it rejects one of them."""
        with suppress(DataError):
            return self._text(chat.messages, chat.tools, "") == self._text(shortened.messages, shortened.tools, "")
        return False

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a generation prompt: the assistant's answer begins after them."""
        with self.watch.at_work():
            text, _ = self._text(messages, None, "the prompt", prompt=True)
        return list(self.tokenizer.backend.encode(text, add_special_tokens=False).ids)

    def _answer(self, chat: Chat, i: int, where: str) -> Rendered:
        """Return the answer of message `i` after its inference-time prompt."""
        text, _ = self._text(chat.messages[: i + 1], chat.tools, where)
        if (span := self._span(chat, i, text, where)) is None:
            problem = f"the model's chat template writes message {i} differently from how it prompts for it"
            raise DataError(f"{where}: {problem}; mark the learned parts with {{% generation %}} in it")
        return text, [self._without_line_feed(text, span)]

    def _span(self, chat: Chat, i: int, text: str, where: str, prompt: bool = True) -> Span | None:
        """Return the span that message `i` adds to the prompt before it. None if `text` does not begin with either rendering."""
        prefix, _ = self._text(chat.messages[:i], chat.tools, where, prompt)
        through, _ = self._text(chat.messages[: i + 1], chat.tools, where)
        is_prefix = text.startswith(prefix) and text.startswith(through) and len(prefix) <= len(through)
        return (len(prefix), len(through)) if is_prefix else None

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str, prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return messages as text and the spans marked by {% generation %}. None for spans if the template has no marks."""
        library: Any = self.tokenizer.library
        schemas = None if tools is None else list(tools)
        try:
            template = library.get_chat_template(tools=schemas)
            marks = _GENERATION.search(template) is not None
            # `apply_chat_template` calls this function, but does not return character spans.
            with self.watch.rendering():
                rendered: Any = chat_template_utils.render_jinja_template(
                    [list(messages)],
                    schemas,
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **library.special_tokens_map,
                )
            (text,), spans = rendered
            if len(text) > self.watch.most_bytes:
                raise TooLargeError
        except TooLargeError:
            raise TooLargeError(where) from None
        except Exception as error:  # templates can raise any exception
            raise DataError(f"{where}: the model's chat template rejects it ({reason_of(error)})") from None
        return text, spans[0] if marks else None

    def _with_end(self, text: str, span: Span) -> Span:
        """Extend a span by the end token if the template puts that token outside its {% generation %} block."""
        first, stop = span
        if first == stop or text.endswith(self._ends, first, stop):
            return span
        return first, stop + next((len(end) for end in self._ends if text.startswith(end, stop)), 0)

    def _without_line_feed(self, text: str, span: Span) -> Span:
        """Shorten a span by the line feed after the end token, because generation stops at the end token."""
        first, stop = span
        end = first + len(text[first:stop].rstrip())
        return (first, end) if text.endswith(self._special, first, end) else span


def _arguments(chat: Chat) -> Iterator[Any]:
    """Yield the arguments of tool calls: JSON in a string, or an object."""
    for call in (call for message in chat.messages for call in message.get("tool_calls") or ()):
        holder = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(holder, dict) and isinstance(value := holder.get("arguments"), str | dict):
            yield value


def _with_arguments(chat: Chat, as_text: bool) -> Chat:
    """Return the conversation with arguments of tool calls as JSON in strings, or as objects. Other strings are unchanged."""

    def converted(value: Any) -> Any:
        if as_text or not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if as_text and isinstance(value, dict) else value
        with suppress(ValueError, RecursionError):
            return parsed if isinstance(parsed := json.loads(value), dict) else value
        return value

    def of_call(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return {**call, "function": of_call(call["function"])}
        return {**call, "arguments": converted(call["arguments"])} if isinstance(call, dict) and "arguments" in call else call

    calls = [{"tool_calls": list(map(of_call, m["tool_calls"]))} if m.get("tool_calls") else {} for m in chat.messages]
    return replace(chat, messages=tuple({**m, **changed} for m, changed in zip(chat.messages, calls, strict=True)))


def _is_kept(value: Any, text: str) -> bool:
    """True if a template wrote these arguments as JSON, once."""
    in_json = json.dumps(value, ensure_ascii=False)
    return value in text and in_json not in text if isinstance(value, str) else str(value) not in text or str(value) == in_json


def _without_parts(message: Message) -> Iterator[tuple[str, str, Message]]:
    """Yield (name, its words, message without it) for each part of an assistant's message that a template may drop."""
    for names in _PARTS:
        if part := next((name for name in names if message.get(name)), None):
            words = message[part].strip() if isinstance(message[part], str) else ""
            yield part, words, {name: value for name, value in message.items() if name not in names}
    opened, mark, rest = message["content"].rpartition("</think>") if isinstance(message["content"], str) else ("", "", "")
    if mark and (thought := opened.rpartition("<think>")[2]).strip():
        yield "<think> in contents", thought.strip(), {**message, "content": opened.removesuffix(thought) + mark + rest}
