"""What must the ops of a plan look like?

`runtime/plan/plan.py` as a verifier reads it: given the workload, the semantics and the policy, which ops there must be, and which
slots are each op's operands. Only the checker uses it, never what makes plans.
"""

from collections.abc import Iterator
from typing import assert_never

from runtime.errors import PlanError
from runtime.plan import Kind, Op, Plan, Repeat

from .shape import AGAIN, Expected, Shape, wrong

_Operands = list[tuple[str, Expected]]


def _expected(shape: Shape, sizes: dict[str, int], op: Op) -> _Operands:
    """The operands that the contract has this op use, in order."""
    b, m = op.block, op.micro_batch or 0
    below: _Operands = [("x", shape.activation(b - 1, m))] if b else []
    above: _Operands = [("y", shape.activation(b, m))] if b < shape.head else []
    weights, gradient = ("weights", shape.weights(b)), ("gradient", shape.gradient(b))
    adapted: _Operands = [weights, *([("trained", shape.state(b))] if b in shape.apart else [])]
    tied: _Operands = [("tied", _arrived(shape, sizes, shape.head))] if b == 0 and shape.tied else []
    arrived: _Operands = [("arrived", _arrived(shape, sizes, b)), *tied]
    norm, state = ("norm", _slot("norm", 0)), ("state", shape.state(b))
    shadow: _Operands = [("shadow", _slot("state", shape.n_blocks + shape.shadows[b]))] if b in shape.shadows else []
    squares: _Operands = [("squares", _slot("squares", shape.squared[b]))] if b in shape.squared else []
    sums: _Operands = [("norm", _slot("norm", 1 + shape.squared[b]))] if b in shape.squared else []
    saved: _Operands = [("saved", ("saved", range(sizes["saved"])))] if b in shape.offloaded else []
    match op.kind:
        case Kind.LOAD | Kind.GATHER:
            owners: _Operands = [("tied", _slot("state", 0))] if b == shape.head and shape.shares_weight else []
            return [("state", shape.source(b)), *owners, ("weights", shape.loaded(b))]
        case Kind.DEQUANTISE:
            return [("packed", shape.loaded(b)), weights]
        case Kind.FORWARD | Kind.RECOMPUTE:
            return [*adapted, *below, *above, *saved]
        case Kind.LOSS:
            return [*adapted, *below, *_expected_sums(shape, op, gradient)]
        case Kind.BACKWARD:
            return [*(adapted if b else []), *above, *below, *saved, *_expected_sums(shape, op, gradient)]
        case Kind.SQUARE:
            return [gradient, *squares]
        case Kind.OFFLOAD_GRADIENT if not shape.reduced:
            return [gradient, ("arrived", _staged(shape, sizes, b))]
        case Kind.OFFLOAD_GRADIENT:
            return [gradient, *squares, ("arrived", _arrived(shape, sizes, b)), *sums]
        case Kind.OFFLOAD_SQUARES:
            return [*squares, *sums]
        case Kind.UPDATE_ON_DEVICE:
            return [gradient, norm, state]
        case Kind.ACCUMULATE:
            place, n = shape.sum_place(m), len(shape.summed_with(m))
            to, *into = (_slot("host_gradients", (place - i) * shape.n_blocks + b) for i in range(n))
            return [("staged", _staged(shape, sizes, b)), ("arrived", to), *(("into", slot) for slot in into)]
        case Kind.NORM:
            every: _Operands = [("squares", _slot("norm", 1 + i)) for i in shape.squared.values()]
            every = every if b == shape.first_trained else []
            return [*([] if squares else arrived), *every, norm]
        case Kind.UPDATE:
            return [*arrived, *(sums if shape.eager else [norm]), state]
        case Kind.SPECULATE:
            return [*arrived, state, *shadow]
        case Kind.SETTLE:
            return [*arrived, norm, state, *shadow]
        case Kind.EXCHANGE:
            return [("sum", shape.sum(b, 0)), ("received", _slot("received", 0)), gradient]
        case Kind.SHARE_NORM:
            return [norm]
        case Kind.OFFLOAD_SAVED:
            return [*saved, ("offloaded", shape.offload(b, m))]
        case Kind.FETCH_SAVED:
            return [("offloaded", shape.offload(b, m)), *saved]
        case Kind.OFFLOAD_ACTIVATION:
            return [*above, ("spilled", shape.spill(b, m))]
        case Kind.FETCH_ACTIVATION:
            return [("spilled", shape.spill(b, m)), *above]
        case _:
            assert_never(op.kind)


