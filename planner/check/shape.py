"""What of a plan decides how its arenas and ops must look?

The few facts that follow from workload, semantics and policy, as the checker reads the contract in `runtime/plan/plan.py`. Only the
checker uses them, never what makes plans.
"""

from dataclasses import dataclass
from itertools import accumulate

from runtime.errors import PlanError
from runtime.plan import Op, Plan, Update
from runtime.plan.workload import ALIGN_ELEMENTS, ITEM_BYTES, Parameter

AGAIN = "make the plan again with `penstock plan`"


def wrong(i: int, op: Op, what: str) -> PlanError:
    """The error that op number i of a plan is wrong, in one line."""
    return PlanError(f"op {i} ({op.name}): {what}; {AGAIN}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one load, offload or update moves: weights of a block that follow one another, and the elements they take up."""

    parameters: tuple[Parameter, ...]
    n_elements: int  # in a slot: each weight starts on a multiple of ALIGN_ELEMENTS


def cut(parameters: tuple[Parameter, ...], item_bytes: int, most_bytes: int | None) -> tuple[Chunk, ...]:
    """The chunks of a block: each takes weights as long as they fit into `most_bytes`, and at least one; None: all in one."""
    chunks = [Chunk((), 0)]
    for p in parameters:
        n_padded = -(-p.n_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        n_elements = chunks[-1].n_elements + n_padded
        if most_bytes is not None and n_elements * item_bytes > most_bytes and chunks[-1].n_elements:
            chunks.append(Chunk((p,), n_padded))
        else:
            chunks[-1] = Chunk((*chunks[-1].parameters, p), n_elements)
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class Shape:
    """Names and places; where a dict gives a block its place, the blocks that are not in it have none."""

    n_blocks: int
    head: int
    n_micro_batches: int
    group: int
    reduced: bool  # one group: a gradient leaves the device once, complete
    tied: bool
    upload: str  # the host arena that loads read
    state: tuple[str, ...]  # the host arenas that hold what a block has learned
    eager: bool
    resident: dict[int, int]  # block: its slot of `resident_weights`
    spilled: dict[int, int]  # block: its place among those whose output spills
    shared: dict[int, int]  # block whose output is computed again: its place among those that share slots
    standing: dict[int, int]  # block: its place among those whose output has slots of its own
    chunks: tuple[tuple[Chunk, ...], ...]  # of each block
    first_part: tuple[int, ...]  # block: the slot of its first chunk in the arenas of the host
    shadows: dict[int, int]  # speculating block: the slot of its first chunk in `shadows`
    squared: dict[int, int]  # block whose gradient's squares the device sums: its slot in `squares` and `host_squares`

    @staticmethod
    def of(plan: Plan) -> "Shape":
        """What the workload, the semantics and the policy of a plan say of its ops."""
        blocks, policy = plan.workload.blocks, plan.policy
        n_blocks, head, stride = len(blocks), len(blocks) - 1, policy.boundary_stride
        n_micro_batches, group = plan.semantics.n_micro_batches, policy.group_micro_batches
        copy = plan.semantics.compute_dtype == "bf16" and plan.semantics.master_dtype == "fp32"
        spills = frozenset(policy.spill_blocks)
        shared = {b: b % stride - 1 for b in range(head - 1) if b % stride}
        standing = [b for b in range(head) if b not in spills and b not in shared]
        item_bytes, most_bytes = ITEM_BYTES[plan.semantics.compute_dtype], policy.transfer_chunk_bytes
        chunks = tuple(cut(b.parameters, item_bytes, most_bytes if 0 < i < head else None) for i, b in enumerate(blocks))
        speculating = [b for b in policy.speculate_blocks if b < n_blocks]
        return Shape(
            n_blocks=n_blocks,
            head=head,
            n_micro_batches=n_micro_batches,
            group=group,
            reduced=group >= n_micro_batches,
            tied=plan.workload.tied,
            upload="host_weights" if copy else "masters",
            state=("host_weights", "remainders", "moments") if policy.storage == "split" else ("masters", "moments"),
            eager=policy.update is Update.EAGER,
            resident={b: i for i, b in enumerate(sorted(set(policy.resident_blocks)))},
            spilled={b: i for i, b in enumerate(sorted(spills))},
            shared=shared,
            standing={b: i for i, b in enumerate(standing)},
            chunks=chunks,
            first_part=_starts([len(c) for c in chunks]),
            shadows=dict(zip(speculating, _starts([len(chunks[b]) for b in speculating]), strict=True)),
            squared={b: i for i, b in enumerate(sorted(set(policy.square_blocks))) if b < n_blocks},
        )

    @property
    def vocab_slot_is_sum(self) -> bool:
        """Whether the vocabulary blocks' gradient slot is fp32 and holds the running sum."""
        return self.tied or not self.reduced

    @property
    def ring(self) -> bool:
        """Whether layers share a ring of `host_gradients`, instead of a slot each."""
        return self.eager and self.reduced

    @property
    def first_ring_slot(self) -> int:
        """Slots of `boundaries` from here on belong to no block: outputs that spill, or are computed again, pass through them."""
        return len(self.standing) * self.group

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Block and chunk of each slot of an arena of the host."""
        return [(b, c) for b, chunks in enumerate(self.chunks) for c in range(len(chunks))]

    @property
    def n_normed(self) -> int:
        """Gradients that the norm of a step is made of: a block's squares, or each chunk that the host reads."""
        return len(self.squared) + sum(len(c) for b, c in enumerate(self.chunks) if b not in self.squared)

    def has_norm(self, block: int) -> bool:
        """Whether there is a norm op for the block: that of block 0 is also there to end the sum."""
        return block == 0 or block not in self.squared

    def vocab(self, block: int) -> bool:
        """Whether it is the embedding or the head."""
        return block in (0, self.head)

    def weights(self, block: int) -> tuple[str, int | None]:
        if block in self.resident:
            return "resident_weights", self.resident[block]
        return ("vocab_weights", 0) if self.vocab(block) else ("weights", None)

    def boundary(self, block: int, micro_batch: int) -> tuple[str, int | None]:
        if block in self.spilled:
            return "boundaries", None
        first = self.standing[block] if block in self.standing else len(self.standing) + self.shared[block]
        return "boundaries", first * self.group + micro_batch % self.group


def _starts(lengths: list[int]) -> tuple[int, ...]:
    """Where each of some runs begins, one laid after the other."""
    return tuple(accumulate(lengths, initial=0))[: len(lengths)]
