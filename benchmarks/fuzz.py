"""Fuzzing of every file reader.

`python -m benchmarks.fuzz --minutes 5` from the root of the repository: each format of `tests/fuzz_formats*.py` for so long, in a
process of its own with a limit of memory, and prints a page in markdown. Inputs are led by coverage where atheris is installed (it
is asked for only here), and drawn at random where it is not. `--only "plan (JSON)"` takes one; what failed lies in `--out`.
"""

import argparse
import faulthandler
import hashlib
import json
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from random import Random
from typing import Any

ADDRESS_SPACE_BYTES = 8 * 2**30  # beyond what the process has mapped before: a request above it fails instead of filling memory
STUCK_S = 200  # native code that does not come back is ended after so long: longer than any limit that Python keeps
LONGEST_BYTES = 2**20
LEAST_S, MOST_PROCESSES = 5, 20  # of a format
N_PLANTED = 3000  # inputs at most, to find a fault that was planted


@dataclass
class Tally:
    """What became of the inputs of one format."""

    name: str
    n_inputs: int = 0
    n_taken: int = 0
    n_failures: int = 0
    seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)  # what failed, and the file that showed it first

    def add(self, path: Path, seconds: float) -> None:
        """What a process has counted; `seconds` where it counted nothing."""
        found = Tally(**json.loads(path.read_text())) if path.exists() else Tally(self.name, seconds=seconds)
        self.n_inputs += found.n_inputs
        self.n_taken += found.n_taken
        self.n_failures += found.n_failures
        self.seconds += found.seconds
        self.failures |= found.failures

    def write(self, path: Path) -> None:
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        path.with_suffix(".new").replace(path)


class Fuzzer:
    """One format in this process."""

    def __init__(self, name: str, out: Path) -> None:
        from tests import fuzz_formats, fuzz_formats_run
        from tests.fuzz_judge import World

        self.of = (fuzz_formats.FORMATS | fuzz_formats_run.FORMATS)[name]
        self.out, self.tally, self.began_s, self.written_s = out, Tally(name), time.monotonic(), 0.0
        self.world = World(Path(tempfile.mkdtemp(prefix="fuzz-")))
        self.of.prepare(self.world)

    def one(self, data: bytes) -> None:
        """Judge one input; count, and keep the first that fails in each way."""
        from tests.fuzz_judge import FailureError

        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        self.tally.n_inputs += 1
        try:
            self.tally.n_taken += self.of.judge(self.world, data)
        except FailureError as failure:
            self.tally.n_failures += 1
            what = re.sub(r"[0-9]+ MiB|[^s]: ['\"].*", "", str(failure))[:250]
            if what not in self.tally.failures and len(self.tally.failures) < 50:
                file = self.out / f"{_plain(self.tally.name)}-{hashlib.sha256(data).hexdigest()[:12]}"
                file.write_bytes(data)
                self.tally.failures[what] = file.name
        self.tally.seconds = time.monotonic() - self.began_s
        if self.tally.seconds > self.written_s + 1:
            self.written_s = self.tally.seconds
            self.tally.write(self.out / f"{_plain(self.tally.name)}.json")

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        """A changed input, for libFuzzer: by what the format is made of, now and then by its own means."""
        import atheris

        rng = Random(seed)
        changed = atheris.Mutate(data, max_size) if rng.random() < 0.1 else self.of.mutate(data, rng)
        return bytes(changed[:max_size]) or b"\n"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _one(name: str, seconds: float, out: Path) -> None:
    """Fuzz a format in this process until the time is over; the tally is written as it grows."""
    logging.disable(logging.CRITICAL)
    guided = util.find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=["planner", "runtime", "hwprofiles"]):
            fuzzer = Fuzzer(name, out)
    else:
        fuzzer = Fuzzer(name, out)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not guided:
        rng = Random(0)
        while fuzzer.tally.seconds < seconds:
            fuzzer.one(fuzzer.of.mutant(rng))
        return
    corpus = out / f"{_plain(name)}-corpus"
    corpus.mkdir(exist_ok=True)
    for seed in fuzzer.of.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    limits = ["-timeout=0", "-rss_limit_mb=0", f"-max_len={LONGEST_BYTES}", "-len_control=0", f"-max_total_time={int(seconds)}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={out}/", str(corpus)], fuzzer.one, custom_mutator=fuzzer.mutate)
    atheris.Fuzz()


