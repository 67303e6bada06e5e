"""Python processes forked from a server that has imported the modules of a run and computed nothing.

A new Python process spends eight seconds of a core on these imports. A fork has a working directory, an environment and streams of
its own, and can be signalled and waited for. Other tests start commands as new processes.
"""

import gc
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
    *("numba.np.arraymath", "numba.np.linalg", "numba.typed.dictimpl", "scipy.io", "penstock.planner.show.facts"),
)
_POPEN = subprocess.Popen
_ONE = threading.RLock()  # starting a process makes multiprocessing poll all others, while another thread may poll its own


class Forked:
    """Subset of `subprocess.Popen` for commands `python -m ...` and `python -c ...`.

    `how`: "fork" forks this process, which must not have computed anything; "forkserver" forks the server.
    """

    def __init__(self, command, cwd=None, env=None, stdout=None, stderr=None, text=True, start_new_session=False, how="forkserver"):
        self.args, self.returncode = command, None
        (self.stdout, out), (self.stderr, errors) = _pipe(stdout, 1), _pipe(stderr, 2)
        env = dict(os.environ if env is None else env)
        args = command[1:], str(cwd or os.getcwd()), env, out, errors, start_new_session, how
        self._process = _context(how).Process(target=_become, args=args)
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
        """Return the text of stdout and stderr after the process ended; `input` is ignored."""
        with ThreadPoolExecutor() as pool:
            texts = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # otherwise its pipes remain open
                raise
        return [text.result() if text else None for text in texts]

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
    """`subprocess.Popen` inside a fork: `python -m ...` becomes a forked child, other programs are started normally."""

    def __new__(cls, command, *args, **how):
        is_python = [*command[:2]] == [sys.executable, "-m"]
        return super().__new__(cls) if is_python else _POPEN(command, *args, **how)

    def __init__(self, command, **how):
        super().__init__(command, how="fork", **how)

    def __class_getitem__(cls, _):
        return cls


def is_alive(pid):
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pipe(stream, number):
    """Return the read end of a stream, or None, and its write end for the process."""
    read = None
    match stream:
        case None:
            write = os.dup(number)
        case subprocess.PIPE:
            read, write = os.pipe()
            read = os.fdopen(read)
        case subprocess.DEVNULL:
            write = os.open(os.devnull, os.O_WRONLY)
        case file:
            write = os.dup(file.fileno())
    return read, Connection(write, readable=False)  # can be pickled to the server


@cache
def _context(how):
    context = get_context(how)
    if how == "forkserver":
        context.set_forkserver_preload([*IMPORTED])
    return context


def _become(words, folder, environment, out, errors, is_apart, how):
    code = 1
    gc.freeze()  # a collection would touch, and so copy, every object of the server
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)
        if how == "fork":
            os.closerange(3, 2**16)  # file descriptors of the parent, which a new process would not have
        if is_apart:
            os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        subprocess.Popen = Again
        option, target, *sys.argv[1:] = words
        if option == "-m":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            exec(target, {"__name__": "__main__"})
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
