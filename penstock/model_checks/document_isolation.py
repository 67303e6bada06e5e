"""Check of document isolation: a cut-down model computes equal results for documents packed and alone.

A layer of each kind runs on random numbers. Its output for a document must depend neither on other documents nor on the offset in
the sequence.
"""

# B sequences, T tokens, D width
import gc
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.batch import positions_of
from penstock.runtime.errors import WorkloadError
from penstock.runtime.layers.documents import embed_packed, isolated_documents
from penstock.runtime.layers.layer_chain import Call, kind_of, trace
from penstock.runtime.layers.meta_models import meta_model, read_config
from penstock.runtime.layers.model_parts import ModelParts
from penstock.runtime.plan import Semantics

from .cut_down import cut_down

DOCUMENTS = ((5, 11, 1), (17,))  # lengths in two sequences, above and below the window of cut-down models
TOLERANCE = 1e-5  # relative to the largest result: fp32 rounding of differently shaped products; leaks are 1,000 times larger


def supports_documents(config: dict[str, Any], semantics: Semantics) -> str | None:
    """Reason why a model does not isolate packed documents; None if it does. WorkloadError for a model that cannot be built."""
    return _reason(json.dumps(config, sort_keys=True, default=str), semantics.attention, semantics.seq_len)


@lru_cache(maxsize=64)
def _reason(config: str, attention: str, seq_len: int) -> str | None:
    model_type = str(json.loads(config).get("model_type"))[:40]
    read_config(json.loads(config))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            why = _Check(json.loads(config), attention, seq_len).reason()
    except WorkloadError as error:
        why = str(error)
    except Exception as error:  # any failure of the model's code with unusual positions, masks and sizes
        why = f"a cut-down model could not run ({' '.join((str(error) or type(error).__name__).split())[:120]})"
    gc.collect()  # models have reference cycles
    return why and f"{model_type} models do not isolate the documents of a packed sequence: {why}"


class _Check:
    """Comparison of documents packed and alone in a cut-down model, with random weights created when needed."""

    def __init__(self, config: dict[str, Any], attention: str, seq_len: int) -> None:
        small = cut_down(config, seq_len=seq_len)
        self.seq_len = seq_len
        semantics: Any = Semantics(1, 1, 1, compute_dtype="fp32", attention=attention)  # type: ignore[arg-type]
        self.parts = ModelParts(meta_model(small, semantics))
        self.chain = trace(self.parts)
        self.parts.make_buffers("cpu", of_layers=True)
        self.parts.model.eval()
        self.generator = torch.Generator().manual_seed(0)
        self.weights: dict[int, nn.Parameter] = {}  # by id, because tied weights have two owners
        for part in self.parts.outside():
            self._initialise(part)
        self.n_tokens = sum(DOCUMENTS[0])
        n_ids = self.parts.head.weight.shape[0]
        self.tokens_BT = torch.randint(n_ids, (len(DOCUMENTS), self.n_tokens), generator=self.generator)

    def _initialise(self, part: nn.Module) -> None:
        """Replace meta weights by random ones."""
        for name, p in part._parameters.items():
            if p is not None and id(p) not in self.weights:
                random = torch.randn(p.shape, generator=self.generator)
                self.weights[id(p)] = nn.Parameter(random * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + random / 4)
            if p is not None:
                part._parameters[name] = self.weights[id(p)]

    def reason(self) -> str | None:
        if not self._positions_are_per_document():
            return "positions depend on the lengths of other documents"
        plain = self.chain.embed(None, self.tokens_BT)[1]
        packed_BTD, packed = embed_packed(self.chain, None, self.tokens_BT, positions_of(DOCUMENTS), plain, DOCUMENTS)
        separate = [(place, *self.chain.embed(None, self.tokens_BT[place])) for place in _document_slices()]
        if not all(_is_close(packed_BTD[place], hidden_BTD) for place, hidden_BTD, _ in separate):
            return "its prologue does not separate documents by positions"
        kinds = {kind_of(layer, call): i for i, (layer, call) in enumerate(zip(self.parts.layers, plain, strict=True))}
        for i in kinds.values():
            if not self._is_isolated(i, packed[i], [(place, calls[i]) for place, _, calls in separate], packed_BTD.shape):
                return f"{type(self.parts.layers[i]).__name__} mixes tokens outside of transformers' attention interface"
        return None

    def _positions_are_per_document(self) -> bool:
        """True if layers get equal tensors for the first positions with and without a sequence of the last positions."""
        last, first, tokens = [max(0, self.seq_len - 2), self.seq_len - 1], [0, 1], torch.zeros(2, 2, dtype=torch.long)
        both, alone = (
            embed_packed(self.chain, None, t, torch.tensor(rows), self.chain.embed(None, t)[1], ())[1]
            for rows in ([last, first], [first])
            for t in [tokens[: len(rows)]]
        )
        pairs = zip((t for call in both for t in call.leaves), (t for call in alone for t in call.leaves), strict=True)
        return all(_is_close(_last_row(b, a), a) for b, a in pairs if isinstance(a, Tensor) and b.shape != a.shape)

    def _is_isolated(self, i: int, packed: Call, separate: list[tuple[Any, Call]], shape: Sequence[int]) -> bool:
        """True if a layer's output for each packed document equals its output for the document alone."""
        layer = self.parts.layers[i]
        for part in layer.modules():
            self._initialise(part)
        for held in layer.buffers():  # values of checkpoint files are missing
            held.nan_to_num_(0.5)
        x_BTD = torch.randn(shape, generator=self.generator)
        with isolated_documents(packed, self.parts.attention, packed.window(self.n_tokens)), _RejectPositions(self.n_tokens):
            out_BTD = packed.run(layer, x_BTD)
        return all(_is_close(out_BTD[place], call.run(layer, x_BTD[place])) for place, call in separate)


class _RejectPositions(TorchDispatchMode):
    """WorkloadError if a layer computes positions of the sequence itself, by `arange`."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_tokens = n_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "arange" and out.numel() == self.n_tokens:
            raise WorkloadError("a layer computes positions from offsets in the sequence")
        return out


def _document_slices() -> Iterator[tuple[slice, slice]]:
    for row, lengths in enumerate(DOCUMENTS):
        for n, end in zip(lengths, accumulate(lengths), strict=True):
            yield slice(row, row + 1), slice(end - n, end)


def _last_row(both: Tensor, alone: Tensor) -> Tensor:
    """Last row of the axis of sequences: the one where shapes differ. GLM-4V's rotary tables are (3, B, T, E)."""
    axis = next(i for i, (n, m) in enumerate(zip(both.shape, alone.shape, strict=True)) if n != m)
    return both.narrow(axis, both.shape[axis] - 1, 1)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.dtype is torch.bool:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())
