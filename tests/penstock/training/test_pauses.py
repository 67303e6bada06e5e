"""Pauses of training: validations run on schedule, or after a resume, and cost no step."""

import json
import threading
from dataclasses import replace

import pytest

from penstock.checkpoint.checkpoint import latest, load_state
from penstock.runtime.errors import CheckpointError
from penstock.runtime.machines.torch_machine import Abandoned
from penstock.runtime.plan import Policy, Update
from penstock.training.session import Session
from penstock.training.trainer import Trainer
from penstock.training.validation import Validation
from tests.sessions import evaluating, lines, resumed, session_of, steps_of, train

pytestmark = pytest.mark.usefixtures("no_fsync")


class Looks:
    """Validation that records its steps and asserts that lanes are idle."""

    def __init__(self, session: Session, **fields) -> None:
        self.session, self.steps, self.others = session, [], set(threading.enumerate())
        self.validation = Validation("metrics.jsonl", "eval_loss", self.perform, **fields)

    def perform(self, step: int) -> None:
        lanes = [t for t in {*threading.enumerate()} - self.others if t.name.startswith("lane")]
        assert not lanes, "lanes are drained"
        self.steps.append(step)
        with (self.session.folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "eval_loss": 1.0}) + "\n")


def looked(session: Session, n_steps: int, every: int | None = None, on_step=lambda metrics: None, **fields) -> list[int]:
    looks = Looks(session := evaluating(session, every), **fields)
    train(session, n_steps, on_step, [looks.validation])
    return looks.steps


@pytest.mark.parametrize(("every", "expected", "background"), [(None, [5], True), (2, [2, 4, 5], False), (5, [5], True)])
def test_validations_come_every_n_steps_and_at_the_end(tmp_path, every, expected, background):
    session = session_of(tmp_path, Policy(update=Update.DEFERRED), every=3, background=background)
    assert looked(session, 5, every) == expected
    assert steps_of(tmp_path) == [3, 5]


def test_a_run_asked_to_end_makes_up_for_its_validation_later(tmp_path):
    session = session_of(tmp_path, every=1)
    assert looked(session, 6, 2, lambda metrics: session.stop.request() if metrics.step == 2 else None) == []
    n_done = len(lines(tmp_path))
    validated = [step for n_steps in (6, 8) for step in looked(resumed(session_of(tmp_path, every=1)), n_steps, n_done)]
    assert validated == sorted({n_done, *(n for n in range(n_done, 9, n_done)), 6, 8}), "each step once"


@pytest.mark.parametrize("background", [True, False])
def test_the_last_checkpoint_precedes_the_last_validation(tmp_path, background):
    """A run killed during the validation loses no step. Earlier validations have this order if lanes are drained to save."""
    named = {}
    session = evaluating(session_of(tmp_path, every=2, background=background), 2)
    note = Validation("metrics.jsonl", "eval_loss", lambda step: named.update({step: (tmp_path / f"checkpoint-{step}").exists()}))
    train(session, 5, validations=[note])
    assert named.keys() == {2, 4, 5}
    assert named[5]
    assert background or all(named.values())


def test_a_validation_before_the_first_step_changes_no_bit(tmp_path):
    """Includes a folder with the log of another model; a resumed run already has the validation."""
    train(session_of(tmp_path / "without"), 2)
    session = session_of(tmp_path / "with", every=1)
    (tmp_path / "with" / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n')
    assert looked(session, 2, first=True) == [0, 2]
    (tmp_path / "with" / "checkpoint-2").rename(tmp_path / "first")
    again = resumed(session_of(tmp_path / "with", every=1), load_state(tmp_path / "with" / "checkpoint-1"))
    assert looked(again, 2, first=True) == [2]
    assert [line["step"] for line in lines(tmp_path / "with")] == [0, 1, 2, 2]
    for name in ("model-00002-of-00004", "optimizer-00001"):
        files = [tmp_path / out / "checkpoint-2" / f"{name}.safetensors" for out in ("with", "without")]
        assert files[0].read_bytes() == files[1].read_bytes()


class _Killed(BaseException): ...


@pytest.mark.parametrize("how", [_Killed, OSError])
def test_a_run_that_broke_in_its_last_validation_lacks_only_that(tmp_path, how):
    def breaks(step: int) -> None:
        raise how

    with pytest.raises(how):
        train(session_of(tmp_path), 3, validations=[Validation("metrics.jsonl", "eval_loss", breaks)])
    timeline = (tmp_path / "timeline.json").read_bytes()
    again = resumed(session_of(tmp_path))
    assert looked(again, 3, on_step=lambda metrics: pytest.fail("a step")) == [3]
    assert (tmp_path / "timeline.json").read_bytes() == timeline
    with pytest.raises(CheckpointError, match=r"holds step 3 already; ask for more than 3 with --steps"):
        Trainer(replace(again, n_steps=3), validations=[Looks(again).validation])


@pytest.mark.parametrize(("background", "stop_step", "every"), [(True, 2, None), (False, 4, 2)])
def test_a_validation_that_is_abandoned_leaves_its_state_saved(tmp_path, background, stop_step, every):
    session = evaluating(session_of(tmp_path, every=every, background=background), 2)
    looks, samples = Looks(session), []

    def abandon(step: int) -> None:
        if step == stop_step:
            session.stop.request()
            raise Abandoned
        looks.perform(step)

    sampling = Validation("samples.jsonl", "prompt", samples.append)
    train(session, 4, validations=[replace(looks.validation, perform=abandon), sampling])
    assert samples == looks.steps == ([2] if stop_step == 4 else [])
    assert latest(tmp_path).name == f"checkpoint-{stop_step}"
    assert looked(resumed(session_of(tmp_path, background=background)), 4, 2) == sorted({stop_step, 4})


def test_no_line_of_a_later_step_is_left_on_resume(tmp_path):
    train(session_of(tmp_path, every=1), 4)
    for step in (3, 4):
        (tmp_path / f"checkpoint-{step}").rename(tmp_path / f"later-{step}")

    def kill(metrics):
        raise _Killed

    with pytest.raises(_Killed):
        train(resumed(session_of(tmp_path), load_state(tmp_path / "checkpoint-2")), 4, kill)
    assert latest(tmp_path).name == "checkpoint-2"
    assert [line["step"] for line in lines(tmp_path)][:2] == [1, 2]
    assert not (tmp_path / "timeline.json").exists(), "an earlier run's"
