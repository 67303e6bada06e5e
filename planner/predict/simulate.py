"""The discrete-event simulator: how long a plan takes on a machine that is only arithmetic.

What the event loop (`event_loop.py`) needs to know of a plan's ops is laid out in arrays once; what they ask for, for each machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from penstock.planner.lower.sheet import LANE_NUMBERS, LANES, Outline
from penstock.planner.lower.waits import Column
from penstock.runtime.compiled import floats, integers
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane, Plan, Repeat
from penstock.runtime.plan.region import Demand, Filling, Region, capacity_of, draws
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline

from .event_loop import IDLE, MAX_CYCLE, N_WHERE, Ops, State, run_step

SAME_FRACTION = 1e-9  # two moments of two steps are the same when they differ by less than this share of a step
SAME_REPETITION_FRACTION = 1e-11  # of a repetition: thousands follow that are taken to be the same
MOST_REPETITIONS = 200  # performed before the rhythm of the last is taken for that of all the rest
NOTHING = Repeat(0, 0, 1, 1)  # repeats
Moment = tuple[list[int], list[float]]  # where each lane is, and the seconds left of what it does


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan. `timeline` holds whole steps only, the warm-up included; of ops that repeat, the
    repetitions that timelines keep. It is empty where none was asked for."""

    step_s: float
    periodic: bool  # False: no rhythm found, `step_s` is the mean of the last steps, or a step's repetitions in the middle are
    n_cycle_steps: int
    timeline: Timeline
    busy_of_steps_s: tuple[dict[Lane, float], ...]  # of each step, the time that each lane spends in ops

    def busy_s(self, plan: Plan) -> dict[Lane, float]:
        """Time that each lane spends in ops in one settled step, slowed by the others as it is."""
        settled = self.busy_of_steps_s[-self.n_cycle_steps :]
        return {lane: median(busy_s.get(lane, 0.0) for busy_s in settled) for lane in plan.lanes}


def simulate(plan: Plan, demands: Sequence[Demand], region: Region | None, max_steps: int = 32) -> Prediction:
    """Perform the plan on a machine that is only arithmetic, step after step, until the steps repeat.

    `demands` holds one entry per op of the plan. Without a `region` nothing is shared and every op takes its time alone.
    """
    return Simulator(Outline.of(plan)).run(demands, region, max_steps, has_timeline=True)


