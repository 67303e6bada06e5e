"""How fast could any policy of a family be, whatever it chooses block by block?

An integer program over counts of equal blocks: which save what, stay resident, spill, are updated on speculation, within device
and host memory. The step is at least as long as every lane, every shared resource and the chain that closes a step, as
`bounds.py` has them. It leaves out order and contention, so its optimum bounds every policy of the family from below: only
its dual bound is claimed. Its choices are suggestions, to be lowered and simulated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from planner.bounds.bounds import ARRIVING, early_fetches, idle_in_turns, is_first_gradient, of_each_size, ops_at_least
from planner.bounds.bounds import first_gradient_s as first_gradient_s_of
from planner.bounds.facets import Facets, Key, add, nothing
from planner.bounds.phases import COMING, LEAVING, PASSING, Buffers, Passing, add_to_phases, passing_slots, phases_of, staged_slots
from planner.lower.arenas import N_SAVED_SLOTS, spill_ring_slots
from planner.predict.cost import CostModel
from planner.predict.memory import footprint, frame
from runtime.plan import Kind, Lane, Op, Policy, Semantics, Setup, Update
from runtime.plan.legality import can_square
from runtime.plan.policy import RICHER
from runtime.plan.region import Demand
from runtime.plan.workload import SLOT_ALIGN_BYTES, BlockKind, Model, Saved, Workload

from .integer import Program
from .space import GRADIENT_SLOTS, PREFETCH_DEPTHS, Family, Fill, Way, classes_of, ways_of, with_ways

RICHER_WAYS = (*map(Way, RICHER), Way(Saved.ATTENTION, away=True), Way(Saved.PRODUCTS, away=True))
SLACK = 2e-6  # what the solver's tolerances may move a bound or a limit by, twice


@dataclass(frozen=True, slots=True)
class Relaxed:
    """No policy of the family, with these buffers, has a step below `bound_s`; `fill` is what the program would choose."""

    bound_s: float
    prefetch_depth: int
    fill: Fill


class Relaxation:
    """The integer programs of one workload on one machine, one per family and pair of buffers.

    A prefetch depth above the usual ones stands for itself and all that are deeper, and so do gradient slots for more of them.
    """

    def __init__(
        self, model: Model, workload: Workload, semantics: Semantics, cost: CostModel, clipped_fraction: float | None
    ) -> None:
        self.model, self.workload, self.semantics, self.clipped_fraction = model, workload, semantics, clipped_fraction
        self.cost, self.profile = cost, cost.profile
        self.classes = classes_of(workload)
        self.frames: dict[Policy, Setup] = {}
        self.known: dict[tuple[Family, int | None, int | None], Relaxed | None] = {}
        self.facets: dict[bool, Facets] = {}  # by whether gradients are summed on the device

    @property
    def n_solved(self) -> int:
        return len(self.known)

    def solve(self, family: Family, prefetch_depth: int | None = None, gradient_slots: int | None = None) -> Relaxed | None:
        """The relaxation with these buffers (None: whichever are best); None where nothing fits."""
        key = (family, prefetch_depth, gradient_slots)
        if key not in self.known:
            self.known[key] = _Builder(self, family, prefetch_depth, gradient_slots).solve()
        return self.known[key]

    def frame(self, policy: Policy) -> Setup:
        if policy not in self.frames:
            self.frames[policy] = frame(self.model, self.workload, self.semantics, policy)
        return self.frames[policy]

    def facets_of(self, plan: Setup) -> Facets:
        """Facets that hold for every policy which sums gradients where this lean one does."""
        if plan.reduced not in self.facets:
            self.facets[plan.reduced] = Facets((plan, *self._others(plan)), self.cost)
        return self.facets[plan.reduced]

    def _others(self, plan: Setup) -> Iterator[Setup]:
        """The same policy where ops draw otherwise on what is shared: squares on the device; and, where computing draws on the
        host's memory, other activations saved; and copies of what is saved."""
        lean = plan.policy
        if plan.reduced:
            yield self.frame(replace(lean, square_blocks=tuple(can_square(self.workload))))
        of_cpu = self.profile.device.kind == "cpu"
        for of_class in self.classes:
            if self.workload.blocks[b := of_class[0]].kind is BlockKind.LAYER:
                for way in ways_of(self.workload.blocks[b], 1):
                    if way.away or of_cpu:
                        yield self.frame(with_ways(replace(lean, boundary_stride=1), {b: way}))


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What a layer asks for besides, if what it saves goes to the host."""

    all: dict[Key, float] = field(default_factory=nothing)  # forward, offload and fetch, of all micro-batches
    passing: dict[Kind, Passing] = field(default_factory=lambda: {kind: Passing() for kind in PASSING})
    first: dict[Key, float] = field(default_factory=nothing)  # of the first group, what may be done before its loss, fetches apart


class _Builder:
    """Puts one integer program together."""

    def __init__(self, of: Relaxation, family: Family, prefetch_depth: int | None, gradient_slots: int | None) -> None:
        self.of, self.family = of, family
        self.workload, self.classes, self.program = of.workload, of.classes, Program()
        self.lean = replace(family.policy(of.semantics), gradient_slots=gradient_slots or 1)
        self.take_turns = gradient_slots == 1  # with more slots, or none said, they need not
        self.plan = of.frame(self.lean)
        self.one_slot = replace(self.lean, gradient_slots=1)  # on how many there are no op's cost depends
        self.facets = of.facets_of(self.plan)
        self.keys = self.facets.keys
        self.groups = family.groups
        self.n_groups = -(-of.semantics.n_micro_batches // family.accumulation_group)
        is_many = gradient_slots is None or gradient_slots >= max(GRADIENT_SLOTS)
        self.n_slots = (
            self.workload.n_layers * of.semantics.n_micro_batches if gradient_slots is None or is_many else gradient_slots
        )
        self.layers = [i for i, blocks in enumerate(self.classes) if self._kind(i) is BlockKind.LAYER]
        p, n_layers = self.program, self.workload.n_layers
        often = of.clipped_fraction
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
        self.n_spilled, self.spills = p.variable(0, n_layers if may_spill else 0), p.variable(0, int(may_spill))
        self.saving = {
            (i, tier): (p.variable(0, len(self.classes[i])), p.variable(0, 1))
            for i in self.layers
            for tier in ways_of(self.workload.blocks[self.classes[i][0]], family.boundary_stride)
        }
        # Phases of all groups: `bounds.Phases` has them as up, back, around, home and the last of these.
        self.up, self.back, self.around, self.left, self.last = (p.variable(0, inf, integer=False) for _ in range(5))
        self.resident = [p.variable(0, len(blocks)) for blocks in self.classes]
        speculates = family.update is Update.DEFERRED and often is not None
        self.speculate = [p.variable(0, len(blocks) if speculates else 0) for blocks in self.classes]
        legal = can_square(self.workload) if self.plan.reduced else ()
        self.square = [p.variable(0, len(blocks) if blocks[0] in legal else 0) for blocks in self.classes]
        loads = [self._squaring(blocks[0]) if blocks[0] in legal else (nothing(), nothing(), 0.0) for blocks in self.classes]
        self.squares, self.squaring = [load[0] for load in loads], [load[1] for load in loads]
        self.home = {self.square[0]: loads[0][2]}  # the embedding's gradient is the last to come home

    def _squaring(self, block: int) -> tuple[dict[Key, float], dict[Key, float], float]:
        """What a block's square costs; what is more to do with it than without, or less; and how much longer the gradient's way
        home is then."""
        square, more, home_s = nothing(), nothing(), 0.0
        squared = self.of.frame(replace(self.one_slot, square_blocks=(block,)))
        for plan, sign in ((squared, 1), (self.plan, -1)):
            for kind, _, demand, count in ops_at_least(plan, self.of.cost, only=block):
                if kind in (Kind.SQUARE, Kind.OFFLOAD_GRADIENT, Kind.NORM):
                    add(more, self.facets.of(kind, demand), sign * count)
                    add(square, self.facets.of(kind, demand), kind is Kind.SQUARE)
                    home_s += sign * demand.uncontended_s * (kind is not Kind.SQUARE)
        return square, more, home_s

    def _kind(self, i: int) -> BlockKind:
        return self.workload.blocks[self.classes[i][0]].kind

    def solve(self) -> Relaxed | None:
        self._times()
        self._choices()
        self._memory()
        found = self.program.solve()
        if found is None:
            return None
        bound, x = found
        counts = {key: round(x[n]) for key, (n, _) in self.saving.items()}

        ways = {way: tuple(counts.get((i, way), 0) for i in range(len(self.classes))) for way in RICHER_WAYS}
        fill = Fill(
            ways, tuple(round(x[r]) for r in self.resident),
            tuple(round(x[s]) for s in self.speculate), tuple(round(x[s]) for s in self.square), round(x[self.n_spilled]),
        )  # fmt: skip
        return Relaxed(bound * self.scale_s * (1 - SLACK), round(x[self.depth]), fill)

    # -- what may be chosen together --------------------------------------------------------------------------------

    def _choices(self) -> None:
        p = self.program
        for i in self.layers:
            of_class = [variables for (j, _), variables in self.saving.items() if j == i]
            n_blocks = len(self.classes[i])
            for sign in (1.0, -1.0):  # each layer saves in one way
                p.at_most({n: sign for n, _ in of_class}, sign * n_blocks)
            for n, used in of_class:
                p.at_most({n: 1.0, used: -float(n_blocks)}, 0.0)
        n_layers = self.workload.n_layers
        p.at_most({self.n_spilled: 1.0, self.spills: -float(n_layers)}, 0.0)
        group = self.groups[-1]
        p.at_most({self.early: 1.0, self.spills: -float(early_fetches(group, n_layers))}, 0.0)
        p.at_most({self.early: 1.0, self.n_spilled: -float(group)}, 0.0)
        away = {n: -float(group) for (_, way), (n, _) in self.saving.items() if way.away}
        p.at_most({self.early_saved: 1.0, **away}, 0.0)
        kept = {n: 1.0 for (_, tier), (n, _) in self.saving.items() if tier.saved is Saved.ALL}
        p.at_most({self.n_spilled: 1.0, **kept}, float(n_layers))  # the input of a layer that keeps cannot spill
        n_turns = 2 * self.n_groups - 1
        p.at_most({self.spared: 1.0, self.depth: -float(n_turns)}, float(n_turns))  # one more slot than are prefetched
        streamed = {self.resident[i]: float(n_turns) for i in self.layers}
        p.at_most({self.spared: 1.0, **streamed}, float(n_turns * n_layers))

    # -- time -------------------------------------------------------------------------------------------------------

    def _times(self) -> None:
        """A row per lane and resource, and the ring; all in units of `scale_s`."""
        phases = self.phases = phases_of(self.plan, self.groups)
        for kind, b, demand, count in ops_at_least(self.plan, self.of.cost):
            if kind is not Kind.BACKWARD or b == 0:
                add_to_phases(phases, self.plan, kind, b, self.facets.of(kind, demand), count)
        self.idle = idle_in_turns(self.plan, phases)
        constant, tiers = self._work()
        add(constant, self.idle, 1)
        self.scale_s = max(sum(constant.values()), 1e-12)
        variable: dict[int, dict[Key, float]] = {}
        self.backward = {n: tiers[key] for key, (n, _) in self.saving.items()}
        self.turns_s, self.turns = self._turns()
        self.leaving = {n: self._leaving(self.classes[i][0], way) for (i, way), (n, _) in self.saving.items() if way.away}
        for (i, tier), (n, _) in self.saving.items():
            leaving = self.leaving[n].all if tier.away else {}
            variable[n] = {key: seconds + leaving.get(key, 0.0) for key, seconds in tiers[i, tier].items()}
        first = [self.facets.of(Kind.LOAD, self._demand(Kind.LOAD, blocks[0])) for blocks in self.classes]
        total: dict[Key, float] = dict(constant)
        for i, blocks in enumerate(self.classes):
            n_loads = 2 * self.n_groups if i in self.layers else self.n_groups
            add(total, first[i], n_loads * len(blocks))
            variable[self.resident[i]] = {key: -(n_loads - 1) * seconds for key, seconds in first[i].items()}
        largest = {key: max(first[i].get(key, 0.0) for i in self.layers) for key in {k for i in self.layers for k in first[i]}}
        variable[self.spared] = {key: -seconds for key, seconds in largest.items()}
        moved = dict.fromkeys(total, 0.0)
        self.boundaries = {kind: Passing() for kind in PASSING}
        for kind in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION):
            for m, count in of_each_size(self.plan, self.of.semantics.n_micro_batches):
                self.boundaries[kind].add(self.facets.of(kind, self._demand(kind, 0, m)), count)
            add(moved, self.boundaries[kind].all, 1)
        variable[self.n_spilled] = moved
        variable |= dict(zip(self.square, self.squaring, strict=True))
        self._phases(first)
        for step, clipped in ((self.step, False), (self.clipped_step, True)):
            if clipped:
                again = (self.facets.of(Kind.UPDATE, self._demand(Kind.UPDATE, blocks[0])) for blocks in self.classes)
                variable |= dict(zip(self.speculate, again, strict=True))
            for key, seconds in ((key, total[key]) for key in self.keys):
                self._at_least(step, seconds, {n: load.get(key, 0.0) for n, load in variable.items()})
            self._ring(step, clipped, total, variable)

    def _leaving(self, block: int, way: Way) -> "_Leaving":
        """What there is to do when what a layer saves goes to the host and comes back."""
        leaving, plan = _Leaving(), self.of.frame(with_ways(self.one_slot, {block: way}))
        for total, n in ((leaving.all, self.of.semantics.n_micro_batches), (leaving.first, self.groups[-1])):
            for m, count in of_each_size(plan, n):
                forward, stays, offload, fetch = (
                    self.facets.of(kind, self.of.cost.demand(of, Op(kind, block, m)))
                    for of, kind in (
                        (plan, Kind.FORWARD),
                        (self.plan, Kind.FORWARD),
                        (plan, Kind.OFFLOAD_SAVED),
                        (plan, Kind.FETCH_SAVED),
                    )
                )
                add(total, forward, count)
                add(total, stays, -count)
                add(total, offload, count)
                if total is leaving.all:
                    add(total, fetch, count)
                    leaving.passing[Kind.OFFLOAD_SAVED].add(offload, count)
                    leaving.passing[Kind.FETCH_SAVED].add(fetch, count)
        return leaving

    def _phases_at_least(self, step: int, seconds: float, less: Mapping[int, float]) -> None:
        """step >= seconds + all phases but the first way up + less @ x: `Phases.after_first_way_up_s`."""
        row, others = {n: s / self.scale_s for n, s in less.items()}, 1 - self.phases.first_fraction
        if self.phases.equal:
            ways = [{self.around: 1 - 1 / self.n_groups, self.last: 1 / self.n_groups}]
        else:
            ways = [{self.back: 1.0, self.up: others}, {self.around: others}]
        for way in ways:
            sums = {n: row.get(n, 0.0) + way.get(n, 0.0) for n in {*row, *way}}
            self.program.at_most({**sums, step: -1.0}, -(seconds + self.phases.loss_s) / self.scale_s)

    def _at_least(self, step: int, seconds: float, variable: Mapping[int, float]) -> None:
        """step >= seconds + variable @ x."""
        row = {n: per_unit / self.scale_s for n, per_unit in variable.items() if per_unit}
        self.program.at_most({**row, step: -1.0}, -seconds / self.scale_s)

    def _work(self) -> tuple[dict[Key, float], dict[tuple[int, Way], dict[Key, float]]]:
        """What every member does but for loads and backward of layers; and one layer's backward, by class and tier."""
        constant: dict[Key, float] = nothing()
        tiers: dict[tuple[int, Way], dict[Key, float]] = {}
        class_of = {b: i for i, blocks in enumerate(self.classes) for b in blocks}
        for kind, b, demand, count in ops_at_least(self.plan, self.of.cost):
            if kind is Kind.LOAD or (kind is Kind.BACKWARD and class_of[b] in self.layers):
                continue
            add(constant, self.facets.of(kind, demand), count)
        for (i, tier), _ in self.saving.items():
            b = self.classes[i][0]
            total = dict.fromkeys(constant, 0.0)
            for kind, block, demand, count in ops_at_least(
                self.of.frame(with_ways(self.one_slot, {b: tier})), self.of.cost, only=b
            ):
                if kind is Kind.BACKWARD and block == b:
                    add(total, self.facets.of(kind, demand), count)
            tiers[i, tier] = total
        return constant, tiers

    def _ring(self, step: int, clipped: bool, total: Mapping[Key, float], variable: Mapping[int, Mapping[Key, float]]) -> None:
        """The ring of a step, as `bounds.py` has it; a row of the program for each of its links."""
        blocks = range(len(self.workload.blocks))
        update_s = [self._demand(Kind.UPDATE, b).uncontended_s for b in blocks]
        load_s = [self._demand(Kind.LOAD, b).uncontended_s for b in blocks]
        last_s = self._demand(Kind.NORM, 0).uncontended_s
        last_s += self._demand(Kind.OFFLOAD_GRADIENT, 0, None if self.plan.reduced else 0).uncontended_s
        computed = {n: load.get(Lane.GPU, 0.0) + self.home.get(n, 0.0) for n, load in variable.items()}
        match self.family.update:
            case Update.EAGER:
                self._at_least(step, load_s[0] + total[Lane.GPU] + last_s + update_s[0], computed)
                self.program.at_most({self.around: 1.0, step: -1.0}, -self.phases.loss_s / self.scale_s)
            case Update.DEFERRED:
                self._deferred_ring(step, clipped, total, variable, update_s, load_s, last_s)
            case Update.BARRIER:
                raise AssertionError("a barrier only adds to the time of a deferred update, whose bound is its own")

    def _deferred_ring(
        self,
        step: int,
        clipped: bool,
        total: Mapping[Key, float],
        variable: Mapping[int, Mapping[Key, float]],
        update_s: list[float],
        load_s: list[float],
        last_s: float,
    ) -> None:
        blocks, first = range(len(self.workload.blocks)), of_each_size(self.plan, self.groups[-1])  # at most
        computed = {n: load.get(Lane.GPU, 0.0) + self.home.get(n, 0.0) for n, load in variable.items()}
        computed |= {n: computed[n] - leaving.first[Lane.GPU] for n, leaving in self.leaving.items()}
        # What was speculated on need not be done when the norm is known; more than there is cannot be taken off.
        early: dict[int, dict[Key, float]] = {}
        if not clipped:
            for s, of_class in zip(self.speculate, self.classes, strict=True):
                early[s] = self.facets.of(Kind.UPDATE, self._demand(Kind.UPDATE, of_class[0]))
        sooner = {s: -load[Lane.CPU] for s, load in early.items()}
        updated_s = before_s = 0.0
        for b, load in enumerate(load_s):
            updated_s += update_s[b]
            self._at_least(step, last_s + updated_s + load + total[Lane.GPU] - before_s, computed | sooner)
            if b <= self.workload.n_layers:
                before_s += sum(count * self._demand(Kind.FORWARD, b, m).uncontended_s for m, count in first)
        updates, first_loads = self._sum(Kind.UPDATE, blocks), self._sum(Kind.LOAD, blocks)
        forwards, spills = nothing(), nothing()
        for m, count in first:
            add(forwards, self._sum(Kind.FORWARD, blocks[:-1], m), count)
            add(spills, self.facets.of(Kind.OFFLOAD_ACTIVATION, self._demand(Kind.OFFLOAD_ACTIVATION, 0, m)), count)
        fetch = self.facets.of(Kind.FETCH_ACTIVATION, self._demand(Kind.FETCH_ACTIVATION, 0, 0))
        untils: list[tuple[float, dict[int, float]]] = [(updated_s + load_s[-1], sooner)]
        # The way of the first micro-batches to the loss: at least so many are in the first group.
        first_s = update_s[0] + load_s[0] + before_s * self.groups[0] / self.groups[-1]
        first_sooner = {s: -load[Lane.CPU] for s, load in early.items() if s == self.speculate[0]}
        untils.append((first_s, first_sooner))
        untils.append((update_s[0] + load_s[0], {**first_sooner, self.up: self.scale_s / self.n_groups}))
        untils += [
            (updates[k] + first_loads[k], {s: -load.get(k, 0.0) for s, load in early.items()})
            for k in self.keys
            if k not in (*Lane,)
        ]
        arriving, first_gradient_s = self._arriving(), first_gradient_s_of(self.plan, self.phases)
        for until_s, less in untils:
            for of in self.keys[1:]:  # all but the device's lane
                more = {n: load[of] for n, load in zip(self.square, self.squaring, strict=True)}
                more |= {s: update.get(of, 0.0) + less.get(s, 0.0) for s, update in early.items()}
                self._at_least(step, until_s + first_gradient_s + arriving[of], more)
            self._phases_at_least(step, until_s, less)
            for key in self.keys:
                seconds = total[key]
                after_s = seconds - updates[key] - first_loads[key] - forwards[key]
                per_unit = {n: load.get(key, 0.0) for n, load in variable.items()} if key is not Lane.GPU else dict(computed)
                per_unit[self.n_spilled] -= spills[key]
                per_unit[self.early] = -fetch.get(key, 0.0)
                for n, leaving in self.leaving.items():
                    per_unit[n] -= leaving.first[key] if key is not Lane.GPU else 0.0
                per_unit[self.early_saved] = -self._largest_s(Kind.FETCH_SAVED, key)
                for s, update in early.items():  # is done before the norm is known
                    per_unit[s] = per_unit.get(s, 0.0) + update.get(key, 0.0)
                for s, per_block in less.items():
                    per_unit[s] = per_unit.get(s, 0.0) + per_block
                self._at_least(step, until_s + after_s + (last_s if key is Lane.GPU else 0.0), per_unit)

    def _arriving(self) -> dict[Key, float]:
        """What comes after the first gradient has left, if nothing is squared on the device or updated early."""
        found: dict[Key, float] = nothing()
        for kind, b, demand, count in ops_at_least(self.plan, self.of.cost):
            if kind in ARRIVING:
                add(found, self.facets.of(kind, demand), count - is_first_gradient(self.plan, kind, b))
        add(found, self.idle, 1)
        return found

    def _phases(self, first: list[dict[Key, float]]) -> None:
        """The two ways of all groups over the layers, each as long as what it asks for: `bounds.Phases`."""
        phases = self.phases
        n_groups, buffers = self.n_groups, Buffers(0, self.n_slots, staged_slots(self.plan))
        ends = [(self.back, buffers.n_slots, phases.embedding_s), (self.left, 0, phases.home_s)]
        ends += [(self.back, 0, phases.embedding_after_layers_s)] if phases.takes_turns else []
        if self.take_turns:  # one gradient may still be leaving when the next phase begins
            largest_s = max(
                self._demand(Kind.OFFLOAD_GRADIENT, b[0], None if self.plan.reduced else 0).uncontended_s for b in self.classes
            )
            for end, late, more_s in ends:
                self._at_least(end, self.turns_s - late * phases.n_slips * largest_s + more_s, self.turns)
        for key in self.keys:
            streamed = {self.resident[i]: -n_groups * first[i].get(key, 0.0) for i in self.layers}
            one_load_s = n_groups * phases.largest_load.get(key, 0.0)
            # Loads take what is left of them when every slot is full.
            loads_s = n_groups * phases.loads[key] - one_load_s
            with_loads = {**streamed, self.depth: -one_load_s}
            backward = {n: load.get(key, 0.0) for n, load in self.backward.items()}
            backward |= {self.square[i]: self.squares[i][key] for i in self.layers}
            # And so may activations on their way out, or back.
            (out_s, out), (back_s, back) = self._passing(LEAVING, key), self._passing(COMING, key)
            self._at_least(self.up, phases.up[key] + loads_s + out_s, {**with_loads, **out})
            ways = [({}, 0.0), (with_loads, loads_s), ({**with_loads, **back}, loads_s + back_s)]
            for more, more_s in ways[:2]:
                self._at_least(self.up, phases.up[key] + more_s, more)
            for more, more_s in ways:
                for end, late, then_s in ends:
                    left_s = phases.left_s(key, buffers) if late else phases.all_left_s(key, buffers)
                    for leaving_s in (0.0, left_s):
                        self._at_least(end, phases.down[key] + more_s + leaving_s + then_s, {**backward, **more})
        around = ({self.up: 1.0, self.back: 1.0}, {self.left: 1.0})
        for then, rows in ((self.around, around), (self.last, ({self.back: 1.0}, {self.left: 1.0}))):
            for row in rows:
                self.program.at_most({**row, then: -1.0}, 0.0)

    def _largest_s(self, kind: Kind, key: Key) -> float:
        """Of one copy of what any layer saves."""
        return max((leaving.passing[kind].one[key] for leaving in self.leaving.values()), default=0.0)

    def _passing(self, kinds: Sequence[Kind], key: Key) -> tuple[float, dict[int, float]]:
        """Activations that leave on the ways up, or come back on those down: all of what layers save but what their slots hold, and
        of boundaries all but what the ring holds and the embedding's, which may leave earlier."""
        of_boundary, of_saved = kinds
        slots = passing_slots(self.groups[-1])
        row = {n: leaving.passing[of_saved].all[key] for n, leaving in self.leaving.items()}
        boundary = self.boundaries[of_boundary]
        row[self.n_spilled] = boundary.all[key]
        row[self.spills] = -boundary.all[key] - self.phases.n_slips * slots[of_boundary] * boundary.one[key]
        return -self.phases.n_slips * slots[of_saved] * self._largest_s(of_saved, key), row

    def _turns(self) -> tuple[float, dict[int, float]]:
        """Every layer's last backward, by tier, and squares, and every layer's gradient leaving."""
        n_micro_batches = self.of.semantics.n_micro_batches
        last = [(n_micro_batches - 1, 1)] if self.plan.reduced else of_each_size(self.plan, n_micro_batches)
        often = 1 if self.plan.reduced else n_micro_batches
        offloads = self._sum(Kind.OFFLOAD_GRADIENT, range(1, self.workload.n_layers + 1), None if self.plan.reduced else 0)
        backward: dict[int, float] = {}
        for (i, tier), (n, _) in self.saving.items():
            plan, b = self.of.frame(with_ways(self.one_slot, {self.classes[i][0]: tier})), self.classes[i][0]
            demands = ((self.of.cost.demand(plan, Op(Kind.BACKWARD, b, m)), count) for m, count in last)
            backward[n] = sum(count * demand.uncontended_s for demand, count in demands)
        backward |= {self.square[i]: self.squaring[i][Lane.GPU] for i in self.layers}
        return often * offloads[Lane.D2H], backward

    def _sum(self, kind: Kind, blocks: range, micro_batch: int | None = None) -> dict[Key, float]:
        """What one op of this kind for each of the blocks asks for."""
        found: dict[Key, float] = nothing()
        for b in blocks:
            add(found, self.facets.of(kind, self._demand(kind, b, micro_batch)), 1)
        return found

    def _demand(self, kind: Kind, block: int, micro_batch: int | None = None) -> Demand:
        return self.of.cost.demand(self.plan, Op(kind, block, micro_batch))

    # -- memory -----------------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        """A row for the device and one for the host, each in shares of what the machine has."""
        p, blocks, group = self.program, self.workload.blocks, self.family.accumulation_group
        needs = footprint(self.plan, self.of.profile)
        weights = self.plan.arena("weights")
        assert weights is not None
        device_bytes, host_bytes = float(needs.device_memory_bytes), float(needs.host_memory_bytes)
        boundary_bytes = group * -(-blocks[0].boundary_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        item = weights.slot_bytes[0] / max(b.slot_elements for b in blocks[1:-1])
        device = {self.depth: weights.slot_bytes[0], self.transient: device_bytes, self.saved_slots: device_bytes}
        host: dict[int, float] = {self.n_spilled: boundary_bytes}
        device |= {self.n_spilled: -boundary_bytes, self.spills: spill_ring_slots(group) * boundary_bytes / group}
        for i, of_class in enumerate(self.classes):
            device[self.resident[i]] = blocks[of_class[0]].slot_elements * item
        for (i, tier), (n, used) in self.saving.items():
            block = blocks[self.classes[i][0]]
            again = block.recompute(tier.saved)
            assert again is not None, "a tier is one that the block has"
            if tier.away:
                slot_bytes = -(-again.slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
                host[n] = group * slot_bytes
                p.at_most({used: N_SAVED_SLOTS * slot_bytes / device_bytes, self.saved_slots: -1.0}, 0.0)
            else:
                device[n] = group * again.saved_bytes
            p.at_most({used: again.transient_bytes / device_bytes, self.transient: -1.0}, 0.0)
        p.at_most({self.transient: -1.0}, -self.plan.vocab_transient_bytes / device_bytes)
        fixed_bytes = needs.device_peak_bytes - self.plan.transient_bytes - weights.slot_bytes[0]
        p.at_most({v: n / device_bytes for v, n in device.items()}, 1 - fixed_bytes / device_bytes + SLACK)
        per_param = sum(self.plan.state_bytes().values())
        for s, of_class in zip(self.speculate, self.classes, strict=True):
            host[s] = blocks[of_class[0]].host_elements * per_param
        p.at_most({v: n / host_bytes for v, n in host.items()}, 1 - needs.host_peak_bytes / host_bytes + SLACK)
