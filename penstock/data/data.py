"""Training data: from rows in files to the batches of a run.

The model's tokenizer and chat template turn rows into documents. Documents are packed into sequences and ordered. They are
tokenised before training and cached, or tokenised on the fly (streaming).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import ANSWER, CROSS_ENTROPY, LAST, LossUnit, Objective
from penstock.settings import DataSettings

from .chat import ChatTemplate
from .documents import Reader, cached_documents
from .files import TRAIN, WANTED, DataFiles, find_files, parse_line, rows_of
from .formats import COLUMNS, LABELLED, NEEDED, PREFERENCE, ROLLOUTS, UNPAIRED, format_of, is_of, not_understood, renamed, shown
from .packing import Shape, counts_text, pack
from .sampling import MapStyleData, PackedSet, Stream, order_of, shares_of
from .tokenizer import ModelTokenizer, read_tokenizer
from .user_batches import UserBatches

RunData = MapStyleData | Stream | UserBatches  # batches of a run, by step number
EXTRA_NAMES = {UNPAIRED: ("label",), LABELLED: ("label",), ROLLOUTS: ("advantage", "old")}  # row format -> extras of a batch
Report = Callable[[str], None]  # callback that receives progress messages


def required_format(objective: Objective) -> str | None:
    """Return the row format that a loss requires, or None if it trains on any text or chat."""
    if objective.of is LossUnit.TOKENS and {*EXTRA_NAMES[ROLLOUTS]} <= {*objective.extras}:
        return ROLLOUTS
    if objective.name == "classify":
        return LABELLED
    return {LossUnit.PAIRS: PREFERENCE, LossUnit.ANSWERS: UNPAIRED}.get(objective.of)


def no_report(words: str) -> None:
    """Discard a progress message."""


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
    report: Report = no_report,
    run: Path | None = None,
    objective: Objective | None = CROSS_ENTROPY,
) -> RunData:
    """Return the training data of a run for a model with `vocab_size` token ids.

    `cache`: folder for tokens, reused by later runs. `run`: output folder of the run, excluded from the data; the parent of `cache`
    by default. `by_document`: True if the model can isolate the documents of a packed sequence. `preferred`: splits to use if the
    settings name none. `objective`: the loss, which can require a row format; None accepts any rows. DataError names the file and
    line or row.
    """
    if settings.streaming and len(settings.parts) > 1:
        raise DataError("several --data are not streamed: leave out --streaming, or put the files into one folder")
    weights = [part.weight for part in settings.mix] or [None]
    shares_of(weights, [1] * len(weights))  # reject bad weights before reading files
    tokenizer, shuffle_seed = read_tokenizer(model_folder), seed if settings.shuffle else None
    sets = list[PackedSet]()
    for part in settings.parts:
        reader = reader_of(part, tokenizer, vocab_size, run or cache.parent, preferred, objective)
        group = 1 if objective is None or objective.of is not LossUnit.ANSWERS else objective.rows_each // 2
        is_of_means = objective is not None and bool(objective.numbers.get("mean"))  # over a sequence
        packing, is_shared = _packing(part, reader, by_document and not is_of_means)
        shape = Shape(packing, seq_len, tokenizer.end_id, part.too_long, part.unsupervised, group, is_shared)
        extra_names = EXTRA_NAMES.get(reader.format, ()) + ((LAST,) if objective is not None and objective.n_labels else ())
        extra_names += (ANSWER,) if shape.is_isolated and reader.format in NEEDED else ()
        if settings.streaming:
            content = reader.files.content_hash(full=False)  # edges of files only: a stream may be too large to read twice
            fingerprint = _fingerprint(content, reader.identity, shape.identity, part.shuffle_buffer, batch_size, shuffle_seed)
            buffer = part.shuffle_buffer + part.shuffle_buffer % shape.rows_each  # round up to whole pairs
            return Stream(reader, shape, batch_size, buffer, shuffle_seed, _about(reader), fingerprint, extra_names)
        sets.append(_packed(reader, shape, part.bad_rows, shuffle_seed, cache, report, extra_names))
        if objective is not None and objective.name == "classify":
            _refuse_unknown_labels(sets[-1], objective.n_labels or 0)
    shares = shares_of(weights, [len(packed.sequences) for packed in sets])
    fingerprint = _fingerprint([packed.fingerprint for packed in sets], shares, batch_size, shuffle_seed)
    return MapStyleData(tuple(sets), shares, batch_size, shuffle_seed, fingerprint)


def reader_of(
    settings: DataSettings,
    tokenizer: ModelTokenizer,
    vocab_size: int,
    run: Path,
    preferred: tuple[str, ...] = TRAIN,
    objective: Objective | None = CROSS_ENTROPY,
) -> Reader:
    """Return a reader of a data set for a model with `vocab_size` token ids. Only the first row of each file is read. `run`: output
    folder of the run, excluded from the data. `preferred`, `objective`: see `read_data`."""
    if tokenizer.end_id >= vocab_size:
        advice = "reading bytes needs 257; else use the tokenizer of this model"
        raise DataError(f"the end token {tokenizer.end_id} is outside the model's {vocab_size} token ids; {advice}")
    columns = settings.columns or {}
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise DataError(f"--columns {unknown[0][:40]}=...: no such column; choose from {', '.join(COLUMNS)}")
    if doubled := [name for name, n in Counter(columns.values()).items() if n > 1]:
        raise DataError(f"--columns ...={doubled[0][:40]}: the column would be read twice; name it once")
    files = find_files(Path(settings.path or ""), run, settings.split, preferred)
    firsts = _first_rows(files, columns)
    where, first_row = next(firsts, ("", None))
    fields = first_row if isinstance(first_row, dict) else {}
    if where and (gone := [name for name in columns.values() if name not in fields]):
        raise DataError(f"{where}: no column {gone[0][:40]!r}, which --columns names; its columns are {shown(fields)}")
    first, format = renamed(first_row, columns), str(settings.format)
    of_rows = (
        format if format in NEEDED else next((k for k in (PREFERENCE, ROLLOUTS) if format == "auto" and is_of(k, first)), None)
    )
    if (kind := required_format(objective) if objective is not None else of_rows) is not None:
        format = _checked_format(kind, format, [(where, first_row), *firsts], columns)
    elif format == PREFERENCE:
        raise not_understood(where, {"chosen", "rejected"})
    elif format in NEEDED:
        raise DataError(f"--format {format}: rows of {NEEDED[format][0]}; plan with --loss for that, or leave it out")
    elif format == "auto":
        format = format_of(first, where, columns) if where else "text"
        for place, row in firsts:
            if (other_format := format_of(renamed(row, columns), place, columns)) != format:
                advice = "give files of different columns each a --data of its own, or say --format"
                raise DataError(f"{place}: columns of {other_format}, and those of {where} are of {format}; {advice}")
    prompt = first.get("prompt") if isinstance(first, dict) else None
    is_text = format == "text" or (format in ("prompt-completion", UNPAIRED) and isinstance(prompt, str))
    is_text = is_text or format in (ROLLOUTS, LABELLED) or (format == PREFERENCE and isinstance(first["chosen"], str))
    if format != "text" and files.path.is_dir():
        files = files.rows_only()
    if not where and not any(file.kind == "text" for file in files.files):
        raise DataError(f"{files.path}: no text in it; {WANTED}")
    return Reader(files, columns, format, ChatTemplate(tokenizer), vocab_size, is_text)


def _checked_format(kind: str, format: str, firsts: Iterable[tuple[str, Any]], columns: dict[str, str]) -> str:
    """Return the row format `kind` of a loss. DataError if a file or --format has another."""
    loss, names = NEEDED[kind]
    if format not in ("auto", kind):
        raise DataError(f"--format {format}: the plan's loss is of {kind} rows, with {' and '.join(names)}; leave it out")
    for where, row in firsts:
        if not is_of(kind, fields := renamed(row, columns)):
            listed = shown(fields) if isinstance(fields, dict) else "none"
            advice = f"name yours with --columns {names[0]}=COLUMN, or choose another --loss or --format"
            raise DataError(f"{where or 'the data'}: its columns are {listed}, and {loss} needs {' and '.join(names)}; {advice}")
    return kind


def _first_rows(files: DataFiles, columns: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield (place, first row) of each file, before columns are renamed. DataError for a file without a readable row."""
    for number, file in enumerate(files.files):
        value, where = None, ""
        for n, value in rows_of(file.path, file.kind, columns.values()) if file.kind != "text" else ():
            where = files.where(number, n)
            with suppress(DataError):  # skip a bad row
                yield where, parse_line(value, where) if isinstance(value, bytes) else value
                break
        else:
            if isinstance(value, bytes):
                parse_line(value, where)


