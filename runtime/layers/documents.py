"""Attention by document: each token of a packed sequence attends to its own document alone.

There is no mask, which would be as large as the square of a sequence: torch's fused attention is called for one document after the
other, on views of queries, keys and values, and its results go to their places among the sequence's. So autograd keeps what it
keeps of attention to whole sequences, and no tensor whose size a document's length decides outlives the document's turn. How long
documents are is known on the host, so that no device is asked.
"""

# B sequences, T tokens of a sequence or a document, H heads, E width of a head
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from runtime.plan import Semantics
from runtime.plan.footprint import CUDA_HEAD_ELEMENTS, DOCUMENT_TYPES, padded_tokens

from .meta_models import read_config

BY_DOCUMENT = "sdpa_by_document"


def supports_documents(config: dict[str, Any], semantics: Semantics) -> str | None:
    """None where a model can attend by document; else why not, in a few words. WorkloadError for a model that cannot be built."""
    model_type = config.get("model_type")
    if model_type not in DOCUMENT_TYPES:
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


def _by_document(
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BHTE: Tensor,
    value_BHTE: Tensor,
    attention_mask: Tensor | None,
    document_tokens: tuple[tuple[int, ...], ...] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, (B, H, T, E) to (B, T, H, E). Without documents it is transformers' own."""
    given = query_BHTE, key_BHTE, value_BHTE
    others |= {"dropout": dropout, "scaling": scaling}
    if document_tokens is None:
        return sdpa_attention_forward(module, *given, attention_mask, **others)
    if dropout == 0.0 and _is_fused(*given):
        n_of_all = [n for of_sequence in document_tokens for n in of_sequence]
        return _Attention.apply(*given, n_of_all, scaling), None  # type: ignore[no-untyped-call]
    attend: Any = sdpa_attention_forward
    done = []
    # Parts are not slices: the gradient of each would be as large as what it was cut from
    for n_tokens, *sequence in zip(document_tokens, *(x.split(1) for x in given), strict=True):
        parts = zip(*(x.split(list(n_tokens), 2) for x in sequence), strict=True)
        done.append(torch.cat([attend(module, *part, None, **others)[0] for part in parts], 1))
    return torch.cat(done), None


def _is_fused(query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> bool:
    """Whether torch has the kernel that is called for each document: on CUDA also where it would rather take cuDNN's."""
    if query_BHTE.is_cuda and query_BHTE.shape[-1] % CUDA_HEAD_ELEMENTS:
        return False
    has_groups = query_BHTE.shape[1] != key_BHTE.shape[1]
    choice = torch._fused_sdp_choice(query_BHTE, key_BHTE, value_BHTE, None, 0.0, True, enable_gqa=has_groups)
    return choice in (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)


class _Attention(torch.autograd.Function):
    """Fused attention to each document: one node of autograd, which saves what attention to whole sequences saves."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, n_tokens: list[int], scale: float | None
    ) -> Tensor:
        given = query_BHTE, key_BHTE, value_BHTE
        out_BTHE, sums_BTH = torch.ops.penstock.attention_by_document(*given, n_tokens, scale)
        ctx.n_tokens, ctx.scale = n_tokens, scale
        ctx.save_for_backward(*given, out_BTHE, sums_BTH)
        return out_BTHE  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *given, out_BTHE, sums_BTH = ctx.saved_tensors
        inputs = (gradients[0].transpose(1, 2), *given, out_BTHE.transpose(1, 2), sums_BTH.transpose(1, 2))
        found = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in given]
        for row, tokens, n_computed in _turns(given[0], ctx.n_tokens):
            places = [x[row, :, tokens] for x in found]
            _put(places, _attend_backward([_padded(x[row, :, tokens], n_computed) for x in inputs], ctx.scale))
        return (*found, None, None)


def _attention_by_document(
    query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, n_tokens: list[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of documents of `n_tokens`, in the order of the sequences: results (B, T, H, E) and the logarithms of its sums
    (B, T, H). One call of a library, so that what is remembered of a layer's forward holds both of them whole."""
    inputs, (n_sequences, n_heads, seq_len, width) = (query_BHTE, key_BHTE, value_BHTE), query_BHTE.shape
    out_BTHE = query_BHTE.new_empty(n_sequences, seq_len, n_heads, width)
    sums_BTH = query_BHTE.new_empty(n_sequences, seq_len, n_heads, dtype=torch.float32)
    for row, tokens, n_computed in _turns(query_BHTE, n_tokens):
        places = [x[row, tokens].transpose(1, 2) for x in (out_BTHE, sums_BTH)]
        _put(places, _attend([_padded(x[row, :, tokens], n_computed) for x in inputs], scale))
    return out_BTHE, sums_BTH


def _turns(query_BHTE: Tensor, n_tokens: list[int]) -> Iterator[tuple[slice, slice, int]]:
    """Of each document its sequence, its tokens there, and how many are computed for it.

    The library with which torch multiplies bf16 on processors compiles and keeps something for every shape: so there a document is
    padded to its length class. A document that fills its sequence is the sequence.
    """
    seq_len, at = query_BHTE.shape[2], 0
    compiles = query_BHTE.device.type == "cpu" and query_BHTE.dtype is not torch.float32
    for n in n_tokens:
        row, first = divmod(at, seq_len)
        yield slice(row, row + 1), slice(first, first + n), padded_tokens(n) if compiles and n < seq_len else n
        at += n


def _put(outputs: list[Tensor], made: Sequence[Tensor]) -> None:
    """The document's part of what was made for its length class."""
    for place, x in zip(outputs, made, strict=True):
        place.copy_(x[:, :, : place.shape[2]])


def _attend(inputs: Sequence[Tensor], scale: float | None) -> Sequence[Tensor]:
    """Torch's fused attention to one document, of its queries, keys and values: results (B, H, T, E) and the logarithms of sums
    (B, H, T). It is causal: no token sees the padding after it, and what padding gets is not read."""
    aten: Any = torch.ops.aten
    if inputs[0].is_cuda:
        made = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=scale)[:2]
    else:
        made = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)
    return made  # type: ignore[no-any-return]


def _attend_backward(inputs: Sequence[Tensor], scale: float | None) -> Sequence[Tensor]:
    """The gradients of queries, keys and values, of the gradient of results, the three themselves, results and sums."""
    aten: Any = torch.ops.aten
    *others, sums_BHT = inputs
    if sums_BHT.is_cuda:
        n_tokens, no_random_numbers = sums_BHT.shape[2], sums_BHT.new_empty(0, dtype=torch.int64)
        rest = sums_BHT.contiguous(), None, None, n_tokens, n_tokens, 0.0, True, no_random_numbers, no_random_numbers
        found = aten._scaled_dot_product_flash_attention_backward(*others, *rest, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True, scale=scale)
    return found  # type: ignore[no-any-return]


def _padded(x: Tensor, n_tokens: int) -> Tensor:
    """With zeros after its tokens: (1, H, T, E), or (1, H, T)."""
    n_more = n_tokens - x.shape[2]
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, n_more)) if n_more else x


LIBRARY = torch.library.Library("penstock", "DEF")
LIBRARY.define("attention_by_document(Tensor query, Tensor key, Tensor value, int[] n_tokens, float? scale) -> (Tensor, Tensor)")
LIBRARY.impl("attention_by_document", _attention_by_document, "CompositeExplicitAutograd")
AttentionInterface.register(BY_DOCUMENT, _by_document)
AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)  # for sequences that are not packed
