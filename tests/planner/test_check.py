"""Plan checker: correct plans pass; mutants with different training results, and illegal policies, are rejected."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from penstock.planner.check.check import N_STEPS, _Clocks, _legal_order, check, summary
from penstock.planner.lower.lower import lower
from penstock.runtime.errors import PlanError, ProfileError
from penstock.runtime.plan import OPS, Kind, Plan, Policy, Semantics, Slot, Update, Wait, saves
from penstock.runtime.plan.footprint import host_needs
from penstock.runtime.plan.train import Train
from penstock.runtime.plan.workload import Block, Parameter, Saved, Tier
from tests import edits
from tests.edits import error_of, index, passes, reordered, sizes_of, small, under, with_op, with_profile, with_sizes, with_slots
from tests.lanes import examples
from tests.mutants import ADAPTED, BARRIER, MUTATIONS, NORMS, tally
from tests.oracle import needed_bytes, race, same_training, unrolled
from tests.strategies import MODEL, PROFILE, plans, small_workload, with_smaller

law = settings(deadline=None)  # independent of machine load


@law
@given(plans(max_layers=3, max_micro_batches=3))
def test_every_plan_of_the_planner_passes_and_has_no_race(plan: Plan) -> None:
    check(plan)
    assert "\n" not in summary(plan)
    assert race(plan, unrolled(plan)) is None


def test_squares_of_forty_weights_take_more_than_one_unit() -> None:
    blocks = small_workload(3, tied=False).blocks
    weights = tuple(Parameter(f"w{i}", (8,)) for i in range(40))
    blocks = (blocks[0], *(replace(b, parameters=(*b.parameters, *weights)) for b in blocks[1:-1]), blocks[-1])
    plan = lower(MODEL, replace(small_workload(3, tied=False), blocks=blocks), Semantics(4, 1, 1), Policy(), PROFILE)
    assert sizes_of(plan, "norm") == (256, 512, 512, 512, 256, 256)
    check(plan)


@settings(deadline=None, max_examples=examples(100))
@given(plans(max_layers=3, max_micro_batches=3), st.sampled_from(sorted(MUTATIONS)), st.randoms(use_true_random=False))
def test_a_mutant_that_passes_trains_as_the_original(plan: Plan, kind: str, rng: Any) -> None:
    mutants = list(MUTATIONS[kind](plan))
    for mutant in rng.sample(mutants, min(3, len(mutants))):
        changed = mutant.make()
        if passes(changed):
            note(mutant.what)
            assert same_training(plan, changed) is None


def test_no_harmful_mutant_of_the_samples_passes() -> None:
    """Most kinds of mutation have no surviving mutant: every dropped, weakened or redirected element was necessary."""
    result = tally(max(3, examples(20)))  # of each kind and plan
    print(f"\n{result.table()}")
    assert result.condemned == []
    assert {*result.killed} == {*MUTATIONS}
    operands = {f"{kind}.{name}" for kind, row in OPS.items() for name in row.names}
    assert result.rows["drop an op"] == {*Kind}
    assert result.rows["lose an operand"] == operands
    alone = {f"{kind}.received" for kind in OPS}  # arenas with a single slot
    assert operands - result.rows["redirect an operand"] <= alone


@law
@given(plans(), st.data())
def test_slots_hold_what_goes_into_them_and_no_byte_less(plan: Plan, data: st.DataObject) -> None:
    """Compare with the byte counts of the runtime. Slots are multiples of 256 bytes, except the last of an arena."""
    needed = needed_bytes(plan, plan.ops)
    for arena in plan.arenas:
        sizes = [needed[Slot(arena.name, i)] for i in range(len(arena.slot_bytes))]
        assert all(least <= has for least, has in zip(sizes, arena.slot_bytes, strict=True))
        plan = with_sizes(plan, arena.name, [*(-(-n // 256) * 256 for n in sizes[:-1]), sizes[-1]])
    check(plan)
    slot = data.draw(st.sampled_from(sorted(slot for slot, n in needed.items() if n)))
    sizes = [*sizes_of(plan, slot.arena)]
    sizes[slot.index] -= 1 if slot.index == len(sizes) - 1 else 256
    assert f"{slot} has {sizes[slot.index]} bytes, but " in error_of(with_sizes(plan, slot.arena, sizes))


@law
@given(plans(max_layers=3, max_micro_batches=2), st.data())
def test_clocks_order_two_ops_exactly_when_a_path_does(plan: Plan, data: st.DataObject) -> None:
    """Remove some waits to create unordered pairs."""
    dropped = data.draw(st.sets(st.integers(0, len(plan.ops) - 1), max_size=8))
    plan = replace(plan, ops=tuple(replace(op, waits=()) if i in dropped else op for i, op in enumerate(plan.ops)))
    graph = unrolled(plan, N_STEPS)
    clocks = _Clocks(plan, _legal_order(plan))
    for i, step in graph:
        ancestors = nx.ancestors(graph, (i, step))
        for j, j_step in graph:
            if (j, j_step) != (i, step):
                assert clocks.ordered(j, j_step, i, step) == ((j, j_step) in ancestors)


def without_wait(plan: Plan, name: str, kind: Kind) -> Plan:
    waits = plan.ops[index(plan, name)].waits
    return with_op(plan, name, waits=tuple(w for w in waits if plan.ops[w.op].kind is not kind))


def moved_before(plan: Plan, name: str, successor: str) -> Plan:
    """Move the last op of this name before another op and recompute all waits."""
    i = max(i for i, op in enumerate(plan.ops) if op.name == name)
    order = [k for k in range(len(plan.ops)) if k != i]
    order.insert(index(plan, successor), i)
    return edits.rewaited(reordered(plan, order))


def twice(plan: Plan, name: str) -> Plan:
    return replace(plan, ops=(*plan.ops, replace(plan.ops[index(plan, name)], waits=())))


def without_op(plan: Plan, name: str) -> Plan:
    return reordered(plan, [i for i in range(len(plan.ops)) if i != index(plan, name)])


ON_DEVICE = NORMS | BARRIER | {"device_blocks": (1, 2, 3, 4)}
WRONG: dict[str, tuple[Callable[[], Plan], str]] = {
    "a race across steps": (
        lambda: without_wait(small(), "load h2d b2", Kind.UPDATE),
        "a race for state[2] with op 28 (update cpu b2, the step before)",
    ),
    "another block's weights": (
        lambda: with_op(with_slots(small(), "load h2d b2", state=Slot("state", 1)), "load h2d b2", block=1),
        "weights[1] holds the weights of block 1, step 0, not the weights of block 2, step 0",
    ),
    "a gather before its load": (lambda: moved_before(small(ranks=2), "gather net b1", "load h2d b1"), "weights[0] holds nothing"),
    "a circle": (lambda: with_op(small(), "load h2d b0", waits=(Wait(index(small(), "update cpu b0")),)), "can never start"),
    "an op twice": (lambda: twice(small(), "norm cpu b2"), "(norm cpu b2): occurs twice in a step"),
    "a missing load of a resident block": (lambda: without_op(small(resident_blocks=(2,)), "load h2d b2"), "no load of block 2"),
    "a later group first": (lambda: reordered(*_groups_exchanged()), "(backward gpu b0 m1): runs after a later group"),
    "a slot that is not aligned": (
        lambda: with_sizes(small(), "state", [n + 8 for n in sizes_of(small(), "state")]),
        "no multiple of 256",
    ),
    "a wait of five steps": (lambda: with_op(small(), "load h2d b0", waits=(Wait(1, 5),)), "names no op of another lane"),
    "an update that the next step overtakes": (
        lambda: with_op((plan := small(**ON_DEVICE)), "load h2d b0", waits=(Wait(index(plan, "backward gpu b1 m0"), 1),)),
        "under barrier it must wait for op",
    ),
    "a wait in its lane": (lambda: with_op(small(), "load h2d b1", waits=(Wait(0),)), "names no op of another lane"),
}


def _groups_exchanged() -> tuple[Plan, list[int]]:
    """Same result with more memory than reserved: autograd's saved bytes are counted for one group at a time."""
    plan = small(n_micro_batches=4, accumulation_group=2)
    last, first = index(plan, "backward gpu b0 m1"), index(plan, "forward gpu b0 m2")
    return plan, [{last: first, first: last}.get(i, i) for i in range(len(plan.ops))]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_in_a_line_that_says_what(name: str) -> None:
    make, message = WRONG[name]
    assert message in error_of(make())


