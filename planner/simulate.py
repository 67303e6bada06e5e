"""How long will a plan take?"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import PlanError
from runtime.plan import Lane, Plan
from runtime.region import Demand, Region, Uses, shares
from runtime.timeline import Span, Timeline

MAX_CYCLE_STEPS = 8  # a plan may settle into a rhythm of several steps; longer ones are averaged
SAME_FRACTION = 1e-9  # two moments of two steps are the same when they differ by less than this share of a step
State = tuple[tuple[int, ...], tuple[float, ...]]  # where each lane is, and the seconds left of what it does
TIE_FRACTION = 1e-12  # ends closer than this share of the clock are one event: rounding must not order them


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan. `timeline` holds whole steps only, the warm-up included."""

    step_s: float
    periodic: bool  # False: no rhythm found, `step_s` is the mean of the last steps
    n_cycle_steps: int
    timeline: Timeline

    def busy_s(self, plan: Plan) -> dict[Lane, float]:
        """Time that each lane spends in ops in one settled step, slowed by the others as it is."""
        n_steps = len(self.timeline.step_ends_s)
        return self.timeline.from_step(n_steps - self.n_cycle_steps).busy_s(plan)


def simulate(plan: Plan, demands: Sequence[Demand], region: Region | None, max_steps: int = 32) -> Prediction:
    """Perform the plan on a machine that is only arithmetic, step after step, until the steps repeat.

    `demands` holds one entry per op of the plan. Without a `region` nothing is shared and every op takes its time alone.
    The steps repeat when the whole state at the end of a step (each lane's position and what is left of its op) is that
    at the end of an earlier step: from there on the machine can only do the same again.
    """
    clock = _Clock(plan, demands, region, max_steps)
    states: dict[int, State] = {}
    n_done = 0
    while n_done < max_steps:
        clock.run_step()
        n_done = len(clock.step_ends_s)
        states[n_done] = clock.state()
        for n_cycle in range(1, min(MAX_CYCLE_STEPS, n_done - 1) + 1):
            step_s = (clock.step_ends_s[-1] - clock.step_ends_s[-1 - n_cycle]) / n_cycle
            if n_done - n_cycle in states and _same(states[n_done], states[n_done - n_cycle], SAME_FRACTION * step_s):
                return Prediction(step_s, True, n_cycle, clock.timeline())
    n_mean = min(MAX_CYCLE_STEPS, n_done - 1)
    if n_mean == 0:
        return Prediction(clock.step_ends_s[-1], False, 1, clock.timeline())
    step_s = (clock.step_ends_s[-1] - clock.step_ends_s[-1 - n_mean]) / n_mean
    return Prediction(step_s, False, n_mean, clock.timeline())


def _same(a: State, b: State, within_s: float) -> bool:
    return a[0] == b[0] and all(abs(x - y) <= within_s for x, y in zip(a[1], b[1], strict=True))


