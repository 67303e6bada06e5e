"""What is a plan?

A plan is the list of ops of one steady-state training step, each on a lane, with the slots it reads and writes and the
ops of other lanes it waits for. Each lane performs its ops in plan order, step after step; step n of a lane may run
while another lane is still in step n-1, as far as the waits allow.

What each kind of op reads (R) and writes (W). Slots are `arena[index]`; b is the block, m the micro-batch, L the number
of decoder layers; block 0 is the embedding, blocks 1..L the layers, block L+1 the head (final norm and output matrix).

    load b        R the host weights of b (`host_weights[b]`, or `masters[b]` where the master itself is uploaded), and those
                  of block 0 when b uses a weight tied to it.  W one slot of `weights` (layer) or `vocab_weights`
    forward b m   R the weight slot, the input boundary (b, not for block 0).  W the output boundary
    loss b m      the head, forward and backward.  R weight slot, boundary of layer L.  W the same boundary (now its gradient),
                  the gradient
    backward b m  R the weight slot (not for block 0, which needs no weights), the output boundary (holding its gradient), the
                  input boundary.  W the input boundary (now its gradient; not for block 0), the gradient
    offload b     R the device gradient slot.  W `host_gradients` of b; or, with m (unreduced), one slot of `staging`
    accumulate b m  R `staging`, `host_gradients` of b.  W `host_gradients` of b (fp32 sum, ascending m)
    norm b        R `host_gradients` of b (block 0 with a tied weight: also the head's), `norm[0]`.  W `norm[0]`
    update b      R those gradients, `norm[0]` (unless the update is eager), `masters[b]`, `moments[b]`.
                  W `masters[b]`, `moments[b]`, and `host_weights[b]` where there is one

    spill b m     R the boundary slot of (b, m).  W one slot of `spilled` (on the host)
    fetch b m     R that slot of `spilled`.  W a slot of `boundaries`

`host_gradients` has one slot per block, index b; when updates are eager and there is one group: slot 0 for the embedding, the last
for the head, a ring between them for the layers. `staging` has a ring for layers, then one slot for the vocabulary blocks.

`boundaries` has, for each block 0..L that does not spill, in order, one slot per micro-batch of a group: i * group + m % group for
the i-th of them; then, if any block spills, a ring of 3 * group slots. The boundary of a block that spills is written to a slot
of the ring by forward b m, goes by spill b m to slot i * group + m % group of `spilled` (for the i-th spilling block), and comes
back by fetch b m to a slot of the ring, where backward b+1 m finds it as its input and leaves its gradient. Groups follow one
another. A block whose input spills cannot keep its activations.

A block in `policy.resident_blocks` has a weight slot of its own in `resident_weights` (of exact size, in ascending order of
blocks), loaded once a step, before its first use. With storage `split` there is no `masters` but `remainders` (16 bits per
element): a master is a compute weight and its remainder, and `update b` reads and writes `host_weights[b]`, `remainders[b]` and
`moments[b]`.

"The gradient": with every micro-batch in one group, the fp32 sum lives in `sums` (`vocab_sums`), read and written by each
micro-batch but the first (which only writes it) and rounded into `gradients` (`vocab_gradients`) by the last. With a single
micro-batch a layer, and the embedding, write `gradients` (`vocab_gradients`) directly. With smaller groups each micro-batch writes
its own gradient to `gradients` and the host accumulates. A vocabulary block's slot is fp32, and is itself the sum, when the weight
is tied or the groups are smaller than the step.

Every slot starts on a multiple of 256 bytes in its arena.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from .errors import PlanError
from .files import read_whole, write_whole
from .workload import FILE, BlockKind, Count, Dtype, Model, Natural, Workload

FORMAT_VERSION = 1
MAX_PLAN_FILE_BYTES = 512 * 2**20


class Lane(StrEnum):
    """A queue that does one op at a time, in order."""

    GPU = "gpu"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"


class Kind(StrEnum):
    """What an op does; the module docstring says what each reads and writes."""

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
    """Start only after op number `op` of the plan is done: of this step (distance 0) or of the one before (1)."""

    op: int
    distance: int = 0

    def __str__(self) -> str:
        return f"{self.op}@{self.distance}" if self.distance else str(self.op)

    @staticmethod
    def parse(text: str) -> "Wait":
        match = re.fullmatch(r"([0-9]{1,9})(?:@(1))?", text)
        if match is None:
            raise PlanError(f"{text!r} is not a wait; write 12, or 12@1 for the step before")
        return Wait(int(match[1]), int(match[2] or 0))


_OP_LINE = re.compile(
    r"(?P<kind>[a-z]+) (?P<lane>[a-z0-9]+) b(?P<block>[0-9]{1,9})(?: m(?P<micro_batch>[0-9]{1,9}))?"
    r"(?: < (?P<reads>[^<>^]+?))?(?: > (?P<writes>[^<>^]+?))?(?: \^ (?P<waits>[0-9@ ]+))?"
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

    def __str__(self) -> str:
        parts = [self.name]
        for mark, items in (("<", self.reads), (">", self.writes), ("^", self.waits)):
            if items:
                parts += [mark, *map(str, items)]
        return " ".join(parts)

    @property
    def name(self) -> str:
        """The line without slots and waits: `forward gpu b2 m0`."""
        micro_batch = "" if self.micro_batch is None else f" m{self.micro_batch}"
        return f"{self.kind} {self.lane} b{self.block}{micro_batch}"

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


class Place(StrEnum):
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Arena:
    """Slots allocated once, before the first step. `slot_bytes` holds the exact size of each slot."""

    name: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    place: Place
    slot_bytes: tuple[Natural, ...]
    __pydantic_config__ = FILE

    @property
    def n_bytes(self) -> int:
        return sum(self.slot_bytes)


@dataclass(frozen=True, slots=True)
class Semantics:
    """What is computed: the user's choice. It alone decides the bits of the result."""

    seq_len: Count
    batch_size: Count
    micro_batch: Count
    compute_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "bf16"
    master_dtype: Dtype = "fp32"
    weight_rounding: Literal["half_up"] = "half_up"
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    on_nonfinite: Literal["skip", "stop"] = "stop"
    loss_tile_tokens: Count = 1024
    mlp_tile_tokens: Count | None = None  # None: the MLP is not tiled
    attention: Literal["sdpa", "eager"] = "sdpa"
    experts: Literal["eager", "grouped_mm"] = "grouped_mm"
    __pydantic_config__ = FILE

    @property
    def n_micro_batches(self) -> int:
        return self.batch_size // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.seq_len