@law
@given(plans())
def test_memory_is_enough_at_the_peak_and_not_one_byte_below(plan: Plan) -> None:
    device_bytes = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + 1000
    host_bytes = sum(host_needs(plan, plan.semantics.ranks).values()) + 1000
    for place, n_bytes in (("device", device_bytes), ("host", host_bytes)):
        check(with_profile(plan, f"{place}.memory_bytes.value", n_bytes))
        assert f"{place} memory" in error_of(with_profile(plan, f"{place}.memory_bytes.value", n_bytes - 1))


def test_what_layers_save_is_counted_where_it_is() -> None:
    """Two layers with 1000 saved bytes and groups of two micro-batches: 4000 bytes kept, or slots of 1024 bytes for offload."""
    workload = small_workload(3, tied=False)
    tiers = (Tier(Saved.PRODUCTS, 1000, 500, 0, False, 0, 0), Tier(Saved.ATTENTION, 300, 500, 0, False, 0, 0))
    workload = replace(workload, blocks=tuple(replace(b, tiers=tiers) for b in workload.blocks))
    for away, kept_bytes in (((), 4000), ((1,), 2000), ((1, 2), 0)):
        policy = Policy(accumulation_group=2, save=saves(products=(1, 2)), offload_blocks=away)
        plan = lower(MODEL, workload, Semantics(4, 2, 1), policy, PROFILE)
        assert plan.kept_bytes == kept_bytes
        assert sizes_of(plan, "saved") + sizes_of(plan, "offloaded") == ((1024,) * (2 + 2 * len(away)) if away else ())
    policy = Policy(save=saves(products=(1,), attention=(2, 3)), offload_blocks=(1, 2, 3), saved_slots=3)
    plan = lower(MODEL, workload, Semantics(4, 2, 1), policy, PROFILE)
    assert sizes_of(plan, "saved") == (512,) * 3 + (1024,) * 3, "a ring for each kind"
    used_slots = [(op.block, op["saved"].index) for op in plan.ops if op.kind is Kind.OFFLOAD_SAVED]
    assert used_slots == [(1, 3), (2, 0), (3, 1), (1, 5), (2, 1), (3, 2)]


