"""Which lies can our files tell, and who notices?

Tells every lie of `tests/lies.py` on real files and writes the tally, a page in markdown: `python -m benchmarks.lies` from the root
of the repository, a few minutes. `--check` also times `check` on plans of usual size.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.lies import ASKED, FOUND, LOOK, SLOW, Answer, answer, believed_before, lies, prepare

ROOT = Path(__file__).parents[1]
PLANS = {ASKED, FOUND, SLOW}
N_RUNS = 7
TIMED = (
    ("qwen2.5-0.5b", "rtx4090-desktop"),
    ("qwen2.5-7b", "rtx4090-server"),
    ("qwen2.5-32b", "rtx4090-server"),
    ("llama-3.1-70b", "h200-pcie5"),
)  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="time `check` too, some minutes more")
    with_times = arguments.parse_args().check
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "honest"
        home.mkdir()
        prepare(home)
        told = [_told(home, Path(place) / str(i), i) for i in range(len(lies()))]
    print("\n".join(_tally(told)))
    if with_times:
        print("\n".join(_times()))


def _told(home: Path, folder: Path, number: int) -> tuple[Answer, bool | None]:
    """What became of a lie; and, of a plan, whether the checker of structure alone believes it."""
    lie = lies()[number]
    found = answer(home, folder, lie)
    return found, believed_before(folder / lie.file) if lie.file in PLANS else None


def _tally(told: list[tuple[Answer, bool | None]]) -> Iterator[str]:
    of_plans = [(found, before) for found, before in told if before is not None]
    n_before = sum(before for _, before in of_plans)
    n_missed = sum(not found.is_noticed for found, _ in of_plans)
    yield f"Of {len(of_plans)} lies of a plan {n_before} were believed before and {n_missed} are now; of all {len(told)} lies"
    yield f"{sum(not found.is_noticed for found, _ in told)} are believed, each for a reason.\n"
    yield "| file | lie | before | now | by | in these words, or why not |\n|---|---|---|---|---|---|"
    for found, before in told:
        lie = found.lie
        then = "" if before is None else "believed" if before else "caught"
        if not found.is_noticed:
            now, words = ("believed", lie.why) if lie.why else ("**believed**", found.said)
        else:
            now, words = ("told" if lie.told else "made anew" if lie.mended else f"caught, {found.exit_code}"), _words(found)
        by = "`check --quick`" if lie.command == LOOK else f"`{lie.command[0]}`"
        yield f"| {lie.file.rpartition('/')[2]} | {lie.what} | {then} | {now} | {by} | {words} |"


def _words(found: Answer) -> str:
    """The line without where and what to do, short."""
    said = found.said.removeprefix("error: ").removeprefix("note: ")
    said = re.sub(r"^(?:\S*/)?[\w.*-]+\.\w+: ", "", said)
    if found.lie.told and "claim recomputed" in said:
        said = "claim recomputed" + said.partition("claim recomputed")[2]
    said = said.partition("; make the plan again")[0].replace("|", "/")
    return said if len(said) <= 150 else said[:147] + "..."


def _times() -> Iterator[str]:
    """Seconds of a processor that `check` takes, the whole command: others at work do not lengthen that much."""
    yield "\n| plan | ops | `plan` | `check --quick` | spread | of it the draws | `check` |\n|---|---:|---:|---:|---:|---:|---:|"
    with tempfile.TemporaryDirectory() as place:
        for model, machine in TIMED:
            path = Path(place) / f"{model}.json"
            planning_s = _cpu_s("plan", model, "--machine", machine, "-o", path)
            quick_s = [_cpu_s("check", "--quick", path) for _ in range(N_RUNS)]
            n_ops, draws_s = _draws(path)
            row = (model, n_ops, planning_s, median(quick_s), max(quick_s) / min(quick_s), draws_s, _cpu_s("check", path))
            yield "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row) + " |"


def _cpu_s(*words: object) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _draws(path: Path) -> tuple[int, float]:
    """Ops of a plan, and seconds that its interval takes."""
    from hwprofiles.schema import Profile
    from planner.predict.uncertainty import interval
    from runtime.plan import PlanFile

    plan = PlanFile.read(path).plan
    profile, start_s = Profile.from_json(plan.profile), time.process_time()
    interval(plan, profile)
    return len(plan.ops), time.process_time() - start_s


if __name__ == "__main__":
    main()