class Update(StrEnum):
    """When the host optimizer runs."""

    EAGER = "eager"  # as each block's gradient arrives; legal only without clipping and with on_nonfinite: stop
    BARRIER = "barrier"  # after the global norm, and the next step starts only when all blocks are updated
    DEFERRED = "deferred"  # after the global norm, block by block into the next step's forward


@dataclass(frozen=True, slots=True)
class Policy:
    """How it is scheduled: the planner's choice. It never changes a bit of the result."""

    prefetch_depth: Count = 1  # weight slots ahead of the block being computed
    gradient_slots: Count = 1  # device slots for gradients of layers
    offload_late_blocks: Natural = (
        0  # a layer's gradient leaves when the backward this many layers further on is done, if there is one
    )
    group_micro_batches: Count = 1  # layer-major groups: 1 is row-major, all micro-batches is layer-major
    keep_blocks: tuple[Natural, ...] = ()  # layers whose activations are kept; the others keep their input and recompute
    update: Update = Update.BARRIER
    storage: Literal["mirrored", "split"] = "mirrored"  # a bf16 copy beside the fp32 master, or the master cut in two halves
    resident_blocks: tuple[Natural, ...] = ()  # blocks whose weights stay on the device; uploaded once a step
    spill_blocks: tuple[Natural, ...] = ()  # blocks, not the last layer, whose output goes to the host until backward
    __pydantic_config__ = FILE


