"""What may the policies of a family choose, as variables of an integer program?

Counts of equal blocks: which save what, stay resident, spill, are updated on speculation, squared on the device or updated there.
The rows say what may be chosen together, and what fits device and host memory.
"""

from math import inf

from hwprofiles.schema import Profile
from planner.bounds.bounds import SLACK, early_fetches, places_to_stay
from planner.bounds.integer import Program
from planner.bounds.phases import least_slots
from planner.lower.arenas import N_SAVED_SLOTS, spill_ring_slots
from planner.predict.memory import footprint
from runtime.plan import Setup, Update
from runtime.plan.legality import can_square
from runtime.plan.policy import RICHER
from runtime.plan.setup import DEVICE_UPDATE_SCRATCH_BYTES
from runtime.plan.workload import SLOT_ALIGN_BYTES, BlockKind, Saved

from .space import PREFETCH_DEPTHS, Family, Fill, Way, can_spill, ways_of

RICHER_WAYS = (*map(Way, RICHER), Way(Saved.ATTENTION, away=True), Way(Saved.PRODUCTS, away=True))


class Choices:
    """The variables of a program, by number; its cost is the step, of which `clipped_fraction` redo what was speculated on."""

    def __init__(
        self, plan: Setup, family: Family, prefetch_depth: int | None, clipped_fraction: float | None, profile: Profile
    ) -> None:
        self.plan, self.workload, self.group = plan, plan.workload, family.groups[-1]
        self.n_groups = -(-plan.semantics.n_micro_batches // family.accumulation_group)
        self.classes = self.workload.classes
        kinds = [self.workload.blocks[blocks[0]].kind for blocks in self.classes]
        self.layers = [i for i, kind in enumerate(kinds) if kind is BlockKind.LAYER]  # the classes that are layers
        p, n_layers = Program(), self.workload.n_layers
        self.program, often = p, clipped_fraction
        self.step = p.variable(0, inf, integer=False, cost=1 - (often or 0.0))
        self.clipped_step = p.variable(0, inf, integer=False, cost=often or 0.0)
        is_most = prefetch_depth is None or prefetch_depth > max(PREFETCH_DEPTHS)
        self.depth = p.variable(prefetch_depth or 1, max(prefetch_depth or 1, n_layers) if is_most else prefetch_depth or 1)
        self.spared = p.variable(0, inf, integer=False)  # loads that a turn of the walk saves
        self.transient = p.variable(0, inf, integer=False)  # in shares of device memory
        self.saved_slots = p.variable(0, inf, integer=False)  # in such shares too
        may_spill = family.boundary_stride == 1
        self.early = p.variable(0, inf, integer=False)  # boundaries that are back before the first loss
        self.early_saved = p.variable(0, N_SAVED_SLOTS, integer=False)  # what layers saved that is
        self.n_spilled, self.spills = p.variable(0, len(can_spill(self.workload)) * may_spill), p.variable(0, int(may_spill))
        # By class and way, how many save so, and whether any does.
        self.saving = {
            (i, way): (p.variable(0, len(self.classes[i])), p.variable(0, 1))
            for i in self.layers
            for way in self._ways_of(self.classes[i][0], family.boundary_stride)
        }
        # Phases of all groups: `bounds.Phases` has them as up, back, around, home and the last of these.
        self.up, self.back, self.around, self.left, self.last = (p.variable(0, inf, integer=False) for _ in range(5))
        self.resident = [p.variable(0, len(blocks)) for blocks in self.classes]
        speculates = family.update is Update.DEFERRED and often is not None and self.workload.trains_all
        self.speculate = [p.variable(0, len(blocks) if speculates else 0) for blocks in self.classes]
        squares = plan.reduced and self.workload.trains_all
        self.can_square = can_square(self.workload, plan.semantics) if squares else range(0)
        self.square = [p.variable(0, len(blocks) if blocks[0] in self.can_square else 0) for blocks in self.classes]
        self.can_stay = places_to_stay(plan, profile) if family.update is Update.DEFERRED else []
        self.stay = [p.variable(0, len(blocks) if blocks[0] in self.can_stay else 0) for blocks in self.classes]

    def _ways_of(self, block: int, boundary_stride: int) -> list[Way]:
        """How a layer may save its activations, if a backward comes to it."""
        return ways_of(self.workload.blocks[block], boundary_stride) if block >= self.workload.first_trained else [Way(Saved.INPUT)]

    def together(self) -> None:
        """Rows for what may be chosen together."""
        p, n_layers = self.program, self.workload.n_layers
        for i in self.layers:
            of_class = [variables for (j, _), variables in self.saving.items() if j == i]
            n_blocks = len(self.classes[i])
            for sign in (1.0, -1.0):  # each layer saves in one way
                p.at_most({n: sign for n, _ in of_class}, sign * n_blocks)
            for n, used in of_class:
                p.at_most({n: 1.0, used: -float(n_blocks)}, 0.0)
        p.at_most({self.n_spilled: 1.0, self.spills: -float(n_layers)}, 0.0)
        p.at_most({self.early: 1.0, self.spills: -float(early_fetches(self.group, n_layers))}, 0.0)
        p.at_most({self.early: 1.0, self.n_spilled: -float(self.group)}, 0.0)
        away = {n: -float(self.group) for (_, way), (n, _) in self.saving.items() if way.away}
        p.at_most({self.early_saved: 1.0, **away}, 0.0)
        kept = {n: 1.0 for (_, way), (n, _) in self.saving.items() if way.saved is Saved.ALL}
        p.at_most({self.n_spilled: 1.0, **kept}, float(n_layers))  # the input of a layer that keeps cannot spill
        for i, blocks in enumerate(self.classes):  # what stays is squared there, and on the host neither waits nor is guessed
            p.at_most({self.stay[i]: 1.0, self.square[i]: -1.0}, 0.0)
            p.at_most({self.stay[i]: 1.0, self.speculate[i]: 1.0}, float(len(blocks)))
            p.at_most({self.stay[i]: 1.0, self.resident[i]: 1.0}, float(len(blocks)))
        n_turns = 2 * self.n_groups - 1  # of the walk over the layers
        # One more slot than are prefetched, or two
        p.at_most({self.spared: 1.0, self.depth: -float(n_turns)}, float(n_turns * least_slots(self.plan)))
        streamed = {n: float(n_turns) for i in self.layers for n in (self.resident[i], self.stay[i])}
        p.at_most({self.spared: 1.0, **streamed}, float(n_turns * n_layers))

    def within_memory(self, profile: Profile) -> None:
        """A row for the device and one for the host, each in shares of what the machine has."""
        p, blocks, group = self.program, self.workload.blocks, self.plan.policy.accumulation_group
        needs = footprint(self.plan, profile)
        weights, streamed = self.plan.arena("weights"), self.plan.arena("packed") or self.plan.arena("weights")
        assert weights is not None
        assert streamed is not None
        device_bytes, host_bytes = float(needs.device_memory_bytes), float(needs.host_memory_bytes)
        boundary_bytes = group * -(-blocks[0].boundary_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        item = weights.slot_bytes[0] / max(b.slot_elements for b in blocks[1:-1])
        device = {self.depth: streamed.slot_bytes[0], self.transient: device_bytes, self.saved_slots: device_bytes}
        host: dict[int, float] = {self.n_spilled: boundary_bytes}
        device |= {self.n_spilled: -boundary_bytes, self.spills: spill_ring_slots(group) * boundary_bytes / group}
        for i, of_class in enumerate(self.classes):
            device[self.resident[i]] = blocks[of_class[0]].slot_elements * item
        for (i, way), (n, used) in self.saving.items():
            again = blocks[self.classes[i][0]].recompute(way.saved)
            assert again is not None, "a way is one that the block has"
            if way.away:
                slot_bytes = -(-again.slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
                host[n] = group * slot_bytes
                p.at_most({used: N_SAVED_SLOTS * slot_bytes / device_bytes, self.saved_slots: -1.0}, 0.0)
            else:
                device[n] = group * again.saved_bytes
            p.at_most({used: again.transient_bytes / device_bytes, self.transient: -1.0}, 0.0)
        p.at_most({self.transient: -1.0}, -self.plan.vocab_transient_bytes / device_bytes)
        device |= {stay: self.plan.staying_bytes(self.classes[i][0]) for i, stay in enumerate(self.stay)}
        device |= self._empty_slots(device_bytes)
        fixed_bytes = needs.device_peak_bytes - self.plan.transient_bytes - streamed.slot_bytes[0]
        p.at_most({v: n / device_bytes for v, n in device.items()}, 1 - fixed_bytes / device_bytes + SLACK)
        per_param = sum(self.plan.state_bytes().values())
        for i, of_class in enumerate(self.classes):
            host[self.speculate[i]] = blocks[of_class[0]].host_elements * per_param
            host[self.stay[i]] = -self.plan.staying_bytes(of_class[0])
        p.at_most({v: n / host_bytes for v, n in host.items()}, 1 - needs.host_peak_bytes / host_bytes + SLACK)

    def _empty_slots(self, device_bytes: float) -> dict[int, float]:
        """Where anything stays, its update takes room for a moment; where all layers do, or the whole vocabulary, the slots through
        which their gradients leave are empty."""
        p, gradients = self.program, self.plan.arena("gradients")
        assert gradients is not None
        if not self.can_stay:
            return {}
        any_stays, n_blocks = p.variable(0, 1), len(self.workload.blocks)
        p.at_most({**dict.fromkeys(self.stay, 1.0), any_stays: -float(n_blocks)}, 0.0)
        p.at_most({any_stays: DEVICE_UPDATE_SCRATCH_BYTES / device_bytes, self.transient: -1.0}, 0.0)
        of_layers = [self.stay[i] for i in self.layers]
        of_vocab = [stay for stay in self.stay if stay not in of_layers]
        empty: dict[int, float] = {}
        for stay, slots in ((of_layers, gradients.slot_bytes[:-1]), (of_vocab, gradients.slot_bytes[-1:])):
            all_stay, n = p.variable(0, 1), 2 if stay is of_vocab else self.workload.n_layers
            p.at_most({all_stay: float(n), **dict.fromkeys(stay, -1.0)}, 0.0)
            empty[all_stay] = -sum(slots)
        return empty

    def fill(self, x: list[float]) -> Fill:
        """What a solution chooses."""
        counts = {key: round(x[n]) for key, (n, _) in self.saving.items()}
        ways = {way: tuple(counts.get((i, way), 0) for i in range(len(self.classes))) for way in RICHER_WAYS}
        resident, speculate, square, stay = (
            tuple(round(x[n]) for n in numbers) for numbers in (self.resident, self.speculate, self.square, self.stay)
        )
        return Fill(ways, resident, speculate, square, stay, round(x[self.n_spilled]))
