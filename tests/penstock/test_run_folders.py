"""Folder of a run: protection from other runs and from a full disk."""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.checkpoint import retention
from penstock.runtime.plan import PlanFile
from tests.running import SCRATCH, lines_of, one_line, penstock, plan_in, succeeded, train, weights_sha


def test_two_runs_never_share_a_folder(home):
    plan = plan_in(home)
    (home / "out").mkdir()
    descriptor = os.open(home / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    one_line(train(home, plan), 2, "another run is at work in it")
    os.close(descriptor)
    succeeded(train(home, plan))


def test_another_runs_checkpoint_is_resumed_in_a_new_folder(home):
    plan = plan_in(home)
    for out, seed in (("one", 0), ("two", 7)):
        succeeded(train(home, plan, "--save-every", 2, "--seed", seed, out=out))
    mtimes = {path.name: path.stat().st_mtime_ns for path in (home / "one").rglob("*")}
    elsewhere = home / "two" / "checkpoint-2"
    one_line(train(home, plan, "--seed", 7, "--resume-from", elsewhere, out="one"), 2, "holds checkpoint-4 of another run")
    assert {path.name: path.stat().st_mtime_ns for path in (home / "one").rglob("*")} == mtimes
    succeeded(train(home, plan, "--seed", 7, "--resume-from", elsewhere, out="three"))
    assert weights_sha(home / "three" / "checkpoint-4") == weights_sha(home / "two" / "checkpoint-4")
    assert [line["step"] for line in lines_of(home, "three")] == [3, 4]


@pytest.mark.parametrize(
    ("n_extra", "n", "ways"),
    [
        ([], 1, "make room, save --weights-only, or choose another --out"),
        (["--save-every", 2, "--keep", 1, "--weights-only"], 2, "make room, or choose"),
    ],
)
def test_a_folder_without_room_for_checkpoints_is_refused(home, monkeypatch, n_extra, n, ways):
    """The error precedes the first step; with one byte more, the run starts."""
    plan = plan_in(home)
    each_bytes = PlanFile.read(plan).plan.checkpoint_bytes("--weights-only" in n_extra)
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda folder: SimpleNamespace(free=n * each_bytes - 1))
    one_line(train(home, plan, *n_extra, steps=8), 2, f"{n} checkpoints of" if n > 1 else "a checkpoint of", ways)
    assert not (home / "out").exists()
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda folder: SimpleNamespace(free=n * each_bytes))
    succeeded(train(home, plan, *n_extra, steps=8))
    sizes = [path.stat().st_size for path in (home / "out" / "checkpoint-8").glob("*.safetensors")]
    assert each_bytes < sum(sizes) < 1.1 * each_bytes + 4096


def test_files_that_a_user_wrote_are_not_replaced(home):
    plan = plan_in(home)
    (home / "out").mkdir()
    for name in ("run.yaml", "metrics.jsonl"):
        user_file = home / "out" / name
        user_file.write_text("# mine\n")
        one_line(train(home, plan), 2, f"{name}: not written by a run")
        assert user_file.read_text() == "# mine\n"
        user_file.unlink()
    succeeded(train(home, plan))
    succeeded(train(home, plan, "--resume", steps=6))


def test_a_moved_folder_resumes_where_it_was(home, monkeypatch):
    """Resume from another working directory, without the plan file, bitwise identical to an unbroken run."""
    monkeypatch.chdir(home)
    Path("there").mkdir()
    plan_in(home)
    for out, steps in (("whole", 4), ("part", 2)):
        relative = ["--data", "data", "--model", "model", "--out", out, "--steps", steps, "--lr", "1e-3", *SCRATCH]
        succeeded(penstock("run", "plan.json", *relative))
    Path("part").rename("there/moved")
    Path("plan.json").unlink()
    monkeypatch.chdir("there")
    resumed = ["run", "--config", "moved/run.yaml", "--resume", "--steps", 4]
    one_line(penstock(*resumed, "--out", "new"), 2, "no checkpoint in new, but some next to moved/run.yaml; give --out moved")
    succeeded(penstock(*resumed))
    assert weights_sha(Path("moved/checkpoint-4")) == weights_sha(home / "whole" / "checkpoint-4") != {}
    assert not (home / "part").exists()
