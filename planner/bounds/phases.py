"""How long do the forward and backward passes of groups of micro-batches take, at least?

On the compute lane a group's ops come in four phases, one after another: up the layers, the loss, down the layers, the embedding's
backward. Groups follow each other, so a step is at least the sum of all phases (docs/bounds.md, "Phases").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.lower.arenas import N_SAVED_SLOTS, N_STAGING_SLOTS, n_whole_sums, spill_ring_slots
from runtime.plan import LANE_OF, Kind, Setup
from runtime.plan.workload import BlockKind

from .facets import Key, add, nothing

LEAVING, COMING = (Kind.OFFLOAD_ACTIVATION, Kind.OFFLOAD_SAVED), (Kind.FETCH_ACTIVATION, Kind.FETCH_SAVED)
PASSING = (*LEAVING, *COMING)


@dataclass(slots=True)
class Turns:
    """Ops of one kind of a vocabulary block: how often, seconds on their lane in all, and of the shortest."""

    n: int = 0
    total_s: float = 0.0
    shortest_s: float = inf


@dataclass(frozen=True, slots=True)
class Buffers:
    """How much of one phase's work may be done before it begins or after it ends."""

    n_loads: int  # that may have begun before
    n_slots: int  # gradients of layers in device slots
    n_staged: int  # and on the host, waiting to be added
    n_passing: Mapping[Kind, int] = field(default_factory=dict)  # activations in the slots that ops of this kind share


@dataclass(slots=True)
class Passing:
    """Activations that leave on the ways up, or come back on the ways down, through a few slots: so many may be under way when a
    way up ends, or a way down begins."""

    all: dict[Key, float] = field(default_factory=nothing)
    one: dict[Key, float] = field(default_factory=nothing)  # the largest

    def add(self, load: Mapping[Key, float], count: int) -> None:
        add(self.all, load, count)
        self.one |= {key: max(seconds, self.one[key]) for key, seconds in load.items()}


