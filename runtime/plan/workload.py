"""Blocks of a model: parameters, FLOP and bytes of one micro-batch. The planner counts them, plans carry them."""

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

SLOT_ALIGN_BYTES = 256  # where a slot, and a tensor in one, may start
ALIGN_ELEMENTS = 128  # every tensor starts on a multiple: 256 bytes in bf16, 512 in fp32, whatever the arena's dtype
LOSS_SCRATCH_ELEMENTS = 2**20  # logits that `loss: online` widens at a time, in each of a few tensors, where it has no kernel
NORM_TILE_ELEMENTS = 65_536  # of a piece of a parameter, whose squares are added up in fp32; what the norm is made of
FILE = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

OF_LAYER = re.compile(r"[a-z_.]+\.([0-9]+)\.")  # a weight's name: its layer is the first number in it

Count = Annotated[int, Field(gt=0, lt=2**53)]
Natural = Annotated[int, Field(ge=0, lt=2**53)]
Dtype = Literal["bf16", "fp32"]
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of a block, by its name in the model. `tied_to` names the weight of block 0 whose host segment it uses; what is
    `frozen` is read, and nothing else is done to it."""

    name: Annotated[str, Field(max_length=200)]
    shape: Annotated[tuple[Natural, ...], Field(max_length=8)]
    tied_to: str | None = None
    frozen: bool = False

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Matmul:
    """`count` products (m, k) @ (k, n) in one forward pass of one micro-batch; of `frozen` weights backward makes no gradient."""

    m: Count
    k: Count
    n: Count
    count: Count = 1
    frozen: bool = False

    @property
    def flop(self) -> int:
        """One multiply and one add per inner step."""
        return 2 * self.m * self.k * self.n * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of one forward pass of one micro-batch; `window`: each token sees at most that many."""

    n_sequences: Count
    n_heads: Count
    head_dim: Count
    seq_len: Count
    window: Count | None = None
    n_kv_heads: Count | None = None  # None: as many as heads

    @property
    def flop(self) -> int:
        """Two products over the visible (query, key) pairs: the causal half, cut to the window."""
        span = min(self.window or self.seq_len, self.seq_len)
        n_pairs = span * (span + 1) // 2 + (self.seq_len - span) * span
        return 4 * self.n_sequences * self.n_heads * self.head_dim * n_pairs


class BlockKind(StrEnum):
    EMBEDDING = "embedding"
    LAYER = "layer"
    HEAD = "head"


class Saved(StrEnum):
    """What of a layer's forward is there at its backward; the rest is computed again."""

    __hash__ = str.__hash__  # a tenth of the time of an enumeration's own

    INPUT = "input"  # no more than that
    ATTENTION = "attention"  # also what fused attention makes: its output and the logarithms of its sums
    PRODUCTS = "products"  # that, and what each product with a weight makes
    ALL = "all"  # whatever autograd saves: nothing is computed again


@dataclass(frozen=True, slots=True)
class Tier:
    """One way to recompute a layer: what its forward saves, and what its backward computes again before gradients flow. That ends
    as soon as the last tensor that autograd saves is there: the product after it is not run."""

    saved: Saved
    saved_bytes: Natural  # on the device from forward to backward, for one micro-batch, besides the input
    transient_bytes: Natural  # peak in the allocator during backward beyond `saved_bytes`, gradients of weights included
    n_matmuls: Natural  # of `Block.matmuls`, the first ones, run again
    attention: bool  # whether attention is computed again
    pointwise_bytes: Natural
    n_kernels: Natural
    fused_bytes: Natural = 0  # of `pointwise_bytes`
    n_saved: Natural = 0  # tensors that `saved_bytes` consist of, at most
    copied_bytes: Natural = 0  # of `saved_bytes`, what a call cannot make where it is told to
    norm_bytes: Natural = 0  # of `fused_bytes`

    @property
    def slot_bytes(self) -> int:
        """Of a slot that holds what is saved, every tensor at an aligned place."""
        return self.saved_bytes + self.n_saved * SLOT_ALIGN_BYTES


