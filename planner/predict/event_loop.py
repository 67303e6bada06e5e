"""Event loop of the simulator on arrays: each lane performs its ops in plan order, and time advances from event to event.

Repeated ops are simulated until their timing is periodic (steady state); then the clock skips all further equal repetitions.
Functions are compiled with numba (`runtime/compiled.py`).
"""

from typing import Any, NamedTuple

from penstock.runtime.compiled import compiled_bare, compiled_inner
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT

from .region import Filling, fill

_fill = compiled_inner(fill)
MAX_CYCLE = 8  # longest detected period, in steps or repetitions; longer ones are averaged
TIE_FRACTION = 1e-12  # ends closer than this fraction of the clock are one event, so that rounding does not order them
N_WHERE = 5  # integers that describe the position of a lane
IDLE = -1


class Ops(NamedTuple):
    """Ops of a plan and their demands. Arrays are by op, by lane (`lane_`, `part_`), or by wait (`wait_`)."""

    lane_first: Any  # offsets of the lanes in `queue`
    queue: Any  # op numbers, lane by lane
    part_first: Any  # start of the repeated section in a lane's queue
    part_end: Any
    wait_first: Any  # offsets of an op's waits
    wait_op: Any
    wait_times: Any  # (a, b, c): the op must have been done a * step + b * repetition + c times
    first_span: Any  # offset of an op's spans; a repeated op has one per recorded repetition
    repeat_first: int
    repeat_end: int
    times: int
    same_fraction: float  # tolerance for equal repetitions, relative to their length
    most_repetitions: int  # simulated before the average of the last ones is extrapolated, though not periodic
    n_performed: int  # ops performed in a step
    n_spans: int = 0  # spans recorded in a step; 0: no recording
    last_step: int = 0  # bound for lanes without waits, which would run ahead for ever
    overhead_s: Any = None
    alone_s: Any = None
    draws: Any = None  # (op, resource): units per second at full speed
    is_sharing: Any = None  # True if the op uses any shared resource
    capacity: Any = None


class State(NamedTuple):
    """Mutable state: by lane its position and current op; counters and recorded times."""

    position: Any  # position in the lane's queue
    step: Any
    turn: Any  # repetition; 0 outside the repeated section
    current: Any  # op being performed, or IDLE
    is_working: Any  # past its overhead
    start_s: Any
    end_s: Any  # end of the overhead, or of the work at the current speed
    speed: Any
    now_s: Any  # scalar
    n_done: Any  # by op
    left_in_step: Any  # by step: ops not yet done
    busy_s: Any  # by step and lane
    step_ends_s: Any
    n_steps: Any  # scalar: steps done
    is_changed: Any  # scalar: the set of sharing ops has changed
    sharing: Any  # lanes of the sharing ops
    filling: Filling
    ended: Any  # step and repetition that has just ended
    n_turns: Any  # consecutive repetitions simulated in the current step
    is_rough: Any  # repetitions were skipped that were not quite periodic
    turn_end_s: Any  # ring buffers of the last MAX_CYCLE + 1 repetitions: end, lane positions, work left, busy time
    turn_where: Any
    turn_left_s: Any
    turn_busy_s: Any
    span_start_s: Any
    span_end_s: Any


@compiled_bare
def run_step(ops: Ops, s: State) -> bool:
    """Advance until one more step is done and all ops that can start at that time have started. Return False on deadlock, or if an
    op needs a resource of capacity zero."""
    n_steps = s.n_steps[0] + 1
    while True:
        _start(ops, s)
        if not _share(ops, s):
            return False
        if s.ended[0] != IDLE:
            _end_turn(ops, s, s.ended[0], s.ended[1])
            s.ended[0] = IDLE
        elif s.n_steps[0] == n_steps:
            return True
        elif not _next_event(ops, s):
            return False


