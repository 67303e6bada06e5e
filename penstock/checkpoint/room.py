"""Is there room on the disk, and what happens while there is none?"""

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from penstock.settings import CheckpointSettings
from runtime.errors import CheckpointError
from runtime.executor import Stop
from runtime.units import show_bytes

from .retention import kept

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
POLL_S = 0.5
LONGEST_PAUSE_S = 600.0  # between two tries: a quota shows only when it is met again


class NoRoomError(CheckpointError):
    """The disk, or what one may use of it, is full."""


def refusal(path: Path, error: OSError) -> CheckpointError:
    """What a disk says that takes no more, in one line."""
    kind = NoRoomError if error.errno in NO_ROOM else CheckpointError
    return kind(f"{path}: cannot be written ({error.strerror}); make room, or choose another --out")


class Wanted:
    """Room for something that found none."""

    def __init__(self, path: Path, n_bytes: int, n_tries: int) -> None:
        self.path, self.n_bytes = path, n_bytes
        self._not_before_s = time.monotonic() + min(2.0 ** min(n_tries, 20), LONGEST_PAUSE_S)

    def has_come(self) -> bool:
        """Whether another try is worth it."""
        return time.monotonic() >= self._not_before_s and free_bytes(self.path.parent) >= self.n_bytes

    def wait(self, stop: Stop, is_last: bool) -> None:
        """Until it has come. NoRoomError if the run is asked to end meanwhile, unless this `is_last`, with which it ends."""
        while not self.has_come():
            if stop.is_requested and not is_last:
                raise NoRoomError(f"{self.path}: not written: {self._sizes()}; make room, and go on with --resume")
            time.sleep(POLL_S)

    def words(self, meanwhile: str) -> str:
        """What is wrong, and what is done until it is right."""
        return f"{self.path}: not written yet: {self._sizes()}; {meanwhile} until there is room: make some"

    def _sizes(self) -> str:
        return f"the disk is full: it takes {show_bytes(self.n_bytes)}, {show_bytes(free_bytes(self.path.parent))} are free"


def patiently(write: Callable[[], None], path: Path, n_bytes: int, say: Callable[[str], None], stop: Stop) -> None:
    """Write, if need be when there is room. `write` leaves nothing behind where it fails."""
    n_tries, is_last = 0, stop.is_requested
    while True:
        try:
            return write()
        except NoRoomError:
            n_tries += 1
            wanted = Wanted(path, n_bytes, n_tries)
            if n_tries == 1:
                say(wanted.words("the run waits"))
            wanted.wait(stop, is_last)


def free_bytes(folder: Path) -> int:
    """What may still be written there, as far as the file system says."""
    return shutil.disk_usage(folder).free


def refuse_what_has_no_room(
    folder: Path, settings: CheckpointSettings, n_bytes: int, first_step: int, n_steps: int, run_s: float
) -> None:
    """CheckpointError if a run's checkpoints, each of `n_bytes`, will not fit beside what is there. `run_s`: how long it takes, as
    far as known."""
    n = _n_more_at_once(folder, settings, first_step, n_steps, run_s)
    free = free_bytes(folder)
    if n * n_bytes <= free:
        return
    each = f"of {show_bytes(n_bytes)}"
    what = f"{n} checkpoints {each} each, {show_bytes(n * n_bytes)} in all," if n > 1 else f"a checkpoint {each}"
    fewer = ", keep fewer with --keep" if n > 1 and settings.keep != 1 else ""
    smaller = "" if settings.weights_only else ", save --weights-only"
    raise CheckpointError(
        f"{folder}: {what} will be written, and {show_bytes(free)} are free; make room{fewer}{smaller}, or choose another --out"
    )


def _n_more_at_once(folder: Path, settings: CheckpointSettings, first_step: int, n_steps: int, run_s: float) -> int:
    """How many checkpoints, that which is being written among them, lie there at once besides those that are there now."""
    if first_step >= n_steps:
        return 0
    every = settings.every or n_steps
    n_asked = (n_steps - 1) // every - first_step // every + 1
    n_by_time = int(run_s // (settings.minutes * 60)) if settings.minutes else 0
    if settings.keep is None:
        return n_asked + min(n_by_time, 1)
    return min(n_asked + n_by_time, settings.keep + 1 - min(len(kept(folder, n_steps)), settings.keep))
