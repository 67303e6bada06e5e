"""What is a plan?

A plan is the list of ops of one steady-state training step, each on a lane, with the slots it reads and writes and the
ops of other lanes it waits for. Each lane performs its ops in plan order, step after step; step n of a lane may run
while another lane is still in step n-1, as far as the waits allow.

`CONTRACT` in `ops.py` says for each kind of op on which lane it runs and what it reads and writes, by name. Slots are
`arena[index]`. Below, b is the block, m the micro-batch, L the number of decoder layers; block 0 is the embedding, blocks 1..L the
layers, block L+1 the head (final norm and output matrix).

    load b                  the `state` of b, wherever it is, that of block 0 too where b uses a weight tied to it (`tied`), into
                            `weights`; or, if it comes packed, into a slot of `packed`
    dequantise b            what is `packed` is unpacked into `weights`
    forward b m             `weights`, what of b is `trained` apart, the activation x of b-1 (not for block 0): the activation y
                            of b; what it saves (`saved`) has a slot where that goes to the host, and else lies in the allocator
    loss b m                the head, forward and backward. x becomes its gradient
    backward b m            y holds its gradient; `saved` is back, if it was away. x becomes its gradient (block 0 has no x,
                            and needs no weights). So of every block from the first on of which anything is trained
    recompute b m           forward once more, of an activation whose slot was given to another
    offload_activation b m  y goes to the host (`spilled`)
    fetch_activation b m    y comes back, to where backward b+1 m finds it as its x
    offload_saved b m       what the layer saves, but for its input, goes to the host (`offloaded`)
    fetch_saved b m         it comes back
    square b                the squares of a gradient, summed
    offload_gradient b      the gradient goes to the host. Where the host adds up (with m) it arrives in a slot of `staging`
    accumulate b m          what is `staged` is added to `arrived` (fp32, ascending m), and that `into` earlier sums
    norm b                  the squares of what has arrived join the `norm`. The first block that is trained, which comes last,
                            ends the sum
    speculate b             the update, as if the norm asked for no clipping, into the block's `shadow`
    update b                AdamW on the block's `state`
    offload_squares b       the squares of a gradient that stays go to the host alone
    update_on_device b      AdamW on a `state` that is on the device, by the gradient that stayed there
    gather b                ranks: the parts of `weights` that all have loaded come together, in place; from where those are on
                            their devices, or from where they are on the host, `state`
    exchange b              ranks: each gets from all what they have in `sum` of its part, `received`; these are added up by a
                            balanced binary tree, in ranks' order, and rounded into its `gradient`
    share_norm 0            ranks: the squares of all parts, of which the `norm` is made
    settle b                where the clip factor is one, the shadow becomes the state, the state the next shadow; else the update

An arena is a role, and its slots have sizes of their own, in this order:

    weights         prefetch_depth + 1 slots for layers, or a single one if any comes packed; one for the embedding or the head,
                    one for each block of resident_blocks (loaded once a step, before its first use)
    packed          if any layer comes packed, prefetch_depth + 1, each as large as the most that is uploaded of a layer
    activations     for each block 0..L that does not spill, one per micro-batch of a group: i * group + m % group for the i-th;
                    then, if any block spills, a ring of 2 * group + 1
    saved           some, if any layer is in offload_blocks
    gradients       gradient_slots for layers, one for the embedding or the head, one for each block of device_blocks
    sums            fp32: one for layers (several micro-batches in one group), one for the embedding or the head (unless its slot
                    of `gradients` is the sum); of each as many as there are sums at a time (`Semantics.n_sums`), first the layers'
    received        ranks: one, fp32, for some of every rank's part of a sum (`Setup.exchanged_elements`): received, then sent
    squares         one for each block of square_blocks, of one fp64 per trained parameter
    device_state    one for each block of device_blocks, as `state` has them, of what is trained
    state           one per block (for one of device_blocks what is frozen of it), then one per block of speculate_blocks: its
                    shadow. A slot holds what is uploaded, first; then, of what is trained, what a split master lacks
                    (`Semantics.splits_masters`), 16 bits per element; then the two moments
    host_gradients  one per block (empty for one of device_blocks); with eager updates in one group: the embedding's, two for
                    layers, the head's. Where the host sums, so many per block as there are sums at a time: after all firsts all
                    seconds
    staging         two for layers, one for the embedding or the head
    spilled         for the i-th block that spills, i * group + m % group
    offloaded       for the i-th layer of offload_blocks, i * group + m % group
    norm            one fp64 per trained parameter of the model (ranks: what all of them share of a step, `Setup.shared_numbers`
                    of each), then for each block of square_blocks one per trained parameter of its own

With `policy.boundary_stride` s above 1 only the activations of blocks 0, s, 2s, .. and L have slots of their own (in order, one per
micro-batch of a group); after them come (s - 1) * group slots that the others share: that of block b, micro-batch m is number
(b % s - 1) * group + m % group of these. In backward, before layers ks+1 .. min((k+1)s, L), highest first, all but the highest of
them are computed again: recompute ks+1, ks+2, .. Such a plan keeps nothing else and spills nothing. A block whose input spills
cannot keep its activations.

"The gradient": with every micro-batch in one group, the fp32 `sum` lives in `sums`: the first micro-batch begins it, each adds to
it, and the last rounds it into its `gradient`. With a single micro-batch a layer, and the embedding, have a gradient and no sum.
With smaller groups each micro-batch has a gradient of its own and the host accumulates. With `sum_groups` above 1 a micro-batch
joins the sum numbered `sum_level(m)`, which the first of a sum group begins; after the last, that sum is added to the one before it
(`into`), and so on for each that is then whole, as far as sum 0, which is rounded when all are in it. The embedding's or the head's
slot of `gradients` is fp32, and is itself sum 0, when the weight is tied; and fp32, when groups are smaller than the step. What has
arrived of a tied weight's gradient is whole with the head's part (`tied`).

A block in `policy.speculate_blocks` (updates deferred) is settled, not updated. Its gradient's `norm` is followed by `speculate`.

Of a block in `policy.square_blocks` the device sums the squares of the gradient, once that is whole: all micro-batches must be in
one group, and where the vocabulary's weight is tied, neither of its blocks can be among them, for the host adds up its gradient.
The sums leave with the gradient, to a slot of `norm`. The block has no `norm`, and is speculated on, or updated eagerly, when its
gradient has arrived; an eager update reads its own sums as its norm, and stops at what is not finite. There is a norm 0 all the
same: it reads what has arrived of block 0 unless that is squared, then all those `squares`, then `norm[0]`. An eager update whose
squares the host sums has no norm to read.

A block in `policy.device_blocks` (updates deferred, all micro-batches in one group) has its state on the device. It is in
`square_blocks` too, as its gradient stays in a slot of its own; only the squares leave. Once norm 0 has ended the sum, the device
updates such blocks, in order, to the bits that the host would give them; their loads are copies within the device.

Weights may be frozen (`Parameter.frozen`, as `semantics.train` says): they are read, and nothing else is done to them. In a slot
what is trained comes first. Gradients, their sums, squares and norms, masters and moments are of trained weights alone; a block
without any has none of the ops for these. No backward goes below the first block that is trained, nor the recompute of layers that
end below it; where block 0 is named above, for the norm that ends the sum, that block is meant. Frozen weights of layers may come
packed (`semantics.base`, `packed.py`): all that is uploaded of a layer waits as it comes in a slot of `packed`, until it is
unpacked into `weights`; there the layer stays until another one needs the slot, in backward as in forward. A block of
device_blocks that is trained in part has its state apart: what is trained in `device_state`, which whatever computes with the
block reads as `trained`, what is frozen in `state`, which its load reads. Its slot of `gradients` is fp32, and is itself the sum
of all micro-batches, whatever the groups; so nothing of it leaves but squares. Where anything is frozen there are one rank and one
sum group, no eager updates and no shadows; device_blocks are all blocks that are trained in part, under barrier too and in groups
of any size, or none.

Several ranks (`semantics.ranks`) perform one plan, each on a device of its own, with its own micro-batches: the first rank's are
the step's first. A block's elements are cut into as many equal parts as there are ranks, of whole pieces each
(`Semantics.n_pieces`, multiples of 128 elements; the last may be padding), and so are the slots of `state`, `gradients` and
`host_gradients`; those of `weights` and `sums` are of the whole. A rank loads, updates and squares its part. Of layers' sums there
are two that end whole, of even and of odd blocks: while one is exchanged the other is begun. A gather, exchange or share_norm
begins when every rank has come to it; a gather may read what another rank has on the host, which that one does not update before
both have exchanged the gradient of it. As all have one plan, and each lane's meetings come in its order, no rank ever waits for
another that waits for it: the plan of all ranks, with each meeting drawn as a single op, has no circle where that of one has none.
All micro-batches of a rank are in one group, and no gradient is squared, or state held, on a device. Where a rank has a single
micro-batch, a layer's sum is that gradient, in the dtype of computing: added to zero it is the same number.

Where micro-batches do not divide the batch the last one has what is left: it uses the beginning of its slots, and of what spills
only that moves.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from runtime.errors import PlanError
from runtime.files import read_whole, try_to_write, write_whole
from runtime.units import on_one_line

from .legality import refuse_sum_groups
from .ops import OpLine, Repeat
from .setup import Setup
from .workload import FILE, BlockKind

FORMAT_VERSION = 2
MAX_PLAN_FILE_BYTES = 128 * 2**20  # more than twice the longest plan that is made, of 500,000 ops; its tree takes twenty times that
MAX_BLOCKS = 10_002  # of the deepest model that is read, with embedding and head
MAX_PARAMETERS = 4096  # of a block: experts are stacked, so that a layer has some twenty
MAX_SLOTS = 2 * 10**6  # of all arenas together, where a text has them as runs


_HEADER = ("semantics", "policy", "model", "workload", "profile")


@dataclass(frozen=True, slots=True)
class Plan(Setup):
    """The ops of one steady-state step and everything needed to perform them."""

    profile: dict[str, Any]
    ops: tuple[OpLine, ...]
    format_version: Literal[2] = 2
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


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file holds: the plan and what the planner claims of it."""

    plan: Plan
    claim: dict[str, Any] | None

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; PlanError where the folder cannot be written."""
        text = json.dumps(_fields(self.plan) | {"fingerprint": self.plan.model.fingerprint, "claim": self.claim})
        with _written(path):
            write_whole(path, text + "\n")

    @staticmethod
    def refuse_unwritable(path: Path) -> None:
        """PlanError now rather than after a search, where `write` would raise it."""
        with _written(path):
            try_to_write(path)

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
        if fields["format_version"] != FORMAT_VERSION:
            version = str(fields["format_version"])[:20]
            raise PlanError(
                f"{path}: a plan of format {version}, and this Penstock reads {FORMAT_VERSION}; plan again with `penstock plan`"
            )
        claim, fingerprint = fields.pop("claim"), fields.pop("fingerprint")
        if claim is not None and not isinstance(claim, dict):
            raise PlanError(f"{path}: `claim` is not an object; make it again with `penstock plan`")
        plan = _validated(_PLAN, json.dumps(fields), str(path))
        if plan.model.fingerprint != fingerprint:
            raise PlanError(f"{path}: the model's fingerprint does not match its configuration; make it again with `penstock plan`")
        return PlanFile(plan, claim)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Around what writes there."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None


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
        place = on_one_line(".".join(map(str, first["loc"])), 120) or "the file"
        problem = first["msg"].removeprefix("Value error, ")[:160]
        raise PlanError(f"{where}: {place}: {problem}; make it again with `penstock plan`") from None
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    if len(sizes) != len(plan.arenas):
        raise PlanError(f"{where}: two arenas have the same name; make it again with `penstock plan`")
    if len(plan.workload.blocks) > MAX_BLOCKS or any(len(b.parameters) > MAX_PARAMETERS for b in plan.workload.blocks):
        raise PlanError(f"{where}: more than {MAX_BLOCKS} blocks, or than {MAX_PARAMETERS} weights in one of them")
    if len(plan.workload.blocks) < 3 or plan.semantics.batch_size < plan.semantics.micro_batch:
        raise PlanError(f"{where}: fewer than three blocks, or a batch that is smaller than its micro-batch")
    try:
        refuse_sum_groups(plan.semantics)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    if len(plan.workload.smaller) != (len(plan.workload.blocks) if plan.semantics.n_left else 0):
        raise PlanError(f"{where}: blocks of a smaller micro-batch must be there just where the last one is smaller")
    kinds = [b.kind for b in plan.workload.blocks]
    if kinds != [BlockKind.EMBEDDING, *[BlockKind.LAYER] * (len(kinds) - 2), BlockKind.HEAD]:
        raise PlanError(f"{where}: blocks are not embedding, layers, head in this order")
    for i, op in enumerate(plan.ops):
        if op.block >= len(kinds) or (op.micro_batch or 0) >= plan.semantics.n_micro_batches:
            raise PlanError(f"{where}: op {i} ({op.name}): no such block or micro-batch")
        for _, slot in op.operands:
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
