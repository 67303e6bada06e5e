"""Stage that trains and compares step times with the prediction.

Random weights and tokens. Nothing is saved; only time and memory are measured.
"""

import gzip
import json
import math
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import cache
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.executor import Execution, execute
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.layers.packed_weights import pack
from penstock.runtime.machines.lanes import CpuDevice, CudaDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Lane, Plan, PlanFile
from penstock.runtime.plan.optimizer import AdamW

from .commands import claim_of, plan_of
from .stages import Note, Request

LR = 1e-5
QUIET_S = 20.0  # reports a hanging lane within any stage's limit
PATTERN_ELEMENTS = 2**24  # pattern of random numbers for all weights, because generating billions would take longer than training
FILLING_THREADS = 8
PROFILED_ROWS = 40  # longest kernels of a step to note
ALONE_ELEMENTS = 2**28  # larger weights are filled one at a time: their fp32 copies take a gigabyte or more


def planned(request: Request, note: Note) -> None:
    """Run the stage's plan on random weights. Note each step and a summary."""
    path = plan_of(request, note)
    plan, claim = PlanFile.read(path).plan, claim_of(path)
    predicted = claim["prediction"]
    n_layers, semantics = len(plan.workload.blocks) - 2, plan.semantics
    sizes = {"n_layers": n_layers} | {name: getattr(semantics, name) for name in ("seq_len", "batch_size", "micro_batch")}
    note("planned", plan=path.name, profile=plan.profile["name"], **sizes, **predicted)
    began_s = time.perf_counter()
    batches = batches_of(plan)
    device = CudaDevice() if request.device == "cuda" else CpuDevice(pin_threads=True)
    machine = TorchMachine(plan, batches, settings, device=device)
    note("allocated", seconds=time.perf_counter() - began_s, said=machine.arenas.n_bytes)
    began_s = time.perf_counter()
    fill_all(machine)
    note("weights", seconds=time.perf_counter() - began_s)
    losses = list[float]()
    with Execution(plan, machine, request.case.n_steps, quiet_s=QUIET_S) as steps:
        for step in steps:
            assert step.result is not None
            losses.append(step.result.loss)
            note("step", step=step.number, seconds=step.seconds, loss=losses[-1])
    timeline = steps.timeline
    times_s = timeline.step_times_s[WARM_UP_STEPS - 1 :]
    step_s = median(times_s)
    with gzip.open(request.plans / f"{request.stage}.spans.json.gz", "wt") as file:  # start and end of every op
        json.dump([astuple(span) for span in timeline.spans], file)
    is_probed, flop = ".probed." in path.name, predicted["model_flop_per_s"] * predicted["step_s"]
    note(
        "measured", plan=path.name, profile=plan.profile["name"], is_probed=is_probed, **sizes, step_s=step_s, times_s=times_s,
        predicted_s=predicted["step_s"], error_fraction=step_s / predicted["step_s"] - 1,
        bound_fraction=claim["certificate"]["machine_bound_s"] / step_s,
        tokens_per_s=semantics.tokens_per_step / step_s, model_flop_per_s=flop / step_s,
        busy_s={str(lane): s for lane, s in timeline.from_step(1).busy_s(plan).items()}, predicted_busy_s=predicted["busy_s"],
        device_peak_bytes=machine.device_peak_bytes(), device_planned_bytes=predicted["device_peak_bytes"],
        host_peak_bytes=host_peak_bytes(), host_planned_bytes=predicted["host_peak_bytes"], losses=losses,
    )  # fmt: skip
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"a loss is not a number: {losses}")
    if request.case.is_profiled:
        _update_alone(machine, request.case.n_steps, note)
        _profiled(machine, request, note)


