"""The device of a run: selection, torch settings, and a check of free memory."""

import gc
import os

from penstock.model_checks.missing_kernels import refuse_any_order, refuse_missing_attention, refuse_missing_libraries
from penstock.runtime.errors import DoesNotFitError, PlanError
from penstock.runtime.host import memory
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.machines import streams
from penstock.runtime.plan import Plan
from penstock.runtime.plan.footprint import host_needs, planned_device_needs
from penstock.runtime.units import show_bytes


def device_of(requested: str) -> str:
    """Return `cuda`, `cpu` or `emulated`. PlanError if a GPU is requested and torch sees none."""
    if requested in ("cpu", "emulated"):
        return requested
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):  # torch reads it at its first look for a device
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # keeps free memory contiguous
    if streams.has_cuda():
        return "cuda"
    if requested == "cuda":
        raise PlanError("--device cuda: torch sees no CUDA device; use --device cpu, or --device emulated")
    return "cpu"


def select_kernels(plan: Plan, device: str, deterministic: bool) -> None:
    """Select the plan's kernels on the GPU. PlanError if a kernel is not available or the plan requires another device."""
    if device != "emulated":
        refuse_missing_libraries(plan.semantics, device)
    if device != "cuda":
        return
    if deterministic:
        refuse_any_order(plan.semantics)
    refuse_missing_attention(plan)
    if deterministic or plan.semantics.attention_kernel == "deterministic":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        streams.use_same_kernels()


def refuse_what_does_not_fit(
    plan: Plan, device: str, requested: str, n_ranks_here: int = 1, of_host: bool = True, former: Plan | None = None
) -> None:
    """DoesNotFitError if the GPU, or the host (with `of_host`, for all ranks on it), has less free memory than the plan needs.
    Without a GPU, device arenas are allocated in host memory. `requested`: the device in the settings. `former`: a plan whose
    memory is released before."""
    device_bytes, host_bytes = _needs(plan, device, n_ranks_here)
    freed_device_bytes, freed_host_bytes = (0, 0) if former is None else _needs(former, device, n_ranks_here)
    where = "here"
    if device == "cuda":
        if (short_bytes := device_bytes - freed_device_bytes - streams.free_cuda_bytes()) > 0:
            raise _does_not_fit(f"{show_bytes(device_bytes)} of the GPU's memory", "--device-memory", short_bytes, 0)
        where = "of pinned memory"
    else:
        host_bytes, freed_host_bytes = host_bytes + device_bytes, freed_host_bytes + freed_device_bytes
        if plan.profile["device"]["kind"] == "cuda":
            note = " (no GPU was found)" if requested == "auto" else ""
            where = f"here, where the CPU's memory takes the place of the GPU's{note}"
    host_bytes *= n_ranks_here
    available_bytes = memory.available_host_bytes()
    short_bytes = 0 if available_bytes is None else host_bytes - freed_host_bytes * n_ranks_here - available_bytes
    if of_host and short_bytes > 0:
        raise _does_not_fit(f"{show_bytes(host_bytes)} {where}", "--host-memory", 0, short_bytes)


def release_memory(device: str) -> None:
    """Return the memory of a session that has ended to the system and to the GPU."""
    gc.collect()
    give_back_freed()
    if device == "cuda":
        streams.give_back_cached()


def _needs(plan: Plan, device: str, n_ranks_here: int) -> tuple[int, int]:
    return sum(planned_device_needs(plan, device == "cuda").values()), sum(host_needs(plan, n_ranks_here).values())


def _does_not_fit(need: str, flag: str, short_device_bytes: int, short_host_bytes: int) -> DoesNotFitError:
    remedy = f"plan again for the free memory, with {flag} (it names a smaller job if none fits); or run it on a larger machine"
    message = f"the plan needs {need}, {show_bytes(short_device_bytes + short_host_bytes)} more than are free; {remedy}"
    return DoesNotFitError(message, short_device_bytes, short_host_bytes, remedy)
