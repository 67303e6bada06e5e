"""What autograd saves, computes and recomputes in one pass through a block.

A `Tape` plays a block's forward pass with sizes instead of numbers: one step per library call of the transformers module,
with what the step reads, what autograd saves of it, and which gradients its backward makes. Everything the planner knows
about a block's work and memory is read off this one recording. Calls that only change a view are not steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from penstock.runtime.plan.workload import Matmul, Saved, Tier

FP32, FP64, INT64 = 4, 8, 8  # bytes of an element


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor known by its size. `ours`: the block makes it; else its input or shared by all layers (masks, rotary tables)."""

    n_elements: int
    item_bytes: int
    ours: bool = True
    differentiable: bool = True

    @property
    def n_bytes(self) -> int:
        return self.n_elements * self.item_bytes


class Call(Enum):
    """What a step is, as far as it matters for what is saved and how fast it is."""

    PRODUCT = "product"  # with a weight
    GROUPED = "grouped"  # such products of all experts in one call, which says where it puts what it makes
    OVERWRITTEN = "overwritten"  # such a product, but its result is changed in place and cannot be saved
    ATTENTION = "attention"  # fused, or one of the products it is spelled out in
    POINTWISE = "pointwise"
    FUSED = "fused"  # one kernel that reads what it reads and writes what it makes once
    NORM = "norm"  # such a kernel, of a norm


@dataclass(frozen=True, slots=True)
class Step:
    """One call: what it reads, saves for its backward and makes."""

    reads: Sequence[Tensor]
    out: Tensor
    call: Call = Call.POINTWISE
    saves: Sequence[Tensor] = ()  # for its backward, besides what it makes
    saves_out: bool = False
    beside: Sequence[Tensor] = ()  # what it makes besides the output, and saves
    matmuls: Sequence[Matmul] = ()
    n_weights: int = 0  # elements of the weights that it uses
    n_trained: int = 0  # of these
    moved: int | None = None  # bytes of its memory traffic, where that is not simply all it reads and writes
    scratch: int | None = None  # bytes of its backward's temporaries, if not one the size of the largest tensor involved
    n_calls: int = 1  # of the library
    held: Sequence[Tensor] = ()  # what else lies there meanwhile, though neither read nor saved

    @property
    def made(self) -> tuple[Tensor, ...]:
        return self.out, *self.beside

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return *self.saves, *self.beside, *([self.out] if self.saves_out else ())

    @property
    def moved_bytes(self) -> int:
        if self.moved is not None:
            return self.moved
        return sum(t.n_bytes for t in (*self.reads, self.out)) + self.n_weights * self.out.item_bytes

    @property
    def scratch_bytes(self) -> int:
        return max(t.n_bytes for t in (*self.reads, self.out)) if self.scratch is None else self.scratch

    @property
    def keeps(self) -> set[Tensor]:
        return {t for t in self.saved if t.ours}

    @property
    def uses(self) -> set[Tensor]:
        """What of the block's own must lie there for it."""
        return {t for t in (*self.reads, self.out, *self.held) if t.ours}

    @property
    def is_fused_attention(self) -> bool:
        """Whether all of attention is one call, which also makes the logarithms of its sums."""
        return self.call is Call.ATTENTION and len(self.made) > 1

    def is_saved(self, saved: Saved | None) -> bool:
        """Whether a forward under this tier leaves what the step makes on the device."""
        match saved:
            case None | Saved.INPUT:
                return False
            case Saved.ATTENTION:
                return self.is_fused_attention
            case Saved.PRODUCTS:
                return self.call in (Call.PRODUCT, Call.GROUPED) or self.is_fused_attention
            case Saved.ALL:
                return True


Run = list[tuple[int, list[Step]]]  # steps, and how often they run


