"""Operands of ops: in which arena each is, how many of it an op has, and how many bytes go into it, as the checker works them out.

From the facts of `shape.py` alone. Only the checker uses it, never what makes plans. Which slot of its arena an operand has is
free: `dataflow.py` proves it right by what the slot holds. But where the runtime looks for a block's own, it has a place.
"""

from collections.abc import Sequence

from runtime.plan import OPS, Kind, Op, Place
from runtime.plan.workload import ALIGN_ELEMENTS

from .shape import FP32, Shape

FP64 = 8
EXCHANGED_BYTES = 2**28  # of a sum that ranks exchange at a time
ANY = range(2**62)
LOADS = (Kind.LOAD, Kind.GATHER)
ON_DEVICE = ("weights", "packed", "activations", "saved", "gradients", "sums", "received", "squares", "device_state")
ON_HOST = ("state", "host_gradients", "staging", "spilled", "offloaded", "norm")
PLACES = dict.fromkeys(ON_DEVICE, Place.DEVICE) | dict.fromkeys(ON_HOST, Place.HOST)  # where each arena must be

Slots = tuple[str, range]  # an arena, and the slots of it that will do


def expected(shape: Shape, op: Op) -> list[tuple[str, Slots]]:
    """The operands that the op must have, in the language's order."""
    return [(name, slots) for name in OPS[op.kind].names for slots in slots_of(name, shape, op)]


def slots_of(name: str, s: Shape, op: Op) -> Sequence[Slots]:
    """Slots of the operands of that name: none where the op has none, several where it has several."""
    b, is_load = op.block, op.kind in LOADS
    is_lookup = op.kind is Kind.BACKWARD and b == 0  # the embedding's backward, which needs no table
    match name:
        case "state":
            return [source_slot(s, b) if is_load else state_slot(s, b)]
        case "trained" if b in s.apart and not is_lookup:
            return [state_slot(s, b)]
        case "tied" if is_load and b == s.head and s.shares_weight:  # the weight that block 0 owns
            return [one("state", 0)]
        case "tied" if not is_load and b == 0 and s.tied:  # the head's part of the gradient of such a weight
            return [("host_gradients", ANY)]
        case "weights" if is_load and b in s.packed:
            return [("packed", ANY)]
        case "weights" if b in s.resident and not is_lookup:
            # Weights that stay have a slot for themselves: frozen ones are loaded in a run's first step alone.
            return [one("weights", s.n_streaming + s.resident[b])]
        case "weights" if not is_lookup:
            return [("weights", range(s.n_streaming))]
        case "x" | "y" if b > 0 if name == "x" else b < s.head:
            return [("activations", ANY)]
        case "saved" if b in s.saved_bytes:
            return [("saved", ANY)]
        case "squares" if b in s.squared:
            return [("squares", ANY)]
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
            return [("staging" if op.kind is Kind.OFFLOAD_GRADIENT and not s.reduced else "host_gradients", ANY)]
        case "norm" if op.kind is Kind.CLIP:
            return [one("norm", of) for of in sorted(s.trained)]
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
    """The block's masters and moments; if the device has none of them, its frozen weights as well."""
    return one("device_state", shape.on_device[block]) if block in shape.on_device else one("state", block)


def source_slot(shape: Shape, block: int) -> Slots:
    """Where the block's weights are loaded from."""
    return one("state", block) if block in shape.apart else state_slot(shape, block)


def _leaves_gradient(shape: Shape, op: Op) -> bool:
    """Whether a micro-batch leaves a gradient: the last one the sum, or each its own."""
    b, is_last = op.block, op.micro_batch == shape.n_micro_batches - 1
    is_its_sum = shape.reduced and (shape.sums_itself(b) or shape.ranks > 1)
    return b in shape.trained and b not in shape.apart and not is_its_sum and (is_last or not shape.reduced)


def _sums(shape: Shape, op: Op) -> list[Slots]:
    """The sum that a micro-batch's gradient joins, and those that this one then joins."""
    b, joined = op.block, shape.summed_with(op.micro_batch or 0)
    if op.kind is Kind.ACCUMULATE:
        return [("host_gradients", ANY)] * len(joined)
    if b in shape.apart:  # whatever the groups, all micro-batches are added up where the gradient stays
        return [("gradients", ANY)]
    is_alone = shape.n_micro_batches == 1 and b != shape.head and shape.ranks == 1 and not shape.sums_itself(b)
    if b not in shape.trained or not shape.reduced or is_alone:  # the head's single gradient is a sum over tiles of tokens
        return []
    is_gradient = shape.sums_itself(b) and shape.ranks == 1
    return [("gradients" if is_gradient and together.start == 0 else "sums", ANY) for together in joined]


def n_bytes(name: str, s: Shape, op: Op) -> int:
    """How many bytes go into an operand."""
    b, is_load = op.block, op.kind in LOADS
    match name:
        case "state" if b not in s.on_device or (is_load and b in s.apart):  # on the host, with the frozen weights
            return s.host_bytes[b]
        case "state" | "trained" | "shadow":
            return s.own_bytes[b]
        case "tied":
            return s.host_bytes[0] if is_load else s.arrived_bytes[s.head]
        case "packed" | "weights" if name == "packed" or (is_load and b in s.packed):
            return s.item_bytes * s.owned[b] + s.frozen_bytes[b]
        case "weights":
            return s.item_bytes * s.elements[b]
        case "x" | "y" | "spilled":
            return s.boundary_bytes[b - (name == "x")]
        case "saved" | "offloaded":
            return s.saved_bytes[b]
        case "sum" | "into":
            is_one = s.ranks > 1 and s.n_micro_batches == 1 and not s.is_vocab(b)  # a rank's only gradient of a layer is no sum yet
            return s.trained_elements[b] * (s.item_bytes if is_one and name == "sum" else FP32)
        case "received":  # what is sent and what is received of a sum: of the largest part, or of as much as goes at a time
            most = EXCHANGED_BYTES // FP32 // s.ranks // ALIGN_ELEMENTS * ALIGN_ELEMENTS
            return 2 * s.ranks * FP32 * min(max(s.owned), most)
        case "gradient" | "staged":
            return s.sent_bytes[b]
        case "arrived":
            return (s.sent_bytes if op.kind is Kind.OFFLOAD_GRADIENT else s.arrived_bytes)[b]
        case "squares" | "norm":  # `clip` reads those of all blocks, which the ops that write them hold to this
            return 0 if op.kind is Kind.CLIP else FP64 * s.n_squares[b]
    assert name == "clip"
    # Of every rank its sums of squares, the losses of its micro-batches, and whether it is asked to end
    return FP64 * (s.ranks * (sum(s.n_squares) + s.n_micro_batches + 1) if s.ranks > 1 else 1)
