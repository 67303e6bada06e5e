"""Does the checker hold a plan to the shadows and the recomputed outputs of its policy?"""

from dataclasses import replace
from typing import Any

import pytest

from planner.check.check import check
from planner.lower.lower import lower
from runtime.plan import Kind, Op, Place, Plan, Policy, Semantics, Slot, Update, saves
from runtime.plan.policy import RICHER
from runtime.plan.workload import Saved, Tier
from tests.edits import error_of, index, small, with_op, with_profile, with_slots
from tests.mutants import MUTATIONS
from tests.strategies import MODEL, PROFILE, small_workload

STRIDED: dict[str, Any] = {"n_layers": 5, "n_micro_batches": 2, "accumulation_group": 2, "boundary_stride": 3}
SPECULATING: dict[str, Any] = {"n_micro_batches": 2, "speculate_blocks": (0, 1, 3)}


def under(plan: Plan, **changes: Any) -> Plan:
    """The same ops under another policy."""
    return replace(plan, policy=replace(plan.policy, **changes))


def with_sizes(plan: Plan, name: str, sizes: tuple[int, ...]) -> Plan:
    return replace(plan, arenas=tuple(replace(a, slot_bytes=sizes) if a.name == name else a for a in plan.arenas))


def sizes_of(plan: Plan, name: str) -> tuple[int, ...]:
    return next(a.slot_bytes for a in plan.arenas if a.name == name)


def tiered(*ways: Saved, layers: tuple[int, ...] = (1, 2, 3), **policy: Any) -> Plan:
    """These layers can recompute in these ways, if not asked for others."""
    tiers = tuple(Tier(saved, 1000, 500, 0, False, 0, 0) for saved in ways)
    workload = small_workload(3, tied=False)
    blocks = tuple(replace(b, tiers=tiers) if i in layers else b for i, b in enumerate(workload.blocks))
    semantics = Semantics(seq_len=4, batch_size=2, micro_batch=1)
    return lower(MODEL, replace(workload, blocks=blocks), semantics, Policy(**policy), PROFILE)


# --- which policies are legal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [STRIDED, SPECULATING, {"speculate_blocks": (1, 2), "boundary_stride": 3}])
def test_a_plan_that_keeps_its_policy_passes(policy: dict[str, Any]) -> None:
    plan = small(**policy)
    check(plan)
    kinds = {op.kind for op in plan.ops}
    assert (Kind.RECOMPUTE in kinds, Kind.SETTLE in kinds) == ("boundary_stride" in policy, "speculate_blocks" in policy)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"update": Update.BARRIER}, "they need update deferred"),
        ({"speculate_blocks": (3, 1, 0)}, "speculate_blocks must be blocks 0..4 in ascending order, each once"),
        ({"speculate_blocks": (0, 1, 1)}, "speculate_blocks must be blocks 0..4 in ascending order, each once"),
        ({"speculate_blocks": (0, 1, 5)}, "speculate_blocks must be blocks 0..4 in ascending order, each once"),
        ({"speculate_blocks": (2**52,)}, "speculate_blocks must be blocks 0..4 in ascending order, each once"),
        ({"boundary_stride": 4}, "boundary_stride is 4, but there are 3 layers"),
        ({"boundary_stride": 2**52}, "but there are 3 layers"),
        ({"boundary_stride": 2, "save": saves(all=(1,))}, "layers save their input alone and no boundary spills"),
        ({"boundary_stride": 2, "spill_blocks": (1,)}, "layers save their input alone and no boundary spills"),
        ({"offload_blocks": (1,)}, "offload_blocks must be layers that save attention or products"),
        ({"offload_blocks": (99,)}, "offload_blocks must be layers that save attention or products"),
        ({"save": saves(all=(1,)), "offload_blocks": (1,)}, "offload_blocks must be layers that save attention or products"),
        ({"save": (Saved.ALL, Saved.INPUT)}, "save ends with a layer that saves its input"),
        ({"save": saves(attention=(4,))}, "save names layer 4, but there are 3"),
        ({"save": saves(attention=(1,))}, "this model's layers cannot save only attention"),
        ({"save": saves(products=(2,))}, "this model's layers cannot save only products"),
    ],
)
def test_a_policy_that_no_plan_can_keep_is_refused(changes: dict[str, Any], what: str) -> None:
    message = error_of(under(small(**SPECULATING), **changes))
    assert message.startswith("policy: ")
    assert what in message


