"""Does the page of a plan, or of a run, say what is so, and can nothing in a file harm who opens it?"""

import base64
import hashlib
import inspect
import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.schema import Profile, read_profile
from penstock.cli import run_files as cli_run_files
from planner.lower import arenas
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.search.space import baseline
from planner.show import report as report_file
from planner.show import report_memory
from planner.show.report import report
from planner.show.report_run import Log, LoggedRun, LoggedSample, read_log
from planner.show.report_step import predicted_stretch
from runtime.errors import PlanError
from runtime.plan import Kind, PlanFile, Semantics
from runtime.plan.timeline import Span, Timeline
from tests.report_cases import Page, line, make_plan, make_run, page_of, predicted
from tests.strategies import plans

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&&lt;\u2028\u202e"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    return make_plan(tmp_path_factory.mktemp("plan") / "plan.json")


@pytest.fixture(scope="module")
def ran(planned, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), planned)


# -- what it says --------------------------------------------------------------------------------------------------------


def test_the_page_of_a_plan_says_what_the_planner_claims(planned):
    page, claim = page_of(planned), PlanFile.read(planned).claim
    step, bound = (f"{s * 1e3:.4g} ms" for s in (claim["prediction"]["step_s"], claim["certificate"]["policy_bound_s"]))
    assert f"A step is predicted to take {step}." in page.text
    assert f"No policy in the space takes less than {bound} a step" in page.text
    assert f"{claim['prediction']['p10_step_s'] * 1e3:.4g} ms and one in ten slower" in page.text
    assert "qwen2.5-0.5b (494 M parameters) on rtx4090-server (NVIDIA GeForce RTX 4090)" in page.text
    assert "ideal compute" in page.text
    assert "10 % more of" in page.text
    assert "of the device's seconds rest on measurements of this device" in page.text


def test_without_a_run_nothing_measured_is_there(planned):
    page = page_of(planned)
    assert not re.search(r"measured \d|Measured:|busy \(measured|held-out|Training", page.text)
    assert [track["name"] for track in page.data["tracks"]] == ["predicted"]
    assert page.data["curves"] == []
    assert page.tags["canvas"] == 1


def test_the_page_of_a_run_says_what_was_measured(planned, ran):
    page, said = page_of(planned, ran), PlanFile.read(planned).claim["prediction"]
    where = "within" if 1.1 * said["step_s"] <= said["p90_step_s"] else "outside"
    assert f"10.0% more than predicted, {where} the interval" in page.text
    assert "the median of 28 steps after warm-up" in page.text
    assert [track["name"] for track in page.data["tracks"]] == ["predicted", "measured"]
    before, after = (track["length_s"] for track in page.data["tracks"])
    assert after == pytest.approx(1.1 * before)
    assert [curve["id"] for curve in page.data["curves"]] == ["loss", "speed", "rate"]
    loss = page.data["curves"][0]
    assert [line["name"] for line in loss["lines"]] == ["training", "held-out"]
    assert loss["lines"][0]["values"][11] is None
    assert loss["lines"][1]["steps"] == [10, 20, 30]
    assert "In 1 step the loss was not finite" in page.text
    assert "Say hello." in page.text
    assert "Hello there, 30." in page.text


def test_a_page_is_the_same_whenever_it_is_made(planned, ran):
    file = PlanFile.read(planned)
    run = cli_run_files.read_logged_run(ran, len(file.plan.ops))
    assert report(file, "p.json", run) == report(file, "p.json", run)


def test_a_plan_without_a_claim_is_drawn_without_a_certificate(planned):
    page = Page(report(PlanFile(PlanFile.read(planned).plan, None), "p.json", None))
    assert "A step is predicted to take" in page.text
    assert "No policy" not in page.text
    assert "P10" not in page.text


