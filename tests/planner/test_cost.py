"""Costs of ops against manual calculations from sizes and a profile."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.compute_time import EXPERT_CALL_S, GROUPED, GROUPED_TIMES, moved_bytes
from penstock.planner.predict.cost import CostModel, costs, region_of, update_bytes_per_param, update_params_per_s
from penstock.planner.predict.memory import frame
from penstock.planner.predict.region import Resource
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.result import model_flop
from penstock.runtime.plan import Kind, Op, Plan, Policy, Semantics, saves
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Matmul, Saved
from tests.strategies import plans

MODEL = read_model("qwen2.5-0.5b")  # tied weights
UNTIED = read_model("qwen2.5-7b")
SEMANTICS = Semantics(seq_len=1024, batch_size=4, micro_batch=1)


def plan_of(policy=Policy(accumulation_group=4), semantics=SEMANTICS, model=UNTIED):  # noqa: B008
    return frame(model, build_workload(model, semantics), semantics, policy)


def demand(cost, plan, kind, block, micro_batch=None):
    return cost.demand(plan, Op(kind, block, micro_batch))


@pytest.fixture(params=["h200-pcie5", "cpu-2core", "gb10"])
def profile(request):
    return read_profile(request.param)


def test_no_op_asks_for_more_than_the_machine_has():
    setups = [(model, build_workload(model, SEMANTICS), SEMANTICS) for model in (MODEL, UNTIED)]
    plans = [lower(*setup, Policy(accumulation_group=group), {}) for setup in setups for group in (1, 4)]
    for profile in map(read_profile, shipped_profiles()):
        capacity = dict(region_of(profile).capacity)
        for plan, demands in ((plan, costs(plan, profile)) for plan in plans):
            assert len(demands) == len(plan.ops)
            for d in demands:
                assert d.uncontended_s > 0
                # Except DUPLEX: the rate of both directions may be below the rate of one
                assert all(per_s <= capacity[r] * (1 + 1e-12) for r, per_s in d.uses if r is not Resource.DUPLEX), profile.name


def test_a_load_takes_the_bytes_of_its_slot_over_the_link(profile):
    plan = plan_of()
    d = demand(CostModel(profile), plan, Kind.LOAD, 1)
    n_bytes = plan.workload.blocks[1].slot_elements * 2  # bf16
    uses = dict(d.uses)
    assert uses[Resource.H2D] * d.alone_s == pytest.approx(n_bytes)
    assert d.uncontended_s == pytest.approx(profile.copy_s("h2d", n_bytes) + profile.device.op_overhead_s.value)
    assert Resource.D2H not in uses


def test_a_recomputing_backward_costs_a_forward_but_one_product(profile):
    cost = CostModel(profile)
    recomputes, keeps = plan_of(), plan_of(Policy(accumulation_group=4, save=saves(all=(1,))))
    keeps = replace(keeps, workload=recomputes.workload)
    forward = demand(cost, recomputes, Kind.FORWARD, 1, 1)
    more_s = demand(cost, recomputes, Kind.BACKWARD, 1, 1).alone_s - demand(cost, keeps, Kind.BACKWARD, 1, 1).alone_s
    layer = recomputes.workload.blocks[1]
    again = next(t for t in layer.tiers if t.saved is Saved.INPUT)
    up_to_it = replace(layer, matmuls=layer.matmuls[:-1], pointwise_bytes=again.pointwise_bytes, n_kernels=again.n_kernels)
    assert more_s == pytest.approx(cost.forward_s(up_to_it, SEMANTICS))
    m = layer.matmuls[-1]
    sustained = profile.device.sustained_fraction  # GPU clocks may be lower in a long step than in a short benchmark
    rate = profile.matmul_rate("bf16", m.m, m.k, m.n).value * (1.0 if sustained is None else sustained.value)
    product_s = m.flop / rate
    assert 0.9 * (forward.alone_s - product_s) < more_s < forward.alone_s - product_s


@pytest.mark.parametrize(
    ("changes", "n_bytes"),
    [
        ({}, 26),  # master and moments read and written: 24; gradient: 2; the weight is half of the master
        ({"gradient_dtype": "fp32"}, 28),
        ({"master_dtype": "bf16"}, 22),  # the master is the weight
        ({"compute_dtype": "fp32"}, 26),  # the master is uploaded without conversion
        ({"optimizer": Optimizer.ADAMW_BF16}, 18),
        ({"optimizer": Optimizer.LION_BF16, "master_dtype": "bf16"}, 10),
        ({"optimizer": Optimizer.ADAMW_INT8}, 14.25),  # a two-byte scale for 32 elements of each moment
    ],
)
def test_update_traffic_per_parameter(changes, n_bytes):
    assert update_bytes_per_param(plan_of(semantics=replace(SEMANTICS, **changes)), 1) == n_bytes


def test_an_update_takes_all_host_cores_for_its_parameters(profile):
    plan = plan_of()
    d = demand(CostModel(profile), plan, Kind.UPDATE, 3)
    assert dict(d.uses)[Resource.CORES] == profile.host.n_cores
    assert d.alone_s == pytest.approx(plan.workload.blocks[3].n_params / profile.optimizer_params_per_s(profile.host.n_cores))


def test_an_update_of_less_state_waits_for_memory_or_arithmetic():
    """Update time is the maximum of memory time (all cores) and arithmetic time (one core's rate times n_cores)."""
    lion = replace(SEMANTICS, optimizer=Optimizer.LION)
    for profile in map(read_profile, shipped_profiles()):
        n, measured = profile.host.n_cores, profile.optimizer_params_per_s
        arithmetic_s, memory_s = 0.55 / (n * measured(1)), 18 / 26 / measured(n)
        assert 1 / update_params_per_s(profile, lion) == pytest.approx(max(arithmetic_s, memory_s))
        assert update_params_per_s(profile, SEMANTICS) == measured(n)


def under_uploads(name, fraction):
    fields = read_profile(name).to_json()
    for point in fields["host"]["optimizer"]:
        alone = point["params_per_s"]
        point["params_per_s_under_uploads"] = alone | {"value": fraction * alone["value"]}
    return Profile.from_json(fields)


@pytest.mark.parametrize(("name", "fraction"), [("h200-16core", 0.9), ("h200-16core", 0.65), ("h100-16core", 0.7), ("gb200", 0.75)])
def test_a_simulated_update_has_the_measured_rate_alone_and_beside_uploads(name, fraction):
    profile = under_uploads(name, fraction)
    setup, cost, region = plan_of(), CostModel(profile), region_of(profile)
    update, load = (demand(cost, setup, kind, 3) for kind in (Kind.UPDATE, Kind.LOAD))
    n_params, measured = setup.workload.blocks[3].n_params, profile.optimizer_params_per_s(profile.host.n_cores)
    for uploads, expected in ((0, measured), (1, fraction * measured)):
        ops = [Op(Kind.UPDATE, 3), *(Op(Kind.LOAD, 3, i) for i in range(40 * uploads))]
        plan = Plan(setup.semantics, Policy(), setup.model, setup.workload, {}, (), tuple(ops))
        (span,) = (s for s in simulate(plan, [update] + [load] * 40 * uploads, region, 1).timeline.spans if s.op == 0)
        assert n_params / (span.end_s - span.start_s) == pytest.approx(expected, rel=0.01)


def test_an_update_beside_uploads_draws_between_counted_bytes_and_all_there_is():
    setup = plan_of()
    for name, fraction in (("h200-pcie5", 0.5), ("h200-pcie5", 1.0), ("gb10", 1.0), ("gb200", 0.75), ("rtx4090-desktop", 0.3)):
        profile = under_uploads(name, fraction)
        update, counted = (demand(CostModel(p), setup, Kind.UPDATE, 3) for p in (profile, read_profile(name)))
        used, least = (dict(d.uses)[Resource.DRAM] for d in (update, counted))
        assert least <= used <= profile.host.dram_bytes_per_s.value, "bounds rest on the counted bytes"
        assert update.alone_s == counted.alone_s, "alone it keeps its rate"


def test_unpacking_and_narrow_products_take_their_own_rates_where_they_were_measured():
    fields = read_profile("h200-pcie5").to_json()
    memory = fields["device"]["memory_bytes_per_s"]
    fields["device"] |= {f"{kernel}_bytes_per_s": memory | {"value": memory["value"] / 4} for kernel in ("unpack", "narrow")}
    slower, usual = Profile.from_json(fields), read_profile("h200-pcie5")
    semantics = replace(SEMANTICS, base="int8", train=Train(lora=Lora(rank=16, targets=("up_proj",))))
    setup = plan_of(semantics=semantics)
    a, b = (demand(CostModel(p), setup, Kind.DEQUANTISE, 3).alone_s for p in (slower, usual))
    launches_s = 4 * b - a
    assert 3 * b < a < 4 * b
    assert 0 < launches_s < b
    products = [m for m in setup.workload.blocks[3].matmuls if min(m.k, m.n) == 16]
    assert products
    for m in products:
        slow_s, usual_s = (CostModel(p)._matmul("bf16", m) for p in (slower, usual))
        assert slow_s == pytest.approx(4 * moved_bytes(m, 2) / memory["value"])
        assert slow_s > usual_s


def products_s(machine, *shape, grouped, scaled="no"):
    cost = CostModel(read_profile(machine))
    return cost._matmul("bf16", Matmul(*shape, grouped=grouped, scaled=scaled)), cost.outside


def test_products_of_experts_take_a_grouped_kernel_or_a_call_each():
    small, large = (64, 2048, 16, 128), (2048, 2048, 1536, 128)
    seconds, outside = products_s("h100-sxm", *large, grouped=True)
    assert seconds == pytest.approx(GROUPED_TIMES * products_s("h100-sxm", *large, grouped=False)[0])
    assert GROUPED in outside, "unmeasured on the machine, so the interval is wider"
    assert products_s("rtx5090-desktop", *small, grouped=True)[0] == pytest.approx(128 * EXPERT_CALL_S)
    assert products_s("rtx5090-desktop", *small, grouped=False)[0] < 128 * EXPERT_CALL_S
    assert products_s("rtx5090-desktop", *large, grouped=True)[0] == products_s("rtx5090-desktop", *large, grouped=False)[0]
    assert products_s("cpu-2core", *small, grouped=True)[0] == products_s("cpu-2core", *small, grouped=False)[0]
    for scaled in ("own", "transposed"):  # torch's kernel of all experts in FP8 is Hopper's alone
        in_fp8 = products_s("h100-sxm", *large, grouped=True, scaled=scaled)[0]
        assert in_fp8 == pytest.approx(seconds / read_profile("h100-sxm").fp8_rate_fraction)
        assert products_s("b200", *small, grouped=True, scaled=scaled)[0] == pytest.approx(128 * EXPERT_CALL_S)
    assert products_s("b200", *small, grouped=True)[0] < 128 * EXPERT_CALL_S


@pytest.mark.parametrize(("n_experts", "top_k", "width", "published_s"), [(128, 8, 768, 10.218e-3), (512, 10, 512, 11.411e-3)])
def test_a_published_layer_of_experts_is_predicted_within_a_third(n_experts, top_k, width, published_s):
    """An H100, 32,768 tokens of width 2,048, torch's grouped products (ByteDance-Seed/VeOmni #460), with gather and scatter."""
    n_rows, hidden, profile = 32768 * top_k, 2048, read_profile("h100-sxm")
    rows = n_rows // n_experts
    shapes = (rows, hidden, 2 * width, n_experts), (rows, width, hidden, n_experts)
    moved = 2 * n_rows * (2 * hidden + 3 * width + 2 * hidden + hidden)  # gather, SwiGLU, scale, sum
    seconds = (
        sum(products_s("h100-sxm", *shape, grouped=True)[0] for shape in shapes) + moved / profile.device.eager_bytes_per_s.value
    )
    assert 0.67 < seconds / published_s < 1.1


def test_a_tied_weight_has_two_gradients_and_one_update(profile):
    cost, plan = CostModel(profile), plan_of(model=MODEL)
    norm, update = (demand(cost, plan, kind, 0) for kind in (Kind.NORM, Kind.UPDATE))
    elements = plan.workload.blocks[0].state_elements
    assert norm.alone_s == pytest.approx(2 * elements * 4 / profile.host.reduce_bytes_per_s.value)  # fp32 sums of both gradients
    assert update.alone_s == pytest.approx(elements / profile.optimizer_params_per_s(profile.host.n_cores))
    assert demand(cost, plan, Kind.UPDATE, len(plan.workload.blocks) - 1).alone_s < update.alone_s / 1000


def test_a_smaller_last_micro_batch_costs_what_its_size_costs(profile):
    """67 sequences in micro-batches of 16: the last micro-batch costs a micro-batch of 3, all others a micro-batch of 16."""
    cost = CostModel(profile)
    semantics = {n: replace(SEMANTICS, batch_size=n_all, micro_batch=n) for n, n_all in ((16, 67), (3, 15))}
    uneven, small = (plan_of(Policy(accumulation_group=5, spill_blocks=(3,)), semantics[n]) for n in (16, 3))
    large = plan_of(uneven.policy, replace(semantics[16], batch_size=80))
    for kind, b in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 2), (Kind.LOSS, 29), (Kind.OFFLOAD_ACTIVATION, 3)):
        last = demand(cost, uneven, kind, b, 4)
        assert last == demand(CostModel(profile), small, kind, b, 4), kind
        assert last.uncontended_s < demand(cost, uneven, kind, b, 3).uncontended_s
        assert demand(cost, uneven, kind, b, 3) == demand(CostModel(profile), large, kind, b, 3), kind
    assert model_flop(uneven) * 64 == model_flop(plan_of(semantics=replace(SEMANTICS, batch_size=64, micro_batch=16))) * 67


@settings(deadline=None)
@given(plans())
def test_blocks_that_differ_in_names_alone_cost_the_same(plan: Plan) -> None:
    """Search and sampling can therefore reuse costs of same-shaped layers."""
    profile, each_alone = Profile.from_json(plan.profile), replace(plan.workload)
    each_alone.__dict__["first_alike"] = [*range(len(plan.workload.blocks))]
    assert costs(plan, profile) == costs(replace(plan, workload=each_alone), profile)
