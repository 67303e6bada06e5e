"""Does the checker hold a plan to what is frozen, what comes packed and what is trained apart?"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check.check import check
from planner.check.dataflow import _Memory
from planner.check.shape import Shape
from planner.lower.lower import lower, lower_folded
from planner.lower.waits import with_waits
from runtime.errors import PlanError
from runtime.plan import Kind, Op, Plan, Policy, Semantics, Slot, Update, Wait, saves
from runtime.plan.packed import packed_bytes
from runtime.plan.repetition import unrolled as unrolled_plan
from runtime.plan.train import Lora, Train
from runtime.plan.workload import Parameter
from tests.edits import error_of, index, small, with_op, with_slots
from tests.mutants import MUTATIONS
from tests.oracle import race, unrolled
from tests.strategies import MODEL, PROFILE, Case, cases, small_workload

LORA, NORMS, SECOND = Train(lora=Lora(rank=8)), Train(names=("*norm.weight",)), Train(layers=(1, 1))
APART: dict[str, Any] = {"train": LORA, "gradient_dtype": "fp32", "device_blocks": (1, 2, 3), "square_blocks": (1, 2, 3)}
PACKED: dict[str, Any] = APART | {"base": "int8"}
law = settings(deadline=None)


def kinds_of(plan: Plan) -> Counter[Kind]:
    return Counter(op.kind for op in plan.ops)


def sizes_of(plan: Plan, name: str) -> tuple[int, ...]:
    return next(a.slot_bytes for a in plan.arenas if a.name == name)


def with_sizes(plan: Plan, name: str, sizes: tuple[int, ...]) -> Plan:
    return replace(plan, arenas=tuple(replace(a, slot_bytes=sizes) if a.name == name else a for a in plan.arenas))


def with_parameter(plan: Plan, block: int, name: str, *instead: Parameter) -> Plan:
    """The plan in which other weights, or none, stand where that one of the block does."""
    blocks = plan.workload.blocks
    parameters = tuple(q for p in blocks[block].parameters for q in (instead if p.name.endswith(name) else (p,)))
    changed = replace(blocks[block], parameters=parameters)
    return replace(plan, workload=replace(plan.workload, blocks=(*blocks[:block], changed, *blocks[block + 1 :])))


def parameter(plan: Plan, block: int, name: str) -> Parameter:
    return next(p for p in plan.workload.blocks[block].parameters if p.name.endswith(name))


def moved(plan: Plan, name: str, before: str) -> Plan:
    """The last op of that name before another one, all with the waits that slots ask for in that order: no race, other data."""
    ops = list(plan.ops)
    op = ops.pop(max(i for i, op in enumerate(ops) if op.name == name))
    ops.insert(next(i for i, other in enumerate(ops) if other.name == before), op)
    return replace(plan, ops=with_waits(ops, {}))


# --- which ops there are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{}, {"n_micro_batches": 2}, {"n_micro_batches": 2, "accumulation_group": 2}])
def test_a_plan_of_adapters_passes_on_either_side_and_moves_what_is_trained_alone(policy: dict[str, Any]) -> None:
    for where in ({"train": LORA}, APART, PACKED):
        plan = small(**where, **policy)
        check(plan)
        kinds, n = kinds_of(plan), policy.get("n_micro_batches", 1)
        assert kinds[Kind.BACKWARD] == 3 * n  # none of the embedding
        apart = where is not APART and where is not PACKED
        assert (kinds[Kind.UPDATE], kinds[Kind.NORM], kinds[Kind.UPDATE_ON_DEVICE]) == ((3, 3, 0) if apart else (0, 1, 3))
        assert bool(kinds[Kind.OFFLOAD_GRADIENT]) is apart
        assert bool(kinds[Kind.DEQUANTISE]) is (where is PACKED)


def test_no_backward_goes_below_what_is_trained() -> None:
    plan = small(train=SECOND)
    check(plan)
    assert {op.block for op in plan.ops if op.kind is Kind.BACKWARD} == {2, 3}
    upper = plan.ops[index(plan, "backward gpu b2 m0")]
    below = replace(upper, block=1)
    message = error_of(replace(plan, ops=(*plan.ops, below)))
    assert "no backward comes below block 2, the first of which anything is trained" in message
    assert "the step has no backward of block 3" in error_of(without(plan, "backward gpu b3 m0"))


def without(plan: Plan, name: str) -> Plan:
    """The plan without that op; what waited for it waits for no other instead."""
    i = index(plan, name)
    ops = [
        replace(op, waits=tuple(replace(w, op=w.op - (w.op > i)) for w in op.waits if w.op != i))
        for j, op in enumerate(plan.ops)
        if j != i
    ]
    return replace(plan, ops=tuple(ops))


def test_outputs_below_what_is_trained_are_not_computed_again() -> None:
    """Runs of two layers: of (1, 2) the first has nothing that is trained, and the second has; of (3, 4) both are passed."""
    for first, again in ((1, {1, 3}), (2, {3})):
        plan = small(n_layers=5, train=Train(layers=(first, 4)), boundary_stride=2)
        check(plan)
        assert {op.block for op in plan.ops if op.kind is Kind.RECOMPUTE} == again
    recompute = Op(Kind.RECOMPUTE, 1, 0, plan.ops[index(plan, "forward gpu b1 m0")].operands)
    assert "recomputed by its backward" in error_of(replace(plan, ops=(*plan.ops, recompute)))


@pytest.mark.parametrize("kind", [Kind.NORM, Kind.UPDATE, Kind.OFFLOAD_GRADIENT])
def test_nothing_is_done_to_what_is_frozen(kind: Kind) -> None:
    plan = small(train=SECOND)
    op = next(op for op in plan.ops if op.kind is kind)
    assert "nothing of the block is trained" in error_of(replace(plan, ops=(*plan.ops, replace(op, block=3))))
    message = error_of(with_slots(plan, "backward gpu b2 m0", gradient=None))
    assert "gradient=gradients[0], not" in message
    last = plan.ops[index(plan, "backward gpu b3 m0")]
    added = replace(last, operands=(*last.operands, ("gradient", Slot("gradients", 0))))
    assert "must use" in error_of(with_op(plan, last.name, operands=added.operands))


def test_the_norm_of_the_first_block_that_is_trained_ends_the_sum() -> None:
    plan = small(**APART)
    assert [op.name for op in plan.ops if op.kind is Kind.NORM] == ["norm cpu b1"]
    ops = plan.ops[index(plan, "norm cpu b1")]
    assert ops.every("squares") == tuple(Slot("norm", i) for i in (1, 2, 3))
    fewer = tuple((name, slot) for name, slot in ops.operands if slot.index != 2)
    assert "squares=norm[2]" in error_of(with_op(plan, "norm cpu b1", operands=fewer))
    assert "the squares of the block's gradient are summed on the device" in error_of(
        replace(plan, ops=(*plan.ops, replace(ops, block=2)))
    )
    mixed = small(train=NORMS, update=Update.DEFERRED)
    assert [op.block for op in mixed.ops if op.kind is Kind.NORM] == [4, 3, 2, 1]
    check(mixed)


def test_a_tied_weight_is_frozen_as_its_owner_is_and_loaded_from_it_all_the_same() -> None:
    """Of a frozen one there is one gradient less, and no block waits for the other's."""
    plan = small(tied=True, **PACKED)
    check(plan)
    assert plan.ops[index(plan, "load h2d b4")]["tied"] == Slot("state", 0)
    assert not any(op.kind in (Kind.NORM, Kind.UPDATE) and op.get("tied") for op in plan.ops)
    assert "must use state=state[4] tied=state[0] " in error_of(with_slots(plan, "load h2d b4", tied=None))
    head = parameter(plan, 4, "lm_head.weight")
    assert "not what the semantics train" in error_of(with_parameter(plan, 4, "lm_head.weight", replace(head, frozen=False)))
    both = small(tied=True, train=Train(names=("embed.weight",)))
    check(both)
    assert both.ops[index(both, "update cpu b0")]["tied"] == Slot("host_gradients", 4)


