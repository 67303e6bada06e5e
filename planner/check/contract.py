"""What must the arenas and ops of a plan look like?

The contract of `runtime/plan/plan.py` as a verifier reads it: given the workload, the semantics and the policy, which arenas
there must be and how large, and which slots each op reads and writes. Only the checker uses it, never what makes plans.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import assert_never

from runtime.errors import PlanError
from runtime.plan import Arena, Kind, Op, Place, Plan, Repeat, Slot
from runtime.plan.workload import ALIGN_ELEMENTS, ITEM_BYTES

from .shape import AGAIN, Shape, wrong

ALIGN_BYTES = ALIGN_ELEMENTS * ITEM_BYTES["bf16"]  # where a slot may start: results depend on alignment
FP32, NORM_BYTES = ITEM_BYTES["fp32"], 8  # the norm keeps one fp64 sum of squares for each weight


@dataclass(frozen=True, slots=True)
class _Need:
    """What an arena must be: where, how many slots (None: at least `least`), and the bytes of slot i."""

    place: Place
    n_slots: int | None
    slot_bytes: Callable[[int], int]
    exact: bool = False
    least: int = 1


def _needs(plan: Plan, shape: Shape, sizes: dict[str, int]) -> dict[str, _Need]:
    """The arenas that the semantics and the policy call for; `sizes` holds the number of slots that each arena has."""
    blocks, semantics, group = plan.workload.blocks, plan.semantics, shape.group
    elements = [b.slot_elements for b in blocks]  # with tied weights
    layer, vocab = max(elements[1:-1]), max(elements[0], elements[-1])
    parts = [(b, shape.chunks[b][c].n_elements) for b, c in shape.parts]  # of each slot on the host, with tied weights
    owned = [blocks[b].host_elements if shape.vocab(b) else n for b, n in parts]
    largest_chunk = max(n for b, n in parts if not shape.vocab(b))
    compute, master = ITEM_BYTES[semantics.compute_dtype], ITEM_BYTES[semantics.master_dtype]
    final = ITEM_BYTES[semantics.gradient_dtype]
    wire = final if shape.reduced else compute  # of a layer's gradient on the link
    vocab_wire = FP32 if shape.vocab_slot_is_sum else final
    kept = final if shape.reduced else FP32  # of a layer's gradient on the host

    def device(n_slots: int, n_bytes: int) -> _Need:
        return _Need(Place.DEVICE, n_slots, lambda _: n_bytes)

    def host(n_bytes: Callable[[int], int]) -> _Need:
        return _Need(Place.HOST, len(parts), n_bytes, exact=True)

    def ring_bytes(i: int) -> int:
        last = sizes.get("host_gradients", 0) - 1
        return elements[0] * vocab_wire if i == 0 else elements[-1] * vocab_wire if i == last else largest_chunk * kept

    standing = [blocks[b].boundary_bytes for b in shape.standing]
    spilled = [blocks[b].boundary_bytes for b in shape.spilled]
    resident = [elements[b] * compute for b in shape.resident]
    shared = [0] * len(set(shape.shared.values()))  # what no block has for itself
    for b, i in shape.shared.items():
        shared[i] = max(shared[i], blocks[b].boundary_bytes)
    n_ring = 2 * group + 1 if spilled else 0

    needs = {
        "weights": device(plan.policy.prefetch_depth + 1, layer * compute),
        "vocab_weights": device(1, vocab * compute),
        "boundaries": _Need(
            Place.DEVICE,
            len(standing + shared) * group + n_ring,
            lambda i: (standing + shared + [max(spilled, default=0)])[min(i // group, len(standing + shared))],
        ),
        "gradients": device(plan.policy.gradient_slots, layer * wire),
        "vocab_gradients": device(1, vocab * vocab_wire),
        "moments": host(lambda i: owned[i] * 2 * FP32),
        "host_gradients": host(lambda i: parts[i][1] * (vocab_wire if shape.vocab(parts[i][0]) else kept)),
        "norm": _Need(Place.HOST, 1, lambda _: NORM_BYTES * sum(len(b.parameters) for b in blocks)),
    }
    if shape.squared:
        squares = [NORM_BYTES * len(blocks[b].parameters) for b in shape.squared]
        for name, place in (("squares", Place.DEVICE), ("host_squares", Place.HOST)):
            needs[name] = _Need(place, len(squares), lambda i: squares[i])
    if "masters" in shape.state:
        needs["masters"] = host(lambda i: owned[i] * master)
    else:
        needs["remainders"] = host(lambda i: owned[i] * (master - compute))
    if resident:
        needs["resident_weights"] = _Need(Place.DEVICE, len(resident), lambda i: resident[i], exact=True)
    if spilled:
        needs["spilled"] = _Need(Place.HOST, len(spilled) * group, lambda i: spilled[i // group])
    if shape.ring:
        needs["host_gradients"] = _Need(Place.HOST, None, ring_bytes, least=3)
    if shape.upload == "host_weights":
        needs["host_weights"] = host(lambda i: owned[i] * compute)
    if shape.shadows:
        # One slot holds what all of the state takes, and the weights that are uploaded where they are not the masters.
        state_bytes = (0 if shape.upload == "masters" else compute) + 2 * FP32
        state_bytes += master if "masters" in shape.state else master - compute
        of_shadows = [n for (b, _), n in zip(parts, owned, strict=True) if b in shape.shadows]
        needs["shadows"] = _Need(Place.HOST, len(of_shadows), lambda i: of_shadows[i] * state_bytes, exact=True)
    if shape.reduced and shape.n_micro_batches > 1:
        needs["sums"] = device(1, layer * FP32)
    if not shape.vocab_slot_is_sum:
        needs["vocab_sums"] = device(1, vocab * FP32)
    if not shape.reduced:
        last = sizes.get("staging", 0) - 1
        needs["staging"] = _Need(Place.HOST, None, lambda i: vocab * FP32 if i == last else layer * wire, least=2)
    return needs


def check_arenas(plan: Plan, shape: Shape) -> None:
    """Exactly the arenas that are called for, each large enough; else PlanError."""
    arenas: dict[str, Arena] = {a.name: a for a in plan.arenas}
    needs = _needs(plan, shape, {name: len(a.slot_bytes) for name, a in arenas.items()})
    if odd := sorted(arenas.keys() ^ needs.keys()):
        raise PlanError(f"arena {odd[0]}: {'missing' if odd[0] in needs else 'not one this plan has a use for'}; {AGAIN}")
    for name, need in needs.items():
        arena, n_slots = arenas[name], len(arenas[name].slot_bytes)
        if arena.place is not need.place:
            raise PlanError(f"arena {name}: lies in {arena.place} memory, not {need.place}; {AGAIN}")
        if need.n_slots is not None and n_slots != need.n_slots:
            raise PlanError(f"arena {name}: {n_slots} slots, where policy and model ask for {need.n_slots}; {AGAIN}")
        if n_slots < need.least:
            raise PlanError(f"arena {name}: {n_slots} slots, fewer than {need.least}; {AGAIN}")
        start = 0
        for i, n_bytes in enumerate(arena.slot_bytes):
            needed = need.slot_bytes(i)
            if start % ALIGN_BYTES:
                raise PlanError(f"arena {name}: slot {i} starts at byte {start}, no multiple of {ALIGN_BYTES}; {AGAIN}")
            start += n_bytes
            if n_bytes < needed or (need.exact and n_bytes != needed):
                raise PlanError(f"arena {name}: slot {i} has {n_bytes} bytes, but {needed} go into it; {AGAIN}")


_Slots = list[tuple[str, int | None]]  # arena and index; None: any slot that no block has for itself


def _expected_slots(shape: Shape, op: Op) -> tuple[_Slots, _Slots]:
    """What the contract has this op read and write, in order."""
    b, m = op.block, op.micro_batch or 0
    part = shape.first_part[b] + (op.chunk or 0)
    vocab = shape.vocab(b)
    weights: _Slots = [shape.weights(b)]
    gradient: _Slots = [("vocab_gradients", 0) if vocab else ("gradients", None)]
    host_gradient: _Slots = [("host_gradients", -1 if b == shape.head else None if shape.ring and b else part)]
    below: _Slots = [shape.boundary(b - 1, m)] if b else []
    above: _Slots = [shape.boundary(b, m)] if b < shape.head else []
    both: _Slots = host_gradient + ([("host_gradients", -1)] if b == 0 and shape.tied else [])
    own: _Slots = [(shape.upload, part)]
    state: _Slots = [(arena, part) for arena in shape.state]
    copy = own if shape.upload not in shape.state else []
    shadow: _Slots = [("shadows", shape.shadows[b] + (op.chunk or 0))] if b in shape.shadows else []
    squares: _Slots = [("squares", shape.squared[b])] if b in shape.squared else []
    sums: _Slots = [("host_squares", shape.squared[b])] if b in shape.squared else []
    match op.kind:
        case Kind.LOAD:
            return own + ([(shape.upload, 0)] if b == shape.head and shape.tied else []), weights
        case Kind.FORWARD:
            return weights + below, above
        case Kind.LOSS:
            running, gradients = _expected_sums(shape, op, gradient)
            return weights + below + running, below + gradients
        case Kind.BACKWARD:
            running, gradients = _expected_sums(shape, op, gradient)
            return (weights if b else []) + above + below + running, below + gradients
        case Kind.SQUARE:
            return gradient, squares
        case Kind.OFFLOAD if not shape.reduced:
            return gradient, [("staging", -1 if vocab else None)]
        case Kind.OFFLOAD:  # the sums go with the first chunk
            return (gradient, host_gradient) if op.chunk else (gradient + squares, host_gradient + sums)
        case Kind.ACCUMULATE:
            return [("staging", -1 if vocab else None), *host_gradient], host_gradient
        case Kind.NORM:
            every: _Slots = [("host_squares", i) for i in shape.squared.values()] if b == 0 else []
            return [*([] if squares else both), *every, ("norm", 0)], [("norm", 0)]
        case Kind.UPDATE:
            return both + (sums if shape.eager else [("norm", 0)]) + state, state + copy
        case Kind.SPECULATE:
            return both + state, shadow
        case Kind.SETTLE:
            return [*both, ("norm", 0), *state, *shadow], state + copy + shadow
        case Kind.RECOMPUTE:
            return weights + below, above
        case Kind.SPILL:
            return above, [("spilled", shape.spilled[b] * shape.group + m % shape.group)]
        case Kind.FETCH:
            return [("spilled", shape.spilled[b] * shape.group + m % shape.group)], above
        case _:
            assert_never(op.kind)


def _expected_sums(shape: Shape, op: Op, gradient: _Slots) -> tuple[_Slots, _Slots]:
    """How the gradient of one micro-batch joins the sum: what is read, and what is written."""
    first, last = op.micro_batch == 0, op.micro_batch == shape.n_micro_batches - 1
    vocab = shape.vocab(op.block)
    # With one micro-batch there is nothing to sum, but in the head: its gradient is a sum over tiles of tokens.
    if not shape.reduced or (first and last and op.block != shape.head):
        return [], gradient
    if vocab and shape.tied:
        return [] if first else gradient, gradient
    sums: _Slots = [("vocab_sums" if vocab else "sums", 0)]
    return [] if first else sums, sums + (gradient if last else [])


_Key = tuple[Kind, int, int, int | None]  # kind, block, chunk, micro-batch: no two ops of a step are alike in all of them
_IN_CHUNKS = (Kind.LOAD, Kind.OFFLOAD, Kind.NORM, Kind.UPDATE, Kind.SPECULATE, Kind.SETTLE)


def _expected_ops(shape: Shape) -> Iterator[_Key]:
    """Every op a step must have exactly once, most loads aside. Lazy: a hostile plan may promise 2^50 micro-batches."""
    for b in range(shape.n_blocks):
        for c in range(len(shape.chunks[b])):
            if shape.has_norm(b):
                yield Kind.NORM, b, c, None
            for kind in (Kind.SPECULATE, Kind.SETTLE) if b in shape.shadows else (Kind.UPDATE,):
                yield kind, b, c, None
            if b in shape.resident:
                yield Kind.LOAD, b, c, None
            if shape.reduced:
                yield Kind.OFFLOAD, b, c, None
        if b in shape.squared:
            yield Kind.SQUARE, b, 0, None
        for m in range(shape.n_micro_batches):
            if b == shape.head:
                yield Kind.LOSS, b, 0, m
            else:
                yield Kind.FORWARD, b, 0, m
                yield Kind.BACKWARD, b, 0, m
            if b in shape.shared:
                yield Kind.RECOMPUTE, b, 0, m
            if b in shape.spilled:
                yield Kind.SPILL, b, 0, m
                yield Kind.FETCH, b, 0, m
            if not shape.reduced:
                yield Kind.OFFLOAD, b, 0, m
                yield Kind.ACCUMULATE, b, 0, m


def check_ops(plan: Plan, shape: Shape) -> None:
    """Each op is one that the step must have, once (loads of streamed blocks: any number), and uses the slots of the contract."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    seen: set[_Key] = set()
    next_chunk: dict[tuple[Kind, int, int | None], int] = {}
    for i, op in enumerate(plan.ops):
        _check_kind(i, op, shape)
        _check_chunk(i, op, shape, next_chunk)
        key = op.kind, op.block, op.chunk or 0, op.micro_batch
        if key in seen and (op.kind is not Kind.LOAD or op.block in shape.resident):
            raise wrong(i, op, "done twice in a step")
        seen.add(key)
        reads, writes = _expected_slots(shape, op)
        for what, slots, expected in (("read", op.reads, reads), ("write", op.writes, writes)):
            if len(slots) != len(expected) or not all(
                _fits(slot, one, sizes, shape) for slot, one in zip(slots, expected, strict=True)
            ):
                raise wrong(
                    i,
                    op,
                    f"must {what} {_slots_text(expected, sizes)}, not {' '.join(map(str, slots[:6])) or 'nothing'}",
                )
        _check_ring_slots(i, op, shape)
    for key in _expected_ops(shape):
        if key not in seen:
            raise PlanError(f"the step has no {_key_text(key, shape)}; {AGAIN}")
    for (kind, block, m), c in next_chunk.items():
        if c < len(shape.chunks[block]):  # of a load that is not the first of its block
            raise PlanError(f"the step has no {_key_text((kind, block, c, m), shape)} after the others of its block; {AGAIN}")


