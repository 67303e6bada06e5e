"""Operands of ops: in which arena each is, how many of it an op has, and how many bytes go into it, as the checker works them out.

From the facts of `shape.py` alone. Only the checker uses it, never what makes plans. Which slot of its arena an operand has is
free: `dataflow.py` proves it right by what the slot holds. But where the runtime looks for a block's own, it has a place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.plan import OPS, Kind, Op
from runtime.plan.workload import ALIGN_ELEMENTS

from .shape import FP32, Shape

FP64 = 8
EXCHANGED_BYTES = 2**28  # of a sum that ranks exchange at a time
_ANY = range(2**62)
_LOADS = (Kind.LOAD, Kind.GATHER)

Slots = tuple[str, range]  # an arena, and the slots of it that will do


# -- slots of an operand: none where the op has no such operand, several where it has several -------------------------------


def _in(arena: str, has: Callable[[Shape, Op], bool] = lambda shape, op: True) -> Callable[[Shape, Op], Sequence[Slots]]:
    """Any slot of the arena, where the op has the operand."""
    return lambda shape, op: [(arena, _ANY)] if has(shape, op) else []


def _one(arena: str, index: int) -> Slots:
    return arena, range(index, index + 1)


def state_slot(shape: Shape, block: int) -> Slots:
    """The block's masters and moments; if the device has none of them, its frozen weights as well."""
    return _one("device_state", shape.on_device[block]) if block in shape.on_device else _one("state", block)


def source_slot(shape: Shape, block: int) -> Slots:
    """Where the block's weights are loaded from."""
    return _one("state", block) if block in shape.apart else state_slot(shape, block)


def _state(shape: Shape, op: Op) -> list[Slots]:
    return [source_slot(shape, op.block) if op.kind in _LOADS else state_slot(shape, op.block)]


def _trained(shape: Shape, op: Op) -> list[Slots]:
    return [state_slot(shape, op.block)] if op.block in shape.apart and not _is_lookup(op) else []


def _is_lookup(op: Op) -> bool:
    """Whether it is the embedding's backward, which needs no table."""
    return op.kind is Kind.BACKWARD and op.block == 0


def _tied(shape: Shape, op: Op) -> list[Slots]:
    """Of what brings weights, the weight that block 0 owns; else the head's part of the gradient of such a weight."""
    if op.kind in _LOADS:
        return [_one("state", 0)] if op.block == shape.head and shape.shares_weight else []
    return [("host_gradients", _ANY)] if op.block == 0 and shape.tied else []


def _weights(shape: Shape, op: Op) -> list[Slots]:
    """Weights that stay have a slot for themselves: frozen ones are loaded in a run's first step alone."""
    if op.kind in _LOADS and op.block in shape.packed:
        return [("packed", _ANY)]
    place = shape.resident.get(op.block)
    of_block = ("weights", range(shape.n_streaming)) if place is None else _one("weights", shape.n_streaming + place)
    return [] if _is_lookup(op) else [of_block]


def _gradient(shape: Shape, op: Op) -> list[Slots]:
    """Of what computes, where the last micro-batch's leaves the sum, or each leaves its own."""
    b = op.block
    if op.kind in (Kind.LOSS, Kind.BACKWARD):
        sums_only = b not in shape.trained or b in shape.apart or (shape.reduced and (_is_its_sum(shape, b) or shape.ranks > 1))
        if sums_only or (shape.reduced and op.micro_batch != shape.n_micro_batches - 1):
            return []
    return [("gradients", _ANY)]


def _is_its_sum(shape: Shape, block: int) -> bool:
    """Whether the sum of the block's gradients is the gradient: of a tied weight."""
    return shape.is_vocab(block) and shape.tied


def _sums(shape: Shape, op: Op) -> list[Slots]:
    """The sum that a micro-batch's gradient joins, and those that this one then joins."""
    b, joined = op.block, shape.summed_with(op.micro_batch or 0)
    if op.kind is Kind.ACCUMULATE:
        return [("host_gradients", _ANY)] * len(joined)
    if b in shape.apart:  # whatever the groups, all micro-batches are added up where the gradient stays
        return [("gradients", _ANY)]
    is_alone = shape.n_micro_batches == 1 and b != shape.head and shape.ranks == 1 and not _is_its_sum(shape, b)
    if b not in shape.trained or not shape.reduced or is_alone:  # the head's single gradient is a sum over tiles of tokens
        return []
    is_gradient = _is_its_sum(shape, b) and shape.ranks == 1
    return [("gradients" if is_gradient and together.start == 0 else "sums", _ANY) for together in joined]


def _arrived(shape: Shape, op: Op) -> list[Slots]:
    is_staged = op.kind is Kind.OFFLOAD_GRADIENT and not shape.reduced
    return [("staging" if is_staged else "host_gradients", _ANY)]


def _norm(shape: Shape, op: Op) -> list[Slots]:
    """Sums of squares: of one gradient, or of all."""
    if op.kind is Kind.CLIP:
        return [_one("norm", b) for b in sorted(shape.trained)]
    has_some = {Kind.OFFLOAD_GRADIENT: op.block in shape.squared, Kind.UPDATE: shape.eager}
    return [_one("norm", op.block)] if has_some.get(op.kind, True) else []


