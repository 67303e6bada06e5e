"""Blocks of a model: parameters, FLOP and bytes of one micro-batch. The planner computes them, plans store them."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

SLOT_ALIGN_BYTES = 256  # alignment of slots, and of tensors in them
ALIGN_ELEMENTS = 128  # alignment of tensors in every arena: 256 bytes in bf16, 512 in fp32
LOSS_SCRATCH_ELEMENTS = 2**20  # logits that `loss: online` widens at a time, in each of a few tensors, without its kernel
NORM_TILE_ELEMENTS = 65_536  # tile of a parameter's piece with one fp32 sum of squares, a term of the norm
FILE = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

OF_LAYER = re.compile(r"[a-z_.]+\.([0-9]+)\.")  # the first number in a weight's name is its layer

Count = Annotated[int, Field(gt=0, lt=2**53)]
Natural = Annotated[int, Field(ge=0, lt=2**53)]
Dtype = Literal["bf16", "fp32"]
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of a block. `tied_to` names the weight of block 0 with the same host storage; a `frozen` weight is only read."""

    name: Annotated[str, Field(max_length=200)]
    shape: Annotated[tuple[Natural, ...], Field(max_length=8)]
    tied_to: str | None = None
    frozen: bool = False

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Matmul:
    """`count` products (m, k) @ (k, n) in one forward pass of one micro-batch; `frozen` weights have no gradient."""

    m: Count
    k: Count
    n: Count
    count: Count = 1
    frozen: bool = False
    grouped: bool = False  # a product per expert, all in one call
    # In FP8, except a weight gradient: own quantises its input; shared uses an earlier product's codes, and adds its input gradient
    # to that product's; transposed quantises its input, and its weight has a row per input, so that the forward transposes it
    scaled: Literal["no", "own", "shared", "transposed"] = "no"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.k * self.n * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention in one forward pass of one micro-batch, to the last `window` tokens if given."""

    n_sequences: Count
    n_heads: Count
    head_dim: Count
    seq_len: Count
    window: Count | None = None
    n_kv_heads: Count | None = None  # None: n_heads
    sinks: bool = False  # fused attention with a learned logit per head

    @property
    def flop(self) -> int:
        """FLOP of two products over visible (query, key) pairs: the causal half, limited to the window."""
        span = min(self.window or self.seq_len, self.seq_len)
        n_pairs = span * (span + 1) // 2 + (self.seq_len - span) * span
        return 4 * self.n_sequences * self.n_heads * self.head_dim * n_pairs


class BlockKind(StrEnum):
    EMBEDDING = "embedding"
    LAYER = "layer"
    HEAD = "head"


class Saved(StrEnum):
    """Activations of a layer that are saved for backward; others are recomputed."""

    __hash__ = str.__hash__  # ten times faster than Enum.__hash__

    INPUT = "input"  # the input only
    ATTENTION = "attention"  # and output and log-sum-exp of fused attention
    PRODUCTS = "products"  # and outputs of products with weights
    ALL = "all"  # all tensors that autograd saves: no recomputation


@dataclass(frozen=True, slots=True)
class Tier:
    """Selective recomputation of a layer: tensors saved by forward, and work repeated in backward before gradients. It ends with
    the last tensor that autograd saves: the product after it is not run."""

    saved: Saved
    saved_bytes: Natural  # on the device from forward to backward, per micro-batch, without the input
    transient_bytes: Natural  # peak allocator memory during backward beyond `saved_bytes`, with weight gradients
    n_matmuls: Natural  # first entries of `Block.matmuls`, repeated
    attention: bool  # True if attention is repeated
    pointwise_bytes: Natural
    n_kernels: Natural
    fused_bytes: Natural = 0  # part of `pointwise_bytes`
    n_saved: Natural = 0  # upper bound of the number of saved tensors
    copied_bytes: Natural = 0  # part of `saved_bytes` from calls that take no output buffer
    norm_bytes: Natural = 0  # part of `fused_bytes`

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for the saved tensors, each aligned."""
        return self.saved_bytes + self.n_saved * SLOT_ALIGN_BYTES


