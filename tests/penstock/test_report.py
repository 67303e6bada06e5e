"""Command `penstock report` writes a page or a trace, and rejects other files in one line."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from penstock.runtime.plan import PlanFile
from tests.report_cases import page_of, planned, ran
from tests.running import one_line, penstock


def report(*args):
    return penstock("report", *args)


def refused(*args, output):
    result = report(*args, "-o", output)
    one_line(result, 2)
    assert not output.exists()
    return result.stderr


def test_a_page_or_a_trace_is_written_and_one_line_printed(tmp_path):
    for name in ("r.html", "r.json"):
        result = report(planned(), ran(), "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        assert result.stderr.startswith(f"wrote {tmp_path / name} (")
        assert result.stderr.count("\n") == 1
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    events = json.loads((tmp_path / "r.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"predicted", "measured"}
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "r.json"}


@pytest.mark.parametrize("missing", ["timeline.json", "metrics.jsonl"])
def test_a_file_that_a_run_did_not_leave_is_no_empty_box(tmp_path, missing):
    """Running or killed runs have no such file."""
    run = tmp_path / "run"
    run.mkdir()
    for path in ran().iterdir():
        if path.name != missing:
            (run / path.name).write_bytes(path.read_bytes())
    page = page_of(planned(), run)
    assert [t["name"] for t in page.data["tracks"]] == ["predicted"] + ["measured"] * (missing != "timeline.json")
    assert bool(page.data["curves"]) == (missing != "metrics.jsonl")
    assert ("no timeline.json" in page.text) == (missing == "timeline.json")
    if missing == "timeline.json":
        assert "timeline.json: cannot be read (No such file or directory)" in refused(planned(), run, output=tmp_path / "r.json")


@pytest.mark.parametrize(
    ("timeline", "message"),
    [
        ("{", "not the timeline of a run"),
        ('{"spans": [{"op": 99999999, "step": 0, "start_s": 0.0, "end_s": 1.0}]}', "another plan"),
        ('{"spans": [{"op": 1, "step": 0, "start_s": 2.0, "end_s": 1.0}]}', "impossible"),
    ],
)
def test_a_damaged_timeline_is_refused(tmp_path, timeline, message):
    (tmp_path / "timeline.json").write_text(timeline)
    for name in ("r.html", "r.json"):
        assert message in refused(planned(), tmp_path, output=tmp_path / name)


def test_a_run_of_another_plan_is_refused(tmp_path):
    """The plan in the folder is compared, even if the timeline fits; the predicted machine is not compared."""
    run, file = tmp_path / "run", PlanFile.read(planned())
    shutil.copytree(ran(), run)
    for sizes, profile, code in (({}, file.plan.profile | {"name": "corrected"}, 0), ({"seq_len": 256}, file.plan.profile, 2)):
        changed_plan = replace(file.plan, semantics=replace(file.plan.semantics, **sizes), profile=profile)
        PlanFile(changed_plan, None).write(run / "run-plan.json")
        for name in ("r.html", "r.json"):
            result = report(planned(), run, "-o", tmp_path / name)
            assert result.exit_code == code, result.output
    one_line(result, 2, "a run of another plan; give the plan that it performed, ")


def test_a_folder_of_no_run_and_an_unknown_suffix_are_refused(tmp_path):
    page = tmp_path / "r.html"
    assert "no timeline.json and no metrics.jsonl" in refused(planned(), tmp_path, output=page)
    assert "no such folder" in refused(planned(), tmp_path / "none", output=page)
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "a pipe or device" in refused(planned(), tmp_path, output=page)
    assert ".html" in refused(planned(), output=tmp_path / "r.txt")
    assert "overwritten" in report(planned(), "-o", planned()).stderr
