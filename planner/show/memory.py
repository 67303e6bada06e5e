"""Bytes that device and host memory hold at each moment of a step.

A slot holds something from the start of the op that writes it until the end of the last op that uses what was written. The
training state is always there. Arenas are taken once and stay: what is drawn is how much of them is in use.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hwprofiles.schema import Profile
from planner.predict.memory import footprint
from runtime.plan import Kind, Op, Place, Plan, Semantics, Slot
from runtime.plan.timeline import Span
from runtime.plan.workload import BlockKind

from .step import Stretch

STATE = frozenset({"state", "device_state", "norm"})  # arenas that one step leaves to the next
KEPT, COMPUTED, CONTEXT, RUNTIME = "kept activations", "block being computed", "context", "runtime"
OTHER = "other"
SMALL_FRACTION = 0.002  # of the peak: parts that never reach this are summed up
MOST_MOMENTS = 1000  # as many as a wide screen has columns; of more, the fullest in each stretch of time

Life = tuple[str, int, float, float]  # series, bytes, from, until
Moment = tuple[float, dict[str, int]]  # from when on, and the bytes of each series


@dataclass(frozen=True, slots=True)
class Held:
    """The content of one memory over a step. `series` are bytes at `times_s`, each valid until the next time; the largest first."""

    place: Place
    length_s: float
    times_s: tuple[float, ...]
    series: dict[str, tuple[int, ...]]
    reserved: dict[str, int]  # what is set aside for each, all the time: together they are the predicted peak
    memory_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any one moment."""
        return max((sum(at) for at in zip(*self.series.values(), strict=True)), default=0)


def held(plan: Plan, profile: Profile, stretch: Stretch) -> tuple[Held, Held]:
    """The content of the device's and the host's memory over the stretch, by arena and by what is no arena."""
    needs = footprint(plan, profile)
    places = {a.name: a.place for a in plan.arenas} | dict.fromkeys((KEPT, COMPUTED), Place.DEVICE)
    spans = sorted(stretch.spans, key=lambda s: (s.step, s.op))  # ops of which one writes a slot of the other are in this order
    always = [(a.name, a.n_bytes, a.place) for a in plan.arenas if a.name in STATE]
    always += [(CONTEXT, needs.device[CONTEXT], Place.DEVICE), (RUNTIME, needs.host[RUNTIME], Place.HOST)]
    lives: dict[Place, list[Life]] = {place: [] for place in Place}
    for name, n_bytes, place in always:
        lives[place].append((name, n_bytes, stretch.start_s, stretch.end_s))
    for life in (*_lives_of_slots(plan, spans), *_lives_of_activations(plan, spans), *_transients(plan, spans)):
        lives[places[life[0]]].append(life)
    return (
        _held(Place.DEVICE, lives[Place.DEVICE], needs.device, needs.device_memory_bytes, stretch),
        _held(Place.HOST, lives[Place.HOST], needs.host, needs.host_memory_bytes, stretch),
    )


def begins_anew(of: Semantics, op: Op, slot: Slot) -> bool:
    """Whether an op that writes the slot needs nothing of what was there."""
    if slot not in op.reads:
        return True
    # A sum is declared as read, but its first addend is added to zero.
    begins = op.micro_batch is not None and of.begins_sum(op.micro_batch)
    return begins and slot == op.get("arrived" if op.kind is Kind.ACCUMULATE else "sum")


def _lives_of_slots(plan: Plan, spans: Iterable[Span]) -> Iterator[Life]:
    """From each new content of a slot to its last use. Content of before the spans begins with them."""
    n_bytes = {Slot(a.name, i): n for a in plan.arenas if a.name not in STATE for i, n in enumerate(a.slot_bytes)}
    alive: dict[Slot, tuple[float, float]] = {}
    for span in spans:
        op = plan.ops[span.op]
        for slot in dict.fromkeys((*op.reads, *op.writes)):
            if slot not in n_bytes:
                continue
            start_s, end_s = alive.get(slot, (span.start_s, span.end_s))
            if slot in op.writes and begins_anew(plan.semantics, op, slot) and slot in alive:
                yield slot.arena, n_bytes[slot], start_s, end_s
                start_s, end_s = span.start_s, span.end_s
            alive[slot] = start_s, max(end_s, span.end_s)
    for slot, (start_s, end_s) in alive.items():
        yield slot.arena, n_bytes[slot], start_s, end_s


