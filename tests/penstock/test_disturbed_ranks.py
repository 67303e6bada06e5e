"""Faults in runs on several ranks: no progress is lost."""

import os
import random
import re
import resource
import shutil
import signal
import time
from contextlib import suppress

import pytest

from tests.bytes_of_files import write_lines
from tests.forks import is_alive
from tests.lanes import mostly_slow
from tests.rank_runs import begun, contents, is_that_of_one, pid_of, planned, run_to_end, said_by, step_of, wait_for, words
from tests.running import penstock, plan_in, succeeded


def test_a_full_disk_ends_all_ranks_in_one_line(home):
    """The previous checkpoint remains valid; one rank resumes from it, bitwise identical to a single-rank run."""
    running = begun(words(home, planned(home, 2), "--save-every", 2, steps=10**3))
    wait_for(lambda: step_of(home / "out"), running)
    pids = [pid_of(running, rank) for rank in (0, 1)]
    resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (20_000, 20_000))  # limit of the file size
    outputs = said_by(running)
    assert running.returncode == 2, outputs
    assert re.fullmatch(r"error: .*checkpoint-\d+.*: cannot be written \(File too large\); make room, .*", outputs.splitlines()[-1])
    assert outputs.count("error") == 1
    assert not any(map(is_alive, pids))
    assert not list((home / "out").glob("*.partial"))
    n = step_of(home / "out") + 1
    succeeded(penstock(*words(home, planned(home, 1), "--resume", steps=n)))
    assert is_that_of_one(home, n)


@pytest.mark.slow
def test_ranks_that_are_told_to_end_leave_a_long_evaluation(home):
    (home / "held-out.txt").write_text("The slings and arrows of outrageous fortune. " * 5_000)
    (home / "many.yaml").write_text("evaluation: {max_sequences: 100000, first: false}\n")
    looks = ["--eval-data", home / "held-out.txt", "--config", home / "many.yaml"]
    running = begun(words(home, planned(home, 2), *looks, steps=2))
    wait_for(lambda: step_of(home / "out") == 2, running)
    time.sleep(0.5)  # during an evaluation
    running.send_signal(signal.SIGTERM)
    outputs = said_by(running)
    assert running.returncode == 0, outputs
    assert "terminated: stopped after step 2 of 2" in outputs
    assert "evaluation after" not in outputs, "not to its end"


@pytest.mark.slow
def test_a_rank_that_stands_still_for_a_while_changes_nothing(home):
    rng, n_stops = random.Random(3), 0
    looks = ["--save-every", 4, "--eval-data", home / "data" / "b.txt", "--eval-every", 6]
    running = begun(words(home, planned(home, 2), *looks, steps=12))
    wait_for((home / "out" / "metrics.jsonl").exists, running)
    pids = [pid_of(running, rank) for rank in (0, 1)]
    while running.poll() is None:
        time.sleep(rng.uniform(0.05, 0.4))
        victim = pids[n_stops % 2]
        with suppress(ProcessLookupError):  # at the end
            os.kill(victim, signal.SIGSTOP)
            time.sleep(rng.uniform(0.1, 0.9))
            os.kill(victim, signal.SIGCONT)
            n_stops += 1
    assert running.returncode == 0, said_by(running)
    assert n_stops >= 3
    assert is_that_of_one(home, 12, *looks)


TEXTS = [{"text": ("good " if n % 2 else "bad ") + "x" * (n % 5 + 9), "label": n % 2} for n in range(16)]
PAIRS = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} never"} for n in range(8)]
ANSWERS = [{"prompt": f"tea {n}? ", "completion": "yes" + "!" * n, "label": n % 2 == 0} for n in range(8)]
LOGPROBS = {"logprobs": [[-5.5], [-5, -6, -5]]}
GROUPS = [LOGPROBS | {"prompt_ids": [n, 9], "completion_ids": [[n + 1], [2, 3, n]], "rewards": [0, n]} for n in range(1, 9)]
LORA = ("--train", "lora:r=4")
CASES = [("classify", TEXTS, ()), ("reward", PAIRS, LORA), ("kto:group=2", ANSWERS, ()), ("grpo:beta=0.1", GROUPS, LORA)]
CASES += [("dpo", PAIRS, ())]


@mostly_slow(("loss", "rows", "extra"), CASES, ids=[loss for loss, _, _ in CASES])
def test_two_ranks_one_of_them_killed_learn_as_one_does(home, loss, rows, extra):
    shutil.rmtree(home / "data")
    write_lines(home / "data" / "rows.jsonl", rows)
    options = ("--loss", loss, *extra, "--policy", "megatrain", "--batch-size", 8, "--micro-batch", 4, "--sum-groups", 2)
    plans, victim = [plan_in(home, *options, "--gpus", n, name=f"{n}.json") for n in (1, 2)], len(loss) % 2
    running = begun(words(home, plans[1], "--save-every", 1, "--keep", 2, steps=10**5))
    wait_for(lambda: step_of(home / "out") > 1, running)
    os.kill(pid_of(running, victim), signal.SIGKILL)
    began_s = time.monotonic()
    assert f"error: rank {victim} was ended by SIGKILL; go on with --resume" in said_by(running)
    assert time.monotonic() - began_s < 30
    assert running.returncode == 128 + signal.SIGKILL
    n = step_of(home / "out") + 1
    resumed = run_to_end(words(home, plans[1], "--resume", steps=n))
    assert resumed.returncode == 0, resumed.stderr
    alone = succeeded(penstock(*words(home, plans[0], out="alone", steps=n)))
    assert ("that share them" in alone.output) == (rows in (PAIRS, ANSWERS))
    assert contents(home / "out" / f"checkpoint-{n}") == contents(home / "alone" / f"checkpoint-{n}")
