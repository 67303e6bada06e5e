"""Rules for a plan's ops: the required ops and their counts, and the arena, number and size of their operands.

An independent reading of `docs/plan-language.md`, based on `shape.py` alone and used by the checker only. An operand may be in any
slot of its arena, because `dataflow.py` verifies the content of slots. Only operands that the runtime finds by block have a fixed
slot.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from penstock.runtime.errors import PlanError
from penstock.runtime.plan import OPS, Kind, Op, Place, Plan, Repeat, Slot
from penstock.runtime.plan.ops import Often
from penstock.runtime.plan.workload import ALIGN_ELEMENTS

from .shape import AGAIN, ALIGN_BYTES, FP32, Shape, wrong

FP64 = 8
PAGE_BYTES = 4096  # direct reads are multiples of it
EXCHANGED_BYTES = 2**28  # chunk of a sum that ranks exchange at a time
ANY = range(2**62)
LOADS = (Kind.LOAD, Kind.GATHER)
ON_DEVICE = ("weights", "packed", "activations", "saved", "gradients", "sums", "received", "squares", "device_state")
ON_HOST = ("state", "frozen", "host_gradients", "staging", "spilled", "offloaded", "norm")
PLACES = dict.fromkeys(ON_DEVICE, Place.DEVICE) | dict.fromkeys(ON_HOST, Place.HOST)  # required memory of each arena

Slots = tuple[str, range]  # arena and its allowed slots


class _Rule(NamedTuple):
    """Blocks that have an op of a kind, and the number of ops: `USE` allows any number for streamed blocks."""

    has: Callable[[Shape, int], bool]
    often: Often = Often.STEP

    def is_each(self, shape: Shape, block: int) -> bool:
        """True if the step has one op of the block per micro-batch."""
        return self.often is Often.MICRO_BATCH or (self.often is Often.GRADIENT and block not in shape.summed_there)


_RULES = {
    Kind.READ: _Rule(lambda s, b: b in s.on_disk, Often.USE),
    Kind.LOAD: _Rule(lambda s, b: b not in s.in_place, Often.USE),
    Kind.GATHER: _Rule(lambda s, b: s.ranks > 1 and b in s.trained, Often.USE),
    Kind.DEQUANTISE: _Rule(lambda s, b: b in s.packed, Often.USE),
    Kind.FORWARD: _Rule(lambda s, b: b < s.head, Often.MICRO_BATCH),
    Kind.LOSS: _Rule(lambda s, b: b == s.head, Often.MICRO_BATCH),
    Kind.BACKWARD: _Rule(lambda s, b: s.first_trained <= b < s.head, Often.MICRO_BATCH),
    Kind.RECOMPUTE: _Rule(lambda s, b: s.is_recomputed(b), Often.MICRO_BATCH),
    Kind.OFFLOAD_ACTIVATION: _Rule(lambda s, b: b in s.offloaded, Often.MICRO_BATCH),
    Kind.FETCH_ACTIVATION: _Rule(lambda s, b: b in s.offloaded, Often.MICRO_BATCH),
    Kind.OFFLOAD_SAVED: _Rule(lambda s, b: b in s.saved_bytes, Often.MICRO_BATCH),
    Kind.FETCH_SAVED: _Rule(lambda s, b: b in s.saved_bytes, Often.MICRO_BATCH),
    Kind.EXCHANGE: _Rule(lambda s, b: s.ranks > 1 and b in s.trained),
    Kind.OFFLOAD_GRADIENT: _Rule(lambda s, b: b in s.trained and b not in s.on_device, Often.GRADIENT),
    Kind.ACCUMULATE: _Rule(lambda s, b: b in s.trained and b not in s.summed_there, Often.MICRO_BATCH),
    Kind.SQUARE: _Rule(lambda s, b: b in s.squared),
    Kind.OFFLOAD_SQUARES: _Rule(lambda s, b: b in s.on_device),
    Kind.NORM: _Rule(lambda s, b: b in s.trained and b not in s.squared),
    Kind.CLIP: _Rule(lambda s, b: b == 0),
    Kind.SPECULATE: _Rule(lambda s, b: b in s.shadows),
    Kind.SETTLE: _Rule(lambda s, b: b in s.shadows),
    Kind.UPDATE: _Rule(lambda s, b: b in s.trained and b not in s.shadows and b not in s.on_device),
    Kind.UPDATE_ON_DEVICE: _Rule(lambda s, b: b in s.on_device),
}


def check_ops(plan: Plan, shape: Shape) -> None:
    """Check that the step has exactly the required ops (any number of loads if streamed) with operands in suitable slots."""
    slot_bytes = {a.name: a.slot_bytes for a in plan.arenas}
    present, fitting = set[tuple[Kind, int, int | None]](), set[tuple[str, Slot, Kind, int]]()
    for i, op in enumerate(plan.ops):
        rule, key = _RULES[op.kind], (op.kind, op.block, op.micro_batch)
        if not rule.has(shape, op.block) or (op.micro_batch is not None) != rule.is_each(shape, op.block):
            raise wrong(i, op, "a plan with this policy has no such op")
        if key in present and (rule.often is not Often.USE or op.block in shape.resident):
            raise wrong(i, op, "occurs twice in a step")
        present.add(key)
        _check_operands(i, op, shape)
        for name, slot in op.operands:  # sizes are equal for all micro-batches
            if (use := (name, slot, op.kind, op.block)) not in fitting:
                has_bytes, needed_bytes = slot_bytes[slot.arena][slot.index], n_bytes(name, shape, op)
                if has_bytes < needed_bytes:
                    raise wrong(i, op, f"{slot} has {has_bytes} bytes, but needs {needed_bytes}")
                fitting.add(use)
    for (kind, rule), b in product(_RULES.items(), range(shape.n_blocks)):
        if rule.has(shape, b) and (rule.often is not Often.USE or b in shape.resident):
            micro_batches: Sequence[int | None] = range(shape.n_micro_batches) if rule.is_each(shape, b) else (None,)
            for m in micro_batches:  # lazily, because a malicious plan may declare 2^50 of them
                if (kind, b, m) not in present:
                    suffix = "" if m is None else f", micro-batch {m}"
                    raise PlanError(f"the step has no {kind} of block {b}{suffix}; {AGAIN}")


def _check_operands(i: int, op: Op, shape: Shape) -> None:
    wanted = expected(shape, op)
    if len(op.operands) != len(wanted) or not all(
        name == known and slot.arena == arena and slot.index in slots
        for (name, slot), (known, (arena, slots)) in zip(op.operands, wanted, strict=True)
    ):
        actual = " ".join(f"{name}={slot}" for name, slot in op.operands[:6]) or "nothing"
        rule = " ".join(f"{name}={arena}[{ok.start if len(ok) == 1 else 'any'}]" for name, (arena, ok) in wanted) or "nothing"
        raise wrong(i, op, f"must use {rule}, not {actual}")
    if op.block and op.kind is Kind.FORWARD and op["x"] == op.get("y"):
        raise wrong(i, op, f"has {op['x']} for both its input and its output")


def check_arenas(plan: Plan) -> None:
    """Check the names, memory and slot alignment of arenas; PlanError if one is wrong."""
    for arena in plan.arenas:
        if arena.place is not (place := PLACES.get(arena.name)):
            is_known = f"must be in {place} memory" if place else "unknown arena"
            raise PlanError(f"arena {arena.name}: {is_known}; {AGAIN}")
        if odd := [n_bytes for n_bytes in arena.slot_bytes[:-1] if n_bytes % ALIGN_BYTES]:
            raise PlanError(f"arena {arena.name}: a slot of {odd[0]} bytes, no multiple of {ALIGN_BYTES}; {AGAIN}")


def check_repeat(plan: Plan, repeat: Repeat, shape: Shape) -> None:
    """Check that repetitions consist of whole groups of micro-batches, between those of the ops before and after them."""
    repeated = [m for op in plan.ops[repeat.start : repeat.end] if (m := op.micro_batch) is not None]
    first = min(repeated, default=0)
    rest_start = first + repeat.times * repeat.micro_batches
    if shape.sum_groups > 1:
        raise PlanError(f"{repeat}: a step with {shape.sum_groups} sum groups cannot have repetitions; {AGAIN}")
    is_whole = first % shape.group == 0 and repeat.micro_batches % shape.group == 0
    if not is_whole or repeat.times < 2 or not 0 < first < rest_start < shape.n_micro_batches:
        raise PlanError(f"{repeat}: not whole groups of {shape.group} micro-batches, between the first and the last; {AGAIN}")
    parts = (range(first), range(first, first + repeat.micro_batches), range(rest_start, shape.n_micro_batches))
    for i, op in enumerate(plan.ops):
        if op.micro_batch is not None and op.micro_batch not in parts[(i >= repeat.start) + (i >= repeat.end)]:
            raise wrong(i, op, f"has a micro-batch of another part of the step: {repeat}")


def expected(shape: Shape, op: Op) -> list[tuple[str, Slots]]:
    """Operands that the op must have, in the order of the plan language."""
    return [(name, slots) for name in OPS[op.kind].names for slots in slots_of(name, shape, op)]


def slots_of(name: str, s: Shape, op: Op) -> Sequence[Slots]:
    """Allowed slots for each operand with this name; empty if the op has none."""
    b, is_load = op.block, op.kind in LOADS
    is_lookup = op.kind is Kind.BACKWARD and b == 0  # the embedding's backward needs no table
    match name:
        case "state":
            return [source_slot(s, b) if is_load else state_slot(s, b)]
        case "trained" if b in s.separate and not is_lookup:
            return [state_slot(s, b)]
        case "tied" if is_load and b == s.head and (s.tied if op.kind is Kind.GATHER else s.shares_weight):  # owned by block 0
            return [source_slot(s, 0)]
        case "tied" if op.kind is Kind.BACKWARD and b == 0 and s.joins_tied and op.micro_batch == s.n_micro_batches - 1:
            return [("gradients" if s.head in s.summed_in_place else "sums", ANY)]  # the head's part, which the device adds
        case "tied" if not is_load and op.kind is not Kind.BACKWARD and b == 0 and s.tied and not s.joins_tied:  # or the host
            return [("host_gradients", ANY)]
        case "weights" if op.kind is Kind.LOAD and b in s.packed:
            return [("packed", ANY)]
        case "weights" if b in s.in_place and not is_lookup:
            return [state_slot(s, b)]
        case "weights" if b in s.resident and not is_lookup:
            # Resident weights have a slot of their own: frozen ones are only loaded in the first step of a run.
            return [one("weights", s.n_streaming + s.resident[b])]
        case "weights" if not is_lookup:
            return [("weights", range(s.n_streaming))]
        case "x" | "y" if b > 0 if name == "x" else b < s.head:
            return [("activations", ANY)]
        case "saved" if b in s.saved_bytes:
            return [("saved", ANY)]
        case "squares" if b in s.squared:
            return [("squares", ANY)]
        case "frozen" if b in s.on_disk:
            return [(name, ANY)]
        case "packed" | "spilled" | "offloaded" | "received":
            return [(name, ANY)]
        case "sum":
            return _sums(s, op)[:1]
        case "into":
            return _sums(s, op)[1:]
        case "gradient" if op.kind not in (Kind.LOSS, Kind.BACKWARD) or _leaves_gradient(s, op):
            return [("gradients", ANY)]
        case "staged":
            return [("staging", ANY)]
        case "arrived":
            return [("staging" if op.kind is Kind.OFFLOAD_GRADIENT and b not in s.summed_there else "host_gradients", ANY)]
        case "norm" if op.kind is Kind.CLIP:
            return [one("norm", trained) for trained in sorted(s.trained)]
        case "norm" if {Kind.OFFLOAD_GRADIENT: b in s.squared, Kind.UPDATE: s.eager}.get(op.kind, True):
            return [one("norm", b)]
        case "clip" if not (op.kind is Kind.UPDATE and s.eager):
            return [one("norm", s.n_blocks)]
        case "shadow":
            return [one("state", s.n_blocks + s.shadows[b])]
    return []


def one(arena: str, index: int) -> Slots:
    return arena, range(index, index + 1)


def state_slot(shape: Shape, block: int) -> Slots:
    """Slot of the block's masters and moments; if the state is on the host, with its frozen weights."""
    return one("device_state", shape.on_device[block]) if block in shape.on_device else one("state", block)


