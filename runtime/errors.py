"""Errors that a user can mend, with the exit code of each."""


class PenstockError(ValueError):
    """Root of every error a user can cause. The message is one line: what, where, what to do."""

    exit_code = 2


class PlanError(PenstockError):
    """A plan file, or a request for a plan, that cannot be right."""


class RanksError(PenstockError):
    """The ranks of a run do not reach each other, or are not of one run."""


class WrongPlanError(PlanError):
    """A plan that was read, and that the checker says no to."""

    exit_code = 1


class ProfileError(PenstockError):
    """A hardware profile that is incomplete, or asked for a size it never measured."""


class WorkloadError(PenstockError):
    """A model configuration that is missing, malformed or of a type not yet proven."""


class DataError(PenstockError):
    """Training data that is missing, empty or malformed."""


class CheckpointError(PenstockError):
    """A checkpoint or output folder that cannot be read or written."""


class DiskError(PenstockError):
    """A disk that frozen weights cannot be read from."""


class DoesNotFitError(PenstockError):
    """The workload does not fit the machine: the message names the missing bytes and what would fit."""

    exit_code = 3

    def __init__(self, message: str, short_device_bytes: int, short_host_bytes: int, smallest_change: str) -> None:
        super().__init__(message)
        self.short_device_bytes = short_device_bytes
        self.short_host_bytes = short_host_bytes
        self.smallest_change = smallest_change

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """It may come from another process."""
        return type(self), (str(self), self.short_device_bytes, self.short_host_bytes, self.smallest_change)