_HEADER = ("semantics", "policy", "model", "workload", "profile")


@dataclass(frozen=True, slots=True)
class Plan:
    """The ops of one steady-state step and everything needed to perform them."""

    semantics: Semantics
    policy: Policy
    model: Model
    workload: Workload
    profile: dict[str, Any]
    arenas: tuple[Arena, ...]
    ops: tuple[OpLine, ...]
    format_version: Literal[1] = 1
    __pydantic_config__ = FILE

    def __str__(self) -> str:
        """Text that parses back: a header of `key json` lines, one line per arena, one numbered line per op."""
        fields = json.loads(_PLAN.dump_json(self))
        lines = [f"penstock-plan {FORMAT_VERSION}", *(f"{key} {json.dumps(fields[key])}" for key in _HEADER)]
        lines += [f"arena {a['name']} {a['place']} {_runs(a['slot_bytes'])}" for a in fields["arenas"]]
        lines += [f"{i}: {op}" for i, op in enumerate(self.ops)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> "Plan":
        """The plan that `str(plan)` wrote; PlanError when it is not one."""
        fields: dict[str, Any] = {"format_version": None, "arenas": [], "ops": []}
        try:
            for line in text.splitlines():
                key, _, rest = line.partition(" ")
                if key == "penstock-plan":
                    fields["format_version"] = int(rest)
                elif key in _HEADER and key not in fields:
                    fields[key] = json.loads(rest)
                elif key == "arena":
                    name, place, sizes = rest.split(" ", 2)
                    fields["arenas"].append({"name": name, "place": place, "slot_bytes": _unroll(sizes)})
                elif key == f"{len(fields['ops'])}:":
                    fields["ops"].append(rest)
                else:
                    raise PlanError(f"plan text: unexpected line {line[:80]!r}")
        except ValueError as error:
            raise PlanError(f"plan text: {error}") from None
        return _validated(_PLAN, json.dumps(fields), "plan text")

    def arena(self, name: str) -> Arena | None:
        for arena in self.arenas:
            if arena.name == name:
                return arena
        return None

    @property
    def reduced(self) -> bool:
        """Whether the device sums the micro-batches: all are in one group, and a gradient crosses the link once a step."""
        return self.policy.group_micro_batches >= self.semantics.n_micro_batches

    @property
    def weights_arena(self) -> str:
        """The host arena that uploads read: a bf16 copy, or the master itself when it already has the compute dtype."""
        return "host_weights" if self.semantics.compute_dtype != self.semantics.master_dtype else "masters"

    def gradient_dtype(self, block: int) -> Dtype:
        """Dtype of the block's gradient on the device and on the link."""
        if self.workload.blocks[block].kind is BlockKind.LAYER:
            return self.semantics.gradient_dtype if self.reduced else self.semantics.compute_dtype
        return "fp32" if self.workload.tied or not self.reduced else self.semantics.gradient_dtype

    def host_gradient_dtype(self, block: int) -> Dtype:
        """Dtype of the block's gradient on the host: fp32 where the host sums, what was sent elsewhere."""
        return self.gradient_dtype(block) if self.reduced else "fp32"

    @property
    def device_arena_bytes(self) -> int:
        return sum(a.n_bytes for a in self.arenas if a.place is Place.DEVICE)

    @property
    def host_arena_bytes(self) -> int:
        return sum(a.n_bytes for a in self.arenas if a.place is Place.HOST)

    @property
    def kept_bytes(self) -> int:
        """What autograd keeps at its peak for the blocks under `keep`: one group of micro-batches."""
        return self.policy.group_micro_batches * sum(self.workload.blocks[b].kept_bytes for b in self.policy.keep_blocks)

    @property
    def transient_bytes(self) -> int:
        """Peak of the block being computed, in the allocator."""
        return max(b.transient_bytes for b in self.workload.blocks)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file holds: the plan and what the planner claims of it."""

    plan: Plan
    claim: dict[str, Any] | None

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; PlanError where the folder cannot be written."""
        text = json.dumps(
            json.loads(_PLAN.dump_json(self.plan)) | {"fingerprint": self.plan.model.fingerprint, "claim": self.claim}
        )
        try:
            write_whole(path, text + "\n")
        except OSError as error:
            raise PlanError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None

    @staticmethod
    def read(path: Path) -> "PlanFile":
        """The plan in a file, fully validated; PlanError names what is wrong in one line."""
        try:
            fields = json.loads(read_whole(path, MAX_PLAN_FILE_BYTES).decode("utf-8"), object_pairs_hook=_distinct)
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}); make one with `penstock plan MODEL -o FILE`") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path}: not JSON ({str(error)[:80]}); make it again with `penstock plan`") from None
        missing = [key for key in ("format_version", "claim", "fingerprint") if not isinstance(fields, dict) or key not in fields]
        if missing:
            raise PlanError(f"{path}: not a plan file: `{missing[0]}` is missing; make it again with `penstock plan`")
        claim, fingerprint = fields.pop("claim"), fields.pop("fingerprint")
        if claim is not None and not isinstance(claim, dict):
            raise PlanError(f"{path}: `claim` is not an object; make it again with `penstock plan`")
        plan = _validated(_PLAN, json.dumps(fields), str(path))
        if plan.model.fingerprint != fingerprint:
            raise PlanError(f"{path}: the model's fingerprint does not match its configuration; make it again with `penstock plan`")
        return PlanFile(plan, claim)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a key that stands there twice only one value would count, and nobody could tell which was meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"`{next(key for key in keys if keys.count(key) > 1)[:40]}` stands twice in one object")
    return fields


