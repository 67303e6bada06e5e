"""Formats of a row: plain text, messages, ShareGPT, Alpaca, prompt and completion, question and answer, preferences.

The columns of its first row tell the format of a data set. Whatever the format, a row becomes a conversation or a text.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from penstock.runtime.errors import DataError
from penstock.runtime.units import on_one_line

Message = dict[str, Any]
Row = Mapping[str, Any]
Rollout = tuple[list[int], list[int], float, list[float]]  # prompt, completion, advantage, log-probability of each of its tokens
T = TypeVar("T")
LEAST_STD = 1e-4  # added to that of a group's rewards, as TRL does
MOST_LABELS = 1024
MOST_NUMBER = 1e30  # of a reward or alike
MOST_LOGP = 1e-3  # of a token: what rounding may make of 0
EXAMPLE = '{"text": "..."}'
# Required columns of each format, and an example row; a row with the columns of two formats has the first one.
_FORMATS = {
    "messages": (("messages",), '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'),
    "sharegpt": (("conversations",), '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'),
    "alpaca": (("instruction", "output"), '{"instruction": "...", "input": "...", "output": "..."}'),
    "prompt-completion": (("prompt", "completion"), '{"prompt": "...", "completion": "..."}, or both as lists of messages'),
    "text": (("text",), EXAMPLE),
    "question-answer": (("question", "answer"), '{"question": "...", "answer": "..."}'),
}
PREFERENCE, UNPAIRED, ROLLOUTS, LABELLED = "preference", "unpaired-preference", "rollouts", "labelled"
_PAIR = '{"prompt": "...", "chosen": "...", "rejected": "..."}, or as lists of messages, the prompt left out if both begin with it'
_GROUP = '{"prompt_ids": [1, 2], "completion_ids": [[3], [4, 5]], "logprobs": [[-0.1], [-0.5, -2.0]], "rewards": [0, 1]}'
_ANSWER = '{"prompt": "...", "completion": "...", "label": true}, or prompt and completion as lists of messages'
# Columns of what a loss asks for by itself, and how rows that lack them are refused
NEEDED = {
    PREFERENCE: ("a loss of pairs", ("chosen", "rejected")),
    UNPAIRED: ("KTO", ("prompt", "completion", "label")),
    ROLLOUTS: ("GRPO", ("prompt_ids", "completion_ids", "logprobs")),
    LABELLED: ("a loss of labels", ("text", "label")),
}
_BESIDES = ("input", "system", "history", "tools", "chosen", "rejected", "label", *NEEDED[ROLLOUTS][1], "rewards", "advantages")
COLUMNS = (*(name for needed, _ in _FORMATS.values() for name in needed), *_BESIDES)
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {r: r for r in ("system", "user", "assistant", "tool")}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as chat templates take them: role, content, and what else a message brings."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unlearned: frozenset[int] = frozenset()  # messages that are not learned, whoever says them


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion as plain text; the completion alone is learned."""

    prompt: str
    completion: str


def format_of(row: object, where: str, mapped: Collection[str] = ()) -> str:
    """The format of a data set by the columns of its first row, those that the user `mapped` first; DataError if none fits."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is no object; write it as {EXAMPLE}, {_FORMATS['messages'][1]} or alike")
    tried = ({*row} & {*mapped}, {*row})
    format = next((name for columns in tried for name, (needed, _) in _FORMATS.items() if {*needed} <= columns), None)
    if format is None:
        raise not_understood(where, row)
    return format


def renamed(row: Any, columns: Mapping[str, str]) -> Any:
    """The row with columns renamed to ours: `columns` holds the file's name of each, by which it is not read again; a column whose
    name is taken is left out."""
    if not columns or not isinstance(row, dict):
        return row
    kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return kept | {name: row[theirs] for name, theirs in columns.items() if theirs in row}


@contextmanager
def _of(row: object, where: str, example: str) -> Iterator[Row]:
    """The fields of a row; what a ValueError says of them, a DataError says with the place, an example and the row's columns."""
    try:
        yield row if isinstance(row, dict) else {}
    except ValueError as error:
        columns = f"; its columns are {shown(row)}" if isinstance(row, dict) else ""
        raise DataError(f"{where}: {error}; each row is {example}{columns}") from None


def document(row: object, format: str, where: str) -> Chat | Completion:
    """A row of this format as a conversation or a text; DataError names the place of a row that does not fit."""
    with _of(row, where, _FORMATS[format][1]) as fields:
        return _read(fields, format)