def _slot(arena: str, index: int) -> Expected:
    return arena, range(index, index + 1)


def _arrived(shape: Shape, sizes: dict[str, int], block: int) -> Expected:
    """Where a block's gradient comes to on the host."""
    last = sizes["host_gradients"] - 1
    if shape.ring and not shape.vocab(block):
        return "host_gradients", range(1, last)
    return _slot("host_gradients", last if shape.ring and block == shape.head else block)


def _staged(shape: Shape, sizes: dict[str, int], block: int) -> Expected:
    """Where a micro-batch's gradient waits to be added."""
    last = sizes["staging"] - 1
    return _slot("staging", last) if shape.vocab(block) else ("staging", range(last))


def _expected_sums(shape: Shape, op: Op, gradient: tuple[str, Expected]) -> _Operands:
    """How the gradient of one micro-batch joins the sum, and which of them leaves one."""
    first, last = op.micro_batch == 0, op.micro_batch == shape.n_micro_batches - 1
    if op.block not in shape.trained:
        return []
    if op.block in shape.apart:  # whatever the groups, all micro-batches are added up where the gradient stays
        return [("sum", gradient[1])]
    if not shape.reduced:
        return [gradient]
    place, n = shape.sum_place(op.micro_batch or 0), len(shape.summed_with(op.micro_batch or 0))
    total: _Operands = [("into" if i else "sum", shape.sum(op.block, place - i)) for i in range(n)]
    if shape.vocab(op.block) and shape.tied:  # the sum is the gradient, or a rank's part of it
        return total
    # With one micro-batch there is nothing to sum, but in the head: its gradient is a sum over tiles of tokens.
    if shape.ranks > 1:  # and a rank's sum is one of several
        return total
    if first and last and op.block != shape.head:
        return [gradient]
    return [*total, gradient] if last else total


_Key = tuple[Kind, int, int | None]  # kind, block, micro-batch: no two ops of a step are alike in all of them
_ONCE_A_STEP = (
    Kind.LOAD,
    Kind.DEQUANTISE,
    Kind.GATHER,
    Kind.EXCHANGE,
    Kind.SHARE_NORM,
    Kind.OFFLOAD_GRADIENT,
    Kind.OFFLOAD_SQUARES,
    Kind.NORM,
    Kind.UPDATE,
    Kind.UPDATE_ON_DEVICE,
    Kind.SPECULATE,
    Kind.SETTLE,
    Kind.SQUARE,
)
_OF_WEIGHTS = (Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER)  # where a block streams, as often as one likes
_OF_GRADIENTS = (
    Kind.SQUARE,
    Kind.OFFLOAD_GRADIENT,
    Kind.OFFLOAD_SQUARES,
    Kind.ACCUMULATE,
    Kind.NORM,
    Kind.UPDATE,
    Kind.UPDATE_ON_DEVICE,
    Kind.SPECULATE,
    Kind.SETTLE,
    Kind.EXCHANGE,
)


