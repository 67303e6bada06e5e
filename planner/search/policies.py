"""Space of policies: families, ways to save activations, and schedules of other systems.

A *family* fixes the update mode, a range of group sizes with an equal number of groups, and the boundary stride. Its members differ
in buffers and, per block, in saved activations, offload, resident weights, speculative updates and squares on the device. The
family's bound also covers the barrier mode, which only adds a wait. A baseline is the *schedule* of another system under the user's
semantics, with bitwise identical results.
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
from penstock.runtime.plan.legality import can_read, can_stay, joins_tied, vocabulary
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import Block, Model, Saved, Workload

from . import tuning

BASELINES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload", "llmq")
MEGATRAIN_STRIDE = 4  # layers per boundary, one of `tuning.STRIDES`


@dataclass(frozen=True, slots=True)
class Family:
    """Policies that one relaxation bounds together. Group sizes range from `accumulation_group` to `largest_group`, all with an
    equal number of groups. A family also fixes whether gradient sums may be on the device over all groups and, with frozen weights,
    the place of partially trained blocks."""

    update: Update
    accumulation_group: int
    largest_group: int
    boundary_stride: int
    mixed_blocks: tuple[int, ...] = ()  # on the device
    summed: tuple[int, ...] | None = None  # blocks with sums on the device in every member; None: no member has any

    @property
    def groups(self) -> range:
        return range(self.accumulation_group, self.largest_group + 1)

    def halves(self) -> "tuple[Family, Family]":
        """Split a range of sizes into the smaller and the larger half."""
        middle = (self.accumulation_group + self.largest_group) // 2
        return replace(self, largest_group=middle), replace(self, accumulation_group=middle + 1)

    def policy(self) -> Policy:
        """The member that needs the least memory without offloaded boundaries."""
        size, stride = self.accumulation_group, self.boundary_stride
        return Policy(
            accumulation_group=size,
            update=self.update,
            boundary_stride=stride,
            device_blocks=self.mixed_blocks,
            sum_blocks=self.summed or (),
        )


class Slots(NamedTuple):
    """Sizes of buffers, by the names of a policy's fields. 0: any number."""

    prefetch_depth: int = 0
    gradient_slots: int = 0
    saved_slots: int = 0


ANY_SLOTS = Slots()


def slots_of(policy: Policy) -> Slots:
    return Slots(policy.prefetch_depth, policy.gradient_slots, policy.saved_slots)


class Way(NamedTuple):
    """Saved activations of a layer. `away`: all except the input are offloaded until backward."""

    saved: Saved
    away: bool = False


WAYS = (*map(Way, Saved), *(Way(saved, away=True) for saved in LEAVE))


@dataclass(frozen=True, slots=True)
class Fill:
    """Use of spare memory: number of blocks with each treatment, per class of equal blocks (`Workload.classes`)."""

    ways: Mapping[Way, tuple[int, ...]]  # only tiers above the input
    resident: tuple[int, ...]
    speculate: tuple[int, ...]
    square: bool  # all complete gradients, on the device
    on_disk: tuple[int, ...]
    read_once: tuple[int, ...]  # resident blocks on a disk
    stay: tuple[int, ...]  # masters and moments on the device, with squares there
    summed: tuple[int, ...]  # gradient sums on the device over all groups
    n_spilled: int


