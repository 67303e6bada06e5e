"""How does a CPU perform an op in a GPU's place?

With a "device" arena of its own, real copies and real mathematics. What `runtime/plan.py` says an op reads and writes is done here.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .blocks import LayerInputs, Templates, Weights, kept, op_seed, shared
from .cores import split_cores
from .data import Batch
from .errors import PenstockError
from .memory import DTYPE, Arenas
from .optimizer import CHUNK_ELEMENTS, AdamW, SplitMaster, SummedGradient, adamw_, clip_factor, round_half_up, sum_of_squares
from .plan import Kind, Lane, Op, Plan, Slot, Update
from .workload import Parameter

WEIGHT_ARENAS = ("weights", "vocab_weights", "resident_weights")


class NonFiniteError(PenstockError):
    """A gradient is infinite or not a number, and the plan says to stop."""


@dataclass(slots=True)
class StepResult:
    """What a step leaves behind."""

    loss_sum: float = 0.0
    n_supervised: int = 0
    grad_norm: float = math.nan
    skipped: bool = False

    @property
    def loss(self) -> float:
        """Mean over the step's supervised tokens."""
        return self.loss_sum / self.n_supervised


@dataclass(slots=True)
class _Graph:
    """A kept forward: where its backward begins, and its differentiable inputs. The output itself is not kept alive."""

    edge: GradientEdge
    inputs: list[torch.Tensor]
    names: list[str] = field(default_factory=list)


