"""Predicted time of a forward-only pass (log-probabilities) in the arenas of a training plan, and its lower bound."""

from dataclasses import dataclass

from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.runtime.plan import Kind, Plan

from .cost import CostModel
from .region import Region
from .simulate import simulate


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Prediction for the largest number of sequences that fit the plan's activation slots."""

    n_sequences: int
    seconds: float
    bound_s: float  # lower bound of any schedule: maximum of total compute and one upload of each non-resident block


def forward_pass(plan: Plan, cost: CostModel, region: Region) -> ForwardPass:
    """Simulate the forward pass with the largest group of micro-batches."""
    forward = forward_plan(plan, most_micro_batches(plan))
    demands = cost.demands(forward)
    computed_s = sum(demand.alone_s for op, demand in zip(forward.ops, demands, strict=True) if op.kind is Kind.FORWARD)
    copied_s = {op.block: demand.alone_s for op, demand in zip(forward.ops, demands, strict=True) if op.kind is Kind.LOAD}
    # Resident blocks are uploaded in the first pass of a run
    streamed_s = sum(s for block, s in copied_s.items() if block not in plan.policy.resident_blocks)
    seconds = simulate(forward, demands, region).step_s
    return ForwardPass(forward.semantics.batch_size, seconds, max(computed_s, streamed_s))