class _Clock:
    """The event loop: lanes in plan order, one op each; time jumps from event to event."""

    def __init__(self, plan: Plan, demands: Sequence[Demand], region: Region | None, max_steps: int) -> None:
        self.plan, self.region = plan, region
        self.waits = [[(wait.op, wait.distance) for wait in op.waits] for op in plan.ops]
        # An op that shares nothing is one stretch of time: its overhead needs no event of its own.
        alone = [region is None or not demand.uses for demand in demands]
        self.overhead_s = [0.0 if free else demand.overhead_s for free, demand in zip(alone, demands, strict=True)]
        self.alone_s = [d.uncontended_s if free else d.alone_s for free, d in zip(alone, demands, strict=True)]
        self.runs = self._runs(alone)
        self.queues = [queue for lane in Lane if (queue := [i for i in self.runs if plan.ops[i].lane is lane])]
        self.uses: list[Uses] = [demand.uses for demand in demands]
        # Equal uses get one small number: the key under which speeds are remembered.
        numbers: dict[Uses, int] = {}
        self.number = [numbers.setdefault(uses, len(numbers)) for uses in self.uses]
        self.speeds_of: dict[tuple[int, ...], list[float]] = {}

        n_lanes = len(self.queues)
        self.last_step = max_steps + MAX_CYCLE_STEPS  # a lane that waits for nobody must not run ahead for ever
        self.at = [0] * n_lanes  # index into the lane's queue
        self.step = [0] * n_lanes
        self.current: list[int | None] = [None] * n_lanes  # op being performed
        self.working = [False] * n_lanes  # past its overhead
        self.start_s = [0.0] * n_lanes
        self.end_s = [0.0] * n_lanes  # of the overhead, or of the work at the present speed
        self.speed = [1.0] * n_lanes
        self.now_s = 0.0
        self.n_done = [0] * len(plan.ops)
        self.left_in_step: dict[int, int] = {}
        self.step_ends_s: list[float] = []
        self.records: list[tuple[int, int, float, float]] = []

    def _runs(self, alone: Sequence[bool]) -> dict[int, list[int]]:
        """The ops, by the first of each run: ops of a lane that share nothing, wait for nobody and are waited for by nobody but
        at the run's two ends need no events between them."""
        waited_for = {op for waits in self.waits for op, _ in waits}
        runs: dict[int, list[int]] = {}
        latest: dict[Lane, list[int]] = {}
        for i, op in enumerate(self.plan.ops):
            run = latest.get(op.lane)
            if run is not None and alone[i] and alone[run[0]] and not self.waits[i] and run[-1] not in waited_for:
                run.append(i)
            else:
                runs[i] = latest[op.lane] = [i]
        return runs

    def run_step(self) -> None:
        """Advance until one more step is done, and everything that can start at that moment has started."""
        n_steps = len(self.step_ends_s) + 1
        while len(self.step_ends_s) < n_steps:
            self._start()
            self._share()
            self._next_event()
        self._start()
        self._share()

    def state(self) -> State:
        """All that the future depends on, relative to the step just ended: lane positions, and work left at full speed."""
        n_done = len(self.step_ends_s)
        where: list[int] = []
        left_s: list[float] = []
        for lane, current in enumerate(self.current):
            where += [self.step[lane] - n_done, self.at[lane], current is not None, self.working[lane]]
            left_s.append(0.0 if current is None else (self.end_s[lane] - self.now_s) * self.speed[lane])
        return tuple(where), tuple(left_s)

    def timeline(self) -> Timeline:
        n_done = len(self.step_ends_s)
        return Timeline(tuple(Span(op, step, a, b) for op, step, a, b in self.records if step < n_done))

    def _start(self) -> None:
        """Begin the next op of every idle lane whose waits are over."""
        n_done = self.n_done
        for lane, current in enumerate(self.current):
            if current is not None or self.step[lane] >= self.last_step:
                continue
            op, step = self.queues[lane][self.at[lane]], self.step[lane]
            for other, distance in self.waits[op]:
                if n_done[other] + distance <= step:
                    break
            else:
                self.current[lane] = op
                self.start_s[lane] = self.now_s
                self.speed[lane] = 1.0
                self.working[lane] = self.overhead_s[op] <= 0
                seconds = self.alone_s[op] if self.working[lane] else self.overhead_s[op]
                if len(self.runs[op]) > 1:
                    seconds = sum([self.alone_s[i] for i in self.runs[op]])
                self.end_s[lane] = self.now_s + seconds

    def _share(self) -> None:
        """Give every op at work its fair speed; an op whose speed changes keeps what it has done."""
        if self.region is None:
            return
        key = tuple([self.number[op] if op is not None and self.working[lane] else -1 for lane, op in enumerate(self.current)])
        speeds = self.speeds_of.get(key)
        if speeds is None:
            lanes = [lane for lane, n in enumerate(key) if n >= 0]
            found = shares(tuple(self.uses[self.current[lane]] for lane in lanes), self.region)  # type: ignore[index]
            speeds = [1.0] * len(key)
            for lane, speed in zip(lanes, found, strict=True):
                if speed <= 0:
                    raise PlanError(f"{self.plan.ops[self.current[lane] or 0].name} needs what the machine has none of")
                speeds[lane] = speed
            self.speeds_of[key] = speeds
        for lane, speed in enumerate(speeds):
            if key[lane] >= 0 and speed != self.speed[lane]:
                self.end_s[lane] = self.now_s + (self.end_s[lane] - self.now_s) * self.speed[lane] / speed
                self.speed[lane] = speed

    def _next_event(self) -> None:
        """Jump to the next end of an overhead or of an op."""
        ends = [self.end_s[lane] for lane, op in enumerate(self.current) if op is not None]
        if not ends:
            raise PlanError("the plan never finishes: " + "; ".join(self._stuck()))
        limit_s = min(ends) * (1 + TIE_FRACTION)
        self.now_s = max(end for end in ends if end <= limit_s)
        for lane, op in enumerate(self.current):
            if op is None or self.end_s[lane] > limit_s:
                continue
            if not self.working[lane] and self.alone_s[op] > 0:
                self.working[lane] = True
                self.end_s[lane] = self.now_s + self.alone_s[op]
            else:
                self._finish(lane, op)

    def _finish(self, lane: int, op: int) -> None:
        step = self.step[lane]
        run = self.runs[op]
        start_s = self.start_s[lane]
        for i in run[:-1]:
            self.records.append((i, step, start_s, start_s + self.alone_s[i]))
            start_s += self.alone_s[i]
            self.n_done[i] += 1
        self.records.append((run[-1], step, start_s, self.now_s))
        self.n_done[run[-1]] += 1
        self.current[lane] = None
        self.working[lane] = False
        self.at[lane] += 1
        if self.at[lane] == len(self.queues[lane]):
            self.at[lane] = 0
            self.step[lane] += 1
        self.left_in_step[step] = left = self.left_in_step.get(step, len(self.n_done)) - len(run)
        if left == 0:
            del self.left_in_step[step]
            self.step_ends_s.append(self.now_s)

    def _stuck(self) -> list[str]:
        """Who waits for whom, one phrase per lane."""
        phrases = []
        for lane, queue in enumerate(self.queues):
            op, step = queue[self.at[lane]], self.step[lane]
            for other, distance in self.waits[op]:
                if self.n_done[other] + distance <= step:
                    phrases.append(f"{self.plan.ops[op].name} waits for {self.plan.ops[other].name}")
                    break
        return phrases or ["it has no ops"]
