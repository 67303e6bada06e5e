"""How are several data sets mixed?

Each is read, packed and cached by itself; a sample is a sequence of one of them. Without weights an epoch holds every sequence of
every set once. With weights each set has its share of every ROUND samples, spread evenly, and begins anew, in another order, when
it is through; an epoch is then as many samples as there are sequences in all. Which sample a step sees is a function of its number
alone, as with one set.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.batch import Batch
from runtime.errors import CheckpointError, DataError

from .map_style import MapStyleData, Rows, empty_rows, order_of
from .packing import Array, Counts

ROUND = 1000  # samples in which shares are whole numbers
TOLERANCE = 0.002  # of weights that add up to 1: three of 0.333 do


@dataclass(slots=True, eq=False)
class MixedData:
    """Samples of several sets, with one length and one batch size. `shares[k]`: set k's samples of ROUND; None: all alike."""

    parts: tuple[MapStyleData, ...]
    shares: tuple[int, ...] | None
    _orders: dict[int, tuple[int, Array]] = field(default_factory=dict, repr=False)  # the epoch of a set, and its order
    _turns: Array = field(init=False, repr=False)  # (set, how many of its samples came before) of each of ROUND
    _ends: Array = field(init=False, repr=False)  # sequences of a set and of all before it

    def __post_init__(self) -> None:
        self._turns = _turns(self.shares or ())
        self._ends = np.cumsum([part.n_sequences for part in self.parts])

    @property
    def counts(self) -> Counts:
        total = Counts()
        for part in self.parts:
            total += part.counts
        return total

    @property
    def fingerprint(self) -> str:
        parts = [[part.fingerprint for part in self.parts], self.shares]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def n_sequences(self) -> int:
        return int(self._ends[-1])

    @property
    def n_steps(self) -> int:
        return -(-self.n_sequences // self.parts[0].shape.batch_size)

    def position(self, step: int) -> dict[str, Any]:
        """The sample with which step number `step`, counted from 0, begins."""
        return {"sample": step * self.parts[0].shape.batch_size}

    def resume(self, step: int, position: dict[str, Any]) -> None:
        if position != self.position(step):
            raise CheckpointError(
                f"its data position {str(position)[:80]} is not that of step {step}; resume with the data it began with"
            )

    def sample(self, n: int) -> tuple[int, int]:
        """(set, sequence in it) of sample number `n`, counted from 0 through all epochs."""
        if self.shares is None:
            epoch, place = divmod(n, self.n_sequences)
            place = self._in_order(-1, self.n_sequences, epoch, place)
            k = int(np.searchsorted(self._ends, place, side="right"))
            return k, place - int(self._ends[k]) + self.parts[k].n_sequences
        rounds, turn = divmod(n, ROUND)
        k, before = (int(i) for i in self._turns[turn])
        size = self.parts[k].n_sequences
        return k, self._in_order(k, size, *divmod(rounds * self.shares[k] + before, size))

    def _in_order(self, k: int, size: int, epoch: int, place: int) -> int:
        seed = self.parts[0].seed
        if seed is None:
            return place
        if self._orders.get(k, (-1,))[0] != epoch:
            self._orders[k] = epoch, order_of(size, seed, epoch)
        return int(self._orders[k][1][place])

    def rows(self, step: int) -> Rows:
        shape = self.parts[0].shape
        ids_BT, targets_BT = empty_rows(shape)
        lengths, by_document = [], any(part.shape.packing == "documents" for part in self.parts)
        for b in range(shape.batch_size):
            k, sequence = self.sample(step * shape.batch_size + b)
            tokens = self.parts[k].write(sequence, ids_BT[b], targets_BT[b])
            lengths.append((shape.seq_len,) if self.parts[k].shape.packing == "joined" else tokens)  # attention sees across
        return Rows(ids_BT, targets_BT, tuple(lengths) if by_document else None)

    def batch(self, step: int) -> Batch:
        return self.rows(step).batch()

    def words(self) -> dict[str, str]:
        """Each set, its share, and how often it comes in an epoch."""
        said, warnings = dict[str, str](), list[str]()
        for k, part in enumerate(self.parts):
            n, of = part.n_sequences if self.shares is None else self.n_sequences * self.shares[k] / ROUND, part.words()
            share = f"{n / self.n_sequences:.1%} of samples, {n / part.n_sequences:.2f} times an epoch"
            warnings += [f"data {k + 1}: {of.pop('warning')}"] if "warning" in of else []
            said |= {f"{name} {k + 1}": words for name, words in of.items()} | {f"share {k + 1}": share}
        return said | ({"warning": "; ".join(warnings)} if warnings else {})

    def close(self) -> None:
        """Mapped files close with the last view of them."""


def shares_of(weights: Sequence[float | None]) -> tuple[int, ...] | None:
    """Samples of each set in ROUND; None where no set has a weight. DataError for weights that are no shares of a whole."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise DataError(f"{len(given)} of {len(weights)} data sets have a weight; give one to each, or to none")
    if abs(sum(given) - 1) > TOLERANCE:
        raise DataError(f"the weights of the data sets add up to {sum(given):.4g}, not to 1; they are shares of the samples")
    if min(given) * ROUND < 1:
        raise DataError(f"a data set's weight is {min(given):.3g}, and {1 / ROUND:g} is the least; leave that set out")
    exact = np.array(given) / sum(given) * ROUND
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: ROUND - int(shares.sum())]] += 1  # the largest remainders
    return tuple(int(share) for share in shares)


def _turns(shares: Sequence[int]) -> Array:
    """Which set each of ROUND samples is of, each set's as far from one another as they can be, and its number among them."""
    turns = [(k, i) for k, share in enumerate(shares) for i in range(share)]
    turns.sort(key=lambda turn: ((turn[1] + 0.5) / shares[turn[0]], turn[0]))
    return np.array(turns, dtype=np.int64).reshape(-1, 2)
