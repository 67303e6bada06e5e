"""The event loop of the simulator, on arrays: each lane performs its ops in plan order, and time jumps from event to event.

Where ops repeat, repetitions are performed until they repeat in time too; then the clock jumps over those that could only do the
same again. Functions here are compiled (`runtime/compiled.py`).
"""

from typing import Any, NamedTuple

from penstock.runtime.compiled import compiled_bare
from penstock.runtime.plan.region import Filling, fill
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT

MAX_CYCLE = 8  # steps, or repetitions, of a rhythm; longer ones are averaged
TIE_FRACTION = 1e-12  # ends closer than this share of the clock are one event: rounding must not order them
N_WHERE = 5  # numbers that say where a lane is
IDLE = -1


class Ops(NamedTuple):
    """The ops of a plan and what they ask for. Arrays by op, by lane (`lane_`), or by wait (`wait_`)."""

    lane_first: Any  # of each lane its first place in `queue`, and the end
    queue: Any  # ops, lane by lane
    part_first: Any  # of each lane the places in its queue that repeat
    part_end: Any
    wait_first: Any  # of each op its first wait, and the end
    wait_op: Any
    wait_times: Any  # three numbers of each wait
    first_span: Any  # of each op; a repeated one has a span for each repetition that is kept
    repeat_first: int
    repeat_end: int
    times: int
    same_fraction: float  # of a repetition: moments of two are the same when they differ by less
    most_repetitions: int  # performed before the rhythm of the last is taken for that of all the rest, though it is not the same
    n_performed: int  # in a step
    n_spans: int = 0  # in a step; 0: none is kept
    last_step: int = 0  # a lane without waits must not run ahead for ever
    overhead_s: Any = None
    alone_s: Any = None
    draws: Any = None  # units per second of each resource at full speed, op by op
    is_sharing: Any = None  # whether it draws on any
    capacity: Any = None


class State(NamedTuple):
    """Where each lane is, and what has been recorded."""

    at: Any  # place in the lane's queue
    step: Any
    turn: Any  # repetition, 0 outside of what repeats
    current: Any  # op being performed
    is_working: Any  # past its overhead
    start_s: Any
    end_s: Any  # of the overhead, or of the work at the present speed
    speed: Any
    now_s: Any  # one number
    n_done: Any  # by op
    left_in_step: Any  # by step: ops not yet done
    busy_s: Any  # by step and lane
    step_ends_s: Any
    n_steps: Any  # one number: steps done
    is_changed: Any  # one number: which ops share has changed
    sharing: Any  # the lanes of these
    filling: Filling
    ended: Any  # step and repetition that has just ended
    n_turns: Any  # repetitions performed, at a stretch, of the step that is performed
    is_rough: Any  # some repetitions were skipped that were not quite the same
    turn_end_s: Any  # of the last repetitions, as many as a rhythm has and one: their end, state and lanes' time
    turn_where: Any
    turn_left_s: Any
    turn_busy_s: Any
    span_start_s: Any
    span_end_s: Any


@compiled_bare
def run_step(of: Ops, s: State) -> bool:
    """Advance until one more step is done, and everything that can start at that moment has started. False: it never is, for no op
    can end, or one needs what the machine has none of."""
    n_steps = s.n_steps[0] + 1
    while s.n_steps[0] < n_steps:
        _start(of, s)
        if not _share(of, s) or not _next_event(of, s):
            return False
        if s.ended[0] != IDLE:
            _start(of, s)
            if not _share(of, s):
                return False
            _end_turn(of, s, s.ended[0], s.ended[1])
            s.ended[0] = IDLE
    _start(of, s)
    return _share(of, s)


