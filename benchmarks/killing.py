"""Kills of a run at chosen moments.

A process tells which step it is at; its folder shows what else it is doing. A kill waits for one of these and then a random while,
so that the short moments in which most can go wrong (a checkpoint that is half written, one that is half deleted) get their share.
"""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVALUATE_EVERY = 5  # steps
AIMS = {"anywhere": 0.4, "checkpoint": 0.3, "evaluation": 0.2, "retention": 0.1}  # what a kill waits for, and how often
LOOK_S = 0.0005  # between two looks at a run that is to be killed
MISSED = 0.8  # of a run's life: what was not seen until then will hardly be
STUCK_S = 300.0  # a process that takes longer hangs
PHASES = ("before a step was done", "in a step", "while a checkpoint was written", "in retention", "in evaluation")


@dataclass(slots=True)
class Process:
    """A run that has been started, and what it says meanwhile."""

    command: Sequence[str]
    started_s: float | None = None  # when it said which steps it is going to do
    first_step: int | None = None  # steps that were done before
    last_step: int = 0
    evaluated_from_s: float | None = None  # when it said the last step after which there is an evaluation
    said: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] = field(init=False)
    _listener: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            if (steps := re.match(r"steps: ([0-9]+) to [0-9]+,", line)) is not None:
                self.first_step = self.last_step = int(steps[1]) - 1
                self.started_s = time.monotonic()
            elif (step := re.match(r"step ([0-9]+)/", line)) is not None:
                self.last_step = int(step[1])
                if self.last_step % EVALUATE_EVERY == 0:
                    self.evaluated_from_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> bool:
        """Whether it was alive, and SIGKILL is what it died of."""
        if not self.is_alive:
            return False
        os.kill(self.process.pid, signal.SIGKILL)  # nobody has asked how it ended, so its number is still its own
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Its exit code, once it and all that it said is over."""
        code = self.process.wait(STUCK_S)
        self._listener.join(STUCK_S)
        return code


@dataclass(frozen=True, slots=True)
class Pace:
    """What takes how long in a run that nobody disturbs."""

    n_steps: int
    life_s: float  # from when it says which steps to its end
    written_s: float  # a checkpoint, from its first file to its name
    evaluated_s: float


@dataclass(frozen=True, slots=True)
class Aim:
    """When to kill: so long after what the aim waits for has been seen so often."""

    at: str
    times: int
    share: float  # of how long that lasts

    @staticmethod
    def drawn(rng: random.Random) -> "Aim":
        at = rng.choices(list(AIMS), list(AIMS.values()))[0]
        return Aim(at, rng.choice((1, 1, 2)), rng.random())

    def wait(self, process: Process, out: Path, pace: Pace) -> bool:
        """Return when it is time; False when the process ended before."""
        seen, last, due_s = 0, None, None
        began_s = time.monotonic()
        while process.is_alive:
            now_s = time.monotonic()
            assert now_s < began_s + STUCK_S, f"it hangs: {process.said[-3:]}"
            if due_s is None and process.started_s is not None:
                here = self._here(process, out)
                seen += here is not None and here != last
                last = here or last
                left_s = pace.life_s * (1 - (process.first_step or 0) / pace.n_steps)
                if self.at == "anywhere":
                    due_s = process.started_s + self.share * left_s
                elif now_s > process.started_s + MISSED * left_s:
                    due_s = now_s
                elif seen >= self.times:
                    due_s = now_s + self.share * {"checkpoint": pace.written_s, "evaluation": pace.evaluated_s}.get(self.at, 0.0)
            if due_s is not None and now_s >= due_s:
                return True
            time.sleep(LOOK_S)
        return False

    def _here(self, process: Process, out: Path) -> object:
        """What is seen now of what is waited for."""
        match self.at:
            case "evaluation":
                return process.evaluated_from_s
            case "checkpoint" | "retention":
                suffix = ".partial" if self.at == "checkpoint" else ".removed"
                return next((name for name in _names(out) if name.endswith(suffix) and name.startswith("checkpoint-")), None)
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a line that was being written when the run was killed is none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError):
            if line.endswith("\n") and isinstance(fields := json.loads(line), dict):
                found.append(fields)
    return found


def phases(out: Path, process: Process) -> list[str]:
    """What a run was about when it was killed, as its folder shows; it may be several things at once."""
    names, evaluated = _names(out), [said for said in lines(out / "metrics.jsonl") if "eval_loss" in said]
    found = []
    if any(name.startswith("checkpoint-") and name.endswith(".partial") for name in names):
        found.append(PHASES[2])
    if any(name.endswith(".removed") for name in names):
        found.append(PHASES[3])
    step = process.last_step
    if step > (process.first_step or 0) and step % EVALUATE_EVERY == 0 and not any(said["step"] == step for said in evaluated):
        found.append(PHASES[4])
    return found or [PHASES[process.last_step > (process.first_step or 0)]]
