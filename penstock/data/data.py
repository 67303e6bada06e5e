"""Where do the batches of a run come from?

From the rows of a data set, through the model's own tokenizer and chat template, as sequences that are packed and ordered as the
user chose. Tokens are made before training and kept in a cache, or made as they are needed; either way a step's batch depends on
nothing but the data, the settings, the seed and the number of the step.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.data.files.sources import WANTED
from penstock.data.files.splits import TRAIN
from penstock.settings import DataSettings
from runtime.batch import Batch
from runtime.errors import DataError

from .map_style import BatchShape, MapStyleData, fingerprint_of, in_words, order_of
from .mixed import MixedData, shares_of
from .packing import Counts, Packing, pack
from .prefetch import Prefetched
from .reading import Reading, read_set
from .streamed import StreamedData, streamed
from .token_cache import Row, cached_tokens


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

    def words(self) -> dict[str, str]:
        """What was read and how sequences are made of it, by name, a line each; perhaps a `warning`."""
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
    preferred: tuple[str, ...] = TRAIN,
    report: Callable[[str], None] = lambda words: None,
) -> Data:
    """The training data that a run asks for, for a model of `vocab_size` token ids.

    `cache` is a folder in which tokens are kept for the next run, within the folder that the run writes to: neither is data.
    `by_document`: whether the model can attend to each document of a sequence alone. `preferred`: which splits of a
    folder, where the settings name none. DataError names the file, and the line or row.
    """
    if seq_len < 2 or batch_size < 1:
        raise DataError(f"--seq-len {seq_len}, --batch-size {batch_size}: at least 2 and 1 are needed")
    if not 0 <= seed < 2**64:
        raise DataError(f"seed {seed}: give one of 0 to 2^64 - 1")
    parts = settings.parts
    if settings.streaming and len(parts) > 1:
        raise DataError("several --data are not streamed: leave out --streaming, or put the files into one folder")
    shares = shares_of([part.weight for part in settings.mix])

    def read(part: DataSettings) -> StreamedData | MapStyleData:
        reading = read_set(part, model_folder, vocab_size, cache, preferred)
        try:
            shape = BatchShape(_packing(part, reading, by_document), seq_len, batch_size, reading.encoder.end_id)
            if part.streaming:
                return _streamed(part, reading, shape, seed)
            return _mapped(part, reading, shape, seed, cache, report)
        finally:
            reading.close()

    found = [read(part) for part in parts]
    several = tuple(one for one in found if isinstance(one, MapStyleData))
    data = found[0] if len(parts) == 1 else MixedData(several, shares)
    return Prefetched(data, settings.workers) if settings.workers else data


def _packing(settings: DataSettings, reading: Reading, by_document: bool) -> Packing:
    if settings.packing == "documents" and not by_document:
        raise DataError("packing documents: this model cannot attend to each document of a sequence alone; choose one or joined")
    if settings.packing != "auto":
        return settings.packing
    return "joined" if reading.format == "text" else "documents" if by_document else "one"


def _streamed(settings: DataSettings, reading: Reading, shape: BatchShape, seed: int) -> StreamedData:
    if not reading.source.files:
        raise _nothing(reading, 0, Counts(), shape)
    return streamed(settings, reading, shape, seed, _about(reading, reading.source.n_outside + reading.n_set_aside))


def _mapped(
    settings: DataSettings, reading: Reading, shape: BatchShape, seed: int, cache: Path, report: Callable[[str], None]
) -> MapStyleData:
    key = json.dumps([reading.source.content_hash(), reading.identity, reading.vocab_size])
    kept = cached_tokens(cache, key, reading.source, reading.wide, lambda left_out: _told(reading.rows(left_out), report))
    n = len(kept.lengths)
    shuffle_seed = seed if settings.shuffle else None
    # The last number tells this order from those of the epochs. A joined row keeps the order of the files.
    order = np.arange(n) if shuffle_seed is None or shape.packing == "joined" else order_of(n, shuffle_seed, 0, 0)
    sequences, counts = pack(kept, order, shape.packing, settings.too_long, settings.unsupervised == "refuse", shape.seq_len)
    n_left_out = kept.about.n_left_out + reading.source.n_outside + reading.n_set_aside
    if not len(sequences):
        raise _nothing(reading, n_left_out, counts, shape)
    fingerprint = fingerprint_of(kept.about.tokens_sha256, sequences, shape, shuffle_seed)
    return MapStyleData(kept, sequences, shape, shuffle_seed, counts, _about(reading, n_left_out), fingerprint)


def _told(rows: Iterable[Row], report: Callable[[str], None]) -> Iterator[Row]:
    """The same; `report` hears how many there were."""
    for n, row in enumerate(rows):
        if n % 100 == 0:
            report(f"tokenising: {n:,} documents")
        yield row


def _about(reading: Reading, n_left_out: int) -> str:
    """What the data is and how it is read."""
    written = f"{reading.format}, {reading.chat_format.words()}" if not reading.is_text else reading.format
    left_out = f", {n_left_out:,} files left out" if n_left_out else ""
    left_out = (f", {reading.source.split}" if reading.source.split else "") + left_out
    if reading.source.set_aside is not None:
        left_out += f", without the run's own {reading.source.set_aside}"
    return f"{reading.source.path}: {written}{left_out}"


def _nothing(reading: Reading, n_left_out: int, counts: Counts, shape: BatchShape) -> DataError:
    if counts.n_cut and counts.n_cut == counts.n_unsupervised == counts.n_documents:
        problem = f"what is to be learned of each of {counts.n_documents:,} documents begins after {shape.seq_len:,} tokens"
        return DataError(f"{reading.source.path}: {problem}, where it is cut; plan with a longer --seq-len")
    left_out = f" ({n_left_out} files left out: not UTF-8, of another kind, or links out of the folder)" if n_left_out else ""
    found = f"nothing to learn in it ({in_words(counts)})" if counts.n_documents else "no text in it"
    return DataError(f"{reading.source.path}: {found}{left_out}; {WANTED}")