def test_a_way_to_recompute_is_asked_of_layers_that_do() -> None:
    """One that keeps everything, or has its input and runs the whole forward again, needs none."""
    plan = tiered(Saved.ATTENTION, layers=(2,), save=saves(all=(1, 3), attention=(2,)))
    check(plan)
    check(under(plan, save=saves(all=(1,))))
    assert "this model's layers cannot save only attention" in error_of(under(plan, save=saves(all=(1,), attention=(2, 3))))
    assert "this model's layers cannot save only products" in error_of(under(plan, save=saves(products=(2,))))


def test_of_a_smaller_micro_batch_it_is_asked_too() -> None:
    """A file's blocks of it are blocks of their own."""
    whole = tiered(Saved.PRODUCTS).workload
    policy = Policy(save=saves(products=(1, 2)), offload_blocks=(1, 2))
    plan = lower(MODEL, replace(whole, smaller=whole.blocks), Semantics(4, 3, 2), policy, PROFILE)
    check(plan)
    for b in (1, 2):
        poor = tuple(replace(block, tiers=()) if i == b else block for i, block in enumerate(whole.blocks))
        said = error_of(replace(plan, workload=replace(whole, smaller=poor)))
        assert said.startswith("policy: this model's layers cannot save only products")
    poor = tuple(replace(block, tiers=()) if i == 3 else block for i, block in enumerate(whole.blocks))
    check(replace(plan, workload=replace(whole, smaller=poor)))


def test_what_a_layer_saves_besides_its_input_is_counted_and_does_not_forbid_that_the_input_spills() -> None:
    """Two layers, 1000 bytes each for both micro-batches of the group."""
    ways = Saved.ATTENTION, Saved.PRODUCTS
    saving = {"accumulation_group": 2, "spill_blocks": (0, 1), "save": saves(products=(2,), attention=(1,))}
    plan = tiered(*ways, **saving)
    check(plan)
    needed_bytes = plan.device_arena_bytes + 2 * 2 * 1000 + plan.transient_bytes + 1000
    check(with_profile(plan, "device.memory_bytes.value", needed_bytes))
    assert "device memory" in error_of(with_profile(plan, "device.memory_bytes.value", needed_bytes - 1))


@pytest.mark.parametrize("away", [(), (1,), (1, 2)])
def test_what_waits_on_the_host_is_counted_there_and_two_slots_of_it_on_the_device(away: tuple[int, ...]) -> None:
    """1000 bytes of each of two layers, for both micro-batches of the group; a slot is a multiple of 256."""
    saving = {"accumulation_group": 2, "save": saves(products=(1, 2)), "offload_blocks": away}
    plan = tiered(Saved.PRODUCTS, **saving)
    check(plan)
    assert plan.kept_bytes == 2 * (2 - len(away)) * 1000
    assert sizes_of(plan, "saved") + sizes_of(plan, "offloaded") == (1024,) * (2 + 2 * len(away)) if away else True
    needed_bytes = plan.host_arena_bytes + 1000
    check(with_profile(plan, "host.memory_bytes.value", needed_bytes))
    assert "host memory" in error_of(with_profile(plan, "host.memory_bytes.value", needed_bytes - 1))


@pytest.mark.parametrize("stride", [1, 2])
def test_with_a_stride_nothing_is_saved_besides(stride: int) -> None:
    plan = tiered(Saved.ATTENTION, Saved.PRODUCTS, boundary_stride=2)
    for saved in RICHER:
        message = error_of(under(plan, boundary_stride=stride, save=(saved,)))
        assert ("layers save their input alone and no boundary spills" in message) == (stride > 1)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (small(**STRIDED), {"boundary_stride": 1}),
        (small(**STRIDED), {"boundary_stride": 2}),
        (small(**STRIDED), {"boundary_stride": 5}),
        (small(**SPECULATING), {"speculate_blocks": ()}),
        (small(**SPECULATING), {"speculate_blocks": (0, 1, 2, 3)}),
    ],
)
def test_a_policy_that_the_plan_does_not_keep_is_refused(plan: Plan, changes: dict[str, Any]) -> None:
    assert error_of(under(plan, **changes))


# --- shadows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "master", "bytes_per_element"), [("bf16", "fp32", 2 + 2 + 8), ("bf16", "bf16", 2 + 8), ("fp32", "fp32", 4 + 8)]
)
def test_a_shadow_has_exactly_the_size_of_what_it_stands_for(compute: Any, master: Any, bytes_per_element: int) -> None:
    semantics = Semantics(4, 1, 1, compute_dtype=compute, master_dtype=master)
    policy = Policy(update=Update.DEFERRED, speculate_blocks=(0, 2, 4))
    plan = lower(MODEL, small_workload(3, tied=True), semantics, policy, PROFILE)
    sizes = tuple(plan.workload.blocks[b].host_elements * bytes_per_element for b in (0, 1, 2, 3, 4, 0, 2, 4))
    assert len(set(sizes)) == 5
    check(with_sizes(plan, "state", sizes))
    for i in (5, 6, 7):
        for wrong in (-256, 256):
            odd = (*sizes[:i], sizes[i] + wrong, *sizes[i + 1 :])
            assert f"arena state: slot {i}" in error_of(with_sizes(plan, "state", odd))


