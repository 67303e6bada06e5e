"""Folding of equal repetitions of ops in a long step.

Groups of micro-batches follow one another and do the same, but for the first ones, which find other things in the slots, and the
last, which completes the gradients. So a step of a few groups shows what a step of many does: three repetitions that are equal, in
slots and in waits, stand for any number of them.
"""

from itertools import pairwise

import numpy as np

from penstock.runtime.plan import Repeat

from .sheet import Outline
from .waits import NONE, Column, in_order

N_SHOWN = 3  # repetitions: the first may wait for what is before them, the others wait for one another


def fold(short: Outline, start: int, n_ops: int, times: int, micro_batches: int) -> Outline | None:
    """The ops of a step of `times` repetitions, and which of them repeat; None where repetitions are not alike.

    `short`: a step with three, of `n_ops` ops each from op number `start` on. Each is a group of micro-batches further than the one
    before.
    """
    repeat, end = Repeat(start, start + n_ops, times, micro_batches), start + N_SHOWN * n_ops
    of_no_one = short.micro_batches == NONE
    shown = np.stack([short.kinds, short.blocks, short.micro_batches])[:, start:end].reshape(3, N_SHOWN, n_ops)
    shown[2] -= np.where(of_no_one[start:end].reshape(N_SHOWN, n_ops), 0, micro_batches * np.arange(N_SHOWN)[:, None])
    ends = short.first(short.operands)[start : end + 1 : n_ops]
    operands = [short.operands[:, i:j] - [[k * n_ops], [0], [0]] for k, (i, j) in enumerate(pairwise(ends))]
    waits = _waits(short.waits, repeat)
    if waits is None or np.any(shown != shown[:, :1]) or not all(np.array_equal(operands[0], other) for other in operands[1:]):
        return None
    keeps = np.r_[: start + n_ops, end : len(short.kinds)]
    moved = np.where(of_no_one | (np.arange(len(of_no_one)) < end), 0, (times - N_SHOWN) * micro_batches)
    kept = short.operands[:, (short.operands[0] < start + n_ops) | (short.operands[0] >= end)]
    kept[0] -= np.where(kept[0] < end, 0, (N_SHOWN - 1) * n_ops)
    return Outline(short.kinds[keeps], short.blocks[keeps], (short.micro_batches + moved)[keeps], kept, waits, repeat)


def _waits(waits: Column, repeat: Repeat) -> Column | None:
    """The waits of a folded step; None where one cannot be said, or repetitions differ in them.

    What only the first repetition waits for lies before it, and is done for ever after; what all but the first wait for in the
    repetition before says in the first one: in the step before.
    """
    (of, of_turn), distance, (op, turn) = _numbered(waits[0], repeat), waits[1], _numbered(waits[3], repeat)
    is_inside, of_inside = turn != NONE, of_turn != NONE
    within = is_inside & of_inside & (distance == 0)
    back = np.where(within, of_turn - turn, 0)
    if np.any(is_inside & ~within & (turn != N_SHOWN - 1)) or np.any((back != 0) & (back != 1)):
        return None
    found = np.stack([of, distance, back, op])
    first, second, third = ({*map(tuple, found[:, of_turn == k].T.tolist())} for k in range(N_SHOWN))
    before = {(of, 1, 0, op) for of, _, back, op in second if back}
    beyond = {wait for wait in second - first if wait[1] or wait[3] < repeat.start}
    if second != third or beyond:
        return None
    repeated = np.array([*(first - before | second)], dtype=np.int64).reshape(-1, 4).T
    return in_order(np.concatenate([found[:, ~of_inside], repeated], axis=1))


def _numbered(op: Column, repeat: Repeat) -> tuple[Column, Column]:
    """Ops as the folded step numbers them, and in which repetition they are; NONE: in none."""
    turn = np.where(op < repeat.start, NONE, (op - repeat.start) // repeat.n_ops)
    number = op - np.where(turn == NONE, 0, np.minimum(turn, N_SHOWN - 1) * repeat.n_ops)
    return number, np.where(turn >= N_SHOWN, NONE, turn)
