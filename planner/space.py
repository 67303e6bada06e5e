"""Which policies are there to choose from?

A small space that can be searched whole, and the schedules of four known systems. A baseline here is that system's *schedule*
under the user's own semantics, as far as the plan language says it today; the bits of the result are the same for all.
"""

from collections.abc import Iterator
from dataclasses import replace

from hwprofiles.schema import Profile
from runtime.plan import Plan, Policy, Semantics, Update
from runtime.workload import Model, Workload

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
    for base in _without_keep(semantics):
        plan = frame(model, workload, semantics, base)
        needs = footprint(plan, profile)
        yield plan, needs
        if needs.fits:
            most = _most_kept(plan, needs)
            for n_kept in sorted({most, most // 2} - {0}, reverse=True):
                last = tuple(range(workload.n_layers + 1 - n_kept, workload.n_layers + 1))
                keeping = frame(model, workload, semantics, replace(base, keep_blocks=last))
                yield keeping, footprint(keeping, profile)


def _without_keep(semantics: Semantics) -> Iterator[Policy]:
    updates = [Update.DEFERRED, Update.BARRIER, *([Update.EAGER] if eager_is_legal(semantics) else [])]
    for group in group_sizes(semantics.n_micro_batches):
        for update in updates:
            for depth in PREFETCH_DEPTHS:
                for n_slots in GRADIENT_SLOTS:
                    for late in OFFLOAD_LATE_BLOCKS:
                        if late < n_slots and (late == 0 or group == semantics.n_micro_batches):
                            yield Policy(depth, n_slots, late, group, (), update)


def group_sizes(n_micro_batches: int) -> list[int]:
    """Layer-major, row-major, and the largest divisors between them."""
    divisors = [d for d in range(n_micro_batches // 2, 1, -1) if n_micro_batches % d == 0]
    return sorted({n_micro_batches, *divisors[:N_BETWEEN_GROUPS], 1}, reverse=True)


def _most_kept(plan: Plan, needs: Footprint) -> int:
    """How many of the last layers can keep their activations: the last are needed first."""
    left = needs.device_memory_bytes - needs.device_peak_bytes
    for n_kept, block in enumerate(reversed(plan.workload.blocks[1:-1])):
        left -= plan.policy.group_micro_batches * block.kept_bytes
        if left < 0:
            return n_kept
    return plan.workload.n_layers
