"""What do the ranks do that do not lead a run?

Rank 0 leads: it logs, evaluates, decides when to save and when to end. The others wait for its word, and do their part: of a
stretch of steps, of a forward (they give their weights, and compute nothing), of a parameter that is to be written down.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.batch import Batch
from runtime.errors import PlanError
from runtime.executor import Execution, Stop, execute
from runtime.forward_plan import forward_plan
from runtime.host.host_state import Copy, HostState
from runtime.host.memory import DTYPE
from runtime.host.optimizer import Master
from runtime.machines.processes import Processes, refuse_errors
from runtime.machines.torch_machine import TorchMachine
from runtime.plan.workload import Parameter


def begin(ranks: Processes, state_path: Path | None) -> None:
    """Rank 0 has read what it was to read: the others may, if there is room for each; PenstockError where there is none."""
    ranks.tell({"do": "begin", "resume": None if state_path is None else str(state_path.resolve())})
    refuse_errors(ranks.gathered({"do": "begin"}))


def all_ready(ranks: Processes, reads: Mapping[str, str]) -> None:
    """Rank 0, which `reads` this, and all others are put together; PenstockError for what one of them lacks, or has otherwise."""
    said = ranks.gathered(reads)
    refuse_errors(said)
    for rank, other in enumerate(said):
        for what in reads:
            if other.get(what) != reads[what]:
                raise PlanError(f"rank {rank} reads other {what} than rank 0; give all ranks the same files")


class Lead:
    """Rank 0, as its trainer sees it."""

    def __init__(self, machine: TorchMachine, ranks: Processes) -> None:
        self.machine, self._ranks = machine, ranks
        machine.tell_of_forward = self.forward

    def stretch(self, first_step: int, n_steps: int, stop: Stop) -> Stop:
        """Have all begin these steps; what the lead's own execution is to be stopped by."""
        self._ranks.tell({"do": "train", "first_step": first_step, "n_steps": n_steps})
        return self.machine.agree(stop)

    def forward(self, n_micro_batches: int, seq_len: int) -> None:
        """Have all give their weights to one pass of a forward."""
        self._ranks.tell({"do": "forward", "n_micro_batches": n_micro_batches, "seq_len": seq_len})

    def end(self) -> None:
        """Let the others go."""
        self._ranks.tell({"do": "end"})

    def state(self) -> "WholeState":
        """The state of all ranks."""
        return WholeState(self.machine.host, self._ranks)


class WholeState(HostState):
    """The state of all ranks, as far as writing it down needs: a tensor at a time comes from wherever its parts are."""

    def __init__(self, own: HostState, ranks: Processes) -> None:
        self.plan, self.gate, self._own, self._ranks = own.plan, None, own, ranks
        self._of_ranks = parts_of(own, ranks.n)
        self.n_threads = own.n_threads

    @property
    def n_updates(self) -> int:  # type: ignore[override]
        return self._own.n_updates

    def owned(self, block: int) -> list[Parameter]:
        return self._own.owned(block)

    def settle(self, block: int) -> None:
        self._own.settle(block)

    def n_bytes(self, block: int) -> int:
        return self._own.n_bytes(block) * self._ranks.n

    def compute_weight(self, p: Parameter, copy: Copy | None = None) -> torch.Tensor:
        dtype = DTYPE[self.plan.semantics.compute_dtype]
        return self._whole(p, "weight", dtype).view(p.shape)

    def saved(self, p: Parameter, copy: Copy | None = None) -> Iterator[tuple[str, torch.Tensor | Master]]:
        """One at a time is here."""
        for name, dtype in self.plan.semantics.saved_state.items():
            yield name, self._whole(p, name, DTYPE[dtype])

    def _whole(self, p: Parameter, what: str, dtype: torch.dtype) -> torch.Tensor:
        self._ranks.tell({"do": "give", "name": p.name, "what": what})
        whole = torch.empty(p.n_elements, dtype=dtype)
        for rank, part in enumerate(self._of_ranks[p.name]):
            if rank == 0:
                whole[part] = _own_part(self._own, p, what)
            elif part.stop > part.start:
                self._ranks.to_first(None, rank, whole[part])
        return whole


def parts_of(state: HostState, n: int) -> dict[str, list[slice]]:
    """By parameter: the elements of it that each rank has."""
    owned = (p for b in range(len(state.plan.workload.blocks)) for p in state.owned(b))
    return {p.name: [state.part_of(p, rank) for rank in range(n)] for p in owned}


def _own_part(state: HostState, p: Parameter, what: str) -> torch.Tensor:
    """Flat, contiguous, what this rank has of a parameter."""
    if what == "weight":
        return state.param_state(p).master.weight
    held = dict(state.saved(p))[what]
    return held.whole() if isinstance(held, Master) else held


def follow(machine: TorchMachine, ranks: Processes) -> None:
    """Do what rank 0 says until it says that all is done."""
    named = {p.name: p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned(b)}
    for said in _words(ranks):
        match said["do"]:
            case "train":
                stop = machine.agree(Stop())
                with Execution(machine.plan, machine, said["n_steps"], said["first_step"], stop=stop) as steps:
                    for _ in steps:
                        pass
            case "forward":
                plan = forward_plan(machine.plan, said["n_micro_batches"], said["seq_len"])
                execute(plan, machine.forwards(plan, _no_batch, None), 1)
            case "give":
                p = named[said["name"]]
                part = machine.host.part(p)
                machine.host.settle(machine.host.block_of(p))
                if part.stop > part.start:
                    ranks.to_first(_own_part(machine.host, p, said["what"]).contiguous(), ranks.rank, None)


def _words(ranks: Processes) -> Iterator[dict[str, Any]]:
    while (said := ranks.tell())["do"] != "end":
        yield said


def _no_batch(step: int) -> Batch:
    raise AssertionError("who only gives weights computes nothing")
