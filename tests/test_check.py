"""Does the checker pass every plan that is right, and none that is wrong?"""

from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from planner.check import N_STEPS, _Clocks, _legal_order, check, summary
from planner.lower import lower
from runtime.errors import PlanError
from runtime.plan import Kind, Op, Place, Plan, PlanFile, Policy, Semantics, Slot, Update, Wait
from runtime.units import GB
from runtime.workload import Parameter
from tests.mutants import MUTATIONS, Count, is_killed, race, same_training, table, tally, unrolled
from tests.strategies import MODEL, PROFILE, plans, small_workload

law = settings(deadline=None)  # a busy machine is no failure


def small(n_layers: int = 3, n_micro_batches: int = 1, tied: bool = False, **policy: Any) -> Plan:
    eager = policy.get("update") is Update.EAGER
    semantics = Semantics(seq_len=4, batch_size=n_micro_batches, micro_batch=1, clip_norm=None if eager else 1.0)
    workload = small_workload(n_layers, tied)
    return lower(MODEL, workload, semantics, Policy(**{"update": Update.DEFERRED} | policy), PROFILE)


def index(plan: Plan, name: str) -> int:
    """The place of the first op of that name."""
    return next(i for i, op in enumerate(plan.ops) if op.name == name)


def with_op(plan: Plan, name: str, **changes: Any) -> Plan:
    i = index(plan, name)
    return replace(plan, ops=(*plan.ops[:i], replace(plan.ops[i], **changes), *plan.ops[i + 1 :]))


def with_profile(plan: Plan, path: str, value: object) -> Plan:
    """The plan with one value of its profile replaced."""
    first, *rest = path.split(".")
    return replace(plan, profile=_with(plan.profile, [first, *rest], value))


def _with(tree: Any, path: list[str], value: object) -> Any:
    return value if not path else {**tree, path[0]: _with(tree[path[0]], path[1:], value)}


def error_of(plan: Plan, claim: dict[str, Any] | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        check(plan, claim)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# --- right plans pass -------------------------------------------------------------------------------------------------


@law
@given(plans())
def test_every_plan_of_the_planner_passes(plan: Plan) -> None:
    check(plan)
    assert "\n" not in summary(plan)


@law
@given(plans(max_layers=3, max_micro_batches=3))
def test_the_oracle_agrees_that_they_are_free_of_races(plan: Plan) -> None:
    assert race(plan, unrolled(plan)) is None


# --- wrong plans do not -----------------------------------------------------------------------------------------------


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
    counts, survivors, condemned = tally(200)
    print(f"\n{table(counts)}")
    return counts, set(survivors), condemned


def test_no_wrong_mutant_of_the_samples_survives(counted: tuple[dict[str, Count], set[str], list[str]]) -> None:
    counts, _, condemned = counted
    assert condemned == []
    assert all(count.made > 0 and count.killed > 0 for count in counts.values())


@pytest.mark.parametrize("kind", sorted(k for k in MUTATIONS if "lane" not in k.split() and "shrink" not in k))
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
    "norm": "as above",
    "norm update": "eager: another block's norm",
    "offload": "gradients in different slots",
    "offload offload": "as above",
    "update": "different blocks",
    "update update": "as above",
    "accumulate": "the sum of another block",
    "loss": "different micro-batches",
    "boundaries": "the last boundary slot is rounded up, and still holds what goes into it",
}


def test_every_survivor_is_of_a_family_that_is_explained(
    counted: tuple[dict[str, Count], set[str], list[str]],
) -> None:
    assert {survivor.partition(": ")[2] for survivor in counted[1]} <= HARMLESS.keys()


# --- the fast against the obvious ---------------------------------------------------------------------------------------


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
    assert "host_weights[2]" in message
    assert "update cpu b2" in message


def test_a_load_of_the_wrong_block_is_told_by_what_the_slot_holds() -> None:
    plan = small()
    message = error_of(with_op(plan, "load h2d b2", block=1, reads=(Slot("host_weights", 1),)))
    assert "weights[1] holds the weights of block 1, step 0, not the weights of block 2, step 0" in message


def test_waits_in_a_circle_are_refused() -> None:
    plan = small()
    i = index(plan, "update cpu b0")
    assert "can never start" in error_of(with_op(plan, "load h2d b0", waits=(Wait(i),)))


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.LOAD, Kind.ACCUMULATE}))
def test_an_op_done_twice_is_refused(kind: Kind) -> None:
    plan = small()
    op = next(op for op in plan.ops if op.kind is kind)
    assert "twice" in error_of(replace(plan, ops=(*plan.ops, op)))


def test_a_step_without_ops_is_refused() -> None:
    assert "the step has no norm of block 0" in error_of(replace(small(), ops=()))


def test_a_loss_of_a_layer_and_a_forward_of_the_head_are_refused() -> None:
    plan = small()
    for kind, block in ((Kind.LOSS, 2), (Kind.FORWARD, 4), (Kind.BACKWARD, 4)):
        assert "the head has a loss" in error_of(replace(plan, ops=(*plan.ops, Op(kind, plan.ops[1].lane, block, 0))))


