"""Kills of a run at chosen moments.

A process prints its step; its folder shows background activity. A kill waits for one of these events and then for a random time, so
that short critical phases (a partial checkpoint, a partial deletion) are hit often enough.
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
AIMS = {"anywhere": 0.4, "checkpoint": 0.3, "evaluation": 0.2, "retention": 0.1}  # event that a kill waits for -> probability
LOOK_S = 0.0005  # polling interval of a run to be killed
MISSED = 0.8  # share of a run's life after which an event is not expected any more
STUCK_S = 300.0  # a process that takes longer hangs
PHASES = ("before a step was done", "in a step", "while a checkpoint was written", "in retention", "in evaluation")


@dataclass(slots=True)
class Process:
    """A started run, and its output so far."""

    command: Sequence[str]
    started_s: float | None = None  # when the range of steps was printed
    first_step: int | None = None  # steps done before
    last_step: int = 0
    evaluated_from_s: float | None = None  # when a step with a following evaluation was printed
    lines: list[str] = field(default_factory=list)
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
            self.lines.append(line.rstrip("\n"))
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
        """Kill the process. Return True if it was alive and died of SIGKILL."""
        if not self.is_alive:
            return False
        os.kill(self.process.pid, signal.SIGKILL)  # not reaped yet, so its number is not reused
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Wait for the process and its output. Return the exit code."""
        code = self.process.wait(STUCK_S)
        self._listener.join(STUCK_S)
        return code


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations in an undisturbed run."""

    n_steps: int
    life_s: float  # from the first line with steps to the exit
    written_s: float  # a checkpoint, from first file to final name
    evaluated_s: float


@dataclass(frozen=True, slots=True)
class Aim:
    """When to kill: after the event has occurred `times` times, plus `share` of its duration."""

    event: str
    times: int
    share: float  # of the event's duration

    @staticmethod
    def sampled(rng: random.Random) -> "Aim":
        event = rng.choices(list(AIMS), list(AIMS.values()))[0]
        return Aim(event, rng.choice((1, 1, 2)), rng.random())

    def wait(self, process: Process, out: Path, pace: Pace) -> bool:
        """Wait for the moment. Return False if the process ended before."""
        n_seen, last, due_s = 0, None, None
        began_s = time.monotonic()
        while process.is_alive:
            now_s = time.monotonic()
            assert now_s < began_s + STUCK_S, f"it hangs: {process.lines[-3:]}"
            if due_s is None and process.started_s is not None:
                current = self._current(process, out)
                n_seen += current is not None and current != last
                last = current or last
                left_s = pace.life_s * (1 - (process.first_step or 0) / pace.n_steps)
                if self.event == "anywhere":
                    due_s = process.started_s + self.share * left_s
                elif now_s > process.started_s + MISSED * left_s:
                    due_s = now_s
                elif n_seen >= self.times:
                    due_s = now_s + self.share * {"checkpoint": pace.written_s, "evaluation": pace.evaluated_s}.get(self.event, 0.0)
            if due_s is not None and now_s >= due_s:
                return True
            time.sleep(LOOK_S)
        return False

    def _current(self, process: Process, out: Path) -> object:
        """Return the current event of the aimed kind."""
        match self.event:
            case "evaluation":
                return process.evaluated_from_s
            case "checkpoint" | "retention":
                suffix = ".partial" if self.event == "checkpoint" else ".removed"
                return next((name for name in _names(out) if name.endswith(suffix) and name.startswith("checkpoint-")), None)
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, without a truncated last line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError):
            if line.endswith("\n") and isinstance(fields := json.loads(line), dict):
                rows.append(fields)
    return rows


def phases(out: Path, process: Process) -> list[str]:
    """Return the activities of a run when it was killed, from its folder. Several are possible."""
    names, evaluated = _names(out), [row for row in lines(out / "metrics.jsonl") if "eval_loss" in row]
    active = []
    if any(name.startswith("checkpoint-") and name.endswith(".partial") for name in names):
        active.append(PHASES[2])
    if any(name.endswith(".removed") for name in names):
        active.append(PHASES[3])
    step = process.last_step
    if step > (process.first_step or 0) and step % EVALUATE_EVERY == 0 and not any(row["step"] == step for row in evaluated):
        active.append(PHASES[4])
    return active or [PHASES[process.last_step > (process.first_step or 0)]]