@dataclass(slots=True)
class Phases:
    """What all groups ask for on their ways, in seconds of every facet.

    Times of phases are of all groups together, were every group as the mean of them.
    """

    n_groups: int
    equal: bool  # all groups are as large
    first_fraction: float  # of the step's work that the first group, the largest, has at most
    n_gradients: int  # of layers, that leave in the phase down of the smallest group
    in_turn: int  # gradients of one vocabulary block that the smallest group sends one after another
    head: int
    up: dict[Key, float] = field(default_factory=nothing)  # computing
    down: dict[Key, float] = field(default_factory=nothing)
    loads: dict[Key, float] = field(default_factory=nothing)  # one way of one group, up
    loads_down: dict[Key, float] = field(default_factory=nothing)  # and down, as far as anything is trained
    largest_load: dict[Key, float] = field(default_factory=dict)
    largest_unpacking: dict[Key, float] = field(default_factory=nothing)  # of one layer's weights; counted with computing
    leaving: dict[Key, float] = field(default_factory=nothing)  # gradients of layers, and what the host adds of them
    head_leaving: dict[Key, float] = field(default_factory=nothing)  # the head's last gradient of one group
    one_leaving: dict[int, dict[Key, float]] = field(default_factory=dict)  # one gradient of each layer
    one_staged: dict[int, dict[Key, float]] = field(default_factory=dict)  # of it, what is left to do once it is on the host
    vocab: dict[tuple[Kind, int], Turns] = field(default_factory=dict)
    passing: dict[Kind, Passing] = field(default_factory=lambda: {kind: Passing() for kind in PASSING})

    @property
    def n_slips(self) -> float:
        """How often what may slip from one phase to the next is to be taken off the sum over all groups, so that every share of it
        that is asked for (`first_fraction`) is at most the sum over the other groups."""
        others = 1 - self.first_fraction
        return self.n_groups if self.equal or others <= 0 else max(self.n_groups, (self.n_groups - 1) / others)

    # -- the vocabulary blocks: a gradient is computed when the one before has left, and leaves when that has been added --------

    @property
    def takes_turns(self) -> bool:
        """Whether gradients of single micro-batches leave, several of a block in every group."""
        return (Kind.ACCUMULATE, 0) in self.vocab and self.in_turn > 1

    @property
    def loss_s(self) -> float:
        """From the start of a group's first loss to the end of its last."""
        return self._computing_s(Kind.LOSS, self.head)

    @property
    def embedding_s(self) -> float:
        """From the start of the embedding's first backward to the end of its last."""
        return self._computing_s(Kind.BACKWARD, 0)

    def _computing_s(self, kind: Kind, block: int) -> float:
        computing, left_s, added_s = self._turn(kind, block)
        apart_s = (computing.n - self.n_groups) * left_s
        adding_s = (computing.n - 2 * self.n_groups) * added_s + 2 * self.n_groups * computing.shortest_s
        return apart_s + max(computing.total_s, adding_s if self.takes_turns else 0.0)

    @property
    def embedding_after_layers_s(self) -> float:
        """From when all gradients of layers have left to the end of the embedding's last backward, where it takes turns."""
        computing, left_s, added_s = self._turn(Kind.BACKWARD, 0)
        between_s = (computing.n - 2 * self.n_groups) * max(computing.shortest_s, added_s)
        return (computing.n - self.n_groups) * left_s + between_s + self.n_groups * computing.shortest_s

    @property
    def home_s(self) -> float:
        """From when all gradients of layers have left to when the embedding's last has."""
        computing, left_s, added_s = self._turn(Kind.BACKWARD, 0)
        if (Kind.OFFLOAD_GRADIENT, 0) not in self.vocab:  # it stays on the device
            return 0.0
        if (Kind.ACCUMULATE, 0) not in self.vocab:
            return self.n_groups * self.vocab[Kind.OFFLOAD_GRADIENT, 0].shortest_s
        return computing.n * left_s + (computing.n - self.n_groups) * max(computing.shortest_s, added_s)

    def _turn(self, kind: Kind, block: int) -> tuple[Turns, float, float]:
        """What computes, and seconds for which a gradient leaves and is added before the next can."""
        computing = self.vocab.get((kind, block), Turns(shortest_s=0.0))  # none, of an embedding that is not trained
        if (Kind.ACCUMULATE, block) not in self.vocab:
            return computing, 0.0, 0.0
        return (
            computing,
            self.vocab[Kind.OFFLOAD_GRADIENT, block].shortest_s,
            self.vocab[Kind.ACCUMULATE, block].shortest_s,
        )

    # -- the layers -----------------------------------------------------------------------------------------------------

    def up_s(self, buffers: Buffers) -> float:
        """The ways up the layers."""
        return max(
            self.way_s(self.up, key) + self.loads_s(self.loads, key, buffers) + self.passing_s(LEAVING, key, buffers)
            for key in self.up
        )

    def first_up_s(self, buffers: Buffers) -> float:
        """The first group's way up, which is no shorter than the others'."""
        return self.up_s(buffers) / self.n_groups

    def down_s(self, buffers: Buffers) -> float:
        """The ways down, until the last backward: gradients in slots leave later."""
        late_s = ((key, self.left_s(key, buffers)) for key in self.down)
        return max(self._down_s(key, buffers) + max(0.0, left_s) for key, left_s in late_s)

    def down_and_left_s(self, buffers: Buffers) -> float:
        """The ways down, until the last gradient of a layer has left."""
        return max(self._down_s(key, buffers) + max(0.0, self.all_left_s(key, buffers)) for key in self.down)

    def _down_s(self, key: Key, buffers: Buffers) -> float:
        return self.way_s(self.down, key) + self.loads_s(self.loads_down, key, buffers) + self.passing_s(COMING, key, buffers)

    def way_s(self, way: Mapping[Key, float], key: Key) -> float:
        """Computing on the ways up, or down. The first layer's weights may have been unpacked before."""
        return way[key] - self.n_groups * self.largest_unpacking[key]

    def passing_s(self, kinds: Sequence[Kind], key: Key, buffers: Buffers) -> float:
        """Activations that leave, or come back, wholly within the ways."""
        slots = {kind: self.n_slips * buffers.n_passing[kind] * self.passing[kind].one[key] for kind in kinds}
        return sum(max(0.0, self.passing[kind].all[key] - slots[kind]) for kind in kinds)

    def loads_s(self, loads: Mapping[Key, float], key: Key, buffers: Buffers) -> float:
        """Loads that lie wholly within the ways."""
        return self.n_groups * max(0.0, loads[key] - buffers.n_loads * self.largest_load.get(key, 0.0))

    def left_s(self, key: Key, buffers: Buffers) -> float:
        """What of gradients leaves before the last backwards end: all but those in slots.

        The head's last gradient leaves before those of layers; so if any of these has left and been added, that has, too.
        """
        in_slots_s = buffers.n_slots * _largest_s(self.one_leaving, key) + buffers.n_staged * _largest_s(self.one_staged, key)
        head_s = self.head_leaving[key] if self.n_gradients > buffers.n_slots + buffers.n_staged else 0.0
        return self.leaving[key] + self.n_groups * head_s - self.n_slips * in_slots_s

    def all_left_s(self, key: Key, buffers: Buffers) -> float:
        """What of gradients is done when the last of them has left: all but what is still to be added."""
        head_s = self.head_leaving[key] if self.n_gradients > buffers.n_staged else 0.0
        staged_s = buffers.n_staged * _largest_s(self.one_staged, key)
        return self.leaving[key] + self.n_groups * head_s - self.n_slips * staged_s

    # -- the step -------------------------------------------------------------------------------------------------------

    def back_s(self, buffers: Buffers, turns_s: float) -> float:
        """From the last losses to the ends of the embedding's last backwards. `turns_s`: of layers' backwards and gradients that
        leave, one after the other."""
        late_s = self.n_slips * _largest_s(self.one_leaving, LANE_OF[Kind.OFFLOAD_GRADIENT])
        computed_s = max(turns_s - late_s, self.down_s(buffers)) + self.embedding_s
        if not self.takes_turns:
            return computed_s
        return max(computed_s, max(turns_s, self.down_and_left_s(buffers)) + self.embedding_after_layers_s)

    def around_s(self, buffers: Buffers, turns_s: float) -> float:
        """From the last losses of groups to the first losses of the groups that follow."""
        computed_s = self.back_s(buffers, turns_s) + self.up_s(buffers)
        return max(computed_s, max(turns_s, self.down_and_left_s(buffers)) + self.home_s)

    def after_first_way_up_s(self, buffers: Buffers, turns_s: float) -> float:
        """From the first loss of the step to the norm."""
        around_s, up_s = self.around_s(buffers, turns_s), self.up_s(buffers)
        back_s, home_s = self.back_s(buffers, turns_s), max(turns_s, self.down_and_left_s(buffers)) + self.home_s
        if self.equal:
            return self.loss_s + (1 - 1 / self.n_groups) * around_s + max(back_s, home_s) / self.n_groups
        # Of every sum over the groups but the first, or but the last and smallest, at least this share is left.
        others = 1 - self.first_fraction
        return self.loss_s + max(back_s + others * up_s, others * around_s)


