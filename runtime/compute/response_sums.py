"""Sums over the tokens of each response in a micro-batch. Responses are sequences, or packed several to a sequence."""

# B sequences, T tokens, N = B * T, K responses per sequence, S = 2 (first token, end)
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.runtime.batch import UNSUPERVISED


class Responses:
    """Token spans of responses. Unpacked: one per sequence, values are (B,). Packed: `rows_each` consecutive sequences are a unit,
    with responses at any offset; values are (B, K), and row i of a unit holds member i of each of its pairs or groups.
    `spans_BKS`: first token and end of each, counted from the unit's start; both 0 for absent responses."""

    def __init__(self, targets_BT: Tensor, spans_BKS: Tensor | None, rows_each: int) -> None:
        self._n_tokens, self._is_packed = targets_BT.shape[1], spans_BKS is not None
        rows_B = torch.arange(len(targets_BT), device=targets_BT.device)
        self._first_B = (rows_B - rows_B % rows_each if self._is_packed else rows_B) * self._n_tokens  # first token of the unit
        self._spans = [] if spans_BKS is None else [span_BK.t() + self._first_B for span_BK in spans_BKS.unbind(2)]
        self.n_tokens = self.sum(targets_BT != UNSUPERVISED, torch.int64)  # supervised tokens

    def _windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield K pairs (B, T): token indices from the start of each span, and a mask of those within it."""
        for begin_B, stop_B in zip(*self._spans, strict=True):
            index_BT = begin_B[:, None] + torch.arange(self._n_tokens, device=begin_B.device)
            yield index_BT, index_BT < stop_B[:, None]

    def sum(self, x_BT: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Sum over the tokens of each response, in an order that does not depend on packing."""
        if not self._is_packed:
            return x_BT.sum(dim=1, dtype=dtype)
        x_N = x_BT.reshape(-1)
        values = (x_N[index_BT.clamp(max=len(x_N) - 1)].masked_fill(~is_in_BT, 0) for index_BT, is_in_BT in self._windows())
        return torch.stack([value_BT.sum(dim=1, dtype=dtype) for value_BT in values], dim=1)

    def spread(self, values: Tensor) -> Tensor:
        """Expand values of responses to their tokens (B, T)."""
        if not self._is_packed:
            return values[:, None].expand(-1, self._n_tokens)
        n = len(values) * self._n_tokens
        spread_N = values.new_zeros(n + 1)  # the last element collects tokens outside spans
        for (index_BT, is_in_BT), value_B in zip(self._windows(), values.t(), strict=True):
            spread_N.scatter_(0, index_BT.masked_fill(~is_in_BT, n).flatten(), value_B[:, None].expand_as(index_BT).flatten())
        return spread_N[:-1].view(len(values), -1)

    def token_indices(self, place: Tensor) -> Tensor:
        """Convert token indices in each response's sequence or unit to indices among N tokens."""
        return place.long() + (self._first_B[:, None] if self._is_packed else self._first_B)


def unpacked_order(values: Tensor, rows_each: int, n_tokens: Tensor) -> Tensor:
    """Reorder packed values of responses, (B, K) like `n_tokens`, to the unpacked order of pairs or groups."""
    if n_tokens.dim() == 1:
        return values
    return values.reshape(-1, rows_each, n_tokens.shape[1], *values.shape[2:]).transpose(1, 2).flatten(0, 2)
