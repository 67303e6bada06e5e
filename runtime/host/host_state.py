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

    What is frozen of a block has neither: its weight, or the packed bytes of it, lies in the slot of `state`, right after the
    weights of what is trained, so that all of them are uploaded as one.

    A block that is updated on speculation has a second place for all of it, its shadow. Which of the two places is the state
    changes with every update that turns out right: slots are names, and `commit` exchanges what they mean.
    """

    def __init__(self, plan: Plan, arenas: Arenas, rank: int = 0) -> None:
        """Everything is zero until `set_weights`. Of several ranks each has a part of every block."""
        self.plan, self.arenas, self._rank = plan, arenas, rank
        self.n_updates = 0  # steps whose update was applied; sets the bias correction
        self.gate: Gate | None = None
        self.n_threads = 1  # that set weights; a machine says how many it has cores
        self._owned: list[list[Parameter]] = []  # by each block, and trained
        self._frozen: list[list[Parameter]] = []  # the others that it owns
        self._frozen_at: dict[str, int] = {}  # by frozen parameter: its first byte in the slot of `state`
        self._places: dict[str, tuple[int, int]] = {}  # by parameter: its block, and element there
        self._parts: dict[str, slice] = {}  # by parameter: its elements that are here
        item_bytes = DTYPE[plan.semantics.compute_dtype].itemsize
        for b, block in enumerate(plan.workload.blocks):
            self._owned.append([p for p in block.trained if p.tied_to is None])
            self._frozen.append([p for p in block.parameters if p.frozen and p.tied_to is None])
            offsets, uploaded = block.offsets(owned_only=True)[0], plan.uploaded(b)[0] if self._frozen[b] else {}
            apart_bytes = block.state_elements * item_bytes if plan.is_apart(b) else 0
            for p in self._owned[b]:
                self._places[p.name] = b, offsets[p.name]
                self._parts[p.name] = self.part_of(p, rank)
            for p in self._frozen[b]:
                self._places[p.name] = b, 0
                self._frozen_at[p.name] = uploaded[p.name] - apart_bytes
        per_param = plan.state_bytes()
        self._n_elements = [plan.part_elements(b) for b in range(len(self._owned))]
        # Bytes between the weights of what is trained and the rest of its state
        self._between = [0 if plan.is_apart(b) else sum(map(plan.stored_bytes, frozen)) for b, frozen in enumerate(self._frozen)]
        before = accumulate(per_param.values(), initial=0)
        self._begin = dict(zip(per_param, before, strict=False))  # bytes per element of a block that lie before each part
        self._n_bytes = sum(per_param.values())  # per element
        self._slots = [plan.state_slot(b) for b in range(len(self._owned))]
        self._shadows = {b: Slot("state", len(self._owned) + i) for i, b in enumerate(plan.policy.speculate_blocks)}

    def owned(self, block: int) -> list[Parameter]:
        """The parameters that a block owns and trains."""
        return self._owned[block]

    def frozen(self, block: int) -> list[Parameter]:
        """The others that it owns."""
        return self._frozen[block]

    def block_of(self, p: Parameter) -> int:
        """The block that owns a parameter."""
        return self._places[p.name][0]

    def part(self, p: Parameter) -> slice:
        """The elements of a trained parameter whose state is here: all, unless ranks share it."""
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
        """All of a trained parameter's state; or of its shadow; or as it was when its block was copied."""
        here = self._parts[p.name]
        return self._state(self._places[p.name][0], self.place(p), here.stop - here.start, of_shadow, copy)

    def run_state(self, parameters: Sequence[Parameter]) -> ParamState:
        """The same of parameters of a block that lie one after another, without a gap, as if they were one."""
        first = parameters[0]
        return self._state(self._places[first.name][0], self.place(first), sum(p.n_elements for p in parameters))

    def _state(self, block: int, at: int, n_here: int, of_shadow: bool = False, copy: Copy | None = None) -> ParamState:
        """Of so many elements of what is trained of a block."""
        slot, n = self._shadows[block] if of_shadow else self._slots[block], self._n_elements[block]

        def part(name: str, dtype: str, half: int = 0) -> torch.Tensor:
            item, begin = DTYPE[dtype].itemsize, self._begin[name] * n
            first = begin // item + half * n + at
            if copy is None:
                return self.arenas.view(slot, dtype, (n_here,), first + (self._between[block] // item if begin else 0))
            return copy.view(DTYPE[dtype])[first : first + n_here]

        exp_avg, exp_avg_sq = part("moments", "fp32"), part("moments", "fp32", half=1)
        if "remainder" in self._begin:
            return ParamState(SplitMaster(part("weight", "bf16"), part("remainder", "int16")), exp_avg, exp_avg_sq)
        return ParamState(part("master", self.plan.semantics.master_dtype), exp_avg, exp_avg_sq)

    def saved(self, p: Parameter, copy: Copy | None = None) -> Iterator[tuple[str, torch.Tensor | SplitMaster]]:
        """What a checkpoint keeps of a trained parameter besides its compute weight, by name, flat."""
        of = self.param_state(p, copy=copy)
        yield from (("master", of.master), ("exp_avg", of.exp_avg), ("exp_avg_sq", of.exp_avg_sq))

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        """What an owned parameter is computed with, shaped; not of one that lies packed."""
        if p.frozen:
            assert not self.plan.is_packed(p), f"{p.name} lies packed"
            slot, dtype = Slot("state", self.block_of(p)), self.plan.semantics.compute_dtype
            return self.arenas.view(slot, dtype, p.shape, self._frozen_at[p.name] // DTYPE[dtype].itemsize)
        master = self.param_state(p, copy=copy).master
        return (master.weight if isinstance(master, SplitMaster) else master).view(p.shape)

    def packed(self, p: Parameter) -> torch.Tensor:
        """The bytes of one that does."""
        assert self.plan.is_packed(p), f"{p.name} does not lie packed"
        at = self._frozen_at[p.name]
        return self.arenas.raw(Slot("state", self.block_of(p)))[at : at + self.plan.stored_bytes(p)]

    def master(self, p: Parameter) -> torch.Tensor:
        """The master of a trained parameter, flat; to be read only, as it may be a copy."""
        master = self.param_state(p).master
        return master.joined(slice(None)) if isinstance(master, SplitMaster) else master

    def moments(self, p: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of a trained parameter, flat fp32."""
        state = self.param_state(p)
        return state.exp_avg, state.exp_avg_sq

    def set_weight(self, p: Parameter, given: torch.Tensor) -> None:
        """Put an owned parameter (any float dtype) into master and compute weight, or its bytes where it lies packed. No lane may
        be at work."""
        _together(self._setting(p, given), self.n_threads)

    def _setting(self, p: Parameter, given: torch.Tensor) -> list[Callable[[None], object]]:
        """Setting a weight, in pieces that threads may share."""
        if p.frozen:
            to = self.packed(p) if self.plan.is_packed(p) else self.compute_weight(p).view(-1)
            assert given.dtype.is_floating_point == to.dtype.is_floating_point, f"{p.name} is given as {given.dtype}"
            n = min(SET_AT_ONCE, max(to.numel(), 1))
            return [partial(_copy, *part) for part in zip(to.split(n), given.reshape(-1).split(n), strict=True)]
        state, flat = self.param_state(p), given.reshape(-1)[self.part(p)]
        return [partial(_set, state, flat, slice(at, at + SET_AT_ONCE)) for at in range(0, flat.numel(), SET_AT_ONCE)]

    # -- all of it --------------------------------------------------------------------------------------------------

    def set_weights(self, block: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Put a block's own weights into the store. No lane may be at work."""
        owned = [*self.owned(block), *self.frozen(block)]
        _together([task for p in owned for task in self._setting(p, weights[p.name])], self.n_threads)
        self.settle(block)

    def all_owned(self) -> Iterator[Parameter]:
        """Every owned parameter, trained or frozen, in `named_parameters` order."""
        return (p for block in self.plan.workload.blocks for p in block.parameters if p.tied_to is None)

    def n_bytes(self, block: int) -> int:
        """Of a block's state, without what is frozen: that never changes."""
        return self._n_elements[block] * self._n_bytes

    def settle(self, block: int) -> None:
        """Return when what was given to do to the block's state is done, where a device that works later has it."""
        there = self.arenas.view(self._slots[block], "int16", (0,))
        if there.is_cuda:
            torch.cuda.synchronize(there.device)

    def copied(self, block: int, workers: Workers[Scratch]) -> Copy:
        """A block's state as it is now, elsewhere; MemoryError where there is no room."""
        self.settle(block)
        there, weights_bytes = self.arenas.raw(self._slots[block]), self._n_elements[block] * list(self._begin.values())[1]
        copy, tasks = host_slab(self.n_bytes(block)), list[Callable[[Scratch], object]]()
        pieces = (there[:weights_bytes], there[weights_bytes + self._between[block] :])
        for to, piece in zip((copy[:weights_bytes], copy[weights_bytes:]), pieces, strict=True):
            tasks += [partial(_copy, *part) for part in zip(to.split(COPY_BYTES), piece.split(COPY_BYTES), strict=True)]
        workers.run(tasks)
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


def _copy(to: torch.Tensor, there: torch.Tensor, own: object) -> None:
    to.copy_(there)
