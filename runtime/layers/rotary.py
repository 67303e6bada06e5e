"""Rotary tables with frequencies that depend on the length of a document: LongRoPE and dynamic NTK scaling.

transformers takes them from the largest position of a whole batch, padding included. Here each document has the tables of a model
that reads it alone.
"""

# T tokens of a sequence or a document
import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .transformers_patches import replaced_forwards


def length_dependent(module: nn.Module) -> list[nn.Module]:
    """Rotary embeddings within a module whose frequencies transformers computes again for another length."""
    return [part for part in module.modules() if any("dynamic" in kind or kind == "longrope" for kind in _kinds(part).values())]


def tables_by_document(parts: Sequence[nn.Module], documents: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Temporarily make these rotary embeddings return the tables of documents of these lengths, by sequence, e.g. ((5, 11), (16,)).
    Equal sequences share one row."""
    return replaced_forwards({part: partial(_by_document, part, documents) for part in parts})


def _kinds(part: nn.Module) -> dict[Any, str]:
    """Kinds of a rotary embedding by type of layer; {} for other modules."""
    kinds = getattr(part, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def _by_document(part: Any, documents: Sequence[Sequence[int]], x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
    # Documents that no kind stretches share the table of the longest one
    own = getattr(part.config, "rope_parameters", None) or {}
    limits = [(own if key is None else own[key]).get("original_max_position_embeddings") for key in _kinds(part)]
    least = min(n for n in (part.original_max_seq_len, *limits) if n is not None)
    lengths = {n for row in documents for n in row}
    shared = max((n for n in lengths if n <= least), default=0)

    def table(n: int) -> Any:
        """Tables of one document, by a copy of the module, because transformers changes it."""
        fresh = copy.deepcopy(part, {id(kept): kept for kept in (part.config, vars(part)["forward"])})
        del vars(fresh)["forward"]
        positions = torch.arange(n, device=position_ids.device).expand(*position_ids.shape[:-2], 1, n)
        return fresh(x, positions, *args, **options)

    tables = {n: table(n) for n in {shared if n <= least else n for n in lengths}}
    rows = documents if any([*row] != [*documents[0]] for row in documents) else documents[:1]

    def joined(*of_lengths: Tensor) -> Tensor:
        by_length = dict(zip(tables, of_lengths, strict=True))
        cut = [[by_length[shared if n <= least else n].narrow(-2, 0, n) for n in row] for row in rows]
        return torch.cat([torch.cat(row, -2) for row in cut], -3)

    return tree_map(joined, *tables.values())
