"""The discrete-event simulator: how long a plan takes on a machine that is only arithmetic.

Where a plan repeats some of its ops, repetitions are performed until they repeat in time too; then the clock jumps over those that
could only do the same again. So a step of thousands of micro-batches takes as long to simulate as one of a few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from runtime.errors import PlanError
from runtime.plan import Lane, Plan, Repeat, Wait
from runtime.plan.region import Demand, Region, Uses, shares
from runtime.plan.timeline import FIRST_KEPT, LAST_KEPT, Span, Timeline, is_kept

MAX_CYCLE_STEPS = 8  # a plan may settle into a rhythm of several steps; longer ones are averaged
SAME_FRACTION = 1e-9  # two moments of two steps are the same when they differ by less than this share of a step
SAME_REPETITION_FRACTION = 1e-11  # of a repetition: thousands follow that are taken to be the same
USUAL_REPETITIONS = 8  # of a section until its rhythm is known, with those that timelines keep
MOST_REPETITIONS = 200  # performed before the rhythm of the last is taken for that of all the rest, though it is not the same
NOTHING = Repeat(0, 0, 1, 1)  # repeats
State = tuple[tuple[int, ...], tuple[float, ...]]  # where each lane is, and the seconds left of what it does
TIE_FRACTION = 1e-12  # ends closer than this share of the clock are one event: rounding must not order them


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan. `timeline` holds whole steps only, the warm-up included; of ops that repeat, the
    repetitions that timelines keep."""

    step_s: float
    periodic: bool  # False: no rhythm found, `step_s` is the mean of the last steps, or a step's repetitions in the middle are
    n_cycle_steps: int
    timeline: Timeline
    repeated_busy_s: tuple[dict[Lane, float], ...] = ()  # of each step, where ops repeat

    def busy_s(self, plan: Plan) -> dict[Lane, float]:
        """Time that each lane spends in ops in one settled step, slowed by the others as it is."""
        if settled := self.repeated_busy_s[-self.n_cycle_steps :]:
            return {lane: median(busy_s.get(lane, 0.0) for busy_s in settled) for lane in plan.lanes}
        n_steps = len(self.timeline.step_ends_s)
        return self.timeline.from_step(n_steps - self.n_cycle_steps).busy_s(plan)


def n_simulated(plan: Plan) -> int:
    """About how many ops of a step are performed one by one, to know how long it takes."""
    repeat = plan.repeat
    return len(plan.ops) + (0 if repeat is None else min(repeat.times - 1, USUAL_REPETITIONS) * repeat.n_ops)


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
                return Prediction(step_s, not clock.is_rough, n_cycle, clock.timeline(), clock.busy_of_steps_s())
    n_mean = min(MAX_CYCLE_STEPS, n_done - 1)
    if n_mean == 0:
        return Prediction(clock.step_ends_s[-1], False, 1, clock.timeline(), clock.busy_of_steps_s())
    step_s = (clock.step_ends_s[-1] - clock.step_ends_s[-1 - n_mean]) / n_mean
    return Prediction(step_s, False, n_mean, clock.timeline(), clock.busy_of_steps_s())


def _same(a: State, b: State, within_s: float) -> bool:
    return a[0] == b[0] and all(abs(x - y) <= within_s for x, y in zip(a[1], b[1], strict=True))


@dataclass(frozen=True, slots=True)
class _Turn:
    """How a repetition ended: when, in which state, and how busy lanes had been in the step until then."""

    end_s: float
    state: State
    busy_s: list[float]