def _largest_s(of: Mapping[int, Mapping[Key, float]], key: Key) -> float:
    return max((load[key] for load in of.values()), default=0.0)


def phases_of(plan: Setup, groups: range) -> Phases:
    """The phases of the plan's groups, nothing counted yet; their size is any of `groups`, which make equally many."""
    n, n_layers = plan.semantics.n_micro_batches, plan.workload.n_layers
    smallest, largest = min(n % size or size for size in groups), groups[-1]
    n_groups, n_whole = -(-n // largest), n - bool(plan.semantics.n_left)
    trained = {b for b in range(1, n_layers + 1) if plan.workload.blocks[b].trained}
    n_leaving = len(trained.difference(plan.policy.device_blocks))
    # The last group joins more sums of the host's than those before it.
    equal = n_groups * largest == n_whole and (plan.reduced or plan.semantics.sum_groups == 1)
    return Phases(
        n_groups, equal, min(1.0, largest / max(1, n_whole)), n_leaving * (1 if plan.reduced else smallest), smallest, n_layers + 1
    )


def buffers_of(plan: Setup) -> Buffers:
    """What may slip from phase to phase with the plan's policy."""
    n_slots, n_staged = plan.policy.gradient_slots + summed_slots(plan), staged_slots(plan)
    n_loads = plan.policy.prefetch_depth + least_slots(plan)
    return Buffers(n_loads, n_slots, n_staged, passing_slots(plan.policy.accumulation_group))


def least_slots(plan: Setup) -> int:
    """Layers whose weights may be on the device besides those that are prefetched: the one that is computed; and where it is
    unpacked, another that is packed."""
    return 2 if plan.packed_slots else 1


def passing_slots(group: int) -> dict[Kind, int]:
    """Slots that activations share when they leave or come back."""
    of_boundaries = dict.fromkeys((Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION), spill_ring_slots(group))
    return of_boundaries | dict.fromkeys((Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED), N_SAVED_SLOTS)


def staged_slots(plan: Setup) -> int:
    """Gradients of layers that may have left the device and are still to be added on the host."""
    return 0 if plan.reduced else N_STAGING_SLOTS


def summed_slots(plan: Setup) -> int:
    """Gradients of layers that may wait for other ranks', as sums: in slots besides those of gradients."""
    return n_whole_sums(plan) if plan.semantics.ranks > 1 else 0


def add_to_phases(phases: Phases, plan: Setup, kind: Kind, block: int, load: Mapping[Key, float], count: int) -> None:
    """Count an op so many times where it belongs."""
    if plan.workload.blocks[block].kind is not BlockKind.LAYER:
        _add_vocab(phases, kind, block, load, count)
        return
    match kind:
        case Kind.FORWARD:
            add(phases.up, load, count)
        case Kind.BACKWARD | Kind.RECOMPUTE | Kind.SQUARE:
            add(phases.down, load, count)
        case Kind.OFFLOAD_ACTIVATION | Kind.OFFLOAD_SAVED | Kind.FETCH_ACTIVATION | Kind.FETCH_SAVED:
            phases.passing[kind].add(load, count)
        case Kind.DEQUANTISE if block not in plan.policy.resident_blocks:
            for way in (phases.up, phases.down) if block >= plan.workload.first_trained else (phases.up,):
                add(way, load, phases.n_groups)
            phases.largest_unpacking |= {key: max(s, phases.largest_unpacking[key]) for key, s in load.items()}
        case Kind.LOAD if block not in plan.policy.resident_blocks:
            add(phases.loads, load, 1)
            if block >= plan.workload.first_trained:
                add(phases.loads_down, load, 1)
            phases.largest_load |= {key: max(s, phases.largest_load.get(key, 0.0)) for key, s in load.items()}
        case Kind.OFFLOAD_GRADIENT | Kind.ACCUMULATE:
            add(phases.leaving, load, count)
            add(phases.one_leaving.setdefault(block, nothing()), load, 1)
            add(phases.one_staged.setdefault(block, nothing()), load, int(kind is Kind.ACCUMULATE))
        case _:
            pass


def _add_vocab(phases: Phases, kind: Kind, block: int, load: Mapping[Key, float], count: int) -> None:
    turns = phases.vocab.setdefault((kind, block), Turns())
    turns.n += count
    turns.total_s += count * load[LANE_OF[kind]]
    turns.shortest_s = min(turns.shortest_s, load[LANE_OF[kind]])
    if block and kind in (Kind.OFFLOAD_GRADIENT, Kind.ACCUMULATE) and turns.n == count:  # the first sort, which takes least
        add(phases.head_leaving, load, 1)
