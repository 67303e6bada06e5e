"""Emulated machine: profile timings with shared resources and stand-in models."""

import threading
import time

import pytest
import torch

from penstock.emulated import EmulatedMachine, LiveRegion, stand_in_config, stand_in_semantics, time_scale_for
from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model, shipped_models, supported_attention
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.region import Demand, Region, Resource
from penstock.planner.predict.simulate import simulate
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.executor import execute
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model, has_towers
from tests.lanes import mostly_slow
from tests.tiny import MODEL_TYPES
from tests.training import machine_for


def serve(region: Region, *demands: Demand) -> list[tuple[float, float]]:
    """Return start and completion times of each demand, one thread per demand."""
    live = LiveRegion(region)
    shares: dict[int, tuple[float, float]] = {}

    def one(i: int, demand: Demand) -> None:
        share = live.begin(demand)
        live.wait(share)
        assert share.served_s is not None
        assert time.perf_counter() >= share.served_s, "it was let go too early"
        shares[i] = (share.work_from_s - demand.overhead_s, share.served_s)

    threads = [threading.Thread(target=one, args=(i, demand)) for i, demand in enumerate(demands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [shares[i] for i in range(len(demands))]


def test_two_that_need_all_of_a_resource_halve_each_other():
    """Times follow from the demand's start, however late its thread wakes."""
    uses = ((Resource.DRAM, 1.0),)
    served = serve(Region(((Resource.DRAM, 1.0),)), Demand(0.0, 0.06, uses), Demand(0.0, 0.02, uses))
    (first_s, first_end_s), (second_s, second_end_s) = sorted(served)
    last_end_s = max(first_end_s, second_end_s)
    if second_s < first_end_s:  # they overlap: the resource was never idle
        assert last_end_s == pytest.approx(first_s + 0.08, abs=1e-6)
        assert second_end_s - second_s > 0.02 + 1e-6 or second_end_s == last_end_s
    else:
        assert (first_end_s - first_s) + (second_end_s - second_s) == pytest.approx(0.08, abs=1e-6)


@pytest.mark.parametrize(("late_s", "left_s"), [(0.0, 0.03), (0.02, 0.01), (0.05, 0.0)])
def test_the_time_that_a_lane_takes_to_wake_is_overhead(late_s, left_s):
    live = LiveRegion(Region(()))
    before_s = time.perf_counter()
    share = live.begin(Demand(0.03, 0.01), due_s=before_s - late_s)
    after_s = time.perf_counter()
    live.wait(share)
    due_from_s = before_s + left_s
    assert share.work_from_s == pytest.approx(due_from_s, rel=0, abs=1e-6) or due_from_s < share.work_from_s <= after_s
    assert share.served_s == pytest.approx(share.work_from_s + 0.01, rel=0, abs=1e-6)


def test_an_emulated_step_takes_what_the_simulator_says():
    """The emulated time is at least the simulated one for the same demands and contention. A benchmark measures the excess."""
    profile = read_profile("h200-pcie5")
    config = stand_in_config(read_model("qwen2.5-0.5b").config) | {"num_hidden_layers": 4}
    small = Semantics(seq_len=16, batch_size=2, micro_batch=1)
    large, real = read_model("qwen2.5-0.5b").config | {"num_hidden_layers": 4}, Semantics(seq_len=4096, batch_size=8, micro_batch=4)
    setups = [(Model(fields), build_workload(Model(fields), how), how) for fields, how in ((config, small), (large, real))]
    plan, planned = (lower(*setup, Policy(accumulation_group=2), profile.to_json()) for setup in setups)
    assert [str(op) for op in plan.ops] == [str(op) for op in planned.ops], "the stand-in's plan has the planned model's ops"
    demands, region = costs(planned, profile), region_of(profile)
    store = machine_for(plan, TorchMachine)
    machine = EmulatedMachine(store, demands, region, time_scale_for(demands))
    timeline = execute(plan, machine, 3)
    measured_s = sorted(timeline.step_times_s)[1] / machine.time_scale
    predicted_s = simulate(planned, demands, region).step_s
    assert measured_s > predicted_s * 0.98
    for span in timeline.spans:  # part of the overhead is the hand-over to the lane, before its start
        assert span.end_s - span.start_s >= demands[span.op].alone_s * machine.time_scale * 0.999
    state = store.host.param_state(plan.workload.blocks[1].parameters[0])
    assert torch.isfinite(state.master.values()).all(), "the stand-in really trained"


CONFIGS = {name: read_model(name).config for name in shipped_models()}
SHIPPED = [name for name, fields in CONFIGS.items() if fields["model_type"] in MODEL_TYPES or has_towers(fields)]


@mostly_slow("name", SHIPPED)
def test_every_shipped_model_has_a_stand_in_of_as_many_blocks(name):
    model = read_model(name)
    semantics = stand_in_semantics(Semantics(4096, 8, 4, attention=supported_attention(model)[0]))
    small = Model(stand_in_config(model.config))
    workload = build_workload(small, semantics)
    planned = build_workload(model, Semantics(4096, 8, 4, attention=semantics.attention))
    assert [b.kind for b in workload.blocks] == [b.kind for b in planned.blocks]
    assert workload.tied == planned.tied
    assert workload.n_params < 2 * 10**6
    Templates(small.config, workload, semantics)  # constructor parameters in transformers
