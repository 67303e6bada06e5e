"""Tokenised documents: a stream from `datasets`, or an Arrow file cached between runs."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import transformers
from datasets import Dataset, Features, IterableDataset, List, Value, disable_progress_bars
from datasets.exceptions import DatasetGenerationError
from datasets.iterable_dataset import ExamplesIterable
from datasets.utils import tqdm

from penstock.runtime.errors import DataError, PenstockError

from .chat import ChatTemplate, Rendered, Span
from .files import DataFile, DataFiles, parse_line
from .formats import NEEDED, ROLLOUTS, TOKENS, learned_tokens, read_row, renamed, rollouts, shown
from .image_processor import ImageReader, ImageTokens, UnreadableImageError
from .images import MARK, images_in, text_in
from .messages import Chat, Completion
from .tokenizer import is_tokenizer_error, reason_of

Array = npt.NDArray[np.int64]
_Read = tuple[Rendered, list[str], tuple[str | None, str | None], tuple[float, ...], ImageTokens | None]
Columns = dict[str, list[Any]]  # a batch of `datasets`: column name -> values
MOST_SHOWN = 20  # bad rows
ROWS_AT_ONCE = 32  # tokenised per call; tokens with offsets take 100 times the memory of the text
REPORT_S = 0.5  # between progress messages
DOCUMENTS_AT_ONCE = 100  # in memory before a write
_COUNTS = ("n_tokens", "n_learned", "n_targets", "file", "row", "n_own")
_NOTES = ("problem", "dropped")  # why a row is bad; dropped by its template, one a line: `roles developer`, `parts tool_calls`
IMAGES = ("images", "images_end", "images_stamps")  # JSON with the images of a document; end of the last; JSON with their files
LOSS_NUMBERS = "brought"  # numbers of a row for its loss: a label; or an advantage and the log-probability of each learned token
_VERSION = 4  # of the conversion of rows; another version invalidates cached tokens

tqdm.set_lock(RLock())  # the default lock is a system semaphore that a killed run leaks


@dataclass(frozen=True, slots=True)
class Reader:
    """A data set and its chat template. A `map` function of `datasets`: turns a batch of rows into documents."""

    files: DataFiles
    columns: dict[str, str]  # our column name -> column name in the file
    format: str
    template: ChatTemplate
    vocab_size: int
    is_text: bool  # plain text, no conversations
    unread: tuple[str, ...] = ()  # columns of the first row that its format does not read
    images: ImageReader | None = None  # None: its format or model has none
    image_token: int | None = None  # of a vision-language model, -1 if not known; None: of another model

    @property
    def identity(self) -> str:
        """Identity of the conversion: differs if the tokens of any row can differ."""
        version = _VERSION if self.image_token is None else [_VERSION, self.image_token]
        return json.dumps([version, self.format, self.template.tokenizer.identity, sorted(self.columns.items()), self.vocab_size])

    @property
    def features(self) -> Features:
        """Columns of a document: ids, edges of learned runs, counts, source file and row, problem, dropped roles, loss numbers."""
        ids = Value("uint16" if self.vocab_size <= 2**16 else "uint32")
        of_all = dict.fromkeys(_COUNTS, Value("int64")) | dict.fromkeys(_NOTES, Value("string"))
        if self.images is not None:
            of_all |= dict(zip(IMAGES, (Value("string"), Value("int64"), Value("string")), strict=True))
        return Features({"ids": List(ids), "learned": List(Value("uint32")), **of_all, LOSS_NUMBERS: List(Value("float64"))})

    @property
    def about(self) -> str:
        """Describe the data set and how it is read, for the user."""
        how = "by the model's chat template" if self.template.tokenizer.has_template else "as <|role|> and text"
        parts = [f"{self.files.path}: {self.format}", "" if self.is_text else f"conversations {how}", self.files.about]
        left_out = f"{n:,} file{'s' * (n != 1)} left out" if (n := self.files.n_left_out) else ""
        unread = f"not read: {shown(self.unread)}" if self.unread else ""
        return ", ".join(filter(None, [*parts, left_out, unread]))

    def stream(self, order: Iterable[int]) -> IterableDataset:
        """Yield documents lazily from the files in this order. `datasets` tracks the stream state by file and row."""
        shards = [(int(i), self.files.files[i]) for i in order]
        # `from_generator` would create a cache in the user's home.
        how = {"mapped": tuple(self.columns.values()), "most_bytes": self.files.limits.row_bytes}
        rows = IterableDataset(ExamplesIterable(_rows, {"files": shards, **how}))
        return rows.map(self, batched=True, batch_size=ROWS_AT_ONCE, remove_columns=["file", "row", "value"])

    def __call__(self, rows: Columns) -> Columns:
        """Return the documents of a batch of rows: one or more per row, an empty one for a bad row."""
        places = list(zip(rows["file"], rows["row"], strict=True))
        names = ("ids", "learned", *_COUNTS, *_NOTES, LOSS_NUMBERS, *(IMAGES if self.images is not None else ()))
        if self.format in (ROLLOUTS, TOKENS):
            tokenised = [one for place, value in zip(places, rows["value"], strict=True) for one in self._tokenised(value, *place)]
            return {name: [values[column] for values in tokenised] for column, name in enumerate(names)}
        values = zip(places, rows["value"], strict=True)
        with self.template.watch.at_work() if not self.is_text else nullcontext():
            inputs = [(place, *one) for place, value in values for one in self._read(value, *place)]
        try:
            backend = self.template.tokenizer.backend
            encodings_of_images = [None if with_images is None else with_images.encoding for *_, with_images in inputs]
            plain = [text for (_, (text, _), *_), encoding in zip(inputs, encodings_of_images, strict=True) if encoding is None]
            rest = iter(backend.encode_batch(plain, add_special_tokens=self.is_text))  # only plain text gets special tokens
            encoded = [next(rest) if encoding is None else encoding for encoding in encodings_of_images]
            alone = [backend.encode_batch_fast(words, add_special_tokens=False) for _, _, words, *_ in inputs]
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            advice = "write it as UTF-8, and use a tokenizer with its letters"
            where = self.files.where(*places[0])
            raise DataError(f"{where}: its text, or one soon after it, has no tokens ({reason_of(error)}); {advice}") from None
        documents, problems = dict[tuple[int, int], list[tuple[Any, ...]]](), dict[tuple[int, int], DataError]()
        for (place, one, _, notes, numbers, with_images), encoding, texts in zip(inputs, encoded, alone, strict=True):
            of_images = (None, 0, None) if with_images is None else (with_images.images, with_images.end, with_images.stamps)
            columns = (*self._document(*one, encoding, place), *place, sum(len(m.ids) for m in texts), *notes, numbers, *of_images)
            documents.setdefault(place, []).append(columns)
            try:
                self._refuse_image_token(encoding.ids if with_images is None else (), self.files.where(*place))
            except DataError as error:
                problems[place] = error
        documents |= {place: [_bad(place, error)] for place, error in problems.items()}
        return {name: [values[column] for row in documents.values() for values in row] for column, name in enumerate(names)}

    def _tokenised(self, value: Any, file: int, row: int) -> list[tuple[Any, ...]]:
        """Return the documents of a pre-tokenised row, as tuples in the order of `features`."""
        where = self.files.where(file, row)
        try:
            fields = self._fields(value, where)
            if self.format == TOKENS:
                ids, runs = learned_tokens(fields, self.vocab_size, where)
                self._refuse_image_token(ids, where)
                n = sum(stop - first for first, stop in runs)
                edges = tuple(edge for run in runs for edge in run)
                return [(ids, edges, len(ids), n, n - (edges[:1] == (0,)), file, row, 0, None, None, ())]
            completions = rollouts(fields, self.vocab_size, where)
            self._refuse_image_token([i for prompt, ids, *_ in completions for i in (*prompt, *ids)], where)
        except DataError as error:
            return [_bad((file, row), error)]
        counted = [(p + c, (len(p), len(p + c)), len(p + c), len(c), len(c), (a, *logps)) for p, c, a, logps in completions]
        return [(*columns, file, row, 0, None, None, numbers) for *columns, numbers in counted]

    def _read(self, value: Any, file: int, row: int) -> list[_Read]:
        """Return the documents of a row. Only the first of a conversation has message contents and dropped roles."""
        where = self.files.where(file, row)
        try:
            fields = self._fields(value, where)
            rendered = [self._rendered(*item, where) for item in read_row(fields, self.format, where)]
            if self.format in NEEDED and any(len(documents) > 1 for documents in rendered):
                raise DataError(f"{where}: the model's chat template writes its answers apart; give rows of one answer each")
            return [document for documents in rendered for document in documents]
        except DataError as error:
            unread = ImageTokens(None, None, 0, error.stamps) if isinstance(error, UnreadableImageError) else None
            return [(("", []), [], (str(error), None), (), unread)]

    def _fields(self, value: Any, where: str) -> Any:
        """Return the columns of a row, by our names. DataError for images next to a text or tokens, which would not be read."""
        fields = renamed(parse_line(value, where), self.columns)
        is_plain = self.is_text or self.format in (ROLLOUTS, TOKENS)
        if self.image_token is not None and is_plain and isinstance(fields, dict) and images_in(fields):
            raise DataError(f"{where}: has images, and they belong to messages; give messages, or leave the images out")
        return fields

    def _refuse_image_token(self, ids: Sequence[int], where: str) -> None:
        if self.image_token is not None and self.image_token in ids:
            raise DataError(f"{where}: a text with the token of images, and no image; leave it out")

    def images_of(self, places: Collection[tuple[int, int]]) -> Iterator[tuple[str, Any]]:
        """Yield (place for the user, image) of these rows, each (file, row), by reading the files again."""
        for number in sorted({file for file, _ in places}):
            file, wanted = self.files.files[number], {row for n, row in places if n == number}
            for row, value in file.numbered_rows(tuple(self.columns.values()), self.files.limits.row_bytes):
                if row in wanted:
                    where = self.files.where(number, row)
                    for item, _ in read_row(renamed(parse_line(value, where), self.columns), self.format, where):
                        yield from ((where, image) for image in getattr(item, "images", ()))

    def _rendered(self, item: Chat | Completion, numbers: tuple[float, ...], where: str) -> list[_Read]:
        """Return the documents of a conversation or text, with the loss numbers of its row."""
        if isinstance(item, Completion) is not self.is_text:
            raise DataError(f"{where}: texts and messages in one data set; give them as two, each with a --data of its own")
        if isinstance(item, Completion):
            text = item.prompt + item.completion  # followed by the end token
            return [((text, [(len(item.prompt), len(text) + 1)] if text else []), [], (None, None), numbers, None)]
        template = self.template
        if item.images:
            if self.images is None:
                raise DataError(f"{where}: has images, read only by a vision-language model without --streaming; leave them out")
            template, item = self._with_images(item, where)
        elif self.images is not None and any(MARK in text_in(m.get("content") or "") for m in item.messages if m["role"] == "user"):
            raise DataError(f"{where}: {MARK} in a text, and no image in the row; add the column images, or leave the row out")
        chat = template.with_arguments(item, where)
        rendered = template.render(chat, where)
        roles, parts = template.dropped_roles(chat, rendered), template.dropped_parts(chat, rendered)
        notes = [f"roles {role}" for role in roles] + [f"parts {part}" for part in parts] + ["arguments"] * (chat is not item)
        first = [text_in(m["content"]) for m in chat.messages if m["role"] not in roles], (None, "\n".join(notes) or None)
        shown = _images_by_document(chat, len(rendered), where) if chat.images else [()] * len(rendered)
        pairs = [
            (one, None) if self.images is None or not images else self.images.read(one, images, where)
            for one, images in zip(rendered, shown, strict=True)
        ]
        return [(one, *(([], (None, None)) if i else first), numbers, with_images) for i, (one, with_images) in enumerate(pairs)]

    def _with_images(self, chat: Chat, where: str) -> tuple[ChatTemplate, Chat]:
        """Return the chat template for images, and the conversation in its form. DataError with the place if the model has none."""
        assert self.images is not None
        try:
            self.images.config  # noqa: B018 it raises
            template = self.images.template
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        template.watch = self.template.watch  # of this thread
        return template, self.images.with_parts(chat, where)

    def _document(self, text: str, spans: list[Span], encoding: Any, place: tuple[int, int]) -> tuple[Array, Array, int, int, int]:
        """Return ids, edges of learned runs, and the counts of tokens, learned tokens and targets."""
        n_doubled = self.template.tokenizer.n_doubled(encoding.ids) if self.is_text else 0  # rendered by a template: begins already
        ids, end_id = np.array(encoding.ids[n_doubled:], dtype=np.int64), self.template.tokenizer.end_id
        if is_ended := self.is_text and ids.size > 0:  # exactly once, even if the tokenizer adds it too
            ids = np.append(ids[: ids.size - int(ids[-1] == end_id)], end_id)
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            problem = f"token {largest} is outside the model's {self.vocab_size} token ids"
            raise DataError(f"{self.files.where(*place)}: {problem}; use the tokenizer of this model")
        end = (len(text), len(text) + 1)
        if is_ended and spans == [(0, end[1])]:  # all is learned: skip the offsets, which take as long as encoding
            runs = np.array([[0, ids.size]])
        else:
            offsets = encoding.offsets[n_doubled:]
            runs = _runs_of(spans, [*offsets[: ids.size - 1], end] if is_ended else offsets)
        n_learned = int((runs[:, 1] - runs[:, 0]).sum())
        n_targets = n_learned - int((runs[:1, 0] == 0).sum())  # the first token has no context to predict it from
        return ids, runs.reshape(-1), ids.size, n_learned, n_targets


def _bad(place: tuple[int, int], error: DataError) -> tuple[Any, ...]:
    """Return the empty document of a bad row, in the order of `features`."""
    return ((), (), 0, 0, 0, *place, 0, str(error), None, (), None, 0, None)


def _images_by_document(chat: Chat, n_documents: int, where: str) -> list[tuple[Any, ...]]:
    """Return the images of each document of a conversation: all of one; those up to its answer if answers are apart. DataError for
    an image in a learned answer."""
    contents = [[] if isinstance(m["content"], str) else m["content"] for m in chat.messages]
    n_images = [sum(part == {"type": "image"} for part in content) for content in contents]
    learned = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i not in chat.unlearned]
    if (i := next((i for i in learned if n_images[i]), None)) is not None:
        raise DataError(f'{where}: message {i} is a learned answer with an image; give it "loss": 0, or leave the row out')
    return [chat.images] if n_documents == 1 else [chat.images[: sum(n_images[: i + 1])] for i in learned]


def _runs_of(spans: list[Span], offsets: list[Span]) -> Array:
    """Convert character spans to token runs: (n, 2) of first token and one past the last, sorted and disjoint."""
    places, runs = np.array(offsets, dtype=np.int64).reshape(-1, 2), list[Span]()
    for first, stop in sorted(spans):
        held = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > first))
        begin = max(0 if first == 0 else int(held.min(initial=len(offsets))), runs[-1][1] if runs else 0)
        if begin <= (last := int(held.max(initial=-1))):
            runs.append((begin, last + 1))
    return np.array(runs, dtype=np.int64).reshape(-1, 2)


def _rows(files: list[tuple[int, DataFile]], mapped: tuple[str, ...], most_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of files with the keys that `datasets` expects."""
    for number, file in files:
        for row, value in file.numbered_rows(mapped, most_bytes):
            yield row, {"file": number, "row": row, "value": value}