class Work(NamedTuple):
    """Work besides products and attention, as blocks and tiers state it."""

    pointwise_bytes: int  # read and written by all that is neither a matrix product nor fused attention
    fused_bytes: int  # of them, by fused kernels
    norm_bytes: int  # of these, by norms
    n_kernels: int

    @classmethod
    def of(cls, run: Run) -> "Work":
        every = [(count, s) for count, steps in run for s in steps]
        fused = [(count, s) for count, s in every if s.call in (Call.FUSED, Call.NORM)]
        norms = [(count, s) for count, s in fused if s.call is Call.NORM]
        of_all, of_fused, of_norms = (sum(count * s.moved_bytes for count, s in each) for each in (every, fused, norms))
        return cls(of_all, of_fused, of_norms, sum(count * s.n_calls for count, s in every))


@dataclass(slots=True)
class Tape:
    """A recording of one forward pass; `item_bytes` is the size of an element in the compute dtype.

    `tiles`: recordings of what comes after the steps tile by tile, each with how many tiles are like it.
    """

    item_bytes: int
    steps: list[Step] = field(default_factory=list)
    tiles: list[tuple[int, "Tape"]] = field(default_factory=list)
    cuts: tuple[tuple[Tensor, Tensor], ...] = ()  # what the tiles read, whole, and one tile of it
    held: tuple[Tensor, ...] = ()  # what the module's own names keep alive from here on

    def step(
        self, reads: Sequence[Tensor], n_elements: int, item_bytes: int | None = None, differentiable: bool = True, **of: Any
    ) -> Tensor:
        """Record a call, with the fields of a `Step`, and return its output, in the compute dtype unless `item_bytes` are given."""
        out = Tensor(n_elements, item_bytes or self.item_bytes, differentiable=differentiable)
        self.steps.append(Step(reads, out, held=self.held, **of))
        return out

    def linear(self, x: Tensor, m: int, k: int, n: int, n_trained: int, frozen: bool = False) -> Tensor:
        """(m, k) @ (k, n), with the bias added in the same call, `n_trained` elements of both."""
        matmul, saves = Matmul(m, k, n, frozen=frozen), [] if frozen else [x]
        return self.step([x], m * n, call=Call.PRODUCT, saves=saves, matmuls=[matmul], n_trained=n_trained, moved=0, scratch=0)

    def adapted(self, x: Tensor, m: int, k: int, widths: Sequence[int], rank: int, dropout: bool = False) -> list[Tensor]:
        """Frozen products (m, k) @ (k, n) with adapters, one for each n in `widths`: one call, which has no `out=` argument
        (`runtime/layers/adapters.py`). Backward begins at the last step, which so books the gradients of all factors."""
        stack, reads, outs = rank * len(widths), [x], list[Tensor]()
        narrow, n_trained = Tensor(m * stack, x.item_bytes), sum(rank * (k + n) for n in widths)
        if dropout:
            reads.append(self.step([x], m * k, beside=[Tensor(m * k, 1, differentiable=False)]))
        for i, n in enumerate(widths):
            first, last = i == 0, i == len(widths) - 1
            outs.append(self.step(
                reads, m * n, call=Call.GROUPED, saves=reads[-1:], beside=[narrow] * first, n_trained=n_trained * last, moved=0,
                scratch=narrow.n_bytes + k * stack * x.item_bytes * (len(widths) > 1), n_calls=2 + first * (1 + (len(widths) > 1)),
                matmuls=[Matmul(m, k, stack)] * first + [Matmul(m, rank, n), Matmul(m, k, n, frozen=True)],
            ))  # fmt: skip
        return outs

    def tile(
        self, inputs: Sequence[Tensor], n_rows: int, tile_rows: int, play: Callable[["Tape", Sequence[Tensor], int], None]
    ) -> None:
        """Record what remains of the pass by tiles of rows: `play` gets a tape, one tile of each input, and its rows."""
        for count, rows in ((n_rows // tile_rows, tile_rows), (1, n_rows % tile_rows)):
            if rows:
                part = Tape(self.item_bytes)
                cut = [Tensor(t.n_elements // n_rows * rows, t.item_bytes, ours=False) for t in inputs]
                play(part, cut, rows)
                self.tiles.append((count, part))
                self.cuts = self.cuts or tuple(zip(inputs, cut, strict=True))

    # ---- work

    @property
    def matmuls(self) -> list[Matmul]:
        """Products with weights in the order they are made, those of a shorter last tile next to those of the others."""
        return _matmuls(self.run())

    @property
    def work(self) -> Work:
        return Work.of(self.run())

    def run(self, saved: Saved | None = None, early_stop: bool = False) -> Run:
        """The steps that run; `saved`: without those whose results are there."""
        stop = self.stop if early_stop else len(self.steps)
        own = [s for s in self.steps[:stop] if not s.is_saved(saved)]
        return [(1, own), *((count, part.run(saved, early_stop)[0][1]) for count, part in self.tiles)]

    @property
    def stop(self) -> int:
        """How many steps run until the last tensor is saved. Tiles need all that comes before them."""
        if self.tiles:
            return len(self.steps)
        last = max(i for i, s in enumerate(self.steps) if s.saved)
        step = self.steps[last]
        return last + (not step.out.n_elements or any(t in step.made for t in step.saved))  # or changes what it reads

    @property
    def tile_sum_bytes(self) -> int:
        """Memory traffic of adding up the tiles' weight gradients in fp32: zeros once, then each gradient read and added."""
        n_tiles = sum(count for count, _ in self.tiles)
        return self._tiled_elements * (FP32 + n_tiles * (self.item_bytes + 2 * FP32))

    @property
    def _tiled_elements(self) -> int:
        """Of the weights that tiles use."""
        return sum(s.n_trained for s in self.tiles[0][1].steps) if self.tiles else 0

    # ---- memory

    @property
    def kept_bytes(self) -> int:
        """What autograd keeps from the forward until the backward, without weights, input and shared tensors. A tile of what tiles
        read is but a view: all of it is kept."""
        saved = {t for _, part in self.tiles for s in part.steps for t in s.saved}
        own = {t for s in self.steps for t in s.keeps} | {whole for whole, cut in self.cuts if cut in saved and whole.ours}
        return sum(t.n_bytes for t in own) + sum(count * part.kept_bytes for count, part in self.tiles)

    def tiers(self, shared_bytes: int) -> tuple[Tier, ...]:
        """Every way to recompute; `shared_bytes` lie in the allocator besides what the block makes."""
        lacks = {Saved.ALL}
        if not any(s.is_fused_attention for s in self.steps):
            lacks.add(Saved.ATTENTION)
        if any(s.call is Call.OVERWRITTEN for s in self.steps):
            lacks.add(Saved.PRODUCTS)
        return tuple(self._tier(saved, shared_bytes) for saved in Saved if saved not in lacks)

    def _tier(self, saved: Saved, shared_bytes: int) -> Tier:
        again = self.run(saved, early_stop=True)
        kept = [(count, s) for count, steps in self.run(early_stop=True) for s in steps if s.is_saved(saved)]
        sizes = [(s.call is Call.PRODUCT, count * sum(t.n_bytes for t in s.made)) for count, s in kept]
        return Tier(
            saved,
            saved_bytes=sum(n_bytes for _, n_bytes in sizes),
            transient_bytes=self.backward_peak_bytes(saved, early_stop=True) + shared_bytes,
            n_matmuls=len(_matmuls(again)),
            attention=any(s.call is Call.ATTENTION for _, steps in again for s in steps),
            **Work.of(again)._asdict(),
            n_saved=sum(count * (s.n_calls if s.matmuls else len(s.made)) for count, s in kept),
            copied_bytes=sum(n_bytes for is_product, n_bytes in sizes if not is_product),
        )

    @property
    def waiting_bytes(self) -> int:
        """The gradient that lies there while steps run again: backward has made it when it asks for the last tensor saved.

        None of its own where only a sum comes after: then it is the output's, which lies in the boundary's slot.
        """
        last = max((i for i, s in enumerate(self.steps) if s.saved), default=len(self.steps))
        return 0 if all(s.scratch_bytes == 0 for s in self.steps[last + 1 :]) else self.steps[last].out.n_bytes

    def backward_peak_bytes(self, saved: Saved = Saved.INPUT, early_stop: bool = False) -> int:
        """A bound on what lies in the allocator while the pass is recomputed and its backward runs, beside what was saved.

        Kept tensors until their last use, gradients of activations and of weights, temporaries; neither the input nor its
        gradient, which lie in the boundaries' arena.
        """
        memory = _Memory(saved, early_stop, self.item_bytes)
        memory.recompute(self)
        if not self.tiles:
            memory.go_back(self, set())
            return memory.peak_bytes
        _, part = self.tiles[0]
        run = {t for _, steps in part.run(early_stop=early_stop) for s in steps for t in s.reads}
        held = {whole for whole, cut in self.cuts if cut in run} - memory.saved
        held_bytes = sum(memory.size(t) for t in held if t.ours)
        # The gradient of a residual is that of the output, until another is added to it
        ends = [whole for whole, cut in self.cuts if cut in part.steps[-1].reads]
        made_bytes = sum(whole.n_bytes for whole, _ in self.cuts if whole not in ends)
        memory.live_bytes += held_bytes + self._tiled_elements * FP32 + made_bytes
        before_bytes = memory.live_bytes
        memory.recompute(part)
        memory.go_back(part, set())
        memory.live_bytes = before_bytes - held_bytes + sum(t.n_bytes for t in ends)
        memory.go_back(self, {whole for whole, _ in self.cuts})
        return memory.peak_bytes


def _matmuls(run: Run) -> list[Matmul]:
    first, *tiles = ([replace(m, count=count * m.count) for s in steps for m in s.matmuls] for count, steps in run)
    return [*first, *(m for alike in zip(*tiles, strict=True) for m in alike)]


@dataclass(slots=True)
class _Memory:
    """What lies in the allocator, step by step; results that the forward saved are counted elsewhere."""

    tier: Saved
    early_stop: bool
    item_bytes: int
    live_bytes: int = 0
    peak_bytes: int = 0
    saved: set[Tensor] = field(default_factory=set)
    elsewhere: set[Tensor] = field(default_factory=set)

    def size(self, t: Tensor) -> int:
        return 0 if t in self.elsewhere else t.n_bytes

    def recompute(self, tape: Tape) -> None:
        """The forward, under grad: every tensor that autograd saves stays."""
        stop = tape.stop if self.early_stop else len(tape.steps)
        last_use = {t: i for i, s in enumerate(tape.steps) for t in s.uses}
        made: set[Tensor] = set()
        waiting_bytes = tape.waiting_bytes
        for i, s in enumerate(tape.steps):
            there = s.is_saved(self.tier)
            if there and i < stop:
                self.elsewhere |= {*s.made}
            self.live_bytes += sum(self.size(t) for t in s.keeps - self.saved)
            self.saved |= s.keeps
            made |= s.uses
            if i < stop:
                passing = {t for t in made if last_use[t] >= i} - self.saved
                beside_bytes = max(0 if there else s.scratch_bytes, waiting_bytes)
                self.peak_bytes = max(self.peak_bytes, self.live_bytes + sum(map(self.size, passing)) + beside_bytes)
        if stop == len(tape.steps) and not tape.tiles:
            # The output, which the last calls may have changed in place; its gradient lies in the boundary's slot
            self.live_bytes += next(n_bytes for s in reversed(tape.steps) if (n_bytes := self.size(s.out)))

    def go_back(self, tape: Tape, gradients: set[Tensor]) -> None:
        """The backward, from the `gradients` that lie there, or from the output's, which lies in the boundary's slot."""
        uses = Counter(t for s in tape.steps for t in s.keeps)
        for s in reversed(tape.steps):
            towards = [t for t in s.reads if t.differentiable]
            weight_bytes = s.n_trained * self.item_bytes
            made_bytes = sum(t.n_bytes for t in towards) + weight_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + made_bytes + s.scratch_bytes)
            self.live_bytes += weight_bytes + sum(t.n_bytes for t in {*towards} - gradients)
            gradients |= {*towards}
            if s.out in gradients:
                self.live_bytes -= s.out.n_bytes
            for t in s.keeps:
                uses[t] -= 1
                self.live_bytes -= 0 if uses[t] else self.size(t)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