def test_a_tied_head_is_loaded_with_the_embedding_and_counted_with_it() -> None:
    plan = small(tied=True)
    load, norm = plan.ops[index(plan, "load h2d b4")], plan.ops[index(plan, "norm cpu b0")]
    assert "must read host_weights[4] host_weights[0]" in error_of(with_op(plan, "load h2d b4", reads=load.reads[:1]))
    reads = (norm.reads[0], norm.reads[-1])
    assert "must read host_gradients[0] host_gradients[4]" in error_of(with_op(plan, "norm cpu b0", reads=reads))


def test_a_tied_weight_may_not_be_updated_while_the_head_still_loads_it() -> None:
    """Block by block into the next step: the head is the last to load the weight that block 0 owns."""
    plan = small(tied=True)
    waits = tuple(w for w in plan.ops[index(plan, "load h2d b0")].waits if w.distance == 0)
    assert "host_weights[0]" in error_of(with_op(plan, "load h2d b0", waits=waits))


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
    check(small(gradient_slots=2, offload_late_blocks=1))


def test_groups_come_one_after_another() -> None:
    """The data would be right: micro-batch 2 takes the boundary slots that micro-batch 0 has left."""
    plan = small(n_micro_batches=4, group_micro_batches=2)
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
        {"group_micro_batches": 2},
        {"group_micro_batches": 2**52},
        {"keep_blocks": (0,)},
        {"keep_blocks": (4,)},
        {"keep_blocks": (1, 1)},
        {"keep_blocks": (2**52,)},
    ],
)
def test_a_policy_that_the_plan_does_not_keep_is_refused(changes: dict[str, Any]) -> None:
    plan = small()
    assert error_of(replace(plan, policy=replace(plan.policy, **changes)))


# --- arenas and memory --------------------------------------------------------------------------------------------------------


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
                (replace(arena, slot_bytes=tuple(0 for _ in arena.slot_bytes)),),
            ]
        )
    )
    assert error_of(replace(plan, arenas=(*plan.arenas[:n], *new, *plan.arenas[n + 1 :])))


@pytest.mark.parametrize("name", ["masters", "moments", "host_weights", "host_gradients"])
def test_state_on_the_host_lies_in_slots_of_exactly_its_size(name: str) -> None:
    """A slot's size is where the next block begins, and where the second moment does."""
    plan = small()
    n = next(n for n, a in enumerate(plan.arenas) if a.name == name)
    sizes = plan.arenas[n].slot_bytes
    for i in range(len(sizes)):
        larger = replace(plan.arenas[n], slot_bytes=(*sizes[:i], sizes[i] + 1024, *sizes[i + 1 :]))
        message = error_of(replace(plan, arenas=(*plan.arenas[:n], larger, *plan.arenas[n + 1 :])))
        assert f"arena {name}: slot {i}" in message


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


@pytest.mark.parametrize(("direction", "kind"), [("h2d", Kind.LOAD), ("d2h", Kind.OFFLOAD)])
def test_a_claim_faster_than_the_link_is_refused(direction: str, kind: Kind) -> None:
    """Payload over the best rate of the direction: two bytes an element, a block as often as it is moved."""
    plan = with_profile(small(), f"link.{direction}.bytes_per_s", [{"n_bytes": 1, "rate": {"value": 1000.0}}])
    blocks = plan.workload.blocks
    n_bytes = sum(2 * sum(p.n_elements for p in blocks[op.block].parameters) for op in plan.ops if op.kind is kind)
    check(plan, claim_of(plan, step_s=n_bytes / 1000))
    assert f"its {kind} ops alone" in error_of(plan, claim_of(plan, step_s=n_bytes / 1000 * 0.999, machine_bound_s=0.1))


@pytest.mark.parametrize("key", ["prediction", "prediction.step_s", "prediction.host_peak_bytes", "certificate"])
@pytest.mark.parametrize("value", [None, "fast", float("inf"), -1, [], {}])
def test_a_claim_with_a_hole_is_refused(key: str, value: object) -> None:
    plan = small()
    assert "claim" in error_of(plan, _with(claim_of(plan), key.split("."), value))


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
    assert error_of(replace(plan, semantics=sized, policy=replace(plan.policy, group_micro_batches=2**52)))
    check(replace(plan, policy=replace(plan.policy, offload_late_blocks=2**52)))


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


@law
@given(
    plans(max_layers=2, max_micro_batches=2),
    st.lists(st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 10**6)), min_size=2, max_size=6),
    plans(max_layers=2, max_micro_batches=2),
)
def test_a_plan_changed_in_many_ways_passes_or_is_a_plan_error(plan: Plan, changes: list[tuple[str, int]], other: Plan) -> None:
    """Never another exception; and the parts of two plans in one are no exception either."""
    for kind, n in changes:
        mutants = list(MUTATIONS[kind](plan))
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