@compiled_bare
def _start(of: Ops, s: State) -> None:
    """Begin the next op of every idle lane whose waits are over."""
    for lane in range(len(s.at)):
        if s.current[lane] != IDLE or s.step[lane] >= of.last_step:
            continue
        op, step, turn = of.queue[of.lane_first[lane] + s.at[lane]], s.step[lane], s.turn[lane]
        is_ready = True
        for i in range(of.wait_first[op], of.wait_first[op + 1]):
            # How often the op that is waited for must have been performed since the start
            times = of.wait_times[3 * i] * step + of.wait_times[3 * i + 1] * turn + of.wait_times[3 * i + 2]
            if s.n_done[of.wait_op[i]] < times:
                is_ready = False
                break
        if is_ready:
            s.current[lane], s.start_s[lane], s.speed[lane] = op, s.now_s[0], 1.0
            s.is_working[lane] = of.overhead_s[op] <= 0
            s.end_s[lane] = s.now_s[0] + (of.alone_s[op] if s.is_working[lane] else of.overhead_s[op])
            if s.is_working[lane] and of.is_sharing[op]:
                s.is_changed[0] = 1


@compiled_bare
def _share(of: Ops, s: State) -> bool:
    """Give every op at work its fair speed; an op whose speed changes keeps what it has done. False: one would stand still."""
    if not s.is_changed[0]:
        return True
    s.is_changed[0] = 0
    n_resources, n = len(of.capacity), 0
    for lane in range(len(s.at)):
        op = s.current[lane]
        if op != IDLE and s.is_working[lane] and of.is_sharing[op]:
            for r in range(n_resources):
                s.filling.draws[n * n_resources + r] = of.draws[op * n_resources + r]
            s.sharing[n] = lane
            n += 1
    fill(n, s.filling, of.capacity)
    for i in range(n):
        lane, speed = s.sharing[i], s.filling.speeds[i]
        if speed <= 0:
            return False
        if speed != s.speed[lane]:
            s.end_s[lane] = s.now_s[0] + (s.end_s[lane] - s.now_s[0]) * s.speed[lane] / speed
            s.speed[lane] = speed
    return True


@compiled_bare
def _next_event(of: Ops, s: State) -> bool:
    """Jump to the next end of an overhead or of an op. False: there is none."""
    soonest_s, n = 0.0, 0
    for lane in range(len(s.at)):
        if s.current[lane] != IDLE and (n == 0 or s.end_s[lane] < soonest_s):
            soonest_s, n = s.end_s[lane], 1
    if n == 0:
        return False
    limit_s = soonest_s * (1 + TIE_FRACTION)
    now_s = soonest_s
    for lane in range(len(s.at)):
        if s.current[lane] != IDLE and s.end_s[lane] <= limit_s:
            now_s = max(now_s, s.end_s[lane])
    s.now_s[0] = now_s
    for lane in range(len(s.at)):
        op = s.current[lane]
        if op == IDLE or s.end_s[lane] > limit_s:
            continue
        if not s.is_working[lane] and of.alone_s[op] > 0:
            s.is_working[lane] = True
            s.end_s[lane] = now_s + of.alone_s[op]
        else:
            _finish(of, s, lane, op)
        if of.is_sharing[op]:
            s.is_changed[0] = 1
    return True


@compiled_bare
def _finish(of: Ops, s: State, lane: int, op: int) -> None:
    """The op of a lane is done."""
    step, turn, repeats = s.step[lane], s.turn[lane], of.repeat_first <= op < of.repeat_end
    s.busy_s[step * len(s.at) + lane] += s.now_s[0] - s.start_s[lane]
    if of.n_spans and (not repeats or turn < FIRST_KEPT or turn >= of.times - LAST_KEPT):
        kept = turn if turn < FIRST_KEPT else turn - max(of.times - FIRST_KEPT - LAST_KEPT, 0)
        i = step * of.n_spans + of.first_span[op] + (kept if repeats else 0)
        s.span_start_s[i], s.span_end_s[i] = s.start_s[lane], s.now_s[0]
    s.n_done[op] += 1
    s.current[lane], s.is_working[lane] = IDLE, False
    # To the lane's next op: the next in its queue, the first of the next repetition, or of the next step.
    s.at[lane] += 1
    if repeats and s.at[lane] == of.part_end[lane]:
        is_last = True
        s.turn[lane] += 1
        for other in range(len(s.at)):
            if of.part_end[other] > of.part_first[other]:
                is_beyond = s.turn[other] > turn or s.at[other] >= of.part_end[other]
                is_last = is_last and (s.step[other] > step or (s.step[other] == step and is_beyond))
        if s.turn[lane] < of.times:
            s.at[lane] = of.part_first[lane]
        else:
            s.turn[lane] = 0
        if is_last:
            s.ended[0], s.ended[1] = step, turn
    if s.at[lane] == of.lane_first[lane + 1] - of.lane_first[lane]:
        s.at[lane] = 0
        s.step[lane] += 1
    s.left_in_step[step] -= 1
    if s.left_in_step[step] == 0:
        s.step_ends_s[s.n_steps[0]] = s.now_s[0]
        s.n_steps[0] += 1


