"""What may be chosen, and by whom?

Semantics decide what is computed, to the last bit: they are the user's. A policy decides when, where and from what memory: it is
the planner's, and changes no bit.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from .workload import FILE, Count, Dtype, Natural

Kernel = Literal["eager", "fused"]
# flash: FlashAttention-2, whose backward adds as its threads come; deterministic: the same in a fixed order
AttentionKernel = Literal["flash", "deterministic", "cudnn"]
Slots = Annotated[int, Field(gt=0, le=2**16)]  # more than any model has layers


@dataclass(frozen=True, slots=True)
class Semantics:
    """What is computed: the user's choice. It alone decides the bits of the result."""

    seq_len: Count
    batch_size: Count
    micro_batch: Count
    compute_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "bf16"
    master_dtype: Dtype = "fp32"
    weight_rounding: Literal["half_up"] = "half_up"
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    on_nonfinite: Literal["skip", "stop"] = "stop"
    loss_tile_tokens: Count = 1024
    mlp_tile_tokens: Count | None = None  # None: the MLP is not tiled
    attention: Literal["sdpa", "eager"] = "sdpa"
    experts: Literal["eager", "grouped_mm"] = "grouped_mm"
    # Which kernels compute. What a plan file does not say is as it was before there was a choice.
    norm: Kernel = "eager"
    loss: Kernel = "eager"
    pointwise: Kernel = "eager"  # the MLP's activation and the rotary embedding: the same bits, other time and memory
    attention_kernel: AttentionKernel = "flash"  # of fused attention on a GPU; a CPU has one of its own
    __pydantic_config__ = FILE

    @property
    def n_micro_batches(self) -> int:
        """The last of them has what is left of the batch."""
        return -(-self.batch_size // self.micro_batch)

    @property
    def n_left(self) -> int:
        """Sequences of a last micro-batch that is smaller than the others; 0: all are alike."""
        return self.batch_size % self.micro_batch

    @property
    def splits_masters(self) -> bool:
        """Whether an fp32 master is kept as the bf16 weight that is uploaded and the rest of it, 16 bits."""
        return (self.compute_dtype, self.master_dtype) == ("bf16", "fp32")

    def is_smaller(self, micro_batch: int | None) -> bool:
        """Whether it is the last one, and smaller than the others."""
        return bool(self.n_left) and micro_batch == self.n_micro_batches - 1

    def n_sequences(self, micro_batch: int) -> int:
        return self.n_left if self.is_smaller(micro_batch) else self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.seq_len


class Update(StrEnum):
    """When the host optimizer runs."""

    EAGER = "eager"  # as each block's gradient arrives; legal only without clipping and with on_nonfinite: stop
    BARRIER = "barrier"  # after the global norm, and the next step starts only when all blocks are updated
    DEFERRED = "deferred"  # after the global norm, block by block into the next step's forward


@dataclass(frozen=True, slots=True)
class Policy:
    """How it is scheduled: the planner's choice. It never changes a bit of the result."""

    prefetch_depth: Slots = 1  # weight slots ahead of the block being computed
    gradient_slots: Slots = 1  # device slots for gradients of layers
    offload_late_blocks: Natural = (
        0  # a layer's gradient leaves when the backward this many layers further on is done, if there is one
    )
    accumulation_group: Count = 1  # layer-major groups: 1 is row-major, all micro-batches is layer-major
    keep_blocks: tuple[Natural, ...] = ()  # layers whose activations are kept; the others keep their input and recompute
    update: Update = Update.BARRIER
    resident_blocks: tuple[Natural, ...] = ()  # blocks whose weights stay on the device; uploaded once a step
    spill_blocks: tuple[Natural, ...] = ()  # blocks, not the last layer, whose output goes to the host until backward
    attention_blocks: tuple[Natural, ...] = ()  # layers that save what attention made, besides their input
    product_blocks: tuple[Natural, ...] = ()  # layers that save what attention and the matrix products made
    boundary_stride: Count = 1  # of so many layers only the last one's output stays; the others' are computed again in backward
    speculate_blocks: tuple[Natural, ...] = ()  # blocks updated during backward into shadows, as if nothing were clipped
    square_blocks: tuple[Natural, ...] = ()  # blocks of whose gradients the device sums the squares for the norm
    __pydantic_config__ = FILE