@compiled_inner
def _start(ops: Ops, s: State) -> None:
    """Start the next op of every idle lane if its waits are satisfied."""
    for lane in range(len(s.position)):
        if s.current[lane] != IDLE or s.step[lane] >= ops.last_step:
            continue
        op, step, turn = ops.queue[ops.lane_first[lane] + s.position[lane]], s.step[lane], s.turn[lane]
        is_ready = True
        for i in range(ops.wait_first[op], ops.wait_first[op + 1]):
            # Times that the awaited op must have been done since the start
            times = ops.wait_times[3 * i] * step + ops.wait_times[3 * i + 1] * turn + ops.wait_times[3 * i + 2]
            if s.n_done[ops.wait_op[i]] < times:
                is_ready = False
                break
        if is_ready:
            s.current[lane], s.start_s[lane], s.speed[lane] = op, s.now_s[0], 1.0
            s.is_working[lane] = ops.overhead_s[op] <= 0
            s.end_s[lane] = s.now_s[0] + (ops.alone_s[op] if s.is_working[lane] else ops.overhead_s[op])
            if s.is_working[lane] and ops.is_sharing[op]:
                s.is_changed[0] = 1


@compiled_inner
def _share(ops: Ops, s: State) -> bool:
    """Recompute the fair speeds of working ops and rescale their remaining time. Return False if an op would have speed zero."""
    if not s.is_changed[0]:
        return True
    s.is_changed[0] = 0
    n_resources, n = len(ops.capacity), 0
    for lane in range(len(s.position)):
        op = s.current[lane]
        if op != IDLE and s.is_working[lane] and ops.is_sharing[op]:
            for r in range(n_resources):
                s.filling.draws[n * n_resources + r] = ops.draws[op * n_resources + r]
            s.sharing[n] = lane
            n += 1
    _fill(int(n), s.filling, ops.capacity)
    for i in range(n):
        lane, speed = s.sharing[i], s.filling.speeds[i]
        if speed <= 0:
            return False
        if speed != s.speed[lane]:
            s.end_s[lane] = s.now_s[0] + (s.end_s[lane] - s.now_s[0]) * s.speed[lane] / speed
            s.speed[lane] = speed
    return True


@compiled_inner
def _next_event(ops: Ops, s: State) -> bool:
    """Advance the clock to the next end of an overhead or op. Return False if no lane has one."""
    soonest_s, n = 0.0, 0
    for lane in range(len(s.position)):
        if s.current[lane] != IDLE and (n == 0 or s.end_s[lane] < soonest_s):
            soonest_s, n = s.end_s[lane], 1
    if n == 0:
        return False
    limit_s = soonest_s * (1 + TIE_FRACTION)
    now_s = soonest_s
    for lane in range(len(s.position)):
        if s.current[lane] != IDLE and s.end_s[lane] <= limit_s:
            now_s = max(now_s, s.end_s[lane])
    s.now_s[0] = now_s
    for lane in range(len(s.position)):
        op = s.current[lane]
        if op == IDLE or s.end_s[lane] > limit_s:
            continue
        if not s.is_working[lane] and ops.alone_s[op] > 0:
            s.is_working[lane] = True
            s.end_s[lane] = now_s + ops.alone_s[op]
        else:
            _finish(ops, s, lane, op)
        if ops.is_sharing[op]:
            s.is_changed[0] = 1
    return True


@compiled_inner
def _finish(ops: Ops, s: State, lane: int, op: int) -> None:
    """Complete the current op of a lane."""
    step, turn, repeats = s.step[lane], s.turn[lane], ops.repeat_first <= op < ops.repeat_end
    s.busy_s[step * len(s.position) + lane] += s.now_s[0] - s.start_s[lane]
    if ops.n_spans and (not repeats or turn < FIRST_KEPT or turn >= ops.times - LAST_KEPT):
        recorded = turn if turn < FIRST_KEPT else turn - max(ops.times - FIRST_KEPT - LAST_KEPT, 0)
        i = step * ops.n_spans + ops.first_span[op] + (recorded if repeats else 0)
        s.span_start_s[i], s.span_end_s[i] = s.start_s[lane], s.now_s[0]
    s.n_done[op] += 1
    s.current[lane], s.is_working[lane] = IDLE, False
    # Next op: the next in the queue, the first of the next repetition, or of the next step
    s.position[lane] += 1
    if repeats and s.position[lane] == ops.part_end[lane]:
        is_last = True
        s.turn[lane] += 1
        for other_lane in range(len(s.position)):
            if ops.part_end[other_lane] > ops.part_first[other_lane]:
                is_beyond = s.turn[other_lane] > turn or s.position[other_lane] >= ops.part_end[other_lane]
                is_last = is_last and (s.step[other_lane] > step or (s.step[other_lane] == step and is_beyond))
        if s.turn[lane] < ops.times:
            s.position[lane] = ops.part_first[lane]
        else:
            s.turn[lane] = 0
        if is_last:
            s.ended[0], s.ended[1] = step, turn
    if s.position[lane] == ops.lane_first[lane + 1] - ops.lane_first[lane]:
        s.position[lane] = 0
        s.step[lane] += 1
    s.left_in_step[step] -= 1
    if s.left_in_step[step] == 0:
        s.step_ends_s[s.n_steps[0]] = s.now_s[0]
        s.n_steps[0] += 1


