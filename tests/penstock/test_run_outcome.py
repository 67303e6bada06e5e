"""Progress lines of a run, and reports of steps that differ from the prediction."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.cli.progress import Progress
from penstock.training import trainer
from penstock.training.trainer import Metrics
from tests.lanes import mostly_slow
from tests.running import lines_of, one_line, plan_in, succeeded, train


def test_progress_shows_the_predictions_error_from_step_two_on(capsys):
    """Step one fills the pipeline and has no prediction."""
    plan = SimpleNamespace(semantics=SimpleNamespace(tokens_per_step=1))
    store = SimpleNamespace(plan=plan, device_peak_bytes=lambda: 1_500_000_000)
    of_run = {"plan": plan, "store": store, "first_step": 0, "n_steps": 3, "scale": 1.0, "device": "cuda"}
    metrics = Metrics(1, 2.5, 1.25, 1e-4, 1000, 900, 2.0, 500.0, False, busy_s={"gpu": 1.5, "h2d": 0.5}, predicted_step_s=1.6)
    with Progress(SimpleNamespace(**of_run)) as progress:
        progress.step(metrics)
        progress.step(metrics)
    assert progress.n_done == 1
    first, line = capsys.readouterr().err.splitlines()
    assert line == f"{first}  +25.0% against 1.6 s predicted"
    assert "left 4 s" in line


@mostly_slow("ends", [True, False])
@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        ([3.0, 29.0, 31.0, 40.0], [1.0] * 4, "step 3: the loss is 31, and began at 3"),
        ([3.0, math.nan, math.nan, 3.0], [1.0] * 4, "step 2: the loss is nan, and began at 3"),
        ([3.0] * 4, [1.0, 0.0, 0.0, 0.0], "step 4: the gradient has been exactly 0 for 3 steps"),
        ([0.1, 9.0, 0.1, 9.0], [0.0, 0.0, 1.0, 1.0], None),
    ],
)
def test_a_lost_run_is_said_so_once_and_ends_where_asked(home, monkeypatch, losses, norms, words, ends):
    """No checkpoint is written at its end."""

    def look(self, metrics):
        index = min(metrics.step, 4) - 1
        return looked(self, replace(metrics, loss=losses[index], grad_norm=norms[index]))

    looked = trainer.Watch.look
    monkeypatch.setattr(trainer.Watch, "look", look)
    result = train(home, plan_in(home), *["--stop-if-lost"] * ends, steps=12)
    if ends and words:
        one_line(result, 4, words, "lower --lr")
    else:
        assert succeeded(result).stderr.count("the run is lost") == bool(words)
        assert words is None or f"{words}; the run is lost: lower --lr" in result.stderr
    is_whole = not ends or words is None
    assert (home / "out" / "checkpoint-12").exists() == (len(lines_of(home, "out")) == 12) == is_whole


@pytest.mark.parametrize("may_be_flat", [True, False])
def test_rollouts_of_equal_rewards_are_no_lost_run(may_be_flat):
    watch, flat = trainer.Watch(may_be_flat=may_be_flat), SimpleNamespace(step=1, loss=0.0, grad_norm=0.0)
    assert [watch.look(flat) for _ in range(3)] == [False, False, not may_be_flat]
