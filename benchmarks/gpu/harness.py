"""Isolation of a stage: process, time limit, result file.

A stage is a separate process in a separate process group, with a time limit. Its notes are in the stream at once, and its outcome
is a line of the same stream, so that a later call knows the remaining stages. Failed and interrupted stages are retried.

Two folders. `results` is small, because machines return only few files: the stream, the log of the current stage, the profile, and
an archive of these, of earlier logs and of the plans, rewritten after every stage. `home` holds expendable files.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .stages import PAGE, ROOT, Stage

STREAM = "results.jsonl"
ARCHIVE = "results.tar.gz"
KEPT_FILES = (STREAM, "profile.json", "page.md")  # results that a later call or a reader needs
FINISHED, FAILED, SKIPPED, INTERRUPTED, NOT_BEGUN = "done", "failed", "skipped", "interrupted", "not begun"
SKIPPED_CODE = 75  # exit code of a skipped stage
LEAST_SHARE = 0.5  # of a stage's limit: required remaining time
RESERVE_S = 15.0  # of a call, for the page and the archive
REAPED_S = 20.0  # a process that has locked a hundred gigabytes ends slowly
SAID_CHARS = 300
LOG_BYTES = 2**21  # kept end of a stage's log
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """Raised by a signal to end this process."""


class Results:
    """The result stream: one line of JSON per result."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / STREAM

    def note(self, stage: str, line: str, /, **values: object) -> None:
        """Append a line in one write and sync it, because the process may be killed at any moment."""
        row = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "stage": stage, "what": line, **values}
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(row, default=str) + "\n").encode())
            os.fsync(file)
        finally:
            os.close(file)

    def rows(self) -> list[dict[str, Any]]:
        """Return all complete lines."""
        rows = []
        with suppress(FileNotFoundError):
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def outcomes(self) -> dict[str, str]:
        """Return the last outcome of each stage."""
        return {row["stage"]: row["outcome"] for row in self.rows() if row.get("what") == "ended"}


def go_on(home: Path, results: Path) -> Results:
    """Return the stream of earlier calls. An empty `results` folder is filled from `home`."""
    stream, earlier = Results(results), home / "results"
    if not stream.path.exists() and earlier != results:
        for name in KEPT_FILES:
            if (earlier / name).exists():
                shutil.copy(earlier / name, results / name)
    return stream


class Harness:
    """Runs stages in sequence. `command(stage, limit_s)` returns the command line of a stage, `environment` its variables."""

    def __init__(
        self,
        home: Path,
        stream: Results,
        command: Callable[[Stage, float], Sequence[str]],
        environment: Callable[[Stage], dict[str, str]],
    ) -> None:
        self.home, self.stream, self.command, self.environment = home, stream, command, environment
        self.logs = home / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def perform_all(self, stages: Sequence[Stage], limit_s: float) -> dict[str, str]:
        """Run stages, except finished ones. Return their outcomes by name."""
        ends_s = time.monotonic() + limit_s
        earlier, outcomes = self.stream.outcomes(), {}
        with _ended_by_signals():
            try:
                for stage in stages:
                    if earlier.get(stage.name) == FINISHED:
                        outcomes[stage.name] = FINISHED
                        say(f"{stage.name}: done before")
                        continue
                    left_s = ends_s - time.monotonic() - RESERVE_S
                    outcomes[stage.name] = self._begin(stage, min(stage.limit_s, left_s))
                    self.archive()
                self.perform(PAGE, PAGE.limit_s)
            finally:
                self.archive()
        return outcomes

    def _begin(self, stage: Stage, limit_s: float) -> str:
        if limit_s >= LEAST_SHARE * stage.limit_s:
            return self.perform(stage, limit_s)
        words = f"{max(limit_s, 0):.0f} s are left, and it may take {stage.limit_s:.0f}; call again with the same --home"
        self.stream.note(stage.name, NOT_BEGUN, said=words)
        say(f"{stage.name}: not begun: {words}")
        return NOT_BEGUN

    def perform(self, stage: Stage, limit_s: float) -> str:
        """Run one stage. Return its outcome, which is also written to the stream."""
        self.stream.note(stage.name, "began", limit_s=round(limit_s, 1))
        log, began_s = self.stream.folder / f"{stage.name}.log", time.monotonic()
        outcome, message = INTERRUPTED, "this process was told to end"
        try:
            outcome, message = self._run(stage, limit_s, log)
        except OSError as error:  # the process could not be started
            outcome, message = FAILED, str(error)
        finally:
            seconds = time.monotonic() - began_s
            self.stream.note(stage.name, "ended", outcome=outcome, said=message, seconds=round(seconds, 2))
            say(f"{stage.name}: {outcome} after {seconds:.0f} s{': ' + message if message else ''}")
            self._put_away(log, self.logs / log.name)
        return outcome

    def _run(self, stage: Stage, limit_s: float, log: Path) -> tuple[str, str]:
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.command(stage, limit_s), cwd=ROOT, env=self.environment(stage), stdout=out, stderr=out, start_new_session=True
            )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return FAILED, f"over its limit of {limit_s:.0f} s, and killed; see the end of its log"
        finally:
            _end(process)
        if code == 0:
            return FINISHED, ""
        if code == SKIPPED_CODE:
            return SKIPPED, last_line(log)
        if code < 0:
            died = f"killed by signal {-code}" + (", perhaps as the host's memory ran out" if -code == signal.SIGKILL else "")
            return FAILED, f"{died}; the last line: {last_line(log)}"
        return FAILED, last_line(log)

    def _put_away(self, log: Path, target: Path) -> None:
        """Append a log to the log of earlier calls, outside the results."""
        with suppress(OSError):
            text = (target.read_bytes() if target.exists() else b"") + log.read_bytes()
            target.write_bytes(text[-LOG_BYTES:])
            log.unlink()

    def archive(self) -> None:
        """Write the archive atomically."""
        path, half = self.stream.folder / ARCHIVE, self.stream.folder / f".{ARCHIVE}"
        try:
            with tarfile.open(half, "w:gz") as tar:
                for name in KEPT_FILES:
                    if (self.stream.folder / name).exists():
                        tar.add(self.stream.folder / name, name)
                for folder in (self.logs, self.home / "plans"):
                    if folder.is_dir():
                        tar.add(folder, folder.name)
            half.replace(path)
        except OSError as error:
            say(f"the archive could not be written: {error}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, because a stage starts other processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REAPED_S)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn termination signals into an exception, so that results are archived first."""

    def end(number: int, frame: object) -> None:
        raise Ended(128 + number)

    handlers = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:SAID_CHARS] if lines else "it said nothing"


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
