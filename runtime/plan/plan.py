"""A plan: the ops of one steady-state training step, as JSON and as values (reference: docs/plan-language.md)."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.runtime.errors import PlanError
from penstock.runtime.files import read_whole, write_whole
from penstock.runtime.units import on_one_line

from .legality import refuse_sum_groups
from .ops import Op, OpLine, Repeat, Wait
from .optimizer import Optimizer
from .setup import Setup
from .workload import FILE, BlockKind

FORMAT_VERSION = 4
MAX_PLAN_FILE_BYTES = 128 * 2**20  # more than twice the longest plan made (500,000 ops); parsed, it takes 20 times that
MAX_BLOCKS = 10_002  # of the deepest supported model, with embedding and head
MAX_PARAMETERS = 4096  # per block; experts are stacked, so that a layer has about twenty

P = TypeVar("P", bound="Plan")


@dataclass(frozen=True, slots=True)  # with slots a default is no class attribute, which `_Written` would inherit
class Plan(Setup):
    """Ops of one steady-state step, and everything needed to perform them."""

    profile: dict[str, Any]
    ops: tuple[OpLine, ...]
    format_version: Literal[4] = 4
    repeat: Repeat | None = None  # None: every op is performed once a step
    __pydantic_config__ = FILE  # applies to nested fields, too

    def __str__(self) -> str:
        return json.dumps(_fields(self))

    @staticmethod
    def parse(text: str) -> "Plan":
        """Parse `str(plan)`; raise PlanError if it is malformed."""
        return _validated(_PLAN, text, "plan")

    def often(self, i: int) -> int:
        return self.repeat.times if self.repeat is not None and i in self.repeat else 1

    def number(self, i: int, repetition: int) -> int:
        """Return the number of op i in this repetition if all repetitions were written out."""
        if self.repeat is None or i < self.repeat.start:
            return i
        return i + (repetition if i in self.repeat else self.repeat.times - 1) * self.repeat.n_ops

    @property
    def n_performed(self) -> int:
        """Ops performed per step, counting repetitions."""
        return len(self.ops) + (0 if self.repeat is None else (self.repeat.times - 1) * self.repeat.n_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written(Plan):
    format_version: Literal[4]
    fingerprint: str  # of the model
    claim: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Contents of a plan file: the plan, and the planner's predictions."""

    plan: Plan
    claim: dict[str, Any] | None

    def write(self, path: Path) -> None:
        """Write the file atomically; raise PlanError if the folder is not writable."""
        fields = _fields(self.plan) | {"fingerprint": self.plan.model.fingerprint, "claim": self.claim}
        try:
            write_whole(path, f"{json.dumps(fields)}\n")
        except OSError as error:
            raise PlanError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None

    @staticmethod
    def read(path: Path) -> "PlanFile":
        """Read and validate a plan; raise a one-line PlanError if it is malformed."""
        try:
            text = read_whole(path, MAX_PLAN_FILE_BYTES)
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}); make one with `penstock plan MODEL -o FILE`") from None
        written = _validated(_WRITTEN, text, str(path))
        if written.model.fingerprint != written.fingerprint:
            raise PlanError(f"{path}: the model's fingerprint does not match its configuration; make it again with `penstock plan`")
        return PlanFile(Plan(**{field.name: getattr(written, field.name) for field in fields(Plan)}), written.claim)


_PLAN, _WRITTEN = TypeAdapter(Plan), TypeAdapter(_Written)


