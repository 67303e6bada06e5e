"""What must the arenas and ops of a plan look like?

The contract of `runtime/plan.py` as a verifier reads it: given the workload, the semantics and the policy, which arenas
there must be and how large, and which slots each op reads and writes. Only the checker uses it, never what makes plans.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import assert_never

from runtime.errors import PlanError
from runtime.plan import Arena, Kind, Op, Place, Plan, Slot, Update
from runtime.workload import ALIGN_ELEMENTS, ITEM_BYTES

AGAIN = "make the plan again with `penstock plan`"
ALIGN_BYTES = ALIGN_ELEMENTS * ITEM_BYTES["bf16"]  # where a slot may start: results depend on alignment
MAX_DIMS = 8  # of a weight; a bound on the size of the numbers below
FP32, NORM_BYTES = ITEM_BYTES["fp32"], 8  # the norm keeps one fp64 sum of squares for each weight


def wrong(i: int, op: Op, what: str) -> PlanError:
    """The error that op number i of a plan is wrong, in one line."""
    return PlanError(f"op {i} ({op.name}): {what}; {AGAIN}")


@dataclass(frozen=True, slots=True)
class Shape:
    """The few facts about a plan that decide what its ops must look like."""

    n_blocks: int
    head: int
    n_micro_batches: int
    group: int
    reduced: bool  # one group: a gradient leaves the device once, complete
    tied: bool
    upload: str  # the host arena that loads read
    state: tuple[str, ...]  # the host arenas that hold what a block has learned
    eager: bool
    resident: dict[int, int]  # block: its slot of `resident_weights`
    spilled: dict[int, int]  # block: its place among those whose output spills
    unspilled: dict[int, int]  # block, not the head: its place among the others

    @staticmethod
    def of(plan: Plan) -> "Shape":
        """What the workload, the semantics and the policy of a plan say of its ops."""
        n_blocks = len(plan.workload.blocks)
        n_micro_batches, group = plan.semantics.n_micro_batches, plan.policy.group_micro_batches
        copy = plan.semantics.compute_dtype == "bf16" and plan.semantics.master_dtype == "fp32"
        split = plan.policy.storage == "split"
        spills = frozenset(plan.policy.spill_blocks)
        return Shape(
            n_blocks=n_blocks,
            head=n_blocks - 1,
            n_micro_batches=n_micro_batches,
            group=group,
            reduced=group >= n_micro_batches,
            tied=plan.workload.tied,
            upload="host_weights" if copy else "masters",
            state=("host_weights", "remainders", "moments") if split else ("masters", "moments"),
            eager=plan.policy.update is Update.EAGER,
            resident={b: i for i, b in enumerate(sorted(set(plan.policy.resident_blocks)))},
            spilled={b: i for i, b in enumerate(sorted(spills))},
            unspilled={b: i for i, b in enumerate(b for b in range(n_blocks - 1) if b not in spills)},
        )

    @property
    def vocab_slot_is_sum(self) -> bool:
        """Whether the vocabulary blocks' gradient slot is fp32 and holds the running sum."""
        return self.tied or not self.reduced

    @property
    def ring(self) -> bool:
        """Whether layers share a ring of `host_gradients`, instead of a slot each."""
        return self.eager and self.reduced

    @property
    def first_ring_slot(self) -> int:
        """Slots of `boundaries` from here on belong to no block: outputs that spill pass through them."""
        return len(self.unspilled) * self.group

    def vocab(self, block: int) -> bool:
        """Whether it is the embedding or the head."""
        return block in (0, self.head)

    def weights(self, block: int) -> tuple[str, int | None]:
        if block in self.resident:
            return "resident_weights", self.resident[block]
        return ("vocab_weights", 0) if self.vocab(block) else ("weights", None)

    def boundary(self, block: int, micro_batch: int) -> tuple[str, int | None]:
        if block in self.spilled:
            return "boundaries", None
        return "boundaries", self.unspilled[block] * self.group + micro_batch % self.group


def check_workload(plan: Plan) -> None:
    """Weights have names of their own, few dimensions, and only the head shares weights with block 0."""
    blocks = plan.workload.blocks
    owned = {p.name: p.shape for p in blocks[0].parameters}
    for i, block in enumerate(blocks):
        ties = [p.tied_to for p in block.parameters if p.tied_to is not None]
        if len({p.name for p in block.parameters}) != len(block.parameters) or len(set(ties)) != len(ties):
            raise PlanError(f"block {i}: two weights have one name, or are tied to one weight; {AGAIN}")
        for p in block.parameters:
            if len(p.shape) > MAX_DIMS:
                raise PlanError(f"block {i}: weight {p.name!r} has {len(p.shape)} dimensions; {AGAIN}")
            if p.tied_to is not None and (i != len(blocks) - 1 or owned.get(p.tied_to) != p.shape):
                raise PlanError(
                    f"block {i}: weight {p.name!r} is tied, but only the head may share a weight of block 0, in its shape; {AGAIN}"
                )


