"""GPU benchmark with tiny stages on a CPU: stages, harness and page."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.expected_plans import GPU_RATES, SHIPPED, UPDATED_PER_S, expected_fields
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.expected import EXPECTED
from benchmarks.gpu.harness import ARCHIVE, FAILED, FINISHED, INTERRUPTED, SKIPPED, STREAM, Harness, Results
from benchmarks.gpu.host import SIZES
from benchmarks.gpu.packages import missing
from benchmarks.gpu.page import lines
from benchmarks.gpu.smoke import POLICIES, smoke
from benchmarks.gpu.stages import CALL_S, CALLS, FULL, PAGE, STAGES, Request, Stage
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.runtime.plan.workload import Saved
from tests.forks import Forked, is_alive
from tests.tour import ROOT

TINY = ["--device", "cpu", "--tiny"]
NAMES = [stage.name for stage in STAGES]
# Lines with figures on a CPU, too
DECIDED = {
    ("facts", "cores"), ("kernels", "kernel"), ("kernels", "loss"), ("kernels", "head's weight gradient"), ("kernels", "unpack"),
    ("kernels", "product in fp8"), ("kernels", "quantise"), ("kernels", "transpose"), ("kernels", "layer in fp8"),
    ("kernels", "update"), ("probe", "measured"), ("batch-64", "measured"), ("batch-64", "update alone"), ("batch-64", "profile"),
    ("lora", "measured"), ("tests-of-kernels", "measured"),
}  # fmt: skip


@pytest.mark.slow
def test_a_tiny_run_goes_through_all_stages_and_retries_failures(tmp_path, monkeypatch):
    """Stages are forked; a retry starts new processes."""
    results = tmp_path / "results"
    with monkeypatch.context() as forks:
        forks.setattr("benchmarks.gpu.harness.subprocess", SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired))
        code = main([*TINY, "--home", str(tmp_path), "--fail", "host"])
    stream = Results(results)
    expected = dict.fromkeys([*NAMES, PAGE.name], FINISHED) | {"host": FAILED, "megatrain": SKIPPED}
    expected |= {stage.name: SKIPPED for stage in STAGES if not stage.in_tiny}
    if missing(["deepspeed"]):
        expected["zero3"] = SKIPPED
    assert stream.outcomes() == expected
    assert code == 1
    reasons = {row["stage"]: row["said"] for row in stream.rows() if row["what"] == "ended"}
    assert "made to fail on purpose" in reasons["host"]
    measured = {row["stage"]: row for row in stream.rows() if row["what"] == "measured"}
    for name in ("eight-layers", "batch-4", "batch-16", "batch-64"):
        row = measured[name]
        assert row["step_s"] > 0.0
        assert row["error_fraction"] == pytest.approx(row["step_s"] / row["predicted_s"] - 1)
        assert row["is_probed"] == (name != "batch-64"), "this alone is not planned with the profile probed"
    tried = [row for row in stream.rows() if row["what"] == "tried" and row["stage"] == "fsdp2"]
    assert [(row["batch_size"], row["micro_batch"]) for row in tried][:2] == [(1, 1), (2, 2)]
    assert all(row["n_layers"] == 2 and row["tokens_per_s"] > 0.0 for row in tried)
    decided = [row for row in stream.rows() if "decision" in row]
    assert {(row["stage"], row["what"]) for row in decided} == DECIDED
    assert all((row["expected"], row["decision"]) in EXPECTED.values() for row in decided)
    files = sorted(path.name for path in results.iterdir())
    assert files == ["page.md", "profile.json", STREAM, ARCHIVE], "few files come back from a machine that is lent"
    with tarfile.open(results / ARCHIVE) as tar:
        assert {STREAM, "logs/host.log", "logs/smoke-llama.log", "plans/batch-64.plan.json", "page.md"} <= {*tar.getnames()}
    page = (results / "page.md").read_text()
    assert "| host | failed |" in page
    assert "| batch-64 | update alone |" in page

    n_rows = len(stream.rows())
    command = [sys.executable, "-m", "benchmarks.gpu", *TINY, "--home", tmp_path]
    again = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    begun = [row["stage"] for row in stream.rows()[n_rows:] if row["what"] == "began"]
    assert begun == [name for name in [*NAMES, PAGE.name] if expected[name] != FINISHED or name == PAGE.name]
    assert (again.returncode, stream.outcomes()["host"]) == (0, FINISHED), again.stderr
    assert "| host | done |" in (results / "page.md").read_text()


# Needs the standard library only, so that stages start fast. One test interrupts the stage `second`.
STAGES_OF_CODE = """
import os, sys
from pathlib import Path
from benchmarks.gpu.harness import Harness, Results, go_on
from benchmarks.gpu.stages import Stage

NOTES = "from pathlib import Path; from benchmarks.gpu.harness import Results; note = Results(Path({!r})).note; "

def harness_of(home, codes):
    def command(stage, limit_s):
        return [sys.executable, "-c", NOTES.format(str(home / "results")) + codes.get(stage.name, "")]

    stages = [Stage(name, 1, 30.0, "") for name in codes]
    return Harness(home, go_on(home, home / "results"), command, lambda stage: dict(os.environ)), stages
