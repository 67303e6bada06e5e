"""Smallest changes with which a model fits."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.lower import MOST_ALIKE_GROUPS, plan_ops
from penstock.planner.model.config import published
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.memory import Footprint, footprint, frame, short_of
from penstock.runtime.errors import DoesNotFitError, PlanError, WorkloadError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.packed import Base, is_readable
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import ITEM_BYTES, Model, Workload
from penstock.runtime.units import GB

from . import tuning
from .evaluation import Evaluator
from .greedy import Greedy
from .micro_batch import candidates, sizes_of
from .policies import policy_of, smallest_plans
from .result import SearchResult

# Optimizers in order of decreasing state
_MOMENTS, _BF16 = ("adamw:moments=bf16", "adamw:moments=int8"), ("adamw:moments=int8,master=bf16", "lion:moments=bf16,master=bf16")
SMALLER_OPTIMIZERS = (*_MOMENTS, "adamw:moments=bf16,master=bf16", "adamw:moments=int8,master=split24", *_BF16)
BASES: tuple[Base, ...] = ("bf16", "int8", "nf4")  # for frozen weights published in bf16, the largest first
IN_FP8, IN_FP8_WORDS = {"base": "fp8-rows", "products": "fp8"}, "--base fp8-rows --compute fp8"
MAX_CHANGES = 3
USUAL_READ_BYTES_PER_S = 7 * GB  # of a PCIe 4 disk; it does not affect memory
MOST_HALVINGS = 8  # of a sequence or a batch
MAX_PLAN_OPS = 500_000  # a plan file of about 50 MB; a larger micro-batch is the better choice


def most_ops(workload: Workload, semantics: Semantics, policy: Policy | None = None) -> int:
    """Upper bound on the ops of the policy's plan. Default policy: one micro-batch after another, the shortest plan."""
    return plan_ops(workload, semantics, policy or Policy(), 2 * MOST_ALIKE_GROUPS + 1)


def too_long(workload: Workload, semantics: Semantics, policy: Policy | None) -> bool:
    return most_ops(workload, semantics, policy) > MAX_PLAN_OPS


class TooLongError(PlanError):
    """Raised if only plans with too many ops fit."""

    def __init__(self, semantics: Semantics, n_ops: int) -> None:
        self.n_micro_batches, self.n_ops = semantics.n_micro_batches, n_ops
        self.change = "use a larger --micro-batch" + (" or --sum-groups 1 (a shorter plan)" if semantics.sum_groups > 1 else "")
        self.reason = f"a step of {self.n_micro_batches} micro-batches makes a plan of up to {n_ops} ops, more than {MAX_PLAN_OPS}"
        super().__init__(f"{self.reason}; {self.change}")


@dataclass(frozen=True, slots=True)
class Request:
    """Model, semantics and machine of a search. `free`: sizes chosen by the search, which change with other settings."""

    model: Model
    semantics: Semantics
    profile: Profile
    fixed: Policy | str | None  # policy, or name of another system
    free: frozenset[str]

    def fits(self) -> bool:
        """True if some allowed policy fits. More than MOST_MICRO_BATCHES micro-batches count as not fitting."""
        return self.semantics.n_micro_batches <= tuning.MOST_MICRO_BATCHES and any(needs.fits for needs in self.needs())

    def resized(self) -> "Request":
        """Choose the first candidate size that fits; otherwise the last, which needs the least device memory."""
        sizes = [replace(self, semantics=s) for s, _ in sizes_of(self.model, self.semantics, self.profile, self.free)]
        return next((one for one in sizes[:-1] if one.fits()), sizes[-1])

    def tokens_per_s(self) -> float:
        """Estimate the speed: from the fixed policy, or from a greedy or smallest one, which a search may improve."""
        workload = build_workload(self.model, self.semantics)
        evaluator = Evaluator(self.model, workload, self.semantics, self.profile, None)
        if (fixed := policy_of(self.fixed, self.semantics, workload)) is not None:
            return self.semantics.tokens_per_step / evaluator.step_s(fixed)
        smallest = (plan.policy for plan, needs in smallest_plans(self.model, workload, self.semantics, self.profile) if needs.fits)
        policies = Greedy(evaluator).policies() or list(smallest)
        return self.semantics.tokens_per_step / evaluator.step_s(min(policies, key=evaluator.bound_s))

    def needs(self) -> Iterator[Footprint]:
        """Yield the memory needs of the fixed policy, or of each smallest one; nothing if it is illegal or its plan too long."""
        workload = build_workload(self.model, self.semantics)
        fixed = policy_of(self.fixed, self.semantics, workload)
        if too_long(workload, self.semantics, fixed):
            return
        if fixed is None:
            yield from (needs for _, needs in smallest_plans(self.model, workload, self.semantics, self.profile))
            return
        try:
            refuse_illegal(workload, self.semantics, fixed)
        except PlanError:  # for example if it has larger groups than the step has micro-batches
            return
        yield footprint(frame(self.model, workload, self.semantics, fixed), self.profile)


