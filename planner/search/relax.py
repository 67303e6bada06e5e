"""How fast could any policy of a family be, whatever it chooses block by block?

An integer program over counts of equal blocks (`choices.py`), times what each asks for (`loads.py`). The step is at least as long
as every lane, every shared resource and the chain that closes a step, as `planner/bounds` has them. It leaves out order and
contention, so its optimum bounds every policy of the family from below: only its dual bound is claimed. Its choices are
suggestions, to be lowered and simulated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.bounds.bounds import SLACK, first_gradient_s, idle_in_turns, of_each_size, ops_at_least
from planner.bounds.facets import Key, add, nothing
from planner.bounds.phases import (
    COMING,
    LEAVING,
    Buffers,
    add_to_phases,
    least_slots,
    passing_slots,
    phases_of,
    staged_slots,
    summed_slots,
)
from planner.predict.cost import CostModel
from runtime.plan import Kind, Lane, Semantics, Update
from runtime.plan.workload import Model, Workload

from .choices import Choices
from .loads import Frames, Loads, Squaring, Staying
from .space import GRADIENT_SLOTS, Family, Fill

Load = Mapping[Key, float]  # seconds of every facet


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
        self.clipped_fraction = clipped_fraction
        self._frames = Frames(model, workload, semantics, cost)
        self._known: dict[tuple[Family, int | None, int | None], Relaxed | None] = {}

    @property
    def n_solved(self) -> int:
        return len(self._known)

    def solve(self, family: Family, prefetch_depth: int | None = None, gradient_slots: int | None = None) -> Relaxed | None:
        """The relaxation with these buffers (None: whichever are best); None where nothing fits."""
        key = (family, prefetch_depth, gradient_slots)
        if key not in self._known:
            self._known[key] = _Rows(self._frames, family, prefetch_depth, gradient_slots, self.clipped_fraction).solve()
        return self._known[key]


class _Rows:
    """One integer program: rows for how long a step is at least, in units of `scale_s`."""

    def __init__(
        self,
        frames: Frames,
        family: Family,
        prefetch_depth: int | None,
        gradient_slots: int | None,
        clipped_fraction: float | None,
    ) -> None:
        self.update, self.groups, self.profile = family.update, family.groups, frames.cost.profile
        lean = replace(family.policy(frames.semantics), gradient_slots=gradient_slots or 1)
        # With more slots, or none said, they need not; and where weights are frozen nothing is said of it.
        self.take_turns = gradient_slots == 1 and frames.semantics.ranks == 1 and frames.workload.trains_all
        self.loads = Loads(frames, lean, self.groups[-1])
        self.plan, self.keys = self.loads.plan, self.loads.facets.keys
        self.workload, n_micro_batches = self.plan.workload, frames.semantics.n_micro_batches
        is_many = gradient_slots is None or gradient_slots >= max(GRADIENT_SLOTS)
        self.n_slots = self.workload.n_layers * n_micro_batches if gradient_slots is None or is_many else gradient_slots
        self.choices = Choices(self.plan, family, prefetch_depth, clipped_fraction, self.profile)
        self.program, self.n_groups = self.choices.program, self.choices.n_groups
        of_classes = [blocks[0] for blocks in self.choices.classes]
        self.squaring = [self.loads.squaring(b) if b in self.choices.can_square else Squaring() for b in of_classes]
        self.staying = [self.loads.staying(b) if b in self.choices.can_stay else Staying() for b in of_classes]
        self.backward, self.leaving = {}, {}  # by how many save so: one layer's
        for (i, way), (n, _) in self.choices.saving.items():
            self.backward[n] = self.loads.backward(of_classes[i], way)
            if way.away:
                self.leaving[n] = self.loads.leaving(of_classes[i], way)
        self.boundaries = self.loads.boundaries()
        self.unpacking = [self.loads.unpacking(b) for b in of_classes]
        self.stays_loaded = [self.loads.stays_loaded(b) for b in of_classes]
        self.phases = phases_of(self.plan, self.groups)
        for kind, b, demand, count in ops_at_least(self.plan, frames.cost):
            if kind is not Kind.BACKWARD or b == 0:
                add_to_phases(self.phases, self.plan, kind, b, self.loads.facets.of(kind, demand), count)
        self.idle = idle_in_turns(self.plan, self.phases)
        self.constant = self.loads.constant()
        add(self.constant, self.idle, 1)
        self.scale_s = max(sum(self.constant.values()), 1e-12)

    def solve(self) -> Relaxed | None:
        self._times()
        self.choices.together()
        self.choices.within_memory(self.profile)
        found = self.program.solve()
        if found is None:
            return None
        bound, x = found
        return Relaxed(bound * self.scale_s * (1 - SLACK), round(x[self.choices.depth]), self.choices.fill(x))

    def _at_least(self, step: int, seconds: float, variable: Mapping[int, float]) -> None:
        """step >= seconds + variable @ x."""
        row = {n: per_unit / self.scale_s for n, per_unit in variable.items() if per_unit}
        self.program.at_most({**row, step: -1.0}, -seconds / self.scale_s)

    def _times(self) -> None:
        """A row per lane and resource, the phases and the ring."""
        c = self.choices
        total = dict(self.constant)
        variable: dict[int, dict[Key, float]] = {}
        for n, backward in self.backward.items():
            leaving = self.leaving[n].all if n in self.leaving else {}
            variable[n] = {key: seconds + leaving.get(key, 0.0) for key, seconds in backward.items()}
        one_load = [self.loads.of(Kind.LOAD, blocks[0]) for blocks in c.classes]
        for i, blocks in enumerate(c.classes):
            n_loads = self.n_groups * (1 + (i in c.layers and blocks[0] >= self.workload.first_trained))
            add(total, one_load[i], n_loads * len(blocks))
            # Of what stays one load a step is left; of what stays and is frozen none, once a run has begun
            n_spared = n_loads - (not self.stays_loaded[i])
            variable[c.resident[i]] = {key: -n_spared * seconds for key, seconds in one_load[i].items()}
            for key, seconds in self.unpacking[i].items():  # at every use but where the block is still there at a turn
                total[key] += n_loads * len(blocks) * seconds
                variable[c.resident[i]][key] = variable[c.resident[i]].get(key, 0.0) - n_spared * seconds
        for key, seconds in self.phases.largest_unpacking.items():
            total[key] -= (2 * self.n_groups - 1) * seconds
        keys = {key for i in c.layers for key in one_load[i]}
        variable[c.spared] = {key: -max(one_load[i].get(key, 0.0) for i in c.layers) for key in keys}
        variable[c.n_spilled] = nothing()
        for kind in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION):
            add(variable[c.n_spilled], self.boundaries[kind].all, 1)
        variable |= {n: squaring.more for n, squaring in zip(c.square, self.squaring, strict=True)}
        variable |= {n: staying.more for n, staying in zip(c.stay, self.staying, strict=True)}
        self._phases(one_load)
        for step, clipped in ((c.step, False), (c.clipped_step, True)):
            updates = [self.loads.of(Kind.UPDATE, blocks[0]) for blocks in c.classes]
            if clipped:  # then what was speculated on is done again
                variable |= dict(zip(c.speculate, updates, strict=True))
            for key in self.keys:
                self._at_least(step, total[key], {n: load.get(key, 0.0) for n, load in variable.items()})
            # What was speculated on need not be done when the norm is known; more than there is cannot be taken off.
            early = {} if clipped else dict(zip(c.speculate, updates, strict=True))
            self._ring(step, total, variable, early)

    # -- the ring of a step; a row for each of its links ----------------------------------------------------------------

    def _ring(self, step: int, total: Load, variable: Mapping[int, Load], early: Mapping[int, Load]) -> None:
        """`early`: blocks that are updated on speculation, each of a class."""
        if not self.workload.trains_all:
            self.program.at_most({self.choices.around: 1.0, step: -1.0}, -self.phases.loss_s / self.scale_s)
            return
        last_s = self._seconds(Kind.NORM, 0) + self.loads.gradient_s(0)
        computed = {n: load.get(Lane.GPU, 0.0) for n, load in variable.items()}
        computed[self.choices.square[0]] += self.squaring[0].home_s  # the embedding's gradient is the last to come home
        computed[self.choices.stay[0]] -= self.staying[0].home_s
        match self.update:
            case Update.EAGER:
                ring_s = self._seconds(Kind.LOAD, 0) + total[Lane.GPU] + last_s + self._seconds(Kind.UPDATE, 0)
                self._at_least(step, ring_s, computed)
                self.program.at_most({self.choices.around: 1.0, step: -1.0}, -self.phases.loss_s / self.scale_s)
            case Update.DEFERRED:
                computed |= {n: computed[n] - leaving.first[Lane.GPU] for n, leaving in self.leaving.items()}
                self._deferred_ring(step, total, variable, early, computed, last_s)
            case Update.BARRIER:
                raise AssertionError("a barrier only adds to the time of a deferred update, whose bound is its own")

    def _deferred_ring(
        self,
        step: int,
        total: Load,
        variable: Mapping[int, Load],
        early: Mapping[int, Load],
        computed: Mapping[int, float],
        last_s: float,
    ) -> None:
        """Updates that the next forward waits for: until its first loss this much lies between, and after it that."""
        c, first = self.choices, of_each_size(self.plan, self.groups[-1])  # at most
        sooner = {s: -load[Lane.CPU] for s, load in early.items()}
        sooner |= {n: -staying.of_host[Lane.CPU] for n, staying in zip(c.stay, self.staying, strict=True)}
        # The device's own updates come between the norm and the next forward, beside the host's.
        beside = dict(computed)
        for n, staying in zip(c.stay, self.staying, strict=True):
            beside[n] -= staying.update[Lane.GPU]
        if c.can_stay:
            self._at_least(step, last_s + total[Lane.GPU], computed)
        updated_s = before_s = 0.0
        for b in range(len(self.workload.blocks)):
            updated_s += self._seconds(Kind.UPDATE, b)
            load_s, may_stay = self._load_s(b)
            ring_s = last_s + updated_s + load_s + total[Lane.GPU] - before_s
            self._at_least(step, ring_s, _sum(beside, sooner, may_stay))
            if b <= self.workload.n_layers:
                before_s += sum(count * self._seconds(Kind.FORWARD, b, m) for m, count in first)
        of_gradients_s = first_gradient_s(self.plan, self.phases)
        arriving = self.loads.arriving()
        add(arriving, self.idle, 1)
        after = list(self._after_first_loss(total, variable, early, beside))
        for until_s, less in self._until_first_loss(updated_s, before_s, early):
            for key in self.keys[1:]:  # all but the device's lane
                self._at_least(step, until_s + of_gradients_s + arriving[key], _sum(less, dict(self._arriving(key, early))))
            self._phases_at_least(step, until_s, less)
            for key, after_s, row in after:
                self._at_least(step, until_s + after_s + (last_s if key is Lane.GPU else 0.0), _sum(row, less))

    def _until_first_loss(
        self, updated_s: float, before_s: float, early: Mapping[int, Load]
    ) -> Iterator[tuple[float, dict[int, float]]]:
        """Seconds from the norm until the head is loaded and its first input computed, and how much less with every choice."""
        c, blocks = self.choices, range(len(self.workload.blocks))
        stay = list(zip(c.stay, self.staying, strict=True))
        load_s, may_stay = self._load_s(blocks[-1])
        sooner = {s: -load[Lane.CPU] for s, load in early.items()}
        sooner |= {n: may_stay.get(n, 0.0) - staying.of_host[Lane.CPU] for n, staying in stay}
        yield updated_s + load_s, sooner
        # The way of the first micro-batches to the loss: at least so many are in the first group.
        way_s, on_device = before_s * self.groups[0] / self.groups[-1], {n: staying.update[Lane.GPU] for n, staying in stay}
        # The device's updates do not wait for the last speculation, as the host's first update does.
        on_device |= {s: -max(load.values()) for s, load in early.items() if s == c.speculate[0]}
        load_s, may_stay = self._load_s(0)
        begun_s = self._seconds(Kind.UPDATE, 0) + load_s
        sooner = {s: -load[Lane.CPU] for s, load in early.items() if s == c.speculate[0]}
        sooner[c.stay[0]] = may_stay.get(c.stay[0], 0.0) - self.staying[0].of_host[Lane.CPU]
        for of_begin_s, less in ((begun_s, sooner), *([(0.0, on_device)] if c.can_stay else [])):
            yield of_begin_s + way_s, less
            yield of_begin_s, {**less, c.up: self.scale_s / self.n_groups}
        updates, loads = self.loads.of_each(Kind.UPDATE, blocks), self.loads.of_each(Kind.LOAD, blocks)
        for key in self.keys:
            if key not in (*Lane,):
                sooner = {s: -load.get(key, 0.0) for s, load in early.items()}
                sooner |= {n: -staying.of_host[key] - staying.load[key] for n, staying in stay}
                yield updates[key] + loads[key], sooner

    def _load_s(self, block: int) -> tuple[float, dict[int, float]]:
        """Seconds of a block's load; and where the block may stay, how much less that may be, or nothing in the first place."""
        c, seconds = self.choices, self._seconds(Kind.LOAD, block)
        if block not in c.can_stay:
            return seconds, {}
        of_class = next(i for i, blocks in enumerate(c.classes) if block in blocks)
        return (seconds, {c.stay[of_class]: -seconds}) if len(c.classes[of_class]) == 1 else (0.0, {})

    def _arriving(self, key: Key, early: Mapping[int, Load]) -> Iterator[tuple[int, float]]:
        """What each choice adds to what comes after the first gradient has left, or takes from it."""
        c = self.choices
        yield from ((n, squaring.more[key]) for n, squaring in zip(c.square, self.squaring, strict=True))
        yield from ((s, update.get(key, 0.0)) for s, update in early.items())
        for i, (n, staying) in enumerate(zip(c.stay, self.staying, strict=True)):
            is_head = c.classes[i][0] == self.workload.n_layers + 1  # whose gradient is the first to leave
            yield n, -max(staying.gradient[key], staying.gradient[Lane.D2H] if is_head else 0.0)

    def _after_first_loss(
        self, total: Load, variable: Mapping[int, Load], early: Mapping[int, Load], computed: Mapping[int, float]
    ) -> Iterator[tuple[Key, float, dict[int, float]]]:
        """What is neither updates nor first loads nor first forwards, nor a boundary that is back early; and with every choice."""
        c, blocks = self.choices, range(len(self.workload.blocks))
        updates, loads = self.loads.of_each(Kind.UPDATE, blocks), self.loads.of_each(Kind.LOAD, blocks)
        forwards, spills = nothing(), nothing()
        for m, count in of_each_size(self.plan, self.groups[-1]):  # at most
            add(forwards, self.loads.of_each(Kind.FORWARD, blocks[:-1], m), count)
            add(spills, self.loads.of(Kind.OFFLOAD_ACTIVATION, 0, m), count)
        fetch = self.loads.of(Kind.FETCH_ACTIVATION, 0, 0)
        for key in self.keys:
            if key is Lane.GPU:
                row = dict(computed)
            else:
                row = {n: load.get(key, 0.0) for n, load in variable.items()}
                row |= {n: row[n] - leaving.first[key] for n, leaving in self.leaving.items()}
            row[c.n_spilled] -= spills[key]
            row[c.early], row[c.early_saved] = -fetch.get(key, 0.0), -self._largest_s(Kind.FETCH_SAVED, key)
            for s, update in early.items():  # is done before the norm is known
                row[s] = row.get(s, 0.0) + update.get(key, 0.0)
            for n, staying in zip(c.stay, self.staying, strict=True):  # the host's update and the first load are taken off below
                row[n] += staying.of_host[key] + staying.load[key] - (staying.update[key] if key is not Lane.GPU else 0.0)
            yield key, total[key] - updates[key] - loads[key] - forwards[key], row

    def _seconds(self, kind: Kind, block: int, micro_batch: int | None = None) -> float:
        """Of one op on its lane, alone."""
        return self.loads.demand(kind, block, micro_batch).uncontended_s

    # -- the phases of groups: `bounds.Phases` --------------------------------------------------------------------------

    def _phases_at_least(self, step: int, seconds: float, less: Mapping[int, float]) -> None:
        """step >= seconds + all phases but the first way up + less @ x: `Phases.after_first_way_up_s`."""
        c = self.choices
        row, others = {n: s / self.scale_s for n, s in less.items()}, 1 - self.phases.first_fraction
        if self.phases.equal:
            ways = [{c.around: 1 - 1 / self.n_groups, c.last: 1 / self.n_groups}]
        else:
            ways = [{c.back: 1.0, c.up: others}, {c.around: others}]
        for way in ways:
            sums = {n: row.get(n, 0.0) + way.get(n, 0.0) for n in {*row, *way}}
            self.program.at_most({**sums, step: -1.0}, -(seconds + self.phases.loss_s) / self.scale_s)

    def _phases(self, one_load: Sequence[Load]) -> None:
        """The two ways of all groups over the layers, each as long as what it asks for: `bounds.Phases`."""
        c, phases = self.choices, self.phases
        n_groups, buffers = self.n_groups, Buffers(0, self.n_slots + summed_slots(self.plan), staged_slots(self.plan))
        ends = [(c.back, buffers.n_slots, phases.embedding_s), (c.left, 0, phases.home_s)]
        ends += [(c.back, 0, phases.embedding_after_layers_s)] if phases.takes_turns else []
        if self.take_turns:  # one gradient may still be leaving when the next phase begins
            largest_s = max(self.loads.gradient_s(blocks[0]) for blocks in c.classes)
            turns_s, turns = self._turns()
            for end, late, more_s in ends:
                home = {c.stay[0]: -phases.home_s if end == c.left else 0.0}
                self._at_least(end, turns_s - late * phases.n_slips * largest_s + more_s, _sum(turns, home))
        for key in self.keys:
            streamed = {n: -n_groups * one_load[i].get(key, 0.0) for i in c.layers for n in (c.resident[i], c.stay[i])}
            one_load_s = n_groups * phases.largest_load.get(key, 0.0)
            # Loads take what is left of them when every slot is full.
            up_s, down_s = (n_groups * of[key] - least_slots(self.plan) * one_load_s for of in (phases.loads, phases.loads_down))
            with_loads = {**streamed, c.depth: -one_load_s}
            backward = {n: load.get(key, 0.0) for n, load in self.backward.items()}
            backward |= {c.square[i]: self.squaring[i].square[key] for i in c.layers}
            unpacked = {c.resident[i]: -n_groups * self.unpacking[i].get(key, 0.0) for i in c.layers}
            way_up_s, way_down_s = (phases.way_s(way, key) for way in (phases.up, phases.down))
            # And so may activations on their way out, or back.
            (out_s, out), (back_s, back) = self._passing(LEAVING, key), self._passing(COMING, key)
            self._at_least(c.up, way_up_s + up_s + out_s, _sum(with_loads, out, unpacked))
            ways = [({}, 0.0), (with_loads, down_s), ({**with_loads, **back}, down_s + back_s)]
            for more, more_s in (({}, 0.0), (with_loads, up_s)):
                self._at_least(c.up, way_up_s + more_s, _sum(more, unpacked))
            for more, more_s in ways:
                for end, late, then_s in ends:
                    left_s = phases.left_s(key, buffers) if late else phases.all_left_s(key, buffers)
                    for leaving_s, staying in ((0.0, {}), (left_s, self._staying(key, buffers))):
                        row = _sum(backward, more, staying, unpacked)
                        if end == c.left:
                            row[c.stay[0]] = row.get(c.stay[0], 0.0) - phases.home_s
                        self._at_least(end, way_down_s + more_s + leaving_s + then_s, row)
        around = ({c.up: 1.0, c.back: 1.0}, {c.left: 1.0})
        for then, rows in ((c.around, around), (c.last, ({c.back: 1.0}, {c.left: 1.0}))):
            for row in rows:
                self.program.at_most({**row, then: -1.0}, 0.0)

    def _staying(self, key: Key, buffers: Buffers) -> dict[int, float]:
        """What does not leave on the ways down. Where no more layers' gradients leave than there are slots, the head's may leave
        after them."""
        c, n_slots = self.choices, buffers.n_slots + buffers.n_staged
        n_before = max(1, self.workload.n_layers - n_slots)  # stay, before that is so
        row = {c.stay[i]: -self.staying[i].gradient[key] - self.phases.head_leaving[key] / n_before for i in c.layers}
        head = next(i for i, blocks in enumerate(c.classes) if blocks[0] == self.workload.n_layers + 1)
        return row | {c.stay[head]: -self.phases.head_leaving[key]}

    def _largest_s(self, kind: Kind, key: Key) -> float:
        """Of one copy of what any layer saves."""
        return max((leaving.passing[kind].one[key] for leaving in self.leaving.values()), default=0.0)

    def _passing(self, kinds: Sequence[Kind], key: Key) -> tuple[float, dict[int, float]]:
        """Activations that leave on the ways up, or come back on those down: all of what layers save but what their slots hold, and
        of boundaries all but what the ring holds and the embedding's, which may leave earlier."""
        of_boundary, of_saved = kinds
        c, slots = self.choices, passing_slots(self.groups[-1])
        row = {n: leaving.passing[of_saved].all[key] for n, leaving in self.leaving.items()}
        boundary = self.boundaries[of_boundary]
        row[c.n_spilled] = boundary.all[key]
        row[c.spills] = -boundary.all[key] - self.phases.n_slips * slots[of_boundary] * boundary.one[key]
        return -self.phases.n_slips * slots[of_saved] * self._largest_s(of_saved, key), row

    def _turns(self) -> tuple[float, dict[int, float]]:
        """Every layer's last backward, by how it saves, and squares, and every layer's gradient leaving."""
        c = self.choices
        turns = {n: self.loads.last_backwards_s(c.classes[i][0], way) for (i, way), (n, _) in c.saving.items()}
        turns |= {c.square[i]: self.squaring[i].more[Lane.GPU] for i in c.layers}
        for i in c.layers:  # what stays has a slot of its own
            most_s = max(turns[n] for (j, _), (n, _) in c.saving.items() if j == i)
            turns[c.stay[i]] = -most_s - self.squaring[i].more[Lane.GPU] - self.staying[i].gradient[Lane.D2H]
        return self.loads.gradients_s(), turns


def _sum(*rows: Mapping[int, float]) -> dict[int, float]:
    return {n: sum(row.get(n, 0.0) for row in rows) for n in {n: None for row in rows for n in row}}