def source_slot(shape: Shape, block: int) -> Slots:
    """Slot that the block's weights are loaded from."""
    return one("state", block) if block in shape.separate else state_slot(shape, block)


def _leaves_gradient(shape: Shape, op: Op) -> bool:
    """True if a micro-batch writes a gradient: the last one if the device sums, otherwise each one."""
    b, is_last = op.block, op.micro_batch == shape.n_micro_batches - 1
    is_its_sum = b in shape.summed_there and (shape.sums_itself(b) or shape.ranks > 1)
    return b in shape.trained - shape.summed_in_place and not is_its_sum and (is_last or b not in shape.summed_there)


def _sums(shape: Shape, op: Op) -> list[Slots]:
    """The sum that a micro-batch's gradient is added to, followed by the sums that this one is added to."""
    b, joined = op.block, shape.summed_with(op.micro_batch or 0)
    if op.kind is Kind.ACCUMULATE:
        return [("host_gradients", ANY)] * len(joined)
    is_own = b in shape.summing | shape.summed_in_place
    is_alone = shape.n_micro_batches == 1 and b != shape.head and shape.ranks == 1 and not (shape.sums_itself(b) or is_own)
    if b not in shape.trained & shape.summed_there or is_alone:  # the head's single gradient is a sum over tiles of tokens
        return []
    is_gradient = b in shape.summed_in_place or (shape.sums_itself(b) and shape.ranks == 1)
    return [("gradients" if is_gradient and together.start == 0 else "sums", ANY) for together in joined]


