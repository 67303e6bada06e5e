"""Constraints on the step time, the arguments of docs/bounds.md.

The same inequalities serve two uses. Quantities of one policy are numbers (`Numbers`). Those of a policy family are affine in
its choices (`work.py`), and a maximum is a variable of an integer program (`integer.py`). A *sweep* is one pass of a group over the
layers: forward (up) or backward (down).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.planner.lower.arenas import N_READ_SLOTS
from penstock.planner.lower.op_table import n_ops
from penstock.planner.predict.region import Resource
from penstock.runtime.plan import LANE_OF, Kind, Lane, Setup, Update

from .facets import Array, Facets
from .work import COMING, LEAVING, RINGS, Buffers, Groups, Work

FACET = {
    Resource.H2D: "link to the device",
    Resource.D2H: "link to the host",
    Resource.DUPLEX: "link in both directions",
    Resource.DRAM: "host DRAM",
    Resource.CORES: "host cores",
}
LANE_NAME = {Lane.GPU: "device compute", Lane.H2D: "uploads", Lane.D2H: "downloads", Lane.CPU: "optimizer"}
LANE_NAME |= {Lane.NET: "exchange", Lane.DISK: "reads from the disk"}
MEETING = "copies and host work that slow each other"
TURNS = "groups of micro-batches that take turns"
UPDATED = "updates that the next forward waits for"


class Algebra(Protocol):
    """Maximum of quantities, as numbers or as program variables."""

    def longest(self, quantities: Array | Sequence[Array]) -> Array:
        """The smallest quantity that is at least every one of these."""

    def positive(self, quantities: Array) -> Array:
        """Elementwise max(0, quantity)."""


class Numbers:
    """Algebra of a single policy: quantities are numbers."""

    def longest(self, quantities: Array | Sequence[Array]) -> Array:
        result: Array = np.max(np.array(quantities), axis=0)
        return result

    def positive(self, quantities: Array) -> Array:
        return np.maximum(quantities, 0.0)


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy or a policy family, with the counts that the constraints use."""

    plan: Setup  # the policy, or the smallest member of the family; without ops
    groups: Groups
    buffers: Buffers
    n_loads: Array  # layers that may have weights on the device when a sweep begins
    n_staying: Array  # layers with state on the device that `plan` keeps on the host
    n_early: dict[Kind, Array]  # activations that may be back before the first loss, by kind of fetch
    n_passing: dict[str, Array]  # capacity in activations of each ring of slots
    work: Work
    one_block: list[Array]  # per block: updates up to it plus its load, minus the first forwards of earlier blocks

    @property
    def takes_turns(self) -> bool:
        """True if a single gradient slot serialises a layer's backward and the offload of its gradient. With frozen weights the
        last offload may end in the next step, so the bound does not hold."""
        return self.buffers.n_slots == 1 and self.plan.semantics.ranks == 1 and self.plan.workload.trains_all

    def passing(self, kind: Kind) -> Array:
        """Work of ops of this kind that the ring slots can hold."""
        held = (np.outer(self.work.largest[ring], self.n_passing[ring]) for ring in RINGS[kind])
        return sum(held, np.zeros_like(self.work["total"]))

    def loads(self, sweep: str, algebra: Algebra) -> Array:  # loads that must run within one sweep
        return algebra.positive(self.work[sweep] - np.outer(self.work.largest["load"], self.n_loads))

    def later_forward_sweeps(self, algebra: Algebra) -> Array:
        """Forward sweeps of all groups but the first, the largest. Nothing is unpacked: weights are all trained here."""
        work, n = self.work, self.groups.n - 1
        leaving = sum(work[kind] - n * self.passing(kind) for kind in LEAVING) - work["first_leaving"]
        forwards = work["up"] - work["first_forwards"] + work["first_leaving"]
        return forwards + n * self.loads("loads_up", algebra) + algebra.positive(leaving)

    def head_missing(self, n_slots: int) -> Array:
        """Correction factor for the work of the head's last gradient. It is -1 if at most `n_slots` layer gradients leave, because
        the head's gradient may then leave last. Otherwise each layer with state on the device subtracts its share: the head's
        gradient can only leave last if n_leaving - n_slots layers have their state there."""
        plan = self.plan
        layers = [(b, len(blocks)) for b, blocks in plan.blocks_alike.items() if 0 < b <= plan.workload.n_layers]
        n_leaving = sum(n for b, n in layers if n_ops(plan, Kind.OFFLOAD_GRADIENT, b))
        if n_leaving * (1 if plan.reduced else self.groups.n_alone) > n_slots:
            return -self.n_staying / max(1, n_leaving - n_slots)
        factor = np.zeros_like(self.n_staying)
        factor[0] = -1.0
        return factor


