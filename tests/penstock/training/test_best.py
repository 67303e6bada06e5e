"""Best checkpoint and early stopping: the right one, kept; equal after a kill; one line at the end."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.checkpoint.best import BEST_FILE, best_of, read_best
from penstock.checkpoint.checkpoint import latest
from penstock.runtime.errors import CheckpointError
from penstock.settings import EvaluationSettings
from penstock.training import trainer
from penstock.training.run_folder import add_lines
from penstock.training.trainer import Trainer
from penstock.training.validation import Validation
from tests.accidents import forked_to_die
from tests.forks import Forked
from tests.rank_runs import contents, planned, run_to_end, words
from tests.running import lines_of, one_line, penstock, plan_in, succeeded, train
from tests.sessions import lines, resumed, same_state, session_of, steps_of

LOSSES = [5.0, 3.0, 4.0, None, 2.0, 2.5, 2.4, 2.3, 9.0, 9.0]  # after step 1, 2, ...; None: not finite


def course(values, **settings):
    lines = [{"step": 0, "eval_loss": 0.1, "eval_accuracy": 1.0}, {"step": 1, "loss": 0.0}]  # no evaluation with a checkpoint
    lines += [{"step": i + 1, "eval_loss": v, "eval_accuracy": v} for i, v in enumerate(values)]
    best, n = best_of(lines, EvaluationSettings(**settings))
    return (None if best is None else best.step), n


def test_the_best_evaluation_and_the_number_since_the_last_gain():
    assert course(LOSSES, patience=3) == (5, 5)
    assert course(LOSSES[:3], best="accuracy") == (1, 2)
    assert course([3.0, 2.9, 2.8, 2.7, 2.4], patience=9, min_gain=0.25) == (5, 0), "gains add up until they count"
    assert course([3.0, 2.9, 2.8], patience=9, min_gain=0.25) == (3, 2)
    assert course([None, None], best="loss") == (None, 2)
    assert course(LOSSES) == (None, 0), "not asked for"


def test_evaluations_on_other_data_are_not_compared():
    lines = [{"step": n, "eval_loss": loss, "held_out": data} for n, loss, data in ((1, 1.0, "a"), (2, 3.0, "b"), (3, 2.0, "b"))]
    assert best_of(lines, EvaluationSettings(best="loss"), "b")[0].step == 3
    assert best_of(lines, EvaluationSettings(best="loss"), "a")[0].step == 1
    assert best_of(lines, EvaluationSettings(patience=9), "c") == (None, 0)


def run(folder, n_steps=10, **fields):
    """Train with evaluations of LOSSES after each step, or resume."""
    session = session_of(folder, **fields)
    if latest(folder) is not None:
        session = resumed(session)
    evaluation = EvaluationSettings(every=1, patience=3)
    request = replace(session.inputs.request, settings=replace(session.settings, evaluation=evaluation))
    session = replace(session, n_steps=n_steps, inputs=replace(session.inputs, request=request))

    def perform(step):
        add_lines(folder / "metrics.jsonl", [{"step": step, "eval_loss": LOSSES[step - 1]}])

    Trainer(session, validations=[Validation("metrics.jsonl", "eval_loss", perform)]).train()
    return session


def die(folder, die_at, fields):
    """Kill a run after an evaluation is logged, before its checkpoint is written."""
    forked_to_die(lambda: run(Path(folder), **fields), (trainer, "best_of"), die_at)


KILLS = [(5, {"every": 2, "keep": 1}), (7, {"every": 3, "background": False}), (8, {"every": 1})]  # step, checkpoints


@pytest.mark.parametrize(("die_at", "fields"), KILLS)
def test_a_killed_run_has_the_best_and_the_end_of_an_uninterrupted_one(tmp_path, no_fsync, die_at, fields):
    died = f"from tests.penstock.training.test_best import die; die({str(tmp_path / 'killed')!r}, {die_at}, {fields})"
    assert Forked([sys.executable, "-c", died]).wait(120) == 0
    assert lines(tmp_path / "killed")[-1] == {"step": die_at, "eval_loss": LOSSES[die_at - 1]}
    whole = run(tmp_path / "whole", **fields)
    again = run(tmp_path / "killed", **fields)
    assert same_state(again, whole)
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        assert (best := read_best(folder)) is not None
        assert (best.step, best.value, latest(folder).name) == (5, 2.0, "checkpoint-8"), "three evaluations after the best"
        assert {5, 8} <= {*steps_of(folder)} <= {5, 8} | {s for s in range(9) if "keep" not in fields and s % fields["every"] == 0}
    with pytest.raises(CheckpointError, match=r"holds step 8, and its last 3 evaluations brought no gain; .* higher --patience$"):
        run(tmp_path / "killed", **fields)


def test_a_log_without_the_best_evaluation_is_refused(tmp_path, no_fsync):
    run(tmp_path, n_steps=6, every=1)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the evaluation that best.json names \(loss 2.0000 after step 5\); "):
        run(tmp_path, every=1)
    (tmp_path / BEST_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"best.json: not written by a run; remove it"):
        run(tmp_path, every=1)


FLAGS = ("--eval-every", 1, "--patience", 2, "--min-gain", 100, "--keep", 1)  # no gain is as large: the first is the last


def test_the_command_ends_early_with_0_and_says_the_best(home):
    held_out = ("--eval-data", home / "data" / "b.txt")
    result = succeeded(train(home, plan_in(home), *held_out, *FLAGS, "--best", "perplexity", steps=9))
    assert "no gain in perplexity in 2 evaluations: the run ends after step 3 of 9" in result.stderr.splitlines()
    values = {line["step"]: line["eval_perplexity"] for line in lines_of(home, "out") if line.get("step") and "eval_loss" in line}
    step = min(values, key=values.__getitem__)
    assert f"best: perplexity {values[step]:.4f} after step {step}: {home}/out/checkpoint-{step}" in result.stdout.splitlines()
    assert json.loads((home / "out" / BEST_FILE).read_text()) == {"metric": "perplexity", "step": step, "value": values[step]}
    succeeded(penstock("report", home / "plan.json", home / "out", "-o", home / "page.html"))
    assert f"Best checkpoint: perplexity {values[step]:.4f} after step {step}." in (home / "page.html").read_text()
    for flags, message in (
        (("--best", "loss"), "evaluation.best does nothing without evaluation.data"),
        ((*held_out, "--patience", 2), "evaluation.patience does nothing without evaluation.data and every"),
        ((*held_out, "--min-gain", 1), "evaluation.min_gain does nothing without evaluation.patience"),
        ((*held_out, "--best", "accuracy"), "evaluation.best: accuracy is not reported by evaluations of this"),
    ):
        one_line(train(home, home / "plan.json", *flags, out="other"), 2, message)


def test_a_resumed_run_compares_on_its_own_data_or_names_no_best(home):
    plan, looks = plan_in(home), ("--eval-every", 1, "--best", "loss")
    first, other = (("--eval-data", home / "data" / name) for name in ("b.txt", "a.txt"))
    succeeded(train(home, plan, *first, *looks, steps=2))
    result = succeeded(train(home, plan, *other, *looks, "--resume", steps=4))
    assert "other held-out data than before: the best is that of evaluations from now on, without 2 earlier ones" in result.stderr
    assert read_best(home / "out").step > 2
    result = succeeded(train(home, plan, *first, "--resume", steps=5))
    assert "evaluation.best is not set: best.json is removed" in result.stderr
    assert read_best(home / "out") is None


def test_all_ranks_stop_at_the_same_step_with_the_bits_of_one(home):
    looks = ("--eval-data", home / "data" / "b.txt", *FLAGS)
    done = run_to_end(words(home, planned(home, 2), *looks, steps=9))
    assert done.returncode == 0, done.stderr
    assert "the run ends after step 3 of 9" in done.stderr
    succeeded(penstock(*words(home, planned(home, 1), *looks, out="alone", steps=9)))
    assert steps_of(home / "out") == steps_of(home / "alone")
    assert read_best(home / "out") == read_best(home / "alone")
    assert contents(latest(home / "out")) == contents(latest(home / "alone"))
