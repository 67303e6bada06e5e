"""Rank 0: its messages to the other ranks, and the state that it gathers from them.

Rank 0 logs, evaluates, saves and decides when the run ends. The other ranks train the steps that it announces, and send their
shards of weights to a forward pass and of parameters to a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from penstock.runtime.errors import PlanError, RanksError
from penstock.runtime.executor import Stop
from penstock.runtime.host.host_state import Copy, HostState
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.rounding import group_bytes
from penstock.runtime.machines.processes import Processes, refuse_errors
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan.workload import Parameter


@dataclass(frozen=True, slots=True)
class Begin:  # read the inputs
    resume: str | None  # checkpoint
    plan: str | None = None  # file of a plan that replaces the given one


@dataclass(frozen=True, slots=True)
class Train:
    first_step: int
    n_steps: int
    lr: float | None  # instead of the scheduled rate


@dataclass(frozen=True, slots=True)
class Forward:  # contribute weights to one forward pass
    n_micro_batches: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class Refer:  # read a reference file
    path: str


@dataclass(frozen=True, slots=True)
class Give:  # send the local shard of a tensor
    parameter: str
    tensor: str  # `weight`, `master` or a moment


@dataclass(frozen=True, slots=True)
class End:
    pass


Message = Begin | Train | Forward | Refer | Give | End
_KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}


def send(ranks: Processes, message: Message) -> None:
    """Broadcast a message of rank 0, as JSON: nothing is unpickled."""
    ranks.tell({"message": type(message).__name__} | asdict(message))


def receive(ranks: Processes) -> Message:
    """Wait for the next message of rank 0."""
    fields = ranks.tell()
    try:
        return _KINDS[fields.pop("message")](**fields)
    except (KeyError, TypeError):
        raise RanksError("rank 0 sends an unknown message; start all ranks with the same version of penstock") from None


def begin(ranks: Processes, state_path: Path | None, plan_path: Path | None = None) -> None:
    """Start the other ranks after rank 0 has validated its inputs, or again with another plan. PenstockError for lack of memory."""
    send(ranks, Begin(*(None if path is None else str(path.resolve()) for path in (state_path, plan_path))))
    refuse_errors(ranks.gathered({}))


def wait_for_others(ranks: Processes, reads: Mapping[str, str]) -> None:
    """Wait until all ranks are set up. PenstockError if one failed, or read other inputs than the digests in `reads`."""
    statuses = ranks.gathered(reads)
    refuse_errors(statuses)
    for rank, status in enumerate(statuses):
        for name in reads:
            if status.get(name) != reads[name]:
                raise PlanError(f"rank {rank} reads other {name} than rank 0; give all ranks the same files")


class Leader:
    """Interface of rank 0's trainer to the other ranks, and a `StateReader`, which gathers one tensor at a time from all ranks."""

    def __init__(self, machine: TorchMachine, ranks: Processes) -> None:
        self.machine, self._own, self._ranks = machine, machine.host, ranks
        self.n_here = ranks.n_here
        self.begins_again = False  # after the session: the others then wait for `Begin`, not for `End`
        machine.tell_of_forward = self.forward

    def train(self, first_step: int, n_steps: int, stop: Stop, lr: float | None) -> Stop:
        """Start steps on all ranks, with learning rate `lr` if it is set. Return the Stop of rank 0, which follows `stop`."""
        send(self._ranks, Train(first_step, n_steps, lr))
        return self.machine.agree(stop)

    def forward(self, n_micro_batches: int, seq_len: int) -> None:
        """Start one forward pass in which all ranks contribute their weights."""
        send(self._ranks, Forward(n_micro_batches, seq_len))

    def refer(self, path: Path) -> None:
        """Make all ranks read the reference file. PlanError if a rank cannot."""
        send(self._ranks, Refer(str(path.resolve())))
        refuse_errors(self._ranks.gathered({}))

    def end(self) -> None:
        if not self.begins_again:
            send(self._ranks, End())

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        if p.frozen:
            return self._own.compute_weight(p)
        return self._gathered(p, "weight", DTYPE[self._own.plan.semantics.compute_dtype]).view(p.shape)

    def saved(self, p: Parameter, name: str, copy: Copy | None = None) -> torch.Tensor:
        return self._gathered(p, name, DTYPE[self._own.plan.semantics.saved_state[name]])

    def _gathered(self, p: Parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        send(self._ranks, Give(p.name, name))
        index: Callable[[int], int] = group_bytes if dtype is torch.uint8 else int  # element index -> index in the packed bytes
        tensor = torch.empty(index(p.n_elements), dtype=dtype)
        for rank in range(self._ranks.n):
            part = self._own.part(p, rank)
            part = slice(index(part.start), index(part.stop))
            if rank == 0:
                tensor[part] = own_part(self._own, p, name)
            elif part.stop > part.start:
                self._ranks.to_first(None, rank, tensor[part])
        return tensor


def own_part(state: HostState, p: Parameter, name: str) -> torch.Tensor:
    """Return this rank's shard of a weight, master weight or moment, flat and contiguous."""
    if name == "weight":
        return state.param_state(p).master.weight
    held = state.saved(p, name)
    return held if isinstance(held, torch.Tensor) else held.values()