class Documents:
    """Tokenised documents, memory-mapped or in memory. `lengths`, `n_learned`, `n_targets`: arrays, one entry per document."""

    def __init__(self, dataset: Dataset, files: DataFiles, location: str = "") -> None:
        self.files, self.location, column = files, location, dataset.data.column  # location of the tokens, for the user
        self._columns = tuple(column(name) for name in ("ids", "learned", "file", "row"))
        self._loss_numbers = column(LOSS_NUMBERS)
        has_images = IMAGES[0] in dataset.column_names and column(IMAGES[0]).null_count < len(dataset)
        self._images, self._images_end, self._stamps = (column(name) if has_images else None for name in IMAGES)
        self.reader: Reader | None = None  # reads images of the rows again
        self.lengths, self.n_learned, self.n_targets = (column(name).to_numpy() for name in _COUNTS[:3])
        self.n_own = int(column("n_own").to_numpy().sum())  # tokens of the messages alone, without the template
        places = np.stack([column(name).to_numpy() for name in _COUNTS[3:5]])
        self.n_rows = min(1, places.shape[1]) + int(np.diff(places).any(axis=0).sum())
        problems = column("problem")
        self.problems = {i: problems[i].as_py() for i in np.flatnonzero(problems.is_valid()).tolist()}  # bad rows, by document
        notes = column("dropped").drop_null().to_pylist()
        self.dropped = Counter[str](line for lines in notes for line in lines.split("\n"))  # number of rows, by note

    @property
    def problem_lines(self) -> list[str]:
        """Problems of bad rows in the order of the data, equal ones as one line with their number."""
        rows = dict[str, list[str]]()
        for d, problem in self.problems.items():
            place, is_file = self.where(d), not self._columns[3][d].as_py()  # files are named one by one
            rows.setdefault(problem if is_file else problem.removeprefix(f"{place}: "), []).append("" if is_file else f"{place}: ")
        lines = list[str]()
        for problem, places in rows.items():
            similar = f" (and {len(places) - 1:,} more like it, up to {places[-1][:-2]})" * (len(places) > 1)
            lines.append(f"{places[0]}{problem}{similar}")
        return lines

    def refuse_bad(self, share: float) -> None:
        """Raise DataError, with the first 20 problems as notes, if more than this share of the rows is bad."""
        n = len(self.problems)
        if n <= share * self.n_rows * (1 + 1e-9):
            return
        least = math.ceil(1000 * n / self.n_rows) / 10
        how = f", or skip them with --bad-rows {least:g}%" if n < self.n_rows else ""
        first, *further = self.problem_lines
        error = DataError(f"{first} ({n:,} of {self.n_rows:,} rows are bad; mend them{how})")
        for line in [*further[: MOST_SHOWN - 1], f"and {len(further) + 1 - MOST_SHOWN:,} other problems"][: len(further)]:
            error.add_note(line)
        raise error

    def ids(self, document: int) -> npt.NDArray[np.unsignedinteger]:
        """Return token ids: a view of the file."""
        return np.asarray(self._columns[0][document].values)

    def runs(self, document: int) -> Array:
        """Return (n, 2): first token and one past the last of each learned run."""
        return np.asarray(self._columns[1][document].values).astype(np.int64).reshape(-1, 2)

    def loss_numbers(self, document: int) -> npt.NDArray[np.float64]:
        """Return the loss numbers of the document's row."""
        return np.asarray(self._loss_numbers[document].values)

    @property
    def has_images(self) -> bool:
        return self._images is not None

    @property
    def images_digest(self) -> str:
        """SHA-256 of all images, their tokens and sizes."""
        assert self._images is not None
        return hashlib.sha256(json.dumps(self._images.to_pylist()).encode()).hexdigest()

    def images(self, document: int) -> list[dict[str, Any]]:
        """Return digest (`sha256`), `size` (width, height), `n_tokens`, and for some models `grid`, of each image in order."""
        text = None if self._images is None else self._images[document].as_py()
        return [] if text is None else json.loads(text)

    def images_end(self, document: int) -> int:
        """Return one past the last token of an image; 0 without images."""
        return 0 if self._images_end is None else int(self._images_end[document].as_py())

    @property
    def stamps(self) -> list[list[Any]]:
        """Path, size, time and digest of each image that is a file."""
        texts = () if self._stamps is None else self._stamps.drop_null().to_pylist()
        return [stamp for text in texts for stamp in json.loads(text)]

    def place(self, document: int) -> tuple[int, int]:
        """Return the number of the source file, and the row."""
        file, row = (column[document].as_py() for column in self._columns[2:])
        return file, row

    def where(self, document: int) -> str:
        """Return the source file and row, for the user."""
        return self.files.where(*(column[document].as_py() for column in self._columns[2:]))


