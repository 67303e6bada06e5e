"""HTML page of a plan or run: content, interaction, and escaping of untrusted text."""

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

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower import arenas
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.search.policies import baseline
from penstock.planner.show import memory
from penstock.planner.show import page as page_file
from penstock.planner.show.run_log import Log, LoggedRun, read_log
from penstock.planner.show.step import predicted_stretch
from penstock.run_files import read_logged_run
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Kind, PlanFile, Semantics
from penstock.runtime.plan.timeline import Span, Timeline
from tests.browser import browse, chromium, run_in
from tests.lanes import mostly_slow
from tests.report_cases import Page, line, page_of, planned, ran, ran_elsewhere, written
from tests.running import penstock, succeeded
from tests.strategies import plans, predicted

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&&lt;{{ 7 * 7 }}\u2028\u202e"


def test_the_page_has_the_numbers_of_the_claim_and_of_the_run():
    page, claim = page_of(planned(), ran()), PlanFile.read(planned()).claim
    step_s, p90_s = claim["prediction"]["step_s"], claim["prediction"]["p90_step_s"]
    for seconds in (step_s, claim["prediction"]["p10_step_s"], p90_s, claim["certificate"]["policy_bound_s"], 1.1 * step_s):
        assert f"{seconds * 1e3:.4g} ms" in page.text
    assert f"+10.0% against the prediction, {'within' if 1.1 * step_s <= p90_s else 'outside'} the interval" in page.text
    assert "the median of 28 steps after warm-up" in page.text
    assert [track["name"] for track in page.data["tracks"]] == ["predicted", "measured"]
    predicted_s, measured_s = (track["length_s"] for track in page.data["tracks"])
    assert measured_s == pytest.approx(1.1 * predicted_s)
    assert [curve["id"] for curve in page.data["curves"]] == ["loss", "speed", "rate"]
    training, held_out = page.data["curves"][0]["lines"]
    assert (training["values"][11], held_out["steps"]) == (None, [10, 20, 30])


def test_a_run_on_another_kind_of_machine_is_named_and_not_compared():
    """The prediction is for a GPU, the run was made on a CPU: no ratio, and a time axis for each."""
    page, compared = page_of(planned(), ran_elsewhere()), page_of(planned(), ran())
    title, on_cpu = page.text.partition(": a run of Penstock")[0], "on CPU, 2 cores <b>"
    assert "planned for rtx4090-desktop (NVIDIA GeForce RTX 4090), measured " + on_cpu in title
    assert page.text.count(on_cpu) >= 6, "in the title, both tiles, the verdict and beside the timeline"
    assert "not comparable with the prediction, which is for rtx4090-desktop" in page.text
    for ratio in ("times the prediction", "against the prediction", "the interval", "a measured step 1"):
        assert ratio not in page.text.partition("Terms on this page")[0]
    predicted_s, measured_s = (track["length_s"] * track["zoom"] for track in page.data["tracks"])
    assert measured_s == pytest.approx(predicted_s)
    assert [track["zoom"] for track in compared.data["tracks"]] == [1.0, 1.0]
    speed, compared_speed = (data["curves"][1] for data in (page.data, compared.data))
    assert "level" in compared_speed.keys() - speed.keys()


def test_a_claim_is_shown_if_simulating_confirms_it():
    file = PlanFile.read(planned())
    assert "no schedule we can express" not in Page(written(PlanFile(file.plan, None))).text.partition("Terms on this page")[0]
    claim = json.loads(json.dumps(file.claim))
    claim["prediction"]["step_s"] /= 2
    text = Page(written(PlanFile(file.plan, claim))).text
    assert "the plan file claims a step of" in text
    assert "gap " not in text.partition("Terms on this page")[0]
    claim["certificate"]["policy_bound_s"] = "<b>"
    with pytest.raises(PlanError, match=r"p.json: claim.certificate.policy_bound_s"):
        written(PlanFile(file.plan, claim))


