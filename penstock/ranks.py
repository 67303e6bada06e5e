"""The ranks of a run: started on this host, and joined into one run.

Every rank is this program, started by `torchrun` or by `penstock run`. Rank 0 puts the run together as if it were alone and leads
it; the others read the same plan and settings, compare them with rank 0's, and follow. An error of all ranks is printed by rank 0.
"""

import ctypes
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

from penstock.hwprofiles.schema import Profile
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import Plan

from .settings import RunSettings
from .signals import handled
from .version import version_in_words

if TYPE_CHECKING:
    from penstock.runtime.machines.processes import Processes

COMMAND = (sys.executable, "-m", "penstock")
STARTED_HERE = "PENSTOCK_STARTED_RANKS"  # set for ranks that `start` has started
GRACE_S = 20.0  # for the other ranks to end by themselves once one has failed
LOOK_S = 0.2
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl: the signal to this process when its parent ends


class GoneError(PenstockError):
    """The end of a following rank for an error that rank 0 prints."""


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return _number("WORLD_SIZE", 1) > 1


def _number(name: str, default: int) -> int:
    """An environment variable of the launcher."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise PlanError(f"{name} is {text[:20]!r} in the environment, no number; start ranks with `penstock run` or torchrun")
    return int(text)


# -- starting them -------------------------------------------------------------------------------------------------------------


def refuse_several_hosts(plan: Plan) -> None:
    """PlanError with the torchrun command that starts a plan's ranks on several hosts."""
    if (n_hosts := Profile.from_json(plan.profile).n_hosts) > 1:
        each = f"torchrun --nnodes {n_hosts} --nproc-per-node {plan.semantics.ranks // n_hosts} --rdzv-backend c10d --rdzv-endpoint"
        raise PlanError(f"the plan is for {n_hosts} hosts: start it on each of them, `{each} FIRST_HOST:29500 -m penstock run ...`")


def start(n: int, arguments: Sequence[str]) -> int:
    """Start `n` ranks on this host, each with the command's own arguments; the exit code of the first to fail, or rank 0's.

    They meet in a store of this process, as torchrun's ranks do. Signals go to rank 0 alone, which ends the run after its step; and
    once a rank has failed, the others have GRACE_S to end by themselves. Torchrun's launcher keeps neither promise: it answers
    SIGTERM with code 1, kills a rank that takes 30 s to save, and sends SIGTERM to all, rank 0 too, as soon as one has failed.
    """
    from penstock.runtime.machines.processes import meeting_place

    store, environment = meeting_place(n)
    environment = os.environ | environment | {STARTED_HERE: "1"}
    ranks = [
        subprocess.Popen(
            [*COMMAND, *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(n)
    ]
    try:
        with handled(lambda number, _: ranks[0].send_signal(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            failed = _failed(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    del store  # until here: ranks lose each other without it
    if (killed := next((rank for rank, code in failed.items() if code < 0), None)) is not None:
        number = -failed[killed]
        print(f"error: rank {killed} was ended by {signal.Signals(number).name}; go on with --resume", file=sys.stderr)
        return 128 + number
    return failed.get(0) or next(iter(failed.values()), 0)


def _failed(ranks: "Sequence[subprocess.Popen[bytes]]") -> dict[int, int]:
    """Wait for all ranks, not for long once one has failed: the exit codes of those that failed, the first to fail first."""
    until_s, codes = math.inf, dict[int, int]()
    while True:
        codes |= {rank: code for rank, process in enumerate(ranks) if (code := process.poll())}
        if codes:
            until_s = min(until_s, time.monotonic() + GRACE_S)
        if time.monotonic() > until_s or all(process.returncode is not None for process in ranks):
            return codes
        time.sleep(LOOK_S)


# -- being one -----------------------------------------------------------------------------------------------------------------


@contextmanager
def joined(settings: RunSettings, plan: Plan, device: str) -> "Iterator[Processes | None]":
    """All ranks of a run that has several, once they have found that they have the same plan, settings and versions."""
    n, here = plan.semantics.ranks, _number("WORLD_SIZE", 1)
    if here == 1 and (n == 1 or device == "emulated"):
        yield None
        return
    from penstock.runtime.machines.processes import connected_ranks

    by_memory = Profile.from_json(plan.profile).meets_on_host
    with connected_ranks(device, _number("LOCAL_WORLD_SIZE", here), _number("LOCAL_RANK", _number("RANK", 0)), by_memory) as ranks:
        _compare(ranks, settings, plan)  # before one rank alone refuses something: the others would wait for it
        if here != n or device == "emulated":
            _refuse(PlanError(f"the plan is for {n} GPUs, and {here} ranks were started: plan with --gpus {here}, or start {n}"))
        yield ranks


def take_own_part(asked_device: str) -> None:
    """Give this rank a GPU of its own, before CUDA is initialized, and a share of the host's cores, unless its cores are pinned.

    A rank that `start` has started gets SIGTERM when that process ends. PlanError: fewer GPUs than ranks.
    """
    if STARTED_HERE in os.environ:
        with suppress(AttributeError, OSError):  # Linux has it
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGTERM))
    rank, n = _number("LOCAL_RANK", _number("RANK", 0)), _number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))
    if asked_device in ("auto", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n)))).split(",")
        if len(visible) < n and any(visible):
            _refuse(PlanError(f"CUDA_VISIBLE_DEVICES names {len(visible)} devices, and there are {n} ranks; give each of them one"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if any(visible) else ""
    cores = sorted(os.sched_getaffinity(0))
    if (len(cores) == os.cpu_count() or STARTED_HERE in os.environ) and len(cores) >= n:
        each = len(cores) // n
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def _compare(ranks: "Processes", settings: RunSettings, plan: Plan) -> None:
    """PlanError, on all ranks, that names what differs on one rank from rank 0."""
    texts = {
        "version": f"{version_in_words()}, torch {metadata.version('torch')}",
        "plan": str(plan),
        "settings": json.dumps(asdict(settings), sort_keys=True, default=str),
    }
    mine = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}
    first, *others = ranks.gathered(mine)
    for rank, said in enumerate(others, start=1):
        for what in mine:
            if said.get(what) != first.get(what):
                _refuse(PlanError(f"rank {rank} has another {what} than rank 0; start all ranks alike"))


def _refuse(error: PenstockError) -> NoReturn:
    """Raise on every rank an error that all find, which rank 0 prints."""
    raise error if int(os.environ.get("RANK", "0")) == 0 else GoneError(str(error))