def _fields(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object, without `repeat` if it is None and without the default optimizer."""
    fields: dict[str, Any] = json.loads(_PLAN.dump_json(plan))
    if plan.semantics.optimizer is Optimizer.ADAMW:
        del fields["semantics"]["optimizer"]
    if plan.repeat is None:
        del fields["repeat"]
    return fields


def _validated(adapter: TypeAdapter[P], text: str | bytes, where: str) -> P:
    try:
        plan = adapter.validate_json(text)
        refuse_malformed(plan)
    except ValidationError as error:
        errors = error.errors()
        for entry in (entry for entry in errors if entry["loc"] == ("format_version",) and entry["type"] != "missing"):
            how = f"{str(entry['input'])[:20]}, and this Penstock reads {FORMAT_VERSION}; plan again with `penstock plan`"
            raise PlanError(f"{where}: a plan of format {how}") from None
        place = on_one_line(".".join(map(str, errors[0]["loc"])), 120) or "the file"
        problem = errors[0]["msg"].removeprefix("Value error, ")[:160]
        raise PlanError(f"{where}: {place}: {problem}; make it again with `penstock plan`") from None
    except PlanError as error:
        raise PlanError(f"{where}: {error}; make it again with `penstock plan`") from None
    return plan


def refuse_malformed(plan: Plan) -> None:
    """Raise a one-line PlanError unless the plan is well-formed: blocks in order, unique arena names; every block, micro-batch,
    slot and op that an op refers to exists; repeated ops are in the plan, and no op waits for a later part of its step."""
    blocks, n_micro_batches, repeat = plan.workload.blocks, plan.semantics.n_micro_batches, plan.repeat
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    if len(sizes) != len(plan.arenas):
        raise PlanError("two arenas have the same name")
    if len(blocks) > MAX_BLOCKS or any(len(b.parameters) > MAX_PARAMETERS for b in blocks):
        raise PlanError(f"more than {MAX_BLOCKS} blocks, or than {MAX_PARAMETERS} weights in one of them")
    if len(blocks) < 3 or plan.semantics.batch_size < plan.semantics.micro_batch:
        raise PlanError("fewer than three blocks, or a batch that is smaller than its micro-batch")
    refuse_sum_groups(plan.semantics)
    if len(plan.workload.smaller) != (len(blocks) if plan.semantics.n_left else 0):
        raise PlanError("blocks of a smaller micro-batch are needed if and only if the last one is smaller")
    if [b.kind for b in blocks] != [BlockKind.EMBEDDING, *[BlockKind.LAYER] * (len(blocks) - 2), BlockKind.HEAD]:
        raise PlanError("blocks are not embedding, layers, head in this order")
    if repeat is not None and not 0 < repeat.start < repeat.end < len(plan.ops):
        raise PlanError(f"{repeat}: not ops of the plan with others before and after them")
    ends = () if repeat is None else (repeat.start, repeat.end)
    for i, op in enumerate(plan.ops):
        repeats = repeat is not None and i in repeat
        if not (0 <= op.block < len(blocks) and 0 <= (op.micro_batch or 0) < n_micro_batches):
            raise PlanError(f"op {i} ({op.name}): no such block or micro-batch")
        if repeats and (repeat.op(op, repeat.times - 1).micro_batch or 0) >= n_micro_batches:  # type: ignore[union-attr]
            raise PlanError(f"op {i} ({op.name}): {repeat}: no such micro-batch in its last repetition")
        for _, slot in op.operands:
            if not 0 <= slot.index < sizes.get(slot.arena, 0):
                raise PlanError(f"op {i} ({op.name}): slot {slot} does not exist")
        for wait in op.waits:
            is_one = 0 <= wait.op < len(plan.ops) and 0 <= wait.distance <= 1 and 0 <= wait.back <= 1
            if not is_one or plan.ops[wait.op].lane is op.lane:
                raise PlanError(f"op {i} ({op.name}): wait {wait} names no op of another lane")
            is_later = not wait.distance and any(i < end <= wait.op for end in ends)
            is_astray = wait.back and (wait.distance or not repeats or wait.op not in repeat)  # type: ignore[operator]
            if is_later or is_astray:
                raise PlanError(f"op {i} ({op.name}): wait {wait} names no op of this part of the step or an earlier one")


def unrolled(plan: Plan) -> Plan:
    """Return the plan with repeated ops written out, for inspection; executor, simulator and checker use `repeat`."""
    repeat = plan.repeat
    if repeat is None:
        return plan
    performed: list[tuple[int, int | None]] = [(i, None) for i in range(len(plan.ops))]
    performed[repeat.start : repeat.end] = [(i, k) for k in range(repeat.times) for i in range(repeat.start, repeat.end)]
    return replace(plan, ops=tuple([_written_out(plan.ops[i], repeat, k) for i, k in performed]), repeat=None)


def _written_out(op: Op, repeat: Repeat, repetition: int | None) -> Op:
    """Return the op of this repetition (None: it does not repeat), with waits renumbered for the unrolled plan."""
    waits = []
    for wait in op.waits:
        number, distance, last = wait.op, wait.distance, (repeat.times - 1) * repeat.n_ops
        if wait.op >= repeat.end or (wait.op in repeat and (repetition is None or distance)):
            number += last
        elif wait.op in repeat and repetition is not None:
            source = repetition - wait.back
            number, distance = (number + source * repeat.n_ops, 0) if source >= 0 else (number + last, 1)
        waits.append(Wait(number, distance))
    return replace(repeat.op(op, repetition or 0), waits=tuple(dict.fromkeys(waits)))