def test_shadows_lie_on_the_host_and_only_where_a_block_speculates() -> None:
    plan = small(**SPECULATING)
    moved = tuple(replace(a, place=Place.DEVICE) if a.name == "state" else a for a in plan.arenas)
    assert "arena state: lies in device memory" in error_of(replace(plan, arenas=moved))
    assert "arena state: 8 slots, where policy and model ask for 5" in error_of(
        with_sizes(small(n_micro_batches=2), "state", sizes_of(plan, "state"))
    )


def test_a_block_speculates_after_its_norm_and_settles_after_the_norm_of_all() -> None:
    plan = small(speculate_blocks=(2,))
    mutants = [mutant for kind in ("speculate out of turn", "settle before the norm of all") for _, mutant in MUTATIONS[kind](plan)]
    messages = [error_of(mutant) for mutant in mutants]
    assert [[what in message for what in ("before its norm", "not the shadow", "the norm over")] for message in messages] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [False, False, True],
    ]
    assert "norm[0] holds the norm over 4 gradients in step 0, not the norm over 5 gradients" in messages[2]


def test_a_settle_needs_a_shadow_of_its_own_step() -> None:
    """In the second step it would find the one that the first has spent."""
    plan = small(speculate_blocks=(2,))
    late = next(mutant for what, mutant in MUTATIONS["speculate out of turn"](plan) if what.startswith("after"))
    assert "in step 0 state[5] holds nothing, not the shadow of block 2, step 0" in error_of(late)


@pytest.mark.parametrize("name", ["speculate cpu b1", "settle cpu b1"])
def test_what_either_outcome_touches_is_declared(name: str) -> None:
    plan = small(**SPECULATING)
    op = plan.ops[index(plan, name)]
    assert {op["state"], op["shadow"], op["arrived"]} <= {*op.reads, *op.writes}
    for operand, slot in op.operands:
        assert f"{operand}={slot}" in error_of(with_slots(plan, name, **{operand: None})).partition(", not ")[0]


def test_a_settled_block_may_not_be_loaded_before() -> None:
    plan = small(**SPECULATING)
    waits = tuple(w for w in plan.ops[index(plan, "load h2d b1")].waits if w.distance == 0)
    message = error_of(with_op(plan, "load h2d b1", waits=waits))
    assert "state[1]" in message
    assert "settle cpu b1" in message


def test_a_block_is_updated_or_settled_and_not_both() -> None:
    plan = small(speculate_blocks=(2,))
    update, settle = plan.ops[index(plan, "update cpu b1")], plan.ops[index(plan, "settle cpu b2")]
    assert "updated by speculate and settle" in error_of(replace(plan, ops=(*plan.ops, replace(update, block=2))))
    assert "has no shadow" in error_of(replace(plan, ops=(*plan.ops, replace(settle, block=1))))


def test_in_the_ring_of_eager_updates_every_slot_holds_the_largest_layer() -> None:
    plan = small(update=Update.EAGER)
    sizes = sizes_of(plan, "host_gradients")
    largest = (1664 + 128) * 2  # of the third layer: 8 x 200 weights and 8 more, each padded
    assert sizes[1:-1] == (largest,) * 2
    for i in (1, 2):
        odd = (*sizes[:i], largest - 256, *sizes[i + 1 :])
        assert f"arena host_gradients: slot {i}" in error_of(with_sizes(plan, "host_gradients", odd))
    # A larger ring has a slot of the head's number, which is a layer's all the same.
    larger = (sizes[0], *(largest,) * 3, sizes[-1], sizes[-1])
    assert sizes[-1] < largest
    assert "arena host_gradients: slot 4" in error_of(with_sizes(plan, "host_gradients", larger))


# --- outputs that are computed again ------------------------------------------------------------------------------------------


def test_outputs_between_two_that_stay_share_slots() -> None:
    """Five layers, a stride of three, groups of two: blocks 0, 3 and 5 have two slots each, 1 and 4 share two, 2 has the last."""
    plan = small(**STRIDED)
    slots = {op.name: op["y"].index for op in plan.ops if op.kind is Kind.FORWARD}
    assert [slots[f"forward gpu b{b} m1"] for b in range(6)] == [1, 7, 9, 3, 7, 5]
    assert {op.block for op in plan.ops if op.kind is Kind.RECOMPUTE} == {1, 2, 4}
    for kind in ("forward", "recompute"):
        for other in (5, 6, 8, 9):
            name = f"{kind} gpu b4 m1"
            assert "y=activations[7], not" in error_of(with_slots(plan, name, y=Slot("activations", other)))


