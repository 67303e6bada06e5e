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

    speculate b   R those gradients, `masters[b]`, `moments[b]`.  W the block's slot of `shadows`
    settle b      R those gradients, `norm[0]`, `masters[b]`, `moments[b]`, the slot of `shadows`.  W `masters[b]`, `moments[b]`,
                  `host_weights[b]` where there is one, the slot of `shadows`
    square b      R the device gradient slot.  W the block's slot of `squares`
    recompute b m R the weight slot, the boundary of b-1.  W the boundary of b
    spill b m     R the boundary slot of (b, m).  W one slot of `spilled` (on the host)
    fetch b m     R that slot of `spilled`.  W a slot of `boundaries`

`host_gradients` has one slot per block, index b; when updates are eager and there is one group: slot 0 for the embedding, the last
for the head, a ring between them for the layers. `staging` has a ring for layers, then one slot for the vocabulary blocks.

`boundaries` has, for each block 0..L that does not spill, in order, one slot per micro-batch of a group: i * group + m % group for
the i-th of them; then, if any block spills, a ring of 2 * group + 1 slots. The boundary of a block that spills is written to a slot
of the ring by forward b m, goes by spill b m to slot i * group + m % group of `spilled` (for the i-th spilling block), and comes
back by fetch b m to a slot of the ring, where backward b+1 m finds it as its input and leaves its gradient. Groups follow one
another. A block whose input spills cannot keep its activations.

With `policy.boundary_stride` s above 1 only the boundaries of blocks 0, s, 2s, .. and L have slots of their own (in order, one per
micro-batch of a group); after them come (s - 1) * group slots that the others share: that of block b, micro-batch m is number
(b % s - 1) * group + m % group of these. In backward, before layers ks+1 .. min((k+1)s, L), highest first, all but the highest of
them are computed again: recompute ks+1, ks+2, .. Such a plan keeps nothing else and spills nothing.

A block in `policy.speculate_blocks` (updates deferred) has no `update`. Its gradient's `norm` is followed by `speculate`, which
does what `update` would do if the norm asked for no clipping and writes all that results into the block's slot of `shadows` (in
ascending order of blocks; one slot holds weights, master and moments). `settle` stands where `update` would. Where the clip
factor is one, the shadow becomes the state and the state the next shadow; else it does what `update` does.

With `policy.transfer_chunk_bytes` a layer's parameters, in order, are cut into chunks: each holds as many as fit into that many
bytes of compute weights, and at least one. load, offload, norm, update, speculate and settle of a layer come once per chunk, in
ascending order, and wherever above a host arena (`masters`, `remainders`, `moments`, `host_weights`, `host_gradients`,
`shadows`) has one slot for a layer it has one per chunk. An op names its chunk where its block has more than one. Vocabulary
blocks are one chunk; all micro-batches must be in one
group. The ring of eager updates has as many slots as two layers have chunks, each of the size of the largest chunk.

Of a block in `policy.square_blocks` the device sums the squares of the gradient, once that is whole: all micro-batches must be in
one group, and where the vocabulary's weight is tied, neither of its blocks can be among them, for the host adds up its gradient.
`squares` on the device and `host_squares` on the host have one slot for each, in ascending order of blocks, of one fp64 per
parameter. square b follows the micro-batch that completes the gradient; the block's first (or only) offload reads its slot of
`squares` too, after the gradient, and writes that of `host_squares`, after `host_gradients`. The block has no `norm`, and is
speculated on, or updated eagerly, when its gradient has arrived; an eager update reads its slot of `host_squares` where others
read `norm[0]`, and stops at what is not finite. There is a norm 0 all the same: it reads the gradients that it would read were
block 0 not squared (none, if it is), then all slots of `host_squares`, then `norm[0]`.

A block in `policy.resident_blocks` has a weight slot of its own in `resident_weights` (of exact size, in ascending order of
blocks), loaded once a step, before its first use. With storage `split` there is no `masters` but `remainders` (16 bits per
element): a master is a compute weight and its remainder, and `update b` reads and writes `host_weights[b]`, `remainders[b]` and
`moments[b]`.

