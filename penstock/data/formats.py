"""Row formats: plain text, messages, ShareGPT, Alpaca, prompt and completion, question and answer, preferences.

The columns of the first row select the format of a data set. Rows of any format are converted to a conversation or a text.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import ADVANTAGE, LABEL, OLD, LossInput, Objective
from penstock.runtime.units import on_one_line
from penstock.settings import read_table

from .images import COLUMNS as IMAGES
from .messages import Chat, Completion, Row, answered, chat_of, dialogue, instruction, prompted, turn_of, value_of

Rollout = tuple[list[int], list[int], float, list[float]]  # prompt, completion, advantage, log-probability of each completion token
LEAST_STD = 1e-4  # added to the standard deviation of a group's rewards, like TRL
MOST_LABELS = 1024
MOST_NUMBER = 1e30  # of a reward, advantage or log-probability
MOST_LOGP = 1e-3  # of a token: rounding error of a log-probability of 0
EXAMPLE = '{"text": "..."}'
PREFERENCE, UNPAIRED, ROLLOUTS, LABELLED = "preference", "unpaired-preference", "rollouts", "labelled"
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """An entry of formats.toml. `inputs`: loss inputs that the numbers of a row become."""

    columns: Sequence[str]
    example: str
    also: Sequence[str] = ()
    loss: str | None = None
    unit: str | None = None
    inputs: tuple[LossInput, ...] = ()


_INPUTS = {UNPAIRED: (LABEL,), ROLLOUTS: (ADVANTAGE, OLD), LABELLED: (LABEL,)}
_FORMATS = {name: RowFormat(**entry, inputs=_INPUTS.get(name, ())) for name, entry in read_table("data/formats.toml").items()}
NEEDED = {name: format for name, format in _FORMATS.items() if format.loss is not None}  # required by a loss
_BY_COLUMNS = {name: format for name, format in _FORMATS.items() if format.loss is None}
_TOKENS_LAST = [*(format for name, format in _FORMATS.items() if name != TOKENS), _FORMATS[TOKENS]]
_READ = [name for format in _TOKENS_LAST for name in (*format.columns, *format.also)]
COLUMNS = (*dict.fromkeys(["messages", "system", "tools", *IMAGES, *_READ]),)


def required_format(objective: Objective) -> str | None:
    """Return the row format that a loss requires, or None if it trains on any text or chat."""
    inputs = {*objective.inputs}
    return next((name for name, needed in NEEDED.items() if needed.unit == objective.of and {*needed.inputs} <= inputs), None)


def row_format(
    requested: str,
    first: tuple[str, Any] | None,
    others: Iterator[tuple[str, Any]],
    columns: Mapping[str, str],
    objective: Objective | None,
) -> tuple[str, bool]:
    """Return the row format of a data set, and True if its rows are texts, no conversations. DataError if `requested`, the loss and
    the columns of the rows contradict each other.

    `first`, `others`: (place, first row) of each file, before columns are renamed; `columns`: our name -> name in the file.
    """
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise DataError(f"--columns {unknown[0][:40]}=...: no such column; choose from {', '.join(COLUMNS)}")
    if doubled := [name for name, n in Counter(columns.values()).items() if n > 1]:
        raise DataError(f"--columns ...={doubled[0][:40]}: the column would be read twice; name it once")
    where, first_row = first or ("", None)
    fields = first_row if isinstance(first_row, dict) else {}
    if where and (gone := [name for name in columns.values() if name not in fields]):
        raise DataError(f"{where}: no column {gone[0][:40]!r}, which --columns names; its columns are {shown(fields)}")
    row, format, required = renamed(first_row, columns), requested, None
    if objective is not None:
        required = required_format(objective)
    elif format in NEEDED:
        required = format
    elif format == "auto":
        required = next((name for name in (PREFERENCE, ROLLOUTS) if is_of(name, row)), None)
    if required is not None:
        format = required
        _refuse_other_columns(required, requested, [(where, first_row), *others], columns)
    elif format == PREFERENCE:
        raise not_understood(where, {"chosen", "rejected"})
    elif format in NEEDED:
        raise DataError(f"--format {format}: rows of {NEEDED[format].loss}; plan with --loss for that, or leave it out")
    elif format == "auto":
        format = format_of(row, where, columns) if where else "text"
        for place, other_row in others:
            if (other_format := format_of(renamed(other_row, columns), place, columns)) != format:
                advice = "give files of different columns each a --data of its own, or say --format"
                raise DataError(f"{place}: columns of {other_format}, and those of {where} are of {format}; {advice}")
    if format in ("prompt-completion", UNPAIRED, PREFERENCE):
        text = row.get("chosen" if format == PREFERENCE else "prompt") if isinstance(row, dict) else None
        return format, isinstance(text, str) and not (format == PREFERENCE and _asks(row))
    return format, format in ("text", TOKENS, ROLLOUTS, LABELLED)


def _refuse_other_columns(format: str, requested: str, firsts: Iterable[tuple[str, Any]], columns: Mapping[str, str]) -> None:
    """Raise DataError if a file or --format has another format than the loss requires."""
    needed = NEEDED[format]
    names = " and ".join(needed.columns)
    if requested not in ("auto", format):
        raise DataError(f"--format {requested}: the plan's loss is of {format} rows, with {names}; leave it out")
    for where, row in firsts:
        if not is_of(format, fields := renamed(row, columns)):
            listed = shown(fields) if isinstance(fields, dict) else "none"
            advice = f"name yours with --columns {needed.columns[0]}=COLUMN, or choose another --loss or --format"
            raise DataError(f"{where or 'the data'}: its columns are {listed}, and {needed.loss} needs {names}; {advice}")


def format_of(row: object, where: str, mapped: Collection[str] = ()) -> str:
    """Return the format that matches the columns of the first row. `mapped` columns have priority. DataError if none matches."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is no object; write it as {EXAMPLE}, {_FORMATS['messages'].example} or alike")
    tried = ({*row} & {*mapped}, {*row})
    format = next((name for columns in tried for name, needed in _BY_COLUMNS.items() if {*needed.columns} <= columns), None)
    if format is None:
        raise not_understood(where, row)
    return format


