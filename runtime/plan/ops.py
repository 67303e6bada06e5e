"""What is one instruction of a plan?

An op, with the slots it reads and writes, by name, and the ops it waits for. CONTRACT says for each kind where it runs and what its
operands are. A plan may name ops once that a step performs many times: its `Repeat`.
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
    NET = "net"


class Kind(StrEnum):
    """What an op does; CONTRACT says where, and what it reads and writes."""

    __hash__ = str.__hash__

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OFFLOAD_GRADIENT = "offload_gradient"
    ACCUMULATE = "accumulate"
    NORM = "norm"
    UPDATE = "update"
    OFFLOAD_ACTIVATION = "offload_activation"
    FETCH_ACTIVATION = "fetch_activation"
    SPECULATE = "speculate"
    SETTLE = "settle"
    RECOMPUTE = "recompute"
    OFFLOAD_SAVED = "offload_saved"
    FETCH_SAVED = "fetch_saved"
    SQUARE = "square"
    OFFLOAD_SQUARES = "offload_squares"
    UPDATE_ON_DEVICE = "update_on_device"
    GATHER = "gather"
    EXCHANGE = "exchange"
    SHARE_NORM = "share_norm"
    DEQUANTISE = "dequantise"


@dataclass(frozen=True, slots=True)
class Signature:
    """The lane of a kind of op, and its operands by name. What it reads and writes it changes in place.

    Of some an op has none (`x?`) or any number (`squares*`): docs in `plan.py` say when.
    """

    lane: Lane
    reads: frozenset[str]
    writes: frozenset[str]
    names: tuple[str, ...]  # of all, in the order in which an op has them
    required: frozenset[str]
    repeated: frozenset[str]

    @staticmethod
    def of(lane: Lane, reads: str, writes: str) -> "Signature":
        every = [*reads.split(), *writes.split()]
        return Signature(
            lane,
            frozenset(name.rstrip("?*") for name in reads.split()),
            frozenset(name.rstrip("?*") for name in writes.split()),
            tuple(dict.fromkeys(name.rstrip("?*") for name in every)),
            frozenset(name for name in every if name[-1] not in "?*"),
            frozenset(name[:-1] for name in every if name[-1] == "*"),
        )


# What ranks do together (gather, exchange, share_norm) begins when the last of them has come to it.
# x is what a block computes from, y what it computes; backward finds the gradient of y in y's place and puts that of x in x's.
CONTRACT = {
    Kind.LOAD: Signature.of(Lane.H2D, "state tied?", "weights"),
    Kind.DEQUANTISE: Signature.of(Lane.GPU, "packed", "weights"),
    Kind.FORWARD: Signature.of(Lane.GPU, "weights trained? x?", "y? saved?"),
    Kind.RECOMPUTE: Signature.of(Lane.GPU, "weights trained? x", "y"),
    Kind.LOSS: Signature.of(Lane.GPU, "weights trained? x sum? into*", "x sum? into* gradient?"),
    Kind.BACKWARD: Signature.of(Lane.GPU, "weights? trained? y x? saved? sum? into*", "x? sum? into* gradient?"),
    Kind.SQUARE: Signature.of(Lane.GPU, "gradient", "squares"),
    Kind.OFFLOAD_ACTIVATION: Signature.of(Lane.D2H, "y", "spilled"),
    Kind.FETCH_ACTIVATION: Signature.of(Lane.H2D, "spilled", "y"),
    Kind.OFFLOAD_SAVED: Signature.of(Lane.D2H, "saved", "offloaded"),
    Kind.FETCH_SAVED: Signature.of(Lane.H2D, "offloaded", "saved"),
    Kind.OFFLOAD_GRADIENT: Signature.of(Lane.D2H, "gradient squares?", "arrived norm?"),
    Kind.OFFLOAD_SQUARES: Signature.of(Lane.D2H, "squares", "norm"),
    Kind.UPDATE_ON_DEVICE: Signature.of(Lane.GPU, "gradient norm state", "state"),
    Kind.ACCUMULATE: Signature.of(Lane.CPU, "staged arrived into*", "arrived into*"),
    Kind.NORM: Signature.of(Lane.CPU, "arrived? tied? squares* norm", "norm"),
    Kind.SPECULATE: Signature.of(Lane.CPU, "arrived tied? state", "shadow"),
    Kind.UPDATE: Signature.of(Lane.CPU, "arrived tied? norm? state", "state"),
    Kind.SETTLE: Signature.of(Lane.CPU, "arrived tied? norm state shadow", "state shadow"),
    Kind.GATHER: Signature.of(Lane.NET, "state tied? weights", "weights"),
    Kind.EXCHANGE: Signature.of(Lane.NET, "sum", "received gradient"),
    Kind.SHARE_NORM: Signature.of(Lane.CPU, "norm", "norm"),
}
LANE_OF = {kind: signature.lane for kind, signature in CONTRACT.items()}


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


Operand = tuple[str, Slot]
_OP_LINE = re.compile(
    r"(?P<kind>[a-z_]+) (?P<lane>[a-z0-9]+) b(?P<block>[0-9]{1,9})(?: m(?P<micro_batch>[0-9]{1,9}))?"
    r"(?P<operands>(?: [a-z_]{1,40}=[^\s^]{1,60})*)(?: \^ (?P<waits>[0-9@~ ]+))?"
)


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. Its line, `forward gpu b2 m0 weights=weights[1] x=activations[4] y=activations[8] ^ 3 17@1`, parses back."""

    kind: Kind
    block: int
    micro_batch: int | None = None
    operands: tuple[Operand, ...] = ()
    waits: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        parts = [self.name, *(f"{name}={slot}" for name, slot in self.operands)]
        return " ".join([*parts, "^", *map(str, self.waits)] if self.waits else parts)

    @property
    def name(self) -> str:
        """The line without slots and waits: `forward gpu b2 m0`."""
        micro_batch = "" if self.micro_batch is None else f" m{self.micro_batch}"
        return f"{self.kind} {self.lane} b{self.block}{micro_batch}"

    @property
    def lane(self) -> Lane:
        return LANE_OF[self.kind]

    @property
    def reads(self) -> tuple[Slot, ...]:
        names = CONTRACT[self.kind].reads
        return tuple([slot for name, slot in self.operands if name in names])

    @property
    def writes(self) -> tuple[Slot, ...]:
        names = CONTRACT[self.kind].writes
        return tuple([slot for name, slot in self.operands if name in names])

    def get(self, name: str) -> Slot | None:
        """The operand of that name, if the op has it; the first of several."""
        for known, slot in self.operands:
            if known == name:
                return slot
        return None

    def __getitem__(self, name: str) -> Slot:
        slot = self.get(name)
        if slot is None:
            raise PlanError(f"{self.name}: has no `{name}`; make the plan again with `penstock plan`")
        return slot

    def every(self, name: str) -> tuple[Slot, ...]:
        """All operands of that name."""
        return tuple([slot for known, slot in self.operands if known == name])

    @staticmethod
    def parse(line: str) -> "Op":
        """The op written as `line`; PlanError when it is not one."""
        match = _OP_LINE.fullmatch(line)
        if match is None:
            raise PlanError(f"{line[:120]!r} is not an op; write for example: load h2d b3 state=state[3] weights=weights[1] ^ 12")
        try:
            kind, lane = Kind(match["kind"]), Lane(match["lane"])
        except ValueError:
            raise PlanError(f"{line[:120]!r}: unknown kind or lane; kinds are {', '.join(Kind)}") from None
        if LANE_OF[kind] is not lane:
            raise PlanError(f"{line[:120]!r}: {kind} runs on lane {LANE_OF[kind]}, not {lane}")
        operands = [text.partition("=") for text in match["operands"].split()]
        _refuse_operands(kind, [name for name, _, _ in operands], line)
        return Op(
            kind,
            int(match["block"]),
            None if match["micro_batch"] is None else int(match["micro_batch"]),
            tuple((name, Slot.parse(slot)) for name, _, slot in operands),
            tuple(map(Wait.parse, (match["waits"] or "").split())),
        )


def _refuse_operands(kind: Kind, names: list[str], line: str) -> None:
    """The operands are those of the kind, in the contract's order."""
    contract = CONTRACT[kind]
    in_order = [known for known in contract.names for name in names if name == known]
    twice = {name for name in names if names.count(name) > 1}
    if names != in_order or not contract.required <= {*names} or not twice <= contract.repeated:
        raise PlanError(f"{line[:120]!r}: operands of {kind} are {', '.join(contract.names)}, in this order")


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