def baseline(name: str, semantics: Semantics, workload: Workload) -> Policy:
    """Schedule of another system on one rank, with micro-batches one after another. Its dtypes, layout and internal copies are not
    modelled. Sources: docs/accuracy.md, assumptions about the systems."""
    summed = device_sums(semantics, workload, semantics.least_group) or ()
    if semantics.least_group < semantics.n_micro_batches:
        summed = tuple(b for b, block in enumerate(workload.blocks) if block.trained)
    spills, update = can_spill(workload)[:-1], Update.EAGER if eager_is_legal(semantics) else Update.BARRIER
    schedules = {
        # Every fourth boundary is kept. Backward recomputes the inputs of layers, then each layer once more.
        "megatrain": Policy(1, 2, boundary_stride=min(MEGATRAIN_STRIDE, workload.n_layers)),
        # Every boundary is kept, with a third weight buffer.
        "megatrain-plus": Policy(2, 2),
        # Boundaries are offloaded. Each layer's optimizer runs when its gradient arrives, which is exact only without a global
        # norm.
        "slideformer": Policy(2, 2, update=update, spill_blocks=spills),
        # One gradient buffer: the next backward waits for the previous offload.
        "zero3-offload": Policy(1, 1),
        # Weights and gradient sums stay on the device, masters and moments on the host. Only cheap functions are recomputed. Its
        # updates on the device, with state streamed from the host, have no form here: the host updates.
        "llmq": Policy(
            update=Update.DEFERRED,
            resident_blocks=tuple(range(len(workload.blocks))),
            sum_blocks=summed,
            save=tuple(_products_of(workload)),
        ),
    }
    return replace(schedules[name], accumulation_group=semantics.least_group)


def _products_of(workload: Workload) -> Iterator[Saved]:
    """Yield `products` for each trained layer, if all of these layers can save them; else nothing."""
    layers = range(1, workload.n_layers + 1)
    tiers = [Saved.INPUT if b < workload.first_trained else Saved.PRODUCTS for b in layers]
    sizes = [blocks for blocks in (workload.blocks, workload.smaller) if blocks]
    if all(blocks[b].recompute(tiers[b - 1]) is not None for blocks in sizes for b in layers) and Saved.PRODUCTS in tiers:
        yield from tiers


def policy_of(fixed: Policy | str | None, semantics: Semantics, workload: Workload) -> Policy | None:
    """Resolve a fixed policy, or the name of another system."""
    return baseline(fixed, semantics, workload) if isinstance(fixed, str) else fixed


def eager_is_legal(semantics: Semantics) -> bool:
    """True if an update may run before the global norm is known."""
    return semantics.train.all and semantics.clip_norm is None and semantics.on_nonfinite == "stop"


def first_update(semantics: Semantics) -> Update:
    """The mode that needs the least host memory."""
    return Update.EAGER if eager_is_legal(semantics) else Update.DEFERRED


def families(semantics: Semantics, workload: Workload) -> list[Family]:
    updates = dict.fromkeys((first_update(semantics), Update.DEFERRED))
    strides = [stride for stride in tuning.STRIDES if stride <= workload.n_layers]
    choices = product(updates, group_sizes(semantics.n_micro_batches), strides, mixed_options(semantics, workload))
    result = list[Family]()
    for update, sizes, stride, mixed in choices:
        family = Family(update, sizes[0], sizes[-1], stride, mixed)
        if semantics.ranks == 1 or sizes[0] == semantics.n_micro_batches:
            result.append(family)
        if stride == 1 and (summed := device_sums(semantics, workload, sizes[0], mixed)) is not None:
            result.append(replace(family, summed=summed))
    return result


