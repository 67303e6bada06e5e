"""Pages of `compare` and `fits`: every machine and number, labels that do not overlap, hostile names as text."""

from dataclasses import replace
from itertools import combinations
from math import log
from random import Random

import pytest

from penstock.planner.show.compare import Candidate
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
const middle = (e) => [(box(e)[0] + box(e)[2]) / 2, (box(e)[1] + box(e)[3]) / 2];
const all = (selector, tell) => [...document.querySelectorAll('#scatter ' + selector)].map(tell);
return {
  texts: all('text', (e) => [e.textContent, box(e)]), labelled: all('.label', (e) => e.dataset.machine),
  marks: all('.mark', (e) => [e.dataset.machine, e.classList[1], ...middle(e)]),
  prices: all('.prices', (e) => [e.dataset.machine, e.classList[1], box(e)[0], box(e)[2], middle(e)[1]]),
  x: all('.tick.x', (e) => [e.dataset.value, middle(e)[0]]), y: all('.tick.y', (e) => [e.dataset.value, middle(e)[1]]),
  isWithin: document.documentElement.scrollWidth <= innerWidth,
};
"""


def crowd(n: int) -> list[Candidate]:
    """Return machines of similar speeds and prices: some without a price, one with a hostile name, one that does not fit."""
    random, base = Random(3), alone(H200)
    machines = [replace(alone(H200.with_memory(None, 4 * GB)), machine="small")]
    for i in range(n):
        step_s = base.speed.predicted.step_s * random.choice([1, 1.02, 1.1, 3])
        times = {"step_s": step_s, "p10_step_s": 0.9 * step_s, "p90_step_s": 1.2 * step_s, "tokens_per_s": 512 / step_s}
        rent_usd, machine_usd = random.choice([None, 1.0, 1.01, 2.0]), random.choice([None, 0.9, 1.5])
        hour = replace(base.hourly, rent_usd=rent_usd, machine_usd=machine_usd, bought_range=None)
        hour = replace(hour, rent_range=rent_usd and (0.8 * rent_usd, 1.5 * rent_usd))
        speed = replace(base.speed, predicted=replace(base.speed.predicted, **times))
        machines.append(Candidate(f"machine-{i}" if i else HOSTILE, hour, speed, None))
    return sorted(machines, key=Candidate.rank)


def written(ranked: list[Candidate]) -> str:
    answer = {"model": HOSTILE, "machines": [entry.to_json() for entry in ranked]}
    return compare_page(answer, ranked, None, SEMANTICS, ["a remark"], "today")


def test_a_page_has_each_machine_and_reason_and_no_name_becomes_a_tag() -> None:
    ranked = crowd(6)
    page = Page(written(ranked))
    (refusal,) = [entry.refusal for entry in ranked if entry.refusal is not None]
    cells = {cell for entry in ranked if entry.machine != HOSTILE for cell in entry.row()}
    assert {text for text in (*cells, f"small {refusal.in_words}", "a remark") if text not in page.text} == set()
    assert (page.tags["script"], page.tags["img"], page.comments) == (2, 0, [])
    assert not any(name.startswith("on") or name in ("style", "src", "href") for name in page.attributes)


@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("n", "width"), [(3, 1240), (30, 1240), (30, 500)])
def test_labels_do_not_overlap_and_marks_are_at_the_numbers(tmp_path, n, width):
    ranked, page = crowd(n), tmp_path / "c.html"
    page.write_text(written(ranked))
    shown, problems = run_in(page, READ, width=width)
    assert (problems, shown["isWithin"]) == ([], True)
    fitting = {entry.machine: entry for entry in ranked if entry.speed is not None}
    assert sorted(shown["labelled"]) == sorted(fitting)
    for (name, a), (neighbour, b) in combinations(shown["texts"], 2):
        assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1]), f"{name} overlaps {neighbour}"
    prices = {name: dict(zip(("rented", "bought"), c.per_million(), strict=True)) for name, c in fitting.items()}
    priced = {(name, way) for name, by_way in prices.items() for way, usd in by_way.items() if usd is not None}
    unpriced = {(name, "unpriced") for name in fitting.keys() - {name for name, _ in priced}}
    assert sorted((name, way) for name, way, *_ in shown["marks"]) == sorted(priced | unpriced)
    for name, way, x, y in shown["marks"]:
        assert y == pytest.approx(place(shown["y"], fitting[name].tokens_per_s), abs=1.5)
        assert way == "unpriced" or x == pytest.approx(place(shown["x"], prices[name][way]), abs=1.5)
    assert sorted(name for name, *_ in shown["prices"]) == sorted(name for name, by_way in prices.items() if by_way["rented"])
    for name, way, *ends, y in shown["prices"]:
        usds = fitting[name].per_million_range(way == "bought")
        assert ends == pytest.approx([place(shown["x"], usd) for usd in usds], abs=2)
        assert y == pytest.approx(place(shown["y"], fitting[name].tokens_per_s), abs=1.5)


def place(ticks: list[tuple[str, float]], value: float) -> float:
    """Interpolate the position of a value on the axis: linear if it begins at 0, else logarithmic."""
    (low, start), (high, end) = ((float(tick), position) for tick, position in (ticks[0], ticks[-1]))
    low, high, value = (low, high, value) if low == 0 else (log(low), log(high), log(value))
    return start + (end - start) * (value - low) / (high - low)


def test_a_grid_has_the_largest_model_of_each_memory() -> None:
    models = [("adamw", 32), ("adamw", 64, "qwen-7b", 7 * 10**9, 1234.4), ("lion", 32, "qwen-3b", 3 * 10**9, 99.0)]
    fits = [Fit("g", "m", n * GB, "qwen", hourly(H200), True, optimizer, *model) for optimizer, n, *model in models]
    text = Page(fits_page(fits, ("optimizer", "model"), [("adamw", "qwen-7b")], SEMANTICS, ["left out"], "today")).text
    assert "g family 32 GB m 64 GB m qwen, adamw none fits qwen-7b 1,234 qwen, lion qwen-3b 99 no larger one left out" in text
