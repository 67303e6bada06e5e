"""Benchmark of kills: killed runs resume to the same bits, and the benchmark detects runs that do not."""

import shutil
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import SimpleNamespace

import pytest

from benchmarks.killing import PHASES, lines
from benchmarks.kills import POLICIES, Trial, differences, page, perform, prepared, read_stories, results_of, undisturbed
from tests.forks import Forked
from tests.lanes import mostly_slow

N_STEPS = 14
# Fake run that trains an integer. The name of its plan selects a fault, e.g. `forgets` changes the state on resume.
RUN = """
import hashlib, json, os, shutil, sys, time
plan, out, way, n_steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
sin = os.path.basename(plan)
def log(name, **fields):
    with open(os.path.join(out, name), "a") as file:
        file.write(json.dumps(fields) + "\\n")
os.makedirs(out, exist_ok=True)
steps = sorted(int(n[11:]) for n in os.listdir(out) if n.startswith("checkpoint-") and n[11:].isdigit())
for name in os.listdir(out):
    if name.endswith((".partial", ".removed")):
        shutil.rmtree(os.path.join(out, name))
if sin == "fails" and steps:
    sys.exit("error: cannot go on")
first = steps[-1] if steps and sin != "begins anew" else 0
total = int(open(os.path.join(out, f"checkpoint-{first}", "weights")).read()) if first else 0
total += sin == "forgets" and first > 0
log_path = os.path.join(out, "metrics.jsonl")
if os.path.exists(log_path) and sin != "logs twice":
    kept = [x for x in open(log_path) if x.endswith("\\n") and json.loads(x)["step"] <= first]
    open(log_path, "w").writelines(kept)
print(f"steps: {first + 1} to {n_steps}, each a number", file=sys.stderr, flush=True)
for step in range(first + 1, n_steps + 1):
    time.sleep(0.008)
    total = (total * 31 + step) % 1000003
    log("metrics.jsonl", step=step, loss=total, step_s=time.time())
    print(f"step {step}/{n_steps}  loss {total}", file=sys.stderr, flush=True)
    if step % 5 == 0:
        time.sleep(0.01)
        log("metrics.jsonl", step=step, eval_loss=total / 2, eval_s=0.01)
    if step % 2 == 0:
        name = os.path.join(out, f"checkpoint-{step}")
        os.makedirs(name + ".partial")
        said = str(total) if sin != "damages" or step < 4 else "rubbish"
        for file in ("weights", "moments"):
            open(os.path.join(name + ".partial", file), "w").write(said)
            time.sleep(0.004)
        entry = {"n_bytes": len(str(total)), "sha256": hashlib.sha256(str(total).encode()).hexdigest()}
        files = {"weights": entry, "moments": entry}
        state = {"format_version": 2, "step": step, "state": {}, "files": files}
        state["sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        json.dump(state, open(os.path.join(name + ".partial", "trainer_state.json"), "w"))
        os.rename(name + ".partial", name)
        if step > 6 and way != "undisturbed":
            old = os.path.join(out, f"checkpoint-{step - 6}")
            if os.path.exists(old):
                os.rename(old, old + ".removed")
                time.sleep(0.002)
                shutil.rmtree(old + ".removed")
"""


@pytest.fixture
def numbers(tmp_path):
    """Return a function that makes a trial of fake runs with the fault of this name; `honest` has none."""
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def command(plan: Path, out: Path, way: str) -> list[str]:
        return [sys.executable, "-S", str(script), str(plan), str(out), way, str(N_STEPS)]

    def trial_of(plan: str) -> Trial:
        return Trial(tmp_path, command, [tmp_path / plan], undisturbed(tmp_path, command, tmp_path / "honest", N_STEPS))

    return trial_of


@pytest.mark.slow
def test_training_killed_three_times_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """Same as the benchmark with a hundred kills, but with forked processes."""
    monkeypatch.setattr("benchmarks.killing.subprocess", SimpleNamespace(Popen=Forked, PIPE=PIPE, DEVNULL=DEVNULL))
    command, plans = prepared(tmp_path, 6, POLICIES[1:3])
    stories = perform(Trial(tmp_path, command, plans, undisturbed(tmp_path, command, plans[0], 6)), 3, seed=1, n_jobs=2)
    kills = [kill for story in stories for kill in story.kills]
    assert [mismatch for story in stories for mismatch in story.mismatches] == []
    assert len(kills) == 3
    assert all(kill.resumed for kill in kills)
    assert len(lines(tmp_path / "undisturbed" / "metrics.jsonl")) == 6 + 3, "six steps, three evaluations"
    assert "last checkpoint" in results_of(tmp_path / "undisturbed")


def test_every_kill_is_counted_and_honest_runs_differ_nowhere(numbers):
    trial = numbers("honest")
    stories = perform(trial, 6, seed=0, n_jobs=2)
    kills = [kill for story in stories for kill in story.kills]
    assert [story.mismatches for story in stories] == [[]] * len(stories)
    assert len(kills) == 6
    assert all(kill.resumed for kill in kills)
    assert {phase for kill in kills for phase in kill.phases} <= {*PHASES}
    assert not list(trial.home.glob("run-*")), "folders of correct runs are not deleted"
    assert perform(trial, 6, seed=0, n_jobs=2) == read_stories(trial.home / "kills.jsonl"), "a finished trial is repeated"


SINS = {
    "forgets": ("weights", "metrics.jsonl: step"),
    "begins anew": ("began after step 0, not",),
    "logs twice": ("no. 1",),
    "damages": ("looks whole and is not",),
    "fails": ("cannot go on",),
}


@mostly_slow("sin", SINS)
def test_a_run_that_does_not_go_on_as_it_should_is_found_out(numbers, sin):
    stories = perform(numbers(sin), 4, seed=2, n_jobs=1)
    for words in SINS[sin]:
        assert any(words in mismatch for story in stories for mismatch in story.mismatches)
        assert any(words in line for line in page(stories))


def change_log(out, change):
    log = out / "metrics.jsonl"
    log.write_text("".join(line + "\n" for line in change(log.read_text().splitlines())))


def test_what_differs_from_the_undisturbed_run_is_seen(numbers):
    trial = numbers("honest")
    out, doctored = trial.home / "undisturbed", trial.home / "doctored"
    change_log(out, lambda log: [line.replace('"step_s": ', '"step_s": 1') for line in log])
    assert differences(results_of(out), trial.usual.results) == [], "times may differ"
    for doctor in (
        lambda: (doctored / "checkpoint-14" / "moments").write_text("1"),
        (doctored / "checkpoint-14" / "more").touch,
        lambda: shutil.rmtree(doctored / "checkpoint-14"),
        lambda: change_log(doctored, lambda log: [log[0].replace('"loss": ', '"loss": 1'), *log[1:]]),
        lambda: change_log(doctored, lambda log: log[1:]),
    ):
        shutil.copytree(out, doctored)
        doctor()
        assert differences(results_of(doctored), trial.usual.results) != []
        shutil.rmtree(doctored)
