"""How does each token of a packed sequence attend to its own document alone?

Without a mask, which would be as large as the square of a sequence: transformers' own attention is called for one document after
the other, on views of queries, keys and values. How long documents are is known on the host, so that no device is asked.
"""

# B sequences, T tokens of a sequence, H heads, E width of a head
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .meta_models import read_config
from .plan import Plan, Semantics
from .workload import ITEM_BYTES

BY_DOCUMENT = "sdpa_by_document"
TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")  # of the types that we know those with fused attention


@dataclass(frozen=True, slots=True)
class Documents:
    """Of which documents the sequences of a micro-batch are packed."""

    n_tokens: tuple[tuple[int, ...], ...]  # of each document of each sequence
    positions_BT: torch.Tensor  # where in its document a token stands; on the device


def positions_of(n_tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Where in its document each token stands: (B, T), from 0 in every document."""
    return torch.stack([torch.cat([torch.arange(n) for n in of_sequence]) for of_sequence in n_tokens])


def supports_documents(config: dict[str, Any], semantics: Semantics) -> str | None:
    """None where a model can attend by document; else why not, in a few words. WorkloadError for a model that cannot be built."""
    model_type = config.get("model_type")
    if model_type not in TYPES:
        return f"attention by document is not there for {str(model_type)[:40]} models, whose attention is not a fused one"
    if semantics.attention != "sdpa":
        return f"attention by document needs fused attention, and the plan says {semantics.attention}"
    as_read = vars(read_config(config))
    window, layers = as_read.get("sliding_window"), as_read.get("layer_types")
    slides = isinstance(window, int) and (not isinstance(layers, list) or "sliding_attention" in layers)
    if slides and window < semantics.seq_len:
        return (
            f"attention by document is not there for windows: this model's is of {window} tokens, a sequence of {semantics.seq_len}"
        )
    return None


def document_bytes(plan: Plan) -> int:
    """Device memory that documents take at most beyond what a plan books.

    Of each layer under `keep`, for each micro-batch of a group: what attention made, which autograd keeps a second time, as the
    results of its documents and joined; and the cosines and sines of positions.
    """
    n_elements = 0
    for b in plan.policy.keep_blocks:
        if (attention := plan.workload.blocks[b].attention) is not None:
            n_elements += attention.n_sequences * attention.seq_len * attention.head_dim * (attention.n_heads + 2)
    return plan.policy.group_micro_batches * n_elements * ITEM_BYTES[plan.semantics.compute_dtype]


def _by_document(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    document_tokens: tuple[tuple[int, ...], ...] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, (B, H, T, E) to (B, T, H, E). Without documents it is transformers' own."""
    if document_tokens is None:
        return sdpa_attention_forward(module, query_BHTE, key_BHTE, value_BHTE, attention_mask, **others)
    attend: Any = sdpa_attention_forward
    one_each = [1] * len(document_tokens)
    sequences = zip(*(_split(x, one_each, 0) for x in (query_BHTE, key_BHTE, value_BHTE)), strict=True)
    done = []
    for n_tokens, sequence in zip(document_tokens, sequences, strict=True):
        parts = zip(*(_split(x, n_tokens, 2) for x in sequence), strict=True)
        done.append(_joined([attend(module, *part, None, **others)[0] for part in parts], 1))
    return _joined(done, 0), None


def _split(x: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    """Parts of a tensor. Not slices: the gradient of each would be as large as what it was cut from."""
    return x.split(list(sizes), dim) if len(sizes) > 1 else (x,)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


AttentionInterface.register(BY_DOCUMENT, _by_document)
AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)  # for sequences that are not packed
