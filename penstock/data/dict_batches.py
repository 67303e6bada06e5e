"""Batches of a program's iterable of dicts, such as a DataLoader: rows taken in order, with the labels of Hugging Face."""

# T: tokens of a row, without padding at first
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import CheckpointError, DataError
from penstock.runtime.plan.objective import LossInput

NAMES = ("input_ids", "labels", "attention_mask", "position_ids")
RECENT_STEPS = 4  # batches kept for a step that is requested again, for example under another plan
REMEMBERED_STEPS = 1024  # digests of earlier rows, for a save while later batches are prepared
MOST_HELD_OUT = 100_000  # rows or batches of an evaluation, which are held in memory


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row, padded to the plan's length. `document_tokens`: lengths of its documents and of its padding."""

    ids_T: torch.Tensor
    targets_T: torch.Tensor
    n_tokens: int
    document_tokens: tuple[int, ...]
    is_packed: bool  # several documents
    extras: Mapping[str, torch.Tensor]


def rows_of_batch(batch: Any, where: str, seq_len: int, inputs: Sequence[LossInput] = ()) -> list[TokenRow]:
    """Return the rows of a dict batch: `input_ids` and `labels`, (B, T) or ragged or one row, int32 or int64; optionally
    `attention_mask`, `position_ids`, and inputs of the loss by name. `labels[t]` belongs to `input_ids[t]`, -100 is ignored.
    DataError with `where` for a batch that does not fit."""
    if not isinstance(batch, Mapping):
        raise DataError(f"{where} is a {type(batch).__name__}; give dicts with input_ids and labels, or rows as a datasets.Dataset")
    extras = {row.name for row in inputs}
    columns_text, missing = ", ".join(map(str, batch)) or "nothing", [name for name in NAMES[:2] if batch.get(name) is None]
    if missing:
        how = "labels of -100 are ignored, and a copy of input_ids learns all" if missing == ["labels"] else "give dicts of tokens"
        raise DataError(f"{where} has no {missing[0]} (it has {columns_text}); {how}, or give rows as a datasets.Dataset")
    if unknown := [str(name) for name in batch if name not in NAMES and name not in extras]:
        raise DataError(f"{where} has {', '.join(unknown)[:120]}, which nothing reads; give {', '.join(NAMES)} alone")
    columns = {name: _rows(batch[name], f"{where}: {name}", name) for name in NAMES if batch.get(name) is not None}
    rows = list[TokenRow]()
    for i, ids_T in enumerate(columns["input_ids"]):
        row = {name: rows_T[i] if i < len(rows_T) else ids_T[:0] for name, rows_T in columns.items()}
        sizes = {name: f"{len(tokens_T)} {name}" for name, tokens_T in row.items()}
        if len({len(tokens_T) for tokens_T in row.values()}) > 1 or len({*map(len, columns.values())}) > 1:
            raise DataError(f"{where}: row {i} has {', '.join(sizes.values())}; give each token one of each")
        if not 0 < len(ids_T) <= seq_len:
            advice = "cut it, or plan with a longer --seq-len" if len(ids_T) else "leave it out"
            raise DataError(f"{where}: row {i} has {len(ids_T):,} tokens, and a sequence of the plan {seq_len:,}; {advice}")
        rows.append(_token_row(row, f"{where}: row {i}", seq_len, _extras(batch, inputs, i, len(ids_T), seq_len)))
    return rows


def _rows(value: Any, where: str, name: str) -> list[torch.Tensor]:
    """Return the rows of a column as int64 on the host: of a tensor, an array, or a list of rows or of one row's tokens."""
    try:
        if isinstance(value, Sequence) and not all(isinstance(item, int | np.integer) for item in value):
            tensors = [torch.as_tensor(item) for item in value]
        else:
            tensor = torch.as_tensor(value)
            tensors = [tensor] if tensor.ndim == 1 else list(tensor)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where} is no tensor, array or list of whole numbers; give one of int64") from None
    kinds = {torch.int32, torch.int64} | ({torch.bool, torch.uint8, torch.int8} if name == "attention_mask" else set())
    for tensor in tensors:
        if tensor.ndim != 1 or tensor.dtype not in kinds:
            shape = f"({', '.join(map(str, (len(tensors), *tensor.shape)))})"
            raise DataError(f"{where} is {shape} {tensor.dtype}; give rows by tokens, of int32 or int64")
    return [tensor.detach().to("cpu", torch.int64) for tensor in tensors]