def device_sums(semantics: Semantics, workload: Workload, group: int, mixed: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Blocks with sums on the device in every policy that has any there, for this group size; None if no policy has."""
    trained = tuple(b for b, block in enumerate(workload.blocks) if block.trained and b not in mixed)
    of_vocabulary = tuple(b for b in vocabulary(workload) if b not in mixed)
    if group == semantics.n_micro_batches:
        return of_vocabulary if joins_tied(workload, semantics, Policy(sum_blocks=of_vocabulary)) else None
    return (trained if semantics.ranks > 1 else of_vocabulary) if trained else None


def mixed_options(semantics: Semantics, workload: Workload) -> list[tuple[int, ...]]:
    """Options for partially trained blocks with state on the device: all of them, or none; the better first."""
    mixed = workload.mixed
    may_stay = semantics.gradient_dtype == "fp32" and {*mixed} <= {*can_stay(workload, semantics)}
    return [mixed, ()] if mixed and may_stay else [()]


def disk_layers(semantics: Semantics, workload: Workload, profile: Profile) -> tuple[int, ...]:
    """Layers with frozen weights that may be read from the machine's disk, if it has one."""
    return () if profile.disk is None else tuple(can_read(workload, semantics))


def can_spill(workload: Workload) -> tuple[int, ...]:
    """Blocks with outputs that backward needs again, except the last layer."""
    return tuple(range(max(0, workload.first_trained - 1), workload.n_layers))


def family_of(policy: Policy, semantics: Semantics, workload: Workload) -> Family:
    """Family of the search space with a bound that covers the policy."""
    update = Update.EAGER if policy.update is Update.EAGER else Update.DEFERRED
    sizes = equivalent_sizes(policy.accumulation_group, semantics.n_micro_batches)
    mixed = () if semantics.train.all else policy.device_blocks
    summed = device_sums(semantics, workload, sizes[0], mixed) if policy.sum_blocks else None
    return Family(update, sizes[0], sizes[-1], policy.boundary_stride, mixed, summed)


def group_sizes(n_micro_batches: int) -> list[range]:
    """Group sizes for every possible number of groups, fewest groups first (layer-major to row-major)."""
    ranges = [equivalent_sizes(n_micro_batches, n_micro_batches)]
    while ranges[-1][0] > 1:
        ranges.append(equivalent_sizes(ranges[-1][0] - 1, n_micro_batches))
    return ranges


def equivalent_sizes(size: int, n_micro_batches: int) -> range:
    """Range of sizes with the same number of groups."""
    n_groups = -(-n_micro_batches // size)
    largest = n_micro_batches if n_groups == 1 else -(-n_micro_batches // (n_groups - 1)) - 1
    return range(-(-n_micro_batches // n_groups), largest + 1)


def smallest_plans(model: Model, workload: Workload, semantics: Semantics, profile: Profile) -> Iterator[tuple[Setup, Footprint]]:
    """Yield the policies of each family that need the least memory on device or host. If none fits, no policy of the space does."""
    for family in families(semantics, workload):
        smallest = family.policy()
        spilling = replace(smallest, spill_blocks=can_spill(workload))
        policies = (smallest, spilling) if family.boundary_stride == 1 and workload.n_layers > 1 else (smallest,)
        of_disk = [(), blocks] if (blocks := disk_layers(semantics, workload, profile)) else [()]
        for policy in (replace(policy, disk_blocks=blocks) for policy, blocks in product(policies, of_disk)):
            plan = frame(model, workload, semantics, policy)
            yield plan, footprint(plan, profile)
        of_family = frame(model, workload, semantics, smallest)
        if family.update is Update.DEFERRED and places_to_stay(of_family, profile):
            yield fill_device(of_family, profile)


def fill_device(smallest: Setup, profile: Profile) -> tuple[Setup, Footprint]:
    """Keep the state of as many blocks on the device as fit, which minimises host memory."""
    may_stay = places_to_stay(smallest, profile)
    blocks = smallest.workload.blocks

    def plan_with(n: int) -> tuple[Setup, Footprint]:
        plan = frame(smallest.model, smallest.workload, smallest.semantics, staying(smallest, smallest.policy, may_stay[:n]))
        return plan, footprint(plan, profile)

    if plan_with(1)[1].short_device_bytes:  # embeddings may not fit although a layer does
        may_stay.sort(key=lambda b: blocks[b].n_trained)
    return plan_with(max_fitting(len(may_stay), lambda n: not plan_with(n)[1].short_device_bytes))


def max_fitting(n: int, fits: Callable[[int], bool]) -> int:
    """Largest k in 1..n with fits(k), by bisection; 0 if none. `fits` must be monotonic."""
    return bisect_left(range(1, n + 1), True, key=lambda size: not fits(size))


def ways_of(block: Block, boundary_stride: int) -> list[Way]:
    """Allowed ways for a layer to save activations."""
    return [way for way in WAYS if way.saved is Saved.INPUT or (boundary_stride == 1 and block.recompute(way.saved) is not None)]


def with_ways(policy: Policy, ways: Mapping[int, Way]) -> Policy:
    """Set the way of saving for these layers; others are unchanged."""
    save = [*policy.save, *(Saved.INPUT,) * (max(ways, default=0) - len(policy.save))]
    for b, way in ways.items():
        save[b - 1] = way.saved
    while save[-1:] == [Saved.INPUT]:
        save.pop()
    away = {*policy.offload_blocks} - ways.keys() | {b for b, way in ways.items() if way.away}
    return replace(policy, save=tuple(save), offload_blocks=tuple(sorted(away)))


def staying(plan: Setup, policy: Policy, blocks: Collection[int]) -> Policy:
    """Keep the state of these blocks on the device, compute with the weights in it, and sum their gradients there. `plan`: any plan
    of the workload."""
    if plan.workload.tied and not {*blocks}.isdisjoint(of_vocabulary := vocabulary(plan.workload)):  # share a weight
        blocks = {*blocks, *of_vocabulary}
    in_place = {b for b in blocks if not (plan.workload.blocks[b].tied or plan.workload.blocks[b].is_mixed)}
    is_one_group = policy.accumulation_group >= plan.semantics.n_micro_batches
    return replace(
        policy,
        update=Update.DEFERRED if blocks else policy.update,
        device_blocks=tuple(sorted(blocks)),
        sum_blocks=policy.sum_blocks if is_one_group else tuple(sorted({*policy.sum_blocks, *blocks})),
        resident_blocks=tuple(sorted({*policy.resident_blocks}.difference(policy.device_blocks, blocks) | in_place)),
        speculate_blocks=tuple(b for b in policy.speculate_blocks if b not in blocks),
    )


def filled(policy: Policy, workload: Workload, fill: Fill, spread: bool) -> Policy:
    """Apply `fill` to a policy. Packed (default): activations of the last layers, which backward needs first, and weights of the
    first layers. `spread`: evenly over the layers, to space uploads. Offloads are always spread, so that they do not queue."""
    classes = workload.classes
    place = evenly_to_last if spread else lambda blocks, n: list(blocks[len(blocks) - n :])
    ways: dict[int, Way] = {}
    resident, stay, disk, summed = list[int](), list[int](), list[int](), list[int]()
    for i, blocks in enumerate(classes):
        away = [way for way, counts in fill.ways.items() if way.away for _ in range(counts[i])]
        local = [way for way, counts in fill.ways.items() if not way.away for _ in range(counts[i])]
        leaving = evenly(blocks, len(away))
        ways |= zip(leaving, away, strict=True)
        ways |= zip(place([b for b in blocks if b not in leaving], len(local)), local, strict=True)
        stay += blocks[: fill.stay[i]]
        summed += blocks[: fill.summed[i]]  # first those that stay
        rest = [b for b in blocks if b not in stay]
        loaded = evenly_to_last(rest, fill.resident[i]) if spread else rest[: fill.resident[i]]
        rest = [b for b in rest if b not in loaded]
        once = rest[: fill.read_once[i]]
        resident += [*loaded, *once]
        disk += [*once, *evenly([b for b in rest if b not in once], fill.on_disk[i])]
    kept_inputs = {b - 1 for b, way in ways.items() if way.saved is Saved.ALL}
    resident += [b for b in stay if not workload.blocks[b].tied]  # these compute with the weights in their state
    return replace(
        with_ways(policy, ways),
        resident_blocks=tuple(sorted(resident)),
        sum_blocks=tuple(sorted({*policy.sum_blocks, *summed})),
        disk_blocks=tuple(sorted(disk)),
        square_on_device=fill.square,
        device_blocks=tuple(sorted({*stay, *policy.device_blocks})),
        # Evenly spaced, so that the host has work throughout backward and the next forward
        speculate_blocks=tuple(evenly_to_last([b for b in range(len(workload.blocks)) if b not in stay], sum(fill.speculate))),
        spill_blocks=tuple([b for b in can_spill(workload) if b not in kept_inputs][: fill.n_spilled]),
    )


def evenly(blocks: Sequence[int], n: int) -> list[int]:
    """Choose n evenly spaced blocks, including the first: late offloads of forward barely end before backward fetches them."""
    return [blocks[i * len(blocks) // n] for i in range(n)]


def evenly_to_last(blocks: Sequence[int], n: int) -> list[int]:
    """Choose n evenly spaced blocks, including the last."""
    return [blocks[(i + 1) * len(blocks) // n - 1] for i in range(n)]
