"""Own measured steps and rows of peers: their pages, the fit that leaves a step out, and jobs of published rows."""

import json
import math
import re

import pytest

from benchmarks import peers
from benchmarks.common import conformal_factor
from benchmarks.own_steps import KERNELS, Predicted, Row, fitted, judged, priors, read_steps, rented, unprobed_factor
from penstock.hwprofiles.schema import read_profile
from penstock.planner.predict.uncertainty import UNPROBED_P90
from tests.tour import ROOT

ACCURACY = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
PEERS = (ROOT / "docs" / "benchmarks" / "peers_2026-11-29.md").read_text(encoding="utf-8")


def test_the_page_has_every_own_step_and_counts_those_that_are_held() -> None:
    steps, unplanned = read_steps()
    rows = {step.name: re.findall(rf"^\| {re.escape(step.name)} \|(.*)\|$", ACCURACY, re.M) for step in steps}
    assert {name: len(matches) for name, matches in rows.items()} == dict.fromkeys(rows, 1)
    n_held, beyond = [0, 0], []
    for step in steps:
        measured, left_out, error, left_out_held, today, ratio, today_held, _ = (c.strip() for c in rows[step.name][0].split("|"))
        predicted_s = float(left_out.split()[0])
        assert float(measured) == pytest.approx(step.measured_s, rel=1e-3)
        assert predicted_s / step.measured_s - 1 == pytest.approx(float(error.rstrip("%")) / 100, abs=0.01)
        for i, (cell, is_held) in enumerate(((left_out, left_out_held), (today, today_held))):
            _, low_s, high_s = map(float, re.findall(r"[\d.]+", cell))
            assert is_held == ("yes" if low_s <= step.measured_s <= high_s else "no")
            n_held[i] += is_held == "yes"
        beyond += [] if "system" in step.fields else [float(ratio)]
    counts = f"of `today` hold {n_held[1]} of {len(steps)} (wanted: 75 to 90 %), of `without it` {n_held[0]};"
    assert counts in " ".join(ACCURACY.split())
    assert 0.75 <= n_held[1] / len(steps) <= 0.9, "what `plan` promises today"
    assert math.ceil(100 * max(beyond)) / 100 == UNPROBED_P90, "the planner's factor is that of the page"
    assert all(name in ACCURACY for name in unplanned)


def test_a_fit_finds_a_rate_that_all_steps_agree_on_and_ignores_a_step_that_is_left_out() -> None:
    steps = read_steps()[0][:4]
    of_products, actual = 0.8, 2 * KERNELS[0].prior

    def made_up(measured_s):  # the step as a function of the first rate, exact at `actual`
        return lambda values: measured_s * (of_products + (1 - of_products) * actual / values[KERNELS[0].name])

    simulators = {step.name: made_up(step.measured_s) for step in steps}
    rates = fitted(steps, simulators)
    assert rates[KERNELS[0].name] == pytest.approx(actual, rel=0.1)
    assert [rates[c.name] for c in KERNELS[1:]] == [c.prior for c in KERNELS[1:]]
    wrong = simulators | {steps[0].name: lambda values: 10 * made_up(1.0)(values)}
    assert fitted(steps[1:], wrong) == fitted(steps[1:], simulators)
    assert fitted([], simulators) == pytest.approx(priors())


def test_p90_moves_by_the_ratios_of_the_other_steps_alone() -> None:
    steps = read_steps()[0]
    beyond = [1.0 + 0.01 * i for i in range(len(steps))]  # measured over P90; the last two are of another system
    predictions = [Predicted(1.0, 0.5, step.measured_s / ratio) for step, ratio in zip(steps, beyond, strict=True)]
    rows = [Row(step, p, p, p) for step, p in zip(steps, predictions, strict=True)]
    plans = [row for row in rows if "system" not in row.step.fields]
    assert unprobed_factor(rows) == pytest.approx(1.07), "the largest of eight plans"
    result = judged(rows)
    moved = {row.step.name: row.today.high_s / raw.today.high_s for row, raw in zip(result, rows, strict=True)}
    largest = plans[-1].step.name
    assert moved[largest] == pytest.approx(1.06)
    assert {name: factor for name, factor in moved.items() if name != largest} == pytest.approx(
        {row.step.name: 1.07 if row in plans else 1.0 for row in rows if row.step.name != largest}
    )
    assert all(row.probed == raw.probed for row, raw in zip(result, rows, strict=True)), "a probed profile keeps its interval"


def test_the_conformal_factor_is_the_ratio_of_its_rank() -> None:
    assert conformal_factor([]) == conformal_factor([0.7, 0.9]) == 1.0, "never narrower"
    assert conformal_factor([1.2, 1.1]) == 1.2
    assert conformal_factor(1 + 0.01 * i for i in range(1, 20)) == pytest.approx(1.18), "rank 18 of 19"