@compiled_inner
def _end_turn(ops: Ops, s: State, step: int, turn: int) -> None:
    """Record the state at the end of a repetition; if it equals that of an earlier one (steady state), skip the next ones."""
    n_lanes, n_kept = len(s.position), MAX_CYCLE + 1
    furthest = 0
    if turn == 0:
        s.n_turns[0] = 0
    for lane in range(n_lanes):
        if ops.part_end[lane] > ops.part_first[lane]:
            if s.step[lane] != step or not ops.part_first[lane] <= s.position[lane] < ops.part_end[lane]:
                s.n_turns[0] = 0
                return
            furthest = max(furthest, s.turn[lane])
    row = turn % n_kept
    s.turn_end_s[row] = s.now_s[0]
    s.n_turns[0] += 1
    for lane in range(n_lanes):
        first, is_idle = (row * n_lanes + lane) * N_WHERE, s.current[lane] == IDLE
        repeats = ops.part_end[lane] > ops.part_first[lane]
        s.turn_where[first] = s.step[lane] - step
        s.turn_where[first + 1] = s.turn[lane] - turn if repeats else 0
        s.turn_where[first + 2] = s.position[lane]
        s.turn_where[first + 3] = is_idle
        s.turn_where[first + 4] = s.is_working[lane]
        s.turn_left_s[row * n_lanes + lane] = 0.0 if is_idle else (s.end_s[lane] - s.now_s[0]) * s.speed[lane]
        s.turn_busy_s[row * n_lanes + lane] = s.busy_s[step * n_lanes + lane]
    n_left = ops.times - LAST_KEPT - 1 - furthest
    if turn < FIRST_KEPT or n_left <= 0:
        return
    for n_cycle in range(1, min(MAX_CYCLE, s.n_turns[0] - 1) + 1):
        earlier = (turn - n_cycle) % n_kept
        within_s = ops.same_fraction * (s.now_s[0] - s.turn_end_s[earlier]) / n_cycle
        is_same = True
        for i in range(n_lanes):
            if abs(s.turn_left_s[row * n_lanes + i] - s.turn_left_s[earlier * n_lanes + i]) > within_s:
                is_same = False
            for j in range(i * N_WHERE, (i + 1) * N_WHERE):
                if s.turn_where[row * n_lanes * N_WHERE + j] != s.turn_where[earlier * n_lanes * N_WHERE + j]:
                    is_same = False
        if is_same:
            _skip(ops, s, step, turn, n_left, n_cycle)
            return
    if s.n_turns[0] >= ops.most_repetitions:
        s.is_rough[0] = 1
        _skip(ops, s, step, turn, n_left, n_kept - 1)


@compiled_inner
def _skip(ops: Ops, s: State, step: int, turn: int, n_left: int, n_cycle: int) -> None:
    """Skip those of `n_left` repetitions that form cycles of `n_cycle`, each equal to the last `n_cycle` until now."""
    earlier, n_cycles = (turn - n_cycle) % (MAX_CYCLE + 1), n_left // n_cycle
    if n_cycles <= 0:
        return
    n_lanes = len(s.position)
    skipped, skipped_s = n_cycles * n_cycle, n_cycles * (s.now_s[0] - s.turn_end_s[earlier])
    s.now_s[0] += skipped_s
    for lane in range(n_lanes):
        s.start_s[lane] += skipped_s
        s.end_s[lane] += skipped_s
        s.busy_s[step * n_lanes + lane] += n_cycles * (s.busy_s[step * n_lanes + lane] - s.turn_busy_s[earlier * n_lanes + lane])
        if ops.part_end[lane] > ops.part_first[lane]:
            s.turn[lane] += skipped
    for op in range(ops.repeat_first, ops.repeat_end):
        s.n_done[op] += skipped
    s.left_in_step[step] -= skipped * (ops.repeat_end - ops.repeat_first)
    s.n_turns[0] = 0