def pair(given: object, where: str) -> tuple[Chat | Completion, Chat | Completion]:
    """The chosen and the rejected half of a row, of which the answers alone are learned; DataError as of `document`."""
    with _of(given, where, _PAIR) as row:
        chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
        kind: Any = str if isinstance(chosen, str) else list
        chosen, rejected = _value(row, "chosen", kind), _value(row, "rejected", kind)
        if (
            kind is str
            and prompt is None
            and (asked := next((name for name in ("question", "instruction") if row.get(name)), None))
        ):
            raise ValueError(f'no "prompt", but "{asked}": name it with --columns prompt={asked}')
        if not isinstance(prompt, kind):  # both have it, or it is told a second time as text
            n = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
            if 0 < n == min(len(chosen), len(rejected)) != max(len(chosen), len(rejected)):
                raise ValueError('one of chosen and rejected begins with the other, which tells no prompt; give it as "prompt"')
            n -= kind is str and chosen[:n].endswith(" ")  # a word's tokens have the space before it
            prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise ValueError("chosen and rejected share no prompt")
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same, which prefers nothing")
        halves = tuple(_half(row, prompt, answer, name) for name, answer in (("chosen", chosen), ("rejected", rejected)))
        return halves[0], halves[1]


def answer(row: object, where: str) -> tuple[Chat | Completion, float]:
    """A row of one answer, and 1 if that is desirable, 0 if not; DataError as of `document`."""
    with _of(row, where, _ANSWER) as fields:
        prompt, label = fields.get("prompt"), fields.get("label")
        label = {"true": True, "false": False}.get(str(label).lower(), label)  # a CSV has words
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise ValueError('an empty "prompt"')
        kind: Any = str if isinstance(prompt, str) else list
        said = _half(fields, _value(fields, "prompt", kind), _value(fields, "completion", kind), "completion")
        if not isinstance(label, int) or label not in (0, 1):
            raise ValueError('a "label" that is neither true nor false')
        return said, float(label)


def labelled(row: object, where: str) -> tuple[Completion, float]:
    """A row of a text, and the number of its label; DataError as of `document`."""
    with _of(row, where, '{"text": "...", "label": 1}') as fields:
        text, label = _value(fields, "text", str), fields.get("label")
        label = int(label) if isinstance(label, str) and label.isdecimal() else label  # a CSV has words
        if not isinstance(label, int) or not 0 <= label < MOST_LABELS:
            raise ValueError('a "label" that is no whole number from 0')
        if not text.strip():
            raise ValueError('an empty "text"')
        return Completion("", text), float(label)


def rollouts(row: object, n_ids: int, where: str) -> list[Rollout]:
    """The completions of a row, a group of them to one prompt, with advantages as GRPO has them where the row has rewards;
    DataError as of `document`."""
    with _of(row, where, f"{_GROUP}, or with advantages") as fields:
        prompt, completions, logps = (_value(fields, name, list) for name in NEEDED[ROLLOUTS][1])
        kind = "rewards" if fields.get("advantages") is None else "advantages"
        numbers = _numbers(_value(fields, kind, list), kind)
        if not len(completions) == len(logps) == len(numbers) > (kind == "rewards"):
            raise ValueError(f'completions, "logprobs" and "{kind}" of other numbers than each other, or a group of too few')
        if kind == "rewards":
            numbers = (numbers - numbers.mean()) / (numbers.std(ddof=1) + LEAST_STD)
        for ids, of_ids in zip(completions, logps, strict=True):
            if not isinstance(ids, list) or not isinstance(of_ids, list) or not len(ids) == len(of_ids) > 0:
                raise ValueError('a completion that is empty, or has not one of "logprobs" for each of its tokens')
            if _numbers(of_ids, "logprobs").max() > MOST_LOGP:
                raise ValueError('"logprobs" above 0')
        for i in [*prompt, *(i for ids in completions for i in ids)]:
            if type(i) is not int or not 0 <= i < n_ids:
                raise ValueError(f"a token {str(i)[:20]}, and the model knows 0 to {n_ids - 1}")
        if not prompt:
            raise ValueError('an empty "prompt_ids"')
        return [(prompt, ids, float(a), of_ids) for ids, a, of_ids in zip(completions, numbers, logps, strict=True)]


