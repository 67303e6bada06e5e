"""Which policies are there to choose from?

A small space that can be searched whole, and the schedules of four known systems. A baseline here is that system's *schedule*
under the user's own semantics, as far as the plan language says it today; the bits of the result are the same for all.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from hwprofiles.schema import Profile
from runtime.plan import Plan, Policy, Semantics, Update
from runtime.workload import ITEM_BYTES, Model, Workload

from .memory import Footprint, footprint, frame

BASELINES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")
PREFETCH_DEPTHS = (3, 2, 1)
GRADIENT_SLOTS = (3, 2, 1)
OFFLOAD_LATE_BLOCKS = (0, 1)
N_BETWEEN_GROUPS = 2  # group sizes tried between row-major and layer-major


def baseline(name: str, semantics: Semantics) -> Policy:
    """The schedule of a known system; the rest of what makes it that system (dtypes, layout, serial tails) is left out."""
    match name:
        case "megatrain":
            # The next layer uploads while one computes; gradients leave during backward; the optimizer after it.
            return Policy(prefetch_depth=1, gradient_slots=2)
        case "megatrain-plus":
            # The same with weights as views of the upload buffer, which frees memory for a third.
            return Policy(prefetch_depth=2, gradient_slots=2)
        case "slideformer":
            # Each layer's optimizer as its gradient arrives, which is exact only without a global norm; three upload slots.
            return Policy(prefetch_depth=2, gradient_slots=2, update=Update.EAGER if eager_is_legal(semantics) else Update.BARRIER)
        case "zero3-offload":
            # One gradient buffer: the next backward waits until the last gradient has left.
            return Policy(prefetch_depth=1, gradient_slots=1)
        case _:
            raise AssertionError(f"no baseline {name!r}")


def eager_is_legal(semantics: Semantics) -> bool:
    """Whether an update may run before the global norm is known."""
    return semantics.clip_norm is None and semantics.on_nonfinite == "stop"


def policies(model: Model, workload: Workload, semantics: Semantics, profile: Profile) -> Iterator[tuple[Plan, Footprint]]:
    """Every policy of the space as a plan without ops, and what it needs; those that keep activations only where they fit."""
    every = (p for base in _without_keep(semantics) for p in _stored_and_spilled(semantics, workload.n_layers, base))
    for base in every:
        plan = frame(model, workload, semantics, base)
        needs = footprint(plan, profile)
        yield plan, needs
        for richer in _with_spare_memory(plan, needs) if needs.fits else ():
            using = frame(model, workload, semantics, richer)
            yield using, footprint(using, profile)


def _without_keep(semantics: Semantics) -> Iterator[Policy]:
    updates = [Update.DEFERRED, Update.BARRIER, *([Update.EAGER] if eager_is_legal(semantics) else [])]
    for group in group_sizes(semantics.n_micro_batches):
        for update in updates:
            for depth in PREFETCH_DEPTHS:
                for n_slots in GRADIENT_SLOTS:
                    for late in OFFLOAD_LATE_BLOCKS:
                        if late < n_slots and (late == 0 or group == semantics.n_micro_batches):
                            yield Policy(depth, n_slots, late, group, (), update)


def _stored_and_spilled(semantics: Semantics, n_layers: int, policy: Policy) -> Iterator[Policy]:
    """The policy with each way to store masters, and with boundaries on the device or, but for the last two, on the host."""
    splits = (semantics.compute_dtype, semantics.master_dtype) == ("bf16", "fp32")
    for storage in ("mirrored", "split") if splits else ("mirrored",):
        for spill in ((), tuple(range(n_layers - 1))):
            yield replace(policy, storage=storage, spill_blocks=spill)


def group_sizes(n_micro_batches: int) -> list[int]:
    """Layer-major, row-major, and the largest divisors between them."""
    divisors = [d for d in range(n_micro_batches // 2, 1, -1) if n_micro_batches % d == 0]
    return sorted({n_micro_batches, *divisors[:N_BETWEEN_GROUPS], 1}, reverse=True)


def _with_spare_memory(plan: Plan, needs: Footprint) -> Iterator[Policy]:
    """What spare device memory can be used for: activations of the last layers, which are needed first, and weights of the first,
    which are needed last and so are never still there; all of one, or half and half."""
    spare = needs.device_memory_bytes - needs.device_peak_bytes
    n_layers, group, item = plan.workload.n_layers, plan.policy.group_micro_batches, ITEM_BYTES[plan.semantics.compute_dtype]
    layers = plan.workload.blocks[1:-1]
    spilled = plan.policy.spill_blocks
    can_keep = 0 if spilled else n_layers
    most_kept = min(_how_many(spare, [group * block.kept_bytes for block in reversed(layers)]), can_keep)
    for n_kept in sorted({most_kept, most_kept // 2} - {0}, reverse=True):
        keep = tuple(range(n_layers + 1 - n_kept, n_layers + 1))
        yield replace(plan.policy, keep_blocks=keep)
    left = spare - sum(group * block.kept_bytes for block in layers[n_layers - most_kept // 2 :])
    for n_kept, memory in {0: spare, most_kept // 2: left}.items():
        n_resident = _how_many(memory, [block.slot_elements * item for block in layers])
        if n_resident:
            keep = tuple(range(n_layers + 1 - n_kept, n_layers + 1))
            yield replace(plan.policy, keep_blocks=keep, resident_blocks=tuple(range(1, n_resident + 1)))


def _how_many(memory_bytes: int, each_bytes: list[int]) -> int:
    """How many of these fit, taken in order."""
    for n, total_bytes in enumerate(accumulate(each_bytes)):
        if total_bytes > memory_bytes:
            return n
    return len(each_bytes)
