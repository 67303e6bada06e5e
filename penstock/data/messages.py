"""Conversations: validated messages of a row, and the messages that are excluded from learning."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .images import placed_images, text_in

Message = dict[str, Any]
Row = Mapping[str, Any]
T = TypeVar("T")
FLAGS = ("weight", "loss", "train", "training", "trainable", "loss_mask")  # 0 or 1: is this message learned, in several trainers
_DETAILS = ("train_detail", "training_detail")  # learned parts of a message
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {r: r for r in ("system", "user", "assistant", "tool")}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in the layout of chat templates: role, content, and optional fields."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unlearned: frozenset[int] = frozenset()  # indices of messages to exclude from learning
    images: tuple[Any, ...] = ()  # in the order of their parts {"type": "image"}


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion as plain text. Only the completion is learned."""

    prompt: str
    completion: str


def prompted(row: Row, prompt: Any, answer: Any) -> Chat | Completion:
    """Return a prompt and its answer, texts or lists of messages. Only the answer is learned."""
    if isinstance(answer, list):
        return chat_of([*prompt, *answer], row, len(prompt))
    if row.get("system"):
        raise ValueError('"system" next to a text "prompt"; put it at the start of the prompt')
    return Completion(prompt, answer)


def answered(row: Row, prompt: Any, answer: Any, name: str) -> Chat | Completion:
    """Return a prompt and its answer from column `name`. ValueError if nothing is learned."""
    match item := prompted(row, prompt, answer):
        case Completion():
            is_empty = not item.completion.strip()
        case Chat():
            messages = [m for i, m in enumerate(item.messages) if m["role"] == "assistant" and i not in item.unlearned]
            is_empty = not any(text_in(message["content"]).strip() or message.get("tool_calls") for message in messages)
    if is_empty:
        raise ValueError(f'an empty answer under "{name}"')
    return item


def dialogue(row: Row, question: str, answer: str) -> list[Message]:
    """Return messages for the pairs of question and answer in "history", and for this pair."""
    pairs = [*(value_of(row, "history", list) if row.get("history") else ()), (question, answer)]
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError('"history" is no list of pairs of question and answer')
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def instruction(row: Row) -> str:
    """Return the instruction of a row, with its input."""
    return value_of(row, "instruction", str) + (f"\n{value_of(row, 'input', str)}" if row.get("input") else "")


def chat_of(messages: list[Any], row: Row, n_before: int = 0) -> Chat:
    """Return a conversation that begins with the row's "system". Its first `n_before` messages and flagged ones are not learned."""
    messages, images = placed_images(messages, row)
    parsed = [_message(message, i) for i, message in enumerate(messages)]
    learned = [_is_learned(message, i) for i, message in enumerate(parsed)]  # flags are not passed to templates
    if row.get("system"):
        system: Message = {"role": "system", "content": value_of(row, "system", str)}
        if parsed[:1] != [system]:
            if any(message["role"] == "system" for message in parsed):
                raise ValueError('a "system" column and another system message; join them, or leave one out')
            parsed, learned, n_before = [system, *parsed], [None, *learned], n_before + bool(n_before)
    unlearned = frozenset(i for i, flag in enumerate(learned) if i < n_before or flag is False)
    return Chat(tuple(parsed), _tools(row), unlearned, images)


def _is_learned(message: Message, i: int) -> bool | None:
    """Remove the flags of a message and return their value, None without flags. ValueError if it cannot be obeyed."""
    flags = {name: message.pop(name) for name in FLAGS if name in message}
    if detail := next((name for name in _DETAILS if message.get(name)), None):
        raise ValueError(f'message {i} has "{detail}": parts of a message cannot be chosen; split it, or leave that out')
    for name, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f'message {i} has a "{name}" that is neither 0 nor 1')
        if value != next(iter(flags.values())):
            raise ValueError(f"message {i} has {' and '.join(flags)} that contradict each other")
        if value and message["role"] != "assistant":
            raise ValueError(f'message {i} has "{name}" {value} and is not the assistant\'s; only those are learned')
    return bool(next(iter(flags.values()))) if flags else None


def turn_of(turn: Any, i: int) -> Message:
    """Return a turn of ShareGPT as a message."""
    if not isinstance(turn, dict) or turn.get("from") not in list(_ROLES):
        if isinstance(turn, dict) and turn.get("from") == "function_call":
            raise ValueError(f'turn {i} is a "function_call": write it as "messages" with "tool_calls" of the assistant')
        raise ValueError(f'turn {i} is not "from" one of {", ".join(_ROLES)}; if it has a "role": --columns messages=conversations')
    further = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**further, "role": _ROLES[turn["from"]], "content": turn.get("value")}


def _message(message: object, i: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"message {i} is no object")
    fields = {key: value for key, value in message.items() if value is not None}  # tables fill absent fields with None
    role, content = fields.pop("role", None), fields.pop("content", "" if "tool_calls" in fields else None)
    if not isinstance(role, str) or not role:
        raise ValueError(f'message {i} has no "role"')
    if isinstance(content, list):
        n_images = sum(part == {"type": "image"} for part in content)
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        is_whole = [type(text) for text in texts] == [str] * (len(content) - n_images)
        content = None if not is_whole else content if n_images else "".join(map(str, texts))
    if not isinstance(content, str | list):
        raise ValueError(f'message {i} has no string or list of texts and images under "content"')
    return {"role": role, "content": content, **fields}


def _tools(row: Row) -> tuple[dict[str, Any], ...] | None:
    """Return a list of tool schemas. Some data sets store it as a JSON string."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except (ValueError, RecursionError):
        raise ValueError('"tools" is no JSON') from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('"tools" is no list of objects')
    return tuple(tools) if tools else None


def value_of(row: Row, name: str, kind: type[T]) -> T:
    """Return a column of this type. ValueError for another type."""
    if not isinstance(value := row.get(name), kind):
        raise ValueError(f'no {"string" if kind is str else "list"} under "{name}"')
    return value
