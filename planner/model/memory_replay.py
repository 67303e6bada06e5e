"""Symbolic execution of a block's forward, recompute and backward: work, saved tensors and peak memory from tensor sizes.

A `Tape` has one step per library call of the transformers module (views excepted), with the tensors it reads, the tensors that
autograd saves, and the gradients of its backward. It is the only source of the planner's estimates of work and memory of a block.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from penstock.runtime.plan.packed import scaled_scratch_bytes
from penstock.runtime.plan.workload import Matmul, Saved, Tier

FP32, FP64, INT64 = 4, 8, 8  # bytes of an element


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Size of a tensor. `internal`: computed by the block, not its input or shared by all layers (masks, rotary tables)."""

    n_elements: int
    item_bytes: int
    internal: bool = True
    differentiable: bool = True

    @property
    def n_bytes(self) -> int:
        return self.n_elements * self.item_bytes


class Call(Enum):
    """Category of a step, which decides its speed and whether selective checkpointing saves its output."""

    PRODUCT = "product"  # matrix product with a weight
    GROUPED = "grouped"  # products of all experts in one call, which has no `out=`
    OVERWRITTEN = "overwritten"  # grouped product with a result that is modified in place, so that it cannot be saved
    ATTENTION = "attention"  # fused attention, or one product of eager attention
    POINTWISE = "pointwise"
    FUSED = "fused"  # one kernel that reads its inputs and writes its outputs once
    NORM = "norm"  # a fused norm


@dataclass(frozen=True, slots=True)
class Step:
    """One library call."""

    reads: Sequence[Tensor]
    out: Tensor
    call: Call = Call.POINTWISE
    saves: Sequence[Tensor] = ()  # inputs saved for backward
    saves_out: bool = False
    extra_outputs: Sequence[Tensor] = ()  # additional outputs, all saved for backward
    matmuls: Sequence[Matmul] = ()
    n_weights: int = 0  # elements of the weights that it uses
    n_trained: int = 0  # of these, trained
    moved: int | None = None  # bytes of memory traffic; None: all inputs, weights and the output
    scratch: int | None = None  # bytes of temporaries in backward; None: the size of the largest tensor involved
    n_calls: int = 1  # library calls
    held: Sequence[Tensor] = ()  # other live tensors, neither read nor saved

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return self.out, *self.extra_outputs

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return *self.saves, *self.extra_outputs, *([self.out] if self.saves_out else ())

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
        return {t for t in self.saved if t.internal}

    @property
    def uses(self) -> set[Tensor]:
        """Tensors of the block that must be in memory during the step."""
        return {t for t in (*self.reads, self.out, *self.held) if t.internal}

    @property
    def is_fused_attention(self) -> bool:
        """True for attention in one call, which also outputs the log-sum-exp."""
        return self.call is Call.ATTENTION and len(self.outputs) > 1

    def is_saved(self, saved: Saved | None) -> bool:
        """True if a forward under this tier saves the outputs of the step."""
        match saved:
            case None | Saved.INPUT:
                return False
            case Saved.ATTENTION:
                return self.is_fused_attention
            case Saved.PRODUCTS:
                return self.call in (Call.PRODUCT, Call.GROUPED) or self.is_fused_attention
            case Saved.ALL:
                return True


Run = list[tuple[int, list[Step]]]  # (count, steps)


class Work(NamedTuple):
    """Memory-bound work of a block or tier."""

    pointwise_bytes: int  # memory traffic of all calls except matrix products and fused attention
    fused_bytes: int  # of these, by fused kernels
    norm_bytes: int  # of those, by fused norms
    n_kernels: int

    @classmethod
    def from_run(cls, run: Run) -> "Work":
        every = [(count, s) for count, steps in run for s in steps]
        fused = [(count, s) for count, s in every if s.call in (Call.FUSED, Call.NORM)]
        norms = [(count, s) for count, s in fused if s.call is Call.NORM]
        all_bytes, fused_bytes, norm_bytes = (sum(count * s.moved_bytes for count, s in part) for part in (every, fused, norms))
        return cls(all_bytes, fused_bytes, norm_bytes, sum(count * s.n_calls for count, s in every))


