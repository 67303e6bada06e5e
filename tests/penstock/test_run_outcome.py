"""The lines of a run's progress, and what it says of steps that differ from the prediction."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.cli import progress as progress_of_a_run
from penstock.cli.progress import Progress
from penstock.training import trainer
from penstock.training.trainer import Metrics
from tests.running import lines_of, one_line, plan_in, succeeded, train


@pytest.mark.parametrize(("step_s", "how"), [(1.5, "50% longer"), (0.6, "40% shorter"), (1.09, None), (0.92, None)])
def test_a_step_unlike_its_prediction_names_the_remedy(step_s, how):
    store = SimpleNamespace(device_name=lambda: None, arenas=SimpleNamespace(host_words=str))
    of_run = {"plan": SimpleNamespace(profile={}), "settings": SimpleNamespace(plan="p.json"), "folder": "out", "saves": False}
    run = SimpleNamespace(device="cpu", is_comparable=True, store=store, **of_run)
    said, others = list(progress_of_a_run._notes(run, step_s - 1, recalibrates=False)), 1
    assert len(said) - others == (0 if how is None else 2)
    if how is not None:
        assert how in said[0]
        assert "penstock run p.json ... --recalibrate" in said[1]
        assert len(list(progress_of_a_run._notes(run, step_s - 1, recalibrates=True))) - others == 1


METRICS = Metrics(1, 2.5, 1.25, 1e-4, 1000, 900, 2.0, 500.0, False, busy_s={"gpu": 1.5, "h2d": 0.5}, predicted_step_s=1.6)


@pytest.mark.parametrize(
    ("metrics", "n_steps", "scale", "expected"),
    [
        (
            METRICS, 3, 1.0,
            "step 1/3  loss 2.5000  norm 1.250  500 tokens/s  lr 0.0001  left 4 s  memory 1.5 GB  gpu 75%  h2d 25%  "
            "+25.0% against 1.6 s predicted",
        ),
        (
            replace(METRICS, skipped=True, predicted_step_s=None, busy_s={}), 3601, 1.0,
            "step 1/3601  loss 2.5000  norm 1.250  500 tokens/s  skipped: not finite  lr 0.0001  left 2 h 0 min  memory 1.5 GB",
        ),
    ],
)  # fmt: skip
def test_a_line_of_progress_has_speed_time_left_and_error(capsys, metrics, n_steps, scale, expected):
    plan = SimpleNamespace(semantics=SimpleNamespace(tokens_per_step=1))
    store = SimpleNamespace(plan=plan, device_peak_bytes=lambda: 1_500_000_000)
    of_run = {"plan": plan, "store": store, "first_step": 0, "n_steps": n_steps, "scale": scale, "device": "cuda"}
    with Progress(SimpleNamespace(**of_run)) as progress:
        progress.step(metrics)
        progress.step(metrics)
    assert progress.n_done == 1
    first, line = capsys.readouterr().err.splitlines()
    assert line == expected
    assert first == expected.partition("  +")[0], "the first step fills the pipeline, which is not predicted"


@pytest.mark.parametrize("ends", [True, False])
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
    """No checkpoint of it is written at its end."""

    def look(self, metrics):
        at = min(metrics.step, 4) - 1
        return looked(self, replace(metrics, loss=losses[at], grad_norm=norms[at]))

    looked = trainer.Watch.look
    monkeypatch.setattr(trainer.Watch, "look", look)
    done = train(home, plan_in(home), *["--stop-if-lost"] * ends, steps=12)
    if ends and words:
        one_line(done, 4, words, "lower --lr")
    else:
        assert succeeded(done).stderr.count("the run is lost") == bool(words)
        assert words is None or f"{words}; the run is lost: lower --lr" in done.stderr
    is_whole = not ends or words is None
    assert (home / "out" / "checkpoint-12").exists() == (len(lines_of(home, "out")) == 12) == is_whole
