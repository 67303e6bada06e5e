"""How does text become token ids?

By the model's own tokenizer; as UTF-8 bytes where a run asks for that.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, __version__

from runtime.errors import DataError
from runtime.files import read_whole

MAX_TOKENIZER_BYTES = 2**30
MAX_CONFIG_BYTES = 64 * 2**20
MAX_GROWTH = 1024  # of a text by a tokenizer's rules, at worst: ten that put one letter wherever a pattern matches
TRIED = ("", "a", " To be, or\nnot to be?\t12.5 ", "x" * 200, "né Ω 数 🙂")
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
Ids = npt.NDArray[np.int64]


class Encoder(Protocol):
    """Text to token ids and back; `end_id` closes a document."""

    @property
    def end_id(self) -> int: ...

    @property
    def answer_ends(self) -> frozenset[int]:
        """The ids at any of which a model stops."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def identity(self) -> str:
        """Differs where the ids of some text may differ."""
        ...

    def encode(self, text: str) -> Ids:
        """The ids of a document, without the end."""
        ...

    def spans(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """The ids of a text to which nothing is added, and (first, one past the last) character of each."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens; half a character is shown as U+FFFD."""
        ...

    def shown(self, ids: list[int]) -> str:
        """The same with special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ByteEncoder:
    """UTF-8 bytes: ids 0..255, and 256 ends a document."""

    end_id: int = 256
    identity: str = "bytes"

    @property
    def answer_ends(self) -> frozenset[int]:
        return frozenset({self.end_id})

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({self.end_id})

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def spans(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        n_bytes = np.array([len(character.encode()) for character in text], dtype=np.int64)
        starts = np.repeat(np.arange(len(text), dtype=np.int64), n_bytes)
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < self.end_id).decode(errors="replace")

    def shown(self, ids: list[int]) -> str:
        return b"".join(bytes([i]) if i < self.end_id else b"<end>" for i in ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The model's own tokenizer, with the special tokens that it puts around a document."""

    tokenizer: Tokenizer
    end_id: int
    answer_ends: frozenset[int]
    special_ids: frozenset[int]
    identity: str

    def encode(self, text: str) -> Ids:
        with _library("its tokenizer.json cannot encode the text"):
            ids = np.array(self.tokenizer.encode_batch_fast([text])[0].ids, dtype=np.int64)  # a batch lets other threads run
        return ids[:-1] if ids.size and ids[-1] == self.end_id else ids  # the end is added to every document alike

    def spans(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        with _library("its tokenizer.json cannot encode the text"):
            (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.int64), np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: list[int]) -> str:
        with _library("its tokenizer.json cannot decode"):
            return self.tokenizer.decode(ids)

    def shown(self, ids: list[int]) -> str:
        with _library("its tokenizer.json cannot decode"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)


def read_encoder(model_folder: Path | None) -> Encoder:
    """The tokenizer of a model folder, or bytes for no folder; DataError where there is none, or one that cannot be used."""
    if model_folder is None:
        return ByteEncoder()
    file = model_folder / "tokenizer.json"
    if not file.is_file():
        for name in _OTHER_TOKENIZERS:
            if (model_folder / name).exists():
                raise DataError(f"{model_folder}: {name} but no tokenizer.json; write one with `save_pretrained`")
        raise DataError(f"{model_folder}: no tokenizer.json in it; copy the model's to it, or run with --tokenizer bytes")
    try:
        content = read_whole(file, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); make it readable") from None
    with _library(f"{file}: not a tokenizer"), _no_native_words():
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()  # a saved tokenizer may cut and pad what it reads
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            raise DataError(f"{file}: its BPE leaves out merges at random, so a text has no fixed tokens; set `dropout` to null")
        _refuse_growth(tokenizer, file)
        _try(tokenizer)
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    end_id, answer_ends = _ends(model_folder, tokenizer)
    identity = f"tokenizers {__version__} {hashlib.sha256(content).hexdigest()} {end_id} {sorted(answer_ends)}"
    return Pieces(tokenizer, end_id, answer_ends, special, identity)


def _refuse_growth(tokenizer: Tokenizer, file: Path) -> None:
    """DataError where rules each replace a letter by several, one after another: nothing would interrupt them."""
    for part in (tokenizer.normalizer, tokenizer.decoder):
        growth, todo = 1.0, [json.loads(part.__getstate__())] if part is not None else []
        while todo:
            here = todo.pop()
            todo += here if isinstance(here, list) else here.values() if isinstance(here, dict) else []
            if isinstance(here, dict) and here.get("type") == "Replace":
                replaced = here["pattern"].get("String")
                # A regular expression may match where nothing is, between any two letters.
                growth *= max(1.0, len(here["content"]) / len(replaced) if replaced else len(here["content"]) + 1)
        if growth > MAX_GROWTH:
            raise DataError(f"{file}: its rules make a text up to {growth:,.0f} times as long; copy it again from the model")


def _try(tokenizer: Tokenizer) -> None:
    """Some broken files are read, and the library panics at the first text."""
    for text in TRIED:
        with suppress(Exception):  # of a text that it has no token for, which the data may not hold
            tokenizer.decode(tokenizer.encode(text).ids)
            tokenizer.encode(text, add_special_tokens=False)


@contextmanager
def _no_native_words() -> Iterator[None]:
    """The library panics on some broken files, and prints a stack of its own before Python hears of it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def _library(what: str) -> Iterator[None]:
    """The library raises plain `Exception`, and its panics are not even that; all others pass."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what} ({' '.join(str(error).split())[:80]}); copy it again from the model") from None
        raise


def _ends(model_folder: Path, tokenizer: Tokenizer) -> tuple[int, frozenset[int]]:
    """The id that ends a document: what the tokenizer says, else the model's configuration. And all at which a model stops."""
    named = token_text(read_config(model_folder / "tokenizer_config.json").get("eos_token"))
    found: list[object] = [] if named is None else [tokenizer.token_to_id(named)]
    for name in ("config.json", "generation_config.json"):
        listed = read_config(model_folder / name).get("eos_token_id")
        found += listed if isinstance(listed, list) else [listed]
    ids = [i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if not ids:
        raise DataError(f"{model_folder}: no end-of-text token; set eos_token in tokenizer_config.json")
    return ids[0], frozenset(ids)


def token_text(token: object) -> str | None:
    """A token as tokenizer_config.json names it: its text, or an object that holds it."""
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str) and content == content.encode(errors="ignore").decode():  # and no half of a surrogate pair
        return content
    return None


def read_config(file: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(read_whole(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({str(error)[:80]}); copy it again from the model") from None
    if not isinstance(fields, dict):
        raise DataError(f"{file}: not a JSON object; copy it again from the model")
    return fields