def _packing(settings: DataSettings, reader: Reader, by_document: bool) -> tuple[Any, bool]:
    """Return the packing, and True if pairs or groups share sequences."""
    if settings.packing == "documents" and not by_document:
        raise DataError("packing documents: this model cannot attend to each document of a sequence alone; choose one or joined")
    way = "documents" if by_document else "one"
    if reader.format in NEEDED:
        is_read_before = settings.streaming and reader.format != PREFERENCE  # other formats have extra numbers per row
        if settings.packing == "joined" or is_read_before or settings.too_long == "split":
            odd = "streaming" if is_read_before else f"packing {settings.packing}, too_long {settings.too_long}"
            raise DataError(f"{odd}: each answer is apart, whole or cut, read before training; leave it out")
        way = way if settings.packing == "auto" else settings.packing
        packing = {PREFERENCE: "pairs", UNPAIRED: "answers"}.get(reader.format, way)
        return packing, packing != way == "documents"
    return ("joined" if reader.format == "text" else way) if settings.packing == "auto" else settings.packing, False


def _refuse_unknown_labels(data: PackedSet, n_labels: int) -> None:
    for d in data.sequences.segments[:, 0].tolist():
        if (label := data.documents.loss_numbers(d)[0]) >= n_labels:
            raise DataError(f"{data.documents.where(d)}: label {label:g}, and the plan has {n_labels}; plan with --loss classify:N")