def test_a_profile_without_its_numbers_is_refused() -> None:
    for path, value in (("device", None), ("device.memory_bytes", "1e9"), ("host.runtime_bytes", {"value": float("nan")})):
        with pytest.raises(ProfileError, match=f"profile: {path.partition('.')[0]}"):
            check(with_profile(small(), path, value))


def with_blocks(plan: Plan, *blocks: Block) -> Plan:
    return replace(plan, workload=replace(plan.workload, blocks=blocks))


def test_numbers_beyond_all_measure_are_refused_at_once() -> None:
    plan, huge = small(), 2**52
    first, layer, *later_blocks = plan.workload.blocks
    sized = replace(plan, semantics=replace(plan.semantics, batch_size=huge))
    many = tuple(range(10**5)), tuple(range(huge, huge + 10**5))
    hostile = [with_blocks(plan, first, replace(layer, parameters=(Parameter("w", (huge,) * 8),)), *later_blocks)]
    hostile += [with_blocks(plan, first, *[layer] * 10**5, later_blocks[-1]), with_blocks(plan, first), with_blocks(plan)]
    hostile += [sized, under(sized, accumulation_group=huge), under(sized, accumulation_group=huge, spill_blocks=(0, 1))]
    hostile += [replace(sized, semantics=replace(sized.semantics, sum_groups=huge)), under(plan, boundary_stride=huge)]
    hostile += [under(plan, **{name: blocks}) for name in ("spill_blocks", "resident_blocks", "device_blocks") for blocks in many]
    hostile += [with_sizes(plan, "state", [huge] * 5), replace(plan, semantics=replace(plan.semantics, ranks=2**40))]
    start_s = time.process_time()
    for wrong in hostile:
        error_of(wrong)
    assert time.process_time() - start_s < 5