def cached_documents(reader: Reader, content_hash: str, cache: Path, report: Callable[[str], None]) -> Documents:
    """Return all documents of a data set, from the cache if an earlier run wrote them. `datasets` stores them in the folder
    `cache`. The key is a digest of file contents, reader and library versions; if images changed since, also of these. Concurrent
    processes tokenise once. DataError for a rejected file or a read-only folder."""
    how, shown_s = ["found in"], time.monotonic()

    def examples() -> Iterator[dict[str, Any]]:
        nonlocal shown_s
        how[0] = "made, and kept in"
        report("tokenising: 0 documents")
        for n, example in enumerate(reader.stream(range(len(reader.files.files)))):
            if (now_s := time.monotonic()) > shown_s + REPORT_S:
                shown_s = now_s
                report(f"tokenising: {n:,} documents, up to {reader.files.where(example['file'], example['row'])}")
            yield example

    disable_progress_bars()
    made_by: list[Any] = [content_hash, reader.identity, list(reader.features), tokenizers.__version__, transformers.__version__]
    made_by += [] if reader.images is None else [reader.images.identity]
    options: dict[str, Any] = {"features": reader.features, "cache_dir": str(cache), "writer_batch_size": DOCUMENTS_AT_ONCE}
    try:
        while True:
            options["fingerprint"] = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:32]
            documents = Documents(Dataset.from_generator(examples, **options), reader.files, f"{how[0]} {cache}")
            documents.reader = reader
            if reader.images is None or not (changed := reader.images.changed(documents.stamps)):
                return documents
            made_by += [changed]
    except (DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, PenstockError):
            raise cause from None
        reason = getattr(cause, "strerror", None) or reason_of(cause)
        advice = "make room, delete it, or name another in PENSTOCK_CACHE"
        raise DataError(f"{cache}: tokens cannot be kept there ({reason}); {advice}") from None
