"""Does the page of a run work in a real browser?

Screenshots are written to the folder that PENSTOCK_ARTEFACTS names, else among the test's own files.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from tests.browser import Browser, browser, chromium
from tests.report_cases import make_plan, make_run

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
WIDE, NARROW = (1240, 900), (400, 800)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a plan and of a run of it that was a tenth slower, with a log of some steps."""
    folder = tmp_path_factory.mktemp("report")
    plan = make_plan(folder / "plan.json")
    run = make_run(folder / "run", plan)
    done = CliRunner().invoke(cli, ["report", str(plan), str(run), "-o", str(folder / "report.html")])
    assert done.exit_code == 0, done.output
    return folder / "report.html"


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def shown(started, page) -> Iterator[Browser]:
    """The page, opened anew in a wide window. Whatever a test does with it, its script stumbles over nothing."""
    started.problems.clear()
    started.requests.clear()
    started.look(*WIDE)
    started.open(page)
    started.evaluate("document.querySelector('#step').scrollIntoView()")
    started.settle()
    yield started
    assert started.problems == []
    assert [url for url in started.requests if not url.startswith("file:")] == []
    assert len(started.requests) <= 1


def frame(b: Browser, selector: str = "#timeline") -> tuple[float, float, float, float]:
    """Left, top, width and height of an element in the window."""
    found = b.evaluate(f"(r => [r.left, r.top, r.width, r.height])(document.querySelector({selector!r}).getBoundingClientRect())")
    return tuple(found)


def stretch(b: Browser) -> tuple[float, float]:
    """From when to when the timeline shows."""
    data = b.evaluate("({...document.querySelector('#timeline').dataset})")
    return float(data["from"]), float(data["to"])


def words(b: Browser, selector: str) -> str:
    return b.evaluate(f"(e => e.hidden ? '' : e.textContent)(document.querySelector({selector!r}))")


def place(b: Browser, fraction: float, row: int = 0) -> tuple[float, float]:
    """A place in the window: so far along the step that is shown, in the row of a lane and a track."""
    left, top, _, _ = frame(b)
    x, y = b.evaluate(
        f"(w => [xOf(view.from + {fraction} * (view.to - view.from), w), boxes[{row}].top + boxes[{row}].height / 2])"
        "(document.querySelector('#timeline').clientWidth)"
    )
    return left + x, top + y


def ink(b: Browser, selector: str) -> int:
    """How many different colours a canvas shows: one, or none, where nothing was drawn."""
    return b.evaluate(
        f"(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
        f"(document.querySelector({selector!r}))"
    )


def test_every_picture_is_drawn(shown):
    assert ink(shown, "#timeline") > 8
    for i in (1, 2):
        assert ink(shown, f"#memory .chart:nth-child({i}) canvas") > 5
    for name in ("loss", "speed", "rate"):
        assert ink(shown, f"#{name}") > 3
    assert "forward" in words(shown, "#kinds")
    assert "held-out" in words(shown, "#loss-legend")
    assert shown.evaluate("ops.length") == shown.evaluate("tracks[0].times.size")


def test_dragging_zooms_in_and_the_button_shows_the_whole_step_again(shown):
    whole = stretch(shown)
    shown.drag(place(shown, 0.25), place(shown, 0.5))
    start, end = stretch(shown)
    assert start == pytest.approx(whole[1] * 0.25, rel=0.02)
    assert end == pytest.approx(whole[1] * 0.5, rel=0.02)
    left, top, width, height = frame(shown, "[data-do=reset]")
    for kind in ("Pressed", "Released"):
        shown.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=1)
    shown.settle()
    assert stretch(shown) == whole
    assert shown.evaluate("document.querySelector('[data-do=reset]').disabled")


def test_the_wheel_scrolls_the_page_until_the_timeline_is_asked_for(shown):
    whole, at = stretch(shown), place(shown, 0.5)
    shown.mouse("Moved", *at)
    shown.mouse("Wheel", *at, deltaX=0, deltaY=-60)
    shown.settle()
    assert stretch(shown) == whole
    shown.evaluate("document.querySelector('#step').scrollIntoView()")
    at = place(shown, 0.5)
    shown.evaluate("document.querySelector('#timeline').focus({preventScroll: true})")
    shown.mouse("Wheel", *at, deltaX=0, deltaY=-240)
    shown.settle()
    start, end = stretch(shown)
    assert end - start < 0.8 * whole[1]
    assert (start + end) / 2 == pytest.approx(whole[1] / 2, rel=0.05)  # what was under the pointer stays there
    shown.mouse("Wheel", *at, deltaX=0, deltaY=2000)
    shown.mouse("Wheel", *at, deltaX=0, deltaY=2000)
    shown.settle()
    assert stretch(shown) == whole


@pytest.mark.soak
def test_keys_zoom_move_and_show_the_whole_step_again(shown):
    shown.evaluate("document.querySelector('#timeline').focus({preventScroll: true})")
    whole = stretch(shown)
    shown.key("+")
    near = stretch(shown)
    assert near[1] - near[0] == pytest.approx(0.6 * whole[1])
    shown.key("ArrowRight")
    moved = stretch(shown)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    for _ in range(9):
        shown.key("ArrowRight")
    assert stretch(shown)[1] == pytest.approx(whole[1])  # no further than the end
    shown.key("0")
    assert stretch(shown) == whole
    for _ in range(60):
        shown.key("+")
    start, end = stretch(shown)
    assert 0 <= start < end <= whole[1]