def _lives_of_activations(plan: Plan, spans: Iterable[Span]) -> Iterator[Life]:
    """Activations that layers save besides their input, from forward to the end of backward, of each micro-batch."""
    began_s: dict[tuple[int, int, int | None], float] = {}
    stays = {*range(1, plan.workload.n_layers + 1)} - {*plan.policy.offload_blocks}
    for span in spans:
        op = plan.ops[span.op]
        key = span.step, op.block, op.micro_batch
        if op.kind is Kind.FORWARD and op.block in stays:
            began_s[key] = span.start_s
        elif op.kind is Kind.BACKWARD and key in began_s:
            yield KEPT, plan.recompute(op.block).saved_bytes, began_s.pop(key), span.end_s


def _transients(plan: Plan, spans: Iterable[Span]) -> Iterator[Life]:
    """The allocator's peak while a block goes backward. Of forwards, which need less, no figure is known."""
    for span in spans:
        op = plan.ops[span.op]
        if op.kind not in (Kind.BACKWARD, Kind.LOSS):
            continue
        block = plan.workload.blocks[op.block]
        if block.kind is BlockKind.LAYER:
            n_bytes = plan.recompute(op.block).transient_bytes
        else:
            n_bytes = block.transient_bytes - (block.own_sum_bytes if block.kind is BlockKind.HEAD and not plan.reduced else 0)
        yield COMPUTED, n_bytes, span.start_s, span.end_s


def _held(place: Place, lives: Iterable[Life], reserved: dict[str, int], memory_bytes: int, stretch: Stretch) -> Held:
    """The lives added up: bytes of each series at every moment at which something changes."""
    changes: dict[float, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, n_bytes, start_s, end_s in lives:
        start_s, end_s = max(start_s, stretch.start_s), min(end_s, stretch.end_s)
        if n_bytes and start_s < end_s:
            changes[start_s - stretch.start_s][name] += n_bytes
            changes[end_s - stretch.start_s][name] -= n_bytes
    changes.pop(stretch.length_s, None)
    moments: list[Moment] = []
    now = dict.fromkeys(reserved, 0)
    for at_s in sorted({0.0, *changes}):
        for name, n_bytes in changes[at_s].items():
            now[name] += n_bytes
        moments.append((at_s, dict(now)))
    moments = _fullest(moments, stretch.length_s)
    series = {name: tuple(at[name] for _, at in moments) for name in reserved}
    ordered = dict(sorted(series.items(), key=lambda item: (-max(item[1]), item[0])))
    kept = {name: n_bytes for name, n_bytes in reserved.items() if n_bytes}
    times_s = tuple(at_s for at_s, _ in moments)
    return Held(place, stretch.length_s, times_s, _few(ordered, sum(reserved.values())), kept, memory_bytes)


def _fullest(moments: list[Moment], length_s: float) -> list[Moment]:
    """Few enough moments to draw: of each of MOST_MOMENTS equal stretches of time the one at which most is held."""
    if len(moments) <= MOST_MOMENTS:
        return moments
    chosen: list[Moment] = []
    after = 0  # the first moment not yet passed
    for i in range(MOST_MOMENTS):
        start_s, end_s = i * length_s / MOST_MOMENTS, (i + 1) * length_s / MOST_MOMENTS
        first = max(after - 1, 0)  # what holds at the start of the stretch
        while after < len(moments) and moments[after][0] < end_s:
            after += 1
        chosen.append((start_s, max((now for _, now in moments[first:after]), key=lambda now: sum(now.values()))))
    return chosen


def _few(series: dict[str, tuple[int, ...]], peak_bytes: int) -> dict[str, tuple[int, ...]]:
    """The series that can be seen, and the others in one."""
    seen = {name: values for name, values in series.items() if max(values) >= SMALL_FRACTION * peak_bytes}
    rest = [values for name, values in series.items() if name not in seen and any(values)]
    return seen | ({OTHER: tuple(map(sum, zip(*rest, strict=True)))} if rest else {})
