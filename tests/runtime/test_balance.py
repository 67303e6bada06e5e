"""Router loss: transformers' values under any schedule, micro-batch count and rank count."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from penstock.model_checks.self_test import differences, reference_step
from penstock.planner.model.workload import build_workload, supported_attention
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from tests import training
from tests.every_type import tiny
from tests.lanes import mostly_slow
from tests.rank_law import trained_alone, trained_by
from tests.tiny import tiny_config
from tests.training import EVERYTHING, kept_whole, plan_of, semantics_of, streamed

from .test_replay import REMEMBERING, WIDE, device_bytes


def step_of(model_type, router_loss=0.3):
    config = tiny(model_type)
    return reference_step(config, Semantics(1, 1, 1, attention=supported_attention(Model(config))[0], router_loss=router_loss))


@mostly_slow("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "jamba", "minimax_m2"])
def test_loss_and_gradients_are_transformers_own(model_type):
    """Compare bitwise for one micro-batch, recomputed and saved. The two parts of the loss are added in fp64 here."""
    step = step_of(model_type)
    assert differences(step) == []
    assert differences(replace(step, semantics=replace(step.semantics, router_loss=0.2))) != []


def test_micro_batches_have_a_loss_each_and_their_mean_counts():
    step = step_of("mixtral")
    model, batch = step.model, step.batch
    model.zero_grad()
    losses = []
    for tokens, targets in zip(batch.input_ids.split(1), batch.targets.split(1), strict=True):
        out = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        of_tokens = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum") / batch.n_supervised
        losses.append(of_tokens + 0.3 / 2 * out.aux_loss)
        losses[-1].backward()
    split = replace(step, loss=sum(losses).detach(), semantics=replace(step.semantics, micro_batch=1))
    assert differences(split, partial(torch.allclose, rtol=1e-4, atol=1e-6)) == []


@mostly_slow("policy", [EVERYTHING, Policy(boundary_stride=2, accumulation_group=2)])
def test_no_schedule_changes_a_bit_of_it(policy):
    semantics = semantics_of("mixtral", router_loss=0.1)
    machine = streamed(tiny_config("mixtral", num_hidden_layers=4), semantics, policy, delay_seed=3)
    assert training.differences(machine, kept_whole("mixtral", semantics, (("num_hidden_layers", 4),))) == []


@pytest.mark.slow
def test_ranks_train_with_it_to_the_bits_of_one(tmp_path):
    case = "qwen3_moe:balanced:2"
    assert trained_by(2, [case], tmp_path / "digests") == {case: trained_alone(case)}


@mostly_slow("way", ["keep", "boundaries"])
def test_memory_of_the_router_loss_is_booked(way):
    semantics = semantics_of("qwen3_moe", seq_len=96, batch_size=2, compute_dtype="fp32", loss_tile_tokens=16, router_loss=0.1)
    plan = plan_of(tiny_config("qwen3_moe", **WIDE, num_experts=64), semantics, replace(REMEMBERING[way], accumulation_group=2))
    _, peak_bytes = device_bytes(plan)
    assert 0.7 * (plan.kept_bytes + plan.transient_bytes) < peak_bytes <= plan.kept_bytes + plan.transient_bytes


def test_models_without_such_a_loss_are_refused():
    with pytest.raises(WorkloadError, match="no layer of this model has a router"):
        build_workload(Model(tiny_config("llama")), semantics_of("llama", router_loss=0.1))
    assert "DeepseekV3ForCausalLM's own forward has no load-balancing loss" in differences(step_of("deepseek_v3"))[0]
