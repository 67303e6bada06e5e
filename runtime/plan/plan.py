"""A plan: the ops of one steady-state training step, as text, JSON and values.

A plan lists the ops of one steady-state step. Each op runs on a lane (a CUDA stream or a thread), reads and writes slots of memory,
and waits for ops of other lanes. A lane performs its ops in plan order, step after step; step n of a lane may run while another
lane is still in step n-1, as far as the waits allow.

Ops. `OPS` in `ops.py` says for each kind its lane, its operands by name, which blocks have it and how often. A slot is written
`arena[index]`. Below, b is the block, m the micro-batch and L the number of decoder layers: block 0 is the embedding, blocks 1..L
are the layers, block L+1 is the head (final norm and output matrix).

    load b                  the weights of b go from its `state` to `weights`, or to `packed` if they come packed. A head that uses
                            the embedding's weight reads the state of block 0 too (`tied`)
    gather b                ranks: an all-gather, in place, of the parts of `weights` that each has loaded, from their devices or
                            from their host memory (`state`)
    dequantise b            `packed` is unpacked into `weights`
    forward b m             the output y of b, from its input x (the y of b-1; block 0 has none), `weights`, and what of b is
                            `trained` on the device while the rest is frozen. What autograd saves has a slot (`saved`) if it is
                            offloaded; otherwise the allocator has it
    offload_activation b m  y goes to the host (`spilled`)
    offload_saved b m       what the layer saves besides its input goes to the host (`offloaded`)
    loss b m                forward and backward of the head: the gradient of x replaces x
    fetch_activation b m    y comes back, to the slot that backward b+1 m reads as its x
    fetch_saved b m         what the layer saves comes back
    recompute b m           forward once more, of a y whose slot other blocks have used since
    backward b m            y holds the gradient of y; the gradient of x replaces x (block 0 has no x, and needs no weights)
    exchange b              ranks: a reduce-scatter of `sum`. Each receives its part from all (`received`), adds these up by a
                            balanced binary tree in order of ranks, and rounds the result into its `gradient`
    square b                the device sums the squares of a gradient
    offload_gradient b      the gradient goes to the host, with its sums of squares if the device made them (`norm`). Where the host
                            accumulates, that of each m goes to a slot of `staging`
    accumulate b m          the host adds what is `staged` to the sum `arrived` (fp32, ascending m), and that `into` earlier sums
    offload_squares b       the sums of squares of a gradient that stays on the device go to the host
    norm b                  the host sums the squares of a gradient that has arrived
    clip 0                  the norm of all gradients, from every trained block's `norm`: by it updates are clipped. Ranks
                            all-gather what each has of it
    speculate b             AdamW as if nothing were clipped, from `state` into `shadow`
    settle b                where nothing is clipped the shadow becomes the state, and the state the next shadow; else AdamW
    update b                AdamW on `state`, by the step's `clip`; an eager update, by the block's own `norm`, which must be finite
    update_on_device b      AdamW on a state that the device holds, with the gradient that stays there

Arenas. An arena is a role. Its slots have sizes of their own, each starts on a multiple of 256 bytes, and they come in this order:

    weights         prefetch_depth + 1 for layers, or one if any layer comes packed; one for the embedding or the head; one for each
                    block of resident_blocks (loaded once a step, before its first use)
    packed          if any layer comes packed, prefetch_depth + 1, each as large as the most that is loaded of a layer
    activations     for the i-th block of 0..L that does not spill, i * group + m % group; then, if any block spills, a ring of
                    2 * group + 1
    saved           two, if any layer is in offload_blocks
    gradients       gradient_slots for layers, one for the embedding or the head, one for each block of device_blocks
    sums            fp32: one for layers, if the device sums several micro-batches; one for the embedding or the head, unless its
                    slot of `gradients` is the sum. Of each as many as there are sums at a time (`Semantics.n_sums`), layers first
    received        ranks: one, fp32, for a piece of every rank's part (`Setup.exchanged_elements`): received, then sent
    squares         one for each block whose gradient the device squares (`Setup.squared`): an fp64 for each trained parameter
    device_state    one for each block of device_blocks: what `state` would have of its trained weights
    state           one for each block (of device_blocks, its frozen weights alone), then a shadow for each block of
                    speculate_blocks. First what is loaded; then, of what is trained, what else the optimizer keeps
                    (`Optimizer.stored`): the 16 bits per element that a split master lacks, and the moments
    host_gradients  one for each block (empty for one of device_blocks); with eager updates in one group the embedding's, two for
                    layers, and the head's. Where the host accumulates, `n_sums` for each block: all firsts, then all seconds
    staging         two for layers, one for the embedding or the head
    spilled         for the i-th block of spill_blocks, i * group + m % group
    offloaded       for the i-th layer of offload_blocks, i * group + m % group
    norm            one for each block, of `Setup.norm_numbers` fp64; then one for the norm of all (ranks: of what all have to share
                    of a step, `Setup.shared_numbers` each)

Activations. With `policy.boundary_stride` s above 1 only the outputs of blocks 0, s, 2s, .. and L have slots of their own. After
these come (s - 1) * group slots that the others share: that of block b, micro-batch m is number (b % s - 1) * group + m % group of
them. Before the backward of layers ks+1 .. min((k+1)s, L), all but the highest of them are computed again, lowest first. Such a
plan saves nothing but inputs, and spills nothing. A layer whose input spills cannot save all that autograd keeps.

Gradients. With every micro-batch in one group the device sums in fp32: the first micro-batch begins the `sum`, each adds to it, and
the last rounds it into the `gradient`. With a single micro-batch a layer, and the embedding, have a gradient and no sum. With
smaller groups each micro-batch has a gradient of its own, and the host accumulates. With `sum_groups` above 1 a micro-batch joins
sum number `sum_level(m)`, which the first of a sum group begins; after the last, that sum is added to the one before it (`into`),
and so on while sums are whole, until all are in sum 0. The slot of `gradients` for the embedding or the head is fp32 where groups
are smaller than the step, and where their weight is tied; of one rank it is then sum 0 itself. The gradient of a tied weight is
what has arrived of both blocks (`tied`).

Updates. A block of speculate_blocks (updates deferred) is settled, not updated. Under `policy.square_on_device` the device sums the
squares of every gradient that is whole there: all micro-batches must be in one group, and the two blocks of a tied weight are not
among them. All other gradients have a `norm`. A block of device_blocks (updates deferred, all micro-batches in one group) has its
state on the device; its gradient stays in a slot of its own and is squared there. After `clip` the device updates such blocks, in
order, to the bits that the host would give them; their loads are copies within the device.

Frozen weights (`Parameter.frozen`, as `semantics.train` says) are only read. In a slot they come after what is trained. Gradients,
sums, squares, norms, masters and moments are of trained weights alone, and a block without any has no op for these. No backward
goes below the first block that is trained, and no output is computed again for a run of layers that ends below it. Frozen weights
of layers may come packed (`semantics.base`, `packed.py`): what is loaded of a layer waits in a slot of `packed` and is unpacked
into `weights`, where it stays until another layer needs that slot, in backward as in forward. A block of device_blocks that is
trained in part has what is trained in `device_state` (`trained` of the ops that compute), and what is frozen in `state`, from where
it is loaded. Its slot of `gradients` is fp32 and is the sum of all micro-batches, whatever the groups. Where anything is frozen
there are one rank and one sum group, no eager updates and no shadows; device_blocks are all blocks that are trained in part, or
none, also under barrier and in groups of any size.

Ranks (`semantics.ranks`) perform one plan, each on its own device with its own micro-batches, the first rank with the step's first.
A block's elements are cut into as many equal parts as there are ranks, each of whole pieces (`Semantics.n_pieces`, multiples of 128
elements; the last may be padding). Slots of `state`, `gradients` and `host_gradients` are of a part, those of `weights` and `sums`
of the whole. Layers have two first sums, for even and for odd blocks: while one is exchanged the other is begun. Gather, exchange
and clip are collectives, which begin when every rank has come to them. A gather may read what another rank has on the host, and
which that one does not update before both have exchanged its gradient. As all ranks have one plan, and the collectives of a lane
come in its order, the plan of all ranks, where a collective is a single op, has a circle of waits only if that of one rank has one.
All micro-batches of a rank are in one group, and no gradient is squared, or state held, on a device. With a single micro-batch a
rank's sum of a layer is that gradient, in the compute dtype.

The last micro-batch is smaller where the others do not divide the batch. It uses the beginning of its slots, and of what spills
only that moves.

Repeats. A long step names once what it performs many times: with `repeat`, ops start..end-1 are performed `times` times, each time
with micro-batches that are `micro_batches` further; the ops before them (the prologue) and after them (the epilogue) once. Between
ops that repeat, a wait means the same repetition, or with `~1` the one before, which for a step's first repetition is the last of
the step before. Every other wait for an op that repeats means its last repetition. No op waits for a later one of the three parts
of its step. Whole groups repeat; the step's first is in the prologue, its last in the epilogue. Such a plan means what
`repetition.unrolled` makes of it.

A forward plan (`forward_plan.py`) is no training step: it has only loads and forwards, in the same arenas, and its head has a
`forward` too, which writes nothing.
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

FORMAT_VERSION = 3
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
    format_version: Literal[3] = 3
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
    try:
        refuse_malformed(plan)
    except PlanError as error:
        raise PlanError(f"{where}: {error}; make it again with `penstock plan`") from None
    return plan


def refuse_malformed(plan: Plan) -> None:
    """PlanError, in a line, unless the plan is well-formed: blocks in their order, arenas of different names, and every block,
    micro-batch, slot and op that an op or `repeat` refers to exists."""
    blocks, n_micro_batches = plan.workload.blocks, plan.semantics.n_micro_batches
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    if len(sizes) != len(plan.arenas):
        raise PlanError("two arenas have the same name")
    if len(blocks) > MAX_BLOCKS or any(len(b.parameters) > MAX_PARAMETERS for b in blocks):
        raise PlanError(f"more than {MAX_BLOCKS} blocks, or than {MAX_PARAMETERS} weights in one of them")
    if len(blocks) < 3 or plan.semantics.batch_size < plan.semantics.micro_batch:
        raise PlanError("fewer than three blocks, or a batch that is smaller than its micro-batch")
    refuse_sum_groups(plan.semantics)
    if len(plan.workload.smaller) != (len(blocks) if plan.semantics.n_left else 0):
        raise PlanError("blocks of a smaller micro-batch must be there just where the last one is smaller")
    if [b.kind for b in blocks] != [BlockKind.EMBEDDING, *[BlockKind.LAYER] * (len(blocks) - 2), BlockKind.HEAD]:
        raise PlanError("blocks are not embedding, layers, head in this order")
    for i, op in enumerate(plan.ops):
        if not (0 <= op.block < len(blocks) and 0 <= (op.micro_batch or 0) < n_micro_batches):
            raise PlanError(f"op {i} ({op.name}): no such block or micro-batch")
        for _, slot in op.operands:
            if not 0 <= slot.index < sizes.get(slot.arena, 0):
                raise PlanError(f"op {i} ({op.name}): slot {slot} does not exist")
        for wait in op.waits:
            is_one = 0 <= wait.op < len(plan.ops) and 0 <= wait.distance <= 1 and 0 <= wait.back <= 1
            if not is_one or plan.ops[wait.op].lane is op.lane:
                raise PlanError(f"op {i} ({op.name}): wait {wait} names no op of another lane")
    _refuse_repeat(plan)


def _refuse_repeat(plan: Plan) -> None:
    """What repeats lies among the plan's ops, its last micro-batch exists, and no op waits for a later part of its step."""
    repeat = plan.repeat
    if repeat is not None and not 0 < repeat.start < repeat.end < len(plan.ops):
        raise PlanError(f"{repeat}: not ops of the plan with others before and after them")
    ends = () if repeat is None else (repeat.start, repeat.end)
    for i, op in enumerate(plan.ops):
        repeats = repeat is not None and i in repeat
        if repeats and (repeat.op(op, repeat.times - 1).micro_batch or 0) >= plan.semantics.n_micro_batches:  # type: ignore[union-attr]
            raise PlanError(f"op {i} ({op.name}): {repeat}: no such micro-batch in its last repetition")
        for wait in op.waits:
            is_later = not wait.distance and any(i < end <= wait.op for end in ends)
            is_astray = wait.back and (wait.distance or not repeats or wait.op not in repeat)  # type: ignore[operator]
            if is_later or is_astray:
                raise PlanError(f"op {i} ({op.name}): wait {wait} names no op of this part of the step or an earlier one")


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