def test_a_smaller_last_micro_batch_fits_the_slots_of_others() -> None:
    semantics = Semantics(seq_len=4, batch_size=5, micro_batch=2)
    workload = with_smaller(small_workload(3, False, saving=True).blocks, semantics)
    policy = Policy(spill_blocks=(0,), save=saves(products=(1,)), offload_blocks=(1,))
    plan = lower(MODEL, workload, semantics, policy, PROFILE)
    check(plan)

    assert "if and only if the last one is smaller" in error_of(replace(plan, workload=replace(workload, smaller=())))
    first, layer, *later_blocks = workload.smaller
    undersized = (first, replace(layer, tiers=(replace(layer.tiers[0], saved_bytes=5000),)), *later_blocks)
    assert "saved[0] has 1024 bytes, but needs 5512" in error_of(replace(plan, workload=replace(workload, smaller=undersized)))


@law
@given(
    plans(max_layers=2, max_micro_batches=2),
    st.lists(st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 10**6)), min_size=2, max_size=6),
    plans(max_layers=2, max_micro_batches=2),
)
def test_a_plan_changed_in_many_ways_passes_or_is_a_plan_error(plan: Plan, changes: list[tuple[str, int]], donor: Plan) -> None:
    """No other exception escapes, even if parts of two plans are combined."""
    for kind, n in changes:
        with suppress(PlanError, AssertionError, StopIteration, ValueError):  # mutation not applicable any more
            mutants = list(MUTATIONS[kind](plan))
            plan = mutants[n % len(mutants)].make() if mutants else plan
    passes(plan)
    for part in ("semantics", "policy", "workload", "arenas"):
        passes(replace(plan, **{part: getattr(donor, part)}))
        passes(edits.set_op(plan, 0, donor.ops[-1]) if plan.ops else plan)


SEPARATE = ADAPTED | {"device_blocks": (1, 2, 3)}
IN_ORDER = "blocks must be blocks 0..4 in ascending order, each once"