def renamed(row: Any, columns: Mapping[str, str]) -> Any:
    """Rename columns to our names. `columns`: our name -> name in the file. A file's column that already has such a name is
    dropped, and a renamed column is not read again under its old name."""
    if not columns or not isinstance(row, dict):
        return row
    fields = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return fields | {name: row[column] for name, column in columns.items() if column in row}


@contextmanager
def _fields_of(row: object, format: str, where: str) -> Iterator[Row]:
    """Yield the fields of a row. Convert a ValueError to a DataError with the place, an example and the row's columns."""
    try:
        yield row if isinstance(row, dict) else {}
    except ValueError as error:
        columns = f"; its columns are {shown(row)}" if isinstance(row, dict) else ""
        raise DataError(f"{where}: {error}; each row is {_FORMATS[format].example}{columns}") from None


def read_row(row: object, format: str, where: str) -> list[tuple[Chat | Completion, tuple[float, ...]]]:
    """Convert a row to conversations or texts, each with the numbers for its loss. DataError names the place of an invalid row."""
    with _fields_of(row, format, where) as fields:
        match format:
            case "preference":
                return [(half, ()) for half in _pair(fields)]
            case "unpaired-preference":
                return [_labelled_answer(fields)]
            case "labelled":
                return [_labelled_text(fields)]
        return [(_read(fields, format), ())]


def _pair(row: Row) -> tuple[Chat | Completion, Chat | Completion]:
    """Return the chosen and the rejected half of a row. Only the answers are learned."""
    chosen = row.get("chosen")
    prompt: Any = row.get("prompt")
    kind: Any = str if isinstance(chosen, str) else list
    chosen, rejected = value_of(row, "chosen", kind), value_of(row, "rejected", kind)
    if kind is str and _asks(row):  # like Orca: a conversation
        question = value_of(row, "question", str) if "question" in row else instruction(row)
        if not question.strip():
            raise ValueError("an empty question")
        conversation: Any = dialogue(row, question, "")[:-1]
        prompt, kind = conversation, list
        chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in (chosen, rejected))
    if not isinstance(prompt, kind):  # the prompt is inside both, or repeated as text
        n = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
        if 0 < n == min(len(chosen), len(rejected)) != max(len(chosen), len(rejected)):
            raise ValueError('one of chosen and rejected begins with the other, so the prompt is unknown; give it as "prompt"')
        n -= isinstance(chosen, str) and chosen[:n].endswith(" ")  # tokenizers attach a space to the next word
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise ValueError("chosen and rejected share no prompt")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same, which prefers nothing")
    return answered(row, prompt, chosen, "chosen"), answered(row, prompt, rejected, "rejected")


def _asks(row: Row) -> bool:
    """True if the prompt of a pair is a question or an instruction, not text that precedes the answers."""
    return row.get("prompt") is None and ("question" in row or "instruction" in row)


def _labelled_answer(row: Row) -> tuple[Chat | Completion, tuple[float]]:
    """Return an answer and its label: 1 if desirable, 0 if not."""
    prompt, label = row.get("prompt"), row.get("label")
    label = {"true": True, "false": False}.get(str(label).lower(), label)  # a CSV has strings
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise ValueError('an empty "prompt"')
    kind: Any = str if isinstance(prompt, str) else list
    content = answered(row, value_of(row, "prompt", kind), value_of(row, "completion", kind), "completion")
    if not isinstance(label, int) or label not in (0, 1):
        raise ValueError('a "label" that is neither true nor false')
    return content, (float(label),)


def _labelled_text(row: Row) -> tuple[Completion, tuple[float]]:
    text, label = value_of(row, "text", str), row.get("label")
    label = int(label) if isinstance(label, str) and label.isdecimal() else label  # a CSV has strings
    if not isinstance(label, int) or not 0 <= label < MOST_LABELS:
        raise ValueError('a "label" that is no whole number from 0')
    if not text.strip():
        raise ValueError('an empty "text"')
    return Completion("", text), (float(label),)


