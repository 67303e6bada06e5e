"""Where on the host do a model's masters, moments and weights lie?"""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

STATE_ARENAS = ("masters", "remainders", "moments", "host_weights")
SHADOW = "shadow_"  # before an arena's name: the part of a shadow that stands for a slot of it
COPY_BYTES = 8 * MiB  # what one worker copies at a time: about a millisecond
# Of a weight, what is set in one go: no more, so that what it takes meanwhile stays in a cache; and no less, or a dozen workers
# would wait for each other's interpreter.
SET_ELEMENTS = 2**18
SET_AT_ONCE = 4 * SET_ELEMENTS  # what one worker sets at a time: some milliseconds

Copy = Mapping[str, torch.Tensor]  # the bytes of a chunk, by arena


class Gate(Protocol):
    """What an update asks before it changes the state, for somebody may still need it as it was."""

    def before_change(self, block: int, chunk: int, workers: Workers[Scratch]) -> None:
        """Return when the chunk may change; until then `workers` may copy it."""

    def step_is_done(self, step: int) -> None:
        """Called after the last change by a step, counted from 0."""


class HostState:
    """Masters, moments and compute weights: in one slot of each arena per block or, where layers are cut into chunks, per chunk.

    A block that is updated on speculation has a second place for all of it, its shadow. Which of the two places is the state
    changes with every update that turns out right: slots are names, and `commit` exchanges what they mean.
    """

    def __init__(self, plan: Plan, arenas: Arenas) -> None:
        """Everything is zero until `set_weights`."""
        self.plan, self.arenas = plan, arenas
        self.n_updates = 0  # steps whose update was applied; sets the bias correction
        self.gate: Gate | None = None
        self.n_threads = 1  # that set weights; a machine says how many it has cores
        self.chunks = [plan.chunks(b) for b in range(len(plan.workload.blocks))]
        self._state = [arena for name in STATE_ARENAS if (arena := plan.arena(name)) is not None]
        self._first: list[int] = []  # slot of each block's first chunk
        self._owned: list[list[list[Parameter]]] = []  # of each block's chunks
        self._places: dict[str, tuple[int, int]] = {}  # by parameter: its slot in every arena of the state, and element there
        n_slots = 0
        for block, chunks in zip(plan.workload.blocks, self.chunks, strict=True):
            self._first.append(n_slots)
            self._owned.append([[] for _ in chunks])
            offsets = block.offsets(owned_only=True)[0]
            for p in block.parameters:
                if p.tied_to is None:
                    chunk = bisect.bisect_right(chunks, offsets[p.name], key=lambda c: c.start) - 1
                    self._owned[-1][chunk].append(p)
                    self._places[p.name] = n_slots + chunk, offsets[p.name] - chunks[chunk].start
            n_slots += len(chunks)
        shadowed = [self._first[b] + chunk for b in plan.policy.speculate_blocks for chunk in range(len(self.chunks[b]))]
        for i, number in enumerate(shadowed):
            parts = {Slot(SHADOW + arena.name, number): arena.slot_bytes[number] for arena in self._state}
            arenas.divide(Slot("shadows", i), parts)

    def owned(self, block: int) -> list[Parameter]:
        """The parameters that a block owns."""
        return [p for chunk in self._owned[block] for p in chunk]

    def of_chunk(self, block: int, chunk: int | None) -> list[Parameter]:
        """Those of one of its chunks, or of the only one."""
        return self._owned[block][chunk or 0]

    # -- one parameter ----------------------------------------------------------------------------------------------

    def param_state(self, p: Parameter, prefix: str = "", copy: Copy | None = None) -> ParamState:
        """All of an owned parameter's state; with `SHADOW` its shadow; or as it was when its chunk was copied."""
        semantics, (number, at) = self.plan.semantics, self._places[p.name]

        def slot(arena: str, dtype: str) -> torch.Tensor:
            return self.arenas.view(Slot(prefix + arena, number), dtype) if copy is None else copy[arena].view(DTYPE[dtype])

        own = slice(at, at + p.n_elements)
        exp_avg, exp_avg_sq = (half[own] for half in slot("moments", "fp32").view(2, -1))
        weight = None
        if self.plan.weights_arena == "host_weights":
            weight = slot("host_weights", semantics.compute_dtype)[own]
        if self.plan.policy.storage == "split":
            assert weight is not None
            return ParamState(SplitMaster(weight, slot("remainders", "int16")[own]), exp_avg, exp_avg_sq)
        return ParamState(slot("masters", semantics.master_dtype)[own], exp_avg, exp_avg_sq, weight)

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        """What is uploaded of an owned parameter, shaped."""
        state = self.param_state(p, copy=copy)
        weight = state.weight
        if weight is None:
            weight = state.master.weight if isinstance(state.master, SplitMaster) else state.master
        return weight.view(p.shape)

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
        state, flat = self.param_state(p), given.reshape(-1)
        return [partial(_set, state, flat, slice(at, at + SET_AT_ONCE)) for at in range(0, p.n_elements, SET_AT_ONCE)]

    # -- all of it --------------------------------------------------------------------------------------------------

    def set_weights(self, block: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Put a block's own weights into the store. No lane may be at work."""
        _together([task for p in self.owned(block) for task in self._setting(p, weights[p.name])], self.n_threads)

    def n_bytes(self, block: int, chunk: int) -> int:
        """Of a chunk's state."""
        number = self._first[block] + chunk
        return sum(arena.slot_bytes[number] for arena in self._state)

    def copied(self, block: int, chunk: int, workers: Workers[Scratch]) -> Copy:
        """A chunk's state as it is now, elsewhere; MemoryError where there is no room."""
        copy: dict[str, torch.Tensor] = {}
        tasks: list[Callable[[Scratch], object]] = []
        for arena in self._state:
            there = self.arenas.raw(Slot(arena.name, self._first[block] + chunk))
            copy[arena.name] = host_slab(there.numel())
            parts = zip(copy[arena.name].split(COPY_BYTES), there.split(COPY_BYTES), strict=True)
            tasks += [partial(_copy, *part) for part in parts]
        workers.run(tasks)
        return copy

    def commit(self, block: int, chunk: int | None) -> None:
        """The shadow of a chunk becomes its state, and the state the next shadow."""
        number = self._first[block] + (chunk or 0)
        for arena in self._state:
            self.arenas.exchange(Slot(arena.name, number), Slot(SHADOW + arena.name, number))


def _set(state: ParamState, given: torch.Tensor, piece: slice, own: None) -> None:
    """Put a piece of a flat weight into master and compute weight."""
    for at in range(piece.start, min(piece.stop, given.numel()), SET_ELEMENTS):
        part = slice(at, min(at + SET_ELEMENTS, piece.stop))
        match state.master:
            case SplitMaster() as master:
                master.cut(part, given[part].float())
                continue
            case master if master.dtype is torch.float32:
                master[part] = given[part]
            case master:
                round_half_up(given[part].float(), master[part])
        if state.weight is not None:
            round_half_up(master[part], state.weight[part])


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