@dataclass(frozen=True)
class Block:
    """A streamed unit. FLOP and bytes are for one micro-batch, forward only unless the name states otherwise."""

    name: Annotated[str, Field(max_length=200)]
    kind: BlockKind
    parameters: tuple[Parameter, ...]
    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    pointwise_bytes: Natural = 0  # memory traffic except matmuls and attention
    fused_bytes: Natural = 0  # part of it in fused kernels, which run at the memory's rate
    norm_bytes: Natural = 0  # part of that in fused norms, which have a separate rate
    n_kernels: Natural = 0  # library calls of one forward
    boundary_bytes: Natural = 0  # the block's output
    kept_bytes: Natural = 0  # tensors that autograd saves in one forward, without weights and input
    side_bytes: Natural = 0  # embedding: outputs for layers except the hidden state, and tensors saved for its backward except ids
    transient_bytes: Natural = 0  # peak allocator memory during backward (or loss) with recomputation and weight gradients
    own_sum_bytes: Natural = 0  # part of the head's peak: gradient sum of the micro-batch, separate from that of earlier ones
    tile_sum_bytes: Natural = 0  # memory traffic in one backward of accumulating MLP weight gradients over tiles
    tiers: tuple[Tier, ...] = ()  # recomputation other than the whole forward from the input

    @cached_property
    def n_params(self) -> int:
        """Owned parameters: a tied weight counts in its owner only."""
        return sum(p.n_elements for p in self.parameters if p.tied_to is None)

    def recompute(self, saved: Saved) -> Tier | None:
        """Return the recomputation in backward: the whole forward for input, nothing for all; None if there is no such tier."""
        return self._recomputes.get(saved)

    @cached_property
    def _recomputes(self) -> dict[Saved, Tier]:
        work = len(self.matmuls), self.attention is not None, self.pointwise_bytes, self.n_kernels, self.fused_bytes
        of_input = Tier(Saved.INPUT, 0, self.transient_bytes, *work, norm_bytes=self.norm_bytes)
        everything = Tier(Saved.ALL, self.kept_bytes, self.transient_bytes, 0, False, 0, 0)
        return {Saved.INPUT: of_input} | {tier.saved: tier for tier in reversed(self.tiers)} | {Saved.ALL: everything}

    @cached_property
    def tied(self) -> bool:
        return any(p.tied_to is not None for p in self.parameters)

    def offsets(self, owned_only: bool = False) -> tuple[dict[str, int], int]:
        """Return the element offset of each parameter in a slot, by name, and the slot's elements, for any dtype. Trained weights
        come first, owned before tied: gradients and moments have the same offsets."""
        offsets, offset = dict[str, int](), 0
        for p in sorted(self.parameters, key=lambda p: (p.frozen, p.tied_to is not None)):
            if not owned_only or p.tied_to is None:
                offsets[p.name] = offset
                offset += aligned_elements(p)
        return offsets, offset

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if not p.frozen)

    @cached_property
    def trained_divisor(self) -> int:
        """Greatest common divisor of the sizes of trained parameters; 0 without any."""
        return math.gcd(*(p.n_elements for p in self.trained))

    @cached_property
    def is_mixed(self) -> bool:
        return 0 < len(self.trained) < len(self.parameters)

    @cached_property
    def n_trained(self) -> int:
        return sum(p.n_elements for p in self.trained if p.tied_to is None)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of a slot of gradients of all used trained weights, tied ones included."""
        return sum(map(aligned_elements, self.trained))

    @cached_property
    def state_elements(self) -> int:
        """Elements of a slot of masters and moments of owned trained weights."""
        return sum(aligned_elements(p) for p in self.trained if p.tied_to is None)

    @cached_property
    def slot_elements(self) -> int:
        """Elements of a slot of all used weights, tied ones included."""
        return self.offsets()[1]

    def piece_elements(self, n_pieces: int) -> int:
        """Elements of each of `n_pieces` equal pieces of owned trained weights; the last is padded, or empty."""
        return -(-self.state_elements // (n_pieces * ALIGN_ELEMENTS)) * ALIGN_ELEMENTS

    def cuts(self, n_pieces: int) -> dict[str, list[range]]:
        """Return the element ranges of each owned trained parameter, by name: one for each piece that it overlaps, in order."""
        size, ranges = self.piece_elements(n_pieces), dict[str, list[range]]()
        offsets = self.offsets(owned_only=True)[0]
        for p in self.trained:
            if p.tied_to is None:
                start, n = offsets[p.name], p.n_elements
                ends = [min(end - start, n) for end in range((start // size + 1) * size, start + n + size, size)] if size else []
                ranges[p.name] = [range(a, b) for a, b in zip([0, *ends], ends, strict=False) if b > a]
        return ranges


@dataclass(frozen=True)
class Workload:
    """Blocks (embedding, layers, head) with sizes of one micro-batch; `smaller`: with those of a smaller last micro-batch."""

    blocks: tuple[Block, ...]
    smaller: tuple[Block, ...] = ()

    @property
    def n_params(self) -> int:
        return sum(b.n_params for b in self.blocks)

    @property
    def n_trained(self) -> int:
        return sum(b.n_trained for b in self.blocks)

    @property
    def n_layers(self) -> int:
        return len(self.blocks) - 2

    @cached_property
    def tied(self) -> bool:
        """True if two blocks share a trained weight: its gradient has two parts."""
        return any(p.tied_to is not None for b in self.blocks for p in b.trained)

    @cached_property
    def trains_all(self) -> bool:
        return all(not p.frozen for b in self.blocks for p in b.parameters)

    @cached_property
    def first_trained(self) -> int:
        """First block with trained weights, where backward ends."""
        return next((b for b, block in enumerate(self.blocks) if block.trained), len(self.blocks))

    @cached_property
    def mixed(self) -> tuple[int, ...]:
        return tuple(b for b, block in enumerate(self.blocks) if block.is_mixed)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Blocks grouped by equality except names: embedding, classes of layers, head. Layers below the first trained block have no
        backward and form separate classes."""
        groups: dict[object, list[int]] = {}
        for b, sizes in enumerate(zip(self.blocks, self.smaller or self.blocks, strict=True)):
            groups.setdefault((b >= self.first_trained, *map(_sizes, sizes)), []).append(b)
        return list(groups.values())

    @cached_property
    def first_alike(self) -> list[int]:
        """First block of each block's class."""
        return [first for _, first in sorted((b, blocks[0]) for blocks in self.classes for b in blocks)]


def aligned_elements(p: Parameter) -> int:
    return -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


_SIZES = tuple(field.name for field in fields(Block) if field.name not in ("name", "parameters"))


def _sizes(block: Block) -> tuple[object, ...]:
    parameters = tuple([(p.shape, p.tied_to, p.frozen) for p in block.parameters])
    return (parameters, *[getattr(block, name) for name in _SIZES])


def loss_lanes(vocab: int) -> int:
    """Partial sums per row of logits with `loss: online`: 8 per thread of a kernel's block, from 256 (vocabulary 96) to 4,096."""
    return 8 * min(512, max(32, 1 << (-(-vocab // 8) - 1).bit_length()))


def has_towers(config: dict[str, Any]) -> bool:
    """True for a vision-language model; only its text decoder is trained."""
    return isinstance(config.get("vision_config"), dict)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


@dataclass(frozen=True, slots=True)
class Model:
    """Source of the weights: a Hugging Face configuration, and its folder if that holds weights."""

    config: dict[str, Any]
    path: str | None = None
    name: str | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical configuration; differs for models of equal shapes."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()
