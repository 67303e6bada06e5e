"""Which arenas must a plan have, and how large?

As a verifier works it out from the workload, the semantics and the policy. Only the checker uses it, never what makes plans.
"""

from collections.abc import Callable
from dataclasses import dataclass

from runtime.errors import PlanError
from runtime.plan import Arena, Place, Plan
from runtime.plan.packed import is_packed, packed_bytes
from runtime.plan.workload import ALIGN_ELEMENTS, ITEM_BYTES

from .shape import AGAIN, Shape

ALIGN_BYTES = ALIGN_ELEMENTS * ITEM_BYTES["bf16"]  # where a slot may start: results depend on alignment
EXCHANGED_BYTES = 2**28  # of a sum that ranks exchange at a time
FP32, NORM_BYTES = ITEM_BYTES["fp32"], 8  # the norm keeps one fp64 sum of squares for each weight


@dataclass(frozen=True, slots=True)
class _Need:
    """What an arena must be: where, how many slots (None: at least `least`), and the bytes of slot i, from one on to the byte."""

    place: Place
    n_slots: int | None
    slot_bytes: Callable[[int], int]
    exact_from: int | None = None
    least: int = 1


def _needs(plan: Plan, shape: Shape, sizes: dict[str, int]) -> dict[str, _Need]:
    """The arenas that the semantics and the policy call for; `sizes` holds the number of slots that each arena has."""
    blocks, semantics, group = plan.workload.blocks, plan.semantics, shape.group
    elements = [b.slot_elements for b in blocks]  # of weights, with tied ones
    trained, owned = [b.trained_elements for b in blocks], [b.state_elements for b in blocks]
    if shape.ranks > 1:  # equal parts, each of whole pieces, each of whole units
        owned = shape.part_elements(blocks)
        elements = [(n + (owned[0] if b.tied else 0)) * shape.ranks for b, n in zip(blocks, owned, strict=True)]
        trained = elements
    frozen_bytes = [_frozen_bytes(plan, b) for b in range(shape.n_blocks)]
    summed = [0 if b in shape.apart else n for b, n in enumerate(trained)]  # but for what has its sum where its gradient is
    layer, vocab = max(summed[1:-1]), max(summed[0], summed[-1])
    compute, master = ITEM_BYTES[semantics.compute_dtype], ITEM_BYTES[semantics.master_dtype]
    final = ITEM_BYTES[semantics.gradient_dtype]
    wire = final if shape.reduced else compute  # of a layer's gradient on the link
    vocab_wire = FP32 if shape.vocab_slot_is_sum else final
    kept = final if shape.reduced else FP32  # of a layer's gradient on the host
    resident = [elements[b] for b in shape.resident]
    standing = [blocks[b].boundary_bytes for b in shape.standing]
    spilled = [blocks[b].boundary_bytes for b in shape.spilled]
    shared = [0] * len(set(shape.shared.values()))  # what no block has for itself
    for b, i in shape.shared.items():
        shared[i] = max(shared[i], blocks[b].boundary_bytes)
    own, activations = standing + shared, standing + shared + [max(spilled, default=0)]
    squares = [NORM_BYTES * len(blocks[b].trained) for b in shape.squared]
    norms = [NORM_BYTES * sum(len(b.trained) for b in blocks), *squares]
    weights = [max(elements[1:-1]), max(elements[0], elements[-1]), *resident]
    uploaded_bytes = max(compute * owned[b] + frozen_bytes[b] for b in range(1, shape.head))  # all that is uploaded of a layer
    sent = [0 if b in shape.on_device else n for b, n in enumerate(trained)]  # of gradients that the host gets
    sent = [n // shape.ranks for n in sent]
    leaving_layer, leaving_vocab = max(sent[1:-1]), max(sent[0], sent[-1])
    wires = {b: FP32 if b in shape.apart else vocab_wire if shape.vocab(b) else wire for b in shape.on_device}
    staying = [trained[b] * n_bytes for b, n_bytes in wires.items()]
    per_element = master + 2 * FP32  # the master, in one piece or in two, and the two moments
    of_state = [(0 if b in shape.on_device else owned[b] * per_element) + frozen_bytes[b] for b in range(shape.n_blocks)]
    of_state += [owned[b] * per_element for b in shape.shadows]
    on_device = [owned[b] * per_element for b in shape.on_device]
    first_vocab_sum = shape.n_layer_sums * shape.sums_layers
    n_sums = first_vocab_sum + (shape.n_sums - shape.tied_sum if shape.reduced else 0)
    n_arrived = shape.n_blocks if shape.reduced else shape.n_blocks * shape.n_sums
    last = {name: sizes.get(name, 0) - 1 for name in ("host_gradients", "staging")}
    staged_layer, staged_vocab = leaving_layer * wire, leaving_vocab * FP32

    def arrived_bytes(i: int) -> int:
        i = i if shape.ring else i % shape.n_blocks
        if i in (0, last["host_gradients"] if shape.ring else shape.head):
            return sent[0 if i == 0 else -1] * vocab_wire
        return (leaving_layer if shape.ring else sent[i]) * kept

    def gradient_bytes(i: int) -> int:
        if i > shape.gradient_slots:
            return staying[i - shape.gradient_slots - 1]
        return leaving_layer * wire if i < shape.gradient_slots else leaving_vocab * vocab_wire

    needs = {
        "weights": _Need(
            Place.DEVICE,
            shape.n_streaming + 1 + len(resident),
            lambda i: compute * weights[max(0, i - shape.n_streaming + 1)],
            exact_from=shape.n_streaming + 1,
        ),
        "activations": _Need(
            Place.DEVICE,
            len(own) * group + (2 * group + 1 if spilled else 0),
            lambda i: activations[min(i // group, len(own))],
        ),
        "gradients": _Need(Place.DEVICE, shape.gradient_slots + 1 + len(staying), gradient_bytes),
        "state": _Need(Place.HOST, len(of_state), lambda i: of_state[i], exact_from=0),
        "host_gradients": _Need(
            Place.HOST, None if shape.ring else n_arrived, arrived_bytes, exact_from=None if shape.ring else 0, least=3
        ),
        "norm": _Need(Place.HOST, 1 + len(squares), lambda i: norms[i]),
    }
    if n_sums:
        # A rank's only gradient of a layer is no sum yet
        of_layer = (compute if shape.ranks > 1 and shape.n_micro_batches == 1 else FP32) * layer
        needs["sums"] = _Need(Place.DEVICE, n_sums, lambda i: of_layer if i < first_vocab_sum else FP32 * vocab)
    if shape.ranks > 1:
        # What is sent and what is received of a sum, of the largest part or of as much as goes at a time
        at_a_time = min(max(shape.part_elements(blocks)), EXCHANGED_BYTES // FP32 // shape.ranks // ALIGN_ELEMENTS * ALIGN_ELEMENTS)
        needs["received"] = _Need(Place.DEVICE, 1, lambda i: 2 * shape.ranks * FP32 * at_a_time)
        # Of each rank: tiles of 2^16 elements, one more for each end of a parameter or a piece, the losses, and a wish to end
        n_ends = sum(n // 2**16 + len(b.parameters) + semantics.sum_groups for b, n in zip(blocks, owned, strict=True))
        norms[0] = NORM_BYTES * shape.ranks * (n_ends + shape.n_micro_batches + 1)
    if on_device:
        needs["device_state"] = _Need(Place.DEVICE, len(on_device), lambda i: on_device[i], exact_from=0)
    if shape.packed:
        needs["packed"] = _Need(Place.DEVICE, shape.n_packed, lambda i: uploaded_bytes)
    if squares:
        needs["squares"] = _Need(Place.DEVICE, len(squares), lambda i: squares[i])
    if saved := [_saved_bytes(plan, b) for b in shape.offloaded]:
        needs["saved"] = _Need(Place.DEVICE, None, lambda i: max(saved))
        needs["offloaded"] = _Need(Place.HOST, len(saved) * group, lambda i: saved[i // group])
    if spilled:
        needs["spilled"] = _Need(Place.HOST, len(spilled) * group, lambda i: spilled[i // group])
    if not shape.reduced:
        needs["staging"] = _Need(Place.HOST, None, lambda i: staged_vocab if i == last["staging"] else staged_layer, least=2)
    return needs


def _frozen_bytes(plan: Plan, block: int) -> int:
    """What the frozen weights that a block owns take on the host, each at an aligned place: packed, or as it is computed with."""
    base, total = plan.semantics.base, 0
    for p in plan.workload.blocks[block].parameters:
        if p.frozen and p.tied_to is None and is_packed(p.name, p.shape, base):
            total += -(-packed_bytes(p.shape, base) // ALIGN_BYTES) * ALIGN_BYTES
        elif p.frozen and p.tied_to is None:
            total += -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS * ITEM_BYTES[plan.semantics.compute_dtype]
    return total


def _saved_bytes(plan: Plan, block: int) -> int:
    """Of what a layer saves of one micro-batch besides its input, each tensor at an aligned place."""
    tier = next(tier for tier in plan.workload.blocks[block].tiers if tier.saved is plan.policy.saved(block))
    return tier.saved_bytes + tier.n_saved * ALIGN_BYTES


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
            is_exact = need.exact_from is not None and i >= need.exact_from
            if n_bytes < needed or (is_exact and n_bytes != needed):
                raise PlanError(f"arena {name}: slot {i} has {n_bytes} bytes, but {needed} go into it; {AGAIN}")