def test_a_gradient_leaves_late_where_no_embedding_is_trained() -> None:
    """The last ones have no backward below them to follow."""
    plan = small(n_layers=5, train=Train(layers=(1, 4)), gradient_slots=3, offload_late_blocks=2, prefetch_depth=3)
    check(plan)
    late = plan.ops[index(plan, "offload_gradient d2h b5")]
    i = index(plan, "backward gpu b4 m0")
    early = replace(late, waits=tuple(replace(w, op=i) if plan.ops[w.op].kind is Kind.BACKWARD else w for w in late.waits))
    assert "leaves before op" in error_of(with_op(plan, late.name, waits=early.waits))


# --- what comes packed ------------------------------------------------------------------------------------------------------


def test_a_layer_that_comes_packed_waits_so_and_is_unpacked_where_it_is_used() -> None:
    plan = small(**PACKED, prefetch_depth=2)
    assert len(sizes_of(plan, "packed")) == 3
    assert len(sizes_of(plan, "weights")) == 2  # one for layers, one for the embedding or the head
    walk = [(str(op.kind), op.block) for op in plan.ops if op.kind in (Kind.DEQUANTISE, Kind.FORWARD, Kind.BACKWARD)]
    assert walk == [
        ("forward", 0),
        ("dequantise", 1), ("forward", 1), ("dequantise", 2), ("forward", 2), ("dequantise", 3), ("forward", 3),
        ("backward", 3), ("dequantise", 2), ("backward", 2), ("dequantise", 1), ("backward", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_slot_of_weights_that_is_filled_again_before_it_was_used_is_refused(kind: str) -> None:
    """In backward the loss is none the worse for it. The order is a legal one, without a race: the weights are another block's."""
    plan = small(**PACKED)
    b, follower = (2, 3) if kind == "forward" else (3, 2)
    if kind == "forward":
        plan = moved(plan, f"load h2d b{follower}", f"{kind} gpu b{b} m0")
        check(plan)  # there are two slots of what is packed
    wrong = moved(plan, f"dequantise gpu b{follower}", f"{kind} gpu b{b} m0")
    assert race(wrong, unrolled(wrong)) is None
    message = error_of(wrong)
    assert f"({kind} gpu b{b} m0)" in message
    assert f"weights[0] holds the weights of block {follower}, step 0, not the weights of block {b}, step 0" in message


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_packed_slot_that_is_filled_again_before_it_was_unpacked_is_refused(micro_batches: int) -> None:
    """Every load that takes the slot of another block, forward or backward, ahead of what unpacks that one."""
    plan = small(n_layers=4, n_micro_batches=micro_batches, train=LORA, base="int8")
    n_tried = 0
    for i, op in enumerate(plan.ops):
        if op.kind is Kind.LOAD and op["weights"].arena == "packed":
            users = [j for j in range(i) if plan.ops[j].kind is Kind.DEQUANTISE and plan.ops[j]["packed"] == op["weights"]]
            if users:
                ops = list(plan.ops)
                ops.insert(users[-1], ops.pop(i))
                wrong = replace(plan, ops=with_waits(ops, {}))
                assert race(wrong, unrolled(wrong)) is None
                of = plan.ops[users[-1]].block
                assert f"holds the packed weights of block {op.block}, step 0, not the packed weights of block {of}, step 0" in (
                    error_of(wrong)
                )
                n_tried += 1
    assert n_tried == {1: 4, 2: 8}[micro_batches]


def test_every_refill_that_comes_too_early_is_refused_whatever_waits_for_it() -> None:
    for plan in (small(**PACKED), small(n_micro_batches=2, **PACKED, resident_blocks=(2,)), small(train=NORMS)):
        mutants = list(MUTATIONS["fill a slot again too early"](plan))
        assert mutants
        for _, mutant in mutants:
            error_of(mutant)


def test_packed_weights_are_not_computed_with_nor_unpacked_twice_from_what_is_unpacked() -> None:
    plan = small(**PACKED)
    assert "must use packed=packed[any] weights=weights[0]" in error_of(
        with_slots(plan, "dequantise gpu b2", packed=Slot("weights", 0))
    )
    assert "weights=packed[any], not" in error_of(with_slots(plan, "load h2d b2", weights=Slot("weights", 0)))
    assert "weights=weights[0]" in error_of(with_slots(plan, "forward gpu b2 m0", weights=Slot("packed", 0)))
    embedding = Op(Kind.DEQUANTISE, 0, None, (("packed", Slot("packed", 0)), ("weights", Slot("weights", 1))))
    assert "no weight of the block is packed" in error_of(replace(plan, ops=(*plan.ops, embedding)))
    with_micro_batch = replace(plan.ops[index(plan, "dequantise gpu b2")], micro_batch=0)
    assert "no such op" in error_of(replace(plan, ops=(*plan.ops, with_micro_batch)))
    assert "weights[0] holds the weights of block 1" in error_of(without(plan, "dequantise gpu b2"))


def test_a_resident_layer_is_unpacked_once_a_step() -> None:
    plan = small(n_micro_batches=2, **PACKED, resident_blocks=(0, 2, 4))
    check(plan)
    assert [sum(op.kind is Kind.DEQUANTISE and op.block == b for op in plan.ops) for b in (1, 2, 3)] == [3, 1, 2]
    again = replace(plan.ops[index(plan, "dequantise gpu b2")], waits=())
    assert "done twice" in error_of(replace(plan, ops=(*plan.ops, again)))
    assert "the step has no dequantise of block 2" in error_of(without(plan, "dequantise gpu b2"))


def test_layers_of_which_no_weight_can_be_packed_come_as_they_are() -> None:
    """nf4 packs whole blocks of 64 numbers: of three layers of 8 x 100, 8 x 150 and 8 x 200 numbers the last alone."""
    plan = small(**APART | {"base": "nf4"})
    check(plan)
    assert {op.block for op in plan.ops if op.kind is Kind.DEQUANTISE} == {3}
    assert plan.ops[index(plan, "load h2d b1")]["weights"] == Slot("weights", 0)


@pytest.mark.parametrize("train", [Train(names=("norm.weight",)), Train(layers=(4, 4)), Train(names=("*.0.norm.weight",)), LORA])
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
def test_a_long_step_is_said_once_whatever_part_is_trained(train: Train, base: Any) -> None:
    """Layers that no backward comes to are used in circles: by Belady's algorithm other ones are there after each group."""
    semantics, policy = Semantics(4, 40, 1, train=train, base=base, gradient_dtype="fp32"), Policy(prefetch_depth=2)
    plan = lower_folded(MODEL, small_workload(5, False, train=train), semantics, policy, PROFILE)
    assert plan is not None
    check(plan)
    check(unrolled_plan(plan))


# --- sizes --------------------------------------------------------------------------------------------------------------------


def test_slots_have_the_size_of_what_is_trained_and_of_what_is_uploaded() -> None:
    """Rank 8 beside 8 x 100 (or 150, 200) numbers: A of 8 x 100, B of 8 x 8, each padded to whole units of 128; the norm has 8."""
    trained = [896 + 128, 1280 + 128, 1664 + 128]  # of 800, 1200 and 1600, and 64 each
    norm, packed = 256, [packed_bytes((8, n), "int8") for n in (100, 150, 200)]
    assert packed == [1024 + 256, 1280 + 256, 1792 + 256]
    frozen = [n + norm for n in packed]
    plan = small(**PACKED)
    vocabulary = (40 * 8 + 64) * 2, (128 + 40 * 8 + 64) * 2  # embedding; norm and head: nothing of them is trained
    assert sizes_of(plan, "device_state") == tuple(12 * n for n in trained)
    assert sizes_of(plan, "state") == (vocabulary[0], *frozen, vocabulary[1])
    assert sizes_of(plan, "packed") == (2 * trained[2] + frozen[2],) * 2
    assert sizes_of(plan, "gradients") == (0, 0, *(4 * n for n in trained))
    assert sizes_of(plan, "host_gradients") == (0,) * 5
    assert sizes_of(plan, "norm") == (256,) * 4
    on_host = small(train=LORA, base="int8")
    assert sizes_of(on_host, "state") == (
        vocabulary[0], *(12 * n + f for n, f in zip(trained, frozen, strict=True)), vocabulary[1],
    )  # fmt: skip
    assert sizes_of(on_host, "host_gradients") == (0, *(2 * n for n in trained), 0)
    for name in ("device_state", "state", "host_gradients"):
        for case in (plan, on_host):
            sizes = next((a.slot_bytes for a in case.arenas if a.name == name), ())
            for i in range(len(sizes)):
                for wrong in (-256, 256):
                    odd = (*sizes[:i], max(sizes[i] + wrong, 0), *sizes[i + 1 :])
                    if odd != sizes:
                        assert f"arena {name}: slot {i}" in error_of(with_sizes(case, name, odd))
    for name in ("packed", "gradients"):
        sizes = sizes_of(plan, name)
        odd = (*sizes[:-1], sizes[-1] - 256)
        assert f"arena {name}: slot {len(sizes) - 1}" in error_of(with_sizes(plan, name, odd))


def test_as_many_slots_wait_packed_as_would_wait_unpacked() -> None:
    plan = small(**PACKED, prefetch_depth=2)
    sizes = sizes_of(plan, "packed")
    for odd in (sizes[:-1], (*sizes, sizes[-1])):
        assert f"arena packed: {len(odd)} slots, where policy and model ask for 3" in error_of(with_sizes(plan, "packed", odd))
    none = replace(plan, arenas=tuple(a for a in plan.arenas if a.name != "packed"))
    assert "arena packed: missing" in error_of(none)
    plain = small(**APART)
    assert "not one this plan has a use for" in error_of(replace(plain, arenas=(*plain.arenas, plan.arenas[1])))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_claim_faster_than_the_link_counts_what_is_uploaded_as_it_is(dtype: Any) -> None:
    """Each layer once, and the first again: packed, with the norm that is not; what is trained is there."""
    semantics = replace(small(**PACKED).semantics, compute_dtype=dtype)
    plan = lower(small().model, small(**PACKED).workload, semantics, small(**PACKED).policy, PROFILE)
    link = {**plan.profile["link"], "h2d": {**plan.profile["link"]["h2d"], "bytes_per_s": [{"rate": {"value": 1000.0}}]}}
    plan = replace(plan, profile={**plan.profile, "link": link})
    item = {"bf16": 2, "fp32": 4}[dtype]
    layers = [packed_bytes((8, n), "int8") + 8 * item for n in (100, 150, 200)]
    least_s = (sum(layers) + layers[0] + (320 + 328) * item) / 1000
    device_bytes = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes + 1000
    peaks = {"device_peak_bytes": device_bytes, "host_peak_bytes": plan.host_arena_bytes + 1000}

    def claim(step_s: float) -> dict[str, Any]:
        return {"prediction": {"step_s": step_s, **peaks}, "certificate": {"machine_bound_s": 0.001}}

    check(plan, claim(least_s))
    assert "ops alone take" in error_of(plan, claim(least_s * 0.999))


# --- what is trained apart ----------------------------------------------------------------------------------------------------


def test_whatever_computes_with_a_block_reads_what_is_trained_of_it_where_it_is() -> None:
    plan = small(n_layers=3, **APART, boundary_stride=2)
    check(plan)
    for name in ("forward gpu b1 m0", "recompute gpu b1 m0", "backward gpu b2 m0"):
        assert "trained=device_state[" in error_of(with_slots(plan, name, trained=None)).partition(", not ")[0]
        assert "trained=device_state[" in error_of(with_slots(plan, name, trained=Slot("device_state", 2))).partition(", not ")[0]
    assert "must use state=state[2] " in error_of(with_slots(plan, "load h2d b2", state=Slot("device_state", 1)))
    on_host = small(train=LORA)
    op = on_host.ops[index(on_host, "forward gpu b2 m0")]
    operands = (op.operands[0], ("trained", Slot("state", 2)), *op.operands[1:])
    assert "must use" in error_of(with_op(on_host, op.name, operands=operands))


def test_the_head_reads_its_own_too() -> None:
    blocks = (1, 2, 3, 4)
    plan = small(train=NORMS, gradient_dtype="fp32", device_blocks=blocks, square_blocks=blocks, update=Update.BARRIER)
    check(plan)
    loss = plan.ops[index(plan, "loss gpu b4 m0")]
    assert (loss["trained"], loss["sum"], loss.get("gradient")) == (Slot("device_state", 3), Slot("gradients", 5), None)
    assert "trained=device_state[3] " in error_of(with_slots(plan, loss.name, trained=None)).partition(", not ")[0]


def test_adapters_are_those_of_their_step() -> None:
    """Updated before the last use, a later op of the same step would find the next step's."""
    plan = small(**APART)
    for use in ("forward", "backward"):
        ops = list(plan.ops)
        update = ops.pop(index(plan, "update_on_device gpu b2"))
        ops.insert(index(plan, f"{use} gpu b2 m0"), update)
        message = error_of(replace(plan, ops=with_waits(ops, {})))
        assert "update_on_device gpu b2" in message  # it comes before its gradient, and before the norm
    for _, mutant in MUTATIONS["update too early what is trained apart"](small(n_micro_batches=2, **APART)):
        error_of(mutant)


def test_adapters_of_another_step_are_told_by_what_the_slot_holds() -> None:
    plan = small(**APART)
    for name in ("forward gpu b2 m0", "backward gpu b2 m0"):
        memory, slot = _Memory(plan, Shape.of(plan)), Slot("device_state", 1)
        at = index(plan, name)
        for i in range(at):
            memory.perform(i, 0)
        memory.held[slot] = memory.held[slot]._replace(step=1)
        with pytest.raises(PlanError, match="holds the state of block 2, step 1, not the state of block 2, step 0"):
            memory.perform(at, 0)


def test_the_update_waits_for_the_norm_and_the_next_forward_for_the_update() -> None:
    plan = small(**APART)
    first = next(op for op in plan.ops if op.kind is Kind.UPDATE_ON_DEVICE)
    without_norm = tuple(w for w in first.waits if plan.ops[w.op].kind is not Kind.NORM)
    assert "norm[0]" in error_of(with_op(plan, first.name, waits=without_norm))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_gradient_that_stays_is_the_sum_of_all_micro_batches_whatever_the_groups(group: int) -> None:
    plan = small(n_micro_batches=4, accumulation_group=group, **APART)
    check(plan)
    assert not kinds_of(plan)[Kind.ACCUMULATE]
    own = Slot("gradients", 3)
    assert {op["sum"] for op in plan.ops if op.kind is Kind.BACKWARD and op.block == 2} == {own}
    assert plan.ops[index(plan, "square gpu b2")]["gradient"] == own
    # The square before the last micro-batch is in the sum:
    ops = list(plan.ops)
    square = ops.pop(index(plan, "square gpu b2"))
    ops.insert(index(plan, "backward gpu b2 m3"), square)
    message = error_of(replace(plan, ops=with_waits(ops, {})))
    assert "holds the gradient sum from micro-batch 0 on of block 2, micro-batch 2, step 0, not the gradient of block 2" in message
    for kind, what in ((Kind.OFFLOAD_GRADIENT, "gradient stays"), (Kind.ACCUMULATE, "gradient stays")):
        if group < 4:
            of_host = small(n_micro_batches=4, accumulation_group=group, train=LORA, gradient_dtype="fp32")
            extra = next(op for op in of_host.ops if op.kind is kind and op.block == 2)
            assert what in error_of(replace(plan, ops=(*plan.ops, replace(extra, waits=()))))


def test_under_barrier_the_next_step_waits_for_updates_on_either_side() -> None:
    """Of blocks that are trained whole and of others that are trained in part."""
    train = Train(names=("*.0.*", "*.norm.weight", "norm.weight"))
    plan = small(train=train, gradient_dtype="fp32", update=Update.BARRIER, device_blocks=(2, 3, 4), square_blocks=(2, 3, 4))
    check(plan)
    assert kinds_of(plan)[Kind.UPDATE] == 1
    last = index(plan, "update_on_device gpu b4")
    update = plan.ops[index(plan, "update cpu b1")]
    waits = tuple(w for w in update.waits if w.op != last)
    assert "under barrier it must wait for" in error_of(with_op(plan, update.name, waits=waits))
    apart = small(**APART | {"update": Update.BARRIER})
    check(apart)
    load = apart.ops[index(apart, "load h2d b0")]
    assert Wait(index(apart, "update_on_device gpu b3"), 1) in load.waits
    earlier = Wait(index(apart, "backward gpu b1 m0"), 1)
    message = error_of(with_op(apart, load.name, waits=(earlier,)))
    assert "under barrier it must wait for" in message
    assert "update_on_device gpu b3" in message


# --- which workloads and policies are legal -----------------------------------------------------------------------------------


def test_what_is_frozen_is_what_the_semantics_do_not_train() -> None:
    plan = small(train=SECOND)
    for block, name in ((0, "embed.weight"), (2, "norm.weight")):
        p = parameter(plan, block, name)
        message = error_of(with_parameter(plan, block, name, replace(p, frozen=not p.frozen)))
        assert f"block {block}: weight '{p.name}' is {'trained' if p.frozen else 'frozen'}, which is not what" in message
    assert "which is not what the semantics train" in error_of(replace(plan, semantics=replace(plan.semantics, train=Train())))


def test_a_smaller_micro_batch_goes_through_what_is_as_frozen() -> None:
    semantics = replace(small(**APART).semantics, batch_size=3, micro_batch=2)
    workload = small(**APART).workload
    plan = lower(small().model, replace(workload, smaller=workload.blocks), semantics, Policy(update=Update.DEFERRED), PROFILE)
    check(plan)
    block = workload.blocks[1]
    thawed = replace(block, parameters=tuple(replace(p, frozen=False) for p in block.parameters))
    odd = (workload.blocks[0], thawed, *workload.blocks[2:])
    assert "other weights" in error_of(replace(plan, workload=replace(workload, smaller=odd)))


@pytest.mark.parametrize("factor", ["lora_A.weight", "lora_B.weight"])
def test_an_adapter_has_two_factors_beside_a_matrix(factor: str) -> None:
    plan = small(**APART)
    p = parameter(plan, 2, factor)
    transposed = replace(p, shape=p.shape[::-1] if p.shape[0] != p.shape[1] else (p.shape[0], 7))
    stacked, vector = replace(p, shape=(2, *p.shape)), replace(p, shape=(p.n_elements,))
    astray = replace(p, name=p.name.replace("up_proj", "norm"))
    thinner = replace(p, shape=tuple(n - 1 if n == 8 else n for n in p.shape))
    for instead in ((), (transposed,), (stacked,), (vector,), (astray,), (thinner,)):
        assert "no factor, of rank 8, of an adapter" in error_of(with_parameter(plan, 2, factor, *instead))
    assert "two weights have one name" in error_of(with_parameter(plan, 2, factor, p, p))
    alone = Parameter("a.lora_A.b", (8, 8))
    assert "no factor" in error_of(with_parameter(plan, 0, "embed.weight", parameter(plan, 0, "embed.weight"), alone))


def test_only_weights_of_layers_are_packed() -> None:
    plan = small(**PACKED)
    odd = Parameter("model.layers.9.up_proj.weight", (40, 8), frozen=True)
    for block, name in ((0, "embed.weight"), (4, "norm.weight")):
        assert "as only weights of layers can be" in error_of(with_parameter(plan, block, name, odd))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"update": Update.EAGER}, "update barrier or deferred"),
        ({"speculate_blocks": (1,)}, "update barrier or deferred"),
        ({"device_blocks": (1, 2), "square_blocks": (1, 2)}, "all blocks that are trained in part, or none"),
        ({"device_blocks": ()}, "all blocks that are trained in part, or none"),
        ({"device_blocks": (), "square_blocks": (0, 1)}, "all blocks that are trained in part, or none"),
    ],
)
def test_a_policy_for_frozen_weights_is_refused_in_a_line(changes: dict[str, Any], what: str) -> None:
    plan = small(**APART)
    semantics = replace(plan.semantics, clip_norm=None)
    message = error_of(replace(plan, semantics=semantics, policy=replace(plan.policy, **changes)))
    assert message.startswith("policy: ")
    assert what in message


