"""Attention within each document of packed sequences.

The model's attention is called per document, on views of queries, keys and values, with the mask of a sequence of that length.
Without masks, fused attention saves the same tensors as for whole sequences, and frees temporary tensors of document length before
the next document. Document lengths are on the host, so no call synchronises with the device.
"""

# B sequences, T tokens of a sequence or a document, H heads, E width of a head
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.footprint import CUDA_HEAD_ELEMENTS, padded_tokens

from .layer_chain import Call, Documents, LayerChain, is_view_of_all
from .recompute import unrecorded
from .transformers_patches import ALL_ATTENTION_FUNCTIONS, EAGER_ATTENTION, replaced_attention
from .views import Weights


@dataclass(frozen=True, slots=True)
class _Packed:
    """Document lengths; masks and window of a layer. `attention`: registered function; None: the module's eager attention."""

    n_tokens: Documents
    masks: tuple[Tensor, ...]
    window: int | None
    attention: Any


def isolated_documents(call: Call, attention: str, window: int | None) -> AbstractContextManager[None]:
    """Patch transformers' function `attention` to run per document if the call has packed sequences. `window`: in tokens."""
    if call.documents is None:
        return nullcontext()
    masks = tuple(t for t in call.leaves if isinstance(t, Tensor) and t.dim() == 4)
    packed = _Packed(call.documents, masks, window, ALL_ATTENTION_FUNCTIONS.get(attention))
    return replaced_attention(attention, partial(_by_document, packed))


def embed_packed(
    chain: LayerChain, weights: Weights | None, tokens_BT: Tensor, positions_BT: Tensor, plain: Sequence[Call], documents: Documents
) -> tuple[Tensor, list[Call]]:
    """First layer's input (B, T, D) of packed sequences, and each layer's call. Positions count from each document's start. Masks
    are those of unpacked sequences, taken from `plain`: the model gets a placeholder, which transformers passes on unchanged."""
    no_mask = torch.zeros(1, 1, 1, 1, device=tokens_BT.device)
    hidden_BTD, calls = chain.embed(weights, tokens_BT, documents, position_ids=positions_BT, attention_mask=no_mask)
    if [len(call.leaves) for call in calls] != [len(call.leaves) for call in plain]:
        raise WorkloadError("its layers get other arguments if positions are passed")
    for i, (call, unpacked) in enumerate(zip(calls, plain, strict=True)):
        leaves = tuple(p if is_view_of_all(t, no_mask) else t for t, p in zip(call.leaves, unpacked.leaves, strict=True))
        calls[i] = replace(call, leaves=leaves, documents=documents)
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
    n_unmasked = 0  # longest document that needs no mask other than the causal one
    if packed.attention is not None and (attention_mask is None or attention_mask.dtype is torch.bool):
        n_unmasked = query_BHTE.shape[2] if attention_mask is None or packed.window is None else packed.window
    is_plain = options.get("is_causal", True) and all(options.get(name) is None for name in ("position_bias", "softcap"))
    if max(lengths) <= n_unmasked and is_plain and dropout == 0.0 and _is_fused(*operands):
        return _Attention.apply(*operands, lengths, scaling), None  # type: ignore[no-untyped-call]
    attend = packed.attention or type(module).forward.__globals__[EAGER_ATTENTION]
    rows = list[Tensor]()
    # `split`, because the gradient of each slice would have the size of the whole tensor
    for row, (n_tokens, *sequence) in enumerate(zip(packed.n_tokens, *(x.split(1) for x in operands), strict=True)):
        outputs = []
        for part in zip(*(x.split(list(n_tokens), 2) for x in sequence), strict=True):
            n, mask = part[0].shape[2], attention_mask
            if mask is not None:
                mask = None if n <= n_unmasked else mask[row if len(mask) > 1 else 0, None, ..., :n, :n]
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