Where micro-batches do not divide the batch the last one has what is left: it uses the beginning of its slots, and of what spills
only that moves.

"The gradient": with every micro-batch in one group, the fp32 sum lives in `sums` (`vocab_sums`), read and written by each
micro-batch but the first (which only writes it) and rounded into `gradients` (`vocab_gradients`) by the last. With a single
micro-batch a layer, and the embedding, write `gradients` (`vocab_gradients`) directly. With smaller groups each micro-batch writes
its own gradient to `gradients` and the host accumulates. A vocabulary block's slot is fp32, and is itself the sum, when the weight
is tied or the groups are smaller than the step.

A long step names ops once that it performs many times: with `repeat`, ops start..end-1 (the section) are performed `times` times,
one repetition after another, each with micro-batches that are `micro_batches` further. What comes before them (the prologue) and
after them (the epilogue) is performed once. Of one repeated op for another, a wait means the same repetition, or with `~1` the one
before; before a step's first repetition comes the last one of the step before. Every other wait for a repeated op means its last
repetition. No op waits for what comes in a later of the three parts of its step. Whole groups repeat: the prologue has the
micro-batches before them, the step's first among them, the epilogue those after, among them the last. What such a plan means is the
plan without `repeat` that `repetition.py` makes of it.

Every slot starts on a multiple of 256 bytes in its arena.

