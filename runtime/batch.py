"""Batches: training tokens of a step."""

# B: sequences, T: positions
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .errors import DataError, StepError, user_code

UNSUPERVISED = -100  # the target that Hugging Face and torch's cross_entropy leave out


@dataclass(frozen=True, slots=True)
class Images:
    """Stored outputs of a vision tower for the B sequences of a batch, in host memory. `features[b]`: (image tokens of sequence b,
    D * (1 + n_added)), at the positions `places[b]` of the token of images: the input of the first layer, and addends to the output
    of the first `n_added` layers. `positions`: (B, 3, T), of models with one position per axis. `token_types`: (B, T),
    1 at an image, of models with attention in both directions within an image. `is_listed`: the model's tower returns a list.

    If the projector is trained, the first columns are its input, not its output. `shape`: of an image in that input, (patches, H),
    or of a row, (H,); `shifts[b]`: for each image token its row of the projector's output, less its number, if the model reorders
    them; `sizes[b]`: (images, 2), of a projector that reads them."""

    features: tuple[torch.Tensor, ...]
    places: tuple[torch.Tensor, ...]
    is_listed: bool
    n_added: int = 0
    positions: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    width: int = 0  # of an addend
    shape: tuple[int, ...] = ()
    shifts: tuple[torch.Tensor, ...] = ()
    sizes: tuple[torch.Tensor, ...] = ()

    def _by_sequence(self, change: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]) -> dict[str, Any]:
        """Fields with a tensor per sequence, changed."""
        return {name: change(getattr(self, name)) for name in ("features", "places", "shifts", "sizes")}

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Images":
        positions, types = (None if tensor is None else move(tensor) for tensor in (self.positions, self.token_types))
        return replace(self, positions=positions, token_types=types, **self._by_sequence(lambda rows: tuple(map(move, rows))))

    def part(self, rows: slice) -> "Images":
        positions, types = (None if tensor is None else tensor[rows] for tensor in (self.positions, self.token_types))
        return replace(self, positions=positions, token_types=types, **self._by_sequence(lambda tensors: tensors[rows]))

    def of_block(self, block: int, device: torch.device) -> torch.Tensor:
        """Features (image tokens, D) on the device: of the first layer's input, or of the projector's, for block 0, else addends to
        a layer's output."""
        end = self.features[0].shape[1] - (self.n_added - block) * self.width
        columns = slice(end - self.width if block else 0, end)
        return torch.cat([rows[:, columns].to(device, non_blocking=True) for rows in self.features])


def joined_images(parts: Sequence[Images | None], n_padding: int) -> Images | None:
    """Images of several batches, and of `n_padding` sequences without images after them; None for data without images."""
    if not (present := [images for images in parts if images is not None]):
        return None
    assert len(present) == len(parts), "batches of text have empty features"

    def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        rows = [tensor for tensor in tensors if tensor is not None]
        padding = [torch.zeros_like(tensor[:1]) for tensor in rows[:1]] * n_padding
        return torch.cat([*rows, *padding]) if rows else None

    positions, types = joined([images.positions for images in present]), joined([images.token_types for images in present])
    tensors = [images._by_sequence(lambda rows: rows) for images in present]
    rows = {name: tuple(row for fields in tensors for row in fields[name]) for name in tensors[0]}
    padded: dict[str, Any] = {name: (*part, *(part[0][:0],) * n_padding) if part else () for name, part in rows.items()}
    return replace(present[0], positions=positions, token_types=types, **padded)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step, both (B, T) int64: `targets[b, t]` is the token after `input_ids[b, t]`, or -100. `document_tokens`:
    lengths of packed documents, padding included: T in all. Attention and positions restart with each document. `n_tokens`: of each
    sequence without padding (None: T), for positions that depend on the length."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_tokens: tuple[tuple[int, ...], ...] | None = None
    n_counted: int | None = None  # supervised tokens if counted before: of the whole step for a part; on the host for a device
    n_answers: int | None = None  # of the whole step, if several share a sequence
    positions_BT: torch.Tensor | None = None  # of tokens in their documents, if computed: on a device
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # other inputs of the loss, (B,) or (B, T), by name
    n_tokens: tuple[int, ...] | None = None
    images: Images | None = None  # on the host

    @property
    def n_supervised(self) -> int:
        """Tokens of the step with a target."""
        return int((self.targets != UNSUPERVISED).sum()) if self.n_counted is None else self.n_counted

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        positions_BT = None if self.positions_BT is None else move(self.positions_BT)
        extras = {name: move(tensor) for name, tensor in self.extras.items()}
        return replace(self, input_ids=move(self.input_ids), targets=move(self.targets), positions_BT=positions_BT, extras=extras)

    def part(self, rows: slice) -> "Batch":
        lengths, n_tokens = self.document_tokens, self.n_tokens
        lengths, n_tokens = None if lengths is None else lengths[rows], None if n_tokens is None else n_tokens[rows]
        images = None if self.images is None else self.images.part(rows)
        return replace(self.moved(lambda tokens: tokens[rows]), document_tokens=lengths, n_tokens=n_tokens, images=images)

    @property
    def has_images(self) -> bool:
        return self.images is not None and any(len(rows) for rows in self.images.features)

    @property
    def padded_documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Lengths of each sequence and of its padding, e.g. ((5, 11), (16,)); None without `n_tokens`."""
        seq_len = self.input_ids.shape[1]
        return None if self.n_tokens is None else tuple((n, seq_len - n) if 0 < n < seq_len else (seq_len,) for n in self.n_tokens)


Batches = Callable[[int], Batch]  # step -> batch


class PreparedBatches:
    """Batches made before their use: one thread calls `prepare(step)`, another the object with the same step, which raises errors.
    Each is made once, one at a time. Batches unused by an interrupted run remain: a source that counts its calls loses none."""

    def __init__(self, make: Batches, move: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """`make` builds a batch in host memory, `move` copies it to the device on the calling thread."""
        self._make, self._move, self._making = make, move, threading.Lock()
        self._ready: dict[int, Batch | Exception] = {}
        self._last_used = -1  # step

    def prepare(self, step: int) -> None:
        with self._making:
            if step > self._last_used:  # else a lane was faster
                self._make_once(step)

    def _make_once(self, step: int) -> None:
        if step not in self._ready:
            try:
                self._ready[step] = self._make(step)
            except Exception as error:  # the previous step is in progress and shall end
                self._ready[step] = error

    def __call__(self, step: int) -> Batch:
        self._last_used = step  # before the pop, or `prepare` would make the batch again
        outcome = self._ready.pop(step, None)  # without the lock: a later batch may be in progress
        if outcome is None:
            with self._making:
                self._make_once(step)
            outcome = self._ready.pop(step)
        if isinstance(outcome, Exception):
            with user_code(f"the batch of step {step + 1}"):
                raise outcome if type(outcome) is not DataError else StepError(str(outcome))
        return self._move(outcome)


def positions_of(document_tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the position of each token in its document, (B, T), from 0."""
    return torch.stack([torch.cat([torch.arange(n) for n in of_sequence]) for of_sequence in document_tokens])
