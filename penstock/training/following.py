"""How does a rank follow that does not lead?"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from penstock.ranks import GoneError
from runtime.errors import DataError, PenstockError, RanksError

from .assembly import Follower, admit, follower_of
from .session import settle_kernels

if TYPE_CHECKING:
    from penstock.settings import RunSettings
    from runtime.machines.processes import Processes
    from runtime.plan import PlanFile


def follow(settings: "RunSettings", file: "PlanFile", device: str, ranks: "Processes") -> int:
    """A rank that does not lead, from beginning to end; the exit code. What the others have said already it keeps to itself."""
    from runtime.host.updates import NonFiniteError

    from .crew import follow as obey
    from .trainer import device_memory_named

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 is asked, and tells
    try:
        with ExitStack() as until_the_end:
            said = ranks.tell()
            if said["do"] != "begin":
                return 1
            status: dict[str, Any] = {}
            with _told(status):
                if device == "cuda":
                    settle_kernels(file.plan, settings.deterministic)
                admit(file.plan, device, settings.device, ranks)
            if any(other.get("error") for other in ranks.gathered(status)):
                return 1
            found: Follower | None = None
            with _told(status):
                found = follower_of(settings, file.plan, device, ranks, said["resume"], until_the_end)
                status |= found.reads
            if any(other != status for other in ranks.gathered(status)) or found is None:
                return 1
            with device_memory_named():
                obey(found.store, ranks)
    except (RanksError, GoneError, NonFiniteError, DataError):
        return 1  # what all ranks find the first one says
    except PenstockError as error:
        raise PenstockError(f"rank {ranks.rank}: {error}") from error
    return 0


@contextmanager
def _told(status: dict[str, Any]) -> Iterator[None]:
    """What goes wrong on this rank is said to all: into what it tells them."""
    try:
        yield
    except (PenstockError, MemoryError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        status |= {"error": line, "exit_code": getattr(error, "exit_code", 2)}
