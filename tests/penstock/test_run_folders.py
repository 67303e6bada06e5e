"""Is what lies in a folder safe from a run that is given it?"""

import fcntl
import os
import shutil

import pytest

from tests.running import lines_of, make_home, one_line, penstock, plan_in, train, weights_sha


@pytest.fixture
def home(tmp_path):
    return make_home(tmp_path)


def test_two_runs_never_share_a_folder(home):
    plan = plan_in(home)
    (home / "out").mkdir()
    descriptor = os.open(home / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    one_line(train(home, plan), 2, "another run is at work in it")
    os.close(descriptor)
    assert train(home, plan).exit_code == 0


def test_another_runs_checkpoint_is_taken_up_in_a_folder_of_its_own_only(home):
    plan = plan_in(home)
    for out, seed in (("one", 0), ("two", 7)):
        assert train(home, plan, "--save-every", 2, "--seed", seed, out=out).exit_code == 0
    before = {path.name: path.stat().st_mtime_ns for path in (home / "one").rglob("*")}
    elsewhere = home / "two" / "checkpoint-2"
    one_line(train(home, plan, "--seed", 7, "--resume-from", elsewhere, out="one"), 2, "holds checkpoint-4 of another run")
    assert {path.name: path.stat().st_mtime_ns for path in (home / "one").rglob("*")} == before
    assert train(home, plan, "--seed", 7, "--resume-from", elsewhere, out="three").exit_code == 0
    assert weights_sha(home / "three" / "checkpoint-4") == weights_sha(home / "two" / "checkpoint-4")
    assert [line["step"] for line in lines_of(home, "three")] == [3, 4]


def test_a_file_of_settings_that_a_user_wrote_is_not_replaced(home):
    plan = plan_in(home)
    (home / "out").mkdir()
    own = home / "out" / "run.yaml"
    own.write_text(f"# mine\nplan: {plan}\ndata: {{path: {home / 'data'}}}\n")
    one_line(train(home, plan), 2, "run.yaml: not written by a run")
    assert own.read_text().startswith("# mine")
    own.unlink()
    assert train(home, plan).exit_code == 0
    assert train(home, plan, "--resume", steps=6).exit_code == 0


def test_a_log_that_no_run_wrote_is_not_replaced(home):
    plan = plan_in(home)
    (home / "out").mkdir()
    (home / "out" / "metrics.jsonl").write_text('{"mine": 1}\n')
    one_line(train(home, plan), 2, "metrics.jsonl: not written by a run")
    assert (home / "out" / "metrics.jsonl").read_text() == '{"mine": 1}\n'


def test_no_report_is_written_over_its_plan(home):
    plan = plan_in(home)
    content = plan.read_bytes()
    one_line(penstock("report", plan, "-o", plan), 2, "the plan itself")
    assert plan.read_bytes() == content


def test_no_profile_is_written_over_the_plan(home):
    plan = plan_in(home)
    content = plan.read_bytes()
    one_line(train(home, plan, "--recalibrate", plan), 2, "the plan itself")
    assert plan.read_bytes() == content


def test_a_checkpoint_is_a_model_to_begin_from_as_the_refusal_of_another_schedule_says(home):
    plan = plan_in(home)
    assert train(home, plan).exit_code == 0
    checkpoint = home / "out" / "checkpoint-4"
    one_line(train(home, plan, "--resume", "--weight-decay", "0.5", steps=6), 2, f"--model {checkpoint}", "weight_decay")
    assert train(home, plan, "--model", checkpoint, "--weight-decay", "0.5", out="anew").exit_code == 0
    other = shutil.copytree(checkpoint, home / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    one_line(train(home, plan, "--model", other, out="no"), 2, "not the one the plan was made for")
