"""Predicted time of forward-only passes: log-probabilities in the arenas of a training plan, and a vision tower's features."""

from dataclasses import dataclass

from penstock.hwprofiles.components import AttentionCall
from penstock.planner.lower.forward import forward_plan, most_micro_batches
from penstock.planner.model.vision import VisionTower
from penstock.runtime.plan import Kind, Plan
from penstock.runtime.plan.workload import ITEM_BYTES, Dtype

from .cost import CostModel
from .region import Region
from .simulate import simulate

KERNELS_OF_A_LAYER = 30  # products, norms, rotary embedding, attention, activation and residuals, unfused


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


def tower_s(tower: VisionTower, dtype: Dtype, cost: CostModel) -> float:
    """Seconds of a vision tower's forward for one image, alone on the device, without decoding the image."""
    products_s = sum(cost.product_s(dtype, m) for m in tower.matmuls)
    rate = cost.profile.attention_rate(AttentionCall(dtype, tower.n_patches, tower.head_dim, False, causal=False), False)
    attention_flop = tower.flop - sum(m.flop for m in tower.matmuls)
    n_kernels = len(tower.n_visible) * KERNELS_OF_A_LAYER
    return products_s + attention_flop / rate.value + cost.moving_s(tower.pointwise_elements * ITEM_BYTES[dtype], n_kernels)