def _check_kind(i: int, op: Op, shape: Shape) -> None:
    """Under its policy the plan has an op like this one."""
    b, kind = op.block, op.kind
    if (kind is Kind.LOSS) != (b == shape.head) and kind in (Kind.FORWARD, Kind.BACKWARD, Kind.LOSS):
        raise wrong(i, op, "the head has a loss op, the other blocks forward and backward")
    if kind in (Kind.SPILL, Kind.FETCH) and b not in shape.spilled:
        raise wrong(i, op, "under this policy the output of the block does not spill")
    if kind is Kind.RECOMPUTE and b not in shape.shared:
        raise wrong(i, op, "under this policy the output of the block stays, or is recomputed by its backward")
    if kind in (Kind.SPECULATE, Kind.SETTLE) and b not in shape.shadows:
        raise wrong(i, op, "under this policy the block has no shadow")
    if kind is Kind.UPDATE and b in shape.shadows:
        raise wrong(i, op, "under this policy the block is updated by speculate and settle")
    if kind is Kind.SQUARE and b not in shape.squared:
        raise wrong(i, op, "under this policy the squares of the block's gradient are summed on the host")
    if kind is Kind.NORM and not shape.has_norm(b):
        raise wrong(i, op, "under this policy the squares of the block's gradient are summed on the device")
    has_micro_batch = kind not in (*_IN_CHUNKS, Kind.SQUARE) or (kind is Kind.OFFLOAD and not shape.reduced)
    if (op.micro_batch is not None) != has_micro_batch or (kind is Kind.ACCUMULATE and shape.reduced):
        raise wrong(i, op, f"no such op in a plan with groups of {shape.group} micro-batches")