def _expected_ops(shape: Shape) -> Iterator[_Key]:
    """Every op a step must have exactly once, most loads aside. Lazy: a hostile plan may promise 2^50 micro-batches."""
    for b in range(shape.n_blocks):
        if shape.has_norm(b):
            yield Kind.NORM, b, None
        for kind in _updates(shape, b):
            yield kind, b, None
        if b in shape.resident:
            yield Kind.LOAD, b, None
            if b in shape.packed:
                yield Kind.DEQUANTISE, b, None
        if shape.ranks > 1:
            yield Kind.EXCHANGE, b, None
            if b == 0:
                yield Kind.SHARE_NORM, b, None
        if b in shape.on_device:
            yield Kind.OFFLOAD_SQUARES, b, None
        elif shape.reduced and b in shape.trained:
            yield Kind.OFFLOAD_GRADIENT, b, None
        if b in shape.squared:
            yield Kind.SQUARE, b, None
        for m in range(shape.n_micro_batches):
            if b == shape.head:
                yield Kind.LOSS, b, m
            else:
                yield Kind.FORWARD, b, m
                if shape.has_backward(b):
                    yield Kind.BACKWARD, b, m
            if shape.is_recomputed(b):
                yield Kind.RECOMPUTE, b, m
            if b in shape.spilled:
                yield Kind.OFFLOAD_ACTIVATION, b, m
                yield Kind.FETCH_ACTIVATION, b, m
            if b in shape.offloaded:
                yield Kind.OFFLOAD_SAVED, b, m
                yield Kind.FETCH_SAVED, b, m
            if not shape.reduced and b in shape.trained and b not in shape.on_device:
                yield Kind.OFFLOAD_GRADIENT, b, m
                yield Kind.ACCUMULATE, b, m


def _updates(shape: Shape, block: int) -> tuple[Kind, ...]:
    """How the state of a block changes."""
    if block not in shape.trained:
        return ()
    if block in shape.on_device:
        return (Kind.UPDATE_ON_DEVICE,)
    return (Kind.SPECULATE, Kind.SETTLE) if block in shape.shadows else (Kind.UPDATE,)