def test_a_shared_slot_holds_the_largest_of_those_that_share_it() -> None:
    plan = small(**STRIDED)
    n_bytes = (100, 1000, 300, 400, 200, 600, 0)
    blocks = tuple(replace(b, boundary_bytes=n) for b, n in zip(plan.workload.blocks, n_bytes, strict=True))
    plan = replace(plan, workload=replace(plan.workload, blocks=blocks))
    needed = [100, 100, 400, 400, 600, 600, 1000, 1000, 300, 300]  # of blocks 0, 3, 5; of 1 and 4; of 2
    sizes = tuple(-(-n // 256) * 256 for n in needed)
    check(with_sizes(plan, "activations", sizes))
    for i, n in enumerate(needed):
        odd = (*sizes[:i], n - 1, *sizes[i + 1 :])
        assert f"arena activations: slot {i} has {n - 1} bytes, but {n} go" in error_of(with_sizes(plan, "activations", odd))
    assert "arena activations: 11 slots" in error_of(with_sizes(plan, "activations", (*sizes, 1024)))


def test_a_backward_needs_its_input_computed_again() -> None:
    """In the last segment the slots still hold the same values of the forward pass: what is not needed should not be done."""
    plan = small(n_layers=3, boundary_stride=3)
    i, j = index(plan, "recompute gpu b2 m0"), index(plan, "backward gpu b3 m0")
    ops = list(plan.ops)
    ops[i], ops[j] = replace(ops[j], waits=(*ops[i].waits, *ops[j].waits)), ops[i]
    at = {i: j, j: i}
    moved = tuple(replace(op, waits=tuple(replace(w, op=at.get(w.op, w.op)) for w in op.waits if w.op != i)) for op in ops)
    message = error_of(replace(plan, ops=moved))
    assert "holds the output of block 2, micro-batch 0, step 0, not the recomputed output of block 2" in message


def test_segments_are_computed_again_one_after_another() -> None:
    """Block 1 shares its slots with block 4, whose gradient is still there when its backward has not come."""
    plan = small(**STRIDED)
    early = [
        m for w, m in MUTATIONS["swap two ops of a lane"](plan) if ": recompute gpu b1 m0" in w and ": backward gpu b5 m0" in w
    ]
    assert len(early) == 1
    assert error_of(early[0])


def test_a_recompute_is_of_its_own_micro_batch_and_from_its_own_input() -> None:
    plan = small(**STRIDED)
    assert "twice" in error_of(with_op(plan, "recompute gpu b4 m0", **same_as(plan, "recompute gpu b4 m1")))
    message = error_of(with_slots(plan, "recompute gpu b4 m0", x=Slot("activations", 3)))
    assert "must use weights=weights[any] x=activations[2] " in message


def same_as(plan: Plan, name: str) -> dict[str, Any]:
    op = plan.ops[index(plan, name)]
    return {"micro_batch": op.micro_batch, "operands": op.operands}


def test_a_recompute_needs_the_weights_of_its_block() -> None:
    plan = small(n_layers=5, boundary_stride=3)
    load = next(i for i, op in enumerate(plan.ops) if op.name == "load h2d b1" and i > index(plan, "loss gpu b6 m0"))
    other = replace(plan.ops[load], block=2, operands=(("state", Slot("state", 2)), ("weights", plan.ops[load]["weights"])))
    message = error_of(replace(plan, ops=(*plan.ops[:load], other, *plan.ops[load + 1 :])))
    assert "holds the weights of block 2, step 0, not the weights of block 1" in message
    assert "(recompute gpu b1 m0)" in message


def test_an_output_that_stays_is_not_computed_again() -> None:
    plan = small(**STRIDED)
    for block in (0, 3, 5, 6):
        extra = Op(Kind.RECOMPUTE, block, 0)
        assert "the output of the block stays" in error_of(replace(plan, ops=(*plan.ops, extra)))


def test_a_step_computes_every_shared_output_again() -> None:
    plan = small(**STRIDED)
    messages = [error_of(mutant) for _, mutant in MUTATIONS["drop recompute"](plan)]
    assert [
        f"no recompute of block {b}, micro-batch {m}; " in text
        for text, (b, m) in zip(sorted(messages), ((1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)), strict=True)
    ] == [True] * 6
