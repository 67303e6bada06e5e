"""Ops, the instructions of a plan, and the table of their kinds.

Lowering, costs, bounds and counts read the table, `OPS`; the checker has an independent one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, PlainSerializer

from penstock.runtime.errors import PlanError

from .policy import Policy, Semantics
from .workload import BlockKind, Workload

MAX_REPETITIONS = 10**6  # per step: a billion tokens in micro-batches of a thousand


class Lane(StrEnum):
    """Queue that performs ops in order, one at a time: a stream or a thread."""

    __hash__ = str.__hash__  # ten times faster than Enum.__hash__; also below

    GPU = "gpu"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    NET = "net"
    DISK = "disk"


class Kind(StrEnum):
    """Operation of an op, see `OPS`."""

    __hash__ = str.__hash__

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OFFLOAD_GRADIENT = "offload_gradient"
    ACCUMULATE = "accumulate"
    NORM = "norm"
    CLIP = "clip"
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
    DEQUANTISE = "dequantise"
    READ = "read"


class Often(StrEnum):
    """Ops of a kind per step, for a block that has any."""

    USE = "one whenever its weights are needed and are in no slot"
    MICRO_BATCH = "one for each micro-batch"
    GRADIENT = "one, where the device sums micro-batches, else one for each micro-batch"
    STEP = "one"


class Phase(StrEnum):
    """Part of a step (docs/bounds.md, "Phases")."""

    READING = "reads from a disk"
    LOADING = "loads"
    UNPACKING = "dequantisation, before forward and before backward"
    UP = "forward"
    LEAVING = "activation offload during forward"
    LOSS = "loss"
    COMING = "prefetch of offloaded activations during backward"
    DOWN = "backward"
    GRADIENTS = "gradients on their way to the host"
    NORM = "the global gradient norm"
    UPDATE = "the host optimizer, once the norm is known"
    EARLY_UPDATE = "the host optimizer, before the norm is known"
    DEVICE_UPDATE = "the device's optimizer"


class Subject(Protocol):
    """Properties of a plan that the table reads. `Setup` implements it."""

    @property
    def semantics(self) -> Semantics: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def workload(self) -> Workload: ...
    @property
    def reduced(self) -> bool: ...
    def unpacks(self, block: int) -> bool: ...
    def squares(self, block: int) -> bool: ...
    def sums_on_device(self, block: int) -> bool: ...
    def computes_in_place(self, block: int) -> bool: ...


Where = Callable[[Subject, int], bool]


@dataclass
class Row:
    """A kind of op. Operands that are both read and written are changed in place. An op has at most one optional operand `x?`, and
    any number of a repeated one, `into*`; docs/plan-language.md defines when."""

    lane: Lane
    operands: str  # names read, `>`, names written
    often: Often
    where: Where  # True for blocks with this op
    phase: Phase

    def __post_init__(self) -> None:
        reads, writes = (side.split() for side in self.operands.split(">"))
        every = [*reads, *writes]
        self.reads = frozenset(name.rstrip("?*") for name in reads)
        self.writes = frozenset(name.rstrip("?*") for name in writes)
        self.names = tuple(dict.fromkeys(name.rstrip("?*") for name in every))  # in the order of an op's operands
        self.required = frozenset(name for name in every if name[-1] not in "?*")
        self.repeated = frozenset(name[:-1] for name in every if name[-1] == "*")


def _is_head(s: Subject, b: int) -> bool:
    return s.workload.blocks[b].kind is BlockKind.HEAD


def _has_backward(s: Subject, b: int) -> bool:
    return not _is_head(s, b) and b >= s.workload.first_trained


def _is_recomputed(s: Subject, b: int) -> bool:
    """True if the layer's output shares a slot and backward reaches the last layer of its run."""
    stride, top = s.policy.boundary_stride, s.workload.n_layers
    is_inside = s.workload.blocks[b].kind is BlockKind.LAYER and b % stride > 0 and b != top
    return is_inside and min(b - b % stride + stride, top) >= s.workload.first_trained


def _is_trained(s: Subject, b: int) -> bool:
    return bool(s.workload.blocks[b].trained)


def _on_host(s: Subject, b: int) -> bool:
    return _is_trained(s, b) and b not in s.policy.device_blocks


def _listed(blocks: str) -> Where:
    return lambda s, b: b in getattr(s.policy, blocks)