def check_ops(plan: Plan, shape: Shape) -> None:
    """Each op is one that the step must have, once (of streamed blocks what brings weights: any number), and uses the contract's
    slots."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    seen: set[_Key] = set()
    for i, op in enumerate(plan.ops):
        _check_kind(i, op, shape)
        key = op.kind, op.block, op.micro_batch
        if key in seen and (op.kind not in _OF_WEIGHTS or op.block in shape.resident):
            raise wrong(i, op, "done twice in a step")
        seen.add(key)
        expected = _expected(shape, sizes, op)
        if len(op.operands) != len(expected) or not all(
            name == known and slot.arena == arena and slot.index in slots
            for (name, slot), (known, (arena, slots)) in zip(op.operands, expected, strict=True)
        ):
            found = " ".join(f"{name}={slot}" for name, slot in op.operands[:6]) or "nothing"
            raise wrong(i, op, f"must use {_text(expected)}, not {found}")
        if op.block and op.kind is Kind.FORWARD and op["x"] == op.get("y"):
            raise wrong(i, op, f"has {op['x']} for both its input and its output")
    for key in _expected_ops(shape):
        if key not in seen:
            raise PlanError(f"the step has no {_key_text(key)}; {AGAIN}")


def _check_kind(i: int, op: Op, shape: Shape) -> None:
    """Under its policy the plan has an op like this one."""
    b, kind = op.block, op.kind
    if (kind is Kind.LOSS) != (b == shape.head) and kind in (Kind.FORWARD, Kind.BACKWARD, Kind.LOSS):
        raise wrong(i, op, "the head has a loss op, the other blocks forward and backward")
    if kind in _OF_GRADIENTS and b not in shape.trained:
        raise wrong(i, op, "nothing of the block is trained")
    if kind is Kind.BACKWARD and not shape.has_backward(b):
        raise wrong(i, op, f"no backward comes below block {shape.first_trained}, the first of which anything is trained")
    if kind is Kind.DEQUANTISE and b not in shape.packed:
        raise wrong(i, op, "no weight of the block is packed")
    if kind in (Kind.OFFLOAD_ACTIVATION, Kind.FETCH_ACTIVATION) and b not in shape.spilled:
        raise wrong(i, op, "under this policy the output of the block does not spill")
    if kind in (Kind.OFFLOAD_SAVED, Kind.FETCH_SAVED) and b not in shape.offloaded:
        raise wrong(i, op, "under this policy what the block saves stays on the device")
    if kind is Kind.RECOMPUTE and not shape.is_recomputed(b):
        raise wrong(i, op, "under this policy the output of the block stays, or is recomputed by its backward")
    if kind in (Kind.SPECULATE, Kind.SETTLE) and b not in shape.shadows:
        raise wrong(i, op, "under this policy the block has no shadow")
    if kind is Kind.UPDATE and b in shape.shadows:
        raise wrong(i, op, "under this policy the block is updated by speculate and settle")
    if (kind is Kind.UPDATE_ON_DEVICE) != (b in shape.on_device) and kind in (Kind.UPDATE, Kind.UPDATE_ON_DEVICE):
        raise wrong(i, op, f"under this policy the state of the block is on the {'device' if b in shape.on_device else 'host'}")
    if (kind is Kind.OFFLOAD_SQUARES) != (b in shape.on_device) and kind in (Kind.OFFLOAD_GRADIENT, Kind.OFFLOAD_SQUARES):
        raise wrong(i, op, f"under this policy the block's gradient {'stays' if b in shape.on_device else 'goes to the host'}")
    if kind is Kind.ACCUMULATE and b in shape.on_device:
        raise wrong(i, op, "under this policy the block's gradient stays")
    if kind is Kind.SQUARE and b not in shape.squared:
        raise wrong(i, op, "under this policy the squares of the block's gradient are summed on the host")
    if kind is Kind.NORM and not shape.has_norm(b):
        raise wrong(i, op, "under this policy the squares of the block's gradient are summed on the device")
    if kind in (Kind.GATHER, Kind.EXCHANGE, Kind.SHARE_NORM) and (shape.ranks == 1 or (kind is Kind.SHARE_NORM and b)):
        raise wrong(i, op, "no rank has such an op in a plan like this")
    has_micro_batch = kind not in _ONCE_A_STEP or (kind is Kind.OFFLOAD_GRADIENT and not shape.reduced)
    if (op.micro_batch is not None) != has_micro_batch or (kind is Kind.ACCUMULATE and shape.reduced):
        raise wrong(i, op, f"no such op in a plan with groups of {shape.group} micro-batches")


def _key_text(key: _Key) -> str:
    kind, block, micro_batch = key
    return f"{kind} of block {block}{'' if micro_batch is None else f', micro-batch {micro_batch}'}"


def _text(expected: _Operands) -> str:
    slots = (f"{name}={arena}[{of.start if len(of) == 1 else 'any'}]" for name, (arena, of) in expected)
    return " ".join(slots) or "nothing"


def check_repeat(plan: Plan, repeat: Repeat, shape: Shape) -> None:
    """Each repetition has whole groups of its own, between those of what comes before and after; and no wait leads back."""
    if not 0 < repeat.start < repeat.end < len(plan.ops) or repeat.times < 2:
        raise PlanError(f"{repeat}: must be ops of the plan, more than once, with others before and after them; {AGAIN}")
    of_first = [m for op in plan.ops[repeat.start : repeat.end] if (m := op.micro_batch) is not None]
    first = min(of_first, default=0)
    after = first + repeat.times * repeat.micro_batches
    if shape.sum_groups > 1:
        raise PlanError(f"{repeat}: no two of {shape.sum_groups} sum groups are added up alike; {AGAIN}")
    if first % shape.group or repeat.micro_batches % shape.group or not 0 < first < after < shape.n_micro_batches:
        raise PlanError(f"{repeat}: not whole groups of {shape.group} micro-batches, between the first and the last; {AGAIN}")
    parts = (range(first), range(first, first + repeat.micro_batches), range(after, shape.n_micro_batches))
    for i, op in enumerate(plan.ops):
        part = _part(repeat, i)
        if op.micro_batch is not None and op.micro_batch not in parts[part]:
            raise wrong(i, op, f"has a micro-batch of another part of the step: {repeat}")
        for wait in op.waits:
            if not (0 <= wait.op < len(plan.ops) and wait.distance in (0, 1) and wait.back in (0, 1)):
                raise wrong(i, op, f"wait {wait} names no op")
            other = _part(repeat, wait.op)
            if (not wait.distance and other > part) or (wait.back and (wait.distance or (part, other) != (1, 1))):
                raise wrong(i, op, f"wait {wait} leads to no op of this part of the step or an earlier one")


def _part(repeat: Repeat, i: int) -> int:
    """0 before what repeats, 1 in it, 2 after it."""
    return (i >= repeat.start) + (i >= repeat.end)
