"""Does a run by several ranks leave what one leaves, whatever becomes of them?"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.ranks import start
from runtime.checkpoint.checkpoint import latest
from tests.rank_law import ROOT, free_port
from tests.running import SCRATCH, make_home, one_line, penstock, plan_in

BATCH = ["--batch-size", 8, "--micro-batch", 1, "--sum-groups", 4]
COMMAND = [sys.executable, "-m", "penstock"]
QUIET = {"OMP_NUM_THREADS": "1"}


def planned(home, ranks):
    return plan_in(home, "--policy", "megatrain", *BATCH, "--gpus", ranks, name=f"{ranks}.json")


def words(home, plan, *extra, out="out", steps=4):
    run = ["run", plan, "--data", home / "data", "--out", home / out, "--steps", steps, "--lr", "1e-3", *SCRATCH, *extra]
    return [str(word) for word in run]


def done(arguments, timeout_s=120):
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def contents(checkpoint):
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


def logged(home, out):
    """What of the log does not depend on the clock."""
    lines = [json.loads(line) for line in (home / out / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k in ("step", "loss", "grad_norm", "eval_loss", "supervised_tokens")} for line in lines
    ]


def test_a_run_goes_on_with_another_number_of_ranks_and_leaves_the_bytes_of_one(tmp_path):
    """Evaluated, asked for a sample and saved on the way; two ranks, then one."""
    home = make_home(tmp_path)
    looks = ("--eval-data", home / "data" / "b.txt", "--eval-every", 2, "--prompt", "To be", "--save-every", 2)
    assert penstock(*words(home, planned(home, 1), *looks, out="alone")).exit_code == 0
    shared = done(words(home, planned(home, 2), *looks, steps=2))
    assert shared.returncode == 0, shared.stderr
    assert shared.stderr.count("step 1/2") == 1, "the first rank speaks, the other is silent"
    assert contents(home / "out" / "checkpoint-2") == contents(home / "alone" / "checkpoint-2")
    assert penstock(*words(home, home / "1.json", *looks, "--resume")).exit_code == 0
    assert contents(home / "out" / "checkpoint-4") == contents(home / "alone" / "checkpoint-4")
    assert logged(home, "out") == logged(home, "alone")
    assert (home / "out" / "samples.jsonl").read_text() == (home / "alone" / "samples.jsonl").read_text()


def by_hand(arguments_of_ranks):
    """Start ranks one by one, each with arguments of its own."""
    n = len(arguments_of_ranks)
    common = os.environ | QUIET | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, arguments in enumerate(arguments_of_ranks)
    ]


def ended(processes, timeout_s=90):
    try:
        return [(p.communicate(timeout=timeout_s), p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("what", ["plan", "settings"])
def test_ranks_that_are_not_alike_are_refused_in_a_line_of_the_first(what, tmp_path):
    home = make_home(tmp_path)
    plan = planned(home, 2)
    other = plan_in(home, "--policy", "zero3-offload", *BATCH, "--gpus", 2, name="other.json") if what == "plan" else plan
    second = words(home, other, *(["--seed", "7"] if what == "settings" else []))
    (first, code), (silent, other_code) = ended(by_hand([words(home, plan), second]))
    assert (code, other_code) == (2, 2)
    assert first[1].splitlines()[-1] == f"error: rank 1 has another {what} than rank 0; start all ranks alike"
    assert "error" not in silent[1]
    assert not (home / "out").exists()


def test_a_plan_of_so_many_ranks_is_not_run_by_fewer(tmp_path):
    home = make_home(tmp_path)
    plan = planned(home, 4)
    found = ended(by_hand([words(home, plan), words(home, plan)]))
    assert [code for _, code in found] == [2, 2]
    assert found[0][0][1].startswith("error: the plan is for 4 GPUs, and 2 ranks were started")
    assert "error" not in found[1][0][1]


def test_as_many_gpus_as_share_nothing_are_refused_where_they_are_planned(tmp_path):
    home = make_home(tmp_path)
    asked = ["plan", home / "model", "--machine", "cpu-2core", "--seq-len", 32, "--batch-size", 8]
    one_line(penstock(*asked, "--gpus", 3), 2, "3 ranks cannot share 8 sum groups")
    one_line(penstock(*asked, "--gpus", 4, "--sum-groups", 2), 2, "4 ranks cannot share 2 sum groups")
    one_line(penstock(*asked, "--gpus", 16), 2, "16 ranks cannot share 8 sum groups")


@pytest.mark.soak
def test_when_a_rank_is_killed_all_end_and_another_number_goes_on(tmp_path):
    home, rng = make_home(tmp_path), random.Random(5)
    plan, last = planned(home, 2), 0
    for victim in (0, 1):
        running = subprocess.Popen(
            [*COMMAND, *words(home, plan, "--resume", "--save-every", 5, "--keep", 2, steps=10**5)],
            cwd=ROOT,
            env=os.environ | QUIET,
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait_for_a_step(home / "out", running, last)
        time.sleep(rng.random() / 2)
        pid = next(p for p in _children(running.pid) if _environment(p).get("RANK") == str(victim))
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        said = running.communicate(timeout=60)[1]
        assert time.monotonic() - began_s < 30
        assert running.returncode == 128 + signal.SIGKILL
        assert f"error: rank {victim} was ended by SIGKILL; go on with --resume" in said
        last = _step_of(home / "out")
    alone, n = planned(home, 1), last + 3
    assert penstock(*words(home, alone, "--resume", steps=n)).exit_code == 0
    assert penstock(*words(home, alone, out="alone", steps=n)).exit_code == 0
    assert contents(home / "out" / f"checkpoint-{n}") == contents(home / "alone" / f"checkpoint-{n}")


def _step_of(out):
    found = latest(out)
    return 0 if found is None else int(found.name.removeprefix("checkpoint-"))


def _wait_for_a_step(out, running, after=0):
    """Until a checkpoint of a later step is there."""
    for _ in range(600):
        if _step_of(out) > after:
            return
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.1)
    raise AssertionError("no checkpoint in a minute")


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment(pid):
    pairs = (entry.partition("=") for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {name: value for name, _, value in pairs}


@pytest.mark.soak
def test_torchrun_starts_a_run_as_well_and_a_signal_ends_it_after_the_step(tmp_path):
    home = make_home(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock"]
    found = subprocess.run(
        [*torchrun, *words(home, planned(home, 2))],
        cwd=ROOT,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert penstock(*words(home, planned(home, 1), out="alone")).exit_code == 0
    assert contents(home / "out" / "checkpoint-4") == contents(home / "alone" / "checkpoint-4")
    running = subprocess.Popen(
        [*COMMAND, *words(home, home / "2.json", "--save-every", 2, "--keep", 1, out="long", steps=10**6)],
        cwd=ROOT,
        env=os.environ | QUIET,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for_a_step(home / "long", running)
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 0, said
    assert "terminated: stopped after step" in said
    assert latest(home / "long") is not None


def test_the_exit_code_of_ranks_is_that_of_the_first_to_fail(monkeypatch):
    """Of processes that stand for ranks: one ends at once with 3, the others would sleep for a minute."""
    monkeypatch.setattr("penstock.ranks.GRACE_S", 0.5)
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    monkeypatch.setattr("penstock.ranks.COMMAND", [sys.executable, "-c", script])
    began_s = time.monotonic()
    assert start(3, []) == 3
    assert time.monotonic() - began_s < 20
