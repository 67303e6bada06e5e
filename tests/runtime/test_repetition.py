"""Folded plans with repeated ops equal their unrolled form: values, waits, times and checker results."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.check.check import _Clocks, _legal_order, check
from penstock.planner.lower.lower import folded_ops, unfolded_ops
from penstock.planner.predict.event_loop import MAX_CYCLE
from penstock.planner.predict.region import Demand, Region, Resource
from penstock.planner.predict.simulate import simulate
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane, Plan, PlanFile, Policy, Semantics, Update, Wait, saves
from penstock.runtime.plan.ops import MAX_REPETITIONS
from penstock.runtime.plan.plan import unrolled
from penstock.runtime.plan.timeline import is_kept
from penstock.runtime.plan.train import Train
from tests.edits import passes, plan_by, rewaited, set_op
from tests.lanes import examples, mostly_slow
from tests.mutants import ADAPTED, Mutant
from tests.mutants import MUTATIONS as ALL_MUTATIONS
from tests.oracle import same_training
from tests.strategies import MODEL, Case, cases, small_workload

REGION = Region(((Resource.H2D, 1.0), (Resource.DUPLEX, 1.5), (Resource.DRAM, 2.0), (Resource.CORES, 1.0)))
law = settings(deadline=None, max_examples=examples(25), suppress_health_check=list(HealthCheck))


@st.composite
def folded(draw: st.DrawFn, max_layers: int = 4, max_repetitions: int = 8) -> Plan:
    """Return a folded plan of any legal policy with groups."""
    strategy = cases(max_layers, max_micro_batches=4)
    case = draw(strategy.filter(lambda c: c.policy.accumulation_group < 4 and c.semantics.ranks == 1))
    return folding(case, draw(st.integers(10, 10 + 2 * max_repetitions)), draw(st.integers(0, 2)))


def folding(case: Case, n_groups: int, n_more: int) -> Plan:
    """Return the case with `n_groups` groups and `n_more` micro-batches."""
    n = n_groups * case.policy.accumulation_group + n_more % case.policy.accumulation_group
    one_group: dict[str, Any] = {}
    if case.workload.trains_all:  # the device can sum partly trained blocks for any number of groups
        one_group |= {"square_on_device": False, "device_blocks": ()}
    n_missing = -case.semantics.batch_size % case.semantics.micro_batch  # the last micro-batch has its old size
    semantics = replace(case.semantics, batch_size=n * case.semantics.micro_batch - n_missing, sum_groups=1)
    plan = plan_by(folded_ops, MODEL, case.workload, semantics, replace(case.policy, **one_group))
    assert plan is not None
    return plan


def small(n_micro_batches: int = 12, n_layers: int = 3, **policy: Any) -> Plan:
    """Return a folded plan of `small_workload`."""
    semantics, workload = Semantics(4, n_micro_batches, 1), small_workload(n_layers, tied=False)
    plan = plan_by(folded_ops, MODEL, workload, semantics, Policy(**{"update": Update.DEFERRED} | policy))
    assert plan is not None
    return plan


def demands_of(data: st.DataObject, n: int) -> list[Demand]:
    def one() -> Demand:
        uses = [(r, data.draw(st.floats(0.1, 1.0)) * c) for r, c in REGION.capacity if data.draw(st.booleans())]
        return Demand(data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.floats(0.001, 10.0)), tuple(uses))

    known = [one() for _ in range(12)]
    return [known[data.draw(st.integers(0, 11))] for _ in range(n)]


def written_out(plan: Plan, values: list[Any]) -> list[Any]:
    """Return the fields of each op in each of its repetitions."""
    repeat = plan.repeat
    assert repeat is not None
    return [*values[: repeat.start], *values[repeat.start : repeat.end] * repeat.times, *values[repeat.end :]]


@law
@given(plan=folded())
def test_a_folded_plan_is_read_back_from_text_and_file(plan: Plan, tmp_path: Path) -> None:
    assert Plan.parse(str(plan)) == plan
    PlanFile(plan, None).write(tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json").plan == plan
    PlanFile(unrolled(plan), None).write(tmp_path / "plan.json")
    assert "repeat" not in (tmp_path / "plan.json").read_text() + str(unrolled(plan))


def error_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"times": 1}, "repeat.times"),
        ({"times": MAX_REPETITIONS + 1}, "repeat.times"),
        ({"times": 999_999}, "no such micro-batch"),
        ({"micro_batches": 0}, "repeat.micro_batches"),
        ({"micro_batches": 2}, "no such micro-batch"),
        ({"start": 0}, "repeat.start"),
        ({"start": 10**8, "end": 10**8 + 1}, "not ops of the plan"),
        ({"start": 50, "end": 50}, "not ops of the plan"),
    ],
)
def test_an_impossible_repetition_is_refused_in_one_line(changes: dict[str, int], says: str) -> None:
    plan = small()
    assert plan.repeat is not None
    assert says in error_of(str(replace(plan, repeat=replace(plan.repeat, **changes))))


def test_a_wait_that_cannot_be_is_refused_in_one_line() -> None:
    plan = small()
    repeat = plan.repeat
    assert repeat is not None
    cpu, gpu = (next(i for i in range(repeat.start, repeat.end) if plan.ops[i].lane is lane) for lane in (Lane.CPU, Lane.GPU))
    back = replace(plan.ops[cpu], waits=(Wait(gpu, 0, 1),))
    error_of(str(set_op(plan, 0, replace(plan.ops[0], waits=(Wait(gpu),)))))  # for a later part
    error_of(str(set_op(plan, 0, replace(plan.ops[0], waits=(Wait(gpu, 0, 1),)))))  # for a repetition before, outside of repeats
    error_of(str(replace(set_op(plan, cpu, back), repeat=None)))
    error_of(str(set_op(plan, cpu, replace(back, waits=(Wait(gpu, 1),)))).replace(f"^ {gpu}@1", f"^ {gpu}@1~1"))


@law
@given(folded())
def test_written_out_it_has_the_ops_of_a_plan_never_folded(plan: Plan) -> None:
    """Slots can differ within an arena; ops, order and arenas are equal."""
    plain = plan_by(unfolded_ops, MODEL, plan.workload, plan.semantics, plan.policy)
    assert [op.name for op in unrolled(plan).ops] == [op.name for op in plain.ops]
    assert plan.arenas == plain.arenas


@law
@given(folded(max_layers=2, max_repetitions=3))
def test_folded_waits_order_ops_as_waits_derived_from_all_do(plan: Plan) -> None:
    """Compare both directions: no race is added, and no lane waits longer."""
    written = unrolled(plan)
    derived = rewaited(written)
    assert _Clocks(written, _legal_order(written)).starts == _Clocks(derived, _legal_order(derived)).starts


@law
@given(folded(), st.sampled_from([None, REGION]), st.data())
def test_a_repeating_step_takes_as_long_as_written_out(plan: Plan, region: Region | None, data: st.DataObject) -> None:
    """The timeline has the spans of its retained repetitions."""
    repeat = plan.repeat
    assert repeat is not None
    demands = demands_of(data, len(plan.ops))
    fast = simulate(plan, demands, region, 8)
    slow = simulate(unrolled(plan), written_out(plan, demands), region, 8)
    assert fast.step_s == pytest.approx(slow.step_s, rel=1e-9)
    assert (fast.periodic, fast.n_cycle_steps) == (slow.periodic, slow.n_cycle_steps)
    assert fast.timeline.step_ends_s == pytest.approx(slow.timeline.step_ends_s, rel=1e-9)
    assert fast.busy_s(plan) == pytest.approx(slow.busy_s(unrolled(plan)), rel=1e-9, abs=1e-9)
    numbers = written_out(plan, list(range(len(plan.ops))))
    turns = [0] * repeat.start + [k for k in range(repeat.times) for _ in range(repeat.n_ops)]
    turns += [0] * (len(numbers) - len(turns))
    retained = [s for s in slow.timeline.spans if numbers[s.op] not in repeat or is_kept(turns[s.op], repeat.times)]
    expected = {(numbers[s.op], s.step, turns[s.op]): (s.start_s, s.end_s) for s in retained}
    spans = {(s.op, s.step, s.repetition): (s.start_s, s.end_s) for s in fast.timeline.spans}
    assert spans.keys() == expected.keys()
    for key, times_s in spans.items():
        assert times_s == pytest.approx(expected[key], rel=1e-9, abs=1e-9)


def test_a_million_micro_batches_are_simulated_as_a_few_are() -> None:
    few, many = small(12), small(1_000_000)
    demands = [Demand(0.0, 1.0 + op.block / 7) for op in few.ops]
    seconds = [simulate(plan, demands, None).step_s for plan in (few, small(13), many)]
    assert len(few.ops) == len(many.ops)
    assert seconds[2] - seconds[0] == pytest.approx((1_000_000 - 12) * (seconds[1] - seconds[0]), rel=1e-9)


def test_repetitions_that_settle_to_no_period_go_on_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small(10_000)
    demands = [Demand(0.0, 1.0 + op.block / 7) for op in plan.ops]
    exact = simulate(plan, demands, None)
    monkeypatch.setattr("penstock.planner.predict.simulate.SAME_REPETITION_FRACTION", -1.0)
    monkeypatch.setattr("penstock.planner.predict.simulate.MOST_REPETITIONS", MAX_CYCLE + 1)
    result = simulate(plan, demands, None)
    assert (result.periodic, exact.periodic) == (False, True)
    assert result.step_s == pytest.approx(exact.step_s, rel=1e-3)


@law
@given(folded())
def test_a_folded_plan_is_right_and_so_is_what_it_means(plan: Plan) -> None:
    check(plan)
    check(unrolled(plan))


NORM, LAST = Train(names=("norm.weight",)), Train(layers=(4, 4))


@pytest.mark.parametrize(("train", "base"), [(NORM, "bf16"), (LAST, "bf16"), (ADAPTED["train"], "nf4")])
def test_a_long_step_is_folded_whatever_part_is_trained(train: Train, base: Any) -> None:
    """Layers without a backward are used in cycles: Belady's algorithm holds other ones after each group."""
    semantics, policy = Semantics(4, 40, 1, train=train, base=base, gradient_dtype="fp32"), Policy(prefetch_depth=2)
    plan = plan_by(folded_ops, MODEL, small_workload(5, False, train=train), semantics, policy)
    assert plan is not None
    check(plan)
    check(unrolled(plan))