"""
_names: dict = {}
exec(STAGES_OF_CODE, _names)
harness_of: Callable[[Path, dict[str, str]], tuple[Harness, list[Stage]]] = _names["harness_of"]


@pytest.mark.slow
def test_a_stage_over_its_limit_is_killed_with_its_children(tmp_path):
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); note('slow', 'child', pid=p.pid); time.sleep(60)"
    harness, stages = harness_of(tmp_path, {"slow": child, "next": "note('next', 'measured', x=1)"})
    stages[0] = replace(stages[0], limit_s=2.0)
    assert harness.perform_all(stages, 100.0) == {"slow": FAILED, "next": FINISHED}
    rows = harness.stream.rows()
    (reason,) = [row["said"] for row in rows if row["stage"] == "slow" and row["what"] == "ended"]
    assert reason.startswith("over its limit of 2 s")
    assert {"stage": "next", "what": "measured", "x": 1}.items() <= next(r for r in rows if r["what"] == "measured").items()
    (pid,) = [row["pid"] for row in rows if row["what"] == "child"]
    assert not is_alive(pid)


def test_failed_stages_are_recorded_and_alone_tried_again(tmp_path):
    codes = {"good": "note('good', 'measured')", "bad": "print('x'); raise ValueError('no such device')"}
    codes["killed"] = "import os; os.abort()"
    harness, stages = harness_of(tmp_path, codes)
    assert harness.perform_all(stages, 100.0) == {"good": FINISHED, "bad": FAILED, "killed": FAILED}
    reasons = {row["stage"]: row["said"] for row in harness.stream.rows() if row["what"] == "ended"}
    assert reasons["bad"] == "ValueError: no such device"
    assert reasons["killed"].startswith("killed by signal 6")
    harness, stages = harness_of(tmp_path, codes | {"bad": "note('bad', 'measured')"})
    assert harness.perform_all(stages, 100.0) == {"good": FINISHED, "bad": FINISHED, "killed": FAILED}
    assert [row["stage"] for row in harness.stream.rows() if row["what"] == "measured"] == ["good", "bad"]
    log = (tmp_path / "logs" / "bad.log").read_text()
    assert "no such device" in log, "the log of the earlier call is overwritten"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_what_was_flushed(tmp_path, number):
    second = "import os, time; note('second', 'measured', x=2, pid=os.getpid()); time.sleep(60)"
    codes = {"first": "note('first', 'measured', x=1)", "second": second}
    code = f"{STAGES_OF_CODE}\nharness, stages = harness_of(Path({str(tmp_path)!r}), {codes!r})\nharness.perform_all(stages, 100.0)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    stream = Results(tmp_path / "results")
    while not any(row.get("x") == 2 for row in stream.rows()):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(number)
    process.wait(timeout=30)
    assert [row["x"] for row in stream.rows() if row["what"] == "measured"] == [1, 2]
    assert stream.outcomes() == {"first": FINISHED} | ({"second": INTERRUPTED} if number != signal.SIGKILL else {})
    with tarfile.open(tmp_path / "results" / ARCHIVE) as tar:
        assert "logs/first.log" in tar.getnames()
        assert ("logs/second.log" in tar.getnames()) == (number != signal.SIGKILL)
    (pid,) = [row["pid"] for row in stream.rows() if "pid" in row]
    assert is_alive(pid) == (number == signal.SIGKILL)
    if number == signal.SIGKILL:  # the harness cannot catch it, so the stage continues alone
        os.kill(pid, number)


def test_stages_are_functions_and_fit_into_their_calls():
    assert len({*NAMES}) == len(NAMES)
    for stage in (*STAGES, PAGE):
        module, _, function = stage.perform.partition(":")
        assert [*signature(getattr(import_module(f"benchmarks.gpu.{module}"), function)).parameters] == ["request", "note"]
    for call in CALLS.values():
        assert sum(stage.limit_s for stage in STAGES if stage.call == call) <= CALL_S == 540.0
    assert {name for name in NAMES if name in FULL.cases} == {*FULL.cases}
    page = "\n".join(lines([]))
    assert all(f"| {name} | to be measured |" in page for name in NAMES)


def test_every_expected_figure_is_of_a_line_of_a_stage():
    assert {stage for stage, _ in EXPECTED} <= {*NAMES}
    assert {f"update of {gb:g} GB" for gb in SIZES} <= {line for stage, line in EXPECTED if stage == "host"}
    assert all(figure and decision for figure, decision in EXPECTED.values())


def test_expected_rates_are_marked_as_assumed_in_a_copy_of_the_profile():
    shipped, expected = read_profile(SHIPPED), Profile.from_json(expected_fields(), "expected")
    rates = [getattr(expected.device, name) for name in GPU_RATES] + [expected.host.reduce_bytes_per_s]
    rates += [rate for point in expected.host.optimizer for rate in (point.params_per_s, point.params_per_s_under_copies)]
    assert {expected.sources[rate.source].kind for rate in rates} == {"assumed"}
    assert expected.name != shipped.name
    assert expected.optimizer_params_per_s(14) == pytest.approx(UPDATED_PER_S)
    assert read_profile(SHIPPED) == shipped


@pytest.mark.slow
def test_a_policy_that_changes_a_bit_fails_the_smoke(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.smoke.POLICIES", dict(list(POLICIES.items())[:2]))
    original = import_module("benchmarks.gpu.smoke")._trained

    def trained(model_type, policy, kernels, device):
        bits = original(model_type, policy, kernels, device)
        return bits if Saved.ATTENTION not in policy.save else {name: x + 1 for name, x in bits.items()}

    monkeypatch.setattr("benchmarks.gpu.smoke._trained", trained)
    rows, request = [], Request(tmp_path, tmp_path / "results", "cpu", tiny=True, stage="smoke-llama")
    with pytest.raises(RuntimeError, match="2 cases failed or changed bits, the first: llama, eager, attention saved"):
        smoke(request, lambda event, **values: rows.append(values["n_different"]))
    changed = [2, 6]  # indices in: three policies with eager kernels, one with fused pointwise kernels, three with all fused
    assert [i for i, n_different in enumerate(rows) if n_different] == changed
    assert len(rows) == 7