A forward plan (`forward_plan.py`) is no training step: it has only loads and forwards, in the same arenas, and there the head
too has `forward`, which writes nothing.
"""

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from runtime.errors import PlanError
from runtime.files import read_whole, write_whole

from .ops import LANE_OF, MAX_REPETITIONS, Kind, Lane, Op, OpLine, Repeat, Slot, Wait
from .policy import AttentionKernel, Kernel, Policy, Semantics, Update
from .workload import FILE, ITEM_BYTES, Block, BlockKind, Dtype, Model, Natural, Saved, Workload

__all__ = [
    "LANE_OF", "MAX_REPETITIONS", "Arena", "AttentionKernel", "Kernel", "Kind", "Lane", "Op", "Place", "Plan", "PlanFile", "Policy",
    "Repeat", "Semantics", "Slot", "Update", "Wait",
]  # fmt: skip

FORMAT_VERSION = 1
MAX_PLAN_FILE_BYTES = 128 * 2**20  # more than twice the longest plan that is made, of 500,000 ops; its tree takes twenty times that
MAX_BLOCKS = 10_002  # of the deepest model that is read, with embedding and head
MAX_PARAMETERS = 4096  # of a block: experts are stacked, so that a layer has some twenty
MAX_SLOTS = 2 * 10**6  # of all arenas together, where a text has them as runs


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
    repeat: Repeat | None = None  # None: every op is performed once a step
    __pydantic_config__ = FILE

    def __str__(self) -> str:
        """Text that parses back: a header of `key json` lines, one line per arena, what repeats, one numbered line per op."""
        fields = _fields(self)
        lines = [f"penstock-plan {FORMAT_VERSION}", *(f"{key} {json.dumps(fields[key])}" for key in _HEADER)]
        lines += [f"arena {a['name']} {a['place']} {_runs(a['slot_bytes'])}" for a in fields["arenas"]]
        lines += [] if self.repeat is None else [str(self.repeat)]
        lines += [f"{i}: {op}" for i, op in enumerate(self.ops)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> "Plan":
        """The plan that `str(plan)` wrote; PlanError when it is not one."""
        fields: dict[str, Any] = {"format_version": None, "arenas": [], "ops": []}
        n_free_slots = MAX_SLOTS
        try:
            for line in text.splitlines():
                key, _, rest = line.partition(" ")
                if key == "penstock-plan":
                    fields["format_version"] = int(rest)
                elif key in _HEADER and key not in fields:
                    fields[key] = json.loads(rest, object_pairs_hook=_distinct)
                elif key == "arena":
                    name, place, runs = rest.split(" ", 2)
                    sizes = _unroll(runs, n_free_slots)
                    n_free_slots -= len(sizes)
                    fields["arenas"].append({"name": name, "place": place, "slot_bytes": sizes})
                elif key == "repeat" and key not in fields:
                    fields[key] = Repeat.parse(line)
                elif key == f"{len(fields['ops'])}:":
                    fields["ops"].append(rest)
                else:
                    raise PlanError(f"plan text: unexpected line {line[:80]!r}")
        except (ValueError, RecursionError) as error:
            raise PlanError(f"plan text: {error}") from None
        return _validated(_PLAN, json.dumps(fields), "plan text")

    def arena(self, name: str) -> Arena | None:
        for arena in self.arenas:
            if arena.name == name:
                return arena
        return None

    def blocks_of(self, micro_batch: int | None) -> tuple[Block, ...]:
        """The blocks with the sizes of this micro-batch; None: of what all have in common."""
        return self.workload.smaller if self.semantics.is_smaller(micro_batch) else self.workload.blocks

    def alike(self, micro_batches: range) -> list[tuple[int, int]]:
        """One of each sort of these micro-batches, and how many are of that sort: the first and the last of a step move their
        gradients differently from those between, and the last may be smaller."""
        last = self.semantics.n_micro_batches - 1
        n_first, n_last = int(0 in micro_batches), int(last in micro_batches and last > 0)
        counts = ((0, n_first), (1, len(micro_batches) - n_first - n_last), (last, n_last))
        return [(m, count) for m, count in counts if count]

    def often(self, i: int) -> int:
        """How many times a step performs op number i."""
        return self.repeat.times if self.repeat is not None and i in self.repeat else 1

    def number(self, i: int, repetition: int) -> int:
        """Where op number i stands in this repetition, were all of them written out."""
        if self.repeat is None or i < self.repeat.start:
            return i
        return i + (repetition if i in self.repeat else self.repeat.times - 1) * self.repeat.n_ops

    @property
    def n_performed(self) -> int:
        """Ops that a step performs: those that repeat, as often as they do."""
        return len(self.ops) + (0 if self.repeat is None else (self.repeat.times - 1) * self.repeat.n_ops)

    @property
    def reduced(self) -> bool:
        """Whether the device sums the micro-batches: all are in one group, and a gradient crosses the link once a step."""
        return self.policy.group_micro_batches >= self.semantics.n_micro_batches

    @property
    def weights_arena(self) -> str:
        """The host arena that uploads read: a bf16 copy, or the master itself when it already has the compute dtype."""
        return "host_weights" if self.semantics.compute_dtype != self.semantics.master_dtype else "masters"

    def chunks(self, block: int) -> tuple[range, ...]:
        """The elements of each chunk of a block's slots; one chunk unless it is a layer and the policy cuts layers."""
        whole, most_bytes = self.workload.blocks[block], self.policy.transfer_chunk_bytes
        if whole.kind is not BlockKind.LAYER or most_bytes is None:
            return (range(whole.slot_elements),)
        most = most_bytes // ITEM_BYTES[self.semantics.compute_dtype]
        starts = [*whole.offsets()[0].values(), whole.slot_elements]
        cuts = [0]
        for start, end in pairwise(starts):
            if end - cuts[-1] > most and start > cuts[-1]:
                cuts.append(start)
        return tuple(range(start, end) for start, end in pairwise([*cuts, whole.slot_elements]))

    def saved(self, block: int) -> Saved:
        """What a layer saves for its backward; meaningless for the blocks under `keep`."""
        if block in self.policy.product_blocks:
            return Saved.PRODUCTS
        return Saved.ATTENTION if block in self.policy.attention_blocks else Saved.BOUNDARY

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
        """What is kept at its peak, of one group of micro-batches: by autograd under `keep`, and what the others save."""
        blocks, policy = self.workload.blocks, self.policy
        kept = sum(blocks[b].kept_bytes for b in policy.keep_blocks)
        saving = (blocks[b].recompute(self.saved(b), policy.early_stop) for b in (*policy.attention_blocks, *policy.product_blocks))
        return policy.group_micro_batches * (kept + sum(r.saved_bytes for r in saving if r is not None))

    @property
    def transient_bytes(self) -> int:
        """Peak of the block being computed, in the allocator."""
        blocks, policy, whole = self.workload.blocks, self.policy, set(self.policy.keep_blocks)
        again = (None if b in whole else blocks[b].recompute(self.saved(b), policy.early_stop) for b in range(1, len(blocks) - 1))
        layers = ((r or b).transient_bytes for b, r in zip(blocks[1:-1], again, strict=True))
        return max(self.vocab_transient_bytes, *layers)

    @property
    def vocab_transient_bytes(self) -> int:
        """Peak of the embedding or the head. Where the host sums micro-batches, the device has no sum of earlier ones."""
        embedding, head = self.workload.blocks[0], self.workload.blocks[-1]
        return max(embedding.transient_bytes, head.transient_bytes - (0 if self.reduced else head.own_sum_bytes))


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file holds: the plan and what the planner claims of it."""

    plan: Plan
    claim: dict[str, Any] | None

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; PlanError where the folder cannot be written."""
        text = json.dumps(_fields(self.plan) | {"fingerprint": self.plan.model.fingerprint, "claim": self.claim})
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
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"`{key[:40]}` stands twice in one object")
    return fields


