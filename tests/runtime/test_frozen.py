"""Training a part of a model: streamed bits are the plain loop's, and what is frozen keeps its own."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.model.workload import build_workload
from runtime.plan import Kind, Policy, Semantics, Update, saves
from runtime.plan.train import Lora, Train
from runtime.plan.workload import Model, Saved, Workload, aligned_elements
from tests.strategies import policies
from tests.tiny import EXPERT_TYPES, MODEL_TYPES, STRUCTURES, tiny_config
from tests.training import asked, differences, frozen_of, fused, initial_masters, plain, plan_of, same_bits, semantics_of, streamed

LORA = Train(lora=Lora(rank=4, alpha=8.0))
WAYS = {
    "adapters": LORA,
    "two adapters a layer": Train(lora=Lora(rank=8, alpha=4.0, targets=("q_proj", "o_proj"))),
    "norms": Train(names=("*norm*",)),
    "a projection": Train(names=("*.v_proj.weight", "model.layers.0.self_attn.o_proj.*")),
    "the last layer": Train(layers=(1, 1)),
}
ENDS = {
    "the table": Train(names=("model.embed_tokens.weight",)),
    "the head": Train(names=("lm_head.weight",)),
    "the last norm": Train(names=("model.norm.weight",)),
    "the first layer": Train(layers=(0, 0)),
    "ends and a norm": Train(names=("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.input_layernorm.weight")),
}
POLICIES = [
    Policy(),
    Policy(accumulation_group=4, prefetch_depth=2, save=saves(products=(1, 2)), update=Update.DEFERRED),
    Policy(accumulation_group=2, boundary_stride=2, resident_blocks=(1,)),
    Policy(accumulation_group=4, save=saves(all=(1,), attention=(2,)), spill_blocks=(0, 1), gradient_slots=2),
    Policy(accumulation_group=3, save=saves(products=(1,), attention=(2,)), offload_blocks=(1, 2), spill_blocks=(1,)),
]
ON_DEVICE = [
    Policy(),
    Policy(accumulation_group=4, save=saves(attention=(1,), products=(2,)), offload_blocks=(1,), spill_blocks=(0, 1)),
    Policy(accumulation_group=2, boundary_stride=2, prefetch_depth=2, resident_blocks=(2,)),
]


def workload_of(config: dict, semantics: Semantics) -> Workload:
    return build_workload(Model(config), semantics)


def fitting(policy: Policy, workload: Workload, semantics: Semantics, on_device: bool = False) -> Policy:
    """The policy without what cannot be done: layers below all that is trained save nothing, and of attention that is spelled out
    there is no one result."""
    first, saved = workload.first_trained, dict[Saved, tuple[int, ...]]()
    for tier in (Saved.ALL, Saved.PRODUCTS, Saved.ATTENTION):
        saved[tier] = tuple(b for b in policy.saving(tier) if b >= first and workload.blocks[b].recompute(tier) is not None)
    left = {*saved[Saved.PRODUCTS], *saved[Saved.ATTENTION]}
    staying = {b - 1 for b in saved[Saved.ALL]}
    policy = replace(
        policy,
        save=saves(all=saved[Saved.ALL], products=saved[Saved.PRODUCTS], attention=saved[Saved.ATTENTION]),
        offload_blocks=tuple(b for b in policy.offload_blocks if b in left),
        spill_blocks=tuple(b for b in policy.spill_blocks if b >= first - 1 and b not in staying and b < workload.n_layers),
    )
    return replace(policy, device_blocks=workload.mixed) if on_device else policy


def check_all(model_type: str, semantics: Semantics, tried: list[Policy], overrides: tuple = (), on_device: bool = False) -> None:
    config = tiny_config(model_type, **dict(overrides))
    workload = workload_of(config, semantics)
    before, expected = initial_masters(config, semantics), plain(model_type, semantics, overrides)
    assert not all(same_bits(before[name], master) for name, master in expected.masters.items()), "nothing was trained"
    for number, policy in enumerate(tried):
        fits = fitting(policy, workload, semantics, on_device)
        machine = streamed(config, semantics, fits, delay_seed=number or None)
        assert differences(machine, expected) == [], asked(fits)
        assert all(same_bits(before[name], weight) for name, weight in frozen_of(machine).items())


@pytest.mark.fast("some")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_whatever_is_trained_the_bits_are_the_plain_loops(model_type: str, way: str) -> None:
    """Trained parameters are on the host. Slots are poisoned on release, and lanes are late at random."""
    number = list(WAYS).index(way) + MODEL_TYPES.index(model_type)
    semantics = semantics_of(model_type, train=WAYS[way], **(fused(model_type) if number % 2 else {}))
    check_all(model_type, semantics, [POLICIES[number % len(POLICIES)], POLICIES[(number + 2) % len(POLICIES)]])


@pytest.mark.fast("some")
@pytest.mark.parametrize("way", ["adapters", "norms", "a projection"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_so_are_they_where_what_is_trained_is_on_the_device(model_type: str, way: str) -> None:
    if model_type == "gpt_oss" and way != "adapters":
        pytest.skip("parameters of four elements, which fill no register")
    number = list(WAYS).index(way) + MODEL_TYPES.index(model_type)
    semantics = semantics_of(model_type, train=WAYS[way], gradient_dtype="fp32", **({} if number % 2 else fused(model_type)))
    check_all(model_type, semantics, [ON_DEVICE[number % 3], ON_DEVICE[(number + 1) % 3]], on_device=True)


@pytest.mark.fast("some")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("way", [*WAYS, *ENDS])
def test_every_policy_gives_the_same_bits(way: str, on_device: bool) -> None:
    overrides = (("num_hidden_layers", 3),)
    how = {"train": (WAYS | ENDS)[way], "gradient_dtype": "fp32" if on_device else "bf16"}
    for number, policy in enumerate(ON_DEVICE if on_device else POLICIES):
        semantics = semantics_of("qwen2", **how, **({"clip_norm": None} if number == 1 else {}))
        check_all("qwen2", semantics, [policy], overrides, on_device)


@pytest.mark.fast("some")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_tables_and_heads_are_trained_or_not_tied_or_not(model_type: str, way: str, tied: bool) -> None:
    tied = tied and "lm_head.weight" not in ENDS[way].names  # a tied head is called as the table is
    overrides = (("num_hidden_layers", 3), ("tie_word_embeddings", tied))
    check_all(model_type, semantics_of(model_type, train=ENDS[way]), POLICIES[:3], overrides)


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    "fields",
    [
        {"compute_dtype": "fp32", "gradient_dtype": "fp32"},
        {"master_dtype": "bf16", "gradient_dtype": "fp32"},
        {"batch_size": 7, "micro_batch": 3, "gradient_dtype": "fp32"},
        {"batch_size": 1, "gradient_dtype": "fp32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["adapters", "a projection", "the last layer"])
def test_dtypes_and_uneven_micro_batches_change_nothing(way: str, fields: dict) -> None:
    semantics = semantics_of("qwen3", train=WAYS[way], **fields)
    n = semantics.n_micro_batches
    check_all("qwen3", semantics, [Policy(), Policy(accumulation_group=n, save=saves(products=(2,)))])
    check_all("qwen3", semantics, [Policy(), Policy(accumulation_group=n, save=saves(all=(2,)))], on_device=True)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_experts_are_frozen_or_trained(model_type: str, experts: str) -> None:
    for train in (Train(names=("*.experts.*",)), LORA):
        semantics = semantics_of(model_type, train=train, experts=experts)
        check_all(model_type, semantics, [Policy(accumulation_group=4, save=saves(all=(1,)))])


PACKED = [
    Policy(),
    Policy(accumulation_group=4, save=saves(products=(1,)), prefetch_depth=2, update=Update.DEFERRED),
    Policy(accumulation_group=2, resident_blocks=(1,), boundary_stride=2),
]


@pytest.mark.fast("some")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_packed_weights_are_computed_with_as_what_they_mean(model_type: str, base: str, on_device: bool) -> None:
    overrides = (("num_hidden_layers", 3), ("tie_word_embeddings", on_device))
    semantics = semantics_of(model_type, train=LORA, base=base, gradient_dtype="fp32" if on_device else "bf16")
    check_all(model_type, semantics, PACKED, overrides, on_device)


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", STRUCTURES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_policy_gives_the_same_bits(model_type: str, data: st.DataObject) -> None:
    """With clipping or without, tied or not, packed or not."""
    way = (WAYS | ENDS)[data.draw(st.sampled_from([*WAYS, *ENDS]), label="way")]
    tied = data.draw(st.booleans(), label="tied") and "lm_head.weight" not in way.names
    overrides = (("num_hidden_layers", 3), ("tie_word_embeddings", tied))
    fields = {
        "train": way,
        "clip_norm": data.draw(st.sampled_from([None, 0.5]), label="clip_norm"),
        "gradient_dtype": data.draw(st.sampled_from(["fp32", "fp32", "bf16"]), label="gradient_dtype"),
        "base": data.draw(st.sampled_from(["bf16", "nf4", "fp8"]), label="base") if way.lora is not None else "bf16",
        "micro_batch": data.draw(st.sampled_from([1, 2, 3]), label="micro_batch"),
    }
    semantics = semantics_of(model_type, **fields, **data.draw(st.sampled_from([{}, fused(model_type)]), label="kernels"))
    config = tiny_config(model_type, **dict(overrides))
    policy = data.draw(policies(semantics, workload_of(config, semantics)), label="policy")
    machine = streamed(config, semantics, policy, delay_seed=data.draw(st.integers(0, 99), label="delays"))
    assert differences(machine) == []


def test_blocks_below_what_is_trained_have_no_backward_or_update() -> None:
    """And what is frozen has no master and no moments."""
    config = tiny_config("llama", num_hidden_layers=3)
    ops = plan_of(config, semantics_of("llama", train=Train(layers=(1, 1)), gradient_dtype="fp32"), Policy()).ops
    assert {op.block for op in ops if op.kind in (Kind.UPDATE, Kind.NORM, Kind.OFFLOAD_GRADIENT)} == {2}
    assert {op.block for op in ops if op.kind is Kind.BACKWARD} == {2, 3}
    plan = plan_of(config, semantics_of("llama", train=LORA), Policy())
    state, blocks = plan.arena("state"), plan.workload.blocks
    assert state is not None
    assert state.n_bytes == sum(aligned_elements(p) * (2 if p.frozen else 12) for b in blocks for p in b.parameters)


def test_forwards_that_no_backward_follows_leave_nothing() -> None:
    config = tiny_config("llama", num_hidden_layers=3)
    semantics = semantics_of("llama", train=Train(layers=(2, 2)))
    machine = streamed(config, semantics, Policy(accumulation_group=4))
    assert machine.compute._graphs == {}
    seen = set()
    with_graph = machine.compute._with_graph
    machine.compute._with_graph = lambda op, *m: (seen.add(op.block), with_graph(op, *m))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        for index, op in enumerate(machine.plan.ops):
            machine.perform(index, op, 0)
    assert seen == {3}