def test_a_claim_that_simulating_does_not_bear_out_is_not_repeated(planned):
    file = PlanFile.read(planned)
    claim = json.loads(json.dumps(file.claim))
    claim["prediction"]["step_s"] /= 2
    page = Page(report(PlanFile(file.plan, claim), "p.json", None))
    assert "The plan file claims a step of" in page.text
    assert "No policy in the space" not in page.text


@pytest.mark.fast("some")
@pytest.mark.parametrize("value", [None, "1", -1.0, 0, 1e400, float("nan"), True, [], {}])
@pytest.mark.parametrize("where", ["prediction.step_s", "certificate.policy_bound_s", "prediction"])
def test_a_claim_that_is_none_is_refused_by_its_place(planned, where, value):
    file = PlanFile.read(planned)
    claim = json.loads(json.dumps(file.claim))
    *parents, key = where.split(".")
    (claim[parents[0]] if parents else claim)[key] = value
    with pytest.raises(PlanError, match=f"p.json: claim.{where.split('.')[0]}.*is no number above zero"):
        report(PlanFile(file.plan, claim), "p.json", None)


@settings(max_examples=15)
@given(plans(max_layers=3, max_micro_batches=2))
def test_there_is_a_page_of_every_plan_and_what_is_packed_in_it_is_the_step(plan):
    page = Page(report(PlanFile(plan, None), "p.json", None))
    assert page.data["ops"] == [str(op) for op in plan.ops]
    (track,) = page.data["tracks"]
    later = track["later"] or [0] * len(track["op"])
    found = {
        (op, step): (start * track["tick_s"], length * track["tick_s"])
        for op, step, start, length in zip(track["op"], later, accumulate(track["start"]), track["length"], strict=True)
    }
    profile = Profile.from_json(plan.profile)
    stretch = predicted_stretch(plan, predicted(plan, profile))
    pieces = {(p.op, p.step): p for p in stretch.within()}
    assert found.keys() == pieces.keys()
    for key, (start_s, length_s) in found.items():
        assert start_s == pytest.approx(pieces[key].start_s, abs=track["tick_s"])
        assert length_s == pytest.approx(pieces[key].end_s - pieces[key].start_s, abs=2 * track["tick_s"])


def test_of_a_very_long_plan_what_takes_long_is_left_out_and_said(planned, monkeypatch):
    monkeypatch.setattr(report_file, "MOST_ANALYSED_OPS", 10)
    monkeypatch.setattr(report_file, "MOST_LINES_OPS", 10)
    page, plan = page_of(planned), PlanFile.read(planned).plan
    assert f"Left out: the plan has {len(plan.ops)} ops" in page.text
    assert page.data["ops"] == [op.name for op in plan.ops]


# -- what it can do ------------------------------------------------------------------------------------------------------


def hostile_file(planned):
    file = PlanFile.read(planned)
    profile = file.plan.profile | {"name": HOSTILE, "summary": HOSTILE}
    claim = json.loads(json.dumps(file.claim))
    claim["certificate"]["binding"] = HOSTILE
    return PlanFile(replace(file.plan, model=replace(file.plan.model, name=HOSTILE), profile=profile), claim)


def test_no_name_in_a_file_becomes_a_tag_or_a_script(planned, ran):
    file = hostile_file(planned)
    run = cli_run_files.read_logged_run(ran, len(file.plan.ops))
    bad = Page(report(file, HOSTILE + "\udcff", replace(run, samples=(LoggedSample(3, HOSTILE, HOSTILE + "\udcff\x00\x1b[31m"),))))
    good = page_of(planned, ran)
    assert set(bad.tags) == set(good.tags)
    assert bad.tags["script"] == good.tags["script"] == 2
    assert bad.attributes == good.attributes
    assert bad.comments == []
    assert bad.scripts[1] == good.scripts[1]
    assert "alert(1)" in bad.text  # shown, as words
    assert "\u202e" not in bad.text  # what turns text around is written out
    assert not any(name.startswith("on") or name in ("style", "src", "href") for name in bad.attributes)


