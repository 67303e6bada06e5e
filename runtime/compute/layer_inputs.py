"""What is a layer passed besides its input?"""

# B sequences, T tokens, D width
from typing import Any

import torch
from torch.func import functional_call

from runtime.layers.documents import PackedDocuments
from runtime.layers.views import Weights

from .blocks import LayerInputs, Templates

EMBEDDING = "model.embed_tokens."


class NotedInputs:
    """Masks and positions, as the model's own forward made them: they are noted with the embedding, and asked for by each layer.

    They depend on the shape alone where nothing is padded on the left or packed. The model's own forward makes them again each time
    and looks at them from the host, which on a GPU waits for all that was issued. So it runs for the first two micro-batches of a
    shape; if both had the same, and nothing was done to the embedding but look it up, looking it up is all that the others need.

    Where sequences are packed of documents, positions are each micro-batch's own. What is made of them is made for each layer:
    kept for all micro-batches of a group it would be memory that no plan has set aside.
    """

    def __init__(self, templates: Templates) -> None:
        self.templates = templates
        self.first: dict[int, list[LayerInputs]] = {}  # by sequences: what the first such micro-batch's layers were passed
        self.alike: set[int] = set()  # of which the second one's were the same, and its embedding no more than the weight's rows
        self.inputs: dict[int, list[LayerInputs]] = {}  # by micro-batch
        self.documents: dict[int, PackedDocuments | None] = {}  # by micro-batch

    def embed(self, weights: Weights, m: int, tokens_BT: torch.Tensor, documents: PackedDocuments | None = None) -> torch.Tensor:
        """The first layer's input; what layers are passed besides is noted."""
        self.documents[m], n_sequences = documents, len(tokens_BT)
        if n_sequences in self.alike:
            self.inputs[m] = self.first[n_sequences]
            return self._looked_up(weights, tokens_BT)
        hidden_BTD, inputs = self.templates.embed(weights, tokens_BT)
        first = self.first.setdefault(n_sequences, inputs)
        if first is not inputs and _same(inputs, first):
            inputs = first
            if torch.equal(hidden_BTD, self._looked_up(weights, tokens_BT)):
                self.alike.add(n_sequences)
        self.inputs[m] = inputs
        return hidden_BTD

    def _looked_up(self, weights: Weights, tokens_BT: torch.Tensor) -> torch.Tensor:
        embedding: Any = self.templates.body.embed_tokens
        short = {name.removeprefix(EMBEDDING): weight for name, weight in weights.items()}
        return functional_call(embedding, short, (tokens_BT,))  # type: ignore[no-any-return]

    def of(self, block: int, m: int) -> LayerInputs:
        """What layer number `block` is passed for the micro-batch that was embedded last under this number."""
        inputs, documents = self.inputs[m], self.documents[m]
        return inputs[block - 1] if documents is None else self.templates.by_document(inputs[block - 1], documents)


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
