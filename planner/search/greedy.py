"""Greedy policies, the starting points of a search.

They have two buffers in each direction; all micro-batches in one group, the largest group that fits, or single ones; boundaries on
the device or on the host. Memory is filled in order of recompute seconds saved per byte.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from types import MappingProxyType

from penstock.planner.lower.arenas import slot_elements
from penstock.planner.model.workload import build_workload
from penstock.planner.predict.resident import Resident, resident_in_parts, shares_memory
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, Op, Policy, Setup, Update
from penstock.runtime.plan.footprint import device_needs
from penstock.runtime.plan.legality import refuse_illegal
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind, Saved

from . import tuning
from .evaluation import Evaluator
from .policies import (
    Way,
    can_spill,
    device_sums,
    disk_layers,
    evenly,
    fill_device,
    first_update,
    max_fitting,
    mixed_options,
    staying,
    with_ways,
)

GOLDEN = (5**0.5 - 1) / 2  # multiples of it modulo 1 spread evenly for any number of points


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """A layer that saves a richer tier and recomputes less."""

    seconds_per_byte: float
    block: int
    saved: Saved


class Greedy:
    """Greedy policies of one workload."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.workload, self.cost = evaluator, evaluator.workload, evaluator.cost
        self.semantics, self.profile = evaluator.semantics, evaluator.profile

    def policies(self) -> list[Policy]:
        n, least = self.semantics.n_micro_batches, self.semantics.least_group
        result: dict[Policy, None] = {}
        leaves = False  # True if the device cannot hold every upgrade
        for group in dict.fromkeys((n, least)):
            smaller = [size for size in halves(n // 2) if size > least] if group == n else []
            for spills in (False, True):
                in_groups = (self._filled(size, spills) for size in (group, *smaller))  # the largest that fits
                filled, has_all = next((one for one in in_groups if one[0] is not None), (None, False))
                if filled is not None:
                    result[filled] = None
                leaves |= not has_all
                if has_all:
                    break  # the device holds every upgrade, so offloading boundaries would not help
        for saved, spills in product((Saved.PRODUCTS, Saved.ATTENTION) if leaves else (), (False, True)):
            away = self._leaving(saved)
            if not away:
                continue
            groups = [group for group in halves(n) if least <= group <= tuning.MOST_LEAVING]
            # With several ranks, where groups cannot shrink, host memory may suffice for fewer layers
            strides = (1, *tuning.FEWER_LEAVING) if self.semantics.ranks > 1 else (1,)
            subsets = [dict(islice(away.items(), None, None, k)) for k in strides if k == 1 or k < len(away)]
            fitting = (self._filled(group, spills, away=subset)[0] for group, subset in product(groups, subsets))
            result |= dict.fromkeys(islice(filter(None, fitting), 1))
            if saved is Saved.PRODUCTS and (one_by_one := self._filled(least, spills, away=away)[0]) is not None:
                result[one_by_one] = None
        # State of the first blocks on the device, as many as fit next to the smallest policy
        one_group = self.evaluator.setup(Policy(accumulation_group=n, update=Update.DEFERRED))
        stay = fill_device(one_group, self.profile)[0].policy.device_blocks
        if stay and (with_state := self._filled(n, spills=False, stay=stay)[0]) is not None:
            result[with_state] = None
        for policy in (self._summed(), self.resident()):
            if policy is not None and self.evaluator.needs(policy).fits:
                result[policy] = None
        return list(result)

    def _summed(self) -> Policy | None:
        """Micro-batches one after another, with gradient sums on the device: of all blocks, or of the layers that fit."""
        mixed = mixed_options(self.semantics, self.workload)[0]
        fixed = device_sums(self.semantics, self.workload, 1, mixed) if self.semantics.n_micro_batches > 1 else None
        if fixed is None:
            return None
        layers = [b for b, block in enumerate(self.workload.blocks) if block.trained and b not in (*mixed, *fixed)]

        def summing(n: int) -> tuple[int, ...]:
            return tuple(sorted({*fixed, *layers[:n]}))

        smallest = Policy(accumulation_group=1, update=first_update(self.semantics), device_blocks=mixed)
        n = max_fitting(len(layers), lambda n: self.evaluator.needs(replace(smallest, sum_blocks=summing(n))).fits)
        return self._filled(1, spills=False, summed=summing(n))[0] if summing(n) else None

    def resident(self) -> Policy | None:
        """The schedule of a trainer with all weights, gradient sums and optimizer states on the device, which saves all that
        fits for backward; None if the device cannot update every trained block. The policy may not fit."""
        everything, mixed = range(len(self.workload.blocks)), mixed_options(self.semantics, self.workload)[0]
        stays = self.workload.trains_all or mixed == self.workload.mixed
        if self.semantics.ranks > 1 or not stays or shares_memory(self.profile):
            return None
        base = Policy(accumulation_group=1, update=Update.DEFERRED, device_blocks=mixed, resident_blocks=tuple(everything))
        if self.workload.trains_all:
            summed = device_sums(self.semantics, self.workload, 1) or ()
            base = staying(self.evaluator.setup(Policy()), replace(base, sum_blocks=summed), everything)
        with suppress(PlanError):
            refuse_illegal(self.workload, self.semantics, base)
            upgrades, framed = self._by_gain(base, (), {}), self.evaluator.setup(base)
            n = max_fitting(len(upgrades), lambda n: self._fits(framed, _upgraded(base, upgrades, (), n)))
            return replace(_upgraded(base, upgrades, (), n), resident_blocks=base.resident_blocks)
        return None

    def _by_gain(self, base: Policy, away: Collection[int], turn: Mapping[int, int]) -> list[_Upgrade]:
        """Upgrades of layers that are not in `away`, by gain per byte, then by the layer's turn."""
        of_others = (upgrade for upgrade in self._upgrades(base) if upgrade.block not in away)
        return sorted(of_others, key=lambda u: (-u.seconds_per_byte, turn.get(u.block, 0)))

    def _leaving(self, saved: Saved) -> dict[int, Way]:
        """Evenly spaced layers that can offload this tier as fast as they compute forward; empty if a layer cannot save it."""
        first = max(1, self.workload.first_trained)
        block, layers = self.workload.blocks[first], range(first, self.workload.n_layers + 1)
        if not layers or any(self.workload.blocks[b].recompute(saved) is None for b in layers):
            return {}
        smallest = Policy(accumulation_group=self.semantics.least_group)
        plan = self.evaluator.setup(with_ways(smallest, {first: Way(saved, away=True)}))
        offload_s = self.cost.demand(plan, Op(Kind.OFFLOAD_SAVED, first, 0)).uncontended_s
        share = min(1.0, self.cost.forward_s(block, self.semantics) / offload_s)
        return dict.fromkeys(evenly(layers, max(1, round(share * len(layers)))), Way(saved, away=True))

    def _filled(
        self,
        group: int,
        spills: bool,
        away: Mapping[int, Way] = MappingProxyType({}),
        stay: Sequence[int] = (),
        summed: Sequence[int] = (),
    ) -> tuple[Policy | None, bool]:
        """Add upgrades, then resident weights, while they fit. Return the policy (None if none fits), True if all upgrades fit."""
        update, mixed = first_update(self.semantics), mixed_options(self.semantics, self.workload)[0]
        spilled = can_spill(self.workload) if spills else ()
        # With one group, the last blocks come first, because backward needs them first. With several groups, which load weights
        # again, blocks are spread evenly, so that uploads alternate with compute.
        in_one_group = group == self.semantics.n_micro_batches
        blocks = [b for b in range(len(self.workload.blocks)) if b not in stay]
        blocks.sort(key=lambda b: -b if in_one_group else b * GOLDEN % 1.0)
        turn = {b: i for i, b in enumerate([*blocks, *stay])}
        fixed = Policy(accumulation_group=group, update=update, device_blocks=mixed, spill_blocks=spilled, sum_blocks=tuple(summed))
        of_group = with_ways(fixed, away)
        of_group = staying(self.evaluator.setup(Policy()), of_group, stay) if stay else of_group
        bases = (self._with_disk(replace(of_group, prefetch_depth=depth, gradient_slots=slots)) for depth, slots in tuning.BUFFERS)
        base = next((base for base in bases if self.evaluator.needs(base).fits), None)
        if base is None:
            return None, False
        blocks.sort(key=lambda b: b not in base.disk_blocks)  # disk blocks first: resident ones are read only once
        blocks = [b for b in blocks if b not in base.disk_blocks or mixed]
        framed = self.evaluator.setup(base)
        upgrades = self._by_gain(base, away, turn)
        n = max_fitting(len(upgrades) + len(blocks), lambda n: self._fits(framed, _upgraded(base, upgrades, blocks, n)))
        return _upgraded(base, upgrades, blocks, n), n >= len(upgrades)

    def _with_disk(self, policy: Policy) -> Policy:
        """Place the fewest layers on the disk that make the host memory sufficient; unchanged without a disk."""
        may_read, needs = disk_layers(self.semantics, self.workload, self.profile), self.evaluator.needs
        if not may_read or not needs(policy).short_host_bytes:
            return policy
        several = range(1, len(may_read))
        n = 1 + bisect_left(several, True, key=lambda n: not needs(_on_disk(policy, may_read, n)).short_host_bytes)
        return _on_disk(policy, may_read, n)

    def _fits(self, base: Setup, policy: Policy) -> bool:
        """True if the device has memory for the saved activations and resident weights of `policy`, given that `base` fits."""
        device = self.profile.device
        plan = replace(base, policy=policy)
        needs = device_needs(plan, device.kind == "cuda", device.workspace_bytes.value if device.workspace_bytes else None)
        item = ITEM_BYTES[self.semantics.compute_dtype]
        added = {*policy.resident_blocks}.difference(base.policy.resident_blocks)
        resident_bytes = sum(slot_elements(plan, b) * item for b in added)
        return sum(needs.values()) + resident_bytes + device.context_bytes.value <= device.memory_bytes.value

    def _upgrades(self, base: Policy) -> Iterator[_Upgrade]:
        """Yield upgrades of each layer, with decreasing gain per byte."""
        for blocks in self.workload.classes:
            block = self.workload.blocks[blocks[0]]
            if block.kind is not BlockKind.LAYER or blocks[0] < self.workload.first_trained:
                continue
            ways: list[tuple[float, float, Saved]] = []  # bytes saved per micro-batch, seconds of recompute, tier
            for saved in Saved:
                again = block.recompute(saved)
                if again is not None and not (saved is Saved.ALL and base.spill_blocks):  # Saved.ALL includes the input
                    ways.append((again.saved_bytes, self.cost.recompute_s(block, again, self.semantics), saved))
            for per_byte, tier in _hull(ways):
                yield from (_Upgrade(per_byte, b, tier) for b in blocks)


def resident_baseline(evaluator: Evaluator, may_split: bool) -> Resident | None:
    """The schedule of a resident trainer under these semantics: a policy of the search space on one GPU, an estimate on several. If
    it does not fit and `may_split`, the micro-batch is halved until it does. None if device and host share one memory."""
    policy, semantics = Greedy(evaluator).resident(), evaluator.semantics
    if policy is None:
        return resident_in_parts(evaluator.setup(Policy()), evaluator.cost)
    needs, smaller = evaluator.needs(policy), semantics.micro_batch // 2
    unsplit = Resident(evaluator.step_s(policy) if needs.fits else None, needs, is_estimate=False)
    if needs.fits or not may_split or not smaller or semantics.batch_size % smaller:
        return unsplit
    split = replace(semantics, micro_batch=smaller)
    if split.n_micro_batches > tuning.MOST_MICRO_BATCHES or split.n_micro_batches % split.sum_groups:
        return unsplit
    workload = build_workload(evaluator.model, split)
    halved = resident_baseline(
        Evaluator(evaluator.model, workload, split, evaluator.profile, evaluator.clipped_fraction), may_split
    )
    return unsplit if halved is None or halved.step_s is None else halved


def _on_disk(policy: Policy, may_read: Sequence[int], n: int) -> Policy:
    return replace(policy, disk_blocks=tuple(evenly(may_read, n)))


def halves(n: int) -> Iterator[int]:
    """Yield n, n // 2, ... 1."""
    while n:
        yield n
        n //= 2


def _upgraded(base: Policy, upgrades: Sequence[_Upgrade], blocks: Sequence[int], n: int) -> Policy:
    """Apply the first n upgrades. If n exceeds their number, make the weights of the first blocks resident."""
    saved = {upgrade.block: upgrade.saved for upgrade in upgrades[:n]}  # the last upgrade of a layer wins
    resident = tuple(sorted(blocks[: max(0, n - len(upgrades))]))
    return replace(with_ways(base, {b: Way(tier) for b, tier in saved.items()}), resident_blocks=resident)


def _hull(ways: Sequence[tuple[float, float, Saved]]) -> list[tuple[float, Saved]]:
    """Upper convex hull of the tiers: (seconds gained per byte, tier), each the best step from the previous one."""
    n_bytes, seconds, _ = ways[0]
    hull: list[tuple[float, Saved]] = []
    while better := [((seconds - s) / max(1.0, b - n_bytes), b, s, saved) for b, s, saved in ways if s < seconds and b >= n_bytes]:
        per_byte, n_bytes, seconds, saved = max(better, key=lambda way: way[:3])
        hull.append((per_byte, saved))
    return hull
