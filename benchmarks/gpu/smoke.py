"""Stage that compares the bits of several policies on the GPU.

Tiny models, eager and with fused kernels, all with a fixed order of additions. Every policy must be bitwise identical to saving
everything, and fused activations and rotary embeddings to eager ones. The `gpu` tests are far more thorough; this takes a minute
and locates a first failure.
"""

import os
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.hwprofiles.schema import read_profile
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.executor import Execution, StepResult
from penstock.runtime.machines.lanes import CpuDevice, CudaDevice
from penstock.runtime.machines.streams import use_same_kernels
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, Policy, Semantics, Update, saves
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.workload import Model
from tests.tiny import tiny_config

from .stages import Note, Request
from .training import QUIET_S, batches_of

N_STEPS = 3
# Fields of the semantics, and the kernels with equal bits
KERNELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "eager": ({}, None),
    "eager, pointwise fused": ({"pointwise": "fused"}, "eager"),
    "fused": ({"norm": "fused", "loss": "online", "pointwise": "fused"}, None),
}
KEPT_WHOLE = Policy(save=saves(all=(1, 2, 3, 4)), accumulation_group=4)
POLICIES = {
    "inputs only": Policy(),
    "attention saved, two groups": Policy(save=saves(attention=(1, 2, 3)), accumulation_group=2),
    "products saved, spilled, speculated": Policy(
        save=saves(products=(1,)),
        spill_blocks=(2, 3),
        accumulation_group=4,
        update=Update.DEFERRED,
        speculate_blocks=(0, 2),
        gradient_slots=2,
    ),
    "products and attention on the host": Policy(
        save=saves(products=(1, 2), attention=(3,)), offload_blocks=(1, 2, 3), spill_blocks=(0, 1), accumulation_group=2
    ),
    "every second input": Policy(boundary_stride=2),
    "resident": Policy(resident_blocks=(1, 3), save=saves(all=(2,)), update=Update.DEFERRED, prefetch_depth=2),
    "squared on the device": Policy(square_on_device=True, accumulation_group=4),
    "state on the device": Policy(device_blocks=(1, 2), accumulation_group=4, update=Update.DEFERRED),
}


def smoke(request: Request, note: Note) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    if request.device == "cuda":
        use_same_kernels()
    model_type, failed = request.stage.partition("-")[2], []
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for kernels, (fields, as_those_of) in KERNELS.items():
        policies = {"kept whole": KEPT_WHOLE} if as_those_of else {"kept whole": KEPT_WHOLE, **POLICIES}
        for name, policy in policies.items():
            case = f"{model_type}, {kernels}, {name}"
            try:
                bits = _trained(model_type, policy, fields, request.device)
                wanted = expected.setdefault(as_those_of or kernels, bits)
                odd = [key for key in wanted if not torch.equal(wanted[key], bits[key])]
                note("measured", case=case, n_different=len(odd), first_different=odd[:1])
            except Exception as error:  # the other cases help to locate the fault
                traceback.print_exc()
                odd = ["all"]
                note("failed", case=case, said=f"{type(error).__name__}: {error}"[:300])
            failed += [case] if odd else []
    if failed:
        raise RuntimeError(f"{len(failed)} cases failed or changed bits, the first: {failed[0]}")


def _trained(model_type: str, policy: Policy, kernels: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Train three steps. Return the state as bits, losses and norms."""
    plan = _plan(model_type, policy, kernels)
    check(plan)
    target = CudaDevice() if device == "cuda" else CpuDevice()
    machine = TorchMachine(plan, batches_of(plan), lambda step: AdamW(lr=1e-3 / (step + 1), weight_decay=0.1), device=target)
    machine.initialise(7)
    with Execution(plan, machine, N_STEPS, quiet_s=QUIET_S) as steps:
        results = [step.result for step in steps]
    return dict(_state(machine, results))


def _plan(model_type: str, policy: Policy, kernels: dict[str, Any]) -> Plan:
    semantics = Semantics(
        seq_len=32, batch_size=4, micro_batch=1, clip_norm=0.5, loss_tile_tokens=24, attention_kernel="deterministic", **kernels
    )
    model = Model(tiny_config(model_type, num_hidden_layers=4))
    profile = read_profile("h100-sxm").to_json()  # only fills the device's reserved memory; nothing is predicted
    return lower(model, build_workload(model, semantics), semantics, policy, profile)


def _state(machine: TorchMachine, results: Sequence[StepResult | None]) -> Iterator[tuple[str, torch.Tensor]]:
    for step, result in enumerate(results):
        assert result is not None
        yield f"step {step}", torch.tensor([result.loss, result.grad_norm], dtype=torch.float64)
    for block in range(len(machine.plan.workload.blocks)):
        for p in machine.host.owned[block]:
            state = machine.host.param_state(p)
            for name, tensor in zip(("master", "exp_avg", "exp_avg_sq"), (state.master.values(), *state.moments), strict=True):
                yield f"{p.name} {name}", tensor.cpu().clone().view(torch.int32)
