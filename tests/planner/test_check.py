"""Does the checker pass every plan that is right, and none that is wrong?"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from planner.check.check import N_STEPS, _Clocks, _legal_order, check, summary
from planner.lower.lower import lower
from runtime.errors import PlanError
from runtime.plan import Kind, Op, Place, Plan, PlanFile, Policy, Semantics, Slot, Update, Wait, saves
from runtime.plan.train import Lora, Train
from runtime.plan.workload import BlockKind, Parameter
from runtime.units import GB
from tests.edits import error_of, index, small, with_op, with_profile, with_slots, with_value
from tests.mutants import MUTATIONS, Count, is_killed, table, tally
from tests.oracle import race, same_training, unrolled
from tests.strategies import MODEL, PROFILE, plans, small_workload, with_smaller

law = settings(deadline=None)  # a busy machine is no failure


# --- right plans pass -------------------------------------------------------------------------------------------------


@pytest.mark.drawn
@law
@given(plans())
def test_every_plan_of_the_planner_passes(plan: Plan) -> None:
    check(plan)
    assert "\n" not in summary(plan)


@pytest.mark.drawn
@law
@given(plans(max_layers=3, max_micro_batches=3))
def test_the_oracle_agrees_that_they_are_free_of_races(plan: Plan) -> None:
    assert race(plan, unrolled(plan)) is None


# --- wrong plans do not -----------------------------------------------------------------------------------------------


@pytest.mark.drawn
@settings(deadline=None, max_examples=200)
@given(plans(max_layers=3, max_micro_batches=3), st.sampled_from(sorted(MUTATIONS)), st.randoms(use_true_random=False))
def test_a_mutant_that_passes_trains_exactly_as_the_original(plan: Plan, kind: str, rng: Any) -> None:
    mutants = list(MUTATIONS[kind](plan))
    for what, mutant in rng.sample(mutants, min(3, len(mutants))):
        if not is_killed(mutant):
            note(what)
            assert same_training(plan, mutant) is None


@pytest.fixture(scope="module")
def counted() -> tuple[dict[str, Count], set[str], list[str]]:
    counts, survivors, condemned = tally(25)
    print(f"\n{table(counts)}")
    return counts, set(survivors), condemned


@pytest.mark.soak
def test_no_wrong_mutant_of_the_samples_survives(counted: tuple[dict[str, Count], set[str], list[str]]) -> None:
    counts, _, condemned = counted
    assert condemned == []
    assert all(count.made > 0 and count.killed > 0 for count in counts.values())


MAY_BE_HARMLESS = {"lane", "shrink", "stay", "ops"}  # words of kinds: other orders, sizes rounded up, a slot that is free as well


@pytest.mark.soak
@pytest.mark.parametrize("kind", sorted(k for k in MUTATIONS if not MAY_BE_HARMLESS & set(k.split())))
def test_no_mutant_survives_of_kind(counted: tuple[dict[str, Count], set[str], list[str]], kind: str) -> None:
    """All but reorderings: whatever is dropped, weakened or pointed elsewhere was needed."""
    count = counted[0][kind]
    assert count.killed == count.made


# What may be done in another order, and why the training stays the same.
HARMLESS = {
    "accumulate accumulate": "sums of different blocks",
    "accumulate norm": "a sum and the norm of another block",
    "accumulate update": "eager: another block's state",
    "backward": "different slots, and their sums do not meet: unreduced micro-batches of one block",
    "backward backward": "as above",
    "backward loss": "another micro-batch, unreduced",
    "forward": "two micro-batches through one block",
    "forward forward": "as above",
    "forward loss": "different micro-batches",
    "load": "two loads into different slots, both soon enough",
    "load load": "as above",
    "norm norm": "the norm adds the squares of all weights in their own order, whatever the order of ops",
    "norm": "as above; or the arena, whose last slot is rounded up, and still holds what goes into it",
    "norm update": "eager: another block's norm",
    "offload_gradient": "gradients in different slots",
    "offload_gradient offload_gradient": "as above",
    "update": "different blocks",
    "update update": "as above",
    "accumulate": "the sum of another block",
    "fetch_activation fetch_activation": "different slots on the host and of the ring, both soon enough",
    "fetch_activation load": "an output and a weight, both soon enough",
    "offload_activation offload_gradient": "a gradient and an output, from different slots",
    "offload_activation offload_activation": "different slots, both gone before they are overwritten",
    "fetch_activation": "a fetch that comes soon enough; or a ring slot that no other output has at that time, in any timing",
    "offload_activation": "as above",
    "loss": "different micro-batches",
    "backward square": "the gradient of another block, in another slot",
    "square": "before its gradient's slot is written again; or the sums of different blocks",
    "activations": "the last slot is rounded up, and still holds what goes into it",
    "spilled": "as above",
    "saved": "as above",
    "offloaded": "as above",
    "fetch_saved": "a fetch that comes soon enough; or one of the two slots, free at that time in any timing",
    "offload_saved": "as above",
    "fetch_saved fetch_saved": "different slots, both soon enough",
    "fetch_activation fetch_saved": "as above",
    "fetch_saved load": "as above",
    "offload_saved offload_saved": "different slots, both gone before they are overwritten",
    "offload_activation offload_saved": "as above",
    "offload_gradient offload_saved": "as above",
    "offload_gradient offload_squares": "sums of one block and a gradient of another",
    "offload_squares offload_squares": "sums of different blocks",
    "offload_squares": "as above",
    "update_on_device update_on_device": "different blocks",
    "update_on_device": "as above",
    "squares": "the last slot is rounded up, and still holds what goes into it",
    "weights": "a weight slot that no other block has at that time, in any timing",
    "recompute": "an output of another block or micro-batch, still in time; or of the last segment, while forward's is there too",
    "recompute recompute": "as above",
    "backward recompute": "as above, in different slots",
    "loss recompute": "as above",
    "accumulate speculate": "the sum of another block",
    "norm speculate": "another block's norm",
    "speculate": "still after the norm of its block",
    "settle": "still after the norm of all",
    "settle settle": "different blocks",
    "settle update": "different blocks",
    "dequantise forward": "into another slot than the one that is computed with",
    "dequantise recompute": "as above",
    "dequantise loss": "as above: a layer's, before or after the head",
    "dequantise square": "a square needs no weights",
    "dequantise": "as above",
    "dequantise dequantise": "into different slots: of a layer that stays, and of one that streams",
    "offload_activation offload_squares": "squares and an output, from different slots",
}


@pytest.mark.soak
def test_every_survivor_is_of_a_family_that_is_explained(
    counted: tuple[dict[str, Count], set[str], list[str]],
) -> None:
    assert {survivor.partition(": ")[2] for survivor in counted[1]} <= HARMLESS.keys()


# --- the fast against the obvious ---------------------------------------------------------------------------------------


@pytest.mark.drawn
@law
@given(plans(max_layers=3, max_micro_batches=2), st.data())
def test_clocks_order_two_ops_exactly_when_a_path_leads_from_one_to_the_other(plan: Plan, data: st.DataObject) -> None:
    """With some waits taken out, so that there are unordered pairs."""
    dropped = data.draw(st.sets(st.integers(0, len(plan.ops) - 1), max_size=8))
    ops = tuple(replace(op, waits=()) if i in dropped else op for i, op in enumerate(plan.ops))
    plan = replace(plan, ops=ops)
    graph = unrolled(plan, N_STEPS)
    clocks = _Clocks.of(plan, _legal_order(plan))
    for i, step in graph:
        before = nx.ancestors(graph, (i, step))
        for j, j_step in graph:
            if (j, j_step) != (i, step):
                assert clocks.ordered(j, j_step, i, step) == ((j, j_step) in before)


# --- what the messages say ------------------------------------------------------------------------------------------------


def test_a_missing_wait_is_a_race_named_with_both_ops() -> None:
    plan = small()
    i = index(plan, "load h2d b3")
    message = error_of(with_op(plan, "load h2d b3", waits=()))
    assert message.startswith(f"op {i} (load h2d b3): a race for weights[0] with op")
    assert "forward gpu b1 m0" in message


def test_a_deferred_update_that_a_load_does_not_wait_for_is_a_race_across_steps() -> None:
    plan = small()
    waits = tuple(w for w in plan.ops[index(plan, "load h2d b2")].waits if w.distance == 0)
    message = error_of(with_op(plan, "load h2d b2", waits=waits))
    assert "state[2]" in message
    assert "update cpu b2" in message


def test_a_load_of_the_wrong_block_is_told_by_what_the_slot_holds() -> None:
    plan = small()
    plan = with_slots(plan, "load h2d b2", state=Slot("state", 1))
    message = error_of(with_op(plan, "load h2d b2", block=1))
    assert "weights[1] holds the weights of block 1, step 0, not the weights of block 2, step 0" in message


def test_waits_in_a_circle_are_refused() -> None:
    plan = small()
    i = index(plan, "update cpu b0")
    assert "can never start" in error_of(with_op(plan, "load h2d b0", waits=(Wait(i),)))


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.LOAD, Kind.GATHER, Kind.ACCUMULATE}))
def test_an_op_done_twice_is_refused(kind: Kind) -> None:
    knobs: dict[str, Any] = {"spill_blocks": (1,), "speculate_blocks": (2,), "square_blocks": (0, 2, 3), "device_blocks": (3,)}
    knobs |= {"save": saves(products=(1,)), "offload_blocks": (1,)}
    shared = small(ranks=2) if kind in (Kind.EXCHANGE, Kind.SHARE_NORM) else None
    plan = shared or (small(boundary_stride=2) if kind is Kind.RECOMPUTE else small(**knobs))
    if kind is Kind.DEQUANTISE:
        plan = small(train=Train(lora=Lora(rank=8)), base="int8", resident_blocks=(2,))
    op = next(op for op in plan.ops if op.kind is kind and (kind is not Kind.DEQUANTISE or op.block == 2))
    assert "twice" in error_of(replace(plan, ops=(*plan.ops, op)))


def test_a_resident_block_is_loaded_once_and_another_as_often_as_one_likes() -> None:
    plan = small(n_layers=5, n_micro_batches=2, resident_blocks=(2,))
    check(plan)
    assert [sum(op.name == f"load h2d b{b}" for op in plan.ops) > 1 for b in (1, 2)] == [True, False]
    again = replace(plan.ops[index(plan, "load h2d b2")], waits=())
    assert "twice" in error_of(replace(plan, ops=(*plan.ops, again)))


def test_a_step_without_ops_is_refused() -> None:
    assert "the step has no norm of block 0" in error_of(replace(small(), ops=()))


def test_a_loss_of_a_layer_and_a_forward_of_the_head_are_refused() -> None:
    plan = small()
    for kind, block in ((Kind.LOSS, 2), (Kind.FORWARD, 4), (Kind.BACKWARD, 4)):
        assert "the head has a loss" in error_of(replace(plan, ops=(*plan.ops, Op(kind, block, 0))))


def test_a_tied_head_is_loaded_with_the_embedding_and_counted_with_it() -> None:
    plan = small(tied=True)
    assert "must use state=state[4] tied=state[0] " in error_of(with_slots(plan, "load h2d b4", tied=None))
    assert "must use arrived=host_gradients[0] tied=host_gradients[4] " in error_of(with_slots(plan, "norm cpu b0", tied=None))


def test_a_tied_weight_may_not_be_updated_while_the_head_still_loads_it() -> None:
    """Block by block into the next step: the head is the last to load the weight that block 0 owns."""
    plan = small(tied=True)
    waits = tuple(w for w in plan.ops[index(plan, "load h2d b0")].waits if w.distance == 0)
    assert "a race for state[0]" in error_of(with_op(plan, "load h2d b0", waits=waits))


# --- what spills, and what stays --------------------------------------------------------------------------------------------


def test_an_output_that_did_not_come_back_is_not_the_input_of_the_backward_pass() -> None:
    """Even where the slot that forward wrote still holds the same values: what is not needed should not be moved."""
    plan = small(spill_blocks=(0,))
    went, came = Slot("activations", 3), Slot("activations", 4)
    assert went == plan.ops[index(plan, "forward gpu b0 m0")]["y"]
    assert came == plan.ops[index(plan, "fetch_activation h2d b0 m0")]["y"]
    plan = with_slots(plan, "backward gpu b1 m0", x=went)
    plan = with_slots(plan, "backward gpu b0 m0", y=went)
    assert "holds the output of block 0, micro-batch 0, step 0, not the fetched output" in error_of(plan)


def test_a_fetch_that_does_not_wait_for_its_spill_is_a_race_for_the_slot_on_the_host() -> None:
    plan = small(spill_blocks=(0,))
    assert "a race for spilled[0]" in error_of(with_op(plan, "fetch_activation h2d b0 m0", waits=()))


def test_a_fetch_ahead_of_its_spill_finds_nothing_in_the_first_step() -> None:
    plan = small(spill_blocks=(0,))
    _, outrun = (mutant for _, mutant in MUTATIONS["fetch before the spill"](plan))
    assert "spilled[0] holds nothing, not the spilled output of block 0, micro-batch 0, step 0" in error_of(outrun)


@pytest.mark.parametrize(
    ("kind", "what"), [("offload_activation", "0, micro-batch 0"), ("fetch_activation", "0, micro-batch 0"), ("load", "2")]
)
def test_a_step_has_every_spill_and_fetch_and_each_load_of_a_weight_that_stays(kind: str, what: str) -> None:
    plan = small(spill_blocks=(0,), resident_blocks=(2,))
    without = [mutant for name, mutant in MUTATIONS[f"drop {kind}"](plan) if f" b{what[0]} " in name]
    assert [f"no {kind} of block {what}; " in error_of(mutant) for mutant in without] == [True]


def test_a_spill_that_is_not_waited_for_is_a_race_for_the_ring() -> None:
    """Four blocks pass through a ring of three: the fourth overwrites what the first left, which must be on the host."""
    plan = small(n_layers=5, spill_blocks=(0, 1, 2, 3))
    i, spill = index(plan, "forward gpu b3 m0"), index(plan, "offload_activation d2h b0 m0")
    waits = tuple(w for w in plan.ops[i].waits if plan.ops[w.op].kind is not Kind.OFFLOAD_ACTIVATION)
    message = error_of(with_op(plan, "forward gpu b3 m0", waits=waits))
    assert (
        f"op {spill} (offload_activation d2h b0 m0): a race for activations" in message
        or f"with op {spill} (offload_activation d2h b0 m0)" in message
    )


@pytest.mark.parametrize("name", ["offload_activation d2h b2 m0", "fetch_activation h2d b2 m0"])
def test_each_output_that_spills_has_a_slot_of_its_own_on_the_host(name: str) -> None:
    """The second block of two, in groups of two: spilled[2] and [3]."""
    plan = small(n_micro_batches=2, accumulation_group=2, spill_blocks=(0, 2))
    assert plan.ops[index(plan, name)]["spilled"] == Slot("spilled", 2)
    for other in (0, 1, 3):
        wanted, _, found = error_of(with_slots(plan, name, spilled=Slot("spilled", other))).partition(", not ")
        assert "spilled=spilled[2]" in wanted
        assert f"spilled=spilled[{other}]" in found


def test_an_output_that_does_not_spill_stays_out_of_the_ring() -> None:
    plan = small(spill_blocks=(0,))
    for b in (1, 2):
        message = error_of(with_slots(plan, f"forward gpu b{b} m0", y=Slot("activations", 3)))
        assert f"y=activations[{b - 1}], not" in message
    assert "y=activations[any], not" in error_of(with_slots(plan, "forward gpu b0 m0", y=Slot("activations", 2)))


def test_an_output_does_not_replace_the_input_it_is_made_from() -> None:
    plan = small(spill_blocks=(0, 1))
    came = plan.ops[index(plan, "forward gpu b1 m0")]["x"]
    assert "both its input and its output" in error_of(with_slots(plan, "forward gpu b1 m0", y=came))


def test_a_spill_of_a_block_that_does_not_spill_is_refused() -> None:
    plan = small(spill_blocks=(0,))
    for kind in ("offload_activation d2h", "fetch_activation h2d"):
        assert "does not spill" in error_of(with_op(plan, f"{kind} b0 m0", block=1))


def test_a_weight_that_stays_is_used_from_its_own_slot() -> None:
    """Behind those for layers that come and go, and that of the embedding or the head."""
    plan = small(resident_blocks=(1, 3))
    assert plan.ops[index(plan, "load h2d b3")]["weights"] == Slot("weights", 4)
    for other in (3, 0):
        for name in ("load h2d b3", "forward gpu b3 m0"):
            wanted, _, found = error_of(with_slots(plan, name, weights=Slot("weights", other))).partition(", not ")
            assert "weights=weights[4]" in wanted
            assert f"weights=weights[{other}]" in found


def test_a_weight_that_stays_is_waited_for() -> None:
    plan = with_op(small(resident_blocks=(1,)), "forward gpu b1 m0", waits=())
    assert "race for weights[3]" in error_of(plan)


@pytest.mark.parametrize("name", ["load h2d b2", "update cpu b2", "speculate cpu b3", "settle cpu b3"])
def test_a_split_master_is_a_compute_weight_and_its_remainder_of_one_version(name: str) -> None:
    """With the moments they are one slot, which no op leaves out or takes from another block."""
    plan = small(speculate_blocks=(3,))
    own = plan.ops[index(plan, name)]["state"]
    for other in (None, Slot("state", own.index - 1), Slot("state", 5)):
        assert f" state={own}" in error_of(with_slots(plan, name, state=other)).partition(", not ")[0]


@pytest.mark.parametrize(("dtypes", "arena"), [(("bf16", "bf16"), "state"), (("fp32", "fp32"), "weights")])
def test_state_and_weights_of_other_dtypes_are_of_other_sizes(dtypes: Any, arena: str) -> None:
    """An fp32 master, split or not, takes two bytes a weight more than one in bf16."""
    plan = small()
    assert plan.semantics.splits_masters
    semantics = replace(plan.semantics, compute_dtype=dtypes[0], master_dtype=dtypes[1])
    assert f"arena {arena}: slot 0" in error_of(replace(plan, semantics=semantics))


# --- the policy is kept -----------------------------------------------------------------------------------------------------


def test_a_deferred_plan_may_not_call_itself_barrier() -> None:
    plan = small(update=Update.DEFERRED)
    assert "under barrier" in error_of(replace(plan, policy=replace(plan.policy, update=Update.BARRIER)))


def test_a_barrier_plan_is_a_deferred_plan_too() -> None:
    plan = small(update=Update.BARRIER)
    check(replace(plan, policy=replace(plan.policy, update=Update.DEFERRED)))


@pytest.mark.parametrize("changes", [{"clip_norm": 1.0}, {"on_nonfinite": "skip"}])
def test_eager_updates_are_refused_with(changes: dict[str, Any]) -> None:
    plan = small(update=Update.EAGER)
    check(plan)
    assert "eager" in error_of(replace(plan, semantics=replace(plan.semantics, **changes)))


def test_an_eager_update_comes_after_the_norm_of_its_block() -> None:
    plan = small(update=Update.EAGER)
    norm, update = index(plan, "norm cpu b2"), index(plan, "update cpu b2")
    ops = list(plan.ops)
    ops[norm], ops[update] = replace(ops[update], waits=ops[norm].waits), replace(ops[norm], waits=())
    at = {norm: update, update: norm}
    moved = tuple(replace(op, waits=tuple(replace(w, op=at.get(w.op, w.op)) for w in op.waits)) for op in ops)
    assert "before its norm" in error_of(replace(plan, ops=moved))


def test_gradients_leave_as_late_as_the_policy_says() -> None:
    plan = small(gradient_slots=2)
    assert "leaves before" in error_of(replace(plan, policy=replace(plan.policy, offload_late_blocks=1)))
    plan = small(gradient_slots=2, offload_late_blocks=1)
    check(plan)
    for b in (2, 3):  # the bottom layer has no backward to wait for
        early, late = plan.ops[index(plan, f"offload_gradient d2h b{b}")], plan.ops[index(plan, f"offload_gradient d2h b{b - 1}")]
        mutant = with_op(plan, early.name, waits=(Wait(index(plan, f"backward gpu b{b} m0")),))
        mutant = with_op(mutant, late.name, waits=(*late.waits, *early.waits))
        assert f"leaves before op {index(plan, f'backward gpu b{b - 1} m0')}" in error_of(mutant)


def test_groups_come_one_after_another() -> None:
    """The data would be right: micro-batch 2 takes the boundary slots that micro-batch 0 has left."""
    plan = small(n_micro_batches=4, accumulation_group=2)
    last, first = index(plan, "backward gpu b0 m1"), index(plan, "forward gpu b0 m2")
    swapped = dict(MUTATIONS["swap neighbours in a lane"](plan))
    mutant = swapped[f"swapped {last}: {plan.ops[last]} with {first}: {plan.ops[first]}"]
    assert same_training(plan, mutant) is None
    assert "later group" in error_of(mutant)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefetch_depth": 2},
        {"prefetch_depth": 2**52},
        {"gradient_slots": 2},
        {"accumulation_group": 2},
        {"accumulation_group": 2**52},
        {"save": saves(all=(4,))},
        {"resident_blocks": (0,)},
        {"resident_blocks": (5,)},
        {"resident_blocks": (2**52,)},
        {"spill_blocks": (0,)},
        {"spill_blocks": (3,)},
        {"spill_blocks": (2**52,)},
    ],
)
def test_a_policy_that_the_plan_does_not_keep_is_refused(changes: dict[str, Any]) -> None:
    plan = small()
    assert error_of(replace(plan, policy=replace(plan.policy, **changes)))


@pytest.mark.parametrize("kept", [1, 3])
def test_a_block_whose_input_spills_recomputes(kept: int) -> None:
    """The last one could keep: nothing but the policy speaks against it."""
    plan = small(spill_blocks=(0, 2))
    check(replace(plan, policy=replace(plan.policy, save=saves(all=(2,)))))
    assert "the block before it cannot spill" in error_of(replace(plan, policy=replace(plan.policy, save=saves(all=(kept,)))))


@pytest.mark.parametrize(
    "changes", [{"spill_blocks": (3,)}, {"spill_blocks": (4,)}, {"spill_blocks": (1, 1)}, {"resident_blocks": (2, 2)}]
)
def test_the_last_layer_and_the_head_do_not_spill_and_each_block_is_named_once(changes: dict[str, Any]) -> None:
    plan = small(spill_blocks=(1,), resident_blocks=(2,))
    assert error_of(replace(plan, policy=replace(plan.policy, **changes))).startswith("policy: ")


# --- arenas and memory --------------------------------------------------------------------------------------------------------


@pytest.mark.drawn
@law
@given(plans(max_layers=3), st.data())
def test_an_arena_missing_added_moved_or_of_another_length_is_refused(plan: Plan, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(plan.arenas) - 1))
    arena = plan.arenas[n]
    other = Place.HOST if arena.place is Place.DEVICE else Place.DEVICE
    new = data.draw(
        st.sampled_from(
            [
                (),
                (arena, replace(arena, name="spare")),
                (replace(arena, place=other),),
                (replace(arena, slot_bytes=()),),
                (replace(arena, slot_bytes=tuple(0 if any(arena.slot_bytes) else -1 for _ in arena.slot_bytes)),),
            ]
        )
    )
    assert error_of(replace(plan, arenas=(*plan.arenas[:n], *new, *plan.arenas[n + 1 :])))


@pytest.mark.parametrize(("name", "first"), [("state", 0), ("host_gradients", 0), ("weights", 3)])
def test_state_on_the_host_lies_in_slots_of_exactly_its_size(name: str, first: int) -> None:
    """A slot's size is where the next block begins, and where the second moment does. So too of weights that stay."""
    plan = small(resident_blocks=(0, 2, 4), speculate_blocks=(1, 3))
    n = next(n for n, a in enumerate(plan.arenas) if a.name == name)
    sizes = plan.arenas[n].slot_bytes
    assert len(sizes) - first == {"state": 7, "host_gradients": 5, "weights": 3}[name]
    for i in range(first, len(sizes)):
        larger = replace(plan.arenas[n], slot_bytes=(*sizes[:i], sizes[i] + 1024, *sizes[i + 1 :]))
        message = error_of(replace(plan, arenas=(*plan.arenas[:n], larger, *plan.arenas[n + 1 :])))
        assert f"arena {name}: slot {i}" in message


