"""Attention within each document of packed sequences.

The model's attention is called per document, on views of queries, keys and values, with the mask of a sequence of that length.
Without masks, fused attention saves the same tensors as for whole sequences, and frees temporary tensors of document length before
the next document. Document lengths are on the host, so no call synchronises with the device.
"""

# B sequences, T tokens of a sequence or a document, H heads, E width of a head
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.footprint import CUDA_HEAD_ELEMENTS

from .kernels import FusedAttention, is_plain, with_sinks
from .layer_chain import Call, Documents, LayerChain, is_view_of_all
from .recompute import unrecorded
from .transformers_patches import ALL_ATTENTION_FUNCTIONS, EAGER_ATTENTION, replaced_attention, types_argument
from .views import Weights


@dataclass(frozen=True, slots=True)
class _Packed:
    """Document lengths; masks and window of a layer. `attention`: registered function; None: the module's eager attention.
    `has_own_masks`: a mask's rows and columns are those of the sequence, else those of a document at its start."""

    n_tokens: Documents
    masks: tuple[Tensor, ...]
    window: int | None
    attention: Any
    has_own_masks: bool


def isolated_documents(call: Call, attention: str, window: int | None) -> AbstractContextManager[None]:
    """Patch transformers' function `attention` to run per document if the call has packed sequences. `window`: in tokens."""
    if call.documents is None:
        return nullcontext()
    masks = tuple(t for t in call.leaves if isinstance(t, Tensor) and t.dim() == 4)
    packed = _Packed(call.documents, masks, window, ALL_ATTENTION_FUNCTIONS.get(attention), call.has_own_masks)
    return replaced_attention(attention, partial(_by_document, packed))


def embed_packed(
    chain: LayerChain,
    weights: Weights | None,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    plain: Sequence[Call],
    documents: Documents,
    **options: Any,
) -> tuple[Tensor, list[Call]]:
    """First layer's input (B, T, D) of packed sequences, and each layer's call. Positions count from each document's start. Masks
    are those of unpacked sequences, taken from `plain`: the model gets a placeholder, which transformers passes on unchanged.
    `options`: the model's arguments for images."""
    no_mask = torch.zeros(1, 1, 1, 1, device=tokens_BT.device)
    hidden_BTD, calls = chain.embed(weights, tokens_BT, documents, position_ids=positions_BT, attention_mask=no_mask, **options)
    if [len(call.leaves) for call in calls] != [len(call.leaves) for call in plain]:
        raise WorkloadError("its layers get other arguments if positions are passed")
    has_own_masks = types_argument(chain.parts.whole_body) in options
    for i, (call, unpacked) in enumerate(zip(calls, plain, strict=True)):
        leaves = tuple(p if is_view_of_all(t, no_mask) else t for t, p in zip(call.leaves, unpacked.leaves, strict=True))
        calls[i] = replace(call, leaves=leaves, documents=documents, has_own_masks=has_own_masks)
    return hidden_BTD, calls


def _by_document(
    packed: _Packed,
    module: torch.nn.Module,
    query_BHTE: Tensor,
    key_BHTE: Tensor,
    value_BHTE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' registry, (B, H, T, E) to (B, T, H, E)."""
    operands = query_BHTE, key_BHTE, value_BHTE
    mask_pointers = {mask.untyped_storage().data_ptr() for mask in packed.masks}  # a layer may pass a view
    if attention_mask is not None and attention_mask.untyped_storage().data_ptr() not in mask_pointers:
        raise WorkloadError("its attention computes other masks")
    lengths = [n for of_sequence in packed.n_tokens for n in of_sequence]
    if packed.attention is with_sinks:
        return with_sinks(module, *operands, attention_mask, dropout, scaling, n_tokens=lengths, **options)  # type: ignore[no-any-return]
    n_unmasked = 0  # longest document that needs no mask other than the causal one
    can_be_causal = packed.attention is not None and not packed.has_own_masks
    if can_be_causal and (attention_mask is None or attention_mask.dtype is torch.bool):
        n_unmasked = query_BHTE.shape[2] if attention_mask is None or packed.window is None else packed.window
    if max(lengths) <= n_unmasked and is_plain(dropout, options) and _is_fused(*operands):
        return FusedAttention.apply(*operands, lengths, scaling), None  # type: ignore[no-untyped-call]
    attend = packed.attention or type(module).forward.__globals__[EAGER_ATTENTION]
    rows = list[Tensor]()
    # `split`, because the gradient of each slice would have the size of the whole tensor
    for row, (n_tokens, *sequence) in enumerate(zip(packed.n_tokens, *(x.split(1) for x in operands), strict=True)):
        outputs, first = [], 0
        for part in zip(*(x.split(list(n_tokens), 2) for x in sequence), strict=True):
            n, mask = part[0].shape[2], attention_mask
            if mask is not None:
                place = slice(first, first + n)
                mask = None if n <= n_unmasked else mask[row if len(mask) > 1 else 0, None, ..., place, place]
            first += n if packed.has_own_masks else 0
            with unrecorded():  # recomputed, because no slot fits many small results
                outputs.append(attend(module, *part, mask, dropout=dropout, scaling=scaling, **options)[0])
        rows.append(torch.cat(outputs, 1))
    return torch.cat(rows), None


def _is_fused(query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor) -> bool:
    """True if FlashAttention takes these operands; on CUDA also if PyTorch prefers cuDNN."""
    if query_BHTE.shape[-1] != value_BHTE.shape[-1] or (query_BHTE.is_cuda and query_BHTE.shape[-1] % CUDA_HEAD_ELEMENTS):
        return False
    has_groups = query_BHTE.shape[1] != key_BHTE.shape[1]
    choice = torch._fused_sdp_choice(query_BHTE, key_BHTE, value_BHTE, None, 0.0, True, enable_gqa=has_groups)
    return choice in (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)
