"""Discrete-event simulator: predict the step time and timeline of a plan.

`Simulator` converts the ops of a plan to arrays for the event loop (`event_loop.py`) once, and demands once per machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from penstock.planner.lower.op_table import LANE_NUMBERS, LANES, OpTable
from penstock.planner.lower.waits import Column
from penstock.runtime.compiled import floats, integers
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane, Plan, Repeat
from penstock.runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline

from .event_loop import IDLE, MAX_CYCLE, N_WHERE, Ops, State, run_step
from .region import Demand, Filling, Region, capacity_of, draws

SAME_FRACTION = 1e-9  # tolerance for equal states at the ends of two steps, relative to the step time
SAME_REPETITION_FRACTION = 1e-11  # the same for repetitions; smaller, because thousands of repetitions are extrapolated
MOST_REPETITIONS = 200  # simulated before the average of the last ones is extrapolated
NOTHING = Repeat(0, 0, 1, 1)  # no repetition
Moment = tuple[list[int], list[float]]  # positions of the lanes, and seconds left of their current ops


@dataclass(frozen=True, slots=True)
class Prediction:
    """Result of a simulation. `timeline` holds complete steps, including warm-up, and those repetitions of repeated ops that
    timelines record; it is empty unless requested."""

    step_s: float
    periodic: bool  # False: no steady state was reached; `step_s` averages the last steps, or the step averages its repetitions
    n_cycle_steps: int
    timeline: Timeline
    busy_of_steps_s: tuple[dict[Lane, float], ...]  # by step: busy seconds of each lane

    def busy_s(self, plan: Plan) -> dict[Lane, float]:
        """Busy seconds of each lane in a steady-state step, including contention."""
        steady = self.busy_of_steps_s[-self.n_cycle_steps :]
        return {lane: median(busy_s.get(lane, 0.0) for busy_s in steady) for lane in plan.lanes}


def simulate(plan: Plan, demands: Sequence[Demand], region: Region | None, max_steps: int = 32) -> Prediction:
    """Simulate the plan step by step until steady state.

    `demands` has one entry per op of the plan. Without a `region` every op takes its uncontended time.
    """
    return Simulator(OpTable.from_plan(plan)).run(demands, region, max_steps, has_timeline=True)


class Simulator:
    """Simulator of an op table. Plans with equal ops can share it."""

    def __init__(self, ops: OpTable) -> None:
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
        """Simulate until the state at the end of a step (positions of the lanes, work left) equals that of an earlier step: from
        there on the simulation is periodic."""
        ops = self._with_demands(demands, region, max_steps, has_timeline)
        state = self._initial_state(ops)
        moments: list[Moment] = []
        for n_done in range(1, max_steps + 1):
            if not run_step(ops, state):
                why = "its ops wait for one another (see `penstock check`), or need a resource with capacity 0"
                raise PlanError(f"the plan never finishes: {why}")
            moments.append(self._moment(state, n_done))
            for n_cycle in range(1, min(MAX_CYCLE, n_done - 1) + 1):
                step_s = (state.step_ends_s[n_done - 1] - state.step_ends_s[n_done - 1 - n_cycle]) / n_cycle
                if _same(moments[-1], moments[-1 - n_cycle], SAME_FRACTION * step_s):
                    return self._prediction(ops, state, n_cycle, not state.is_rough[0])
        return self._prediction(ops, state, min(MAX_CYCLE, max(1, max_steps - 1)), is_periodic=False)

    def _with_demands(self, demands: Sequence[Demand], region: Region | None, max_steps: int, has_timeline: bool) -> Ops:
        """Add the demands to the ops. Overhead and work of an op without shared resources are merged into one event."""
        shared, sorts = region or Region(()), {id(demand): demand for demand in demands}
        numbers = {name: i for i, name in enumerate(sorts)}
        of_op = np.array([numbers[id(demand)] for demand in demands], dtype=np.int64)
        is_sharing = np.array([region is not None and bool(demand.uses) for demand in sorts.values()], dtype=bool)
        overhead_s, alone_s, uncontended_s = np.array(
            [(demand.overhead_s, demand.alone_s, demand.uncontended_s) for demand in sorts.values()]
        ).reshape(-1, 3).T  # fmt: skip
        rates = np.array([draws(demand.uses, shared) for demand in sorts.values()])
        return self._ops._replace(
            n_spans=self.first_span[-1] if has_timeline else 0,
            last_step=max_steps + MAX_CYCLE,
            overhead_s=floats(np.where(is_sharing, overhead_s, 0.0)[of_op]),
            alone_s=floats(np.where(is_sharing, alone_s, uncontended_s)[of_op]),
            draws=floats(rates[of_op].ravel()),
            is_sharing=integers(is_sharing[of_op]),
            capacity=floats(capacity_of(shared)),
        )

    def _initial_state(self, ops: Ops) -> State:
        n, steps, turns = len(self.lanes), ops.last_step + 1, MAX_CYCLE + 1

        def none(n: int, number: int = 0) -> Any:
            return integers([number] * n)

        def zeros(n: int) -> Any:
            return floats([0.0] * n)

        return State(
            none(n), none(n), none(n), none(n, IDLE), none(n), zeros(n), zeros(n), floats([1.0] * n), zeros(1),
            none(self.n_ops), none(steps, ops.n_performed), zeros(steps * n), zeros(steps), none(1), none(1),
            none(n), Filling.allocate(n, len(ops.capacity)), none(2, IDLE), none(1), none(1), zeros(turns),
            none(turns * n * N_WHERE), zeros(turns * n), zeros(turns * n), zeros(steps * ops.n_spans), zeros(steps * ops.n_spans),
        )  # fmt: skip

    def _moment(self, s: State, n_done: int) -> Moment:
        """Return the state relative to the step that just ended: lane positions, and work left at full speed."""
        where, left_s = list[int](), list[float]()
        for lane in range(len(self.lanes)):
            is_idle = s.current[lane] == IDLE
            where += [s.step[lane] - n_done, s.turn[lane], s.position[lane], is_idle, s.is_working[lane]]
            left_s.append(0.0 if is_idle else (s.end_s[lane] - s.now_s[0]) * s.speed[lane])
        return where, left_s

    def _prediction(self, ops: Ops, s: State, n_cycle: int, is_periodic: bool) -> Prediction:
        n_done, n_lanes = int(s.n_steps[0]), len(self.lanes)
        cycle_s = float(s.step_ends_s[n_done - 1]) - (float(s.step_ends_s[n_done - 1 - n_cycle]) if n_done > 1 else 0.0)
        busy_s = [dict(zip(self.lanes, map(float, s.busy_s[step * n_lanes :]), strict=False)) for step in range(n_done)]
        return Prediction(cycle_s / n_cycle, is_periodic, n_cycle, Timeline(tuple(self._spans(ops, s, n_done))), tuple(busy_s))

    def _spans(self, ops: Ops, s: State, n_done: int) -> Iterator[Span]:
        for step in range(n_done) if ops.n_spans else ():
            for op, n_kept in enumerate(self.n_spans_of):
                for k in range(n_kept):
                    i = step * ops.n_spans + self.first_span[op] + k
                    turn = k if k < FIRST_KEPT else k + self.repeat.times - n_kept
                    yield Span(op, step, float(s.span_start_s[i]), float(s.span_end_s[i]), turn)


def _times_before(repeat: Repeat, waits: Column) -> Column:
    """Return (a, b, c) of each wait: the awaited op must have been done a * step + b * repetition + c times since the start."""
    waiting, distance, back, op = waits
    table = np.stack([np.ones_like(waiting), np.zeros_like(waiting), 1 - distance], axis=1)
    repeats = (repeat.start <= op) & (op < repeat.end)
    table[repeats, 0] = repeat.times
    table[repeats, 2] *= repeat.times
    within = repeats & (repeat.start <= waiting) & (waiting < repeat.end) & (distance == 0)
    table[within, 1], table[within, 2] = 1, 1 - back[within]
    return table.ravel()


def _same(a: Moment, b: Moment, within_s: float) -> bool:
    return a[0] == b[0] and all(abs(x - y) <= within_s for x, y in zip(a[1], b[1], strict=True))
