"""What is the smallest change that makes it fit?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hwprofiles.schema import Profile
from runtime.errors import DoesNotFitError
from runtime.plan import Policy, Semantics
from runtime.units import GB
from runtime.workload import Model, Workload

from .memory import Footprint, footprint, frame, short_of
from .micro_batch import divisors, with_micro_batch
from .space import policies
from .workload import build_workload

MAX_CHANGES = 3
MAX_PLAN_OPS = 500_000  # a plan file of some fifty megabytes; beyond that a larger micro-batch is meant


def most_ops(workload: Workload, semantics: Semantics) -> int:
    """Ops of the longest plan there can be: each micro-batch visits each block five times."""
    return 5 * semantics.n_micro_batches * len(workload.blocks)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `free_micro_batch`: it was chosen, not given, so a change of something else chooses it again."""

    model: Model
    semantics: Semantics
    profile: Profile
    fixed: Policy | None
    free_micro_batch: bool

    def fits(self) -> bool:
        """Whether some policy that may be chosen fits."""
        workload = build_workload(self.model, self.semantics)
        if most_ops(workload, self.semantics) > MAX_PLAN_OPS:
            return False
        if self.fixed is not None:
            return footprint(frame(self.model, workload, self.semantics, self.fixed), self.profile).fits
        return any(needs.fits for _, needs in policies(self.model, workload, self.semantics, self.profile))


def does_not_fit(request: Request, found: list[Footprint]) -> DoesNotFitError:
    """The error that names the missing bytes and the smallest changes that fit; `found`: what each policy needs."""
    nearest = min(found, key=lambda n: (n.short_device_bytes + n.short_host_bytes, n.device_peak_bytes + n.host_peak_bytes))
    changes: list[str] = []
    for text, changed in _changes(request, found):
        if len(changes) < MAX_CHANGES and changed.fits():
            changes.append(text)
    smallest = ", or ".join(changes) or "none of those tried; use a smaller model or a larger machine"
    name = request.model.name or "the model"
    message = f"{name} does not fit {request.profile.name}: {short_of(nearest)}; smallest changes that fit: {smallest}"
    return DoesNotFitError(message, nearest.short_device_bytes, nearest.short_host_bytes, smallest)


def _changes(request: Request, found: list[Footprint]) -> Iterator[tuple[str, Request]]:
    """Single changes to try: first those that cost nothing but bits, then sizes, then memory."""
    s = request.semantics
    if s.compute_dtype == "bf16" and s.master_dtype == "fp32":
        yield "--master bf16", _changed(request, master_dtype="bf16")
    if s.gradient_dtype == "fp32":
        yield "--gradient-dtype bf16", _changed(request, gradient_dtype="bf16")
    if s.clip_norm is not None and s.on_nonfinite == "stop":
        yield "--clip-norm none", _changed(request, clip_norm=None)
    if any(n.short_device_bytes for n in found):
        fewer = ((f"--micro-batch {b}", _changed(request, micro_batch=b)) for b in divisors(s.batch_size) if b < s.micro_batch)
        shorter = ((f"--seq-len {n}", _changed(request, seq_len=n)) for k in range(1, 8) if (n := s.seq_len >> k))
        for sizes in (fewer, shorter):
            yield from islice((size for size in sizes if size[1].fits()), 1)  # the largest that fits
    on_device = [n for n in found if not n.short_device_bytes]
    on_host = [n for n in found if not n.short_host_bytes]
    if on_device:
        yield _with_memory(request, None, min(n.host_peak_bytes for n in on_device))
    if on_host:
        yield _with_memory(request, min(n.device_peak_bytes for n in on_host), None)
    if not on_device and not on_host:
        nearest = min(found, key=lambda n: n.short_device_bytes + n.short_host_bytes)
        yield _with_memory(request, nearest.device_peak_bytes, nearest.host_peak_bytes)


def _changed(request: Request, **changes: Any) -> Request:
    """Other semantics, with the micro-batch that a new start would choose, unless the change is the micro-batch."""
    semantics = replace(request.semantics, **changes)
    if request.free_micro_batch and "micro_batch" not in changes:
        semantics = with_micro_batch(request.model, semantics, request.profile)[0]
    return replace(request, semantics=semantics)


def _with_memory(request: Request, device_bytes: int | None, host_bytes: int | None) -> tuple[str, Request]:
    """A machine with so much memory, rounded up to whole gigabytes, above 100 GB to tens of them."""
    sizes = [None if n is None else -(-n // _step(n)) * _step(n) for n in (device_bytes, host_bytes)]
    names = ("--device-memory", "--host-memory")
    text = " ".join(f"{name} {n // GB}GB" for name, n in zip(names, sizes, strict=True) if n is not None)
    return text, _changed(replace(request, profile=request.profile.with_memory(*sizes)))


def _step(n_bytes: int) -> int:
    return 10 * GB if n_bytes > 100 * GB else GB