@dataclass(frozen=True, slots=True)
class Phases:
    """Durations of the phases, summed over all groups, if every group had the mean work."""

    up: Array  # forward sweeps
    back: Array  # from the last loss of a group to the end of the embedding's last backward
    offloaded: Array  # from the last loss of a group until the embedding's last gradient has left

    def around(self, algebra: Algebra) -> Array:
        """Time from the last losses of groups to the first losses of the next groups."""
        return algebra.longest([self.back + self.up, self.offloaded])

    def after_first_sweep(self, subject: Subject, gpu: int, algebra: Algebra) -> Array:
        """Time from the first loss of the step to the norm."""
        work, loss, groups = subject.work, subject.work.scalars["loss"], subject.groups
        if groups.equal:
            last = algebra.longest([self.back, self.offloaded])
            return loss + (1 - 1 / groups.n) * self.around(algebra) + last / groups.n
        bounds = [self.back + algebra.longest(subject.later_forward_sweeps(algebra)), self.offloaded]
        host_sums = np.any(work["last_leaving"]) and np.any(work["head_leaving"])
        if host_sums and groups.n_alone == groups.largest:  # equal compute; most additions in the last group
            staged = np.zeros_like(work["last_leaving"])
            staged[:, 0] = subject.buffers.n_staged * work.largest["staged"]
            last = algebra.longest(work["last_leaving"] - staged) + work.scalars["embedding_home"] / groups.n
            bounds.append((1 - 1 / groups.n) * (work["down"][gpu] + work.scalars["embedding"] + self.up) + last)
        return loss + algebra.longest(bounds)


def phases(subject: Subject, facets: Facets, algebra: Algebra) -> Phases:
    """Bound the four phases of a group on the compute lane: forward sweep, loss, backward sweep, embedding backward."""
    work, groups, buffers = subject.work, subject.groups, subject.buffers
    scalars, largest = work.scalars, work.largest

    def lifted(numbers: Array) -> Array:
        vector = np.zeros_like(work["total"])
        vector[:, 0] = numbers
        return vector

    n_reads = subject.n_loads.copy()
    n_reads[0] += N_READ_SLOTS

    def sweep(computing: str, loads: str, reads: str, passing: tuple[Kind, Kind]) -> Array:
        """A sweep: its compute, the loads and reads that run entirely within sweeps, and the activations offloaded or fetched."""
        compute = work[computing] - lifted(groups.n * largest["unpacking"])  # the first layer may be unpacked before the sweep
        loading = subject.loads(loads, algebra) + algebra.positive(work[reads] - np.outer(largest["read"], n_reads))
        moving = [work[kind] - groups.n * subject.passing(kind) for kind in passing]
        return compute + groups.n * loading + sum(map(algebra.positive, moving), np.zeros_like(compute))

    def leaving(n_slots: int) -> Array:
        """Gradients offloaded before the last backward ends: all except those still in slots or waiting on the host to be added."""
        slipping = n_slots * largest["leaving"] + buffers.n_staged * largest["staged"]
        head = work["head_leaving"] + np.outer(work["head_leaving"][:, 0], subject.head_missing(n_slots + buffers.n_staged))
        return algebra.positive(work["leaving"] + groups.n * head - lifted(groups.n * slipping))

    up = algebra.longest(sweep("up", "loads_up", "reads_up", LEAVING))
    down = sweep("down", "loads_down", "reads_down", COMING)
    computed = [algebra.longest(down + leaving(buffers.n_slots))]
    offloaded = [algebra.longest(down + leaving(0))]
    if subject.takes_turns:
        turns, late_s = scalars["backwards_in_turn"], groups.n * largest["leaving"][facets.number(LANE_OF[Kind.OFFLOAD_GRADIENT])]
        late = np.zeros_like(turns)
        late[0] = late_s
        computed.append(turns - late)
        offloaded.append(turns)
    back = [algebra.longest(computed) + scalars["embedding"]]
    shares_slot = np.any(scalars["embedding_home"]) and np.any(work["head_leaving"])  # embedding and head, in each group
    if not shares_slot and (groups.n > 1 or not subject.plan.workload.trains_all):
        computed_until = algebra.longest(back)  # no loss waits for an offload
        return Phases(up, computed_until, computed_until)
    all_left = algebra.longest(offloaded)
    if np.any(scalars["embedding_alone"]):
        back.append(all_left + scalars["embedding_alone"])
    return Phases(up, algebra.longest(back), all_left + scalars["embedding_home"])


