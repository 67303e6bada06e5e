"""Semantics, which decide the bits and are the user's, and policy, which decides time and memory and is the planner's."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from penstock.runtime.errors import PlanError

from .objective import CROSS_ENTROPY, Loss, Of
from .optimizer import MasterDtype, Optimizer, optimizing
from .packed import Base
from .train import ALL, Train, parse_train, training
from .workload import FILE, Count, Dtype, Natural, Saved

Kernel = Literal["eager", "fused"]
# eager: torch's cross entropy on fp32 logits. online: maximum and sum of exponentials of a row of rounded logits in one read
# (online softmax), then the gradient in their place; the output matrix's gradient is accumulated in fp32 by its product
LossKernel = Literal["eager", "online"]
# flash: FlashAttention-2, whose backward adds as its threads come; deterministic: the same in a fixed order
AttentionKernel = Literal["flash", "deterministic", "cudnn"]
# Functions of other packages, which transformers takes in the place of torch's own calls where they are installed
LibraryKernel = Literal["causal_conv1d.causal_conv1d_fn", "fla.chunk_gated_delta_rule"]
MOST_LAYERS = 2**16  # more than any model has
Slots = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
UPDATE_RATIO = {"adamw": 0.65, "lion": 0.55, "adamw:moments=int8": 1.5, "lion:moments=int8": 0.9}
RICHER = (Saved.ATTENTION, Saved.PRODUCTS, Saved.ALL)  # what a layer may save besides its input, the least first
LEAVE = (Saved.ATTENTION, Saved.PRODUCTS)  # what of it may be on the host until backward, the least first


@dataclass(frozen=True)
class Semantics:
    """What is computed: the user's choice. It alone decides the bits of the result."""

    seq_len: Count
    batch_size: Count
    micro_batch: Count
    compute_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "bf16"
    master_dtype: MasterDtype = "fp32"
    weight_rounding: Literal["half_up", "stochastic"] = "half_up"  # of a master of less than fp32
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    on_nonfinite: Literal["skip", "stop"] = "stop"
    loss_tile_tokens: Count = 1024
    mlp_tile_tokens: Count | None = None  # None: the MLP is not tiled
    attention: Literal["sdpa", "eager"] = "sdpa"
    experts: Literal["grouped_mm"] = "grouped_mm"
    # Which kernels compute. What a plan file does not say is as it was before there was a choice.
    norm: Kernel = "eager"
    loss: LossKernel = "eager"
    pointwise: Kernel = "eager"  # the MLP's activation and the rotary embedding: the same bits, other time and memory
    attention_kernel: AttentionKernel = "flash"  # of fused attention on a GPU; a CPU has one of its own
    library_kernels: tuple[LibraryKernel, ...] = ()  # of linear attention and convolutions; others are torch's own calls
    # Contiguous groups of micro-batches, a power of two that divides them: each is summed in order from zero, and the groups' sums
    # by a balanced binary tree, left part and right part. 1: all in order.
    sum_groups: Count = 1
    # Processes that share a step, each with a device, a power of two. The other fields are one's part of it, and what all of them
    # compute is `whole`, whose bits are the same for any number of ranks.
    ranks: Count = 1
    train: Train = ALL
    # Forward of an adapter: the narrow product x A^T, rounded, then the frozen product x W^T accumulates onto its product with B
    lora_products: Literal["accumulated"] = "accumulated"
    base: Base = "bf16"  # "bf16" stands for the dtype of computing: nothing is packed
    optimizer: Optimizer = Optimizer.ADAMW
    objective: Loss = CROSS_ENTROPY
    router_loss: Annotated[float, Field(ge=0)] = 0.0  # weight of the routers' own loss; 0: there is none
    __pydantic_config__ = FILE

    @cached_property
    def n_micro_batches(self) -> int:
        """The last of them has what is left of the batch."""
        return -(-self.batch_size // self.micro_batch)

    @property
    def n_left(self) -> int:
        """Sequences of a last micro-batch that is smaller than the others; 0: all are alike."""
        return self.batch_size % self.micro_batch

    @property
    def is_lean(self) -> bool:
        """True if a step has the arithmetic of docs/optimizers.md, not that of torch's AdamW on fp32 moments."""
        return self.optimizer is not Optimizer.ADAMW or self.weight_rounding == "stochastic"

    @property
    def state_bytes(self) -> float:
        """Bytes of master and moments per trained parameter."""
        return self.optimizer.state_bytes(self.master_dtype)

    @property
    def update_ratio(self) -> float:
        """Time of the host's update relative to torch's AdamW on split masters, on one core, where it is all arithmetic
        (docs/optimizers.md). Many cores wait for memory: it may then be less, as fewer bytes move."""
        return UPDATE_RATIO.get(self.optimizer, UPDATE_RATIO[self.optimizer.rule]) if self.is_lean else 1.0

    @property
    def optimizer_in_words(self) -> str:
        """As `--optimizer` takes it."""
        separator = "," if ":" in self.optimizer else ":"
        return self.optimizer + (f"{separator}master={self.master_dtype}" if self.weight_rounding == "stochastic" else "")

    @property
    def device_multiple(self) -> int:
        """Multiple of elements that a device updates to the host's bits: torch's kernel on the host computes the rest, which fills
        no vector register, in another order."""
        return 1 if self.is_lean else 8

    @property
    def saved_state(self) -> dict[str, str]:
        """Dtypes of a trained parameter's master and moments in a checkpoint, by name. A split24 master is fp32 there."""
        kept = {"master": self.master_dtype, **self.optimizer.moments}
        return {name: "fp32" if dtype == "split24" else dtype for name, dtype in kept.items()}

    def is_smaller(self, micro_batch: int | None) -> bool:
        """True for a last micro-batch that is smaller than the others."""
        return micro_batch == self.n_micro_batches - 1 and bool(self.n_left)

    def n_sequences(self, micro_batch: int) -> int:
        return self.n_left if self.is_smaller(micro_batch) else self.micro_batch

    def sum_level(self, micro_batch: int) -> int:
        """The sum that the micro-batch joins: the number of earlier groups' sums that wait for their right part."""
        return (micro_batch // self._of_a_sum).bit_count()

    def begins_sum(self, micro_batch: int) -> bool:
        return micro_batch % self._of_a_sum == 0

    def n_joined(self, micro_batch: int) -> int:
        """How many earlier sums its own then joins, each the left part of the next: none but after a group's last."""
        group, place = divmod(micro_batch + 1, self._of_a_sum)
        return 0 if place else (group & -group).bit_length() - 1

    @property
    def n_sums(self) -> int:
        """Sums of one gradient that there are at a time."""
        return self.sum_groups.bit_length()

    @cached_property
    def _of_a_sum(self) -> int:
        return self.n_micro_batches // self.sum_groups

    @property
    def whole(self) -> "Semantics":
        """What all ranks compute together: the meaning of a step, as a single process would have it."""
        return replace(self, batch_size=self.batch_size * self.ranks, sum_groups=self.sum_groups * self.ranks, ranks=1)

    def shared_by(self, ranks: int) -> "Semantics":
        """Each one's part, for as many ranks; PlanError where whole groups of micro-batches cannot be given to each."""
        whole = self.whole
        if ranks < 1 or ranks.bit_count() > 1 or whole.sum_groups % ranks:
            how = "with --sum-groups as many groups or a multiple: the bits of the result depend on these alone"
            raise PlanError(f"{ranks} ranks cannot share {whole.sum_groups} sum groups; choose a power of two, and {how}")
        if ranks > 1 and whole.n_left:
            raise PlanError(f"{ranks} ranks: {whole.batch_size} sequences are not equal micro-batches of {whole.micro_batch}")
        return replace(whole, batch_size=whole.batch_size // ranks, sum_groups=whole.sum_groups // ranks, ranks=ranks)

    def n_losses(self, n_supervised: int, n_answers: int | None = None) -> int:
        """Number of losses that a step averages, given its supervised tokens and, if packed, its answers."""
        n_sequences = self.ranks * self.batch_size if n_answers is None else n_answers
        return {Of.TOKENS: n_supervised, Of.SEQUENCES: n_sequences}.get(self.objective.per, n_sequences // 2)

    @property
    def least_group(self) -> int:
        """Smallest accumulation group: several ranks exchange whole sums, which their devices make."""
        return 1 if self.ranks == 1 else self.n_micro_batches

    @property
    def n_pieces(self) -> int:
        """Number of equal pieces that a block's elements are cut into, each on a single rank: one per sum group of all ranks."""
        return self.sum_groups * self.ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.ranks * self.batch_size * self.seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.seq_len


def trained(semantics: Semantics, train: str | None, base: Base | None, optimizer: str | None, master: Dtype | None) -> Semantics:
    """The semantics with these choices in place of their own."""
    what, said = semantics.train if train is None else parse_train(train), training(train, base)
    of_master = {} if master is None else {"master_dtype": master}
    return replace(semantics, **said | of_master | optimizing(optimizer, master) | {"train": what})


class Update(StrEnum):
    """When the host optimizer runs."""

    EAGER = "eager"  # as each block's gradient arrives; legal only without clipping and with on_nonfinite: stop
    BARRIER = "barrier"  # after the global norm, and the next step starts only when all blocks are updated
    DEFERRED = "deferred"  # after the global norm, block by block into the next step's forward


def saves(all: Iterable[int] = (), products: Iterable[int] = (), attention: Iterable[int] = ()) -> tuple[Saved, ...]:
    """`Policy.save` in which these layers save all, what products made, or what attention made, and the others their input."""
    of: dict[int, Saved] = {}
    for saved, layers in ((Saved.ALL, all), (Saved.PRODUCTS, products), (Saved.ATTENTION, attention)):
        for b in layers:
            if type(b) is not int or not 0 < b <= MOST_LAYERS:
                raise PlanError(f"save names layers, which are numbered from 1 to {MOST_LAYERS}")
            if b in of:
                raise PlanError(f"save names layer {b} twice; a layer saves one of {', '.join(RICHER)}")
            of[b] = saved
    return tuple(of.get(b, Saved.INPUT) for b in range(1, max(of, default=0) + 1))


def _save_from_file(value: object) -> object:
    """`{"all": [3, 4], "products": [1]}`, each layer once."""
    if not isinstance(value, dict) or not all(isinstance(layers, list | tuple) for layers in value.values()):
        raise PlanError('save names layers by what they save, as {"all": [3, 4], "products": [1]}')
    if unknown := [word for word in value if word not in RICHER]:
        raise PlanError(f"save knows all, products and attention, not {str(unknown[0])[:40]!r}")
    return saves(**value)


def _save_to_file(save: tuple[Saved, ...]) -> dict[str, list[int]]:
    return {what: [b for b, saved in enumerate(save, start=1) if saved is what] for what in RICHER if what in save}


Save = Annotated[tuple[Saved, ...], BeforeValidator(_save_from_file), PlainSerializer(_save_to_file)]


@dataclass(frozen=True, slots=True)
class Policy:
    """How it is scheduled: the planner's choice. It never changes a bit of the result."""

    prefetch_depth: Slots = 1  # weight slots ahead of the block being computed
    gradient_slots: Slots = 1  # device slots for gradients of layers
    accumulation_group: Count = 1  # layer-major groups: 1 is row-major, all micro-batches is layer-major
    save: Save = ()  # of each layer from the first on, what is saved for its backward; of the others their input
    offload_blocks: tuple[Natural, ...] = ()  # layers of which what they save, but for their input, is on the host until backward
    saved_slots: Slots = 2  # device slots for that on its way there and back, of each kind that is saved
    update: Update = Update.BARRIER
    resident_blocks: tuple[Natural, ...] = ()  # blocks whose weights stay on the device; uploaded once a step
    spill_blocks: tuple[Natural, ...] = ()  # blocks, not the last layer, whose output goes to the host until backward
    boundary_stride: Count = 1  # layers of which only the last one's output stays; the others' are computed again
    speculate_blocks: tuple[Natural, ...] = ()  # blocks updated during backward into shadows, as if nothing were clipped
    square_on_device: bool = False  # the device sums the squares of every gradient that is whole there, for the global norm
    device_blocks: tuple[Natural, ...] = ()  # blocks whose masters and moments are on the device, which updates them
    disk_blocks: tuple[Natural, ...] = ()  # layers whose frozen weights are on a disk, and read before each load
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        """What a file may say, `{"all": [3]}`, and plain words, may be said in Python too."""
        if isinstance(self.save, dict):
            object.__setattr__(self, "save", _save_from_file(self.save))
        elif type(self.save) is not tuple or any(type(of) is not Saved for of in self.save):
            object.__setattr__(self, "save", tuple(map(Saved, self.save)))
        for name in BLOCK_LISTS:
            if type(blocks := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, tuple(blocks))

    def to_json(self) -> dict[str, Any]:
        """As a plan file has it."""
        return {**asdict(self), "save": _save_to_file(self.save)}

    def saved(self, block: int) -> Saved:
        """Saved results of the layer with this block number."""
        return self.save[block - 1] if 0 < block <= len(self.save) else Saved.INPUT

    def saving(self, saved: Saved) -> tuple[int, ...]:
        """Layers that save exactly this; of those that save their input, only the named ones."""
        return tuple([b for b, what in enumerate(self.save, start=1) if what is saved])


BLOCK_LISTS = tuple(field.name for field in fields(Policy) if field.name.endswith("_blocks") and field.default == ())
