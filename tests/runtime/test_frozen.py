"""Partial training: streamed bits equal the plain loop's, and frozen weights do not change."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Policy, Update, saves
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model
from tests import training
from tests.lanes import examples, mostly_slow
from tests.strategies import policies
from tests.tiny import EXPERT_TYPES, STRUCTURES, families, tiny_config
from tests.training import (
    NEEDS_FP8,
    differences,
    fused,
    has_fp8_products,
    initial_masters,
    kept_whole,
    plain,
    same_bits,
    semantics_of,
    streamed,
)

LORA = Train(lora=Lora(rank=4, alpha=8.0))
BASES = ["bf16", "nf4", "int8", "fp8", *(["fp8-rows"] if has_fp8_products() else [])]
WAYS = {
    "adapters": LORA,
    "two adapters a layer": Train(lora=Lora(rank=8, alpha=4.0, targets=("q_proj", "o_proj"), rslora=True)),
    "adapters that drop": Train(lora=Lora(rank=4, alpha=8.0, dropout=0.3)),
    "experts": Train(lora=Lora(rank=8, targets=("q_proj", "experts"))),
    "a layer's mlp": Train(names=("model.layers.1.mlp.*",)),  # or its experts
    "norms": Train(names=("*norm*",)),
    "a projection": Train(names=("*.v_proj.weight", "model.layers.0.self_attn.o_proj.*")),
    "the last layer": Train(layers=(1, 1)),
    "the table": Train(names=("model.embed_tokens.weight",)),
    "the head": Train(names=("lm_head.weight",)),
    "the last norm": Train(names=("model.norm.weight",)),
    "the first layer": Train(layers=(0, 0)),
    "ends and a norm": Train(names=("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.input_layernorm.weight")),
}


# Type, format of the base, blocks on the device, and a policy
PACKED = [
    ("llama", "nf4", False, Policy(accumulation_group=4, save=saves(products=(1,)), prefetch_depth=2, update=Update.DEFERRED)),
    ("gemma2", "int8", True, Policy(accumulation_group=2, resident_blocks=(1,), boundary_stride=2)),
    ("qwen3_moe", "fp8", False, Policy()),
    ("qwen2", "nf4", True, Policy(accumulation_group=4, save=saves(products=(1,)), offload_blocks=(1,), update=Update.DEFERRED)),
    pytest.param(
        "qwen3", "fp8-rows", True, Policy(accumulation_group=4, save=saves(products=(1,)), prefetch_depth=2), marks=NEEDS_FP8
    ),
    ("gpt_oss", "mxfp4", False, Policy(accumulation_group=2, resident_blocks=(1,), boundary_stride=2)),
]


@mostly_slow(("model_type", "base", "on_device", "policy"), PACKED)
def test_packed_weights_are_computed_with_as_what_they_mean(model_type: str, base: str, on_device: bool, policy: Policy) -> None:
    overrides = (("num_hidden_layers", 3), ("tie_word_embeddings", on_device))
    train = Train(lora=Lora(rank=8, targets=("q_proj", "experts"))) if model_type in EXPERT_TYPES else LORA
    semantics = semantics_of(model_type, train=train, base=base, gradient_dtype="fp32" if on_device else "bf16")
    config = tiny_config(model_type, **dict(overrides))
    initial, expected = initial_masters(config, semantics), plain(model_type, semantics, overrides)
    assert not all(same_bits(initial[name], master) for name, master in expected.masters.items()), "nothing was trained"
    of_state = {"device_blocks": build_workload(Model(config), semantics).mixed} if on_device else {}
    machine = streamed(config, semantics, replace(policy, **of_state), delay_seed=1)
    assert differences(machine, expected) == []
    assert all(same_bits(initial[name], weight) for name, weight in training.frozen_of(machine).items())


@mostly_slow("family", families(STRUCTURES), fast=(0, 1, 2, 4), ids=lambda family: family[0])
@settings(max_examples=examples(10), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_policy_gives_the_same_bits(family: tuple[str, ...], data: st.DataObject) -> None:
    """Vary clipping, ties, packing and state placement. Adapter dropout masks equal those of a run that saves everything."""
    model_type = data.draw(st.sampled_from(family), label="model_type")
    ways = [name for name in WAYS if name != "experts" or model_type in EXPERT_TYPES]
    if model_type == "qwen3_moe":  # its dense layer has names that PEFT takes for experts
        ways.remove("adapters that drop")
    way = WAYS[data.draw(st.sampled_from(ways), label="way")]
    tied = data.draw(st.booleans(), label="tied") and "lm_head.weight" not in way.names
    overrides = (("num_hidden_layers", 3), ("tie_word_embeddings", tied))
    fields = {
        "train": way,
        "clip_norm": data.draw(st.sampled_from([None, 0.5]), label="clip_norm"),
        "gradient_dtype": data.draw(st.sampled_from(["fp32", "fp32", "bf16"]), label="gradient_dtype"),
        "base": data.draw(
            st.sampled_from(["bf16", "nf4", "int8", "fp8", *(["fp8-rows"] if has_fp8_products() else [])]), label="base"
        )
        if way.lora is not None
        else "bf16",
        "micro_batch": data.draw(st.sampled_from([1, 2, 3]), label="micro_batch"),
    }
    dtypes = [{}, {}, {"compute_dtype": "fp32"}, {"master_dtype": "bf16"}, *training.LEAN.values()]
    fields |= data.draw(st.sampled_from(dtypes), label="dtypes")
    if fields.get("compute_dtype") == "fp32":
        fields |= {"gradient_dtype": "fp32", "base": "bf16"}
    semantics = semantics_of(model_type, **fields, **data.draw(st.sampled_from([{}, fused(model_type)]), label="kernels"))
    config = tiny_config(model_type, **dict(overrides))
    policy = data.draw(policies(semantics, build_workload(Model(config), semantics)), label="policy")
    machine = streamed(config, semantics, policy, delay_seed=data.draw(st.integers(0, 99), label="delays"))
    drops = way.lora is not None and way.lora.dropout > 0
    assert differences(machine, kept_whole(model_type, semantics, overrides) if drops else None) == []


def test_forwards_that_no_backward_follows_leave_nothing() -> None:
    config = tiny_config("llama", num_hidden_layers=3)
    semantics = semantics_of("llama", train=Train(layers=(2, 2)))
    machine = streamed(config, semantics, Policy(accumulation_group=4))
    assert machine.compute._graphs == {}
    blocks = set()
    with_graph = machine.compute._with_graph
    machine.compute._with_graph = lambda op, *m: (blocks.add(op.block), with_graph(op, *m))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        for index, op in enumerate(machine.plan.ops):
            machine.perform(index, op, 0)
    assert blocks == {3}