def reasons(subject: Subject, facets: Facets, algebra: Algebra) -> Iterator[tuple[str, str, Array]]:
    """Yield (name, binding, seconds) for every constraint. `binding` describes the limit to users."""
    work, scalars = subject.work, subject.work.scalars
    gpu, trains_all, update = facets.number(Lane.GPU), subject.plan.workload.trains_all, subject.plan.policy.update
    for i, key in enumerate(facets.keys):
        name = f"lane {key}" if isinstance(key, Lane) else f"resource {key}" if isinstance(key, Resource) else "meeting"
        of_key = LANE_NAME[key] if isinstance(key, Lane) else FACET[key] if isinstance(key, Resource) else MEETING
        yield name, of_key, work["total"][i]
    durations = phases(subject, facets, algebra)
    all_phases = scalars["loss"] + durations.around(algebra)
    if not trains_all or update is not Update.DEFERRED:
        yield "phases", TURNS, all_phases
    if not trains_all:  # no load of weights waits for an update
        return
    home, computing = scalars["home"], work["total"][gpu] - work["on_device"][gpu]
    match update:
        case Update.BARRIER:  # the rest of the step runs between the last update and the next first one
            rest = {
                "computing": scalars["load_of_embedding"] + work["total"][gpu] + home,
                "phases": all_phases,
                "shared": algebra.longest(work["total"] - work["updates"]),
            }
            for name, quantity in rest.items():
                why = "computing, then updating: the barrier between them"
                yield f"barrier, {name}", why, scalars["update"] + quantity
        case Update.EAGER:
            ring = scalars["load_of_embedding"] + work["total"][gpu] + home + scalars["update_of_embedding"]
            yield "eager", "the way home of the last gradient", ring
        case Update.DEFERRED:
            yield "deferred, on the device", UPDATED, work["total"][gpu] + home
            for quantity in subject.one_block:  # after the updates up to the block; only forwards of earlier blocks run before
                yield "deferred, one block", UPDATED, quantity + computing + home
            yield from _deferred(subject, facets, algebra, durations)


def _deferred(subject: Subject, facets: Facets, algebra: Algebra, durations: Phases) -> Iterator[tuple[str, str, Array]]:
    """Bound the time until the first loss plus the time after it. The head is updated last. Before it is loaded and its input is
    computed, all updates and first loads share the machine. After that, every op follows that is not an update, a first load, a
    first forward or an early fetch."""
    work, scalars, gpu = subject.work, subject.work.scalars, facets.number(Lane.GPU)
    first_share = subject.groups.smallest_first / subject.groups.largest
    first_sweep = algebra.longest([scalars["forwards"] * first_share, durations.up / subject.groups.n])
    excluded = work["updates"] + work["on_device"] + work["first_loads"] + work["first_forwards"]
    excluded = excluded + sum(np.outer(work.largest[f"early_{kind}"], n) for kind, n in subject.n_early.items())
    computing = work["total"][gpu] - work["on_device"][gpu] - work["first_forwards"][gpu] + scalars["home"]
    on_lanes = algebra.longest([computing, durations.after_first_sweep(subject, gpu, algebra)])
    arriving = algebra.longest(work["arriving"])
    shared = algebra.longest([scalars["first_gradient"] + arriving, algebra.longest(work["total"] - excluded)])
    updated = work["updates"] + work["first_loads"]
    leaving = first_share * work["first_leaving"] - sum(map(subject.passing, LEAVING))  # except the content of the slots
    forwards_end = scalars["update_of_embedding"] + scalars["load_of_embedding"] + first_sweep
    head_loaded = scalars["update"] + scalars["load_of_head"]
    until = algebra.longest([forwards_end, head_loaded, algebra.longest([*updated, *(updated + leaving)])])
    yield "deferred, until the first loss, then all else", UPDATED, until + algebra.longest([on_lanes, shared])
    if np.any(scalars["update_on_device"]):  # does not wait for the last speculative update
        on_device = scalars["update_on_device"] + first_sweep
        guessed = algebra.longest([on_lanes, shared - scalars["guess_of_embedding"]])
        yield "deferred, on the device, then all else", UPDATED, on_device + guessed
