"""Isolation of a stage: process, time limit, result file.

In a process of its own, in a process group of its own, with a limit. What it notes is in the stream at once; how it ended is a line
of the same stream, so a later call knows what is left to do. One that failed, or was cut short, is tried again.

Two folders. `results` holds little, as machines give back only few files: the stream, the log of the stage in progress, the
profile, and an archive of all that, of earlier logs and of the plans, written anew after every stage. `home` holds what can be
lost.
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
KEPT = (STREAM, "profile.json", "page.md")  # of the results, what a later call needs or a reader wants
DONE, FAILED, SKIPPED, INTERRUPTED, NOT_BEGUN = "done", "failed", "skipped", "interrupted", "not begun"
SKIPPED_CODE = 75  # of a process that had nothing to measure
LEAST_SHARE = 0.5  # of a stage's limit: with less time left it is not begun
RESERVE_S = 15.0  # of a call, for the page and the archive
REAPED_S = 20.0  # a process that has locked a hundred gigabytes takes its time to end
SAID_CHARS = 300
LOG_BYTES = 2**21  # of a stage's log that are kept: its end
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """Somebody wants this process to end."""


class Results:
    """The stream: a line of JSON for each thing learned."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / STREAM

    def note(self, stage: str, what: str, /, **values: object) -> None:
        """In one write to the file's end, and on the disk when this returns: the next moment may be the last."""
        row = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "stage": stage, "what": what, **values}
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(row, default=str) + "\n").encode())
            os.fsync(file)
        finally:
            os.close(file)

    def rows(self) -> list[dict[str, Any]]:
        """All lines; one that was cut short is none."""
        rows = []
        with suppress(FileNotFoundError):
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def outcomes(self) -> dict[str, str]:
        """How each stage ended the last time."""
        return {row["stage"]: row["outcome"] for row in self.rows() if row.get("what") == "ended"}


def go_on(home: Path, results: Path) -> Results:
    """The stream of earlier calls, continued: where `results` is empty, the one that was carried with `home`."""
    stream, earlier = Results(results), home / "results"
    if not stream.path.exists() and earlier != results:
        for name in KEPT:
            if (earlier / name).exists():
                shutil.copy(earlier / name, results / name)
    return stream


class Harness:
    """Performs stages one after another. `command` says how a stage is started that has these seconds, `environment` in what."""

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
        """The outcome of each stage, by name. Those that were done before are not repeated."""
        ends_s = time.monotonic() + limit_s
        before, outcomes = self.stream.outcomes(), {}
        with _ended_by_signals():
            try:
                for stage in stages:
                    if before.get(stage.name) == DONE:
                        outcomes[stage.name] = DONE
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
        """One stage; its outcome, which is in the stream too."""
        self.stream.note(stage.name, "began", limit_s=round(limit_s, 1))
        log, began_s = self.stream.folder / f"{stage.name}.log", time.monotonic()
        outcome, said = INTERRUPTED, "this process was told to end"
        try:
            outcome, said = self._run(stage, limit_s, log)
        except OSError as error:  # the process could not be made
            outcome, said = FAILED, str(error)
        finally:
            seconds = time.monotonic() - began_s
            self.stream.note(stage.name, "ended", outcome=outcome, said=said, seconds=round(seconds, 2))
            say(f"{stage.name}: {outcome} after {seconds:.0f} s{': ' + said if said else ''}")
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
            return FAILED, f"over its limit of {limit_s:.0f} s, and killed; the log says where it was"
        finally:
            _end(process)
        if code == 0:
            return DONE, ""
        if code == SKIPPED_CODE:
            return SKIPPED, last_line(log)
        if code < 0:
            died = f"killed by signal {-code}" + (", perhaps as the host's memory ran out" if -code == signal.SIGKILL else "")
            return FAILED, f"{died}; the last line: {last_line(log)}"
        return FAILED, last_line(log)

    def _put_away(self, log: Path, to: Path) -> None:
        """Move a log out of the results, behind what earlier calls left."""
        with suppress(OSError):
            text = (to.read_bytes() if to.exists() else b"") + log.read_bytes()
            to.write_bytes(text[-LOG_BYTES:])
            log.unlink()

    def archive(self) -> None:
        """Everything in one file, whole or as it was before."""
        path, half = self.stream.folder / ARCHIVE, self.stream.folder / f".{ARCHIVE}"
        try:
            with tarfile.open(half, "w:gz") as tar:
                for name in KEPT:
                    if (self.stream.folder / name).exists():
                        tar.add(self.stream.folder / name, name)
                for folder in (self.logs, self.home / "plans"):
                    if folder.is_dir():
                        tar.add(folder, folder.name)
            half.replace(path)
        except OSError as error:
            say(f"the archive could not be written: {error}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """No process of its group is left: a stage starts others."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REAPED_S)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that would end this process raises instead, so that what is known is archived first."""

    def end(number: int, frame: object) -> None:
        raise Ended(128 + number)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:SAID_CHARS] if lines else "it said nothing"


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