_PLAN = TypeAdapter(Plan)


def _fields(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object; `repeat` only where something does."""
    fields: dict[str, Any] = json.loads(_PLAN.dump_json(plan))
    if plan.repeat is None:
        del fields["repeat"]
    return fields


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
    if len(plan.workload.blocks) > MAX_BLOCKS or any(len(b.parameters) > MAX_PARAMETERS for b in plan.workload.blocks):
        raise PlanError(f"{where}: more than {MAX_BLOCKS} blocks, or than {MAX_PARAMETERS} weights in one of them")
    if len(plan.workload.blocks) < 3 or plan.semantics.batch_size < plan.semantics.micro_batch:
        raise PlanError(f"{where}: fewer than three blocks, or a batch that is smaller than its micro-batch")
    if len(plan.workload.smaller) != (len(plan.workload.blocks) if plan.semantics.n_left else 0):
        raise PlanError(f"{where}: blocks of a smaller micro-batch must be there just where the last one is smaller")
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
    _refuse_repeat(plan, where)
    return plan


def _refuse_repeat(plan: Plan, where: str) -> None:
    """What repeats lies among the plan's ops, its last micro-batch exists, and no op waits for a later part of its step."""
    repeat = plan.repeat
    if repeat is not None and not 0 < repeat.start < repeat.end < len(plan.ops):
        raise PlanError(f"{where}: {repeat}: not ops of the plan with others before and after them")
    ends = () if repeat is None else (repeat.start, repeat.end)
    for i, op in enumerate(plan.ops):
        repeats = repeat is not None and i in repeat
        if repeats and (repeat.op(op, repeat.times - 1).micro_batch or 0) >= plan.semantics.n_micro_batches:  # type: ignore[union-attr]
            raise PlanError(f"{where}: op {i} ({op.name}): {repeat}: no such micro-batch in its last repetition")
        for wait in op.waits:
            is_later = not wait.distance and any(i < end <= wait.op for end in ends)
            is_astray = wait.back and (wait.distance or not repeats or wait.op not in repeat)  # type: ignore[operator]
            if is_later or is_astray:
                raise PlanError(f"{where}: op {i} ({op.name}): wait {wait} names no op of this part of the step or an earlier one")


def _runs(sizes: list[int]) -> str:
    """`3x4096 1x512`: equal neighbours written once."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " ".join(f"{n}x{size}" for n, size in runs)


def _unroll(text: str, most: int) -> list[int]:
    """What `_runs` wrote, if it is of at most so many slots."""
    sizes: list[int] = []
    for run in text.split():
        n, _, size = run.partition("x")
        if not 0 < int(n) <= most - len(sizes):
            raise PlanError(f"a run of {n[:40]} slots; a plan has at most {MAX_SLOTS}")
        sizes += [int(size)] * int(n)
    return sizes
