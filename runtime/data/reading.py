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

from runtime.errors import DataError
from runtime.settings import DataSettings

from .chat import ChatFormat, Encoded, Plain, read_chat_format
from .encoders import ByteEncoder, Encoder, read_encoder
from .formats import Chat, Format, document, format_of
from .sources import JSONL, PARQUET, DataSource, find_files

CHARACTERS_AT_ONCE = 2**22  # of rows that are tokenised at a time, which takes a hundred times their size
VERSION = 1  # of what a row becomes; tokens of another version are made again


@dataclass(frozen=True, slots=True)
class Reading:
    """A data set, and how a model reads it."""

    source: DataSource
    n_set_aside: int  # files of text in a set of chats
    format: Format
    encoder: Encoder
    chat_format: ChatFormat
    vocab_size: int

    @property
    def identity(self) -> str:
        """Differs where the tokens of some row may differ."""
        chat_format = "" if self.format == "text" else self.chat_format.identity
        return json.dumps([VERSION, self.format, self.encoder.identity, chat_format])

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

    def _text(self, text: str) -> Encoded:
        """All of a text is learned, and where it ends."""
        ids = self.encoder.encode(text) if text else np.empty(0, np.int64)
        if not len(ids):
            return Encoded(ids, np.empty((0, 2), np.int64))
        return Encoded(np.append(ids, self.encoder.end_id), np.array([[0, len(ids) + 1]]))

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


def read_set(settings: DataSettings, model_folder: Path | None, vocab_size: int, cache: Path) -> Reading:
    """The data set of a run, for a model of `vocab_size` token ids; nothing but its first row is read yet. The folder in which
    `cache` lies is the run's, and no part of it."""
    encoder = read_encoder(model_folder)
    if encoder.end_id >= vocab_size:
        advice = "reading bytes needs 257" if isinstance(encoder, ByteEncoder) else "use the tokenizer of this model"
        raise DataError(f"the end token {encoder.end_id} is outside the model's {vocab_size} token ids; {advice}")
    source = find_files(Path(settings.path), cache)
    format = _format(source) if settings.format == "auto" else settings.format
    n_files = len(source.files)
    if format != "text" and source.files != (source.path,):
        source = replace(source, files=tuple(file for file in source.files if _has_rows(file)))
    chat_format: ChatFormat = Plain(encoder) if format == "text" else read_chat_format(model_folder, encoder)
    return Reading(source, n_files - len(source.files), format, encoder, chat_format, vocab_size)


def _format(source: DataSource) -> Format:
    """By the first row of the first file that has rows."""
    for number, file in enumerate(source.files):
        if _has_rows(file):
            first: Any = next(source.rows(number), None)
            if first is not None:
                return format_of(first[1])
    return "text"


def _has_rows(file: Path) -> bool:
    return file.suffix in JSONL + PARQUET
