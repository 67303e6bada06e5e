"""Does `report` write what it should, and refuse what is no plan and no run?"""

import json
import os

import pytest
from click.testing import CliRunner

from penstock.cli import run_files as cli_run_files
from penstock.cli.main import cli
from planner.show.report import report
from planner.show.report_run import LoggedRun, read_log
from runtime.plan import PlanFile
from tests.report_cases import Page, line, make_plan, make_run, page_of


def invoke(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


def refused(result):
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    return make_plan(tmp_path_factory.mktemp("plan") / "plan.json")


@pytest.fixture(scope="module")
def ran(planned, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), planned)


def test_the_command_writes_a_page_and_prints_one_line(planned, ran, tmp_path):
    done = invoke("report", planned, ran, "-o", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert done.stderr.startswith(f"wrote {tmp_path / 'r.html'} (")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize("missing", ["timeline.json", "metrics.jsonl", "samples.jsonl"])
def test_what_a_run_did_not_leave_is_absent_and_not_an_empty_box(planned, ran, tmp_path, missing):
    for path in ran.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    page = page_of(planned, tmp_path)
    assert [t["name"] for t in page.data["tracks"]] == ["predicted"] + ["measured"] * (missing != "timeline.json")
    assert bool(page.data["curves"]) == (missing != "metrics.jsonl")
    assert ("Hello there, 30." in page.text) == (missing != "samples.jsonl")
    assert ("no timeline.json" in page.text) == (missing == "timeline.json")


def test_of_a_run_that_was_killed_there_is_a_page_and_no_trace_and_both_say_when_its_timeline_is_written(planned, ran, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes((ran / "metrics.jsonl").read_bytes())
    assert invoke("report", planned, run, "-o", tmp_path / "r.html").exit_code == 0
    page = page_of(planned, run)
    assert page.data["curves"]
    assert "no timeline.json, which is written when a run ends" in page.text
    assert "no timeline.json, which a run writes at its end" in refused(invoke("report", planned, run, "-o", tmp_path / "r.json"))
    assert not (tmp_path / "r.json").exists()


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    ("timeline", "said"),
    [
        ("{", "not the timeline of a run"),
        ('{"spans": [{"op": 99999999, "step": 0, "start_s": 0.0, "end_s": 1.0}]}', "another plan"),
        ('{"spans": [{"op": -1, "step": 0, "start_s": 0.0, "end_s": 1.0}]}', "another plan"),
        ('{"spans": [{"op": 1, "step": -1, "start_s": 0.0, "end_s": 1.0}]}', "cannot be"),
        ('{"spans": [{"op": 1, "step": 0, "start_s": 2.0, "end_s": 1.0}]}', "cannot be"),
        ('{"spans": [{"op": 1, "step": 0, "start_s": 0.0, "end_s": NaN}]}', "cannot be"),
        ('{"spans": [{"op": 1, "step": 0, "start_s": 0.0, "end_s": Infinity}]}', "cannot be"),
    ],
)
@pytest.mark.parametrize("output", ["r.html", "r.json"])
def test_a_timeline_that_cannot_be_is_refused_in_one_line(planned, tmp_path, timeline, said, output):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "timeline.json").write_text(timeline)
    error = refused(invoke("report", planned, tmp_path / "run", "-o", tmp_path / output))
    assert said in error
    assert not (tmp_path / output).exists()


def test_a_folder_of_no_run_a_pipe_and_a_name_of_no_kind_are_refused(planned, tmp_path):
    page = tmp_path / "r.html"
    assert "no timeline.json and no metrics.jsonl" in refused(invoke("report", planned, tmp_path, "-o", page))
    assert "no such folder" in refused(invoke("report", planned, tmp_path / "none", "-o", page))
    for name in ("metrics.jsonl", "samples.jsonl"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert "a pipe" in refused(invoke("report", planned, folder, "-o", page))
    for name in ("r.txt", "r", "r.html.gz"):
        assert ".html" in refused(invoke("report", planned, "-o", tmp_path / name))
    assert not page.exists()


def test_the_speed_of_a_stand_in_is_not_taken_for_the_plans(planned):
    file = PlanFile.read(planned)
    log = read_log([line(step=n, loss=1.0, step_s=100.0, tokens=16, tokens_per_s=0.16, lr=1.0) for n in range(1, 9)])
    page = Page(report(file, "p.json", LoggedRun(None, log)))
    assert "stand-in" in page.text
    assert "Measured:" not in page.text
    assert [curve["id"] for curve in page.data["curves"]] == ["loss", "rate"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda fields: fields["policy"].update(save={"all": [999]}),
        lambda fields: fields["ops"].reverse(),
        lambda fields: fields["ops"].clear(),
        lambda fields: fields["arenas"].clear(),
        lambda fields: fields["profile"].update(device={}),
        lambda fields: fields["claim"].update(prediction={}),
        lambda fields: fields["claim"]["certificate"].update(policy_bound_s="<b>"),
    ],
)
@pytest.mark.parametrize("output", ["r.html", "r.json"])
def test_a_plan_that_was_damaged_is_refused_in_one_line(planned, tmp_path, edit, output):
    fields = json.loads(planned.read_text())
    edit(fields)
    (tmp_path / "bad.json").write_text(json.dumps(fields))
    done = invoke("report", tmp_path / "bad.json", "-o", tmp_path / output)
    if output == "r.json" and done.exit_code == 0:
        assert fields["claim"]["certificate"]["policy_bound_s"] == "<b>"  # a trace shows no certificate
        return
    assert "bad.json" in refused(done)
    assert not (tmp_path / output).exists()


def test_of_a_log_longer_than_can_be_read_the_end_is_drawn(planned, tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line(step=n, loss=1.0) for n in range(1, 1001)))
    monkeypatch.setattr(cli_run_files, "MAX_LOG_BYTES", 5000)
    run = cli_run_files.read_logged_run(tmp_path, 10)
    assert run.log.steps[-1] == 1000
    assert run.log.steps[0] > 1
    assert run.log.steps == list(range(run.log.steps[0], 1001))
    assert (run.log.is_whole, run.log.n_damaged) == (False, 0)


def test_a_line_without_end_takes_no_more_memory_than_a_long_one(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_bytes(line(step=1, loss=1.0) + b"x" * 100_000 + b"\n" + line(step=2, loss=1.0))
    monkeypatch.setattr(cli_run_files, "MAX_LINE_BYTES", 1000)
    with cli_run_files._end_of(tmp_path / "metrics.jsonl") as (lines, _):
        assert max(len(one) for one in lines) <= 1000
    assert cli_run_files.read_logged_run(tmp_path, 10).log.steps == [1, 2]
