"""Occupied bytes of device and host memory over a step.

A slot is occupied from the start of the op that writes it to the end of the last op that uses this value. Training state is always
resident. Arenas are allocated once; the plot shows the bytes in use within them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.memory import footprint
from penstock.runtime.plan import Kind, Op, Place, Plan, Semantics, Slot
from penstock.runtime.plan.timeline import Span
from penstock.runtime.plan.workload import BlockKind

from .step import Stretch

STATE = frozenset({"state", "device_state", "norm"})  # arenas that persist between steps
SAVED, COMPUTED, CONTEXT = "kept activations", "block being computed", "context"
HOST_PARTS = ("runtime", "compiler")  # parts outside the arenas
SMALL_FRACTION = 0.002  # of the peak: smaller parts are left out
MOST_MOMENTS = 1000  # width of a large screen in pixels; beyond it, each interval shows its maximum

Life = tuple[str, int, float, float]  # series, bytes, start, end


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of one memory over a step. `series`: bytes at `times_s`, each valid until the next time; the largest first."""

    place: Place
    length_s: float
    times_s: tuple[float, ...]
    series: dict[str, tuple[int, ...]]
    reserved: dict[str, int]  # allocated bytes of each part; their sum is the predicted peak
    memory_bytes: int
    peak_bytes: int  # maximum of the total, including parts without a series


def occupancy(plan: Plan, profile: Profile, stretch: Stretch) -> tuple[Occupancy, Occupancy]:
    """Occupancy of device and host memory over the stretch, by arena and other parts."""
    needs = footprint(plan, profile)
    places = {a.name: a.place for a in plan.arenas} | dict.fromkeys((SAVED, COMPUTED, CONTEXT), Place.DEVICE)
    places |= dict.fromkeys(HOST_PARTS, Place.HOST)
    spans = sorted(stretch.spans, key=lambda s: (s.step, s.op))  # plan order, in which dependent ops are sorted
    always = {name: n_bytes for name, n_bytes in (needs.device | needs.host).items() if name in {*STATE, CONTEXT, *HOST_PARTS}}
    lives = [(name, n_bytes, stretch.start_s, stretch.end_s) for name, n_bytes in always.items()]
    lives += [*_lives_of_slots(plan, spans), *_lives_of_activations(plan, spans)]
    on_device, on_host = ([life for life in lives if places[life[0]] is place] for place in (Place.DEVICE, Place.HOST))
    device = _occupancy(Place.DEVICE, on_device, needs.device, needs.device_memory_bytes, stretch)
    return device, _occupancy(Place.HOST, on_host, needs.host, needs.host_memory_bytes, stretch)


def overwrites(semantics: Semantics, op: Op, slot: Slot) -> bool:
    """True if an op overwrites the slot without using its old value."""
    if slot not in op.reads:
        return True
    # Sums are declared as read, but their first addend overwrites the slot.
    begins = op.micro_batch is not None and semantics.begins_sum(op.micro_batch)
    return begins and slot == op.get("arrived" if op.kind is Kind.ACCUMULATE else "sum")


def _lives_of_slots(plan: Plan, spans: Iterable[Span]) -> Iterator[Life]:
    """Yield the lifetime of each value of a slot, from its write to its last use. Older values start with the spans."""
    n_bytes = {Slot(a.name, i): n for a in plan.arenas if a.name not in STATE for i, n in enumerate(a.slot_bytes)}
    alive: dict[Slot, tuple[float, float]] = {}
    for span in spans:
        op = plan.ops[span.op]
        for slot in dict.fromkeys((*op.reads, *op.writes)):
            if slot not in n_bytes:
                continue
            start_s, end_s = alive.get(slot, (span.start_s, span.end_s))
            if slot in op.writes and overwrites(plan.semantics, op, slot) and slot in alive:
                yield slot.arena, n_bytes[slot], start_s, min(end_s, span.start_s)  # rounding of times
                start_s, end_s = span.start_s, span.end_s
            alive[slot] = start_s, max(end_s, span.end_s)
    for slot, (start_s, end_s) in alive.items():
        yield slot.arena, n_bytes[slot], start_s, end_s


