"""Pages of `compare` and `fits`: every machine and number of the answer, labels that do not overlap, hostile names as text."""

from dataclasses import replace
from itertools import combinations
from math import log
from random import Random

import pytest

from penstock.planner.show.compare import COLUMNS, Candidate
from penstock.planner.show.fits import Fit
from penstock.planner.show.machine_pages import compare_page, fits_page
from penstock.planner.show.price import hourly
from penstock.runtime.units import GB
from tests.browser import chromium, run_in
from tests.planner.test_compare import H200, SEMANTICS, alone
from tests.planner.test_page import HOSTILE
from tests.report_cases import Page

READ = """
const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const all = (selector, tell) => [...document.querySelectorAll('#scatter ' + selector)].map(tell);
const tick = (e) => [Number(e.dataset.value), (box(e)[0] + box(e)[2]) / 2, (box(e)[1] + box(e)[3]) / 2];
return {
  texts: all('text', (e) => [e.textContent, box(e)]),
  labelled: all('.label', (e) => e.dataset.machine),
  marks: all('.mark', (e) => [e.dataset.machine, e.classList[1], (box(e)[0] + box(e)[2]) / 2, (box(e)[1] + box(e)[3]) / 2]),
  x: all('.tick.x', tick).map(([value, x]) => [value, x]), y: all('.tick.y', tick).map(([value, , y]) => [value, y]),
  isWithin: document.documentElement.scrollWidth <= innerWidth,
};
"""


def crowd(n: int) -> list[Candidate]:
    """Return machines of similar speeds and prices: some without a price, one with a hostile name, one that does not fit."""
    random, base = Random(3), alone(H200)
    refused = alone(H200.with_memory(None, 4 * GB))
    machines = [replace(refused, machine="small")]
    for i in range(n):
        step_s = base.speed.predicted.step_s * random.choice([1, 1.02, 1.1, 3])
        times = {"step_s": step_s, "p10_step_s": 0.9 * step_s, "p90_step_s": 1.2 * step_s, "tokens_per_s": 512 / step_s}
        hour = replace(base.hourly, rent_usd=random.choice([None, 1.0, 1.01, 2.0]), machine_usd=random.choice([None, 0.9, 1.5]))
        speed = replace(base.speed, predicted=replace(base.speed.predicted, **times))
        machines.append(Candidate(f"machine-{i}" if i else HOSTILE, hour, speed, None))
    return sorted(machines, key=Candidate.rank)


def written(ranked: list[Candidate]) -> str:
    answer = {"model": HOSTILE, "machines": [entry.to_json() for entry in ranked]}
    return compare_page(answer, ranked, tuple(COLUMNS), [entry.row() for entry in ranked], SEMANTICS, ["a remark"], "today")


def test_a_page_has_each_machine_and_reason_and_no_name_becomes_a_tag() -> None:
    ranked = crowd(6)
    page = Page(written(ranked))
    assert [machine["machine"] for machine in page.data["machines"]] == [entry.machine for entry in ranked]
    (refusal,) = [entry.refusal for entry in ranked if entry.refusal is not None]
    assert f"small {refusal.in_words}" in page.text
    assert "a remark" in page.text
    for cell in {cell for entry in ranked for cell in entry.row() if entry.machine != HOSTILE}:
        assert cell in page.text
    assert (page.tags["script"], page.tags["img"], page.comments) == (2, 0, [])
    assert not any(name.startswith("on") or name in ("style", "src", "href") for name in page.attributes)


@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("n", "width"), [(3, 1240), (30, 1240), (30, 500)])
def test_labels_do_not_overlap_and_marks_are_at_the_numbers(tmp_path, n, width):
    ranked, page = crowd(n), tmp_path / "c.html"
    page.write_text(written(ranked))
    shown, problems = run_in(page, READ, width=width)
    assert problems == []
    assert shown["isWithin"]
    fitting = {entry.machine: entry for entry in ranked if entry.speed is not None}
    assert sorted(shown["labelled"]) == sorted(fitting)
    for (name, a), (other, b) in combinations(shown["texts"], 2):
        assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1]), f"{name} overlaps {other}"
    ways = ("rented", "bought")
    prices = {(name, way): usd for name, c in fitting.items() for way, usd in zip(ways, c.per_million(), strict=True) if usd}
    unpriced = {name for name, c in fitting.items() if c.per_million() == (None, None)}
    assert sorted((name, way) for name, way, *_ in shown["marks"]) == sorted([*prices, *((name, "unpriced") for name in unpriced)])
    for name, way, x, y in shown["marks"]:
        assert y == pytest.approx(place(shown["y"], fitting[name].tokens_per_s), abs=1.5)
        if way != "unpriced":
            assert x == pytest.approx(place(shown["x"], prices[name, way]), abs=1.5)


def place(ticks: list[list[float]], value: float) -> float:
    """Interpolate the position of a value on the axis: linear if it begins at 0, else logarithmic."""
    scale = (lambda v: v) if ticks[0][0] == 0 else log
    (low, start), (high, end) = ticks[0], ticks[-1]
    return start + (end - start) * (scale(value) - scale(low)) / (scale(high) - scale(low))


def test_a_grid_has_the_largest_model_of_each_memory() -> None:
    hour = hourly(H200)
    fits = [Fit("g", "m", n * GB, "qwen", hour, True, optimizer, *model) for optimizer, n, *model in FITS]
    page = Page(fits_page(fits, ("optimizer", "model"), [("adamw", "qwen-7b")], SEMANTICS, ["left out"], "today"))
    grid = "g family 32 GB m 64 GB m qwen, adamw none fits qwen-7b 1,234 qwen, lion qwen-3b 99 no larger one"
    assert grid in page.text
    assert "estimated" in page.text
    assert "left out" in page.text


FITS = [("adamw", 32), ("adamw", 64, "qwen-7b", 7 * 10**9, 1234.4), ("lion", 32, "qwen-3b", 3 * 10**9, 99.0)]