def test_outputs_that_pass_through_the_ring_fit_in_each_of_its_slots_and_on_the_host() -> None:
    """Outputs of different sizes: each slot holds the largest that may come there."""
    plan = small(n_micro_batches=2, accumulation_group=2, spill_blocks=(0, 2))
    blocks = tuple(replace(b, boundary_bytes=n) for b, n in zip(plan.workload.blocks, (100, 300, 200, 100, 0), strict=True))
    plan = replace(plan, workload=replace(plan.workload, blocks=blocks))
    needed = {"activations": [300] * 2 + [100] * 2 + [200] * 5, "spilled": [100] * 2 + [200] * 2}
    arenas = [replace(a, slot_bytes=tuple(-(-n // 256) * 256 for n in needed.get(a.name, a.slot_bytes))) for a in plan.arenas]
    arenas = [b if b.name in needed else a for a, b in zip(plan.arenas, arenas, strict=True)]
    check(replace(plan, arenas=tuple(arenas)))
    for n, arena in enumerate(arenas):
        for i, n_bytes in enumerate(needed.get(arena.name, ())):
            sizes = tuple(n_bytes - 1 if j == i else size for j, size in enumerate(arena.slot_bytes))
            smaller = (*arenas[:n], replace(arena, slot_bytes=sizes), *arenas[n + 1 :])
            assert f"arena {arena.name}: slot {i} has {n_bytes - 1} bytes" in error_of(replace(plan, arenas=smaller))


@pytest.mark.drawn
@law
@given(plans())
def test_memory_is_enough_at_the_peak_and_too_little_one_byte_below(plan: Plan) -> None:
    device_bytes = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + 1000
    host_bytes = plan.host_arena_bytes + 1000
    for place, n_bytes in (("device", device_bytes), ("host", host_bytes)):
        check(with_profile(plan, f"{place}.memory_bytes.value", n_bytes))
        assert f"{place} memory" in error_of(with_profile(plan, f"{place}.memory_bytes.value", n_bytes - 1))


@pytest.mark.parametrize(
    "path",
    ["device.memory_bytes", "device.context_bytes", "host.memory_bytes", "host.runtime_bytes", "device", "host"],
)
@pytest.mark.parametrize("value", [None, [], "1e9", {}, {"value": "1"}, {"value": True}, {"value": -1.0}, {"value": float("nan")}])
def test_a_profile_without_its_numbers_is_refused(path: str, value: object) -> None:
    assert f"profile: {path.partition('.')[0]}" in error_of(with_profile(small(), path, value))


# --- claims -------------------------------------------------------------------------------------------------------------------


def claim_of(plan: Plan, step_s: float = 1.0, machine_bound_s: float = 0.5) -> dict[str, Any]:
    device_bytes = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + 1000
    return {
        "prediction": {
            "step_s": step_s,
            "device_peak_bytes": device_bytes,
            "host_peak_bytes": plan.host_arena_bytes + 1000,
        },
        "certificate": {"machine_bound_s": machine_bound_s},
    }


@pytest.mark.drawn
@law
@given(plans())
def test_an_honest_claim_passes(plan: Plan) -> None:
    check(plan, claim_of(plan))
    check(plan, claim_of(plan, step_s=0.5))


def test_a_claim_below_its_own_bound_is_refused() -> None:
    plan = small()
    assert "shorter than the claimed machine bound" in error_of(plan, claim_of(plan, step_s=0.499))


@pytest.mark.parametrize("place", list(Place))
def test_a_claim_of_other_memory_than_the_plan_takes_is_refused(place: Place) -> None:
    plan = small()
    for wrong in (-1, 1):
        claim = claim_of(plan)
        claim["prediction"][f"{place}_peak_bytes"] += wrong
        assert f"{place}_peak_bytes" in error_of(plan, claim)


@pytest.mark.parametrize(("direction", "kind"), [("h2d", Kind.LOAD), ("d2h", Kind.OFFLOAD_GRADIENT)])
def test_a_claim_faster_than_the_link_is_refused(direction: str, kind: Kind) -> None:
    """Payload over the best rate of the direction: two bytes an element, a block as often as it is moved."""
    plan = with_profile(small(), f"link.{direction}.bytes_per_s", [{"n_bytes": 1, "rate": {"value": 1000.0}}])
    blocks = plan.workload.blocks
    n_bytes = sum(2 * sum(p.n_elements for p in blocks[op.block].parameters) for op in plan.ops if op.kind is kind)
    check(plan, claim_of(plan, step_s=n_bytes / 1000))
    what = f"its {kind} ops alone"
    assert what in error_of(plan, claim_of(plan, step_s=n_bytes / 1000 * 0.999, machine_bound_s=0.1))


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_what_spills_is_on_the_link_too(direction: str) -> None:
    """Two blocks of 64 bytes each way, twice; all else there as without."""
    least_s = {}
    for spill in ((), (0, 2)):
        plan = small(n_micro_batches=2, accumulation_group=2, spill_blocks=spill)
        plan = with_profile(plan, f"link.{direction}.bytes_per_s", [{"n_bytes": 1, "rate": {"value": 1000.0}}])
        moved = {"h2d": Kind.LOAD, "d2h": Kind.OFFLOAD_GRADIENT}[direction]
        n_elements = [sum(p.n_elements for p in b.parameters) for b in plan.workload.blocks]
        least_s[spill] = sum(2 * n_elements[op.block] for op in plan.ops if op.kind is moved) / 1000 + len(spill) * 2 * 64 / 1000
        check(plan, claim_of(plan, step_s=least_s[spill]))
        assert "ops alone" in error_of(plan, claim_of(plan, step_s=least_s[spill] - 0.001, machine_bound_s=0.1))
    assert least_s[0, 2] == pytest.approx(least_s[()] + 0.256)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_what_layers_save_is_on_the_link_too(direction: str) -> None:
    """300 and 900 bytes each way, for each of two micro-batches."""
    least_s = {}
    for away in ((), (1, 3)):
        plan = small(n_micro_batches=2, accumulation_group=2, save=saves(products=(1, 2, 3)), offload_blocks=away)
        plan = with_profile(plan, f"link.{direction}.bytes_per_s", [{"n_bytes": 1, "rate": {"value": 1000.0}}])
        moved = {"h2d": Kind.LOAD, "d2h": Kind.OFFLOAD_GRADIENT}[direction]
        n_elements = [sum(p.n_elements for p in b.parameters) for b in plan.workload.blocks]
        least_s[away] = sum(2 * n_elements[op.block] for op in plan.ops if op.kind is moved) / 1000 + len(away) * 1.2
        check(plan, claim_of(plan, step_s=least_s[away]))
        assert "ops alone" in error_of(plan, claim_of(plan, step_s=least_s[away] - 0.001, machine_bound_s=0.1))


@pytest.mark.parametrize("key", ["prediction", "prediction.step_s", "prediction.host_peak_bytes", "certificate"])
@pytest.mark.parametrize("value", [None, "fast", float("inf"), -1, [], {}])
def test_a_claim_with_a_hole_is_refused(key: str, value: object) -> None:
    plan = small()
    assert "claim" in error_of(plan, with_value(claim_of(plan), key.split("."), value))


@pytest.mark.parametrize("points", [None, [], [None], [{"rate": 1}], [{"n_bytes": 1, "rate": {"value": 0}}], {}])
def test_a_claim_on_a_profile_without_a_link_is_refused(points: object) -> None:
    plan = with_profile(small(), "link.d2h.bytes_per_s", points)
    check(plan)
    assert "link.d2h" in error_of(plan, claim_of(plan))


# --- hostile plans --------------------------------------------------------------------------------------------------------------


def test_numbers_beyond_all_measure_are_refused_at_once() -> None:
    plan = small()
    sized = replace(plan.semantics, batch_size=2**52)
    blocks = list(plan.workload.blocks)
    shapes: list[tuple[int, ...]] = [(2**52,) * 8, (2**52,) * 10**4]
    for shape in shapes:
        wide = replace(blocks[1], parameters=(Parameter("w", shape),))
        assert error_of(replace(plan, workload=replace(plan.workload, blocks=(blocks[0], wide, *blocks[2:]))))
    assert error_of(replace(plan, semantics=sized))
    assert error_of(replace(plan, semantics=sized, policy=replace(plan.policy, accumulation_group=2**52)))
    assert "too few" in error_of(replace(plan, policy=replace(plan.policy, offload_late_blocks=2**52)))
    spilling = replace(plan.policy, accumulation_group=2**52, spill_blocks=tuple(range(2)))
    assert error_of(replace(plan, semantics=sized, policy=spilling))
    for many in (tuple(range(10**5)), tuple(range(2**52, 2**52 + 10**5))):
        assert error_of(replace(plan, policy=replace(plan.policy, spill_blocks=many)))
        assert error_of(replace(plan, policy=replace(plan.policy, resident_blocks=many)))


def test_a_smaller_last_micro_batch_must_be_described_and_fit_the_slots_of_the_others() -> None:
    semantics = Semantics(seq_len=4, batch_size=5, micro_batch=2)
    workload = with_smaller(small_workload(3, False).blocks, semantics)
    plan = lower(MODEL, workload, semantics, Policy(spill_blocks=(0,)), PROFILE)
    check(plan)
    assert "does not say" in error_of(replace(plan, workload=replace(workload, smaller=())))
    for wrong in ({"boundary_bytes": workload.blocks[1].boundary_bytes + 1}, {"parameters": ()}, {"kind": BlockKind.HEAD}):
        odd = (workload.smaller[0], replace(workload.smaller[1], **wrong), *workload.smaller[2:])
        assert "block 1: the smaller last micro-batch" in error_of(replace(plan, workload=replace(workload, smaller=odd)))


def test_names_with_line_breaks_stay_on_one_line() -> None:
    plan = small()
    blocks = list(plan.workload.blocks)
    odd = replace(blocks[1], name="a\nb", parameters=(Parameter("w\nw", (1,), "embed\nding"),))
    error_of(replace(plan, workload=replace(plan.workload, blocks=(blocks[0], odd, *blocks[2:]))))
    assert "\n" not in summary(replace(plan, model=replace(plan.model, name="a\nb")))


@pytest.mark.parametrize("tied_to", ["no such weight", "embed.weight"])
def test_a_weight_tied_to_nothing_of_its_shape_is_refused(tied_to: str) -> None:
    plan = small()
    head = plan.workload.blocks[-1]
    odd = replace(head, parameters=(Parameter("lm_head.weight", (3,), tied_to),))
    assert "tied" in error_of(replace(plan, workload=replace(plan.workload, blocks=(*plan.workload.blocks[:-1], odd))))


@pytest.mark.drawn
@law
@given(
    plans(max_layers=2, max_micro_batches=2),
    st.lists(st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 10**6)), min_size=2, max_size=6),
    plans(max_layers=2, max_micro_batches=2),
)
def test_a_plan_changed_in_many_ways_passes_or_is_a_plan_error(plan: Plan, changes: list[tuple[str, int]], other: Plan) -> None:
    """Never another exception; and the parts of two plans in one are no exception either."""
    for kind, n in changes:
        mutants = []
        with suppress(PlanError):  # of an op that by now lacks the operand that is to be changed
            for mutant in MUTATIONS[kind](plan):
                mutants.append(mutant)
        if mutants:
            plan = mutants[n % len(mutants)][1]
    is_killed(plan)
    for part in ("semantics", "policy", "workload", "arenas"):
        mixed: dict[str, Any] = {part: getattr(other, part)}
        mixed_plan = replace(plan, **mixed)
        if all(op.block < len(mixed_plan.workload.blocks) for op in plan.ops):
            is_killed(mixed_plan)


def test_a_written_plan_passes_with_its_claim(tmp_path: Any) -> None:
    plan = small(n_micro_batches=2)
    PlanFile(plan, claim_of(plan)).write(tmp_path / "plan.json")
    read = PlanFile.read(tmp_path / "plan.json")
    check(read.plan, read.claim)
    assert summary(read.plan) == summary(plan)
    assert str(round(plan.profile["host"]["memory_bytes"]["value"] / (1000 * GB))) + " TB" in summary(plan)
