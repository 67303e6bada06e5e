"""Footprints: a run allocates the bytes that its plan booked."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model import fused
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.memory_replay import Tape, Tensor
from penstock.planner.model.workload import build_workload, fusible
from penstock.planner.predict.memory import footprint
from penstock.runtime.errors import DoesNotFitError, PlanError
from penstock.runtime.host import memory
from penstock.runtime.machines import streams
from penstock.runtime.plan import Plan, Policy
from penstock.runtime.plan.footprint import document_bytes, planned_device_needs
from penstock.runtime.plan.workload import Model
from penstock.training.device import refuse_what_does_not_fit
from tests.lanes import examples
from tests.strategies import PROFILE, cases, policies
from tests.tiny import MODEL_TYPES, tiny_config
from tests.training import plan_of, semantics_of

MACHINES = ("h100-sxm", "rtx4090-desktop", "gh200", "cpu-2core")


@st.composite
def real_plans(draw: st.DrawFn) -> Plan:
    """Plan real, tiny models under any policy and kernels, for any machine."""
    name, machine = draw(st.sampled_from(MODEL_TYPES)), read_profile(draw(st.sampled_from(MACHINES)))
    model = Model(tiny_config(name))
    kernels = {part: draw(st.sampled_from(["eager", FUSED[part]])) for part in sorted(fusible(model))}
    dtype, seq_len = draw(st.sampled_from(["bf16", "fp32"])), draw(st.integers(8, 64))
    kernels["attention_kernel"] = draw(st.sampled_from(["flash", "deterministic", "cudnn"]))
    how = semantics_of(name, compute_dtype=dtype, seq_len=seq_len, **kernels)
    workload = build_workload(model, how)
    return lower(model, workload, how, draw(policies(how, workload)), machine.to_json())


def exactly(plan: Plan, short_device_bytes: int = 0, short_host_bytes: int = 0) -> Plan:
    """Plan for a machine with exactly the required memory, minus some bytes."""
    needs = footprint(plan, Profile.from_json(plan.profile, "made up"))
    fields = json.loads(json.dumps(plan.profile))
    fields["device"]["memory_bytes"]["value"] = float(needs.device_peak_bytes - short_device_bytes)
    fields["host"]["memory_bytes"]["value"] = float(needs.host_peak_bytes - short_host_bytes)
    return dataclasses.replace(plan, profile=fields)


def start(plan: Plan, device: str) -> None:
    """Return the error of a run on the machine of the plan's profile, after the process and its context start. The profile covers a
    share of the machine if the plan has several ranks."""
    on_device, on_host = (plan.profile[place] for place in ("device", "host"))
    free_bytes = int(on_device["memory_bytes"]["value"]) - round(on_device["context_bytes"]["value"])
    host_bytes = int(on_host["memory_bytes"]["value"]) - round(on_host["runtime_bytes"]["value"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streams, "free_cuda_bytes", lambda index=0: free_bytes)
        available_bytes = plan.semantics.ranks * (host_bytes + (free_bytes if device == "cpu" else 0))
        patched.setattr(memory, "available_host_bytes", lambda: available_bytes)
        refuse_what_does_not_fit(plan, device, "auto", plan.semantics.ranks)


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plan=real_plans() | cases().map(lambda case: case.plan), data=st.data())
def test_a_run_accepts_a_plan_that_fits_and_no_byte_less(plan: Plan, data: st.DataObject) -> None:
    device = plan.profile["device"]["kind"]
    just = exactly(plan)
    assert footprint(just, Profile.from_json(just.profile, "made up")).fits
    start(just, device)
    check(just)
    shortage = data.draw(st.sampled_from([(1, 0), (0, 1)]), label="short of")
    with pytest.raises(DoesNotFitError):
        start(exactly(plan, *shortage), device)
    with pytest.raises(PlanError, match=r"^(device|host) memory is "):
        check(exactly(plan, *shortage))


@pytest.mark.parametrize("machine", MACHINES)
def test_bookings_name_kernels_workspaces_and_documents(machine: str) -> None:
    """A profile without workspaces books neither."""
    profile, model, how = read_profile(machine), Model(tiny_config("llama")), semantics_of("llama", seq_len=100)
    plan = lower(model, build_workload(model, how), how, Policy(), profile.to_json())
    needs, on_cuda = footprint(plan, profile).device, profile.device.kind == "cuda"
    assert needs == planned_device_needs(plan) | {"context": profile.device.context_bytes.value}
    for is_cuda in (on_cuda, not on_cuda):  # a GPU's libraries for a CPU's plan; a CPU's padding for a GPU's
        needs = planned_device_needs(plan, is_cuda)
        assert needs["kernels and workspaces"] == (2**30 if is_cuda else 0)
        assert needs["documents"] == document_bytes(plan, is_cuda) != document_bytes(plan, not is_cuda)
    assert "workspace_bytes" not in PROFILE["device"]
    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy())
    assert sum(planned_device_needs(plan).values()) == plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes


def test_the_mask_of_a_window_is_booked_on_a_cpu_alone() -> None:
    """Attention with sinks: a GPU's kernel takes the window itself. Blocks are the same for both."""
    for seq_len, window, mask_bytes in ((64, 16, 64 * 64 * 2), (64, 64, 0)):
        plan = plan_of(tiny_config("gpt_oss", sliding_window=window), semantics_of("gpt_oss", seq_len=seq_len), Policy())
        assert planned_device_needs(plan, on_cuda=False).get("window mask", 0) == mask_bytes
        assert "window mask" not in planned_device_needs(plan, on_cuda=True)
    eager = semantics_of("gpt_oss", seq_len=64, attention="eager")
    plan = plan_of(tiny_config("gpt_oss", sliding_window=16), eager, Policy())
    assert "window mask" not in planned_device_needs(plan, on_cuda=False)


def test_deterministic_attention_books_a_sum_per_processor() -> None:
    """FlashAttention-2's own arithmetic: processors / (sequences x heads), rounded up, at most 192 processors."""
    for n_sequences, n_sums in ((1, 48), (24, 2), (48, 1), (1000, 1)):
        scratch_bytes = {}
        for kernel in ("flash", "deterministic", "cudnn"):
            tape, qkv = Tape(2), [Tensor(n_sequences * 32 * heads * 8, 2) for heads in (4, 2, 2)]
            fused.attention(tape, qkv, (n_sequences, 4, 32, 8), kernel)
            scratch_bytes[kernel] = tape.steps[-1].scratch_bytes
        one_sum_bytes = n_sequences * 32 * 4 * 8 * 4
        assert scratch_bytes["deterministic"] == scratch_bytes["flash"] + (n_sums - 1) * one_sum_bytes
        assert scratch_bytes["cudnn"] == scratch_bytes["flash"]