def _clip(shape: Shape, op: Op) -> list[Slots]:
    return [] if op.kind is Kind.UPDATE and shape.eager else [_one("norm", shape.n_blocks)]


# -- bytes of an operand -----------------------------------------------------------------------------------------------------


def _state_bytes(shape: Shape, op: Op) -> int:
    """Masters and moments of what is trained, where they are; on the host, the frozen weights as well."""
    is_source = op.kind in _LOADS and op.block in shape.apart
    return (shape.host_bytes if is_source or op.block not in shape.on_device else shape.own_bytes)[op.block]


def _weights_bytes(shape: Shape, op: Op) -> int:
    is_packed = op.kind in _LOADS and op.block in shape.packed
    return _packed_bytes(shape, op) if is_packed else shape.item_bytes * shape.elements[op.block]


def _packed_bytes(shape: Shape, op: Op) -> int:
    return shape.item_bytes * shape.owned[op.block] + shape.frozen_bytes[op.block]


def _sum_bytes(shape: Shape, op: Op) -> int:
    """A rank's only gradient of a layer is no sum yet."""
    is_one = shape.ranks > 1 and shape.n_micro_batches == 1 and not shape.is_vocab(op.block)
    return shape.trained_elements[op.block] * (shape.item_bytes if is_one else FP32)


def _received_bytes(shape: Shape, op: Op) -> int:
    """What is sent and what is received of a sum: of the largest part, or of as much as goes at a time."""
    most = EXCHANGED_BYTES // FP32 // shape.ranks // ALIGN_ELEMENTS * ALIGN_ELEMENTS
    return 2 * shape.ranks * FP32 * min(max(shape.owned), most)


def _norm_bytes(shape: Shape, op: Op) -> int:
    """Of its block; `clip` reads those of all blocks, which the ops that write them hold to this."""
    return 0 if op.kind is Kind.CLIP else FP64 * shape.n_squares[op.block]


def _clip_bytes(shape: Shape, op: Op) -> int:
    """Of every rank its sums of squares, the losses of its micro-batches, and whether it is asked to end."""
    return FP64 * (shape.ranks * (sum(shape.n_squares) + shape.n_micro_batches + 1) if shape.ranks > 1 else 1)


class Operand(NamedTuple):
    slots: Callable[[Shape, Op], Sequence[Slots]]
    n_bytes: Callable[[Shape, Op], int]


OPERANDS = {
    "state": Operand(_state, _state_bytes),
    "tied": Operand(_tied, lambda s, op: s.host_bytes[0] if op.kind in _LOADS else s.arrived_bytes[s.head]),
    "weights": Operand(_weights, _weights_bytes),
    "packed": Operand(_in("packed"), _packed_bytes),
    "trained": Operand(_trained, lambda s, op: s.own_bytes[op.block]),
    "x": Operand(_in("activations", lambda s, op: op.block > 0), lambda s, op: s.boundary_bytes[op.block - 1]),
    "y": Operand(_in("activations", lambda s, op: op.block < s.head), lambda s, op: s.boundary_bytes[op.block]),
    "spilled": Operand(_in("spilled"), lambda s, op: s.boundary_bytes[op.block]),
    "saved": Operand(_in("saved", lambda s, op: op.block in s.saved_bytes), lambda s, op: s.saved_bytes[op.block]),
    "offloaded": Operand(_in("offloaded"), lambda s, op: s.saved_bytes[op.block]),
    "sum": Operand(lambda s, op: _sums(s, op)[:1], _sum_bytes),
    "into": Operand(lambda s, op: _sums(s, op)[1:], lambda s, op: FP32 * s.trained_elements[op.block]),
    "gradient": Operand(_gradient, lambda s, op: s.sent_bytes[op.block]),
    "received": Operand(_in("received"), _received_bytes),
    "squares": Operand(_in("squares", lambda s, op: op.block in s.squared), lambda s, op: FP64 * s.n_squares[op.block]),
    "arrived": Operand(_arrived, lambda s, op: (s.sent_bytes if op.kind is Kind.OFFLOAD_GRADIENT else s.arrived_bytes)[op.block]),
    "staged": Operand(_in("staging"), lambda s, op: s.sent_bytes[op.block]),
    "norm": Operand(_norm, _norm_bytes),
    "clip": Operand(_clip, _clip_bytes),
    "shadow": Operand(lambda s, op: [_one("state", s.n_blocks + s.shadows[op.block])], lambda s, op: s.own_bytes[op.block]),
}
# Where each arena must be
ON_DEVICE = {"weights", "packed", "activations", "saved", "gradients", "sums", "received", "squares", "device_state"}
ON_HOST = {"state", "host_gradients", "staging", "spilled", "offloaded", "norm"}


def expected(shape: Shape, op: Op) -> list[tuple[str, Slots]]:
    """The operands that the op must have, in the language's order."""
    return [(name, slots) for name in OPS[op.kind].names for slots in OPERANDS[name].slots(shape, op)]
