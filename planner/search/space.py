"""Space of policies: families, ways to save activations, baselines of other systems.

The space is cut into *families*: when the host updates, how many micro-batches go through a layer at a time, how many layers
share a boundary. Inside a family the rest is free: buffers, and block by block what is saved, spilled, resident, updated on
speculation, or squared on the device for the norm. A family stands for all sizes of groups that make as many, and for a barrier
before the next forward, which only adds a wait. A baseline is a known system's *schedule* under the user's own semantics: the
bits of the result are the same.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from penstock.hwprofiles.schema import Profile
from penstock.planner.bounds.bounds import places_to_stay
from penstock.planner.predict.memory import Footprint, footprint, frame
from penstock.runtime.plan import Policy, Semantics, Setup, Update
from penstock.runtime.plan.legality import can_read, can_stay
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import Block, Model, Saved, Workload

BASELINES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")
PREFETCH_DEPTHS = (2, 1, 3)  # two hide what one cannot, and three seldom more: in this order they are tried
LEAST_SAVED_SLOTS = 2  # of each kind: with one, a layer's forward waits until what the one before it saved has left
GRADIENT_SLOTS = (2, 1, 3, 4, 6, 8)  # the last stands for more, too
MEGATRAIN_STRIDE = 4  # of its layers share a boundary
STRIDES = (1, MEGATRAIN_STRIDE)


@dataclass(frozen=True, slots=True)
class Family:
    """What policies have in common whose other choices one relaxation bounds together: groups of some size from the smaller to
    the larger, both of which make as many. Where weights are frozen, also where what is trained beside them is: on the device, in
    all blocks that are trained in part, or on the host."""

    update: Update
    accumulation_group: int
    largest_group: int
    boundary_stride: int
    mixed_blocks: tuple[int, ...] = ()  # that are on the device

    @property
    def groups(self) -> range:
        return range(self.accumulation_group, self.largest_group + 1)

    def halves(self) -> "tuple[Family, Family]":
        """The smaller sizes and the larger ones, of several."""
        middle = (self.accumulation_group + self.largest_group) // 2
        return replace(self, largest_group=middle), replace(self, accumulation_group=middle + 1)

    def policy(self) -> Policy:
        """The leanest member that spills nothing."""
        return Policy(
            accumulation_group=self.accumulation_group,
            update=self.update,
            boundary_stride=self.boundary_stride,
            device_blocks=self.mixed_blocks,
        )


class Way(NamedTuple):
    """What a layer saves, and whether all but its input is on the host until backward."""

    saved: Saved
    away: bool = False


WAYS = (*map(Way, Saved), *(Way(saved, away=True) for saved in LEAVE))


@dataclass(frozen=True, slots=True)
class Fill:
    """How many blocks of each class of equal ones use what memory is left; classes as `Workload.classes` lists them."""

    ways: Mapping[Way, tuple[int, ...]]  # to save more than the input
    resident: tuple[int, ...]
    speculate: tuple[int, ...]
    square: bool  # all gradients that are whole on the device
    on_disk: tuple[int, ...]
    read_once: tuple[int, ...]  # on a disk, and resident
    stay: tuple[int, ...]  # masters and moments on the device, whose gradients are squared there too
    n_spilled: int


def baseline(name: str, semantics: Semantics, workload: Workload) -> Policy:
    """The schedule of a known system, one micro-batch after another as all of them do it (one rank); the rest of what makes it that
    system (dtypes, layout, copies within a memory) is left out. Facts: docs/accuracy.md, what the systems are taken to do."""
    spills, update = can_spill(workload)[:-1], Update.EAGER if eager_is_legal(semantics) else Update.BARRIER
    of = {
        # Every fourth boundary stays, so backward computes layers again to have their inputs, and then once more each.
        "megatrain": Policy(1, 2, boundary_stride=min(MEGATRAIN_STRIDE, workload.n_layers)),
        # Every boundary stays, and a third buffer.
        "megatrain-plus": Policy(2, 2),
        # Boundaries go to the host; each layer's optimizer as its gradient arrives, which is exact only without a global norm.
        "slideformer": Policy(2, 2, update=update, spill_blocks=spills),
        # One gradient buffer: the next backward waits until the last gradient has left.
        "zero3-offload": Policy(1, 1),
    }
    return replace(of[name], accumulation_group=semantics.least_group)


def policy_of(asked: Policy | str | None, semantics: Semantics, workload: Workload) -> Policy | None:
    """A policy that was asked for, itself or as the name of another system."""
    return baseline(asked, semantics, workload) if isinstance(asked, str) else asked


def eager_is_legal(semantics: Semantics) -> bool:
    """Whether an update may run before the global norm is known."""
    return semantics.train.all and semantics.clip_norm is None and semantics.on_nonfinite == "stop"


def families(semantics: Semantics, workload: Workload) -> list[Family]:
    """Every family, eager updates only where they are legal."""
    updates = [*([Update.EAGER] if eager_is_legal(semantics) else []), Update.DEFERRED]
    strides = [stride for stride in STRIDES if stride <= workload.n_layers]
    sizes = group_sizes(semantics.n_micro_batches)[: 1 if semantics.ranks > 1 else None]
    choices = product(updates, sizes, strides, places_of_mixed(semantics, workload))
    return [Family(update, s[0], s[-1], stride, mixed) for update, s, stride, mixed in choices]


def places_of_mixed(semantics: Semantics, workload: Workload) -> list[tuple[int, ...]]:
    """The blocks trained in part whose state is on the device: all, or none; the better first."""
    mixed = workload.mixed
    may_stay = semantics.gradient_dtype == "fp32" and {*mixed} <= {*can_stay(workload, semantics)}
    return [mixed, ()] if mixed and may_stay else [()]


def places_on_disk(semantics: Semantics, workload: Workload, profile: Profile) -> tuple[int, ...]:
    """The layers whose frozen weights may be on the machine's disk, where it has one."""
    return () if profile.disk is None else tuple(can_read(workload, semantics))


