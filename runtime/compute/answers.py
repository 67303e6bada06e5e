"""Answers of a micro-batch: a sequence each, or several packed into one, and what is summed over their tokens."""

# B sequences, T tokens, N = B * T, K answers that a sequence stands for
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.runtime.batch import UNSUPERVISED


class Answers:
    """Where the answers of some sequences lie. Unpacked, one to a sequence: numbers of them are (B,). Packed, `rows_each` sequences
    that follow each other are a unit, in any of which an answer may lie: numbers are (B, K), in whose first index is its place in
    its pair or group. `spans_BKS`: the first token and one past the last of each, counted through its unit, both 0 where there is
    none."""

    def __init__(self, targets_BT: Tensor, spans_BKS: Tensor | None, rows_each: int) -> None:
        self._n_tokens, self._is_packed = targets_BT.shape[1], spans_BKS is not None
        rows_B = torch.arange(len(targets_BT), device=targets_BT.device)
        self._first_B = (rows_B - rows_B % rows_each if self._is_packed else rows_B) * self._n_tokens  # of what places count from
        self._spans = [] if spans_BKS is None else [of.t() + self._first_B for of in spans_BKS.unbind(2)]
        self.n_tokens = self.summed(targets_BT != UNSUPERVISED, torch.int64)  # of each, those that are supervised

    def _each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(B, T) places among all tokens that begin with a span's first, and which are within it; K times."""
        for begin_B, stop_B in zip(*self._spans, strict=True):
            at_BT = begin_B[:, None] + torch.arange(self._n_tokens, device=begin_B.device)
            yield at_BT, at_BT < stop_B[:, None]

    def summed(self, of_BT: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Over the tokens of each answer, in their order from its first on: whatever it is packed with."""
        if not self._is_packed:
            return of_BT.sum(dim=1, dtype=dtype)
        of_N = of_BT.reshape(-1)
        taken = (of_N[at_BT.clamp(max=len(of_N) - 1)].masked_fill(~is_in_BT, 0) for at_BT, is_in_BT in self._each())
        return torch.stack([of.sum(dim=1, dtype=dtype) for of in taken], dim=1)

    def spread(self, of: Tensor) -> Tensor:
        """(B, T): to each token what is said of its answer."""
        if not self._is_packed:
            return of[:, None].expand(-1, self._n_tokens)
        n = len(of) * self._n_tokens
        spread_N = of.new_zeros(n + 1)  # the last one for what is of no answer
        for (at_BT, is_in_BT), of_B in zip(self._each(), of.t(), strict=True):
            spread_N.scatter_(0, at_BT.masked_fill(~is_in_BT, n).flatten(), of_B[:, None].expand_as(at_BT).flatten())
        return spread_N[:-1].view(len(of), -1)

    def among_all(self, place: Tensor) -> Tensor:
        """Of a place in each answer's sequence, or unit, the number among all tokens."""
        return place.long() + (self._first_B[:, None] if self._is_packed else self._first_B)


def in_order(of: Tensor, rows_each: int, n_tokens: Tensor) -> Tensor:
    """Numbers of answers, (B,) or (B, K) like `n_tokens`, in the order of pairs or groups as without packing."""
    if n_tokens.dim() == 1:
        return of
    return of.reshape(-1, rows_each, n_tokens.shape[1], *of.shape[2:]).transpose(1, 2).flatten(0, 2)
