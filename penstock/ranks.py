"""Ranks of a run: start them on this host, and join them into one run.

Every rank is this program, started by `torchrun` or by `penstock run`. Rank 0 assembles the run and leads it. The others read the
same plan and settings, compare them with rank 0's, and follow. An error of all ranks is printed by rank 0.
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
from penstock.runtime.errors import GoneError, PenstockError, PlanError, RanksError
from penstock.runtime.plan import Plan

from .run_config import RunRequest
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


def is_rank() -> bool:
    """True if this process was started as one of several ranks."""
    return n_started() > 1


def n_started() -> int:
    """Return the number of ranks that the launcher started."""
    return _number("WORLD_SIZE", 1)


def is_follower() -> bool:
    """True on ranks other than 0."""
    return is_rank() and _number("RANK", 0) > 0


def _number(name: str, default: int) -> int:
    """Return an environment variable of the launcher as a number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise PlanError(f"{name} is {text[:20]!r} in the environment, no number; start ranks with `penstock run` or torchrun")
    return int(text)


# -- start ---------------------------------------------------------------------------------------------------------------------


def refuse_several_hosts(plan: Plan) -> None:
    """Raise PlanError, with the torchrun command to use, for a plan with several hosts."""
    if (n_hosts := Profile.from_json(plan.profile).n_hosts) > 1:
        cmd = f"torchrun --nnodes {n_hosts} --nproc-per-node {plan.semantics.ranks // n_hosts} --rdzv-backend c10d --rdzv-endpoint"
        raise PlanError(f"the plan is for {n_hosts} hosts: start it on each of them, `{cmd} FIRST_HOST:29500 -m penstock run ...`")


def start(n: int, arguments: Sequence[str]) -> int:
    """Start `n` ranks on this host with the command's arguments. Return the exit code of rank 0 or of the first that failed.

    Ranks rendezvous in a store of this process, as under torchrun. Signals are sent to rank 0 alone, which ends the run after its
    step. Once a rank has failed, the others have GRACE_S to end by themselves. torchrun's launcher does neither: it exits with code
    1 on SIGTERM, kills a rank that takes 30 s to save, and sends SIGTERM to every rank, rank 0 too, when one has failed.
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
    del store  # the ranks need it until here
    if (killed := next((rank for rank, code in failed.items() if code < 0), None)) is not None:
        number = -failed[killed]
        print(f"error: rank {killed} was ended by {signal.Signals(number).name}; go on with --resume", file=sys.stderr)
        return 128 + number
    return failed.get(0) or next(iter(failed.values()), 0)


def _failed(ranks: "Sequence[subprocess.Popen[bytes]]") -> dict[int, int]:
    """Wait for all ranks, at most GRACE_S once one has failed. Return the exit codes of failed ranks, the first to fail first."""
    until_s, codes = math.inf, dict[int, int]()
    while True:
        codes |= {rank: code for rank, process in enumerate(ranks) if (code := process.poll())}
        if codes:
            until_s = min(until_s, time.monotonic() + GRACE_S)
        if time.monotonic() > until_s or all(process.returncode is not None for process in ranks):
            return codes
        time.sleep(LOOK_S)


# -- join ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def joined(request: RunRequest) -> "Iterator[Processes | None]":
    """Yield all ranks to rank 0, once they have checked that plan, settings and versions are equal, or None for a single rank. The
    other ranks follow until the end, and exit here."""
    if not is_rank():
        yield None
        return
    plan, n, size = request.file.plan, request.file.plan.semantics.ranks, _number("WORLD_SIZE", 1)
    n_here, local_rank = _number("LOCAL_WORLD_SIZE", size), _number("LOCAL_RANK", _number("RANK", 0))
    try:
        _assign_device_and_cores(request.settings.device)
        from penstock.runtime.machines.processes import connected_ranks  # imports torch, so only after a GPU is chosen
        from penstock.training.device import device_of
        from penstock.training.follower import follow

        device = device_of(request.settings.device)
        with connected_ranks(device, n_here, local_rank, Profile.from_json(plan.profile).meets_on_host) as ranks:
            # before any other check, as the others would wait for a rank that raises alone
            _compare(ranks, request.settings, plan)
            if size != n or device == "emulated":
                problem = f"the plan is for {n} GPUs, and {size} ranks were started"
                _refuse(PlanError(f"{problem}: plan with --gpus {size}, or start {n}"))
            if ranks.rank > 0:
                raise SystemExit(follow(request, device, ranks))
            yield ranks
    except (GoneError, RanksError):
        if is_follower():  # rank 0 prints the error
            raise SystemExit(1) from None
        raise
    finally:
        os.environ["WORLD_SIZE"] = "1"  # the other ranks have ended


def _assign_device_and_cores(asked_device: str) -> None:
    """Assign a GPU to this rank, before CUDA is initialized, and a share of the host's cores unless its cores are pinned.

    A rank launched by `start` gets SIGTERM when that process ends. PlanError: fewer GPUs than ranks.
    """
    if STARTED_HERE in os.environ:
        with suppress(AttributeError, OSError):  # Linux only
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGTERM))
    rank, n = _number("LOCAL_RANK", _number("RANK", 0)), _number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))
    if asked_device in ("auto", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n)))).split(",")
        if len(visible) < n and any(visible):
            _refuse(PlanError(f"CUDA_VISIBLE_DEVICES names {len(visible)} devices for {n} ranks; give one to each"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if any(visible) else ""
    cores = sorted(os.sched_getaffinity(0))
    if (len(cores) == os.cpu_count() or STARTED_HERE in os.environ) and len(cores) >= n:
        n_cores = len(cores) // n
        os.sched_setaffinity(0, cores[rank * n_cores : (rank + 1) * n_cores])


def _compare(ranks: "Processes", settings: RunSettings, plan: Plan) -> None:
    """Raise PlanError on all ranks if one differs from rank 0 in version, plan or settings."""
    texts = {
        "version": f"{version_in_words()}, torch {metadata.version('torch')}",
        "plan": str(plan),
        "settings": json.dumps(asdict(settings), sort_keys=True, default=str),
    }
    mine = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    first, *digests = ranks.gathered(mine)
    for rank, digest in enumerate(digests, start=1):
        for name in mine:
            if digest.get(name) != first.get(name):
                _refuse(PlanError(f"rank {rank} has another {name} than rank 0; start all ranks with the same command"))


def _refuse(error: PenstockError) -> NoReturn:
    """Raise an error that every rank finds. Rank 0 prints it."""
    raise GoneError(str(error)) if is_follower() else error