def test_a_rented_machine_has_its_cores_and_their_share_of_the_hosts_memory() -> None:
    profile = read_profile("h100-sxm")
    part = rented(profile)
    assert part.host.n_cores == 14
    assert part.host.dram_bytes_per_s.value / profile.host.dram_bytes_per_s.value == pytest.approx(14 / profile.host.n_cores)
    assert part.device == profile.device
    assert rented(profile, priors()).device.fused_bytes_per_s.value == pytest.approx(0.44 * profile.device.memory_bytes_per_s.value)


def test_every_published_row_is_on_the_page_with_a_plan_or_a_reason() -> None:
    published = json.loads(peers.ROWS.read_text())["rows"]
    planned = [line for line in PEERS.splitlines() if re.match(r"\| \S+.* \| \d+[\d,]* \(", line)]
    reasons = PEERS.partition("## Rows without a plan")[2].strip().splitlines()
    assert len(planned) + len(reasons) == len(published)
    faster = sum("| ours |" in line for line in planned)
    assert f"faster one in {faster} of {len(planned)} rows" in PEERS


def test_the_page_counts_the_rates_that_both_intervals_hold() -> None:
    lines = [
        [c.strip() for c in line.split("|")[1:-1]] for line in PEERS.splitlines() if re.match(r"\| \S+.*, bf16 \| \S+ \|", line)
    ]
    held = {6: 0, 7: 0}
    for cells in lines:
        published, *_ = numbers(cells[4])
        for column in held:
            low, high = numbers(cells[column])
            held[column] += low <= published <= high
    text = f"P10 to P90 hold {held[6]} of the {len(lines)} rates in bf16, those of a peer {held[7]} (wanted: 75 to 90 %)."
    assert text in " ".join(PEERS.split())
    assert 0.75 <= held[7] / len(lines) <= 0.9


def test_the_page_of_intervals_adds_up_the_other_pages() -> None:
    text = (ROOT / "docs" / "benchmarks" / "intervals_2026-11-29.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (\d+) \| (\d+)(?: \(\d+ %\))? \| (\d+)(?: \(\d+ %\))? \|$", text, re.M)
    *parts, total = [tuple(map(int, row)) for row in rows]
    assert total == tuple(map(sum, zip(*parts, strict=True)))
    of_steps = re.search(r"of `today` hold (\d+) of (\d+) .*? spreads alone hold (\d+) and", " ".join(ACCURACY.split()))
    of_plan = re.search(r"P10 to P90 hold (\d+) of the (\d+) rates in bf16, those of a peer (\d+)", PEERS)
    assert parts[0] == (int(of_steps[2]), int(of_steps[1]), int(of_steps[3]))
    assert parts[2][:2] == (int(of_plan[2]), int(of_plan[3]))
    share = re.search(r"and (\d+)% where each run is left out", " ".join(ACCURACY.split()))
    assert round(100 * parts[1][1] / parts[1][0]) == int(share[1])
    assert f"other systems, {of_plan[1]} of the {of_plan[2]} rows are held" in " ".join(text.split())
    assert all(0.75 <= held / n <= 0.9 for n, held, _ in (*parts, total))


def numbers(cell: str) -> list[float]:
    return [float(text.replace(",", "")) for text in cell.split(" to ")]


def test_the_interval_of_a_peer_has_the_factors_of_other_systems_alone() -> None:
    slow, fast = (
        peers.Cell("", name, published, 100.0, 90.0, 110.0, True) for name, published in (("slow", 45.0), ("fast", 121.0))
    )
    fp8 = peers.Cell("", "other", 1.0, 100.0, 90.0, 110.0, False)
    moved = peers.of_peers([slow, slow, fast, fp8])
    assert [(cell.low, cell.high) for cell in moved] == [
        (90.0, pytest.approx(121)), (90.0, pytest.approx(121)), (45.0, 110.0), (45.0, pytest.approx(121)),
    ]  # fmt: skip
    assert [cell.is_held for cell in moved] == [False, False, False, False]


def test_a_published_row_becomes_the_same_job_or_a_reason() -> None:
    row = {"system": "x", "what": "full", "gpu": "H100", "model": "qwen3-8b", "seq": 1024, "batch": 8, "tokens_per_s": 1.0}
    assert peers.job_of(row) == ("h100-sxm", "qwen3-8b", (("seq_len", 1024), ("batch_size", 8)), ())
    in_fp8 = peers.job_of(row | {"compute": "fp8"})
    assert (dict(in_fp8.arguments)["compute_dtype"], in_fp8.differs) == (
        "fp8",
        ("ours: a scale per row, weight gradients in bf16",),
    )
    lora = peers.job_of(row | {"what": "qlora nf4 r16 attention+experts", "compute": "fp8"})
    assert dict(lora.arguments)["train"] == peers.EXPERTS
    assert dict(lora.arguments)["base"] == "nf4"
    assert lora.differs == ("it computes in fp8, ours in bf16",)
    assert "no profile" in peers.job_of(row | {"gpu": "RTX 5090 Laptop 24GB"})
    assert peers.job_of(row | {"tokens_per_s": None}) == "tokens/s are not published"
    assert "not published" in peers.job_of(row | {"batch": None})