def does_not_fit(request: Request, needs: list[Footprint]) -> DoesNotFitError:
    """Build the error with the missing bytes and the smallest changes that fit. `needs`: those of each policy.

    Missing bytes and larger memory refer to one policy, so that the change resolves the shortage.
    """
    nearest = _nearest(needs)
    every = chain(_bitwise_identical(request, nearest), _changes(request, needs))
    fitting = [*islice((change for change in every if change[1].fits()), MAX_CHANGES)]
    if request.semantics.train.lora is not None and (changed := in_fp8(request)) is not None:
        fitting.append((f"{IN_FP8_WORDS} (activations in 8 bits, too: docs/fp8.md)", changed))
    changes = [_with_rate(*change) for change in fitting]
    smallest = ", or ".join(changes) or "no change that was tried; use a smaller model or a larger machine"
    name = request.model.name or "the model"
    message = f"{name} does not fit {request.profile.name}: {short_of(nearest)}; smallest changes that fit: {smallest}"
    return DoesNotFitError(message, nearest.short_device_bytes, nearest.n_here * nearest.short_host_bytes, smallest)


def _nearest(needs: list[Footprint]) -> Footprint:
    """Policy with the smallest shortage. Host memory is preferred, because users can add it."""
    on_device = [n for n in needs if not n.short_device_bytes]
    on_host = [n for n in needs if not n.short_host_bytes]
    if on_device:
        return min(on_device, key=lambda n: (n.host_peak_bytes, n.device_peak_bytes))
    if on_host:
        return min(on_host, key=lambda n: (n.device_peak_bytes, n.host_peak_bytes))
    return min(needs, key=lambda n: (n.short_device_bytes + n.short_host_bytes, n.device_peak_bytes + n.host_peak_bytes))


def _with_rate(text: str, changed: Request) -> str:
    """Append the estimated speed to a change."""
    rate = f"about {changed.tokens_per_s():,.0f} tokens/s"
    return f"{text[:-1]}, {rate})" if text.endswith(")") else f"{text} ({rate})"


def _bitwise_identical(request: Request, needs: Footprint) -> Iterator[tuple[str, Request]]:
    """Changes with bitwise identical results: a disk for frozen weights, and the smallest larger memory that fits."""
    s, profile = request.semantics, request.profile
    if request.fixed is None and profile.disk is None and not s.train.all and s.ranks == 1:
        text = f"--disk-read {USUAL_READ_BYTES_PER_S // GB}GB (the frozen base on a disk with this read rate)"
        yield text, replace(request, profile=profile.with_disk(USUAL_READ_BYTES_PER_S))
    yield from islice((larger for larger in _with_memory(request, needs) if larger[1].fits()), 1)


