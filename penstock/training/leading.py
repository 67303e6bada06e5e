"""Rank 0 leads: its messages to the other ranks, and how they are obeyed.

Rank 0 logs, evaluates, saves and decides when the run ends. The others train the steps they are told, give their parts of the
weights to a forward, and of a parameter that is to be written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from penstock.planner.lower.forward import forward_plan
from penstock.runtime.batch import Batch
from penstock.runtime.errors import PlanError
from penstock.runtime.executor import Stop, execute
from penstock.runtime.host.host_state import Copy, HostState
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.rounding import group_bytes
from penstock.runtime.machines.processes import Processes, refuse_errors
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan.workload import Parameter

from .schedules import Rates


def begin(ranks: Processes, state_path: Path | None) -> None:
    """Rank 0 has refused what it had to: the others may begin, if there is room for each; PenstockError where there is none."""
    ranks.tell({"do": "begin", "resume": None if state_path is None else str(state_path.resolve())})
    refuse_errors(ranks.gathered({"do": "begin"}))


def wait_for_others(ranks: Processes, reads: Mapping[str, str]) -> None:
    """Until all ranks are put together; PenstockError for what one of them lacks, or reads otherwise than `reads` says."""
    said = ranks.gathered(reads)
    refuse_errors(said)
    for rank, other in enumerate(said):
        for what in reads:
            if other.get(what) != reads[what]:
                raise PlanError(f"rank {rank} reads other {what} than rank 0; give all ranks the same files")


class Leader:
    """Rank 0, as its trainer sees it."""

    def __init__(self, machine: TorchMachine, ranks: Processes) -> None:
        self.machine, self._ranks = machine, ranks
        machine.tell_of_forward = self.forward

    def train(self, first_step: int, n_steps: int, stop: Stop, lr: float | None) -> Stop:
        """Have all begin these steps, at this rate if one was asked for; returns what stops the leader's own execution once `stop`
        is requested."""
        self._ranks.tell({"do": "train", "first_step": first_step, "n_steps": n_steps, "lr": lr})
        return self.machine.agree(stop)

    def forward(self, n_micro_batches: int, seq_len: int) -> None:
        """Have all give their weights to one pass of a forward."""
        self._ranks.tell({"do": "forward", "n_micro_batches": n_micro_batches, "seq_len": seq_len})

    def refer(self, path: Path) -> None:
        """Have all read the reference that this rank has written; PlanError where one cannot."""
        self._ranks.tell({"do": "refer", "path": str(path.resolve())})
        refuse_errors(self._ranks.gathered({}))

    def end(self) -> None:
        """Let the others end."""
        self._ranks.tell({"do": "end"})

    def state(self) -> "WholeState":
        """The state of all ranks."""
        return WholeState(self.machine.host, self._ranks)


class WholeState(HostState):
    """The state of all ranks as a saver reads it: a tensor at a time is collected from the ranks that hold its parts."""

    def __init__(self, own: HostState, ranks: Processes) -> None:
        self.plan, self.owned, self.gate, self._own, self._ranks = own.plan, own.owned, None, own, ranks
        self.constants = own.constants  # read before there is a saver

    @property
    def n_updates(self) -> int:  # type: ignore[override]
        return self._own.n_updates

    def settle(self, block: int) -> None:
        self._own.settle(block)

    def n_bytes(self, block: int) -> int:
        return self._own.n_bytes(block) * self._ranks.n

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        dtype = DTYPE[self.plan.semantics.compute_dtype]
        if p.frozen:
            return self._own.compute_weight(p)
        return self._whole(p, "weight", dtype).view(p.shape)

    def saved(self, p: Parameter, name: str, copy: Copy | None = None) -> torch.Tensor:
        return self._whole(p, name, DTYPE[self.plan.semantics.saved_state[name]])

    def _whole(self, p: Parameter, what: str, dtype: torch.dtype) -> torch.Tensor:
        self._ranks.tell({"do": "give", "name": p.name, "what": what})
        of: Callable[[int], int] = group_bytes if dtype is torch.uint8 else int  # where an element's place is
        whole = torch.empty(of(p.n_elements), dtype=dtype)
        for rank in range(self._ranks.n):
            part = self._own.part(p, rank)
            part = slice(of(part.start), of(part.stop))
            if rank == 0:
                whole[part] = _own_part(self._own, p, what)
            elif part.stop > part.start:
                self._ranks.to_first(None, rank, whole[part])
        return whole


def _own_part(state: HostState, p: Parameter, what: str) -> torch.Tensor:
    """Flat, contiguous: this rank's elements of a parameter's weight, master or moment."""
    if what == "weight":
        return state.param_state(p).master.weight
    held = state.saved(p, what)
    return held if isinstance(held, torch.Tensor) else held.values()


def obey(machine: TorchMachine, ranks: Processes, rates: Rates, refer: Callable[[Path], Mapping[str, str]]) -> None:
    """Do what rank 0 says until it says that all is done. `refer`: reads a reference, and says what is wrong with it."""
    named = {p.name: p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned[b]}
    while (said := ranks.tell())["do"] != "end":
        match said["do"]:
            case "train":
                rates.asked = said["lr"]
                execute(machine.plan, machine, said["n_steps"], said["first_step"], stop=machine.agree(Stop()))
            case "refer":
                ranks.gathered(refer(Path(said["path"])))
            case "forward":
                plan = forward_plan(machine.plan, said["n_micro_batches"], said["seq_len"])
                execute(plan, machine.forwards(plan, _no_batch, None), 1)
            case "give":
                p = named[said["name"]]
                part = machine.host.part(p)
                machine.host.settle(machine.host.block_of(p))
                if part.stop > part.start:
                    ranks.to_first(_own_part(machine.host, p, said["what"]).contiguous(), ranks.rank, None)


def _no_batch(step: int) -> Batch:
    raise AssertionError("a rank that gives its weights to a forward reads no batch")