def _is_summed(s: Subject, b: int) -> bool:
    return _on_host(s, b) and not s.sums_on_device(b)


def _is_updated(s: Subject, b: int) -> bool:
    return _on_host(s, b) and b not in s.policy.speculate_blocks


def _is_exchanged(s: Subject, b: int) -> bool:
    """True if ranks shard the block; frozen blocks are whole on each rank."""
    return s.semantics.ranks > 1 and _is_trained(s, b)


# Gather, exchange and, with several ranks, clip are collectives: they start when every rank has reached them.
# x: input of a block; y: its output; in backward their gradients replace them.
OPS = {
    Kind.READ: Row(Lane.DISK, "> frozen", Often.USE, _listed("disk_blocks"), Phase.READING),
    Kind.LOAD: Row(Lane.H2D, "state frozen? tied? > weights", Often.USE, lambda s, b: not s.computes_in_place(b), Phase.LOADING),
    Kind.GATHER: Row(Lane.NET, "state tied? weights > weights", Often.USE, _is_exchanged, Phase.LOADING),
    Kind.DEQUANTISE: Row(Lane.GPU, "packed > weights", Often.USE, lambda s, b: s.unpacks(b), Phase.UNPACKING),
    Kind.FORWARD: Row(Lane.GPU, "weights trained? x? > y? saved?", Often.MICRO_BATCH, lambda s, b: not _is_head(s, b), Phase.UP),
    Kind.OFFLOAD_ACTIVATION: Row(Lane.D2H, "y > spilled", Often.MICRO_BATCH, _listed("spill_blocks"), Phase.LEAVING),
    Kind.OFFLOAD_SAVED: Row(Lane.D2H, "saved > offloaded", Often.MICRO_BATCH, _listed("offload_blocks"), Phase.LEAVING),
    Kind.LOSS: Row(Lane.GPU, "weights trained? x sum? into* > x sum? into* gradient?", Often.MICRO_BATCH, _is_head, Phase.LOSS),
    Kind.FETCH_ACTIVATION: Row(Lane.H2D, "spilled > y", Often.MICRO_BATCH, _listed("spill_blocks"), Phase.COMING),
    Kind.FETCH_SAVED: Row(Lane.H2D, "offloaded > saved", Often.MICRO_BATCH, _listed("offload_blocks"), Phase.COMING),
    Kind.RECOMPUTE: Row(Lane.GPU, "weights trained? x > y", Often.MICRO_BATCH, _is_recomputed, Phase.DOWN),
    Kind.BACKWARD: Row(
        Lane.GPU,
        "weights? trained? y x? saved? sum? into* tied? > x? sum? into* gradient?",
        Often.MICRO_BATCH,
        _has_backward,
        Phase.DOWN,
    ),
    Kind.EXCHANGE: Row(Lane.NET, "sum > received gradient", Often.STEP, _is_exchanged, Phase.GRADIENTS),
    Kind.SQUARE: Row(Lane.GPU, "gradient > squares", Often.STEP, lambda s, b: s.squares(b), Phase.DOWN),
    Kind.OFFLOAD_GRADIENT: Row(Lane.D2H, "gradient squares? > arrived norm?", Often.GRADIENT, _on_host, Phase.GRADIENTS),
    Kind.OFFLOAD_SQUARES: Row(Lane.D2H, "squares > norm", Often.STEP, _listed("device_blocks"), Phase.NORM),
    Kind.ACCUMULATE: Row(Lane.CPU, "staged arrived into* > arrived into*", Often.MICRO_BATCH, _is_summed, Phase.GRADIENTS),
    Kind.NORM: Row(Lane.CPU, "arrived tied? > norm", Often.STEP, lambda s, b: _is_trained(s, b) and not s.squares(b), Phase.NORM),
    Kind.CLIP: Row(Lane.CPU, "norm* > clip", Often.STEP, lambda s, b: b == 0, Phase.NORM),
    Kind.SPECULATE: Row(Lane.CPU, "arrived tied? state > shadow", Often.STEP, _listed("speculate_blocks"), Phase.EARLY_UPDATE),
    Kind.SETTLE: Row(
        Lane.CPU, "arrived tied? clip state shadow > state shadow", Often.STEP, _listed("speculate_blocks"), Phase.UPDATE
    ),
    Kind.UPDATE: Row(Lane.CPU, "arrived tied? norm? clip? state > state", Often.STEP, _is_updated, Phase.UPDATE),
    Kind.UPDATE_ON_DEVICE: Row(Lane.GPU, "gradient clip state > state", Often.STEP, _listed("device_blocks"), Phase.DEVICE_UPDATE),
}
LANE_OF = {kind: row.lane for kind, row in OPS.items()}