def _misrepeat(plan: Plan) -> Iterator[Mutant]:
    """Change the section, stride or number of repetitions."""
    repeat = plan.repeat
    assert repeat is not None
    for name in ("start", "end", "times", "micro_batches"):
        for delta in (-2, -1, 1, 2):
            changed = replace(repeat, **{name: getattr(repeat, name) + delta})
            yield Mutant(str(changed), ("repeat",), partial(replace, plan, repeat=changed))
    yield Mutant("nothing repeats", ("repeat",), partial(replace, plan, repeat=None))


def _other_repetition(plan: Plan) -> Iterator[Mutant]:
    """Exchange waits for the previous repetition with waits for the same one or the previous step."""
    for i, op in enumerate(plan.ops):
        for n, wait in enumerate(op.waits):
            for changed_wait in {Wait(wait.op), Wait(wait.op, 1), Wait(wait.op, 0, 1)} - {wait}:
                changed = replace(op, waits=(*op.waits[:n], changed_wait, *op.waits[n + 1 :]))
                yield Mutant(f"op {i}: {op} for {changed_wait}", (op.kind,), partial(set_op, plan, i, changed))


MUTATIONS = ALL_MUTATIONS | {"what repeats": _misrepeat, "another repetition": _other_repetition}


def passes_written_out(plan: Plan) -> bool:
    """Return the checker's result for the unrolled plan, if it unrolls."""
    try:
        Plan.parse(str(plan))
        return passes(unrolled(plan))
    except PlanError:
        return False