def _extras(batch: Mapping[str, Any], inputs: Sequence[LossInput], i: int, n: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return the loss inputs of row `i`, of `n` tokens, on the host; one number per token is padded with zeros."""
    numbers = {row.name: torch.as_tensor(batch[row.name])[i].detach().cpu() for row in inputs if row.name in batch}
    return {name: F.pad(x, (0, seq_len - n)) if tuple(x.shape) == (n,) and n < seq_len else x for name, x in numbers.items()}


def _token_row(row: Mapping[str, torch.Tensor], where: str, seq_len: int, extras: Mapping[str, torch.Tensor]) -> TokenRow:
    """Return a row with shifted and padded targets, and its documents. DataError for padding that is not at the end, or positions
    that neither go on nor begin again at 0."""
    ids_T, labels_T = row["input_ids"], row["labels"]
    n = len(ids_T)
    if (mask_T := row.get("attention_mask")) is not None:
        n = int((mask_T == 1).sum())
        if not ((mask_T == 0) | (mask_T == 1)).all():
            raise DataError(f"{where}: its attention_mask is not 0 or 1; give packed documents position_ids that begin again at 0")
        if n == 0 or not mask_T[:n].all():
            raise DataError(f"{where}: its attention_mask has zeros before tokens; pad at the end (padding_side='right')")
        if (labels_T[n:] != UNSUPERVISED).any():
            raise DataError(f"{where}: labels of padding (attention_mask 0) would be learned; set them to {UNSUPERVISED}")
    starts = [0]
    if (positions_T := row.get("position_ids")) is not None:
        starts = torch.nonzero(positions_T[:n] == 0).flatten().tolist()
        edges = [*starts, n]
        expected = [torch.arange(stop - start) for start, stop in pairwise(edges)]
        if not starts or starts[0] or not torch.equal(torch.cat(expected), positions_T[:n]):
            raise DataError(f"{where}: its position_ids neither go on by 1 nor begin again at 0; leave them out, or number them")
    targets_T = torch.full((seq_len,), UNSUPERVISED)
    targets_T[: n - 1] = labels_T[1:n]
    documents = [stop - start for start, stop in zip(starts, [*starts[1:], n], strict=True)] + [seq_len - n] * (n < seq_len)
    return TokenRow(F.pad(ids_T, (0, seq_len - len(ids_T))), targets_T, n, tuple(documents), len(starts) > 1, extras)


def batch_of_rows(rows: Sequence[TokenRow]) -> Batch:
    """Return the batch of a step. Documents are isolated if a row has several."""
    ids_BT, targets_BT = torch.stack([row.ids_T for row in rows]), torch.stack([row.targets_T for row in rows])
    names = [name for name in rows[0].extras if all(name in row.extras for row in rows)]
    extras = {name: torch.stack([row.extras[name] for row in rows]) for name in names}
    if any(row.is_packed for row in rows):
        return Batch(ids_BT, targets_BT, tuple(row.document_tokens for row in rows), extras=extras)
    return Batch(ids_BT, targets_BT, n_tokens=tuple(row.n_tokens for row in rows), extras=extras)


@dataclass(slots=True, eq=False)
class DictBatches:
    """Batches of an iterable of dict batches, of any number of rows: a step takes the next `n_rows` rows. At its end the
    iterable is iterated again. A resumed run skips the rows of finished steps; a checkpoint holds their digest."""

    source: Iterable[Any]
    seq_len: int
    n_rows: int
    inputs: Sequence[LossInput] = ()
    _rows: Iterator[TokenRow] | None = field(default=None, repr=False)
    _next: int = 0  # step of the next batch from `_rows`
    _recent: dict[int, Batch] = field(default_factory=dict, repr=False)
    _digests: dict[int, bytes] = field(default_factory=lambda: {0: b""}, repr=False)  # step -> digest of all rows before it

    @property
    def name(self) -> str:
        return type(self.source).__qualname__

    def count_rows(self) -> int:
        """Return the rows of one iteration, which are validated."""
        return sum(
            len(rows_of_batch(batch, f"batch {n} of the {self.name}", self.seq_len, self.inputs))
            for n, batch in enumerate(self.source, 1)
        )

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, counted from 0. DataError if the iterable ends."""
        if step in self._recent:
            return self._recent[step]
        if self._rows is None or step < self._next:
            self._refuse_to_restart(step if self._next else 0)
            self._rows, self._next = self._all_rows(), 0
        try:
            while self._next <= step:
                self._take()
        except BaseException:
            self._rows = None  # a closed generator would end instead of raising the error again
            raise
        return self._recent[step]

    def _take(self) -> None:
        assert self._rows is not None, "set by `batch`"
        rows = list(islice(self._rows, self.n_rows))
        digest = hashlib.sha256(self._digests[self._next])
        for row in rows:
            documents = np.array([row.n_tokens, *row.document_tokens])
            for tensor in (row.ids_T, row.targets_T, torch.from_numpy(documents), *row.extras.values()):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self._recent[self._next] = batch_of_rows(rows)
        self._recent.pop(self._next - RECENT_STEPS, None)
        self._next += 1
        self._digests[self._next] = digest.digest()
        if self._next > REMEMBERED_STEPS:
            self._digests.pop(self._next - REMEMBERED_STEPS, None)

    def _all_rows(self) -> Iterator[TokenRow]:
        """Yield the rows of all batches, and begin again at their end."""
        while True:
            n_rows = 0
            for n, batch in enumerate(self.source, start=1):
                rows = rows_of_batch(batch, f"batch {n} of the {self.name}", self.seq_len, self.inputs)
                n_rows += len(rows)
                yield from rows
            if isinstance(self.source, Iterator) or not n_rows:
                raise DataError(f"the {self.name} ended after {n_rows:,} rows; give more, or fewer --steps")

    def _refuse_to_restart(self, step: int) -> None:
        """Raise CheckpointError if the source is an iterator and the next step is not its first."""
        if step and isinstance(self.source, Iterator):
            advice = "give a list, a DataLoader, or an object with an __iter__ that begins again"
            raise CheckpointError(f"a {self.name} cannot be started again, and the run continues after step {step}; {advice}")

    def position(self, step: int) -> dict[str, Any]:
        """Return the digest of all rows before `step`. CheckpointError if they were not read."""
        if step not in self._digests:
            raise CheckpointError(f"the rows before step {step} of the {self.name} are not read yet; save after that step")
        return {"rows": self._digests[step].hex()}

    def resume(self, step: int, position: Mapping[str, Any]) -> bool:
        """Skip to a step. Return True if the skipped rows are those of that position. CheckpointError for an iterator."""
        if step not in self._digests:
            self._refuse_to_restart(step)
            self._recent.clear()
            self.batch(step - 1)
        return position.get("rows") == self._digests[step].hex()
