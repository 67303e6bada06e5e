"""Does the checker hold a plan to the shadows, the chunks and the recomputed outputs of its policy?"""

from dataclasses import replace
from typing import Any

import pytest

from planner.check.check import check
from planner.lower.lower import lower
from runtime.plan import Kind, Op, Place, Plan, Policy, Semantics, Slot, Update
from runtime.plan.workload import Saved, Tier
from tests.edits import error_of, index, small, with_op, with_profile
from tests.mutants import MUTATIONS
from tests.strategies import MODEL, PROFILE, small_workload

STRIDED: dict[str, Any] = {"n_layers": 5, "n_micro_batches": 2, "group_micro_batches": 2, "boundary_stride": 3}
SPECULATING: dict[str, Any] = {"n_micro_batches": 2, "speculate_blocks": (0, 1, 3)}
CUT: dict[str, Any] = {"transfer_chunk_bytes": 1, "speculate_blocks": (2,)}


def under(plan: Plan, **changes: Any) -> Plan:
    """The same ops under another policy."""
    return replace(plan, policy=replace(plan.policy, **changes))


def with_sizes(plan: Plan, name: str, sizes: tuple[int, ...]) -> Plan:
    return replace(plan, arenas=tuple(replace(a, slot_bytes=sizes) if a.name == name else a for a in plan.arenas))


def sizes_of(plan: Plan, name: str) -> tuple[int, ...]:
    return next(a.slot_bytes for a in plan.arenas if a.name == name)


def tiered(*ways: tuple[Saved, bool], **policy: Any) -> Plan:
    """Every layer can recompute in these ways, if not asked for others."""
    tiers = tuple(Tier(saved, stop, 1000, 500, 0, False, 0, 0) for saved, stop in ways)
    workload = small_workload(3, tied=False)
    blocks = tuple(replace(b, tiers=tiers) if 0 < i < 4 else b for i, b in enumerate(workload.blocks))
    semantics = Semantics(seq_len=4, batch_size=2, micro_batch=1)
    return lower(MODEL, replace(workload, blocks=blocks), semantics, Policy(**policy), PROFILE)


# --- which policies are legal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [STRIDED, SPECULATING, CUT, {"speculate_blocks": (1, 2), "storage": "split", "boundary_stride": 3}]
)
def test_a_plan_that_keeps_its_policy_passes(policy: dict[str, Any]) -> None:
    plan = small(**policy)
    check(plan)
    assert {Kind.RECOMPUTE: STRIDED, Kind.SETTLE: SPECULATING}.keys() & {op.kind for op in plan.ops} or policy is CUT


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"update": Update.BARRIER}, "speculate_blocks need deferred updates, not barrier"),
        ({"speculate_blocks": (3, 1, 0)}, "speculate_blocks must name blocks (0 to 4), in order"),
        ({"speculate_blocks": (0, 1, 1)}, "speculate_blocks must name blocks (0 to 4), in order, each once"),
        ({"speculate_blocks": (0, 1, 5)}, "speculate_blocks must name blocks (0 to 4)"),
        ({"speculate_blocks": (2**52,)}, "speculate_blocks must name blocks (0 to 4)"),
        ({"boundary_stride": 4}, "boundary_stride is 4, but there are 3 layers"),
        ({"boundary_stride": 2**52}, "but there are 3 layers"),
        ({"boundary_stride": 2, "keep_blocks": (1,)}, "there can be no keep_blocks"),
        ({"boundary_stride": 2, "spill_blocks": (1,)}, "there can be no spill_blocks"),
        ({"keep_blocks": (2, 1)}, "keep_blocks must name layers (1 to 3), in order"),
        ({"attention_blocks": (0,)}, "attention_blocks must name layers (1 to 3)"),
        ({"attention_blocks": (4,)}, "attention_blocks must name layers (1 to 3)"),
        ({"product_blocks": (1, 1)}, "product_blocks must name layers (1 to 3), in order, each once"),
        ({"attention_blocks": (1,)}, "layer 1 cannot recompute from its attention"),
        ({"product_blocks": (2,)}, "layer 2 cannot recompute from its products"),
        ({"early_stop": True}, "layer 1 cannot recompute from its boundary with early_stop"),
        ({"transfer_chunk_bytes": 2**52}, "only where all micro-batches are in one group"),
    ],
)
def test_a_policy_that_no_plan_can_keep_is_refused(changes: dict[str, Any], what: str) -> None:
    message = error_of(under(small(**SPECULATING), **changes))
    assert message.startswith("policy: ")
    assert what in message


