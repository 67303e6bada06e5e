"""How many sequences are computed at a time, when the user does not say?"""

from dataclasses import replace
from math import isqrt

from hwprofiles.schema import Profile
from runtime.plan import Policy, Semantics
from runtime.workload import Model, Workload

from .memory import footprint, frame
from .workload import build_workload

LEAST_FRACTION = 0.6  # of device memory for the least working set of a micro-batch: the rest is the policy's to use


def with_micro_batch(model: Model, semantics: Semantics, profile: Profile) -> tuple[Semantics, Workload]:
    """The largest divisor of the batch whose least working set leaves room: a function of model, machine, batch and sequence.

    The least set recomputes everything from boundaries, one micro-batch at a time, with one weight slot ahead and one gradient.
    """
    least = Policy()
    room = LEAST_FRACTION * profile.device.memory_bytes.value
    for micro_batch in divisors(semantics.batch_size):
        tried = replace(semantics, micro_batch=micro_batch)
        workload = build_workload(model, tried)
        needs = footprint(frame(model, workload, tried, least), profile)
        if needs.device_peak_bytes <= room or micro_batch == 1:
            return tried, workload
    raise AssertionError("1 divides every batch")


def divisors(n: int) -> list[int]:
    """All divisors, the largest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)