def n_bytes(name: str, s: Shape, op: Op) -> int:
    """Bytes that an operand needs."""
    b, is_load = op.block, op.kind in LOADS
    match name:
        case "state" if b not in s.on_device or (is_load and b in s.separate):  # on the host, with the frozen weights
            return s.host_bytes[b]
        case "state" | "trained" | "shadow":
            return s.own_bytes[b]
        case "frozen":
            return -(-s.frozen_bytes[b] // PAGE_BYTES) * PAGE_BYTES
        case "tied" if op.kind is Kind.BACKWARD:
            return FP32 * s.trained_elements[s.head]
        case "tied":
            in_memory = s.own_bytes if source_slot(s, 0)[0] == "device_state" else s.host_bytes
            return in_memory[0] if is_load else s.arrived_bytes[s.head]
        case "packed" | "weights" if name == "packed" or (op.kind is Kind.LOAD and b in s.packed):
            return s.item_bytes * s.owned[b] * s.ranks + s.frozen_bytes[b]
        case "weights":
            return s.item_bytes * s.elements[b]
        case "x" | "y" | "spilled":
            return s.boundary_bytes[b - (name == "x")]
        case "saved" | "offloaded":
            return s.saved_bytes[b]
        case "sum" | "into":
            is_one = s.ranks > 1 and s.n_micro_batches == 1 and not s.is_vocab(b)  # a rank's only gradient is no sum
            return s.trained_elements[b] * (s.item_bytes if is_one and name == "sum" else FP32)
        case "received":  # send and receive buffers of a sum, for the largest shard or one chunk
            chunk = EXCHANGED_BYTES // FP32 // s.ranks // ALIGN_ELEMENTS * ALIGN_ELEMENTS
            return 2 * s.ranks * FP32 * min(max(s.owned), chunk)
        case "gradient" | "staged":
            return s.sent_bytes[b]
        case "arrived":
            return (s.sent_bytes if op.kind is Kind.OFFLOAD_GRADIENT else s.arrived_bytes)[b]
        case "squares" | "norm":  # `clip` reads those of all blocks; the ops that write them check the size
            return 0 if op.kind is Kind.CLIP else FP64 * s.n_squares[b]
    assert name == "clip"
    # Per rank: sums of squares, losses of its micro-batches, and a flag for a requested stop
    return FP64 * (s.ranks * (sum(s.n_squares) + s.n_micro_batches + 1) if s.ranks > 1 else 1)
