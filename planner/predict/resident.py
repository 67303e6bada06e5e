"""How fast would training be with all its state on the device?

Where it fits: weights, masters, moments and gradients stay there, and AdamW works there in one pass. No schedule of ours does just
that, so it is no policy but a figure to hold plans against, under the same semantics (the micro-batch too), kernels and costs:

- Work is that of the cost model: forward, backward and loss of each micro-batch, recompute, summing gradients. Micro-batches come
  one after another, so activations are those of one. One queue does everything: no op is handed from lane to lane, and only what
  each kernel takes to launch is added.
- The norm reads every gradient once. AdamW is one pass that reads gradient, master and moments and writes master, moments and
  weight, with a launch for each tensor: assumed, at the rate of eager pointwise kernels, which is what the norm has too.
- Memory holds, from first to last, the weights in the dtype of computing, masters if they have another, two fp32 moments, all
  gradients (the fp32 sums themselves where there are several micro-batches), and each layer's input; besides, what plans book too:
  the block being computed, documents, workspaces, context. A tied weight is there once and has two gradients, as in the semantics.
- Each layer keeps for its backward what saves most recompute for its bytes, in the memory that is left.

Of several ranks each has an equal part of the state, as FSDP2 has it: what a block needs comes together for every forward and every
backward of a micro-batch, its gradient is exchanged after each, both beside the computing; two blocks' weights and one's gradient,
fp32, are whole at a time.

Where host and device are one memory, a CPU or one pool cut in two, all state is where the device reaches it anyway, and "on the
device" says only how the pool was cut: there is no such figure there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwprofiles.schema import Profile
from runtime.plan import Kind, Op, Policy, Setup, saves
from runtime.plan.footprint import document_bytes
from runtime.plan.workload import ITEM_BYTES, Block, Saved, Workload
from runtime.units import show_seconds

from .cost import FP32_BYTES, CostModel
from .memory import Footprint, frame, short_of

MOST_SIZES = 16  # of the largest block being computed that are tried: more than the layers of any known model have
ONE_POOL = "pool"  # the source that a profile names for both memories, if they are two parts of one


@dataclass(frozen=True, slots=True)
class Resident:
    """A step with all state on the device: how long it takes, and what each layer keeps; or what is missing."""

    step_s: float | None  # None: it does not fit
    needs: Footprint  # of the device; where it does not fit, with the least that layers can keep
    saved: tuple[Saved, ...]  # layer by layer

    def to_json(self) -> dict[str, Any]:
        return {"does_not_fit": short_of(self.needs)} if self.step_s is None else {"step_s": self.step_s}


@dataclass(frozen=True, slots=True)
class Tier:
    """One way for a layer to have what its backward needs."""

    saved: Saved
    kept_bytes: int  # from forward to backward
    transient_bytes: int  # while its backward is computed
    again_s: float  # of computing again what was not kept, for all micro-batches


def advice(resident_s: float | None, step_s: float) -> str | None:
    """What to tell somebody whose plan takes so long a step; None where streaming is no slower, or there is no choice."""
    if resident_s is None or resident_s >= step_s:
        return None
    return (
        f"all training state fits this device: keeping it there would take about {show_seconds(resident_s)} a step, "
        f"{step_s / resident_s:.2f} times as fast; Penstock streams it"
    )


def shares_memory(profile: Profile) -> bool:
    """Whether the device's memory is a part of the host's."""
    return profile.device.kind == "cpu" or ONE_POOL in profile.sources


def resident(plan: Setup, cost: CostModel) -> Resident | None:
    """The fastest step of the plan's semantics with all state on the device; of its policy nothing matters. None: one memory."""
    profile, semantics, layers = cost.profile, replace(plan.semantics, sum_groups=1), plan.workload.blocks[1:-1]
    plan = replace(plan, semantics=semantics)  # nobody else sums in groups
    if shares_memory(profile):
        return None
    # What one micro-batch asks of memory: its boundaries, the block being computed, documents
    alone = frame(plan.model, plan.workload, replace(semantics, batch_size=semantics.micro_batch, ranks=1), Policy())
    tiers = [list(_tiers(plan, alone, b, cost)) for b in range(1, len(layers) + 1)]
    fixed = _fixed_bytes(plan, alone, profile)
    room_bytes = int(profile.device.memory_bytes.value) - sum(fixed.values())
    chosen = fill(tiers, alone.other_transient_bytes, room_bytes)
    shown = chosen or leanest(tiers, alone.other_transient_bytes)
    needs = fixed | {
        "kept activations": sum(tier.kept_bytes for tier in shown),
        "block being computed": max(alone.other_transient_bytes, *(tier.transient_bytes for tier in shown)),
    }
    step_s = None
    if chosen is not None:
        computing_s = max(_computing_s(plan, cost) + again_s(chosen), _exchanging_s(plan, cost))
        step_s = computing_s + _updating_s(plan, cost) / semantics.ranks
    has_bytes = int(profile.device.memory_bytes.value), int(profile.host.memory_bytes.value)
    return Resident(step_s, Footprint(needs, {}, *has_bytes), tuple(tier.saved for tier in shown))