@settings(max_examples=15)
@given(plans(max_layers=3, max_micro_batches=2))
def test_the_data_of_a_page_are_the_step_of_its_plan(plan):
    page = Page(written(PlanFile(plan, None)))
    assert page.data["ops"] == [str(op) for op in plan.ops]
    (track,) = page.data["tracks"]
    later = track["later"] or [0] * len(track["op"])
    spans = {
        (op, step): (start * track["tick_s"], length * track["tick_s"])
        for op, step, start, length in zip(track["op"], later, accumulate(track["start"]), track["length"], strict=True)
    }
    stretch = predicted_stretch(plan, predicted(plan, Profile.from_json(plan.profile)))
    pieces = {(p.op, p.step): p for p in stretch.within()}
    assert spans.keys() == pieces.keys()
    for key, (start_s, length_s) in spans.items():
        assert start_s == pytest.approx(pieces[key].start_s, abs=track["tick_s"])
        assert length_s == pytest.approx(pieces[key].end_s - pieces[key].start_s, abs=2 * track["tick_s"])


@pytest.mark.slow
def test_a_page_of_ten_thousand_ops_is_below_two_megabytes():
    model, s, profile = read_model("qwen2.5-32b"), Semantics(seq_len=1024, batch_size=64, micro_batch=1), read_profile("gh200")
    workload = build_workload(model, s)
    policy = replace(baseline("megatrain-plus", s, workload), accumulation_group=64)
    plan = lower(model, workload, s, policy, profile.to_json())
    assert len(plan.ops) > 8_000
    text = written(PlanFile(plan, None), LoggedRun(predicted(plan, profile).timeline, Log()))
    assert len(text.encode()) < 2e6
    assert all(len(track["op"]) >= len(plan.ops) for track in Page(text).data["tracks"])
    assert all(len(one["times"]) <= 1000 for one in Page(text).data["memory"])


def test_every_kind_of_op_and_every_arena_has_a_colour():
    folder = Path(page_file.__file__).parent / "page"
    families = (folder / "step.js").read_text().partition("const FAMILIES = [")[2].partition("];\n")[0]
    series = (folder / "memory.js").read_text().partition("const SERIES = {")[2].partition("};")[0]
    held = {*re.findall(r'Arena\(\s*"(\w+)"', inspect.getsource(arenas)), "weights"}
    held |= {memory.SAVED, memory.COMPUTED, memory.CONTEXT, *memory.HOST_PARTS}
    assert {kind for kind in Kind if f'"{kind}"' not in families} == set()
    assert len(held) > 15
    assert {name for name in held if not re.search(rf'(?<!\w)"?{name}"?: \[', series)} == set()


def test_no_name_in_a_file_becomes_a_tag_or_a_script():
    file = PlanFile.read(planned())
    run = read_logged_run(ran(), file.plan)
    good = Page(written(file, run))
    claim = json.loads(json.dumps(file.claim))
    claim["certificate"]["binding"] = HOSTILE[:80]
    profile = file.plan.profile | {"name": HOSTILE, "summary": HOSTILE}
    bad_file = PlanFile(replace(file.plan, model=replace(file.plan.model, name=HOSTILE), profile=profile), claim)
    bad = Page(written(bad_file, run, HOSTILE + "\udcff\x00\x1b[31m"))
    assert set(bad.tags) == set(good.tags)
    assert bad.tags["script"] == good.tags["script"] == 2
    assert bad.attributes == good.attributes
    assert bad.comments == []
    assert bad.scripts[1] == good.scripts[1]
    assert "alert(1)" in bad.text  # shown as text
    assert "{{ 7 * 7 }}" in bad.text
    assert "\u202e" not in bad.text  # bidirectional control characters are escaped
    assert not any(name.startswith("on") or name in ("style", "src", "href") for name in bad.attributes)


