"""Choices of a policy family as variables of an integer program: the number of equal blocks with each treatment.

The coefficients of a choice are differences in work and memory between two policies: with one block treated in this way, and
without (`planner/bounds/work.py`, `planner/predict/memory.py`). A new treatment is one line here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

import numpy as np

from penstock.planner.bounds.bounds import SLACK, places_to_stay
from penstock.planner.bounds.integer import Program
from penstock.planner.bounds.work import early_fetches, least_slots
from penstock.planner.lower.arenas import N_READ_SLOTS, N_STAGING_SLOTS, gradient_slot_bytes, slot_elements
from penstock.runtime.plan import Policy, Update
from penstock.runtime.plan.legality import can_square, vocabulary
from penstock.runtime.plan.policy import LEAVE
from penstock.runtime.plan.workload import ITEM_BYTES, BlockKind, Saved

from . import tuning
from .evaluation import Evaluator, Numbers
from .neighbours import Omission
from .policies import WAYS, Family, Fill, Slots, Way, can_spill, disk_layers, staying, ways_of, with_ways

Treated = Callable[[Policy, Sequence[int]], Policy]


@dataclass(frozen=True, slots=True)
class Choice:
    """Equal blocks, any number of which may be treated in one way instead of another."""

    blocks: Sequence[int]
    treated: Treated
    instead: Treated  # the alternative, usually the policy unchanged
    count: int  # variable: number of blocks
    used: int  # variable: 1 if any block
    also: Sequence[int] = ()  # other blocks with work that the treatment changes


def _added(name: str) -> Treated:
    """Treatment that adds blocks to a tuple field of the policy."""

    def treated(policy: Policy, blocks: Sequence[int]) -> Policy:
        return replace(policy, **{name: tuple(sorted({*getattr(policy, name), *blocks}))})  # type: ignore[arg-type]

    return treated


def _saving(way: Way) -> Treated:
    return lambda policy, blocks: with_ways(policy, dict.fromkeys(blocks, way))


def _read_once(policy: Policy, blocks: Sequence[int]) -> Policy:
    return _added("resident_blocks")(_added("disk_blocks")(policy, blocks), blocks)


def _unchanged(policy: Policy, blocks: Sequence[int]) -> Policy:
    return policy


class Choices:
    """Variables of the program. The objective is the mean step: the share `clipped_fraction` of steps repeats its early updates."""

    def __init__(self, evaluator: Evaluator, smallest: Policy, family: Family, slots: Slots) -> None:
        self.evaluator, self.smallest, self.plan, self.group = evaluator, smallest, evaluator.setup(smallest), family.groups[-1]
        self.workload, self.classes = evaluator.workload, evaluator.workload.classes
        self.n_groups = -(-evaluator.semantics.n_micro_batches // family.accumulation_group)
        self.layers = [i for i, b in enumerate(self.classes) if self.workload.blocks[b[0]].kind is BlockKind.LAYER]
        p, n_layers, often = Program(), self.workload.n_layers, evaluator.clipped_fraction
        self.program = p
        self.step = p.variable(0, inf, integer=False, cost=1 - (often or 0.0))
        self.clipped_step = p.variable(0, inf, integer=False, cost=often or 0.0)
        depth, is_most = slots.prefetch_depth or 1, not 0 < slots.prefetch_depth <= max(tuning.PREFETCH_DEPTHS)
        self.depth = p.variable(depth, max(depth, n_layers) if is_most else depth)
        self.spared = p.variable(0, inf, integer=False)  # loads saved between sweeps
        self.spared_reads = p.variable(0, inf, integer=False)
        self.early = p.variable(0, inf, integer=False)  # boundaries fetched before the first loss
        self.early_saved = p.variable(0, inf, integer=False)  # saved activations fetched before it
        # Offload slots per tier in addition to those of the smallest policy; 0 if the number is fixed
        most_slots = 0 if slots.saved_slots else n_layers * self.group
        self.more_slots = {saved: p.variable(0, most_slots, integer=False) for saved in LEAVE}
        self.squares = p.variable(0, 1)  # 1 if the device squares all complete gradients
        # Choices by class of equal blocks: tier of saved activations, resident weights, and so on
        self.saving: dict[tuple[int, Way], Choice] = {}
        self.resident, self.spilled, self.early_updated, self.squared, self.staying = [dict[int, Choice]() for _ in range(5)]
        self.on_disk, self.read_once, self.summed = [dict[int, Choice]() for _ in range(3)]
        trains_all, deferred = self.workload.trains_all, family.update is Update.DEFERRED
        may_square = self._may_square() if trains_all else []
        may_sum = family.summed is not None and not self.plan.reduced and evaluator.semantics.ranks == 1
        self.may_stay = places_to_stay(self.plan, evaluator.profile) if deferred else []
        spills = can_spill(self.workload) if family.boundary_stride == 1 else ()
        for i, blocks in enumerate(self.classes):
            b = blocks[0]
            if i in self.layers:  # layers below the first trained one save only their input
                ways = ways_of(self.workload.blocks[b], family.boundary_stride)
                for way in ways if b >= self.workload.first_trained else ways[:1]:
                    self.saving[i, way] = self._choice(blocks, _saving(way))
            self.resident[i] = self._choice(blocks, _added("resident_blocks"))
            if b in disk_layers(evaluator.semantics, self.workload, evaluator.profile):
                self.on_disk[i] = self._choice(blocks, _added("disk_blocks"))
                if evaluator.setup(_read_once(smallest, (b,))).stays_loaded(b):
                    self.read_once[i] = self._choice(blocks, _read_once)
            if can := [b for b in blocks if b in spills]:
                self.spilled[i] = self._choice(can, _added("spill_blocks"))
            if deferred and often is not None and trains_all:
                self.early_updated[i] = self._choice(blocks, _added("speculate_blocks"))
            if may_sum and i in self.layers and self.workload.blocks[b].trained and b not in smallest.device_blocks:
                self.summed[i] = self._choice(blocks, _added("sum_blocks"))
            summing = self.summed[i].treated if i in self.summed else _unchanged
            if b in may_square:
                self.squared[i] = self._choice(blocks, self._squaring(summing), instead=summing)
            if b in self.may_stay and not (self.workload.tied and b == self.workload.n_layers + 1):
                self.staying[i] = self._choice(blocks, self._stay, instead=self._squaring(summing))

        if self.workload.tied and 0 in self.may_stay:  # embedding and head stay together
            both = replace(self.staying[0], also=(self.workload.n_layers + 1,))
            self.staying |= {0: both, len(self.classes) - 1: both}
        self.leaving = {saved: [c for (_, way), c in self.saving.items() if way == Way(saved, away=True)] for saved in LEAVE}
        self.read = [*self.on_disk.values(), *self.read_once.values()]
        several = [*self.leaving.values(), [*self.spilled.values()], self.read]
        grouped = {choice.count for choice in chain(*several, self.squared.values())}
        # Groups of choices that share slots
        self.sharing = [*several, *([choice] for choice in self.all() if choice.count not in grouped)]

    def _may_square(self) -> list[int]:
        """Blocks with whole gradients on the device in some member of the family."""
        plan = self.plan
        added = vocabulary(self.workload) if self.workload.tied and not plan.joins_tied else ()  # by the host
        may = can_square(self.workload, plan.semantics) if plan.reduced or plan.policy.sum_blocks else range(0)
        return [b for b in may if b not in added]

    def _stay(self, policy: Policy, blocks: Sequence[int]) -> Policy:
        return staying(self.plan, policy, {*policy.device_blocks, *blocks})

    def _squaring(self, summing: Treated) -> Treated:
        return lambda policy, blocks: replace(summing(policy, blocks), square_on_device=True)

    def _choice(self, blocks: Sequence[int], treated: Treated, instead: Treated = _unchanged) -> Choice:
        return Choice(blocks, treated, instead, self.program.variable(0, len(blocks)), self.program.variable(0, 1))

    def all(self) -> Iterator[Choice]:
        of_weights = (self.resident, self.on_disk, self.read_once)
        of_gradients = (self.summed, self.squared, self.staying, self.early_updated)
        tables = (*of_weights, self.spilled, *of_gradients)
        every = chain(self.saving.values(), *(table.values() for table in tables))
        yield from {choice.count: choice for choice in every}.values()

    def together(self, lacking: Omission | None = None) -> None:
        """Add the constraints between choices. `lacking`: a kind of choice that is disabled."""
        p, n_layers = self.program, self.workload.n_layers
        for choice in self.all():
            if lacking is not None and lacking.has(choice.treated(self.smallest, choice.blocks[:1])):
                p.high[choice.count] = 0.0
        for choice in self.all():
            p.at_most({choice.count: 1.0, choice.used: -float(len(choice.blocks))}, 0.0)
        for i in self.layers:
            of_class = {choice.count: 1.0 for (j, _), choice in self.saving.items() if j == i}
            for sign in (1.0, -1.0):  # every layer saves in exactly one way
                p.at_most({n: sign * one for n, one in of_class.items()}, sign * len(self.classes[i]))
        spilled = {choice.count: 1.0 for choice in self.spilled.values()}
        keeping = {choice.count: 1.0 for (_, way), choice in self.saving.items() if way.saved is Saved.ALL}
        p.at_most({**spilled, **keeping}, float(n_layers))  # a layer that saves everything keeps its input on the device
        # Early fetches are limited by the number of slots
        p.at_most({self.early: 1.0}, early_fetches(self.group, n_layers))
        p.at_most({self.early: 1.0, **dict.fromkeys(spilled, -float(self.group))}, 0.0)
        p.at_most({self.early_saved: 1.0, **{choice.count: -float(self.group) for choice in chain(*self.leaving.values())}}, 0.0)
        extra_slots = dict.fromkeys(self.more_slots.values(), -1.0)
        p.at_most({self.early_saved: 1.0, **extra_slots}, float(len(LEAVE) * self.smallest.saved_slots))
        for saved, leaving in self.leaving.items():  # no extra slots for a tier that is not used
            limit = -float(n_layers * self.group)
            p.at_most({self.more_slots[saved]: 1.0, **dict.fromkeys([choice.used for choice in leaving], limit)}, 0.0)
        for i, squared in self.squared.items():  # blocks with state on the device are squared there; all others if any is
            n, stays = float(len(squared.blocks)), {self.staying[i].count: 1.0} if i in self.staying else {}
            p.at_most({**stays, squared.count: -1.0}, 0.0)
            p.at_most({squared.count: 1.0, **dict.fromkeys(stays, -1.0), self.squares: -n}, 0.0)
            if i in self.summed:  # only those that the device sums
                p.at_most({squared.count: 1.0, self.summed[i].count: -1.0}, 0.0)
                p.at_most({squared.count: -1.0, self.summed[i].count: 1.0, self.squares: n}, n)
            else:
                p.at_most({squared.count: -1.0, self.squares: n}, 0.0)
        for i, on_device in self.staying.items():  # these blocks are neither resident nor updated early
            for conflicting in (self.early_updated, self.resident):
                if i in conflicting:
                    p.at_most({on_device.count: 1.0, conflicting[i].count: 1.0}, float(len(on_device.blocks)))
        n_turns = 2 * self.n_groups - 1  # between sweeps; the number of reusable slots is least_slots + prefetch depth
        p.at_most({self.spared: 1.0, self.depth: -float(n_turns)}, float(n_turns * least_slots(self.plan)))
        counts = [table[i].count for table in (self.resident, self.read_once, self.staying) for i in self.layers if i in table]
        p.at_most({self.spared: 1.0, **dict.fromkeys(counts, float(n_turns))}, float(n_turns * n_layers))
        limit = float(n_turns * (least_slots(self.plan) + N_READ_SLOTS))
        p.at_most({self.spared_reads: 1.0, self.depth: -float(n_turns)}, limit)
        p.at_most({self.spared_reads: 1.0, **{choice.count: -float(n_turns) for choice in self.on_disk.values()}}, 0.0)
        for i in self.on_disk:  # at most one of these per block
            either = [table[i].count for table in (self.resident, self.on_disk, self.read_once) if i in table]
            p.at_most(dict.fromkeys(either, 1.0), float(len(self.classes[i])))

    def within_memory(self) -> None:
        """Add one memory constraint for the device and one for the host, in shares of capacity."""
        p, blocks, needs = self.program, self.workload.blocks, self.evaluator.needs(self.smallest)
        capacities = (float(needs.device_memory_bytes), float(needs.host_memory_bytes))
        rows: tuple[dict[int, float], dict[int, float]] = ({}, {})

        def add(number: int, n_bytes: Sequence[float]) -> None:
            for row, n, capacity in zip(rows, n_bytes, capacities, strict=True):
                row[number] = row.get(number, 0.0) + n / capacity

        def largest(candidates: Iterable[tuple[int, float]], least_bytes: float = 0.0, place: int = 0) -> None:
            """Add memory for the maximum of all used choices, at least `least_bytes`. `place`: 0 for device, 1 for host."""
            room = p.variable(0, inf, integer=False)
            for used, n_bytes in candidates:
                p.at_most({used: n_bytes / capacities[place], room: -1.0}, 0.0)
            p.at_most({room: -1.0}, -least_bytes / capacities[place])
            rows[place][room] = 1.0

        (smallest_bytes, per_slot, per_square), *of_choices = self._bytes()
        per_depth = 0 if self.plan.packed_slots else self._weight_bytes(of_layers=True)
        add(self.depth, [per_slot[0] + per_depth, per_slot[1]])  # slots of the least depth are only needed if layers stream
        smallest_bytes = [smallest_bytes[0] - per_depth * self._least_depth, smallest_bytes[1]]
        add(self.squares, per_square)
        for group, of_group in zip(self.sharing, of_choices, strict=True):
            slots, on_host = list[tuple[int, float]](), list[tuple[int, float]]()
            for choice, per_block, first in zip(group, of_group[::2], of_group[1::2], strict=True):
                add(choice.count, per_block)
                slots.append((choice.used, first[0] - per_block[0]))
                on_host.append((choice.used, first[1] - per_block[1]))
            largest(slots)
            if group is self.read and group:
                largest(on_host, place=1)
            for number in [self.more_slots[saved] for saved, leaving in self.leaving.items() if leaving is group and slots]:
                add(number, (min(n_bytes for _, n_bytes in slots) / self.smallest.saved_slots, 0.0))
        staying_one = [(choice.used, choice.treated(self.smallest, choice.blocks[:1])) for choice in self.staying.values()]
        transients = [(used, float(self.evaluator.setup(policy).other_transient_bytes)) for used, policy in staying_one]
        for (i, way), choice in self.saving.items():
            again = blocks[self.classes[i][0]].recompute(way.saved)
            assert again is not None, "the block has this way of saving"
            transients.append((choice.used, float(again.transient_bytes)))
        largest(transients, self.plan.other_transient_bytes)
        for of_layers in (True, False):
            largest(self._leaving(of_layers))
            largest(self._streaming(of_layers))
        if not self.plan.reduced:
            largest(self._staged(), place=1)
        for row, n_bytes, of_slot, capacity in zip(rows, smallest_bytes, per_slot, capacities, strict=True):
            p.at_most(row, 1 - (n_bytes - of_slot * self.smallest.prefetch_depth) / capacity + SLACK)

    def _bytes(self) -> list[list[list[int]]]:
        """Result of `_asked_bytes`, interpolated: memory is affine in the group size if the step has several groups."""
        smallest, known, n = replace(self.smallest, gradient_slots=1), self.evaluator.asked_bytes, self.smallest.accumulation_group
        sizes = (n,) if n < 3 or self.plan.reduced else (1, 2)
        of_sizes = [replace(smallest, accumulation_group=size) for size in sizes]
        may_sum = bool(self.summed)
        for policy in of_sizes:
            if (policy, may_sum) not in known:
                known[policy, may_sum] = self._asked_bytes(policy)
        first, last = known[of_sizes[0], may_sum], known[of_sizes[-1], may_sum]
        return [(a + (n - sizes[0]) * (b - a)).tolist() for a, b in zip(first, last, strict=True)]

    def _asked_bytes(self, smallest: Policy) -> list[Numbers]:
        """(device, host) bytes of the smallest policy, of one more weight slot, and of squares on the device. Then, per group of
        choices that share slots, two rows per choice: bytes of one more block, and of the first block."""

        def difference(policy: Policy, than: Policy) -> list[int]:
            return [b - a for a, b in zip(self.evaluator.peaks(than), self.evaluator.peaks(policy), strict=True)]

        per_slot = difference(replace(smallest, prefetch_depth=smallest.prefetch_depth + 1), smallest)
        result = [[[*self.evaluator.peaks(smallest)], per_slot, difference(replace(smallest, square_on_device=True), smallest)]]
        for group in self.sharing:
            of_group = list[list[int]]()
            for choice in group:
                instead, first = choice.instead(smallest, choice.blocks[:1]), choice.blocks[:1]
                one = choice.treated(instead, first)
                then = choice.blocks[1:2]
                base = choice.instead(one, then)  # slots exist already, so one more block needs none
                if not then:
                    base, then = instead, first
                    for sibling in group:
                        base = sibling.treated(base, sibling.blocks[:1]) if sibling.blocks != choice.blocks else base
                of_group += [difference(choice.treated(base, then), base), difference(one, instead)]
            result.append(of_group)
        return [np.array(numbers, dtype=np.int64).reshape(-1, 2) for numbers in result]

    def _leaving(self, of_layers: bool) -> Iterator[tuple[int, float]]:
        """Yield (variable, bytes) of gradient slots for each class of layers or vocabulary blocks with state on the host."""
        n_slots = self.plan.policy.gradient_slots if of_layers else 1
        for i, blocks in enumerate(self.classes):
            if (i in self.layers) is of_layers and blocks[0] not in self.smallest.device_blocks:
                b, policies = blocks[0], [self.smallest]
                policies += [self.summed[i].treated(self.smallest, blocks[:1])] if i in self.summed else []
                least_bytes = min(gradient_slot_bytes(self.evaluator.bare_setup(policy), b) for policy in policies)
                yield self._rest(i, self.staying), float(n_slots * least_bytes)

    def _streaming(self, of_layers: bool) -> Iterator[tuple[int, float]]:
        """Yield (variable, bytes) of slots of streamed weights, for each class of layers or vocabulary blocks."""
        n_slots = 1 if self.plan.packed_slots or not of_layers else self._least_depth + 1
        n_bytes = float(n_slots * self._weight_bytes(of_layers))
        for i, (b, *_) in enumerate(self.classes):
            if (i in self.layers) is of_layers:
                is_in_place = not (self.workload.blocks[b].tied or self.workload.blocks[b].is_mixed)
                tables = (self.resident, self.read_once, *[self.staying] * is_in_place)
                yield self._rest(i, *tables), n_bytes

    @property
    def _least_depth(self) -> int:
        return round(self.program.low[self.depth])

    def _staged(self) -> Iterator[tuple[int, float]]:
        """Yield (variable, bytes) of host slots for gradients of single micro-batches, for each class of layers."""
        item = ITEM_BYTES[self.plan.semantics.compute_dtype]
        for i, (b, *_) in ((i, self.classes[i]) for i in self.layers):
            if not self.plan.sums_on_device(b):
                yield self._rest(i, self.summed), float(N_STAGING_SLOTS * self.plan.gradient_elements(b) * item)

    def _weight_bytes(self, of_layers: bool) -> int:
        """Bytes of a slot of streamed weights."""
        classes = (blocks for i, blocks in enumerate(self.classes) if (i in self.layers) is of_layers)
        return max(slot_elements(self.plan, blocks[0]) for blocks in classes) * ITEM_BYTES[self.plan.semantics.compute_dtype]

    def _rest(self, i: int, *tables: dict[int, Choice]) -> int:
        """Variable that is 1 if these treatments leave out a block of class i."""
        rest, n = self.program.variable(0, 1), -float(len(self.classes[i]))
        self.program.at_most({rest: n, **{table[i].count: -1.0 for table in tables if i in table}}, n)
        return rest

    def fill(self, x: list[float]) -> Fill:
        """Decode a solution."""

        def counts(by_class: dict[int, Choice]) -> tuple[int, ...]:
            return tuple(round(x[by_class[i].count]) if i in by_class else 0 for i in range(len(self.classes)))

        richer = [way for way in WAYS if way.saved is not Saved.INPUT]
        ways = {way: counts({i: choice for (i, w), choice in self.saving.items() if w == way}) for way in richer}
        return Fill(
            ways, counts(self.resident), counts(self.early_updated), round(x[self.squares]) == 1, counts(self.on_disk),
            counts(self.read_once), counts(self.staying), counts(self.summed), sum(counts(self.spilled)),
        )  # fmt: skip
