"""A hundred random kills of a run, each resumed to bitwise identical results.

`python -m benchmarks.kills HOME` trains a tiny model on chats in separate processes, kills them with SIGKILL at random moments,
repeatedly, and resumes each run to its end. The results must equal those of an undisturbed run: all files of the last checkpoint,
all losses, evaluations and samples. HOME/kills.jsonl gets a line per run and allows continuing; at the end a page of Markdown is
printed. Exit code 1 for any difference.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import penstock
from benchmarks.common import command as penstock_words
from benchmarks.common import provenance
from benchmarks.small import CONFIG, write_chats
from penstock.checkpoint.checkpoint import complete_checkpoints, load_state
from penstock.runtime.errors import CheckpointError

from .killing import EVALUATE_EVERY, LOOK_S, PHASES, Aim, Pace, Process, lines, phases

TINY = CONFIG | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 272, "max_position_embeddings": 128,
}  # fmt: skip
SIZES = {"seq_len": 64, "batch_size": 4, "micro_batch": 2, "loss_tile_tokens": 32}
POLICIES: tuple[dict[str, Any], ...] = (
    {"accumulation_group": 2},
    {"accumulation_group": 1},
    {"accumulation_group": 2, "update": "deferred", "speculate_blocks": [0, 1, 3], "save": {"all": [1]}},
    {"accumulation_group": 2, "update": "deferred", "spill_blocks": [0, 1]},
)
SAVE_EVERY, KEEP = 2, 3
# Checkpoint writes: in the background with or without memory for copies, or with lanes drained.
WAYS: dict[str, dict[str, Any]] = {"copies": {}, "waits": {"copy_bytes": 0}, "drained": {"background": False}}
MOST_KILLS = 4  # of one run, before it is left alone
Results = dict[str, Any]
Command = Callable[[Path, Path, str], Sequence[str]]  # (plan, --out, way of writing) -> command line


@dataclass(frozen=True, slots=True)
class Usual:
    """Results and durations of an undisturbed run."""

    results: Results
    checkpoints: dict[str, dict[str, str]]  # SHA-256 of every file of each
    pace: Pace


# -- results of a run ----------------------------------------------------------------------------------------------------


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def results_of(out: Path) -> Results:
    """Return the results that must not depend on kills: the last checkpoint's digests, and logged values without times."""
    checkpoints = complete_checkpoints(out)
    results: Results = {} if not checkpoints else dict(sums(checkpoints[-1][1]))
    results["last checkpoint"] = checkpoints[-1][1].name if checkpoints else None
    for name in ("metrics.jsonl", "samples.jsonl"):
        for number, row in enumerate(lines(out / name)):
            kind = "evaluation" if "eval_loss" in row else "step" if "loss" in row else "sample"
            fields = {key: value for key, value in row.items() if not key.endswith("_s")}
            count = sum(key.startswith(f"{name}: {kind} {row.get('step')} ") for key in results)
            results[f"{name}: {kind} {row.get('step')} no. {count}"] = (number, fields)
    return results


def differences(actual: Results, expected: Results) -> list[str]:
    """Return the names of results that differ."""
    return sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))


def stands(out: Path, usual: Usual) -> tuple[int, int, list[str]]:
    """Return the step to resume from, the number of checkpoints that look complete, and errors. Each checkpoint must equal the
    undisturbed run's, byte by byte."""
    wrong, last, checkpoints = list[str](), 0, complete_checkpoints(out)
    for step, path in checkpoints:
        try:
            load_state(path)
        except CheckpointError as error:
            wrong.append(f"looks whole and is not: {error}")
            continue
        last = step
        wrong += [f"{path.name}/{name}" for name in differences(sums(path), usual.checkpoints.get(path.name, {}))]
    return last, len(checkpoints), wrong


# -- runs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL of a live process."""

    aim: str
    phases: list[str]
    plan: str
    way: str
    after_step: int  # last printed step
    whole_checkpoint: int  # step of the last complete one; 0: none
    resumed: bool  # True if the next process resumed exactly there


