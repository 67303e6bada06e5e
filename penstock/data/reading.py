"""Which tokens does each row of a data set become?"""

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.files.columns import COLUMNS, Format, shown
from penstock.data.files.sources import DataSource, find_files, has_rows
from penstock.data.files.splits import TRAIN
from penstock.settings import DataSettings
from runtime.errors import DataError

from .chat import ChatFormat, Encoded, Plain, read_chat_format
from .encoders import ByteEncoder, Encoder, Ids, read_encoder
from .formats import Chat, Completion, document, format_of

CHARACTERS_AT_ONCE = 2**22  # of rows that are tokenised at a time, which takes a hundred times their size
VERSION = 2  # of what a row becomes; tokens of another version are made again


@dataclass(frozen=True, slots=True)
class Reading:
    """A data set, and how a model reads it."""

    source: DataSource
    n_set_aside: int  # files of text in a set of chats
    format: Format
    encoder: Encoder
    chat_format: ChatFormat
    vocab_size: int
    is_text: bool  # texts as they are, not conversations

    @property
    def identity(self) -> str:
        """Differs where the tokens of some row may differ."""
        chat_format = "" if self.format == "text" else self.chat_format.identity
        columns = [sorted(self.source.columns.items())] if self.source.columns else []
        return json.dumps([VERSION, self.format, self.encoder.identity, chat_format, *columns])

    @property
    def wide(self) -> bool:
        """Whether a token id needs more than two bytes."""
        return self.vocab_size > 2**16

    def rows(self, left_out: list[int]) -> Iterator[tuple[int, int, Encoded]]:
        """(file, row, tokens) of each document of the set, in order; the numbers of files that are no text go to `left_out`."""
        waiting = deque[tuple[int, int, int, Future[list[Encoded]]]]()  # and the characters of each
        rows, failed = self._values(left_out), None
        pool = ThreadPoolExecutor(n_threads := len(os.sched_getaffinity(0)))
        try:
            while True:
                try:
                    number, row, value = next(rows)
                except StopIteration:
                    break
                except DataError as error:
                    failed = error  # once what comes before it has been looked at
                    break
                n = n_characters(value)
                while len(waiting) >= 4 * n_threads or (waiting and n + sum(size for *_, size, _ in waiting) > CHARACTERS_AT_ONCE):
                    yield from _first(waiting)
                waiting.append((number, row, n, pool.submit(self.encode, value, self.source.where(number, row))))
            while waiting:
                yield from _first(waiting)
        finally:
            pool.shutdown(cancel_futures=True)
        if failed is not None:
            raise failed

    def _values(self, left_out: list[int]) -> Iterator[tuple[int, int, Any]]:
        for number in range(len(self.source.files)):
            for row, value in self.source.rows(number):
                if value is None:
                    left_out.append(number)
                else:
                    yield number, row, value

    def encode(self, value: object, where: str) -> list[Encoded]:
        """The documents that a row becomes, at least one; DataError for one that does not fit the format, or the model."""
        content = document(value, self.format, where)
        encoded = self.chat_format.encode(content, where) if isinstance(content, Chat) else [self._text(content)]
        largest = max(int(one.ids.max(initial=0)) for one in encoded)
        if largest >= self.vocab_size:
            raise DataError(
                f"{where}: token {largest} is outside the model's {self.vocab_size} token ids; use the tokenizer of this model"
            )
        return encoded

    def _text(self, said: str | Completion) -> Encoded:
        """All of a text is learned, and where it ends; after a prompt, what begins behind it."""
        text, n_before = (said, 0) if isinstance(said, str) else (said.prompt + said.completion, len(said.prompt))
        ids = self.encoder.encode(text) if text else np.empty(0, np.int64)
        if not len(ids):
            return Encoded(ids, np.empty((0, 2), np.int64))
        first = self._first_token(ids, text, n_before) if n_before else 0
        return Encoded(np.append(ids, self.encoder.end_id), np.array([[first, len(ids) + 1]]))

    def _first_token(self, ids: Ids, text: str, character: int) -> int:
        """The first token that holds something of the text from that character on."""
        plain, ends = self.encoder.spans(text)
        # Tokens that begin a document; an end that the text itself holds is not among `ids`.
        n_special = next((n for n in range(len(ids)) if np.array_equal(ids[n : n + len(plain)], plain[: len(ids) - n])), 0)
        return n_special + int((ends[:, 1] <= character).sum())

    def close(self) -> None:
        self.chat_format.close()


def _first(waiting: deque[tuple[int, int, int, Future[list[Encoded]]]]) -> Iterator[tuple[int, int, Encoded]]:
    number, row, _, encoded = waiting.popleft()
    for one in encoded.result():
        yield number, row, one


def n_characters(row: object) -> int:
    """Characters in a row, to know what it costs to have several at hand."""
    n, values = 0, [row]
    while values:
        value = values.pop()
        if isinstance(value, str):
            n += len(value)
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return n


def read_set(
    settings: DataSettings, model_folder: Path | None, vocab_size: int, cache: Path, preferred: tuple[str, ...] = TRAIN
) -> Reading:
    """The data set of a run, for a model of `vocab_size` token ids; nothing but its first row is read yet. The folder in which
    `cache` lies is the run's, and no part of it. `preferred`: which splits, where the settings name none."""
    encoder = read_encoder(model_folder)
    if encoder.end_id >= vocab_size:
        advice = "reading bytes needs 257" if isinstance(encoder, ByteEncoder) else "use the tokenizer of this model"
        raise DataError(f"the end token {encoder.end_id} is outside the model's {vocab_size} token ids; {advice}")
    columns = settings.columns or {}
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise DataError(f"--columns {unknown[0][:40]}=...: no such column; there are {', '.join(COLUMNS)}")
    source = replace(find_files(Path(settings.path or ""), cache, settings.split, preferred), columns=columns)
    format, first = _format(source, settings.format)
    is_text = format == "text" or (
        isinstance(first, dict) and isinstance(first.get("prompt"), str) and format == "prompt-completion"
    )
    n_files = len(source.files)
    if format != "text" and source.files != (source.path,):
        source = replace(source, files=tuple(file for file in source.files if has_rows(file)))
    chat_format: ChatFormat = Plain(encoder) if format == "text" else read_chat_format(model_folder, encoder)
    return Reading(source, n_files - len(source.files), format, encoder, chat_format, vocab_size, is_text)


def _format(source: DataSource, asked: str) -> tuple[Format, object]:
    """By the first row of the first file that has rows, and that row. DataError where it lacks what the user says is there."""
    for number, file in enumerate(source.files):
        first: Any = next(source.rows(number), None) if has_rows(file) else None
        if first is not None:
            where, row = source.where(number, first[0]), first[1]
            gone = [theirs for theirs in source.columns.values() if not isinstance(row, dict) or theirs not in row]
            if gone:
                columns = shown(row) if isinstance(row, dict) else "none"
                raise DataError(f"{where}: no column {gone[0][:40]!r}, which --columns names; its columns are {columns}")
            return format_of(row, where, source.columns) if asked == "auto" else asked, row  # type: ignore[return-value]
    return "text" if asked == "auto" else asked, None  # type: ignore[return-value]
