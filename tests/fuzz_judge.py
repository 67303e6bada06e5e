"""When has a reader failed on a file?

A reader takes the file, or refuses it in one line with an error of ours. Anything else is a failure: another exception, no answer
in time, much more memory than the file could ask for, a look outside of the file's folder, code that came with it, a process or a
connection. Native code opens files without telling Python, so the folder outside is watched by the kernel.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from runtime.errors import PenstockError
from runtime.units import on_one_line

ROOT = Path(__file__).parents[1]
LONGEST_LINE = 600
CPU_S, WAIT_S = 10.0, 100.0  # far beyond what any of the files takes: CPU time, so that a busy machine is no hang; and waiting
MEMORY_BYTES = 400 * 2**20  # above what the process held before
MODULES = {str(ROOT), *sysconfig.get_paths().values()}  # folders that an import may list
READABLE = (
    ROOT,
    *map(Path, {sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix)}),
    Path("/usr"),
    Path("/lib"),
    Path("/proc"),
)
DEVICES = {"/dev/null", "/dev/urandom", "/etc/localtime", "/sys/devices/system/cpu", "/sys/fs/cgroup"}
EXECUTED = "EXECUTED"  # the file that planted code leaves behind
PLANTED = f"import pathlib\npathlib.Path(__file__).with_name({EXECUTED!r}).touch()\nclass Evil: pass\n"
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "pty.spawn")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "urllib.Request", "http.client.connect")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link")


class NoAnswerError(BaseException):
    """The reader was interrupted: it would have gone on."""


class FailureError(AssertionError):
    """The reader failed; the message says how, and where."""


@dataclass
class Watch:
    """What happened while a reader was at work."""

    folders: tuple[Path, ...] = ()  # where it may read and write
    seen: list[str] = field(default_factory=list)
    on: bool = False

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event of the interpreter."""
        if not self.on:
            return
        if event in STARTS or event in CONNECTS or event == "pickle.find_class":
            self.note(f"{event} {args!r:.120}")
            raise PermissionError("not here")
        if event == "exec" and self._ours(getattr(args[0], "co_filename", "")):
            self.note(f"ran {args[0].co_filename}")
        elif event == "open" and not isinstance(args[0], int):
            self._opened(os.fsdecode(args[0]), args[1], args[2])
        elif event in ("os.listdir", "os.scandir") and args[0] is not None and not isinstance(args[0], int):
            self._opened(os.fsdecode(args[0]), "r", 0)
        elif event in WRITES:
            base = next((os.readlink(f"/proc/self/fd/{n}") for n in args if type(n) is int and n >= 0), "")
            paths = [os.path.join(base, os.fsdecode(a)) for a in args if isinstance(a, str | bytes | os.PathLike)]
            if not all(map(self._ours, paths)):
                self.note(f"{event} {args!r:.120}")

    def note(self, what: str) -> None:
        if len(self.seen) < 20:
            self.seen.append(what)

    def _ours(self, path: str) -> bool:
        real = Path(os.path.abspath(path))
        return any(real.is_relative_to(folder) for folder in self.folders)

    def _opened(self, path: str, mode: Any, flags: int) -> None:
        if self._ours(path) or path in DEVICES:
            return
        real = Path(os.path.abspath(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR) or any(letter in str(mode or "r") for letter in "wax+")
        if writes or not (any(real.is_relative_to(folder) for folder in READABLE) or str(real) in MODULES):
            self.note(f"{'wrote' if writes else 'opened'} {path[:120]!r}")


WATCH = Watch()
sys.addaudithook(WATCH.hear)  # it can never be taken off again, so there is one


@dataclass
class World:
    """A folder for a file and what belongs to it, and a folder outside with good files that nothing may open."""

    home: Path

    def __post_init__(self) -> None:
        self.home = self.home.resolve()
        self.inside, self.outside = self.home / "inside", self.home / "outside"
        for folder in (self.inside, self.outside):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "inside.py", "dataset.py"):
            (self.inside / name).write_text(PLANTED)
        self._kernel = _watched_by_the_kernel(self.outside)

    def close(self) -> None:
        if self._kernel is not None:
            os.close(self._kernel)
            self._kernel = None

    def opened_outside(self) -> bool:
        """Whether anything was opened in the folder outside since this was asked last, by whatever code."""
        if self._kernel is None:
            return False
        try:
            return bool(os.read(self._kernel, 65536))
        except BlockingIOError:
            return False


