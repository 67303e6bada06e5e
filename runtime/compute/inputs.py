"""Inputs of blocks besides weights: a step's tokens, and what the model's own forward passes to its layers."""

# B sequences, T tokens, D width
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.func import functional_call

from runtime.batch import Batch, positions_of
from runtime.layers.views import Weights

from .blocks import LayerInputs, Templates

EMBEDDING = "model.embed_tokens."


class Inputs:
    """Tokens, which are asked for once a step; and masks and positions, noted with the embedding and asked for by each layer.

    The model's own forward makes masks and positions and looks at them from the host, which on a GPU waits for all that was issued.
    It runs for the first two micro-batches of a shape; if both had the same, and nothing was done to the embedding but look it up,
    looking it up is all that the others need. Positions of packed documents are each micro-batch's own, and made for each layer:
    kept for a group they would be memory that no plan has set aside.
    """

    def __init__(self, templates: Templates, batches: Callable[[int], Batch]) -> None:
        """`batches` gives a step's tokens on the device."""
        self.templates, self._batches = templates, batches
        self._micro_batch = templates.semantics.micro_batch
        self._batch: tuple[int, Batch] | None = None  # of the step at work
        self.first: dict[int, list[LayerInputs]] = {}  # by sequences: what the first such micro-batch's layers were passed
        self.alike: set[int] = set()  # of which the second one's were the same, and its embedding no more than the weight's rows
        self.passed: dict[int, list[LayerInputs]] = {}  # by micro-batch
        self.packed: dict[int, Batch | None] = {}  # by micro-batch, where its sequences are packed

    def forget(self) -> None:
        """Drop the step at work."""
        self._batch = None

    def begin(self, step: int) -> Batch | None:
        """The batch of a step that begins now; None if it has begun."""
        if self._batch is not None and self._batch[0] == step:
            return None
        self._batch = (step, self._batches(step))
        return self._batch[1]

    def of(self, m: int) -> Batch:
        """The sequences of a micro-batch of the step that has begun."""
        assert self._batch is not None
        return self._batch[1].part(slice(m * self._micro_batch, (m + 1) * self._micro_batch))

    def embed(self, weights: Weights, m: int) -> torch.Tensor:
        """The first layer's input; what layers are passed besides is noted."""
        batch = self.of(m)
        if batch.document_tokens is not None and batch.positions_BT is None:
            batch = replace(batch, positions_BT=positions_of(batch.document_tokens))
        tokens_BT, n_sequences = batch.input_ids, len(batch.input_ids)
        self.packed[m] = batch if batch.document_tokens is not None else None
        if n_sequences in self.alike:
            self.passed[m] = self.first[n_sequences]
            return self._looked_up(weights, tokens_BT)
        hidden_BTD, passed = self.templates.embed(weights, tokens_BT)
        first = self.first.setdefault(n_sequences, passed)
        if first is not passed and _same(passed, first):
            passed = first
            if torch.equal(hidden_BTD, self._looked_up(weights, tokens_BT)):
                self.alike.add(n_sequences)
        self.passed[m] = passed
        return hidden_BTD

    def _looked_up(self, weights: Weights, tokens_BT: torch.Tensor) -> torch.Tensor:
        short = {name.removeprefix(EMBEDDING): weight for name, weight in weights.items()}
        return functional_call(self.templates.body.embed_tokens, short, (tokens_BT,))  # type: ignore[no-any-return]

    def of_layer(self, block: int, m: int) -> LayerInputs:
        """What layer number `block` is passed for the micro-batch that was embedded last under this number."""
        passed, packed = self.passed[m][block - 1], self.packed[m]
        return passed if packed is None else self.templates.by_document(passed, packed)


def _same(new: Any, old: Any) -> bool:
    """Whether two layers are passed the same."""
    match new, old:
        case torch.Tensor(), torch.Tensor():
            return new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
        case dict(), dict():
            return new.keys() == old.keys() and all(_same(new[key], old[key]) for key in new)
        case ((list() | tuple()), (list() | tuple())):
            return len(new) == len(old) and all(map(_same, new, old))
    return bool(new is old or (type(new) is type(old) and new == old))