@pytest.mark.parametrize("changes", [{"attention_blocks": (1, 2)}, {"product_blocks": (2,)}, {"keep_blocks": (1,)}])
def test_a_layer_saves_its_activations_in_one_way(changes: dict[str, Any]) -> None:
    """Two ways for layers 1 or 2, of which each alone would do."""
    plan = tiered((Saved.ATTENTION, False), (Saved.PRODUCTS, False), attention_blocks=(2,), product_blocks=(1,))
    check(plan)
    assert "is in two of keep_blocks" in error_of(under(plan, **changes))


def test_a_way_to_recompute_is_asked_of_layers_that_do() -> None:
    """With an early stop, a layer that saves what attention made needs that way, and one that keeps everything needs none."""
    plan = tiered((Saved.ATTENTION, True), early_stop=True, keep_blocks=(1, 3), attention_blocks=(2,))
    check(plan)
    assert "layer 3 cannot recompute from its boundary with early_stop" in error_of(under(plan, keep_blocks=(1,)))
    assert "layer 2 cannot recompute from its attention;" in error_of(under(plan, early_stop=False))


def test_what_a_layer_saves_besides_its_input_is_counted_and_does_not_forbid_that_the_input_spills() -> None:
    """Two layers, 1000 bytes each for both micro-batches of the group."""
    ways = ((Saved.ATTENTION, False), (Saved.PRODUCTS, False))
    saves = {"group_micro_batches": 2, "spill_blocks": (0, 1), "attention_blocks": (1,), "product_blocks": (2,)}
    plan = tiered(*ways, **saves)
    check(plan)
    needed_bytes = plan.device_arena_bytes + 2 * 2 * 1000 + plan.transient_bytes + 1000
    check(with_profile(plan, "device.memory_bytes.value", needed_bytes))
    assert "device memory" in error_of(with_profile(plan, "device.memory_bytes.value", needed_bytes - 1))


@pytest.mark.parametrize("stride", [1, 2])
def test_with_a_stride_nothing_is_saved_besides(stride: int) -> None:
    plan = tiered((Saved.ATTENTION, False), (Saved.PRODUCTS, False), boundary_stride=2)
    for knob in ("attention_blocks", "product_blocks"):
        message = error_of(under(plan, boundary_stride=stride, **{knob: (1,)}))
        assert (f"there can be no {knob}" in message) == (stride > 1)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (small(**STRIDED), {"boundary_stride": 1}),
        (small(**STRIDED), {"boundary_stride": 2}),
        (small(**STRIDED), {"boundary_stride": 5}),
        (small(**SPECULATING), {"speculate_blocks": ()}),
        (small(**SPECULATING), {"speculate_blocks": (0, 1, 2, 3)}),
        (small(**CUT), {"transfer_chunk_bytes": None}),
        (small(**CUT), {"transfer_chunk_bytes": 2**52}),
        (small(), {"transfer_chunk_bytes": 1}),
    ],
)
def test_a_policy_that_the_plan_does_not_keep_is_refused(plan: Plan, changes: dict[str, Any]) -> None:
    assert error_of(under(plan, **changes))


def test_chunks_that_hold_whole_layers_are_no_chunks() -> None:
    check(under(small(), transfer_chunk_bytes=2**52))


