"""Tokenizers: from a model's tokenizer.json, or one token per byte.

transformers reads the folder without running code from it: Python classes named in a configuration are ignored.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock.runtime.errors import DataError
from penstock.runtime.files import read_whole
from penstock.settings import read_table

MAX_FILE_BYTES = 2**30  # of a configuration
MAX_TEMPLATE_BYTES = 2**20
PLAIN_TEMPLATE, TEMPLATES = (read_table("data/chat_templates.toml")[name] for name in ("plain", "trl"))


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer, and the end tokens of its model."""

    library: PreTrainedTokenizerFast
    end_id: int  # ends a document
    answer_ends: frozenset[int]  # token ids that end an answer
    has_template: bool  # False: PLAIN_TEMPLATE is used

    @property
    def backend(self) -> Any:
        """The Rust tokenizer of the `tokenizers` library, without the checks of transformers."""
        return self.library.backend_tokenizer

    @property
    def identity(self) -> str:
        """Digest that differs if the ids of any text or conversation can differ."""
        known = [self.library.chat_template, self.library.special_tokens_map, self.end_id, sorted(self.answer_ends)]
        return hashlib.sha256(json.dumps([self.backend.to_str(), *known]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a document without its end token."""
        ids = list(self.backend.encode(text).ids)
        ids = ids[self.n_doubled(ids) :]
        return ids[:-1] if ids[-1:] == [self.end_id] else ids

    def n_doubled(self, ids: Sequence[int]) -> int:
        """Return the number of first tokens to remove from a text that already begins with the tokens put before every text."""
        begin = [i for i in self.backend.encode("").ids if i != self.end_id]
        return len(begin) if begin and list(ids[: 2 * len(begin)]) == 2 * begin else 0

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return text, with special tokens if `special`. Incomplete UTF-8 is shown as U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=not special))


def read_template(name: str) -> tuple[str, bool]:
    """Return a chat template of `TEMPLATES`, or of a file, and True if it is of a user's file. DataError if there is none."""
    path, trl = Path(name), find_spec("trl") if name in TEMPLATES else None
    if name in TEMPLATES and (trl is None or trl.origin is None):
        raise DataError(f"--chat-template {name}: is a template of TRL; pip install trl, or give a file")
    if trl is not None and trl.origin is not None:  # it is read, not imported
        path = Path(trl.origin).parent / "chat_templates" / f"{TEMPLATES[name]}.jinja"
    try:
        return read_whole(path, MAX_TEMPLATE_BYTES).decode("utf-8-sig"), trl is None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        advice = f"give a file, or one of {', '.join(TEMPLATES)}"
        raise DataError(f"--chat-template {name}: {path} cannot be read ({reason}); {advice}") from None


def read_tokenizer(folder: Path | None, template: str | None = None) -> ModelTokenizer:
    """Read the tokenizer of a model folder, or return the byte tokenizer for None. DataError if it is missing or unusable.
    `template`: a chat template instead of the model's, by `read_template`."""
    if folder is None:
        return _bytes()
    if not (folder / "tokenizer.json").is_file():
        advice = "copy the model's to it, write one with `save_pretrained`, or run with --tokenizer bytes"
        raise DataError(f"{folder}: no tokenizer.json in it; {advice}")
    try:
        library = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Any = library.backend_tokenizer
        backend.no_truncation()  # a saved tokenizer may truncate and pad
        backend.no_padding()
        begin = backend.encode("").tokens
    except BaseException as error:
        if not is_tokenizer_error(error):
            raise
        raise DataError(f"{folder}: its tokenizer.json cannot be used ({reason_of(error)}); copy it again from the model") from None
    if getattr(backend.model, "dropout", None):
        raise DataError(f"{folder / 'tokenizer.json'}: its BPE leaves out merges at random; set `dropout` to null")
    ends = _ends(folder, library)
    if template is not None:
        library.chat_template = read_template(template)[0]
    has_template = library.chat_template is not None
    if not has_template:
        library.eos_token = library.convert_ids_to_tokens(ends[0])
        library.chat_template = "".join(token for token in begin if token != library.eos_token) + PLAIN_TEMPLATE
    return ModelTokenizer(library, ends[0], frozenset(ends), has_template)


def _bytes() -> ModelTokenizer:
    """Return a tokenizer of UTF-8 bytes: ids 0..255, and 256 ends a document."""
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    library = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=PLAIN_TEMPLATE)
    return ModelTokenizer(library, 256, frozenset({256}), has_template=False)


def _ends(folder: Path, library: PreTrainedTokenizerFast) -> list[int]:
    """Return the end-of-document id (from the tokenizer, or the model's configuration), followed by all other end tokens."""
    candidates: list[object] = [library.eos_token_id]
    for file in (folder / "config.json", folder / "generation_config.json"):
        try:
            listed = json.loads(read_whole(file, MAX_FILE_BYTES)).get("eos_token_id") if file.is_file() else None
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            raise DataError(f"{file}: no JSON object ({reason_of(error)}); copy it again from the model") from None
        candidates += listed if isinstance(listed, list) else [listed]
    ids = [i for i in candidates if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if not ids:
        raise DataError(f"{folder}: no end-of-text token; set eos_token in tokenizer_config.json")
    return ids


def is_tokenizer_error(error: BaseException) -> bool:
    """Return True for errors of `tokenizers`: any exception, or a Rust panic, which is a BaseException in Python."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error, on one short line."""
    return " ".join(str(error).split())[:120] or type(error).__name__
