"""An estimate of training with all state on the device, to hold plans against; within some per cent.

Weights, masters, moments and gradients stay on the device. Of several ranks each has an equal part, as FSDP2 has it: masters,
moments and fp32 gradients, 16 bytes a parameter; weights are cast from masters when a block is gathered. Micro-batches run one
after another, at the costs of the plan's ops; layers keep for backward as much as there is memory for; AdamW is one pass over its
state. Where host and device are one memory (a CPU, or one pool cut in two) there is no such estimate.
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

from .computing import FP32_BYTES
from .cost import CostModel
from .memory import Footprint, short_of

ONE_POOL = "pool"  # the source that a profile names for both memories, if they are two parts of one


@dataclass(frozen=True, slots=True)
class Resident:
    """A step with all state on the device, or how much memory is missing."""

    step_s: float | None  # None: it does not fit
    needs: Footprint  # of the device, with the least that layers can keep

    def to_json(self) -> dict[str, Any]:
        return {"does_not_fit": short_of(self.needs)} if self.step_s is None else {"step_s": self.step_s}


def shares_memory(profile: Profile) -> bool:
    """Whether the device's memory is a part of the host's."""
    return profile.device.kind == "cpu" or ONE_POOL in profile.sources


def resident_in_parts(plan: Setup, cost: CostModel) -> Resident | None:
    """The same with the plan's micro-batch, or the largest of half of it, half of that and so on that fits."""
    found, of = resident(plan, cost), plan.semantics
    if found is not None and found.step_s is None and of.micro_batch > 1 and of.batch_size % (smaller := of.micro_batch // 2) == 0:
        of = replace(of, micro_batch=smaller)
        halved = resident_in_parts(replace(plan, semantics=of, workload=build_workload(plan.model, of)), cost)
        return found if halved is None or halved.step_s is None else halved
    return found


def resident(plan: Setup, cost: CostModel) -> Resident | None:
    """The step of the plan's semantics with all state on the device, whatever the plan's policy; None: one memory."""
    if shares_memory(cost.profile):
        return None
    of, blocks, device = plan.semantics, plan.workload.blocks, cost.profile.device
    weight, master, summed = ITEM_BYTES[of.compute_dtype], STORED_BYTES[of.master_dtype], of.n_micro_batches > 1 or of.ranks > 1
    gradient_bytes = sum(b.trained_elements for b in blocks) * (FP32_BYTES if summed else ITEM_BYTES[of.gradient_dtype])
    kept_bytes = of.state_bytes  # of a parameter, which an update reads and writes
    weight_bytes = weight if weight != master and of.ranks == 1 else 0  # that it writes beside
    # The update reads gradients and state, as the norm reads gradients before it.
    updating_bytes = 2 * gradient_bytes + round(plan.workload.n_trained * (2 * kept_bytes + weight_bytes))
    updating_s = cost.moving_s(updating_bytes, 2 * sum(len(b.trained) for b in blocks)) / of.ranks
    state_bytes = round(plan.workload.n_trained * (kept_bytes + weight_bytes)) + gradient_bytes
    # The largest block, its gradient, and that in fp32 on its way to the others; and the next one's weights
    largest, layer = (max(b.trained_elements for b in of_blocks) for of_blocks in (blocks, blocks[1:-1]))
    together_bytes = (2 * weight + FP32_BYTES) * largest + weight * layer
    needs = {
        "state": state_bytes // of.ranks + sum(plan.frozen_bytes(b) for b in range(len(blocks)) if not plan.workload.trains_all),
        "blocks put together": together_bytes if of.ranks > 1 else 0,
        "process": round(device.context_bytes.value + (device.workspace_bytes.value if device.workspace_bytes else 0.0)),
    }
    has_bytes, found = int(device.memory_bytes.value), list(tiers(plan, cost))
    again_s = _recompute_s(found, has_bytes - sum(needs.values()))
    needs["activations"] = min(n_bytes for n_bytes, _ in found)
    exchanging_s = 0.0  # in every micro-batch two all-gathers and a reduce-scatter of every layer, and one of each for the others
    for b in range(len(blocks)) if of.ranks > 1 else ():
        n_elements, n_times = plan.gradient_elements(b), 2 if 0 < b < len(blocks) - 1 else 1
        exchanging_s += n_times * cost.together(of.ranks, n_elements * weight, "all_gather").uncontended_s
        exchanging_s += cost.together(of.ranks, n_elements * ITEM_BYTES[plan.sum_dtype(b)], "reduce_scatter").uncontended_s
    exchanging_s *= of.n_micro_batches
    step_s = None if again_s is None else max(_computing_s(plan, cost) + again_s, exchanging_s) + updating_s
    return Resident(step_s, Footprint(needs, {}, has_bytes, int(cost.profile.host.memory_bytes.value)))


def tiers(plan: Setup, cost: CostModel) -> Iterator[tuple[int, float]]:
    """Each way for all layers to have what their backward needs: bytes of a micro-batch's activations, seconds of recompute."""
    embedding, *layers, head = plan.workload.blocks
    n_micro_batches = plan.semantics.batch_size / plan.semantics.micro_batch
    for saved in Saved:
        kept = [again for layer in layers if (again := layer.recompute(saved)) is not None]
        if len(kept) == len(layers):
            transient_bytes = max(embedding.transient_bytes, head.transient_bytes, *(again.transient_bytes for again in kept))
            kept_bytes = embedding.boundary_bytes + embedding.side_bytes
            kept_bytes += sum(a.boundary_bytes + b.saved_bytes for a, b in zip(layers, kept, strict=True))
            again_s = sum(cost.recompute_s(*each, plan.semantics) for each in zip(layers, kept, strict=True))
            yield kept_bytes + transient_bytes, n_micro_batches * again_s


def _recompute_s(ways: list[tuple[int, float]], room_bytes: float) -> float | None:
    """Seconds of recompute where some layers keep what one tier keeps, and the others what another does; None: no tier fits."""
    lean, rich = ([tier for tier in ways if (tier[0] <= room_bytes) is fits] for fits in (True, False))
    found = [again_s for _, again_s in lean]
    for (lean_bytes, lean_s), (rich_bytes, rich_s) in product(lean, rich):
        found.append(lean_s + (rich_s - lean_s) * (room_bytes - lean_bytes) / (rich_bytes - lean_bytes))
    return min(found, default=None)


def _computing_s(plan: Setup, cost: CostModel) -> float:
    """Forward, loss and backward of every micro-batch, gradients summed, nothing recomputed."""
    n, head, first = plan.semantics.n_micro_batches, len(plan.workload.blocks) - 1, plan.workload.first_trained
    keeping = replace(plan, policy=Policy(accumulation_group=n, save=saves(all=range(1, head))))
    kinds = [(Kind.FORWARD, b) for b in range(head)] + [(Kind.LOSS, head)] + [(Kind.BACKWARD, b) for b in range(first, head)]
    unpacking_s = sum(cost.demand(plan, Op(Kind.DEQUANTISE, b)).alone_s for b in range(head) if plan.unpacks(b))
    each = ((count, cost.demand(keeping, Op(kind, b, m))) for kind, b in kinds for m, count in plan.micro_batch_groups(range(n)))
    return 2 * n * unpacking_s + sum(count * demand.alone_s for count, demand in each)
