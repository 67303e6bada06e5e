"""Rules of a plan's ops: which there must be, how often, and in which arenas each has its operands.

`docs/plan-language.md` as a verifier reads it, given workload, semantics and policy. Only the checker uses it.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from runtime.errors import PlanError
from runtime.plan import Kind, Op, Plan, Repeat, Slot
from runtime.plan.ops import Often

from .operands import PLACES, expected, n_bytes
from .shape import AGAIN, ALIGN_BYTES, Shape, wrong


class _Rule(NamedTuple):
    """Which blocks have an op of a kind, and how often: `USE` is any number, if the block streams."""

    has: Callable[[Shape, int], bool]
    often: Often = Often.STEP

    def is_each(self, shape: Shape) -> bool:
        """Whether there is one for each micro-batch."""
        return self.often is Often.MICRO_BATCH or (self.often is Often.GRADIENT and not shape.reduced)


_RULES = {
    Kind.LOAD: _Rule(lambda s, b: True, Often.USE),
    Kind.GATHER: _Rule(lambda s, b: s.ranks > 1, Often.USE),
    Kind.DEQUANTISE: _Rule(lambda s, b: b in s.packed, Often.USE),
    Kind.FORWARD: _Rule(lambda s, b: b < s.head, Often.MICRO_BATCH),
    Kind.LOSS: _Rule(lambda s, b: b == s.head, Often.MICRO_BATCH),
    Kind.BACKWARD: _Rule(lambda s, b: s.first_trained <= b < s.head, Often.MICRO_BATCH),
    Kind.RECOMPUTE: _Rule(lambda s, b: s.is_recomputed(b), Often.MICRO_BATCH),
    Kind.OFFLOAD_ACTIVATION: _Rule(lambda s, b: b in s.spilled, Often.MICRO_BATCH),
    Kind.FETCH_ACTIVATION: _Rule(lambda s, b: b in s.spilled, Often.MICRO_BATCH),
    Kind.OFFLOAD_SAVED: _Rule(lambda s, b: b in s.saved_bytes, Often.MICRO_BATCH),
    Kind.FETCH_SAVED: _Rule(lambda s, b: b in s.saved_bytes, Often.MICRO_BATCH),
    Kind.EXCHANGE: _Rule(lambda s, b: s.ranks > 1 and b in s.trained),
    Kind.OFFLOAD_GRADIENT: _Rule(lambda s, b: b in s.trained and b not in s.on_device, Often.GRADIENT),
    Kind.ACCUMULATE: _Rule(lambda s, b: b in s.trained and b not in s.on_device and not s.reduced, Often.MICRO_BATCH),
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
    """Each op is one that the step must have, once (of streamed blocks what brings weights: any number), with its operands in the
    arenas meant for them and in slots that are large enough."""
    slot_bytes = {a.name: a.slot_bytes for a in plan.arenas}
    seen, fitting = set[tuple[Kind, int, int | None]](), set[tuple[str, Slot, Kind, int]]()
    for i, op in enumerate(plan.ops):
        rule, key = _RULES[op.kind], (op.kind, op.block, op.micro_batch)
        if not rule.has(shape, op.block) or (op.micro_batch is not None) != rule.is_each(shape):
            raise wrong(i, op, "a plan with this policy has no such op")
        if key in seen and (rule.often is not Often.USE or op.block in shape.resident):
            raise wrong(i, op, "done twice in a step")
        seen.add(key)
        _check_operands(i, op, shape)
        for name, slot in op.operands:  # of all micro-batches alike
            if (use := (name, slot, op.kind, op.block)) not in fitting:
                has_bytes, needed_bytes = slot_bytes[slot.arena][slot.index], n_bytes(name, shape, op)
                if has_bytes < needed_bytes:
                    raise wrong(i, op, f"{slot} has {has_bytes} bytes, but {needed_bytes} go into it")
                fitting.add(use)
    for (kind, rule), b in product(_RULES.items(), range(shape.n_blocks)):
        if rule.has(shape, b) and (rule.often is not Often.USE or b in shape.resident):
            micro_batches: Sequence[int | None] = range(shape.n_micro_batches) if rule.is_each(shape) else (None,)
            for m in micro_batches:  # lazily: a hostile plan may promise 2^50 of them
                if (kind, b, m) not in seen:
                    of = "" if m is None else f", micro-batch {m}"
                    raise PlanError(f"the step has no {kind} of block {b}{of}; {AGAIN}")


def _check_operands(i: int, op: Op, shape: Shape) -> None:
    wanted = expected(shape, op)
    if len(op.operands) != len(wanted) or not all(
        name == known and slot.arena == arena and slot.index in slots
        for (name, slot), (known, (arena, slots)) in zip(op.operands, wanted, strict=True)
    ):
        found = " ".join(f"{name}={slot}" for name, slot in op.operands[:6]) or "nothing"
        asked = " ".join(f"{name}={arena}[{of.start if len(of) == 1 else 'any'}]" for name, (arena, of) in wanted) or "nothing"
        raise wrong(i, op, f"must use {asked}, not {found}")
    if op.block and op.kind is Kind.FORWARD and op["x"] == op.get("y"):
        raise wrong(i, op, f"has {op['x']} for both its input and its output")


def check_arenas(plan: Plan) -> None:
    """Arenas are those of the language, each in its memory, and every slot starts at an aligned place; else PlanError."""
    for arena in plan.arenas:
        if arena.place is not (place := PLACES.get(arena.name)):
            is_known = f"must be in {place} memory" if place else "not one that a plan has"
            raise PlanError(f"arena {arena.name}: {is_known}; {AGAIN}")
        if odd := [n_bytes for n_bytes in arena.slot_bytes[:-1] if n_bytes % ALIGN_BYTES]:
            raise PlanError(f"arena {arena.name}: a slot of {odd[0]} bytes, no multiple of {ALIGN_BYTES}; {AGAIN}")


def check_repeat(plan: Plan, repeat: Repeat, shape: Shape) -> None:
    """Each repetition has whole groups of micro-batches of its own, between those of the ops before and after it."""
    of_first = [m for op in plan.ops[repeat.start : repeat.end] if (m := op.micro_batch) is not None]
    first = min(of_first, default=0)
    after = first + repeat.times * repeat.micro_batches
    if shape.sum_groups > 1:
        raise PlanError(f"{repeat}: no two of {shape.sum_groups} sum groups are added up alike; {AGAIN}")
    is_whole = first % shape.group == 0 and repeat.micro_batches % shape.group == 0
    if not is_whole or repeat.times < 2 or not 0 < first < after < shape.n_micro_batches:
        raise PlanError(f"{repeat}: not whole groups of {shape.group} micro-batches, between the first and the last; {AGAIN}")
    parts = (range(first), range(first, first + repeat.micro_batches), range(after, shape.n_micro_batches))
    for i, op in enumerate(plan.ops):
        if op.micro_batch is not None and op.micro_batch not in parts[(i >= repeat.start) + (i >= repeat.end)]:
            raise wrong(i, op, f"has a micro-batch of another part of the step: {repeat}")
