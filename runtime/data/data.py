"""Where do the batches of a run come from?

From the rows of a data set, through the model's own tokenizer and chat template, as sequences that are packed and ordered as the
user chose. Tokens are made before training and kept in a cache, or made as they are needed; either way a step's batch depends on
nothing but the data, the settings, the seed and the number of the step.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.batch import Batch
from runtime.errors import DataError
from runtime.settings import DataSettings

from .map_style import BatchShape, MapStyleData, fingerprint_of, in_words, order_of
from .packing import Counts, Packing, pack
from .prefetch import Prefetched
from .reading import Reading, read_set
from .sources import EXAMPLE
from .streamed import StreamedData, streamed
from .token_cache import cached_tokens

_PACKED = {
    "joined": "joined and cut into sequences of {} tokens; attention sees across",
    "documents": "packed whole into sequences of {} tokens; each attends to itself alone",
    "one": "a sequence of {} tokens each, padded",
}


class Data(Protocol):
    """The batches of a run, by the number of the step."""

    @property
    def fingerprint(self) -> str:
        """Tells whether a resumed run sees the data it was started with."""
        ...

    @property
    def n_steps(self) -> int | None:
        """Steps of one epoch, the last of which may begin the next; None where that is known only at its end."""
        ...

    @property
    def n_sequences(self) -> int | None:
        """Sequences of one epoch; None where that is known only at its end."""
        ...

    def batch(self, step: int) -> Batch:
        """What step number `step`, counted from 0, trains on."""
        ...

    def position(self, step: int) -> dict[str, Any]:
        """Where that step begins, as JSON can hold it."""
        ...

    def resume(self, step: int, position: dict[str, Any]) -> None:
        """Go on at that step; CheckpointError for a position that this data does not have."""
        ...

    def words(self) -> str:
        """What was read and how sequences are made of it, in one line."""
        ...

    def close(self) -> None: ...


def read_data(
    settings: DataSettings,
    model_folder: Path | None,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    cache: Path,
    by_document: bool = False,
) -> Data:
    """The training data that a run asks for, for a model of `vocab_size` token ids.

    `cache` is a folder in which tokens are kept for the next run, within the folder that the run writes to: neither is data.
    `by_document`: whether the model can attend to each document of a sequence alone. DataError names the file, and the line or row.
    """
    if seq_len < 2 or batch_size < 1:
        raise DataError(f"--seq-len {seq_len}, --batch-size {batch_size}: at least 2 and 1 are needed")
    if not 0 <= seed < 2**64:
        raise DataError(f"seed {seed}: give one of 0 to 2^64 - 1")
    reading = read_set(settings, model_folder, vocab_size, cache)
    try:
        shape = BatchShape(_packing(settings, reading, by_document), seq_len, batch_size, reading.encoder.end_id)
        data = _streamed(settings, reading, shape, seed) if settings.streaming else _mapped(settings, reading, shape, seed, cache)
    finally:
        reading.close()
    return Prefetched(data, settings.workers) if settings.workers else data


def _packing(settings: DataSettings, reading: Reading, by_document: bool) -> Packing:
    if settings.packing == "documents" and not by_document:
        raise DataError("packing documents: this model cannot attend to each document of a sequence alone; choose one or joined")
    if settings.packing != "auto":
        return settings.packing
    return "joined" if reading.format == "text" else "documents" if by_document else "one"


def _streamed(settings: DataSettings, reading: Reading, shape: BatchShape, seed: int) -> StreamedData:
    if not reading.source.files:
        raise _nothing(reading, 0, Counts())
    return streamed(settings, reading, shape, seed, _about(reading, shape, reading.source.n_outside + reading.n_set_aside))


def _mapped(settings: DataSettings, reading: Reading, shape: BatchShape, seed: int, cache: Path) -> MapStyleData:
    key = json.dumps([reading.source.content_hash(), reading.identity, reading.vocab_size])
    kept = cached_tokens(cache, key, reading.source, reading.wide, reading.rows)
    n = len(kept.lengths)
    shuffle_seed = seed if settings.shuffle else None
    # The last number tells this order from those of the epochs. A joined row keeps the order of the files.
    order = np.arange(n) if shuffle_seed is None or shape.packing == "joined" else order_of(n, shuffle_seed, 0, 0)
    sequences, counts = pack(kept, order, shape.packing, settings.too_long, settings.unsupervised == "refuse", shape.seq_len)
    n_left_out = kept.about.n_left_out + reading.source.n_outside + reading.n_set_aside
    if not len(sequences):
        raise _nothing(reading, n_left_out, counts)
    fingerprint = fingerprint_of(kept.about.tokens_sha256, sequences, shape, shuffle_seed)
    return MapStyleData(kept, sequences, shape, shuffle_seed, counts, _about(reading, shape, n_left_out), fingerprint)


def _about(reading: Reading, shape: BatchShape, n_left_out: int) -> str:
    """What the data is and how it is packed."""
    written = "text" if reading.format == "text" else f"{reading.format}, {reading.chat_format.words()}"
    left_out = f", {n_left_out:,} files left out" if n_left_out else ""
    if reading.source.set_aside is not None:
        left_out += f", without the run's own {reading.source.set_aside}"
    return f"{written}{left_out}, {_PACKED[shape.packing].format(f'{shape.seq_len:,}')}"


def _nothing(reading: Reading, n_left_out: int, counts: Counts) -> DataError:
    left_out = f" ({n_left_out} files left out: not UTF-8, of another kind, or links out of the folder)" if n_left_out else ""
    found = f"nothing to learn in it ({in_words(counts)})" if counts.n_documents else "no text in it"
    return DataError(
        f"{reading.source.path}: {found}{left_out}; give a folder of text files, a JSONL of {EXAMPLE} or of chats, or .parquet"
    )