class Simulator:
    """The ops of a plan, laid out for the event loop. Plans that have the same ops can share it."""

    def __init__(self, ops: Outline) -> None:
        self.ops, self.n_ops, self.repeat = ops, len(ops.kinds), ops.repeat or NOTHING
        n, repeat, lanes = self.n_ops, self.repeat, LANE_NUMBERS[ops.kinds]
        sizes, first, end = (np.bincount(lanes[:limit], minlength=len(LANES)) for limit in (n, repeat.start, repeat.end))
        (used,) = sizes.nonzero()
        self.lanes = [LANES[i] for i in used]
        n_kept = min(repeat.times, FIRST_KEPT + LAST_KEPT)
        self.n_spans_of = [n_kept if repeat.start <= i < repeat.end else 1 for i in range(n)]
        self.first_span = [0, *accumulate(self.n_spans_of)]
        self._ops = Ops(
            lane_first=integers(np.cumsum([0, *sizes[used]])),
            queue=integers(np.argsort(lanes, kind="stable")),
            part_first=integers(first[used]),
            part_end=integers(end[used]),
            wait_first=integers(ops.first(ops.waits)),
            wait_op=integers(ops.waits[3]),
            wait_times=integers(_times_before(repeat, ops.waits)),
            first_span=integers(self.first_span),
            repeat_first=repeat.start,
            repeat_end=repeat.end,
            times=repeat.times,
            same_fraction=SAME_REPETITION_FRACTION,
            most_repetitions=MOST_REPETITIONS,
            n_performed=n + (repeat.times - 1) * repeat.n_ops,
        )

    def run(self, demands: Sequence[Demand], region: Region | None, max_steps: int, has_timeline: bool = False) -> Prediction:
        """Step after step, until the whole state at the end of a step (each lane's position and what is left of its op) is that at
        the end of an earlier one: from there on the machine can only do the same again."""
        of = self._asked(demands, region, max_steps, has_timeline)
        state = self._begun(of)
        moments: list[Moment] = []
        for n_done in range(1, max_steps + 1):
            if not run_step(of, state):
                why = "its ops wait for one another, which `penstock check` shows, or need what the machine has none of"
                raise PlanError(f"the plan never finishes: {why}")
            moments.append(self._moment(state, n_done))
            for n_cycle in range(1, min(MAX_CYCLE, n_done - 1) + 1):
                step_s = (state.step_ends_s[n_done - 1] - state.step_ends_s[n_done - 1 - n_cycle]) / n_cycle
                if _same(moments[-1], moments[-1 - n_cycle], SAME_FRACTION * step_s):
                    return self._found(of, state, n_cycle, not state.is_rough[0])
        return self._found(of, state, min(MAX_CYCLE, max(1, max_steps - 1)), is_periodic=False)

    def _asked(self, demands: Sequence[Demand], region: Region | None, max_steps: int, has_timeline: bool) -> Ops:
        """With what each op asks for. One that shares nothing is one stretch of time: its overhead needs no event of its own."""
        shared, sorts = region or Region(()), {id(demand): demand for demand in demands}
        numbers = {name: i for i, name in enumerate(sorts)}
        of_op = np.array([numbers[id(demand)] for demand in demands], dtype=np.int64)
        is_sharing = np.array([region is not None and bool(demand.uses) for demand in sorts.values()], dtype=bool)
        overhead_s, alone_s, uncontended_s = np.array(
            [(demand.overhead_s, demand.alone_s, demand.uncontended_s) for demand in sorts.values()]
        ).reshape(-1, 3).T  # fmt: skip
        drawn = np.array([draws(demand.uses, shared) for demand in sorts.values()])
        return self._ops._replace(
            n_spans=self.first_span[-1] if has_timeline else 0,
            last_step=max_steps + MAX_CYCLE,
            overhead_s=floats(np.where(is_sharing, overhead_s, 0.0)[of_op]),
            alone_s=floats(np.where(is_sharing, alone_s, uncontended_s)[of_op]),
            draws=floats(drawn[of_op].ravel()),
            is_sharing=integers(is_sharing[of_op]),
            capacity=floats(capacity_of(shared)),
        )

    def _begun(self, of: Ops) -> State:
        """Nothing has been performed."""
        n, steps, turns = len(self.lanes), of.last_step + 1, MAX_CYCLE + 1

        def none(n: int, number: int = 0) -> Any:
            return integers([number] * n)

        def zeros(n: int) -> Any:
            return floats([0.0] * n)

        return State(
            none(n), none(n), none(n), none(n, IDLE), none(n), zeros(n), zeros(n), floats([1.0] * n), zeros(1),
            none(self.n_ops), none(steps, of.n_performed), zeros(steps * n), zeros(steps), none(1), none(1),
            none(n), Filling.allocate(n, len(of.capacity)), none(2, IDLE), none(1), none(1), zeros(turns),
            none(turns * n * N_WHERE), zeros(turns * n), zeros(turns * n), zeros(steps * of.n_spans), zeros(steps * of.n_spans),
        )  # fmt: skip

    def _moment(self, s: State, n_done: int) -> Moment:
        """All that the future depends on, relative to the step just ended: lane positions, and work left at full speed."""
        where, left_s = list[int](), list[float]()
        for lane in range(len(self.lanes)):
            is_idle = s.current[lane] == IDLE
            where += [s.step[lane] - n_done, s.turn[lane], s.at[lane], is_idle, s.is_working[lane]]
            left_s.append(0.0 if is_idle else (s.end_s[lane] - s.now_s[0]) * s.speed[lane])
        return where, left_s

    def _found(self, of: Ops, s: State, n_cycle: int, is_periodic: bool) -> Prediction:
        n_done, n_lanes = int(s.n_steps[0]), len(self.lanes)
        cycle_s = float(s.step_ends_s[n_done - 1]) - (float(s.step_ends_s[n_done - 1 - n_cycle]) if n_done > 1 else 0.0)
        busy_s = [dict(zip(self.lanes, map(float, s.busy_s[step * n_lanes :]), strict=False)) for step in range(n_done)]
        return Prediction(cycle_s / n_cycle, is_periodic, n_cycle, Timeline(tuple(self._spans(of, s, n_done))), tuple(busy_s))

    def _spans(self, of: Ops, s: State, n_done: int) -> Iterator[Span]:
        """Of whole steps, in the order in which a machine without lanes would perform the ops."""
        for step in range(n_done) if of.n_spans else ():
            for op, n_kept in enumerate(self.n_spans_of):
                for k in range(n_kept):
                    i = step * of.n_spans + self.first_span[op] + k
                    turn = k if k < FIRST_KEPT else k + self.repeat.times - n_kept
                    yield Span(op, step, float(s.span_start_s[i]), float(s.span_end_s[i]), turn)


def _times_before(repeat: Repeat, waits: Column) -> Column:
    """a, b, c, one after the other: an op is waited for until it has been performed a * step + b * repetition + c times since the
    start."""
    of, distance, back, op = waits
    found = np.stack([np.ones_like(of), np.zeros_like(of), 1 - distance], axis=1)
    repeats = (repeat.start <= op) & (op < repeat.end)
    found[repeats, 0] = repeat.times
    found[repeats, 2] *= repeat.times
    within = repeats & (repeat.start <= of) & (of < repeat.end) & (distance == 0)
    found[within, 1], found[within, 2] = 1, 1 - back[within]
    return found.ravel()


def _same(a: Moment, b: Moment, within_s: float) -> bool:
    return a[0] == b[0] and all(abs(x - y) <= within_s for x, y in zip(a[1], b[1], strict=True))
