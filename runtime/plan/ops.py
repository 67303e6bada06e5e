"""What is one instruction of a plan?

An op, on its lane, with the slots it reads and writes and the ops it waits for. What each kind reads and writes: `plan.py`. A plan
may name ops once that a step performs many times: its `Repeat`.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from runtime.errors import PlanError

from .workload import FILE

MAX_REPETITIONS = 10**6  # of a step; a billion tokens in micro-batches of a thousand


class Lane(StrEnum):
    """A queue that does one op at a time, in order."""

    __hash__ = str.__hash__  # a tenth of the time of an enumeration's own; so below

    GPU = "gpu"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"


class Kind(StrEnum):
    """What an op does; the module docstring says what each reads and writes."""

    __hash__ = str.__hash__

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    ACCUMULATE = "accumulate"
    NORM = "norm"
    UPDATE = "update"
    SPILL = "spill"
    FETCH = "fetch"
    SPECULATE = "speculate"
    SETTLE = "settle"
    RECOMPUTE = "recompute"
    SQUARE = "square"


LANE_OF = {
    Kind.LOAD: Lane.H2D,
    Kind.FORWARD: Lane.GPU,
    Kind.LOSS: Lane.GPU,
    Kind.BACKWARD: Lane.GPU,
    Kind.OFFLOAD: Lane.D2H,
    Kind.ACCUMULATE: Lane.CPU,
    Kind.NORM: Lane.CPU,
    Kind.UPDATE: Lane.CPU,
    Kind.SPILL: Lane.D2H,
    Kind.FETCH: Lane.H2D,
    Kind.SPECULATE: Lane.CPU,
    Kind.SETTLE: Lane.CPU,
    Kind.RECOMPUTE: Lane.GPU,
    Kind.SQUARE: Lane.GPU,
}


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A fixed region of memory: the index-th slot of an arena. Written `weights[2]`."""

    arena: str
    index: int

    def __str__(self) -> str:
        return f"{self.arena}[{self.index}]"

    @staticmethod
    def parse(text: str) -> "Slot":
        match = re.fullmatch(r"([a-z_]{1,40})\[([0-9]{1,9})\]", text)
        if match is None:
            raise PlanError(f"{text!r} is not a slot; write for example weights[2]")
        return Slot(match[1], int(match[2]))


@dataclass(frozen=True, slots=True)
class Wait:
    """Start only after op number `op` of the plan is done: of this step (distance 0) or of the one before (1).

    Between ops that repeat: in the same repetition (back 0) or in the one before (1).
    """

    op: int
    distance: int = 0
    back: int = 0

    def __str__(self) -> str:
        return f"{self.op}@{self.distance}" if self.distance else f"{self.op}~{self.back}" if self.back else str(self.op)

    @staticmethod
    def parse(text: str) -> "Wait":
        match = re.fullmatch(r"([0-9]{1,9})(?:@(1)|~(1))?", text)
        if match is None:
            raise PlanError(f"{text!r} is not a wait; write 12, or 12@1 for the step before, 12~1 for the repetition before")
        return Wait(int(match[1]), int(match[2] or 0), int(match[3] or 0))


