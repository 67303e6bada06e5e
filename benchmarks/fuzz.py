"""Fuzzing: random damage to a valid file of every format, given to the command that reads it.

`python -m benchmarks.fuzz --minutes 1` from the root of the repository spends a minute on each format of `tests/hostile.py`, in a
separate process with limited memory, and prints a page in markdown. `--only JSONL` selects one. A file that a command neither
accepts nor rejects with a one-line error is kept in `--out`.
"""

import argparse
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

ADDRESS_SPACE_BYTES = 8 * 2**30  # above the initial mapping, so that a large request fails
ENDED_S = 300  # grace period for native code that does not return


def fuzz(name: str, seconds: float, out: Path) -> None:
    """Fuzz one format in this process. Print the tally as one line of JSON."""
    from benchmarks.damage import damaged
    from tests.hostile import FORMATS, NoEndError, judged, make_house

    file, words = FORMATS[name]
    street = Path(tempfile.mkdtemp(prefix="fuzz-"))
    good, home = street / "good" / "house", street / "tried" / "house"
    good.mkdir(parents=True)
    make_house(good)
    shutil.copytree(good.parent, home.parent)
    judged(home, words)  # imports are not counted
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    until_s, codes, failures, n = time.monotonic() + seconds, list[int](), dict[str, str](), 0
    while time.monotonic() < until_s:
        shutil.rmtree(home)
        shutil.copytree(good, home)
        data = (good / file).read_bytes()
        for _ in range(1 + n % 2):
            data = damaged(data, Random(n))
        (home / file).write_bytes(data)
        n += 1
        try:
            codes.append(judged(home, words))
        except (AssertionError, NoEndError, MemoryError) as failure:
            saved = out / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}-{hashlib.sha256(data).hexdigest()[:12]}"
            saved.write_bytes(data)
            failures.setdefault((str(failure).splitlines() or [type(failure).__name__])[0][:160], saved.name)
    shutil.rmtree(street)
    n_taken = codes.count(0)
    print(json.dumps({"inputs": n, "taken": n_taken, "refused": len(codes) - n_taken, "failures": failures}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each format")
    parser.add_argument("--only", action="append", help="this format; may be given several times")
    parser.add_argument("--out", type=Path, help="where files that failed are kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    if options.one:
        fuzz(options.one, options.minutes * 60, out)
        return
    from tests.hostile import FORMATS

    print("| format | inputs | taken | refused | failures |\n|---|---:|---:|---:|---:|")
    for name in options.only or FORMATS:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--one", name, "--minutes", str(options.minutes), "--out", str(out)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=options.minutes * 60 + ENDED_S, check=True)
            tally = json.loads(process.stdout.splitlines()[-1])
        except subprocess.SubprocessError as error:
            tally = {"inputs": 0, "taken": 0, "refused": 0, "failures": {str(error)[-200:]: "no file"}}
        print(
            f"| {name} | {tally['inputs']:,} | {tally['taken']:,} | {tally['refused']:,} | {len(tally['failures'])} |", flush=True
        )
        for problem, file in tally["failures"].items():
            print(f"\n{problem} ({file})\n", flush=True)


if __name__ == "__main__":
    main()