def fill(layers: Sequence[Sequence[Tier]], vocab_bytes: int, room_bytes: int) -> list[Tier] | None:
    """One tier for each layer, so that little is computed again in the room there is; None: not even the leanest fit.

    The largest block being computed takes room too, so the best is taken of every size that it may have.
    """
    solved = (_upgraded(fitting, room_bytes - most_bytes) for most_bytes, fitting in _by_transient(layers, vocab_bytes))
    return min((tiers for tiers in solved if tiers is not None), key=again_s, default=None)


def again_s(tiers: Sequence[Tier]) -> float:
    """Seconds of what a step computes again."""
    return sum(tier.again_s for tier in tiers)


def _upgraded(layers: Sequence[Sequence[Tier]], room_bytes: int) -> list[Tier] | None:
    """Every layer at its leanest, then step by step to what saves most seconds a byte, while there is room for a step.

    A multiple-choice knapsack, solved greedily over convex hulls: it loses less than the one step that was first too large.
    """
    chosen = [_least(tiers) for tiers in layers]
    left_bytes = room_bytes - sum(tier.kept_bytes for tier in chosen)
    if left_bytes < 0:
        return None
    steps = [(_rate(*step), i, *step) for i, tiers in enumerate(layers) for step in _steps(tiers)]
    for _, i, before, after in sorted(steps, key=lambda step: (-step[0], step[1])):
        if chosen[i] is before and after.kept_bytes - before.kept_bytes <= left_bytes:
            chosen[i] = after
            left_bytes -= after.kept_bytes - before.kept_bytes
    return chosen


def _steps(tiers: Sequence[Tier]) -> Iterator[tuple[Tier, Tier]]:
    """From the leanest tier along the convex hull: each step saves fewer seconds a byte than the one before."""
    at = _least(tiers)
    while further := [tier for tier in tiers if tier.kept_bytes > at.kept_bytes and tier.again_s < at.again_s]:
        best = max(further, key=lambda tier: _rate(at, tier))
        yield at, best
        at = best


def _rate(before: Tier, after: Tier) -> float:
    """Seconds saved per byte."""
    return (before.again_s - after.again_s) / (after.kept_bytes - before.kept_bytes)


def _least(tiers: Sequence[Tier]) -> Tier:
    return min(tiers, key=lambda tier: (tier.kept_bytes, tier.again_s))


def leanest(layers: Sequence[Sequence[Tier]], vocab_bytes: int) -> list[Tier]:
    """The tiers that need least room."""
    lean = ((most, list(map(_least, fitting))) for most, fitting in _by_transient(layers, vocab_bytes))
    return min(lean, key=lambda found: found[0] + sum(tier.kept_bytes for tier in found[1]))[1]


def _by_transient(layers: Sequence[Sequence[Tier]], vocab_bytes: int) -> Iterator[tuple[int, list[list[Tier]]]]:
    """Every size that the largest block being computed may have, and the tiers that take no more; none where a layer has none."""
    sizes = sorted({max(vocab_bytes, tier.transient_bytes) for tiers in layers for tier in tiers})
    for most_bytes in sizes[-MOST_SIZES:]:
        fitting = [[tier for tier in tiers if tier.transient_bytes <= most_bytes] for tiers in layers]
        if all(fitting):
            yield most_bytes, fitting


def _tiers(plan: Setup, alone: Setup, b: int, cost: CostModel) -> Iterator[Tier]:
    """What a layer may keep: all, or as much as its blocks offer; always at least its input."""
    embedding, block, head = alone.workload.blocks[0], alone.workload.blocks[b], alone.workload.blocks[-1]
    only = replace(alone, workload=Workload((embedding, block, head)))
    kept = replace(only, policy=Policy(save=(Saved.ALL,)))
    of_documents = _documents_bytes(kept, cost.profile) - _documents_bytes(only, cost.profile)
    for saved in Saved:
        again = block.recompute(saved)
        if again is not None:
            kept_bytes = again.saved_bytes + (of_documents if saved is Saved.ALL else 0)
            yield Tier(saved, kept_bytes, again.transient_bytes, _again_s(plan, b, saved, cost))


def _again_s(plan: Setup, b: int, saved: Saved, cost: CostModel) -> float:
    """Seconds in which all micro-batches, the last one may be smaller, compute again what a layer did not keep."""
    total_s = 0.0
    for m, count in plan.alike(range(plan.semantics.n_micro_batches)):
        block = plan.blocks_of(m)[b]
        again = block.recompute(saved)
        assert again is not None, "a smaller micro-batch offers what the others do"
        total_s += count * cost.recompute_s(block, again, plan.semantics)
    return total_s


