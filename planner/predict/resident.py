"""Baseline without offload: estimated step time of training with all state on the device, within some per cent.

Weights, master weights, moments and gradients remain on the device. Ranks shard them as in FSDP2 (masters, moments and fp32
gradients: 16 bytes a parameter), and cast weights from masters when a block is gathered. Micro-batches run one after another at the
costs of the plan's ops, layers save as much for backward as memory allows, and AdamW is one pass over its state. No estimate is
made if host and device share one memory (a CPU, or a pool in two parts).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Kind, Op, Policy, Setup, saves
from penstock.runtime.plan.optimizer import STORED_BYTES
from penstock.runtime.plan.workload import ITEM_BYTES, Saved

from .compute_time import FP32_BYTES
from .cost import CostModel, micro_batch_groups
from .memory import Footprint, short_of

ONE_POOL = "pool"  # source name in a profile if device and host memory are two parts of one


@dataclass(frozen=True, slots=True)
class Resident:
    """Step time with all state on the device, or the missing memory."""

    step_s: float | None  # None: it does not fit
    needs: Footprint  # device bytes; of an estimate, with the cheapest recompute tier
    is_estimate: bool = True  # False: a policy of the search space, lowered and simulated

    def to_json(self) -> dict[str, Any]:
        step = {"does_not_fit": short_of(self.needs)} if self.step_s is None else {"step_s": self.step_s}
        return step | ({"estimated": True} if self.is_estimate else {})


def shares_memory(profile: Profile) -> bool:
    """True if device and host memory are one."""
    return profile.device.kind == "cpu" or ONE_POOL in profile.sources


def resident_in_parts(plan: Setup, cost: CostModel) -> Resident | None:
    """Estimate the baseline with the plan's micro-batch, halved until it fits."""
    result, smaller = resident(plan, cost), plan.semantics.micro_batch // 2
    if result is not None and result.step_s is None and smaller and plan.semantics.batch_size % smaller == 0:
        semantics = replace(plan.semantics, micro_batch=smaller)
        halved = resident_in_parts(replace(plan, semantics=semantics, workload=build_workload(plan.model, semantics)), cost)
        return result if halved is None or halved.step_s is None else halved
    return result


def resident(plan: Setup, cost: CostModel) -> Resident | None:
    """Estimate the baseline for the plan's semantics, ignoring its policy; None if device and host share one memory."""
    if shares_memory(cost.profile):
        return None
    semantics, blocks, device = plan.semantics, plan.workload.blocks, cost.profile.device
    weight, master = ITEM_BYTES[semantics.compute_dtype], STORED_BYTES[semantics.master_dtype]
    summed = semantics.n_micro_batches > 1 or semantics.ranks > 1
    gradient_bytes = sum(b.trained_elements for b in blocks) * (FP32_BYTES if summed else ITEM_BYTES[semantics.gradient_dtype])
    kept_bytes = semantics.state_bytes  # per parameter, read and written by an update
    weight_bytes = weight if weight != master and semantics.ranks == 1 else 0  # compute weight, written by the update
    # Gradients are read twice, by the norm and by the update
    updating_bytes = 2 * gradient_bytes + round(plan.workload.n_trained * (2 * kept_bytes + weight_bytes))
    updating_s = cost.moving_s(updating_bytes, 2 * sum(len(b.trained) for b in blocks)) / semantics.ranks
    state_bytes = round(plan.workload.n_trained * (kept_bytes + weight_bytes)) + gradient_bytes
    # Gathered buffers: weights and gradient of the largest block, its gradient in fp32 for reduce-scatter, the next layer's weights
    largest, layer = (max(b.trained_elements for b in of_blocks) for of_blocks in (blocks, blocks[1:-1]))
    together_bytes = (2 * weight + FP32_BYTES) * largest + weight * layer
    frozen_bytes = sum(plan.frozen_bytes(b) for b in range(len(blocks)) if not plan.workload.trains_all)
    needs = {
        "state": state_bytes // semantics.ranks + frozen_bytes,
        "gathered blocks": together_bytes if semantics.ranks > 1 else 0,
        "process": round(device.context_bytes.value + (device.workspace_bytes.value if device.workspace_bytes else 0.0)),
    }
    has_bytes, tier_costs = int(device.memory_bytes.value), list(tiers(plan, cost))
    again_s = _recompute_s(tier_costs, has_bytes - sum(needs.values()))
    needs["activations"] = min(n_bytes for n_bytes, _ in tier_costs)
    exchanging_s = 0.0  # per micro-batch and block: a reduce-scatter, and all-gathers (two of a layer, else one)
    for b in range(len(blocks)) if semantics.ranks > 1 else ():
        n_elements, n_times = plan.gradient_elements(b), 2 if 0 < b < len(blocks) - 1 else 1
        exchanging_s += n_times * cost.collective(semantics.ranks, n_elements * weight, "all_gather").uncontended_s
        exchanging_s += cost.collective(semantics.ranks, n_elements * ITEM_BYTES[plan.sum_dtype(b)], "reduce_scatter").uncontended_s
    exchanging_s *= semantics.n_micro_batches
    step_s = None if again_s is None else max(_computing_s(plan, cost) + again_s, exchanging_s) + updating_s
    return Resident(step_s, Footprint(needs, {}, has_bytes, int(cost.profile.host.memory_bytes.value)))