@dataclass(slots=True)
class Story:
    """One run from start to end, with all its kills."""

    number: int
    kills: list[Kill] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    n_checkpoints: int = 0  # complete ones, found after kills and compared


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of a trial and the expected results."""

    home: Path
    command: Command
    plans: Sequence[Path]
    usual: Usual

    def story(self, number: int, seed: int, budget: threading.Semaphore) -> Story:
        """Train one run with up to `MOST_KILLS` kills, within the budget, and compare the results."""
        rng, story, out = random.Random(f"{seed} {number}"), Story(number), self.home / f"run-{number}"
        shutil.rmtree(out, ignore_errors=True)
        max_kills, stands_at = rng.randint(1, MOST_KILLS), 0
        while stands_at < self.usual.pace.n_steps:
            plan, way, aim = rng.choice(self.plans), rng.choice(list(WAYS)), Aim.sampled(rng)
            process = Process(self.command(plan, out, way))
            is_meant = len(story.kills) < max_kills and budget.acquire(blocking=False)
            is_killed = is_meant and aim.wait(process, out, self.usual.pace) and process.kill()
            code = process.end()
            if is_meant and not is_killed:
                budget.release()
            self._went_on(story, process, stands_at)
            if not is_killed:
                if code:
                    story.mismatches.append(f"left with exit code {code}: {' / '.join(process.lines[-2:])}")
                break
            about = phases(out, process)
            stands_at, n_whole, wrong = stands(out, self.usual)
            story.kills.append(
                Kill(aim.event, about, plan.name, way, process.last_step, stands_at, stands_at == self.usual.pace.n_steps)
            )
            story.n_checkpoints += n_whole
            story.mismatches += wrong
        if stands_at == self.usual.pace.n_steps and differences(results_of(out), self.usual.results):
            # Killed during evaluation of the saved last state: resuming repeats it.
            process = Process(self.command(self.plans[0], out, next(iter(WAYS))))
            if code := process.end():
                story.mismatches.append(f"left with exit code {code}: {' / '.join(process.lines[-2:])}")
        story.mismatches += differences(results_of(out), self.usual.results)
        if not story.mismatches:
            shutil.rmtree(out)
        return story

    def _went_on(self, story: Story, process: Process, stands_at: int) -> None:
        """Check that a process started at the last complete checkpoint, or at the beginning without one."""
        if process.first_step != stands_at:
            story.mismatches.append(f"began after step {process.first_step}, not {stands_at}: {' / '.join(process.lines[-2:])}")
        elif story.kills:
            story.kills[-1] = replace(story.kills[-1], resumed=True)


def undisturbed(home: Path, command: Command, plan: Path, n_steps: int) -> Usual:
    """Run once, and keep all checkpoints."""
    out = home / "undisturbed"
    shutil.rmtree(out, ignore_errors=True)
    process = Process(command(plan, out, "undisturbed"))
    seen_s: dict[str, list[float]] = {}
    evaluations_s: list[float] = []
    while process.is_alive:
        for name in os.listdir(out) if out.is_dir() else ():
            if name.endswith(".partial") and name.startswith("checkpoint-"):
                seen_s.setdefault(name, []).append(time.monotonic())
        time.sleep(LOOK_S)
    ended_s = time.monotonic()
    if process.end() or process.started_s is None:
        raise SystemExit(f"the undisturbed run failed: {' / '.join(process.lines[-2:])}")
    evaluations_s = [row["eval_s"] for row in lines(out / "metrics.jsonl") if "eval_s" in row]
    written_s = [times_s[-1] - times_s[0] for times_s in seen_s.values()]
    pace = Pace(n_steps, ended_s - process.started_s, median(written_s or [0.0]), median(evaluations_s or [0.0]))
    return Usual(results_of(out), {path.name: sums(path) for _, path in complete_checkpoints(out)}, pace)


# -- the trial ------------------------------------------------------------------------------------------------------------


def prepared(home: Path, n_steps: int, policies: Sequence[dict[str, Any]] = POLICIES) -> tuple[Command, list[Path]]:
    """Write a model, chats, diverse plans, and settings for each way of writing. Return a command builder and the plans."""
    (home / "model").mkdir(parents=True, exist_ok=True)
    (home / "model" / "config.json").write_text(json.dumps(TINY))
    write_chats(home / "chats.jsonl", home / "held-out.jsonl")
    plans = []
    for number, policy in enumerate(policies):
        planned = penstock.plan(home / "model", "cpu-2core", policy=penstock.Policy(**policy), **SIZES)
        plans.append(planned.save(home / f"plan-{number}.json"))
    for way, checkpoint in {**WAYS, "undisturbed": {"keep": None}}.items():
        settings = {
            "data": {"path": str(home / "chats.jsonl")},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "schedule": {"kind": "cosine", "warmup_steps": 4}},
            "checkpoint": {"every": SAVE_EVERY, "keep": KEEP, **checkpoint},
            "evaluation": {
                "data": str(home / "held-out.jsonl"), "every": EVALUATE_EVERY, "max_sequences": 8,
                "prompts": ["What is json.loads for?"], "max_new_tokens": 4,
            },
            "steps": n_steps,
            "from_scratch": True,
            "tokenizer": "bytes",
        }  # fmt: skip
        (home / f"{way}.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def command(plan: Path, out: Path, way: str) -> list[str]:
        return penstock_words("run", plan, "--config", home / f"{way}.yaml", "--out", out, "--resume")

    return command, plans


def read_stories(path: Path) -> list[Story]:
    """Return the stories of an earlier call."""
    return [Story(**{**row, "kills": [Kill(**kill) for kill in row["kills"]]}) for row in lines(path)]


def perform(trial: Trial, n_kills: int, seed: int, n_jobs: int) -> list[Story]:
    """Run stories until `n_kills` are reached. Each is logged at its end."""
    path = trial.home / "kills.jsonl"
    stories = read_stories(path)
    budget = threading.Semaphore(max(0, n_kills - sum(len(story.kills) for story in stories)))
    numbers, lock = count(max((story.number for story in stories), default=-1) + 1), threading.Lock()

    def work() -> None:
        while budget.acquire(blocking=False):
            budget.release()
            with lock:
                number = next(numbers)
            story = trial.story(number, seed, budget)
            with lock, path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(story)) + "\n")
                stories.append(story)
                n_so_far = sum(len(s.kills) for s in stories)
                line = f"run {number}: killed {len(story.kills)} times, {n_so_far} in all; {story.mismatches}"
                print(line, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(n_jobs) as pool:
        for future in [pool.submit(work) for _ in range(n_jobs)]:
            future.result()
    return stories


def page(stories: Sequence[Story]) -> Iterator[str]:
    """Yield the tally as Markdown."""
    kills = [kill for story in stories for kill in story.kills]
    n_resumed, n_mismatches = sum(kill.resumed for kill in kills), sum(len(story.mismatches) for story in stories)
    yield "| kills | resumed | mismatches |\n|---:|---:|---:|"
    yield f"| {len(kills)} | {n_resumed} | {n_mismatches} |\n"
    yield "| activity of the run when it was killed (several are possible) | kills |\n|---|---:|"
    struck = Counter(phase for kill in kills for phase in kill.phases)
    yield from (f"| {phase} | {struck[phase]} |" for phase in PHASES)
    yield "\n| how its checkpoints were written | kills |\n|---|---:|"
    by_way = Counter(kill.way for kill in kills)
    yield from (f"| {way} | {by_way[way]} |" for way in WAYS)
    n_checkpoints, n_anew = sum(story.n_checkpoints for story in stories), sum(kill.whole_checkpoint == 0 for kill in kills)
    yield (
        f"\n{len(stories)} runs to the end, each killed up to {MOST_KILLS} times. After kills {n_checkpoints} checkpoints looked "
        f"whole and were compared with those of the undisturbed run; after {n_anew} kills none existed yet: the run started again."
    )
    yield from (f"\nrun {story.number}: {mismatch}" for story in stories for mismatch in story.mismatches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    options = parser.parse_args()
    began_s = time.monotonic()
    home = options.home.resolve()
    command, plans = prepared(home, options.steps)
    trial = Trial(home, command, plans, undisturbed(home, command, plans[0], options.steps))
    stories = perform(trial, options.kills, options.seed, options.jobs)
    print(f"{provenance()}; {(time.monotonic() - began_s) / 60:.1f} minutes\n")
    print("\n".join(page(stories)))
    if not all(kill.resumed for story in stories for kill in story.kills) or any(story.mismatches for story in stories):
        sys.exit("a killed run did not go on to the same bits")


if __name__ == "__main__":
    main()
