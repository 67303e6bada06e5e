"""Python processes that need not import what runs do: forked from one that has, and that has computed nothing.

Python started anew imports for eight seconds of a core before a run begins. A fork is a process as any other: it has a folder, an
environment and streams of its own, is stopped, killed and waited for. Tests of a command that is started anew are there as well.
"""

import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

IMPORTED = (
    *("penstock.cli.plan", "penstock.cli.run", "penstock.cli.progress", "penstock.training.session", "penstock.training.follower"),
    *("datasets", "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen2.modeling_qwen2", "tests.training"),
)
_POPEN = subprocess.Popen
_ONE = threading.RLock()  # multiprocessing looks after every process whenever one is started, and a thread of ours after its own


class Forked:
    """`subprocess.Popen`, as far as tests ask for it, of a command that is Python's: `python -m ...`, or `python -c ...`.

    `how`: "fork" makes a child of this process, which must have computed nothing.
    """

    def __init__(self, command, cwd=None, env=None, stdout=None, stderr=None, text=True, start_new_session=False, how="forkserver"):
        self.args, self.returncode = command, None
        (self.stdout, out), (self.stderr, errors) = _pipe(stdout, 1), _pipe(stderr, 2)
        given = command[1:], str(cwd or os.getcwd()), dict(os.environ if env is None else env), out, errors, start_new_session, how
        self._process = _context(how).Process(target=_become, args=given)
        with _ONE:
            self._process.start()
        self.pid = self._process.pid
        out.close()
        errors.close()

    def poll(self):
        with _ONE:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout=None):
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, input=None, timeout=None):
        """What it said on pipes, until it ended; none reads an input."""
        with ThreadPoolExecutor() as pool:
            said = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # else its pipes are read for ever
                raise
        return [text.result() if text else None for text in said]

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


class Again(Forked):
    """`subprocess.Popen` in a fork: `python -m ...` is forked again, as its child, and other programs are started."""

    def __new__(cls, command, *given, **how):
        is_python = [*command[:2]] == [sys.executable, "-m"]
        return super().__new__(cls) if is_python else _POPEN(command, *given, **how)

    def __init__(self, command, **how):
        super().__init__(command, how="fork", **how)

    def __class_getitem__(cls, _):
        return cls


def is_alive(pid):
    """Whether a process, of whoever it is, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pipe(of, number):
    """What is read of a stream here, if it is, and where the process writes it."""
    read = None
    match of:
        case None:
            write = os.dup(number)
        case subprocess.PIPE:
            read, write = os.pipe()
            read = os.fdopen(read)
        case subprocess.DEVNULL:
            write = os.open(os.devnull, os.O_WRONLY)
        case file:
            write = os.dup(file.fileno())
    return read, Connection(write, readable=False)  # which can be sent


@cache
def _context(how):
    context = get_context(how)
    if how == "forkserver":
        context.set_forkserver_preload([*IMPORTED])
    return context


def _become(words, folder, environment, out, errors, is_apart, how):
    """What a fork does: the command of these words, to its end."""
    code = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)
        if how == "fork":
            os.closerange(3, 2**16)  # of its parent's: as when Python is started anew
        if is_apart:
            os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        subprocess.Popen = Again
        option, what, *sys.argv[1:] = words
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
