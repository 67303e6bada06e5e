"""Data sets of tests with byte tokens: 0..255, and 256 at the end of each document."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from penstock.data.data import DataRequest, RunData, read_data
from penstock.data.sampling import PackedSet
from penstock.runtime.batch import Batch
from penstock.runtime.errors import DataError
from penstock.settings import DataSettings

END = 256


def read(path: Path, seq_len: int = 64, batch_size: int = 1, seed: int = 0, by_document: bool = False, **fields: object) -> RunData:
    """Read the data of a file or folder; tokens are cached in a folder next to it."""
    settings, cache = DataSettings(str(path), **fields), path.parent / f"run of {path.name}" / "tokens"
    return read_data(DataRequest(settings, None, 300, seq_len, batch_size, seed, cache, by_document))


def refused(path: Path, **fields: object) -> str:
    """Return the error of rejected data, which must be one line."""
    with pytest.raises(DataError) as caught:
        read(path, **fields)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 480, "no part is cut where it is shown"
    return str(caught.value)


def only(data: RunData) -> PackedSet:
    """Return the only data set of map-style data."""
    (part,) = data.parts
    return part


def tokens_of(data: RunData) -> list[list[int]]:
    """Return the tokens of each document."""
    documents = only(data).documents
    return [documents.ids(d).tolist() for d in range(len(documents.lengths))]


def texts_of(data: RunData) -> list[str]:
    """Return the text of each document, without the end token."""
    return [bytes(i for i in ids if i < END).decode() for ids in tokens_of(data)]


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.input_ids, b.input_ids) and torch.equal(a.targets, b.targets) and a.document_tokens == b.document_tokens
