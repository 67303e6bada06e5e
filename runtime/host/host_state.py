"""Where do a model's masters, moments and weights lie?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from runtime.plan import Plan, Slot
from runtime.plan.workload import Parameter
from runtime.units import MiB

from .chunks import Scratch
from .memory import DTYPE, Arenas
from .optimizer import ParamState, SplitMaster, round_half_up
from .slabs import host_slab
from .workers import Workers

COPY_BYTES = 8 * MiB  # what one worker copies at a time: about a millisecond
# Of a weight, what is set in one go: no more, so that what it takes meanwhile stays in a cache; and no less, or a dozen workers
# would wait for each other's interpreter.
SET_ELEMENTS = 2**18
SET_AT_ONCE = 4 * SET_ELEMENTS  # what one worker sets at a time: some milliseconds

Copy = torch.Tensor  # the bytes of a block's slot


class Gate(Protocol):
    """What an update asks before it changes the state, for somebody may still need it as it was."""

    def before_change(self, block: int, workers: Workers[Scratch]) -> None:
        """Return when the block's state may change; until then `workers` may copy it."""

    def step_is_done(self, step: int) -> None:
        """Called after the last change by a step, counted from 0."""


class HostState:
    """Masters, moments and compute weights: a slot of `state` for each block, or of `device_state` where the device holds them.

    A block that is updated on speculation has a second place for all of it, its shadow. Which of the two places is the state
    changes with every update that turns out right: slots are names, and `commit` exchanges what they mean.
    """

    def __init__(self, plan: Plan, arenas: Arenas, rank: int = 0) -> None:
        """Everything is zero until `set_weights`. Of several ranks each has a part of every block."""
        self.plan, self.arenas, self._rank = plan, arenas, rank
        self.n_updates = 0  # steps whose update was applied; sets the bias correction
        self.gate: Gate | None = None
        self.n_threads = 1  # that set weights; a machine says how many it has cores
        self._owned: list[list[Parameter]] = []  # by each block
        self._places: dict[str, tuple[int, int]] = {}  # by parameter: its block, and element there
        self._parts: dict[str, slice] = {}  # by parameter: its elements that are here
        for b, block in enumerate(plan.workload.blocks):
            self._owned.append([p for p in block.parameters if p.tied_to is None])
            offsets = block.offsets(owned_only=True)[0]
            for p in self._owned[b]:
                self._places[p.name] = b, offsets[p.name]
                self._parts[p.name] = self.part_of(p, rank)
        per_param = plan.state_bytes()
        self._n_elements = [plan.part_elements(b) for b in range(len(self._owned))]
        before = accumulate(per_param.values(), initial=0)
        self._begin = dict(zip(per_param, before, strict=False))  # bytes per element of a block that lie before each part
        self._n_bytes = sum(per_param.values())  # per element
        self._slots = [plan.state_slot(b) for b in range(len(self._owned))]
        self._shadows = {b: Slot("state", len(self._owned) + i) for i, b in enumerate(plan.policy.speculate_blocks)}

    def owned(self, block: int) -> list[Parameter]:
        """The parameters that a block owns."""
        return self._owned[block]

    def block_of(self, p: Parameter) -> int:
        """The block that owns a parameter."""
        return self._places[p.name][0]

    def part(self, p: Parameter) -> slice:
        """The elements of an owned parameter whose state is here: all, unless ranks share it."""
        return self._parts[p.name]

    def part_of(self, p: Parameter, rank: int) -> slice:
        """The same of another rank."""
        block, at = self._places[p.name]
        n = self.plan.part_elements(block)
        here = slice(min(max(rank * n - at, 0), p.n_elements), max(min((rank + 1) * n - at, p.n_elements), 0))
        return here if here.start < here.stop else slice(0, 0)

    def place(self, p: Parameter) -> int:
        """Where in its block's part that begins."""
        block, at = self._places[p.name]
        return max(at - self._rank * self.plan.part_elements(block), 0) if self._parts[p.name].stop else 0

    # -- one parameter ----------------------------------------------------------------------------------------------

    def param_state(self, p: Parameter, of_shadow: bool = False, copy: Copy | None = None) -> ParamState:
        """All of an owned parameter's state; or of its shadow; or as it was when its block was copied."""
        block, at, here = self._places[p.name][0], self.place(p), self._parts[p.name]
        n_here = here.stop - here.start
        slot, n = self._shadows[block] if of_shadow else self._slots[block], self._n_elements[block]

        def part(name: str, dtype: str, half: int = 0) -> torch.Tensor:
            first = self._begin[name] * n // DTYPE[dtype].itemsize + half * n + at
            if copy is None:
                return self.arenas.view(slot, dtype, (n_here,), first)
            return copy.view(DTYPE[dtype])[first : first + n_here]

        exp_avg, exp_avg_sq = part("moments", "fp32"), part("moments", "fp32", half=1)
        if "remainder" in self._begin:
            return ParamState(SplitMaster(part("weight", "bf16"), part("remainder", "int16")), exp_avg, exp_avg_sq)
        return ParamState(part("master", self.plan.semantics.master_dtype), exp_avg, exp_avg_sq)

    def saved(self, p: Parameter, copy: Copy | None = None) -> Iterator[tuple[str, torch.Tensor | SplitMaster]]:
        """What a checkpoint keeps of an owned parameter besides its compute weight, by name, flat."""
        of = self.param_state(p, copy=copy)
        yield from (("master", of.master), ("exp_avg", of.exp_avg), ("exp_avg_sq", of.exp_avg_sq))

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        """What is uploaded of an owned parameter, shaped."""
        master = self.param_state(p, copy=copy).master
        return (master.weight if isinstance(master, SplitMaster) else master).view(p.shape)

    def master(self, p: Parameter) -> torch.Tensor:
        """The master of an owned parameter, flat; to be read only, as it may be a copy."""
        master = self.param_state(p).master
        return master.joined(slice(None)) if isinstance(master, SplitMaster) else master

    def moments(self, p: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of an owned parameter, flat fp32."""
        state = self.param_state(p)
        return state.exp_avg, state.exp_avg_sq

    def set_weight(self, p: Parameter, given: torch.Tensor) -> None:
        """Put an owned parameter (any float dtype) into master and compute weight. No lane may be at work."""
        _together(self._setting(p, given), self.n_threads)

    def _setting(self, p: Parameter, given: torch.Tensor) -> list[Callable[[None], object]]:
        """Setting a weight, in pieces that threads may share."""
        state, flat = self.param_state(p), given.reshape(-1)[self.part(p)]
        return [partial(_set, state, flat, slice(at, at + SET_AT_ONCE)) for at in range(0, flat.numel(), SET_AT_ONCE)]

    # -- all of it --------------------------------------------------------------------------------------------------

    def set_weights(self, block: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Put a block's own weights into the store. No lane may be at work."""
        _together([task for p in self.owned(block) for task in self._setting(p, weights[p.name])], self.n_threads)
        self.settle(block)

    def compute_weights(self) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """Every owned parameter and its compute weight, shaped, in `named_parameters` order."""
        for block in range(len(self._owned)):
            for p in self.owned(block):
                yield p, self.compute_weight(p)

    def n_bytes(self, block: int) -> int:
        """Of a block's state."""
        return self._n_elements[block] * self._n_bytes

    def settle(self, block: int) -> None:
        """Return when what was given to do to the block's state is done, where a device that works later has it."""
        there = self.arenas.view(self._slots[block], "int16", (0,))
        if there.is_cuda:
            torch.cuda.synchronize(there.device)

    def copied(self, block: int, workers: Workers[Scratch]) -> Copy:
        """A block's state as it is now, elsewhere; MemoryError where there is no room."""
        self.settle(block)
        there = self.arenas.raw(self._slots[block])
        copy = host_slab(there.numel())
        workers.run([partial(_copy, *part) for part in zip(copy.split(COPY_BYTES), there.split(COPY_BYTES), strict=True)])
        return copy

    def commit(self, block: int) -> None:
        """The shadow of a block becomes its state, and the state the next shadow."""
        self.arenas.exchange(self._slots[block], self._shadows[block])


def _set(state: ParamState, given: torch.Tensor, piece: slice, own: None) -> None:
    """Put a piece of a flat weight into master and compute weight."""
    for at in range(piece.start, min(piece.stop, given.numel()), SET_ELEMENTS):
        part = slice(at, min(at + SET_ELEMENTS, piece.stop))
        weight = given[part].to(state.exp_avg.device)
        match state.master:
            case SplitMaster() as master:
                master.cut(part, weight.float())
            case master if master.dtype is torch.float32:
                master[part] = weight
            case master:
                round_half_up(weight.float(), master[part])


def _together(tasks: Sequence[Callable[[None], object]], n_threads: int) -> None:
    """Have tasks done by `n_threads`, of which this is one, each with one thread inside a kernel."""
    workers = Workers[None](max(1, min(n_threads, len(tasks))), lambda: None)
    with _one_kernel_thread(), workers.helped(_one_kernel_thread):
        workers.run(tasks)


@contextmanager
def _one_kernel_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _copy(to: torch.Tensor, there: torch.Tensor, own: Scratch) -> None:
    to.copy_(there)
