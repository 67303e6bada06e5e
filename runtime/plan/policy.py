"""Semantics (the user's choice: decides the bits of the result) and policy (the planner's choice: decides time and memory)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from penstock.runtime.errors import PlanError

from .objective import CROSS_ENTROPY, Loss, LossUnit
from .optimizer import MasterDtype, Optimizer, optimizing
from .packed import Base
from .train import ALL, Train, parse_train, training
from .workload import FILE, Count, Dtype, Natural, Saved

Kernel = Literal["eager", "fused"]
Products = Literal["compute", "fp8"]  # compute: in the compute dtype
COMPUTES = ("bf16", "fp32", "fp8")  # values of --compute
# eager: torch's cross entropy on fp32 logits. online: online softmax reads each row of rounded logits once and writes the gradient
# in place; the product for the output matrix's gradient accumulates in fp32
LossKernel = Literal["eager", "online"]
# flash: FlashAttention-2, with a backward that adds in the order of its threads; deterministic: in a fixed order
AttentionKernel = Literal["flash", "deterministic", "cudnn"]
# Functions of other packages that transformers calls instead of torch if they are installed
LibraryKernel = Literal["causal_conv1d.causal_conv1d_fn", "fla.chunk_gated_delta_rule"]
MOST_LAYERS = 2**16  # more than any model has
LONGEST, MOST_TOKENS = 2**31 - 1, 2**40  # of a sequence, and of a micro-batch: their bytes fit in 64-bit integers
Slots = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
RICHER = (Saved.ATTENTION, Saved.PRODUCTS, Saved.ALL)  # saved activations of a layer in addition to its input, ascending
LEAVE = (Saved.ATTENTION, Saved.PRODUCTS)  # saved activations that may be offloaded, ascending


@dataclass(frozen=True)
class Semantics:
    """Settings that decide the bits of the result, chosen by the user."""

    seq_len: Count
    batch_size: Count
    micro_batch: Count
    compute_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "bf16"
    master_dtype: MasterDtype = "fp32"
    weight_rounding: Literal["half_up", "stochastic"] = "half_up"  # of a master below fp32
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    on_nonfinite: Literal["skip", "stop"] = "stop"
    loss_tile_tokens: Count = 1024
    mlp_tile_tokens: Count | None = None  # None: the MLP is not tiled
    attention: Literal["sdpa", "eager"] = "sdpa"
    experts: Literal["grouped_mm"] = "grouped_mm"
    # Kernels. Defaults are those of plan files from before the choice.
    norm: Kernel = "eager"
    loss: LossKernel = "eager"
    pointwise: Kernel = "eager"  # MLP activation and rotary embedding: bitwise identical, different time and memory
    attention_kernel: AttentionKernel = "flash"  # of fused attention on a GPU; a CPU has another kernel
    library_kernels: tuple[LibraryKernel, ...] = ()  # of linear attention and convolutions; default: torch's own calls
    # Tree reduction over a power of two of contiguous groups: micro-batches are summed in order, groups by a balanced binary tree
    sum_groups: Count = 1
    # Processes with a device each, a power of 2. Other fields are one rank's part; `all_ranks` has the same results for any number
    ranks: Count = 1
    train: Train = ALL
    # Adapter forward: x A^T is rounded, then the frozen product x W^T accumulates onto its product with B
    lora_products: Literal["accumulated"] = "accumulated"
    base: Base = "bf16"  # bf16: not packed, in the compute dtype
    # Products with projections. fp8: both operands in E4M3 with a scale per row, as docs/fp8.md defines. Under adapters the weights
    # are stored so (base fp8-rows); otherwise codes are a function of the bf16 weight, and weight gradients are computed in bf16
    products: Products = "compute"
    optimizer: Optimizer = Optimizer.ADAMW
    objective: Loss = CROSS_ENTROPY
    router_loss: Annotated[float, Field(ge=0)] = 0.0  # weight of the routers' auxiliary loss; 0: none
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        """Refuse a size before any tensor of it is made."""
        if self.seq_len > LONGEST or self.micro_batch * self.seq_len > MOST_TOKENS:
            size = f"a micro-batch of {self.micro_batch:,} x {self.seq_len:,} tokens is not planned"
            limits = f"at most {LONGEST:,} tokens of a sequence and {MOST_TOKENS:,} in all"
            raise PlanError(f"{size}: {limits}; lower --seq-len, --batch-size or --micro-batch")

    @cached_property
    def n_micro_batches(self) -> int:
        return -(-self.batch_size // self.micro_batch)

    @property
    def n_left(self) -> int:
        """Sequences of the last micro-batch if it is smaller than the others, else 0."""
        return self.batch_size % self.micro_batch

    @property
    def is_lean(self) -> bool:
        """True if a step uses the arithmetic of docs/optimizers.md instead of torch's AdamW with fp32 moments."""
        return self.optimizer is not Optimizer.ADAMW or self.weight_rounding == "stochastic"

    @property
    def state_bytes(self) -> float:
        """Bytes of master and moments per trained parameter."""
        return self.optimizer.state_bytes(self.master_dtype)

    @property
    def optimizer_in_words(self) -> str:
        separator = "," if ":" in self.optimizer else ":"
        return self.optimizer + (f"{separator}master={self.master_dtype}" if self.weight_rounding == "stochastic" else "")

    @property
    def device_multiple(self) -> int:
        """Elements of a parameter must be a multiple of this for bitwise identical updates on device and host: torch's host kernel
        computes the remainder, which fills no vector register, in another order."""
        return 1 if self.is_lean else 8

    @property
    def saved_state(self) -> dict[str, str]:
        """Checkpoint dtypes of a trained parameter's master and moments, by name; a split24 master is saved in fp32."""
        dtypes = {"master": self.master_dtype, **self.optimizer.moments}
        return {name: "fp32" if dtype == "split24" else dtype for name, dtype in dtypes.items()}

    def is_smaller(self, micro_batch: int | None) -> bool:
        return micro_batch == self.n_micro_batches - 1 and bool(self.n_left)

    def n_sequences(self, micro_batch: int) -> int:
        return self.n_left if self.is_smaller(micro_batch) else self.micro_batch

    def sum_level(self, micro_batch: int) -> int:
        """Index of the sum that the micro-batch is added to: the number of pending sums of earlier groups."""
        return (micro_batch // self._of_a_sum).bit_count()

    def begins_sum(self, micro_batch: int) -> bool:
        return micro_batch % self._of_a_sum == 0

    def n_joined(self, micro_batch: int) -> int:
        """Number of pending sums merged after the micro-batch: 0 unless it ends a group."""
        group, place = divmod(micro_batch + 1, self._of_a_sum)
        return 0 if place else (group & -group).bit_length() - 1

    @property
    def n_sums(self) -> int:
        """Sums of one gradient that exist at the same time."""
        return self.sum_groups.bit_length()

    @cached_property
    def _of_a_sum(self) -> int:
        return self.n_micro_batches // self.sum_groups

    @property
    def all_ranks(self) -> "Semantics":
        """Semantics of the step of all ranks, for a single process."""
        return replace(self, batch_size=self.batch_size * self.ranks, sum_groups=self.sum_groups * self.ranks, ranks=1)

    def shared_by(self, ranks: int) -> "Semantics":
        """Return one rank's semantics; raise PlanError if sum groups do not divide evenly among the ranks."""
        total = self.all_ranks
        if ranks < 1 or ranks.bit_count() > 1 or total.sum_groups % ranks:
            how = "with --sum-groups the same number or a multiple: the bits of the result depend on it alone"
            raise PlanError(f"{ranks} ranks cannot share {total.sum_groups} sum groups; choose a power of two, and {how}")
        if ranks > 1 and total.n_left:
            raise PlanError(f"{ranks} ranks: {total.batch_size} sequences are not equal micro-batches of {total.micro_batch}")
        return replace(total, batch_size=total.batch_size // ranks, sum_groups=total.sum_groups // ranks, ranks=ranks)

    def n_losses(self, n_supervised: int, n_answers: int | None = None) -> int:
        """Number of losses that a step averages, from its supervised tokens and, if packed, its answers."""
        n_sequences = self.ranks * self.batch_size if n_answers is None else n_answers
        return {LossUnit.TOKENS: n_supervised, LossUnit.SEQUENCES: n_sequences}.get(self.objective.per, n_sequences // 2)

    @property
    def least_group(self) -> int:
        """Smallest accumulation group: all micro-batches if several ranks exchange whole sums."""
        return 1 if self.ranks == 1 else self.n_micro_batches

    @property
    def n_pieces(self) -> int:
        """Equal pieces of a block's elements, each on a single rank: one per sum group of all ranks."""
        return self.sum_groups * self.ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.ranks * self.batch_size * self.seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch * self.seq_len


def computing(compute: str | None) -> dict[str, Any]:
    """Return the fields of `Semantics` for a value of COMPUTES; none for None. fp8: of products alone, all else in bf16."""
    if compute == "fp8":
        return {"compute_dtype": "bf16", "products": "fp8"}
    return {} if compute is None else {"compute_dtype": compute}


def trained(semantics: Semantics, train: str | None, base: Base | None, optimizer: str | None, master: Dtype | None) -> Semantics:
    parsed, fields = semantics.train if train is None else parse_train(train), training(train, base)
    of_master = {} if master is None else {"master_dtype": master}
    return replace(semantics, **fields | of_master | optimizing(optimizer, master) | {"train": parsed})


class Update(StrEnum):
    EAGER = "eager"  # when a block's gradient arrives; needs no clipping and on_nonfinite: stop
    BARRIER = "barrier"  # after the global norm; the next step starts once all blocks are updated
    DEFERRED = "deferred"  # after the global norm, block by block during the next step's forward


def saves(all: Iterable[int] = (), products: Iterable[int] = (), attention: Iterable[int] = ()) -> tuple[Saved, ...]:
    """Return `Policy.save` for layers that save all, products or attention; other layers save their input."""
    save: dict[int, Saved] = {}
    for saved, layers in ((Saved.ALL, all), (Saved.PRODUCTS, products), (Saved.ATTENTION, attention)):
        for b in layers:
            if type(b) is not int or not 0 < b <= MOST_LAYERS:
                raise PlanError(f"save names layers, which are numbered from 1 to {MOST_LAYERS}")
            if b in save:
                raise PlanError(f"save names layer {b} twice; a layer saves one of {', '.join(RICHER)}")
            save[b] = saved
    return tuple(save.get(b, Saved.INPUT) for b in range(1, max(save, default=0) + 1))


def _save_from_file(value: object) -> object:
    """Parse `{"all": [3, 4], "products": [1]}`, with each layer once."""
    if not isinstance(value, dict) or not all(isinstance(layers, list | tuple) for layers in value.values()):
        raise PlanError('save names layers by what they save, as {"all": [3, 4], "products": [1]}')
    if unknown := [word for word in value if word not in RICHER]:
        raise PlanError(f"save takes all, products and attention, not {str(unknown[0])[:40]!r}")
    return saves(**value)


def _save_to_file(save: tuple[Saved, ...]) -> dict[str, list[int]]:
    return {kind: [b for b, saved in enumerate(save, start=1) if saved is kind] for kind in RICHER if kind in save}


Save = Annotated[tuple[Saved, ...], BeforeValidator(_save_from_file), PlainSerializer(_save_to_file)]


@dataclass(frozen=True, slots=True)
class Policy:
    """Schedule of a step, chosen by the planner. It never changes a bit of the result."""

    prefetch_depth: Slots = 1  # weight slots ahead of the block being computed
    gradient_slots: Slots = 1  # device slots for gradients of layers
    accumulation_group: Count = 1  # layer-major groups: 1 is row-major, all micro-batches is layer-major
    save: Save = ()  # activations saved for backward, per layer from the first; later layers save their input
    offload_blocks: tuple[Natural, ...] = ()  # layers with activation offload of saved tensors other than the input
    saved_slots: Slots = 2  # device slots for offloaded tensors in transit, for each kind of saved tensors
    update: Update = Update.BARRIER
    resident_blocks: tuple[Natural, ...] = ()  # blocks with weights that remain on the device; uploaded once a step
    spill_blocks: tuple[Natural, ...] = ()  # blocks, except the last layer, with an output offloaded until backward
    boundary_stride: Count = 1  # checkpoint every n-th layer's output; recompute the others
    speculate_blocks: tuple[Natural, ...] = ()  # blocks updated during backward into shadows, as if without clipping
    square_on_device: bool = False  # compute square sums of gradients that are whole on the device there
    device_blocks: tuple[Natural, ...] = ()  # blocks with masters, moments and update on the device
    disk_blocks: tuple[Natural, ...] = ()  # layers with frozen weights on a disk, read before each load
    sum_blocks: tuple[Natural, ...] = ()  # blocks with gradient sums on the device over all groups of micro-batches
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        """Convert file syntax, `{"all": [3]}`, and plain strings."""
        if isinstance(self.save, dict):
            object.__setattr__(self, "save", _save_from_file(self.save))
        elif type(self.save) is not tuple or any(type(saved) is not Saved for saved in self.save):
            object.__setattr__(self, "save", tuple(map(Saved, self.save)))
        for name in BLOCK_LISTS:
            if type(blocks := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, tuple(blocks))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "save": _save_to_file(self.save)}

    def saved(self, block: int) -> Saved:
        return self.save[block - 1] if 0 < block <= len(self.save) else Saved.INPUT

    def saving(self, saved: Saved) -> tuple[int, ...]:
        """Layers with this entry in `save`."""
        return tuple([b for b, kind in enumerate(self.save, start=1) if kind is saved])


BLOCK_LISTS = tuple(field.name for field in fields(Policy) if field.name.endswith("_blocks") and field.default == ())
