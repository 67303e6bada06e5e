"""Master weights, moments and compute weights of a model in its arenas: layout, initialization, copies and shadows."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from penstock.runtime.plan import Plan, Slot
from penstock.runtime.plan.workload import Parameter
from penstock.runtime.units import MiB

from .base_file import BaseFile
from .chunks import Scratch
from .memory import DTYPE, ON_DISK, Arenas
from .optimizer import Master, ParamState
from .rounding import Int8Moment, group_bytes
from .slabs import host_slab
from .workers import Workers

COPY_BYTES = 8 * MiB  # of one copy task: about a millisecond
SET_ELEMENTS = 2**20  # of a weight, set at a time by torch's threads: temporaries remain in a cache

Copy = torch.Tensor  # bytes of a block's slot


class Gate(Protocol):
    """Hooks around changes of the state, which let a snapshot copy the old state first."""

    def before_change(self, block: int, workers: Workers[Scratch]) -> None:
        """Return when the block's state may change; until then `workers` may copy it."""

    def step_is_done(self, step: int) -> None:
        """Called after the last change by a step, counted from 0."""


class HostState:
    """Master weights, moments and compute weights: one slot of `state` per block, or of `device_state` for `device_blocks`.

    Frozen weights have no master and no moments. They are in the block's slot of `state`, in the compute dtype or packed, directly
    after the trained weights, so that one copy uploads both. Frozen weights of `disk_blocks` are in the file `base`, and in memory
    only from their read to their load.

    A block with a speculative update has a second slot, its shadow. `commit` swaps the memory of the two after a correct guess.
    """

    def __init__(self, plan: Plan, arenas: Arenas, rank: int = 0, is_first: bool = True, base: BaseFile | None = None) -> None:
        """All state is zero until `set_weights`. Each of several ranks holds a shard of the trained state of every block; the first
        rank of a host sets the frozen weights, which the others map."""
        self.plan, self.arenas, self._rank, self.is_first = plan, arenas, rank, is_first
        self._base, self._on_disk = base, {*plan.policy.disk_blocks}
        if base is not None:
            for b in plan.policy.disk_blocks:
                arenas.lend(Slot(ON_DISK, b), torch.frombuffer(base.view(b), dtype=torch.uint8))
        self._has_base = base is not None and base.is_whole  # complete on opening; else it is filled by `set_weight`
        self.n_updates = 0  # steps whose update was applied; sets the bias correction
        self.gate: Gate | None = None
        self.owned: list[list[Parameter]] = []  # by block: trained parameters that it owns
        self.frozen: list[list[Parameter]] = []  # by block: frozen parameters that it owns
        self.constants: dict[str, torch.Tensor] = {}  # tensors of layers in weight files that are no weights
        self._frozen_at: dict[str, int] = {}  # by frozen parameter: its first byte in the slot
        self._places: dict[str, tuple[int, int]] = {}  # by parameter: its block, and its first element there
        for b, block in enumerate(plan.workload.blocks):
            self.owned.append([p for p in block.trained if p.tied_to is None])
            self.frozen.append([p for p in block.parameters if p.frozen and p.tied_to is None])
            offsets = block.offsets(owned_only=True)[0]
            self._places |= {p.name: (b, offsets[p.name]) for p in self.owned[b]} | {p.name: (b, 0) for p in self.frozen[b]}
            self._frozen_at |= plan.frozen_on_host(b)[0] if self.frozen[b] else {}
        self._n_elements = [plan.part_elements(b) for b in range(len(self.owned))]
        # By block: bytes between the trained weights and the rest of their state
        self._between = [0 if plan.is_alone(b) else plan.frozen_bytes(b) for b in range(len(self.frozen))]
        self._stored, self._bytes = plan.stored(), [plan.state_bytes(n) for n in self._n_elements]  # by block and tensor
        # By block: byte offset of each tensor
        self._begin = [dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False)) for sizes in self._bytes]
        self._slots = [plan.state_slot(b) for b in range(len(self.owned))]
        self._shadows = {b: Slot("state", len(self.owned) + i) for i, b in enumerate(plan.policy.speculate_blocks)}

    def all_owned(self) -> Iterator[Parameter]:
        """Every owned parameter, trained or frozen, in `named_parameters` order."""
        return (p for block in self.plan.workload.blocks for p in block.parameters if p.tied_to is None)

    def is_there(self, p: Parameter) -> bool:
        """True if a frozen parameter is already set, by another rank or an earlier run."""
        return p.frozen and not (self.is_first and not (self._has_base and self.block_of(p) in self._on_disk))

    def _frozen_slot(self, p: Parameter) -> Slot:
        block = self.block_of(p)
        return Slot(ON_DISK if block in self._on_disk else "state", block)

    def block_of(self, p: Parameter) -> int:
        return self._places[p.name][0]

    def part(self, p: Parameter, rank: int | None = None) -> slice:
        """Elements of a trained parameter in the shard of this rank, or of `rank`."""
        (block, offset), rank = self._places[p.name], self._rank if rank is None else rank
        n = self._n_elements[block]
        elements = slice(min(max(rank * n - offset, 0), p.n_elements), max(min((rank + 1) * n - offset, p.n_elements), 0))
        return elements if elements.start < elements.stop else slice(0, 0)

    def place(self, p: Parameter) -> int:
        """Index of a parameter's first local element in this rank's shard of the block."""
        block, offset = self._places[p.name]
        return max(offset - self._rank * self._n_elements[block], 0) if self.part(p).stop else 0

    def param_state(self, *run: Parameter, of_shadow: bool = False, copy: Copy | None = None) -> ParamState:
        """State of a trained parameter, or of adjacent parameters of a block as one; in the slot, its shadow, or a copy of the
        block."""
        block, offset = self.block_of(run[0]), self.place(run[0])
        slot, begin = self._shadows[block] if of_shadow else self._slots[block], self._begin[block]
        n = sum(part.stop - part.start for part in map(self.part, run))

        def part(name: str) -> torch.Tensor:
            dtype = self._stored[name]
            item = DTYPE[dtype].itemsize
            first, n_items = begin[name] // item + offset, n
            if dtype == "int8":
                first, n_items = begin[name] + group_bytes(offset), group_bytes(n)
            if copy is not None:
                return copy.view(DTYPE[dtype])[first : first + n_items]
            return self.arenas.view(slot, dtype, (n_items,), first + (self._between[block] // item if begin[name] else 0))

        parts = {name: part(name) for name in self._stored}
        split = "remainder" in parts
        master = Master(parts.pop("weight"), parts.pop("remainder")) if split else Master(parts.pop("master"))
        return ParamState(master, tuple(parts.values()))

    def saved(self, p: Parameter, name: str, copy: Copy | None = None) -> torch.Tensor | Master:
        """Checkpoint tensor of a trained parameter under a name of `saved_state`, flat: its master or a moment."""
        state = self.param_state(p, copy=copy)
        return state.master if name == "master" else state.moments[name == "exp_avg_sq"]

    def moment(self, p: Parameter, name: str) -> torch.Tensor | Int8Moment:
        """A moment of a trained parameter, flat: a tensor, or int8 groups with their conversions."""
        held, part = self.param_state(p).moments[name == "exp_avg_sq"], self.part(p)
        return Int8Moment(held, part.stop - part.start, name == "exp_avg_sq") if held.dtype is torch.uint8 else held

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        """Compute weight of an owned parameter that is not packed, in its shape."""
        if p.frozen:
            assert not self.plan.is_packed(p), f"{p.name} is packed"
            slot, dtype = self._frozen_slot(p), self.plan.semantics.compute_dtype
            return self.arenas.view(slot, dtype, p.shape, self._frozen_at[p.name] // DTYPE[dtype].itemsize)
        return self.param_state(p, copy=copy).master.weight.view(p.shape)

    def first_infinite(self) -> Parameter | None:
        """First owned parameter with NaN or infinity in its compute weight or local shard. Packed weights are finite."""
        for p in self.all_owned():
            if not (p.frozen and self.plan.is_packed(p)):
                held = self.compute_weight(p) if p.frozen else self.param_state(p).master.weight
                if not bool(held.isfinite().all()):
                    return p
        return None

    def packed(self, p: Parameter) -> torch.Tensor:
        """Bytes of a packed parameter."""
        assert self.plan.is_packed(p), f"{p.name} is not packed"
        offset = self._frozen_at[p.name]
        return self.arenas.view(self._frozen_slot(p), "int8", (self.plan.stored_bytes(p),), offset)

    def set_weight(self, p: Parameter, weight: torch.Tensor) -> None:
        """Store an owned parameter of any float dtype, or the bytes of a packed one. No lane may run meanwhile."""
        with torch.no_grad():
            if self.is_there(p):
                return
            if p.frozen:
                target = self.packed(p) if self.plan.is_packed(p) else self.compute_weight(p).view(-1)
                assert weight.dtype.is_floating_point == target.dtype.is_floating_point, f"{p.name} is given as {weight.dtype}"
                target.copy_(weight.reshape(-1))
                if self._base is not None and self.block_of(p) in self._on_disk:
                    self._base.release(self.block_of(p))
                return
            master, flat = self.param_state(p).master, weight.reshape(-1)[self.part(p)]
            for first in range(0, flat.numel(), SET_ELEMENTS):
                part = slice(first, min(first + SET_ELEMENTS, flat.numel()))
                master.put(part, flat[part].to(master.weight.device))

    def set_weights(self, block: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Store `weights` that the block owns. No lane may run meanwhile."""
        for p in (*self.owned[block], *self.frozen[block]):
            if p.name in weights:
                self.set_weight(p, weights[p.name])
        self.settle(block)

    def n_bytes(self, block: int) -> int:
        """Bytes of a block's state without frozen weights, which never change."""
        return sum(self._bytes[block].values())

    def settle(self, block: int) -> None:
        """Wait for the device that holds the block's state."""
        state = self.arenas.view(self._slots[block], "int16", (0,))
        if state.is_cuda:
            torch.cuda.synchronize(state.device)

    def copied(self, block: int, workers: Workers[Scratch]) -> Copy:
        """Copy a block's state to new host memory; MemoryError if it does not fit."""
        self.settle(block)
        state, n_first = self.arenas.raw(self._slots[block]), next(iter(self._bytes[block].values()))
        copy, tasks = host_slab(self.n_bytes(block)), list[Callable[[Scratch], object]]()
        pieces = (state[:n_first], state[n_first + self._between[block] :])
        for target, piece in zip((copy[:n_first], copy[n_first:]), pieces, strict=True):
            tasks += [partial(_copy, *part) for part in zip(target.split(COPY_BYTES), piece.split(COPY_BYTES), strict=True)]
        workers.run(tasks)
        return copy

    def commit(self, block: int) -> None:
        """Swap a block's state and its shadow."""
        self.arenas.exchange(self._slots[block], self._shadows[block])


def _copy(target: torch.Tensor, source: torch.Tensor, scratch: object) -> None:
    target.copy_(source)
