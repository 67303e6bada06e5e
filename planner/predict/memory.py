"""Memory footprint of a policy: peak bytes on device and host, and the capacities of the machine."""

from dataclasses import dataclass, replace

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.arenas import arenas_of
from penstock.runtime.plan import Policy, Semantics, Setup
from penstock.runtime.plan.footprint import device_needs, host_needs
from penstock.runtime.plan.workload import Model, Workload
from penstock.runtime.units import show_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Peak bytes by purpose, and capacities."""

    device: dict[str, int]
    host: dict[str, int]
    device_memory_bytes: int
    host_memory_bytes: int
    n_here: int = 1  # ranks of a host, with equal parts of its memory; host figures are for one of them

    @property
    def device_peak_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_peak_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def short_device_bytes(self) -> int:
        return max(0, self.device_peak_bytes - self.device_memory_bytes)

    @property
    def short_host_bytes(self) -> int:
        return max(0, self.host_peak_bytes - self.host_memory_bytes)

    @property
    def fits(self) -> bool:
        return self.short_device_bytes == 0 and self.short_host_bytes == 0


def frame(model: Model, workload: Workload, semantics: Semantics, policy: Policy) -> Setup:
    """Build a plan without ops in microseconds; sufficient for memory footprints and bounds."""
    setup = Setup(semantics, policy, model, workload, ())
    return replace(setup, arenas=tuple(arenas_of(setup)))


def footprint(plan: Setup, profile: Profile) -> Footprint:
    """Compute peak bytes: arenas, saved tensors, temporaries of the current block, and the process itself."""
    hardware = profile.device
    device = device_needs(plan, hardware.kind == "cuda", hardware.workspace_bytes.value if hardware.workspace_bytes else None)
    device |= {"context": round(hardware.context_bytes.value)}
    n_here = max(1, plan.semantics.ranks // profile.n_hosts)
    host = host_needs(plan, n_here) | {"runtime": round(profile.host.runtime_bytes.value)}
    return Footprint(device, host, int(profile.device.memory_bytes.value), int(profile.host.memory_bytes.value), n_here)


def short_of(needs: Footprint) -> str:
    """Format a shortage, e.g. `host memory is 141 GB short (needs 1.64 TB, has 1.5 TB)`, for each memory that is too small. Host
    memory: of all ranks on a host."""
    n = needs.n_here
    places = (
        ("device", needs.device_peak_bytes, needs.device_memory_bytes, needs.short_device_bytes),
        ("host", n * needs.host_peak_bytes, n * needs.host_memory_bytes, n * needs.short_host_bytes),
    )
    return " and ".join(
        f"{place} memory is {show_bytes(short)} short (needs {show_bytes(peak)}, has {show_bytes(has)})"
        for place, peak, has, short in places
        if short
    )
