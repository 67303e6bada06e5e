"""Greedy policies, with which a search begins.

Two buffers each way, all micro-batches in one group or as many as fit, or one by one; boundaries on the device or on the host; and
memory filled with what saves most recompute per byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from types import MappingProxyType

from planner.bounds.bounds import busy_s
from runtime.plan import Kind, Op, Policy, Setup, Update
from runtime.plan.footprint import device_needs
from runtime.plan.workload import ITEM_BYTES, Block, Saved

from .frames import Frames
from .space import (
    Family,
    Way,
    can_spill,
    eager_is_legal,
    evenly,
    most,
    most_on_device,
    places_of_mixed,
    staying,
    ways_of,
    with_ways,
)

BUFFERS = ((2, 2), (1, 1))  # prefetch depth and gradient slots: the first that fit
# Where a step is bound by more than its busiest lane by this, uploads that come again for every group may be worth more than what
# is saved of activations: then one block in eight, or in four, has its weights on the device before memory goes to anything else.
MORE_THAN_BUSY, RESIDENT_PARTS = 1.02, (8, 4)
# Micro-batches of a group that sends away what layers save: of more, one layer's fill the slots and the next wait.
MOST_LEAVING = 12
FEWER_LEAVING = (2, 4, 8)  # one layer in two, four or eight
GOLDEN = (5**0.5 - 1) / 2  # in steps of this share of a circle, any first few points are spread evenly


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """A layer that saves more than it did, so that it computes less again."""

    seconds_per_byte: float
    block: int
    saved: Saved


class Greedy:
    """Greedy policies of one workload."""

    def __init__(self, frames: Frames) -> None:
        self.frames, self.workload, self.semantics, self.profile = frames, frames.workload, frames.semantics, frames.profile
        self.cost = frames.cost

    def policies(self) -> list[Policy]:
        """Those that fit."""
        n = self.semantics.n_micro_batches
        found: dict[Policy, None] = {}
        leaves = False  # whether there is anything that would rather be on the host
        for group in dict.fromkeys((n, self.semantics.least_group)):
            for spills in (False, True):
                filled, has_all = self._filled(group, spills)
                if filled is None and group > 1:
                    filled, has_all = self._of_largest_group(spills)
                if filled is not None:
                    found[filled] = None
                leaves |= not has_all
                if has_all:
                    break  # what boundaries on the host would make room for is there
                if filled is not None and group < n and self.frames.bound_s(filled) > MORE_THAN_BUSY * self.lanes_s(filled):
                    others = (self._filled(group, spills, len(self.workload.blocks) // part)[0] for part in RESIDENT_PARTS)
                    found |= {other: None for other in others if other is not None}
        for saved, spills in product((Saved.PRODUCTS, Saved.ATTENTION) if leaves else (), (False, True)):
            away = self._leaving(saved)
            if not away:
                continue
            groups = [group for group in halves(n) if self.semantics.least_group <= group <= MOST_LEAVING]
            fitting = (self._filled(group, spills, away=some)[0] for group in groups for some in self._some(away))
            found |= dict.fromkeys(islice((policy for policy in fitting if policy is not None), 1))
            least = self.semantics.least_group
            if saved is Saved.PRODUCTS and (one_by_one := self._filled(least, spills, away=away)[0]) is not None:
                found[one_by_one] = None
        if stay := self._may_stay():
            found |= {policy: None for policy in [self._filled(n, spills=False, stay=stay)[0]] if policy is not None}
        return list(found)

    def _may_stay(self) -> Sequence[int]:
        """The first blocks, as many as leave their state room on the device under a lean policy."""
        whole = self.frames.of(Policy(accumulation_group=self.semantics.n_micro_batches, update=Update.DEFERRED))
        return most_on_device(whole, self.profile)[0].policy.device_blocks

    def _leaving(self, saved: Saved) -> dict[int, Way]:
        """The layers that may send this to the host as fast as they compute forward, evenly spaced; none that cannot save it."""
        first = max(1, self.workload.first_trained)
        block, layers = self.workload.blocks[first], range(first, self.workload.n_layers + 1)
        if not layers or any(self.workload.blocks[b].recompute(saved) is None for b in layers):
            return {}
        plan = self.frames.of(with_ways(Policy(accumulation_group=self.semantics.least_group), {first: Way(saved, away=True)}))
        offload_s = self.cost.demand(plan, Op(Kind.OFFLOAD_SAVED, first, 0)).uncontended_s
        share = min(1.0, self.cost.forward_s(block, self.semantics) / offload_s)
        return dict.fromkeys(evenly(layers, max(1, round(share * len(layers)))), Way(saved, away=True))

    def _some(self, away: dict[int, Way]) -> Iterator[dict[int, Way]]:
        """All of these layers; of several ranks, whose groups cannot be smaller, also fewer, for which the host may have room."""
        yield away
        if self.semantics.ranks > 1:
            layers = list(away)
            yield from (
                {layers[i]: away[layers[i]] for i in range(0, len(layers), each)} for each in FEWER_LEAVING if each < len(layers)
            )

    def lanes_s(self, policy: Policy) -> float:
        """No step is shorter than the ops of its busiest lane, one after the other."""
        return max(busy_s(self.frames.of(policy), self.cost).values())

    def _of_largest_group(self, spills: bool) -> tuple[Policy | None, bool]:
        """With half of the micro-batches in a group, or a quarter, and so on."""
        for group in halves(self.semantics.n_micro_batches // 2):
            filled, has_all = self._filled(group, spills) if group > self.semantics.least_group else (None, False)
            if filled is not None:
                return filled, has_all
        return None, False

    def _filled(
        self,
        group: int,
        spills: bool,
        n_resident: int = 0,
        away: Mapping[int, Way] = MappingProxyType({}),
        stay: Sequence[int] = (),
    ) -> tuple[Policy | None, bool]:
        """The lean policy with as many upgrades, then resident weights, as fit, and whether all do; None if not even that."""
        update = Update.EAGER if eager_is_legal(self.semantics) else Update.DEFERRED
        mixed = places_of_mixed(self.semantics, self.workload)[0]
        family = Family(update, group, group, boundary_stride=1, mixed_blocks=mixed)
        spilled = can_spill(self.workload) if spills else ()
        blocks = sorted({*range(len(self.workload.blocks))}.difference(stay), key=self._order(group))
        turn = {b: i for i, b in enumerate([*blocks, *stay])}
        resident = tuple(sorted(blocks[:n_resident]))
        of_family = replace(family.policy(self.semantics), spill_blocks=spilled, resident_blocks=resident)
        of_family = with_ways(of_family, away)
        of_family = staying(of_family, stay) if stay else of_family
        leans = (replace(of_family, prefetch_depth=depth, gradient_slots=slots) for depth, slots in BUFFERS)
        lean = next((lean for lean in leans if self.frames.needs(lean).fits), None)
        if lean is None:
            return None, False
        framed = self.frames.of(lean)
        of_others = (upgrade for upgrade in self._upgrades(lean, family) if upgrade.block not in away)
        upgrades = sorted(of_others, key=lambda u: (-u.seconds_per_byte, turn[u.block]))
        n = most(len(upgrades) + len(blocks), lambda n: self._fits(framed, _with(lean, upgrades, blocks, n)))
        return _with(lean, upgrades, blocks, n), n >= len(upgrades)

    def _order(self, group: int) -> Callable[[int], float]:
        """Which blocks get memory first: those that are needed first, the last; or where weights come again for every group, blocks
        spread evenly, so that between two uploads there is always something to compute."""
        return (lambda b: -b) if group == self.semantics.n_micro_batches else (lambda b: b * GOLDEN % 1.0)

    def _fits(self, lean: Setup, policy: Policy) -> bool:
        """Whether the device has room for what a lean plan that fits would save and keep besides."""
        of = self.profile.device
        plan = replace(lean, policy=policy)
        needs = device_needs(plan, of.kind == "cuda", of.workspace_bytes.value if of.workspace_bytes else None)
        item = ITEM_BYTES[self.semantics.compute_dtype]
        more = set(policy.resident_blocks).difference(lean.policy.resident_blocks)
        resident_bytes = sum(self.workload.blocks[b].slot_elements * item for b in more)
        return sum(needs.values()) + resident_bytes + of.context_bytes.value <= of.memory_bytes.value

    def _upgrades(self, lean: Policy, family: Family) -> Iterator[_Upgrade]:
        """Of each layer the ways to save, each worth less per byte than the one before."""
        known: dict[int, list[tuple[float, Saved]]] = {}
        first = max(1, self.workload.first_trained)
        for b, block in enumerate(self.workload.blocks[first:-1], start=first):
            key = id(block.matmuls)  # which layers that differ in nothing but names have in common
            if key not in known:
                known[key] = _hull(self._ways(block, lean, family))
            yield from (_Upgrade(per_byte, b, saved) for per_byte, saved in known[key])

    def _ways(self, block: Block, lean: Policy, family: Family) -> list[tuple[float, float, Saved]]:
        """Bytes that a layer saves of a micro-batch, and seconds that it computes again."""
        ways: list[tuple[float, float, Saved]] = []
        for saved in (way.saved for way in ways_of(block, family.boundary_stride) if not way.away):
            again = block.recompute(saved)
            if again is not None and not (saved is Saved.ALL and lean.spill_blocks):  # which saves its input too
                ways.append((again.saved_bytes, self.cost.recompute_s(block, again, self.semantics), saved))
        return ways


def halves(n: int) -> Iterator[int]:
    """n, half of it, and so on to one."""
    while n:
        yield n
        n //= 2


def _with(lean: Policy, upgrades: Sequence[_Upgrade], blocks: Sequence[int], n: int) -> Policy:
    """The policy with the first n upgrades; beyond the last one, weights of the first of these blocks stay on the device."""
    saved = {upgrade.block: upgrade.saved for upgrade in upgrades[:n]}  # a layer's last one counts
    resident = tuple(sorted(blocks[: max(len(lean.resident_blocks), n - len(upgrades))]))
    return replace(with_ways(lean, {b: Way(what) for b, what in saved.items()}), resident_blocks=resident)


def _hull(ways: Sequence[tuple[float, float, Saved]]) -> list[tuple[float, Saved]]:
    """Seconds that each further byte saves, and for what: from the first way on, always the one that saves most."""
    n_bytes, seconds, _ = ways[0]
    found: list[tuple[float, Saved]] = []
    while better := [((seconds - s) / max(1.0, b - n_bytes), b, s, saved) for b, s, saved in ways if s < seconds and b >= n_bytes]:
        per_byte, n_bytes, seconds, saved = max(better, key=lambda way: way[:3])
        found.append((per_byte, saved))
    return found
