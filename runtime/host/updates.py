"""Update ops: gradient accumulation, global norm, clip factor, and the optimizer, on host and device."""

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

from . import optimizer
from .chunks import Scratch
from .host_state import HostState
from .memory import DTYPE
from .norms import SharedNumbers, added, clip_factor, squares_kernels, squares_on_device, squares_tasks
from .optimizer import KernelLayout, ParamState, Step, SummedGradient, Task, add_tasks, device_kernel, summed
from .rounding import StochasticRounding, stochastic_rounding
from .workers import Workers

LaunchKey = tuple[Hyperparameters, StochasticRounding | None]  # equal for parameters that one launch updates
CHANGES = (Kind.UPDATE, Kind.SETTLE, Kind.UPDATE_ON_DEVICE)  # of the state: one per block and step


class NonFiniteError(PenstockError):
    """A gradient is infinite or NaN, and the plan has `on_nonfinite: stop`."""


class Updates:
    """Ops of the cpu lane, each split among several threads without a change of bits; and the ops of the gpu lane that square
    gradients and update parameters on the device."""

    def __init__(
        self,
        state: HostState,
        settings: Schedule,
        workers: Workers[Scratch],
        device: torch.device,
        shared: SharedNumbers | None,
        seed: int = 0,
    ) -> None:
        """`shared`: numbers that ranks share once a step; None for one rank. `seed`: of the run, for stochastic rounding."""
        self._shared = shared
        self.agreed: AgreedStop | None = None  # stop request on which all ranks agree
        plan, self.plan, self.arenas = state.plan, state.plan, state.arenas
        self._seed, self._rule = seed, plan.semantics.optimizer.rule
        self.state, self.settings, self.workers = state, settings, workers
        self._alone = Workers(1, Scratch)  # the gpu lane has no helpers
        self._choose_kernels()
        self._device_kernels = {b: device_kernel(device, self._layout(b)) for b in plan.policy.device_blocks}
        for dtype in {DTYPE[plan.gradient_dtype(b)] for b in plan.squared if device.type != "cpu"}:
            squares_kernels(device, dtype)
        blocks = plan.workload.blocks
        self._offsets = plan.offsets  # in gradients, which include tied weights
        self._tied = {p.tied_to: p.name for p in blocks[-1].trained if p.tied_to is not None}
        self._cuts = [b.cuts(plan.semantics.n_pieces) for b in blocks]  # by parameter: ranges in which chunks of the norm restart
        self._n_changes = sum(op.kind in CHANGES for op in plan.ops)
        # By op, made once: views and tasks take a tenth of a norm and a twentieth of an update, without the workers
        self._operands: dict[Op, list[tuple[Parameter, ParamState, SummedGradient]]] = {}
        self._square_tasks: dict[Op, list[list[Callable[[Scratch], list[float]]]]] = {}
        self._one_at_a_time = threading.Lock()  # for counters shared by the lanes that change the state
        self.forget()

    def _choose_kernels(self) -> None:
        """Compile and choose the host kernels now; in a step one worker would compile while the others wait."""
        for b, owned in enumerate(self.state.owned):
            if owned and self.state.param_state(owned[0]).master.weight.device.type == "cpu":
                optimizer.update_kernel(self._layout(b))
                optimizer.squares_kernel(self._layout(b).gradient)
            if not self.plan.sums_on_device(b):
                optimizer.add_kernel(DTYPE[self.plan.gradient_dtype(b)])

    def _layout(self, block: int) -> KernelLayout:
        """Layout of the kernel that updates a block's parameters."""
        plan, p = self.plan, self.state.owned[block][0]
        dtype = DTYPE[plan.gradient_dtype(block) if block in plan.policy.device_blocks else plan.host_gradient_dtype(block)]
        gradient = SummedGradient((torch.empty(0, dtype=dtype),), DTYPE[plan.semantics.gradient_dtype])
        return Step(self.state.param_state(p), gradient, 1.0, 1, AdamW(), None, self._rule, self._rounding(p, 1)).layout

    def forget(self) -> None:
        """Reset for a new run, dropping state that a failed step left."""
        self._n_changed = 0  # blocks that the present step has changed
        self._norms: dict[int, float] = {}  # gradient norm by step
        self.squares: list[tuple[Parameter, float]] = []  # squared gradient norm of each parameter in the last complete step
        self._losses: dict[int, list[float]] = {}  # by step: losses of the micro-batches of all ranks
        self._factor: tuple[int, float | None] | None = None  # (step, clip factor; None: the step is skipped)

    def outcome(self, step: int) -> tuple[float, bool, float | None]:
        """Gradient norm of a step before clipping; True if the step was skipped; and the loss over all ranks, None for one rank."""
        self._norms.pop(step - 1, None)  # an update on a device may still read the norm of `step`
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
        """Gradient of an owned parameter in `gradient_dtype`: summed over its uses (tied weights) and rounded once."""
        dtype = DTYPE[self.plan.semantics.gradient_dtype]
        offset, elements, head = self._offsets[op.block][p.name], self.state.part(p), len(self._offsets) - 1
        shape = (elements.stop - elements.start,)
        if self._shared is not None:
            offset = self.state.place(p)
        gradient = self.arenas.view(op["arrived"], self.plan.host_gradient_dtype(op.block), shape, offset)
        tied = self._tied.get(p.name)
        if tied is None or op.get("tied") is None:
            return SummedGradient((gradient,), dtype)
        tied_offset = self._offsets[head][tied] if self._shared is None else self.plan.part_elements(head) + offset
        tied_gradient = self.arenas.view(op["tied"], self.plan.host_gradient_dtype(head), shape, tied_offset)
        return SummedGradient((tied_gradient, gradient), dtype)

    def _device_gradient(self, op: Op, *run: Parameter) -> torch.Tensor:
        """Gradient of adjacent parameters in the device's slot."""
        n, offset = sum(p.n_elements for p in run), self._offsets[op.block][run[0].name]
        return self.arenas.view(op["gradient"], self.plan.gradient_dtype(op.block), (n,), offset)

    def square(self, op: Op) -> None:
        """Compute the sums of squares of a block's gradient on the device, one per parameter; none of them is tied."""
        gradients = [self._device_gradient(op, p) for p in self.state.owned[op.block]]
        out = self._squares(op["squares"])[: len(gradients)]
        squares_on_device(gradients, [self._cuts[op.block][p.name] for p in self.state.owned[op.block]], out)

    def norm(self, op: Op) -> None:
        """Compute the sums of squares of a block's gradient: one per parameter, or with several ranks one per tile of the shard."""
        if op not in self._square_tasks:
            self._square_tasks[op] = [squares_tasks(self._gradient(op, p), self._cuts_here(p)) for p in self.state.owned[op.block]]
        tasks_by_parameter = self._square_tasks[op]
        results = iter(self.workers.run([task for tasks in tasks_by_parameter for task in tasks]))
        tiles = [[square for _ in tasks for square in next(results)] for tasks in tasks_by_parameter]
        sums = [added(squares) for squares in tiles] if self._shared is None else list(chain.from_iterable(tiles))
        self._squares(op["norm"])[: len(sums)] = torch.tensor(sums, dtype=torch.float64)

    def _cuts_here(self, p: Parameter) -> list[range]:
        """Ranges of a parameter in this rank's shard, counted from its first element there."""
        elements = self.state.part(p)
        every = self._cuts[self.state.block_of(p)][p.name]
        cuts = [range(cut.start - elements.start, cut.stop - elements.start) for cut in every]
        return [cut for cut in cuts if cut.start >= 0 and cut.stop <= elements.stop - elements.start]

    def clip(self, op: Op, step: int, losses: Callable[[], list[float]]) -> None:
        """Compute the global gradient norm; with several ranks, share sums of squares, losses and stop requests first."""
        numbers = self._squares(op["clip"])
        if self._shared is None:
            squares = [square for slot in op.every("norm") for square in self._squared(slot)]
        else:
            is_asked = self.agreed is not None and self.agreed.local.is_requested
            mine = {slot.index: self._squares(slot) for slot in op.every("norm")}
            squares, self._losses[step], is_asked = self._shared.share(numbers, mine, losses(), is_asked)
            if self.agreed is not None:
                self.agreed.hear(step, is_asked)
        self._refuse_infinite(squares, step)
        self.squares = squares
        numbers[0] = self._norms[step] = math.sqrt(added(square for _, square in squares))

    def _squares(self, slot: Slot) -> torch.Tensor:
        return self.arenas.view(slot, "fp64")

    def _squared(self, slot: Slot) -> list[tuple[Parameter, float]]:
        """Sums of squares of a block's gradient in a slot, with their parameters."""
        parameters = self.state.owned[slot.index] if self._shared is None else self._shared.tiles[slot.index]
        return list(zip(parameters, self._squares(slot)[: len(parameters)].tolist(), strict=True))

    def _refuse_infinite(self, squares: list[tuple[Parameter, float]], step: int) -> None:
        odd = [p.name for p, square in squares if not math.isfinite(square)]
        if not odd or self.plan.semantics.on_nonfinite != "stop":
            return
        problem, has_changed = f"the gradient of {odd[0]} is not finite", self.state.n_updates > 0
        advice = "lower --lr" if has_changed else "no update was made yet, so compute in fp32, or see this step's data and its loss"
        advice += ", or plan with --on-nonfinite skip"
        if (weight := self.state.first_infinite()) is not None:
            problem = f"{problem}, because the weight {weight.name} is not"
            advice = "resume an earlier checkpoint, and lower --lr"
            if weight.frozen or not has_changed:
                advice = "it was read so: copy the model (or its adapter) again, or give another"
        raise NonFiniteError(f"step {step + 1}: {problem}; {advice}")

    def _is_skipped(self, norm: float) -> bool:
        """True if a step with this norm has no update. Eager updates are never skipped: they run before the norm."""
        return self.plan.policy.update is not Update.EAGER and not math.isfinite(norm)

    def factor(self, step: int) -> float | None:
        """Clip factor of a step, or None if it is skipped. The first call of a step counts the update."""
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
        """Wrap a change of a block's state in the calls of `Gate`: a checkpoint may still need the old state."""
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
        if (norm_slot := op.get("norm")) is not None:  # of an eager update, which runs before the global norm
            self._refuse_infinite(self._squared(norm_slot), step)
        with self.changing(op.block, step, self.workers):
            self._update(op, step)

    def speculate(self, op: Op, step: int) -> None:
        """Write the update without clipping or skipping to the shadow."""
        is_counted = self._factor is not None and self._factor[0] == step
        self.workers.run(self._tasks(op, step, 1.0, self.state.n_updates + (0 if is_counted else 1), into_shadow=True))

    def settle(self, op: Op, step: int) -> None:
        """Commit the shadow if the clip factor is 1; else update the state."""
        with self.changing(op.block, step, self.workers):  # also for a commit: the next shadow overwrites the old state
            if self.factor(step) == 1.0:
                self.state.commit(op.block)
            else:
                self._update(op, step)

    def _update(self, op: Op, step: int) -> None:
        if (factor := self.factor(step)) is not None:
            self.workers.run(self._tasks(op, step, factor, self.state.n_updates))

    def _tasks(self, op: Op, step: int, factor: float, n_updates: int, into_shadow: bool = False) -> list[Task]:
        settings, tasks = self.settings(step), list[Task]()
        for p, now, gradient in self._operands_of(op):
            target, source = (self.state.param_state(p, of_shadow=True), now) if into_shadow else (now, None)
            arguments = gradient, factor, n_updates, settings.for_parameter(p.name, p.shape), source
            tasks += Step(target, *arguments, self._rule, self._rounding(p, n_updates)).tasks()
        return tasks

    def _operands_of(self, op: Op) -> list[tuple[Parameter, ParamState, SummedGradient]]:
        """Parameters of an update with their state and gradient. A commit moves the state of blocks with a shadow."""
        if (known := self._operands.get(op)) is not None:
            return known
        operands = [(p, self.state.param_state(p), self._gradient(op, p)) for p in self.state.owned[op.block]]
        if op.block not in self.plan.policy.speculate_blocks:
            self._operands[op] = operands
        return operands

    def _rounding(self, p: Parameter, n_updates: int) -> StochasticRounding | None:
        """Keys for stochastic rounding, which do not depend on plan, rank or restarts; None without low-bit optimizer state."""
        if not self.plan.semantics.is_lean:
            return None
        is_master_stochastic = self.plan.semantics.weight_rounding == "stochastic"
        return stochastic_rounding(self._seed, n_updates, p.name, self.state.part(p).start, is_master_stochastic)

    def update_on_device(self, op: Op, step: int) -> None:
        with self.changing(op.block, step, self._alone):
            if (factor := self.factor(step)) is None:
                return
            n_updates = self.state.n_updates
            for (settings, rounding), run in self._runs(op.block, self.settings(step), n_updates):
                gradient, target = summed(self._device_gradient(op, *run)), self.state.param_state(*run)
                Step(target, gradient, factor, n_updates, settings, None, self._rule, rounding).on_device(
                    self._device_kernels[op.block]
                )

    def _runs(self, block: int, settings: Hyperparameters, n_updates: int) -> Iterator[tuple[LaunchKey, list[Parameter]]]:
        """Group adjacent parameters with equal hyperparameters and keys into one launch, because adapters are many and small."""
        run, end = list[Parameter](), 0
        run_key: LaunchKey = settings, None
        for p in self.state.owned[block]:
            offset, key = self._offsets[block][p.name], (settings.for_parameter(p.name, p.shape), self._rounding(p, n_updates))
            if run and (offset, key) != (end, run_key):
                yield run_key, run
                run = []
            run, end, run_key = [*run, p], offset + p.n_elements, key
        if run:
            yield run_key, run