ILLEGAL: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (  # choices of a legal plan, changes to its policy, message
    ({"update": Update.EAGER}, {"speculate_blocks": (1,)}, "they need update deferred"),
    ({}, {"update": Update.EAGER}, "eager updates need --clip-norm none"),
    ({}, {"speculate_blocks": (3, 1, 0)}, f"speculate_{IN_ORDER}"),
    ({}, {"resident_blocks": (2, 2)}, f"resident_{IN_ORDER}"),
    ({}, {"spill_blocks": (3,)}, "spill_blocks must be blocks 0..2 in ascending order"),
    ({"tied": True}, {"device_blocks": (0,)}, "embedding and head share a weight"),
    ({"n_micro_batches": 2}, {"device_blocks": (1,)}, "need all micro-batches in one group, or the blocks in sum_blocks"),
    ({"n_micro_batches": 2}, {"sum_blocks": (1,)}, "sum_blocks need embedding and head"),
    ({"n_micro_batches": 2}, {"sum_blocks": (0, 4, 5)}, "block 5 is not trained"),
    ({"n_micro_batches": 2, "accumulation_group": 2}, {"sum_blocks": (0, 4)}, "the device sums every gradient"),
    ({"n_micro_batches": 2, "sum_blocks": (0, 4)}, {"boundary_stride": 2}, "excludes sum_blocks"),
    ({"device_blocks": (1,)}, {"speculate_blocks": (1,)}, "leave them out of speculate_blocks"),
    ({"n_micro_batches": 2}, {"square_on_device": True}, "needs all micro-batches in one group, or sum_blocks"),
    ({"n_micro_batches": 2}, {"accumulation_group": 3}, "a group of 3 micro-batches, but a step has 2"),
    ({}, {"boundary_stride": 4}, "boundary_stride is 4, but the model has 3 layers"),
    ({"boundary_stride": 2}, {"save": saves(all=(1,))}, "excludes save and spill_blocks"),
    ({"save": saves(all=(1,))}, {"offload_blocks": (1,)}, "offload_blocks must be layers that save attention or products"),
    ({}, {"save": (Saved.ALL, Saved.INPUT)}, "save ends with a layer that saves its input"),
    ({}, {"save": saves(all=(4,))}, "save names layer 4, but the model has 3"),
    ({}, {"save": saves(products=(2,))}, "this model's layers cannot save only products"),
    ({"spill_blocks": (0, 2)}, {"save": saves(all=(1,))}, "leave the block before it out of spill_blocks"),
    ({"n_micro_batches": 2, "accumulation_group": 2, "ranks": 2}, {"accumulation_group": 1}, "several ranks exchange whole sums"),
    ({"ranks": 2}, {"device_blocks": (1,)}, "leave out square_on_device and device_blocks"),
    # Where weights are frozen
    (SEPARATE, {"speculate_blocks": (1,)}, "update barrier or deferred"),
    (SEPARATE | {"n_micro_batches": 2}, {"sum_blocks": (1,)}, "its sum is on the device as it is in device_blocks"),
    (SEPARATE, {"device_blocks": (1, 2)}, "must be all partly trained blocks, or none"),
    ({"train": Train(layers=(2, 2))}, {"spill_blocks": (1,)}, "backward ends at block 3"),
)


@pytest.mark.parametrize(("choices", "changes", "complaint"), ILLEGAL)
def test_an_illegal_policy_is_refused(choices: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    """The checker (of a plan with this policy) and lowering raise the same message."""
    plan = small(**choices)
    check(plan)
    message = error_of(under(plan, **changes))
    assert complaint in message
    with pytest.raises(PlanError) as caught:
        lower(MODEL, plan.workload, plan.semantics, replace(plan.policy, **changes), PROFILE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("choices", "changes", "message"),
    [
        ({"update": Update.EAGER}, {"clip_norm": 1.0}, "eager updates need"),
        ({}, {"compute_dtype": "fp32", "master_dtype": "bf16"}, "fp32 compute from a bf16 master"),
        ({}, {"sum_groups": 2}, "a step of 1 micro-batches has no 2 sum groups"),
        ({}, {"base": "nf4"}, "trained weights cannot be packed"),
        (SEPARATE, {"gradient_dtype": "bf16"}, "use --gradient-dtype fp32"),
    ],
)
def test_semantics_that_a_policy_does_not_suit_are_refused(choices: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    plan = small(**choices)
    assert message in error_of(replace(plan, semantics=replace(plan.semantics, **changes)))


def test_ways_to_recompute_are_asked_of_layers_that_need_them() -> None:
    """This includes the smaller last micro-batch; layers that save everything or only their input need no tier."""
    workload, tier = small_workload(3, tied=False), Tier(Saved.ATTENTION, 1000, 500, 0, False, 0, 0)
    blocks = tuple(replace(b, tiers=(tier,) if i == 2 else ()) for i, b in enumerate(workload.blocks))
    workload, policy = replace(workload, blocks=blocks, smaller=blocks), Policy(save=saves(all=(1, 3), attention=(2,)))
    plan = lower(MODEL, workload, Semantics(4, 3, 2), policy, PROFILE)
    check(plan)
    assert "cannot save only attention" in error_of(under(plan, save=saves(all=(1,), attention=(2, 3))))
    assert "cannot save only products" in error_of(under(plan, save=saves(products=(2,))))
    poor = tuple(replace(b, tiers=()) for b in blocks)
    assert "cannot save only attention" in error_of(replace(plan, workload=replace(workload, smaller=poor)))