# --- shadows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "master", "storage", "bytes_per_element"),
    [
        ("bf16", "fp32", "mirrored", 2 + 4 + 8),
        ("bf16", "fp32", "split", 2 + 2 + 8),
        ("bf16", "bf16", "mirrored", 2 + 8),
        ("fp32", "fp32", "mirrored", 4 + 8),
    ],
)
def test_a_shadow_has_exactly_the_size_of_what_it_stands_for(
    compute: Any, master: Any, storage: Any, bytes_per_element: int
) -> None:
    semantics = Semantics(4, 1, 1, compute_dtype=compute, master_dtype=master)
    policy = Policy(update=Update.DEFERRED, storage=storage, speculate_blocks=(0, 2, 4))
    plan = lower(MODEL, small_workload(3, tied=True), semantics, policy, PROFILE)
    sizes = tuple(plan.workload.blocks[b].host_elements * bytes_per_element for b in (0, 2, 4))
    assert len(set(sizes)) == 3
    check(with_sizes(plan, "shadows", sizes))
    for i in range(3):
        for wrong in (-256, 256):
            odd = (*sizes[:i], sizes[i] + wrong, *sizes[i + 1 :])
            assert f"arena shadows: slot {i}" in error_of(with_sizes(plan, "shadows", odd))


def test_shadows_lie_on_the_host_and_only_where_a_block_speculates() -> None:
    plan = small(**SPECULATING)
    moved = tuple(replace(a, place=Place.DEVICE) if a.name == "shadows" else a for a in plan.arenas)
    assert "arena shadows: lies in device memory" in error_of(replace(plan, arenas=moved))
    spare = next(a for a in plan.arenas if a.name == "shadows")
    assert "arena shadows: not one" in error_of(replace(small(), arenas=(*small().arenas, spare)))


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
    assert "in step 0 shadows[0] holds nothing, not the shadow of block 2, step 0" in error_of(late)


@pytest.mark.parametrize("name", ["speculate cpu b1", "settle cpu b1"])
@pytest.mark.parametrize("field", ["reads", "writes"])
def test_what_either_outcome_touches_is_declared(name: str, field: str) -> None:
    plan = small(**SPECULATING)
    slots = getattr(plan.ops[index(plan, name)], field)
    for slot in slots:
        left = tuple(s for s in slots if s != slot)
        assert f"must {field[:-1]} " in error_of(with_op(plan, name, **{field: left}))


def test_a_settled_block_may_not_be_loaded_before() -> None:
    plan = small(**SPECULATING)
    waits = tuple(w for w in plan.ops[index(plan, "load h2d b1")].waits if w.distance == 0)
    message = error_of(with_op(plan, "load h2d b1", waits=waits))
    assert "host_weights[1]" in message
    assert "settle cpu b1" in message


def test_a_block_is_updated_or_settled_and_not_both() -> None:
    plan = small(speculate_blocks=(2,))
    update, settle = plan.ops[index(plan, "update cpu b1")], plan.ops[index(plan, "settle cpu b2")]
    assert "updated by speculate and settle" in error_of(replace(plan, ops=(*plan.ops, replace(update, block=2))))
    assert "has no shadow" in error_of(replace(plan, ops=(*plan.ops, replace(settle, block=1))))


# --- chunks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["masters", "moments", "host_weights", "host_gradients", "shadows"])
def test_each_chunk_has_a_slot_of_exactly_its_size(name: str) -> None:
    """A layer of 8 x 100 weights and 8 more, each chunk padded to 128."""
    plan = small(transfer_chunk_bytes=1, speculate_blocks=(1, 2, 3))
    sizes = sizes_of(plan, name)
    item_bytes = {"masters": 4, "moments": 8, "host_weights": 2, "host_gradients": 2, "shadows": 14}[name]
    first = 0 if name == "shadows" else 1
    assert sizes[first : first + 2] == (896 * item_bytes, 128 * item_bytes)
    for other in ((sizes[0], sizes[2], sizes[1], *sizes[3:]), (sizes[0] + sizes[1], *sizes[2:])):
        assert f"arena {name}: " in error_of(with_sizes(plan, name, other))


@pytest.mark.parametrize(("chunk_bytes", "n_chunks"), [(1, 2), (2 * 1024 - 1, 2), (2 * 1024, 1)])
def test_a_chunk_holds_as_many_weights_as_fit(chunk_bytes: int, n_chunks: int) -> None:
    plan = small(n_layers=1, transfer_chunk_bytes=chunk_bytes)
    check(plan)
    assert sum(op.kind is Kind.UPDATE for op in plan.ops) == 2 + n_chunks
    check(under(plan, transfer_chunk_bytes=1 if n_chunks == 2 else 10**6))
    assert error_of(under(plan, transfer_chunk_bytes=10**6 if n_chunks == 2 else 1))


