"""What does a step train on?"""

from dataclasses import dataclass, field

import torch

# B sequences of a batch, T positions of a sequence

UNSUPERVISED = -100  # the target that Hugging Face and torch's cross_entropy leave out


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, both (B, T) int64: `targets[b, t]` is the token after `input_ids[b, t]`, or -100.

    `document_tokens`, where given, are the lengths of the documents of which each sequence is packed, padding included: T in all.
    A token then attends to its own document alone, and positions begin at 0 in each.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_tokens: tuple[tuple[int, ...], ...] | None = None
    n_of_all: int | None = None  # supervised tokens of the step, where this is a rank's part of it

    @property
    def n_supervised(self) -> int:
        """Tokens of the step that are to be predicted."""
        return int((self.targets != UNSUPERVISED).sum()) if self.n_of_all is None else self.n_of_all


@dataclass(frozen=True, slots=True)
class UploadedBatch(Batch):
    """A batch on the device. How many targets are supervised was counted before.

    `positions` are those of tokens in their documents, and mean nothing where there are none.
    """

    n_counted: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def n_supervised(self) -> int:
        return self.n_counted