def tiers(plan: Setup, cost: CostModel) -> Iterator[tuple[int, float]]:
    """Yield, for each recompute tier of all layers, activation bytes of a micro-batch and recompute seconds of a step."""
    embedding, *layers, head = plan.workload.blocks
    n_micro_batches = plan.semantics.batch_size / plan.semantics.micro_batch
    for saved in Saved:
        layer_tiers = [again for layer in layers if (again := layer.recompute(saved)) is not None]
        if len(layer_tiers) == len(layers):
            transient_bytes = max(embedding.transient_bytes, head.transient_bytes, *(t.transient_bytes for t in layer_tiers))
            kept_bytes = embedding.boundary_bytes + embedding.side_bytes
            kept_bytes += sum(a.boundary_bytes + b.saved_bytes for a, b in zip(layers, layer_tiers, strict=True))
            again_s = sum(cost.recompute_s(layer, again, plan.semantics) for layer, again in zip(layers, layer_tiers, strict=True))
            yield kept_bytes + transient_bytes, n_micro_batches * again_s


def _recompute_s(ways: list[tuple[int, float]], free_bytes: float) -> float | None:
    """Minimise recompute seconds over mixtures of two tiers (linear interpolation); None if no tier fits."""
    fitting, larger = ([tier for tier in ways if (tier[0] <= free_bytes) is fits] for fits in (True, False))
    seconds = [again_s for _, again_s in fitting]
    for (small_bytes, small_s), (large_bytes, large_s) in product(fitting, larger):
        seconds.append(small_s + (large_s - small_s) * (free_bytes - small_bytes) / (large_bytes - small_bytes))
    return min(seconds, default=None)


def _computing_s(plan: Setup, cost: CostModel) -> float:
    """Seconds of forward, loss and backward of all micro-batches, with gradient accumulation and without recompute."""
    n, head, first = plan.semantics.n_micro_batches, len(plan.workload.blocks) - 1, plan.workload.first_trained
    keeping = replace(plan, policy=Policy(accumulation_group=n, save=saves(all=range(1, head))))
    kinds = [(Kind.FORWARD, b) for b in range(head)] + [(Kind.LOSS, head)] + [(Kind.BACKWARD, b) for b in range(first, head)]
    unpacking_s = sum(cost.demand(plan, Op(Kind.DEQUANTISE, b)).alone_s for b in range(head) if plan.unpacks(b))
    counts = micro_batch_groups(plan.semantics, range(n))
    demands = ((count, cost.demand(keeping, Op(kind, b, m))) for kind, b in kinds for m, count in counts)
    return 2 * n * unpacking_s + sum(count * demand.alone_s for count, demand in demands)
