"""Dependencies between lanes, from the slots that ops read and write."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runtime.compiled import compiled, integers
from runtime.plan import LANE_OF, OPS, Kind, Lane, Slot, Wait
from runtime.plan.ops import Operand

LANE_NUMBER = {lane: i for i, lane in enumerate(Lane)}
NONE = -1
_NO_WAIT = Wait(NONE)


class User(Protocol):
    """What uses slots: an op, or one that is being written."""

    @property
    def kind(self) -> Kind: ...
    @property
    def operands(self) -> Sequence[Operand]: ...


def waits_of(ops: Sequence[User], after: Mapping[int, Wait], n_steps: int = 2) -> list[tuple[Wait, ...]]:
    """The fewest waits that order every two uses of a slot, one of them a write, as the program does.

    `after`: what op number i follows besides. Steps are walked in program order; the waits of the second are those of every later
    one (tests walk a third).
    """
    n = len(ops)
    numbers: dict[Slot, int] = {}
    uses: list[int] = []  # slots that an op reads, then those that it writes
    first_read, first_write = list[int](), list[int]()
    for op in ops:
        first_read.append(len(uses))
        row, written = OPS[op.kind], list[int]()
        for name, slot in op.operands:
            number = numbers.setdefault(slot, len(numbers))
            if name in row.reads:
                uses.append(number)
            if name in row.writes:
                written.append(number)
        first_write.append(len(uses))
        uses += written
    first_read.append(len(uses))
    extra = [after.get(i, _NO_WAIT) for i in range(n)]
    lanes = [LANE_NUMBER[LANE_OF[op.kind]] for op in ops]
    targets, ends = _targets(
        n_steps, len(numbers), len(Lane), integers(lanes), integers(uses), integers(first_read), integers(first_write),
        integers([wait.op for wait in extra]), integers([wait.distance for wait in extra]),
    )  # fmt: skip
    assert min(targets, default=n) >= (n_steps - 2) * n, "an op depends on a step before the previous one"
    here, found, first = (n_steps - 1) * n, list[tuple[Wait, ...]](), 0
    for end in ends:  # of a later op first
        of_op = list(map(int, reversed(targets[first:end])))
        found.append((*[Wait(t - here) for t in of_op if t >= here], *[Wait(t - here + n, 1) for t in of_op if t < here]))
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