def _check_chunk(i: int, op: Op, shape: Shape, next_chunk: dict[tuple[Kind, int, int | None], int]) -> None:
    """The chunks of a block come in ascending order; `next_chunk` knows which is due."""
    n_chunks = len(shape.chunks[op.block]) if op.kind in _IN_CHUNKS else 1
    if (op.chunk is None) != (n_chunks == 1):
        raise wrong(i, op, f"must name a chunk: the block has {n_chunks}" if n_chunks > 1 else "names a chunk of what is not cut")
    if op.chunk is not None:
        key = op.kind, op.block, op.micro_batch
        due = next_chunk.get(key, 0) % n_chunks  # a load may begin again; whether another op may, `seen` knows
        if op.chunk != due:
            raise wrong(i, op, f"chunks come in ascending order, and chunk {due} of {n_chunks} is next")
        next_chunk[key] = due + 1


def _key_text(key: _Key, shape: Shape) -> str:
    kind, block, chunk, micro_batch = key
    c = f", chunk {chunk}" if kind in _IN_CHUNKS and len(shape.chunks[block]) > 1 else ""
    m = "" if micro_batch is None else f", micro-batch {micro_batch}"
    return f"{kind} of block {block}{c}{m}"


def _check_ring_slots(i: int, op: Op, shape: Shape) -> None:
    """What the contract says of two slots of one op: a gradient replaces its input, an output does not."""
    if op.block and op.kind is Kind.BACKWARD and op.writes[0] != op.reads[2]:
        raise wrong(i, op, f"must leave the gradient of its input in {op.reads[2]}, where the input was, not in {op.writes[0]}")
    if op.block and op.kind is Kind.FORWARD and op.reads[1] in op.writes:
        raise wrong(i, op, f"has {op.reads[1]} for both its input and its output")


