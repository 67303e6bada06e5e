"""Where do the tokens of each step come from?

Documents (text files, or the lines of a JSONL file) become token ids, are joined with an end token after each, and cut
into sequences of one length; the last one is padded. Which sequences a step sees is a function of the step's number
alone, so resuming needs nothing but that number.

Targets follow the convention of Hugging Face: position t is supervised with token t + 1 of its own sequence, so a
sequence's last position, like padding, is not supervised.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from .batch import UNSUPERVISED, Batch
from .errors import DataError

# B sequences of a batch, T positions of a sequence
MAX_DOCUMENT_BYTES = 2**30  # a document is tokenised in memory, at a hundred times its size
MAX_CONFIG_BYTES = 64 * 2**20
JSONL = (".jsonl", ".ndjson")
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


class Encoder(Protocol):
    """Text to token ids; `end_id` closes a document."""

    @property
    def end_id(self) -> int: ...

    def encode(self, text: str) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """A model without a tokenizer reads UTF-8 bytes: ids 0..255, and 256 ends a document."""

    end_id: int = 256

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The model's own tokenizer, with the special tokens that it puts around a text."""

    tokenizer: Tokenizer
    end_id: int

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        try:
            ids = np.array(self.tokenizer.encode(text).ids, dtype=np.int64)
        except BaseException as error:
            raise _refused(error, "its tokenizer.json cannot encode the text") from None
        return ids[:-1] if ids.size and ids[-1] == self.end_id else ids  # the packer adds the end itself


@dataclass(frozen=True, slots=True)
class Tokens:
    """Packed token ids, and which of them each step sees."""

    ids: npt.NDArray[np.uint16] | npt.NDArray[np.uint32] = field(repr=False)
    seq_len: int
    batch_size: int
    pad_id: int
    shuffle_seed: int | None = None  # None: in the order of the files, epoch after epoch
    n_documents: int = 0
    n_skipped_files: int = 0  # not UTF-8, or links out of the folder

    @property
    def n_sequences(self) -> int:
        """Sequences of an epoch. A last one of a single token is left out: none of its positions is supervised."""
        whole, rest = divmod(len(self.ids), self.seq_len)
        return whole + (rest > 1)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ids and their packing: tells whether a resumed run sees the data it was started with."""
        packing = f"{self.ids.dtype} {self.seq_len} {self.batch_size} {self.pad_id} {self.shuffle_seed} "
        return hashlib.sha256(packing.encode() + self.ids.data).hexdigest()

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, sequence within it) at which step number `step`, counted from 0, begins."""
        return divmod(step * self.batch_size, self.n_sequences)

    def batch(self, step: int) -> Batch:
        """The sequences of step number `step`, counted from 0; each has at least one supervised position."""
        ids_BT = np.full((self.batch_size, self.seq_len), self.pad_id, dtype=np.int64)
        targets_BT = np.full((self.batch_size, self.seq_len), UNSUPERVISED, dtype=np.int64)
        for b in range(self.batch_size):
            epoch, place = divmod(step * self.batch_size + b, self.n_sequences)
            if self.shuffle_seed is not None:
                place = int(_order(self.n_sequences, self.shuffle_seed, epoch)[place])
            ids_T = self.ids[place * self.seq_len : (place + 1) * self.seq_len]
            ids_BT[b, : len(ids_T)] = ids_T
            targets_BT[b, : len(ids_T) - 1] = ids_T[1:]
        batch = Batch(torch.from_numpy(ids_BT), torch.from_numpy(targets_BT))
        assert batch.n_supervised > 0, "every sequence has at least two tokens"
        return batch