def test_the_page_asks_for_nothing_and_names_its_only_script():
    file = PlanFile.read(planned())
    text = written(file, read_logged_run(ran(), file.plan))
    assert not re.findall(r"https?://|//cdn|@import|url\(|\bsrc\s*=|\bhref\s*=|innerHTML|outerHTML|document\.write|eval\(", text)
    page = Page(text)
    policy = next(m["content"] for m in page.meta if m.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind, parts in (("script-src", [page.scripts[1]]), ("style-src", page.styles)):
        ((_, content),) = parts
        assert rules[kind] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert page.scripts[0][0]["type"] == "application/json"


@pytest.mark.parametrize("value", [0, -1.0, 1e308, 1e-308])
def test_a_log_of_impossible_numbers_makes_a_page(value):
    of_step = dict.fromkeys(("loss", "lr", "step_s", "tokens_per_s"), value) | {"tokens": 2048}
    lines = [line({"step": n, **of_step}) for n in range(9)] + [line({"step": 9, "eval_loss": value})]
    run = LoggedRun(Timeline(tuple(Span(0, n, 1.0, 1.0) for n in range(4))), read_log(text.encode() for text in lines))
    assert "Training" in Page(written(PlanFile.read(planned()), run)).text


LONGEST = "tracks[0].rows.get('gpu').pieces.reduce((a, b) => b.to - b.from > a.to - a.from ? b : a)"
USE = f"""
const canvas = document.querySelector('#timeline'), found = {{}}, width = canvas.clientWidth;
canvas.setPointerCapture = () => {{}};
const ink = (selector) => {{
  const c = document.querySelector(selector);
  return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size;
}};
const corner = canvas.getBoundingClientRect(), middleY = corner.top + boxes[0].top + boxes[0].height / 2;
const at = (t) => ({{ clientX: corner.left + xOf(t, width), clientY: middleY, button: 0, bubbles: true }});
const point = (kind, t) => canvas.dispatchEvent(new PointerEvent('pointer' + kind, at(t)));
const words = (selector) => document.querySelector(selector).textContent;
const charts = [1, 2].map((n) => `#memory .chart:nth-child(${{n}}) canvas`);
found.inks = ['#timeline', ...charts, '#loss', '#speed', '#rate'].map(ink);
found.fits = document.documentElement.scrollWidth <= innerWidth;
found.whole = whole;
point('down', whole / 4); point('move', whole / 2); point('up', whole / 2);
found.dragged = [view.from, view.to];
document.querySelector('[data-do=reset]').click();
found.reset = [view.from, view.to];
const longest = {LONGEST}, middle = (longest.from + longest.to) / 2;
point('move', middle);
found.tip = [words('#tip'), data.ops[longest.op]];
const waiting = tracks[0].rows.get('gpu').pieces.find(p => p.to - p.from > whole / 200 && waitsOf(ops[p.op]).size);
const start = (waiting.from + waiting.to) / 2;
point('down', start); point('up', start);
found.chosen = [words('#op'), waiting.op];
return found;
"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
@mostly_slow("folder", [ran_elsewhere, ran])
def test_in_a_browser_every_picture_is_drawn_and_answers(tmp_path, folder):
    page = tmp_path / "report.html"
    succeeded(penstock("report", planned(), folder(), "-o", page))
    state, problems = run_in(page, USE, width=500)
    assert problems == []
    assert state["fits"]
    assert min(state["inks"]) > 3
    total_s = state["whole"]
    assert state["dragged"] == pytest.approx([total_s / 4, total_s / 2], rel=0.02)
    assert state["reset"] == pytest.approx([0, total_s])
    tip, op = state["tip"]
    assert all(word in tip for word in (op, "predicted:", "measured:"))
    text, number = state["chosen"]
    assert text.startswith(f"op {number}: ")
    assert "waits for" in text
    stranger = "<script>document.title = 'stranger'</script><img src=x onerror='1'></main>"
    page.write_text(page.read_text().replace("</main>", stranger))
    dom = browse(page, "--dump-dom")
    assert "<title>stranger" not in dom
    assert 'class="scripted"' in dom  # set by the script of the page
