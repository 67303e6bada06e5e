"""Training data: from rows in files to the batches of a run.

The model's tokenizer and chat template turn rows into documents. Documents are packed into sequences and ordered. They are
tokenised before training and cached, or tokenised on the fly (streaming).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.caches import ROWS_FOLDER
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import ANSWER, CROSS_ENTROPY, LAST, LossInput, LossUnit, Objective
from penstock.settings import DataSettings

from .chat import ChatTemplate
from .documents import Reader, cached_documents
from .files import TRAIN, WANTED, DataFile, DataFiles, Limits, find_files
from .formats import NEEDED, PREFERENCE, ROLLOUTS, TOKENS, UNPAIRED, renamed, row_format, unread
from .image_processor import ImageReader, image_token
from .packing import Shape, counts_text, pack
from .sampling import MapStyleData, PackedSet, Stream, order_of, shares_of
from .tokenizer import ModelTokenizer, read_tokenizer
from .user_batches import UserBatches

RunData = MapStyleData | Stream | UserBatches  # batches of a run, by step number
Report = Callable[[str], None]  # callback that receives progress messages


MANY, LEAST_SHARE = 256, 0.05  # documents read to count the ends of answers; least share of an end


def no_report(words: str) -> None:
    """Discard a progress message."""


@dataclass(frozen=True, slots=True)
class DataRequest:
    """Data to read, and the model and the batches for which it is read."""

    settings: DataSettings
    model_folder: Path | None  # holds the tokenizer; None: tokens are bytes
    vocab_size: int
    seq_len: int
    batch_size: int
    seed: int
    cache: Path  # folder for tokens, reused by later runs
    by_document: bool = False  # True if the model can isolate the documents of a packed sequence
    run: Path | None = None  # output folder of the run, excluded from the data; None: parent of `cache`
    preferred: tuple[str, ...] = TRAIN  # splits to use if the settings name none
    objective: Objective | None = CROSS_ENTROPY  # loss, which can require a row format; None accepts all formats
    rows: Iterable[Any] | None = None  # of a program, streamed instead of the settings' files
    vision: Path | None = None  # folder of a model with its processor of images; None: no images

    @property
    def shuffle_seed(self) -> int | None:
        seed = self.seed if self.settings.seed is None else self.settings.seed
        return seed if self.settings.shuffle else None


def read_data(request: DataRequest, report: Report = no_report) -> MapStyleData | Stream:
    """Return the data of a run. DataError names the file and line or row."""
    settings, objective, seed = request.settings, request.objective, request.shuffle_seed
    if settings.streaming and len(settings.parts) > 1:
        raise DataError("several --data are not streamed: leave out --streaming, or put the files into one folder")
    by_epoch = settings.sampler == "transformers"
    if by_epoch and (settings.streaming or len(settings.parts) > 1 or settings.packing != "one"):
        raise DataError("data.sampler transformers: give one set, not streamed, with --packing one; or leave it out")
    weights = [part.weight for part in settings.mix] or [None]
    shares_of(weights, [1] * len(weights))  # reject bad weights before reading files
    tokenizer, sets = read_tokenizer(request.model_folder, settings.chat_template), list[PackedSet]()
    for part in settings.parts:
        reader = reader_of(request, part, tokenizer)
        shape = _shape(request, part, reader)
        inputs = _loss_inputs(reader, shape, objective)
        if settings.streaming:
            content = reader.files.content_hash(full=False)  # edges of files only: a stream may be too large to read twice
            fingerprint = _fingerprint(content, reader.identity, shape.identity, part.shuffle_buffer, request.batch_size, seed)
            buffer = part.shuffle_buffer + part.shuffle_buffer % shape.rows_each  # round up to whole pairs
            return Stream(reader, shape, request.batch_size, buffer, seed, fingerprint, inputs)
        sets.append(_packed(reader, shape, part.bad_rows, request, inputs, report))
        if objective is not None and objective.name == "classify":
            _refuse_unknown_labels(sets[-1], objective.n_labels or 0)
    shares = shares_of(weights, [len(packed.sequences) for packed in sets])
    order = ["transformers"] if by_epoch else []
    fingerprint = _fingerprint([packed.fingerprint for packed in sets], shares, request.batch_size, seed, *order)
    return MapStyleData(tuple(sets), shares, request.batch_size, seed, fingerprint, by_epoch=by_epoch)


def learned_ends(data: RunData, tokenizer: ModelTokenizer) -> list[int]:
    """Return the special tokens that end learned runs of the first documents of each set, the most frequent first."""
    counts, sets = Counter[int](), data.parts if isinstance(data, MapStyleData) else ()
    special = {i for i, token in tokenizer.library.added_tokens_decoder.items() if token.special} | tokenizer.answer_ends
    numbered = [(part.documents, d) for part in sets for d in range(len(part.documents.lengths))[:MANY]]
    documents = [(source.ids(d), source.runs(d)) for source, d in numbered]
    if isinstance(data, Stream):
        rows = islice(data.reader.stream(range(len(data.reader.files.files))), MANY)
        documents = [(np.array(row["ids"]), np.array(row["learned"], dtype=np.int64).reshape(-1, 2)) for row in rows]
    for ids, runs in documents:
        counts.update(ids[runs[:, 1] - 1].tolist())
    return [end for end, n in counts.most_common() if end in special and n >= LEAST_SHARE * counts.total()]


def reader_of(request: DataRequest, part: DataSettings, tokenizer: ModelTokenizer) -> Reader:
    """Return a reader of one data set of the request. Only the first row of each file is read."""
    if tokenizer.end_id >= request.vocab_size:
        advice = "reading bytes needs 257; else use the tokenizer of this model"
        raise DataError(f"the end token {tokenizer.end_id} is outside the model's {request.vocab_size} token ids; {advice}")
    columns = part.columns or {}
    if request.rows is None:
        files = find_files(Path(part.path or ""), request.run or request.cache.parent, part.split, request.preferred)
    else:
        files = DataFiles(name := Path(part.path or ""), (DataFile(name, "", "program", rows=request.rows),))
    files = replace(files, limits=Limits(part.max_row_seconds, part.max_row_mb * 10**6))
    rows = files.first_rows()
    first = next(rows, None)
    format, is_text = row_format(part.format, first, rows, columns, request.objective)
    if format != "text" and files.path.is_dir():
        files = files.rows_only()
    if first is None and not any(file.kind == "text" for file in files.files):
        raise DataError(f"{files.path}: no text in it; {WANTED}")
    unread_columns = tuple(unread(renamed(first[1], columns), format, is_text)) if first else ()
    images = None
    is_read = not (is_text or part.streaming or format in (ROLLOUTS, TOKENS))
    token = None if request.vision is None else image_token(request.vision)
    if request.vision is not None and token is not None and is_read:
        of_rows = Path.cwd() if files.path.parent.name == ROWS_FOLDER else files.path.parent
        root = Path(part.images) if part.images is not None else files.path if files.path.is_dir() else of_rows
        images = ImageReader(request.vision, tokenizer, files.limits, root, part.chat_template is not None)
    template = ChatTemplate(tokenizer, files.limits)
    return Reader(files, columns, format, template, request.vocab_size, is_text, unread_columns, images, token)


def _shape(request: DataRequest, part: DataSettings, reader: Reader) -> Shape:
    """Return the layout of the sequences. DataError for settings that the row format or the model rules out."""
    objective = request.objective
    is_mean_of_tokens = objective is not None and bool(objective.numbers.get("mean"))
    if part.packing == "documents" and (is_mean_of_tokens or not request.by_document):
        raise DataError("packing documents: this model cannot attend to each document of a sequence alone; choose one or joined")
    layout = "documents" if request.by_document and not is_mean_of_tokens else "one"
    packing: Any = part.packing
    shares = False
    if reader.format in NEEDED:
        is_read_before = part.streaming and reader.format != PREFERENCE  # other formats have extra numbers per row
        if part.packing == "joined" or is_read_before or part.too_long == "split":
            odd = "streaming" if is_read_before else f"packing {part.packing}, too_long {part.too_long}"
            raise DataError(f"{odd}: each answer is apart, whole or cut, read before training; leave it out")
        layout = layout if part.packing == "auto" else part.packing
        packing = {PREFERENCE: "pairs", UNPAIRED: "answers"}.get(reader.format, layout)
        shares = packing != layout == "documents"
    elif part.packing == "auto":
        packing = "joined" if reader.format == "text" else layout
    group = 1 if objective is None or objective.of is not LossUnit.ANSWERS else objective.rows_each // 2
    end_id = reader.template.tokenizer.end_id
    return Shape(packing, request.seq_len, end_id, part.too_long, part.unsupervised, group, shares)


def _loss_inputs(reader: Reader, shape: Shape, objective: Objective | None) -> tuple[LossInput, ...]:
    """Return the loss inputs that a batch gets from the rows and their packing."""
    needed = NEEDED.get(reader.format)
    inputs = () if needed is None else needed.inputs
    inputs += (LAST,) if objective is not None and objective.n_labels else ()
    return inputs + ((ANSWER,) if needed is not None and shape.is_isolated else ())


def _refuse_unknown_labels(data: PackedSet, n_labels: int) -> None:
    for d in data.sequences.segments[:, 0].tolist():
        if (label := data.documents.loss_numbers(d)[0]) >= n_labels:
            raise DataError(f"{data.documents.where(d)}: label {label:g}, and the plan has {n_labels}; plan with --loss classify:N")


def _packed(
    reader: Reader, shape: Shape, bad_rows: float, request: DataRequest, inputs: tuple[LossInput, ...], report: Report
) -> PackedSet:
    content, seed = reader.files.content_hash(full=True), request.shuffle_seed
    documents = cached_documents(reader, content, request.cache, report)
    documents.refuse_bad(bad_rows)
    n = len(documents.lengths)
    # The last number separates this order from those of the epochs. Joined packing keeps the order of the files.
    is_fixed = seed is None or shape.packing == "joined" or request.settings.sampler == "transformers"
    order = np.arange(n) if is_fixed else order_of(n, seed or 0, 0, 0)
    sequences, counts = pack(documents, order, shape)
    if not len(sequences):
        wanted = f"a group has {shape.group} answers: give more, or plan with a smaller one" if shape.group > 1 else WANTED
        if counts["cut"]:
            longest = f"the longest document has {documents.lengths.max():,} tokens"
            wanted = f"prompts fill the {shape.seq_len:,} tokens of a sequence, and {longest}: choose a longer --seq-len"
        elif documents.has_images and documents.lengths.max() > shape.seq_len:
            longest = f"the longest has {documents.lengths.max():,} tokens"
            wanted = f"documents with their images do not fit {shape.seq_len:,} tokens, {longest}: choose a longer --seq-len"
        raise DataError(f"{reader.about}: nothing to learn in it ({counts_text(counts)}); {wanted}")
    segments = hashlib.sha256(sequences.segments.tobytes()).hexdigest()
    of_images = {"images": documents.images_digest} if documents.has_images else {}
    fingerprint = _fingerprint(content, reader.identity, shape.identity, segments, *of_images.values())
    read = {"tokenizer": reader.template.tokenizer.identity, "data": _fingerprint(content, reader.format, reader.columns)}
    read |= {"sequences": _fingerprint(shape.identity, segments), **of_images}
    return PackedSet(documents, sequences, shape, counts, reader.about, fingerprint, inputs, read)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
