"""Is a state looked at when it should be, and is no step lost by it?"""

import json
import threading
from dataclasses import replace

import pytest

from penstock.checkpoint.checkpoint import latest, load_state
from penstock.training import trainer
from penstock.training.trainer import Look, Training
from runtime.compute.inference import Abandoned
from runtime.machines.cpu import CpuMachine
from runtime.plan import Policy, Update
from runtime.plan.timeline import Timeline

from .test_trainer import lines, training


@pytest.fixture(autouse=True)
def _threads_of_others():
    """A machine of an earlier test, whose run failed there, may still be somewhere, and its lane with it."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


OTHERS: set[threading.Thread] = set()


def evaluated(run: Training, every: int | None, said: list[int]) -> Training:
    """With an evaluation that writes a line, and asserts that all is quiet."""

    def evaluate(step: int) -> None:
        said.append(step)
        look_at(run, step)

    return replace(run, looks=[loss_by(evaluate)], evaluate_every=every)


def loss_by(perform) -> Look:
    return Look("metrics.jsonl", "eval_loss", perform)


def look_at(run: Training, step: int) -> None:
    assert not [t for t in {*threading.enumerate()} - OTHERS if t.name.startswith("lane")], "lanes are drained"
    with (run.folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, "eval_loss": 1.0}) + "\n")


@pytest.mark.fast("some")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("every", "expected"), [(None, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_lanes_are_drained_to_evaluate_every_so_many_steps_and_at_the_end(tmp_path, every, expected, background):
    said: list[int] = []
    evaluated(training(tmp_path, Policy(update=Update.DEFERRED), CpuMachine, 3, background), every, said).run(0, 5, lambda m: None)
    assert said == expected
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-5"]


def test_who_asks_for_the_end_does_not_wait_for_an_evaluation_and_who_goes_on_makes_up_for_it(tmp_path):
    said: list[int] = []
    run = evaluated(training(tmp_path, Policy(), save_every=1), 2, said)

    def ask(metrics):
        if metrics.step == 2:
            run.stop.request()

    run.run(0, 6, ask)
    done = len(lines(tmp_path))
    assert said == []
    for n_steps in (6, 8):
        again = evaluated(training(tmp_path, Policy(), save_every=1), done, said)
        again.resume(load_state(sorted(tmp_path.glob("checkpoint-*"))[-1]))
        again.run(done if n_steps == 6 else 6, n_steps, lambda metrics: None)
    assert said == sorted({done, *(n for n in range(done, 9, done)), 6, 8}), "each step once"


@pytest.mark.parametrize("background", [True, False])
def test_a_state_is_on_the_disk_before_it_is_looked_at_for_the_last_time(tmp_path, background):
    """Else a run that is killed while it looks has lost the steps that led there. On the way that is so where lanes are drained to
    save; a background save has at least begun."""
    run = training(tmp_path, Policy(), save_every=2, background=background)
    named = {}

    def evaluate(step: int) -> None:
        named[step] = (tmp_path / f"checkpoint-{step}").exists()

    replace(run, looks=[loss_by(evaluate)], evaluate_every=2).run(0, 5, lambda metrics: None)
    assert named.keys() == {2, 4, 5}
    assert named[5]
    assert background or all(named.values())


def test_what_is_there_before_the_first_step_is_looked_at_once_and_no_bit_of_training_changes(tmp_path):
    """Also where a run of another model left its log in the folder; who resumes has it already."""
    training(tmp_path / "without", Policy()).run(0, 2, lambda metrics: None)
    said: list[int] = []
    for first_step in (0, 1):
        run = evaluated(training(tmp_path / "with", Policy(), save_every=1), None, said)
        (tmp_path / "with" / "metrics.jsonl").touch()
        if first_step == 0:
            look_at(run, 0)  # another run's
        else:
            run.resume(load_state(tmp_path / "with" / "checkpoint-1"))
        replace(run, looks=[replace(run.looks[0], first=True)]).run(first_step, 2, lambda metrics: None)
    assert said == [0, 2, 2]
    assert [line["step"] for line in lines(tmp_path / "with")] == [0, 1, 2, 2]
    for name in ("model", "optimizer-00001"):
        files = [tmp_path / out / "checkpoint-2" / f"{name}.safetensors" for out in ("with", "without")]
        assert files[0].read_bytes() == files[1].read_bytes()


class _Killed(BaseException): ...


@pytest.mark.parametrize("how", [_Killed, OSError])
def test_a_run_that_breaks_in_its_last_evaluation_has_only_that_to_make_up_for(tmp_path, how):
    run = training(tmp_path, Policy())

    def breaks(step: int) -> None:
        raise how

    with pytest.raises(how):
        replace(run, looks=[loss_by(breaks)]).run(0, 3, lambda metrics: None)
    timeline = (tmp_path / "timeline.json").read_bytes()
    said: list[int] = []
    again = evaluated(training(tmp_path, Policy()), None, said)
    again.resume(load_state(tmp_path / "checkpoint-3"))
    assert again.lacks_evaluation(3, 3)
    assert not again.lacks_evaluation(3, 4), "it is looked at when more has been learned"
    assert again.run(3, 3, lambda metrics: pytest.fail("a step")) == (Timeline(()), [])
    assert said == [3]
    assert not again.lacks_evaluation(3, 3)
    assert (tmp_path / "timeline.json").read_bytes() == timeline


def test_each_look_that_is_missing_is_made_up_for_and_no_other(tmp_path):
    said: list[str] = []
    looks = [
        Look("metrics.jsonl", "eval_loss", lambda step: said.append("loss")),
        Look("samples.jsonl", "prompt", lambda step: said.append("samples")),
    ]
    run = training(tmp_path, Policy())
    run.run(0, 1, lambda metrics: None)
    run = replace(run, looks=looks)
    for log, line, missing in (("samples", {"step": 1, "prompt": ""}, "loss"), ("metrics", {"step": 1, "eval_loss": 2}, None)):
        with (tmp_path / f"{log}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        run.run(1, 1, lambda metrics: None)
        assert said == ([missing] if missing else [])
        said.clear()


@pytest.mark.fast("some")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("save_every", [None, 2])
@pytest.mark.parametrize("at", [2, 4])
def test_who_asks_for_the_end_during_an_evaluation_leaves_it_and_its_state_is_saved_once(tmp_path, background, at, save_every):
    run = training(tmp_path, Policy(), save_every=save_every, background=background)
    said: list[int] = []

    def evaluate(step: int) -> None:
        if step == at:
            run.stop.request()
            raise Abandoned
        look_at(run, step)

    other = Look("samples.jsonl", "prompt", said.append)
    replace(run, looks=[loss_by(evaluate), other], evaluate_every=2).run(0, 4, lambda metrics: None)
    before = [2] if at == 4 else []
    assert said == before
    assert latest(tmp_path).name == f"checkpoint-{at}"
    assert [line["step"] for line in lines(tmp_path) if "eval_loss" in line] == before
    seen: list[int] = []
    again = evaluated(training(tmp_path, Policy(), background=background), 2, seen)
    again.resume(load_state(tmp_path / f"checkpoint-{at}"))
    again.run(at, 4, lambda metrics: None)
    assert seen == sorted({at, 4})


# -- going on from an earlier checkpoint


def test_later_checkpoints_of_a_course_that_is_left_are_not_gone_on_from(tmp_path):
    """A run that is killed before its first save would else go on from one of them, with a hole in its log."""
    training(tmp_path, Policy(), save_every=1).run(0, 4, lambda metrics: None)
    (tmp_path / "checkpoint-4.left").mkdir()
    (tmp_path / "checkpoint-4.left" / "older").write_text("")
    second = training(tmp_path, Policy())
    second.resume(load_state(tmp_path / "checkpoint-2"))

    def kill(metrics):
        raise _Killed

    with pytest.raises(_Killed):
        second.run(2, 4, kill)
    assert latest(tmp_path).name == "checkpoint-2"
    assert [line["step"] for line in lines(tmp_path)][:2] == [1, 2]
    assert load_state(tmp_path / "checkpoint-4.left").step == 4
    assert not (tmp_path / "checkpoint-4.left" / "older").exists()
    assert not (tmp_path / "timeline.json").exists(), "what an earlier run measured is not this one's"


def test_checkpoints_are_set_aside_before_the_log_is_cut(tmp_path, monkeypatch):
    training(tmp_path, Policy(), save_every=1).run(0, 3, lambda metrics: None)

    def cut(path, n_steps):
        assert latest(tmp_path).name == "checkpoint-1"
        raise _Killed

    monkeypatch.setattr(trainer, "keep_lines_up_to", cut)
    with pytest.raises(_Killed):
        training(tmp_path, Policy()).run(1, 3, lambda metrics: None)
    assert len(lines(tmp_path)) == 3
