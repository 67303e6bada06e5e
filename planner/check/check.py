"""Checker: proves a plan correct for every possible duration of every op.

A plan passes if each op finds the values that it needs in its slots, and no lane waits forever. The checker relies on the contract
in docs/plan-language.md only, and shares no code with planning or cost models. docs/checker.md explains why checking two steps
covers all steps, and two repetitions of a long step any number.
"""

from graphlib import CycleError, TopologicalSorter

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.abridged import shortened
from penstock.planner.predict.memory import footprint, short_of
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Lane, Plan, Slot, Update
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.plan import refuse_malformed, unrolled
from penstock.runtime.units import show_bytes

from .contract import check_arenas, check_ops, check_repeat
from .dataflow import check_data
from .shape import Shape, wrong

N_STEPS, N_REPETITIONS = 2, 2  # docs/checker.md


def check(plan: Plan) -> None:
    """Raise PlanError with the first error of the plan."""
    refuse_malformed(plan)
    refuse_illegal(plan.workload, plan.semantics, plan.policy)  # lowering uses these rules, too
    shape = Shape(plan)
    check_arenas(plan)
    if plan.repeat is None:
        _check_step(plan, shape)
    else:
        check_repeat(plan, plan.repeat, shape)
        short = unrolled(shortened(plan, N_REPETITIONS))
        try:
            _check_step(short, Shape(short))
        except PlanError as error:  # its ops have other indices
            raise PlanError(f"with {N_REPETITIONS} of {plan.repeat.times} repetitions written out: {error}") from None
    needs = footprint(plan, Profile.from_json(plan.profile, "profile"))
    if not needs.fits:
        raise PlanError(f"{short_of(needs)}; plan for a machine with more")


def _check_step(plan: Plan, shape: Shape) -> None:
    """Check that the step has every op, in a valid order, with the data that it needs."""
    check_ops(plan, shape)
    order = _legal_order(plan)
    clocks = _Clocks(plan, order)
    _check_races(plan, order, clocks)
    check_data(plan, shape, order, N_STEPS)
    _check_schedule(plan, shape, clocks)


def summary(plan: Plan) -> str:
    """Return one line about a plan that passed: its size and the memory that it needs."""
    policy, n_micro_batches = plan.policy, plan.semantics.n_micro_batches
    needs = footprint(plan, Profile.from_json(plan.profile, "profile"))
    device = f"device {show_bytes(needs.device_peak_bytes)} of {show_bytes(needs.device_memory_bytes)}"
    host = f"host {show_bytes(needs.host_peak_bytes)} of {show_bytes(needs.host_memory_bytes)}"
    return (
        f"valid: {plan.n_performed} ops a step, {len(plan.workload.blocks)} blocks, {n_micro_batches} micro-batches in "
        f"groups of {policy.accumulation_group}, {policy.update} update; {device}, {host}"
    )


def _legal_order(plan: Plan) -> list[int]:
    """Topological order of a step's ops that respects lanes and waits. PlanError for a cycle.

    Waits for the previous step cannot close a cycle, because no op waits for a later step.
    """
    predecessors: dict[int, list[int]] = {}
    last_of_lane: dict[Lane, list[int]] = {}
    for i, op in enumerate(plan.ops):
        predecessors[i] = [w.op for w in op.waits if w.distance == 0] + last_of_lane.get(op.lane, [])
        last_of_lane[op.lane] = [i]
    try:
        return list(TopologicalSorter(predecessors).static_order())
    except CycleError as error:
        i = min(error.args[1])
        raise wrong(i, plan.ops[i], "can never start: its waits and its lane form a cycle") from None


class _Clocks:
    """Vector clocks: happens-before between ops. For each op in each step, the number of ops of every lane, counted from the first
    step, that are certainly done when it starts and when it ends."""

    def __init__(self, plan: Plan, order: list[int]) -> None:
        lanes = tuple(Lane)
        self.lane = [lanes.index(op.lane) for op in plan.ops]
        self.starts, self.ends = ([[list[int]() for _ in plan.ops] for _ in range(N_STEPS)] for _ in range(2))
        lane_ends = [[0] * len(lanes) for _ in lanes]  # at the end of each lane's latest op
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
        """True if an op in one step is certainly done before another op starts."""
        lane = self.lane[first]
        return self.starts[second_step][second][lane] >= self.ends[first_step][first][lane]


def _check_races(plan: Plan, order: list[int], clocks: _Clocks) -> None:
    """Check that conflicting uses of a slot are ordered: uses after the last write, and a write after all uses since."""
    numbers: dict[Slot, int] = {}  # slot indices: a plan has many uses of few slots
    uses: list[list[tuple[int, bool]]] = []  # per op: (slot, True if written)
    for op in plan.ops:
        written = {numbers.setdefault(slot, len(numbers)) for slot in op.writes}
        read = {numbers.setdefault(slot, len(numbers)) for slot in op.reads} - written
        uses.append([*((slot, True) for slot in written), *((slot, False) for slot in read)])
    last_write: list[list[tuple[int, int]]] = [[] for _ in numbers]  # per slot, at most one (op, step)
    uses_since: list[list[tuple[int, int]]] = [[] for _ in numbers]
    for step in range(N_STEPS):
        for i in order:
            for slot, writes in uses[i]:
                for j, j_step in last_write[slot] + uses_since[slot] if writes else last_write[slot]:
                    if not clocks.ordered(j, j_step, i, step):
                        rival = plan.ops[j].name + ("" if j_step == step else ", the step before")
                        message = f"a race for {list(numbers)[slot]} with op {j} ({rival}): neither waits for the other"
                        raise wrong(i, plan.ops[i], message)
                if writes:
                    last_write[slot], uses_since[slot] = [(i, step)], []
                else:
                    uses_since[slot].append((i, step))


def _check_schedule(plan: Plan, shape: Shape, clocks: _Clocks) -> None:
    """Check the order of ops that the policy specifies, in addition to the data dependencies."""
    if plan.policy.update is Update.BARRIER:
        last_updates = {op.kind: i for i, op in enumerate(plan.ops) if op.kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE)}
        first_load = min(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)
        for last_update in last_updates.values():
            if not clocks.ordered(last_update, 0, first_load, 1):
                message = f"under barrier it must wait for op {last_update} ({plan.ops[last_update].name}) of the step before"
                raise wrong(first_load, plan.ops[first_load], message)
    group = 0  # groups run one after another, so that autograd keeps the saved tensors of one group, as `kept_bytes` counts
    for i, op in enumerate(plan.ops):
        if op.lane is Lane.GPU and op.micro_batch is not None:
            if op.micro_batch // shape.group < group:
                raise wrong(i, op, "runs after a later group of micro-batches")
            group = op.micro_batch // shape.group
