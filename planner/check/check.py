"""The checker: it proves a plan right for every possible duration of every op.

A plan passes when each op finds in its slots exactly what it needs, and no lane waits for ever. The checker knows the contract in
docs/plan-language.md and nothing of how plans are made or timed. docs/checker.md argues why two steps stand for all, and two
repetitions of a long step for any number.
"""

from graphlib import CycleError, TopologicalSorter

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.memory import footprint, short_of
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Lane, Plan, Slot, Update
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.plan import refuse_malformed, shortened, unrolled
from penstock.runtime.units import show_bytes

from .contract import check_arenas, check_ops, check_repeat
from .dataflow import check_data
from .shape import Shape, wrong

N_STEPS, N_REPETITIONS = 2, 2  # docs/checker.md


def check(plan: Plan) -> None:
    """Raise PlanError with the first thing that is wrong with the plan; else return."""
    refuse_malformed(plan)
    refuse_illegal(plan.workload, plan.semantics, plan.policy)  # by the same rules as where it is lowered
    shape = Shape(plan)
    check_arenas(plan)
    if plan.repeat is None:
        _check_step(plan, shape)
    else:
        check_repeat(plan, plan.repeat, shape)
        short = unrolled(shortened(plan, N_REPETITIONS))
        try:
            _check_step(short, Shape(short))
        except PlanError as error:  # its ops have other numbers
            raise PlanError(f"with {N_REPETITIONS} of {plan.repeat.times} repetitions written out: {error}") from None
    needs = footprint(plan, Profile.from_json(plan.profile, "profile"))
    if not needs.fits:
        raise PlanError(f"{short_of(needs)}; plan for a machine with more")


def _check_step(plan: Plan, shape: Shape) -> None:
    """Every op is there, in time, and finds what it needs."""
    check_ops(plan, shape)
    order = _legal_order(plan)
    clocks = _Clocks(plan, order)
    _check_races(plan, order, clocks)
    check_data(plan, shape, order, N_STEPS)
    _check_schedule(plan, shape, clocks)


def summary(plan: Plan) -> str:
    """One line about a plan that passed: what it computes and how much of the machine's memory it takes."""
    policy, n_micro_batches = plan.policy, plan.semantics.n_micro_batches
    needs = footprint(plan, Profile.from_json(plan.profile, "profile"))
    device = f"device {show_bytes(needs.device_peak_bytes)} of {show_bytes(needs.device_memory_bytes)}"
    host = f"host {show_bytes(needs.host_peak_bytes)} of {show_bytes(needs.host_memory_bytes)}"
    return (
        f"right: {plan.n_performed} ops a step, {len(plan.workload.blocks)} blocks, {n_micro_batches} micro-batches in "
        f"groups of {policy.accumulation_group}, {policy.update} update; {device}, {host}"
    )


def _legal_order(plan: Plan) -> list[int]:
    """The ops of a step in an order that respects lanes and waits; PlanError when there is none.

    Waits for the step before cannot close a cycle: nothing waits for a later step.
    """
    before: dict[int, list[int]] = {}
    last_of_lane: dict[Lane, list[int]] = {}
    for i, op in enumerate(plan.ops):
        before[i] = [w.op for w in op.waits if w.distance == 0] + last_of_lane.get(op.lane, [])
        last_of_lane[op.lane] = [i]
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        i = min(error.args[1])
        raise wrong(i, plan.ops[i], "can never start, its waits and its lane close a circle") from None


class _Clocks:
    """Who surely comes before whom: of each op in each step, how many ops of every lane, counted from the first step, are done when
    it starts, whatever the timing, and when it ends."""

    def __init__(self, plan: Plan, order: list[int]) -> None:
        lanes = tuple(Lane)
        self.lane = [lanes.index(op.lane) for op in plan.ops]
        self.starts, self.ends = ([[list[int]() for _ in plan.ops] for _ in range(N_STEPS)] for _ in range(2))
        lane_ends = [[0] * len(lanes) for _ in lanes]  # of the latest op of each lane, at its end
        for step in range(N_STEPS):
            for i in order:
                lane = self.lane[i]
                clock = lane_ends[lane]
                for wait in plan.ops[i].waits:
                    if step >= wait.distance:
                        clock = list(map(max, clock, self.ends[step - wait.distance][wait.op]))
                end = clock.copy()
                end[lane] += 1
                self.starts[step][i], self.ends[step][i], lane_ends[lane] = clock, end, end

    def ordered(self, first: int, first_step: int, second: int, second_step: int) -> bool:
        """Whether an op in a step is surely done before another one starts."""
        lane = self.lane[first]
        return self.starts[second_step][second][lane] >= self.ends[first_step][first][lane]


def _check_races(plan: Plan, order: list[int], clocks: _Clocks) -> None:
    """Every two uses of a slot, one a write, are ordered: uses after the last write, writes after the uses since."""
    numbers: dict[Slot, int] = {}  # slots by number: a plan has many uses of few slots
    uses: list[list[tuple[int, bool]]] = []  # of each op: the slots, and whether it writes them
    for op in plan.ops:
        written = {numbers.setdefault(slot, len(numbers)) for slot in op.writes}
        read = {numbers.setdefault(slot, len(numbers)) for slot in op.reads} - written
        uses.append([*((slot, True) for slot in written), *((slot, False) for slot in read)])
    last_write: list[list[tuple[int, int]]] = [[] for _ in numbers]  # at most one
    uses_since: list[list[tuple[int, int]]] = [[] for _ in numbers]
    for step in range(N_STEPS):
        for i in order:
            for slot, writes in uses[i]:
                for j, j_step in last_write[slot] + uses_since[slot] if writes else last_write[slot]:
                    if not clocks.ordered(j, j_step, i, step):
                        other = plan.ops[j].name + ("" if j_step == step else ", the step before")
                        what = f"a race for {list(numbers)[slot]} with op {j} ({other}): neither waits for the other"
                        raise wrong(i, plan.ops[i], what)
                if writes:
                    last_write[slot], uses_since[slot] = [(i, step)], []
                else:
                    uses_since[slot].append((i, step))


def _check_schedule(plan: Plan, shape: Shape, clocks: _Clocks) -> None:
    """What the policy promises of the order of ops, beyond what keeps the data right."""
    if plan.policy.update is Update.BARRIER:
        last_updates = {op.kind: i for i, op in enumerate(plan.ops) if op.kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE)}
        first_load = min(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)
        for last_update in last_updates.values():
            if not clocks.ordered(last_update, 0, first_load, 1):
                what = f"under barrier it must wait for op {last_update} ({plan.ops[last_update].name}) of the step before"
                raise wrong(first_load, plan.ops[first_load], what)
    group = 0  # groups one after another: what autograd keeps is then that of one group, as `kept_bytes` counts it
    for i, op in enumerate(plan.ops):
        if op.lane is Lane.GPU and op.micro_batch is not None:
            if op.micro_batch // shape.group < group:
                raise wrong(i, op, "comes after a later group of micro-batches")
            group = op.micro_batch // shape.group