@dataclass(frozen=True)
class Block:
    """A streamable unit. FLOP and bytes are for one micro-batch, forward only unless the name says otherwise."""

    name: Annotated[str, Field(max_length=200)]
    kind: BlockKind
    parameters: tuple[Parameter, ...]
    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    pointwise_bytes: Natural = 0  # memory traffic of all that is neither matmul nor attention
    fused_bytes: Natural = 0  # of it: by fused kernels, which nothing keeps from the memory's rate
    norm_bytes: Natural = 0  # of that: by fused norms, which have a rate of their own
    n_kernels: Natural = 0  # library calls of one forward
    boundary_bytes: Natural = 0  # the block's output
    kept_bytes: Natural = 0  # what autograd keeps of one forward until its backward, without weights and input
    side_bytes: Natural = 0  # of the embedding, what it hands to layers besides its output, and saves for its backward besides ids
    transient_bytes: Natural = 0  # peak in the allocator during backward (or loss) with recompute, gradients of weights included
    own_sum_bytes: Natural = 0  # of the head's peak: a micro-batch's own sum of gradients, beside one of those before it
    tile_sum_bytes: Natural = 0  # memory traffic in one backward of adding up weight gradients of the MLP's tiles
    tiers: tuple[Tier, ...] = ()  # ways to recompute besides the whole forward from the input

    @cached_property
    def n_params(self) -> int:
        """Parameters this block owns: a tied weight counts once, where it is owned."""
        return sum(p.n_elements for p in self.parameters if p.tied_to is None)

    @cached_property
    def forward_flop(self) -> int:
        return sum(m.flop for m in self.matmuls) + (self.attention.flop if self.attention else 0)

    def recompute(self, saved: Saved) -> Tier | None:
        """Recomputation in backward if the forward saves `saved`: by default the whole forward for its input, nothing for all. None
        if the block has no such tier."""
        return self._recomputes.get(saved)

    @cached_property
    def _recomputes(self) -> dict[Saved, Tier]:
        work = len(self.matmuls), self.attention is not None, self.pointwise_bytes, self.n_kernels, self.fused_bytes
        of_input = Tier(Saved.INPUT, 0, self.transient_bytes, *work, norm_bytes=self.norm_bytes)
        everything = Tier(Saved.ALL, self.kept_bytes, self.transient_bytes, 0, False, 0, 0)
        return {Saved.INPUT: of_input} | {tier.saved: tier for tier in reversed(self.tiers)} | {Saved.ALL: everything}

    @cached_property
    def tied(self) -> bool:
        """Whether the block uses a weight owned by block 0."""
        return any(p.tied_to is not None for p in self.parameters)

    def offsets(self, owned_only: bool = False) -> tuple[dict[str, int], int]:
        """Element offset of each parameter in a slot, by name, and the slot's element count; the same for every dtype. Trained
        weights come first, and of these the owned ones: their offsets in gradients and moments are the same."""
        offsets, at = dict[str, int](), 0
        for p in sorted(self.parameters, key=lambda p: (p.frozen, p.tied_to is not None)):
            if not owned_only or p.tied_to is None:
                offsets[p.name] = at
                at += aligned_elements(p)
        return offsets, at

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if not p.frozen)

    @cached_property
    def trained_divisor(self) -> int:
        """The largest number that divides the number of elements of every trained parameter; 0 without any."""
        return math.gcd(*(p.n_elements for p in self.trained))

    @cached_property
    def is_mixed(self) -> bool:
        return 0 < len(self.trained) < len(self.parameters)

    @cached_property
    def n_trained(self) -> int:
        return sum(p.n_elements for p in self.trained if p.tied_to is None)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of a slot that holds gradients of all trained weights the block uses, tied ones included."""
        return sum(map(aligned_elements, self.trained))

    @cached_property
    def state_elements(self) -> int:
        """Elements of a slot that holds masters and moments of what the block owns and trains."""
        return sum(aligned_elements(p) for p in self.trained if p.tied_to is None)

    @cached_property
    def slot_elements(self) -> int:
        """Elements of a slot that holds all weights the block uses, tied ones included."""
        return self.offsets()[1]

    def piece_elements(self, n_pieces: int) -> int:
        """Elements of each of `n_pieces` equal pieces of what the block trains. The last may be short of some, or have none."""
        return -(-self.state_elements // (n_pieces * ALIGN_ELEMENTS)) * ALIGN_ELEMENTS

    def cuts(self, n_pieces: int) -> dict[str, list[range]]:
        """By name of each trained parameter its elements, counted from its first, that are in one piece: all, in order."""
        piece, found = self.piece_elements(n_pieces), dict[str, list[range]]()
        offsets = self.offsets(owned_only=True)[0]
        for p in self.trained:
            if p.tied_to is None:
                at, n = offsets[p.name], p.n_elements
                ends = [min(end - at, n) for end in range((at // piece + 1) * piece, at + n + piece, piece)] if piece else []
                found[p.name] = [range(a, b) for a, b in zip([0, *ends], ends, strict=False) if b > a]
        return found


@dataclass(frozen=True)
class Workload:
    """A model cut into blocks, with the sizes of one micro-batch: block 0 the embedding, then layers, last the head. `smaller`: the
    same blocks with the sizes of a last micro-batch that is smaller than the others, where there is one."""

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
        """Whether a weight that two blocks use is trained, so that its gradient has two parts."""
        return any(p.tied_to is not None for b in self.blocks for p in b.trained)

    @cached_property
    def trains_all(self) -> bool:
        return all(not p.frozen for b in self.blocks for p in b.parameters)

    @cached_property
    def first_trained(self) -> int:
        """The first block with trained weights: backward ends there."""
        return next((b for b, block in enumerate(self.blocks) if block.trained), len(self.blocks))

    @cached_property
    def mixed(self) -> tuple[int, ...]:
        return tuple(b for b, block in enumerate(self.blocks) if block.is_mixed)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Blocks that differ only in names: the embedding, each class of layers by its first layer, the head. Layers below the
        first trained one, without a backward, are classes of their own."""
        found: dict[object, list[int]] = {}
        for b, sizes in enumerate(zip(self.blocks, self.smaller or self.blocks, strict=True)):
            found.setdefault((b >= self.first_trained, *map(_sizes, sizes)), []).append(b)
        return list(found.values())

    @cached_property
    def first_alike(self) -> list[int]:
        """For each block the first one that differs only in names."""
        return [first for _, first in sorted((b, blocks[0]) for blocks in self.classes for b in blocks)]


def aligned_elements(p: Parameter) -> int:
    return -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


_SIZES = tuple(field.name for field in fields(Block) if field.name not in ("name", "parameters"))


def _sizes(block: Block) -> tuple[object, ...]:
    parameters = tuple([(p.shape, p.tied_to, p.frozen) for p in block.parameters])
    return (parameters, *[getattr(block, name) for name in _SIZES])


def loss_lanes(vocab: int) -> int:
    """Partial sums of a row of logits under `loss: online`, 8 for each thread of a kernel's block: a function of the row alone. A
    small vocabulary has fewer (96: 256), a large one 4,096."""
    return 8 * min(512, max(32, 1 << (-(-vocab // 8) - 1).bit_length()))


def has_towers(config: dict[str, Any]) -> bool:
    """True for a vision-language model, of which only the text decoder is trained."""
    return isinstance(config.get("vision_config"), dict)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


@dataclass(frozen=True, slots=True)
class Model:
    """Where the weights come from: a Hugging Face configuration, and the folder it was read from, if it holds weights."""

    config: dict[str, Any]
    path: str | None = None
    name: str | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical configuration: tells two models of equal shapes apart."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()