@given(
    st.recursive(
        st.none() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_data_in_the_page_is_read_back_and_ends_no_script(value):
    from planner.show.report_html import inline_json

    written = inline_json(value)
    assert json.loads(written) == value
    assert not {"<", ">", "&", "\u2028", "\u2029"} & set(written)


@given(st.text())
def test_text_in_the_page_is_text(words):
    from planner.show.report_html import text

    page = Page(f'<p title="{text(words)}">{text(words)}</p>')
    assert page.tags == {"p": 1}
    assert page.attributes == {"title"}


def test_the_page_asks_for_nothing_and_lets_nothing_else_run(planned, ran):
    file = PlanFile.read(planned)
    written = report(file, "p.json", cli_run_files.read_logged_run(ran, len(file.plan.ops)))
    assert not re.findall(r"https?://|//cdn|@import|url\(|\bsrc\s*=|\bhref\s*=|innerHTML|outerHTML|document\.write|eval\(", written)
    page = Page(written)
    rules = dict(
        rule.strip().split(" ", 1)
        for rule in next(m["content"] for m in page.meta if m.get("http-equiv") == "Content-Security-Policy").split(";")
    )
    assert rules["default-src"] == "'none'"
    for kind, parts in (("script-src", [page.scripts[1]]), ("style-src", page.styles)):
        (_, content), *others = parts
        assert others == []
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert page.scripts[0][0]["type"] == "application/json"


def test_every_place_of_the_page_is_filled(planned):
    assert not re.search(r"\{\{[a-z_]+\}\}", report(PlanFile.read(planned), "p.json", None))


@pytest.mark.parametrize("value", [0, -1.0, 1e308, 1e-308])
def test_a_log_of_impossible_numbers_makes_a_page_all_the_same(planned, value):
    of_step = dict.fromkeys(("loss", "lr", "step_s", "tokens_per_s"), value) | {"tokens": 2048}
    log = read_log([line(step=n, **of_step) for n in range(9)] + [line(step=9, eval_loss=value)])
    spans = tuple(Span(0, n, 1.0, 1.0) for n in range(4))
    page = Page(report(PlanFile.read(planned), "p.json", LoggedRun(Timeline(spans), log)))
    assert ("Measured:" in page.text) == (value == 1e-308)


@pytest.mark.soak
def test_a_plan_of_ten_thousand_ops_makes_a_page_of_less_than_two_megabytes():
    model = read_model("qwen2.5-32b")
    of = Semantics(seq_len=1024, batch_size=64, micro_batch=1)
    workload = build_workload(model, of)
    policy = replace(baseline("megatrain-plus", of, workload), accumulation_group=64)
    plan = lower(model, workload, of, policy, read_profile("gh200").to_json())
    assert len(plan.ops) > 8_000
    spans = predicted(plan, read_profile("gh200")).timeline
    written = report(PlanFile(plan, None), "p.json", LoggedRun(spans, Log()))
    assert len(written.encode()) < 2e6
    data = Page(written).data
    assert [len(track["op"]) >= len(plan.ops) for track in data["tracks"]] == [True, True]
    assert all(len(one["times"]) <= 1000 for one in data["memory"])


def test_every_kind_of_op_and_every_arena_has_a_colour():
    """What has none is drawn in grey beside others in grey, and nobody can tell them apart."""
    page = Path(report_file.__file__).parent / "page"
    families = (page / "step.js").read_text().partition("const FAMILIES = [")[2].partition("];\n")[0]
    series = (page / "memory.js").read_text().partition("const SERIES = {")[2].partition("};")[0]
    held = {*re.findall(r'Arena\(\s*"(\w+)"', inspect.getsource(arenas)), "weights"}
    held |= {report_memory.KEPT, report_memory.COMPUTED, report_memory.CONTEXT, report_memory.RUNTIME, report_memory.OTHER}
    assert {kind for kind in Kind if f'"{kind}"' not in families} == set()
    assert len(held) > 15
    assert {name for name in held if not re.search(rf'(?<!\w)"?{name}"?: \[', series)} == set()
