"""What of a plan decides how its arenas and ops must look?

The few facts that follow from workload, semantics and policy, as the checker reads `runtime/plan/plan.py`. Only the checker uses
them, never what makes plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.errors import PlanError
from runtime.plan import Op, Plan, Update
from runtime.plan.packed import is_packed
from runtime.plan.workload import ALIGN_ELEMENTS, Block

Expected = tuple[str, range]  # an arena, and the slots of it that will do

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

    @staticmethod
    def of(plan: Plan) -> "Shape":
        """What the workload, the semantics and the policy of a plan say of its ops."""
        policy, blocks, base = plan.policy, plan.workload.blocks, plan.semantics.base
        n_blocks, head = len(blocks), len(blocks) - 1
        stride, spills = policy.boundary_stride, frozenset(policy.spill_blocks)
        shared = {b: b % stride - 1 for b in range(head - 1) if b % stride}
        n_micro_batches, group = plan.semantics.n_micro_batches, policy.accumulation_group
        trained = _places(b for b, block in enumerate(blocks) if not all(p.frozen for p in block.parameters))
        on_device = _places(b for b in sorted(set(policy.device_blocks)) if b < n_blocks)
        packed = [b for b in range(1, head) if any(p.frozen and is_packed(p.name, p.shape, base) for p in blocks[b].parameters)]
        return Shape(
            n_blocks=n_blocks,
            head=head,
            n_micro_batches=n_micro_batches,
            group=group,
            sum_groups=plan.semantics.sum_groups,
            ranks=plan.semantics.ranks,
            reduced=group >= n_micro_batches,
            tied=any(p.tied_to is not None and not p.frozen for p in blocks[head].parameters),
            shares_weight=any(p.tied_to is not None for p in blocks[head].parameters),
            eager=policy.update is Update.EAGER,
            first_trained=min(trained, default=n_blocks),
            boundary_stride=stride,
            n_streaming=1 if packed else policy.prefetch_depth + 1,
            n_packed=policy.prefetch_depth + 1 if packed else 0,
            gradient_slots=policy.gradient_slots,
            resident=_places(sorted(set(policy.resident_blocks))),
            spilled=_places(sorted(spills)),
            offloaded=_places(sorted(set(policy.offload_blocks))),
            shared=shared,
            standing=_places(b for b in range(head) if b not in spills and b not in shared),
            shadows=_places(b for b in policy.speculate_blocks if b < n_blocks),
            squared=_places(b for b in sorted(set(policy.square_blocks)) if b < n_blocks),
            on_device=on_device,
            trained=trained,
            apart=_places(b for b in on_device if any(p.frozen for p in blocks[b].parameters)),
            packed=_places(packed),
        )

    @property
    def vocab_slot_is_sum(self) -> bool:
        """Whether the vocabulary blocks' gradient slot is fp32, and holds the running sum unless it is a rank's part."""
        return self.tied or not self.reduced

    @property
    def tied_sum(self) -> bool:
        """Whether the running sum of a tied weight's gradients has no slot of its own."""
        return self.tied and self.ranks == 1

    @property
    def ring(self) -> bool:
        """Whether layers share a ring of `host_gradients`, instead of a slot each."""
        return self.eager and self.reduced

    @property
    def first_ring_slot(self) -> int:
        """Slots of `activations` from here on belong to no block: outputs that spill, or are computed again, pass through them."""
        return len(self.standing) * self.group

    @property
    def n_normed(self) -> int:
        """Gradients that the norm of a step is made of."""
        return len(self.trained)

    def has_norm(self, block: int) -> bool:
        """Whether there is a norm op for the block: that of the first one that is trained is also there to end the sum."""
        return block in self.trained and (block == self.first_trained or block not in self.squared)

    def has_backward(self, block: int) -> bool:
        """Whether gradients flow through the block, or into it."""
        return block >= self.first_trained

    def is_recomputed(self, block: int) -> bool:
        """Whether its output is computed again: it shares slots, and a backward comes to the last layer of its run."""
        stride = self.boundary_stride
        return block in self.shared and self.has_backward(min(block // stride * stride + stride, self.head - 1))

    def vocab(self, block: int) -> bool:
        """Whether it is the embedding or the head."""
        return block in (0, self.head)

    def weights(self, block: int) -> Expected:
        """Slots that may hold a block's weights, and so below."""
        if block in self.resident:
            return _one("weights", self.n_streaming + 1 + self.resident[block])
        return _one("weights", self.n_streaming) if self.vocab(block) else ("weights", range(self.n_streaming))

    def activation(self, block: int, micro_batch: int) -> Expected:
        if block in self.spilled:
            return "activations", range(self.first_ring_slot, self.first_ring_slot + 2 * self.group + 1)
        first = self.standing[block] if block in self.standing else len(self.standing) + self.shared[block]
        return _one("activations", first * self.group + micro_batch % self.group)

    def state(self, block: int) -> Expected:
        """Where a block's masters and moments lie."""
        return _one("device_state", self.on_device[block]) if block in self.on_device else _one("state", block)

    def source(self, block: int) -> Expected:
        """Where a block's weights are loaded from."""
        return _one("state", block) if block in self.apart else self.state(block)

    def loaded(self, block: int) -> Expected:
        """Where a load puts them: they are computed with there, or unpacked from there."""
        return ("packed", range(self.n_packed)) if block in self.packed else self.weights(block)

    def gradient(self, block: int) -> Expected:
        if block in self.on_device:
            return _one("gradients", self.gradient_slots + 1 + self.on_device[block])
        return _one("gradients", self.gradient_slots) if self.vocab(block) else ("gradients", range(self.gradient_slots))

    def sum(self, block: int, place: int) -> Expected:
        """Where micro-batches are added up on the device: the first sum of a block, or another that is beside it."""
        if not self.vocab(block):
            in_turn = self.n_layer_sums - self.n_sums  # where one sum is exchanged while the next block begins another
            return _one("sums", block % (1 + in_turn) if place == 0 else in_turn + place)
        if self.tied_sum and place == 0:
            return self.gradient(block)
        return _one("sums", self.n_layer_sums * self.sums_layers + place - self.tied_sum)

    @property
    def n_layer_sums(self) -> int:
        """Slots for sums of layers' gradients."""
        return self.n_sums + (self.ranks > 1)

    @property
    def n_sums(self) -> int:
        """Of a block at a time: halves of halves, down to a single group."""
        n, parts = 1, self.sum_groups
        while parts > 1:
            n, parts = n + 1, parts // 2
        return n

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

    @property
    def sums_layers(self) -> bool:
        """Whether the device adds up layers' gradients."""
        return self.reduced and (self.n_micro_batches > 1 or self.ranks > 1)

    def part_elements(self, blocks: Sequence[Block]) -> list[int]:
        """Of what each block owns, how much is a rank's: whole pieces, one for each sum group, of whole units."""
        unit = self.ranks * self.sum_groups * ALIGN_ELEMENTS
        return [-(-b.host_elements // unit) * unit // self.ranks for b in blocks]

    def offload(self, block: int, micro_batch: int) -> Expected:
        return _one("offloaded", self.offloaded[block] * self.group + micro_batch % self.group)

    def spill(self, block: int, micro_batch: int) -> Expected:
        return _one("spilled", self.spilled[block] * self.group + micro_batch % self.group)


def _one(arena: str, index: int) -> Expected:
    return arena, range(index, index + 1)


def _places(blocks: Iterable[int]) -> dict[int, int]:
    return {b: i for i, b in enumerate(blocks)}