def rollouts(row: object, n_ids: int, where: str) -> list[Rollout]:
    """Return the completions of a row, a group for one prompt, with rewards as GRPO advantages. DataError for an invalid row."""
    with _fields_of(row, ROLLOUTS, where) as fields:
        prompt, completions, logps = (value_of(fields, name, list) for name in NEEDED[ROLLOUTS].columns)
        kind = "rewards" if fields.get("advantages") is None else "advantages"
        numbers = _numbers(value_of(fields, kind, list), kind)
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
            _refuse_unknown(i, n_ids)
        if not prompt:
            raise ValueError('an empty "prompt_ids"')
        return [(prompt, ids, float(a), of_ids) for ids, a, of_ids in zip(completions, numbers, logps, strict=True)]


def learned_tokens(row: object, n_ids: int, where: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a pre-tokenised row without its padding, and the learned runs (first, one past the last): all, or
    where `labels` are not -100. DataError for an invalid row."""
    with _fields_of(row, TOKENS, where) as fields:
        ids = value_of(fields, "input_ids", list)
        mask, labels = (ids if fields.get(name) is None else value_of(fields, name, list) for name in ("attention_mask", "labels"))
        if not len(ids) == len(mask) == len(labels):
            raise ValueError('"input_ids", "labels" and "attention_mask" of different lengths')
        n = len(ids) if mask is ids else sum(map(bool, mask))
        if mask is not ids and not all(mask[:n]):
            raise ValueError('an "attention_mask" with 0 before a token; pad on the right')
        for i in ids[:n]:
            _refuse_unknown(i, n_ids)
        learned = [label != UNSUPERVISED for label in labels[:n]]
        if (odd := next((i for i in range(n) if learned[i] and labels[i] != ids[i]), None)) is not None:
            raise ValueError(f'"labels" {labels[odd]} and "input_ids" {ids[odd]} at {odd}; a label is -100 or the token itself')
        edges = np.flatnonzero(np.diff(np.array([False, *learned, False]).astype(np.int8))).tolist()
        return ids[:n], list(zip(edges[::2], edges[1::2], strict=True))


def _refuse_unknown(i: object, n_ids: int) -> None:
    if type(i) is not int or not 0 <= i < n_ids:
        raise ValueError(f"a token {str(i)[:20]}; the model has ids 0 to {n_ids - 1}")


def _numbers(values: list[Any], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not all(isinstance(number, int | float) and abs(number) < MOST_NUMBER for number in values):
        raise ValueError(f'"{name}" that are no finite numbers')
    return np.array(values, dtype=np.float64)


def unread(columns: object, format: str, is_text: bool) -> list[str]:
    """Return the columns of a row, after renaming, that this format does not read."""
    read = {*_FORMATS[format].columns, *_FORMATS[format].also, *(() if is_text else ("system", "tools", *IMAGES))}
    return [str(name) for name in columns if name not in read] if isinstance(columns, dict) else []


def is_of(format: str, columns: object) -> bool:
    """Return True if a row has the columns of this format."""
    return isinstance(columns, dict) and set(NEEDED[format].columns) <= columns.keys()


def shown(columns: Iterable[object]) -> str:
    """Return column names on one short line."""
    return on_one_line(", ".join(map(str, columns)), 80) or "none"


def not_understood(where: str, columns: Collection[str]) -> DataError:
    """Return the error for a row or table with unknown columns. It lists the columns and the supported formats."""
    if {"chosen", "rejected"} <= set(columns):
        advice = "for the chosen answer alone say --columns messages=chosen, or --columns prompt=prompt --columns completion=chosen"
        return DataError(f"{where}: chosen and rejected are preferences: plan with --loss dpo, or another loss of pairs; {advice}")
    tokens, *others = [", ".join(format.columns) for format in _BY_COLUMNS.values()]
    read = " | ".join([*others, tokens])
    advice = "name yours with --columns prompt=COLUMN, or in data.columns"
    return DataError(f"{where}: its columns are {shown(columns)}; supported: {read}; {advice}")


def _read(row: Row, format: str) -> Chat | Completion:
    """Convert a row to a conversation or a text. ValueError if it is invalid."""
    match format:
        case "text":
            return Completion("", value_of(row, "text", str))
        case "prompt-completion":
            kind: Any = list if isinstance(row.get("prompt"), list) else str
            return prompted(row, value_of(row, "prompt", kind), value_of(row, "completion", kind))
        case "messages":
            messages = value_of(row, "messages", list)
        case "sharegpt":
            messages = [turn_of(turn, i) for i, turn in enumerate(value_of(row, "conversations", list))]
        case "alpaca":
            messages = dialogue(row, instruction(row), value_of(row, "output", str))
        case _:
            messages = dialogue(row, value_of(row, "question", str), value_of(row, "answer", str))
    return chat_of(messages, row)