def _fixed_bytes(plan: Setup, alone: Setup, profile: Profile) -> dict[str, int]:
    """Device memory that does not depend on what layers keep."""
    of, blocks = plan.semantics, plan.workload.blocks
    n_elements = sum(plan.part_elements(b) for b in range(len(blocks)))
    activations, workspace = alone.arena("activations"), profile.device.workspace_bytes
    assert activations is not None, "every plan has boundaries"
    return {
        "weights": n_elements * ITEM_BYTES[of.compute_dtype] + _frozen_bytes(plan),
        "masters": n_elements * ITEM_BYTES[of.master_dtype] if of.master_dtype != of.compute_dtype else 0,
        "moments": n_elements * of.optimizer.moment_bytes,
        "gradients": sum(_gradient_bytes(plan)) // of.ranks,
        **_whole_blocks(plan),
        "activations": activations.n_bytes,
        "documents": _documents_bytes(alone, profile),
        "kernels and workspaces": round(workspace.value) if workspace is not None else 0,
        "context": round(profile.device.context_bytes.value),
    }


def _frozen_bytes(plan: Setup) -> int:
    """Of weights that are not trained, packed or not."""
    return 0 if plan.workload.trains_all else sum(plan.frozen_bytes(b) for b in range(len(plan.workload.blocks)))


def _whole_blocks(plan: Setup) -> dict[str, int]:
    """What of several ranks' parts is together at a time."""
    of = plan.semantics
    if of.ranks == 1:
        return {}
    largest = max(plan.slot_elements(b) for b in range(len(plan.workload.blocks)))
    return {"gathered weights": 2 * largest * ITEM_BYTES[of.compute_dtype], "sums": 2 * largest * FP32_BYTES}


def _exchanging_s(plan: Setup, cost: CostModel) -> float:
    """Every micro-batch has weights come together twice, and gradients reduced once, by a library; the embedding's come once."""
    ranks, weight = plan.semantics.ranks, ITEM_BYTES[plan.semantics.compute_dtype]
    if ranks == 1:
        return 0.0
    n_blocks, total_s = len(plan.workload.blocks), 0.0
    for b in range(n_blocks):
        n, n_times = plan.slot_elements(b), 2 if 0 < b < n_blocks - 1 else 1
        total_s += n_times * cost.together(ranks, n * weight, "all_gather").uncontended_s
        total_s += cost.together(ranks, n * ITEM_BYTES[plan.sum_dtype(b)], "reduce_scatter").uncontended_s
    return plan.semantics.n_micro_batches * total_s


def _documents_bytes(plan: Setup, profile: Profile) -> int:
    """As plans book it: not at all where the profile is from before workspaces were a number of their own."""
    return document_bytes(plan, profile.device.kind == "cuda") if profile.device.workspace_bytes is not None else 0


def _gradient_bytes(plan: Setup) -> list[int]:
    """Block by block; sums of several micro-batches are fp32."""
    whole = replace(plan, policy=Policy(accumulation_group=plan.semantics.n_micro_batches))
    summed, head = plan.semantics.n_micro_batches > 1, len(plan.workload.blocks) - 1
    layer, vocab = (FP32_BYTES if summed else ITEM_BYTES[whole.gradient_dtype(b)] for b in (1, 0))
    if not plan.workload.trains_all:
        vocab = layer
    return [block.trained_elements * (vocab if b in (0, head) else layer) for b, block in enumerate(plan.workload.blocks)]


def _computing_s(plan: Setup, cost: CostModel) -> float:
    """Forward, loss and backward of every micro-batch, gradients summed, nothing computed again."""
    n, head = plan.semantics.n_micro_batches, len(plan.workload.blocks) - 1
    first = plan.workload.first_trained
    kinds = [(Kind.FORWARD, b) for b in range(head)] + [(Kind.LOSS, head)] + [(Kind.BACKWARD, b) for b in range(first, head)]
    keeping = replace(plan, policy=Policy(accumulation_group=n, save=saves(all=range(1, head))))
    total_s = sum(cost.demand(plan, Op(Kind.DEQUANTISE, b)).alone_s for b in range(head) if plan.unpacks(b)) * 2 * n
    for kind, b in kinds:
        for m, count in plan.alike(range(n)):
            total_s += count * cost.demand(keeping, Op(kind, b, m)).alone_s
    return total_s


def _updating_s(plan: Setup, cost: CostModel) -> float:
    """The norm of all gradients, and AdamW."""
    of, blocks = plan.semantics, plan.workload.blocks
    gradient_bytes = _gradient_bytes(plan)
    norm_s = sum(cost.square_s(block, n_bytes) for block, n_bytes in zip(blocks, gradient_bytes, strict=True))
    weight = ITEM_BYTES[of.compute_dtype] if of.master_dtype != of.compute_dtype else 0
    state_bytes = plan.workload.n_trained * (2 * of.optimizer.state_bytes(of.master_dtype) + weight)
    return norm_s + cost.moving_s(state_bytes + sum(gradient_bytes), n_kernels=sum(map(_n_owned, blocks)))


def _n_owned(block: Block) -> int:
    return sum(p.tied_to is None for p in block.trained)