def check_policy(plan: Plan, shape: Shape) -> None:
    """The policy is legal under the semantics; else PlanError with what to change."""
    policy, semantics = plan.policy, plan.semantics
    if shape.eager and (semantics.clip_norm is not None or semantics.on_nonfinite != "stop"):
        raise PlanError(
            "policy: eager updates use a gradient before the norm of all is known; use barrier or deferred, "
            "or --clip-norm none with on_nonfinite stop"
        )
    if policy.group_micro_batches > shape.n_micro_batches:
        raise PlanError(
            f"policy: groups of {policy.group_micro_batches} micro-batches, but a step has {shape.n_micro_batches}; {AGAIN}"
        )
    keep = policy.keep_blocks
    if len(set(keep)) != len(keep) or any(not 0 < b < shape.head for b in keep):
        raise PlanError(f"policy: keep_blocks must name layers (1 to {shape.head - 1}), each once; {AGAIN}")
    resident, spill = policy.resident_blocks, policy.spill_blocks
    if len(set(resident)) != len(resident) or any(not 0 <= b <= shape.head for b in resident):
        raise PlanError(f"policy: resident_blocks must name blocks (0 to {shape.head}), each once; {AGAIN}")
    if len(set(spill)) != len(spill) or any(not 0 <= b < shape.head - 1 for b in spill):
        raise PlanError(f"policy: spill_blocks must name blocks below the last layer (0 to {shape.head - 2}), each once; {AGAIN}")
    if odd := [b for b in keep if b - 1 in shape.spilled]:
        raise PlanError(f"policy: block {odd[0]} keeps its activations, but its input spills; {AGAIN}")
    if policy.storage == "split" and (semantics.compute_dtype, semantics.master_dtype) != ("bf16", "fp32"):
        raise PlanError("policy: storage split cuts an fp32 master into a bf16 weight and the rest; use mirrored with other dtypes")
    if semantics.compute_dtype == "fp32" and semantics.master_dtype == "bf16":
        raise PlanError("semantics: fp32 compute needs an fp32 master; change compute_dtype or master_dtype")


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
    owned = [b.host_elements for b in blocks]
    layer, vocab = max(elements[1:-1]), max(elements[0], elements[-1])
    compute, master = ITEM_BYTES[semantics.compute_dtype], ITEM_BYTES[semantics.master_dtype]
    final = ITEM_BYTES[semantics.gradient_dtype]
    wire = final if shape.reduced else compute  # of a layer's gradient on the link
    vocab_wire = FP32 if shape.vocab_slot_is_sum else final
    kept = final if shape.reduced else FP32  # of a layer's gradient on the host

    def device(n_slots: int, n_bytes: int) -> _Need:
        return _Need(Place.DEVICE, n_slots, lambda _: n_bytes)

    def host(n_bytes: Callable[[int], int]) -> _Need:
        return _Need(Place.HOST, shape.n_blocks, n_bytes, exact=True)

    def ring_bytes(i: int) -> int:
        last = sizes.get("host_gradients", 0) - 1
        return elements[0] * vocab_wire if i == 0 else elements[-1] * vocab_wire if i == last else layer * kept

    unspilled = [blocks[b].boundary_bytes for b in shape.unspilled]
    spilled = [blocks[b].boundary_bytes for b in shape.spilled]
    resident = [elements[b] * compute for b in shape.resident]
    n_ring_slots, ring_slot_bytes = 3 * group if spilled else 0, max(spilled, default=0)

    def boundary_bytes(i: int) -> int:
        return unspilled[i // group] if i < shape.first_ring_slot else ring_slot_bytes

    needs = {
        "weights": device(plan.policy.prefetch_depth + 1, layer * compute),
        "vocab_weights": device(1, vocab * compute),
        "boundaries": _Need(Place.DEVICE, shape.first_ring_slot + n_ring_slots, boundary_bytes),
        "gradients": device(plan.policy.gradient_slots, layer * wire),
        "vocab_gradients": device(1, vocab * vocab_wire),
        "moments": host(lambda b: owned[b] * 2 * FP32),
        "host_gradients": host(lambda b: elements[b] * (vocab_wire if shape.vocab(b) else kept)),
        "norm": _Need(Place.HOST, 1, lambda _: NORM_BYTES * sum(len(b.parameters) for b in blocks)),
    }
    if "masters" in shape.state:
        needs["masters"] = host(lambda b: owned[b] * master)
    else:
        needs["remainders"] = host(lambda b: owned[b] * (master - compute))
    if resident:
        needs["resident_weights"] = _Need(Place.DEVICE, len(resident), lambda i: resident[i], exact=True)
    if spilled:
        needs["spilled"] = _Need(Place.HOST, len(spilled) * group, lambda i: spilled[i // group])
    if shape.ring:
        needs["host_gradients"] = _Need(Place.HOST, None, ring_bytes, least=3)
    if shape.upload == "host_weights":
        needs["host_weights"] = host(lambda b: owned[b] * compute)
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
    vocab = shape.vocab(b)
    weights: _Slots = [shape.weights(b)]
    gradient: _Slots = [("vocab_gradients", 0) if vocab else ("gradients", None)]
    host_gradient: _Slots = [("host_gradients", None if shape.ring and not vocab else _last_or(b, shape))]
    below: _Slots = [shape.boundary(b - 1, m)] if b else []
    above: _Slots = [shape.boundary(b, m)] if b < shape.head else []
    both: _Slots = host_gradient + ([("host_gradients", -1)] if b == 0 and shape.tied else [])
    own: _Slots = [(shape.upload, b)]
    match op.kind:
        case Kind.LOAD:
            return own + ([(shape.upload, 0)] if b == shape.head and shape.tied else []), weights
        case Kind.FORWARD:
            return weights + below, above
        case Kind.LOSS:
            sums, gradients = _expected_sums(shape, op, gradient)
            return weights + below + sums, below + gradients
        case Kind.BACKWARD:
            sums, gradients = _expected_sums(shape, op, gradient)
            return (weights if b else []) + above + below + sums, below + gradients
        case Kind.OFFLOAD:
            return gradient, host_gradient if shape.reduced else [("staging", -1 if vocab else None)]
        case Kind.ACCUMULATE:
            return [("staging", -1 if vocab else None), *host_gradient], host_gradient
        case Kind.NORM:
            return [*both, ("norm", 0)], [("norm", 0)]
        case Kind.UPDATE:
            state: _Slots = [(arena, b) for arena in shape.state]
            copy = own if shape.upload not in shape.state else []
            return both + ([] if shape.eager else [("norm", 0)]) + state, state + copy
        case Kind.SPILL:
            return above, [("spilled", shape.spilled[b] * shape.group + m % shape.group)]
        case Kind.FETCH:
            return [("spilled", shape.spilled[b] * shape.group + m % shape.group)], above
        case _:
            assert_never(op.kind)


def _last_or(block: int, shape: Shape) -> int:
    """The slot of a block in `host_gradients`; -1, the last one, for the head."""
    return -1 if block == shape.head else block


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


def _expected_ops(shape: Shape) -> Iterator[tuple[Kind, int, int | None]]:
    """Every op a step must have exactly once, most loads aside. Lazy: a hostile plan may promise 2^50 micro-batches."""
    for b in range(shape.n_blocks):
        yield Kind.NORM, b, None
        yield Kind.UPDATE, b, None
        if b in shape.resident:
            yield Kind.LOAD, b, None
        if shape.reduced:
            yield Kind.OFFLOAD, b, None
        for m in range(shape.n_micro_batches):
            if b == shape.head:
                yield Kind.LOSS, b, m
            else:
                yield Kind.FORWARD, b, m
                yield Kind.BACKWARD, b, m
            if b in shape.spilled:
                yield Kind.SPILL, b, m
                yield Kind.FETCH, b, m
            if not shape.reduced:
                yield Kind.OFFLOAD, b, m
                yield Kind.ACCUMULATE, b, m


def check_ops(plan: Plan, shape: Shape) -> None:
    """Each op is one that the step must have, once (loads of streamed blocks: any number), and uses the slots of the contract."""
    sizes = {a.name: len(a.slot_bytes) for a in plan.arenas}
    seen: set[tuple[Kind, int, int | None]] = set()
    for i, op in enumerate(plan.ops):
        is_head = op.block == shape.head
        if (op.kind is Kind.LOSS) != is_head and op.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.LOSS):
            raise wrong(i, op, "the head has a loss op, the other blocks forward and backward")
        if op.kind in (Kind.SPILL, Kind.FETCH) and op.block not in shape.spilled:
            raise wrong(i, op, "under this policy the output of the block does not spill")
        has_micro_batch = op.kind not in (Kind.LOAD, Kind.OFFLOAD, Kind.NORM, Kind.UPDATE) or (
            op.kind is Kind.OFFLOAD and not shape.reduced
        )
        if (op.micro_batch is not None) != has_micro_batch or (op.kind is Kind.ACCUMULATE and shape.reduced):
            raise wrong(i, op, f"no such op in a plan with groups of {shape.group} micro-batches")
        key = op.kind, op.block, op.micro_batch
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
            kind, block, micro_batch = key
            m = "" if micro_batch is None else f", micro-batch {micro_batch}"
            raise PlanError(f"the step has no {kind} of block {block}{m}; {AGAIN}")


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
