"""A plan without its ops: model, semantics, policy and arenas, and the sizes derived from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from pydantic import Field

from .legality import joins_tied
from .ops import OPS, Kind, Lane, Slot
from .optimizer import STORED_BYTES
from .packed import UNPACK_SCRATCH_BYTES, is_packed, layout
from .policy import BLOCK_LISTS, Policy, Semantics
from .workload import (
    ALIGN_ELEMENTS,
    ITEM_BYTES,
    NORM_TILE_ELEMENTS,
    SLOT_ALIGN_BYTES,
    Block,
    BlockKind,
    Dtype,
    Model,
    Natural,
    Parameter,
    Saved,
    Tier,
    Workload,
    aligned_elements,
)

DISK_PAGE_BYTES = 4096  # alignment of offsets and lengths of direct reads
# Cache aliasing distance: arrays a multiple of it apart make an update 3 times slower (measured)
ALIASED_BYTES = 2**28
EXCHANGED_BYTES = 2**28  # limit of one exchange: a few milliseconds, and no slot for the whole gradient of a vocabulary


class Place(StrEnum):
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Arena:
    """Slots allocated once, before the first step. `slot_bytes` holds the exact size of each slot."""

    name: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    place: Place
    slot_bytes: tuple[Natural, ...]

    @property
    def n_bytes(self) -> int:
        return sum(self.slot_bytes)


@dataclass(frozen=True)
class Setup:
    """Model, semantics, policy and arenas of a plan. Methods derive layouts, op counts and memory."""

    semantics: Semantics
    policy: Policy
    model: Model
    workload: Workload
    arenas: tuple[Arena, ...]

    def arena(self, name: str) -> Arena | None:
        return next((arena for arena in self.arenas if arena.name == name), None)

    def blocks_of(self, micro_batch: int | None) -> tuple[Block, ...]:
        """Return the blocks with the sizes of this micro-batch; None: of a full one."""
        return self.workload.smaller if self.semantics.is_smaller(micro_batch) else self.workload.blocks

    @cached_property
    def reduced(self) -> bool:
        """True if the device sums all micro-batches of every block, because they are one accumulation group."""
        return self.policy.accumulation_group >= self.semantics.n_micro_batches

    def sums_on_device(self, block: int) -> bool:
        """True if the device sums all micro-batches of the block: its gradient crosses the link once a step."""
        return self.reduced or block in self._sum_blocks or self.is_apart(block)

    def sums_in_place(self, block: int) -> bool:
        """True if the fp32 sum is the block's gradient, which the device squares and applies."""
        return self.is_apart(block) or (block in self._sum_blocks and block in self.policy.device_blocks)

    @cached_property
    def _sum_blocks(self) -> frozenset[int]:
        return frozenset(self.policy.sum_blocks)

    @cached_property
    def joins_tied(self) -> bool:
        """True if the device adds the head's gradient of a tied weight to the embedding's."""
        return joins_tied(self.workload, self.semantics, self.policy)

    def computes_in_place(self, block: int) -> bool:
        """True if the block computes with the weights in its state on the device."""
        b, policy = self.workload.blocks[block], self.policy
        return block in policy.device_blocks and block in policy.resident_blocks and not (b.is_mixed or b.tied)

    def stored(self) -> dict[str, str]:
        """Return the dtypes of the arrays in a `state` slot, by name and in order, the uploaded one first. With bf16 compute an
        fp32 master is split into the bf16 weight and its missing 16 bits; split24 stores 8 of these."""
        master, moments = self.semantics.master_dtype, self.semantics.optimizer.moments
        remainder = {"fp32": "int16", "split24": "byte"}.get(master) if self.semantics.compute_dtype == "bf16" else None
        return {**({"weight": "bf16", "remainder": remainder} if remainder else {"master": master}), **moments}

    def state_bytes(self, n_elements: int) -> dict[str, int]:
        """Return the bytes of each array for `n_elements`, a multiple of ALIGN_ELEMENTS. Padding separates arrays that would start
        a multiple of `ALIASED_BYTES` apart, and aligns the slot's end."""
        sizes, begins = {name: int(STORED_BYTES[dtype] * n_elements) for name, dtype in self.stored().items()}, [0]
        *padded, last = sizes
        for name in padded:
            begin = begins[-1] + sizes[name]
            while n_elements and any((begin - earlier) % ALIASED_BYTES == 0 for earlier in begins):
                begin += SLOT_ALIGN_BYTES
            sizes[name] = begin - begins[-1]
            begins.append(begin)
        sizes[last] += -sum(sizes.values()) % SLOT_ALIGN_BYTES
        return sizes

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes with ops: `net` only with several ranks, `disk` only with disk blocks."""
        has = {Lane.NET: self.semantics.ranks > 1, Lane.DISK: bool(self.policy.disk_blocks)}
        return tuple(lane for lane in Lane if has.get(lane, True))

    def regions(self, block: int) -> list[tuple[int, int]]:
        """Return (start, length) of regions sharded across ranks: owned trained weights, then a tied one, cut as its owner."""
        blocks, n_pieces = self.workload.blocks, self.semantics.n_pieces
        owned, ties = blocks[block].piece_elements(n_pieces) * n_pieces, any(p.tied_to is not None for p in blocks[block].trained)
        return [(0, owned), *([(owned, blocks[0].piece_elements(n_pieces) * n_pieces)] if ties else [])]

    def part_elements(self, block: int) -> int:
        """Elements of a rank's shard of masters and moments."""
        if self.semantics.ranks == 1:
            return self.workload.blocks[block].state_elements
        return self.regions(block)[0][1] // self.semantics.ranks

    def gradient_elements(self, block: int) -> int:
        if self.semantics.ranks == 1:
            return self.workload.blocks[block].trained_elements
        return sum(n for _, n in self.regions(block))

    def sent_elements(self, block: int) -> int:
        """Elements of a rank's shard of the gradient, without a tied weight's part that the device adds to the embedding's."""
        is_joined = self.joins_tied and self.workload.blocks[block].kind is BlockKind.HEAD
        return self.workload.blocks[block].state_elements if is_joined else self.gradient_elements(block) // self.semantics.ranks

    def frozen_bytes(self, block: int) -> int:
        """Bytes of the frozen weights that a block owns in host memory; the ranks of a host share one copy."""
        return sum(self.stored_bytes(p) for p in self.workload.blocks[block].parameters if p.frozen and p.tied_to is None)

    def read_bytes(self, block: int) -> int:
        """Bytes of a disk read of the block's frozen weights, in whole pages."""
        return -(-self.frozen_bytes(block) // DISK_PAGE_BYTES) * DISK_PAGE_BYTES

    def uploaded(self, block: int) -> tuple[dict[str, int], int]:
        """Return byte offsets of owned weights in the upload slot, by name, and its bytes. Trained ones, of all ranks, are
        first."""
        b, item, places = self.workload.blocks[block], ITEM_BYTES[self.semantics.compute_dtype], dict[str, int]()
        offset = item * self.gradient_elements(block)
        for p in b.parameters:
            if p.frozen and p.tied_to is None:
                places[p.name] = offset
                offset += self.stored_bytes(p)
        trained = b.offsets(owned_only=True)[0]
        return {p.name: item * trained[p.name] for p in b.trained if p.tied_to is None} | places, offset

    def loaded(self, block: int, rank: int = 0) -> list[tuple[str, int, int, int]]:
        """Return the copies of a load: (operand, byte offset there, byte offset in `weights`, bytes). Weights trained on the device
        are excluded; with several ranks, only the rank's shard of trained weights is copied."""
        b, item, ranks = self.workload.blocks[block], ITEM_BYTES[self.semantics.compute_dtype], self.semantics.ranks
        if ranks > 1:
            cut = zip(("state", "tied"), self.regions(block), strict=False)
            runs = [(name, 0, item * (start + rank * (n // ranks)), item * (n // ranks)) for name, (start, n) in cut]
        else:
            runs = [] if self.is_apart(block) else [("state", 0, 0, item * b.state_elements)]
        if n_bytes := self.frozen_bytes(block):
            name = "frozen" if block in self.policy.disk_blocks else "state"
            first, target = self.frozen_on_host(block)[1], self.uploaded(block)[1] - n_bytes
            if runs == [(name, 0, 0, first)] and target == first:  # contiguous: one copy
                runs, first, target, n_bytes = [], 0, 0, first + n_bytes
            runs.append((name, first, target, n_bytes))
        for p in b.parameters:
            if p.tied_to is not None and (p.frozen or ranks == 1):
                offset = self.frozen_on_host(0)[0][p.tied_to] if p.frozen else item * self.offsets[0][p.tied_to]
                runs.append(("tied", offset, item * self.offsets[block][p.name], item * aligned_elements(p)))
        return [run for run in runs if run[-1]]

    def frozen_on_host(self, block: int) -> tuple[dict[str, int], int]:
        """Return the byte offset of each owned frozen weight in its `state` or `frozen` slot, and that of the first."""
        places, n_bytes = self.uploaded(block)
        first = 0 if self.is_alone(block) else self.part_elements(block) * ITEM_BYTES[self.semantics.compute_dtype]
        shift_bytes, names = first - n_bytes + self.frozen_bytes(block), {p.name for p in self.workload.blocks[block].trained}
        return {name: offset + shift_bytes for name, offset in places.items() if name not in names}, first

    def stored_bytes(self, p: Parameter) -> int:
        """Bytes of a weight in its stored form, padded to the next weight's start."""
        item = ITEM_BYTES[self.semantics.compute_dtype]
        n_bytes = layout(p.shape, self.semantics.base).n_bytes if self.is_packed(p) else aligned_elements(p) * item
        return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    def is_packed(self, p: Parameter) -> bool:
        return p.frozen and p.tied_to is None and is_packed(p.name, p.shape, self.semantics.base)

    def unpacks(self, block: int) -> bool:
        """True if the block's weights are uploaded packed and dequantised before use."""
        return self.semantics.products == "compute" and self.has_packed(block)

    def has_packed(self, block: int) -> bool:
        return self.semantics.base != "bf16" and any(map(self.is_packed, self.workload.blocks[block].parameters))

    def multiplies_packed(self, block: int) -> bool:
        """True if the block's slot of `weights` holds packed weights, which products use as they are."""
        return self.semantics.products == "fp8" and self.has_packed(block)

    def is_apart(self, block: int) -> bool:
        """True if the device holds the block's trained weights and their fp32 gradient sum, and the host its frozen weights."""
        return block in self.policy.device_blocks and self.workload.blocks[block].is_mixed

    def is_alone(self, block: int) -> bool:
        """True if the block's frozen weights have a separate host slot."""
        return self.is_apart(block) or block in self.policy.disk_blocks

    def stays_loaded(self, block: int) -> bool:
        """True if the block is loaded once per run, because its loaded weights are frozen and resident."""
        is_frozen = not self.workload.blocks[block].trained or self.is_apart(block)
        return is_frozen and block in self.policy.resident_blocks

    def sum_dtype(self, block: int) -> Dtype:
        """Dtype of a sum of the block's gradients; the compute dtype if a rank exchanges a single gradient."""
        semantics = self.semantics
        is_one = semantics.ranks > 1 and semantics.n_micro_batches == 1 and self.workload.blocks[block].kind is BlockKind.LAYER
        return semantics.compute_dtype if is_one else "fp32"

    def exchanged_elements(self) -> int:
        """Elements of each rank's shard in one exchange."""
        ranks, largest = self.semantics.ranks, max(n for b in range(len(self.workload.blocks)) for _, n in self.regions(b))
        limit = EXCHANGED_BYTES // ITEM_BYTES["fp32"] // ranks
        return min(largest // ranks, limit - limit % ALIGN_ELEMENTS)

    @cached_property
    def offsets(self) -> list[dict[str, int]]:
        """First element of each parameter, by name, in a device slot of each block."""
        blocks, offsets = self.workload.blocks, [block.offsets()[0] for block in self.workload.blocks]
        for b, block in enumerate(blocks if self.semantics.ranks > 1 else ()):  # shards are padded
            offsets[b] |= {p.name: self.regions(b)[1][0] for p in block.trained if p.tied_to is not None}
            longer = self.gradient_elements(b) - block.trained_elements
            offsets[b] |= {p.name: offsets[b][p.name] + longer for p in block.parameters if p.frozen}
        item = ITEM_BYTES[self.semantics.compute_dtype]
        for b in filter(self.multiplies_packed, range(len(blocks))):  # as uploaded
            offsets[b] = {name: n_bytes // item for name, n_bytes in self.uploaded(b)[0].items()}
        return offsets

    def squares(self, block: int) -> bool:
        return block in self.squared

    @cached_property
    def squared(self) -> list[int]:
        """Blocks with their squared gradient norm computed on the device."""
        is_whole = self.policy.square_on_device and self.semantics.ranks == 1
        vocabulary_is_whole = self.joins_tied or not self.workload.tied
        summed = [b for b in range(len(self.workload.blocks)) if is_whole and self.sums_on_device(b)]
        squared = (b for b in summed if vocabulary_is_whole or 0 < b <= self.workload.n_layers)
        return sorted({*squared, *self.policy.device_blocks})

    def norm_numbers(self, block: int) -> int:
        """Number of square sums of a block's gradient: one per trained parameter; with several ranks, one per tile of a shard,
        where each parameter and each piece may add a shorter tile."""
        b = self.workload.blocks[block]
        if self.semantics.ranks == 1:
            return len(b.trained)
        return self.part_elements(block) // NORM_TILE_ELEMENTS + len(b.parameters) + self.semantics.sum_groups

    def shared_numbers(self) -> int:
        """Upper bound of the numbers that a rank shares per step: square sums, losses of micro-batches, a stop flag."""
        return sum(map(self.norm_numbers, range(len(self.workload.blocks)))) + self.semantics.n_micro_batches + 1

    @cached_property
    def blocks_alike(self) -> dict[int, list[int]]:
        """Blocks with equal treatment, by the first of them."""
        groups: dict[object, list[int]] = {}
        for b, treatment in enumerate(self.treatments):
            groups.setdefault(treatment, []).append(b)
        return {blocks[0]: blocks for blocks in groups.values()}

    @cached_property
    def treatments(self) -> list[tuple[object, ...]]:
        """Key of each block: the first block of equal sizes, and all settings of the policy for this block."""
        blocks, policy, never = range(len(self.workload.blocks)), self.policy, (False,) * len(self.workload.blocks)
        is_again = [OPS[Kind.RECOMPUTE].where(self, b) for b in blocks] if policy.boundary_stride > 1 else never
        listed = (getattr(policy, name) for name in BLOCK_LISTS)
        is_listed = (map(frozenset(numbers).__contains__, blocks) if numbers else never for numbers in listed)
        # Weights that a block shares with the embedding are loaded from there
        beside_state = (self.workload.blocks[b].tied and 0 in policy.device_blocks for b in blocks)
        return list(zip(self.workload.first_alike, map(policy.saved, blocks), is_again, beside_state, *is_listed, strict=True))

    def state_slot(self, block: int) -> Slot:
        on_device = self.policy.device_blocks
        return Slot("device_state", on_device.index(block)) if block in on_device else Slot("state", block)

    @cached_property
    def packed_slots(self) -> int:
        layers = range(1, self.workload.n_layers + 1) if self.semantics.base != "bf16" else ()
        return self.policy.prefetch_depth + 1 if any(map(self.unpacks, layers)) else 0

    def recompute(self, block: int, micro_batch: int | None = None) -> Tier:
        """Return the recomputation in a layer's backward of this micro-batch; None: of a full one."""
        again = self.blocks_of(micro_batch)[block].recompute(self.policy.saved(block))
        assert again is not None, "illegal policy: the block cannot save this"
        return again

    def of_tiers(self, layers: Sequence[int], name: str) -> list[int]:
        """Field `name` of each layer's tier, computed once per distinct layer."""
        first, saved = self.workload.first_alike, self.policy.saved
        sorts = [(first[b], saved(b)) for b in layers]
        known = {sort: getattr(self.recompute(b), name) for sort, b in dict(zip(sorts, layers, strict=True)).items()}
        return [known[sort] for sort in sorts]

    def gradient_dtype(self, block: int) -> Dtype:
        """Dtype of the block's gradient on the device and on the link."""
        if self.sums_in_place(block):
            return "fp32"
        is_layer = self.workload.blocks[block].kind is BlockKind.LAYER
        if not self.sums_on_device(block):
            return self.semantics.compute_dtype if is_layer else "fp32"
        return self.semantics.gradient_dtype if is_layer or self.joins_tied or not self.workload.tied else "fp32"

    def host_gradient_dtype(self, block: int) -> Dtype:
        """Dtype of the block's gradient on the host: fp32 if the host sums, else the transferred one."""
        return self.gradient_dtype(block) if self.sums_on_device(block) else "fp32"

    @property
    def device_arena_bytes(self) -> int:
        return sum(a.n_bytes for a in self.arenas if a.place is Place.DEVICE)

    @property
    def kept_bytes(self) -> int:
        """Saved activations of one accumulation group on the device, without layer inputs; with the embedding's side outputs."""
        away = sum(self.of_tiers(self.policy.offload_blocks, "saved_bytes"))
        saved = sum(n * self.recompute(b).saved_bytes for b, n in self._layers_alike)
        return self.policy.accumulation_group * (saved - away + self.workload.blocks[0].side_bytes)

    @cached_property
    def _layers_alike(self) -> list[tuple[int, int]]:
        """(representative, count) of layers with equal sizes and saved activations."""
        saved = self.policy.save + (Saved.INPUT,) * (self.workload.n_layers - len(self.policy.save))
        keys = [*zip(self.workload.first_alike[1:-1], saved, strict=True)]
        one = dict(zip(keys, range(1, self.workload.n_layers + 1), strict=True))
        return [(one[key], n) for key, n in Counter(keys).items()]

    @property
    def transient_bytes(self) -> int:
        """Peak allocator memory of the block being computed."""
        return max(self.other_transient_bytes, *(self.recompute(b).transient_bytes for b, _ in self._layers_alike))

    @property
    def other_transient_bytes(self) -> int:
        """Peak of embedding, unpacking and head; if the host sums, without the head's sum of earlier micro-batches."""
        embedding, head = self.workload.blocks[0], self.workload.blocks[-1]
        unpacked = UNPACK_SCRATCH_BYTES if self.packed_slots else 0
        is_summed = self.sums_on_device(len(self.workload.blocks) - 1)
        return max(embedding.transient_bytes, head.transient_bytes - (0 if is_summed else head.own_sum_bytes), unpacked)

    def checkpoint_bytes(self, weights_only: bool = False) -> int:
        """Tensor bytes in `checkpoint-N`: weights (or fp32 adapters only) and, unless `weights_only`, masters and moments."""
        semantics, n_trained = self.semantics, self.workload.n_trained
        state_bytes = 0 if weights_only else sum(STORED_BYTES[dtype] for dtype in semantics.saved_state.values())
        n_weights, dtype = (n_trained, "fp32") if semantics.train.lora else (self.workload.n_params, semantics.compute_dtype)
        return ITEM_BYTES[dtype] * n_weights + round(n_trained * state_bytes)
