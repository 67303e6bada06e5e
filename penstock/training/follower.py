"""Main loop of ranks other than 0."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from penstock.checkpoint.checkpoint import load_state
from penstock.data.data import no_report
from penstock.planner.lower.forward import forward_plan
from penstock.run_config import RunRequest
from penstock.runtime.batch import Batch
from penstock.runtime.errors import DataError, GoneError, PenstockError, RanksError
from penstock.runtime.executor import Stop, execute
from penstock.runtime.host.updates import NonFiniteError
from penstock.runtime.machines.processes import Processes, failure_of
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import PlanFile
from penstock.user_loss import planned_loss

from .build import build
from .device import refuse_what_does_not_fit, release_memory, select_kernels
from .inputs import attach_stored, read_inputs
from .rank0 import Begin, End, Forward, Give, Message, Refer, Train, own_part, receive
from .references import attach_file, with_reference
from .schedules import Rates
from .trainer import device_memory_named


def follow(request: RunRequest, device: str, ranks: Processes) -> int:
    """Train on the messages of rank 0. Return the exit code. Rank 0 alone reports errors."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles signals and notifies the other ranks
    request = replace(request, report=no_report)
    try:
        message: Message | None = receive(ranks)
    except (RanksError, GoneError):
        return 1
    while isinstance(message, Begin):  # again with each plan of the run
        message = _followed(request, device, ranks, message)
        release_memory(device)
    return int(not isinstance(message, End))


def _followed(request: RunRequest, device: str, ranks: Processes, first: Begin) -> Message | None:
    """Train under one plan. Return the message that ended it, or None after a failure."""
    try:
        status: dict[str, Any] = {}
        with _failure_in(status):
            if first.plan is not None:
                request = replace(request, file=PlanFile.read(Path(first.plan)))
            settings, plan = request.settings, request.file.plan
            select_kernels(plan, device, settings.deterministic)
            is_first_here = ranks.rank % ranks.n_here == 0  # checks for all ranks of its host, before any allocates
            if device == "cuda" or is_first_here:
                refuse_what_does_not_fit(plan, device, settings.device, ranks.n_here, is_first_here)
        if any(ranks.gathered(status)):  # a failure
            return None
        with _failure_in(status):
            state = None if first.resume is None else load_state(Path(first.resume))
            loss = planned_loss(plan.semantics.objective, request.loss or settings.loss)
            inputs = with_reference(read_inputs(request, device, loss, state, leads=False))
            attach_stored(inputs)
            store = build(inputs, ranks)
            status |= inputs.digests
        if any(rank_status != status for rank_status in ranks.gathered(status)):  # a failure, or other inputs
            return None

        def refer_to(path: Path) -> Mapping[str, Any]:
            outcome: dict[str, Any] = {}
            with _failure_in(outcome):
                adapter = (inputs.reference or {}).get("adapter")
                attach_file(path, inputs.plan, inputs.reference_sets, {} if adapter is None else {"adapter": adapter})
            return outcome

        with device_memory_named():
            return obey(store, ranks, refer_to)
    except (RanksError, GoneError, NonFiniteError, DataError):
        return None
    except PenstockError as error:
        raise PenstockError(f"rank {ranks.rank}: {error}") from error


def obey(machine: TorchMachine, ranks: Processes, refer: Callable[[Path], Mapping[str, Any]]) -> Message:
    """Serve messages of rank 0 until `End` or another `Begin`, which is returned. `refer`: reads a file, returns its failure."""
    named = {p.name: p for b in range(len(machine.plan.workload.blocks)) for p in machine.host.owned[b]}
    while True:
        match message := receive(ranks):
            case Begin() | End():
                return message
            case Train(first_step, n_steps, lr):
                assert isinstance(machine.settings, Rates), "set by `build`"
                machine.settings.fixed_lr = lr
                execute(machine.plan, machine, n_steps, first_step, stop=machine.agree(Stop()))
            case Refer(path):
                ranks.gathered(refer(Path(path)))
            case Forward(n_micro_batches, seq_len):
                plan = forward_plan(machine.plan, n_micro_batches, seq_len)
                execute(plan, machine.forwards(plan, _no_batch, None), 1)
            case Give(name, tensor):
                p = named[name]
                part = machine.host.part(p)
                machine.host.settle(machine.host.block_of(p))
                if part.stop > part.start:
                    ranks.to_first(own_part(machine.host, p, tensor).contiguous(), ranks.rank, None)
            case _:
                assert_never(message)


def _no_batch(step: int) -> Batch:
    raise AssertionError("a rank that gives its weights to a forward reads no batch")


@contextmanager
def _failure_in(status: dict[str, Any]) -> Iterator[None]:
    """Add an error of this rank to `status`, which is gathered by all ranks."""
    try:
        yield
    except (PenstockError, MemoryError, RuntimeError) as error:
        status |= failure_of(error)