@compiled_bare
def _end_turn(of: Ops, s: State, step: int, turn: int) -> None:
    """A repetition has ended: if as an earlier one did, so will those that follow, as long as no lane is beyond them."""
    n_lanes, n_kept = len(s.at), MAX_CYCLE + 1
    furthest = 0
    if turn == 0:
        s.n_turns[0] = 0
    for lane in range(n_lanes):
        if of.part_end[lane] > of.part_first[lane]:
            if s.step[lane] != step or not of.part_first[lane] <= s.at[lane] < of.part_end[lane]:
                s.n_turns[0] = 0
                return
            furthest = max(furthest, s.turn[lane])
    row = turn % n_kept
    s.turn_end_s[row] = s.now_s[0]
    s.n_turns[0] += 1
    for lane in range(n_lanes):
        first, is_idle = (row * n_lanes + lane) * N_WHERE, s.current[lane] == IDLE
        repeats = of.part_end[lane] > of.part_first[lane]
        s.turn_where[first] = s.step[lane] - step
        s.turn_where[first + 1] = s.turn[lane] - turn if repeats else 0
        s.turn_where[first + 2] = s.at[lane]
        s.turn_where[first + 3] = is_idle
        s.turn_where[first + 4] = s.is_working[lane]
        s.turn_left_s[row * n_lanes + lane] = 0.0 if is_idle else (s.end_s[lane] - s.now_s[0]) * s.speed[lane]
        s.turn_busy_s[row * n_lanes + lane] = s.busy_s[step * n_lanes + lane]
    n_left = of.times - LAST_KEPT - 1 - furthest
    if turn < FIRST_KEPT or n_left <= 0:
        return
    for n_cycle in range(1, min(MAX_CYCLE, s.n_turns[0] - 1) + 1):
        before = (turn - n_cycle) % n_kept
        within_s = of.same_fraction * (s.now_s[0] - s.turn_end_s[before]) / n_cycle
        is_same = True
        for i in range(n_lanes):
            if abs(s.turn_left_s[row * n_lanes + i] - s.turn_left_s[before * n_lanes + i]) > within_s:
                is_same = False
            for j in range(i * N_WHERE, (i + 1) * N_WHERE):
                if s.turn_where[row * n_lanes * N_WHERE + j] != s.turn_where[before * n_lanes * N_WHERE + j]:
                    is_same = False
        if is_same:
            _skip(of, s, step, before, n_left // n_cycle, n_cycle)
            return
    if s.n_turns[0] >= of.most_repetitions:
        s.is_rough[0] = 1
        _skip(of, s, step, (turn - MAX_CYCLE) % n_kept, n_left // MAX_CYCLE, MAX_CYCLE)


@compiled_bare
def _skip(of: Ops, s: State, step: int, before: int, n_cycles: int, n_cycle: int) -> None:
    """Jump over a number of cycles, each like that from repetition `before` to now."""
    if n_cycles <= 0:
        return
    n_lanes = len(s.at)
    skipped, skipped_s = n_cycles * n_cycle, n_cycles * (s.now_s[0] - s.turn_end_s[before])
    s.now_s[0] += skipped_s
    for lane in range(n_lanes):
        s.start_s[lane] += skipped_s
        s.end_s[lane] += skipped_s
        s.busy_s[step * n_lanes + lane] += n_cycles * (s.busy_s[step * n_lanes + lane] - s.turn_busy_s[before * n_lanes + lane])
        if of.part_end[lane] > of.part_first[lane]:
            s.turn[lane] += skipped
    for op in range(of.repeat_first, of.repeat_end):
        s.n_done[op] += skipped
    s.left_in_step[step] -= skipped * (of.repeat_end - of.repeat_first)
    s.n_turns[0] = 0
