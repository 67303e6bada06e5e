"""Bitwise exactness: streamed training equals the plain resident loop for any policy, dtype, kernel and timing."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import read_profile
from penstock.planner.check.check import check
from penstock.planner.model.workload import build_workload
from penstock.runtime.compute.blocks import op_seed
from penstock.runtime.errors import PenstockError
from penstock.runtime.executor import execute
from penstock.runtime.plan import Kind, Policy, Semantics, Slot, Update, Wait, saves
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model, Saved
from tests import training
from tests.edits import with_waits
from tests.lanes import examples, mostly_slow
from tests.reference import Reference
from tests.strategies import policies
from tests.tiny import EXPERT_TYPES, MODEL_TYPES, WITH_SINKS, families, tiny_config
from tests.training import LEAN, Hostile, differences, fused, machine_for, plan_of, same_state, semantics_of, streamed, trained

LAW = settings(max_examples=examples(12), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def sampled(data: st.DataObject, family: Sequence[str]) -> tuple[dict, Semantics, Policy, Reference | None]:
    """Return configuration, semantics, policy and result of a training; the result is None for that of the plain loop.

    Some steps are clipped, attention has dropout, MLPs run by tiles.
    """
    model_type = data.draw(st.sampled_from(family), label="model_type")
    compute_dtype = data.draw(st.sampled_from(["bf16", "bf16", "bf16", "fp32"]), label="compute_dtype")
    tied = data.draw(st.booleans(), label="tied")
    clipped = data.draw(st.sampled_from(["never", "some steps", "some steps", "every step"]), label="clipped")
    dropout = data.draw(st.sampled_from([0.0, 0.0, 0.2 * (model_type not in WITH_SINKS)]), label="dropout")
    gradient_dtype = data.draw(st.sampled_from(["bf16", "fp32"]), label="gradient_dtype")
    master_dtype = data.draw(st.sampled_from(["fp32", "fp32", "bf16"]), label="master_dtype") if compute_dtype == "bf16" else "fp32"
    n_layers = data.draw(st.integers(1, 4), label="n_layers")
    batch_size, micro_batch = data.draw(st.sampled_from([(4, 1), (4, 2), (3, 3), (5, 2), (7, 3), (5, 3)]), label="batch")
    n_micro_batches = -(-batch_size // micro_batch)
    sum_groups = data.draw(st.sampled_from([n for n in (1, 2, 4) if n_micro_batches % n == 0]), label="sum_groups")
    tile = st.none() if model_type in EXPERT_TYPES else st.none() | st.integers(1, 16 * micro_batch + 1)
    leaner = [fields for fields in LEAN.values() if compute_dtype == "bf16" and "compute_dtype" not in fields]
    of_state = {"master_dtype": master_dtype} | data.draw(st.sampled_from([{}, {}, *leaner]), label="optimizer")
    semantics = semantics_of(
        model_type,
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        **of_state,
        batch_size=batch_size,
        micro_batch=micro_batch,
        sum_groups=sum_groups,
        mlp_tile_tokens=data.draw(tile, label="tile"),
        clip_norm=0.5 if clipped == "every step" else None,
        **data.draw(st.sampled_from([{}, fused(model_type)]), label="kernels"),
    )
    overrides = {"tie_word_embeddings": tied, "num_hidden_layers": n_layers}
    if model_type == "llama":
        overrides["mlp_bias"] = data.draw(st.booleans(), label="bias")
    key = tuple(overrides.items())
    if clipped == "some steps":
        semantics = training.clip_some_steps(model_type, semantics, key)
    workload = build_workload(Model(tiny_config(model_type, **overrides)), semantics)
    policy = data.draw(policies(semantics, workload), label="policy")
    expected = training.kept_whole(model_type, semantics, (*key, ("attention_dropout", dropout))) if dropout else None
    return tiny_config(model_type, **overrides, attention_dropout=dropout), semantics, policy, expected


@mostly_slow("family", families(MODEL_TYPES), fast=(0, 2, 5, 7), ids=lambda family: family[0])
@LAW
@given(data=st.data())
def test_any_policy_trains_the_bits_of_the_plain_loop(family, data):
    """Poison slots on release and delay lanes at random."""
    config, semantics, policy, expected = sampled(data, family)
    machine = streamed(config, semantics, policy, delay_seed=data.draw(st.integers(0, 99), label="delays"))
    norms = [machine.results[step].grad_norm for step in range(training.N_STEPS)]
    if semantics.clip_norm not in (None, 0.5) and expected is None:
        assert min(norms) < semantics.clip_norm < max(norms), "both outcomes of a speculation"
    assert differences(machine, expected) == []


REMEMBERING = [Policy(save=saves(all=(1, 2, 3, 4))), Policy()]
for saved in (saves(products=(1, 2, 3, 4)), saves(attention=(1, 2, 3, 4))):
    REMEMBERING += [Policy(save=saved), Policy(save=saved, spill_blocks=(0, 1, 2, 3))]


@mostly_slow(
    ("model_type", "tile", "policy"),
    [
        *(("llama", None, policy) for policy in REMEMBERING),
        *((*row, p) for row in (("mixtral", None), ("llama", 5)) for p in REMEMBERING[2:4]),
    ],
)
def test_a_backward_finds_weights_in_whichever_slots_they_are(model_type, tile, policy):
    """The lowering reloads a layer into its slot, which another planner need not do: exchange the slots of the last two loads."""
    semantics = semantics_of(model_type, mlp_tile_tokens=tile)
    if Saved.ATTENTION in policy.save and semantics.attention == "eager":
        policy = replace(policy, save=saves(products=policy.saving(Saved.ATTENTION)))
    plan = plan_of(tiny_config(model_type, num_hidden_layers=4), semantics, replace(policy, accumulation_group=4))
    last = {op.block: i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD and op.block in (1, 2)}
    exchanged = {Slot("weights", 0): Slot("weights", 1), Slot("weights", 1): Slot("weights", 0)}

    def moved(index, op):
        if op.block not in last or index < last[op.block]:
            return replace(op, waits=())
        return replace(op, operands=tuple((name, exchanged.get(slot, slot)) for name, slot in op.operands), waits=())

    ops = [moved(i, op) for i, op in enumerate(plan.ops)]
    forward = next(op for op in ops if op.kind is Kind.FORWARD and op.block == 2)
    assert ops[last[2]]["weights"] != forward["weights"], "the slots are the same: the test would prove nothing"
    trains_the_plain_loop(replace(plan, ops=with_waits(ops, {0: Wait(len(ops) - 1, distance=1)})))


def trains_the_plain_loop(plan):
    """Train a plan that the checker passes but the planner does not generate."""
    check(replace(plan, profile=read_profile("cpu-2core").to_json()))
    assert differences(trained(plan, Hostile)) == []


def test_every_op_draws_random_numbers_of_its_own(monkeypatch):
    assert len({op_seed(*key) for key in itertools.product(range(3), repeat=4)}) == 3**4
    seeds = []
    machine = machine_for(plan_of(tiny_config("llama"), semantics_of("llama"), Policy()), Hostile)
    seed = machine.compute._seed

    def listening(step, op):
        seed(step, op)
        seeds.append((step, op.block, op.micro_batch, torch.default_generator.initial_seed()))

    monkeypatch.setattr(machine.compute, "_seed", listening)
    execute(machine.plan, machine, 2)
    assert len(set(seeds)) == len({seed for *_, seed in seeds}) == 2 * 4 * 4  # steps, micro-batches, blocks; recompute repeats


# Every dtype of a plan for compute and storage
DTYPES = {"bf16": {}, "bf16 master": {"master_dtype": "bf16"}, "fp32": {"compute_dtype": "fp32"}} | LEAN
GROUPS = [(1, 1), (1, 3), (1, 4), (4, 1), (1, 4)]  # (micro-batch, micro-batches of a group): a group may not divide the step's four


@pytest.mark.parametrize(("gradient_dtype", "tied"), [("bf16", False), ("fp32", True)])
@mostly_slow("storage", DTYPES)
def test_all_dtypes_ties_and_groups_train_the_plain_loops_bits(storage, tied, gradient_dtype):
    """Cover cases that random policies can miss: every path of a gradient in every dtype; tiles, adapters."""
    config = tiny_config("llama", tie_word_embeddings=tied, num_hidden_layers=1, vocab_size=2200)  # more than a chunk of elements
    dtypes = {"gradient_dtype": gradient_dtype} | DTYPES[storage]
    for number, (micro_batch, group) in enumerate(GROUPS):
        size = {"micro_batch": micro_batch, "mlp_tile_tokens": 7 if number == 2 else None, "clip_norm": None if number % 2 else 0.5}
        semantics = semantics_of("llama", **dtypes, **size, train=Train(lora=Lora(rank=4)) if number == 4 else Train())
        is_deferred = (number // 2 + [*DTYPES].index(storage) + tied) % 2
        update = Update.DEFERRED if is_deferred else Update.EAGER if number % 2 else Update.BARRIER
        policy = Policy(accumulation_group=group, prefetch_depth=3, update=update, save=saves(all=(1,) if number > 1 else ()))
        assert differences(streamed(config, semantics, policy)) == [], policy


@pytest.mark.slow
def test_the_law_holds_at_2048_tokens_with_the_default_attention():
    """Use several tiles of keys in the attention kernel, and several tiles of the loss."""
    config = tiny_config("llama")
    semantics = semantics_of("llama", seq_len=2048, batch_size=2, loss_tile_tokens=1024, **fused("llama"))
    expected = streamed(config, semantics, Policy(save=saves(all=(1, 2)), accumulation_group=2))
    for policy in (Policy(prefetch_depth=2), Policy(save=saves(attention=(1,), products=(2,)), spill_blocks=(1,))):
        assert same_state(expected, streamed(config, semantics, policy)), policy


def test_a_missing_wait_is_seen_by_poison_and_delay():
    """Show that the laws above can fail: remove the wait of each forward for its weights, and slow the loads."""
    plan = plan_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), Policy(accumulation_group=4))
    ops = tuple(replace(op, waits=()) if op.kind is Kind.FORWARD and op.block > 1 else op for op in plan.ops)

    class SlowLoads(Hostile):
        def perform(self, index, op, step):
            if op.kind is Kind.LOAD:
                time.sleep(0.02)
            super().perform(index, op, step)

    assert differences(trained(plan, SlowLoads)) == []
    try:
        faults = differences(trained(replace(plan, ops=ops), SlowLoads))
    except PenstockError as error:  # NaN reached a gradient
        faults = [str(error)]
    assert faults


def test_the_norm_is_of_this_step_whichever_block_comes_last():
    """The checker allows any order of blocks on the host: exchange the last two norms, which both wait for gradients."""
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(accumulation_group=4))
    (a, b) = [i for i, op in enumerate(plan.ops) if op.kind is Kind.NORM][-2:]
    assert plan.ops[b].block == 0
    order = list(range(len(plan.ops)))
    order.insert(b, order.pop(a))  # the last layer's norm after the embedding's
    number = {old: new for new, old in enumerate(order)}
    waits = {i: tuple(w._replace(op=number[w.op]) for w in plan.ops[i].waits) for i in order}
    trains_the_plain_loop(replace(plan, ops=tuple(replace(plan.ops[i], waits=waits[i]) for i in order)))