def test_nothing_is_saved_and_nothing_spills_where_no_backward_comes() -> None:
    plan = small(train=Train(layers=(2, 2)), spill_blocks=(2,))
    check(plan)
    for changes in ({"spill_blocks": (1,)}, {"save": saves(all=(2,))}):
        assert "no backward comes below block 3" in error_of(replace(plan, policy=replace(plan.policy, **changes)))


@pytest.mark.parametrize("changes", [{"base": "nf4"}, {"sum_groups": 2}, {"ranks": 2}, {"gradient_dtype": "bf16"}])
def test_semantics_that_go_with_no_frozen_weights_are_refused(changes: dict[str, Any]) -> None:
    plan = small(n_micro_batches=2, **({} if "base" in changes else APART))
    assert error_of(replace(plan, semantics=replace(plan.semantics, **changes)))


# --- laws ---------------------------------------------------------------------------------------------------------------------


@law
@given(cases().filter(lambda case: not case.workload.trains_all))
def test_memory_and_traffic_are_those_of_a_model_that_is_trained_whole_and_never_more(case: Case) -> None:
    """Freezing asks for no memory on the host beyond what training all would, nor for an op more on the way there."""
    plan = case.plan
    if plan.policy.device_blocks or plan.semantics.train.lora is not None:
        return
    everything = tuple(replace(b, parameters=tuple(replace(p, frozen=False) for p in b.parameters)) for b in plan.workload.blocks)
    smaller = everything and tuple(
        replace(b, parameters=whole.parameters) for b, whole in zip(plan.workload.smaller, everything, strict=False)
    )
    semantics = replace(plan.semantics, train=Train(), base="bf16")
    whole = lower(plan.model, replace(plan.workload, blocks=everything, smaller=smaller), semantics, plan.policy, PROFILE)
    assert plan.host_arena_bytes <= whole.host_arena_bytes
    assert kinds_of(plan)[Kind.OFFLOAD_GRADIENT] <= kinds_of(whole)[Kind.OFFLOAD_GRADIENT]
    assert kinds_of(plan)[Kind.BACKWARD] <= kinds_of(whole)[Kind.BACKWARD]


@law
@given(cases().filter(lambda case: not case.workload.trains_all), st.randoms(use_true_random=False))
def test_an_operand_that_is_lost_is_missed(case: Case, rng: Any) -> None:
    """Above all `trained` and `packed`, which nothing else in the plan would tell of."""
    plan = case.plan
    of = [(i, n) for i, op in enumerate(plan.ops) for n, (name, _) in enumerate(op.operands) if name in ("trained", "packed")]
    for i, n in rng.sample(of, min(3, len(of))):
        op = plan.ops[i]
        lost = replace(op, operands=(*op.operands[:n], *op.operands[n + 1 :]))
        with pytest.raises(PlanError):
            check(replace(plan, ops=(*plan.ops[:i], lost, *plan.ops[i + 1 :])))


def test_a_plan_of_frozen_weights_is_read_back_from_its_text() -> None:
    plan = small(**PACKED)
    assert Plan.parse(str(plan)) == plan
    assert Semantics(4, 1, 1).train == Train()
