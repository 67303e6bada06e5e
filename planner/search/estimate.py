"""Greedy policies, with which a search begins.

Two buffers each way, all micro-batches in one group or as many as fit, or one by one; boundaries on the device or on the host; and
memory filled with what saves most recompute per byte.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from types import MappingProxyType

from penstock.runtime.plan import Kind, Op, Policy, Setup, Update
from penstock.runtime.plan.footprint import device_needs
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind, Saved

from .frames import Frames
from .space import Way, can_spill, eager_is_legal, evenly, most, most_on_device, places_of_mixed, places_on_disk, staying, with_ways

BUFFERS = ((2, 2), (1, 1))  # prefetch depth and gradient slots: the first that fit
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
        n, least = self.semantics.n_micro_batches, self.semantics.least_group
        found: dict[Policy, None] = {}
        leaves = False  # whether there is anything that would rather be on the host
        for group in dict.fromkeys((n, least)):
            smaller = [size for size in halves(n // 2) if size > least] if group == n else []
            for spills in (False, True):
                in_groups = (self._filled(size, spills) for size in (group, *smaller))  # of the largest size that fits
                filled, has_all = next((one for one in in_groups if one[0] is not None), (None, False))
                if filled is not None:
                    found[filled] = None
                leaves |= not has_all
                if has_all:
                    break  # what boundaries on the host would make room for is there
        for saved, spills in product((Saved.PRODUCTS, Saved.ATTENTION) if leaves else (), (False, True)):
            away = self._leaving(saved)
            if not away:
                continue
            groups = [group for group in halves(n) if least <= group <= MOST_LEAVING]
            fitting = (self._filled(group, spills, away=some)[0] for group in groups for some in self._some(away))
            found |= dict.fromkeys(islice(filter(None, fitting), 1))
            if saved is Saved.PRODUCTS and (one_by_one := self._filled(least, spills, away=away)[0]) is not None:
                found[one_by_one] = None
        # The first blocks, as many as leave their state room on the device under a lean policy
        whole = self.frames.of(Policy(accumulation_group=n, update=Update.DEFERRED))
        stay = most_on_device(whole, self.profile)[0].policy.device_blocks
        if stay and (kept := self._filled(n, spills=False, stay=stay)[0]) is not None:
            found[kept] = None
        return list(found)

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
        for each in (1, *FEWER_LEAVING) if self.semantics.ranks > 1 else (1,):
            if each == 1 or each < len(away):
                yield dict(islice(away.items(), None, None, each))

    def _filled(
        self, group: int, spills: bool, away: Mapping[int, Way] = MappingProxyType({}), stay: Sequence[int] = ()
    ) -> tuple[Policy | None, bool]:
        """The lean policy with as many upgrades, then resident weights, as fit, and whether all do; None if not even that."""
        update = Update.EAGER if eager_is_legal(self.semantics) else Update.DEFERRED
        mixed = places_of_mixed(self.semantics, self.workload)[0]
        spilled = can_spill(self.workload) if spills else ()
        # First the blocks that are needed first, the last; or where weights come again for every group, blocks spread evenly, so
        # that between two uploads there is always something to compute.
        in_one_group = group == self.semantics.n_micro_batches
        blocks = [b for b in range(len(self.workload.blocks)) if b not in stay]
        blocks.sort(key=lambda b: -b if in_one_group else b * GOLDEN % 1.0)
        turn = {b: i for i, b in enumerate([*blocks, *stay])}
        of_group = with_ways(Policy(accumulation_group=group, update=update, device_blocks=mixed, spill_blocks=spilled), away)
        of_group = staying(of_group, stay) if stay else of_group
        leans = (self._with_disk(replace(of_group, prefetch_depth=depth, gradient_slots=slots)) for depth, slots in BUFFERS)
        lean = next((lean for lean in leans if self.frames.needs(lean).fits), None)
        if lean is None:
            return None, False
        blocks.sort(key=lambda b: b not in lean.disk_blocks)  # what stays is read once; what is trained on the host, every time
        blocks = [b for b in blocks if b not in lean.disk_blocks or mixed]
        framed = self.frames.of(lean)
        of_others = (upgrade for upgrade in self._upgrades(lean) if upgrade.block not in away)
        upgrades = sorted(of_others, key=lambda u: (-u.seconds_per_byte, turn[u.block]))
        n = most(len(upgrades) + len(blocks), lambda n: self._fits(framed, _with(lean, upgrades, blocks, n)))
        return _with(lean, upgrades, blocks, n), n >= len(upgrades)

    def _with_disk(self, policy: Policy) -> Policy:
        """The policy with the fewest layers on the disk with which the host has room; without one, the policy."""
        may_read, needs = places_on_disk(self.semantics, self.workload, self.profile), self.frames.needs
        if not may_read or not needs(policy).short_host_bytes:
            return policy
        several = range(1, len(may_read))
        n = 1 + bisect_left(several, True, key=lambda n: not needs(_on_disk(policy, may_read, n)).short_host_bytes)
        return _on_disk(policy, may_read, n)

    def _fits(self, lean: Setup, policy: Policy) -> bool:
        """Whether the device has room for what a lean plan that fits would save and keep besides."""
        of = self.profile.device
        plan = replace(lean, policy=policy)
        needs = device_needs(plan, of.kind == "cuda", of.workspace_bytes.value if of.workspace_bytes else None)
        item = ITEM_BYTES[self.semantics.compute_dtype]
        resident_bytes = sum(self.workload.blocks[b].slot_elements * item for b in policy.resident_blocks)
        return sum(needs.values()) + resident_bytes + of.context_bytes.value <= of.memory_bytes.value

    def _upgrades(self, lean: Policy) -> Iterator[_Upgrade]:
        """Of each layer the ways to save, each worth less per byte than the one before."""
        for blocks in self.workload.classes:
            block = self.workload.blocks[blocks[0]]
            if block.kind is not BlockKind.LAYER or blocks[0] < self.workload.first_trained:
                continue
            ways: list[tuple[float, float, Saved]] = []  # bytes that it saves of a micro-batch, and seconds that it computes again
            for saved in Saved:
                again = block.recompute(saved)
                if again is not None and not (saved is Saved.ALL and lean.spill_blocks):  # which saves its input too
                    ways.append((again.saved_bytes, self.cost.recompute_s(block, again, self.semantics), saved))
            for per_byte, what in _hull(ways):
                yield from (_Upgrade(per_byte, b, what) for b in blocks)


def _on_disk(policy: Policy, may_read: Sequence[int], n: int) -> Policy:
    return replace(policy, disk_blocks=tuple(evenly(may_read, n)))


def halves(n: int) -> Iterator[int]:
    """n, half of it, and so on to one."""
    while n:
        yield n
        n //= 2


def _with(lean: Policy, upgrades: Sequence[_Upgrade], blocks: Sequence[int], n: int) -> Policy:
    """The policy with the first n upgrades; beyond the last one, weights of the first of these blocks stay on the device."""
    saved = {upgrade.block: upgrade.saved for upgrade in upgrades[:n]}  # a layer's last one counts
    resident = tuple(sorted(blocks[: max(0, n - len(upgrades))]))
    return replace(with_ways(lean, {b: Way(what) for b, what in saved.items()}), resident_blocks=resident)


def _hull(ways: Sequence[tuple[float, float, Saved]]) -> list[tuple[float, Saved]]:
    """Seconds that each further byte saves, and for what: from the first way on, always the one that saves most."""
    n_bytes, seconds, _ = ways[0]
    found: list[tuple[float, Saved]] = []
    while better := [((seconds - s) / max(1.0, b - n_bytes), b, s, saved) for b, s, saved in ways if s < seconds and b >= n_bytes]:
        per_byte, n_bytes, seconds, saved = max(better, key=lambda way: way[:3])
        found.append((per_byte, saved))
    return found