class Slot(NamedTuple):
    """Buffer number `index` of an arena. Written `weights[2]`."""

    arena: str
    index: int  # type: ignore[assignment]  # in the place of a tuple's method

    def __str__(self) -> str:
        return f"{self.arena}[{self.index}]"

    @staticmethod
    def parse(text: str) -> "Slot":
        match = re.fullmatch(r"([a-z_]{1,40})\[([0-9]{1,9})\]", text)
        if match is None:
            raise PlanError(f"{text!r} is not a slot; write for example weights[2]")
        return Slot(match[1], int(match[2]))


class Wait(NamedTuple):
    """Dependency on op number `op`, in this step (distance 0) or the previous one (1). Between repeated ops: in the same repetition
    (back 0) or the previous one (1). Written `12`, `12@1`, `12~1`."""

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
    """An instruction: `forward gpu b2 m0 weights=weights[1] x=activations[4] y=activations[8] ^ 3 17@1`."""

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
        """Return the line without slots and waits: `forward gpu b2 m0`."""
        micro_batch = "" if self.micro_batch is None else f" m{self.micro_batch}"
        return f"{self.kind} {self.lane} b{self.block}{micro_batch}"

    @property
    def lane(self) -> Lane:
        return LANE_OF[self.kind]

    @property
    def reads(self) -> tuple[Slot, ...]:
        names = OPS[self.kind].reads
        return tuple([slot for name, slot in self.operands if name in names])

    @property
    def writes(self) -> tuple[Slot, ...]:
        names = OPS[self.kind].writes
        return tuple([slot for name, slot in self.operands if name in names])

    def get(self, name: str) -> Slot | None:
        """Return the first operand of this name, or None."""
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
        return tuple([slot for known, slot in self.operands if known == name])

    @staticmethod
    def parse(line: str) -> "Op":
        """Parse `str(op)`; raise PlanError if it is malformed."""
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
        block, micro_batch = int(match["block"]), match["micro_batch"]
        slots = tuple((name, Slot.parse(slot)) for name, _, slot in operands)
        waits = tuple(map(Wait.parse, (match["waits"] or "").split()))
        return Op(kind, block, None if micro_batch is None else int(micro_batch), slots, waits)


def _refuse_operands(kind: Kind, names: list[str], line: str) -> None:
    row = OPS[kind]
    in_order = [known for known in row.names for name in names if name == known]
    twice = {name for name in names if names.count(name) > 1}
    if names != in_order or not row.required <= {*names} or not twice <= row.repeated:
        raise PlanError(f"{line[:120]!r}: operands of {kind} are {', '.join(row.names)}, in this order")


def _op_from_line(value: object) -> object:
    if isinstance(value, Op):
        return value
    if isinstance(value, str):
        return Op.parse(value)
    raise PlanError("an op is one line of text")


OpLine = Annotated[Op, BeforeValidator(_op_from_line), PlainSerializer(str)]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Ops start..end-1 run `times` times a step, each on micro-batches `micro_batches` further: `repeat 453-911 x1022 m+1`."""

    start: Annotated[int, Field(ge=1)]
    end: Annotated[int, Field(ge=2)]
    times: Annotated[int, Field(ge=2, le=MAX_REPETITIONS)]
    micro_batches: Annotated[int, Field(ge=1)]

    def __str__(self) -> str:
        return f"repeat {self.start}-{self.end - 1} x{self.times} m+{self.micro_batches}"

    def __contains__(self, i: int) -> bool:
        return self.start <= i < self.end

    @property
    def n_ops(self) -> int:
        return self.end - self.start

    def op(self, op: Op, repetition: int) -> Op:
        """Return a repeated op with the micro-batch of this repetition, counted from 0; waits are unchanged."""
        if op.micro_batch is None or not repetition:
            return op
        return replace(op, micro_batch=op.micro_batch + repetition * self.micro_batches)