_PLAN = TypeAdapter(Plan)


def _validated(adapter: TypeAdapter[Plan], text: str, where: str) -> Plan:
    """The plan in a JSON text, its numbers referring only to what exists."""
    try:
        plan = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise PlanError(f"{where}: {place}: {first['msg'][:160]}; make it again with `penstock plan`") from None
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    if len(sizes) != len(plan.arenas):
        raise PlanError(f"{where}: two arenas have the same name; make it again with `penstock plan`")
    if len(plan.workload.blocks) < 3 or plan.semantics.batch_size % plan.semantics.micro_batch:
        raise PlanError(f"{where}: fewer than three blocks, or a batch that is no multiple of its micro-batch")
    kinds = [b.kind for b in plan.workload.blocks]
    if kinds != [BlockKind.EMBEDDING, *[BlockKind.LAYER] * (len(kinds) - 2), BlockKind.HEAD]:
        raise PlanError(f"{where}: blocks are not embedding, layers, head in this order")
    for i, op in enumerate(plan.ops):
        if op.block >= len(kinds) or (op.micro_batch or 0) >= plan.semantics.n_micro_batches:
            raise PlanError(f"{where}: op {i} ({op.name}): no such block or micro-batch")
        for slot in (*op.reads, *op.writes):
            if slot.index >= sizes.get(slot.arena, 0):
                raise PlanError(f"{where}: op {i} ({op.name}): slot {slot} does not exist")
        for wait in op.waits:
            if wait.op >= len(plan.ops) or plan.ops[wait.op].lane is op.lane:
                raise PlanError(f"{where}: op {i} ({op.name}): wait {wait} names no op of another lane")
    return plan


def _runs(sizes: list[int]) -> str:
    """`3x4096 1x512`: equal neighbours written once."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " ".join(f"{n}x{size}" for n, size in runs)


def _unroll(text: str) -> list[int]:
    sizes: list[int] = []
    for run in text.split():
        n, _, size = run.partition("x")
        if int(n) > 10**6:
            raise PlanError(f"an arena of {n} slots")
        sizes += [int(size)] * int(n)
    return sizes