class _Clock:
    """The event loop: lanes in plan order, one op each; time jumps from event to event."""

    def __init__(self, plan: Plan, demands: Sequence[Demand], region: Region | None, max_steps: int) -> None:
        self.plan, self.region = plan, region
        self.repeat = plan.repeat or NOTHING
        self.waits = [[self._times_before(i, wait) for wait in op.waits] for i, op in enumerate(plan.ops)]
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
        self.last_step = max_steps + MAX_CYCLE_STEPS  # a lane without waits must not run ahead for ever
        self.at = [0] * n_lanes  # index into the lane's queue
        self.step = [0] * n_lanes
        self.turn = [0] * n_lanes  # repetition, 0 outside of what repeats
        # Of each lane's queue, which part repeats
        counts = [[sum(op < end for op in queue) for end in (self.repeat.start, self.repeat.end)] for queue in self.queues]
        self.repeated = [range(first, end) for first, end in counts]
        self.current: list[int | None] = [None] * n_lanes  # op being performed
        self.working = [False] * n_lanes  # past its overhead
        self.start_s = [0.0] * n_lanes
        self.end_s = [0.0] * n_lanes  # of the overhead, or of the work at the present speed
        self.speed = [1.0] * n_lanes
        self.now_s = 0.0
        self.n_done = [0] * len(plan.ops)
        self.left_in_step: dict[int, int] = {}
        self.left_in_turn: dict[tuple[int, int], int] = {}  # by step and repetition
        self.turn_ended: tuple[int, int] | None = None  # a repetition that has just ended, in its step
        self.turns: dict[int, _Turn] = {}  # the repetitions performed of the step that is performed, by number
        self.step_ends_s: list[float] = []
        self.records: list[tuple[int, int, float, float, int]] = []
        self.busy_s: dict[int, list[float]] = {}  # of each step's lanes, where ops repeat
        self.is_rough = False  # some repetitions were skipped that were not quite the same

    def _times_before(self, i: int, wait: Wait) -> tuple[int, int, int, int]:
        """An op, and a, b, c: it is waited for until it has been performed a * step + b * repetition + c times since the start."""
        if wait.op not in self.repeat:
            return wait.op, 1, 0, 1 - wait.distance
        if i in self.repeat and not wait.distance:
            return wait.op, self.repeat.times, 1, 1 - wait.back
        return wait.op, self.repeat.times, 0, (1 - wait.distance) * self.repeat.times

    def _runs(self, alone: Sequence[bool]) -> dict[int, list[int]]:
        """The ops, by the first of each run: ops of a lane that share nothing, have no waits and are waited for by nobody but
        at the run's two ends need no events between them."""
        waited_for = {op for waits in self.waits for op, *_ in waits}
        parts = (self.repeat.start, self.repeat.end)
        runs: dict[int, list[int]] = {}
        latest: dict[Lane, list[int]] = {}
        for i, op in enumerate(self.plan.ops):
            run = latest.get(op.lane)
            goes_on = run is not None and not any(run[0] < first <= i for first in parts)
            if run is not None and goes_on and alone[i] and alone[run[0]] and not self.waits[i] and run[-1] not in waited_for:
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
            if self.turn_ended is not None:
                self._start()
                self._share()
                self._end_turn(*self.turn_ended)
                self.turn_ended = None
        self._start()
        self._share()

    def _end_turn(self, step: int, turn: int) -> None:
        """A repetition has ended: if as an earlier one did, so will those that follow, as long as no lane is beyond them."""
        if turn == 0:
            self.turns = {}
        inside = [self.step[lane] == step and self.at[lane] in part for lane, part in enumerate(self.repeated) if part]
        if not all(inside):
            self.turns = {}
            return
        now = self.turns[turn] = _Turn(self.now_s, self._state(step, turn), list(self.busy_s[step]))
        n_left = self.repeat.times - LAST_KEPT - 1 - max(self.turn)
        if turn < FIRST_KEPT or n_left <= 0:
            return
        for n_cycle in range(1, min(MAX_CYCLE_STEPS, turn) + 1):
            before = self.turns.get(turn - n_cycle)
            if before is not None and _same(
                now.state, before.state, SAME_REPETITION_FRACTION * (now.end_s - before.end_s) / n_cycle
            ):
                self._skip(step, before, n_left // n_cycle, n_cycle)
                return
        before = self.turns.get(turn - MAX_CYCLE_STEPS)
        if len(self.turns) >= MOST_REPETITIONS and before is not None:
            self.is_rough = True
            self._skip(step, before, n_left // MAX_CYCLE_STEPS, MAX_CYCLE_STEPS)

    def _skip(self, step: int, before: "_Turn", n_cycles: int, n_cycle: int) -> None:
        """Jump over a number of cycles, each like that from `before` to now."""
        if n_cycles <= 0:
            return
        skipped, skipped_s = n_cycles * n_cycle, n_cycles * (self.now_s - before.end_s)
        self.now_s += skipped_s
        for lane, part in enumerate(self.repeated):
            self.start_s[lane] += skipped_s
            self.end_s[lane] += skipped_s
            self.busy_s[step][lane] += n_cycles * (self.busy_s[step][lane] - before.busy_s[lane])
            self.turn[lane] += skipped if part else 0
        for i in range(self.repeat.start, self.repeat.end):
            self.n_done[i] += skipped
        self.left_in_step[step] -= skipped * self.repeat.n_ops
        self.left_in_turn = {(s, turn + skipped): left for (s, turn), left in self.left_in_turn.items()}
        self.turns = {}

    def state(self) -> State:
        """All that the future depends on, relative to the step just ended: lane positions, and work left at full speed."""
        return self._state(len(self.step_ends_s), 0)

    def _state(self, step: int, turn: int) -> State:
        where: list[int] = []
        left_s: list[float] = []
        for lane, current in enumerate(self.current):
            turns = self.turn[lane] - turn if self.repeated[lane] else 0
            where += [self.step[lane] - step, turns, self.at[lane], current is not None, self.working[lane]]
            left_s.append(0.0 if current is None else (self.end_s[lane] - self.now_s) * self.speed[lane])
        return tuple(where), tuple(left_s)

    def timeline(self) -> Timeline:
        n_done = len(self.step_ends_s)
        return Timeline(tuple(Span(op, step, a, b, turn) for op, step, a, b, turn in self.records if step < n_done))

    def busy_of_steps_s(self) -> tuple[dict[Lane, float], ...]:
        """Of each whole step, the time that each lane spent in its ops; nothing where no op repeats."""
        lanes = [self.plan.ops[queue[0]].lane for queue in self.queues]
        steps = range(len(self.step_ends_s)) if self.repeat.n_ops else ()
        return tuple(dict(zip(lanes, self.busy_s[step], strict=True)) for step in steps)

    def _start(self) -> None:
        """Begin the next op of every idle lane whose waits are over."""
        n_done = self.n_done
        for lane, current in enumerate(self.current):
            if current is not None or self.step[lane] >= self.last_step:
                continue
            op, step, turn = self.queues[lane][self.at[lane]], self.step[lane], self.turn[lane]
            for other, a, b, c in self.waits[op]:
                if n_done[other] < a * step + b * turn + c:
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
        step, turn = self.step[lane], self.turn[lane]
        run, repeats = self.runs[op], op in self.repeat
        start_s = self.start_s[lane]
        if self.repeat.n_ops:
            self.busy_s.setdefault(step, [0.0] * len(self.queues))[lane] += self.now_s - start_s
        if not repeats or is_kept(turn, self.repeat.times):
            for i in run[:-1]:
                self.records.append((i, step, start_s, start_s + self.alone_s[i], turn))
                start_s += self.alone_s[i]
            self.records.append((run[-1], step, start_s, self.now_s, turn))
        for i in run:
            self.n_done[i] += 1
        self.current[lane] = None
        self.working[lane] = False
        self._advance(lane)
        if repeats:
            self.left_in_turn[step, turn] = left = self.left_in_turn.get((step, turn), self.repeat.n_ops) - len(run)
            if left == 0:
                del self.left_in_turn[step, turn]
                self.turn_ended = (step, turn)
        self.left_in_step[step] = left = self.left_in_step.get(step, self.plan.n_performed) - len(run)
        if left == 0:
            del self.left_in_step[step]
            self.step_ends_s.append(self.now_s)

    def _advance(self, lane: int) -> None:
        """To the lane's next op: the next in its queue, the first of the next repetition, or of the next step."""
        self.at[lane] += 1
        if self.at[lane] == self.repeated[lane].stop and self.repeated[lane]:
            self.turn[lane] += 1
            if self.turn[lane] < self.repeat.times:
                self.at[lane] = self.repeated[lane].start
            else:
                self.turn[lane] = 0
        if self.at[lane] == len(self.queues[lane]):
            self.at[lane] = 0
            self.step[lane] += 1

    def _stuck(self) -> list[str]:
        """Who waits for whom, one phrase per lane."""
        phrases = []
        for lane, queue in enumerate(self.queues):
            op, step, turn = queue[self.at[lane]], self.step[lane], self.turn[lane]
            for other, a, b, c in self.waits[op]:
                if self.n_done[other] < a * step + b * turn + c:
                    phrases.append(f"{self.plan.ops[op].name} waits for {self.plan.ops[other].name}")
                    break
        return phrases or ["it has no ops"]