_OP_LINE = re.compile(
    r"(?P<kind>[a-z]+) (?P<lane>[a-z0-9]+) b(?P<block>[0-9]{1,9})(?: c(?P<chunk>[0-9]{1,9}))?(?: m(?P<micro_batch>[0-9]{1,9}))?"
    r"(?: < (?P<reads>[^<>^]+?))?(?: > (?P<writes>[^<>^]+?))?(?: \^ (?P<waits>[0-9@~ ]+))?"
)


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. Its line, `forward gpu b2 m0 < weights[1] boundaries[4] > boundaries[8] ^ 3 17@1`, parses back."""

    kind: Kind
    lane: Lane
    block: int
    micro_batch: int | None = None
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()
    waits: tuple[Wait, ...] = ()
    chunk: int | None = None

    def __str__(self) -> str:
        parts = [self.name]
        for mark, items in (("<", self.reads), (">", self.writes), ("^", self.waits)):
            if items:
                parts += [mark, *map(str, items)]
        return " ".join(parts)

    @property
    def name(self) -> str:
        """The line without slots and waits: `forward gpu b2 m0`, or `load h2d b3 c1` for a chunk."""
        chunk = "" if self.chunk is None else f" c{self.chunk}"
        micro_batch = "" if self.micro_batch is None else f" m{self.micro_batch}"
        return f"{self.kind} {self.lane} b{self.block}{chunk}{micro_batch}"

    @staticmethod
    def parse(line: str) -> "Op":
        """The op written as `line`; PlanError when it is not one."""
        match = _OP_LINE.fullmatch(line)
        if match is None:
            raise PlanError(f"{line[:120]!r} is not an op; write for example: load h2d b3 < masters[3] > weights[1] ^ 12")
        try:
            kind, lane = Kind(match["kind"]), Lane(match["lane"])
        except ValueError:
            raise PlanError(f"{line[:120]!r}: unknown kind or lane; kinds are {', '.join(Kind)}") from None
        if LANE_OF[kind] is not lane:
            raise PlanError(f"{line[:120]!r}: {kind} runs on lane {LANE_OF[kind]}, not {lane}")
        return Op(
            kind,
            lane,
            int(match["block"]),
            None if match["micro_batch"] is None else int(match["micro_batch"]),
            tuple(map(Slot.parse, (match["reads"] or "").split())),
            tuple(map(Slot.parse, (match["writes"] or "").split())),
            tuple(map(Wait.parse, (match["waits"] or "").split())),
            None if match["chunk"] is None else int(match["chunk"]),
        )

    def slot(self, *arenas: str) -> Slot | None:
        """The first slot this op reads or writes in one of the named arenas."""
        for slot in (*self.reads, *self.writes):
            if slot.arena in arenas:
                return slot
        return None


def _op_from_line(value: object) -> object:
    if isinstance(value, Op):
        return value
    if isinstance(value, str):
        return Op.parse(value)
    raise PlanError("an op is one line of text")


OpLine = Annotated[Op, BeforeValidator(_op_from_line), PlainSerializer(str)]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Ops start..end-1 are performed `times` times in a step, each time with micro-batches that are so many further.

    Written `repeat 453-911 x1022 m+1`.
    """

    start: Annotated[int, Field(ge=1)]
    end: Annotated[int, Field(ge=2)]
    times: Annotated[int, Field(ge=2, le=MAX_REPETITIONS)]
    micro_batches: Annotated[int, Field(ge=1)]
    __pydantic_config__ = FILE

    def __str__(self) -> str:
        return f"repeat {self.start}-{self.end - 1} x{self.times} m+{self.micro_batches}"

    @staticmethod
    def parse(text: str) -> dict[str, int]:
        """The fields of what was written, as yet unproven."""
        match = re.fullmatch(r"repeat ([0-9]{1,9})-([0-9]{1,9}) x([0-9]{1,9}) m\+([0-9]{1,9})", text)
        if match is None:
            raise PlanError(f"{text[:80]!r} is not what repeats; write for example: repeat 453-911 x1022 m+1")
        return {"start": int(match[1]), "end": int(match[2]) + 1, "times": int(match[3]), "micro_batches": int(match[4])}

    def __contains__(self, i: int) -> bool:
        """Whether op number i of the plan repeats."""
        return self.start <= i < self.end

    @property
    def n_ops(self) -> int:
        """Ops of one repetition."""
        return self.end - self.start

    def op(self, op: Op, repetition: int) -> Op:
        """A repeated op as it is performed in this repetition, counted from 0; its waits stay those of the plan."""
        if op.micro_batch is None or not repetition:
            return op
        return replace(op, micro_batch=op.micro_batch + repetition * self.micro_batches)