class _Attention(torch.autograd.Function):
    """Fused attention per document in one autograd node, which saves the same tensors as attention of whole sequences."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, n_tokens: list[int], scale: float | None
    ) -> Tensor:
        operands = query_BHTE, key_BHTE, value_BHTE
        out_BTHE, sums_BTH = torch.ops.penstock.attention_by_document(*operands, n_tokens, scale)
        ctx.n_tokens, ctx.scale = n_tokens, scale
        ctx.save_for_backward(*operands, out_BTHE, sums_BTH)
        return out_BTHE  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *operands, out_BTHE, sums_BTH = ctx.saved_tensors
        inputs = (gradients[0].transpose(1, 2), *operands, out_BTHE.transpose(1, 2), sums_BTH.transpose(1, 2))
        results = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in operands]
        for row, tokens, n_computed in _document_slices(operands[0], ctx.n_tokens):
            targets = [x[row, :, tokens] for x in results]
            _copy_results(targets, _attend_backward([_padded(x[row, :, tokens], n_computed) for x in inputs], ctx.scale))
        return (*results, None, None)


def _attention_by_document(
    query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, n_tokens: list[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, H, E) and log-sum-exps (B, T, H). A single library call, so that checkpointing stores both results whole."""
    inputs, (n_sequences, n_heads, seq_len, width) = (query_BHTE, key_BHTE, value_BHTE), query_BHTE.shape
    out_BTHE = query_BHTE.new_empty(n_sequences, seq_len, n_heads, width)
    sums_BTH = query_BHTE.new_empty(n_sequences, seq_len, n_heads, dtype=torch.float32)
    for row, tokens, n_computed in _document_slices(query_BHTE, n_tokens):
        targets = [x[row, tokens].transpose(1, 2) for x in (out_BTHE, sums_BTH)]
        _copy_results(targets, _attend([_padded(x[row, :, tokens], n_computed) for x in inputs], scale))
    return out_BTHE, sums_BTH


def _document_slices(query_BHTE: Tensor, n_tokens: list[int]) -> Iterator[tuple[slice, slice, int]]:
    """(sequence, tokens, number of computed tokens) of each document. In bf16 on a CPU, a document shorter than its sequence is
    padded to a length class, because PyTorch compiles and caches code for each shape."""
    seq_len, offset = query_BHTE.shape[2], 0
    compiles = query_BHTE.device.type == "cpu" and query_BHTE.dtype is not torch.float32
    for n in n_tokens:
        row, first = divmod(offset, seq_len)
        yield slice(row, row + 1), slice(first, first + n), padded_tokens(n) if compiles and n < seq_len else n
        offset += n


def _copy_results(outputs: list[Tensor], results: Sequence[Tensor]) -> None:
    """Copy the results of a padded document without its padding."""
    for out, x in zip(outputs, results, strict=True):
        out.copy_(x[:, :, : out.shape[2]])


def _attend(inputs: Sequence[Tensor], scale: float | None) -> Sequence[Tensor]:
    """Fused causal attention of one document, before its padding: outputs (B, H, T, E) and log-sum-exps (B, H, T)."""
    aten: Any = torch.ops.aten
    if inputs[0].is_cuda:
        return aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=scale)[:2]  # type: ignore[no-any-return]
    return aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)  # type: ignore[no-any-return]


def _attend_backward(inputs: Sequence[Tensor], scale: float | None) -> Sequence[Tensor]:
    """Gradients of queries, keys and values. `inputs`: output gradient, query, key, value, output, log-sum-exps."""
    aten: Any = torch.ops.aten
    *tensors, sums_BHT = inputs
    if not sums_BHT.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True, scale=scale)  # type: ignore[no-any-return]
    n_tokens, no_random_numbers = sums_BHT.shape[2], sums_BHT.new_empty(0, dtype=torch.int64)
    rest = sums_BHT.contiguous(), None, None, n_tokens, n_tokens, 0.0, True, no_random_numbers, no_random_numbers
    return aten._scaled_dot_product_flash_attention_backward(*tensors, *rest, scale=scale)  # type: ignore[no-any-return]


def _padded(x: Tensor, n_tokens: int) -> Tensor:
    """Pad the tokens of (1, H, T, E) or (1, H, T) with zeros."""
    n_more = n_tokens - x.shape[2]
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, n_more)) if n_more else x


LIBRARY = torch.library.Library("penstock", "DEF")
LIBRARY.define("attention_by_document(Tensor query, Tensor key, Tensor value, int[] n_tokens, float? scale) -> (Tensor, Tensor)")
LIBRARY.impl("attention_by_document", _attention_by_document, "CompositeExplicitAutograd")
