"""From gradients to an update: sums over micro-batches, the global norm, the clip factor, and the optimizer, on host and device."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from penstock.runtime.errors import PenstockError
from penstock.runtime.executor import AgreedStop
from penstock.runtime.plan import Kind, Op, Slot, Update
from penstock.runtime.plan.optimizer import AdamW, Hyperparameters, Schedule
from penstock.runtime.plan.workload import Parameter

from .chunks import Scratch
from .host_state import HostState
from .memory import DTYPE
from .norms import SharedNumbers, added, clip_factor, squares_kernels, squares_on_device, squares_tasks
from .optimizer import (
    Kept,
    Step,
    SummedGradient,
    Task,
    add_tasks,
    compiled_add,
    compiled_squares,
    compiled_update,
    device_kernel,
    summed,
)
from .rounding import Drawn, drawn
from .workers import Workers

Alike = tuple[Hyperparameters, Drawn | None]  # of an update
CHANGES = (Kind.UPDATE, Kind.SETTLE, Kind.UPDATE_ON_DEVICE)  # of the state: one a step of each block


class NonFiniteError(PenstockError):
    """A gradient is infinite or not a number, and the plan says to stop."""


class Updates:
    """The ops of the host's own lane, each shared by several threads, which changes no bit; and those of the gpu lane by which a
    device squares and updates, on that lane's thread alone."""

    def __init__(
        self,
        state: HostState,
        settings: Schedule,
        workers: Workers[Scratch],
        device: torch.device,
        shared: SharedNumbers | None,
        seed: int = 0,
    ) -> None:
        """`shared`: what ranks tell each other of a step; None: there is one. `seed`: of the run, for stochastic rounding."""
        self._shared = shared
        self.agreed: AgreedStop | None = None  # by what all ranks end the stretch of steps that is at work
        plan, self.plan, self.arenas = state.plan, state.plan, state.arenas
        self._seed, self._rule = seed, plan.semantics.optimizer.rule
        self.state, self.settings, self.workers = state, settings, workers
        self._alone = Workers(1, Scratch)  # the device's lane has no helpers
        self._compile()
        self._device_kernel = None
        if plan.policy.device_blocks:
            block = plan.policy.device_blocks[0]
            of = state.param_state(state.owned[block][0]).master
            kept = Kept(of.weight.dtype, of.remainder is not None, DTYPE[plan.gradient_dtype(block)])
            if (semantics := plan.semantics).is_lean:
                moments = DTYPE[next(iter(semantics.optimizer.moments.values()))]
                kept = Kept(*kept[:3], moments, self._rule, semantics.weight_rounding == "stochastic")
            self._device_kernel = device_kernel(device, kept)
        if plan.squared and device.type != "cpu":
            squares_kernels(device, DTYPE[plan.semantics.gradient_dtype])
        blocks = plan.workload.blocks
        self._offsets = plan.offsets  # in gradients, which hold those of tied weights too
        self._tied = {p.tied_to: p.name for p in blocks[-1].trained if p.tied_to is not None}
        self._cuts = [b.cuts(plan.semantics.n_pieces) for b in blocks]  # by parameter: where chunks of the norm begin anew
        self._n_changes = sum(op.kind in CHANGES for op in plan.ops)
        self._one_at_a_time = threading.Lock()  # of what the lanes that change the state share
        self.forget()

    def _compile(self) -> None:
        """Compile the kernels of the host now: in a step the first worker that needs one would, and the others wait."""
        plan, of = self.plan, self.plan.semantics
        for b, owned in enumerate(self.state.owned):
            dtype = DTYPE[plan.gradient_dtype(b) if b in plan.policy.device_blocks else plan.host_gradient_dtype(b)]
            gradient = SummedGradient((torch.empty(0, dtype=dtype),), DTYPE[of.gradient_dtype])
            for p in owned[:1]:
                if (state := self.state.param_state(p)).master.weight.device.type == "cpu":
                    compiled_update(Step(state, gradient, 1.0, 1, AdamW(), None, self._rule, self._drawn(p, 1)).kept)
                    compiled_squares(dtype)
            if not plan.reduced:
                compiled_add(DTYPE[plan.gradient_dtype(b)])

    def forget(self) -> None:
        """Begin a run; what one that failed in the middle of a step has left is dropped."""
        self._n_changed = 0  # by the step in progress
        self._norms: dict[int, float] = {}  # of steps' gradients
        self.squares: list[tuple[Parameter, float]] = []  # of each parameter's, in the last step whose norm is known
        self._losses: dict[int, list[float]] = {}  # of steps' micro-batches, those of all ranks
        self._factor: tuple[int, float | None] | None = None  # (step, clip factor; None: the step is skipped)

    def taken(self, step: int) -> tuple[float, bool, float | None]:
        """The norm of a step's gradients, before they are clipped; whether the step was skipped for it; and the loss over the
        micro-batches of all ranks, in order, if there are several."""
        self._norms.pop(step - 1, None)  # a device that works later may still ask for this one
        norm, losses = self._norms[step], self._losses.pop(step, None)
        return norm, self._is_skipped(norm), None if losses is None else added(losses)

    def accumulate(self, op: Op) -> None:
        n = self.plan.gradient_elements(op.block)
        part = self.arenas.view(op["staged"], self.plan.gradient_dtype(op.block), (n,))
        is_first = self.plan.semantics.begins_sum(op.micro_batch or 0)
        for slot in (op["arrived"], *op.every("into")):
            total = self.arenas.view(slot, "fp32", (n,))
            self.workers.run(add_tasks(total, part, is_first))
            part, is_first = total, False

    def _gradient(self, op: Op, p: Parameter) -> SummedGradient:
        """The step's gradient of an owned parameter, in `gradient_dtype`: summed over its uses and rounded once."""
        dtype = DTYPE[self.plan.semantics.gradient_dtype]
        at, here, head = self._offsets[op.block][p.name], self.state.part(p), len(self._offsets) - 1
        shape = (here.stop - here.start,)
        if self._shared is not None:
            at = self.state.place(p)
        own = self.arenas.view(op["arrived"], self.plan.host_gradient_dtype(op.block), shape, at)
        tied = self._tied.get(p.name)
        if tied is None:
            return SummedGradient((own,), dtype)
        before = self._offsets[head][tied] if self._shared is None else self.plan.part_elements(head) + at
        other = self.arenas.view(op["tied"], self.plan.host_gradient_dtype(head), shape, before)
        return SummedGradient((other, own), dtype)

    def _on_device(self, op: Op, *run: Parameter) -> torch.Tensor:
        """The gradient of parameters that follow each other in the device's slot."""
        n, at = sum(p.n_elements for p in run), self._offsets[op.block][run[0].name]
        return self.arenas.view(op["gradient"], self.plan.gradient_dtype(op.block), (n,), at)

    def square(self, op: Op) -> None:
        """Sums of squares of a block's gradient by the device, one for each parameter: none of these is another's."""
        gradients = [self._on_device(op, p) for p in self.state.owned[op.block]]
        out = self._squares(op["squares"])[: len(gradients)]
        squares_on_device(gradients, [self._cuts[op.block][p.name] for p in self.state.owned[op.block]], out)

    def norm(self, op: Op) -> None:
        """Sums of squares of a block's gradient: one for each parameter; of several ranks, for each tile of this rank's part."""
        of_parameters: list[list[Callable[[Scratch], list[float]]]] = []
        for p in self.state.owned[op.block]:
            here = self.state.part(p)
            cuts = [range(cut.start - here.start, cut.stop - here.start) for cut in self._cuts[op.block][p.name]]
            cuts = [cut for cut in cuts if cut.start >= 0 and cut.stop <= here.stop - here.start]
            of_parameters.append(squares_tasks(self._gradient(op, p), cuts))
        done = iter(self.workers.run([task for tasks in of_parameters for task in tasks]))
        tiles = [[square for _ in tasks for square in next(done)] for tasks in of_parameters]
        sums = [added(of) for of in tiles] if self._shared is None else list(chain.from_iterable(tiles))
        self._squares(op["norm"])[: len(sums)] = torch.tensor(sums, dtype=torch.float64)

    def clip(self, op: Op, step: int, losses: Callable[[], list[float]]) -> None:
        """The norm of all gradients, by which updates are clipped; of several ranks, what all of them have, and all losses."""
        of_norm = self._squares(op["clip"])
        if self._shared is None:
            squares = [found for slot in op.every("norm") for found in self._squared(slot)]
        else:
            is_asked = self.agreed is not None and self.agreed.local.is_requested
            mine = {slot.index: self._squares(slot) for slot in op.every("norm")}
            squares, self._losses[step], is_asked = self._shared.learned(of_norm, mine, losses(), is_asked)
            if self.agreed is not None:
                self.agreed.hear(step, is_asked)
        self._refuse_infinite(squares, step)
        self.squares = squares
        of_norm[0] = self._norms[step] = math.sqrt(added(square for _, square in squares))

    def _squares(self, slot: Slot) -> torch.Tensor:
        return self.arenas.view(slot, "fp64")

    def _squared(self, slot: Slot) -> list[tuple[Parameter, float]]:
        """Sums of squares that a slot holds of a block's gradient, with the parameter that each is of."""
        of = self.state.owned[slot.index] if self._shared is None else self._shared.tiles[slot.index]
        return list(zip(of, self._squares(slot)[: len(of)].tolist(), strict=True))

    def _refuse_infinite(self, squares: list[tuple[Parameter, float]], step: int) -> None:
        odd = [p.name for p, square in squares if not math.isfinite(square)]
        if odd and self.plan.semantics.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step + 1}: the gradient of {odd[0]} is not finite; lower --lr, or plan with --on-nonfinite skip"
            )

    def _is_skipped(self, norm: float) -> bool:
        """An eager update runs before the norm is known, and is legal only without it."""
        return self.plan.policy.update is not Update.EAGER and not math.isfinite(norm)

    def factor(self, step: int) -> float | None:
        """The step's clip factor, or None if the step is skipped; counts the update when first asked."""
        with self._one_at_a_time:
            if self._factor is None or self._factor[0] != step:
                factor: float | None = 1.0
                if self.plan.policy.update is not Update.EAGER:
                    norm = self._norms[step]
                    factor = None if self._is_skipped(norm) else clip_factor(norm, self.plan.semantics.clip_norm)
                self.state.n_updates += factor is not None
                self._factor = (step, factor)
            return self._factor[1]

    @contextmanager
    def changing(self, block: int, step: int, workers: Workers[Scratch]) -> Iterator[None]:
        """What is done within changes the state of the block, and counts the update: a checkpoint may still need both."""
        gate = self.state.gate
        if gate is not None:
            gate.before_change(block, workers)
        yield
        with self._one_at_a_time:
            self._n_changed = (self._n_changed + 1) % self._n_changes
            is_done = self._n_changed == 0
        if gate is not None and is_done:
            gate.step_is_done(step)

    def update(self, op: Op, step: int) -> None:
        if (own := op.get("norm")) is not None:  # of an eager update, which comes before the norm of all
            self._refuse_infinite(self._squared(own), step)
        with self.changing(op.block, step, self.workers):
            self._update(op, step)

    def speculate(self, op: Op, step: int) -> None:
        """The update as it is if nothing is clipped or skipped, into the shadow."""
        is_counted = self._factor is not None and self._factor[0] == step
        self.workers.run(self._tasks(op, step, 1.0, self.state.n_updates + (0 if is_counted else 1), into_shadow=True))

    def settle(self, op: Op, step: int) -> None:
        """Take the shadow if it was right; else it was in vain."""
        with self.changing(op.block, step, self.workers):  # also a shadow's taking: the next one is made where the state was
            if self.factor(step) == 1.0:
                self.state.commit(op.block)
            else:
                self._update(op, step)

    def _update(self, op: Op, step: int) -> None:
        if (factor := self.factor(step)) is not None:
            self.workers.run(self._tasks(op, step, factor, self.state.n_updates))

    def _tasks(self, op: Op, step: int, factor: float, n_updates: int, into_shadow: bool = False) -> list[Task]:
        settings, tasks = self.settings(step), list[Task]()
        for p in self.state.owned[op.block]:
            now = self.state.param_state(p)
            to, start_from = (self.state.param_state(p, of_shadow=True), now) if into_shadow else (now, None)
            given = self._gradient(op, p), factor, n_updates, settings.for_parameter(p.name, p.shape), start_from
            tasks += Step(to, *given, self._rule, self._drawn(p, n_updates)).tasks()
        return tasks

    def _drawn(self, p: Parameter, n_updates: int) -> Drawn | None:
        """What rounds a parameter's state stochastically: the same for any plan and any rank, and after any restart."""
        of = self.plan.semantics
        if not of.is_lean:
            return None
        return drawn(self._seed, n_updates, p.name, self.state.part(p).start, of.weight_rounding == "stochastic")

    def update_on_device(self, op: Op, step: int) -> None:
        """The device updates the state that it holds, by the gradient that is still there."""
        with self.changing(op.block, step, self._alone):
            if (factor := self.factor(step)) is None:
                return
            n_updates = self.state.n_updates
            for (settings, drawn), run in self._runs(op.block, self.settings(step), n_updates):
                gradient, to = summed(self._on_device(op, *run)), self.state.param_state(*run)
                Step(to, gradient, factor, n_updates, settings, None, self._rule, drawn).on_device(self._device_kernel)

    def _runs(self, block: int, settings: Hyperparameters, n_updates: int) -> Iterator[tuple[Alike, list[Parameter]]]:
        """The block's parameters, those together that follow each other and are updated alike: adapters are many, and small."""
        run, end = list[Parameter](), 0
        of_run: Alike = settings, None
        for p in self.state.owned[block]:
            at, own = self._offsets[block][p.name], (settings.for_parameter(p.name, p.shape), self._drawn(p, n_updates))
            if run and (at, own) != (end, of_run):
                yield of_run, run
                run = []
            run, end, of_run = [*run, p], at + p.n_elements, own
        if run:
            yield of_run, run
