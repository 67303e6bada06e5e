"""Errors that a user can fix, with their exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager


class PenstockError(ValueError):
    """Root of all errors that a user can cause. The message is one line: problem, place, remedy."""

    exit_code = 2


class PlanError(PenstockError):
    """An invalid plan file, or an invalid request for a plan."""


class RanksError(PenstockError):
    """Ranks of a run that do not reach each other, or belong to different runs."""


class WrongPlanError(PlanError):
    """A well-formed plan that the checker rejects."""

    exit_code = 1


class ProfileError(PenstockError):
    """A hardware profile that is incomplete, or lacks a requested size."""


class WorkloadError(PenstockError):
    """A model configuration that is missing, malformed or of an unproven type."""


class DataError(PenstockError):
    """Training data that is missing, empty or malformed."""


class StepError(DataError):
    """A batch, loss or callback of a step that failed or cannot be used. The training state is that of the last whole step."""


class CheckpointError(PenstockError):
    """A checkpoint or output folder that cannot be read or written."""


class DiskError(PenstockError):
    """A disk with unreadable frozen weights."""


class GoneError(PenstockError):
    """Raised on a follower rank for an error that rank 0 prints."""


class DoesNotFitError(PenstockError):
    """The workload does not fit the machine: the message names the missing bytes and a change that fits."""

    exit_code = 3

    def __init__(self, message: str, short_device_bytes: int, short_host_bytes: int, smallest_change: str) -> None:
        super().__init__(message)
        self.short_device_bytes = short_device_bytes
        self.short_host_bytes = short_host_bytes
        self.smallest_change = smallest_change

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Support pickling by another process."""
        return type(self), (str(self), self.short_device_bytes, self.short_host_bytes, self.smallest_change)


class SlowKernelWarning(RuntimeWarning):
    """A kernel that cannot be used on this machine; its reference implementation runs, more slowly."""


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Report an exception of a user's code as a StepError that names the code. The message is one line; the cause is chained."""
    try:
        yield
    except (PenstockError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, reported with its own advice
            raise
        lines = str(error).splitlines() or [""]
        words = f"{type(error).__name__}{': ' * bool(lines[0])}{lines[0]}"
        if lines[0].startswith("Caught "):  # worker of a DataLoader: the last line of its traceback
            words = lines[-1]
        raise StepError(f"{name} raised {words[:240]}; correct it") from error