PLANS = {
    "layers": small(6, n_layers=2),
    "groups of two that spill": small(11, n_layers=2, accumulation_group=2, spill_blocks=(0, 1), gradient_slots=2),
    "two groups a repetition": small(9, n_layers=3, boundary_stride=3, prefetch_depth=1),
    "barrier": small(6, n_layers=3, update=Update.BARRIER, prefetch_depth=2, gradient_slots=2, resident_blocks=(1, 4)),
    "speculating": small(6, n_layers=2, speculate_blocks=(0, 2), save=saves(all=(2,))),
}


@mostly_slow(("kind", "name"), [*zip(sorted(MUTATIONS) * 2, cycle(PLANS))])
def test_mutants_of_a_folded_plan_are_caught_or_harmless(name: str, kind: str) -> None:
    """A plan that passes the checker is valid when unrolled, and trains the same by the slow oracle of four steps."""
    plan, rng = PLANS[name], random.Random(f"{name} {kind}")
    mutants = list(MUTATIONS[kind](plan))
    for mutant in rng.sample(mutants, min(20, len(mutants))):
        changed = mutant.make()
        if passes(changed):
            assert passes_written_out(changed), mutant.what
            assert same_training(unrolled(plan), unrolled(changed)) is None or changed.repeat != plan.repeat, mutant.what


def test_every_wait_that_repeats_is_needed() -> None:
    """Drop, weaken or delay a wait by a repetition: the checker must report the race."""
    n_caught = 0
    for plan in PLANS.values():
        repeat = plan.repeat
        assert repeat is not None
        for i in range(repeat.start, repeat.end):
            op = plan.ops[i]
            for n, wait in enumerate(op.waits):
                if wait.op in repeat and wait.distance == 0:
                    changed = replace(op, waits=(*op.waits[:n], *op.waits[n + 1 :]))
                    with pytest.raises(PlanError, match=f"with 2 of {repeat.times} repetitions written out: op .* a race for"):
                        check(set_op(plan, i, changed))
                    n_caught += 1
    assert n_caught > 50