@dataclass(slots=True)
class Tape:
    """One forward pass. `item_bytes` is the element size of the compute dtype; `tiles` are the tapes (with counts) of the remaining
    calls that run tile by tile after `steps`."""

    item_bytes: int
    steps: list[Step] = field(default_factory=list)
    tiles: list[tuple[int, "Tape"]] = field(default_factory=list)
    cuts: tuple[tuple[Tensor, Tensor], ...] = ()  # inputs of the tiles: the full tensor, and one tile
    held: tuple[Tensor, ...] = ()  # tensors that local variables of the module keep alive during the next step

    def step(
        self, reads: Sequence[Tensor], n_elements: int, item_bytes: int | None = None, differentiable: bool = True, **fields: Any
    ) -> Tensor:
        """Append a `Step` with these fields; return its output, in the compute dtype unless `item_bytes` is passed."""
        out = Tensor(n_elements, item_bytes or self.item_bytes, differentiable=differentiable)
        self.steps.append(Step(reads, out, held=self.held, **fields))
        return out

    def linear(self, x: Tensor, m: int, k: int, n: int, n_trained: int, frozen: bool = False) -> Tensor:
        """Append (m, k) @ (k, n) with an optional bias; `n_trained` counts elements of weight and bias."""
        matmul, saves = Matmul(m, k, n, frozen=frozen), [] if frozen else [x]
        return self.step([x], m * n, call=Call.PRODUCT, saves=saves, matmuls=[matmul], n_trained=n_trained, moved=0, scratch=0)

    def scaled(self, x: Tensor, m: int, k: int, products: Sequence[tuple[int, int, bool]], packed: bool) -> list[Tensor]:
        """Append FP8 products (m, k) @ (k, n) in one call, which quantises its input once, and weights that are not `packed`.
        `products`: n, trained elements of weight and bias, and True for a frozen weight."""
        outs = list[Tensor]()
        for i, (n, n_trained, frozen) in enumerate(products):
            more_bytes = m * sum(n for n, *_ in products[i + 1 :]) * self.item_bytes  # their gradients exist until the call ends
            outs.append(self.step(
                [x], m * n, call=Call.PRODUCT, saves=[] if frozen else [x], n_trained=n_trained, moved=0,
                matmuls=[Matmul(m, k, n, frozen=frozen, scaled="shared" if i else "own")],
                scratch=scaled_scratch_bytes(m, k, n, self.item_bytes, packed) + more_bytes, n_calls=1 + (not i) + (not packed),
            ))  # fmt: skip
        return outs

    def adapted(
        self, x: Tensor, m: int, k: int, widths: Sequence[int], rank: int, dropout: bool = False, scaled: Sequence[bool] = ()
    ) -> list[Tensor]:
        """Append frozen products (m, k) @ (k, n) with LoRA adapters, for each n in `widths`, in one call without `out=`
        (`runtime/layers/adapters.py`). The gradients of all factors count for the last step, where backward begins. `scaled`: True
        for each product in FP8."""
        stack, reads, outs = rank * len(widths), [x], list[Tensor]()
        narrow, n_trained, is_stacked = Tensor(m * stack, x.item_bytes), sum(rank * (k + n) for n in widths), len(widths) > 1
        if dropout:
            reads.append(self.step([x], m * k, extra_outputs=[Tensor(m * k, 1, differentiable=False)]))
        for i, n in enumerate(widths):
            first, last, in_fp8 = i == 0, i == len(widths) - 1, bool(scaled) and scaled[i]
            product = Matmul(m, k, n, frozen=True, scaled="no" if not in_fp8 else "shared" if any(scaled[:i]) else "own")
            more_bytes = scaled_scratch_bytes(m, k, n, self.item_bytes) if in_fp8 else 0
            outs.append(self.step(
                reads, m * n, call=Call.GROUPED, saves=reads[-1:], extra_outputs=[narrow] * first, n_trained=n_trained * last,
                moved=0, scratch=narrow.n_bytes + k * stack * x.item_bytes * is_stacked + more_bytes,
                n_calls=2 + first * (1 + is_stacked) + in_fp8,
                matmuls=[Matmul(m, k, stack)] * first + [Matmul(m, rank, n), product],
            ))  # fmt: skip
        return outs

    def tile(
        self, inputs: Sequence[Tensor], n_rows: int, tile_rows: int, replay: Callable[["Tape", Sequence[Tensor], int], None]
    ) -> None:
        """Append the rest of the pass as tiles of rows; `replay(tape, inputs, rows)` replays one tile."""
        for count, rows in ((n_rows // tile_rows, tile_rows), (1, n_rows % tile_rows)):
            if rows:
                part = Tape(self.item_bytes)
                cut = [Tensor(t.n_elements // n_rows * rows, t.item_bytes, internal=False) for t in inputs]
                replay(part, cut, rows)
                self.tiles.append((count, part))
                self.cuts = self.cuts or tuple(zip(inputs, cut, strict=True))

    @property
    def matmuls(self) -> list[Matmul]:
        """Matrix products with weights in order of execution; a shorter last tile's products follow those of the full tiles."""
        return _matmuls(self.run())

    @property
    def work(self) -> Work:
        return Work.from_run(self.run())

    def run(self, saved: Saved | None = None, early_stop: bool = False) -> Run:
        """Return the steps that run in forward or recompute, without those with saved outputs."""
        stop = self.stop if early_stop else len(self.steps)
        steps = [s for s in self.steps[:stop] if not s.is_saved(saved)]
        return [(1, steps), *((count, part.run(saved, early_stop)[0][1]) for count, part in self.tiles)]

    @property
    def stop(self) -> int:
        """Number of steps that recompute runs until the last tensor is saved (early stop); all of them before tiles."""
        if self.tiles:
            return len(self.steps)
        last = max(i for i, s in enumerate(self.steps) if s.saved)
        step = self.steps[last]
        return last + (not step.out.n_elements or any(t in step.outputs for t in step.saved))  # no elements: it writes in place

    @property
    def tile_sum_bytes(self) -> int:
        """Memory traffic of accumulating the tiles' weight gradients in fp32: one zero fill, then one addition per tile."""
        n_tiles = sum(count for count, _ in self.tiles)
        return self._tiled_elements * (FP32 + n_tiles * (self.item_bytes + 2 * FP32))

    @property
    def _tiled_elements(self) -> int:
        """Trained elements of the weights that tiles use."""
        return sum(s.n_trained for s in self.tiles[0][1].steps) if self.tiles else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that autograd saves from forward to backward, without weights, input and shared tensors. A tile of an input is a
        view, so the full input is saved."""
        saved = {t for _, part in self.tiles for s in part.steps for t in s.saved}
        tensors = {t for s in self.steps for t in s.keeps} | {full for full, cut in self.cuts if cut in saved and full.internal}
        return sum(t.n_bytes for t in tensors) + sum(count * part.kept_bytes for count, part in self.tiles)

    def tiers(self, shared_bytes: int) -> tuple[Tier, ...]:
        """Return all recompute tiers; `shared_bytes` are allocated in addition to the block's tensors."""
        lacks = {Saved.ALL}
        if not any(s.is_fused_attention for s in self.steps):
            lacks.add(Saved.ATTENTION)
        if any(s.call is Call.OVERWRITTEN for s in self.steps):
            lacks.add(Saved.PRODUCTS)
        return tuple(self._tier(saved, shared_bytes) for saved in Saved if saved not in lacks)

    def _tier(self, saved: Saved, shared_bytes: int) -> Tier:
        again = self.run(saved, early_stop=True)
        saved_steps = [(count, s) for count, steps in self.run(early_stop=True) for s in steps if s.is_saved(saved)]
        sizes = [(s.call is Call.PRODUCT, count * sum(t.n_bytes for t in s.outputs)) for count, s in saved_steps]
        return Tier(
            saved,
            saved_bytes=sum(n_bytes for _, n_bytes in sizes),
            transient_bytes=self.backward_peak_bytes(saved, early_stop=True) + shared_bytes,
            n_matmuls=len(_matmuls(again)),
            attention=any(s.call is Call.ATTENTION for _, steps in again for s in steps),
            **Work.from_run(again)._asdict(),
            n_saved=sum(count * (s.n_calls if s.matmuls else len(s.outputs)) for count, s in saved_steps),
            copied_bytes=sum(n_bytes for is_product, n_bytes in sizes if not is_product),
        )

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the gradient that is live during recompute, which unpacking the last saved tensor triggers.

        Zero if only additions follow: then it is the output's gradient, in the boundary's slot.
        """
        last = max((i for i, s in enumerate(self.steps) if s.saved), default=len(self.steps))
        return 0 if all(s.scratch_bytes == 0 for s in self.steps[last + 1 :]) else self.steps[last].out.n_bytes

    def backward_peak_bytes(self, saved: Saved = Saved.INPUT, early_stop: bool = False) -> int:
        """Return an upper bound on allocated bytes during recompute and backward, without tensors saved in forward.

        Includes saved tensors until their last use, gradients of activations and weights, and temporaries; excludes the input and
        its gradient, which are in the `activations` arena.
        """
        memory = _Memory(saved, early_stop, self.item_bytes)
        memory.recompute(self)
        if not self.tiles:
            memory.run_backward(self, set())
            return memory.peak_bytes
        _, part = self.tiles[0]
        run = {t for _, steps in part.run(early_stop=early_stop) for s in steps for t in s.reads}
        held = {full for full, cut in self.cuts if cut in run} - memory.saved
        held_bytes = sum(memory.size(t) for t in held if t.internal)
        # The gradient of a residual is the output's gradient, until another is added to it
        ends = [full for full, cut in self.cuts if cut in part.steps[-1].reads]
        made_bytes = sum(full.n_bytes for full, _ in self.cuts if full not in ends)
        memory.live_bytes += held_bytes + self._tiled_elements * FP32 + made_bytes
        before_bytes = memory.live_bytes
        memory.recompute(part)
        memory.run_backward(part, set())
        memory.live_bytes = before_bytes - held_bytes + sum(t.n_bytes for t in ends)
        memory.run_backward(self, {full for full, _ in self.cuts})
        return memory.peak_bytes


def _matmuls(run: Run) -> list[Matmul]:
    first, *tiles = ([replace(m, count=count * m.count) for s in steps for m in s.matmuls] for count, steps in run)
    return [*first, *(m for products in zip(*tiles, strict=True) for m in products)]


@dataclass(slots=True)
class _Memory:
    """Simulated allocator; outputs that the forward saved (`elsewhere`) count zero."""

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
        """Run the forward with grad enabled: tensors saved by autograd remain allocated."""
        stop = tape.stop if self.early_stop else len(tape.steps)
        last_use = {t: i for i, s in enumerate(tape.steps) for t in s.uses}
        used: set[Tensor] = set()
        waiting_bytes = tape.waiting_bytes
        for i, s in enumerate(tape.steps):
            is_saved = s.is_saved(self.tier)
            if is_saved and i < stop:
                self.elsewhere |= {*s.outputs}
            self.live_bytes += sum(self.size(t) for t in s.keeps - self.saved)
            self.saved |= s.keeps
            used |= s.uses
            if i < stop:
                passing = {t for t in used if last_use[t] >= i} - self.saved
                beside_bytes = max(0 if is_saved else s.scratch_bytes, waiting_bytes)
                self.peak_bytes = max(self.peak_bytes, self.live_bytes + sum(map(self.size, passing)) + beside_bytes)
        if stop == len(tape.steps) and not tape.tiles:
            # Add the output, which the last calls may have modified in place; its gradient is in the boundary's slot
            self.live_bytes += next(n_bytes for s in reversed(tape.steps) if (n_bytes := self.size(s.out)))

    def run_backward(self, tape: Tape, gradients: set[Tensor]) -> None:
        """Run the backward from existing `gradients`, or from the output's, which is in the boundary's slot."""
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