@lru_cache(maxsize=2)  # a batch may span two epochs
def _order(n_sequences: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the sequences in one epoch."""
    # RandomState's stream is frozen across versions of numpy, default_rng's is not; resuming needs the same order.
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).permutation(n_sequences)


def read_tokens(
    data: Path,
    model_folder: Path | None,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    shuffle_seed: int | None = None,
) -> Tokens:
    """The packed tokens of a folder of text files, a JSONL file or a text file, for a model of `vocab_size` token ids.

    `model_folder` is where the tokenizer is looked for; without one, bytes. DataError names the file, and the line
    of a JSONL.
    """
    if seq_len < 2 or batch_size < 1:
        raise DataError(f"--seq-len {seq_len}, --batch-size {batch_size}: at least 2 and 1 are needed")
    if shuffle_seed is not None and not 0 <= shuffle_seed < 2**64:
        raise DataError(f"seed {shuffle_seed}: give one of 0 to 2^64 - 1")
    encoder = read_encoder(model_folder)
    if encoder.end_id >= vocab_size:
        advice = "reading bytes needs 257" if isinstance(encoder, Bytes) else "use the tokenizer of this model"
        raise DataError(f"the end token {encoder.end_id} is outside the model's {vocab_size} token ids; {advice}")
    files, n_skipped = _files(data)
    ids = array("H" if vocab_size <= 2**16 else "I")  # 2 or 4 bytes an id; grows without a second copy of everything
    n_documents = 0
    for file in files:
        try:
            for where, text in _documents(file):
                document = encoder.encode(text) if text else np.empty(0, dtype=np.int64)
                if not document.size:
                    continue
                if int(document.max()) >= vocab_size:
                    raise DataError(
                        f"{where}: token {int(document.max())} is outside the model's {vocab_size} token ids; "
                        "use the tokenizer of this model"
                    )
                ids.frombytes(document.astype(ids.typecode).tobytes())
                ids.append(encoder.end_id)
                n_documents += 1
        except UnicodeDecodeError:
            n_skipped += 1
    if not n_documents:
        skipped = f" ({n_skipped} files left out: not UTF-8, or links out of the folder)" if n_skipped else ""
        raise DataError(f"{data}: no text in it{skipped}; give a folder of text files or a JSONL of {_EXAMPLE}")
    packed = np.frombuffer(ids, dtype=np.uint16) if ids.typecode == "H" else np.frombuffer(ids, dtype=np.uint32)
    return Tokens(packed, seq_len, batch_size, encoder.end_id, shuffle_seed, n_documents, n_skipped)


_EXAMPLE = '{"text": "..."}'


def _files(data: Path) -> tuple[list[Path], int]:
    """The files to read, in order of their paths, and how many were left out because they lie elsewhere."""
    try:
        root = data.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        raise DataError(f"{data}: not found; give a folder of text files or a JSONL of {_EXAMPLE}") from None
    if root.is_file():
        if root.suffix == ".json":
            raise DataError(f"{data}: one object a line is needed; name it .jsonl if it is that")
        return [data], 0
    if not root.is_dir():
        raise DataError(f"{data}: neither a file nor a folder; give a folder of text files or a JSONL of {_EXAMPLE}")
    found: list[Path] = []
    n_outside = 0
    for folder, folders, names in os.walk(data, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            target = Path(os.path.realpath(path))  # a circle of links is no file and no error
            if not target.is_relative_to(root):
                n_outside += 1
            elif target.is_file():  # no sockets, pipes or broken links
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(data).parts), n_outside


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable")


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of each document in a file; UnicodeDecodeError for a file that is no text."""
    try:
        if file.suffix in JSONL:
            yield from _lines(file)
        elif file.stat().st_size > MAX_DOCUMENT_BYTES:
            raise DataError(f"{file}: a document above {MAX_DOCUMENT_BYTES} bytes; split it, or make it a JSONL")
        else:
            yield str(file), file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); make it readable") from None


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of each line of a JSONL file."""
    with file.open("rb") as stream:
        n = 0
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            n += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{file}:{n}: a line above {MAX_DOCUMENT_BYTES} bytes; split the document")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row.get("text") if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise DataError(f'{file}:{n}: no string under "text"; each line is {_EXAMPLE}')
                text.encode()
            except DataError:
                raise
            except (ValueError, RecursionError) as error:  # also half a surrogate pair, and numbers without end
                raise DataError(f"{file}:{n}: {str(error)[:80]}; each line is {_EXAMPLE} in UTF-8") from None
            yield f"{file}:{n}", text


def read_encoder(model_folder: Path | None) -> Encoder:
    """The tokenizer of a model folder, or bytes where there is none; DataError for one that cannot be used."""
    if model_folder is None:
        return Bytes()
    file = model_folder / "tokenizer.json"
    if not file.is_file():
        for name in _OTHER_TOKENIZERS:
            if (model_folder / name).exists():
                raise DataError(f"{model_folder}: {name} but no tokenizer.json; write one with `save_pretrained`")
        return Bytes()
    try:
        with _no_native_words():
            tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        raise _refused(error, f"{file}: not a tokenizer") from None
    tokenizer.no_truncation()  # a saved tokenizer may cut and pad what it reads
    tokenizer.no_padding()
    return Pieces(tokenizer, _end_id(model_folder, tokenizer))


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


def _refused(error: BaseException, what: str) -> BaseException:
    """The library raises plain `Exception`, and its panics are not even that; all others pass."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return DataError(f"{what} ({str(error)[:80]}); copy it again from the model")
    return error


def _end_id(model_folder: Path, tokenizer: Tokenizer) -> int:
    """The id that ends a document: what the tokenizer says, else the model's configuration."""
    named = _json(model_folder / "tokenizer_config.json").get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named
    found: object = tokenizer.token_to_id(content) if isinstance(content, str) else None
    for name in ("config.json", "generation_config.json"):
        if found is None:
            found = _json(model_folder / name).get("eos_token_id")
            found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise DataError(f"{model_folder}: no end-of-text token; set eos_token in tokenizer_config.json")
    return found


def _json(file: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise DataError(f"{file}: larger than any configuration; copy it again from the model")
        fields = json.loads(file.read_bytes())
    except DataError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({str(error)[:80]}); copy it again from the model") from None
    if not isinstance(fields, dict):
        raise DataError(f"{file}: not a JSON object; copy it again from the model")
    return fields