def _fits(slot: Slot, expected: tuple[str, int | None], sizes: dict[str, int], shape: Shape) -> bool:
    """Whether a slot is the expected one, or one that its arena gives to layers where any of them will do."""
    arena, index = expected
    if slot.arena != arena:
        return False
    if index is not None:
        return slot.index == index % sizes[arena]
    first = {"host_gradients": 1, "boundaries": shape.first_ring_slot}.get(arena, 0)
    last = sizes[arena] - (1 if arena in ("host_gradients", "staging") else 0)
    return first <= slot.index < last


def _slots_text(expected: _Slots, sizes: dict[str, int]) -> str:
    return " ".join(f"{a}[{'any' if i is None else i % sizes[a]}]" for a, i in expected) or "nothing"


def check_repeat(plan: Plan, repeat: Repeat, shape: Shape) -> None:
    """Each repetition has whole groups of its own, between those of what comes before and after; and no wait leads back."""
    if not 0 < repeat.start < repeat.end < len(plan.ops) or repeat.times < 2:
        raise PlanError(f"{repeat}: must be ops of the plan, more than once, with others before and after them; {AGAIN}")
    of_first = [m for op in plan.ops[repeat.start : repeat.end] if (m := op.micro_batch) is not None]
    first = min(of_first, default=0)
    after = first + repeat.times * repeat.micro_batches
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
