"""Forward pass that writes log-probabilities: its time over the arenas of a training plan, and a bound on that."""

from dataclasses import dataclass

from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.runtime.plan import Kind, Plan
from penstock.runtime.plan.region import Region

from .cost import CostModel
from .simulate import simulate


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """As many sequences as the plan's slots for activations have room for at a time."""

    n_sequences: int
    seconds: float
    bound_s: float  # of any schedule, by these costs: the device computes all, and each block that is not there is copied once


def forward_pass(plan: Plan, cost: CostModel, region: Region) -> ForwardPass:
    """That of a plan."""
    forward = forward_plan(plan, most_micro_batches(plan))
    demands = cost.demands(forward)
    computed_s = sum(demand.alone_s for op, demand in zip(forward.ops, demands, strict=True) if op.kind is Kind.FORWARD)
    copied_s = {op.block: demand.alone_s for op, demand in zip(forward.ops, demands, strict=True) if op.kind is Kind.LOAD}
    # One that is resident comes with the pass that begins a run of them
    streamed_s = sum(s for block, s in copied_s.items() if block not in plan.policy.resident_blocks)
    seconds = simulate(forward, demands, region).step_s
    return ForwardPass(forward.semantics.batch_size, seconds, max(computed_s, streamed_s))
