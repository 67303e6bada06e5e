"""Loop rolling: fold the equal repetitions in the ops of a long step into one `Repeat`.

Groups of micro-batches in gradient accumulation run the same ops, except for the first groups, because slots have other contents,
and the last group, which completes the gradients. Three consecutive repetitions with equal slots and waits therefore represent any
number of them. Example: a step of 1,000 groups becomes first group, one repeated section (`times=998`), last group.
"""

from itertools import pairwise

import numpy as np

from penstock.runtime.plan import Repeat

from .op_table import OpTable
from .waits import NONE, Column, in_order

N_SHOWN = 3  # repetitions that are compared: the first may wait for earlier ops, the others wait for one another


def fold(short: OpTable, start: int, n_ops: int, times: int, micro_batches: int) -> OpTable | None:
    """Return the ops of a step with `times` repetitions, one of them written out; None if the repetitions differ.

    `short` is a step with three repetitions of `n_ops` ops each, starting at op `start`. Micro-batch numbers grow by
    `micro_batches` from one repetition to the next.
    """
    repeat, end = Repeat(start, start + n_ops, times, micro_batches), start + N_SHOWN * n_ops
    is_shared = short.micro_batches == NONE
    shown = np.stack([short.kinds, short.blocks, short.micro_batches])[:, start:end].reshape(3, N_SHOWN, n_ops)
    shown[2] -= np.where(is_shared[start:end].reshape(N_SHOWN, n_ops), 0, micro_batches * np.arange(N_SHOWN)[:, None])
    ends = short.first(short.operands)[start : end + 1 : n_ops]
    operands = [short.operands[:, i:j] - [[k * n_ops], [0], [0]] for k, (i, j) in enumerate(pairwise(ends))]
    waits = _waits(short.waits, repeat)
    if waits is None or np.any(shown != shown[:, :1]) or not all(np.array_equal(operands[0], x) for x in operands[1:]):
        return None
    rest = np.r_[: start + n_ops, end : len(short.kinds)]
    moved = np.where(is_shared | (np.arange(len(is_shared)) < end), 0, (times - N_SHOWN) * micro_batches)
    remaining = short.operands[:, (short.operands[0] < start + n_ops) | (short.operands[0] >= end)]
    remaining[0] -= np.where(remaining[0] < end, 0, (N_SHOWN - 1) * n_ops)
    return OpTable(short.kinds[rest], short.blocks[rest], (short.micro_batches + moved)[rest], remaining, waits, repeat)


def _waits(waits: Column, repeat: Repeat) -> Column | None:
    """Return the waits of a folded step; None if repetitions differ or a wait cannot be expressed.

    Waits of the first repetition alone refer to earlier ops of the step, which remain done in later repetitions. A wait for the
    previous repetition (`back=1`) refers, in the first repetition, to the previous step (`distance=1`).
    """
    (waiting, waiting_turn), distance, (op, turn) = _numbered(waits[0], repeat), waits[1], _numbered(waits[3], repeat)
    is_inside, waiting_inside = turn != NONE, waiting_turn != NONE
    within = is_inside & waiting_inside & (distance == 0)
    back = np.where(within, waiting_turn - turn, 0)
    if np.any(is_inside & ~within & (turn != N_SHOWN - 1)) or np.any((back != 0) & (back != 1)):
        return None
    table = np.stack([waiting, distance, back, op])
    first, second, third = ({*map(tuple, table[:, waiting_turn == k].T.tolist())} for k in range(N_SHOWN))
    previous_step = {(waiting, 1, 0, op) for waiting, _, back, op in second if back}
    beyond = {wait for wait in second - first if wait[1] or wait[3] < repeat.start}
    if second != third or beyond:
        return None
    repeated = np.array([*(first - previous_step | second)], dtype=np.int64).reshape(-1, 4).T
    return in_order(np.concatenate([table[:, ~waiting_inside], repeated], axis=1))


def _numbered(op: Column, repeat: Repeat) -> tuple[Column, Column]:
    """Return op numbers in the folded step, and the repetition of each op (NONE outside the section)."""
    turn = np.where(op < repeat.start, NONE, (op - repeat.start) // repeat.n_ops)
    number = op - np.where(turn == NONE, 0, np.minimum(turn, N_SHOWN - 1) * repeat.n_ops)
    return number, np.where(turn >= N_SHOWN, NONE, turn)
