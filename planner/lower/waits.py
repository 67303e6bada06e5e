"""Dependencies between lanes, from the slots that ops read and write."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.plan import Lane, Op, Slot, Wait

LANE_NUMBER = {lane: i for i, lane in enumerate(Lane)}


def with_waits(ops: Sequence[Op], after: Mapping[int, Wait]) -> tuple[Op, ...]:
    """The ops with the fewest waits that order every two uses of a slot, one of them a write, as the program does.

    `after`: what op number i follows besides. Two steps are walked in program order; the waits of the second are those of
    every later one (tests walk a third).
    """
    return tuple(replace(op, waits=waits) for op, waits in zip(ops, waits_of(ops, after, n_steps=2), strict=True))


def waits_of(ops: Sequence[Op], after: Mapping[int, Wait], n_steps: int) -> list[tuple[Wait, ...]]:
    """The waits of each op in the last of `n_steps` steps."""
    n = len(ops)
    numbers: dict[Slot, int] = {}
    reads = [[numbers.setdefault(slot, len(numbers)) for slot in op.reads] for op in ops]
    writes = [[numbers.setdefault(slot, len(numbers)) for slot in op.writes] for op in ops]
    lanes = [LANE_NUMBER[op.lane] for op in ops] * n_steps
    writer = [-1] * len(numbers)  # ops are counted over all steps; -1: none yet
    readers: list[list[int]] = [[] for _ in numbers]
    nothing = [-1] * len(LANE_NUMBER)
    done_after: list[list[int]] = []  # once that op is done, the latest op of each lane that is known to be done
    last_on_lane = [-1] * len(LANE_NUMBER)
    result: list[tuple[Wait, ...]] = []
    for at in range(n_steps * n):
        step, i = divmod(at, n)
        needed: set[int] = set()
        for slot in reads[i]:
            needed.add(writer[slot])
            readers[slot].append(at)
        for slot in writes[i]:
            needed.add(writer[slot])
            needed.update(readers[slot])
            writer[slot], readers[slot] = at, []
        extra = after.get(i)
        if extra is not None and step >= extra.distance:
            needed.add((step - extra.distance) * n + extra.op)
        needed -= {at, -1}
        lane = lanes[at]
        before = last_on_lane[lane]
        known = done_after[before].copy() if before >= 0 else nothing.copy()
        kept: list[int] = []
        for target in sorted(needed, reverse=True):  # a later op may imply an earlier one, never the other way round
            if known[lanes[target]] < target:
                kept.append(target)
                known = list(map(max, known, done_after[target]))
        known[lane] = last_on_lane[lane] = at
        done_after.append(known)
        if step == n_steps - 1:
            waits = tuple([Wait(t % n, step - t // n) for t in sorted(kept, key=lambda t: (step - t // n, t % n))])
            assert all(w.distance in (0, 1) for w in waits), f"{ops[i].name} depends on a step before the previous one"
            result.append(waits)
    return result
