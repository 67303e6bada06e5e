"""Facts of a plan that decide how its ops and slots must look, as the checker reads `docs/plan-language.md`.

They follow from workload, semantics and a legal policy. Only the checker uses them, never what makes plans.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import PlanError
from runtime.plan import Op, Plan, Update
from runtime.plan.packed import is_packed, packed_bytes
from runtime.plan.workload import ALIGN_ELEMENTS, ITEM_BYTES

FP32 = ITEM_BYTES["fp32"]
ALIGN_BYTES = ALIGN_ELEMENTS * ITEM_BYTES["bf16"]  # where slots, and tensors in them, may start: results depend on alignment
AGAIN = "make the plan again with `penstock plan`"


def wrong(i: int, op: Op, what: str) -> PlanError:
    """The error that op number i of a plan is wrong, in one line."""
    return PlanError(f"op {i} ({op.name}): {what}; {AGAIN}")


@dataclass(frozen=True, slots=True)
class Shape:
    """Names and places; where a dict gives a block its place, the blocks that are not in it have none."""

    n_blocks: int
    head: int
    n_micro_batches: int
    group: int
    sum_groups: int  # of micro-batches, each with a sum of its own
    ranks: int  # that share the step, of which the plan is one's part
    reduced: bool  # one group: a gradient leaves the device once, complete
    tied: bool  # a weight of two blocks is trained
    shares_weight: bool  # trained or not, the head uses a weight that block 0 owns
    eager: bool
    first_trained: int  # the lowest block of which anything is trained: no backward goes below it
    boundary_stride: int
    n_streaming: int  # slots of `weights` for layers that come and go
    n_packed: int  # slots of `packed`
    gradient_slots: int  # for layers
    resident: dict[int, int]  # block: its place among those whose weights stay
    spilled: dict[int, int]  # block: its place among those whose output spills
    offloaded: dict[int, int]  # layer: its place among those whose saved activations go to the host
    shared: dict[int, int]  # block whose output is computed again: its place among those that share slots
    standing: dict[int, int]  # block: its place among those whose output has slots of its own
    shadows: dict[int, int]  # speculating block: its place among them
    squared: dict[int, int]  # block whose gradient's squares the device sums: its place among them
    on_device: dict[int, int]  # block whose state the device holds: its place among them
    trained: dict[int, int]  # block of which anything is trained: its place among them
    apart: dict[int, int]  # block whose state the device holds and whose frozen weights the host does: its place among them
    packed: dict[int, int]  # layer that comes packed: its place among them
    sizes: dict[str, int]  # slots of each arena that there is
    # Bytes of an element of weights, of a layer's gradient on the link, of the final gradient, and of masters and moments
    item_bytes: int
    gradient_bytes: int
    state_item_bytes: int
    # Of each block: elements of weights in a slot, of gradients, of what a rank updates; bytes of what is frozen, of the output, of
    # what is saved, and how many sums of squares a rank makes
    elements: list[int]
    trained_elements: list[int]
    owned: list[int]
    frozen_bytes: list[int]
    boundary_bytes: list[int]
    saved_bytes: dict[int, int]
    n_squares: list[int]

    @staticmethod
    def of(plan: Plan) -> "Shape":
        """What the workload, the semantics and the policy of a plan say of its ops."""
        of, policy, blocks = plan.semantics, plan.policy, plan.workload.blocks
        n_blocks, head, ranks, stride = len(blocks), len(blocks) - 1, of.ranks, policy.boundary_stride
        spilled = _places(policy.spill_blocks)
        shared = {b: b % stride - 1 for b in range(head - 1) if b % stride}
        trained = _places(b for b, block in enumerate(blocks) if not all(p.frozen for p in block.parameters))
        on_device = _places(policy.device_blocks)
        packed = [b for b in range(1, head) if any(p.frozen and is_packed(p.name, p.shape, of.base) for p in blocks[b].parameters)]
        tied = any(p.tied_to is not None and not p.frozen for p in blocks[head].parameters)
        squared = [b for b in range(n_blocks) if b in on_device or (policy.square_on_device and not (tied and b in (0, head)))]
        owned, elements = [b.state_elements for b in blocks], [b.slot_elements for b in blocks]
        trained_elements, n_squares = [b.trained_elements for b in blocks], [len(b.trained) for b in blocks]
        if ranks > 1:  # equal parts, each of whole pieces, one for each sum group, each of whole units
            unit = ranks * of.sum_groups * ALIGN_ELEMENTS
            owned = [-(-b.host_elements // unit) * unit // ranks for b in blocks]
            elements = [(n + (owned[0] if b.tied else 0)) * ranks for b, n in zip(blocks, owned, strict=True)]
            trained_elements = elements
            # Tiles of 2^16 elements, one more for each end of a parameter or a piece
            n_squares = [n // 2**16 + len(b.parameters) + of.sum_groups for b, n in zip(blocks, owned, strict=True)]
        return Shape(
            n_blocks=n_blocks,
            head=head,
            n_micro_batches=of.n_micro_batches,
            group=policy.accumulation_group,
            sum_groups=of.sum_groups,
            ranks=ranks,
            reduced=policy.accumulation_group >= of.n_micro_batches,
            tied=tied,
            shares_weight=any(p.tied_to is not None for p in blocks[head].parameters),
            eager=policy.update is Update.EAGER,
            first_trained=min(trained, default=n_blocks),
            boundary_stride=stride,
            n_streaming=1 if packed else policy.prefetch_depth + 1,
            n_packed=policy.prefetch_depth + 1 if packed else 0,
            gradient_slots=policy.gradient_slots,
            resident=_places(policy.resident_blocks),
            spilled=spilled,
            offloaded=_places(policy.offload_blocks),
            shared=shared,
            standing=_places(b for b in range(head) if b not in spilled and b not in shared),
            shadows=_places(policy.speculate_blocks),
            squared=_places(squared),
            on_device=on_device,
            trained=trained,
            apart=_places(b for b in on_device if any(p.frozen for p in blocks[b].parameters)),
            packed=_places(packed),
            sizes={a.name: len(a.slot_bytes) for a in plan.arenas},
            item_bytes=ITEM_BYTES[of.compute_dtype],
            gradient_bytes=ITEM_BYTES[of.gradient_dtype],
            state_item_bytes=of.optimizer.state_bytes(of.master_dtype),  # the master, in one piece or in two, and the moments
            elements=elements,
            trained_elements=trained_elements,
            owned=owned,
            frozen_bytes=[_frozen_bytes(plan, b) for b in range(n_blocks)],
            boundary_bytes=[b.boundary_bytes for b in blocks],
            saved_bytes={b: _saved_bytes(plan, b) for b in policy.offload_blocks},
            n_squares=n_squares,
        )

    def is_vocab(self, block: int) -> bool:
        """Whether it is the embedding or the head."""
        return block in (0, self.head)

    def is_recomputed(self, block: int) -> bool:
        """Whether its output is computed again: it shares slots, and a backward comes to the last layer of its run."""
        stride = self.boundary_stride
        return block in self.shared and min(block // stride * stride + stride, self.head - 1) >= self.first_trained

    def summed_with(self, micro_batch: int) -> list[range]:
        """The micro-batches that are in a sum together once this one is: of its group so far; then, if that is whole, with those of
        each left half that waits for it, ever more."""
        of_a_group = self.n_micro_batches // self.sum_groups
        first, n = micro_batch // of_a_group * of_a_group, of_a_group
        found = [range(first, micro_batch + 1)]
        while found[-1].stop - found[-1].start == n and first % (2 * n):  # a right half
            first, n = first - n, 2 * n
            found.append(range(first, micro_batch + 1))
        return found

    def sum_place(self, micro_batch: int) -> int:
        """Of its group's sum: left halves that wait have those before it."""
        place, n = 0, self.n_micro_batches // 2
        while n >= self.n_micro_batches // self.sum_groups:
            place, micro_batch, n = place + (micro_batch >= n), micro_batch % n, n // 2
        return place


def _frozen_bytes(plan: Plan, block: int) -> int:
    """What the frozen weights that a block owns take on the host, each at an aligned place: packed, or as it is computed with."""
    base, item_bytes, total = plan.semantics.base, ITEM_BYTES[plan.semantics.compute_dtype], 0
    for p in plan.workload.blocks[block].parameters:
        if p.frozen and p.tied_to is None and is_packed(p.name, p.shape, base):
            total += -(-packed_bytes(p.shape, base) // ALIGN_BYTES) * ALIGN_BYTES
        elif p.frozen and p.tied_to is None:
            total += -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS * item_bytes
    return total


def _saved_bytes(plan: Plan, block: int) -> int:
    """What a layer saves of one micro-batch, the smaller last one included, besides its input: each tensor at an aligned place."""
    of_block = [blocks[block] for blocks in (plan.workload.blocks, plan.workload.smaller) if blocks]
    tiers = [tier for of in of_block for tier in of.tiers if tier.saved is plan.policy.saved(block)]
    return max(tier.saved_bytes + tier.n_saved * ALIGN_BYTES for tier in tiers)


def _places(blocks: Iterable[int]) -> dict[int, int]:
    return {b: i for i, b in enumerate(blocks)}