def _update_alone(machine: TorchMachine, step: int, note: Note) -> None:
    """Time the ops of one more update in the run's arenas with idle lanes, to measure interference in a step."""
    busy_s: dict[str, float] = {}

    def perform() -> None:
        with machine.lane(Lane.CPU):
            for i, op in enumerate(machine.plan.ops):
                if op.lane is Lane.CPU and op.kind is not Kind.ACCUMULATE:
                    began_s = time.perf_counter()
                    machine.work(i, op, step)
                    busy_s[op.kind] = busy_s.get(op.kind, 0.0) + time.perf_counter() - began_s

    cpu_s = time.process_time()
    with ThreadPoolExecutor(1) as thread:  # the lane pins its thread to cores
        thread.submit(perform).result()
    cpu_s = time.process_time() - cpu_s
    n_params = sum(b.n_trained for i, b in enumerate(machine.plan.workload.blocks) if i not in machine.plan.policy.device_blocks)
    seconds = {str(kind): s for kind, s in busy_s.items()}
    updates_s = sum(s for kind, s in busy_s.items() if kind in (Kind.UPDATE, Kind.SPECULATE, Kind.SETTLE))
    rate = n_params / updates_s if updates_s else None
    note("update alone", busy_s=seconds, n_params=n_params, params_per_s=rate, cores_used=cpu_s / max(sum(busy_s.values()), 1e-9))


def _profiled(machine: TorchMachine, request: Request, note: Note) -> None:
    """Run one more step under torch's profiler, and note the longest kernels."""
    activity = ProfilerActivity.CUDA if request.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        execute(machine.plan, machine, 1, request.case.n_steps + 1, QUIET_S)
    rows = profiler.key_averages()
    of_device = "self_device_time_total" if request.device == "cuda" else "self_cpu_time_total"
    longest = sorted(rows, key=lambda row: -getattr(row, of_device))[:PROFILED_ROWS]
    note("profile", total_s=sum(getattr(row, of_device) for row in rows) / 1e6)
    for row in longest:
        note("kernel in a step", name=row.key[:160], n_calls=row.count, seconds=getattr(row, of_device) / 1e6)


def settings(step: int) -> AdamW:
    return AdamW(lr=LR, weight_decay=0.0)


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def batches_of(plan: Plan) -> Callable[[int], Batch]:
    return random_batches(plan.workload.blocks[0].parameters[0].shape[0], plan.semantics.batch_size, plan.semantics.seq_len)


def random_batches(vocab_size: int, batch_size: int, seq_len: int) -> Callable[[int], Batch]:
    """Return random batches with all tokens but the last supervised."""

    def of_step(step: int) -> Batch:
        tokens = torch.randint(vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(step))
        targets = torch.full_like(tokens, UNSUPERVISED)
        targets[:, :-1] = tokens[:, 1:]
        return Batch(tokens, targets)

    return of_step


# -- weights --------------------------------------------------------------------------------------------------------------


def fill_all(machine: TorchMachine) -> None:
    """Fill weights in parallel, except the largest, whose copies would exceed the host's memory. Pack once per shape."""
    host, plan, numbers = machine.host, machine.plan, pattern()
    owned = [p for block in range(len(plan.workload.blocks)) for p in (*host.owned[block], *host.frozen[block])]

    def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        weight = torch.empty(shape, dtype=dtype)
        fill(weight, numbers)
        return weight

    @cache
    def packed(shape: tuple[int, ...]) -> torch.Tensor:
        return pack(filled(shape, torch.bfloat16), plan.semantics.base)

    def task(p) -> None:  # type: ignore[no-untyped-def]
        if plan.is_packed(p):
            host.set_weight(p, packed(p.shape))
        else:
            host.set_weight(p, filled(p.shape, DTYPE[plan.semantics.compute_dtype] if p.frozen else torch.float32))

    for shape in {p.shape for p in owned if plan.is_packed(p)}:
        packed(shape)
    for p in owned:
        if p.n_elements >= ALONE_ELEMENTS:
            task(p)
    with ThreadPoolExecutor(FILLING_THREADS) as pool:
        list(pool.map(task, [p for p in owned if p.n_elements < ALONE_ELEMENTS]))


def fill(weight: torch.Tensor, pattern: torch.Tensor) -> None:
    """Fill a matrix with random numbers, or a norm with ones."""
    flat = weight.view(-1)
    if weight.dim() < 2:
        flat.fill_(1.0)
        return
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def pattern() -> torch.Tensor:
    return torch.randn(PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
