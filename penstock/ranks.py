"""How are the ranks of a run started, and how do they become one run?

Every rank is this program, started by `torchrun` or by `penstock run` itself. Rank 0 puts the run together as if it were alone and
leads it; the others read the same plan and settings, compare them with its own, and follow. What is wrong is said once, in a line.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from runtime.errors import PenstockError, PlanError, RanksError

from .version import version_in_words

if TYPE_CHECKING:
    from penstock.settings import RunSettings
    from runtime.machines.processes import Processes
    from runtime.plan import Plan

COMMAND = (sys.executable, "-m", "penstock")
STARTED_HERE = "PENSTOCK_STARTED_RANKS"  # set for ranks that `start` has started
MEETING_PORTS = range(20_000, 32_000)  # by default Linux takes ports of connections from above these
GRACE_S = 20.0  # that the others have to end once one has failed
LOOK_S = 0.2
_DEATH_SIGNAL = 1  # of prctl: which signal comes when whoever started this process ends


class GoneError(PenstockError):
    """A rank that follows ends because another has said why."""


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return _number("WORLD_SIZE", 1) > 1


def _number(name: str, default: int) -> int:
    """A variable that whoever starts ranks has set."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise PlanError(f"{name} is {text[:20]!r} in the environment, no number; start ranks with `penstock run` or torchrun")
    return int(text)


# -- starting them -------------------------------------------------------------------------------------------------------------


def refuse_several_hosts(plan: "Plan") -> None:
    """PlanError that says what starts a plan's ranks where they are to be on several hosts."""
    from hwprofiles.schema import Profile

    if (n_hosts := Profile.from_json(plan.profile).n_hosts) > 1:
        each = f"torchrun --nnodes {n_hosts} --nproc-per-node {plan.semantics.ranks // n_hosts} --rdzv-backend c10d --rdzv-endpoint"
        raise PlanError(f"the plan is for {n_hosts} hosts: start it on each of them, `{each} FIRST_HOST:29500 -m penstock run ...`")


def start(n: int, arguments: Sequence[str]) -> int:
    """Start so many ranks on this machine, each with the command's own arguments; the exit code of what they did together.

    A signal is passed on to rank 0, which ends the run as if it were alone. When one rank fails the others end too.
    """
    here = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "GROUP_"))}
    here |= {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        STARTED_HERE: "1",
    }
    ranks = list[subprocess.Popen[bytes]]()
    try:
        for rank in range(n):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = None if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen([*COMMAND, *arguments], env=here | own, stdout=out, start_new_session=True))
        with _signals_go_to(ranks[0]):
            return _watched(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port at which ranks can meet: nobody has it on any address, and as a rule no connection takes it before they come.
    RanksError if none is left."""
    for port in random.SystemRandom().sample(MEETING_PORTS, len(MEETING_PORTS)):  # where two programs seed alike, not the same
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise RanksError(f"every port from {MEETING_PORTS[0]} to {MEETING_PORTS[-1]} is in use; end other programs")


def _watched(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all; after the first failure, not for long. The exit code of what failed first, or of rank 0 if that failed too."""
    until_s, codes, killed = None, dict[int, int](), 0
    while len(codes) < len(ranks):
        left = [rank for rank in range(len(ranks)) if rank not in codes]
        codes |= {rank: code for rank in left if (code := ranks[rank].poll()) is not None}
        if until_s is None and any(codes.values()):
            until_s = time.monotonic() + GRACE_S
            if (gone := next((rank for rank, code in codes.items() if code < 0), None)) is not None:
                killed = -codes[gone]
                print(f"error: rank {gone} was ended by {signal.Signals(killed).name}; go on with --resume", file=sys.stderr)
        if until_s is not None and time.monotonic() > until_s:
            for process in ranks:
                process.kill()
        time.sleep(LOOK_S)
    if killed:
        return 128 + killed
    return max(codes[0], 0) or next((code for code in codes.values() if code > 0), 0)


@contextmanager
def _signals_go_to(leader: "subprocess.Popen[bytes]") -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            leader.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- being one -----------------------------------------------------------------------------------------------------------------


@contextmanager
def joined(settings: "RunSettings", plan: "Plan", device: str) -> "Iterator[Processes | None]":
    """All ranks of a run, where it has several: each on a device and cores of its own, with one plan and one set of settings."""
    n, here = plan.semantics.ranks, _number("WORLD_SIZE", 1)
    if here == 1 and (n == 1 or device == "emulated"):
        yield None
        return
    from hwprofiles.schema import Profile
    from runtime.machines.processes import met

    by_memory = Profile.from_json(plan.profile).meets_on_host
    with met(device, _number("LOCAL_WORLD_SIZE", here), _number("LOCAL_RANK", _number("RANK", 0)), by_memory) as ranks:
        _compare(ranks, settings, plan)  # before anything is refused that one of them alone may have: the others would wait for it
        if here != n or device == "emulated":
            _refuse(PlanError(f"the plan is for {n} GPUs, and {here} ranks were started: plan with --gpus {here}, or start {n}"))
        yield ranks


def take_own_part(asked_device: str) -> None:
    """A device that others do not see, before anybody looks for one; and a share of the cores, unless who started the ranks has
    given them theirs. PlanError where there are fewer devices than ranks. A rank that `start` has started is told to end when that
    ends."""
    if STARTED_HERE in os.environ:
        with contextlib.suppress(AttributeError, OSError):  # Linux has it
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


def _compare(ranks: "Processes", settings: "RunSettings", plan: "Plan") -> None:
    """PlanError that names what one rank has otherwise than rank 0; raised by all."""
    mine = {
        "version": f"{version_in_words()}, torch {metadata.version('torch')}",
        "plan": _digest(str(plan)),
        "settings": _digest(json.dumps(asdict(settings), sort_keys=True, default=str)),
    }
    first, *others = ranks.gathered(mine)
    for rank, said in enumerate(others, start=1):
        for what in mine:
            if said.get(what) != first.get(what):
                _refuse(PlanError(f"rank {rank} has another {what} than rank 0; start all ranks alike"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(error: PenstockError) -> NoReturn:
    """What all ranks find is said by the first."""
    raise error if int(os.environ.get("RANK", "0")) == 0 else GoneError(str(error))
