"""Facts that determine the ops and slots of a plan, an independent reading of `docs/plan-language.md`.

They follow from workload, semantics and a legal policy. Only the checker uses them, never the compiler.
"""

import math
from collections.abc import Iterable

from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Op, Plan, Update
from penstock.runtime.plan.packed import is_packed, layout
from penstock.runtime.plan.workload import ALIGN_ELEMENTS, ITEM_BYTES, Parameter

FP32 = ITEM_BYTES["fp32"]
ALIGN_BYTES = ALIGN_ELEMENTS * ITEM_BYTES["bf16"]  # alignment of slots and of tensors in them, because results depend on alignment
AGAIN = "make the plan again with `penstock plan`"


def wrong(i: int, op: Op, message: str) -> PlanError:
    return PlanError(f"op {i} ({op.name}): {message}; {AGAIN}")


class Shape:
    """Sets of blocks and sizes in bytes. Dicts map a block to its slot position; other blocks have none."""

    def __init__(self, plan: Plan) -> None:
        s, policy, blocks = plan.semantics, plan.policy, plan.workload.blocks
        self.n_blocks, self.head = len(blocks), len(blocks) - 1
        self.n_micro_batches, self.group = s.n_micro_batches, policy.accumulation_group
        self.sum_groups = s.sum_groups  # groups of micro-batches with separate sums
        self.ranks = s.ranks  # data-parallel; the plan is one rank's part
        self.reduced = policy.accumulation_group >= s.n_micro_batches  # one group of micro-batches
        self.summing = frozenset(policy.sum_blocks)  # gradient sums on the device have slots of their own
        of_head = blocks[self.head].parameters
        self.tied = any(p.tied_to is not None and not p.frozen for p in of_head)  # a trained weight belongs to two blocks
        self.shares_weight = any(p.tied_to is not None for p in of_head)  # trained or frozen, the head uses a weight of block 0
        self.eager = policy.update is Update.EAGER
        self.boundary_stride = policy.boundary_stride
        # Slot positions by block
        self.resident = _places(policy.resident_blocks)  # weights remain on the device
        self.shadows = _places(policy.speculate_blocks)
        self.on_device = _places(policy.device_blocks)  # state is on the device
        self.on_disk = frozenset(policy.disk_blocks)  # frozen weights are read from disk
        self.offloaded = frozenset(policy.spill_blocks)  # output is offloaded
        self.shared = {b for b in range(self.head - 1) if b % policy.boundary_stride}  # output is recomputed
        self.trained = {b for b, block in enumerate(blocks) if not all(p.frozen for p in block.parameters)}
        self.separate = {b for b in self.on_device if any(p.frozen for p in blocks[b].parameters)}  # frozen weights on the host
        # Blocks with micro-batches summed on the device: the gradient is offloaded once, complete
        self.summed_there = {b for b in range(self.n_blocks) if self.reduced or b in self.summing or b in self.separate}
        self.summed_in_place = self.separate | (self.summing & self.on_device.keys())  # the sum is the gradient
        self.joins_tied = self.tied and self.head in self.summing and s.ranks == 1  # the device adds both gradients
        # Blocks that compute with the weights in their state on the device
        whole_there = {b for b in self.on_device if b in self.resident and b not in self.separate}
        self.in_place = {b for b in whole_there if not any(p.tied_to is not None for p in blocks[b].parameters)}
        self.resident = _places(b for b in policy.resident_blocks if b not in self.in_place)
        self.squared = {  # gradient is squared on the device
            b
            for b in range(self.n_blocks)
            if b in self.on_device or (policy.square_on_device and b in self.summed_there and not self.sums_itself(b))
        }
        quantized = {b for b in range(1, self.head) if any(_is_quantized(plan, p) for p in blocks[b].parameters)}
        self.packed = quantized if s.products == "compute" else set[int]()  # layers that are unpacked before they compute
        self.first_trained = min(self.trained, default=self.n_blocks)  # backward ends here
        self.n_streaming = 2 if self.packed else policy.prefetch_depth + 2  # slots of `weights` for streamed blocks
        self.item_bytes = ITEM_BYTES[s.compute_dtype]  # of a weight element
        # Per block: weight and gradient elements of a slot, elements that a rank updates, and sums of squares that it computes
        self.elements, self.trained_elements = [b.slot_elements for b in blocks], [b.trained_elements for b in blocks]
        self.owned, self.n_squares = [b.state_elements for b in blocks], [len(b.trained) for b in blocks]
        if s.ranks > 1:  # equal shards, each made of one piece per sum group, each piece of whole units
            unit = s.ranks * s.sum_groups * ALIGN_ELEMENTS
            self.owned = [-(-b.state_elements // unit) * unit // s.ranks for b in blocks]
            parts = [n + self.owned[0] * (self.tied and b == self.head) for b, n in enumerate(self.owned)]
            self.trained_elements = [n * s.ranks for n in parts]
            frozen = [sum(-(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for p in b.parameters if p.frozen) for b in blocks]
            self.elements = [n + m for n, m in zip(self.trained_elements, frozen, strict=True)]
            # Tiles of 2^16 elements, plus one for each end of a parameter or a piece
            self.n_squares = [n // 2**16 + len(b.parameters) + s.sum_groups for b, n in zip(blocks, self.owned, strict=True)]
        for b in quantized - self.packed:  # products use quantized weights as they are: slots hold their bytes
            self.elements[b] = self.trained_elements[b] + _frozen_bytes(plan, b) // self.item_bytes
        # Bytes per block: masters (one or two arrays) and moments; frozen weights; both in host memory
        masters = {"fp32": [4.0], "bf16": [2.0], "split24": [2.0, 1.0]}[s.master_dtype]
        if s.master_dtype == "fp32" and s.compute_dtype == "bf16":
            masters = [2.0, 2.0]
        of_element = [*masters, *(s.optimizer.moment_bytes / len(s.optimizer.moments) for _ in s.optimizer.moments)]
        self.own_bytes = [_own_bytes([math.ceil(n * size) for size in of_element]) for n in self.owned]
        self.frozen_bytes = [_frozen_bytes(plan, b) for b in range(self.n_blocks)]
        in_memory = [n * (b not in self.on_disk) for b, n in enumerate(self.frozen_bytes)]
        self.host_bytes = [n + (b not in self.on_device) * self.own_bytes[b] for b, n in enumerate(in_memory)]
        # Gradient bytes per block of a rank's shard: on device and link, and on the host
        parts = [n // s.ranks for n in self.trained_elements]
        if self.joins_tied:  # the head's gradient without the tied weight
            parts[self.head] = self.owned[self.head]
        self.sent_bytes = [n * self._wire_bytes(b, ITEM_BYTES[s.gradient_dtype]) for b, n in enumerate(parts)]
        self.arrived_bytes = [self.sent_bytes[b] if b in self.summed_there else n * FP32 for b, n in enumerate(parts)]
        self.boundary_bytes = [b.boundary_bytes for b in blocks]
        self.saved_bytes = {b: _saved_bytes(plan, b) for b in policy.offload_blocks}

    def _wire_bytes(self, block: int, gradient_bytes: int) -> int:
        """Bytes per element of a block's gradient on device and link. Sums of the vocabulary's gradient are fp32."""
        if block in self.summed_in_place or self.sums_itself(block):
            return FP32
        if block in self.summed_there:
            return gradient_bytes
        return FP32 if self.is_vocab(block) else self.item_bytes

    def is_vocab(self, block: int) -> bool:
        """True for the embedding and the head."""
        return block in (0, self.head)

    def sums_itself(self, block: int) -> bool:
        """True if the gradient of the block is itself a sum, because its weight is tied and the host adds both parts."""
        return self.tied and self.is_vocab(block) and not self.joins_tied

    def is_recomputed(self, block: int) -> bool:
        """True if the block's output is recomputed: it shares slots, and a backward reaches the last layer of its run."""
        stride = self.boundary_stride
        return block in self.shared and min(block // stride * stride + stride, self.head - 1) >= self.first_trained

    def summed_with(self, micro_batch: int) -> list[range]:
        """Micro-batches in each sum after this one was added: first those of its sum group so far. If the group is complete, then
        also those of each waiting left half that its sum is added to, as in a binary tree."""
        of_a_group = self.n_micro_batches // self.sum_groups
        first, n = micro_batch // of_a_group * of_a_group, of_a_group
        sums = [range(first, micro_batch + 1)]
        while sums[-1].stop - sums[-1].start == n and first % (2 * n):  # a right half of the tree
            first, n = first - n, 2 * n
            sums.append(range(first, micro_batch + 1))
        return sums


def _own_bytes(arrays: list[int]) -> int:
    """Total size of arrays at aligned offsets, with no two offsets a multiple of 256 MiB apart."""
    places = list[int]()
    end = 0
    for n_bytes in arrays:
        while n_bytes and any((end - place) % 2**28 == 0 for place in places):
            end += ALIGN_BYTES
        places.append(end)
        end += n_bytes
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES


def _frozen_bytes(plan: Plan, block: int) -> int:
    """Host bytes of the frozen weights that a block owns, each aligned: packed, or in the compute dtype."""
    item_bytes, total = ITEM_BYTES[plan.semantics.compute_dtype], 0
    for p in plan.workload.blocks[block].parameters:
        if _is_quantized(plan, p):
            total += -(-layout(p.shape, plan.semantics.base).n_bytes // ALIGN_BYTES) * ALIGN_BYTES
        elif p.frozen and p.tied_to is None:
            total += -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS * item_bytes
    return total


def _is_quantized(plan: Plan, p: Parameter) -> bool:
    return p.frozen and p.tied_to is None and is_packed(p.name, p.shape, plan.semantics.base)


def _saved_bytes(plan: Plan, block: int) -> int:
    """Bytes of the tensors, each aligned, that a layer saves in addition to its input, for the larger of both micro-batch sizes."""
    of_block = [blocks[block] for blocks in (plan.workload.blocks, plan.workload.smaller) if blocks]
    tiers = [tier for variant in of_block for tier in variant.tiers if tier.saved is plan.policy.saved(block)]
    return max(tier.saved_bytes + tier.n_saved * ALIGN_BYTES for tier in tiers)


def _places(blocks: Iterable[int]) -> dict[int, int]:
    return {b: i for i, b in enumerate(blocks)}
