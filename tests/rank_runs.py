"""Runs of several ranks: start them and read their outputs."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from penstock.checkpoint.checkpoint import latest
from penstock.runtime.machines.processes import meeting_place

from .forks import Forked
from .rank_law import ROOT
from .running import SCRATCH, penstock, plan_in

BATCH = ["--batch-size", 8, "--micro-batch", 1, "--sum-groups", 4]
COMMAND = [sys.executable, "-m", "penstock"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def planned(home, ranks):
    path = home / f"{ranks}.json"
    return path if path.exists() else plan_in(home, "--policy", "megatrain", *BATCH, "--gpus", ranks, name=path.name)


def words(home, plan, *extra, out="out", steps=4):
    run = ["run", plan, "--data", home / "data", "--out", home / out, "--steps", steps, "--lr", "1e-3", *SCRATCH, *extra]
    return [str(word) for word in run]


def run_to_end(arguments, is_forked=True):
    """Run a command to its end, forked, which saves the imports, or as a new process."""
    if is_forked:
        running = begun(arguments)
        output = running.communicate(timeout=120)
        return subprocess.CompletedProcess(running.args, running.returncode, *output)
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=120, check=False)


def begun(arguments):
    return Forked([*COMMAND, *arguments], cwd=ROOT, env=os.environ | QUIET, **PIPES)


def said_by(running):
    try:
        return running.communicate(timeout=60)[1]
    finally:
        running.kill()  # and its ranks


def command_with(*lines):
    """Return a command that executes these lines first, for example to fake a version, a GPU or a memory size."""
    return [sys.executable, "-c", "\n".join([*lines, "from penstock.cli.main import main", "main()"])]


def by_hand(arguments_of_ranks, folders=None, commands=None, **environment):
    """Start ranks with separate arguments, folders and commands; return ((stdout, stderr), exit code) of each rank. `environment`:
    variables with one value, or with a list of values by rank."""
    store, rendezvous = meeting_place(n := len(arguments_of_ranks))
    extra = [{name: value[rank] if isinstance(value, list) else value for name, value in environment.items()} for rank in range(n)]
    ranks = []
    for rank, arguments in enumerate(arguments_of_ranks):
        env = os.environ | QUIET | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | extra[rank]
        command = [*(commands[rank] if commands else COMMAND), *arguments]
        ranks.append(Forked(command, cwd=folders[rank] if folders else ROOT, env=env, **PIPES))
    try:
        return [(process.communicate(timeout=90), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        del store  # the rendezvous must live until here


def pid_of(running, rank):
    """Return the process id of a rank's process; the run starts them in order."""
    return int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[rank])


def step_of(out):
    folder = latest(out)
    return 0 if folder is None else int(folder.name.removeprefix("checkpoint-"))


def wait_for(condition, running, seconds=60, look_s=0.05):
    """Wait until `condition()` is true; fail if the run ends before."""
    until_s = time.monotonic() + seconds
    while not condition():
        if running.poll() is not None or time.monotonic() > until_s:
            running.kill()
            raise AssertionError(f"it never was: {running.communicate()}")
        time.sleep(look_s)


def contents(checkpoint):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(checkpoint.iterdir())}


def is_that_of_one(home, n, *looks):
    """True if the checkpoint after `n` steps has the bytes of a checkpoint by one process."""
    assert penstock(*words(home, planned(home, 1), *looks, out="alone", steps=n)).exit_code == 0
    return contents(home / "out" / f"checkpoint-{n}") == contents(home / "alone" / f"checkpoint-{n}")