def test_hovering_names_the_op_and_its_times_and_leaving_takes_them_away(shown):
    longest = "tracks[0].rows.get('gpu').pieces.reduce((a, b) => b.to - b.from > a.to - a.from ? b : a)"
    at = shown.evaluate(f"(p => [(p.from + p.to) / 2 / whole, p.op])({longest})")
    shown.mouse("Moved", *place(shown, at[0]))
    shown.settle()
    tip = words(shown, "#tip")
    line = shown.evaluate(f"data.ops[{at[1]}]")
    assert line in tip
    assert "predicted:" in tip
    assert "measured:" in tip
    left, _, width, _ = frame(shown, "#tip")
    assert 0 <= left <= left + width <= WIDE[0]
    shown.mouse("Moved", 5, 5)
    shown.settle()
    assert words(shown, "#tip") == ""


def test_clicking_an_op_says_what_it_waits_for_and_n_and_p_go_along_its_lane(shown):
    op = shown.evaluate("tracks[0].rows.get('gpu').pieces.find(p => p.to - p.from > whole / 200 && waitsOf(ops[p.op]).size).op")
    middle = shown.evaluate(f"(p => (p.from + p.to) / 2 / whole)(tracks[0].times.get({op}))")
    at = place(shown, middle)
    for kind in ("Pressed", "Released"):
        shown.mouse(kind, *at, button="left", clickCount=1)
    shown.settle()
    said = words(shown, "#op")
    assert said.startswith(f"op {op}: ")
    assert "waits for" in said
    shown.key("n")
    assert not words(shown, "#op").startswith(f"op {op}: ")
    shown.key("p")
    assert words(shown, "#op") == said


def test_memory_and_curves_say_their_values_under_the_pointer(shown):
    left, top, width, height = frame(shown, "#memory canvas")
    shown.mouse("Moved", left + width * 0.6, top + height / 2)
    shown.settle()
    assert words(shown, "#tip").startswith("device at ")
    assert "GB" in words(shown, "#tip") or "MB" in words(shown, "#tip")
    shown.evaluate("document.querySelector('#loss').scrollIntoView()")
    left, top, width, height = frame(shown, "#loss")
    shown.mouse("Moved", left + width - 11, top + height / 2)
    shown.settle()
    tip = words(shown, "#tip")
    assert tip.startswith("step 30")
    assert f"held-out: {5.5 / 30**0.3:.4f}" in tip


def test_a_loss_that_is_no_number_is_a_gap_in_its_curve(shown):
    """Step 12 of 30. A pixel is the curve's where its blue is."""
    inked = shown.evaluate(
        "(c => { const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return [10.5, 12, 13.5].map(step => Math.round(56 + (step - 1) / 29 * (c.clientWidth - 66)))"
        " .map(x => Array.from({length: c.height}, (_, y) => pixels[4 * (y * c.width + x) + 2]).includes(178)); })"
        "(document.querySelector('#loss'))"
    )
    assert inked == [True, False, True]


@pytest.mark.fast("some")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_wider_than_the_window(shown, size, dark, tmp_path):
    shown.look(*size, dark=dark)
    shown.settle()
    assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark
    assert ink(shown, "#timeline") > 6
    folder = Path(os.environ.get("PENSTOCK_ARTEFACTS") or tmp_path)
    picture = folder / f"report-{'narrow' if size == NARROW else 'wide'}-{'dark' if dark else 'light'}.png"
    shown.screenshot(picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_scripts_the_page_says_it_in_words_and_tables(started, page):
    started.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        started.look(*WIDE)
        started.send("Page.navigate", url=page.resolve().as_uri())
        while started._next().get("method") != "Page.loadEventFired":
            pass
    finally:
        started.send("Emulation.setScriptExecutionDisabled", value=False)
    for empty in ("#timeline", "#op", ".buttons", "#memory", ".charts"):
        assert frame(started, empty)[3] == 0, empty
    assert frame(started, "#step table")[3] > 100
    assert frame(started, "#waterfall svg")[2] > 100
    started.problems.clear()


@pytest.mark.fast("some")
@pytest.mark.parametrize("values", [(1e16, 1e16 + 2), (-1e308, 1e308), (5e-324, 1e-323), (1e-300, 1e300), (7.0, 7.0)])
def test_numbers_that_cannot_be_told_apart_hold_up_no_browser(started, page, tmp_path, values):
    plan, run = page.parent / "plan.json", tmp_path / "run"
    run.mkdir()
    lines = [{"step": n * 4 * 10**15, "loss": v, "lr": v, "tokens": 2048, "tokens_per_s": v} for n, v in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(cli, ["report", str(plan), str(run), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    started.problems.clear()
    started.open(tmp_path / "r.html")
    assert ink(started, "#loss") > 2
    assert started.problems == []


def test_a_script_that_came_in_from_outside_does_not_run(started, page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        page.read_text().replace("</main>", "<script>window.stranger = 1</script><img src=x onerror='stranger = 2'></main>")
    )
    started.open(broken)
    assert started.evaluate("typeof window.stranger") == "undefined"
    assert any("Content Security Policy" in problem for problem in started.problems)
    started.problems.clear()