def test_in_the_ring_of_eager_updates_every_slot_holds_the_largest_chunk() -> None:
    plan = small(transfer_chunk_bytes=1, update=Update.EAGER)
    sizes = sizes_of(plan, "host_gradients")
    largest = 1664 * 2  # of the third layer: 8 x 200 weights, padded
    assert sizes[1:-1] == (largest,) * (len(sizes) - 2)
    for i in range(1, len(sizes) - 1):
        odd = (*sizes[:i], largest - 256, *sizes[i + 1 :])
        assert f"arena host_gradients: slot {i}" in error_of(with_sizes(plan, "host_gradients", odd))


def test_chunks_come_in_ascending_order_and_each_of_them() -> None:
    plan = small(**CUT)
    for what, mutant in MUTATIONS["swap two chunks"](plan):
        assert "chunk 0 of 2 is next" in error_of(mutant), what
    for what, mutant in MUTATIONS["drop a chunk"](plan):
        message = error_of(mutant)
        assert "is next" in message or "the step has no" in message, what


def test_an_op_names_a_chunk_where_its_block_is_cut_and_nowhere_else() -> None:
    plan = small(**CUT)
    assert "must name a chunk: the block has 2" in error_of(with_op(plan, "load h2d b1 c0", chunk=None))
    assert "chunk 0 of 2 is next" in error_of(with_op(plan, "load h2d b1 c0", chunk=2))
    for name in ("load h2d b0", "forward gpu b1 m0", "norm cpu b4", "backward gpu b2 m0"):
        assert "names a chunk of what is not cut" in error_of(with_op(plan, name, chunk=0))


def test_a_block_is_computed_when_its_last_chunk_is_there() -> None:
    plan = small(**CUT)
    i, last = index(plan, "forward gpu b1 m0"), index(plan, "load h2d b1 c1")
    assert any(w.op == last for w in plan.ops[i].waits)
    waits = tuple(replace(w, op=last - 1) if w.op == last else w for w in plan.ops[i].waits)
    assert "race for weights[0]" in error_of(with_op(plan, "forward gpu b1 m0", waits=waits))


def test_the_chunks_of_a_block_go_to_one_slot() -> None:
    plan = small(**CUT)
    message = error_of(with_op(plan, "load h2d b1 c1", writes=(Slot("weights", 1),)))
    assert "weights[1] holds nothing, not the weights so far of block 1, chunk 0, step 0" in message


def test_a_load_that_is_done_again_is_done_again_to_the_last_chunk() -> None:
    plan = small(transfer_chunk_bytes=1)
    again = [i for i, op in enumerate(plan.ops) if op.name == "load h2d b1 c0"]
    assert len(again) == 2
    more = replace(plan, ops=(*plan.ops, replace(plan.ops[again[0]], waits=())))
    assert "the step has no load of block 1, chunk 1 after the others of its block" in error_of(more)


def test_a_weight_that_stays_is_loaded_once_in_chunks() -> None:
    plan = small(transfer_chunk_bytes=1, resident_blocks=(2,))
    check(plan)
    twice = [replace(plan.ops[index(plan, f"load h2d b2 c{c}")], waits=()) for c in (0, 1)]
    assert "twice" in error_of(replace(plan, ops=(*plan.ops, *twice)))


def test_a_claim_counts_each_chunk_once() -> None:
    plan = small(transfer_chunk_bytes=1)
    whole = small()
    for of in (plan, whole):
        of = with_profile(of, "link.d2h.bytes_per_s", [{"n_bytes": 1, "rate": {"value": 1000.0}}])
        n_bytes = 2 * sum(p.n_elements for b in of.workload.blocks for p in b.parameters)
        peaks = {"device_peak_bytes": of.device_arena_bytes + of.kept_bytes + of.transient_bytes + 1000}
        prediction = peaks | {"host_peak_bytes": of.host_arena_bytes + 1000, "step_s": n_bytes / 1000}
        check(of, {"prediction": prediction, "certificate": {"machine_bound_s": 0.1}})
        prediction["step_s"] = n_bytes / 1000 * 0.999
        assert "offload and spill" in error_of(of, {"prediction": prediction, "certificate": {"machine_bound_s": 0.1}})