def _changes(request: Request, needs: list[Footprint]) -> Iterator[tuple[str, Request]]:
    """Single changes to try: first sizes, which cost no precision, then settings that change the arithmetic."""
    s = request.semantics
    fewer = _smaller_micro_batch(request) if any(n.short_device_bytes for n in needs) else ()
    sizes = chain(fewer, _halved(request, "seq_len", "--seq-len"), _halved(request, "batch_size", "--batch-size"))
    yield from islice((size for size in sizes if size[1].fits()), 1)  # the largest of the first kind that helps
    yield from _low_bit_optimizer(request)
    if s.compute_dtype == "bf16" and s.master_dtype == "fp32" and not s.is_lean:  # small updates are lost
        yield "--master bf16", _changed(request, master_dtype="bf16")
    yield from _frozen(request)
    if s.sum_groups > 1:
        yield f"--sum-groups {s.ranks}", _changed(request, sum_groups=1)
    if s.gradient_dtype == "fp32":
        yield "--gradient-dtype bf16", _changed(request, gradient_dtype="bf16")
    if s.clip_norm is not None and s.on_nonfinite == "stop":
        yield "--clip-norm none", _changed(request, clip_norm=None)


def _low_bit_optimizer(request: Request) -> Iterator[tuple[str, Request]]:
    """The first low-bit optimizer that fits, with its bytes per parameter and its effect."""
    s = request.semantics
    now = s.state_bytes + ITEM_BYTES[s.gradient_dtype]
    reset = {"master_dtype": "fp32", "weight_rounding": "half_up"} if s.weight_rounding == "stochastic" else {}  # in --optimizer
    for name in SMALLER_OPTIMIZERS if s.compute_dtype == "bf16" and request.fixed is None else ():
        changed = _changed(request, **reset | optimizing(name, None))
        semantics = changed.semantics
        n_bytes = semantics.state_bytes + ITEM_BYTES[semantics.gradient_dtype]
        if n_bytes < now and changed.fits():
            note = "other rounding" if semantics.optimizer.rule == s.optimizer.rule else "another optimizer"
            yield f"--optimizer {name} ({n_bytes:.2g} bytes a parameter instead of {now:.2g}; {note}: docs/optimizers.md)", changed
            return


def _frozen(request: Request) -> Iterator[tuple[str, Request]]:
    """Train adapters only, or quantize frozen weights: the largest base that fits."""
    s = request.semantics
    is_tiled = s.mlp_tile_tokens is not None and "mlp_tile_tokens" not in request.free
    if request.fixed is not None or is_tiled:
        return
    lora = Train(lora=Lora(), projector=s.train.projector)
    prefix, train = ("", s.train) if s.train.lora else (f"--train lora{',projector' * lora.projector} ", lora)
    form = published(request.model) or "bf16"  # else a copy in bf16 is needed
    bases = BASES if form == "bf16" else [base for base in ("bf16", form) if is_readable(form, base)]
    for base in [base for base in bases if s.train.all or base not in (s.base, "fp8-rows")]:
        is_fp8 = base == "fp8-rows"
        untiled = replace(request, semantics=replace(s, mlp_tile_tokens=None))
        changed = _changed(untiled, train=train, base=base, gradient_dtype="fp32", products="fp8" if is_fp8 else "compute")
        if changed.fits() and (request.profile.has_fp8 or not is_fp8):
            suffix = " --compute fp8" if is_fp8 else " without --compute fp8" if s.products == "fp8" else ""
            words = f"{prefix}--base {base}" if base != "bf16" or not prefix else prefix.strip()
            yield f"{words}{suffix}", changed
            return


def in_fp8(request: Request) -> Request | None:
    """Change products to FP8: those of bf16 weights, or under adapters those of a frozen base of 8 or 16 bits, with that base. None
    if the machine or the model has no FP8 products, if its weights are not read so, or if it does not fit."""
    s, has_fp8 = request.semantics, request.profile.has_fp8
    has_adapters = s.train.lora is not None
    if (
        s.base not in ("bf16", *("int8", "fp8") * has_adapters)
        or (s.products, s.compute_dtype) != ("compute", "bf16")
        or not (has_fp8 and is_readable(published(request.model) or "bf16", "fp8-rows" if has_adapters else "bf16"))
    ):
        return None
    with suppress(WorkloadError):  # no such linear layers
        changed = _changed(request, **IN_FP8) if has_adapters else _changed(request, products="fp8")
        return changed if changed.fits() else None
    return None