def can_spill(workload: Workload) -> tuple[int, ...]:
    """The blocks for whose output a backward comes back, but for the last layer's."""
    return tuple(range(max(0, workload.first_trained - 1), workload.n_layers))


def family_of(policy: Policy, semantics: Semantics) -> Family:
    """The family, of those searched, whose bound is the policy's, too."""
    update = Update.EAGER if policy.update is Update.EAGER else Update.DEFERRED
    sizes = groups_alike(policy.accumulation_group, semantics.n_micro_batches)
    mixed = () if semantics.train.all else policy.device_blocks
    return Family(update, sizes[0], sizes[-1], policy.boundary_stride, mixed)


def group_sizes(n_micro_batches: int) -> list[range]:
    """For every possible number of groups, fewest first (layer-major to row-major), the group sizes that give it."""
    found = [groups_alike(n_micro_batches, n_micro_batches)]
    while found[-1][0] > 1:
        found.append(groups_alike(found[-1][0] - 1, n_micro_batches))
    return found


def groups_alike(size: int, n_micro_batches: int) -> range:
    """The sizes that make as many groups as this one."""
    n_groups = -(-n_micro_batches // size)
    largest = n_micro_batches if n_groups == 1 else -(-n_micro_batches // (n_groups - 1)) - 1
    return range(-(-n_micro_batches // n_groups), largest + 1)


def leanest(model: Model, workload: Workload, semantics: Semantics, profile: Profile) -> Iterator[tuple[Setup, Footprint]]:
    """Of each family the policies that ask least of the device, and of the host; if none fits, none of the space does."""
    for family in families(semantics, workload):
        lean = family.policy()
        spilling = replace(lean, spill_blocks=can_spill(workload))
        policies = (lean, spilling) if family.boundary_stride == 1 and workload.n_layers > 1 else (lean,)
        of_disk = [(), blocks] if (blocks := places_on_disk(semantics, workload, profile)) else [()]
        for policy in (replace(policy, disk_blocks=blocks) for policy, blocks in product(policies, of_disk)):
            plan = frame(model, workload, semantics, policy)
            yield plan, footprint(plan, profile)
        if family.update is Update.DEFERRED and places_to_stay(plan, profile):
            yield most_on_device(frame(model, workload, semantics, lean), profile)


def most_on_device(lean: Setup, profile: Profile) -> tuple[Setup, Footprint]:
    """The lean policy with the state of as many blocks on the device as it has room for: then least is on the host."""
    may_stay = places_to_stay(lean, profile)
    blocks = lean.workload.blocks

    def of(n: int) -> tuple[Setup, Footprint]:
        plan = frame(lean.model, lean.workload, lean.semantics, staying(lean.policy, may_stay[:n]))
        return plan, footprint(plan, profile)

    if of(1)[1].short_device_bytes:  # of the embeddings, say, where a layer's has room
        may_stay.sort(key=lambda b: blocks[b].n_trained)
    return of(most(len(may_stay), lambda n: not of(n)[1].short_device_bytes))


def most(n: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to n that fits, where all below it do; 0 if none does."""
    return bisect_left(range(1, n + 1), True, key=lambda size: not fits(size))


def ways_of(block: Block, boundary_stride: int) -> list[Way]:
    """How a layer may save its activations."""
    return [way for way in WAYS if way.saved is Saved.INPUT or (boundary_stride == 1 and block.recompute(way.saved) is not None)]


def with_ways(policy: Policy, ways: Mapping[int, Way]) -> Policy:
    """The policy in which these layers save so, and the others as they did."""
    save = [*policy.save, *(Saved.INPUT,) * (max(ways, default=0) - len(policy.save))]
    for b, way in ways.items():
        save[b - 1] = way.saved
    while save[-1:] == [Saved.INPUT]:
        save.pop()
    away = {*policy.offload_blocks} - ways.keys() | {b for b, way in ways.items() if way.away}
    return replace(policy, save=tuple(save), offload_blocks=tuple(sorted(away)))


def staying(policy: Policy, blocks: Collection[int]) -> Policy:
    """The policy in which the device holds the state of these blocks."""
    return replace(
        policy,
        update=Update.DEFERRED if blocks else policy.update,
        device_blocks=tuple(sorted(blocks)),
        resident_blocks=tuple(b for b in policy.resident_blocks if b not in blocks),
        speculate_blocks=tuple(b for b in policy.speculate_blocks if b not in blocks),
    )


def filled(policy: Policy, workload: Workload, fill: Fill, spread: bool) -> Policy:
    """The policy with memory used as `fill` says. Packed: activations of the last layers, which are needed first, and weights of
    the first. `spread`: evenly over the layers, so that uploads between them are spaced. What goes to the host is always spread, so
    that the link has it one by one."""
    classes = workload.classes
    place = _spread if spread else lambda blocks, n: list(blocks[len(blocks) - n :])
    ways: dict[int, Way] = {}
    resident, stay, disk = list[int](), list[int](), list[int]()
    for i, blocks in enumerate(classes):
        away = [way for way, counts in fill.ways.items() if way.away for _ in range(counts[i])]
        here = [way for way, counts in fill.ways.items() if not way.away for _ in range(counts[i])]
        leaving = evenly(blocks, len(away))
        ways |= zip(leaving, away, strict=True)
        ways |= zip(place([b for b in blocks if b not in leaving], len(here)), here, strict=True)
        stay += blocks[: fill.stay[i]]
        others = [b for b in blocks if b not in stay]
        there = _spread(others, fill.resident[i]) if spread else others[: fill.resident[i]]
        others = [b for b in others if b not in there]
        once = others[: fill.read_once[i]]
        resident += [*there, *once]
        disk += [*once, *evenly([b for b in others if b not in once], fill.on_disk[i])]
    kept_inputs = {b - 1 for b, way in ways.items() if way.saved is Saved.ALL}
    return replace(
        with_ways(policy, ways),
        resident_blocks=tuple(sorted(resident)),
        disk_blocks=tuple(sorted(disk)),
        square_on_device=fill.square,
        device_blocks=tuple(sorted({*stay, *policy.device_blocks})),
        speculate_blocks=speculated(sum(fill.speculate), [b for b in range(len(workload.blocks)) if b not in stay]),
        spill_blocks=tuple([b for b in can_spill(workload) if b not in kept_inputs][: fill.n_spilled]),
    )


def speculated(n: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """That number of blocks, evenly spaced: then the host has work throughout backward, and throughout the next forward."""
    return tuple(_spread(blocks, n))


def evenly(blocks: Sequence[int], n: int) -> list[int]:
    """n of them, evenly spaced, the first one among them: what leaves late in forward has hardly left when backward asks for it."""
    return [blocks[i * len(blocks) // n] for i in range(n)]


def _spread(blocks: Sequence[int], n: int) -> list[int]:
    """n of them, evenly spaced, the last one among them."""
    return [blocks[(i + 1) * len(blocks) // n - 1] for i in range(n)]