def _watched_by_the_kernel(folder: Path) -> int | None:
    """A descriptor on which Linux says that something in the folder was opened; None elsewhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except AttributeError:
        return None
    opened = 0x20  # IN_OPEN
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), opened) < 0:
        return None
    return descriptor


def judged(world: World, read: Callable[[], Any], cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether the reader took the file (else it refused it as it should); FailureError where it did neither, or more than that."""
    WATCH.folders, WATCH.seen = (world.inside,), []
    world.opened_outside()
    before_bytes = _start_of_peak()
    failure, taken = None, False
    try:
        with _in_time(cpu_s), _native_words() as words:
            WATCH.on = True
            read()
            taken = True
    except (PenstockError, click.ClickException) as error:
        failure = _wrong_line(error)
    except NoAnswerError as error:
        failure = f"no answer: {error} {_place(error)}"
    except SystemExit as error:
        failure = f"left the process: {error.code!r:.80} {_place(error)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        failure = f"{type(error).__name__} {_place(error)}: {str(error)[:160]!r}"
    finally:
        WATCH.on = False
    more_bytes = _peak() - before_bytes
    if WATCH.seen:
        failure = f"outside: {WATCH.seen[0]}"
    elif world.opened_outside():
        failure = "outside: native code opened a file beside the folder"
    elif (world.inside / EXECUTED).exists():
        (world.inside / EXECUTED).unlink()
        failure = "ran code that lies beside the file"
    elif failure is None and any("panicked at" in line or "Traceback (most" in line for line in words()):
        failure = f"several lines: {words()[0][:80]!r} to {words()[-1][:160]!r}"
    elif failure is None and more_bytes > memory_bytes:
        failure = f"memory: {more_bytes / 2**20:.0f} MiB"
    if failure is not None:
        raise FailureError(failure) from None
    return taken


def _wrong_line(error: Exception) -> str | None:
    """What is wrong with the one line that an error is; None if it is as it should be."""
    said = error.format_message() if isinstance(error, click.ClickException) else str(error)
    line = on_one_line(said)
    if not line.strip() or len(line) > LONGEST_LINE:
        return f"the line of {type(error).__name__} has {len(line)} characters {_place(error)}"
    if "Traceback (most" in said or 'File "' in said:
        return f"the line of {type(error).__name__} is a traceback {_place(error)}"
    return None


def _place(error: BaseException) -> str:
    """The last line of ours that an exception came through, and where it began: the same for the same fault."""
    frames = traceback.extract_tb(error.__traceback__)
    rooms = ("planner", "runtime", "hwprofiles", "penstock")
    ours = [f for f in frames if any(f"{os.sep}{room}{os.sep}" in f.filename for room in rooms)]
    ours = [f for f in ours if Path(f.filename).is_relative_to(ROOT)]
    near = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno} {ours[-1].name}" if ours else "nowhere of ours"
    last = f" < {Path(frames[-1].filename).name}:{frames[-1].name}" if frames and (not ours or frames[-1] is not ours[-1]) else ""
    return f"at {near}{last}"


@contextlib.contextmanager
def _in_time(cpu_s: float) -> Iterator[None]:
    """NoAnswerError inside after so much CPU time, or after a long wait. In the main thread."""

    def cpu(*_: object) -> None:
        raise NoAnswerError(f"more than {cpu_s:g} s of CPU")

    def wait(*_: object) -> None:
        raise NoAnswerError(f"waits for more than {cpu_s * WAIT_S / CPU_S:g} s")

    before = signal.signal(signal.SIGPROF, cpu), signal.signal(signal.SIGALRM, wait)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, cpu_s * WAIT_S / CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextlib.contextmanager
def _native_words() -> Iterator[Callable[[], list[str]]]:
    """Takes what is written to standard error, by whatever code, and gives it back as lines afterwards."""
    taken, kept = os.memfd_create("stderr"), os.dup(2)
    found: list[str] = []
    sys.stderr.flush()
    os.dup2(taken, 2)
    try:
        yield lambda: found
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        found += os.pread(taken, 2**16, 0).decode("utf-8", "replace").splitlines()
        os.close(taken)
        os.close(kept)


def _start_of_peak() -> int:
    """Begin to look for the highest memory of the process; returns what it holds now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Highest resident bytes of the process since `_start_of_peak`, or since it began where Linux does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
