"""Dependencies between lanes, from the slots that ops read and write."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.runtime.compiled import compiled, integers
from penstock.runtime.plan import Lane, Wait

NONE = -1
Column = np.ndarray[Any, np.dtype[np.int64]]


def waits_of(lanes: Column, uses: Column, first: Column, after: Mapping[int, Wait], n_steps: int = 2) -> Column:
    """The fewest waits that order every two uses of a slot, one of them a write, as the program does: of which op, distance, back,
    and the op waited for.

    `uses`: numbers of slots; op number i reads those from `first[2 * i]` on and writes those from `first[2 * i + 1]` on. `after`:
    what op number i follows besides. Steps are walked in program order; the waits of the second are those of every later one
    (tests walk a third).
    """
    n, extra = len(lanes), np.full((2, len(lanes)), NONE)
    for i, wait in after.items():
        extra[:, i] = wait.op, wait.distance
    asked = (integers(of) for of in (lanes, uses, first, *extra))
    targets, ends = map(np.array, _targets(n_steps, int(max(uses, default=0)) + 1, len(Lane), *asked))
    here = (n_steps - 1) * n
    assert np.all(targets >= here - n), "an op depends on a step before the previous one"
    distance = (targets < here).astype(np.int64)
    of = np.repeat(np.arange(n), np.diff(ends, prepend=0))
    return in_order(np.stack([of, distance, np.zeros_like(of), targets.astype(np.int64) - here + n * distance]))


def in_order(columns: Column) -> Column:
    """Sorted by the first of these, then by the second, and so on."""
    return columns[:, np.lexsort(columns[::-1])]


@compiled
def _targets(
    n_steps: int, n_slots: int, n_lanes: int, lanes: Any, uses: Any, first: Any, extra: Any, distance: Any
) -> tuple[list[int], list[int]]:
    """Of each op of the last step the ops to wait for, counted over all steps, and where its list of them ends."""
    n = len(lanes)
    writer = [NONE] * n_slots
    reader = [NONE] * (n_slots * n_lanes)  # of each lane the latest op that reads since the last write
    known = [NONE] * (n_steps * n * n_lanes)  # once an op is done, the latest op of each lane that is known to be done
    last_on_lane, needed = [NONE] * n_lanes, [NONE] * n_lanes  # of each lane the latest op: it implies those before it
    targets, ends = [0] * 0, [0] * 0
    for at in range(n_steps * n):
        step, i = at // n, at % n
        for use in range(first[2 * i], first[2 * i + 2]):
            slot, of = uses[use], uses[use] * n_lanes
            if writer[slot] != NONE:
                needed[lanes[writer[slot] % n]] = max(needed[lanes[writer[slot] % n]], writer[slot])
            if use < first[2 * i + 1]:
                reader[of + lanes[i]] = at
                continue
            for lane in range(n_lanes):
                needed[lane] = max(needed[lane], reader[of + lane])
                reader[of + lane] = NONE
            writer[slot] = at
        if extra[i] != NONE and step >= distance[i]:
            target = (step - distance[i]) * n + extra[i]
            needed[lanes[target % n]] = max(needed[lanes[target % n]], target)
        before = last_on_lane[lanes[i]]
        if before != NONE:
            for lane in range(n_lanes):
                known[at * n_lanes + lane] = known[before * n_lanes + lane]
        needed[lanes[i]] = NONE  # its own lane keeps its order
        while max(needed) != NONE:  # a later op may imply an earlier one, never the other way round
            target = max(needed)
            needed[lanes[target % n]] = NONE
            if known[at * n_lanes + lanes[target % n]] < target:
                if step == n_steps - 1:
                    targets.append(target)
                for lane in range(n_lanes):
                    known[at * n_lanes + lane] = max(known[at * n_lanes + lane], known[target * n_lanes + lane])
        known[at * n_lanes + lanes[i]] = at
        last_on_lane[lanes[i]] = at
        if step == n_steps - 1:
            ends.append(len(targets))
    return targets, ends