# --- outputs that are computed again ------------------------------------------------------------------------------------------


def test_outputs_between_two_that_stay_share_slots() -> None:
    """Five layers, a stride of three, groups of two: blocks 0, 3 and 5 have two slots each, 1 and 4 share two, 2 has the last."""
    plan = small(**STRIDED)
    slots = {op.name: op.writes[0].index for op in plan.ops if op.kind is Kind.FORWARD}
    assert [slots[f"forward gpu b{b} m1"] for b in range(6)] == [1, 7, 9, 3, 7, 5]
    assert {op.block for op in plan.ops if op.kind is Kind.RECOMPUTE} == {1, 2, 4}
    for kind in ("forward", "recompute"):
        for other in (5, 6, 8, 9):
            name = f"{kind} gpu b4 m1"
            assert f"must write boundaries[7], not boundaries[{other}]" in error_of(
                with_op(plan, name, writes=(Slot("boundaries", other),))
            )


def test_a_shared_slot_holds_the_largest_of_those_that_share_it() -> None:
    plan = small(**STRIDED)
    n_bytes = (100, 1000, 300, 400, 200, 600, 0)
    blocks = tuple(replace(b, boundary_bytes=n) for b, n in zip(plan.workload.blocks, n_bytes, strict=True))
    plan = replace(plan, workload=replace(plan.workload, blocks=blocks))
    needed = [100, 100, 400, 400, 600, 600, 1000, 1000, 300, 300]  # of blocks 0, 3, 5; of 1 and 4; of 2
    sizes = tuple(-(-n // 256) * 256 for n in needed)
    check(with_sizes(plan, "boundaries", sizes))
    for i, n in enumerate(needed):
        odd = (*sizes[:i], n - 1, *sizes[i + 1 :])
        assert f"arena boundaries: slot {i} has {n - 1} bytes, but {n} go" in error_of(with_sizes(plan, "boundaries", odd))
    assert "arena boundaries: 11 slots" in error_of(with_sizes(plan, "boundaries", (*sizes, 1024)))


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
    reads = (plan.ops[index(plan, "recompute gpu b4 m0")].reads[0], Slot("boundaries", 3))
    assert "must read weights[any] boundaries[2]" in error_of(with_op(plan, "recompute gpu b4 m0", reads=reads))


def same_as(plan: Plan, name: str) -> dict[str, Any]:
    op = plan.ops[index(plan, name)]
    return {"micro_batch": op.micro_batch, "reads": op.reads, "writes": op.writes}


def test_a_recompute_needs_the_weights_of_its_block() -> None:
    plan = small(n_layers=5, boundary_stride=3)
    load = next(i for i, op in enumerate(plan.ops) if op.name == "load h2d b1" and i > index(plan, "loss gpu b6 m0"))
    message = error_of(
        replace(
            plan, ops=(*plan.ops[:load], replace(plan.ops[load], block=2, reads=(Slot("host_weights", 2),)), *plan.ops[load + 1 :])
        )
    )
    assert "holds the weights of block 2, step 0, not the weights of block 1" in message
    assert "(recompute gpu b1 m0)" in message


def test_an_output_that_stays_is_not_computed_again() -> None:
    plan = small(**STRIDED)
    for block in (0, 3, 5, 6):
        extra = Op(Kind.RECOMPUTE, plan.ops[1].lane, block, 0)
        assert "the output of the block stays" in error_of(replace(plan, ops=(*plan.ops, extra)))


def test_a_step_computes_every_shared_output_again() -> None:
    plan = small(**STRIDED)
    messages = [error_of(mutant) for _, mutant in MUTATIONS["drop a recompute"](plan)]
    assert [
        f"no recompute of block {b}, micro-batch {m}; " in text
        for text, (b, m) in zip(sorted(messages), ((1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)), strict=True)
    ] == [True] * 6