def _packed(
    reader: Reader, shape: Shape, bad_rows: float, seed: int | None, cache: Path, report: Report, extra_names: tuple[str, ...]
) -> PackedSet:
    content = reader.files.content_hash(full=True)
    documents = cached_documents(reader, content, cache, report)
    documents.refuse_bad(bad_rows)
    n = len(documents.lengths)
    # The last number separates this order from those of the epochs. Joined packing keeps the order of the files.
    order = np.arange(n) if seed is None or shape.packing == "joined" else order_of(n, seed, 0, 0)
    sequences, counts = pack(documents, order, shape)
    if not len(sequences):
        wanted = f"a group has {shape.group} answers: give more, or plan with a smaller one" if shape.group > 1 else WANTED
        raise DataError(f"{_about(reader)}: nothing to learn in it ({counts_text(counts)}); {wanted}")
    segments = hashlib.sha256(sequences.segments.tobytes()).hexdigest()
    fingerprint = _fingerprint(content, reader.identity, shape.identity, segments)
    read = {"tokenizer": reader.template.tokenizer.identity, "data": _fingerprint(content, reader.format, reader.columns)}
    read["sequences"] = _fingerprint(shape.identity, segments)
    return PackedSet(documents, sequences, shape, counts, _about(reader), fingerprint, extra_names, read)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _about(reader: Reader) -> str:
    """Describe the data set and how it is read, for the user."""
    files, way = reader.files, "by the model's chat template" if reader.template.tokenizer.has_template else "as <|role|> and text"
    parts = [f"{files.path}: {reader.format}", "" if reader.is_text else f"conversations {way}", files.about]
    left_out = f"{n:,} file{'s' * (n != 1)} left out" if (n := files.n_left_out) else ""
    return ", ".join(filter(None, [*parts, left_out]))
