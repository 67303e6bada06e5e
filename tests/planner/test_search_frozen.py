"""Search of plans with frozen weights: bounds, memory and the ops that adapters need."""

from dataclasses import replace

import pytest

from benchmarks.any_memory import with_any_memory
from hwprofiles.schema import read_profile
from planner.bounds.bounds import policy_bound, policy_bounds
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.predict.cost import CostModel, region_of
from planner.predict.memory import footprint, frame
from planner.predict.simulate import simulate
from planner.search.search import search
from planner.search.space import leanest
from runtime.plan import Lane, Policy, Semantics, Update
from runtime.plan.train import parse_train
from runtime.plan.workload import Model, Saved
from tests.tiny import tiny_config

MACHINE = read_profile("rtx4090-desktop")


def asked(model_type, train, n_layers=4, **fields):
    """A tiny model, of which that is trained, and its blocks."""
    model = Model(tiny_config(model_type, num_hidden_layers=n_layers, tie_word_embeddings=False), name=model_type)
    semantics = Semantics(**{"seq_len": 32, "batch_size": 1, "micro_batch": 1, "gradient_dtype": "fp32"} | fields)
    semantics = replace(semantics, train=parse_train(train))
    return model, build_workload(model, semantics), semantics


@pytest.mark.parametrize("update", [Update.DEFERRED, Update.BARRIER])
@pytest.mark.parametrize("train", ["layers:3", "layers:1-2", "names:*.3.*", "lora:r=4"])
def test_no_plan_with_one_gradient_slot_is_faster_than_its_bound(train, update):
    """The last gradient's way home may be over in the next step, whose first layers are frozen and need not wait."""
    model, workload, semantics = asked("qwen3", train)
    policy, cost = Policy(gradient_slots=1, prefetch_depth=3, update=update), CostModel(MACHINE)
    plan = lower(model, workload, semantics, policy, {})
    step_s = simulate(plan, cost.demands(plan), region_of(MACHINE)).step_s
    assert policy_bound(frame(model, workload, semantics, policy), cost).seconds <= step_s * (1 + 1e-9)
    search(model, workload, semantics, MACHINE, policy)  # which asserts the same


@pytest.mark.parametrize("train", ["names:model.norm.weight", "names:lm_head.weight", "layers:7"])
def test_a_device_with_room_for_strided_plans_alone_gets_one(train):
    of = asked("llama", train, n_layers=8, seq_len=128, batch_size=8, micro_batch=4)
    strided, spread = (footprint(frame(*of, Policy(boundary_stride=n)), MACHINE).device_peak_bytes for n in (4, 1))
    needs = [needs for _, needs in leanest(*of, MACHINE)]
    assert min(n.device_peak_bytes for n in needs) <= strided < spread
    tight = with_any_memory(MACHINE, strided, 10**12)
    found = search(*of, tight)
    assert found.needs.fits


def test_adapters_updated_on_the_device_need_no_host_ops():
    model, workload, semantics = asked("llama", "lora:r=8")
    policy = Policy(device_blocks=workload.mixed, update=Update.DEFERRED)
    found = search(model, workload, semantics, MACHINE, policy)
    kinds = {str(op.kind) for op in found.plan.ops}
    assert kinds.isdisjoint({"offload_gradient", "accumulate", "update", "speculate", "settle"})
    assert {"offload_squares", "update_on_device"} <= kinds


def test_saved_bytes_leave_while_loads_come_and_bound_the_step():
    """A link carries less each way when both are in use: its copies up take longer than their sum, and so long the bound is."""
    model, semantics = (
        read_model("llama-3.1-8b"),
        Semantics(seq_len=1024, batch_size=4, micro_batch=4, gradient_dtype="fp32", train=parse_train("lora")),
    )
    workload, cost = build_workload(model, semantics), CostModel(with_any_memory(MACHINE, 10**12, 10**12))
    layers, on_device = tuple(range(1, workload.n_layers + 1)), workload.mixed
    policy = Policy(
        save=(Saved.PRODUCTS,) * len(layers), offload_blocks=layers, spill_blocks=(0, *layers[:-1]), prefetch_depth=2,
        device_blocks=on_device, update=Update.DEFERRED,
    )  # fmt: skip
    plan = lower(model, workload, semantics, policy, {})
    simulated = simulate(plan, cost.demands(plan), region_of(cost.profile))
    bounds = {bound.name: bound.seconds for bound in policy_bounds(plan, cost)}
    busy_s = simulated.busy_s(plan)[Lane.H2D]
    assert busy_s > 1.1 * bounds["lane h2d"]
    assert 0.99 * busy_s <= max(bounds.values()) <= simulated.step_s * (1 + 1e-9)
