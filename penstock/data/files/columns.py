"""By which columns is a row understood?"""

from collections.abc import Collection
from typing import Literal

from runtime.errors import DataError
from runtime.units import on_one_line

Format = Literal["text", "messages", "alpaca", "sharegpt", "prompt-completion", "question-answer"]
EXAMPLE = '{"text": "..."}'
COLUMNS = (
    *("text", "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question", "answer"),
    *("system", "history", "tools"),
)
# Of two that a row has the columns of, the first.
_NEEDED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
    "question-answer": ("question", "answer"),
}
_READ = " | ".join(", ".join(columns) for columns in _NEEDED.values())


def format_by(columns: Collection[str]) -> Format | None:
    """The format that a row with these columns has, if any."""
    return next((format for format, needed in _NEEDED.items() if set(needed) <= set(columns)), None)


def shown(columns: Collection[object]) -> str:
    """The names of columns, on one line that is not long."""
    return on_one_line(", ".join(map(str, columns)), 80) or "none"


def not_understood(where: str, columns: Collection[str]) -> DataError:
    """The refusal of a row, or a table, with these columns: what they are, and what is read."""
    if {"chosen", "rejected"} <= set(columns):
        advice = "for what was chosen alone say --columns messages=chosen, or --columns prompt=prompt --columns completion=chosen"
        return DataError(f"{where}: chosen and rejected are preference data (DPO), which is not trained on here; {advice}")
    return DataError(
        f"{where}: its columns are {shown(columns)}; what is read: {_READ}; "
        "name yours with --columns prompt=COLUMN, or in data.columns"
    )