def tokens_per_s_in_fp8(answer: SearchResult, profile: Profile) -> float | None:
    """Estimate the speed of a found plan's step with FP8 products, with its sizes and without a search: that of its own policy, or
    of a greedy one. None if the plan cannot have them, or if its policy was given."""
    plan = answer.plan
    changed = in_fp8(Request(plan.model, plan.semantics, profile, None, frozenset())) if answer.certificate.n_families else None
    same = None if changed is None else replace(changed, fixed=plan.policy)
    return max((one.tokens_per_s() for one in (changed, same) if one is not None and one.fits()), default=None)


def _smaller_micro_batch(request: Request) -> Iterator[tuple[str, Request]]:
    """Smaller micro-batches, limited to those for which one boundary fits the device."""
    s, workload = request.semantics, build_workload(request.model, request.semantics)
    sequence_bytes = workload.blocks[0].boundary_bytes // s.micro_batch
    limit = min(s.micro_batch, int(request.profile.device.memory_bytes.value) // sequence_bytes + 1)
    for n in candidates(s):
        is_long = too_long(workload, replace(s, micro_batch=n), policy_of(request.fixed, s, workload))
        if -(-s.batch_size // tuning.MOST_MICRO_BATCHES) <= n < limit and not is_long:
            yield f"--micro-batch {n}", _changed(request, micro_batch=n)


def _halved(request: Request, field: str, option: str) -> Iterator[tuple[str, Request]]:
    """Shorter sequences, or smaller batches if the micro-batch is free. Nothing if the smallest does not fit."""
    s, of_batch = request.semantics, field == "batch_size"
    if of_batch and ("micro_batch" not in request.free or request.fixed is not None):
        return
    rows = s.objective.rows_each
    sizes = [n for k in range(1, MOST_HALVINGS) if (n := getattr(s, field) >> k) and not (of_batch and n % (s.sum_groups * rows))]
    if sizes and _changed(request, **{field: sizes[-1]}).fits():
        yield from ((f"{option} {n * s.ranks if of_batch else n}", _changed(request, **{field: n})) for n in sizes)


def _changed(request: Request, **changes: Any) -> Request:
    """Change semantics; sizes that are free and not changed are chosen again."""
    free, semantics = request.free - changes.keys(), replace(request.semantics, **changes)
    changed = replace(request, semantics=semantics, free=free)
    return replace(changed.resized() if free else changed, free=request.free)


def _with_memory(request: Request, needs: Footprint) -> Iterator[tuple[str, Request]]:
    """Add the missing memory, rounded up to whole GB (to tens above 100 GB). For a fixed policy, also try smaller micro-batches.

    In a machine with one memory, the other side gets the rest. Yield nothing if the machine does not support so much.
    """
    sizes = {"device": _rounded_up(needs.device_peak_bytes)} if needs.short_device_bytes else {}
    sizes |= {"host": _rounded_up(needs.host_peak_bytes)} if needs.short_host_bytes else {}
    if (pool := request.profile.device.pool_bytes) is not None:
        remaining = int(pool.value) - sum(sizes.values())
        sizes = {place: sizes.get(place, remaining // GB * GB) for place in ("device", "host")}
        if remaining < 0 or min(sizes.values()) <= 0:
            return
    elif not request.profile.takes(sizes.get("host", 0)):
        return
    of_all = {"device": 1, "host": request.semantics.ranks // request.profile.n_hosts}  # the ranks of a host have equal shards
    text = " ".join(f"--{place}-memory {n // GB * of_all[place]}GB" for place, n in sizes.items())
    larger = _changed(replace(request, profile=request.profile.with_memory(sizes.get("device"), sizes.get("host"))))
    yield text, larger
    for n in candidates(request.semantics) if request.fixed is not None and "micro_batch" in request.free else ():
        if n < larger.semantics.micro_batch:
            yield f"{text} --micro-batch {n}", _changed(larger, micro_batch=n)


def _rounded_up(n_bytes: int) -> int:
    step = 10 * GB if n_bytes > 100 * GB else GB
    return -(-n_bytes // step) * step
