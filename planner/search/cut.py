"""Cuts of a machine's one memory (a GB10's) into the device's part and the host's, where the user names neither."""

from collections.abc import Iterator

from hwprofiles.schema import Profile
from planner.predict.memory import Footprint, footprint, frame
from runtime.plan import Semantics
from runtime.plan.workload import Model
from runtime.units import GB

from .claim import CUT
from .micro_batch import sizes_of
from .space import families, leanest

HOST_FRACTIONS = (1.0, 1.15)  # of what the leanest plan needs of the host; the device has the rest


def cuts(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Profile]:
    """The machine cut so that some policy fits, if it has one memory and may be cut: what lies on the device is not copied to it,
    and takes no more than it would on the host, so the device has all that the host can do without, or a little less."""
    if CUT not in free or (pool := profile.device.pool_bytes) is None:
        return
    of, workload = sizes_of(model, semantics, profile, free)[-1]
    lean = (frame(model, workload, of, family.policy()) for family in families(of, workload))
    least_bytes = min(footprint(setup, profile).host_peak_bytes for setup in lean)
    for fraction in HOST_FRACTIONS:
        host_bytes = -(-int(fraction * least_bytes) // GB) * GB
        if 0 < host_bytes < pool.value:
            cut = profile.with_memory(int(pool.value) - host_bytes, host_bytes, by="the plan")
            if any(
                needs.fits for size in sizes_of(model, semantics, cut, free) for _, needs in leanest(model, size[1], size[0], cut)
            ):
                yield cut


def uncut(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Profile:
    """A machine that can do what it can with any cut: the host has all of the memory, the device all but what some policy on that
    machine asks of the host at least."""
    pool = profile.device.pool_bytes
    assert pool is not None, "only one memory can be cut"

    def having(device_bytes: float) -> Profile:
        memory = {"memory_bytes": pool.model_copy(update={"value": device_bytes}), "pool_bytes": None}
        host = profile.host.model_copy(update={"memory_bytes": pool})
        return profile.model_copy(update={"device": profile.device.model_copy(update=memory), "host": host})

    lean = _leanest(model, semantics, having(pool.value), free)
    return having(pool.value - min(needs.host_peak_bytes for needs in lean))


def _leanest(model: Model, semantics: Semantics, profile: Profile, free: frozenset[str]) -> Iterator[Footprint]:
    """Needs of the policies that ask least, with each size."""
    for of, workload in sizes_of(model, semantics, profile, free):
        yield from (needs for _, needs in leanest(model, workload, of, profile))