class CpuMachine:
    """Performs a plan on the CPU. Compute has cores of its own; copies and the optimizer share the rest."""

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[int], Batch],
        settings: Callable[[int], AdamW],
        seed: int = 0,
        pin_threads: bool = False,
    ) -> None:
        """Allocate every arena and build the templates; the host state is zero until `set_weights`."""
        self.plan, self.batches, self.settings, self.seed = plan, batches, settings, seed
        self.arenas = Arenas(plan.arenas, torch.device("cpu"))
        self.templates = Templates(plan.model.config, plan.workload, plan.semantics)
        self.results: dict[int, StepResult] = {}
        self.n_updates = 0  # steps whose update was applied; sets the bias correction
        self.pin_threads = pin_threads
        self._cores = split_cores(sorted(os.sched_getaffinity(0)))
        self._blocks = plan.workload.blocks
        self._offsets = [b.offsets()[0] for b in self._blocks]
        self._host_offsets = [b.offsets(owned_only=True)[0] for b in self._blocks]
        self._tensor_number = {p.name: i for i, p in enumerate(p for b in self._blocks for p in b.parameters if p.tied_to is None)}
        self._last_norm = max((i for i, op in enumerate(plan.ops) if op.kind is Kind.NORM), default=None)
        self._batch: tuple[int, Batch] | None = None
        self._inputs: dict[int, list[LayerInputs]] = {}  # by micro-batch
        self._graphs: dict[tuple[int, int], _Graph] = {}  # kept forwards, by block and micro-batch
        self._bound: Slot | None = None  # the weight slot of the backward that is running
        self._factor: tuple[int, float | None] | None = None  # (step, clip factor; None: the step is skipped)

    # -- host state -------------------------------------------------------------------------------------------------

    def set_weights(self, block: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Put a block's own weights (any float dtype) into the host store: master and compute copy."""
        for p in self._owned(block):
            master, given = self._master(block, p), weights[p.name].reshape(-1)
            copy = self._host("host_weights", block, p) if self.plan.weights_arena == "host_weights" else None
            for start in range(0, p.n_elements, CHUNK_ELEMENTS):
                part = slice(start, start + CHUNK_ELEMENTS)
                match master:
                    case SplitMaster():
                        master.cut(part, given[part].float())
                        continue
                    case _ if master.dtype is torch.float32:
                        master[part] = given[part]
                    case _:
                        round_half_up(given[part].float(), master[part])
                if copy is not None:
                    round_half_up(master[part], copy[part])

    def initialise(self, seed: int) -> None:
        """Random weights, the same for the same seed."""
        for block, weights in self.templates.initial_weights(seed):
            self.set_weights(block, weights)

    def _owned(self, block: int) -> list[Parameter]:
        return [p for p in self._blocks[block].parameters if p.tied_to is None]

    def _host(self, arena: str, block: int, p: Parameter) -> torch.Tensor:
        dtype = self.plan.semantics.master_dtype if arena == "masters" else self.plan.semantics.compute_dtype
        return self.arenas.view(Slot(arena, block), dtype, (p.n_elements,), self._host_offsets[block][p.name])

    def _master(self, block: int, p: Parameter) -> torch.Tensor | SplitMaster:
        """Where the master of an owned parameter lies, flat."""
        if self.plan.policy.storage == "mirrored":
            return self._host("masters", block, p)
        at = self._host_offsets[block][p.name]
        remainder = self.arenas.view(Slot("remainders", block), "int16", (p.n_elements,), at)
        return SplitMaster(self._host("host_weights", block, p), remainder)

    def master(self, block: int, p: Parameter) -> torch.Tensor:
        """The master of an owned parameter, flat; to be read only, as it may be a copy."""
        master = self._master(block, p)
        return master.joined(slice(None)) if isinstance(master, SplitMaster) else master

    def moments(self, block: int, p: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of an owned parameter, flat fp32."""
        half, at = self._blocks[block].host_elements, self._host_offsets[block][p.name]
        slot = Slot("moments", block)
        return self.arenas.view(slot, "fp32", (p.n_elements,), at), self.arenas.view(slot, "fp32", (p.n_elements,), half + at)

    def compute_weights(self) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """Every owned parameter and its compute weight, shaped, in `named_parameters` order."""
        for block in range(len(self._blocks)):
            for p in self._owned(block):
                yield p, self._host(self.plan.weights_arena, block, p).view(p.shape)

    # -- the machine ------------------------------------------------------------------------------------------------

    @contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        self._forget(lane)
        compute_cores, host_cores = self._cores
        cores = compute_cores if lane is Lane.GPU else host_cores
        if self.pin_threads:
            os.sched_setaffinity(0, cores)  # 0: the calling thread, which ends with the lane
        torch.set_num_threads(len(cores) if lane is Lane.GPU and self.pin_threads else 1)
        with torch.no_grad():
            yield

    def _forget(self, lane: Lane) -> None:
        """Drop what a run that failed in the middle of a step has left in the lane's hands."""
        if lane is Lane.GPU:
            self._batch, self._bound = None, None
            self._graphs.clear()
        elif lane is Lane.CPU:
            self._factor = None

    def mark(self, op: Op) -> object:
        return None  # when `perform` returns, the work is done

    def follow(self, lane: Lane, token: object) -> None:
        pass

    def perform(self, index: int, op: Op, step: int) -> None:
        match op.kind:
            case Kind.LOAD:
                self._load(op)
            case Kind.FORWARD:
                self._forward(op, step)
            case Kind.LOSS:
                self._loss(op, step)
            case Kind.BACKWARD:
                self._backward(op, step)
            case Kind.OFFLOAD:
                self.arenas.raw(op.writes[0])[: self._gradient_bytes(op.block)].copy_(
                    self.arenas.raw(op.reads[0])[: self._gradient_bytes(op.block)]
                )
            case Kind.SPILL | Kind.FETCH:
                n_bytes = self._blocks[op.block].boundary_bytes
                self.arenas.raw(op.writes[0])[:n_bytes].copy_(self.arenas.raw(op.reads[0])[:n_bytes])
            case Kind.ACCUMULATE:
                self._accumulate(op)
            case Kind.NORM:
                self._norm(op, step, last=index == self._last_norm)
            case Kind.UPDATE:
                self._update(op, step)
            case _:
                assert_never(op.kind)

    # -- data -------------------------------------------------------------------------------------------------------

    def _micro_batch(self, step: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._batch is None or self._batch[0] != step:
            batch = self.batches(step)
            self._batch = (step, batch)
            self.results[step] = StepResult(n_supervised=batch.n_supervised)
        rows = slice(m * self.plan.semantics.micro_batch, (m + 1) * self.plan.semantics.micro_batch)
        return self._batch[1].input_ids[rows], self._batch[1].targets[rows]

    # -- weights ----------------------------------------------------------------------------------------------------

    def _load(self, op: Op) -> None:
        dtype, block = self.plan.semantics.compute_dtype, self._blocks[op.block]
        (to,) = op.writes
        source, *tied = op.reads
        if not tied:
            n = block.host_elements
            self.arenas.view(to, dtype, (n,)).copy_(self.arenas.view(source, dtype, (n,)))
            return
        for p in block.parameters:
            if p.tied_to is None:
                view = self.arenas.view(source, dtype, (p.n_elements,), self._host_offsets[op.block][p.name])
            else:
                view = self.arenas.view(tied[0], dtype, (p.n_elements,), self._host_offsets[0][p.tied_to])
            self.arenas.view(to, dtype, (p.n_elements,), self._offsets[op.block][p.name]).copy_(view)

    def _weights(self, block: int, slot: Slot) -> Weights:
        dtype = self.plan.semantics.compute_dtype
        return {
            p.name: self.arenas.view(slot, dtype, p.shape, self._offsets[block][p.name]) for p in self._blocks[block].parameters
        }

    def _boundary(self, slot: Slot) -> torch.Tensor:
        s = self.plan.semantics
        width = self._blocks[0].parameters[0].shape[1]
        return self.arenas.view(slot, s.compute_dtype, (s.micro_batch, s.seq_len, width))

    # -- compute ----------------------------------------------------------------------------------------------------

    def _seed(self, step: int, op: Op) -> None:
        torch.default_generator.manual_seed(op_seed(self.seed, step, op.micro_batch or 0, op.block))

    def _forward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        m = op.micro_batch
        self._seed(step, op)
        weight_slot = op.slot(*WEIGHT_ARENAS)
        assert weight_slot is not None
        weights = self._weights(op.block, weight_slot)
        if op.block == 0:
            weights = {name: w.requires_grad_() for name, w in weights.items()}
            with torch.enable_grad(), self._keeping(weight_slot):
                output_BTD, inputs = self.templates.embed(weights, self._micro_batch(step, m)[0])
            self._inputs[m] = [shared(new, old) for new, old in zip(inputs, self._inputs.get(0, inputs), strict=True)]
            self._graphs[0, m] = _Graph(get_gradient_edge(output_BTD), list(weights.values()), list(weights))
        elif op.block in self.plan.policy.keep_blocks:
            output_BTD = self._run_layer(op, m, weights, weight_slot, op.reads[1])
        else:
            output_BTD = self.templates.layer(op.block, weights, self._boundary(op.reads[1]), self._inputs[m][op.block - 1])
        self._boundary(op.writes[0]).copy_(output_BTD.detach())

    def _run_layer(self, op: Op, m: int, weights: Weights, weight_slot: Slot, input_slot: Slot) -> torch.Tensor:
        """A layer's forward with its graph, which is remembered for the backward."""
        hidden_BTD = self._boundary(input_slot).requires_grad_()
        weights = {name: w.requires_grad_() for name, w in weights.items()}
        with torch.enable_grad(), self._keeping(weight_slot):
            output_BTD = self.templates.layer(op.block, weights, hidden_BTD, self._inputs[m][op.block - 1])
        self._graphs[op.block, m] = _Graph(get_gradient_edge(output_BTD), [hidden_BTD, *weights.values()], list(weights))
        return output_BTD

    def _keeping(self, weight_slot: Slot) -> AbstractContextManager[None]:
        def rebind(offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
            assert self._bound is not None, "a kept graph used weights while no backward was running"
            flat = self.arenas.raw(self._bound)[offset_bytes:].view(like.dtype)
            return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

        def offset_of(tensor: torch.Tensor) -> int | None:
            return self.arenas.offset_in(weight_slot, tensor)

        return kept(offset_of, rebind)  # type: ignore[no-any-return]

    def _backward(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        m = op.micro_batch
        out_slot = op.slot("boundaries")
        assert out_slot is not None
        if (op.block, m) not in self._graphs:
            self._seed(step, op)
            weight_slot, _, input_slot = op.reads[:3]
            self._run_layer(op, m, self._weights(op.block, weight_slot), weight_slot, input_slot)
        graph = self._graphs.pop((op.block, m))
        self._bound = op.slot(*WEIGHT_ARENAS)
        gradients = torch.autograd.grad(graph.edge, graph.inputs, self._boundary(out_slot), allow_unused=True)
        self._bound = None
        if op.block:
            assert gradients[0] is not None
            self._boundary(op.writes[0]).copy_(gradients[0])
            gradients = gradients[1:]
        found = {name: g for name, g in zip(graph.names, gradients, strict=True) if g is not None}
        self._put_gradient(op, found)

    def _loss(self, op: Op, step: int) -> None:
        assert op.micro_batch is not None
        self._seed(step, op)
        weight_slot, boundary_slot = op.reads[:2]
        weights = self._weights(op.block, weight_slot)
        result = self.results[step]
        targets_BT = self._micro_batch(step, op.micro_batch)[1]
        total = op.slot("vocab_sums") or op.slot("vocab_gradients")
        assert total is not None
        first = total not in op.reads
        running = self._gradient_views(op.block, total, "fp32")
        head = running["lm_head.weight"]
        # A micro-batch's own gradient is the sum over its tiles: with a running sum of earlier ones it needs a place of its own.
        own = head.zero_() if first else torch.zeros_like(head)
        loss_sum, hidden_gradient, others = self.templates.loss(
            weights, self._boundary(boundary_slot), targets_BT, result.n_supervised, own
        )
        result.loss_sum += loss_sum
        self._boundary(boundary_slot).copy_(hidden_gradient)
        if not first:
            head += own
        for name, gradient in others.items():
            running[name].copy_(gradient + 0.0) if first else running[name].add_(gradient)
        out = op.slot("vocab_gradients")
        if out is not None and out in op.writes and out != total:
            for name, view in self._gradient_views(op.block, out, self.plan.gradient_dtype(op.block)).items():
                view.copy_(running[name])

    def _gradient_views(self, block: int, slot: Slot, dtype: str) -> Weights:
        return {
            p.name: self.arenas.view(slot, dtype, p.shape, self._offsets[block][p.name]) for p in self._blocks[block].parameters
        }

    def _gradient_bytes(self, block: int) -> int:
        return self._blocks[block].slot_elements * DTYPE[self.plan.gradient_dtype(block)].itemsize

    def _put_gradient(self, op: Op, found: Weights) -> None:
        """Add a micro-batch's gradients to the running fp32 sum, or start it; the last one rounds the sum into the gradient slot.

        A weight that nothing used (an expert without tokens) has gradient zero.
        """
        total, out = op.slot("sums", "vocab_sums"), op.slot("gradients", "vocab_gradients")
        dtype = self.plan.gradient_dtype(op.block)
        if total is None:  # the slot is itself the sum, or there is only one micro-batch to put there
            assert out is not None
            first = out not in op.reads
            for name, view in self._gradient_views(op.block, out, dtype).items():
                if name not in found:
                    view.zero_() if first else None
                elif first and view.dtype == found[name].dtype:
                    view.copy_(found[name]).add_(0.0)  # the sum starts from zero: -0.0 becomes +0.0
                elif first:
                    view.copy_(found[name] + 0.0)  # before it is rounded
                else:
                    view += found[name]
            return
        rounded = self._gradient_views(op.block, out, dtype) if out is not None and out in op.writes else None
        for name, view in self._gradient_views(op.block, total, "fp32").items():
            if total not in op.reads:
                view.zero_()
            if name in found:
                view += found[name]
            if rounded is not None:
                rounded[name].copy_(view)

    # -- host work --------------------------------------------------------------------------------------------------

    def _accumulate(self, op: Op) -> None:
        staging, total = op.reads
        n = self._blocks[op.block].slot_elements
        running = self.arenas.view(total, "fp32", (n,))
        if op.micro_batch == 0:
            running.zero_()
        running += self.arenas.view(staging, self.plan.gradient_dtype(op.block), (n,))

    def _host_gradient(self, op: Op, p: Parameter) -> SummedGradient:
        """The step's gradient of an owned parameter, in `gradient_dtype`: summed over its uses and rounded once."""
        dtype = DTYPE[self.plan.semantics.gradient_dtype]
        slots = [s for s in op.reads if s.arena == "host_gradients"]
        at = self._offsets[op.block][p.name]
        own = self.arenas.view(slots[0], self.plan.host_gradient_dtype(op.block), (p.n_elements,), at)
        head = len(self._blocks) - 1
        tied = next((q for q in self._blocks[head].parameters if q.tied_to == p.name), None)
        if tied is None:
            return SummedGradient((own,), dtype)
        other = self.arenas.view(slots[1], self.plan.host_gradient_dtype(head), (p.n_elements,), self._offsets[head][tied.name])
        return SummedGradient((other, own), dtype)

    def _norm(self, op: Op, step: int, last: bool) -> None:
        sums = self.arenas.view(Slot("norm", 0), "fp64")
        for p in self._owned(op.block):
            square = sum_of_squares(self._host_gradient(op, p))
            if not math.isfinite(square) and self.plan.semantics.on_nonfinite == "stop":
                raise NonFiniteError(
                    f"step {step + 1}: the gradient of {p.name} is not finite; lower --lr, or plan with --on-nonfinite skip"
                )
            sums[self._tensor_number[p.name]] = square
        if last:
            total = 0.0
            for square in sums[: len(self._tensor_number)].tolist():  # not `sum`, which compensates from Python 3.12 on
                total += square
            self.results[step].grad_norm = math.sqrt(total)

    def _step_factor(self, step: int) -> float | None:
        """The step's clip factor, or None if the step is skipped; counts the update when first asked."""
        if self._factor is None or self._factor[0] != step:
            result = self.results[step]
            factor: float | None = 1.0
            if self.plan.policy.update is not Update.EAGER:  # which runs before the norm is known, and is legal only without it
                result.skipped = not math.isfinite(result.grad_norm)
                factor = None if result.skipped else clip_factor(result.grad_norm, self.plan.semantics.clip_norm)
            self.n_updates += not result.skipped
            self._factor = (step, factor)
        return self._factor[1]

    def _update(self, op: Op, step: int) -> None:
        factor = self._step_factor(step)
        if factor is None:
            return
        settings = self.settings(step)
        for p in self._owned(op.block):
            exp_avg, exp_avg_sq = self.moments(op.block, p)
            master = self._master(op.block, p)
            copied = self.plan.weights_arena == "host_weights" and not isinstance(master, SplitMaster)
            weight = self._host("host_weights", op.block, p) if copied else None
            gradient = self._host_gradient(op, p)
            adamw_(
                master,
                exp_avg,
                exp_avg_sq,
                gradient,
                weight,
                factor,
                self.n_updates,
                settings.of(p.name, p.shape),
            )
