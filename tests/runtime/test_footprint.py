"""Footprints: a run allocates the bytes that its plan booked, also after many steps of chats of any length."""

import dataclasses
import json
import os
import random
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.probe.probe import BEYOND_TORCH_BYTES
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
from penstock.runtime.plan import Plan, PlanFile, Policy
from penstock.runtime.plan.footprint import document_bytes, host_needs, planned_device_needs
from penstock.runtime.plan.workload import Model
from penstock.training.device import refuse_what_does_not_fit
from tests.lanes import examples
from tests.running import SCRATCH, penstock
from tests.strategies import PROFILE, cases, policies
from tests.tiny import MODEL_TYPES, tiny_config
from tests.tour import ROOT
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


SEQ_LEN = 256
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 272}
# A user's command; resident memory with torch alone, as probed (torch for CUDA takes more than the shipped profile), and the
# system's peak: `ru_maxrss` begins with the parent's value. Packages for tests are not installed there: transformers imports
# every package that it finds.
RUN = """
import re, sys
from pathlib import Path
import torch
from penstock.hwprofiles.probe.cpu import resident_bytes
print("resident bytes", resident_bytes(), file=sys.stderr)
sys.modules |= dict.fromkeys(("accelerate", "bitsandbytes", "peft", "psutil"))
from penstock.cli.main import main
try:
    main()
finally:
    kibibytes = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]
    print("resident bytes", int(kibibytes) * 1024, file=sys.stderr)
"""


def write_chats(path, n_chats):
    """Write chats of any length up to a sequence's, in letters, which are one byte-level token each."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(n_chats):
            texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 90))) for _ in range(2)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def test_chats_of_any_length_take_the_memory_that_was_planned(tmp_path):
    """Allow a tenth, in a separate process; the compiler takes memory only if its cache is empty. Without length classes the matrix
    library alone takes twice that."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3", **SIZES)))
    write_chats(tmp_path / "chats.jsonl", 300)
    sizes = ("--seq-len", SEQ_LEN, "--batch-size", 2, "--micro-batch", 1, "--loss-tile-tokens", SEQ_LEN)
    result = penstock("plan", tmp_path, "--machine", "cpu-2core", *sizes, "--policy", "megatrain", "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    plan = PlanFile.read(tmp_path / "plan.json").plan
    words = ["run", tmp_path / "plan.json", "--data", tmp_path / "chats.jsonl", "--packing", "documents", "--steps", 30]
    command = [sys.executable, "-c", RUN, *map(str, words), *SCRATCH, "--lr", "1e-3", "--out", str(tmp_path / "out")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    torch_bytes, most_bytes = map(int, re.findall(r"resident bytes (\d+)", run.stderr))
    on_device = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes
    needs = host_needs(plan)
    planned_bytes = on_device + sum(needs.values()) + torch_bytes + BEYOND_TORCH_BYTES
    assert 0.9 * (planned_bytes - needs["compiler"]) <= most_bytes <= 1.1 * planned_bytes
