"""The lines of a run's progress, and what it says of steps that differ from the prediction."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.cli import outcome as cli_outcome
from penstock.cli import progress
from penstock.cli.progress import LANES, Preparing, Progress
from penstock.training.session import predicted as prediction_of
from penstock.training.trainer import Metrics
from planner.show.facts import Measured
from runtime.plan import Kind, Lane, PlanFile
from runtime.plan.timeline import Timeline
from tests.running import make_home, plan_in


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """A plan and its prediction."""
    plan = PlanFile.read(plan_in(make_home(tmp_path_factory.mktemp("home")))).plan
    return plan, prediction_of(plan)[2]


def slowed(plan, timeline, factors):
    """The timeline, were the ops of some kinds so many times as long; the others stay where they are."""
    return Timeline(
        tuple(
            replace(span, end_s=span.start_s + (span.end_s - span.start_s) * factors.get(plan.ops[span.op].kind, 1.0))
            for span in timeline.spans
        )
    )


def said_of(predicted, factors, step_factor, recalibrates=False, device="cpu"):
    plan, prediction = predicted
    run = SimpleNamespace(plan=plan, device=device, prediction=prediction, settings=SimpleNamespace(plan="p.json"))
    n_steps = len(prediction.timeline.step_ends_s)
    settled = slowed(plan, prediction.timeline.from_step(n_steps - prediction.n_cycle_steps), factors)
    step_s = prediction.step_s * step_factor
    return list(cli_outcome._differences(run, Measured(step_s, step_s, step_s, 3, settled), recalibrates))


def test_a_run_as_predicted_has_no_differences(predicted):
    assert said_of(predicted, {}, 1.0) == []
    assert said_of(predicted, {Kind.BACKWARD: 1.09}, 1.09) == []
    assert said_of(predicted, {Kind.BACKWARD: 0.92}, 0.92) == []


@pytest.mark.parametrize(("factor", "how"), [(1.5, "50% longer"), (0.6, "40% shorter")])
def test_a_longer_run_names_its_ops_and_how_to_plan_anew(predicted, factor, how):
    lines = said_of(predicted, {Kind.BACKWARD: factor, Kind.LOAD: 1.5}, factor)
    assert lines[0].startswith(f"a step took {how} than predicted: gpu backward ")
    assert "load" not in lines[0]
    assert lines[1].startswith("to plan for the machine as it is: penstock run p.json ... --recalibrate profile.json")
    shown = re.search(r"gpu backward (\S+) (\S+) predicted, (\S+) (\S+) measured", lines[0])
    assert shown[2] == shown[4]
    assert float(shown[3]) / float(shown[1]) == pytest.approx(factor, rel=0.02)


def test_waiting_is_not_blamed_on_any_kind_of_op(predicted):
    (line, _) = said_of(predicted, {}, 1.3)
    assert line == "a step took 30% longer than predicted: no kind of op by itself: lanes waited otherwise than predicted"


@pytest.mark.parametrize("more", [{"recalibrates": True}, {"device": "emulated"}], ids=str)
def test_no_advice_to_recalibrate_where_it_is_done_or_emulated(predicted, more):
    assert len(said_of(predicted, {Kind.LOSS: 9.0}, 2.0, **more)) == 1


def test_time_by_kind_adds_up_to_the_time_of_each_lane(predicted):
    plan, prediction = predicted
    by_kind = cli_outcome._busy_by_kind_s(plan, prediction.timeline)
    n_steps = len(prediction.timeline.step_ends_s)
    for lane in Lane:
        total_s = sum(s.end_s - s.start_s for s in prediction.timeline.spans if plan.ops[s.op].lane is lane)
        assert sum(s for (on, _), s in by_kind.items() if on is lane) == pytest.approx(total_s / n_steps)


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
            METRICS, 101, 4.0,
            "step 1/101  loss 2.5000  norm 1.250  2,000 tokens/s  lr 0.0001  left 3 min  memory 1.5 GB  gpu 75%  h2d 25%  "
            "+25.0% against 400 ms predicted",
        ),
        (
            replace(METRICS, skipped=True, predicted_step_s=None, busy_s={}), 3601, 1.0,
            "step 1/3601  loss 2.5000  norm 1.250  500 tokens/s  skipped: not finite  lr 0.0001  left 2 h 0 min  memory 1.5 GB",
        ),
    ],
)  # fmt: skip
def test_a_line_of_progress_has_speed_time_left_and_error(capsys, metrics, n_steps, scale, expected):
    with Progress(0, n_steps, scale, scale, lambda: 1_500_000_000) as progress:
        progress.step(metrics)
        progress.step(metrics)
    assert progress.n_done == 1
    first, line = capsys.readouterr().err.splitlines()
    assert line == expected
    assert first == expected.partition("  +")[0], "the first step fills the pipeline, which nobody predicted"


def test_a_notice_stays_below_the_bar_and_lanes_are_named(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", "80")
    with Progress(0, 3, 1.0, lanes=LANES) as shown:
        shown.step(METRICS)
        shown.tell("finishing the step")
        time.sleep(0.6)
        shown.step(replace(METRICS, step=2))
    *_, bar, more, lanes, told = [line for line in capsys.readouterr().err.splitlines() if line.strip("\x1b[?25hl ")][-4:]
    assert "2/3" in bar
    assert more.startswith("lr")
    assert lanes.startswith("compute 75%  copies in 25%")
    assert re.match(r"finishing the step \(\d s\)", told)


def test_a_pipe_is_told_once_of_a_long_preparation(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LONG_S", 0.0)
    with Preparing() as report:
        for words in ("checking the plan", "loading weights: 1 of 34 blocks", "loading weights: 2 of 34 blocks"):
            report(words)
        time.sleep(1.2)
    assert re.fullmatch(r"loading weights: 2 of 34 blocks  1 s\n", capsys.readouterr().err)


def test_a_terminal_is_told_before_torch_is_imported():
    code = """
import os, sys
from penstock.cli import main, progress
progress.Preparing.__exit__ = lambda self, *_: os.write(1, str("torch" in sys.modules).encode())
main.cli(["run", "--data", "x"])
"""
    room = os.environ | {"FORCE_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=room, capture_output=True, text=True, check=False)
    assert "starting" in done.stderr
    assert done.stdout == "False"
