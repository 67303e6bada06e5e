"""Step time estimate for training with all state on the device."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.device_parts import part_of
from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import frame
from penstock.planner.predict.resident import resident, resident_in_parts
from penstock.planner.search.search import search
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind, Model, Saved
from tests.lanes import mostly_slow
from tests.strategies import MADE_UP, MODEL, semantics, workloads
from tests.tiny import tiny_config

SOME_PERCENT = 0.05


def estimate(profile, model, semantics):
    return resident(frame(model, build_workload(model, semantics), semantics, Policy()), CostModel(profile))


def seconds_without_recompute(s, workload, cost):
    """Sum the time of all micro-batches in sequence, the gradient norm and AdamW."""
    n, item, total_s, device = s.n_micro_batches, ITEM_BYTES[s.compute_dtype], 0.0, cost.profile.device
    rate, launch_s = device.memory_bytes_per_s.value, device.kernel_overhead_s.value
    for m in range(n):
        for block in workload.smaller if s.n_left and m == n - 1 else workload.blocks:
            is_head, is_wide = block.kind is BlockKind.HEAD, block.kind is not BlockKind.LAYER and workload.tied
            total_s += cost.loss_s(block, s) if is_head else cost.forward_s(block, s) + cost.backward_s(block, s)
            moved = item * (2 if block.kind is BlockKind.EMBEDDING else 1)  # dense gradient: written and read
            moved += 0 if m == 0 else 4
            moved += 4 if n > 1 else 0
            moved += (4 if is_wide else ITEM_BYTES[s.gradient_dtype]) if m == n - 1 else 0
            total_s += block.slot_elements * moved / rate
    for block in workload.blocks:
        is_wide = block.kind is not BlockKind.LAYER and workload.tied
        gradient_bytes = block.slot_elements * (4 if n > 1 or is_wide else ITEM_BYTES[s.gradient_dtype])
        total_s += cost.square_s(block, gradient_bytes)
        weight = 0 if s.master_dtype == s.compute_dtype else item
        total_s += (block.n_params * (2 * s.optimizer.state_bytes(s.master_dtype) + weight) + gradient_bytes) / rate
        total_s += sum(p.tied_to is None for p in block.parameters) * launch_s
    return total_s


@pytest.mark.parametrize(("name", "batch", "micro_batch"), [("qwen2.5-0.5b", 4, 4), ("qwen2.5-0.5b", 5, 2), ("llama-3.2-1b", 2, 1)])
def test_with_memory_for_all_a_step_is_that_computed_by_hand(name, batch, micro_batch):
    model, semantics, profile = read_model(name), Semantics(1024, batch, micro_batch), read_profile("h100-sxm")
    by_hand_s = seconds_without_recompute(semantics, build_workload(model, semantics), CostModel(profile))
    assert estimate(profile, model, semantics).step_s == pytest.approx(by_hand_s, rel=SOME_PERCENT)


@given(st.data())
@settings(deadline=None)
def test_it_fits_at_the_byte_and_more_memory_is_never_slower(data):
    setup = data.draw(semantics().filter(lambda s: s.ranks == 1))
    plan = frame(MODEL, data.draw(workloads(setup, max_layers=4)), setup, Policy())

    def step_s(n_bytes):
        return resident(plan, CostModel(MADE_UP.with_memory(n_bytes, None))).step_s

    least_bytes = resident(plan, CostModel(MADE_UP.with_memory(1, None))).needs.device_peak_bytes
    assert step_s(least_bytes - 1) is None
    taken_s = [step_s(least_bytes + extra_bytes) for extra_bytes in sorted(data.draw(st.lists(st.integers(0, 10**7), min_size=1)))]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(taken_s))
    assert step_s(10**15) <= taken_s[-1] * (1 + 1e-9)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_least_memory_recomputes_every_layer_from_its_input(batch):
    model, profile, s = read_model("qwen2.5-0.5b"), read_profile("rtx4090-desktop"), Semantics(512, batch, 1)
    workload, cost = build_workload(model, s), CostModel(profile)
    short = estimate(profile.with_memory(10**9, None), model, s)
    assert short.to_json()["does_not_fit"].startswith("device memory is ")
    least, roomy = estimate(profile.with_memory(short.needs.device_peak_bytes, None), model, s), estimate(profile, model, s)
    again_s = sum(cost.recompute_s(layer, layer.recompute(Saved.INPUT), s) for layer in workload.blocks[1:-1])
    assert least.step_s - roomy.step_s == pytest.approx(batch * again_s)


@pytest.mark.parametrize(("batch", "n_bytes"), [(1, 16), (4, 18)])
def test_state_is_16_bytes_a_parameter_and_18_with_fp32_sums(batch, n_bytes):
    """bf16 weight and gradient, fp32 master and moments. Gradient accumulation is in fp32."""
    model, semantics = read_model("qwen2.5-7b"), Semantics(1024, batch, 1)
    needs = estimate(read_profile("b200"), model, semantics).needs.device
    assert needs["state"] == pytest.approx(n_bytes * build_workload(model, semantics).n_params, rel=1e-4)


def test_on_several_devices_it_is_what_fsdp2_keeps():
    """Each of 8 devices holds an eighth of fp32 masters, moments and gradients, without bf16 weights."""
    model, eight = read_model("qwen3-32b"), part_of(read_profile("8xh100"), 8)
    semantics, cost = Semantics(4096, 8, 8, loss="online", norm="fused", pointwise="fused", sum_groups=1, ranks=8), CostModel(eight)
    plan = frame(model, build_workload(model, semantics), semantics, Policy())
    assert resident(plan, cost).needs.device["state"] == pytest.approx(16 * plan.workload.n_params / 8, rel=1e-4)
    assert (resident(plan, cost).step_s is None, resident_in_parts(plan, cost).step_s is None) == (True, False)


@mostly_slow("machine", ["gb10", "cpu-2core"])
def test_one_memory_for_host_and_device_has_no_estimate(machine):
    semantics, model, profile = Semantics(128, 2, 2), Model(tiny_config("llama")), read_profile(machine)
    assert estimate(profile, model, semantics) is None
    answer = search(model, [(semantics, build_workload(model, semantics))], profile, Policy())
    assert "resident" not in answer.all_baselines()
