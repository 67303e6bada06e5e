"""Folding of equal repetitions of ops in a long step.

Groups of micro-batches follow one another and do the same, but for the first ones, which find other things in the slots, and the
last, which completes the gradients. So a step of a few groups shows what a step of many does: three repetitions that are equal, in
slots and in waits, stand for any number of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from runtime.plan import Op, Plan, Repeat, Wait

N_SHOWN = 3  # repetitions: the first may wait for what is before them, the others wait for one another


def fold(short: Plan, start: int, n_ops: int, times: int, micro_batches: int) -> tuple[tuple[Op, ...], Repeat] | None:
    """The ops of a step of `times` repetitions, and which of them repeat; None where repetitions are not alike.

    `short`: the plan of a step with three, of `n_ops` ops each from op number `start` on. Each is a group of micro-batches further
    than the one before.
    """
    repeat = Repeat(start, start + n_ops, times, micro_batches)
    repeated = [_same(repeat, [short.ops[start + k * n_ops + j] for k in range(N_SHOWN)]) for j in range(n_ops)]
    outside = [_renumbered(repeat, op) for i, op in enumerate(short.ops) if not start <= i < start + N_SHOWN * n_ops]
    ops = [*outside[:start], *repeated, *outside[start:]]
    if None in ops:
        return None
    n_more = (times - N_SHOWN) * micro_batches
    folded = [
        replace(op, micro_batch=op.micro_batch + n_more) if i >= start + n_ops and op.micro_batch is not None else op
        for i, op in enumerate(op for op in ops if op is not None)
    ]
    return tuple(folded), repeat


def _folded(repeat: Repeat, wait: Wait, repetition: int | None) -> Wait | None:
    """A wait as the folded plan has it, of an op in this repetition (None: of another part); None where it cannot be said."""
    of = (wait.op - repeat.start) // repeat.n_ops
    if wait.op < repeat.start:
        return wait
    if of >= N_SHOWN:
        return Wait(wait.op - (N_SHOWN - 1) * repeat.n_ops, wait.distance)
    number = wait.op - of * repeat.n_ops
    if repetition is None or wait.distance:
        return Wait(number, wait.distance) if of == N_SHOWN - 1 else None
    return Wait(number, 0, repetition - of) if repetition - of in (0, 1) else None


def _renumbered(repeat: Repeat, op: Op) -> Op | None:
    """An op that does not repeat."""
    waits = [_folded(repeat, wait, None) for wait in op.waits]
    return None if None in waits else replace(op, waits=_in_order([w for w in waits if w is not None]))


def _same(repeat: Repeat, ops: Sequence[Op]) -> Op | None:
    """The op that all repetitions have, with what any of them waits for; None when they differ in more than micro-batches.

    What only the first repetition waits for lies before it, and is done for ever after; what all but the first wait for in the
    repetition before says in the first one: in the step before.
    """
    found = [[_folded(repeat, wait, k) for wait in op.waits] for k, op in enumerate(ops)]
    alike = {(op.kind, op.block, op.operands) for op in ops}
    moved = {op.micro_batch if op.micro_batch is None else op.micro_batch - k * repeat.micro_batches for k, op in enumerate(ops)}
    if any(None in waits for waits in found) or len(alike) > 1 or len(moved) > 1:
        return None
    first, second, third = ({wait for wait in waits if wait is not None} for waits in found)
    before = {Wait(w.op, 1) for w in second if w.back}
    beyond = {w for w in second if w not in first and (w.distance or w.op < repeat.start)}
    return replace(ops[0], waits=_in_order((first - before) | second)) if second == third and not beyond else None


def _in_order(waits: Sequence[Wait] | set[Wait]) -> tuple[Wait, ...]:
    return tuple(sorted(waits, key=lambda w: (w.distance, w.back, w.op)))
