"""Main loop of ranks other than 0."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import load_state
from penstock.data.data import RunData
from penstock.ranks import GoneError
from penstock.runtime.errors import DataError, PenstockError, RanksError
from penstock.runtime.host.updates import NonFiniteError
from penstock.runtime.machines.processes import Processes
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import PlanFile
from penstock.settings import RunSettings
from penstock.user_loss import planned_loss

from .device import refuse_what_does_not_fit, select_kernels
from .inputs import data_of, fill, plan_of_folder, weights_of
from .rank0 import obey
from .references import attach_file, attach_reference, sets_with_reference
from .session import input_digests, machine_of, optimizer_of, steps_of, with_defaults
from .trainer import device_memory_named


def follow(
    settings: RunSettings,
    file: PlanFile,
    device: str,
    ranks: Processes,
    data: RunData | None = None,
    user_loss: Callable[..., Any] | None = None,
) -> int:
    """Train on the commands of rank 0. Return the exit code. Rank 0 alone reports errors. `data`, `user_loss`: batches and loss
    of a user's program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles signals and notifies the other ranks
    try:
        message = ranks.tell()
        if message["do"] != "begin":
            return 1
        status: dict[str, Any] = {}
        with _errors_in(status):
            select_kernels(file.plan, device, settings.deterministic)
            is_first_here = ranks.rank % ranks.n_here == 0  # checks for all ranks of its host, before any allocates
            if device == "cuda" or is_first_here:
                refuse_what_does_not_fit(file.plan, device, settings.device, ranks.n_here, is_first_here)
        if any(rank_status.get("error") for rank_status in ranks.gathered(status)):
            return 1
        store: TorchMachine | None = None
        with _errors_in(status):
            plan, folder = plan_of_folder(file.plan, settings.model)
            state = None if message["resume"] is None else load_state(Path(message["resume"]))
            data = data or data_of(settings, plan, folder)
            of_step, _ = optimizer_of(with_defaults(settings, plan).optimizer, steps_of(settings, data))
            weights = weights_of(settings, plan, folder, state)
            loss = planned_loss(plan.semantics.objective, user_loss or settings.loss)
            maps = sets_with_reference(plan.semantics.objective, data)
            attach_reference(settings, plan, maps, folder)
            store = machine_of(device, plan, data, of_step, settings.seed, ranks, loss)
            fill(store, settings, data, weights, state)
            status |= input_digests(data, weights)
        if any(rank_status != status for rank_status in ranks.gathered(status)) or store is None:
            return 1

        def refer_to(path: Path) -> dict[str, Any]:
            wrong: dict[str, Any] = {}
            with _errors_in(wrong):
                attach_file(path, plan, maps)
            return wrong

        with device_memory_named():
            obey(store, ranks, of_step, refer_to)
    except (RanksError, GoneError, NonFiniteError, DataError):
        return 1
    except PenstockError as error:
        raise PenstockError(f"rank {ranks.rank}: {error}") from error
    return 0


@contextmanager
def _errors_in(status: dict[str, Any]) -> Iterator[None]:
    """Store an error of this rank in `status`, which is gathered by all ranks."""
    try:
        yield
    except (PenstockError, MemoryError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        status |= {"error": line, "exit_code": getattr(error, "exit_code", 2)}
