"""Dependencies between lanes, from the slots that ops read and write."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.compiled import compiled, integers
from runtime.plan import Lane, Op, Slot, Wait

LANE_NUMBER = {lane: i for i, lane in enumerate(Lane)}
NONE = -1


def with_waits(ops: Sequence[Op], after: Mapping[int, Wait]) -> tuple[Op, ...]:
    """The ops with the fewest waits that order every two uses of a slot, one of them a write, as the program does.

    `after`: what op number i follows besides. Two steps are walked in program order; the waits of the second are those of
    every later one (tests walk a third).
    """
    found = zip(ops, waits_of(ops, after, n_steps=2), strict=True)
    return tuple([Op(op.kind, op.block, op.micro_batch, op.operands, waits) for op, waits in found])


def waits_of(ops: Sequence[Op], after: Mapping[int, Wait], n_steps: int) -> list[tuple[Wait, ...]]:
    """The waits of each op in the last of `n_steps` steps."""
    n = len(ops)
    numbers: dict[Slot, int] = {}
    uses: list[int] = []  # slots that an op reads, then those that it writes
    first_read, first_write = list[int](), list[int]()
    for op in ops:
        first_read.append(len(uses))
        uses += [numbers.setdefault(slot, len(numbers)) for slot in op.reads]
        first_write.append(len(uses))
        uses += [numbers.setdefault(slot, len(numbers)) for slot in op.writes]
    first_read.append(len(uses))
    extra = [after.get(i, Wait(NONE)) for i in range(n)]
    lanes = [LANE_NUMBER[op.lane] for op in ops]
    targets, ends = _targets(
        n_steps, len(numbers), len(Lane), integers(lanes), integers(uses), integers(first_read), integers(first_write),
        integers([wait.op for wait in extra]), integers([wait.distance for wait in extra]),
    )  # fmt: skip
    found, first, last = list[tuple[Wait, ...]](), 0, n_steps - 1
    for i, end in enumerate(ends):
        waits = tuple([Wait(int(t) % n, last - int(t) // n) for t in targets[first:end]])
        assert all(w.distance in (0, 1) for w in waits), f"{ops[i].name} depends on a step before the previous one"
        found.append(tuple(sorted(waits, key=lambda wait: (wait.distance, wait.op))))
        first = end
    return found


@compiled
def _targets(
    n_steps: int, n_slots: int, n_lanes: int, lanes: Any, uses: Any, first_read: Any, first_write: Any, extra: Any, distance: Any
) -> tuple[list[int], list[int]]:
    """Of each op of the last step the ops to wait for, counted over all steps, and where its list of them ends."""
    n = len(lanes)
    writer = [NONE] * n_slots
    reader = [NONE] * n_slots  # the last of a chain of entries: an op that reads since the last write, and the entry before
    entry_op, entry_before = [0] * 0, [0] * 0
    known = [NONE] * (n_steps * n * n_lanes)  # once an op is done, the latest op of each lane that is known to be done
    last_on_lane = [NONE] * n_lanes
    targets, ends = [0] * 0, [0] * 0
    for at in range(n_steps * n):
        step, i = at // n, at % n
        needed = [0] * 0
        for use in range(first_read[i], first_write[i]):
            needed.append(writer[uses[use]])
            entry_op.append(at)
            entry_before.append(reader[uses[use]])
            reader[uses[use]] = len(entry_op) - 1
        for use in range(first_write[i], first_read[i + 1]):
            slot = uses[use]
            needed.append(writer[slot])
            entry = reader[slot]
            while entry != NONE:
                needed.append(entry_op[entry])
                entry = entry_before[entry]
            writer[slot], reader[slot] = at, NONE
        if extra[i] != NONE and step >= distance[i]:
            needed.append((step - distance[i]) * n + extra[i])
        lane = lanes[i]
        before = last_on_lane[lane]
        if before != NONE:
            for other in range(n_lanes):
                known[at * n_lanes + other] = known[before * n_lanes + other]
        needed.sort()
        for j in range(len(needed) - 1, -1, -1):  # a later op may imply an earlier one, never the other way round
            target = needed[j]
            if target != NONE and target != at and known[at * n_lanes + lanes[target % n]] < target:
                if step == n_steps - 1:
                    targets.append(target)
                for other in range(n_lanes):
                    known[at * n_lanes + other] = max(known[at * n_lanes + other], known[target * n_lanes + other])
        known[at * n_lanes + lane] = at
        last_on_lane[lane] = at
        if step == n_steps - 1:
            ends.append(len(targets))
    return targets, ends
