"""Synchronisation between lanes: derive the waits of ops from the slots that they read and write."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.runtime.compiled import compiled_bare, integers
from penstock.runtime.plan import Lane, Wait

NONE = -1
Column = np.ndarray[Any, np.dtype[np.int64]]


def waits_of(lanes: Column, uses: Column, first: Column, extra_waits: Mapping[int, Wait], n_steps: int = 2) -> Column:
    """Return the minimal waits that preserve program order for conflicting slot accesses (read-write, write-read, write-write).

    Rows of the result: waiting op, distance, back, op waited for. Op i reads the slots `uses[first[2 * i]:first[2 * i + 1]]` and
    writes `uses[first[2 * i + 1]:first[2 * i + 2]]`. `extra_waits`: further waits by op. Steps are walked in program order; the
    waits of the second step hold for every later one (tests walk a third).
    """
    n, extra = len(lanes), np.full((2, len(lanes)), NONE)
    for i, wait in extra_waits.items():
        extra[:, i] = wait.op, wait.distance
    n_slots, n_lanes = int(uses.max(initial=0)) + 1, len(Lane)
    sizes = (n_slots, n_slots * n_lanes, n_steps * n * n_lanes, n_lanes, n_lanes, n * n_lanes, n)
    scratch = tuple(integers(np.full(size, NONE)) for size in sizes)
    n_waits = _targets(n_steps, n_lanes, tuple(integers(values) for values in (lanes, uses, first, *extra)), scratch)
    targets, ends = np.array(scratch[-2][:n_waits], np.int64), np.array(scratch[-1], np.int64)
    begin = (n_steps - 1) * n
    assert np.all(targets >= begin - n), "an op depends on a step before the previous one"
    distance = (targets < begin).astype(np.int64)
    waiting = np.repeat(np.arange(n), np.diff(ends, prepend=0))
    return in_order(np.stack([waiting, distance, np.zeros_like(waiting), targets - begin + n * distance]))


def in_order(columns: Column) -> Column:
    """Sort lexicographically: by the first row, then by the second, and so on."""
    return columns[:, np.lexsort(columns[::-1])]


@compiled_bare
def _targets(n_steps: int, n_lanes: int, ops: Any, scratch: Any) -> int:
    """Write concatenated wait targets of the last step's ops, numbered over all steps, and the end of each op's list. Return the
    number of targets."""
    lanes, uses, first, extra, distance = ops
    # By slot: last write. By slot and lane: last read since the write. By op and lane: latest op that is done once the op is.
    # By lane: last op, and latest op to be waited for, which implies earlier ones.
    writer, reader, known, last_on_lane, needed, targets, ends = scratch
    n, n_targets = len(lanes), 0
    for position in range(n_steps * n):
        step, i = position // n, position % n
        for use in range(first[2 * i], first[2 * i + 2]):
            slot, row = uses[use], uses[use] * n_lanes
            if writer[slot] != NONE:
                needed[lanes[writer[slot] % n]] = max(needed[lanes[writer[slot] % n]], writer[slot])
            if use < first[2 * i + 1]:
                reader[row + lanes[i]] = position
                continue
            for lane in range(n_lanes):
                needed[lane] = max(needed[lane], reader[row + lane])
                reader[row + lane] = NONE
            writer[slot] = position
        if extra[i] != NONE and step >= distance[i]:
            target = (step - distance[i]) * n + extra[i]
            needed[lanes[target % n]] = max(needed[lanes[target % n]], target)
        predecessor = last_on_lane[lanes[i]]
        if predecessor != NONE:
            for lane in range(n_lanes):
                known[position * n_lanes + lane] = known[predecessor * n_lanes + lane]
        needed[lanes[i]] = NONE  # a lane is in order anyway
        while True:  # latest first: only a later op can imply an earlier one
            target = NONE
            for lane in range(n_lanes):
                target = max(target, needed[lane])
            if target == NONE:
                break
            needed[lanes[target % n]] = NONE
            if known[position * n_lanes + lanes[target % n]] < target:
                if step == n_steps - 1:
                    targets[n_targets] = target
                    n_targets += 1
                for lane in range(n_lanes):
                    known[position * n_lanes + lane] = max(known[position * n_lanes + lane], known[target * n_lanes + lane])
        known[position * n_lanes + lanes[i]] = position
        last_on_lane[lanes[i]] = position
        if step == n_steps - 1:
            ends[i] = n_targets
    return n_targets