def _fuzzed(name: str, seconds: float, out: Path) -> tuple[Tally, int | None]:
    """A format in processes of its own, another one where one ends early: its tally, and how many edges of our code it reached."""
    tally, edges, log = Tally(name), 0, out / f"{_plain(name)}.log"
    for _ in range(MOST_PROCESSES):
        left_s = seconds - tally.seconds
        if left_s < LEAST_S:
            break
        command = [sys.executable, "-m", "benchmarks.fuzz", "--one", name, "--minutes", str(left_s / 60), "--out", str(out)]
        (out / f"{_plain(name)}.json").unlink(missing_ok=True)
        with log.open("wb") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, env=environment)
        tally.add(out / f"{_plain(name)}.json", left_s)
        said = log.read_text(errors="replace")
        edges = max([edges, *map(int, re.findall(r"cov: ([0-9]+)", said))])
        if done.returncode == 0:
            break
        tally.n_failures += 1
        what = next((line for line in said.splitlines() if "what()" in line or "rror" in line), said[-200:])
        tally.failures[f"the process ended with {done.returncode}: {' '.join(what.split())[:200]}"] = "crash-* beside the log"
    return tally, edges or None


def _planted(name: str) -> str:
    """How many inputs it takes until a fault that was planted shows."""
    from tests.fuzz_planted import PLANTED, inputs_until_found

    planted = PLANTED[name]
    fuzzer = Fuzzer(planted.format, Path(tempfile.mkdtemp(prefix="fuzz-")))
    found = inputs_until_found(planted, fuzzer.of, fuzzer.world, N_PLANTED)
    n, said = found or (f"not in {N_PLANTED}", "")
    return f"| {name} | {planted.format} | {n} | {said.replace('|', '/')[:90]} |"


def main() -> None:
    arguments: Any = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=5.0, help="of each format")
    arguments.add_argument("--only", action="append", help="this format; may be given several times")
    arguments.add_argument("--out", type=Path, help="where inputs that failed, corpora and logs go")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    if given.one:
        _one(given.one, given.minutes * 60, out)
        return
    from tests import fuzz_formats, fuzz_formats_run
    from tests.fuzz_planted import PLANTED

    guided = util.find_spec("atheris") is not None
    print(f"Led by coverage: {'atheris ' + metadata.version('atheris') if guided else 'no, atheris is not installed'}\n")
    print("| format | inputs | taken | refused | failures | minutes | edges |\n|---|---:|---:|---:|---:|---:|---:|")
    total, failures = Tally("all"), dict[str, str]()
    for name in given.only or fuzz_formats.FORMATS | fuzz_formats_run.FORMATS:
        tally, edges = _fuzzed(name, given.minutes * 60, out)
        for key in ("n_inputs", "n_taken", "n_failures", "seconds"):
            setattr(total, key, getattr(total, key) + getattr(tally, key))
        failures |= {f"{name}: {what}": file for what, file in tally.failures.items()}
        print(_row(tally, edges), flush=True)
    print(_row(total, None))
    for what, file in failures.items():
        print(f"\n- {what} ({file})")
    if not given.only:
        print("\n| planted | format | found after inputs | as |\n|---|---|---:|---|")
        for name in PLANTED:
            print(_planted(name), flush=True)


def _row(tally: Tally, edges: int | None) -> str:
    n_refused = tally.n_inputs - tally.n_taken - tally.n_failures
    counts = f"{tally.n_inputs:,} | {tally.n_taken:,} | {n_refused:,} | {tally.n_failures:,} | {tally.seconds / 60:.1f}"
    return f"| {tally.name} | {counts} | {'' if edges is None else f'{edges:,}'} |"


if __name__ == "__main__":
    main()