def _lives_of_activations(plan: Plan, spans: Iterable[Span]) -> Iterator[Life]:
    """Yield the lifetimes of saved tensors of each layer and micro-batch, from forward to the end of backward, and the allocator's
    peak during backward of a block. Forward needs less; its peak is not known."""
    began_s: dict[tuple[int, int, int | None], float] = {}
    stays = {*range(1, plan.workload.n_layers + 1)} - {*plan.policy.offload_blocks}
    for span in spans:
        op = plan.ops[span.op]
        key, block = (span.step, op.block, op.micro_batch), plan.workload.blocks[op.block]
        if op.kind is Kind.FORWARD and op.block in stays:
            began_s[key] = span.start_s
        elif op.kind in (Kind.BACKWARD, Kind.LOSS):
            again = plan.recompute(op.block) if block.kind is BlockKind.LAYER else None
            if again is not None and key in began_s:
                yield SAVED, again.saved_bytes, began_s.pop(key), span.end_s
            n_bytes = block.transient_bytes if again is None else again.transient_bytes
            is_its_sum = block.kind is BlockKind.HEAD and not plan.sums_on_device(op.block)
            yield COMPUTED, n_bytes - block.own_sum_bytes * is_its_sum, span.start_s, span.end_s


def _occupancy(place: Place, lives: Iterable[Life], reserved: dict[str, int], memory_bytes: int, stretch: Stretch) -> Occupancy:
    """Sum the lifetimes: bytes of each series at every change, or at the maximum of each of MOST_MOMENTS intervals."""
    rows, length_s = {name: i for i, name in enumerate(reserved)}, stretch.length_s
    cut = ((rows[name], n, max(start_s, stretch.start_s), min(end_s, stretch.end_s)) for name, n, start_s, end_s in lives if n)
    within = [(*key, start_s - stretch.start_s, end_s - stretch.start_s) for *key, start_s, end_s in cut if start_s < end_s]
    row, n_bytes, starts_s, ends_s = np.array(within or [(0, 0, 0.0, 0.0)]).T  # fp64 holds bytes exactly
    times_s = np.unique([0.0, *starts_s, *ends_s])
    changes = np.zeros((len(rows), len(times_s)))
    np.add.at(changes, (row.astype(int), np.searchsorted(times_s, starts_s)), n_bytes)
    np.add.at(changes, (row.astype(int), np.searchsorted(times_s, ends_s)), -n_bytes)
    n_moments = max(1, int(np.searchsorted(times_s, length_s)))
    times_s, bytes_held = times_s[:n_moments], changes.cumsum(axis=1).astype(int)[:, :n_moments]
    if n_moments > MOST_MOMENTS:
        edges_s = np.arange(MOST_MOMENTS + 1) * length_s / MOST_MOMENTS
        passed, total = np.searchsorted(times_s, edges_s), bytes_held.sum(axis=0)
        spells = ((max(begin - 1, 0), end) for begin, end in pairwise(passed.tolist()))
        fullest = [first + int(total[first:end].argmax()) for first, end in spells]
        times_s, bytes_held = edges_s[:-1], bytes_held[:, fullest]
    series = dict(zip(rows, map(tuple, bytes_held.tolist()), strict=True))
    largest = sorted(rows, key=lambda name: (-max(series[name]), name))
    visible = {name: series[name] for name in largest if max(series[name]) >= SMALL_FRACTION * sum(reserved.values())}
    allocated = {name: n for name, n in reserved.items() if n}
    return Occupancy(place, length_s, tuple(times_s.tolist()), visible, allocated, memory_bytes, int(bytes_held.sum(axis=0).max()))
