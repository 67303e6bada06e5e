"""Rank 0: its messages to the other ranks, and their handling.

Rank 0 logs, evaluates, saves and decides when the run ends. The other ranks train the steps that it announces, and send their
shards of weights to a forward pass and of parameters to a checkpoint.
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
    """Start the other ranks, after rank 0 has validated its inputs. PenstockError if a rank lacks memory."""
    ranks.tell({"do": "begin", "resume": None if state_path is None else str(state_path.resolve())})
    refuse_errors(ranks.gathered({"do": "begin"}))


def wait_for_others(ranks: Processes, reads: Mapping[str, str]) -> None:
    """Wait until all ranks are set up. PenstockError if one failed, or read other inputs than the digests in `reads`."""
    statuses = ranks.gathered(reads)
    refuse_errors(statuses)
    for rank, status in enumerate(statuses):
        for name in reads:
            if status.get(name) != reads[name]:
                raise PlanError(f"rank {rank} reads other {name} than rank 0; give all ranks the same files")


class Leader:
    """Interface of rank 0's trainer to the other ranks."""

    def __init__(self, machine: TorchMachine, ranks: Processes) -> None:
        self.machine, self._ranks = machine, ranks
        machine.tell_of_forward = self.forward

    def train(self, first_step: int, n_steps: int, stop: Stop, lr: float | None) -> Stop:
        """Start steps on all ranks, with learning rate `lr` if it is set. Return the Stop of rank 0's execution, which follows
        `stop`."""
        self._ranks.tell({"do": "train", "first_step": first_step, "n_steps": n_steps, "lr": lr})
        return self.machine.agree(stop)

    def forward(self, n_micro_batches: int, seq_len: int) -> None:
        """Start one forward pass in which all ranks contribute their weights."""
        self._ranks.tell({"do": "forward", "n_micro_batches": n_micro_batches, "seq_len": seq_len})

    def refer(self, path: Path) -> None:
        """Make all ranks read the reference file. PlanError if a rank cannot."""
        self._ranks.tell({"do": "refer", "path": str(path.resolve())})
        refuse_errors(self._ranks.gathered({}))

    def end(self) -> None:
        """Stop the other ranks."""
        self._ranks.tell({"do": "end"})

    def state(self) -> "WholeState":
        """Return the state of all ranks."""
        return WholeState(self.machine.host, self._ranks)


class WholeState(HostState):
    """State of all ranks for a saver. Gathers one tensor at a time from the ranks that hold its shards."""

    def __init__(self, state: HostState, ranks: Processes) -> None:
        self.plan, self.owned, self.gate, self._own, self._ranks = state.plan, state.owned, None, state, ranks
        self.constants = state.constants  # read before a saver exists

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
        return self._gathered(p, "weight", dtype).view(p.shape)

    def saved(self, p: Parameter, name: str, copy: Copy | None = None) -> torch.Tensor:
        return self._gathered(p, name, DTYPE[self.plan.semantics.saved_state[name]])

    def _gathered(self, p: Parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        self._ranks.tell({"do": "give", "name": p.name, "what": name})
        index: Callable[[int], int] = group_bytes if dtype is torch.uint8 else int  # element index -> index in the packed bytes
        tensor = torch.empty(index(p.n_elements), dtype=dtype)
        for rank in range(self._ranks.n):
            part = self._own.part(p, rank)
            part = slice(index(part.start), index(part.stop))
            if rank == 0:
                tensor[part] = _own_part(self._own, p, name)
            elif part.stop > part.start:
                self._ranks.to_first(None, rank, tensor[part])
        return tensor


def _own_part(state: HostState, p: Parameter, name: str) -> torch.Tensor:
    """Return this rank's shard of a weight, master weight or moment, flat and contiguous."""
    if name == "weight":
        return state.param_state(p).master.weight
    held = state.saved(p, name)
    return held if isinstance(held, torch.Tensor) else held.values()


def obey(machine: TorchMachine, ranks: Processes, rates: Rates, refer: Callable[[Path], Mapping[str, str]]) -> None:
    """Execute commands of rank 0 until `end`. `refer`: reads a reference file and returns its errors."""
    named = {p.name: p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned[b]}
    while (message := ranks.tell())["do"] != "end":
        match message["do"]:
            case "train":
                rates.fixed_lr = message["lr"]
                execute(machine.plan, machine, message["n_steps"], message["first_step"], stop=machine.agree(Stop()))
            case "refer":
                ranks.gathered(refer(Path(message["path"])))
            case "forward":
                plan = forward_plan(machine.plan, message["n_micro_batches"], message["seq_len"])
                execute(plan, machine.forwards(plan, _no_batch, None), 1)
            case "give":
                p = named[message["name"]]
                part = machine.host.part(p)
                machine.host.settle(machine.host.block_of(p))
                if part.stop > part.start:
                    ranks.to_first(_own_part(machine.host, p, message["what"]).contiguous(), ranks.rank, None)


def _no_batch(step: int) -> Batch:
    raise AssertionError("a rank that gives its weights to a forward reads no batch")
