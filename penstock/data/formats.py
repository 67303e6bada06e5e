"""What does a row of training data say: a text, or a conversation?"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from penstock.data.files.columns import EXAMPLE, Format, format_by, not_understood, shown
from runtime.errors import DataError

MAX_DEPTH = 64  # of what a message or tool holds
Message = dict[str, Any]
SHAPES: dict[Format, str] = {
    "text": EXAMPLE,
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "alpaca": '{"instruction": "...", "input": "...", "output": "..."}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
    "prompt-completion": '{"prompt": "...", "completion": "..."}, or both as lists of messages',
    "question-answer": '{"question": "...", "answer": "..."}',
}
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as chat templates take them: role, content, and what else a message brings."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unlearned: frozenset[int] = frozenset()  # messages that are not to be learned, whoever says them


@dataclass(frozen=True, slots=True)
class Completion:
    """A text of which only the end is learned."""

    prompt: str
    completion: str


class _Unfit(Exception):
    """What is wrong with a row."""


def format_of(row: object, where: str, mapped: Collection[str] = ()) -> Format:
    """The format of a data set, by the columns of its first row, those first that the user `mapped`; DataError where none tells."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is no object; it is to be {SHAPES['text']}, {SHAPES['messages']} or alike")
    format = format_by([name for name in row if name in mapped]) or format_by(row)
    if format is None:
        raise not_understood(where, row)
    return format


def document(row: object, format: Format, where: str) -> str | Chat | Completion:
    """What a row says; DataError names the place of one that does not fit."""
    try:
        if not isinstance(row, dict):
            raise _Unfit(f'no string under "{"text" if format == "text" else format}"')
        return _READERS[format](row)
    except _Unfit as error:
        columns = f"; its columns are {shown(row)}" if isinstance(row, dict) else ""
        raise DataError(f"{where}: {error}; each row is {SHAPES[format]}{columns}") from None


def _text(row: dict[str, Any]) -> str:
    return _string(row, "text")


def _messages(row: dict[str, Any]) -> Chat:
    return _chat(_list(row, "messages"), row)


def _chat(messages: list[Any], row: dict[str, Any], n_before: int = 0) -> Chat:
    """The messages, of which the first `n_before` are not learned, nor those that say so themselves."""
    found = [_message(message, i) for i, message in enumerate(messages)]
    weights = [_weight(message, i) for i, message in enumerate(found)]
    return Chat(tuple(found), _tools(row), frozenset(i for i, weight in enumerate(weights) if i < n_before or weight == 0))


def _weight(message: Message, i: int) -> int | None:
    """0: not to be learned, though the assistant says it. Templates do not see it."""
    weight = message.pop("weight", None)
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise _Unfit(f'message {i} has a "weight" that is neither 0 nor 1')
    if weight == 1 and message["role"] != "assistant":
        raise _Unfit(f'message {i} has "weight" 1 and is not the assistant\'s, whose alone are learned')
    return None if weight is None else int(weight)


def _message(message: object, i: int) -> Message:
    if not isinstance(message, dict):
        raise _Unfit(f"message {i} is no object")
    fields = {key: value for key, value in message.items() if value is not None}  # tables fill what a row leaves out
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise _Unfit(f'message {i} has no "role"')
    content = fields.pop("content", "" if "tool_calls" in fields else None)
    if isinstance(content, list):
        content = "".join(_part(part, i) for part in content)
    if not isinstance(content, str):
        raise _Unfit(f'message {i} has no string or list of texts under "content"')
    return _plain({"role": fields.pop("role"), "content": content, **fields}, f"message {i}")


def _part(part: object, i: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _Unfit(f"message {i} holds something other than text")


def _alpaca(row: dict[str, Any]) -> Chat:
    """The input follows the instruction on a line of its own."""
    messages = [{"role": "system", "content": _string(row, "system")}] if row.get("system") else []
    for pair in _list(row, "history") if row.get("history") is not None else []:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _Unfit('"history" is no list of pairs of question and answer')
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = _string(row, "instruction") + (f"\n{_string(row, 'input')}" if row.get("input") else "")
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": _string(row, "output")}]
    return Chat(tuple(_plain(message, "the row") for message in messages))


def _question_answer(row: dict[str, Any]) -> Chat:
    asked, said = _string(row, "question"), _string(row, "answer")
    return _alpaca({"instruction": asked, "output": said, "system": row.get("system"), "history": row.get("history")})


def _prompt_completion(row: dict[str, Any]) -> Chat | Completion:
    """Two texts, one after the other as they are, or two lists of messages."""
    if row.get("system"):
        raise _Unfit('"system" beside "prompt", which is all that comes before the completion; put it there')
    if isinstance(row.get("prompt"), list):
        prompt = _list(row, "prompt")
        return _chat([*prompt, *_list(row, "completion")], row, len(prompt))
    return Completion(_string(row, "prompt"), _string(row, "completion"))


def _sharegpt(row: dict[str, Any]) -> Chat:
    messages = [{"role": "system", "content": _string(row, "system")}] if row.get("system") else []
    for i, turn in enumerate(_list(row, "conversations")):
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise _Unfit(f'turn {i} is not "from" one of {", ".join(_SPEAKERS)}')
        weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
        messages.append({"role": _SPEAKERS[speaker], "content": _string(turn, "value"), **weight})
    return _chat(messages, row)


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Tools are a list of schemas; some sets hold it as JSON in a string."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise _Unfit('"tools" is no JSON') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Unfit('"tools" is no list of objects')
    return tuple(_plain(tool, "a tool") for tool in tools)


def _string(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _Unfit(f'no string under "{name}"')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unfit(f'half a character under "{name}"') from None
    return value


def _list(row: dict[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise _Unfit(f'no list under "{name}"')
    return value


def _plain(fields: dict[str, Any], what: str) -> dict[str, Any]:
    """The same, if JSON can hold it: a template sees nothing else."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        level = [
            v for value in level if isinstance(value, dict | list) for v in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise _Unfit(f"{what} is nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise _Unfit(f"{what} holds what JSON cannot, or half a character") from None
    return fields


_READERS: dict[Format, Callable[[dict[str, Any]], str | Chat | Completion]] = {
    "text": _text,
    "messages": _messages,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "prompt-completion": _prompt_completion,
    "question-answer": _question_answer,
}