def _numbers(found: list[Any], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not all(isinstance(number, int | float) and abs(number) < MOST_NUMBER for number in found):
        raise ValueError(f'"{name}" that are no finite numbers')
    return np.array(found, dtype=np.float64)


def is_of(format: str, columns: object) -> bool:
    """Whether a row has the columns of preferences, or of what else a loss asks for by itself."""
    return isinstance(columns, dict) and set(NEEDED[format][1]) <= columns.keys()


def shown(columns: Iterable[object]) -> str:
    """The names of columns, on one line that is not long."""
    return on_one_line(", ".join(map(str, columns)), 80) or "none"


def not_understood(where: str, columns: Collection[str]) -> DataError:
    """The refusal of a row, or a table, with these columns: what they are, and what is read."""
    if {"chosen", "rejected"} <= set(columns):
        advice = "for the chosen answer alone say --columns messages=chosen, or --columns prompt=prompt --columns completion=chosen"
        return DataError(f"{where}: chosen and rejected are preferences: plan with --loss dpo, or another loss of pairs; {advice}")
    read = " | ".join(", ".join(needed) for needed, _ in _FORMATS.values())
    advice = "name yours with --columns prompt=COLUMN, or in data.columns"
    return DataError(f"{where}: its columns are {shown(columns)}; what is read: {read}; {advice}")


def _read(row: Row, format: str) -> Chat | Completion:
    """A row as a conversation or a text; ValueError says what is wrong with it."""
    n_before = 0  # messages of the prompt
    system = [{"role": "system", "content": _value(row, "system", str)}] if row.get("system") else []
    match format:
        case "text":
            return Completion("", _value(row, "text", str))
        case "prompt-completion" if isinstance(row.get("prompt"), list):
            messages = [*system, *row["prompt"], *_value(row, "completion", list)]
            n_before = len(messages) - len(row["completion"])
        case "prompt-completion":
            if system:
                raise ValueError('"system" besides "prompt", which is all that comes before the completion; put it there')
            return Completion(_value(row, "prompt", str), _value(row, "completion", str))
        case "messages":
            messages = _value(row, "messages", list)
        case "sharegpt":
            messages = [*system, *(_turn(turn, i) for i, turn in enumerate(_value(row, "conversations", list)))]
        case "alpaca":
            more = f"\n{_value(row, 'input', str)}" if row.get("input") else ""
            messages = [*system, *_dialogue(row, _value(row, "instruction", str) + more, _value(row, "output", str))]
        case _:
            messages = [*system, *_dialogue(row, _value(row, "question", str), _value(row, "answer", str))]
    return _chat(messages, row, n_before)


def _half(row: Row, prompt: Any, answer: Any, name: str) -> Chat | Completion:
    if isinstance(answer, str):
        if row.get("system"):
            raise ValueError('"system" besides "prompt", which is all that comes before an answer; put it there')
        said: Chat | Completion = Completion(prompt, answer)
        is_empty = not answer.strip()
    else:
        before = [*([{"role": "system", "content": _value(row, "system", str)}] if row.get("system") else []), *prompt]
        said = _chat([*before, *answer], row, len(before))
        learned = [message for i, message in enumerate(said.messages) if message["role"] == "assistant" and i not in said.unlearned]
        is_empty = not any(message["content"].strip() or message.get("tool_calls") for message in learned)
    if is_empty:
        raise ValueError(f'an empty answer under "{name}"')
    return said


def _dialogue(row: Row, question: str, answer: str) -> Iterator[Message]:
    """Earlier pairs of question and answer, and this one."""
    for pair in [*(_value(row, "history", list) if row.get("history") else ()), (question, answer)]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError('"history" is no list of pairs of question and answer')
        yield from ({"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True))


def _chat(messages: list[Any], row: Row, n_before: int) -> Chat:
    """A conversation; its first `n_before` messages, and those of weight 0, are not learned."""
    found = [_message(message, i) for i, message in enumerate(messages)]
    weights = [message.pop("weight", None) for message in found]  # templates do not see it
    for i, weight in enumerate(weights):
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise ValueError(f'message {i} has a "weight" that is neither 0 nor 1')
        if weight == 1 and found[i]["role"] != "assistant":
            raise ValueError(f'message {i} has "weight" 1 and is not the assistant\'s, whose alone are learned')
    return Chat(tuple(found), _tools(row), frozenset(i for i, weight in enumerate(weights) if i < n_before or weight == 0))


def _turn(turn: Any, i: int) -> Message:
    if not isinstance(turn, dict) or turn.get("from") not in list(_ROLES):
        if isinstance(turn, dict) and turn.get("from") == "function_call":
            raise ValueError(f'turn {i} is a "function_call": write it as "messages", whose assistant has "tool_calls"')
        raise ValueError(f'turn {i} is not "from" one of {", ".join(_ROLES)}; if it has a "role": --columns messages=conversations')
    return {"role": _ROLES[turn["from"]], "content": turn.get("value"), "weight": turn.get("weight")}


def _message(message: object, i: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"message {i} is no object")
    fields = {key: value for key, value in message.items() if value is not None}  # tables fill what a row leaves out
    role, content = fields.pop("role", None), fields.pop("content", "" if "tool_calls" in fields else None)
    if not isinstance(role, str) or not role:
        raise ValueError(f'message {i} has no "role"')
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(map(str, texts)) if [type(text) for text in texts] == [str] * len(content) else None
    if not isinstance(content, str):
        raise ValueError(f'message {i} has no string or list of texts under "content"')
    return {"role": role, "content": content, **fields}


def _tools(row: Row) -> tuple[dict[str, Any], ...] | None:
    """A list of schemas; some sets hold it as JSON in a string."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except (ValueError, RecursionError):
        raise ValueError('"tools" is no JSON') from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('"tools" is no list of objects')
    return tuple(tools) if tools else None


def _value(row: Row, name: str, kind: type[T]) -> T:
    if not isinstance(value := row.get(name), kind):
        raise ValueError(f'no {"string" if kind is str else "list"} under "{name}"')
    return value
