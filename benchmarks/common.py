"""Shared code of the scripts: the line with commit and machine of a page, medians with a range, and commands in other processes."""

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median

TAIL = 0.9  # share of values that one end of P10 to P90 holds
# Runs a command of the project, and prints its peak memory (not that of the process which started it) and its CPU seconds
CHILD = """
import resource, penstock.cli.main
try: penstock.cli.main.main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    [peak_kib] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak_kib, used.ru_utime + used.ru_stime)
"""


def without_arguments(doc: str | None) -> None:
    """Accept `--help` alone."""
    argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def provenance() -> str:
    """Return commit, processor and versions."""
    from penstock.hwprofiles.probe.cpu import cpu_name

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    versions = f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    return f"commit {commit}; {cpu_name()}, {os.cpu_count()} cores, {versions}"


def middle_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, P10 and P90."""
    ordered = sorted(values)
    return median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def conformal_factor(ratios: Iterable[float]) -> float:
    """Return the factor, at least 1, for one end of an interval. `ratios`: values over that end; the factor is the ratio of rank
    0.9 (n + 1), or the largest of fewer than nine (conformalized quantile regression, one tail of 10 %)."""
    ordered = sorted(ratios) or [1.0]
    return max(1.0, ordered[min(len(ordered), math.ceil(TAIL * (len(ordered) + 1))) - 1])


def command(*words: object) -> list[str]:
    """Return the command line of a `penstock` command."""
    return [sys.executable, "-m", "penstock", *map(str, words)]


def penstock_command(*words: object) -> None:
    """Run a `penstock` command, which must succeed."""
    subprocess.run(command(*words), check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Took:
    """Time, memory and output of a command."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: str


def took(*words: object) -> Took:
    """Run a `penstock` command in a fresh process, start-up included. The output of a failed one is its error."""
    start_s = time.perf_counter()
    process = subprocess.run([sys.executable, "-c", CHILD, *map(str, words)], capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - start_s
    *lines, last = process.stdout.splitlines() or ["0 0"]
    peak_kib, cpu_s = last.split()
    return Took(wall_s, float(cpu_s), int(peak_kib) * 1024, "\n".join(lines) if process.returncode == 0 else process.stderr)
